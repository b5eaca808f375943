//! Signals by the names that callers write.
#![forbid(unsafe_code)]

use std::str::FromStr;

use nix::sys::signal::Signal;

use super::Refused;

/// The signal that ends whatever gets it.
pub(super) const KILL: u8 = Signal::SIGKILL as u8;
pub(super) const TERMINATE: u8 = Signal::SIGTERM as u8;

/// `SIGTERM`, `TERM`, `term` or `15`.
pub fn parse(name: &str) -> Result<u8, Refused> {
    let upper = name.to_ascii_uppercase();
    let long = if upper.starts_with("SIG") { upper } else { format!("SIG{upper}") };
    let by_name = Signal::from_str(&long).ok();
    let by_number = || name.parse::<i32>().ok().and_then(|number| Signal::try_from(number).ok());
    let unknown = || Refused::UnknownSignal(name.chars().take(40).collect());
    by_name.or_else(by_number).map(|signal| signal as u8).ok_or_else(unknown)
}

/// Whether a command that ends after it was ended by whoever sent it. The others stop, continue or tell something.
pub(super) fn ends(signal: u8) -> bool {
    let spared = [
        Signal::SIGSTOP,
        Signal::SIGTSTP,
        Signal::SIGTTIN,
        Signal::SIGTTOU,
        Signal::SIGCONT,
        Signal::SIGCHLD,
        Signal::SIGURG,
        Signal::SIGWINCH,
    ];
    !spared.into_iter().any(|spared| spared as u8 == signal)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn signals_have_many_spellings_and_a_wrong_one_is_refused() {
        for name in ["SIGTERM", "TERM", "sigterm", "term", "15"] {
            assert_eq!(parse(name), Ok(TERMINATE), "{name}");
        }
        assert_eq!(parse("KILL"), Ok(KILL));
        for name in ["", "SIGNOPE", "0", "-9", "999", "9; rm"] {
            assert_eq!(parse(name), Err(Refused::UnknownSignal(name.to_owned())));
        }
        assert!(ends(KILL) && ends(TERMINATE) && !ends(parse("CONT").expect("known")));
    }
}
