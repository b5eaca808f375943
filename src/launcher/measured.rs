//! From what could be made on this host to the posture table: which layers are enforced, what failed, what to grant.
#![forbid(unsafe_code)]

use crate::launcher::cgroup::Found;
use crate::launcher::posture::{LayerReport, Posture, PostureReport, Shape};
use crate::launcher::settings::Settings;
use crate::launcher::shell::StepError;

/// What could not be had, in the words of the call that failed.
#[derive(Clone, Debug, Default)]
pub struct Missed {
    /// A user namespace for each sandbox.
    pub user_namespace: Option<String>,
    /// The other namespaces.
    pub namespaces: Option<String>,
    /// An image for each space.
    pub images: Option<String>,
    /// Sandboxes without namespaces.
    pub bare: Option<String>,
}

impl Missed {
    /// Sandboxes of this shape cannot be made.
    pub fn note(&mut self, shape: Shape, error: &StepError) {
        let slot = match shape {
            Shape::UserNamespace => &mut self.user_namespace,
            Shape::Namespaces => &mut self.namespaces,
            Shape::Bare => &mut self.bare,
        };
        *slot = Some(error.to_string());
    }
}

/// What was found out by making a sandbox.
#[derive(Debug)]
pub struct Measured<'a> {
    /// `None` when no kind of sandbox could be made.
    pub shape: Option<Shape>,
    pub images: bool,
    pub missed: Missed,
    pub cgroups: &'a Found,
    /// ABI of the kernel; 0 for none.
    pub landlock: usize,
}

impl Measured<'_> {
    /// The highest posture all of whose promises hold, and the table.
    pub fn report(&self, settings: &Settings) -> PostureReport {
        let root = settings.root();
        let layers = vec![
            self.user_namespace(),
            self.namespaces(settings),
            self.space(root),
            self.landlock(),
            self.seccomp(),
            self.cgroup("memory", self.cgroups.memory),
            self.cgroup("pids", self.cgroups.pids),
            self.cgroup("cpu", self.cgroups.cpu),
            self.identity(root),
            self.capabilities(root),
            enforced("rlimits", "core, nofile, nproc, memlock, sigpending, msgqueue, fsize"),
        ];
        PostureReport { posture: self.posture(root), layers, root, uid: settings.uid }
    }

    fn posture(&self, root: bool) -> Posture {
        let landlock = self.landlock > 0;
        let bounded = self.cgroups.complete() && self.images;
        match (self.shape, root) {
            (Some(Shape::UserNamespace), true) if bounded && landlock => Posture::Full,
            (Some(Shape::UserNamespace | Shape::Namespaces), true) if bounded => Posture::Root,
            (Some(Shape::UserNamespace), _) if landlock => Posture::Userns,
            (Some(Shape::Namespaces | Shape::Bare), true) if landlock => Posture::Uid,
            (Some(Shape::Bare), false) => Posture::Process,
            _ => Posture::None,
        }
    }

    fn user_namespace(&self) -> LayerReport {
        let own = self.shape == Some(Shape::UserNamespace);
        let missed = self.missed.user_namespace.clone().or_else(|| self.missed.namespaces.clone());
        row(
            "user namespace",
            own,
            "one for each sandbox",
            missed,
            "user namespaces (user.max_user_namespaces, kernel.apparmor_restrict_unprivileged_userns)",
        )
    }

    fn namespaces(&self, settings: &Settings) -> LayerReport {
        let own = matches!(self.shape, Some(Shape::UserNamespace | Shape::Namespaces));
        let detail = match (own, settings.no_namespaces.is_none(), settings.root()) {
            (true, ..) => "mount, pid, network, ipc, uts, cgroup; a root of its own",
            (false, true, _) => "none: paths, host name and process ids of the host can be asked for",
            (false, false, true) => {
                "none: paths, host name and process ids of the host can be asked for; what hides may outlive a killed supervisor until the next start"
            }
            (false, false, false) => {
                "none: paths, host name and process ids of the host can be asked for; what hides may outlive a killed supervisor"
            }
        };
        row(
            "namespaces",
            own,
            detail,
            self.missed.namespaces.clone(),
            "CAP_SYS_ADMIN, or user namespaces for this account",
        )
    }

    fn space(&self, root: bool) -> LayerReport {
        let detail = match (self.images, self.shape) {
            (true, Some(Shape::UserNamespace)) => "ext4 image, idmapped: hard limits on bytes and inodes",
            (true, _) => "ext4 image: hard limits on bytes and inodes",
            _ => {
                "a folder: a limit per file; sum and number looked at every few seconds, sandboxes ended beyond"
            }
        };
        let missed =
            self.missed.images.clone().or_else(|| (!root).then(|| "mount: not as this account".to_owned()));
        let grant = if root {
            "loop devices, CAP_SYS_ADMIN, and mke2fs on the host"
        } else {
            "start caisson as root"
        };
        row("space", self.images, detail, missed, grant)
    }

    fn landlock(&self) -> LayerReport {
        let detail = match self.shape {
            Some(Shape::Bare) => {
                format!("file and TCP rules, scopes for signals and abstract sockets, ABI {}", self.landlock)
            }
            _ => format!("file rules, ABI {}", self.landlock),
        };
        let missed =
            self.missed.bare.clone().or_else(|| Some("landlock_create_ruleset: not supported".to_owned()));
        row("landlock", self.landlock > 0, &detail, missed, "a kernel with Landlock in its lsm= list")
    }

    fn seccomp(&self) -> LayerReport {
        match self.shape {
            Some(Shape::Bare) => {
                enforced("seccomp", "two layers, default deny; no sockets but pairs, no System V IPC")
            }
            _ => enforced("seccomp", "two layers, default deny"),
        }
    }

    fn cgroup(&self, name: &str, version: Option<&'static str>) -> LayerReport {
        let grant = format!("a writable cgroup with the {name} controller");
        let detail = version.unwrap_or("not bounded");
        row(&format!("cgroup {name}"), version.is_some(), detail, self.cgroups.failed.clone(), &grant)
    }

    fn identity(&self, root: bool) -> LayerReport {
        match (root, self.shape) {
            (true, Some(Shape::Namespaces | Shape::Bare)) => enforced(
                "identity",
                "a block of host user ids for each space, which its sandboxes share; init under its own",
            ),
            (true, _) => {
                enforced("identity", "a block of host user ids for each sandbox, init under its own")
            }
            (false, _) => row(
                "identity",
                false,
                "one user id for all sandboxes and their inits, the account's own",
                Some("setuid: not as this account".to_owned()),
                "start caisson as root",
            ),
        }
    }

    fn capabilities(&self, root: bool) -> LayerReport {
        match (root, self.shape) {
            (false, Some(Shape::Bare)) => {
                enforced("capabilities", "none, as the account has none; no_new_privs")
            }
            _ => enforced("capabilities", "none in any set, securebits locked, no_new_privs"),
        }
    }
}

fn enforced(layer: &str, detail: &str) -> LayerReport {
    row(layer, true, detail, None, "")
}

fn row(layer: &str, enforced: bool, detail: &str, failed: Option<String>, grant: &str) -> LayerReport {
    LayerReport {
        layer: layer.to_owned(),
        enforced,
        detail: detail.to_owned(),
        failed: failed.filter(|_| !enforced),
        grant: (!enforced).then(|| grant.to_owned()),
    }
}
