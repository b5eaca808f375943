//! Which layers this host can enforce, measured once at start by doing.
#![forbid(unsafe_code)]

use serde::{Deserialize, Serialize};

/// What the host can enforce, from most to least (`docs/security.md` has the table).
#[derive(Copy, Clone, Debug, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Posture {
    /// Less than any other promises. Never served at.
    None,
    /// Landlock, seccomp and rlimits under the daemon's own uid. One tenant only.
    Process,
    /// Root without namespaces: a uid per space, Landlock, seccomp, rlimits.
    Uid,
    /// An ordinary account with user namespaces.
    Userns,
    /// Root without user namespaces or without Landlock.
    Root,
    /// Every layer.
    Full,
}

impl Posture {
    pub fn name(self) -> &'static str {
        match self {
            Posture::None => "none",
            Posture::Process => "process",
            Posture::Uid => "uid",
            Posture::Userns => "userns",
            Posture::Root => "root",
            Posture::Full => "full",
        }
    }

    /// Sandboxes are processes of the host: none has a root of its own.
    pub fn is_bare(self) -> bool {
        matches!(self, Posture::Process | Posture::Uid)
    }

    /// From the words of `--require-isolation`; nobody can ask for less than the least.
    pub fn parse(name: &str) -> Option<Posture> {
        [Posture::Process, Posture::Uid, Posture::Userns, Posture::Root, Posture::Full]
            .into_iter()
            .find(|posture| posture.name() == name)
    }
}

/// How the sandboxes of this host are made: the first of these that a throw-away one could be made of.
#[derive(Copy, Clone, Debug, PartialEq, Eq, Hash)]
pub enum Shape {
    /// Every namespace, with a user namespace of its own that owns the others.
    UserNamespace,
    /// Every namespace but the user one: made with the launcher's capabilities over the host.
    Namespaces,
    /// None: a process of the host, kept apart by identity, Landlock and seccomp.
    Bare,
}

/// One row of the posture table.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct LayerReport {
    /// The layer's name, such as `user namespace` or `cgroup memory`.
    pub layer: String,
    pub enforced: bool,
    /// What is in force, such as `ABI 7` or `v1`; or what is lost without it.
    pub detail: String,
    /// The call that failed and its errno, such as `unshare(CLONE_NEWUSER): EPERM`.
    pub failed: Option<String>,
    /// What the operator can grant to get it.
    pub grant: Option<String>,
}

/// What the host enforces, as measured.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct PostureReport {
    pub posture: Posture,
    pub layers: Vec<LayerReport>,
    /// True when the launcher may switch users ("root" in our messages).
    pub root: bool,
    /// Uid the supervisor was started with.
    pub uid: u32,
}

/// An interpreter the launcher found.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct RuntimeReport {
    /// Binary as seen inside the sandbox.
    pub binary: String,
    /// Such as `3.11.2` or `v20.20.2`.
    pub version: String,
    /// Where the binary is on the host, for `/v1/capabilities`.
    pub host_binary: String,
    /// Version of the ipykernel that it can import, if it can; only of a Python.
    pub ipykernel: Option<String>,
}

/// The launcher's first packet.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Hello {
    pub posture: PostureReport,
    pub python: Option<RuntimeReport>,
    pub node: Option<RuntimeReport>,
    /// Pythons that can serve as kernels, by name; the default one, `python3`, first.
    pub kernels: Vec<(String, RuntimeReport)>,
    /// The folder of toolchains, as a guest sees it; absent when set-up made none.
    #[serde(default)]
    pub toolchains: Option<String>,
    /// Names of the sandbox's accounts in the order of [`crate::launcher::plan::Account`].
    pub accounts: Vec<String>,
    /// Profiles that have a zygote serving; the others are exec'd.
    pub warm: Vec<crate::launcher::plan::Profile>,
    /// What an operator should know, such as a preload list that had to be cut.
    pub warnings: Vec<String>,
    /// The highest number of a space that an earlier launcher has left; 0 where there is none.
    pub spaces_to: crate::launcher::plan::SpaceId,
}
