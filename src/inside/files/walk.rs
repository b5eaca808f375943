//! Walks a tree that guests made and go on changing: without recursion, with few descriptors, never through a link.
#![forbid(unsafe_code)]

use std::mem::MaybeUninit;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};

use rustix::fs::{FileType, RawDir, fstat};
use rustix::io::Errno;

use super::place::{open_dir, open_name};
use super::{Clock, Outcome};
use crate::files::wire::{Fault, FaultKind};

/// Folders that a walk keeps open; those above them are come back to by `..`.
const OPEN_MAX: usize = 64;
/// Names that a walk reads before it gives up.
const NAMES_MAX: usize = 1_000_000;
/// Bytes that one call reads of a folder.
const READ_BYTES: usize = 32 * 1024;

/// One step of a walk.
pub(super) enum Step<'a> {
    /// A name, and the folder that holds it.
    Entry { dir: BorrowedFd<'a>, name: &'a [u8], kind: FileType },
    /// All that lies in the folder `name` has been seen; `dir` holds it.
    Left { dir: BorrowedFd<'a>, name: &'a [u8] },
}

/// What to do about an entry that is a folder.
#[derive(Copy, Clone, Debug, PartialEq, Eq)]
pub(super) enum Enter {
    Yes,
    No,
}

struct Level {
    /// `None` where it was closed to keep descriptors few.
    dir: Option<OwnedFd>,
    id: (u64, u64),
    names: Vec<(Vec<u8>, FileType)>,
    /// The name by which the level above was left for this one.
    name: Vec<u8>,
}

/// A walk below one folder.
pub(super) struct Walk<'a> {
    levels: Vec<Level>,
    /// Names from the top to here, with slashes.
    path: Vec<u8>,
    names_left: usize,
    clock: &'a Clock,
    /// Whether a folder that may not be read is passed over.
    tolerant: bool,
    /// Whether something was passed over for want of room.
    pub(super) cut: bool,
}

impl<'a> Walk<'a> {
    /// Begins at `top`, an open folder. A `tolerant` walk passes over folders it may not enter.
    pub(super) fn new(top: OwnedFd, clock: &'a Clock, tolerant: bool) -> Outcome<Walk<'a>> {
        let mut walk =
            Walk { levels: Vec::new(), path: Vec::new(), names_left: NAMES_MAX, clock, tolerant, cut: false };
        walk.push(top, Vec::new())?;
        Ok(walk)
    }

    /// Levels below the top: 1 for what lies in it.
    pub(super) fn depth(&self) -> usize {
        self.levels.len()
    }

    /// The path from the top to the entry that was seen last.
    pub(super) fn path(&self) -> &[u8] {
        &self.path
    }

    /// Calls `see` for each entry, in the order of names, until it fails or says to stop.
    pub(super) fn run(
        &mut self,
        mut see: impl FnMut(&mut Walk<'a>, Step<'_>) -> Outcome<Option<Enter>>,
    ) -> Outcome<()> {
        loop {
            self.clock.check()?;
            let Some(level) = self.levels.last_mut() else { return Ok(()) };
            let Some((name, kind)) = level.names.pop() else {
                if !self.leave(&mut see)? {
                    return Ok(());
                }
                continue;
            };
            let dir = level.dir.take().expect("the level that is walked is open");
            let before = self.path.len();
            if before > 0 {
                self.path.push(b'/');
            }
            self.path.extend_from_slice(&name);
            let entered = see(self, Step::Entry { dir: dir.as_fd(), name: &name, kind });
            let inner = match entered {
                Ok(Some(Enter::Yes)) if kind == FileType::Directory => Some(open_dir(&dir, &name)),
                Ok(Some(_)) => None,
                Ok(None) => return Ok(()),
                Err(fault) => return Err(fault),
            };
            self.levels.last_mut().expect("it is still there").dir = Some(dir);
            match inner {
                Some(Ok(inner)) => self.push(inner, name)?,
                // Gone or replaced since its name was read, or not for us.
                Some(Err(Errno::NOENT | Errno::NOTDIR | Errno::LOOP)) => self.path.truncate(before),
                Some(Err(Errno::ACCESS)) if self.tolerant => self.path.truncate(before),
                Some(Err(error)) => return Err(error.into()),
                None => self.path.truncate(before),
            }
        }
    }

    fn push(&mut self, dir: OwnedFd, name: Vec<u8>) -> Outcome<()> {
        let stat = fstat(&dir)?;
        let mut names = self.names_of(&dir)?;
        names.sort_unstable_by(|one, other| other.0.cmp(&one.0));
        let id = (stat.st_dev, stat.st_ino);
        self.levels.push(Level { dir: Some(dir), id, names, name });
        if let Some(far) = self.levels.len().checked_sub(OPEN_MAX + 1) {
            self.levels[far].dir = None;
        }
        Ok(())
    }

    /// Goes up one level. False at the top.
    fn leave(
        &mut self,
        see: &mut impl FnMut(&mut Walk<'a>, Step<'_>) -> Outcome<Option<Enter>>,
    ) -> Outcome<bool> {
        let left = self.levels.pop().expect("there is a level");
        let Some(above) = self.levels.last_mut() else { return Ok(false) };
        let dir = match above.dir.take() {
            Some(dir) => dir,
            None => {
                let inner = left.dir.as_ref().expect("the level that is walked is open");
                let dir = open_name(inner.as_fd(), b"..", rustix::fs::OFlags::DIRECTORY)?;
                let stat = fstat(&dir)?;
                if (stat.st_dev, stat.st_ino) != above.id {
                    return Err(Fault::text(
                        FaultKind::InvalidTarget,
                        "the tree was moved while it was walked",
                    ));
                }
                dir
            }
        };
        drop(left.dir);
        let seen = see(self, Step::Left { dir: dir.as_fd(), name: &left.name })?;
        self.levels.last_mut().expect("it is still there").dir = Some(dir);
        let before = self.path.len() - left.name.len();
        self.path.truncate(before.saturating_sub(1));
        Ok(seen.is_some())
    }

    fn names_of(&mut self, dir: &OwnedFd) -> Outcome<Vec<(Vec<u8>, FileType)>> {
        let mut buffer = vec![MaybeUninit::uninit(); READ_BYTES];
        let mut names = Vec::new();
        let mut entries = RawDir::new(dir, &mut buffer);
        while let Some(entry) = entries.next() {
            let entry = match entry {
                Ok(entry) => entry,
                Err(Errno::NOENT) => break, // The folder was removed while it was read.
                Err(error) => return Err(error.into()),
            };
            let name = entry.file_name().to_bytes();
            if matches!(name, b"." | b"..") {
                continue;
            }
            if self.names_left == 0 {
                self.cut = true;
                break;
            }
            self.names_left -= 1;
            let kind = match entry.file_type() {
                FileType::Unknown => kind_of(dir, name),
                kind => kind,
            };
            names.push((name.to_vec(), kind));
            if names.len() % 1024 == 0 {
                self.clock.check()?;
            }
        }
        Ok(names)
    }
}

/// For file systems that do not tell it with the name.
fn kind_of(dir: &OwnedFd, name: &[u8]) -> FileType {
    rustix::fs::statat(dir, name, rustix::fs::AtFlags::SYMLINK_NOFOLLOW)
        .map_or(FileType::Unknown, |stat| FileType::from_raw_mode(stat.st_mode))
}
