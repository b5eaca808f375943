//! The resolved settings. [`Config::load`] turns flags, variables and the file into one value that
//! needs no further look at the host and may be handed to another process as JSON.
#![forbid(unsafe_code)]

use std::net::SocketAddr;
use std::path::PathBuf;
use std::time::Duration;

use serde::{Deserialize, Serialize};

use crate::launcher::posture::Posture;

mod endpoint;
mod flag;
mod jwt;
mod keys;
mod layers;
mod librechat;
#[cfg(test)]
mod librechat_tests;
mod raw;
mod resolve;
#[cfg(test)]
mod tests;
mod value;

pub use endpoint::EndpointConfig;
pub use jwt::{JwtAlgorithm, JwtConfig, JwtKey, PublicKey};
pub use keys::{ApiKey, DEFAULT_TENANT, KeyDigest};
pub use layers::{Effective, FileText, Flags, Layers, Source, effective, template};
pub use librechat::{ANY_ORIGIN, LibreChatConfig, Rate, Rates};

/// A setting that cannot be used. Prints as the problem and a hint line, fit to follow `error: `.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{problem}\nhint: {hint}")]
pub struct ConfigError {
    pub problem: String,
    pub hint: String,
}

impl ConfigError {
    fn new(problem: impl Into<String>, hint: impl Into<String>) -> ConfigError {
        ConfigError { problem: problem.into(), hint: hint.into() }
    }
}

/// What the defaults depend on, besides variables.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Surroundings {
    /// Whether the process was started as root.
    pub root: bool,
    /// The product's Python environment when no setting names one.
    pub python_env: PathBuf,
}

impl Surroundings {
    /// Looks at the running process: its uid and what lies beside its executable.
    pub fn of_process() -> Surroundings {
        let beside =
            std::env::current_exe().ok().and_then(|exe| Some(exe.parent()?.join("../runtime/python")));
        let beside = beside.and_then(|path| path.canonicalize().ok()).filter(|path| path.is_dir());
        Surroundings {
            root: rustix::process::geteuid().is_root(),
            python_env: beside.unwrap_or_else(|| PathBuf::from("/opt/caisson/python")),
        }
    }
}

/// Which layer runs Python on the code routes.
#[derive(Copy, Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum CodeBackend {
    /// An endpoint that answers, else a kernel, else native.
    Auto,
    Native,
    Kernel,
}

/// Which of the AIO routes exist.
#[derive(Copy, Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum ApiSurface {
    Full,
    /// Without the AIO routes under `/v1`.
    V2,
}

/// How log lines look.
#[derive(Copy, Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum LogFormat {
    Text,
    Json,
}

/// Limits of the kernel backend.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct KernelSettings {
    pub sessions_max: usize,
    pub session_idle: Duration,
    pub prewarm: usize,
}

/// Limits of the command planes.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct CommandSettings {
    pub sessions_max: usize,
    pub session_idle: Duration,
    /// Path of a bash inside the sandbox.
    pub bash: Option<String>,
}

/// Limits of the MCP server.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct McpSettings {
    /// Of a tenant, over HTTP.
    pub sessions_max: usize,
    pub session_idle: Duration,
}

/// Everything that can grow, per sandbox, space or call.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Limits {
    pub memory_bytes: u64,
    pub pids: u32,
    pub cpu_cores: f64,
    pub space_bytes: u64,
    pub space_inodes: u64,
    pub spaces_max: u64,
    pub shm_bytes: u64,
    pub shm_inodes: u64,
    pub nofile: u32,
    pub output_chars_max: usize,
    pub timeout_default: Duration,
    pub timeout_max: Duration,
    pub grace: Duration,
    pub cells_running_max: usize,
}

/// The resolved settings. Holds digests of keys, never a key. The token of a Jupyter server is in it, because we
/// are the ones to show it there; nothing that is printed has it.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Config {
    pub listen: Vec<SocketAddr>,
    pub allow_open: bool,
    /// Host names, lower case, that clients may use while no key is configured.
    pub hosts: Vec<String>,
    /// Web origins that may call while no key is configured.
    pub origins: Vec<String>,
    pub api_keys: Vec<ApiKey>,
    pub data_dir: PathBuf,
    /// The folder under which spaces lie; `None`: inside the data directory.
    pub uploads_dir: Option<PathBuf>,
    /// Reserved.
    pub notebooks_dir: Option<PathBuf>,
    /// The least isolation to start with.
    pub require_isolation: Posture,
    /// A fresh exec for every interpreter of the deployment.
    pub strict: bool,
    pub policies_dir: Option<PathBuf>,
    pub python_env: PathBuf,
    pub service_user: String,
    pub default_user: Option<String>,
    pub python_version: Option<String>,
    pub node_version: Option<String>,
    pub code_backend: CodeBackend,
    pub code_sessions_max: usize,
    pub code_session_idle: Duration,
    pub code_prewarm: usize,
    pub kernel: KernelSettings,
    pub commands: CommandSettings,
    /// The external Jupyter server that runs Python while it answers.
    pub jupyter_endpoint: Option<EndpointConfig>,
    pub slots_max: usize,
    pub api_surface: ApiSurface,
    pub log_level: String,
    pub log_format: LogFormat,
    pub limits: Limits,
    pub librechat: LibreChatConfig,
    pub mcp: McpSettings,
    /// What an operator should know about these settings. Log them once at start.
    pub notes: Vec<String>,
}

impl Config {
    /// Python as it is looked for on `PATH`.
    pub fn python_name(&self) -> String {
        self.python_version
            .as_ref()
            .map_or_else(|| "python3".to_owned(), |version| format!("python{version}"))
    }

    /// The same for Node.
    pub fn node_name(&self) -> String {
        self.node_version.as_ref().map_or_else(|| "node".to_owned(), |version| format!("node{version}"))
    }

    /// True when neither an API key nor the key of a token's signer is configured: everybody is the tenant `default`.
    pub fn is_open(&self) -> bool {
        self.api_keys.is_empty() && self.librechat.jwt.keys.is_empty()
    }

    /// Whether there may be more than one tenant. A signer may name any number of them.
    pub fn has_several_tenants(&self) -> bool {
        let first = self.api_keys.first().map(|key| &key.tenant);
        self.api_keys.iter().any(|key| Some(&key.tenant) != first) || !self.librechat.jwt.keys.is_empty()
    }

    /// Resolves settings that were already read, but for a folder of keys that they name. The same input gives the
    /// same result.
    pub fn load(
        flags: &Flags,
        env: &dyn Fn(&str) -> Option<String>,
        file: Option<FileText<'_>>,
        around: &Surroundings,
    ) -> Result<(Config, Layers), ConfigError> {
        let layers = Layers::gather(flags, env, file)?;
        let config = resolve::resolve(&layers, env, around)?;
        Ok((config, layers))
    }

    /// Refuses to serve beyond loopback without a key, unless the operator asked for exactly that.
    pub fn check_exposure(&self) -> Result<(), ConfigError> {
        if !self.is_open() || self.allow_open {
            return Ok(());
        }
        match self.listen.iter().find(|address| !address.ip().is_loopback()) {
            None => Ok(()),
            Some(address) => Err(ConfigError::new(
                format!("listen: {address} can be reached from other machines and no API key is configured"),
                "set AIO_API_KEY, listen on 127.0.0.1, or pass --allow-open to let anybody run code",
            )),
        }
    }
}
