//! What a space's next sandbox takes over from one that has ended: only what is as good as new, and never another
//! space's.

use std::fs;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use caisson::launcher::plan::End;
use caisson::launcher::settings::Settings;

use crate::support::stand::{fresh_space, text};
use crate::support::{Guest, own_stand, plan, proc, strict};

const END_MAX: Duration = Duration::from_secs(30);
const MEMORY_BYTES: u64 = 256 << 20;

/// Shells are made when one is asked for and not before: who gets what is then known.
fn on_demand(settings: &mut Settings) {
    settings.shells_ready = 0;
    settings.cgroup.memory_bytes = MEMORY_BYTES;
}

/// Where the guest's limits stand, by controller; the same folder three times in a unified tree.
fn groups(guest: &Guest) -> [PathBuf; 3] {
    let groups = text(format!("/proc/{}/cgroup", guest.pid()));
    ["memory", "pids", "cpu"].map(|controller| {
        let of_v1 = groups.lines().find_map(|line| {
            let (names, path) = line.split_once(':')?.1.split_once(':')?;
            names
                .split(',')
                .any(|name| name == controller)
                .then(|| format!("/sys/fs/cgroup/{controller}{path}"))
        });
        let of_v2 =
            || groups.lines().find_map(|line| Some(format!("/sys/fs/cgroup{}", line.strip_prefix("0::")?)));
        of_v1.or_else(of_v2).expect("a guest is in a group").into()
    })
}

/// What the guest's groups allow, of the files that are there.
fn limits(guest: &Guest) -> Vec<(String, String)> {
    const FILES: [&str; 8] = [
        "memory.limit_in_bytes",
        "memory.memsw.limit_in_bytes",
        "memory.max",
        "memory.swap.max",
        "pids.max",
        "cpu.cfs_period_us",
        "cpu.cfs_quota_us",
        "cpu.max",
    ];
    let read =
        |group: &PathBuf, file: &str| Some((file.to_owned(), fs::read_to_string(group.join(file)).ok()?));
    let groups = groups(guest);
    groups.iter().flat_map(|group| FILES.iter().filter_map(|file| read(group, file))).collect()
}

/// Ends a guest and waits until its sandbox is gone.
fn end(guest: Guest) {
    let (stand, sandbox, init) = (Arc::clone(&guest.stand), guest.sandbox, guest.init());
    drop(guest);
    stand.end_of(sandbox, END_MAX).expect("it ends");
    proc::until("init is reaped", END_MAX, || !proc::lives(init));
}

#[test]
fn a_group_is_used_again_in_its_own_space_and_bounds_as_before() {
    let stand = own_stand!(on_demand);
    let (space, other) = (fresh_space(), fresh_space());
    let mut first = stand.guest(plan(space));
    first
        .say("import os; held = [os.pipe() for _ in range(50)]; a = bytearray(30_000_000); os.sched_yield()");
    let (group, bounds) = (groups(&first), limits(&first));
    assert!(bounds.len() >= 3, "{bounds:?}");
    end(first);
    let stranger = stand.guest(plan(other));
    assert!(
        groups(&stranger).iter().zip(&group).all(|(theirs, ours)| theirs != ours),
        "{group:?} changed its space"
    );
    let mut second = stand.guest(plan(space));
    assert_eq!(groups(&second), group, "the control: a clean group is used again");
    assert_eq!(limits(&second), bounds);
    assert_eq!(limits(&stranger), bounds, "as those of a group that nobody had before");
    // They bind, too: the second guest has no more than the first.
    let died = second.cell("a = bytearray(600_000_000); a[::4096] = b'x' * len(a[::4096])");
    assert!(died.ended || died.error.is_some(), "{died:?}");
}

/// Namespaces of a guest by name.
fn namespaces(guest: &Guest) -> [u64; 7] {
    NAMESPACES.map(|name| proc::namespace(guest.pid(), name).expect("a guest has namespaces"))
}

const NAMESPACES: [&str; 7] = ["user", "net", "mnt", "pid", "ipc", "uts", "cgroup"];
/// What the launcher passes on, the first two of the list above.
const PASSED_ON: usize = 2;

/// Binds what another of the same name could see, connects to itself and takes datagrams.
const TALKS: &str = "
import socket
held = [socket.socket(), socket.socket(socket.AF_UNIX), socket.socket(socket.AF_INET6, socket.SOCK_DGRAM)]
held[0].bind(('127.0.0.1', 4711)); held[0].listen()
held[1].bind('\\0known'); held[1].listen()
held[2].bind(('::1', 4711)); held[2].sendto(b'x', held[2].getsockname())
";

#[test]
fn an_empty_network_is_used_again_in_its_own_space_by_one_guest_after_the_other() {
    let stand = own_stand!(on_demand);
    let (space, other) = (fresh_space(), fresh_space());
    let mut first = stand.guest(plan(space));
    first.say(TALKS);
    let (before, uid) = (namespaces(&first), first.attestation.host_uid);
    let beside = stand.guest(plan(space));
    assert!(namespaces(&beside).iter().zip(&before).all(|(theirs, ours)| theirs != ours), "two at a time");
    end(first);
    let stranger = stand.guest(plan(other));
    assert!(namespaces(&stranger).iter().zip(&before).all(|(theirs, ours)| theirs != ours), "another space");
    let exec = stand.guest(strict(space));
    assert!(namespaces(&exec).iter().zip(&before).all(|(theirs, ours)| theirs != ours), "another owner");
    let mut second = stand.guest(plan(space));
    let after = namespaces(&second);
    assert_eq!(after[..PASSED_ON], before[..PASSED_ON], "the control: what is empty is used again");
    assert!(after[PASSED_ON..].iter().zip(&before[PASSED_ON..]).all(|(theirs, ours)| theirs != ours));
    assert_eq!(second.attestation.host_uid, uid, "the maps are those of the user namespace");
    assert!(second.is_fork());
    for kind in ["tcp", "tcp6", "udp6", "raw"] {
        let lines = text(format!("/proc/{}/net/{kind}", second.pid()));
        assert_eq!(lines.lines().count(), 1, "{lines}");
    }
    second.say(TALKS);
    assert_eq!(
        second.say("socket.create_connection(('127.0.0.1', 4711)).close(); print('through')"),
        "through"
    );
    let refused = second.cell("import socket; socket.sethostname('x')");
    assert!(
        refused.error.is_some_and(|error| error.contains("PermissionError")),
        "confined as the first one was"
    );
}

#[test]
fn a_network_with_a_connection_on_its_way_out_is_not_used_again() {
    let stand = own_stand!(on_demand);
    let space = fresh_space();
    let mut first = stand.guest(plan(space));
    // Who closes first keeps the pair of addresses for a minute.
    first.say(TALKS);
    first.say(
        "a = socket.create_connection(('127.0.0.1', 4711)); b, _ = held[0].accept(); a.close(); b.close()",
    );
    let before = namespaces(&first);
    let lines = text(format!("/proc/{}/net/tcp", first.pid()));
    assert!(lines.lines().any(|line| line.contains(" 06 ")), "no connection in TIME_WAIT: {lines}");
    end(first);
    let second = stand.guest(plan(space));
    assert_ne!(namespaces(&second)[..PASSED_ON], before[..PASSED_ON]);
}

#[test]
fn a_group_in_which_the_kernel_killed_is_not_used_again() {
    let stand = own_stand!(on_demand);
    let space = fresh_space();
    let mut first = stand.guest(plan(space));
    let (group, sandbox, init) = (groups(&first), first.sandbox, first.init());
    let died = first.cell("a = bytearray(600_000_000)\nfor at in range(0, len(a), 4096): a[at] = 1");
    assert!(died.ended, "{died:?}");
    assert_eq!(stand.end_of(sandbox, END_MAX), Some(End::OutOfMemory));
    proc::until("init is reaped", END_MAX, || !proc::lives(init));
    let second = stand.guest(plan(space));
    assert_ne!(groups(&second), group);
}

#[test]
fn a_group_that_still_pays_for_files_is_not_used_again() {
    let stand = own_stand!(on_demand);
    let space = fresh_space();
    let mut first = stand.guest(plan(space));
    first.say("open('/mnt/data/large', 'wb').write(b'x' * 20_000_000)");
    let group = groups(&first);
    end(first);
    let second = stand.guest(plan(space));
    assert_ne!(groups(&second), group, "20 MB of its page cache would count against the next guest");
}
