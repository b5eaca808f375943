//! Private launchers for tests, the packets they speak, guests and what the kernel says about processes.

use std::path::PathBuf;

pub(crate) mod guest;
pub(crate) mod proc;
pub(crate) mod service;
pub(crate) mod stand;

pub(crate) use guest::Guest;
pub(crate) use stand::{Stand, Trouble, plan, strict};

/// The program under test.
pub(crate) const CAISSON: &str = env!("CARGO_BIN_EXE_caisson");

/// Why these tests cannot run here; printed, and the test passes.
pub(crate) fn skip(reason: &str) {
    eprintln!("skip: {reason}");
}

/// What is missing on this machine.
pub(crate) fn missing() -> Option<&'static str> {
    if !nix::unistd::geteuid().is_root() {
        return Some("needs root: it starts a launcher of its own");
    }
    if !python_env().join("bin/python3").exists() {
        return Some("needs the Python environment in target/runtime; `make setup` builds it");
    }
    None
}

/// The product's Python environment, as `make setup` leaves it beside the binary.
pub(crate) fn python_env() -> PathBuf {
    let target = PathBuf::from(CAISSON).parent().and_then(|dir| dir.parent().map(PathBuf::from));
    target.unwrap_or_default().join("runtime/python")
}

/// A stand that all tests of the crate share; returns from the test when there is none.
macro_rules! common_stand {
    () => {
        match crate::support::stand::common() {
            Ok(stand) => stand,
            Err(reason) => return crate::support::skip(&reason),
        }
    };
}

/// A stand of the test's own: `own_stand!(|settings| …)`.
macro_rules! own_stand {
    ($change:expr) => {
        match crate::support::Stand::start($change) {
            Ok(stand) => stand,
            Err(reason) => return crate::support::skip(&reason),
        }
    };
}

pub(crate) use {common_stand, own_stand};
