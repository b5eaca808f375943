//! The command agent: one in each session's sandbox. Starts the session's commands, each a fresh process of its own
//! group, and carries what goes into them and comes out of them.
//!
//! One thread, one `poll`. Nothing is kept here but input that a command has not read yet, which the daemon bounds;
//! output is read in pieces and written to descriptor 4 before more is read, so a command that writes faster than the
//! daemon reads has to wait.
#![forbid(unsafe_code)]

use std::collections::BTreeMap;
use std::io;
use std::os::fd::{AsFd, OwnedFd};
use std::process::ExitCode;
use std::time::{Duration, Instant};

use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::process::Signal;

use crate::sys::stage;

pub mod frame;
mod process;
mod shell;

use frame::{Broken, Decoder, Event, Found, REQUEST_BYTES_MAX, Request};
use process::{NotStarted, Piece, Process, read_piece};

/// Ended commands whose pipes are still held by what they left behind; the oldest is given up for one more.
const LINGERING_MAX: usize = 64;
/// Most bytes of requests read at once.
const READ_BYTES: usize = 64 * 1024;

/// Serves until the other end of descriptor 3 is closed.
pub(super) fn serve() -> ExitCode {
    let served = stage::inherited(2).and_then(|inherited| {
        let [requests, events] = <[OwnedFd; 2]>::try_from(inherited).expect("two were asked for");
        Agent::new(requests, events).run()
    });
    // There is nobody to tell: with the agent its sandbox ends.
    if served.is_ok() { ExitCode::SUCCESS } else { ExitCode::FAILURE }
}

struct Agent {
    requests: OwnedFd,
    events: OwnedFd,
    decoder: Decoder,
    /// By number, which grows.
    processes: BTreeMap<u32, Process>,
}

/// What became ready.
#[derive(Copy, Clone, Debug, PartialEq, Eq)]
enum Part {
    Requests,
    Life(u32),
    Stdin(u32),
    Stdout(u32),
    Stderr(u32),
    Lines(u32),
    Reports(u32),
    Calls(u32),
    Answers(u32),
}

impl Agent {
    fn new(requests: OwnedFd, events: OwnedFd) -> Agent {
        Agent { requests, events, decoder: Decoder::new(REQUEST_BYTES_MAX), processes: BTreeMap::new() }
    }

    fn run(&mut self) -> io::Result<()> {
        self.tell(&Event::Ready(look_around()))?;
        loop {
            for part in self.wait()? {
                if part == Part::Requests && !self.hear()? {
                    return Ok(());
                }
                self.serve_part(part)?;
            }
            self.settle()?;
        }
    }

    /// Waits until something is ready or due.
    fn wait(&self) -> io::Result<Vec<Part>> {
        let mut wanted = vec![(Part::Requests, &self.requests, PollFlags::IN)];
        let mut due = None::<Instant>;
        for (&number, process) in &self.processes {
            let lines = process.lines.as_ref();
            let of_process = [
                (Part::Life(number), process.life.as_ref(), PollFlags::IN),
                (Part::Stdin(number), process.stdin.waiting(), PollFlags::OUT),
                (Part::Stdout(number), process.stdout.as_ref(), PollFlags::IN),
                (Part::Stderr(number), process.stderr.as_ref(), PollFlags::IN),
                (Part::Lines(number), lines.and_then(|lines| lines.feed.waiting()), PollFlags::OUT),
                (Part::Reports(number), lines.and_then(|lines| lines.reports.as_ref()), PollFlags::IN),
                (Part::Calls(number), process.calls.as_ref(), PollFlags::IN),
                (Part::Answers(number), process.answers.waiting(), PollFlags::OUT),
            ];
            let open = of_process.into_iter().filter_map(|(part, open, flags)| Some((part, open?, flags)));
            wanted.extend(open);
            let dues = [process.late_at(), lines.and_then(shell::Lines::settles_at)];
            due = dues.into_iter().flatten().chain(due).min();
        }
        let mut polled: Vec<PollFd<'_>> =
            wanted.iter().map(|(_, open, flags)| PollFd::from_borrowed_fd(open.as_fd(), *flags)).collect();
        let wait = due.map(|due| timespec(due.saturating_duration_since(Instant::now())));
        match poll(&mut polled, wait.as_ref()) {
            Ok(_) | Err(rustix::io::Errno::INTR) => {}
            Err(error) => return Err(error.into()),
        }
        let ready = wanted.iter().zip(&polled).filter(|(_, polled)| !polled.revents().is_empty());
        Ok(ready.map(|((part, ..), _)| *part).collect())
    }

    /// Reads requests. False once there will be none.
    fn hear(&mut self) -> io::Result<bool> {
        let mut bytes = [0; READ_BYTES];
        let length = match rustix::io::read(&self.requests, &mut bytes) {
            Ok(0) => return Ok(false),
            Ok(length) => length,
            Err(rustix::io::Errno::AGAIN | rustix::io::Errno::INTR) => return Ok(true),
            Err(error) => return Err(error.into()),
        };
        self.decoder.buffer().extend_from_slice(&bytes[..length]);
        while let Some(request) = self.decoder.request().map_err(|Broken| io::Error::other(Broken))? {
            self.take(request)?;
        }
        Ok(true)
    }

    fn take(&mut self, request: Request) -> io::Result<()> {
        match request {
            Request::Start { number, start } => self.started(number, Process::start(&start)),
            Request::Shell { number, shell } => self.started(number, shell::start(&shell)),
            Request::Stdin { number, bytes } => {
                if let Some(process) = self.processes.get_mut(&number) {
                    process.stdin.push(&bytes);
                    let taken = process.stdin.pump();
                    self.tell_taken(number, taken)?;
                }
                Ok(())
            }
            Request::StdinEnd { number } => {
                if let Some(process) = self.processes.get_mut(&number) {
                    process.stdin.end();
                    let taken = process.stdin.pump();
                    self.tell_taken(number, taken)?;
                }
                Ok(())
            }
            Request::Signal { number, signal } => {
                let signal = Signal::from_named_raw(i32::from(signal));
                if let (Some(process), Some(signal)) = (self.processes.get(&number), signal) {
                    process.signal(signal);
                }
                Ok(())
            }
            Request::Line { number, line } => {
                let lines = self.processes.get_mut(&number).and_then(|process| process.lines.as_mut());
                // A shell that has just ended says so by its exit.
                let Some(lines) = lines else { return Ok(()) };
                let number = line.nonce;
                let taken = lines.push(&line);
                self.tell(&if taken { Event::Started { number } } else { Event::NotADirectory { number } })
            }
            Request::Answer { number, line } => {
                if let Some(process) = self.processes.get_mut(&number) {
                    process.answers.push(&line);
                    process.answers.pump();
                }
                Ok(())
            }
        }
    }

    fn started(&mut self, number: u32, started: Result<Process, NotStarted>) -> io::Result<()> {
        match started {
            Ok(process) => {
                self.processes.insert(number, process);
                self.tell(&Event::Started { number })
            }
            Err(NotStarted::NotADirectory) => self.tell(&Event::NotADirectory { number }),
            // As a shell says it, and ends for it.
            Err(failed) => {
                self.tell(&Event::Started { number })?;
                if let NotStarted::Failed(name, error) = &failed {
                    let text: String = format!("{name}: {error}\n").chars().take(1024).collect();
                    self.tell(&Event::Stderr { number, bytes: text.into_bytes() })?;
                }
                self.tell(&Event::Exit { number, exit: failed.exit() })
            }
        }
    }

    fn serve_part(&mut self, part: Part) -> io::Result<()> {
        let (Part::Life(number)
        | Part::Stdin(number)
        | Part::Stdout(number)
        | Part::Stderr(number)
        | Part::Lines(number)
        | Part::Reports(number)
        | Part::Calls(number)
        | Part::Answers(number)) = part
        else {
            return Ok(());
        };
        let Some(process) = self.processes.get_mut(&number) else { return Ok(()) };
        match part {
            Part::Requests => Ok(()),
            Part::Life(_) => process.reap(),
            Part::Stdin(_) => {
                let taken = process.stdin.pump();
                self.tell_taken(number, taken)
            }
            Part::Stdout(_) => match read_piece(&mut process.stdout) {
                Piece::Bytes(bytes) => self.tell(&Event::Stdout { number, bytes }),
                Piece::Nothing | Piece::Closed => Ok(()),
            },
            Part::Stderr(_) => match read_piece(&mut process.stderr) {
                Piece::Bytes(bytes) => self.tell(&Event::Stderr { number, bytes }),
                Piece::Nothing | Piece::Closed => Ok(()),
            },
            Part::Calls(_) => match read_piece(&mut process.calls) {
                Piece::Bytes(bytes) => self.tell(&Event::Call { number, bytes }),
                Piece::Nothing | Piece::Closed => Ok(()),
            },
            Part::Answers(_) => {
                process.answers.pump();
                Ok(())
            }
            Part::Lines(_) => {
                if let Some(lines) = &mut process.lines {
                    lines.feed.pump();
                }
                Ok(())
            }
            Part::Reports(_) => {
                if let Some(lines) = &mut process.lines {
                    lines.hear(Instant::now());
                }
                Ok(())
            }
        }
    }

    /// Tells what is due, and forgets what is over.
    fn settle(&mut self) -> io::Result<()> {
        let now = Instant::now();
        let mut due = Vec::new();
        for (&number, process) in &mut self.processes {
            if let Some(lines) = &mut process.lines {
                due.extend(lines.settled(now, number));
            }
            if let Some(exit) = process.over(now) {
                process.told = true;
                process.stdin.close();
                due.push(Event::Exit { number, exit });
            }
        }
        for event in due {
            self.tell(&event)?;
        }
        self.processes.retain(|_, process| !process.is_forgotten());
        let lingering: Vec<u32> =
            self.processes.iter().filter(|(_, process)| process.told).map(|(&number, _)| number).collect();
        for number in &lingering[..lingering.len().saturating_sub(LINGERING_MAX)] {
            self.processes.remove(number);
        }
        Ok(())
    }

    fn tell_taken(&self, number: u32, bytes: usize) -> io::Result<()> {
        match u32::try_from(bytes) {
            Ok(bytes) if bytes > 0 => self.tell(&Event::Taken { number, bytes }),
            _ => Ok(()),
        }
    }

    fn tell(&self, event: &Event) -> io::Result<()> {
        let frame = event.encode();
        let mut rest = &frame[..];
        while !rest.is_empty() {
            match rustix::io::write(&self.events, rest) {
                Ok(written) => rest = &rest[written..],
                Err(rustix::io::Errno::INTR) => {}
                Err(error) => return Err(error.into()),
            }
        }
        Ok(())
    }
}

/// What this sandbox has.
fn look_around() -> Found {
    let path = std::env::var_os("PATH").unwrap_or_default();
    let look = |name: &str| {
        let found = std::env::split_paths(&path).map(|folder| folder.join(name)).find(|program| {
            rustix::fs::access(program, rustix::fs::Access::EXEC_OK).is_ok() && program.is_file()
        });
        found.and_then(|program| program.to_str().map(str::to_owned))
    };
    Found { bash: look("bash"), sh: look("sh"), ps: look("ps"), terminal: shell::has_terminal() }
}

fn timespec(wait: Duration) -> Timespec {
    // Rounded up: a wait that is too short by a hair would be made many times.
    let wait = wait + Duration::from_millis(1);
    Timespec {
        tv_sec: wait.as_secs().try_into().unwrap_or(i64::MAX),
        tv_nsec: i64::from(wait.subsec_nanos()),
    }
}
