//! Sandboxes without namespaces, at the postures `uid` and `process`: processes of the host, kept apart by
//! identity, Landlock and seccomp.
//!
//! Nothing of the host is hidden by mounts, so the Landlock ruleset names what there is: the system's programs,
//! the interpreters, and one space. TCP and scopes (signals, abstract sockets) are handled and never allowed; no
//! socket can be made at all. No pid namespace ends a guest's processes together: its init is a subreaper and so the
//! ancestor of everything it leaves behind, and the tree below it is stopped before it is killed. Whoever escapes
//! that, because init itself was killed, becomes a child of the launcher and is killed there.
#![forbid(unsafe_code)]

use std::collections::{HashMap, HashSet};
use std::fs::{self, Permissions};
use std::io;
use std::ops::Range;
use std::os::fd::OwnedFd;
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};

use landlock::{
    ABI, Access, AccessFs, AccessNet, BitFlags, CompatLevel, Compatible, PathBeneath, PathFd, Ruleset,
    RulesetAttr, RulesetCreatedAttr, Scope,
};
use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;

use crate::launcher::leases::Leases;
use crate::launcher::plan::SpaceId;
use crate::launcher::rules::Rules;
use crate::launcher::spaces::Spaces;
use crate::launcher::wire::RULE_OPTIONAL;

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
    let mut held = Held::default();
    for _ in 0..KILL_ROUNDS_MAX {
        if !held.stop(descendants(init)) {
            break;
        }
    }
    held.kill();
    // Ours and not reaped yet: the number is its own.
    let _ = kill(init, Signal::SIGKILL);
}

/// Kills our own children that are none of `known`, and what is below them: what is left of sandboxes whose init has
/// ended. One that forks and ends is followed until a child of its is stopped.
pub fn kill_strays(known: &HashSet<Pid>) {
    let mut held = Held::default();
    for _ in 0..KILL_ROUNDS_MAX {
        let strays: Vec<Pid> = children(Pid::this()).into_iter().filter(|pid| !known.contains(pid)).collect();
        let below: Vec<Pid> = strays.iter().copied().flat_map(descendants).collect();
        if !held.stop(strays.into_iter().chain(below)) {
            break;
        }
    }
    held.kill();
}

/// Processes that were stopped, by descriptor: a number may be somebody else's by the time it is used again.
#[derive(Default)]
struct Held {
    processes: HashMap<Pid, OwnedFd>,
}

impl Held {
    /// Stops those that are not held yet; false when there are none.
    fn stop(&mut self, found: impl IntoIterator<Item = Pid>) -> bool {
        let mut fresh = false;
        for pid in found {
            if self.processes.contains_key(&pid) {
                continue;
            }
            let raw = rustix::process::Pid::from_raw(pid.as_raw());
            let opened =
                raw.map(|raw| rustix::process::pidfd_open(raw, rustix::process::PidfdFlags::empty()));
            // Gone already is what we want.
            if let Some(Ok(process)) = opened {
                let _ = rustix::process::pidfd_send_signal(&process, rustix::process::Signal::STOP);
                self.processes.insert(pid, process);
                fresh = true;
            }
        }
        fresh
    }

    fn kill(self) {
        for process in self.processes.values() {
            let _ = rustix::process::pidfd_send_signal(process, rustix::process::Signal::KILL);
        }
    }
}

/// Ends every guest with one of these ids. Not by id alone: hosts with a directory service give out ids of their own
/// choice, and such a process is none of ours to end.
pub fn end_guests_of(ids: &Range<u32>) {
    let mut held = Held::default();
    for _ in 0..KILL_ROUNDS_MAX {
        let everybody = fs::read_dir("/proc").into_iter().flatten().flatten();
        let pids = everybody.filter_map(|entry| entry.file_name().to_str()?.parse().ok().map(Pid::from_raw));
        if !held.stop(pids.filter(|pid| is_guest_of(*pid, ids)).collect::<Vec<_>>()) {
            break;
        }
    }
    if !held.processes.is_empty() {
        tracing::warn!(count = held.processes.len(), ?ids, "ending processes that outlived their sandbox");
    }
    held.kill();
}

/// What a guest cannot get rid of: an id of ours, filters, no_new_privs and an empty bounding set.
fn is_guest_of(pid: Pid, ids: &Range<u32>) -> bool {
    let status = fs::read_to_string(format!("/proc/{pid}/status")).unwrap_or_default();
    is_marked(&status, ids)
}

fn is_marked(status: &str, ids: &Range<u32>) -> bool {
    let field = |name: &str| {
        let value = status.lines().find_map(|line| line.strip_prefix(name)?.strip_prefix(':'));
        value.and_then(|value| value.split_whitespace().next())
    };
    let is_ours = field("Uid").and_then(|uid| uid.parse().ok()).is_some_and(|uid| ids.contains(&uid));
    let no_bounding = field("CapBnd").is_some_and(|set| set.bytes().all(|digit| digit == b'0'));
    is_ours && no_bounding && field("NoNewPrivs") == Some("1") && field("Seccomp") == Some("2")
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

/// Ends what launchers of this host left running when they were killed: guests with ids that no launcher holds. From
/// the host's own pid namespace, where they can be seen.
pub fn end_leftovers() -> io::Result<()> {
    for range in Leases::free_ranges()? {
        end_guests_of(&range.ids);
    }
    Ok(())
}

/// The first child of an init: its guest.
pub fn guest_of(init: Pid) -> Option<Pid> {
    children(init).into_iter().next()
}

/// SIGINT for a guest, and for it alone: its group's number could be somebody else's by now. The process is held
/// before it is looked at, so that its number cannot have passed on in between.
pub fn interrupt(init: Pid, guest: Pid) -> io::Result<()> {
    let raw = rustix::process::Pid::from_raw(guest.as_raw()).ok_or(io::ErrorKind::InvalidInput)?;
    let held = rustix::process::pidfd_open(raw, rustix::process::PidfdFlags::empty())?;
    if !children(init).contains(&guest) {
        return Err(io::ErrorKind::NotFound.into());
    }
    Ok(rustix::process::pidfd_send_signal(&held, rustix::process::Signal::INT)?)
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

#[cfg(test)]
mod tests {
    use super::*;

    const GUEST: &str = "Name:\tpython3\nUid:\t1879113745\t1879113745\t1879113745\t1879113745\nCapEff:\t0000000000000000\n\
                         CapBnd:\t0000000000000000\nNoNewPrivs:\t1\nSeccomp:\t2\nSeccomp_filters:\t3\n";

    #[test]
    fn only_what_bears_all_the_marks_of_a_guest_is_taken_for_one() {
        let ids = 1_879_048_192..1_895_825_408;
        assert!(is_marked(GUEST, &ids));
        // Somebody whom a directory service has given such an id, and what a browser of his runs.
        for (from, to) in [
            ("CapBnd:\t0000000000000000", "CapBnd:\t000001ffffffffff"),
            ("NoNewPrivs:\t1", "NoNewPrivs:\t0"),
            ("Seccomp:\t2", "Seccomp:\t0"),
            ("Uid:\t1879113745", "Uid:\t1000"),
        ] {
            assert!(!is_marked(&GUEST.replace(from, to), &ids), "{to}");
        }
        assert!(!is_marked("", &ids));
    }
}
