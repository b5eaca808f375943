//! `/v2/commands`.
#![forbid(unsafe_code)]

use axum::Extension;
use axum::extract::State;
use axum::http::{HeaderMap, StatusCode, Uri};
use axum::response::{IntoResponse, Response};
use serde_json::Value;
use utoipa::ToSchema;
use utoipa_axum::router::OpenApiRouter;
use utoipa_axum::routes;

use super::super::PathId;
use super::super::refuse::{self, Generation, InvalidBody, RefusedBody};
use super::wire::{
    Body, CommandOutputData, CommandRequest, CommandRunData, CommandSessionData, CommandSessionRequest,
    NoRun, create_request, output_query, run_request,
};
use super::{done, output, refusal, run};
use crate::commands::{Refused, parse_signal};
use crate::engine::TenantId;
use crate::server::AppState;
use crate::server::answer::Envelope;
use crate::server::body::JsonBytes;

const THIS: Generation = Generation::V2;

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
    State(state): State<AppState>,
    Extension(tenant): Extension<TenantId>,
    headers: HeaderMap,
    JsonBytes(body): JsonBytes,
) -> Response {
    match run_request(&body) {
        Ok(ask) => run(&state, &tenant, ask, &headers, THIS).await,
        Err(NoRun::Invalid(invalid)) => invalid.answer(THIS),
        Err(NoRun::Args) => {
            refuse::refused(StatusCode::BAD_REQUEST, "args can be given with shell \"none\" only", None)
        }
        Err(NoRun::NoShell(name)) => refusal(Refused::NoShell(name), THIS),
    }
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
    responses(
        (status = 200, body = Envelope<CommandOutputData>),
        (status = 404, body = RefusedBody),
        (status = 422, body = InvalidBody),
    )
)]
async fn read_output(
    State(state): State<AppState>,
    Extension(tenant): Extension<TenantId>,
    PathId(id): PathId,
    uri: Uri,
) -> Response {
    let ask = match output_query(uri.query()) {
        Ok(ask) => ask,
        Err(invalid) => return invalid.answer(THIS),
    };
    match state.commands().command(&tenant, &id) {
        Ok(command) => output(&command, &ask, THIS).await,
        Err(refused) => refusal(refused, THIS),
    }
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
        (status = 404, body = RefusedBody),
        (status = 422, body = InvalidBody),
        (status = 429, body = RefusedBody, description = "It has not read what was written before"),
    )
)]
async fn write_input(
    State(state): State<AppState>,
    Extension(tenant): Extension<TenantId>,
    PathId(id): PathId,
    JsonBytes(body): JsonBytes,
) -> Response {
    let input = Body::parse(&body, &["input"]).and_then(|mut body| {
        let input = body.fields.required_text("input").unwrap_or_default();
        body.check().map(|()| input)
    });
    let input = match input {
        Ok(input) => input,
        Err(invalid) => return invalid.answer(THIS),
    };
    let command = state.commands().command(&tenant, &id);
    match command.and_then(|command| command.input(input.as_bytes())) {
        Ok(()) => done(),
        Err(refused) => refusal(refused, THIS),
    }
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
        (status = 404, body = RefusedBody),
        (status = 422, body = InvalidBody),
    )
)]
async fn kill(
    State(state): State<AppState>,
    Extension(tenant): Extension<TenantId>,
    PathId(id): PathId,
    JsonBytes(body): JsonBytes,
) -> Response {
    let signal = Body::parse(&body, &["signal"]).and_then(|mut body| {
        let signal = body.fields.text("signal").unwrap_or_else(|| "SIGTERM".to_owned());
        body.check().map(|()| signal)
    });
    let signal = match signal {
        Ok(signal) => signal,
        Err(invalid) => return invalid.answer(THIS),
    };
    let command = state.commands().command(&tenant, &id);
    let sent = command.and_then(|command| command.signal(parse_signal(&signal)?));
    match sent {
        Ok(()) => done(),
        Err(refused) => refusal(refused, THIS),
    }
}

/// Open a session ahead of its first command. An id that exists answers with that session.
#[utoipa::path(
    post, path = "/v2/commands/sessions", tag = "commands",
    request_body(content = Option<CommandSessionRequest>),
    responses(
        (status = 200, body = Envelope<CommandSessionData>),
        (status = 400, body = RefusedBody, description = "An account or folder that cannot be had"),
        (status = 422, body = InvalidBody),
        (status = 429, body = RefusedBody),
        (status = 503, body = RefusedBody),
    )
)]
async fn create_session(
    State(state): State<AppState>,
    Extension(tenant): Extension<TenantId>,
    JsonBytes(body): JsonBytes,
) -> Response {
    let create = match create_request(&body) {
        Ok(create) => create,
        Err(invalid) => return invalid.answer(THIS),
    };
    match state.commands().session_create(&tenant, create).await {
        Ok(info) => Envelope::ok(CommandSessionData::from(info)).into_response(),
        Err(refused) => refusal(refused, THIS),
    }
}

/// Every session of the caller.
#[utoipa::path(
    get, path = "/v2/commands/sessions", tag = "commands",
    responses((status = 200, body = Envelope<Vec<CommandSessionData>>))
)]
async fn list_sessions(State(state): State<AppState>, Extension(tenant): Extension<TenantId>) -> Response {
    let sessions = state.commands().sessions_list(&tenant).into_iter().map(CommandSessionData::from);
    Envelope::ok(sessions.collect::<Vec<_>>()).into_response()
}

/// End a session and all it runs.
#[utoipa::path(
    delete, path = "/v2/commands/sessions/{session_id}", tag = "commands",
    params(("session_id" = String, Path, description = "Session id, percent-encoded")),
    responses((status = 200, body = Envelope<Value>), (status = 404, body = RefusedBody))
)]
async fn delete_session(
    State(state): State<AppState>,
    Extension(tenant): Extension<TenantId>,
    PathId(id): PathId,
) -> Response {
    match state.commands().session_delete(&tenant, &id) {
        Ok(()) => done(),
        Err(refused) => refusal(refused, THIS),
    }
}
