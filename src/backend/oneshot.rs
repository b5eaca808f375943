//! A cell in an interpreter of its own, which ends with it.
#![forbid(unsafe_code)]

use tokio::sync::watch;

use crate::backend::native::Native;
use crate::engine::Refusal;
use crate::harness::interpreter::{Cell, CellLimits, Interpreter, Provenance};
use crate::harness::outcome::{CellOutcome, Stopped};
use crate::launcher::plan::LaunchPlan;

/// Runs one cell and throws its interpreter away. Dropping the future ends the sandbox: whoever asked for a
/// one-off and went away wants nothing of it.
pub async fn run(
    native: &Native,
    plan: LaunchPlan,
    cwd: Option<&str>,
    cell: Cell<'_>,
    limits: &CellLimits,
    stop: &mut watch::Receiver<Option<Stopped>>,
) -> Result<(CellOutcome, Provenance), Refusal> {
    let interpreter = native.obtain(plan, cwd).await?;
    let provenance = interpreter.provenance();
    let ran = interpreter.run(cell, limits, stop).await;
    if let Some(interpreter) = ran.interpreter {
        retire(interpreter);
    }
    Ok((ran.outcome, provenance))
}

/// Ends a sandbox behind the answer's back: the packet to the launcher wakes it, and with two processors its
/// tearing down would run beside our writing of the answer.
fn retire(interpreter: Interpreter) {
    tokio::spawn(async move { drop(interpreter) });
}
