//! Tables of the store and how they are opened.
#![forbid(unsafe_code)]

use rusqlite::Connection;

use crate::store::StoreError;

/// Version of the tables below, kept in the file.
const VERSION: i64 = 1;

const TABLES: &str = "
CREATE TABLE spaces (
    -- AUTOINCREMENT: the number of a deleted space is never given to somebody else.
    space INTEGER PRIMARY KEY AUTOINCREMENT,
    tenant TEXT NOT NULL UNIQUE
) STRICT;
CREATE TABLE sessions (
    tenant TEXT NOT NULL,
    language TEXT NOT NULL,
    id TEXT NOT NULL,
    created_at_ms INTEGER NOT NULL,
    PRIMARY KEY (tenant, language, id)
) STRICT, WITHOUT ROWID;
CREATE TABLE audit (
    row INTEGER PRIMARY KEY AUTOINCREMENT,
    at_ms INTEGER NOT NULL,
    tenant TEXT NOT NULL,
    language TEXT NOT NULL,
    session TEXT,
    status TEXT NOT NULL,
    duration_ms INTEGER NOT NULL,
    sandbox INTEGER,
    host_uid INTEGER,
    seccomp_filters INTEGER,
    namespaces INTEGER,
    ended TEXT NOT NULL
) STRICT;
-- How far the journal of audit rows has been taken.
CREATE TABLE journal (
    one INTEGER PRIMARY KEY CHECK (one = 1),
    generation INTEGER NOT NULL,
    offset INTEGER NOT NULL
) STRICT;
INSERT INTO journal VALUES (1, 0, 0);
";

/// Sets the connection up and makes the tables of a new file.
pub(super) fn prepare(connection: &mut Connection) -> Result<(), StoreError> {
    // WAL: a killed daemon loses no committed row. NORMAL: only a power cut can take the newest ones.
    connection.pragma_update(None, "journal_mode", "WAL")?;
    connection.pragma_update(None, "synchronous", "NORMAL")?;
    connection.pragma_update(None, "foreign_keys", true)?;
    connection.set_prepared_statement_cache_capacity(32);
    let found: i64 = connection.pragma_query_value(None, "user_version", |row| row.get(0))?;
    match found {
        0 => {
            let transaction = connection.transaction()?;
            transaction.execute_batch(TABLES)?;
            transaction.pragma_update(None, "user_version", VERSION)?;
            transaction.commit()?;
            Ok(())
        }
        VERSION => Ok(()),
        newer => Err(StoreError::Newer { found: newer, known: VERSION }),
    }
}
