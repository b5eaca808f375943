//! A kernel as its user holds it: ready for a cell, or still on its way to the first one.
//!
//! ```text
//!  start ──► Coming ──(ready)──► Ready ──(cell)──► Ready ──► …
//!              │ its first cell waits for it no longer than the cell may take
//!              ▼
//!            error of the execution; the kernel is deleted, and the server has failed once
//! ```
#![forbid(unsafe_code)]

use std::sync::Arc;
use std::time::Duration;

use tokio::sync::watch;
use tokio::time::{Instant, timeout, timeout_at};
use tokio_util::task::AbortOnDropHandle;
use uuid::Uuid;

use crate::backend::endpoint::EndpointError;
use crate::backend::endpoint::kernel::{Kernel, until_stopped};
use crate::backend::endpoint::outcome::RemoteOutcome;
use crate::backend::endpoint::rest::RestError;
use crate::backend::endpoint::standing::Standing;
use crate::engine::{ErrorOutput, Output};
use crate::harness::interpreter::{Cell, CellLimits};
use crate::harness::outcome::{CellOutcome, Ending, Lost, Stopped};

/// How long a kernel is waited for before it is handed out, so that what is wrong with its start is known by then: the
/// least time that a cell may have.
const HANDED_OUT_AFTER: Duration = Duration::from_secs(1);

/// A kernel that waits for a cell. Dropped, it is deleted on the server.
#[derive(Debug)]
pub struct RemoteKernel {
    name: String,
    stage: Stage,
}

#[derive(Debug)]
enum Stage {
    Ready(Kernel),
    Coming(Coming),
}

/// A kernel on its way.
#[derive(Debug)]
pub(super) struct Coming {
    pub(super) name: String,
    pub(super) since: Instant,
    pub(super) task: AbortOnDropHandle<Result<Kernel, EndpointError>>,
    pub(super) standing: Arc<Standing>,
}

/// A run that is over.
#[derive(Debug)]
pub struct RemoteRan {
    pub outcome: RemoteOutcome,
    /// Present when it can take another cell.
    pub kernel: Option<RemoteKernel>,
}

impl RemoteKernel {
    /// Its kernel specification's name.
    pub fn name(&self) -> &str {
        &self.name
    }

    /// The server's id of it; `None` while it is on its way.
    pub fn id(&self) -> Option<&str> {
        match &self.stage {
            Stage::Ready(kernel) => Some(kernel.id()),
            Stage::Coming(_) => None,
        }
    }

    /// Whether it can take a cell, as far as the server knows. One on its way may turn out not to.
    pub async fn is_alive(&self) -> bool {
        match &self.stage {
            Stage::Ready(kernel) => kernel.is_alive().await,
            Stage::Coming(_) => true,
        }
    }

    /// Deletes it and waits until the server has. Dropping it does the same behind the caller's back; see
    /// [`super::Endpoint::settle`].
    pub async fn shutdown(self) {
        match self.stage {
            Stage::Ready(kernel) => kernel.shutdown().await,
            Stage::Coming(coming) => drop(coming),
        }
    }

    /// Waits until it can take a cell. A start has a limit of its own.
    pub async fn ready(self) -> Result<RemoteKernel, EndpointError> {
        let RemoteKernel { name, stage } = self;
        let kernel = match stage {
            Stage::Ready(kernel) => kernel,
            Stage::Coming(coming) => coming.task.await.unwrap_or_else(|_| Err(broken()))?,
        };
        Ok(RemoteKernel { name, stage: Stage::Ready(kernel) })
    }

    /// Runs one cell. `stop` ends it early and the kernel with it. A kernel that is not ready has as long as the cell
    /// may take, counted from its start; the cell's own time begins when its request has been sent.
    pub async fn run(
        self,
        cell: Cell<'_>,
        limits: &CellLimits,
        stop: &mut watch::Receiver<Option<Stopped>>,
    ) -> RemoteRan {
        let RemoteKernel { name, stage } = self;
        let kernel = match stage {
            Stage::Ready(kernel) => kernel,
            Stage::Coming(coming) => {
                let arrived = tokio::select! {
                    biased;
                    stopped = until_stopped(stop) => return RemoteRan::without(Ending::Stopped(stopped), None),
                    arrived = coming.arrive(cell.timeout) => arrived,
                };
                match arrived {
                    Ok(kernel) => kernel,
                    Err(error) => {
                        return RemoteRan::without(Ending::Lost(Lost::Unreached), Some(error.to_string()));
                    }
                }
            }
        };
        let (outcome, kernel) = kernel.run(cell, limits, stop).await;
        let kernel = kernel.map(|kernel| RemoteKernel { name, stage: Stage::Ready(kernel) });
        RemoteRan { outcome, kernel }
    }
}

impl Coming {
    /// Hands the kernel out: ready if that does not take long, else on its way. What has gone wrong by then is known to
    /// its user before any cell.
    pub(super) async fn hand_out(mut self) -> Result<RemoteKernel, EndpointError> {
        match timeout(HANDED_OUT_AFTER, &mut self.task).await {
            Ok(Ok(got)) => Ok(RemoteKernel { name: self.name, stage: Stage::Ready(got?) }),
            Ok(Err(_)) => Err(broken()),
            Err(_elapsed) => Ok(self.kernel()),
        }
    }

    /// The kernel at once.
    pub(super) fn kernel(self) -> RemoteKernel {
        RemoteKernel { name: self.name.clone(), stage: Stage::Coming(self) }
    }

    async fn arrive(mut self, time_max: Duration) -> Result<Kernel, EndpointError> {
        match timeout_at(self.since + time_max, &mut self.task).await {
            Ok(Ok(got)) => got,
            Ok(Err(_)) => Err(broken()),
            Err(_elapsed) => {
                let error = EndpointError::NotReady(RestError::Timeout(time_max));
                self.standing.note_start(Err(&error));
                Err(error)
            }
        }
    }
}

/// The task of a start panicked.
fn broken() -> EndpointError {
    EndpointError::NotReady(RestError::Garbled)
}

impl RemoteRan {
    /// A cell that was not sent, and the kernel that is no more.
    fn without(ending: Ending, why: Option<String>) -> RemoteRan {
        let error = match why {
            Some(why) => Some(ErrorOutput::plain("ProcessError", why)),
            None => ending.error(0),
        };
        let cell = CellOutcome { ending, outputs: error.into_iter().map(Output::Error).collect() };
        let msg_id = Uuid::new_v4().simple().to_string();
        RemoteRan { outcome: RemoteOutcome { cell, msg_id, names_lost: false }, kernel: None }
    }
}
