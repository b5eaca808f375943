//! Shells: a sandbox without its interpreter.
//!
//! ```text
//! start ── clone, maps, cgroup, trees ──▶ init builds its mounts ── finish: namespaces, ruleset ──▶ ready
//! ```
//!
//! Runs in the launcher with all its privileges. The init it starts has none over the host.

use std::fs::{self, File};
use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::time::Duration;

use nix::sched::{CloneFlags, setns};
use nix::unistd::{Pid, Uid, setresuid};
use rustix::net::RecvFlags;

use crate::launcher::bare;
use crate::launcher::cgroup::Leaf;
use crate::launcher::husk::Husk;
use crate::launcher::plan::{End, SpaceId, Step};
use crate::launcher::posture::Shape;
use crate::launcher::rules::Rules;
use crate::launcher::spaces::{SpaceLimits, Spaces};
use crate::launcher::wire::{self, STATUS_BYTES, Setup};
use crate::sys::{packet, process, raw};

/// A step that failed in the launcher or in a child.
#[derive(Debug)]
pub struct StepError {
    pub step: Step,
    pub source: io::Error,
}

impl std::fmt::Display for StepError {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "{}: {}", self.step, self.source)
    }
}

/// Names the step of a fallible call.
pub trait AtStep<T> {
    fn at(self, step: Step) -> Result<T, StepError>;
}

impl<T, E: Into<io::Error>> AtStep<T> for Result<T, E> {
    fn at(self, step: Step) -> Result<T, StepError> {
        self.map_err(|error| StepError { step, source: error.into() })
    }
}

/// What every shell is made of.
#[derive(Debug)]
pub struct Maker {
    /// Where shells with namespaces are made; `None` where there can be none.
    pub yard: Option<Yard>,
    /// What shells without namespaces see of the host.
    pub ground: bare::Ground,
    /// Init as a sealed memfd.
    pub init: OwnedFd,
    pub shm: SpaceLimits,
}

/// The mount namespaces that a shell with namespaces needs.
#[derive(Debug)]
pub struct Yard {
    /// The launcher's own, to come back to.
    pub home: OwnedFd,
    /// The template's.
    pub template: OwnedFd,
}

/// A sandbox without its interpreter, or on the way to be one.
#[derive(Debug)]
pub struct Shell {
    pub space: SpaceId,
    /// Uid that owns the user namespace: the zygote's, or 0 for exec'd interpreters.
    pub owner: u32,
    pub pid: Pid,
    pub pidfd: OwnedFd,
    /// Init's end of life: closing this ends it.
    pub socket: OwnedFd,
    pub leaf: Leaf,
    /// First id of the leased block.
    pub block: u32,
    /// In the order of [`Rules::namespaces`]; empty until finished.
    pub namespaces: Vec<OwnedFd>,
    /// Their inode numbers.
    pub inodes: Vec<u64>,
    pub ruleset: Option<OwnedFd>,
    /// No pid namespace holds its processes together.
    pub bare: bool,
    /// What the next sandbox of this space may take over. The id maps are written where one was taken over.
    pub husk: Option<Husk>,
}

/// A start that failed, and what it leaves to be cleared away by whoever reaps.
#[derive(Debug)]
pub struct NotStarted {
    pub error: StepError,
    pub left: Left,
}

#[derive(Debug)]
pub enum Left {
    /// No process came to be: the group is empty.
    Group(Leaf),
    /// Its init has been killed; until that is reaped its ids and its group are in use.
    Dying(Box<Shell>),
}

/// What a shell has of its own before it is made.
#[derive(Debug)]
pub struct Lot {
    /// First id of its block.
    pub block: u32,
    pub leaf: Leaf,
    /// Of that very block, where an earlier sandbox left one.
    pub husk: Option<Husk>,
}

impl Maker {
    /// Starts a shell's init and hands it what it needs. The space must have been entered.
    pub fn start(
        &self,
        rules: &Rules,
        spaces: &Spaces,
        space: SpaceId,
        owner: u32,
        lot: Lot,
    ) -> Result<Shell, NotStarted> {
        let Lot { block, leaf, husk } = lot;
        let cloned = packet::pair().and_then(|(ours, theirs)| {
            let (pid, pidfd) = self.clone_init(rules.shape, owner, theirs.as_fd(), husk.as_ref())?;
            Ok((ours, pid, pidfd))
        });
        let (ours, pid, pidfd) = match cloned.at(Step::Clone) {
            Ok(cloned) => cloned,
            Err(error) => return Err(NotStarted { error, left: Left::Group(leaf) }),
        };
        let mut shell = Shell {
            space,
            owner,
            pid,
            pidfd,
            socket: ours,
            leaf,
            block,
            namespaces: Vec::new(),
            inodes: Vec::new(),
            ruleset: None,
            bare: rules.shape == Shape::Bare,
            husk,
        };
        let equipped = match rules.shape {
            Shape::Bare => self.equip_bare(rules, spaces, &mut shell),
            _ => self.equip(rules, spaces, &shell),
        };
        match equipped {
            Ok(()) => Ok(shell),
            Err(error) => {
                shell.kill();
                Err(NotStarted { error, left: Left::Dying(Box::new(shell)) })
            }
        }
    }

    /// Clones into fresh namespaces, from inside the template's mount namespace and with the owner's uid as
    /// effective one: the kernel makes that uid the owner of the user namespace, so the owner's forks may
    /// enter it, and our CAP_SYS_ADMIN makes it possible where ordinary accounts may not create one.
    ///
    /// With a husk, into its two namespaces and the others fresh.
    fn clone_init(
        &self,
        shape: Shape,
        owner: u32,
        socket: BorrowedFd<'_>,
        husk: Option<&Husk>,
    ) -> io::Result<(Pid, OwnedFd)> {
        let yard = match (shape, &self.yard) {
            (Shape::Bare, _) => return process::start_init(0, socket, self.init.as_fd()),
            (_, Some(yard)) => yard,
            (_, None) => return Err(io::Error::from(io::ErrorKind::Unsupported)),
        };
        let user = if shape == Shape::UserNamespace { raw::CLONE_NEWUSER } else { 0 };
        let always = raw::CLONE_NEWNS | raw::CLONE_NEWPID | raw::CLONE_NEWIPC | raw::CLONE_NEWUTS;
        let fresh = always | user | raw::CLONE_NEWNET;
        let init = self.init.as_fd();
        setns(&yard.template, CloneFlags::CLONE_NEWNS)?;
        let started = match husk {
            Some(husk) => {
                let started =
                    process::start_init_inside(husk.user.as_fd(), husk.net.as_fd(), always, socket, init);
                // Its memory was ours for a moment, and a change of user namespace is one of identity.
                nix::sys::prctl::set_dumpable(false)?;
                started
            }
            None => with_uid(owner, || process::start_init(fresh, socket, init)),
        };
        // Never go on in the template: everything else here means the launcher's own tree.
        setns(&yard.home, CloneFlags::CLONE_NEWNS).expect("the launcher may return to its own namespace");
        started
    }

    fn equip(&self, rules: &Rules, spaces: &Spaces, shell: &Shell) -> Result<(), StepError> {
        let pid = shell.pid;
        if rules.shape == Shape::UserNamespace && shell.husk.is_none() {
            let map = rules.id_map(shell.block);
            write_map(pid, "uid_map", &map).at(Step::IdMaps)?;
            write_map(pid, "gid_map", &map).at(Step::IdMaps)?;
        }
        shell.leaf.place(pid.as_raw()).at(Step::Cgroup)?;
        // The shell's own user namespace is the id map: what inside is `sandbox` owns the files on disk.
        let user = File::open(format!("/proc/{pid}/ns/user")).at(Step::SpaceMount)?;
        let mapped = rules.own_ids && !rules.ids_on_disk();
        let trees = spaces.trees(shell.space, mapped.then_some(user.as_fd())).at(Step::SpaceMount)?;
        let trees = trees.each_ref().map(AsFd::as_fd);
        let setup = self.setup(rules, shell.block);
        packet::send(&shell.socket, wire::bytes_of(&setup), &trees).at(Step::InitExec)
    }

    fn equip_bare(&self, rules: &Rules, spaces: &Spaces, shell: &mut Shell) -> Result<(), StepError> {
        shell.leaf.place(shell.pid.as_raw()).at(Step::Cgroup)?;
        let ruleset = bare::ruleset(rules, &self.ground, spaces, shell.space).at(Step::InitRuleset)?;
        shell.ruleset = Some(ruleset);
        let setup = self.setup(rules, shell.block);
        packet::send(&shell.socket, wire::bytes_of(&setup), &[self.ground.filters.as_fd()]).at(Step::InitExec)
    }

    fn setup(&self, rules: &Rules, block: u32) -> Setup {
        let inside = wire::SETUP_SPACE | wire::SETUP_CGROUP;
        let flags = match (rules.shape, rules.own_ids) {
            (Shape::UserNamespace, true) => inside | wire::SETUP_USER | wire::SETUP_ROOT,
            (Shape::UserNamespace, false) => inside | wire::SETUP_USER,
            (Shape::Namespaces, _) => inside | wire::SETUP_OWN_ID,
            (Shape::Bare, true) => wire::SETUP_BARE | wire::SETUP_OWN_ID,
            (Shape::Bare, false) => wire::SETUP_BARE,
        };
        let mut setup = Setup {
            magic: wire::SETUP_MAGIC,
            flags,
            shm_bytes: self.shm.bytes,
            shm_inodes: self.shm.inodes,
            inotify_instances: rules.inotify_instances,
            inotify_watches: rules.inotify_watches,
            handled_fs: rules.landlock_handled,
            rule_count: 0,
            filter_words: rules.init.len() as u32,
            init_id: block,
            _pad: 0,
            rules: [wire::Rule { rights: 0, path: [0; wire::RULE_PATH_BYTES] }; wire::RULES_MAX],
            filter: [0; wire::INIT_FILTER_WORDS],
        };
        setup.filter[..rules.init.len()].copy_from_slice(&rules.init);
        for (slot, (path, rights)) in setup.rules.iter_mut().zip(&rules.landlock) {
            slot.rights = *rights;
            slot.path[..path.len()].copy_from_slice(path.as_bytes());
            setup.rule_count += 1;
        }
        setup
    }
}

/// For a moment within its exec an init counts as not dumpable, as we are, and its files in /proc as root's of
/// the host: without root's rights the write is refused until that has passed.
fn write_map(pid: Pid, file: &str, map: &str) -> io::Result<()> {
    const TRIES: u32 = 200;
    const PAUSE: Duration = Duration::from_micros(200);
    let path = format!("/proc/{pid}/{file}");
    for _ in 0..TRIES {
        match fs::write(&path, map) {
            Err(error) if error.kind() == io::ErrorKind::PermissionDenied => std::thread::sleep(PAUSE),
            other => return other,
        }
    }
    fs::write(&path, map)
}

impl Shell {
    /// Reads init's report and takes what a launch needs. The socket is readable.
    pub fn finish(&mut self, rules: &Rules) -> Result<(), StepError> {
        let mut report = [0_u8; STATUS_BYTES];
        let (length, descriptors) =
            packet::receive(&self.socket, &mut report, RecvFlags::empty()).at(Step::InitExec)?;
        if length != STATUS_BYTES {
            return Err(io::Error::from(io::ErrorKind::UnexpectedEof)).at(Step::InitExec);
        }
        if let Some((step, source)) = failure(&report) {
            return Err(StepError { step, source });
        }
        if !self.bare {
            self.ruleset = descriptors.into_iter().next();
        }
        for (_, name) in rules.namespaces() {
            let namespace = File::open(format!("/proc/{}/ns/{name}", self.pid)).at(Step::Namespaces)?;
            self.inodes.push(rustix::fs::fstat(&namespace).at(Step::Namespaces)?.st_ino);
            self.namespaces.push(namespace.into());
        }
        Ok(())
    }

    /// What the init of a bare shell says of its guest's end; `None` at its own end.
    pub fn read_guest_end(&self) -> Option<End> {
        let mut report = [0_u8; STATUS_BYTES];
        let (length, _) = packet::receive(&self.socket, &mut report, RecvFlags::DONTWAIT).ok()?;
        let number = i32::from_le_bytes([report[4], report[5], report[6], report[7]]) as u8;
        match (length, report[0]) {
            (STATUS_BYTES, wire::GUEST_EXITED) => Some(End::Exited(number)),
            (STATUS_BYTES, wire::GUEST_SIGNALED) => Some(End::Signaled(number)),
            _ => None,
        }
    }

    /// An interpreter has moved in: what only a move needs is closed.
    pub fn furnish(&mut self) {
        let namespaces = <[OwnedFd; wire::NAMESPACES.len()]>::try_from(std::mem::take(&mut self.namespaces));
        // All of them, or there is no user namespace to pass on.
        if let Ok([user, _, net, ..]) = namespaces {
            self.husk = Some(Husk { block: self.block, user, net });
        }
        self.ruleset = None;
        self.leaf.join.clear();
    }

    /// Ends init, and with it every process of the sandbox.
    pub fn kill(&self) {
        if self.bare {
            bare::kill_tree(self.pid);
        }
        // Gone already is what we want.
        let _ = rustix::process::pidfd_send_signal(&self.pidfd, rustix::process::Signal::KILL);
        self.leaf.kill();
    }
}

/// The failure in a child's report, if it is one.
pub fn failure(report: &[u8; STATUS_BYTES]) -> Option<(Step, io::Error)> {
    let errno = i32::from_le_bytes([report[4], report[5], report[6], report[7]]);
    match report[0] {
        0 => None,
        byte => {
            let step = Step::from_byte(byte).unwrap_or(Step::InitExec);
            Some((step, io::Error::from_raw_os_error(errno.clamp(0, 4095))))
        }
    }
}

/// Runs `action` with another real and effective uid but our capabilities in force. The real one as well:
/// before Linux 6.16 an exec under an effective uid that is not the real one counts as set-uid and takes the
/// ambient capabilities that an init starts with. A signal that the uid's owner sends us meanwhile is
/// `serve.rs`'s to refuse.
fn with_uid<T>(uid: u32, action: impl FnOnce() -> io::Result<T>) -> io::Result<T> {
    if uid == 0 {
        return action();
    }
    let (root, other) = (Uid::from_raw(0), Uid::from_raw(uid));
    setresuid(other, other, root)?;
    // A change of identity makes a process what the host's fs.suid_dumpable says: for this moment as well, when the
    // zygote has our uid, and after it.
    let hidden = nix::sys::prctl::set_dumpable(false).map_err(io::Error::from);
    let result = hidden
        .and_then(|()| {
            caps::raise(None, caps::CapSet::Effective, caps::Capability::CAP_SYS_ADMIN)
                .map_err(io::Error::other)
        })
        .and_then(|()| action());
    setresuid(root, root, root).expect("the saved uid is root's");
    nix::sys::prctl::set_dumpable(false)?;
    result
}
