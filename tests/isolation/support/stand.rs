//! A launcher of a test's own, and the daemon's end of its socket.

use std::collections::HashMap;
use std::fs::{self, File};
use std::io::{self, Read};
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::fs::{PermissionsExt, chown};
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, OnceLock};
use std::time::{Duration, Instant};

use caisson::config::{Config, Flags, Surroundings};
use caisson::launcher::cgroup::{Aside, step_aside};
use caisson::launcher::plan::{
    End, HELLO_BYTES_MAX, LaunchPlan, Origin, Profile, REPLY_BYTES, Reply, Request, SandboxId, SpaceId, Step,
};
use caisson::launcher::posture::{Hello, Posture};
use caisson::launcher::settings::Settings;
use caisson::launcher::spaces::SpaceLimits;
use caisson::supervisor::resolve;
use caisson::supervisor::stages::LauncherStart;
use caisson::sys::packet;
use rustix::event::{PollFd, PollFlags, Timespec, poll};

use super::{CAISSON, Guest, missing, proc, scaled};

/// How long a launcher may load its zygotes on a busy machine.
const HELLO_MAX: Duration = Duration::from_secs(150);
/// How long it may take over one answer: its own limit for a stage is 20 s.
const ANSWER_MAX: Duration = Duration::from_secs(45);
/// How long it may take to end.
const END_MAX: Duration = Duration::from_secs(20);

/// Takes the socket from its standard input and the settings from a file, as descriptors 3 and 4; removes the
/// directory when the launcher is gone, whatever has become of the test.
const START: &str = r#"
dir=$1; shift
exec 3<&0 4<"$dir/start.json" </dev/null 2>"$dir/log"
"$@"
status=$?
echo "$status" >"$dir/status"
if [ "$status" = 0 ]; then rm -rf "$dir"; else (sleep 5; rm -rf "$dir") 3<&- 4<&- & fi
exit $status
"#;
/// The same from a mount namespace whose root is shared, as systemd has it.
const START_SHARED: [&str; 8] =
    ["unshare", "--mount", "--propagation", "shared", "sh", "-c", "\"$@\"; exit $?", "shared"];
const START_PLAIN: [&str; 7] =
    ["unshare", "--pid", "--mount", "--propagation", "unchanged", "--fork", "--kill-child=KILL"];

/// What a host lacks, as a filter on the launcher makes it seem; `tests/probe/without.py` has the words.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Lack {
    UserNamespaces,
    Landlock,
    /// All of them, for the launcher as well.
    Namespaces,
    /// The same, for an ordinary account.
    NamespacesAndRoot,
}

/// An account that no other process has.
pub(crate) const ORDINARY: u32 = 1_234_567;

impl Lack {
    /// The words before a program that is to lack it.
    pub(crate) fn words(self) -> Vec<String> {
        let probe = concat!(env!("CARGO_MANIFEST_DIR"), "/tests/probe/without.py");
        let flag = match self {
            Lack::UserNamespaces => "--user-namespaces",
            Lack::Landlock => "--landlock",
            Lack::Namespaces | Lack::NamespacesAndRoot => "--namespaces",
        };
        let mut words: Vec<String> = Vec::new();
        if self == Lack::NamespacesAndRoot {
            let id = ORDINARY.to_string();
            words.extend(["setpriv", "--reuid", &id, "--regid", &id, "--clear-groups"].map(str::to_owned));
        }
        words.extend(["/usr/bin/python3", probe, flag, "--"].map(str::to_owned));
        words
    }

    fn alone(self) -> bool {
        matches!(self, Lack::Namespaces | Lack::NamespacesAndRoot)
    }
}

/// A launcher, and us in the daemon's seat. Ends with this value.
pub(crate) struct Stand {
    pub(crate) hello: Hello,
    pub(crate) dir: PathBuf,
    /// On the host.
    pub(crate) launcher: i32,
    wrapper: Mutex<Child>,
    seat: Mutex<Seat>,
    /// Ends that came while something else was waited for.
    ended: Mutex<HashMap<SandboxId, End>>,
}

/// Why there is no launcher.
#[derive(Debug)]
pub(crate) enum NotStarted {
    /// Not on this machine.
    Here(String),
    /// It ended at its start; what it has logged.
    Failed(String),
}

impl NotStarted {
    fn reason_to_skip(self) -> String {
        match self {
            NotStarted::Here(reason) => reason,
            NotStarted::Failed(log) => panic!("the launcher did not start: {log}"),
        }
    }
}

/// What a launch failed at.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Trouble {
    pub(crate) step: Step,
    pub(crate) errno: i32,
}

/// The daemon's end of the socket, for those who speak it badly.
pub(crate) struct Seat {
    pub(crate) socket: OwnedFd,
    pub(crate) seq: u64,
}

/// The stand of tests that need nothing special. Its launcher ends when this process does.
pub(crate) fn common() -> Result<Arc<Stand>, String> {
    static COMMON: OnceLock<Result<Arc<Stand>, String>> = OnceLock::new();
    COMMON.get_or_init(|| Stand::start(|_| {})).clone()
}

/// A space that no other test of this process has.
pub(crate) fn fresh_space() -> SpaceId {
    static NEXT: AtomicU64 = AtomicU64::new(100);
    SpaceId(NEXT.fetch_add(1, Ordering::Relaxed))
}

/// A fork of the bare zygote in `space`.
pub(crate) fn plan(space: SpaceId) -> LaunchPlan {
    LaunchPlan::new(space, Profile::Python, Origin::Warm)
}

/// An exec'd interpreter in `space`.
pub(crate) fn strict(space: SpaceId) -> LaunchPlan {
    LaunchPlan { origin: Origin::Strict, ..plan(space) }
}

/// The product's own defaults, with small spaces: they are made in every test.
pub(crate) fn settings(dir: &Path) -> Settings {
    let nothing = |_: &str| None;
    let around = Surroundings { root: true, python_env: super::python_env() };
    let (config, _) = Config::load(&Flags::default(), &nothing, None, &around).expect("the defaults resolve");
    let mut settings = resolve::settings(&config, "");
    settings.state_dir = dir.join("launcher");
    settings.space = SpaceLimits { bytes: 32 << 20, inodes: 2000 };
    settings
}

impl Stand {
    /// Starts a launcher with changed settings. The error is the reason to skip.
    pub(crate) fn start(change: impl FnOnce(&mut Settings)) -> Result<Arc<Stand>, String> {
        Stand::start_in(fresh_dir(), &[], change).map_err(NotStarted::reason_to_skip)
    }

    /// As [`Stand::start`], below a shared root.
    pub(crate) fn start_below_shared_root() -> Result<Arc<Stand>, String> {
        let started = Stand::start_in(fresh_dir(), &START_SHARED, |settings| {
            settings.shells_ready = 0;
            settings.zygotes_off = true;
        });
        started.map_err(NotStarted::reason_to_skip)
    }

    /// As [`Stand::start`], on a host that lacks something.
    pub(crate) fn start_lacking(
        lack: Lack,
        change: impl FnOnce(&mut Settings),
    ) -> Result<Arc<Stand>, String> {
        let dir = fresh_dir();
        fs::set_permissions(&dir, fs::Permissions::from_mode(0o755)).expect("a directory of our own");
        let change = |settings: &mut Settings| {
            settings.posture_floor = Posture::Process;
            if lack.alone() {
                settings.no_namespaces = Some("clone: refused for this test".to_owned());
            }
            if lack == Lack::NamespacesAndRoot {
                (settings.uid, settings.gid) = (ORDINARY, ORDINARY);
                chown(&settings.state_dir, Some(ORDINARY), Some(ORDINARY)).expect("we are root");
            }
            change(settings);
        };
        let plain: &[&str] = if lack.alone() { &["setpriv", "--pdeathsig", "KILL"] } else { &START_PLAIN };
        let words = lack.words();
        let words: Vec<&str> = plain.iter().copied().chain(words.iter().map(String::as_str)).collect();
        Stand::start_by(dir, &words, change).map_err(NotStarted::reason_to_skip)
    }

    /// Starts one over the state in `dir`, which goes away with it.
    pub(crate) fn start_in(
        dir: PathBuf,
        before: &[&str],
        change: impl FnOnce(&mut Settings),
    ) -> Result<Arc<Stand>, NotStarted> {
        Stand::start_by(dir, &[before, &START_PLAIN].concat(), change)
    }

    /// Starts one with these words before its own.
    fn start_by(
        dir: PathBuf,
        words: &[&str],
        change: impl FnOnce(&mut Settings),
    ) -> Result<Arc<Stand>, NotStarted> {
        if let Some(reason) = missing() {
            return Err(NotStarted::Here(reason.to_owned()));
        }
        // What `caisson serve` does before it starts a launcher; for as long as these tests run.
        static ASIDE: OnceLock<Option<Aside>> = OnceLock::new();
        ASIDE.get_or_init(step_aside);
        let mut settings = settings(&dir);
        fs::create_dir_all(&settings.state_dir).expect("a directory of our own");
        change(&mut settings);
        let start = LauncherStart { settings, log: "info".to_owned() };
        fs::write(dir.join("start.json"), serde_json::to_vec(&start).expect("settings have a JSON form"))
            .expect("a directory of our own");
        let (ours, theirs) = packet::pair().expect("a socket pair");
        let mut wrapper = Command::new("sh")
            .args(["-c", START, "launcher"])
            .arg(&dir)
            .args(words)
            .args([CAISSON, "launcher"])
            .env_clear()
            .env("PATH", "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin")
            .stdin(Stdio::from(theirs))
            .stdout(Stdio::null())
            .process_group(0)
            .spawn()
            .expect("a shell");
        let mut seat = Seat { socket: ours, seq: 0 };
        let mut buffer = vec![0; HELLO_BYTES_MAX];
        let hello = match seat.receive_into(&mut buffer, scaled(HELLO_MAX)) {
            Some((length, _)) if length > 0 => {
                serde_json::from_slice(&buffer[..length]).expect("a greeting is JSON")
            }
            _ => {
                drop(seat);
                let log = fs::read_to_string(dir.join("log")).unwrap_or_default();
                let status = wrapper.wait().ok().and_then(|status| status.code());
                // Gone already unless the host was not enough.
                let _ = fs::remove_dir_all(&dir);
                return Err(match status {
                    Some(3) => NotStarted::Here(format!("this host enforces less than posture full:\n{log}")),
                    _ => NotStarted::Failed(log),
                });
            }
        };
        let launcher = proc::descendant(wrapper.id() as i32, "caisson").expect("the launcher has greeted");
        Ok(Arc::new(Stand {
            hello,
            dir,
            launcher,
            wrapper: Mutex::new(wrapper),
            seat: Mutex::new(seat),
            ended: Mutex::new(HashMap::new()),
        }))
    }

    pub(crate) fn seat(&self) -> MutexGuard<'_, Seat> {
        self.seat.lock().unwrap_or_else(|poisoned| poisoned.into_inner())
    }

    /// What the launcher and what it started have logged.
    pub(crate) fn log(&self) -> String {
        fs::read_to_string(self.dir.join("log")).unwrap_or_default()
    }

    /// Launches and waits for the answer.
    pub(crate) fn launch(self: &Arc<Self>, plan: LaunchPlan) -> Result<Guest, Trouble> {
        let mut seat = self.seat();
        let seq = seat.next_seq();
        seat.send(&Request::Launch { seq, plan }.encode());
        let deadline = Instant::now() + scaled(ANSWER_MAX);
        loop {
            let Some((reply, descriptors)) = seat.reply(deadline.saturating_duration_since(Instant::now()))
            else {
                panic!("no answer to a launch; the launcher's log:\n{}", self.log());
            };
            match reply {
                Reply::Launched { seq: answered, sandbox, attestation } if answered == seq => {
                    return Ok(Guest::new(Arc::clone(self), plan.space, sandbox, attestation, descriptors));
                }
                Reply::LaunchFailed { seq: answered, step, errno } if answered == seq => {
                    return Err(Trouble { step, errno });
                }
                other => self.note(&other),
            }
        }
    }

    /// Asks for several at once, which must all come up.
    pub(crate) fn guests(self: &Arc<Self>, plan: LaunchPlan, count: usize) -> Vec<Guest> {
        let mut seat = self.seat();
        for _ in 0..count {
            let seq = seat.next_seq();
            seat.send(&Request::Launch { seq, plan }.encode());
        }
        let mut guests = Vec::new();
        let deadline = Instant::now() + ANSWER_MAX;
        while guests.len() < count {
            match seat.reply(deadline.saturating_duration_since(Instant::now())) {
                Some((Reply::Launched { sandbox, attestation, .. }, pipes)) => {
                    guests.push(Guest::new(Arc::clone(self), plan.space, sandbox, attestation, pipes));
                }
                Some((ended @ Reply::Ended { .. }, _)) => self.note(&ended),
                // Let go first: what is dropped takes the seat to end its sandbox.
                other => {
                    drop(seat);
                    panic!("{other:?}; the launcher's log:\n{}", self.log());
                }
            }
        }
        guests
    }

    /// Launches what must come up.
    pub(crate) fn guest(self: &Arc<Self>, plan: LaunchPlan) -> Guest {
        self.launch(plan).unwrap_or_else(|trouble| panic!("{trouble:?}; the launcher's log:\n{}", self.log()))
    }

    /// Shows that the launcher still does its work.
    pub(crate) fn still_launches(self: &Arc<Self>) {
        let space = fresh_space();
        assert_eq!(self.guest(strict(space)).say("print(6 * 7)"), "42");
        assert_eq!(self.delete_space(space), 0);
    }

    /// Asks for the end of a sandbox.
    pub(crate) fn end(&self, sandbox: SandboxId) {
        let mut seat = self.seat();
        let seq = seat.next_seq();
        // A launcher that is gone has ended it.
        let _ = packet::send(&seat.socket, &Request::End { seq, sandbox }.encode(), &[]);
    }

    /// Interrupts a sandbox's interpreter; true when the launcher says that it is done.
    pub(crate) fn interrupt(&self, sandbox: SandboxId) -> bool {
        let mut seat = self.seat();
        let seq = seat.next_seq();
        seat.send(&Request::Interrupt { seq, sandbox }.encode());
        let deadline = Instant::now() + scaled(ANSWER_MAX);
        while let Some((reply, _)) = seat.reply(deadline.saturating_duration_since(Instant::now())) {
            match reply {
                Reply::Interrupted { seq: answered } if answered == seq => return true,
                other => self.note(&other),
            }
        }
        false
    }

    /// Waits for the launcher's word on a sandbox's end.
    pub(crate) fn end_of(&self, sandbox: SandboxId, max: Duration) -> Option<End> {
        let deadline = Instant::now() + scaled(max);
        loop {
            if let Some(end) = self.ended().remove(&sandbox) {
                return Some(end);
            }
            if Instant::now() >= deadline {
                return None;
            }
            if let Some((reply, _)) = self.seat().reply(Duration::from_millis(50)) {
                self.note(&reply);
            }
        }
    }

    /// Deletes a space; the errno it was answered with, 0 for done.
    pub(crate) fn delete_space(&self, space: SpaceId) -> i32 {
        let mut seat = self.seat();
        let seq = seat.next_seq();
        seat.send(&Request::DeleteSpace { seq, space }.encode());
        let deadline = Instant::now() + scaled(ANSWER_MAX);
        while let Some((reply, _)) = seat.reply(deadline.saturating_duration_since(Instant::now())) {
            match reply {
                Reply::SpaceDeleted { seq: answered, errno } if answered == seq => return errno,
                other => self.note(&other),
            }
        }
        panic!("no answer to a deletion; the launcher's log:\n{}", self.log());
    }

    /// The zygote of a profile: its pid on the host.
    pub(crate) fn zygote(&self, profile: Profile) -> Option<i32> {
        proc::all().into_iter().find(|pid| {
            let words = proc::arguments(*pid);
            words.iter().any(|word| word.ends_with("/zygote.py"))
                && words.iter().any(|word| word == profile.name())
                && proc::parent(*pid) == Some(self.launcher)
                // Its forks have its arguments and its parent, and live in pid namespaces of their own.
                && proc::namespace(*pid, "pid") == proc::namespace(self.launcher, "pid")
        })
    }

    /// Waits for a serving zygote of the profile other than `before`.
    pub(crate) fn next_zygote(self: &Arc<Self>, profile: Profile, before: i32) -> i32 {
        let deadline = Instant::now() + scaled(Duration::from_secs(60));
        while Instant::now() < deadline {
            if let Some(pid) = self.zygote(profile).filter(|pid| *pid != before) {
                // It serves when a launch comes from it: the owner of the guest's user namespace tells.
                let guest = self.guest(LaunchPlan { profile, ..plan(fresh_space()) });
                if guest.is_fork() {
                    return pid;
                }
            }
            std::thread::sleep(Duration::from_millis(200));
        }
        panic!("no successor came; the launcher's log:\n{}", self.log());
    }

    fn ended(&self) -> MutexGuard<'_, HashMap<SandboxId, End>> {
        self.ended.lock().unwrap_or_else(|poisoned| poisoned.into_inner())
    }

    fn note(&self, reply: &Reply) {
        if let Reply::Ended { sandbox, end } = reply {
            self.ended().insert(*sandbox, *end);
        }
    }

    /// Lets the launcher go and waits for its end. Its directory goes as well.
    pub(crate) fn finish(&self) {
        {
            let mut seat = self.seat();
            let (other, _) = packet::pair().expect("a socket pair");
            seat.socket = other;
        }
        let mut wrapper = self.wrapper.lock().unwrap_or_else(|poisoned| poisoned.into_inner());
        let deadline = Instant::now() + scaled(END_MAX);
        while matches!(wrapper.try_wait(), Ok(None)) {
            if Instant::now() >= deadline {
                proc::kill(self.launcher);
                let _ = wrapper.wait();
            }
            std::thread::sleep(Duration::from_millis(5));
        }
    }
}

impl Drop for Stand {
    fn drop(&mut self) {
        self.finish();
    }
}

/// A new directory of root's own.
pub(crate) fn fresh_dir() -> PathBuf {
    tempfile::Builder::new().prefix("caisson-isolation-").tempdir().expect("a temporary directory").keep()
}

impl Seat {
    pub(crate) fn next_seq(&mut self) -> u64 {
        self.seq += 1;
        self.seq
    }

    pub(crate) fn send(&self, bytes: &[u8]) {
        packet::send(&self.socket, bytes, &[]).expect("the launcher reads");
    }

    pub(crate) fn send_with(&self, bytes: &[u8], files: &[&File]) -> io::Result<()> {
        let descriptors: Vec<_> = files.iter().map(|file| file.as_fd()).collect();
        packet::send(&self.socket, bytes, &descriptors)
    }

    /// The next answer to something asked: ends of what earlier tests had and spaces that they left are passed over.
    pub(crate) fn answer(&mut self, max: Duration) -> Option<(Reply, Vec<OwnedFd>)> {
        let deadline = Instant::now() + max;
        loop {
            match self.reply(deadline.saturating_duration_since(Instant::now()))? {
                (Reply::Ended { .. } | Reply::SpaceFound { .. }, _) => {}
                other => return Some(other),
            }
        }
    }

    /// The next packet, with what came along.
    pub(crate) fn reply(&mut self, max: Duration) -> Option<(Reply, Vec<OwnedFd>)> {
        let mut buffer = [0; REPLY_BYTES];
        let (length, descriptors) = self.receive_into(&mut buffer, max)?;
        assert!(length > 0, "the launcher is gone");
        Some((Reply::decode(&buffer[..length]).expect("the launcher speaks its protocol"), descriptors))
    }

    fn receive_into(&mut self, buffer: &mut [u8], max: Duration) -> Option<(usize, Vec<OwnedFd>)> {
        let mut waiting = [PollFd::new(&self.socket, PollFlags::IN)];
        let max = Timespec { tv_sec: max.as_secs() as i64, tv_nsec: max.subsec_nanos().into() };
        if poll(&mut waiting, Some(&max)).is_ok_and(|ready| ready == 0) {
            return None;
        }
        Some(
            packet::receive(&self.socket, buffer, rustix::net::RecvFlags::empty()).unwrap_or((0, Vec::new())),
        )
    }
}

/// All that a file says, or nothing.
pub(crate) fn text(path: impl AsRef<Path>) -> String {
    let mut text = Vec::new();
    if let Ok(mut file) = File::open(path) {
        // What could be read is what there is.
        let _ = file.read_to_end(&mut text);
    }
    String::from_utf8_lossy(&text).into_owned()
}
