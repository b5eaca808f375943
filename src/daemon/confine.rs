//! What the daemon takes from itself once it has its descriptors: if a request ever runs code in it, that
//! code can run cells and read by id, and not start a program, trace, mount or open a file elsewhere.
#![forbid(unsafe_code)]

use std::collections::BTreeMap;
use std::path::Path;

use landlock::{
    ABI, Access, AccessFs, CompatLevel, Compatible, PathBeneath, PathFd, Ruleset, RulesetAttr,
    RulesetCreatedAttr,
};
use seccompiler::{BpfProgram, SeccompAction, SeccompFilter, TargetArch};
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

/// Read by libraries at run time: time zones, the host's own resolver set-up, this process's figures.
const READABLE: [&str; 4] = ["/etc", "/usr/share/zoneinfo", "/proc/self", "/sys/fs/cgroup"];

/// Applies all of it. Where the kernel has no Landlock the rest still holds, and the log says so.
pub fn confine(dir: &Path) -> anyhow::Result<()> {
    nix::sys::prctl::set_dumpable(false)?;
    nix::sys::prctl::set_no_new_privs()?;
    if let Err(error) = restrict_files(dir) {
        tracing::warn!(%error, "the daemon's files are not restricted by Landlock");
    }
    let program = refuse()?;
    Ok(seccompiler::apply_filter(&program)?)
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

fn refuse() -> anyhow::Result<BpfProgram> {
    let arch = TargetArch::try_from(std::env::consts::ARCH)?;
    let rules: BTreeMap<i64, Vec<_>> =
        REFUSED.iter().map(|call| (i64::from(call.id()), Vec::new())).collect();
    let eperm = SeccompAction::Errno(rustix::io::Errno::PERM.raw_os_error() as u32);
    let filter = SeccompFilter::new(rules, SeccompAction::Allow, eperm, arch)?;
    Ok(filter.try_into()?)
}
