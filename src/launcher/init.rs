//! Pid 1 of a sandbox: builds its mounts, gives up everything, reaps.
//!
//! A program of its own, static and without any library, so that it costs a sandbox some pages: `build.rs`
//! makes it from this file, `wire.rs`, `sys/raw.rs` and `sys/freestanding.rs`; the binary embeds it and the
//! launcher executes it from a sealed memfd. It never sees a guest's byte.
//!
//! Starts with every capability over its own namespaces and none over the host; descriptor 3 is the
//! launcher's socket. Ends when the launcher closes that.
//!
//! Without namespaces (`bare.rs`) there is nothing to build and no pid namespace to keep a sandbox's processes
//! together. Init is then their ancestor: it waits, with the privileges it was started with, for one job, forks
//! the guest by the one checklist, gives up everything, reaps and reports how the guest ended.

#![no_std]
#![no_main]

mod child;
#[path = "../sys/freestanding.rs"]
mod freestanding;
#[path = "../sys/raw.rs"]
mod raw;
mod wire;

use core::ffi::CStr;

use child::{Failed, Thread};
use wire::{
    FILTER_WORDS, FILTERS_MAX, GUEST_EXITED, GUEST_SIGNALED, JOB_MAGIC, LAUNCH_BYTES, LAUNCH_WORDS_MAX, Launch,
    RULE_OPTIONAL, SETUP_BARE, SETUP_CGROUP, SETUP_OWN_ID, SETUP_ROOT, SETUP_SPACE, SETUP_USER, Setup, slot, step,
};

const SOCKET: i32 = 3;
const DESCRIPTORS_MAX: usize = 32;

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
        init_id: 0,
        _pad: 0,
        rules: [wire::Rule { rights: 0, path: [0; wire::RULE_PATH_BYTES] }; wire::RULES_MAX],
        filter: [0; wire::INIT_FILTER_WORDS],
    };
    let mut trees = [-1; 3];
    let Ok((length, count)) = raw::receive(SOCKET, wire::bytes_of_mut(&mut setup), &mut trees) else {
        raw::exit(1)
    };
    let bare = setup.flags & SETUP_BARE != 0;
    let wanted = match () {
        () if bare => 1,
        () if setup.flags & SETUP_SPACE != 0 => 3,
        () => 0,
    };
    if length != wire::SETUP_BYTES || setup.magic != wire::SETUP_MAGIC || count != wanted {
        raw::exit(1)
    }
    if bare {
        stand_by(&setup, trees[0])
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
    let own_id = (setup.flags & SETUP_OWN_ID != 0).then_some(setup.init_id);
    at(step::INIT_DROP, drop_privileges(own_id))?;
    at(step::INIT_DROP, raw::send(SOCKET, &wire::status(0, 0), ruleset))?;
    match ruleset {
        Some(fd) => at(step::INIT_DROP, raw::close(fd)),
        None => Ok(()),
    }
}

/// Reaps by ignoring SIGCHLD and waits for the launcher to let go.
fn live(setup: &Setup) -> ! {
    if install_filter(setup).is_err() {
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

fn install_filter(setup: &Setup) -> raw::Answer<()> {
    match (setup.filter_words as usize).min(wire::INIT_FILTER_WORDS) {
        0 => Ok(()),
        words => raw::seccomp_install(&setup.filter[..words]),
    }
}

/// The filters of a guest, one after the other.
struct Filters {
    words: [u64; FILTER_WORDS],
    ends: [usize; FILTERS_MAX],
    count: usize,
}

/// Without namespaces: the ancestor of whatever the guest leaves behind, waiting for its one job.
fn stand_by(setup: &Setup, filters: i32) -> ! {
    let mut loaded = Filters { words: [0; FILTER_WORDS], ends: [0; FILTERS_MAX], count: 0 };
    let ready = raw::prctl(raw::PR_SET_CHILD_SUBREAPER, 1, 0)
        .and_then(|_| raw::prctl(raw::PR_SET_PDEATHSIG, raw::SIGKILL as u64, 0))
        .and_then(|_| raw::prctl(raw::PR_SET_DUMPABLE, 0, 0))
        .and_then(|_| load(filters, &mut loaded))
        .and_then(|()| raw::block_sigchld())
        .and_then(|()| raw::sigchld_fd());
    let signals = match ready {
        Ok(signals) => signals,
        Err(errno) => {
            // Nobody to tell when the socket is gone as well.
            let _ = raw::send(SOCKET, &wire::status(step::INIT_DROP, errno), None);
            raw::exit(1)
        }
    };
    if raw::send(SOCKET, &wire::status(0, 0), None).is_err() {
        raw::exit(1)
    }
    let mut launch = Launch {
        job: wire::Job::default(),
        argument_count: 0,
        environment_count: 0,
        words: [0; wire::LAUNCH_WORD_BYTES],
    };
    let mut descriptors = [-1; DESCRIPTORS_MAX];
    let received = raw::receive(SOCKET, wire::bytes_of_mut(&mut launch), &mut descriptors);
    let Ok((LAUNCH_BYTES, count)) = received else { raw::exit(0) };
    if launch.job.magic != JOB_MAGIC || count != slot::FIXED + launch.job.cgroups as usize {
        raw::exit(1)
    }
    match raw::fork(raw::SIGCHLD) {
        Ok(0) => become_guest(&launch, &descriptors[..count], &loaded),
        Ok(guest) => {
            for fd in &descriptors[..count] {
                // Nothing to do about a close that fails: the number is free either way.
                let _ = raw::close(*fd);
            }
            let own_id = (setup.flags & SETUP_OWN_ID != 0).then_some(setup.init_id);
            let let_go = if launch.job.unprivileged == 0 { drop_privileges(own_id) } else { Ok(()) };
            // The change of identity cleared what ends us with the launcher.
            let let_go = let_go
                .and_then(|()| raw::prctl(raw::PR_SET_PDEATHSIG, raw::SIGKILL as u64, 0))
                .and_then(|_| raw::prctl(raw::PR_SET_NO_NEW_PRIVS, 1, 0))
                .and_then(|_| install_filter(setup));
            if let_go.is_err() {
                raw::exit(1)
            }
            reap(guest as i32, signals)
        }
        Err(errno) => {
            let _ = raw::write(descriptors[slot::STATUS], &wire::status(step::CLONE, errno));
            raw::exit(1)
        }
    }
}

/// In the guest's process, still with init's privileges.
fn become_guest(launch: &Launch, descriptors: &[i32], filters: &Filters) -> ! {
    let status = descriptors[slot::STATUS];
    let words = Words::of(launch);
    let empty: &[u64] = &[];
    let mut programs = [empty; FILTERS_MAX];
    let mut start = 0;
    for (program, end) in programs.iter_mut().zip(&filters.ends[..filters.count]) {
        *program = &filters.words[start..*end];
        start = *end;
    }
    let Some(words) = words else { child::give_up(status, &Failed(step::EXEC, raw::EINVAL)) };
    let none = Thread { tid: 0, robust: (0, 0), rseq: (0, 0) };
    let [home, program] = [words.all[0], words.all[1]];
    let entered = at(step::THREAD, raw::unblock_signals())
        .and_then(|()| child::confine(&launch.job, descriptors, none, &programs[..filters.count], home));
    if let Err(failed) = entered {
        let early = failed.0 == step::THREAD || failed.0 == step::DESCRIPTORS;
        child::give_up(if early { status } else { slot::STATUS as i32 }, &failed);
    }
    let mut argument_space = [0; LAUNCH_WORDS_MAX + 1];
    let mut environment_space = [0; LAUNCH_WORDS_MAX + 1];
    let argv = raw::Pointers::collect(words.arguments(), &mut argument_space);
    let envp = raw::Pointers::collect(words.environment(), &mut environment_space);
    if let (Some(argv), Some(envp)) = (argv, envp) {
        raw::execve(program, &argv, &envp);
    }
    raw::exit(127)
}

/// The words of a launch: home, program, arguments, environment.
struct Words<'a> {
    all: [&'a CStr; LAUNCH_WORDS_MAX],
    arguments: usize,
    environment: usize,
}

impl<'a> Words<'a> {
    fn of(launch: &'a Launch) -> Option<Words<'a>> {
        let (arguments, environment) = (launch.argument_count as usize, launch.environment_count as usize);
        let wanted = arguments.checked_add(environment)?.checked_add(2)?;
        let mut all = [c""; LAUNCH_WORDS_MAX];
        let mut rest = &launch.words[..];
        for word in all.get_mut(..wanted)? {
            *word = CStr::from_bytes_until_nul(rest).ok()?;
            rest = &rest[word.count_bytes() + 1..];
        }
        Some(Words { all, arguments, environment })
    }

    fn arguments(&self) -> &[&'a CStr] {
        &self.all[2..2 + self.arguments]
    }

    fn environment(&self) -> &[&'a CStr] {
        &self.all[2 + self.arguments..2 + self.arguments + self.environment]
    }
}

/// Reaps whatever ends below us and reports the guest's end; waits for the launcher to let go.
fn reap(guest: i32, signals: i32) -> ! {
    let mut buffer = [0_u8; raw::SIGNAL_INFO_BYTES];
    loop {
        let Ok(ready) = raw::poll_two(SOCKET, signals) else { raw::exit(1) };
        if ready.0 {
            // Not a word comes any more: this is its end.
            raw::exit(0)
        }
        if ready.1 && raw::read(signals, &mut buffer).is_err() {
            raw::exit(1)
        }
        while let Ok(Some((pid, how))) = raw::reap_any() {
            if pid == guest {
                let (kind, number) = match how {
                    raw::Ended::Exited(code) => (GUEST_EXITED, code),
                    raw::Ended::Signaled(signal) => (GUEST_SIGNALED, signal),
                };
                if raw::write(SOCKET, &wire::status(kind, number)).is_err() {
                    raw::exit(1)
                }
            }
        }
    }
}

/// Reads the filters: for each its length in words, then the words. At offsets of our own: others read the same
/// open file.
fn load(file: i32, filters: &mut Filters) -> raw::Answer<()> {
    let mut offset = 0;
    let mut filled = 0;
    let mut word = [0_u8; 8];
    while raw::pread(file, &mut word, offset)? == word.len() {
        let length = u64::from_ne_bytes(word) as usize;
        offset += word.len();
        if filters.count == FILTERS_MAX || length > FILTER_WORDS - filled {
            return Err(raw::EINVAL);
        }
        for slot in &mut filters.words[filled..filled + length] {
            if raw::pread(file, &mut word, offset)? != word.len() {
                return Err(raw::EINVAL);
            }
            *slot = u64::from_ne_bytes(word);
            offset += word.len();
        }
        filled += length;
        filters.ends[filters.count] = filled;
        filters.count += 1;
    }
    raw::close(file)
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

fn drop_privileges(own_id: Option<u32>) -> raw::Answer<()> {
    raw::ignore_sigchld()?;
    raw::drop_bounding()?;
    raw::prctl(raw::PR_SET_SECUREBITS, raw::SECUREBITS_LOCKED, 0)?;
    if let Some(id) = own_id {
        raw::setgroups_none()?;
        raw::setresgid(id)?;
        raw::setresuid(id)?;
    }
    raw::capset_none()?;
    raw::prctl(raw::PR_SET_NO_NEW_PRIVS, 1, 0)?;
    raw::prctl(raw::PR_SET_DUMPABLE, 0, 0)?;
    Ok(())
}
