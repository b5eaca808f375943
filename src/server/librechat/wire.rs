//! Bodies of the execution routes: what both generations of the client send, and what each of them reads.
#![forbid(unsafe_code)]

use std::fmt::Display;
use std::time::Duration;

use axum::http::{HeaderMap, StatusCode};
use serde::de::{DeserializeOwned, Deserializer};
use serde::{Deserialize, Serialize};
use serde_json::value::RawValue;
use utoipa::ToSchema;

use super::list::List;
use super::refuse::{FieldFault, Refused, UNSUPPORTED};
use crate::engine::Caller;
use crate::objects::Bucket;
use crate::runs::{Delivery, FILES_MAX, FileRef, OutFile, RunDone, RunRefused, RunRequest, Runs, Style};
use crate::server::answer::in_short;
use crate::server::body::{CODE_BYTES_MAX, is_too_long};

/// Which profile the current client expects; another word is refused.
const PROFILE: &str = "x-codeapi-expected-profile";
/// Headers that ask for machines of the caller's own, which there are none of here.
const ATTACHED: [&str; 2] = ["x-librechat-code-worker-id", "x-librechat-code-workspace-id"];
const USER: &str = "user-id";
/// Longest name of an assistant.
const ENTITY_CHARS_MAX: usize = 40;
/// Longest hint, user and session id that are looked at, in bytes.
const WORD_BYTES_MAX: usize = 512;
/// Most arguments of a program, and how many bytes they may have together: what the Linux kernel takes.
const ARGS_MAX: usize = 1024;
const ARGS_BYTES_MAX: usize = 100 * 1024;
/// Faults of one request that its answer lists; behind them nobody would go on reading.
const FAULTS_MAX: usize = 32;

/// Code to run, as the document shows it.
#[derive(Debug, ToSchema)]
#[schema(as = RestExecRequest)]
#[expect(dead_code, reason = "it is read field by field, so that every fault is told of; this is its shape")]
pub(super) struct ExecRequest {
    /// Source text; may be empty.
    code: String,
    #[schema(inline)]
    lang: Lang,
    /// The program's arguments: a list as it is, a string split as a shell would.
    #[schema(value_type = Option<Vec<String>>)]
    args: Option<serde_json::Value>,
    /// Goes on in that session's workspace, if it is the caller's.
    session_id: Option<String>,
    /// Keeps workspace and, for Python, names from call to call: 1 to 40 of `A-Za-z0-9_-`.
    entity_id: Option<String>,
    /// Who asks, where no token proves it. Tells users of one assistant apart.
    user_id: Option<String>,
    files: Option<Vec<ExecFile>>,
    /// Milliseconds, at most what the server allows.
    timeout: Option<f64>,
    /// Keeps the workspace from call to call, and no names.
    runtime_session_hint: Option<String>,
}

/// In any case. Which of them are installed, and what else, `GET /libraries` and `GET /health` tell.
#[derive(Debug, ToSchema)]
#[expect(dead_code, reason = "the document's list; names are looked up in the table of languages")]
enum Lang {
    #[schema(rename = "py")]
    Py,
    #[schema(rename = "python")]
    Python,
    #[schema(rename = "bash")]
    Bash,
    #[schema(rename = "sh")]
    Sh,
    #[schema(rename = "js")]
    Js,
    #[schema(rename = "javascript")]
    JavaScript,
    #[schema(rename = "node")]
    Node,
    #[schema(rename = "ts")]
    Ts,
    #[schema(rename = "typescript")]
    TypeScript,
    #[schema(rename = "go")]
    Go,
    #[schema(rename = "cpp")]
    Cpp,
    #[schema(rename = "c++")]
    CPlusPlus,
    #[schema(rename = "c")]
    C,
    #[schema(rename = "java")]
    Java,
    #[schema(rename = "php")]
    Php,
    #[schema(rename = "rs")]
    Rust,
    #[schema(rename = "f90")]
    Fortran,
    #[schema(rename = "r")]
    R,
    #[schema(rename = "d")]
    D,
}

/// A pointer to a stored file, of either generation.
#[derive(Debug, Deserialize, ToSchema)]
pub(super) struct ExecFile {
    id: String,
    /// Of an old client.
    session_id: Option<String>,
    /// Of a current one.
    storage_session_id: Option<String>,
    /// Where it is to lie in `/mnt/data`; empty: under its stored name.
    name: Option<String>,
    resource_id: Option<String>,
    kind: Option<String>,
    #[serde(default = "no_version", deserialize_with = "version")]
    #[schema(value_type = Option<u64>)]
    version: Result<Option<u64>, NoVersion>,
}

/// What stands in a version's place.
#[derive(Debug)]
struct NoVersion;

fn no_version() -> Result<Option<u64>, NoVersion> {
    Ok(None)
}

/// A number, or one in a string. Anything else may be of any size and is not kept.
fn version<'de, D: Deserializer<'de>>(json: D) -> Result<Result<Option<u64>, NoVersion>, D::Error> {
    let raw = <&RawValue>::deserialize(json)?.get();
    let number = match raw {
        "null" => return Ok(Ok(None)),
        quoted if quoted.starts_with('"') => {
            serde_json::from_str::<String>(quoted).ok().and_then(|text| text.parse().ok())
        }
        number => serde_json::from_str::<u64>(number).ok(),
    };
    Ok(number.map(Some).ok_or(NoVersion))
}

impl ExecFile {
    pub(super) fn is_of_current_client(&self) -> bool {
        self.storage_session_id.is_some()
    }
}

#[derive(Deserialize)]
struct RawExec<'a> {
    #[serde(borrow)]
    code: Option<&'a RawValue>,
    #[serde(borrow)]
    lang: Option<&'a RawValue>,
    #[serde(borrow)]
    args: Option<&'a RawValue>,
    #[serde(borrow)]
    session_id: Option<&'a RawValue>,
    #[serde(borrow)]
    entity_id: Option<&'a RawValue>,
    #[serde(borrow)]
    user_id: Option<&'a RawValue>,
    #[serde(borrow)]
    files: Option<&'a RawValue>,
    #[serde(borrow)]
    timeout: Option<&'a RawValue>,
    #[serde(borrow)]
    runtime_session_hint: Option<&'a RawValue>,
}

/// The fields of a body, taken one by one; what does not fit collects.
#[derive(Default)]
pub(super) struct Faults(Vec<FieldFault>);

impl Faults {
    pub(super) fn note(&mut self, field: &str, kind: &'static str, message: impl Display) {
        if !self.is_full() {
            self.0.push(FieldFault::in_body(field, kind, in_short(message)));
        }
    }

    fn is_full(&self) -> bool {
        self.0.len() >= FAULTS_MAX
    }

    /// A value that may be missing or null.
    pub(super) fn take<T: DeserializeOwned>(
        &mut self,
        field: &str,
        raw: Option<&RawValue>,
        wanted: &'static str,
    ) -> Option<T> {
        let raw = raw.filter(|raw| raw.get() != "null")?;
        match serde_json::from_str(raw.get()) {
            Ok(value) => Some(value),
            Err(_) => {
                self.note(field, "type_error", format!("must be {wanted}"));
                None
            }
        }
    }

    pub(super) fn required<T: DeserializeOwned>(
        &mut self,
        field: &str,
        raw: Option<&RawValue>,
        wanted: &'static str,
    ) -> Option<T> {
        if raw.is_none() {
            self.note(field, "missing", "field required");
        }
        self.take(field, raw, wanted)
    }

    /// A program, if it is no longer than a run takes.
    pub(super) fn code(&mut self, raw: Option<&RawValue>) -> Option<String> {
        let code: String = self.required("code", raw, "a string")?;
        if is_too_long(&code) {
            self.note("code", "value_error", format!("must not be longer than {CODE_BYTES_MAX} bytes"));
            return None;
        }
        Some(code)
    }

    /// A word that is short enough to be looked up; an empty one is none.
    pub(super) fn word(&mut self, field: &str, raw: Option<&RawValue>) -> Option<String> {
        let word: String = self.take(field, raw, "a string")?;
        if word.len() > WORD_BYTES_MAX {
            self.note(field, "value_error", format!("must not be longer than {WORD_BYTES_MAX} bytes"));
            return None;
        }
        Some(word).filter(|word| !word.is_empty())
    }

    /// Who it is, says the request: its field, else its header.
    pub(super) fn user(
        &mut self,
        raw: Option<&RawValue>,
        headers: &HeaderMap,
        caller: &Caller,
    ) -> Result<String, Refused> {
        match self.word("user_id", raw) {
            Some(user) => Ok(user),
            None => asserted_user(headers, caller),
        }
    }

    /// The first of them as a sentence, where there is no list of them.
    pub(super) fn sentence(self) -> Result<(), Refused> {
        let Some(FieldFault { loc, msg, .. }) = self.0.into_iter().next() else { return Ok(()) };
        let field = loc.get(1..).unwrap_or_default().join(".");
        Err(Refused::new(StatusCode::BAD_REQUEST, format!("{field}: {msg}")))
    }

    pub(super) fn done(self) -> Result<(), Refused> {
        if self.0.is_empty() { Ok(()) } else { Err(Refused::fields(self.0)) }
    }
}

/// A body as an object of raw fields.
pub(super) fn object<'a, T: Deserialize<'a>>(body: &'a [u8]) -> Result<T, Refused> {
    serde_json::from_slice(body).map_err(|error| {
        let kind = if error.is_data() { "type_error" } else { "json_invalid" };
        let msg = in_short(format_args!("invalid JSON object: {error}"));
        let fault = FieldFault { loc: vec!["body".to_owned()], msg, kind };
        Refused::fields(vec![fault])
    })
}

/// A request as it was sent, and the run that it asks for.
pub(super) struct Asked {
    pub(super) lang: String,
    pub(super) run: RunRequest,
}

/// Reads a request of `/exec` and its like.
pub(super) fn read_exec(
    runs: &Runs,
    headers: &HeaderMap,
    caller: Caller,
    body: &[u8],
) -> Result<Asked, Refused> {
    refuse_attached(headers)?;
    let profile = profile(headers)?;
    let raw: RawExec<'_> = object(body)?;
    let mut faults = Faults::default();
    let code = faults.code(raw.code);
    let lang: Option<String> = faults.required("lang", raw.lang, "a string");
    let args = args(&mut faults, raw.args);
    let session = faults.word("session_id", raw.session_id);
    let entity = faults.word("entity_id", raw.entity_id);
    if entity.as_deref().is_some_and(|entity| !is_entity(entity)) {
        let message =
            format!("entity_id must be <= {ENTITY_CHARS_MAX} characters and match ^[A-Za-z0-9_-]+$");
        faults.note("entity_id", "value_error", message);
    }
    let user = faults.user(raw.user_id, headers, &caller)?;
    let timeout = timeout(&mut faults, raw.timeout);
    let hint = faults.word("runtime_session_hint", raw.runtime_session_hint);
    let files = files(&mut faults, raw.files)?;
    faults.done()?;
    let lang = lang.unwrap_or_default();
    let language = runs.languages().resolve(&lang).cloned();
    let language = language.ok_or_else(|| unsupported(&lang))?;
    let current = profile.is_some() || hint.is_some() || files.iter().any(ExecFile::is_of_current_client);
    let run = RunRequest {
        caller,
        asserted_user: user,
        language,
        code: code.unwrap_or_default(),
        args,
        timeout,
        session,
        entity,
        hint: hint.filter(|_| profile != Some(Profile::Default)),
        files: files.into_iter().map(file_ref).collect::<Result<_, _>>()?,
        style: if current { Style::Current } else { Style::Classic },
        rich: false,
        tools: Vec::new(),
        programmatic: false,
    };
    Ok(Asked { lang, run })
}

/// Which kind of environment the current client expects.
#[derive(Copy, Clone, Debug, PartialEq, Eq)]
pub(super) enum Profile {
    Default,
    Stateful,
}

pub(super) fn profile(headers: &HeaderMap) -> Result<Option<Profile>, Refused> {
    match headers.get(PROFILE).map(|value| value.as_bytes()) {
        None => Ok(None),
        Some(b"default") => Ok(Some(Profile::Default)),
        Some(b"stateful") => Ok(Some(Profile::Stateful)),
        Some(_) => Err(Refused::new(StatusCode::BAD_REQUEST, "the expected profile is default or stateful")
            .code("invalid_execution_profile")),
    }
}

pub(super) fn refuse_attached(headers: &HeaderMap) -> Result<(), Refused> {
    match ATTACHED.iter().any(|name| headers.contains_key(*name)) {
        false => Ok(()),
        true => Err(Refused::new(StatusCode::CONFLICT, "attached workers and workspaces are not supported")
            .code(UNSUPPORTED)),
    }
}

pub(super) fn unsupported(lang: &str) -> Refused {
    // A name that is no word is not repeated: it may hold anything.
    let shown: String = lang.chars().filter(|c| !c.is_control()).take(WORD_BYTES_MAX).collect();
    Refused::new(StatusCode::BAD_REQUEST, format!("Unsupported language '{shown}'"))
}

/// Who it is, says the header; nobody proved it, and beside a token it counts for nothing. It parts the users of a key, so
/// whatever bytes it has, two that differ stay two: one that cannot be used is not the same as none.
pub(super) fn asserted_user(headers: &HeaderMap, caller: &Caller) -> Result<String, Refused> {
    let Some(value) = headers.get(USER).filter(|_| caller.user.is_none()) else { return Ok(String::new()) };
    let bytes = value.as_bytes();
    if bytes.len() > WORD_BYTES_MAX {
        let text = format!("User-Id must not be longer than {WORD_BYTES_MAX} bytes");
        return Err(Refused::new(StatusCode::BAD_REQUEST, text));
    }
    let in_latin_1 = || bytes.iter().map(|byte| char::from(*byte)).collect();
    Ok(str::from_utf8(bytes).map_or_else(|_| in_latin_1(), str::to_owned))
}

pub(super) fn header(headers: &HeaderMap, name: &str) -> Option<String> {
    let value = headers.get(name)?.to_str().ok()?;
    (1..=WORD_BYTES_MAX).contains(&value.len()).then(|| value.to_owned())
}

pub(super) fn is_entity(entity: &str) -> bool {
    let fits = |byte: u8| byte.is_ascii_alphanumeric() || byte == b'_' || byte == b'-';
    (1..=ENTITY_CHARS_MAX).contains(&entity.len()) && entity.bytes().all(fits)
}

fn args(faults: &mut Faults, raw: Option<&RawValue>) -> Vec<String> {
    let Some(raw) = raw.filter(|raw| raw.get() != "null") else { return Vec::new() };
    let args = match raw.get().starts_with('[') {
        true => listed_args(raw),
        false => split_args(raw),
    };
    args.unwrap_or_else(|(kind, message)| {
        faults.note("args", kind, message);
        Vec::new()
    })
}

type BadArgs = (&'static str, String);

fn listed_args(raw: &RawValue) -> Result<Vec<String>, BadArgs> {
    let list = List::read(raw, ARGS_MAX).ok_or_else(no_args)?;
    let mut args = Args::default();
    for element in &list.elements {
        args.add(serde_json::from_str(element.get()).map_err(|_| no_args())?)?;
    }
    if list.is_longer { Err(bad_args()) } else { Ok(args.list) }
}

fn split_args(raw: &RawValue) -> Result<Vec<String>, BadArgs> {
    let text: String = serde_json::from_str(raw.get()).map_err(|_| no_args())?;
    let (mut split, mut args) = (shlex::Shlex::new(&text), Args::default());
    for arg in split.by_ref() {
        args.add(arg)?;
    }
    match split.had_error {
        true => Err(("value_error", "has a quotation mark without its other half".to_owned())),
        false => Ok(args.list),
    }
}

fn no_args() -> BadArgs {
    ("type_error", "must be a string, a list of strings or null".to_owned())
}

fn bad_args() -> BadArgs {
    let message =
        format!("must be at most {ARGS_MAX} arguments of {ARGS_BYTES_MAX} bytes together, without NUL");
    ("value_error", message)
}

/// What fits of a program's arguments.
#[derive(Default)]
struct Args {
    list: Vec<String>,
    bytes: usize,
}

impl Args {
    fn add(&mut self, arg: String) -> Result<(), BadArgs> {
        self.bytes += arg.len() + 1;
        if self.list.len() == ARGS_MAX || self.bytes > ARGS_BYTES_MAX || arg.contains('\0') {
            return Err(bad_args());
        }
        self.list.push(arg);
        Ok(())
    }
}

pub(super) fn timeout(faults: &mut Faults, raw: Option<&RawValue>) -> Option<Duration> {
    let milliseconds: f64 = faults.take("timeout", raw, "a number of milliseconds")?;
    match Duration::try_from_secs_f64(milliseconds / 1000.0) {
        Ok(timeout) if !timeout.is_zero() => Some(timeout),
        // More than there can be is what the server allows.
        Err(_) if milliseconds > 0.0 => None,
        _ => {
            faults.note("timeout", "value_error", "must be more than 0 milliseconds");
            None
        }
    }
}

/// Refuses too many of them as a run would, before they are kept.
pub(super) fn files(faults: &mut Faults, raw: Option<&RawValue>) -> Result<Vec<ExecFile>, Refused> {
    let Some(raw) = raw.filter(|raw| raw.get() != "null") else { return Ok(Vec::new()) };
    let Some(list) = List::read(raw, FILES_MAX) else {
        faults.note("files", "type_error", "must be a list");
        return Ok(Vec::new());
    };
    if list.is_longer {
        return Err(refusal(&RunRefused::TooManyFiles { max: FILES_MAX }));
    }
    let mut files = Vec::with_capacity(list.elements.len());
    for (index, raw) in list.elements.into_iter().enumerate() {
        if faults.is_full() {
            break;
        }
        match serde_json::from_str::<ExecFile>(raw.get()) {
            Ok(file) if file.session_id.is_some() || file.storage_session_id.is_some() => files.push(file),
            Ok(_) => {
                faults.note(&format!("files.{index}"), "missing", "session_id or storage_session_id required")
            }
            Err(error) => faults.note(&format!("files.{index}"), "type_error", error),
        }
    }
    Ok(files)
}

/// What a pointer means. One that names no bucket that can be is refused.
pub(super) fn file_ref(file: ExecFile) -> Result<FileRef, Refused> {
    let bad = |error: &dyn Display| Refused::new(StatusCode::BAD_REQUEST, in_short(error));
    let version = file.version.map_err(|NoVersion| bad(&"version must be a number"))?;
    let bucket = match &file.kind {
        None => None,
        Some(kind) => {
            Some(Bucket::parse(kind, file.resource_id.as_deref(), version).map_err(|error| bad(&error))?)
        }
    };
    Ok(FileRef {
        id: file.id,
        session: file.storage_session_id.or(file.session_id).unwrap_or_default(),
        name: file.name,
        bucket,
    })
}

/// The answer to an execution, for both generations.
#[derive(Debug, Serialize, ToSchema)]
#[schema(as = ExecuteResponse)]
pub(super) struct ExecResponse<'a> {
    session_id: &'a str,
    stdout: &'a str,
    stderr: &'a str,
    files: Vec<OutFileBody>,
    #[serde(flatten)]
    traces: Traces,
    /// As it was sent.
    language: String,
    version: String,
    code: i32,
    signal: Option<&'static str>,
    message: Option<String>,
    /// `RE`, `SG`, `TO`, `OL`, `EL`, `XX`; null for success.
    status: Option<&'static str>,
    /// Milliseconds.
    wall_time: u64,
    run: RunBody<'a>,
}

/// The same in the words of the older project.
#[derive(Debug, Serialize, ToSchema)]
pub(super) struct RunBody<'a> {
    stdout: &'a str,
    stderr: &'a str,
    output: &'a str,
    code: i32,
    signal: Option<&'static str>,
    message: Option<String>,
    /// `success` or `error`.
    status: &'static str,
    memory: Option<u64>,
    cpu_time: Option<f64>,
    /// Seconds.
    wall_time: f64,
}

/// A file that the program left, or an input that it did not touch.
#[derive(Debug, Serialize, ToSchema)]
pub(super) struct OutFileBody {
    id: String,
    name: String,
    session_id: String,
    storage_session_id: String,
    path: String,
    #[serde(skip_serializing_if = "Option::is_none")]
    inherited: Option<bool>,
    #[serde(skip_serializing_if = "Option::is_none")]
    modified_from: Option<ModifiedFrom>,
}

#[derive(Debug, Serialize, ToSchema)]
struct ModifiedFrom {
    id: String,
    storage_session_id: String,
}

/// What a run has left beside files, where there is something to say.
#[derive(Debug, Default, Serialize, ToSchema)]
#[schema(as = ExecuteTraces)]
pub(super) struct Traces {
    #[serde(skip_serializing_if = "Vec::is_empty")]
    deleted_files: Vec<String>,
    #[serde(skip_serializing_if = "Option::is_none")]
    artifact_delivery: Option<DeliveryBody>,
    #[serde(skip_serializing_if = "Option::is_none")]
    runtime_session_id: Option<String>,
    /// `new` or `reused`.
    #[serde(skip_serializing_if = "Option::is_none")]
    runtime_status: Option<&'static str>,
}

impl Traces {
    pub(super) fn of(deleted: Vec<String>, delivery: Delivery, runtime: Option<(String, bool)>) -> Traces {
        let (runtime_session_id, reused) = runtime.unzip();
        Traces {
            deleted_files: deleted,
            artifact_delivery: DeliveryBody::of(delivery),
            runtime_session_id,
            runtime_status: reused.map(|reused| if reused { "reused" } else { "new" }),
        }
    }
}

/// What became of generated files when some could not be kept.
#[derive(Debug, Serialize, ToSchema)]
struct DeliveryBody {
    code: &'static str,
    status: &'static str,
    attempted: usize,
    delivered: usize,
    failed: usize,
}

impl DeliveryBody {
    fn of(delivery: Delivery) -> Option<DeliveryBody> {
        let Delivery { attempted, failed } = delivery;
        (failed > 0).then(|| DeliveryBody {
            code: "artifact_delivery_failed",
            status: if attempted == failed { "failed" } else { "partial" },
            attempted,
            delivered: attempted - failed,
            failed,
        })
    }
}

impl From<OutFile> for OutFileBody {
    fn from(file: OutFile) -> OutFileBody {
        let OutFile { record, name, inherited, modified_from } = file;
        OutFileBody {
            path: format!("/download/{}/{}", record.session, record.id),
            id: record.id,
            name,
            session_id: record.session.clone(),
            storage_session_id: record.session,
            inherited: inherited.then_some(true),
            modified_from: modified_from
                .map(|(id, storage_session_id)| ModifiedFrom { id, storage_session_id }),
        }
    }
}

impl<'a> ExecResponse<'a> {
    /// What was printed stands there three times and is not copied; the rest is taken out.
    pub(super) fn new(done: &'a mut RunDone, lang: String, version: String) -> ExecResponse<'a> {
        let RunDone { session, stdout, stderr, end, files, deleted, delivery, wall, runtime, .. } = done;
        let (files, deleted) = (std::mem::take(files), std::mem::take(deleted));
        let message = end.message().map(std::borrow::Cow::into_owned);
        let said = message.clone().or_else(|| {
            (!end.is_success()).then(|| format!("Execution failed with exit code {}", end.code()))
        });
        ExecResponse {
            session_id: session,
            run: RunBody {
                stdout,
                stderr,
                output: stdout,
                code: end.code(),
                signal: end.signal(),
                message: said,
                status: if end.is_success() { "success" } else { "error" },
                memory: None,
                cpu_time: None,
                wall_time: wall.as_secs_f64(),
            },
            stdout,
            stderr,
            files: files.into_iter().map(OutFileBody::from).collect(),
            traces: Traces::of(deleted, *delivery, runtime.take()),
            language: lang,
            version,
            code: end.code(),
            signal: end.signal(),
            message,
            status: end.status(),
            wall_time: u64::try_from(wall.as_millis()).unwrap_or(u64::MAX),
        }
    }
}

/// A request that was not run, in this family's words.
pub(super) fn refusal(refused: &RunRefused) -> Refused {
    use crate::engine::Refusal;
    let text = refused.to_string();
    match refused {
        RunRefused::NoRuntime(_) | RunRefused::NoWorkspaces => {
            Refused::new(StatusCode::SERVICE_UNAVAILABLE, text).code(UNSUPPORTED)
        }
        RunRefused::FileReference => Refused::new(StatusCode::FORBIDDEN, text),
        RunRefused::FileName | RunRefused::TooManyFiles { .. } => Refused::new(StatusCode::BAD_REQUEST, text),
        RunRefused::InputsTooLarge => Refused::new(StatusCode::PAYLOAD_TOO_LARGE, text),
        RunRefused::InputsInTheWay => Refused::new(StatusCode::CONFLICT, text),
        RunRefused::Store => Refused::new(StatusCode::SERVICE_UNAVAILABLE, text),
        RunRefused::Refusal(Refusal::ShuttingDown) => {
            Refused::new(StatusCode::SERVICE_UNAVAILABLE, "Service is shutting down")
        }
        RunRefused::Refusal(
            Refusal::TooManyKernelSessions { .. }
            | Refusal::TooManySessions { .. }
            | Refusal::TooManyWaiting { .. },
        ) => Refused::rate_limited("execution", BUSY_RETRY_SECS),
        RunRefused::Refusal(_) => Refused::new(StatusCode::SERVICE_UNAVAILABLE, text),
    }
}

/// When a caller may try again whose place is taken.
const BUSY_RETRY_SECS: u64 = 1;

#[cfg(test)]
mod tests {
    use super::*;

    fn split(args: &str) -> (Vec<String>, usize) {
        let raw = RawValue::from_string(args.to_owned()).unwrap();
        let mut faults = Faults::default();
        let args = super::args(&mut faults, Some(&raw));
        (args, faults.0.len())
    }

    #[test]
    fn users_of_one_key_stay_apart_however_they_are_called() {
        let caller = |user: Option<&str>| {
            let tenant = crate::engine::TenantId("t".to_owned());
            Caller { tenant, user: user.map(str::to_owned) }
        };
        let said = |value: &[u8], proven| {
            let value = axum::http::HeaderValue::from_bytes(value).expect("it can stand in a header");
            let headers = HeaderMap::from_iter([(axum::http::HeaderName::from_static(USER), value)]);
            let user = Faults::default().user(None, &headers, &caller(proven));
            user.map_err(|refused| refused.status().as_u16())
        };
        let word = |text: &str| Ok(text.to_owned());
        assert_eq!(said(b"ann", None), word("ann"));
        assert_eq!(said("jörg".as_bytes(), None), word("jörg"));
        assert_eq!(said("rené".as_bytes(), None), word("rené"));
        assert_eq!(said(b"\xff", None), word("ÿ"));
        assert_eq!(said(b"\xfe", None), word("þ"));
        assert_eq!(said(b"a\tb", None), word("a\tb"));
        assert_eq!(said(&[b'a'; WORD_BYTES_MAX], None), word(&"a".repeat(WORD_BYTES_MAX)));
        assert_eq!(said(&[b'a'; WORD_BYTES_MAX + 1], None), Err(400));
        assert_eq!(said(&[b'a'; WORD_BYTES_MAX + 1], Some("ann")), word(""), "it is known who it is");
        let raw = RawValue::from_string(r#""bob""#.to_owned()).expect("JSON");
        let user = Faults::default().user(Some(&raw), &HeaderMap::new(), &caller(None));
        assert_eq!(user.ok().as_deref(), Some("bob"));
    }

    #[test]
    fn arguments_are_taken_one_to_one_from_a_list_and_split_from_a_string() {
        assert_eq!(split(r#"["one", "two words", "$HOME", "'"]"#).0, ["one", "two words", "$HOME", "'"]);
        assert_eq!(split(r#""a 'b c' d""#).0, ["a", "b c", "d"]);
        for empty in ["[]", "null", r#""""#] {
            assert_eq!(split(empty), (Vec::new(), 0));
        }
        for bad in [r#""a 'b""#, r#"{"a":1}"#, "[1]", r#"["a\u0000b"]"#, r#""a\u0000b""#, "5"] {
            assert_eq!(split(bad).1, 1, "{bad}");
        }
    }

    #[test]
    fn arguments_are_bounded_while_they_are_read() {
        let list = |count: usize, arg: &str| format!("[{}]", vec![format!("{arg:?}"); count].join(","));
        assert_eq!(split(&list(ARGS_MAX, "a")).0.len(), ARGS_MAX);
        assert_eq!(split(&format!("{:?}", "a ".repeat(ARGS_MAX))).0.len(), ARGS_MAX);
        assert_eq!(split(&format!("{:?}", "a".repeat(ARGS_BYTES_MAX - 1))).1, 0);
        for large in [
            list(ARGS_MAX + 1, "a"),
            list(2, &"a".repeat(ARGS_BYTES_MAX / 2)),
            format!("[{}1]", "1,".repeat(4_000_000)),
            format!("{:?}", "a ".repeat(4_000_000)),
            format!("{:?}", "a".repeat(ARGS_BYTES_MAX)),
        ] {
            assert_eq!(split(&large), (Vec::new(), 1));
        }
    }

    fn read_files(text: &str) -> (Result<usize, u16>, Vec<FieldFault>) {
        let raw = RawValue::from_string(text.to_owned()).unwrap();
        let mut faults = Faults::default();
        let files = super::files(&mut faults, Some(&raw));
        (files.map(|files| files.len()).map_err(|refused| refused.status().as_u16()), faults.0)
    }

    #[test]
    fn files_and_their_faults_are_bounded_while_they_are_read() {
        let file = r#"{"id": "a", "session_id": "s"}"#;
        let list = |count: usize, element: &str| format!("[{}]", vec![element; count].join(","));
        assert_eq!(read_files(&list(FILES_MAX, file)), (Ok(FILES_MAX), Vec::new()));
        assert_eq!(read_files(&list(FILES_MAX + 1, file)).0, Err(400), "as a run refuses them");
        let (files, faults) = read_files(&list(4_000_000, "1"));
        assert_eq!((files, faults.len()), (Err(400), 0));
        let (files, faults) = read_files(&list(FILES_MAX, "1"));
        assert_eq!((files, faults.len()), (Ok(0), FAULTS_MAX));
        let (_, faults) = read_files(&list(2, &format!("{:?}", "x".repeat(8_000_000))));
        assert!(faults.len() == 2 && faults.iter().all(|fault| fault.msg.len() < 1024), "not all of it");
        assert_eq!(read_files("{}").1.len(), 1);
        let refused = object::<RawExec<'_>>(format!("{:?}", "x".repeat(8_000_000)).as_bytes()).err().unwrap();
        assert!(format!("{refused:?}").len() < 2048);
    }

    #[test]
    fn a_program_that_no_run_takes_is_a_field_that_does_not_fit() {
        let read = |code: &str| {
            let raw = RawValue::from_string(serde_json::to_string(code).unwrap()).unwrap();
            let mut faults = Faults::default();
            let code = faults.code(Some(&raw));
            (code.map(|code| code.len()), faults.done().map_err(|refused| refused.status().as_u16()))
        };
        assert_eq!(read(&"x".repeat(CODE_BYTES_MAX)), (Some(CODE_BYTES_MAX), Ok(())));
        for long in ["x".repeat(CODE_BYTES_MAX + 1), "\u{1}".repeat(CODE_BYTES_MAX / 2)] {
            assert_eq!(read(&long), (None, Err(422)));
        }
    }

    #[test]
    fn the_documents_languages_are_in_the_table() {
        let shown = serde_json::to_value(<Lang as utoipa::PartialSchema>::schema()).unwrap();
        let languages = crate::languages::tests::languages();
        let names = shown["enum"].as_array().unwrap();
        assert!(names.iter().all(|name| languages.resolve(name.as_str().unwrap()).is_some()), "{names:?}");
        let shown = |id: &str| {
            names.iter().filter_map(|name| languages.resolve(name.as_str()?)).any(|it| it.id == id)
        };
        assert!(languages.iter().all(|language| shown(&language.id)), "{names:?}");
    }

    #[test]
    fn what_was_printed_is_answered_three_times_and_kept_once() {
        let mut done = RunDone {
            session: "s".repeat(21),
            stdout: "out\n".to_owned(),
            stderr: "err\n".to_owned(),
            end: crate::runs::RunEnd::Exited(3),
            files: Vec::new(),
            deleted: Vec::new(),
            delivery: Delivery::default(),
            wall: Duration::from_millis(1500),
            runtime: None,
            result: None,
            error: None,
        };
        let printed = done.stdout.as_ptr();
        let response = ExecResponse::new(&mut done, "py".to_owned(), "3.11.2".to_owned());
        assert!(
            [response.stdout, response.run.stdout, response.run.output]
                .iter()
                .all(|text| text.as_ptr() == printed)
        );
        let body = serde_json::to_value(&response).unwrap();
        assert_eq!((&body["stdout"], &body["run"]["output"]), (&"out\n".into(), &"out\n".into()));
        assert_eq!((&body["stderr"], &body["run"]["stderr"]), (&"err\n".into(), &"err\n".into()));
        assert_eq!(
            (&body["status"], &body["run"]["code"], &body["wall_time"]),
            (&"RE".into(), &3.into(), &1500.into())
        );
    }

    #[test]
    fn a_version_is_a_number_or_the_text_of_one() {
        let version = |text: &str| {
            let text = format!(r#"{{"id": "a", "session_id": "s"{text}}}"#);
            serde_json::from_str::<ExecFile>(&text).unwrap().version.ok()
        };
        assert_eq!(version(""), Some(None));
        assert_eq!(version(r#", "version": null"#), Some(None));
        assert_eq!(version(r#", "version": 3"#), Some(Some(3)));
        assert_eq!(version(r#", "version": "3""#), Some(Some(3)));
        let many = format!(r#", "version": [{}1]"#, "1,".repeat(1_000_000));
        for bad in
            [r#", "version": -1"#, r#", "version": 1.5"#, r#", "version": "x""#, r#", "version": {}"#, &many]
        {
            assert_eq!(version(bad), None);
        }
    }

    #[test]
    fn a_time_limit_is_a_positive_number() {
        let read = |text: &str| {
            let raw = RawValue::from_string(text.to_owned()).unwrap();
            let mut faults = Faults::default();
            (super::timeout(&mut faults, Some(&raw)), faults.0.len())
        };
        assert_eq!(read("2000"), (Some(Duration::from_secs(2)), 0));
        assert_eq!(read("0.5"), (Some(Duration::from_micros(500)), 0));
        assert_eq!(read("1e300"), (None, 0));
        for bad in ["0", "-5", r#""soon""#, "1e-300", "[]"] {
            assert_eq!(read(bad), (None, 1), "{bad}");
        }
    }

    #[test]
    fn entities_are_matched_as_a_whole() {
        assert!(is_entity("a") && is_entity(&"x".repeat(40)) && is_entity("A-z_9"));
        for bad in ["", &"x".repeat(41), "a b", "a;b", "../x", "ü", "a\n"] {
            assert!(!is_entity(bad), "{bad:?}");
        }
    }

    #[test]
    fn only_what_failed_is_told_of_delivery() {
        assert!(DeliveryBody::of(Delivery { attempted: 3, failed: 0 }).is_none());
        let partial = DeliveryBody::of(Delivery { attempted: 3, failed: 1 }).unwrap();
        assert_eq!((partial.status, partial.delivered), ("partial", 2));
        assert_eq!(DeliveryBody::of(Delivery { attempted: 2, failed: 2 }).unwrap().status, "failed");
    }
}
