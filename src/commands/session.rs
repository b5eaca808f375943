//! A session: a sandbox of its own in which its commands run, and what is fixed or kept from one to the next.
//!
//! The sandbox comes with the first command. When it is lost, the session stays: what belongs to it lies here, and its
//! next command gets a new sandbox and says so.
#![forbid(unsafe_code)]

use std::collections::VecDeque;
use std::path::Path;
use std::sync::{Arc, Mutex, MutexGuard};
use std::time::{Duration, Instant, SystemTime};

use super::Refused;
use super::agent::{Agent, tell};
use super::command::Command;
use crate::engine::{Stream, TenantId};
use crate::inside::commands::frame::{Event, Exit};
use crate::launcher::plan::{Account, LaunchPlan, Origin, Profile, SpaceId};
use crate::session::HOME_DIR;
use crate::session::id::SessionId;
use crate::zygote::Launch;

/// Commands of a session that are remembered; the oldest that has ended makes room.
pub(super) const COMMANDS_KEPT_MAX: usize = 100;
/// Commands of a session that run at once.
pub(super) const COMMANDS_RUNNING_MAX: usize = 32;

/// Environment variables beyond the sandbox's own; without a value: taken out.
pub type Environment = Vec<(String, Option<String>)>;

/// What is fixed when a session is made.
#[derive(Clone, Debug)]
pub struct Birth {
    pub id: SessionId,
    pub tenant: TenantId,
    pub space: SpaceId,
    pub account: Account,
    pub env: Environment,
    /// Where commands start; `None` is the sandbox's home.
    pub cwd: Option<String>,
    /// A line of its shell that prints nothing for so long is answered.
    pub quiet_max: Duration,
}

/// One session.
#[derive(Debug)]
pub struct Session {
    pub birth: Birth,
    pub created_at: SystemTime,
    /// Held while one is made.
    agent: tokio::sync::Mutex<Option<Arc<Agent>>>,
    books: Mutex<Books>,
}

#[derive(Debug)]
struct Books {
    cwd: Option<String>,
    used: Instant,
    used_at: SystemTime,
    commands: VecDeque<Arc<Command>>,
    count: u64,
    closed: bool,
    hint: Option<String>,
    /// The number of its shell, while it has one.
    shell: Option<u32>,
    quiet_max: Duration,
}

/// What a session looks like from outside.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct SessionInfo {
    pub session_id: String,
    pub working_dir: String,
    pub created_at: SystemTime,
    pub last_used_at: SystemTime,
    pub command_count: u64,
    /// The text of the one that was started last, of those that run.
    pub current_command: Option<String>,
}

impl Session {
    pub fn new(birth: Birth) -> Session {
        let now = SystemTime::now();
        let books = Books {
            cwd: birth.cwd.clone(),
            used: Instant::now(),
            used_at: now,
            commands: VecDeque::new(),
            count: 0,
            closed: false,
            hint: None,
            shell: None,
            quiet_max: birth.quiet_max,
        };
        Session { birth, created_at: now, agent: tokio::sync::Mutex::new(None), books: Mutex::new(books) }
    }

    /// The agent of its sandbox, which is made when there is none.
    pub async fn agent(&self, launcher: &dyn Launch, memory_mib_max: u64) -> Result<Arc<Agent>, Refused> {
        let mut held = self.agent.lock().await;
        if let Some(agent) = held.as_ref().filter(|agent| agent.is_alive()) {
            return Ok(Arc::clone(agent));
        }
        if let Some(lost) = held.take() {
            let why = lost.why_ended().unwrap_or("its sandbox was lost").to_owned();
            let mut books = self.lock();
            books.shell = None;
            books.hint = Some(format!("session was reset: {why}"));
        }
        let Birth { space, account, .. } = self.birth;
        let plan = LaunchPlan { account, ..LaunchPlan::new(space, Profile::Commands, Origin::Strict) };
        let agent = Arc::new(Agent::open(launcher, plan, memory_mib_max).await?);
        if self.lock().closed {
            return Err(Refused::NoSuchSession(self.birth.id.to_string()));
        }
        *held = Some(Arc::clone(&agent));
        Ok(agent)
    }

    /// Keeps a command. Refused when too many of them run.
    pub fn add(&self, command: &Arc<Command>) -> Result<(), Refused> {
        let mut books = self.lock();
        if books.commands.iter().filter(|known| known.is_running()).count() >= COMMANDS_RUNNING_MAX {
            return Err(Refused::TooManyCommands { max: COMMANDS_RUNNING_MAX });
        }
        books.add(command);
        Ok(())
    }

    /// Keeps a line of its shell, unless another runs.
    pub(super) fn add_alone(&self, line: &Arc<Command>) -> bool {
        let mut books = self.lock();
        let is_free = !books.is_busy();
        if is_free {
            books.add(line);
        }
        is_free
    }

    pub fn is_busy(&self) -> bool {
        self.lock().is_busy()
    }

    /// Forgets a command that was not started.
    pub fn take_back(&self, command: &Arc<Command>) {
        let mut books = self.lock();
        let before = books.commands.len();
        books.commands.retain(|known| !Arc::ptr_eq(known, command));
        books.count -= (before - books.commands.len()) as u64;
    }

    pub fn command(&self, id: &str) -> Option<Arc<Command>> {
        self.lock().commands.iter().find(|command| command.id == id).cloned()
    }

    /// The newest that runs, else the newest.
    pub fn current(&self) -> Option<Arc<Command>> {
        let books = self.lock();
        let running = books.commands.iter().rev().find(|command| command.is_running());
        running.or(books.commands.back()).cloned()
    }

    pub fn commands(&self) -> Vec<Arc<Command>> {
        self.lock().commands.iter().cloned().collect()
    }

    /// Where a command starts that asks for `cwd`.
    pub fn directory(&self, cwd: Option<&str>) -> Option<String> {
        let own = self.lock().cwd.clone();
        match (own, cwd) {
            (Some(own), Some(cwd)) => Some(Path::new(&own).join(cwd).to_string_lossy().into_owned()),
            (own, cwd) => cwd.map(str::to_owned).or(own),
        }
    }

    pub fn change_directory(&self, cwd: String) {
        self.lock().cwd = Some(cwd);
    }

    pub fn touch(&self) {
        self.lock().touch();
    }

    /// The hint for the next reply, once.
    pub fn take_hint(&self) -> Option<String> {
        self.lock().hint.take()
    }

    /// Nobody was told.
    pub(super) fn put_back_hint(&self, hint: Option<String>) {
        let mut books = self.lock();
        books.hint = books.hint.take().or(hint);
    }

    pub fn info(&self) -> SessionInfo {
        let books = self.lock();
        let current = books.commands.iter().rev().find(|command| command.is_running());
        SessionInfo {
            session_id: self.birth.id.to_string(),
            working_dir: books.cwd.clone().unwrap_or_else(|| HOME_DIR.to_owned()),
            created_at: self.created_at,
            last_used_at: books.used_at.max(self.created_at),
            command_count: books.count,
            current_command: current.map(|command| command.text.clone()),
        }
    }

    /// For how long nothing has run; `None` while something does.
    pub fn idle_for(&self) -> Option<Duration> {
        let mut books = self.lock();
        if books.is_busy() {
            // Its idle time begins with the end of what runs.
            books.used = Instant::now();
            return None;
        }
        Some(books.used.elapsed())
    }

    /// Ends it with all it runs.
    pub fn close(&self, why: &str) {
        let mut books = self.lock();
        books.closed = true;
        let commands: Vec<Arc<Command>> = books.commands.iter().cloned().collect();
        drop(books);
        for command in commands {
            command.lose(why);
        }
        // Whoever is just making one sees that it is closed.
        if let Ok(mut held) = self.agent.try_lock()
            && let Some(agent) = held.take()
        {
            agent.end(why);
        }
    }

    // --- its shell ------------------------------------------------------------------------------------------------

    /// The number of its shell, and whether it has to be started under it.
    pub(super) fn shell(&self, agent: &Agent) -> (u32, bool) {
        let mut books = self.lock();
        match books.shell {
            Some(number) => (number, false),
            None => {
                let number = agent.number();
                books.shell = Some(number);
                (number, true)
            }
        }
    }

    pub fn quiet_max(&self) -> Duration {
        self.lock().quiet_max
    }

    pub fn set_quiet_max(&self, quiet_max: Duration) {
        self.lock().quiet_max = quiet_max;
    }

    /// Output between two lines is the last one's.
    pub(super) fn hear_shell(&self, event: Event) {
        let line = self.lock().commands.back().cloned();
        match event {
            Event::Done { nonce, status, cwd, .. } => {
                // Of an earlier line, if its end was told twice.
                let Some(line) = line.filter(|line| line.number == nonce) else { return };
                self.change_directory(cwd);
                line.hear_exit(Exit::Code(status));
            }
            Event::Exit { exit, .. } => {
                let mut books = self.lock();
                books.shell = None;
                books.hint = Some("session was reset: its shell ended".to_owned());
                drop(books);
                if let Some(line) = line {
                    line.hear_exit(exit);
                }
            }
            Event::Stdout { bytes, .. } | Event::Stderr { bytes, .. } => {
                if let Some(line) = line {
                    line.hear_output(Stream::Stdout, &bytes);
                }
            }
            // Of the shell itself; a line has its own.
            Event::Started { .. } | Event::NotADirectory { .. } | Event::Ready(_) | Event::Call { .. } => {}
            taken @ Event::Taken { .. } => {
                if let Some(line) = line {
                    tell(&line, taken);
                }
            }
        }
    }

    pub(super) fn lose_line(&self, why: &str) {
        if let Some(line) = self.current() {
            line.lose(why);
        }
    }

    fn lock(&self) -> MutexGuard<'_, Books> {
        self.books.lock().expect("no code panics while it holds a session's books")
    }
}

impl Books {
    fn add(&mut self, command: &Arc<Command>) {
        self.touch();
        self.count += 1;
        self.commands.push_back(Arc::clone(command));
        if self.commands.len() > COMMANDS_KEPT_MAX
            && let Some(oldest) = self.commands.iter().position(|known| !known.is_running())
        {
            self.commands.remove(oldest);
        }
    }

    fn is_busy(&self) -> bool {
        self.commands.iter().any(|command| command.is_running())
    }

    fn touch(&mut self) {
        self.used = Instant::now();
        self.used_at = SystemTime::now();
    }
}
