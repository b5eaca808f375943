//! The result of running a cell, in our own types. Families turn it into their bodies.
#![forbid(unsafe_code)]

use serde_json::{Map, Value};

use crate::engine::Language;

/// How a run went. `success` of every family is `status == Ok`.
#[derive(Copy, Clone, Debug, PartialEq, Eq, serde::Serialize, serde::Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Status {
    Ok,
    Error,
    Timeout,
}

/// Which of the two standard streams.
#[derive(Copy, Clone, Debug, PartialEq, Eq, Hash)]
pub enum Stream {
    Stdout,
    Stderr,
}

/// A mime bundle: type to content, in the order the interpreter gave them.
pub type Bundle = Map<String, Value>;

/// One entry of the notebook output list.
#[derive(Clone, Debug, PartialEq)]
pub enum Output {
    Stream { name: Stream, text: String },
    ExecuteResult { data: Bundle, metadata: Bundle, execution_count: u64 },
    DisplayData { data: Bundle, metadata: Bundle },
    Error(ErrorOutput),
}

/// Something that a running cell has produced, for a caller who watches it. In order of arrival, which may differ
/// from the order of the outputs at the end where two streams are written to at once.
#[derive(Clone, Debug, PartialEq)]
pub enum Piece {
    Output {
        output: Output,
        /// Names it for a later update.
        display_id: Option<String>,
    },
    /// New content for what is shown under `display_id`.
    Update { display_id: String, data: Bundle, metadata: Bundle },
    /// All outputs so far are to be taken away; with `wait` only when the next one comes.
    Clear { wait: bool },
}

impl Piece {
    /// Most characters that a watcher is told of a cell, text apart. Updates and outputs that are cleared again cost the
    /// cell nothing, and who watches may take nothing; the answer at the end has everything.
    pub const CHARS_MAX: usize = 8 * 1024 * 1024;
    /// A piece counts for at least so many of them.
    pub const CHARS_LEAST: usize = 64;
}

/// What an `error` output carries.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ErrorOutput {
    pub ename: String,
    pub evalue: String,
    pub traceback: Vec<String>,
}

impl ErrorOutput {
    /// An error of the daemon's own: there is no traceback.
    pub fn plain(ename: &str, evalue: String) -> ErrorOutput {
        ErrorOutput { ename: ename.to_owned(), evalue, traceback: Vec::new() }
    }
}

/// The answer to one cell. `status`, `exit_code`, `session_id` and `execution_count` come from the
/// daemon's own books, never from the interpreter.
#[derive(Clone, Debug, PartialEq)]
pub struct Execution {
    pub language: Language,
    /// The code that ran, byte for byte.
    pub code: String,
    pub status: Status,
    pub outputs: Vec<Output>,
    /// Each stream whole: the texts of its outputs, one after the other.
    pub stdout: String,
    pub stderr: String,
    /// 0 when the code completed, 1 after an error or a timeout.
    pub exit_code: i32,
    pub execution_count: u64,
    pub session_id: Option<String>,
    /// The kernel that ran it, if one did.
    pub kernel: Option<String>,
    /// The name of its request at an external Jupyter server.
    pub msg_id: Option<String>,
    /// Guidance beside the answer, such as a session that lost its memory to a restart.
    pub hint: Option<String>,
}

impl Execution {
    /// The answer where no cell could be run because of its user.
    pub fn process_error(language: Language, why: String) -> Execution {
        Execution {
            language,
            code: String::new(),
            status: Status::Error,
            outputs: vec![Output::Error(ErrorOutput::plain("ProcessError", why))],
            stdout: String::new(),
            stderr: String::new(),
            exit_code: 1,
            execution_count: 0,
            session_id: None,
            kernel: None,
            msg_id: None,
            hint: None,
        }
    }
}
