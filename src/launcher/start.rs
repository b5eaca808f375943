//! From the supervisor's settings to a serving launcher: own namespaces, ids, groups, template, and the
//! measurement of what this host enforces, by doing.

use std::fs;
use std::io;
use std::os::fd::{AsRawFd, OwnedFd};
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use nix::mount::{MsFlags, mount};
use nix::sched::{CloneFlags, setns};
use nix::sys::wait::{WaitPidFlag, waitpid};
use rlimit::Resource;
use rustix::event::{PollFd, PollFlags, poll};
use rustix::fs::{MemfdFlags, SealFlags};

use crate::launcher::cgroup::{Cgroups, Found};
use crate::launcher::child;
use crate::launcher::leases::Leases;
use crate::launcher::plan::{Profile, SpaceId, Step};
use crate::launcher::posture::{Hello, LayerReport, Posture, PostureReport, RuntimeReport};
use crate::launcher::rules::Rules;
use crate::launcher::serve::{self, Abandoned, Launcher, NodeStart};
use crate::launcher::settings::Settings;
use crate::launcher::shell::{Maker, StepError};
use crate::launcher::spaces::Spaces;
use crate::launcher::template::{Bind, Contents, Generated, Template};
use crate::launcher::zygotes::Nursery;
use crate::sys::process::{Fork, fork};
use crate::sys::raw;

/// The programs that interpreters start with, as they lie in the template.
const HARNESS_PY: &str = include_str!("../../harness/harness.py");
const HARNESS_JS: &str = include_str!("../../harness/harness.js");
const ZYGOTE_PY: &str = include_str!("../../harness/zygote.py");
/// Init of a sandbox, made by `build.rs`.
const INIT: &[u8] = include_bytes!(concat!(env!("OUT_DIR"), "/caisson-init"));
/// The zygote's library, made by `build.rs`.
const LIBRARY: &[u8] = include_bytes!(concat!(env!("OUT_DIR"), "/libcaisson.so"));
/// Zygotes get pids above this: a guest is pid 2, and OpenSSL reseeds only when the pid changed in the fork.
const ZYGOTE_PID_LEAST: &str = "1000";
/// How long the throw-away shell of the measurement may take.
const PROBE_TIMEOUT: Duration = Duration::from_secs(20);
/// inotify instances and watches that the host must grant to all sandboxes of one zygote together.
const INOTIFY: [(&str, u64); 2] = [("max_inotify_instances", 65_536), ("max_inotify_watches", 4_194_304)];

/// Why the launcher does not serve.
#[derive(Debug, thiserror::Error)]
pub enum StartError {
    #[error("failed to {what}")]
    Io { what: &'static str, source: io::Error },
    #[error(transparent)]
    Rules(#[from] crate::launcher::rules::RulesError),
}

trait While<T> {
    fn during(self, what: &'static str) -> Result<T, StartError>;
}

impl<T, E: Into<io::Error>> While<T> for Result<T, E> {
    fn during(self, what: &'static str) -> Result<T, StartError> {
        self.map_err(|error| StartError::Io { what, source: error.into() })
    }
}

/// What was measured, and the launcher that may serve if that is enough.
#[derive(Debug)]
pub struct Started {
    pub report: PostureReport,
    pub launcher: Option<Launcher>,
}

/// Prepares everything. Runs as pid 1 of a pid namespace and in a mount namespace of its own, as root.
pub fn start(settings: &Settings, daemon: OwnedFd) -> Result<Started, StartError> {
    let unraised = settle(settings).during("settle into the launcher's namespaces")?;
    let abi = raw::landlock_abi().unwrap_or(0);
    let rules = Rules::load(settings, abi)?;
    let leases =
        if settings.root() { Leases::take() } else { Leases::single(settings.uid, &settings.state_dir) };
    let mut leases = leases.during("take a range of user ids")?;
    let (cgroups, found) = Cgroups::open(leases.name());
    let abandoned = Abandoned::new(leases.abandoned());
    let mut spaces = Spaces::new(&settings.state_dir, settings.space, settings.root())
        .during("open the folder of spaces")?;
    let runtimes = Runtimes::find(settings);
    let point = settings.state_dir.join("template");
    fs::create_dir_all(&point).during("make the template's mount point")?;
    let template =
        Template::build(&point, &contents(settings, &rules, &runtimes)).during("build the template root")?;
    let maker = Maker {
        home: serve::own_namespace("mnt").during("open the mount namespace")?,
        template: template.namespace,
        init: sealed("caisson-init", INIT).during("seal init")?,
        shm: settings.shm,
    };
    let (python, node) = runtimes.versions(&maker, leases.zygote(), rules.own_ids);
    let probed = probe(&maker, &rules, &mut spaces, &mut leases, &cgroups, settings);
    let report = report(settings, &probed, &found, abi);
    if report.posture < settings.posture_floor {
        return Ok(Started { report, launcher: None });
    }
    let python_flags = python_flags(python.as_ref());
    let node_start =
        node.as_ref().map(|node| NodeStart { binary: node.binary.clone(), flags: node_flags(&node.version) });
    let profiles: &[Profile] =
        if python.is_some() && !settings.zygotes_off { &[Profile::Python, Profile::PythonData] } else { &[] };
    let hello = Hello {
        posture: report.clone(),
        accounts: rules.accounts.iter().map(|account| account.name.clone()).collect(),
        warm: Vec::new(),
        warnings: [warnings(&found), found.warnings.clone(), unraised].concat(),
        python: python.clone(),
        node,
    };
    let launcher = Launcher {
        daemon,
        zygote_cgroup: cgroups.side("zygotes").during("make the zygotes' cgroup")?,
        rules,
        maker,
        cgroups,
        cgroup_limits: settings.cgroup,
        spaces,
        leases,
        abandoned,
        nurseries: profiles.iter().map(|profile| Nursery::new(*profile)).collect(),
        python_flags,
        node: node_start,
        python: python.is_some(),
        shells_ready: settings.shells_ready,
        hello,
    };
    Ok(Started { report, launcher: Some(launcher) })
}

/// A private mount tree, a `/proc` of our own pid namespace, limits that bind nobody but ourselves. Returns
/// what an operator should know.
fn settle(settings: &Settings) -> io::Result<Vec<String>> {
    let private = MsFlags::MS_REC | MsFlags::MS_PRIVATE;
    mount(None::<&str>, "/", None::<&str>, private, None::<&str>)?;
    let flags = MsFlags::MS_NOSUID | MsFlags::MS_NODEV | MsFlags::MS_NOEXEC;
    mount(Some("proc"), "/proc", Some("proc"), flags, None::<&str>)?;
    fs::write("/proc/sys/kernel/ns_last_pid", ZYGOTE_PID_LEAST)?;
    nix::sys::prctl::set_dumpable(false)?;
    // Whoever makes a user namespace is charged for all its guests together: these must bind the guests one
    // by one, after they have entered.
    for resource in [Resource::NPROC, Resource::SIGPENDING, Resource::MEMLOCK, Resource::MSGQUEUE] {
        // Without CAP_SYS_RESOURCE our own hard limit is the best there is; `doctor` tells.
        if resource.set(rlimit::INFINITY, rlimit::INFINITY).is_err() {
            let (_, hard) = resource.get()?;
            resource.set(hard, hard)?;
        }
    }
    let (_, hard) = Resource::NOFILE.get()?;
    Resource::NOFILE.set(hard, hard)?;
    Ok(if settings.root() { raise_inotify() } else { Vec::new() })
}

/// A failure is no error, but a guest can then take a neighbour's share: the warnings tell.
fn raise_inotify() -> Vec<String> {
    let mut warnings = Vec::new();
    for (name, wanted) in INOTIFY {
        let path = format!("/proc/sys/user/{name}");
        let current = fs::read_to_string(&path).ok().and_then(|text| text.trim().parse::<u64>().ok());
        if let Some(current) = current.filter(|current| *current < wanted)
            && let Err(error) = fs::write(&path, wanted.to_string())
        {
            warnings.push(format!(
                "{path} is {current} and could not be raised to {wanted} ({error}): all sandboxes of a zygote share it"
            ));
        }
    }
    warnings
}

/// A file in memory that nobody can change any more.
fn sealed(name: &str, content: &[u8]) -> io::Result<OwnedFd> {
    let file = rustix::fs::memfd_create(name, MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING)?;
    let mut rest = content;
    while !rest.is_empty() {
        rest = &rest[rustix::io::write(&file, rest)?..];
    }
    rustix::fs::fchmod(&file, rustix::fs::Mode::from_bits_truncate(0o555))?;
    let seals = SealFlags::SEAL | SealFlags::SHRINK | SealFlags::GROW | SealFlags::WRITE;
    rustix::fs::fcntl_add_seals(&file, seals)?;
    // Read-only, whatever somebody makes of the number.
    let flags = rustix::fs::OFlags::RDONLY | rustix::fs::OFlags::CLOEXEC;
    Ok(rustix::fs::open(format!("/proc/self/fd/{}", file.as_raw_fd()), flags, rustix::fs::Mode::empty())?)
}

// ---- what goes into the template --------------------------------------------------------------------------

/// Interpreters on the host and where they are shown inside.
#[derive(Debug)]
struct Runtimes {
    python: Option<PathBuf>,
    /// Extra trees that the environment's interpreter lives in.
    python_binds: Vec<PathBuf>,
    node: Option<(PathBuf, String)>,
    node_bind: Option<PathBuf>,
}

/// Where a Node outside `/usr` is shown.
const NODE_INSIDE: &str = "/opt/node";

impl Runtimes {
    fn find(settings: &Settings) -> Runtimes {
        let python = settings.python_env.clone().filter(|env| env.join("bin/python3").exists());
        let mut python_binds = Vec::new();
        if let Some(env) = &python
            && let Ok(real) = fs::canonicalize(env.join("bin/python3"))
            && !real.starts_with("/usr")
            && !real.starts_with(env)
            && let Some(prefix) = real.parent().and_then(Path::parent)
        {
            python_binds.push(prefix.to_owned());
        }
        let real = settings.node_binary.as_ref().and_then(|node| fs::canonicalize(node).ok());
        let (node, node_bind) = match real {
            Some(real) if real.starts_with("/usr") => {
                let inside = real.to_string_lossy().into_owned();
                (Some((real, inside)), None)
            }
            Some(real) => {
                let prefix = real.parent().and_then(Path::parent).map(Path::to_owned);
                (Some((real, format!("{NODE_INSIDE}/bin/node"))), prefix)
            }
            None => (None, None),
        };
        Runtimes { python, python_binds, node, node_bind }
    }

    /// Asks each interpreter for its version, inside the template and under a uid of nobody.
    fn versions(
        &self,
        maker: &Maker,
        uid: u32,
        own_ids: bool,
    ) -> (Option<RuntimeReport>, Option<RuntimeReport>) {
        let report = |binary: &str, host: &Path| {
            let text = ask_version(maker, uid, own_ids, binary)?;
            let version = text.trim().trim_start_matches("Python ").to_owned();
            let host_binary = host.to_string_lossy().into_owned();
            Some(RuntimeReport { binary: binary.to_owned(), version, host_binary })
        };
        let python =
            self.python.as_ref().and_then(|env| report("/opt/python/bin/python3", &env.join("bin/python3")));
        let node = self.node.as_ref().and_then(|(host, inside)| report(inside, host));
        (python, node)
    }
}

fn contents(settings: &Settings, rules: &Rules, runtimes: &Runtimes) -> Contents {
    let bind = |source: &Path, target: &str| Bind {
        source: source.to_owned(),
        target: PathBuf::from(target),
        optional: false,
    };
    let mut binds = Vec::new();
    if let Some(python) = &runtimes.python {
        binds.push(bind(python, "/opt/python"));
        binds.extend(runtimes.python_binds.iter().map(|tree| Bind {
            source: tree.clone(),
            target: tree.clone(),
            optional: false,
        }));
    }
    if let Some(caches) = settings.python_caches.as_ref().filter(|caches| caches.is_dir()) {
        binds.push(bind(caches, "/opt/caisson/caches"));
    }
    if let Some(node) = &runtimes.node_bind {
        binds.push(bind(node, NODE_INSIDE));
    }
    let file = |target, content: Vec<u8>| Generated { target, content };
    let mut files = vec![
        file("/opt/caisson/harness.py", HARNESS_PY.into()),
        file("/opt/caisson/harness.js", HARNESS_JS.into()),
        file("/opt/caisson/zygote.py", ZYGOTE_PY.into()),
        file("/opt/caisson/libcaisson.so", LIBRARY.into()),
        file("/opt/caisson/second.bpf", second_layer(rules)),
    ];
    files.extend(rules.etc.iter().map(|(target, text)| file(target, text.clone().into_bytes())));
    Contents { binds, files }
}

/// Length in words, then the words, for each filter.
fn second_layer(rules: &Rules) -> Vec<u8> {
    let mut bytes = Vec::new();
    for program in &rules.second {
        bytes.extend_from_slice(&(program.len() as u64).to_ne_bytes());
        bytes.extend(program.iter().flat_map(|word| word.to_ne_bytes()));
    }
    bytes
}

/// `-P` exists from 3.11 on; not `-I`, which would ignore PYTHONMALLOC.
fn python_flags(python: Option<&RuntimeReport>) -> Vec<&'static str> {
    let minor = python.and_then(|python| python.version.split('.').nth(1)?.parse::<u32>().ok());
    if minor.is_some_and(|minor| minor >= 11) { vec!["-s", "-P", "-B"] } else { vec!["-s", "-B"] }
}

/// Keeps SIGUSR1 from opening an inspector, where the version has a switch for it.
fn node_flags(version: &str) -> Vec<&'static str> {
    let mut parts = version.trim_start_matches('v').split('.').map(|part| part.parse::<u32>().unwrap_or(0));
    let (major, minor) = (parts.next().unwrap_or(0), parts.next().unwrap_or(0));
    let has_switch = major > 23 || (major == 23 && minor >= 7) || (major == 22 && minor >= 14);
    if has_switch { vec!["--disable-sigusr1"] } else { Vec::new() }
}

/// Runs `BINARY --version` in the template as `uid`, with nothing else.
fn ask_version(maker: &Maker, uid: u32, own_ids: bool, binary: &str) -> Option<String> {
    let (mut read, write) = io::pipe().ok()?;
    // SAFETY: the launcher has one thread.
    match unsafe { fork() }.ok()? {
        Fork::Child => {
            drop(read);
            let run = || -> io::Result<std::convert::Infallible> {
                let errno = |errno| io::Error::from_raw_os_error(errno);
                setns(&maker.template, CloneFlags::CLONE_NEWNS)?;
                raw::dup3(write.as_raw_fd(), 1, 0).map_err(errno)?;
                raw::close_from(3).map_err(errno)?;
                child::drop_bounding().map_err(errno)?;
                child::assume(uid, uid, own_ids).map_err(errno)?;
                child::give_up_capabilities().map_err(errno)?;
                raw::prctl(raw::PR_SET_NO_NEW_PRIVS, 1, 0).map_err(errno)?;
                let path = std::ffi::CString::new(binary)?;
                let mut argument_space = [0; 3];
                let mut environment_space = [0; 1];
                let argv = raw::Pointers::collect(&[&path, c"--version"], &mut argument_space);
                let envp = raw::Pointers::collect(&[], &mut environment_space);
                match (argv, envp) {
                    (Some(argv), Some(envp)) => Err(errno(raw::execve(&path, &argv, &envp))),
                    _ => Err(io::Error::from(io::ErrorKind::InvalidInput)),
                }
            };
            drop(run());
            raw::exit(127)
        }
        Fork::Parent(pid) => {
            drop(write);
            let mut text = String::new();
            let read = io::Read::read_to_string(&mut io::Read::take(&mut read, 256), &mut text);
            let ended = waitpid(pid, None);
            let fine = matches!(ended, Ok(nix::sys::wait::WaitStatus::Exited(_, 0)));
            (fine && read.is_ok()).then_some(text)
        }
    }
}

// ---- measurement ------------------------------------------------------------------------------------------

/// Makes one shell with everything and throws it away.
fn probe(
    maker: &Maker,
    rules: &Rules,
    spaces: &mut Spaces,
    leases: &mut Leases,
    cgroups: &Cgroups,
    settings: &Settings,
) -> Result<(), StepError> {
    let at = |step: Step, source: io::Error| StepError { step, source };
    // Number 0 is no tenant's: the daemon cannot name it.
    let space = SpaceId(0);
    spaces.enter(space).map_err(|error| at(Step::SpaceOpen, error))?;
    let block = leases.block().ok_or_else(|| at(Step::Lease, io::Error::other("no user ids are left")))?;
    let leaf = cgroups.leaf("probe", "probe", settings.cgroup).map_err(|error| at(Step::Cgroup, error))?;
    let made = maker.start(rules, spaces, space, 0, block, leaf).and_then(|mut shell| {
        let mut waiting = [PollFd::new(&shell.socket, PollFlags::IN)];
        let timeout = rustix::event::Timespec { tv_sec: PROBE_TIMEOUT.as_secs() as i64, tv_nsec: 0 };
        // A time-out shows as a failed read right after.
        let _ = poll(&mut waiting, Some(&timeout));
        let finished = shell.finish();
        shell.kill();
        let deadline = Instant::now() + PROBE_TIMEOUT;
        while waitpid(shell.pid, Some(WaitPidFlag::__WALL)).is_err() && Instant::now() < deadline {}
        while !shell.leaf.remove() && Instant::now() < deadline {
            std::thread::sleep(Duration::from_millis(2));
        }
        cgroups.remove_space("probe");
        finished
    });
    leases.free(block);
    spaces.leave(space);
    made
}

fn report(settings: &Settings, probed: &Result<(), StepError>, found: &Found, abi: usize) -> PostureReport {
    let whole = probed.is_ok();
    let root = settings.root();
    let failed = probed.as_ref().err().map(|error| format!("{}: {}", error.step, error.source));
    let mut layers = Vec::new();
    let mut layer = |name: &str, enforced: bool, detail: &str, failed: Option<String>, grant: &str| {
        layers.push(LayerReport {
            layer: name.to_owned(),
            enforced,
            detail: detail.to_owned(),
            failed: failed.filter(|_| !enforced),
            grant: (!enforced).then(|| grant.to_owned()),
        });
    };
    let namespaces = "user, mount, pid, network, ipc, uts, cgroup; a root of its own";
    let grant = "user namespaces (user.max_user_namespaces) and CAP_SYS_ADMIN";
    layer("namespaces", whole, namespaces, failed.clone(), grant);
    if root {
        let space = "ext4 image, idmapped: hard limits on bytes and inodes";
        layer("space", whole, space, failed, "loop devices, and mke2fs on the host");
    } else {
        let space = "a folder: a limit per file, none on their sum or number";
        layer("space", false, space, Some("mount: not as this account".to_owned()), "start caisson as root");
    }
    let landlock = format!("file rules, ABI {abi}");
    let missing = Some("landlock_create_ruleset: not supported".to_owned());
    layer("landlock", abi > 0, &landlock, missing, "a kernel with Landlock in its lsm= list");
    layer("seccomp", true, "two layers, default deny", None, "");
    for (name, version) in [("memory", found.memory), ("pids", found.pids), ("cpu", found.cpu)] {
        let grant = format!("a writable cgroup with the {name} controller");
        let detail = version.unwrap_or("not bounded");
        layer(&format!("cgroup {name}"), version.is_some(), detail, found.failed.clone(), &grant);
    }
    if root {
        layer("identity", true, "a block of host user ids for each sandbox, init under its own", None, "");
    } else {
        let shared = "one user id for all sandboxes and their inits, the account's own";
        layer(
            "identity",
            false,
            shared,
            Some("setuid: not as this account".to_owned()),
            "start caisson as root",
        );
    }
    layer("capabilities", true, "none in any set, securebits locked, no_new_privs", None, "");
    layer("rlimits", true, "core, nofile, nproc, memlock, sigpending, msgqueue, fsize", None, "");
    let posture = match (root, whole && abi > 0) {
        (true, true) if found.complete() => Posture::Full,
        (false, true) => Posture::Userns,
        _ => Posture::Process,
    };
    PostureReport { posture, layers, root, uid: settings.uid }
}

fn warnings(found: &Found) -> Vec<String> {
    let mut warnings = Vec::new();
    if fs::read_to_string("/sys/kernel/mm/ksm/run").is_ok_and(|run| run.trim() == "1") {
        warnings.push("KSM runs on this host: equal pages of two tenants may be merged and timed".to_owned());
    }
    if let Some(failed) = &found.failed {
        warnings.push(format!("cgroups are incomplete: {failed}"));
    }
    warnings
}
