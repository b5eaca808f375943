//! Making processes: the launcher's forks, and the start of a sandbox's init.

use std::ffi::c_void;
use std::io;
use std::os::fd::{AsRawFd, BorrowedFd, FromRawFd, OwnedFd};

use nix::unistd::Pid;
use rustix::process::WaitOptions;

use super::raw;

/// How a process ended.
#[derive(Copy, Clone, Debug, PartialEq, Eq)]
pub enum Exit {
    Code(u8),
    Signal(u8),
}

/// A child that has ended, if one has. Not by `nix`: its `waitpid` takes the death by a real-time signal, which
/// may be a guest's to choose, off the kernel's list and answers with an error that names nobody.
pub fn reap_one() -> Option<(Pid, Exit)> {
    // Of any kind: whatever signal their end sends.
    let options = WaitOptions::from_bits_retain(libc::__WALL as u32) | WaitOptions::NOHANG;
    loop {
        let (pid, status) = rustix::process::wait(options).ok()??;
        let exit = match (status.exit_status(), status.terminating_signal()) {
            (Some(code), _) => Exit::Code(code as u8),
            (_, Some(signal)) => Exit::Signal(signal as u8),
            _ => continue,
        };
        return Some((Pid::from_raw(pid.as_raw_nonzero().get()), exit));
    }
}

/// Gives the signals that a terminal or a shell's `&` decides about their default meaning again, for this process and
/// what it starts: an interpreter that finds SIGINT ignored does not listen to it.
pub fn default_signals() -> io::Result<()> {
    use nix::sys::signal::{SigHandler, Signal, signal};
    for number in [Signal::SIGINT, Signal::SIGQUIT, Signal::SIGHUP] {
        // SAFETY: the default action runs no code of ours.
        unsafe { signal(number, SigHandler::SigDfl) }?;
    }
    Ok(())
}

/// Which side of a fork this is.
#[derive(Debug)]
pub enum Fork {
    Child,
    Parent(Pid),
}

/// Copies this process.
///
/// # Safety
/// This process must have one thread only: the child may then use everything its maker could. The launcher
/// and the supervisor never start a second one.
pub unsafe fn fork() -> io::Result<Fork> {
    // SAFETY: the caller vouches for the single thread.
    match unsafe { libc::fork() } {
        -1 => Err(io::Error::last_os_error()),
        0 => Ok(Fork::Child),
        pid => Ok(Fork::Parent(Pid::from_raw(pid))),
    }
}

/// Copies this process into a new pid namespace and a new mount namespace; the child is pid 1 there.
///
/// # Safety
/// As [`fork`].
pub unsafe fn fork_as_first(flags: u64) -> io::Result<Fork> {
    match raw::fork(flags | raw::SIGCHLD) {
        Ok(0) => Ok(Fork::Child),
        Ok(pid) => Ok(Fork::Parent(Pid::from_raw(pid as i32))),
        Err(errno) => Err(io::Error::from_raw_os_error(errno)),
    }
}

/// Bytes of stack for the moment between clone and exec.
const START_STACK_BYTES: usize = 32 * 1024;

struct InitStart {
    socket: i32,
    program: i32,
    /// Its user namespace maps no id of it, or none at all yet.
    unmapped: bool,
}

/// Starts `program` (a memfd) as pid 1 of the namespaces in `flags`, with `socket` as its descriptor 3.
/// Its memory is never a copy of ours: the clone shares it, and we sleep until the exec.
pub fn start_init(flags: u64, socket: BorrowedFd<'_>, program: BorrowedFd<'_>) -> io::Result<(Pid, OwnedFd)> {
    let start = InitStart {
        socket: socket.as_raw_fd(),
        program: program.as_raw_fd(),
        unmapped: flags & raw::CLONE_NEWUSER != 0,
    };
    let mut stack = vec![0_u128; START_STACK_BYTES / 16];
    let top = stack.as_mut_ptr_range().end.cast::<c_void>();
    let mut pidfd: libc::c_int = -1;
    let flags = flags as libc::c_int | libc::CLONE_VM | libc::CLONE_VFORK | libc::CLONE_PIDFD | libc::SIGCHLD;
    let argument = std::ptr::from_ref(&start).cast_mut().cast::<c_void>();
    // SAFETY: the child runs `begin` on a stack of its own that outlives it, since CLONE_VFORK returns here
    // only after its exec or exit; `begin` makes raw calls only; `pidfd` is where CLONE_PIDFD writes.
    let pid = unsafe { libc::clone(begin, top, flags, argument, std::ptr::from_mut(&mut pidfd)) };
    if pid < 0 {
        return Err(io::Error::last_os_error());
    }
    // SAFETY: the kernel has just put this descriptor into our table and nobody else knows it.
    let pidfd = unsafe { OwnedFd::from_raw_fd(pidfd) };
    Ok((Pid::from_raw(pid), pidfd))
}

struct InsideStart<'a> {
    user: i32,
    net: i32,
    flags: u64,
    start: &'a InitStart,
    /// Where `step_inside` leaves what came of it.
    pid: libc::c_int,
    pidfd: libc::c_int,
    stack: Vec<u128>,
}

/// As [`start_init`], in a user and a network namespace that are there already. They are entered by a process
/// between, which has left the caller's for good and ends at once; the init is the caller's child all the same.
pub fn start_init_inside(
    user: BorrowedFd<'_>,
    net: BorrowedFd<'_>,
    flags: u64,
    socket: BorrowedFd<'_>,
    program: BorrowedFd<'_>,
) -> io::Result<(Pid, OwnedFd)> {
    // Whoever comes from outside has no id there.
    let start = InitStart { socket: socket.as_raw_fd(), program: program.as_raw_fd(), unmapped: true };
    let mut inside = InsideStart {
        user: user.as_raw_fd(),
        net: net.as_raw_fd(),
        flags,
        start: &start,
        pid: -1,
        pidfd: -1,
        stack: vec![0_u128; START_STACK_BYTES / 16],
    };
    let mut stack = vec![0_u128; START_STACK_BYTES / 16];
    let top = stack.as_mut_ptr_range().end.cast::<c_void>();
    let argument = std::ptr::from_mut(&mut inside).cast::<c_void>();
    // One table of descriptors, so that the pidfd arrives in ours. SIGCHLD, because CLONE_PARENT hands it on.
    let flags = libc::CLONE_VM | libc::CLONE_VFORK | libc::CLONE_FILES | libc::SIGCHLD;
    // SAFETY: as in `start_init`; the process ends before this returns, and nothing of it is in use after.
    if unsafe { libc::clone(step_inside, top, flags, argument) } < 0 {
        return Err(io::Error::last_os_error());
    }
    if inside.pid < 0 {
        return Err(io::Error::from_raw_os_error(-inside.pid));
    }
    // SAFETY: the kernel has just put this descriptor into our table and nobody else knows it.
    let pidfd = unsafe { OwnedFd::from_raw_fd(inside.pidfd) };
    Ok((Pid::from_raw(inside.pid), pidfd))
}

/// Between: the network namespace while the rights over it are still ours, then the user namespace, then the init.
extern "C" fn step_inside(argument: *mut c_void) -> libc::c_int {
    // SAFETY: `start_init_inside` passes its own `InsideStart`, and sleeps meanwhile.
    let inside = unsafe { &mut *argument.cast::<InsideStart<'_>>() };
    let entered =
        raw::setns(inside.net, raw::CLONE_NEWNET).and_then(|()| raw::setns(inside.user, raw::CLONE_NEWUSER));
    if let Err(errno) = entered {
        inside.pid = -errno;
        raw::exit(1);
    }
    let top = inside.stack.as_mut_ptr_range().end.cast::<c_void>();
    let flags = inside.flags as libc::c_int
        | libc::CLONE_PARENT
        | libc::CLONE_VM
        | libc::CLONE_VFORK
        | libc::CLONE_PIDFD
        | libc::SIGCHLD;
    let argument = std::ptr::from_ref(inside.start).cast_mut().cast::<c_void>();
    // SAFETY: as in `start_init`, on the second stack.
    let pid = unsafe { libc::clone(begin, top, flags, argument, std::ptr::from_mut(&mut inside.pidfd)) };
    inside.pid =
        if pid < 0 { -io::Error::last_os_error().raw_os_error().unwrap_or(raw::EINVAL) } else { pid };
    raw::exit(0)
}

/// In the new namespaces, on borrowed memory: straight to the exec.
extern "C" fn begin(argument: *mut c_void) -> libc::c_int {
    /// Above the numbers that are about to be assigned.
    const PARKED: i32 = 64;
    // SAFETY: `start_init` passes its own `InitStart`, alive while it sleeps.
    let start = unsafe { &*argument.cast::<InitStart>() };
    let ready = || -> raw::Answer<i32> {
        let program = raw::dup_above(start.program, PARKED)?;
        let socket = raw::dup_above(start.socket, PARKED)?;
        raw::dup3(socket, 3, 0)?;
        if start.unmapped {
            // Without ambient capabilities the exec, under an unmapped uid, would lose what init needs in its own
            // namespaces.
            raw::raise_ambient()?;
        }
        raw::unblock_signals()?;
        Ok(program)
    };
    if let Ok(program) = ready() {
        let mut space = [0_usize; 2];
        if let Some(arguments) = raw::Pointers::collect(&[c"caisson-init"], &mut space) {
            let mut none = [0_usize; 1];
            if let Some(environment) = raw::Pointers::collect(&[], &mut none) {
                raw::execve_fd(program, &arguments, &environment);
            }
        }
    }
    raw::exit(127)
}
