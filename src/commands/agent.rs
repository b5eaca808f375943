//! The daemon's end of a command agent: one sandbox, its frames in both directions, and who they are for.
//!
//! A task of its own carries them. It reads all the time, so no agent comes to wait for a caller; what floods is read
//! with pauses, so that it does not take the daemon's processors. A frame that is none ends the sandbox.
#![forbid(unsafe_code)]

use std::collections::HashMap;
use std::os::fd::OwnedFd;
use std::sync::atomic::{AtomicU32, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, OnceLock, Weak};
use std::time::Duration;

use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::unix::pipe;
use tokio::sync::{mpsc, oneshot, watch};
use tokio::time::timeout;
use tokio_util::sync::CancellationToken;

use super::Refused;
use super::command::Command;
use super::session::Session;
use crate::engine::Stream;
use crate::harness::interpreter::Provenance;
use crate::harness::outcome::death_text;
use crate::harness::pace::Pace;
use crate::inside::commands::frame::{Decoder, EVENT_BYTES_MAX, Event, Found, Request};
use crate::launcher::client::{Ender, Sandbox};
use crate::launcher::plan::{End, LaunchPlan};
use crate::zygote::Launch;

/// Requests that wait for an agent to read them.
const OUTBOX_FRAMES_MAX: usize = 256;
/// How long an agent may take to say that it serves.
const READY_MAX: Duration = Duration::from_secs(15);
/// Bytes read at once, and how many are read in a row before a pause: a flood is read at 128 MiB/s at most.
const READ_BYTES: usize = 64 * 1024;
const BURST_BYTES: usize = 256 * 1024;
const BURST_PAUSE: Duration = Duration::from_millis(2);
/// How long the launcher's word on an end is waited for once the agent is silent.
const END_REASON_WAIT: Duration = Duration::from_secs(2);

/// A live agent. Dropping it ends its sandbox.
#[derive(Debug)]
pub struct Agent {
    pub found: Found,
    pub provenance: Provenance,
    outbox: mpsc::Sender<Vec<u8>>,
    numbers: AtomicU32,
    shared: Arc<Shared>,
}

#[derive(Debug)]
struct Shared {
    routes: Mutex<HashMap<u32, Route>>,
    life: CancellationToken,
    /// Why it is over.
    end: OnceLock<String>,
}

/// Whom frames of a number are for.
#[derive(Clone, Debug)]
pub(super) enum Route {
    Command(Weak<Command>),
    /// The shell of a session, which hands them to its line of the moment.
    Shell(Weak<Session>),
}

impl Agent {
    /// Makes a sandbox and waits until its agent serves. Nothing of a guest's has run in it.
    pub async fn open(
        launcher: &dyn Launch,
        plan: LaunchPlan,
        memory_mib_max: u64,
    ) -> Result<Agent, Refused> {
        let sandbox = launcher.sandbox(plan).await.map_err(|error| {
            let cause = std::error::Error::source(&error).map(ToString::to_string).unwrap_or_default();
            tracing::error!(%error, cause, "no sandbox for commands");
            Refused::LaunchFailed
        })?;
        let provenance = Provenance { sandbox: sandbox.id, attestation: sandbox.attestation };
        let life = CancellationToken::new();
        let shared = Arc::new(Shared { routes: Mutex::default(), life, end: OnceLock::new() });
        let (outbox, waiting) = mpsc::channel(OUTBOX_FRAMES_MAX);
        let (ready, found) = oneshot::channel();
        let carrier = Carrier::new(sandbox, Arc::clone(&shared), memory_mib_max).map_err(|error| {
            tracing::error!(%error, "pipes of a sandbox cannot be used");
            Refused::LaunchFailed
        })?;
        tokio::spawn(carrier.carry(waiting, ready));
        let mut agent =
            Agent { found: Found::default(), provenance, outbox, numbers: AtomicU32::new(1), shared };
        match timeout(READY_MAX, found).await {
            Ok(Ok(found)) => {
                agent.found = found;
                Ok(agent)
            }
            _ => {
                let why = agent.shared.end.get().map_or("it did not answer", String::as_str);
                tracing::error!(sandbox = %provenance.sandbox, why, "no command agent in a sandbox");
                Err(Refused::LaunchFailed)
            }
        }
    }

    pub fn is_alive(&self) -> bool {
        self.shared.end.get().is_none() && !self.shared.life.is_cancelled()
    }

    /// Why it is over, once it is.
    pub fn why_ended(&self) -> Option<&str> {
        self.shared.end.get().map(String::as_str)
    }

    /// A name for the next command. Ends are heard under it as long as the agent lives.
    pub fn number(&self) -> u32 {
        self.numbers.fetch_add(1, Ordering::Relaxed)
    }

    /// Sends the frames of `number` to `route` from now on.
    pub(super) fn listen(&self, number: u32, route: Route) {
        let mut routes = self.shared.lock();
        routes.retain(|_, route| route.is_wanted());
        routes.insert(number, route);
    }

    /// The number under which a command takes input and signals: a line of a shell has its shell's.
    pub(super) fn input_of(&self, command: &Command) -> u32 {
        let routes = self.shared.lock();
        let shell = routes.iter().find(|(_, route)| matches!(route, Route::Shell(_)));
        shell.map_or(command.number, |(number, _)| *number)
    }

    /// Queues a request. Never waits.
    pub fn send(&self, request: &Request) -> Result<(), Refused> {
        self.outbox.try_send(request.encode()).map_err(|_full_or_gone| Refused::Overrun)
    }

    /// Queues all of these requests, or none.
    pub fn send_all(&self, requests: impl ExactSizeIterator<Item = Request>) -> Result<(), Refused> {
        if requests.len() == 0 {
            return Ok(());
        }
        let places =
            self.outbox.try_reserve_many(requests.len()).map_err(|_full_or_gone| Refused::Overrun)?;
        for (place, request) in places.zip(requests) {
            place.send(request.encode());
        }
        Ok(())
    }

    /// Ends the sandbox, and with it all it runs.
    pub fn end(&self, why: &str) {
        // Whoever was first says why.
        let _ = self.shared.end.set(why.to_owned());
        self.shared.life.cancel();
    }
}

impl Drop for Agent {
    fn drop(&mut self) {
        self.shared.life.cancel();
    }
}

impl Route {
    fn is_wanted(&self) -> bool {
        match self {
            Route::Command(command) => command.strong_count() > 0,
            Route::Shell(session) => session.strong_count() > 0,
        }
    }

    fn lose(&self, why: &str) {
        match self {
            Route::Command(command) => {
                if let Some(command) = command.upgrade() {
                    command.lose(why);
                }
            }
            Route::Shell(session) => {
                if let Some(session) = session.upgrade() {
                    session.lose_line(why);
                }
            }
        }
    }
}

impl Shared {
    fn route(&self, number: u32) -> Option<Route> {
        self.lock().get(&number).cloned()
    }

    fn lock(&self) -> MutexGuard<'_, HashMap<u32, Route>> {
        self.routes.lock().expect("no code panics while it holds an agent's routes")
    }
}

/// The task behind an agent.
struct Carrier {
    requests: pipe::Sender,
    events: pipe::Receiver,
    ended: watch::Receiver<Option<End>>,
    shared: Arc<Shared>,
    memory_mib_max: u64,
    /// The sandbox ends with the task.
    ender: Ender,
    /// The agent's own streams. It writes nothing there; closed, they would end it if it did.
    _streams: [OwnedFd; 2],
}

impl Carrier {
    fn new(sandbox: Sandbox, shared: Arc<Shared>, memory_mib_max: u64) -> std::io::Result<Carrier> {
        Ok(Carrier {
            requests: pipe::Sender::from_owned_fd_unchecked(sandbox.requests)?,
            events: pipe::Receiver::from_owned_fd_unchecked(sandbox.events)?,
            ended: sandbox.ended,
            shared,
            memory_mib_max,
            ender: sandbox.ender,
            _streams: [sandbox.stdout, sandbox.stderr],
        })
    }

    async fn carry(self, waiting: mpsc::Receiver<Vec<u8>>, ready: oneshot::Sender<Found>) {
        let Carrier { requests, events, mut ended, shared, memory_mib_max, ender, _streams } = self;
        let why = tokio::select! {
            why = hear(events, &shared, ready) => why,
            () = write(requests, waiting) => None,
            () = shared.life.cancelled() => Some("the session was closed".to_owned()),
        };
        let why = match why {
            Some(why) => why,
            None => {
                let end = timeout(END_REASON_WAIT, ended.wait_for(Option::is_some)).await;
                let end = end.ok().and_then(Result::ok).and_then(|end| *end);
                death_text(end, memory_mib_max).replace("the interpreter", "the sandbox")
            }
        };
        drop(ender);
        let why = shared.end.get_or_init(|| why).clone();
        let routes = std::mem::take(&mut *shared.lock());
        for route in routes.values() {
            route.lose(&why);
        }
    }
}

/// Writes requests as the agent takes them; ends when it takes none any more.
async fn write(mut requests: pipe::Sender, mut waiting: mpsc::Receiver<Vec<u8>>) {
    while let Some(frame) = waiting.recv().await {
        if requests.write_all(&frame).await.is_err() {
            return;
        }
    }
    // Its handle is gone, which `life` tells as well.
    std::future::pending().await
}

/// Reads events until there are none; says why if that is known here.
async fn hear(mut events: pipe::Receiver, shared: &Shared, ready: oneshot::Sender<Found>) -> Option<String> {
    let mut decoder = Decoder::new(EVENT_BYTES_MAX);
    let mut ready = Some(ready);
    let (mut burst, mut pace) = (0, Pace::new());
    loop {
        let buffer = decoder.buffer();
        buffer.reserve(READ_BYTES);
        match events.read_buf(buffer).await {
            Ok(0) | Err(_) => return None,
            Ok(bytes) => burst += bytes,
        }
        loop {
            match decoder.event() {
                Ok(None) => break,
                // Whoever waits for it may have given up.
                Ok(Some(Event::Ready(found))) => match ready.take() {
                    Some(ready) => drop(ready.send(found)),
                    None => return Some("its agent broke the protocol".to_owned()),
                },
                Ok(Some(event)) => {
                    pace.spend(0);
                    deliver(shared, event);
                    pace.rest().await;
                }
                Err(broken) => {
                    tracing::warn!(%broken, "a command agent broke the protocol; its sandbox is ended");
                    return Some("its agent broke the protocol".to_owned());
                }
            }
        }
        if burst >= BURST_BYTES {
            burst = 0;
            tokio::time::sleep(BURST_PAUSE).await;
        }
    }
}

fn deliver(shared: &Shared, event: Event) {
    let number = match &event {
        Event::Ready(_) => return,
        Event::Started { number }
        | Event::NotADirectory { number }
        | Event::Stdout { number, .. }
        | Event::Stderr { number, .. }
        | Event::Taken { number, .. }
        | Event::Exit { number, .. }
        | Event::Done { number, .. }
        | Event::Call { number, .. } => *number,
    };
    match shared.route(number) {
        Some(Route::Command(command)) => {
            if let Some(command) = command.upgrade() {
                tell(&command, event);
            }
        }
        Some(Route::Shell(session)) => {
            if let Some(session) = session.upgrade() {
                session.hear_shell(event);
            }
        }
        // Forgotten meanwhile.
        None => {}
    }
}

/// What an event means for one command.
pub(super) fn tell(command: &Command, event: Event) {
    match event {
        Event::Started { .. } => command.hear_started(),
        Event::NotADirectory { .. } => command.hear_not_a_directory(),
        Event::Stdout { bytes, .. } => command.hear_output(Stream::Stdout, &bytes),
        Event::Stderr { bytes, .. } => command.hear_output(Stream::Stderr, &bytes),
        Event::Taken { bytes, .. } => command.hear_taken(bytes as usize),
        Event::Exit { exit, .. } => command.hear_exit(exit),
        // Lines have ends of this kind, and those go through their session.
        // Calls are made by programs that are asked to make some.
        Event::Ready(_) | Event::Done { .. } | Event::Call { .. } => {}
    }
}
