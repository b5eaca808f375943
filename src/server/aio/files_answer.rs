//! What the file routes answer with: results, and failures with the status of their generation.
#![forbid(unsafe_code)]

use axum::http::{HeaderValue, StatusCode, header};
use axum::response::{IntoResponse, Response};
use serde::Serialize;
use serde_json::{Map, Value, json};
use utoipa::{IntoResponses, ToSchema};

use super::files_wire::{Asked, NotTaken, Parsed};
use super::refuse::{Generation, InvalidBody, RefusedBody, refused};
use crate::engine::TenantId;
use crate::files::wire::{Answer, Edit, FaultKind, Op};
use crate::files::{FileError, fault_text};
use crate::server::AppState;
use crate::server::answer::{Envelope, json, json_sized};

/// When a caller may try again after a refusal that passes by itself.
const RETRY_AFTER_SECS: HeaderValue = HeaderValue::from_static("1");

/// What an operation is called, and what it is about, for answers that say that it failed.
#[derive(Clone, Debug)]
pub(super) struct About {
    pub(super) generation: Generation,
    /// Such as `read`.
    pub(super) operation: &'static str,
    /// Such as `read file`, to follow "Failed to".
    pub(super) doing: &'static str,
    pub(super) path: String,
    /// Members that published clients of v1 want to see on a failure too.
    pub(super) padding: Map<String, Value>,
    /// Whether failures have HTTP statuses on v1 too.
    pub(super) statuses: bool,
}

impl About {
    pub(super) fn new(
        generation: Generation,
        operation: &'static str,
        doing: &'static str,
        path: &str,
    ) -> About {
        About { generation, operation, doing, path: path.to_owned(), padding: Map::new(), statuses: false }
    }

    fn of(op: &Op, path: &str, generation: Generation) -> About {
        let (operation, doing) = words(op);
        let mut about = About::new(generation, operation, doing, path);
        if generation == Generation::V1 {
            about.padding = padding(op, path);
        }
        about
    }
}

fn words(op: &Op) -> (&'static str, &'static str) {
    match op {
        Op::Read { .. } => ("read", "read file"),
        Op::Write { .. } => ("write", "write file"),
        Op::List(_) => ("list", "list directory"),
        Op::Find { .. } => ("find", "find files"),
        Op::Glob(_) => ("glob", "find files"),
        Op::Grep(_) => ("grep", "search files"),
        Op::Search { .. } => ("search", "search file"),
        Op::Replace { .. } => ("replace", "replace in file"),
        Op::Edit { edit: Edit::View { .. }, .. } => ("view", "view"),
        Op::Edit { .. } => ("edit", "edit file"),
        Op::Stat { .. } => ("stat", "look at path"),
        Op::Mkdir { .. } => ("mkdir", "create directory"),
        Op::Copy { .. } => ("copy", "copy"),
        Op::Move { .. } => ("move", "move"),
        Op::Delete { .. } => ("delete", "delete"),
        Op::Open { .. } | Op::Space => ("download", "download file"),
        Op::Upload { .. } => ("upload", "upload file"),
        Op::TreeOut { .. } | Op::TreeIn { .. } | Op::Clear { .. } => ("tree", "transfer tree"),
    }
}

/// D-6: what `agent-sandbox` 0.0.30 requires of an answer, also where it failed.
fn padding(op: &Op, path: &str) -> Map<String, Value> {
    let members = match op {
        Op::Read { .. } => json!({ "file": path, "content": "" }),
        Op::Write { .. } | Op::Search { .. } | Op::Replace { .. } => json!({ "file": path }),
        Op::Glob(glob) => json!({ "pattern": glob.pattern }),
        Op::Grep(grep) => json!({ "pattern": grep.pattern }),
        Op::Edit { .. } => json!({ "output": "", "prev_exist": false }),
        _ => json!({}),
    };
    match members {
        Value::Object(members) => members,
        _ => Map::new(),
    }
}

/// What `data` of a failed operation holds.
#[derive(Debug, Serialize, ToSchema)]
pub(super) struct FileFailure {
    path: String,
    operation: &'static str,
    message: String,
    /// `not_found`, `permission_denied`, `already_exists`, `bad_request`, `invalid_path`, `invalid_target`,
    /// `decode_error`, `no_space_left`, `timed_out`, `interrupted` or `other`.
    error_type: &'static str,
    /// Whether the same request may succeed later without anything else being done.
    retryable: bool,
    errno: Option<i32>,
    errno_name: Option<String>,
    exception_type: &'static str,
    #[serde(flatten)]
    #[schema(value_type = Object)]
    padding: Map<String, Value>,
}

/// Beside what was done, or could not be.
#[derive(IntoResponses)]
#[expect(dead_code, reason = "the document's list of what a route may answer")]
pub(super) enum FileRefusals {
    #[response(status = 422, description = "The request does not say what to do")]
    Invalid(InvalidBody),
    #[response(status = 429, description = "Too many operations at once")]
    Busy(RefusedBody),
    #[response(status = 503, description = "Nothing was started")]
    Unavailable(RefusedBody),
}

/// Beside a result on v2, which has a status for each failure.
#[derive(IntoResponses)]
#[expect(dead_code, reason = "the document's list of what a route may answer")]
pub(super) enum FileFailures {
    #[response(status = 400, description = "The request cannot be carried out as it is")]
    BadRequest(Envelope<FileFailure>),
    #[response(status = 403, description = "Not allowed, or outside the space")]
    Forbidden(Envelope<FileFailure>),
    #[response(status = 404, description = "Nothing of this name")]
    NotFound(Envelope<FileFailure>),
    #[response(status = 409, description = "It is there already, or was done in part")]
    Conflict(Envelope<FileFailure>),
    #[response(status = 422, description = "The request does not say what to do, or text is no text")]
    Invalid(InvalidBody),
    #[response(status = 429, description = "Too many operations at once")]
    Busy(RefusedBody),
    #[response(status = 503, description = "Nothing was started")]
    Unavailable(RefusedBody),
    #[response(status = 507, description = "The space is full")]
    Full(Envelope<FileFailure>),
}

/// Does what was asked and answers.
pub(super) async fn run(
    state: &AppState,
    tenant: &TenantId,
    parsed: Parsed,
    generation: Generation,
) -> Response {
    let Asked { op, content, path, who } = match parsed {
        Ok(asked) => asked,
        Err(not_taken) => return not_taken.answer(generation),
    };
    let about = About::of(&op, &path, generation);
    let Some(files) = state.files() else { return failed(FileError::Unavailable, about) };
    let done = match files.enter(tenant, who.owner()).await {
        Ok(operation) => operation.call(op.clone(), &content).await,
        Err(error) => Err(error),
    };
    match done {
        Ok((answer, text)) => success(&op, &path, answer, text, about),
        Err(error) => {
            let path = path_of(&error, &op).map_or(about.path, str::to_owned);
            failed(error, About { path, ..about })
        }
    }
}

/// The path that a failure is about, where that is not the operation's own: what is taken already is a destination.
fn path_of<'a>(error: &FileError, op: &'a Op) -> Option<&'a str> {
    match (error, op) {
        (FileError::Fault(fault), Op::Copy { destination, .. } | Op::Move { destination, .. })
            if fault.kind == FaultKind::AlreadyExists =>
        {
            Some(destination)
        }
        _ => None,
    }
}

impl NotTaken {
    pub(super) fn answer(self, generation: Generation) -> Response {
        match self {
            NotTaken::Invalid(invalid) => invalid.answer(generation),
            NotTaken::Refused(message) => refused(StatusCode::BAD_REQUEST, message, None),
        }
    }
}

/// `data` of a text that was read.
#[derive(Debug, Serialize, ToSchema)]
pub(super) struct ReadData {
    content: String,
    file: String,
}

fn success(op: &Op, path: &str, answer: Answer, text: Vec<u8>, about: About) -> Response {
    let data = match (op, answer) {
        (_, Answer::Text) => {
            // The helper has looked; what comes from inside is looked at again.
            let Ok(content) = String::from_utf8(text) else { return failed(FileError::Interrupted, about) };
            let bytes = content.len() + content.len() / 8 + 1024;
            let data = ReadData { content, file: path.to_owned() };
            return json_sized(StatusCode::OK, &Envelope::ok(data), bytes);
        }
        (_, Answer::Written { bytes }) => json!({ "file": path, "bytes_written": bytes }),
        (_, Answer::Listed(listed)) => with(json!({ "path": path }), &listed),
        (_, Answer::Found { files, truncated }) => {
            json!({ "path": path, "files": files, "truncated": truncated })
        }
        (Op::Glob(glob), Answer::Globbed(found)) => {
            with(json!({ "path": path, "pattern": glob.pattern }), &found)
        }
        (Op::Grep(grep), Answer::Grepped(found)) => {
            with(json!({ "path": path, "pattern": grep.pattern }), &found)
        }
        (_, Answer::Searched { matches, line_numbers }) => {
            json!({ "file": path, "matches": matches, "line_numbers": line_numbers })
        }
        (_, Answer::Replaced { count }) => json!({ "file": path, "replaced_count": count }),
        (_, Answer::Edited(edited)) => {
            with(json!({ "path": path, "error": null, "metadata": null }), &edited)
        }
        (_, Answer::Stat(stat)) => with(json!({ "path": path }), &stat),
        (_, Answer::Made { created }) => json!({ "path": path, "created": created }),
        (Op::Copy { source, destination, .. }, Answer::Copied { files, bytes }) => json!({
            "source": source, "destination": destination, "files_copied": files, "bytes_copied": bytes,
        }),
        (Op::Move { source, destination, .. }, Answer::Moved) => {
            json!({ "source": source, "destination": destination })
        }
        (_, Answer::Deleted { is_directory }) => json!({ "path": path, "is_directory": is_directory }),
        _ => return failed(FileError::Interrupted, about),
    };
    Envelope::ok(data).into_response()
}

/// The members of `more` beside those of `base`.
fn with(base: Value, more: &impl Serialize) -> Value {
    let more = serde_json::to_value(more).expect("our answers have string keys and no failing parts");
    match (base, more) {
        (Value::Object(mut base), Value::Object(more)) => {
            base.extend(more);
            Value::Object(base)
        }
        (base, _) => base,
    }
}

/// A failure in the words of its generation.
pub(super) fn failed(error: FileError, about: About) -> Response {
    match error {
        FileError::User(message) => refused(StatusCode::BAD_REQUEST, message, None),
        FileError::Busy { .. } => {
            let hint = Some("wait until one is done, and send fewer at once");
            retry_later(refused(StatusCode::TOO_MANY_REQUESTS, error.to_string(), hint))
        }
        FileError::Unavailable => {
            let hint = Some("nothing was started");
            retry_later(refused(StatusCode::SERVICE_UNAVAILABLE, error.to_string(), hint))
        }
        _ => told(error, about),
    }
}

fn retry_later(mut response: Response) -> Response {
    response.headers_mut().insert(header::RETRY_AFTER, RETRY_AFTER_SECS);
    response
}

fn told(error: FileError, about: About) -> Response {
    let (errno, is_anchor) = match &error {
        FileError::Fault(fault) => (fault.errno, fault.kind == FaultKind::Anchor),
        _ => (None, false),
    };
    let (error_type, status) = kind(&error);
    let text = match &error {
        FileError::Fault(fault) => fault_text(fault),
        other => other.to_string(),
    };
    let message = if is_anchor { text } else { format!("Failed to {}: {text}", about.doing) };
    // v1 tells failures in the body; the editor's anchors and downloads are the exceptions.
    let status = match about.generation {
        Generation::V1 if !is_anchor && !about.statuses => StatusCode::OK,
        _ => status,
    };
    let data = FileFailure {
        path: about.path,
        operation: about.operation,
        message: message.clone(),
        error_type,
        retryable: false,
        errno,
        errno_name: errno.map(|errno| format!("{:?}", nix::errno::Errno::from_raw(errno))),
        exception_type: exception(&error, errno),
        padding: about.padding,
    };
    json(status, &Envelope { success: false, message, data: Some(data), hint: None })
}

/// A call that was cut short must not look as if repeating it were safe, which to clients every 5xx does.
fn kind(error: &FileError) -> (&'static str, StatusCode) {
    let FileError::Fault(fault) = error else {
        return match error {
            FileError::TimedOut => ("timed_out", StatusCode::BAD_REQUEST),
            _ => ("interrupted", StatusCode::CONFLICT),
        };
    };
    match fault.kind {
        FaultKind::NotFound => ("not_found", StatusCode::NOT_FOUND),
        FaultKind::PermissionDenied => ("permission_denied", StatusCode::FORBIDDEN),
        FaultKind::AlreadyExists => ("already_exists", StatusCode::CONFLICT),
        FaultKind::BadRequest | FaultKind::Anchor => ("bad_request", StatusCode::BAD_REQUEST),
        FaultKind::InvalidPath => ("invalid_path", StatusCode::BAD_REQUEST),
        FaultKind::InvalidTarget => ("invalid_target", StatusCode::BAD_REQUEST),
        FaultKind::DecodeError => ("decode_error", StatusCode::UNPROCESSABLE_ENTITY),
        FaultKind::NoSpaceLeft => ("no_space_left", StatusCode::INSUFFICIENT_STORAGE),
        FaultKind::TimedOut => ("timed_out", StatusCode::BAD_REQUEST),
        FaultKind::Other => ("other", StatusCode::INTERNAL_SERVER_ERROR),
    }
}

/// The name a Python program would know the failure by.
fn exception(error: &FileError, errno: Option<i32>) -> &'static str {
    use nix::errno::Errno;
    match (errno.map(Errno::from_raw), error) {
        (Some(Errno::ENOENT), _) => "FileNotFoundError",
        (Some(Errno::EACCES | Errno::EPERM), _) => "PermissionError",
        (Some(Errno::EEXIST), _) => "FileExistsError",
        (Some(Errno::EISDIR), _) => "IsADirectoryError",
        (Some(Errno::ENOTDIR), _) => "NotADirectoryError",
        (Some(_), _) => "OSError",
        (None, FileError::TimedOut) => "TimeoutError",
        (None, FileError::Fault(fault)) => match fault.kind {
            FaultKind::DecodeError => "UnicodeDecodeError",
            FaultKind::BadRequest | FaultKind::Anchor | FaultKind::InvalidPath => "ValueError",
            _ => "OSError",
        },
        (None, _) => "OSError",
    }
}

#[cfg(test)]
mod tests {
    use rustix::io::Errno;

    use super::*;
    use crate::files::wire::Fault;

    #[test]
    fn a_conflict_names_the_destination_and_nothing_else_does() {
        let (source, destination) = ("/tmp/a".to_owned(), "/tmp/b".to_owned());
        let copy = Op::Copy { source: source.clone(), destination: destination.clone(), overwrite: false };
        let rename = Op::Move { source, destination, overwrite: false };
        let fault = |errno| FileError::Fault(Fault::errno(errno));
        for op in [&copy, &rename] {
            assert_eq!(path_of(&fault(Errno::EXIST), op), Some("/tmp/b"));
            assert_eq!(path_of(&fault(Errno::NOENT), op), None);
            assert_eq!(path_of(&FileError::Interrupted, op), None);
        }
        let mkdir = Op::Mkdir { path: "/tmp/c".to_owned(), parents: false };
        assert_eq!(path_of(&fault(Errno::EXIST), &mkdir), None);
    }
}
