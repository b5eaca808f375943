//! The fixed records that the launcher sends to an init and to a zygote, and their numbers.
//!
//! Included by the launcher, by init and by the zygote's library, so `core` only. Records are plain memory:
//! both ends are built from this file in one build.

#![allow(dead_code, reason = "each of the three programs uses its own part")]

/// Steps as the byte that a failing child reports; the same numbers as [`super::plan::Step`].
pub mod step {
    pub const INIT_IDENTITY: u8 = 9;
    pub const INIT_CGROUP_NAMESPACE: u8 = 10;
    pub const INIT_PROC: u8 = 11;
    pub const INIT_SYSCTL: u8 = 12;
    pub const INIT_DEV: u8 = 13;
    pub const INIT_SPACE_MOUNTS: u8 = 14;
    pub const INIT_LOOPBACK: u8 = 15;
    pub const INIT_RULESET: u8 = 16;
    pub const INIT_DROP: u8 = 17;
    pub const CGROUP: u8 = 3;
    pub const CLONE: u8 = 4;
    pub const MOVE_IN: u8 = 19;
    pub const THREAD: u8 = 20;
    pub const DESCRIPTORS: u8 = 21;
    pub const WORKING_DIRECTORY: u8 = 22;
    pub const RLIMITS: u8 = 23;
    pub const BOUNDING_SET: u8 = 24;
    pub const SECUREBITS: u8 = 25;
    pub const IDENTITY: u8 = 26;
    pub const CAPABILITIES: u8 = 27;
    pub const NO_NEW_PRIVS: u8 = 28;
    pub const LANDLOCK: u8 = 29;
    pub const SECCOMP: u8 = 30;
    pub const STOP: u8 = 31;
    pub const EXEC: u8 = 33;
}

/// A child's report on its status pipe: the step (0 is "all done, waiting") and the errno.
pub const STATUS_BYTES: usize = 8;

/// Encodes a report.
pub fn status(step: u8, errno: i32) -> [u8; STATUS_BYTES] {
    let e = errno.to_le_bytes();
    [step, 0, 0, 0, e[0], e[1], e[2], e[3]]
}

/// First byte of the record by which the init of a sandbox without namespaces tells how its guest ended; the exit
/// code, or the number of the signal, follows.
pub const GUEST_EXITED: u8 = 0xfe;
pub const GUEST_SIGNALED: u8 = 0xff;

/// Descriptors of a job, in this order, in the packet that carries it.
pub mod slot {
    pub const NULL: usize = 0;
    pub const STDOUT: usize = 1;
    pub const STDERR: usize = 2;
    pub const REQUESTS: usize = 3;
    pub const EVENTS: usize = 4;
    pub const STATUS: usize = 5;
    pub const RELEASE: usize = 6;
    pub const RULESET: usize = 7;
    /// How many are always there and are moved to these very numbers.
    pub const FIXED: usize = 8;
}

/// Namespaces in the order a child enters them: user first, since it grants the rest; pid last.
pub const NAMESPACES: [(u64, &str); 7] = [
    (0x1000_0000, "user"),
    (0x0002_0000, "mnt"),
    (0x4000_0000, "net"),
    (0x0800_0000, "ipc"),
    (0x0400_0000, "uts"),
    (0x0200_0000, "cgroup"),
    (0x2000_0000, "pid"),
];

/// Most rlimits in a job.
pub const LIMITS_MAX: usize = 16;

/// One resource limit, soft and hard alike.
#[derive(Copy, Clone, Debug, Default)]
#[repr(C)]
pub struct Limit {
    pub resource: u32,
    pub _pad: u32,
    pub value: u64,
}

/// What a child becomes. Ids, numbers and flags only: nothing of any request.
#[derive(Copy, Clone, Debug, Default)]
#[repr(C)]
pub struct Job {
    /// [`JOB_MAGIC`].
    pub magic: u32,
    /// Ids as seen inside the sandbox.
    pub uid: u32,
    pub gid: u32,
    /// Bit per entry of [`NAMESPACES`] whose descriptor follows the fixed ones.
    pub namespaces: u32,
    /// Descriptors of cgroup `tasks` or `cgroup.procs` files that follow the namespaces'.
    pub cgroups: u32,
    /// 1 when a Landlock ruleset is to be applied.
    pub landlock: u32,
    /// 1 where the kernel lets nobody change groups: a user namespace that an ordinary account made.
    pub keep_groups: u32,
    /// 1 where the maker has no capabilities: it cannot drop what it cannot have.
    pub unprivileged: u32,
    /// 1 where no pid namespace ends the guest with its init.
    pub ends_with_parent: u32,
    pub _pad: u32,
    pub limits: [Limit; LIMITS_MAX],
    pub limit_count: u32,
}

/// Bytes of all words of a [`Launch`], and most of them.
pub const LAUNCH_WORD_BYTES: usize = 4096;
pub const LAUNCH_WORDS_MAX: usize = 64;

/// What the init of a sandbox without namespaces forks and executes: the job, and the program's words, each ended
/// by a zero byte: working directory, program, arguments, environment.
#[derive(Copy, Clone, Debug)]
#[repr(C)]
pub struct Launch {
    pub job: Job,
    /// Arguments, the program's name among them.
    pub argument_count: u32,
    pub environment_count: u32,
    pub words: [u8; LAUNCH_WORD_BYTES],
}

pub const LAUNCH_BYTES: usize = core::mem::size_of::<Launch>();

pub const JOB_MAGIC: u32 = 0xCA15_0001;
/// A fork and nothing else, for a measurement. Only the library built with `cfg(bare)` knows it, and no daemon can
/// ask a launcher for it.
pub const BARE_MAGIC: u32 = 0xCA15_BA4E;
pub const JOB_BYTES: usize = core::mem::size_of::<Job>();

/// Most Landlock rules in a set-up, longest path and longest filter.
pub const RULES_MAX: usize = 24;
pub const RULE_PATH_BYTES: usize = 56;
pub const INIT_FILTER_WORDS: usize = 256;
/// Most second-layer filters, and words of all of them together, that a zygote has room for.
pub const FILTERS_MAX: usize = 4;
pub const FILTER_WORDS: usize = 4096;

/// Set in `rights` when the absence of the path is no error: it then allows nothing.
pub const RULE_OPTIONAL: u64 = 1 << 63;

/// Allows `rights` beneath `path` (null-terminated).
#[derive(Copy, Clone, Debug)]
#[repr(C)]
pub struct Rule {
    pub rights: u64,
    pub path: [u8; RULE_PATH_BYTES],
}

/// What an init makes of its namespaces.
#[derive(Copy, Clone, Debug)]
#[repr(C)]
pub struct Setup {
    /// [`SETUP_MAGIC`].
    pub magic: u32,
    /// `SETUP_*` flags.
    pub flags: u32,
    pub shm_bytes: u64,
    pub shm_inodes: u64,
    pub inotify_instances: u64,
    pub inotify_watches: u64,
    /// File rights the running Landlock ABI knows; 0 builds no ruleset.
    pub handled_fs: u64,
    pub rule_count: u32,
    pub filter_words: u32,
    /// With [`SETUP_OWN_ID`]: what init becomes on the host.
    pub init_id: u32,
    pub _pad: u32,
    pub rules: [Rule; RULES_MAX],
    pub filter: [u64; INIT_FILTER_WORDS],
}

pub const SETUP_MAGIC: u32 = 0xCA15_0002;
pub const SETUP_BYTES: usize = core::mem::size_of::<Setup>();
/// A user namespace is there: bound its limits.
pub const SETUP_USER: u32 = 1;
/// It has a root, which init becomes. Where a single id is mapped there is none.
pub const SETUP_ROOT: u32 = 8;
/// There is no user namespace: init starts as root of the host and becomes `init_id` when it has built.
pub const SETUP_OWN_ID: u32 = 16;
/// Make a cgroup namespace of its own.
pub const SETUP_CGROUP: u32 = 2;
/// No namespaces: nothing to build. Init forks the guest itself and reports its end.
pub const SETUP_BARE: u32 = 32;
/// Three detached trees come along: `/mnt/data`, `/tmp`, `/home/sandbox`.
pub const SETUP_SPACE: u32 = 4;

/// Records travel as their bytes.
pub trait Record: Copy {}
impl Record for Job {}
impl Record for Launch {}
impl Record for Setup {}

/// The bytes of a record.
pub fn bytes_of<T: Record>(record: &T) -> &[u8] {
    // SAFETY: a `Record` is `repr(C)` plain data without padding that matters; the slice borrows it.
    unsafe { core::slice::from_raw_parts(core::ptr::from_ref(record).cast(), core::mem::size_of::<T>()) }
}

/// The bytes of a record, to be filled.
pub fn bytes_of_mut<T: Record>(record: &mut T) -> &mut [u8] {
    // SAFETY: every bit pattern is a value of a `Record`: its fields are integers and arrays of them.
    unsafe { core::slice::from_raw_parts_mut(core::ptr::from_mut(record).cast(), core::mem::size_of::<T>()) }
}
