//! Routes under `/v1`.
#![forbid(unsafe_code)]

use axum::response::Response;
use utoipa_axum::router::OpenApiRouter;
use utoipa_axum::routes;

use super::refuse::{Generation, NotRun};
use super::wire::{CodeInfoData, ExecuteDataV1, ExecuteRequest};
use super::{Context, files_v1};
use crate::server::answer::Envelope;
use crate::server::body::JsonBytes;
use crate::server::{AppState, info};

pub(super) fn routes() -> OpenApiRouter<AppState> {
    OpenApiRouter::new()
        .routes(routes!(execute))
        .routes(routes!(code_info))
        .merge(files_v1::routes())
        .merge(info::v1_routes())
        .merge(super::commands::v1_routes())
}

/// Run a cell. A failed cell is a 200 with `success: false`.
#[utoipa::path(
    post, path = "/v1/code/execute", tag = "code", operation_id = "v1_code_execute",
    request_body = ExecuteRequest,
    responses(
        (status = 200, body = Envelope<ExecuteDataV1>, description = "The code was run, whatever it did"),
        NotRun,
    )
)]
async fn execute(Context(state, tenant): Context, JsonBytes(body): JsonBytes) -> Response {
    match ExecuteRequest::parse(&body, Generation::V1, state.config()) {
        Ok(request) => {
            let cell = request.into_cell(tenant, state.config());
            super::run_cell::<ExecuteDataV1>(&state, cell, Generation::V1).await
        }
        Err(invalid) => invalid.answer(Generation::V1),
    }
}

/// What the code routes offer.
#[utoipa::path(
    get, path = "/v1/code/info", tag = "code", operation_id = "v1_code_info",
    responses((status = 200, body = Envelope<CodeInfoData>, description = "Languages, versions, limits"))
)]
async fn code_info(Context(state, tenant): Context) -> Response {
    super::code_info(&state, &tenant).await
}
