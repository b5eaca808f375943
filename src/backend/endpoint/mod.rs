//! The endpoint backend: Python cells run by an external Jupyter server of the operator's, over REST and one
//! WebSocket per kernel.
//!
//! None of our confinement holds there: what runs is confined by whoever runs that server. Every byte that
//! comes from it is treated like a guest's: bounded, checked, repaired; a dead, slow or lying server becomes
//! an error of the start or of the execution.
#![forbid(unsafe_code)]

use std::sync::Arc;
use std::time::Duration;

use tokio::time::{sleep, timeout};

use crate::config::EndpointConfig;
use crate::store::Store;

mod collect;
mod coming;
mod kernel;
mod link;
mod message;
mod outcome;
mod records;
mod rest;
mod standing;
mod watch;

#[cfg(test)]
mod fake;
#[cfg(test)]
mod real;
#[cfg(test)]
mod tests;

pub use coming::{Gone, RemoteKernel, RemoteRan};
pub use outcome::RemoteOutcome;
pub use rest::RestError;

use coming::{Coming, HANDED_OUT_AFTER};
use kernel::{Kernel, Lease, delete};
use records::Records;
use rest::Rest;
use standing::{Look, Standing};

/// How long a new kernel may take until it answers, whatever its first cell may take. Its own tests wait less.
const READY_MAX: Duration = Duration::from_secs(if cfg!(test) { 5 } else { 30 });
/// Pause between two tries to delete what earlier daemons have left.
const SWEEP_PAUSE: Duration = Duration::from_secs(if cfg!(test) { 1 } else { 60 });
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

impl EndpointError {
    /// Whether there was no server to start anything. A connection that was never there started nothing; after any other
    /// failure a kernel may be.
    fn is_absence(&self) -> bool {
        matches!(self, EndpointError::Start(RestError::Connect(_) | RestError::ConnectTimeout))
    }
}

/// A handle on the server.
#[derive(Debug)]
pub struct Endpoint {
    rest: Arc<Rest>,
    standing: Arc<Standing>,
    /// One looks, the others wait for what it sees.
    looking: tokio::sync::Mutex<()>,
}

impl Endpoint {
    /// The kernels it starts are written down in `store` for as long as they are there.
    pub fn new(config: EndpointConfig, store: Store) -> Endpoint {
        let records = Records::new(store, config.shown());
        Endpoint {
            rest: Arc::new(Rest::new(config, records)),
            standing: Arc::default(),
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
    /// when the last look is old: 30 s when it answered, 5 s when it did not. None either while its new kernels do not
    /// get ready.
    pub async fn kernels(&self) -> Vec<String> {
        if self.standing.is_shunned() {
            return Vec::new();
        }
        if let Some(look) = self.standing.last_look().filter(Look::is_fresh) {
            return look.kernels;
        }
        let _alone = self.looking.lock().await;
        match self.standing.last_look().filter(Look::is_fresh) {
            Some(look) => look.kernels,
            None => self.look_now().await,
        }
    }

    /// What the last look saw, without waiting.
    pub fn kernels_seen(&self) -> Vec<String> {
        let look = self.standing.last_look().filter(|_| !self.standing.is_shunned());
        look.map(|look| look.kernels).unwrap_or_default()
    }

    /// Starts a kernel, the default when none is named. `cwd` is a directory where the server runs, `None` the server's
    /// own. The kernel may still be on its way when this returns, and its first cell waits for it; with a directory that
    /// is so only after `time_max`, since one that is none is to be refused.
    pub async fn start(
        &self,
        kernel_name: Option<&str>,
        cwd: Option<&str>,
        time_max: Duration,
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
        let waited_max = if cwd.is_some() { time_max } else { HANDED_OUT_AFTER };
        self.send_for(name, cwd).hand_out(waited_max).await
    }

    fn send_for(&self, name: &str, cwd: Option<&str>) -> Coming {
        let (rest, standing) = (Arc::clone(&self.rest), Arc::clone(&self.standing));
        let (spec, cwd) = (name.to_owned(), cwd.map(str::to_owned));
        let start = tokio::spawn(async move {
            let getting_ready = async {
                let lease = Lease::start(&rest, &spec).await.map_err(EndpointError::Start)?;
                Kernel::prepare(lease, cwd.as_deref()).await
            };
            let got = timeout(READY_MAX, getting_ready).await;
            let got = got.unwrap_or(Err(EndpointError::NotReady(RestError::Timeout(READY_MAX))));
            if let Err(error) = &got {
                let source = std::error::Error::source(error).map(ToString::to_string);
                tracing::warn!(endpoint = rest.config().shown(), %error, source, "a kernel could not be had");
            }
            standing.note_start(got.as_ref().map(drop));
            match got {
                Err(error) if error.is_absence() => Err(EndpointError::Unreachable),
                got => got,
            }
        });
        Coming::new(name.to_owned(), start, Arc::clone(&self.rest), Arc::clone(&self.standing))
    }

    /// Deletes the kernels that daemons before this one have left on the server, when that can be used. Returns once none
    /// is left.
    pub async fn sweep(&self) {
        loop {
            match self.rest.records().left_behind().await {
                Ok(left) if left.is_empty() => return,
                Ok(left) if !self.kernels().await.is_empty() => {
                    tracing::info!(
                        endpoint = self.shown(),
                        kernels = left.len(),
                        "deleting kernels of an earlier start"
                    );
                    for kernel in &left {
                        delete(&self.rest, kernel).await;
                    }
                }
                Ok(_) => {}
                Err(error) => tracing::error!(%error, "kernels of an earlier start are not known"),
            }
            sleep(SWEEP_PAUSE).await;
        }
    }

    /// Waits until the server has deleted the kernels that were dropped, for a last time: the end of the
    /// runtime would leave them there.
    pub async fn settle(&self, time_max: Duration) {
        self.rest.closing().cancel();
        let errands = self.rest.errands();
        errands.close();
        if timeout(time_max, errands.wait()).await.is_err() {
            tracing::warn!(endpoint = self.shown(), left = errands.len(), "kernels were not deleted in time");
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
                if self.standing.last_look().is_none_or(|look| !look.kernels.is_empty()) {
                    let source = std::error::Error::source(&error).map(ToString::to_string);
                    tracing::warn!(endpoint = self.shown(), %error, source, "the Jupyter server cannot be used");
                }
                Vec::new()
            }
        };
        self.standing.see(kernels.clone());
        kernels
    }
}
