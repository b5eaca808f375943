//! `/v1/shell`: stateful shells on a terminal.
#![forbid(unsafe_code)]

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::{Duration, Instant, SystemTime};

use axum::response::{IntoResponse, Response};
use serde::Serialize;
use serde_json::Value;
use utoipa::ToSchema;
use utoipa_axum::router::OpenApiRouter;
use utoipa_axum::routes;

use super::super::refuse::{Invalid, InvalidBody, NotFound, NotOpened, RefusedBody};
use super::super::{Context, PathId};
use super::wire::{Body, cut_middle, timestamp};
use super::{No, Waits, done, hint, ok_sized};
use crate::commands::{Command, Outlook, Refused, SessionInfo, ShellCreate, ShellLine, Status, end_line};
use crate::engine::Stream;
use crate::server::AppState;
use crate::server::answer::Envelope;
use crate::server::body::JsonBytes;

type Answered = Result<Response, No<1>>;
/// Characters of an output when `truncate` is not switched off, and of each one in a view.
const OUTPUT_CHARS_MAX: usize = 30_000;
/// How long a wait takes when the request does not say.
const WAIT_DEFAULT: Duration = Duration::from_secs(30);

pub(super) fn routes() -> OpenApiRouter<AppState> {
    OpenApiRouter::new()
        .routes(routes!(exec))
        .routes(routes!(view))
        .routes(routes!(wait))
        .routes(routes!(write))
        .routes(routes!(kill))
        .routes(routes!(create_session))
        .routes(routes!(update_session))
        .routes(routes!(stats))
        .routes(routes!(list_sessions, clear_sessions))
        .routes(routes!(delete_session))
}

/// A line for a shell.
#[derive(ToSchema)]
#[expect(dead_code, reason = "the document's shape of a body that is read field by field")]
struct ShellExecRequest {
    #[schema(example = "cd /tmp && export DEMO=hello")]
    command: String,
    /// Absent: a new shell, whose id the answer has. An unknown one is refused.
    id: Option<String>,
    /// Where the shell goes first, and stays.
    exec_dir: Option<String>,
    async_mode: Option<bool>,
    /// Seconds this call waits; then the answer says `running`.
    timeout: Option<f64>,
    /// Refuse an `exec_dir` that is no folder, instead of staying where the shell is.
    strict: Option<bool>,
    /// Seconds without output after which the answer says `no_change_timeout`. Default: the shell's, 120.
    no_change_timeout: Option<f64>,
    /// Seconds after which it is ended; then the answer says `hard_timeout`.
    hard_timeout: Option<f64>,
    /// Go to `exec_dir` by the links it is written with.
    preserve_symlinks: Option<bool>,
    /// Cut the output to 30000 characters. Default true.
    truncate: Option<bool>,
}

/// What a line did.
#[derive(Debug, Serialize, ToSchema)]
struct ShellExecData {
    session_id: String,
    command: String,
    /// `running`, `completed`, `no_change_timeout`, `hard_timeout` or `terminated`.
    status: &'static str,
    /// What the terminal showed.
    output: String,
    console: Vec<ConsoleRecord>,
    exit_code: Option<i32>,
}

#[derive(Debug, Serialize, ToSchema)]
struct ConsoleRecord {
    /// The prompt it stood behind.
    ps1: String,
    command: String,
    output: String,
}

impl ConsoleRecord {
    fn of(line: &Command, chars_max: Option<usize>) -> ConsoleRecord {
        let output = cut_middle(line.read(0, 0, usize::MAX).stdout.text(), chars_max);
        ConsoleRecord { ps1: format!("sandbox@caisson:{} $", line.cwd), command: line.text.clone(), output }
    }
}

/// Where a line is, in the words of this plane.
fn status(outlook: &Outlook) -> &'static str {
    match outlook.status {
        Status::Running => "running",
        Status::Completed => "completed",
        Status::TimedOut => "hard_timeout",
        Status::Killed => "terminated",
    }
}

/// Run a line in a stateful shell: `cd` and `export` last.
#[utoipa::path(
    post, path = "/v1/shell/exec", tag = "shell", operation_id = "v1_shell_exec",
    request_body = ShellExecRequest,
    responses(
        (status = 200, body = Envelope<ShellExecData>, description = "It was run, whatever it did"),
        (status = 400, body = RefusedBody, description = "Another line runs, or `exec_dir` is no folder"),
        (status = 404, body = RefusedBody, description = "No such shell"),
        (status = 422, body = InvalidBody),
        (status = 429, body = RefusedBody),
        (status = 503, body = RefusedBody, description = "No bash; nothing was started"),
    )
)]
async fn exec(Context(state, tenant): Context, JsonBytes(body): JsonBytes) -> Answered {
    let Asked { line, waits, quiet_max, chars_max } = asked(&body)?;
    let mut running = state.commands().shell_run(&tenant, line).await?;
    // What it does to the shell is not to be torn: it goes on without its caller, and can be seen by `view`.
    running.let_go();
    let command = Arc::clone(&running.command);
    let shell = state.commands().shell(&tenant, command.session().as_str());
    let quiet_max = quiet_max.or_else(|| shell.ok().map(|shell| shell.quiet_max()));
    let is_quiet = follow(&command, waits, quiet_max).await;
    let outlook = command.outlook();
    let record = ConsoleRecord::of(&command, chars_max);
    let bytes = record.output.len() * 2;
    let data = ShellExecData {
        session_id: command.session().to_string(),
        command: command.text.clone(),
        status: if is_quiet && outlook.status == Status::Running {
            "no_change_timeout"
        } else {
            status(&outlook)
        },
        output: record.output.clone(),
        console: vec![record],
        exit_code: outlook.exit_code,
    };
    Ok(ok_sized(data, hint(&running, &outlook), bytes))
}

/// A line as it is asked for.
struct Asked {
    line: ShellLine,
    waits: Waits,
    quiet_max: Option<Duration>,
    chars_max: Option<usize>,
}

fn asked(body: &[u8]) -> Result<Asked, Invalid> {
    let wanted = [
        "command",
        "id",
        "exec_dir",
        "async_mode",
        "timeout",
        "strict",
        "no_change_timeout",
        "hard_timeout",
        "preserve_symlinks",
        "truncate",
    ];
    let mut body = Body::parse(body, &wanted)?;
    let line = ShellLine {
        text: body.required_text("command").unwrap_or_default(),
        session: body.fields.text("id"),
        cwd: body.text("exec_dir"),
        strict: body.fields.boolean("strict").unwrap_or(false),
        keeps_links: body.fields.boolean("preserve_symlinks").unwrap_or(false),
        hard_timeout: body.seconds("hard_timeout"),
    };
    let waits = match (body.fields.boolean("async_mode"), body.seconds("timeout")) {
        (Some(true), _) => Waits::No,
        (_, Some(timeout)) => Waits::AtMost(timeout),
        (_, None) => Waits::ForTheEnd,
    };
    let quiet_max = body.seconds("no_change_timeout");
    let chars_max = body.fields.boolean("truncate").unwrap_or(true).then_some(OUTPUT_CHARS_MAX);
    body.check()?;
    Ok(Asked { line, waits, quiet_max, chars_max })
}

/// Waits for a line's end, as long as the caller does and something happens. True when nothing did for too long.
async fn follow(line: &Command, waits: Waits, quiet_max: Option<Duration>) -> bool {
    let deadline = match waits {
        Waits::No => return false,
        Waits::AtMost(time) => Some(Instant::now() + time),
        Waits::ForTheEnd => None,
    };
    loop {
        let shown = line.produced(Stream::Stdout);
        let left = deadline.map(|deadline| deadline.saturating_duration_since(Instant::now()));
        let wait = [left, quiet_max].into_iter().flatten().min();
        let news = async {
            tokio::select! {
                _ = line.ended() => true,
                () = line.news(shown, u64::MAX) => false,
            }
        };
        let heard = match wait {
            Some(wait) => tokio::time::timeout(wait, news).await.ok(),
            None => Some(news.await),
        };
        match heard {
            Some(true) => return false,
            Some(false) => {}
            None => return left.is_none_or(|left| Some(left) != wait),
        }
    }
}

/// Which shell.
#[derive(ToSchema)]
#[expect(dead_code, reason = "the document's shape of a body that is read field by field")]
struct ShellIdRequest {
    id: String,
}

/// What a shell shows.
#[derive(Debug, Serialize, ToSchema)]
struct ShellViewData {
    output: String,
    session_id: String,
    console: Vec<ConsoleRecord>,
    status: &'static str,
    /// The one that runs, else the last.
    command: Option<String>,
    exit_code: Option<i32>,
}

fn id_of(body: &[u8]) -> Result<String, Invalid> {
    let mut body = Body::parse(body, &["id"])?;
    let id = body.fields.required_text("id").unwrap_or_default();
    body.check().map(|()| id)
}

/// Everything a shell has shown, line by line.
#[utoipa::path(
    post, path = "/v1/shell/view", tag = "shell", operation_id = "v1_shell_view",
    request_body = ShellIdRequest,
    responses((status = 200, body = Envelope<ShellViewData>), NotFound)
)]
async fn view(Context(state, tenant): Context, JsonBytes(body): JsonBytes) -> Answered {
    let shell = state.commands().shell(&tenant, &id_of(&body)?)?;
    let console: Vec<ConsoleRecord> =
        shell.commands().iter().map(|line| ConsoleRecord::of(line, Some(OUTPUT_CHARS_MAX))).collect();
    let output: String =
        console.iter().map(|it| format!("{} {}\n{}", it.ps1, it.command, ended_line(&it.output))).collect();
    let last = shell.current();
    let outlook = last.as_ref().map(|line| line.outlook());
    let bytes = output.len() * 2;
    let data = ShellViewData {
        output,
        session_id: shell.birth.id.to_string(),
        console,
        status: outlook.as_ref().map_or("completed", status),
        command: last.map(|line| line.text.clone()),
        exit_code: outlook.and_then(|outlook| outlook.exit_code),
    };
    Ok(ok_sized(data, None, bytes))
}

fn ended_line(output: &str) -> String {
    if output.is_empty() || output.ends_with('\n') { output.to_owned() } else { format!("{output}\n") }
}

/// How long to wait.
#[derive(ToSchema)]
#[expect(dead_code, reason = "the document's shape of a body that is read field by field")]
struct ShellWaitRequest {
    id: String,
    /// Seconds; default 30.
    seconds: Option<f64>,
    /// Seconds; the shorter of the two counts.
    max_wait_seconds: Option<f64>,
}

#[derive(Debug, Serialize, ToSchema)]
struct ShellStatusData {
    status: &'static str,
}

/// Wait for a shell's line to end.
#[utoipa::path(
    post, path = "/v1/shell/wait", tag = "shell", operation_id = "v1_shell_wait",
    request_body = ShellWaitRequest,
    responses((status = 200, body = Envelope<ShellStatusData>), NotFound)
)]
async fn wait(Context(state, tenant): Context, JsonBytes(body): JsonBytes) -> Answered {
    let mut body = Body::parse(&body, &["id", "seconds", "max_wait_seconds"])?;
    let id = body.fields.required_text("id").unwrap_or_default();
    let wait = [body.seconds("seconds"), body.seconds("max_wait_seconds")].into_iter().flatten().min();
    body.check()?;
    let status = match state.commands().shell(&tenant, &id)?.current() {
        None => "completed",
        Some(line) => {
            // Late is an answer too.
            drop(tokio::time::timeout(wait.unwrap_or(WAIT_DEFAULT), line.ended()).await);
            status(&line.outlook())
        }
    };
    Ok(Envelope::ok(ShellStatusData { status }).into_response())
}

/// What to type.
#[derive(ToSchema)]
#[expect(dead_code, reason = "the document's shape of a body that is read field by field")]
struct ShellWriteRequest {
    id: String,
    input: String,
    /// A line end after it. Default false.
    press_enter: Option<bool>,
}

/// Type into the terminal of a shell whose line runs.
#[utoipa::path(
    post, path = "/v1/shell/write", tag = "shell", operation_id = "v1_shell_write",
    request_body = ShellWriteRequest,
    responses(
        (status = 200, body = Envelope<ShellStatusData>),
        (status = 400, body = RefusedBody, description = "No line runs"),
        NotFound,
        (status = 429, body = RefusedBody),
    )
)]
async fn write(Context(state, tenant): Context, JsonBytes(body): JsonBytes) -> Answered {
    let mut body = Body::parse(&body, &["id", "input", "press_enter"])?;
    let id = body.fields.required_text("id").unwrap_or_default();
    let mut input = body.fields.required_text("input").unwrap_or_default();
    if body.fields.boolean("press_enter").unwrap_or(false) {
        input.push('\n');
    }
    body.check()?;
    let line = state.commands().shell(&tenant, &id)?.current().ok_or(Refused::NoCommandYet(id))?;
    line.input(input.as_bytes())?;
    Ok(Envelope::ok(ShellStatusData { status: status(&line.outlook()) }).into_response())
}

#[derive(Debug, Serialize, ToSchema)]
struct ShellKillData {
    status: &'static str,
    exit_code: Option<i32>,
    /// The same under its old name.
    returncode: Option<i32>,
}

/// End what a shell's line runs. What cannot be ended otherwise takes the shell along, and its state.
#[utoipa::path(
    post, path = "/v1/shell/kill", tag = "shell", operation_id = "v1_shell_kill",
    request_body = ShellIdRequest,
    responses((status = 200, body = Envelope<ShellKillData>), NotFound)
)]
async fn kill(Context(state, tenant): Context, JsonBytes(body): JsonBytes) -> Answered {
    let data = match state.commands().shell(&tenant, &id_of(&body)?)?.current() {
        None => ShellKillData { status: "completed", exit_code: None, returncode: None },
        Some(line) => {
            if line.is_running() {
                end_line(&line).await;
            }
            let outlook = line.outlook();
            ShellKillData {
                status: status(&outlook),
                exit_code: outlook.exit_code,
                returncode: outlook.exit_code,
            }
        }
    };
    Ok(Envelope::ok(data).into_response())
}

/// A shell to open.
#[derive(ToSchema)]
#[expect(dead_code, reason = "the document's shape of a body that is read field by field")]
struct ShellCreateRequest {
    /// Absent: a generated one. One that exists answers with that shell.
    id: Option<String>,
    exec_dir: Option<String>,
    /// Seconds without output after which a line is answered. Default 120.
    no_change_timeout: Option<f64>,
}

#[derive(Debug, Serialize, ToSchema)]
struct ShellCreateData {
    session_id: String,
    working_dir: String,
}

/// Open a shell ahead of its first line.
#[utoipa::path(
    post, path = "/v1/shell/sessions/create", tag = "shell", operation_id = "v1_shell_create_session",
    request_body(content = Option<ShellCreateRequest>),
    responses(
        (status = 200, body = Envelope<ShellCreateData>),
        (status = 400, body = RefusedBody, description = "A folder that is none"),
        NotOpened,
    )
)]
async fn create_session(Context(state, tenant): Context, JsonBytes(body): JsonBytes) -> Answered {
    let mut body = Body::parse(&body, &["id", "exec_dir", "no_change_timeout"])?;
    let create = ShellCreate {
        id: body.fields.text("id"),
        cwd: body.text("exec_dir"),
        quiet_max: body.seconds("no_change_timeout"),
    };
    body.check()?;
    let SessionInfo { session_id, working_dir, .. } = state.commands().shell_create(&tenant, create).await?;
    Ok(Envelope::ok(ShellCreateData { session_id, working_dir }).into_response())
}

/// What to change.
#[derive(ToSchema)]
#[expect(dead_code, reason = "the document's shape of a body that is read field by field")]
struct ShellUpdateRequest {
    id: String,
    /// Seconds without output after which a line is answered.
    no_change_timeout: Option<f64>,
}

/// Change a shell's settings.
#[utoipa::path(
    post, path = "/v1/shell/sessions/update", tag = "shell", operation_id = "v1_shell_update_session",
    request_body = ShellUpdateRequest,
    responses((status = 200, body = Envelope<Value>), NotFound)
)]
async fn update_session(Context(state, tenant): Context, JsonBytes(body): JsonBytes) -> Answered {
    let mut body = Body::parse(&body, &["id", "no_change_timeout"])?;
    let id = body.fields.required_text("id").unwrap_or_default();
    let quiet_max = body.seconds("no_change_timeout");
    body.check()?;
    let shell = state.commands().shell(&tenant, &id)?;
    if let Some(quiet_max) = quiet_max {
        shell.set_quiet_max(quiet_max);
    }
    Ok(done())
}

#[derive(Debug, Serialize, ToSchema)]
struct ShellStatsData {
    total_sessions: usize,
    /// Used within five minutes.
    active_sessions: usize,
    idle_sessions: usize,
    max_sessions: usize,
    /// Seconds.
    session_timeout: u64,
    /// 0 to 1.
    usage_ratio: f64,
}

/// Counts of the caller's shells.
#[utoipa::path(
    get, path = "/v1/shell/sessions/stats", tag = "shell", operation_id = "v1_shell_stats",
    responses((status = 200, body = Envelope<ShellStatsData>))
)]
async fn stats(Context(state, tenant): Context) -> Response {
    let stats = state.commands().shell_stats(&tenant);
    Envelope::ok(ShellStatsData {
        total_sessions: stats.sessions,
        active_sessions: stats.active,
        idle_sessions: stats.sessions - stats.active,
        max_sessions: stats.sessions_max,
        session_timeout: stats.idle_max.as_secs(),
        usage_ratio: stats.sessions as f64 / stats.sessions_max as f64,
    })
    .into_response()
}

#[derive(Debug, Serialize, ToSchema)]
struct ShellList {
    /// By id.
    sessions: BTreeMap<String, ShellData>,
}

#[derive(Debug, Serialize, ToSchema)]
struct ShellData {
    working_dir: String,
    /// ISO 8601, UTC.
    created_at: String,
    last_used_at: String,
    /// Whole seconds.
    age_seconds: u64,
    /// `ready`, or `running` while a line does.
    status: &'static str,
    current_command: Option<String>,
}

impl From<SessionInfo> for ShellData {
    fn from(it: SessionInfo) -> ShellData {
        let age = SystemTime::now().duration_since(it.created_at).unwrap_or_default();
        ShellData {
            working_dir: it.working_dir,
            created_at: timestamp(it.created_at),
            last_used_at: timestamp(it.last_used_at),
            age_seconds: age.as_secs(),
            status: if it.current_command.is_some() { "running" } else { "ready" },
            current_command: it.current_command,
        }
    }
}

/// Every shell of the caller, by id.
#[utoipa::path(
    get, path = "/v1/shell/sessions", tag = "shell", operation_id = "v1_shell_sessions",
    responses((status = 200, body = Envelope<ShellList>))
)]
async fn list_sessions(Context(state, tenant): Context) -> Response {
    let listed = state.commands().shells_list(&tenant);
    let sessions = listed.into_iter().map(|info| (info.session_id.clone(), ShellData::from(info))).collect();
    Envelope::ok(ShellList { sessions }).into_response()
}

#[derive(Debug, Serialize, ToSchema)]
struct ShellsCleaned {
    cleaned_sessions: usize,
}

/// End every shell of the caller.
#[utoipa::path(
    delete, path = "/v1/shell/sessions", tag = "shell", operation_id = "v1_shell_clear_sessions",
    responses((status = 200, body = Envelope<ShellsCleaned>))
)]
async fn clear_sessions(Context(state, tenant): Context) -> Response {
    let cleaned_sessions = state.commands().shells_clear(&tenant);
    Envelope::ok(ShellsCleaned { cleaned_sessions }).into_response()
}

/// End a shell and all it runs.
#[utoipa::path(
    delete, path = "/v1/shell/sessions/{session_id}", tag = "shell", operation_id = "v1_shell_delete_session",
    params(("session_id" = String, Path, description = "Session id, percent-encoded")),
    responses((status = 200, body = Envelope<Value>), (status = 404, body = RefusedBody))
)]
async fn delete_session(Context(state, tenant): Context, PathId(id): PathId) -> Answered {
    state.commands().shell_delete(&tenant, &id)?;
    Ok(done())
}
