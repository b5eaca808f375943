//! Every reason not to run a cell, with the facts that a message needs. No status codes: families
//! choose those.
#![forbid(unsafe_code)]

/// A request we did not run. Nothing was started.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum Refusal {
    #[error("Maximum number of sessions ({max}) reached")]
    TooManySessions { max: usize },
    #[error("Maximum number of kernel sessions ({max}) reached")]
    TooManyKernelSessions { max: usize },
    /// A queue in front of a session, tenant or the daemon is full.
    #[error("Too many calls are waiting ({max})")]
    TooManyWaiting { max: usize },
    #[error("No interpreter for {language}: {looked_for} was not found")]
    NoInterpreter { language: &'static str, looked_for: String },
    /// Kernels were asked for and this deployment has none.
    #[error("No kernel: {why}")]
    NoKernel { why: String },
    #[error("unknown kernel '{name}'; available: {}", available.join(", "))]
    UnknownKernel { name: String, available: Vec<String> },
    #[error("cwd is not a directory: {cwd}")]
    NotADirectory { cwd: String },
    #[error("{0}")]
    InvalidSessionId(String),
    #[error("the daemon is shutting down")]
    ShuttingDown,
    /// The sandbox could not be made. The step and errno are in the log under the request id.
    #[error("the sandbox could not be started; the operator's log has the reason")]
    LaunchFailed,
}
