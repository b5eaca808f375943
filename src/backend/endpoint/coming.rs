//! A kernel as its user holds it: ready for a cell, or still on its way to the first one.
//!
//! ```text
//!  start ──► Coming ──(ready)──► Ready ──(cell)──► Ready ──► …
//!            │ ▲ │
//!            │ └─┘ a cell waits for it no longer than the cell may take; the next one waits on
//!            ▼
//!          not ready within our own bound: error of the execution; the server has failed once
//! ```
//!
//! A caller's time says nothing of the server: only a start that comes to its own end counts in its standing.
#![forbid(unsafe_code)]

use std::sync::Arc;
use std::time::Duration;

use futures_util::FutureExt;
use tokio::sync::watch;
use tokio::task::JoinHandle;
use tokio::time::{Instant, timeout, timeout_at};
use uuid::Uuid;

use crate::backend::endpoint::EndpointError;
use crate::backend::endpoint::kernel::{Kernel, until_stopped};
use crate::backend::endpoint::outcome::RemoteOutcome;
use crate::backend::endpoint::rest::{Rest, RestError};
use crate::backend::endpoint::standing::Standing;
use crate::engine::{ErrorOutput, Output};
use crate::harness::interpreter::{Cell, CellLimits};
use crate::harness::outcome::{CellOutcome, Ending, Lost, Stopped};

/// How long a kernel is waited for before it is handed out, so that what is wrong with its start is known by then: the
/// least time that a cell may have.
pub(super) const HANDED_OUT_AFTER: Duration = Duration::from_secs(1);

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
    name: String,
    /// When its first cell began to wait; `None` once that has given up.
    since: Option<Instant>,
    /// `None` once its end has been seen.
    start: Option<Start>,
    rest: Arc<Rest>,
    standing: Arc<Standing>,
}

/// A start comes to an end of its own, which it tells the server's standing.
pub(super) type Start = JoinHandle<Result<Kernel, EndpointError>>;

/// What became of a kernel between two cells.
#[derive(Copy, Clone, Debug, PartialEq, Eq)]
pub enum Gone {
    /// The server has ended it, and its names are lost.
    Ended,
    /// It did not get ready. No cell has run in it.
    NeverCame,
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

    /// Looks whether it is still there after its last cell, as far as the server knows.
    pub async fn revisit(self) -> Result<RemoteKernel, Gone> {
        let RemoteKernel { name, stage } = self;
        let kernel = match stage {
            Stage::Ready(kernel) if kernel.is_gone().await => return Err(Gone::Ended),
            Stage::Ready(kernel) => kernel,
            Stage::Coming(mut coming) => match coming.outcome().now_or_never() {
                None => return Ok(coming.kernel()),
                Some(Ok(kernel)) => kernel,
                Some(Err(_)) => return Err(Gone::NeverCame),
            },
        };
        Ok(RemoteKernel { name, stage: Stage::Ready(kernel) })
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
    #[cfg(test)]
    pub(super) async fn ready(self) -> Result<RemoteKernel, EndpointError> {
        let RemoteKernel { name, stage } = self;
        let kernel = match stage {
            Stage::Ready(kernel) => kernel,
            Stage::Coming(mut coming) => coming.outcome().await?,
        };
        Ok(RemoteKernel { name, stage: Stage::Ready(kernel) })
    }

    /// Runs one cell. `stop` ends it early and the kernel with it. A kernel that is not ready has as long as its first
    /// cell may take, counted from its start, and is kept for the next cell; a cell's own time begins when its request
    /// has been sent.
    pub async fn run(
        self,
        cell: Cell<'_>,
        limits: &CellLimits,
        stop: &mut watch::Receiver<Option<Stopped>>,
    ) -> RemoteRan {
        let RemoteKernel { name, stage } = self;
        let kernel = match stage {
            Stage::Ready(kernel) => kernel,
            Stage::Coming(mut coming) => {
                let arrived = tokio::select! {
                    biased;
                    stopped = until_stopped(stop) => {
                        coming.stop();
                        return RemoteRan::without(Ending::Stopped(stopped), None, None);
                    }
                    arrived = coming.arrive(cell.timeout) => arrived,
                };
                match arrived {
                    Some(Ok(kernel)) => kernel,
                    Some(Err(error)) => return RemoteRan::unready(&error, None),
                    None => {
                        let error = EndpointError::NotReady(RestError::Timeout(cell.timeout));
                        return RemoteRan::unready(&error, Some(coming.kernel()));
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
    pub(super) fn new(name: String, start: Start, rest: Arc<Rest>, standing: Arc<Standing>) -> Coming {
        Coming { name, since: Some(Instant::now()), start: Some(start), rest, standing }
    }

    /// Hands the kernel out: ready if that takes no longer than `time_max`, else on its way. What has gone wrong by then
    /// is known to its user before any cell.
    pub(super) async fn hand_out(mut self, time_max: Duration) -> Result<RemoteKernel, EndpointError> {
        match timeout(time_max, self.outcome()).await {
            Ok(got) => Ok(RemoteKernel { stage: Stage::Ready(got?), name: self.name.clone() }),
            Err(_elapsed) => Ok(self.kernel()),
        }
    }

    fn kernel(self) -> RemoteKernel {
        RemoteKernel { name: self.name.clone(), stage: Stage::Coming(self) }
    }

    /// What came of the start, once it has ended. Dropping the future loses nothing.
    async fn outcome(&mut self) -> Result<Kernel, EndpointError> {
        let start = self.start.as_mut().expect("nobody asks again once it has ended");
        let got = start.await;
        self.start = None;
        // Else its task panicked.
        got.unwrap_or(Err(EndpointError::NotReady(RestError::Garbled)))
    }

    /// Waits for it as long as a cell may take. `None`: that is over, and it is still on its way.
    async fn arrive(&mut self, time_max: Duration) -> Option<Result<Kernel, EndpointError>> {
        let since = self.since.take().unwrap_or_else(Instant::now);
        timeout_at(since + time_max, self.outcome()).await.ok()
    }

    /// Nobody wants it any more.
    fn stop(&mut self) {
        if let Some(start) = self.start.take() {
            start.abort();
        }
    }
}

impl Drop for Coming {
    /// Nobody waits any more. A few starts go on all the same: were every caller in a hurry, a server whose kernels never
    /// come would not be found out.
    fn drop(&mut self) {
        let Ok(runtime) = tokio::runtime::Handle::try_current() else { return };
        let Some(mut start) = self.start.take() else { return };
        let witness = self.standing.witness();
        let closing = self.rest.closing().clone();
        let seen_out = async move {
            if witness.is_none() || closing.run_until_cancelled(&mut start).await.is_none() {
                start.abort();
                // Its kernel is being deleted when this returns.
                let _ = start.await;
            }
        };
        self.rest.errands().spawn_on(seen_out, &runtime);
    }
}

impl RemoteRan {
    /// A cell that was not sent because its kernel was not ready.
    fn unready(error: &EndpointError, kernel: Option<RemoteKernel>) -> RemoteRan {
        let error = ErrorOutput::plain("ProcessError", error.to_string());
        RemoteRan::without(Ending::Lost(Lost::Unreached), Some(error), kernel)
    }

    /// A cell that was not sent, for `error` or for what its ending says.
    fn without(ending: Ending, error: Option<ErrorOutput>, kernel: Option<RemoteKernel>) -> RemoteRan {
        let error = error.or_else(|| ending.error(0));
        let cell = CellOutcome { ending, outputs: error.into_iter().map(Output::Error).collect() };
        let msg_id = Uuid::new_v4().simple().to_string();
        RemoteRan { outcome: RemoteOutcome { cell, msg_id, names_lost: false }, kernel }
    }
}
