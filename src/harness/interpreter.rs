//! The connection to one interpreter: requests out, events and streams in, one cell at a time.
//!
//! ```text
//!  write frame ──► Quiet (2 ms) ──► Watching (to the deadline) ──► Grace (5 s more) ──► given up
//!                    │ done            │ done                         │ done: status timeout all the same
//!                    ▼                 ▼                              ▼
//!                  drain both streams without waiting, assemble the outputs
//! ```
//!
//! A stream that goes over a limit of its own ends the interpreter, where it has one: so it is with runs.
//!
//! A kernel is interrupted at the deadline instead, has two seconds to end its cell, and keeps its names.
//!
//! Whatever arrives, the clock is looked at between two turns of reading, and other tasks have theirs (`pace.rs`).
//!
//! A run consumes the interpreter and gives it back only when it can take another cell. Dropping an
//! [`Interpreter`], also in the middle of a run, ends its sandbox.
#![forbid(unsafe_code)]

use std::io;
use std::os::fd::OwnedFd;
use std::pin::Pin;
use std::time::Duration;

use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::unix::pipe;
use tokio::sync::watch;
use tokio::task::JoinHandle;
use tokio::time::{Instant, sleep_until, timeout, timeout_at};

use crate::engine::{Stream, Watcher};
use crate::harness::FRAME_BYTES_MAX;
use crate::harness::capture::{Capture, Tap, Wake, expected_bytes};
use crate::harness::feed::Feed;
use crate::harness::frame::{Ask, Done, Event, EventReader, Nonce, encode};
use crate::harness::outcome::{CellOutcome, Ending, Parts, Stopped};
use crate::harness::pace::Pace;
use crate::harness::rich::Rich;
use crate::launcher::client::{Ender, Sandbox};
use crate::launcher::plan::{Attestation, End, SandboxId, SpaceId};

/// How long a cell runs before its streams are read: most are done by then, and one wake-up is enough.
pub(super) const QUIET: Duration = Duration::from_millis(2);
/// How long a stream is left alone after a small piece of output, and what is no small piece. A pipe holds
/// 64 KiB: a guest that fills less than half of it in that time does not come to wait for us.
const HUSH: Duration = Duration::from_millis(1);
const BULK_BYTES: usize = 32 * 1024;
/// So many small pieces after a large one are read at once: a flood does not always fill the pipe.
const PIECES_AFTER_BULK: u32 = 64;
/// How long the launcher's word on an end is waited for once the events pipe is closed. It comes at once, unless
/// the machine is busy taking down what ran out of memory; who closes the pipe and lives on waits for nothing.
const END_REASON_WAIT: Duration = Duration::from_secs(2);
/// How long the launcher's word on an interrupt is waited for.
const INTERRUPT_WAIT: Duration = Duration::from_secs(2);
/// How long an interpreter may take for a set-up or warm-up frame.
const SETUP_TIMEOUT: Duration = Duration::from_secs(20);
/// So often in a row the control pipe is read once more, because the streams have moved meanwhile.
const OVERHEAR_MAX: usize = 32;
/// Most bytes that one cell may send on the control pipe, its lines counted as [`super::LINE_BYTES_LEAST`] says.
const EVENT_BYTES_MAX: usize = 4 * FRAME_BYTES_MAX;

/// What bounds one cell.
#[derive(Copy, Clone, Debug)]
pub struct CellLimits {
    /// Characters over both streams, the result and the error.
    pub output_chars_max: usize,
    /// Of each stream, where it has a limit of its own. Beyond it the cell's interpreter is ended at once, and what fits
    /// is kept.
    pub stream_bytes_max: Option<usize>,
    /// How long a cell may still end by itself once its time is up.
    pub grace: Duration,
    /// How long a kernel's cell may take to end once it is interrupted.
    pub interrupt_grace: Duration,
    /// The sandbox's memory, for the message when it was not enough.
    pub memory_mib_max: u64,
}

/// One cell for an interpreter.
#[derive(Copy, Clone, Debug)]
pub struct Cell<'a> {
    pub code: &'a str,
    pub timeout: Duration,
    pub execution_count: u64,
    /// Hears of what the cell produces while it runs.
    pub watcher: Option<&'a Watcher>,
    /// What it finds behind `sys.argv[0]`, where it is to find something (Python only).
    pub argv: Option<&'a [String]>,
}

/// Resolves once an interrupt is on its way, or cannot be.
pub type Interrupting = Pin<Box<dyn Future<Output = ()> + Send>>;

/// Holds a sandbox, which ends when this is dropped.
pub trait Hold: Send + Sync {
    /// Sends its interpreter SIGINT.
    fn interrupt(&self) -> Interrupting;
}

impl Hold for Ender {
    fn interrupt(&self) -> Interrupting {
        Box::pin(Ender::interrupt(self))
    }
}

/// A run that is over.
#[derive(Debug)]
pub struct Ran {
    pub outcome: CellOutcome,
    /// Present when it can take another cell.
    pub interpreter: Option<Interpreter>,
}

/// Why the working directory was not set. Nothing of the guest's ran.
#[derive(Copy, Clone, Debug, PartialEq, Eq)]
pub enum SetupFailed {
    NotADirectory,
    Gone,
}

/// The launcher's record of the sandbox behind an interpreter, for the audit.
#[derive(Copy, Clone, Debug, PartialEq, Eq, serde::Serialize, serde::Deserialize)]
pub struct Provenance {
    pub sandbox: SandboxId,
    pub attestation: Attestation,
}

/// Our ends of an interpreter's four pipes, in non-blocking mode.
#[derive(Debug)]
pub struct Pipes {
    pub requests: OwnedFd,
    pub events: OwnedFd,
    pub stdout: OwnedFd,
    pub stderr: OwnedFd,
}

/// An interpreter that waits for a cell.
pub struct Interpreter {
    pub(super) requests: OwnedFd,
    pub(super) events: pipe::Receiver,
    pub(super) stdout: Tap,
    pub(super) stderr: Tap,
    pub(super) reader: EventReader,
    pub(super) ended: watch::Receiver<Option<End>>,
    provenance: Provenance,
    /// Its cells are a kernel's.
    kernel: bool,
    space: Option<SpaceId>,
    view: Option<OwnedFd>,
    hold: Box<dyn Hold>,
}

impl std::fmt::Debug for Interpreter {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Interpreter").field("sandbox", &self.provenance.sandbox).finish_non_exhaustive()
    }
}

impl Interpreter {
    /// Takes over a fresh sandbox. Must run inside the async runtime.
    pub fn new(sandbox: Sandbox, kernel: bool) -> io::Result<Interpreter> {
        let Sandbox { id, space, attestation, requests, events, stdout, stderr, view, ended, ender } =
            sandbox;
        let pipes = Pipes { requests, events, stdout, stderr };
        let provenance = Provenance { sandbox: id, attestation };
        let interpreter = Interpreter::from_pipes(pipes, ended, provenance, kernel, Box::new(ender))?;
        Ok(Interpreter { space: Some(space), view, ..interpreter })
    }

    /// The space its sandbox is in, where that is one of the launcher's.
    pub fn space(&self) -> Option<SpaceId> {
        self.space
    }

    /// The daemon's view of its workspace, once, where it was launched with one.
    pub fn take_view(&mut self) -> Option<OwnedFd> {
        self.view.take()
    }

    /// From pipes, whoever is at their other end; `hold` is dropped with the interpreter.
    pub fn from_pipes(
        pipes: Pipes,
        ended: watch::Receiver<Option<End>>,
        provenance: Provenance,
        kernel: bool,
        hold: Box<dyn Hold>,
    ) -> io::Result<Interpreter> {
        Ok(Interpreter {
            requests: pipes.requests,
            events: pipe::Receiver::from_owned_fd_unchecked(pipes.events)?,
            stdout: Tap::Quiet(pipes.stdout),
            stderr: Tap::Quiet(pipes.stderr),
            reader: EventReader::default(),
            ended,
            provenance,
            kernel,
            space: None,
            view: None,
            hold,
        })
    }

    /// False once the launcher has seen its end.
    pub fn is_alive(&self) -> bool {
        self.end().is_none()
    }

    /// Resolves once the launcher has seen its end.
    pub fn ended(&self) -> impl Future<Output = ()> + Send + use<> {
        let mut ended = self.ended.clone();
        async move { seen_ended(&mut ended).await }
    }

    /// How it ended, if it did.
    pub fn end(&self) -> Option<End> {
        *self.ended.borrow()
    }

    pub fn provenance(&self) -> Provenance {
        self.provenance
    }

    /// Runs one cell; `stop` ends it early. The time starts now.
    pub async fn run(
        mut self,
        cell: Cell<'_>,
        limits: &CellLimits,
        stop: &mut watch::Receiver<Option<Stopped>>,
    ) -> Ran {
        let timeout_ms = u64::try_from(cell.timeout.as_millis()).unwrap_or(u64::MAX);
        let ask = Ask::Cell { code: cell.code, timeout_ms, count: cell.execution_count, argv: cell.argv };
        let grace = if self.kernel { limits.interrupt_grace } else { limits.grace };
        let mut talk = Talk::new(cell.timeout, grace, limits.output_chars_max);
        talk.capture.bound_streams(limits.stream_bytes_max);
        talk.execution_count = cell.execution_count;
        talk.feed = cell.watcher.cloned().map(Feed::new);
        let (done, ending) = self.ask(ask, &mut talk, stop).await;
        let mut feed = talk.feed.take();
        if let Some(feed) = &mut feed {
            feed.finish(&talk.capture);
        }
        let parts = Parts {
            capture: talk.capture,
            done,
            ending,
            kernel: self.kernel,
            execution_count: cell.execution_count,
            chars_max: limits.output_chars_max,
            memory_mib_max: limits.memory_mib_max,
        };
        let (outcome, captured) = parts.assemble();
        if let Some(feed) = feed {
            feed.outputs(&outcome.outputs[captured..]);
        }
        Ran { outcome, interpreter: ending.leaves_interpreter().then_some(self) }
    }

    /// Changes the working directory before the first cell.
    pub async fn change_directory(self, cwd: &str) -> Result<Interpreter, SetupFailed> {
        let (interpreter, done) = self.prepare(Ask::WorkingDirectory(cwd)).await.ok_or(SetupFailed::Gone)?;
        if done.refused.is_some() { Err(SetupFailed::NotADirectory) } else { Ok(interpreter) }
    }

    /// Evaluates something harmless, so that the first cell finds everything warm. `None` when the
    /// interpreter did not survive it.
    pub async fn warm_up(self, source: &str) -> Option<Interpreter> {
        self.prepare(Ask::WarmUp(source)).await.map(|(interpreter, _)| interpreter)
    }

    /// The same where the next thing it runs is a program.
    pub async fn warm_up_for_programs(self, source: &str) -> Option<Interpreter> {
        self.prepare(Ask::WarmUpForPrograms(source)).await.map(|(interpreter, _)| interpreter)
    }

    async fn prepare(mut self, ask: Ask<'_>) -> Option<(Interpreter, Done)> {
        let mut talk = Talk::new(SETUP_TIMEOUT, Duration::ZERO, 0);
        let (_, mut never) = watch::channel(None);
        match self.ask(ask, &mut talk, &mut never).await {
            (Some(done), Ending::Completed | Ending::Raised) => Some((self, done)),
            _ => None,
        }
    }

    async fn ask(
        &mut self,
        ask: Ask<'_>,
        talk: &mut Talk,
        stop: &mut watch::Receiver<Option<Stopped>>,
    ) -> (Option<Done>, Ending) {
        self.reader.begin(EVENT_BYTES_MAX);
        let frame = match encode(&talk.nonce, self.kernel, ask) {
            Ok(frame) => frame,
            Err(too_long) => return (None, Ending::CodeTooLong(too_long)),
        };
        if let Err(ending) = self.send(&frame, talk, stop).await {
            return (None, ending);
        }
        drop(frame);
        let (done, ending) = match self.listen(talk, stop).await {
            Ok(done) => {
                let ending = if let Some(interrupting) = talk.interrupting.take() {
                    // It must not reach the next cell: once it is sent it arrives before whatever is written later.
                    // While it is on its way there can be no next one.
                    let timeout_of_cell = talk.timeout;
                    match timeout(INTERRUPT_WAIT, interrupting).await {
                        Ok(_sent) => Ending::Interrupted { timeout: timeout_of_cell },
                        Err(_elapsed) => Ending::Unstoppable { timeout: timeout_of_cell },
                    }
                } else if talk.is_late() {
                    Ending::TimedOut { timeout: talk.timeout }
                } else if done.error.is_some() {
                    Ending::Raised
                } else {
                    Ending::Completed
                };
                (Some(done), ending)
            }
            Err(Ending::Died(_)) => (None, Ending::Died(self.end_reason().await)),
            Err(ending) => (None, ending),
        };
        if matches!(ending, Ending::StreamLimit(_)) {
            return (None, ending);
        }
        let order = done.as_ref().map_or(&[][..], |done| &done.order);
        self.drain(talk, [Stream::Stdout, Stream::Stderr].map(|stream| expected_bytes(order, stream)));
        self.stdout.unwatch();
        self.stderr.unwatch();
        match talk.capture.over_limit() {
            Some(stream) if ending.leaves_interpreter() => (done, Ending::StreamLimit(stream)),
            _ => (done, ending),
        }
    }

    /// One write, nearly always; a frame larger than the pipe goes piece by piece.
    async fn send(
        &mut self,
        frame: &[u8],
        talk: &Talk,
        stop: &mut watch::Receiver<Option<Stopped>>,
    ) -> Result<(), Ending> {
        let sent = match rustix::io::write(&self.requests, frame) {
            Ok(sent) if sent == frame.len() => return Ok(()),
            Ok(sent) => sent,
            Err(rustix::io::Errno::AGAIN | rustix::io::Errno::INTR) => 0,
            Err(_) => return Err(self.unreachable().await),
        };
        let sent_whole = tokio::select! {
            result = timeout_at(talk.given_up, write_rest(&self.requests, &frame[sent..])) => result,
            reason = stopped(stop) => return Err(Ending::Stopped(reason)),
        };
        match sent_whole {
            Ok(Ok(())) => Ok(()),
            Ok(Err(_)) => Err(self.unreachable().await),
            Err(_elapsed) => Err(talk.out_of_time()),
        }
    }

    async fn unreachable(&mut self) -> Ending {
        self.end_reason().await.map_or(Ending::Unreachable, |end| Ending::Died(Some(end)))
    }

    /// Waits for the cell's `done`; reads the streams meanwhile if it takes its time.
    async fn listen(
        &mut self,
        talk: &mut Talk,
        stop: &mut watch::Receiver<Option<Stopped>>,
    ) -> Result<Done, Ending> {
        let timer = sleep_until(talk.phase_end());
        tokio::pin!(timer);
        loop {
            if Instant::now() >= talk.phase_end() {
                self.next_phase(talk)?;
                timer.as_mut().reset(talk.phase_end());
            }
            tokio::select! {
                is_there = more_lines(&mut self.events, &mut self.reader) => {
                    if !is_there {
                        return Err(Ending::Died(None));
                    }
                    if let Some(done) = self.take_events(talk)? {
                        return Ok(done);
                    }
                    if let Some(done) = self.overhear(talk)? {
                        return Ok(done);
                    }
                }
                () = self.stdout.readable() => {
                    let bytes = talk.capture.read_once(Stream::Stdout, &mut self.stdout, Wake::Reactor);
                    talk.pace.spend(bytes);
                    talk.hush.piece(bytes, &mut self.stdout);
                    if let Some(done) = self.overhear(talk)? {
                        return Ok(done);
                    }
                }
                () = self.stderr.readable() => {
                    let bytes = talk.capture.read_once(Stream::Stderr, &mut self.stderr, Wake::Reactor);
                    talk.pace.spend(bytes);
                    talk.hush.piece(bytes, &mut self.stderr);
                    if let Some(done) = self.overhear(talk)? {
                        return Ok(done);
                    }
                }
                () = sleep_until(talk.hush.until), if talk.hush.hushed => {
                    talk.hush.hushed = false;
                    let bytes = talk.capture.drain(Stream::Stdout, &mut self.stdout, 0);
                    talk.pace.spend(bytes);
                    talk.hush.listen_again(bytes, &mut self.stdout);
                    let bytes = talk.capture.drain(Stream::Stderr, &mut self.stderr, 0);
                    talk.pace.spend(bytes);
                    talk.hush.listen_again(bytes, &mut self.stderr);
                    if let Some(done) = self.overhear(talk)? {
                        return Ok(done);
                    }
                }
                () = seen_ended(&mut self.ended) => return Err(Ending::Died(None)),
                reason = stopped(stop) => return Err(Ending::Stopped(reason)),
                () = &mut timer => {}
            }
            talk.pace.rest().await;
        }
    }

    fn next_phase(&mut self, talk: &mut Talk) -> Result<(), Ending> {
        if talk.phase == Phase::Quiet {
            self.stdout.watch();
            self.stderr.watch();
        }
        talk.next_phase()?;
        if talk.phase == Phase::Grace && self.kernel {
            // Spawned, so that it is sent whatever becomes of this run.
            talk.interrupting = Some(tokio::spawn(self.hold.interrupt()));
        }
        Ok(())
    }

    /// Looks for events once the streams have been read, and tells the watcher of what was read when there are none: what
    /// stands behind something published comes after its event, so that by now that is there.
    fn overhear(&mut self, talk: &mut Talk) -> Result<Option<Done>, Ending> {
        for _ in 0..OVERHEAR_MAX {
            if talk.heard == Some(talk.capture.seen()) || talk.pace.is_over() {
                break;
            }
            let buffer = rustix::buffer::spare_capacity(self.reader.buffer());
            match rustix::io::read(&self.events, buffer) {
                Ok(bytes) if bytes > 0 => {
                    if let Some(done) = self.take_events(talk)? {
                        return Ok(Some(done));
                    }
                }
                // Nothing, or its end: that the reactor tells.
                _ => talk.heard = Some(talk.capture.seen()),
            }
        }
        if talk.heard == Some(talk.capture.seen()) {
            talk.tell();
        }
        talk.capture.over_limit().map_or(Ok(None), |stream| Err(Ending::StreamLimit(stream)))
    }

    /// Takes the lines that are here, as far as this turn goes.
    fn take_events(&mut self, talk: &mut Talk) -> Result<Option<Done>, Ending> {
        talk.heard = None;
        loop {
            match self.reader.next(&talk.nonce, &mut talk.pace).map_err(|_too_much| Ending::BrokeProtocol)? {
                None => return Ok(None),
                Some(Event::Done(done)) => return Ok(Some(done)),
                // Of a program; a cell has no tools.
                Some(Event::Calls(_)) => {}
                Some(Event::Rich(rich, _)) if !talk.capture.admits(&rich) => {}
                Some(Event::Rich(rich, at)) => {
                    let place = at.map(|at| talk.capture.place(at));
                    // What was printed before it is in the pipes by now, and belongs before it.
                    let drained = self.drain(talk, place.unwrap_or_default());
                    talk.pace.spend(drained);
                    talk.publish(rich, place);
                }
            }
        }
    }

    /// `expected` is what the interpreter says of either stream.
    fn drain(&mut self, talk: &mut Talk, expected: [usize; 2]) -> usize {
        talk.capture.drain(Stream::Stdout, &mut self.stdout, expected[0])
            + talk.capture.drain(Stream::Stderr, &mut self.stderr, expected[1])
    }

    /// The launcher hears of an end by itself, a moment after or before the pipes close.
    async fn end_reason(&mut self) -> Option<End> {
        match timeout(END_REASON_WAIT, self.ended.wait_for(Option::is_some)).await {
            Ok(Ok(end)) => *end,
            _ => None,
        }
    }
}

/// Waits for lines, unless some are here that were left for a later turn. False at the end of the pipe.
pub(super) async fn more_lines(events: &mut pipe::Receiver, reader: &mut EventReader) -> bool {
    reader.has_more() || events.read_buf(reader.buffer()).await.is_ok_and(|bytes| bytes > 0)
}

/// Resolves once the launcher has seen the end, or is itself gone.
pub(super) async fn seen_ended(ended: &mut watch::Receiver<Option<End>>) {
    drop(ended.wait_for(Option::is_some).await);
}

async fn write_rest(requests: &OwnedFd, rest: &[u8]) -> io::Result<()> {
    let mut sender = pipe::Sender::from_owned_fd_unchecked(requests.try_clone()?)?;
    sender.write_all(rest).await
}

/// Resolves when the run is to stop; never once nobody is left who could say so.
pub(super) async fn stopped(stop: &mut watch::Receiver<Option<Stopped>>) -> Stopped {
    if let Ok(reason) = stop.wait_for(Option::is_some).await
        && let Some(reason) = *reason
    {
        return reason;
    }
    std::future::pending().await
}

/// What one request and its answer need to remember.
struct Talk {
    nonce: Nonce,
    capture: Capture,
    pace: Pace,
    /// Bytes of each stream that had been read when no events were left.
    heard: Option<[usize; 2]>,
    timeout: Duration,
    phase: Phase,
    hush: Hush,
    quiet_until: Instant,
    deadline: Instant,
    given_up: Instant,
    execution_count: u64,
    feed: Option<Feed>,
    /// A kernel's interrupt on its way.
    interrupting: Option<JoinHandle<()>>,
}

/// Streams that write little and often are read by the clock for a moment.
#[derive(Debug)]
pub(super) struct Hush {
    pub(super) hushed: bool,
    pub(super) until: Instant,
    /// Small pieces that are still read at once.
    pieces_left: u32,
}

impl Hush {
    pub(super) fn new(now: Instant) -> Hush {
        Hush { hushed: false, until: now, pieces_left: 0 }
    }

    /// After a small piece the stream leaves the reactor for a moment: a guest that prints line by line would
    /// wake us, and wait for a processor, once per line.
    pub(super) fn piece(&mut self, bytes: usize, tap: &mut Tap) {
        if bytes >= BULK_BYTES {
            self.pieces_left = PIECES_AFTER_BULK;
        } else if self.pieces_left > 0 {
            self.pieces_left -= 1;
        } else {
            tap.unwatch();
            self.hush_on();
        }
    }

    /// The moment is over: a stream that went on in small pieces stays hushed, any other is watched again.
    pub(super) fn listen_again(&mut self, bytes: usize, tap: &mut Tap) {
        if bytes >= BULK_BYTES {
            self.pieces_left = PIECES_AFTER_BULK;
        }
        if bytes == 0 || bytes >= BULK_BYTES {
            tap.watch();
        } else {
            tap.unwatch();
            self.hush_on();
        }
    }

    fn hush_on(&mut self) {
        if !std::mem::replace(&mut self.hushed, true) {
            self.until = Instant::now() + HUSH;
        }
    }
}

#[derive(Copy, Clone, Debug, PartialEq, Eq)]
enum Phase {
    Quiet,
    Watching,
    Grace,
}

impl Talk {
    fn new(timeout: Duration, grace: Duration, chars_max: usize) -> Talk {
        let now = Instant::now();
        let deadline = now + timeout;
        Talk {
            nonce: Nonce::fresh(),
            capture: Capture::new(chars_max),
            pace: Pace::new(),
            heard: None,
            timeout,
            phase: Phase::Quiet,
            hush: Hush::new(now),
            quiet_until: deadline.min(now + QUIET),
            deadline,
            given_up: deadline + grace,
            execution_count: 0,
            feed: None,
            interrupting: None,
        }
    }

    fn phase_end(&self) -> Instant {
        match self.phase {
            Phase::Quiet => self.quiet_until,
            Phase::Watching => self.deadline,
            Phase::Grace => self.given_up,
        }
    }

    fn next_phase(&mut self) -> Result<(), Ending> {
        self.phase = match self.phase {
            Phase::Quiet => Phase::Watching,
            Phase::Watching => Phase::Grace,
            Phase::Grace => return Err(self.out_of_time()),
        };
        Ok(())
    }

    fn out_of_time(&self) -> Ending {
        let timeout = self.timeout;
        if self.interrupting.is_some() {
            Ending::Unstoppable { timeout }
        } else {
            Ending::TimedOut { timeout }
        }
    }

    /// Tells a watcher what has arrived.
    fn tell(&mut self) {
        if let Some(feed) = &mut self.feed {
            feed.text(&self.capture);
        }
    }

    /// `place`: behind so many bytes of each stream, or behind all that came.
    fn publish(&mut self, rich: Rich, place: Option<[usize; 2]>) {
        let told = self.feed.as_ref().map(Feed::told).unwrap_or_default();
        let place = place.map(|place| [place[0].max(told[0]), place[1].max(told[1])]);
        let later = place.map_or_else(Vec::new, |place| self.capture.set_aside(place));
        self.tell();
        let told = self.feed.is_some().then(|| rich.clone());
        if self.capture.insert(rich, self.execution_count)
            && let (Some(feed), Some(rich)) = (&mut self.feed, told)
        {
            feed.rich(rich, self.execution_count);
        }
        self.capture.put_back(later);
    }

    fn is_late(&self) -> bool {
        self.phase == Phase::Grace
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::engine::Output;
    use crate::harness::fake::Fake;
    use crate::harness::outcome::stream_text;

    const LIMITS: CellLimits = CellLimits {
        output_chars_max: 1_000,
        stream_bytes_max: None,
        grace: Duration::from_millis(300),
        interrupt_grace: Duration::from_millis(300),
        memory_mib_max: 512,
    };

    async fn run_for(interpreter: Interpreter, code: &str, timeout: Duration) -> Ran {
        let (_keep, mut stop) = watch::channel(None);
        interpreter
            .run(Cell { code, timeout, execution_count: 1, watcher: None, argv: None }, &LIMITS, &mut stop)
            .await
    }

    async fn run(code: &str) -> Ran {
        run_for(Fake::interpreter(), code, Duration::from_secs(10)).await
    }

    fn stream(name: Stream, text: &str) -> Output {
        Output::Stream { name, text: text.to_owned() }
    }

    fn last_error(ran: &Ran) -> (&str, &str) {
        match ran.outcome.outputs.last() {
            Some(Output::Error(error)) => (&error.ename, &error.evalue),
            other => panic!("no error: {other:?}"),
        }
    }

    #[tokio::test]
    async fn outputs_come_in_the_order_they_were_written() {
        let ran = run("out a\nerr b\nout c\nresult 42").await;
        assert_eq!(ran.outcome.ending, Ending::Completed);
        let (out, err) = (Stream::Stdout, Stream::Stderr);
        assert_eq!(ran.outcome.outputs[..3], [stream(out, "a\n"), stream(err, "b\n"), stream(out, "c\n")]);
        assert!(matches!(ran.outcome.outputs[3], Output::ExecuteResult { .. }));
        assert!(ran.interpreter.is_some());
    }

    /// What a watcher makes of the pieces it is told.
    fn folded(mut pieces: crate::engine::Pieces) -> Vec<Output> {
        use crate::engine::Piece;
        let (mut shown, mut clears) = (Vec::<(Output, Option<String>)>::new(), false);
        while let Some(piece) = pieces.try_recv() {
            match piece {
                Piece::Clear { wait: true } => clears = true,
                Piece::Clear { wait: false } => shown.clear(),
                Piece::Update { display_id, data, metadata } => {
                    for (output, _) in shown.iter_mut().filter(|it| it.1.as_ref() == Some(&display_id)) {
                        *output = Output::DisplayData { data: data.clone(), metadata: metadata.clone() };
                    }
                }
                Piece::Output { output, display_id } => {
                    if std::mem::take(&mut clears) {
                        shown.clear();
                    }
                    match (shown.last_mut(), &output) {
                        (
                            Some((Output::Stream { name: last, text: whole }, _)),
                            Output::Stream { name, text },
                        ) if last == name => whole.push_str(text),
                        _ => shown.push((output, display_id)),
                    }
                }
            }
        }
        shown.into_iter().map(|(output, _)| output).collect()
    }

    /// Runs a kernel's cell; what it came to, and what its watcher has made of it.
    async fn watched(script: &str) -> (Vec<Output>, Vec<Output>) {
        let (watcher, pieces) = crate::engine::pieces();
        let (_keep, mut stop) = watch::channel(None);
        let timeout = Duration::from_secs(10);
        let cell = Cell { code: script, timeout, execution_count: 1, watcher: Some(&watcher), argv: None };
        let ran = Fake::kernel(1).run(cell, &LIMITS, &mut stop).await;
        assert_eq!(ran.outcome.ending, Ending::Completed, "{script}");
        (ran.outcome.outputs, folded(pieces))
    }

    fn display(text: &str) -> Output {
        let data = crate::engine::Bundle::from_iter([("text/plain".to_owned(), text.into())]);
        Output::DisplayData { data, metadata: crate::engine::Bundle::new() }
    }

    #[tokio::test]
    async fn a_watcher_is_told_in_the_order_of_the_outputs() {
        let out = |text| stream(Stream::Stdout, text);
        for (script, wanted) in [
            ("out 1\nshow x\nout 2", vec![out("1\n"), display("x"), out("2\n")]),
            ("out 1\nsleep 30\nclear\nout 2", vec![out("2\n")]),
            ("out 1\nsleep 30\nclear-wait\nsleep 5\nout 2\nout 3", vec![out("2\n3\n")]),
            (
                "sleep 10\nshow x\nchild c\nshow y\nchild d",
                vec![display("x"), out("c\n"), display("y"), out("d\n")],
            ),
            ("bytes f09f\nshow x\nbytes 9880", vec![display("x"), out("\u{1f600}")]),
        ] {
            assert_eq!(watched(script).await, (wanted.clone(), wanted), "{script}");
        }
    }

    /// The outputs that a script must give whose text is all of one stream.
    fn modelled(script: &str) -> Vec<Output> {
        let (mut outputs, mut clears) = (Vec::new(), false);
        for step in script.lines() {
            let (verb, rest) = step.split_once(' ').unwrap_or((step, ""));
            match verb {
                "clear" => outputs.clear(),
                "clear-wait" => clears = true,
                "sleep" => {}
                _ => {
                    if std::mem::take(&mut clears) {
                        outputs.clear();
                    }
                    match (verb, outputs.last_mut()) {
                        ("show", _) => outputs.push(display(rest)),
                        ("show-and-update", _) => outputs.push(display("updated")),
                        (_, Some(Output::Stream { text, .. })) => text.push_str(&format!("{rest}\n")),
                        _ => outputs.push(stream(Stream::Stdout, &format!("{rest}\n"))),
                    }
                }
            }
        }
        outputs
    }

    proptest::proptest! {
        #![proptest_config(proptest::prelude::ProptestConfig::with_cases(150))]

        #[test]
        fn whatever_a_kernel_tells_and_clears_its_watcher_shows_the_outputs(
            steps in proptest::collection::vec(0_usize..16, 1..24),
            two_threads in proptest::prelude::any::<bool>(),
        ) {
            let mut builder = match two_threads {
                true => tokio::runtime::Builder::new_multi_thread(),
                false => tokio::runtime::Builder::new_current_thread(),
            };
            let runtime = builder.worker_threads(2).enable_all().build().expect("a runtime");
            let verbs = [
                "out a", "out b", "out c", "child d", "child e", "show f", "show g", "show h", "show i", "clear",
                "clear-wait", "show-and-update old updated", "sleep 1", "sleep 2", "sleep 3", "sleep 0",
            ];
            let script: Vec<&str> = steps.iter().map(|step| verbs[*step]).collect();
            let script = script.join("\n");
            let (outputs, told) = runtime.block_on(watched(&script));
            proptest::prop_assert_eq!(&told, &outputs, "{}", &script);
            // Who writes at the very moment of a read, beside the interpreter, is placed by guess.
            let alone = if two_threads { script.replace("child", "out") } else { script };
            let (outputs, told) = runtime.block_on(watched(&alone));
            proptest::prop_assert_eq!(&outputs, &modelled(&alone), "{}", &alone);
            proptest::prop_assert_eq!(&told, &outputs, "{}", &alone);
            // With a second stream both still stand rightly to what is published; to each other, as they came.
            let both = alone.replace("out b", "err b");
            let (outputs, told) = runtime.block_on(watched(&both));
            proptest::prop_assert_eq!(by_segment(told), by_segment(outputs), "{}", &both);
        }
    }

    /// Between two things published, the text of standard output before that of standard error.
    fn by_segment(outputs: Vec<Output>) -> Vec<Output> {
        let mut sorted = Vec::new();
        let mut text = [String::new(), String::new()];
        let flush = |text: &mut [String; 2], sorted: &mut Vec<Output>| {
            for (name, text) in [Stream::Stdout, Stream::Stderr].into_iter().zip(text) {
                if !text.is_empty() {
                    sorted.push(stream(name, &std::mem::take(text)));
                }
            }
        };
        for output in outputs {
            match output {
                Output::Stream { name, text: more } => {
                    text[usize::from(name == Stream::Stderr)].push_str(&more)
                }
                other => {
                    flush(&mut text, &mut sorted);
                    sorted.push(other);
                }
            }
        }
        flush(&mut text, &mut sorted);
        sorted
    }

    #[tokio::test]
    async fn an_exception_leaves_the_interpreter() {
        let ran = run("raise KeyError 'missing'").await;
        assert_eq!(ran.outcome.ending, Ending::Raised);
        assert_eq!(last_error(&ran), ("KeyError", "'missing'"));
        let again = run_for(ran.interpreter.expect("still there"), "out b", Duration::from_secs(10)).await;
        assert_eq!(again.outcome.stream(Stream::Stdout), "b\n");
    }

    #[tokio::test]
    async fn a_slow_cell_is_read_while_it_runs() {
        let ran = run("out a\nsleep 20\nerr b\nsleep 20\nchild c").await;
        let whole = stream_text(&ran.outcome.outputs, Stream::Stdout);
        assert_eq!((whole.as_str(), ran.outcome.stream(Stream::Stderr).as_str()), ("a\nc\n", "b\n"));
        assert_eq!(ran.outcome.outputs.len(), 3, "arrival order, because a child wrote too");
    }

    #[tokio::test]
    async fn many_small_writes_are_all_read() {
        let script = "out line\nchild c\nsleep 1\nerr e\n".repeat(80);
        let ran = run(&script).await;
        assert_eq!(ran.outcome.stream(Stream::Stdout), "line\nc\n".repeat(80));
        assert_eq!(ran.outcome.stream(Stream::Stderr), "e\n".repeat(80));
    }

    #[tokio::test]
    async fn a_flood_is_cut_and_does_not_stall_the_guest() {
        let ran = run("flood 3000000\nerr late\nresult 1").await;
        assert_eq!(ran.outcome.ending, Ending::Completed);
        assert_eq!(ran.outcome.outputs[0], stream(Stream::Stdout, &"x".repeat(1_000)));
        assert_eq!(ran.outcome.outputs[1], stream(Stream::Stderr, "[output truncated at 1000 characters]"),);
        assert!(matches!(ran.outcome.outputs[2], Output::ExecuteResult { .. }));
    }

    #[tokio::test]
    async fn a_stream_over_a_limit_of_its_own_ends_the_interpreter_at_once() {
        let limits = CellLimits { stream_bytes_max: Some(100_000), output_chars_max: 200_000, ..LIMITS };
        for (script, stream, kept) in [
            ("flood 100000\nerr e", None, 100_000),
            ("flood 99999\nshow x\nerr e\nbytes c3a4", Some(Stream::Stdout), 99_999),
            ("flood 3000000\nsleep 60000", Some(Stream::Stdout), 100_000),
            ("sleep 20\nflood 3000000\nsleep 60000", Some(Stream::Stdout), 100_000),
            ("err-flood 100001\nshow x\nsleep 60000", Some(Stream::Stderr), 100_000),
        ] {
            let (watcher, pieces) = crate::engine::pieces();
            let (_keep, mut stop) = watch::channel(None);
            let timeout = Duration::from_secs(50);
            let cell =
                Cell { code: script, timeout, execution_count: 1, watcher: Some(&watcher), argv: None };
            let begun = Instant::now();
            let ran = Fake::kernel(1).run(cell, &limits, &mut stop).await;
            assert!(begun.elapsed() < Duration::from_secs(10), "{script}");
            let ending = stream.map_or(Ending::Completed, Ending::StreamLimit);
            assert_eq!(
                (ran.outcome.ending, ran.interpreter.is_some()),
                (ending, stream.is_none()),
                "{script}"
            );
            assert_eq!(ran.outcome.stream(stream.unwrap_or(Stream::Stdout)).len(), kept, "{script}");
            assert!(!ran.outcome.stream(Stream::Stderr).contains("truncated"));
            // Which of two streams came first is the scheduler's.
            let told = CellOutcome { ending, outputs: folded(pieces) };
            for stream in [Stream::Stdout, Stream::Stderr] {
                assert_eq!(told.stream(stream), ran.outcome.stream(stream), "{script}");
            }
        }
    }

    /// An interpreter that a thread writes events of, and what holds its other ends.
    fn written_by(
        write: impl FnOnce(std::fs::File) + Send + 'static,
    ) -> (Interpreter, [OwnedFd; 3], watch::Sender<Option<End>>, std::thread::JoinHandle<()>) {
        let piped = || rustix::pipe::pipe_with(rustix::pipe::PipeFlags::CLOEXEC).expect("a pipe");
        let (requests, events, stdout, stderr) = (piped(), piped(), piped(), piped());
        for ours in [&requests.1, &events.0, &stdout.0, &stderr.0] {
            rustix::io::ioctl_fionbio(ours, true).expect("a pipe");
        }
        let (ended, seen) = watch::channel(None);
        struct Nobody;
        impl Hold for Nobody {
            fn interrupt(&self) -> Interrupting {
                Box::pin(std::future::ready(()))
            }
        }
        let pipes = Pipes { requests: requests.1, events: events.0, stdout: stdout.0, stderr: stderr.0 };
        let provenance = Provenance { sandbox: SandboxId(1), attestation: Attestation::default() };
        let interpreter = Interpreter::from_pipes(pipes, seen, provenance, false, Box::new(Nobody));
        let writer = std::thread::spawn(move || write(std::fs::File::from(events.1)));
        (interpreter.expect("inside the runtime"), [requests.0, stdout.1, stderr.1], ended, writer)
    }

    #[tokio::test]
    async fn a_flood_of_lines_leaves_others_their_turn() {
        let (interpreter, _ends, _ended, writer) = written_by(|mut events| {
            let line = b"{\"nonce\":\"another\",\"event\":\"clear\"}\n";
            io::Write::write_all(&mut events, &line.repeat(20_000)).expect("it is read");
        });
        let turns = std::sync::Arc::new(std::sync::atomic::AtomicUsize::new(0));
        let counted = std::sync::Arc::clone(&turns);
        let neighbour = tokio::spawn(async move {
            loop {
                counted.fetch_add(1, std::sync::atomic::Ordering::Relaxed);
                tokio::task::yield_now().await;
            }
        });
        // All in one thread. The pipe's end is no `done`.
        let run = run_for(interpreter, "x", Duration::from_secs(20));
        assert_eq!(run.await.outcome.ending, Ending::Died(None));
        assert!(turns.load(std::sync::atomic::Ordering::Relaxed) >= 20_000 / 128);
        neighbour.abort();
        writer.join().expect("no panic");
    }

    #[tokio::test]
    async fn time_is_up_whatever_arrives() {
        // Lines of the length that one counts at least, so that what a request may send lasts longer than its time.
        let line = [vec![b'x'; crate::harness::LINE_BYTES_LEAST - 1], vec![b'\n']].concat();
        let (interpreter, ends, _ended, writer) = written_by(move |mut events| {
            let lines = line.repeat(8);
            while io::Write::write_all(&mut events, &lines).is_ok() {}
        });
        let (begun, limit) = (Instant::now(), Duration::from_millis(10));
        let (_keep, mut stop) = watch::channel(None);
        let cell = Cell { code: "x", timeout: limit, execution_count: 1, watcher: None, argv: None };
        let limits = CellLimits { grace: Duration::ZERO, ..LIMITS };
        let ran = interpreter.run(cell, &limits, &mut stop).await;
        assert_eq!(ran.outcome.ending, Ending::TimedOut { timeout: limit });
        assert!(begun.elapsed() < Duration::from_secs(10));
        drop((ran, ends));
        writer.join().expect("it ends with the pipe");
    }

    #[tokio::test]
    async fn more_lines_than_a_cell_may_send_end_the_interpreter() {
        let (interpreter, ends, _ended, writer) =
            written_by(
                |mut events| {
                    while io::Write::write_all(&mut events, &b"x\n".repeat(2_048)).is_ok() {}
                },
            );
        let ran = run_for(interpreter, "x", Duration::from_secs(50)).await;
        assert_eq!(ran.outcome.ending, Ending::BrokeProtocol);
        drop((ran, ends));
        writer.join().expect("it ends with the pipe");
    }

    #[tokio::test]
    async fn forged_frames_and_garbage_change_nothing() {
        let forged = r#"{"nonce":"other","event":"done","result":"forged"}"#;
        let ran = run(&format!("frame {forged}\nframe nonsense\nframe [1\nresult own")).await;
        let [Output::ExecuteResult { data, .. }] = &ran.outcome.outputs[..] else { panic!("{ran:?}") };
        assert_eq!(data["text/plain"], "own");
    }

    #[tokio::test]
    async fn an_interrupt_that_may_still_arrive_costs_the_kernel_and_one_that_has_arrived_does_not() {
        let limit = Duration::from_millis(30);
        // The cell ends by itself after its time was up.
        let late = run_for(Fake::kernel(1), "sleep 60", limit).await;
        assert_eq!(late.outcome.ending, Ending::Interrupted { timeout: limit });
        assert!(late.interpreter.is_some());
        let unheard = run_for(Fake::kernel(1), "unheard\nsleep 60", limit).await;
        assert_eq!(unheard.outcome.ending, Ending::Unstoppable { timeout: limit });
        assert!(unheard.interpreter.is_none(), "its next cell would be interrupted");
    }

    #[tokio::test]
    async fn a_line_without_end_ends_the_interpreter() {
        let ran = run("out before\nendless").await;
        assert_eq!(ran.outcome.ending, Ending::BrokeProtocol);
        assert!(ran.interpreter.is_none());
        assert_eq!(ran.outcome.stream(Stream::Stdout), "before\n");
    }

    #[tokio::test]
    async fn a_cell_that_ends_in_the_grace_gives_its_outputs() {
        let ran = run_for(Fake::interpreter(), "sleep 120\nout late", Duration::from_millis(50)).await;
        assert_eq!(ran.outcome.ending.status(), crate::engine::Status::Timeout);
        assert_eq!(ran.outcome.stream(Stream::Stdout), "late\n");
        let text = "execution timed out after 50ms; session state was reset";
        assert_eq!(last_error(&ran), ("TimeoutError", text));
        assert!(ran.interpreter.is_none());
    }

    #[tokio::test]
    async fn a_cell_that_never_ends_gives_what_it_wrote() {
        let ran = run_for(Fake::interpreter(), "out early\nsleep 60000", Duration::from_millis(50)).await;
        assert_eq!(ran.outcome.ending, Ending::TimedOut { timeout: Duration::from_millis(50) });
        assert_eq!(ran.outcome.stream(Stream::Stdout), "early\n");
        assert!(ran.interpreter.is_none());
    }

    #[tokio::test]
    async fn a_death_says_why_and_keeps_what_was_written() {
        let ran = run("out early\nexit 3").await;
        assert_eq!(ran.outcome.stream(Stream::Stdout), "early\n");
        assert_eq!(last_error(&ran), ("ProcessError", "the interpreter exited with code 3"));
        assert!(ran.interpreter.is_none());
    }

    #[tokio::test]
    async fn a_death_without_a_word_is_told_as_such() {
        let ran = run("vanish").await;
        assert_eq!(last_error(&ran), ("ProcessError", "the interpreter ended unexpectedly"));
    }

    #[tokio::test]
    async fn a_deletion_ends_the_run_with_an_error() {
        let (stopper, mut stop) = watch::channel(None);
        let timeout = Duration::from_secs(60);
        let cell =
            Cell { code: "out a\nsleep 60000", timeout, execution_count: 1, watcher: None, argv: None };
        let later = async {
            tokio::time::sleep(Duration::from_millis(30)).await;
            stopper.send_replace(Some(Stopped::SessionDeleted));
        };
        let (ran, ()) = tokio::join!(Fake::interpreter().run(cell, &LIMITS, &mut stop), later);
        assert_eq!(last_error(&ran), ("ProcessError", "the session was deleted"));
        assert_eq!(ran.outcome.stream(Stream::Stdout), "a\n");
    }

    #[tokio::test]
    async fn a_frame_larger_than_the_pipe_arrives() {
        let ran = run(&format!("count {}", "y".repeat(300_000))).await;
        let [Output::ExecuteResult { data, .. }] = &ran.outcome.outputs[..] else { panic!("{ran:?}") };
        assert_eq!(data["text/plain"], "300000");
    }

    #[tokio::test]
    async fn a_directory_that_is_none_is_refused_before_any_code() {
        let refused = Fake::interpreter().change_directory("/missing").await;
        assert_eq!(refused.err(), Some(SetupFailed::NotADirectory));
        assert!(Fake::interpreter().change_directory("/tmp").await.is_ok());
    }

    #[tokio::test]
    async fn a_warm_up_leaves_nothing_behind() {
        let interpreter = Fake::interpreter().warm_up("out warm").await.expect("survives");
        let ran = run_for(interpreter, "out a", Duration::from_secs(10)).await;
        assert_eq!(ran.outcome.stream(Stream::Stdout), "a\n");
    }

    #[tokio::test]
    async fn split_characters_survive_slow_writes() {
        let ran = run("bytes f09f\nsleep 20\nbytes 9880").await;
        assert_eq!(ran.outcome.stream(Stream::Stdout), "\u{1f600}");
    }
}
