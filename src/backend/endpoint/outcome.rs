//! How a cell at the endpoint went, in the engine's outputs.
#![forbid(unsafe_code)]

use std::time::Duration;

use crate::backend::endpoint::kernel::INTERRUPT_GRACE;
use crate::engine::{ErrorOutput, Output, Status, Stream};
use crate::harness::outcome::{Stopped, stream_text};

/// Why nothing more is known of a cell.
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

/// How a cell at the endpoint ended.
#[derive(Copy, Clone, Debug, PartialEq, Eq)]
pub enum RemoteEnding {
    Completed,
    /// It ended with an exception; the kernel waits for the next.
    Raised,
    /// The time was up and the kernel could be interrupted; it keeps its names.
    Interrupted {
        timeout: Duration,
    },
    /// The time was up, and the kernel did not stop when interrupted.
    GivenUp {
        timeout: Duration,
    },
    /// The kernel's process ended in the cell.
    Died,
    Stopped(Stopped),
    Lost(Lost),
}

impl RemoteEnding {
    pub fn status(self) -> Status {
        match self {
            RemoteEnding::Completed => Status::Ok,
            RemoteEnding::Interrupted { .. } | RemoteEnding::GivenUp { .. } => Status::Timeout,
            _ => Status::Error,
        }
    }

    /// True when the kernel can take another cell.
    pub fn leaves_kernel(self) -> bool {
        use RemoteEnding::{Completed, Interrupted, Raised};
        matches!(self, Completed | Raised | Interrupted { .. })
    }

    /// For the audit record.
    pub fn reason(self) -> &'static str {
        match self {
            RemoteEnding::Completed => "completed",
            RemoteEnding::Raised => "raised",
            RemoteEnding::Interrupted { .. } => "time limit",
            RemoteEnding::GivenUp { .. } => "time limit, not interruptible",
            RemoteEnding::Died => "kernel died",
            RemoteEnding::Stopped(Stopped::SessionDeleted) => "session deleted",
            RemoteEnding::Stopped(Stopped::ShuttingDown) => "shutdown",
            RemoteEnding::Lost(Lost::Unreached) => "unreachable",
            RemoteEnding::Lost(Lost::Connection) => "endpoint lost",
            RemoteEnding::Lost(Lost::Forgotten | Lost::NoReply) => "outcome lost",
            RemoteEnding::Lost(Lost::Flood) => "protocol violation",
        }
    }

    /// For the caller: the error output that the daemon adds, if it adds one.
    pub fn error(self) -> Option<ErrorOutput> {
        let process_error = |evalue: &str| Some(ErrorOutput::plain("ProcessError", evalue.to_owned()));
        match self {
            RemoteEnding::Completed | RemoteEnding::Raised => None,
            RemoteEnding::Interrupted { timeout } => {
                Some(ErrorOutput::plain("TimeoutError", interrupted_text(timeout)))
            }
            RemoteEnding::GivenUp { timeout } => {
                let seconds = INTERRUPT_GRACE.as_secs();
                let evalue = format!(
                    "{}; the kernel did not stop within {seconds} s and was ended",
                    interrupted_text(timeout)
                );
                Some(ErrorOutput::plain("TimeoutError", evalue))
            }
            RemoteEnding::Died => process_error("the kernel ended unexpectedly"),
            RemoteEnding::Stopped(Stopped::SessionDeleted) => process_error("the session was deleted"),
            RemoteEnding::Stopped(Stopped::ShuttingDown) => process_error("the daemon is shutting down"),
            RemoteEnding::Lost(Lost::Unreached) => {
                process_error("the Jupyter server could not be reached; the code did not run")
            }
            RemoteEnding::Lost(Lost::Connection) => {
                process_error("the connection to the Jupyter server was lost; the code may have run")
            }
            RemoteEnding::Lost(Lost::Forgotten) => process_error(
                "the connection to the Jupyter server was lost for a moment, and what the code answered with it",
            ),
            RemoteEnding::Lost(Lost::NoReply) => {
                process_error("the Jupyter server sent no usable reply; the code may have run")
            }
            RemoteEnding::Lost(Lost::Flood) => {
                process_error("the Jupyter server sent more messages than a cell may; the kernel was ended")
            }
        }
    }

    /// What the daemon has to say stands last, and a time limit on stderr as well.
    pub(super) fn append_to(self, outputs: &mut Vec<Output>) {
        let Some(error) = self.error() else { return };
        if self.status() == Status::Timeout {
            let stderr = stream_text(outputs, Stream::Stderr);
            let gap = if stderr.is_empty() || stderr.ends_with('\n') { "" } else { "\n" };
            outputs.push(Output::Stream { name: Stream::Stderr, text: format!("{gap}{}", error.evalue) });
        }
        outputs.push(Output::Error(error));
    }
}

/// The words of the contract (3.6) for a kernel.
fn interrupted_text(timeout: Duration) -> String {
    format!("execution timed out after {}ms and was interrupted", timeout.as_millis())
}

/// What became of one cell.
#[derive(Clone, Debug, PartialEq)]
pub struct RemoteOutcome {
    pub ending: RemoteEnding,
    pub outputs: Vec<Output>,
    /// Of the request, as `/v1/jupyter/execute` shows it.
    pub msg_id: String,
    /// The kernel's process is another one than that of the cell before: it has none of its names.
    pub names_lost: bool,
}

impl RemoteOutcome {
    /// A stream whole: the texts of its outputs.
    pub fn stream(&self, stream: Stream) -> String {
        stream_text(&self.outputs, stream)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_time_limit_is_said_on_stderr_and_as_an_error() {
        let before = Output::Stream { name: Stream::Stderr, text: "half a line".to_owned() };
        let mut outputs = vec![before];
        RemoteEnding::Interrupted { timeout: Duration::from_secs(2) }.append_to(&mut outputs);
        let text = "execution timed out after 2000ms and was interrupted";
        assert_eq!(stream_text(&outputs, Stream::Stderr), format!("half a line\n{text}"));
        assert_eq!(outputs[2], Output::Error(ErrorOutput::plain("TimeoutError", text.to_owned())));
    }

    #[test]
    fn only_a_kernel_that_answers_takes_another_cell() {
        let timeout = Duration::from_secs(1);
        assert!(RemoteEnding::Interrupted { timeout }.leaves_kernel());
        assert!(!RemoteEnding::GivenUp { timeout }.leaves_kernel());
        assert!(!RemoteEnding::Lost(Lost::Connection).leaves_kernel());
        assert_eq!(RemoteEnding::GivenUp { timeout }.status(), Status::Timeout);
        assert_eq!(RemoteEnding::Died.status(), Status::Error);
    }
}
