//! How long a task that reads what a guest writes goes on before others have their turn.
//!
//! What is always there to be read never makes its reader wait, and a thread of the runtime that does not come to wait
//! serves nobody else.
#![forbid(unsafe_code)]

/// Work of one turn, in steps: a line or frame is one, and so are so many bytes. About a millisecond of it.
const STEPS_MAX: usize = 128;
const STEP_BYTES: usize = 8 * 1024;

/// What is left of a turn.
#[derive(Debug)]
pub(crate) struct Pace {
    steps_left: usize,
}

impl Pace {
    pub(crate) fn new() -> Pace {
        Pace { steps_left: STEPS_MAX }
    }

    /// Something was read or taken that is so long.
    pub(crate) fn spend(&mut self, bytes: usize) {
        self.steps_left = self.steps_left.saturating_sub(1 + bytes / STEP_BYTES);
    }

    pub(crate) fn is_over(&self) -> bool {
        self.steps_left == 0
    }

    /// Lets others have their turn, if this one is over.
    pub(crate) async fn rest(&mut self) {
        if self.is_over() {
            *self = Pace::new();
            tokio::task::yield_now().await;
        }
    }
}
