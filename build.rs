//! Builds the two programs that caisson carries inside itself: the init of a sandbox and the library that a
//! zygote loads. Both are small, use no crate and come from files of `src/`, so that the confinement
//! checklist exists once.

use std::env;
use std::path::{Path, PathBuf};
use std::process::Command;

fn main() {
    for file in ["child.rs", "entry.rs", "init.rs", "wire.rs"] {
        println!("cargo:rerun-if-changed=src/launcher/{file}");
    }
    for file in ["raw.rs", "freestanding.rs"] {
        println!("cargo:rerun-if-changed=src/sys/{file}");
    }
    println!("cargo:rerun-if-changed=build.rs");
    // In a worktree .git is a file, and a path that is not there counts as changed each time.
    if Path::new(".git/HEAD").exists() {
        println!("cargo:rerun-if-changed=.git/HEAD");
    }
    println!("cargo:rustc-env=CAISSON_REVISION={}", revision());

    let init = [
        "--crate-type=bin",
        "-Crelocation-model=static",
        "-Clink-args=-nostdlib -static -nostartfiles -Wl,--build-id=none",
    ];
    compile("src/launcher/init.rs", "caisson-init", &init);
    let library = ["--crate-type=cdylib", "-Clink-args=-nostdlib", "--check-cfg=cfg(bare)"];
    compile("src/launcher/entry.rs", "libcaisson.so", &library);
    // With forks that are not confined: only `bench-fork` lays it into a template.
    compile("src/launcher/entry.rs", "libcaisson-bare.so", &[&library[..], &["--cfg=bare"]].concat());
}

fn compile(source: &str, name: &str, kind: &[&str]) {
    let out = PathBuf::from(env::var_os("OUT_DIR").expect("cargo sets OUT_DIR")).join(name);
    let root = env::var_os("CARGO_MANIFEST_DIR").expect("cargo sets CARGO_MANIFEST_DIR");
    let target = env::var("TARGET").expect("cargo sets TARGET");
    let rustc = env::var_os("RUSTC").expect("cargo sets RUSTC");
    let mut command = Command::new(rustc);
    command.arg(Path::new(&root).join(source)).arg("-o").arg(&out).args(["--target", &target]);
    command.args([
        "--edition=2024",
        "-Copt-level=2",
        "-Cpanic=abort",
        "-Cstrip=symbols",
        "-Coverflow-checks=off",
    ]);
    command.args(kind);
    let status = command.status().expect("rustc runs");
    assert!(status.success(), "failed to compile {source}");
}

/// The commit this was built from, `unknown` outside a checkout.
fn revision() -> String {
    let output = Command::new("git").args(["rev-parse", "--short=12", "HEAD"]).output();
    match output {
        Ok(output) if output.status.success() => String::from_utf8_lossy(&output.stdout).trim().to_owned(),
        _ => "unknown".to_owned(),
    }
}
