//! Thin safe wrappers over system calls: the one place besides `launcher`'s fork and exec where unsafe
//! lives. One call, one wrapper, one reason.

pub mod loopdev;
pub mod mount;
pub mod packet;
pub mod process;
pub mod raw;
pub mod reactor;
pub mod stage;
pub mod terminal;
