//! Stateful shells: a session whose lines run in one bash, so that `cd` and `export` last.
//!
//! A line is a [`Command`] whose output is what the terminal showed. One line at a time.
#![forbid(unsafe_code)]

use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

use super::agent::Route;
use super::command::Command;
use super::session::{Birth, Session, SessionInfo};
use super::{Commands, Refused, Running, Unborn, begin, parse_id, signals};
use crate::engine::TenantId;
use crate::inside::commands::frame::{Line, Request, Shell};
use crate::session::HOME_DIR;
use crate::session::id::SessionId;
use crate::tenant::audit::Ran;

/// A line that prints nothing for so long is answered, and goes on.
pub const QUIET_DEFAULT: Duration = Duration::from_secs(120);
/// How long what a line runs may take to end after each step of a kill: a request, then force, then all of it.
const KILL_STEP: Duration = Duration::from_secs(1);
/// Used within so long, a shell counts as active.
const ACTIVE: Duration = Duration::from_secs(300);

/// A line for a shell.
#[derive(Clone, Debug)]
pub struct ShellLine {
    /// `None` makes a new one; one that is unknown is refused.
    pub session: Option<String>,
    pub text: String,
    pub cwd: Option<String>,
    /// Refuse a `cwd` that is no directory, instead of staying where the shell is.
    pub strict: bool,
    pub keeps_links: bool,
    pub hard_timeout: Option<Duration>,
}

/// A shell to make.
#[derive(Clone, Debug, Default)]
pub struct ShellCreate {
    pub id: Option<String>,
    pub cwd: Option<String>,
    pub quiet_max: Option<Duration>,
}

/// Counts of a tenant's shells.
#[derive(Copy, Clone, Debug, PartialEq, Eq)]
pub struct ShellStats {
    pub sessions: usize,
    pub active: usize,
    pub sessions_max: usize,
    pub idle_max: Duration,
}

impl Commands {
    /// Hands a line to a shell. `Err` promises that nothing of it was run. A directory that is none is asked for in
    /// vain first and then left out, so that what is said of the line names the one where it runs.
    pub async fn shell_run(&self, tenant: &TenantId, line: ShellLine) -> Result<Running, Refused> {
        let settled = self.settle(tenant, None).await?;
        let (session, made) = match &line.session {
            Some(id) => (self.shells.find(tenant, id)?, false),
            None => {
                let id = SessionId::generate();
                let birth = self.birth(tenant, &id, &settled, None, Vec::new());
                self.shells.find_or_create(tenant, &id, || Session::new(birth))?
            }
        };
        let unborn = Unborn { table: &self.shells, session: made.then_some(&session) };
        let lenient = (line.cwd.is_some() && !line.strict).then(|| ShellLine { cwd: None, ..line.clone() });
        let running = match self.shell_run_in(&session, ShellLine { strict: true, ..line }).await {
            Err(Refused::NotADirectory(_)) if let Some(line) = lenient => {
                self.shell_run_in(&session, line).await?
            }
            run => run?,
        };
        unborn.keep();
        Ok(running)
    }

    async fn shell_run_in(&self, session: &Arc<Session>, line: ShellLine) -> Result<Running, Refused> {
        let busy = || Refused::Busy(session.birth.id.to_string());
        if session.is_busy() {
            return Err(busy());
        }
        let place = self.admission.try_admit(&session.birth.tenant);
        let place = place.map_err(|taken| Refused::TooManyCommands { max: taken.max })?;
        let agent = session.agent(&*self.launcher, self.config.memory_mib_max).await?;
        let bash = self.bash(&agent).ok_or(Refused::NoShell("bash"))?;
        let nonce = agent.number();
        let cwd = session.directory(None);
        let home = Path::new(HOME_DIR);
        let shown = line.cwd.as_ref().or(cwd.as_ref()).map_or(home.to_path_buf(), |cwd| home.join(cwd));
        let shown = shown.to_string_lossy().into_owned();
        let origin = self.origin(session, Ran::Shell);
        let command = Command::new(line.text.clone(), shown, nonce, origin, &agent, Some(place));
        if !session.add_alone(&command) {
            return Err(busy());
        }
        let (number, is_new) = session.shell(&agent);
        if is_new {
            let shell = Shell { shell: bash, cwd, env: session.birth.env.clone() };
            agent.listen(number, Route::Shell(Arc::downgrade(session)));
            if let Err(refused) = agent.send(&Request::Shell { number, shell }) {
                session.take_back(&command);
                return Err(refused);
            }
        }
        let limit = line.hard_timeout;
        let ShellLine { text, cwd, strict, keeps_links, .. } = line;
        let line = Line { nonce, text, cwd, strict, keeps_links };
        agent.listen(nonce, Route::Command(Arc::downgrade(&command)));
        // Before the line: it may end the shell itself, which is news for the next one.
        let hint = session.take_hint();
        let begun = begin(session, &agent, &command, &Request::Line { number, line }).await;
        let guard = begun.inspect_err(|_| session.put_back_hint(hint.clone()))?;
        if let Some(limit) = limit {
            let command = Arc::clone(&command);
            tokio::spawn(async move {
                if tokio::time::timeout(limit, command.ended()).await.is_err() {
                    command.note_time_out();
                    end_line(&command).await;
                }
            });
        }
        Ok(Running { command, hint, guard })
    }

    /// Makes a shell; one that exists is returned as it is, but for its `quiet_max`.
    pub async fn shell_create(&self, tenant: &TenantId, create: ShellCreate) -> Result<SessionInfo, Refused> {
        let settled = self.settle(tenant, None).await?;
        let id = create.id.as_deref().map_or_else(|| Ok(SessionId::generate()), parse_id)?;
        let birth = || Birth {
            quiet_max: create.quiet_max.unwrap_or(QUIET_DEFAULT),
            ..self.birth(tenant, &id, &settled, create.cwd.clone(), Vec::new())
        };
        let (session, made) = self.shells.find_or_create(tenant, &id, || Session::new(birth()))?;
        let unborn = Unborn { table: &self.shells, session: made.then_some(&session) };
        if made && create.cwd.is_some() {
            self.check_directory(&session).await?;
        }
        unborn.keep();
        session.touch();
        Ok(session.info())
    }

    pub fn shell(&self, tenant: &TenantId, id: &str) -> Result<Arc<Session>, Refused> {
        let session = self.shells.find(tenant, id)?;
        session.touch();
        Ok(session)
    }

    pub fn shells_list(&self, tenant: &TenantId) -> Vec<SessionInfo> {
        self.shells.list(tenant).iter().map(|session| session.info()).collect()
    }

    pub fn shell_delete(&self, tenant: &TenantId, id: &str) -> Result<(), Refused> {
        let session = self.shells.find(tenant, id)?;
        self.shells.close(&session, "the session was closed");
        Ok(())
    }

    /// Ends all of a tenant's shells; says how many.
    pub fn shells_clear(&self, tenant: &TenantId) -> usize {
        let sessions = self.shells.list(tenant);
        for session in &sessions {
            self.shells.close(session, "the session was closed");
        }
        sessions.len()
    }

    pub fn shell_stats(&self, tenant: &TenantId) -> ShellStats {
        let sessions = self.shells.list(tenant);
        let is_active = |session: &&Arc<Session>| session.idle_for().is_none_or(|idle| idle < ACTIVE);
        ShellStats {
            sessions: sessions.len(),
            active: sessions.iter().filter(is_active).count(),
            sessions_max: self.shells.sessions_max,
            idle_max: self.shells.idle_max,
        }
    }
}

/// Ends what a line runs, step by step; the last one takes the shell along. Returns when it has ended.
pub async fn end_line(line: &Arc<Command>) {
    for signal in [signals::TERMINATE, signals::KILL] {
        // One that has just ended is what was wanted.
        if line.signal(signal).is_err() || tokio::time::timeout(KILL_STEP, line.ended()).await.is_ok() {
            return;
        }
    }
    line.end_with_sandbox_after(Duration::ZERO);
    line.ended().await;
}
