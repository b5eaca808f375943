//! A launched interpreter and the cells it is given.

use std::fs::File;
use std::io::{Read, Write};
use std::os::fd::{AsFd, OwnedFd};
use std::sync::Arc;
use std::time::{Duration, Instant};

use caisson::launcher::plan::{Attestation, SandboxId, SpaceId};
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use serde_json::{Value, json};

use super::{Stand, proc, scaled};

/// How long a cell may run on a busy machine.
const CELL_MAX: Duration = Duration::from_secs(60);

/// Three processes that have left their session and parent, and ignore what can be ignored.
pub(crate) const STUBBORN: &str = r#"
import os, signal, time
for n in range(3):
    if os.fork() == 0:
        os.setsid()
        if os.fork():
            os._exit(0)
        for number in (signal.SIGTERM, signal.SIGHUP, signal.SIGINT, signal.SIGQUIT, signal.SIGPIPE):
            signal.signal(number, signal.SIG_IGN)
        for fd in range(5):
            try: os.close(fd)
            except OSError: pass
        while True:
            time.sleep(1)
print("up")
"#;

/// A sandbox with its interpreter. Dropping it ends it.
pub(crate) struct Guest {
    pub(crate) stand: Arc<Stand>,
    pub(crate) space: SpaceId,
    pub(crate) sandbox: SandboxId,
    pub(crate) attestation: Attestation,
    /// Requests, events, stdout, stderr.
    pub(crate) pipes: [File; 4],
    /// The daemon's view of its workspace, where the plan asked for one.
    pub(crate) view: Option<OwnedFd>,
    cells: u64,
    events: Vec<u8>,
}

/// What came of a cell.
#[derive(Debug, Default)]
pub(crate) struct Cell {
    pub(crate) stdout: String,
    pub(crate) stderr: String,
    pub(crate) error: Option<String>,
    /// The interpreter ended over it.
    pub(crate) ended: bool,
}

impl Guest {
    pub(crate) fn new(
        stand: Arc<Stand>,
        space: SpaceId,
        sandbox: SandboxId,
        attestation: Attestation,
        mut descriptors: Vec<OwnedFd>,
    ) -> Guest {
        let view = (descriptors.len() == 5).then(|| descriptors.pop()).flatten();
        let pipes = <[OwnedFd; 4]>::try_from(descriptors).expect("a launch comes with four descriptors");
        Guest {
            stand,
            space,
            sandbox,
            attestation,
            pipes: pipes.map(File::from),
            view,
            cells: 0,
            events: Vec::new(),
        }
    }

    /// Runs a cell and gives its output; any error fails the test.
    pub(crate) fn say(&mut self, code: &str) -> String {
        let cell = self.cell(code);
        assert!(cell.error.is_none() && !cell.ended, "{cell:?} of\n{code}\n{}", self.stand.log());
        cell.stdout.trim_end().to_owned()
    }

    /// Runs a cell whose output is JSON.
    pub(crate) fn ask(&mut self, code: &str) -> Value {
        let text = self.say(code);
        serde_json::from_str(&text).unwrap_or_else(|error| panic!("{error}: {text}"))
    }

    /// Runs a cell.
    pub(crate) fn cell(&mut self, code: &str) -> Cell {
        self.frame(json!({"code": code, "timeout_ms": scaled(CELL_MAX).as_millis() as u64}))
    }

    /// Sends a frame of any kind and waits for its end.
    pub(crate) fn frame(&mut self, mut frame: Value) -> Cell {
        self.cells += 1;
        let nonce = format!("cell-{}", self.cells);
        frame["nonce"] = nonce.clone().into();
        let mut cell = Cell::default();
        if self.pipes[0].write_all(format!("{frame}\n").as_bytes()).is_err() {
            cell.ended = true;
            return cell;
        }
        let (mut stdout, mut stderr) = (Vec::new(), Vec::new());
        let deadline = Instant::now() + scaled(CELL_MAX);
        let done = loop {
            if let Some(done) = self.take_done(&nonce) {
                break done;
            }
            let left = deadline.saturating_duration_since(Instant::now());
            assert!(!left.is_zero(), "a cell took more than {} s: {frame}", scaled(CELL_MAX).as_secs());
            if !self.take_output(left, &mut stdout, &mut stderr) {
                cell.ended = true;
                break Value::Null;
            }
        };
        // What was written before the end is in the pipes by now.
        while self.output_waits() && self.take_output(Duration::ZERO, &mut stdout, &mut stderr) {}
        if !done["error"].is_null() {
            cell.error = Some(done["error"].to_string());
        }
        cell.stdout = String::from_utf8_lossy(&stdout).into_owned();
        cell.stderr = String::from_utf8_lossy(&stderr).into_owned();
        cell
    }

    fn take_done(&mut self, nonce: &str) -> Option<Value> {
        while let Some(at) = self.events.iter().position(|byte| *byte == b'\n') {
            let line: Vec<u8> = self.events.drain(..=at).collect();
            let event: Value = serde_json::from_slice(&line).unwrap_or(Value::Null);
            if event["nonce"] == nonce && event["event"] == "done" {
                return Some(event);
            }
        }
        None
    }

    fn output_waits(&self) -> bool {
        let mut waiting =
            [PollFd::new(&self.pipes[2], PollFlags::IN), PollFd::new(&self.pipes[3], PollFlags::IN)];
        let now = Timespec { tv_sec: 0, tv_nsec: 0 };
        // A hang-up alone is no output.
        poll(&mut waiting, Some(&now)).is_ok()
            && waiting.iter().any(|one| one.revents().contains(PollFlags::IN))
    }

    /// False when the interpreter has closed its events.
    fn take_output(&mut self, max: Duration, stdout: &mut Vec<u8>, stderr: &mut Vec<u8>) -> bool {
        let ready = {
            let mut waiting = [1, 2, 3].map(|at: usize| PollFd::new(&self.pipes[at], PollFlags::IN));
            let max = Timespec { tv_sec: max.as_secs() as i64, tv_nsec: max.subsec_nanos().into() };
            poll(&mut waiting, Some(&max)).expect("poll of pipes");
            waiting.map(|one| one.revents())
        };
        let mut buffer = [0; 65_536];
        for (at, revents) in ready.into_iter().enumerate() {
            if !revents.contains(PollFlags::IN) {
                continue;
            }
            let length = self.pipes[at + 1].read(&mut buffer).unwrap_or(0);
            match at {
                0 => self.events.extend_from_slice(&buffer[..length]),
                1 => stdout.extend_from_slice(&buffer[..length]),
                _ => stderr.extend_from_slice(&buffer[..length]),
            }
        }
        !ready[0].contains(PollFlags::HUP) || ready[0].contains(PollFlags::IN)
    }

    /// The guest's pid on the host.
    pub(crate) fn pid(&self) -> i32 {
        self.pid_of(self.attestation.host_uid, 2)
    }

    /// Its init's pid on the host: the first id of the leased block.
    pub(crate) fn init(&self) -> i32 {
        let namespace = proc::namespace(self.pid(), "pid");
        let same = |pid: &i32| {
            proc::namespace(*pid, "pid") == namespace && proc::pids_in_namespaces(*pid).last() == Some(&1)
        };
        proc::all().into_iter().find(same).expect("a live guest has an init")
    }

    /// The process of this uid on the host that has this pid inside.
    pub(crate) fn pid_of(&self, uid: u32, inner: i32) -> i32 {
        let same =
            |pid: &i32| proc::uid(*pid) == Some(uid) && proc::pids_in_namespaces(*pid).last() == Some(&inner);
        proc::all().into_iter().find(same).expect("a live guest is a process")
    }

    /// Whether it was forked from a zygote rather than exec'd.
    pub(crate) fn is_fork(&self) -> bool {
        proc::arguments(self.pid()).iter().any(|word| word.ends_with("/zygote.py"))
    }

    /// Ends it and waits until the launcher says so.
    pub(crate) fn end(self) {
        let (stand, sandbox) = (Arc::clone(&self.stand), self.sandbox);
        drop(self);
        assert!(stand.end_of(sandbox, Duration::from_secs(20)).is_some(), "a sandbox did not end");
    }

    /// Type of each descriptor that came with the launch.
    pub(crate) fn descriptor_types(&self) -> Vec<rustix::fs::FileType> {
        let kind = |file: &File| {
            let stat = rustix::fs::fstat(file.as_fd()).expect("an open descriptor");
            rustix::fs::FileType::from_raw_mode(stat.st_mode)
        };
        self.pipes.iter().map(kind).collect()
    }
}

impl Drop for Guest {
    fn drop(&mut self) {
        self.stand.end(self.sandbox);
    }
}
