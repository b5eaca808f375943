//! caisson runs untrusted Python and JavaScript behind the HTTP APIs that clients already speak.
//! `docs/architecture.md` is the map.

pub mod cli;
pub mod config;
pub mod daemon;
pub mod doctor;
pub mod run;
pub mod server;

pub mod backend;
pub mod commands;
pub mod engine;
pub mod files;
pub mod harness;
pub mod inside;
pub mod languages;
pub mod objects;
pub mod runs;
pub mod session;
pub mod store;
pub mod tenant;
pub mod workspace;
pub mod zygote;

pub mod launcher;
pub mod policy;
pub mod supervisor;
pub mod sys;
pub mod telemetry;
