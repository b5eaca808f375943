//! From the supervisor's settings to a serving launcher: own namespaces, ids, groups, template, and the
//! measurement of what this host enforces, by doing.

use std::collections::HashSet;
use std::ffi::{CStr, CString};
use std::fs::{self, Permissions};
use std::io;
use std::os::fd::{AsRawFd, OwnedFd};
use std::os::unix::fs::{PermissionsExt, symlink};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::{Duration, Instant};

use nix::mount::{MsFlags, mount};
use nix::sched::{CloneFlags, setns};
use nix::sys::wait::{WaitPidFlag, waitpid};
use rlimit::Resource;
use rustix::event::{PollFd, PollFlags, poll};
use rustix::fs::{MemfdFlags, SealFlags};

use crate::launcher::bare;
use crate::launcher::cgroup::{Cgroups, Found};
use crate::launcher::child;
use crate::launcher::guest::{self, InterpreterStart, Place, Program, Programs};
use crate::launcher::leases::Leases;
use crate::launcher::measured::{Measured, Missed};
use crate::launcher::plan::{Profile, SpaceId, Step};
use crate::launcher::posture::{Hello, Posture, PostureReport, RuntimeReport, Shape};
use crate::launcher::release;
use crate::launcher::rules::Rules;
use crate::launcher::serve::{self, Abandoned, Launcher};
use crate::launcher::settings::Settings;
use crate::launcher::shell::{AtStep, Left, Lot, Maker, NotStarted, Shell, StepError, Yard, failure};
use crate::launcher::spaces::{Footing, Owners, Spaces};
use crate::launcher::template::{Bind, Contents, Generated, Template};
use crate::launcher::views::Views;
use crate::launcher::wire::{RULE_PATH_BYTES, STATUS_BYTES};
use crate::launcher::zygotes::Nursery;
use crate::sys::process::{Fork, fork};
use crate::sys::{packet, raw};

/// The programs that interpreters start with, as they lie in the template.
const HARNESS_PY: &str = include_str!("../../harness/harness.py");
const KERNEL_PY: &str = include_str!("../../harness/kernel.py");
const PROGRAM_PY: &str = include_str!("../../harness/program.py");
const HARNESS_JS: &str = include_str!("../../harness/harness.js");
const ZYGOTE_PY: &str = include_str!("../../harness/zygote.py");
/// Init of a sandbox, made by `build.rs`.
const INIT: &[u8] = include_bytes!(concat!(env!("OUT_DIR"), "/caisson-init"));
/// Our own binary, whatever has become of its name since it was started, and its name among the harnesses.
const OWN_BINARY: &str = "/proc/self/exe";
const OWN_NAME: &str = "caisson";
/// The zygote's library, made by `build.rs`.
const LIBRARY: &[u8] = include_bytes!(concat!(env!("OUT_DIR"), "/libcaisson.so"));
/// The same with bare forks, for a launcher that measures and serves nobody.
const LIBRARY_BARE: &[u8] = include_bytes!(concat!(env!("OUT_DIR"), "/libcaisson-bare.so"));
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

/// Prepares everything. Runs as root or as an ordinary account; as pid 1 of a pid namespace and in a mount
/// namespace of its own, unless the settings say that there are none.
pub fn start(settings: &Settings, daemon: OwnedFd) -> Result<Started, StartError> {
    let unraised = settle(settings).during("settle into the launcher's namespaces")?;
    let abi = raw::landlock_abi().unwrap_or(0);
    let first = Rules::load(settings, abi, Shape::UserNamespace)?;
    let leases =
        if settings.root() { Leases::take() } else { Leases::single(settings.uid, &settings.state_dir) };
    let mut leases = leases.during("take a range of user ids")?;
    let (cgroups, found) = Cgroups::open(leases.name(), settings.throwaway.cpu_secs.is_some());
    let abandoned = Abandoned::new(leases.abandoned(), &cgroups);
    let mut runtimes = Runtimes::find(settings);
    runtimes.shown = first.shown.iter().flat_map(|pattern| matching(pattern)).collect();
    let mut missed = Missed::default();
    let yard = match &settings.no_namespaces {
        Some(failed) => {
            missed.namespaces = Some(failed.clone());
            None
        }
        None => yard(settings, &first, &runtimes)
            .map_err(|error| missed.namespaces = Some(error.to_string()))
            .ok(),
    };
    let mut spaces = Spaces::new(
        &settings.state_dir,
        settings.spaces_under.as_deref(),
        settings.space,
        settings.spaces_max,
        footing(&first, yard.is_some()),
    )
    .during("open the folder of spaces")?;
    let mut ground = bare::Ground { runtimes: runtimes.on_host(), filters: filters_file(&first)? };
    let mut maker = Maker {
        yard,
        ground: ground.clone(),
        init: sealed("caisson-init", INIT).during("seal init")?,
        shm: settings.shm,
    };
    let mut made = None;
    for shape in shapes(settings, maker.yard.is_some()).iter().copied() {
        let mut rules = Rules::load(settings, abi, shape)?;
        rules.bound_processes(found.pids.is_some(), bare::tasks_of(settings.uid));
        for path in runtimes.readable() {
            rules.let_read(path)?;
        }
        if shape == Shape::Bare {
            match prepare_bare(settings, abi, &spaces, runtimes.toolchains.as_deref()) {
                Ok(harness) => ground.runtimes.push(harness),
                Err(error) => {
                    missed.bare = Some(error.to_string());
                    continue;
                }
            }
            ground.filters = filters_file(&rules)?;
            maker.ground = ground.clone();
        }
        // With an image of its own for each space; where that fails, with folders.
        let mut images = shape != Shape::Bare && settings.root();
        loop {
            spaces.settle(footing(&rules, images), &mut leases).during("look at the folders of spaces")?;
            match probe(&maker, &rules, &mut spaces, &mut leases, &cgroups, settings) {
                Ok(()) => {
                    made = Some((rules, images));
                    break;
                }
                Err(error) if images && matches!(error.step, Step::SpaceOpen | Step::SpaceMount) => {
                    missed.images = Some(error.to_string());
                    images = false;
                }
                Err(error) => {
                    missed.note(shape, &error);
                    break;
                }
            }
        }
        if made.is_some() {
            break;
        }
    }
    let shape = made.as_ref().map(|(rules, _)| rules.shape);
    let images = made.as_ref().is_some_and(|(_, images)| *images);
    let measured = Measured { shape, images, missed, cgroups: &found, landlock: abi };
    let report = measured.report(settings);
    let served = made.filter(|_| report.posture != Posture::None && report.posture >= settings.posture_floor);
    let Some((rules, _)) = served else {
        if settings.posture_floor == Posture::None {
            // Somebody asked what there is, whatever that be.
            tell(&daemon, &report, warnings(&found)).during("tell what was measured")?;
        }
        return Ok(Started { report, launcher: None });
    };
    if report.posture == Posture::Process && settings.tenants > 1 {
        let source = io::Error::other(format!("{} tenants are configured", settings.tenants));
        return Err(StartError::Io { what: "serve: posture process is for one tenant only", source });
    }
    let mounts = maker.yard.is_some() && rules.shape != Shape::Bare;
    let inner =
        (rules.own_ids && !rules.ids_on_disk()).then(|| (rules.accounts[0].uid, rules.accounts[0].gid));
    let views = settings.views.as_ref().map(|views| Views::prepare(views, inner, mounts));
    spaces.furnish(views.transpose().during("prepare the daemon's views of workspaces")?, mounts);
    let harness = match rules.shape {
        Shape::Bare => settings.state_dir.join("harness"),
        _ => PathBuf::from("/opt/caisson"),
    };
    let own = harness.join(OWN_NAME).to_string_lossy().into_owned();
    let Answers { python, node, kernels } = runtimes.versions(&maker, &rules, &mut leases);
    let unanswered = runtimes.unanswered(python.as_ref(), node.as_ref());
    let begin = |report: &RuntimeReport, flags: Vec<&'static str>, file: &str| InterpreterStart {
        binary: report.binary.clone(),
        flags,
        harness: harness.join(file).to_string_lossy().into_owned(),
    };
    let python_start =
        python.as_ref().map(|python| begin(python, python_flags(&python.version), "harness.py"));
    let kernel_starts =
        kernels.iter().map(|(_, python)| begin(python, python_flags(&python.version), "harness.py"));
    let kernel_starts = kernel_starts.collect();
    let node_start = node.as_ref().map(|node| begin(node, node_flags(&node.version), "harness.js"));
    let toolchains = runtimes.toolchains.as_ref().map(|_| harness.join(TOOLCHAINS_NAME));
    // A file in it stands for the folder.
    let bin = runtimes.toolchains.as_ref().filter(|host| host.join(TOOLCHAINS_BIN).is_dir());
    let bin = bin.and(toolchains.as_ref()).map(|path| path.join(TOOLCHAINS_BIN).join(OWN_NAME));
    let bin = bin.map(|file| file.to_string_lossy().into_owned());
    // A zygote's fork enters a shell by owning its user namespace.
    let warm = python.is_some() && !settings.zygotes_off && rules.shape == Shape::UserNamespace;
    let profiles: &[Profile] = if warm { &[Profile::Python, Profile::PythonData] } else { &[] };
    let hello = Hello {
        posture: report.clone(),
        accounts: rules.accounts.iter().map(|account| account.name.clone()).collect(),
        warm: Vec::new(),
        warnings: [warnings(&found), found.warnings.clone(), unraised, unanswered].concat(),
        spaces_to: crate::launcher::plan::SpaceId(0),
        python,
        node,
        kernels,
        toolchains: toolchains.map(|path| path.to_string_lossy().into_owned()),
    };
    let binaries = [&python_start, &node_start].into_iter().flatten().map(|start| start.binary.as_str());
    let binaries = binaries.chain(bin.as_deref());
    let launcher = Launcher {
        daemon,
        zygote_cgroup: cgroups.side("zygotes").during("make the zygotes' cgroup")?,
        rules,
        maker,
        cgroups,
        cgroup_limits: settings.cgroup,
        throwaway: settings.throwaway,
        spaces,
        leases,
        abandoned,
        nurseries: profiles.iter().map(|profile| Nursery::new(*profile, settings.zygote_forks_max)).collect(),
        programs: Programs {
            path: search_path(binaries),
            own,
            python: python_start,
            node: node_start,
            kernels: kernel_starts,
        },
        shells_ready: settings.shells_ready,
        hello,
    };
    Ok(Started { report, launcher: Some(launcher) })
}

/// A greeting of a launcher that cannot serve.
fn tell(daemon: &OwnedFd, report: &PostureReport, warnings: Vec<String>) -> io::Result<()> {
    let hello = Hello {
        posture: report.clone(),
        python: None,
        node: None,
        kernels: Vec::new(),
        toolchains: None,
        accounts: Vec::new(),
        warm: Vec::new(),
        warnings,
        spaces_to: crate::launcher::plan::SpaceId(0),
    };
    packet::send(daemon, &serde_json::to_vec(&hello)?, &[])
}

/// What can be tried on this host, the most first.
fn shapes(settings: &Settings, yard: bool) -> &'static [Shape] {
    match (yard, settings.root()) {
        (true, true) => &[Shape::UserNamespace, Shape::Namespaces, Shape::Bare],
        // In a user namespace of its own the launcher's account is root, and must not be a guest's.
        (true, false) => &[Shape::UserNamespace],
        (false, _) => &[Shape::Bare],
    }
}

/// The template, and the way back from it.
fn yard(settings: &Settings, rules: &Rules, runtimes: &Runtimes) -> io::Result<Yard> {
    let point = settings.state_dir.join("template");
    fs::create_dir_all(&point)?;
    let own = ourselves(&settings.state_dir)?;
    let template = Template::build(&point, &contents(settings, rules, runtimes, &own))?;
    Ok(Yard { home: serve::own_namespace("mnt")?, template: template.namespace })
}

fn footing(rules: &Rules, images: bool) -> Footing {
    let owners = match (rules.own_ids, rules.ids_on_disk()) {
        (false, _) => Owners::Account,
        (true, true) => Owners::Block,
        (true, false) => Owners::Inner,
    };
    Footing {
        images: images && rules.own_ids,
        owners,
        accounts: rules.accounts.iter().map(|account| account.uid).collect(),
    }
}

/// What sandboxes without namespaces need of the host. Returns the folder of the harnesses.
fn prepare_bare(
    settings: &Settings,
    abi: usize,
    spaces: &Spaces,
    toolchains: Option<&Path>,
) -> io::Result<PathBuf> {
    if abi < bare::LANDLOCK_ABI_LEAST {
        let text =
            format!("Landlock ABI {abi}: without namespaces ABI {} is needed", bare::LANDLOCK_ABI_LEAST);
        return Err(io::Error::other(text));
    }
    nix::sys::prctl::set_child_subreaper(true)?;
    if settings.root() {
        bare::open_the_way(&settings.state_dir, &spaces.folders())?;
    }
    lay_out_harness(&settings.state_dir, toolchains)
}

/// All filters of a guest, as an init without namespaces reads them.
fn filters_file(rules: &Rules) -> Result<Arc<OwnedFd>, StartError> {
    let bytes = filter_bytes(rules.first.iter().chain(&rules.second));
    Ok(Arc::new(sealed("caisson-filters", &bytes).during("seal the filters")?))
}

/// The harnesses where guests without a root of their own find them. Returns the folder.
fn lay_out_harness(state_dir: &Path, toolchains: Option<&Path>) -> io::Result<PathBuf> {
    let dir = state_dir.join("harness");
    fs::create_dir_all(&dir)?;
    fs::set_permissions(&dir, Permissions::from_mode(0o755))?;
    let files = [
        ("harness.py", HARNESS_PY),
        ("kernel.py", KERNEL_PY),
        ("program.py", PROGRAM_PY),
        ("harness.js", HARNESS_JS),
    ];
    for (name, text) in files {
        let path = dir.join(name);
        fs::write(&path, text)?;
        fs::set_permissions(&path, Permissions::from_mode(0o644))?;
    }
    let link = dir.join(TOOLCHAINS_NAME);
    match fs::remove_file(&link) {
        Err(error) if error.kind() != io::ErrorKind::NotFound => return Err(error),
        _ => {}
    }
    if let Some(toolchains) = toolchains {
        symlink(toolchains, &link)?;
    }
    copy_of_ourselves(&dir)?;
    Ok(dir)
}

/// Copies our binary into a folder. Returns where it lies.
fn copy_of_ourselves(dir: &Path) -> io::Result<PathBuf> {
    let (own, fresh) = (dir.join(OWN_NAME), dir.join("caisson.new"));
    fs::copy(OWN_BINARY, &fresh)?;
    fs::set_permissions(&fresh, Permissions::from_mode(0o755))?;
    // Not written over: somebody may still be running the old one.
    fs::rename(&fresh, &own)?;
    Ok(own)
}

/// Where our binary lies: an upgrade may have replaced it since we were started.
fn ourselves(state_dir: &Path) -> io::Result<PathBuf> {
    match fs::canonicalize(OWN_BINARY) {
        Ok(path) => Ok(path),
        Err(_) => copy_of_ourselves(state_dir),
    }
}

/// `PATH` of guests: the interpreters' own folders before the system's.
fn search_path<'a>(binaries: impl Iterator<Item = &'a str>) -> String {
    const SYSTEM: &str = "/usr/local/bin:/usr/bin:/bin";
    let mut folders: Vec<&str> = Vec::new();
    for folder in binaries.filter_map(|binary| Path::new(binary).parent()?.to_str()) {
        if !folders.contains(&folder) && !SYSTEM.split(':').any(|system| system == folder) {
            folders.push(folder);
        }
    }
    folders.push(SYSTEM);
    folders.join(":")
}

/// A private mount tree, a `/proc` of our own pid namespace, limits that bind nobody but ourselves. Returns
/// what an operator should know.
fn settle(settings: &Settings) -> io::Result<Vec<String>> {
    nix::sys::prctl::set_dumpable(false)?;
    if settings.no_namespaces.is_none() {
        settle_in_namespaces()?;
    }
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

fn settle_in_namespaces() -> io::Result<()> {
    let private = MsFlags::MS_REC | MsFlags::MS_PRIVATE;
    mount(None::<&str>, "/", None::<&str>, private, None::<&str>)?;
    let flags = MsFlags::MS_NOSUID | MsFlags::MS_NODEV | MsFlags::MS_NOEXEC;
    mount(Some("proc"), "/proc", Some("proc"), flags, None::<&str>)?;
    fs::write("/proc/sys/kernel/ns_last_pid", ZYGOTE_PID_LEAST)
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
    python: Option<Runtime>,
    node: Option<Runtime>,
    /// Further Pythons.
    more: Vec<Runtime>,
    /// What set-up made for the languages.
    toolchains: Option<PathBuf>,
    /// What languages need of the host besides, shown where it is.
    shown: Vec<PathBuf>,
}

/// What they answered.
struct Answers {
    python: Option<RuntimeReport>,
    node: Option<RuntimeReport>,
    /// Those that can be kernels, by name.
    kernels: Vec<(String, RuntimeReport)>,
}

/// Such as `python3.12`.
fn kernel_name(version: &str) -> String {
    let mut parts = version.split('.');
    format!("python{}.{}", parts.next().unwrap_or_default(), parts.next().unwrap_or_default())
}

/// One of them.
#[derive(Debug)]
struct Runtime {
    /// On the host, as it was named.
    host: PathBuf,
    /// In a root of its own.
    inside: String,
    /// Trees that it lives in outside `/usr`, and where they are shown.
    trees: Vec<(PathBuf, PathBuf)>,
    /// The path above them that Landlock must let guests read, where the policy does not.
    readable: Option<PathBuf>,
}

/// Where interpreters outside `/usr` are shown that cannot be shown where they are.
const PYTHON_INSIDE: &str = "/opt/python";
const NODE_INSIDE: &str = "/opt/node";
const MORE_PYTHONS_INSIDE: &str = "/opt/pythons";
/// Name of the folder of toolchains beside the harnesses, what of it is on `PATH`, and how many paths one pattern may
/// show.
const TOOLCHAINS_NAME: &str = "toolchains";
const TOOLCHAINS_BIN: &str = "bin";
const SHOWN_MAX: usize = 16;
/// The kernel of the default Python, as Jupyter calls that of its default environment.
const DEFAULT_KERNEL: &str = "python3";
/// What a sandbox has of its own there hides the host's.
const OWN_PLACES: [&str; 8] = ["/tmp", "/mnt", "/home/sandbox", "/proc", "/dev", "/sys", "/run", "/etc"];

impl Runtimes {
    fn find(settings: &Settings) -> Runtimes {
        let env = settings.python_env.as_ref().and_then(|env| Runtime::of_env(env, PYTHON_INSIDE));
        let python = env.or_else(|| Runtime::of_binary(settings.python_binary.as_deref()?, PYTHON_INSIDE));
        let node = settings.node_binary.as_ref().and_then(|node| Runtime::of_binary(node, NODE_INSIDE));
        let more = settings.more_pythons.iter().enumerate();
        let more = more.filter_map(|(nth, python)| {
            let target = format!("{MORE_PYTHONS_INSIDE}/{nth}");
            let env = python.parent()?.parent()?;
            let is_env = env.join("pyvenv.cfg").is_file();
            if is_env { Runtime::of_env(env, &target) } else { Runtime::of_binary(python, &target) }
        });
        let toolchains = settings.toolchains.as_ref().and_then(|path| fs::canonicalize(path).ok());
        let toolchains = toolchains.filter(|path| path.is_dir());
        Runtimes { python, node, more: more.collect(), toolchains, shown: Vec::new() }
    }

    fn all(&self) -> impl Iterator<Item = &Runtime> {
        [&self.python, &self.node].into_iter().flatten().chain(&self.more)
    }

    /// Trees of the host that a guest without a root of its own must read.
    fn on_host(&self) -> Vec<PathBuf> {
        let trees = self.all().flat_map(|runtime| runtime.trees.iter().map(|(source, _)| source.clone()));
        trees.chain(self.toolchains.clone()).chain(self.shown.iter().cloned()).collect()
    }

    /// What guests with a root of their own must be let read besides the policy's paths.
    fn readable(&self) -> impl Iterator<Item = &Path> {
        let covered = |path: &Path| ["/usr", "/opt", "/etc"].iter().any(|known| path.starts_with(known));
        let shown = self.shown.iter().map(PathBuf::as_path).filter(move |path| !covered(path));
        self.all().filter_map(|runtime| runtime.readable.as_deref()).chain(shown)
    }

    /// Asks each interpreter for its version, where guests would start it and under a uid of nobody.
    fn versions(&self, maker: &Maker, rules: &Rules, leases: &mut Leases) -> Answers {
        let bare = rules.shape == Shape::Bare;
        let uid = if rules.unprivileged() { rules.account.0 } else { leases.zygote() };
        let report = |runtime: &Runtime, question: &[&CStr]| {
            let host_binary = runtime.host.to_string_lossy().into_owned();
            let binary = if bare { host_binary.clone() } else { runtime.inside.clone() };
            let text = ask(maker, rules, uid, &binary, question)?;
            let mut lines = text.lines().map(str::trim).filter(|line| !line.is_empty()).map(str::to_owned);
            Some(RuntimeReport { version: lines.next()?, ipykernel: lines.next(), binary, host_binary })
        };
        let python = self.python.as_ref().and_then(|runtime| report(runtime, &ABOUT_PYTHON));
        let default = python.clone().map(|python| (DEFAULT_KERNEL.to_owned(), python));
        let more = self.more.iter().filter_map(|runtime| report(runtime, &ABOUT_PYTHON));
        let more = more.map(|report| (kernel_name(&report.version), report));
        let mut kernels: Vec<(String, RuntimeReport)> = Vec::new();
        for (name, report) in default.into_iter().chain(more) {
            if report.ipykernel.is_some() && !kernels.iter().any(|(known, _)| *known == name) {
                kernels.push((name, report));
            }
        }
        let node = self.node.as_ref().and_then(|runtime| report(runtime, &[c"--version"]));
        Answers { python, node, kernels }
    }

    /// A warning for each that is there and does not answer.
    fn unanswered(&self, python: Option<&RuntimeReport>, node: Option<&RuntimeReport>) -> Vec<String> {
        let silent =
            [(&self.python, python), (&self.node, node)].into_iter().filter_map(|(runtime, report)| {
                let runtime = runtime.as_ref().filter(|_| report.is_none())?;
                Some(format!("{} cannot be started as a guest would start it", runtime.host.display()))
            });
        silent.collect()
    }
}

impl Runtime {
    /// A venv, such as the product's own; its interpreter may lie elsewhere. Shown at `target`.
    fn of_env(env: &Path, target: &str) -> Option<Runtime> {
        let host = env.join("bin/python3");
        let real = fs::canonicalize(&host).ok()?;
        let mut trees = vec![(env.to_owned(), PathBuf::from(target))];
        let mut readable = None;
        if !real.starts_with("/usr") && !real.starts_with(env) {
            // The environment's links lead to it by its own path.
            let prefix = real.parent()?.parent()?;
            trees.extend(parts_of(prefix, prefix));
            readable = Some(prefix.to_owned());
        }
        Some(Runtime { host, inside: format!("{target}/bin/python3"), trees, readable })
    }

    /// A binary somewhere: it is shown where it is, since programs find their libraries by absolute paths; where that
    /// is not possible, at `target`.
    fn of_binary(binary: &Path, target: &str) -> Option<Runtime> {
        let real = fs::canonicalize(binary).ok()?;
        let host = real.clone();
        if real.starts_with("/usr") {
            return Some(Runtime {
                inside: real.to_str()?.to_owned(),
                host,
                trees: Vec::new(),
                readable: None,
            });
        }
        let prefix = real.parent()?.parent()?.to_owned();
        let taken = OWN_PLACES.iter().any(|place| prefix.starts_with(place));
        if taken || prefix.as_os_str().len() >= RULE_PATH_BYTES {
            let inside = format!("{target}/{}", real.strip_prefix(&prefix).ok()?.to_str()?);
            return Some(Runtime {
                host,
                inside,
                trees: parts_of(&prefix, Path::new(target)),
                readable: None,
            });
        }
        let trees = parts_of(&prefix, &prefix);
        Some(Runtime { inside: real.to_str()?.to_owned(), host, trees, readable: Some(prefix) })
    }
}

/// The files that a path stands for whose last part may hold a `*`.
fn matching(pattern: &Path) -> Vec<PathBuf> {
    let name = pattern.file_name().unwrap_or_default().to_string_lossy();
    let Some((start, end)) = name.split_once('*') else {
        return if pattern.exists() { vec![pattern.to_owned()] } else { Vec::new() };
    };
    let entries = pattern.parent().and_then(|parent| fs::read_dir(parent).ok());
    let fits = |path: &PathBuf| {
        let name = path.file_name().unwrap_or_default().to_string_lossy();
        name.len() >= start.len() + end.len() && name.starts_with(start) && name.ends_with(end)
    };
    let paths = entries.into_iter().flatten().filter_map(|entry| entry.ok().map(|entry| entry.path()));
    let mut found: Vec<_> = paths.filter(fits).collect();
    found.sort();
    found.truncate(SHOWN_MAX);
    found
}

/// What of an installation is shown: not all that may lie beside it, when its prefix is somebody's home.
fn parts_of(prefix: &Path, target: &Path) -> Vec<(PathBuf, PathBuf)> {
    const PARTS: [&str; 6] = ["bin", "lib", "lib64", "libexec", "share", "include"];
    let there = PARTS.iter().filter(|part| prefix.join(part).is_dir());
    there.map(|part| (prefix.join(part), target.join(part))).collect()
}

fn contents(settings: &Settings, rules: &Rules, runtimes: &Runtimes, own: &Path) -> Contents {
    let bind = |source: &Path, target: &Path| Bind {
        source: source.to_owned(),
        target: target.to_owned(),
        optional: false,
    };
    let mut binds: Vec<Bind> = runtimes
        .all()
        .flat_map(|runtime| runtime.trees.iter().map(|(source, target)| bind(source, target)))
        .collect();
    binds.push(bind(own, &Path::new("/opt/caisson").join(OWN_NAME)));
    if let Some(caches) = settings.python_caches.as_ref().filter(|caches| caches.is_dir()) {
        binds.push(bind(caches, Path::new("/opt/caisson/caches")));
    }
    if let Some(toolchains) = &runtimes.toolchains {
        binds.push(bind(toolchains, &Path::new("/opt/caisson").join(TOOLCHAINS_NAME)));
    }
    let shown = runtimes.shown.iter().filter(|path| !path.starts_with("/usr"));
    binds.extend(shown.map(|path| Bind { source: path.clone(), target: path.clone(), optional: true }));
    let file = |target, content: Vec<u8>| Generated { target, content };
    let library = if settings.measure_forks.is_some() { LIBRARY_BARE } else { LIBRARY };
    let mut files = vec![
        file("/opt/caisson/harness.py", HARNESS_PY.into()),
        file("/opt/caisson/kernel.py", KERNEL_PY.into()),
        file("/opt/caisson/program.py", PROGRAM_PY.into()),
        file("/opt/caisson/harness.js", HARNESS_JS.into()),
        file("/opt/caisson/zygote.py", ZYGOTE_PY.into()),
        file("/opt/caisson/libcaisson.so", library.into()),
        file("/opt/caisson/second.bpf", filter_bytes(&rules.second)),
    ];
    files.extend(rules.etc.iter().map(|(target, text)| file(target, text.clone().into_bytes())));
    Contents { binds, files }
}

/// Length in words, then the words, for each filter.
fn filter_bytes<'a>(programs: impl IntoIterator<Item = &'a Vec<u64>>) -> Vec<u8> {
    let mut bytes = Vec::new();
    for program in programs {
        bytes.extend_from_slice(&(program.len() as u64).to_ne_bytes());
        bytes.extend(program.iter().flat_map(|word| word.to_ne_bytes()));
    }
    bytes
}

/// `-P` exists from 3.11 on; not `-I`, which would ignore PYTHONMALLOC.
fn python_flags(version: &str) -> Vec<&'static str> {
    let minor = version.split('.').nth(1).and_then(|minor| minor.parse::<u32>().ok());
    if minor.is_some_and(|minor| minor >= 11) { vec!["-s", "-P", "-B"] } else { vec!["-s", "-B"] }
}

/// Modules of programs are made of a text without a file, for which there is a switch; another keeps SIGUSR1 from
/// opening an inspector, where the version has it.
fn node_flags(version: &str) -> Vec<&'static str> {
    let modules = "--experimental-vm-modules";
    let mut parts = version.trim_start_matches('v').split('.').map(|part| part.parse::<u32>().unwrap_or(0));
    let (major, minor) = (parts.next().unwrap_or(0), parts.next().unwrap_or(0));
    let has_switch = major > 23 || (major == 23 && minor >= 7) || (major == 22 && minor >= 14);
    if has_switch { vec![modules, "--disable-sigusr1"] } else { vec![modules] }
}

/// Its version, and the one of its ipykernel where it can be imported.
const ABOUT_PYTHON: [&CStr; 5] = [
    c"-s",
    c"-E",
    c"-B",
    c"-c",
    c"import importlib.util as u, sys
print('.'.join(map(str, sys.version_info[:3])))
if u.find_spec('ipykernel') and u.find_spec('IPython'):
    from importlib.metadata import version
    print(version('ipykernel'))",
];

/// What `BINARY` prints with these arguments where guests see it, as `uid`, with nothing else.
fn ask(maker: &Maker, rules: &Rules, uid: u32, binary: &str, arguments: &[&CStr]) -> Option<String> {
    let (mut read, write) = io::pipe().ok()?;
    // SAFETY: the launcher has one thread.
    match unsafe { fork() }.ok()? {
        Fork::Child => {
            drop(read);
            let run = || -> io::Result<std::convert::Infallible> {
                let errno = |errno| io::Error::from_raw_os_error(errno);
                if let Some(yard) = maker.yard.as_ref().filter(|_| rules.shape != Shape::Bare) {
                    setns(&yard.template, CloneFlags::CLONE_NEWNS)?;
                }
                raw::dup3(write.as_raw_fd(), 1, 0).map_err(errno)?;
                raw::close_from(3).map_err(errno)?;
                if !rules.unprivileged() {
                    raw::drop_bounding().map_err(errno)?;
                    child::assume(uid, uid, rules.own_ids).map_err(errno)?;
                }
                child::give_up_capabilities().map_err(errno)?;
                raw::prctl(raw::PR_SET_NO_NEW_PRIVS, 1, 0).map_err(errno)?;
                let path = CString::new(binary)?;
                let words: Vec<&CStr> = [&[path.as_c_str()], arguments].concat();
                let mut argument_space = vec![0; words.len() + 1];
                let mut environment_space = [0; 1];
                let argv = raw::Pointers::collect(&words, &mut argument_space);
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

/// What a throw-away sandbox runs: it is there on every host, and says nothing.
const PROBE_PROGRAM: &str = "/usr/bin/true";

/// Makes one sandbox with everything, as if for a guest, verifies it from outside and throws it away.
fn probe(
    maker: &Maker,
    rules: &Rules,
    spaces: &mut Spaces,
    leases: &mut Leases,
    cgroups: &Cgroups,
    settings: &Settings,
) -> Result<(), StepError> {
    // Number 0 is no tenant's: the daemon cannot name it.
    let space = SpaceId(0);
    let own = spaces.enter(space, leases).at(Step::SpaceOpen)?;
    let no_ids = || io::Error::other("no user ids are left");
    let block = own.or_else(|| leases.block()).ok_or_else(no_ids).at(Step::Lease);
    let tried = block.and_then(|block| {
        let tried = cgroups.leaf("probe", "probe", settings.cgroup).at(Step::Cgroup).and_then(|leaf| {
            let (tried, left) = match maker.start(rules, spaces, space, 0, Lot { block, leaf, husk: None }) {
                Ok(mut shell) => (try_out(&mut shell, rules, spaces), Left::Dying(Box::new(shell))),
                Err(NotStarted { error, left }) => (Err(error), left),
            };
            throw_away(left);
            tried
        });
        if own.is_none() {
            leases.free(block);
        }
        tried
    });
    cgroups.remove_space("probe");
    spaces.leave(space);
    // Nobody is in it: it may stand on another footing next.
    spaces.close_all(leases);
    tried
}

/// A guest in the shell, up to the check from outside.
fn try_out(shell: &mut Shell, rules: &Rules, spaces: &Spaces) -> Result<(), StepError> {
    wait_readable(&shell.socket);
    shell.finish(rules)?;
    let path = search_path(std::iter::empty());
    let name = &rules.accounts[0].name;
    let ends = if shell.bare {
        let place = Place::on_host(&spaces.parts(shell.space));
        guest::fork_by_init(shell, rules, 0, &Program::of(&[PROBE_PROGRAM], &path, name, &place))?
    } else {
        guest::exec_into(shell, rules, 0, &Program::of(&[PROBE_PROGRAM], &path, name, &Place::inside()))?
    };
    wait_readable(&ends.status);
    let mut report = [0_u8; STATUS_BYTES];
    if rustix::io::read(&ends.status, &mut report).at(Step::Stop)? != STATUS_BYTES {
        return Err(io::Error::from(io::ErrorKind::UnexpectedEof)).at(Step::MoveIn);
    }
    if let Some((step, source)) = failure(&report) {
        return Err(StepError { step, source });
    }
    let guest =
        if shell.bare { bare::guest_of(shell.pid) } else { serve::find_guest(shell, |pid| pid == shell.pid) };
    let guest = guest.ok_or_else(|| io::Error::from(rustix::io::Errno::SRCH)).at(Step::Release)?;
    release::verify(guest, shell, rules, 0, &release::own_namespaces())
        .map_err(io::Error::other)
        .at(Step::Release)?;
    rustix::io::write(&ends.release, b"g").at(Step::Release)?;
    Ok(())
}

/// Ends it and waits until nothing of it is left.
fn throw_away(left: Left) {
    let leaf = match left {
        Left::Group(leaf) => leaf,
        Left::Dying(shell) => {
            shell.kill();
            shell.leaf
        }
    };
    let deadline = Instant::now() + PROBE_TIMEOUT;
    let any = Some(WaitPidFlag::__WALL | WaitPidFlag::WNOHANG);
    // Every child of ours is its: nothing else has been started yet.
    while waitpid(None, any) != Err(nix::Error::ECHILD) && Instant::now() < deadline {
        bare::kill_strays(&HashSet::new());
        std::thread::sleep(Duration::from_micros(500));
    }
    while !leaf.remove() && Instant::now() < deadline {
        std::thread::sleep(Duration::from_millis(2));
    }
}

fn wait_readable(fd: &OwnedFd) {
    let mut waiting = [PollFd::new(fd, PollFlags::IN)];
    let timeout = rustix::event::Timespec { tv_sec: PROBE_TIMEOUT.as_secs() as i64, tv_nsec: 0 };
    // A time-out shows as a failed read right after.
    let _ = poll(&mut waiting, Some(&timeout));
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

#[cfg(test)]
mod tests {
    use super::*;
    use crate::launcher::wire;

    #[test]
    fn the_library_that_guests_come_from_knows_no_bare_fork() {
        let knows = |library: &[u8], number: u32| {
            let number = number.to_le_bytes();
            library.windows(number.len()).any(|bytes| *bytes == number)
        };
        assert!(knows(LIBRARY, wire::JOB_MAGIC) && !knows(LIBRARY, wire::BARE_MAGIC));
        assert!(knows(LIBRARY_BARE, wire::JOB_MAGIC) && knows(LIBRARY_BARE, wire::BARE_MAGIC));
    }
}
