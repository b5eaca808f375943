//! Moving into a shell, and the confinement checklist: once, for forked and exec'd interpreters alike.
//!
//! Runs in a child of the launcher or of a zygote, on a copy of its maker's memory: raw calls on buffers made
//! beforehand, no allocation, no lock, no logging. Where it fails it reports step and errno on the status
//! pipe and exits; it never goes on with less.

use core::ffi::CStr;

use super::raw;
use super::wire::{self, Job, NAMESPACES, slot, status, step};

/// A step that failed, with its errno.
pub struct Failed(pub u8, pub raw::Errno);

type Done = Result<(), Failed>;

/// What of glibc's thread state the kernel forgot when the memory changed hands.
#[derive(Copy, Clone)]
pub struct Thread {
    /// Where glibc caches the thread id.
    pub tid: usize,
    /// Robust futex list: head and length.
    pub robust: (usize, usize),
    /// Restartable sequences: area and length; 0 when glibc has none.
    pub rseq: (usize, u32),
}

fn at(step: u8, answer: raw::Answer<()>) -> Done {
    answer.map_err(|errno| Failed(step, errno))
}

/// In the first child, still with its maker's identity: joins the cgroup, enters the shell and hands its
/// memory to a process in the shell's pid namespace. Returns in that new process.
pub fn move_in(job: &Job, descriptors: &[i32], thread: Thread) -> Done {
    let namespaces = job.namespaces.count_ones() as usize;
    let cgroups = slot::FIXED + namespaces;
    // A single-threaded process that writes "0" moves itself, without the kernel's global lock (v1), and
    // before it clones: the guest is born inside and its first page is charged right.
    for fd in &descriptors[cgroups..cgroups + job.cgroups as usize] {
        at(step::CGROUP, raw::write(*fd, b"0").map(|_| ()))?;
    }
    let mut next = slot::FIXED;
    for (index, (kind, _)) in NAMESPACES.iter().enumerate() {
        if job.namespaces & (1 << index) != 0 {
            at(step::MOVE_IN, raw::setns(descriptors[next], *kind))?;
            next += 1;
        }
    }
    at(step::CLONE, raw::hand_over(thread.tid))
}

/// In the process that will be the guest: everything that makes it one, then waits to be released. The
/// programs are seccomp filters, installed in order; `home` is where it starts.
pub fn confine(job: &Job, descriptors: &[i32], thread: Thread, programs: &[&[u64]], home: &CStr) -> Done {
    claim(job, descriptors, thread, programs, home)?;
    at(step::STOP, wait_for_release())
}

/// The same but for the wait: says that it is confined. For a fork, which has its program already, gets itself
/// ready while the launcher looks, and waits before it reads its first request.
pub fn claim(job: &Job, descriptors: &[i32], thread: Thread, programs: &[&[u64]], home: &CStr) -> Done {
    // Cached thread id (written by the clone), robust list, rseq: stale after the hand-over.
    at(step::THREAD, repair_thread(thread))?;
    at(step::DESCRIPTORS, arrange(descriptors))?;
    raw::umask(0o022);
    // A session of its own: no controlling terminal to inject into. It fails only for a group leader.
    let _ = raw::setsid();
    // Here and not earlier: limits of a namespace's maker bind all its guests together.
    for limit in &job.limits[..(job.limit_count as usize).min(wire::LIMITS_MAX)] {
        at(step::RLIMITS, raw::setrlimit(limit.resource, limit.value, limit.value))?;
    }
    if job.unprivileged == 0 {
        // Entering a user namespace filled it again; needs CAP_SETPCAP.
        at(step::BOUNDING_SET, raw::drop_bounding())?;
        // The same.
        at(step::SECUREBITS, raw::prctl(raw::PR_SET_SECUREBITS, raw::SECUREBITS_LOCKED, 0).map(|_| ()))?;
    }
    // Groups, then gid, then uid: each needs what the next takes away.
    at(step::IDENTITY, assume(job.uid, job.gid, job.keep_groups == 0))?;
    // Not done by the change of identity: whoever enters a user namespace was never its root.
    at(step::CAPABILITIES, give_up_capabilities())?;
    at(step::CAPABILITIES, prove_no_root())?;
    // As the guest, and not as its maker: where it may not be, it does not start.
    at(step::WORKING_DIRECTORY, raw::chdir(home))?;
    if job.ends_with_parent != 0 {
        // A change of identity clears it, so only now.
        at(step::IDENTITY, raw::prctl(raw::PR_SET_PDEATHSIG, raw::SIGKILL as u64, 0).map(|_| ()))?;
    }
    at(step::NO_NEW_PRIVS, raw::prctl(raw::PR_SET_NO_NEW_PRIVS, 1, 0).map(|_| ()))?;
    // The change of identity made it non-dumpable, and so its own /proc entries unreadable to it.
    at(step::IDENTITY, raw::prctl(raw::PR_SET_DUMPABLE, 1, 0).map(|_| ()))?;
    if job.landlock != 0 {
        at(step::LANDLOCK, raw::landlock_restrict(slot::RULESET as i32))?;
    }
    // Last: it forbids the calls above.
    for program in programs {
        at(step::SECCOMP, raw::seccomp_install(program))?;
    }
    // The launcher now reads from outside what these lines claim.
    at(step::STOP, raw::write(slot::STATUS as i32, &status(0, 0)).map(|_| ()))
}

/// Reports a failed step on the status pipe and ends.
pub fn give_up(status_fd: i32, failed: &Failed) -> ! {
    // Nobody to tell when the pipe is gone as well.
    let _ = raw::write(status_fd, &status(failed.0, failed.1));
    raw::exit(1)
}

fn repair_thread(thread: Thread) -> raw::Answer<()> {
    if thread.robust.0 != 0 {
        raw::set_robust_list(thread.robust.0, thread.robust.1)?;
    }
    if thread.rseq.0 != 0 {
        raw::register_rseq(thread.rseq.0, thread.rseq.1)?;
    }
    Ok(())
}

/// Moves the fixed descriptors to their numbers and closes everything else. 0 to 4 stay over an exec.
pub fn arrange(descriptors: &[i32]) -> raw::Answer<()> {
    /// Above every number that a packet's descriptors or the targets can have.
    const PARKED: i32 = 96;
    let mut parked = [-1_i32; slot::FIXED];
    for (copy, fd) in parked.iter_mut().zip(descriptors) {
        *copy = raw::dup_above(*fd, PARKED)?;
    }
    for (number, copy) in parked.iter().enumerate() {
        let flags = if number <= slot::EVENTS { 0 } else { raw::O_CLOEXEC };
        raw::dup3(*copy, number as i32, flags)?;
    }
    raw::close_from(slot::FIXED as i32)
}

/// Becomes the account: no groups where they can be dropped, one gid, one uid.
pub fn assume(uid: u32, gid: u32, drop_groups: bool) -> raw::Answer<()> {
    if drop_groups {
        raw::setgroups_none()?;
    }
    raw::setresgid(gid)?;
    raw::setresuid(uid)
}

/// Empties the capability sets.
pub fn give_up_capabilities() -> raw::Answer<()> {
    raw::capset_none()
}

/// There is no way back: root again must be refused.
pub fn prove_no_root() -> raw::Answer<()> {
    if raw::setresuid(0).is_ok() { Err(raw::EPERM) } else { Ok(()) }
}

/// Nothing of a guest's comes before this returns.
pub fn wait_for_release() -> raw::Answer<()> {
    let release = slot::RELEASE as i32;
    let mut byte = [0_u8; 1];
    let length = loop {
        match raw::read(release, &mut byte) {
            Err(raw::EINTR) => {}
            other => break other?,
        }
    };
    // End of file instead of a byte: the launcher has refused this sandbox, or is gone.
    if length != 1 {
        raw::exit(1);
    }
    for fd in [slot::STATUS, slot::RELEASE, slot::RULESET] {
        raw::close(fd as i32)?;
    }
    Ok(())
}
