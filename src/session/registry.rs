//! All sessions, by tenant. One lock, held for look-ups only.
#![forbid(unsafe_code)]

use std::collections::{BTreeMap, HashMap, HashSet};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard};
use std::time::Duration;

use crate::engine::{Refusal, TenantId, Tier, Tiers};
use crate::session::id::SessionId;
use crate::session::state::CloseReason;
use crate::session::{Birth, LOST_HINT, RESTART_HINT, Session, SessionEntry, SessionKey};

/// Sessions lost with their launchers that are remembered for the hint; a further one comes back without.
const REMEMBERED_MAX: usize = 10_000;

/// What bounds sessions.
#[derive(Copy, Clone, Debug)]
pub struct SessionLimits {
    /// Live native sessions of one tenant, over both languages.
    pub sessions_max: usize,
    /// Live kernel sessions of one tenant.
    pub kernel_sessions_max: usize,
    /// Cells that wait for one session.
    pub waiting_max: usize,
    /// A native session that nobody uses for this long is closed.
    pub idle_max: Duration,
    /// The same for a kernel's.
    pub kernel_idle_max: Duration,
}

impl SessionLimits {
    fn idle_max(&self, session: &Session) -> Duration {
        let of_tier = if session.key.tier.is_kernel() { self.kernel_idle_max } else { self.idle_max };
        session.birth.idle_max.map_or(of_tier, |own| own.min(of_tier))
    }

    fn check_room(&self, tier: &Tier, live: usize) -> Result<(), Refusal> {
        match tier {
            Tier::Native(_) if live >= self.sessions_max => {
                Err(Refusal::TooManySessions { max: self.sessions_max })
            }
            Tier::Kernel(_) if live >= self.kernel_sessions_max => {
                Err(Refusal::TooManyKernelSessions { max: self.kernel_sessions_max })
            }
            _ => Ok(()),
        }
    }
}

/// Finds, makes and closes sessions.
#[derive(Debug)]
pub struct Registry {
    limits: SessionLimits,
    books: Mutex<Books>,
    /// Sessions that were closed because nobody used them.
    cleaned: AtomicU64,
}

type OfTenant = BTreeMap<(SessionId, Tier), Arc<Session>>;

#[derive(Debug)]
struct Books {
    tenants: HashMap<TenantId, OfTenant>,
    /// Sessions that were lost with the last daemon or a launcher and have not been seen since, and what
    /// their next reply says.
    remembered: HashMap<SessionKey, &'static str>,
    closed: bool,
}

impl Registry {
    pub fn new(limits: SessionLimits, remembered: HashSet<SessionKey>) -> Registry {
        let remembered = remembered.into_iter().map(|key| (key, RESTART_HINT)).collect();
        let books = Books { tenants: HashMap::new(), remembered, closed: false };
        Registry { limits, books: Mutex::new(books), cleaned: AtomicU64::new(0) }
    }

    pub fn limits(&self) -> SessionLimits {
        self.limits
    }

    /// The session `key`, made with `birth` when there is none. Never evicts another.
    pub fn find_or_create(
        &self,
        key: &SessionKey,
        birth: impl FnOnce() -> Birth,
    ) -> Result<Arc<Session>, Refusal> {
        let mut books = self.lock();
        if books.closed {
            return Err(Refusal::ShuttingDown);
        }
        let Books { tenants, remembered, .. } = &mut *books;
        let sessions = tenants.entry(key.tenant.clone()).or_default();
        let place = (key.id.clone(), key.tier.clone());
        if let Some(session) = sessions.get(&place) {
            return Ok(Arc::clone(session));
        }
        let alike = sessions.keys().filter(|(_, tier)| tier.is_kernel() == key.tier.is_kernel()).count();
        self.limits.check_room(&key.tier, alike)?;
        let lost = remembered.remove(key);
        let session = Arc::new(Session::new(key.clone(), birth(), self.limits.waiting_max, lost));
        sessions.insert(place, Arc::clone(&session));
        Ok(session)
    }

    /// A tenant's sessions of some tiers with the key of the listing: the id, or `<tier>:<id>` for the younger of
    /// two sessions with one id.
    pub fn list(&self, tenant: &TenantId, tiers: Tiers) -> Vec<(String, SessionEntry)> {
        let sessions = self.of_tenant(tenant, tiers);
        let mut listed = Vec::with_capacity(sessions.len());
        for session in &sessions {
            let is_second = sessions.iter().any(|other| {
                other.key.id == session.key.id
                    && other.key.tier != session.key.tier
                    && (other.created_at, &other.key.tier) < (session.created_at, &session.key.tier)
            });
            let id = session.key.id.as_str();
            let key = if is_second { format!("{}:{id}", session.key.tier.name()) } else { id.to_owned() };
            listed.push((key, self.entry(session)));
        }
        listed
    }

    /// One session, by its id or by its key of the listing.
    pub fn get(&self, tenant: &TenantId, tiers: Tiers, name: &str) -> Option<SessionEntry> {
        self.list(tenant, tiers).into_iter().find(|(key, _)| key == name).map(|(_, entry)| entry)
    }

    pub fn entry(&self, session: &Session) -> SessionEntry {
        session.entry(self.limits.idle_max(session))
    }

    /// Closes a tenant's sessions called `name`: all tiers' by the plain id, one's by the long key.
    /// Returns what was closed and what was only remembered, for the store.
    pub fn delete(&self, tenant: &TenantId, tiers: Tiers, name: &str) -> Deleted {
        let all = self.of_tenant(tenant, tiers);
        let (plain, others): (Vec<_>, Vec<_>) =
            all.into_iter().partition(|session| session.key.id.as_str() == name);
        let sessions = if plain.is_empty() { by_long_key(others, name) } else { plain };
        let closed = self.close_all(sessions, CloseReason::Deleted);
        let forgotten =
            self.forget(|key| key.tenant == *tenant && tiers.hold(&key.tier) && key.id.as_str() == name);
        Deleted { closed, forgotten }
    }

    /// Closes all of a tenant's sessions.
    pub fn clear(&self, tenant: &TenantId, tiers: Tiers) -> Deleted {
        let closed = self.close_all(self.of_tenant(tenant, tiers), CloseReason::Deleted);
        let forgotten = self.forget(|key| key.tenant == *tenant && tiers.hold(&key.tier));
        Deleted { closed, forgotten }
    }

    /// Closes what nobody has used for too long.
    pub fn close_idle(&self) -> Vec<SessionKey> {
        let is_idle = |session: &Arc<Session>| {
            session.idle_for().is_some_and(|idle| idle >= self.limits.idle_max(session))
        };
        let idle = self.all().into_iter().filter(is_idle).collect();
        let closed = self.close_all(idle, CloseReason::Idle);
        self.cleaned.fetch_add(closed.len() as u64, Ordering::Relaxed);
        closed
    }

    /// How many sessions idled out so far.
    pub fn cleaned(&self) -> u64 {
        self.cleaned.load(Ordering::Relaxed)
    }

    /// Closes what waited for a cell when its launcher went away. The next cell of that name hears of it.
    pub fn close_lost(&self) -> Vec<SessionKey> {
        let mut closed = Vec::new();
        for session in self.all() {
            let mut books = self.lock();
            let interpreter = session.close_if_lost();
            if interpreter.is_some() {
                books.take_out(&session);
                books.remember(&session);
                closed.push(session.key.clone());
            }
            drop(books);
            // Asks for the end of a sandbox that is gone: not under the lock.
            drop(interpreter);
        }
        closed
    }

    /// Closes a session whose run has lost its interpreter with the launcher.
    pub fn close_after_loss(&self, session: &Arc<Session>) {
        if self.close(session, CloseReason::LauncherGone) {
            self.lock().remember(session);
        }
    }

    /// Takes out a session that never ran anything and that nobody waits for.
    pub fn remove_unborn(&self, session: &Arc<Session>) {
        if session.is_unborn() {
            self.close(session, CloseReason::NeverStarted);
        }
    }

    /// Closes one session, if it is still the one under its name.
    pub fn close(&self, session: &Arc<Session>, reason: CloseReason) -> bool {
        let removed = self.lock().take_out(session);
        session.close(reason);
        removed
    }

    /// Closes everything and makes no session any more.
    pub fn shut_down(&self) {
        self.lock().closed = true;
        self.close_all(self.all(), CloseReason::ShuttingDown);
    }

    /// Live sessions of all tenants.
    pub fn count(&self) -> usize {
        self.lock().tenants.values().map(BTreeMap::len).sum()
    }

    fn close_all(&self, sessions: Vec<Arc<Session>>, reason: CloseReason) -> Vec<SessionKey> {
        let closed = sessions.into_iter().filter(|session| self.close(session, reason));
        closed.map(|session| session.key.clone()).collect()
    }

    fn forget(&self, which: impl Fn(&SessionKey) -> bool) -> Vec<SessionKey> {
        self.lock().remembered.extract_if(|key, _| which(key)).map(|(key, _)| key).collect()
    }

    /// Sessions of a tenant and of some tiers that live.
    pub fn count_of(&self, tenant: &TenantId, tiers: Tiers) -> usize {
        self.of_tenant(tenant, tiers).len()
    }

    fn of_tenant(&self, tenant: &TenantId, tiers: Tiers) -> Vec<Arc<Session>> {
        let books = self.lock();
        let sessions = books.tenants.get(tenant).into_iter().flat_map(BTreeMap::values);
        sessions.filter(|session| tiers.hold(&session.key.tier)).cloned().collect()
    }

    fn all(&self) -> Vec<Arc<Session>> {
        self.lock().tenants.values().flat_map(BTreeMap::values).cloned().collect()
    }

    fn lock(&self) -> MutexGuard<'_, Books> {
        self.books.lock().expect("no code panics while it holds the registry's books")
    }
}

impl Books {
    /// True when it was the one under its name.
    fn take_out(&mut self, session: &Arc<Session>) -> bool {
        let Some(sessions) = self.tenants.get_mut(&session.key.tenant) else { return false };
        let place = (session.key.id.clone(), session.key.tier.clone());
        let is_current = sessions.get(&place).is_some_and(|current| Arc::ptr_eq(current, session));
        if is_current {
            sessions.remove(&place);
        }
        if sessions.is_empty() {
            self.tenants.remove(&session.key.tenant);
        }
        is_current
    }

    /// Nobody has heard of a session that was never written down.
    fn remember(&mut self, session: &Session) {
        if session.is_stored() && self.remembered.len() < REMEMBERED_MAX {
            self.remembered.insert(session.key.clone(), LOST_HINT);
        }
    }
}

fn by_long_key(sessions: Vec<Arc<Session>>, name: &str) -> Vec<Arc<Session>> {
    // A tier's name may hold no colon, an id may.
    let Some((tier, id)) = name.split_once(':') else { return Vec::new() };
    let fits = |session: &Arc<Session>| session.key.tier.name() == tier && session.key.id.as_str() == id;
    sessions.into_iter().filter(fits).collect()
}

/// What a deletion met.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Deleted {
    pub closed: Vec<SessionKey>,
    pub forgotten: Vec<SessionKey>,
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::engine::Language;
    use crate::launcher::plan::{Account, SpaceId};
    use crate::session::NoTurn;

    fn limits(idle_max: Duration) -> SessionLimits {
        SessionLimits {
            sessions_max: 3,
            kernel_sessions_max: 2,
            waiting_max: 2,
            idle_max,
            kernel_idle_max: idle_max / 2,
        }
    }

    fn registry() -> Registry {
        let limits = limits(Duration::from_millis(20));
        Registry::new(limits, HashSet::new())
    }

    fn key(tenant: &str, language: Language, id: &str) -> SessionKey {
        let tier = Tier::Native(language);
        SessionKey { tenant: TenantId(tenant.to_owned()), tier, id: SessionId::parse(id).expect("valid") }
    }

    fn birth() -> Birth {
        Birth { space: SpaceId(1), account: Account(0), cwd: None, idle_max: None, up_front: true }
    }

    fn create(registry: &Registry, key: &SessionKey) -> Arc<Session> {
        registry.find_or_create(key, birth).expect("room")
    }

    #[test]
    fn the_cap_counts_both_languages_of_one_tenant_and_evicts_nobody() {
        let registry = registry();
        create(&registry, &key("a", Language::Python, "1"));
        create(&registry, &key("a", Language::JavaScript, "1"));
        create(&registry, &key("a", Language::Python, "2"));
        let fourth = registry.find_or_create(&key("a", Language::Python, "3"), birth);
        assert_eq!(fourth.err(), Some(Refusal::TooManySessions { max: 3 }));
        create(&registry, &key("b", Language::Python, "3"));
        create(&registry, &key("a", Language::Python, "1"));
        assert_eq!(registry.count(), 4);
    }

    #[test]
    fn the_second_language_of_an_id_is_listed_by_its_long_key() {
        let registry = registry();
        let tenant = TenantId("a".to_owned());
        create(&registry, &key("a", Language::JavaScript, "s"));
        std::thread::sleep(Duration::from_millis(2));
        create(&registry, &key("a", Language::Python, "s"));
        let keys: Vec<_> = registry
            .list(&tenant, Tiers::All)
            .into_iter()
            .map(|(key, entry)| (key, entry.tier.language()))
            .collect();
        assert!(keys.contains(&("s".to_owned(), Language::JavaScript)), "{keys:?}");
        assert!(keys.contains(&("python:s".to_owned(), Language::Python)), "{keys:?}");
        assert_eq!(
            registry.get(&tenant, Tiers::All, "python:s").map(|it| it.tier.language()),
            Some(Language::Python)
        );
        assert_eq!(registry.delete(&tenant, Tiers::All, "python:s").closed.len(), 1);
        create(&registry, &key("a", Language::Python, "s"));
        assert_eq!(registry.delete(&tenant, Tiers::All, "s").closed.len(), 2);
        assert!(registry.get(&tenant, Tiers::All, "s").is_none());
    }

    #[test]
    fn kernels_have_a_cap_and_an_idle_time_of_their_own() {
        let registry = registry();
        let kernel = |id: &str| SessionKey {
            tier: Tier::Kernel("python3".to_owned()),
            ..key("a", Language::Python, id)
        };
        for id in ["1", "2", "3"] {
            create(&registry, &key("a", Language::Python, id));
        }
        create(&registry, &kernel("1"));
        create(&registry, &kernel("2"));
        let third = registry.find_or_create(&kernel("3"), birth);
        assert_eq!(third.err(), Some(Refusal::TooManyKernelSessions { max: 2 }));
        let tenant = TenantId("a".to_owned());
        assert_eq!(registry.count_of(&tenant, Tiers::Kernels), 2);
        assert_eq!(
            registry.list(&tenant, Tiers::Kernels)[0].0,
            "1",
            "alone in its list it needs no long key"
        );
        assert!(registry.get(&tenant, Tiers::All, "python3:1").is_some_and(|it| it.tier.is_kernel()));
        std::thread::sleep(Duration::from_millis(12));
        assert_eq!(registry.close_idle().len(), 2, "native sessions wait longer");
        assert_eq!(registry.cleaned(), 2);
        assert!(registry.delete(&tenant, Tiers::Kernels, "1").closed.is_empty());
        assert_eq!(registry.clear(&tenant, Tiers::All).closed.len(), 3);
    }

    #[test]
    fn tenants_do_not_see_each_other() {
        let registry = registry();
        create(&registry, &key("a", Language::Python, "s"));
        let other = TenantId("b".to_owned());
        assert!(registry.list(&other, Tiers::All).is_empty());
        assert!(registry.delete(&other, Tiers::All, "s").closed.is_empty());
        assert!(registry.clear(&other, Tiers::All).closed.is_empty());
        assert_eq!(registry.count(), 1);
    }

    #[test]
    fn an_idle_session_is_closed_and_its_name_is_free() {
        let registry = registry();
        let first = create(&registry, &key("a", Language::Python, "s"));
        assert!(registry.close_idle().is_empty());
        std::thread::sleep(Duration::from_millis(25));
        assert_eq!(registry.close_idle().len(), 1);
        let second = create(&registry, &key("a", Language::Python, "s"));
        assert!(!Arc::ptr_eq(&first, &second));
        assert!(!registry.close(&first, CloseReason::Deleted), "the new one is not the old one");
        assert_eq!(registry.count(), 1);
    }

    #[tokio::test]
    async fn a_session_that_runs_is_not_idle() {
        let registry = registry();
        let session = create(&registry, &key("a", Language::Python, "s"));
        let turn = session.turn().await.expect("first");
        session.begin(&turn);
        std::thread::sleep(Duration::from_millis(25));
        assert!(registry.close_idle().is_empty());
    }

    #[tokio::test]
    async fn turns_come_in_order_and_the_queue_has_an_end() {
        let registry = registry();
        let session = create(&registry, &key("a", Language::Python, "s"));
        let first = session.turn().await.expect("free");
        let (order, mut seen) = tokio::sync::mpsc::channel(8);
        for n in 0..2 {
            let (session, order) = (Arc::clone(&session), order.clone());
            tokio::spawn(async move {
                let turn = session.turn().await;
                order.send((n, turn.is_ok())).await.ok();
            });
            tokio::time::sleep(Duration::from_millis(5)).await;
        }
        assert_eq!(session.turn().await.err(), Some(NoTurn::Refused(Refusal::TooManyWaiting { max: 2 })));
        drop(first);
        assert_eq!(seen.recv().await, Some((0, true)));
        assert_eq!(seen.recv().await, Some((1, true)));
    }

    #[tokio::test]
    async fn closing_wakes_those_who_wait() {
        let registry = registry();
        let session = create(&registry, &key("a", Language::Python, "s"));
        let _first = session.turn().await.expect("free");
        let waiting = tokio::spawn({
            let session = Arc::clone(&session);
            async move { session.turn().await.err() }
        });
        tokio::time::sleep(Duration::from_millis(5)).await;
        registry.close(&session, CloseReason::Deleted);
        assert_eq!(waiting.await.expect("no panic"), Some(NoTurn::Closed(CloseReason::Deleted)));
    }

    #[test]
    fn a_remembered_session_says_once_that_it_was_reset() {
        let limits = limits(Duration::from_secs(1));
        let known = key("a", Language::Python, "s");
        let registry = Registry::new(limits, HashSet::from([known.clone()]));
        let session = create(&registry, &known);
        assert_eq!(session.take_hint().as_deref(), Some(crate::session::RESTART_HINT));
        assert_eq!(session.take_hint(), None);
        registry.close(&session, CloseReason::Deleted);
        assert_eq!(create(&registry, &known).take_hint(), None);
    }
}
