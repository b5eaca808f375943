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
    let checkout = Path::new(".");
    for file in watched(checkout) {
        println!("cargo:rerun-if-changed={}", file.display());
    }
    println!("cargo:rustc-env=CAISSON_REVISION={}", revision(checkout));

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
pub(crate) fn revision(checkout: &Path) -> String {
    git(checkout, &["rev-parse", "--short=12", "HEAD"]).unwrap_or_else(|| "unknown".to_owned())
}

/// The files that change when `revision` does, none outside a checkout. All of them are there: cargo takes a path
/// that is not for one that changes each time.
pub(crate) fn watched(checkout: &Path) -> Vec<PathBuf> {
    // In a worktree .git is a file, and some of these lie in the folder of the worktree, others in the repository's.
    let path = |name: &str| Some(checkout.join(git(checkout, &["rev-parse", "--git-path", name])?));
    // A commit leaves HEAD as it is and changes the branch; it also appends to the log of HEAD, unless logs are off.
    let known = ["HEAD", "logs/HEAD", "packed-refs", "reftable/tables.list"];
    let mut found: Vec<PathBuf> = known.into_iter().filter_map(path).filter(|file| file.exists()).collect();
    let branch = git(checkout, &["symbolic-ref", "-q", "HEAD"]).and_then(|branch| path(&branch));
    match branch {
        Some(file) if file.exists() => found.push(file),
        // Packed: its next commit makes the file. Without a log the folder is what tells of that.
        Some(file) if !found.iter().any(|known| known.ends_with("logs/HEAD")) => {
            found.extend(file.ancestors().find(|folder| folder.is_dir()).map(Path::to_owned));
        }
        _ => {}
    }
    found
}

/// What git says to that, in one line.
fn git(checkout: &Path, words: &[&str]) -> Option<String> {
    let output = Command::new("git").arg("-C").arg(checkout).args(words).output().ok()?;
    output.status.success().then(|| String::from_utf8_lossy(&output.stdout).trim().to_owned())
}
