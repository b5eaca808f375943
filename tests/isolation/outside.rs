//! A live guest, its init and its zygote as the host's kernel describes them.

use std::collections::{BTreeMap, HashSet};
use std::os::unix::process::CommandExt;
use std::process::Command;

use caisson::launcher::plan::Profile;

use crate::support::stand::{fresh_space, text};
use crate::support::{Stand, common_stand, plan, proc, skip, strict};

const CAPABILITY_SETS: [&str; 5] = ["CapInh", "CapPrm", "CapEff", "CapBnd", "CapAmb"];
const NAMESPACES: [&str; 7] = ["user", "mnt", "net", "ipc", "uts", "cgroup", "pid"];

/// Everything that makes a process nobody: one uid and gid, no groups, no capability, no_new_privs, filters.
fn assert_nobody(status: &BTreeMap<String, String>, uid: u32) {
    let name = &status["Name"];
    for field in ["Uid", "Gid"] {
        assert!(
            status[field].split_whitespace().all(|id| id == uid.to_string()),
            "{name}: {field} {}",
            status[field]
        );
    }
    assert_eq!(status["Groups"], "", "{name}");
    for set in CAPABILITY_SETS {
        assert!(status[set].bytes().all(|digit| digit == b'0'), "{name}: {set} {}", status[set]);
    }
    assert_eq!(status["NoNewPrivs"], "1", "{name}");
    assert_eq!(status["Seccomp"], "2", "{name}");
}

#[test]
fn guest_init_and_zygote_are_three_nobodies() {
    let stand = common_stand!();
    let guest = stand.guest(plan(fresh_space()));
    let (pid, init, zygote) = (guest.pid(), guest.init(), stand.zygote(Profile::Python).expect("it serves"));
    let uids = [pid, init, zygote].map(|pid| proc::uid(pid).expect("it lives"));
    assert_eq!(uids.iter().collect::<HashSet<_>>().len(), 3, "{uids:?}");
    assert_eq!(uids[0], guest.attestation.host_uid);
    for (pid, uid) in [pid, init, zygote].into_iter().zip(uids) {
        assert!(uid >= 0x7000_0000, "{uid} may be somebody's");
        assert_nobody(&proc::status(pid), uid);
    }
    let filters = |pid| proc::status(pid)["Seccomp_filters"].parse::<u8>().expect("a number");
    assert_eq!(filters(pid), guest.attestation.seccomp_filters);
    assert!(filters(pid) > filters(zygote), "the second layer is missing");
    assert_eq!(filters(init), 1);
    // Control: the launcher has what they lack, or has put it aside for a moment to write an id map.
    let root = proc::status(stand.launcher);
    assert!(root["CapPrm"] != "0000000000000000" && root["NoNewPrivs"] == "0", "{root:?}");
    let saved_uid = root["Uid"].split_whitespace().nth(2);
    assert_eq!(saved_uid, Some("0"));
}

#[test]
fn a_guest_shares_seven_namespaces_with_its_init_and_none_with_host_zygote_or_neighbour() {
    let stand = common_stand!();
    let space = fresh_space();
    let (one, two) = (stand.guest(plan(space)), stand.guest(strict(space)));
    let (one, one_init, two) = (one.pid(), one.init(), two.pid());
    let zygote = stand.zygote(Profile::Python).expect("it serves");
    for name in NAMESPACES {
        let of = |pid| proc::namespace(pid, name).expect("a process has namespaces");
        assert_eq!(of(one), of(one_init), "{name}");
        for other in [std::process::id() as i32, stand.launcher, two] {
            assert_ne!(of(one), of(other), "{name}");
        }
        // The zygote lives in the launcher's user and pid namespace: that is what lets it fork for us.
        assert_ne!(of(one), of(zygote), "{name}");
        let shared = ["user", "pid"].contains(&name);
        assert_eq!(of(zygote) == of(stand.launcher), shared, "{name} of the zygote");
    }
}

#[test]
fn a_guests_leaf_and_limits_are_there_before_it_runs() {
    let stand = common_stand!();
    let guest = stand.guest(plan(fresh_space()));
    let pid = guest.pid();
    let groups = text(format!("/proc/{pid}/cgroup"));
    let leaf = format!("/sandbox-{:x}", guest.sandbox.0);
    for controller in ["memory", "pids", "cpu"] {
        let inside = groups.lines().any(|line| {
            let unified = line.starts_with("0::") && line.len() > 4;
            (line.contains(controller) || unified) && line.ends_with(&leaf)
        });
        assert!(inside, "{controller}: {groups}");
    }
    assert_eq!(text(format!("/proc/{}/cgroup", guest.init())), groups, "init is in the same leaf");
    let limits = text(format!("/proc/{pid}/limits"));
    let limit = |name: &str| {
        let line = limits.lines().find(|line| line.starts_with(name)).expect("a known limit");
        let numbers: Vec<&str> = line[26..].split_whitespace().collect();
        assert_eq!(numbers[0], numbers[1], "{name}: soft and hard differ");
        numbers[0].to_owned()
    };
    for (name, wanted) in [
        ("Max core file size", "1"),
        ("Max open files", "1024"),
        ("Max processes", "128"),
        ("Max locked memory", "65536"),
        ("Max pending signals", "512"),
        ("Max msgqueue size", "65536"),
        ("Max nice priority", "0"),
        ("Max realtime priority", "0"),
    ] {
        assert_eq!(limit(name), wanted, "{name}");
    }
    assert_eq!(limit("Max address space"), "unlimited", "Node and Go reserve more than they use");
}

#[test]
fn an_inits_memory_is_closed_even_to_its_own_uid() {
    let stand = common_stand!();
    let mut guest = stand.guest(plan(fresh_space()));
    let init = guest.init();
    // From inside, and from outside under the guest's uid and under init's own.
    let inside = "import errno\n\
                  for name in ('mem', 'environ', 'maps', 'exe', 'root'):\n\
                  \x20   try: open('/proc/1/' + name, 'rb').read(1); print(name)\n\
                  \x20   except OSError as error: assert error.errno in (errno.EACCES, errno.EPERM, errno.ENOENT), error";
    assert_eq!(guest.say(inside), "");
    // Control: its own it may read.
    assert_eq!(guest.say("print(len(open('/proc/self/maps').read(1)))"), "1");
    let read = |uid: u32, pid: i32| {
        let status = Command::new("head")
            .args(["-c", "0", &format!("/proc/{pid}/mem")])
            .current_dir("/")
            .uid(uid)
            .gid(uid)
            .stderr(std::process::Stdio::null())
            .status();
        status.expect("head starts").success()
    };
    let init_uid = proc::uid(init).expect("it lives");
    assert!(!read(guest.attestation.host_uid, init));
    assert!(!read(init_uid, init), "init is dumpable");
    assert!(!read(guest.attestation.host_uid, stand.launcher));
    // Control: root may, and an ordinary process of that uid is open to it.
    assert!(read(0, init));
    let mut sleeper =
        Command::new("sleep").arg("30").uid(init_uid).gid(init_uid).spawn().expect("sleep starts");
    let open = read(init_uid, sleeper.id() as i32);
    let _ = sleeper.kill();
    let _ = sleeper.wait();
    assert!(open, "control: the probe works");
}

#[test]
fn no_mount_of_a_guest_has_peers_even_below_a_shared_root() {
    let stand = match Stand::start_below_shared_root() {
        Ok(stand) => stand,
        Err(reason) => return skip(&reason),
    };
    // Control: the launcher was started where everything is shared.
    let unshare = proc::parent(stand.launcher).expect("it waits for the launcher");
    let starter = proc::parent(unshare).expect("a shell waits for that");
    assert!(text(format!("/proc/{starter}/mountinfo")).contains("shared:"), "the root was not shared");
    for plan in [plan(fresh_space()), strict(fresh_space())] {
        let mut guest = stand.guest(plan);
        let mounts = text(format!("/proc/{}/mountinfo", guest.pid()));
        assert!(mounts.lines().count() > 5, "{mounts}");
        for line in mounts.lines() {
            let (optional, _) = line.split_once(" - ").expect("the format of mountinfo");
            assert!(!optional.contains("shared:") && !optional.contains("master:"), "{line}");
        }
        // And none can be written, or give a uid, that should not.
        for line in mounts.lines() {
            let fields: Vec<&str> = line.split(' ').collect();
            let (point, options) = (fields[4], fields[5]);
            let writable = ["/mnt/data", "/tmp", "/home/sandbox", "/dev/shm", "/dev/pts", "/proc"];
            let device = point.starts_with("/dev/");
            assert!(options.contains("nosuid"), "{line}");
            assert!(device || options.contains("nodev"), "{line}");
            assert!(options.starts_with("ro") || writable.contains(&point) || device, "{line}");
        }
        assert_eq!(guest.say("print(1)"), "1");
    }
    assert!(
        !text(format!("/proc/{}/mountinfo", stand.launcher)).contains("shared:"),
        "the launcher's tree has peers"
    );
}
