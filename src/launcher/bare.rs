//! Sandboxes without namespaces, at the postures `uid` and `process`: processes of the host, kept apart by
//! identity, Landlock and seccomp.
//!
//! Nothing of the host is hidden by mounts, so the Landlock ruleset names what there is: the system's programs,
//! the interpreters, and one space. TCP and scopes (signals, abstract sockets) are handled and never allowed; no
//! socket can be made at all. No pid namespace ends a guest's processes together: its init is a subreaper and so the
//! ancestor of everything it leaves behind, and the tree below it is stopped before it is killed. Whoever escapes
//! that, because init itself was killed, becomes a child of the launcher and is killed there.

use std::collections::HashSet;
use std::fs::{self, Permissions};
use std::io;
use std::os::fd::OwnedFd;
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};

use landlock::{
    ABI, Access, AccessFs, AccessNet, BitFlags, CompatLevel, Compatible, PathBeneath, PathFd, Ruleset,
    RulesetAttr, RulesetCreatedAttr, Scope,
};
use nix::sys::signal::{Signal, kill};
use nix::sys::wait::waitpid;
use nix::unistd::Pid;

use crate::launcher::child;
use crate::launcher::plan::SpaceId;
use crate::launcher::rules::Rules;
use crate::launcher::spaces::Spaces;
use crate::launcher::wire::RULE_OPTIONAL;
use crate::sys::process::{Fork, fork};
use crate::sys::raw;

/// The least Landlock that can stand in for namespaces: files, TCP, and scopes for signals and abstract sockets.
pub const LANDLOCK_ABI_LEAST: usize = 6;
/// How often a tree is looked through for processes that were made meanwhile. Each round leaves fewer that can
/// make any: those found are stopped first.
const KILL_ROUNDS_MAX: usize = 64;

/// What of the host a guest may see besides the policy's paths.
#[derive(Clone, Debug)]
pub struct Ground {
    /// Trees of the interpreters, readable and executable.
    pub runtimes: Vec<PathBuf>,
    /// The guest's filters as a sealed file: for each its length in words, then the words.
    pub filters: std::sync::Arc<OwnedFd>,
}

/// The ruleset of one space's sandboxes.
pub fn ruleset(rules: &Rules, ground: &Ground, spaces: &Spaces, space: SpaceId) -> io::Result<OwnedFd> {
    let failed = |error: &dyn std::fmt::Display| io::Error::other(error.to_string());
    let mut created = Ruleset::default()
        .set_compatibility(CompatLevel::BestEffort)
        .handle_access(AccessFs::from_all(ABI::V5))
        .and_then(|ruleset| {
            ruleset
                .set_compatibility(CompatLevel::HardRequirement)
                .handle_access(AccessNet::from_all(ABI::V4))
        })
        .and_then(|ruleset| ruleset.scope(Scope::from_all(ABI::V6)))
        .and_then(Ruleset::create)
        .map_err(|error| failed(&error))?;
    let mut allow = |path: &Path, rights: u64, optional: bool| -> io::Result<()> {
        let open = match PathFd::new(path) {
            Ok(open) => open,
            Err(_) if optional => return Ok(()),
            Err(error) => return Err(failed(&error)),
        };
        // A file has no rights that only a directory can have.
        let rights = if path.is_dir() { rights } else { rights & AccessFs::from_file(ABI::V5).bits() };
        let rule = PathBeneath::new(open, BitFlags::<AccessFs>::from_bits_truncate(rights));
        (&mut created).add_rule(rule).map(|_| ()).map_err(|error| failed(&error))
    };
    for (path, rights) in &rules.bare {
        allow(Path::new(path), rights & !RULE_OPTIONAL, rights & RULE_OPTIONAL != 0)?;
    }
    let run = AccessFs::Execute | AccessFs::ReadFile | AccessFs::ReadDir;
    for path in &ground.runtimes {
        allow(path, run.bits(), false)?;
    }
    for part in spaces.parts(space) {
        allow(&part, AccessFs::from_all(ABI::V5).bits(), false)?;
    }
    Option::<OwnedFd>::from(created).ok_or_else(|| io::Error::from(io::ErrorKind::Unsupported))
}

/// Makes the way to the spaces walkable for guests, who have ids of their own. The folders stay unreadable.
pub fn open_the_way(state_dir: &Path, dirs: &[&Path]) -> io::Result<()> {
    for dir in [state_dir].iter().chain(dirs) {
        fs::set_permissions(dir, Permissions::from_mode(0o711))?;
    }
    for dir in state_dir.ancestors().skip(1) {
        if fs::metadata(dir)?.permissions().mode() & 0o001 == 0 {
            return Err(io::Error::other(format!(
                "{} cannot be entered by guests, who have ids of their own here: chmod o+x, or another --data-dir",
                dir.display()
            )));
        }
    }
    Ok(())
}

/// Kills everything below `init`, and then it: first all of it is stopped, so that nothing new is made.
pub fn kill_tree(init: Pid) {
    let mut stopped = HashSet::new();
    for _ in 0..KILL_ROUNDS_MAX {
        let found = descendants(init);
        let fresh: Vec<Pid> = found.into_iter().filter(|pid| stopped.insert(*pid)).collect();
        if fresh.is_empty() {
            break;
        }
        for pid in fresh {
            // Gone already is what we want.
            let _ = kill(pid, Signal::SIGSTOP);
        }
    }
    for pid in stopped {
        let _ = kill(pid, Signal::SIGKILL);
    }
    let _ = kill(init, Signal::SIGKILL);
}

/// Kills our own children that are none of `known`: what is left of sandboxes whose init has ended.
pub fn kill_strays(known: &HashSet<Pid>) {
    for stray in children(Pid::this()).into_iter().filter(|pid| !known.contains(pid)) {
        kill_tree(stray);
    }
}

/// Kills every process of this user id at once, as one of them: nobody can slip through by forking. Only for an id
/// that no living sandbox has.
pub fn kill_id(id: u32) -> io::Result<()> {
    // SAFETY: the launcher has one thread.
    match unsafe { fork() }? {
        Fork::Child => {
            if child::assume(id, id, true).is_ok() {
                // Nobody there is what we want.
                let _ = kill(Pid::from_raw(-1), Signal::SIGKILL);
            }
            raw::exit(0)
        }
        Fork::Parent(pid) => {
            // It has ended by its own signal or by itself.
            let _ = waitpid(pid, None);
            Ok(())
        }
    }
}

/// Tasks of this account on the host, which RLIMIT_NPROC counts together.
pub fn tasks_of(id: u32) -> u64 {
    let tasks = |entry: fs::DirEntry| {
        use std::os::unix::fs::MetadataExt;
        let ours = entry.metadata().is_ok_and(|process| process.uid() == id);
        let tasks = fs::read_dir(entry.path().join("task")).ok().filter(|_| ours)?;
        Some(tasks.count() as u64)
    };
    fs::read_dir("/proc").into_iter().flatten().flatten().filter_map(tasks).sum()
}

/// The ids of `range` that some process on this host has.
pub fn ids_in_use(range: &std::ops::Range<u32>) -> HashSet<u32> {
    let status = |entry: fs::DirEntry| fs::read_to_string(entry.path().join("status")).ok();
    let uid = |text: String| {
        text.lines().find_map(|line| line.strip_prefix("Uid:")?.split_whitespace().next()?.parse().ok())
    };
    let all = fs::read_dir("/proc").into_iter().flatten().flatten().filter_map(status).filter_map(uid);
    all.filter(|uid| range.contains(uid)).collect()
}

/// The first child of an init: its guest.
pub fn guest_of(init: Pid) -> Option<Pid> {
    children(init).into_iter().next()
}

fn children(pid: Pid) -> Vec<Pid> {
    // Gone already: it has none.
    let text = fs::read_to_string(format!("/proc/{pid}/task/{pid}/children")).unwrap_or_default();
    text.split_whitespace().filter_map(|word| word.parse().ok().map(Pid::from_raw)).collect()
}

/// Children of every thread, and theirs.
fn descendants(pid: Pid) -> Vec<Pid> {
    let mut found = Vec::new();
    let mut next = vec![pid];
    while let Some(pid) = next.pop() {
        let threads = fs::read_dir(format!("/proc/{pid}/task")).into_iter().flatten().flatten();
        for thread in threads {
            let text = fs::read_to_string(thread.path().join("children")).unwrap_or_default();
            for child in text.split_whitespace().filter_map(|word| word.parse().ok().map(Pid::from_raw)) {
                found.push(child);
                next.push(child);
            }
        }
    }
    found
}
