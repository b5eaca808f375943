//! The seam of the code routes on the real engine.
#![forbid(unsafe_code)]

use std::sync::Arc;
use std::time::Duration;

use super::code::{
    CodeEngine, CodeInfo, EngineStats, Keeper, NotCreated, Pending, SessionEntry, SessionRequest,
};
use crate::engine::run::{CreateRefused, Engine};
use crate::engine::{CellRequest, Execution, Refusal, TenantId};
use crate::launcher::posture::Hello;
use crate::session;

/// An engine as the routes see it.
pub struct Wired(pub Arc<Engine>);

impl CodeEngine for Wired {
    fn execute(&self, request: CellRequest) -> Pending<'_, Result<Execution, Refusal>> {
        let engine = Arc::clone(&self.0);
        Box::pin(async move { engine.execute(request).await })
    }

    fn sessions_list<'a>(&'a self, tenant: &'a TenantId) -> Pending<'a, Vec<(String, SessionEntry)>> {
        let list = self.0.sessions_list(tenant).into_iter().map(|(key, entry)| (key, entry.into())).collect();
        Box::pin(std::future::ready(list))
    }

    fn session_get<'a>(&'a self, tenant: &'a TenantId, id: &'a str) -> Pending<'a, Option<SessionEntry>> {
        Box::pin(std::future::ready(self.0.session_get(tenant, id).map(SessionEntry::from)))
    }

    fn session_create<'a>(
        &'a self,
        tenant: &'a TenantId,
        request: SessionRequest,
    ) -> Pending<'a, Result<SessionEntry, NotCreated>> {
        Box::pin(async move {
            let SessionRequest { language, id, cwd, user } = request;
            let made = self.0.session_create(tenant, language, id.as_deref(), cwd, user.as_deref()).await;
            made.map(SessionEntry::from).map_err(|refused| match refused {
                CreateRefused::Refused(refusal) => NotCreated::Refused(refusal),
                CreateRefused::User(why) => {
                    NotCreated::Failed(Box::new(Execution::process_error(language, why)))
                }
            })
        })
    }

    fn session_delete<'a>(&'a self, tenant: &'a TenantId, id: &'a str) -> Pending<'a, bool> {
        Box::pin(self.0.session_delete(tenant, id))
    }

    fn sessions_clear<'a>(&'a self, tenant: &'a TenantId) -> Pending<'a, usize> {
        Box::pin(self.0.sessions_clear(tenant))
    }

    fn code_info<'a>(&'a self, tenant: &'a TenantId) -> Pending<'a, CodeInfo> {
        Box::pin(async move {
            let info = self.0.code_info(tenant).await;
            CodeInfo {
                backend: info.backend,
                python: info.python.version,
                node: info.node.version,
                sessions_max: info.sessions_max,
                prewarmed: info.prewarmed,
            }
        })
    }

    fn hello(&self) -> Option<Arc<Hello>> {
        self.0.hello()
    }

    fn stats(&self) -> EngineStats {
        let stats = self.0.stats();
        EngineStats {
            slots_max: stats.slots.max,
            slots_ready: stats.slots.ready,
            sessions: stats.sessions,
            cells_running: stats.cells_running,
            sandboxes_live: stats.sandboxes_live,
        }
    }
}

impl From<session::SessionEntry> for SessionEntry {
    fn from(it: session::SessionEntry) -> SessionEntry {
        SessionEntry {
            session_id: it.session_id,
            language: it.language,
            cwd: it.cwd,
            created_at_ms: it.created_at_ms,
            last_used_ms: it.last_used_ms,
            age: Duration::from_secs(it.age_seconds),
            keeper: Keeper::Native { idle_max: Duration::from_millis(it.idle_max_ms) },
            executing: it.executing,
        }
    }
}
