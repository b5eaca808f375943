//! How many cells run at once: in the daemon and for one tenant.
#![forbid(unsafe_code)]

use std::collections::HashMap;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use tokio::sync::{OwnedSemaphorePermit, Semaphore};

use crate::engine::{Refusal, TenantId};

/// What bounds running cells.
#[derive(Copy, Clone, Debug)]
pub struct CellQuota {
    /// Cells that run at once, over all tenants.
    pub running_max: usize,
    /// Cells of one tenant that run at once.
    pub running_per_tenant_max: usize,
    /// Cells that wait for a place, in each of the two queues.
    pub waiting_max: usize,
}

/// Lets cells in.
#[derive(Debug)]
pub struct Admission {
    quota: CellQuota,
    all: Gate,
    tenants: Mutex<HashMap<TenantId, Arc<Gate>>>,
    closed: std::sync::atomic::AtomicBool,
}

/// A running cell's place; given back when dropped.
#[derive(Debug)]
pub struct Place {
    _all: OwnedSemaphorePermit,
    _tenant: OwnedSemaphorePermit,
}

/// Every place is taken: of the tenant's, or of all there are.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Taken {
    pub max: usize,
}

#[derive(Debug)]
struct Gate {
    places: Arc<Semaphore>,
    waiting: AtomicUsize,
    waiting_max: usize,
}

impl Admission {
    pub fn new(quota: CellQuota) -> Admission {
        Admission {
            quota,
            all: Gate::new(quota.running_max, quota.waiting_max),
            tenants: Mutex::default(),
            closed: std::sync::atomic::AtomicBool::new(false),
        }
    }

    /// Waits for a place; the tenant's own queue first, so that its excess waits among itself.
    pub async fn admit(&self, tenant: &TenantId) -> Result<Place, Refusal> {
        self.check_open()?;
        let gate = self.gate_of(tenant);
        let of_tenant = gate.enter().await?;
        let of_all = self.all.enter().await?;
        // What waited through the beginning of a shutdown has not started and does not start now.
        self.check_open()?;
        Ok(Place { _all: of_all, _tenant: of_tenant })
    }

    /// A place now, or none: for what may run without an end, and whose turn might never come.
    pub fn try_admit(&self, tenant: &TenantId) -> Result<Place, Taken> {
        let quota = &self.quota;
        let of_tenant = Arc::clone(&self.gate_of(tenant).places)
            .try_acquire_owned()
            .map_err(|_| Taken { max: quota.running_per_tenant_max })?;
        let of_all =
            Arc::clone(&self.all.places).try_acquire_owned().map_err(|_| Taken { max: quota.running_max })?;
        Ok(Place { _all: of_all, _tenant: of_tenant })
    }

    /// Lets nothing in any more.
    pub fn close(&self) {
        self.closed.store(true, Ordering::SeqCst);
    }

    pub fn check_open(&self) -> Result<(), Refusal> {
        if self.closed.load(Ordering::SeqCst) { Err(Refusal::ShuttingDown) } else { Ok(()) }
    }

    /// Waits until nothing runs, at most for `bound`. True when nothing does.
    pub async fn drained(&self, bound: Duration) -> bool {
        let all = u32::try_from(self.quota.running_max).unwrap_or(u32::MAX);
        matches!(tokio::time::timeout(bound, self.all.places.acquire_many(all)).await, Ok(Ok(_)))
    }

    pub fn running(&self) -> usize {
        self.quota.running_max.saturating_sub(self.all.places.available_permits())
    }

    pub fn waiting(&self) -> usize {
        let tenants = self.tenants.lock().expect("no code panics while it holds the gates");
        let of_tenants: usize = tenants.values().map(|gate| gate.waiting.load(Ordering::Relaxed)).sum();
        of_tenants + self.all.waiting.load(Ordering::Relaxed)
    }

    fn gate_of(&self, tenant: &TenantId) -> Arc<Gate> {
        let mut tenants = self.tenants.lock().expect("no code panics while it holds the gates");
        if let Some(gate) = tenants.get(tenant) {
            return Arc::clone(gate);
        }
        let gate = Arc::new(Gate::new(self.quota.running_per_tenant_max, self.quota.waiting_max));
        tenants.insert(tenant.clone(), Arc::clone(&gate));
        gate
    }
}

impl Gate {
    fn new(places: usize, waiting_max: usize) -> Gate {
        Gate { places: Arc::new(Semaphore::new(places)), waiting: AtomicUsize::new(0), waiting_max }
    }

    async fn enter(&self) -> Result<OwnedSemaphorePermit, Refusal> {
        if let Ok(permit) = Arc::clone(&self.places).try_acquire_owned() {
            return Ok(permit);
        }
        if self.waiting.fetch_add(1, Ordering::SeqCst) >= self.waiting_max {
            self.waiting.fetch_sub(1, Ordering::SeqCst);
            return Err(Refusal::TooManyWaiting { max: self.waiting_max });
        }
        let _counted = Waiting(&self.waiting);
        Arc::clone(&self.places).acquire_owned().await.map_err(|_closed| Refusal::ShuttingDown)
    }
}

struct Waiting<'a>(&'a AtomicUsize);

impl Drop for Waiting<'_> {
    fn drop(&mut self) {
        self.0.fetch_sub(1, Ordering::SeqCst);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn admission() -> Admission {
        Admission::new(CellQuota { running_max: 3, running_per_tenant_max: 2, waiting_max: 1 })
    }

    fn tenant(name: &str) -> TenantId {
        TenantId(name.to_owned())
    }

    #[tokio::test]
    async fn one_tenant_cannot_take_every_place() {
        let admission = admission();
        let _one = admission.admit(&tenant("a")).await.expect("room");
        let _two = admission.admit(&tenant("a")).await.expect("room");
        let third = tokio::time::timeout(Duration::from_millis(10), admission.admit(&tenant("a"))).await;
        assert!(third.is_err(), "waits");
        assert!(admission.admit(&tenant("b")).await.is_ok());
        assert_eq!((admission.running(), admission.waiting()), (2, 0));
    }

    #[tokio::test]
    async fn who_cannot_wait_gets_a_place_now_or_none() {
        let admission = admission();
        let _one = admission.try_admit(&tenant("a")).expect("room");
        let two = admission.try_admit(&tenant("a")).expect("room");
        assert_eq!(admission.try_admit(&tenant("a")).map(drop), Err(Taken { max: 2 }), "the tenant's share");
        let _three = admission.try_admit(&tenant("b")).expect("room");
        assert_eq!(admission.try_admit(&tenant("b")).map(drop), Err(Taken { max: 3 }), "everybody's");
        drop(two);
        assert!(admission.try_admit(&tenant("a")).is_ok());
        assert_eq!(admission.running(), 2);
    }

    #[tokio::test]
    async fn a_queue_that_is_full_refuses() {
        let admission = Arc::new(admission());
        let _one = admission.admit(&tenant("a")).await.expect("room");
        let _two = admission.admit(&tenant("a")).await.expect("room");
        let waiting = {
            let admission = Arc::clone(&admission);
            tokio::spawn(async move { admission.admit(&tenant("a")).await.map(drop) })
        };
        tokio::time::sleep(Duration::from_millis(5)).await;
        let refused = admission.admit(&tenant("a")).await.map(drop);
        assert_eq!(refused, Err(Refusal::TooManyWaiting { max: 1 }));
        waiting.abort();
    }

    #[tokio::test]
    async fn a_closed_gate_lets_nothing_in_and_waits_for_what_runs() {
        let admission = admission();
        let running = admission.admit(&tenant("a")).await.expect("room");
        admission.close();
        assert_eq!(admission.admit(&tenant("a")).await.map(drop), Err(Refusal::ShuttingDown));
        assert!(!admission.drained(Duration::from_millis(10)).await);
        drop(running);
        assert!(admission.drained(Duration::from_millis(10)).await);
    }
}
