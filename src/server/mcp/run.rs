//! `execute_code` and `run_command`: one program, from the call to its result.
#![forbid(unsafe_code)]

use std::fmt::Write;
use std::sync::Arc;
use std::time::Duration;

use rmcp::RoleServer;
use rmcp::model::{CallToolResult, ContentBlock};
use rmcp::service::RequestContext;
use schemars::JsonSchema;
use serde::Serialize;
use tokio_util::task::AbortOnDropHandle;

use super::content;
use super::handler::Handler;
use super::notify::Teller;
use super::place::{Fault, Missing, Place};
use super::tools::{CommandArgs, ExecuteArgs};
use crate::engine::{Bundle, pieces};
use crate::languages::Language;
use crate::objects::FileRecord;
use crate::runs::{RunDone, RunEnd, RunRequest, Style};
use crate::server::answer::in_short;
use crate::server::body::{CODE_BYTES_MAX, is_too_long};
use crate::server::rates::Window;

const PYTHON: &str = "python";
const BASH: &str = "bash";
/// Takes back what scripts of the other family begin with: in a command, one that fails is followed by the next.
const EASY: &str = "set +eu +o pipefail\n";
/// Most arguments of a program, and the bytes they may have together.
const ARGS_MAX: usize = 1024;
const ARGS_BYTES_MAX: usize = 100 * 1024;

/// What became of a program.
#[derive(Debug, Serialize, JsonSchema)]
pub(super) struct RunAnswer {
    /// What it printed.
    stdout: String,
    /// What it printed as errors; the last line says why it was ended, where it was.
    stderr: String,
    /// 0: success. 137 for a program that was killed.
    exit_code: i32,
    /// Why it was ended, where it did not end by itself.
    #[serde(skip_serializing_if = "Option::is_none")]
    ended: Option<String>,
    /// The value of a last expression, in Python.
    #[serde(skip_serializing_if = "Option::is_none")]
    result: Option<String>,
    /// Wall-clock time in milliseconds.
    duration_ms: u64,
    /// Files that it left or changed.
    files: Vec<FileAnswer>,
    /// The session's name, where it has one: pass it as `session` to go on there.
    #[serde(skip_serializing_if = "Option::is_none")]
    session: Option<String>,
}

/// A file of the session.
#[derive(Debug, Serialize, JsonSchema)]
pub(super) struct FileAnswer {
    /// Relative to /mnt/data.
    pub(super) path: String,
    /// The resource that it can be read as.
    pub(super) uri: String,
    /// Bytes.
    pub(super) size: u64,
    pub(super) mime_type: String,
}

impl FileAnswer {
    pub(super) fn new(place: &Place, record: &FileRecord) -> FileAnswer {
        FileAnswer {
            path: record.name.clone(),
            uri: content::uri(place.name.as_deref(), &record.name),
            size: record.size,
            mime_type: record.content_type.clone(),
        }
    }
}

impl Handler {
    pub(super) async fn execute(
        &self,
        args: ExecuteArgs,
        context: &RequestContext<RoleServer>,
    ) -> Result<CallToolResult, Fault> {
        self.admit(Window::Exec, context)?;
        let wanted = args.language.as_deref().unwrap_or(PYTHON);
        let language = self.language(wanted)?;
        if args.args.len() > ARGS_MAX || args.args.iter().map(String::len).sum::<usize>() > ARGS_BYTES_MAX {
            return Err(Fault(format!(
                "`args` must be at most {ARGS_MAX}, of {ARGS_BYTES_MAX} bytes together"
            )));
        }
        if args.args.iter().any(|arg| arg.contains('\0')) {
            return Err(Fault::new("`args` must not hold a NUL"));
        }
        let timeout = timeout(args.timeout_seconds)?;
        let place = self.place(context, args.session.as_deref(), Missing::Begin).await?;
        let run = request(&place, language, args.code, args.args, timeout);
        self.run(place, run, context).await
    }

    pub(super) async fn command(
        &self,
        args: CommandArgs,
        context: &RequestContext<RoleServer>,
    ) -> Result<CallToolResult, Fault> {
        self.admit(Window::Exec, context)?;
        let language = self.language(BASH)?;
        let timeout = timeout(args.timeout_seconds)?;
        let place = self.place(context, args.session.as_deref(), Missing::Begin).await?;
        let is_strict = place.runs.config().bash_strict;
        let code = if is_strict { format!("{EASY}{}", args.command) } else { args.command };
        let run = request(&place, language, code, Vec::new(), timeout);
        self.run(place, run, context).await
    }

    fn language(&self, wanted: &str) -> Result<Arc<Language>, Fault> {
        let runs = self.state.runs().ok_or_else(|| Fault::new("the server is starting up; try again"))?;
        let known = runs.languages().resolve(wanted).cloned();
        known.ok_or_else(|| {
            let wanted = in_short(format_args!("{wanted:?}"));
            Fault(format!("unknown language {wanted}; known here: {}", self.languages().join(", ")))
        })
    }

    /// Runs it until it ends, its call is cancelled, or its session is over.
    async fn run(
        &self,
        place: Place,
        request: RunRequest,
        context: &RequestContext<RoleServer>,
    ) -> Result<CallToolResult, Fault> {
        if is_too_long(&request.code) {
            return Err(Fault(format!("the code must not be longer than {CODE_BYTES_MAX} bytes")));
        }
        let stopped = || Fault::new("the call was cancelled; what it ran was ended");
        let total = request.timeout.unwrap_or(place.runs.config().timeout_max);
        let _counted = self.state.lifecycle().enter();
        let prepared = tokio::select! {
            prepared = place.runs.prepare(request) => prepared?,
            () = place.stopped() => return Err(stopped()),
        };
        self.link.start(&context.id);
        let (watcher, mut pieces) = pieces();
        let mut teller = Teller::new(context, self.log_level(context), total);
        // Dropped, it takes the program with it.
        let mut running = AbortOnDropHandle::new(tokio::spawn(prepared.run(Some(watcher), None)));
        let ended = loop {
            let due = async {
                match &teller {
                    Some(teller) => teller.due().await,
                    None => std::future::pending().await,
                }
            };
            tokio::select! {
                biased;
                () = place.stopped() => return Err(stopped()),
                Some(piece) = pieces.recv() => {
                    if let Some(teller) = &mut teller {
                        teller.take(piece);
                    }
                }
                ended = &mut running => break ended,
                () = due => {}
            }
            if let Some(teller) = &mut teller {
                teller.tell();
            }
        };
        if let Some(mut teller) = teller {
            while let Some(piece) = pieces.try_recv() {
                teller.take(piece);
            }
            teller.finish().await;
        }
        match ended {
            Ok(done) => Ok(answer(&place, done).await),
            Err(_panicked) => Err(Fault::new("the sandbox was lost; the code may have run")),
        }
    }
}

fn request(
    place: &Place,
    language: Arc<Language>,
    code: String,
    args: Vec<String>,
    timeout: Option<Duration>,
) -> RunRequest {
    RunRequest {
        caller: place.caller.clone(),
        asserted_user: String::new(),
        language,
        code,
        args,
        timeout,
        session: Some(place.session.id.clone()),
        entity: None,
        hint: None,
        files: Vec::new(),
        style: Style::Classic,
        rich: true,
        tools: Vec::new(),
        programmatic: false,
    }
}

fn timeout(seconds: Option<f64>) -> Result<Option<Duration>, Fault> {
    let Some(seconds) = seconds else { return Ok(None) };
    match Duration::try_from_secs_f64(seconds) {
        Ok(timeout) if !timeout.is_zero() => Ok(Some(timeout)),
        _ => Err(Fault::new("`timeout_seconds` must be a number above 0")),
    }
}

async fn answer(place: &Place, done: RunDone) -> CallToolResult {
    let left: Vec<&FileRecord> =
        done.files.iter().filter(|file| !file.inherited).map(|file| &file.record).collect();
    let mut blocks = content::blocks(place, &left).await;
    let answer = RunAnswer {
        exit_code: done.end.code(),
        ended: done.end.message().map(std::borrow::Cow::into_owned),
        result: done.result.as_ref().and_then(text_of),
        duration_ms: u64::try_from(done.wall.as_millis()).unwrap_or(u64::MAX),
        files: left.iter().map(|record| FileAnswer::new(place, record)).collect(),
        session: place.name.clone(),
        stdout: done.stdout,
        stderr: done.stderr,
    };
    blocks.insert(0, ContentBlock::text(shown(&answer, done.end, done.delivery.failed, place)));
    let mut result = match done.end.is_success() {
        true => CallToolResult::success(blocks),
        false => CallToolResult::error(blocks),
    };
    result.structured_content = serde_json::to_value(answer).ok();
    result
}

/// The program's words as a terminal would show them, and what the model must know beside.
fn shown(answer: &RunAnswer, end: RunEnd, lost_files: usize, place: &Place) -> String {
    let mut text = answer.stdout.clone();
    let line = |text: &mut String, line: &str| {
        if !text.is_empty() && !text.ends_with('\n') {
            text.push('\n');
        }
        text.push_str(line);
    };
    if let Some(result) = &answer.result {
        line(&mut text, result);
    }
    if !answer.stderr.is_empty() {
        line(&mut text, "[stderr]\n");
        text.push_str(&answer.stderr);
    }
    if text.is_empty() {
        text.push_str("(no output)");
    }
    if !end.is_success() {
        line(&mut text, "");
        // Writing into a string does not fail.
        let _ = write!(text, "[exit code {}]", answer.exit_code);
    }
    if lost_files > 0 {
        line(&mut text, "");
        let _ = write!(text, "[{lost_files} files could not be kept]");
    }
    if place.is_new
        && let Some(name) = &place.name
    {
        line(&mut text, "");
        let _ = write!(text, "[session {name}: pass it as `session` to go on with its files and variables]");
    }
    text
}

/// The plain form of a value.
fn text_of(value: &Bundle) -> Option<String> {
    value.get("text/plain").and_then(|text| text.as_str()).map(str::to_owned)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn time_limits_are_numbers_above_zero() {
        assert_eq!(timeout(None).unwrap(), None);
        assert_eq!(timeout(Some(1.5)).unwrap(), Some(Duration::from_millis(1500)));
        for wrong in [0.0, -1.0, f64::NAN, f64::INFINITY, 1e300] {
            assert!(timeout(Some(wrong)).is_err(), "{wrong}");
        }
    }
}
