//! What became of a cell at the endpoint.
#![forbid(unsafe_code)]

use crate::harness::outcome::CellOutcome;

/// One cell's outcome, and what only a Jupyter server has to tell of it.
#[derive(Clone, Debug, PartialEq)]
pub struct RemoteOutcome {
    pub cell: CellOutcome,
    /// Of the request, as `/v1/jupyter/execute` shows it.
    pub msg_id: String,
    /// The kernel's process is another one than that of the cell before: it has none of its names.
    pub names_lost: bool,
}
