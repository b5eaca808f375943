//! Which session a call works in: the one it names, the one its headers name, or the one of its connection.
#![forbid(unsafe_code)]

use std::fmt;
use std::sync::{Arc, OnceLock};

use axum::http::request;
use rmcp::RoleServer;
use rmcp::model::RequestId;
use rmcp::service::RequestContext;
use tokio::sync::OnceCell;
use tokio_util::sync::CancellationToken;

use super::handler::Handler;
use super::sessions::Calls;
use crate::engine::Caller;
use crate::objects::{Affinity, Objects, ObjectsError, SessionInfo};
use crate::runs::{RunRefused, Runs};
use crate::server::AppState;

/// Names a session for every call of a request, where a client can set a header and no argument.
const NAME_HEADER: &str = "x-caisson-session";
/// Longest name of a session.
const NAME_CHARS_MAX: usize = 128;

/// Why a call was not carried out; its text is for the model.
#[derive(Debug)]
pub(super) struct Fault(pub(super) String);

impl Fault {
    pub(super) fn new(text: impl Into<String>) -> Fault {
        Fault(text.into())
    }
}

impl fmt::Display for Fault {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

impl From<ObjectsError> for Fault {
    fn from(error: ObjectsError) -> Fault {
        match error {
            ObjectsError::TooLarge { bytes_max } => {
                Fault(format!("the file is larger than {bytes_max} bytes, the most there may be"))
            }
            ObjectsError::SessionFull { .. }
            | ObjectsError::TooManyKept { .. }
            | ObjectsError::NoSession
            | ObjectsError::StorageFull => Fault(error.to_string()),
            error => {
                tracing::error!(error = &error as &dyn std::error::Error, "files cannot be used");
                Fault::new("files cannot be kept at the moment")
            }
        }
    }
}

impl From<RunRefused> for Fault {
    fn from(refused: RunRefused) -> Fault {
        Fault(refused.to_string())
    }
}

/// What a handler belongs to: nothing, until a session of the protocol begins with it.
#[derive(Default)]
pub(super) struct Link {
    home: OnceLock<Home>,
    /// Of a request that stands alone, once code may run for it.
    started: OnceLock<RequestId>,
}

impl Link {
    pub(super) fn begin(&self, home: Home) {
        // A handler is made for one session.
        let _ = self.home.set(home);
    }

    /// From here on code may run for this request.
    pub(super) fn start(&self, id: &RequestId) {
        if self.home.get().is_none() {
            // Such a handler is made for one request.
            let _ = self.started.set(id.clone());
        }
    }

    pub(super) fn started(&self) -> Option<&RequestId> {
        self.started.get()
    }
}

/// The workspace of a connection. It goes when the connection, and the last that it ran, are gone.
pub(super) struct Home {
    state: AppState,
    caller: Caller,
    name: String,
    made: OnceCell<SessionInfo>,
    ended: CancellationToken,
    calls: Arc<Calls>,
}

impl Home {
    pub(super) fn new(state: AppState, caller: Caller, ended: CancellationToken, calls: Arc<Calls>) -> Home {
        Home { state, caller, name: nanoid::nanoid!(), made: OnceCell::new(), ended, calls }
    }

    async fn session(&self, objects: &Objects) -> Result<SessionInfo, Fault> {
        let made = || async {
            let (session, _) = objects.affinity(&self.caller, "", Affinity::Connection(&self.name)).await?;
            Ok::<_, Fault>(session)
        };
        let session = self.made.get_or_try_init(made).await?;
        // It may be quiet for longer than files live.
        match objects.session(&self.caller, &session.id).await {
            Some(session) => Ok(session),
            None => made().await,
        }
    }
}

impl Drop for Home {
    fn drop(&mut self) {
        let (Some(runs), Ok(runtime)) = (self.state.runs().cloned(), tokio::runtime::Handle::try_current())
        else {
            return;
        };
        if self.made.get().is_none() {
            return;
        }
        let (caller, name) = (self.caller.clone(), std::mem::take(&mut self.name));
        runtime.spawn(async move {
            let objects = runs.objects();
            if let Ok((session, _)) = objects.affinity(&caller, "", Affinity::Connection(&name)).await {
                runs.reset(&session.id).await;
                objects.end(&caller, &session.id).await;
            }
        });
    }
}

/// Where one call works.
pub(super) struct Place {
    pub(super) runs: Arc<Runs>,
    pub(super) caller: Caller,
    pub(super) session: SessionInfo,
    /// As a client says it; `None`: the session of its connection.
    pub(super) name: Option<String>,
    /// The name was made up here, so the client must be told.
    pub(super) is_new: bool,
    /// Ends with the connection.
    ended: CancellationToken,
    /// Of the call.
    cancelled: [CancellationToken; 2],
}

impl Place {
    /// Waits until its client calls it off, or its connection ends.
    pub(super) async fn stopped(&self) {
        let [one, other] = &self.cancelled;
        tokio::select! {
            () = one.cancelled() => {}
            () = other.cancelled() => {}
            () = self.ended.cancelled() => {}
        }
    }
}

/// Whether a call without a session may begin one.
#[derive(Copy, Clone, Debug, PartialEq, Eq)]
pub(super) enum Missing {
    Begin,
    Refuse,
}

impl Handler {
    /// Who asks.
    pub(super) fn caller(&self, context: &RequestContext<RoleServer>) -> Result<Caller, Fault> {
        let parts = context.extensions.get::<request::Parts>();
        let over_http = parts.and_then(|parts| parts.extensions.get::<Caller>());
        let caller = over_http.or(self.local_caller.as_ref()).cloned();
        caller.ok_or_else(|| Fault::new("nobody is known to ask"))
    }

    /// The session that a call means.
    pub(super) async fn place(
        &self,
        context: &RequestContext<RoleServer>,
        given: Option<&str>,
        missing: Missing,
    ) -> Result<Place, Fault> {
        let caller = self.caller(context)?;
        let runs = self.state.runs().cloned();
        let runs = runs.ok_or_else(|| Fault::new("the server is starting up; try again"))?;
        let name = match given.filter(|name| !name.is_empty()) {
            Some(name) => Some(checked(name)?.to_owned()),
            None => header_name(context)?,
        };
        let home = self.link.home.get().filter(|home| home.caller == caller);
        let (session, name, is_new, ended) = match (name, home) {
            (Some(name), home) => {
                let ended = home.map(|home| home.ended.clone()).unwrap_or_default();
                (named(&runs, &caller, &name).await?, Some(name), false, ended)
            }
            (None, Some(home)) => (home.session(runs.objects()).await?, None, false, home.ended.clone()),
            (None, None) if missing == Missing::Begin => {
                let name = nanoid::nanoid!();
                (named(&runs, &caller, &name).await?, Some(name), true, CancellationToken::new())
            }
            (None, None) => {
                return Err(Fault::new(
                    "this call belongs to no session: pass as `session` the name that an earlier result told, \
                     or one of your own",
                ));
            }
        };
        // Sessions over HTTP do not leave it to the transport.
        let calls = self.link.home.get().map(|home| home.calls.token(&context.id));
        let cancelled = [context.ct.clone(), calls.unwrap_or_default()];
        Ok(Place { runs, caller, session, name, is_new, ended, cancelled })
    }
}

async fn named(runs: &Runs, caller: &Caller, name: &str) -> Result<SessionInfo, Fault> {
    Ok(runs.objects().affinity(caller, "", Affinity::Named(name)).await?.0)
}

fn header_name(context: &RequestContext<RoleServer>) -> Result<Option<String>, Fault> {
    let parts = context.extensions.get::<request::Parts>();
    let Some(name) = parts.and_then(|parts| parts.headers.get(NAME_HEADER)) else { return Ok(None) };
    match name.to_str() {
        // As an unset placeholder of a client's configuration leaves it.
        Ok("") => Ok(None),
        Ok(name) => checked(name).map(|name| Some(name.to_owned())),
        Err(_) => Err(bad_name()),
    }
}

pub(super) fn checked(name: &str) -> Result<&str, Fault> {
    let fits = |byte: u8| byte.is_ascii_alphanumeric() || b"._:@-".contains(&byte);
    let is_good = (1..=NAME_CHARS_MAX).contains(&name.len()) && name.bytes().all(fits);
    if is_good { Ok(name) } else { Err(bad_name()) }
}

fn bad_name() -> Fault {
    Fault(format!("`session` must be 1 to {NAME_CHARS_MAX} letters, digits, or any of ._:@-"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_of_sessions_are_short_and_plain() {
        for name in ["a", "conversation-1", "user:42@chat", &"x".repeat(NAME_CHARS_MAX)] {
            assert_eq!(checked(name).unwrap(), name);
        }
        for name in ["", "a b", "a/b", "ä", "a\n", &"x".repeat(NAME_CHARS_MAX + 1)] {
            assert!(checked(name).unwrap_err().0.contains("`session` must be"), "{name:?}");
        }
    }
}
