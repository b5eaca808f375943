//! How the two stages are started, and what they find when they are.
#![forbid(unsafe_code)]

use std::fs::{self, File, Permissions};
use std::io::{self, Read, Seek};
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::os::unix::fs::{PermissionsExt, chown};
use std::path::{Path, PathBuf};

use nix::mount::{MsFlags, mount};
use nix::sched::{CloneFlags, unshare};
use nix::unistd::{Gid, Pid, Uid};
use serde::{Deserialize, Serialize};

use crate::launcher::settings::Settings;
use crate::supervisor::Supervisor;
use crate::sys::{raw, stage};

/// Where the daemon sees its folder when it runs under an account that could not reach it by its path.
const DAEMON_DIR: &str = "/run/caisson/data";

/// The daemon's account.
#[derive(Copy, Clone, Debug)]
pub struct Account {
    pub uid: u32,
    pub gid: u32,
}

/// An id that no distribution gives out, for hosts without the service account.
const FALLBACK_ID: u32 = 0x6fff_fff0;

impl Account {
    /// The system user of this name, else a fixed free id.
    pub fn of(name: &str) -> Account {
        match nix::unistd::User::from_name(name) {
            Ok(Some(user)) if !user.uid.is_root() => {
                Account { uid: user.uid.as_raw(), gid: user.gid.as_raw() }
            }
            _ => Account { uid: FALLBACK_ID, gid: FALLBACK_ID },
        }
    }
}

/// What the launcher reads at its start.
#[derive(Debug, Serialize, Deserialize)]
pub struct LauncherStart {
    pub settings: Settings,
    pub log: String,
}

/// Starts the launcher as the first process of a pid namespace and in a mount namespace of its own, unless the
/// settings say that this host has none for it.
pub fn launcher_stage(settings: &Settings, log: &str, daemon: BorrowedFd<'_>) -> io::Result<Pid> {
    let program = own_executable()?;
    let alone = settings.no_namespaces.is_some();
    if alone {
        // What a killed launcher leaves becomes ours, and is ended by us.
        nix::sys::prctl::set_child_subreaper(true)?;
    }
    let start = LauncherStart { settings: settings.clone(), log: log.to_owned() };
    let start = in_memory("caisson-launcher", &serde_json::to_vec(&start)?)?;
    let stage = stage::Stage {
        program: program.as_fd(),
        arguments: &["launcher"],
        descriptors: &[daemon, start.as_fd()],
        namespaces: if alone { 0 } else { launcher_namespaces(settings) },
        before: &|| match (alone, settings.root()) {
            (true, _) => Ok(nix::sys::prctl::set_pdeathsig(nix::sys::signal::Signal::SIGKILL)?),
            (false, true) => Ok(()),
            (false, false) => become_root_of_own(settings),
        },
    };
    stage::start(&stage)
}

fn launcher_namespaces(settings: &Settings) -> u64 {
    let user = if settings.root() { 0 } else { raw::CLONE_NEWUSER };
    user | raw::CLONE_NEWPID | raw::CLONE_NEWNS
}

/// Makes what the launcher needs of namespaces, by a child that ends again. Returns what failed; some hosts let
/// the first step succeed and refuse a later one.
pub fn try_namespaces(settings: &Settings) -> io::Result<Option<String>> {
    let attempt = || -> Result<(), (&'static str, io::Error)> {
        if !settings.root() {
            become_root_of_own(settings).map_err(|error| ("write the id maps", error))?;
        }
        let private = MsFlags::MS_REC | MsFlags::MS_PRIVATE;
        mount(None::<&str>, "/", None::<&str>, private, None::<&str>)
            .map_err(|error| ("make the mounts private", error.into()))?;
        let flags = MsFlags::MS_NOSUID | MsFlags::MS_NODEV | MsFlags::MS_NOEXEC;
        mount(Some("proc"), "/proc", Some("proc"), flags, None::<&str>)
            .map_err(|error| ("mount /proc", error.into()))?;
        if !settings.root() {
            // What each sandbox of an ordinary account is made of.
            let all = CloneFlags::CLONE_NEWUSER | CloneFlags::CLONE_NEWNET | CloneFlags::CLONE_NEWIPC;
            unshare(all).map_err(|error| ("unshare a nested user namespace", error.into()))?;
        }
        Ok(())
    };
    stage::try_in(launcher_namespaces(settings), &attempt)
}

/// An ordinary account: the launcher's user namespace is its own, and its one id is the account's. Before the
/// exec, which would take the capabilities of an unmapped id.
fn become_root_of_own(settings: &Settings) -> io::Result<()> {
    fs::write("/proc/self/setgroups", "deny")?;
    fs::write("/proc/self/uid_map", format!("0 {} 1", settings.uid))?;
    fs::write("/proc/self/gid_map", format!("0 {} 1", settings.gid))
}

/// Starts the daemon under its account, in a mount namespace where its folder can be reached.
pub fn daemon_stage(
    supervisor: &Supervisor,
    control: BorrowedFd<'_>,
    inherited: &[BorrowedFd<'_>],
) -> io::Result<Pid> {
    let program = own_executable()?;
    let config = in_memory("caisson-daemon", &supervisor.daemon_config)?;
    let mut descriptors = vec![control, config.as_fd()];
    descriptors.extend(inherited);
    let count = inherited.len().to_string();
    let before = || match supervisor.account {
        Some(account) if supervisor.settings.no_namespaces.is_none() => {
            move_folder(&supervisor.daemon_dir).and_then(|()| become_account(account))
        }
        Some(account) => become_account(account).and_then(|()| enter(&supervisor.daemon_dir)),
        None => not_outlived(),
    };
    let stage = stage::Stage {
        program: program.as_fd(),
        arguments: &["daemon", &count],
        descriptors: &descriptors,
        namespaces: 0,
        before: &before,
    };
    stage::start(&stage)
}

/// Where the daemon sees its folder.
pub fn daemon_dir(dir: &Path, settings: &Settings) -> PathBuf {
    if settings.root() && settings.no_namespaces.is_none() { DAEMON_DIR.into() } else { dir.to_owned() }
}

/// In the daemon's process, under its account: nothing has moved its folder for it.
fn enter(dir: &Path) -> io::Result<()> {
    std::env::set_current_dir(dir).and_then(|()| std::env::set_current_dir("/")).map_err(|error| {
        let hint = "the service account must be able to walk there: chmod o+x on the folders above, or another --data-dir";
        io::Error::new(error.kind(), format!("{}: {error}; {hint}", dir.display()))
    })
}

/// In the daemon's process, still root: its folder at a path it can walk.
fn move_folder(dir: &Path) -> io::Result<()> {
    fs::create_dir_all(DAEMON_DIR)?;
    unshare(CloneFlags::CLONE_NEWNS)?;
    let private = MsFlags::MS_REC | MsFlags::MS_PRIVATE;
    mount(None::<&str>, "/", None::<&str>, private, None::<&str>)?;
    mount(Some(dir), DAEMON_DIR, None::<&str>, MsFlags::MS_BIND, None::<&str>)?;
    std::env::set_current_dir("/")
}

/// In the daemon's process, still root: its account for good.
fn become_account(account: Account) -> io::Result<()> {
    nix::unistd::setgroups(&[])?;
    nix::unistd::setresgid(
        Gid::from_raw(account.gid),
        Gid::from_raw(account.gid),
        Gid::from_raw(account.gid),
    )?;
    nix::unistd::setresuid(
        Uid::from_raw(account.uid),
        Uid::from_raw(account.uid),
        Uid::from_raw(account.uid),
    )?;
    // A change of identity clears what this sets, so only now.
    not_outlived()
}

/// The daemon ends with the supervisor, and gains nothing by executing.
fn not_outlived() -> io::Result<()> {
    nix::sys::prctl::set_pdeathsig(nix::sys::signal::Signal::SIGKILL)?;
    Ok(nix::sys::prctl::set_no_new_privs()?)
}

/// Makes the folders of a deployment. `data_dir` is walked by the daemon only where it is given a way.
pub fn make_folders(data_dir: &Path, account: Option<Account>) -> io::Result<()> {
    let launcher = data_dir.join("launcher");
    let daemon = data_dir.join("daemon");
    for dir in [&launcher, &daemon] {
        fs::create_dir_all(dir)?;
        fs::set_permissions(dir, Permissions::from_mode(0o700))?;
    }
    match account {
        Some(account) => chown(&daemon, Some(account.uid), Some(account.gid)),
        None => Ok(()),
    }
}

/// Reads what a stage was given in memory.
pub fn read_memory(file: OwnedFd) -> io::Result<Vec<u8>> {
    let mut file = File::from(file);
    file.rewind()?;
    let mut bytes = Vec::new();
    file.read_to_end(&mut bytes)?;
    Ok(bytes)
}

fn in_memory(name: &str, bytes: &[u8]) -> io::Result<OwnedFd> {
    let file = rustix::fs::memfd_create(name, rustix::fs::MemfdFlags::CLOEXEC)?;
    let mut rest = bytes;
    while !rest.is_empty() {
        rest = &rest[rustix::io::write(&file, rest)?..];
    }
    Ok(file)
}

fn own_executable() -> io::Result<File> {
    File::open("/proc/self/exe")
}
