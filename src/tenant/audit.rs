//! What is written down about every execution. Never the code and never its output.
#![forbid(unsafe_code)]

use serde::{Deserialize, Serialize};

use crate::engine::{Language, Status, TenantId};
use crate::harness::interpreter::Provenance;

/// One execution, for the audit log.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct AuditRecord {
    /// When the cell started, in milliseconds since the epoch.
    pub at_ms: u64,
    pub tenant: TenantId,
    pub language: Language,
    pub session: Option<String>,
    pub status: Status,
    pub duration_ms: u64,
    /// Sandbox and attestation; `None` when nothing was started, such as for a refused user.
    pub provenance: Option<Provenance>,
    /// Why the cell ended, in a few words.
    pub ended: String,
}

/// The word for a status in the log.
pub fn status_name(status: Status) -> &'static str {
    match status {
        Status::Ok => "ok",
        Status::Error => "error",
        Status::Timeout => "timeout",
    }
}
