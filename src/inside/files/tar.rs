//! Trees as tar, out and in.
//!
//! What comes in is a stranger's: it may name only what lies below the folder it is unpacked in, and bring nothing
//! but folders, files and links that stay inside. What goes out was made by guests.
#![forbid(unsafe_code)]

use std::cell::RefCell;
use std::fs::File;
use std::io::{self, BufWriter, Read, Write};
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::os::unix::ffi::OsStrExt;
use std::path::Path;
use std::rc::Rc;

use rustix::fs::{
    AtFlags, FileType, Mode, OFlags, Stat, Timespec, Timestamps, fchmod, fstat, futimens, linkat, openat,
    readlinkat, statat, symlinkat, unlinkat,
};
use rustix::io::Errno;
use tar::{Archive, Builder, EntryType, Header};

use super::place::{View, open_dir, open_name};
use super::text::name_of;
use super::tree::{Follower, Staging};
use super::walk::{Enter, Step, Walk};
use super::{Clock, Outcome};
use crate::files::names;
use crate::files::wire::{Answer, Fault, FaultKind, Finish, PATH_BYTES_MAX, TREE_ENTRIES_MAX, TreeMode};

/// Bytes that go into the pipe at once.
const PIECE_BYTES: usize = 64 * 1024;

/// Writes the tree, or the one file, that `path` names.
pub(super) fn send(view: &View, clock: &Clock, path: &str, pipe: OwnedFd, bytes_max: u64) -> Outcome<Answer> {
    let spot = view.find(path)?;
    let sink = BufWriter::with_capacity(PIECE_BYTES, Renewing { stream: File::from(pipe), clock });
    let mut tar = Builder::new(sink);
    match open_dir(&spot.dir, &spot.name) {
        Ok(top) => {
            view.require(&top)?;
            weigh(clock, open_dir(&spot.dir, &spot.name)?, bytes_max)?;
            let mut bytes_left = bytes_max;
            Walk::new(top, clock, true)?.run(|walk, step| {
                if let Step::Entry { dir, name, kind } = step {
                    add(&mut tar, walk.path(), dir, name, kind, &mut bytes_left)?;
                }
                Ok(Some(Enter::Yes))
            })?;
        }
        Err(Errno::NOTDIR) => {
            view.open(&spot, OFlags::RDONLY)?;
            let mut bytes_left = bytes_max;
            add(&mut tar, &spot.name, spot.dir.as_fd(), &spot.name, FileType::RegularFile, &mut bytes_left)?;
        }
        Err(error) => return Err(error.into()),
    }
    let mut sink = tar.into_inner()?;
    sink.flush()?;
    Ok(Answer::TreeSent)
}

/// Refuses what is too large before anything was sent.
fn weigh(clock: &Clock, top: OwnedFd, bytes_max: u64) -> Outcome<()> {
    let (mut entries, mut bytes) = (0_u64, 0_u64);
    Walk::new(top, clock, true)?.run(|_, step| {
        if let Step::Entry { dir, name, kind } = step {
            entries += 1;
            if kind == FileType::RegularFile {
                let stat = statat(dir, name, AtFlags::SYMLINK_NOFOLLOW);
                bytes = bytes.saturating_add(stat.map_or(0, |stat| stat.st_size.cast_unsigned()));
            }
            within(entries, bytes, bytes_max)?;
        }
        Ok(Some(Enter::Yes))
    })
}

fn within(entries: u64, bytes: u64, bytes_max: u64) -> Outcome<()> {
    let what = match () {
        () if entries > TREE_ENTRIES_MAX => format!("the tree has more than {TREE_ENTRIES_MAX} entries"),
        () if bytes > bytes_max => format!("the tree holds more than {bytes_max} bytes"),
        () => return Ok(()),
    };
    Err(Fault::text(FaultKind::BadRequest, what))
}

fn add(
    tar: &mut Builder<impl Write>,
    path: &[u8],
    dir: BorrowedFd<'_>,
    name: &[u8],
    kind: FileType,
    bytes_left: &mut u64,
) -> Outcome<()> {
    let shown = Path::new(std::ffi::OsStr::from_bytes(path));
    match kind {
        FileType::RegularFile => {
            let file = match open_name(dir, name, OFlags::RDONLY) {
                Ok(file) => file,
                // Gone, replaced, or not for us: tar passes over it too.
                Err(Errno::NOENT | Errno::LOOP | Errno::NXIO | Errno::ACCESS) => return Ok(()),
                Err(error) => return Err(error.into()),
            };
            let stat = fstat(&file)?;
            if FileType::from_raw_mode(stat.st_mode) != FileType::RegularFile {
                return Ok(());
            }
            let size = stat.st_size.cast_unsigned();
            *bytes_left = bytes_left.checked_sub(size).ok_or_else(|| {
                Fault::text(FaultKind::BadRequest, "the tree grew beyond what may be sent while it was read")
            })?;
            let mut header = header_of(&stat, EntryType::Regular);
            header.set_size(size);
            // The header promised a size, and a guest may cut or grow the file meanwhile.
            let content = File::from(file).chain(io::repeat(0)).take(size);
            Ok(tar.append_data(&mut header, shown, content)?)
        }
        FileType::Directory => {
            let Ok(stat) = statat(dir, name, AtFlags::SYMLINK_NOFOLLOW) else { return Ok(()) };
            Ok(tar.append_data(&mut header_of(&stat, EntryType::Directory), shown, io::empty())?)
        }
        FileType::Symlink => {
            let Ok(stat) = statat(dir, name, AtFlags::SYMLINK_NOFOLLOW) else { return Ok(()) };
            let Ok(target) = readlinkat(dir, name, Vec::new()) else { return Ok(()) };
            let target = Path::new(std::ffi::OsStr::from_bytes(target.as_bytes()));
            Ok(tar.append_link(&mut header_of(&stat, EntryType::Symlink), shown, target)?)
        }
        _ => Ok(()),
    }
}

fn header_of(stat: &Stat, kind: EntryType) -> Header {
    let mut header = Header::new_gnu();
    header.set_entry_type(kind);
    header.set_mode(stat.st_mode & 0o777);
    header.set_mtime(u64::try_from(stat.st_mtime).unwrap_or(0));
    header.set_size(0);
    header.set_uid(u64::from(stat.st_uid));
    header.set_gid(u64::from(stat.st_gid));
    header
}

/// A stream whose call has its time anew after each piece.
struct Renewing<'a, S> {
    stream: S,
    clock: &'a Clock,
}

fn overdue(fault: Fault) -> io::Error {
    io::Error::new(io::ErrorKind::TimedOut, fault.text)
}

impl<S: Write> Write for Renewing<'_, S> {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        let written = self.stream.write(bytes)?;
        self.clock.renew().map_err(overdue)?;
        Ok(written)
    }

    fn flush(&mut self) -> io::Result<()> {
        self.stream.flush()
    }
}

impl<S: Read> Read for Renewing<'_, S> {
    fn read(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
        let read = self.stream.read(buffer)?;
        self.clock.renew().map_err(overdue)?;
        Ok(read)
    }
}

/// Bytes that an archive still may have outside of its files: names and headers of other tools.
const HEADERS_BYTES_MAX: u64 = 512 * 1024 * 1024;
/// Longest run of headers between two members: names as long as any path, and what PAX adds.
const BETWEEN_BYTES_MAX: u64 = 1024 * 1024;

/// Counts what an archive holds that is no content, so that no header makes us hold more than it should.
struct Metered<S> {
    stream: S,
    left: Rc<RefCell<Meter>>,
}

struct Meter {
    /// Until the next member.
    between: u64,
    total: u64,
}

impl<S: Read> Read for Metered<S> {
    fn read(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
        let read = self.stream.read(buffer)?;
        let mut left = self.left.borrow_mut();
        left.between = left.between.checked_sub(read as u64).ok_or_else(too_long)?;
        left.total = left.total.checked_sub(read as u64).ok_or_else(too_long)?;
        Ok(read)
    }
}

fn too_long() -> io::Error {
    io::Error::new(io::ErrorKind::InvalidData, "the archive's headers are longer than they may be")
}

fn refused(text: impl Into<String>) -> Fault {
    Fault::text(FaultKind::BadRequest, text)
}

/// Unpacks what comes through `pipe` and puts it in its place once `finished` says that it came whole.
pub(super) fn receive(
    view: &View,
    clock: &Clock,
    path: &str,
    pipe: OwnedFd,
    bytes_max: u64,
    token: &str,
    finished: impl FnOnce() -> Outcome<Finish>,
) -> Outcome<Answer> {
    let to = view.find_making_parents(path)?;
    let staging = Staging::of(view, &to, name_of(token)?)?;
    let entries = unpack(clock, &staging, pipe, bytes_max)?;
    finished()?;
    fchmod(&staging.open()?, Mode::from(0o755))?;
    let mode = if staging.put(clock, &to)? { TreeMode::Rename } else { TreeMode::Merge };
    Ok(Answer::TreeReceived { entries, mode })
}

fn unpack(clock: &Clock, staging: &Staging, pipe: OwnedFd, bytes_max: u64) -> Outcome<u64> {
    let meter = Meter { between: BETWEEN_BYTES_MAX, total: HEADERS_BYTES_MAX + bytes_max };
    let left = Rc::new(RefCell::new(meter));
    let stream = Renewing { stream: File::from(pipe), clock };
    let mut archive = Archive::new(Metered { stream, left: Rc::clone(&left) });
    let top = staging.open()?;
    let (mut entries, mut bytes) = (0, 0_u64);
    for entry in archive.entries().map_err(unreadable)? {
        let mut entry = entry.map_err(unreadable)?;
        let kind = entry.header().entry_type();
        if matches!(kind, EntryType::XGlobalHeader) {
            continue;
        }
        entries += 1;
        bytes = bytes.saturating_add(entry.size());
        within(entries, bytes, bytes_max)?;
        left.borrow_mut().between = entry.size().saturating_add(BETWEEN_BYTES_MAX);
        let name = entry.path_bytes().into_owned();
        let target = entry.link_name_bytes().map(std::borrow::Cow::into_owned);
        let member = Member {
            path: parts_of(&name)?,
            name: names::show(&name),
            mode: entry.header().mode().unwrap_or(0o644) & 0o777,
            mtime: entry.header().mtime().unwrap_or(0),
        };
        member.unpack(&top, kind, target.as_deref(), &mut entry)?;
    }
    drain(&mut archive.into_inner())?;
    Ok(entries)
}

/// What follows the end of an archive: the padding of whoever wrote it.
fn drain(stream: &mut Metered<Renewing<'_, File>>) -> Outcome<()> {
    stream.left.borrow_mut().between = BETWEEN_BYTES_MAX;
    io::copy(stream, &mut io::sink()).map_err(unreadable)?;
    Ok(())
}

/// A stream of ours does not fail; what does is the archive.
fn unreadable(error: io::Error) -> Fault {
    match Errno::from_io_error(&error) {
        Some(errno) => errno.into(),
        None if error.kind() == io::ErrorKind::TimedOut => Fault::timed_out(),
        None => refused(format!("not a readable tar archive: {error}")),
    }
}

/// Where a member goes: names without `.`; refused when it could lead out.
fn parts_of(name: &[u8]) -> Outcome<Vec<Vec<u8>>> {
    let shown = names::show(name);
    if name.starts_with(b"/") || name.len() > PATH_BYTES_MAX || name.contains(&0) {
        return Err(refused(format!("member '{shown}' has a path that is not allowed")));
    }
    let parts = name.split(|byte| *byte == b'/').filter(|part| !matches!(*part, b"" | b"."));
    let parts: Vec<Vec<u8>> = parts.map(<[u8]>::to_vec).collect();
    if parts.iter().any(|part| part == b"..") {
        return Err(refused(format!("member '{shown}' leads out of the tree")));
    }
    Ok(parts)
}

struct Member {
    path: Vec<Vec<u8>>,
    name: String,
    mode: u32,
    mtime: u64,
}

impl Member {
    fn unpack(
        &self,
        top: &OwnedFd,
        kind: EntryType,
        target: Option<&[u8]>,
        content: &mut impl Read,
    ) -> Outcome<()> {
        let Some((last, folders)) = self.path.split_last() else {
            return if kind == EntryType::Directory { Ok(()) } else { Err(refused("a member has no name")) };
        };
        let mut at = Follower::new(top.try_clone()?);
        for folder in folders {
            at.enter(folder)?;
        }
        match kind {
            EntryType::Directory => {
                at.enter(last)?;
                Ok(fchmod(at.dir(), Mode::from(self.mode | 0o700))?)
            }
            EntryType::Regular | EntryType::Continuous | EntryType::GNUSparse => {
                self.file(at.dir(), last, content)
            }
            EntryType::Symlink => {
                let target = target.unwrap_or_default();
                self.check_link(target, folders.len())?;
                replace(at.dir(), last)?;
                Ok(symlinkat(target, at.dir(), &last[..])?)
            }
            EntryType::Link => self.link(top, &at, last, target.unwrap_or_default()),
            _ => Err(refused(format!("member '{}' is neither a file, a folder nor a link", self.name))),
        }
    }

    fn file(&self, dir: &OwnedFd, name: &[u8], content: &mut impl Read) -> Outcome<()> {
        replace(dir, name)?;
        let flags = OFlags::WRONLY | OFlags::CREATE | OFlags::EXCL | OFlags::NOFOLLOW | OFlags::CLOEXEC;
        let mut file = File::from(openat(dir, name, flags, Mode::from(0o600))?);
        let mut buffer = vec![0_u8; PIECE_BYTES];
        loop {
            let read = content.read(&mut buffer).map_err(unreadable)?;
            if read == 0 {
                break;
            }
            file.write_all(&buffer[..read])?;
        }
        fchmod(&file, Mode::from(self.mode))?;
        let time = Timespec { tv_sec: i64::try_from(self.mtime).unwrap_or(0), tv_nsec: 0 };
        // Where a sandbox may not set times, files are as old as they are.
        let _ = futimens(&file, &Timestamps { last_access: time, last_modification: time });
        Ok(())
    }

    /// A link must stay in the tree from wherever it lies, `depth` folders below the top.
    fn check_link(&self, target: &[u8], depth: usize) -> Outcome<()> {
        let out = || refused(format!("member '{}' links out of the tree", self.name));
        if target.is_empty() || target.starts_with(b"/") || target.contains(&0) {
            return Err(out());
        }
        // Behind a name, which may be a link itself, nobody knows where `..` leads.
        let mut up =
            target.split(|byte| *byte == b'/').filter(|part| !matches!(*part, b"" | b".")).peekable();
        let mut levels = 0;
        while up.next_if(|part| *part == b"..").is_some() {
            levels += 1;
        }
        if levels > depth || up.any(|part| part == b"..") { Err(out()) } else { Ok(()) }
    }

    /// A second name of a member that came before.
    fn link(&self, top: &OwnedFd, at: &Follower, name: &[u8], target: &[u8]) -> Outcome<()> {
        let parts = parts_of(target)?;
        let Some((last, folders)) = parts.split_last() else {
            return Err(refused(format!("member '{}' links to nothing", self.name)));
        };
        let mut dir = top.try_clone()?;
        for folder in folders {
            dir = open_dir(&dir, folder).map_err(|errno| self.no_link(errno))?;
        }
        replace(at.dir(), name)?;
        linkat(&dir, &last[..], at.dir(), name, AtFlags::empty()).map_err(|errno| self.no_link(errno))
    }

    /// Says of a link that cannot be made what the archive did wrong. What lies in the folder that the tree will be
    /// joined with is no member: whose file that is, and for how long, nobody knows.
    fn no_link(&self, errno: Errno) -> Fault {
        match errno {
            Errno::NOENT | Errno::NOTDIR | Errno::LOOP | Errno::PERM => {
                refused(format!("member '{}' links to what is no file of the archive before it", self.name))
            }
            Errno::MLINK => refused(format!("member '{}' is one name too many of its file", self.name)),
            other => other.into(),
        }
    }
}

/// A later member of the same name takes the place of an earlier one.
fn replace(dir: &OwnedFd, name: &[u8]) -> Outcome<()> {
    match unlinkat(dir, name, AtFlags::empty()) {
        Ok(()) | Err(Errno::NOENT) => Ok(()),
        Err(error) => Err(error.into()),
    }
}
