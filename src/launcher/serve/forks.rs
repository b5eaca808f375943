//! What confinement costs: forks of one zygote that become guests, against bare ones, in turn.
//!
//! Both end with the answer to the same first cell. Nobody but `caisson bench-fork` comes here: the launcher that
//! measures hears no daemon, and the bare fork is a job that only the library of its template knows.
#![forbid(unsafe_code)]

use std::fs::File;
use std::io::{self, Read, Write};
use std::os::fd::{AsFd, OwnedFd};
use std::thread::sleep;
use std::time::{Duration, Instant};

use rustix::event::{PollFd, PollFlags, poll};
use rustix::fs::{Mode, OFlags};
use rustix::net::RecvFlags;
use rustix::pipe::{PipeFlags, pipe_with};
use serde::Serialize;

use super::{Launcher, Loop, Stage};
use crate::launcher::plan::{LaunchPlan, Origin, Profile, REPLY_BYTES, Reply, Request, SandboxId, SpaceId};
use crate::launcher::wire::{self, Job, slot};
use crate::sys::packet;

const SPACE: SpaceId = SpaceId(1);
/// Rounds that are thrown away first.
const ROUNDS_COLD: u32 = 5;
/// Between two forks: the kernel takes the last one's namespaces down meanwhile.
const PAUSE: Duration = Duration::from_millis(10);
const CELL: &[u8] = b"{\"nonce\":\"\",\"timeout_ms\":1000,\"code\":\"print(1)\"}\n";

/// Microseconds of each round, in the order of the rounds.
#[derive(Debug, Default, Serialize)]
pub struct Forks {
    /// From the daemon's packet over the move, the checks from outside and the release to the cell's answer.
    pub confined_us: Vec<f64>,
    /// From the zygote's packet to the same answer.
    pub bare_us: Vec<f64>,
}

/// The daemon's side of a fork's pipes.
struct Talk {
    requests: File,
    events: File,
    stdout: File,
}

impl Launcher {
    /// Measures, and ends everything it made.
    pub fn measure_forks(mut self, rounds: u32) -> io::Result<Forks> {
        let (daemon, launcher) = packet::pair()?;
        let starter = std::mem::replace(&mut self.daemon, launcher);
        let mut state = self.begin()?;
        let measured = state.rounds(rounds, &daemon, &starter);
        state.begin_end("everything is measured");
        state.finish()?;
        measured
    }
}

impl Loop {
    fn rounds(&mut self, rounds: u32, daemon: &OwnedFd, starter: &OwnedFd) -> io::Result<Forks> {
        let mut forks = Forks::default();
        for round in 0..ROUNDS_COLD + rounds {
            if gone(starter)? {
                return Err(io::Error::other("nobody waits for the measurement any more"));
            }
            let (confined, bare) = if round % 2 == 0 {
                let confined = self.confined(daemon)?;
                (confined, self.bare()?)
            } else {
                let bare = self.bare()?;
                (self.confined(daemon)?, bare)
            };
            if round >= ROUNDS_COLD {
                forks.confined_us.push(confined.as_secs_f64() * 1e6);
                forks.bare_us.push(bare.as_secs_f64() * 1e6);
            }
        }
        Ok(forks)
    }

    fn confined(&mut self, daemon: &OwnedFd) -> io::Result<Duration> {
        self.settle()?;
        let plan = LaunchPlan::new(SPACE, Profile::Python, Origin::Warm);
        let started = Instant::now();
        let request = Request::Launch { seq: self.seq_seen + 1, plan };
        packet::send(daemon, &request.encode(), &[])?;
        let (sandbox, descriptors) = self.launched(daemon)?;
        let [requests, events, stdout, _stderr] = descriptors;
        let talk = Talk { requests: requests.into(), events: events.into(), stdout: stdout.into() };
        talk.answered()?;
        let took = started.elapsed();
        let request = Request::End { seq: self.seq_seen + 1, sandbox };
        packet::send(daemon, &request.encode(), &[])?;
        while self.entries.contains_key(&sandbox.0) {
            self.turn()?;
        }
        Ok(took)
    }

    /// Serves until the launch is answered.
    fn launched(&mut self, daemon: &OwnedFd) -> io::Result<(SandboxId, [OwnedFd; 4])> {
        let mut packet = [0_u8; REPLY_BYTES];
        loop {
            match packet::receive(daemon, &mut packet, RecvFlags::DONTWAIT) {
                Ok((length, descriptors)) => {
                    let descriptors = <[OwnedFd; 4]>::try_from(descriptors);
                    match (Reply::decode(&packet[..length]).map_err(io::Error::other)?, descriptors) {
                        (Reply::Launched { sandbox, .. }, Ok(descriptors)) => {
                            return Ok((sandbox, descriptors));
                        }
                        // The end of an earlier one.
                        (Reply::Ended { .. }, _) => {}
                        (other, _) => return Err(io::Error::other(format!("not launched: {other:?}"))),
                    }
                }
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => self.turn()?,
                Err(error) => return Err(error),
            }
        }
    }

    fn bare(&mut self) -> io::Result<Duration> {
        self.settle()?;
        let serving = |profile| {
            let mut nurseries = self.launcher.nurseries.iter();
            nurseries.find_map(|nursery| nursery.serving().filter(|_| nursery.profile == profile))
        };
        let zygote = serving(Profile::Python).ok_or_else(|| io::Error::other("no zygote serves"))?;
        let started = Instant::now();
        let pipe = || pipe_with(PipeFlags::CLOEXEC);
        let ((requests_read, requests), (events, events_write)) = (pipe()?, pipe()?);
        let ((stdout, stdout_write), (_stderr, stderr_write)) = (pipe()?, pipe()?);
        let (release, release_write) = pipe()?;
        rustix::io::write(&release_write, b"g")?;
        let null = rustix::fs::open("/dev/null", OFlags::RDWR | OFlags::CLOEXEC, Mode::empty())?;
        let mut descriptors = [null.as_fd(); slot::FIXED];
        descriptors[slot::STDOUT] = stdout_write.as_fd();
        descriptors[slot::STDERR] = stderr_write.as_fd();
        descriptors[slot::REQUESTS] = requests_read.as_fd();
        descriptors[slot::EVENTS] = events_write.as_fd();
        descriptors[slot::RELEASE] = release.as_fd();
        let job = Job { magic: wire::BARE_MAGIC, ..Job::default() };
        packet::send(&zygote.socket, wire::bytes_of(&job), &descriptors)?;
        drop((requests_read, events_write, stdout_write, stderr_write));
        let talk = Talk { requests: requests.into(), events: events.into(), stdout: stdout.into() };
        talk.answered()?;
        Ok(started.elapsed())
    }

    /// Waits until shells are ready, nothing is dying and the processors have come to rest.
    fn settle(&mut self) -> io::Result<()> {
        let zygotes = self.launcher.nurseries.iter().find(|nursery| nursery.profile == Profile::Python);
        let owner = zygotes.and_then(|nursery| nursery.serving()).map(|zygote| zygote.uid);
        let key = (SPACE, owner.ok_or_else(|| io::Error::other("no zygote serves"))?);
        if self.ready(key).is_none() {
            self.boot(key, None);
        }
        while !self.is_settled()? {
            self.turn()?;
        }
        sleep(PAUSE);
        Ok(())
    }

    fn is_settled(&self) -> io::Result<bool> {
        let all_ready = self.entries.values().all(|entry| matches!(entry.stage, Stage::Ready));
        if self.refill_due || !all_ready || !self.removing.is_empty() {
            return Ok(false);
        }
        // A bare fork is nobody's: it ends when its pipes do, and is here until its end was heard of.
        let children = std::fs::read_to_string("/proc/self/task/1/children")?.split_whitespace().count();
        Ok(children == self.inits.len() + self.launcher.nurseries.len())
    }
}

impl Talk {
    /// Runs the cell, to its answer.
    fn answered(mut self) -> io::Result<()> {
        self.requests.write_all(CELL)?;
        let mut frame = Vec::new();
        let mut piece = [0_u8; 4096];
        // A frame stands between two newlines.
        while frame.iter().filter(|byte| **byte == b'\n').count() < 2 {
            match self.events.read(&mut piece)? {
                0 => return Err(io::ErrorKind::UnexpectedEof.into()),
                length => frame.extend_from_slice(&piece[..length]),
            }
        }
        let length = self.stdout.read(&mut piece)?;
        if &piece[..length] == b"1\n" { Ok(()) } else { Err(io::Error::other("the cell did not print 1")) }
    }
}

fn gone(starter: &OwnedFd) -> io::Result<bool> {
    let mut waiting = [PollFd::new(starter, PollFlags::IN)];
    Ok(poll(&mut waiting, Some(&rustix::event::Timespec::default()))? > 0)
}
