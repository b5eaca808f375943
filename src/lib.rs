//! caisson runs untrusted Python and JavaScript behind the HTTP APIs that clients already speak.
//! `docs/architecture.md` is the map.

pub mod backend;
pub mod engine;
pub mod harness;
pub mod launcher;
pub mod session;
pub mod store;
pub mod sys;
pub mod tenant;
pub mod zygote;
