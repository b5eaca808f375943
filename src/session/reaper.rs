//! Closes sessions that nobody uses, and those that a launcher took with it.
#![forbid(unsafe_code)]

use std::sync::{Arc, Weak};
use std::time::Duration;

use tokio::sync::watch;

use crate::session::registry::Registry;
use crate::store::Store;

/// Shortest and longest time between two looks.
const LOOK_EVERY_MIN: Duration = Duration::from_millis(10);
const LOOK_EVERY_MAX: Duration = Duration::from_secs(10);
/// A session is closed at most this fraction of its idle limit late.
const LATE_FRACTION: u32 = 20;

/// Looks until nobody holds the registry any more.
pub async fn reap(registry: Weak<Registry>, store: Store) {
    while let Some(sessions) = registry.upgrade() {
        let every = (sessions.limits().idle_max / LATE_FRACTION).clamp(LOOK_EVERY_MIN, LOOK_EVERY_MAX);
        close_idle(&sessions, &store).await;
        drop(sessions);
        tokio::time::sleep(every).await;
    }
}

async fn close_idle(sessions: &Arc<Registry>, store: &Store) {
    for key in sessions.close_idle() {
        tracing::info!(tenant = key.tenant.0, session = %key.id, "session closed: idle");
        if let Err(error) = store.forget_session(&key).await {
            tracing::error!(%error, session = %key.id, "failed to forget a session");
        }
    }
}

/// Closes, each time a launcher is gone, the sessions that waited in its interpreters: a name without an
/// interpreter must not count towards a tenant's cap.
pub async fn bury(registry: Weak<Registry>, mut gone: watch::Receiver<u64>) {
    while gone.changed().await.is_ok() {
        let Some(sessions) = registry.upgrade() else { return };
        for key in sessions.close_lost() {
            tracing::warn!(tenant = key.tenant.0, session = %key.id, "session closed: its launcher is gone");
        }
    }
}
