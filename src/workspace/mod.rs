//! A workspace as the daemon reads and fills it: by a view from the launcher, never by a path.
//!
//! Every name beneath is a guest's. Nothing is opened through a link, only regular files are read, and the walk keeps
//! its own stack, so that what a guest builds costs it nothing but its own entries.
#![forbid(unsafe_code)]

use std::collections::BTreeMap;
use std::ffi::{CStr, OsStr};
use std::fs::File;
use std::io::{self, Read};
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::FileExt;
use std::path::{Component, Path, PathBuf};

use rustix::fs::{AtFlags, Dir, FileType, Mode, OFlags, ResolveFlags};

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

/// What lies in a workspace: regular files by path, and folders with nothing in them.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Content {
    pub files: BTreeMap<PathBuf, Stamp>,
    pub empty_folders: Vec<PathBuf>,
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

    /// Copies a file to `path`, whose folders are made. What lies there is replaced, never written through. Blocks of
    /// zeros become holes: a file that fitted once fits again.
    pub fn put(&self, path: &Path, mut source: File, read_only: bool) -> io::Result<()> {
        let (folder, name) = self.prepare(path)?;
        self.clear(&folder, name)?;
        let flags = OFlags::WRONLY | OFlags::CREATE | OFlags::EXCL | OFlags::CLOEXEC | OFlags::NOFOLLOW;
        let made = rustix::fs::openat(&folder, name, flags, Mode::from_bits_truncate(0o644))?;
        let copied = copy_with_holes(&mut source, &File::from(made.try_clone()?));
        if let Err(error) = copied {
            rustix::fs::unlinkat(&folder, name, AtFlags::empty())?;
            return Err(error);
        }
        let mode = if read_only { 0o444 } else { 0o644 };
        Ok(rustix::fs::fchmod(&made, Mode::from_bits_truncate(mode))?)
    }

    /// Makes a folder and those above it.
    pub fn make_folder(&self, path: &Path) -> io::Result<()> {
        self.prepare(&path.join("x")).map(drop)
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

    /// The folder that `path` lies in, made with those above it where they are missing, and the last name.
    fn prepare<'a>(&self, path: &'a Path) -> io::Result<(OwnedFd, &'a OsStr)> {
        let invalid = || io::Error::from(io::ErrorKind::InvalidInput);
        let mut names = Vec::new();
        for component in path.components() {
            match component {
                Component::Normal(name) => names.push(name),
                _ => return Err(invalid()),
            }
        }
        let name = names.pop().ok_or_else(invalid)?;
        let mut folder = self.root.as_fd().try_clone_to_owned()?;
        for name in names {
            let next = match rustix::fs::openat(&folder, name, FOLDER, Mode::empty()) {
                Err(rustix::io::Errno::NOENT) => {
                    rustix::fs::mkdirat(&folder, name, Mode::from_bits_truncate(0o755))?;
                    rustix::fs::openat(&folder, name, FOLDER, Mode::empty())
                }
                // A file or a link where a folder is to be: the caller's file wins.
                Err(rustix::io::Errno::NOTDIR | rustix::io::Errno::LOOP) => {
                    rustix::fs::unlinkat(&folder, name, AtFlags::empty())?;
                    rustix::fs::mkdirat(&folder, name, Mode::from_bits_truncate(0o755))?;
                    rustix::fs::openat(&folder, name, FOLDER, Mode::empty())
                }
                opened => opened,
            };
            folder = next?;
        }
        Ok((folder, name))
    }

    /// Takes away what lies at a name, unless it is a folder with something in it.
    fn clear(&self, folder: &OwnedFd, name: &OsStr) -> io::Result<()> {
        match rustix::fs::unlinkat(folder, name, AtFlags::empty()) {
            Ok(()) | Err(rustix::io::Errno::NOENT) => Ok(()),
            Err(rustix::io::Errno::ISDIR) => Ok(rustix::fs::unlinkat(folder, name, AtFlags::REMOVEDIR)?),
            Err(error) => Err(error.into()),
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
