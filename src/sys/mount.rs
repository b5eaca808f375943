//! The part of the mount interface that no crate has: attributes of a detached tree, with an id map.

use std::io;
use std::os::fd::{AsRawFd, BorrowedFd};

/// Attributes of a mount, as `mount_setattr(2)` names them.
#[derive(Copy, Clone, Debug, Default)]
pub struct Attributes<'a> {
    pub read_only: bool,
    pub no_suid: bool,
    pub no_dev: bool,
    pub no_exec: bool,
    /// No symbolic link of it is followed.
    pub no_links: bool,
    /// Also what is mounted beneath.
    pub recursive: bool,
    /// The user namespace whose map translates the owners of the files.
    pub id_map: Option<BorrowedFd<'a>>,
}

/// Sets attributes on a detached tree and makes it private: without that it keeps the peer group of its
/// source, and a mount made beneath it by a guest would appear on the host.
pub fn set_attributes(tree: BorrowedFd<'_>, attributes: Attributes<'_>) -> io::Result<()> {
    #[repr(C)]
    struct MountAttr {
        attr_set: u64,
        attr_clr: u64,
        propagation: u64,
        userns_fd: u64,
    }
    const IDMAP: u64 = 0x0010_0000;
    let flag = |on: bool, bit: u64| if on { bit } else { 0 };
    let attr = MountAttr {
        attr_set: flag(attributes.read_only, 1)
            | flag(attributes.no_suid, 2)
            | flag(attributes.no_dev, 4)
            | flag(attributes.no_exec, 8)
            | flag(attributes.no_links, 0x0020_0000)
            | flag(attributes.id_map.is_some(), IDMAP),
        attr_clr: 0,
        propagation: libc::MS_PRIVATE,
        userns_fd: attributes.id_map.map_or(0, |fd| fd.as_raw_fd() as u64),
    };
    let flags = libc::AT_EMPTY_PATH | if attributes.recursive { libc::AT_RECURSIVE } else { 0 };
    let size = size_of::<MountAttr>();
    let at = std::ptr::from_ref(&attr);
    // SAFETY: the path is an empty C string, `attr` lives over the call and `size` is its size.
    let answer =
        unsafe { libc::syscall(libc::SYS_mount_setattr, tree.as_raw_fd(), c"".as_ptr(), flags, at, size) };
    if answer == 0 { Ok(()) } else { Err(io::Error::last_os_error()) }
}
