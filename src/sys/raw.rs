//! System calls without a C library: for code that runs where no library state can be trusted.
//!
//! Three programs include this file: caisson itself, the init of a sandbox (`launcher/init.rs`, static, no
//! library at all) and the zygote's library (`launcher/entry.rs`, inside CPython's process, between a raw
//! clone and the return to Python). So it uses `core` only, allocates nothing and keeps no state. Errors are
//! plain errno values.
//!
//! The wrappers are safe functions as far as Rust's memory goes: what they are given by reference is what the
//! kernel reads or writes. What they do to the *process* is their caller's business.

#![allow(dead_code, reason = "each of the three programs uses its own part")]

use core::arch::asm;
use core::ffi::CStr;

/// A plain errno, always positive.
pub type Errno = i32;
/// What a system call answers.
pub type Answer<T> = Result<T, Errno>;

pub const ENOENT: Errno = 2;
pub const EINTR: Errno = 4;
pub const EAGAIN: Errno = 11;
pub const EINVAL: Errno = 22;
pub const EPROTO: Errno = 71;
pub const EPERM: Errno = 1;

pub const CLONE_VM: u64 = 0x100;
pub const CLONE_PARENT: u64 = 0x8000;
pub const CLONE_CHILD_CLEARTID: u64 = 0x0020_0000;
pub const CLONE_CHILD_SETTID: u64 = 0x0100_0000;
pub const CLONE_NEWNS: u64 = 0x0002_0000;
pub const CLONE_NEWCGROUP: u64 = 0x0200_0000;
pub const CLONE_NEWUTS: u64 = 0x0400_0000;
pub const CLONE_NEWIPC: u64 = 0x0800_0000;
pub const CLONE_NEWUSER: u64 = 0x1000_0000;
pub const CLONE_NEWPID: u64 = 0x2000_0000;
pub const CLONE_NEWNET: u64 = 0x4000_0000;
pub const SIGCHLD: u64 = 17;
pub const SIGKILL: i32 = 9;

pub const O_RDONLY: i32 = 0;
pub const O_WRONLY: i32 = 1;
pub const O_RDWR: i32 = 2;
pub const O_PATH: i32 = 0o10_000_000;
pub const O_CLOEXEC: i32 = 0o2_000_000;
pub const AT_FDCWD: i32 = -100;
pub const AT_EMPTY_PATH: i32 = 0x1000;

pub const MS_RDONLY: u64 = 1;
pub const MS_NOSUID: u64 = 2;
pub const MS_NODEV: u64 = 4;
pub const MS_NOEXEC: u64 = 8;

pub const PR_SET_PDEATHSIG: i32 = 1;
pub const PR_SET_DUMPABLE: i32 = 4;
pub const PR_SET_SECCOMP: i32 = 22;
pub const PR_CAPBSET_DROP: i32 = 24;
pub const PR_SET_SECUREBITS: i32 = 28;
pub const PR_SET_CHILD_SUBREAPER: i32 = 36;
pub const PR_SET_NO_NEW_PRIVS: i32 = 38;
pub const PR_GET_TID_ADDRESS: i32 = 40;
pub const PR_CAP_AMBIENT: i32 = 47;
pub const PR_CAP_AMBIENT_CLEAR_ALL: u64 = 4;

/// NOROOT, NO_SETUID_FIXUP, KEEP_CAPS (locked off) and NO_CAP_AMBIENT_RAISE with their locks.
/// NO_SETUID_FIXUP itself stays off: the switch of identity is to clear the capabilities.
pub const SECUREBITS_LOCKED: u64 = 0x01 | 0x02 | 0x08 | 0x20 | 0x40 | 0x80;

#[cfg(target_arch = "x86_64")]
pub mod nr {
    pub const READ: usize = 0;
    pub const WRITE: usize = 1;
    pub const CLOSE: usize = 3;
    pub const RT_SIGACTION: usize = 13;
    pub const RT_SIGPROCMASK: usize = 14;
    pub const IOCTL: usize = 16;
    pub const PREAD64: usize = 17;
    pub const SOCKET: usize = 41;
    pub const SENDMSG: usize = 46;
    pub const RECVMSG: usize = 47;
    pub const CLONE: usize = 56;
    pub const EXECVE: usize = 59;
    pub const EXIT: usize = 60;
    pub const WAIT4: usize = 61;
    pub const FCNTL: usize = 72;
    pub const CHDIR: usize = 80;
    pub const UMASK: usize = 95;
    pub const SETSID: usize = 112;
    pub const SETGROUPS: usize = 116;
    pub const SETRESUID: usize = 117;
    pub const SETRESGID: usize = 119;
    pub const CAPSET: usize = 126;
    pub const PRCTL: usize = 157;
    pub const MOUNT: usize = 165;
    pub const UMOUNT2: usize = 166;
    pub const SETHOSTNAME: usize = 170;
    pub const GETTID: usize = 186;
    pub const EXIT_GROUP: usize = 231;
    pub const OPENAT: usize = 257;
    pub const PPOLL: usize = 271;
    pub const UNSHARE: usize = 272;
    pub const SET_ROBUST_LIST: usize = 273;
    pub const GET_ROBUST_LIST: usize = 274;
    pub const SIGNALFD4: usize = 289;
    pub const DUP3: usize = 292;
    pub const PRLIMIT64: usize = 302;
    pub const SETNS: usize = 308;
    pub const SECCOMP: usize = 317;
    pub const EXECVEAT: usize = 322;
    pub const RSEQ: usize = 334;
}

#[cfg(target_arch = "aarch64")]
pub mod nr {
    pub const READ: usize = 63;
    pub const WRITE: usize = 64;
    pub const CLOSE: usize = 57;
    pub const RT_SIGACTION: usize = 134;
    pub const RT_SIGPROCMASK: usize = 135;
    pub const IOCTL: usize = 29;
    pub const PREAD64: usize = 67;
    pub const PPOLL: usize = 73;
    pub const SIGNALFD4: usize = 74;
    pub const WAIT4: usize = 260;
    pub const SOCKET: usize = 198;
    pub const SENDMSG: usize = 211;
    pub const RECVMSG: usize = 212;
    pub const CLONE: usize = 220;
    pub const EXECVE: usize = 221;
    pub const EXIT: usize = 93;
    pub const FCNTL: usize = 25;
    pub const CHDIR: usize = 49;
    pub const UMASK: usize = 166;
    pub const SETSID: usize = 157;
    pub const SETGROUPS: usize = 159;
    pub const SETRESUID: usize = 147;
    pub const SETRESGID: usize = 149;
    pub const CAPSET: usize = 91;
    pub const PRCTL: usize = 167;
    pub const MOUNT: usize = 40;
    pub const UMOUNT2: usize = 39;
    pub const SETHOSTNAME: usize = 161;
    pub const GETTID: usize = 178;
    pub const EXIT_GROUP: usize = 94;
    pub const OPENAT: usize = 56;
    pub const UNSHARE: usize = 97;
    pub const SET_ROBUST_LIST: usize = 99;
    pub const GET_ROBUST_LIST: usize = 100;
    pub const DUP3: usize = 24;
    pub const PRLIMIT64: usize = 261;
    pub const SETNS: usize = 268;
    pub const SECCOMP: usize = 277;
    pub const EXECVEAT: usize = 281;
    pub const RSEQ: usize = 293;
}

// The same numbers on every architecture.
const MOVE_MOUNT: usize = 429;
const FSOPEN: usize = 430;
const FSCONFIG: usize = 431;
const FSMOUNT: usize = 432;
const CLOSE_RANGE: usize = 436;
const LANDLOCK_CREATE_RULESET: usize = 444;
const LANDLOCK_ADD_RULE: usize = 445;
const LANDLOCK_RESTRICT_SELF: usize = 446;

/// The kernel's entry.
///
/// # Safety
/// The arguments must be what system call `number` takes: pointers valid for what it reads and writes.
#[cfg(target_arch = "x86_64")]
#[inline(always)]
pub unsafe fn call(number: usize, a: [usize; 6]) -> isize {
    let answer: isize;
    // SAFETY: the kernel preserves all registers but rax, rcx and r11, which are named; the caller vouches
    // for the arguments.
    unsafe {
        asm!(
            "syscall",
            inlateout("rax") number as isize => answer,
            in("rdi") a[0], in("rsi") a[1], in("rdx") a[2], in("r10") a[3], in("r8") a[4], in("r9") a[5],
            lateout("rcx") _, lateout("r11") _,
            options(nostack)
        );
    }
    answer
}

/// The kernel's entry.
///
/// # Safety
/// The arguments must be what system call `number` takes: pointers valid for what it reads and writes.
#[cfg(target_arch = "aarch64")]
#[inline(always)]
pub unsafe fn call(number: usize, a: [usize; 6]) -> isize {
    let answer: isize;
    // SAFETY: the kernel preserves all registers but x0; the caller vouches for the arguments.
    unsafe {
        asm!(
            "svc #0",
            in("x8") number,
            inlateout("x0") a[0] => answer,
            in("x1") a[1], in("x2") a[2], in("x3") a[3], in("x4") a[4], in("x5") a[5],
            options(nostack)
        );
    }
    answer
}

/// Gives the memory of this process to a new one and ends the old: the new process, a child of this one's
/// parent in the pid namespace last entered, continues as if nothing had happened. Returns an errno in the
/// old process when the kernel refused.
///
/// `tid` is where glibc caches the thread id; the kernel writes the new one there.
#[cfg(target_arch = "x86_64")]
pub fn hand_over(tid: usize) -> Answer<()> {
    let flags = CLONE_VM | CLONE_PARENT | CLONE_CHILD_SETTID | CLONE_CHILD_CLEARTID;
    let answer: isize;
    // SAFETY: both processes run on one stack, so the old one must not touch it again: between the two
    // system calls there are register instructions only. `tid` is the address the kernel itself named.
    unsafe {
        asm!(
            "syscall",
            "test rax, rax",
            "jle 2f",
            "xor edi, edi",
            "mov eax, 60",
            "syscall",
            "2:",
            inlateout("rax") nr::CLONE as isize => answer,
            inlateout("rdi") flags => _, in("rsi") 0_usize, in("rdx") 0_usize, in("r10") tid, in("r8") 0_usize,
            lateout("rcx") _, lateout("r11") _,
        );
    }
    done(answer)
}

/// See the x86-64 version.
#[cfg(target_arch = "aarch64")]
pub fn hand_over(tid: usize) -> Answer<()> {
    let flags = CLONE_VM | CLONE_PARENT | CLONE_CHILD_SETTID | CLONE_CHILD_CLEARTID;
    let answer: isize;
    // SAFETY: as on x86-64. On this architecture tls is the fourth argument and the tid pointer the fifth.
    unsafe {
        asm!(
            "svc #0",
            "cmp x0, #0",
            "b.le 2f",
            "mov x0, #0",
            "mov x8, #93",
            "svc #0",
            "2:",
            inlateout("x8") nr::CLONE => _,
            inlateout("x0") flags as usize => answer,
            in("x1") 0_usize, in("x2") 0_usize, in("x3") 0_usize, in("x4") tid,
        );
    }
    done(answer)
}

/// The thread pointer, from which glibc's restartable-sequence area is an offset.
#[cfg(target_arch = "x86_64")]
pub fn thread_pointer() -> usize {
    let pointer: usize;
    // SAFETY: reads the word at fs:0, which the ABI defines as the thread pointer itself.
    unsafe { asm!("mov {}, fs:0", out(reg) pointer, options(nostack, readonly, preserves_flags)) };
    pointer
}

/// The thread pointer, from which glibc's restartable-sequence area is an offset.
#[cfg(target_arch = "aarch64")]
pub fn thread_pointer() -> usize {
    let pointer: usize;
    // SAFETY: reads a register.
    unsafe { asm!("mrs {}, tpidr_el0", out(reg) pointer, options(nostack, nomem, preserves_flags)) };
    pointer
}

fn value(answer: isize) -> Answer<usize> {
    if answer < 0 { Err(-answer as Errno) } else { Ok(answer as usize) }
}

fn done(answer: isize) -> Answer<()> {
    value(answer).map(|_| ())
}

fn plain(number: usize, a: [usize; 6]) -> isize {
    // SAFETY: used below only for calls whose arguments are numbers, or addresses of what the caller of the
    // wrapper borrowed for the length of the call.
    unsafe { call(number, a) }
}

pub fn read(fd: i32, buffer: &mut [u8]) -> Answer<usize> {
    value(plain(nr::READ, [fd as usize, buffer.as_mut_ptr() as usize, buffer.len(), 0, 0, 0]))
}

pub fn write(fd: i32, bytes: &[u8]) -> Answer<usize> {
    value(plain(nr::WRITE, [fd as usize, bytes.as_ptr() as usize, bytes.len(), 0, 0, 0]))
}

pub fn close(fd: i32) -> Answer<()> {
    done(plain(nr::CLOSE, [fd as usize, 0, 0, 0, 0, 0]))
}

pub fn close_from(first: i32) -> Answer<()> {
    done(plain(CLOSE_RANGE, [first as usize, u32::MAX as usize, 0, 0, 0, 0]))
}

pub fn dup3(from: i32, to: i32, flags: i32) -> Answer<()> {
    done(plain(nr::DUP3, [from as usize, to as usize, flags as usize, 0, 0, 0]))
}

/// A close-on-exec copy with a number of at least `least`.
pub fn dup_above(fd: i32, least: i32) -> Answer<i32> {
    const F_DUPFD_CLOEXEC: usize = 1030;
    value(plain(nr::FCNTL, [fd as usize, F_DUPFD_CLOEXEC, least as usize, 0, 0, 0])).map(|fd| fd as i32)
}

pub fn openat(dir: i32, path: &CStr, flags: i32) -> Answer<i32> {
    value(plain(nr::OPENAT, [dir as usize, path.as_ptr() as usize, flags as usize, 0, 0, 0]))
        .map(|fd| fd as i32)
}

pub fn chdir(path: &CStr) -> Answer<()> {
    done(plain(nr::CHDIR, [path.as_ptr() as usize, 0, 0, 0, 0, 0]))
}

pub fn umask(mask: u32) {
    plain(nr::UMASK, [mask as usize, 0, 0, 0, 0, 0]);
}

pub fn setsid() -> Answer<()> {
    done(plain(nr::SETSID, [0; 6]))
}

pub fn setns(fd: i32, kind: u64) -> Answer<()> {
    done(plain(nr::SETNS, [fd as usize, kind as usize, 0, 0, 0, 0]))
}

pub fn unshare(flags: u64) -> Answer<()> {
    done(plain(nr::UNSHARE, [flags as usize, 0, 0, 0, 0, 0]))
}

/// Copies this process. 0 in the child.
pub fn fork(flags: u64) -> Answer<usize> {
    value(plain(nr::CLONE, [flags as usize, 0, 0, 0, 0, 0]))
}

/// What `clone3` says to arguments that are none: an error of its own where it is there.
#[cfg(test)]
pub(crate) fn clone3_of_nothing() -> i32 {
    const CLONE3: usize = 435;
    plain(CLONE3, [0; 6]).unsigned_abs() as i32
}

pub fn exit(status: i32) -> ! {
    loop {
        plain(nr::EXIT_GROUP, [status as usize, 0, 0, 0, 0, 0]);
    }
}

pub fn prctl(operation: i32, a: u64, b: u64) -> Answer<usize> {
    value(plain(nr::PRCTL, [operation as usize, a as usize, b as usize, 0, 0, 0]))
}

/// Empties the ambient and the bounding set.
pub fn drop_bounding() -> Answer<()> {
    /// More than any kernel has.
    const CAPABILITIES_MAX: u64 = 64;
    prctl(PR_CAP_AMBIENT, PR_CAP_AMBIENT_CLEAR_ALL, 0)?;
    for capability in 0..CAPABILITIES_MAX {
        match prctl(PR_CAPBSET_DROP, capability, 0) {
            Ok(_) => {}
            // Past the last one this kernel knows.
            Err(EINVAL) => break,
            Err(errno) => return Err(errno),
        }
    }
    Ok(())
}

/// Where glibc caches this thread's id: the address it gave to `set_tid_address`.
pub fn tid_address() -> Answer<usize> {
    let mut address = 0_usize;
    prctl(PR_GET_TID_ADDRESS, core::ptr::from_mut(&mut address) as u64, 0)?;
    Ok(address)
}

/// Address and length of this thread's robust futex list.
pub fn get_robust_list() -> Answer<(usize, usize)> {
    let (mut head, mut length) = (0_usize, 0_usize);
    let head_at = core::ptr::from_mut(&mut head) as usize;
    let length_at = core::ptr::from_mut(&mut length) as usize;
    done(plain(nr::GET_ROBUST_LIST, [0, head_at, length_at, 0, 0, 0]))?;
    Ok((head, length))
}

pub fn set_robust_list(head: usize, length: usize) -> Answer<()> {
    done(plain(nr::SET_ROBUST_LIST, [head, length, 0, 0, 0, 0]))
}

/// Registers glibc's restartable-sequence area anew.
pub fn register_rseq(area: usize, length: u32) -> Answer<()> {
    const SIGNATURE: usize = if cfg!(target_arch = "x86_64") { 0x5305_3053 } else { 0xd428_bc00 };
    done(plain(nr::RSEQ, [area, length as usize, 0, SIGNATURE, 0, 0]))
}

pub fn setgroups_none() -> Answer<()> {
    done(plain(nr::SETGROUPS, [0; 6]))
}

pub fn setresgid(gid: u32) -> Answer<()> {
    done(plain(nr::SETRESGID, [gid as usize, gid as usize, gid as usize, 0, 0, 0]))
}

pub fn setresuid(uid: u32) -> Answer<()> {
    done(plain(nr::SETRESUID, [uid as usize, uid as usize, uid as usize, 0, 0, 0]))
}

/// Empties effective, permitted and inheritable capabilities.
pub fn capset_none() -> Answer<()> {
    const VERSION_3: u32 = 0x2008_0522;
    let header = [VERSION_3, 0_u32];
    let data = [0_u32; 6];
    done(plain(nr::CAPSET, [header.as_ptr() as usize, data.as_ptr() as usize, 0, 0, 0, 0]))
}

/// Sets soft and hard limit.
pub fn setrlimit(resource: u32, soft: u64, hard: u64) -> Answer<()> {
    let limit = [soft, hard];
    done(plain(nr::PRLIMIT64, [0, resource as usize, limit.as_ptr() as usize, 0, 0, 0]))
}

/// Installs a filter given as raw `sock_filter` words of eight bytes.
pub fn seccomp_install(program: &[u64]) -> Answer<()> {
    #[repr(C)]
    struct Program {
        length: u16,
        filter: *const u64,
    }
    const SET_MODE_FILTER: usize = 1;
    let program = Program { length: program.len() as u16, filter: program.as_ptr() };
    let at = core::ptr::from_ref(&program) as usize;
    done(plain(nr::SECCOMP, [SET_MODE_FILTER, 0, at, 0, 0, 0]))
}

pub fn mount(source: &CStr, target: &CStr, kind: &CStr, flags: u64, data: &CStr) -> Answer<()> {
    let (source, target, kind) = (source.as_ptr() as usize, target.as_ptr() as usize, kind.as_ptr() as usize);
    done(plain(nr::MOUNT, [source, target, kind, flags as usize, data.as_ptr() as usize, 0]))
}

/// Attaches the detached mount `tree` at `target`.
pub fn move_mount(tree: i32, target: &CStr) -> Answer<()> {
    const F_EMPTY_PATH: usize = 4;
    let empty = c"";
    let arguments = [
        tree as usize,
        empty.as_ptr() as usize,
        AT_FDCWD as usize,
        target.as_ptr() as usize,
        F_EMPTY_PATH,
        0,
    ];
    done(plain(MOVE_MOUNT, arguments))
}

/// A detached mount of a fresh file system of this kind, with no options.
pub fn detached(kind: &CStr, attributes: u32) -> Answer<i32> {
    const CLOEXEC: usize = 1;
    const CMD_CREATE: usize = 6;
    let context = value(plain(FSOPEN, [kind.as_ptr() as usize, CLOEXEC, 0, 0, 0, 0]))?;
    let made = done(plain(FSCONFIG, [context, CMD_CREATE, 0, 0, 0, 0]))
        .and_then(|()| value(plain(FSMOUNT, [context, CLOEXEC, attributes as usize, 0, 0, 0])));
    // The context has served whether or not the mount came of it.
    let _ = close(context as i32);
    made.map(|fd| fd as i32)
}

pub fn sethostname(name: &[u8]) -> Answer<()> {
    done(plain(nr::SETHOSTNAME, [name.as_ptr() as usize, name.len(), 0, 0, 0, 0]))
}

/// Raises the loopback interface of this network namespace.
pub fn loopback_up() -> Answer<()> {
    const AF_INET: usize = 2;
    const SOCK_DGRAM_CLOEXEC: usize = 2 | 0o2_000_000;
    const SIOCSIFFLAGS: usize = 0x8914;
    const IFF_UP: u8 = 1;
    let socket = value(plain(nr::SOCKET, [AF_INET, SOCK_DGRAM_CLOEXEC, 0, 0, 0, 0]))?;
    let mut request = [0_u8; 40];
    request[0] = b'l';
    request[1] = b'o';
    request[16] = IFF_UP;
    let raised = done(plain(nr::IOCTL, [socket, SIOCSIFFLAGS, request.as_ptr() as usize, 0, 0, 0]));
    // The socket has served either way.
    let _ = close(socket as i32);
    raised
}

/// A ruleset that handles these file rights and nothing else.
pub fn landlock_create(handled_fs: u64) -> Answer<i32> {
    let size = core::mem::size_of::<u64>();
    let at = core::ptr::from_ref(&handled_fs) as usize;
    value(plain(LANDLOCK_CREATE_RULESET, [at, size, 0, 0, 0, 0])).map(|fd| fd as i32)
}

/// Allows `rights` beneath the open path `parent`.
pub fn landlock_allow(ruleset: i32, parent: i32, rights: u64) -> Answer<()> {
    const PATH_BENEATH: usize = 1;
    let mut attribute = [0_u8; 12];
    attribute[..8].copy_from_slice(&rights.to_ne_bytes());
    attribute[8..].copy_from_slice(&parent.to_ne_bytes());
    let at = attribute.as_ptr() as usize;
    done(plain(LANDLOCK_ADD_RULE, [ruleset as usize, PATH_BENEATH, at, 0, 0, 0]))
}

pub fn landlock_restrict(ruleset: i32) -> Answer<()> {
    done(plain(LANDLOCK_RESTRICT_SELF, [ruleset as usize, 0, 0, 0, 0, 0]))
}

/// SIGCHLD ignored: the kernel reaps children by itself.
pub fn ignore_sigchld() -> Answer<()> {
    const SIG_IGN: usize = 1;
    let action = [SIG_IGN, 0, 0, 0];
    done(plain(nr::RT_SIGACTION, [SIGCHLD as usize, action.as_ptr() as usize, 0, 8, 0, 0]))
}

/// SIGCHLD waits to be read from [`sigchld_fd`].
pub fn block_sigchld() -> Answer<()> {
    const SIG_BLOCK: usize = 0;
    let at = core::ptr::from_ref(&SIGCHLD_SET) as usize;
    done(plain(nr::RT_SIGPROCMASK, [SIG_BLOCK, at, 0, 8, 0, 0]))
}

const SIGCHLD_SET: u64 = 1 << (SIGCHLD - 1);
/// Bytes of one record read from [`sigchld_fd`].
pub const SIGNAL_INFO_BYTES: usize = 128;

/// Readable when a child has ended.
pub fn sigchld_fd() -> Answer<i32> {
    const NEW: usize = usize::MAX;
    let at = core::ptr::from_ref(&SIGCHLD_SET) as usize;
    value(plain(nr::SIGNALFD4, [NEW, at, 8, O_CLOEXEC as usize, 0, 0])).map(|fd| fd as i32)
}

/// Waits until one of two descriptors is readable, or at its end; says which.
pub fn poll_two(one: i32, other: i32) -> Answer<(bool, bool)> {
    #[repr(C)]
    struct Waiting {
        fd: i32,
        events: i16,
        found: i16,
    }
    const POLLIN: i16 = 1;
    let mut both =
        [Waiting { fd: one, events: POLLIN, found: 0 }, Waiting { fd: other, events: POLLIN, found: 0 }];
    let at = both.as_mut_ptr() as usize;
    loop {
        match done(plain(nr::PPOLL, [at, both.len(), 0, 0, 0, 0])) {
            Err(EINTR) => {}
            other => break other?,
        }
    }
    Ok((both[0].found != 0, both[1].found != 0))
}

/// How a child ended.
#[derive(Copy, Clone, Debug, PartialEq, Eq)]
pub enum Ended {
    Exited(i32),
    Signaled(i32),
}

/// Reaps one child that has ended, if there is one; an error when there are no children.
pub fn reap_any() -> Answer<Option<(i32, Ended)>> {
    const WNOHANG: usize = 1;
    let mut status = 0_i32;
    let at = core::ptr::from_mut(&mut status) as usize;
    let pid = value(plain(nr::WAIT4, [usize::MAX, at, WNOHANG, 0, 0, 0]))?;
    let how = match status & 0x7f {
        0 => Ended::Exited(status >> 8 & 0xff),
        signal => Ended::Signaled(signal),
    };
    Ok((pid != 0).then_some((pid as i32, how)))
}

pub fn pread(fd: i32, buffer: &mut [u8], offset: usize) -> Answer<usize> {
    value(plain(nr::PREAD64, [fd as usize, buffer.as_mut_ptr() as usize, buffer.len(), offset, 0, 0]))
}

/// Executes with the given null-terminated pointer arrays; answers only when it failed.
pub fn execve(path: &CStr, argv: &Pointers<'_>, envp: &Pointers<'_>) -> Errno {
    let argv = argv.0.as_ptr() as usize;
    let envp = envp.0.as_ptr() as usize;
    value(plain(nr::EXECVE, [path.as_ptr() as usize, argv, envp, 0, 0, 0])).err().unwrap_or(EINVAL)
}

/// Executes the open file `fd`; answers only when it failed.
pub fn execve_fd(fd: i32, argv: &Pointers<'_>, envp: &Pointers<'_>) -> Errno {
    let empty = c"".as_ptr() as usize;
    let argv = argv.0.as_ptr() as usize;
    let envp = envp.0.as_ptr() as usize;
    let answer = plain(nr::EXECVEAT, [fd as usize, empty, argv, envp, AT_EMPTY_PATH as usize, 0]);
    value(answer).err().unwrap_or(EINVAL)
}

/// Invariant: ends with a zero word, and every other word points at a C string that outlives `'a`.
pub struct Pointers<'a>(&'a [usize]);

impl<'a> Pointers<'a> {
    /// The pointers of `strings`, written into `space`, which must be at least one longer.
    pub fn collect(strings: &[&'a CStr], space: &'a mut [usize]) -> Option<Pointers<'a>> {
        let words = space.get_mut(..=strings.len())?;
        for (word, string) in words.iter_mut().zip(strings) {
            *word = string.as_ptr() as usize;
        }
        words[strings.len()] = 0;
        Some(Pointers(words))
    }
}

/// Room for the control part of a packet with up to 32 descriptors.
const CONTROL_BYTES: usize = 16 + 32 * 4;

#[repr(C)]
struct MessageHeader {
    name: usize,
    name_length: u32,
    vectors: usize,
    vector_count: usize,
    control: usize,
    control_length: usize,
    flags: i32,
}

/// Receives one packet with descriptors. Returns lengths of both; extra descriptors are an error.
pub fn receive(socket: i32, bytes: &mut [u8], descriptors: &mut [i32]) -> Answer<(usize, usize)> {
    const MSG_CMSG_CLOEXEC: usize = 0x4000_0000;
    const MSG_TRUNC_OR_CTRUNC: i32 = 0x20 | 0x08;
    let mut control = [0_usize; CONTROL_BYTES / 8];
    let vector = [bytes.as_mut_ptr() as usize, bytes.len()];
    let mut header = MessageHeader {
        name: 0,
        name_length: 0,
        vectors: vector.as_ptr() as usize,
        vector_count: 1,
        control: control.as_mut_ptr() as usize,
        control_length: CONTROL_BYTES,
        flags: 0,
    };
    let at = core::ptr::from_mut(&mut header) as usize;
    let length = loop {
        match value(plain(nr::RECVMSG, [socket as usize, at, MSG_CMSG_CLOEXEC, 0, 0, 0])) {
            Err(EINTR) => {}
            other => break other?,
        }
    };
    let mut count = 0;
    if header.control_length >= 16 {
        // cmsghdr: length (with header), level, type; then the descriptors.
        count = (control[0].saturating_sub(16) / 4).min(32);
        for index in 0..count {
            let word = control[2 + index / 2].to_ne_bytes();
            let half = (index % 2) * 4;
            let number = i32::from_ne_bytes([word[half], word[half + 1], word[half + 2], word[half + 3]]);
            match descriptors.get_mut(index) {
                Some(slot) => *slot = number,
                // Nothing we asked for: it must not stay open.
                None => drop(close(number)),
            }
        }
    }
    if header.flags & MSG_TRUNC_OR_CTRUNC != 0 || count > descriptors.len() {
        return Err(EPROTO);
    }
    Ok((length, count))
}

/// Sends one packet with up to one descriptor.
pub fn send(socket: i32, bytes: &[u8], descriptor: Option<i32>) -> Answer<()> {
    const MSG_NOSIGNAL: usize = 0x4000;
    let vector = [bytes.as_ptr() as usize, bytes.len()];
    let number = descriptor.unwrap_or(-1) as u32 as usize;
    // cmsghdr of 16 bytes (length 20, SOL_SOCKET, SCM_RIGHTS) and one descriptor, padded.
    let control = [20_usize, 1 | (1 << 32), number];
    let header = MessageHeader {
        name: 0,
        name_length: 0,
        vectors: vector.as_ptr() as usize,
        vector_count: 1,
        control: if descriptor.is_some() { control.as_ptr() as usize } else { 0 },
        control_length: if descriptor.is_some() { 24 } else { 0 },
        flags: 0,
    };
    let at = core::ptr::from_ref(&header) as usize;
    done(plain(nr::SENDMSG, [socket as usize, at, MSG_NOSIGNAL, 0, 0, 0]))
}

/// No signal stays blocked: what is executed next starts as from a shell.
pub fn unblock_signals() -> Answer<()> {
    const SIG_SETMASK: usize = 2;
    let none = 0_u64;
    let at = core::ptr::from_ref(&none) as usize;
    done(plain(nr::RT_SIGPROCMASK, [SIG_SETMASK, at, 0, 8, 0, 0]))
}

/// Makes every capability up to the last one ambient, so that they outlive an exec under an unmapped uid.
pub fn raise_ambient() -> Answer<()> {
    const VERSION_3: u32 = 0x2008_0522;
    const PR_CAP_AMBIENT_RAISE: u64 = 2;
    const CAPABILITIES: u64 = 64;
    let header = [VERSION_3, 0_u32];
    // effective, permitted, inheritable of capabilities 0-31, then of 32-40.
    let data = [u32::MAX, u32::MAX, u32::MAX, 0x1ff, 0x1ff, 0x1ff_u32];
    done(plain(nr::CAPSET, [header.as_ptr() as usize, data.as_ptr() as usize, 0, 0, 0, 0]))?;
    for capability in 0..CAPABILITIES {
        match prctl(PR_CAP_AMBIENT, PR_CAP_AMBIENT_RAISE, capability) {
            Ok(_) => {}
            Err(EINVAL) => break,
            Err(errno) => return Err(errno),
        }
    }
    Ok(())
}

/// The Landlock ABI of the running kernel; an error where there is none.
pub fn landlock_abi() -> Answer<usize> {
    const CREATE_RULESET_VERSION: usize = 1;
    value(plain(LANDLOCK_CREATE_RULESET, [0, 0, CREATE_RULESET_VERSION, 0, 0, 0]))
}
