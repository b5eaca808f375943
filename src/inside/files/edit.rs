//! The editor: view, create, replace one passage, insert lines, undo.
#![forbid(unsafe_code)]

use std::collections::{HashMap, VecDeque};

use rustix::fs::{AtFlags, FileType, statat, unlinkat};
use rustix::io::Errno;

use super::place::View;
use super::text::{as_text, bounded_replace, read_whole, replace_with};
use super::{Clock, Outcome, find};
use crate::files::wire::{Answer, Edit, Edited, Fault, FaultKind, Occurrence, TEXT_BYTES_MAX};

/// Lines shown before and after a change.
const SNIPPET_LINES: usize = 4;
/// What is remembered for undoing, over all files.
const HISTORY_BYTES_MAX: usize = 32 * 1024 * 1024;
const HISTORY_EDITS_MAX: usize = 1_000;

/// What files held before they were edited. Lives as long as the helper.
#[derive(Default)]
pub(super) struct History {
    /// `None` where the file was not there.
    before: HashMap<String, Vec<Option<String>>>,
    /// Oldest first.
    order: VecDeque<String>,
    bytes: usize,
}

impl History {
    fn push(&mut self, path: &str, content: Option<String>) {
        self.bytes += path.len() + content.as_ref().map_or(0, String::len);
        self.before.entry(path.to_owned()).or_default().push(content);
        self.order.push_back(path.to_owned());
        while self.bytes > HISTORY_BYTES_MAX || self.order.len() > HISTORY_EDITS_MAX {
            let Some(oldest) = self.order.pop_front() else { break };
            self.take(&oldest, |edits| edits.remove(0));
        }
    }

    fn pop(&mut self, path: &str) -> Option<Option<String>> {
        let at = self.order.iter().rposition(|known| known == path)?;
        self.order.remove(at);
        self.take(path, |edits| edits.pop().expect("an entry of `order` has an edit"))
    }

    fn take(
        &mut self,
        path: &str,
        which: impl FnOnce(&mut Vec<Option<String>>) -> Option<String>,
    ) -> Option<Option<String>> {
        let edits = self.before.get_mut(path)?;
        let content = which(edits);
        if edits.is_empty() {
            self.before.remove(path);
        }
        self.bytes -= path.len() + content.as_ref().map_or(0, String::len);
        Some(content)
    }
}

pub(super) fn edit(
    view: &View,
    clock: &Clock,
    history: &std::sync::Mutex<History>,
    path: &str,
    edit: Edit,
) -> Outcome<Answer> {
    let history = || history.lock().expect("no code panics while it holds the history");
    let edited = match edit {
        Edit::View { range } => return view_it(view, clock, path, range),
        Edit::Create { text } => create(view, clock, path, text)?,
        Edit::Replace { old, new, mode } => replace(view, clock, path, &old, &new, mode)?,
        Edit::Insert { line, text } => insert(view, clock, path, line, &text)?,
        Edit::Undo => {
            let before = history().pop(path);
            let before = before
                .ok_or_else(|| Fault::text(FaultKind::Anchor, format!("no edit history found for {path}")))?;
            return undo(view, clock, path, before);
        }
    };
    history().push(path, edited.old_content.clone());
    Ok(Answer::Edited(edited))
}

fn view_it(view: &View, clock: &Clock, path: &str, range: Option<(u64, i64)>) -> Outcome<Answer> {
    let spot = view.find(path)?;
    let stat = statat(&spot.dir, &spot.name[..], AtFlags::SYMLINK_NOFOLLOW)?;
    if FileType::from_raw_mode(stat.st_mode) == FileType::Directory {
        let output = find::outline(view, clock, path)?;
        return Ok(Answer::Edited(Edited { output, prev_exist: true, ..Edited::default() }));
    }
    let text = as_text(read_whole(view, clock, path)?.1)?;
    let lines = text.split_inclusive('\n').count() as u64;
    let (first, last) = match range {
        None => (1, lines),
        Some((first, last)) => {
            let last = if last == -1 { lines } else { last.cast_unsigned() };
            if first < 1 || first > lines.max(1) || last < first || last > lines.max(first) {
                let text = format!("view_range [{first}, {last}] does not lie within [1, {lines}]");
                return Err(Fault::text(FaultKind::Anchor, text));
            }
            (first, last)
        }
    };
    let (first, last) = (first as usize, last as usize);
    let output =
        format!("Here's the result of running `cat -n` on {path}:\n{}", numbered(&text, first, last));
    Ok(Answer::Edited(Edited { output, prev_exist: true, ..Edited::default() }))
}

fn create(view: &View, clock: &Clock, path: &str, text: String) -> Outcome<Edited> {
    let old_content = match read_whole(view, clock, path) {
        Ok((_, content)) => Some(as_text(content)?),
        Err(fault) if fault.kind == FaultKind::NotFound => None,
        Err(fault) => return Err(fault),
    };
    let spot = view.find_making_parents(path)?;
    replace_with(view, &spot, text.as_bytes())?;
    Ok(Edited {
        output: format!("File created successfully at: {path}"),
        prev_exist: old_content.is_some(),
        old_content,
        new_content: Some(text),
    })
}

fn replace(
    view: &View,
    clock: &Clock,
    path: &str,
    old: &str,
    new: &str,
    mode: Option<Occurrence>,
) -> Outcome<Edited> {
    if old.is_empty() {
        return Err(Fault::text(FaultKind::Anchor, "old_str must not be empty"));
    }
    let (spot, content) = read_whole(view, clock, path)?;
    let text = as_text(content)?;
    let count = text.matches(old).count();
    let at = match (count, mode) {
        (0, _) => return Err(Fault::text(FaultKind::Anchor, "old_str not found in file")),
        (1, _) | (_, Some(Occurrence::All | Occurrence::First)) => text.find(old),
        (_, Some(Occurrence::Last)) => text.rfind(old),
        (_, None) => {
            let text = "old_str has multiple occurrences; replace_mode is required";
            return Err(Fault::text(FaultKind::Anchor, text));
        }
    };
    let at = at.expect("it was counted");
    let changed = if mode == Some(Occurrence::All) {
        bounded_replace(&text, old, new, count)?
    } else {
        format!("{}{new}{}", &text[..at], &text[at + old.len()..])
    };
    let line = text[..at].matches('\n').count();
    save(view, &spot, path, text, changed, line, new.matches('\n').count())
}

fn insert(view: &View, clock: &Clock, path: &str, line: u64, inserted: &str) -> Outcome<Edited> {
    let (spot, content) = read_whole(view, clock, path)?;
    let text = as_text(content)?;
    let lines: Vec<&str> = text.split_inclusive('\n').collect();
    let line = usize::try_from(line).unwrap_or(usize::MAX);
    if line > lines.len() {
        let text = format!("insert_line {line} does not lie within [0, {}]", lines.len());
        return Err(Fault::text(FaultKind::Anchor, text));
    }
    let (before, after) = (lines[..line].concat(), lines[line..].concat());
    // What is inserted are whole lines, also behind a last line that is not ended.
    let joint = if before.is_empty() || before.ends_with('\n') { "" } else { "\n" };
    let ended = if inserted.ends_with('\n') || after.is_empty() && joint.is_empty() && !before.is_empty() {
        inserted.to_owned()
    } else {
        format!("{inserted}\n")
    };
    let changed = format!("{before}{joint}{ended}{after}");
    save(view, &spot, path, text, changed, line, inserted.matches('\n').count())
}

fn save(
    view: &View,
    spot: &super::place::Spot,
    path: &str,
    old: String,
    new: String,
    line: usize,
    lines: usize,
) -> Outcome<Edited> {
    if new.len() > TEXT_BYTES_MAX {
        let text = format!("the text would be larger than {TEXT_BYTES_MAX} bytes");
        return Err(Fault::text(FaultKind::BadRequest, text));
    }
    replace_with(view, spot, new.as_bytes())?;
    let first = (line + 1).saturating_sub(SNIPPET_LINES).max(1);
    let snippet = numbered(&new, first, line + 1 + lines + SNIPPET_LINES);
    let output = format!(
        "The file {path} has been edited. Here's the result of running `cat -n` on a snippet of {path}:\n{snippet}"
    );
    Ok(Edited { output, prev_exist: true, old_content: Some(old), new_content: Some(new) })
}

fn undo(view: &View, clock: &Clock, path: &str, before: Option<String>) -> Outcome<Answer> {
    let now = match read_whole(view, clock, path) {
        Ok((_, content)) => String::from_utf8(content).ok(),
        Err(fault) if fault.kind == FaultKind::NotFound => None,
        Err(fault) => return Err(fault),
    };
    let spot = view.find_making_parents(path)?;
    match &before {
        Some(text) => replace_with(view, &spot, text.as_bytes())?,
        None => {
            view.require(&spot.dir)?;
            match unlinkat(&spot.dir, &spot.name[..], AtFlags::empty()) {
                Ok(()) | Err(Errno::NOENT) => {}
                Err(error) => return Err(error.into()),
            }
        }
    }
    Ok(Answer::Edited(Edited {
        output: format!("Last edit to {path} undone successfully."),
        prev_exist: now.is_some(),
        old_content: now,
        new_content: before,
    }))
}

/// Lines `first` to `last`, from 1, as `cat -n` shows them.
fn numbered(text: &str, first: usize, last: usize) -> String {
    let lines = text.split_inclusive('\n').enumerate().skip(first - 1).take(last.saturating_sub(first - 1));
    lines.map(|(at, line)| format!("{:6}\t{}\n", at + 1, line.trim_end_matches('\n'))).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn history_forgets_the_oldest_edits_first() {
        let mut history = History::default();
        let large = "x".repeat(HISTORY_BYTES_MAX / 2 - 100);
        for path in ["/a", "/b", "/a"] {
            history.push(path, Some(large.clone()));
        }
        assert_eq!(history.pop("/a"), Some(Some(large.clone())));
        assert_eq!(history.pop("/a"), None);
        assert_eq!(history.pop("/b"), Some(Some(large)));
        assert_eq!((history.bytes, history.order.len(), history.before.len()), (0, 0, 0));
    }

    #[test]
    fn lines_are_numbered_from_one() {
        assert_eq!(numbered("a\nb\nc", 2, 3), "     2\tb\n     3\tc\n");
        assert_eq!(numbered("", 1, 9), "");
    }
}
