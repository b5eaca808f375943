//! Writes of other modules: closures that run in the writer's transaction, each undone by itself when it fails.
#![forbid(unsafe_code)]

use std::fmt;

use rusqlite::Connection;

/// What the writer does for somebody, in its transaction.
pub(super) trait Work: Send {
    fn run(self: Box<Self>, connection: &Connection) -> rusqlite::Result<Box<dyn Payment>>;
}

/// An answer that is due once the transaction is committed.
pub(super) trait Payment {
    fn pay(self: Box<Self>);
}

impl fmt::Debug for dyn Work {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Work")
    }
}

/// `work`, whose outcome goes to `then`.
pub(super) fn followed<T: Send + 'static>(
    work: impl FnOnce(&Connection) -> rusqlite::Result<T> + Send + 'static,
    then: impl FnOnce(T) + Send + 'static,
) -> Box<dyn Work> {
    Box::new(Followed { work, then })
}

struct Followed<F, N> {
    work: F,
    then: N,
}

struct Due<N, T> {
    then: N,
    outcome: T,
}

impl<F, N, T> Work for Followed<F, N>
where
    F: FnOnce(&Connection) -> rusqlite::Result<T> + Send,
    N: FnOnce(T) + Send + 'static,
    T: Send + 'static,
{
    fn run(self: Box<Self>, connection: &Connection) -> rusqlite::Result<Box<dyn Payment>> {
        let outcome = (self.work)(connection)?;
        Ok(Box::new(Due { then: self.then, outcome }))
    }
}

impl<N: FnOnce(T), T> Payment for Due<N, T> {
    fn pay(self: Box<Self>) {
        (self.then)(self.outcome);
    }
}

/// Runs `work` so that its failure undoes its own writes and leaves the rest of the transaction as it is.
pub(super) fn apart(
    connection: &Connection,
    work: Box<dyn Work>,
) -> rusqlite::Result<Option<Box<dyn Payment>>> {
    connection.prepare_cached("SAVEPOINT work")?.execute([])?;
    let outcome = work.run(connection);
    if outcome.is_err() {
        connection.prepare_cached("ROLLBACK TO work")?.execute([])?;
    }
    connection.prepare_cached("RELEASE work")?.execute([])?;
    Ok(match outcome {
        Ok(payment) => Some(payment),
        Err(error) => {
            tracing::error!(%error, "failed to write to the store");
            None
        }
    })
}
