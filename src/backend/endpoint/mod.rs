//! The endpoint backend: Python cells run by an external Jupyter server of the operator's, over REST and one
//! WebSocket per kernel.
//!
//! None of our confinement holds there: what runs is confined by whoever runs that server. Every byte that
//! comes from it is treated like a guest's: bounded, checked, repaired; a dead, slow or lying server becomes
//! an error of the start or of the execution.
#![forbid(unsafe_code)]

use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use tokio::time::Instant;

use crate::config::EndpointConfig;

mod collect;
mod kernel;
mod link;
mod message;
mod outcome;
mod rest;
mod watch;

#[cfg(test)]
mod fake;
#[cfg(test)]
mod real;
#[cfg(test)]
mod tests;

pub use kernel::{RemoteKernel, RemoteRan};
pub use outcome::RemoteOutcome;
pub use rest::RestError;

use kernel::Lease;
use rest::Rest;

/// How long a look at a server that answered is believed.
const REACHABLE_FOR: Duration = Duration::from_secs(30);
/// How long a look at one that did not is.
const UNREACHABLE_FOR: Duration = Duration::from_secs(5);
/// Longest working directory, in bytes: what the Linux kernel takes as a path.
const CWD_BYTES_MAX: usize = 4095;

/// Why there is no kernel. Nothing of the caller's ran.
#[derive(Debug, thiserror::Error)]
pub enum EndpointError {
    /// There is nobody to ask: the next backend may serve.
    #[error("the Jupyter server at AIO_JUPYTER_ENDPOINT does not answer")]
    Unreachable,
    #[error("unknown kernel '{name}'; available: {}", available.join(", "))]
    UnknownKernel { name: String, available: Vec<String> },
    #[error("not a directory: {cwd}")]
    NotADirectory { cwd: String },
    #[error("the Jupyter server started no kernel")]
    Start(#[source] RestError),
    #[error("a new kernel of the Jupyter server did not get ready")]
    NotReady(#[source] RestError),
}

/// The last look at the server.
#[derive(Clone, Debug)]
struct Look {
    at: Instant,
    /// Default first; none when it did not answer or has none for Python.
    kernels: Vec<String>,
}

impl Look {
    fn is_fresh(&self) -> bool {
        self.at.elapsed() < if self.kernels.is_empty() { UNREACHABLE_FOR } else { REACHABLE_FOR }
    }
}

/// A handle on the server.
#[derive(Debug)]
pub struct Endpoint {
    rest: Arc<Rest>,
    look: Mutex<Option<Look>>,
    /// One looks, the others wait for what it sees.
    looking: tokio::sync::Mutex<()>,
}

impl Endpoint {
    pub fn new(config: EndpointConfig) -> Endpoint {
        Endpoint {
            rest: Arc::new(Rest::new(config)),
            look: Mutex::default(),
            looking: tokio::sync::Mutex::default(),
        }
    }

    /// The server's URL without its token.
    pub fn shown(&self) -> String {
        self.rest.config().shown()
    }

    /// Looks whether the server answers, takes the token and has a kernel for Python. At most 2 seconds.
    pub async fn probe(&self) -> bool {
        let _alone = self.looking.lock().await;
        !self.look_now().await.is_empty()
    }

    /// The names of its Python kernels, default first; none while it cannot be used. Looks at the server only
    /// when the last look is old: 30 s when it answered, 5 s when it did not.
    pub async fn kernels(&self) -> Vec<String> {
        if let Some(look) = self.last_look().filter(Look::is_fresh) {
            return look.kernels;
        }
        let _alone = self.looking.lock().await;
        match self.last_look().filter(Look::is_fresh) {
            Some(look) => look.kernels,
            None => self.look_now().await,
        }
    }

    /// What the last look saw, without waiting.
    pub fn kernels_seen(&self) -> Vec<String> {
        self.last_look().map(|look| look.kernels).unwrap_or_default()
    }

    /// Starts a kernel, the default when none is named, and waits until it answers. `cwd` is a directory where
    /// the server runs; `None` is the server's own.
    pub async fn start(
        &self,
        kernel_name: Option<&str>,
        cwd: Option<&str>,
    ) -> Result<RemoteKernel, EndpointError> {
        let available = self.kernels().await;
        let default = available.first().ok_or(EndpointError::Unreachable)?;
        let name = kernel_name.unwrap_or(default);
        if !available.iter().any(|known| known == name) {
            return Err(EndpointError::UnknownKernel { name: name.to_owned(), available });
        }
        if let Some(cwd) = cwd
            && (cwd.is_empty() || cwd.len() > CWD_BYTES_MAX || cwd.contains('\0'))
        {
            return Err(EndpointError::NotADirectory { cwd: cwd.to_owned() });
        }
        let lease = Lease::start(&self.rest, name).await.map_err(|error| self.not_started(error))?;
        RemoteKernel::prepare(lease, name, cwd).await.inspect_err(|error| self.log(error))
    }

    fn not_started(&self, error: RestError) -> EndpointError {
        // A connection that was never there started nothing; after any other failure a kernel may be.
        let absent = matches!(error, RestError::Connect(_) | RestError::ConnectTimeout);
        let error = EndpointError::Start(error);
        self.log(&error);
        if absent {
            self.see(Vec::new());
            return EndpointError::Unreachable;
        }
        error
    }

    /// Waits until the server has deleted the kernels that were dropped, for a last time: the end of the
    /// runtime would leave them there.
    pub async fn settle(&self, time_max: Duration) {
        let deletions = self.rest.deletions();
        deletions.close();
        if tokio::time::timeout(time_max, deletions.wait()).await.is_err() {
            tracing::warn!(
                endpoint = self.shown(),
                kernels = deletions.len(),
                "kernels were not deleted in time"
            );
        }
    }

    async fn look_now(&self) -> Vec<String> {
        let kernels = match self.rest.kernels().await {
            Ok(kernels) if kernels.is_empty() => {
                tracing::warn!(endpoint = self.shown(), "the Jupyter server has no kernel for Python");
                kernels
            }
            Ok(kernels) => kernels,
            Err(error) => {
                // Said once and not every few seconds.
                if self.last_look().is_none_or(|look| !look.kernels.is_empty()) {
                    let source = std::error::Error::source(&error).map(ToString::to_string);
                    tracing::warn!(endpoint = self.shown(), %error, source, "the Jupyter server cannot be used");
                }
                Vec::new()
            }
        };
        self.see(kernels.clone());
        kernels
    }

    fn log(&self, error: &EndpointError) {
        let source = std::error::Error::source(error).map(ToString::to_string);
        tracing::warn!(endpoint = self.shown(), %error, source, "a kernel could not be had");
    }

    fn last_look(&self) -> Option<Look> {
        self.look.lock().unwrap_or_else(PoisonError::into_inner).clone()
    }

    fn see(&self, kernels: Vec<String>) {
        *self.look.lock().unwrap_or_else(PoisonError::into_inner) =
            Some(Look { at: Instant::now(), kernels });
    }
}
