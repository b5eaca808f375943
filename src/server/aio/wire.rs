//! Bodies of the AIO routes, both generations.
#![forbid(unsafe_code)]

use std::time::Duration;

use serde::{Serialize, Serializer};
use serde_json::{Map, Value};
use utoipa::ToSchema;

use super::refuse::{Generation, Invalid};
use crate::config::Config;
use crate::engine::run::NewSession;
use crate::engine::{
    CellRequest, Execution, Language, Output, Runner, SessionChoice, Status, Stream, TenantId,
};
use crate::server::code::{CodeInfo, Keeper, SessionEntry};
use crate::server::fields::{FieldError, Fields};
use crate::server::info::{HOME, confinement};

/// How much of a caller's word a message repeats, in characters.
const QUOTED_CHARS_MAX: usize = 100;

/// A cell to run. Unknown fields are ignored; null reads as absent.
#[derive(Debug, PartialEq, ToSchema)]
pub(crate) struct ExecuteRequest {
    /// `python` (also `python3`) or `javascript` (also `node`, `nodejs`, `js`).
    #[schema(value_type = String, example = "python")]
    language: Language,
    #[schema(example = "print(2 ** 10)")]
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
    /// An extension of ours: start the interpreter by a fresh exec, with an address-space layout and
    /// hash seed of its own.
    strict: Option<bool>,
}

impl ExecuteRequest {
    const FIELDS: [&'static str; 8] =
        ["language", "code", "session_id", "stateful", "timeout", "cwd", "user", "strict"];

    pub(crate) fn parse(body: &[u8], generation: Generation, config: &Config) -> Result<Self, Invalid> {
        let mut fields = Fields::parse(body, &Self::FIELDS).map_err(|error| Invalid::schema(vec![error]))?;
        let language = fields.required_text("language");
        let code = fields.required_text("code");
        let session_id = fields.text("session_id");
        let stateful = fields.boolean("stateful");
        let timeout = fields.number("timeout");
        let (cwd, user, strict) = (fields.text("cwd"), fields.text("user"), fields.boolean("strict"));
        let schema_errors = fields.into_errors();

        let mut reasons = Vec::new();
        let language = language.and_then(|name| known_language(&name, &mut reasons));
        if generation == Generation::V2 && code.as_deref() == Some("") {
            reasons.push(FieldError::in_body("code", "value_error.empty", "code must not be empty"));
        }
        check_timeout(timeout, config.limits.timeout_max, &mut reasons);
        match (language, code) {
            (Some(language), Some(code)) if schema_errors.is_empty() && reasons.is_empty() => {
                Ok(Self { language, code, session_id, stateful, timeout, cwd, user, strict })
            }
            _ => Err(Invalid { schema_errors, reasons }),
        }
    }

    pub(crate) fn into_cell(self, tenant: TenantId, config: &Config) -> CellRequest {
        CellRequest {
            tenant,
            language: self.language,
            runner: Runner::Chosen,
            code: self.code,
            session: session_choice(self.session_id, self.stateful),
            timeout: self.timeout.map_or(config.limits.timeout_default, Duration::from_secs_f64),
            cwd: self.cwd,
            user: self.user,
            strict: self.strict.unwrap_or(false) || config.strict,
            watcher: None,
        }
    }
}

/// Which session two fields of a request mean.
pub(super) fn session_choice(session_id: Option<String>, stateful: Option<bool>) -> SessionChoice {
    match (session_id, stateful) {
        (Some(id), _) => SessionChoice::Named(id),
        (None, Some(true)) => SessionChoice::Generated,
        (None, _) => SessionChoice::OneOff,
    }
}

/// What the error output of a failed execution says.
pub(super) fn failed_reason(execution: &Execution) -> String {
    let error = execution.outputs.iter().rev().find_map(|output| match output {
        Output::Error(error) => Some(error.evalue.clone()),
        _ => None,
    });
    error.unwrap_or_else(|| "execution failed".to_owned())
}

fn known_language(name: &str, reasons: &mut Vec<FieldError>) -> Option<Language> {
    let language = Language::parse(name);
    if language.is_none() {
        let quoted: String = name.chars().take(QUOTED_CHARS_MAX).collect();
        let message = format!("Unsupported language '{quoted}'. Supported: python, javascript");
        reasons.push(FieldError::in_body("language", "enum", message));
    }
    language
}

pub(super) fn check_timeout(timeout: Option<f64>, max: Duration, reasons: &mut Vec<FieldError>) {
    let max_secs = max.as_secs();
    let Some(secs) = timeout.filter(|secs| !(1.0..=max_secs as f64).contains(secs)) else { return };
    let message = format!("timeout must be between 1 and {max_secs} seconds, got {secs}");
    reasons.push(FieldError::in_body("timeout", "value_error.range", message));
}

/// A session to open. Every field may be absent, and so may the body.
#[derive(Debug, PartialEq, Eq, ToSchema)]
pub(crate) struct CreateSessionRequest {
    /// Default `python`.
    #[schema(value_type = Option<String>)]
    language: Language,
    /// Absent: a generated id. One that exists answers with that session.
    session_id: Option<String>,
    cwd: Option<String>,
    user: Option<String>,
}

impl CreateSessionRequest {
    const FIELDS: [&'static str; 4] = ["language", "session_id", "cwd", "user"];

    pub(crate) fn parse(body: &[u8]) -> Result<Self, Invalid> {
        let mut fields = Fields::parse(body, &Self::FIELDS).map_err(|error| Invalid::schema(vec![error]))?;
        let language = fields.text("language");
        let (session_id, cwd, user) = (fields.text("session_id"), fields.text("cwd"), fields.text("user"));
        let schema_errors = fields.into_errors();
        let mut reasons = Vec::new();
        let language = match language {
            Some(name) => known_language(&name, &mut reasons),
            None => Some(Language::Python),
        };
        match language {
            Some(language) if schema_errors.is_empty() => Ok(Self { language, session_id, cwd, user }),
            _ => Err(Invalid { schema_errors, reasons }),
        }
    }

    pub(crate) fn into_new(self) -> NewSession {
        NewSession {
            language: self.language,
            runner: Runner::Chosen,
            id: self.session_id,
            cwd: self.cwd,
            user: self.user,
            idle_max: None,
        }
    }
}

/// A mime bundle.
type Bundle = Map<String, Value>;

pub(super) fn status_word(status: Status) -> &'static str {
    match status {
        Status::Ok => "ok",
        Status::Error => "error",
        Status::Timeout => "timeout",
    }
}

fn stream_word(stream: Stream) -> &'static str {
    match stream {
        Stream::Stdout => "stdout",
        Stream::Stderr => "stderr",
    }
}

/// An output with the keys of its kind and no others.
#[derive(Debug, Serialize, ToSchema)]
#[serde(tag = "output_type", rename_all = "snake_case")]
pub(crate) enum OutputV2 {
    Stream {
        /// `stdout` or `stderr`.
        name: &'static str,
        text: String,
    },
    ExecuteResult {
        #[schema(value_type = Object)]
        data: Bundle,
        #[schema(value_type = Object)]
        metadata: Bundle,
        execution_count: u64,
    },
    DisplayData {
        #[schema(value_type = Object)]
        data: Bundle,
        #[schema(value_type = Object)]
        metadata: Bundle,
    },
    Error {
        ename: String,
        evalue: String,
        traceback: Vec<String>,
    },
}

impl From<Output> for OutputV2 {
    fn from(output: Output) -> Self {
        match output {
            Output::Stream { name, text } => OutputV2::Stream { name: stream_word(name), text },
            Output::ExecuteResult { data, metadata, execution_count } => {
                OutputV2::ExecuteResult { data, metadata, execution_count }
            }
            Output::DisplayData { data, metadata } => OutputV2::DisplayData { data, metadata },
            Output::Error(error) => {
                OutputV2::Error { ename: error.ename, evalue: error.evalue, traceback: error.traceback }
            }
        }
    }
}

/// An output with all nine keys; those its kind does not use are null.
#[derive(Debug, Default, Serialize, ToSchema)]
pub(crate) struct OutputV1 {
    /// `stream`, `execute_result`, `display_data` or `error`.
    output_type: &'static str,
    name: Option<&'static str>,
    text: Option<String>,
    #[schema(value_type = Option<Object>)]
    data: Option<Bundle>,
    #[schema(value_type = Option<Object>)]
    metadata: Option<Bundle>,
    execution_count: Option<u64>,
    ename: Option<String>,
    evalue: Option<String>,
    traceback: Option<Vec<String>>,
}

impl From<Output> for OutputV1 {
    fn from(output: Output) -> Self {
        match output {
            Output::Stream { name, text } => OutputV1 {
                output_type: "stream",
                name: Some(stream_word(name)),
                text: Some(text),
                ..OutputV1::default()
            },
            Output::ExecuteResult { data, metadata, execution_count } => OutputV1 {
                output_type: "execute_result",
                data: Some(data),
                metadata: Some(metadata),
                execution_count: Some(execution_count),
                ..OutputV1::default()
            },
            Output::DisplayData { data, metadata } => OutputV1 {
                output_type: "display_data",
                data: Some(data),
                metadata: Some(metadata),
                ..OutputV1::default()
            },
            Output::Error(error) => OutputV1 {
                output_type: "error",
                ename: Some(error.ename),
                evalue: Some(error.evalue),
                traceback: Some(error.traceback),
                ..OutputV1::default()
            },
        }
    }
}

/// How a cell went, as v2 says it.
#[derive(Debug, Serialize, ToSchema)]
pub(crate) struct ExecuteDataV2 {
    code: String,
    /// `python` or `javascript`, never an alias.
    language: &'static str,
    /// `ok`, `error` or `timeout`.
    status: &'static str,
    execution_count: u64,
    exit_code: i32,
    outputs: Vec<OutputV2>,
    stdout: String,
    stderr: String,
    session_id: Option<String>,
}

impl From<Execution> for ExecuteDataV2 {
    fn from(it: Execution) -> Self {
        Self {
            code: it.code,
            language: it.language.name(),
            status: status_word(it.status),
            execution_count: it.execution_count,
            exit_code: it.exit_code,
            outputs: it.outputs.into_iter().map(OutputV2::from).collect(),
            stdout: it.stdout,
            stderr: it.stderr,
            session_id: it.session_id,
        }
    }
}

/// The same as v1 says it: null for an empty stream, nine keys an output.
#[derive(Debug, Serialize, ToSchema)]
pub(crate) struct ExecuteDataV1 {
    code: String,
    /// `python` or `javascript`, never an alias.
    language: &'static str,
    /// `ok`, `error` or `timeout`.
    status: &'static str,
    execution_count: u64,
    exit_code: i32,
    outputs: Vec<OutputV1>,
    stdout: Option<String>,
    stderr: Option<String>,
    session_id: Option<String>,
}

impl From<Execution> for ExecuteDataV1 {
    fn from(it: Execution) -> Self {
        let some_text = |text: String| Some(text).filter(|text| !text.is_empty());
        Self {
            code: it.code,
            language: it.language.name(),
            status: status_word(it.status),
            execution_count: it.execution_count,
            exit_code: it.exit_code,
            outputs: it.outputs.into_iter().map(OutputV1::from).collect(),
            stdout: some_text(it.stdout),
            stderr: some_text(it.stderr),
            session_id: it.session_id,
        }
    }
}

/// A session, as the listing shows it.
#[derive(Debug, Serialize, ToSchema)]
pub(crate) struct SessionData {
    session_id: String,
    language: &'static str,
    /// Where it started. Empty where that is an external Jupyter server's business.
    cwd: String,
    /// Milliseconds since the epoch.
    created_at: u64,
    /// Milliseconds since the epoch.
    last_used: u64,
    /// Whole seconds since the last run.
    age_seconds: u64,
    /// Milliseconds of idle time before it is closed; native sessions.
    #[serde(skip_serializing_if = "Option::is_none")]
    max_idle_time: Option<u64>,
    /// Instead of `max_idle_time` where a kernel keeps the session.
    #[serde(skip_serializing_if = "Option::is_none")]
    kernel_name: Option<String>,
    /// `idle` or `executing`.
    state: &'static str,
}

/// What is known of a session's directory. A kernel of an external server starts wherever that one says; whether this
/// session's is one of those, nobody knows any more once the server is gone.
pub(super) fn cwd_of(entry: &SessionEntry, config: &Config) -> String {
    let is_kernel = matches!(entry.keeper, Keeper::Kernel { .. });
    let may_be_elsewhere = is_kernel && config.jupyter_endpoint.is_some();
    if may_be_elsewhere && entry.cwd == HOME { String::new() } else { entry.cwd.clone() }
}

impl SessionData {
    pub(crate) fn new(it: SessionEntry, config: &Config) -> Self {
        let cwd = cwd_of(&it, config);
        let (max_idle_time, kernel_name) = match it.keeper {
            Keeper::Native { idle_max } => (Some(idle_max.as_millis() as u64), None),
            Keeper::Kernel { name } => (None, Some(name)),
        };
        Self {
            session_id: it.session_id,
            language: it.language.name(),
            cwd,
            created_at: it.created_at_ms,
            last_used: it.last_used_ms,
            age_seconds: it.age.as_secs(),
            max_idle_time,
            kernel_name,
            state: if it.executing { "executing" } else { "idle" },
        }
    }
}

/// Every session of the caller, by listing key.
#[derive(Debug, Serialize, ToSchema)]
pub(crate) struct SessionList {
    #[serde(serialize_with = "as_object")]
    #[schema(value_type = std::collections::HashMap<String, SessionData>)]
    pub(crate) sessions: Vec<(String, SessionData)>,
}

pub(super) fn as_object<S: Serializer, T: Serialize>(
    entries: &[(String, T)],
    serializer: S,
) -> Result<S::Ok, S::Error> {
    serializer.collect_map(entries.iter().map(|(key, entry)| (key, entry)))
}

#[derive(Debug, Serialize, ToSchema)]
pub(crate) struct Deleted {
    /// False when there was no such session.
    pub(crate) deleted: bool,
}

#[derive(Debug, Serialize, ToSchema)]
pub(crate) struct Cleaned {
    pub(crate) cleaned_sessions: usize,
}

/// An interpreter.
#[derive(Debug, Serialize, ToSchema)]
pub(crate) struct Interpreter {
    /// Whether the code routes run its language.
    available: bool,
    /// Null also where an external Jupyter server runs it: it does not say.
    version: Option<String>,
}

/// A language the code routes take.
#[derive(Debug, Serialize, ToSchema)]
pub(crate) struct LanguageInfo {
    language: &'static str,
    description: &'static str,
    runtime_version: Option<String>,
    default_timeout: u64,
    max_timeout: u64,
    details: LanguageDetails,
}

#[derive(Debug, Serialize, ToSchema)]
pub(crate) struct LanguageDetails {
    aliases: Vec<&'static str>,
    /// `sandbox`; `external` where its cells may run at an external Jupyter server, at which nothing of ours confines them.
    confinement: &'static str,
}

/// What the code routes offer.
#[derive(Debug, Serialize, ToSchema)]
pub(crate) struct CodeInfoData {
    /// The layer that runs Python, null without one.
    backend: Option<&'static str>,
    kinds: Vec<&'static str>,
    languages: Vec<LanguageInfo>,
    python: Interpreter,
    node: Interpreter,
    /// Of the tier that runs Python; without one, of the one that runs JavaScript.
    max_sessions: usize,
    default_timeout: u64,
    max_timeout: u64,
    prewarmed: usize,
}

impl CodeInfoData {
    pub(crate) fn new(info: CodeInfo, python_confinement: &'static str, config: &Config) -> CodeInfoData {
        let default_timeout = config.limits.timeout_default.as_secs();
        let max_timeout = config.limits.timeout_max.as_secs();
        let language = |language: Language, description, version: &Option<String>, details| LanguageInfo {
            language: language.name(),
            description,
            runtime_version: version.clone(),
            default_timeout,
            max_timeout,
            details,
        };
        // Our own Python is none of the code routes' where another one runs the cells, or none does.
        let (python_description, python_version) = match info.backend {
            Some("endpoint") => ("Python 3 (IPython kernel of an external Jupyter server)", None),
            Some("kernel") => ("Python 3 (IPython kernel)", info.python),
            Some(_) => ("Python 3 (native REPL)", info.python),
            None => ("Python 3 (not available)", None),
        };
        let node_description =
            if info.node.is_some() { "Node.js (native REPL)" } else { "Node.js (not available)" };
        let has_python = info.backend.is_some();
        let by_kernel = matches!(info.backend, Some("kernel" | "endpoint"));
        let runs_something = has_python || info.node.is_some();
        let kinds = [
            has_python.then_some("python"),
            info.node.as_ref().map(|_| "nodejs"),
            by_kernel.then_some("jupyter"),
        ];
        CodeInfoData {
            backend: info.backend,
            kinds: kinds.into_iter().flatten().collect(),
            languages: vec![
                language(
                    Language::Python,
                    python_description,
                    &python_version,
                    LanguageDetails { aliases: vec!["python3"], confinement: python_confinement },
                ),
                language(
                    Language::JavaScript,
                    node_description,
                    &info.node,
                    LanguageDetails {
                        aliases: vec!["node", "nodejs", "js"],
                        confinement: confinement(false),
                    },
                ),
            ],
            python: Interpreter { available: has_python, version: python_version },
            node: Interpreter { available: info.node.is_some(), version: info.node },
            max_sessions: if runs_something { info.sessions_max } else { 0 },
            default_timeout,
            max_timeout,
            prewarmed: info.prewarmed,
        }
    }
}
