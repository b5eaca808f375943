//! The daemon's views of workspaces: what guests have written, as files of the daemon's own account, without links that
//! could be followed and nothing that could be executed.
//!
//! A view is mounted in the launcher's private namespace beneath the one folder that the daemon's Landlock rules let it
//! open files in, because the kernel asks those rules on the way up from a mount to its parent; the daemon gets a
//! descriptor of it and no path. Where ids cannot be mapped, an access list on the workspace lets the daemon in instead.

use std::fs;
use std::io;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd};
use std::path::Path;

use nix::mount::{MntFlags, umount2};
use nix::sched::{CloneFlags, unshare};
use nix::sys::wait::waitpid;
use rustix::fs::{AtFlags, Mode, OFlags, XattrFlags};
use rustix::mount::{MoveMountFlags, OpenTreeFlags, move_mount, open_tree};

use crate::launcher::settings::ViewSettings;
use crate::sys::mount::{Attributes, set_attributes};
use crate::sys::process::{Fork, fork};

/// How a folder is opened that must be one and no link.
const FOLDER: OFlags = OFlags::RDONLY.union(OFlags::DIRECTORY).union(OFlags::NOFOLLOW).union(OFlags::CLOEXEC);

/// Where views are made, and as whom the daemon sees them.
#[derive(Debug)]
pub struct Views {
    /// Held open: the daemon owns the folder above and could put another in its place.
    dir: OwnedFd,
    /// The daemon's account on the host.
    uid: u32,
    /// A user namespace that shows the guest's account as the daemon's.
    map: Option<OwnedFd>,
    /// Views are mounts of their own; else the folder itself.
    mounts: bool,
}

impl Views {
    /// Prepares the folder. `guest` are the ids on disk that an id map shows as the daemon's; `None` where ids are not
    /// mapped.
    pub fn prepare(settings: &ViewSettings, guest: Option<(u32, u32)>, mounts: bool) -> io::Result<Views> {
        let dir = &settings.dir;
        match fs::create_dir(dir) {
            Err(error) if error.kind() != io::ErrorKind::AlreadyExists => return Err(error),
            _ => {}
        }
        let dir = rustix::fs::open(dir, FOLDER, Mode::empty())?;
        if rustix::fs::fstat(&dir)?.st_uid != rustix::process::geteuid().as_raw() {
            return Err(io::Error::other("the folder of views is not the launcher's"));
        }
        rustix::fs::fchmod(&dir, Mode::from_bits_truncate(0o711))?;
        for entry in rustix::fs::Dir::read_from(&dir)? {
            let name = entry?.file_name().to_owned();
            if name.as_c_str() != c"." && name.as_c_str() != c".." {
                rustix::fs::unlinkat(&dir, &name, AtFlags::REMOVEDIR)?;
            }
        }
        let map = guest.map(|guest| id_map(guest, (settings.uid, settings.gid))).transpose()?;
        Ok(Views { dir, uid: settings.uid, map, mounts })
    }

    /// The user namespace whose map a view carries.
    pub fn map(&self) -> Option<BorrowedFd<'_>> {
        self.map.as_ref().map(AsFd::as_fd)
    }

    /// A view of the folder `data`. `guest` is the host id of its owner, where no map shows that as the daemon's.
    pub fn open(&self, data: &Path, name: &str, guest: Option<u32>) -> io::Result<OwnedFd> {
        if let Some(guest) = guest.filter(|guest| *guest != self.uid) {
            let list = access_list(guest, self.uid);
            for kind in ["system.posix_acl_access", "system.posix_acl_default"] {
                rustix::fs::setxattr(data, kind, &list, XattrFlags::empty())?;
            }
        }
        if !self.mounts {
            return Ok(rustix::fs::open(data, FOLDER, Mode::empty())?);
        }
        self.attach(data, name)?;
        Ok(rustix::fs::openat(&self.dir, name, FOLDER, Mode::empty())?)
    }

    /// Mounts it, unless it is there already.
    fn attach(&self, data: &Path, name: &str) -> io::Result<()> {
        match rustix::fs::mkdirat(&self.dir, name, Mode::from_bits_truncate(0o700)) {
            Err(rustix::io::Errno::EXIST) => return Ok(()),
            made => made?,
        }
        let flags = OpenTreeFlags::OPEN_TREE_CLONE | OpenTreeFlags::OPEN_TREE_CLOEXEC;
        let attached = open_tree(rustix::fs::CWD, data, flags).map_err(io::Error::from).and_then(|tree| {
            let attributes = Attributes {
                no_suid: true,
                no_dev: true,
                no_exec: true,
                no_links: true,
                id_map: self.map(),
                ..Attributes::default()
            };
            set_attributes(tree.as_fd(), attributes)?;
            let how = MoveMountFlags::MOVE_MOUNT_F_EMPTY_PATH;
            Ok(move_mount(tree.as_fd(), "", &self.dir, name, how)?)
        });
        if attached.is_err() {
            rustix::fs::unlinkat(&self.dir, name, AtFlags::REMOVEDIR)?;
        }
        attached
    }

    /// Takes a view away. What the daemon has open stays open.
    pub fn close(&self, name: &str) {
        if !self.mounts {
            return;
        }
        let point = format!("/proc/self/fd/{}/{name}", self.dir.as_raw_fd());
        let flags = MntFlags::MNT_DETACH | MntFlags::UMOUNT_NOFOLLOW;
        let closed = umount2(point.as_str(), flags).map_err(io::Error::from);
        let closed = closed.and_then(|()| Ok(rustix::fs::unlinkat(&self.dir, name, AtFlags::REMOVEDIR)?));
        if let Err(error) = closed {
            tracing::warn!(name, %error, "view not taken away");
        }
    }
}

/// A user namespace in which `from` on disk is `to`. Nobody lives in it.
fn id_map(from: (u32, u32), to: (u32, u32)) -> io::Result<OwnedFd> {
    let (ready, child_ready) = io::pipe()?;
    // SAFETY: the launcher has one thread.
    match unsafe { fork() }? {
        Fork::Child => {
            drop(ready);
            if unshare(CloneFlags::CLONE_NEWUSER).is_ok() {
                // Without a reader there is nobody left to wait for.
                let _ = io::Write::write_all(&mut &child_ready, b"r");
            }
            loop {
                nix::unistd::pause();
            }
        }
        Fork::Parent(pid) => {
            drop(child_ready);
            let mut byte = [0_u8; 1];
            let mapped = io::Read::read_exact(&mut &ready, &mut byte).and_then(|()| {
                fs::write(format!("/proc/{pid}/uid_map"), format!("{} {} 1\n", from.0, to.0))?;
                fs::write(format!("/proc/{pid}/gid_map"), format!("{} {} 1\n", from.1, to.1))?;
                Ok(fs::File::open(format!("/proc/{pid}/ns/user"))?.into())
            });
            nix::sys::signal::kill(pid, nix::sys::signal::Signal::SIGKILL)?;
            while waitpid(pid, None) == Err(nix::Error::EINTR) {}
            mapped
        }
    }
}

/// A POSIX access list as the kernel keeps it: owner, two accounts, group, mask, others.
fn access_list(guest: u32, daemon: u32) -> Vec<u8> {
    const VERSION: u32 = 2;
    const NO_ID: u32 = u32::MAX;
    const ALL: u16 = 7;
    const LOOK: u16 = 5;
    let (first, second) = (guest.min(daemon), guest.max(daemon));
    let entries: [(u16, u16, u32); 6] = [
        (0x01, ALL, NO_ID),
        (0x02, ALL, first),
        (0x02, ALL, second),
        (0x04, LOOK, NO_ID),
        (0x10, ALL, NO_ID),
        (0x20, LOOK, NO_ID),
    ];
    let mut list = VERSION.to_le_bytes().to_vec();
    for (tag, rights, id) in entries {
        list.extend_from_slice(&tag.to_le_bytes());
        list.extend_from_slice(&rights.to_le_bytes());
        list.extend_from_slice(&id.to_le_bytes());
    }
    list
}
