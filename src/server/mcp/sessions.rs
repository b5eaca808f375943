//! The protocol's sessions over HTTP: whose they are, how many there may be, and that what belongs to one ends with it.
//!
//! ```text
//! initialize ──room?──▶ Open (owner, id) ──DELETE, silence, shutdown──▶ ended: runs stop, interpreter and files go
//!                 └──no──▶ 429
//! ```
#![forbid(unsafe_code)]

use std::collections::HashMap;
use std::collections::hash_map::Entry;
use std::hash::{BuildHasher, RandomState};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use axum::http::{HeaderMap, StatusCode};
use futures_util::{Stream, StreamExt};
use rmcp::model::{ClientJsonRpcMessage, ClientNotification, RequestId, ServerJsonRpcMessage};
use rmcp::transport::streamable_http_server::session::local::{
    LocalSessionManager, LocalSessionManagerError, SessionConfig, SessionTransport,
};
use rmcp::transport::streamable_http_server::session::{ServerSseMessage, SessionId, SessionManager};
use tokio_util::sync::CancellationToken;

use super::SESSION_HEADER;
use super::place::{Home, Link};
use crate::config::Config;
use crate::engine::{Caller, TenantId};
use crate::server::AppState;

/// After the longest run, its answer has come.
const BEYOND_RUN: Duration = Duration::from_secs(60);
/// Requests of one session that may be on their way, those included whose client hung up.
const CALLS_MAX: usize = 1024;

tokio::task_local! {
    /// The request that the transport works on. It knows headers and sessions; who asks, only we do.
    pub(super) static ASKING: Asking;
}

/// One request on its way through the transport.
pub(super) struct Asking {
    pub(super) state: AppState,
    caller: Caller,
    /// Of the handler that was made last: when a session begins, it is that session's.
    made: Mutex<Option<Arc<Link>>>,
    refused: Mutex<Option<(StatusCode, String)>>,
}

impl Asking {
    pub(super) fn new(state: AppState, caller: Caller) -> Asking {
        Asking { state, caller, made: Mutex::default(), refused: Mutex::default() }
    }

    pub(super) fn note(&self, link: &Arc<Link>) {
        *lock(&self.made) = Some(Arc::clone(link));
    }

    /// What stood in the way, where it was something of ours.
    pub(super) fn refused(&self) -> Option<(StatusCode, String)> {
        lock(&self.refused).take()
    }

    /// The request itself, if it stands alone and code may have run for it.
    pub(super) fn started(&self) -> Option<RequestId> {
        lock(&self.made).as_ref()?.started().cloned()
    }

    /// Says it for the request that is being worked on.
    fn refuse(status: StatusCode, error: &NoSession) {
        // Outside of a request nobody waits for it.
        let _ = ASKING.try_with(|asking| *lock(&asking.refused) = Some((status, error.to_string())));
    }
}

/// Every session that is open.
pub(super) struct Sessions(Arc<Inner>);

struct Inner {
    local: LocalSessionManager,
    open: Mutex<HashMap<SessionId, Open>>,
    counts: Arc<Counts>,
    sessions_max: usize,
    idle_max: Duration,
    abandoned_max: Duration,
}

struct Open {
    owner: Caller,
    ended: CancellationToken,
    usage: Arc<Usage>,
    calls: Arc<Calls>,
    _counted: Counted,
}

/// Requests of a session on their way, by their ids.
///
/// The transport takes a second request of an id for the first, and keeps the answer that is then left over, however
/// large, for as long as the session lives; and the same for an answer that crosses a cancellation. So ids are taken
/// once, and cancellations do not come to it.
#[derive(Default)]
pub(super) struct Calls {
    hasher: RandomState,
    open: Mutex<HashMap<u64, CancellationToken>>,
}

impl Calls {
    /// An id may be as long as a body, so it is its key that is kept.
    fn key(&self, id: &RequestId) -> u64 {
        self.hasher.hash_one(id)
    }

    fn begin(&self, id: &RequestId) -> Result<u64, NoSession> {
        let (key, mut open) = (self.key(id), lock(&self.open));
        if open.len() >= CALLS_MAX {
            return Err(NoSession::TooManyCalls);
        }
        match open.entry(key) {
            Entry::Occupied(_) => Err(NoSession::IdTaken),
            Entry::Vacant(free) => {
                free.insert(CancellationToken::new());
                Ok(key)
            }
        }
    }

    /// Its answer has found its stream.
    fn end(&self, key: u64) {
        lock(&self.open).remove(&key);
    }

    fn is_open(&self, key: u64) -> bool {
        lock(&self.open).contains_key(&key)
    }

    fn cancel(&self, id: &RequestId) {
        if let Some(token) = lock(&self.open).get(&self.key(id)) {
            token.cancel();
        }
    }

    /// What is cancelled with a request.
    pub(super) fn token(&self, id: &RequestId) -> CancellationToken {
        lock(&self.open).get(&self.key(id)).cloned().unwrap_or_default()
    }
}

/// When a session was used last, and how many streams its client listens to now.
struct Usage(Mutex<(Instant, usize)>);

impl Usage {
    fn note(&self) {
        lock(&self.0).0 = Instant::now();
    }

    /// When it will have been idle for too long; `None` while somebody listens.
    fn idle_at(&self, idle_max: Duration) -> Option<Instant> {
        let (used, streams) = *lock(&self.0);
        (streams == 0).then(|| used + idle_max)
    }
}

/// A stream that a client listens to.
struct Listening(Arc<Usage>);

impl Listening {
    fn new(usage: Arc<Usage>) -> Listening {
        lock(&usage.0).1 += 1;
        Listening(usage)
    }
}

impl Drop for Listening {
    fn drop(&mut self) {
        let mut usage = lock(&self.0.0);
        *usage = (Instant::now(), usage.1.saturating_sub(1));
    }
}

/// How many sessions each tenant has.
#[derive(Default)]
struct Counts(Mutex<HashMap<TenantId, usize>>);

struct Counted {
    counts: Arc<Counts>,
    tenant: TenantId,
}

impl Counts {
    fn enter(counts: &Arc<Counts>, tenant: &TenantId, max: usize) -> Option<Counted> {
        let mut held = lock(&counts.0);
        let count = held.entry(tenant.clone()).or_default();
        if *count >= max {
            return None;
        }
        *count += 1;
        Some(Counted { counts: Arc::clone(counts), tenant: tenant.clone() })
    }
}

impl Drop for Counted {
    fn drop(&mut self) {
        let mut held = lock(&self.counts.0);
        if let Some(count) = held.get_mut(&self.tenant) {
            *count -= 1;
            if *count == 0 {
                held.remove(&self.tenant);
            }
        }
    }
}

/// A request whose answer is waited for. When its client hangs up before, its id stays taken until the answer has surely
/// come.
struct Waiting {
    calls: Arc<Calls>,
    key: u64,
    abandoned_max: Duration,
}

impl Drop for Waiting {
    fn drop(&mut self) {
        let Ok(runtime) = tokio::runtime::Handle::try_current() else { return };
        if self.calls.is_open(self.key) {
            let (calls, key, wait) = (Arc::clone(&self.calls), self.key, self.abandoned_max);
            runtime.spawn(async move {
                tokio::time::sleep(wait).await;
                calls.end(key);
            });
        }
    }
}

/// A session that was not made, or is not there.
#[derive(Debug, thiserror::Error)]
pub(super) enum NoSession {
    #[error("Too many MCP sessions are open ({0}); close one, or wait")]
    NoRoom(usize),
    #[error("Too many requests of this session have no answer yet ({CALLS_MAX})")]
    TooManyCalls,
    #[error("A request of this id has no answer yet")]
    IdTaken,
    #[error("a session begins with a request over HTTP")]
    NotAsked,
    #[error(transparent)]
    Local(#[from] LocalSessionManagerError),
}

impl Sessions {
    pub(super) fn new(config: &Config) -> Sessions {
        let mut local = LocalSessionManager::default();
        local.session_config = SessionConfig::default();
        // Its own would end a session whose client listens, or waits for a long run.
        local.session_config.keep_alive = None;
        Sessions(Arc::new(Inner {
            local,
            open: Mutex::default(),
            counts: Arc::default(),
            sessions_max: config.mcp.sessions_max,
            idle_max: config.mcp.session_idle,
            abandoned_max: config.librechat.execution_timeout + BEYOND_RUN,
        }))
    }

    /// Whether every session that a request names is this caller's.
    pub(super) fn are_of(&self, headers: &HeaderMap, caller: &Caller) -> bool {
        let open = lock(&self.0.open);
        headers.get_all(SESSION_HEADER).iter().all(|id| {
            let found = id.to_str().ok().and_then(|id| open.get(id));
            let found = found.filter(|session| session.owner == *caller);
            found.inspect(|session| session.usage.note()).is_some()
        })
    }

    /// The stream, which counts as use for as long as it is listened to.
    fn listened<S: Stream<Item = ServerSseMessage> + Send + Sync + 'static>(
        &self,
        id: &SessionId,
        stream: S,
        waiting: Option<Waiting>,
    ) -> impl Stream<Item = ServerSseMessage> + Send + Sync + 'static + use<S> {
        let open = lock(&self.0.open);
        let found = open.get(id);
        let listening = found.map(|session| Listening::new(Arc::clone(&session.usage)));
        let calls = found.map(|session| Arc::clone(&session.calls));
        stream.map(move |message| {
            let _held = (&listening, &waiting);
            if let (Some(calls), Some(id)) = (&calls, message.message.as_deref().and_then(answered)) {
                calls.end(calls.key(id));
            }
            message
        })
    }

    pub(super) fn is_empty(&self) -> bool {
        lock(&self.0.open).is_empty()
    }

    fn calls(&self, id: &SessionId) -> Option<Arc<Calls>> {
        lock(&self.0.open).get(id).map(|session| Arc::clone(&session.calls))
    }
}

/// The request that a message answers.
fn answered(message: &ServerJsonRpcMessage) -> Option<&RequestId> {
    match message {
        ServerJsonRpcMessage::Response(response) => Some(&response.id),
        ServerJsonRpcMessage::Error(error) => error.id.as_ref(),
        _ => None,
    }
}

/// The request that a message calls off.
fn called_off(message: &ClientJsonRpcMessage) -> Option<&RequestId> {
    match message {
        ClientJsonRpcMessage::Notification(it) => match &it.notification {
            ClientNotification::CancelledNotification(cancelled) => cancelled.params.request_id.as_ref(),
            _ => None,
        },
        _ => None,
    }
}

impl Inner {
    async fn close(&self, id: &SessionId) -> Result<(), NoSession> {
        let open = lock(&self.open).remove(id);
        if let Some(open) = open {
            open.ended.cancel();
        }
        Ok(self.local.close_session(id).await?)
    }

    /// Closes a session once it has been idle for too long.
    async fn expire(self: Arc<Inner>, id: SessionId, usage: Arc<Usage>, ended: CancellationToken) {
        loop {
            let at = usage.idle_at(self.idle_max).unwrap_or_else(|| Instant::now() + self.idle_max);
            tokio::select! {
                () = ended.cancelled() => return,
                () = tokio::time::sleep_until(at.into()) => {}
            }
            if usage.idle_at(self.idle_max).is_some_and(|at| at <= Instant::now()) {
                tracing::info!("an MCP session was idle for too long");
                if let Err(error) = self.close(&id).await {
                    tracing::warn!(%error, "an idle MCP session was not closed in order");
                }
                return;
            }
        }
    }
}

impl SessionManager for Sessions {
    type Error = NoSession;
    type Transport = SessionTransport;

    async fn create_session(&self) -> Result<(SessionId, SessionTransport), NoSession> {
        let asked = ASKING.try_with(|asking| {
            let link = lock(&asking.made).take();
            link.map(|link| (asking.state.clone(), asking.caller.clone(), link))
        });
        let (state, owner, link) = asked.ok().flatten().ok_or(NoSession::NotAsked)?;
        let sessions_max = self.0.sessions_max;
        let Some(counted) = Counts::enter(&self.0.counts, &owner.tenant, sessions_max) else {
            let full = NoSession::NoRoom(sessions_max);
            Asking::refuse(StatusCode::TOO_MANY_REQUESTS, &full);
            return Err(full);
        };
        let (id, transport) = self.0.local.create_session().await?;
        let ended = CancellationToken::new();
        let usage = Arc::new(Usage(Mutex::new((Instant::now(), 0))));
        let calls = Arc::<Calls>::default();
        link.begin(Home::new(state, owner.clone(), ended.clone(), Arc::clone(&calls)));
        tokio::spawn(Arc::clone(&self.0).expire(Arc::clone(&id), Arc::clone(&usage), ended.clone()));
        lock(&self.0.open).insert(Arc::clone(&id), Open { owner, ended, usage, calls, _counted: counted });
        Ok((id, transport))
    }

    async fn initialize_session(
        &self,
        id: &SessionId,
        message: ClientJsonRpcMessage,
    ) -> Result<ServerJsonRpcMessage, NoSession> {
        Ok(self.0.local.initialize_session(id, message).await?)
    }

    async fn has_session(&self, id: &SessionId) -> Result<bool, NoSession> {
        Ok(self.0.local.has_session(id).await?)
    }

    async fn close_session(&self, id: &SessionId) -> Result<(), NoSession> {
        self.0.close(id).await
    }

    async fn create_stream(
        &self,
        id: &SessionId,
        message: ClientJsonRpcMessage,
    ) -> Result<impl Stream<Item = ServerSseMessage> + Send + Sync + 'static, NoSession> {
        let mut waiting = None;
        if let (Some(calls), ClientJsonRpcMessage::Request(request)) = (self.calls(id), &message) {
            let begun = calls.begin(&request.id);
            let key = begun.inspect_err(|error| Asking::refuse(StatusCode::BAD_REQUEST, error))?;
            waiting = Some(Waiting { calls, key, abandoned_max: self.0.abandoned_max });
        }
        Ok(self.listened(id, self.0.local.create_stream(id, message).await?, waiting))
    }

    async fn accept_message(&self, id: &SessionId, message: ClientJsonRpcMessage) -> Result<(), NoSession> {
        if let Some(request) = called_off(&message) {
            if let Some(calls) = self.calls(id) {
                calls.cancel(request);
            }
            return Ok(());
        }
        Ok(self.0.local.accept_message(id, message).await?)
    }

    async fn create_standalone_stream(
        &self,
        id: &SessionId,
    ) -> Result<impl Stream<Item = ServerSseMessage> + Send + Sync + 'static, NoSession> {
        Ok(self.listened(id, self.0.local.create_standalone_stream(id).await?, None))
    }

    async fn resume(
        &self,
        id: &SessionId,
        last_event_id: String,
    ) -> Result<impl Stream<Item = ServerSseMessage> + Send + Sync + 'static, NoSession> {
        Ok(self.listened(id, self.0.local.resume(id, last_event_id).await?, None))
    }
}

/// Whole after every statement that holds it.
fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}
