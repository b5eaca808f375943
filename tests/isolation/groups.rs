//! Control groups as the kernel keeps them: limits read back, ends for want of memory, what a kill reaches, and
//! subtrees that were handed to us.

use std::fs;
use std::os::unix::fs::{PermissionsExt, chown};
use std::os::unix::process::ExitStatusExt;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::Duration;

use caisson::launcher::cgroup::{CgroupLimits, Cgroups, Leaf};
use caisson::launcher::plan::End;
use serde_json::Value;

use crate::support::service::Service;
use crate::support::stand::{fresh_space, settings, text};
use crate::support::{CAISSON, common_stand, missing, plan, proc, skip, strict};

const LIMITS: CgroupLimits = CgroupLimits { memory_bytes: 64 << 20, pids: 16, cpu_millicores: 500 };
const V2: &str = "/sys/fs/cgroup";
/// An account that is nobody here.
const ACCOUNT: u32 = 12_345;
const END_MAX: Duration = Duration::from_secs(60);

struct Sleeper(Child);

impl Sleeper {
    fn new() -> Sleeper {
        Sleeper(Command::new("sleep").arg("600").spawn().expect("sleep starts"))
    }

    fn pid(&self) -> i32 {
        self.0.id() as i32
    }

    /// Waits for a death that somebody else has seen to.
    fn assert_killed(&mut self) {
        proc::until("it is killed", Duration::from_secs(10), || !proc::lives(self.pid()));
        assert_eq!(self.0.wait().expect("our child").signal(), Some(9));
    }
}

impl Drop for Sleeper {
    fn drop(&mut self) {
        // Ended already in most cases.
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

/// Groups of a test's own, under a name that no daemon has.
fn own_groups(what: &str) -> Option<Cgroups> {
    if missing().is_some() {
        return None;
    }
    let (groups, found) = Cgroups::open(&format!("caisson-isolation-{what}-{}", std::process::id()), true);
    found.complete().then_some(groups)
}

/// Removes a leaf whose last process may still be dying.
fn remove(leaf: &Leaf) {
    proc::until("the leaf is removed", Duration::from_secs(10), || leaf.remove());
}

#[test]
fn the_kernel_has_each_limit_as_it_was_set() {
    let stand = common_stand!();
    let wanted = settings("/nonexistent".as_ref()).cgroup;
    let (memory, pids) = (wanted.memory_bytes.to_string(), wanted.pids.to_string());
    let quota = (wanted.cpu_millicores * 100).to_string();
    let cpu = format!("{quota} 100000");
    for plan in [plan(fresh_space()), strict(fresh_space())] {
        let guest = stand.guest(plan);
        let groups = Service::groups_of(guest.pid());
        let found = |file: &str| {
            let mut texts = groups.iter().map(|group| text(group.join(file)).trim().to_owned());
            texts.rfind(|text| !text.is_empty())
        };
        let (v1, v2) = (found("memory.limit_in_bytes"), found("memory.max"));
        assert_eq!(v1.xor(v2).as_ref(), Some(&memory), "memory is bounded by one version: {groups:?}");
        let swap = found("memory.swap.max").or(found("memory.memsw.limit_in_bytes"));
        assert!(swap.is_none_or(|swap| swap == "0" || swap == memory), "it may swap");
        assert_eq!(found("memory.oom.group").unwrap_or("1".to_owned()), "1");
        assert_eq!(found("pids.max").as_ref(), Some(&pids));
        assert_eq!(
            found("cpu.max").or(found("cpu.cfs_quota_us").map(|it| it + " 100000")),
            Some(cpu.clone())
        );
    }
}

#[test]
fn who_runs_out_of_memory_ends_as_such_and_its_neighbour_does_not() {
    let stand = common_stand!();
    let space = fresh_space();
    let mut neighbour = stand.guest(plan(space));
    assert_eq!(neighbour.say("held = 41; print('up')"), "up");
    let touch = "held = bytearray(700 << 20)";
    // On v1 the kernel ends the child only, and the launcher the rest a moment later.
    let child = format!(
        "import os, time\nif os.fork() == 0:\n    {touch}\n    os._exit(0)\nos.wait()\ntime.sleep(600)"
    );
    for code in [touch.to_owned(), child] {
        let mut guest = stand.guest(plan(space));
        let cell = guest.cell(&code);
        assert!(cell.ended && cell.stdout.is_empty(), "{cell:?}");
        assert_eq!(stand.end_of(guest.sandbox, END_MAX), Some(End::OutOfMemory), "{code}");
    }
    assert_eq!(neighbour.say("print(held + 1)"), "42");
}

#[test]
fn a_kill_of_the_group_reaches_a_process_that_has_only_just_joined_it() {
    let Some(groups) = own_groups("kill") else { return skip("needs root and writable cgroups") };
    let leaf = groups.leaf("space", "sandbox", LIMITS).expect("a group of our own");
    // In no pid namespace of any sandbox: no end of an init would reach it.
    let (mut joined, bystander) = (Sleeper::new(), Sleeper::new());
    leaf.place(joined.pid()).expect("it lives");
    let v2 = leaf.holds(&text(format!("/proc/{}/cgroup", joined.pid())))
        && Service::groups_of(joined.pid()).iter().any(|group| group.join("cgroup.kill").exists());
    leaf.kill();
    if v2 {
        joined.assert_killed();
        assert!(proc::lives(bystander.pid()));
    } else {
        skip("needs cgroup v2 with cgroup.kill");
        proc::kill(joined.pid());
        joined.assert_killed();
    }
    remove(&leaf);
    groups.remove_all();
}

#[test]
fn processor_time_is_counted_for_each_sandbox_of_a_group_by_itself() {
    let Some(mut groups) = own_groups("time") else { return skip("needs root and writable cgroups") };
    let busy = |leaf: &Leaf| {
        let mut child = Command::new("sh").args(["-c", "while :; do :; done"]).spawn().expect("a shell");
        leaf.place(child.id().cast_signed()).expect("it lives");
        proc::until("its time is counted", Duration::from_secs(20), || {
            leaf.cpu_used().expect("a tree counts") > Duration::from_millis(300)
        });
        child.kill().expect("it lives");
        child.wait().expect("our own");
    };
    let mut leaf = groups.leaf("space", "sandbox", LIMITS).expect("a group of our own");
    assert_eq!(leaf.cpu_used(), Some(Duration::ZERO));
    busy(&leaf);
    leaf.join.clear();
    leaf.oom = None;
    assert!(groups.keep("space", 0, leaf).is_none());
    let again = groups.reuse("space", 0, LIMITS).expect("it is as clean as a new one");
    assert!(again.cpu_used().expect("a tree counts") < Duration::from_millis(100));
    busy(&again);
    remove(&again);
    groups.remove_all();
}

#[test]
fn the_next_of_a_name_ends_what_the_last_has_left_in_its_groups() {
    let Some(groups) = own_groups("sweep") else { return skip("needs root and writable cgroups") };
    let mut left = Sleeper::new();
    let leaf = groups.leaf("space", "sandbox", LIMITS).expect("a group of our own");
    leaf.place(left.pid()).expect("it lives");
    let dirs = Service::groups_of(left.pid());
    assert!(!dirs.is_empty(), "control: it is in a group of ours");
    // Reaped beside the sweep, as init would: a zombie keeps its group.
    let reaper = std::thread::spawn(move || left.assert_killed());
    let next = own_groups("sweep").expect("they were there before");
    reaper.join().expect("it was killed");
    assert!(dirs.iter().all(|dir| !dir.exists()), "{dirs:?}");
    next.remove_all();
}

/// A v2 group that a test hands to somebody. Removed with this value.
struct Handed(PathBuf);

impl Handed {
    /// Below the root of a v2 tree, with `controllers` handed down to it.
    fn new(name: &str, controllers: &str) -> Result<Handed, &'static str> {
        const WHY_NOT: &str = "needs root, and a cgroup v2 tree with controllers from its root on";
        let root = Path::new(V2);
        let all = text(root.join("cgroup.controllers"));
        let there = ["memory", "pids", "cpu"].iter().all(|name| all.split_whitespace().any(|it| it == *name));
        if missing().is_some() || !there || root.join("cgroup.type").exists() {
            return Err(WHY_NOT);
        }
        let outer = Handed(root.join(format!("caisson-isolation-{name}-{}", std::process::id())));
        let inner = outer.0.join("handed");
        let made = fs::write(root.join("cgroup.subtree_control"), "+memory +pids +cpu")
            .and_then(|()| fs::create_dir_all(&inner))
            .and_then(|()| fs::write(outer.0.join("cgroup.subtree_control"), controllers));
        made.map(|()| outer).map_err(|_| WHY_NOT)
    }

    fn dir(&self) -> PathBuf {
        self.0.join("handed")
    }

    /// As systemd does it for `Delegate=yes` with `User=`.
    fn give_to(&self, uid: u32) {
        for name in ["", "cgroup.procs", "cgroup.threads", "cgroup.subtree_control"] {
            chown(self.dir().join(name), Some(uid), Some(uid)).expect("root may give");
        }
    }

    /// `caisson doctor` in it beside another process, as root or as the account: its report.
    fn doctor(&self, account: bool) -> (Value, Sleeper) {
        let companion = Sleeper::new();
        let procs = self.dir().join("cgroup.procs");
        fs::write(&procs, companion.pid().to_string()).expect("root may move it");
        let scratch = tempfile::tempdir().expect("a temporary directory");
        fs::set_permissions(scratch.path(), fs::Permissions::from_mode(0o777)).expect("our own");
        let mut command = Command::new("sh");
        command.args(["-c", "echo $$ >\"$0\" && exec \"$@\""]).arg(&procs);
        if account {
            let id = ACCOUNT.to_string();
            command.args(["setpriv", "--reuid", &id, "--regid", &id, "--clear-groups"]);
        }
        let output = command
            .args([CAISSON, "doctor", "--json", "--require-isolation", "process"])
            .env_clear()
            .env("PATH", "/usr/sbin:/usr/bin:/sbin:/bin")
            .env("TMPDIR", scratch.path())
            .env("HOME", scratch.path())
            .current_dir("/")
            .stdin(Stdio::null())
            .output()
            .expect("a shell starts");
        let told = String::from_utf8_lossy(&output.stderr);
        let report = serde_json::from_slice(&output.stdout).unwrap_or_else(|error| panic!("{error}: {told}"));
        (report, companion)
    }
}

impl Drop for Handed {
    fn drop(&mut self) {
        for dir in [self.dir(), self.0.clone()] {
            // A companion that is just dying holds it for a moment.
            for _ in 0..100 {
                match fs::remove_dir(&dir) {
                    Err(error) if error.kind() == std::io::ErrorKind::ResourceBusy => {
                        std::thread::sleep(Duration::from_millis(20));
                    }
                    _ => break,
                }
            }
        }
    }
}

fn layer<'a>(report: &'a Value, name: &str) -> &'a Value {
    let layers = report["posture"]["layers"].as_array().expect("a table");
    layers.iter().find(|row| row["layer"] == name).expect("a known layer")
}

/// Nothing of ours is left, and who was there before is there again.
fn assert_as_before(handed: &Handed, companion: &Sleeper) {
    let below = fs::read_dir(handed.dir()).expect("it is there").flatten();
    let groups: Vec<_> = below.filter(|entry| entry.path().is_dir()).map(|entry| entry.path()).collect();
    assert!(groups.is_empty(), "{groups:?}");
    assert_eq!(text(handed.dir().join("cgroup.procs")).trim(), companion.pid().to_string());
}

#[test]
fn a_subtree_that_was_handed_to_root_is_enough_for_every_layer() {
    let handed = match Handed::new("root", "+memory +pids +cpu") {
        Ok(handed) => handed,
        Err(reason) => return skip(reason),
    };
    let (report, companion) = handed.doctor(false);
    assert_eq!(report["posture"]["posture"], "full", "{report:#}");
    assert_as_before(&handed, &companion);
}

#[test]
fn a_subtree_that_was_handed_to_an_account_bounds_its_sandboxes() {
    let handed = match Handed::new("account", "+memory +pids +cpu") {
        Ok(handed) => handed,
        Err(reason) => return skip(reason),
    };
    // Control: what is not given is not taken.
    let (report, companion) = handed.doctor(true);
    assert_eq!(layer(&report, "cgroup memory")["enforced"], false, "{report:#}");
    assert_as_before(&handed, &companion);
    drop(companion);
    handed.give_to(ACCOUNT);
    let (report, companion) = handed.doctor(true);
    for controller in ["memory", "pids", "cpu"] {
        let row = layer(&report, &format!("cgroup {controller}"));
        assert_eq!((&row["enforced"], &row["detail"]), (&true.into(), &"v2".into()), "{report:#}");
    }
    assert_as_before(&handed, &companion);
}

#[test]
fn a_subtree_with_some_controllers_bounds_what_it_can_and_the_table_names_the_rest() {
    let handed = match Handed::new("part", "+memory +pids") {
        Ok(handed) => handed,
        Err(reason) => return skip(reason),
    };
    let (report, companion) = handed.doctor(false);
    for (controller, enforced) in [("memory", true), ("pids", true), ("cpu", false)] {
        let row = layer(&report, &format!("cgroup {controller}"));
        assert_eq!(row["enforced"], enforced, "{report:#}");
    }
    assert_eq!(layer(&report, "cgroup cpu")["failed"], "cpu is not among this group's controllers");
    assert_ne!(report["posture"]["posture"], "full");
    assert_as_before(&handed, &companion);
}
