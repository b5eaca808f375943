//! Searching what files hold.
#![forbid(unsafe_code)]

use std::os::fd::{AsFd, BorrowedFd};

use ignore::types::{Types, TypesBuilder};
use regex::bytes::Regex;
use rustix::fs::{FileType, OFlags, fstat};

use super::find::Names;
use super::place::{View, open_name};
use super::text::{expression, read_up_to};
use super::walk::{Enter, Step, Walk};
use super::{Clock, Outcome};
use crate::files::names;
use crate::files::wire::{
    Answer, CONTEXT_LINES_MAX, Fault, FaultKind, GREP_FILE_BYTES_MAX, GREP_MATCHES_MAX, Grep, GrepMatch,
    Grepped, RESULT_BYTES_MAX,
};

/// What is shown of a line.
const LINE_BYTES_MAX: usize = 8 * 1024;
/// A NUL byte within so many bytes says that a file is no text.
const BINARY_BYTES: usize = 8 * 1024;
/// What a match takes in an answer beside its texts.
const MATCH_BYTES: usize = 200;

struct Search<'a> {
    wanted: &'a Grep,
    pattern: Regex,
    clock: &'a Clock,
    found: Grepped,
    skipped: usize,
    bytes_left: usize,
}

pub(super) fn grep(view: &View, clock: &Clock, wanted: &Grep) -> Outcome<Answer> {
    let text = if wanted.fixed_strings { regex::escape(&wanted.pattern) } else { wanted.pattern.clone() };
    let pattern = expression(&text, wanted.case_insensitive, wanted.multiline)?;
    let (include, exclude) = (Names::of(&wanted.include)?, Names::of(&wanted.exclude)?);
    let types = wanted.file_type.as_deref().map(type_of).transpose()?;
    let found = Grepped::default();
    let mut search = Search { wanted, pattern, clock, found, skipped: 0, bytes_left: RESULT_BYTES_MAX };

    let spot = view.find(&wanted.path)?;
    match super::place::open_dir(&spot.dir, &spot.name) {
        Ok(top) => {
            view.require(&top)?;
            let mut walk = Walk::new(top, clock, true)?;
            let prefix = wanted.path.trim_end_matches('/');
            let walked = walk.run(|walk, step| {
                let Step::Entry { dir, name, kind } = step else { return Ok(Some(Enter::Yes)) };
                if exclude.fit(name, walk.path()) {
                    return Ok(Some(Enter::No));
                }
                let fits_type = |types: &Types| {
                    types.matched(std::path::Path::new(&names::show(name)), false).is_whitelist()
                };
                let fits = (include.is_empty() || include.fit(name, walk.path()))
                    && types.as_ref().is_none_or(fits_type);
                if kind == FileType::RegularFile && fits {
                    let path = format!("{prefix}/{}", names::show(walk.path()));
                    if !search.file(dir, name, path)? {
                        return Ok(None);
                    }
                }
                Ok(Some(if wanted.recursive { Enter::Yes } else { Enter::No }))
            });
            match walked {
                Err(fault) if fault.kind == FaultKind::TimedOut => search.found.truncated = true,
                walked => walked?,
            }
            search.found.truncated |= walk.cut;
        }
        Err(rustix::io::Errno::NOTDIR) => {
            let (file, _) = view.open(&spot, OFlags::RDONLY)?;
            drop(file);
            search.file(spot.dir.as_fd(), &spot.name, wanted.path.clone())?;
        }
        Err(error) => return Err(error.into()),
    }
    search.found.match_count = search.found.matches.len() as u64;
    Ok(Answer::Grepped(search.found))
}

fn type_of(name: &str) -> Outcome<Types> {
    let unknown = |error: ignore::Error| Fault::text(FaultKind::BadRequest, format!("unknown type: {error}"));
    TypesBuilder::new().add_defaults().select(name).build().map_err(unknown)
}

impl Search<'_> {
    /// Searches one file that lies in the tree; false when there is no room for more matches.
    fn file(&mut self, dir: BorrowedFd<'_>, name: &[u8], path: String) -> Outcome<bool> {
        // What cannot be read is passed over, as grep does.
        let Ok(file) = open_name(dir, name, OFlags::RDONLY) else { return Ok(true) };
        let stat = fstat(&file)?;
        let bytes_max = self.wanted.file_bytes_max.min(GREP_FILE_BYTES_MAX);
        let is_regular = FileType::from_raw_mode(stat.st_mode) == FileType::RegularFile;
        if !is_regular || stat.st_size.cast_unsigned() > bytes_max {
            return Ok(true);
        }
        let Some(content) = read_up_to(file, bytes_max as usize, self.clock)? else { return Ok(true) };
        if content[..content.len().min(BINARY_BYTES)].contains(&0) {
            return Ok(true);
        }
        self.found.files_searched += 1;
        let before = self.found.matches.len();
        let goes_on = self.text(&content, &path)?;
        self.found.files_matched += u64::from(self.found.matches.len() > before);
        Ok(goes_on)
    }

    fn text(&mut self, content: &[u8], path: &str) -> Outcome<bool> {
        let mut lines = Lines::new(content);
        let mut at = 0;
        while at <= content.len() {
            self.clock.check()?;
            let Some(hit) = self.pattern.find_at(content, at) else { break };
            // The newline that ends the text begins no line.
            if hit.start() == content.len() && (content.is_empty() || content.ends_with(b"\n")) {
                break;
            }
            let line = lines.of(hit.start());
            let last =
                if self.wanted.multiline { lines.of(hit.end().max(hit.start() + 1) - 1) } else { line };
            at = lines.end(last) + 1;
            if !self.wanted.multiline
                && hit.end() > lines.end(line)
                && !self.pattern.is_match(lines.text(line))
            {
                // It needs the next line, and lines are what is matched.
                continue;
            }
            if self.skipped < self.wanted.offset {
                self.skipped += 1;
                continue;
            }
            if !self.add(&mut lines, path, line, last) {
                self.found.truncated = true;
                return Ok(false);
            }
        }
        Ok(true)
    }

    fn add(&mut self, lines: &mut Lines<'_>, path: &str, line: usize, last: usize) -> bool {
        if self.found.matches.len() >= self.wanted.results_max.min(GREP_MATCHES_MAX) {
            return false;
        }
        let before = line.saturating_sub(self.wanted.context_before.min(CONTEXT_LINES_MAX))..line;
        let after = last + 1..lines.count().min(last + 1 + self.wanted.context_after.min(CONTEXT_LINES_MAX));
        let shown = |range: std::ops::Range<usize>| range.map(|line| show_line(lines.text(line))).collect();
        let hit = GrepMatch {
            file: path.to_owned(),
            line_number: line as u64 + 1,
            line_content: show_line(lines.range(line, last)),
            context_before: shown(before),
            context_after: shown(after),
        };
        let texts = hit.context_before.iter().chain(&hit.context_after).map(String::len).sum::<usize>();
        let bytes = MATCH_BYTES + path.len() + hit.line_content.len() + texts;
        let Some(left) = self.bytes_left.checked_sub(bytes) else { return false };
        self.bytes_left = left;
        self.found.matches.push(hit);
        true
    }
}

fn show_line(line: &[u8]) -> String {
    let cut = &line[..line.len().min(LINE_BYTES_MAX)];
    String::from_utf8_lossy(cut).into_owned()
}

/// A text by lines.
struct Lines<'a> {
    content: &'a [u8],
    /// Where each line begins.
    starts: Vec<u32>,
}

impl<'a> Lines<'a> {
    fn new(content: &'a [u8]) -> Lines<'a> {
        // Half of what a position takes: a text may be all newlines. Files that are searched are far below 4 GiB.
        let after_newlines = (1_u32..).zip(content).filter(|(_, byte)| **byte == b'\n').map(|(at, _)| at);
        let begins = after_newlines.filter(|at| (*at as usize) < content.len());
        Lines { content, starts: std::iter::once(0).chain(begins).collect() }
    }

    fn count(&self) -> usize {
        self.starts.len()
    }

    fn of(&self, at: usize) -> usize {
        self.starts.partition_point(|start| *start as usize <= at) - 1
    }

    /// Where the line ends, without its newline.
    fn end(&self, line: usize) -> usize {
        match self.starts.get(line + 1) {
            Some(next) => *next as usize - 1,
            None => self.content.len() - usize::from(self.content.ends_with(b"\n")),
        }
    }

    fn text(&self, line: usize) -> &'a [u8] {
        self.range(line, line)
    }

    fn range(&self, first: usize, last: usize) -> &'a [u8] {
        &self.content[self.starts[first] as usize..self.end(last)]
    }
}
