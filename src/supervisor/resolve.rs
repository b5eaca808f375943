//! From the resolved configuration to what the launcher is told: which interpreters, which folders.
#![forbid(unsafe_code)]

use std::collections::HashSet;
use std::path::{Path, PathBuf};

use crate::config::Config;
use crate::launcher::cgroup::CgroupLimits;
use crate::launcher::settings::Settings;
use crate::launcher::spaces::SpaceLimits;

/// Ready shells for each active space and owner.
const SHELLS_READY: usize = 2;
/// Forks after which a zygote is replaced: hygiene against leaks and drift, not a defence.
const ZYGOTE_FORKS_MAX: u64 = 20_000;

/// The launcher's settings. `search` is the `PATH` that interpreters are looked for on.
pub fn settings(config: &Config, search: &str) -> Settings {
    let limits = &config.limits;
    let python_env = Some(config.python_env.clone()).filter(|env| env.join("bin/python3").exists());
    let caches = config.python_env.parent().map(|parent| parent.join("python-caches"));
    let python_binary = match &config.python_version {
        Some(version) => on_path(search, &format!("python{version}")),
        None if python_env.is_none() => on_path(search, "python3"),
        None => None,
    };
    let node = config.node_version.as_ref().map_or("node".to_owned(), |version| format!("node{version}"));
    Settings {
        uid: nix::unistd::getuid().as_raw(),
        gid: nix::unistd::getgid().as_raw(),
        state_dir: config.data_dir.join("launcher"),
        python_env: python_env.filter(|_| config.python_version.is_none()),
        python_caches: caches,
        python_binary,
        node_binary: on_path(search, &node),
        policies_dir: config.policies_dir.clone(),
        posture_floor: config.require_isolation,
        cgroup: CgroupLimits {
            memory_bytes: limits.memory_bytes,
            pids: limits.pids.into(),
            cpu_millicores: (limits.cpu_cores * 1000.0) as u64,
        },
        space: SpaceLimits { bytes: limits.space_bytes, inodes: limits.space_inodes },
        spaces_max: limits.spaces_max,
        shm: SpaceLimits { bytes: limits.shm_bytes, inodes: limits.shm_inodes },
        nofile: limits.nofile.into(),
        shells_ready: SHELLS_READY,
        zygote_forks_max: ZYGOTE_FORKS_MAX,
        zygotes_off: config.strict,
        tenants: config.api_keys.iter().map(|key| &key.tenant).collect::<HashSet<_>>().len().max(1),
        no_namespaces: None,
        measure_forks: None,
    }
}

/// The first file of this name on the search path that can be executed.
fn on_path(search: &str, name: &str) -> Option<PathBuf> {
    search.split(':').filter(|dir| dir.starts_with('/')).map(|dir| Path::new(dir).join(name)).find(|path| {
        let executable = rustix::fs::access(path, rustix::fs::Access::EXEC_OK).is_ok();
        executable && path.is_file()
    })
}
