//! Connections that read beside the writer: in WAL mode neither waits for the other.
#![forbid(unsafe_code)]

use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex};

use rusqlite::{Connection, OpenFlags};
use tokio::sync::Semaphore;

use super::{BUSY_TIMEOUT, StoreError};

/// Readers at once. A look-up takes some ten microseconds, so more would only cost memory.
const READERS_MAX: usize = 4;
/// Statements a reader keeps prepared.
const STATEMENTS_KEPT: usize = 32;

#[derive(Clone, Debug)]
pub(super) struct Readers(Arc<Inner>);

#[derive(Debug)]
struct Inner {
    path: PathBuf,
    turns: Arc<Semaphore>,
    idle: Mutex<Vec<Connection>>,
}

impl Readers {
    /// Of a file whose tables are there. Connections are opened with the first need.
    pub(super) fn of(path: &Path) -> Readers {
        let turns = Arc::new(Semaphore::new(READERS_MAX));
        Readers(Arc::new(Inner { path: path.to_owned(), turns, idle: Mutex::default() }))
    }

    /// Reads on a thread that may wait for the disk.
    pub(super) async fn read<T: Send + 'static>(
        &self,
        work: impl FnOnce(&Connection) -> rusqlite::Result<T> + Send + 'static,
    ) -> Result<T, StoreError> {
        let turn = Arc::clone(&self.0.turns).acquire_owned().await.map_err(|_closed| StoreError::Closed)?;
        let readers = self.clone();
        let reading = tokio::task::spawn_blocking(move || {
            let _turn = turn;
            readers.read_now(work)
        });
        reading.await.map_err(|_panicked| StoreError::Closed)?
    }

    /// Reads on this thread.
    pub(super) fn read_now<T>(
        &self,
        work: impl FnOnce(&Connection) -> rusqlite::Result<T>,
    ) -> Result<T, StoreError> {
        let idle = self.idle().pop();
        let connection = match idle {
            Some(connection) => connection,
            None => self.connect().map_err(StoreError::Read)?,
        };
        let outcome = work(&connection).map_err(StoreError::Read)?;
        let mut idle = self.idle();
        if idle.len() < READERS_MAX {
            idle.push(connection);
        }
        Ok(outcome)
    }

    fn connect(&self) -> rusqlite::Result<Connection> {
        let flags = OpenFlags::SQLITE_OPEN_READ_ONLY | OpenFlags::SQLITE_OPEN_NO_MUTEX;
        let connection = Connection::open_with_flags(&self.0.path, flags)?;
        connection.busy_timeout(BUSY_TIMEOUT)?;
        // The same as the writer's: a long list is sorted in memory.
        connection.pragma_update(None, "temp_store", "MEMORY")?;
        connection.set_prepared_statement_cache_capacity(STATEMENTS_KEPT);
        Ok(connection)
    }

    fn idle(&self) -> std::sync::MutexGuard<'_, Vec<Connection>> {
        self.0.idle.lock().expect("no code panics while it holds the connections")
    }
}
