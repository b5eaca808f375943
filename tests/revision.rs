//! The commit that `/health` names is the one that was built: what cargo is told to watch changes with every commit,
//! and at nothing else.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::thread::sleep;
use std::time::{Duration, SystemTime};

#[expect(
    dead_code,
    clippy::print_stdout,
    reason = "of a build script, and only what it watches is asked here"
)]
#[path = "../build.rs"]
mod build;

/// A folder that goes with the test.
struct Scratch(PathBuf);

impl Scratch {
    fn new(name: &str) -> Scratch {
        let path = std::env::temp_dir().join(format!("caisson-revision-{name}-{}", std::process::id()));
        fs::create_dir(&path).expect("a folder of our own");
        Scratch(path)
    }

    /// A repository with one commit.
    fn repository(name: &str) -> Scratch {
        let scratch = Scratch::new(name);
        git(&scratch.0, &["init", "-q", "-b", "topic/one"]);
        commit(&scratch.0);
        scratch
    }
}

impl Drop for Scratch {
    fn drop(&mut self) {
        let _ = fs::remove_dir_all(&self.0);
    }
}

fn git(checkout: &Path, words: &[&str]) {
    let who = ["-c", "user.name=test", "-c", "user.email=test@example.org", "-c", "commit.gpgSign=false"];
    let mut command = Command::new("git");
    command.arg("-C").arg(checkout).args(who).args(words);
    for name in ["GIT_DIR", "GIT_WORK_TREE", "GIT_INDEX_FILE"] {
        command.env_remove(name); // what a hook has, and would lead us to its repository
    }
    assert!(command.status().expect("git runs").success(), "git {words:?}");
}

fn commit(checkout: &Path) {
    git(checkout, &["commit", "-q", "--allow-empty", "-m", "another"]);
}

/// What cargo compares: the latest time of a path, below folders too.
fn latest(path: &Path) -> SystemTime {
    let about = fs::metadata(path).unwrap_or_else(|error| panic!("{}: {error}", path.display()));
    let own = about.modified().expect("a file system with times");
    let below = about.is_dir().then(|| fs::read_dir(path).expect("a folder"));
    let below = below.into_iter().flatten().map(|entry| latest(&entry.expect("an entry").path()));
    below.chain([own]).max().expect("its own time at least")
}

/// A build, `then` something, and whether the next build asks for the revision again.
fn is_asked_again(checkout: &Path, then: impl FnOnce()) -> bool {
    let watched = build::watched(checkout);
    assert!(!watched.is_empty() && watched.iter().all(|path| path.exists()), "{watched:?}");
    let before = watched.iter().map(|path| latest(path)).max();
    sleep(Duration::from_millis(30)); // times of files are no finer than the kernel's tick
    then();
    // What is gone counts as changed.
    watched.iter().any(|path| !path.exists()) || watched.iter().map(|path| latest(path)).max() > before
}

fn commits_are_noticed(checkout: &Path) {
    assert!(!is_asked_again(checkout, || git(checkout, &["status", "--short"])));
    for _ in 0..2 {
        let before = build::revision(checkout);
        assert!(is_asked_again(checkout, || commit(checkout)));
        assert_ne!(build::revision(checkout), before);
    }
}

#[test]
fn a_commit_on_a_branch_is_noticed() {
    commits_are_noticed(&Scratch::repository("branch").0);
}

#[test]
fn a_commit_on_no_branch_is_noticed() {
    let scratch = Scratch::repository("detached");
    git(&scratch.0, &["checkout", "-q", "--detach"]);
    commits_are_noticed(&scratch.0);
}

#[test]
fn a_commit_on_a_packed_branch_is_noticed() {
    let scratch = Scratch::repository("packed");
    git(&scratch.0, &["pack-refs", "--all"]);
    commits_are_noticed(&scratch.0);
}

#[test]
fn a_commit_on_a_packed_branch_without_a_log_is_noticed() {
    let scratch = Scratch::repository("no-log");
    git(&scratch.0, &["config", "core.logAllRefUpdates", "false"]);
    fs::remove_dir_all(scratch.0.join(".git/logs")).expect("there were logs");
    git(&scratch.0, &["pack-refs", "--all"]);
    commits_are_noticed(&scratch.0);
}

#[test]
fn a_commit_in_a_worktree_is_noticed_and_one_of_another_is_not() {
    let scratch = Scratch::repository("worktrees");
    let worktree = scratch.0.join("second");
    git(&scratch.0, &["worktree", "add", "-q", "-b", "topic/two", "second"]);
    commits_are_noticed(&worktree);
    assert!(!is_asked_again(&worktree, || commit(&scratch.0)));
}

#[test]
fn another_branch_is_noticed() {
    let scratch = Scratch::repository("switch");
    git(&scratch.0, &["branch", "topic/other"]);
    assert!(is_asked_again(&scratch.0, || git(&scratch.0, &["switch", "-q", "topic/other"])));
}

#[test]
fn outside_a_checkout_nothing_is_watched() {
    let scratch = Scratch::new("none");
    assert_eq!(build::watched(&scratch.0), Vec::<PathBuf>::new());
    assert_eq!(build::revision(&scratch.0), "unknown");
}
