//! From a ready shell to a confined interpreter that waits to be released: pipes, the job, and the ways in: a
//! zygote's fork, a fork of the launcher that executes, or, without namespaces, a fork of init that does.

use std::ffi::{CStr, CString};
use std::io;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd};
use std::path::PathBuf;

use rustix::pipe::{PipeFlags, pipe_with};

use crate::launcher::child::{self, Thread};
use crate::launcher::plan::{Profile, Step};
use crate::launcher::rules::Rules;
use crate::launcher::shell::{AtStep, Shell, StepError};
use crate::launcher::wire::{self, Job, Launch, slot, step};
use crate::sys::process::{Fork, fork};
use crate::sys::{packet, raw};

/// The launcher's and the daemon's ends of a guest's pipes.
#[derive(Debug)]
pub struct Ends {
    /// A child's report: waiting, or the step that failed.
    pub status: OwnedFd,
    /// One byte lets the guest go.
    pub release: OwnedFd,
    /// Requests (write), events (read), stdout (read), stderr (read).
    pub daemon: [OwnedFd; 4],
}

/// The guest's ends, in the order of [`slot`].
struct Fixed {
    fds: [OwnedFd; slot::FIXED],
}

/// Hands a job to a zygote.
pub fn fork_into(
    shell: &Shell,
    rules: &Rules,
    account: usize,
    zygote: BorrowedFd<'_>,
) -> Result<Ends, StepError> {
    let (ends, fixed) = pipes(shell, rules, account, Channel::Pipe).at(Step::Descriptors)?;
    let job = job(shell, rules, account);
    let descriptors = descriptors(&fixed, shell);
    packet::send(zygote, wire::bytes_of(&job), &descriptors).at(Step::Zygote)?;
    Ok(ends)
}

/// What an exec'd interpreter starts as.
#[derive(Debug)]
pub struct Program {
    path: CString,
    arguments: Vec<CString>,
    environment: Vec<CString>,
    home: CString,
    channel: Channel,
}

/// How an interpreter is started, in the paths that its sandboxes see.
#[derive(Clone, Debug)]
pub struct InterpreterStart {
    pub binary: String,
    /// Depend on its version.
    pub flags: Vec<&'static str>,
    pub harness: String,
}

/// What guests are started with, in the paths that their sandboxes see.
#[derive(Clone, Debug)]
pub struct Programs {
    pub python: Option<InterpreterStart>,
    pub node: Option<InterpreterStart>,
    /// Pythons of the kernels, as the daemon was told of them.
    pub kernels: Vec<InterpreterStart>,
    /// Our own binary.
    pub own: String,
    /// `PATH` of guests.
    pub path: String,
}

impl Programs {
    pub fn has(&self, profile: Profile, interpreter: u8) -> bool {
        match profile {
            Profile::Kernel => usize::from(interpreter) < self.kernels.len(),
            _ if interpreter != 0 => false,
            Profile::Python | Profile::PythonData => self.python.is_some(),
            Profile::Node => self.node.is_some(),
            Profile::Files | Profile::Commands => true,
        }
    }

    /// What a profile executes; `None` where this host does not have it.
    pub fn program(&self, profile: Profile, interpreter: u8, user: &str, place: &Place) -> Option<Program> {
        let start = match profile {
            Profile::Python | Profile::PythonData => self.python.as_ref(),
            Profile::Node => self.node.as_ref(),
            Profile::Kernel => self.kernels.get(usize::from(interpreter)),
            Profile::Files | Profile::Commands => {
                let words = [self.own.as_str(), OWN_WORD, profile.name()];
                let channel = if profile == Profile::Files { Channel::Socket } else { Channel::Pipe };
                return Some(Program { channel, ..Program::of(&words, &self.path, user, place) });
            }
        };
        start.map(|start| Program::new(start, &self.path, user, place))
    }
}

/// First argument of our own binary in a sandbox.
pub const OWN_WORD: &str = "inside";

/// What a guest's descriptor 3 is.
#[derive(Copy, Clone, Debug, PartialEq, Eq)]
enum Channel {
    Pipe,
    /// Carries descriptors too. Never where guest code runs: a socket lets its holder delay whoever closes the
    /// other end.
    Socket,
}

/// Where a guest finds its space.
#[derive(Clone, Debug)]
pub struct Place {
    pub home: String,
    pub tmp: String,
}

impl Place {
    /// In a root of its own.
    pub fn inside() -> Place {
        Place { home: "/home/sandbox".to_owned(), tmp: "/tmp".to_owned() }
    }

    /// On the host: `data`, `tmp` and `home` of the space.
    pub fn on_host([_, tmp, home]: &[PathBuf; 3]) -> Place {
        let text = |path: &PathBuf| path.to_string_lossy().into_owned();
        Place { home: text(home), tmp: text(tmp) }
    }
}

impl Program {
    /// An interpreter with its harness.
    pub fn new(start: &InterpreterStart, path: &str, user: &str, place: &Place) -> Program {
        let words = [&[start.binary.as_str()], &start.flags[..], &[start.harness.as_str()]].concat();
        Program::of(&words, path, user, place)
    }

    /// Any program, with an environment built from nothing.
    pub fn of(words: &[&str], path: &str, user: &str, place: &Place) -> Program {
        let text = |word: &str| CString::new(word).expect("our own words have no NUL");
        let mut environment: Vec<CString> = ENVIRONMENT.iter().map(|word| text(word)).collect();
        for (name, value) in
            [("PATH", path), ("HOME", &place.home), ("TMPDIR", &place.tmp), ("USER", user), ("LOGNAME", user)]
        {
            environment.push(text(&format!("{name}={value}")));
        }
        Program {
            path: text(words[0]),
            arguments: words.iter().map(|word| text(word)).collect(),
            environment,
            home: text(&place.home),
            channel: Channel::Pipe,
        }
    }
}

/// Environment of an exec'd interpreter, whatever its place.
const ENVIRONMENT: [&str; 4] =
    ["LANG=C.UTF-8", "MPLBACKEND=Agg", "OPENBLAS_NUM_THREADS=1", "SHELL=/bin/bash"];

/// Hands the job to the init of a shell without namespaces, which forks and executes.
pub fn fork_by_init(
    shell: &Shell,
    rules: &Rules,
    account: usize,
    program: &Program,
) -> Result<Ends, StepError> {
    let (ends, fixed) = pipes(shell, rules, account, program.channel).at(Step::Descriptors)?;
    let mut launch = Launch {
        job: job(shell, rules, account),
        argument_count: program.arguments.len() as u32,
        environment_count: program.environment.len() as u32,
        words: [0; wire::LAUNCH_WORD_BYTES],
    };
    let words = [&program.home, &program.path];
    let words: Vec<&CString> =
        words.into_iter().chain(&program.arguments).chain(&program.environment).collect();
    let bytes: Vec<u8> = words.iter().flat_map(|word| word.as_bytes_with_nul()).copied().collect();
    if words.len() > wire::LAUNCH_WORDS_MAX || bytes.len() > wire::LAUNCH_WORD_BYTES {
        return Err(io::Error::from(io::ErrorKind::ArgumentListTooLong)).at(Step::Exec);
    }
    launch.words[..bytes.len()].copy_from_slice(&bytes);
    let descriptors = descriptors(&fixed, shell);
    packet::send(&shell.socket, wire::bytes_of(&launch), &descriptors).at(Step::InitExec)?;
    Ok(ends)
}

/// Forks the launcher and executes the program once released.
pub fn exec_into(shell: &Shell, rules: &Rules, account: usize, program: &Program) -> Result<Ends, StepError> {
    let (ends, fixed) = pipes(shell, rules, account, program.channel).at(Step::Descriptors)?;
    let job = job(shell, rules, account);
    let descriptors: Vec<i32> = descriptors(&fixed, shell).iter().map(AsRawFd::as_raw_fd).collect();
    // Everything the child spends exists before the fork.
    let arguments: Vec<&CStr> = program.arguments.iter().map(CString::as_c_str).collect();
    let environment: Vec<&CStr> = program.environment.iter().map(CString::as_c_str).collect();
    let mut argument_space = vec![0; arguments.len() + 1];
    let mut environment_space = vec![0; environment.len() + 1];
    let argv = raw::Pointers::collect(&arguments, &mut argument_space);
    let envp = raw::Pointers::collect(&environment, &mut environment_space);
    let (Some(argv), Some(envp)) = (argv, envp) else {
        return Err(io::Error::from(io::ErrorKind::InvalidInput)).at(Step::Exec);
    };
    let programs: Vec<&[u64]> = rules.first.iter().chain(&rules.second).map(Vec::as_slice).collect();
    let thread =
        Thread { tid: raw::tid_address().map_err(errno).at(Step::Clone)?, robust: (0, 0), rseq: (0, 0) };
    // SAFETY: the launcher has one thread.
    match unsafe { fork() }.at(Step::Clone)? {
        Fork::Parent(_) => Ok(ends),
        Fork::Child => {
            let mut status = descriptors[slot::STATUS];
            let entered = child::move_in(&job, &descriptors, thread).and_then(|()| {
                // Signals as from a shell; the launcher blocks those it waits for.
                raw::unblock_signals().map_err(|errno| child::Failed(step::THREAD, errno))?;
                child::confine(&job, &descriptors, thread, &programs, &program.home)
            });
            if let Err(failed) = entered {
                if failed.0 > step::DESCRIPTORS {
                    status = slot::STATUS as i32;
                }
                child::give_up(status, &failed);
            }
            // Released: there is nobody to report to any more; the launcher sees the exit.
            raw::execve(&program.path, &argv, &envp);
            raw::exit(127)
        }
    }
}

fn errno(number: i32) -> io::Error {
    io::Error::from_raw_os_error(number)
}

fn job(shell: &Shell, rules: &Rules, account: usize) -> Job {
    let (uid, gid) = rules.live_ids(shell.block, account);
    let namespaces =
        wire::NAMESPACES.iter().enumerate().filter(|(_, kind)| rules.namespaces().contains(kind));
    let mut job = Job {
        magic: wire::JOB_MAGIC,
        uid,
        gid,
        namespaces: namespaces.map(|(index, _)| 1 << index).sum(),
        cgroups: shell.leaf.join.len() as u32,
        landlock: u32::from(shell.ruleset.is_some()),
        keep_groups: u32::from(!rules.own_ids),
        unprivileged: u32::from(rules.unprivileged()),
        ends_with_parent: u32::from(shell.bare),
        limit_count: rules.limits.len() as u32,
        ..Job::default()
    };
    job.limits[..rules.limits.len()].copy_from_slice(&rules.limits);
    job
}

fn descriptors<'a>(fixed: &'a Fixed, shell: &'a Shell) -> Vec<BorrowedFd<'a>> {
    let mut all: Vec<BorrowedFd<'a>> = fixed.fds.iter().map(AsFd::as_fd).collect();
    if let Some(ruleset) = &shell.ruleset {
        all[slot::RULESET] = ruleset.as_fd();
    }
    all.extend(shell.namespaces.iter().map(AsFd::as_fd));
    all.extend(shell.leaf.join.iter().map(AsFd::as_fd));
    all
}

/// Six pipes. The capture pipes belong to the guest, so that `/dev/stdout` opens; the control pipes stay
/// ours, so that a guest cannot reopen their other direction.
fn pipes(shell: &Shell, rules: &Rules, account: usize, channel: Channel) -> io::Result<(Ends, Fixed)> {
    let pipe = || pipe_with(PipeFlags::CLOEXEC);
    let (requests_read, requests_write) = match channel {
        Channel::Pipe => pipe()?,
        Channel::Socket => packet::pair()?,
    };
    let (events_read, events_write) = pipe()?;
    let (stdout_read, stdout_write) = pipe()?;
    let (stderr_read, stderr_write) = pipe()?;
    let (status_read, status_write) = pipe()?;
    let (release_read, release_write) = pipe()?;
    let id = rules.host_id(shell.block, account);
    for capture in [&stdout_write, &stderr_write] {
        let (uid, gid) = (rustix::fs::Uid::from_raw(id), rustix::fs::Gid::from_raw(id));
        rustix::fs::fchown(capture, Some(uid), Some(gid))?;
    }
    // A description of its own for each guest: flags and locks on it are nobody else's.
    let flags = rustix::fs::OFlags::RDWR | rustix::fs::OFlags::CLOEXEC;
    let null = rustix::fs::open("/dev/null", flags, rustix::fs::Mode::empty())?;
    let spare = rustix::io::fcntl_dupfd_cloexec(&null, 0)?;
    let daemon = [requests_write, events_read, stdout_read, stderr_read];
    let ends = Ends { status: status_read, release: release_write, daemon };
    let fds =
        [null, stdout_write, stderr_write, requests_read, events_write, status_write, release_read, spare];
    Ok((ends, Fixed { fds }))
}
