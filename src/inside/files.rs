//! The space helper: file operations as the guest of a space would see them.
#![forbid(unsafe_code)]

use std::process::ExitCode;

/// Serves until the other end of descriptor 3 is closed.
pub(super) fn serve() -> ExitCode {
    ExitCode::SUCCESS
}
