//! caisson runs untrusted Python and JavaScript behind the HTTP APIs that clients already speak.
//! `docs/architecture.md` is the map.

pub mod cli;
pub mod config;
pub mod engine;
pub mod harness;
pub mod launcher;
pub mod server;
pub mod sys;
pub mod telemetry;
