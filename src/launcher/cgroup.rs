//! Control groups: a tree of ours below our own group, a parent per space, a leaf per sandbox.
//!
//! v1, v2 and hybrid hosts (v1 controllers beside an empty v2 tree). Plain file writes: why not `cgroups-rs`
//! is in `docs/decisions/`. Everything here runs in the launcher, as root or in a delegated subtree.
#![forbid(unsafe_code)]

use std::collections::HashMap;
use std::fs::{self, File, OpenOptions};
use std::io::{self, Write};
use std::os::fd::{AsRawFd, OwnedFd};
use std::path::{Path, PathBuf};
use std::time::Duration;

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

/// Memory, pids and cpu: those that a tree has, or that are asked for.
#[derive(Copy, Clone, Debug, Default, PartialEq, Eq)]
struct Controllers {
    memory: bool,
    pids: bool,
    cpu: bool,
}

#[derive(Copy, Clone, Debug, PartialEq, Eq)]
enum Version {
    V1,
    V2,
}

/// A group, or the tree that begins at it, with the controllers that bind there.
#[derive(Clone, Debug)]
struct Group {
    version: Version,
    controllers: Controllers,
    dir: PathBuf,
}

/// Leaves that are kept for a space's next sandboxes.
const SPARE_MAX: usize = 4;
/// A leaf to which more than this part of its memory is still charged is not used again: what a sandbox leaves in
/// the page cache counts against the next one.
const LEFT_OVER_PART: u64 = 128;

/// The trees found on this host, each as our base group in it.
#[derive(Debug)]
pub struct Cgroups {
    trees: Vec<Group>,
    /// Leaves of sandboxes that have ended, by space. Nobody but us writes to a group, so their limits hold;
    /// making and removing them costs as much as a fork.
    spare: HashMap<String, Vec<(u32, Leaf)>>,
}

/// One sandbox's group in every tree.
#[derive(Debug)]
pub struct Leaf {
    groups: Vec<Group>,
    /// Files into which a process writes "0" to join.
    pub join: Vec<OwnedFd>,
    /// Fires when the kernel kills in this group for want of memory. v1 only: on v2 the group dies together,
    /// and [`Leaf::out_of_memory`] tells why at the guest's end.
    pub oom: Option<OwnedFd>,
    /// Processor time of those who were in it before.
    used_before: Duration,
}

/// What the host offers, for the posture table.
#[derive(Clone, Debug, Default)]
pub struct Found {
    pub memory: Option<&'static str>,
    pub pids: Option<&'static str>,
    pub cpu: Option<&'static str>,
    pub failed: Option<String>,
    /// What an operator should know of limits that are there but are not whole.
    pub warnings: Vec<String>,
}

impl Controllers {
    const ALL: Controllers = Controllers { memory: true, pids: true, cpu: true };

    fn is_empty(self) -> bool {
        self == Controllers::default()
    }

    /// From a list of names, such as v2's `cgroup.controllers` or the second field of `/proc/PID/cgroup`.
    fn named<'a>(names: impl IntoIterator<Item = &'a str>) -> Controllers {
        let mut found = Controllers::default();
        for name in names {
            match name {
                "memory" => found.memory = true,
                "pids" => found.pids = true,
                "cpu" => found.cpu = true,
                _ => {}
            }
        }
        found
    }

    fn and(self, other: Controllers) -> Controllers {
        Controllers {
            memory: self.memory && other.memory,
            pids: self.pids && other.pids,
            cpu: self.cpu && other.cpu,
        }
    }

    fn without(self, other: Controllers) -> Controllers {
        Controllers {
            memory: self.memory && !other.memory,
            pids: self.pids && !other.pids,
            cpu: self.cpu && !other.cpu,
        }
    }

    fn names(self) -> impl Iterator<Item = &'static str> {
        let all = [(self.memory, "memory"), (self.pids, "pids"), (self.cpu, "cpu")];
        all.into_iter().filter(|(there, _)| *there).map(|(_, name)| name)
    }

    /// As v2's `cgroup.subtree_control` takes them, with `sign` `+` or `-`.
    fn signed(self, sign: char) -> String {
        self.names().map(|name| format!("{sign}{name}")).collect::<Vec<_>>().join(" ")
    }
}

impl Cgroups {
    /// No tree at all: nothing is bounded by groups, and the posture says so.
    pub fn none() -> Cgroups {
        Cgroups { trees: Vec::new(), spare: HashMap::new() }
    }

    /// Finds the trees by doing: makes our base group in each and removes what a crash left there. `name` is
    /// unique among the living daemons of this host. v1 controllers win, as on a hybrid host the v2 tree has
    /// none; whatever no v1 tree has may come from v2. With `counts_time` there is one that counts processor time,
    /// or a warning.
    pub fn open(name: &str, counts_time: bool) -> (Cgroups, Found) {
        let mut found = Found::default();
        let mut cgroups = Cgroups::none();
        let own = fs::read_to_string("/proc/self/cgroup").unwrap_or_default();
        let mounts = fs::read_to_string("/proc/self/mountinfo").unwrap_or_default();
        let mut wanted = Controllers::ALL;
        for controller in Controllers::ALL.names() {
            let Some(own_dir) = v1_dir(&own, &mounts, controller) else { continue };
            let one = Controllers::named([controller]);
            match make_base(&own_dir.join(name)) {
                Ok(dir) => {
                    wanted = wanted.without(one);
                    cgroups.take(Group { version: Version::V1, controllers: one, dir }, &mut found);
                }
                Err(error) => found.failed = Some(format!("mkdir {}: {error}", own_dir.display())),
            }
        }
        if !wanted.is_empty() {
            match v2_dir(&own, &mounts).map(|dir| hand_down(above_aside(&dir), name, wanted)) {
                Some(Ok(group)) => cgroups.take(group, &mut found),
                // A v1 tree's own trouble is the one to know about.
                Some(Err(error)) => {
                    found.failed.get_or_insert(error.to_string());
                }
                None => {
                    found.failed.get_or_insert("no cgroup controller is mounted".to_owned());
                }
            }
        }
        if counts_time && !cgroups.trees.iter().any(Group::counts_time) {
            // Any v2 group counts, without a controller.
            let base = v2_dir(&own, &mounts).map(|dir| make_base(&above_aside(&dir).join(name)));
            match base {
                Some(Ok(dir)) => cgroups.trees.push(Group {
                    version: Version::V2,
                    controllers: Controllers::default(),
                    dir,
                }),
                _ => found.warnings.push(
                    "no control group counts processor time here: a program may have more than its limit"
                        .to_owned(),
                ),
            }
        }
        if !found.complete() && found.failed.is_none() {
            let there =
                cgroups.trees.iter().fold(Controllers::ALL, |left, tree| left.without(tree.controllers));
            let missing: Vec<&str> = there.names().collect();
            found.failed = Some(format!("{} is not among this group's controllers", missing.join(", ")));
        }
        (cgroups, found)
    }

    fn take(&mut self, tree: Group, found: &mut Found) {
        let version = match tree.version {
            Version::V1 => "v1",
            Version::V2 => "v2",
        };
        for (there, version_of) in [
            (tree.controllers.memory, &mut found.memory),
            (tree.controllers.pids, &mut found.pids),
            (tree.controllers.cpu, &mut found.cpu),
        ] {
            if there {
                *version_of = Some(version);
            }
        }
        if tree.controllers.memory
            && !tree.dir.join(tree.version.swap_limit()).exists()
            && swaps(&fs::read_to_string("/proc/swaps").unwrap_or_default())
        {
            found.warnings.push(format!(
                "this kernel has no {}: what a sandbox swaps out is not counted as its memory",
                tree.version.swap_limit()
            ));
        }
        self.trees.push(tree);
    }

    /// Removes what a daemon under another name left when it was killed, beside our own base. Its processes
    /// ended with its launcher, or are about to: false while a group is still busy, to be tried again.
    pub fn remove_abandoned(&self, name: &str) -> bool {
        let bases: Vec<PathBuf> = self.trees.iter().map(|tree| tree.dir.with_file_name(name)).collect();
        for base in &bases {
            remove_tree(base, 0);
        }
        bases.iter().all(|base| !base.exists())
    }

    /// Makes a leaf with its limits, which are there before any process is.
    pub fn leaf(&self, space: &str, sandbox: &str, limits: CgroupLimits) -> io::Result<Leaf> {
        let mut leaf = Leaf { groups: Vec::new(), join: Vec::new(), oom: None, used_before: Duration::ZERO };
        let made = self.make_leaf(&mut leaf, space, sandbox, limits);
        if made.is_err() {
            // Nobody is in it: it goes at once.
            leaf.remove();
        }
        made.map(|()| leaf)
    }

    fn make_leaf(&self, leaf: &mut Leaf, space: &str, sandbox: &str, limits: CgroupLimits) -> io::Result<()> {
        for tree in &self.trees {
            let parent = tree.below(space);
            if !parent.dir.exists() {
                parent.make()?;
                parent.hand_down()?;
            }
            let group = parent.below(sandbox);
            group.make()?;
            leaf.groups.push(group.clone());
            group.limit(limits)?;
            leaf.join.push(group.join_file()?);
            if group.version == Version::V1 && group.controllers.memory {
                leaf.oom = Some(watch_oom(&group.dir)?);
            }
        }
        Ok(())
    }

    /// Keeps the leaf of a sandbox whose last process is gone, or returns it to be removed: one that no interpreter
    /// has moved into, or one too many. Its events must not be watched any more.
    ///
    /// It serves the same owner's sandboxes only: a taken zygote may have kept a descriptor to join it by.
    pub fn keep(&mut self, space: &str, owner: u32, leaf: Leaf) -> Option<Leaf> {
        let spare = self.spare.entry(space.to_owned()).or_default();
        if leaf.groups.is_empty() || !leaf.join.is_empty() || spare.len() >= SPARE_MAX {
            return Some(leaf);
        }
        spare.push((owner, leaf));
        None
    }

    /// A leaf that an earlier sandbox of this space has left as clean as a new one.
    pub fn reuse(&mut self, space: &str, owner: u32, limits: CgroupLimits) -> Option<Leaf> {
        let spare = self.spare.get_mut(space)?;
        while let Some(at) = spare.iter().position(|(of, _)| *of == owner) {
            let (_, mut leaf) = spare.swap_remove(at);
            if leaf.is_clean(limits) && leaf.reopen().is_ok() {
                return Some(leaf);
            }
            // It is empty; should it not be, the sweep takes it.
            leaf.remove();
        }
        None
    }

    /// A group beside the spaces, for processes of our own such as zygotes; without limits.
    pub fn side(&self, name: &str) -> io::Result<Vec<OwnedFd>> {
        let make = |tree: &Group| {
            let group = tree.below(name);
            group.make()?;
            group.join_file()
        };
        self.trees.iter().map(make).collect()
    }

    /// Removes the leaves that are kept for spaces which `busy` does not name.
    pub fn let_go(&mut self, busy: impl Fn(&str) -> bool) {
        self.spare.retain(|space, leaves| {
            let keeps = busy(space);
            if !keeps {
                // They are empty; should one not be, the end of its space or the sweep takes it.
                for (_, leaf) in leaves.drain(..) {
                    leaf.remove();
                }
            }
            keeps
        });
    }

    pub fn keeps_any(&self) -> bool {
        self.spare.values().any(|leaves| !leaves.is_empty())
    }

    /// Removes the leaves that were kept for a space, and its parent.
    pub fn close_space(&mut self, space: &str) {
        for (_, leaf) in self.spare.remove(space).unwrap_or_default() {
            // It is empty; should it not be, the parent stays as well and the sweep takes both.
            leaf.remove();
        }
        self.remove_space(space);
    }

    /// Removes an empty parent of a space; a busy one stays.
    pub fn remove_space(&self, space: &str) {
        for tree in &self.trees {
            // A space in use again keeps its group; the sweep at the next start takes what is left.
            let _ = fs::remove_dir(tree.dir.join(space));
        }
    }

    /// Removes our base groups; called when the last sandbox is gone.
    pub fn remove_all(&self) {
        for tree in &self.trees {
            if let Err(error) = sweep(&tree.dir) {
                tracing::warn!(base = %tree.dir.display(), %error, "cgroup base not removed");
            }
        }
    }
}

impl Found {
    /// True when memory, pids and cpu can all be bounded.
    pub fn complete(&self) -> bool {
        self.memory.is_some() && self.pids.is_some() && self.cpu.is_some()
    }
}

impl Version {
    /// The file that keeps a group from swapping: memory and swap together on v1, swap alone on v2.
    fn swap_limit(self) -> &'static str {
        match self {
            Version::V1 => "memory.memsw.limit_in_bytes",
            Version::V2 => "memory.swap.max",
        }
    }
}

impl Group {
    fn below(&self, name: &str) -> Group {
        Group { dir: self.dir.join(name), ..self.clone() }
    }

    fn make(&self) -> io::Result<()> {
        match fs::create_dir(&self.dir) {
            Err(error) if error.kind() != io::ErrorKind::AlreadyExists => Err(error),
            _ => Ok(()),
        }
    }

    /// Lets the groups below have the controllers; on v1 they have them anyway.
    fn hand_down(&self) -> io::Result<()> {
        match self.version {
            Version::V1 => Ok(()),
            Version::V2 => {
                write_existing(&self.dir.join("cgroup.subtree_control"), &self.controllers.signed('+'))
            }
        }
    }

    /// `tasks` on v1: a thread that moves itself through it does not wait for all the others. v2 has no such
    /// file (`docs/decisions/joined-by-writing-zero.md`).
    fn join_file(&self) -> io::Result<OwnedFd> {
        let file = match self.version {
            Version::V1 => "tasks",
            Version::V2 => "cgroup.procs",
        };
        Ok(open_write(&self.dir.join(file))?.into())
    }

    fn limit(&self, limits: CgroupLimits) -> io::Result<()> {
        for (file, value) in limit_files(self.version, self.controllers, limits) {
            match write_existing(&self.dir.join(file), &value) {
                // Swap is not counted here; found at the start, and told.
                Err(error)
                    if error.kind() == io::ErrorKind::NotFound && file == self.version.swap_limit() => {}
                other => other?,
            }
        }
        Ok(())
    }

    fn cpu_used(&self) -> Option<Duration> {
        match self.version {
            Version::V1 => {
                let text = fs::read_to_string(self.dir.join("cpuacct.usage")).ok()?;
                text.trim().parse().ok().map(Duration::from_nanos)
            }
            Version::V2 => {
                let text = fs::read_to_string(self.dir.join("cpu.stat")).ok()?;
                let used = text.lines().find_map(|line| line.strip_prefix("usage_usec "))?;
                used.trim().parse().ok().map(Duration::from_micros)
            }
        }
    }

    fn counts_time(&self) -> bool {
        self.cpu_used().is_some()
    }

    /// Whether `/proc/PID/cgroup` of a process names this group in its own tree.
    fn holds(&self, cgroup_file: &str) -> bool {
        // Base, space and sandbox: unlike what is above, the same from every cgroup namespace of ours.
        let tail: Vec<&str> = self.dir.iter().rev().take(3).filter_map(|part| part.to_str()).collect();
        let wanted: String = tail.iter().rev().map(|part| format!("/{part}")).collect();
        cgroup_file.lines().filter_map(Line::parse).any(|line| {
            let same_tree = match self.version {
                Version::V1 => !line.controllers().and(self.controllers).is_empty(),
                Version::V2 => line.id == "0",
            };
            same_tree && line.path.ends_with(&wanted)
        })
    }
}

/// What is written for the limits, in this order.
fn limit_files(
    version: Version,
    controllers: Controllers,
    limits: CgroupLimits,
) -> Vec<(&'static str, String)> {
    let memory = limits.memory_bytes.to_string();
    let quota = (limits.cpu_millicores * CPU_PERIOD_MICROS / 1000).max(1000);
    let mut files = Vec::new();
    match version {
        Version::V1 => {
            if controllers.memory {
                // Memory and swap together, after memory alone: no swap.
                files.extend([
                    ("memory.limit_in_bytes", memory.clone()),
                    ("memory.memsw.limit_in_bytes", memory),
                ]);
            }
            if controllers.pids {
                files.push(("pids.max", limits.pids.to_string()));
            }
            if controllers.cpu {
                files.push(("cpu.cfs_period_us", CPU_PERIOD_MICROS.to_string()));
                files.push(("cpu.cfs_quota_us", quota.to_string()));
            }
        }
        Version::V2 => {
            if controllers.memory {
                files.extend([("memory.max", memory), ("memory.swap.max", "0".to_owned())]);
                // The whole group dies together.
                files.push(("memory.oom.group", "1".to_owned()));
            }
            if controllers.pids {
                files.push(("pids.max", limits.pids.to_string()));
            }
            if controllers.cpu {
                files.push(("cpu.max", format!("{quota} {CPU_PERIOD_MICROS}")));
            }
        }
    }
    files
}

impl Leaf {
    /// Puts another process into the leaf by its pid.
    pub fn place(&self, pid: i32) -> io::Result<()> {
        for join in &self.join {
            rustix::io::write(join, pid.to_string().as_bytes())?;
        }
        Ok(())
    }

    /// Kills whatever is in the leaf, where the kernel can (v2, Linux 5.14): also a process on its way into the
    /// sandbox, which no end of the sandbox's init reaches yet.
    pub fn kill(&self) {
        for group in self.groups.iter().filter(|group| group.version == Version::V2) {
            // Elsewhere the pid namespace ends with its init; a child on its way finds nowhere to go.
            let _ = write_existing(&group.dir.join("cgroup.kill"), "1");
        }
    }

    /// Whether no process is in it, nearly nothing is charged to it and the kernel never killed in it.
    fn is_clean(&self, limits: CgroupLimits) -> bool {
        let number = |dir: &Path, file: &str| {
            fs::read_to_string(dir.join(file)).ok().and_then(|text| text.trim().parse::<u64>().ok())
        };
        let left_over_max = limits.memory_bytes / LEFT_OVER_PART;
        let clean = self.groups.iter().all(|Group { version, controllers, dir }| {
            let charged = match version {
                Version::V1 => "memory.usage_in_bytes",
                Version::V2 => "memory.current",
            };
            let little = || number(dir, charged).is_some_and(|bytes| bytes <= left_over_max);
            (!controllers.memory || little()) && (!controllers.pids || number(dir, "pids.current") == Some(0))
        });
        clean && !self.out_of_memory()
    }

    /// Opens what a launch has closed.
    fn reopen(&mut self) -> io::Result<()> {
        self.used_before += self.cpu_used().unwrap_or_default();
        self.join.clear();
        for group in &self.groups {
            self.join.push(group.join_file()?);
        }
        Ok(())
    }

    /// Lets it have less than it was made with. It is not to be kept for another.
    pub fn tighten(&self, limits: CgroupLimits) -> io::Result<()> {
        self.groups.iter().try_for_each(|group| group.limit(limits))
    }

    /// Processor time that its sandbox has had, where a tree counts it.
    pub fn cpu_used(&self) -> Option<Duration> {
        self.groups.iter().find_map(Group::cpu_used).map(|used| used.saturating_sub(self.used_before))
    }

    /// Whether the kernel has killed in this group for want of memory.
    pub fn out_of_memory(&self) -> bool {
        self.groups.iter().filter(|group| group.controllers.memory).any(|group| {
            let file = match group.version {
                Version::V1 => "memory.oom_control",
                Version::V2 => "memory.events",
            };
            killed_for_memory(&fs::read_to_string(group.dir.join(file)).unwrap_or_default())
        })
    }

    /// Whether `/proc/PID/cgroup` of a process names this leaf in every tree.
    pub fn holds(&self, cgroup_file: &str) -> bool {
        self.groups.iter().all(|group| group.holds(cgroup_file))
    }

    /// Removes the groups; false while something in them is still dying.
    pub fn remove(&self) -> bool {
        self.groups.iter().all(|group| match fs::remove_dir(&group.dir) {
            Ok(()) => true,
            Err(error) => error.kind() == io::ErrorKind::NotFound,
        })
    }
}

/// From `memory.events` (v2) or `memory.oom_control` (v1).
fn killed_for_memory(text: &str) -> bool {
    let count = text.lines().find_map(|line| line.strip_prefix("oom_kill "));
    count.is_some_and(|count| count.trim().parse() != Ok(0_u64))
}

/// From `/proc/swaps`: a headline, then a line for each.
fn swaps(text: &str) -> bool {
    text.lines().nth(1).is_some()
}

// ---- a v2 group of our own ----------------------------------------------------------------------------------

/// Where our own processes are while the group that we were started in hands its controllers down.
const ASIDE: &str = "caisson-main";

/// Our own processes out of the way, until this value is dropped.
#[derive(Debug)]
pub struct Aside {
    own: PathBuf,
}

/// On v2 a group that holds processes cannot hand controllers down: moves this one, and whoever shares its
/// group (in a container that is all there is), into a group below. Before the launcher is started: from
/// its pid namespace it could not name us. `None` where nothing is in the way: v1, the root of the tree,
/// and a group that is not ours to change.
pub fn step_aside() -> Option<Aside> {
    let own = fs::read_to_string("/proc/self/cgroup").unwrap_or_default();
    let mounts = fs::read_to_string("/proc/self/mountinfo").unwrap_or_default();
    let own = v2_dir(&own, &mounts)?;
    let offered = fs::read_to_string(own.join("cgroup.controllers")).ok()?;
    let useless = Controllers::named(offered.split_whitespace()).is_empty();
    // The root of the whole tree has no type, and may do both.
    if useless || own.file_name().is_some_and(|name| name == ASIDE) || !own.join("cgroup.type").exists() {
        return None;
    }
    match fs::create_dir(own.join(ASIDE)) {
        Err(error) if error.kind() != io::ErrorKind::AlreadyExists => return None,
        _ => {}
    }
    // From here on the drop puts back what was done.
    let aside = Aside { own };
    move_all(&aside.own, &aside.own.join(ASIDE)).ok().map(|()| aside)
}

impl Drop for Aside {
    fn drop(&mut self) {
        // Refused while another daemon has its groups below: then all stay where they are.
        let taken_back =
            write_existing(&self.own.join("cgroup.subtree_control"), &Controllers::ALL.signed('-'));
        if taken_back.is_ok() && move_all(&self.own.join(ASIDE), &self.own).is_ok() {
            // Somebody may have been born there meanwhile.
            let _ = fs::remove_dir(self.own.join(ASIDE));
        }
    }
}

/// Moves every process from one group to another, those born meanwhile as well.
fn move_all(from: &Path, to: &Path) -> io::Result<()> {
    const TRIES: u32 = 10;
    for _ in 0..TRIES {
        let pids = fs::read_to_string(from.join("cgroup.procs"))?;
        if pids.is_empty() {
            return Ok(());
        }
        for pid in pids.lines() {
            match write_existing(&to.join("cgroup.procs"), pid) {
                // It has ended.
                Err(error) if error.raw_os_error() == Some(rustix::io::Errno::SRCH.raw_os_error()) => {}
                other => other?,
            }
        }
    }
    Err(io::Error::from_raw_os_error(errno_busy()))
}

/// Our own group as it was before anybody stepped aside.
fn above_aside(own: &Path) -> &Path {
    match own.parent() {
        Some(parent) if own.file_name().is_some_and(|name| name == ASIDE) => parent,
        _ => own,
    }
}

/// Makes our base in a v2 tree with what is wanted and offered handed down to it.
fn hand_down(own: &Path, name: &str, wanted: Controllers) -> io::Result<Group> {
    let offered = fs::read_to_string(own.join("cgroup.controllers"))
        .map_err(|error| failed("read", &own.join("cgroup.controllers"), &error))?;
    let controllers = wanted.and(Controllers::named(offered.split_whitespace()));
    if controllers.is_empty() {
        return Err(io::Error::other(format!(
            "{} has none of them",
            own.join("cgroup.controllers").display()
        )));
    }
    let own = Group { version: Version::V2, controllers, dir: own.to_owned() };
    own.hand_down().map_err(|error| failed("write", &own.dir.join("cgroup.subtree_control"), &error))?;
    let base = own.below(name);
    make_base(&base.dir).map_err(|error| failed("mkdir", &base.dir, &error))?;
    base.hand_down().map_err(|error| failed("write", &base.dir.join("cgroup.subtree_control"), &error))?;
    Ok(base)
}

fn failed(call: &str, path: &Path, error: &io::Error) -> io::Error {
    io::Error::other(format!("{call} {}: {error}", path.display()))
}

// ---- where our own groups are -------------------------------------------------------------------------------

/// A line of `/proc/PID/cgroup`: `id:controllers:path`.
struct Line<'a> {
    id: &'a str,
    names: &'a str,
    path: &'a str,
}

impl Line<'_> {
    fn parse(line: &str) -> Option<Line<'_>> {
        let mut fields = line.splitn(3, ':');
        Some(Line { id: fields.next()?, names: fields.next()?, path: fields.next()? })
    }

    fn controllers(&self) -> Controllers {
        Controllers::named(self.names.split(','))
    }
}

/// Where our own group of a v1 controller lies in the file system.
fn v1_dir(own: &str, mounts: &str, controller: &str) -> Option<PathBuf> {
    let mut lines = own.lines().filter_map(Line::parse);
    let path = lines.find(|line| line.names.split(',').any(|name| name == controller))?.path;
    let (root, point) = mounts.lines().find_map(|line| {
        let (head, tail) = line.split_once(" - ")?;
        let mut tail = tail.split(' ');
        let (kind, _, options) = (tail.next()?, tail.next()?, tail.next()?);
        let matches = kind == "cgroup" && options.split(',').any(|option| option == controller);
        matches.then(|| mount_root_and_point(head)).flatten()
    })?;
    Some(below(&root, &point, path))
}

/// Where our own group of the v2 tree lies, whatever controllers it has.
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

fn errno_busy() -> i32 {
    rustix::io::Errno::BUSY.raw_os_error()
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
        // All below at once, whatever pid namespace they are in (v2, Linux 5.14); one by one where they can be named.
        let _ = write_existing(&base.join("cgroup.kill"), "1");
        kill_all(base, 0)?;
        remove_tree(base, 0);
        if !base.exists() {
            return Ok(());
        }
        std::thread::sleep(std::time::Duration::from_millis(u64::from(try_number.min(20))));
    }
    Err(io::Error::from_raw_os_error(errno_busy()))
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

    const OWN: &str = "4:memory:/outer/28b8\n1:cpu,cpuacct:/\n0::/\n";
    const MOUNTS: &str = "30 24 0:26 / /sys/fs/cgroup/memory rw - cgroup cgroup rw,memory\n\
                          31 24 0:27 / /sys/fs/cgroup/cpu rw - cgroup cgroup rw,cpu,cpuacct\n\
                          32 24 0:28 / /sys/fs/cgroup/unified rw - cgroup2 cgroup2 rw\n";
    const LIMITS: CgroupLimits = CgroupLimits { memory_bytes: 64 << 20, pids: 16, cpu_millicores: 1500 };

    fn group(version: Version, controllers: &str, dir: &str) -> Group {
        Group { version, controllers: Controllers::named(controllers.split(' ')), dir: PathBuf::from(dir) }
    }

    fn leaf(groups: Vec<Group>) -> Leaf {
        Leaf { groups, join: Vec::new(), oom: None, used_before: Duration::ZERO }
    }

    #[test]
    fn a_nested_v1_group_is_found_below_its_mount() {
        let dir = v1_dir(OWN, MOUNTS, "memory");
        assert_eq!(dir, Some(PathBuf::from("/sys/fs/cgroup/memory/outer/28b8")));
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

    #[test]
    fn who_has_stepped_aside_still_counts_its_group_from_above() {
        let own = v2_dir("0::/user.slice/run-1.scope/caisson-main\n", MOUNTS).unwrap();
        assert_eq!(above_aside(&own), Path::new("/sys/fs/cgroup/unified/user.slice/run-1.scope"));
        assert_eq!(above_aside(Path::new("/sys/fs/cgroup/x")), Path::new("/sys/fs/cgroup/x"));
    }

    #[test]
    fn only_what_is_wanted_and_offered_is_handed_down() {
        // What systemd delegates to a user by default on some distributions.
        let offered = Controllers::named("memory pids".split(' '));
        assert_eq!(Controllers::ALL.and(offered).signed('+'), "+memory +pids");
        assert_eq!(Controllers::ALL.without(offered).signed('-'), "-cpu");
        // A hybrid host's v2 tree.
        assert!(Controllers::named("".split_whitespace()).is_empty());
        assert_eq!(Controllers::named("cpuset cpu io memory hugetlb pids".split(' ')), Controllers::ALL);
    }

    #[test]
    fn each_version_is_told_its_limits_in_its_own_words() {
        let words = |version, controllers| -> Vec<String> {
            let files = limit_files(version, controllers, LIMITS);
            files.into_iter().map(|(file, value)| format!("{file} {value}")).collect()
        };
        assert_eq!(
            words(Version::V2, Controllers::ALL),
            [
                "memory.max 67108864",
                "memory.swap.max 0",
                "memory.oom.group 1",
                "pids.max 16",
                "cpu.max 150000 100000"
            ]
        );
        assert_eq!(
            words(Version::V1, Controllers::ALL),
            [
                "memory.limit_in_bytes 67108864",
                "memory.memsw.limit_in_bytes 67108864",
                "pids.max 16",
                "cpu.cfs_period_us 100000",
                "cpu.cfs_quota_us 150000"
            ]
        );
        assert_eq!(words(Version::V2, Controllers::named(["pids"])), ["pids.max 16"]);
        // The kernel takes no quota below a millisecond.
        let little = CgroupLimits { cpu_millicores: 1, ..LIMITS };
        let files = limit_files(Version::V2, Controllers::named(["cpu"]), little);
        assert_eq!(files, [("cpu.max", "1000 100000".to_owned())]);
    }

    #[test]
    fn a_guest_is_in_its_leaf_when_each_tree_says_so() {
        let both = leaf(vec![
            group(Version::V1, "memory", "/sys/fs/cgroup/memory/p/caisson-0/space-1/sandbox-2"),
            group(Version::V1, "cpu", "/sys/fs/cgroup/cpu/caisson-0/space-1/sandbox-2"),
        ]);
        let inside = "/caisson-0/space-1/sandbox-2";
        assert!(both.holds(&format!("4:memory:/p{inside}\n1:cpu,cpuacct:{inside}\n0::/\n")));
        // In one tree only: what another tree says is no help.
        assert!(!both.holds(&format!("4:memory:/p{inside}\n1:cpu,cpuacct:/\n0::{inside}\n")));
        // Another sandbox, another space, another daemon.
        for other in
            ["/caisson-0/space-1/sandbox-22", "/caisson-0/space-11/sandbox-2", "/caisson-1/space-1/sandbox-2"]
        {
            assert!(!both.holds(&format!("4:memory:/p{other}\n1:cpu,cpuacct:{other}\n")), "{other}");
        }
        let unified = leaf(vec![group(Version::V2, "memory pids cpu", &format!("/sys/fs/cgroup{inside}"))]);
        assert!(unified.holds(&format!("0::{inside}\n")));
        assert!(!unified.holds(&format!("4:memory:{inside}\n0::/\n")));
        assert!(!unified.holds(""));
    }

    #[test]
    fn a_kill_for_want_of_memory_is_read_from_either_version() {
        let events =
            |kills: u32| format!("low 0\nhigh 0\nmax 7\noom 1\noom_kill {kills}\noom_group_kill 1\n");
        assert!(!killed_for_memory(&events(0)));
        assert!(killed_for_memory(&events(2)));
        assert!(killed_for_memory("oom_kill_disable 0\nunder_oom 0\noom_kill 1\n"));
        assert!(!killed_for_memory(""));
    }

    /// A leaf that an ended sandbox has left, as files that say what the kernel's would.
    fn left_over(dir: &Path) -> Leaf {
        fs::create_dir(dir).expect("a directory of our own");
        for (file, content) in [("pids.current", "0\n"), ("tasks", "")] {
            fs::write(dir.join(file), content).expect("a directory of our own");
        }
        leaf(vec![group(Version::V1, "pids", dir.to_str().expect("a plain name"))])
    }

    #[test]
    fn a_leaf_that_is_kept_serves_its_own_space_and_owner_only() {
        let dir = tempfile::tempdir().expect("a temporary directory");
        let mut cgroups = Cgroups::none();
        let (mine, theirs) = (dir.path().join("mine"), dir.path().join("theirs"));
        assert!(cgroups.keep("space-1", 7, left_over(&mine)).is_none());
        assert!(cgroups.keep("space-1", 8, left_over(&theirs)).is_none());
        for (space, owner) in [("space-1", 0), ("space-1", 9), ("space-2", 7)] {
            assert!(cgroups.reuse(space, owner, LIMITS).is_none(), "{space} of {owner}");
        }
        // Control: whose it was gets it, ready to be joined, and once.
        let again = cgroups.reuse("space-1", 7, LIMITS).expect("it is clean");
        assert_eq!((again.groups[0].dir.as_path(), again.join.len()), (mine.as_path(), 1));
        assert!(cgroups.reuse("space-1", 7, LIMITS).is_none());
        assert_eq!(cgroups.reuse("space-1", 8, LIMITS).expect("clean as well").groups[0].dir, theirs);
        // One that could still be joined is not kept at all.
        let mut open = left_over(&dir.path().join("open"));
        open.reopen().expect("its files are there");
        assert!(cgroups.keep("space-1", 7, open).is_some());
    }

    #[test]
    fn a_leaf_that_is_not_as_a_new_one_is_not_used_again() {
        let dir = tempfile::tempdir().expect("a temporary directory");
        let mut cgroups = Cgroups::none();
        let busy = left_over(&dir.path().join("busy"));
        fs::write(dir.path().join("busy/pids.current"), "1\n").expect("our own");
        assert!(cgroups.keep("space-1", 7, busy).is_none());
        assert!(cgroups.reuse("space-1", 7, LIMITS).is_none());
    }

    #[test]
    fn a_host_without_swap_needs_no_limit_on_it() {
        assert!(!swaps("Filename\t\t\tType\n"));
        assert!(swaps("Filename\t\t\tType\n/dev/vda2 partition 1 0 -2\n"));
    }
}
