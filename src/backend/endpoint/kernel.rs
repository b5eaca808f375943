//! One kernel at the endpoint, one cell at a time.
//!
//! ```text
//!  execute_request ──► Hearing (to the deadline) ──► Interrupted (2 s) ──► given up, kernel deleted
//!                        │ reply and idle              │ reply and idle: status timeout, names kept
//!                        ▼                             ▼
//!                      outputs as collected
//!
//!  connection lost ──► one new connection of the same session; the server sends what it kept
//! ```
//!
//! A run consumes the kernel and gives it back only when it can take another cell. Dropping a
//! [`Kernel`], also in the middle of a run, deletes it on the server.
#![forbid(unsafe_code)]

use std::sync::Arc;
use std::time::Duration;

use serde::{Deserialize, Serialize};
use tokio::sync::{OwnedSemaphorePermit, watch};
use tokio::time::{Instant, sleep, sleep_until, timeout, timeout_at};
use uuid::Uuid;

use crate::backend::endpoint::EndpointError;
use crate::backend::endpoint::collect::{Collector, ReplyIn};
use crate::backend::endpoint::link::{Heard, Idle, Link};
use crate::backend::endpoint::message::{Channel, Form, Message, Request, read};
use crate::backend::endpoint::outcome::RemoteOutcome;
use crate::backend::endpoint::rest::{KernelId, KernelState, PROBE_MAX, Rest, RestError};
use crate::backend::endpoint::watch::Watch;
use crate::harness::interpreter::{Cell, CellLimits};
use crate::harness::outcome::{CellOutcome, Ending, Lost, Stopped};

/// How long a fresh kernel may be silent before it is asked again. Servers lose requests that come while they
/// connect themselves to the kernel; Jupyter's own clients ask again as well.
const ASKED_AGAIN_AFTER: Duration = Duration::from_secs(3);
/// How long a lost connection is tried again, and the pause between two tries.
const RECONNECT_MAX: Duration = Duration::from_secs(5);
const RECONNECT_PAUSE: Duration = Duration::from_millis(250);
/// How often a cell's connection may be lost.
const RECONNECTS_MAX: u32 = 1;
/// How long the second of the two ends of a cell (reply, idle) is waited for after the first.
const SETTLE_MAX: Duration = Duration::from_secs(2);
/// Most frames that one cell may send. A server lets a thousand a second through, and a cell has 15 minutes.
const FRAMES_MAX: u32 = 2_000_000;
/// How often the deletion of a kernel is tried, and the pause between two tries.
const DELETES_MAX: u32 = 5;
const DELETE_PAUSE: Duration = Duration::from_secs(1);
/// What `input()` reads as the end of its file in `ipykernel`.
const END_OF_INPUT: &str = "\u{4}";

#[derive(Serialize)]
struct ExecuteOut<'a> {
    code: &'a str,
    silent: bool,
    store_history: bool,
    user_expressions: NoFields,
    allow_stdin: bool,
    /// Else a cell that follows an error at once is thrown away with it.
    stop_on_error: bool,
}

impl ExecuteOut<'_> {
    fn cell(code: &str) -> ExecuteOut<'_> {
        let (silent, store_history, allow_stdin, stop_on_error) = (false, true, false, false);
        ExecuteOut { code, silent, store_history, user_expressions: NoFields {}, allow_stdin, stop_on_error }
    }

    fn silent(code: &str) -> ExecuteOut<'_> {
        ExecuteOut { silent: true, store_history: false, ..ExecuteOut::cell(code) }
    }
}

#[derive(Serialize)]
struct NoFields {}

#[derive(Serialize)]
struct InputOut<'a> {
    value: &'a str,
}

#[derive(Deserialize)]
struct StatusIn {
    execution_state: String,
}

/// A kernel that the server holds for us; deleted when this is dropped.
#[derive(Debug)]
pub(super) struct Lease {
    rest: Arc<Rest>,
    id: KernelId,
    held: bool,
    /// Among the kernels that nobody has; given back once somebody has it.
    place: Option<OwnedSemaphorePermit>,
}

impl Lease {
    /// Starts a kernel, once there are few enough that nobody has. Whoever stops waiting leaves none behind: a start that
    /// was asked for goes on and its kernel is deleted.
    pub(super) async fn start(rest: &Arc<Rest>, name: &str) -> Result<Lease, RestError> {
        let (rest, name) = (Arc::clone(rest), name.to_owned());
        let place = rest.places().acquire_owned().await.ok();
        let errands = rest.errands().clone();
        let started = errands.spawn(async move {
            let id = rest.start(&name).await?;
            let lease = Lease { rest, id, held: true, place };
            lease.rest.records().keep(&lease.id).await;
            Ok(lease)
        });
        started.await.unwrap_or(Err(RestError::Garbled))
    }

    async fn release(mut self) {
        self.held = false;
        let _place = self.leave();
        delete(&self.rest, &self.id).await;
    }

    /// The place that it has while it is being deleted. One that somebody had does not wait for it.
    fn leave(&mut self) -> Option<OwnedSemaphorePermit> {
        self.place.take().or_else(|| self.rest.places().try_acquire_owned().ok())
    }
}

impl Drop for Lease {
    fn drop(&mut self) {
        let Ok(runtime) = tokio::runtime::Handle::try_current() else { return };
        if self.held {
            let (rest, id, place) = (Arc::clone(&self.rest), self.id.clone(), self.leave());
            let errands = rest.errands().clone();
            let deleted = async move {
                let _place = place;
                delete(&rest, &id).await;
            };
            errands.spawn_on(deleted, &runtime);
        }
    }
}

/// Deletes a kernel. `jupyter-server` answers 500 while it starts a dead process again, and keeps the kernel. What is not
/// deleted stays written down for the next start.
pub(super) async fn delete(rest: &Rest, id: &KernelId) {
    let mut tries_left = DELETES_MAX;
    loop {
        let Err(error) = rest.delete(id).await else { return rest.records().forget(id).await };
        tries_left -= 1;
        if tries_left == 0 || matches!(error, RestError::Unauthorized(_)) {
            let endpoint = rest.config().shown();
            tracing::warn!(endpoint, kernel = id.as_str(), %error, "a kernel was not deleted");
            return;
        }
        sleep(DELETE_PAUSE).await;
    }
}

/// A kernel that waits for a cell.
#[derive(Debug)]
pub(super) struct Kernel {
    lease: Lease,
    /// Ours; the server keeps for it what comes while the connection is away.
    session: String,
    form: Form,
    /// Of the kernel's process, as it last answered.
    process: String,
    idle: Option<Idle>,
}

impl Kernel {
    /// Waits until a fresh kernel answers, for as long as that may take, and moves it to `cwd`.
    pub(super) async fn prepare(mut lease: Lease, cwd: Option<&str>) -> Result<Kernel, EndpointError> {
        let session = Uuid::new_v4().simple().to_string();
        let mut link = Link::open(&lease.rest, &lease.id, &session).await.map_err(EndpointError::NotReady)?;
        let info = first_answer(&mut link, &session).await?;
        if let Some(cwd) = cwd {
            change_directory(&mut link, &session, cwd).await?;
        }
        let (process, form) = (info.session, link.form());
        lease.place = None;
        Ok(Kernel { lease, session, form, process, idle: Some(Idle::new(link)) })
    }

    /// The server's id of it.
    pub(super) fn id(&self) -> &str {
        self.lease.id.as_str()
    }

    /// Whether the server has ended it, or is gone itself with all its kernels. It is asked when the last cell is more
    /// than 5 seconds ago or the connection was lost since. What it does not answer is for the next cell to find out.
    pub(super) async fn is_gone(&self) -> bool {
        if self.idle.as_ref().is_some_and(Idle::is_fresh) {
            return false;
        }
        let state = self.lease.rest.state(&self.lease.id, PROBE_MAX).await;
        matches!(state, Ok(KernelState::Gone | KernelState::Dead) | Err(RestError::Connect(_)))
    }

    pub(super) async fn shutdown(self) {
        self.lease.release().await;
    }

    /// Runs one cell; with its outcome the kernel, when that can take another one. `stop` ends it early and the kernel
    /// with it. The cell's time begins when its request has been sent; what comes before has limits of its own.
    pub(super) async fn run(
        mut self,
        cell: Cell<'_>,
        limits: &CellLimits,
        stop: &mut watch::Receiver<Option<Stopped>>,
    ) -> (RemoteOutcome, Option<Kernel>) {
        let mut talk =
            Talk::new(Collector::new(limits.output_chars_max, cell.execution_count, cell.watcher.cloned()));
        let ending = tokio::select! {
            biased;
            stopped = until_stopped(stop) => Ending::Stopped(stopped),
            ending = self.converse(&mut talk, cell, limits) => ending,
        };
        let names_lost = talk.process.as_ref().is_some_and(|process| *process != self.process);
        // The server's memory is no limit of ours, and no ending there speaks of it.
        let outputs = talk.collector.into_outputs(|outputs| ending.append_to(outputs, 0));
        let cell = CellOutcome { ending, outputs };
        let outcome = RemoteOutcome { cell, msg_id: talk.id, names_lost };
        self.process = talk.process.unwrap_or(self.process);
        self.idle = talk.link.map(Idle::new);
        (outcome, ending.leaves_interpreter().then_some(self))
    }

    async fn converse(&mut self, talk: &mut Talk, cell: Cell<'_>, limits: &CellLimits) -> Ending {
        talk.link = match self.idle.take() {
            Some(idle) => idle.wake().await,
            None => None,
        };
        if talk.link.is_none() {
            talk.link = match self.connect().await {
                Ok(link) => Some(link),
                Err(RestError::Status(404)) => return Ending::Died(None),
                Err(error) => {
                    self.note(&error, "a kernel of the endpoint cannot be reached");
                    return Ending::Lost(Lost::Unreached);
                }
            };
        }
        if let Err(error) =
            self.send(talk, "execute_request", Channel::Shell, &ExecuteOut::cell(cell.code)).await
        {
            // Sent again it might run twice.
            self.note(&error, "a cell could not be sent to the endpoint");
            return Ending::Lost(Lost::Connection);
        }
        let timeout_at_end = Instant::now() + cell.timeout;
        match timeout_at(timeout_at_end, self.hear_out(talk)).await {
            Ok(ending) => ending,
            Err(_elapsed) => self.interrupt(talk, cell.timeout, limits.interrupt_grace).await,
        }
    }

    async fn interrupt(&self, talk: &mut Talk, limit: Duration, grace: Duration) -> Ending {
        let give_up = Instant::now() + grace;
        let (rest, id) = (Arc::clone(&self.lease.rest), self.lease.id.clone());
        let sent = tokio::spawn(async move {
            if let Err(error) = rest.interrupt(&id).await {
                tracing::warn!(endpoint = rest.config().shown(), %error, "a kernel was not interrupted");
            }
        });
        let ended = timeout_at(give_up, self.hear_out(talk)).await;
        // An interrupt that is still on its way would meet the next cell.
        let is_usable =
            ended.is_ok_and(Ending::leaves_interpreter) && timeout_at(give_up, sent).await.is_ok();
        if is_usable {
            Ending::Interrupted { timeout: limit }
        } else {
            Ending::Unstoppable { timeout: limit }
        }
    }

    /// Listens until the cell is over, or cannot be expected to be any more. May be dropped and called again.
    async fn hear_out(&self, talk: &mut Talk) -> Ending {
        loop {
            if talk.is_over() {
                return talk.end();
            }
            let Some(link) = &mut talk.link else {
                if let Err(ending) = self.reconnect(talk).await {
                    return ending;
                }
                continue;
            };
            let heard = tokio::select! {
                heard = link.hear() => heard,
                ending = talk.watch.verdict(&self.lease.rest, &self.lease.id) => return ending,
                () = until(talk.settled_at) => return talk.end(),
            };
            talk.frames += 1;
            if talk.frames > FRAMES_MAX {
                return Ending::Lost(Lost::Flood);
            }
            match heard {
                Heard::Nothing => {}
                Heard::Closed => talk.link = None,
                Heard::TooLarge => {
                    talk.collector.truncate();
                    talk.link = None;
                }
                Heard::Message(message) => match talk.take(&message) {
                    Taken::Nothing => {}
                    Taken::Death => return Ending::Died(None),
                    Taken::InputWanted => self.end_input(talk).await,
                },
            }
        }
    }

    /// No more than a courtesy: a kernel that was told `allow_stdin: false` does not ask.
    async fn end_input(&self, talk: &mut Talk) {
        let content = InputOut { value: END_OF_INPUT };
        if self.send(talk, "input_reply", Channel::Stdin, &content).await.is_err() {
            talk.link = None;
        }
    }

    async fn reconnect(&self, talk: &mut Talk) -> Result<(), Ending> {
        if talk.reconnects == RECONNECTS_MAX {
            return Err(Ending::Lost(Lost::Connection));
        }
        talk.reconnects += 1;
        let give_up = Instant::now() + RECONNECT_MAX;
        loop {
            match timeout_at(give_up, self.connect()).await {
                Ok(Ok(link)) => {
                    talk.link = Some(link);
                    talk.watch.reconnected();
                    return Ok(());
                }
                Ok(Err(RestError::Status(404))) => return Err(Ending::Died(None)),
                Ok(Err(error)) if Instant::now() + RECONNECT_PAUSE >= give_up => {
                    self.note(&error, "the connection to a kernel of the endpoint did not come back");
                    return Err(Ending::Lost(Lost::Connection));
                }
                Ok(Err(_)) => sleep(RECONNECT_PAUSE).await,
                Err(_elapsed) => return Err(Ending::Lost(Lost::Connection)),
            }
        }
    }

    async fn connect(&self) -> Result<Link, RestError> {
        Link::reopen(&self.lease.rest, &self.lease.id, &self.session, self.form).await
    }

    async fn send<C: Serialize>(
        &self,
        talk: &mut Talk,
        kind: &str,
        channel: Channel,
        content: &C,
    ) -> Result<(), RestError> {
        let Some(link) = &mut talk.link else { return Ok(()) };
        link.send(Request { channel, kind, id: &talk.id, session: &self.session, content }).await
    }

    fn note(&self, error: &RestError, what: &str) {
        let source = std::error::Error::source(error).map(ToString::to_string);
        tracing::warn!(endpoint = self.lease.rest.config().shown(), kernel = self.id(), %error, source, "{what}");
    }
}

/// One cell's side of the conversation.
struct Talk {
    /// The id of its request.
    id: String,
    collector: Collector,
    link: Option<Link>,
    watch: Watch,
    reply: Option<Reply>,
    idle: bool,
    /// When the second of the two ends is given up, once the first is here.
    settled_at: Option<Instant>,
    frames: u32,
    reconnects: u32,
    /// Who sent the reply.
    process: Option<String>,
}

enum Reply {
    Completed,
    Raised,
    /// Aborted, or not to be understood.
    Unusable,
}

/// What a message asks of us.
#[derive(Copy, Clone, Debug, PartialEq, Eq)]
enum Taken {
    Nothing,
    InputWanted,
    /// The kernel's process ended.
    Death,
}

impl Talk {
    fn new(collector: Collector) -> Talk {
        Talk {
            id: Uuid::new_v4().simple().to_string(),
            collector,
            link: None,
            watch: Watch::new(),
            reply: None,
            idle: false,
            settled_at: None,
            frames: 0,
            reconnects: 0,
            process: None,
        }
    }

    fn take(&mut self, message: &Message) -> Taken {
        let (kind, content) = (message.kind.as_str(), &message.content[..]);
        // The server's own word on a process belongs to no request.
        let of_server = message.parent.is_empty() && kind == "status";
        if message.parent != self.id && !of_server {
            return Taken::Nothing;
        }
        self.watch.heard();
        match (message.channel, kind) {
            (Channel::IoPub, "status") => {
                match read::<StatusIn>(content).map(|it| it.execution_state).as_deref() {
                    Some("restarting" | "dead") => return Taken::Death,
                    Some("idle") if !of_server => {
                        self.idle = true;
                        self.settle();
                    }
                    _ => {}
                }
            }
            (Channel::IoPub, kind) => self.collector.take(kind, content),
            (Channel::Shell, "execute_reply") if self.reply.is_none() => {
                self.process = Some(message.session.clone());
                self.reply = Some(self.read_reply(content));
                self.settle();
            }
            (Channel::Stdin, "input_request") => return Taken::InputWanted,
            _ => {}
        }
        Taken::Nothing
    }

    fn read_reply(&mut self, content: &[u8]) -> Reply {
        match read::<ReplyIn>(content) {
            Some(reply) if reply.status == "ok" => Reply::Completed,
            Some(reply) if reply.status == "error" => {
                // Its error came as an output as well, unless that was lost or is still to come.
                self.collector.expect_error(reply);
                Reply::Raised
            }
            _ => Reply::Unusable,
        }
    }

    fn settle(&mut self) {
        self.settled_at.get_or_insert_with(|| Instant::now() + SETTLE_MAX);
    }

    fn is_over(&self) -> bool {
        self.idle && self.reply.is_some()
    }

    /// How the cell went, as far as it is known.
    fn end(&mut self) -> Ending {
        match self.reply {
            Some(Reply::Completed) => Ending::Completed,
            Some(Reply::Raised) => {
                self.collector.settle_error();
                Ending::Raised
            }
            Some(Reply::Unusable) | None => Ending::Lost(Lost::NoReply),
        }
    }
}

async fn until(when: Option<Instant>) {
    match when {
        Some(when) => sleep_until(when).await,
        None => std::future::pending().await,
    }
}

pub(super) async fn until_stopped(stop: &mut watch::Receiver<Option<Stopped>>) -> Stopped {
    let stopped = stop.wait_for(Option::is_some).await.ok().and_then(|stopped| *stopped);
    match stopped {
        Some(stopped) => stopped,
        // Nobody is left who could stop it.
        None => std::future::pending().await,
    }
}

/// One request of ours on the shell channel, and its reply.
async fn ask<C: Serialize>(
    link: &mut Link,
    session: &str,
    kind: &str,
    content: &C,
) -> Result<Message, EndpointError> {
    let asked = [send(link, session, kind, content).await?];
    answer(link, &asked).await
}

/// Asks a fresh kernel until it answers.
async fn first_answer(link: &mut Link, session: &str) -> Result<Message, EndpointError> {
    let mut asked = Vec::new();
    loop {
        asked.push(send(link, session, "kernel_info_request", &NoFields {}).await?);
        if let Ok(answered) = timeout(ASKED_AGAIN_AFTER, answer(link, &asked)).await {
            return answered;
        }
    }
}

/// Sends a request on the shell channel; its id.
async fn send<C: Serialize>(
    link: &mut Link,
    session: &str,
    kind: &str,
    content: &C,
) -> Result<String, EndpointError> {
    let id = Uuid::new_v4().simple().to_string();
    let request = Request { channel: Channel::Shell, kind, id: &id, session, content };
    link.send(request).await.map_err(EndpointError::NotReady)?;
    Ok(id)
}

/// Waits for the reply to one of the requests.
async fn answer(link: &mut Link, asked: &[String]) -> Result<Message, EndpointError> {
    loop {
        match link.hear().await {
            Heard::Message(reply) if reply.channel == Channel::Shell && asked.contains(&reply.parent) => {
                return Ok(reply);
            }
            Heard::Message(_) | Heard::Nothing => {}
            Heard::TooLarge | Heard::Closed => return Err(EndpointError::NotReady(RestError::Garbled)),
        }
    }
}

async fn change_directory(link: &mut Link, session: &str, cwd: &str) -> Result<(), EndpointError> {
    // A string of JSON without surrogates is one of Python.
    let literal = serde_json::to_string(cwd).expect("text has a JSON form");
    let code = format!("__import__(\"os\").chdir({literal})");
    let reply = ask(link, session, "execute_request", &ExecuteOut::silent(&code)).await?;
    match read::<ReplyIn>(&reply.content) {
        Some(reply) if reply.status == "ok" => Ok(()),
        Some(reply) if reply.status == "error" => Err(EndpointError::NotADirectory { cwd: cwd.to_owned() }),
        _ => Err(EndpointError::NotReady(RestError::Garbled)),
    }
}
