//! The whole product, `caisson serve`, for tests that kill parts of it.

use std::fs;
use std::io::{Read, Write};
use std::net::{TcpListener, TcpStream};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use serde_json::{Value, json};

use super::stand::{Lack, text};
use super::{CAISSON, missing, proc, scaled};

/// How long it may take to serve on a busy machine: it loads the zygotes first.
const START_MAX: Duration = Duration::from_secs(150);

/// A supervisor with its launcher and daemon. Ends, with all that is below, with this value.
pub(crate) struct Service {
    pub(crate) dir: PathBuf,
    port: u16,
    supervisor: Child,
}

/// A process by its number and the time it started.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Who(pub(crate) i32, u64);

impl Who {
    pub(crate) fn of(pid: i32) -> Option<Who> {
        Some(Who(pid, proc::start_time(pid)?))
    }

    pub(crate) fn lives(self) -> bool {
        Who::of(self.0) == Some(self) && proc::lives(self.0)
    }
}

impl Service {
    /// Serves over the state in `dir`. The error is the reason to skip.
    pub(crate) fn start(dir: &Path) -> Result<Service, String> {
        Service::start_by(dir, &[], &[])
    }

    /// The same on a host that lacks something, whatever posture that leaves.
    pub(crate) fn start_lacking(dir: &Path, lack: Lack) -> Result<Service, String> {
        Service::start_by(dir, &lack.words(), &["--require-isolation", "process"])
    }

    fn start_by(dir: &Path, before: &[String], flags: &[&str]) -> Result<Service, String> {
        if let Some(reason) = missing() {
            return Err(reason.to_owned());
        }
        let port = {
            let free = TcpListener::bind("127.0.0.1:0").expect("a loopback port");
            free.local_addr().expect("it is bound").port()
        };
        let log = fs::OpenOptions::new().create(true).append(true).open(dir.join("log")).expect("our own");
        // Not to outlive this test, whatever becomes of it.
        let supervisor = Command::new("setpriv")
            .args(["--pdeathsig", "TERM"])
            .args(before)
            .args([CAISSON, "serve", "--listen", &format!("127.0.0.1:{port}")])
            .args(flags)
            .arg("--data-dir")
            .arg(dir.join("data"))
            .env_clear()
            .env("PATH", "/usr/sbin:/usr/bin:/sbin:/bin")
            // Kernels have a cap of their own, which is lower than the number of sessions that are made here.
            .env("AIO_CODE_BACKEND", "native")
            .stdin(Stdio::null())
            .stdout(Stdio::null())
            .stderr(log)
            .spawn()
            .expect("setpriv starts");
        let mut service = Service { dir: dir.to_owned(), port, supervisor };
        let deadline = Instant::now() + scaled(START_MAX);
        while service.run("start", "print(1)").is_none() {
            if let Ok(Some(status)) = service.supervisor.try_wait() {
                let log = text(service.dir.join("log"));
                assert_eq!(status.code(), Some(3), "it did not start: {log}");
                return Err(format!("this host enforces less than posture full:\n{log}"));
            }
            assert!(Instant::now() < deadline, "it does not serve: {}", text(service.dir.join("log")));
            std::thread::sleep(Duration::from_millis(100));
        }
        Ok(service)
    }

    /// Runs a cell in a session; what it printed, or nothing when there was no answer.
    pub(crate) fn run(&self, session: &str, code: &str) -> Option<String> {
        let answer = self.post(&json!({"language": "python", "code": code, "session_id": session}))?;
        (answer["data"]["status"] == "ok")
            .then(|| answer["data"]["stdout"].as_str().map(str::trim).map(str::to_owned))?
    }

    /// As [`Service::run`], until it answers: after a part was killed.
    pub(crate) fn run_soon(&self, session: &str, code: &str) -> String {
        let deadline = Instant::now() + scaled(START_MAX);
        loop {
            if let Some(out) = self.run(session, code) {
                return out;
            }
            assert!(Instant::now() < deadline, "no answer any more: {}", text(self.dir.join("log")));
            std::thread::sleep(Duration::from_millis(100));
        }
    }

    fn post(&self, body: &Value) -> Option<Value> {
        let mut stream = TcpStream::connect(("127.0.0.1", self.port)).ok()?;
        stream.set_read_timeout(Some(scaled(Duration::from_secs(60)))).ok()?;
        let body = body.to_string();
        let head = format!(
            "POST /v2/code/execute HTTP/1.1\r\nHost: 127.0.0.1:{}\r\nContent-Type: application/json\r\n\
             Content-Length: {}\r\nConnection: close\r\n\r\n",
            self.port,
            body.len()
        );
        stream.write_all(head.as_bytes()).ok()?;
        stream.write_all(body.as_bytes()).ok()?;
        let mut answer = String::new();
        stream.read_to_string(&mut answer).ok()?;
        serde_json::from_str(answer.split_once("\r\n\r\n")?.1).ok()
    }

    pub(crate) fn supervisor(&self) -> i32 {
        self.supervisor.id() as i32
    }

    /// A stage of the product: `launcher` or `daemon`.
    pub(crate) fn stage(&self, name: &str) -> Option<Who> {
        let children = |pid: i32| text(format!("/proc/{pid}/task/{pid}/children"));
        let mut found = children(self.supervisor())
            .split_whitespace()
            .filter_map(|word| word.parse().ok())
            .collect::<Vec<i32>>();
        found
            .retain(|pid| proc::arguments(*pid).get(1).is_some_and(|word| word == name) && proc::lives(*pid));
        found.first().copied().and_then(Who::of)
    }

    /// Every process below the launcher that runs in a sandbox.
    pub(crate) fn sandboxed(&self) -> Vec<Who> {
        let Some(launcher) = self.stage("launcher") else { return Vec::new() };
        let Some(own) = proc::namespace(launcher.0, "pid") else { return Vec::new() };
        let depth = proc::pids_in_namespaces(launcher.0).len();
        let inside = |pid: &i32| {
            proc::pids_in_namespaces(*pid).len() > depth
                && proc::namespace(*pid, "pid") != Some(own)
                && is_below(*pid, launcher.0)
        };
        proc::all().into_iter().filter(inside).filter_map(Who::of).collect()
    }

    /// Groups of a process that are sandboxes', as directories.
    pub(crate) fn groups_of(pid: i32) -> Vec<PathBuf> {
        let groups = text(format!("/proc/{pid}/cgroup"));
        let paths = groups.lines().filter(|line| line.contains("/caisson-")).filter_map(|line| {
            let mut fields = line.splitn(3, ':');
            let (_, controller, path) = (fields.next()?, fields.next()?, fields.next()?);
            Some(PathBuf::from(format!("/sys/fs/cgroup/{controller}{path}")))
        });
        paths.filter(|path| path.is_dir()).collect()
    }

    /// Images of this service that a loop device holds.
    pub(crate) fn loop_devices(dir: &Path) -> Vec<String> {
        let wanted = dir.to_string_lossy().into_owned();
        let devices = fs::read_dir("/sys/block").expect("a /sys").flatten();
        let files = devices.map(|device| text(device.path().join("loop/backing_file")).trim().to_owned());
        files.filter(|file| file.starts_with(&wanted)).collect()
    }

    /// Asks it to end and waits; false when it had to be killed.
    pub(crate) fn stop(&mut self) -> bool {
        let pid = nix::unistd::Pid::from_raw(self.supervisor());
        let _ = nix::sys::signal::kill(pid, nix::sys::signal::Signal::SIGTERM);
        let deadline = Instant::now() + scaled(Duration::from_secs(20));
        while matches!(self.supervisor.try_wait(), Ok(None)) {
            if Instant::now() >= deadline {
                self.kill_supervisor();
                return false;
            }
            std::thread::sleep(Duration::from_millis(10));
        }
        true
    }

    /// SIGKILL to the supervisor alone.
    pub(crate) fn kill_supervisor(&mut self) {
        let _ = self.supervisor.kill();
        let _ = self.supervisor.wait();
    }
}

impl Drop for Service {
    fn drop(&mut self) {
        self.stop();
    }
}

fn is_below(mut pid: i32, ancestor: i32) -> bool {
    while let Some(parent) = proc::parent(pid).filter(|parent| *parent > 1) {
        if parent == ancestor {
            return true;
        }
        pid = parent;
    }
    false
}
