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
    /// Names of kernels, the default one first.
    pub kernels: Vec<String>,
    pub python: RuntimeInfo,
    pub node: RuntimeInfo,
    pub sessions_max: usize,
    pub timeout_default: Duration,
    pub timeout_max: Duration,
    /// Interpreters waiting because of `code_prewarm` or `kernel_prewarm`. Other slots are not counted here.
    pub prewarmed: usize,
}

/// What runs what.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Backends {
    /// The layer that runs Python on the code routes: `native`, `kernel` or `endpoint`; `None` when nothing does.
    pub python: Option<&'static str>,
    /// The layer behind the Jupyter routes: `kernel` or `endpoint`.
    pub jupyter: Option<&'static str>,
    /// Names of kernels, the default one first.
    pub kernels: Vec<String>,
    /// The Jupyter server that answers, without its token.
    pub endpoint: Option<String>,
    /// Whether Python cells of the code routes run at an external Jupyter server while it answers, which may be with the
    /// next one.
    pub code_may_leave: bool,
    /// The same of cells of the Jupyter routes.
    pub jupyter_may_leave: bool,
}

/// Facts about kernels, for one tenant.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct KernelInfo {
    /// The default one first; empty when there is none.
    pub kernels: Vec<String>,
    /// Why there is none, or what was found.
    pub detection: String,
    pub sessions: usize,
    pub sessions_max: usize,
    pub idle_max: Duration,
}

/// Numbers for `/health`.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct EngineStats {
    pub sessions: usize,
    /// Sessions that idled out since the start.
    pub sessions_cleaned: u64,
    pub cells_running: usize,
    pub cells_waiting: usize,
    pub sandboxes_live: usize,
    pub slots: SlotStats,
    pub audit_dropped: u64,
}
