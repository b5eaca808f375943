//! Zygotes: warmed interpreters inside the template that fork guests into shells.
//!
//! ```text
//! Starting ── one byte ──▶ Serving ── end ──▶ (restarted, with less preloaded if it never served)
//!                             │
//!                             └── enough forks, successor serves ──▶ Retired ── last job done ──▶ ended
//! ```
//!
//! A zygote is unprivileged and has a uid that no other process has or gets while a guest it made lives. The
//! launcher takes one byte from it, ever.

use std::ffi::CString;
use std::io;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd};
use std::time::{Duration, Instant};

use landlock::{CompatLevel, Compatible, Ruleset, RulesetAttr, RulesetCreated, Scope};
use nix::mount::{MsFlags, mount};
use nix::sched::{CloneFlags, setns, unshare};
use nix::unistd::Pid;

use crate::launcher::child;
use crate::launcher::guest::InterpreterStart;
use crate::launcher::plan::Profile;
use crate::launcher::rules::Rules;
use crate::sys::process::{Fork, fork};
use crate::sys::{packet, raw};

/// How long a zygote may load.
pub const START_TIMEOUT: Duration = Duration::from_secs(120);
/// Waits between restarts, so that a zygote that cannot live does not eat a core.
const RESTART_WAIT: Duration = Duration::from_secs(1);
/// Wait before the next try when a successor did not come up: nothing is lost while the old one serves.
const ROTATION_WAIT: Duration = Duration::from_secs(60);
/// What `python-data` gives up, one after the other, when it does not come up: the heaviest first.
const EXPENDABLE: [&str; 4] = ["IPython", "matplotlib", "pandas", "numpy"];

/// A running zygote process.
#[derive(Debug)]
pub struct Zygote {
    pub pid: Pid,
    pub socket: OwnedFd,
    pub uid: u32,
    pub serving: bool,
    /// It did what a zygote does not do, and is being ended: no job goes there any more.
    pub condemned: bool,
    pub started: Instant,
    pub forks: u64,
}

/// What a profile's zygote has gone through.
#[derive(Debug)]
pub struct Nursery {
    pub profile: Profile,
    /// Gets the jobs, once it serves.
    current: Option<Zygote>,
    /// Loads while `current` still serves, to take its place.
    successor: Option<Zygote>,
    /// Replaced; each finishes what it was given.
    retired: Vec<Zygote>,
    forks_max: u64,
    /// No successor is started before.
    rotate_at: Option<Instant>,
    /// Names of [`EXPENDABLE`] left out.
    pub without: Vec<&'static str>,
    pub restart_at: Option<Instant>,
    /// No way to make this profile serve was found.
    pub given_up: bool,
    /// One of its zygotes has served.
    pub served: bool,
}

/// What a zygote needs to start.
#[derive(Debug)]
pub struct Ground<'a> {
    pub template: BorrowedFd<'a>,
    pub rules: &'a Rules,
    /// Files of the zygotes' own cgroup.
    pub cgroup: &'a [OwnedFd],
    pub python: &'a InterpreterStart,
    /// `PATH` of guests.
    pub path: &'a str,
}

impl Nursery {
    pub fn new(profile: Profile, forks_max: u64) -> Nursery {
        Nursery {
            profile,
            current: None,
            successor: None,
            retired: Vec::new(),
            forks_max,
            rotate_at: None,
            without: Vec::new(),
            restart_at: None,
            given_up: false,
            served: false,
        }
    }

    /// The zygote that gets jobs, if it serves.
    pub fn serving(&self) -> Option<&Zygote> {
        self.current.as_ref().filter(|zygote| zygote.serving && !zygote.condemned)
    }

    /// The zygote that may fill shells of `owner`: the serving one, or one that it has replaced.
    pub fn for_owner(&mut self, owner: u32) -> Option<&mut Zygote> {
        let fits = |zygote: &&mut Zygote| zygote.uid == owner && zygote.serving && !zygote.condemned;
        self.current.iter_mut().chain(&mut self.retired).find(fits)
    }

    /// Every process of this profile.
    pub fn all(&self) -> impl Iterator<Item = &Zygote> {
        self.current.iter().chain(&self.successor).chain(&self.retired)
    }

    pub fn find_mut(&mut self, pid: Pid) -> Option<&mut Zygote> {
        let mut all = self.current.iter_mut().chain(&mut self.successor).chain(&mut self.retired);
        all.find(|zygote| zygote.pid == pid)
    }

    pub fn retired(&self) -> impl Iterator<Item = &Zygote> {
        self.retired.iter()
    }

    /// When there is something to do that no event tells of.
    pub fn next_timer(&self) -> Option<Instant> {
        let loading = self.all().filter(|zygote| !zygote.serving && !zygote.condemned);
        let rotation = self.rotate_at.filter(|_| self.serving().is_some());
        loading.map(|zygote| zygote.started + START_TIMEOUT).chain(self.restart_at).chain(rotation).min()
    }

    /// Whether a zygote is to be started now: the first, one after a death, or one to replace another.
    pub fn wants_start(&self, now: Instant) -> bool {
        let has_forked_enough = self.serving().is_some_and(|zygote| zygote.forks >= self.forks_max);
        let may_rotate = self.successor.is_none() && self.rotate_at.is_none_or(|at| now >= at);
        self.restart_at.is_some_and(|at| now >= at) || has_forked_enough && may_rotate
    }

    /// Starts a zygote under `uid`, beside the one that serves if there is one. Returns its pid.
    pub fn start(&mut self, ground: &Ground<'_>, uid: u32) -> io::Result<Pid> {
        // Until it is known to run, the next try is a later one.
        let now = Instant::now();
        match self.current {
            Some(_) => self.rotate_at = Some(now + ROTATION_WAIT),
            None => self.restart_at = Some(now + RESTART_WAIT),
        }
        let (ours, theirs) = packet::pair()?;
        // A zygote that does not read must not make us wait.
        rustix::io::ioctl_fionbio(&ours, true)?;
        let arguments = self.arguments(ground.python);
        // SAFETY: the launcher has one thread.
        let pid = match unsafe { fork() }? {
            Fork::Child => become_zygote(ground, uid, theirs.as_fd(), &arguments),
            Fork::Parent(pid) => pid,
        };
        tracing::info!(profile = self.profile.name(), %pid, uid, without = ?self.without, "zygote started");
        let zygote =
            Zygote { pid, socket: ours, uid, serving: false, condemned: false, started: now, forks: 0 };
        if self.current.is_some() {
            self.rotate_at = None;
            self.successor = Some(zygote);
        } else {
            self.restart_at = None;
            self.current = Some(zygote);
        }
        Ok(pid)
    }

    /// The zygote `pid` has finished loading. A successor takes its place now; returns the owner whose shells
    /// it replaces, and its own uid.
    pub fn serves(&mut self, pid: Pid) -> Option<(u32, u32)> {
        self.served = true;
        self.find_mut(pid)?.serving = true;
        if self.successor.as_ref().is_none_or(|zygote| zygote.pid != pid) {
            return None;
        }
        let old = std::mem::replace(&mut self.current, self.successor.take())?;
        let owners = (old.uid, self.current.as_ref()?.uid);
        self.retired.push(old);
        Some(owners)
    }

    /// Takes note that the zygote `pid` is gone, and decides on its successor. Returns a warning for the
    /// operator when something had to be left out.
    pub fn ended(&mut self, pid: Pid, now: Instant) -> Option<String> {
        self.retired.retain(|zygote| zygote.pid != pid);
        let name = self.profile.name();
        if self.successor.take_if(|zygote| zygote.pid == pid).is_some() {
            tracing::warn!(profile = name, "the zygote's successor did not come up; the old one serves on");
            self.rotate_at = Some(now + ROTATION_WAIT);
            return None;
        }
        let zygote = self.current.take_if(|zygote| zygote.pid == pid)?;
        self.rotate_at = None;
        // One that loads already is nearer to serving than a new one.
        self.current = self.successor.take();
        self.restart_at = self.current.is_none().then(|| now + RESTART_WAIT);
        if zygote.serving {
            return None;
        }
        let next = EXPENDABLE.get(self.without.len()).filter(|_| self.profile == Profile::PythonData);
        match next {
            Some(package) => {
                self.without.push(package);
                Some(format!("zygote {name} did not come up; trying without {}", self.without.join(", ")))
            }
            None => {
                self.given_up = true;
                self.restart_at = None;
                Some(format!("zygote {name} cannot be started; its interpreters are exec'd instead"))
            }
        }
    }

    fn arguments(&self, python: &InterpreterStart) -> Vec<CString> {
        let mut words = vec![python.binary.as_str()];
        words.extend(&python.flags);
        words.extend(["/opt/caisson/zygote.py", self.profile.name()]);
        for package in &self.without {
            words.extend(["--without", package]);
        }
        words.into_iter().map(|word| CString::new(word).expect("our own words have no NUL")).collect()
    }
}

/// Environment of a zygote: built from nothing, and free of secrets, since a guest can read it.
const ENVIRONMENT: [&str; 8] = [
    "LANG=C.UTF-8",
    "OPENBLAS_NUM_THREADS=1",
    "OMP_NUM_THREADS=1",
    "MPLBACKEND=Agg",
    "MPLCONFIGDIR=/opt/caisson/caches/matplotlib",
    "IPYTHONDIR=/opt/caisson/caches/ipython",
    "PYTHONMALLOC=malloc",
    "GLIBC_TUNABLES=glibc.malloc.hugetlb=1",
];

/// glibc reads these when it starts, before it asks for huge pages, which a fork profits from. Only a
/// zygote's own mount namespace has them.
const HUGE_PAGES: [(&str, &str); 2] =
    [("enabled", "always [madvise] never\n"), ("hpage_pmd_size", "2097152\n")];

/// In the child, with the launcher's privileges until `child::assume`: enters the template, becomes nobody,
/// executes the interpreter.
fn become_zygote(ground: &Ground<'_>, uid: u32, socket: BorrowedFd<'_>, arguments: &[CString]) -> ! {
    let path = format!("PATH={}", ground.path);
    let words = ENVIRONMENT.iter().copied().chain([path.as_str()]);
    let environment: Vec<CString> =
        words.map(|word| CString::new(word).expect("our own words have no NUL")).collect();
    let error = match settle(ground, uid, socket) {
        Ok(()) => exec(arguments, &environment),
        Err(error) => error,
    };
    // The log is still this process's standard error.
    let _ = io::Write::write_all(&mut io::stderr(), format!("zygote not started: {error}\n").as_bytes());
    raw::exit(127)
}

fn settle(ground: &Ground<'_>, uid: u32, socket: BorrowedFd<'_>) -> io::Result<()> {
    for join in ground.cgroup {
        rustix::io::write(join, b"0")?;
    }
    setns(ground.template, CloneFlags::CLONE_NEWNS)?;
    // Empty network, no System V objects, no host name: a zygote has nothing to share with its guests' host.
    unshare(
        CloneFlags::CLONE_NEWNS
            | CloneFlags::CLONE_NEWNET
            | CloneFlags::CLONE_NEWIPC
            | CloneFlags::CLONE_NEWUTS
            | CloneFlags::CLONE_NEWCGROUP,
    )?;
    show_huge_pages()?;
    let null = raw::openat(raw::AT_FDCWD, c"/dev/null", raw::O_RDWR | raw::O_CLOEXEC);
    let errno = |errno| io::Error::from_raw_os_error(errno);
    raw::dup3(null.map_err(errno)?, 0, 0).map_err(errno)?;
    raw::dup3(2, 1, 0).map_err(errno)?;
    // 3 is the number the zygote knows; the socket may already have it.
    let copy = raw::dup_above(socket.as_raw_fd(), 10).map_err(errno)?;
    raw::dup3(copy, 3, 0).map_err(errno)?;
    raw::close_from(4).map_err(errno)?;
    raw::umask(0o022);
    raw::setsid().map_err(errno)?;
    raw::unblock_signals().map_err(errno)?;
    raw::drop_bounding().map_err(errno)?;
    raw::prctl(raw::PR_SET_SECUREBITS, raw::SECUREBITS_LOCKED, 0).map_err(errno)?;
    // Without ids of its own a zygote stays root of a namespace that is root of nothing, with its capabilities
    // gone and locked away.
    child::assume(uid, uid, ground.rules.own_ids).map_err(errno)?;
    child::give_up_capabilities().map_err(errno)?;
    // A change of identity clears it, so only now.
    raw::prctl(raw::PR_SET_PDEATHSIG, raw::SIGKILL as u64, 0).map_err(errno)?;
    raw::prctl(raw::PR_SET_NO_NEW_PRIVS, 1, 0).map_err(errno)?;
    keep_apart()?;
    for program in &ground.rules.first {
        raw::seccomp_install(program).map_err(errno)?;
    }
    Ok(())
}

/// A Landlock domain of its own, where the kernel has one. It owns the user namespaces of the shells made for it, and so
/// has CAP_KILL and CAP_SYS_PTRACE over every init there, the first moments of one included, when the launcher waits
/// for it: from inside a domain nobody outside can be traced, nor, from ABI 6 on, signalled. Files are not handled: that
/// would forbid mounts to its forks.
fn keep_apart() -> io::Result<()> {
    let created = Ruleset::default().set_compatibility(CompatLevel::BestEffort).scope(Scope::Signal);
    match created.and_then(Ruleset::create).and_then(RulesetCreated::restrict_self) {
        Ok(_) => Ok(()),
        Err(error) => Err(io::Error::other(error)),
    }
}

/// In the zygote's own mount namespace.
fn show_huge_pages() -> io::Result<()> {
    let flags = MsFlags::MS_NOSUID | MsFlags::MS_NODEV | MsFlags::MS_NOEXEC;
    mount(Some("sys"), "/sys", Some("tmpfs"), flags, Some("size=64k,mode=755"))?;
    let dir = std::path::Path::new("/sys/kernel/mm/transparent_hugepage");
    std::fs::create_dir_all(dir)?;
    for (name, content) in HUGE_PAGES {
        std::fs::write(dir.join(name), content)?;
    }
    let read_only = flags | MsFlags::MS_REMOUNT | MsFlags::MS_RDONLY;
    Ok(mount(None::<&str>, "/sys", None::<&str>, read_only, None::<&str>)?)
}

fn exec(arguments: &[CString], environment: &[CString]) -> io::Error {
    let arguments: Vec<_> = arguments.iter().map(CString::as_c_str).collect();
    let environment: Vec<_> = environment.iter().map(CString::as_c_str).collect();
    let mut argument_space = vec![0; arguments.len() + 1];
    let mut environment_space = vec![0; environment.len() + 1];
    let argv = raw::Pointers::collect(&arguments, &mut argument_space);
    let envp = raw::Pointers::collect(&environment, &mut environment_space);
    match (argv, envp) {
        (Some(argv), Some(envp)) => io::Error::from_raw_os_error(raw::execve(arguments[0], &argv, &envp)),
        _ => io::Error::from(io::ErrorKind::InvalidInput),
    }
}

/// Reads the one byte of a zygote that has finished loading.
pub fn read_ready(socket: impl AsFd) -> bool {
    let mut byte = [0_u8; 1];
    matches!(packet::receive(socket, &mut byte, rustix::net::RecvFlags::empty()), Ok((1, _)))
}

#[cfg(test)]
mod apart {
    use super::*;

    #[test]
    fn a_zygote_reaches_nobody_outside_its_domain_by_signal_or_trace() {
        let mut outside = std::process::Command::new("sleep").arg("60").spawn().expect("it starts");
        let pid = Pid::from_raw(outside.id() as i32);
        assert_eq!(nix::sys::signal::kill(pid, None), Ok(()), "control: it may be signalled from here");
        let answers = std::thread::spawn(move || {
            raw::prctl(raw::PR_SET_NO_NEW_PRIVS, 1, 0).expect("always allowed");
            keep_apart().expect("a domain, or a kernel without");
            let mut inside = std::process::Command::new("sleep").arg("60").spawn().expect("it starts");
            let own = Pid::from_raw(inside.id() as i32);
            let answers = (nix::sys::signal::kill(pid, None), nix::sys::signal::kill(own, None));
            let _ = inside.kill();
            let _ = inside.wait();
            answers
        });
        let answers = answers.join().expect("no panic");
        let _ = outside.kill();
        let _ = outside.wait();
        // Below ABI 6 there is no such scope, and `doctor` shows the ABI.
        if raw::landlock_abi().unwrap_or(0) >= 6 {
            assert_eq!(answers.0, Err(nix::Error::EPERM));
        }
        assert_eq!(answers.1, Ok(()));
    }
}
