//! The privileged side: one thread, no HTTP, no async. Turns [`plan::LaunchPlan`]s into sandboxes.

pub mod client;
pub mod plan;
pub mod posture;
pub mod seccomp;
