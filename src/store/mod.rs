//! The SQLite file behind tenants, spaces, sessions' last words and the audit log.
//!
//! One thread owns the connection and writes whatever waits in one transaction. Rows that somebody is told
//! about are committed before the telling; audit rows are never waited for.
#![forbid(unsafe_code)]

use std::collections::HashSet;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, SystemTime};

use rusqlite::{Connection, OptionalExtension};
use tokio::sync::{mpsc, oneshot};

use crate::engine::TenantId;
use crate::launcher::plan::SpaceId;
use crate::session::{SessionKey, epoch_ms};
use crate::tenant::audit::AuditRecord;

mod journal;
mod reader;
mod schema;
mod work;
mod writer;

use journal::{Journal, Position};
use reader::Readers;
use work::Work;

/// Requests that may wait for the writer. An audit record beyond that is dropped and counted.
const WAITING_MAX: usize = 8_192;
/// Sessions of an earlier life older than this are forgotten at start.
const SESSION_MEMORY: Duration = Duration::from_secs(7 * 24 * 3600);
/// Most sessions of an earlier life that are remembered, the youngest.
const SESSIONS_REMEMBERED_MAX: usize = 10_000;
/// How long audit rows stay in their journal before they are taken in one transaction.
const AUDIT_BATCH_WAIT: Duration = Duration::from_millis(250);
/// How long another process may hold the file, such as a backup.
const BUSY_TIMEOUT: Duration = Duration::from_secs(5);

/// The store could not do it.
#[derive(Debug, thiserror::Error)]
pub enum StoreError {
    #[error("failed to open the store {path:?}")]
    Open { path: PathBuf, source: Box<StoreError> },
    #[error("the store's tables have version {found}, this build knows {known}")]
    Newer { found: i64, known: i64 },
    #[error("failed to use the store's file: {0}")]
    Sqlite(#[from] rusqlite::Error),
    #[error("failed to open the journal of audit rows {path:?}")]
    Journal { path: PathBuf, source: std::io::Error },
    #[error("failed to start the store's thread: {0}")]
    Thread(std::io::Error),
    #[error("failed to write to the store; the log has the reason")]
    NotWritten,
    #[error("failed to read the store: {0}")]
    Read(rusqlite::Error),
    #[error("the store is closed")]
    Closed,
}

/// What the store knows of a space.
#[derive(Copy, Clone, Debug, PartialEq, Eq)]
pub enum Ownership {
    /// A tenant or a session has it.
    Owned,
    /// Its number was given out here, and nobody has it any more.
    Past,
    /// Its number was never given out here: it is another store's, or this one is older than its host.
    Strange,
}

/// Cheap to clone; all clones speak to one writer.
#[derive(Clone, Debug)]
pub struct Store {
    inbox: mpsc::Sender<Command>,
    shared: Arc<Shared>,
}

#[derive(Debug)]
struct Shared {
    remembered: HashSet<SessionKey>,
    audit_dropped: AtomicU64,
    journal: Journal,
    /// Absent for a store in memory, which its writer alone can see.
    readers: Option<Readers>,
}

/// What the writer is asked.
#[derive(Debug)]
enum Command {
    Space {
        tenant: TenantId,
        answer: oneshot::Sender<SpaceId>,
    },
    KeepSession {
        key: SessionKey,
        at_ms: u64,
        answer: oneshot::Sender<()>,
    },
    ForgetSession {
        key: SessionKey,
        answer: oneshot::Sender<()>,
    },
    /// Something that a module keeps in tables of its own.
    Work(Box<dyn Work>),
    /// Takes what waits in the journal.
    TakeAudit,
    Flush {
        answer: oneshot::Sender<()>,
    },
}

impl Store {
    /// Opens or makes the file and starts its writer.
    pub fn open(path: &Path) -> Result<Store, StoreError> {
        let journal = path.with_extension("journal");
        let opened = Connection::open(path).map_err(StoreError::from);
        let opened = opened.and_then(|connection| {
            Store::start(connection, Some(Readers::of(path)), |taken| {
                Journal::open(&journal, taken)
                    .map_err(|source| StoreError::Journal { path: journal.clone(), source })
            })
        });
        opened.map_err(|source| StoreError::Open { path: path.to_owned(), source: Box::new(source) })
    }

    /// A store that is gone with its last handle.
    pub fn in_memory() -> Result<Store, StoreError> {
        Store::start(Connection::open_in_memory()?, None, |_| {
            Journal::in_memory()
                .map_err(|source| StoreError::Journal { path: PathBuf::from("memory"), source })
        })
    }

    fn start(
        mut connection: Connection,
        readers: Option<Readers>,
        journal: impl FnOnce(Position) -> Result<Journal, StoreError>,
    ) -> Result<Store, StoreError> {
        connection.busy_timeout(BUSY_TIMEOUT)?;
        schema::prepare(&mut connection)?;
        let oldest = epoch_ms(SystemTime::now() - SESSION_MEMORY);
        writer::prune_sessions(&connection, oldest, SESSIONS_REMEMBERED_MAX)?;
        let remembered = writer::sessions(&connection)?;
        let taken = writer::taken(&connection)?;
        let journal = journal(taken)?;
        let shared = Arc::new(Shared { remembered, audit_dropped: AtomicU64::new(0), journal, readers });
        let writers = Arc::clone(&shared);
        let (inbox, commands) = mpsc::channel(WAITING_MAX);
        // What an earlier life did not take.
        inbox.try_send(Command::TakeAudit).map_err(|_full| StoreError::Closed)?;
        std::thread::Builder::new()
            .name("store".to_owned())
            .spawn(move || writer::write(connection, commands, &writers.journal))
            .map_err(StoreError::Thread)?;
        Ok(Store { inbox, shared })
    }

    /// Sessions that lived before this start.
    pub fn remembered(&self) -> &HashSet<SessionKey> {
        &self.shared.remembered
    }

    /// The space of a tenant, made with its first request. Numbers start at 1 and are never reused.
    pub async fn space_of(&self, tenant: &TenantId) -> Result<SpaceId, StoreError> {
        self.ask(|answer| Command::Space { tenant: tenant.clone(), answer }).await
    }

    /// Whose a space is.
    pub async fn ownership(&self, space: SpaceId) -> Result<Ownership, StoreError> {
        let number = i64::try_from(space.0).unwrap_or(i64::MAX);
        let found = self.read(move |it| {
            it.query_row(
                "SELECT EXISTS (SELECT 1 FROM spaces WHERE space = ?1 AND coalesce(tenant, session) IS NOT NULL), \
                 EXISTS (SELECT 1 FROM sqlite_sequence WHERE name = 'spaces' AND seq >= ?1) \
                 AND NOT EXISTS (SELECT 1 FROM spaces_not_given WHERE ?1 BETWEEN first AND last)",
                [number],
                |row| Ok((row.get(0)?, row.get(1)?)),
            )
        });
        Ok(match found.await? {
            (true, _) => Ownership::Owned,
            (false, true) => Ownership::Past,
            (false, false) => Ownership::Strange,
        })
    }

    /// Gives out no number up to this one any more: where a space has one of them that is
    /// [strange](Ownership::Strange), whoever got that would have its files. What is strange stays so.
    pub async fn set_aside(&self, to: SpaceId) -> Result<(), StoreError> {
        if to > SpaceId::GIVEN_MAX {
            return Ok(());
        }
        let to = to.0.cast_signed();
        self.write(move |it| {
            let given: Option<i64> = it
                .query_row("SELECT seq FROM sqlite_sequence WHERE name = 'spaces'", [], |row| row.get(0))
                .optional()?;
            match given {
                Some(given) if given >= to => return Ok(()),
                Some(_) => it.execute("UPDATE sqlite_sequence SET seq = ?1 WHERE name = 'spaces'", [to])?,
                None => it.execute("INSERT INTO sqlite_sequence (name, seq) VALUES ('spaces', ?1)", [to])?,
            };
            let first = given.unwrap_or_default() + 1;
            it.execute("INSERT INTO spaces_not_given (first, last) VALUES (?1, ?2)", [first, to]).map(drop)
        })
        .await
    }

    /// Remembers that a session lives.
    pub async fn keep_session(&self, key: &SessionKey) -> Result<(), StoreError> {
        let at_ms = epoch_ms(SystemTime::now());
        self.ask(|answer| Command::KeepSession { key: key.clone(), at_ms, answer }).await
    }

    /// Forgets a session that was ended on purpose.
    pub async fn forget_session(&self, key: &SessionKey) -> Result<(), StoreError> {
        self.ask(|answer| Command::ForgetSession { key: key.clone(), answer }).await
    }

    /// Writes an audit row: it is in the journal when this returns. Must run inside the async runtime. With a
    /// full disk the row is dropped and counted.
    pub fn audit(&self, record: AuditRecord) {
        match self.shared.journal.append(record) {
            Ok(first) if first => {
                let inbox = self.inbox.clone();
                tokio::spawn(async move {
                    tokio::time::sleep(AUDIT_BATCH_WAIT).await;
                    // Gone with the store: the next start takes what the journal holds.
                    drop(inbox.send(Command::TakeAudit).await);
                });
            }
            Ok(_) => {}
            Err(error) => {
                let dropped = self.shared.audit_dropped.fetch_add(1, Ordering::Relaxed) + 1;
                // At 1, 2, 4, 8 …: a full disk would otherwise fill the log as well.
                if dropped.is_power_of_two() {
                    let path = self.shared.journal.path();
                    tracing::error!(dropped, %error, path = %path.display(), "audit records dropped");
                }
            }
        }
    }

    /// Audit rows that were dropped since the start.
    pub fn audit_dropped(&self) -> u64 {
        self.shared.audit_dropped.load(Ordering::Relaxed)
    }

    /// Does `work` in the writer's next transaction and returns what it returned once that is committed. An error of
    /// its own undoes what it did and nothing else.
    pub async fn write<T: Send + 'static>(
        &self,
        work: impl FnOnce(&Connection) -> rusqlite::Result<T> + Send + 'static,
    ) -> Result<T, StoreError> {
        self.write_and(work, |_| {}).await
    }

    /// The same, with a word that is said on the writer's thread between the commit and the return, whoever still
    /// waits for that.
    pub async fn write_and<T: Send + 'static>(
        &self,
        work: impl FnOnce(&Connection) -> rusqlite::Result<T> + Send + 'static,
        committed: impl FnOnce(&T) + Send + 'static,
    ) -> Result<T, StoreError> {
        self.ask(|answer: oneshot::Sender<T>| {
            Command::Work(work::followed(work, |outcome| {
                committed(&outcome);
                // Nobody may wait any more; that is theirs to decide.
                drop(answer.send(outcome));
            }))
        })
        .await
    }

    /// The same without waiting for the commit: for what a kill may lose.
    pub async fn write_behind(
        &self,
        work: impl FnOnce(&Connection) -> rusqlite::Result<()> + Send + 'static,
    ) -> Result<(), StoreError> {
        let command = Command::Work(work::followed(work, |()| {}));
        self.inbox.send(command).await.map_err(|_gone| StoreError::Closed)
    }

    /// Reads what is committed, beside the writer and without waiting for it.
    pub async fn read<T: Send + 'static>(
        &self,
        work: impl FnOnce(&Connection) -> rusqlite::Result<T> + Send + 'static,
    ) -> Result<T, StoreError> {
        match &self.shared.readers {
            Some(readers) => readers.read(work).await,
            None => self.write(work).await,
        }
    }

    /// The same on the caller's thread, for a start. `None` for a store in memory, in which nothing lies yet.
    pub fn read_now<T>(
        &self,
        work: impl FnOnce(&Connection) -> rusqlite::Result<T>,
    ) -> Result<Option<T>, StoreError> {
        self.shared.readers.as_ref().map(|readers| readers.read_now(work)).transpose()
    }

    /// Returns when everything asked before is committed.
    pub async fn flush(&self) -> Result<(), StoreError> {
        self.ask(|answer| Command::Flush { answer }).await
    }

    async fn ask<T>(&self, command: impl FnOnce(oneshot::Sender<T>) -> Command) -> Result<T, StoreError> {
        let (answer, answered) = oneshot::channel();
        self.inbox.send(command(answer)).await.map_err(|_gone| StoreError::Closed)?;
        answered.await.map_err(|_dropped| StoreError::NotWritten)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::engine::{Language, Status, Tier};
    use crate::session::id::SessionId;

    fn tenant(name: &str) -> TenantId {
        TenantId(name.to_owned())
    }

    fn key(id: &str) -> SessionKey {
        SessionKey {
            tenant: tenant("a"),
            tier: if id == "one" {
                Tier::Native(Language::Python)
            } else {
                Tier::Kernel("python3".to_owned())
            },
            id: SessionId::parse(id).expect("valid"),
        }
    }

    fn record(ended: &str) -> AuditRecord {
        AuditRecord {
            at_ms: 1,
            tenant: tenant("a"),
            ran: Language::Python.into(),
            session: None,
            status: Status::Ok,
            duration_ms: 2,
            provenance: None,
            ended: ended.to_owned(),
        }
    }

    fn audit_rows(path: &Path) -> i64 {
        let connection = Connection::open(path).expect("the file is there");
        connection.query_row("SELECT count(*) FROM audit", [], |row| row.get(0)).expect("the table is there")
    }

    #[tokio::test]
    async fn a_tenant_has_one_space_across_restarts() {
        let folder = tempfile::tempdir().expect("a folder");
        let path = folder.path().join("store.db");
        let store = Store::open(&path).expect("opens");
        assert_eq!(store.space_of(&tenant("a")).await.expect("written"), SpaceId(1));
        assert_eq!(store.space_of(&tenant("b")).await.expect("written"), SpaceId(2));
        let again = Store::open(&path).expect("opens beside it");
        assert_eq!(again.space_of(&tenant("b")).await.expect("read"), SpaceId(2));
        assert_eq!(again.space_of(&tenant("c")).await.expect("written"), SpaceId(3));
    }

    #[tokio::test]
    async fn a_space_is_somebodys_past_or_was_never_given_out() {
        let folder = tempfile::tempdir().expect("a folder");
        let store = Store::open(&folder.path().join("store.db")).expect("opens");
        assert_eq!(store.ownership(SpaceId(1)).await.expect("read"), Ownership::Strange);
        store.space_of(&tenant("a")).await.expect("written");
        store.space_of(&tenant("b")).await.expect("written");
        store
            .write(|it| {
                it.execute("INSERT INTO spaces (session) VALUES ('kept'), ('ended'), ('gone')", [])?;
                it.execute("UPDATE spaces SET session = NULL WHERE session = 'ended'", [])?;
                it.execute("DELETE FROM spaces WHERE session = 'gone'", [])
            })
            .await
            .expect("written");
        use Ownership::{Owned, Past, Strange};
        for (space, wanted) in
            [(1, Owned), (2, Owned), (3, Owned), (4, Past), (5, Past), (6, Strange), (u64::MAX, Strange)]
        {
            assert_eq!(store.ownership(SpaceId(space)).await.expect("read"), wanted, "{space}");
        }
        // Whichever of them is found first.
        for space in [9, 7, 8, 9] {
            store.set_aside(SpaceId(space)).await.expect("written");
        }
        store.set_aside(SpaceId(u64::MAX >> 1)).await.expect("no number that we ever come to");
        assert_eq!(store.space_of(&tenant("c")).await.expect("written"), SpaceId(10));
        store.set_aside(SpaceId(12)).await.expect("written");
        assert_eq!(store.space_of(&tenant("d")).await.expect("written"), SpaceId(13));
        for (space, wanted) in
            [(5, Past), (6, Strange), (7, Strange), (9, Strange), (10, Owned), (11, Strange)]
        {
            assert_eq!(store.ownership(SpaceId(space)).await.expect("read"), wanted, "{space}");
        }
        store.write(|it| it.execute("DELETE FROM spaces WHERE space = 10", [])).await.expect("written");
        assert_eq!(store.ownership(SpaceId(10)).await.expect("read"), Past);
    }

    #[tokio::test]
    async fn a_new_store_gives_out_nothing_that_lies_there() {
        let folder = tempfile::tempdir().expect("a folder");
        let store = Store::open(&folder.path().join("store.db")).expect("opens");
        store.set_aside(SpaceId(3)).await.expect("written");
        for space in [1, 2, 3, 4] {
            assert_eq!(store.ownership(SpaceId(space)).await.expect("read"), Ownership::Strange, "{space}");
        }
        assert_eq!(store.space_of(&tenant("a")).await.expect("written"), SpaceId(4));
    }

    #[tokio::test]
    async fn sessions_are_remembered_until_they_are_forgotten() {
        let folder = tempfile::tempdir().expect("a folder");
        let path = folder.path().join("store.db");
        let store = Store::open(&path).expect("opens");
        for id in ["one", "two", "one"] {
            store.keep_session(&key(id)).await.expect("written");
        }
        store.forget_session(&key("two")).await.expect("written");
        let again = Store::open(&path).expect("opens");
        assert_eq!(again.remembered(), &HashSet::from([key("one")]));
    }

    #[tokio::test]
    async fn audit_rows_are_there_after_a_flush() {
        let folder = tempfile::tempdir().expect("a folder");
        let path = folder.path().join("store.db");
        let store = Store::open(&path).expect("opens");
        for _ in 0..50 {
            store.audit(record("completed"));
        }
        store.flush().await.expect("written");
        assert_eq!((audit_rows(&path), store.audit_dropped()), (50, 0));
    }

    #[tokio::test]
    async fn a_file_of_a_newer_build_is_left_alone() {
        let folder = tempfile::tempdir().expect("a folder");
        let path = folder.path().join("store.db");
        let connection = Connection::open(&path).expect("made");
        connection.pragma_update(None, "user_version", 99).expect("written");
        let error = Store::open(&path).expect_err("refused");
        let StoreError::Open { source, .. } = error else { panic!("{error:?}") };
        assert!(matches!(*source, StoreError::Newer { found: 99, .. }));
    }
}
