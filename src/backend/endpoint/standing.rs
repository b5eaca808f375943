//! Whether the server can be used, as far as we have seen: what it last answered, and how its new kernels do.
//!
//! ```text
//!  kernels that get ready ──► counts from anew
//!  3 in a row that do not ──► shunned for 30 s ──► tried again ──► one that does not ──► shunned twice as long
//! ```
//!
//! A server that answers and whose kernels never come is no better than none: while it is shunned it has no kernels, and
//! the next backend serves.
#![forbid(unsafe_code)]

use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use tokio::sync::{OwnedSemaphorePermit, Semaphore};
use tokio::time::Instant;

use crate::backend::endpoint::EndpointError;

/// How long a look at a server that answered is believed.
const REACHABLE_FOR: Duration = Duration::from_secs(30);
/// How long a look at one that did not is.
const UNREACHABLE_FOR: Duration = Duration::from_secs(5);
/// So many kernels in a row that did not get ready, and no more are asked for.
pub(super) const FAILURES_MAX: u32 = 3;
/// For how long the first time, and at most.
const SHUNNED_FIRST: Duration = Duration::from_secs(30);
const SHUNNED_MAX: Duration = Duration::from_secs(300);

/// The last look at the server.
#[derive(Clone, Debug)]
pub(super) struct Look {
    pub(super) at: Instant,
    /// Default first; none when it did not answer or has none for Python.
    pub(super) kernels: Vec<String>,
}

impl Look {
    pub(super) fn is_fresh(&self) -> bool {
        self.at.elapsed() < if self.kernels.is_empty() { UNREACHABLE_FOR } else { REACHABLE_FOR }
    }
}

/// What is known of a server.
#[derive(Debug)]
pub(super) struct Standing {
    books: Mutex<Books>,
    /// One for each start that goes on although nobody waits for it.
    witnesses: Arc<Semaphore>,
}

impl Default for Standing {
    fn default() -> Standing {
        Standing { books: Mutex::default(), witnesses: Arc::new(Semaphore::new(FAILURES_MAX as usize)) }
    }
}

#[derive(Debug, Default)]
struct Books {
    look: Option<Look>,
    /// Kernels that did not get ready since one did.
    failures: u32,
    shunned_until: Option<Instant>,
}

impl Books {
    fn is_shunned(&self) -> bool {
        self.shunned_until.is_some_and(|until| Instant::now() < until)
    }
}

impl Standing {
    pub(super) fn last_look(&self) -> Option<Look> {
        self.lock().look.clone()
    }

    pub(super) fn see(&self, kernels: Vec<String>) {
        self.lock().look = Some(Look { at: Instant::now(), kernels });
    }

    pub(super) fn is_shunned(&self) -> bool {
        self.lock().is_shunned()
    }

    /// The right to see a start to its end that nobody waits for: there are as many as failures make a verdict.
    pub(super) fn witness(&self) -> Option<OwnedSemaphorePermit> {
        Arc::clone(&self.witnesses).try_acquire_owned().ok()
    }

    /// What came of a start. That a server refuses one at once is its word and costs nobody time.
    pub(super) fn note_start(&self, got: Result<(), &EndpointError>) {
        match got {
            Ok(()) | Err(EndpointError::NotADirectory { .. }) => self.note_ready(),
            Err(error) if error.is_absence() => self.see(Vec::new()),
            Err(EndpointError::NotReady(_)) if self.note_not_ready() => {
                tracing::warn!(
                    "new kernels of the Jupyter server do not get ready; it is left alone for a while"
                );
            }
            Err(_) => {}
        }
    }

    fn note_ready(&self) {
        let mut books = self.lock();
        (books.failures, books.shunned_until) = (0, None);
    }

    /// One did not get ready. True when the server is shunned for it from now on.
    fn note_not_ready(&self) -> bool {
        let mut books = self.lock();
        if books.is_shunned() {
            // Asked for before.
            return false;
        }
        books.failures = books.failures.saturating_add(1);
        let Some(times) = books.failures.checked_sub(FAILURES_MAX) else { return false };
        books.shunned_until = Some(Instant::now() + shunned_for(times));
        true
    }

    fn lock(&self) -> MutexGuard<'_, Books> {
        self.books.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

fn shunned_for(times: u32) -> Duration {
    SHUNNED_FIRST.saturating_mul(2_u32.saturating_pow(times)).min(SHUNNED_MAX)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_look_at_a_server_that_answered_is_believed_longer() {
        let at = Instant::now() - UNREACHABLE_FOR;
        assert!(!Look { at, kernels: Vec::new() }.is_fresh());
        assert!(Look { at, kernels: vec!["python3".to_owned()] }.is_fresh());
        let at = Instant::now() - REACHABLE_FOR;
        assert!(!Look { at, kernels: vec!["python3".to_owned()] }.is_fresh());
    }

    #[tokio::test(start_paused = true)]
    async fn failures_in_a_row_shun_a_server_for_longer_each_time_until_a_kernel_answers() {
        let standing = Standing::default();
        assert!(!standing.note_not_ready() && !standing.note_not_ready());
        standing.note_ready();
        assert!(!standing.note_not_ready() && !standing.note_not_ready() && !standing.is_shunned());
        for secs in [30, 60, 120, 240, 300, 300] {
            assert!(standing.note_not_ready(), "{secs}");
            assert!(!standing.note_not_ready(), "one that was asked for before changes nothing");
            tokio::time::advance(Duration::from_secs(secs - 1)).await;
            assert!(standing.is_shunned(), "{secs}");
            tokio::time::advance(Duration::from_secs(1)).await;
            assert!(!standing.is_shunned(), "{secs}");
        }
        standing.note_ready();
        assert!(!standing.note_not_ready());
    }
}
