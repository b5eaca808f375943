//! The check from outside before the first guest byte: what a sandbox claims is read from the kernel.
#![forbid(unsafe_code)]

use std::fs;

use nix::unistd::Pid;

use crate::launcher::plan::Attestation;
use crate::launcher::rules::Rules;
use crate::launcher::shell::Shell;
use crate::launcher::wire::NAMESPACES;

/// Filters that this process runs under.
pub fn own_filters() -> usize {
    let status = fs::read_to_string("/proc/self/status").unwrap_or_default();
    let count = status.lines().find_map(|line| line.strip_prefix("Seccomp_filters:"));
    count.and_then(|count| count.trim().parse().ok()).unwrap_or(0)
}

/// Inode numbers of the launcher's own namespaces, in the order of [`NAMESPACES`].
pub fn own_namespaces() -> Vec<u64> {
    inodes("self").unwrap_or_default()
}

/// Compares the process with what the posture promises. The error says what did not match.
pub fn verify(
    pid: Pid,
    shell: &Shell,
    rules: &Rules,
    account: usize,
    own: &[u64],
) -> Result<Attestation, String> {
    let status = fs::read_to_string(format!("/proc/{pid}/status")).map_err(|error| error.to_string())?;
    let field = |name: &str| {
        status
            .lines()
            .find_map(|line| line.strip_prefix(name)?.strip_prefix(':'))
            .map(str::trim)
            .ok_or_else(|| format!("no {name} in status"))
    };
    let id = rules.host_id(shell.block, account);
    for name in ["Uid", "Gid"] {
        let found = field(name)?;
        if !found.split_whitespace().all(|one| one.parse() == Ok(id)) {
            return Err(format!("{name} is {found}, not {id}"));
        }
    }
    if rules.own_ids && !field("Groups")?.is_empty() {
        return Err(format!("groups are {}", field("Groups")?));
    }
    // Without capabilities of our own the bounding set cannot be emptied; no_new_privs keeps it from giving any.
    let bounding = if rules.unprivileged() { &[][..] } else { &["CapBnd"] };
    for name in ["CapInh", "CapPrm", "CapEff", "CapAmb"].iter().chain(bounding) {
        let found = field(name)?;
        if found.bytes().any(|byte| byte != b'0') {
            return Err(format!("{name} is {found}"));
        }
    }
    if field("NoNewPrivs")? != "1" {
        return Err("no_new_privs is not set".to_owned());
    }
    let wanted = rules.filter_count();
    let filters = field("Seccomp_filters")?;
    if field("Seccomp")? != "2" || filters.parse() != Ok(wanted) {
        return Err(format!("{filters} seccomp filters, not {wanted}"));
    }
    // Compared in pairs below: a list that is short would leave the rest unseen.
    if own.len() != NAMESPACES.len() || shell.inodes.len() != rules.namespaces().len() {
        return Err("the namespaces to compare with are not known".to_owned());
    }
    let found = inodes(&pid.to_string()).map_err(|error| error.to_string())?;
    let mut shells = shell.inodes.iter();
    for ((kind, inode), ours) in NAMESPACES.iter().zip(&found).zip(own) {
        let (_, name) = kind;
        if !rules.namespaces().contains(kind) {
            if inode != ours {
                return Err(format!("{name} namespace is not the launcher's"));
            }
        } else if inode == ours || Some(inode) != shells.next() {
            return Err(format!("{name} namespace is not the shell's"));
        }
    }
    let namespaces = shell.inodes.len() as u8;
    let groups = fs::read_to_string(format!("/proc/{pid}/cgroup")).map_err(|error| error.to_string())?;
    if !shell.leaf.holds(&groups) {
        return Err("not in the shell's cgroup".to_owned());
    }
    Ok(Attestation { host_uid: id, seccomp_filters: wanted as u8, namespaces })
}

fn inodes(pid: &str) -> std::io::Result<Vec<u64>> {
    NAMESPACES
        .iter()
        .map(|(_, name)| Ok(rustix::fs::stat(format!("/proc/{pid}/ns/{name}"))?.st_ino))
        .collect()
}
