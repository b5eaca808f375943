//! The whole vocabulary between daemon and launcher, as plain data.
//!
//! A plan carries ids, numbers and flags, never paths, uids, pids or mount sources: whatever a taken
//! daemon can write on the launcher's socket, it cannot name anything the launcher did not make itself.
//! Every message from the daemon is one packet of exactly [`REQUEST_BYTES`]; anything else is refused.
//!
//! This module makes no system call: it can be read, printed, compared and tested on any machine.
#![forbid(unsafe_code)]

use std::fmt;

use serde::{Deserialize, Serialize};

/// Size of one request packet, daemon to launcher.
pub const REQUEST_BYTES: usize = 48;
/// Size of one reply packet, launcher to daemon (the greeting alone is longer: it carries JSON).
pub const REPLY_BYTES: usize = 48;
/// Largest greeting packet, launcher to daemon.
pub const HELLO_BYTES_MAX: usize = 32 * 1024;

/// A space by the number the daemon's store gave it. The launcher resolves it to a folder itself.
#[derive(Copy, Clone, Debug, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
pub struct SpaceId(pub u64);

/// Set in the number of every space that lies in memory.
const TRANSIENT: u64 = 1 << 63;

impl SpaceId {
    /// Beyond the highest number that a store ever comes to.
    pub const GIVEN_MAX: SpaceId = SpaceId(1 << 48);

    /// A space in memory, for one sandbox. It is there until it is deleted, or for a while after its sandbox.
    pub const fn transient(number: u64) -> SpaceId {
        SpaceId(number | TRANSIENT)
    }

    pub fn is_transient(self) -> bool {
        self.0 & TRANSIENT != 0
    }
}

/// A live sandbox; given out by the launcher, never reused during its life.
#[derive(Copy, Clone, Debug, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
pub struct SandboxId(pub u64);

impl fmt::Display for SpaceId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}", self.0)
    }
}

impl fmt::Display for SandboxId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}", self.0)
    }
}

/// Which interpreter runs, and with what loaded.
#[derive(Copy, Clone, Debug, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Profile {
    /// CPython with nothing but the harness.
    Python,
    /// CPython with numpy, pandas and pyplot loaded.
    PythonData,
    /// Node.js.
    Node,
    /// CPython with the data stack and an IPython shell.
    Kernel,
    /// The space helper: our own program, as the file planes' eyes and hands in a space.
    Files,
    /// The command agent: our own program, which starts a session's commands.
    Commands,
}

impl Profile {
    /// All of them, in wire order.
    pub const ALL: [Profile; 6] = [
        Profile::Python,
        Profile::PythonData,
        Profile::Node,
        Profile::Kernel,
        Profile::Files,
        Profile::Commands,
    ];
    /// Those that run cells.
    pub const INTERPRETERS: [Profile; 4] =
        [Profile::Python, Profile::PythonData, Profile::Node, Profile::Kernel];

    /// The profile of the zygote that makes it.
    pub fn zygote(self) -> Profile {
        if self == Profile::Kernel { Profile::PythonData } else { self }
    }

    /// Name as shown in `/health` and logs.
    pub fn name(self) -> &'static str {
        match self {
            Profile::Python => "python",
            Profile::PythonData => "python-data",
            Profile::Node => "node",
            Profile::Kernel => "kernel",
            Profile::Files => "files",
            Profile::Commands => "commands",
        }
    }
}

/// Where the interpreter comes from.
#[derive(Copy, Clone, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Origin {
    /// A fork of the profile's zygote where one serves, else a fresh exec.
    Warm,
    /// Always a fresh exec: own address-space layout and hash seed.
    Strict,
}

/// Index into the sandbox's generated accounts (`policies/accounts.toml`); 0 is `sandbox`.
#[derive(Copy, Clone, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub struct Account(pub u8);

/// What to launch.
#[derive(Copy, Clone, Debug, PartialEq, Eq)]
pub struct LaunchPlan {
    pub space: SpaceId,
    pub profile: Profile,
    pub origin: Origin,
    pub account: Account,
    /// Which of the kernels' interpreters, by its place in [`crate::launcher::posture::Hello::kernels`]; 0 for every
    /// other profile.
    pub interpreter: u8,
    /// A descriptor of the workspace comes with the sandbox: the daemon's own view of it.
    pub view: bool,
    /// A program that is thrown away after it: bounded more closely where the operator asks for it.
    pub throwaway: bool,
}

impl LaunchPlan {
    /// For the sandbox's first account, in nobody's view, and kept as long as it lives.
    pub fn new(space: SpaceId, profile: Profile, origin: Origin) -> LaunchPlan {
        LaunchPlan {
            space,
            profile,
            origin,
            account: Account(0),
            interpreter: 0,
            view: false,
            throwaway: false,
        }
    }
}

/// Daemon to launcher. `seq` must grow from packet to packet; a repeated or older one is refused.
#[derive(Copy, Clone, Debug, PartialEq, Eq)]
pub enum Request {
    Launch {
        seq: u64,
        plan: LaunchPlan,
    },
    End {
        seq: u64,
        sandbox: SandboxId,
    },
    /// Ends the space's sandboxes and deletes its files.
    DeleteSpace {
        seq: u64,
        space: SpaceId,
    },
    /// Sends SIGINT to the interpreter and to what it started in its process group, as Ctrl-C would.
    Interrupt {
        seq: u64,
        sandbox: SandboxId,
    },
}

/// How a sandbox ended, from the launcher's own books.
#[derive(Copy, Clone, Debug, PartialEq, Eq)]
pub enum End {
    /// The interpreter exited with this status.
    Exited(u8),
    /// A signal killed it.
    Signaled(u8),
    /// Its cgroup ran out of memory.
    OutOfMemory,
    /// The launcher ended it because it was asked to.
    Ended,
    /// It did not match what its posture promises; an alarm was raised.
    Mismatch,
    /// Its space held more than it may, where no file system bounds it.
    SpaceFull,
    /// It had all the processor time it may have.
    CpuSpent,
    /// The launcher is gone, and everything below it. The client's own word.
    LauncherGone,
}

/// A step of making or confining a sandbox, for messages that say which one failed.
#[derive(Copy, Clone, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[repr(u8)]
#[serde(rename_all = "kebab-case")]
pub enum Step {
    Plan = 1,
    Lease,
    Cgroup,
    Clone,
    IdMaps,
    SpaceOpen,
    SpaceMount,
    InitExec,
    InitIdentity,
    InitCgroupNamespace,
    InitProc,
    InitSysctl,
    InitDev,
    InitSpaceMounts,
    InitLoopback,
    InitRuleset,
    InitDrop,
    Namespaces,
    MoveIn,
    Thread,
    Descriptors,
    WorkingDirectory,
    Rlimits,
    BoundingSet,
    Securebits,
    Identity,
    Capabilities,
    NoNewPrivs,
    Landlock,
    Seccomp,
    Stop,
    Release,
    Exec,
    Zygote,
    Timeout,
    SpaceView,
}

impl Step {
    /// From the byte a child wrote; `None` for a byte that names no step.
    pub fn from_byte(byte: u8) -> Option<Step> {
        ALL_STEPS.iter().copied().find(|step| *step as u8 == byte)
    }

    /// Words for a message: "failed to apply {step}".
    pub fn words(self) -> &'static str {
        match self {
            Step::Plan => "check the plan",
            Step::Lease => "lease user ids",
            Step::Cgroup => "create the cgroup",
            Step::Clone => "create namespaces",
            Step::IdMaps => "write the id maps",
            Step::SpaceOpen => "open the space",
            Step::SpaceMount => "mount the space",
            Step::InitExec => "start init",
            Step::InitIdentity => "switch init's identity",
            Step::InitCgroupNamespace => "create the cgroup namespace",
            Step::InitProc => "mount /proc",
            Step::InitSysctl => "bound the user namespace's limits",
            Step::InitDev => "mount /dev",
            Step::InitSpaceMounts => "attach the space",
            Step::InitLoopback => "raise the loopback interface",
            Step::InitRuleset => "build the Landlock ruleset",
            Step::InitDrop => "drop init's privileges",
            Step::Namespaces => "open the namespaces",
            Step::MoveIn => "move into the shell",
            Step::Thread => "repair the thread state",
            Step::Descriptors => "set up descriptors",
            Step::WorkingDirectory => "change the working directory",
            Step::Rlimits => "set resource limits",
            Step::BoundingSet => "drop the bounding set",
            Step::Securebits => "lock the securebits",
            Step::Identity => "switch identity",
            Step::Capabilities => "clear capabilities",
            Step::NoNewPrivs => "set no_new_privs",
            Step::Landlock => "apply Landlock rules",
            Step::Seccomp => "install the seccomp filter",
            Step::Stop => "wait for release",
            Step::Release => "verify the confinement from outside",
            Step::Exec => "execute the interpreter",
            Step::Zygote => "reach the zygote",
            Step::Timeout => "finish in time",
            Step::SpaceView => "show the workspace to the daemon",
        }
    }
}

impl fmt::Display for Step {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.words())
    }
}

const ALL_STEPS: [Step; 36] = [
    Step::Plan,
    Step::Lease,
    Step::Cgroup,
    Step::Clone,
    Step::IdMaps,
    Step::SpaceOpen,
    Step::SpaceMount,
    Step::InitExec,
    Step::InitIdentity,
    Step::InitCgroupNamespace,
    Step::InitProc,
    Step::InitSysctl,
    Step::InitDev,
    Step::InitSpaceMounts,
    Step::InitLoopback,
    Step::InitRuleset,
    Step::InitDrop,
    Step::Namespaces,
    Step::MoveIn,
    Step::Thread,
    Step::Descriptors,
    Step::WorkingDirectory,
    Step::Rlimits,
    Step::BoundingSet,
    Step::Securebits,
    Step::Identity,
    Step::Capabilities,
    Step::NoNewPrivs,
    Step::Landlock,
    Step::Seccomp,
    Step::Stop,
    Step::Release,
    Step::Exec,
    Step::Zygote,
    Step::Timeout,
    Step::SpaceView,
];

/// What the launcher read from outside before the first guest byte. Goes into the audit record.
#[derive(Copy, Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Attestation {
    /// Uid of the guest on the host.
    pub host_uid: u32,
    /// Seccomp filters found on the guest.
    pub seccomp_filters: u8,
    /// Namespaces that differ from the launcher's own, of seven.
    pub namespaces: u8,
}

/// Launcher to daemon.
#[derive(Copy, Clone, Debug, PartialEq, Eq)]
pub enum Reply {
    /// Carries four descriptors: requests (write), events (read), stdout (read), stderr (read); and a fifth, the
    /// folder of the workspace, where the plan asked for a view.
    Launched {
        seq: u64,
        sandbox: SandboxId,
        attestation: Attestation,
    },
    LaunchFailed {
        seq: u64,
        step: Step,
        errno: i32,
    },
    Ended {
        sandbox: SandboxId,
        end: End,
    },
    SpaceDeleted {
        seq: u64,
        errno: i32,
    },
    /// The signal has been sent, or there was nobody to send it to.
    Interrupted {
        seq: u64,
    },
    /// After the greeting: an earlier launcher has left this space. Whether it is still somebody's is not known here.
    SpaceFound {
        space: SpaceId,
    },
}

/// A packet that is no message of this vocabulary.
#[derive(Copy, Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("packet is not a message of the launcher's protocol")]
pub struct Malformed;

impl Request {
    pub fn seq(&self) -> u64 {
        match self {
            Request::Launch { seq, .. }
            | Request::End { seq, .. }
            | Request::DeleteSpace { seq, .. }
            | Request::Interrupt { seq, .. } => *seq,
        }
    }

    pub fn encode(&self) -> [u8; REQUEST_BYTES] {
        let mut out = [0_u8; REQUEST_BYTES];
        out[8..16].copy_from_slice(&self.seq().to_le_bytes());
        match self {
            Request::Launch { plan, .. } => {
                out[0] = 1;
                out[16..24].copy_from_slice(&plan.space.0.to_le_bytes());
                out[24] = plan.profile as u8;
                out[25] = plan.origin as u8;
                out[26] = plan.account.0;
                out[27] = plan.interpreter;
                out[28] = u8::from(plan.view);
                out[29] = u8::from(plan.throwaway);
            }
            Request::End { sandbox, .. } => {
                out[0] = 2;
                out[16..24].copy_from_slice(&sandbox.0.to_le_bytes());
            }
            Request::DeleteSpace { space, .. } => {
                out[0] = 3;
                out[16..24].copy_from_slice(&space.0.to_le_bytes());
            }
            Request::Interrupt { sandbox, .. } => {
                out[0] = 4;
                out[16..24].copy_from_slice(&sandbox.0.to_le_bytes());
            }
        }
        out
    }

    /// Strict: a wrong length, an unknown code or a nonzero reserved byte is refused.
    pub fn decode(packet: &[u8]) -> Result<Request, Malformed> {
        let packet: &[u8; REQUEST_BYTES] = packet.try_into().map_err(|_| Malformed)?;
        let reserved = if packet[0] == 1 { 30 } else { 24 };
        if packet[1..8].iter().chain(&packet[reserved..]).any(|byte| *byte != 0) {
            return Err(Malformed);
        }
        let seq = u64_at(packet, 8);
        let id = u64_at(packet, 16);
        match packet[0] {
            1 => Ok(Request::Launch {
                seq,
                plan: LaunchPlan {
                    space: SpaceId(id),
                    profile: *Profile::ALL.get(usize::from(packet[24])).ok_or(Malformed)?,
                    origin: match packet[25] {
                        0 => Origin::Warm,
                        1 => Origin::Strict,
                        _ => return Err(Malformed),
                    },
                    account: Account(packet[26]),
                    interpreter: packet[27],
                    view: flag(packet[28])?,
                    throwaway: flag(packet[29])?,
                },
            }),
            2 => Ok(Request::End { seq, sandbox: SandboxId(id) }),
            3 => Ok(Request::DeleteSpace { seq, space: SpaceId(id) }),
            4 => Ok(Request::Interrupt { seq, sandbox: SandboxId(id) }),
            _ => Err(Malformed),
        }
    }
}

impl Reply {
    pub fn encode(&self) -> [u8; REPLY_BYTES] {
        let mut out = [0_u8; REPLY_BYTES];
        match *self {
            Reply::Launched { seq, sandbox, attestation } => {
                out[0] = 1;
                out[8..16].copy_from_slice(&seq.to_le_bytes());
                out[16..24].copy_from_slice(&sandbox.0.to_le_bytes());
                out[24..28].copy_from_slice(&attestation.host_uid.to_le_bytes());
                out[28] = attestation.seccomp_filters;
                out[29] = attestation.namespaces;
            }
            Reply::LaunchFailed { seq, step, errno } => {
                out[0] = 2;
                out[1] = step as u8;
                out[8..16].copy_from_slice(&seq.to_le_bytes());
                out[16..20].copy_from_slice(&errno.to_le_bytes());
            }
            Reply::Ended { sandbox, end } => {
                out[0] = 3;
                out[16..24].copy_from_slice(&sandbox.0.to_le_bytes());
                (out[1], out[2]) = match end {
                    End::Exited(status) => (0, status),
                    End::Signaled(signal) => (1, signal),
                    End::OutOfMemory => (2, 0),
                    End::Ended => (3, 0),
                    End::Mismatch => (4, 0),
                    End::LauncherGone => (5, 0),
                    End::SpaceFull => (6, 0),
                    End::CpuSpent => (7, 0),
                };
            }
            Reply::SpaceDeleted { seq, errno } => {
                out[0] = 4;
                out[8..16].copy_from_slice(&seq.to_le_bytes());
                out[16..20].copy_from_slice(&errno.to_le_bytes());
            }
            Reply::Interrupted { seq } => {
                out[0] = 5;
                out[8..16].copy_from_slice(&seq.to_le_bytes());
            }
            Reply::SpaceFound { space } => {
                out[0] = 6;
                out[16..24].copy_from_slice(&space.0.to_le_bytes());
            }
        }
        out
    }

    pub fn decode(packet: &[u8]) -> Result<Reply, Malformed> {
        let packet: &[u8; REPLY_BYTES] = packet.try_into().map_err(|_| Malformed)?;
        let seq = u64_at(packet, 8);
        let id = u64_at(packet, 16);
        let word = [packet[16], packet[17], packet[18], packet[19]];
        match packet[0] {
            1 => Ok(Reply::Launched {
                seq,
                sandbox: SandboxId(id),
                attestation: Attestation {
                    host_uid: u32::from_le_bytes([packet[24], packet[25], packet[26], packet[27]]),
                    seccomp_filters: packet[28],
                    namespaces: packet[29],
                },
            }),
            2 => Ok(Reply::LaunchFailed {
                seq,
                step: Step::from_byte(packet[1]).ok_or(Malformed)?,
                errno: i32::from_le_bytes(word),
            }),
            3 => Ok(Reply::Ended {
                sandbox: SandboxId(id),
                end: match packet[1] {
                    0 => End::Exited(packet[2]),
                    1 => End::Signaled(packet[2]),
                    2 => End::OutOfMemory,
                    3 => End::Ended,
                    4 => End::Mismatch,
                    5 => End::LauncherGone,
                    6 => End::SpaceFull,
                    7 => End::CpuSpent,
                    _ => return Err(Malformed),
                },
            }),
            4 => Ok(Reply::SpaceDeleted { seq, errno: i32::from_le_bytes(word) }),
            5 => Ok(Reply::Interrupted { seq }),
            6 => Ok(Reply::SpaceFound { space: SpaceId(id) }),
            _ => Err(Malformed),
        }
    }
}

fn flag(byte: u8) -> Result<bool, Malformed> {
    match byte {
        0 => Ok(false),
        1 => Ok(true),
        _ => Err(Malformed),
    }
}

fn u64_at(packet: &[u8], at: usize) -> u64 {
    let mut word = [0_u8; 8];
    word.copy_from_slice(&packet[at..at + 8]);
    u64::from_le_bytes(word)
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    #[test]
    fn every_step_survives_its_byte() {
        for step in ALL_STEPS {
            assert_eq!(Step::from_byte(step as u8), Some(step));
        }
        assert_eq!(Step::from_byte(0), None);
        assert_eq!(Step::from_byte(255), None);
    }

    #[test]
    fn requests_survive_the_wire() {
        let plan = LaunchPlan {
            space: SpaceId(u64::MAX - 3),
            profile: Profile::Node,
            origin: Origin::Strict,
            account: Account(7),
            interpreter: 3,
            view: true,
            throwaway: true,
        };
        for request in [
            Request::Launch { seq: 9, plan },
            Request::End { seq: 10, sandbox: SandboxId(4) },
            Request::DeleteSpace { seq: 11, space: SpaceId(2) },
            Request::Interrupt { seq: 12, sandbox: SandboxId(5) },
        ] {
            assert_eq!(Request::decode(&request.encode()), Ok(request));
        }
    }

    #[test]
    fn replies_survive_the_wire() {
        let attestation = Attestation { host_uid: 1_879_048_193, seccomp_filters: 3, namespaces: 7 };
        for reply in [
            Reply::Launched { seq: 1, sandbox: SandboxId(2), attestation },
            Reply::LaunchFailed { seq: 1, step: Step::Landlock, errno: 95 },
            Reply::Ended { sandbox: SandboxId(3), end: End::Signaled(9) },
            Reply::Ended { sandbox: SandboxId(3), end: End::OutOfMemory },
            Reply::Ended { sandbox: SandboxId(3), end: End::SpaceFull },
            Reply::Ended { sandbox: SandboxId(3), end: End::CpuSpent },
            Reply::SpaceDeleted { seq: 4, errno: 0 },
            Reply::Interrupted { seq: 5 },
            Reply::SpaceFound { space: SpaceId(6) },
        ] {
            assert_eq!(Reply::decode(&reply.encode()), Ok(reply));
        }
    }

    #[test]
    fn reserved_bytes_must_be_zero() {
        let mut packet = Request::End { seq: 1, sandbox: SandboxId(1) }.encode();
        packet[47] = 1;
        assert_eq!(Request::decode(&packet), Err(Malformed));
    }

    proptest! {
        #[test]
        fn no_packet_of_a_taken_daemon_is_misread(packet in proptest::collection::vec(any::<u8>(), 0..64)) {
            if let Ok(request) = Request::decode(&packet) {
                prop_assert_eq!(&request.encode()[..], &packet[..]);
            }
        }
    }
}
