//! Private launchers for tests, the packets they speak, guests and what the kernel says about processes.

use std::path::PathBuf;
use std::sync::OnceLock;
use std::time::Duration;

pub(crate) mod guest;
pub(crate) mod proc;
pub(crate) mod service;
pub(crate) mod stand;

pub(crate) use guest::Guest;
pub(crate) use stand::{Stand, Trouble, plan, strict};

/// The program under test.
pub(crate) const CAISSON: &str = env!("CARGO_BIN_EXE_caisson");

/// Time limits of these tests are for a busy machine; on an emulated one CAISSON_TEST_TIME_SCALE multiplies them.
pub(crate) fn scaled(max: Duration) -> Duration {
    static SCALE: OnceLock<u32> = OnceLock::new();
    let scale = || match std::env::var("CAISSON_TEST_TIME_SCALE") {
        Ok(text) => text.parse().expect("CAISSON_TEST_TIME_SCALE is a whole number"),
        Err(_) => 1,
    };
    max * *SCALE.get_or_init(scale)
}

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
