//! Descriptors in the async reactor.

use std::io;
use std::os::fd::OwnedFd;

use tokio::io::unix::AsyncFd;

/// Puts a descriptor that we own into the reactor. Must run inside the async runtime.
pub fn register(descriptor: OwnedFd) -> io::Result<AsyncFd<OwnedFd>> {
    // SAFETY: an `OwnedFd` is open, always answers the same number, and is closed only when it is dropped,
    // which the `AsyncFd` that takes it does after its own deregistration.
    unsafe { AsyncFd::register(descriptor) }.map_err(io::Error::from)
}
