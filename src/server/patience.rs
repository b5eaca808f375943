//! How long a connection may be silent: between two requests as long as clients keep theirs open, within the head
//! of a request much shorter. hyper has one limit for both. And for how long its peer is waited for: one that takes next
//! to nothing of its answer, or has gone without waiting for it.
//!
//! ```text
//! Head ──request complete──▶ Busy ──answer made──▶ Waiting ──first byte of the next──▶ Head
//!                              └──answer to a stranger──▶ Head
//! ```
#![forbid(unsafe_code)]

use std::io;
use std::pin::Pin;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::task::{Context, Poll};
use std::time::Duration;

use futures_util::FutureExt;
use tokio::io::{AsyncRead, AsyncWrite, Interest, ReadBuf};
use tokio::net::TcpStream;
use tokio::time::{Instant, Sleep};

/// Least of an answer that its peer takes in the time it has for that. Its own tests write less.
const TAKEN_LEAST: usize = if cfg!(test) { 1024 } else { 64 * 1024 };
/// How often it is looked whether the peer of a request being answered is still there.
const LOOK_EVERY: Duration = Duration::from_secs(1);

/// The other side of a stream.
pub(super) trait Peer {
    /// Whether it has said that nothing more comes; known before what came is read.
    fn has_closed(&self) -> bool;
}

impl Peer for TcpStream {
    fn has_closed(&self) -> bool {
        matches!(self.ready(Interest::READABLE).now_or_never(), Some(Ok(ready)) if ready.is_read_closed())
    }
}

/// Where a connection is; told by whoever takes its requests.
#[derive(Clone, Debug)]
pub(super) struct Phase(Arc<Mutex<State>>);

#[derive(Debug)]
struct State {
    stage: Stage,
    since: Instant,
    /// The peer has shown a key.
    is_known: bool,
}

#[derive(Copy, Clone, Debug, PartialEq, Eq)]
enum Stage {
    Head,
    Busy,
    Waiting,
    /// As `Waiting`, for a peer that has not shown a key: no longer than for a head.
    WaitingForStranger,
}

impl Phase {
    pub(super) fn new() -> Phase {
        Phase(Arc::new(Mutex::new(State { stage: Stage::Head, since: Instant::now(), is_known: false })))
    }

    /// A request's head is there.
    pub(super) fn begin(&self) {
        self.state().enter(Stage::Busy);
    }

    /// Its answer is made; what is read next is the next head.
    pub(super) fn end(&self, is_known: bool) {
        let mut state = self.state();
        state.is_known |= is_known;
        state.enter(if is_known { Stage::Waiting } else { Stage::WaitingForStranger });
    }

    /// The rest of a body that was answered already has come: what is read next is the next head, and no part of it has
    /// been.
    pub(super) fn rest_taken(&self) {
        let mut state = self.state();
        if state.stage == Stage::Head {
            let next = if state.is_known { Stage::Waiting } else { Stage::WaitingForStranger };
            state.enter(next);
        }
    }

    fn is_busy(&self) -> bool {
        self.state().stage == Stage::Busy
    }

    /// Since when a peer that never showed a key has had no request on its way here, nor one being answered. A head
    /// that comes byte by byte is as quiet as one that does not come.
    pub(super) fn quiet_stranger_since(&self) -> Option<Instant> {
        let state = self.state();
        (!state.is_known && state.stage != Stage::Busy).then_some(state.since)
    }

    /// The stage after a read; true when the next head has begun with it, and its limit with that.
    fn on_read(&self, has_read: bool) -> (Stage, bool) {
        let mut state = self.state();
        let begins = match state.stage {
            Stage::Waiting => has_read,
            // Its limit begins with the wait.
            Stage::WaitingForStranger => true,
            Stage::Head | Stage::Busy => false,
        };
        if begins {
            state.enter(Stage::Head);
        }
        (state.stage, begins)
    }

    fn state(&self) -> MutexGuard<'_, State> {
        // Whole after every statement that holds it.
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl State {
    fn enter(&mut self, stage: Stage) {
        self.stage = stage;
        self.since = Instant::now();
    }
}

/// A stream whose reads fail once a request's head has taken too long. It begins within one: a peer that never
/// says anything is not waited for.
#[derive(Debug)]
pub(super) struct Patient<S> {
    stream: S,
    phase: Phase,
    head_max: Duration,
    deadline: Pin<Box<Sleep>>,
    write_max: Duration,
    /// Runs while the peer is waited for to take [`TAKEN_LEAST`] of what is to be written.
    stalled: Option<Pin<Box<Sleep>>>,
    taken: usize,
    /// When it is looked next whether the peer is there, and whether it was gone the last time.
    look: Pin<Box<Sleep>>,
    was_gone: bool,
}

impl<S> Patient<S> {
    /// `write_max`: how long a peer may take for [`TAKEN_LEAST`] of an answer.
    pub(super) fn new(stream: S, phase: Phase, head_max: Duration, write_max: Duration) -> Patient<S> {
        let deadline = Box::pin(tokio::time::sleep(head_max));
        let look = Box::pin(tokio::time::sleep(LOOK_EVERY));
        Patient {
            stream,
            phase,
            head_max,
            deadline,
            write_max,
            stalled: None,
            taken: 0,
            look,
            was_gone: false,
        }
    }

    /// An answer that nobody takes is memory that nobody gives back.
    fn bound(
        &mut self,
        context: &mut Context<'_>,
        written: Poll<io::Result<usize>>,
    ) -> Poll<io::Result<usize>> {
        if let Poll::Ready(Ok(bytes)) = written {
            self.taken += bytes;
            if self.taken >= TAKEN_LEAST {
                self.take_heart();
            }
        }
        if written.is_ready() {
            return written;
        }
        if self.stalled.is_none() {
            self.taken = 0;
        }
        let write_max = self.write_max;
        let stalled = self.stalled.get_or_insert_with(|| Box::pin(tokio::time::sleep(write_max)));
        match stalled.as_mut().poll(context) {
            Poll::Ready(()) => Poll::Ready(Err(io::Error::from(io::ErrorKind::TimedOut))),
            Poll::Pending => Poll::Pending,
        }
    }

    fn take_heart(&mut self) {
        (self.stalled, self.taken) = (None, 0);
    }
}

impl<S: Peer> Patient<S> {
    /// Whether the peer has left while its request is being answered. hyper would see that too, but not behind bytes that
    /// it keeps for later: whoever sends some of a next request could leave a program running that nobody waits for.
    /// Twice in a row, with nothing read in between: what came before the end is read first.
    fn is_left(&mut self, context: &mut Context<'_>) -> bool {
        if !self.phase.is_busy() {
            return false;
        }
        while self.look.as_mut().poll(context).is_ready() {
            let is_gone = self.stream.has_closed();
            if is_gone && self.was_gone {
                return true;
            }
            self.was_gone = is_gone;
            self.look.as_mut().reset(Instant::now() + LOOK_EVERY);
        }
        false
    }
}

impl<S: AsyncRead + Unpin> AsyncRead for Patient<S> {
    fn poll_read(
        self: Pin<&mut Self>,
        context: &mut Context<'_>,
        buffer: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<()>> {
        let this = self.get_mut();
        let before = buffer.filled().len();
        let polled = Pin::new(&mut this.stream).poll_read(context, buffer);
        let has_read = buffer.filled().len() > before;
        this.was_gone &= !has_read;
        let (stage, begins) = this.phase.on_read(has_read);
        if begins {
            this.deadline.as_mut().reset(Instant::now() + this.head_max);
        }
        if polled.is_pending() && stage == Stage::Head && this.deadline.as_mut().poll(context).is_ready() {
            return Poll::Ready(Err(io::Error::from(io::ErrorKind::TimedOut)));
        }
        polled
    }
}

impl<S: AsyncWrite + Peer + Unpin> AsyncWrite for Patient<S> {
    fn poll_write(self: Pin<&mut Self>, context: &mut Context<'_>, bytes: &[u8]) -> Poll<io::Result<usize>> {
        let this = self.get_mut();
        let polled = Pin::new(&mut this.stream).poll_write(context, bytes);
        this.bound(context, polled)
    }

    fn poll_flush(self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<io::Result<()>> {
        let this = self.get_mut();
        if this.is_left(context) {
            return Poll::Ready(Err(io::Error::from(io::ErrorKind::ConnectionAborted)));
        }
        // hyper flushes what it has written, so all of it is taken.
        this.take_heart();
        Pin::new(&mut this.stream).poll_flush(context)
    }

    fn poll_shutdown(self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.get_mut().stream).poll_shutdown(context)
    }

    fn poll_write_vectored(
        self: Pin<&mut Self>,
        context: &mut Context<'_>,
        slices: &[io::IoSlice<'_>],
    ) -> Poll<io::Result<usize>> {
        let this = self.get_mut();
        let polled = Pin::new(&mut this.stream).poll_write_vectored(context, slices);
        this.bound(context, polled)
    }

    fn is_write_vectored(&self) -> bool {
        self.stream.is_write_vectored()
    }
}

#[cfg(test)]
mod tests {
    use tokio::io::{AsyncReadExt, AsyncWriteExt, DuplexStream, duplex};

    use super::*;

    impl Peer for DuplexStream {
        fn has_closed(&self) -> bool {
            false
        }
    }

    const HEAD_MAX: Duration = Duration::from_millis(60);

    fn connection() -> (DuplexStream, Patient<DuplexStream>, Phase) {
        let (peer, ours) = duplex(1024);
        let phase = Phase::new();
        (peer, Patient::new(ours, phase.clone(), HEAD_MAX, HEAD_MAX), phase)
    }

    async fn read(stream: &mut Patient<DuplexStream>) -> io::Result<usize> {
        let mut buffer = [0; 64];
        let longest = HEAD_MAX * 4;
        tokio::time::timeout(longest, stream.read(&mut buffer)).await.unwrap_or(Ok(usize::MAX))
    }

    #[tokio::test]
    async fn a_peer_that_takes_nothing_of_its_answer_is_not_waited_for() {
        let (mut peer, mut ours, phase) = connection();
        phase.begin();
        let answer = vec![b'x'; 4096];
        let written = tokio::time::timeout(HEAD_MAX * 8, ours.write_all(&answer)).await.expect("in time");
        assert_eq!(written.unwrap_err().kind(), io::ErrorKind::TimedOut);
        let (mut taken, mut slow) = (0, [0; 512]);
        let (_peer, mut ours, phase) = connection();
        phase.begin();
        let mut slow_peer = _peer;
        let writes = ours.write_all(&answer);
        let reads = async {
            while taken < 4096 {
                tokio::time::sleep(HEAD_MAX / 3).await;
                taken += slow_peer.read(&mut slow).await.unwrap();
            }
        };
        let (written, ()) = tokio::join!(writes, reads);
        assert!(written.is_ok(), "one that is slow takes its time");
        assert!(peer.read(&mut slow).await.is_ok());
        // One that takes a little now and then, so that it never takes nothing, is too slow.
        let (mut peer, mut ours, phase) = connection();
        phase.begin();
        let writes = ours.write_all(&answer);
        let reads = async {
            loop {
                tokio::time::sleep(HEAD_MAX / 3).await;
                peer.read_exact(&mut [0; 64]).await.unwrap();
            }
        };
        let written = tokio::select! { written = writes => written, () = reads => unreachable!() };
        assert_eq!(written.unwrap_err().kind(), io::ErrorKind::TimedOut);
    }

    const STILL_OPEN: usize = usize::MAX;

    #[tokio::test]
    async fn a_peer_that_says_nothing_is_not_waited_for() {
        let (_peer, mut ours, _) = connection();
        assert_eq!(read(&mut ours).await.unwrap_err().kind(), io::ErrorKind::TimedOut);
    }

    #[tokio::test]
    async fn a_head_that_comes_byte_by_byte_has_one_limit_for_all_of_it() {
        let (mut peer, mut ours, _) = connection();
        for _ in 0..3 {
            peer.write_all(b"x").await.unwrap();
            assert_eq!(read(&mut ours).await.unwrap(), 1);
            tokio::time::sleep(HEAD_MAX / 2).await;
        }
        assert_eq!(read(&mut ours).await.unwrap_err().kind(), io::ErrorKind::TimedOut);
    }

    #[tokio::test]
    async fn a_request_that_runs_and_the_wait_for_the_next_take_longer_and_the_next_head_does_not() {
        let (mut peer, mut ours, phase) = connection();
        peer.write_all(b"head").await.unwrap();
        assert_eq!(read(&mut ours).await.unwrap(), 4);
        phase.begin();
        assert_eq!(read(&mut ours).await.unwrap(), STILL_OPEN, "while it runs");
        phase.end(true);
        assert_eq!(read(&mut ours).await.unwrap(), STILL_OPEN, "between two requests");
        peer.write_all(b"he").await.unwrap();
        assert_eq!(read(&mut ours).await.unwrap(), 2, "the next head has a limit of its own");
        assert_eq!(read(&mut ours).await.unwrap_err().kind(), io::ErrorKind::TimedOut);
    }

    #[tokio::test]
    async fn a_stranger_waits_for_its_next_request_no_longer_than_it_may_take_over_a_head() {
        let (mut peer, mut ours, phase) = connection();
        peer.write_all(b"head").await.unwrap();
        assert_eq!(read(&mut ours).await.unwrap(), 4);
        phase.begin();
        tokio::time::sleep(HEAD_MAX * 2).await;
        phase.end(false);
        peer.write_all(b"next").await.unwrap();
        assert_eq!(read(&mut ours).await.unwrap(), 4, "the limit begins with the answer");
        phase.begin();
        phase.end(false);
        assert_eq!(read(&mut ours).await.unwrap_err().kind(), io::ErrorKind::TimedOut);
    }
}
