//! Who holds a connection, and who gives one up when all are held.
//!
//! Whoever can reach a listener can hold connections, with or without a key. So when all are held and one more comes,
//! the stranger that has said nothing for longest makes room: never one that has shown a key, nor one whose request is
//! being answered. Where everybody has shown a key, or is busy, the newcomer waits.
//!
//! So that it does not wait for one tenant alone, each has a share: of the connections, of the memory that its requests
//! take until they are answered, and of that in which answers wait to be taken. A request beyond it is refused, and where
//! the answers that are under way make it twice as much, those that have waited for longest are given up with their
//! connections.
#![forbid(unsafe_code)]

use std::collections::HashMap;
use std::pin::pin;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use axum::http::StatusCode;
use bytes::Bytes;
use tokio::sync::{Notify, OwnedSemaphorePermit, Semaphore};
use tokio::time::Instant;

use super::answer::Refused;
use super::patience::Phase;
use crate::engine::TenantId;

/// A stranger is left alone for this long, so that a caller's first request can arrive.
const QUIET_LEAST: Duration = Duration::from_secs(1);
/// How often it is looked for one to make room, while a newcomer waits.
const LOOK_EVERY: Duration = Duration::from_millis(100);

/// Bytes of answers that a tenant's peers have not taken yet, beyond which it is answered no more.
const UNTAKEN_BYTES_MAX: usize = 256 * 1024 * 1024;
/// Bytes of bodies of requests under way that a tenant may have at once.
pub(super) const BODIES_BYTES_MAX: usize = 256 * 1024 * 1024;
/// Smaller pieces of an answer do not count, nor smaller bodies: a connection never holds many of them.
pub(super) const COUNTED_BYTES_LEAST: usize = 64 * 1024;

/// What a cell that has ended counts for until its stream has been read, in bytes. While it runs it has a place, of which
/// there are not many.
pub(super) const UNREAD_STREAM_BYTES: usize = 16 * 1024 * 1024;

/// An answer has this long in any case.
const UNTAKEN_TIME_LEAST: Duration = Duration::from_secs(1);

/// All connections of the daemon.
#[derive(Debug)]
pub(super) struct Crowd {
    permits: Arc<Semaphore>,
    members: Mutex<Members>,
    of_tenant_max: usize,
    untaken_bytes_max: usize,
    bodies_bytes_max: usize,
}

#[derive(Debug, Default)]
struct Members {
    next_id: u64,
    by_id: HashMap<u64, Member>,
    tenants: HashMap<TenantId, Holding>,
}

/// What a tenant holds.
#[derive(Debug, Default)]
struct Holding {
    connections: usize,
    untaken_bytes: usize,
    bodies_bytes: usize,
}

#[derive(Debug)]
struct Member {
    phase: Phase,
    asked: Arc<Notify>,
    /// Whose key its last request with one has shown.
    tenant: Option<TenantId>,
    untaken_bytes: usize,
    /// Since when there have been such.
    untaken_since: Instant,
    is_given_up: bool,
}

impl Member {
    fn new(phase: Phase, asked: Arc<Notify>) -> Member {
        let untaken_since = Instant::now();
        Member { phase, asked, tenant: None, untaken_bytes: 0, untaken_since, is_given_up: false }
    }
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
    /// `of_tenant_max`: how many of the connections one tenant may have.
    pub(super) fn new(connections_max: usize, of_tenant_max: usize, bodies_bytes_max: usize) -> Crowd {
        let permits = Arc::new(Semaphore::new(connections_max));
        Crowd {
            permits,
            members: Mutex::default(),
            of_tenant_max,
            untaken_bytes_max: UNTAKEN_BYTES_MAX,
            bodies_bytes_max,
        }
    }

    /// A place for a connection that is in `phase`; waits while nobody can be asked to make room.
    pub(super) async fn admit(self: &Arc<Crowd>, phase: Phase) -> Place {
        let permit = self.permit().await;
        let asked = Arc::new(Notify::new());
        let member = Member::new(phase.clone(), Arc::clone(&asked));
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

impl Members {
    /// Ends the connection whose answer has waited for longest.
    fn give_up_one_of(&mut self, tenant: &TenantId) {
        let now = Instant::now();
        let waits = |member: &&mut Member| {
            member.untaken_bytes > 0
                && !member.is_given_up
                && member.tenant.as_ref() == Some(tenant)
                && now >= member.untaken_since + UNTAKEN_TIME_LEAST
        };
        let longest = self.by_id.values_mut().filter(waits).min_by_key(|member| member.untaken_since);
        if let Some(member) = longest {
            member.is_given_up = true;
            member.asked.notify_one();
        }
    }

    /// Changes what a tenant holds, and forgets it when that is nothing.
    fn change(&mut self, tenant: &TenantId, change: impl FnOnce(&mut Holding)) {
        let holding = self.tenants.entry(tenant.clone()).or_default();
        change(holding);
        if holding.connections == 0 && holding.untaken_bytes == 0 && holding.bodies_bytes == 0 {
            self.tenants.remove(tenant);
        }
    }
}

/// A connection as its requests see it.
#[derive(Clone, Debug)]
pub(super) struct Seat {
    crowd: Arc<Crowd>,
    id: u64,
}

impl Seat {
    /// Counts the connection as one of the tenant's until a request of another one comes, unless the tenant has its
    /// share. What the request brings and is answered is counted as the tenant's too: a proxy's connections have requests
    /// of many.
    pub(super) fn claim(&self, tenant: &TenantId) -> Result<(), Refused> {
        let mut members = self.crowd.members();
        let held = members.tenants.get(tenant);
        let (connections, untaken) = held.map_or((0, 0), |held| (held.connections, held.untaken_bytes));
        let max = self.crowd.untaken_bytes_max;
        if untaken > max {
            let message = format!("Answers of {} MiB wait to be read", max / (1024 * 1024));
            return Err(Refused::new(StatusCode::TOO_MANY_REQUESTS, message).hint("read them first"));
        }
        let is_anothers = |member: &&mut Member| member.tenant.as_ref() != Some(tenant);
        let Some(member) = members.by_id.get_mut(&self.id).filter(is_anothers) else { return Ok(()) };
        let max = self.crowd.of_tenant_max;
        if connections >= max {
            let message = format!("Maximum number of connections ({max}) reached");
            return Err(Refused::new(StatusCode::TOO_MANY_REQUESTS, message).hint("close some first"));
        }
        if let Some(before) = member.tenant.replace(tenant.clone()) {
            members.change(&before, |holding| holding.connections -= 1);
        }
        members.change(tenant, |holding| holding.connections += 1);
        Ok(())
    }

    /// Counts a body as it arrives. `None` for a stranger, whose body nobody reads.
    pub(super) fn arriving(&self) -> Option<Arrived> {
        let tenant = self.crowd.members().by_id.get(&self.id)?.tenant.clone()?;
        Some(Arrived { crowd: Arc::clone(&self.crowd), tenant, bytes: 0 })
    }

    /// Counts memory that an answer takes until its peer does. `None` for a stranger, who is told nothing large.
    pub(super) fn hold(&self, bytes: usize) -> Option<Held> {
        let mut members = self.crowd.members();
        let member = members.by_id.get_mut(&self.id)?;
        let tenant = member.tenant.clone()?;
        if member.untaken_bytes == 0 {
            member.untaken_since = Instant::now();
        }
        member.untaken_bytes += bytes;
        let mut untaken = 0;
        members.change(&tenant, |holding| {
            holding.untaken_bytes += bytes;
            untaken = holding.untaken_bytes;
        });
        if untaken > 2 * self.crowd.untaken_bytes_max {
            members.give_up_one_of(&tenant);
        }
        Some(Held { seat: self.clone(), tenant, bytes })
    }

    /// A piece of an answer, counted for as long as it is there.
    pub(super) fn counted(&self, piece: Bytes) -> Bytes {
        if piece.len() < COUNTED_BYTES_LEAST {
            return piece;
        }
        match self.hold(piece.len()) {
            Some(held) => Bytes::from_owner(Counted { piece, _held: held }),
            None => piece,
        }
    }
}

/// Memory that is counted until this is dropped.
#[derive(Debug)]
pub(super) struct Held {
    seat: Seat,
    tenant: TenantId,
    bytes: usize,
}

impl Drop for Held {
    fn drop(&mut self) {
        let bytes = self.bytes;
        let mut members = self.seat.crowd.members();
        if let Some(member) = members.by_id.get_mut(&self.seat.id) {
            member.untaken_bytes -= bytes;
        }
        members.change(&self.tenant, |holding| holding.untaken_bytes -= bytes);
    }
}

/// What has come of a body, counted until this is dropped.
#[derive(Debug)]
pub(crate) struct Arrived {
    crowd: Arc<Crowd>,
    tenant: TenantId,
    bytes: usize,
}

impl Arrived {
    /// So many bytes have come by now; refused where they and those of the tenant's other requests are too many.
    pub(super) fn grow(&mut self, bytes: usize) -> Result<(), Refused> {
        let more = bytes.saturating_sub(self.bytes);
        if bytes < COUNTED_BYTES_LEAST || more == 0 {
            return Ok(());
        }
        let max = self.crowd.bodies_bytes_max;
        let mut members = self.crowd.members();
        let held = members.tenants.get(&self.tenant).map_or(0, |held| held.bodies_bytes);
        if held + more > max {
            let message = format!("Requests of {} MiB are under way", max / (1024 * 1024));
            return Err(Refused::new(StatusCode::TOO_MANY_REQUESTS, message).hint("send less at once"));
        }
        self.bytes = bytes;
        members.change(&self.tenant, |holding| holding.bodies_bytes += more);
        Ok(())
    }

    /// The body, counted for as long as it is there.
    pub(super) fn counted(self, body: Bytes) -> Bytes {
        if self.bytes == 0 { body } else { Bytes::from_owner(Counted { piece: body, _held: self }) }
    }
}

impl Drop for Arrived {
    fn drop(&mut self) {
        let bytes = self.bytes;
        self.crowd.members().change(&self.tenant, |holding| holding.bodies_bytes -= bytes);
    }
}

struct Counted<H> {
    piece: Bytes,
    _held: H,
}

impl<H> AsRef<[u8]> for Counted<H> {
    fn as_ref(&self) -> &[u8] {
        &self.piece
    }
}

impl Place {
    pub(super) fn seat(&self) -> Seat {
        Seat { crowd: Arc::clone(&self.crowd), id: self.id }
    }

    fn is_given_up(&self) -> bool {
        self.crowd.members().by_id.get(&self.id).is_some_and(|member| member.is_given_up)
    }

    /// Returns when this connection is to make room. One that is asked while a request of its begins stays.
    pub(super) async fn taken_back(&self) {
        loop {
            self.asked.notified().await;
            if self.phase.quiet_stranger_since().is_some() || self.is_given_up() {
                return;
            }
        }
    }
}

impl Drop for Place {
    fn drop(&mut self) {
        let mut members = self.crowd.members();
        let member = members.by_id.remove(&self.id);
        if let Some(tenant) = member.and_then(|member| member.tenant) {
            members.change(&tenant, |holding| holding.connections -= 1);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test(start_paused = true)]
    async fn one_that_is_asked_while_its_request_begins_stays() {
        let crowd = Arc::new(Crowd::new(1, 1, BODIES_BYTES_MAX));
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

    #[tokio::test(start_paused = true)]
    async fn a_first_request_has_a_second_to_arrive() {
        let crowd = Arc::new(Crowd::new(1, 1, BODIES_BYTES_MAX));
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

    #[tokio::test(start_paused = true)]
    async fn a_tenant_has_its_share_of_connections_and_of_what_waits_to_be_read() {
        let crowd = Crowd::new(8, 2, BODIES_BYTES_MAX);
        let crowd = Arc::new(Crowd { untaken_bytes_max: 2 * COUNTED_BYTES_LEAST, ..crowd });
        let (ours, theirs) = (TenantId("a".to_owned()), TenantId("b".to_owned()));
        let (one, two, three) =
            tokio::join!(crowd.admit(Phase::new()), crowd.admit(Phase::new()), crowd.admit(Phase::new()));
        let told = |claimed: Result<(), Refused>| claimed.map_err(|refused| refused.message);
        assert_eq!(told(one.seat().claim(&ours)), Ok(()));
        assert_eq!(told(one.seat().claim(&ours)), Ok(()), "counted once");
        assert_eq!(told(two.seat().claim(&ours)), Ok(()));
        let full = Err("Maximum number of connections (2) reached".to_owned());
        assert_eq!(told(three.seat().claim(&ours)), full);
        assert_eq!(told(three.seat().claim(&theirs)), Ok(()));
        drop(two);
        let four = crowd.admit(Phase::new()).await;
        assert_eq!(told(four.seat().claim(&ours)), Ok(()));

        let small = four.seat().counted(Bytes::from(vec![0; COUNTED_BYTES_LEAST - 1]));
        let pieces: Vec<Bytes> =
            (0..3).map(|_| four.seat().counted(Bytes::from(vec![0; COUNTED_BYTES_LEAST]))).collect();
        assert!(told(one.seat().claim(&ours)).is_err_and(|message| message.contains("wait to be read")));
        assert_eq!(told(three.seat().claim(&theirs)), Ok(()));
        // Twice as much, and an answer that has waited is given up.
        tokio::time::sleep(UNTAKEN_TIME_LEAST).await;
        let given_up = tokio::time::timeout(LOOK_EVERY, four.taken_back()).await;
        assert!(given_up.is_err(), "it is not so much yet");
        let more: Vec<Bytes> =
            (0..2).map(|_| one.seat().counted(Bytes::from(vec![0; COUNTED_BYTES_LEAST]))).collect();
        assert!(tokio::time::timeout(LOOK_EVERY, four.taken_back()).await.is_ok());
        assert!(tokio::time::timeout(LOOK_EVERY, one.taken_back()).await.is_err(), "this one has just begun");
        drop(more);
        // They may outlive their connection.
        drop(four);
        drop(pieces);
        assert_eq!(told(one.seat().claim(&ours)), Ok(()));
        drop((small, one, three));
        assert!(crowd.members().tenants.is_empty());
    }

    #[tokio::test]
    async fn a_connection_counts_for_the_tenant_whose_request_it_brings() {
        let crowd = Arc::new(Crowd::new(8, 1, COUNTED_BYTES_LEAST));
        let (ours, theirs) = (TenantId("a".to_owned()), TenantId("b".to_owned()));
        let (proxy, own) = tokio::join!(crowd.admit(Phase::new()), crowd.admit(Phase::new()));
        let is_full = |place: &Place| place.seat().arriving().unwrap().grow(COUNTED_BYTES_LEAST).is_err();
        assert!(proxy.seat().claim(&theirs).is_ok() && proxy.seat().claim(&ours).is_ok());
        let mut body = proxy.seat().arriving().unwrap();
        assert!(body.grow(COUNTED_BYTES_LEAST).is_ok());
        assert!(is_full(&proxy), "it is ours");
        assert!(own.seat().claim(&ours).is_err(), "and so is the connection");
        assert!(own.seat().claim(&theirs).is_ok() && !is_full(&own), "none of it is theirs any more");
        drop(body);
        assert!(!is_full(&proxy));
        drop((proxy, own));
        assert!(crowd.members().tenants.is_empty());
    }

    #[tokio::test]
    async fn a_tenant_has_its_share_of_what_bodies_take() {
        let crowd = Arc::new(Crowd::new(8, 8, 3 * COUNTED_BYTES_LEAST));
        let (ours, theirs) = (TenantId("a".to_owned()), TenantId("b".to_owned()));
        let (one, two, stranger) =
            tokio::join!(crowd.admit(Phase::new()), crowd.admit(Phase::new()), crowd.admit(Phase::new()));
        assert!(one.seat().claim(&ours).is_ok() && two.seat().claim(&theirs).is_ok());
        assert!(stranger.seat().arriving().is_none());
        let fits = |arrived: &mut Arrived, bytes| arrived.grow(bytes).is_ok();
        let mut small = one.seat().arriving().unwrap();
        assert!(fits(&mut small, COUNTED_BYTES_LEAST - 1));
        let mut large = one.seat().arriving().unwrap();
        assert!(fits(&mut large, COUNTED_BYTES_LEAST) && fits(&mut large, 2 * COUNTED_BYTES_LEAST));
        let mut more = one.seat().arriving().unwrap();
        assert!(fits(&mut more, COUNTED_BYTES_LEAST) && !fits(&mut more, COUNTED_BYTES_LEAST + 1));
        assert!(fits(&mut two.seat().arriving().unwrap(), 2 * COUNTED_BYTES_LEAST), "that is theirs");
        // It counts for as long as the body is there, and may outlive its connection.
        let body = large.counted(Bytes::from(vec![0; 2 * COUNTED_BYTES_LEAST]));
        let part = body.slice(..1);
        drop(body);
        assert!(!fits(&mut more, COUNTED_BYTES_LEAST + 1));
        drop(part);
        assert!(fits(&mut more, 3 * COUNTED_BYTES_LEAST));
        drop((one, two, stranger, small, more));
        assert!(crowd.members().tenants.is_empty());
    }
}
