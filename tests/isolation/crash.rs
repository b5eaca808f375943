//! A guest that crashes where the host pipes cores to a program. Changes the machine's core pattern, so only on a
//! machine that is thrown away afterwards: `tests/vm.py` says so by CAISSON_THROWAWAY_MACHINE.

use std::fs;
use std::os::unix::fs::PermissionsExt;
use std::path::Path;
use std::process::Command;
use std::time::Duration;

use crate::support::stand::{fresh_space, text};
use crate::support::{common_stand, plan, proc, skip, strict};

const PATTERN: &str = "/proc/sys/kernel/core_pattern";

/// The host's pattern, put back with this value.
struct Pattern(String);

impl Drop for Pattern {
    fn drop(&mut self) {
        // A machine that goes away in a moment.
        let _ = fs::write(PATTERN, &self.0);
    }
}

/// A program of the host that crashes under `name`, with a core limit of nothing: a pipe is used all the same.
fn crash_on_the_host(dir: &Path, name: &str) {
    let program = dir.join(name);
    fs::copy("/bin/sh", &program).expect("a copy of the shell");
    let script = "ulimit -c 0; kill -SEGV $$";
    let status = Command::new(&program).args(["-c", script]).status().expect("it starts");
    assert!(!status.success());
}

#[test]
fn a_crashing_guest_runs_no_core_handler_of_the_host() {
    if std::env::var_os("CAISSON_THROWAWAY_MACHINE").is_none() {
        return skip("changes the core pattern of the machine: runs in the virtual machines of make test-vm");
    }
    let stand = common_stand!();
    let dir = tempfile::tempdir().expect("a temporary directory");
    let (handler, ran) = (dir.path().join("handler"), dir.path().join("ran"));
    fs::write(&handler, format!("#!/bin/sh\necho \"$1 $(id -u)\" >>{}\ncat >/dev/null\n", ran.display()))
        .expect("our own");
    fs::set_permissions(&handler, fs::Permissions::from_mode(0o755)).expect("our own");
    let _before = Pattern(text(PATTERN));
    fs::write(PATTERN, format!("|{} %e", handler.display())).expect("root may");
    let has_run = |name: &str| text(&ran).lines().any(|line| line == format!("{name} 0"));
    // Control: it runs as root for whoever crashes, and for one who asked for no core as well.
    crash_on_the_host(dir.path(), "before");
    proc::until("the handler has run", Duration::from_secs(10), || has_run("before"));
    let crash = r#"
import os, resource, signal
def crash():
    pid = os.fork()
    if pid == 0:
        signal.signal(signal.SIGSEGV, signal.SIG_DFL)
        os.kill(os.getpid(), signal.SIGSEGV)
        os._exit(0)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
print(crash(), resource.getrlimit(resource.RLIMIT_CORE))
resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
try: print(resource.prlimit(os.getpid(), resource.RLIMIT_CORE, (0, 1)))
except PermissionError: print('refused')
print(resource.getrlimit(resource.RLIMIT_CORE))
print(crash())
"#;
    for plan in [plan(fresh_space()), strict(fresh_space())] {
        let mut guest = stand.guest(plan);
        assert_eq!(guest.say(crash), "-11 (1, 1)\nrefused\n(1, 1)\n-11");
        assert!(guest.cell("os.kill(os.getpid(), signal.SIGABRT)").ended);
    }
    // One that came later has been handled: then so had the guests' been.
    crash_on_the_host(dir.path(), "after");
    proc::until("the handler has run", Duration::from_secs(10), || has_run("after"));
    assert_eq!(text(&ran), "before 0\nafter 0\n");
}
