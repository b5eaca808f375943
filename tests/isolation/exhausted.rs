//! A launcher whose own means run out half-way through a launch: the launch fails by name, nothing of it stays.

use std::collections::BTreeSet;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::Duration;

use caisson::launcher::plan::{SpaceId, Step};

use crate::support::stand::fresh_space;
use crate::support::{Guest, Stand, own_stand, proc, skip, strict};
use crate::zygote_seat::with_false_zygotes;

const GONE_MAX: Duration = Duration::from_secs(10);
/// Ids of one daemon (src/launcher/leases.rs).
const FIRST_ID: u32 = 0x7000_0000;
const RANGE_IDS: u32 = 1 << 24;

/// The groups of a space's sandboxes, in every tree.
fn groups(witness: &Guest, space: SpaceId) -> BTreeSet<PathBuf> {
    let range = (witness.attestation.host_uid - FIRST_ID) / RANGE_IDS;
    let mut found = BTreeSet::new();
    below(Path::new("/sys/fs/cgroup"), &mut |dir| {
        let of_space = dir.ends_with(format!("caisson-{range}/space-{:x}", space.0));
        if of_space {
            found.extend(folders(dir));
        }
    });
    found
}

fn below(dir: &Path, visit: &mut impl FnMut(&Path)) {
    for folder in folders(dir) {
        visit(&folder);
        below(&folder, visit);
    }
}

fn folders(dir: &Path) -> Vec<PathBuf> {
    // Other tests' groups come and go.
    let entries = fs::read_dir(dir).into_iter().flatten().flatten();
    entries.filter(|entry| entry.file_type().is_ok_and(|it| it.is_dir())).map(|entry| entry.path()).collect()
}

/// Inits and guests of this launcher, those that wait to be reaped included.
fn children(stand: &Stand) -> Vec<i32> {
    proc::all().into_iter().filter(|pid| proc::parent(*pid) == Some(stand.launcher)).collect()
}

fn descriptors(stand: &Stand) -> BTreeSet<i32> {
    let entries = fs::read_dir(format!("/proc/{}/fd", stand.launcher)).expect("the launcher lives");
    entries.flatten().filter_map(|entry| entry.file_name().to_str()?.parse().ok()).collect()
}

fn limit_descriptors(stand: &Stand, soft: i32) {
    let status = Command::new("prlimit")
        .args([format!("--pid={}", stand.launcher), format!("--nofile={soft}:")])
        .status()
        .expect("prlimit starts");
    assert!(status.success());
}

/// Lines about shells that were not made, and whether there were more than are written.
fn not_made(stand: &Stand) -> (usize, bool) {
    let log = stand.log();
    (log.matches("shell not made").count(), log.contains("were not carried out than are written here"))
}

/// How often the launcher has woken up by itself or for somebody.
fn wakings(stand: &Stand) -> u64 {
    proc::status(stand.launcher)["voluntary_ctxt_switches"].parse().expect("a number")
}

/// What a launcher does about a shell that it cannot make: tells it once, and then waits for the next plan.
fn assert_given_up(stand: &Stand, lines_max: usize) {
    proc::until("a shell could not be made", GONE_MAX, || not_made(stand).0 > 0);
    std::thread::sleep(Duration::from_millis(200));
    let before = wakings(stand);
    // Tried again every few milliseconds it would be hundreds.
    std::thread::sleep(Duration::from_secs(2));
    let woken = wakings(stand) - before;
    let (lines, more) = not_made(stand);
    assert!(woken < 60 && lines <= lines_max && !more, "{woken} wakings, {lines} lines, {more}");
}

#[test]
fn a_shell_that_cannot_be_made_is_not_tried_again_before_the_next_plan() {
    let stand = own_stand!(|settings| {
        settings.zygotes_off = true;
        settings.spaces_max = 1;
    });
    let mut witness = stand.guest(strict(fresh_space()));
    for tries in 1..=2 {
        let trouble = stand.launch(strict(fresh_space())).err().expect("one space there may be");
        assert_eq!(trouble.step, Step::SpaceOpen);
        assert_given_up(&stand, tries);
    }
    assert_eq!(witness.say("print(1)"), "1");
}

#[test]
fn a_shell_whose_init_does_not_come_up_is_not_made_again_and_again() {
    let policies = tempfile::tempdir().expect("a temporary directory");
    let ours = concat!(env!("CARGO_MANIFEST_DIR"), "/policies/landlock.toml");
    let rules = fs::read_to_string(ours).expect("ours");
    let needed = "[[rule]]\npath = \"/opt/python/needed\"\naccess = \"read\"\nwhy = \"for this test\"\n";
    fs::write(policies.path().join("landlock.toml"), format!("{needed}\n{rules}")).expect("our own");
    let stand = with_false_zygotes("", |settings| {
        let env = settings.python_env.as_ref().expect("it was made for this launcher");
        fs::create_dir(env.join("needed")).expect("a directory of our own");
        settings.zygotes_off = true;
        // More than are on their way at once, however slow the machine: the number itself stops nothing.
        settings.shells_ready = 16;
        settings.policies_dir = Some(policies.path().to_owned());
    });
    let stand = match stand {
        Ok(stand) => stand,
        Err(reason) => return skip(&reason),
    };
    let mut witness = stand.guest(strict(fresh_space()));
    assert_eq!(witness.say("print(1)"), "1");
    // The witness and its init, and what waits.
    proc::until("shells are ready", GONE_MAX, || children(&stand).len() >= 18);
    // What an init must allow its guest is not there any more.
    fs::remove_dir(stand.dir.join("env/needed")).expect("the stand's own");
    let trouble = stand.launch(strict(fresh_space())).err().expect("its shell does not come up");
    assert_eq!(trouble.step, Step::InitRuleset);
    // Those that were on their way before the first was seen to fail.
    assert_given_up(&stand, 10);
    assert_eq!(witness.say("print(2)"), "2");
}

#[test]
fn a_launch_that_runs_out_of_descriptors_at_any_step_leaves_nothing() {
    let stand = own_stand!(|settings| {
        settings.zygotes_off = true;
        settings.shells_ready = 0;
    });
    let space = fresh_space();
    // Keeps the space in use, so that all tries differ in nothing but their limit.
    let mut witness = stand.guest(strict(space));
    // The launcher closes its ends of the pipes after it has answered.
    assert_eq!(witness.say("print(1)"), "1");
    std::thread::sleep(Duration::from_millis(200));
    let (groups_before, open_before) = (groups(&witness, space), descriptors(&stand));
    assert!(!groups_before.is_empty(), "control: a sandbox's group is seen");
    let children_before = children(&stand);
    // A limit at a free number lets it have as many descriptors more as there are free ones below.
    let free = (0..).filter(|number| !open_before.contains(number));
    let mut steps = BTreeSet::new();
    // Further on the children's own copies, which are made above certain numbers, are what fails.
    let launched = free.take(40).chain([64, 96, 128, 256, 512, 1024]).find_map(|limit| {
        limit_descriptors(&stand, limit);
        match stand.launch(strict(space)) {
            Ok(guest) => Some(guest),
            Err(trouble) => {
                steps.insert(format!("{:?}", trouble.step));
                proc::until("the group of a failed launch is gone", GONE_MAX, || {
                    groups(&witness, space) == groups_before
                });
                proc::until("its init is reaped", GONE_MAX, || children(&stand) == children_before);
                proc::until("its descriptors are closed", GONE_MAX, || descriptors(&stand) == open_before);
                None
            }
        }
    });
    limit_descriptors(&stand, 1024);
    // Before its init, and with an init that had to go again.
    for step in [Step::Cgroup, Step::Clone, Step::SpaceMount] {
        assert!(steps.contains(&format!("{step:?}")), "{step:?} never failed: {steps:?}");
    }
    let mut launched = launched.expect("with enough descriptors it comes up");
    assert_eq!(launched.say("print(1)"), "1");
    launched.end();
    assert_eq!(witness.say("print(2)"), "2");
    // A group that was lived in may wait for the space's next sandbox.
    proc::until("everything is as before", GONE_MAX, || children(&stand) == children_before);
}
