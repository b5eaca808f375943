//! Agents made ahead of demand, each in a space of its own: for the languages that are programs.
//!
//! The first that is taken leads to [`TARGET_FIRST`] of them; one that was not there when it was wanted doubles that, up
//! to [`TARGET_MAX`]; without a take for [`DROP_AFTER`] they go.
#![forbid(unsafe_code)]

use std::collections::VecDeque;
use std::sync::{Arc, Mutex, MutexGuard, Weak};
use std::time::{Duration, Instant};

use crate::launcher::plan::SpaceId;
use crate::runs::process::{Agent, NotOpened};
use crate::zygote::{Launch, fresh_space};

const TARGET_FIRST: usize = 2;
const TARGET_MAX: usize = 8;
const DROP_AFTER: Duration = Duration::from_secs(300);
/// No take for so long: there is time to make one.
const QUIET: Duration = Duration::from_millis(4);
/// After a launch that failed.
const BACKOFF: Duration = Duration::from_secs(5);

pub(super) struct Agents {
    launcher: Arc<dyn Launch>,
    max: usize,
    books: Mutex<Books>,
}

#[derive(Debug)]
struct Books {
    ready: VecDeque<Agent>,
    target: usize,
    taken: Instant,
    refilling: bool,
    closed: bool,
}

impl Agents {
    /// At most `max`; 0 makes none ahead.
    pub(super) fn new(launcher: Arc<dyn Launch>, max: usize) -> Arc<Agents> {
        let books = Books {
            ready: VecDeque::new(),
            target: 0,
            taken: Instant::now(),
            refilling: false,
            closed: false,
        };
        Arc::new(Agents { launcher, max: max.min(TARGET_MAX), books: Mutex::new(books) })
    }

    /// One made now.
    pub(super) async fn open(&self, space: SpaceId) -> Result<Agent, NotOpened> {
        Agent::open(&self.launcher, space).await
    }

    pub(super) fn keep_house(&self) {
        let mut dropped = VecDeque::new();
        let mut books = self.lock();
        if books.taken.elapsed() >= DROP_AFTER {
            books.target = 0;
            dropped = std::mem::take(&mut books.ready);
        }
        books.ready.retain(Agent::is_alive);
        drop(books);
        drop(dropped);
    }

    pub(super) fn close(&self) {
        let mut books = self.lock();
        books.closed = true;
        let ready = std::mem::take(&mut books.ready);
        drop(books);
        drop(ready);
    }

    /// One that waits in a fresh space, if there is any.
    pub(super) fn ready(self: &Arc<Agents>) -> Option<Agent> {
        let mut books = self.lock();
        books.taken = Instant::now();
        let mut found = None;
        while let Some(agent) = books.ready.pop_front() {
            if agent.is_alive() {
                found = Some(agent);
                break;
            }
        }
        let wanted = if found.is_some() { books.target } else { books.target * 2 };
        books.target = wanted.max(TARGET_FIRST).min(self.max);
        if !books.refilling && !books.closed && books.ready.len() < books.target {
            books.refilling = true;
            tokio::spawn(refill(Arc::downgrade(self)));
        }
        found
    }

    /// What is to be done next by who refills; `None` at the end of it.
    fn next(&self) -> Option<Duration> {
        let mut books = self.lock();
        if books.closed || books.ready.len() >= books.target {
            books.refilling = false;
            return None;
        }
        let since = books.taken.elapsed();
        // The last one is missed sooner than a moment is disturbed.
        Some(if books.ready.is_empty() { Duration::ZERO } else { QUIET.saturating_sub(since) })
    }

    fn shelve(&self, agent: Agent) {
        let mut books = self.lock();
        if books.closed {
            drop(books);
            drop(agent);
        } else {
            books.ready.push_back(agent);
        }
    }

    fn lock(&self) -> MutexGuard<'_, Books> {
        self.books.lock().expect("no code panics while it holds the agents")
    }
}

/// Makes one after the other until there are enough.
async fn refill(agents: Weak<Agents>) {
    loop {
        let Some(agents) = agents.upgrade() else { return };
        let Some(wait) = agents.next() else { return };
        if !wait.is_zero() {
            tokio::time::sleep(wait.max(Duration::from_millis(1))).await;
            continue;
        }
        match Agent::open(&agents.launcher, fresh_space()).await {
            Ok(agent) => agents.shelve(agent),
            Err(error) => {
                tracing::warn!(error = &error as &dyn std::error::Error, "no agent was made ahead");
                tokio::time::sleep(BACKOFF).await;
            }
        }
    }
}
