//! How much a space holds that is a folder: no file system bounds it, so somebody has to look.
//!
//! A guest changes the tree while it is looked at and may make it as odd as it likes: no link is followed, no
//! folder is entered by a path, and the work comes in slices, between which the launcher does its own.
#![forbid(unsafe_code)]

use std::collections::HashSet;
use std::io;
use std::path::Path;

use rustix::fs::{AtFlags, CWD, Dir, FileType, Mode, OFlags};
use rustix::io::Errno;

use crate::launcher::spaces::SpaceLimits;

/// Folders within folders that are followed, each an open descriptor. A deeper tree counts as too large:
/// whatever lies below would not be counted.
const DEPTH_MAX: usize = 128;
const BLOCK_BYTES: u64 = 512;

/// What has been counted so far.
#[derive(Copy, Clone, Debug, Default, PartialEq, Eq)]
pub struct Usage {
    pub bytes: u64,
    pub inodes: u64,
}

/// How far a tally has come.
#[derive(Copy, Clone, Debug, PartialEq, Eq)]
pub enum Progress {
    Going,
    /// All of it was seen, and it is within its limits.
    Within(Usage),
    /// It holds at least so much.
    Over(Usage),
}

/// A look at one space, to be carried on in slices.
#[derive(Debug)]
pub struct Tally {
    limits: SpaceLimits,
    used: Usage,
    /// From the space's folder down to where we are.
    open: Vec<Dir>,
    /// Files with several names, which are counted once.
    linked: HashSet<(u64, u64)>,
}

impl Tally {
    pub fn start(space: &Path, limits: SpaceLimits) -> io::Result<Tally> {
        let top = Dir::new(rustix::fs::openat(CWD, space, FOLDER, Mode::empty())?)?;
        Ok(Tally { limits, used: Usage::default(), open: vec![top], linked: HashSet::new() })
    }

    /// Looks at up to `entries` more.
    pub fn go_on(&mut self, entries: usize) -> Progress {
        for _ in 0..entries {
            let Some(dir) = self.open.last_mut() else { return Progress::Within(self.used) };
            let entry = match dir.read() {
                Some(Ok(entry)) => entry,
                // At its end, or gone meanwhile.
                Some(Err(_)) | None => {
                    self.open.pop();
                    continue;
                }
            };
            let name = entry.file_name();
            if name == c"." || name == c".." {
                continue;
            }
            match self.count(name) {
                Ok(()) | Err(Errno::NOENT | Errno::NOTDIR | Errno::LOOP) => {}
                // A folder that cannot be looked into could hold anything.
                Err(_) => return Progress::Over(self.used),
            }
            let too_deep = self.open.len() > DEPTH_MAX;
            if too_deep || self.used.bytes > self.limits.bytes || self.used.inodes > self.limits.inodes {
                return Progress::Over(self.used);
            }
        }
        Progress::Going
    }

    fn count(&mut self, name: &std::ffi::CStr) -> Result<(), Errno> {
        let Some(dir) = self.open.last() else { return Ok(()) };
        let parent = dir.fd()?;
        let stat = rustix::fs::statat(parent, name, AtFlags::SYMLINK_NOFOLLOW)?;
        let is_folder = FileType::from_raw_mode(stat.st_mode) == FileType::Directory;
        if !is_folder && stat.st_nlink > 1 && !self.linked.insert((stat.st_dev, stat.st_ino)) {
            return Ok(());
        }
        self.used.inodes += 1;
        self.used.bytes = self.used.bytes.saturating_add(stat.st_blocks as u64 * BLOCK_BYTES);
        if is_folder {
            let below = Dir::new(rustix::fs::openat(parent, name, FOLDER, Mode::empty())?)?;
            self.open.push(below);
        }
        Ok(())
    }
}

const FOLDER: OFlags = OFlags::RDONLY
    .union(OFlags::DIRECTORY)
    .union(OFlags::NOFOLLOW)
    .union(OFlags::NONBLOCK)
    .union(OFlags::CLOEXEC);

#[cfg(test)]
mod tests {
    use std::fs;
    use std::os::unix::fs::symlink;

    use super::*;

    const ROOMY: SpaceLimits = SpaceLimits { bytes: 1 << 20, inodes: 200 };

    fn whole(tally: &mut Tally) -> Progress {
        loop {
            match tally.go_on(3) {
                Progress::Going => {}
                other => return other,
            }
        }
    }

    fn tally(dir: &Path, limits: SpaceLimits) -> Progress {
        whole(&mut Tally::start(dir, limits).expect("it is there"))
    }

    #[test]
    fn names_are_counted_and_links_are_neither_followed_nor_counted_twice() {
        let dir = tempfile::tempdir().expect("a folder");
        fs::create_dir_all(dir.path().join("a/b")).expect("made");
        fs::write(dir.path().join("a/b/file"), vec![1; 10_000]).expect("written");
        fs::hard_link(dir.path().join("a/b/file"), dir.path().join("again")).expect("linked");
        symlink("/usr", dir.path().join("out")).expect("linked");
        symlink(".", dir.path().join("round")).expect("linked");
        let Progress::Within(used) = tally(dir.path(), ROOMY) else { panic!("over") };
        assert_eq!(used.inodes, 5, "a, b, file, out, round");
        assert!((10_000..100_000).contains(&used.bytes), "{used:?}");
    }

    #[test]
    fn too_many_bytes_or_names_are_over() {
        let dir = tempfile::tempdir().expect("a folder");
        fs::write(dir.path().join("big"), vec![1; 300_000]).expect("written");
        assert!(matches!(tally(dir.path(), ROOMY), Progress::Within(_)), "control");
        let small = SpaceLimits { bytes: 200_000, ..ROOMY };
        assert!(matches!(tally(dir.path(), small), Progress::Over(used) if used.bytes > 200_000));
        for n in 0..10 {
            fs::write(dir.path().join(n.to_string()), "").expect("written");
        }
        let few = SpaceLimits { inodes: 10, ..ROOMY };
        assert!(matches!(tally(dir.path(), few), Progress::Over(Usage { inodes: 11, .. })));
    }

    #[test]
    fn a_file_with_a_hole_counts_for_what_it_takes() {
        let dir = tempfile::tempdir().expect("a folder");
        let file = fs::File::create(dir.path().join("sparse")).expect("made");
        file.set_len(1 << 40).expect("extended");
        assert!(matches!(tally(dir.path(), ROOMY), Progress::Within(used) if used.bytes < 100_000));
    }

    #[test]
    fn a_tree_that_is_too_deep_to_follow_is_over() {
        let dir = tempfile::tempdir().expect("a folder");
        let deep = |levels: usize| "d/".repeat(levels);
        fs::create_dir_all(dir.path().join(deep(DEPTH_MAX - 1))).expect("made");
        assert!(matches!(tally(dir.path(), ROOMY), Progress::Within(_)), "control");
        fs::create_dir_all(dir.path().join(deep(DEPTH_MAX + 1))).expect("made");
        assert!(matches!(tally(dir.path(), ROOMY), Progress::Over(_)));
    }

    #[test]
    fn a_tree_that_goes_away_under_it_is_no_error() {
        let dir = tempfile::tempdir().expect("a folder");
        for n in 0..50 {
            fs::create_dir_all(dir.path().join(format!("{n}/below"))).expect("made");
        }
        let mut tally = Tally::start(dir.path(), ROOMY).expect("it is there");
        assert_eq!(tally.go_on(20), Progress::Going);
        for n in 0..50 {
            fs::remove_dir_all(dir.path().join(n.to_string())).expect("removed");
        }
        assert!(matches!(whole(&mut tally), Progress::Within(_)));
    }
}
