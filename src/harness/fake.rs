//! An interpreter for tests: the pipes are real, the peer is a task that runs a small script language.
//!
//! One step a line: `out T`, `err T` (told in `order`), `child T` (not told), `bytes HEX`, `flood N`, `err-flood N`,
//! `show T`, `show-and-update T U`, `clear`, `clear-wait` (as a kernel publishes), `result T`, `count T`, `raise NAME TEXT`, `sleep MS`, `frame LINE`, `endless`, `exit N`, `vanish`,
//! `until-interrupt`, `unheard` (interrupts stay on their way from now on), `later-exit N`, `lost`, `later-lost`,
//! `set T`, `get`. Of programs: `status N`, `call ID NAME JSON`, `event JSON` (with the nonce), `hear` (prints what it
//! was told), `deaf` (closes its descriptor of events), `argv`, `end WORD`. Whatever ends the guard ends the task.
#![forbid(unsafe_code)]

use std::os::fd::OwnedFd;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use rustix::pipe::{PipeFlags, pipe_with};
use serde_json::{Value, json};
use tokio::io::{AsyncBufReadExt, AsyncWriteExt, BufReader};
use tokio::net::unix::pipe;
use tokio::sync::{Notify, watch};

use crate::harness::FRAME_BYTES_MAX;
use crate::harness::capture::monotonic_ns;
use crate::harness::interpreter::{Hold, Interpreter, Interrupting, Pipes, Provenance};
use crate::launcher::plan::{Attestation, End, SandboxId};

pub(crate) struct Fake {
    requests: BufReader<pipe::Receiver>,
    events: pipe::Sender,
    stdout: pipe::Sender,
    stderr: pipe::Sender,
    ended: watch::Sender<Option<End>>,
    kept: Option<String>,
    interrupts: Arc<Interrupts>,
    /// Ends the interpreter like this a moment after the cell's reply.
    later_end: Option<End>,
}

/// What one cell wants to say at its end.
#[derive(Default)]
struct Reply {
    nonce: String,
    result: Option<String>,
    error: Option<Value>,
    order: Vec<(&'static str, usize)>,
    /// A program's.
    exit: Option<u8>,
}

#[derive(Default)]
struct Interrupts {
    arrived: Notify,
    unheard: AtomicBool,
}

/// Ends the peer's task when dropped, as dropping a sandbox ends the guest.
struct Ender(tokio::task::AbortHandle, Arc<Interrupts>);

impl Hold for Ender {
    fn interrupt(&self) -> Interrupting {
        if self.1.unheard.load(Ordering::Relaxed) {
            return Box::pin(std::future::pending());
        }
        self.1.arrived.notify_one();
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
        let interrupts = Arc::<Interrupts>::default();
        let fake = Fake {
            requests: BufReader::new(pipe::Receiver::from_owned_fd(requests.0).expect("a pipe")),
            events: sender(events.1),
            stdout: sender(stdout.1),
            stderr: sender(stderr.1),
            ended,
            kept: None,
            interrupts: Arc::clone(&interrupts),
            later_end: None,
        };
        let task = tokio::spawn(fake.serve());
        let pipes = Pipes { requests: requests.1, events: events.0, stdout: stdout.0, stderr: stderr.0 };
        let provenance = Provenance { sandbox: SandboxId(id), attestation: Attestation::default() };
        let hold = Box::new(Ender(task.abort_handle(), interrupts));
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
            let program = &request["program"];
            let texts = [&request["code"], &request["warm"], &program["code"]];
            let script = texts.into_iter().find_map(Value::as_str).unwrap_or("");
            let mut reply = Reply { nonce: nonce.to_owned(), ..Reply::default() };
            for step in script.lines() {
                if self.program_step(step, &request, &mut reply).await {
                    continue;
                }
                if let Some(end) = self.step(step, &mut reply).await {
                    self.ended.send_replace(end);
                    return;
                }
            }
            let Reply { result, error, order, exit, .. } = reply;
            let mut done = json!({
                "nonce": nonce, "event": "done", "result": result, "error": error, "order": order
            });
            if !program.is_null() {
                done["exit"] = exit.unwrap_or(0).into();
            }
            self.frame(&done).await;
            if let Some(end) = self.later_end {
                tokio::time::sleep(Duration::from_millis(20)).await;
                self.ended.send_replace(Some(end));
                return;
            }
        }
    }

    /// True for a step that only programs have.
    async fn program_step(&mut self, step: &str, request: &Value, reply: &mut Reply) -> bool {
        let (verb, rest) = step.split_once(' ').unwrap_or((step, ""));
        let event = match verb {
            "status" => {
                reply.exit = rest.parse().ok();
                return true;
            }
            "argv" => {
                let text = format!("{}\n", request["program"]);
                self.stdout.write_all(text.as_bytes()).await.ok();
                return true;
            }
            "hear" => {
                let mut line = String::new();
                self.requests.read_line(&mut line).await.ok();
                let told: Value = serde_json::from_str(&line).expect("our own frames are JSON");
                assert_eq!(told["nonce"], request["nonce"]);
                self.stdout.write_all(format!("{}\n", told["answers"]).as_bytes()).await.ok();
                return true;
            }
            "deaf" => {
                let (_, nowhere) = pipe_with(PipeFlags::CLOEXEC | PipeFlags::NONBLOCK).expect("a pipe");
                self.events = pipe::Sender::from_owned_fd(nowhere).expect("a pipe");
                return true;
            }
            "call" => {
                let mut words = rest.splitn(3, ' ');
                let mut word = || words.next().unwrap_or_default();
                let (id, name) = (word(), word());
                let input: Value = serde_json::from_str(word()).expect("JSON");
                json!({"event": "call", "calls": [{"id": id, "name": name, "input": input}]})
            }
            "event" => serde_json::from_str(rest).expect("JSON"),
            _ => return false,
        };
        let mut event = event;
        event["nonce"] = request["nonce"].clone();
        self.frame(&event).await;
        true
    }

    /// `Some` when the interpreter is over.
    async fn step(&mut self, step: &str, reply: &mut Reply) -> Option<Option<End>> {
        let (verb, rest) = step.split_once(' ').unwrap_or((step, ""));
        let line = format!("{rest}\n");
        match verb {
            "show" => self.publish(json!({"event": "display", "data": {"text/plain": rest}}), reply).await,
            "show-and-update" => {
                let (before, after) = rest.split_once(' ').expect("two texts");
                for (event, text) in [("display", before), ("update", after)] {
                    let data = json!({"text/plain": text});
                    self.publish(json!({"event": event, "data": data, "id": "shown"}), reply).await;
                }
            }
            "clear" => self.publish(json!({"event": "clear"}), reply).await,
            "clear-wait" => self.publish(json!({"event": "clear", "wait": true}), reply).await,
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
            "err-flood" => {
                let bytes = vec![b'x'; rest.parse().expect("a number")];
                self.stderr.write_all(&bytes).await.ok();
                reply.order.push(("e", bytes.len()));
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
                self.interrupts.arrived.notified().await;
                reply.error = Some(json!({"ename": "KeyboardInterrupt", "evalue": "", "traceback": []}));
            }
            "unheard" => self.interrupts.unheard.store(true, Ordering::Relaxed),
            "frame" => self.events.write_all(line.as_bytes()).await.unwrap_or_default(),
            "endless" => self.events.write_all(&vec![b'x'; FRAME_BYTES_MAX + 1]).await.unwrap_or_default(),
            "later-exit" => self.later_end = rest.parse().ok().map(End::Exited),
            "later-lost" => self.later_end = Some(End::LauncherGone),
            "lost" => return Some(Some(End::LauncherGone)),
            "end" => {
                return Some(Some(match rest {
                    "memory" => End::OutOfMemory,
                    "space" => End::SpaceFull,
                    "asked" => End::Ended,
                    "mismatch" => End::Mismatch,
                    signal => End::Signaled(signal.parse().expect("a signal")),
                }));
            }
            "exit" => return Some(Some(End::Exited(rest.parse().expect("a status")))),
            "vanish" => return Some(None),
            other => panic!("unknown step {other:?}"),
        }
        None
    }

    /// As a kernel does, with its place among the text.
    async fn publish(&mut self, mut event: Value, reply: &mut Reply) {
        let own = |key| reply.order.iter().filter(|entry| entry.0 == key).map(|entry| entry.1).sum::<usize>();
        let unread = |pipe: &pipe::Sender| rustix::io::ioctl_fionread(pipe).expect("a pipe");
        let from = monotonic_ns();
        let unread = [unread(&self.stdout), unread(&self.stderr)];
        event["at"] = json!([own("o"), unread[0], own("e"), unread[1], from, monotonic_ns()]);
        event["nonce"] = reply.nonce.clone().into();
        reply.order.push(("r", 1));
        self.frame(&event).await;
    }

    async fn frame(&mut self, frame: &Value) {
        let line = format!("{frame}\n");
        self.events.write_all(line.as_bytes()).await.ok();
    }
}
