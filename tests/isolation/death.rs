//! Whatever part dies by SIGKILL at whatever moment: no guest outlives its launcher, files do, and the next start
//! finds nothing of the last in its way.

use std::fs;
use std::path::PathBuf;
use std::time::Duration;

use caisson::launcher::plan::{End, Profile};

use crate::support::guest::STUBBORN;
use crate::support::service::{Service, Who};
use crate::support::stand::{fresh_dir, fresh_space, text};
use crate::support::{common_stand, own_stand, plan, proc, skip};

const GUESTS: usize = 20;
/// How long the kernel may take to end them on a busy machine; the launcher itself waits 5 s for a daemon.
const GONE_MAX: Duration = Duration::from_secs(20);
/// Starts of a launcher after which no group of the dead is left.
const SWEEPS: usize = 5;

/// A directory that goes away, whatever the test does.
struct Dir(PathBuf);

impl Drop for Dir {
    fn drop(&mut self) {
        let _ = fs::remove_dir_all(&self.0);
    }
}

/// A service with twenty such guests and a file; the processes in sandboxes and their groups.
struct Scene {
    service: Service,
    guests: Vec<Who>,
    groups: Vec<PathBuf>,
    dir: Dir,
}

fn scene() -> Result<Scene, String> {
    let dir = Dir(fresh_dir());
    let service = Service::start(&dir.0)?;
    let written = service.run("start", "print(open('/mnt/data/kept', 'w').write('still here'))");
    assert_eq!(written.as_deref(), Some("10"));
    for n in 1..GUESTS {
        assert_eq!(service.run_soon(&format!("s{n}"), STUBBORN), "up");
    }
    let guests = service.sandboxed();
    // Control: they are there: an interpreter, an init and three strays for each session but the first.
    assert!(guests.len() >= (GUESTS - 1) * 5, "{} processes in sandboxes", guests.len());
    let groups: Vec<PathBuf> = guests.iter().flat_map(|guest| Service::groups_of(guest.0)).collect();
    assert!(groups.len() >= guests.len(), "no groups were found");
    Ok(Scene { service, guests, groups, dir })
}

impl Scene {
    fn assert_guests_gone(&self) {
        let left = || self.guests.iter().filter(|guest| guest.lives()).count();
        proc::until("no guest is left", GONE_MAX, || left() == 0);
    }

    /// After the successor has come up.
    fn assert_swept(&self) {
        assert_eq!(self.service.run_soon("start", "print(open('/mnt/data/kept').read())"), "still here");
        // The successor may have taken the name and fill a group of the same number: that one is not of the dead.
        let empty = |group: &&PathBuf| {
            fs::read_to_string(group.join("cgroup.procs")).is_ok_and(|pids| pids.is_empty())
        };
        proc::until("no group of the dead is left", GONE_MAX, || {
            !self.groups.iter().any(|group| empty(&group))
        });
        let mut images = Service::loop_devices(&self.dir.0);
        let count = images.len();
        images.sort_unstable();
        images.dedup();
        assert_eq!(images.len(), count, "an image is attached twice");
    }

    /// The end of the test: nothing is left on the host. Groups may be, of a launcher that was killed and whose
    /// successor got another number: the next start takes them away.
    fn assert_nothing_left(mut self) {
        assert!(self.service.stop(), "asked to end, it did not");
        let guests = self.service.sandboxed();
        assert!(guests.is_empty(), "{guests:?}");
        proc::until("no loop device is left", GONE_MAX, || Service::loop_devices(&self.dir.0).is_empty());
        assert!(!text("/proc/self/mountinfo").contains(&*self.dir.0.to_string_lossy()), "a mount is left");
        let mut stale: Vec<_> =
            self.groups.iter().filter_map(|group| group.parent()?.parent()).map(PathBuf::from).collect();
        stale.sort_unstable();
        stale.dedup();
        // More than once, since a launcher of a test beside this one may have the number, and be killed.
        for _ in 0..SWEEPS {
            let next = crate::support::Stand::start(|settings| settings.zygotes_off = true);
            let next = next.expect("it started before");
            stale.retain(|base| base.join("space-1").is_dir() && group_is_empty(base));
            drop(next);
            if stale.is_empty() {
                return;
            }
            std::thread::sleep(Duration::from_secs(1));
        }
        panic!("groups are left: {stale:?}");
    }
}

/// No process in it or below, as a group of the dead: another daemon may have taken the name since.
fn group_is_empty(base: &std::path::Path) -> bool {
    let Ok(entries) = fs::read_dir(base) else { return true };
    let below =
        entries.flatten().filter(|entry| entry.path().is_dir()).all(|entry| group_is_empty(&entry.path()));
    below && text(base.join("cgroup.procs")).is_empty()
}

macro_rules! scene {
    () => {
        match scene() {
            Ok(scene) => scene,
            Err(reason) => return skip(&reason),
        }
    };
}

#[test]
fn a_killed_launcher_takes_every_guest_with_it_and_its_successor_finds_the_files() {
    let scene = scene!();
    let (launcher, daemon) = (scene.service.stage("launcher"), scene.service.stage("daemon"));
    let (launcher, daemon) = (launcher.expect("it lives"), daemon.expect("it lives"));
    proc::kill(launcher.0);
    scene.assert_guests_gone();
    scene.assert_swept();
    assert_ne!(scene.service.stage("launcher"), Some(launcher));
    assert_eq!(scene.service.stage("daemon"), Some(daemon), "the daemon goes on");
    scene.assert_nothing_left();
}

#[test]
fn a_killed_daemon_leaves_no_guest_and_a_new_pair_serves() {
    let scene = scene!();
    let daemon = scene.service.stage("daemon").expect("it lives");
    proc::kill(daemon.0);
    scene.assert_guests_gone();
    scene.assert_swept();
    assert_ne!(scene.service.stage("daemon"), Some(daemon));
    scene.assert_nothing_left();
}

#[test]
fn a_daemon_killed_by_a_real_time_signal_is_replaced() {
    let scene = scene!();
    let daemon = scene.service.stage("daemon").expect("it lives");
    // `kill` of the shell: the numbers beyond 31 have no name in libraries.
    let status = std::process::Command::new("kill").args(["-40", &daemon.0.to_string()]).status();
    assert!(status.expect("kill starts").success());
    proc::until("it is gone", GONE_MAX, || !daemon.lives());
    scene.assert_guests_gone();
    scene.assert_swept();
    scene.assert_nothing_left();
}

#[test]
fn a_killed_supervisor_leaves_nothing_running_and_the_next_start_finds_the_files() {
    let mut scene = scene!();
    let stages = ["launcher", "daemon"].map(|name| scene.service.stage(name).expect("it lives"));
    scene.service.kill_supervisor();
    // At once: the old launcher is still about to end.
    let next = Service::start(&scene.dir.0).expect("it served before");
    scene.assert_guests_gone();
    for stage in stages {
        proc::until("the old stages are gone", GONE_MAX, || !stage.lives());
    }
    scene.service = next;
    scene.assert_swept();
    scene.assert_nothing_left();
}

/// The processes of a sandbox that has run [`STUBBORN`], once those in between have ended: init, the
/// interpreter and three strays.
fn settled(pid: i32) -> Vec<Who> {
    let namespace = proc::namespace(pid, "pid");
    let inside = || {
        let living = proc::all().into_iter().filter(|pid| proc::lives(*pid));
        living.filter(|pid| proc::namespace(*pid, "pid") == namespace)
    };
    proc::until("five are left", GONE_MAX, || inside().count() == 5);
    inside().filter_map(Who::of).collect()
}

#[test]
fn launchers_that_start_at_once_all_get_ids_of_their_own() {
    if let Some(reason) = crate::support::missing() {
        return skip(reason);
    }
    let starting = [(); 5].map(|()| {
        std::thread::spawn(|| {
            crate::support::Stand::start(|settings| {
                settings.zygotes_off = true;
                settings.shells_ready = 0;
            })
        })
    });
    let stands = starting.map(|thread| thread.join().expect("each of them starts"));
    let mut live = Vec::new();
    for stand in stands {
        match stand {
            Ok(stand) => live.push(stand),
            Err(reason) => return skip(&reason),
        }
    }
    let mut ranges: Vec<u32> =
        live.iter().map(|stand| stand.guest(plan(fresh_space())).attestation.host_uid >> 24).collect();
    ranges.sort_unstable();
    ranges.dedup();
    assert_eq!(ranges.len(), live.len(), "two launchers have one range");
}

#[test]
fn a_killed_init_takes_its_sandbox_and_no_other() {
    let stand = common_stand!();
    let space = fresh_space();
    let (mut one, mut other) = (stand.guest(plan(space)), stand.guest(plan(space)));
    assert_eq!((one.say(STUBBORN), other.say(STUBBORN)), ("up".to_owned(), "up".to_owned()));
    let (theirs, others) = (settled(one.pid()), settled(other.pid()));
    proc::kill(one.init());
    proc::until("its sandbox is gone", GONE_MAX, || theirs.iter().all(|who| !who.lives()));
    assert!(matches!(stand.end_of(one.sandbox, GONE_MAX), Some(End::Signaled(9) | End::Ended)));
    // Control: the neighbour has noticed nothing.
    assert!(others.iter().all(|who| who.lives()));
    assert_eq!(other.say("print(1)"), "1");
    let leaf = Service::groups_of(other.pid());
    let gone = leaf.iter().map(|leaf| leaf.with_file_name(format!("sandbox-{:x}", one.sandbox.0)));
    // Its space may use it again, and only that.
    assert_eq!(stand.delete_space(space), 0);
    for group in gone {
        proc::until("its group is gone", GONE_MAX, || !group.exists());
    }
}

#[test]
fn a_killed_guest_process_ends_its_sandbox_with_its_strays() {
    let stand = common_stand!();
    let mut guest = stand.guest(plan(fresh_space()));
    guest.say(STUBBORN);
    let all = settled(guest.pid());
    proc::kill(guest.pid());
    assert_eq!(stand.end_of(guest.sandbox, GONE_MAX), Some(End::Signaled(9)));
    proc::until("its strays are gone", GONE_MAX, || all.iter().all(|who| !who.lives()));
}

#[test]
fn a_killed_zygote_leaves_its_guests_alive_and_new_ones_come_from_its_successor() {
    let stand = own_stand!(|_| {});
    let space = fresh_space();
    let mut guests: Vec<_> = (0..5).map(|_| stand.guest(plan(space))).collect();
    for guest in &mut guests {
        assert!(guest.is_fork());
        assert_eq!(guest.say("held = 41; print('up')"), "up");
    }
    let before = stand.zygote(Profile::Python).expect("it serves");
    let before_uid = proc::uid(before);
    proc::kill(before);
    // While it is away interpreters are exec'd.
    assert_eq!(stand.guest(plan(space)).say("print(1)"), "1");
    let after = stand.next_zygote(Profile::Python, before);
    assert_ne!(proc::uid(after), before_uid, "a zygote's uid was used again while its guests live");
    for guest in &mut guests {
        assert_eq!(guest.say("print(held + 1)"), "42");
    }
}
