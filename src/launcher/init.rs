//! Pid 1 of a sandbox: builds its mounts, gives up everything, reaps.
//!
//! A program of its own, static and without any library, so that it costs a sandbox some pages: `build.rs`
//! makes it from this file, `wire.rs`, `sys/raw.rs` and `sys/freestanding.rs`; the binary embeds it and the
//! launcher executes it from a sealed memfd. It never sees a guest's byte.
//!
//! Starts with every capability over its own namespaces and none over the host; descriptor 3 is the
//! launcher's socket. Ends when the launcher closes that.

#![no_std]
#![no_main]

#[path = "../sys/freestanding.rs"]
mod freestanding;
#[path = "../sys/raw.rs"]
mod raw;
mod wire;

use core::ffi::CStr;

use wire::{RULE_OPTIONAL, SETUP_CGROUP, SETUP_ROOT, SETUP_SPACE, SETUP_USER, Setup, step};

const SOCKET: i32 = 3;

struct Failed(u8, raw::Errno);
type Done = Result<(), Failed>;

fn at<T>(step: u8, answer: raw::Answer<T>) -> Result<T, Failed> {
    answer.map_err(|errno| Failed(step, errno))
}

/// Named by the precompiled core library's unwind tables; nothing unwinds here.
#[unsafe(no_mangle)]
extern "C" fn rust_eh_personality() {}

#[panic_handler]
fn panic(_: &core::panic::PanicInfo<'_>) -> ! {
    raw::exit(101)
}

/// Called by `_start` on an aligned stack.
#[unsafe(no_mangle)]
extern "C" fn caisson_init() -> ! {
    for fd in 0..SOCKET {
        // Closed already is as good.
        let _ = raw::close(fd);
    }
    let mut setup = Setup {
        magic: 0,
        flags: 0,
        shm_bytes: 0,
        shm_inodes: 0,
        inotify_instances: 0,
        inotify_watches: 0,
        handled_fs: 0,
        rule_count: 0,
        filter_words: 0,
        rules: [wire::Rule { rights: 0, path: [0; wire::RULE_PATH_BYTES] }; wire::RULES_MAX],
        filter: [0; wire::INIT_FILTER_WORDS],
    };
    let mut trees = [-1; 3];
    let Ok((length, count)) = raw::receive(SOCKET, wire::bytes_of_mut(&mut setup), &mut trees) else {
        raw::exit(1)
    };
    let wanted = if setup.flags & SETUP_SPACE != 0 { 3 } else { 0 };
    if length != wire::SETUP_BYTES || setup.magic != wire::SETUP_MAGIC || count != wanted {
        raw::exit(1)
    }
    match make(&setup, &trees[..count]) {
        Ok(()) => live(&setup),
        Err(Failed(step, errno)) => {
            // Nobody to tell when the socket is gone as well.
            let _ = raw::send(SOCKET, &wire::status(step, errno), None);
            raw::exit(1)
        }
    }
}

/// Everything that needs capabilities, then the loss of them, then the report with the ruleset.
fn make(setup: &Setup, trees: &[i32]) -> Done {
    if setup.flags & SETUP_ROOT != 0 {
        at(step::INIT_IDENTITY, become_root_of_namespace())?;
    }
    if setup.flags & SETUP_CGROUP != 0 {
        // The launcher has placed this process: the leaf becomes the root of what is seen inside.
        at(step::INIT_CGROUP_NAMESPACE, raw::unshare(raw::CLONE_NEWCGROUP))?;
    }
    // Before anything of the space is attached: no write to /proc may be led elsewhere (CVE-2025-52881).
    if setup.flags & SETUP_USER != 0 {
        at(step::INIT_SYSCTL, bound_namespace(setup))?;
    }
    at(step::INIT_PROC, mount_proc())?;
    at(step::INIT_DEV, mount_dev(setup))?;
    for (tree, target) in trees.iter().zip([c"/mnt/data", c"/tmp", c"/home/sandbox"]) {
        at(step::INIT_SPACE_MOUNTS, raw::move_mount(*tree, target))?;
        at(step::INIT_SPACE_MOUNTS, raw::close(*tree))?;
    }
    at(step::INIT_LOOPBACK, raw::sethostname(b"sandbox").and_then(|()| raw::loopback_up()))?;
    let ruleset = if setup.handled_fs == 0 { None } else { Some(at(step::INIT_RULESET, ruleset(setup))?) };
    at(step::INIT_DROP, drop_privileges())?;
    at(step::INIT_DROP, raw::send(SOCKET, &wire::status(0, 0), ruleset))?;
    match ruleset {
        Some(fd) => at(step::INIT_DROP, raw::close(fd)),
        None => Ok(()),
    }
}

/// Reaps by ignoring SIGCHLD and waits for the launcher to let go.
fn live(setup: &Setup) -> ! {
    let words = (setup.filter_words as usize).min(wire::INIT_FILTER_WORDS);
    if words != 0 && raw::seccomp_install(&setup.filter[..words]).is_err() {
        raw::exit(1)
    }
    let mut byte = [0_u8; 1];
    loop {
        match raw::read(SOCKET, &mut byte) {
            Ok(0) => raw::exit(0),
            Ok(_) | Err(raw::EINTR) => {}
            Err(_) => raw::exit(1),
        }
    }
}

fn become_root_of_namespace() -> raw::Answer<()> {
    raw::setgroups_none()?;
    raw::setresgid(0)?;
    raw::setresuid(0)
}

/// No namespace inside this one, and a share of the host's inotify. Written through a detached procfs that
/// nobody else ever sees.
fn bound_namespace(setup: &Setup) -> raw::Answer<()> {
    let proc = raw::detached(c"proc", 0)?;
    write_number(proc, c"sys/user/max_user_namespaces", 0)?;
    write_number(proc, c"sys/user/max_inotify_instances", setup.inotify_instances)?;
    write_number(proc, c"sys/user/max_inotify_watches", setup.inotify_watches)?;
    raw::close(proc)
}

fn write_number(dir: i32, path: &CStr, number: u64) -> raw::Answer<()> {
    let mut digits = [0_u8; 20];
    let text = decimal(number, &mut digits);
    let file = raw::openat(dir, path, raw::O_WRONLY | raw::O_CLOEXEC)?;
    raw::write(file, text)?;
    raw::close(file)
}

fn decimal(mut number: u64, digits: &mut [u8; 20]) -> &[u8] {
    let mut at = digits.len();
    loop {
        at -= 1;
        digits[at] = b'0' + (number % 10) as u8;
        number /= 10;
        if number == 0 {
            return &digits[at..];
        }
    }
}

fn mount_proc() -> raw::Answer<()> {
    let flags = raw::MS_NOSUID | raw::MS_NODEV | raw::MS_NOEXEC;
    raw::mount(c"proc", c"/proc", c"proc", flags, c"hidepid=invisible,subset=pid")
}

fn mount_dev(setup: &Setup) -> raw::Answer<()> {
    let flags = raw::MS_NOSUID | raw::MS_NOEXEC;
    raw::mount(c"devpts", c"/dev/pts", c"devpts", flags, c"newinstance,ptmxmode=0666,mode=0620")?;
    // "size=N,nr_inodes=N,mode=1777"
    let mut options = [0_u8; 96];
    let mut length = 0;
    let mut digits = [0_u8; 20];
    let mut push = |part: &[u8]| {
        options[length..length + part.len()].copy_from_slice(part);
        length += part.len();
    };
    push(b"mode=1777,size=");
    push(decimal(setup.shm_bytes, &mut digits));
    push(b",nr_inodes=");
    push(decimal(setup.shm_inodes, &mut digits));
    let options = CStr::from_bytes_until_nul(&options).map_err(|_| raw::EINVAL)?;
    raw::mount(c"shm", c"/dev/shm", c"tmpfs", flags | raw::MS_NODEV, options)
}

fn ruleset(setup: &Setup) -> raw::Answer<i32> {
    let ruleset = raw::landlock_create(setup.handled_fs)?;
    for rule in &setup.rules[..(setup.rule_count as usize).min(wire::RULES_MAX)] {
        let path = CStr::from_bytes_until_nul(&rule.path).map_err(|_| raw::EINVAL)?;
        let parent = match raw::openat(raw::AT_FDCWD, path, raw::O_PATH | raw::O_CLOEXEC) {
            Err(raw::ENOENT) if rule.rights & RULE_OPTIONAL != 0 => continue,
            other => other?,
        };
        raw::landlock_allow(ruleset, parent, rule.rights & !RULE_OPTIONAL)?;
        raw::close(parent)?;
    }
    Ok(ruleset)
}

fn drop_privileges() -> raw::Answer<()> {
    raw::ignore_sigchld()?;
    raw::drop_bounding()?;
    raw::prctl(raw::PR_SET_SECUREBITS, raw::SECUREBITS_LOCKED, 0)?;
    raw::capset_none()?;
    raw::prctl(raw::PR_SET_NO_NEW_PRIVS, 1, 0)?;
    raw::prctl(raw::PR_SET_DUMPABLE, 0, 0)?;
    Ok(())
}
