//! Reading, writing and searching one file.
#![forbid(unsafe_code)]

use std::fs::File;
use std::io::{BufRead, BufReader, Read, Seek, Write};
use std::os::fd::OwnedFd;

use regex::bytes::{Regex, RegexBuilder};
use rustix::fs::{AtFlags, FileType, Mode, OFlags, fchmod, openat, renameat, statat, unlinkat};
use rustix::io::Errno;

use super::place::{Spot, View, not_regular, open_dir};
use super::{Clock, Outcome};
use crate::files::wire::{
    Answer, Fault, FaultKind, Finish, LIST_ENTRIES_MAX, RESULT_BYTES_MAX, TEXT_BYTES_MAX,
};

/// Compiled size of an expression.
const REGEX_BYTES_MAX: usize = 4 * 1024 * 1024;
/// Bytes read between two looks at the clock.
const PIECE_BYTES: usize = 256 * 1024;

/// How temporary names begin. A name like this is ours to remove.
pub(super) const TEMPORARY: &str = ".caisson-";

/// A new name beside the one it will replace; removed when dropped before that.
pub(super) struct Temporary {
    dir: OwnedFd,
    name: String,
    is_kept: bool,
}

impl Temporary {
    /// A file that only we write to until it is [`put`](Temporary::put).
    pub(super) fn file(dir: &OwnedFd) -> Outcome<(Temporary, File)> {
        Temporary::named(dir, temporary_name())
    }

    fn named(dir: &OwnedFd, name: String) -> Outcome<(Temporary, File)> {
        let flags = OFlags::RDWR | OFlags::CREATE | OFlags::EXCL | OFlags::NOFOLLOW | OFlags::CLOEXEC;
        let file = openat(dir, name.as_str(), flags, Mode::from(0o600))?;
        Ok((Temporary { dir: dir.try_clone()?, name, is_kept: false }, File::from(file)))
    }

    /// Gives the file its mode and its name. What had the name keeps its mode and is gone.
    pub(super) fn put(&mut self, file: &File, spot: &Spot) -> Outcome<()> {
        let mode = match replaced(spot)? {
            Some(mode) => mode,
            None => Mode::from(0o666).difference(current_umask()),
        };
        fchmod(file, mode)?;
        renameat(&self.dir, self.name.as_str(), &spot.dir, &spot.name[..])?;
        self.is_kept = true;
        Ok(())
    }
}

impl Drop for Temporary {
    fn drop(&mut self) {
        if !self.is_kept {
            // It may be gone with its folder.
            let _ = unlinkat(&self.dir, self.name.as_str(), AtFlags::empty());
        }
    }
}

pub(super) fn temporary_name() -> String {
    format!("{TEMPORARY}{}", uuid::Uuid::new_v4().simple())
}

/// The same of a token that the daemon gave out.
pub(super) fn name_of(token: &str) -> Outcome<String> {
    let is_one = !token.is_empty() && token.bytes().all(|byte| byte.is_ascii_alphanumeric());
    if is_one { Ok(format!("{TEMPORARY}{token}")) } else { Err(Fault::errno(Errno::INVAL)) }
}

/// Where a stream goes: beside its target, or among the temporary files until somebody says where.
fn beside(path: Option<&str>) -> String {
    path.map_or_else(|| format!("{}/{TEMPORARY}", super::temp_dir()), str::to_owned)
}

/// Removes what a helper that died left of a stream to `path`.
pub(super) fn clear(view: &View, clock: &Clock, path: Option<&str>, token: &str) -> Outcome<Answer> {
    let (spot, name) = (view.find(&beside(path))?, name_of(token)?);
    // A tree that was to be joined with a folder was unpacked in that.
    let target = open_dir(&spot.dir, &spot.name).ok();
    for dir in target.iter().chain([&spot.dir]) {
        if view.require(dir).is_err() {
            continue;
        }
        match unlinkat(dir, name.as_str(), AtFlags::empty()) {
            Ok(()) | Err(Errno::NOENT) => {}
            Err(Errno::ISDIR) => super::tree::remove_tree(clock, dir, name.as_bytes())?,
            Err(error) => return Err(error.into()),
        }
    }
    Ok(Answer::Cleared)
}

/// The umask of every sandbox; asking for it would change it for all threads.
fn current_umask() -> Mode {
    Mode::from(0o022)
}

/// The mode of the file at `spot`, `None` where there is none; refuses what a file must not take the place of.
fn replaced(spot: &Spot) -> Outcome<Option<Mode>> {
    match statat(&spot.dir, &spot.name[..], AtFlags::SYMLINK_NOFOLLOW) {
        Ok(stat) => match FileType::from_raw_mode(stat.st_mode) {
            FileType::RegularFile => Ok(Some(Mode::from(stat.st_mode & 0o777))),
            FileType::Directory => Err(Fault::errno(Errno::ISDIR)),
            _ => Err(not_regular()),
        },
        Err(Errno::NOENT) => Ok(None),
        Err(error) => Err(error.into()),
    }
}

/// Writes all of `content` as the file at `spot`, or leaves what is there.
pub(super) fn replace_with(view: &View, spot: &Spot, content: &[u8]) -> Outcome<()> {
    view.require(&spot.dir)?;
    replaced(spot)?;
    let (mut temporary, mut file) = Temporary::file(&spot.dir)?;
    file.write_all(content)?;
    temporary.put(&file, spot)
}

pub(super) fn write(view: &View, path: &str, append: bool, content: &[u8]) -> Outcome<Answer> {
    let spot = view.find_making_parents(path)?;
    if append {
        view.require(&spot.dir)?;
        let flags = OFlags::WRONLY | OFlags::APPEND | OFlags::CREATE;
        let (file, _) = view.open(&spot, flags)?;
        File::from(file).write_all(content)?;
    } else {
        replace_with(view, &spot, content)?;
    }
    Ok(Answer::Written { bytes: content.len() as u64 })
}

fn too_large() -> Fault {
    let text = format!(
        "the text is larger than {TEXT_BYTES_MAX} bytes: read a range of lines, or download the file"
    );
    Fault::text(FaultKind::BadRequest, text)
}

/// All of a file that holds text. Also says under which spot it was found.
pub(super) fn read_whole(view: &View, clock: &Clock, path: &str) -> Outcome<(Spot, Vec<u8>)> {
    let spot = view.find(path)?;
    let (file, stat) = view.open(&spot, OFlags::RDONLY)?;
    if stat.st_size > TEXT_BYTES_MAX as i64 {
        return Err(too_large());
    }
    let content = read_up_to(file, TEXT_BYTES_MAX, clock)?.ok_or_else(too_large)?;
    Ok((spot, content))
}

/// The rest of a file; `None` when that is more than `bytes_max`.
pub(super) fn read_up_to(file: OwnedFd, bytes_max: usize, clock: &Clock) -> Outcome<Option<Vec<u8>>> {
    let mut file = File::from(file);
    let mut content = Vec::new();
    loop {
        clock.check()?;
        let read = Read::by_ref(&mut file).take(PIECE_BYTES as u64).read_to_end(&mut content)?;
        match read {
            0 => return Ok(Some(content)),
            _ if content.len() > bytes_max => return Ok(None),
            _ => {}
        }
    }
}

pub(super) fn as_text(content: Vec<u8>) -> Outcome<String> {
    String::from_utf8(content).map_err(|error| {
        let at = error.utf8_error().valid_up_to();
        Fault::text(FaultKind::DecodeError, format!("not UTF-8 text: invalid bytes at offset {at}"))
    })
}

/// The text from line `start` up to, not including, line `end`.
pub(super) fn read(
    view: &View,
    clock: &Clock,
    path: &str,
    start: Option<u64>,
    end: Option<u64>,
) -> Outcome<Vec<u8>> {
    if start.unwrap_or(0) == 0 && end.is_none() {
        return as_text(read_whole(view, clock, path)?.1).map(String::into_bytes);
    }
    let spot = view.find(path)?;
    let (file, _) = view.open(&spot, OFlags::RDONLY)?;
    let mut lines = BufReader::with_capacity(PIECE_BYTES, File::from(file));
    let (start, end) = (start.unwrap_or(0), end.unwrap_or(u64::MAX));
    let mut text = Vec::new();
    let mut line = 0;
    while line < end {
        clock.check()?;
        let piece = lines.fill_buf()?;
        if piece.is_empty() {
            break;
        }
        let newline = piece.iter().position(|byte| *byte == b'\n');
        let taken = newline.map_or(piece.len(), |at| at + 1);
        if line >= start {
            text.extend_from_slice(&piece[..taken]);
        }
        if text.len() > TEXT_BYTES_MAX {
            return Err(too_large());
        }
        lines.consume(taken);
        line += u64::from(newline.is_some());
    }
    as_text(text).map(String::into_bytes)
}

/// An expression of the caller's; matching takes time in proportion to the text, whatever it says.
pub(super) fn expression(pattern: &str, case_insensitive: bool, multiline: bool) -> Outcome<Regex> {
    let built = RegexBuilder::new(pattern)
        .case_insensitive(case_insensitive)
        .multi_line(true)
        .dot_matches_new_line(multiline)
        .size_limit(REGEX_BYTES_MAX)
        .dfa_size_limit(REGEX_BYTES_MAX)
        .build();
    built.map_err(|error| Fault::text(FaultKind::BadRequest, format!("invalid regular expression: {error}")))
}

pub(super) fn search(view: &View, clock: &Clock, path: &str, pattern: &str) -> Outcome<Answer> {
    let wanted = expression(pattern, false, false)?;
    let text = as_text(read_whole(view, clock, path)?.1)?;
    let (mut matches, mut line_numbers) = (Vec::new(), Vec::new());
    let mut bytes_left = RESULT_BYTES_MAX;
    for (number, line) in text.lines().enumerate() {
        clock.check()?;
        if !wanted.is_match(line.as_bytes()) {
            continue;
        }
        let Some(left) = bytes_left.checked_sub(line.len()) else { break };
        bytes_left = left;
        matches.push(line.to_owned());
        line_numbers.push(number as u64);
        if matches.len() == LIST_ENTRIES_MAX {
            break;
        }
    }
    Ok(Answer::Searched { matches, line_numbers })
}

pub(super) fn replace(view: &View, clock: &Clock, path: &str, old: &str, new: &str) -> Outcome<Answer> {
    if old.is_empty() {
        return Err(Fault::text(FaultKind::BadRequest, "old_str must not be empty"));
    }
    let (spot, content) = read_whole(view, clock, path)?;
    let text = as_text(content)?;
    let count = text.matches(old).count();
    if count > 0 {
        let replaced = bounded_replace(&text, old, new, count)?;
        replace_with(view, &spot, replaced.as_bytes())?;
    }
    Ok(Answer::Replaced { count: count as u64 })
}

/// Replaces all, unless the result is no text that could be read again.
pub(super) fn bounded_replace(text: &str, old: &str, new: &str, count: usize) -> Outcome<String> {
    let grown = text.len() - count * old.len();
    let grown = new.len().checked_mul(count).and_then(|added| added.checked_add(grown));
    match grown {
        Some(bytes) if bytes <= TEXT_BYTES_MAX => Ok(text.replace(old, new)),
        _ => Err(too_large()),
    }
}

/// Opens a file for the daemon to read by. It has been found regular and in the space; the daemon looks again.
pub(super) fn open(view: &View, path: &str) -> Outcome<OwnedFd> {
    let spot = view.find(path)?;
    Ok(view.open(&spot, OFlags::RDONLY)?.0)
}

/// A stream from the daemon that has arrived under a temporary name.
pub(super) struct Arrived {
    temporary: Temporary,
    file: File,
    bytes: u64,
    /// Where it will go, when that was said before it came.
    target: Option<(String, Spot)>,
}

/// Takes a stream in.
pub(super) fn arrive(
    view: &View,
    clock: &Clock,
    path: Option<&str>,
    pipe: OwnedFd,
    bytes_max: u64,
    token: &str,
) -> Outcome<Arrived> {
    let spot = view.find_making_parents(&beside(path))?;
    view.require(&spot.dir)?;
    replaced(&spot)?;
    let (temporary, mut file) = Temporary::named(&spot.dir, name_of(token)?)?;
    let mut pipe = File::from(pipe);
    let mut buffer = vec![0_u8; PIECE_BYTES];
    let mut bytes = 0;
    loop {
        let read = pipe.read(&mut buffer)?;
        clock.renew()?;
        if read == 0 {
            break;
        }
        bytes += read as u64;
        if bytes > bytes_max {
            let text = format!("the file is larger than {bytes_max} bytes");
            return Err(Fault::text(FaultKind::BadRequest, text));
        }
        file.write_all(&buffer[..read])?;
    }
    Ok(Arrived { temporary, file, bytes, target: path.map(|path| (path.to_owned(), spot)) })
}

impl Arrived {
    /// Gives what arrived its name. A path that was said before it came wins over the one of `finish`.
    pub(super) fn keep(self, view: &View, clock: &Clock, finish: Finish) -> Outcome<Answer> {
        let Arrived { mut temporary, mut file, bytes, target } = self;
        let (path, spot) = match target {
            Some(target) => target,
            None => {
                let name = finish.name.unwrap_or_default();
                let path = finish.path.unwrap_or_else(|| format!("{}/{name}", super::temp_dir()));
                let spot = view.find_making_parents(&path)?;
                view.require(&spot.dir)?;
                (path, spot)
            }
        };
        match temporary.put(&file, &spot) {
            Err(fault) if fault.errno == Some(Errno::XDEV.raw_os_error()) => {
                let (mut beside, mut copy) = Temporary::file(&spot.dir)?;
                file.rewind()?;
                pour(&mut file, &mut copy, clock)?;
                beside.put(&copy, &spot)?;
            }
            put => put?,
        }
        Ok(Answer::Uploaded { path, bytes })
    }
}

/// Copies the rest of a file, with an eye on the clock. Returns how much that was.
pub(super) fn pour(from: &mut File, to: &mut File, clock: &Clock) -> Outcome<u64> {
    let mut bytes = 0;
    loop {
        clock.check()?;
        match std::io::copy(&mut Read::by_ref(from).take(PIECE_BYTES as u64), to)? {
            0 => return Ok(bytes),
            copied => bytes += copied,
        }
    }
}
