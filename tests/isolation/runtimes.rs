//! Interpreters that are not the product's own: shown where they are, and nothing beside them.

use std::fs::{self, Permissions};
use std::os::unix::fs::PermissionsExt;
use std::path::Path;
use std::process::Command;

use crate::support::stand::{fresh_dir, fresh_space};
use crate::support::{Stand, skip, strict};

/// A Python of its own below `home`, as version managers install it: the system's, copied.
fn install(home: &Path) -> Result<(), String> {
    let version = Command::new("/usr/bin/python3")
        .args([
            "-c",
            "import sys, sysconfig; print('%d.%d' % sys.version_info[:2], sysconfig.get_path('stdlib'))",
        ])
        .output()
        .map_err(|error| format!("needs /usr/bin/python3: {error}"))?;
    let text = String::from_utf8_lossy(&version.stdout).into_owned();
    let (version, library) = text.trim().split_once(' ').ok_or("needs a /usr/bin/python3 that answers")?;
    fs::create_dir_all(home.join("bin")).expect("our own");
    fs::create_dir_all(home.join("lib")).expect("our own");
    let copied =
        Command::new("cp").arg("-rL").arg(library).arg(home.join("lib")).status().expect("cp starts");
    let binary = home.join(format!("bin/python{version}"));
    let named = fs::copy("/usr/bin/python3", &binary).is_ok();
    fs::copy(&binary, home.join("bin/python3.0")).expect("our own");
    if copied.success() && named { Ok(()) } else { Err("the system's Python cannot be copied".to_owned()) }
}

#[test]
fn an_interpreter_in_somebodys_home_works_and_nothing_beside_it_is_seen() {
    // Not below /tmp, where a sandbox has its own.
    let home = tempfile::Builder::new().prefix("caisson-home-").tempdir_in("/var/tmp").expect("a directory");
    fs::set_permissions(home.path(), Permissions::from_mode(0o700)).expect("our own");
    if let Err(reason) = install(home.path()) {
        return skip(&reason);
    }
    fs::write(home.path().join("secret"), "42").expect("our own");
    fs::create_dir(home.path().join("documents")).expect("our own");
    let binary = home.path().join("bin/python3.0");
    let started = Stand::start(|settings| {
        settings.python_env = None;
        settings.python_binary = Some(binary.clone());
        settings.zygotes_off = true;
    });
    let stand = match started {
        Ok(stand) => stand,
        Err(reason) => return skip(&reason),
    };
    let mut guest = stand.guest(strict(fresh_space()));
    let seen = guest.ask(&format!(
        "import json, os, sys\n\
         def attempt(path):\n\
         \x20   try: return open(path).read()\n\
         \x20   except OSError as error: return error.strerror\n\
         home = {home:?}\n\
         print(json.dumps([sys.prefix == home, sorted(os.listdir(home)), attempt(home + '/secret'), attempt(home + '/new')]))",
        home = home.path(),
    ));
    let nothing = "No such file or directory";
    assert_eq!(seen, serde_json::json!([true, ["bin", "lib"], nothing, nothing]));
    // Control: the secret is there, for root.
    assert_eq!(fs::read_to_string(home.path().join("secret")).expect("our own"), "42");
}

#[test]
fn an_interpreter_where_sandboxes_have_their_own_is_shown_elsewhere() {
    let dir = fresh_dir();
    let installed = install(&dir);
    let outcome = installed.and_then(|()| {
        let stand = Stand::start(|settings| {
            settings.python_env = None;
            settings.python_binary = Some(dir.join("bin/python3.0"));
            settings.zygotes_off = true;
        })?;
        let mut guest = stand.guest(strict(fresh_space()));
        assert_eq!(guest.say("import sys; print(sys.prefix)"), "/opt/python");
        Ok(())
    });
    let _ = fs::remove_dir_all(&dir);
    if let Err(reason) = outcome {
        skip(&reason);
    }
}
