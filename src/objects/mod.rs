//! Stored files: their records, their bytes, and the sessions they are filed under.
//!
//! Records are rows of the store, bytes are files in a folder of the daemon's own, named by the file's id. Bytes are
//! there before their record is, and stay until it is gone; what a kill leaves in between is swept at the next start.
//!
//! ```text
//! Incoming ──write──▶ <random>.part ──add: rename──▶ <id> ──commit──▶ on record ──remove, expiry──▶ gone
//!     └──dropped, too large──▶ gone
//! ```
//!
//! A session ends when nobody has written to it or run in it for `ttl`. Reads go to the store beside its writer, so
//! they wait for no batch; nothing here grows with the number of records.
#![forbid(unsafe_code)]

use std::fs::File;
use std::io;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, MutexGuard, Weak};
use std::time::{Duration, SystemTime};

use sha2::{Digest, Sha256};
use tokio::sync::mpsc;
use tracing::Instrument;

use crate::engine::Caller;
use crate::launcher::plan::SpaceId;
use crate::store::{Ownership, Store, StoreError};

mod bucket;
mod bytes;
mod fresh;
mod id;
mod kept;
pub mod names;
mod rows;
#[cfg(test)]
mod tests;

pub use bucket::{Bucket, InvalidBucket};
pub use bytes::Incoming;
use bytes::{Folder, Placed, blocking};
use fresh::Fresh;
pub use id::is_id;
use kept::Kept;

/// How often sessions and files whose time is over are looked for.
const SWEEP_EVERY: Duration = Duration::from_secs(60);
/// Sessions that are ended in one transaction.
const SWEPT_AT_ONCE: usize = 16;
/// Superseded files that are forgotten in one transaction.
const PRUNED_AT_ONCE: usize = 512;
/// A session that has less left than this is touched when it is found, so that it does not end before its run.
const LIFE_LEFT_MIN: Duration = Duration::from_secs(3600);
/// Longest type of a file, in bytes.
const CONTENT_TYPE_BYTES_MAX: usize = 255;

/// What bounds stored files.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ObjectLimits {
    /// Of one file.
    pub file_bytes_max: u64,
    /// How long a session lives after its last write or run.
    pub ttl: Duration,
    /// Files on record in one session, superseded ones included.
    pub files_per_session_max: usize,
    /// Sessions of one tenant that keep a space of their own. The host's spaces are everybody's.
    pub kept_per_tenant_max: usize,
}

impl Default for ObjectLimits {
    /// What the contract says when nothing is configured.
    fn default() -> ObjectLimits {
        ObjectLimits {
            file_bytes_max: 150 * 1024 * 1024,
            ttl: Duration::from_secs(24 * 3600),
            files_per_session_max: 10_000,
            kept_per_tenant_max: 1000,
        }
    }
}

/// Stored files could not be had or kept.
#[derive(Debug, thiserror::Error)]
pub enum ObjectsError {
    #[error("failed to open the folder of stored files {path:?}")]
    Open { path: PathBuf, source: io::Error },
    #[error("a file of more than {bytes_max} bytes")]
    TooLarge { bytes_max: u64 },
    #[error("the session has {files_max} files, and no more fit")]
    SessionFull { files_max: usize },
    #[error("{max} sessions with a workspace of their own are kept already, and no more are")]
    TooManyKept { max: usize },
    #[error("the session is unknown or has ended")]
    NoSession,
    #[error("the disk is full")]
    StorageFull,
    #[error("not a regular file")]
    NotAFile,
    #[error("the upload was given up")]
    GivenUp,
    #[error("failed to write a stored file")]
    Write(#[source] io::Error),
    #[error("failed to read a file that is to be stored")]
    Read(#[source] io::Error),
    #[error(transparent)]
    Store(#[from] StoreError),
}

impl ObjectsError {
    fn writing(error: io::Error) -> ObjectsError {
        match error.kind() {
            io::ErrorKind::StorageFull | io::ErrorKind::QuotaExceeded => ObjectsError::StorageFull,
            _ => ObjectsError::Write(error),
        }
    }

    fn reading(error: io::Error) -> ObjectsError {
        ObjectsError::Read(error)
    }
}

/// What a session is for.
#[derive(Copy, Clone, Debug, PartialEq, Eq)]
pub enum Kind {
    /// Uploads that name no session.
    Storage,
    /// A run that keeps nothing but its outputs.
    Run,
    /// It owns a space, which outlives its runs.
    Kept,
}

/// A session, for its owner.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct SessionInfo {
    pub id: String,
    pub kind: Kind,
    /// Of a kept session.
    pub space: Option<SpaceId>,
    /// Storage that no run may continue: it is not to be written, or not its user's alone.
    pub read_only: bool,
}

/// What leads to a kept session, besides who asks.
#[derive(Copy, Clone, Debug, PartialEq, Eq)]
pub enum Affinity<'a> {
    Entity(&'a str),
    Hint(&'a str),
    /// A connection of an MCP client, by a name that nobody else has.
    Connection(&'a str),
    /// A session that MCP clients of the caller name.
    Named(&'a str),
}

/// What is known of a stored file.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct FileRecord {
    pub id: String,
    pub session: String,
    /// A relative path.
    pub name: String,
    /// Bytes.
    pub size: u64,
    pub content_type: String,
    /// SHA-256 of the bytes, in hexadecimal digits.
    pub etag: String,
    pub modified_ms: u64,
    pub read_only: bool,
    pub bucket: Bucket,
    /// A run made it.
    pub is_output: bool,
}

/// What a file is to be recorded as.
#[derive(Clone, Debug)]
pub struct NewFile {
    pub name: String,
    /// One that does not fit in a header, or none, is guessed from the name.
    pub content_type: Option<String>,
    pub read_only: bool,
    pub bucket: Bucket,
    pub is_output: bool,
}

/// What a kept session's workspace has not heard of yet. To be applied in this order: removals, then files.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Pending {
    /// Uploads it has not got, the newest of each name, in order of registration.
    pub place: Vec<FileRecord>,
    /// Names whose last record was deleted.
    pub remove: Vec<String>,
    placed_to: i64,
    removed_to: i64,
}

impl Pending {
    pub fn is_empty(&self) -> bool {
        // Superseded uploads are settled with the next one that is not.
        self.place.is_empty() && self.remove.is_empty()
    }
}

/// Every stored file. Cheap to clone.
#[derive(Clone, Debug)]
pub struct Objects(Arc<Inner>);

#[derive(Debug)]
struct Inner {
    folder: Folder,
    store: Store,
    limits: ObjectLimits,
    fresh: Mutex<Fresh>,
    kept: Mutex<Kept>,
    ended_spaces: mpsc::UnboundedSender<SpaceId>,
    ended_spaces_taken: Mutex<Option<mpsc::UnboundedReceiver<SpaceId>>>,
    #[cfg(test)]
    ahead_ms: std::sync::atomic::AtomicU64,
}

impl Objects {
    /// Opens the folder, made when missing, and takes away what belongs to no record.
    pub fn open(dir: &Path, store: Store, limits: ObjectLimits) -> Result<Objects, ObjectsError> {
        let open = |source| ObjectsError::Open { path: dir.to_owned(), source };
        let folder = Folder::open(dir).map_err(open)?;
        let known =
            store.read_now(|connection| Ok((rows::ids(connection)?, rows::ended_spaces(connection)?)))?;
        let (ids, spaces) = known.unwrap_or_default();
        let swept = folder.sweep(&ids).map_err(open)?;
        if swept > 0 {
            tracing::info!(swept, "stored bytes of no record removed");
        }
        let (ended_spaces, taken) = mpsc::unbounded_channel();
        for space in spaces {
            // The receiver is below.
            let _ = ended_spaces.send(space);
        }
        Ok(Objects(Arc::new(Inner {
            folder,
            store,
            limits,
            fresh: Mutex::default(),
            kept: Mutex::default(),
            ended_spaces,
            ended_spaces_taken: Mutex::new(Some(taken)),
            #[cfg(test)]
            ahead_ms: 0.into(),
        })))
    }

    pub fn limits(&self) -> &ObjectLimits {
        &self.0.limits
    }

    // --- sessions ------------------------------------------------------------------------------------------------

    /// A new session. One that is not kept is written down with its first file.
    pub async fn new_session(&self, caller: &Caller, kind: Kind) -> Result<SessionInfo, ObjectsError> {
        if kind != Kind::Kept {
            return Ok(self.new_fresh(caller, kind));
        }
        let (owner, now_ms) = (caller.clone(), self.now_ms());
        let id = id::new();
        let max = self.0.limits.kept_per_tenant_max;
        let made = self.0.store.write(move |it| rows::make_kept(it, None, &id, &owner, now_ms, max));
        made.await?.ok_or(ObjectsError::TooManyKept { max })
    }

    /// A session for a run, without a wait.
    pub fn new_run_session(&self, caller: &Caller) -> SessionInfo {
        self.new_fresh(caller, Kind::Run)
    }

    fn new_fresh(&self, caller: &Caller, kind: Kind) -> SessionInfo {
        let info = SessionInfo { id: id::new(), kind, space: None, read_only: false };
        self.fresh().insert(info.clone(), caller.clone(), self.now_ms());
        info
    }

    /// The kept session that an entity or a hint leads this user to; `true` when it was made now. `asserted_user` tells
    /// users apart that no token proved, and counts for nothing else.
    pub async fn affinity(
        &self,
        caller: &Caller,
        asserted_user: &str,
        affinity: Affinity<'_>,
    ) -> Result<(SessionInfo, bool), ObjectsError> {
        let key = affinity_key(caller, asserted_user, affinity);
        let (now_ms, after_ms) = (self.now_ms(), self.after_ms());
        let since = {
            let kept = self.kept();
            if let Some((info, used_ms)) = kept.led(&key)
                && !self.is_near_its_end(*used_ms)
            {
                return Ok((info.clone(), false));
            }
            kept.now()
        };
        let wanted = key.clone();
        let found = self.0.store.read(move |it| rows::session_of(it, &wanted)).await?;
        if let Some((info, _, touched_ms)) = found
            && !self.is_near_its_end(touched_ms)
        {
            self.kept().remember_led(since, key, &info, touched_ms);
            return Ok((info, false));
        }
        let (owner, id) = (caller.clone(), id::new());
        let max = self.0.limits.kept_per_tenant_max;
        let time = rows::Time { now_ms, after_ms };
        let made = self.end_by(move |it| {
            let (found, ended) = rows::keep_session(it, &key, &id, &owner, time, max)?;
            Ok((found, Vec::from_iter(ended)))
        });
        let (found, ended) = made.await?;
        self.clear_up(ended).await;
        found.ok_or(ObjectsError::TooManyKept { max })
    }

    /// The session, if it is the caller's. Unknown, ended and somebody else's look the same.
    pub async fn session(&self, caller: &Caller, id: &str) -> Option<SessionInfo> {
        let after_ms = self.after_ms();
        if let Some(info) = self.fresh().get(caller, id, after_ms) {
            return Some(info);
        }
        let wanted = id.to_owned();
        let (info, owner, touched_ms) = self.look_up(move |it| rows::session(it, &wanted)).await?;
        if owner != *caller || touched_ms <= after_ms {
            return None;
        }
        if self.is_near_its_end(touched_ms) {
            self.touch(&info.id).await;
        }
        Some(info)
    }

    /// Whether what was used last at `touched_ms` could end under a run that begins now.
    fn is_near_its_end(&self, touched_ms: u64) -> bool {
        touched_ms <= self.after_ms().saturating_add(millis(LIFE_LEFT_MIN))
    }

    /// Notes that the session was used now.
    pub async fn touch(&self, session: &str) {
        let now_ms = self.now_ms();
        if self.fresh().touch(session, now_ms) {
            return;
        }
        let Some(used_ms) = self.kept().note(session, now_ms) else { return };
        let session = session.to_owned();
        let written = self.0.store.write_behind(move |it| rows::touch(it, &session, used_ms)).await;
        if let Err(error) = written {
            tracing::warn!(%error, "a session's use was not noted");
        }
    }

    // --- files ---------------------------------------------------------------------------------------------------

    /// A file of the session, if it is the caller's.
    pub async fn file(&self, caller: &Caller, session: &str, file: &str) -> Option<FileRecord> {
        if !is_id(session) || !is_id(file) {
            return None;
        }
        let (session, file, after_ms) = (session.to_owned(), file.to_owned(), self.after_ms());
        let owned = self.look_up(move |it| rows::file(it, &session, &file, after_ms)).await?;
        owned.for_caller(caller)
    }

    /// Every file of the session, in order of registration, equal names among them.
    pub async fn files_of(&self, session: &str) -> Vec<FileRecord> {
        let session = session.to_owned();
        let found = self.look_up(move |it| rows::files_of(it, &session).map(Some)).await;
        found.unwrap_or_default().into_iter().map(|owned| owned.record).collect()
    }

    /// The same without what a younger one of its name superseded and what was retired.
    pub async fn live_files_of(&self, session: &str) -> Vec<FileRecord> {
        let session = session.to_owned();
        let found = self.look_up(move |it| rows::live_files_of(it, &session).map(Some)).await;
        found.unwrap_or_default().into_iter().map(|owned| owned.record).collect()
    }

    /// A run has taken the outputs of these names away: they are found by their ids only, until they are pruned.
    pub async fn retire(&self, session: &str, names: Vec<String>) {
        let wanted = session.to_owned();
        if let Err(error) = self.change_files(session, move |it| rows::retire(it, &wanted, &names)).await {
            tracing::error!(%error, "that a generated file is gone was not noted; it comes back");
        }
    }

    /// The files of the session that are the caller's. `None` when neither the session nor any of its files is.
    pub async fn files_for(&self, caller: &Caller, session: &str) -> Option<Vec<FileRecord>> {
        if !is_id(session) {
            return None;
        }
        let (wanted, after_ms) = (session.to_owned(), self.after_ms());
        let found = self
            .look_up(move |it| {
                let Some((_, owner, touched_ms)) = rows::session(it, &wanted)? else { return Ok(None) };
                Ok(Some((owner, touched_ms, rows::files_of(it, &wanted)?)))
            })
            .await;
        let Some((owner, touched_ms, files)) = found else {
            // No file yet.
            return self.fresh().get(caller, session, after_ms).map(|_| Vec::new());
        };
        if touched_ms <= after_ms {
            return None;
        }
        let files: Vec<_> = files.into_iter().filter_map(|owned| owned.for_caller(caller)).collect();
        (owner == *caller || !files.is_empty()).then_some(files)
    }

    /// A place for a file whose bytes are to come.
    pub async fn incoming(&self) -> Result<Incoming, ObjectsError> {
        Incoming::begin(&self.0.folder, self.0.limits.file_bytes_max).await
    }

    /// The bytes of an open file as they are now, where they are no more than `bytes_max` and than there may be of any.
    /// Only a regular file is copied.
    pub async fn incoming_from(&self, file: File, bytes_max: u64) -> Result<Incoming, ObjectsError> {
        Incoming::copy(&self.0.folder, bytes_max.min(self.0.limits.file_bytes_max), file).await
    }

    /// Puts a file on record. It is there for good when this returns.
    pub async fn add(
        &self,
        caller: &Caller,
        session: &SessionInfo,
        incoming: Incoming,
        new: NewFile,
    ) -> Result<FileRecord, ObjectsError> {
        let added = self.add_all(caller, session, vec![(incoming, new)]).await?;
        Ok(added.into_iter().next().expect("one file was added"))
    }

    /// Puts files on record in this order: all of them, or none. It goes on when its caller goes away.
    pub async fn add_all(
        &self,
        caller: &Caller,
        session: &SessionInfo,
        files: Vec<(Incoming, NewFile)>,
    ) -> Result<Vec<FileRecord>, ObjectsError> {
        let (this, caller, session) = (self.clone(), caller.clone(), session.clone());
        let adding = async move { this.register(caller, session, files).await };
        tokio::spawn(adding.in_current_span()).await.map_err(|_| ObjectsError::GivenUp)?
    }

    async fn register(
        &self,
        owner: Caller,
        session: SessionInfo,
        files: Vec<(Incoming, NewFile)>,
    ) -> Result<Vec<FileRecord>, ObjectsError> {
        let mut whole = Vec::with_capacity(files.len());
        for (incoming, new) in files {
            whole.push((incoming.whole().await?, new));
        }
        let (session_id, now_ms) = (session.id.clone(), self.now_ms());
        let placed = blocking(move || {
            let mut placed: Vec<(Placed, FileRecord)> = Vec::with_capacity(whole.len());
            for (whole, new) in whole {
                let record = FileRecord {
                    id: id::new(),
                    session: session_id.clone(),
                    content_type: content_type(new.content_type, &new.name),
                    name: new.name,
                    size: whole.bytes,
                    etag: whole.etag.clone(),
                    modified_ms: now_ms,
                    read_only: new.read_only,
                    bucket: new.bucket,
                    is_output: new.is_output,
                };
                placed.push((whole.place(&record.id).map_err(ObjectsError::writing)?, record));
            }
            Ok(placed)
        });
        let (placed, records): (Vec<Placed>, Vec<FileRecord>) = placed.await?.into_iter().unzip();
        let (files_max, written) = (self.0.limits.files_per_session_max, records.clone());
        let info = session.clone();
        let adding = move |it: &_| rows::add(it, &info, &owner, &written, files_max);
        let added = self.change_files(&session.id, adding).await?;
        match added {
            Ok(()) => {}
            Err(rows::NotAdded::NoSession) => return Err(ObjectsError::NoSession),
            Err(rows::NotAdded::SessionFull) => return Err(ObjectsError::SessionFull { files_max }),
        }
        placed.into_iter().for_each(Placed::keep);
        self.fresh().forget(&session.id);
        Ok(records)
    }

    /// Opens a file's bytes.
    pub fn read(&self, record: &FileRecord) -> io::Result<File> {
        File::open(self.0.folder.path_of(&record.id))
    }

    /// Takes a file away. False when there was none.
    pub async fn remove(&self, session: &str, file: &str) -> bool {
        let (wanted, id) = (session.to_owned(), file.to_owned());
        match self.change_files(session, move |it| rows::remove(it, &wanted, &id)).await {
            Ok(true) => {
                self.delete(vec![file.to_owned()]).await;
                true
            }
            Ok(false) => false,
            Err(error) => {
                tracing::error!(%error, "a stored file was not removed");
                false
            }
        }
    }

    // --- what a kept session's workspace is told -------------------------------------------------------------------

    /// What the workspace of a kept session has not heard of, and the session's files. `None` when it has ended.
    pub async fn workspace_of(&self, session: &str) -> Option<(Pending, Vec<FileRecord>)> {
        let since = {
            let kept = self.kept();
            if let Some(known) = kept.workspace(session) {
                return Some(known.clone());
            }
            kept.now()
        };
        let wanted = session.to_owned();
        let found = self.look_up(move |it| {
            let Some(_) = rows::session(it, &wanted)? else { return Ok(None) };
            Ok(Some((rows::pending(it, &wanted)?, rows::live_files_of(it, &wanted)?)))
        });
        let (pending, files) = found.await?;
        let known = (pending, files.into_iter().map(|owned| owned.record).collect());
        self.kept().remember_workspace(since, session.to_owned(), &known);
        Some(known)
    }

    /// The workspace has it all.
    pub async fn settled(&self, session: &str, pending: &Pending) {
        if *pending == Pending::default() {
            return;
        }
        let (wanted, pending) = (session.to_owned(), pending.clone());
        let settling = move |it: &_| rows::settled(it, &wanted, &pending);
        if let Err(error) = self.change_files(session, settling).await {
            tracing::error!(%error, "what a workspace has was not noted; it gets it again");
        }
    }

    // --- the end of sessions ---------------------------------------------------------------------------------------

    /// Spaces of kept sessions that have ended, once each; those that an earlier life did not see deleted come again.
    /// Can be taken once.
    pub fn expired_spaces(&self) -> Option<mpsc::UnboundedReceiver<SpaceId>> {
        self.0.ended_spaces_taken.lock().expect("nobody panics while holding it").take()
    }

    /// Somebody has used a space that may have been deleted by then, and so made it again: it is told of once more.
    pub async fn used_late(&self, space: SpaceId) {
        if let Ok(Ownership::Past) = self.0.store.ownership(space).await {
            // Without a receiver nobody deletes spaces.
            let _ = self.0.ended_spaces.send(space);
        }
    }

    /// The files of an ended session's space are deleted: it is not told of again.
    pub async fn space_deleted(&self, space: SpaceId) {
        if let Err(error) = self.0.store.write_behind(move |it| rows::forget_space(it, space)).await {
            tracing::warn!(%error, "a deleted space was not noted");
        }
    }

    /// Ends a session of the caller's before its time: its files and its space go.
    pub async fn end(&self, caller: &Caller, session: &str) {
        let (wanted, owner) = (session.to_owned(), caller.clone());
        match self.end_by(move |it| Ok(((), Vec::from_iter(rows::end_one(it, &wanted, &owner)?)))).await {
            Ok(((), ended)) => self.clear_up(ended).await,
            Err(error) => tracing::error!(%error, "a session was not ended; it ends when its time is over"),
        }
    }

    /// Ends sessions as their time comes, for as long as somebody holds `objects`. For a task of its own.
    pub async fn sweep(objects: WeakObjects) {
        loop {
            tokio::time::sleep(SWEEP_EVERY).await;
            let Some(inner) = objects.0.upgrade() else { return };
            if let Err(error) = Objects(inner).sweep_now().await {
                tracing::error!(%error, "sessions whose time is over were not ended");
            }
        }
    }

    /// For [`Objects::sweep`].
    pub fn downgrade(&self) -> WeakObjects {
        WeakObjects(Arc::downgrade(&self.0))
    }

    async fn sweep_now(&self) -> Result<(), ObjectsError> {
        let after_ms = self.after_ms();
        loop {
            let ending = move |it: &_| Ok(((), rows::end_expired(it, after_ms, SWEPT_AT_ONCE)?));
            let ((), ended) = self.end_by(ending).await?;
            let is_last = ended.len() < SWEPT_AT_ONCE;
            self.clear_up(ended).await;
            if is_last {
                break;
            }
        }
        loop {
            let this = self.clone();
            let pruning = move |it: &_| rows::prune(it, after_ms, PRUNED_AT_ONCE);
            let pruned = self
                .0
                .store
                .write_and(pruning, move |pruned: &Vec<String>| this.forget_if_any(pruned))
                .await?;
            let is_last = pruned.len() < PRUNED_AT_ONCE;
            self.delete(pruned).await;
            if is_last {
                return Ok(());
            }
        }
    }

    async fn clear_up(&self, ended: impl IntoIterator<Item = rows::Ended>) {
        let mut files = Vec::new();
        for mut it in ended {
            files.append(&mut it.files);
            if let Some(space) = it.space {
                // Without a receiver nobody deletes spaces, and the next start tells of them again.
                let _ = self.0.ended_spaces.send(space);
            }
        }
        self.delete(files).await;
    }

    /// Deletes bytes whose record is gone. What fails is swept at the next start.
    async fn delete(&self, files: Vec<String>) {
        if files.is_empty() {
            return;
        }
        let folder = self.0.folder.clone();
        let deleting = blocking(move || {
            for id in files {
                if let Err(error) = std::fs::remove_file(folder.path_of(&id)) {
                    tracing::warn!(%error, id, "stored bytes could not be removed");
                }
            }
            Ok(())
        });
        if deleting.await.is_err() {
            tracing::warn!("stored bytes were not removed");
        }
    }

    // --- helpers ---------------------------------------------------------------------------------------------------

    async fn look_up<T: Send + 'static>(
        &self,
        work: impl FnOnce(&rusqlite::Connection) -> rusqlite::Result<Option<T>> + Send + 'static,
    ) -> Option<T> {
        match self.0.store.read(work).await {
            Ok(found) => found,
            Err(error) => {
                tracing::error!(%error, "stored files could not be looked up");
                None
            }
        }
    }

    /// A write after which what is remembered of the session's files is not so any more.
    async fn change_files<T: Send + 'static>(
        &self,
        session: &str,
        work: impl FnOnce(&rusqlite::Connection) -> rusqlite::Result<T> + Send + 'static,
    ) -> Result<T, StoreError> {
        let (this, session) = (self.clone(), session.to_owned());
        self.0.store.write_and(work, move |_| this.kept().forget_workspace(&session)).await
    }

    /// A write that may end sessions: those that it returns.
    async fn end_by<T: Send + 'static>(
        &self,
        work: impl FnOnce(&rusqlite::Connection) -> rusqlite::Result<(T, Vec<rows::Ended>)> + Send + 'static,
    ) -> Result<(T, Vec<rows::Ended>), StoreError> {
        let this = self.clone();
        self.0
            .store
            .write_and(work, move |(_, ended): &(T, Vec<rows::Ended>)| this.forget_if_any(ended))
            .await
    }

    fn forget_if_any<T>(&self, gone: &[T]) {
        if !gone.is_empty() {
            self.kept().forget_all();
        }
    }

    fn kept(&self) -> MutexGuard<'_, Kept> {
        self.0.kept.lock().expect("no code panics while it holds what is remembered")
    }

    fn fresh(&self) -> MutexGuard<'_, Fresh> {
        self.0.fresh.lock().expect("no code panics while it holds the new sessions")
    }

    fn now_ms(&self) -> u64 {
        let since = SystemTime::now().duration_since(SystemTime::UNIX_EPOCH).unwrap_or_default();
        #[cfg(test)]
        let since = since + Duration::from_millis(self.0.ahead_ms.load(std::sync::atomic::Ordering::Relaxed));
        millis(since)
    }

    /// Sessions touched before or at this time are over.
    fn after_ms(&self) -> u64 {
        self.now_ms().saturating_sub(millis(self.0.limits.ttl))
    }

    /// Lets time go by.
    #[cfg(test)]
    pub(crate) fn advance(&self, by: Duration) {
        self.0.ahead_ms.fetch_add(millis(by), std::sync::atomic::Ordering::Relaxed);
    }
}

/// Does not keep them open.
#[derive(Clone, Debug)]
pub struct WeakObjects(Weak<Inner>);

/// A digest as records show it.
pub fn hex(digest: &[u8]) -> String {
    digest.iter().map(|byte| format!("{byte:02x}")).collect()
}

fn millis(duration: Duration) -> u64 {
    u64::try_from(duration.as_millis()).unwrap_or(u64::MAX)
}

/// A digest, so that neither its length nor what a client puts into a hint matters.
fn affinity_key(caller: &Caller, asserted_user: &str, affinity: Affinity<'_>) -> String {
    let (kind, name) = match affinity {
        Affinity::Entity(entity) => ("entity", entity),
        Affinity::Hint(hint) => ("hint", hint),
        Affinity::Connection(name) => ("mcp-connection", name),
        Affinity::Named(name) => ("mcp-name", name),
    };
    let (proven, user) = match &caller.user {
        Some(user) => (true, user.as_str()),
        None => (false, asserted_user),
    };
    let key = serde_json::json!([caller.tenant.0, proven, user, kind, name]).to_string();
    hex(&Sha256::digest(key.as_bytes()))
}

/// The type as it was given when a header can hold it, else what the name says.
fn content_type(given: Option<String>, name: &str) -> String {
    let fits = |given: &String| {
        given.len() <= CONTENT_TYPE_BYTES_MAX
            && given.bytes().all(|byte| matches!(byte, b' '..=b'~'))
            && given.split_once('/').is_some_and(|(kind, rest)| !kind.is_empty() && !rest.is_empty())
    };
    given.filter(fits).unwrap_or_else(|| mime_guess::from_path(name).first_or_octet_stream().to_string())
}
