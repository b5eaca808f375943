//! What the sandbox's interpreters can import.
#![forbid(unsafe_code)]

use axum::http::{StatusCode, Uri};
use axum::response::{IntoResponse, Response};
use utoipa_axum::router::OpenApiRouter;
use utoipa_axum::routes;

use super::super::Context;
use super::super::refuse::{self, Generation, Invalid, InvalidBody, RefusedBody};
use super::refusal;
use crate::commands::Runtime;
use crate::engine::TenantId;
use crate::server::AppState;
use crate::server::answer::Envelope;
use crate::server::fields::FieldError;

pub(super) fn v1_routes() -> OpenApiRouter<AppState> {
    OpenApiRouter::new().routes(routes!(python)).routes(routes!(nodejs))
}

pub(super) fn v2_routes() -> OpenApiRouter<AppState> {
    OpenApiRouter::new().routes(routes!(packages))
}

/// Python packages, one `  - name==version` a line.
#[utoipa::path(
    get, path = "/v1/sandbox/packages/python", tag = "info",
    responses((status = 200, body = Envelope<String>), (status = 503, body = RefusedBody))
)]
async fn python(Context(state, tenant): Context) -> Response {
    list(&state, &tenant, Runtime::Python, Generation::V1).await
}

/// Node.js packages: a line of its own, then one `  - name@version` a line.
#[utoipa::path(
    get, path = "/v1/sandbox/packages/nodejs", tag = "info",
    responses((status = 200, body = Envelope<String>), (status = 503, body = RefusedBody))
)]
async fn nodejs(Context(state, tenant): Context) -> Response {
    list(&state, &tenant, Runtime::Node, Generation::V1).await
}

/// Packages of one language, as text.
#[utoipa::path(
    get, path = "/v2/sandbox/packages", tag = "info",
    params(("lang" = String, Query, description = "`python` or `nodejs`")),
    responses(
        (status = 200, body = Envelope<String>),
        (status = 400, body = RefusedBody),
        (status = 422, body = InvalidBody),
        (status = 503, body = RefusedBody),
    )
)]
async fn packages(Context(state, tenant): Context, uri: Uri) -> Response {
    let pairs = uri.query().unwrap_or_default().split('&').filter_map(|pair| pair.split_once('='));
    match pairs.filter(|(name, _)| *name == "lang").map(|(_, value)| value).next_back() {
        Some("python") => list(&state, &tenant, Runtime::Python, Generation::V2).await,
        Some("nodejs") => list(&state, &tenant, Runtime::Node, Generation::V2).await,
        Some(other) => {
            let quoted: String = other.chars().take(100).collect();
            let message = format!("unknown lang {quoted:?}: expected python or nodejs");
            refuse::refused(StatusCode::BAD_REQUEST, message, None)
        }
        None => Invalid::schema(vec![FieldError {
            location: vec!["query", "lang"],
            message: "missing field `lang`".to_owned(),
            kind: "value_error.missing",
        }])
        .answer(Generation::V2),
    }
}

async fn list(state: &AppState, tenant: &TenantId, runtime: Runtime, generation: Generation) -> Response {
    match state.commands().packages(tenant, runtime).await {
        Ok(text) => Envelope::ok(text).into_response(),
        Err(refused) => refusal(refused, generation),
    }
}
