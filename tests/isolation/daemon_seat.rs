//! From the seat of a taken daemon: whatever it writes on the launcher's socket, it gets cells and nothing else.

use std::fs::{self, File};
use std::os::fd::AsFd;
use std::path::PathBuf;
use std::sync::{Arc, Mutex, MutexGuard, OnceLock};
use std::time::{Duration, Instant};

use caisson::launcher::plan::{
    Account, End, LaunchPlan, Origin, Profile, REQUEST_BYTES, Reply, Request, SandboxId, SpaceId, Step,
};
use caisson::sys::raw;
use rustix::fs::{FileType, OFlags};
use rustix::io::Errno;

use crate::support::stand::fresh_space;
use crate::support::{Guest, Stand, Trouble, own_stand, plan, proc, skip, strict};

const SHORT: Duration = Duration::from_millis(300);
const LONG: Duration = Duration::from_secs(30);

/// One launcher for this module, one test at a time: they count what it holds.
fn alone() -> Option<(Arc<Stand>, MutexGuard<'static, ()>)> {
    static STAND: OnceLock<Result<Arc<Stand>, String>> = OnceLock::new();
    static TURN: Mutex<()> = Mutex::new(());
    let turn = TURN.lock().unwrap_or_else(|poisoned| poisoned.into_inner());
    let started = STAND.get_or_init(|| {
        Stand::start(|settings| {
            settings.zygotes_off = true;
            settings.shells_ready = 0;
        })
    });
    match started {
        Ok(stand) => Some((Arc::clone(stand), turn)),
        Err(reason) => {
            skip(reason);
            None
        }
    }
}

fn refused(errno: Errno) -> Trouble {
    Trouble { step: Step::Plan, errno: errno.raw_os_error() }
}

fn launched(stand: &Arc<Stand>, plan: LaunchPlan) -> Result<Guest, Trouble> {
    stand.launch(plan)
}

/// Descriptors the launcher holds, once what is ending has ended.
fn descriptors(stand: &Stand) -> usize {
    fs::read_dir(format!("/proc/{}/fd", stand.launcher)).expect("the launcher lives").count()
}

fn images(stand: &Stand) -> Vec<PathBuf> {
    let dir = stand.dir.join("launcher/spaces");
    fs::read_dir(dir).expect("the launcher's folder").flatten().map(|entry| entry.path()).collect()
}

#[test]
fn a_daemon_gets_four_pipes_and_nothing_else_with_a_launch() {
    let Some((stand, _turn)) = alone() else { return };
    let guest = stand.guest(strict(fresh_space()));
    assert_eq!(guest.descriptor_types(), [FileType::Fifo; 4]);
    let access = guest.pipes.each_ref().map(|pipe| {
        let flags = rustix::fs::fcntl_getfl(pipe.as_fd()).expect("an open descriptor");
        flags & OFlags::ACCMODE
    });
    assert_eq!(access, [OFlags::WRONLY, OFlags::RDONLY, OFlags::RDONLY, OFlags::RDONLY]);
}

#[test]
fn space_zero_is_nobodys_and_any_other_number_is_just_a_name_in_the_launchers_folder() {
    let Some((stand, _turn)) = alone() else { return };
    assert_eq!(launched(&stand, strict(SpaceId(0))).err(), Some(refused(Errno::INVAL)));
    assert_eq!(stand.delete_space(SpaceId(0)), Errno::INVAL.raw_os_error(), "nor may it be deleted");
    // Control: a number of the daemon's own works, however large, and becomes a file of that folder only.
    for number in [u64::MAX, 1 << 63, 0x2e2e_2f2e_2e2f_2e2e] {
        let mut guest = stand.guest(strict(SpaceId(number)));
        assert_eq!(guest.say("print(open('/mnt/data/x', 'w').write('here'))"), "4");
        let image = stand.dir.join(format!("launcher/spaces/{number:016x}.img"));
        assert!(images(&stand).contains(&image), "{:?}", images(&stand));
        guest.end();
        assert_eq!(stand.delete_space(SpaceId(number)), 0);
    }
    stand.still_launches();
}

#[test]
fn no_account_number_leads_to_root() {
    let Some((stand, _turn)) = alone() else { return };
    let known = stand.hello.accounts.len();
    let space = fresh_space();
    for index in 0..=u8::MAX {
        let plan = LaunchPlan { account: Account(index), ..strict(space) };
        if usize::from(index) >= known {
            assert_eq!(launched(&stand, plan).err(), Some(refused(Errno::INVAL)), "account {index}");
            continue;
        }
        // Control: the accounts there are work, and none of them is root, inside or outside.
        let mut guest = stand.guest(plan);
        let ids = guest.ask(
            "import os, json; print(json.dumps(list(os.getresuid() + os.getresgid()) + os.getgroups()))",
        );
        let ids: Vec<u64> = serde_json::from_value(ids).expect("numbers");
        assert!(ids.len() == 6 && ids.iter().all(|id| *id >= 1000), "account {index}: {ids:?}");
        assert!(guest.attestation.host_uid >= 0x7000_0000, "{:?}", guest.attestation);
        assert_eq!(proc::uid(guest.pid()), Some(guest.attestation.host_uid));
    }
}

#[test]
fn a_profile_that_is_not_there_and_one_that_does_not_exist_are_refused() {
    let Some((stand, _turn)) = alone() else { return };
    // This launcher was told of no Node.
    let node = LaunchPlan { profile: Profile::Node, ..strict(fresh_space()) };
    assert_eq!(launched(&stand, node).err(), Some(refused(Errno::NOENT)));
    // Nor does it know so many kernels, and only a kernel has a choice.
    for (profile, interpreter) in [(Profile::Kernel, 200), (Profile::Python, 1), (Profile::Files, 1)] {
        let plan = LaunchPlan { profile, interpreter, ..strict(fresh_space()) };
        assert_eq!(launched(&stand, plan).err(), Some(refused(Errno::NOENT)), "{profile:?} {interpreter}");
    }
    let mut seat = stand.seat();
    let unknown = Profile::ALL.len() as u8;
    for (at, value) in [(24, unknown), (24, 255), (25, 2), (25, 255), (28, 2), (28, 255), (29, 2)] {
        let seq = seat.next_seq();
        let mut packet = Request::Launch { seq, plan: strict(fresh_space()) }.encode();
        packet[at] = value;
        seat.send(&packet);
    }
    assert!(seat.answer(SHORT).is_none(), "malformed plans are not answered");
    drop(seat);
    stand.still_launches();
}

#[test]
fn a_replayed_plan_makes_nothing() {
    let Some((stand, _turn)) = alone() else { return };
    let mut seat = stand.seat();
    let seq = seat.next_seq();
    let packet = Request::Launch { seq, plan: strict(fresh_space()) }.encode();
    seat.send(&packet);
    let (reply, _pipes) = seat.answer(LONG).expect("an answer");
    let Reply::Launched { sandbox, .. } = reply else { panic!("{reply:?}") };
    for old in [seq, seq - 1, 1, 0] {
        let plan = strict(fresh_space());
        seat.send(&Request::Launch { seq: old, plan }.encode());
        seat.send(&Request::End { seq: old, sandbox }.encode());
    }
    assert!(seat.answer(SHORT).is_none(), "a replayed plan was answered");
    // Control: the same end under a new number counts.
    let seq = seat.next_seq();
    seat.send(&Request::End { seq, sandbox }.encode());
    drop(seat);
    assert_eq!(stand.end_of(sandbox, LONG), Some(End::Ended));
    stand.still_launches();
}

#[test]
fn packets_of_a_wrong_size_or_with_reserved_bytes_set_are_refused() {
    let Some((stand, _turn)) = alone() else { return };
    {
        let mut seat = stand.seat();
        let good = |seq| Request::Launch { seq, plan: strict(fresh_space()) }.encode();
        for length in [1, REQUEST_BYTES - 1] {
            let packet = good(seat.next_seq());
            seat.send(&packet[..length]);
        }
        for length in [REQUEST_BYTES + 1, REQUEST_BYTES + 2, 4096, 100_000] {
            let mut packet = good(seat.next_seq()).to_vec();
            packet.resize(length, 0);
            seat.send(&packet);
        }
        for at in (1..8).chain(30..REQUEST_BYTES) {
            let mut packet = good(seat.next_seq());
            packet[at] = 1;
            seat.send(&packet);
        }
        for code in [0, 5, 6, 127, 255] {
            let mut packet = good(seat.next_seq());
            packet[0] = code;
            seat.send(&packet);
        }
        assert!(seat.answer(SHORT).is_none(), "one of them was answered");
    }
    // Control: the packet they were made from is taken.
    stand.still_launches();
}

#[test]
fn ten_thousand_packets_of_garbage_leave_a_launcher_that_launches() {
    let Some((stand, _turn)) = alone() else { return };
    let before = descriptors(&stand);
    {
        let mut seat = stand.seat();
        // A fixed generator (xorshift): a failure can be repeated.
        let mut state = 0x9e37_79b9_7f4a_7c15_u64;
        let mut next = || {
            state ^= state << 13;
            state ^= state >> 7;
            state ^= state << 17;
            state
        };
        for _ in 0..10_000 {
            let length = 1 + (next() % 96) as usize;
            let packet: Vec<u8> = (0..length).map(|_| next() as u8).collect();
            seat.send(&packet);
        }
        assert!(seat.answer(SHORT).is_none());
    }
    stand.still_launches();
    proc::until("the launcher's descriptors are as before", LONG, || descriptors(&stand) <= before);
}

#[test]
fn descriptors_attached_to_a_plan_are_closed_by_the_launcher() {
    let Some((stand, _turn)) = alone() else { return };
    stand.still_launches();
    let root = File::open("/").expect("a root");
    let null = File::open("/dev/null").expect("a null device");
    let held = |stand: &Stand| {
        let dir = fs::read_dir(format!("/proc/{}/fd", stand.launcher)).expect("the launcher lives");
        dir.flatten()
            .filter(|entry| fs::read_link(entry.path()).is_ok_and(|to| to.as_os_str() == "/"))
            .count()
    };
    let before = held(&stand);
    {
        let mut seat = stand.seat();
        for round in 0..50 {
            let seq = seat.next_seq();
            // Well-formed, malformed and oversize packets alike; more descriptors than it has room for as well.
            let packet = Request::End { seq, sandbox: SandboxId(u64::MAX) }.encode();
            let files = if round % 2 == 0 { vec![&root; 4] } else { vec![&root, &null] };
            seat.send_with(&packet, &files).expect("the kernel passes descriptors");
            seat.send_with(&packet[..7], &files).expect("the kernel passes descriptors");
            seat.send_with(&[1; 300], &vec![&root; 32]).expect("the kernel passes descriptors");
        }
        assert!(seat.answer(SHORT).is_none());
    }
    stand.still_launches();
    assert_eq!(held(&stand), before, "the launcher kept descriptors that came with a plan");
    // Control: we can see one where it is kept, in ourselves.
    assert!(fs::read_link("/proc/self/fd/".to_owned() + &raw(&root)).is_ok_and(|to| to.as_os_str() == "/"));
}

fn raw(file: &File) -> String {
    use std::os::fd::AsRawFd;
    file.as_raw_fd().to_string()
}

#[test]
fn ends_of_unknown_sandboxes_do_nothing() {
    let Some((stand, _turn)) = alone() else { return };
    let mut guest = stand.guest(strict(fresh_space()));
    for id in [0, guest.sandbox.0 + 1, guest.sandbox.0 + 1000, 1 << 56, u64::MAX] {
        stand.end(SandboxId(id));
    }
    assert_eq!(guest.say("print(1 + 1)"), "2");
    // Control: its own number ends it.
    guest.end();
    stand.still_launches();
}

#[test]
fn interleaved_plans_are_answered_one_by_one() {
    let Some((stand, _turn)) = alone() else { return };
    let (mut asked, mut answered, mut failed) = (Vec::new(), Vec::new(), Vec::new());
    let mut live = Vec::new();
    {
        let mut seat = stand.seat();
        for round in 0..12_u64 {
            let seq = seat.next_seq();
            let space = if round % 3 == 0 { SpaceId(0) } else { SpaceId(70_000 + round % 2) };
            let origin = if round % 2 == 0 { Origin::Warm } else { Origin::Strict };
            seat.send(&Request::Launch { seq, plan: LaunchPlan { origin, ..plan(space) } }.encode());
            asked.push(seq);
            let seq = seat.next_seq();
            seat.send(&Request::End { seq, sandbox: SandboxId(1 << 40) }.encode());
            seat.send(&[round as u8; 5]);
        }
        while answered.len() + failed.len() < asked.len() {
            match seat.answer(LONG) {
                Some((Reply::Launched { seq, sandbox, attestation }, pipes)) => {
                    assert_eq!(pipes.len(), 4);
                    answered.push(seq);
                    live.push((sandbox, attestation.host_uid, pipes));
                }
                Some((Reply::LaunchFailed { seq, step: Step::Plan, .. }, pipes)) => {
                    assert!(pipes.is_empty());
                    failed.push(seq);
                }
                other => panic!("{other:?}"),
            }
        }
    }
    assert_eq!((answered.len(), failed.len()), (8, 4));
    let mut all = [answered, failed].concat();
    all.sort_unstable();
    assert_eq!(all, asked);
    let mut uids: Vec<u32> = live.iter().map(|(_, uid, _)| *uid).collect();
    uids.sort_unstable();
    uids.dedup();
    assert_eq!(uids.len(), live.len(), "two sandboxes had one uid");
    for (sandbox, _, _) in &live {
        stand.end(*sandbox);
        assert!(stand.end_of(*sandbox, LONG).is_some());
    }
    stand.still_launches();
}

#[test]
fn deleting_a_space_in_use_ends_its_sandboxes_first() {
    let Some((stand, _turn)) = alone() else { return };
    let (space, other) = (fresh_space(), fresh_space());
    let mut guest = stand.guest(strict(space));
    let mut bystander = stand.guest(strict(other));
    guest.say("open('/mnt/data/mine', 'w').write('x'); import os; os.makedirs('/mnt/data/' + 'd/' * 50)");
    let (pid, image) = (guest.pid(), stand.dir.join(format!("launcher/spaces/{:016x}.img", space.0)));
    assert!(proc::lives(pid) && image.exists());
    assert_eq!(stand.delete_space(space), 0);
    assert!(!proc::lives(pid), "a guest outlived its space");
    assert!(!image.exists(), "the space's files are still there");
    assert_eq!(stand.end_of(guest.sandbox, LONG), Some(End::Ended));
    // Control: the neighbour's space is untouched, and the number stands for a fresh space now.
    assert_eq!(bystander.say("print(1)"), "1");
    let mut again = stand.guest(strict(space));
    assert_eq!(again.say("import os; print(os.listdir('/mnt/data'))"), "[]");
    // Deleting what is not there is done already.
    assert_eq!(stand.delete_space(fresh_space()), 0);
    stand.still_launches();
}

/// At whatever point the deletion meets the launch: the daemon holds a place for each until it is answered.
#[test]
fn a_launch_whose_space_is_deleted_meanwhile_is_answered() {
    let Some((stand, _turn)) = alone() else { return };
    let (mut launched, mut refused) = (0, 0);
    for round in 0..60_u64 {
        let space = fresh_space();
        let origin = if round % 2 == 0 { Origin::Warm } else { Origin::Strict };
        let mut seat = stand.seat();
        let asked = seat.next_seq();
        seat.send(&Request::Launch { seq: asked, plan: LaunchPlan { origin, ..plan(space) } }.encode());
        std::thread::sleep(Duration::from_micros(round * 150));
        let deletion = seat.next_seq();
        seat.send(&Request::DeleteSpace { seq: deletion, space }.encode());
        let (mut waits, mut deleted) = (true, false);
        while waits || !deleted {
            match seat.reply(LONG).map(|(reply, _pipes)| reply) {
                Some(Reply::Launched { seq, .. }) if seq == asked => {
                    (waits, launched) = (false, launched + 1)
                }
                Some(Reply::LaunchFailed { seq, errno, .. }) if seq == asked => {
                    assert_eq!(errno, Errno::CANCELED.raw_os_error());
                    (waits, refused) = (false, refused + 1);
                }
                Some(Reply::SpaceDeleted { seq, errno: 0 }) if seq == deletion => deleted = true,
                Some(Reply::Ended { .. }) => {}
                other => panic!("round {round}: {other:?}; the launcher's log:\n{}", stand.log()),
            }
        }
    }
    assert!(refused > 0, "no deletion met a launch on its way; {launched} were over");
    stand.still_launches();
}

#[test]
fn a_daemon_gets_no_more_spaces_than_there_may_be() {
    let stand = own_stand!(|settings| {
        settings.zygotes_off = true;
        settings.shells_ready = 0;
        settings.spaces_max = 3;
    });
    let spaces = [fresh_space(), fresh_space(), fresh_space()];
    for space in spaces {
        stand.guest(strict(space)).end();
    }
    let full = Trouble { step: Step::SpaceOpen, errno: Errno::DQUOT.raw_os_error() };
    for _ in 0..3 {
        assert_eq!(launched(&stand, strict(fresh_space())).err(), Some(full));
    }
    assert!(stand.log().contains("3 spaces exist, no more are made (limits.spaces_max)"), "{}", stand.log());
    assert_eq!(images(&stand).len(), 1 + spaces.len(), "and the launcher's own: {:?}", images(&stand));
    // Control: those that exist work on, and a deleted one makes room.
    stand.guest(strict(spaces[0])).end();
    assert_eq!(stand.delete_space(spaces[1]), 0);
    assert_eq!(stand.delete_space(spaces[1]), 0, "deleting it twice makes no second room");
    stand.guest(strict(fresh_space())).end();
    assert_eq!(launched(&stand, strict(fresh_space())).err(), Some(full));
}

#[test]
fn a_flood_of_bad_plans_is_counted_and_not_written_line_by_line() {
    const PACKETS: usize = 4000;
    let stand = own_stand!(|settings| {
        settings.zygotes_off = true;
        settings.shells_ready = 0;
    });
    let started = Instant::now();
    {
        let mut seat = stand.seat();
        for round in 0..PACKETS / 4 {
            // Malformed, oversize, replayed, and refused by policy: the last one is answered.
            seat.send(&[7; REQUEST_BYTES]);
            seat.send(&[0; REQUEST_BYTES + 1]);
            seat.send(&Request::Launch { seq: 0, plan: strict(fresh_space()) }.encode());
            let seq = seat.next_seq();
            seat.send(&Request::Launch { seq, plan: strict(SpaceId(0)) }.encode());
            assert!(matches!(seat.answer(LONG), Some((Reply::LaunchFailed { .. }, _))), "round {round}");
        }
    }
    let left_out = |log: &str| -> usize {
        let counts = log.split("left_out=").skip(1);
        counts
            .map(|rest| {
                rest.split(|c: char| !c.is_ascii_digit()).next().map_or(0, |n| n.parse().unwrap_or(0))
            })
            .sum()
    };
    let written = |log: &str| {
        ["malformed plan refused", "oversize plan refused", "replayed plan refused", "launch failed"]
            .iter()
            .map(|line| log.matches(line).count())
            .sum::<usize>()
    };
    proc::until("every one is written or counted", LONG, || {
        let log = without_colours(&stand.log());
        written(&log) + left_out(&log) == PACKETS
    });
    let seconds = started.elapsed().as_secs() as usize + 2;
    let log = without_colours(&stand.log());
    assert!((1..=10 * seconds).contains(&written(&log)), "{} lines in {seconds} s", written(&log));
    stand.still_launches();
}

/// The log as it is without a terminal's escape sequences.
fn without_colours(log: &str) -> String {
    let mut plain = String::new();
    for (at, part) in log.split('\u{1b}').enumerate() {
        plain.push_str(if at == 0 { part } else { part.split_once('m').map_or("", |(_, rest)| rest) });
    }
    plain
}

#[test]
fn a_confined_daemon_may_not_make_namespaces_or_read_outside_its_folder() {
    if let Some(reason) = crate::support::missing() {
        return skip(reason);
    }
    let dir = tempfile::tempdir().expect("a temporary directory");
    let free = std::thread::spawn(|| attempts(None)).join().expect("no panic");
    assert_eq!(free, [None; 9], "control: a thread that is not confined may");
    let path = dir.path().to_owned();
    let confined = std::thread::spawn(move || attempts(Some(&path))).join().expect("no panic");
    let (listed, made) = confined.split_first().expect("nine tries");
    assert_eq!(*listed, Some(Errno::ACCESS));
    assert_eq!(made, [Some(Errno::PERM); 8]);
}

/// Reading `/root`'s listing, unsharing a host name, and a child in a new namespace of each kind, on a thread of
/// its own. `None` for what worked.
fn attempts(confine: Option<&std::path::Path>) -> [Option<Errno>; 9] {
    use nix::sched::CloneFlags;
    if let Some(dir) = confine {
        caisson::daemon::confine::confine(dir).expect("this kernel has seccomp");
    }
    let listed = fs::read_dir("/root").err().and_then(|error| error.raw_os_error());
    let unshared = nix::sched::unshare(CloneFlags::CLONE_NEWUTS).err().map(|error| error as i32);
    let kinds = [
        CloneFlags::CLONE_NEWUSER,
        CloneFlags::CLONE_NEWNS,
        CloneFlags::CLONE_NEWPID,
        CloneFlags::CLONE_NEWNET,
        CloneFlags::CLONE_NEWIPC,
        CloneFlags::CLONE_NEWUTS,
        CloneFlags::CLONE_NEWCGROUP,
    ];
    let cloned = kinds.map(|kind| match raw::fork(kind.bits() as u64 | raw::SIGCHLD) {
        Ok(0) => raw::exit(0),
        Ok(child) => {
            let child = nix::unistd::Pid::from_raw(child as i32);
            nix::sys::wait::waitpid(child, None).expect("it ends at once");
            None
        }
        Err(errno) => Some(errno),
    });
    let mut all = [listed, unshared, None, None, None, None, None, None, None];
    all[2..].copy_from_slice(&cloned);
    all.map(|errno| errno.map(Errno::from_raw_os_error))
}
