//! `/v1/bash`: the same commands and sessions in the words of the first generation.
#![forbid(unsafe_code)]

use axum::http::HeaderMap;
use axum::response::{IntoResponse, Response};
use serde_json::Value;
use utoipa::ToSchema;
use utoipa_axum::router::OpenApiRouter;
use utoipa_axum::routes;

use super::super::refuse::{Generation, InvalidBody, NotFound, NotOpened, RefusedBody};
use super::super::{Context, PathId};
use super::wire::{
    BashCreateRequest, BashOutputRequest, BashRequest, Body, CommandOutputData, CommandRunData,
    CommandSessionData, bash_create_request, bash_output_request, bash_request,
};
use super::{No, done, output, run};
use crate::commands::parse_signal;
use crate::server::AppState;
use crate::server::answer::Envelope;
use crate::server::body::JsonBytes;

const THIS: Generation = Generation::V1;
type Answered = Result<Response, No<1>>;

pub(super) fn routes() -> OpenApiRouter<AppState> {
    OpenApiRouter::new()
        .routes(routes!(exec))
        .routes(routes!(read_output))
        .routes(routes!(write_input))
        .routes(routes!(kill))
        .routes(routes!(create_session))
        .routes(routes!(list_sessions))
        .routes(routes!(close_session))
}

/// Run a command. One that fails is a 200 with its exit code.
#[utoipa::path(
    post, path = "/v1/bash/exec", tag = "bash", operation_id = "v1_bash_exec",
    request_body = BashRequest,
    responses(
        (status = 200, body = Envelope<CommandRunData>, description = "It was run, whatever it did"),
        (status = 400, body = RefusedBody, description = "An account or folder that cannot be had"),
        (status = 422, body = InvalidBody, description = "The request does not say what to run"),
        (status = 429, body = RefusedBody, description = "One session or command too many"),
        (status = 503, body = RefusedBody, description = "No shell; nothing was started"),
    )
)]
async fn exec(Context(state, tenant): Context, headers: HeaderMap, JsonBytes(body): JsonBytes) -> Answered {
    Ok(run(&state, &tenant, bash_request(&body)?, &headers, THIS).await?)
}

/// Output of a session's command from the given offsets on, and its state.
#[utoipa::path(
    post, path = "/v1/bash/output", tag = "bash", operation_id = "v1_bash_output",
    request_body = BashOutputRequest,
    responses((status = 200, body = Envelope<CommandOutputData>), NotFound)
)]
async fn read_output(Context(state, tenant): Context, JsonBytes(body): JsonBytes) -> Answered {
    let (session, command, ask) = bash_output_request(&body)?;
    let command = state.commands().command_of(&tenant, &session, command.as_deref())?;
    Ok(output(&command, &ask, THIS).await)
}

/// What to write.
#[derive(ToSchema)]
#[expect(dead_code, reason = "the document's shape of a body that is read field by field")]
struct BashInputRequest {
    session_id: String,
    /// Absent: the one that runs.
    command_id: Option<String>,
    /// As it is: no line end is added.
    input: String,
}

/// Write to the standard input of a session's command.
#[utoipa::path(
    post, path = "/v1/bash/write", tag = "bash", operation_id = "v1_bash_write",
    request_body = BashInputRequest,
    responses(
        (status = 200, body = Envelope<Value>),
        (status = 400, body = RefusedBody, description = "It has ended"),
        NotFound,
        (status = 429, body = RefusedBody, description = "It has not read what was written before"),
    )
)]
async fn write_input(Context(state, tenant): Context, JsonBytes(body): JsonBytes) -> Answered {
    let mut body = Body::parse(&body, &["session_id", "command_id", "input"])?;
    let session = body.fields.required_text("session_id").unwrap_or_default();
    let input = body.fields.required_text("input").unwrap_or_default();
    let command = body.fields.text("command_id");
    body.check()?;
    state.commands().command_of(&tenant, &session, command.as_deref())?.input(input.as_bytes())?;
    Ok(done())
}

/// Which signal.
#[derive(ToSchema)]
#[expect(dead_code, reason = "the document's shape of a body that is read field by field")]
struct BashKillRequest {
    session_id: String,
    /// Absent: the one that runs.
    command_id: Option<String>,
    /// Default `SIGTERM`.
    signal: Option<String>,
}

/// Send a signal to a session's command and what it started.
#[utoipa::path(
    post, path = "/v1/bash/kill", tag = "bash", operation_id = "v1_bash_kill",
    request_body = BashKillRequest,
    responses(
        (status = 200, body = Envelope<Value>),
        (status = 400, body = RefusedBody, description = "It has ended, or there is no such signal"),
        NotFound,
    )
)]
async fn kill(Context(state, tenant): Context, JsonBytes(body): JsonBytes) -> Answered {
    let mut body = Body::parse(&body, &["session_id", "command_id", "signal"])?;
    let session = body.fields.required_text("session_id").unwrap_or_default();
    let command = body.fields.text("command_id");
    let signal = body.fields.text("signal").unwrap_or_else(|| "SIGTERM".to_owned());
    body.check()?;
    let command = state.commands().command_of(&tenant, &session, command.as_deref())?;
    command.signal(parse_signal(&signal)?)?;
    Ok(done())
}

/// Open a session ahead of its first command. An id that exists answers with that session.
#[utoipa::path(
    post, path = "/v1/bash/sessions/create", tag = "bash", operation_id = "v1_bash_create_session",
    request_body(content = Option<BashCreateRequest>),
    responses(
        (status = 200, body = Envelope<CommandSessionData>),
        (status = 400, body = RefusedBody, description = "A folder that is none"),
        NotOpened,
    )
)]
async fn create_session(Context(state, tenant): Context, JsonBytes(body): JsonBytes) -> Answered {
    let info = state.commands().session_create(&tenant, bash_create_request(&body)?).await?;
    Ok(Envelope::ok(CommandSessionData::from(info)).into_response())
}

/// Every session of the caller.
#[utoipa::path(
    get, path = "/v1/bash/sessions", tag = "bash", operation_id = "v1_bash_sessions",
    responses((status = 200, body = Envelope<Vec<CommandSessionData>>))
)]
async fn list_sessions(Context(state, tenant): Context) -> Response {
    let sessions = state.commands().sessions_list(&tenant).into_iter().map(CommandSessionData::from);
    Envelope::ok(sessions.collect::<Vec<_>>()).into_response()
}

/// End a session and all it runs.
#[utoipa::path(
    post, path = "/v1/bash/sessions/{session_id}/close", tag = "bash", operation_id = "v1_bash_close_session",
    params(("session_id" = String, Path, description = "Session id, percent-encoded")),
    responses((status = 200, body = Envelope<Value>), (status = 404, body = RefusedBody))
)]
async fn close_session(Context(state, tenant): Context, PathId(id): PathId) -> Answered {
    state.commands().session_delete(&tenant, &id)?;
    Ok(done())
}
