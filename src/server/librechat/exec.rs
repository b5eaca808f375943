//! `POST /exec`: one program with its files, and all that came of it.
#![forbid(unsafe_code)]

use std::sync::Arc;

use axum::Extension;
use axum::extract::State;
use axum::http::{HeaderMap, StatusCode};
use axum::response::Response;
use utoipa_axum::router::OpenApiRouter;
use utoipa_axum::routes;

use super::refuse::{Refused, RefusedBody};
use super::wire::{self, Asked, ExecRequest, ExecResponse};
use crate::engine::Caller;
use crate::languages::{Language, Runtime};
use crate::runs::Runs;
use crate::server::AppState;
use crate::server::answer::json_sized;
use crate::server::body::LargeJsonBytes;

pub(super) fn routes() -> OpenApiRouter<AppState> {
    OpenApiRouter::new().routes(routes!(exec))
}

/// Runs a program. What it does wrong is an answer with 200: exit code, signal and limits stand in the body, and
/// what a model must know in `stderr`.
#[utoipa::path(
    post, path = "/exec", tag = "librechat", request_body = ExecRequest,
    responses(
        (status = 200, body = ExecResponse<'static>),
        (status = 400, description = "Unknown language, bad file name or profile", body = RefusedBody),
        (status = 401, description = "No good credential", body = RefusedBody),
        (status = 403, description = "A file that the caller may not have", body = RefusedBody),
        (status = 409, description = "Asks for machines of the caller's own", body = RefusedBody),
        (status = 413, description = "More than 50 MiB, or files that do not fit", body = RefusedBody),
        (status = 422, description = "Fields that do not fit", body = RefusedBody),
        (status = 429, description = "Too many requests", body = RefusedBody),
        (status = 503, description = "The language is not installed, or the daemon stops", body = RefusedBody),
    )
)]
async fn exec(
    State(state): State<AppState>,
    Extension(caller): Extension<Caller>,
    headers: HeaderMap,
    LargeJsonBytes(body, _arrived): LargeJsonBytes,
) -> Result<Response, Refused> {
    let runs = runs(&state)?;
    let Asked { lang, run } = wire::read_exec(&runs, &headers, caller, &body)?;
    // Not for as long as the run waits and runs; it counts on, for what was read from it.
    drop(body);
    let language = Arc::clone(&run.language);
    let prepared = runs.prepare(run).await.map_err(|refused| wire::refusal(&refused))?;
    let mut done = prepared.complete().await;
    let version = version(&runs, &language, &state);
    let bytes = 3 * done.stdout.len() + 2 * done.stderr.len() + 1024;
    Ok(json_sized(StatusCode::OK, &ExecResponse::new(&mut done, lang, version), bytes))
}

/// What makes runs, where this daemon has it.
pub(super) fn runs(state: &AppState) -> Result<Arc<Runs>, Refused> {
    let missing = || Refused::new(StatusCode::SERVICE_UNAVAILABLE, "Service is starting up");
    state.runs().cloned().ok_or_else(missing)
}

/// The version of a language as its program tells it.
pub(super) fn version(runs: &Runs, language: &Language, state: &AppState) -> String {
    let hello = state.code().hello();
    let of_runtime = match language.runtime {
        Runtime::Python => hello.as_deref().and_then(|hello| hello.python.as_ref()),
        Runtime::JavaScript | Runtime::TypeScript => hello.as_deref().and_then(|hello| hello.node.as_ref()),
        Runtime::Program(_) => None,
    };
    let of_program = || runs.installed_now().and_then(|found| found.version(language).map(str::to_owned));
    let version = of_runtime.map(|runtime| runtime.version.trim_start_matches('v').to_owned());
    version.or_else(of_program).unwrap_or_default()
}
