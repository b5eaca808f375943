//! What our own binary does inside a sandbox: it is confined like a guest, and nothing of the daemon's is here.
#![forbid(unsafe_code)]

use std::process::ExitCode;

pub mod commands;
mod files;

/// Exit code of a program that was not started as the launcher starts it.
const NOT_FOR_HANDS: u8 = 2;

/// Runs the program called `what` on descriptors 3 and 4 until its other end is closed.
pub fn main(what: &str) -> ExitCode {
    // Guest code may come to share our uid: it must not read or change our memory.
    if nix::sys::prctl::set_dumpable(false).is_err() {
        return ExitCode::FAILURE;
    }
    match what {
        "files" => files::serve(),
        "commands" => commands::serve(),
        _ => ExitCode::from(NOT_FOR_HANDS),
    }
}
