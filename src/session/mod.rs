//! Sessions: named, stateful lines of cells, each with an interpreter of its own.
//!
//! `state` is the machine, [`Session`] one session with its queue, `registry` all of them with their caps,
//! `reaper` closes those that nobody uses.
#![forbid(unsafe_code)]

use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, MutexGuard};
use std::time::{Duration, Instant, SystemTime};

use tokio::sync::{OwnedSemaphorePermit, Semaphore, watch};

use crate::backend::worker::Worker;
use crate::engine::{Refusal, TenantId, Tier};
use crate::harness::outcome::{Stopped, death_text};
use crate::launcher::plan::{Account, End, SpaceId};
use crate::session::id::SessionId;
use crate::session::state::{Begun, CloseReason, State};

pub mod id;
pub mod reaper;
pub mod registry;
pub mod state;

/// What a session that lost its memory to a restart says on its first reply.
pub const RESTART_HINT: &str =
    "session was reset: the daemon restarted and interpreter memory does not survive";

/// The same after the launcher has died under it.
pub const LOST_HINT: &str =
    "session was reset: the launcher ended, and the interpreter's memory does not survive it";

/// Where code starts when nobody says otherwise, as seen inside.
pub const HOME_DIR: &str = "/home/sandbox";

/// Names one session for good.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct SessionKey {
    pub tenant: TenantId,
    pub tier: Tier,
    pub id: SessionId,
}

/// What is fixed when a session is made.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Birth {
    pub space: SpaceId,
    pub account: Account,
    pub cwd: Option<String>,
    /// Idle time after which it is closed, where that is less than its tier's.
    pub idle_max: Option<Duration>,
    /// Made by the route for it and not by a cell: it stays without ever having run one.
    pub up_front: bool,
}

/// One session.
#[derive(Debug)]
pub struct Session {
    pub key: SessionKey,
    pub birth: Birth,
    pub created_at: SystemTime,
    /// One permit: who holds it runs. The semaphore is fair, so cells run in the order they came.
    turns: Arc<Semaphore>,
    waiting: AtomicUsize,
    waiting_max: usize,
    stop: watch::Sender<Option<Stopped>>,
    books: Mutex<Books>,
}

#[derive(Debug)]
struct Books {
    state: State<Worker>,
    cells: u64,
    used: Instant,
    used_at: SystemTime,
    hint: Option<String>,
    stored: bool,
}

/// The right to run the next cell; given back when dropped.
#[derive(Debug)]
pub struct Turn(#[expect(dead_code, reason = "held for its drop")] OwnedSemaphorePermit);

/// Why there is no turn.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum NoTurn {
    Refused(Refusal),
    Closed(CloseReason),
}

/// What a session looks like from outside.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct SessionEntry {
    pub session_id: String,
    pub tier: Tier,
    /// As asked for at its start, else the sandbox's home.
    pub cwd: String,
    /// Milliseconds since the epoch.
    pub created_at_ms: u64,
    pub last_used_ms: u64,
    /// Since its last run.
    pub age_seconds: u64,
    pub idle_max_ms: u64,
    pub executing: bool,
}

impl Session {
    /// `lost`: what the first reply says about an earlier session of this name, which is written down.
    fn new(key: SessionKey, birth: Birth, waiting_max: usize, lost: Option<&str>) -> Session {
        let now = SystemTime::now();
        let books = Books {
            state: State::Empty,
            cells: 0,
            used: Instant::now(),
            used_at: now,
            hint: lost.map(str::to_owned),
            stored: lost.is_some(),
        };
        Session {
            key,
            birth,
            created_at: now,
            turns: Arc::new(Semaphore::new(1)),
            waiting: AtomicUsize::new(0),
            waiting_max,
            stop: watch::channel(None).0,
            books: Mutex::new(books),
        }
    }

    /// Waits until all earlier cells are done.
    pub async fn turn(&self) -> Result<Turn, NoTurn> {
        if let Ok(permit) = Arc::clone(&self.turns).try_acquire_owned() {
            return Ok(Turn(permit));
        }
        if self.waiting.fetch_add(1, Ordering::SeqCst) >= self.waiting_max {
            self.waiting.fetch_sub(1, Ordering::SeqCst);
            return Err(NoTurn::Refused(Refusal::TooManyWaiting { max: self.waiting_max }));
        }
        let _counted = Waiting(&self.waiting);
        match Arc::clone(&self.turns).acquire_owned().await {
            Ok(permit) => Ok(Turn(permit)),
            Err(_closed) => Err(NoTurn::Closed(self.closed().unwrap_or(CloseReason::Deleted))),
        }
    }

    /// Starts a cell of whoever holds `_turn`. An interpreter that died meanwhile is replaced, with a hint.
    pub fn begin(&self, _turn: &Turn) -> Begun<Worker> {
        let mut books = self.lock();
        let dead = match &books.state {
            State::Idle { interpreter } => interpreter.end(),
            _ => None,
        };
        let buried = dead.and_then(|end| books.bury(end));
        books.touch();
        let begun = books.state.begin(Instant::now());
        drop(books);
        drop(buried);
        begun
    }

    /// The interpreter is there. Returns the cell's count, or why the session is over.
    pub fn started(&self) -> Result<u64, CloseReason> {
        let mut books = self.lock();
        books.state.started(Instant::now())?;
        books.cells += 1;
        Ok(books.cells)
    }

    /// The cell is over. `None` when its interpreter was lost or could not be started.
    pub fn finish(&self, worker: Option<Worker>) {
        let mut books = self.lock();
        books.touch();
        let unwanted = books.state.finish(worker);
        drop(books);
        // Ends the sandbox, which is a packet to the launcher: not under the lock.
        drop(unwanted);
    }

    /// Ends the session: waiting cells get no turn, a running one is stopped.
    pub fn close(&self, reason: CloseReason) {
        let interpreter = self.lock().state.close(reason);
        self.turns.close();
        self.stop.send_replace(Some(match reason {
            CloseReason::ShuttingDown => Stopped::ShuttingDown,
            _ => Stopped::SessionDeleted,
        }));
        drop(interpreter);
    }

    /// Ends the session if its interpreter waits for a cell and has died with its launcher.
    fn close_if_lost(&self) -> Option<Worker> {
        let mut books = self.lock();
        let is_lost = match &books.state {
            State::Idle { interpreter } => interpreter.end() == Some(End::LauncherGone),
            _ => false,
        };
        let interpreter = is_lost.then(|| books.state.close(CloseReason::LauncherGone)).flatten();
        drop(books);
        if interpreter.is_some() {
            self.turns.close();
        }
        interpreter
    }

    /// True once the session has been written down.
    fn is_stored(&self) -> bool {
        self.lock().stored
    }

    /// Tells a run that it is to stop.
    pub fn stop(&self) -> watch::Receiver<Option<Stopped>> {
        self.stop.subscribe()
    }

    /// Its names are gone, and the next reply says so.
    pub fn note_loss(&self, why: &str) {
        self.lock().hint.get_or_insert_with(|| format!("session was reset: {why}"));
    }

    /// The hint for the next reply, once.
    pub fn take_hint(&self) -> Option<String> {
        self.lock().hint.take()
    }

    /// The count that the next cell would have.
    pub fn next_count(&self) -> u64 {
        self.lock().cells + 1
    }

    /// True the first time: whoever is told so writes the session down.
    pub fn claim_storing(&self) -> bool {
        !std::mem::replace(&mut self.lock().stored, true)
    }

    fn closed(&self) -> Option<CloseReason> {
        self.lock().state.closed()
    }

    /// True when no cell ever started, none waits, and nobody made it for later.
    fn is_unborn(&self) -> bool {
        let books = self.lock();
        !self.birth.up_front
            && books.cells == 0
            && matches!(books.state, State::Empty)
            && self.waiting.load(Ordering::SeqCst) == 0
    }

    /// For how long nothing has run; `None` while something runs or waits.
    fn idle_for(&self) -> Option<Duration> {
        let books = self.lock();
        let busy = books.state.is_executing() || self.waiting.load(Ordering::SeqCst) > 0;
        if busy { None } else { Some(books.used.elapsed()) }
    }

    fn entry(&self, idle_max: Duration) -> SessionEntry {
        let books = self.lock();
        SessionEntry {
            session_id: self.key.id.to_string(),
            tier: self.key.tier.clone(),
            cwd: self.birth.cwd.clone().unwrap_or_else(|| HOME_DIR.to_owned()),
            created_at_ms: epoch_ms(self.created_at),
            // The clock may have been set back meanwhile.
            last_used_ms: epoch_ms(books.used_at.max(self.created_at)),
            age_seconds: books.used.elapsed().as_secs(),
            idle_max_ms: u64::try_from(idle_max.as_millis()).unwrap_or(u64::MAX),
            executing: books.state.is_executing(),
        }
    }

    fn lock(&self) -> MutexGuard<'_, Books> {
        self.books.lock().expect("no code panics while it holds a session's books")
    }
}

impl Books {
    fn touch(&mut self) {
        self.used = Instant::now();
        self.used_at = SystemTime::now();
    }

    fn bury(&mut self, end: End) -> Option<Worker> {
        match std::mem::replace(&mut self.state, State::Empty) {
            State::Idle { interpreter } => {
                // A restart's hint says as much, and more.
                self.hint.get_or_insert_with(|| format!("session was reset: {}", idle_death_text(end)));
                Some(interpreter)
            }
            other => {
                self.state = other;
                None
            }
        }
    }
}

fn idle_death_text(end: End) -> String {
    match end {
        End::OutOfMemory => "the interpreter ran out of memory between two calls".to_owned(),
        other => death_text(Some(other), 0),
    }
}

/// Counts one waiting cell for as long as it waits.
struct Waiting<'a>(&'a AtomicUsize);

impl Drop for Waiting<'_> {
    fn drop(&mut self) {
        self.0.fetch_sub(1, Ordering::SeqCst);
    }
}

/// Milliseconds since the epoch; 0 for a clock before it.
pub(crate) fn epoch_ms(at: SystemTime) -> u64 {
    let since = at.duration_since(SystemTime::UNIX_EPOCH).unwrap_or_default();
    u64::try_from(since.as_millis()).unwrap_or(u64::MAX)
}
