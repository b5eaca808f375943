//! An interpreter for tests: the pipes are real, the peer is a task that runs a small script language.
//!
//! One step a line: `out T`, `err T` (told in `order`), `child T` (not told), `bytes HEX`, `flood N`,
//! `result T`, `count T`, `raise NAME TEXT`, `sleep MS`, `frame LINE`, `endless`, `exit N`, `vanish`,
//! `until-interrupt`, `later-exit N`, `lost`, `later-lost`, `set T`, `get`. Whatever ends the guard ends the task.
#![forbid(unsafe_code)]

use std::os::fd::OwnedFd;
use std::sync::Arc;
use std::time::Duration;

use rustix::pipe::{PipeFlags, pipe_with};
use serde_json::{Value, json};
use tokio::io::{AsyncBufReadExt, AsyncWriteExt, BufReader};
use tokio::net::unix::pipe;
use tokio::sync::{Notify, watch};

use crate::harness::FRAME_BYTES_MAX;
use crate::harness::interpreter::{Hold, Interpreter, Interrupting, Pipes, Provenance};
use crate::launcher::plan::{Attestation, End, SandboxId};

pub(crate) struct Fake {
    requests: BufReader<pipe::Receiver>,
    events: pipe::Sender,
    stdout: pipe::Sender,
    stderr: pipe::Sender,
    ended: watch::Sender<Option<End>>,
    kept: Option<String>,
    interrupted: Arc<Notify>,
    /// Ends the interpreter like this a moment after the cell's reply.
    later_end: Option<End>,
}

/// What one cell wants to say at its end.
#[derive(Default)]
struct Reply {
    result: Option<String>,
    error: Option<Value>,
    order: Vec<(&'static str, usize)>,
}

/// Ends the peer's task when dropped, as dropping a sandbox ends the guest.
struct Ender(tokio::task::AbortHandle, Arc<Notify>);

impl Hold for Ender {
    fn interrupt(&self) -> Interrupting {
        self.1.notify_one();
        Box::pin(std::future::ready(()))
    }
}

impl Drop for Ender {
    fn drop(&mut self) {
        self.0.abort();
    }
}

impl Fake {
    pub(crate) fn interpreter() -> Interpreter {
        Fake::with_id(1)
    }

    pub(crate) fn with_id(id: u64) -> Interpreter {
        Fake::start(id, false)
    }

    /// One whose cells are a kernel's.
    pub(crate) fn kernel(id: u64) -> Interpreter {
        Fake::start(id, true)
    }

    fn start(id: u64, kernel: bool) -> Interpreter {
        let pipe = || -> (OwnedFd, OwnedFd) {
            pipe_with(PipeFlags::CLOEXEC | PipeFlags::NONBLOCK).expect("a pipe can be made")
        };
        let (requests, events, stdout, stderr) = (pipe(), pipe(), pipe(), pipe());
        let sender = |fd| pipe::Sender::from_owned_fd(fd).expect("a pipe");
        let (ended, seen) = watch::channel(None);
        let interrupted = Arc::new(Notify::new());
        let fake = Fake {
            requests: BufReader::new(pipe::Receiver::from_owned_fd(requests.0).expect("a pipe")),
            events: sender(events.1),
            stdout: sender(stdout.1),
            stderr: sender(stderr.1),
            ended,
            kept: None,
            interrupted: Arc::clone(&interrupted),
            later_end: None,
        };
        let task = tokio::spawn(fake.serve());
        let pipes = Pipes { requests: requests.1, events: events.0, stdout: stdout.0, stderr: stderr.0 };
        let provenance = Provenance { sandbox: SandboxId(id), attestation: Attestation::default() };
        let hold = Box::new(Ender(task.abort_handle(), interrupted));
        Interpreter::from_pipes(pipes, seen, provenance, kernel, hold).expect("inside the runtime")
    }

    async fn serve(mut self) {
        let mut line = String::new();
        while self.requests.read_line(&mut line).await.is_ok_and(|bytes| bytes > 0) {
            let request: Value = serde_json::from_str(&line).expect("our own frames are JSON");
            line.clear();
            let nonce = request["nonce"].as_str().expect("every frame has a nonce");
            if request["setup"]["cwd"] == "/missing" {
                self.frame(&json!({"nonce": nonce, "event": "done", "refused": {"what": "cwd", "errno": 2}}))
                    .await;
                continue;
            }
            let script = request["code"].as_str().or(request["warm"].as_str()).unwrap_or("");
            let mut reply = Reply::default();
            for step in script.lines() {
                if let Some(end) = self.step(step, &mut reply).await {
                    self.ended.send_replace(end);
                    return;
                }
            }
            let Reply { result, error, order } = reply;
            self.frame(&json!({
                "nonce": nonce, "event": "done", "result": result, "error": error, "order": order
            }))
            .await;
            if let Some(end) = self.later_end {
                tokio::time::sleep(Duration::from_millis(20)).await;
                self.ended.send_replace(Some(end));
                return;
            }
        }
    }

    /// `Some` when the interpreter is over.
    async fn step(&mut self, step: &str, reply: &mut Reply) -> Option<Option<End>> {
        let (verb, rest) = step.split_once(' ').unwrap_or((step, ""));
        let line = format!("{rest}\n");
        match verb {
            // What slots are warmed with. Flushed before the reply, told in `order`.
            "print(1)" | "console.log(1)" => {
                self.stdout.write_all(b"1\n").await.ok();
                reply.order.push(("o", 2));
            }
            "out" => {
                self.stdout.write_all(line.as_bytes()).await.ok();
                reply.order.push(("o", line.len()));
            }
            "err" => {
                self.stderr.write_all(line.as_bytes()).await.ok();
                reply.order.push(("e", line.len()));
            }
            "child" => self.stdout.write_all(line.as_bytes()).await.unwrap_or_default(),
            "bytes" => {
                let byte = |at| u8::from_str_radix(&rest[at..at + 2], 16).expect("hex");
                let bytes: Vec<u8> = (0..rest.len()).step_by(2).map(byte).collect();
                self.stdout.write_all(&bytes).await.ok();
                reply.order.push(("o", bytes.len()));
            }
            "flood" => {
                let bytes = vec![b'x'; rest.parse().expect("a number")];
                self.stdout.write_all(&bytes).await.ok();
                reply.order.push(("o", bytes.len()));
            }
            "result" => reply.result = Some(rest.to_owned()),
            "count" => reply.result = Some(rest.len().to_string()),
            "set" => self.kept = Some(rest.to_owned()),
            "get" => reply.result = Some(self.kept.clone().unwrap_or_default()),
            "raise" => {
                let (ename, evalue) = rest.split_once(' ').unwrap_or((rest, ""));
                reply.error = Some(json!({"ename": ename, "evalue": evalue, "traceback": []}));
            }
            "sleep" => tokio::time::sleep(Duration::from_millis(rest.parse().expect("a number"))).await,
            "until-interrupt" => {
                self.interrupted.notified().await;
                reply.error = Some(json!({"ename": "KeyboardInterrupt", "evalue": "", "traceback": []}));
            }
            "frame" => self.events.write_all(line.as_bytes()).await.unwrap_or_default(),
            "endless" => self.events.write_all(&vec![b'x'; FRAME_BYTES_MAX + 1]).await.unwrap_or_default(),
            "later-exit" => self.later_end = rest.parse().ok().map(End::Exited),
            "later-lost" => self.later_end = Some(End::LauncherGone),
            "lost" => return Some(Some(End::LauncherGone)),
            "exit" => return Some(Some(End::Exited(rest.parse().expect("a status")))),
            "vanish" => return Some(None),
            other => panic!("unknown step {other:?}"),
        }
        None
    }

    async fn frame(&mut self, frame: &Value) {
        let line = format!("{frame}\n");
        self.events.write_all(line.as_bytes()).await.ok();
    }
}
