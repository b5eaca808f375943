//! The launcher's check from outside, `release::verify`, on processes that are not what they should be. Each
//! mismatch is named; the control is a real guest beside its true shell.

use std::fs;
use std::os::unix::process::CommandExt;
use std::process::{Child, Command};

use caisson::launcher::cgroup::{CgroupLimits, Cgroups};
use caisson::launcher::posture::Shape;
use caisson::launcher::release::{own_namespaces, verify};
use caisson::launcher::rules::Rules;
use caisson::launcher::shell::Shell;
use caisson::launcher::wire::NAMESPACES;
use caisson::sys::packet;
use nix::unistd::Pid;

use crate::support::stand::{fresh_space, settings};
use crate::support::{Guest, common_stand, plan, proc, skip};

const LIMITS: CgroupLimits = CgroupLimits { memory_bytes: 64 << 20, pids: 16, cpu_millicores: 500 };

/// What the launcher knows of a shell, made up for `pid`.
fn shell(pid: i32, block: u32, inodes: Vec<u64>) -> Shell {
    let (socket, _) = packet::pair().expect("a socket pair");
    let whom = rustix::process::Pid::from_raw(pid).expect("a pid is not 0");
    Shell {
        space: fresh_space(),
        owner: 0,
        pid: Pid::from_raw(pid),
        pidfd: rustix::process::pidfd_open(whom, rustix::process::PidfdFlags::empty()).expect("it lives"),
        socket,
        // No group at all is held by everybody; a test of its own covers groups.
        leaf: Cgroups::none().leaf("space", "sandbox", LIMITS).expect("nothing to make"),
        block,
        namespaces: Vec::new(),
        inodes,
        ruleset: None,
        bare: false,
        husk: None,
    }
}

fn inodes(pid: i32) -> Vec<u64> {
    NAMESPACES.iter().map(|(_, name)| proc::namespace(pid, name).expect("it lives")).collect()
}

fn rules() -> Rules {
    Rules::load(&settings("/nonexistent".as_ref()), 0, Shape::UserNamespace).expect("the defaults load")
}

/// The guest's block: the id before its own is init's.
fn block(guest: &Guest) -> u32 {
    guest.attestation.host_uid - 1
}

fn check(pid: i32, shell: &Shell, rules: &Rules) -> Result<u32, String> {
    let checked = verify(Pid::from_raw(pid), shell, rules, 0, &own_namespaces());
    checked.map(|attestation| attestation.host_uid)
}

#[test]
fn a_guest_beside_its_own_shell_is_released_and_beside_another_is_not() {
    let stand = common_stand!();
    let space = fresh_space();
    let (guest, other) = (stand.guest(plan(space)), stand.guest(plan(space)));
    let (pid, rules) = (guest.pid(), rules());
    assert_eq!(check(pid, &shell(pid, block(&guest), inodes(pid)), &rules), Ok(guest.attestation.host_uid));
    // Another's ids.
    let wrong = check(pid, &shell(pid, block(&other), inodes(pid)), &rules).unwrap_err();
    assert!(wrong.starts_with("Uid is "), "{wrong}");
    // Each namespace of another shell, one at a time.
    for (at, (_, name)) in NAMESPACES.iter().enumerate() {
        let mut mixed = inodes(pid);
        mixed[at] = inodes(other.pid())[at];
        let wrong = check(pid, &shell(pid, block(&guest), mixed), &rules).unwrap_err();
        assert_eq!(wrong, format!("{name} namespace is not the shell's"));
    }
    // The launcher's own namespaces are no shell's, even if the shell says so.
    let own = inodes(pid);
    let wrong =
        verify(Pid::from_raw(pid), &shell(pid, block(&guest), own.clone()), &rules, 0, &own).unwrap_err();
    assert_eq!(wrong, "user namespace is not the shell's");
    // A filter less than there should be.
    let mut more = rules.clone();
    more.second.push(vec![0]);
    let wrong = check(pid, &shell(pid, block(&guest), inodes(pid)), &more).unwrap_err();
    assert!(wrong.ends_with(&format!("seccomp filters, not {}", more.filter_count())), "{wrong}");
    // Another account of the same sandbox.
    let wrong =
        verify(Pid::from_raw(pid), &shell(pid, block(&guest), inodes(pid)), &rules, 1, &own_namespaces());
    assert!(wrong.unwrap_err().starts_with("Uid is "));
}

#[test]
fn a_check_that_cannot_see_all_namespaces_releases_nobody() {
    let stand = common_stand!();
    let guest = stand.guest(plan(fresh_space()));
    let (pid, rules) = (guest.pid(), rules());
    for known in 0..NAMESPACES.len() {
        let short: Vec<u64> = inodes(pid).into_iter().take(known).collect();
        let wrong = check(pid, &shell(pid, block(&guest), short), &rules).unwrap_err();
        assert_eq!(wrong, "the namespaces to compare with are not known");
        let own: Vec<u64> = own_namespaces().into_iter().take(known).collect();
        let wrong = verify(Pid::from_raw(pid), &shell(pid, block(&guest), inodes(pid)), &rules, 0, &own);
        assert_eq!(wrong.unwrap_err(), "the namespaces to compare with are not known");
    }
}

#[test]
fn a_guest_outside_its_group_is_not_released() {
    let stand = common_stand!();
    let guest = stand.guest(plan(fresh_space()));
    let pid = guest.pid();
    let (groups, found) = Cgroups::open(&format!("caisson-isolation-{}", std::process::id()), false);
    if !found.complete() {
        return skip("needs writable cgroups");
    }
    let mut shell = shell(pid, block(&guest), inodes(pid));
    shell.leaf = groups.leaf("space", "sandbox", LIMITS).expect("a group of our own");
    let wrong = check(pid, &shell, &rules());
    assert!(shell.leaf.remove());
    groups.remove_all();
    assert_eq!(wrong, Err("not in the shell's cgroup".to_owned()));
}

struct Sleeper(Child);

impl Drop for Sleeper {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

#[test]
fn each_confinement_that_a_process_lacks_is_named() {
    if let Some(reason) = crate::support::missing() {
        return skip(reason);
    }
    let rules = rules();
    let id = 0x6fff_ff01_u32;
    let (uid, gid) = (format!("--reuid={id}"), format!("--regid={id}"));
    // From a test's own child with nothing but the ids, one layer more each time.
    let none: [&str; 0] = [];
    let bound = ["--bounding-set=-all", "--inh-caps=-all"];
    let locked = ["--bounding-set=-all", "--inh-caps=-all", "--no-new-privs"];
    let rows: [(&[&str], &str); 5] = [
        (&["--clear-groups"], "Uid is 0"),
        (&none, "groups are"),
        (&["--clear-groups"], "CapBnd is"),
        (&bound, "no_new_privs is not set"),
        (&locked, "0 seccomp filters, not"),
    ];
    for (at, (flags, wanted)) in rows.into_iter().enumerate() {
        let mut command = Command::new("setpriv");
        match at {
            0 => {}
            1 => {
                command.args([&uid, &gid, "--groups=4"]);
            }
            _ => {
                command.args([&uid, &gid]);
            }
        }
        if at > 2 {
            command.arg("--clear-groups");
        }
        command.args(flags).args(["sleep", "60"]).process_group(0);
        let sleeper = Sleeper(command.spawn().expect("setpriv starts"));
        let pid = sleeper.0.id() as i32;
        proc::until("setpriv has become sleep", std::time::Duration::from_secs(5), || {
            fs::read_to_string(format!("/proc/{pid}/comm")).is_ok_and(|name| name == "sleep\n")
        });
        let found = check(pid, &shell(pid, id - 1, inodes(pid)), &rules).unwrap_err();
        assert!(found.starts_with(wanted), "row {at}: {found}");
    }
    // This very process is root with everything.
    let own = std::process::id() as i32;
    let found = check(own, &shell(own, id - 1, inodes(own)), &rules).unwrap_err();
    assert!(found.starts_with("Uid is 0"), "{found}");
    // And one that is gone cannot be vouched for.
    let mut child = Command::new("true").spawn().expect("true starts");
    let pid = child.id() as i32;
    let gone = shell(pid, id - 1, vec![1; 7]);
    child.wait().expect("it ends");
    assert!(check(pid, &gone, &rules).is_err());
}
