//! caisson runs untrusted Python and JavaScript behind the HTTP APIs that clients already speak.
//! `docs/architecture.md` is the map.

pub mod cli;
pub mod config;
pub mod daemon;
pub mod doctor;
pub mod run;
pub mod server;

pub mod engine;
pub mod session;
pub mod backend;
pub mod zygote;
pub mod harness;
pub mod tenant;
pub mod store;

pub mod policy;
pub mod launcher;
pub mod supervisor;
pub mod sys;
pub mod telemetry;
