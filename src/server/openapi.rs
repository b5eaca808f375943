//! The OpenAPI documents. They are made from the same list of routes as the router, so a route
//! cannot be in one of them only.
#![forbid(unsafe_code)]

use std::collections::HashSet;

use axum::extract::State;
use axum::http::StatusCode;
use axum::response::Response;
use bytes::Bytes;
use utoipa::openapi::security::{ApiKey, ApiKeyValue, HttpAuthScheme, HttpBuilder, SecurityScheme};
use utoipa::openapi::{
    ComponentsBuilder, InfoBuilder, LicenseBuilder, OpenApi, OpenApiBuilder, SecurityRequirement,
};
use utoipa_axum::router::OpenApiRouter;
use utoipa_axum::routes;

use super::AppState;
use super::answer::json_bytes;

/// The documents as they are sent, rendered once.
pub(crate) struct Documents {
    /// Every route.
    whole: Bytes,
    /// Those under `/v2`.
    v2: Bytes,
}

impl Documents {
    /// `external`: the warning about cells that run elsewhere, which the description is to carry.
    pub(crate) fn of(mut document: OpenApi, external: Option<&str>) -> Documents {
        name_apart(&mut document);
        if let Some(external) = external {
            let said = document.info.description.take().unwrap_or_default();
            document.info.description = Some(format!("{said}. But {external}."));
        }
        let mut v2 = document.clone();
        v2.paths.paths.retain(|path, _| path.starts_with("/v2/"));
        Documents { whole: render(&document), v2: render(&v2) }
    }
}

/// Gives every operation a name of its own, as the format demands and generators of clients rely on: the first of a name
/// keeps it, others are called by their method and path. A family's routes are listed once and served twice.
fn name_apart(document: &mut OpenApi) {
    let mut taken = HashSet::new();
    for (path, item) in &mut document.paths.paths {
        let operations = [
            ("get", &mut item.get),
            ("head", &mut item.head),
            ("post", &mut item.post),
            ("put", &mut item.put),
            ("patch", &mut item.patch),
            ("delete", &mut item.delete),
        ];
        for (method, operation) in operations {
            let Some(operation) = operation else { continue };
            let given = operation.operation_id.take().unwrap_or_default();
            let own = match given.is_empty() || taken.contains(&given) {
                true => format!("{method}{}", path.replace(|c: char| !c.is_ascii_alphanumeric(), "_")),
                false => given,
            };
            taken.insert(own.clone());
            operation.operation_id = Some(own);
        }
    }
}

fn render(document: &OpenApi) -> Bytes {
    document.to_json().expect("a document is maps and strings").into()
}

/// What the document says before any route has been added.
pub(crate) fn base() -> OpenApi {
    let key = |name: &str| SecurityScheme::ApiKey(ApiKey::Header(ApiKeyValue::new(name)));
    let bearer = SecurityScheme::Http(HttpBuilder::new().scheme(HttpAuthScheme::Bearer).build());
    let components = ComponentsBuilder::new()
        .security_scheme("bearer", bearer)
        .security_scheme("api_key", key("x-api-key"));
    let none: [&str; 0] = [];
    OpenApiBuilder::new()
        .info(
            InfoBuilder::new()
                .title("caisson")
                .version(env!("CARGO_PKG_VERSION"))
                .description(Some(env!("CARGO_PKG_DESCRIPTION")))
                .license(Some(LicenseBuilder::new().name("MIT").build())),
        )
        .components(Some(components.build()))
        .security(Some([SecurityRequirement::new("bearer", none), SecurityRequirement::new("api_key", none)]))
        .build()
}

pub(crate) fn routes() -> OpenApiRouter<AppState> {
    OpenApiRouter::new().routes(routes!(whole)).routes(routes!(v1)).routes(routes!(v2))
}

/// This document: every route.
#[utoipa::path(get, path = "/openapi.json", tag = "info", responses((status = 200, body = Object)))]
async fn whole(State(state): State<AppState>) -> Response {
    json_bytes(StatusCode::OK, state.documents().whole.clone())
}

/// The same document under the name AIO clients use.
#[utoipa::path(get, path = "/v1/openapi.json", tag = "info", responses((status = 200, body = Object)))]
async fn v1(State(state): State<AppState>) -> Response {
    json_bytes(StatusCode::OK, state.documents().whole.clone())
}

/// The routes under `/v2`.
#[utoipa::path(get, path = "/v2/openapi.json", tag = "info", responses((status = 200, body = Object)))]
async fn v2(State(state): State<AppState>) -> Response {
    json_bytes(StatusCode::OK, state.documents().v2.clone())
}
