//! An operator's own policies: what is malformed is refused at the start, with file, line and reason.

use std::fs;
use std::net::TcpListener;
use std::path::Path;
use std::process::{Command, Output};

use caisson::cli::exit;

use crate::support::CAISSON;

/// Starts `caisson serve` with these policies, on a port that is taken: with good policies it comes that far.
fn serve(policies: &Path) -> Output {
    let taken = TcpListener::bind("127.0.0.1:0").expect("a loopback port");
    let dir = tempfile::tempdir().expect("a temporary directory");
    let config = dir.path().join("caisson.toml");
    fs::write(&config, format!("policies_dir = {policies:?}\n")).expect("a file of our own");
    Command::new(CAISSON)
        .args(["serve", "--listen", &taken.local_addr().expect("it is bound").to_string()])
        .arg("--config")
        .arg(config)
        .arg("--data-dir")
        .arg(dir.path().join("data"))
        .env_clear()
        .output()
        .expect("the binary starts")
}

#[test]
fn a_malformed_policy_ends_the_start_with_file_line_and_reason() {
    let dir = tempfile::tempdir().expect("a temporary directory");
    let policies = Path::new(env!("CARGO_MANIFEST_DIR")).join("policies");
    let original = |name: &str| fs::read_to_string(policies.join(name)).expect("ours");
    let rows = [
        ("landlock.toml", "\n\n[[rule]]\npath = \"/usr\"\naccess = \"read\"\n".to_owned(), "line 3", "why"),
        (
            "limits.toml",
            original("limits.toml").replacen("value = 128", "value = 0", 1),
            "line 6",
            "does not work below",
        ),
        (
            "accounts.toml",
            original("accounts.toml").replacen("uid = 1000", "uid = 0", 1),
            "line 6",
            "no guest is root",
        ),
        (
            "seccomp.toml",
            original("seccomp.toml").replacen("\"getpid\"", "\"getpidd\"", 1),
            "line ",
            "getpidd",
        ),
    ];
    for (name, text, line, reason) in rows {
        let file = dir.path().join(name);
        fs::write(&file, text).expect("a file of our own");
        let refused = serve(dir.path());
        let message = String::from_utf8_lossy(&refused.stderr).into_owned();
        assert_eq!(refused.status.code(), Some(exit::USAGE.into()), "{message}");
        for part in [file.to_str().expect("our own path"), line, reason] {
            assert!(message.contains(part), "no {part:?} in: {message}");
        }
        assert_eq!(message.lines().count(), 1, "said once: {message}");
        // Control: the file as we ship it gets past this, to the port that is taken.
        fs::write(&file, original(name)).expect("a file of our own");
        let went_on = serve(dir.path());
        let message = String::from_utf8_lossy(&went_on.stderr);
        assert_eq!(went_on.status.code(), Some(exit::BIND.into()), "{message}");
    }
}
