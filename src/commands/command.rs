//! One command as the daemon's books have it: its output so far, and how it ended.
//!
//! ```text
//!  Asked ──started──► Running ──exit──► Ended
//!    │ no directory       │ its sandbox is lost
//!    └──────────► Refused └───────────► Ended
//! ```
#![forbid(unsafe_code)]

use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, Weak};
use std::time::{Duration, Instant, SystemTime};

use tokio::sync::watch;

use super::agent::Agent;
use super::retained::{Part, Retained};
use super::{Refused, signals};
use crate::engine::{Status as AuditStatus, Stream, TenantId};
use crate::harness::interpreter::Provenance;
use crate::inside::commands::frame::{CHUNK_BYTES_MAX, Exit, Request};
use crate::session::epoch_ms;
use crate::session::id::SessionId;
use crate::store::Store;
use crate::tenant::audit::{AuditRecord, Ran};
use crate::tenant::quota::Place;

/// Input that was sent to a command and not read by it.
pub(super) const INPUT_BYTES_MAX: usize = 4 * 1024 * 1024;
/// Output that is kept of one tenant's commands, over all its sessions. Beyond it the oldest ended ones lose theirs,
/// then running ones all but [`FLOOR_BYTES`] a stream.
const POOL_BYTES_MAX: usize = 256 * 1024 * 1024;
const FLOOR_BYTES: usize = 256 * 1024;
/// How long a command may take to end after a kill that nothing survives, before its sandbox is ended.
const KILL_ANSWER_MAX: Duration = Duration::from_secs(5);

/// How a command is or was.
#[derive(Copy, Clone, Debug, PartialEq, Eq)]
pub enum Status {
    Running,
    Completed,
    /// Its hard limit passed.
    TimedOut,
    /// Ended by a caller's signal.
    Killed,
}

/// What is told about a command.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Outlook {
    pub status: Status,
    /// Of its process; -1 when a signal or a lost sandbox ended it. `None` while it runs.
    pub exit_code: Option<i32>,
    /// Why it ended, when that was not its own doing.
    pub reason: Option<String>,
}

/// Output of both streams from two offsets on.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Read {
    pub stdout: Part,
    pub stderr: Part,
    pub outlook: Outlook,
}

/// Who a command belongs to, and who writes down what became of it.
#[derive(Clone, Debug)]
pub struct Origin {
    pub tenant: TenantId,
    pub session: SessionId,
    pub ran: Ran,
    pub pool: Arc<Pool>,
    pub store: Store,
}

/// A command that was asked for.
#[derive(Debug)]
pub struct Command {
    pub id: String,
    /// Its name for the agent.
    pub number: u32,
    /// As the caller wrote it.
    pub text: String,
    /// Where it started, for a prompt.
    pub cwd: String,
    origin: Origin,
    provenance: Provenance,
    agent: Weak<Agent>,
    since: Instant,
    started_at: SystemTime,
    books: Mutex<Books>,
    changed: watch::Sender<()>,
}

#[derive(Debug)]
struct Books {
    phase: Phase,
    stdout: Retained,
    stderr: Retained,
    /// Sent to it and not known to be read.
    input: usize,
    verdict: Option<Verdict>,
    /// Given back at the end.
    place: Option<Place>,
}

#[derive(Clone, Debug)]
enum Phase {
    Asked,
    Refused,
    Running,
    Ended(Outlook),
}

/// What somebody decided about a command that still ran.
#[derive(Copy, Clone, Debug, PartialEq, Eq)]
enum Verdict {
    Killed,
    TimedOut,
}

impl Command {
    pub fn new(
        text: String,
        cwd: String,
        number: u32,
        origin: Origin,
        agent: &Arc<Agent>,
        place: Option<Place>,
    ) -> Arc<Command> {
        let books = Books {
            phase: Phase::Asked,
            stdout: Retained::default(),
            stderr: Retained::default(),
            input: 0,
            verdict: None,
            place,
        };
        let command = Arc::new(Command {
            id: nanoid::nanoid!(),
            number,
            text,
            cwd,
            origin,
            provenance: agent.provenance,
            agent: Arc::downgrade(agent),
            since: Instant::now(),
            started_at: SystemTime::now(),
            books: Mutex::new(books),
            changed: watch::channel(()).0,
        });
        command.origin.pool.add(&command);
        command
    }

    pub fn session(&self) -> &SessionId {
        &self.origin.session
    }

    pub fn outlook(&self) -> Outlook {
        self.lock().outlook()
    }

    pub fn is_running(&self) -> bool {
        matches!(self.lock().phase, Phase::Asked | Phase::Running)
    }

    /// Output from these offsets on, at most `bytes_max` of each stream.
    pub fn read(&self, stdout: u64, stderr: u64, bytes_max: usize) -> Read {
        let books = self.lock();
        let outlook = books.outlook();
        let more = outlook.status == Status::Running;
        Read {
            stdout: books.stdout.since(stdout, bytes_max, more),
            stderr: books.stderr.since(stderr, bytes_max, more),
            outlook,
        }
    }

    /// Bytes produced so far.
    pub fn produced(&self, stream: Stream) -> u64 {
        let books = self.lock();
        match stream {
            Stream::Stdout => books.stdout.end(),
            Stream::Stderr => books.stderr.end(),
        }
    }

    /// Resolves once the agent has started it, or could not.
    pub async fn started(&self) -> Result<(), Refused> {
        self.until(|books| match books.phase {
            Phase::Asked => None,
            Phase::Refused => Some(Err(Refused::NotADirectory(self.cwd.clone()))),
            Phase::Running | Phase::Ended(_) => Some(Ok(())),
        })
        .await
    }

    /// Resolves at its end.
    pub async fn ended(&self) -> Outlook {
        self.until(|books| match &books.phase {
            Phase::Ended(outlook) => Some(outlook.clone()),
            Phase::Asked | Phase::Refused | Phase::Running => None,
        })
        .await
    }

    /// Resolves when there is output beyond these offsets, or none can come any more.
    pub async fn news(&self, stdout: u64, stderr: u64) {
        self.until(|books| {
            let is_over = !matches!(books.phase, Phase::Asked | Phase::Running);
            let is_new = books.stdout.end() > stdout || books.stderr.end() > stderr;
            (is_over || is_new).then_some(())
        })
        .await;
    }

    async fn until<T>(&self, look: impl Fn(&Books) -> Option<T>) -> T {
        let mut changed = self.changed.subscribe();
        loop {
            changed.borrow_and_update();
            let found = look(&self.lock());
            if let Some(found) = found {
                return found;
            }
            changed.changed().await.expect("its sender lies in this command");
        }
    }

    /// Sends input. All of it, or nothing.
    pub fn input(&self, bytes: &[u8]) -> Result<(), Refused> {
        let agent = self.running_agent()?;
        let mut books = self.lock();
        if books.input + bytes.len() > INPUT_BYTES_MAX {
            return Err(Refused::InputFull { max: INPUT_BYTES_MAX });
        }
        books.input += bytes.len();
        drop(books);
        let pieces = bytes.chunks(CHUNK_BYTES_MAX);
        let requests =
            pieces.map(|piece| Request::Stdin { number: agent.input_of(self), bytes: piece.to_vec() });
        agent.send_all(requests)
    }

    /// Sends a signal to its process group.
    pub fn signal(self: &Arc<Self>, signal: u8) -> Result<(), Refused> {
        let agent = self.running_agent()?;
        if signals::ends(signal) {
            self.lock().verdict.get_or_insert(Verdict::Killed);
        }
        agent.send(&Request::Signal { number: agent.input_of(self), signal })?;
        if signal == signals::KILL {
            self.end_with_sandbox_after(KILL_ANSWER_MAX);
        }
        Ok(())
    }

    /// Kills it if it still runs.
    pub fn kill(self: &Arc<Self>) {
        // Whoever could not be reached is ended with its sandbox; who has ended needs nothing.
        if self.signal(signals::KILL) == Err(Refused::Overrun) {
            self.end_with_sandbox_after(Duration::ZERO);
        }
    }

    /// Its hard limit has passed.
    pub fn time_out(self: &Arc<Self>) {
        self.lock().verdict.get_or_insert(Verdict::TimedOut);
        self.kill();
    }

    /// Notes that a limit of time has passed, and leaves the killing to whoever says so.
    pub fn note_time_out(&self) {
        self.lock().verdict.get_or_insert(Verdict::TimedOut);
    }

    /// Ends the sandbox if this command has not ended by then: its agent answers no more.
    pub fn end_with_sandbox_after(self: &Arc<Self>, wait: Duration) {
        let command = Arc::clone(self);
        tokio::spawn(async move {
            if tokio::time::timeout(wait, command.ended()).await.is_err()
                && let Some(agent) = command.agent.upgrade()
            {
                agent.end("its agent did not answer");
            }
        });
    }

    fn running_agent(&self) -> Result<Arc<Agent>, Refused> {
        let agent = self.agent.upgrade().filter(|_| self.is_running());
        agent.ok_or_else(|| Refused::NotRunning(self.id.clone()))
    }

    // --- what its agent reports -----------------------------------------------------------------------------------

    pub(super) fn hear_started(&self) {
        let mut books = self.lock();
        if matches!(books.phase, Phase::Asked) {
            books.phase = Phase::Running;
        }
        drop(books);
        self.changed.send_replace(());
    }

    pub(super) fn hear_not_a_directory(&self) {
        let mut books = self.lock();
        if matches!(books.phase, Phase::Asked) {
            books.phase = Phase::Refused;
            books.place = None;
        }
        drop(books);
        self.changed.send_replace(());
    }

    pub(super) fn hear_output(&self, stream: Stream, bytes: &[u8]) {
        let mut books = self.lock();
        let kept = match stream {
            Stream::Stdout => books.stdout.push(bytes),
            Stream::Stderr => books.stderr.push(bytes),
        };
        drop(books);
        self.origin.pool.note(kept);
        self.changed.send_replace(());
    }

    pub(super) fn hear_taken(&self, bytes: usize) {
        let mut books = self.lock();
        books.input = books.input.saturating_sub(bytes);
    }

    /// Its process has ended.
    pub(super) fn hear_exit(&self, exit: Exit) {
        let (code, reason) = match exit {
            Exit::Code(code) => (i32::from(code), format!("exit code {code}")),
            Exit::Signal(signal) => (-1, format!("signal {signal}")),
        };
        self.end(code, &reason, None);
    }

    /// Its sandbox is gone.
    pub(super) fn lose(&self, why: &str) {
        self.end(-1, why, Some(why));
    }

    fn end(&self, code: i32, ended: &str, reason: Option<&str>) {
        let mut books = self.lock();
        if !matches!(books.phase, Phase::Asked | Phase::Running) {
            return;
        }
        let (status, exit_code) = match books.verdict {
            Some(Verdict::TimedOut) => (Status::TimedOut, -1),
            Some(Verdict::Killed) => (Status::Killed, if self.origin.ran == Ran::Shell { code } else { -1 }),
            None => (Status::Completed, code),
        };
        let outlook = Outlook { status, exit_code: Some(exit_code), reason: reason.map(str::to_owned) };
        books.stdout.shrink();
        books.stderr.shrink();
        let place = books.place.take();
        // Written down before anybody hears of it.
        self.audit(&outlook, ended);
        books.phase = Phase::Ended(outlook);
        drop(books);
        drop(place);
        self.changed.send_replace(());
    }

    fn audit(&self, outlook: &Outlook, ended: &str) {
        let (status, ended) = match (outlook.status, outlook.exit_code) {
            (Status::TimedOut, _) => (AuditStatus::Timeout, "time limit"),
            (Status::Completed, Some(0)) => (AuditStatus::Ok, "completed"),
            (Status::Killed, _) => (AuditStatus::Error, "killed by its caller"),
            _ => (AuditStatus::Error, ended),
        };
        self.origin.store.audit(AuditRecord {
            at_ms: epoch_ms(self.started_at),
            tenant: self.origin.tenant.clone(),
            ran: self.origin.ran,
            session: Some(self.origin.session.to_string()),
            status,
            duration_ms: u64::try_from(self.since.elapsed().as_millis()).unwrap_or(u64::MAX),
            provenance: Some(self.provenance),
            ended: ended.to_owned(),
        });
    }

    fn cut_to(&self, kept: usize) {
        let mut books = self.lock();
        let given_up = books.stdout.cut_to(kept) + books.stderr.cut_to(kept);
        if !matches!(books.phase, Phase::Asked | Phase::Running) {
            books.stdout.shrink();
            books.stderr.shrink();
        }
        drop(books);
        self.origin.pool.bytes.fetch_sub(given_up, Ordering::Relaxed);
    }

    fn lock(&self) -> MutexGuard<'_, Books> {
        self.books.lock().expect("no code panics while it holds a command's books")
    }
}

impl Drop for Command {
    fn drop(&mut self) {
        let books = self.lock();
        let kept = books.stdout.len() + books.stderr.len();
        drop(books);
        self.origin.pool.bytes.fetch_sub(kept, Ordering::Relaxed);
    }
}

impl Books {
    fn outlook(&self) -> Outlook {
        match &self.phase {
            Phase::Ended(outlook) => outlook.clone(),
            Phase::Asked | Phase::Refused | Phase::Running => {
                Outlook { status: Status::Running, exit_code: None, reason: None }
            }
        }
    }
}

/// The output that one tenant's commands have in memory.
#[derive(Debug, Default)]
pub struct Pool {
    bytes: AtomicUsize,
    /// In the order in which they were asked for.
    commands: Mutex<Vec<Weak<Command>>>,
}

impl Pool {
    fn add(&self, command: &Arc<Command>) {
        let mut commands = self.lock();
        commands.retain(|known| known.strong_count() > 0);
        commands.push(Arc::downgrade(command));
    }

    fn note(&self, kept: isize) {
        if kept >= 0 {
            self.bytes.fetch_add(kept.unsigned_abs(), Ordering::Relaxed);
        } else {
            self.bytes.fetch_sub(kept.unsigned_abs(), Ordering::Relaxed);
        }
        if self.bytes.load(Ordering::Relaxed) > POOL_BYTES_MAX {
            self.give_up();
        }
    }

    fn give_up(&self) {
        let commands: Vec<Arc<Command>> = self.lock().iter().filter_map(Weak::upgrade).collect();
        let enough = || self.bytes.load(Ordering::Relaxed) <= POOL_BYTES_MAX / 4 * 3;
        let (running, ended): (Vec<_>, Vec<_>) = commands.iter().partition(|command| command.is_running());
        for command in ended {
            if enough() {
                return;
            }
            command.cut_to(0);
        }
        for command in running {
            if enough() {
                return;
            }
            command.cut_to(FLOOR_BYTES);
        }
    }

    fn lock(&self) -> MutexGuard<'_, Vec<Weak<Command>>> {
        self.commands.lock().expect("no code panics while it holds the pool")
    }
}
