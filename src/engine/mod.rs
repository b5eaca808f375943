//! What the program is about: a [`CellRequest`] becomes an [`Execution`] or a [`Refusal`].
//!
//! The engine knows no HTTP, no status codes and no family's field names. A failed cell is a value;
//! only a request that we cannot take is an error.
#![forbid(unsafe_code)]

use std::time::Duration;

pub mod config;
mod detached;
pub mod execution;
pub mod identity;
pub mod info;
pub mod refusal;
pub mod run;

#[cfg(test)]
mod tests;

pub use config::EngineConfig;
pub use execution::{Bundle, ErrorOutput, Execution, Output, Status, Stream};
pub use info::{CodeInfo, EngineStats, RuntimeInfo};
pub use refusal::Refusal;
pub use run::{CreateRefused, DEFAULT_TENANT, Engine};

/// The languages of the code plane.
#[derive(Copy, Clone, Debug, PartialEq, Eq, Hash, PartialOrd, Ord, serde::Serialize, serde::Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Language {
    Python,
    JavaScript,
}

impl Language {
    /// Resolves a name or alias as clients send it; `None` for a language we do not run.
    pub fn parse(name: &str) -> Option<Language> {
        match name {
            "python" | "python3" => Some(Language::Python),
            "javascript" | "node" | "nodejs" | "js" => Some(Language::JavaScript),
            _ => None,
        }
    }

    /// The resolved name, never an alias.
    pub fn name(self) -> &'static str {
        match self {
            Language::Python => "python",
            Language::JavaScript => "javascript",
        }
    }
}

/// Who is bounded and billed. `default` when nothing is configured.
#[derive(Clone, Debug, PartialEq, Eq, Hash, PartialOrd, Ord, serde::Serialize, serde::Deserialize)]
pub struct TenantId(pub String);

/// Which session a cell wants.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum SessionChoice {
    /// A process for this cell alone.
    OneOff,
    /// This session; created when unseen.
    Named(String),
    /// A new session whose id the answer carries.
    Generated,
}

/// One cell to run, in our own types.
#[derive(Clone, Debug)]
pub struct CellRequest {
    pub tenant: TenantId,
    pub language: Language,
    pub code: String,
    pub session: SessionChoice,
    pub timeout: Duration,
    /// Fixed when the interpreter starts; `None` is the sandbox's home.
    pub cwd: Option<String>,
    /// An account of the sandbox by name; `None` is the configured default.
    pub user: Option<String>,
    /// A fresh exec instead of a fork.
    pub strict: bool,
}
