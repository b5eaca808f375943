//! The engine itself: takes a cell, finds it an interpreter, keeps the books, answers.
//!
//! A caller that goes away ends a one-off. A session's cell goes on: its names and files must not stay
//! half-changed, and the next cell finds what it did. What is fixed when a session's interpreter starts
//! (`cwd`, account, `strict`) stays; a later cell's wish is ignored, a later cell's other user answered.
#![forbid(unsafe_code)]

use std::sync::Arc;
use std::time::{Duration, Instant, SystemTime};

use tokio::sync::watch;

use crate::backend::endpoint::{Endpoint, Gone};
use crate::backend::native::Native;
use crate::backend::select;
use crate::backend::worker::{NotObtained, Source, Worker, Workers, run_once};
use crate::config::CodeBackend;
use crate::engine::config::EngineConfig;
use crate::engine::detached::Detached;
use crate::engine::identity::{self, CannotRunAs};
use crate::engine::info::{CodeInfo, EngineStats, RuntimeInfo};
use crate::engine::{
    Backends, CellRequest, ErrorOutput, Execution, KernelInfo, Language, Output, Refusal, Runner,
    SessionChoice, TenantId, Tier, Tiers,
};
use crate::harness::interpreter::{Cell, Provenance};
use crate::harness::outcome::{CellOutcome, Ending, Stopped};
use crate::launcher::client::Client;
use crate::launcher::plan::{Account, End, LaunchPlan, Origin, Profile, SpaceId};
use crate::launcher::posture::{Hello, RuntimeReport};
use crate::session::id::SessionId;
use crate::session::registry::{Deleted, Registry};
use crate::session::state::{Begun, CloseReason};
use crate::session::{Birth, NoTurn, Session, SessionEntry, SessionKey, Turn, epoch_ms, reaper};
use crate::store::Store;
use crate::tenant::Tenants;
use crate::tenant::audit::AuditRecord;
use crate::tenant::quota::{Admission, Place};
use crate::zygote::Launch;
use crate::zygote::slots::{Slots, TakenFor};

/// The tenant of a daemon without keys, and of the keys that name none.
pub const DEFAULT_TENANT: &str = "default";
/// How long callers of cells that a shutdown has stopped may take to get their answers.
const STOPPED_WAIT: Duration = Duration::from_secs(2);
/// One launch at a time for so many processors, when slots are refilled.
const PROCESSORS_PER_LAUNCH: usize = 2;

/// Why a session was not made up front.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum CreateRefused {
    #[error(transparent)]
    Refused(#[from] Refusal),
    /// The user cannot be had. For a cell this would be an execution with a `ProcessError`.
    #[error("{0}")]
    User(String),
}

/// Runs cells. One per daemon, shared by all families.
pub struct Engine {
    config: EngineConfig,
    workers: Workers,
    tenants: Tenants,
    admission: Admission,
    sessions: Arc<Registry>,
    store: Store,
    /// Stops what runs outside of sessions.
    stop: watch::Sender<Option<Stopped>>,
}

/// A request with everything settled that can be before there is an interpreter.
struct Settled {
    hello: Arc<Hello>,
    tier: Tier,
    /// The endpoint's kernel, while it answers.
    remote: bool,
    /// As in a plan; `None` for a kernel that the endpoint alone has.
    interpreter: Option<u8>,
    account: Account,
    space: SpaceId,
}

impl Settled {
    /// Where a worker for this comes from. `code` is the first cell.
    fn source(&self, code: &str, strict: bool) -> Result<Source, Refusal> {
        let profile = select::profile(&self.hello, &self.tier, code);
        let origin = if strict { Origin::Strict } else { Origin::Warm };
        let plan = self.interpreter.map(|interpreter| LaunchPlan {
            account: self.account,
            interpreter,
            ..LaunchPlan::new(self.space, profile, origin)
        });
        match &self.tier {
            Tier::Kernel(kernel) if self.remote => {
                Ok(Source::Remote { kernel: kernel.clone(), otherwise: plan })
            }
            // A session's kernel may be one that this launcher has not any more.
            _ => plan.map(Source::Local).ok_or(Refusal::LaunchFailed),
        }
    }
}

/// A session to make before its first cell.
#[derive(Clone, Debug)]
pub struct NewSession {
    pub language: Language,
    pub runner: Runner,
    /// `None` asks for a generated id.
    pub id: Option<String>,
    pub cwd: Option<String>,
    pub user: Option<String>,
    /// Idle time after which it is closed, where that is less than its tier's.
    pub idle_max: Option<Duration>,
}

impl Engine {
    /// Starts the engine and its background tasks. Must be called inside the async runtime.
    pub fn new(config: EngineConfig, launcher: Client, store: Store) -> Arc<Engine> {
        Engine::with_launcher(config, Arc::new(launcher), store)
    }

    /// The same over anything that launches.
    pub fn with_launcher(config: EngineConfig, launcher: Arc<dyn Launch>, store: Store) -> Arc<Engine> {
        let slots = Slots::new(config.slots_max, config.code_prewarm + config.kernel_prewarm);
        let processors = std::thread::available_parallelism().map_or(1, std::num::NonZero::get);
        let refill =
            Slots::refill(Arc::downgrade(&slots), Arc::clone(&launcher), processors / PROCESSORS_PER_LAUNCH);
        tokio::spawn(refill);
        let sessions = Arc::new(Registry::new(config.session_limits(), store.remembered().clone()));
        tokio::spawn(reaper::reap(Arc::downgrade(&sessions), store.clone()));
        tokio::spawn(reaper::bury(Arc::downgrade(&sessions), launcher.gone()));
        let engine = Arc::new(Engine {
            workers: Workers {
                native: Native::new(launcher, slots),
                endpoint: config.endpoint.clone().map(|at| Arc::new(Endpoint::new(at, store.clone()))),
            },
            tenants: Tenants::new(store.clone()),
            admission: Admission::new(config.cell_quota()),
            sessions,
            store,
            stop: watch::channel(None).0,
            config,
        });
        tokio::spawn(Arc::clone(&engine).prefill());
        if let Some(endpoint) = engine.workers.endpoint.clone() {
            // So that what we say of ourselves is true before the first cell.
            tokio::spawn(async move {
                endpoint.probe().await;
                endpoint.sweep().await;
            });
        }
        engine
    }

    /// Runs a cell. A cell that fails is an [`Execution`]; a [`Refusal`] means that nothing was started.
    pub async fn execute(self: &Arc<Self>, request: CellRequest) -> Result<Execution, Refusal> {
        self.admission.check_open()?;
        let id = match &request.session {
            SessionChoice::OneOff => None,
            SessionChoice::Named(id) => Some(SessionId::parse(id)?),
            SessionChoice::Generated => Some(SessionId::generate()),
        };
        let CellRequest { language, runner, user, .. } = &request;
        match self.settle(&request.tenant, *language, runner, user.as_deref()).await? {
            Err(cannot) => Ok(self.cannot_run(&request, id.as_ref(), 1, cannot.to_string())),
            Ok(settled) => match id {
                None => self.run_one_off(&request, &settled).await,
                Some(id) => self.run_in_session(request, id, &settled).await,
            },
        }
    }

    /// The tenant's sessions of some tiers by the keys of the listing.
    pub fn sessions_list(&self, tenant: &TenantId, tiers: Tiers) -> Vec<(String, SessionEntry)> {
        self.sessions.list(tenant, tiers)
    }

    /// One session, by id or by key of the listing.
    pub fn session_get(&self, tenant: &TenantId, tiers: Tiers, name: &str) -> Option<SessionEntry> {
        self.sessions.get(tenant, tiers, name)
    }

    /// Makes a session before its first cell; an existing one is returned as it is, and `false` with it. With a `cwd` the
    /// interpreter starts now, so that a folder that is none is refused here.
    pub async fn session_create(
        self: &Arc<Self>,
        tenant: &TenantId,
        new: NewSession,
    ) -> Result<(SessionEntry, bool), CreateRefused> {
        self.admission.check_open()?;
        let NewSession { language, runner, id, cwd, user, idle_max } = new;
        let id = id.map_or_else(|| Ok(SessionId::generate()), |id| SessionId::parse(&id))?;
        let user = user.as_deref();
        let settled = match self.settle(tenant, language, &runner, user).await? {
            Ok(settled) => settled,
            Err(cannot) => return Err(CreateRefused::User(cannot.to_string())),
        };
        let key = SessionKey { tenant: tenant.clone(), tier: settled.tier.clone(), id };
        let (space, account) = (settled.space, settled.account);
        let birth = Birth { space, account, cwd, idle_max, up_front: true };
        let mut made = false;
        let session = self.sessions.find_or_create(&key, || {
            made = true;
            birth
        })?;
        if let Some(user) = user.filter(|_| session.birth.account != settled.account) {
            return Err(CreateRefused::User(fixed_in_session(user, &session, &settled.hello).to_string()));
        }
        if made {
            let engine = Arc::clone(self);
            let started = Arc::clone(&session);
            Detached::new(async move { engine.start_up_front(&started, &settled).await }).await?;
        }
        Ok((self.sessions.entry(&session), made))
    }

    /// Ends the sessions called `name`, with whatever runs in them. False when there was none.
    pub async fn session_delete(&self, tenant: &TenantId, tiers: Tiers, name: &str) -> bool {
        let deleted = self.sessions.delete(tenant, tiers, name);
        self.forget(&deleted).await;
        !deleted.closed.is_empty()
    }

    /// Ends all of a tenant's sessions of some tiers; returns how many.
    pub async fn sessions_clear(&self, tenant: &TenantId, tiers: Tiers) -> usize {
        let deleted = self.sessions.clear(tenant, tiers);
        self.forget(&deleted).await;
        deleted.closed.len()
    }

    /// Facts for code/info. Answers without a launcher too.
    pub async fn code_info(&self, tenant: &TenantId) -> CodeInfo {
        let hello = self.workers.native.last_hello();
        let runtime = |language| {
            let found = hello.as_deref().and_then(|hello| select::runtime(hello, language));
            RuntimeInfo { available: found.is_some(), version: found.map(|it| it.version.clone()) }
        };
        // Looks at an endpoint that has not been looked at for a while.
        self.workers.remote_kernels().await;
        let Backends { python: backend, kernels, .. } = self.backends();
        let by_kernel = backend.is_some_and(|name| name != "native");
        CodeInfo {
            backend,
            kernels,
            python: runtime(Language::Python),
            node: runtime(Language::JavaScript),
            sessions_max: if by_kernel { self.config.kernel_sessions_max } else { self.config.sessions_max },
            timeout_default: self.config.timeout_default,
            timeout_max: self.config.timeout_max,
            prewarmed: self.prewarmed(tenant).await,
        }
    }

    /// What runs what. Answers without a launcher too.
    pub fn backends(&self) -> Backends {
        let choice = self.config.code_backend;
        let leaves = |runner| {
            self.workers.endpoint.is_some() && select::may_be_remote(choice, Language::Python, &runner)
        };
        let elsewhere = Backends {
            code_may_leave: leaves(Runner::Chosen),
            jupyter_may_leave: leaves(Runner::Kernel(None)),
            ..Backends::default()
        };
        let Some(hello) = self.workers.native.last_hello() else { return elsewhere };
        let (python, kernels) = (select::python_backend(&hello, choice), select::kernels(&hello));
        let endpoint = self.workers.endpoint.as_ref();
        let remote = endpoint.map(|endpoint| endpoint.kernels_seen()).unwrap_or_default();
        if remote.is_empty() {
            let jupyter = (!kernels.is_empty()).then_some("kernel");
            return Backends { python, jupyter, kernels, ..elsewhere };
        }
        Backends {
            python: if choice == CodeBackend::Auto { Some("endpoint") } else { python },
            jupyter: Some("endpoint"),
            kernels: remote,
            endpoint: endpoint.map(|endpoint| endpoint.shown()),
            ..elsewhere
        }
    }

    /// Facts about kernels. Answers without a launcher too.
    pub fn kernel_info(&self, tenant: &TenantId) -> KernelInfo {
        let hello = self.workers.native.last_hello();
        let found = |(_, report): &(String, RuntimeReport)| {
            let version = report.ipykernel.as_deref().unwrap_or("of unknown version");
            format!("ipykernel {version} via {}", report.binary)
        };
        let found: Vec<_> = hello.iter().flat_map(|hello| hello.kernels.iter().map(found)).collect();
        let Backends { kernels, endpoint, .. } = self.backends();
        let detection = match hello.as_deref().and_then(|hello| hello.python.as_ref()) {
            _ if endpoint.is_some() => format!("Jupyter server at {}", endpoint.unwrap_or_default()),
            _ if !found.is_empty() => found.join(", "),
            Some(python) => format!("ipykernel cannot be imported by {}", python.binary),
            None => format!("{} was not found", self.config.python_name),
        };
        KernelInfo {
            kernels,
            detection,
            sessions: self.sessions.count_of(tenant, Tiers::Kernels),
            sessions_max: self.config.kernel_sessions_max,
            idle_max: self.config.kernel_idle_max,
        }
    }

    /// What the launcher last reported; `None` before the first one is there.
    pub fn hello(&self) -> Option<Arc<Hello>> {
        self.workers.native.last_hello()
    }

    /// Numbers for `/health`.
    pub fn stats(&self) -> EngineStats {
        EngineStats {
            sessions: self.sessions.count(),
            sessions_cleaned: self.sessions.cleaned(),
            cells_running: self.admission.running(),
            cells_waiting: self.admission.waiting(),
            sandboxes_live: self.workers.native.sandboxes_live(),
            slots: self.workers.native.slot_stats(),
            audit_dropped: self.store.audit_dropped(),
        }
    }

    /// Ends the engine: nothing new is taken, what runs has until `bound`, then everything is ended.
    pub async fn shutdown(&self, bound: Duration) {
        self.admission.close();
        self.workers.native.slots().close();
        if !self.admission.drained(bound).await {
            tracing::warn!(cells = self.admission.running(), "cells were still running at shutdown");
        }
        self.stop.send_replace(Some(Stopped::ShuttingDown));
        self.sessions.shut_down();
        self.admission.drained(STOPPED_WAIT).await;
        if let Some(endpoint) = &self.workers.endpoint {
            endpoint.settle(STOPPED_WAIT).await;
        }
        if let Err(error) = self.store.flush().await {
            tracing::error!(%error, "the store was not flushed at shutdown");
        }
    }

    /// Identity, backend and space, in the order in which a caller would want to hear of a problem.
    async fn settle(
        &self,
        tenant: &TenantId,
        language: Language,
        runner: &Runner,
        user: Option<&str>,
    ) -> Result<Result<Settled, CannotRunAs>, Refusal> {
        let hello = self.workers.native.hello().await?;
        let looked_for = match language {
            Language::Python => &self.config.python_name,
            Language::JavaScript => &self.config.node_name,
        };
        let choice = self.config.code_backend;
        let may_be_remote = select::may_be_remote(choice, language, runner);
        let remote = if may_be_remote { self.workers.remote_kernels().await } else { Vec::new() };
        let tier = match select::remote_tier(&remote, runner)? {
            Some(tier) => tier,
            None => select::tier(&hello, choice, language, runner, looked_for)?,
        };
        let (default_user, daemon) =
            (self.config.default_user.as_deref(), self.config.daemon_account.as_deref());
        let account = match identity::resolve(user, default_user, daemon, &hello) {
            // A kernel always runs as the space's own account.
            _ if tier.is_kernel() => Account(0),
            Ok(account) => account,
            Err(cannot) => return Ok(Err(cannot)),
        };
        let space = self.tenants.space_of(tenant).await.map_err(|error| {
            tracing::error!(%error, tenant = tenant.0, "no space for a tenant");
            Refusal::LaunchFailed
        })?;
        let interpreter = select::interpreter(&hello, &tier);
        let remote = !remote.is_empty();
        Ok(Ok(Settled { hello, tier, remote, interpreter, account, space }))
    }

    async fn run_one_off(&self, request: &CellRequest, settled: &Settled) -> Result<Execution, Refusal> {
        let _place = self.admission.admit(&request.tenant).await?;
        self.workers.native.cell_starts();
        let source = settled.source(&request.code, request.strict)?;
        let watch = Stopwatch::start();
        let (cwd, time_max) = (request.cwd.as_deref(), request.timeout);
        let worker = match self.workers.obtain(&source, cwd, time_max, TakenFor::Once).await {
            Ok(worker) => worker,
            Err(NotObtained::Refused(refusal)) => return Err(refusal),
            Err(NotObtained::Failed(why)) => return Ok(self.cannot_run(request, None, 1, why)),
        };
        let provenance = worker.provenance();
        let (limits, mut stop) = (self.config.cell_limits(), self.stop.subscribe());
        let (outcome, msg_id) = run_once(worker, cell(request, 1), &limits, &mut stop).await;
        self.audit(request, None, &watch, &outcome, provenance);
        Ok(Execution { msg_id, ..execution(request, &settled.tier, outcome, 1, None, None) })
    }

    async fn run_in_session(
        self: &Arc<Self>,
        request: CellRequest,
        id: SessionId,
        settled: &Settled,
    ) -> Result<Execution, Refusal> {
        let key = SessionKey { tenant: request.tenant.clone(), tier: settled.tier.clone(), id };
        loop {
            let session = self.sessions.find_or_create(&key, || Birth {
                space: settled.space,
                account: settled.account,
                cwd: request.cwd.clone(),
                idle_max: None,
                up_front: false,
            })?;
            let other = !settled.tier.is_kernel() && session.birth.account != settled.account;
            if let Some(user) = request.user.as_deref().filter(|_| other) {
                let cannot = fixed_in_session(user, &session, &settled.hello);
                return Ok(self.cannot_run(
                    &request,
                    Some(&key.id),
                    session.next_count(),
                    cannot.to_string(),
                ));
            }
            let unborn = Unborn { sessions: &self.sessions, session: &session };
            let entered = self.enter(&session).await;
            let (turn, place, begun) = match entered {
                Ok(entered) => entered,
                Err(NoTurn::Refused(refusal)) => return Err(refusal),
                // It went away by itself while we reached for it: the name is free for a new one.
                Err(NoTurn::Closed(
                    CloseReason::Idle | CloseReason::NeverStarted | CloseReason::LauncherGone,
                )) => continue,
                Err(NoTurn::Closed(CloseReason::ShuttingDown)) => return Err(Refusal::ShuttingDown),
                Err(NoTurn::Closed(CloseReason::Deleted)) => {
                    let why = "the session was deleted before the cell started".to_owned();
                    return Ok(self.cannot_run(&request, Some(&key.id), session.next_count(), why));
                }
            };
            drop(unborn);
            let run = SessionRun {
                engine: Arc::clone(self),
                source: settled.source(&request.code, request.strict)?,
                session,
                request,
                _turn: turn,
                _place: place,
            };
            return Detached::new(run.run(begun)).await;
        }
    }

    /// Waits for the session's turn and a place. From `begin` on the session is busy.
    async fn enter(&self, session: &Session) -> Result<(Turn, Place, Begun<Worker>), NoTurn> {
        let turn = session.turn().await?;
        let place = self.admission.admit(&session.key.tenant).await.map_err(NoTurn::Refused)?;
        match session.begin(&turn) {
            Begun::Closed(reason) => Err(NoTurn::Closed(reason)),
            begun => Ok((turn, place, begun)),
        }
    }

    async fn start_up_front(&self, session: &Arc<Session>, settled: &Settled) -> Result<(), Refusal> {
        let Ok(turn) = session.turn().await else { return Ok(()) };
        if session.birth.cwd.is_some() && matches!(session.begin(&turn), Begun::MustStart) {
            let source = settled.source("", false)?;
            match self.obtain(session, &source, self.config.timeout_default).await {
                Ok(worker) => session.finish(Some(worker)),
                Err(NotObtained::Refused(refusal)) => return Err(refusal),
                // Its first cell tries again, and says what it meets.
                Err(NotObtained::Failed(_)) => {}
            }
        }
        if session.claim_storing() {
            self.keep(&session.key).await;
        }
        Ok(())
    }

    /// A worker for a session. A folder that is none ends the session: it would be refused for ever.
    async fn obtain(
        &self,
        session: &Arc<Session>,
        source: &Source,
        time_max: Duration,
    ) -> Result<Worker, NotObtained> {
        let cwd = session.birth.cwd.as_deref();
        let obtained = self.workers.obtain(source, cwd, time_max, TakenFor::Session).await;
        if let Err(not_obtained) = &obtained {
            session.finish(None);
            let is_new = session.next_count() == 1 && !session.birth.up_front;
            if is_new || matches!(not_obtained, NotObtained::Refused(Refusal::NotADirectory { .. })) {
                self.sessions.close(session, CloseReason::NeverStarted);
            }
        }
        obtained
    }

    async fn prewarmed(&self, tenant: &TenantId) -> usize {
        let EngineConfig { code_prewarm, kernel_prewarm, .. } = self.config;
        if code_prewarm + kernel_prewarm == 0 || tenant.0 != DEFAULT_TENANT {
            return 0;
        }
        let Ok(space) = self.tenants.space_of(tenant).await else { return 0 };
        let ready = |profile, wanted| self.workers.native.slots().ready((space, profile)).min(wanted);
        ready(Profile::Node, code_prewarm) + ready(Profile::Kernel, kernel_prewarm)
    }

    /// Slots for the tenant of a daemon without keys, so that its first request is fast.
    async fn prefill(self: Arc<Self>) {
        let prefills = self.config.prefill_default && self.config.slots_max > 0;
        let EngineConfig { code_prewarm, kernel_prewarm, .. } = self.config;
        if !prefills && code_prewarm + kernel_prewarm == 0 {
            return;
        }
        let mut hello = self.workers.native.subscribe();
        let Ok(hello) = hello.wait_for(Option::is_some).await.map(|it| it.clone()) else { return };
        let Some(hello) = hello else { return };
        let Ok(space) = self.tenants.space_of(&TenantId(DEFAULT_TENANT.to_owned())).await else { return };
        let backend = select::python_backend(&hello, self.config.code_backend);
        let native = backend == Some("native");
        let wanted = [
            (Profile::Python, 2, native),
            (Profile::PythonData, 1, native && hello.warm.contains(&Profile::PythonData)),
            (Profile::Kernel, 2, backend == Some("kernel")),
            (Profile::Node, 1, hello.node.is_some()),
        ];
        for (profile, first, exists) in wanted {
            let extra = match profile {
                Profile::Node => code_prewarm,
                Profile::Kernel => kernel_prewarm,
                _ => 0,
            };
            let floor = if prefills { first } else { 0 } + extra;
            if exists {
                self.workers.native.slots().pin((space, profile), floor);
            }
        }
    }

    async fn keep(&self, key: &SessionKey) {
        if let Err(error) = self.store.keep_session(key).await {
            tracing::error!(%error, session = %key.id, "failed to write a session down");
        }
    }

    async fn forget(&self, deleted: &Deleted) {
        for key in deleted.closed.iter().chain(&deleted.forgotten) {
            if let Err(error) = self.store.forget_session(key).await {
                tracing::error!(%error, session = %key.id, "failed to forget a session");
            }
        }
    }

    /// The answer to a cell that did not run because of who or where.
    fn cannot_run(
        &self,
        request: &CellRequest,
        id: Option<&SessionId>,
        execution_count: u64,
        why: String,
    ) -> Execution {
        let error = Output::Error(ErrorOutput::plain("ProcessError", why));
        let outcome = CellOutcome { ending: Ending::Unreachable, outputs: vec![error] };
        self.store.audit(AuditRecord {
            ended: "not run".to_owned(),
            ..record(request, id, &Stopwatch::start(), &outcome, None)
        });
        // A generated id names no session that could be used.
        let id = id.filter(|_| request.session != SessionChoice::Generated);
        let tier = Tier::Native(request.language);
        execution(request, &tier, outcome, execution_count, id, None)
    }

    fn audit(
        &self,
        request: &CellRequest,
        id: Option<&SessionId>,
        watch: &Stopwatch,
        outcome: &CellOutcome,
        provenance: Option<Provenance>,
    ) {
        self.store.audit(record(request, id, watch, outcome, provenance));
    }
}

/// A session's cell that has its turn and its place. It owns all it needs, because it may outlive its caller.
struct SessionRun {
    engine: Arc<Engine>,
    session: Arc<Session>,
    request: CellRequest,
    source: Source,
    _turn: Turn,
    _place: Place,
}

impl SessionRun {
    /// The session's worker, if it is still there.
    async fn revisit(&self, worker: Worker) -> Option<Worker> {
        let revisited = worker.revisit().await;
        if let Err(Gone::Ended) = revisited {
            self.session.note_loss("the Jupyter server ended the kernel");
        }
        revisited.ok()
    }

    async fn run(self, begun: Begun<Worker>) -> Result<Execution, Refusal> {
        self.engine.workers.native.cell_starts();
        let kept = match begun {
            Begun::Ready(worker) => self.revisit(worker).await,
            _ => None,
        };
        let worker = match kept {
            Some(worker) => worker,
            None => match self.engine.obtain(&self.session, &self.source, self.request.timeout).await {
                Ok(worker) => worker,
                Err(NotObtained::Refused(refusal)) => return Err(refusal),
                Err(NotObtained::Failed(why)) => {
                    let (id, count) = (&self.session.key.id, self.session.next_count());
                    return Ok(self.engine.cannot_run(&self.request, Some(id), count, why));
                }
            },
        };
        let mut stop = self.session.stop();
        // Closed meanwhile: the interpreter is dropped, and the run below would have ended at once.
        let Ok(execution_count) = self.session.started() else {
            let why = "the session was deleted before the cell started".to_owned();
            let count = self.session.next_count();
            return Ok(self.engine.cannot_run(&self.request, Some(&self.session.key.id), count, why));
        };
        let watch = Stopwatch::start();
        let provenance = worker.provenance();
        let cell = cell(&self.request, execution_count);
        let limits = self.engine.config.cell_limits();
        let ran = if self.session.claim_storing() {
            // Written down while the cell runs, and known to be before anybody hears of the session.
            let keep = self.engine.keep(&self.session.key);
            tokio::join!(worker.run(cell, &limits, &mut stop), keep).0
        } else {
            worker.run(cell, &limits, &mut stop).await
        };
        if ran.names_lost {
            self.session.note_loss("the Jupyter server restarted the kernel");
        }
        self.session.finish(ran.worker);
        // Taken before the session is remembered: the loss is news for the next reply, not for this one.
        let hint = self.session.take_hint();
        if ran.outcome.ending == Ending::Died(Some(End::LauncherGone)) {
            self.engine.sessions.close_after_loss(&self.session);
        }
        if matches!(ran.outcome.ending, Ending::Unstoppable { .. }) {
            // A kernel's session ends with it.
            self.engine.sessions.close(&self.session, CloseReason::Deleted);
        }
        let (id, outcome) = (Some(&self.session.key.id), ran.outcome);
        self.engine.audit(&self.request, id, &watch, &outcome, provenance);
        let tier = &self.session.key.tier;
        let execution = execution(&self.request, tier, outcome, execution_count, id, hint);
        Ok(Execution { msg_id: ran.msg_id, ..execution })
    }
}

/// Takes a session out again that a caller made and then did not use: refused further on, or gone.
struct Unborn<'a> {
    sessions: &'a Registry,
    session: &'a Arc<Session>,
}

impl Drop for Unborn<'_> {
    fn drop(&mut self) {
        self.sessions.remove_unborn(self.session);
    }
}

/// When a cell started, on both clocks.
struct Stopwatch {
    at: SystemTime,
    since: Instant,
}

impl Stopwatch {
    fn start() -> Stopwatch {
        Stopwatch { at: SystemTime::now(), since: Instant::now() }
    }
}

fn record(
    request: &CellRequest,
    id: Option<&SessionId>,
    watch: &Stopwatch,
    outcome: &CellOutcome,
    provenance: Option<Provenance>,
) -> AuditRecord {
    AuditRecord {
        at_ms: epoch_ms(watch.at),
        tenant: request.tenant.clone(),
        ran: request.language.into(),
        session: id.map(ToString::to_string),
        status: outcome.ending.status(),
        duration_ms: u64::try_from(watch.since.elapsed().as_millis()).unwrap_or(u64::MAX),
        provenance,
        ended: outcome.ending.reason(),
    }
}

fn cell(request: &CellRequest, execution_count: u64) -> Cell<'_> {
    let CellRequest { code, timeout, watcher, .. } = request;
    Cell { code, timeout: *timeout, execution_count, watcher: watcher.as_ref(), argv: None }
}

fn execution(
    request: &CellRequest,
    tier: &Tier,
    outcome: CellOutcome,
    execution_count: u64,
    id: Option<&SessionId>,
    hint: Option<String>,
) -> Execution {
    use crate::engine::{Status, Stream};
    let status = outcome.ending.status();
    Execution {
        language: request.language,
        code: request.code.clone(),
        status,
        stdout: outcome.stream(Stream::Stdout),
        stderr: outcome.stream(Stream::Stderr),
        outputs: outcome.outputs,
        exit_code: i32::from(status != Status::Ok),
        execution_count,
        session_id: id.map(ToString::to_string),
        kernel: match tier {
            Tier::Kernel(name) => Some(name.clone()),
            Tier::Native(_) => None,
        },
        msg_id: None,
        hint,
    }
}

fn fixed_in_session(user: &str, session: &Session, hello: &Hello) -> CannotRunAs {
    let fixed = identity::account_name(session.birth.account, hello);
    CannotRunAs::FixedInSession { user: user.to_owned(), fixed }
}
