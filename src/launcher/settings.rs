//! What the launcher is told at its start, by the supervisor and never by the daemon.
#![forbid(unsafe_code)]

use std::path::PathBuf;

use serde::{Deserialize, Serialize};

use crate::launcher::cgroup::CgroupLimits;
use crate::launcher::posture::Posture;
use crate::launcher::spaces::SpaceLimits;

/// All of it; travels as JSON in a sealed memfd.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct Settings {
    /// Uid and gid that the supervisor was started with.
    pub uid: u32,
    pub gid: u32,
    /// The launcher's own folder: root, 0700.
    pub state_dir: PathBuf,
    /// An operator's folder that spaces lie under instead.
    pub spaces_under: Option<PathBuf>,
    /// Where the daemon gets its views of workspaces; `None` for a launcher that nobody asks for one.
    pub views: Option<ViewSettings>,
    /// The product's Python environment (a venv); absent when there is no Python.
    pub python_env: Option<PathBuf>,
    /// Caches built beforehand for the environment: `matplotlib` and `ipython` beneath.
    pub python_caches: Option<PathBuf>,
    /// Compile caches, libraries and toolchains that set-up made: `policies/languages.toml` names what lies there.
    pub toolchains: Option<PathBuf>,
    /// Another interpreter instead of the environment's, by `PYTHON_VERSION`.
    pub python_binary: Option<PathBuf>,
    /// Further Pythons that may serve as kernels: a binary, or an environment's `bin/python3`.
    pub more_pythons: Vec<PathBuf>,
    /// Node's binary on the host; absent when there is none.
    pub node_binary: Option<PathBuf>,
    /// An operator's folder that overrides the built-in policies file by file.
    pub policies_dir: Option<PathBuf>,
    /// Refuse to serve below this.
    pub posture_floor: Posture,
    pub cgroup: CgroupLimits,
    /// Beneath these, for programs that are thrown away.
    pub throwaway: Throwaway,
    pub space: SpaceLimits,
    /// Most spaces there may be on disk.
    pub spaces_max: u64,
    pub shm: SpaceLimits,
    pub nofile: u64,
    /// Ready shells kept for each active space and owner.
    pub shells_ready: usize,
    /// Forks after which a zygote is replaced.
    pub zygote_forks_max: u64,
    /// No zygotes at all: every interpreter is exec'd.
    pub zygotes_off: bool,
    /// How many tenants there are to be.
    pub tenants: usize,
    /// Why the launcher has no namespaces of its own, where it has none.
    pub no_namespaces: Option<String>,
    /// Serves nobody and measures so many rounds of forks (`bench-fork`). The zygote's library is then the build
    /// that also makes bare forks.
    pub measure_forks: Option<u32>,
}

/// What bounds a program that is thrown away, beyond every sandbox's limits.
#[derive(Copy, Clone, Debug, Default, Serialize, Deserialize)]
pub struct Throwaway {
    pub memory_bytes: Option<u64>,
    pub cpu_secs: Option<u64>,
}

/// The daemon's views of workspaces.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct ViewSettings {
    /// Where they are mounted: beneath the one folder the daemon may open files in.
    pub dir: PathBuf,
    /// The daemon's ids, which a view shows as the owner of what the guest's account owns.
    pub uid: u32,
    pub gid: u32,
}

impl Settings {
    /// Started as root: ids can be switched and leased.
    pub fn root(&self) -> bool {
        self.uid == 0
    }
}
