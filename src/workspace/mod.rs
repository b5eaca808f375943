//! A workspace as the daemon reads and fills it: by a view from the launcher, never by a path.
//!
//! Every name beneath is a guest's. Nothing is opened through a link, only regular files are read, and the walk keeps
//! its own stack, so that what a guest builds costs it nothing but its own entries.
#![forbid(unsafe_code)]

use std::collections::BTreeMap;
use std::ffi::{CStr, OsStr, OsString};
use std::fs::File;
use std::io::{self, Read};
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::FileExt;
use std::path::{Component, Path, PathBuf};

use rustix::fs::{AtFlags, Dir, FileType, Mode, OFlags, RenameFlags, ResolveFlags};

/// Deepest folder whose files are seen, in levels below the workspace.
pub const DEPTH_MAX: usize = 10;
/// Most entries that one look goes through: what a space can hold, and a little.
const ENTRIES_MAX: usize = 65_536;
/// What is read at once when a file is copied, and the least that may become a hole.
const COPY_BYTES: usize = 256 * 1024;
const BLOCK_BYTES: usize = 4096;
/// Longest relative path, in bytes.
pub const PATH_BYTES_MAX: usize = 4095;

const BENEATH: ResolveFlags =
    ResolveFlags::BENEATH.union(ResolveFlags::NO_SYMLINKS).union(ResolveFlags::NO_MAGICLINKS);
const FOLDER: OFlags = OFlags::RDONLY.union(OFlags::DIRECTORY).union(OFlags::CLOEXEC).union(OFlags::NOFOLLOW);

/// A view of a workspace.
#[derive(Debug)]
pub struct Workspace {
    root: OwnedFd,
}

/// What tells whether a file has been touched.
#[derive(Copy, Clone, Debug, PartialEq, Eq)]
pub struct Stamp {
    pub inode: u64,
    pub size: u64,
    mtime: (i64, i64),
    ctime: (i64, i64),
}

/// What lies in a workspace: regular files by path, and folders with nothing in them. Files that are on their way in, or
/// were when the daemon was killed, are no content.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Content {
    pub files: BTreeMap<PathBuf, Stamp>,
    pub empty_folders: Vec<PathBuf>,
    /// Under names of ours.
    pub on_the_way: Vec<PathBuf>,
}

impl Workspace {
    pub fn new(view: OwnedFd) -> Workspace {
        Workspace { root: view }
    }

    /// Whether nothing at all is there. False when that cannot be told.
    pub fn is_empty(&self) -> bool {
        let is_own = |name: &CStr| name == c"." || name == c"..";
        let entries = self.folder(Path::new("")).and_then(|folder| Ok(Dir::new(folder)?));
        entries.is_ok_and(|entries| entries.map_while(Result::ok).all(|entry| is_own(entry.file_name())))
    }

    /// Everything that is there, as far down as [`DEPTH_MAX`]. What vanishes or cannot be read meanwhile is left out.
    pub fn look(&self) -> io::Result<Content> {
        let mut content = Content::default();
        let mut left = ENTRIES_MAX;
        let mut folders = vec![PathBuf::new()];
        while let Some(path) = folders.pop() {
            let folder = match self.folder(&path) {
                Ok(folder) => folder,
                Err(error) if path.as_os_str().is_empty() => return Err(error),
                Err(_) => continue,
            };
            let mut is_empty = true;
            for entry in Dir::read_from(&folder)? {
                let Ok(entry) = entry else { break };
                let name = entry.file_name();
                if name == c"." || name == c".." {
                    continue;
                }
                is_empty = false;
                if left == 0 {
                    return Ok(content);
                }
                left -= 1;
                self.note(&folder, &path, name, &mut content, &mut folders);
            }
            if is_empty && !path.as_os_str().is_empty() {
                content.empty_folders.push(path);
            }
        }
        content.empty_folders.sort();
        Ok(content)
    }

    fn note(
        &self,
        folder: &OwnedFd,
        at: &Path,
        name: &CStr,
        content: &mut Content,
        folders: &mut Vec<PathBuf>,
    ) {
        let path = at.join(OsStr::from_bytes(name.to_bytes()));
        if path.as_os_str().len() > PATH_BYTES_MAX {
            return;
        }
        let Ok(stat) = rustix::fs::statat(folder, name, AtFlags::SYMLINK_NOFOLLOW) else { return };
        match FileType::from_raw_mode(stat.st_mode) {
            FileType::RegularFile if is_temporary(name) => content.on_the_way.push(path),
            FileType::RegularFile => {
                content.files.insert(path, Stamp::of(&stat));
            }
            FileType::Directory if path.components().count() < DEPTH_MAX => folders.push(path),
            _ => {}
        }
    }

    /// A regular file for reading. The descriptor is the file: what comes to lie at its path later is another.
    pub fn open(&self, path: &Path) -> io::Result<File> {
        let flags = OFlags::RDONLY | OFlags::NONBLOCK | OFlags::NOCTTY | OFlags::CLOEXEC | OFlags::NOFOLLOW;
        let file = rustix::fs::openat2(&self.root, path, flags, Mode::empty(), BENEATH)?;
        let stat = rustix::fs::fstat(&file)?;
        if FileType::from_raw_mode(stat.st_mode) != FileType::RegularFile {
            return Err(io::Error::from(io::ErrorKind::InvalidInput));
        }
        Ok(File::from(file))
    }

    /// Files that are to be laid together.
    pub fn laying(&self) -> Laying<'_> {
        Laying { workspace: self, staged: Vec::new(), replaced: Vec::new(), undo: Vec::new() }
    }

    /// Copies a file to `path`, whose folders are made. What lies there is replaced, never written through, and stays
    /// where the file does not fit.
    pub fn put(&self, path: &Path, source: File, read_only: bool) -> io::Result<()> {
        let mut laying = self.laying();
        laying.add(path, source, read_only)?;
        laying.finish()
    }

    /// Makes a folder and those above it.
    pub fn make_folder(&self, path: &Path) -> io::Result<()> {
        let mut laying = self.laying();
        laying.prepare(path)?;
        laying.finish()
    }

    /// Whether just this lies at `path` already.
    fn holds(&self, path: &Path, source: &File, mode: Mode) -> io::Result<bool> {
        let Ok(there) = self.open(path) else { return Ok(false) };
        let (found, wanted) = (rustix::fs::fstat(&there)?, rustix::fs::fstat(source)?);
        let is_like = found.st_size == wanted.st_size
            && found.st_nlink == 1
            && Mode::from_raw_mode(found.st_mode) == mode;
        Ok(is_like && are_equal(&there, source)?)
    }

    /// The same once nobody lays anything there: what is still on its way belongs to nobody, and is taken away.
    pub fn look_and_clear(&self) -> io::Result<Content> {
        let mut content = self.look()?;
        self.take_away(&std::mem::take(&mut content.on_the_way));
        Ok(content)
    }

    /// Takes that away. True when there was something.
    pub fn clear(&self) -> bool {
        self.look().is_ok_and(|content| self.take_away(&content.on_the_way))
    }

    fn take_away(&self, left: &[PathBuf]) -> bool {
        let mut any = false;
        for path in left {
            match self.remove(path) {
                Ok(()) => any = true,
                Err(error) => tracing::warn!(%error, "what a kill has left stays in a workspace"),
            }
        }
        any
    }

    /// Takes a file away, if it is there.
    pub fn remove(&self, path: &Path) -> io::Result<()> {
        let parent = path.parent().unwrap_or(Path::new(""));
        let Some(name) = path.file_name() else { return Err(io::Error::from(io::ErrorKind::InvalidInput)) };
        match self
            .folder(parent)
            .and_then(|folder| rustix::fs::unlinkat(&folder, name, AtFlags::empty()).map_err(io::Error::from))
        {
            Err(error) if error.kind() != io::ErrorKind::NotFound => Err(error),
            _ => Ok(()),
        }
    }

    fn folder(&self, path: &Path) -> io::Result<OwnedFd> {
        if path.as_os_str().is_empty() {
            // A description of its own: reading a folder moves through it.
            return Ok(rustix::fs::openat(&self.root, ".", FOLDER, Mode::empty())?);
        }
        Ok(rustix::fs::openat2(&self.root, path, FOLDER, Mode::empty(), BENEATH)?)
    }
}

/// Files on their way into a workspace: all of them or none. Each is written beside its place under a name of ours, and
/// gets its own when all are there; dropped before that, or failed, all is as it was.
#[derive(Debug)]
pub struct Laying<'a> {
    workspace: &'a Workspace,
    staged: Vec<Staged>,
    /// What lay where files come to lie, under names of ours.
    replaced: Vec<PathBuf>,
    /// In the order of what was done.
    undo: Vec<Undo>,
}

/// A file that has all but its name. A rename from one folder to another is more than the daemon may do.
#[derive(Debug)]
struct Staged {
    folder: PathBuf,
    temporary: String,
    name: OsString,
}

#[derive(Debug)]
enum Undo {
    Unlink(PathBuf),
    RemoveFolder(PathBuf),
    MakeFolder(PathBuf, Mode),
    Rename { folder: PathBuf, from: OsString, to: OsString },
    Exchange { folder: PathBuf, one: OsString, other: OsString },
}

impl Laying<'_> {
    /// Writes a file that is to lie at `path`, whose folders are made. Blocks of zeros become holes: a file that fitted
    /// once fits again. One that lies there already is not written anew.
    pub fn add(&mut self, path: &Path, mut source: File, read_only: bool) -> io::Result<()> {
        let (folder, name) = parts(path)?;
        let mode = Mode::from_bits_truncate(if read_only { 0o444 } else { 0o644 });
        if self.workspace.holds(path, &source, mode)? {
            return Ok(());
        }
        let into = self.prepare(folder)?;
        let temporary = temporary();
        let flags = OFlags::WRONLY | OFlags::CREATE | OFlags::EXCL | OFlags::CLOEXEC | OFlags::NOFOLLOW;
        let made = File::from(rustix::fs::openat(&into, &temporary, flags, Mode::from_bits_truncate(0o644))?);
        self.undo.push(Undo::Unlink(folder.join(&temporary)));
        copy_with_holes(&mut source, &made)?;
        rustix::fs::fchmod(&made, mode)?;
        self.staged.push(Staged { folder: folder.to_owned(), temporary, name: name.to_owned() });
        Ok(())
    }

    /// Gives each file its name. What lies there is replaced, unless it is a folder with something in it.
    pub fn finish(mut self) -> io::Result<()> {
        for Staged { folder, temporary, name } in std::mem::take(&mut self.staged) {
            let within = self.workspace.folder(&folder)?;
            match rustix::fs::statat(&within, &name, AtFlags::SYMLINK_NOFOLLOW) {
                Err(rustix::io::Errno::NOENT) => {}
                Ok(stat) if FileType::from_raw_mode(stat.st_mode) == FileType::Directory => {
                    rustix::fs::unlinkat(&within, &name, AtFlags::REMOVEDIR)?;
                    self.undo.push(Undo::MakeFolder(folder.join(&name), Mode::from_raw_mode(stat.st_mode)));
                }
                // In one step: whatever ends us, one of the two lies there.
                Ok(_) => {
                    exchange(&within, OsStr::new(&temporary), &name)?;
                    self.replaced.push(folder.join(&temporary));
                    self.undo.push(Undo::Exchange { folder, one: name, other: temporary.into() });
                    continue;
                }
                Err(error) => return Err(error.into()),
            }
            rustix::fs::renameat(&within, &temporary, &within, &name)?;
            self.undo.push(Undo::Rename { folder, from: name, to: temporary.into() });
        }
        self.undo.clear();
        for path in &self.replaced {
            if let Err(error) = self.workspace.remove(path) {
                tracing::warn!(%error, "a file that was replaced stays in a workspace");
            }
        }
        Ok(())
    }

    /// The folder at `path`, made with those above it where they are missing.
    fn prepare(&mut self, path: &Path) -> io::Result<OwnedFd> {
        let mut folder = self.workspace.root.as_fd().try_clone_to_owned()?;
        let mut at = PathBuf::new();
        for component in path.components() {
            let Component::Normal(name) = component else { return Err(io::ErrorKind::InvalidInput.into()) };
            let opened = rustix::fs::openat(&folder, name, FOLDER, Mode::empty());
            if let Err(rustix::io::Errno::NOTDIR | rustix::io::Errno::LOOP) = opened {
                // A file or a link where a folder is to be: the caller's file wins.
                self.move_aside(&folder, &at, name)?;
            }
            at.push(name);
            folder = match opened {
                Err(rustix::io::Errno::NOENT | rustix::io::Errno::NOTDIR | rustix::io::Errno::LOOP) => {
                    rustix::fs::mkdirat(&folder, name, Mode::from_bits_truncate(0o755))?;
                    self.undo.push(Undo::RemoveFolder(at.clone()));
                    rustix::fs::openat(&folder, name, FOLDER, Mode::empty())?
                }
                opened => opened?,
            };
        }
        Ok(folder)
    }

    fn move_aside(&mut self, within: &OwnedFd, folder: &Path, name: &OsStr) -> io::Result<()> {
        let temporary = temporary();
        rustix::fs::renameat(within, name, within, &temporary)?;
        self.replaced.push(folder.join(&temporary));
        let folder = folder.to_owned();
        self.undo.push(Undo::Rename { folder, from: temporary.into(), to: name.to_owned() });
        Ok(())
    }
}

impl Drop for Laying<'_> {
    fn drop(&mut self) {
        while let Some(step) = self.undo.pop() {
            if let Err(error) = self.workspace.undo(&step) {
                tracing::warn!(%error, "a workspace is not as it was before files were laid there");
            }
        }
    }
}

impl Workspace {
    fn undo(&self, step: &Undo) -> io::Result<()> {
        match step {
            Undo::Unlink(path) => self.remove(path),
            Undo::RemoveFolder(path) => {
                let (folder, name) = parts(path)?;
                Ok(rustix::fs::unlinkat(self.folder(folder)?, name, AtFlags::REMOVEDIR)?)
            }
            Undo::MakeFolder(path, mode) => {
                let (folder, name) = parts(path)?;
                Ok(rustix::fs::mkdirat(self.folder(folder)?, name, *mode)?)
            }
            Undo::Rename { folder, from, to } => {
                let folder = self.folder(folder)?;
                Ok(rustix::fs::renameat(&folder, from, &folder, to)?)
            }
            Undo::Exchange { folder, one, other } => exchange(&self.folder(folder)?, one, other),
        }
    }
}

/// The folder that something lies in, and its name there.
fn parts(path: &Path) -> io::Result<(&Path, &OsStr)> {
    let is_plain = path.components().all(|component| matches!(component, Component::Normal(_)));
    let parts = path.parent().zip(path.file_name()).filter(|_| is_plain);
    parts.ok_or_else(|| io::ErrorKind::InvalidInput.into())
}

const TEMPORARY: &str = ".caisson-";
const TEMPORARY_CHARS: usize = 21;

/// A name that no guest can know before.
fn temporary() -> String {
    format!("{TEMPORARY}{}", nanoid::nanoid!(TEMPORARY_CHARS))
}

/// Whether it is such a name.
fn is_temporary(name: &CStr) -> bool {
    let rest = name.to_bytes().strip_prefix(TEMPORARY.as_bytes());
    let is_ours = |byte: &u8| byte.is_ascii_alphanumeric() || matches!(byte, b'_' | b'-');
    rest.is_some_and(|rest| rest.len() == TEMPORARY_CHARS && rest.iter().all(is_ours))
}

fn exchange(folder: &OwnedFd, one: &OsStr, other: &OsStr) -> io::Result<()> {
    Ok(rustix::fs::renameat_with(folder, one, folder, other, RenameFlags::EXCHANGE)?)
}

/// Whether two files of one size have the same bytes.
fn are_equal(one: &File, other: &File) -> io::Result<bool> {
    let [mut ours, mut theirs] = [(); 2].map(|()| vec![0; COPY_BYTES]);
    let mut at = 0_u64;
    loop {
        let length = one.read_at(&mut ours, at)?;
        if length == 0 {
            return Ok(true);
        }
        match other.read_exact_at(&mut theirs[..length], at) {
            Ok(()) if ours[..length] == theirs[..length] => at += length as u64,
            // A guest may change it meanwhile.
            Ok(()) => return Ok(false),
            Err(error) if error.kind() == io::ErrorKind::UnexpectedEof => return Ok(false),
            Err(error) => return Err(error),
        }
    }
}

/// Copies to an empty file, and leaves out what would be zeros anyway.
fn copy_with_holes(source: &mut File, made: &File) -> io::Result<()> {
    let mut buffer = vec![0; COPY_BYTES];
    let mut at = 0_u64;
    loop {
        let length = match source.read(&mut buffer) {
            Err(error) if error.kind() == io::ErrorKind::Interrupted => continue,
            read => read?,
        };
        if length == 0 {
            return made.set_len(at);
        }
        let read = &buffer[..length];
        let mut from = 0;
        for (number, block) in read.chunks(BLOCK_BYTES).enumerate() {
            if block.iter().all(|byte| *byte == 0) {
                let start = number * BLOCK_BYTES;
                made.write_all_at(&read[from..start], at + from as u64)?;
                from = start + block.len();
            }
        }
        made.write_all_at(&read[from..], at + from as u64)?;
        at += length as u64;
    }
}

impl Stamp {
    fn of(stat: &rustix::fs::Stat) -> Stamp {
        Stamp {
            inode: stat.st_ino,
            size: stat.st_size.unsigned_abs(),
            mtime: (stat.st_mtime, stat.st_mtime_nsec as i64),
            ctime: (stat.st_ctime, stat.st_ctime_nsec as i64),
        }
    }
}

#[cfg(test)]
mod tests {
    use std::fs;
    use std::os::unix::fs::{PermissionsExt, symlink};

    use super::*;

    fn workspace() -> (tempfile::TempDir, Workspace) {
        let dir = tempfile::tempdir().expect("a folder");
        let view = File::open(dir.path()).expect("it is there");
        (dir, Workspace::new(view.into()))
    }

    fn source(text: &str) -> File {
        use std::io::{Seek, Write};
        let mut file = tempfile::tempfile().expect("a file");
        file.write_all(text.as_bytes()).expect("room");
        file.rewind().expect("a file");
        file
    }

    #[test]
    fn a_look_sees_regular_files_and_empty_folders_and_nothing_else() {
        let (dir, workspace) = workspace();
        let at = |name: &str| dir.path().join(name);
        fs::create_dir_all(at("out/deep")).unwrap();
        fs::create_dir_all(at("empty")).unwrap();
        fs::write(at("a.txt"), "a").unwrap();
        fs::write(at("out/deep/b.txt"), "bb").unwrap();
        symlink("/etc/passwd", at("link")).unwrap();
        symlink("out", at("folder-link")).unwrap();
        rustix::fs::mknodat(rustix::fs::CWD, at("fifo"), FileType::Fifo, Mode::from_bits_truncate(0o600), 0)
            .unwrap();
        let content = workspace.look().unwrap();
        let names: Vec<_> = content.files.keys().map(|path| path.to_str().unwrap()).collect();
        assert_eq!(names, ["a.txt", "out/deep/b.txt"]);
        assert_eq!(content.empty_folders, [PathBuf::from("empty")]);
        assert!(workspace.open(Path::new("link")).is_err());
        assert!(workspace.open(Path::new("folder-link/deep/b.txt")).is_err());
        assert!(workspace.open(Path::new("fifo")).is_err());
        assert!(workspace.open(Path::new("../a.txt")).is_err());
        assert!(workspace.open(Path::new("out/deep/b.txt")).is_ok(), "control");
    }

    #[test]
    fn what_lies_too_deep_is_not_seen() {
        let (dir, workspace) = workspace();
        let levels = |count: usize| PathBuf::from(vec!["d"; count].join("/"));
        for count in [DEPTH_MAX - 1, DEPTH_MAX] {
            fs::create_dir_all(dir.path().join(levels(count))).unwrap();
            fs::write(dir.path().join(levels(count)).join("f"), "x").unwrap();
        }
        let content = workspace.look().unwrap();
        let seen: Vec<_> = content.files.keys().map(|path| path.components().count()).collect();
        assert_eq!(seen, [DEPTH_MAX]);
    }

    #[test]
    fn files_are_put_beside_a_link_and_never_through_it() {
        let (dir, workspace) = workspace();
        let outside = tempfile::tempdir().unwrap();
        let target = outside.path().join("target");
        fs::write(&target, "untouched").unwrap();
        symlink(&target, dir.path().join("in.txt")).unwrap();
        symlink(outside.path(), dir.path().join("folder")).unwrap();
        workspace.put(Path::new("in.txt"), source("one"), false).unwrap();
        workspace.put(Path::new("folder/in.txt"), source("two"), true).unwrap();
        assert_eq!(fs::read_to_string(&target).unwrap(), "untouched");
        assert_eq!(fs::read_dir(outside.path()).unwrap().count(), 1);
        assert_eq!(fs::read_to_string(dir.path().join("in.txt")).unwrap(), "one");
        let placed = dir.path().join("folder/in.txt");
        assert_eq!(fs::read_to_string(&placed).unwrap(), "two");
        assert_eq!(fs::metadata(&placed).unwrap().permissions().mode() & 0o777, 0o444);
        for name in ["../out", "/etc/x", "a/../../b", ""] {
            assert!(workspace.put(Path::new(name), source("x"), false).is_err(), "{name}");
        }
    }

    /// Every entry with its mode and its text or target.
    fn tree(dir: &Path) -> BTreeMap<PathBuf, (u32, String)> {
        let mut found = BTreeMap::new();
        let mut folders = vec![dir.to_owned()];
        while let Some(folder) = folders.pop() {
            for entry in fs::read_dir(folder).unwrap() {
                let path = entry.unwrap().path();
                let metadata = fs::symlink_metadata(&path).unwrap();
                let text = match () {
                    () if metadata.is_symlink() => fs::read_link(&path).unwrap().display().to_string(),
                    () if metadata.is_dir() => String::new(),
                    () => fs::read_to_string(&path).unwrap(),
                };
                if metadata.is_dir() {
                    folders.push(path.clone());
                }
                found.insert(path, (metadata.permissions().mode(), text));
            }
        }
        found
    }

    #[test]
    fn files_are_laid_together_or_all_is_as_it_was() {
        let (dir, workspace) = workspace();
        let at = |name: &str| dir.path().join(name);
        fs::write(at("old.txt"), "old").unwrap();
        fs::write(at("file"), "where a folder is to be").unwrap();
        symlink("/etc/passwd", at("link")).unwrap();
        fs::create_dir_all(at("empty")).unwrap();
        fs::create_dir_all(at("zz/full")).unwrap();
        let before = tree(dir.path());
        let names = ["empty", "file/in.txt", "link", "new/deep/in.txt", "old.txt", "zz/full"];
        let lay = |last: &str| {
            let mut laying = workspace.laying();
            for name in names {
                laying.add(Path::new(name), source(name), name == "link")?;
            }
            laying.add(Path::new(last), source(last), false)?;
            laying.finish()
        };
        // The last but one has found its place, and the last one finds none.
        for last in ["zz/full/x", "a/../b"] {
            assert!(lay(last).is_err(), "{last}");
            assert_eq!(tree(dir.path()), before, "{last}");
        }
        // One that is given up.
        let mut laying = workspace.laying();
        laying.add(Path::new("old.txt"), source("new"), false).unwrap();
        drop(laying);
        assert_eq!(tree(dir.path()), before);
        lay("last").expect("control: there is room for all");
        for name in names.into_iter().chain(["last"]) {
            assert_eq!(fs::read_to_string(at(name)).unwrap(), name);
        }
        let count = tree(dir.path()).len();
        assert_eq!(count, 11, "seven files, four folders and nothing of ours: {:?}", tree(dir.path()));
    }

    #[test]
    fn what_is_on_its_way_is_no_content_and_goes_when_a_kill_has_left_it() {
        let (dir, workspace) = workspace();
        fs::write(dir.path().join("old.txt"), "old").unwrap();
        let before = workspace.look().unwrap();
        let mut laying = workspace.laying();
        laying.add(Path::new("old.txt"), source("new"), false).unwrap();
        laying.add(Path::new("sub/new.txt"), source("new"), false).unwrap();
        std::mem::forget(laying);
        let left = workspace.look().unwrap();
        assert_eq!((&left.files, left.on_the_way.len()), (&before.files, 2));
        fs::write(dir.path().join(".caisson-mine"), "a guest's").unwrap();
        let cleared = workspace.look_and_clear().unwrap();
        assert_eq!((cleared.files.len(), cleared.on_the_way.len()), (2, 0));
        assert!(!workspace.clear(), "there is nothing any more");
        assert_eq!(tree(dir.path()).len(), 3, "two files and a folder: {:?}", tree(dir.path()));
    }

    #[test]
    fn a_file_that_lies_there_already_is_not_written_anew() {
        use std::os::unix::fs::MetadataExt;
        let (dir, workspace) = workspace();
        let path = Path::new("in.txt");
        let inode = || fs::metadata(dir.path().join(path)).unwrap().ino();
        workspace.put(path, source("same"), false).unwrap();
        let first = inode();
        workspace.put(path, source("same"), false).unwrap();
        assert_eq!(inode(), first);
        for (text, read_only) in [("same", true), ("diff", true), ("longer", true)] {
            let last = inode();
            workspace.put(path, source(text), read_only).unwrap();
            assert_ne!(inode(), last, "{text}");
            assert_eq!(fs::read_to_string(dir.path().join(path)).unwrap(), text);
        }
    }

    #[test]
    fn a_file_with_holes_is_put_with_holes() {
        use std::os::unix::fs::MetadataExt;
        const SIZE: u64 = 64 << 20;
        let (dir, workspace) = workspace();
        let source = tempfile::tempfile().unwrap();
        source.set_len(SIZE + 5).unwrap();
        source.write_all_at(b"here", 8 << 20).unwrap();
        source.write_all_at(b"x", SIZE + 1).unwrap();
        workspace.put(Path::new("sparse"), source.try_clone().unwrap(), false).unwrap();
        let placed = dir.path().join("sparse");
        assert_eq!(fs::metadata(&placed).unwrap().len(), SIZE + 5);
        assert!(fs::metadata(&placed).unwrap().blocks() * 512 < 1 << 20);
        let (mut one, mut other) = (Vec::new(), Vec::new());
        let mut source = source;
        std::io::Seek::rewind(&mut source).unwrap();
        source.read_to_end(&mut one).unwrap();
        File::open(&placed).unwrap().read_to_end(&mut other).unwrap();
        assert!(one == other);
    }

    #[test]
    fn a_rewritten_file_has_another_stamp() {
        let (dir, workspace) = workspace();
        fs::write(dir.path().join("a"), "one").unwrap();
        let before = workspace.look().unwrap();
        assert_eq!(workspace.look().unwrap(), before);
        std::thread::sleep(std::time::Duration::from_millis(20));
        fs::write(dir.path().join("a"), "two").unwrap();
        assert_ne!(workspace.look().unwrap().files, before.files);
        workspace.remove(Path::new("a")).unwrap();
        workspace.remove(Path::new("a")).unwrap();
        assert!(workspace.look().unwrap().files.is_empty());
    }
}
