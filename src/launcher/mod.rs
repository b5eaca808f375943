//! The privileged side: one thread, no HTTP, no async. Turns [`plan::LaunchPlan`]s into sandboxes.
//!
//! In the daemon: [`client`] and the vocabulary, [`plan`] and [`posture`]. In the launcher, root: everything
//! else, in reading order below. In a guest about to be: [`child`], which is also built into the zygote's
//! library.

pub mod plan;
pub mod posture;

pub mod client;

pub mod bare;
pub mod cgroup;
pub mod child;
pub mod guest;
pub mod husk;
pub mod leases;
pub mod measured;
pub mod release;
pub mod rules;
pub mod seccomp;
pub mod serve;
pub mod settings;
pub mod shell;
pub mod spaces;
pub mod start;
pub mod tally;
pub mod template;
pub mod throttle;
pub mod views;
pub mod wire;
pub mod zygotes;

pub(crate) use crate::sys::raw;
