//! A space: hard limits, no power from files, one owner whoever runs in it, gone when deleted, there when not.

use std::fs;
use std::time::Duration;

use caisson::launcher::plan::Reply;
use caisson::launcher::spaces::SpaceLimits;

use crate::support::stand::{NotStarted, fresh_dir, fresh_space};
use crate::support::{Stand, common_stand, own_stand, plan, proc, skip, strict};

/// ext4's own needs come on top of what a space may hold (`launcher::spaces`).
const OVERHEAD_BYTES: u64 = 20 << 20;

#[test]
fn bytes_and_inodes_end_at_their_limit_and_a_neighbour_has_its_own() {
    let limits = SpaceLimits { bytes: 16 << 20, inodes: 300 };
    let stand = own_stand!(|settings| {
        settings.space = limits;
        settings.zygotes_off = true;
    });
    let (full, other) = (fresh_space(), fresh_space());
    let mut guest = stand.guest(strict(full));
    let inodes = guest.ask(
        "import errno, os, json\n\
         count = 0\n\
         try:\n    while count < 5000:\n        open('/tmp/%d' % count, 'w').close(); count += 1\n\
         except OSError as error: reason = errno.errorcode[error.errno]\n\
         print(json.dumps([count, reason]))",
    );
    let count = inodes[0].as_u64().expect("a number");
    assert!(inodes[1] == "ENOSPC" && (200..=limits.inodes + 32).contains(&count), "{inodes}");
    guest.say("for n in range(count): os.unlink('/tmp/%d' % n)");
    let bytes = guest.ask(
        "total, block, full = 0, b'x' * (1 << 20), 'no'\n\
         try:\n    for n in range(40):\n        with open(('/mnt/data/%d', '/home/sandbox/%d')[n % 2] % n, 'wb', 0) as file:\n            for _ in range(4): total += file.write(block)\n            os.fsync(file.fileno())\n\
         except OSError as error: full = errno.errorcode[error.errno]\n\
         print(json.dumps([total, full]))",
    );
    let total = bytes[0].as_u64().expect("a number");
    assert!(bytes[1] == "ENOSPC" && (12 << 20..limits.bytes + OVERHEAD_BYTES).contains(&total), "{bytes}");
    let image =
        fs::metadata(stand.dir.join(format!("launcher/spaces/{:016x}.img", full.0))).expect("it is there");
    assert!(image.len() <= limits.bytes + OVERHEAD_BYTES);
    // One file alone ends at the same limit by RLIMIT_FSIZE.
    // Control: another space of the same launcher has all of its room.
    let mut neighbour = stand.guest(strict(other));
    assert_eq!(
        neighbour.say("print(open('/mnt/data/x', 'wb').write(b'x' * (8 << 20)))"),
        (8 << 20).to_string()
    );
}

#[test]
fn a_setuid_file_gives_nothing_and_a_device_node_cannot_be_made() {
    let stand = common_stand!();
    let mut guest = stand.guest(plan(fresh_space()));
    let answer = guest.ask(
        r#"
import errno, json, os, shutil, stat, subprocess
out = {}
shutil.copy(shutil.which("id"), "/mnt/data/id")
try:
    os.chmod("/mnt/data/id", 0o6755); out["chmod"] = oct(os.stat("/mnt/data/id").st_mode & 0o7777)
except OSError as error:
    out["chmod"] = errno.errorcode[error.errno]
run = lambda *words: subprocess.run(words, capture_output=True, text=True).stdout.split()
out["plain"], out["setuid"] = run("/usr/bin/id"), run("/mnt/data/id")
for name, mode, device in (("null", stat.S_IFCHR, os.makedev(1, 3)), ("disk", stat.S_IFBLK, os.makedev(254, 0))):
    try:
        os.mknod("/mnt/data/" + name, mode | 0o666, device); out[name] = "made"
    except OSError as error:
        out[name] = errno.errorcode[error.errno]
os.mkfifo("/mnt/data/fifo"); out["fifo"] = stat.S_ISFIFO(os.stat("/mnt/data/fifo").st_mode)
print(json.dumps(out))
"#,
    );
    // Control: the copy runs, and a fifo can be made.
    assert_eq!(answer["fifo"], true);
    assert!(answer["plain"][0].as_str().is_some_and(|uid| uid.starts_with("uid=1000")), "{answer}");
    assert_eq!(answer["plain"], answer["setuid"]);
    assert!(matches!(answer["null"].as_str(), Some("EPERM" | "EACCES")), "{answer}");
    assert!(matches!(answer["disk"].as_str(), Some("EPERM" | "EACCES")), "{answer}");
    // The other account of the same space runs it: still nobody but itself.
    let nobody = caisson::launcher::plan::LaunchPlan {
        account: caisson::launcher::plan::Account(1),
        ..plan(guest.space)
    };
    let mut other = stand.guest(nobody);
    let ran = other.say(
        "import subprocess; print(subprocess.run(['/mnt/data/id', '-u'], capture_output=True, text=True).stdout)",
    );
    assert_eq!(ran, "65534", "a setuid file had an effect");
}

#[test]
fn a_guest_that_shuts_itself_out_of_its_space_does_not_shut_out_the_next() {
    let stand = common_stand!();
    let space = fresh_space();
    let mut guest = stand.guest(plan(space));
    // Ready shells of this space have their mounts already.
    guest.say("import os\nfor path in ('/home/sandbox', '/mnt/data', '/tmp'): os.chmod(path, 0)");
    for plan in [plan(space), strict(space)] {
        let mut next = stand.guest(plan);
        assert_eq!(
            next.say("import os; open('/mnt/data/x', 'w').close(); print(os.getcwd())"),
            "/home/sandbox"
        );
    }
    // Control: what it may do to others of its space it may still do.
    guest.say("os.chmod('/mnt/data', 0o700)");
    assert_eq!(
        stand.guest(plan(space)).say("import os; print(oct(os.stat('/mnt/data').st_mode & 0o777))"),
        "0o700"
    );
}

#[test]
fn two_sandboxes_of_a_space_share_files_and_no_uid_and_no_process() {
    let stand = common_stand!();
    let space = fresh_space();
    let (mut one, mut two) = (stand.guest(plan(space)), stand.guest(strict(space)));
    assert_ne!(one.attestation.host_uid, two.attestation.host_uid);
    one.say("import os\nwith open('/mnt/data/shared', 'w') as file: file.write('hello')\nos.chmod('/mnt/data/shared', 0o600)");
    assert_eq!(two.say("print(open('/mnt/data/shared').read())"), "hello", "a 0600 file of the same owner");
    two.say("open('/home/sandbox/back', 'w').write('there')");
    assert_eq!(
        one.say("print(open('/home/sandbox/back').read(), os.stat('/home/sandbox/back').st_uid)"),
        "there 1000"
    );
    // Processes, shared memory and abstract sockets are each one's own.
    one.say("open('/dev/shm/mine', 'w').close(); import socket; s = socket.socket(socket.AF_UNIX); s.bind('\\0mine'); s.listen()");
    let seen = two.ask(
        "import json, os, socket\n\
         try: socket.socket(socket.AF_UNIX).connect('\\0mine'); reached = True\n\
         except OSError: reached = False\n\
         print(json.dumps([os.listdir('/dev/shm'), reached, sorted(int(n) for n in os.listdir('/proc') if n.isdigit())]))",
    );
    assert_eq!(seen, serde_json::json!([[], false, [2]]), "pid 1 is another uid's and hidden");
    // Control: they are there for their owner.
    let own = "print(os.listdir('/dev/shm')); c = socket.socket(socket.AF_UNIX); c.connect('\\0mine'); print('reached')";
    assert_eq!(one.say(own), "['mine']\nreached");
    // On the disk the files are of an id that no process has.
    for pid in [one.pid(), two.pid()] {
        assert_ne!(proc::uid(pid), Some(1000));
    }
}

#[test]
fn another_spaces_files_cannot_be_reached() {
    let stand = common_stand!();
    let (theirs, mine) = (fresh_space(), fresh_space());
    let mark = "a-file-of-another-tenant";
    let mut owner = stand.guest(plan(theirs));
    owner.say(&format!(
        "for top in ('/mnt/data/', '/tmp/', '/home/sandbox/'): open(top + '{mark}', 'w').write('42')"
    ));
    let look = format!(
        r#"
import json, os
found = []
for top, dirs, files in os.walk("/", followlinks=False):
    dirs[:] = [name for name in dirs if os.path.join(top, name) not in ("/usr", "/proc")]
    found += [os.path.join(top, name) for name in files if name == "{mark}"]
for path in ("/mnt/data/..", "/proc/self/root", "/proc/self/cwd/../..", "/mnt/data/../../.."):
    base = os.open(path, os.O_RDONLY)
    for up in ("", "../", "../../../../"):
        for name in ("mnt", "data", "mounts", "var/lib/caisson", "{dir}"):
            try:
                if "{mark}" in os.listdir("/proc/self/fd/%d/%s%s" % (base, up, name)): found.append(path + up + name)
            except OSError:
                pass
print(json.dumps(found))
"#,
        dir = stand.dir.display()
    );
    // Control: its owner finds it in its three places, and so does a second sandbox of that space.
    for guest in [&mut owner, &mut stand.guest(strict(theirs))] {
        let found = guest.ask(&look);
        assert!(found.as_array().is_some_and(|found| found.len() >= 3), "{found}");
    }
    let mut other = stand.guest(plan(mine));
    assert_eq!(other.ask(&look), serde_json::json!([]));
}

#[test]
fn files_survive_the_launcher_and_a_deleted_space_is_gone() {
    let state = fresh_dir();
    let (kept, deleted) = (fresh_space(), fresh_space());
    let image = |space: caisson::launcher::plan::SpaceId| state.join(format!("spaces/{:016x}.img", space.0));
    let start = || {
        Stand::start(|settings| {
            settings.state_dir = state.clone();
            settings.zygotes_off = true;
        })
    };
    let finished = (|| -> Result<(), String> {
        let stand = start()?;
        let write = "import os; file = open('/mnt/data/kept', 'w'); file.write('still here'); file.flush()";
        stand.guest(strict(kept)).say(write);
        let mut doomed = stand.guest(strict(deleted));
        // A tree that is deep, wide and hard to walk for whoever would.
        doomed.say(
            "import os\n\
             at = '/mnt/data'\n\
             os.chdir(at)\n\
             for n in range(300): os.mkdir('d' * 100); os.chdir('d' * 100)\n\
             for n in range(200): open('/tmp/%d' % n, 'w').close()\n\
             os.mkdir('/home/sandbox/locked', 0); os.symlink('/etc', '/home/sandbox/link')",
        );
        assert!(image(deleted).exists());
        assert_eq!(stand.delete_space(deleted), 0);
        assert!(!image(deleted).exists(), "the image is still there");
        stand.finish();
        // No spaces as spaces are here: they are nobody's to touch.
        let aside = [state.join(format!("spaces/{:016x}", deleted.0)), state.join("spaces/odd.img")];
        fs::create_dir(&aside[0]).expect("our own");
        fs::write(&aside[1], "").expect("our own");
        // The next launcher over the same folder tells what it finds.
        let stand = start()?;
        let found = stand.seat().reply(Duration::from_secs(10)).map(|(reply, _)| reply);
        assert_eq!(found, Some(Reply::SpaceFound { space: kept }));
        assert!(stand.seat().reply(Duration::from_millis(100)).is_none(), "something else is told");
        assert!(aside.iter().all(|path| path.exists()));
        let mut guest = stand.guest(strict(kept));
        assert_eq!(guest.say("print(open('/mnt/data/kept').read())"), "still here");
        assert_eq!(
            stand
                .guest(strict(deleted))
                .say("import os; print(os.listdir('/mnt/data'), os.listdir('/home/sandbox'))"),
            "[] []"
        );
        Ok(())
    })();
    let _ = fs::remove_dir_all(&state);
    if let Err(reason) = finished {
        skip(&reason);
    }
}

#[test]
fn a_deleted_space_is_not_made_again_ahead_of_demand() {
    let stand = own_stand!(|settings| settings.zygotes_off = true);
    let (deleted, other) = (fresh_space(), fresh_space());
    let image = |space: caisson::launcher::plan::SpaceId| {
        stand.dir.join(format!("launcher/spaces/{:016x}.img", space.0))
    };
    stand.guest(strict(deleted)).say("print(1)");
    assert_eq!(stand.delete_space(deleted), 0);
    // What comes for others has shells made ahead, for all that have had plans.
    for _ in 0..3 {
        stand.guest(strict(other)).say("import time; time.sleep(0.2)");
    }
    assert!(!image(deleted).exists(), "it is there again");
    assert!(image(other).exists(), "control");
}

#[test]
fn a_second_launcher_over_the_same_folder_does_not_start() {
    let stand = own_stand!(|settings| settings.zygotes_off = true);
    let state = stand.dir.join("launcher");
    let mut guest = stand.guest(strict(fresh_space()));
    guest.say("open('/mnt/data/x', 'w').write('1')");
    let second = Stand::start_in(fresh_dir(), &[], |settings| {
        settings.state_dir = state;
        settings.zygotes_off = true;
    });
    match second {
        Err(NotStarted::Failed(log)) => assert!(log.contains("failed to open the folder of spaces"), "{log}"),
        Err(other) => panic!("{other:?}"),
        Ok(_) => panic!("two launchers serve the same images"),
    }
    // Control: the first one and its mounts are unharmed.
    assert_eq!(guest.say("print(open('/mnt/data/x').read())"), "1");
    stand.still_launches();
}
