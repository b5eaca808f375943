//! From the resolved configuration to what the launcher is told: which interpreters, which folders.
#![forbid(unsafe_code)]

use std::collections::HashSet;
use std::fs::File;
use std::io::Read;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

use crate::config::Config;
use crate::launcher::cgroup::CgroupLimits;
use crate::launcher::settings::{Settings, Throwaway};
use crate::launcher::spaces::SpaceLimits;

/// Ready shells for each active space and owner.
const SHELLS_READY: usize = 2;
/// Forks after which a zygote is replaced: hygiene against leaks and drift, not a defence.
const ZYGOTE_FORKS_MAX: u64 = 20_000;

/// Makes an interpreter print the path of its own program.
const PYTHON_QUESTION: [&str; 2] = ["-c", "import sys; print(sys.executable)"];
const NODE_QUESTION: [&str; 2] = ["-p", "process.execPath"];
/// Minor versions of Python 3 that are looked for, and how many beside the default one may become kernels.
const MINORS: std::ops::Range<u32> = 8..30;
const MORE_PYTHONS_MAX: usize = 4;
/// How long a shim may take to answer.
const SHIM_MAX: Duration = Duration::from_secs(10);

/// The launcher's settings. `search` is the `PATH` that interpreters are looked for on.
pub fn settings(config: &Config, search: &str) -> Settings {
    let limits = &config.limits;
    // It stands first on the path, and may be the version that is asked for.
    let python = config.python_name();
    let python_env = Some(config.python_env.clone()).filter(|env| env.join("bin").join(&python).exists());
    let caches = config.python_env.parent().map(|parent| parent.join("python-caches"));
    let python_binary = match python_env {
        Some(_) => None,
        None => interpreter(search, &python, PYTHON_QUESTION),
    };
    let default = python_env.as_ref().map(|env| env.join("bin/python3")).or_else(|| python_binary.clone());
    Settings {
        more_pythons: more_pythons(search, default.as_deref()),
        uid: nix::unistd::getuid().as_raw(),
        gid: nix::unistd::getgid().as_raw(),
        state_dir: config.data_dir.join("launcher"),
        spaces_under: config.uploads_dir.clone(),
        views: None,
        python_env,
        python_caches: caches,
        toolchains: config.python_env.parent().map(|parent| parent.join("toolchains")),
        python_binary,
        node_binary: interpreter(search, &config.node_name(), NODE_QUESTION),
        policies_dir: config.policies_dir.clone(),
        posture_floor: config.require_isolation,
        cgroup: CgroupLimits {
            memory_bytes: limits.memory_bytes,
            pids: limits.pids.into(),
            cpu_millicores: (limits.cpu_cores * 1000.0) as u64,
        },
        throwaway: Throwaway {
            memory_bytes: config.librechat.subprocess_memory_mib_max.map(|mib| mib * 1024 * 1024),
            cpu_secs: config.librechat.subprocess_cpu_secs_max,
        },
        space: SpaceLimits { bytes: limits.space_bytes, inodes: limits.space_inodes },
        spaces_max: limits.spaces_max,
        shm: SpaceLimits { bytes: limits.shm_bytes, inodes: limits.shm_inodes },
        nofile: limits.nofile.into(),
        shells_ready: SHELLS_READY,
        zygote_forks_max: ZYGOTE_FORKS_MAX,
        zygotes_off: config.strict,
        tenants: tenants(config),
        no_namespaces: None,
        measure_forks: None,
    }
}

/// How many tenants there are to be, as far as it is known: the signer of tokens names as many as it likes.
fn tenants(config: &Config) -> usize {
    let keyed = config.api_keys.iter().map(|key| &key.tenant).collect::<HashSet<_>>().len();
    keyed.max(if config.has_several_tenants() { 2 } else { 1 })
}

/// Every other `python3.N` on the search path, the newest first. An environment's is not the one its link leads to.
fn more_pythons(search: &str, default: Option<&Path>) -> Vec<PathBuf> {
    let mut found: Vec<PathBuf> = Vec::new();
    for minor in MINORS.rev() {
        for path in on_path(search, &format!("python3.{minor}")) {
            let path = if is_script(&path) { ask(&path, PYTHON_QUESTION, SHIM_MAX) } else { Some(path) };
            let Some(path) = path else { continue };
            let is_known = |known: &Path| known.parent() == path.parent();
            if !default.is_some_and(is_known) && !found.iter().any(|known| is_known(known)) {
                found.push(path);
            }
        }
    }
    found.truncate(MORE_PYTHONS_MAX);
    found
}

/// The first interpreter of this name on the search path, itself and not a shim: what a version manager puts there is a
/// script, which starts nothing in a sandbox. A script is asked, by `question`, for what it stands for.
fn interpreter(search: &str, name: &str, question: [&str; 2]) -> Option<PathBuf> {
    on_path(search, name)
        .find_map(|path| if is_script(&path) { ask(&path, question, SHIM_MAX) } else { Some(path) })
}

/// The files of this name on the search path that can be executed.
fn on_path<'a>(search: &'a str, name: &'a str) -> impl Iterator<Item = PathBuf> + 'a {
    let places =
        search.split(':').filter(|dir| dir.starts_with('/')).map(move |dir| Path::new(dir).join(name));
    places.filter(|path| rustix::fs::access(path, rustix::fs::Access::EXEC_OK).is_ok() && path.is_file())
}

fn is_script(path: &Path) -> bool {
    let mut start = [0_u8; 2];
    File::open(path).and_then(|mut file| file.read_exact(&mut start)).is_ok() && &start == b"#!"
}

/// Runs `path` with the question as arguments; its answer is the path of a program.
fn ask(path: &Path, question: [&str; 2], max: Duration) -> Option<PathBuf> {
    let mut child = Command::new(path)
        .args(question)
        .stdin(Stdio::null())
        .stdout(Stdio::piped())
        .stderr(Stdio::null())
        .spawn()
        .ok()?;
    let deadline = Instant::now() + max;
    let ended = loop {
        match child.try_wait().ok()? {
            Some(status) => break status.success(),
            None if Instant::now() >= deadline => break false,
            None => std::thread::sleep(Duration::from_millis(5)),
        }
    };
    // It has ended already, or takes too long.
    let _ = child.kill();
    let _ = child.wait();
    let mut answer = String::new();
    child.stdout.take()?.take(4096).read_to_string(&mut answer).ok().filter(|_| ended)?;
    let found = PathBuf::from(answer.trim());
    (found.is_absolute() && found.is_file() && !is_script(&found)).then_some(found)
}

#[cfg(test)]
mod tests {
    use std::fs::{self, Permissions};
    use std::os::unix::fs::PermissionsExt;

    use super::*;

    fn script(dir: &Path, name: &str, text: &str) {
        let path = dir.join(name);
        fs::write(&path, text).expect("a file");
        fs::set_permissions(&path, Permissions::from_mode(0o755)).expect("a mode");
    }

    #[test]
    fn a_shim_is_asked_for_what_it_stands_for_and_a_broken_one_passed_over() {
        let (broken, shims, real) =
            (tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap());
        let target = real.path().join("python3.77");
        fs::copy("/bin/true", &target).expect("a program");
        script(broken.path(), "python3.77", "#!/bin/sh\nexit 127\n");
        script(shims.path(), "python3.77", &format!("#!/bin/sh\necho {}\n", target.display()));
        let search =
            |dirs: &[&Path]| dirs.iter().map(|dir| dir.display().to_string()).collect::<Vec<_>>().join(":");
        let question = ["-c", "print(1)"];
        let found = interpreter(&search(&[broken.path(), shims.path()]), "python3.77", question);
        assert_eq!(found.as_deref(), Some(&*target));
        // A real one is taken as it is, without being run.
        assert_eq!(interpreter(&search(&[real.path(), shims.path()]), "python3.77", question), Some(target));
        assert_eq!(interpreter(&search(&[broken.path()]), "python3.77", question), None);
        // Neither a shim that leads to a script nor one that hangs is an interpreter.
        script(
            broken.path(),
            "python3.78",
            &format!("#!/bin/sh\necho {}/python3.77\n", broken.path().display()),
        );
        assert_eq!(interpreter(&search(&[broken.path()]), "python3.78", question), None);
        script(broken.path(), "python3.79", "#!/bin/sh\nexec sleep 60\n");
        assert_eq!(ask(&broken.path().join("python3.79"), question, Duration::from_millis(50)), None);
    }
}
