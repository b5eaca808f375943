//! What this daemon is and can do: health, capabilities, the sandbox as clients see it.
#![forbid(unsafe_code)]

use axum::Extension;
use axum::extract::{Request, State};
use axum::http::{StatusCode, Uri};
use axum::response::{IntoResponse, Response};
use serde::Serialize;
use serde_json::{Map, Value, json};
use utoipa::ToSchema;
use utoipa_axum::router::OpenApiRouter;
use utoipa_axum::routes;

use super::aio::refuse::{Invalid, InvalidBody};
use super::answer::{self, Envelope, Refused};
use super::fields::FieldError;
use super::{AppState, aio, auth, librechat};
use crate::config::Config;
use crate::engine::{Backends, TenantId};
use crate::launcher::posture::{Hello, LayerReport, RuntimeReport};

const VERSION: &str = env!("CARGO_PKG_VERSION");
/// Home of the guest, where code starts unless a request says otherwise.
pub(super) const HOME: &str = "/home/sandbox";
/// Where a guest sees its space's files.
const WORKSPACE: &str = "/mnt/data";
const CAPABILITIES_SCHEMA: &str = "caisson.capabilities.v1";

/// The commit this binary was built from, when the build said so.
fn revision() -> &'static str {
    option_env!("CAISSON_REVISION").unwrap_or("unknown")
}

/// Routes that belong to no family.
pub(super) fn routes() -> OpenApiRouter<AppState> {
    OpenApiRouter::new()
        .routes(routes!(root))
        .routes(routes!(health))
        .routes(routes!(v1_health))
        .routes(routes!(auth::internal_auth))
}

/// Information routes of the first AIO generation.
pub(super) fn v1_routes() -> OpenApiRouter<AppState> {
    OpenApiRouter::new().routes(routes!(ping)).routes(routes!(capabilities)).routes(routes!(v1_sandbox))
}

/// Those of the second.
pub(super) fn v2_routes() -> OpenApiRouter<AppState> {
    OpenApiRouter::new().routes(routes!(v2_sandbox))
}

pub(super) async fn not_found(request: Request) -> Response {
    Refused::not_found().answer(request.uri().path())
}

pub(super) async fn method_not_allowed(request: Request) -> Response {
    Refused::method_not_allowed().answer(request.uri().path())
}

/// Name, version and where to go from here.
#[utoipa::path(get, path = "/", tag = "info", security(()), responses((status = 200, body = Object)))]
async fn root() -> Response {
    let body = json!({
        "success": true,
        "message": "ok",
        "data": null,
        "hint": null,
        "name": "caisson",
        "version": VERSION,
        "features": [
            "python",
            "javascript",
            "sessions",
            "files",
            "commands",
            "multi-language execution",
            "stateful sessions",
            "streaming",
            "programmatic tool calling",
            "file uploads and downloads",
        ],
        "endpoints": {
            "health": "/health",
            "openapi": "/openapi.json",
            "execute": "/v2/code/execute",
            "info": "/v2/code/info",
            "sessions": "/v2/code/sessions",
            "files": "/v2/fs/list",
            "commands": "/v2/commands",
            "capabilities": "/v1/capabilities",
            "POST /exec": "Run code in any of the languages",
            "POST /exec/stream": "The same, with output as server-sent events",
            "POST /exec/programmatic": "Run code that calls tools",
            "POST /upload": "Upload files",
            "POST /upload/batch": "Upload files, each with its own outcome",
            "GET /files/{session_id}": "List the files of a session",
            "DELETE /files/{session_id}/{file_id}": "Delete a file",
            "GET /sessions/{session_id}/objects/{file_id}": "Look at a file",
            "GET /download/{session_id}/{file_id}": "Download a file",
            "GET /libraries": "What the runtimes can import",
            "GET /health": "Whether the daemon works",
        },
    });
    answer::json(StatusCode::OK, &body)
}

/// How the daemon is: what probes of every family read. It names no tenant, session or entity, and no path of the host.
#[derive(Debug, Serialize, ToSchema)]
struct HealthResponse {
    /// `healthy`.
    status: &'static str,
    version: &'static str,
    server: &'static str,
    revision: &'static str,
    /// `sandbox`; `external` where cells may run at an external Jupyter server, of which the posture says nothing. The
    /// warnings say which.
    confinement: &'static str,
    /// What confines a sandbox here, as measured; null until that is known.
    #[schema(value_type = Option<Object>)]
    posture: Option<Value>,
    #[schema(value_type = Object)]
    slots: Value,
    #[schema(value_type = Object)]
    sandboxes: Value,
    warnings: Vec<String>,
    /// Live sessions, over all tenants.
    active_sessions: usize,
    /// Sessions that were closed because nobody used them.
    cleaned_sessions: u64,
    /// Where a guest sees its files; the host's folder is nobody's business.
    notebooks_dir: &'static str,
    uploads_dir: &'static str,
    /// Kernels a tenant may have at once.
    max_sessions: usize,
    /// Seconds a run may take.
    execution_timeout: u64,
    /// By runtime: `available`, `binaries` and `missing`.
    #[schema(value_type = Object)]
    runtime_capabilities: Map<String, Value>,
    /// By runtime: `available` and `version`. GET /libraries has the packages.
    #[schema(value_type = Object)]
    runtime_libraries: Map<String, Value>,
}

/// Whether the daemon works, and what it enforces. Needs no key and names nobody.
#[utoipa::path(
    get, path = "/health", tag = "info", security(()),
    responses((status = 200, body = HealthResponse))
)]
async fn health(State(state): State<AppState>) -> Response {
    answer::json(StatusCode::OK, &health_body(&state))
}

/// The same under its other name.
#[utoipa::path(
    get, path = "/v1/health", tag = "info", security(()),
    responses((status = 200, body = HealthResponse))
)]
async fn v1_health(State(state): State<AppState>) -> Response {
    answer::json(StatusCode::OK, &health_body(&state))
}

fn health_body(state: &AppState) -> HealthResponse {
    let hello = state.code().hello();
    let (stats, backends) = (state.code().stats(), state.code().backends());
    let ready: Map<String, Value> =
        stats.slots_ready.iter().map(|(profile, ready)| (profile.name().to_owned(), json!(ready))).collect();
    HealthResponse {
        status: "healthy",
        version: VERSION,
        server: "caisson",
        revision: revision(),
        confinement: confinement(may_leave(&backends)),
        posture: hello.as_deref().map(posture_table),
        slots: json!({ "max": stats.slots_max, "ready": ready }),
        sandboxes: json!({ "live": stats.sandboxes_live }),
        warnings: public_warnings(hello.as_deref(), state.config(), &backends),
        active_sessions: stats.sessions + state.runs().map_or(0, |runs| runs.kernels()),
        cleaned_sessions: stats.sessions_cleaned,
        notebooks_dir: WORKSPACE,
        uploads_dir: WORKSPACE,
        max_sessions: state.config().librechat.sessions_max,
        execution_timeout: state.config().librechat.execution_timeout.as_secs(),
        runtime_capabilities: librechat::meta::capabilities(state),
        runtime_libraries: librechat::meta::versions(state),
    }
}

/// What confines cells: `external` where they may run at a Jupyter server, at which none of our layers holds.
pub(super) fn confinement(may_leave: bool) -> &'static str {
    if may_leave { "external" } else { "sandbox" }
}

/// Whether any cells may run there.
fn may_leave(backends: &Backends) -> bool {
    backends.code_may_leave || backends.jupyter_may_leave
}

/// A warning about cells that run elsewhere.
pub(super) fn external(backends: &Backends) -> Option<&'static str> {
    match (backends.code_may_leave, backends.jupyter_may_leave) {
        (true, _) => Some(
            "Python cells run at an external Jupyter server while it answers, where none of the layers here holds",
        ),
        (_, true) => Some(
            "cells of the Jupyter routes run at an external Jupyter server while it answers, where none of the layers \
             here holds",
        ),
        _ => None,
    }
}

/// The posture without what only an operator should read: failed calls and what to grant.
fn posture_table(hello: &Hello) -> Value {
    let row = |layer: &LayerReport| {
        json!({
            "layer": layer.layer,
            "enforced": layer.enforced,
            "detail": harmless(&layer.detail).unwrap_or_default(),
        })
    };
    let layers: Vec<Value> = hello.posture.layers.iter().map(row).collect();
    json!({ "name": hello.posture.posture.name(), "layers": layers })
}

/// Text that may be shown without a key: none with a path in it.
fn harmless(text: &str) -> Option<&str> {
    (!text.contains('/')).then_some(text)
}

fn public_warnings(hello: Option<&Hello>, config: &Config, backends: &Backends) -> Vec<String> {
    let Some(hello) = hello else {
        return vec!["the launcher has not reported yet".to_owned()];
    };
    let mut warnings: Vec<String> =
        hello.warnings.iter().filter_map(|text| harmless(text)).map(str::to_owned).collect();
    let missing = hello.posture.layers.iter().filter(|layer| !layer.enforced);
    warnings.extend(missing.map(|layer| format!("not enforced: {}", layer.layer)));
    warnings.extend(external(backends).map(str::to_owned));
    if config.is_open() {
        warnings.push("no API key is configured".to_owned());
    }
    warnings
}

/// Whether anybody is there.
#[utoipa::path(
    get, path = "/v1/ping", tag = "info", security(()),
    responses((status = 200, body = Envelope<String>))
)]
async fn ping() -> Response {
    Envelope::ok("pong").into_response()
}

/// What this daemon can do. It is always current, so `refresh` changes nothing.
#[utoipa::path(
    get, path = "/v1/capabilities", tag = "info",
    params(("refresh" = Option<bool>, Query, description = "Probe again")),
    responses((status = 200, body = Envelope<Value>), (status = 422, body = InvalidBody))
)]
async fn capabilities(
    State(state): State<AppState>,
    Extension(tenant): Extension<TenantId>,
    uri: Uri,
) -> Response {
    if let Err(invalid) = check_refresh(uri.query()) {
        return invalid.answer(aio::refuse::Generation::V1);
    }
    Envelope::ok(capabilities_body(&state, &tenant).await).into_response()
}

fn check_refresh(query: Option<&str>) -> Result<(), Invalid> {
    let pairs = query.unwrap_or_default().split('&');
    let mut values = pairs.filter_map(|pair| match pair.split_once('=') {
        Some(("refresh", value)) => Some(value),
        _ => None,
    });
    let known = ["", "0", "1", "true", "false", "True", "False"];
    match values.find(|value| !known.contains(value)) {
        None => Ok(()),
        Some(_) => Err(Invalid::schema(vec![FieldError {
            location: vec!["query"],
            message: "query value `refresh` must be true or false".to_owned(),
            kind: "type_error.bool",
        }])),
    }
}

async fn capabilities_body(state: &AppState, tenant: &TenantId) -> Value {
    let (hello, backends) = (state.code().hello(), state.code().backends());
    // Nothing, when it cannot be found out now.
    let found = state.commands().found(tenant).await.unwrap_or_default();
    let files = [
        "native",
        "read",
        "write",
        "replace",
        "search",
        "find",
        "grep",
        "glob",
        "list",
        "download",
        "str_replace_editor",
        "watch",
    ];
    let offered = |name: &str| state.files().is_some() && name != "watch";
    let files: Map<String, Value> =
        files.into_iter().map(|name| (name.to_owned(), json!(offered(name)))).collect();
    let absent = |what: &str| json!({ "status": "absent", "missing": [what], "warnings": [] });
    json!({
        "schema": CAPABILITIES_SCHEMA,
        "files": files,
        "exec": {
            "shell": found.bash.is_some() || found.sh.is_some(),
            "bash": found.bash.is_some(),
            "pty": found.bash.is_some() && found.terminal,
        },
        "bins": { "bash": found.bash, "sh": found.sh, "ps": found.ps, "powershell": null, "cmd": null },
        "isolation": isolation(hello.as_deref(), &backends),
        "code_interpreter": code_interpreter(hello.as_deref(), backends),
        "browser": absent("browser"),
        "computer": absent("display"),
    })
}

fn code_interpreter(hello: Option<&Hello>, backends: Backends) -> Value {
    let python = hello.and_then(|hello| hello.python.as_ref());
    let node = hello.and_then(|hello| hello.node.as_ref());
    let binary = |runtime: Option<&RuntimeReport>| runtime.map(|runtime| runtime.host_binary.clone());
    let absent = |runtime: Option<&RuntimeReport>, word: &'static str| runtime.is_none().then_some(word);
    let by_kernel = matches!(backends.python, Some("kernel" | "endpoint"));
    // JavaScript is the code routes' as well.
    let has_code = backends.python.is_some() || node.is_some();
    let kinds = [has_code.then_some("code"), node.map(|_| "nodejs"), by_kernel.then_some("jupyter")];
    let kinds: Vec<_> = kinds.into_iter().flatten().collect();
    let no_kernel = backends.jupyter.is_none().then_some("ipykernel");
    let missing = [absent(python, "python3"), absent(node, "node"), no_kernel];
    json!({
        "status": if kinds.is_empty() && backends.jupyter.is_none() { "absent" } else { "ready" },
        "backend": backends.python,
        "kinds": kinds,
        "default_python": binary(python),
        "default_node": binary(node),
        "python_kernels": backends.kernels,
        "javascript_backend": node.map(|_| "native"),
        "jupyter_backend": backends.jupyter,
        "endpoint": backends.endpoint,
        "missing": missing.into_iter().flatten().collect::<Vec<_>>(),
        "warnings": external(&backends).into_iter().collect::<Vec<_>>(),
    })
}

fn isolation(hello: Option<&Hello>, backends: &Backends) -> Value {
    let Some(hello) = hello else { return Value::Null };
    let warnings = hello.warnings.iter().map(String::as_str).chain(external(backends));
    json!({
        "confinement": confinement(may_leave(backends)),
        "posture": hello.posture.posture.name(),
        "root": hello.posture.root,
        "layers": hello.posture.layers,
        "accounts": hello.accounts,
        "warnings": warnings.collect::<Vec<_>>(),
    })
}

/// The sandbox as the guest sees it, with the capabilities.
#[utoipa::path(
    get, path = "/v2/sandbox", tag = "info",
    responses((status = 200, body = Envelope<Value>))
)]
async fn v2_sandbox(State(state): State<AppState>, Extension(tenant): Extension<TenantId>) -> Response {
    let data = json!({
        "home_dir": HOME,
        "workspace_dir": HOME,
        "workspace": HOME,
        "version": VERSION,
        "detail": detail(state.code().hello().as_deref()),
        "capabilities": capabilities_body(&state, &tenant).await,
    });
    Envelope::ok(data).into_response()
}

/// The same for clients of the first generation: a text, and the facts beside it.
#[utoipa::path(get, path = "/v1/sandbox", tag = "info", responses((status = 200, body = Object)))]
async fn v1_sandbox(State(state): State<AppState>) -> Response {
    let hello = state.code().hello();
    let body = json!({
        "success": true,
        "message": "ok",
        "data": summary(hello.as_deref(), &state.code().backends()),
        "hint": null,
        "home_dir": HOME,
        "workspace_dir": HOME,
        "workspace": HOME,
        "version": VERSION,
        "detail": detail(hello.as_deref()),
    });
    answer::json(StatusCode::OK, &body)
}

fn summary(hello: Option<&Hello>, backends: &Backends) -> String {
    let version = |runtime: Option<&RuntimeReport>| match runtime {
        Some(runtime) => format!("{} ({})", runtime.version, runtime.binary),
        None => "not available".to_owned(),
    };
    let python = version(hello.and_then(|hello| hello.python.as_ref()));
    let node = version(hello.and_then(|hello| hello.node.as_ref()));
    let elsewhere = external(backends).map(|text| format!("\nBut {text}")).unwrap_or_default();
    format!(
        "caisson {VERSION}\nHome and working directory: {HOME}\nPython: {python}\nNode.js: {node}\n\
         Network: none, except to programs of the same sandbox{elsewhere}"
    )
}

fn detail(hello: Option<&Hello>) -> Value {
    let system = rustix::system::uname();
    let runtime = |runtime: Option<&RuntimeReport>| -> Vec<Value> {
        let entry = |it: &RuntimeReport| json!({ "ver": it.version, "bin": it.binary, "alias": [] });
        runtime.map(entry).into_iter().collect()
    };
    json!({
        "system": {
            "os": "Linux",
            "os_version": system.release().to_string_lossy(),
            "arch": std::env::consts::ARCH,
            "user": "sandbox",
            "home_dir": HOME,
            "timezone": "UTC",
            "occupied_ports": [],
        },
        "runtime": {
            "python": runtime(hello.and_then(|hello| hello.python.as_ref())),
            "nodejs": runtime(hello.and_then(|hello| hello.node.as_ref())),
        },
        "utils": [{
            "category": "code",
            "tools": [
                { "name": "python", "description": "Python 3, with state between cells" },
                { "name": "javascript", "description": "Node.js, with state between cells" },
            ],
        }, {
            "category": "commands",
            "tools": [
                { "name": "bash", "description": "Shell commands, each a process of its own; a shell that keeps its state" },
            ],
        }],
    })
}
