//! Commands: programs of a tenant, each a fresh process in the sandbox of its session.
//!
//! A session has a sandbox of its own in the tenant's space, with our agent in it (`inside::commands`). What a command
//! prints is kept here, within bounds, so that it can be read from any offset while it runs and after. `shells` are
//! sessions with one stateful bash; `facts` is what a sandbox is asked about itself.
#![forbid(unsafe_code)]

use std::collections::HashMap;
use std::sync::{Arc, Mutex, Weak};
use std::time::Duration;

use crate::engine::TenantId;
use crate::engine::identity::{self, CannotRunAs};
use crate::inside::commands::frame::{Program, Request, Start};
use crate::launcher::plan::{Account, SpaceId};
use crate::launcher::posture::Hello;
use crate::session::HOME_DIR;
use crate::session::id::SessionId;
use crate::store::Store;
use crate::tenant::Tenants;
use crate::tenant::audit::Ran;
use crate::tenant::quota::{Admission, CellQuota};
use crate::zygote::{self, Launch};

mod agent;
mod command;
mod facts;
mod refused;
mod retained;
mod session;
mod shells;
mod signals;
mod table;
#[cfg(test)]
mod tests;

use agent::{Agent, Route};
pub use command::{Command, Outlook, Read, Status};
use command::{Origin, Pool};
pub use facts::Runtime;
pub use refused::Refused;
pub use retained::Part;
use session::Birth;
pub use session::{Environment, Session, SessionInfo};
pub use shells::{QUIET_DEFAULT, ShellCreate, ShellLine, ShellStats, end_line};
pub use signals::parse as parse_signal;
use table::Table;

/// How long an agent may take to start a command.
const START_ANSWER_MAX: Duration = Duration::from_secs(15);
/// Shortest and longest time between two looks for idle sessions, which are closed at most this fraction late.
const LOOK_EVERY_MIN: Duration = Duration::from_millis(10);
const LOOK_EVERY_MAX: Duration = Duration::from_secs(10);
const LATE_FRACTION: u32 = 20;

/// What bounds commands, resolved.
#[derive(Clone, Debug)]
pub struct CommandsConfig {
    /// Sessions of one tenant; as many shells again (`AIO_BASH_MAX_SESSIONS`).
    pub sessions_max: usize,
    /// A session that nobody uses for this long is closed (`AIO_BASH_SESSION_TIMEOUT_SECS`).
    pub session_idle_max: Duration,
    /// The bash of commands, as the sandbox sees it; `None` is the first on its `PATH` (`AIO_BASH_BIN`).
    pub bash: Option<String>,
    /// Commands that run at once, over all tenants.
    pub running_max: usize,
    /// Those of one tenant.
    pub running_per_tenant_max: usize,
    /// The sandbox's memory limit, for messages.
    pub memory_mib_max: u64,
    pub default_user: Option<String>,
    /// Name of the daemon's own account, which a daemon that is not root accepts as `user`.
    pub daemon_account: Option<String>,
}

/// What to run.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Wanted {
    /// A script, for bash if there is one.
    Script(String),
    Bash(String),
    Sh(String),
    /// A program and its arguments, which nothing parses.
    Words(Vec<String>),
}

/// A command as it is asked for.
#[derive(Clone, Debug)]
pub struct Run {
    pub wanted: Wanted,
    /// `None` asks for a generated session; one that is new is made.
    pub session: Option<String>,
    /// Relative to the session's.
    pub cwd: Option<String>,
    /// The session's later commands start there too.
    pub keeps_cwd: bool,
    pub env: Environment,
    pub user: Option<String>,
    /// It is killed then.
    pub hard_timeout: Option<Duration>,
    /// Nobody could write to it before it ends.
    pub stdin_ends: bool,
}

/// A command that was started.
#[derive(Debug)]
pub struct Running {
    pub command: Arc<Command>,
    /// What happened to the session before.
    pub hint: Option<String>,
    guard: Guard,
}

/// Kills a command whose caller goes away.
#[derive(Debug)]
struct Guard(Option<Arc<Command>>);

impl Running {
    /// It goes on without its caller.
    pub fn let_go(&mut self) {
        self.guard.0 = None;
    }
}

impl Drop for Guard {
    fn drop(&mut self) {
        if let Some(command) = self.0.take() {
            command.kill();
        }
    }
}

/// A session to make.
#[derive(Clone, Debug, Default)]
pub struct Create {
    pub id: Option<String>,
    pub cwd: Option<String>,
    pub env: Environment,
    pub user: Option<String>,
}

/// Runs commands. One per daemon.
pub struct Commands {
    config: CommandsConfig,
    launcher: Arc<dyn Launch>,
    tenants: Tenants,
    admission: Admission,
    store: Store,
    sessions: Table,
    shells: Table,
    pools: Mutex<HashMap<TenantId, Arc<Pool>>>,
    facts: facts::Facts,
}

/// Who a command runs as, and in which space.
struct Settled {
    account: Account,
    space: SpaceId,
    hello: Arc<Hello>,
}

impl Commands {
    pub fn new(config: CommandsConfig, launcher: Arc<dyn Launch>, store: Store) -> Arc<Commands> {
        let quota = CellQuota {
            running_max: config.running_max,
            running_per_tenant_max: config.running_per_tenant_max,
            waiting_max: 0,
        };
        Arc::new(Commands {
            launcher,
            tenants: Tenants::new(store.clone()),
            admission: Admission::new(quota),
            store,
            sessions: Table::new(config.sessions_max, config.session_idle_max),
            shells: Table::new(config.sessions_max, config.session_idle_max),
            pools: Mutex::default(),
            facts: facts::Facts::default(),
            config,
        })
    }

    /// Closes idle sessions until nobody holds the commands any more.
    pub async fn reap(commands: Weak<Commands>) {
        while let Some(held) = commands.upgrade() {
            let every = (held.config.session_idle_max / LATE_FRACTION).clamp(LOOK_EVERY_MIN, LOOK_EVERY_MAX);
            held.sessions.close_idle();
            held.shells.close_idle();
            drop(held);
            tokio::time::sleep(every).await;
        }
    }

    /// Ends everything and takes nothing new.
    pub fn shutdown(&self) {
        self.admission.close();
        self.sessions.shut_down();
        self.shells.shut_down();
    }

    /// Starts a command. `Err` promises that nothing was started.
    pub async fn run(&self, tenant: &TenantId, run: Run) -> Result<Running, Refused> {
        let settled = self.settle(tenant, run.user.as_deref()).await?;
        let id = match &run.session {
            Some(id) => parse_id(id)?,
            None => SessionId::generate(),
        };
        let birth = || self.birth(tenant, &id, &settled, None, Vec::new());
        let (session, made) = self.sessions.find_or_create(tenant, &id, || Session::new(birth()))?;
        self.check_user(&session, run.user.as_deref(), &settled)?;
        let unborn = Unborn { table: &self.sessions, session: made.then_some(&session) };
        let running = self.run_in(&session, run).await?;
        unborn.keep();
        Ok(running)
    }

    async fn run_in(&self, session: &Arc<Session>, run: Run) -> Result<Running, Refused> {
        let place = self.admission.try_admit(&session.birth.tenant);
        let place = place.map_err(|taken| Refused::TooManyCommands { max: taken.max })?;
        let agent = session.agent(&*self.launcher, self.config.memory_mib_max).await?;
        let (program, text) = self.program(&agent, run.wanted)?;
        let cwd = session.directory(run.cwd.as_deref());
        let number = agent.number();
        let shown = cwd.clone().unwrap_or_else(|| HOME_DIR.to_owned());
        let origin = self.origin(session, Ran::Command);
        let command = Command::new(text, shown, number, origin, &agent, Some(place));
        session.add(&command)?;
        let mut env = session.birth.env.clone();
        env.extend(run.env);
        let start =
            Start { program, cwd: cwd.clone(), env, stdin_ends: run.stdin_ends, source: None, calls: None };
        agent.listen(number, Route::Command(Arc::downgrade(&command)));
        let guard = begin(session, &agent, &command, &Request::Start { number, start }).await?;
        if let Some(cwd) = cwd.filter(|_| run.keeps_cwd) {
            session.change_directory(cwd);
        }
        if let Some(limit) = run.hard_timeout {
            let command = Arc::clone(&command);
            tokio::spawn(async move {
                if tokio::time::timeout(limit, command.ended()).await.is_err() {
                    command.time_out();
                }
            });
        }
        Ok(Running { command, hint: session.take_hint(), guard })
    }

    /// A command of the tenant's.
    pub fn command(&self, tenant: &TenantId, id: &str) -> Result<Arc<Command>, Refused> {
        // At most as many as there may be sessions with their commands, in memory.
        for session in self.sessions.list(tenant) {
            if let Some(command) = session.command(id) {
                session.touch();
                return Ok(command);
            }
        }
        Err(Refused::NoSuchCommand(id.chars().take(100).collect()))
    }

    /// A session's command of that id, else the one that runs or ran last.
    pub fn command_of(
        &self,
        tenant: &TenantId,
        session: &str,
        id: Option<&str>,
    ) -> Result<Arc<Command>, Refused> {
        let session = self.sessions.find(tenant, session)?;
        session.touch();
        match id {
            Some(id) => {
                session.command(id).ok_or_else(|| Refused::NoSuchCommand(id.chars().take(100).collect()))
            }
            None => session.current().ok_or_else(|| Refused::NoCommandYet(session.birth.id.to_string())),
        }
    }

    /// Makes a session ahead of its first command; one that exists is returned as it is.
    pub async fn session_create(&self, tenant: &TenantId, create: Create) -> Result<SessionInfo, Refused> {
        let settled = self.settle(tenant, create.user.as_deref()).await?;
        let id = create.id.as_deref().map_or_else(|| Ok(SessionId::generate()), parse_id)?;
        let birth = || self.birth(tenant, &id, &settled, create.cwd.clone(), create.env.clone());
        let (session, made) = self.sessions.find_or_create(tenant, &id, || Session::new(birth()))?;
        self.check_user(&session, create.user.as_deref(), &settled)?;
        let unborn = Unborn { table: &self.sessions, session: made.then_some(&session) };
        if made && create.cwd.is_some() {
            self.check_directory(&session).await?;
        }
        unborn.keep();
        session.touch();
        Ok(session.info())
    }

    pub fn sessions_list(&self, tenant: &TenantId) -> Vec<SessionInfo> {
        self.sessions.list(tenant).iter().map(|session| session.info()).collect()
    }

    pub fn session_delete(&self, tenant: &TenantId, id: &str) -> Result<(), Refused> {
        let session = self.sessions.find(tenant, id)?;
        self.sessions.close(&session, "the session was closed");
        Ok(())
    }

    /// Whether the session's directory is one: a command that is nothing is refused for it, or ends at once.
    async fn check_directory(&self, session: &Arc<Session>) -> Result<(), Refused> {
        let agent = session.agent(&*self.launcher, self.config.memory_mib_max).await?;
        let cwd = session.directory(None);
        let number = agent.number();
        let shown = cwd.clone().unwrap_or_default();
        let program = Program::Words(Vec::new());
        let start = Start { program, cwd, env: Vec::new(), stdin_ends: true, source: None, calls: None };
        let probe =
            Command::new(String::new(), shown, number, self.origin(session, Ran::Command), &agent, None);
        agent.listen(number, Route::Command(Arc::downgrade(&probe)));
        agent.send(&Request::Start { number, start })?;
        match tokio::time::timeout(START_ANSWER_MAX, probe.started()).await {
            Ok(answer) => answer,
            Err(_elapsed) => Err(Refused::LaunchFailed),
        }
    }

    async fn settle(&self, tenant: &TenantId, user: Option<&str>) -> Result<Settled, Refused> {
        self.admission.check_open().map_err(|_closed| Refused::ShuttingDown)?;
        let hello = zygote::attached(&*self.launcher).await.ok_or(Refused::LaunchFailed)?;
        let default_user = self.config.default_user.as_deref();
        let account = identity::resolve(user, default_user, self.config.daemon_account.as_deref(), &hello);
        let account = account.map_err(|cannot| match (user, cannot) {
            (None, cannot) => Refused::DefaultUser(cannot.to_string()),
            (_, CannotRunAs::NoSuchAccount { user }) => Refused::NoSuchUser(user),
            (_, CannotRunAs::NotRoot { user, uid }) => Refused::NotRoot { user, uid },
            (_, CannotRunAs::Root { user }) => Refused::Root(user),
            (_, CannotRunAs::FixedInSession { user, fixed }) => Refused::FixedUser { user, fixed },
        })?;
        let space = self.tenants.space_of(tenant).await.map_err(|error| {
            tracing::error!(%error, tenant = tenant.0, "no space for a tenant");
            Refused::LaunchFailed
        })?;
        Ok(Settled { account, space, hello })
    }

    fn check_user(&self, session: &Session, user: Option<&str>, settled: &Settled) -> Result<(), Refused> {
        match user {
            Some(user) if session.birth.account != settled.account => {
                let fixed = identity::account_name(session.birth.account, &settled.hello);
                Err(Refused::FixedUser { user: user.to_owned(), fixed })
            }
            _ => Ok(()),
        }
    }

    fn birth(
        &self,
        tenant: &TenantId,
        id: &SessionId,
        settled: &Settled,
        cwd: Option<String>,
        env: Environment,
    ) -> Birth {
        Birth {
            id: id.clone(),
            tenant: tenant.clone(),
            space: settled.space,
            account: settled.account,
            env,
            cwd,
            quiet_max: QUIET_DEFAULT,
        }
    }

    fn origin(&self, session: &Session, ran: Ran) -> Origin {
        let tenant = session.birth.tenant.clone();
        let pool = {
            let mut pools = self.pools.lock().expect("no code panics while it holds the pools");
            Arc::clone(pools.entry(tenant.clone()).or_default())
        };
        Origin { tenant, session: session.birth.id.clone(), ran, pool, store: self.store.clone() }
    }

    fn bash(&self, agent: &Agent) -> Option<String> {
        self.config.bash.clone().or_else(|| agent.found.bash.clone())
    }

    /// The program of a command, and its text.
    fn program(&self, agent: &Agent, wanted: Wanted) -> Result<(Program, String), Refused> {
        let bash = || self.bash(agent).ok_or(Refused::NoShell("bash"));
        let sh = || agent.found.sh.clone().ok_or(Refused::NoShell("sh"));
        let (shell, text) = match wanted {
            Wanted::Words(words) => {
                let text = words.first().cloned().unwrap_or_default();
                return Ok((Program::Words(words), text));
            }
            Wanted::Script(text) => (bash().or_else(|_| sh())?, text),
            Wanted::Bash(text) => (bash()?, text),
            Wanted::Sh(text) => (sh()?, text),
        };
        Ok((Program::Script { shell, text: text.clone() }, text))
    }
}

/// Sends what starts a command and waits for the agent's word. From here on something may run, so a caller that goes
/// away takes it along.
async fn begin(
    session: &Session,
    agent: &Arc<Agent>,
    command: &Arc<Command>,
    request: &Request,
) -> Result<Guard, Refused> {
    if let Err(refused) = agent.send(request) {
        session.take_back(command);
        return Err(refused);
    }
    let guard = Guard(Some(Arc::clone(command)));
    match tokio::time::timeout(START_ANSWER_MAX, command.started()).await {
        Ok(Ok(())) => Ok(guard),
        Ok(Err(refused)) => {
            session.take_back(command);
            Err(refused)
        }
        // It may have been started, and may have stopped its agent: an answer about it, and not a refusal.
        Err(_elapsed) => {
            command.note_time_out();
            agent.end("its agent did not answer");
            command.ended().await;
            Ok(guard)
        }
    }
}

fn parse_id(id: &str) -> Result<SessionId, Refused> {
    SessionId::parse(id).map_err(|invalid| Refused::InvalidSessionId(invalid.to_string()))
}

/// Takes a session out again that was made for a request which was then refused, or whose caller went away.
struct Unborn<'a> {
    table: &'a Table,
    session: Option<&'a Arc<Session>>,
}

impl Unborn<'_> {
    fn keep(mut self) {
        self.session = None;
    }
}

impl Drop for Unborn<'_> {
    fn drop(&mut self) {
        if let Some(session) = self.session {
            self.table.close(session, "the session was closed");
        }
    }
}
