//! Looks after a kernel that says nothing: a long computation, a dead process and a lost outcome sound alike.
#![forbid(unsafe_code)]

use std::sync::Arc;
use std::time::Duration;

use tokio::task::JoinHandle;
use tokio::time::{Instant, sleep_until};

use crate::backend::endpoint::rest::{KernelId, KernelState, REQUEST_MAX, Rest, RestError};
use crate::harness::outcome::{Ending, Lost};

/// How long a kernel may be silent before the server is asked about it, and between two such questions.
const SILENCE_MAX: Duration = Duration::from_secs(5);
/// So many answers in a row make a verdict.
const ANSWERS_NEEDED: u32 = 2;

/// The questions and what came of them.
#[derive(Debug)]
pub(super) struct Watch {
    due: Instant,
    asked: Option<JoinHandle<Result<KernelState, RestError>>>,
    /// Questions in a row that the server did not answer, or answered with `idle`.
    unanswered: u32,
    idle: u32,
    /// The connection was lost in between: only then does `idle` mean that the outcome went with it. Servers
    /// that do not follow their kernels call them idle always.
    gap: bool,
}

impl Watch {
    pub(super) fn new() -> Watch {
        Watch { due: Instant::now() + SILENCE_MAX, asked: None, unanswered: 0, idle: 0, gap: false }
    }

    /// A message of the cell came.
    pub(super) fn heard(&mut self) {
        self.due = Instant::now() + SILENCE_MAX;
        (self.unanswered, self.idle) = (0, 0);
    }

    /// The connection was lost, and there is a new one.
    pub(super) fn reconnected(&mut self) {
        self.heard();
        self.gap = true;
    }

    /// Resolves when the cell cannot be expected to end any more. Dropping the future loses nothing.
    pub(super) async fn verdict(&mut self, rest: &Arc<Rest>, id: &KernelId) -> Ending {
        loop {
            let Some(asked) = &mut self.asked else {
                sleep_until(self.due).await;
                let (rest, id) = (Arc::clone(rest), id.clone());
                self.asked = Some(tokio::spawn(async move { rest.state(&id, REQUEST_MAX).await }));
                continue;
            };
            let answer = asked.await;
            self.asked = None;
            self.due = Instant::now() + SILENCE_MAX;
            if let Some(ending) = answer.ok().and_then(|answer| self.judge(answer)) {
                return ending;
            }
        }
    }

    fn judge(&mut self, answer: Result<KernelState, RestError>) -> Option<Ending> {
        match answer {
            Ok(KernelState::Gone | KernelState::Dead) => return Some(Ending::Died(None)),
            Ok(KernelState::Idle) if self.gap => self.idle += 1,
            Err(error) if error.is_absence() => self.unanswered += 1,
            Ok(_) | Err(_) => (self.unanswered, self.idle) = (0, 0),
        }
        if self.idle >= ANSWERS_NEEDED {
            return Some(Ending::Lost(Lost::Forgotten));
        }
        (self.unanswered >= ANSWERS_NEEDED).then_some(Ending::Lost(Lost::Connection))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn verdicts(gap: bool, answers: Vec<Result<KernelState, RestError>>) -> Vec<Option<Ending>> {
        let mut watch = Watch { due: Instant::now(), asked: None, unanswered: 0, idle: 0, gap };
        answers.into_iter().map(|answer| watch.judge(answer)).collect()
    }

    #[test]
    fn a_kernel_that_is_gone_or_dead_died() {
        assert_eq!(verdicts(false, vec![Ok(KernelState::Gone)]), [Some(Ending::Died(None))]);
        assert_eq!(verdicts(false, vec![Ok(KernelState::Dead)]), [Some(Ending::Died(None))]);
    }

    #[test]
    fn an_idle_kernel_has_lost_the_outcome_only_after_a_gap() {
        let idle = || vec![Ok(KernelState::Idle), Ok(KernelState::Idle), Ok(KernelState::Idle)];
        assert_eq!(verdicts(false, idle()), [None, None, None]);
        assert_eq!(verdicts(true, idle())[..2], [None, Some(Ending::Lost(Lost::Forgotten))]);
    }

    #[test]
    fn one_question_without_an_answer_is_no_verdict() {
        let silent = || Err(RestError::ConnectTimeout);
        let answers = vec![silent(), Ok(KernelState::Other), silent(), Err(RestError::Status(500)), silent()];
        assert_eq!(verdicts(false, answers), [None; 5]);
        let lost = Some(Ending::Lost(Lost::Connection));
        assert_eq!(verdicts(false, vec![silent(), silent()]), [None, lost]);
    }
}
