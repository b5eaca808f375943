//! Where a path leads, as the guest would see it, and whether that is in the space.
//!
//! Guests change the tree while it is walked. So a path is walked once, to the folder that holds its last name,
//! and everything after works on that folder's descriptor and one name, without following a link again.
#![forbid(unsafe_code)]

use std::os::fd::{AsFd, OwnedFd};
use std::path::Path;

use rustix::fs::{
    AtFlags, Mode, OFlags, ResolveFlags, Stat, StatxFlags, fstat, mkdirat, openat, openat2, readlinkat, statx,
};
use rustix::io::Errno;

use super::Outcome;
use crate::files::wire::{Fault, FaultKind, PATH_BYTES_MAX};

/// Links that a path's last name may lead through, as the kernel counts them.
const LINKS_MAX: usize = 40;
/// How far up a folder's place is looked for where mounts do not tell it.
const LEVELS_MAX: usize = 20_000;

/// The guest's view of the file system.
pub(super) struct View {
    root: OwnedFd,
    home: OwnedFd,
    trees: Vec<Tree>,
    /// Whether the trees are mounts of their own, so that a mount's number tells what lies in them.
    by_mount: bool,
}

#[derive(Copy, Clone, Debug, PartialEq, Eq)]
struct Tree {
    device: u64,
    inode: u64,
    mount: u64,
}

/// A name in a folder. The name is `.` where a path is a folder by its form.
#[derive(Debug)]
pub(super) struct Spot {
    pub(super) dir: OwnedFd,
    pub(super) name: Vec<u8>,
}

impl View {
    /// `home` is where relative paths begin; `trees` are the space, of which those count that exist. In a root of
    /// the sandbox's own each is a mount of its own.
    pub(super) fn new(home: &Path, trees: &[&Path], has_own_root: bool) -> std::io::Result<View> {
        let flags = OFlags::PATH | OFlags::DIRECTORY | OFlags::CLOEXEC;
        let open = |path: &Path| rustix::fs::open(path, flags, Mode::empty());
        let root = open(Path::new("/"))?;
        let home = open(home)?;
        let trees: Vec<Tree> =
            trees.iter().filter_map(|path| open(path).ok()).filter_map(|tree| Tree::of(&tree).ok()).collect();
        let outside = Tree::of(&root).map_err(|_| std::io::Error::from(std::io::ErrorKind::Unsupported))?;
        let by_mount =
            has_own_root && !trees.is_empty() && trees.iter().all(|tree| tree.mount != outside.mount);
        Ok(View { root, home, trees, by_mount })
    }

    /// A handle on the home folder.
    pub(super) fn home(&self) -> Outcome<OwnedFd> {
        Ok(self.home.try_clone()?)
    }

    /// Walks to the last name of `path`, through the links that it may be.
    pub(super) fn find(&self, path: &str) -> Outcome<Spot> {
        self.walk(path, false)
    }

    /// The same, and makes the folders on the way that are missing.
    pub(super) fn find_making_parents(&self, path: &str) -> Outcome<Spot> {
        self.walk(path, true)
    }

    /// The folder a path names.
    pub(super) fn find_dir(&self, path: &str) -> Outcome<OwnedFd> {
        let spot = self.find(path)?;
        let dir = open_dir(&spot.dir, &spot.name)?;
        self.require(&dir)?;
        Ok(dir)
    }

    /// The name itself, where a link is not followed: for what is moved, removed or looked at.
    pub(super) fn find_name(&self, path: &str) -> Outcome<Spot> {
        self.name(path, false)
    }

    /// The same for a name that something is moved to.
    pub(super) fn find_name_making_parents(&self, path: &str) -> Outcome<Spot> {
        self.name(path, true)
    }

    fn name(&self, path: &str, make: bool) -> Outcome<Spot> {
        let path = bytes_of(path)?;
        let trimmed: &[u8] = match path.iter().rposition(|byte| *byte != b'/') {
            Some(last) => &path[..=last],
            None => return Ok(Spot { dir: self.root.try_clone()?, name: b".".to_vec() }),
        };
        let (parent, name) = match trimmed.iter().rposition(|byte| *byte == b'/') {
            Some(slash) => (&trimmed[..=slash], &trimmed[slash + 1..]),
            None => (&b""[..], trimmed),
        };
        if matches!(name, b"." | b"..") {
            return Err(Fault::errno(Errno::INVAL));
        }
        let mut dir =
            if parent.starts_with(b"/") { self.root.try_clone()? } else { self.home.try_clone()? };
        for component in components(parent) {
            dir = self.descend(&dir, component, make)?;
        }
        Ok(Spot { dir, name: name.to_vec() })
    }

    fn walk(&self, path: &str, make: bool) -> Outcome<Spot> {
        let path = bytes_of(path)?;
        let mut dir = if path.starts_with(b"/") { self.root.try_clone()? } else { self.home.try_clone()? };
        let mut ahead: Vec<Vec<u8>> = components(&path).rev().map(<[u8]>::to_vec).collect();
        let mut links = 0;
        while let Some(name) = ahead.pop() {
            if !ahead.is_empty() || name == b".." {
                dir = self.descend(&dir, &name, make)?;
                continue;
            }
            let Ok(target) = readlinkat(&dir, &name[..], Vec::new()) else { return Ok(Spot { dir, name }) };
            links += 1;
            if links > LINKS_MAX {
                return Err(Fault::errno(Errno::LOOP));
            }
            let target = target.as_bytes();
            if target.starts_with(b"/") {
                dir = self.root.try_clone()?;
            }
            ahead = components(target).rev().map(<[u8]>::to_vec).collect();
        }
        Ok(Spot { dir, name: b".".to_vec() })
    }

    /// One component further; a folder that is missing is made, if `make` says so.
    fn descend(&self, dir: &OwnedFd, name: &[u8], make: bool) -> Outcome<OwnedFd> {
        match step(dir, name) {
            Err(Errno::NOENT) if make => {
                self.require(dir)?;
                made(mkdirat(dir, name, Mode::from(0o777)))?;
                Ok(step(dir, name)?)
            }
            stepped => Ok(stepped?),
        }
    }

    /// Refuses a folder that is not in the space.
    pub(super) fn require(&self, dir: &OwnedFd) -> Outcome<()> {
        if self.holds(dir)? { Ok(()) } else { Err(Fault::errno(Errno::ACCESS)) }
    }

    /// Refuses a file that is not in the space; `spot` is where it was opened.
    pub(super) fn require_file(&self, file: &OwnedFd, spot: &Spot) -> Outcome<()> {
        if self.by_mount { self.require(file) } else { self.require(&spot.dir) }
    }

    fn holds(&self, dir: &OwnedFd) -> Outcome<bool> {
        let here = Tree::of(dir)?;
        if self.by_mount {
            return Ok(self.trees.iter().any(|tree| tree.mount == here.mount));
        }
        let (mut here, mut at) = (here, dir.try_clone()?);
        for _ in 0..LEVELS_MAX {
            if self.trees.contains(&here) {
                return Ok(true);
            }
            at = match step(&at, b"..") {
                Ok(above) => above,
                Err(_) => return Ok(false),
            };
            let above = Tree::of(&at)?;
            if above == here {
                return Ok(false);
            }
            here = above;
        }
        Ok(false)
    }

    /// Whether `dir` is, or lies below, the folder `above`.
    pub(super) fn is_below(&self, dir: &OwnedFd, above: &OwnedFd) -> Outcome<bool> {
        let wanted = Tree::of(above)?;
        let (mut here, mut at) = (Tree::of(dir)?, dir.try_clone()?);
        for _ in 0..LEVELS_MAX {
            if here == wanted {
                return Ok(true);
            }
            at = step(&at, b"..")?;
            let above = Tree::of(&at)?;
            if above == here {
                return Ok(false);
            }
            here = above;
        }
        Ok(false)
    }

    /// Opens the file at `spot`: in the space, and a regular one.
    pub(super) fn open(&self, spot: &Spot, flags: OFlags) -> Outcome<(OwnedFd, Stat)> {
        let file = open_name(spot.dir.as_fd(), &spot.name, flags)?;
        let stat = fstat(&file)?;
        match rustix::fs::FileType::from_raw_mode(stat.st_mode) {
            rustix::fs::FileType::RegularFile => {}
            rustix::fs::FileType::Directory => return Err(Fault::errno(Errno::ISDIR)),
            _ => return Err(not_regular()),
        }
        self.require_file(&file, spot)?;
        Ok((file, stat))
    }
}

impl Tree {
    fn of(fd: &OwnedFd) -> Outcome<Tree> {
        let wanted = StatxFlags::BASIC_STATS | StatxFlags::MNT_ID;
        let found = statx(fd, "", AtFlags::EMPTY_PATH, wanted)?;
        let device = u64::from(found.stx_dev_major) << 32 | u64::from(found.stx_dev_minor);
        Ok(Tree { device, inode: found.stx_ino, mount: found.stx_mnt_id })
    }
}

/// Opens a name without following it, without waiting and without becoming anybody's terminal.
pub(super) fn open_name(
    dir: std::os::fd::BorrowedFd<'_>,
    name: &[u8],
    flags: OFlags,
) -> Result<OwnedFd, Errno> {
    let safe = OFlags::NOFOLLOW | OFlags::NONBLOCK | OFlags::NOCTTY | OFlags::CLOEXEC;
    openat(dir, name, flags | safe, Mode::from(0o666))
}

/// Opens a folder to read it; a link to one is none.
pub(super) fn open_dir(dir: &OwnedFd, name: &[u8]) -> Result<OwnedFd, Errno> {
    open_name(dir.as_fd(), name, OFlags::RDONLY | OFlags::DIRECTORY)
}

/// A handle on a name, good for looking at and for nothing else.
pub(super) fn path_only(dir: std::os::fd::BorrowedFd<'_>, name: &[u8]) -> Result<OwnedFd, Errno> {
    openat(dir, name, OFlags::PATH | OFlags::NOFOLLOW | OFlags::CLOEXEC, Mode::empty())
}

/// One component further, through whatever link it is, but not through those of `/proc` that lead anywhere.
fn step(dir: &OwnedFd, component: &[u8]) -> Result<OwnedFd, Errno> {
    let flags = OFlags::PATH | OFlags::DIRECTORY | OFlags::CLOEXEC;
    openat2(dir, component, flags, Mode::empty(), ResolveFlags::NO_MAGICLINKS)
}

/// A folder that somebody else made meanwhile is as good.
pub(super) fn made(result: Result<(), Errno>) -> Result<bool, Errno> {
    match result {
        Ok(()) => Ok(true),
        Err(Errno::EXIST) => Ok(false),
        Err(error) => Err(error),
    }
}

pub(super) fn not_regular() -> Fault {
    Fault::text(FaultKind::InvalidTarget, "not a regular file")
}

fn components(path: &[u8]) -> impl DoubleEndedIterator<Item = &[u8]> {
    path.split(|byte| *byte == b'/').filter(|part| !matches!(*part, b"" | b"."))
}

fn bytes_of(path: &str) -> Outcome<Vec<u8>> {
    let bytes = crate::files::names::read(path);
    let wrong = match &bytes {
        _ if bytes.is_empty() => "path is empty",
        _ if bytes.contains(&0) => "path holds a NUL byte",
        _ if bytes.len() > PATH_BYTES_MAX => "path is longer than 65536 bytes",
        _ => return Ok(bytes),
    };
    Err(Fault::text(FaultKind::InvalidPath, wrong))
}
