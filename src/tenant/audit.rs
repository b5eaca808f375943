//! What is written down about every execution. Never the code and never its output.
#![forbid(unsafe_code)]

use serde::{Deserialize, Serialize};

use crate::engine::{Language, Status, TenantId};
use crate::harness::interpreter::Provenance;

/// What was run. In the log it is the word under `language`.
#[derive(Copy, Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Ran {
    Python,
    JavaScript,
    /// A command of the command planes.
    Command,
    /// A line of a stateful shell.
    Shell,
    /// A program of the code interpreter API, in whatever language.
    Program,
}

impl Ran {
    pub fn name(self) -> &'static str {
        match self {
            Ran::Python => Language::Python.name(),
            Ran::JavaScript => Language::JavaScript.name(),
            Ran::Command => "command",
            Ran::Shell => "shell",
            Ran::Program => "program",
        }
    }
}

impl From<Language> for Ran {
    fn from(language: Language) -> Ran {
        match language {
            Language::Python => Ran::Python,
            Language::JavaScript => Ran::JavaScript,
        }
    }
}

/// One execution, for the audit log.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct AuditRecord {
    /// When the cell started, in milliseconds since the epoch.
    pub at_ms: u64,
    pub tenant: TenantId,
    #[serde(rename = "language")]
    pub ran: Ran,
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
