//! The state machine of a session, data in and data out.
//!
//! ```text
//!            begin            started             finish (interpreter kept)
//!   Empty ─────────► Starting ───────► Running ─────────────────────► Idle
//!     ▲                 │                │  ▲                          │
//!     │   start failed  │                │  └────────── begin ─────────┘
//!     ├─────────────────┘                │
//!     └──────────────────────────────────┘  finish (interpreter lost: timeout, death)
//!
//!   every state ── close ──► Closed: final; whatever comes back afterwards is handed out to be dropped
//! ```
//!
//! The interpreter is moved out while a cell runs: a second cell for a busy one does not compile.
#![forbid(unsafe_code)]

use std::time::Instant;

/// Why a session is over.
#[derive(Copy, Clone, Debug, PartialEq, Eq)]
pub enum CloseReason {
    /// Somebody asked for it.
    Deleted,
    /// Nobody used it for too long.
    Idle,
    /// Its first interpreter could not be started, or nobody waited for it: it never was one.
    NeverStarted,
    /// The launcher is gone, and the interpreter with it.
    LauncherGone,
    ShuttingDown,
}

/// Invariant: `Idle` alone holds an interpreter.
#[derive(Debug)]
pub enum State<I> {
    /// No interpreter: made up front, or its last one was lost.
    Empty,
    Starting {
        since: Instant,
    },
    Idle {
        interpreter: I,
    },
    Running {
        since: Instant,
    },
    Closed {
        reason: CloseReason,
    },
}

/// What [`State::begin`] found.
#[derive(Debug, PartialEq, Eq)]
pub enum Begun<I> {
    Ready(I),
    MustStart,
    Closed(CloseReason),
}

impl<I> State<I> {
    /// A cell has its turn. `Ready` moves to `Running`, `MustStart` to `Starting`.
    pub fn begin(&mut self, now: Instant) -> Begun<I> {
        match std::mem::replace(self, State::Starting { since: now }) {
            State::Idle { interpreter } => {
                *self = State::Running { since: now };
                Begun::Ready(interpreter)
            }
            State::Closed { reason } => {
                *self = State::Closed { reason };
                Begun::Closed(reason)
            }
            // Whoever has the turn is alone: a run that still seems to be there was torn down half-way.
            State::Empty | State::Starting { .. } | State::Running { .. } => Begun::MustStart,
        }
    }

    /// The interpreter is there and its cell starts. `Err` when the session was closed meanwhile.
    pub fn started(&mut self, now: Instant) -> Result<(), CloseReason> {
        match self {
            State::Closed { reason } => Err(*reason),
            _ => {
                *self = State::Running { since: now };
                Ok(())
            }
        }
    }

    /// The cell is over, or could not start. Gives back an interpreter that nobody wants any more.
    pub fn finish(&mut self, interpreter: Option<I>) -> Option<I> {
        if let State::Closed { .. } = self {
            return interpreter;
        }
        *self = match interpreter {
            Some(interpreter) => State::Idle { interpreter },
            None => State::Empty,
        };
        None
    }

    /// Ends the session; the first reason stays. Gives back the interpreter if one was waiting.
    pub fn close(&mut self, reason: CloseReason) -> Option<I> {
        if let State::Closed { .. } = self {
            return None;
        }
        match std::mem::replace(self, State::Closed { reason }) {
            State::Idle { interpreter } => Some(interpreter),
            _ => None,
        }
    }

    pub fn is_executing(&self) -> bool {
        matches!(self, State::Starting { .. } | State::Running { .. })
    }

    pub fn closed(&self) -> Option<CloseReason> {
        match self {
            State::Closed { reason } => Some(*reason),
            _ => None,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn now() -> Instant {
        Instant::now()
    }

    #[test]
    fn a_session_goes_round_and_keeps_its_interpreter() {
        let mut state = State::Empty;
        assert_eq!(state.begin(now()), Begun::MustStart);
        assert!(state.is_executing());
        state.started(now()).expect("open");
        assert_eq!(state.finish(Some("i")), None);
        assert_eq!(state.begin(now()), Begun::Ready("i"));
        assert!(state.is_executing());
    }

    #[test]
    fn a_lost_interpreter_leaves_an_empty_session() {
        let mut state = State::Idle { interpreter: "i" };
        assert_eq!(state.begin(now()), Begun::Ready("i"));
        assert_eq!(state.finish(None), None);
        assert!(matches!(state, State::Empty));
        assert_eq!(state.begin(now()), Begun::MustStart);
    }

    #[test]
    fn closing_a_running_session_hands_back_its_interpreter_at_the_end() {
        let mut state = State::Running { since: now() };
        assert_eq!(state.close(CloseReason::Deleted), None);
        assert_eq!(state.finish(Some("i")), Some("i"));
        assert_eq!(state.begin(now()), Begun::Closed(CloseReason::Deleted));
    }

    #[test]
    fn closing_while_starting_keeps_the_cell_from_running() {
        let mut state: State<&str> = State::Empty;
        assert_eq!(state.begin(now()), Begun::MustStart);
        state.close(CloseReason::Deleted);
        assert_eq!(state.started(now()), Err(CloseReason::Deleted));
    }

    #[test]
    fn the_first_reason_stays() {
        let mut state = State::Idle { interpreter: "i" };
        assert_eq!(state.close(CloseReason::Idle), Some("i"));
        assert_eq!(state.close(CloseReason::Deleted), None);
        assert_eq!(state.closed(), Some(CloseReason::Idle));
    }
}
