//! Console scripts of a Python environment, as `scripts/relocate_scripts.py` leaves them, start its interpreter wherever
//! the environment lies: set-up makes it in one place, sandboxes see it in another.

use std::fs;
use std::os::unix::fs::{PermissionsExt, symlink};
use std::path::{Path, PathBuf};
use std::process::Command;

/// A folder that goes with the test.
struct Scratch(PathBuf);

impl Scratch {
    fn new(name: &str) -> Scratch {
        let path = std::env::temp_dir().join(format!("caisson-scripts-{name}-{}", std::process::id()));
        fs::create_dir(&path).expect("a folder of our own");
        Scratch(path)
    }
}

impl Drop for Scratch {
    fn drop(&mut self) {
        let _ = fs::remove_dir_all(&self.0);
    }
}

const BODY: &str = "# -*- coding: utf-8 -*-\nimport sys\nprint(sys.prefix, *sys.argv[1:])\n";

/// An environment without packages, with scripts as pip writes them there.
fn environment(at: &Path) {
    fs::create_dir_all(at.join("bin")).expect("a folder");
    let python =
        ["/usr/bin/python3", "/usr/local/bin/python3"].map(Path::new).into_iter().find(|it| it.exists());
    symlink(python.expect("a python3 of the system"), at.join("bin/python3")).expect("a link");
    fs::write(at.join("pyvenv.cfg"), "home = /usr/bin\n").expect("a file");
    let python = at.join("bin/python3.11");
    script(at, "plain", &format!("#!{}\n{BODY}", python.display()));
    script(at, "with-option", &format!("#!{} -sP\n{BODY}", python.display()));
    // What pip writes where the path is longer than the kernel takes, or has a space in it.
    script(at, "long", &format!("#!/bin/sh\n'''exec' \"{}\" \"$0\" \"$@\"\n' '''\n{BODY}", python.display()));
    script(at, "shell", "#!/bin/sh\necho of the shell\n");
    script(at, "bytes", "\u{7f}ELF\n#!/usr/bin/python3\n");
}

fn script(environment: &Path, name: &str, text: &str) {
    let path = environment.join("bin").join(name);
    fs::write(&path, text).expect("a script");
    fs::set_permissions(path, fs::Permissions::from_mode(0o755)).expect("a mode");
}

fn relocate(environment: &Path) {
    let program = Path::new(env!("CARGO_MANIFEST_DIR")).join("scripts/relocate_scripts.py");
    let status = Command::new("python3").arg(program).arg(environment).status();
    assert!(status.expect("python3 runs").success());
}

fn texts(environment: &Path) -> Vec<(PathBuf, Vec<u8>, u32)> {
    let files =
        fs::read_dir(environment.join("bin")).expect("a folder").map(|entry| entry.expect("an entry").path());
    let files = files.filter(|path| !path.is_symlink());
    let mode = |path: &Path| fs::metadata(path).expect("a file").permissions().mode();
    let mut all: Vec<_> =
        files.map(|path| (path.clone(), fs::read(&path).expect("a file"), mode(&path))).collect();
    all.sort();
    all
}

fn said(program: &Path, word: &str) -> String {
    let output = Command::new(program).arg(word).env_clear().output();
    let output = output.unwrap_or_else(|error| panic!("{}: {error}", program.display()));
    assert!(output.status.success(), "{}: {output:?}", program.display());
    String::from_utf8(output.stdout).expect("text").trim().to_owned()
}

#[test]
fn scripts_start_the_environment_that_they_lie_in() {
    let scratch = Scratch::new("moved");
    // A path that no first line could hold.
    let (made, shown) = (scratch.0.join("made here ".repeat(20)), scratch.0.join("shown there"));
    environment(&made);
    // Control: once the environment is seen elsewhere, what pip wrote starts nothing.
    fs::rename(&made, &shown).expect("a move");
    assert!(Command::new(shown.join("bin/plain")).output().is_err());
    assert!(!Command::new(shown.join("bin/long")).output().expect("sh runs").status.success());
    relocate(&shown);
    let expected = format!("{} a word", shown.display());
    for name in ["plain", "with-option", "long"] {
        assert_eq!(said(&shown.join("bin").join(name), "a word"), expected, "{name}");
    }
    symlink(shown.join("bin/plain"), scratch.0.join("linked")).expect("a link");
    assert_eq!(said(&scratch.0.join("linked"), "a word"), expected);
    fs::rename(&shown, &made).expect("a move");
    assert_eq!(said(&made.join("bin/plain"), "a word"), format!("{} a word", made.display()));
}

#[test]
fn a_second_time_and_other_programs_change_nothing() {
    let scratch = Scratch::new("again");
    environment(&scratch.0);
    let before = texts(&scratch.0);
    relocate(&scratch.0);
    let once = texts(&scratch.0);
    relocate(&scratch.0);
    assert_eq!(texts(&scratch.0), once);
    for (old, new) in before.iter().zip(&once) {
        let name = old.0.file_name().and_then(|name| name.to_str()).expect("a name");
        assert_eq!(old.1 != new.1, ["plain", "with-option", "long"].contains(&name), "{name}");
        assert_eq!(old.2, new.2, "{name}");
    }
}
