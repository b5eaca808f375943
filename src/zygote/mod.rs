//! Where interpreters come from, as the daemon sees it: the launcher forks a profile's zygote into a shell,
//! or execs where no zygote serves. `slots` keeps some ready ahead of time.
#![forbid(unsafe_code)]

use std::pin::Pin;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use tokio::sync::watch;

use crate::harness::interpreter::Interpreter;
use crate::launcher::client::{Client, LaunchError, Sandbox};
use crate::launcher::plan::{LaunchPlan, Profile, SpaceId};
use crate::launcher::posture::Hello;

pub mod slots;

/// A launch under way.
pub type Launching<'a> = Pin<Box<dyn Future<Output = Result<Interpreter, LaunchError>> + Send + 'a>>;

/// A launch of a sandbox whose program speaks something else than the harness's protocol.
pub type Opening<'a> = Pin<Box<dyn Future<Output = Result<Sandbox, LaunchError>> + Send + 'a>>;

/// A deletion under way.
pub type Deleting<'a> = Pin<Box<dyn Future<Output = Result<(), LaunchError>> + Send + 'a>>;

/// A space in memory that nobody has had.
pub fn fresh_space() -> SpaceId {
    static NEXT: AtomicU64 = AtomicU64::new(1);
    SpaceId::transient(NEXT.fetch_add(1, Ordering::Relaxed))
}

/// How long what a finished run leaves is left standing: tearing it down beside the writing of the answer would take the
/// processor from that.
pub const ANSWER_FIRST: Duration = Duration::from_millis(2);

/// Where a sandbox sees its workspace.
pub const WORKSPACE_DIR: &str = "/mnt/data";

/// How long a request waits for a launcher that is being started again.
pub const LAUNCHER_WAIT: Duration = Duration::from_secs(5);

/// What the launcher reported, once one is attached; `None` when none came.
pub async fn attached(launcher: &dyn Launch) -> Option<Arc<Hello>> {
    let mut hello = launcher.hello();
    let attached = async {
        loop {
            // Marked as seen before the look, so that an attachment in between is noticed.
            let current = hello.borrow_and_update().clone();
            if let Some(current) = current.filter(|_| launcher.is_attached()) {
                return Some(current);
            }
            hello.changed().await.ok()?;
        }
    };
    let found = tokio::time::timeout(LAUNCHER_WAIT, attached).await.ok().flatten();
    if found.is_none() {
        tracing::error!("no launcher came within {} s", LAUNCHER_WAIT.as_secs());
    }
    found
}

/// Turns plans into interpreters: the launcher's client, or a fake in tests.
pub trait Launch: Send + Sync + 'static {
    fn launch(&self, plan: LaunchPlan) -> Launching<'_>;
    /// The bare sandbox, for programs of our own.
    fn sandbox(&self, plan: LaunchPlan) -> Opening<'_>;
    /// Ends a space's sandboxes and deletes its files.
    fn delete_space(&self, space: SpaceId) -> Deleting<'_>;
    /// What the launcher of the day reported; `None` before the first.
    fn hello(&self) -> watch::Receiver<Option<Arc<Hello>>>;
    /// Changes when a launcher is gone and all its interpreters know it.
    fn gone(&self) -> watch::Receiver<u64>;
    fn is_attached(&self) -> bool;
    fn sandboxes_live(&self) -> usize;
}

impl Launch for Client {
    fn launch(&self, plan: LaunchPlan) -> Launching<'_> {
        Box::pin(async move {
            let sandbox = Client::launch(self, plan).await?;
            Interpreter::new(sandbox, plan.profile == Profile::Kernel).map_err(LaunchError::Io)
        })
    }

    fn sandbox(&self, plan: LaunchPlan) -> Opening<'_> {
        Box::pin(Client::launch(self, plan))
    }

    fn delete_space(&self, space: SpaceId) -> Deleting<'_> {
        Box::pin(Client::delete_space(self, space))
    }

    fn hello(&self) -> watch::Receiver<Option<Arc<Hello>>> {
        Client::hello(self)
    }

    fn gone(&self) -> watch::Receiver<u64> {
        Client::gone(self)
    }

    fn is_attached(&self) -> bool {
        Client::is_attached(self)
    }

    fn sandboxes_live(&self) -> usize {
        Client::sandboxes_live(self)
    }
}
