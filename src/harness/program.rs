//! Programs: a text that a fresh interpreter runs once, as it would run a file, and then is over.
//!
//! ```text
//!  write frame ──► Quiet (2 ms) ──► Watching ──► the time is up: killed at once
//!                    │ done            │ done, a stream's limit, the launcher's word on its end
//!                    ▼                 ▼
//!                  drain both streams without waiting
//!
//! Behind its last word a program stands still, and is its caller's to end; any other end is the interpreter's as well.
//! ```
//!
//! With tools the clock stands while a call waits for its answer, and starts anew with the answer: the limit bounds
//! each stretch of the program between two calls.
#![forbid(unsafe_code)]

use std::io;
use std::os::fd::OwnedFd;
use std::time::Duration;

use tokio::net::unix::pipe;
use tokio::sync::watch;
use tokio::time::{Instant, sleep_until};

use crate::engine::{Output, Piece, Stream, Watcher};
use crate::harness::capture::{
    DRAIN_BYTES_MAX, DRAIN_READS_MAX, FIRST_READ_BYTES, READ_BYTES, Tap, Wake, whole_chars,
};
use crate::harness::frame::{self, Ask, Event, Nonce, encode, encode_answers};
use crate::harness::interpreter::{Hush, Interpreter, QUIET, more_lines, seen_ended, stopped};
use crate::harness::outcome::Stopped;
use crate::harness::pace::Pace;
use crate::harness::tools::CALL_BYTES_MAX;
pub use crate::harness::tools::{
    CALLS_MAX, CallBook, Called, Json, LineCalls, SameFunction, TooManyCalls, ToolAnswer, ToolCall,
    ToolLanguage, ToolName, ToolPort, bash_stubs,
};
use crate::launcher::plan::End;

/// What is said when the time is up without a limit: never, in a human's life.
const FOREVER: Duration = Duration::from_secs(30 * 365 * 24 * 3600);

/// One program for an interpreter.
#[derive(Copy, Clone, Debug)]
pub struct ProgramRun<'a> {
    pub code: &'a str,
    pub args: &'a [String],
    pub typescript: bool,
    /// What it may call, if a [`ToolPort`] comes with it.
    pub tools: &'a [ToolName],
    pub timeout: Duration,
    /// Hears of its output while it runs.
    pub watcher: Option<&'a Watcher>,
}

/// What bounds it besides its time.
#[derive(Copy, Clone, Debug)]
pub struct ProgramLimits {
    /// Of each stream. Beyond it the program is killed, and what fits is kept.
    pub stream_bytes_max: usize,
    pub memory_mib_max: u64,
}

/// How it came to its end.
#[derive(Copy, Clone, Debug, PartialEq, Eq)]
pub enum ProgramEnd {
    Exited(i32),
    Signaled(i32),
    TimeLimit,
    StdoutLimit,
    StderrLimit,
    OutOfMemory,
    SpaceFull,
    /// More tool calls than one program may make.
    CallLimit,
    /// By us, or whoever carries out its calls has gone.
    Stopped,
    LauncherGone,
    /// Nobody knows: no word of the launcher's, or the control protocol was broken.
    Lost,
}

/// A program that is over.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ProgramOutcome {
    /// What is no UTF-8 is replaced.
    pub stdout: String,
    pub stderr: String,
    pub end: ProgramEnd,
}

impl ProgramEnd {
    /// From the launcher's word on a sandbox that ended under its program.
    pub(crate) fn of_launcher(end: Option<End>) -> ProgramEnd {
        match end {
            Some(End::Exited(code)) => ProgramEnd::Exited(code.into()),
            Some(End::Signaled(signal)) => ProgramEnd::Signaled(signal.into()),
            Some(End::OutOfMemory) => ProgramEnd::OutOfMemory,
            Some(End::SpaceFull) => ProgramEnd::SpaceFull,
            Some(End::CpuSpent) => ProgramEnd::TimeLimit,
            Some(End::Ended) => ProgramEnd::Stopped,
            Some(End::LauncherGone) => ProgramEnd::LauncherGone,
            Some(End::Mismatch) | None => ProgramEnd::Lost,
        }
    }
}

impl Interpreter {
    /// Runs a program in an interpreter that has run nothing yet; `stop` ends it early. The time starts now.
    ///
    /// Where it called tools and `tools` is dropped at its other end, it is stopped: nobody would answer. A program that
    /// has told its own end stands still, and its interpreter comes back to be dropped.
    pub async fn run_program(
        mut self,
        run: ProgramRun<'_>,
        limits: &ProgramLimits,
        stop: &mut watch::Receiver<Option<Stopped>>,
        tools: Option<ToolPort>,
    ) -> (ProgramOutcome, Option<Interpreter>) {
        let ask = Ask::Program(frame::Program {
            code: run.code,
            args: run.args,
            typescript: run.typescript,
            tools: tools.is_some().then_some(run.tools),
            timeout_ms: u64::try_from(run.timeout.as_millis()).unwrap_or(u64::MAX),
        });
        let nonce = Nonce::fresh();
        let frame = match encode(&nonce, false, ask) {
            Ok(frame) => frame,
            Err(too_long) => {
                let stderr = format!("{too_long}\n");
                let end = ProgramEnd::Exited(1);
                return (ProgramOutcome { stdout: String::new(), stderr, end }, None);
            }
        };
        let mut play = Play::new(nonce, run, limits, tools);
        let told = self.listen_to(&mut play, frame, stop).await;
        play.streams.drain(&mut self.stdout, &mut self.stderr);
        match told {
            Ok(status) => (play.streams.outcome(ProgramEnd::Exited(status.into())), Some(self)),
            Err(end) => {
                // Killed before its last words are looked at, so that it does nothing more.
                drop(self);
                (play.streams.outcome(end), None)
            }
        }
    }

    /// The status that it gave, or how else it ended.
    async fn listen_to(
        &mut self,
        play: &mut Play<'_>,
        frame: Vec<u8>,
        stop: &mut watch::Receiver<Option<Stopped>>,
    ) -> Result<u8, ProgramEnd> {
        self.reader.begin(CALL_BYTES_MAX);
        play.outbox.push(&self.requests, frame);
        let mut hears_events = true;
        loop {
            let (deadline, hears_answers) = (play.phase_end(), play.hears_answers);
            if Instant::now() >= deadline {
                if play.quiet_until.is_none() {
                    return Err(ProgramEnd::TimeLimit);
                }
                self.watch_streams(play);
                continue;
            }
            tokio::select! {
                is_there = more_lines(&mut self.events, &mut self.reader), if hears_events => {
                    if !is_there {
                        // It is gone, or has closed that descriptor and goes on: the launcher tells.
                        hears_events = false;
                        self.watch_streams(play);
                    } else if let Some(status) = self.take_program_events(play)? {
                        play.streams.drain(&mut self.stdout, &mut self.stderr);
                        return play.streams.limit().map_or(Ok(status), Err);
                    }
                }
                () = self.stdout.readable() => {
                    let bytes = play.streams.read(Stream::Stdout, &mut self.stdout, Wake::Reactor);
                    play.pace.spend(bytes);
                    play.streams.tell();
                    play.streams.limit().map_or(Ok(()), Err)?;
                    play.hush.piece(bytes, &mut self.stdout);
                }
                () = self.stderr.readable() => {
                    let bytes = play.streams.read(Stream::Stderr, &mut self.stderr, Wake::Reactor);
                    play.pace.spend(bytes);
                    play.streams.tell();
                    play.streams.limit().map_or(Ok(()), Err)?;
                    play.hush.piece(bytes, &mut self.stderr);
                }
                () = sleep_until(play.hush.until), if play.hush.hushed => {
                    play.hush.hushed = false;
                    let bytes = play.streams.drain_one(Stream::Stdout, &mut self.stdout);
                    play.pace.spend(bytes);
                    play.hush.listen_again(bytes, &mut self.stdout);
                    let bytes = play.streams.drain_one(Stream::Stderr, &mut self.stderr);
                    play.pace.spend(bytes);
                    play.hush.listen_again(bytes, &mut self.stderr);
                    play.streams.tell();
                    play.streams.limit().map_or(Ok(()), Err)?;
                }
                () = seen_ended(&mut self.ended) => {
                    play.streams.drain(&mut self.stdout, &mut self.stderr);
                    let end = ProgramEnd::of_launcher(*self.ended.borrow());
                    return Err(play.streams.limit().unwrap_or(end));
                }
                _reason = stopped(stop) => return Err(ProgramEnd::Stopped),
                sent = play.outbox.send(), if play.outbox.waits() => {
                    if sent.is_err() {
                        // Nobody reads there any more: as above.
                        play.outbox.clear();
                    }
                }
                answers = heard(&mut play.tools), if hears_answers => match answers {
                    Some(answers) => play.answer(&self.requests, answers),
                    None if !play.calls.waits() => play.hears_answers = false,
                    None => return Err(ProgramEnd::Stopped),
                },
                () = sleep_until(deadline) => {}
            }
            play.pace.rest().await;
        }
    }

    fn watch_streams(&mut self, play: &mut Play<'_>) {
        play.quiet_until = None;
        self.stdout.watch();
        self.stderr.watch();
    }

    /// Its status, once it has told it.
    fn take_program_events(&mut self, play: &mut Play<'_>) -> Result<Option<u8>, ProgramEnd> {
        // What it sends is calls, but for its last word, and that alone where it has no tools.
        let too_much = if play.tools.is_some() { ProgramEnd::CallLimit } else { ProgramEnd::Lost };
        loop {
            match self.reader.next(&play.nonce, &mut play.pace).map_err(|_too_much| too_much)? {
                None => return Ok(None),
                // Without a status it is of an interpreter that could not run it.
                Some(Event::Done(done)) => return Ok(Some(done.exit.unwrap_or(1))),
                Some(Event::Rich(..)) => {}
                Some(Event::Calls(calls)) if play.tools.is_some() => {
                    // What was printed before them is in the pipes by now.
                    let drained = play.streams.drain(&mut self.stdout, &mut self.stderr);
                    play.pace.spend(drained);
                    play.streams.limit().map_or(Ok(()), Err)?;
                    play.call(&self.requests, calls)?;
                }
                Some(Event::Calls(_)) => {}
            }
        }
    }
}

async fn heard(tools: &mut Option<ToolPort>) -> Option<Vec<ToolAnswer>> {
    match tools {
        Some(port) => port.answers.recv().await,
        None => std::future::pending().await,
    }
}

/// What one program and its end need to remember.
struct Play<'a> {
    nonce: Nonce,
    streams: Streams<'a>,
    outbox: Outbox,
    pace: Pace,
    timeout: Duration,
    deadline: Instant,
    /// Until then its streams are not watched.
    quiet_until: Option<Instant>,
    hush: Hush,
    tools: Option<ToolPort>,
    hears_answers: bool,
    calls: CallBook,
}

impl Play<'_> {
    fn new<'a>(
        nonce: Nonce,
        run: ProgramRun<'a>,
        limits: &ProgramLimits,
        tools: Option<ToolPort>,
    ) -> Play<'a> {
        let now = Instant::now();
        Play {
            nonce,
            streams: Streams::new(limits.stream_bytes_max, run.watcher),
            outbox: Outbox::default(),
            pace: Pace::new(),
            timeout: run.timeout.min(FOREVER),
            deadline: now + run.timeout.min(FOREVER),
            quiet_until: Some(now + QUIET.min(run.timeout)),
            hush: Hush::new(now),
            hears_answers: tools.is_some(),
            tools,
            calls: CallBook::default(),
        }
    }

    fn phase_end(&self) -> Instant {
        match self.quiet_until {
            Some(until) => until,
            None if !self.calls.waits() => self.deadline,
            None => Instant::now() + FOREVER,
        }
    }

    /// Passes calls on.
    fn call(&mut self, requests: &OwnedFd, calls: Vec<Called>) -> Result<(), ProgramEnd> {
        let (fit, unfit) = self.calls.take(calls).map_err(|TooManyCalls| ProgramEnd::CallLimit)?;
        if !unfit.is_empty() {
            self.outbox.push(requests, encode_answers(&self.nonce, &unfit));
        }
        let Some(port) = self.tools.as_ref().filter(|_| !fit.is_empty()) else { return Ok(()) };
        if !self.hears_answers {
            return Err(ProgramEnd::Stopped);
        }
        port.calls.send(fit).map_err(|_gone| ProgramEnd::Stopped)
    }

    fn answer(&mut self, requests: &OwnedFd, answers: Vec<ToolAnswer>) {
        let answers = self.calls.answered(answers);
        if answers.is_empty() {
            return;
        }
        self.outbox.push(requests, encode_answers(&self.nonce, &answers));
        self.deadline = Instant::now() + self.timeout;
    }
}

/// Bytes on their way to an interpreter that may not read them at once.
#[derive(Debug, Default)]
struct Outbox {
    bytes: Vec<u8>,
    sent: usize,
    sender: Option<pipe::Sender>,
}

impl Outbox {
    /// One write, nearly always; what does not fit into the pipe is sent when there is room.
    fn push(&mut self, requests: &OwnedFd, bytes: Vec<u8>) {
        if self.waits() {
            self.bytes.extend_from_slice(&bytes);
            return;
        }
        match rustix::io::write(requests, &bytes) {
            Ok(sent) if sent == bytes.len() => return,
            Ok(sent) => (self.bytes, self.sent) = (bytes, sent),
            Err(rustix::io::Errno::AGAIN | rustix::io::Errno::INTR) => (self.bytes, self.sent) = (bytes, 0),
            // Nobody reads there any more; why, the launcher tells.
            Err(_) => return,
        }
        if self.sender.is_none() {
            let sender = requests.try_clone().and_then(pipe::Sender::from_owned_fd_unchecked);
            match sender {
                Ok(sender) => self.sender = Some(sender),
                Err(error) => {
                    tracing::error!(%error, "failed to watch the requests of an interpreter");
                    self.clear();
                }
            }
        }
    }

    fn waits(&self) -> bool {
        self.sent < self.bytes.len()
    }

    /// Dropped in the middle it has lost nothing.
    async fn send(&mut self) -> io::Result<()> {
        let Some(sender) = &self.sender else { return std::future::pending().await };
        loop {
            sender.writable().await?;
            match sender.try_write(&self.bytes[self.sent..]) {
                Ok(sent) => self.sent += sent,
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => continue,
                Err(error) => return Err(error),
            }
            if !self.waits() {
                self.clear();
            }
            return Ok(());
        }
    }

    fn clear(&mut self) {
        (self.bytes, self.sent) = (Vec::new(), 0);
    }
}

/// What it writes, up to a limit for each stream.
struct Streams<'a> {
    bytes_max: usize,
    stdout: Kept,
    stderr: Kept,
    watcher: Option<&'a Watcher>,
}

#[derive(Debug, Default)]
struct Kept {
    bytes: Vec<u8>,
    over: bool,
    /// So many bytes the watcher has heard of.
    told: usize,
}

impl Streams<'_> {
    fn new(bytes_max: usize, watcher: Option<&Watcher>) -> Streams<'_> {
        Streams { bytes_max, stdout: Kept::default(), stderr: Kept::default(), watcher }
    }

    fn limit(&self) -> Option<ProgramEnd> {
        match (self.stdout.over, self.stderr.over) {
            (true, _) => Some(ProgramEnd::StdoutLimit),
            (_, true) => Some(ProgramEnd::StderrLimit),
            (false, false) => None,
        }
    }

    /// Reads once; returns how many bytes came.
    fn read(&mut self, stream: Stream, tap: &mut Tap, wake: Wake) -> usize {
        let bytes_max = self.bytes_max;
        let kept = self.kept(stream);
        kept.bytes.reserve(if kept.bytes.is_empty() { FIRST_READ_BYTES } else { READ_BYTES });
        let Some(bytes) = tap.read(&mut kept.bytes, wake) else { return 0 };
        if kept.bytes.len() > bytes_max {
            kept.bytes.truncate(bytes_max);
            kept.over = true;
        }
        bytes
    }

    /// Takes what is in both pipes now, without waiting.
    fn drain(&mut self, stdout: &mut Tap, stderr: &mut Tap) -> usize {
        let drained = self.drain_one(Stream::Stdout, stdout) + self.drain_one(Stream::Stderr, stderr);
        self.tell();
        drained
    }

    fn drain_one(&mut self, stream: Stream, tap: &mut Tap) -> usize {
        let mut drained = 0;
        for _ in 0..DRAIN_READS_MAX {
            let bytes = self.read(stream, tap, Wake::Reply);
            drained += bytes;
            if bytes == 0 || drained >= DRAIN_BYTES_MAX || self.kept(stream).over {
                break;
            }
        }
        drained
    }

    fn tell(&mut self) {
        self.tell_one(Stream::Stdout, false);
        self.tell_one(Stream::Stderr, false);
    }

    fn tell_one(&mut self, stream: Stream, last: bool) {
        let Some(watcher) = self.watcher else { return };
        let kept = self.kept(stream);
        let fresh = &kept.bytes[kept.told..];
        let whole = if last { fresh.len() } else { whole_chars(fresh) };
        if whole == 0 {
            return;
        }
        let text = String::from_utf8_lossy(&fresh[..whole]).into_owned();
        kept.told += whole;
        let output = Output::Stream { name: stream, text };
        // Nobody listens any more: the program goes on.
        drop(watcher.send(Piece::Output { output, display_id: None }));
    }

    fn outcome(mut self, end: ProgramEnd) -> ProgramOutcome {
        for stream in [Stream::Stdout, Stream::Stderr] {
            let kept = self.kept(stream);
            if kept.over {
                // The limit's doing, and not the program's.
                kept.bytes.truncate(whole_chars(&kept.bytes).max(kept.told));
            }
            self.tell_one(stream, true);
        }
        ProgramOutcome { stdout: text(self.stdout.bytes), stderr: text(self.stderr.bytes), end }
    }

    fn kept(&mut self, stream: Stream) -> &mut Kept {
        match stream {
            Stream::Stdout => &mut self.stdout,
            Stream::Stderr => &mut self.stderr,
        }
    }
}

fn text(bytes: Vec<u8>) -> String {
    String::from_utf8(bytes).unwrap_or_else(|error| String::from_utf8_lossy(error.as_bytes()).into_owned())
}

#[cfg(test)]
mod tests;
