//! Starting another stage of our own program with descriptors at fixed numbers.

use std::ffi::CString;
use std::io;
use std::os::fd::{AsRawFd, BorrowedFd, OwnedFd};

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

/// Starts it. The environment is empty: nothing of ours, and no secret, reaches a stage that way.
///
/// # Safety
/// As [`process::fork`].
pub unsafe fn start(stage: &Stage<'_>) -> io::Result<Pid> {
    let mut words = vec!["caisson"];
    words.extend(stage.arguments);
    let words: Vec<CString> = words.into_iter().map(CString::new).collect::<Result<_, _>>()?;
    // SAFETY: the caller vouches for the single thread.
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

/// Takes the descriptors that a stage was started with. `count` of them.
///
/// # Safety
/// Called once, at the start of a stage that was started by [`start`] with that many descriptors.
pub unsafe fn inherited(count: usize) -> Vec<OwnedFd> {
    (0..count)
        .map(|index| {
            let number = FIRST_DESCRIPTOR + index as i32;
            // Not for the stages' own children.
            let _ = rustix::io::fcntl_setfd(
                // SAFETY: the caller vouches for an open descriptor of this number.
                unsafe { BorrowedFd::borrow_raw(number) },
                rustix::io::FdFlags::CLOEXEC,
            );
            // SAFETY: the caller vouches that it is open and that nobody else owns it.
            unsafe { std::os::fd::FromRawFd::from_raw_fd(number) }
        })
        .collect()
}
