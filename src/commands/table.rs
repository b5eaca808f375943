//! Sessions by tenant and id, under a cap: the one that has been idle longest makes room for a new one.
#![forbid(unsafe_code)]

use std::collections::{BTreeMap, HashMap};
use std::sync::{Arc, Mutex, MutexGuard};
use std::time::Duration;

use super::Refused;
use super::session::Session;
use crate::engine::TenantId;
use crate::session::id::SessionId;

/// All sessions of one kind.
#[derive(Debug)]
pub(super) struct Table {
    /// Of one tenant.
    pub sessions_max: usize,
    pub idle_max: Duration,
    books: Mutex<Books>,
}

#[derive(Debug, Default)]
struct Books {
    tenants: HashMap<TenantId, BTreeMap<SessionId, Arc<Session>>>,
    closed: bool,
}

impl Table {
    pub(super) fn new(sessions_max: usize, idle_max: Duration) -> Table {
        Table { sessions_max, idle_max, books: Mutex::default() }
    }

    pub(super) fn find(&self, tenant: &TenantId, id: &str) -> Result<Arc<Session>, Refused> {
        let unknown = || Refused::NoSuchSession(id.chars().take(100).collect());
        let id = SessionId::parse(id).map_err(|_| unknown())?;
        let books = self.lock();
        books.tenants.get(tenant).and_then(|sessions| sessions.get(&id)).cloned().ok_or_else(unknown)
    }

    /// The session, and whether it was made for this.
    pub(super) fn find_or_create(
        &self,
        tenant: &TenantId,
        id: &SessionId,
        make: impl FnOnce() -> Session,
    ) -> Result<(Arc<Session>, bool), Refused> {
        let mut books = self.lock();
        if books.closed {
            return Err(Refused::ShuttingDown);
        }
        let sessions = books.tenants.entry(tenant.clone()).or_default();
        if let Some(session) = sessions.get(id) {
            return Ok((Arc::clone(session), false));
        }
        let mut evicted = None;
        if sessions.len() >= self.sessions_max {
            let idle = sessions.iter().filter_map(|(id, session)| Some((session.idle_for()?, id.clone())));
            let (_, longest) = idle.max().ok_or(Refused::TooManySessions { max: self.sessions_max })?;
            evicted = sessions.remove(&longest);
        }
        let session = Arc::new(make());
        sessions.insert(id.clone(), Arc::clone(&session));
        drop(books);
        if let Some(evicted) = evicted {
            tracing::info!(tenant = tenant.0, session = %evicted.birth.id, "command session closed: a new one needs room");
            evicted.close("the session was closed: a new one needed room");
        }
        Ok((session, true))
    }

    pub(super) fn list(&self, tenant: &TenantId) -> Vec<Arc<Session>> {
        let books = self.lock();
        books.tenants.get(tenant).map_or_else(Vec::new, |sessions| sessions.values().cloned().collect())
    }

    /// Closes a session, if it is still the one under its name.
    pub(super) fn close(&self, session: &Arc<Session>, why: &str) {
        let mut books = self.lock();
        let tenant = &session.birth.tenant;
        if let Some(sessions) = books.tenants.get_mut(tenant) {
            if sessions.get(&session.birth.id).is_some_and(|current| Arc::ptr_eq(current, session)) {
                sessions.remove(&session.birth.id);
            }
            if sessions.is_empty() {
                books.tenants.remove(tenant);
            }
        }
        drop(books);
        session.close(why);
    }

    /// Closes what nobody has used for too long.
    pub(super) fn close_idle(&self) {
        for session in self.all() {
            if session.idle_for().is_some_and(|idle| idle >= self.idle_max) {
                tracing::info!(tenant = session.birth.tenant.0, session = %session.birth.id, "command session closed: idle");
                self.close(&session, "the session was closed: nobody used it");
            }
        }
    }

    /// Closes everything and makes no session any more.
    pub(super) fn shut_down(&self) {
        self.lock().closed = true;
        for session in self.all() {
            self.close(&session, "the daemon is shutting down");
        }
    }

    fn all(&self) -> Vec<Arc<Session>> {
        self.lock().tenants.values().flat_map(BTreeMap::values).cloned().collect()
    }

    fn lock(&self) -> MutexGuard<'_, Books> {
        self.books.lock().expect("no code panics while it holds the table")
    }
}
