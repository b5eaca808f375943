//! Routes under `/v1/nodejs`: JavaScript by our own harness, in the sessions that the code routes see too.
#![forbid(unsafe_code)]

use std::time::Duration;

use axum::extract::State;
use axum::http::StatusCode;
use axum::response::{IntoResponse, Response};
use serde::Serialize;
use utoipa::ToSchema;
use utoipa_axum::router::OpenApiRouter;
use utoipa_axum::routes;

use super::refuse::{self, Generation, Invalid, NotOpened, NotRun, RefusedBody};
use super::wire::{
    Cleaned, Deleted, OutputV1, as_object, check_timeout, failed_reason, session_choice, status_word,
};
use super::{Context, PathId, run_cell};
use crate::config::Config;
use crate::engine::run::NewSession;
use crate::engine::{CellRequest, Execution, Language, Runner, TenantId, Tiers};
use crate::server::AppState;
use crate::server::answer::Envelope;
use crate::server::body::JsonBytes;
use crate::server::code::{Keeper, NotCreated, SessionEntry};
use crate::server::fields::{FieldError, Fields};

pub(super) fn routes() -> OpenApiRouter<AppState> {
    OpenApiRouter::new()
        .routes(routes!(execute))
        .routes(routes!(info))
        .routes(routes!(create_session, list_sessions, clear_sessions))
        .routes(routes!(get_session, delete_session, update_session))
}

/// A cell of JavaScript. Unknown fields are ignored, `stdin`, `files` and `version` among them; null reads as absent.
#[derive(Debug, PartialEq, ToSchema)]
struct NodeRequest {
    /// May be empty.
    code: String,
    /// A named session; absent for a one-off run. An unseen id is created on the spot.
    session_id: Option<String>,
    /// Without `session_id`: keep the interpreter and answer with a generated id.
    stateful: Option<bool>,
    /// Seconds, 1 to 900; fractions are fine. Default 30.
    timeout: Option<f64>,
    /// Working directory, fixed when the interpreter starts.
    cwd: Option<String>,
    /// Account of the sandbox to run as.
    user: Option<String>,
}

impl NodeRequest {
    const FIELDS: [&'static str; 6] = ["code", "session_id", "stateful", "timeout", "cwd", "user"];

    fn parse(body: &[u8], config: &Config) -> Result<Self, Invalid> {
        let mut fields = Fields::parse(body, &Self::FIELDS).map_err(|error| Invalid::schema(vec![error]))?;
        let code = fields.required_text("code");
        let (session_id, stateful) = (fields.text("session_id"), fields.boolean("stateful"));
        let (timeout, cwd, user) = (fields.number("timeout"), fields.text("cwd"), fields.text("user"));
        let schema_errors = fields.into_errors();
        let mut reasons = Vec::new();
        check_timeout(timeout, config.limits.timeout_max, &mut reasons);
        match code {
            Some(code) if schema_errors.is_empty() && reasons.is_empty() => {
                Ok(Self { code, session_id, stateful, timeout, cwd, user })
            }
            _ => Err(Invalid { schema_errors, reasons }),
        }
    }

    fn into_cell(self, tenant: TenantId, config: &Config) -> CellRequest {
        CellRequest {
            tenant,
            language: Language::JavaScript,
            runner: Runner::Chosen,
            code: self.code,
            session: session_choice(self.session_id, self.stateful),
            timeout: self.timeout.map_or(config.limits.timeout_default, Duration::from_secs_f64),
            cwd: self.cwd,
            user: self.user,
            strict: config.strict,
            watcher: None,
        }
    }
}

/// How the cell went: as the code routes of v1 say it, but an empty stream is an empty string.
#[derive(Debug, Serialize, ToSchema)]
struct NodeData {
    code: String,
    /// Always `javascript`.
    language: &'static str,
    /// `ok`, `error` or `timeout`.
    status: &'static str,
    execution_count: u64,
    exit_code: i32,
    outputs: Vec<OutputV1>,
    stdout: String,
    stderr: String,
    session_id: Option<String>,
}

impl From<Execution> for NodeData {
    fn from(it: Execution) -> NodeData {
        NodeData {
            code: it.code,
            language: it.language.name(),
            status: status_word(it.status),
            execution_count: it.execution_count,
            exit_code: it.exit_code,
            outputs: it.outputs.into_iter().map(OutputV1::from).collect(),
            stdout: it.stdout,
            stderr: it.stderr,
            session_id: it.session_id,
        }
    }
}

/// Run a cell of JavaScript. A failed cell is a 200 with `success: false`.
#[utoipa::path(
    post, path = "/v1/nodejs/execute", tag = "nodejs", operation_id = "v1_nodejs_execute",
    request_body = NodeRequest,
    responses(
        (status = 200, body = Envelope<NodeData>, description = "The code was run, whatever it did"),
        NotRun,
    )
)]
async fn execute(Context(state, tenant): Context, JsonBytes(body): JsonBytes) -> Response {
    match NodeRequest::parse(&body, state.config()) {
        Ok(request) => {
            let cell = request.into_cell(tenant, state.config());
            run_cell::<NodeData>(&state, cell, Generation::V1).await
        }
        Err(invalid) => invalid.answer(Generation::V1),
    }
}

/// Node.js as cells find it.
#[derive(Debug, Serialize, ToSchema)]
struct NodeInfo {
    /// Empty when there is none.
    node_version: String,
    /// Always empty: cells have no network, and npm no use.
    npm_version: &'static str,
    supported_languages: [&'static str; 1],
    description: &'static str,
    runtime_packages: [String; 0],
    global_packages: [String; 0],
    current_version: Option<String>,
    available_versions: Vec<String>,
    /// What was looked for in vain.
    error: Option<String>,
}

/// The Node.js that runs cells.
#[utoipa::path(
    get, path = "/v1/nodejs/info", tag = "nodejs", operation_id = "v1_nodejs_info",
    responses((status = 200, body = Envelope<NodeInfo>))
)]
async fn info(State(state): State<AppState>) -> Response {
    let hello = state.code().hello();
    let version = hello.and_then(|hello| hello.node.as_ref().map(|node| node.version.clone()));
    Envelope::ok(NodeInfo {
        node_version: version.clone().unwrap_or_default(),
        npm_version: "",
        supported_languages: ["javascript"],
        description: "Node.js, with state between the cells of a session",
        runtime_packages: [],
        global_packages: [],
        available_versions: version.iter().cloned().collect(),
        error: version.is_none().then(|| format!("{} was not found", state.config().node_name())),
        current_version: version,
    })
    .into_response()
}

/// A session to open. Every field may be absent, and so may the body.
#[derive(Debug, PartialEq, ToSchema)]
struct NodeSessionRequest {
    /// Absent: a generated id. One that exists answers with that session.
    session_id: Option<String>,
    cwd: Option<String>,
    user: Option<String>,
    /// Milliseconds of idle time before it is closed, at least 1000; never more than the deployment's.
    max_idle_time: Option<f64>,
}

/// Shortest idle time that a session may ask for.
const IDLE_LEAST: Duration = Duration::from_secs(1);

impl NodeSessionRequest {
    const FIELDS: [&'static str; 4] = ["session_id", "cwd", "user", "max_idle_time"];

    fn parse(body: &[u8]) -> Result<Self, Invalid> {
        let mut fields = Fields::parse(body, &Self::FIELDS).map_err(|error| Invalid::schema(vec![error]))?;
        let request = NodeSessionRequest {
            session_id: fields.text("session_id"),
            cwd: fields.text("cwd"),
            user: fields.text("user"),
            max_idle_time: fields.number("max_idle_time"),
        };
        let schema_errors = fields.into_errors();
        let mut reasons = Vec::new();
        let least = IDLE_LEAST.as_millis() as f64;
        if let Some(millis) = request.max_idle_time.filter(|millis| *millis < least) {
            let message = format!("max_idle_time must be at least {least} milliseconds, got {millis}");
            reasons.push(FieldError::in_body("max_idle_time", "value_error.range", message));
        }
        if schema_errors.is_empty() && reasons.is_empty() {
            Ok(request)
        } else {
            Err(Invalid { schema_errors, reasons })
        }
    }

    fn into_new(self) -> NewSession {
        NewSession {
            language: Language::JavaScript,
            runner: Runner::Chosen,
            id: self.session_id,
            cwd: self.cwd,
            user: self.user,
            // Out of range on the far side is the deployment's bound.
            idle_max: self.max_idle_time.map(|millis| Duration::from_millis(millis as u64)),
        }
    }
}

#[derive(Debug, Serialize, ToSchema)]
struct NodeCreated {
    session_id: String,
    /// False when a session of this id was there already.
    created: bool,
    message: &'static str,
    session: NodeEntry,
}

/// Open a session ahead of its first cell.
#[utoipa::path(
    post, path = "/v1/nodejs/sessions", tag = "nodejs", operation_id = "v1_nodejs_create_session",
    request_body(content = Option<NodeSessionRequest>),
    responses((status = 200, body = Envelope<NodeCreated>), NotOpened)
)]
async fn create_session(Context(state, tenant): Context, JsonBytes(body): JsonBytes) -> Response {
    let new = match NodeSessionRequest::parse(&body) {
        Ok(request) => request.into_new(),
        Err(invalid) => return invalid.answer(Generation::V1),
    };
    match state.code().session_create(&tenant, new).await {
        Ok((entry, created)) => {
            let message = if created { "session created" } else { "session exists" };
            let session_id = entry.session_id.clone();
            Envelope::ok(NodeCreated { session_id, created, message, session: entry.into() }).into_response()
        }
        Err(NotCreated::Refused(refusal)) => refuse::refusal(refusal, Generation::V1),
        Err(NotCreated::Failed(execution)) => {
            refuse::refused(StatusCode::OK, failed_reason(&execution), None)
        }
    }
}

/// A session.
#[derive(Debug, Serialize, ToSchema)]
struct NodeEntry {
    session_id: String,
    cwd: String,
    /// Milliseconds since the epoch.
    created_at: u64,
    /// Milliseconds since the epoch.
    last_used: u64,
    /// Milliseconds of idle time before it is closed.
    max_idle_time: u64,
    /// Whole seconds since the last run.
    age_seconds: u64,
    /// `idle` or `executing`.
    state: &'static str,
}

impl From<SessionEntry> for NodeEntry {
    fn from(it: SessionEntry) -> NodeEntry {
        let idle_max = match it.keeper {
            Keeper::Native { idle_max } => idle_max,
            Keeper::Kernel { .. } => Duration::ZERO,
        };
        NodeEntry {
            session_id: it.session_id,
            cwd: it.cwd,
            created_at: it.created_at_ms,
            last_used: it.last_used_ms,
            max_idle_time: u64::try_from(idle_max.as_millis()).unwrap_or(u64::MAX),
            age_seconds: it.age.as_secs(),
            state: if it.executing { "executing" } else { "idle" },
        }
    }
}

#[derive(Debug, Serialize, ToSchema)]
struct NodeSessions {
    #[serde(serialize_with = "as_object")]
    #[schema(value_type = std::collections::HashMap<String, NodeEntry>)]
    sessions: Vec<(String, NodeEntry)>,
}

#[derive(Debug, Serialize, ToSchema)]
struct NodeSession {
    session: NodeEntry,
}

/// Every JavaScript session of the caller.
#[utoipa::path(
    get, path = "/v1/nodejs/sessions", tag = "nodejs", operation_id = "v1_nodejs_list_sessions",
    responses((status = 200, body = Envelope<NodeSessions>))
)]
async fn list_sessions(Context(state, tenant): Context) -> Response {
    let sessions = state.code().sessions_list(&tenant, Tiers::JavaScript);
    let sessions = sessions.into_iter().map(|(key, entry)| (key, entry.into())).collect();
    Envelope::ok(NodeSessions { sessions }).into_response()
}

/// End every JavaScript session of the caller.
#[utoipa::path(
    delete, path = "/v1/nodejs/sessions", tag = "nodejs", operation_id = "v1_nodejs_clear_sessions",
    responses((status = 200, body = Envelope<Cleaned>))
)]
async fn clear_sessions(Context(state, tenant): Context) -> Response {
    let cleaned_sessions = state.code().sessions_clear(&tenant, Tiers::JavaScript).await;
    Envelope::ok(Cleaned { cleaned_sessions }).into_response()
}

/// One JavaScript session.
#[utoipa::path(
    get, path = "/v1/nodejs/sessions/{id}", tag = "nodejs", operation_id = "v1_nodejs_get_session",
    params(("id" = String, Path, description = "Session id, percent-encoded")),
    responses((status = 200, body = Envelope<NodeSession>), (status = 404, body = RefusedBody))
)]
async fn get_session(Context(state, tenant): Context, PathId(id): PathId) -> Response {
    match state.code().session_get(&tenant, Tiers::JavaScript, &id) {
        Some(entry) => Envelope::ok(NodeSession { session: entry.into() }).into_response(),
        None => refuse::refused(StatusCode::NOT_FOUND, format!("No session '{id}'"), None),
    }
}

/// End a JavaScript session and the cell it runs. An unknown one is `deleted: false`.
#[utoipa::path(
    delete, path = "/v1/nodejs/sessions/{id}", tag = "nodejs", operation_id = "v1_nodejs_delete_session",
    params(("id" = String, Path, description = "Session id, percent-encoded")),
    responses((status = 200, body = Envelope<Deleted>))
)]
async fn delete_session(Context(state, tenant): Context, PathId(id): PathId) -> Response {
    let deleted = state.code().session_delete(&tenant, Tiers::JavaScript, &id).await;
    Envelope::ok(Deleted { deleted }).into_response()
}

/// Not offered: what a session is, is fixed when it is made.
#[utoipa::path(
    patch, path = "/v1/nodejs/sessions/{id}", tag = "nodejs", operation_id = "v1_nodejs_update_session",
    params(("id" = String, Path, description = "Session id, percent-encoded")),
    responses((status = 404, body = RefusedBody))
)]
async fn update_session() -> Response {
    refuse::refused(StatusCode::NOT_FOUND, "Sessions cannot be changed", Some("make a new one"))
}
