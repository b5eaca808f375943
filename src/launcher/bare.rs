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

use crate::launcher::leases::{FreeRange, Leases};
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
    for dir in [state_dir].iter().chain(dirs).flat_map(|dir| dir.ancestors().skip(1)) {
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
        if !held.stop(descendants(init), |pid| is_below(pid, init)) {
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
        let is_stray = |pid| top_below(pid, Pid::this()).is_some_and(|top| !known.contains(&top));
        if !held.stop(strays.into_iter().chain(below), is_stray) {
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
    /// Stops those that are not held yet; false when there were none and looking again finds no more. Each is held
    /// before it is asked whether it is what was looked for: since it was found, its number may have passed on.
    fn stop(&mut self, found: impl IntoIterator<Item = Pid>, is_wanted: impl Fn(Pid) -> bool) -> bool {
        let mut fresh = false;
        for pid in found {
            // Once more, should a sibling have let it go on; refused when it has ended, and its number is another's.
            if self.processes.get(&pid).is_some_and(stop) {
                continue;
            }
            let raw = rustix::process::Pid::from_raw(pid.as_raw());
            let opened =
                raw.map(|raw| rustix::process::pidfd_open(raw, rustix::process::PidfdFlags::empty()));
            // Gone already is what we want.
            if let Some(Ok(process)) = opened {
                // What is not wanted may have lost its parent while that was looked at: the next round tells.
                fresh = true;
                if is_wanted(pid) && stop(&process) {
                    self.processes.insert(pid, process);
                }
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

/// False when it is gone.
fn stop(process: &OwnedFd) -> bool {
    rustix::process::pidfd_send_signal(process, rustix::process::Signal::STOP).is_ok()
}

/// Ends every guest with an id in one of these ranges. Not by id alone: hosts with a directory service give out ids
/// of their own choice, and such a process is none of ours to end.
pub fn end_guests_of(ids: &[Range<u32>]) {
    let is_ours = |pid: Pid| guest_id(pid).is_some_and(|id| ids.iter().any(|range| range.contains(&id)));
    let mut held = Held::default();
    for _ in 0..KILL_ROUNDS_MAX {
        if !held.stop(everybody().filter(|pid| is_ours(*pid)), is_ours) {
            break;
        }
    }
    if !held.processes.is_empty() {
        tracing::warn!(count = held.processes.len(), ?ids, "ending processes that outlived their sandbox");
    }
    held.kill();
}

/// Every process that can be seen from here.
fn everybody() -> impl Iterator<Item = Pid> {
    let entries = fs::read_dir("/proc").into_iter().flatten().flatten();
    entries.filter_map(|entry| entry.file_name().to_str()?.parse().ok().map(Pid::from_raw))
}

/// The uid of a process that bears the marks of a guest.
fn guest_id(pid: Pid) -> Option<u32> {
    marked_id(&fs::read_to_string(format!("/proc/{pid}/status")).ok()?)
}

/// What a guest cannot get rid of beside its id: filters, no_new_privs and an empty bounding set.
fn marked_id(status: &str) -> Option<u32> {
    let field = |name: &str| {
        let value = status.lines().find_map(|line| line.strip_prefix(name)?.strip_prefix(':'));
        value.and_then(|value| value.split_whitespace().next())
    };
    let no_bounding = field("CapBnd").is_some_and(|set| set.bytes().all(|digit| digit == b'0'));
    let is_marked = no_bounding && field("NoNewPrivs") == Some("1") && field("Seccomp") == Some("2");
    field("Uid").filter(|_| is_marked)?.parse().ok()
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
/// the host's own pid namespace, where they can be seen. Looks at every process once; ranges are locked only when
/// there is something to end in them, so that launchers that start at once find theirs free.
pub fn end_leftovers() -> io::Result<()> {
    let seen: HashSet<u32> = everybody().filter_map(guest_id).collect();
    let left: Vec<FreeRange> =
        Leases::free_ranges()?.filter(|range| seen.iter().any(|id| range.ids.contains(id))).collect();
    if !left.is_empty() {
        end_guests_of(&left.iter().map(|range| range.ids.clone()).collect::<Vec<_>>());
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

/// The child of `ancestor` that a process is or comes from, if it does.
fn top_below(mut pid: Pid, ancestor: Pid) -> Option<Pid> {
    loop {
        match parent(pid)? {
            above if above == ancestor => return Some(pid),
            above if above.as_raw() <= 1 => return None,
            above => pid = above,
        }
    }
}

fn is_below(pid: Pid, ancestor: Pid) -> bool {
    top_below(pid, ancestor).is_some()
}

fn parent(pid: Pid) -> Option<Pid> {
    let stat = fs::read_to_string(format!("/proc/{pid}/stat")).ok()?;
    // The name before may hold anything, a guest chooses it; only its end is certain.
    let (_, after) = stat.rsplit_once(") ")?;
    after.split(' ').nth(1)?.parse().ok().map(Pid::from_raw)
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
    use std::process::{Child, Command};
    use std::time::Duration;

    use super::*;

    const GUEST: &str = "Name:\tpython3\nUid:\t1879113745\t1879113745\t1879113745\t1879113745\nCapEff:\t0000000000000000\n\
                         CapBnd:\t0000000000000000\nNoNewPrivs:\t1\nSeccomp:\t2\nSeccomp_filters:\t3\n";

    #[test]
    fn only_what_bears_all_the_marks_of_a_guest_is_taken_for_one() {
        assert_eq!(marked_id(GUEST), Some(1_879_113_745));
        // Somebody whom a directory service has given such an id, and what a browser of his runs.
        for (from, to) in [
            ("CapBnd:\t0000000000000000", "CapBnd:\t000001ffffffffff"),
            ("NoNewPrivs:\t1", "NoNewPrivs:\t0"),
            ("Seccomp:\t2", "Seccomp:\t0"),
        ] {
            assert_eq!(marked_id(&GUEST.replace(from, to)), None, "{to}");
        }
        assert_eq!(marked_id(""), None);
    }

    /// A process that waits.
    struct Waits(Child);

    impl Waits {
        fn new() -> Waits {
            Waits(Command::new("sleep").arg("60").spawn().expect("it starts"))
        }

        fn pid(&self) -> Pid {
            Pid::from_raw(self.0.id() as i32)
        }

        /// Whether it comes into this state, as `/proc` has it: `T` stopped, `Z` ended.
        fn comes_to(&self, wanted: char) -> bool {
            (0..500).any(|_| {
                std::thread::sleep(Duration::from_millis(2));
                self.is(wanted)
            })
        }

        fn is(&self, wanted: char) -> bool {
            let stat = fs::read_to_string(format!("/proc/{}/stat", self.pid())).expect("not waited for");
            stat.rsplit_once(") ").expect("a name").1.starts_with(wanted)
        }
    }

    impl Drop for Waits {
        fn drop(&mut self) {
            let _ = self.0.kill();
            let _ = self.0.wait();
        }
    }

    #[test]
    fn a_number_that_passed_on_since_it_was_listed_is_nobodys_to_stop() {
        let (guest, stranger) = (Waits::new(), Waits::new());
        let mut held = Held::default();
        // The list is old: the stranger has the number of what was below `guest` then.
        let listed = [guest.pid(), stranger.pid()];
        assert!(held.stop(listed, |pid| pid == guest.pid() || is_below(pid, guest.pid())));
        assert!(guest.comes_to('T'), "control: what is wanted is stopped");
        held.kill();
        assert!(guest.comes_to('Z'), "control: and ended");
        assert!(stranger.comes_to('S'), "a stranger was stopped or killed");
    }

    #[test]
    fn a_number_that_passed_on_since_it_was_held_is_nobodys_to_kill() {
        const LAST: &str = "/proc/sys/kernel/ns_last_pid";
        if !rustix::process::geteuid().is_root() || !Path::new(LAST).exists() {
            return;
        }
        let mut held = Held::default();
        let mut guest = Waits::new();
        let pid = guest.pid();
        assert!(held.stop([pid], |_| true));
        guest.0.kill().expect("ours");
        guest.0.wait().expect("ours");
        // Others start processes meanwhile: the number is not always ours to have.
        let stranger = (0..200).find_map(|_| {
            fs::write(LAST, (pid.as_raw() - 1).to_string()).expect("we are root");
            Some(Waits::new()).filter(|next| next.pid() == pid)
        });
        let stranger = stranger.expect("the number is free");
        // Looked through once more, it is a new process, and not one that was asked for.
        held.stop([pid], |_| false);
        held.kill();
        std::thread::sleep(Duration::from_millis(50));
        assert!(stranger.comes_to('S'), "a stranger was stopped or killed");
    }

    #[test]
    fn a_process_is_below_those_it_comes_from_and_nobody_else() {
        let (me, other) = (Pid::this(), Waits::new());
        let child = Waits::new();
        assert_eq!(top_below(child.pid(), me), Some(child.pid()));
        assert!(is_below(me, Pid::parent()) && !is_below(me, me));
        assert!(!is_below(child.pid(), other.pid()) && !is_below(Pid::from_raw(1), me));
        assert!(!is_below(Pid::from_raw(i32::MAX), me), "nobody has this number");
    }
}
