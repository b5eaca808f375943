//! Listing and searching by name.
#![forbid(unsafe_code)]

use std::cmp::Ordering;
use std::os::fd::AsFd;

use globset::{GlobBuilder, GlobSet, GlobSetBuilder};
use rustix::fs::{AtFlags, FileType, Stat, statat};

use super::place::View;
use super::walk::{Enter, Step, Walk};
use super::{Clock, Outcome, mode_text};
use crate::files::names;
use crate::files::wire::{
    Answer, Entry, FIND_ENTRIES_MAX, Fault, FaultKind, GLOB_ENTRIES_MAX, Glob, GlobEntry, Globbed,
    LIST_ENTRIES_MAX, List, Listed, RESULT_BYTES_MAX, Sort,
};

/// Patterns that one call may exclude or include by.
const PATTERNS_MAX: usize = 256;
/// What an entry takes in an answer beside its name and path.
const ENTRY_BYTES: usize = 200;

/// Globs that fit a name or the path below the top.
pub(super) struct Names {
    by_name: GlobSet,
    by_path: GlobSet,
    is_empty: bool,
}

impl Names {
    /// A pattern with a slash is of paths, one without is of names, wherever they lie.
    pub(super) fn of<T: AsRef<str>>(patterns: &[T]) -> Outcome<Names> {
        if patterns.len() > PATTERNS_MAX {
            return Err(Fault::text(FaultKind::BadRequest, format!("more than {PATTERNS_MAX} patterns")));
        }
        let (mut by_name, mut by_path) = (GlobSetBuilder::new(), GlobSetBuilder::new());
        for pattern in patterns.iter().map(AsRef::as_ref) {
            match pattern.trim_start_matches("./").strip_suffix('/').unwrap_or(pattern) {
                path if path.contains('/') => by_path.add(compiled(path)?),
                name => by_name.add(compiled(name)?),
            };
        }
        Ok(Names { by_name: built(&by_name)?, by_path: built(&by_path)?, is_empty: patterns.is_empty() })
    }

    /// One pattern of paths below the top, as a shell would read it.
    fn of_path(pattern: &str) -> Outcome<Names> {
        let (by_name, mut by_path) = (GlobSetBuilder::new(), GlobSetBuilder::new());
        by_path.add(compiled(pattern.trim_start_matches("./"))?);
        Ok(Names { by_name: built(&by_name)?, by_path: built(&by_path)?, is_empty: false })
    }

    pub(super) fn fit(&self, name: &[u8], path: &[u8]) -> bool {
        let as_path = |bytes| {
            std::path::Path::new(<std::ffi::OsStr as std::os::unix::ffi::OsStrExt>::from_bytes(bytes))
        };
        !self.is_empty && (self.by_name.is_match(as_path(name)) || self.by_path.is_match(as_path(path)))
    }

    pub(super) fn is_empty(&self) -> bool {
        self.is_empty
    }
}

fn compiled(pattern: &str) -> Outcome<globset::Glob> {
    let built = GlobBuilder::new(pattern).literal_separator(true).backslash_escape(true).build();
    built.map_err(|error| Fault::text(FaultKind::BadRequest, format!("invalid pattern: {error}")))
}

fn built(set: &GlobSetBuilder) -> Outcome<GlobSet> {
    set.build().map_err(|error| Fault::text(FaultKind::BadRequest, format!("invalid pattern: {error}")))
}

/// How far a walk goes: a result keeps within its number of entries and their bytes.
struct Room {
    entries: usize,
    bytes: usize,
    /// Levels below the top.
    depth_max: Option<u64>,
    with_stat: bool,
}

impl Room {
    fn new(entries: usize, depth_max: Option<u64>, with_stat: bool) -> Room {
        Room { entries, bytes: RESULT_BYTES_MAX, depth_max, with_stat }
    }

    /// Takes room for one more; false when there is none.
    fn take(&mut self, bytes: usize) -> bool {
        let bytes = bytes + ENTRY_BYTES;
        if self.entries == 0 || self.bytes < bytes {
            return false;
        }
        self.entries -= 1;
        self.bytes -= bytes;
        true
    }
}

struct Found<'a> {
    name: &'a [u8],
    /// `None` where it went away meanwhile.
    stat: Option<Stat>,
    is_directory: bool,
}

/// Walks below `top`. A time limit ends it as a lack of room would: with what there is.
fn collect(
    view: &View,
    clock: &Clock,
    top: &str,
    room: Room,
    mut keep: impl FnMut(&[u8], &[u8], bool) -> (bool, Enter),
    mut add: impl FnMut(Found<'_>, String),
) -> Outcome<bool> {
    let prefix = top.trim_end_matches('/');
    let mut room = room;
    let mut truncated = false;
    let mut walk = Walk::new(view.find_dir(top)?, clock, true)?;
    let walked = walk.run(|walk, step| {
        let Step::Entry { dir, name, kind } = step else { return Ok(Some(Enter::Yes)) };
        let is_directory = kind == FileType::Directory;
        let (kept, enter) = keep(name, walk.path(), is_directory);
        if kept {
            let path = format!("{prefix}/{}", names::show(walk.path()));
            if !room.take(path.len() + name.len()) {
                truncated = true;
                return Ok(None);
            }
            let stat = if room.with_stat { statat(dir, name, AtFlags::SYMLINK_NOFOLLOW).ok() } else { None };
            if stat.is_some() || !room.with_stat {
                add(Found { name, stat, is_directory }, path);
            }
        }
        let deeper = room.depth_max.is_none_or(|max| (walk.depth() as u64) < max);
        Ok(Some(if deeper { enter } else { Enter::No }))
    });
    match walked {
        Err(fault) if fault.kind == FaultKind::TimedOut => truncated = true,
        walked => walked?,
    }
    Ok(truncated || walk.cut)
}

fn is_hidden(name: &[u8]) -> bool {
    name.starts_with(b".")
}

/// Such as `.csv`; none for a hidden file that is all dot.
fn extension(name: &str) -> Option<String> {
    let dot = name.rfind('.').filter(|dot| *dot > 0)?;
    Some(name[dot..].to_owned())
}

fn seconds(stat: &Stat) -> i64 {
    stat.st_mtime
}

pub(super) fn list(view: &View, clock: &Clock, wanted: &List) -> Outcome<Answer> {
    let dotted: Vec<String> =
        wanted.extensions.iter().map(|it| format!(".{}", it.trim_start_matches('.'))).collect();
    let mut files: Vec<(Entry, i64)> = Vec::new();
    let depth_max = if wanted.recursive { wanted.depth_max } else { Some(1) };
    let keep = |name: &[u8], _: &[u8], is_directory: bool| {
        if is_hidden(name) && !wanted.hidden {
            return (false, Enter::No);
        }
        let shown = names::show(name);
        let fits =
            dotted.is_empty() || !is_directory && extension(&shown).is_some_and(|it| dotted.contains(&it));
        (fits, Enter::Yes)
    };
    let truncated = collect(
        view,
        clock,
        &wanted.path,
        Room::new(LIST_ENTRIES_MAX, depth_max, true),
        keep,
        |found, path| {
            let Some(stat) = found.stat else { return };
            let name = names::show(found.name);
            let entry = Entry {
                extension: if found.is_directory { None } else { extension(&name) },
                path,
                is_directory: found.is_directory,
                size: wanted.with_size.then_some(stat.st_size.cast_unsigned()),
                modified_time: seconds(&stat).to_string(),
                permissions: wanted.with_permissions.then(|| mode_text(&stat)),
                is_hidden: is_hidden(found.name),
                name,
            };
            files.push((entry, stat.st_size));
        },
    )?;
    let time = |entry: &Entry| entry.modified_time.parse::<i64>().unwrap_or_default();
    sort_by(&mut files, wanted.sort, wanted.descending, |(entry, size)| Key {
        path: &entry.path,
        name: &entry.name,
        size: *size,
        modified: time(entry),
        kind: (!entry.is_directory, entry.extension.as_deref().unwrap_or_default()),
    });
    let files: Vec<Entry> = files.into_iter().map(|(entry, _)| entry).collect();
    let directories = files.iter().filter(|entry| entry.is_directory).count() as u64;
    let total_count = files.len() as u64;
    Ok(Answer::Listed(Listed {
        files,
        total_count,
        file_count: total_count - directories,
        directory_count: directories,
        truncated,
    }))
}

pub(super) fn find(view: &View, clock: &Clock, path: &str, pattern: &str) -> Outcome<Answer> {
    let wanted = Names::of(&[pattern])?;
    let mut files = Vec::new();
    let keep =
        |name: &[u8], path: &[u8], is_directory: bool| (!is_directory && wanted.fit(name, path), Enter::Yes);
    let truncated = collect(view, clock, path, Room::new(FIND_ENTRIES_MAX, None, false), keep, |_, path| {
        files.push(path)
    })?;
    Ok(Answer::Found { files, truncated })
}

pub(super) fn glob(view: &View, clock: &Clock, wanted: &Glob) -> Outcome<Answer> {
    let (pattern, excluded) = (Names::of_path(&wanted.pattern)?, Names::of(&wanted.exclude)?);
    let mut files: Vec<(GlobEntry, i64, i64)> = Vec::new();
    let keep = |name: &[u8], path: &[u8], is_directory: bool| {
        if excluded.fit(name, path) || is_hidden(name) && !wanted.hidden {
            return (false, Enter::No);
        }
        (pattern.fit(name, path) && !(is_directory && wanted.files_only), Enter::Yes)
    };
    let room = Room::new(wanted.results_max.min(GLOB_ENTRIES_MAX), None, true);
    let truncated = collect(view, clock, &wanted.path, room, keep, |found, path| {
        let Some(stat) = found.stat else { return };
        let entry = GlobEntry {
            name: names::show(found.name),
            path,
            is_directory: found.is_directory,
            size: wanted.with_metadata.then_some(stat.st_size.cast_unsigned()),
            modified_time: wanted.with_metadata.then(|| seconds(&stat).to_string()),
        };
        files.push((entry, stat.st_size, seconds(&stat)));
    })?;
    sort_by(&mut files, wanted.sort, wanted.descending, |(entry, size, modified)| Key {
        path: &entry.path,
        name: &entry.name,
        size: *size,
        modified: *modified,
        kind: (!entry.is_directory, ""),
    });
    let files: Vec<GlobEntry> = files.into_iter().map(|(entry, ..)| entry).collect();
    Ok(Answer::Globbed(Globbed { total_count: files.len() as u64, files, truncated }))
}

struct Key<'a> {
    path: &'a str,
    name: &'a str,
    size: i64,
    modified: i64,
    kind: (bool, &'a str),
}

fn sort_by<T>(items: &mut [T], sort: Sort, descending: bool, key: impl Fn(&T) -> Key<'_>) {
    items.sort_by(|one, other| {
        let (one, other) = (key(one), key(other));
        let order = match sort {
            Sort::Path => Ordering::Equal,
            Sort::Name => one.name.cmp(other.name),
            Sort::Size => one.size.cmp(&other.size),
            Sort::Modified => one.modified.cmp(&other.modified),
            Sort::Type => one.kind.cmp(&other.kind),
        };
        let order = order.then_with(|| one.path.cmp(other.path));
        if descending { order.reverse() } else { order }
    });
}

/// What lies in a folder, two levels deep and without hidden names: for people.
pub(super) fn outline(view: &View, clock: &Clock, path: &str) -> Outcome<String> {
    let mut lines = vec![path.trim_end_matches('/').to_owned()];
    let keep = |name: &[u8], _: &[u8], _: bool| {
        let shown = !is_hidden(name);
        (shown, if shown { Enter::Yes } else { Enter::No })
    };
    let room = Room::new(LIST_ENTRIES_MAX, Some(2), false);
    let truncated = collect(view, clock, path, room, keep, |found, path| {
        lines.push(if found.is_directory { format!("{path}/") } else { path });
    })?;
    if truncated {
        lines.push("... (more than can be shown)".to_owned());
    }
    Ok(lines.join("\n"))
}

/// Size, mode and kind of what a path names.
pub(super) fn stat(view: &View, path: &str, follow: bool) -> Outcome<Answer> {
    let spot = if follow { view.find(path)? } else { view.find_name(path)? };
    let stat = statat(&spot.dir, &spot.name[..], AtFlags::SYMLINK_NOFOLLOW)?;
    let kind = FileType::from_raw_mode(stat.st_mode);
    match kind {
        FileType::Directory => view.require(&super::place::path_only(spot.dir.as_fd(), &spot.name)?)?,
        _ => view.require(&spot.dir)?,
    }
    Ok(Answer::Stat(crate::files::wire::FileStat {
        size: stat.st_size.cast_unsigned(),
        permissions: mode_text(&stat),
        is_directory: kind == FileType::Directory,
        is_symlink: kind == FileType::Symlink,
        modified_time: seconds(&stat).to_string(),
    }))
}
