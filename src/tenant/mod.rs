//! Who is bounded and billed: a tenant's space, its share of running cells, and the record of what it ran.
#![forbid(unsafe_code)]

use std::collections::HashMap;
use std::sync::{Mutex, MutexGuard};

use crate::engine::TenantId;
use crate::launcher::plan::SpaceId;
use crate::store::{Store, StoreError};

pub mod audit;
pub mod quota;

/// Which space is whose. The store has the truth; what was looked up once is remembered, because a space
/// never changes hands.
#[derive(Debug)]
pub struct Tenants {
    store: Store,
    known: Mutex<HashMap<TenantId, SpaceId>>,
}

impl Tenants {
    pub fn new(store: Store) -> Tenants {
        Tenants { store, known: Mutex::default() }
    }

    /// The tenant's space, given out at its first request and the same after every restart.
    pub async fn space_of(&self, tenant: &TenantId) -> Result<SpaceId, StoreError> {
        if let Some(space) = self.lock().get(tenant) {
            return Ok(*space);
        }
        let space = self.store.space_of(tenant).await?;
        self.lock().insert(tenant.clone(), space);
        Ok(space)
    }

    fn lock(&self) -> MutexGuard<'_, HashMap<TenantId, SpaceId>> {
        self.known.lock().expect("no code panics while it holds the spaces")
    }
}
