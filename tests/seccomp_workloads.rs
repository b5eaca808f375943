//! The compiled filters in the running kernel, with both harnesses and their worker processes under them.
//! The list of what they do lies in `tests/harness/test_harness.py`; `confine.py` installs and starts.

use std::path::Path;
use std::process::Command;
use std::{env, fs};

use caisson::launcher::seccomp::compile;
use caisson::policy::load;

#[test]
fn harnesses_work_under_the_filters() {
    let top = Path::new(env!("CARGO_MANIFEST_DIR"));
    let programs = compile(&load(None).expect("the defaults load").seccomp).expect("and compile");
    let dir = tempfile::tempdir().expect("a temporary directory can be made");
    let mut argv = vec![top.join("tests/harness/confine.py")];
    for (at, program) in programs.first.iter().chain(&programs.second).enumerate() {
        let file = dir.path().join(format!("{at}.bpf"));
        fs::write(&file, program.bytes()).expect("and written to");
        argv.push(file);
    }
    let python = env::var("HARNESS_PYTHON").unwrap_or_else(|_| "/usr/bin/python3".to_owned());
    let status = Command::new(&python)
        .args(argv)
        .arg("--")
        .arg(&python)
        .arg(top.join("tests/harness/test_harness.py"))
        .status()
        .expect("python is installed where the harness is tested");
    assert!(status.success(), "{status}");
}
