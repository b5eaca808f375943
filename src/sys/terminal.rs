//! Giving a program that is started a terminal of its own.

use std::os::fd::BorrowedFd;
use std::os::unix::process::CommandExt;
use std::process::Command;

/// Makes the program the leader of a new session whose terminal is its standard input.
pub fn lead(command: &mut Command) {
    let become_leader = || {
        rustix::process::setsid()?;
        // SAFETY: the standard library has put the program's standard input at 0 by now.
        let stdin = unsafe { BorrowedFd::borrow_raw(0) };
        rustix::process::ioctl_tiocsctty(stdin)?;
        Ok(())
    };
    // SAFETY: between fork and exec it makes two system calls, and neither allocates nor locks.
    unsafe { command.pre_exec(become_leader) };
}
