//! The AIO family: code execution, kernels, Node.js and their sessions, and files, in two generations of one API.
#![forbid(unsafe_code)]

use std::future::Future;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::pin::pin;
use std::task::Poll;

use axum::Extension;
use axum::extract::rejection::ExtensionRejection;
use axum::extract::{FromRequestParts, Path};
use axum::http::StatusCode;
use axum::http::request::Parts;
use axum::response::{IntoResponse, Response};
use serde::Serialize;
use utoipa_axum::router::OpenApiRouter;

use crate::config::{ApiSurface, Config};
use crate::engine::{CellRequest, ErrorOutput, Execution, Language, Output, Status, TenantId};
use crate::server::AppState;
use crate::server::answer::{Envelope, json_sized};
use crate::server::code::CodeInfo;
use crate::server::front::panic_text;
use crate::server::info::confinement;

mod commands;
mod files_answer;
mod files_io;
mod files_v1;
mod files_v2;
mod files_wire;
mod jupyter;
mod nodejs;
pub(crate) mod refuse;
mod stream;
mod v1;
mod v2;
pub(crate) mod wire;

use refuse::Generation;
use wire::CodeInfoData;

/// First path segments under `/v1` that are this family's alone.
const V1_PLANES: [&str; 9] =
    ["bash", "capabilities", "code", "file", "jupyter", "nodejs", "ping", "sandbox", "shell"];

/// Whether a refusal under `path` speaks this family's words alone.
pub(super) fn owns(path: &str) -> bool {
    let mut segments = path.split('/').skip(1);
    match segments.next() {
        Some("v2") => true,
        Some("v1") => segments.next().is_some_and(|plane| V1_PLANES.contains(&plane)),
        _ => false,
    }
}

pub(super) fn routes(surface: ApiSurface) -> OpenApiRouter<AppState> {
    match surface {
        ApiSurface::Full => OpenApiRouter::new()
            .merge(v1::routes())
            .merge(jupyter::routes())
            .merge(nodejs::routes())
            .merge(v2::routes()),
        ApiSurface::V2 => v2::routes(),
    }
}

/// What a handler works with: the daemon's state, and whose request it is.
struct Context(AppState, TenantId);

impl FromRequestParts<AppState> for Context {
    type Rejection = ExtensionRejection;

    async fn from_request_parts(parts: &mut Parts, state: &AppState) -> Result<Self, ExtensionRejection> {
        let Extension(tenant) = Extension::from_request_parts(parts, state).await?;
        Ok(Context(state.clone(), tenant))
    }
}

/// The id in the path, percent-decoded once. Bytes that are no UTF-8 name nothing.
struct PathId(String);

impl<S: Send + Sync> FromRequestParts<S> for PathId {
    type Rejection = Response;

    async fn from_request_parts(parts: &mut Parts, state: &S) -> Result<Self, Response> {
        match Path::<String>::from_request_parts(parts, state).await {
            Ok(Path(id)) => Ok(PathId(id)),
            Err(_) => Err(refuse::refused(StatusCode::NOT_FOUND, "The id is not UTF-8", None)),
        }
    }
}

/// Runs and answers one cell; the generation chooses the words.
async fn run_cell<D>(state: &AppState, cell: CellRequest, generation: Generation) -> Response
where
    D: Serialize + From<Execution>,
{
    let (language, code) = (cell.language, cell.code.clone());
    let outcome = uninterrupted(state.code().execute(cell)).await;
    match outcome.unwrap_or_else(|Panicked| Ok(broken(language, code))) {
        Ok(execution) => answer::<D>(execution),
        Err(refusal) => refuse::refusal(refusal, generation),
    }
}

fn answer<D: Serialize + From<Execution>>(execution: Execution) -> Response {
    // Each stream stands in the body twice, once as its outputs; escapes take some more.
    let text = execution.code.len() + 2 * (execution.stdout.len() + execution.stderr.len());
    let bytes = 1024 + text + text / 8;
    json_sized(StatusCode::OK, &envelope::<D>(execution), bytes)
}

fn envelope<D: From<Execution>>(mut execution: Execution) -> Envelope<D> {
    let success = execution.status == Status::Ok;
    let hint = execution.hint.take();
    let message = if success { "ok" } else { "execution failed" }.to_owned();
    Envelope { success, message, data: Some(D::from(execution)), hint }
}

/// Guest code may have run when the engine broke, and clients repeat what was answered with a 5xx; so
/// even our own fault is told as a failed cell.
fn broken(language: Language, code: String) -> Execution {
    let evalue = "the daemon failed while this code may have been running; its log has the reason";
    Execution {
        language,
        code,
        status: Status::Error,
        outputs: vec![Output::Error(ErrorOutput {
            ename: "ProcessError".to_owned(),
            evalue: evalue.to_owned(),
            traceback: Vec::new(),
        })],
        stdout: String::new(),
        stderr: String::new(),
        exit_code: 1,
        execution_count: 1,
        session_id: None,
        kernel: None,
        msg_id: None,
        hint: None,
    }
}

struct Panicked;

/// Awaits `work`; a panic of it ends here.
async fn uninterrupted<T>(work: impl Future<Output = T>) -> Result<T, Panicked> {
    let mut work = pin!(work);
    std::future::poll_fn(|context| {
        // The future is not polled again after it panicked, so nobody sees it half done.
        match catch_unwind(AssertUnwindSafe(|| work.as_mut().poll(context))) {
            Ok(Poll::Pending) => Poll::Pending,
            Ok(Poll::Ready(done)) => Poll::Ready(Ok(done)),
            Err(panic) => {
                tracing::error!(panic = panic_text(panic.as_ref()), "the engine panicked");
                Poll::Ready(Err(Panicked))
            }
        }
    })
    .await
}

/// Both generations answer the same.
async fn code_info(state: &AppState, tenant: &TenantId) -> Response {
    let info: CodeInfo = state.code().code_info(tenant).await;
    let python_confinement = confinement(state.code().backends().code_may_leave);
    let config: &Config = state.config();
    Envelope::ok(CodeInfoData::new(info, python_confinement, config)).into_response()
}
