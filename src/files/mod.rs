//! The file planes, from the daemon's side: one helper in each active space does the work inside; this module finds
//! it, speaks with it, bounds what is asked of it and looks closely at what comes back.
//!
//! ```text
//! (none) ──first call──▶ Starting ──answers──▶ Live ──idle, or its end──▶ (none)
//! ```
//!
//! A helper that ends takes its calls with it. What only reads is tried once more with the next helper; of the rest
//! nobody can say how much was done, and the caller hears that.
#![forbid(unsafe_code)]

use std::collections::HashMap;
use std::sync::{Arc, Mutex, MutexGuard, Weak};
use std::time::Duration;

use tokio::sync::{OwnedSemaphorePermit, Semaphore, SemaphorePermit};

use crate::engine::TenantId;
use crate::engine::identity::{self, CannotRunAs};
use crate::launcher::plan::{Account, LaunchPlan, Origin, Profile, SpaceId};
use crate::tenant::Tenants;
use crate::zygote::Launch;

mod helper;
pub mod names;
#[cfg(test)]
mod tests;
pub mod transfer;
pub mod wire;

use helper::{Helper, Reply};
use transfer::{Download, Incoming, Outgoing, Pipe};
use wire::{Answer, Bulk, Call, Fault, FaultKind, Op};

/// How long an operation may take inside.
pub const OPERATION_TIME_MAX: Duration = Duration::from_secs(30);
/// The same for what copies, removes or puts in place whole trees.
pub const TREE_TIME_MAX: Duration = Duration::from_secs(300);
/// How much longer the daemon waits before it gives the helper up.
const OVERTIME_MAX: Duration = Duration::from_secs(10);
/// Operations and transfers of one tenant at once.
pub const OPERATIONS_PER_TENANT_MAX: usize = 32;
/// The same over all tenants.
pub const OPERATIONS_MAX: usize = 256;
/// Operations on whole texts at once: of one tenant, and over all. Each may hold some 100 MiB, here or inside.
const TEXTS_PER_TENANT_MAX: usize = 4;
const TEXTS_MAX: usize = 16;
/// The same of listings and searches, which may hold some 30 MiB.
const SCANS_PER_TENANT_MAX: usize = 8;
const SCANS_MAX: usize = 32;
/// How long an operation waits for one of these places.
const ROOM_WAIT_MAX: Duration = Duration::from_secs(10);
/// A helper that nobody asks for this long is ended.
const HELPER_IDLE_MAX: Duration = Duration::from_secs(300);
/// Helpers at once, over all spaces and accounts.
const HELPERS_MAX: usize = 128;
/// How often, and how soon again, it is tried to clear up after a helper that died.
const CLEAR_TRIES: usize = 12;
const CLEAR_EVERY: Duration = Duration::from_secs(5);
/// How often idle helpers are looked for.
const SWEEP_EVERY: Duration = Duration::from_secs(15);

/// Why an operation has no result.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum FileError {
    /// The file system, or a rule of ours inside, said no.
    #[error("{}", fault_text(.0))]
    Fault(Fault),
    /// The account cannot be had.
    #[error("{0}")]
    User(String),
    #[error("Maximum number of file operations ({max}) reached")]
    Busy { max: usize },
    /// Nothing was started.
    #[error("the file helper could not be started")]
    Unavailable,
    /// It may have been done, in whole or in part.
    #[error("the file helper ended before it answered; the operation may have been done in part")]
    Interrupted,
    #[error("the operation took longer than it may")]
    TimedOut,
}

/// What a fault says, in the words of the system where it has any.
pub fn fault_text(fault: &Fault) -> String {
    match fault.errno {
        Some(errno) => std::io::Error::from_raw_os_error(errno).to_string(),
        None => fault.text.chars().take(TEXT_CHARS_MAX).collect(),
    }
}

/// Longest sentence that is taken from a helper.
const TEXT_CHARS_MAX: usize = 1_000;

fn fault_of(fault: Fault) -> FileError {
    match fault.kind {
        FaultKind::TimedOut => FileError::TimedOut,
        _ => FileError::Fault(fault),
    }
}

/// Whose files what is created becomes.
#[derive(Copy, Clone, Debug, PartialEq, Eq)]
pub enum Owner<'a> {
    /// Of the default account.
    Default,
    Named(&'a str),
    /// What `sudo` asks for: root's, which no space has.
    Sudo,
}

/// What the file planes are told at start.
#[derive(Clone, Debug, Default)]
pub struct FileSettings {
    /// The account of requests that name none; `None` is `sandbox`.
    pub default_user: Option<String>,
    /// Name of the daemon's own account.
    pub daemon_account: Option<String>,
}

type Key = (SpaceId, Account);

/// A place for one helper: whoever holds it may start one.
#[derive(Default)]
struct Berth(tokio::sync::Mutex<Option<Arc<Helper>>>);

/// The helpers of all spaces.
pub struct Files {
    settings: FileSettings,
    launcher: Arc<dyn Launch>,
    tenants: Tenants,
    berths: Mutex<HashMap<Key, Arc<Berth>>>,
    gates: Mutex<HashMap<TenantId, Arc<Gate>>>,
    all: Gate,
}

/// How much may go on at once.
struct Gate {
    operations: Arc<Semaphore>,
    operations_max: usize,
    texts: Semaphore,
    scans: Semaphore,
}

impl Gate {
    fn new(operations_max: usize, texts_max: usize, scans_max: usize) -> Gate {
        Gate {
            operations: Arc::new(Semaphore::new(operations_max)),
            operations_max,
            texts: Semaphore::new(texts_max),
            scans: Semaphore::new(scans_max),
        }
    }

    fn enter(&self) -> Result<OwnedSemaphorePermit, FileError> {
        let max = self.operations_max;
        Arc::clone(&self.operations).try_acquire_owned().map_err(|_| FileError::Busy { max })
    }

    /// Waits for a place among those that take much memory; `None` for an operation that does not.
    async fn room(&self, bulk: Bulk) -> Option<SemaphorePermit<'_>> {
        let places = match bulk {
            Bulk::Text => &self.texts,
            Bulk::Names => &self.scans,
            Bulk::Little => return None,
        };
        Some(places.acquire().await.expect("these are never closed"))
    }
}

impl Files {
    /// Must be called inside the async runtime.
    pub fn new(settings: FileSettings, launcher: Arc<dyn Launch>, tenants: Tenants) -> Arc<Files> {
        let files = Arc::new(Files {
            settings,
            launcher,
            tenants,
            berths: Mutex::default(),
            gates: Mutex::default(),
            all: Gate::new(OPERATIONS_MAX, TEXTS_MAX, SCANS_MAX),
        });
        tokio::spawn(sweep(Arc::downgrade(&files)));
        files
    }

    /// Begins an operation: who it is for is settled, and it counts from here on.
    pub async fn enter(
        self: &Arc<Self>,
        tenant: &TenantId,
        owner: Owner<'_>,
    ) -> Result<Operation, FileError> {
        // Who owns what is created says nothing about who reads.
        let (account, reader) = (self.account(owner)?, self.account(Owner::Default)?);
        let permits = self.admit(tenant)?;
        let space = self.tenants.space_of(tenant).await.map_err(|error| {
            tracing::error!(%error, tenant = tenant.0, "no space for a tenant");
            FileError::Unavailable
        })?;
        Ok(Operation { files: Arc::clone(self), key: (space, account), reader: (space, reader), permits })
    }

    fn account(&self, owner: Owner<'_>) -> Result<Account, FileError> {
        let hello = self.launcher.hello().borrow().clone().ok_or(FileError::Unavailable)?;
        let user = match owner {
            Owner::Named(user) => Some(user),
            Owner::Sudo if !hello.posture.root => Some("root"),
            // A space has no root: what is made is the default account's, as without `sudo`.
            Owner::Default | Owner::Sudo => None,
        };
        let (default_user, daemon) =
            (self.settings.default_user.as_deref(), self.settings.daemon_account.as_deref());
        identity::resolve(user, default_user, daemon, &hello).map_err(|cannot| {
            FileError::User(match cannot {
                CannotRunAs::NoSuchAccount { user } => format!("no such user: {user}"),
                other => other.to_string(),
            })
        })
    }

    fn admit(&self, tenant: &TenantId) -> Result<Permits, FileError> {
        let gate = {
            let mut gates = lock(&self.gates);
            let new = || Gate::new(OPERATIONS_PER_TENANT_MAX, TEXTS_PER_TENANT_MAX, SCANS_PER_TENANT_MAX);
            Arc::clone(gates.entry(tenant.clone()).or_insert_with(|| Arc::new(new())))
        };
        let (of_tenant, of_all) = (gate.enter()?, self.all.enter()?);
        Ok(Permits { gate, _of_tenant: of_tenant, _of_all: of_all })
    }

    /// The helper of a space and account, started if there is none.
    async fn helper(&self, key: Key) -> Result<Arc<Helper>, FileError> {
        let berth = self.berth(key)?;
        let mut held = berth.0.lock().await;
        if let Some(helper) = held.as_ref().filter(|helper| helper.is_alive()) {
            return Ok(Arc::clone(helper));
        }
        *held = None;
        let (space, account) = key;
        let plan = LaunchPlan { account, ..LaunchPlan::new(space, Profile::Files, Origin::Strict) };
        let sandbox = self.launcher.sandbox(plan).await.map_err(|error| {
            tracing::error!(error = &error as &dyn std::error::Error, %space, "no file helper");
            FileError::Unavailable
        })?;
        let helper = Helper::start(sandbox).await.map_err(|error| {
            tracing::error!(%error, %space, "a file helper did not come up");
            FileError::Unavailable
        })?;
        let helper = Arc::new(helper);
        *held = Some(Arc::clone(&helper));
        Ok(helper)
    }

    fn berth(&self, key: Key) -> Result<Arc<Berth>, FileError> {
        let mut berths = lock(&self.berths);
        if let Some(berth) = berths.get(&key) {
            return Ok(Arc::clone(berth));
        }
        if berths.len() >= HELPERS_MAX {
            clear_idle(&mut berths, Duration::ZERO);
        }
        if berths.len() >= HELPERS_MAX {
            return Err(FileError::Busy { max: HELPERS_MAX });
        }
        Ok(Arc::clone(berths.entry(key).or_default()))
    }

    /// Has the next helper remove what one that died has left; the launcher may have died with it.
    async fn clear(&self, key: Key, clear: Op) {
        let call = call_of(clear, TREE_TIME_MAX);
        for _ in 0..CLEAR_TRIES {
            if let Ok(helper) = self.helper(key).await
                && let Ok(mut ticket) = helper.begin(&call, &[], None).await
                && ticket.answer().await.is_ok()
            {
                return;
            }
            tokio::time::sleep(CLEAR_EVERY).await;
        }
        tracing::error!("a temporary file of a transfer that broke off could not be removed");
    }
}

/// Ends what nobody has asked for so long, and forgets what has ended.
fn clear_idle(berths: &mut HashMap<Key, Arc<Berth>>, idle_max: Duration) {
    berths.retain(|_, berth| {
        // Somebody is about to use it, or starts one.
        let Ok(mut held) = berth.0.try_lock() else { return true };
        let idle = held.as_ref().is_none_or(|helper| {
            let is_idle = helper.idle_since().is_some_and(|since| since.elapsed() >= idle_max);
            !helper.is_alive() || is_idle && Arc::strong_count(helper) == 1
        });
        if idle {
            *held = None;
        }
        !(idle && Arc::strong_count(berth) == 1)
    });
}

async fn sweep(files: Weak<Files>) {
    loop {
        tokio::time::sleep(SWEEP_EVERY).await;
        let Some(files) = files.upgrade() else { return };
        clear_idle(&mut lock(&files.berths), HELPER_IDLE_MAX);
        // A tenant without operations has its gate in nobody's hands.
        lock(&files.gates).retain(|_, gate| Arc::strong_count(gate) > 1);
    }
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().expect("no code panics while it holds the helpers' books")
}

struct Permits {
    /// The tenant's.
    gate: Arc<Gate>,
    _of_tenant: OwnedSemaphorePermit,
    _of_all: OwnedSemaphorePermit,
}

/// One admitted operation.
pub struct Operation {
    files: Arc<Files>,
    key: Key,
    /// The same for what only reads.
    reader: Key,
    permits: Permits,
}

impl Operation {
    /// Does it; the second part is what came beside the answer, such as a file's text.
    pub async fn call(&self, op: Op, content: &[u8]) -> Result<(Answer, Vec<u8>), FileError> {
        let bulk = op.bulk();
        let room = async { (self.permits.gate.room(bulk).await, self.files.all.room(bulk).await) };
        let busy = FileError::Busy { max: OPERATIONS_PER_TENANT_MAX };
        let _room = tokio::time::timeout(ROOM_WAIT_MAX, room).await.map_err(|_| busy)?;
        let Reply { answered, text, .. } = self.ask(op, content).await?.1;
        Ok((answered.map_err(fault_of)?, text))
    }

    /// Opens a file to read it from here.
    pub async fn open(self, path: &str) -> Result<Download, FileError> {
        let (helper, reply) = self.ask(Op::Open { path: path.to_owned() }, &[]).await?;
        reply.answered.map_err(fault_of)?;
        let opened = helper.keep(reply.descriptor.ok_or(FileError::Unavailable)?).map_err(|error| {
            tracing::error!(%error, "a download is refused");
            FileError::Unavailable
        })?;
        Ok(Download::new(opened, self.permits))
    }

    /// A file on its way in, to `path` if that is known by now.
    pub async fn upload(self, path: Option<String>, bytes_max: u64) -> Result<Incoming, FileError> {
        let token = token();
        let clear = Op::Clear { path: path.clone(), token: token.clone() };
        self.incoming(Op::Upload { path, bytes_max, token }, clear).await
    }

    /// A tree on its way in.
    pub async fn tree_in(self, path: String, bytes_max: u64) -> Result<Incoming, FileError> {
        let token = token();
        let clear = Op::Clear { path: Some(path.clone()), token: token.clone() };
        self.incoming(Op::TreeIn { path, bytes_max, token }, clear).await
    }

    /// A tree on its way out.
    pub async fn tree_out(self, path: String, bytes_max: u64) -> Result<Outgoing, FileError> {
        let pipe = Pipe::new(false).map_err(no_pipe)?;
        let helper = self.files.helper(self.reader).await?;
        let call = call_of(Op::TreeOut { path, bytes_max }, transfer::STREAM_IDLE_MAX);
        let ticket = helper.begin(&call, &[], Some(pipe.theirs)).await;
        let ticket = ticket.map_err(|_| FileError::Interrupted)?;
        Ok(Outgoing { pipe: pipe.ours, ticket, is_done: false, _helper: helper, _permits: self.permits })
    }

    async fn incoming(self, op: Op, clear: Op) -> Result<Incoming, FileError> {
        let pipe = Pipe::new(true).map_err(no_pipe)?;
        let helper = self.files.helper(self.key).await?;
        let call = call_of(op, TREE_TIME_MAX);
        let ticket = helper.begin(&call, &[], Some(pipe.theirs)).await;
        let ticket = ticket.map_err(|_| FileError::Interrupted)?;
        let left = Some((Arc::clone(&self.files), self.key, clear));
        Ok(Incoming { pipe: Some(pipe.ours), ticket, helper, left, _permits: self.permits })
    }

    async fn ask(&self, op: Op, content: &[u8]) -> Result<(Arc<Helper>, Reply), FileError> {
        let limit = match op {
            Op::Copy { .. } | Op::Move { .. } | Op::Delete { .. } => TREE_TIME_MAX,
            _ => OPERATION_TIME_MAX,
        };
        let call = call_of(op, limit);
        let first = self.ask_once(&call, content).await;
        match first {
            Err(FileError::Interrupted) if call.op.only_reads() => self.ask_once(&call, content).await,
            first => first,
        }
    }

    async fn ask_once(&self, call: &Call, content: &[u8]) -> Result<(Arc<Helper>, Reply), FileError> {
        let key = if call.op.only_reads() { self.reader } else { self.key };
        let helper = self.files.helper(key).await?;
        let asked = async { helper.begin(call, content, None).await?.answer().await };
        let limit = Duration::from_millis(call.time_ms_max) + OVERTIME_MAX;
        match tokio::time::timeout(limit, asked).await {
            Ok(Ok(reply)) => {
                if reply.answered.as_ref().is_ok_and(|answer| !helper::fits(&call.op, answer)) {
                    tracing::error!("a file helper answered something else than it was asked");
                    helper.end();
                    return Err(FileError::Interrupted);
                }
                Ok((helper, reply))
            }
            Ok(Err(helper::Gone)) => Err(FileError::Interrupted),
            Err(_) => {
                tracing::error!("a file helper did not answer in time");
                helper.end();
                Err(FileError::TimedOut)
            }
        }
    }
}

fn token() -> String {
    uuid::Uuid::new_v4().simple().to_string()
}

fn call_of(op: Op, limit: Duration) -> Call {
    Call { op, time_ms_max: u64::try_from(limit.as_millis()).unwrap_or(u64::MAX) }
}

fn no_pipe(error: std::io::Error) -> FileError {
    tracing::error!(%error, "no pipe for a transfer");
    FileError::Unavailable
}
