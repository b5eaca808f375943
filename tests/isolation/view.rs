//! The daemon's view of a workspace, and spaces in memory.

use std::fs;
use std::io::{Read, Write};
use std::os::fd::OwnedFd;
use std::time::Duration;

use caisson::launcher::plan::{LaunchPlan, Reply, Request, SpaceId, Step};
use caisson::launcher::settings::ViewSettings;
use rustix::fs::{AtFlags, FileType, Mode, OFlags, StatVfsMountFlags};

use crate::support::stand::{Seat, Trouble, fresh_dir, fresh_space};
use crate::support::{Stand, own_stand, plan, skip, strict};

/// The daemon's account: nobody else's.
const DAEMON: u32 = 0x6fff_fff1;

fn viewed(plan: LaunchPlan) -> LaunchPlan {
    LaunchPlan { view: true, throwaway: true, ..plan }
}

macro_rules! stand_with_views {
    () => {
        own_stand!(|settings| {
            let dir = settings.state_dir.with_file_name("daemon");
            fs::create_dir(&dir).expect("a directory of our own");
            settings.views = Some(ViewSettings { dir: dir.join("views"), uid: DAEMON, gid: DAEMON });
        })
    };
}

fn open(view: &OwnedFd, name: &str, flags: OFlags) -> rustix::io::Result<fs::File> {
    rustix::fs::openat(view, name, flags | OFlags::CLOEXEC, Mode::from_bits_truncate(0o644))
        .map(fs::File::from)
}

#[test]
fn a_view_shows_the_guests_files_as_the_daemons_and_leads_nowhere() {
    let stand = stand_with_views!();
    for space in [SpaceId::transient(7), SpaceId(4711)] {
        for plan in [plan(space), strict(space)] {
            let mut guest = stand.guest(viewed(plan));
            guest.say(
                "import os\n\
                 os.chdir('/mnt/data')\n\
                 open('own', 'w').write('theirs')\n\
                 os.chmod('own', 0o600)\n\
                 for name, target in (('link', '/etc/passwd'), ('near', 'own'), ('root', '/')):\n    \
                     os.path.lexists(name) or os.symlink(target, name)",
            );
            let view = guest.view.take().expect("it was asked for");
            let stat = rustix::fs::statat(&view, "own", AtFlags::SYMLINK_NOFOLLOW).expect("it is there");
            assert_eq!((stat.st_uid, stat.st_gid), (DAEMON, DAEMON));
            let mut text = String::new();
            open(&view, "own", OFlags::RDONLY).expect("control").read_to_string(&mut text).expect("text");
            assert_eq!(text, "theirs");
            // Not even a link to what lies beside it.
            for name in ["link", "near", "root/etc/passwd"] {
                let refused = open(&view, name, OFlags::RDONLY).expect_err("a link leads somewhere");
                assert_eq!(refused, rustix::io::Errno::LOOP, "{name}");
            }
            let flags = rustix::fs::fstatvfs(&view).expect("a file system").f_flag;
            let wanted = StatVfsMountFlags::NOSUID | StatVfsMountFlags::NODEV | StatVfsMountFlags::NOEXEC;
            assert!(flags.contains(wanted), "{flags:?}");
            // Above its root there is nothing.
            let above = rustix::fs::statat(&view, "..", AtFlags::empty()).expect("a folder");
            let root = rustix::fs::fstat(&view).expect("a folder");
            let is_same = (above.st_ino, above.st_dev) == (root.st_ino, root.st_dev);
            let is_own_folder = FileType::from_raw_mode(above.st_mode) == FileType::Directory
                && above.st_uid == 0
                && rustix::fs::statat(&view, "../own", AtFlags::empty()).is_err();
            assert!(is_same || is_own_folder);
            drop(guest);
        }
        assert_eq!(stand.delete_space(space), 0);
        let left = fs::read_dir(stand.dir.join("daemon/views")).expect("the launcher's").count();
        assert_eq!(left, 0, "a view of a space that is gone");
    }
}

#[test]
fn a_space_in_memory_is_bounded_is_nobody_elses_and_is_gone_when_it_is_deleted() {
    let stand = stand_with_views!();
    let (first, second) = (SpaceId::transient(1), SpaceId::transient(2));
    let mut guest = stand.guest(viewed(plan(first)));
    let full = guest.say(
        "import errno\n\
         try:\n    \
             with open('/mnt/data/x', 'wb', 0) as file:\n        \
                 for _ in range(64): file.write(b'x' * (1 << 20))\n    \
             print('no')\n\
         except OSError as error: print(errno.errorcode[error.errno])",
    );
    assert!(full == "ENOSPC" || full == "EFBIG", "{full}");
    let mut other = stand.guest(viewed(plan(second)));
    assert_eq!(other.say("import os; print(os.listdir('/mnt/data'))"), "[]");
    // What was opened before stays; the name is nobody's any more.
    let view = guest.view.take().expect("it was asked for");
    drop(guest);
    assert_eq!(stand.delete_space(first), 0);
    let mut again = stand.guest(viewed(plan(first)));
    assert_eq!(again.say("import os; print(os.listdir('/mnt/data'))"), "[]");
    assert!(open(&view, "x", OFlags::RDONLY).is_ok(), "control: this is the old one");
    assert!(!fs::exists(stand.dir.join("launcher/spaces/8000000000000001.img")).expect("our own"));
}

#[test]
fn what_the_daemon_puts_there_is_the_guests() {
    let stand = stand_with_views!();
    let space = SpaceId::transient(3);
    let mut guest = stand.guest(viewed(plan(space)));
    let view = guest.view.take().expect("it was asked for");
    // As the daemon's account: root's own id is none of the map's.
    let put = std::thread::spawn(move || {
        // Of this thread alone, as the kernel has it.
        // SAFETY: two numbers; it changes which files this thread's next calls may touch, and nothing else.
        unsafe { libc::syscall(libc::SYS_setfsgid, DAEMON) };
        // SAFETY: as above.
        unsafe { libc::syscall(libc::SYS_setfsuid, DAEMON) };
        let flags = OFlags::WRONLY | OFlags::CREATE | OFlags::EXCL;
        open(&view, "in.txt", flags)
            .and_then(|mut file| file.write_all(b"put").map_err(|_| rustix::io::Errno::IO))
    });
    put.join().expect("no panic").expect("the workspace is its own");
    assert_eq!(
        guest.say(
            "import os\n\
             stat = os.stat('/mnt/data/in.txt')\n\
             open('/mnt/data/in.txt', 'a').write('!')\n\
             print(stat.st_uid == os.getuid(), open('/mnt/data/in.txt').read())"
        ),
        "True put!"
    );
}

/// A view keeps its image mounted, whatever has become of who made it: that space waits, and nobody with it.
#[test]
fn a_space_that_somebody_still_holds_keeps_nobody_else_waiting() {
    const LONG: Duration = Duration::from_secs(45);
    let state = fresh_dir();
    let start = || {
        Stand::start(|settings| {
            settings.state_dir = state.join("launcher");
            settings.views = Some(ViewSettings { dir: state.join("views"), uid: DAEMON, gid: DAEMON });
            settings.zygotes_off = true;
            settings.shells_ready = 0;
        })
    };
    let (held, other) = (fresh_space(), fresh_space());
    let finished = (|| -> Result<(), String> {
        let stand = start()?;
        let mut guest = stand.guest(viewed(strict(held)));
        guest.say("open('/mnt/data/kept', 'w').write('still here')");
        let view = guest.view.take().expect("it was asked for");
        drop(guest);
        stand.finish();
        let stand = start()?;
        // Nobody lets go: it is told, and not for ever.
        let busy = Trouble { step: Step::SpaceOpen, errno: rustix::io::Errno::BUSY.raw_os_error() };
        assert_eq!(stand.launch(strict(held)).err(), Some(busy));
        {
            let mut seat = stand.seat();
            let asked = [held, other].map(|space| {
                let seq = seat.next_seq();
                seat.send(&Request::Launch { seq, plan: strict(space) }.encode());
                seq
            });
            let answered = |seat: &mut Seat| match seat.answer(LONG) {
                Some((Reply::Launched { seq, .. }, _)) => seq,
                answer => panic!("{answer:?}; the launcher's log:\n{}", stand.log()),
            };
            assert_eq!(answered(&mut seat), asked[1], "the other one waited for it");
            // The one that waits comes when it can.
            drop(view);
            assert_eq!(answered(&mut seat), asked[0]);
        }
        let mut guest = stand.guest(strict(held));
        assert_eq!(guest.say("print(open('/mnt/data/kept').read())"), "still here");
        Ok(())
    })();
    let _ = fs::remove_dir_all(&state);
    if let Err(reason) = finished {
        skip(&reason);
    }
}
