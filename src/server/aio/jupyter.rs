//! Routes under `/v1/jupyter`: cells of a kernel, whatever runs Python on the code routes.
#![forbid(unsafe_code)]

use std::time::Duration;

use axum::http::StatusCode;
use axum::response::{IntoResponse, Response};
use serde::Serialize;
use utoipa::ToSchema;
use utoipa_axum::router::OpenApiRouter;
use utoipa_axum::routes;
use uuid::Uuid;

use super::refuse::{self, Generation, Invalid, InvalidBody, RefusedBody};
use super::wire::{
    Cleaned, OutputV1, as_object, check_timeout, cwd_of, failed_reason, session_choice, status_word,
};
use super::{Context, Panicked, PathId, broken, uninterrupted};
use crate::config::Config;
use crate::engine::run::NewSession;
use crate::engine::{
    CellRequest, ErrorOutput, Execution, Language, Output, Refusal, Runner, SessionChoice, Status, TenantId,
    Tiers,
};
use crate::server::AppState;
use crate::server::answer::Envelope;
use crate::server::body::JsonBytes;
use crate::server::code::{Keeper, NotCreated, SessionEntry};
use crate::server::fields::Fields;
use crate::server::info::confinement;

pub(super) fn routes() -> OpenApiRouter<AppState> {
    OpenApiRouter::new()
        .routes(routes!(execute))
        .routes(routes!(info))
        .routes(routes!(create_session))
        .routes(routes!(list_sessions, clear_sessions))
        .routes(routes!(get_session, delete_session))
        .routes(routes!(interrupt_session))
        .routes(routes!(restart_session))
}

/// A cell for a kernel. Unknown fields are ignored; null reads as absent.
#[derive(Debug, PartialEq, ToSchema)]
struct JupyterRequest {
    /// May be empty.
    code: String,
    /// A named session; absent for a kernel of this cell's own. An unseen id is created on the spot.
    session_id: Option<String>,
    /// Without `session_id`: keep the kernel and answer with a generated id.
    stateful: Option<bool>,
    /// One of `available_kernels`; absent: the default one.
    kernel_name: Option<String>,
    /// Seconds, 1 to 900; fractions are fine. Default 30.
    timeout: Option<f64>,
    /// Working directory, fixed when the kernel starts. One that is none is a `DirectoryError`.
    cwd: Option<String>,
}

impl JupyterRequest {
    const FIELDS: [&'static str; 6] = ["code", "session_id", "stateful", "kernel_name", "timeout", "cwd"];

    fn parse(body: &[u8], config: &Config) -> Result<Self, Invalid> {
        let mut fields = Fields::parse(body, &Self::FIELDS).map_err(|error| Invalid::schema(vec![error]))?;
        let code = fields.required_text("code");
        let (session_id, stateful) = (fields.text("session_id"), fields.boolean("stateful"));
        let kernel_name = fields.text("kernel_name");
        let (timeout, cwd) = (fields.number("timeout"), fields.text("cwd"));
        let schema_errors = fields.into_errors();
        let mut reasons = Vec::new();
        check_timeout(timeout, config.limits.timeout_max, &mut reasons);
        match code {
            Some(code) if schema_errors.is_empty() && reasons.is_empty() => {
                Ok(Self { code, session_id, stateful, kernel_name, timeout, cwd })
            }
            _ => Err(Invalid { schema_errors, reasons }),
        }
    }

    fn into_cell(self, tenant: TenantId, config: &Config) -> CellRequest {
        CellRequest {
            tenant,
            language: Language::Python,
            runner: Runner::Kernel(self.kernel_name),
            code: self.code,
            session: session_choice(self.session_id, self.stateful),
            timeout: self.timeout.map_or(config.limits.timeout_default, Duration::from_secs_f64),
            cwd: self.cwd,
            user: None,
            strict: config.strict,
            watcher: None,
        }
    }
}

/// How a kernel's cell went.
#[derive(Debug, Serialize, ToSchema)]
struct JupyterData {
    kernel_name: String,
    session_id: Option<String>,
    /// `ok`, `error` or `timeout`.
    status: &'static str,
    execution_count: Option<u64>,
    outputs: Vec<OutputV1>,
    code: String,
    /// Names the request at an external Jupyter server; elsewhere a name of its own.
    msg_id: String,
}

impl JupyterData {
    fn new(it: Execution, asked: &str) -> JupyterData {
        JupyterData {
            kernel_name: it.kernel.unwrap_or_else(|| asked.to_owned()),
            session_id: it.session_id,
            status: status_word(it.status),
            execution_count: Some(it.execution_count),
            outputs: it.outputs.into_iter().map(OutputV1::from).collect(),
            code: it.code,
            msg_id: it.msg_id.unwrap_or_else(|| Uuid::new_v4().to_string()),
        }
    }
}

/// Run a cell in a kernel. A failed cell is a 200 with `success: false`.
#[utoipa::path(
    post, path = "/v1/jupyter/execute", tag = "jupyter", operation_id = "v1_jupyter_execute",
    request_body = JupyterRequest,
    responses(
        (status = 200, body = Envelope<JupyterData>, description = "The code was run, whatever it did"),
        (status = 422, body = InvalidBody, description = "The request does not say what to run"),
        (status = 429, body = RefusedBody, description = "One session or call too many"),
        (status = 501, body = RefusedBody, description = "There is no kernel"),
        (status = 503, body = RefusedBody, description = "Nothing was started"),
    )
)]
async fn execute(Context(state, tenant): Context, JsonBytes(body): JsonBytes) -> Response {
    let request = match JupyterRequest::parse(&body, state.config()) {
        Ok(request) => request,
        Err(invalid) => return invalid.answer(Generation::V1),
    };
    let asked = asked_kernel(&state, &tenant, request.kernel_name.as_deref());
    let cell = request.into_cell(tenant, state.config());
    let (code, named) = (cell.code.clone(), named(&cell.session));
    let outcome = uninterrupted(state.code().execute(cell)).await;
    match outcome.unwrap_or_else(|Panicked| Ok(broken(Language::Python, code.clone()))) {
        Ok(execution) => answer(execution, &asked),
        Err(Refusal::NotADirectory { cwd }) => answer(no_directory(code, named, &cwd), &asked),
        Err(refusal) => refuse(&state, refusal),
    }
}

fn named(choice: &SessionChoice) -> Option<String> {
    match choice {
        SessionChoice::Named(id) => Some(id.clone()),
        SessionChoice::OneOff | SessionChoice::Generated => None,
    }
}

/// The name that an answer carries where no kernel has answered.
fn asked_kernel(state: &AppState, tenant: &TenantId, asked: Option<&str>) -> String {
    let default = || state.code().kernel_info(tenant).kernels.into_iter().next().unwrap_or_default();
    asked.map_or_else(default, str::to_owned)
}

fn answer(mut execution: Execution, asked: &str) -> Response {
    let success = execution.status == Status::Ok;
    let hint = execution.hint.take();
    let message = if success { "ok" } else { "execution failed" }.to_owned();
    Envelope { success, message, data: Some(JupyterData::new(execution, asked)), hint }.into_response()
}

fn no_directory(code: String, session_id: Option<String>, cwd: &str) -> Execution {
    let error = ErrorOutput::plain("DirectoryError", format!("cwd is not a directory: {cwd}"));
    Execution { outputs: vec![Output::Error(error)], session_id, ..broken(Language::Python, code) }
}

fn refuse(state: &AppState, refusal: Refusal) -> Response {
    match refusal {
        Refusal::NoKernel { .. } => {
            let hint = match state.code().backends().python {
                Some(_) => "the operator can install ipykernel; /v1/code/execute runs Python without it",
                None => "the operator can install ipykernel",
            };
            refuse::refused(StatusCode::NOT_IMPLEMENTED, refusal.to_string(), Some(hint))
        }
        other => refuse::refusal(other, Generation::V1),
    }
}

/// What the kernel plane offers.
#[derive(Debug, Serialize, ToSchema)]
struct JupyterInfo {
    default_kernel: String,
    /// Each is taken as `kernel_name`; the default one first.
    available_kernels: Vec<String>,
    active_sessions: usize,
    /// Of idle time before a session is closed.
    session_timeout_seconds: u64,
    max_sessions: usize,
    description: &'static str,
    /// `sandbox`; `external` where cells may run at an external Jupyter server.
    confinement: &'static str,
    /// What was found, or looked for in vain.
    kernel_detection: String,
}

/// Kernels, limits and sessions.
#[utoipa::path(
    get, path = "/v1/jupyter/info", tag = "jupyter", operation_id = "v1_jupyter_info",
    responses((status = 200, body = Envelope<JupyterInfo>), (status = 501, body = RefusedBody))
)]
async fn info(Context(state, tenant): Context) -> Response {
    let info = state.code().kernel_info(&tenant);
    let Some(default_kernel) = info.kernels.first().cloned() else {
        return refuse(&state, Refusal::NoKernel { why: info.detection });
    };
    let may_leave = state.code().backends().jupyter_may_leave;
    Envelope::ok(JupyterInfo {
        default_kernel,
        available_kernels: info.kernels,
        active_sessions: info.sessions,
        session_timeout_seconds: info.idle_max.as_secs(),
        max_sessions: info.sessions_max,
        description: if may_leave {
            "IPython kernels of an external Jupyter server while it answers, confined by whoever runs it and not by this \
             daemon"
        } else {
            "IPython kernels, each confined in a sandbox of its own"
        },
        confinement: confinement(may_leave),
        kernel_detection: info.detection,
    })
    .into_response()
}

/// Without a kernel there is no plane: its answer then.
fn no_plane(state: &AppState, tenant: &TenantId) -> Option<Response> {
    let info = state.code().kernel_info(tenant);
    info.kernels.is_empty().then(|| refuse(state, Refusal::NoKernel { why: info.detection }))
}

/// A session to open. Every field may be absent, and so may the body.
#[derive(Debug, PartialEq, Eq, ToSchema)]
struct JupyterSessionRequest {
    /// Absent: a generated id. One that exists answers with that session.
    session_id: Option<String>,
    kernel_name: Option<String>,
    cwd: Option<String>,
}

impl JupyterSessionRequest {
    const FIELDS: [&'static str; 3] = ["session_id", "kernel_name", "cwd"];

    fn parse(body: &[u8]) -> Result<Self, Invalid> {
        let mut fields = Fields::parse(body, &Self::FIELDS).map_err(|error| Invalid::schema(vec![error]))?;
        let request = JupyterSessionRequest {
            session_id: fields.text("session_id"),
            kernel_name: fields.text("kernel_name"),
            cwd: fields.text("cwd"),
        };
        let schema_errors = fields.into_errors();
        if schema_errors.is_empty() { Ok(request) } else { Err(Invalid::schema(schema_errors)) }
    }
}

#[derive(Debug, Serialize, ToSchema)]
struct JupyterCreated {
    session_id: String,
    kernel_name: String,
    message: String,
}

/// Open a session ahead of its first cell.
#[utoipa::path(
    post, path = "/v1/jupyter/sessions/create", tag = "jupyter", operation_id = "v1_jupyter_create_session",
    request_body(content = Option<JupyterSessionRequest>),
    responses(
        (status = 200, body = Envelope<JupyterCreated>),
        (status = 422, body = InvalidBody),
        (status = 429, body = RefusedBody),
        (status = 501, body = RefusedBody),
    )
)]
async fn create_session(Context(state, tenant): Context, JsonBytes(body): JsonBytes) -> Response {
    let JupyterSessionRequest { session_id, kernel_name, cwd } = match JupyterSessionRequest::parse(&body) {
        Ok(request) => request,
        Err(invalid) => return invalid.answer(Generation::V1),
    };
    let (language, runner) = (Language::Python, Runner::Kernel(kernel_name));
    let new = NewSession { language, runner, id: session_id, cwd, user: None, idle_max: None };
    match state.code().session_create(&tenant, new).await {
        Ok((entry, made)) => {
            let message = if made { "session created" } else { "session exists" }.to_owned();
            let kernel_name = kernel_of(&entry);
            Envelope::ok(JupyterCreated { session_id: entry.session_id, kernel_name, message })
                .into_response()
        }
        Err(NotCreated::Refused(refusal @ Refusal::NotADirectory { .. })) => {
            refuse::refused(StatusCode::OK, format!("DirectoryError: {refusal}"), None)
        }
        Err(NotCreated::Refused(refusal)) => refuse(&state, refusal),
        Err(NotCreated::Failed(execution)) => {
            refuse::refused(StatusCode::OK, failed_reason(&execution), None)
        }
    }
}

fn kernel_of(entry: &SessionEntry) -> String {
    match &entry.keeper {
        Keeper::Kernel { name } => name.clone(),
        Keeper::Native { .. } => String::new(),
    }
}

/// A session of a kernel.
#[derive(Debug, Serialize, ToSchema)]
struct JupyterEntry {
    session_id: String,
    kernel_name: String,
    /// Where it started. Empty where that is an external Jupyter server's business.
    cwd: String,
    /// `idle` or `executing`.
    state: &'static str,
    /// Milliseconds since the epoch.
    created_at: u64,
    /// Milliseconds since the epoch.
    last_used: u64,
    /// Whole seconds since the last run.
    age_seconds: u64,
}

impl JupyterEntry {
    fn new(it: SessionEntry, config: &Config) -> JupyterEntry {
        JupyterEntry {
            cwd: cwd_of(&it, config),
            kernel_name: kernel_of(&it),
            session_id: it.session_id,
            state: if it.executing { "executing" } else { "idle" },
            created_at: it.created_at_ms,
            last_used: it.last_used_ms,
            age_seconds: it.age.as_secs(),
        }
    }
}

/// Every kernel session of the caller, by id; `<kernel>:<id>` for the second of an id.
#[derive(Debug, Serialize, ToSchema)]
struct JupyterSessions {
    #[serde(serialize_with = "as_object")]
    #[schema(value_type = std::collections::HashMap<String, JupyterEntry>)]
    sessions: Vec<(String, JupyterEntry)>,
}

/// Every kernel session of the caller.
#[utoipa::path(
    get, path = "/v1/jupyter/sessions", tag = "jupyter", operation_id = "v1_jupyter_list_sessions",
    responses((status = 200, body = Envelope<JupyterSessions>), (status = 501, body = RefusedBody))
)]
async fn list_sessions(Context(state, tenant): Context) -> Response {
    if let Some(refused) = no_plane(&state, &tenant) {
        return refused;
    }
    let sessions = state.code().sessions_list(&tenant, Tiers::Kernels);
    let entry = |entry| JupyterEntry::new(entry, state.config());
    let sessions = sessions.into_iter().map(|(key, it)| (key, entry(it))).collect();
    Envelope::ok(JupyterSessions { sessions }).into_response()
}

/// End every kernel session of the caller.
#[utoipa::path(
    delete, path = "/v1/jupyter/sessions", tag = "jupyter", operation_id = "v1_jupyter_clear_sessions",
    responses((status = 200, body = Envelope<Cleaned>), (status = 501, body = RefusedBody))
)]
async fn clear_sessions(Context(state, tenant): Context) -> Response {
    if let Some(refused) = no_plane(&state, &tenant) {
        return refused;
    }
    let cleaned_sessions = state.code().sessions_clear(&tenant, Tiers::Kernels).await;
    Envelope::ok(Cleaned { cleaned_sessions }).into_response()
}

/// One kernel session.
#[utoipa::path(
    get, path = "/v1/jupyter/sessions/{id}", tag = "jupyter", operation_id = "v1_jupyter_get_session",
    params(("id" = String, Path, description = "Session id, percent-encoded")),
    responses(
        (status = 200, body = Envelope<JupyterEntry>),
        (status = 404, body = RefusedBody),
        (status = 501, body = RefusedBody),
    )
)]
async fn get_session(Context(state, tenant): Context, PathId(id): PathId) -> Response {
    if let Some(refused) = no_plane(&state, &tenant) {
        return refused;
    }
    match state.code().session_get(&tenant, Tiers::Kernels, &id) {
        Some(entry) => Envelope::ok(JupyterEntry::new(entry, state.config())).into_response(),
        None => refuse::refused(StatusCode::NOT_FOUND, format!("No session '{id}'"), None),
    }
}

/// End a Python session of this id and the cell it runs, kernel or not. An unknown one is `success: false`.
#[utoipa::path(
    delete, path = "/v1/jupyter/sessions/{id}", tag = "jupyter", operation_id = "v1_jupyter_delete_session",
    params(("id" = String, Path, description = "Session id, percent-encoded")),
    responses((status = 200, body = Envelope<String>))
)]
async fn delete_session(Context(state, tenant): Context, PathId(id): PathId) -> Response {
    if state.code().session_delete(&tenant, Tiers::Python, &id).await {
        return Envelope::ok("session ended").into_response();
    }
    refuse::refused(StatusCode::OK, format!("No session '{id}'"), None)
}

/// Not offered: a cell is interrupted by its timeout.
#[utoipa::path(
    post, path = "/v1/jupyter/sessions/{id}/interrupt", tag = "jupyter",
    params(("id" = String, Path, description = "Session id, percent-encoded")),
    responses((status = 501, body = RefusedBody))
)]
async fn interrupt_session() -> Response {
    not_offered("interrupt", "a cell is interrupted when its timeout is up")
}

/// Not offered: end the session and use its id again.
#[utoipa::path(
    post, path = "/v1/jupyter/sessions/{id}/restart", tag = "jupyter",
    params(("id" = String, Path, description = "Session id, percent-encoded")),
    responses((status = 501, body = RefusedBody))
)]
async fn restart_session() -> Response {
    not_offered("restart", "end the session and use its id again")
}

fn not_offered(what: &str, instead: &str) -> Response {
    let message = format!("{what} is not implemented for kernels");
    refuse::refused(StatusCode::NOT_IMPLEMENTED, message, Some(instead))
}
