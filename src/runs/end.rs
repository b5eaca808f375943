//! How a program came to its end, in the words that this family's clients know.
#![forbid(unsafe_code)]

use std::borrow::Cow;

use nix::sys::signal::Signal;

pub use crate::harness::program::ProgramEnd as RunEnd;
use crate::harness::program::TooManyCalls;

/// What a run that was killed answers as exit code where the program gave none: as shells count signals.
const KILLED_CODE: i32 = 137;

impl RunEnd {
    pub fn is_success(self) -> bool {
        self == RunEnd::Exited(0)
    }

    pub fn code(self) -> i32 {
        match self {
            RunEnd::Exited(code) => code,
            RunEnd::Signaled(signal) => 128 + signal,
            _ => KILLED_CODE,
        }
    }

    /// The two letters of the hosted service; none for success.
    pub fn status(self) -> Option<&'static str> {
        match self {
            RunEnd::Exited(0) => None,
            RunEnd::Exited(_) => Some("RE"),
            RunEnd::Signaled(_) | RunEnd::OutOfMemory | RunEnd::SpaceFull => Some("SG"),
            RunEnd::TimeLimit => Some("TO"),
            RunEnd::StdoutLimit => Some("OL"),
            RunEnd::StderrLimit => Some("EL"),
            RunEnd::CallLimit | RunEnd::Stopped | RunEnd::LauncherGone | RunEnd::Lost => Some("XX"),
        }
    }

    /// The name of the signal that ended it.
    pub fn signal(self) -> Option<&'static str> {
        match self {
            RunEnd::Signaled(signal) => Signal::try_from(signal).ok().map(Signal::as_str),
            RunEnd::Exited(_) => None,
            _ => Some("SIGKILL"),
        }
    }

    /// What a model must be told, since it sees neither code nor status: the last line of stderr.
    pub fn message(self) -> Option<Cow<'static, str>> {
        Some(Cow::Borrowed(match self {
            RunEnd::Exited(_) => return None,
            RunEnd::Signaled(signal) => {
                let name = self.signal().map_or_else(|| format!("signal {signal}"), str::to_owned);
                return Some(Cow::Owned(format!("The program was ended by {name}")));
            }
            RunEnd::TimeLimit => "Time limit exceeded",
            RunEnd::StdoutLimit => "stdout length exceeded",
            RunEnd::StderrLimit => "stderr length exceeded",
            RunEnd::OutOfMemory => "Out of memory",
            RunEnd::SpaceFull => "Disk space limit exceeded",
            RunEnd::CallLimit => {
                return Some(Cow::Owned(format!("Tool call limit exceeded: {TooManyCalls}")));
            }
            RunEnd::Stopped => "Execution was stopped",
            RunEnd::LauncherGone | RunEnd::Lost => "The sandbox was lost; the code may have run",
        }))
    }
}
