//! What runs a line of cells: an interpreter in a sandbox of ours, or a kernel of an external Jupyter server.
#![forbid(unsafe_code)]

use std::sync::Arc;
use std::time::Duration;

use tokio::sync::watch;

use crate::backend::endpoint::{Endpoint, EndpointError, Gone, RemoteKernel, RemoteOutcome};
use crate::backend::native::Native;
use crate::engine::Refusal;
use crate::harness::interpreter::{Cell, CellLimits, Interpreter, Provenance};
use crate::harness::outcome::{CellOutcome, Stopped};
use crate::launcher::plan::{End, LaunchPlan};
use crate::zygote::ANSWER_FIRST;
use crate::zygote::slots::TakenFor;

/// Waits for a cell. Dropped, it ends what it stands for.
#[derive(Debug)]
pub enum Worker {
    Local(Interpreter),
    Remote(RemoteKernel),
}

/// A run that is over.
#[derive(Debug)]
pub struct Ran {
    pub outcome: CellOutcome,
    /// Present when it can take another cell.
    pub worker: Option<Worker>,
    /// The server has put another process in the kernel's place: earlier names are gone.
    pub names_lost: bool,
    /// The server's name for the request.
    pub msg_id: Option<String>,
}

impl Worker {
    /// How it ended, if it did and somebody knows.
    pub fn end(&self) -> Option<End> {
        match self {
            Worker::Local(interpreter) => interpreter.end(),
            Worker::Remote(_) => None,
        }
    }

    /// The launcher's record of its sandbox; a remote kernel has none.
    pub fn provenance(&self) -> Option<Provenance> {
        match self {
            Worker::Local(interpreter) => Some(interpreter.provenance()),
            Worker::Remote(_) => None,
        }
    }

    /// Looks whether it is still there after its last cell. Of a local one that is known: its end is told.
    pub async fn revisit(self) -> Result<Worker, Gone> {
        match self {
            Worker::Local(_) => Ok(self),
            Worker::Remote(kernel) => kernel.revisit().await.map(Worker::Remote),
        }
    }

    pub async fn run(
        self,
        cell: Cell<'_>,
        limits: &CellLimits,
        stop: &mut watch::Receiver<Option<Stopped>>,
    ) -> Ran {
        match self {
            Worker::Local(interpreter) => {
                let ran = interpreter.run(cell, limits, stop).await;
                let worker = ran.interpreter.map(Worker::Local);
                Ran { outcome: ran.outcome, worker, names_lost: false, msg_id: None }
            }
            Worker::Remote(kernel) => {
                let ran = kernel.run(cell, limits, stop).await;
                let worker = ran.kernel.map(Worker::Remote);
                let RemoteOutcome { cell, msg_id, names_lost } = ran.outcome;
                Ran { outcome: cell, worker, names_lost, msg_id: Some(msg_id) }
            }
        }
    }
}

/// Where a worker comes from.
#[derive(Clone, Debug)]
pub enum Source {
    Local(LaunchPlan),
    /// A kernel of the endpoint; when that is gone, what `otherwise` says.
    Remote {
        kernel: String,
        otherwise: Option<LaunchPlan>,
    },
}

/// Why there is no worker. Nothing of the caller's ran.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum NotObtained {
    Refused(Refusal),
    /// The endpoint failed: an error of the execution, in these words.
    Failed(String),
}

impl From<Refusal> for NotObtained {
    fn from(refusal: Refusal) -> NotObtained {
        NotObtained::Refused(refusal)
    }
}

/// Gets workers.
pub struct Workers {
    pub native: Native,
    pub endpoint: Option<Arc<Endpoint>>,
}

impl Workers {
    /// Names of the endpoint's kernels, the default one first; none while there is no endpoint that answers.
    pub async fn remote_kernels(&self) -> Vec<String> {
        match &self.endpoint {
            Some(endpoint) => endpoint.kernels().await,
            None => Vec::new(),
        }
    }

    /// A worker of its own for somebody, started in `cwd`. What a server takes to refuse a `cwd` is waited for no longer
    /// than `time_max`.
    pub async fn obtain(
        &self,
        source: &Source,
        cwd: Option<&str>,
        time_max: Duration,
        taken_for: TakenFor,
    ) -> Result<Worker, NotObtained> {
        let plan = match (source, &self.endpoint) {
            (Source::Local(plan), _) => Some(*plan),
            (Source::Remote { otherwise, .. }, None) => *otherwise,
            (Source::Remote { kernel, otherwise }, Some(endpoint)) => {
                match endpoint.start(Some(kernel), cwd, time_max).await {
                    Ok(kernel) => return Ok(Worker::Remote(kernel)),
                    Err(EndpointError::Unreachable) => *otherwise,
                    Err(EndpointError::NotADirectory { cwd }) => {
                        return Err(Refusal::NotADirectory { cwd }.into());
                    }
                    Err(EndpointError::UnknownKernel { name, available }) => {
                        return Err(Refusal::UnknownKernel { name, available }.into());
                    }
                    Err(error @ (EndpointError::Start(_) | EndpointError::NotReady(_))) => {
                        return Err(NotObtained::Failed(error.to_string()));
                    }
                }
            }
        };
        let Some(plan) = plan else {
            return Err(NotObtained::Failed(EndpointError::Unreachable.to_string()));
        };
        Ok(Worker::Local(self.native.obtain(plan, cwd, taken_for).await?))
    }
}

/// Runs one cell in a worker and throws it away. Dropping the future ends it: whoever asked for a one-off and
/// went away wants nothing of it. Beside the outcome, the server's name for the request.
pub async fn run_once(
    worker: Worker,
    cell: Cell<'_>,
    limits: &CellLimits,
    stop: &mut watch::Receiver<Option<Stopped>>,
) -> (CellOutcome, Option<String>) {
    let ran = worker.run(cell, limits, stop).await;
    if let Some(worker) = ran.worker {
        tokio::spawn(async move {
            tokio::time::sleep(ANSWER_FIRST).await;
            drop(worker);
        });
    }
    (ran.outcome, ran.msg_id)
}
