//! A sandbox in which our own agent starts programs, for languages that are not run by a harness.
//!
//! Everything the agent says is written by a guest: the guest shares its account. What it can forge is its own output
//! and the end of its own program.
#![forbid(unsafe_code)]

use std::io;
use std::os::fd::OwnedFd;
use std::sync::Arc;
use std::time::Duration;

use bytes::BytesMut;
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::unix::pipe;
use tokio::sync::watch;
use tokio::time::{Instant, sleep_until, timeout};

use crate::engine::Stream;
use crate::harness::interpreter::Provenance;
use crate::harness::outcome::Stopped;
use crate::harness::pace::Pace;
use crate::harness::program::{CallBook, LineCalls, ToolAnswer, ToolPort};
use crate::inside::commands::frame::{Decoder, EVENT_BYTES_MAX, Event, Exit, Request, Start};
use crate::launcher::client::{Ender, LaunchError, Sandbox};
use crate::launcher::plan::{End, LaunchPlan, Origin, Profile, SpaceId};
use crate::runs::end::RunEnd;
use crate::runs::fleeting::Fleeting;
use crate::runs::sink::Sink;
use crate::workspace::Workspace;
use crate::zygote::Launch;

/// How long an agent may take to say that it serves.
const READY_MAX: Duration = Duration::from_secs(15);
/// Bytes read at once.
const READ_BYTES: usize = 64 * 1024;
/// How long the launcher's word on an end is waited for once the agent is silent.
const END_WAIT: Duration = Duration::from_secs(2);

/// A sandbox with an agent that serves. Dropping it ends all that runs there.
#[derive(Debug)]
pub(super) struct Agent {
    requests: pipe::Sender,
    events: pipe::Receiver,
    decoder: Decoder,
    ended: watch::Receiver<Option<End>>,
    pub(super) provenance: Provenance,
    /// Its space, where that goes with it; until somebody takes it to collect from it.
    pub(super) fleeting: Option<Fleeting>,
    view: Option<OwnedFd>,
    numbers: u32,
    _ender: Ender,
    _streams: [OwnedFd; 2],
}

/// Time, stop and tools of a program's steps.
pub(super) struct Bounds<'a> {
    pub(super) deadline: Instant,
    /// From each time on at which all its calls are answered.
    pub(super) between_calls: Duration,
    pub(super) stop: &'a mut watch::Receiver<Option<Stopped>>,
    pub(super) tools: Option<&'a mut ToolPort>,
}

/// Why there is no agent.
#[derive(Debug, thiserror::Error)]
pub(super) enum NotOpened {
    #[error(transparent)]
    Launch(#[from] LaunchError),
    #[error("the agent of a sandbox did not answer")]
    Silent,
    #[error("pipes of a sandbox cannot be used")]
    Pipes(#[source] io::Error),
}

impl Agent {
    /// Makes a sandbox in `space` and waits until its agent serves. Nothing of a guest's has run in it.
    pub(super) async fn open(launcher: &Arc<dyn Launch>, space: SpaceId) -> Result<Agent, NotOpened> {
        // From here on, whatever becomes of this call and of the agent.
        let fleeting = Fleeting::of(space, launcher);
        let plan = LaunchPlan {
            view: true,
            throwaway: true,
            ..LaunchPlan::new(space, Profile::Commands, Origin::Strict)
        };
        let sandbox = launcher.sandbox(plan).await?;
        let mut agent = Agent::of(sandbox, fleeting).map_err(NotOpened::Pipes)?;
        match timeout(READY_MAX, agent.next()).await {
            Ok(Some(Event::Ready(_))) => Ok(agent),
            _ => Err(NotOpened::Silent),
        }
    }

    fn of(sandbox: Sandbox, fleeting: Option<Fleeting>) -> io::Result<Agent> {
        Ok(Agent {
            requests: pipe::Sender::from_owned_fd_unchecked(sandbox.requests)?,
            events: pipe::Receiver::from_owned_fd_unchecked(sandbox.events)?,
            decoder: Decoder::new(EVENT_BYTES_MAX),
            ended: sandbox.ended,
            provenance: Provenance { sandbox: sandbox.id, attestation: sandbox.attestation },
            fleeting,
            view: sandbox.view,
            numbers: 0,
            _ender: sandbox.ender,
            _streams: [sandbox.stdout, sandbox.stderr],
        })
    }

    pub(super) fn is_alive(&self) -> bool {
        self.ended.borrow().is_none()
    }

    /// Its workspace, once.
    pub(super) fn take_workspace(&mut self) -> Option<Workspace> {
        self.view.take().map(Workspace::new)
    }

    /// Runs one program to its end, or to a bound. After any end but an exit this agent is to be dropped.
    pub(super) async fn step(&mut self, start: Start, sink: &mut Sink, bounds: &mut Bounds<'_>) -> RunEnd {
        self.numbers += 1;
        let number = self.numbers;
        let (mut lines, mut calls) = (LineCalls::default(), CallBook::default());
        // Where a program floods before it reads, both directions must go on: requests are written beside the reading.
        let mut outbox = BytesMut::from(&*Request::Start { number, start }.encode());
        let mut pace = Pace::new();
        loop {
            let has_calls = calls.waits();
            // Looked at whatever arrives: a guest can see to it that there is always something.
            if !has_calls && Instant::now() >= bounds.deadline {
                return RunEnd::TimeLimit;
            }
            pace.spend(0);
            pace.rest().await;
            tokio::select! {
                written = self.requests.write_buf(&mut outbox), if !outbox.is_empty() => {
                    if written.is_err() {
                        return self.died().await;
                    }
                }
                event = next(&mut self.events, &mut self.decoder) => match event {
                    None => return self.died().await,
                    Some(Event::Stdout { number: of, bytes }) if of == number => {
                        if !sink.take(Stream::Stdout, &bytes) {
                            return RunEnd::StdoutLimit;
                        }
                    }
                    Some(Event::Stderr { number: of, bytes }) if of == number => {
                        if !sink.take(Stream::Stderr, &bytes) {
                            return RunEnd::StderrLimit;
                        }
                    }
                    Some(Event::Exit { number: of, exit }) if of == number => {
                        sink.flush();
                        return match exit {
                            Exit::Code(code) => RunEnd::Exited(code.into()),
                            Exit::Signal(signal) => self.signaled(signal).await,
                        };
                    }
                    Some(Event::Call { number: of, bytes }) if of == number => {
                        let Some(port) = bounds.tools.as_deref_mut() else { continue };
                        let taken = lines.take(&bytes).and_then(|made| calls.take(made));
                        let Ok((fit, unfit)) = taken else { return RunEnd::CallLimit };
                        for answer in unfit {
                            outbox.extend_from_slice(&Request::Answer { number, line: answer.to_line() }.encode());
                        }
                        if !fit.is_empty() && port.calls.send(fit).is_err() {
                            return RunEnd::Stopped;
                        }
                    }
                    Some(_) => {}
                },
                answers = heard(bounds.tools.as_deref_mut()), if has_calls => match answers {
                    None => return RunEnd::Stopped,
                    Some(answers) => {
                        for answer in calls.answered(answers) {
                            outbox.extend_from_slice(&Request::Answer { number, line: answer.to_line() }.encode());
                        }
                        if !calls.waits() {
                            bounds.deadline = Instant::now() + bounds.between_calls;
                        }
                    }
                },
                () = sleep_until(bounds.deadline), if !has_calls => {}
                () = stopped(bounds.stop) => return RunEnd::Stopped,
            }
        }
    }

    async fn next(&mut self) -> Option<Event> {
        next(&mut self.events, &mut self.decoder).await
    }

    /// A program that a signal ended: the kernel's for want of memory ends the sandbox with it, which the launcher tells.
    async fn signaled(&mut self, signal: u8) -> RunEnd {
        const KILL: u8 = 9;
        if signal == KILL {
            let short = Duration::from_millis(100);
            if let Ok(Ok(end)) = timeout(short, self.ended.wait_for(Option::is_some)).await
                && *end == Some(End::OutOfMemory)
            {
                return RunEnd::OutOfMemory;
            }
        }
        RunEnd::Signaled(signal.into())
    }

    async fn died(&mut self) -> RunEnd {
        let end = timeout(END_WAIT, self.ended.wait_for(Option::is_some)).await;
        RunEnd::of_launcher(end.ok().and_then(Result::ok).and_then(|end| *end))
    }
}

/// Dropped in the middle of a wait it has lost nothing: what was read lies in the decoder.
async fn next(events: &mut pipe::Receiver, decoder: &mut Decoder) -> Option<Event> {
    loop {
        match decoder.event() {
            Ok(Some(event)) => return Some(event),
            Ok(None) => {}
            Err(broken) => {
                tracing::warn!(%broken, "an agent broke the protocol; its sandbox is ended");
                return None;
            }
        }
        let buffer = decoder.buffer();
        buffer.reserve(READ_BYTES);
        match events.read_buf(buffer).await {
            Ok(0) | Err(_) => return None,
            Ok(_) => {}
        }
    }
}

/// A sender that is gone is a daemon at its end.
async fn stopped(stop: &mut watch::Receiver<Option<Stopped>>) {
    drop(stop.wait_for(Option::is_some).await);
}

async fn heard(port: Option<&mut ToolPort>) -> Option<Vec<ToolAnswer>> {
    match port {
        Some(port) => port.answers.recv().await,
        None => std::future::pending().await,
    }
}

#[cfg(test)]
mod tests {
    use std::io::Write;

    use rustix::pipe::{PipeFlags, pipe_with};

    use super::*;
    use crate::inside::commands::frame::Program;
    use crate::launcher::plan::{Attestation, SandboxId};

    #[tokio::test]
    async fn time_is_up_whatever_arrives_and_others_have_their_turn() {
        let piped = || pipe_with(PipeFlags::CLOEXEC).expect("a pipe");
        let ((requests_in, requests), (events, events_out)) = (piped(), piped());
        for ours in [&requests, &events] {
            rustix::io::ioctl_fionbio(ours, true).expect("a pipe");
        }
        let (_ended, seen) = watch::channel(None);
        let id = SandboxId(1);
        let sandbox = Sandbox {
            id,
            space: SpaceId(1),
            attestation: Attestation::default(),
            requests,
            events,
            stdout: piped().0,
            stderr: piped().0,
            view: None,
            ended: seen,
            ender: Ender::of_nobody(id),
        };
        // Frames that cost nothing and are always there, until nobody reads them any more.
        let flood = std::thread::spawn(move || {
            let mut events = std::fs::File::from(events_out);
            let frames = Event::Taken { number: 1, bytes: 0 }.encode().repeat(4_000);
            while events.write_all(&frames).is_ok() {}
        });
        let mut agent = Agent::of(sandbox, None).expect("inside the runtime");
        let start = Start {
            program: Program::Words(vec!["flood".to_owned()]),
            cwd: None,
            env: Vec::new(),
            stdin_ends: true,
            source: None,
            calls: None,
        };
        let (_keep, mut stop) = watch::channel(None);
        let neighbour = tokio::spawn(async {
            for _ in 0..20 {
                tokio::time::sleep(Duration::from_millis(5)).await;
            }
        });
        let mut bounds = Bounds {
            deadline: Instant::now() + Duration::from_millis(500),
            between_calls: Duration::ZERO,
            stop: &mut stop,
            tools: None,
        };
        let mut sink = Sink::new(1_000, None);
        let step = agent.step(start, &mut sink, &mut bounds);
        let end = timeout(Duration::from_secs(20), step).await.expect("the deadline is met");
        assert_eq!(end, RunEnd::TimeLimit);
        assert!(neighbour.is_finished(), "all in one thread");
        drop((agent, requests_in));
        flood.join().expect("it ends with the pipe");
    }
}
