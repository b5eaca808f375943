//! The policies in force, in the form that a launch spends: filters as words, Landlock rules as rights,
//! rlimits as numbers, accounts as ids.
#![forbid(unsafe_code)]

use std::path::{Path, PathBuf};

use crate::launcher::posture::Shape;
use crate::launcher::release;
use crate::launcher::seccomp::{self, CompileError};
use crate::launcher::settings::Settings;
use crate::launcher::wire::{
    FILTER_WORDS, FILTERS_MAX, INIT_FILTER_WORDS, Limit, NAMESPACES, RULE_OPTIONAL, RULE_PATH_BYTES,
    RULES_MAX,
};
use crate::policy::{self, Access, Layer, PathRule, Policies};

/// Sandboxes that may have one user id at once, for limits that the kernel counts by it.
const SANDBOXES_OF_AN_ID: u64 = 64;

/// File rights of Landlock, by the bit the kernel gives them.
mod right {
    pub(super) const EXECUTE: u64 = 1;
    pub(super) const WRITE_FILE: u64 = 1 << 1;
    pub(super) const READ_FILE: u64 = 1 << 2;
    pub(super) const READ_DIR: u64 = 1 << 3;
    pub(super) const TRUNCATE: u64 = 1 << 14;
    pub(super) const IOCTL_DEV: u64 = 1 << 15;
}

/// Everything that was loaded from `policies/`.
#[derive(Clone, Debug)]
pub struct Rules {
    pub shape: Shape,
    /// First-layer filters: on every zygote, and first on an exec'd interpreter.
    pub first: Vec<Vec<u64>>,
    /// Second-layer filters: what only the set-up needed is taken away.
    pub second: Vec<Vec<u64>>,
    /// The filter of a sandbox's init.
    pub init: Vec<u64>,
    /// Path inside the sandbox and the rights beneath it.
    pub landlock: Vec<(String, u64)>,
    /// The same for sandboxes without a root of their own: paths of the host.
    pub bare: Vec<(String, u64)>,
    /// File rights that the running ABI knows; 0 without Landlock.
    pub landlock_handled: u64,
    pub limits: Vec<Limit>,
    pub accounts: Vec<AccountIds>,
    pub inotify_instances: u64,
    pub inotify_watches: u64,
    /// Every sandbox has ids of its own on the host; else all share those of `account`.
    pub own_ids: bool,
    /// Uid and gid that the supervisor was started with.
    pub account: (u32, u32),
    /// Filters that we ourselves were started under, and every guest with us: a container's.
    pub filters_inherited: usize,
    /// Paths of the host that languages need besides `/usr`; the last part may hold a `*`.
    pub shown: Vec<PathBuf>,
    /// Generated files of the template: path and text.
    pub etc: Vec<(&'static str, String)>,
}

/// One account of the sandbox.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct AccountIds {
    pub name: String,
    /// As seen inside.
    pub uid: u32,
    pub gid: u32,
}

impl Rules {
    /// The namespaces that each sandbox has of its own, in the order a child enters them.
    pub fn namespaces(&self) -> &'static [(u64, &'static str)] {
        match self.shape {
            Shape::UserNamespace => &NAMESPACES,
            // The first is the user namespace.
            Shape::Namespaces => &NAMESPACES[1..],
            Shape::Bare => &[],
        }
    }

    /// Files of a space belong to the ids that its processes have on the host, since nothing maps them.
    pub fn ids_on_disk(&self) -> bool {
        self.own_ids && self.shape != Shape::UserNamespace
    }

    /// The launcher has no capabilities: it is an ordinary account's and in no namespace of its own.
    pub fn unprivileged(&self) -> bool {
        !self.own_ids && self.shape == Shape::Bare
    }

    /// What a child of the launcher becomes: ids as its user namespace has them.
    pub fn live_ids(&self, block: u32, index: usize) -> (u32, u32) {
        let account = &self.accounts[index];
        match self.shape {
            Shape::UserNamespace => (account.uid, account.gid),
            _ if self.own_ids => (self.host_id(block, index), self.host_id(block, index)),
            _ => self.account,
        }
    }

    /// The id maps of a sandbox whose block starts at `block`: init's root, then the accounts.
    pub fn id_map(&self, block: u32) -> String {
        if !self.own_ids {
            return format!("{} 0 1\n", self.accounts[0].uid);
        }
        let mut map = format!("0 {block} 1\n");
        for (index, account) in self.accounts.iter().enumerate() {
            map.push_str(&format!("{} {} 1\n", account.uid, self.host_id(block, index)));
        }
        map
    }

    /// The id of the account with this index, as the launcher sees it.
    pub fn host_id(&self, block: u32, index: usize) -> u32 {
        match (self.own_ids, self.shape) {
            (true, _) => block + 1 + index as u32,
            // The one id of the launcher's own user namespace.
            (false, Shape::UserNamespace) => 0,
            (false, _) => self.account.0,
        }
    }

    /// Filters found on a guest that did what it was told.
    pub fn filter_count(&self) -> usize {
        self.filters_inherited + self.first.len() + self.second.len()
    }

    /// Loads the policies and compiles them for sandboxes of this shape and the Landlock ABI of this kernel; 0
    /// where there is none.
    pub fn load(settings: &Settings, abi: usize, shape: Shape) -> Result<Rules, RulesError> {
        let policies = policy::load(settings.policies_dir.as_deref())?;
        let mut seccomp = policies.seccomp.clone();
        if shape == Shape::Bare {
            let none =
                [Layer::NetworkNamespace, Layer::PidNamespace, Layer::IpcNamespace, Layer::MountNamespace];
            let shared = (!settings.root()).then_some(Layer::FilesApart);
            for layer in none.into_iter().chain(shared) {
                seccomp = seccomp.without(layer);
            }
        }
        let programs = seccomp::compile(&seccomp)?;
        let words = |program: &seccomp::Program| -> Vec<u64> {
            let chunks = program.bytes().chunks_exact(8);
            chunks.map(|word| u64::from_ne_bytes(word.try_into().expect("chunks of eight"))).collect()
        };
        let handled = handled_rights(abi);
        let rules = Rules {
            shape,
            account: (settings.uid, settings.gid),
            filters_inherited: release::own_filters(),
            first: programs.first.iter().map(words).collect(),
            second: programs.second.iter().map(words).collect(),
            init: words(&programs.init),
            landlock: landlock(&policies.landlock.rules, handled),
            bare: landlock(&policies.landlock.bare, handled),
            landlock_handled: handled,
            limits: rlimits(&policies, settings),
            own_ids: settings.root(),
            accounts: policies
                .accounts
                .iter()
                // A single id is a single account; and on the host a space's folder lets in one.
                .take(if settings.root() && shape != Shape::Bare { usize::MAX } else { 1 })
                .map(|account| AccountIds { name: account.name.clone(), uid: account.uid, gid: account.gid })
                .collect(),
            inotify_instances: policies.limits.inotify_instances.value,
            inotify_watches: policies.limits.inotify_watches.value,
            shown: policies.languages.iter().flat_map(|language| language.shown.clone()).collect(),
            etc: etc(&policies),
        };
        rules.check_room().map(|()| rules)
    }

    /// Lets guests with a root of their own read and run what lies below `path`.
    pub fn let_read(&mut self, path: &Path) -> Result<(), RulesError> {
        let rights = (right::READ_FILE | right::READ_DIR | right::EXECUTE) & self.landlock_handled;
        let path = path.to_string_lossy().into_owned();
        if !self.landlock.iter().any(|(known, _)| *known == path) {
            self.landlock.push((path, rights));
        }
        self.check_room()
    }

    /// RLIMIT_NPROC counts by user id. Where the sandboxes of a space share theirs and a group bounds each of them, it
    /// is only a bound on all together: one must not use up the others' share.
    /// Where sandboxes have the account's own id, its `tasks` count as well.
    pub fn bound_processes(&mut self, by_group: bool, tasks: u64) {
        let nproc = nix::sys::resource::Resource::RLIMIT_NPROC as u32;
        if by_group && self.shape != Shape::UserNamespace {
            for limit in self.limits.iter_mut().filter(|limit| limit.resource == nproc) {
                limit.value = limit.value.saturating_mul(SANDBOXES_OF_AN_ID);
            }
        }
        if self.unprivileged() {
            for limit in self.limits.iter_mut().filter(|limit| limit.resource == nproc) {
                limit.value += tasks;
            }
        }
    }

    /// The records of a launch have fixed sizes.
    fn check_room(&self) -> Result<(), RulesError> {
        let path = self.landlock.iter().map(|(path, _)| path.len()).max().unwrap_or(0);
        for (what, found, max) in [
            ("Landlock rules", self.landlock.len(), RULES_MAX),
            ("bytes in a Landlock path", path, RULE_PATH_BYTES - 1),
            ("instructions in init's filter", self.init.len(), INIT_FILTER_WORDS),
            ("filters", self.first.len() + self.second.len(), FILTERS_MAX),
            ("instructions", self.first.iter().chain(&self.second).map(Vec::len).sum(), FILTER_WORDS),
        ] {
            if found > max {
                return Err(RulesError::TooMany { what, max });
            }
        }
        Ok(())
    }
}

/// A policy that cannot be put in force.
#[derive(Debug, thiserror::Error)]
pub enum RulesError {
    #[error(transparent)]
    Policy(#[from] policy::PolicyError),
    #[error(transparent)]
    Seccomp(#[from] CompileError),
    #[error("policy has more {what} than the {max} that a launch has room for")]
    TooMany { what: &'static str, max: usize },
}

/// File rights by ABI: 1 has thirteen, 2 refer, 3 truncate, 5 ioctl on devices.
fn handled_rights(abi: usize) -> u64 {
    let bits = match abi {
        0 => 0,
        1 => 13,
        2 => 14,
        3 | 4 => 15,
        _ => 16,
    };
    (1 << bits) - 1
}

fn landlock(rules: &[PathRule], handled: u64) -> Vec<(String, u64)> {
    let rights = |access: Access| match access {
        Access::List => right::READ_DIR,
        Access::Read => right::READ_FILE | right::READ_DIR,
        Access::ReadExecute => right::READ_FILE | right::READ_DIR | right::EXECUTE,
        Access::ReadWrite => {
            let write = right::WRITE_FILE | right::TRUNCATE | right::IOCTL_DEV;
            right::READ_FILE | right::READ_DIR | write
        }
        Access::All => handled,
    };
    let rules = rules.iter().map(|rule| {
        let optional = if rule.optional { RULE_OPTIONAL } else { 0 };
        (rule.path.to_string_lossy().into_owned(), (rights(rule.access) & handled) | optional)
    });
    rules.collect()
}

/// `core` is 1 and not 0: the kernel would still run a piped core handler as root of the host.
fn rlimits(policies: &Policies, settings: &Settings) -> Vec<Limit> {
    let limits = &policies.limits;
    use nix::sys::resource::Resource as R;
    let one = |resource: R, value: u64| Limit { resource: resource as u32, _pad: 0, value };
    vec![
        one(R::RLIMIT_CORE, limits.core_bytes.value),
        one(R::RLIMIT_NOFILE, settings.nofile),
        one(R::RLIMIT_NPROC, limits.nproc.value),
        one(R::RLIMIT_MEMLOCK, limits.memlock_bytes.value),
        one(R::RLIMIT_SIGPENDING, limits.sigpending.value),
        one(R::RLIMIT_MSGQUEUE, limits.msgqueue_bytes.value),
        one(R::RLIMIT_NICE, limits.nice.value),
        one(R::RLIMIT_RTPRIO, limits.rtprio.value),
        one(R::RLIMIT_FSIZE, settings.space.bytes),
    ]
}

fn etc(policies: &Policies) -> Vec<(&'static str, String)> {
    vec![
        ("/etc/passwd", policies.accounts.passwd()),
        ("/etc/group", policies.accounts.group()),
        ("/etc/hosts", "127.0.0.1 localhost sandbox\n::1 localhost sandbox\n".to_owned()),
        ("/etc/hostname", "sandbox\n".to_owned()),
        ("/etc/nsswitch.conf", "passwd: files\ngroup: files\nhosts: files\n".to_owned()),
        ("/etc/resolv.conf", String::new()),
    ]
}
