//! The seam of the code routes on the real engine.
#![forbid(unsafe_code)]

use std::sync::Arc;
use std::time::Duration;

use super::code::{CodeEngine, CodeInfo, EngineStats, Keeper, NotCreated, Pending, SessionEntry};
use crate::engine::run::{CreateRefused, Engine, NewSession};
use crate::engine::{Backends, CellRequest, Execution, KernelInfo, Refusal, TenantId, Tier, Tiers};
use crate::launcher::posture::Hello;
use crate::session;

/// An engine as the routes see it.
pub struct Wired(pub Arc<Engine>);

impl CodeEngine for Wired {
    fn execute(&self, request: CellRequest) -> Pending<'_, Result<Execution, Refusal>> {
        let engine = Arc::clone(&self.0);
        Box::pin(async move { engine.execute(request).await })
    }

    fn sessions_list(&self, tenant: &TenantId, tiers: Tiers) -> Vec<(String, SessionEntry)> {
        self.0.sessions_list(tenant, tiers).into_iter().map(|(key, entry)| (key, entry.into())).collect()
    }

    fn session_get(&self, tenant: &TenantId, tiers: Tiers, id: &str) -> Option<SessionEntry> {
        self.0.session_get(tenant, tiers, id).map(SessionEntry::from)
    }

    fn session_create<'a>(
        &'a self,
        tenant: &'a TenantId,
        new: NewSession,
    ) -> Pending<'a, Result<(SessionEntry, bool), NotCreated>> {
        Box::pin(async move {
            let language = new.language;
            let made = self.0.session_create(tenant, new).await;
            made.map(|(entry, made)| (entry.into(), made)).map_err(|refused| match refused {
                CreateRefused::Refused(refusal) => NotCreated::Refused(refusal),
                CreateRefused::User(why) => {
                    NotCreated::Failed(Box::new(Execution::process_error(language, why)))
                }
            })
        })
    }

    fn session_delete<'a>(&'a self, tenant: &'a TenantId, tiers: Tiers, id: &'a str) -> Pending<'a, bool> {
        Box::pin(self.0.session_delete(tenant, tiers, id))
    }

    fn sessions_clear<'a>(&'a self, tenant: &'a TenantId, tiers: Tiers) -> Pending<'a, usize> {
        Box::pin(self.0.sessions_clear(tenant, tiers))
    }

    fn backends(&self) -> Backends {
        self.0.backends()
    }

    fn kernel_info(&self, tenant: &TenantId) -> KernelInfo {
        self.0.kernel_info(tenant)
    }

    fn code_info<'a>(&'a self, tenant: &'a TenantId) -> Pending<'a, CodeInfo> {
        Box::pin(async move {
            let info = self.0.code_info(tenant).await;
            CodeInfo {
                backend: info.backend,
                kernels: info.kernels,
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
            sessions_cleaned: stats.sessions_cleaned,
            cells_running: stats.cells_running,
            sandboxes_live: stats.sandboxes_live,
        }
    }
}

impl From<session::SessionEntry> for SessionEntry {
    fn from(it: session::SessionEntry) -> SessionEntry {
        SessionEntry {
            session_id: it.session_id,
            language: it.tier.language(),
            cwd: it.cwd,
            created_at_ms: it.created_at_ms,
            last_used_ms: it.last_used_ms,
            age: Duration::from_secs(it.age_seconds),
            keeper: match it.tier {
                Tier::Native(_) => Keeper::Native { idle_max: Duration::from_millis(it.idle_max_ms) },
                Tier::Kernel(name) => Keeper::Kernel { name },
            },
            executing: it.executing,
        }
    }
}
