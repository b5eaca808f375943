//! Routes under `/v2`.
#![forbid(unsafe_code)]

use axum::Extension;
use axum::http::{HeaderMap, StatusCode};
use axum::response::{IntoResponse, Response};
use utoipa_axum::router::OpenApiRouter;
use utoipa_axum::routes;

use super::refuse::{self, Generation, NotOpened, NotRun, RefusedBody};
use super::stream::{self, Format};
use super::wire::{
    Cleaned, CodeInfoData, CreateSessionRequest, Deleted, ExecuteDataV2, ExecuteRequest, SessionData,
    SessionList, failed_reason,
};
use super::{Context, PathId, files_v2};
use crate::engine::Tiers;
use crate::server::answer::Envelope;
use crate::server::body::JsonBytes;
use crate::server::code::NotCreated;
use crate::server::crowd::Seat;
use crate::server::{AppState, info};

pub(super) fn routes() -> OpenApiRouter<AppState> {
    OpenApiRouter::new()
        .routes(routes!(execute))
        .routes(routes!(code_info))
        .routes(routes!(create_session, list_sessions, clear_sessions))
        .routes(routes!(get_session, delete_session))
        .merge(files_v2::routes())
        .merge(info::v2_routes())
        .merge(super::commands::v2_routes())
}

/// Run a cell. A failed cell is a 200 with `success: false`. With `Accept: text/event-stream` or
/// `application/x-ndjson` its outputs are sent while it runs, the whole answer last.
#[utoipa::path(
    post, path = "/v2/code/execute", tag = "code", operation_id = "v2_code_execute",
    request_body = ExecuteRequest,
    responses(
        (status = 200, body = Envelope<ExecuteDataV2>, description = "The code was run, whatever it did"),
        NotRun,
    )
)]
async fn execute(
    Context(state, tenant): Context,
    seat: Option<Extension<Seat>>,
    headers: HeaderMap,
    JsonBytes(body): JsonBytes,
) -> Response {
    let cell = match ExecuteRequest::parse(&body, Generation::V2, state.config()) {
        Ok(request) => request.into_cell(tenant, state.config()),
        Err(invalid) => return invalid.answer(Generation::V2),
    };
    match Format::asked(&headers) {
        Some(format) => stream::execute(&state, cell, format, seat.map(|Extension(seat)| seat)).await,
        None => super::run_cell::<ExecuteDataV2>(&state, cell, Generation::V2).await,
    }
}

/// What the code routes offer.
#[utoipa::path(
    get, path = "/v2/code/info", tag = "code", operation_id = "v2_code_info",
    responses((status = 200, body = Envelope<CodeInfoData>, description = "Languages, versions, limits"))
)]
async fn code_info(Context(state, tenant): Context) -> Response {
    super::code_info(&state, &tenant).await
}

/// Open a session ahead of its first cell. An id that exists answers with that session.
#[utoipa::path(
    post, path = "/v2/code/sessions", tag = "sessions",
    request_body(content = Option<CreateSessionRequest>),
    responses((status = 200, body = Envelope<SessionData>), NotOpened)
)]
async fn create_session(Context(state, tenant): Context, JsonBytes(body): JsonBytes) -> Response {
    let new = match CreateSessionRequest::parse(&body) {
        Ok(request) => request.into_new(),
        Err(invalid) => return invalid.answer(Generation::V2),
    };
    match state.code().session_create(&tenant, new).await {
        Ok((entry, _)) => Envelope::ok(SessionData::new(entry, state.config())).into_response(),
        Err(NotCreated::Refused(refusal)) => refuse::refusal(refusal, Generation::V2),
        Err(NotCreated::Failed(execution)) => {
            refuse::refused(StatusCode::OK, failed_reason(&execution), execution.hint.as_deref())
        }
    }
}

/// Every session of the caller, by id.
#[utoipa::path(
    get, path = "/v2/code/sessions", tag = "sessions",
    responses((status = 200, body = Envelope<SessionList>))
)]
async fn list_sessions(Context(state, tenant): Context) -> Response {
    let sessions = state.code().sessions_list(&tenant, Tiers::All);
    let sessions =
        sessions.into_iter().map(|(key, entry)| (key, SessionData::new(entry, state.config()))).collect();
    Envelope::ok(SessionList { sessions }).into_response()
}

/// End every session of the caller.
#[utoipa::path(
    delete, path = "/v2/code/sessions", tag = "sessions",
    responses((status = 200, body = Envelope<Cleaned>))
)]
async fn clear_sessions(Context(state, tenant): Context) -> Response {
    let cleaned_sessions = state.code().sessions_clear(&tenant, Tiers::All).await;
    Envelope::ok(Cleaned { cleaned_sessions }).into_response()
}

/// One session.
#[utoipa::path(
    get, path = "/v2/code/sessions/{id}", tag = "sessions",
    params(("id" = String, Path, description = "Session id, percent-encoded")),
    responses((status = 200, body = Envelope<SessionData>), (status = 404, body = RefusedBody))
)]
async fn get_session(Context(state, tenant): Context, PathId(id): PathId) -> Response {
    match state.code().session_get(&tenant, Tiers::All, &id) {
        Some(entry) => Envelope::ok(SessionData::new(entry, state.config())).into_response(),
        None => refuse::refused(StatusCode::NOT_FOUND, format!("No session '{id}'"), None),
    }
}

/// End a session and the cell it runs. An unknown one is `deleted: false`.
#[utoipa::path(
    delete, path = "/v2/code/sessions/{id}", tag = "sessions",
    params(("id" = String, Path, description = "Session id, percent-encoded")),
    responses((status = 200, body = Envelope<Deleted>))
)]
async fn delete_session(Context(state, tenant): Context, PathId(id): PathId) -> Response {
    let deleted = state.code().session_delete(&tenant, Tiers::All, &id).await;
    Envelope::ok(Deleted { deleted }).into_response()
}
