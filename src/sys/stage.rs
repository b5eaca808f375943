//! Starting another stage of our own program with descriptors at fixed numbers.

use std::ffi::CString;
use std::io;
use std::os::fd::{AsRawFd, BorrowedFd, FromRawFd, OwnedFd};
use std::sync::atomic::{AtomicBool, Ordering};

use nix::unistd::Pid;

use super::{process, raw};

/// Number of the first descriptor that a stage inherits.
pub const FIRST_DESCRIPTOR: i32 = 3;

/// What to start.
pub struct Stage<'a> {
    /// Our own executable, opened while we could.
    pub program: BorrowedFd<'a>,
    /// Arguments after the program's name.
    pub arguments: &'a [&'a str],
    /// Become [`FIRST_DESCRIPTOR`] and the following, in this order; nothing else is inherited.
    pub descriptors: &'a [BorrowedFd<'a>],
    /// `CLONE_NEW*` flags of namespaces that the stage is the first process of.
    pub namespaces: u64,
    /// Runs in the child before the exec, with everything still held.
    pub before: &'a dyn Fn() -> io::Result<()>,
}

/// Starts it. The environment is empty: nothing of ours, and no secret, reaches a stage that way. Refuses in a
/// process with a second thread, whose locks the child might find held for ever.
pub fn start(stage: &Stage<'_>) -> io::Result<Pid> {
    if std::fs::read_dir("/proc/self/task")?.count() != 1 {
        return Err(io::Error::other("a stage is started by a process with one thread"));
    }
    let mut words = vec!["caisson"];
    words.extend(stage.arguments);
    let words: Vec<CString> = words.into_iter().map(CString::new).collect::<Result<_, _>>()?;
    // SAFETY: there is one thread, as just seen, and nobody but it could start another.
    match unsafe { process::fork_as_first(stage.namespaces) }? {
        process::Fork::Parent(pid) => Ok(pid),
        process::Fork::Child => {
            let error = become_stage(stage, &words);
            // The log is still this process's standard error.
            let text = format!("error: failed to start {:?}: {error}\n", stage.arguments);
            let _ = io::Write::write_all(&mut io::stderr(), text.as_bytes());
            raw::exit(127)
        }
    }
}

/// Runs `attempt` in a child that is the first process of these namespaces. Returns the step that failed.
pub fn try_in(
    namespaces: u64,
    attempt: &dyn Fn() -> Result<(), (&'static str, io::Error)>,
) -> io::Result<Option<String>> {
    if std::fs::read_dir("/proc/self/task")?.count() != 1 {
        return Err(io::Error::other("namespaces are tried by a process with one thread"));
    }
    let (mut report, write) = io::pipe()?;
    // SAFETY: there is one thread, as just seen, and nobody but it could start another.
    let pid = match unsafe { process::fork_as_first(namespaces) } {
        Ok(process::Fork::Parent(pid)) => pid,
        Ok(process::Fork::Child) => {
            if let Err((step, error)) = attempt() {
                // Without a reader nobody asks.
                let _ = io::Write::write_all(&mut &write, format!("{step}: {error}").as_bytes());
            }
            raw::exit(0)
        }
        Err(error) => return Ok(Some(format!("clone: {error}"))),
    };
    drop(write);
    let mut failed = String::new();
    io::Read::read_to_string(&mut report, &mut failed)?;
    nix::sys::wait::waitpid(pid, None)?;
    Ok((!failed.is_empty()).then_some(failed))
}

fn become_stage(stage: &Stage<'_>, words: &[CString]) -> io::Error {
    /// Above the numbers about to be assigned.
    const PARKED: i32 = 256;
    let errno = |errno| io::Error::from_raw_os_error(errno);
    let arrange = || -> io::Result<i32> {
        let program = raw::dup_above(stage.program.as_raw_fd(), PARKED).map_err(errno)?;
        let mut parked = Vec::new();
        for descriptor in stage.descriptors {
            parked.push(raw::dup_above(descriptor.as_raw_fd(), PARKED).map_err(errno)?);
        }
        // The supervisor reads its signals from a descriptor and has them blocked.
        raw::unblock_signals().map_err(errno)?;
        // A terminal's Ctrl-C is for the supervisor: it lets the daemon finish before the launcher ends.
        nix::unistd::setsid()?;
        (stage.before)()?;
        let mut number = FIRST_DESCRIPTOR;
        for copy in parked {
            raw::dup3(copy, number, 0).map_err(errno)?;
            number += 1;
        }
        // What lies between is somebody else's; the parked ones close at the exec.
        for between in number..PARKED {
            let _ = raw::close(between);
        }
        Ok(program)
    };
    let program = match arrange() {
        Ok(program) => program,
        Err(error) => return error,
    };
    let words: Vec<_> = words.iter().map(CString::as_c_str).collect();
    let mut argument_space = vec![0; words.len() + 1];
    let mut environment_space = [0; 1];
    let argv = raw::Pointers::collect(&words, &mut argument_space);
    let envp = raw::Pointers::collect(&[], &mut environment_space);
    match (argv, envp) {
        (Some(argv), Some(envp)) => errno(raw::execve_fd(program, &argv, &envp)),
        _ => io::Error::from(io::ErrorKind::InvalidInput),
    }
}

/// Takes the `count` descriptors that a stage was started with, once in a process's life.
pub fn inherited(count: usize) -> io::Result<Vec<OwnedFd>> {
    static TAKEN: AtomicBool = AtomicBool::new(false);
    if TAKEN.swap(true, Ordering::SeqCst) {
        return Err(io::Error::other("the inherited descriptors were taken before"));
    }
    let mut found = Vec::with_capacity(count);
    for index in 0..count {
        let number = FIRST_DESCRIPTOR + index as i32;
        // Not for the stage's own children; and the proof that it is open.
        // SAFETY: `fcntl` with a number that is not open answers EBADF.
        let set = unsafe { libc::fcntl(number, libc::F_SETFD, libc::FD_CLOEXEC) };
        if set != 0 {
            return Err(io::Error::last_os_error());
        }
        // SAFETY: it is open, and nobody owns it: it came with the exec, and is given out once.
        found.push(unsafe { OwnedFd::from_raw_fd(number) });
    }
    Ok(found)
}
