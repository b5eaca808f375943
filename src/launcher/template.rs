//! The read-only root that every zygote lives in and every sandbox starts from.
//!
//! Built once at start by a child of the launcher in a mount namespace of its own: a tmpfs with read-only
//! binds of what the runtimes need and nothing else, pivoted into, kept alive by a descriptor. A sandbox's
//! mount namespace is a copy of it, so it has a handful of mounts whatever the host has.

use std::fs::{self, File};
use std::io;
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::fs::{PermissionsExt, symlink};
use std::path::{Path, PathBuf};

use nix::mount::{MntFlags, MsFlags, mount, umount2};
use nix::sched::{CloneFlags, unshare};
use nix::sys::wait::{WaitStatus, waitpid};
use rustix::mount::{MoveMountFlags, OpenTreeFlags, move_mount, open_tree};

use crate::sys::mount::{Attributes, set_attributes};
use crate::sys::process::{Fork, fork};

/// Size of the template's own tmpfs: directories, links and our own small files.
const ROOT_OPTIONS: &str = "size=16m,nr_inodes=4096,mode=0755";

/// A host path shown read-only inside.
#[derive(Clone, Debug)]
pub struct Bind {
    pub source: PathBuf,
    pub target: PathBuf,
    /// Absence is no error: not every host has it.
    pub optional: bool,
}

/// A file we write into the template.
#[derive(Clone, Debug)]
pub struct Generated {
    pub target: &'static str,
    pub content: Vec<u8>,
}

/// What goes into the template.
#[derive(Clone, Debug, Default)]
pub struct Contents {
    pub binds: Vec<Bind>,
    pub files: Vec<Generated>,
}

/// The finished template.
#[derive(Debug)]
pub struct Template {
    /// Its mount namespace.
    pub namespace: OwnedFd,
}

/// Directories that mounts and links need.
const DIRECTORIES: [&str; 17] = [
    "proc",
    "dev",
    "dev/pts",
    "dev/shm",
    "tmp",
    "mnt",
    "mnt/data",
    "etc",
    "home",
    "home/sandbox",
    "opt",
    "opt/caisson",
    "usr",
    "run",
    "var",
    "var/tmp",
    "sys",
];

/// Host files that libraries look for.
const ETC: [&str; 17] = [
    "/etc/ld.so.cache",
    "/etc/ld.so.conf",
    "/etc/ld.so.conf.d",
    "/etc/alternatives",
    "/etc/fonts",
    "/etc/ssl/openssl.cnf",
    "/etc/ssl/certs",
    "/etc/ca-certificates",
    "/etc/mime.types",
    "/etc/localtime",
    "/etc/timezone",
    "/etc/locale.alias",
    "/etc/os-release",
    "/etc/debian_version",
    "/etc/protocols",
    "/etc/services",
    "/etc/magic",
];

const DEVICES: [&str; 5] = ["/dev/null", "/dev/zero", "/dev/full", "/dev/random", "/dev/urandom"];

const DEVICE_LINKS: [(&str, &str); 5] = [
    ("fd", "/proc/self/fd"),
    ("stdin", "/proc/self/fd/0"),
    ("stdout", "/proc/self/fd/1"),
    ("stderr", "/proc/self/fd/2"),
    ("ptmx", "pts/ptmx"),
];

impl Template {
    /// Builds it at `point`, an empty directory. Runs in the launcher, with its privileges.
    pub fn build(point: &Path, contents: &Contents) -> io::Result<Template> {
        let (report_read, report_write) = io::pipe()?;
        // SAFETY: the launcher has one thread.
        match unsafe { fork() }? {
            Fork::Child => {
                drop(report_read);
                let text = match build_here(point, contents) {
                    Ok(()) => String::new(),
                    Err(error) => error.to_string(),
                };
                wait_to_be_read(report_write, &text)
            }
            Fork::Parent(pid) => {
                drop(report_write);
                let mut reader = report_read;
                let mut length = [0_u8; 4];
                io::Read::read_exact(&mut reader, &mut length)?;
                let mut text = vec![0_u8; u32::from_le_bytes(length) as usize];
                io::Read::read_exact(&mut reader, &mut text)?;
                let namespace = File::open(format!("/proc/{pid}/ns/mnt"));
                nix::sys::signal::kill(pid, nix::sys::signal::Signal::SIGKILL)?;
                while matches!(waitpid(pid, None), Ok(WaitStatus::Stopped(..)) | Err(nix::Error::EINTR)) {}
                if text.is_empty() {
                    Ok(Template { namespace: namespace?.into() })
                } else {
                    Err(io::Error::other(String::from_utf8_lossy(&text).into_owned()))
                }
            }
        }
    }
}

/// In the builder: reports, and keeps the namespace alive until the launcher holds it.
fn wait_to_be_read(mut report: io::PipeWriter, text: &str) -> ! {
    let mut message = (text.len() as u32).to_le_bytes().to_vec();
    message.extend_from_slice(text.as_bytes());
    // Without a reader there is nobody left to build for.
    let _ = io::Write::write_all(&mut report, &message);
    loop {
        nix::unistd::pause();
    }
}

/// In the builder, with the launcher's privileges: the mounts, then the pivot.
fn build_here(point: &Path, contents: &Contents) -> io::Result<()> {
    unshare(CloneFlags::CLONE_NEWNS)?;
    let private = MsFlags::MS_REC | MsFlags::MS_PRIVATE;
    mount(None::<&str>, "/", None::<&str>, private, None::<&str>)?;
    let flags = MsFlags::MS_NOSUID | MsFlags::MS_NODEV;
    mount(Some("root"), point, Some("tmpfs"), flags, Some(ROOT_OPTIONS))?;
    nix::sys::stat::umask(nix::sys::stat::Mode::from_bits_truncate(0o022));
    for directory in DIRECTORIES {
        fs::create_dir_all(point.join(directory))?;
    }
    for name in ["bin", "sbin", "lib", "lib32", "lib64", "libx32"] {
        link_or_bind(point, name)?;
    }
    bind(point, Path::new("/usr"), Path::new("/usr"), false)?;
    for path in ETC {
        bind(point, Path::new(path), Path::new(path), true)?;
    }
    for path in DEVICES {
        bind_device(point, path)?;
    }
    for (name, target) in DEVICE_LINKS {
        symlink(target, point.join("dev").join(name))?;
    }
    for file in &contents.files {
        write_generated(point, file)?;
    }
    for item in &contents.binds {
        bind(point, &item.source, &item.target, item.optional)?;
    }
    // Unobstructed and no more revealing than what a sandbox mounts over it, or the kernel refuses that.
    let flags = MsFlags::MS_NOSUID | MsFlags::MS_NODEV | MsFlags::MS_NOEXEC;
    let options = Some("hidepid=invisible,subset=pid");
    mount(Some("proc"), &point.join("proc"), Some("proc"), flags, options)?;
    pivot(point)
}

fn pivot(point: &Path) -> io::Result<()> {
    std::env::set_current_dir(point)?;
    nix::unistd::pivot_root(".", ".")?;
    umount2(".", MntFlags::MNT_DETACH)?;
    std::env::set_current_dir("/")?;
    let flags =
        MsFlags::MS_REMOUNT | MsFlags::MS_BIND | MsFlags::MS_RDONLY | MsFlags::MS_NOSUID | MsFlags::MS_NODEV;
    Ok(mount(None::<&str>, "/", None::<&str>, flags, None::<&str>)?)
}

fn write_generated(point: &Path, file: &Generated) -> io::Result<()> {
    let path = inside(point, Path::new(file.target));
    if let Some(parent) = path.parent() {
        fs::create_dir_all(parent)?;
    }
    fs::write(&path, &file.content)?;
    fs::set_permissions(&path, fs::Permissions::from_mode(0o644))
}

/// `/bin` and its like are links on a merged system, directories of their own elsewhere.
fn link_or_bind(point: &Path, name: &str) -> io::Result<()> {
    let host = Path::new("/").join(name);
    match fs::read_link(&host) {
        Ok(target) => symlink(target, point.join(name)),
        Err(_) if host.is_dir() => bind(point, &host, &host, false),
        Err(_) => Ok(()),
    }
}

/// Shows `source` and what is mounted beneath it, read-only, at `target`.
fn bind(point: &Path, source: &Path, target: &Path, optional: bool) -> io::Result<()> {
    let attributes =
        Attributes { read_only: true, no_suid: true, no_dev: true, recursive: true, ..Attributes::default() };
    attach(point, source, target, optional, attributes)
}

/// Devices keep their device nature; nothing executes from there.
fn bind_device(point: &Path, path: &str) -> io::Result<()> {
    let attributes = Attributes { no_suid: true, no_exec: true, ..Attributes::default() };
    attach(point, Path::new(path), Path::new(path), false, attributes)
}

fn attach(
    point: &Path,
    source: &Path,
    target: &Path,
    optional: bool,
    attributes: Attributes<'_>,
) -> io::Result<()> {
    let named = |error: io::Error| io::Error::new(error.kind(), format!("{}: {error}", source.display()));
    let source_real = match fs::canonicalize(source) {
        Ok(path) => path,
        Err(error) if optional && error.kind() == io::ErrorKind::NotFound => return Ok(()),
        Err(error) => return Err(named(error)),
    };
    let place = inside(point, target);
    if source_real.is_dir() {
        fs::create_dir_all(&place)?;
    } else {
        if let Some(parent) = place.parent() {
            fs::create_dir_all(parent)?;
        }
        if !place.exists() {
            File::create(&place)?;
        }
    }
    let flags = OpenTreeFlags::OPEN_TREE_CLONE | OpenTreeFlags::OPEN_TREE_CLOEXEC;
    let flags = if attributes.recursive { flags | OpenTreeFlags::AT_RECURSIVE } else { flags };
    let tree = open_tree(rustix::fs::CWD, &source_real, flags).map_err(|error| named(error.into()))?;
    set_attributes(tree.as_fd(), attributes).map_err(named)?;
    let how = MoveMountFlags::MOVE_MOUNT_F_EMPTY_PATH;
    move_mount(tree.as_fd(), "", rustix::fs::CWD, &place, how).map_err(|error| named(error.into()))
}

fn inside(point: &Path, target: &Path) -> PathBuf {
    point.join(target.strip_prefix("/").unwrap_or(target))
}
