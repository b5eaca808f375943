//! `/v2/commands`.
#![forbid(unsafe_code)]

use axum::http::{HeaderMap, StatusCode, Uri};
use axum::response::{IntoResponse, Response};
use serde_json::Value;
use utoipa::ToSchema;
use utoipa_axum::router::OpenApiRouter;
use utoipa_axum::routes;

use super::super::refuse::{self, Generation, InvalidBody, NotFound, NotOpened, RefusedBody};
use super::super::{Context, PathId};
use super::wire::{
    Body, CommandOutputData, CommandRequest, CommandRunData, CommandSessionData, CommandSessionRequest,
    NoRun, create_request, output_query, run_request,
};
use super::{No, done, output, run};
use crate::commands::{Refused, parse_signal};
use crate::server::AppState;
use crate::server::answer::Envelope;
use crate::server::body::JsonBytes;

const THIS: Generation = Generation::V2;
type Answered = Result<Response, No<2>>;

pub(super) fn routes() -> OpenApiRouter<AppState> {
    OpenApiRouter::new()
        .routes(routes!(execute))
        .routes(routes!(create_session, list_sessions))
        .routes(routes!(delete_session))
        .routes(routes!(read_output))
        .routes(routes!(write_input))
        .routes(routes!(kill))
}

/// Run a command. One that fails is a 200 with its exit code.
#[utoipa::path(
    post, path = "/v2/commands", tag = "commands", operation_id = "v2_commands_run",
    request_body = CommandRequest,
    responses(
        (status = 200, body = Envelope<CommandRunData>, description = "It was run, whatever it did. With \
            `Accept: application/x-ndjson`: a frame a line, as things happen"),
        (status = 400, body = RefusedBody, description = "`args` with a shell, or an account or folder that cannot be had"),
        (status = 422, body = InvalidBody, description = "The request does not say what to run"),
        (status = 429, body = RefusedBody, description = "One session or command too many"),
        (status = 503, body = RefusedBody, description = "No such shell; nothing was started"),
    )
)]
async fn execute(
    Context(state, tenant): Context,
    headers: HeaderMap,
    JsonBytes(body): JsonBytes,
) -> Answered {
    let ask = match run_request(&body) {
        Ok(ask) => ask,
        Err(NoRun::Invalid(invalid)) => return Err(invalid.into()),
        Err(NoRun::Args) => {
            let message = "args can be given with shell \"none\" only";
            return Ok(refuse::refused(StatusCode::BAD_REQUEST, message, None));
        }
        Err(NoRun::NoShell(name)) => return Err(Refused::NoShell(name).into()),
    };
    Ok(run(&state, &tenant, ask, &headers, THIS).await?)
}

/// Output of a command from the given offsets on, and its state.
#[utoipa::path(
    get, path = "/v2/commands/{command_id}", tag = "commands",
    params(
        ("command_id" = String, Path),
        ("offset" = Option<u64>, Query, description = "Bytes of stdout already read"),
        ("stderr_offset" = Option<u64>, Query, description = "Bytes of stderr already read"),
        ("wait" = Option<bool>, Query, description = "Wait for new output or the end"),
        ("wait_timeout" = Option<f64>, Query, description = "Seconds; default 30"),
    ),
    responses((status = 200, body = Envelope<CommandOutputData>), NotFound)
)]
async fn read_output(Context(state, tenant): Context, PathId(id): PathId, uri: Uri) -> Answered {
    let ask = output_query(uri.query())?;
    let command = state.commands().command(&tenant, &id)?;
    Ok(output(&command, &ask, THIS).await)
}

/// What to write.
#[derive(ToSchema)]
#[expect(dead_code, reason = "the document's shape of a body that is read field by field")]
struct CommandInputRequest {
    /// As it is: no line end is added.
    input: String,
}

/// Write to a command's standard input.
#[utoipa::path(
    post, path = "/v2/commands/{command_id}/stdin", tag = "commands",
    params(("command_id" = String, Path)),
    request_body = CommandInputRequest,
    responses(
        (status = 200, body = Envelope<Value>),
        (status = 400, body = RefusedBody, description = "It has ended"),
        NotFound,
        (status = 429, body = RefusedBody, description = "It has not read what was written before"),
    )
)]
async fn write_input(
    Context(state, tenant): Context,
    PathId(id): PathId,
    JsonBytes(body): JsonBytes,
) -> Answered {
    let mut body = Body::parse(&body, &["input"])?;
    let input = body.fields.required_text("input").unwrap_or_default();
    body.check()?;
    state.commands().command(&tenant, &id)?.input(input.as_bytes())?;
    Ok(done())
}

/// Which signal.
#[derive(ToSchema)]
#[expect(dead_code, reason = "the document's shape of a body that is read field by field")]
struct CommandKillRequest {
    /// Default `SIGTERM`.
    signal: Option<String>,
}

/// Send a signal to a command and what it started.
#[utoipa::path(
    post, path = "/v2/commands/{command_id}/kill", tag = "commands",
    params(("command_id" = String, Path)),
    request_body(content = Option<CommandKillRequest>),
    responses(
        (status = 200, body = Envelope<Value>),
        (status = 400, body = RefusedBody, description = "It has ended, or there is no such signal"),
        NotFound,
    )
)]
async fn kill(Context(state, tenant): Context, PathId(id): PathId, JsonBytes(body): JsonBytes) -> Answered {
    let mut body = Body::parse(&body, &["signal"])?;
    let signal = body.fields.text("signal").unwrap_or_else(|| "SIGTERM".to_owned());
    body.check()?;
    state.commands().command(&tenant, &id)?.signal(parse_signal(&signal)?)?;
    Ok(done())
}

/// Open a session ahead of its first command. An id that exists answers with that session.
#[utoipa::path(
    post, path = "/v2/commands/sessions", tag = "commands",
    request_body(content = Option<CommandSessionRequest>),
    responses(
        (status = 200, body = Envelope<CommandSessionData>),
        (status = 400, body = RefusedBody, description = "An account or folder that cannot be had"),
        NotOpened,
    )
)]
async fn create_session(Context(state, tenant): Context, JsonBytes(body): JsonBytes) -> Answered {
    let info = state.commands().session_create(&tenant, create_request(&body)?).await?;
    Ok(Envelope::ok(CommandSessionData::from(info)).into_response())
}

/// Every session of the caller.
#[utoipa::path(
    get, path = "/v2/commands/sessions", tag = "commands",
    responses((status = 200, body = Envelope<Vec<CommandSessionData>>))
)]
async fn list_sessions(Context(state, tenant): Context) -> Response {
    let sessions = state.commands().sessions_list(&tenant).into_iter().map(CommandSessionData::from);
    Envelope::ok(sessions.collect::<Vec<_>>()).into_response()
}

/// End a session and all it runs.
#[utoipa::path(
    delete, path = "/v2/commands/sessions/{session_id}", tag = "commands",
    params(("session_id" = String, Path, description = "Session id, percent-encoded")),
    responses((status = 200, body = Envelope<Value>), (status = 404, body = RefusedBody))
)]
async fn delete_session(Context(state, tenant): Context, PathId(id): PathId) -> Answered {
    state.commands().session_delete(&tenant, &id)?;
    Ok(done())
}
