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
pub mod pieces;
pub mod refusal;
pub mod run;

#[cfg(test)]
mod tests;

pub use config::EngineConfig;
pub use execution::{Bundle, ErrorOutput, Execution, Output, Piece, Status, Stream};
pub use info::{Backends, CodeInfo, EngineStats, KernelInfo, RuntimeInfo};
pub use pieces::{Pieces, Watcher, pieces};
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

/// What keeps a session, and so what tells two sessions of one id apart.
#[derive(Clone, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum Tier {
    /// Our own harness.
    Native(Language),
    /// The kernel of this name. Kernels run Python.
    Kernel(String),
}

impl Tier {
    pub fn language(&self) -> Language {
        match self {
            Tier::Native(language) => *language,
            Tier::Kernel(_) => Language::Python,
        }
    }

    /// The word before the id in the listing's key of a second session of that id.
    pub fn name(&self) -> &str {
        match self {
            Tier::Native(language) => language.name(),
            Tier::Kernel(name) => name,
        }
    }

    pub fn is_kernel(&self) -> bool {
        matches!(self, Tier::Kernel(_))
    }
}

/// Which sessions a family of routes speaks of.
#[derive(Copy, Clone, Debug, PartialEq, Eq)]
pub enum Tiers {
    All,
    Kernels,
    /// Kernels, and Python of our own harness.
    Python,
    JavaScript,
}

impl Tiers {
    pub fn hold(self, tier: &Tier) -> bool {
        match self {
            Tiers::All => true,
            Tiers::Kernels => tier.is_kernel(),
            Tiers::Python => tier.language() == Language::Python,
            Tiers::JavaScript => tier.language() == Language::JavaScript,
        }
    }
}

/// Who chooses what runs a cell.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Runner {
    /// The deployment's choice for the language.
    Chosen,
    /// A kernel: the one of this name, or the default one.
    Kernel(Option<String>),
}

/// Who is bounded and billed. `default` when nothing is configured.
#[derive(Clone, Debug, PartialEq, Eq, Hash, PartialOrd, Ord, serde::Serialize, serde::Deserialize)]
pub struct TenantId(pub String);

/// Who asks. `user` is one that a verified token proved; a name that a request merely asserts is none.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct Caller {
    pub tenant: TenantId,
    pub user: Option<String>,
}

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
    pub runner: Runner,
    pub code: String,
    pub session: SessionChoice,
    pub timeout: Duration,
    /// Fixed when the interpreter starts; `None` is the sandbox's home.
    pub cwd: Option<String>,
    /// An account of the sandbox by name; `None` is the configured default.
    pub user: Option<String>,
    /// A fresh exec instead of a fork.
    pub strict: bool,
    /// Hears of what the cell produces while it runs.
    pub watcher: Option<Watcher>,
}
