//! Interpreters that are not the product's own: shown where they are, and nothing beside them.

use std::fs::{self, Permissions};
use std::os::unix::fs::PermissionsExt;
use std::path::Path;
use std::process::Command;
use std::sync::Arc;
use std::time::Duration;

use caisson::launcher::plan::{LaunchPlan, Profile, SandboxId};

use crate::support::stand::{fresh_dir, fresh_space};
use crate::support::{Stand, common_stand, plan, scaled, skip, strict};

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

/// An environment of the system's Python that believes to have an ipykernel.
fn environment(dir: &Path) -> std::path::PathBuf {
    let made = Command::new("/usr/bin/python3").args(["-m", "venv", "--without-pip"]).arg(dir).status();
    assert!(made.is_ok_and(|status| status.success()), "the system's Python makes environments");
    let packages = fs::read_dir(dir.join("lib")).expect("our own").flatten().next().expect("one version");
    let packages = packages.path().join("site-packages");
    for name in ["ipykernel", "IPython"] {
        fs::create_dir(packages.join(name)).expect("our own");
        fs::write(packages.join(name).join("__init__.py"), "").expect("our own");
    }
    let facts = packages.join("ipykernel-77.7.dist-info");
    fs::create_dir(&facts).expect("our own");
    fs::write(facts.join("METADATA"), "Metadata-Version: 2.1\nName: ipykernel\nVersion: 77.7\n")
        .expect("our own");
    dir.join("bin/python3")
}

#[test]
fn another_python_with_an_ipykernel_is_a_kernel_of_its_own_and_one_without_is_none() {
    let dir = fresh_dir();
    let python = environment(&dir.join("env"));
    let outcome = (|| -> Result<(), String> {
        let stand = Stand::start(|settings| {
            // The system's has none, as a rule; with one it would bear the same name, and the first counts.
            settings.more_pythons =
                vec![python.clone(), "/usr/bin/python3".into(), "/nowhere/python3.99".into()];
            settings.zygotes_off = true;
        })?;
        let kernels = &stand.hello.kernels;
        let (default, other) = match &kernels[..] {
            [default, other] => (default, other),
            other => panic!("{other:?}"),
        };
        assert_eq!((default.0.as_str(), other.1.ipykernel.as_deref()), ("python3", Some("77.7")));
        assert!(other.0.starts_with("python3."), "{}", other.0);
        let plan = LaunchPlan { profile: Profile::Kernel, interpreter: 1, ..strict(fresh_space()) };
        let mut guest = stand.guest(plan);
        assert_eq!(guest.say("import sys; print(sys.prefix)"), "/opt/pythons/0");
        Ok(())
    })();
    let _ = fs::remove_dir_all(&dir);
    if let Err(reason) = outcome {
        skip(&reason);
    }
}

#[test]
fn an_interrupt_is_an_exception_of_the_guest_and_of_no_neighbour() {
    let stand = common_stand!();
    let space = fresh_space();
    let (mut guest, mut neighbour) = (stand.guest(plan(space)), stand.guest(plan(space)));
    let listen = "import signal; signal.signal(signal.SIGINT, signal.default_int_handler); print(1)";
    assert_eq!((guest.say(listen), neighbour.say(listen)), ("1".to_owned(), "1".to_owned()));
    let soon = std::thread::spawn({
        let (stand, sandbox) = (Arc::clone(&stand), guest.sandbox);
        move || {
            std::thread::sleep(scaled(Duration::from_millis(500)));
            stand.interrupt(sandbox)
        }
    });
    let caught = guest.say(
        "import subprocess, time\n\
         child = subprocess.Popen(['sleep', '60'])\n\
         try:\n    time.sleep(20)\n    print('slept')\n\
         except KeyboardInterrupt:\n    print('interrupted', child.wait(5))",
    );
    assert_eq!(caught, "interrupted -2", "and what it started in its group hears it too");
    assert!(soon.join().expect("no panic"), "the launcher says so");
    assert_eq!(neighbour.say("print('undisturbed')"), "undisturbed");
    // A sandbox that is not there is nobody's.
    assert!(stand.interrupt(SandboxId(u64::MAX)));
}
