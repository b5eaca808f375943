//! What the engine is told at start.
#![forbid(unsafe_code)]

use std::time::Duration;

use crate::config::{CodeBackend, EndpointConfig};
use crate::harness::interpreter::CellLimits;
use crate::session::registry::SessionLimits;
use crate::tenant::quota::CellQuota;

/// Settings of the engine, resolved. The defaults are the contract's.
#[derive(Clone, Debug)]
pub struct EngineConfig {
    /// Simultaneous sessions of one tenant, Python and JavaScript together.
    pub sessions_max: usize,
    /// A session that nobody uses for this long is closed.
    pub session_idle_max: Duration,
    /// The same two for kernels.
    pub kernel_sessions_max: usize,
    pub kernel_idle_max: Duration,
    /// Cells that wait for one session.
    pub session_waiting_max: usize,
    /// Cells that run at once, over all tenants.
    pub cells_running_max: usize,
    /// Cells of one tenant that run at once.
    pub cells_running_per_tenant_max: usize,
    /// Cells that wait for a place, per tenant and over all.
    pub cells_waiting_max: usize,
    /// Characters of output per cell.
    pub output_chars_max: usize,
    /// How long a native cell may still end by itself once its time is up.
    pub grace: Duration,
    /// How long a kernel's cell may take to end once it is interrupted.
    pub interrupt_grace: Duration,
    pub timeout_default: Duration,
    pub timeout_max: Duration,
    /// The sandbox's memory limit, for messages.
    pub memory_mib_max: u64,
    /// Slots over all tenants; 0 switches them off.
    pub slots_max: usize,
    /// JavaScript slots of tenant `default` beyond that (`AIO_CODE_PREWARM`).
    pub code_prewarm: usize,
    /// Kernel slots of tenant `default` beyond that (`AIO_KERNEL_PREWARM`).
    pub kernel_prewarm: usize,
    /// An external Jupyter server that runs Python while it answers (`AIO_JUPYTER_ENDPOINT`).
    pub endpoint: Option<EndpointConfig>,
    /// What runs Python on the code routes (`AIO_CODE_BACKEND`).
    pub code_backend: CodeBackend,
    /// Slots for tenant `default` before its first request. For a daemon without a key.
    pub prefill_default: bool,
    /// The account of requests that name none (`AIO_DEFAULT_USER`); `None` is `sandbox`.
    pub default_user: Option<String>,
    /// Name of the daemon's own account, which a daemon that is not root accepts as `user`.
    pub daemon_account: Option<String>,
    /// What is looked for on `PATH`, for the message when it is not there.
    pub python_name: String,
    pub node_name: String,
}

impl Default for EngineConfig {
    fn default() -> EngineConfig {
        EngineConfig {
            sessions_max: 20,
            session_idle_max: Duration::from_secs(1_800),
            kernel_sessions_max: 5,
            kernel_idle_max: Duration::from_secs(300),
            session_waiting_max: 64,
            cells_running_max: 256,
            cells_running_per_tenant_max: 256,
            cells_waiting_max: 1_024,
            output_chars_max: 2_000_000,
            grace: Duration::from_secs(5),
            interrupt_grace: Duration::from_secs(2),
            timeout_default: Duration::from_secs(30),
            timeout_max: Duration::from_secs(900),
            memory_mib_max: 512,
            slots_max: 24,
            code_prewarm: 0,
            kernel_prewarm: 0,
            endpoint: None,
            code_backend: CodeBackend::Auto,
            prefill_default: true,
            default_user: None,
            daemon_account: None,
            python_name: "python3".to_owned(),
            node_name: "node".to_owned(),
        }
    }
}

impl EngineConfig {
    pub(super) fn cell_limits(&self) -> CellLimits {
        CellLimits {
            output_chars_max: self.output_chars_max,
            stream_bytes_max: None,
            grace: self.grace,
            interrupt_grace: self.interrupt_grace,
            memory_mib_max: self.memory_mib_max,
        }
    }

    pub(super) fn session_limits(&self) -> SessionLimits {
        SessionLimits {
            sessions_max: self.sessions_max,
            kernel_sessions_max: self.kernel_sessions_max,
            waiting_max: self.session_waiting_max,
            idle_max: self.session_idle_max,
            kernel_idle_max: self.kernel_idle_max,
        }
    }

    pub(super) fn cell_quota(&self) -> CellQuota {
        CellQuota {
            running_max: self.cells_running_max,
            running_per_tenant_max: self.cells_running_per_tenant_max,
            waiting_max: self.cells_waiting_max,
        }
    }
}
