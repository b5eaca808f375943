//! Forks of one zygote: what they draw, count, inherit and remember is each one's own.

use std::collections::{HashMap, HashSet};
use std::process::Command;
use std::sync::Arc;
use std::time::Duration;

use caisson::launcher::plan::{LaunchPlan, Profile};
use serde_json::{Value, json};

use crate::support::stand::fresh_space;
use crate::support::{Guest, Stand, common_stand, own_stand, plan, proc};

const SIBLINGS: usize = 50;

fn data(plan: LaunchPlan) -> LaunchPlan {
    LaunchPlan { profile: Profile::PythonData, ..plan }
}

const DRAW: &str = r#"
import json, os
drawn = {}
import random; drawn["random"] = random.random(); drawn["random.Random"] = random.Random().random()
import numpy; drawn["numpy.random"] = float(numpy.random.random()); drawn["numpy default_rng"] = float(numpy.random.default_rng().random())
drawn["os.urandom"] = os.urandom(16).hex()
import ssl; drawn["ssl.RAND_bytes"] = ssl.RAND_bytes(16).hex()
import uuid; drawn["uuid4"] = str(uuid.uuid4()); drawn["uuid1"] = str(uuid.uuid1())
import secrets; drawn["secrets"] = secrets.token_hex(16)
import tempfile; drawn["tempfile"] = next(tempfile._get_candidate_names()); drawn["mkdtemp"] = tempfile.mkdtemp(dir="/dev/shm")
import multiprocessing; drawn["authkey"] = bytes(multiprocessing.current_process().authkey).hex()
import sqlite3; drawn["sqlite"] = sqlite3.connect(":memory:").execute("select hex(randomblob(16))").fetchone()[0]
import hashlib; drawn["scrypt salt"] = hashlib.sha256(ssl.RAND_bytes(32)).hexdigest()
import pandas; drawn["pandas.sample"] = str(list(pandas.DataFrame({"a": range(10**5)}).sample(8)["a"]))
drawn["object addresses of a fresh secret"] = secrets.token_bytes(8).hex()
print(json.dumps({"pid": os.getpid(), "drawn": drawn}))
"#;

#[test]
fn fifty_siblings_draw_nothing_alike() {
    let stand = common_stand!();
    let zygote = stand.zygote(Profile::PythonData).expect("it serves");
    assert!(inner_pid(zygote) > 1000, "a zygote must not have a guest's pid");
    assert_nothing_alike(&stand, SIBLINGS);
}

/// OpenSSL takes a fork for itself where its pid has not changed: the zygote's pid keeps that from happening, and
/// where it did happen the reseeding must be enough.
#[test]
fn siblings_of_a_zygote_with_a_guests_pid_draw_nothing_alike() {
    let stand = own_stand!(|settings| settings.shells_ready = 0);
    let colliding = (0..10).any(|_| {
        let before = stand.zygote(Profile::PythonData).expect("it serves");
        proc::kill(before);
        // Within the second until its successor is forked, which is the launcher's next child.
        let status = Command::new("nsenter")
            .args([&format!("--target={}", stand.launcher), "--pid", "sh", "-c"])
            .arg("echo 1 > /proc/sys/kernel/ns_last_pid")
            .status();
        assert!(status.expect("nsenter starts").success());
        proc::until("its successor is there", Duration::from_secs(30), || {
            stand.zygote(Profile::PythonData).is_some_and(|pid| pid != before)
        });
        let after = stand.next_zygote(Profile::PythonData, before);
        inner_pid(after) == 2
    });
    assert!(colliding, "no zygote came to be pid 2: {}", stand.log());
    assert_nothing_alike(&stand, SIBLINGS / 4);
}

fn inner_pid(pid: i32) -> i32 {
    *proc::pids_in_namespaces(pid).last().expect("it lives")
}

/// All alive at once: none can have what another gave back.
fn assert_nothing_alike(stand: &Arc<Stand>, count: usize) {
    let space = fresh_space();
    let mut seen: HashMap<String, HashSet<String>> = HashMap::new();
    let mut guests: Vec<Guest> = Vec::new();
    for _ in 0..count {
        let mut guest = stand.guest(data(plan(space)));
        assert!(guest.is_fork(), "they are no siblings");
        let answer = guest.ask(DRAW);
        assert_eq!(answer["pid"], 2);
        for (name, value) in answer["drawn"].as_object().expect("an object") {
            seen.entry(name.clone()).or_default().insert(value.to_string());
        }
        guests.push(guest);
    }
    for (name, values) in &seen {
        assert_eq!(values.len(), count, "{name} gave two siblings the same");
    }
    assert!(seen.len() > 10);
}

/// Takes all there is of each, keeps it, and says how much that was.
const EXHAUST: &str = r#"
import ctypes, json, mmap, os, signal
libc = ctypes.CDLL(None, use_errno=True)
share = {}
held = []
def count(take, most):
    n = 0
    while n < most and take():
        n += 1
    return n
timer = ctypes.c_void_p()
share["timers"] = count(lambda: libc.timer_create(1, None, ctypes.byref(timer)) == 0, 5000)
def fork():
    try:
        pid = os.fork()
    except OSError:
        return False
    if pid == 0:
        while True:
            signal.pause()
    return True
share["processes"] = count(fork, 2000)
share["inotify"] = count(lambda: libc.inotify_init1(0) >= 0, 900)
page = mmap.PAGESIZE
area = mmap.mmap(-1, 4 << 20, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
held.append(area)
start = ctypes.addressof(ctypes.c_char.from_buffer(area))
at = iter(range(1024))
share["locked pages"] = count(lambda: libc.mlock(ctypes.c_void_p(start + next(at) * page), ctypes.c_size_t(page)) == 0, 1000)
attributes = (ctypes.c_long * 8)(0, 1, 64)
name = iter(range(1000))
share["queues"] = count(lambda: libc.mq_open(b"/q%d" % next(name), os.O_CREAT | os.O_RDWR, 0o600, attributes) >= 0, 900)
print(json.dumps(share))
"#;

#[test]
fn a_sibling_that_takes_everything_leaves_the_other_its_full_share() {
    let stand = common_stand!();
    let space = fresh_space();
    let mut greedy = stand.guest(plan(space));
    let taken = greedy.ask(EXHAUST);
    // Control: each of them has an end, and what was taken is held.
    for (what, least, most) in
        [("timers", 400, 512), ("processes", 60, 128), ("inotify", 32, 64), ("locked pages", 8, 16)]
    {
        let number = taken[what].as_u64().expect("a number");
        assert!((least..=most).contains(&number), "{what}: {number}");
    }
    let mut modest = stand.guest(plan(space));
    assert!(greedy.is_fork() && modest.is_fork(), "they are no siblings");
    let got = modest.ask(EXHAUST);
    assert_eq!(got, taken, "the second sibling did not get what the first got");
    let inside = proc::namespace(greedy.pid(), "pid");
    let held = proc::all().into_iter().filter(|pid| proc::namespace(*pid, "pid") == inside).count() as u64;
    assert!(taken["processes"].as_u64() <= Some(held), "the first had let go of it: {held} are left");
}

/// Looks through all it can read of itself for the mark, which stands here in two halves.
const SCAN: &str = r#"
import re, json, os
mark = re.compile(b"CANA" + b"RY-[0-9a-f]{40}")
found, size = [], 0
with open("/proc/self/maps") as maps, open("/proc/self/mem", "rb", 0) as mem:
    regions = [line.split(None, 5) for line in maps]
    for region in regions:
        start, end = (int(word, 16) for word in region[0].split("-"))
        if "r" not in region[1] or region[-1].strip() in ("[vvar]", "[vsyscall]", "[vvar_vclock]"):
            continue
        for at in range(start, end, 1 << 22):
            try:
                mem.seek(at)
                piece = mem.read(min(1 << 22, end - at))
            except (OSError, ValueError, OverflowError):
                continue
            size += len(piece)
            found += [region[-1].strip() for _ in mark.finditer(piece)]
for name in ("environ", "cmdline"):
    with open("/proc/self/" + name, "rb") as file:
        found += [name for _ in mark.finditer(file.read())]
found += ["os.environ" for _ in mark.finditer(repr(dict(os.environ)).encode())]
print(json.dumps({"found": len(found), "where": sorted(set(found))[:5], "size": size}))
"#;

#[test]
fn nothing_that_one_tenant_sends_is_in_the_memory_of_the_next_guest() {
    let stand = common_stand!();
    let mark = format!("CANARY-{}{}", uuid::Uuid::new_v4().simple(), "0123abcd");
    let mut first = stand.guest(plan(fresh_space()));
    first.say(&format!("import os; os.mkdir('/tmp/{mark}')"));
    // The working directory of a session, and a cell of 4 KiB.
    let there = first.frame(json!({"setup": {"cwd": format!("/tmp/{mark}")}}));
    assert!(there.error.is_none(), "{there:?}");
    let cell = format!("secret = '''{}'''\nprint(len(secret))", mark.repeat(4096 / mark.len() + 1));
    assert!(first.say(&cell).parse::<usize>().is_ok_and(|length| length >= 4096));
    // Control: the scan finds it where it is.
    let own: Value = first.ask(SCAN);
    assert!(own["found"].as_u64().is_some_and(|found| found > 80), "{own}");
    let mut at_the_same_time = stand.guest(plan(fresh_space()));
    first.end();
    let mut next = stand.guest(plan(fresh_space()));
    assert!(next.is_fork());
    for guest in [&mut at_the_same_time, &mut next] {
        let theirs: Value = guest.ask(SCAN);
        assert_eq!(theirs["found"], 0, "{theirs}");
        assert!(
            theirs["size"].as_u64().is_some_and(|size| size > 5 << 20),
            "the scan saw too little: {theirs}"
        );
    }
}

const FLAGS: &str = r#"
import fcntl, json, os
print(json.dumps([fcntl.fcntl(fd, fcntl.F_GETFL) & (os.O_NONBLOCK | os.O_APPEND) for fd in (0, 1, 2)]))
"#;

#[test]
fn flags_and_locks_on_inherited_descriptors_are_each_siblings_own() {
    let stand = common_stand!();
    let space = fresh_space();
    let (mut one, mut two) = (stand.guest(plan(space)), stand.guest(plan(space)));
    let plain = two.ask(FLAGS);
    one.say(
        "import fcntl, os\n\
         for fd in (0, 1, 2):\n    fcntl.fcntl(fd, fcntl.F_SETFL, fcntl.fcntl(fd, fcntl.F_GETFL) | os.O_NONBLOCK | os.O_APPEND)\n",
    );
    // Control: they are set where they were set.
    let flags = one.ask(FLAGS);
    assert!(
        flags.as_array().is_some_and(|flags| flags.iter().all(|flag| flag.as_i64() > Some(0))),
        "{flags}"
    );
    assert_eq!(two.ask(FLAGS), plain);
    assert_eq!(stand.guest(plan(space)).ask(FLAGS), plain);

    // Locks: a description of one's own can be locked again over a second one only when it is another file.
    let lock = "import fcntl, os\n\
                got = []\n\
                for fd in (1, 2):\n    fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)\n    got.append(fd)\n\
                print(got)";
    assert_eq!(one.say(lock), "[1, 2]");
    // Control: a second description of the same pipe is locked out.
    let again = "import fcntl, os\n\
                 other = os.open('/proc/self/fd/1', os.O_WRONLY)\n\
                 try:\n    fcntl.flock(other, fcntl.LOCK_EX | fcntl.LOCK_NB); print('shared')\n\
                 except BlockingIOError: print('locked')";
    assert_eq!(one.say(again), "locked");
    assert_eq!(two.say(lock), "[1, 2]", "the sibling's lock is in the way");
}

#[test]
fn no_sibling_has_a_writable_shared_mapping_or_a_descriptor_too_many() {
    let stand = common_stand!();
    for profile in [Profile::Python, Profile::PythonData] {
        let mut guest = stand.guest(LaunchPlan { profile, ..plan(fresh_space()) });
        assert!(guest.is_fork());
        let code = "import os, re\n\
                    print([line for line in open('/proc/self/maps') if re.match(r'\\S+ .w.s ', line)], \
                    sorted(int(fd) for fd in os.listdir('/proc/self/fd')))";
        // 5 is the listing's own, the high ones are spares of 1 and 2.
        assert_eq!(guest.say(code), "[] [0, 1, 2, 3, 4, 5, 62, 63]");
        // Control: the search sees one that is made.
        let made = format!("import mmap; shared = mmap.mmap(-1, 4096)\n{code}");
        assert!(guest.say(&made).contains("rw-s"));
    }
}
