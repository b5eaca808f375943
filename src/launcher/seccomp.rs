//! Compiles `policies/seccomp.toml` to BPF.
//!
//! A seccompiler filter knows one action for what matches and one for the rest, so a layer is several filters. The
//! kernel runs all of them and takes the strictest answer; **between two errnos the newest filter's counts**. Hence
//! the order of installation, which is the order of the lists in [`Programs`]:
//!
//! 1. `first[0]`, the allowlist: EPERM for what no entry names. Guests' calls and those of set-up pass.
//! 2. `first[1]`, ENOSYS for the list of that name and for numbers newer than the policy. Installed after the
//!    allowlist, so its errno wins.
//! 3. `second[0]`, in the child when it is otherwise confined: success without doing for the list `ignore`.
//! 4. `second[1]`, EPERM for the calls of set-up, `seccomp` included. Last, so that it wins over `ignore`.
//!
//! A wrong architecture kills the process in each of them: the numbers mean other calls there.
#![forbid(unsafe_code)]

use std::collections::BTreeMap;

use seccompiler::{
    BpfProgram, SeccompAction, SeccompCmpArgLen, SeccompCmpOp, SeccompCondition, SeccompFilter, SeccompRule,
    TargetArch,
};

use crate::policy::{Condition, Entry, SeccompPolicy, Test};

/// Most instructions the kernel takes in one program (BPF_MAXINSNS).
pub const INSTRUCTIONS_MAX: usize = 4096;
/// Bytes of one `struct sock_filter`.
pub const INSTRUCTION_BYTES: usize = 8;

const EPERM: u32 = 1;
const ENOSYS: u32 = 38;
/// Bit of a call number that selects the x32 ABI on x86-64: another table under the same architecture.
const X32_BIT: u32 = 0x4000_0000;

/// One BPF program, as the kernel reads it: `struct sock_filter` after `struct sock_filter`.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Program(Vec<u8>);

/// What is installed, list by list in this order.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Programs {
    /// For zygotes, and for what is exec'd.
    pub first: Vec<Program>,
    /// For the guest itself, as the last step of its confinement.
    pub second: Vec<Program>,
    /// For pid 1 of a sandbox, alone.
    pub init: Program,
}

/// A policy that makes no program.
#[derive(Debug, thiserror::Error)]
pub enum CompileError {
    #[error("no seccomp filters for architecture {0:?}")]
    Architecture(String),
    #[error("failed to compile the seccomp list `{list}`")]
    List { list: &'static str, source: seccompiler::BackendError },
    #[error("seccomp list `{list}` makes {len} instructions, more than {INSTRUCTIONS_MAX}")]
    TooLong { list: &'static str, len: usize },
}

impl Program {
    /// Raw bytes; their length is a multiple of [`INSTRUCTION_BYTES`].
    pub fn bytes(&self) -> &[u8] {
        &self.0
    }

    /// Number of instructions, as `struct sock_fprog` wants it.
    pub fn instructions(&self) -> u16 {
        u16::try_from(self.0.len() / INSTRUCTION_BYTES)
            .expect("checked against INSTRUCTIONS_MAX when it was made")
    }
}

/// Compiles the policy for the architecture that this program runs on.
pub fn compile(policy: &SeccompPolicy) -> Result<Programs, CompileError> {
    let arch = std::env::consts::ARCH;
    let arch = TargetArch::try_from(arch).map_err(|_| CompileError::Architecture(arch.to_owned()))?;
    let allowed: Vec<&Entry> = policy.allow.iter().chain(&policy.setup).collect();
    let setup: Vec<&Entry> = policy.setup.iter().collect();
    let ignored: Vec<&Entry> = policy.ignore.iter().collect();
    let init: Vec<&Entry> = policy.init.iter().collect();
    let (allow, refuse) = (SeccompAction::Allow, SeccompAction::Errno(EPERM));
    Ok(Programs {
        first: vec![filter("allow", arch, &allowed, allow.clone(), refuse.clone())?, unknown(policy, arch)?],
        second: vec![
            filter("ignore", arch, &ignored, SeccompAction::Errno(0), allow.clone())?,
            filter("setup", arch, &setup, refuse.clone(), allow.clone())?,
        ],
        init: filter("init", arch, &init, allow, refuse)?,
    })
}

fn filter(
    list: &'static str,
    arch: TargetArch,
    entries: &[&Entry],
    matched: SeccompAction,
    otherwise: SeccompAction,
) -> Result<Program, CompileError> {
    let failed = |source| CompileError::List { list, source };
    let mut rules: BTreeMap<i64, Vec<SeccompRule>> = BTreeMap::new();
    for call in entries.iter().map(|entry| entry.call) {
        let of_call: Vec<&&Entry> = entries.iter().filter(|entry| entry.call == call).collect();
        // An entry without conditions makes the others of its call moot; for seccompiler no rule means always.
        let always = of_call.iter().any(|entry| entry.when.is_empty());
        let mut alternatives = Vec::new();
        for alternative in of_call.iter().flat_map(|entry| &entry.when).filter(|_| !always) {
            for conditions in spread(alternative) {
                alternatives.push(rule(&conditions).map_err(failed)?);
            }
        }
        rules.insert(i64::from(call.id()), alternatives);
    }
    let program: BpfProgram =
        SeccompFilter::new(rules, otherwise, matched, arch).and_then(TryInto::try_into).map_err(failed)?;
    encode(list, program.iter().map(|it| (it.code, it.jt, it.jf, it.k)).collect())
}

/// A single comparison, as seccompiler takes it: argument, its length, operator, value. Dword wherever the kernel
/// reads an int: bits above must not make it look like another.
type Compare = (u8, SeccompCmpArgLen, SeccompCmpOp, u32);

/// Multiplies out the values of an alternative: seccompiler's rules know only "and".
fn spread(alternative: &[Condition]) -> Vec<Vec<Compare>> {
    let mut products = vec![Vec::new()];
    for Condition { arg, test } in alternative {
        let choices: Vec<Compare> = match test {
            Test::NotNull => vec![(*arg, SeccompCmpArgLen::Qword, SeccompCmpOp::Ne, 0)],
            Test::NotEqual(value) => vec![(*arg, SeccompCmpArgLen::Dword, SeccompCmpOp::Ne, *value)],
            Test::OneOf { mask, values } => {
                let operator = match *mask {
                    u32::MAX => SeccompCmpOp::Eq,
                    mask => SeccompCmpOp::MaskedEq(u64::from(mask)),
                };
                let one = |value: &u32| (*arg, SeccompCmpArgLen::Dword, operator.clone(), *value);
                values.iter().map(one).collect()
            }
        };
        products = products
            .iter()
            .flat_map(|product: &Vec<Compare>| {
                choices.iter().map(|choice| product.iter().cloned().chain([choice.clone()]).collect())
            })
            .collect();
    }
    products
}

fn rule(comparisons: &[Compare]) -> Result<SeccompRule, seccompiler::BackendError> {
    let conditions = comparisons
        .iter()
        .map(|(arg, length, operator, value)| {
            SeccompCondition::new(*arg, length.clone(), operator.clone(), u64::from(*value))
        })
        .collect::<Result<Vec<_>, _>>()?;
    SeccompRule::new(conditions)
}

// The classic BPF that the program below needs (linux/bpf_common.h, linux/seccomp.h).
const LOAD: u16 = 0x20; // BPF_LD | BPF_W | BPF_ABS
const JUMP_EQUAL: u16 = 0x15; // BPF_JMP | BPF_JEQ | BPF_K
const JUMP_GREATER_EQUAL: u16 = 0x35; // BPF_JMP | BPF_JGE | BPF_K
const RETURN: u16 = 0x06; // BPF_RET | BPF_K
const OFFSET_NUMBER: u32 = 0;
const OFFSET_ARCH: u32 = 4;
const RETURN_ALLOW: u32 = 0x7fff_0000;
const RETURN_ERRNO: u32 = 0x0005_0000;
const RETURN_KILL_PROCESS: u32 = 0x8000_0000;

/// ENOSYS for the list and for numbers beyond the newest. Written by hand: seccompiler has no ranges, and hundreds of
/// comparisons would be walked for every call that the kernel's cache of always-allowed numbers does not cover.
fn unknown(policy: &SeccompPolicy, arch: TargetArch) -> Result<Program, CompileError> {
    let mut program = vec![
        (LOAD, 0, 0, OFFSET_ARCH),
        (JUMP_EQUAL, 1, 0, audit_arch(arch)),
        (RETURN, 0, 0, RETURN_KILL_PROCESS),
        (LOAD, 0, 0, OFFSET_NUMBER),
        // x32 calls come under the architecture of x86-64; no other one has numbers like these.
        (JUMP_GREATER_EQUAL, 0, 1, X32_BIT),
        (RETURN, 0, 0, if arch == TargetArch::x86_64 { RETURN_KILL_PROCESS } else { RETURN_ALLOW }),
        (JUMP_GREATER_EQUAL, 0, 2, policy.newer.start),
        (JUMP_GREATER_EQUAL, 1, 0, policy.newer.end),
        (RETURN, 0, 0, RETURN_ERRNO | ENOSYS),
    ];
    for entry in &policy.enosys {
        let number = u32::try_from(entry.call.id()).expect("system call numbers are not negative");
        program.extend([(JUMP_EQUAL, 0, 1, number), (RETURN, 0, 0, RETURN_ERRNO | ENOSYS)]);
    }
    program.push((RETURN, 0, 0, RETURN_ALLOW));
    encode("enosys", program)
}

/// AUDIT_ARCH_* of linux/audit.h.
fn audit_arch(arch: TargetArch) -> u32 {
    match arch {
        TargetArch::x86_64 => 0xc000_003e,
        TargetArch::aarch64 => 0xc000_00b7,
        TargetArch::riscv64 => 0xc000_00f3,
    }
}

fn encode(list: &'static str, program: Vec<(u16, u8, u8, u32)>) -> Result<Program, CompileError> {
    if program.len() > INSTRUCTIONS_MAX {
        return Err(CompileError::TooLong { list, len: program.len() });
    }
    let mut bytes = Vec::with_capacity(program.len() * INSTRUCTION_BYTES);
    for (code, jump_true, jump_false, value) in program {
        bytes.extend(code.to_ne_bytes());
        bytes.extend([jump_true, jump_false]);
        bytes.extend(value.to_ne_bytes());
    }
    Ok(Program(bytes))
}

#[cfg(test)]
mod tests {
    use syscalls::Sysno;

    use super::*;
    use crate::policy::{Layer, load};

    const KILL: u32 = RETURN_KILL_PROCESS;
    const ALLOW: u32 = RETURN_ALLOW;
    const NATIVE: u32 = if cfg!(target_arch = "x86_64") { 0xc000_003e } else { 0xc000_00b7 };
    const I386: u32 = 0x4000_0003;

    /// `struct seccomp_data` as the kernel shows it to a program.
    struct Data([u8; 64]);

    fn data(number: u32, args: &[u64]) -> Data {
        let mut bytes = [0; 64];
        bytes[0..4].copy_from_slice(&number.to_ne_bytes());
        bytes[4..8].copy_from_slice(&NATIVE.to_ne_bytes());
        for (at, arg) in args.iter().enumerate() {
            bytes[16 + at * 8..24 + at * 8].copy_from_slice(&arg.to_ne_bytes());
        }
        Data(bytes)
    }

    fn u32_at(bytes: &[u8], at: usize) -> u32 {
        u32::from_ne_bytes([bytes[at], bytes[at + 1], bytes[at + 2], bytes[at + 3]])
    }

    /// The part of classic BPF that filters here use.
    fn run(program: &Program, data: &Data) -> u32 {
        let (mut at, mut accumulator) = (0_usize, 0_u32);
        loop {
            let step = &program.bytes()[at * INSTRUCTION_BYTES..][..INSTRUCTION_BYTES];
            let (code, k) = (u16::from_ne_bytes([step[0], step[1]]), u32_at(step, 4));
            let branch = |taken: bool| usize::from(if taken { step[2] } else { step[3] });
            at += 1;
            match code {
                LOAD => accumulator = u32_at(&data.0, k as usize),
                RETURN => return k,
                0x05 => at += k as usize,                             // BPF_JA
                0x54 => accumulator &= k,                             // BPF_ALU | BPF_AND | BPF_K
                JUMP_EQUAL => at += branch(accumulator == k),         // ==
                JUMP_GREATER_EQUAL => at += branch(accumulator >= k), // >=
                0x25 => at += branch(accumulator > k),                // BPF_JGT
                other => panic!("instruction {other:#x} is not in this interpreter"),
            }
        }
    }

    /// What the kernel answers with these installed in order: the strictest, and of equals the newest.
    fn answer(installed: &[Program], data: &Data) -> u32 {
        let action = |value: u32| (value & 0xffff_0000).cast_signed();
        let newest_first = installed.iter().rev().map(|program| run(program, data));
        newest_first
            .reduce(|kept, next| if action(next) < action(kept) { next } else { kept })
            .unwrap_or(ALLOW)
    }

    struct Layers {
        first: Vec<Program>,
        all: Vec<Program>,
        init: Program,
    }

    fn layers(policy: &SeccompPolicy) -> Layers {
        let Programs { first, second, init } = compile(policy).expect("the policy compiles");
        Layers { all: first.iter().chain(&second).cloned().collect(), first, init }
    }

    fn default_layers() -> Layers {
        layers(&load(None).expect("the defaults load").seccomp)
    }

    fn errno(number: u32) -> u32 {
        RETURN_ERRNO | number
    }

    fn call(call: Sysno, args: &[u64]) -> Data {
        data(u32::try_from(call.id()).expect("not negative"), args)
    }

    #[test]
    fn ordinary_calls_pass_and_known_dangers_are_eperm() {
        let it = default_layers();
        for name in [Sysno::read, Sysno::mmap, Sysno::futex, Sysno::execve, Sysno::getpid, Sysno::close_range]
        {
            assert_eq!(answer(&it.all, &call(name, &[])), ALLOW, "{name}");
        }
        let refused = [
            Sysno::ptrace,
            Sysno::process_vm_readv,
            Sysno::pidfd_getfd,
            Sysno::process_madvise,
            Sysno::mount,
            Sysno::umount2,
            Sysno::pivot_root,
            Sysno::open_tree,
            Sysno::move_mount,
            Sysno::fsopen,
            Sysno::chroot,
            Sysno::unshare,
            Sysno::add_key,
            Sysno::request_key,
            Sysno::bpf,
            Sysno::perf_event_open,
            Sysno::syslog,
            Sysno::quotactl,
            Sysno::reboot,
            Sysno::init_module,
            Sysno::open_by_handle_at,
            Sysno::vmsplice,
            Sysno::move_pages,
            Sysno::kcmp,
            Sysno::io_setup,
            Sysno::sethostname,
            Sysno::fanotify_init,
            Sysno::settimeofday,
        ];
        for name in refused {
            assert_eq!(answer(&it.all, &call(name, &[])), errno(EPERM), "{name}");
            assert_eq!(answer(&it.first, &call(name, &[])), errno(EPERM), "{name} in the zygote");
        }
    }

    #[test]
    fn newer_calls_answer_enosys() {
        let it = default_layers();
        let policy = load(None).expect("the defaults load").seccomp;
        for name in [
            Sysno::clone3,
            Sysno::io_uring_setup,
            Sysno::userfaultfd,
            Sysno::landlock_create_ruleset,
            Sysno::mseal,
        ] {
            assert_eq!(answer(&it.all, &call(name, &[])), errno(ENOSYS), "{name}");
        }
        for number in [policy.newer.start, policy.newer.start + 100, policy.newer.end - 1] {
            assert_eq!(answer(&it.all, &data(number, &[])), errno(ENOSYS), "{number}");
        }
        assert_eq!(answer(&it.all, &data(policy.newer.end, &[])), errno(EPERM));
        assert_eq!(
            answer(&it.all, &data(policy.newer.start - 1, &[])),
            errno(ENOSYS),
            "the newest itself is listed"
        );
    }

    #[test]
    fn set_up_passes_the_first_layer_only() {
        let it = default_layers();
        let set_up = [
            call(Sysno::setns, &[]),
            call(Sysno::landlock_restrict_self, &[]),
            call(Sysno::seccomp, &[]),
            call(Sysno::capset, &[]),
            call(Sysno::setgroups, &[]),
            call(Sysno::keyctl, &[1]),
            call(Sysno::prctl, &[24]),
            call(Sysno::prctl, &[28]),
            call(Sysno::prctl, &[22]),
        ];
        for each in set_up {
            assert_eq!(answer(&it.first, &each), ALLOW);
            assert_eq!(answer(&it.all, &each), errno(EPERM));
        }
        assert_eq!(answer(&it.first, &call(Sysno::keyctl, &[2])), errno(EPERM));
        assert_eq!(answer(&it.all, &call(Sysno::prctl, &[38])), ALLOW);
        for operation in [35, 62, 67, 59, 33] {
            assert_eq!(
                answer(&it.first, &call(Sysno::prctl, &[operation])),
                errno(EPERM),
                "prctl {operation}"
            );
        }
    }

    #[test]
    fn a_wrong_architecture_is_killed() {
        let it = default_layers();
        let mut foreign = call(Sysno::read, &[]);
        foreign.0[4..8].copy_from_slice(&I386.to_ne_bytes());
        for program in it.all.iter().chain([&it.init]) {
            assert_eq!(run(program, &foreign), KILL);
        }
        if cfg!(target_arch = "x86_64") {
            assert_eq!(answer(&it.all, &data(X32_BIT | 39, &[])), KILL);
        }
    }

    #[test]
    fn arguments_are_judged_by_what_the_kernel_reads() {
        let it = default_layers();
        let high = 1_u64 << 32;
        let cases = [
            (call(Sysno::socket, &[1, 1, 0]), true),
            (call(Sysno::socket, &[1, 0x80802, 0]), true),
            (call(Sysno::socket, &[2, 0x80001, 6]), true),
            (call(Sysno::socket, &[10, 2, 17]), true),
            (call(Sysno::socket, &[2, 1, 262]), false), // MPTCP
            (call(Sysno::socket, &[2, 2, 1]), false),   // ping
            (call(Sysno::socket, &[2, 3, 255]), false), // raw
            (call(Sysno::socket, &[16, 3, 0]), false),  // netlink
            (call(Sysno::socket, &[16 | high, 3, 0]), false),
            (call(Sysno::socket, &[40, 1, 0]), false), // vsock
            (call(Sysno::socket, &[1, 3, 0]), false),
            (call(Sysno::socketpair, &[1, 5, 0]), true),
            (call(Sysno::socketpair, &[2, 1, 0]), false),
            (call(Sysno::clone, &[0x3d0f00]), true),     // a thread
            (call(Sysno::clone, &[0x1200011]), true),    // a fork
            (call(Sysno::clone, &[0x1000_0000]), false), // CLONE_NEWUSER
            (call(Sysno::clone, &[0x1000_0000 | 1 << 40]), false),
            (call(Sysno::clone, &[0x80]), false), // CLONE_NEWTIME
            (call(Sysno::ioctl, &[0, 0x5401]), true),
            (call(Sysno::ioctl, &[0, 0x5401 | high]), true),
            (call(Sysno::ioctl, &[0, 0x5412]), false), // TIOCSTI
            (call(Sysno::ioctl, &[0, 0x5412 | high]), false),
            (call(Sysno::ioctl, &[0, 0x541c]), false), // TIOCLINUX
            (call(Sysno::ioctl, &[0, 0x4004_9409]), false), // FICLONE
            (call(Sysno::madvise, &[0, 0, 14]), true),
            (call(Sysno::madvise, &[0, 0, 12]), false),
            (call(Sysno::madvise, &[0, 0, 12 | high]), false),
            (call(Sysno::personality, &[0xffff_ffff]), true),
            (call(Sysno::personality, &[0x40000]), false),
            (call(Sysno::memfd_create, &[0, 1]), true),
            (call(Sysno::memfd_create, &[0, 4]), false),
            (call(Sysno::execveat, &[0, 0, 0, 0, 0x100]), true),
            (call(Sysno::execveat, &[0, 0, 0, 0, 0x1000]), false),
            (call(Sysno::prlimit64, &[7]), true),
        ];
        for (data, passes) in cases {
            let want = if passes { ALLOW } else { errno(EPERM) };
            assert_eq!(answer(&it.all, &data), want, "{:?}", &data.0[..48]);
        }
    }

    #[test]
    fn the_core_limit_may_be_read_and_seems_to_be_lowered() {
        let it = default_layers();
        let high = 1_u64 << 32; // a pointer whose low half is empty
        let cases = [
            (call(Sysno::prlimit64, &[0, 4, 0, high]), ALLOW),
            (call(Sysno::prlimit64, &[0, 4, 8, 0]), errno(0)),
            (call(Sysno::prlimit64, &[0, 4, high, 0]), errno(0)),
            (call(Sysno::prlimit64, &[0, 4 | high, 8, 0]), errno(0)),
            (call(Sysno::prlimit64, &[7, 4, 8, 0]), errno(0)),
            // It could not be told what the limit was.
            (call(Sysno::prlimit64, &[0, 4, 8, high]), errno(EPERM)),
            (call(Sysno::prlimit64, &[0, 7, 8, 8]), ALLOW),
            (call(Sysno::setrlimit, &[4, 8]), errno(0)),
            (call(Sysno::setrlimit, &[7, 8]), ALLOW),
        ];
        for (data, want) in cases {
            assert_eq!(answer(&it.all, &data), want, "{:?}", &data.0[..48]);
            // While a guest is being made, its limit must be set.
            assert_eq!(answer(&it.first, &data), ALLOW);
        }
    }

    #[test]
    fn a_missing_layer_takes_its_entries_along() {
        let policy = load(None).expect("the defaults load").seccomp;
        let it = layers(
            &policy
                .without(Layer::NetworkNamespace)
                .without(Layer::PidNamespace)
                .without(Layer::IpcNamespace),
        );
        assert_eq!(answer(&it.all, &call(Sysno::socket, &[2, 2, 0])), errno(EPERM));
        // Streams and local sockets as well: they would be the host's.
        assert_eq!(answer(&it.all, &call(Sysno::socket, &[2, 1, 0])), errno(EPERM));
        assert_eq!(answer(&it.all, &call(Sysno::socket, &[1, 1, 0])), errno(EPERM));
        assert_eq!(answer(&it.all, &call(Sysno::socketpair, &[1, 1, 0])), ALLOW);
        assert_eq!(answer(&it.all, &call(Sysno::prlimit64, &[7])), errno(EPERM));
        assert_eq!(answer(&it.all, &call(Sysno::prlimit64, &[0])), ALLOW);
        assert_eq!(answer(&it.all, &call(Sysno::shmget, &[])), errno(EPERM));
    }

    #[test]
    fn init_can_wait_and_leave_and_nothing_else() {
        let it = default_layers();
        for name in
            [Sysno::read, Sysno::wait4, Sysno::exit_group, Sysno::rt_sigreturn, Sysno::restart_syscall]
        {
            assert_eq!(run(&it.init, &call(name, &[])), ALLOW, "{name}");
        }
        for name in [
            Sysno::execve,
            Sysno::openat,
            Sysno::clone,
            Sysno::mmap,
            Sysno::kill,
            Sysno::socket,
            Sysno::prctl,
        ] {
            assert_eq!(run(&it.init, &call(name, &[])), errno(EPERM), "{name}");
        }
    }

    #[test]
    fn every_known_call_has_an_answer_of_ours() {
        let it = default_layers();
        for name in Sysno::iter() {
            let value = answer(&it.all, &call(name, &[0; 6]));
            assert!([ALLOW, errno(EPERM), errno(ENOSYS)].contains(&value), "{name}: {value:#x}");
        }
    }

    #[test]
    fn programs_fit_the_kernel() {
        let it = default_layers();
        for program in it.all.iter().chain([&it.init]) {
            assert!((1..=INSTRUCTIONS_MAX).contains(&usize::from(program.instructions())));
        }
    }
}
