//! The audit rows that are not in SQLite yet: an append-only file beside it.
//!
//! A row is in the file before its execution is answered, so a `kill -9` loses none; SQLite takes rows in
//! batches, off the path of a request. The transaction that takes a batch also notes how far the file has been
//! taken, so no row is taken twice. First line: the file's generation; then one JSON object a line.
#![forbid(unsafe_code)]

use std::fs::{File, OpenOptions};
use std::io::{self, BufRead, BufReader, Seek, SeekFrom, Write};
use std::path::{Path, PathBuf};
use std::sync::{Mutex, MutexGuard};

use crate::tenant::audit::AuditRecord;

/// Beyond this the file starts anew once everything in it has been taken.
pub(super) const RESET_BYTES: u64 = 4 * 1024 * 1024;

/// How far a file has been taken.
#[derive(Copy, Clone, Debug, Default, PartialEq, Eq)]
pub(super) struct Position {
    pub(super) generation: u64,
    pub(super) offset: u64,
}

/// The open file, and what of it SQLite has not.
#[derive(Debug)]
pub(super) struct Journal {
    path: PathBuf,
    state: Mutex<State>,
}

#[derive(Debug)]
struct State {
    file: File,
    end: Position,
    pending: Vec<AuditRecord>,
}

impl Journal {
    /// Opens the file of an earlier life. Returns the rows that were not taken after `taken`; they are pending.
    pub(super) fn open(path: &Path, taken: Position) -> io::Result<Journal> {
        let file = OpenOptions::new().read(true).append(true).create(true).open(path)?;
        Journal::over(file, path, taken)
    }

    /// For a store that is gone with its last handle.
    pub(super) fn in_memory() -> io::Result<Journal> {
        let file = rustix::fs::memfd_create("caisson-audit", rustix::fs::MemfdFlags::CLOEXEC)?;
        Journal::over(File::from(file), Path::new("memory"), Position::default())
    }

    fn over(mut file: File, path: &Path, taken: Position) -> io::Result<Journal> {
        let (end, pending) = read(&mut file, taken)?;
        let journal = Journal { path: path.to_owned(), state: Mutex::new(State { file, end, pending }) };
        if end.offset == 0 {
            let mut state = journal.lock();
            start_anew(&mut state, taken.generation + 1)?;
            drop(state);
        }
        Ok(journal)
    }

    /// Writes a row. True when it is the first that waits: somebody must see to it that it is taken.
    pub(super) fn append(&self, record: AuditRecord) -> io::Result<bool> {
        let mut line = serde_json::to_vec(&record)?;
        line.push(b'\n');
        let mut state = self.lock();
        state.file.write_all(&line)?;
        state.end.offset += line.len() as u64;
        state.pending.push(record);
        Ok(state.pending.len() == 1)
    }

    /// What waits, and how far the file is taken once that is committed.
    pub(super) fn take(&self) -> (Vec<AuditRecord>, Position) {
        let mut state = self.lock();
        (std::mem::take(&mut state.pending), state.end)
    }

    /// Puts rows back whose transaction failed: they are tried again with the next.
    pub(super) fn put_back(&self, mut rows: Vec<AuditRecord>) {
        let mut state = self.lock();
        rows.append(&mut state.pending);
        state.pending = rows;
    }

    /// Empties a file that has grown and is taken whole. `note` records the new generation first: a file of an
    /// older one is known to be taken.
    pub(super) fn reset_if_large<E>(&self, note: impl FnOnce(Position) -> Result<(), E>) -> io::Result<()> {
        let mut state = self.lock();
        if state.end.offset < RESET_BYTES || !state.pending.is_empty() {
            return Ok(());
        }
        let generation = state.end.generation + 1;
        match note(Position { generation, offset: 0 }) {
            Ok(()) => start_anew(&mut state, generation),
            // Not noted, not emptied: the next batch tries again.
            Err(_) => Ok(()),
        }
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().expect("no code panics while it holds the journal")
    }

    /// For messages.
    pub(super) fn path(&self) -> &Path {
        &self.path
    }
}

fn start_anew(state: &mut State, generation: u64) -> io::Result<()> {
    state.file.set_len(0)?;
    state.file.seek(SeekFrom::Start(0))?;
    let header = format!("{generation}\n");
    state.file.write_all(header.as_bytes())?;
    state.end = Position { generation, offset: header.len() as u64 };
    Ok(())
}

/// Rows after `taken`, and the end of what is whole: a line that a kill has torn is dropped.
fn read(file: &mut File, taken: Position) -> io::Result<(Position, Vec<AuditRecord>)> {
    file.seek(SeekFrom::Start(0))?;
    let mut lines = BufReader::new(&*file);
    let mut line = Vec::new();
    let header = lines.read_until(b'\n', &mut line)? as u64;
    let generation = std::str::from_utf8(&line).ok().and_then(|text| text.trim().parse().ok());
    let Some(generation) = generation.filter(|generation| *generation >= taken.generation) else {
        return Ok((Position { generation: taken.generation, offset: 0 }, Vec::new()));
    };
    let skip = if generation == taken.generation { taken.offset } else { 0 };
    let mut offset = header;
    let mut rows = Vec::new();
    loop {
        line.clear();
        let length = lines.read_until(b'\n', &mut line)? as u64;
        if length == 0 || line.last() != Some(&b'\n') {
            break;
        }
        if offset >= skip
            && let Ok(row) = serde_json::from_slice(&line)
        {
            rows.push(row);
        }
        offset += length;
    }
    file.set_len(offset)?;
    Ok((Position { generation, offset }, rows))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::engine::{Language, Status, TenantId};

    const START: Position = Position { generation: 0, offset: 0 };

    fn record(at_ms: u64) -> AuditRecord {
        AuditRecord {
            at_ms,
            tenant: TenantId("a".to_owned()),
            ran: Language::Python.into(),
            session: Some("s".to_owned()),
            status: Status::Ok,
            duration_ms: 1,
            provenance: None,
            ended: "completed".to_owned(),
        }
    }

    #[test]
    fn rows_that_were_not_taken_are_there_after_a_kill_and_taken_ones_are_not() {
        let folder = tempfile::tempdir().expect("a folder");
        let path = folder.path().join("audit.journal");
        let journal = Journal::open(&path, START).expect("made");
        assert!(journal.append(record(1)).expect("written"));
        assert!(!journal.append(record(2)).expect("written"));
        let (rows, position) = journal.take();
        assert_eq!(rows, [record(1), record(2)]);
        journal.append(record(3)).expect("written");
        drop(journal);
        let again = Journal::open(&path, position).expect("opened");
        assert_eq!(again.take().0, [record(3)]);
    }

    #[test]
    fn a_torn_line_is_dropped_and_what_follows_is_whole() {
        let folder = tempfile::tempdir().expect("a folder");
        let path = folder.path().join("audit.journal");
        Journal::open(&path, START).expect("made").append(record(1)).expect("written");
        let mut file = OpenOptions::new().append(true).open(&path).expect("there");
        file.write_all(b"{\"at_ms\":2,").expect("written");
        let journal = Journal::open(&path, START).expect("opened");
        journal.append(record(3)).expect("written");
        drop(journal);
        let rows = Journal::open(&path, START).expect("opened").take().0;
        assert_eq!(rows, [record(1), record(3)]);
    }

    #[test]
    fn a_file_of_an_older_generation_is_known_to_be_taken() {
        let folder = tempfile::tempdir().expect("a folder");
        let path = folder.path().join("audit.journal");
        Journal::open(&path, START).expect("made").append(record(1)).expect("written");
        let journal = Journal::open(&path, Position { generation: 9, offset: 0 }).expect("opened");
        assert_eq!(journal.take().0, []);
    }
}
