//! Changing the tree: folders made, names copied, moved and removed.
#![forbid(unsafe_code)]

use std::fs::File;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};

use rustix::fs::{
    AtFlags, FileType, Mode, OFlags, RenameFlags, chmodat, fchmod, fstat, mkdirat, openat, readlinkat,
    renameat, renameat_with, statat, symlinkat, unlinkat,
};
use rustix::io::Errno;

use super::place::{Spot, View, made, open_dir, open_name, path_only};
use super::text::{Temporary, pour, temporary_name};
use super::walk::{Enter, Step, Walk};
use super::{Clock, Outcome};
use crate::files::wire::{Answer, Fault, FaultKind};

pub(super) fn mkdir(view: &View, path: &str, parents: bool) -> Outcome<Answer> {
    let spot = if parents { view.find_making_parents(path)? } else { view.find(path)? };
    if spot.name == b"." {
        // The path is a folder by its form, and it is there.
        return if parents { Ok(Answer::Made { created: false }) } else { Err(Fault::errno(Errno::EXIST)) };
    }
    if let Ok(stat) = statat(&spot.dir, &spot.name[..], AtFlags::SYMLINK_NOFOLLOW) {
        let is_directory = FileType::from_raw_mode(stat.st_mode) == FileType::Directory;
        let is_enough = parents && is_directory;
        return if is_enough { Ok(Answer::Made { created: false }) } else { Err(Fault::errno(Errno::EXIST)) };
    }
    view.require(&spot.dir)?;
    let created = made(mkdirat(&spot.dir, &spot.name[..], Mode::from(0o777)))?;
    if !created && !parents {
        return Err(Fault::errno(Errno::EXIST));
    }
    Ok(Answer::Made { created })
}

pub(super) fn delete(view: &View, clock: &Clock, path: &str, recursive: bool) -> Outcome<Answer> {
    let spot = view.find_name(path)?;
    // What is not there is missing wherever it would lie, as for those who only look.
    let stat = statat(&spot.dir, &spot.name[..], AtFlags::SYMLINK_NOFOLLOW)?;
    view.require(&spot.dir)?;
    let is_directory = FileType::from_raw_mode(stat.st_mode) == FileType::Directory;
    if !is_directory {
        unlinkat(&spot.dir, &spot.name[..], AtFlags::empty())?;
    } else if recursive {
        remove_tree(clock, &spot.dir, &spot.name)?;
    } else {
        unlinkat(&spot.dir, &spot.name[..], AtFlags::REMOVEDIR)?;
    }
    Ok(Answer::Deleted { is_directory })
}

/// Removes a folder and all below it, without recursion and without following a link.
pub(super) fn remove_tree(clock: &Clock, dir: &OwnedFd, name: &[u8]) -> Outcome<()> {
    let gone = |result: Result<(), Errno>| match result {
        Ok(()) | Err(Errno::NOENT) => Ok(()),
        Err(error) => Err(Fault::from(error)),
    };
    openable(dir.as_fd(), name);
    let top = open_dir(dir, name)?;
    Walk::new(top, clock, false)?.run(|_, step| {
        match step {
            Step::Entry { dir, name, kind: FileType::Directory } => openable(dir, name),
            Step::Entry { dir, name, .. } => gone(unlinkat(dir, name, AtFlags::empty()))?,
            Step::Left { dir, name } => gone(unlinkat(dir, name, AtFlags::REMOVEDIR))?,
        }
        Ok(Some(Enter::Yes))
    })?;
    gone(unlinkat(dir, name, AtFlags::REMOVEDIR))
}

/// Lets its owner into a folder that keeps everybody out. Where that is not allowed, the opening fails and says so.
fn openable(dir: BorrowedFd<'_>, name: &[u8]) {
    let inside = Mode::from(0o700);
    let Ok(stat) = statat(dir, name, AtFlags::SYMLINK_NOFOLLOW) else { return };
    if FileType::from_raw_mode(stat.st_mode) == FileType::Directory && stat.st_mode & 0o700 != 0o700 {
        // A guest that puts a link here changes the mode of another file of its own, as it could itself.
        let _ = chmodat(dir, name, inside, AtFlags::empty());
    }
}

pub(super) fn move_to(
    view: &View,
    clock: &Clock,
    source: &str,
    destination: &str,
    overwrite: bool,
) -> Outcome<Answer> {
    let from = view.find_name(source)?;
    statat(&from.dir, &from.name[..], AtFlags::SYMLINK_NOFOLLOW)?;
    view.require(&from.dir)?;
    let to = view.find_name_making_parents(destination)?;
    view.require(&to.dir)?;
    match rename(&from, &to, overwrite) {
        Err(Errno::XDEV) => {
            copy_between(view, clock, &from, &to, overwrite)?;
            let kind = statat(&from.dir, &from.name[..], AtFlags::SYMLINK_NOFOLLOW)?.st_mode;
            match FileType::from_raw_mode(kind) {
                FileType::Directory => remove_tree(clock, &from.dir, &from.name)?,
                _ => unlinkat(&from.dir, &from.name[..], AtFlags::empty())?,
            }
        }
        renamed => renamed?,
    }
    Ok(Answer::Moved)
}

fn rename(from: &Spot, to: &Spot, overwrite: bool) -> Result<(), Errno> {
    if overwrite {
        return renameat(&from.dir, &from.name[..], &to.dir, &to.name[..]);
    }
    match renameat_with(&from.dir, &from.name[..], &to.dir, &to.name[..], RenameFlags::NOREPLACE) {
        // A file system without this flag; or a folder into itself, which the plain call refuses too.
        Err(Errno::INVAL | Errno::NOSYS) => match statat(&to.dir, &to.name[..], AtFlags::SYMLINK_NOFOLLOW) {
            Ok(_) => Err(Errno::EXIST),
            Err(_) => renameat(&from.dir, &from.name[..], &to.dir, &to.name[..]),
        },
        renamed => renamed,
    }
}

#[derive(Default)]
struct Counted {
    files: u64,
    bytes: u64,
}

pub(super) fn copy(
    view: &View,
    clock: &Clock,
    source: &str,
    destination: &str,
    overwrite: bool,
) -> Outcome<Answer> {
    let from = view.find(source)?;
    let to = view.find_making_parents(destination)?;
    let Counted { files, bytes } = copy_between(view, clock, &from, &to, overwrite)?;
    Ok(Answer::Copied { files, bytes })
}

fn copy_between(view: &View, clock: &Clock, from: &Spot, to: &Spot, overwrite: bool) -> Outcome<Counted> {
    let there = statat(&to.dir, &to.name[..], AtFlags::SYMLINK_NOFOLLOW);
    if there.is_ok() && !overwrite {
        return Err(Fault::errno(Errno::EXIST));
    }
    let stat = statat(&from.dir, &from.name[..], AtFlags::SYMLINK_NOFOLLOW)?;
    match FileType::from_raw_mode(stat.st_mode) {
        FileType::Directory => copy_tree(view, clock, from, to),
        FileType::Symlink => {
            view.require(&to.dir)?;
            let target = readlinkat(&from.dir, &from.name[..], Vec::new())?;
            if there.is_ok() {
                unlinkat(&to.dir, &to.name[..], AtFlags::empty())?;
            }
            symlinkat(target.as_c_str(), &to.dir, &to.name[..])?;
            Ok(Counted { files: 1, bytes: 0 })
        }
        _ => {
            view.require(&to.dir)?;
            let bytes = copy_file(view, clock, from, to)?;
            Ok(Counted { files: 1, bytes })
        }
    }
}

fn copy_file(view: &View, clock: &Clock, from: &Spot, to: &Spot) -> Outcome<u64> {
    let (source, stat) = view.open(from, OFlags::RDONLY)?;
    let (mut temporary, mut file) = Temporary::file(&to.dir)?;
    let bytes = pour(&mut File::from(source), &mut file, clock)?;
    let is_new = statat(&to.dir, &to.name[..], AtFlags::SYMLINK_NOFOLLOW).is_err();
    temporary.put(&file, to)?;
    if is_new {
        fchmod(&file, Mode::from(stat.st_mode & 0o777))?;
    }
    Ok(bytes)
}

/// Copies a folder: as a whole where nothing was, else name by name into what is there.
fn copy_tree(view: &View, clock: &Clock, from: &Spot, to: &Spot) -> Outcome<Counted> {
    let top = open_dir(&from.dir, &from.name)?;
    view.require(&top)?;
    let into_itself =
        open_dir(&to.dir, &to.name).is_ok_and(|there| view.is_below(&there, &top).unwrap_or(true));
    if into_itself || view.is_below(&to.dir, &top)? {
        return Err(Fault::text(FaultKind::InvalidTarget, "a folder cannot be copied into itself"));
    }
    let mode = Mode::from(fstat(&top)?.st_mode & 0o777);
    let staging = Staging::of(view, to, temporary_name())?;
    let counted = copy_below(clock, top, &staging)?;
    fchmod(&staging.open()?, mode)?;
    staging.put(clock, to)?;
    Ok(counted)
}

/// A folder that is filled under a temporary name; removed when dropped before it is put in its place. It lies
/// beside where it will go, or in the folder that it will be joined with.
pub(super) struct Staging {
    dir: OwnedFd,
    name: String,
    /// The folder that is there.
    joins: Option<OwnedFd>,
    is_kept: bool,
}

impl Staging {
    pub(super) fn of(view: &View, to: &Spot, name: String) -> Outcome<Staging> {
        let (dir, joins) = match open_dir(&to.dir, &to.name) {
            Ok(there) => (there.try_clone()?, Some(there)),
            Err(Errno::NOENT) => (to.dir.try_clone()?, None),
            Err(error) => return Err(error.into()),
        };
        view.require(&dir)?;
        mkdirat(&dir, name.as_str(), Mode::from(0o700))?;
        Ok(Staging { dir, name, joins, is_kept: false })
    }

    pub(super) fn open(&self) -> Outcome<OwnedFd> {
        Ok(open_dir(&self.dir, self.name.as_bytes())?)
    }

    /// Renames it into place, or moves what it holds into the folder that is there. True for the first.
    pub(super) fn put(mut self, clock: &Clock, to: &Spot) -> Outcome<bool> {
        let from = Spot { dir: self.dir.try_clone()?, name: self.name.clone().into_bytes() };
        let there = match self.joins.take() {
            Some(there) => there,
            None => match rename(&from, to, false) {
                Ok(()) => {
                    self.is_kept = true;
                    return Ok(true);
                }
                // Somebody has made one meanwhile.
                Err(Errno::EXIST | Errno::NOTEMPTY) => open_dir(&to.dir, &to.name)?,
                Err(error) => return Err(error.into()),
            },
        };
        merge(clock, self.open()?, there)?;
        Ok(false)
    }
}

impl Drop for Staging {
    fn drop(&mut self) {
        if !self.is_kept {
            // A guest may have taken it away.
            let _ = remove_tree(&Clock::for_clearing(), &self.dir, self.name.as_bytes());
        }
    }
}

/// A folder that follows a walk, level by level, without following a link.
pub(super) struct Follower {
    /// From the top down.
    levels: Vec<OwnedFd>,
    /// Closed levels have their name only; they are opened again from the top.
    names: Vec<Vec<u8>>,
}

/// Levels that a follower keeps open.
const FOLLOWED_MAX: usize = 200;

impl Follower {
    pub(super) fn new(top: OwnedFd) -> Follower {
        Follower { levels: vec![top], names: Vec::new() }
    }

    pub(super) fn dir(&self) -> &OwnedFd {
        self.levels.last().expect("the top is never left")
    }

    /// Into a folder of this name, made when it is missing.
    pub(super) fn enter(&mut self, name: &[u8]) -> Outcome<()> {
        made(mkdirat(self.dir(), name, Mode::from(0o777)))?;
        self.push(open_dir(self.dir(), name)?);
        self.names.push(name.to_vec());
        Ok(())
    }

    pub(super) fn leave(&mut self) -> Outcome<()> {
        self.levels.pop();
        self.names.pop();
        if self.levels.len() == 1 && !self.names.is_empty() {
            for at in 0..self.names.len() {
                self.push(open_dir(self.dir(), &self.names[at])?);
            }
        }
        Ok(())
    }

    fn push(&mut self, inner: OwnedFd) {
        if self.levels.len() == FOLLOWED_MAX {
            self.levels.remove(1);
        }
        self.levels.push(inner);
    }
}

fn copy_below(clock: &Clock, top: OwnedFd, staging: &Staging) -> Outcome<Counted> {
    let mut counted = Counted::default();
    let mut to = Follower::new(staging.open()?);
    Walk::new(top, clock, false)?.run(|_, step| {
        match step {
            Step::Entry { name, kind: FileType::Directory, .. } => to.enter(name)?,
            Step::Entry { dir, name, kind: FileType::RegularFile } => {
                if let Some(bytes) = copy_name(clock, dir, name, to.dir())? {
                    counted.files += 1;
                    counted.bytes += bytes;
                }
            }
            Step::Entry { dir, name, kind: FileType::Symlink } => {
                if let Ok(target) = readlinkat(dir, name, Vec::new()) {
                    symlinkat(target.as_c_str(), to.dir(), name)?;
                    counted.files += 1;
                }
            }
            // Sockets and FIFOs hold nothing.
            Step::Entry { .. } => {}
            Step::Left { dir, name } => {
                let mode = statat(dir, name, AtFlags::SYMLINK_NOFOLLOW).map_or(0o755, |stat| stat.st_mode);
                fchmod(to.dir(), Mode::from(mode & 0o777 | 0o300))?;
                to.leave()?;
            }
        }
        Ok(Some(Enter::Yes))
    })?;
    Ok(counted)
}

/// One file of a tree; `None` when it is none any more.
fn copy_name(clock: &Clock, dir: BorrowedFd<'_>, name: &[u8], to: &OwnedFd) -> Outcome<Option<u64>> {
    let source = match open_name(dir, name, OFlags::RDONLY) {
        Err(Errno::NOENT | Errno::LOOP | Errno::NXIO) => return Ok(None),
        opened => opened?,
    };
    let stat = fstat(&source)?;
    if FileType::from_raw_mode(stat.st_mode) != FileType::RegularFile {
        return Ok(None);
    }
    let flags = OFlags::WRONLY | OFlags::CREATE | OFlags::EXCL | OFlags::NOFOLLOW | OFlags::CLOEXEC;
    let mut file = File::from(openat(to, name, flags, Mode::from(0o600))?);
    let bytes = pour(&mut File::from(source), &mut file, clock)?;
    fchmod(&file, Mode::from(stat.st_mode & 0o777))?;
    Ok(Some(bytes))
}

/// Moves all that `from` holds into `to`: files take the place of files, folders are joined.
fn merge(clock: &Clock, from: OwnedFd, to: OwnedFd) -> Outcome<()> {
    let mut to = Follower::new(to);
    Walk::new(from, clock, false)?.run(|_, step| {
        match step {
            Step::Entry { dir, name, kind: FileType::Directory } => {
                let is_there = path_only(to.dir().as_fd(), name).is_ok();
                if is_there {
                    to.enter(name)?;
                } else {
                    renameat(dir, name, to.dir(), name)?;
                    return Ok(Some(Enter::No));
                }
            }
            Step::Entry { dir, name, .. } => renameat(dir, name, to.dir(), name)?,
            Step::Left { .. } => to.leave()?,
        }
        Ok(Some(Enter::Yes))
    })
}
