//! What the engine tells about itself.
#![forbid(unsafe_code)]

use std::time::Duration;

use crate::zygote::slots::SlotStats;

/// An interpreter, as code/info shows it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct RuntimeInfo {
    pub available: bool,
    pub version: Option<String>,
}

/// Facts for code/info.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct CodeInfo {
    /// The layer that runs Python; `None` when nothing does.
    pub backend: Option<&'static str>,
    pub python: RuntimeInfo,
    pub node: RuntimeInfo,
    pub sessions_max: usize,
    pub timeout_default: Duration,
    pub timeout_max: Duration,
    /// Interpreters waiting because of `code_prewarm`. Other slots are not counted here.
    pub prewarmed: usize,
}

/// Numbers for `/health`.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct EngineStats {
    pub sessions: usize,
    pub cells_running: usize,
    pub cells_waiting: usize,
    pub sandboxes_live: usize,
    pub slots: SlotStats,
    pub audit_dropped: u64,
}
