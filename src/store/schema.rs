//! Tables of the store and how they are opened.
#![forbid(unsafe_code)]

use rusqlite::Connection;

use crate::store::StoreError;

/// Version of the tables below, kept in the file.
const VERSION: i64 = 4;

/// One step from each version to the next; a new file takes them all.
const STEPS: [&str; VERSION as usize] = [FIRST, OBJECTS, ENDPOINT, NOT_GIVEN];

const FIRST: &str = "
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

/// Stored files and the sessions they are filed under. Spaces belong to tenants and to sessions now, with numbers of
/// one sequence.
const OBJECTS: &str = "
CREATE TABLE spaces_2 (
    space INTEGER PRIMARY KEY AUTOINCREMENT,
    tenant TEXT UNIQUE,
    -- With neither owner the space is somebody's past, and its files are still to be deleted.
    session TEXT UNIQUE,
    CHECK (tenant IS NULL OR session IS NULL)
) STRICT;
INSERT INTO spaces_2 (space, tenant) SELECT space, tenant FROM spaces;
-- The last number that was given out, which may be that of a space long deleted.
DELETE FROM sqlite_sequence WHERE name = 'spaces_2';
INSERT INTO sqlite_sequence (name, seq) SELECT 'spaces_2', seq FROM sqlite_sequence WHERE name = 'spaces';
DROP TABLE spaces;
ALTER TABLE spaces_2 RENAME TO spaces;

CREATE TABLE object_sessions (
    id TEXT PRIMARY KEY,
    kind TEXT NOT NULL,
    tenant TEXT NOT NULL,
    -- One that a token proved.
    user TEXT,
    -- Digest of what leads to a kept session.
    affinity TEXT UNIQUE,
    space INTEGER UNIQUE,
    -- Storage that is not its user's alone, or that is not to be written.
    shared INTEGER NOT NULL DEFAULT 0,
    files INTEGER NOT NULL DEFAULT 0,
    touched_ms INTEGER NOT NULL
) STRICT, WITHOUT ROWID;
CREATE INDEX object_sessions_by_touch ON object_sessions (touched_ms);
CREATE TABLE objects (
    -- The order of registration.
    row INTEGER PRIMARY KEY AUTOINCREMENT,
    id TEXT NOT NULL UNIQUE,
    session TEXT NOT NULL REFERENCES object_sessions (id) ON DELETE CASCADE,
    tenant TEXT NOT NULL,
    user TEXT,
    name TEXT NOT NULL,
    bytes INTEGER NOT NULL,
    content_type TEXT NOT NULL,
    etag TEXT NOT NULL,
    modified_ms INTEGER NOT NULL,
    read_only INTEGER NOT NULL,
    is_output INTEGER NOT NULL,
    bucket TEXT NOT NULL,
    bucket_id TEXT,
    bucket_version INTEGER,
    -- A younger one of its session has its name, or a run took it away.
    superseded INTEGER NOT NULL DEFAULT 0,
    -- The session's workspace has it.
    placed INTEGER NOT NULL
) STRICT;
CREATE INDEX objects_by_name ON objects (session, name);
CREATE INDEX objects_superseded ON objects (modified_ms) WHERE superseded;
CREATE INDEX objects_to_place ON objects (session) WHERE NOT placed;
-- Names that a kept session's workspace is to lose.
CREATE TABLE object_removals (
    row INTEGER PRIMARY KEY AUTOINCREMENT,
    session TEXT NOT NULL REFERENCES object_sessions (id) ON DELETE CASCADE,
    name TEXT NOT NULL,
    UNIQUE (session, name)
) STRICT;
";

/// Kernels at an external Jupyter server that are ours to delete.
const ENDPOINT: &str = "
CREATE TABLE endpoint_kernels (
    -- Its URL, without the token.
    server TEXT NOT NULL,
    kernel TEXT NOT NULL,
    -- The daemon's life that started it: those of others are to be deleted.
    life TEXT NOT NULL,
    PRIMARY KEY (server, kernel)
) STRICT, WITHOUT ROWID;
";

/// What the sequence of spaces was moved past.
const NOT_GIVEN: &str = "
CREATE TABLE spaces_not_given (
    -- The numbers from one to the other, which were never given out here and never will be.
    first INTEGER PRIMARY KEY,
    last INTEGER NOT NULL
) STRICT;
";

/// Sets the connection up and brings the tables to this build's version.
pub(super) fn prepare(connection: &mut Connection) -> Result<(), StoreError> {
    // WAL: a killed daemon loses no committed row. NORMAL: only a power cut can take the newest ones.
    connection.pragma_update(None, "journal_mode", "WAL")?;
    connection.pragma_update(None, "synchronous", "NORMAL")?;
    connection.pragma_update(None, "foreign_keys", true)?;
    // What a write would have to undo, once it is more than a little, goes to a file in the system's folder for such
    // things otherwise, and a confined daemon opens none there.
    connection.pragma_update(None, "temp_store", "MEMORY")?;
    connection.set_prepared_statement_cache_capacity(64);
    let found: i64 = connection.pragma_query_value(None, "user_version", |row| row.get(0))?;
    let steps = usize::try_from(found).ok().and_then(|done| STEPS.get(done..));
    let Some(steps) = steps else { return Err(StoreError::Newer { found, known: VERSION }) };
    if steps.is_empty() {
        return Ok(());
    }
    // All or nothing: a kill in between leaves the version that was there.
    let transaction = connection.transaction()?;
    for step in steps {
        transaction.execute_batch(step)?;
    }
    transaction.pragma_update(None, "user_version", VERSION)?;
    transaction.commit()?;
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn numbers(connection: &Connection) -> Vec<(i64, Option<String>)> {
        let mut statement = connection.prepare("SELECT space, tenant FROM spaces ORDER BY space").unwrap();
        let rows = statement.query_map([], |row| Ok((row.get(0)?, row.get(1)?))).unwrap();
        rows.map(Result::unwrap).collect()
    }

    fn of_version(version: usize) -> Connection {
        let connection = Connection::open_in_memory().unwrap();
        for step in &STEPS[..version] {
            connection.execute_batch(step).unwrap();
        }
        connection.pragma_update(None, "user_version", version as i64).unwrap();
        connection
    }

    fn first_version() -> Connection {
        of_version(1)
    }

    #[test]
    fn a_file_of_the_first_version_keeps_its_rows_and_never_gives_a_number_twice() {
        let mut connection = first_version();
        connection
            .execute_batch(
                "INSERT INTO spaces (tenant) VALUES ('a'), ('b'), ('c'); DELETE FROM spaces WHERE tenant = 'c';
                 INSERT INTO sessions VALUES ('a', 'python', 's', 7);
                 UPDATE journal SET generation = 3, offset = 9;",
            )
            .unwrap();
        prepare(&mut connection).expect("migrated");
        let version: i64 = connection.pragma_query_value(None, "user_version", |row| row.get(0)).unwrap();
        assert_eq!(version, VERSION);
        connection.execute("INSERT INTO spaces (session) VALUES ('s1')", []).unwrap();
        let (a, b) = (Some("a".to_owned()), Some("b".to_owned()));
        assert_eq!(numbers(&connection), [(1, a), (2, b), (4, None)], "3 was c's");
        let kept: (String, i64) = connection
            .query_row("SELECT id, created_at_ms FROM sessions", [], |row| Ok((row.get(0)?, row.get(1)?)))
            .unwrap();
        assert_eq!(kept, ("s".to_owned(), 7));
        let generation: i64 =
            connection.query_row("SELECT generation FROM journal", [], |row| row.get(0)).unwrap();
        assert_eq!(generation, 3);
        prepare(&mut connection).expect("nothing is left to do");
    }

    #[test]
    fn an_emptied_table_of_the_first_version_remembers_its_last_number() {
        let mut connection = first_version();
        connection.execute_batch("INSERT INTO spaces (tenant) VALUES ('a'); DELETE FROM spaces;").unwrap();
        prepare(&mut connection).expect("migrated");
        connection.execute("INSERT INTO spaces (tenant) VALUES ('b')", []).unwrap();
        assert_eq!(numbers(&connection), [(2, Some("b".to_owned()))]);
    }

    #[test]
    fn a_new_file_and_a_migrated_one_have_the_same_tables() {
        let tables = |connection: &Connection| -> Vec<String> {
            let mut statement = connection
                .prepare("SELECT sql FROM sqlite_schema WHERE sql IS NOT NULL ORDER BY name")
                .unwrap();
            statement.query_map([], |row| row.get(0)).unwrap().map(Result::unwrap).collect()
        };
        let mut new = Connection::open_in_memory().unwrap();
        prepare(&mut new).unwrap();
        for version in 1..STEPS.len() {
            let mut old = of_version(version);
            prepare(&mut old).unwrap();
            assert_eq!(tables(&new), tables(&old), "{version}");
        }
    }

    #[test]
    fn a_file_of_the_second_version_keeps_its_rows_and_takes_kernels() {
        let mut connection = of_version(2);
        connection
            .execute_batch(
                "INSERT INTO spaces (tenant) VALUES ('a');
                 INSERT INTO object_sessions (id, kind, tenant, touched_ms) VALUES ('s', 'storage', 'a', 7);",
            )
            .unwrap();
        prepare(&mut connection).expect("migrated");
        assert_eq!(numbers(&connection), [(1, Some("a".to_owned()))]);
        let kept: (String, i64) = connection
            .query_row("SELECT id, touched_ms FROM object_sessions", [], |row| Ok((row.get(0)?, row.get(1)?)))
            .unwrap();
        assert_eq!(kept, ("s".to_owned(), 7));
        connection.execute("INSERT INTO endpoint_kernels VALUES ('http://h', 'k', 'l')", []).unwrap();
    }

    #[test]
    fn a_number_that_no_build_wrote_is_refused() {
        for version in [-1, VERSION + 1] {
            let mut connection = Connection::open_in_memory().unwrap();
            connection.pragma_update(None, "user_version", version).unwrap();
            assert!(matches!(prepare(&mut connection), Err(StoreError::Newer { .. })), "{version}");
        }
    }
}
