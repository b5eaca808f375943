//! What the daemon takes from itself once it has its descriptors: if a request ever runs code in it, that
//! code can run cells and read by id, and not start a program, make a namespace, trace, mount or open a file
//! elsewhere.
#![forbid(unsafe_code)]

use std::collections::BTreeMap;
use std::path::Path;

use landlock::{
    ABI, Access, AccessFs, CompatLevel, Compatible, PathBeneath, PathFd, Ruleset, RulesetAttr,
    RulesetCreatedAttr,
};
use nix::sched::CloneFlags;
use seccompiler::{
    BpfProgram, SeccompAction, SeccompCmpArgLen, SeccompCmpOp, SeccompCondition, SeccompFilter, SeccompRule,
    TargetArch,
};
use syscalls::Sysno;

/// Calls no daemon of ours makes.
const REFUSED: [Sysno; 33] = [
    Sysno::execve,
    Sysno::execveat,
    Sysno::ptrace,
    Sysno::process_vm_readv,
    Sysno::process_vm_writev,
    Sysno::pidfd_getfd,
    Sysno::mount,
    Sysno::umount2,
    Sysno::pivot_root,
    Sysno::chroot,
    Sysno::move_mount,
    Sysno::open_tree,
    Sysno::fsopen,
    Sysno::fsmount,
    Sysno::mount_setattr,
    Sysno::setns,
    Sysno::unshare,
    Sysno::bpf,
    Sysno::perf_event_open,
    Sysno::userfaultfd,
    Sysno::io_uring_setup,
    Sysno::keyctl,
    Sysno::add_key,
    Sysno::request_key,
    Sysno::init_module,
    Sysno::finit_module,
    Sysno::delete_module,
    Sysno::kexec_load,
    Sysno::kexec_file_load,
    Sysno::open_by_handle_at,
    Sysno::setuid,
    Sysno::setresuid,
    Sysno::reboot,
];

/// Flags of `clone` that make a namespace. A thread needs none of them.
const NAMESPACES: [CloneFlags; 7] = [
    CloneFlags::CLONE_NEWUSER,
    CloneFlags::CLONE_NEWNS,
    CloneFlags::CLONE_NEWPID,
    CloneFlags::CLONE_NEWNET,
    CloneFlags::CLONE_NEWIPC,
    CloneFlags::CLONE_NEWUTS,
    CloneFlags::CLONE_NEWCGROUP,
];

/// Read by libraries at run time: time zones, the host's own resolver set-up, this process's figures.
const READABLE: [&str; 4] = ["/etc", "/usr/share/zoneinfo", "/proc/self", "/sys/fs/cgroup"];

/// Applies all of it. Where the kernel has no Landlock the rest still holds, and the log says so.
pub fn confine(dir: &Path) -> anyhow::Result<()> {
    nix::sys::prctl::set_dumpable(false)?;
    nix::sys::prctl::set_no_new_privs()?;
    if let Err(error) = restrict_files(dir) {
        tracing::warn!(%error, "the daemon's files are not restricted by Landlock");
    }
    for program in refuse()? {
        seccompiler::apply_filter(&program)?;
    }
    Ok(())
}

fn restrict_files(dir: &Path) -> anyhow::Result<()> {
    let abi = ABI::V1;
    let mut ruleset = Ruleset::default()
        .set_compatibility(CompatLevel::HardRequirement)
        .handle_access(AccessFs::from_all(abi))?
        .create()?
        .add_rule(PathBeneath::new(PathFd::new(dir)?, AccessFs::from_all(abi)))?;
    for path in READABLE {
        if let Ok(path) = PathFd::new(path) {
            ruleset = ruleset.add_rule(PathBeneath::new(path, AccessFs::from_read(abi)))?;
        }
    }
    let device = AccessFs::ReadFile | AccessFs::WriteFile;
    for path in ["/dev/null", "/dev/urandom"] {
        ruleset = ruleset.add_rule(PathBeneath::new(PathFd::new(path)?, device))?;
    }
    let status = ruleset.restrict_self()?;
    anyhow::ensure!(
        status.ruleset == landlock::RulesetStatus::FullyEnforced,
        "Landlock enforces {:?}",
        status.ruleset
    );
    Ok(())
}

/// Two programs, for two answers: the flags of `clone3` lie in memory that no filter can read, so it is a call
/// this kernel does not have, and libraries fall back on `clone`.
fn refuse() -> anyhow::Result<[BpfProgram; 2]> {
    let arch = TargetArch::try_from(std::env::consts::ARCH)?;
    let answer = |errno: rustix::io::Errno| SeccompAction::Errno(errno.raw_os_error() as u32);
    let program = |rules: BTreeMap<i64, Vec<SeccompRule>>, errno| -> anyhow::Result<BpfProgram> {
        Ok(SeccompFilter::new(rules, SeccompAction::Allow, answer(errno), arch)?.try_into()?)
    };
    let mut forbidden: BTreeMap<i64, Vec<SeccompRule>> =
        REFUSED.iter().map(|call| (i64::from(call.id()), Vec::new())).collect();
    let mut with_namespace = Vec::new();
    for flag in NAMESPACES {
        let bit = flag.bits() as u64;
        let is_set = SeccompCondition::new(0, SeccompCmpArgLen::Qword, SeccompCmpOp::MaskedEq(bit), bit)?;
        with_namespace.push(SeccompRule::new(vec![is_set])?);
    }
    forbidden.insert(i64::from(Sysno::clone.id()), with_namespace);
    let unknown = BTreeMap::from([(i64::from(Sysno::clone3.id()), Vec::new())]);
    Ok([program(forbidden, rustix::io::Errno::PERM)?, program(unknown, rustix::io::Errno::NOSYS)?])
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::store::Store;
    use crate::sys::raw;

    #[test]
    fn a_confined_daemons_store_takes_a_large_write_and_opens_nothing_elsewhere() {
        let folder = tempfile::tempdir().expect("a folder");
        let path = folder.path().to_owned();
        let confined = std::thread::spawn(move || {
            confine(&path).expect("this kernel has seccomp");
            let is_bounded = std::fs::read_dir(std::env::temp_dir()).is_err();
            let runtime =
                tokio::runtime::Builder::new_current_thread().enable_all().build().expect("a runtime");
            let written = runtime.block_on(async {
                let store = Store::open(&path.join("store.db")).expect("opens");
                // More than a little to undo: pages that are there are changed.
                for word in ["first", "second"] {
                    store
                        .write(move |it| {
                            for at in 0..5_000 {
                                it.execute(
                                    "INSERT OR REPLACE INTO sessions VALUES (?1, ?2, 'x', 1)",
                                    rusqlite::params![word.repeat(20), at.to_string()],
                                )?;
                            }
                            Ok(())
                        })
                        .await?;
                    store.write(|it| it.execute("UPDATE sessions SET created_at_ms = 2", [])).await?;
                }
                store
                    .read(|it| {
                        it.prepare("SELECT id FROM sessions ORDER BY id || language")?
                            .query([])?
                            .next()
                            .map(|row| row.is_some())
                    })
                    .await
            });
            (is_bounded, written.map_err(|error| error.to_string()))
        });
        let (is_bounded, written) = confined.join().expect("no panic");
        assert_eq!(written, Ok(true));
        assert!(is_bounded, "control: Landlock bounds it");
    }

    #[test]
    fn a_confined_daemon_has_no_clone3_and_still_starts_threads() {
        let folder = tempfile::tempdir().expect("a folder");
        let path = folder.path().to_owned();
        assert_eq!(raw::clone3_of_nothing(), rustix::io::Errno::INVAL.raw_os_error(), "control: it is there");
        let confined = std::thread::spawn(move || {
            confine(&path).expect("this kernel has seccomp");
            let started = std::thread::Builder::new().spawn(|| 7);
            (raw::clone3_of_nothing(), started.map(|thread| thread.join().expect("no panic")).ok())
        });
        let (errno, started) = confined.join().expect("no panic");
        assert_eq!((errno, started), (rustix::io::Errno::NOSYS.raw_os_error(), Some(7)));
    }
}
