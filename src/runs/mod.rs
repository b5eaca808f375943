//! Runs of programs with files, as the LibreChat family and MCP ask for them: a place with its workspace, inputs into
//! it, one program, and what it left behind.
//!
//! ```text
//! RunRequest ──prepare──▶ Prepared (its turn, a place among what runs, a sandbox, inputs) ──run──▶ RunDone
//!                 └─ RunRefused: nothing of the caller's ran
//! ```
//!
//! A run without state has a space in memory that goes with it. One that continues a session of such runs has the same,
//! filled again from the records. A kept session has a space of its own, and for Python an interpreter that stays.
//! Whatever a program does to itself is a [`RunDone`].
#![forbid(unsafe_code)]

use std::collections::HashMap;
use std::sync::{Arc, Mutex, MutexGuard, Weak};
use std::time::{Duration, Instant};

use tokio::sync::{OwnedSemaphorePermit, Semaphore, watch};

use crate::engine::{Bundle, Caller, ErrorOutput, Refusal, TenantId};
use crate::harness::outcome::Stopped;
use crate::languages::{Availability, Language, Languages};
use crate::launcher::posture::Hello;
use crate::objects::{Bucket, FileRecord, Objects, ObjectsError};
use crate::store::Store;
use crate::tenant::quota::{Admission, CellQuota};
use crate::zygote::slots::Slots;
use crate::zygote::{self, Launch};

mod agents;
mod end;
mod fleeting;
mod inputs;
mod outputs;
mod process;
pub mod programmatic;
mod seat;
mod sink;
mod text;
mod work;

pub use end::RunEnd;
pub use inputs::FILES_MAX;
pub use work::Prepared;

use agents::Agents;
use programmatic::{Programmatic, WaitingLimits};
use seat::SeatTable;

/// One launch at a time for so many processors, when slots are refilled.
const PROCESSORS_PER_LAUNCH: usize = 2;
/// Launches of one tenant's runs on their way at once: each has a space of its own, so nothing else keeps a tenant
/// from filling the launcher's common queue.
const LAUNCHES_PER_TENANT_MAX: usize = 8;
/// How long callers of runs that a shutdown has stopped may take to get their answers.
const STOPPED_WAIT: Duration = Duration::from_secs(2);
/// After languages could not be looked for.
const LOOK_AGAIN: Duration = Duration::from_secs(10);
/// Between two looks at kernels that nobody uses.
const KERNEL_LOOK: Duration = Duration::from_secs(30);

/// Settings of runs, resolved.
#[derive(Clone, Debug)]
pub struct RunsConfig {
    /// Kernels of a tenant.
    pub kernels_max: usize,
    /// The same over all tenants: a signer of tokens may name any number of them.
    pub kernels_all_max: usize,
    pub kernel_idle_max: Duration,
    pub timeout_max: Duration,
    /// Bash scripts begin with `set -euo pipefail`.
    pub bash_strict: bool,
    /// `No module named` is followed by a hint.
    pub hints: bool,
    pub output_bytes_max: usize,
    pub output_files_max: usize,
    pub file_bytes_max: u64,
    /// What a space holds; no run leaves more.
    pub space_bytes: u64,
    pub memory_mib_max: u64,
    pub slots_max: usize,
    pub quota: CellQuota,
    /// Calls that wait for one session.
    pub session_waiting_max: usize,
    /// How long a kernel may take to end its cell once it is interrupted.
    pub interrupt_grace: Duration,
}

/// Which generation of the client asks.
#[derive(Copy, Clone, Debug, PartialEq, Eq)]
pub enum Style {
    Classic,
    Current,
}

/// A file that a run is to find in its workspace.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct FileRef {
    pub id: String,
    pub session: String,
    /// Where it is to lie, relative to the workspace; `None`: under its stored name.
    pub name: Option<String>,
    /// What the caller says it was uploaded for, if it says.
    pub bucket: Option<Bucket>,
}

/// One run to make.
#[derive(Clone, Debug)]
pub struct RunRequest {
    pub caller: Caller,
    /// The user that the request names, where no token proves one.
    pub asserted_user: String,
    pub language: Arc<Language>,
    pub code: String,
    pub args: Vec<String>,
    /// `None`: the most there may be.
    pub timeout: Option<Duration>,
    pub session: Option<String>,
    pub entity: Option<String>,
    pub hint: Option<String>,
    pub files: Vec<FileRef>,
    pub style: Style,
    /// The last expression's value, displays and errors are wanted as such.
    pub rich: bool,
    /// Tools that the program may call, by the names its code has for them.
    pub tools: Vec<ToolName>,
    /// It is a program that calls tools, even where it has none: never a cell, and in Bash without prelude.
    pub programmatic: bool,
}

pub use crate::harness::program::{CALLS_MAX, Json, ToolAnswer, ToolCall, ToolLanguage, ToolName, ToolPort};

/// A request that was not run.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum RunRefused {
    #[error("Runtime '{0}' is unavailable")]
    NoRuntime(String),
    #[error("Unauthorized file reference")]
    FileReference,
    #[error("Invalid file name reference")]
    FileName,
    #[error("At most {max} files can be referenced")]
    TooManyFiles { max: usize },
    #[error("the files do not fit into the workspace")]
    InputsTooLarge,
    #[error("a file cannot be put into the workspace: what the program left there is in its way")]
    InputsInTheWay,
    #[error("this host has no namespaces, and without them no workspace of a run's own")]
    NoWorkspaces,
    #[error(transparent)]
    Refusal(#[from] Refusal),
    #[error("files cannot be kept at the moment")]
    Store,
}

impl From<ObjectsError> for RunRefused {
    fn from(error: ObjectsError) -> RunRefused {
        if let ObjectsError::TooManyKept { max } = error {
            return RunRefused::Refusal(Refusal::TooManySessions { max });
        }
        tracing::error!(error = &error as &dyn std::error::Error, "records of files cannot be used");
        RunRefused::Store
    }
}

/// A file that a run has left, or was given and did not touch.
#[derive(Clone, Debug, PartialEq)]
pub struct OutFile {
    pub record: FileRecord,
    /// Its name in the workspace.
    pub name: String,
    pub inherited: bool,
    /// The input that it was: file and session.
    pub modified_from: Option<(String, String)>,
}

/// What became of the files that a run has generated, when not all could be kept.
#[derive(Copy, Clone, Debug, Default, PartialEq, Eq)]
pub struct Delivery {
    pub attempted: usize,
    pub failed: usize,
}

/// A run that is over.
#[derive(Clone, Debug, PartialEq)]
pub struct RunDone {
    pub session: String,
    pub stdout: String,
    pub stderr: String,
    pub end: RunEnd,
    pub files: Vec<OutFile>,
    pub deleted: Vec<String>,
    pub delivery: Delivery,
    pub wall: Duration,
    /// Of a warm workspace: its name, and whether it was there before.
    pub runtime: Option<(String, bool)>,
    /// With a rich run: the last expression's value, and the error that ended it.
    pub result: Option<Bundle>,
    pub error: Option<ErrorOutput>,
}

/// Makes runs. One per daemon.
pub struct Runs {
    config: RunsConfig,
    launcher: Arc<dyn Launch>,
    objects: Objects,
    languages: Arc<Languages>,
    store: Store,
    slots: Arc<Slots>,
    agents: Arc<Agents>,
    admission: Admission,
    seats: SeatTable,
    launches: Mutex<HashMap<TenantId, Weak<Semaphore>>>,
    stop: watch::Sender<Option<Stopped>>,
    /// Which languages there are; `None` until they were looked for.
    installed: Mutex<Option<Arc<Availability>>>,
    /// Held by the one who looks for them; when that failed last.
    looking: tokio::sync::Mutex<Option<Instant>>,
    programmatic: Arc<Programmatic>,
}

impl Runs {
    /// Starts the background tasks. Must be called inside the async runtime.
    pub fn new(
        config: RunsConfig,
        launcher: Arc<dyn Launch>,
        objects: Objects,
        languages: Arc<Languages>,
        store: Store,
    ) -> Arc<Runs> {
        let slots = Slots::new(config.slots_max, 0);
        let processors = std::thread::available_parallelism().map_or(1, std::num::NonZero::get);
        tokio::spawn(Slots::refill(
            Arc::downgrade(&slots),
            Arc::clone(&launcher),
            processors / PROCESSORS_PER_LAUNCH,
        ));
        let agents = Agents::new(Arc::clone(&launcher), config.slots_max);
        // Whoever waits for results holds a place among what runs: half of them stay free.
        let waiting = WaitingLimits {
            per_tenant_max: (config.quota.running_per_tenant_max / 2).max(1),
            all_max: (config.quota.running_max / 2).max(1),
        };
        let runs = Arc::new(Runs {
            programmatic: Programmatic::new(waiting),
            admission: Admission::new(config.quota),
            seats: SeatTable::default(),
            launches: Mutex::default(),
            stop: watch::channel(None).0,
            installed: Mutex::default(),
            looking: tokio::sync::Mutex::default(),
            config,
            launcher,
            objects,
            languages,
            store,
            slots,
            agents,
        });
        let weak = Arc::downgrade(&runs);
        tokio::spawn(async move {
            loop {
                tokio::time::sleep(KERNEL_LOOK).await;
                let Some(runs) = weak.upgrade() else { return };
                runs.seats.close_idle(runs.config.kernel_idle_max);
                runs.agents.keep_house();
            }
        });
        if let Some(mut expired) = runs.objects.expired_spaces() {
            let (launcher, objects) = (Arc::clone(&runs.launcher), runs.objects.clone());
            tokio::spawn(async move {
                while let Some(space) = expired.recv().await {
                    match launcher.delete_space(space).await {
                        Ok(()) => objects.space_deleted(space).await,
                        Err(error) => {
                            tracing::warn!(%space, %error, "the space of an ended session was not deleted");
                        }
                    }
                }
            });
        }
        runs
    }

    pub fn config(&self) -> &RunsConfig {
        &self.config
    }

    pub fn languages(&self) -> &Languages {
        &self.languages
    }

    pub fn objects(&self) -> &Objects {
        &self.objects
    }

    /// Programs that wait for the results of their calls.
    pub fn programmatic(&self) -> &Arc<Programmatic> {
        &self.programmatic
    }

    /// Kernels that are alive.
    pub fn kernels(&self) -> usize {
        self.seats.kernels()
    }

    /// Makes ready for a run: everything that can be refused is refused here.
    pub async fn prepare(self: &Arc<Self>, request: RunRequest) -> Result<Prepared, RunRefused> {
        self.admission.check_open()?;
        let hello = zygote::attached(&*self.launcher).await.ok_or(Refusal::LaunchFailed)?;
        if hello.posture.posture.is_bare() {
            return Err(RunRefused::NoWorkspaces);
        }
        self.check_runtime(&request.language, &hello).await?;
        let inputs = self.inputs(&request).await?;
        seat::seat(self, request, inputs, hello).await?.ready().await
    }

    /// Ends a session's kernel and forgets what it knows. Its files stay.
    pub async fn reset(&self, session: &str) {
        self.seats.reset(session).await;
    }

    /// Nothing new is taken; what runs has until `bound`, then everything is ended.
    pub async fn shutdown(&self, bound: Duration) {
        self.admission.close();
        self.slots.close();
        self.agents.close();
        self.programmatic.close();
        if !self.admission.drained(bound).await {
            tracing::warn!(runs = self.admission.running(), "programs were still running at shutdown");
        }
        self.stop.send_replace(Some(Stopped::ShuttingDown));
        self.admission.drained(STOPPED_WAIT).await;
        self.seats.close();
    }

    /// Which languages there are, for a list of them; none while they cannot be looked for.
    pub async fn installed(&self) -> Arc<Availability> {
        self.look_for_languages().await.unwrap_or_default()
    }

    /// Which languages there are, looked for in a sandbox once. `None` when that failed, now or a moment ago.
    async fn look_for_languages(&self) -> Option<Arc<Availability>> {
        if let Some(known) = self.installed_now() {
            return Some(known);
        }
        // Others wait for the one who looks.
        let mut failed = self.looking.lock().await;
        if let Some(known) = self.installed_now() {
            return Some(known);
        }
        if failed.is_some_and(|at| at.elapsed() < LOOK_AGAIN) {
            return None;
        }
        let found = self.probe().await.map(Arc::new);
        *failed = found.is_none().then(Instant::now);
        self.lock_installed().clone_from(&found);
        found
    }

    /// The same without waiting: what was found so far.
    pub fn installed_now(&self) -> Option<Arc<Availability>> {
        self.lock_installed().clone()
    }

    fn lock_installed(&self) -> MutexGuard<'_, Option<Arc<Availability>>> {
        self.installed.lock().expect("no code panics while it holds the versions")
    }

    /// The right to have a launch on its way.
    async fn launch_turn(&self, tenant: &TenantId) -> OwnedSemaphorePermit {
        let window = {
            let mut windows = self.launches.lock().expect("no code panics while it holds the windows");
            windows.retain(|_, window| window.strong_count() > 0);
            let known = windows.get(tenant).and_then(Weak::upgrade);
            known.unwrap_or_else(|| {
                let window = Arc::new(Semaphore::new(LAUNCHES_PER_TENANT_MAX));
                windows.insert(tenant.clone(), Arc::downgrade(&window));
                window
            })
        };
        window.acquire_owned().await.expect("nobody closes a window")
    }

    fn started(&self) -> Instant {
        self.slots.cell_started();
        Instant::now()
    }
}

/// Facts about the launcher that a run needs.
type Greeting = Arc<Hello>;
