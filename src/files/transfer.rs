//! Streams between callers and helpers: downloads by a descriptor, uploads and trees through a pipe. No transfer
//! holds more than a few pieces, however large it is.
#![forbid(unsafe_code)]

use std::io;
use std::os::fd::OwnedFd;
use std::sync::Arc;
use std::time::{Duration, SystemTime};

use bytes::Bytes;
use rustix::fs::fstat;
use rustix::pipe::{PipeFlags, pipe_with};
use tokio::io::unix::AsyncFd;

use super::helper::{Helper, Opened, Reply, Ticket};
use super::wire::{Answer, Finish, Op, TreeMode};
use super::{FileError, Files, Key, Permits, fault_of};
use crate::sys::reactor;

/// Most bytes of a file or stream that are held at once for one caller.
pub const PIECE_BYTES: usize = 256 * 1024;
/// How long a stream may stand still.
pub const STREAM_IDLE_MAX: Duration = Duration::from_secs(60);

/// The last second of the year 9999.
const HTTP_TIME_MAX_SECS: u64 = 253_402_300_799;

/// What tells one state of a file from another.
#[derive(Copy, Clone, Debug, PartialEq, Eq)]
pub struct Version {
    pub bytes: u64,
    pub inode: u64,
    /// Seconds and nanoseconds since the epoch.
    pub modified: (i64, u64),
    /// The same of its inode, which no guest can set.
    pub changed: (i64, u64),
}

impl Version {
    /// When it was written last, in whole seconds and the years that HTTP has words for. A guest can set any time.
    pub fn modified_at(&self) -> SystemTime {
        let seconds = u64::try_from(self.modified.0).unwrap_or(0).min(HTTP_TIME_MAX_SECS);
        SystemTime::UNIX_EPOCH + Duration::from_secs(seconds)
    }
}

/// An open file of a space. When its helper ends, so does it, however slowly it is read.
#[derive(Clone)]
pub struct Download {
    opened: Arc<Opened>,
    /// Counts among the tenant's operations for as long as it is read.
    _permits: Arc<Permits>,
}

impl Download {
    pub(super) fn new(opened: Opened, permits: Permits) -> Download {
        Download { opened: Arc::new(opened), _permits: Arc::new(permits) }
    }

    /// Its state now.
    pub fn version(&self) -> io::Result<Version> {
        let stat = fstat(self.opened.file()?)?;
        Ok(Version {
            bytes: stat.st_size.cast_unsigned(),
            inode: stat.st_ino,
            modified: (stat.st_mtime, stat.st_mtime_nsec),
            changed: (stat.st_ctime, stat.st_ctime_nsec),
        })
    }

    /// Up to [`PIECE_BYTES`] from `offset`, at most `bytes_max`; empty behind the end.
    pub async fn piece(&self, offset: u64, bytes_max: u64) -> io::Result<Bytes> {
        let file = self.opened.file()?;
        let wanted = bytes_max.min(PIECE_BYTES as u64) as usize;
        // A disk can keep a reader waiting, and the runtime's threads serve everybody.
        let read = tokio::task::spawn_blocking(move || {
            let mut piece = vec![0_u8; wanted];
            let read = rustix::io::pread(&file, &mut piece[..], offset)?;
            piece.truncate(read);
            Ok(Bytes::from(piece))
        });
        read.await.map_err(io::Error::other)?
    }
}

/// A pipe: the helper's end, and ours in the reactor.
pub(super) struct Pipe {
    pub(super) ours: AsyncFd<OwnedFd>,
    pub(super) theirs: OwnedFd,
}

impl Pipe {
    /// To write into when `sends`, else to read from.
    pub(super) fn new(sends: bool) -> io::Result<Pipe> {
        let (read, write) = pipe_with(PipeFlags::CLOEXEC)?;
        let (ours, theirs) = if sends { (write, read) } else { (read, write) };
        rustix::io::ioctl_fionbio(&ours, true)?;
        Ok(Pipe { ours: reactor::register(ours)?, theirs })
    }
}

/// A file or tree on its way into a space. Dropped before it is finished, it leaves nothing there.
pub struct Incoming {
    pub(super) pipe: Option<AsyncFd<OwnedFd>>,
    pub(super) ticket: Ticket,
    pub(super) helper: Arc<Helper>,
    /// Who clears up when the helper dies, and what; taken once there is nothing to clear.
    pub(super) left: Option<(Arc<Files>, Key, Op)>,
    pub(super) _permits: Permits,
}

impl Drop for Incoming {
    fn drop(&mut self) {
        let Some((files, key, clear)) = self.left.take() else { return };
        // A helper that lives clears up after itself when it hears that nobody waits.
        if let (false, Ok(runtime)) = (self.helper.is_alive(), tokio::runtime::Handle::try_current()) {
            runtime.spawn(async move { files.clear(key, clear).await });
        }
    }
}

/// How an incoming stream ended.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Arrival {
    File { path: String, bytes: u64 },
    Tree { entries: u64, mode: TreeMode },
}

impl Incoming {
    /// Passes a piece on. An error is what the helper says about the whole; it takes no more then.
    pub async fn write(&mut self, piece: &[u8]) -> Result<(), FileError> {
        let mut left = piece;
        while !left.is_empty() {
            let Some(pipe) = &self.pipe else { return Err(FileError::Interrupted) };
            let written = tokio::time::timeout(STREAM_IDLE_MAX, write_some(pipe, left)).await;
            match written {
                Ok(Ok(count)) => left = &left[count..],
                Ok(Err(_)) => return Err(self.why().await),
                Err(_) => return Err(FileError::TimedOut),
            }
        }
        Ok(())
    }

    /// Why the helper reads no further.
    async fn why(&mut self) -> FileError {
        self.pipe = None;
        match tokio::time::timeout(STREAM_IDLE_MAX, self.ticket.answer()).await {
            Ok(Ok(Reply { answered: Err(fault), .. })) => fault_of(fault),
            Ok(_) => FileError::Interrupted,
            Err(_) => FileError::TimedOut,
        }
    }

    /// All was passed on: it gets its name.
    pub async fn finish(mut self, finish: Finish) -> Result<Arrival, FileError> {
        // The end of the pipe alone could be that of a caller who went away.
        self.ticket.finish(&finish).await.map_err(|_| FileError::Interrupted)?;
        self.pipe = None;
        let answer = tokio::time::timeout(super::TREE_TIME_MAX, self.ticket.answer()).await;
        let answered = answer.map_err(|_| FileError::TimedOut)?.map_err(|_| FileError::Interrupted)?.answered;
        self.left = None;
        match answered {
            Ok(Answer::Uploaded { path, bytes }) => Ok(Arrival::File { path, bytes }),
            Ok(Answer::TreeReceived { entries, mode }) => Ok(Arrival::Tree { entries, mode }),
            Ok(_) => Err(FileError::Interrupted),
            Err(fault) => Err(fault_of(fault)),
        }
    }
}

async fn write_some(pipe: &AsyncFd<OwnedFd>, bytes: &[u8]) -> io::Result<usize> {
    loop {
        let mut ready = pipe.writable().await?;
        if let Ok(written) = ready.try_io(|pipe| Ok(rustix::io::write(pipe.get_ref(), bytes)?)) {
            return written;
        }
    }
}

/// A tree on its way out.
pub struct Outgoing {
    pub(super) pipe: AsyncFd<OwnedFd>,
    pub(super) ticket: Ticket,
    pub(super) is_done: bool,
    /// Not ended while it is needed.
    pub(super) _helper: Arc<Helper>,
    pub(super) _permits: Permits,
}

impl Outgoing {
    /// The first pieces, together: all of a small tree, so that what goes wrong in it is told and not cut off.
    pub async fn first(&mut self) -> Result<Option<Bytes>, FileError> {
        let mut first = Vec::new();
        while first.len() < PIECE_BYTES {
            match self.next().await? {
                Some(piece) => first.extend_from_slice(&piece),
                None => {
                    self.is_done = true;
                    break;
                }
            }
        }
        Ok((!first.is_empty()).then(|| Bytes::from(first)))
    }

    /// The next piece; `None` once all of the tree was sent.
    pub async fn next(&mut self) -> Result<Option<Bytes>, FileError> {
        if self.is_done {
            return Ok(None);
        }
        let read = tokio::time::timeout(super::OPERATION_TIME_MAX, read_some(&self.pipe)).await;
        let piece = read.map_err(|_| FileError::TimedOut)?.map_err(|_| FileError::Interrupted)?;
        if !piece.is_empty() {
            return Ok(Some(piece));
        }
        let answer = tokio::time::timeout(STREAM_IDLE_MAX, self.ticket.answer()).await;
        match answer.map_err(|_| FileError::TimedOut)?.map_err(|_| FileError::Interrupted)?.answered {
            Ok(_) => Ok(None),
            Err(fault) => Err(fault_of(fault)),
        }
    }
}

async fn read_some(pipe: &AsyncFd<OwnedFd>) -> io::Result<Bytes> {
    loop {
        let mut ready = pipe.readable().await?;
        let mut piece = vec![0_u8; PIECE_BYTES];
        if let Ok(read) = ready.try_io(|pipe| Ok(rustix::io::read(pipe.get_ref(), &mut piece[..])?)) {
            piece.truncate(read?);
            return Ok(Bytes::from(piece));
        }
    }
}
