//! Hosts that offer less: each lower posture really serves, and what it promises is asked from inside, next to a
//! control. The launcher runs under a filter that refuses what such a host has not.

use std::collections::HashSet;
use std::fs;
use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::time::Duration;

use caisson::launcher::leases::Leases;
use caisson::launcher::plan::{Account, LaunchPlan, Profile};
use caisson::launcher::posture::Posture;

use crate::support::guest::STUBBORN;
use crate::support::service::{Service, Who};
use crate::support::stand::{Lack, ORDINARY, fresh_dir, fresh_space, text};
use crate::support::{CAISSON, Guest, Stand, common_stand, missing, plan, proc, skip, strict};
use crate::zygote_seat::tries;

/// How long the kernel may take to end a tree on a busy machine.
const GONE_MAX: Duration = Duration::from_secs(20);
const NAMESPACES: [&str; 6] = ["mnt", "net", "ipc", "uts", "cgroup", "pid"];

/// A stand on a host that lacks something: `lacking!(Lack::Landlock)`.
macro_rules! lacking {
    ($lack:expr) => {
        match Stand::start_lacking($lack, |_| {}) {
            Ok(stand) if stand.hello.python.is_some() => stand,
            Ok(stand) => {
                return skip(&format!("guests cannot reach the interpreter: {:?}", stand.hello.warnings))
            }
            Err(reason) => return skip(&reason),
        }
    };
}

/// Tries each of some calls and gives their errnos by name, `None` for done.
const TRY: &str = r#"
import ctypes, errno, json, os, socket
libc = ctypes.CDLL(None, use_errno=True)
def attempt(action):
    try:
        action()
    except OSError as error:
        return errno.errorcode[error.errno]
def call(*arguments):
    if libc.syscall(*arguments) < 0:
        raise OSError(ctypes.get_errno(), "refused")
def answers(**actions):
    print(json.dumps({name: attempt(action) for name, action in actions.items()}))
"#;

/// The guest's pid as it sees it: on the host, where it has no pid namespace.
fn own_pid(guest: &mut Guest) -> i32 {
    guest.say("import os; print(os.getpid())").parse().expect("a number")
}

/// The guest's pid on the host, when another sandbox has the same uid: the inode of its pid namespace tells.
fn pid_inside(guest: &mut Guest, uid: u32) -> i32 {
    let namespace: u64 =
        guest.say("import os; print(os.stat('/proc/self/ns/pid').st_ino)").parse().expect("a number");
    let same = |pid: &i32| {
        proc::uid(*pid) == Some(uid)
            && proc::namespace(*pid, "pid") == Some(namespace)
            && proc::pids_in_namespaces(*pid).last() == Some(&2)
    };
    proc::all().into_iter().find(same).expect("a live guest is a process")
}

fn assert_nobody(pid: i32, uid: u32) {
    let status = proc::status(pid);
    for field in ["Uid", "Gid"] {
        assert!(
            status[field].split_whitespace().all(|id| id == uid.to_string()),
            "{field} {}",
            status[field]
        );
    }
    for set in ["CapInh", "CapPrm", "CapEff", "CapAmb"] {
        assert!(status[set].bytes().all(|digit| digit == b'0'), "{set} {}", status[set]);
    }
    assert_eq!((status["NoNewPrivs"].as_str(), status["Seccomp"].as_str()), ("1", "2"));
}

#[test]
fn without_user_namespaces_a_guest_has_the_six_others_and_its_spaces_own_ids() {
    let stand = lacking!(Lack::UserNamespaces);
    assert_eq!(stand.hello.posture.posture, Posture::Root);
    let (space, other_space) = (fresh_space(), fresh_space());
    // A plan that may be forked is exec'd here: nobody but root could enter the shell.
    let (mut one, mut two, other) =
        (stand.guest(plan(space)), stand.guest(strict(space)), stand.guest(strict(other_space)));
    let nobody = stand.guest(LaunchPlan { account: Account(1), ..plan(space) });
    let uids = [&one, &two, &other, &nobody].map(|guest| guest.attestation.host_uid);
    assert!(uids.iter().all(|uid| *uid >= 0x7000_0000), "{uids:?}");
    assert_eq!(uids[0], uids[1], "sandboxes of one space");
    assert_eq!(uids.iter().collect::<HashSet<_>>().len(), 3, "another space, another account: {uids:?}");
    let pid = pid_inside(&mut one, uids[0]);
    let init = proc::all().into_iter().find(|init| {
        proc::namespace(*init, "pid") == proc::namespace(pid, "pid")
            && proc::pids_in_namespaces(*init).last() == Some(&1)
    });
    let (init, two) = (init.expect("a live guest has an init"), pid_inside(&mut two, uids[1]));
    assert_nobody(pid, uids[0]);
    assert_nobody(init, uids[0] - 1);
    assert_eq!(proc::status(pid)["CapBnd"], "0000000000000000");
    assert_eq!(proc::status(pid)["Groups"], "");
    for name in NAMESPACES {
        assert_eq!(proc::namespace(pid, name), proc::namespace(init, name), "{name}");
        for stranger in [stand.launcher, two] {
            assert_ne!(proc::namespace(pid, name), proc::namespace(stranger, name), "{name}");
        }
    }
    // Control: the one that is missing.
    assert_eq!(proc::namespace(pid, "user"), proc::namespace(stand.launcher, "user"));
    one.say(TRY);
    let refused = one.ask(
        "answers(init=lambda: os.kill(1, 9), mount=lambda: call(165, b'x', b'/tmp', b'tmpfs', 0, 0),\n\
         unshare=lambda: call(272, 0x20000), chown=lambda: os.chown('/home/sandbox', 0, 0), root=lambda: os.setuid(0),\n\
         passwd=lambda: open('/etc/passwd', 'w'), own=lambda: open('/home/sandbox/own', 'w').close())",
    );
    for name in ["init", "mount", "unshare", "chown", "root", "passwd"] {
        let errno = refused[name].as_str();
        assert!(matches!(errno, Some("EPERM" | "EACCES" | "EROFS")), "{name}: {refused}");
    }
    assert_eq!(refused["own"], serde_json::Value::Null, "its own files it may write");
}

#[test]
fn a_space_keeps_its_files_when_the_posture_of_the_host_changes() {
    let state = fresh_dir();
    let space = fresh_space();
    let full = || {
        Stand::start(|settings| {
            settings.state_dir = state.clone();
            settings.zygotes_off = true;
        })
    };
    let finished = (|| -> Result<(), String> {
        let append = "import os\nwith open('/mnt/data/log', 'a') as log: log.write(str(os.stat('/mnt/data/log').st_uid) + ' ')\n\
                      print(open('/mnt/data/log').read().split()[-1])";
        let stand = full()?;
        let mut guest = stand.guest(strict(space));
        guest.say(
            "import os; os.makedirs('/home/sandbox/a/b'); os.symlink('/etc/shadow', '/home/sandbox/a/link')",
        );
        assert_eq!(guest.say(append), "1000");
        let mut nobody = stand.guest(LaunchPlan { account: Account(1), ..strict(space) });
        nobody.say("open('/tmp/theirs', 'w').close()");
        stand.finish();
        let stand =
            Stand::start_lacking(Lack::UserNamespaces, |settings| settings.state_dir = state.clone())?;
        let mut guest = stand.guest(strict(space));
        let uid = guest.attestation.host_uid;
        assert_eq!(guest.say(append), uid.to_string());
        assert_eq!(guest.say("import os; print(os.stat('/tmp/theirs').st_uid)"), (uid + 1).to_string());
        assert_eq!(guest.say("print(os.lstat('/home/sandbox/a/link').st_uid)"), uid.to_string());
        stand.finish();
        let stand = full()?;
        let mut guest = stand.guest(strict(space));
        assert_eq!(guest.say(append), "1000");
        assert_eq!(
            guest.say(
                "import os; print(os.stat('/tmp/theirs').st_uid, len(open('/mnt/data/log').read().split()))"
            ),
            "65534 3"
        );
        stand.finish();
        Ok(())
    })();
    let _ = fs::remove_dir_all(&state);
    if let Err(reason) = finished {
        skip(&reason);
    }
    // Control: what the link led to was never touched.
    assert_eq!(
        std::os::unix::fs::MetadataExt::uid(&fs::metadata("/etc/shadow").expect("every host has it")),
        0
    );
}

#[test]
fn without_landlock_everything_else_holds_and_the_posture_says_so() {
    let stand = lacking!(Lack::Landlock);
    assert_eq!(stand.hello.posture.posture, Posture::Root);
    let layer =
        |name: &str| stand.hello.posture.layers.iter().find(|layer| layer.layer == name).expect("a row");
    assert!(!layer("landlock").enforced && layer("landlock").failed.is_some());
    assert!(layer("user namespace").enforced && layer("space").enforced);
    let mut guest = stand.guest(plan(fresh_space()));
    assert!(guest.is_fork(), "warm forks need no Landlock");
    assert_eq!(guest.attestation.namespaces, 7);
    guest.say(TRY);
    let refused = guest.ask("answers(passwd=lambda: open('/etc/passwd', 'w'), usr=lambda: open('/usr/x', 'w'), own=lambda: open('/tmp/own', 'w').close())");
    assert_eq!(refused, serde_json::json!({"passwd": "EROFS", "usr": "EROFS", "own": null}));
}

#[test]
fn without_namespaces_root_keeps_each_space_to_itself() {
    let stand = lacking!(Lack::Namespaces);
    assert_eq!(stand.hello.posture.posture, Posture::Uid);
    let (mine, theirs) = (fresh_space(), fresh_space());
    let (mut guest, mut other) = (stand.guest(plan(mine)), stand.guest(plan(theirs)));
    assert_ne!(guest.attestation.host_uid, other.attestation.host_uid);
    let (pid, other_pid) = (own_pid(&mut guest), own_pid(&mut other));
    assert_nobody(pid, guest.attestation.host_uid);
    assert_eq!(proc::status(pid)["CapBnd"], "0000000000000000");
    assert_eq!(proc::status(pid)["Groups"], "");
    let secret = other.say("import os; path = os.path.join(os.environ['HOME'], 'secret'); open(path, 'w').write('42'); print(path)");
    guest.say(TRY);
    let refused = guest.ask(&format!(
        "answers(file=lambda: open({secret:?}), dir=lambda: os.listdir(os.path.dirname({secret:?})), passwd=lambda: open('/etc/passwd'),\n\
         process=lambda: os.kill({other_pid}, 0), launcher=lambda: os.kill({launcher}, 0), memory=lambda: open('/proc/{launcher}/mem', 'rb'),\n\
         status=lambda: open('/proc/{other_pid}/status'), tmp=lambda: open('/tmp/x', 'w'), shm=lambda: open('/dev/shm/x', 'w'),\n\
         tcp=lambda: socket.socket(socket.AF_INET), udp=lambda: socket.socket(socket.AF_INET, socket.SOCK_DGRAM), unix=lambda: socket.socket(socket.AF_UNIX),\n\
         sysv=lambda: call(29, 1234, 4096, 0o1600), root=lambda: os.setuid(0), group=lambda: os.setgroups([0]), above=lambda: os.listdir('../..'),\n\
         stat=lambda: os.stat({secret:?}), mode=lambda: os.chmod({secret:?}, 0o777), time=lambda: os.utime({secret:?}), attribute=lambda: os.setxattr({secret:?}, 'user.x', b'1'),\n\
         enter=lambda: os.chdir(os.path.dirname({secret:?})), watch=lambda: call(254, call(294, 0) or 0, b'/usr', 1), nice=lambda: os.setpriority(os.PRIO_PROCESS, {other_pid}, 19), pin=lambda: os.sched_setaffinity({other_pid}, [0]))",
        launcher = stand.launcher,
    ));
    for (name, errno) in refused.as_object().expect("an object") {
        assert!(matches!(errno.as_str(), Some("EPERM" | "EACCES")), "{name}: {refused}");
    }
    // Controls: its own are there, and the other finds what is its own.
    let own = guest.ask(
        "import subprocess, sys, tempfile\n\
         answers(home=lambda: open('own', 'w').close(), tmp=lambda: tempfile.NamedTemporaryFile(), pair=lambda: socket.socketpair(),\n\
         self=lambda: os.kill(os.getpid(), 0), child=lambda: subprocess.run([sys.executable, '-c', '1'], check=True), null=lambda: open('/dev/null', 'w'))",
    );
    assert!(own.as_object().is_some_and(|own| own.values().all(serde_json::Value::is_null)), "{own}");
    assert_eq!(other.say("print(open(path).read())"), "42");
    // Node as well.
    if stand.hello.node.is_some() {
        let node = stand.guest(LaunchPlan { profile: Profile::Node, ..plan(mine) });
        assert_eq!(node.attestation.host_uid, guest.attestation.host_uid);
    }
}

fn of_uid(uid: u32) -> Vec<Who> {
    let same = |pid: &i32| proc::uid(*pid) == Some(uid) && proc::lives(*pid);
    proc::all().into_iter().filter(same).filter_map(Who::of).collect()
}

#[test]
fn without_a_pid_namespace_what_hides_still_ends_with_its_sandbox() {
    let stand = lacking!(Lack::Namespaces);
    for init_dies in [false, true] {
        let space = fresh_space();
        let mut guest = stand.guest(plan(space));
        let uid = guest.attestation.host_uid;
        assert_eq!(guest.say(STUBBORN), "up");
        proc::until("guest and strays are there", GONE_MAX, || of_uid(uid).len() == 4);
        if init_dies {
            // It is the ancestor of all of them, and has the id before the guest's.
            let inits = of_uid(uid - 1);
            assert_eq!(inits.len(), 1);
            proc::kill(inits[0].0);
        } else {
            guest.end();
        }
        proc::until("nothing of it is left", GONE_MAX, || {
            of_uid(uid).is_empty() && of_uid(uid - 1).is_empty()
        });
    }
    // A neighbour in the same space, under the same id, goes on.
    let space = fresh_space();
    let (mut one, mut two) = (stand.guest(plan(space)), stand.guest(plan(space)));
    assert_eq!((one.say(STUBBORN), two.say(STUBBORN)), ("up".to_owned(), "up".to_owned()));
    let uid = one.attestation.host_uid;
    proc::until("both are there", GONE_MAX, || of_uid(uid).len() == 8);
    one.end();
    proc::until("one is left", GONE_MAX, || of_uid(uid).len() == 4);
    assert_eq!(two.say("print(6 * 7)"), "42");
}

#[test]
fn without_namespaces_no_space_ever_gets_the_ids_of_anothers_folder() {
    let state = fresh_dir();
    fs::set_permissions(&state, std::os::unix::fs::PermissionsExt::from_mode(0o755)).expect("our own");
    let outcome = (|| -> Result<(), String> {
        let mut owners = HashSet::new();
        for _ in 0..3 {
            let stand = Stand::start_lacking(Lack::Namespaces, |settings| {
                settings.state_dir = state.join("launcher")
            })?;
            let mut guest = stand.guest(plan(fresh_space()));
            guest.say("print(1)");
            assert!(owners.insert(guest.attestation.host_uid), "an id of a closed space was given out again");
            stand.finish();
        }
        Ok(())
    })();
    let _ = fs::remove_dir_all(&state);
    if let Err(reason) = outcome {
        skip(&reason);
    }
}

/// A process that is never there for long: each has a child and ends. Each leaves its number in a file, so that
/// whoever looks more slowly than they live sees them as well.
const CHAIN: &str = r#"
import os, time
path = os.path.join(os.environ["HOME"], "link")
link = os.open(path, os.O_WRONLY | os.O_CREAT)
if os.fork() == 0:
    os.setsid()
    while True:
        if os.fork():
            os._exit(0)
        os.pwrite(link, b"%10d" % os.getpid(), 0)
        time.sleep(0.0005)
print(path)
"#;

#[test]
fn without_a_pid_namespace_a_killed_launcher_still_takes_its_guests_with_it() {
    let dir = fresh_dir();
    fs::set_permissions(&dir, std::os::unix::fs::PermissionsExt::from_mode(0o755)).expect("our own");
    let outcome = (|| -> Result<(), String> {
        let service = Service::start_lacking(&dir, Lack::Namespaces)?;
        let kept = "import os; path = os.path.join(os.environ['HOME'], 'kept'); open(path, 'w').write('still here'); print(os.getuid())";
        let uid: u32 = service.run_soon("one", kept).parse().expect("a number");
        assert_eq!(service.run_soon("one", STUBBORN), "up");
        let path = service.run_soon("chain", CHAIN);
        proc::until("guests and strays are there", GONE_MAX, || of_uid(uid).len() >= 6);
        let before = of_uid(uid);
        // A slot that is made meanwhile runs no cell and is no chain.
        let links = || {
            of_uid(uid)
                .into_iter()
                .filter(|who| proc::session_of(who.0) != Some(who.0) && !before.contains(who))
        };
        // A number does not come back within such a time.
        let moves_on = || {
            let link = text(&path);
            (0..20).any(|_| {
                std::thread::sleep(Duration::from_millis(20));
                text(&path) != link
            })
        };
        assert!(Path::new(&path).exists() && moves_on(), "control: the chain moves on");
        proc::kill(service.stage("launcher").expect("it lives").0);
        proc::until("none of them is left", GONE_MAX, || before.iter().all(|who| !who.lives()));
        proc::until("the chain has ended", GONE_MAX, || !moves_on() && (0..20).all(|_| links().count() == 0));
        let read = "import os; print(open(os.path.join(os.environ['HOME'], 'kept')).read())";
        assert_eq!(service.run_soon("two", read), "still here");
        Ok(())
    })();
    let _ = fs::remove_dir_all(&dir);
    if let Err(reason) = outcome {
        skip(&reason);
    }
}

/// A process with an id, and of the other marks of a guest all or none.
struct Planted(Child);

impl Planted {
    fn new(id: u32, marked: bool) -> Planted {
        let probe = concat!(env!("CARGO_MANIFEST_DIR"), "/tests/probe/without.py");
        // A filter that refuses something, and with it no_new_privs.
        let marks = ["/usr/bin/python3", probe, "--landlock", "--", "setpriv", "--bounding-set=-all"];
        let id = id.to_string();
        let words = if marked { marks.as_slice() } else { &["setpriv"] };
        let child = Command::new(words[0])
            .args(&words[1..])
            .args(["--reuid", &id, "--regid", &id, "--clear-groups", "sleep", "600"])
            .stdin(Stdio::null())
            .spawn()
            .expect("it starts");
        let planted = Planted(child);
        proc::until("it has become what it is to be", GONE_MAX, || {
            proc::status(planted.pid()).get("Name").is_some_and(|name| name == "sleep")
        });
        let status = proc::status(planted.pid());
        let marks = [&status["CapBnd"], &status["NoNewPrivs"], &status["Seccomp"]];
        assert_eq!(marks == ["0000000000000000", "1", "2"], marked, "control: {marks:?}");
        planted
    }

    fn pid(&self) -> i32 {
        self.0.id() as i32
    }
}

impl Drop for Planted {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

#[test]
fn what_a_killed_supervisor_left_ends_at_the_next_start_and_nobody_else_does() {
    let dir = fresh_dir();
    fs::set_permissions(&dir, std::os::unix::fs::PermissionsExt::from_mode(0o755)).expect("our own");
    let outcome = (|| -> Result<(), String> {
        let mut service = Service::start_lacking(&dir, Lack::Namespaces)?;
        let uid: u32 = service.run_soon("one", "import os; print(os.getuid())").parse().expect("a number");
        assert_eq!(service.run_soon("one", STUBBORN), "up");
        proc::until("strays are there", GONE_MAX, || of_uid(uid).len() >= 4);
        let strays = of_uid(uid);
        // Two ranges, of launchers that live and hold them: ours.
        let (dead, living) = (Leases::take().expect("a range"), Leases::take().expect("a range"));
        let of_dead = Planted::new(first_id(&dead) + 17, true);
        let others = [
            ("a guest of a launcher that lives", first_id(&living) + 17, true),
            ("one with such an id and no marks", first_id(&dead) + 17, false),
            ("one with the marks and an id of its own", ORDINARY + 1, true),
            ("one of root's with the marks", 0, true),
        ]
        .map(|(what, id, marked)| (what, Planted::new(id, marked)));
        drop(dead);
        service.kill_supervisor();
        let second = Service::start_lacking(&dir, Lack::Namespaces)?;
        proc::until("what was left has ended", GONE_MAX, || {
            strays.iter().all(|who| !who.lives()) && !proc::lives(of_dead.pid())
        });
        for (what, planted) in &others {
            assert!(proc::lives(planted.pid()), "ended: {what}");
            assert!(!proc::status(planted.pid())["State"].starts_with('T'), "stopped: {what}");
        }
        assert_eq!(second.run_soon("two", "print(6 * 7)"), "42");
        drop(living);
        Ok(())
    })();
    let _ = fs::remove_dir_all(&dir);
    if let Err(reason) = outcome {
        skip(&reason);
    }
}

/// The first id of a range that this process holds.
fn first_id(leases: &Leases) -> u32 {
    let range: usize = leases.name().strip_prefix("caisson-").expect("a range").parse().expect("its number");
    let lock = text(format!("{}/ids-{range}.lock", caisson::launcher::leases::LOCK_DIR));
    lock.split(' ').next().and_then(|first| first.parse().ok()).expect("whose it is says so")
}

/// Reads of its own entries, which the kernel lets nobody read of a process that is not dumpable.
const OWN_ENTRIES: &str = "answers(environ=lambda: open('/proc/self/environ', 'rb').read(1), maps=lambda: open('/proc/self/maps').readline(),\n\
                           mem=lambda: open('/proc/self/mem', 'rb').close(), fd=lambda: os.listdir('/proc/self/fd'))";

#[test]
fn a_guest_reads_its_own_entries_in_proc_and_nobody_under_another_id_does() {
    let stand = common_stand!();
    let space = fresh_space();
    let readable = serde_json::json!({"environ": null, "maps": null, "mem": null, "fd": null});
    for plan in [plan(space), strict(space), LaunchPlan { account: Account(1), ..plan(space) }] {
        let mut guest = stand.guest(plan);
        guest.say(TRY);
        assert_eq!(guest.ask(OWN_ENTRIES), readable, "{plan:?}");
    }
    // Where the pid namespace is missing they can name each other, and no Landlock binds who asks here.
    let stand = lacking!(Lack::Namespaces);
    let (mut one, mut other) = (stand.guest(plan(space)), stand.guest(plan(fresh_space())));
    let (uid, other_uid) = (one.attestation.host_uid, other.attestation.host_uid);
    assert_ne!(uid, other_uid);
    let (pid, other_pid) = (own_pid(&mut one), own_pid(&mut other));
    let init = proc::parent(pid).expect("a guest has an init");
    let init_uid = proc::uid(init).expect("it lives");
    for (reader, target) in [(other_uid, pid), (uid, other_pid), (init_uid, pid), (uid, init)] {
        for (what, answer) in &tries(reader, &[("target", target)])["target"] {
            assert!(matches!(answer.as_str(), "EPERM" | "EACCES"), "{reader} on {target}: {what}: {answer}");
        }
    }
    // Control: under its own id a guest can be read. Its init cannot: it is not dumpable.
    let own = tries(uid, &[("guest", pid)]);
    for what in ["environ", "maps", "mem", "fd"] {
        assert_eq!(own["guest"][what], "done", "{what}");
    }
    let of_init = tries(init_uid, &[("init", init)]);
    for what in ["environ", "maps", "mem", "fd"] {
        assert!(matches!(of_init["init"][what].as_str(), "EPERM" | "EACCES"), "{what}: {of_init:?}");
    }
}

#[test]
fn with_neither_root_nor_namespaces_a_guest_reaches_nothing_else_of_its_account() {
    let stand = lacking!(Lack::NamespacesAndRoot);
    assert_eq!(stand.hello.posture.posture, Posture::Process);
    let (mut guest, mut other) = (stand.guest(plan(fresh_space())), stand.guest(plan(fresh_space())));
    let (pid, other_pid) = (own_pid(&mut guest), own_pid(&mut other));
    assert_nobody(pid, ORDINARY);
    // Files and processes of the same account that are not the guest's.
    let file = stand.dir.join("launcher/of-the-account");
    fs::write(&file, "42").expect("a directory of our own");
    std::os::unix::fs::chown(&file, Some(ORDINARY), None).expect("we are root");
    let secret = other.say("import os; open('secret', 'w').write('42'); print(os.path.abspath('secret'))");
    guest.say(TRY);
    let refused = guest.ask(&format!(
        "answers(file=lambda: open({file:?}), theirs=lambda: open({secret:?}), signal=lambda: os.kill({launcher}, 0), neighbour=lambda: os.kill({other_pid}, 9),\n\
         memory=lambda: open('/proc/{launcher}/mem', 'rb'), environ=lambda: open('/proc/{other_pid}/environ', 'rb'), trace=lambda: call(101, 16, {other_pid}, 0, 0),\n\
         read=lambda: call(310, {other_pid}, 0, 0, 0, 0, 0), tcp=lambda: socket.socket(socket.AF_INET), unix=lambda: socket.socket(socket.AF_UNIX),\n\
         mode=lambda: os.chmod({file:?}, 0o777), owner=lambda: os.chown({file:?}, -1, -1), time=lambda: os.utime({file:?}), attribute=lambda: os.setxattr({file:?}, 'user.x', b'1'),\n\
         nice=lambda: os.setpriority(os.PRIO_PROCESS, {launcher}, 19), pin=lambda: os.sched_setaffinity({launcher}, [0]))",
        launcher = stand.launcher,
    ));
    for (name, errno) in refused.as_object().expect("an object") {
        assert!(matches!(errno.as_str(), Some("EPERM" | "EACCES")), "{name}: {refused}");
    }
    let own = guest.ask(
        "own = open('own', 'w')\n\
         answers(mode=lambda: os.fchmod(own.fileno(), 0o600), nice=lambda: os.setpriority(os.PRIO_PROCESS, 0, 5), pin=lambda: os.sched_setaffinity(0, os.sched_getaffinity(0)))",
    );
    assert_eq!(own, serde_json::json!({"mode": null, "nice": null, "pin": null}), "its own it may change");
    // Controls: the account itself may read it, and the neighbour is alive.
    assert!(text(&file) == "42" && proc::lives(other_pid));
    assert_eq!(other.say("print(open('secret').read())"), "42");
    assert_eq!(guest.say(STUBBORN), "up");
    // Strays have their guest's words; both guests, and three strays.
    let interpreters = || {
        let running = |pid: &Who| proc::arguments(pid.0).iter().any(|word| word.ends_with("/harness.py"));
        of_uid(ORDINARY).into_iter().filter(running).count()
    };
    proc::until("the strays are there", GONE_MAX, || interpreters() == 5);
    guest.end();
    proc::until("guest and strays are gone", GONE_MAX, || interpreters() == 1);
    assert_eq!(other.say("print(6 * 7)"), "42");
}

#[test]
fn posture_process_refuses_a_second_tenant() {
    let started = std::panic::catch_unwind(|| {
        Stand::start_lacking(Lack::NamespacesAndRoot, |settings| settings.tenants = 2)
    });
    match started {
        Err(panic) => {
            let log = panic.downcast_ref::<String>().cloned().unwrap_or_default();
            assert!(
                log.contains("posture process is for one tenant only") && log.contains("2 tenants"),
                "{log}"
            );
        }
        Ok(Err(reason)) => skip(&reason),
        Ok(Ok(_)) => panic!("two tenants share one account"),
    }
}

#[test]
fn a_launcher_below_its_floor_serves_nobody() {
    for lack in [Lack::UserNamespaces, Lack::Landlock, Lack::Namespaces] {
        let started = Stand::start_lacking(lack, |settings| settings.posture_floor = Posture::Full);
        // It says what is missing, as for an operator.
        let reason = started.err().unwrap_or_else(|| panic!("{lack:?} was served at posture full"));
        assert!(reason.contains("MISSING") || reason.contains("needs"), "{reason}");
    }
}

#[test]
fn doctor_shows_the_table_even_where_nothing_can_be_promised() {
    if let Some(reason) = missing() {
        return skip(reason);
    }
    let probe = concat!(env!("CARGO_MANIFEST_DIR"), "/tests/probe/without.py");
    let doctor = |lacks: &[&str]| {
        let output = Command::new("/usr/bin/python3")
            .arg(probe)
            .args(lacks)
            .args(["--", CAISSON, "doctor"])
            .env_clear()
            .env("PATH", "/usr/sbin:/usr/bin:/sbin:/bin")
            .env("AIO_CODE_BACKEND", "native")
            .output()
            .expect("a python");
        (output.status.code(), String::from_utf8_lossy(&output.stdout).into_owned())
    };
    // Its launcher greets and ends at once; whichever is noticed first.
    for _ in 0..8 {
        let (status, table) = doctor(&["--namespaces", "--landlock"]);
        assert_eq!(status, Some(3), "{table}");
        assert!(table.ends_with("posture: none\n") && table.contains("landlock        MISSING"), "{table}");
    }
    // Control: what this host really offers.
    let (status, table) = doctor(&[]);
    assert_eq!(status, Some(0), "{table}");
    assert!(table.ends_with("posture: full\n"), "{table}");
}
