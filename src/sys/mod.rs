//! Thin safe wrappers over system calls: the one place besides `launcher`'s fork and exec where unsafe
//! lives. One call, one wrapper, one reason.

pub mod packet;
pub mod reactor;
