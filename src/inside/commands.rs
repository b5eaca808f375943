//! The command agent: starts the commands of one session.
#![forbid(unsafe_code)]

use std::process::ExitCode;

/// Serves until the other end of descriptor 3 is closed.
pub(super) fn serve() -> ExitCode {
    ExitCode::SUCCESS
}
