//! The bytes of stored files, on disk: written under a name that is no id, renamed once they are whole.
//!
//! One folder, and no other for what is on its way: Landlock's first version, which the daemon is confined by, takes no
//! rename from one folder to another.
#![forbid(unsafe_code)]

use std::collections::HashSet;
use std::fs::{DirBuilder, File, OpenOptions};
use std::io::{self, Seek, SeekFrom, Write};
use std::os::unix::fs::{DirBuilderExt, FileExt, OpenOptionsExt};
use std::path::{Path, PathBuf};
use std::sync::Arc;

use sha2::{Digest, Sha256};

use super::{ObjectsError, hex, id};

/// Bytes that are gathered before they are hashed and written.
const PIECE_BYTES: usize = 256 * 1024;
/// The least that is left as a hole where a whole piece is zeros: a guest's sparse file stays one.
const HOLE_BYTES_MIN: usize = 4096;
/// What a file is called until it is whole; no id has a dot.
const PART_SUFFIX: &str = ".part";
/// Bytes of the disk that no upload may take: the store and its journal lie on it too.
const DISK_FREE_BYTES_MIN: u64 = 64 * 1024 * 1024;

/// The folder of stored bytes. Its files are named by their ids.
#[derive(Clone, Debug)]
pub(super) struct Folder(Arc<Path>);

impl Folder {
    pub(super) fn open(dir: &Path) -> io::Result<Folder> {
        DirBuilder::new().mode(0o700).recursive(true).create(dir)?;
        Ok(Folder(Arc::from(dir)))
    }

    pub(super) fn path_of(&self, id: &str) -> PathBuf {
        self.0.join(id)
    }

    /// Takes away what belongs to no record: uploads that a kill broke off, and what was deleted just before one.
    pub(super) fn sweep(&self, known: &HashSet<String>) -> io::Result<usize> {
        let mut swept = 0;
        for entry in std::fs::read_dir(&self.0)? {
            let entry = entry?;
            let is_known = entry.file_name().to_str().is_some_and(|name| known.contains(name));
            if !is_known {
                std::fs::remove_file(entry.path())?;
                swept += 1;
            }
        }
        Ok(swept)
    }

    fn has_room(&self) -> io::Result<bool> {
        let disk = rustix::fs::statvfs(&*self.0)?;
        Ok(disk.f_bavail.saturating_mul(disk.f_frsize) > DISK_FREE_BYTES_MIN)
    }

    fn begin(&self) -> io::Result<Writer> {
        let path = self.0.join(format!("{}{PART_SUFFIX}", id::new()));
        let file = OpenOptions::new().write(true).create_new(true).mode(0o600).open(&path)?;
        Ok(Writer { folder: self.clone(), file, left: Left(Some(path)), digest: Sha256::new(), bytes: 0 })
    }
}

/// A file that goes away again unless it is kept.
#[derive(Debug)]
struct Left(Option<PathBuf>);

impl Drop for Left {
    fn drop(&mut self) {
        if let Some(path) = &self.0
            && let Err(error) = std::fs::remove_file(path)
        {
            tracing::warn!(%error, "a file that nobody wants could not be removed; the next start does it");
        }
    }
}

/// A file on its way in, as the thread that writes it sees it.
#[derive(Debug)]
struct Writer {
    folder: Folder,
    file: File,
    left: Left,
    digest: Sha256,
    bytes: u64,
}

impl Writer {
    fn write(&mut self, piece: &[u8]) -> Result<(), ObjectsError> {
        let room = self.folder.has_room().map_err(ObjectsError::writing)?;
        if !room {
            return Err(ObjectsError::StorageFull);
        }
        self.digest.update(piece);
        let is_hole = piece.len() >= HOLE_BYTES_MIN && piece.iter().all(|byte| *byte == 0);
        let written = match is_hole {
            true => self.file.seek(SeekFrom::Current(piece.len() as i64)).map(|_| ()),
            false => self.file.write_all(piece),
        };
        written.map_err(ObjectsError::writing)?;
        self.bytes += piece.len() as u64;
        Ok(())
    }

    fn finish(self) -> Result<Whole, ObjectsError> {
        // It may end in a hole.
        self.file.set_len(self.bytes).map_err(ObjectsError::writing)?;
        let etag = hex(&self.digest.finalize());
        Ok(Whole { folder: self.folder, left: self.left, bytes: self.bytes, etag })
    }
}

/// A file on its way in. Dropped before it is added to a session, it leaves nothing.
#[derive(Debug)]
pub struct Incoming {
    stage: Stage,
    /// What is not handed to the disk yet, at most [`PIECE_BYTES`].
    gathered: Vec<u8>,
    bytes: u64,
    bytes_max: u64,
}

#[derive(Debug)]
enum Stage {
    Writing(Box<Writer>),
    Whole(Whole),
    /// A write failed or was given up.
    Gone,
}

impl Incoming {
    pub(super) async fn begin(folder: &Folder, bytes_max: u64) -> Result<Incoming, ObjectsError> {
        let folder = folder.clone();
        let writer = blocking(move || folder.begin().map_err(ObjectsError::writing)).await?;
        Ok(Incoming { stage: Stage::Writing(Box::new(writer)), gathered: Vec::new(), bytes: 0, bytes_max })
    }

    /// Copies a file that may change meanwhile; no more of it than may be stored.
    pub(super) async fn copy(folder: &Folder, bytes_max: u64, file: File) -> Result<Incoming, ObjectsError> {
        let folder = folder.clone();
        let whole = blocking(move || {
            let about = file.metadata().map_err(ObjectsError::reading)?;
            if !about.is_file() {
                return Err(ObjectsError::NotAFile);
            }
            if about.len() > bytes_max {
                return Err(ObjectsError::TooLarge { bytes_max });
            }
            let mut writer = folder.begin().map_err(ObjectsError::writing)?;
            let mut piece = vec![0; PIECE_BYTES];
            loop {
                // At a place of our own: a guest may hold the same open file and move in it.
                let read = file.read_at(&mut piece, writer.bytes).map_err(ObjectsError::reading)?;
                if read == 0 {
                    return writer.finish();
                }
                if writer.bytes + read as u64 > bytes_max {
                    return Err(ObjectsError::TooLarge { bytes_max });
                }
                writer.write(&piece[..read])?;
            }
        })
        .await?;
        Ok(Incoming { bytes: whole.bytes, stage: Stage::Whole(whole), gathered: Vec::new(), bytes_max })
    }

    /// Bytes so far.
    pub fn bytes(&self) -> u64 {
        self.bytes
    }

    /// Takes the next bytes. After an error it takes no more.
    pub async fn write(&mut self, bytes: &[u8]) -> Result<(), ObjectsError> {
        self.bytes += bytes.len() as u64;
        if self.bytes > self.bytes_max {
            self.stage = Stage::Gone;
            return Err(ObjectsError::TooLarge { bytes_max: self.bytes_max });
        }
        let mut left = bytes;
        while !left.is_empty() {
            let (now, later) = left.split_at(left.len().min(PIECE_BYTES - self.gathered.len()));
            self.gathered.extend_from_slice(now);
            left = later;
            if self.gathered.len() == PIECE_BYTES {
                self.flush().await?;
            }
        }
        Ok(())
    }

    /// Puts everything on disk and closes the file: what waits to be added holds neither memory nor a descriptor.
    pub async fn close(&mut self) -> Result<(), ObjectsError> {
        if matches!(self.stage, Stage::Whole(_)) {
            return Ok(());
        }
        let (mut writer, rest) = (self.writer()?, std::mem::take(&mut self.gathered));
        let whole = blocking(move || {
            if !rest.is_empty() {
                writer.write(&rest)?;
            }
            writer.finish()
        });
        self.stage = Stage::Whole(whole.await?);
        Ok(())
    }

    pub(super) async fn whole(mut self) -> Result<Whole, ObjectsError> {
        self.close().await?;
        match self.stage {
            Stage::Whole(whole) => Ok(whole),
            Stage::Writing(_) | Stage::Gone => Err(ObjectsError::GivenUp),
        }
    }

    async fn flush(&mut self) -> Result<(), ObjectsError> {
        let (mut writer, mut piece) = (self.writer()?, std::mem::take(&mut self.gathered));
        let written = blocking(move || {
            writer.write(&piece)?;
            piece.clear();
            Ok((writer, piece))
        });
        // Given up here, the file is gone with the thread that writes it.
        let (writer, piece) = written.await?;
        self.gathered = piece;
        self.stage = Stage::Writing(writer);
        Ok(())
    }

    fn writer(&mut self) -> Result<Box<Writer>, ObjectsError> {
        match std::mem::replace(&mut self.stage, Stage::Gone) {
            Stage::Writing(writer) => Ok(writer),
            Stage::Whole(_) | Stage::Gone => Err(ObjectsError::GivenUp),
        }
    }
}

/// A file that is all there, still under a name that nobody knows.
#[derive(Debug)]
pub(super) struct Whole {
    folder: Folder,
    left: Left,
    pub(super) bytes: u64,
    /// SHA-256, in hexadecimal digits.
    pub(super) etag: String,
}

/// A file under its id, not yet on record.
#[derive(Debug)]
pub(super) struct Placed(Left);

impl Whole {
    /// Blocks as long as a rename takes.
    pub(super) fn place(mut self, id: &str) -> io::Result<Placed> {
        let path = self.folder.path_of(id);
        if let Some(part) = &self.left.0 {
            std::fs::rename(part, &path)?;
        }
        self.left.0 = Some(path);
        Ok(Placed(self.left))
    }
}

impl Placed {
    /// It is on record now.
    pub(super) fn keep(mut self) {
        self.0.0 = None;
    }
}

/// Runs what may wait for the disk where nobody else waits with it.
pub(super) async fn blocking<T: Send + 'static>(
    work: impl FnOnce() -> Result<T, ObjectsError> + Send + 'static,
) -> Result<T, ObjectsError> {
    tokio::task::spawn_blocking(work).await.map_err(|_| ObjectsError::GivenUp)?
}
