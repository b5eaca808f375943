//! The first process of `caisson serve`: holds the listeners and the privileges of the start, starts launcher
//! and daemon, and starts again what died.
//!
//! ```text
//! launcher dies ──▶ a new launcher; the daemon gets its socket and goes on (sessions are lost)
//! daemon dies   ──▶ its launcher ends with it; a new pair
//! SIGTERM       ──▶ the daemon drains, then the launcher ends; a second signal hurries
//! we die        ──▶ the daemon is killed by the kernel, and the launcher ends for want of a daemon
//! ```
//!
//! One thread; no HTTP, no guest's byte, no plan passes here.
#![forbid(unsafe_code)]

use std::collections::{HashSet, VecDeque};
use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::time::{Duration, Instant};

use nix::sys::signal::{SigSet, Signal};
use nix::sys::signalfd::{SfdFlags, SignalFd};
use nix::sys::wait::{WaitPidFlag, WaitStatus, waitpid};
use nix::unistd::Pid;
use rustix::event::{PollFd, PollFlags, Timespec, poll};

use crate::launcher::bare;
use crate::launcher::settings::Settings;
use crate::supervisor::stages::{Account, daemon_stage, launcher_stage};
use crate::sys::packet;
use crate::sys::process::{Exit, reap_one};

pub mod resolve;
pub mod stages;

/// Restarts within [`RESTART_WINDOW`] after which we give up: something is wrong that a restart does not mend.
const RESTARTS_MAX: usize = 8;
const RESTART_WINDOW: Duration = Duration::from_secs(60);
/// Wait before a restart.
const RESTART_WAIT: Duration = Duration::from_millis(100);
/// How long a stage may take to end after a second signal.
const HURRY: Duration = Duration::from_secs(6);
/// Exit code of a launcher on a host that enforces less than required.
pub const EXIT_ISOLATION: u8 = 3;

/// What to supervise.
#[derive(Debug)]
pub struct Supervisor {
    /// What the daemon serves on: its listeners, or the two ends of the one client it serves.
    pub descriptors: Vec<OwnedFd>,
    /// The daemon serves one client, and its end is the end of all.
    pub ends_with_daemon: bool,
    pub settings: Settings,
    /// The daemon's configuration, as it reads it.
    pub daemon_config: Vec<u8>,
    pub log: String,
    /// Account of the daemon; `None` when we were not started as root.
    pub account: Option<Account>,
    /// The daemon's folder.
    pub daemon_dir: std::path::PathBuf,
}

/// Why serving ended.
#[derive(Debug, thiserror::Error)]
pub enum ServeError {
    #[error("failed to {what}")]
    Io { what: &'static str, source: io::Error },
    /// The launcher has said on the log what is missing.
    #[error("this host enforces less isolation than required; `caisson doctor` shows what to grant")]
    Isolation,
    #[error("the daemon did not end in order; the lines above say why")]
    Daemon,
    #[error("launcher or daemon died {RESTARTS_MAX} times within {} s", RESTART_WINDOW.as_secs())]
    Restarts,
}

struct Running {
    launcher: Pid,
    daemon: Pid,
    /// Carries the sockets of later launchers to the daemon.
    control: OwnedFd,
}

impl Supervisor {
    /// Serves until a signal asks to end.
    pub fn run(&self) -> Result<(), ServeError> {
        let io = |what| move |source: io::Error| ServeError::Io { what, source };
        let mut mask = SigSet::empty();
        for signal in [Signal::SIGCHLD, Signal::SIGTERM, Signal::SIGINT, Signal::SIGHUP] {
            mask.add(signal);
        }
        mask.thread_block().map_err(|error| io("block signals")(error.into()))?;
        let signals = SignalFd::with_flags(&mask, SfdFlags::SFD_CLOEXEC | SfdFlags::SFD_NONBLOCK)
            .map_err(|error| io("open the signal descriptor")(error.into()))?;
        let mut running = self.start_pair().map_err(io("start launcher and daemon"))?;
        let mut restarts: VecDeque<Instant> = VecDeque::new();
        let mut ending: Option<Instant> = None;
        loop {
            wait(&signals, ending.map(|since| since + HURRY));
            while let Ok(Some(signal)) = signals.read_signal() {
                if signal.ssi_signo == Signal::SIGCHLD as u32 {
                    continue;
                }
                self.forward(&running, ending.is_some());
                ending.get_or_insert_with(Instant::now);
            }
            while let Some((pid, exit)) = reap_one() {
                if pid == running.daemon && (ending.is_some() || self.ends_with_daemon) {
                    end_launcher(running.launcher);
                    bare::kill_strays(&HashSet::new());
                    let is_done = ending.is_some() || exit == Exit::Code(0);
                    return if is_done { Ok(()) } else { Err(ServeError::Daemon) };
                }
                if pid == running.launcher && exit == Exit::Code(EXIT_ISOLATION) {
                    kill(running.daemon, Signal::SIGKILL);
                    return Err(ServeError::Isolation);
                }
                if pid != running.daemon && pid != running.launcher {
                    // A guest's that came to us: there may be more.
                    bare::kill_strays(&[running.daemon, running.launcher].into());
                    continue;
                }
                if ending.is_some() {
                    continue;
                }
                tracing::error!(
                    what = if pid == running.daemon { "daemon" } else { "launcher" },
                    ?exit,
                    "died"
                );
                if too_many(&mut restarts) {
                    kill(running.daemon, Signal::SIGKILL);
                    end_launcher(running.launcher);
                    return Err(ServeError::Restarts);
                }
                std::thread::sleep(RESTART_WAIT);
                // Without a pid namespace a dead launcher's guests are ours now.
                bare::kill_strays(&[running.daemon, running.launcher].into());
                if pid == running.launcher {
                    let (launcher, socket) = self.start_launcher().map_err(io("start a launcher"))?;
                    running.launcher = launcher;
                    if let Err(error) = send_launcher(&running.control, &socket) {
                        // The daemon died as well: its end starts a new pair, and this launcher has nobody.
                        tracing::warn!(%error, "the daemon does not take a launcher");
                    }
                } else {
                    end_launcher(running.launcher);
                    running = self.start_pair().map_err(io("start launcher and daemon"))?;
                }
            }
        }
    }

    fn start_pair(&self) -> io::Result<Running> {
        let (launcher, socket) = self.start_launcher()?;
        let (control, theirs) = packet::pair()?;
        let descriptors: Vec<BorrowedFd<'_>> = self.descriptors.iter().map(AsFd::as_fd).collect();
        let daemon = daemon_stage(self, theirs.as_fd(), &descriptors)?;
        send_launcher(&control, &socket)?;
        Ok(Running { launcher, daemon, control })
    }

    fn start_launcher(&self) -> io::Result<(Pid, OwnedFd)> {
        if self.settings.root() {
            bare::end_leftovers()?;
        }
        let (ours, theirs) = packet::pair()?;
        let pid = launcher_stage(&self.settings, &self.log, theirs.as_fd())?;
        Ok((pid, ours))
    }

    fn forward(&self, running: &Running, again: bool) {
        let signal = if again { Signal::SIGKILL } else { Signal::SIGTERM };
        tracing::info!(hurry = again, "ending");
        kill(running.daemon, signal);
    }
}

/// Hands the daemon the socket of a launcher.
fn send_launcher(control: &OwnedFd, socket: &OwnedFd) -> io::Result<()> {
    packet::send(control, b"L", &[socket.as_fd()])
}

fn wait(signals: &SignalFd, until: Option<Instant>) {
    let timeout = until.map(|at| at.saturating_duration_since(Instant::now()));
    let timeout = timeout
        .map(|wait| Timespec { tv_sec: wait.as_secs() as i64 + 1, tv_nsec: wait.subsec_nanos().into() });
    let mut one = [PollFd::new(signals, PollFlags::IN)];
    // Interrupted or late: the caller looks at everything anyway.
    let _ = poll(&mut one, timeout.as_ref());
}

fn kill(pid: Pid, signal: Signal) {
    // Gone already is what we want.
    let _ = nix::sys::signal::kill(pid, signal);
}

/// Asks the launcher to clean up, and ends it when it takes too long: everything below it ends with it.
fn end_launcher(pid: Pid) {
    kill(pid, Signal::SIGTERM);
    let deadline = Instant::now() + HURRY;
    while let Ok(WaitStatus::StillAlive) = waitpid(pid, Some(WaitPidFlag::WNOHANG)) {
        if Instant::now() >= deadline {
            kill(pid, Signal::SIGKILL);
            let _ = waitpid(pid, None);
            return;
        }
        std::thread::sleep(Duration::from_millis(5));
    }
}

fn too_many(restarts: &mut VecDeque<Instant>) -> bool {
    let now = Instant::now();
    restarts.retain(|at| now < *at + RESTART_WINDOW);
    restarts.push_back(now);
    restarts.len() > RESTARTS_MAX
}
