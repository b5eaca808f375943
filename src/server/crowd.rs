//! Who holds a connection, and who gives one up when all are held.
//!
//! Whoever can reach a listener can hold connections, with or without a key. So when all are held and one more comes,
//! the stranger that has said nothing for longest makes room: never one that has shown a key, nor one whose request is
//! being answered. Where everybody has shown a key, or is busy, the newcomer waits.
#![forbid(unsafe_code)]

use std::collections::HashMap;
use std::pin::pin;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use tokio::sync::{Notify, OwnedSemaphorePermit, Semaphore};
use tokio::time::Instant;

use super::patience::Phase;

/// A stranger is left alone for this long, so that a caller's first request can arrive.
const QUIET_LEAST: Duration = Duration::from_secs(1);
/// How often it is looked for one to make room, while a newcomer waits.
const LOOK_EVERY: Duration = Duration::from_millis(100);

/// All connections of the daemon.
#[derive(Debug)]
pub(super) struct Crowd {
    permits: Arc<Semaphore>,
    members: Mutex<Members>,
}

#[derive(Debug, Default)]
struct Members {
    next_id: u64,
    by_id: HashMap<u64, Member>,
}

#[derive(Debug)]
struct Member {
    phase: Phase,
    asked: Arc<Notify>,
}

/// One connection's place; free again when dropped.
#[derive(Debug)]
pub(super) struct Place {
    crowd: Arc<Crowd>,
    id: u64,
    phase: Phase,
    asked: Arc<Notify>,
    _permit: OwnedSemaphorePermit,
}

impl Crowd {
    pub(super) fn new(connections_max: usize) -> Crowd {
        Crowd { permits: Arc::new(Semaphore::new(connections_max)), members: Mutex::default() }
    }

    /// A place for a connection that is in `phase`; waits while nobody can be asked to make room.
    pub(super) async fn admit(self: &Arc<Crowd>, phase: Phase) -> Place {
        let permit = self.permit().await;
        let asked = Arc::new(Notify::new());
        let member = Member { phase: phase.clone(), asked: Arc::clone(&asked) };
        let id = {
            let mut members = self.members();
            members.next_id += 1;
            let id = members.next_id;
            members.by_id.insert(id, member);
            id
        };
        Place { crowd: Arc::clone(self), id, phase, asked, _permit: permit }
    }

    async fn permit(&self) -> OwnedSemaphorePermit {
        if let Ok(free) = Arc::clone(&self.permits).try_acquire_owned() {
            return free;
        }
        let mut next = pin!(Arc::clone(&self.permits).acquire_owned());
        loop {
            self.ask_one_to_leave();
            if let Ok(permit) = tokio::time::timeout(LOOK_EVERY, &mut next).await {
                return permit.expect("nobody closes this semaphore");
            }
        }
    }

    fn ask_one_to_leave(&self) {
        let now = Instant::now();
        let members = self.members();
        let quiet =
            members.by_id.values().filter_map(|member| Some((member.phase.quiet_stranger_since()?, member)));
        let longest = quiet.min_by_key(|(since, _)| *since);
        if let Some((_, member)) = longest.filter(|(since, _)| now >= *since + QUIET_LEAST) {
            member.asked.notify_one();
        }
    }

    fn members(&self) -> MutexGuard<'_, Members> {
        // Whole after every statement that holds it.
        self.members.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Place {
    /// Returns when this connection is to make room. One that is asked while a request of its begins stays.
    pub(super) async fn taken_back(&self) {
        loop {
            self.asked.notified().await;
            if self.phase.quiet_stranger_since().is_some() {
                return;
            }
        }
    }
}

impl Drop for Place {
    fn drop(&mut self) {
        self.crowd.members().by_id.remove(&self.id);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test]
    async fn one_that_is_asked_while_its_request_begins_stays() {
        let crowd = Arc::new(Crowd::new(1));
        let phase = Phase::new();
        let place = crowd.admit(phase.clone()).await;
        tokio::time::sleep(QUIET_LEAST).await;
        crowd.ask_one_to_leave();
        phase.begin();
        let wait = LOOK_EVERY * 5;
        assert!(tokio::time::timeout(wait, place.taken_back()).await.is_err(), "its request would be lost");
        // Nor is it asked meanwhile; once more when it is quiet again.
        crowd.ask_one_to_leave();
        phase.end(false);
        assert!(tokio::time::timeout(wait, place.taken_back()).await.is_err(), "asked while it was busy");
        tokio::time::sleep(QUIET_LEAST).await;
        crowd.ask_one_to_leave();
        assert!(tokio::time::timeout(wait, place.taken_back()).await.is_ok());
    }

    #[tokio::test]
    async fn a_first_request_has_a_second_to_arrive() {
        let crowd = Arc::new(Crowd::new(1));
        let place = crowd.admit(Phase::new()).await;
        let begun = Instant::now();
        let (next, ()) = tokio::join!(crowd.admit(Phase::new()), async {
            place.taken_back().await;
            drop(place);
        });
        assert!(begun.elapsed() >= QUIET_LEAST && begun.elapsed() < QUIET_LEAST * 10);
        drop(next);
        assert!(crowd.members().by_id.is_empty());
    }
}
