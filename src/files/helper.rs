//! One helper, as the daemon holds it: many calls over one socket, each with its answer, and an end that all hear of.
#![forbid(unsafe_code)]

use std::collections::HashMap;
use std::io;
use std::os::fd::{AsFd, OwnedFd};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard};
use std::time::Duration;

use rustix::fs::{FileType, OFlags, fcntl_getfl, fstat};
use rustix::net::RecvFlags;
use tokio::io::unix::AsyncFd;
use tokio::sync::oneshot;
use tokio::task::JoinHandle;
use tokio::time::Instant;

use super::wire::{
    self, ANSWER_BYTES_MAX, Answer, Answered, Call, FRAME_BYTES_MAX, Finish, HEADER_BYTES, Header, Kind, Op,
};
use crate::launcher::client::{Ender, Sandbox};
use crate::sys::{packet, reactor};

/// How long a new helper may take to answer at all.
const READY_MAX: Duration = Duration::from_secs(15);

/// It ended, was ended, or did not keep to the protocol, with calls unanswered.
#[derive(Copy, Clone, Debug, PartialEq, Eq)]
pub(super) struct Gone;

/// A call's answer, whole.
#[derive(Debug)]
pub(super) struct Reply {
    pub(super) answered: Answered,
    /// What came beside the JSON.
    pub(super) text: Vec<u8>,
    pub(super) descriptor: Option<OwnedFd>,
}

struct Pending {
    message: Vec<u8>,
    descriptor: Option<OwnedFd>,
    /// Whether a descriptor may come with the answer.
    opens: bool,
    answer: oneshot::Sender<Reply>,
}

#[derive(Default)]
struct Books {
    calls: HashMap<u64, Pending>,
    /// Files of its space that are read here. They keep its image mounted, so none outlives it.
    opened: HashMap<u64, Arc<OwnedFd>>,
    is_dead: bool,
    last_used: Option<Instant>,
}

struct Shared {
    socket: AsyncFd<OwnedFd>,
    books: Mutex<Books>,
}

/// A live helper. Dropping it ends it.
pub(super) struct Helper {
    shared: Arc<Shared>,
    next: AtomicU64,
    /// The device that the space's files lie on.
    device: u64,
    reader: JoinHandle<()>,
    /// Taken to end it.
    ender: Mutex<Option<Ender>>,
}

impl Drop for Helper {
    fn drop(&mut self) {
        self.reader.abort();
    }
}

impl Helper {
    /// Takes a fresh sandbox into use once it has answered.
    pub(super) async fn start(sandbox: Sandbox) -> io::Result<Helper> {
        let Sandbox { requests, ender, .. } = sandbox;
        let mut helper = Helper::over(requests, Some(ender))?;
        let told = tokio::time::timeout(READY_MAX, helper.space()).await;
        match told {
            Ok(Ok(device)) => {
                helper.device = device;
                Ok(helper)
            }
            Ok(Err(error)) => Err(error),
            Err(_) => Err(io::Error::from(io::ErrorKind::TimedOut)),
        }
    }

    /// Over any connected socket, whose other end is served.
    pub(super) fn over(socket: OwnedFd, ender: Option<Ender>) -> io::Result<Helper> {
        rustix::io::ioctl_fionbio(&socket, true)?;
        let socket = reactor::register(socket)?;
        let shared = Arc::new(Shared { socket, books: Mutex::default() });
        let reader = tokio::spawn(read(Arc::clone(&shared)));
        Ok(Helper { shared, next: AtomicU64::new(1), device: 0, reader, ender: Mutex::new(ender) })
    }

    /// Whose files lie on this device.
    #[cfg(test)]
    pub(super) fn on(mut self, device: u64) -> Helper {
        self.device = device;
        self
    }

    async fn space(&self) -> io::Result<u64> {
        let call = Call { op: Op::Space, time_ms_max: 0 };
        let gone = |_| io::Error::other("the file helper ended before it answered");
        let reply = self.begin(&call, &[], None).await.map_err(gone)?.answer().await.map_err(gone)?;
        let descriptor =
            reply.descriptor.ok_or_else(|| io::Error::other("the file helper shows no space"))?;
        Ok(fstat(descriptor)?.st_dev)
    }

    pub(super) fn is_alive(&self) -> bool {
        !self.shared.books().is_dead
    }

    /// Since when nothing has been asked; `None` while something runs.
    pub(super) fn idle_since(&self) -> Option<Instant> {
        let books = self.shared.books();
        if books.calls.is_empty() { books.last_used } else { None }
    }

    /// Ends it at once: what it does is given up.
    pub(super) fn end(&self) {
        self.shared.fail();
        drop(self.ender.lock().expect("no code panics while it holds the ender").take());
    }

    /// Sends a call; `pipe` is the helper's end of a stream.
    pub(super) async fn begin(
        &self,
        call: &Call,
        content: &[u8],
        pipe: Option<OwnedFd>,
    ) -> Result<Ticket, Gone> {
        let id = self.next.fetch_add(1, Ordering::Relaxed);
        let (answer, waiting) = oneshot::channel();
        let opens = matches!(call.op, Op::Open { .. } | Op::Space);
        {
            let mut books = self.shared.books();
            if books.is_dead {
                return Err(Gone);
            }
            books.last_used = Some(Instant::now());
            books.calls.insert(id, Pending { message: Vec::new(), descriptor: None, opens, answer });
        }
        let ticket = Ticket { id, shared: Arc::clone(&self.shared), waiting: Some(waiting) };
        self.shared.send(id, Kind::End, &wire::join(call, content), pipe).await?;
        Ok(ticket)
    }

    /// Keeps an open file of the space for as long as somebody reads it and the helper lives. Refuses what is none of
    /// the space's files.
    pub(super) fn keep(self: Arc<Self>, file: OwnedFd) -> io::Result<Opened> {
        check(&file, self.device)?;
        let number = self.next.fetch_add(1, Ordering::Relaxed);
        let mut books = self.shared.books();
        if books.is_dead {
            return Err(ended());
        }
        books.opened.insert(number, Arc::new(file));
        drop(books);
        Ok(Opened { helper: self, number })
    }
}

/// An open file of a space. The helper is not ended while it is there, and so the space stays open.
pub(super) struct Opened {
    helper: Arc<Helper>,
    number: u64,
}

impl Opened {
    /// The file, to be used and not held.
    pub(super) fn file(&self) -> io::Result<Arc<OwnedFd>> {
        self.helper.shared.books().opened.get(&self.number).cloned().ok_or_else(ended)
    }
}

impl Drop for Opened {
    fn drop(&mut self) {
        let closed = self.helper.shared.books().opened.remove(&self.number);
        drop(closed);
    }
}

fn ended() -> io::Error {
    io::Error::other("the file helper ended before the file was read")
}

/// What a helper hands back to be read is a regular file of the space, opened for that, and never makes a reader
/// wait.
pub(super) fn check(descriptor: &OwnedFd, device: u64) -> io::Result<()> {
    let stat = fstat(descriptor)?;
    let flags = fcntl_getfl(descriptor)?;
    let is_regular = FileType::from_raw_mode(stat.st_mode) == FileType::RegularFile;
    let only_reads = (flags & OFlags::RWMODE) == OFlags::RDONLY;
    let as_asked = only_reads && flags.contains(OFlags::NONBLOCK) && !flags.contains(OFlags::PATH);
    if is_regular && as_asked && stat.st_dev == device {
        return Ok(());
    }
    Err(io::Error::other("the file helper handed back a descriptor that is none of the space's files"))
}

/// A call under way. Dropped before its answer, the helper hears that nobody waits.
pub(super) struct Ticket {
    id: u64,
    shared: Arc<Shared>,
    waiting: Option<oneshot::Receiver<Reply>>,
}

impl Ticket {
    pub(super) async fn answer(&mut self) -> Result<Reply, Gone> {
        let waiting = self.waiting.take().ok_or(Gone)?;
        waiting.await.map_err(|_| Gone)
    }

    /// Says that the stream of this call was sent whole.
    pub(super) async fn finish(&self, finish: &Finish) -> Result<(), Gone> {
        self.shared.send(self.id, Kind::Finish, &wire::join(finish, &[]), None).await
    }
}

impl Drop for Ticket {
    fn drop(&mut self) {
        if self.shared.books().calls.remove(&self.id).is_some() {
            for packet in wire::packets(self.id, Kind::Cancel, &[]) {
                // Where there is no room for it, the call ends by its own clock.
                let _ = packet::send(self.shared.socket.get_ref(), &packet, &[]);
            }
        }
    }
}

impl Shared {
    fn books(&self) -> MutexGuard<'_, Books> {
        self.books.lock().expect("no code panics while it holds a helper's books")
    }

    async fn send(&self, id: u64, last: Kind, message: &[u8], pipe: Option<OwnedFd>) -> Result<(), Gone> {
        let mut pipe = pipe;
        for packet in wire::packets(id, last, message) {
            loop {
                let mut ready = self.socket.writable().await.map_err(|_| Gone)?;
                let sent = ready.try_io(|socket| match &pipe {
                    Some(pipe) => packet::send(socket.get_ref(), &packet, &[pipe.as_fd()]),
                    None => packet::send(socket.get_ref(), &packet, &[]),
                });
                match sent {
                    Ok(Ok(())) => break,
                    Ok(Err(_)) => return Err(Gone),
                    Err(_would_block) => {}
                }
            }
            pipe = None;
        }
        Ok(())
    }

    /// Takes one packet; `Err` when it is none that a helper of ours would send.
    fn take(&self, packet: &[u8], mut descriptors: Vec<OwnedFd>) -> Result<(), wire::Malformed> {
        let (Header { id, kind }, payload) = Header::split(packet)?;
        if !matches!(kind, Kind::Part | Kind::End) {
            return Err(wire::Malformed);
        }
        let mut books = self.books();
        // Nobody waits for it any more.
        let Some(call) = books.calls.get_mut(&id) else { return Ok(()) };
        let room = ANSWER_BYTES_MAX - call.message.len();
        if payload.len() > room || descriptors.len() > usize::from(call.opens && call.descriptor.is_none()) {
            return Err(wire::Malformed);
        }
        call.message.extend_from_slice(payload);
        call.descriptor = descriptors.pop().or(call.descriptor.take());
        if kind == Kind::Part {
            return Ok(());
        }
        let call = books.calls.remove(&id).expect("it was there");
        books.last_used = Some(Instant::now());
        drop(books);
        let (answered, text) = wire::split::<Answered>(&call.message)?;
        let reply = Reply { answered, text: text.to_vec(), descriptor: call.descriptor };
        // Whoever asked may have gone.
        drop(call.answer.send(reply));
        Ok(())
    }

    /// Its calls hear that there will be no answer, and its files are let go of.
    fn fail(&self) {
        let mut books = self.books();
        books.is_dead = true;
        books.calls.clear();
        books.opened.clear();
    }
}

async fn read(shared: Arc<Shared>) {
    let mut buffer = vec![0_u8; HEADER_BYTES + FRAME_BYTES_MAX];
    loop {
        let Ok(mut ready) = shared.socket.readable().await else { break };
        let received =
            ready.try_io(|socket| packet::receive(socket.get_ref(), &mut buffer, RecvFlags::empty()));
        match received {
            Err(_would_block) => {}
            Ok(Ok((length, descriptors))) if length > 0 => {
                if let Err(error) = shared.take(&buffer[..length], descriptors) {
                    tracing::error!(%error, "a file helper is given up");
                    break;
                }
            }
            Ok(_) => break,
        }
    }
    shared.fail();
}

/// The answer an operation has by its type; another one is a helper's fault.
pub(super) fn fits(op: &Op, answer: &Answer) -> bool {
    matches!(
        (op, answer),
        (Op::Read { .. }, Answer::Text)
            | (Op::Write { .. }, Answer::Written { .. })
            | (Op::List(_), Answer::Listed(_))
            | (Op::Find { .. }, Answer::Found { .. })
            | (Op::Glob(_), Answer::Globbed(_))
            | (Op::Grep(_), Answer::Grepped(_))
            | (Op::Search { .. }, Answer::Searched { .. })
            | (Op::Replace { .. }, Answer::Replaced { .. })
            | (Op::Edit { .. }, Answer::Edited(_))
            | (Op::Stat { .. }, Answer::Stat(_))
            | (Op::Mkdir { .. }, Answer::Made { .. })
            | (Op::Copy { .. }, Answer::Copied { .. })
            | (Op::Move { .. }, Answer::Moved)
            | (Op::Delete { .. }, Answer::Deleted { .. })
            | (Op::Open { .. } | Op::Space, Answer::Opened)
            | (Op::Upload { .. }, Answer::Uploaded { .. })
            | (Op::TreeOut { .. }, Answer::TreeSent)
            | (Op::TreeIn { .. }, Answer::TreeReceived { .. })
            | (Op::Clear { .. }, Answer::Cleared)
    )
}
