//! Sessions and file records as rows of the store.
#![forbid(unsafe_code)]

use rusqlite::{Connection, OptionalExtension, Row, params};

use super::{Bucket, FileRecord, Kind, Pending, SessionInfo};
use crate::engine::{Caller, TenantId};
use crate::launcher::plan::SpaceId;

/// A record and who may have it.
#[derive(Debug)]
pub(super) struct Owned {
    pub(super) record: FileRecord,
    tenant: TenantId,
    user: Option<String>,
}

impl Owned {
    /// The record, for those it belongs to: the one it was stored for, or the tenant of an agent's or skill's files.
    pub(super) fn for_caller(self, caller: &Caller) -> Option<FileRecord> {
        let is_theirs = match self.record.bucket {
            Bucket::User => self.user == caller.user,
            Bucket::Agent { .. } | Bucket::Skill { .. } => true,
        };
        (self.tenant == caller.tenant && is_theirs).then_some(self.record)
    }
}

/// Why files were not added.
#[derive(Copy, Clone, Debug, PartialEq, Eq)]
pub(super) enum NotAdded {
    NoSession,
    SessionFull,
}

/// What a session that has ended leaves to be deleted.
#[derive(Debug, Default, PartialEq, Eq)]
pub(super) struct Ended {
    pub(super) files: Vec<String>,
    pub(super) space: Option<SpaceId>,
}

const COLUMNS: &str = "o.id, o.session, o.name, o.bytes, o.content_type, o.etag, o.modified_ms, o.read_only, \
                       o.is_output, o.bucket, o.bucket_id, o.bucket_version, o.tenant, o.user";

fn owned(row: &Row<'_>) -> rusqlite::Result<Owned> {
    let (kind, id): (String, Option<String>) = (row.get(9)?, row.get(10)?);
    let version: Option<i64> = row.get(11)?;
    let id = id.unwrap_or_default();
    let bucket = match kind.as_str() {
        "agent" => Bucket::Agent { id },
        "skill" => Bucket::Skill { id, version: version.unwrap_or_default().unsigned_abs() },
        _ => Bucket::User,
    };
    let record = FileRecord {
        id: row.get(0)?,
        session: row.get(1)?,
        name: row.get(2)?,
        size: row.get::<_, i64>(3)?.unsigned_abs(),
        content_type: row.get(4)?,
        etag: row.get(5)?,
        modified_ms: row.get::<_, i64>(6)?.unsigned_abs(),
        read_only: row.get(7)?,
        is_output: row.get(8)?,
        bucket,
    };
    Ok(Owned { record, tenant: TenantId(row.get(12)?), user: row.get(13)? })
}

fn all(connection: &Connection, rest: &str, values: impl rusqlite::Params) -> rusqlite::Result<Vec<Owned>> {
    let mut statement = connection.prepare_cached(&format!("SELECT {COLUMNS} FROM objects o {rest}"))?;
    statement.query_map(values, owned)?.collect()
}

// --- sessions ----------------------------------------------------------------------------------------------------

fn kind_word(kind: Kind) -> &'static str {
    match kind {
        Kind::Storage => "storage",
        Kind::Run => "run",
        Kind::Kept => "kept",
    }
}

fn kind_of(word: &str) -> Kind {
    match word {
        "storage" => Kind::Storage,
        "kept" => Kind::Kept,
        _ => Kind::Run,
    }
}

const SESSION_COLUMNS: &str = "id, kind, space, shared, tenant, user, touched_ms";

fn session_row(row: &Row<'_>) -> rusqlite::Result<(SessionInfo, Caller, u64)> {
    let info = SessionInfo {
        id: row.get(0)?,
        kind: kind_of(&row.get::<_, String>(1)?),
        space: row.get::<_, Option<i64>>(2)?.map(|space| SpaceId(space.unsigned_abs())),
        read_only: row.get(3)?,
    };
    let owner = Caller { tenant: TenantId(row.get(4)?), user: row.get(5)? };
    Ok((info, owner, row.get::<_, i64>(6)?.unsigned_abs()))
}

/// The session, its owner, and when it was used last.
pub(super) fn session(
    connection: &Connection,
    id: &str,
) -> rusqlite::Result<Option<(SessionInfo, Caller, u64)>> {
    let text = format!("SELECT {SESSION_COLUMNS} FROM object_sessions WHERE id = ?1");
    connection.prepare_cached(&text)?.query_row([id], session_row).optional()
}

/// The same by what leads to a kept session.
pub(super) fn session_of(
    connection: &Connection,
    affinity: &str,
) -> rusqlite::Result<Option<(SessionInfo, Caller, u64)>> {
    let text = format!("SELECT {SESSION_COLUMNS} FROM object_sessions WHERE affinity = ?1");
    connection.prepare_cached(&text)?.query_row([affinity], session_row).optional()
}

/// Writes a session down, unless it is already.
fn write_session(
    connection: &Connection,
    info: &SessionInfo,
    owner: &Caller,
    affinity: Option<&str>,
    now_ms: u64,
) -> rusqlite::Result<()> {
    connection
        .prepare_cached(
            "INSERT OR IGNORE INTO object_sessions (id, kind, tenant, user, affinity, space, touched_ms) \
             VALUES (?1, ?2, ?3, ?4, ?5, ?6, ?7)",
        )?
        .execute(params![
            info.id,
            kind_word(info.kind),
            owner.tenant.0,
            owner.user,
            affinity,
            info.space.map(|space| signed(space.0)),
            signed(now_ms),
        ])?;
    Ok(())
}

pub(super) fn touch(connection: &Connection, id: &str, now_ms: u64) -> rusqlite::Result<()> {
    connection
        .prepare_cached("UPDATE object_sessions SET touched_ms = ?2 WHERE id = ?1 AND touched_ms < ?2")?
        .execute(params![id, signed(now_ms)])?;
    Ok(())
}

/// A kept session, and whether it was made now.
pub(super) type Led = (SessionInfo, bool);

/// When it is, and when that must have been used which is not over.
#[derive(Copy, Clone, Debug)]
pub(super) struct Time {
    pub(super) now_ms: u64,
    pub(super) after_ms: u64,
}

/// The session that `affinity` leads to, and whether it was made now: there was none, or one whose time is over, which
/// is then ended. `None` where the owner's tenant has `kept_max` of them.
pub(super) fn keep_session(
    connection: &Connection,
    affinity: &str,
    id: &str,
    owner: &Caller,
    Time { now_ms, after_ms }: Time,
    kept_max: usize,
) -> rusqlite::Result<(Option<Led>, Option<Ended>)> {
    let mut ended = None;
    if let Some((info, _, touched_ms)) = session_of(connection, affinity)? {
        if touched_ms > after_ms {
            touch(connection, &info.id, now_ms)?;
            return Ok((Some((info, false)), None));
        }
        ended = Some(end(connection, &info)?);
    }
    let made = make_kept(connection, Some(affinity), id, owner, now_ms, kept_max)?;
    Ok((made.map(|info| (info, true)), ended))
}

/// A kept session with a space of its own, whose number was never anybody's. `None` where the owner's tenant has
/// `kept_max` of them.
pub(super) fn make_kept(
    connection: &Connection,
    affinity: Option<&str>,
    id: &str,
    owner: &Caller,
    now_ms: u64,
    kept_max: usize,
) -> rusqlite::Result<Option<SessionInfo>> {
    let kept: i64 = connection
        .prepare_cached(
            "SELECT count(*) FROM spaces JOIN object_sessions ON object_sessions.id = spaces.session \
             WHERE object_sessions.tenant = ?1",
        )?
        .query_row([&owner.tenant.0], |row| row.get(0))?;
    if kept.unsigned_abs() >= kept_max as u64 {
        return Ok(None);
    }
    connection.prepare_cached("INSERT INTO spaces (session) VALUES (?1)")?.execute([id])?;
    let space = SpaceId(connection.last_insert_rowid().unsigned_abs());
    let info = SessionInfo { id: id.to_owned(), kind: Kind::Kept, space: Some(space), read_only: false };
    write_session(connection, &info, owner, affinity, now_ms)?;
    Ok(Some(info))
}

/// Ends sessions that nobody used after `after_ms`, at most `sessions_max` of them.
pub(super) fn end_expired(
    connection: &Connection,
    after_ms: u64,
    sessions_max: usize,
) -> rusqlite::Result<Vec<Ended>> {
    let text = format!(
        "SELECT {SESSION_COLUMNS} FROM object_sessions WHERE touched_ms <= ?1 ORDER BY touched_ms LIMIT ?2"
    );
    let mut statement = connection.prepare_cached(&text)?;
    let rows = statement.query_map(params![signed(after_ms), signed(sessions_max as u64)], session_row)?;
    let expired: Vec<_> = rows.collect::<rusqlite::Result<_>>()?;
    expired.iter().map(|(info, _, _)| end(connection, info)).collect()
}

/// Ends one session, if it is this owner's.
pub(super) fn end_one(connection: &Connection, id: &str, wanted: &Caller) -> rusqlite::Result<Option<Ended>> {
    match session(connection, id)? {
        Some((info, owner, _)) if owner == *wanted => end(connection, &info).map(Some),
        _ => Ok(None),
    }
}

fn end(connection: &Connection, info: &SessionInfo) -> rusqlite::Result<Ended> {
    let mut files = connection.prepare_cached("SELECT id FROM objects WHERE session = ?1")?;
    let files = files.query_map([&info.id], |row| row.get(0))?.collect::<rusqlite::Result<_>>()?;
    // Its space has no owner from here on, until its files are deleted.
    connection.prepare_cached("UPDATE spaces SET session = NULL WHERE session = ?1")?.execute([&info.id])?;
    connection.prepare_cached("DELETE FROM object_sessions WHERE id = ?1")?.execute([&info.id])?;
    Ok(Ended { files, space: info.space })
}

/// Spaces of sessions that have ended, whose files may still be there.
pub(super) fn ended_spaces(connection: &Connection) -> rusqlite::Result<Vec<SpaceId>> {
    let mut statement =
        connection.prepare("SELECT space FROM spaces WHERE tenant IS NULL AND session IS NULL")?;
    let spaces = statement.query_map([], |row| row.get::<_, i64>(0))?;
    spaces.map(|space| space.map(|space| SpaceId(space.unsigned_abs()))).collect()
}

/// The files of an ended session's space are deleted.
pub(super) fn forget_space(connection: &Connection, space: SpaceId) -> rusqlite::Result<()> {
    connection
        .prepare_cached("DELETE FROM spaces WHERE space = ?1 AND tenant IS NULL AND session IS NULL")?
        .execute([signed(space.0)])?;
    Ok(())
}

// --- files -------------------------------------------------------------------------------------------------------

/// Puts files on record, in this order.
pub(super) fn add(
    connection: &Connection,
    session: &SessionInfo,
    owner: &Caller,
    files: &[FileRecord],
    files_max: usize,
) -> rusqlite::Result<Result<(), NotAdded>> {
    let Some(now_ms) = files.iter().map(|file| file.modified_ms).max() else { return Ok(Ok(())) };
    if session.kind != Kind::Kept {
        write_session(connection, session, owner, None, now_ms)?;
    }
    let held: Option<i64> = connection
        .prepare_cached("SELECT files FROM object_sessions WHERE id = ?1 AND tenant = ?2 AND user IS ?3")?
        .query_row(params![session.id, owner.tenant.0, owner.user], |row| row.get(0))
        .optional()?;
    let Some(held) = held else { return Ok(Err(NotAdded::NoSession)) };
    if held.unsigned_abs() + files.len() as u64 > files_max as u64 {
        return Ok(Err(NotAdded::SessionFull));
    }
    for file in files {
        add_one(connection, session, owner, file)?;
    }
    let is_shared = |file: &FileRecord| file.read_only || file.bucket != Bucket::User;
    let shared = session.kind == Kind::Storage && files.iter().any(is_shared);
    connection
        .prepare_cached(
            "UPDATE object_sessions SET files = files + ?2, touched_ms = max(touched_ms, ?3), \
             shared = shared OR ?4 WHERE id = ?1",
        )?
        .execute(params![session.id, signed(files.len() as u64), signed(now_ms), shared])?;
    Ok(Ok(()))
}

fn add_one(
    connection: &Connection,
    session: &SessionInfo,
    owner: &Caller,
    file: &FileRecord,
) -> rusqlite::Result<()> {
    connection
        .prepare_cached(
            "UPDATE objects SET superseded = 1 WHERE session = ?1 AND name = ?2 AND NOT superseded",
        )?
        .execute([&session.id, &file.name])?;
    // What is there again is not to be taken away.
    connection
        .prepare_cached("DELETE FROM object_removals WHERE session = ?1 AND name = ?2")?
        .execute([&session.id, &file.name])?;
    // Outputs come from the workspace, and only a kept session has one.
    let placed = file.is_output || session.kind != Kind::Kept;
    connection
        .prepare_cached(
            "INSERT INTO objects (id, session, tenant, user, name, bytes, content_type, etag, modified_ms, \
             read_only, is_output, bucket, bucket_id, bucket_version, placed) \
             VALUES (?1, ?2, ?3, ?4, ?5, ?6, ?7, ?8, ?9, ?10, ?11, ?12, ?13, ?14, ?15)",
        )?
        .execute(params![
            file.id,
            session.id,
            owner.tenant.0,
            owner.user,
            file.name,
            signed(file.size),
            file.content_type,
            file.etag,
            signed(file.modified_ms),
            file.read_only,
            file.is_output,
            file.bucket.kind(),
            file.bucket.id(),
            file.bucket.version().map(signed),
            placed,
        ])?;
    Ok(())
}

/// One file of a session that was used after `after_ms`.
pub(super) fn file(
    connection: &Connection,
    session: &str,
    id: &str,
    after_ms: u64,
) -> rusqlite::Result<Option<Owned>> {
    let text = format!(
        "SELECT {COLUMNS} FROM objects o JOIN object_sessions s ON s.id = o.session \
         WHERE o.id = ?1 AND o.session = ?2 AND s.touched_ms > ?3"
    );
    let mut statement = connection.prepare_cached(&text)?;
    statement.query_row(params![id, session, signed(after_ms)], owned).optional()
}

/// Every file of a session, in order of registration.
pub(super) fn files_of(connection: &Connection, session: &str) -> rusqlite::Result<Vec<Owned>> {
    all(connection, "WHERE o.session = ?1 ORDER BY o.row", [session])
}

/// Those that have no younger one of their name and were not retired.
pub(super) fn live_files_of(connection: &Connection, session: &str) -> rusqlite::Result<Vec<Owned>> {
    all(connection, "WHERE o.session = ?1 AND NOT o.superseded ORDER BY o.row", [session])
}

/// Marks the outputs of these names as if younger ones had them.
pub(super) fn retire(connection: &Connection, session: &str, names: &[String]) -> rusqlite::Result<()> {
    let mut retiring = connection
        .prepare_cached("UPDATE objects SET superseded = 1 WHERE session = ?1 AND name = ?2 AND is_output")?;
    names.iter().try_for_each(|name| retiring.execute([session, name]).map(drop))
}

/// Takes a file off the records; true when it was there. A kept session's workspace loses it, or gets the next older
/// one of its name.
pub(super) fn remove(connection: &Connection, session: &str, id: &str) -> rusqlite::Result<bool> {
    let found: Option<(String, bool)> = connection
        .prepare_cached("SELECT name, superseded FROM objects WHERE id = ?1 AND session = ?2")?
        .query_row([id, session], |row| Ok((row.get(0)?, row.get(1)?)))
        .optional()?;
    let Some((name, superseded)) = found else { return Ok(false) };
    connection.prepare_cached("DELETE FROM objects WHERE id = ?1")?.execute([id])?;
    connection
        .prepare_cached("UPDATE object_sessions SET files = files - 1 WHERE id = ?1")?
        .execute([session])?;
    if superseded {
        return Ok(true);
    }
    let kept: bool = connection
        .prepare_cached("SELECT kind = 'kept' FROM object_sessions WHERE id = ?1")?
        .query_row([session], |row| row.get(0))?;
    let older: Option<i64> = connection
        .prepare_cached("SELECT max(row) FROM objects WHERE session = ?1 AND name = ?2")?
        .query_row([session, &name], |row| row.get(0))?;
    // Whether or not the workspace has it yet: a run may be placing it just now.
    match older {
        Some(row) => connection
            .prepare_cached("UPDATE objects SET superseded = 0, placed = placed AND NOT ?2 WHERE row = ?1")?
            .execute(params![row, kept])?,
        None if kept => connection
            .prepare_cached("INSERT OR REPLACE INTO object_removals (session, name) VALUES (?1, ?2)")?
            .execute([session, &name])?,
        None => 0,
    };
    Ok(true)
}

/// Takes records off that a younger one of their name superseded and that were written before `before_ms`; at most
/// `files_max` of them. Returns their ids.
pub(super) fn prune(
    connection: &Connection,
    before_ms: u64,
    files_max: usize,
) -> rusqlite::Result<Vec<String>> {
    let old: Vec<(String, String)> = connection
        .prepare_cached(
            "SELECT o.id, o.session FROM objects o WHERE o.superseded AND o.modified_ms <= ?1 LIMIT ?2",
        )?
        .query_map(params![signed(before_ms), signed(files_max as u64)], |row| {
            Ok((row.get(0)?, row.get(1)?))
        })?
        .collect::<rusqlite::Result<_>>()?;
    for (id, session) in &old {
        remove(connection, session, id)?;
    }
    Ok(old.into_iter().map(|(id, _)| id).collect())
}

/// What a kept session's workspace is still to be told.
pub(super) fn pending(connection: &Connection, session: &str) -> rusqlite::Result<Pending> {
    // First the marks: what comes between them and the lists is listed again, not lost.
    let placed_to: Option<i64> = connection
        .prepare_cached("SELECT max(row) FROM objects WHERE session = ?1 AND NOT placed")?
        .query_row([session], |row| row.get(0))?;
    let removed_to: Option<i64> = connection
        .prepare_cached("SELECT max(row) FROM object_removals WHERE session = ?1")?
        .query_row([session], |row| row.get(0))?;
    let text = "WHERE o.session = ?1 AND NOT o.placed AND NOT o.superseded AND o.row <= ?2 ORDER BY o.row";
    let place = all(connection, text, params![session, placed_to.unwrap_or_default()])?;
    let remove = connection
        .prepare_cached("SELECT name FROM object_removals WHERE session = ?1 AND row <= ?2 ORDER BY row")?
        .query_map(params![session, removed_to.unwrap_or_default()], |row| row.get(0))?
        .collect::<rusqlite::Result<_>>()?;
    let place = place.into_iter().map(|it| it.record).collect();
    Ok(Pending {
        place,
        remove,
        placed_to: placed_to.unwrap_or_default(),
        removed_to: removed_to.unwrap_or_default(),
    })
}

/// The workspace has what `pending` listed, and what it left out because it was superseded.
pub(super) fn settled(connection: &Connection, session: &str, pending: &Pending) -> rusqlite::Result<()> {
    for file in &pending.place {
        connection.prepare_cached("UPDATE objects SET placed = 1 WHERE id = ?1")?.execute([&file.id])?;
    }
    connection
        .prepare_cached(
            "UPDATE objects SET placed = 1 WHERE session = ?1 AND NOT placed AND superseded AND row <= ?2",
        )?
        .execute(params![session, pending.placed_to])?;
    connection
        .prepare_cached("DELETE FROM object_removals WHERE session = ?1 AND row <= ?2")?
        .execute(params![session, pending.removed_to])?;
    Ok(())
}

/// Ids of every file on record.
pub(super) fn ids(connection: &Connection) -> rusqlite::Result<std::collections::HashSet<String>> {
    connection.prepare("SELECT id FROM objects")?.query_map([], |row| row.get(0))?.collect()
}

/// SQLite's integers are signed; ours stay far below.
fn signed(value: u64) -> i64 {
    i64::try_from(value).unwrap_or(i64::MAX)
}
