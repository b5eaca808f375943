//! The policies in force, in the form that a launch spends: filters as words, Landlock rules as rights,
//! rlimits as numbers, accounts as ids.
#![forbid(unsafe_code)]

use crate::launcher::wire::Limit;

/// Everything that was loaded from `policies/`.
#[derive(Clone, Debug, Default)]
pub struct Rules {
    /// First-layer filters: on every zygote, and first on an exec'd interpreter.
    pub first: Vec<Vec<u64>>,
    /// Second-layer filters: what only the set-up needed is taken away.
    pub second: Vec<Vec<u64>>,
    /// The filter of a sandbox's init.
    pub init: Vec<u64>,
    /// Path inside the sandbox and the rights beneath it.
    pub landlock: Vec<(String, u64)>,
    /// File rights that the running ABI knows; 0 without Landlock.
    pub landlock_handled: u64,
    pub limits: Vec<Limit>,
    pub accounts: Vec<AccountIds>,
    pub inotify_instances: u64,
    pub inotify_watches: u64,
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
    /// The id maps of a sandbox whose block starts at `block`: init's root, then the accounts.
    pub fn id_map(&self, block: u32) -> String {
        let mut map = format!("0 {block} 1\n");
        for (index, account) in self.accounts.iter().enumerate() {
            map.push_str(&format!("{} {} 1\n", account.uid, self.host_id(block, index)));
        }
        map
    }

    /// The id on the host of the account with this index.
    pub fn host_id(&self, block: u32, index: usize) -> u32 {
        block + 1 + index as u32
    }

    /// Filters found on a guest that did what it was told.
    pub fn filter_count(&self) -> usize {
        self.first.len() + self.second.len()
    }
}

// TEMPORARY until policy is merged
pub fn load(_settings: &crate::launcher::settings::Settings) -> Result<Rules, crate::launcher::start::StartError> {
    let allow = vec![0x7fff_0000_0000_0006_u64];
    let rx = 0b1101;
    Ok(Rules {
        first: vec![allow.clone()],
        second: vec![allow],
        init: Vec::new(),
        landlock: vec![
            ("/usr".into(), rx), ("/opt".into(), rx), ("/etc".into(), 0b1100), ("/sys".into(), 0b1100), ("/proc".into(), 0b1110),
            ("/dev".into(), 0b1110 | 1 << 15), ("/dev/shm".into(), 0xffff), ("/tmp".into(), 0xffff), ("/mnt".into(), 0xffff), ("/home".into(), 0xffff),
        ],
        landlock_handled: 0,
        limits: vec![],
        accounts: vec![AccountIds { name: "sandbox".into(), uid: 1000, gid: 1000 }, AccountIds { name: "nobody".into(), uid: 65534, gid: 65534 }],
        inotify_instances: 64, inotify_watches: 4096,
        etc: vec![("/etc/passwd", "root:x:0:0::/:/usr/sbin/nologin\nsandbox:x:1000:1000::/home/sandbox:/bin/bash\nnobody:x:65534:65534::/nonexistent:/usr/sbin/nologin\n".into())],
    })
}
