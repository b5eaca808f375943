//! How a cell went, in the engine's outputs: streams first, then result and error, then what the daemon has
//! to say about the end.
#![forbid(unsafe_code)]

use std::time::Duration;

use nix::sys::signal::Signal;
use serde_json::Value;

use crate::engine::{Bundle, ErrorOutput, Output, Status, Stream};
use crate::harness::PUBLISHED_MAX;
use crate::harness::capture::Capture;
use crate::harness::frame::{Done, FrameTooLong};
use crate::launcher::plan::End;

/// Longest name of an error class that is passed on, in characters.
const ENAME_CHARS_MAX: usize = 1_000;

/// Why a run was stopped by us.
#[derive(Copy, Clone, Debug, PartialEq, Eq)]
pub enum Stopped {
    SessionDeleted,
    ShuttingDown,
}

/// Why nothing more is known of a cell at an external Jupyter server.
#[derive(Copy, Clone, Debug, PartialEq, Eq)]
pub enum Lost {
    /// No connection to the kernel could be had. The code did not run.
    Unreached,
    /// The connection broke and did not come back. What was sent may have run.
    Connection,
    /// The server forgot what came while the connection was away.
    Forgotten,
    /// The kernel was done and sent no reply, or one that is none.
    NoReply,
    /// More messages than a cell may send.
    Flood,
}

impl Lost {
    fn reason(self) -> &'static str {
        match self {
            Lost::Unreached => "endpoint unreachable",
            Lost::Connection => "endpoint lost",
            Lost::Forgotten | Lost::NoReply => "outcome lost",
            Lost::Flood => "protocol violation",
        }
    }

    fn text(self) -> &'static str {
        match self {
            Lost::Unreached => "the Jupyter server could not be reached; the code did not run",
            Lost::Connection => "the connection to the Jupyter server was lost; the code may have run",
            Lost::Forgotten => {
                "the connection to the Jupyter server was lost for a moment, and what the code answered with it"
            }
            Lost::NoReply => "the Jupyter server sent no usable reply; the code may have run",
            Lost::Flood => "the Jupyter server sent more messages than a cell may; the kernel was ended",
        }
    }
}

/// How the interpreter and its cell came apart.
#[derive(Copy, Clone, Debug, PartialEq, Eq)]
pub enum Ending {
    /// The cell ran to its end; the interpreter waits for the next.
    Completed,
    /// It ended with an exception; the interpreter waits for the next.
    Raised,
    /// The time was up. The interpreter is thrown away, whether or not the cell ended in the grace.
    TimedOut {
        timeout: Duration,
    },
    /// The time was up, and a kernel's cell ended when it was interrupted; the names are kept.
    Interrupted {
        timeout: Duration,
    },
    /// The time was up, and a kernel did not end its cell when it was interrupted. It is thrown away.
    Unstoppable {
        timeout: Duration,
    },
    /// The interpreter is gone; the launcher's word on it, if it came in time.
    Died(Option<End>),
    Stopped(Stopped),
    /// A stream went over its limit. The interpreter is thrown away.
    StreamLimit(Stream),
    /// A line without an end, or lines without end, on the control pipe.
    BrokeProtocol,
    /// The code does not fit into a frame. It did not run; the interpreter waits for the next cell.
    CodeTooLong(FrameTooLong),
    /// The request could not be written.
    Unreachable,
    /// A cell at an external Jupyter server.
    Lost(Lost),
}

impl Ending {
    pub fn status(self) -> Status {
        match self {
            Ending::Completed => Status::Ok,
            Ending::TimedOut { .. } | Ending::Interrupted { .. } | Ending::Unstoppable { .. } => {
                Status::Timeout
            }
            _ => Status::Error,
        }
    }

    /// True when the interpreter can take another cell.
    pub fn leaves_interpreter(self) -> bool {
        matches!(
            self,
            Ending::Completed | Ending::Raised | Ending::Interrupted { .. } | Ending::CodeTooLong(_)
        )
    }

    /// For the audit record.
    pub fn reason(self) -> String {
        match self {
            Ending::Completed => "completed".to_owned(),
            Ending::Raised => "raised".to_owned(),
            Ending::TimedOut { .. } => "time limit".to_owned(),
            Ending::Interrupted { .. } => "time limit, interrupted".to_owned(),
            Ending::Unstoppable { .. } => "time limit, deaf to interrupts".to_owned(),
            Ending::Died(Some(End::Exited(code))) => format!("exit code {code}"),
            Ending::Died(Some(End::Signaled(signal))) => signal_text(signal),
            Ending::Died(Some(End::OutOfMemory)) => "memory limit".to_owned(),
            Ending::Died(Some(End::Ended)) => "ended by the launcher".to_owned(),
            Ending::Died(Some(End::Mismatch)) => "policy".to_owned(),
            Ending::Died(Some(End::SpaceFull)) => "space limit".to_owned(),
            Ending::Died(Some(End::CpuSpent)) => "processor time limit".to_owned(),
            Ending::Died(Some(End::LauncherGone)) => "launcher gone".to_owned(),
            Ending::Died(None) => "unknown".to_owned(),
            Ending::Stopped(Stopped::SessionDeleted) => "session deleted".to_owned(),
            Ending::Stopped(Stopped::ShuttingDown) => "shutdown".to_owned(),
            Ending::StreamLimit(_) => "output limit".to_owned(),
            Ending::BrokeProtocol => "protocol violation".to_owned(),
            Ending::CodeTooLong(_) => "code too long".to_owned(),
            Ending::Unreachable => "unreachable".to_owned(),
            Ending::Lost(lost) => lost.reason().to_owned(),
        }
    }

    /// For the caller: the text of the error output that the daemon adds, if it adds one.
    pub fn error(self, memory_mib_max: u64) -> Option<ErrorOutput> {
        let process_error = |evalue: String| Some(ErrorOutput::plain("ProcessError", evalue));
        match self {
            // Whose limits these are has words of its own.
            Ending::Completed | Ending::Raised | Ending::StreamLimit(_) => None,
            Ending::TimedOut { timeout } => timeout_error(timeout, "session state was reset"),
            Ending::Interrupted { timeout } => timeout_error(timeout, "and was interrupted"),
            Ending::Unstoppable { timeout } => {
                timeout_error(timeout, "and was interrupted; the kernel did not stop and was ended")
            }
            Ending::Died(end) => process_error(death_text(end, memory_mib_max)),
            Ending::Stopped(Stopped::SessionDeleted) => process_error("the session was deleted".to_owned()),
            Ending::Stopped(Stopped::ShuttingDown) => process_error("the daemon is shutting down".to_owned()),
            Ending::BrokeProtocol => {
                process_error("the interpreter broke its control protocol and was ended".to_owned())
            }
            Ending::CodeTooLong(too_long) => process_error(too_long.to_string()),
            Ending::Unreachable => process_error("the interpreter could not be reached".to_owned()),
            Ending::Lost(lost) => process_error(lost.text().to_owned()),
        }
    }
}

/// Words for the end of an interpreter, for the caller.
pub fn death_text(end: Option<End>, memory_mib_max: u64) -> String {
    match end {
        Some(End::Exited(code)) => format!("the interpreter exited with code {code}"),
        Some(End::Signaled(signal)) => format!("the interpreter was killed by {}", signal_text(signal)),
        Some(End::OutOfMemory) => format!("out of memory (limit {memory_mib_max} MiB)"),
        Some(End::Ended) => "the sandbox was ended".to_owned(),
        Some(End::Mismatch) => "the sandbox did not match its policy and was ended".to_owned(),
        Some(End::SpaceFull) => {
            "the files exceed the space's limit; the sandbox was ended, delete some in the next call"
                .to_owned()
        }
        Some(End::CpuSpent) => "the processor time limit was reached".to_owned(),
        Some(End::LauncherGone) => "the launcher ended, and every interpreter with it".to_owned(),
        None => "the interpreter ended unexpectedly".to_owned(),
    }
}

fn timeout_error(timeout: Duration, what_then: &str) -> Option<ErrorOutput> {
    let gap = if what_then.starts_with("and ") { "" } else { ";" };
    let text = format!("execution timed out after {}ms{gap} {what_then}", timeout.as_millis());
    Some(ErrorOutput::plain("TimeoutError", text))
}

fn signal_text(signal: u8) -> String {
    match Signal::try_from(i32::from(signal)) {
        Ok(known) => format!("signal {signal} ({known})"),
        // Real-time signals have no name.
        Err(_) => format!("signal {signal}"),
    }
}

/// What became of one cell.
#[derive(Clone, Debug, PartialEq)]
pub struct CellOutcome {
    pub ending: Ending,
    pub outputs: Vec<Output>,
}

impl CellOutcome {
    /// Each stream whole: the texts of its outputs.
    pub fn stream(&self, stream: Stream) -> String {
        stream_text(&self.outputs, stream)
    }
}

/// The texts of a stream's outputs, one after the other.
pub fn stream_text(outputs: &[Output], stream: Stream) -> String {
    let text = |output| match output {
        &Output::Stream { name, ref text } if name == stream => Some(text.as_str()),
        _ => None,
    };
    outputs.iter().filter_map(text).collect()
}

/// Everything that the outputs of a cell are made of.
pub(super) struct Parts {
    pub(super) capture: Capture,
    pub(super) done: Option<Done>,
    pub(super) ending: Ending,
    /// Its error has been published already, unless there was no room for it.
    pub(super) kernel: bool,
    pub(super) execution_count: u64,
    pub(super) chars_max: usize,
    pub(super) memory_mib_max: u64,
}

impl Parts {
    /// The outcome, and how many of its outputs came from the interpreter while it ran.
    pub(super) fn assemble(self) -> (CellOutcome, usize) {
        let note = format!("[output truncated at {} characters]", self.chars_max);
        let (noted, too_many) = (self.capture.is_truncated(), self.capture.has_too_many());
        let mut budget = Budget { chars_left: self.capture.chars_left_for_end(), cut: false };
        let done = self.done.unwrap_or_default();
        let mut outputs = self.capture.into_outputs(&done.order);
        let captured = outputs.len();
        if noted {
            outputs.push(stderr_text(note.clone()));
        }
        if too_many {
            let text = format!("[displays and their updates truncated at {PUBLISHED_MAX}]");
            outputs.push(stderr_text(text));
        }
        if let Some(result) = done.result {
            let mut data = Bundle::new();
            data.insert("text/plain".to_owned(), Value::String(budget.cut(result)));
            let (metadata, execution_count) = (Bundle::new(), self.execution_count);
            outputs.push(Output::ExecuteResult { data, metadata, execution_count });
        }
        let is_shown = self.kernel && outputs.iter().any(|output| matches!(output, Output::Error(_)));
        let error = done.error.filter(|_| !is_shown).map(|error| budget.cut_error(error));
        if budget.cut && !noted {
            outputs.push(stderr_text(note));
        }
        outputs.extend(error.map(Output::Error));
        self.ending.append_to(&mut outputs, self.memory_mib_max);
        (CellOutcome { ending: self.ending, outputs }, captured)
    }
}

impl Ending {
    /// What the daemon has to say stands last, and a time limit on stderr as well.
    pub(crate) fn append_to(self, outputs: &mut Vec<Output>, memory_mib_max: u64) {
        let Some(error) = self.error(memory_mib_max) else { return };
        if self.status() == Status::Timeout {
            let stderr = stream_text(outputs, Stream::Stderr);
            let starts_line = stderr.is_empty() || stderr.ends_with('\n');
            let gap = if starts_line { "" } else { "\n" };
            outputs.push(stderr_text(format!("{gap}{}", error.evalue)));
        }
        outputs.push(Output::Error(error));
    }
}

fn stderr_text(text: String) -> Output {
    Output::Stream { name: Stream::Stderr, text }
}

/// Characters that result and error may still take.
pub(crate) struct Budget {
    pub(crate) chars_left: usize,
    pub(crate) cut: bool,
}

impl Budget {
    fn cut(&mut self, mut text: String) -> String {
        if let Some((at, _)) = text.char_indices().nth(self.chars_left) {
            text.truncate(at);
            self.cut = true;
        }
        self.chars_left -= text.chars().count();
        text
    }

    pub(crate) fn cut_error(&mut self, error: ErrorOutput) -> ErrorOutput {
        let ename = error.ename.chars().take(ENAME_CHARS_MAX).collect();
        let evalue = self.cut(error.evalue);
        // From the end: the last line says what happened, the first ones only how it came to it.
        let mut traceback = Vec::new();
        for line in error.traceback.into_iter().rev() {
            if self.chars_left == 0 {
                self.cut = true;
                break;
            }
            traceback.push(self.cut(line));
            // An empty line costs as well, so that their number is bounded.
            self.chars_left = self.chars_left.saturating_sub(1);
        }
        traceback.reverse();
        ErrorOutput { ename, evalue, traceback }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn parts(ending: Ending, done: Option<Done>) -> Parts {
        Parts {
            capture: Capture::new(10),
            done,
            ending,
            kernel: false,
            execution_count: 3,
            chars_max: 10,
            memory_mib_max: 512,
        }
    }

    #[test]
    fn a_result_carries_the_count_of_its_cell() {
        let done = Done { result: Some("21".to_owned()), ..Done::default() };
        let outcome = parts(Ending::Completed, Some(done)).assemble().0;
        let [Output::ExecuteResult { data, execution_count: 3, .. }] = &outcome.outputs[..] else {
            panic!("{outcome:?}")
        };
        assert_eq!(data["text/plain"], "21");
    }

    #[test]
    fn a_result_over_the_cap_keeps_its_head_and_a_note_follows() {
        let done = Done { result: Some("ä".repeat(70_000)), ..Done::default() };
        let outcome = parts(Ending::Completed, Some(done)).assemble().0;
        let [Output::ExecuteResult { data, .. }, Output::Stream { name: Stream::Stderr, text }] =
            &outcome.outputs[..]
        else {
            panic!("{} outputs", outcome.outputs.len())
        };
        assert_eq!(data["text/plain"].as_str().map(|text| text.chars().count()), Some(65_536));
        assert_eq!(text, "[output truncated at 10 characters]");
    }

    #[test]
    fn a_long_traceback_keeps_its_last_lines() {
        let traceback = (0..100_000).map(|n| format!("line {n}")).collect();
        let error = ErrorOutput { ename: "E".to_owned(), evalue: "v".to_owned(), traceback };
        let done = Done { error: Some(error), ..Done::default() };
        let outcome = parts(Ending::Raised, Some(done)).assemble().0;
        let [Output::Stream { .. }, Output::Error(error)] = &outcome.outputs[..] else {
            panic!("{} outputs", outcome.outputs.len())
        };
        assert_eq!(error.traceback.last().map(String::as_str), Some("line 99999"));
        assert!(error.traceback.len() < 10_000);
    }

    #[test]
    fn a_timeout_is_said_on_stderr_and_as_an_error() {
        let ending = Ending::TimedOut { timeout: Duration::from_secs(2) };
        let outcome = parts(ending, None).assemble().0;
        let text = "execution timed out after 2000ms; session state was reset";
        assert_eq!(outcome.stream(Stream::Stderr), text);
        assert_eq!(outcome.outputs[1], Output::Error(ErrorOutput::plain("TimeoutError", text.to_owned())));
    }

    #[test]
    fn a_death_says_why() {
        let text = |end| death_text(Some(end), 512);
        assert_eq!(text(End::Exited(3)), "the interpreter exited with code 3");
        assert_eq!(text(End::Signaled(11)), "the interpreter was killed by signal 11 (SIGSEGV)");
        assert_eq!(text(End::Signaled(64)), "the interpreter was killed by signal 64");
        assert_eq!(text(End::OutOfMemory), "out of memory (limit 512 MiB)");
    }
}
