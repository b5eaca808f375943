//! The seam to the engine: what the code routes ask of it, and nothing else.
//!
//! The routes hold an `Arc<dyn CodeEngine>`, so their tests drive them with an engine of a few lines.
//! Every future may be dropped at any await: that is how a caller that went away looks. An implementor
//! decides what then happens to a cell that has started.
#![forbid(unsafe_code)]

use std::future::Future;
use std::pin::Pin;
use std::sync::Arc;
use std::time::Duration;

use crate::engine::run::NewSession;
use crate::engine::{Backends, CellRequest, Execution, KernelInfo, Language, Refusal, TenantId, Tiers};
use crate::launcher::plan::Profile;
use crate::launcher::posture::Hello;

/// What a method of [`CodeEngine`] answers with.
pub type Pending<'a, T> = Pin<Box<dyn Future<Output = T> + Send + 'a>>;

/// The engine as the code routes see it.
pub trait CodeEngine: Send + Sync + 'static {
    /// Runs one cell. `Err` promises that no guest code was started.
    fn execute(&self, request: CellRequest) -> Pending<'_, Result<Execution, Refusal>>;

    /// Sessions of a tenant by listing key: the id, or `<tier>:<id>` for the second of an id.
    fn sessions_list(&self, tenant: &TenantId, tiers: Tiers) -> Vec<(String, SessionEntry)>;

    /// The session under a listing key or id.
    fn session_get(&self, tenant: &TenantId, tiers: Tiers, id: &str) -> Option<SessionEntry>;

    /// Opens a session, or finds the one that has this id already, and says so by `false`.
    fn session_create<'a>(
        &'a self,
        tenant: &'a TenantId,
        new: NewSession,
    ) -> Pending<'a, Result<(SessionEntry, bool), NotCreated>>;

    /// Ends every session of this id, a running cell with it. False when there was none.
    fn session_delete<'a>(&'a self, tenant: &'a TenantId, tiers: Tiers, id: &'a str) -> Pending<'a, bool>;

    /// Ends every session of the tenant and says how many there were.
    fn sessions_clear<'a>(&'a self, tenant: &'a TenantId, tiers: Tiers) -> Pending<'a, usize>;

    /// What runs what.
    fn backends(&self) -> Backends;

    /// What the kernel plane offers this tenant.
    fn kernel_info(&self, tenant: &TenantId) -> KernelInfo;

    /// What the code plane offers this tenant.
    fn code_info<'a>(&'a self, tenant: &'a TenantId) -> Pending<'a, CodeInfo>;

    /// The launcher's greeting; `None` until it has arrived.
    fn hello(&self) -> Option<Arc<Hello>>;

    /// Counts for `/health`; names nobody.
    fn stats(&self) -> EngineStats;
}

/// Why a session was not opened.
#[derive(Clone, Debug)]
pub enum NotCreated {
    /// The request could not be taken.
    Refused(Refusal),
    /// It was taken and failed, as an impossible `user` does: an ordinary answer, not an error.
    Failed(Box<Execution>),
}

/// A session as the listing shows it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct SessionEntry {
    pub session_id: String,
    pub language: Language,
    pub cwd: String,
    /// Milliseconds since the epoch.
    pub created_at_ms: u64,
    /// Milliseconds since the epoch; not before `created_at_ms`.
    pub last_used_ms: u64,
    /// Time since the last run.
    pub age: Duration,
    pub keeper: Keeper,
    pub executing: bool,
}

/// Which backend keeps a session, and what the listing says about that.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Keeper {
    /// `idle_max`: how long it may go without a run.
    Native {
        idle_max: Duration,
    },
    Kernel {
        name: String,
    },
}

/// What the code plane offers a tenant.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct CodeInfo {
    /// The layer that runs Python: `native`, `kernel` or `endpoint`; `None` without a Python.
    pub backend: Option<&'static str>,
    /// Names of kernels, the default one first.
    pub kernels: Vec<String>,
    /// Version such as `3.11.2`; `None` when there is no interpreter.
    pub python: Option<String>,
    /// Version such as `v20.20.2`; `None` when there is no interpreter.
    pub node: Option<String>,
    /// Sessions a tenant may have on the tier that runs Python.
    pub sessions_max: usize,
    /// Processes started ahead because a `*_PREWARM` setting says so; slots do not count.
    pub prewarmed: usize,
}

/// Counts over all tenants.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct EngineStats {
    pub slots_max: usize,
    /// Slots ready to be handed out, by profile.
    pub slots_ready: Vec<(Profile, usize)>,
    pub sessions: usize,
    /// Sessions that idled out since the start.
    pub sessions_cleaned: u64,
    pub cells_running: usize,
    /// Sandboxes with an interpreter, slots included.
    pub sandboxes_live: usize,
}
