//! Which layer runs a language, and how it gets its interpreters.
#![forbid(unsafe_code)]

pub mod endpoint;
pub mod native;
pub mod select;
pub mod worker;
