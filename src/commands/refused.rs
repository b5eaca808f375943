//! Every reason not to do what was asked of the commands. No status codes: families choose those.
#![forbid(unsafe_code)]

/// A request that was not carried out.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum Refused {
    #[error("No session '{0}'")]
    NoSuchSession(String),
    #[error("No command '{0}'")]
    NoSuchCommand(String),
    #[error("Session '{0}' has run no command")]
    NoCommandYet(String),
    #[error("command is not running: {0}")]
    NotRunning(String),
    #[error("session '{0}' is busy with a command")]
    Busy(String),
    #[error("cwd is not a directory: {0}")]
    NotADirectory(String),
    #[error("unknown signal '{0}'; use a name such as SIGTERM, SIGKILL or SIGINT")]
    UnknownSignal(String),
    #[error("no such user: {0}")]
    NoSuchUser(String),
    #[error("cannot run as {user}: daemon runs as uid {uid} and only root can change identity")]
    NotRoot { user: String, uid: u32 },
    #[error("cannot run as {0}: uid 0 is never available to guest code")]
    Root(String),
    #[error("cannot run as {user}: the session runs as {fixed}")]
    FixedUser { user: String, fixed: String },
    /// The operator's setting cannot be had.
    #[error("the configured default user cannot be used: {0}")]
    DefaultUser(String),
    #[error("{0}")]
    InvalidSessionId(String),
    #[error("No shell: {0} was not found in the sandbox")]
    NoShell(&'static str),
    #[error("No interpreter: {0} was not found")]
    NoInterpreter(&'static str),
    #[error("Maximum number of sessions ({max}) reached")]
    TooManySessions { max: usize },
    #[error("Too many commands are running ({max})")]
    TooManyCommands { max: usize },
    #[error("the command has not read its input yet ({max} bytes wait)")]
    InputFull { max: usize },
    #[error("too many requests wait for this session")]
    Overrun,
    #[error("the daemon is shutting down")]
    ShuttingDown,
    /// The step and errno are in the log under the request id. Nothing was started.
    #[error("the sandbox could not be started; the operator's log has the reason")]
    LaunchFailed,
}
