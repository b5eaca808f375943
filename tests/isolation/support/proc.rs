//! What the kernel says about processes, read from the host's side.

use std::collections::BTreeMap;
use std::fs;
use std::os::unix::fs::MetadataExt;
use std::time::{Duration, Instant};

use nix::sys::signal::Signal;
use nix::unistd::Pid;

/// Every process of the machine.
pub(crate) fn all() -> Vec<i32> {
    let entries = fs::read_dir("/proc").expect("the host has a /proc");
    entries.flatten().filter_map(|entry| entry.file_name().to_str()?.parse().ok()).collect()
}

/// The fields of `/proc/PID/status`; empty for a process that is gone.
pub(crate) fn status(pid: i32) -> BTreeMap<String, String> {
    let text = fs::read_to_string(format!("/proc/{pid}/status")).unwrap_or_default();
    let pairs = text.lines().filter_map(|line| line.split_once(':'));
    pairs.map(|(name, value)| (name.to_owned(), value.trim().to_owned())).collect()
}

/// All four uids, when they agree.
pub(crate) fn uid(pid: i32) -> Option<u32> {
    let status = status(pid);
    let mut ids = status.get("Uid")?.split_whitespace().map(|id| id.parse().ok());
    let first = ids.next()??;
    ids.all(|id| id == Some(first)).then_some(first)
}

/// Pids from the outermost namespace to the process's own.
pub(crate) fn pids_in_namespaces(pid: i32) -> Vec<i32> {
    let status = status(pid);
    let text = status.get("NSpid").map(String::as_str).unwrap_or_default();
    text.split_whitespace().filter_map(|word| word.parse().ok()).collect()
}

pub(crate) fn parent(pid: i32) -> Option<i32> {
    status(pid).get("PPid")?.parse().ok()
}

pub(crate) fn arguments(pid: i32) -> Vec<String> {
    let bytes = fs::read(format!("/proc/{pid}/cmdline")).unwrap_or_default();
    bytes.split(|byte| *byte == 0).map(|word| String::from_utf8_lossy(word).into_owned()).collect()
}

/// Inode of a namespace of the process.
pub(crate) fn namespace(pid: i32, name: &str) -> Option<u64> {
    Some(fs::metadata(format!("/proc/{pid}/ns/{name}")).ok()?.ino())
}

/// A process below `pid` of that name.
pub(crate) fn descendant(pid: i32, name: &str) -> Option<i32> {
    let children = fs::read_to_string(format!("/proc/{pid}/task/{pid}/children")).ok()?;
    children.split_whitespace().filter_map(|word| word.parse().ok()).find_map(|child: i32| {
        if status(child).get("Name").is_some_and(|found| found == name) {
            Some(child)
        } else {
            descendant(child, name)
        }
    })
}

/// When the process started: with its pid, its identity.
pub(crate) fn start_time(pid: i32) -> Option<u64> {
    let stat = fs::read_to_string(format!("/proc/{pid}/stat")).ok()?;
    let (_, after) = stat.rsplit_once(") ")?;
    after.split(' ').nth(19)?.parse().ok()
}

/// Alive: there, and no zombie.
pub(crate) fn lives(pid: i32) -> bool {
    status(pid).get("State").is_some_and(|state| !state.starts_with(['Z', 'X']))
}

pub(crate) fn kill(pid: i32) {
    // Gone already is what we want.
    let _ = nix::sys::signal::kill(Pid::from_raw(pid), Signal::SIGKILL);
}

/// Waits for something to become true.
pub(crate) fn until(what: &str, max: Duration, mut holds: impl FnMut() -> bool) {
    let max = super::scaled(max);
    let deadline = Instant::now() + max;
    while !holds() {
        assert!(Instant::now() < deadline, "not within {} s: {what}", max.as_secs());
        std::thread::sleep(Duration::from_millis(20));
    }
}

/// The session that a process belongs to, by the pid of its first.
pub(crate) fn session_of(pid: i32) -> Option<i32> {
    let stat = fs::read_to_string(format!("/proc/{pid}/stat")).ok()?;
    let (_, after) = stat.rsplit_once(") ")?;
    after.split(' ').nth(3)?.parse().ok()
}
