//! The thread that owns the connection.
#![forbid(unsafe_code)]

use std::borrow::Cow;
use std::collections::HashSet;

use rusqlite::{Connection, OptionalExtension, params};
use tokio::sync::{mpsc, oneshot};

use crate::engine::{Language, TenantId, Tier};
use crate::launcher::plan::SpaceId;
use crate::session::SessionKey;
use crate::session::id::SessionId;
use crate::store::Command;
use crate::store::journal::{Journal, Position};
use crate::store::work::{Payment, apart};
use crate::tenant::audit::{AuditRecord, status_name};

/// Most commands in one transaction.
const BATCH_MAX: usize = 512;
/// Audit rows that are kept; the oldest go first.
const AUDIT_ROWS_MAX: i64 = 1_000_000;
/// Audit rows between two looks at their number.
const AUDIT_TRIM_EVERY: u64 = 10_000;

/// An answer that is due once the transaction is committed.
enum Due {
    Done(oneshot::Sender<()>),
    Space(oneshot::Sender<SpaceId>, SpaceId),
    Work(Box<dyn Payment>),
    Nobody,
}

/// Writes until every handle on the store is gone.
pub(super) fn write(mut connection: Connection, mut commands: mpsc::Receiver<Command>, journal: &Journal) {
    let mut audited = 0_u64;
    while let Some(first) = commands.blocking_recv() {
        let mut batch = vec![first];
        while batch.len() < BATCH_MAX
            && let Ok(next) = commands.try_recv()
        {
            batch.push(next);
        }
        // A flush means the audit rows too.
        let takes = |command: &Command| matches!(command, Command::TakeAudit | Command::Flush { .. });
        let (rows, position) =
            if batch.iter().any(takes) { journal.take() } else { (Vec::new(), Position::default()) };
        let before = audited / AUDIT_TRIM_EVERY;
        audited += rows.len() as u64;
        let trim = audited / AUDIT_TRIM_EVERY > before;
        // Answers of a transaction that failed are dropped, and who waits for them is told so.
        match commit(&mut connection, batch, &rows, position, trim) {
            Ok(due) => due.into_iter().for_each(Due::pay),
            Err(error) => {
                tracing::error!(%error, "failed to write to the store");
                journal.put_back(rows);
                continue;
            }
        }
        if let Err(error) = journal.reset_if_large(|position| note(&connection, position)) {
            tracing::error!(%error, "failed to start the journal of audit rows anew");
        }
    }
}

fn commit(
    connection: &mut Connection,
    batch: Vec<Command>,
    rows: &[AuditRecord],
    position: Position,
    trim: bool,
) -> rusqlite::Result<Vec<Due>> {
    let transaction = connection.transaction()?;
    let mut due = Vec::with_capacity(batch.len());
    for command in batch {
        due.push(apply(&transaction, command)?);
    }
    for row in rows {
        audit(&transaction, row)?;
    }
    if !rows.is_empty() {
        note(&transaction, position)?;
    }
    if trim {
        transaction
            .prepare_cached("DELETE FROM audit WHERE row <= (SELECT max(row) FROM audit) - ?1")?
            .execute([AUDIT_ROWS_MAX])?;
    }
    transaction.commit()?;
    Ok(due)
}

/// Writes down how far the journal is taken.
fn note(connection: &Connection, position: Position) -> rusqlite::Result<()> {
    connection
        .prepare_cached("UPDATE journal SET generation = ?1, offset = ?2")?
        .execute([signed(position.generation), signed(position.offset)])?;
    Ok(())
}

/// How far the journal was taken.
pub(super) fn taken(connection: &Connection) -> rusqlite::Result<Position> {
    connection.query_row("SELECT generation, offset FROM journal", [], |row| {
        let (generation, offset): (i64, i64) = (row.get(0)?, row.get(1)?);
        Ok(Position { generation: generation.unsigned_abs(), offset: offset.unsigned_abs() })
    })
}

fn apply(connection: &Connection, command: Command) -> rusqlite::Result<Due> {
    Ok(match command {
        Command::Space { tenant, answer } => Due::Space(answer, space_of(connection, &tenant)?),
        Command::KeepSession { key, at_ms, answer } => {
            connection
                .prepare_cached("INSERT OR REPLACE INTO sessions VALUES (?1, ?2, ?3, ?4)")?
                .execute(params![key.tenant.0, tier_word(&key.tier), key.id.as_str(), signed(at_ms)])?;
            Due::Done(answer)
        }
        Command::ForgetSession { key, answer } => {
            connection
                .prepare_cached("DELETE FROM sessions WHERE tenant = ?1 AND language = ?2 AND id = ?3")?
                .execute(params![key.tenant.0, tier_word(&key.tier), key.id.as_str()])?;
            Due::Done(answer)
        }
        Command::Work(work) => apart(connection, work)?.map_or(Due::Nobody, Due::Work),
        Command::TakeAudit => Due::Nobody,
        Command::Flush { answer } => Due::Done(answer),
    })
}

impl Due {
    /// Nobody may wait any more; that is theirs to decide.
    fn pay(self) {
        match self {
            Due::Done(answer) => drop(answer.send(())),
            Due::Space(answer, space) => drop(answer.send(space)),
            Due::Work(payment) => payment.pay(),
            Due::Nobody => {}
        }
    }
}

fn space_of(connection: &Connection, tenant: &TenantId) -> rusqlite::Result<SpaceId> {
    let found: Option<i64> = connection
        .prepare_cached("SELECT space FROM spaces WHERE tenant = ?1")?
        .query_row([&tenant.0], |row| row.get(0))
        .optional()?;
    let space = match found {
        Some(space) => space,
        None => {
            connection.prepare_cached("INSERT INTO spaces (tenant) VALUES (?1)")?.execute([&tenant.0])?;
            connection.last_insert_rowid()
        }
    };
    Ok(SpaceId(space.unsigned_abs()))
}

fn audit(connection: &Connection, record: &AuditRecord) -> rusqlite::Result<()> {
    let sandbox = record.provenance.map(|it| signed(it.sandbox.0));
    let attestation = record.provenance.map(|it| it.attestation);
    connection
        .prepare_cached(
            "INSERT INTO audit (at_ms, tenant, language, session, status, duration_ms, sandbox, host_uid, \
             seccomp_filters, namespaces, ended) VALUES (?1, ?2, ?3, ?4, ?5, ?6, ?7, ?8, ?9, ?10, ?11)",
        )?
        .execute(params![
            signed(record.at_ms),
            record.tenant.0,
            record.ran.name(),
            record.session,
            status_name(record.status),
            signed(record.duration_ms),
            sandbox,
            attestation.map(|it| it.host_uid),
            attestation.map(|it| it.seccomp_filters),
            attestation.map(|it| it.namespaces),
            record.ended,
        ])?;
    Ok(())
}

/// In the column of the language a kernel's session has its name.
const KERNEL_WORD: &str = "kernel:";

fn tier_word(tier: &Tier) -> Cow<'_, str> {
    match tier {
        Tier::Native(language) => Cow::Borrowed(language.name()),
        Tier::Kernel(name) => Cow::Owned(format!("{KERNEL_WORD}{name}")),
    }
}

fn tier_of(word: &str) -> Option<Tier> {
    match word.strip_prefix(KERNEL_WORD) {
        Some(name) => Some(Tier::Kernel(name.to_owned())),
        None => Language::parse(word).map(Tier::Native),
    }
}

/// Every session that is written down.
pub(super) fn sessions(connection: &Connection) -> rusqlite::Result<HashSet<SessionKey>> {
    let mut statement = connection.prepare("SELECT tenant, language, id FROM sessions")?;
    let rows = statement.query_map([], |row| {
        Ok((row.get::<_, String>(0)?, row.get::<_, String>(1)?, row.get::<_, String>(2)?))
    })?;
    let mut found = HashSet::new();
    for row in rows {
        let (tenant, language, id) = row?;
        // A row that an older build wrote under other rules is none of ours.
        if let (Some(tier), Ok(id)) = (tier_of(&language), SessionId::parse(&id)) {
            found.insert(SessionKey { tenant: TenantId(tenant), tier, id });
        }
    }
    Ok(found)
}

/// Forgets sessions made before `oldest_ms` and all but the `keep_max` youngest.
pub(super) fn prune_sessions(
    connection: &Connection,
    oldest_ms: u64,
    keep_max: usize,
) -> rusqlite::Result<()> {
    connection.execute("DELETE FROM sessions WHERE created_at_ms < ?1", [signed(oldest_ms)])?;
    connection.execute(
        "DELETE FROM sessions WHERE created_at_ms < (SELECT created_at_ms FROM sessions \
         ORDER BY created_at_ms DESC LIMIT 1 OFFSET ?1)",
        [signed(keep_max as u64)],
    )?;
    Ok(())
}

/// SQLite's integers are signed; ours stay far below.
fn signed(value: u64) -> i64 {
    i64::try_from(value).unwrap_or(i64::MAX)
}
