//! Control groups: a tree of ours below our own group, a parent per space, a leaf per sandbox.
//!
//! v1, v2 and hybrid hosts (v1 controllers beside an empty v2 tree). Plain file writes: why not `cgroups-rs`
//! is in `docs/decisions/`. Everything here runs in the launcher, as root or in a delegated subtree.
#![forbid(unsafe_code)]

use std::fs::{self, File, OpenOptions};
use std::io::{self, Write};
use std::os::fd::{AsRawFd, OwnedFd};
use std::path::{Path, PathBuf};

use rustix::event::EventfdFlags;

/// What one sandbox may take.
#[derive(Copy, Clone, Debug, serde::Serialize, serde::Deserialize)]
pub struct CgroupLimits {
    pub memory_bytes: u64,
    pub pids: u64,
    /// Thousandths of a core.
    pub cpu_millicores: u64,
}

/// Length of the period in which the CPU quota is counted.
const CPU_PERIOD_MICROS: u64 = 100_000;

#[derive(Copy, Clone, Debug, PartialEq, Eq)]
enum Controller {
    Memory,
    Pids,
    Cpu,
    /// The v2 tree with memory, pids and cpu.
    Unified,
}

#[derive(Debug)]
struct Tree {
    controller: Controller,
    base: PathBuf,
}

/// The trees found on this host.
#[derive(Debug)]
pub struct Cgroups {
    trees: Vec<Tree>,
}

/// One sandbox's group in every tree.
#[derive(Debug)]
pub struct Leaf {
    dirs: Vec<(Controller, PathBuf)>,
    /// Files into which a process writes "0" to join.
    pub join: Vec<OwnedFd>,
    /// Fires when the kernel kills in this group for want of memory (v1; on v2 the group dies together).
    pub oom: Option<OwnedFd>,
}

/// What the host offers, for the posture table.
#[derive(Clone, Debug, Default)]
pub struct Found {
    pub memory: Option<&'static str>,
    pub pids: Option<&'static str>,
    pub cpu: Option<&'static str>,
    pub failed: Option<String>,
}

impl Cgroups {
    /// No tree at all: nothing is bounded by groups, and the posture says so.
    pub fn none() -> Cgroups {
        Cgroups { trees: Vec::new() }
    }

    /// Finds the trees by doing: makes our base group in each and removes what a crash left there. `name` is
    /// unique among the living daemons of this host.
    pub fn open(name: &str) -> (Cgroups, Found) {
        let mut found = Found::default();
        let mut trees = Vec::new();
        let own = fs::read_to_string("/proc/self/cgroup").unwrap_or_default();
        let mounts = fs::read_to_string("/proc/self/mountinfo").unwrap_or_default();
        for (controller, file) in
            [(Controller::Memory, "memory"), (Controller::Pids, "pids"), (Controller::Cpu, "cpu")]
        {
            let Some(own_dir) = v1_dir(&own, &mounts, file) else { continue };
            match make_base(&own_dir.join(name)) {
                Ok(base) => {
                    found.set(controller, "v1");
                    trees.push(Tree { controller, base });
                }
                Err(error) => found.failed = Some(format!("mkdir {}: {error}", own_dir.display())),
            }
        }
        if trees.is_empty() {
            match v2_dir(&own, &mounts).map(|dir| delegate(&dir, name)) {
                Some(Ok(base)) => {
                    for controller in [Controller::Memory, Controller::Pids, Controller::Cpu] {
                        found.set(controller, "v2");
                    }
                    trees.push(Tree { controller: Controller::Unified, base });
                }
                Some(Err(error)) => found.failed = Some(error.to_string()),
                None => found.failed = Some("no cgroup controller is mounted".to_owned()),
            }
        }
        (Cgroups { trees }, found)
    }

    /// Removes what a daemon under another name left when it was killed, beside our own base. Its processes
    /// ended with its launcher, or are about to: false while a group is still busy, to be tried again.
    pub fn remove_abandoned(&self, name: &str) -> bool {
        let bases: Vec<PathBuf> = self.trees.iter().map(|tree| tree.base.with_file_name(name)).collect();
        for base in &bases {
            remove_tree(base, 0);
        }
        bases.iter().all(|base| !base.exists())
    }

    /// Makes a leaf with its limits, which are there before any process is.
    pub fn leaf(&self, space: &str, sandbox: &str, limits: CgroupLimits) -> io::Result<Leaf> {
        let mut leaf = Leaf { dirs: Vec::new(), join: Vec::new(), oom: None };
        let made = self.make_leaf(&mut leaf, space, sandbox, limits);
        if made.is_err() {
            // Nobody is in it: it goes at once.
            leaf.remove();
        }
        made.map(|()| leaf)
    }

    fn make_leaf(&self, leaf: &mut Leaf, space: &str, sandbox: &str, limits: CgroupLimits) -> io::Result<()> {
        for tree in &self.trees {
            let parent = tree.base.join(space);
            make_parent(&parent, tree.controller)?;
            let dir = parent.join(sandbox);
            match fs::create_dir(&dir) {
                Err(error) if error.kind() != io::ErrorKind::AlreadyExists => return Err(error),
                _ => {}
            }
            leaf.dirs.push((tree.controller, dir.clone()));
            write_limits(&dir, tree.controller, limits)?;
            let join = match tree.controller {
                Controller::Unified => "cgroup.procs",
                _ => "tasks",
            };
            leaf.join.push(open_write(&dir.join(join))?.into());
            if tree.controller == Controller::Memory {
                leaf.oom = Some(watch_oom(&dir)?);
            }
        }
        Ok(())
    }

    /// A group beside the spaces, for processes of our own such as zygotes; without limits.
    pub fn side(&self, name: &str) -> io::Result<Vec<OwnedFd>> {
        let mut join = Vec::new();
        for tree in &self.trees {
            let dir = tree.base.join(name);
            make_parent_plain(&dir)?;
            let file = if tree.controller == Controller::Unified { "cgroup.procs" } else { "tasks" };
            join.push(open_write(&dir.join(file))?.into());
        }
        Ok(join)
    }

    /// Removes an empty parent of a space; a busy one stays.
    pub fn remove_space(&self, space: &str) {
        for tree in &self.trees {
            // A space in use again keeps its group; the sweep at the next start takes what is left.
            let _ = fs::remove_dir(tree.base.join(space));
        }
    }

    /// Removes our base groups; called when the last sandbox is gone.
    pub fn remove_all(&self) {
        for tree in &self.trees {
            if let Err(error) = sweep(&tree.base) {
                tracing::warn!(base = %tree.base.display(), %error, "cgroup base not removed");
            }
        }
    }
}

impl Found {
    fn set(&mut self, controller: Controller, version: &'static str) {
        match controller {
            Controller::Memory => self.memory = Some(version),
            Controller::Pids => self.pids = Some(version),
            Controller::Cpu => self.cpu = Some(version),
            Controller::Unified => {}
        }
    }

    /// True when memory, pids and cpu can all be bounded.
    pub fn complete(&self) -> bool {
        self.memory.is_some() && self.pids.is_some() && self.cpu.is_some()
    }
}

impl Leaf {
    /// Puts another process into the leaf by its pid.
    pub fn place(&self, pid: i32) -> io::Result<()> {
        for join in &self.join {
            rustix::io::write(join, pid.to_string().as_bytes())?;
        }
        Ok(())
    }

    /// Whether the kernel has killed in this group for want of memory.
    pub fn out_of_memory(&self) -> bool {
        self.dirs.iter().any(|(controller, dir)| {
            let file = match controller {
                Controller::Memory => "memory.oom_control",
                Controller::Unified => "memory.events",
                _ => return false,
            };
            let text = fs::read_to_string(dir.join(file)).unwrap_or_default();
            text.lines().any(|line| {
                line.strip_prefix("oom_kill ").is_some_and(|count| count.trim().parse() != Ok(0_u64))
            })
        })
    }

    /// Whether `/proc/PID/cgroup` of a process names this leaf in every tree.
    pub fn holds(&self, cgroup_file: &str) -> bool {
        self.dirs.iter().all(|(_, dir)| {
            let mut tail = dir.iter().rev();
            let sandbox = tail.next().and_then(|part| part.to_str()).unwrap_or("?");
            let space = tail.next().and_then(|part| part.to_str()).unwrap_or("?");
            let wanted = format!("/{space}/{sandbox}");
            cgroup_file.lines().any(|line| line.ends_with(&wanted))
        })
    }

    /// Removes the groups; false while something in them is still dying.
    pub fn remove(&self) -> bool {
        self.dirs.iter().all(|(_, dir)| match fs::remove_dir(dir) {
            Ok(()) => true,
            Err(error) => error.kind() == io::ErrorKind::NotFound,
        })
    }
}

/// Where our own group of a v1 controller lies in the file system.
fn v1_dir(own: &str, mounts: &str, controller: &str) -> Option<PathBuf> {
    let path = own.lines().find_map(|line| {
        let mut fields = line.splitn(3, ':');
        let (_, names, path) = (fields.next()?, fields.next()?, fields.next()?);
        names.split(',').any(|name| name == controller).then_some(path)
    })?;
    let (root, point) = mounts.lines().find_map(|line| {
        let (head, tail) = line.split_once(" - ")?;
        let mut tail = tail.split(' ');
        let (kind, _, options) = (tail.next()?, tail.next()?, tail.next()?);
        let matches = kind == "cgroup" && options.split(',').any(|option| option == controller);
        matches.then(|| mount_root_and_point(head)).flatten()
    })?;
    Some(below(&root, &point, path))
}

/// Where our own group of the v2 tree lies, if that tree has the controllers.
fn v2_dir(own: &str, mounts: &str) -> Option<PathBuf> {
    let path = own.lines().find_map(|line| line.strip_prefix("0::"))?;
    let (root, point) = mounts.lines().find_map(|line| {
        let (head, tail) = line.split_once(" - ")?;
        tail.starts_with("cgroup2 ").then(|| mount_root_and_point(head)).flatten()
    })?;
    Some(below(&root, &point, path))
}

fn mount_root_and_point(head: &str) -> Option<(String, String)> {
    let mut fields = head.split(' ').skip(3);
    Some((fields.next()?.to_owned(), fields.next()?.to_owned()))
}

/// A container may show only its own part of the tree: `root` is what is mounted at `point`.
fn below(root: &str, point: &str, path: &str) -> PathBuf {
    let rest = path.strip_prefix(root.trim_end_matches('/')).unwrap_or(path);
    Path::new(point).join(rest.trim_start_matches('/'))
}

fn make_base(base: &Path) -> io::Result<PathBuf> {
    if base.exists() {
        sweep(base)?;
    }
    fs::create_dir(base)?;
    Ok(base.to_owned())
}

/// Makes our base in a v2 tree with memory, pids and cpu handed down to it. A group with processes of its own
/// may not hand down: they move aside first.
fn delegate(own: &Path, name: &str) -> io::Result<PathBuf> {
    const HANDED_DOWN: &str = "+memory +pids +cpu";
    let control = own.join("cgroup.subtree_control");
    if let Err(error) = fs::write(&control, HANDED_DOWN) {
        if error.raw_os_error() != Some(libc_ebusy()) {
            return Err(io::Error::other(format!("write {}: {error}", control.display())));
        }
        let aside = own.join("caisson-main");
        match fs::create_dir(&aside) {
            Err(error) if error.kind() != io::ErrorKind::AlreadyExists => return Err(error),
            _ => {}
        }
        for pid in fs::read_to_string(own.join("cgroup.procs"))?.lines() {
            fs::write(aside.join("cgroup.procs"), pid)?;
        }
        fs::write(&control, HANDED_DOWN)?;
    }
    let base = make_base(&own.join(name))?;
    fs::write(base.join("cgroup.subtree_control"), HANDED_DOWN)?;
    Ok(base)
}

fn libc_ebusy() -> i32 {
    rustix::io::Errno::BUSY.raw_os_error()
}

fn make_parent(dir: &Path, controller: Controller) -> io::Result<()> {
    if dir.exists() {
        return Ok(());
    }
    make_parent_plain(dir)?;
    if controller == Controller::Unified {
        fs::write(dir.join("cgroup.subtree_control"), "+memory +pids +cpu")?;
    }
    Ok(())
}

fn make_parent_plain(dir: &Path) -> io::Result<()> {
    match fs::create_dir(dir) {
        Err(error) if error.kind() != io::ErrorKind::AlreadyExists => Err(error),
        _ => Ok(()),
    }
}

fn write_limits(dir: &Path, controller: Controller, limits: CgroupLimits) -> io::Result<()> {
    let set = |file: &str, value: String| write_existing(&dir.join(file), &value);
    let memory = limits.memory_bytes.to_string();
    let quota = (limits.cpu_millicores * CPU_PERIOD_MICROS / 1000).max(1000);
    match controller {
        Controller::Memory => {
            set("memory.limit_in_bytes", memory.clone())?;
            // Memory and swap together: no swap. Missing where the kernel does not count swap.
            match set("memory.memsw.limit_in_bytes", memory) {
                Err(error) if error.kind() != io::ErrorKind::NotFound => Err(error),
                _ => Ok(()),
            }
        }
        Controller::Pids => set("pids.max", limits.pids.to_string()),
        Controller::Cpu => {
            set("cpu.cfs_period_us", CPU_PERIOD_MICROS.to_string())?;
            set("cpu.cfs_quota_us", quota.to_string())
        }
        Controller::Unified => {
            set("memory.max", memory)?;
            match set("memory.swap.max", "0".to_owned()) {
                Err(error) if error.kind() != io::ErrorKind::NotFound => return Err(error),
                _ => {}
            }
            // The whole group dies together.
            set("memory.oom.group", "1".to_owned())?;
            set("pids.max", limits.pids.to_string())?;
            set("cpu.max", format!("{quota} {CPU_PERIOD_MICROS}"))
        }
    }
}

/// Writes without creating: a control file that is not there is an error, not a new file.
fn write_existing(path: &Path, value: &str) -> io::Result<()> {
    open_write(path)?.write_all(value.as_bytes())
}

fn open_write(path: &Path) -> io::Result<File> {
    OpenOptions::new().write(true).open(path)
}

fn watch_oom(dir: &Path) -> io::Result<OwnedFd> {
    let event = rustix::event::eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK)?;
    let control = File::open(dir.join("memory.oom_control"))?;
    let registration = format!("{} {}", event.as_raw_fd(), control.as_raw_fd());
    write_existing(&dir.join("cgroup.event_control"), &registration)?;
    Ok(event)
}

/// Kills what is in a stale tree of ours and removes it, deepest first. Depth is ours: base, space, sandbox.
fn sweep(base: &Path) -> io::Result<()> {
    const TRIES: u32 = 50;
    for try_number in 0..TRIES {
        kill_all(base, 0)?;
        remove_tree(base, 0);
        if !base.exists() {
            return Ok(());
        }
        std::thread::sleep(std::time::Duration::from_millis(u64::from(try_number.min(20))));
    }
    Err(io::Error::from_raw_os_error(libc_ebusy()))
}

fn kill_all(dir: &Path, depth: u32) -> io::Result<()> {
    if depth > 3 {
        return Ok(());
    }
    for pid in fs::read_to_string(dir.join("cgroup.procs")).unwrap_or_default().lines() {
        if let Some(pid) = pid.parse().ok().filter(|pid| *pid > 1).and_then(rustix::process::Pid::from_raw) {
            // Gone already is what we want.
            let _ = rustix::process::kill_process(pid, rustix::process::Signal::KILL);
        }
    }
    for child in children(dir)? {
        kill_all(&child, depth + 1)?;
    }
    Ok(())
}

fn remove_tree(dir: &Path, depth: u32) {
    if depth <= 3 {
        for child in children(dir).unwrap_or_default() {
            remove_tree(&child, depth + 1);
        }
    }
    // Busy groups are tried again by the caller.
    let _ = fs::remove_dir(dir);
}

fn children(dir: &Path) -> io::Result<Vec<PathBuf>> {
    let mut found = Vec::new();
    for entry in fs::read_dir(dir)? {
        let entry = entry?;
        if entry.file_type()?.is_dir() {
            found.push(entry.path());
        }
    }
    Ok(found)
}

#[cfg(test)]
mod tests {
    use super::*;

    const OWN: &str = "4:memory:/process_api/28b8\n1:cpu,cpuacct:/\n0::/\n";
    const MOUNTS: &str = "30 24 0:26 / /sys/fs/cgroup/memory rw - cgroup cgroup rw,memory\n\
                          31 24 0:27 / /sys/fs/cgroup/cpu rw - cgroup cgroup rw,cpu,cpuacct\n\
                          32 24 0:28 / /sys/fs/cgroup/unified rw - cgroup2 cgroup2 rw\n";

    #[test]
    fn a_nested_v1_group_is_found_below_its_mount() {
        let dir = v1_dir(OWN, MOUNTS, "memory");
        assert_eq!(dir, Some(PathBuf::from("/sys/fs/cgroup/memory/process_api/28b8")));
    }

    #[test]
    fn a_controller_among_several_of_one_mount_is_found() {
        assert_eq!(v1_dir(OWN, MOUNTS, "cpu"), Some(PathBuf::from("/sys/fs/cgroup/cpu")));
        assert_eq!(v1_dir(OWN, MOUNTS, "pids"), None);
    }

    #[test]
    fn the_unified_tree_of_a_hybrid_host_is_found() {
        assert_eq!(v2_dir(OWN, MOUNTS), Some(PathBuf::from("/sys/fs/cgroup/unified")));
    }

    #[test]
    fn a_container_that_shows_its_own_part_is_understood() {
        assert_eq!(below("/docker/1", "/sys/fs/cgroup", "/docker/1/x"), PathBuf::from("/sys/fs/cgroup/x"));
        assert_eq!(below("/", "/sys/fs/cgroup", "/a"), PathBuf::from("/sys/fs/cgroup/a"));
    }
}
