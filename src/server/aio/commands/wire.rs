//! Bodies of the command planes.
#![forbid(unsafe_code)]

use std::time::{Duration, SystemTime};

use serde::Serialize;
use utoipa::ToSchema;

use super::super::refuse::{Generation, Invalid};
use super::Waits;
use crate::commands::{Command, Create, Outlook, Part, Read, Run, SessionInfo, Status, Wanted};
use crate::server::fields::{FieldError, Fields};

/// Characters of a stream in an answer when the request does not say.
const OUTPUT_CHARS_DEFAULT: usize = 50_000;
/// Stands where the middle of an output was taken out.
const TRUNCATED: &str = "\n... output truncated ...\n";
/// Longest time that a request may name, in seconds.
const SECONDS_MAX: f64 = 604_800.0;
/// Largest environment of a session or command: an exec takes no more of one variable.
const ENV_ENTRIES_MAX: usize = 1_000;
const ENV_BYTES_MAX: usize = 128 * 1024;
/// How long a read waits for news when the request does not say.
const WAIT_DEFAULT: Duration = Duration::from_secs(30);

/// A body's fields, and what is wrong with their values.
pub(super) struct Body {
    pub(super) fields: Fields,
    reasons: Vec<FieldError>,
}

impl Body {
    pub(super) fn parse(body: &[u8], wanted: &[&'static str]) -> Result<Body, Invalid> {
        let fields = Fields::parse(body, wanted).map_err(|error| Invalid::schema(vec![error]))?;
        Ok(Body { fields, reasons: Vec::new() })
    }

    /// Text that a program will see.
    pub(super) fn text(&mut self, field: &'static str) -> Option<String> {
        let text = self.fields.text(field)?;
        self.check_nul(field, &text);
        Some(text)
    }

    pub(super) fn required_text(&mut self, field: &'static str) -> Option<String> {
        let text = self.fields.required_text(field)?;
        self.check_nul(field, &text);
        Some(text)
    }

    fn check_nul(&mut self, field: &'static str, text: &str) {
        if text.contains('\0') {
            let message = format!("{field} must not contain NUL");
            self.reasons.push(FieldError::in_body(field, "value_error", message));
        }
    }

    pub(super) fn environment(&mut self, field: &'static str) -> Vec<(String, Option<String>)> {
        let env = self.fields.text_map(field).unwrap_or_default();
        let bytes: usize =
            env.iter().map(|(name, value)| name.len() + value.as_deref().map_or(0, str::len)).sum();
        if env.len() > ENV_ENTRIES_MAX || bytes > ENV_BYTES_MAX {
            let message = format!("{field} may have {ENV_ENTRIES_MAX} entries and {ENV_BYTES_MAX} bytes");
            self.reasons.push(FieldError::in_body(field, "value_error.size", message));
            return Vec::new();
        }
        let fits = |(name, value): &(String, Option<String>)| {
            let value_fits = !value.as_deref().unwrap_or_default().contains('\0');
            !name.is_empty() && !name.contains(['=', '\0']) && value_fits
        };
        if let Some((name, _)) = env.iter().find(|entry| !fits(entry)) {
            let name: String = name.chars().take(40).collect();
            let message = format!("{field} has an entry that cannot be a variable: {name:?}");
            self.reasons.push(FieldError::in_body(field, "value_error", message));
        }
        env
    }

    pub(super) fn seconds(&mut self, field: &'static str) -> Option<Duration> {
        let seconds = self.fields.number(field)?;
        if (0.0..=SECONDS_MAX).contains(&seconds) {
            return Some(Duration::from_secs_f64(seconds));
        }
        let message = format!("{field} must be between 0 and {SECONDS_MAX} seconds, got {seconds}");
        self.reasons.push(FieldError::in_body(field, "value_error.range", message));
        None
    }

    pub(super) fn count(&mut self, field: &'static str) -> Option<u64> {
        let number = self.fields.number(field)?;
        if number >= 0.0 && number.fract() == 0.0 {
            return Some(number as u64);
        }
        let message = format!("{field} must be a whole number from 0 on, got {number}");
        self.reasons.push(FieldError::in_body(field, "value_error.range", message));
        None
    }

    /// One of `known`, the first of them when the field is absent.
    fn word(&mut self, field: &'static str, known: &[&'static str]) -> &'static str {
        let Some(text) = self.fields.text(field) else { return known[0] };
        if let Some(found) = known.iter().find(|word| **word == text) {
            return found;
        }
        let quoted: String = text.chars().take(40).collect();
        let message = format!("{field} must be one of {}, not '{quoted}'", known.join(", "));
        self.reasons.push(FieldError::in_body(field, "enum", message));
        known[0]
    }

    /// What was read, unless something was wrong.
    pub(super) fn check(self) -> Result<(), Invalid> {
        let schema_errors = self.fields.into_errors();
        if schema_errors.is_empty() && self.reasons.is_empty() {
            return Ok(());
        }
        Err(Invalid { schema_errors, reasons: self.reasons })
    }
}

/// A request to run, in our own types.
pub(super) struct RunAsk {
    pub(super) run: Run,
    pub(super) waits: Waits,
    /// Characters of each stream in the answer; `None` for all there are.
    pub(super) chars_max: Option<usize>,
}

/// Why a body asks for nothing that could be run.
pub(super) enum NoRun {
    Invalid(Invalid),
    /// `args` without `shell: none`.
    Args,
    /// A shell that no Linux sandbox has.
    NoShell(&'static str),
}

impl From<Invalid> for NoRun {
    fn from(invalid: Invalid) -> NoRun {
        NoRun::Invalid(invalid)
    }
}

/// A command to run. Unknown fields are ignored; null reads as absent.
#[derive(ToSchema)]
#[expect(dead_code, reason = "the document's shape of a body that is read field by field")]
pub(super) struct CommandRequest {
    /// A script; with `shell: "none"` the path of a program.
    #[schema(example = "echo $((6 * 7))")]
    command: String,
    /// Arguments, with `shell: "none"` only.
    args: Option<Vec<String>>,
    /// `auto` (bash if there is one), `bash`, `sh` or `none`.
    shell: Option<String>,
    /// Where it starts; relative to the session's.
    cwd: Option<String>,
    /// Wins over the session's. Null takes a variable out.
    #[schema(value_type = Option<Object>)]
    env: Option<()>,
    /// An account of the sandbox; fixed per session.
    user: Option<String>,
    /// Absent: a session of its own, whose id the answer has.
    session: Option<String>,
    /// Seconds this call waits; then the answer says `running` and the command goes on. Absent: to its end.
    timeout: Option<f64>,
    /// Seconds after which it is killed.
    hard_timeout: Option<f64>,
    /// Characters per stream in this answer; the middle is left out. 0: no limit. Default 50000.
    max_output_length: Option<u64>,
    /// `sync` or `async`.
    mode: Option<String>,
}

const RUN_FIELDS: [&str; 11] = [
    "command",
    "args",
    "shell",
    "cwd",
    "env",
    "user",
    "session",
    "timeout",
    "hard_timeout",
    "max_output_length",
    "mode",
];

/// Reads the body of `POST /v2/commands`.
pub(super) fn run_request(body: &[u8]) -> Result<RunAsk, NoRun> {
    let mut body = Body::parse(body, &RUN_FIELDS)?;
    let command = body.required_text("command").unwrap_or_default();
    let args = body.fields.texts("args");
    if args.iter().flatten().any(|arg| arg.contains('\0')) {
        body.check_nul("args", "\0");
    }
    let shell = body.word("shell", &["auto", "bash", "sh", "none", "powershell", "cmd"]);
    let is_async = body.word("mode", &["sync", "async"]) == "async";
    let (timeout, hard_timeout) = (body.seconds("timeout"), body.seconds("hard_timeout"));
    let chars_max = body.count("max_output_length");
    let wanted = match (shell, args) {
        ("none", args) => Ok(Wanted::Words([vec![command], args.unwrap_or_default()].concat())),
        ("powershell" | "cmd", _) => Err(NoRun::NoShell(shell)),
        (_, Some(_)) => Err(NoRun::Args),
        ("bash", None) => Ok(Wanted::Bash(command)),
        ("sh", None) => Ok(Wanted::Sh(command)),
        (_, None) => Ok(Wanted::Script(command)),
    };
    let (session, cwd, user) = (body.fields.text("session"), body.text("cwd"), body.fields.text("user"));
    let env = body.environment("env");
    // What is wrong with a field is said before what is wrong with their combination.
    body.check()?;
    let run =
        Run { wanted: wanted?, session, cwd, keeps_cwd: false, env, user, hard_timeout, stdin_ends: false };
    Ok(RunAsk { run, waits: waits(is_async, timeout), chars_max: limit(chars_max) })
}

/// The same as the first generation writes it.
#[derive(ToSchema)]
#[expect(dead_code, reason = "the document's shape of a body that is read field by field")]
pub(super) struct BashRequest {
    #[schema(example = "echo $((6 * 7))")]
    command: String,
    /// Absent: a session of its own, whose id the answer has.
    session_id: Option<String>,
    /// Where it starts, and where later commands of the session start too.
    exec_dir: Option<String>,
    /// For this command only. Null takes a variable out.
    #[schema(value_type = Option<Object>)]
    env: Option<()>,
    async_mode: Option<bool>,
    /// Seconds this call waits; then the answer says `running` and the command goes on. Absent: to its end.
    timeout: Option<f64>,
    /// Seconds after which it is killed.
    hard_timeout: Option<f64>,
    /// Characters per stream in this answer; the middle is left out. 0: no limit. Default 50000.
    max_output_length: Option<u64>,
    /// An account of the sandbox; fixed per session.
    user: Option<String>,
}

const BASH_FIELDS: [&str; 9] = [
    "command",
    "session_id",
    "exec_dir",
    "env",
    "async_mode",
    "timeout",
    "hard_timeout",
    "max_output_length",
    "user",
];

/// Reads the body of `POST /v1/bash/exec`.
pub(super) fn bash_request(body: &[u8]) -> Result<RunAsk, Invalid> {
    let mut body = Body::parse(body, &BASH_FIELDS)?;
    let command = body.required_text("command").unwrap_or_default();
    let is_async = body.fields.boolean("async_mode").unwrap_or(false);
    let (timeout, hard_timeout) = (body.seconds("timeout"), body.seconds("hard_timeout"));
    let chars_max = body.count("max_output_length");
    let run = Run {
        wanted: Wanted::Script(command),
        session: body.fields.text("session_id"),
        cwd: body.text("exec_dir"),
        keeps_cwd: true,
        env: body.environment("env"),
        user: body.fields.text("user"),
        hard_timeout,
        stdin_ends: false,
    };
    body.check()?;
    Ok(RunAsk { run, waits: waits(is_async, timeout), chars_max: limit(chars_max) })
}

fn waits(is_async: bool, timeout: Option<Duration>) -> Waits {
    match (is_async, timeout) {
        (true, _) => Waits::No,
        (false, Some(timeout)) => Waits::AtMost(timeout),
        (false, None) => Waits::ForTheEnd,
    }
}

fn limit(chars_max: Option<u64>) -> Option<usize> {
    match chars_max {
        Some(0) => None,
        Some(chars) => Some(usize::try_from(chars).unwrap_or(usize::MAX)),
        None => Some(OUTPUT_CHARS_DEFAULT),
    }
}

/// A session to make.
#[derive(ToSchema)]
#[expect(dead_code, reason = "the document's shape of a body that is read field by field")]
pub(super) struct CommandSessionRequest {
    /// Absent: a generated one. One that exists answers with that session.
    id: Option<String>,
    /// Where its commands start.
    cwd: Option<String>,
    #[schema(value_type = Option<Object>)]
    env: Option<()>,
    user: Option<String>,
}

pub(super) fn create_request(body: &[u8]) -> Result<Create, Invalid> {
    let mut body = Body::parse(body, &["id", "cwd", "env", "user"])?;
    let create = Create {
        id: body.fields.text("id"),
        cwd: body.text("cwd"),
        env: body.environment("env"),
        user: body.fields.text("user"),
    };
    body.check()?;
    Ok(create)
}

/// The same as the first generation writes it.
#[derive(ToSchema)]
#[expect(dead_code, reason = "the document's shape of a body that is read field by field")]
pub(super) struct BashCreateRequest {
    session_id: Option<String>,
    exec_dir: Option<String>,
    /// A script that every command of the session reads first.
    snapshot_path: Option<String>,
}

pub(super) fn bash_create_request(body: &[u8]) -> Result<Create, Invalid> {
    let mut body = Body::parse(body, &["session_id", "exec_dir", "snapshot_path"])?;
    let (id, cwd) = (body.fields.text("session_id"), body.text("exec_dir"));
    let snapshot = body.text("snapshot_path");
    body.check()?;
    // What a bash that is not interactive reads first.
    let env = snapshot.map(|path| ("BASH_ENV".to_owned(), Some(path))).into_iter().collect();
    Ok(Create { id, cwd, env, user: None })
}

/// A read of output.
#[derive(Debug, PartialEq, Eq)]
pub(super) struct OutputAsk {
    pub(super) offset: u64,
    pub(super) stderr_offset: u64,
    /// How long to wait for news.
    pub(super) waits: Option<Duration>,
}

/// The query of `GET /v2/commands/{id}`.
pub(super) fn output_query(query: Option<&str>) -> Result<OutputAsk, Invalid> {
    let value = |name: &str| {
        let pairs = query.unwrap_or_default().split('&').filter_map(|pair| pair.split_once('='));
        pairs.filter(|(key, value)| *key == name && !value.is_empty()).map(|(_, value)| value).next_back()
    };
    let mistyped = |name: &str, what: &str| {
        let message = format!("query value `{name}` must be {what}");
        Invalid::schema(vec![FieldError { location: vec!["query"], message, kind: "type_error" }])
    };
    let count = |name: &str| match value(name) {
        None => Ok(0),
        Some(text) => text.parse::<u64>().map_err(|_| mistyped(name, "a whole number from 0 on")),
    };
    let wait = match value("wait") {
        None => false,
        Some("true" | "True" | "1") => true,
        Some("false" | "False" | "0") => false,
        Some(_) => return Err(mistyped("wait", "true or false")),
    };
    let time = match value("wait_timeout") {
        None => WAIT_DEFAULT,
        Some(text) => {
            let seconds = text.parse::<f64>().ok().filter(|seconds| (0.0..=SECONDS_MAX).contains(seconds));
            Duration::from_secs_f64(seconds.ok_or_else(|| mistyped("wait_timeout", "seconds"))?)
        }
    };
    Ok(OutputAsk {
        offset: count("offset")?,
        stderr_offset: count("stderr_offset")?,
        waits: wait.then_some(time),
    })
}

/// A read of output as the first generation writes it.
#[derive(ToSchema)]
#[expect(dead_code, reason = "the document's shape of a body that is read field by field")]
pub(super) struct BashOutputRequest {
    session_id: String,
    /// Absent: the one that runs, else the last.
    command_id: Option<String>,
    offset: Option<u64>,
    stderr_offset: Option<u64>,
    /// Wait for new output.
    wait: Option<bool>,
    /// Seconds; default 30.
    wait_timeout: Option<f64>,
}

/// Session, command, and what to read.
pub(super) fn bash_output_request(body: &[u8]) -> Result<(String, Option<String>, OutputAsk), Invalid> {
    let wanted = ["session_id", "command_id", "offset", "stderr_offset", "wait", "wait_timeout"];
    let mut body = Body::parse(body, &wanted)?;
    let session = body.fields.required_text("session_id").unwrap_or_default();
    let command = body.fields.text("command_id");
    let (offset, stderr_offset) = (body.count("offset"), body.count("stderr_offset"));
    let wait = body.fields.boolean("wait").unwrap_or(false);
    let time = body.seconds("wait_timeout").unwrap_or(WAIT_DEFAULT);
    body.check()?;
    let ask = OutputAsk {
        offset: offset.unwrap_or(0),
        stderr_offset: stderr_offset.unwrap_or(0),
        waits: wait.then_some(time),
    };
    Ok((session, command, ask))
}

/// How a command went, or goes.
#[derive(Debug, Serialize, ToSchema)]
pub(super) struct CommandRunData {
    session_id: String,
    command_id: String,
    command: String,
    /// `running`, `completed` or `timed_out`.
    status: &'static str,
    /// The first generation has null for an empty stream.
    stdout: Option<String>,
    stderr: Option<String>,
    /// stdout, then stderr.
    output: String,
    /// Null until the end; -1 when a signal ended it.
    exit_code: Option<i32>,
    /// Bytes of stdout produced so far.
    offset: u64,
    stderr_offset: u64,
}

impl CommandRunData {
    pub(super) fn new(
        command: &Command,
        read: &Read,
        chars_max: Option<usize>,
        generation: Generation,
    ) -> CommandRunData {
        let text = |part: &Part| cut_middle(part.text(), chars_max);
        let (stdout, stderr) = (text(&read.stdout), text(&read.stderr));
        CommandRunData {
            session_id: command.session().to_string(),
            command_id: command.id.clone(),
            command: command.text.clone(),
            status: status(&read.outlook),
            output: format!("{stdout}{stderr}"),
            stdout: stream_text(stdout, generation),
            stderr: stream_text(stderr, generation),
            exit_code: read.outlook.exit_code,
            offset: read.stdout.end,
            stderr_offset: read.stderr.end,
        }
    }
}

fn stream_text(text: String, generation: Generation) -> Option<String> {
    Some(text).filter(|text| generation == Generation::V2 || !text.is_empty())
}

/// Output from two offsets on, and the command's state.
#[derive(Debug, Serialize, ToSchema)]
pub(super) struct CommandOutputData {
    session_id: String,
    stdout: Option<String>,
    stderr: Option<String>,
    /// Where the next read goes on.
    offset: u64,
    stderr_offset: u64,
    /// Where this part begins; beyond the offset asked for when there is a gap.
    stdout_start_offset: u64,
    stderr_start_offset: u64,
    /// Output before this part is no longer kept.
    stdout_gap: bool,
    stderr_gap: bool,
    command: CommandStateData,
}

#[derive(Debug, Serialize, ToSchema)]
pub(super) struct CommandStateData {
    command_id: String,
    command: String,
    /// `running`, `completed` or `timed_out`.
    status: &'static str,
    exit_code: Option<i32>,
}

impl CommandOutputData {
    pub(super) fn new(command: &Command, read: &Read, generation: Generation) -> CommandOutputData {
        CommandOutputData {
            session_id: command.session().to_string(),
            stdout: stream_text(read.stdout.text(), generation),
            stderr: stream_text(read.stderr.text(), generation),
            offset: read.stdout.end,
            stderr_offset: read.stderr.end,
            stdout_start_offset: read.stdout.start,
            stderr_start_offset: read.stderr.start,
            stdout_gap: read.stdout.gap,
            stderr_gap: read.stderr.gap,
            command: CommandStateData {
                command_id: command.id.clone(),
                command: command.text.clone(),
                status: status(&read.outlook),
                exit_code: read.outlook.exit_code,
            },
        }
    }
}

/// A session, as listings show it.
#[derive(Debug, Serialize, ToSchema)]
pub(super) struct CommandSessionData {
    session_id: String,
    /// `ready`: one that is closed is not listed.
    status: &'static str,
    working_dir: String,
    /// ISO 8601, UTC.
    created_at: String,
    last_used_at: String,
    command_count: u64,
    /// Of those that run, the one started last.
    current_command: Option<String>,
}

impl From<SessionInfo> for CommandSessionData {
    fn from(it: SessionInfo) -> CommandSessionData {
        CommandSessionData {
            session_id: it.session_id,
            status: "ready",
            working_dir: it.working_dir,
            created_at: timestamp(it.created_at),
            last_used_at: timestamp(it.last_used_at),
            command_count: it.command_count,
            current_command: it.current_command,
        }
    }
}

/// ISO 8601 in UTC.
pub(super) fn timestamp(at: SystemTime) -> String {
    let known = jiff::Timestamp::try_from(at).unwrap_or(jiff::Timestamp::UNIX_EPOCH);
    format!("{known:.6}")
}

/// The word of these planes for a status.
pub(super) fn status(outlook: &Outlook) -> &'static str {
    match outlook.status {
        Status::Running => "running",
        Status::Completed | Status::Killed => "completed",
        Status::TimedOut => "timed_out",
    }
}

/// A text of at most `chars_max` characters, beginning and end, with a mark between them; whole when it fits.
pub(super) fn cut_middle(text: String, chars_max: Option<usize>) -> String {
    let Some(chars_max) = chars_max else { return text };
    let chars = text.chars().count();
    if chars <= chars_max {
        return text;
    }
    let head = chars_max / 2;
    let at = |nth: usize| text.char_indices().nth(nth).map_or(text.len(), |(at, _)| at);
    let (head, tail) = (at(head), at(chars - (chars_max - head)));
    format!("{}{TRUNCATED}{}", &text[..head], &text[tail..])
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_middle_is_left_out_and_characters_stay_whole() {
        let text = "äöüß€".repeat(10);
        let cut = cut_middle(text.clone(), Some(5));
        assert_eq!(cut, format!("äö{TRUNCATED}üß€"));
        assert_eq!(cut_middle(text.clone(), Some(50)), text);
        assert_eq!(cut_middle(text.clone(), None), text);
        assert_eq!(cut_middle("abc".to_owned(), Some(1)), format!("{TRUNCATED}c"));
    }

    #[test]
    fn a_body_says_what_to_run() {
        let ask = run_request(br#"{"command": "/bin/echo", "args": ["a"], "shell": "none", "timeout": 0.5}"#);
        let ask = ask.ok().expect("valid");
        assert_eq!(ask.run.wanted, Wanted::Words(vec!["/bin/echo".to_owned(), "a".to_owned()]));
        assert_eq!((ask.waits, ask.chars_max), (Waits::AtMost(Duration::from_millis(500)), Some(50_000)));
        let ask =
            run_request(br#"{"command": "x", "mode": "async", "max_output_length": 0}"#).ok().expect("valid");
        assert_eq!((ask.waits, ask.chars_max), (Waits::No, None));
        assert!(matches!(run_request(br#"{"command": "x", "args": []}"#), Err(NoRun::Args)));
        assert!(matches!(run_request(br#"{"command": "x", "shell": "cmd"}"#), Err(NoRun::NoShell("cmd"))));
    }

    #[test]
    fn what_is_wrong_is_named() {
        for (body, field) in [
            (r#"{}"#, "command"),
            (r#"{"command": "a\u0000b"}"#, "command"),
            (r#"{"command": "a", "shell": "fish"}"#, "shell"),
            (r#"{"command": "a", "timeout": -1}"#, "timeout"),
            (r#"{"command": "a", "hard_timeout": 1e9}"#, "hard_timeout"),
            (r#"{"command": "a", "max_output_length": 1.5}"#, "max_output_length"),
            (r#"{"command": "a", "env": {"A=B": "x"}}"#, "env"),
            (r#"{"command": "a", "env": {"A": 1}}"#, "env"),
            (r#"{"command": "a", "args": [1], "shell": "none"}"#, "args"),
            (r#"{"command": "a", "mode": "later"}"#, "mode"),
        ] {
            let Err(NoRun::Invalid(invalid)) = run_request(body.as_bytes()) else { panic!("{body}") };
            let named: Vec<_> = invalid.schema_errors.iter().chain(&invalid.reasons).collect();
            assert_eq!(named.len(), 1, "{body}");
            assert_eq!(named[0].location, ["body", field], "{body}");
        }
    }

    #[test]
    fn a_query_is_read_and_a_mistyped_one_refused() {
        let ask = output_query(Some("offset=5&wait=true&wait_timeout=2.5&x")).expect("valid");
        assert_eq!(ask, OutputAsk { offset: 5, stderr_offset: 0, waits: Some(Duration::from_millis(2500)) });
        assert_eq!(output_query(None).ok().and_then(|ask| ask.waits), None);
        for query in ["offset=-1", "offset=x", "wait=maybe", "wait_timeout=NaN", "stderr_offset=1.5"] {
            assert!(output_query(Some(query)).is_err(), "{query}");
        }
    }
}
