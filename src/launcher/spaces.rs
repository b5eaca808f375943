//! Spaces on disk: one sparse ext4 image each, in a folder only root can enter, loop-mounted in the
//! launcher's private mount namespace while a sandbox uses it.
//!
//! Where images cannot be mounted a space is a folder instead, bounded per file; its sum is looked at now and
//! then ([`Tally`]).
//!
//! The image bounds bytes and inodes hard. On disk its files belong to the ids seen inside (`sandbox`,
//! `nobody`), which the sandbox's own user namespace maps to the ids it leased: no process lives under the
//! ids on disk, nothing is chowned, and two sandboxes of one space have different live ids.
//!
//! Without user namespaces nothing maps ids: a space then leases a block for as long as it is open, its files
//! belong to that block, and all of its sandboxes live under it. A space that was last open in another way is
//! given to its new owners before anybody is in it.

use std::collections::HashMap;
use std::fs::{self, File, OpenOptions, Permissions};
use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::os::unix::fs::{MetadataExt, OpenOptionsExt, PermissionsExt, chown};
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

use nix::mount::{MntFlags, MsFlags, mount, umount2};
use rustix::mount::{OpenTreeFlags, open_tree};

use crate::launcher::leases::Leases;
use crate::launcher::plan::SpaceId;
use crate::launcher::tally::{Progress, Tally};
use crate::launcher::views::Views;
use crate::sys::loopdev;
use crate::sys::mount::{Attributes, set_attributes};

/// What a space may hold.
#[derive(Copy, Clone, Debug, serde::Serialize, serde::Deserialize)]
pub struct SpaceLimits {
    pub bytes: u64,
    pub inodes: u64,
}

/// How long an unused space stays mounted.
const LINGER: Duration = Duration::from_secs(60);
/// How long a transient space is there after its sandbox when nobody deletes it, and how many there may be.
const LINGER_TRANSIENT: Duration = Duration::from_secs(600);
const TRANSIENT_MAX: usize = 4096;
/// Between two looks at what the folders in use hold, and how much of one is looked at in a turn of the loop.
const TALLY_EVERY: Duration = Duration::from_secs(5);
const TALLY_ENTRIES: usize = 512;
/// How long the folder may be another launcher's.
const FOLDER_WAIT: Duration = Duration::from_secs(10);
/// What ext4 needs beside the files: inode tables, journal, group descriptors.
const OVERHEAD_BYTES: u64 = 20 * 1024 * 1024;
/// Megabytes of journal: a kill of the machine costs a replay, not the files.
const JOURNAL_MEGABYTES: u64 = 4;
/// Inodes that ext4 keeps for itself, and the directories we make.
const OVERHEAD_INODES: u64 = 16;
/// The directories of a space and where a sandbox sees them.
const PARTS: [(&str, u32); 3] = [("data", 0o755), ("tmp", 0o1777), ("home", 0o755)];
/// The launcher's own space, for its measurement at the start.
const OWN: SpaceId = SpaceId(0);

/// What a space is made of, and whose ids its files have.
#[derive(Clone, Debug)]
pub struct Footing {
    /// Images need loop devices and mounts.
    pub images: bool,
    pub owners: Owners,
    /// Ids of the accounts as seen inside, `sandbox` first.
    pub accounts: Vec<u32>,
}

/// Who owns the files of a space on disk.
#[derive(Copy, Clone, Debug, PartialEq, Eq)]
pub enum Owners {
    /// The ids seen inside: an id map translates.
    Inner,
    /// The space's own block of host ids.
    Block,
    /// The account we run under: it could not give them to anybody.
    Account,
}

/// All spaces of this daemon.
#[derive(Debug)]
pub struct Spaces {
    images: PathBuf,
    mounts: PathBuf,
    footing: Footing,
    limits: SpaceLimits,
    /// Most spaces that there may be, and how many there are. The launcher's own does not count.
    count_max: u64,
    count: u64,
    open: HashMap<SpaceId, Open>,
    /// Blocks of folders, open or not.
    kept: HashMap<SpaceId, u32>,
    /// Transient spaces lie in memory; else they are what other spaces are, and deleted when they are closed.
    memory: bool,
    views: Option<Views>,
    looking: Looking,
    /// Held for life: two launchers over one folder would mount the same images. One of each folder.
    _locks: Vec<File>,
}

/// What lies in the folder of spaces.
#[derive(Debug, Default)]
pub struct Found {
    /// Spaces of the kind that they are now.
    pub spaces: Vec<SpaceId>,
    /// Whatever else.
    pub others: usize,
}

impl Found {
    /// The highest number of those that stores come to; 0 where there is none.
    pub fn highest(&self) -> SpaceId {
        let given = self.spaces.iter().filter(|space| **space <= SpaceId::GIVEN_MAX);
        given.max().copied().unwrap_or(SpaceId(0))
    }
}

/// Where the look at folders is.
#[derive(Debug)]
struct Looking {
    next: Instant,
    /// Still to be looked at in this round.
    round: Vec<SpaceId>,
    current: Option<(SpaceId, Tally)>,
}

#[derive(Debug)]
struct Open {
    users: usize,
    idle_since: Instant,
    /// First id of the space's own block, where it has one.
    block: Option<u32>,
    /// The daemon has been given a view of it.
    viewed: bool,
}

impl Spaces {
    /// `dir` is the launcher's own folder (root, 0700); what lies in spaces is there too, or under an operator's.
    pub fn new(
        dir: &Path,
        under: Option<&Path>,
        limits: SpaceLimits,
        count_max: u64,
        footing: Footing,
    ) -> io::Result<Spaces> {
        let images = under.unwrap_or(dir).join("spaces");
        let mounts = dir.join("mounts");
        for folder in [&images, &mounts] {
            fs::create_dir_all(folder)?;
            fs::set_permissions(folder, Permissions::from_mode(0o700))?;
        }
        let mut locks = Vec::new();
        let second = under.map(|under| under.join("spaces.lock"));
        for lock in [Some(dir.join("lock")), second].into_iter().flatten() {
            let lock = OpenOptions::new().create(true).truncate(false).write(true).mode(0o600).open(lock)?;
            // A launcher that has lost its daemon needs a moment to end.
            lock_within(&lock, FOLDER_WAIT)?;
            locks.push(lock);
        }
        let looking = Looking { next: Instant::now(), round: Vec::new(), current: None };
        let mut spaces = Spaces {
            images,
            mounts,
            footing,
            limits,
            count_max,
            count: 0,
            open: HashMap::new(),
            kept: HashMap::new(),
            memory: false,
            views: None,
            looking,
            _locks: locks,
        };
        spaces.sweep()?;
        spaces.count = spaces.existing()?;
        Ok(spaces)
    }

    /// Stands on another footing from now on. No space may be open. Folders keep their block while nobody is in them
    /// as well: on the host their owner's id must be nobody else's.
    pub fn settle(&mut self, footing: Footing, leases: &mut Leases) -> io::Result<()> {
        assert!(self.open.is_empty(), "a space is open on the old footing");
        for (_, block) in self.kept.drain() {
            leases.free(block);
        }
        self.footing = footing;
        if self.footing.owners == Owners::Block && !self.footing.images {
            for space in self.there()?.spaces {
                let folder = self.folder(space);
                // The group may enter the folder: it is the one to be nobody else's.
                let ids = [fs::metadata(&folder)?.gid(), fs::metadata(folder.join(PARTS[0].0))?.uid()];
                let mut blocks = ids.into_iter().filter_map(|id| id.checked_sub(1));
                if let Some(block) = blocks.find_map(|block| leases.claim(block)) {
                    self.kept.insert(space, block);
                }
            }
        }
        Ok(())
    }

    /// What is there of spaces that somebody may own, and of whatever else.
    pub fn found(&self) -> io::Result<Found> {
        let Found { mut spaces, others } = self.there()?;
        spaces.retain(|space| *space != OWN);
        Ok(Found { spaces, others })
    }

    fn there(&self) -> io::Result<Found> {
        let mut found = Found::default();
        for entry in fs::read_dir(&self.images)? {
            let path = entry?.path();
            let number = path.file_stem().and_then(|name| u64::from_str_radix(name.to_str()?, 16).ok());
            // Nothing is a space but what would be opened as that.
            match number.map(SpaceId).filter(|space| self.place(*space) == path) {
                Some(space) => found.spaces.push(space),
                None => found.others += 1,
            }
        }
        Ok(found)
    }

    /// Mounts the space if need be and counts one more user. Returns the space's own block of ids, where it
    /// has one. An image that somebody still holds is [busy](is_busy): whoever asks may ask again.
    pub fn enter(&mut self, space: SpaceId, leases: &mut Leases) -> io::Result<Option<u32>> {
        if let Some(open) = self.open.get_mut(&space) {
            open.users += 1;
            return Ok(open.block);
        }
        if space.is_transient()
            && self.open.keys().filter(|open| open.is_transient()).count() >= TRANSIENT_MAX
        {
            return Err(io::Error::from(rustix::io::Errno::AGAIN));
        }
        if self.in_memory(space) {
            self.mount_memory(space)?;
        } else if !self.place(space).exists() {
            self.make(space)?;
        } else if self.footing.images {
            self.mount_image(&self.image(space), space)?;
        }
        // Open from here on: what fails below is unmounted like any other.
        self.open.insert(space, Open { users: 1, idle_since: Instant::now(), block: None, viewed: false });
        let owned = self.own(space, leases);
        if owned.is_err() {
            self.close(space, leases);
        }
        owned
    }

    /// Gives the files to those who are to own them, unless they do already.
    ///
    /// Two ids say how far that got: `data` belongs to whom everything belonged before, as it is given last, and the
    /// group of the space's root is who was to get it. What a start has broken off is finished by the next one for
    /// the same ids, or taken back before it is given to others.
    fn own(&mut self, space: SpaceId, leases: &mut Leases) -> io::Result<Option<u32>> {
        let root = self.root(space);
        let found = fs::metadata(root.join(PARTS[0].0))?.uid();
        let begun = Some(fs::metadata(&root)?.gid()).filter(|id| *id != 0).unwrap_or(found);
        let block = match self.footing.owners {
            Owners::Account => return Ok(None),
            Owners::Inner => None,
            Owners::Block => {
                let kept = self.kept.get(&space).copied();
                // The block it had last time, or was about to have, if that is ours and free.
                let mut claim = |id: u32| id.checked_sub(1).and_then(|block| leases.claim(block));
                let last = kept.or_else(|| claim(begun)).or_else(|| claim(found));
                let no_ids = || io::Error::from(rustix::io::Errno::AGAIN);
                let block = last.or_else(|| leases.block()).ok_or_else(no_ids)?;
                if !self.footing.images {
                    self.kept.insert(space, block);
                }
                Some(block)
            }
        };
        if let Some(open) = self.open.get_mut(&space) {
            open.block = block;
        }
        let accounts = &self.footing.accounts;
        // Ids of a block follow one another.
        let family_of = |first: u32| match accounts.first() {
            Some(sandbox) if *sandbox == first => accounts.clone(),
            _ => (first..).take(accounts.len()).collect::<Vec<u32>>(),
        };
        let wanted = block.map_or_else(|| accounts.clone(), |block| family_of(block + 1));
        if begun != found && begun != wanted[0] {
            hand_over(&root, &family_of(begun), &family_of(found))?;
        }
        if begun != wanted[0] {
            chown(&root, Some(0), Some(wanted[0]))?;
        }
        if block.is_some() && !self.footing.images {
            shut(&root, wanted[0])?;
        }
        if found != wanted[0] {
            tracing::info!(%space, from = found, to = wanted[0], "giving a space to other ids");
            hand_over(&root, &family_of(found), &wanted)?;
        }
        Ok(block)
    }

    /// Counts one user less.
    pub fn leave(&mut self, space: SpaceId) {
        if let Some(open) = self.open.get_mut(&space) {
            open.users = open.users.saturating_sub(1);
            open.idle_since = Instant::now();
        }
    }

    /// Gives the parts back the rights of their owner where a guest has taken them away, its own included: it could
    /// never start again to repair that. Nobody but us can put anything else in their place.
    pub fn mend(&self, space: SpaceId) -> io::Result<()> {
        for (part, mode) in PARTS {
            let part = self.root(space).join(part);
            if fs::metadata(&part)?.permissions().mode() & 0o700 != 0o700 {
                fs::set_permissions(&part, Permissions::from_mode(mode))?;
            }
        }
        Ok(())
    }

    /// Detached trees of the space's three parts, mapped by `id_map`.
    pub fn trees(&self, space: SpaceId, id_map: Option<BorrowedFd<'_>>) -> io::Result<[OwnedFd; 3]> {
        let [data, tmp, home] = PARTS.map(|(part, _)| self.tree(space, part, id_map));
        Ok([data?, tmp?, home?])
    }

    /// Unmounts what nobody has used for a while, and names it.
    pub fn close_idle(&mut self, now: Instant, leases: &mut Leases) -> Vec<SpaceId> {
        let due: Vec<SpaceId> = self
            .open
            .iter()
            .filter(|(space, open)| open.users == 0 && now >= open.idle_since + linger(**space))
            .map(|(space, _)| *space)
            .collect();
        for space in &due {
            self.close(*space, leases);
        }
        due
    }

    /// When the next space will have been idle for long enough.
    pub fn idle_at(&self) -> Option<Instant> {
        let idle = self.open.iter().filter(|(_, open)| open.users == 0);
        idle.map(|(space, open)| open.idle_since + linger(*space)).min()
    }

    /// When there is a folder to be looked at, or to be looked at further.
    pub fn tally_at(&self) -> Option<Instant> {
        let in_use = self.folders_in_use().next().is_some();
        (!self.footing.images && (in_use || self.looking.current.is_some())).then_some(self.looking.next)
    }

    /// Looks a little further at the folders in use. Names one that holds more than it may.
    pub fn tally(&mut self, now: Instant) -> Option<SpaceId> {
        if self.tally_at().is_none_or(|at| now < at) {
            return None;
        }
        let Some((space, mut tally)) = self.looking.current.take() else {
            if self.looking.round.is_empty() {
                self.looking.round = self.folders_in_use().collect();
            }
            let space = self.looking.round.pop()?;
            match Tally::start(&self.folder(space), self.limits) {
                Ok(tally) => self.looking.current = Some((space, tally)),
                Err(error) => {
                    tracing::warn!(%space, %error, "folder of a space not looked at");
                    self.looking.next = now + TALLY_EVERY;
                }
            }
            return None;
        };
        let progress = tally.go_on(TALLY_ENTRIES);
        if progress == Progress::Going {
            self.looking.current = Some((space, tally));
            return None;
        }
        if self.looking.round.is_empty() {
            self.looking.next = now + TALLY_EVERY;
        }
        let Progress::Over(used) = progress else { return None };
        let (bytes, inodes) = (self.limits.bytes, self.limits.inodes);
        tracing::warn!(%space, ?used, bytes, inodes, "a space holds more than it may; its sandboxes end");
        Some(space)
    }

    /// Deletes an unused space and its files.
    pub fn delete(&mut self, space: SpaceId, leases: &mut Leases) -> io::Result<()> {
        if self.open.get(&space).is_some_and(|open| open.users > 0) {
            return Err(busy());
        }
        self.close(space, leases);
        if space.is_transient() {
            return Ok(());
        }
        let place = self.place(space);
        let removed = if self.footing.images { fs::remove_file(place) } else { fs::remove_dir_all(place) };
        match removed {
            Ok(()) => {
                if let Some(block) = self.kept.remove(&space) {
                    leases.free(block);
                }
                self.count = self.count.saturating_sub(u64::from(space != OWN));
                Ok(())
            }
            Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(()),
            Err(error) => Err(error),
        }
    }

    /// Unmounts everything: the end of the launcher.
    pub fn close_all(&mut self, leases: &mut Leases) {
        let open: Vec<SpaceId> = self.open.keys().copied().collect();
        for space in open {
            self.close(space, leases);
        }
    }

    /// Number of mounted spaces.
    pub fn open_count(&self) -> usize {
        self.open.len()
    }

    fn image(&self, space: SpaceId) -> PathBuf {
        self.images.join(format!("{:016x}.img", space.0))
    }

    fn folder(&self, space: SpaceId) -> PathBuf {
        self.images.join(format!("{:016x}", space.0))
    }

    /// What a space is on disk.
    fn place(&self, space: SpaceId) -> PathBuf {
        if self.footing.images { self.image(space) } else { self.folder(space) }
    }

    /// Makes the space; one that is an image is mounted then. Whoever speaks for the daemon may name any number: how
    /// many become files is bounded here.
    fn make(&mut self, space: SpaceId) -> io::Result<()> {
        let counts = space != OWN && !space.is_transient();
        if counts && self.count >= self.count_max {
            let problem = format!("{} spaces exist, no more are made (limits.spaces_max)", self.count);
            return Err(io::Error::new(io::ErrorKind::QuotaExceeded, problem));
        }
        if self.footing.images {
            self.format(space)?
        } else {
            self.make_folder(space)?
        }
        self.count += u64::from(counts);
        Ok(())
    }

    /// Spaces that are there. After the sweep nothing else is in that folder.
    fn existing(&self) -> io::Result<u64> {
        let own = self.folder(OWN);
        let mut count = 0;
        for entry in fs::read_dir(&self.images)? {
            // An image or a folder: what a space is made of may be another thing than at the last start.
            count += u64::from(entry?.path().with_extension("") != own);
        }
        Ok(count)
    }

    /// The parts of a space that is a folder. Made under a temporary name; the rename makes it a space.
    fn make_folder(&self, space: SpaceId) -> io::Result<()> {
        let folder = self.folder(space);
        let temporary = folder.with_extension("new");
        fs::create_dir_all(&temporary)?;
        for (part, mode) in PARTS {
            let dir = temporary.join(part);
            fs::create_dir_all(&dir)?;
            self.give_part(&dir)?;
            fs::set_permissions(&dir, Permissions::from_mode(mode))?;
        }
        fs::rename(&temporary, &folder)
    }

    fn point(&self, space: SpaceId) -> PathBuf {
        self.mounts.join(format!("{:016x}", space.0))
    }

    /// The folders that spaces lie in.
    pub fn folders(&self) -> [&Path; 2] {
        [&self.images, &self.mounts]
    }

    /// `data`, `tmp` and `home` of an open space, on the host.
    pub fn parts(&self, space: SpaceId) -> [PathBuf; 3] {
        let root = self.root(space);
        PARTS.map(|(part, _)| root.join(part))
    }

    /// Where the parts of an open space lie.
    fn root(&self, space: SpaceId) -> PathBuf {
        if self.is_mounted(space) { self.point(space) } else { self.folder(space) }
    }

    fn in_memory(&self, space: SpaceId) -> bool {
        space.is_transient() && self.memory
    }

    fn is_mounted(&self, space: SpaceId) -> bool {
        self.footing.images || self.in_memory(space)
    }

    /// Spaces in use whose sum no file system bounds.
    fn folders_in_use(&self) -> impl Iterator<Item = SpaceId> + '_ {
        let open = self.open.iter().filter(|(space, open)| open.users > 0 && !self.is_mounted(**space));
        open.map(|(space, _)| *space)
    }

    /// From now on the daemon can be given views, and transient spaces lie in memory where mounts can be made and the
    /// file system in memory takes the id map that the footing needs.
    pub fn furnish(&mut self, views: Option<Views>, mounts: bool) {
        let maps = views.as_ref().and_then(Views::map);
        self.memory = mounts
            && match self.footing.owners {
                Owners::Account | Owners::Block => true,
                Owners::Inner => maps.is_some_and(|map| self.memory_maps(map).is_ok()),
            };
        self.views = views;
    }

    /// Tries an id map on a file system in memory.
    fn memory_maps(&self, map: BorrowedFd<'_>) -> io::Result<()> {
        let space = SpaceId::transient(0);
        self.mount_memory(space)?;
        let tried = self.tree(space, PARTS[0].0, Some(map));
        self.unmount(space);
        tried.map(drop)
    }

    /// An empty file system in memory, as large as a space may be.
    fn mount_memory(&self, space: SpaceId) -> io::Result<()> {
        let point = self.point(space);
        match fs::create_dir(&point) {
            Err(error) if error.kind() != io::ErrorKind::AlreadyExists => return Err(error),
            _ => {}
        }
        let flags = MsFlags::MS_NOSUID | MsFlags::MS_NODEV | MsFlags::MS_NOATIME;
        let SpaceLimits { bytes, inodes } = self.limits;
        let options = format!("size={bytes},nr_inodes={},mode=0711", inodes + OVERHEAD_INODES);
        mount(Some("space"), &point, Some("tmpfs"), flags, Some(options.as_str()))?;
        // Its number does not come again: nobody else would take it down.
        self.fill(space).inspect_err(|_| self.unmount(space))
    }

    /// The workspace of an open space as the daemon may use it.
    pub fn view(&mut self, space: SpaceId) -> io::Result<OwnedFd> {
        let data = self.root(space).join(PARTS[0].0);
        let block = self.open.get(&space).and_then(|open| open.block);
        let views = self.views.as_ref().ok_or_else(|| io::Error::from(io::ErrorKind::Unsupported))?;
        let guest = match self.footing.owners {
            Owners::Block => block.map(|block| block + 1),
            Owners::Inner | Owners::Account => None,
        };
        let view = views.open(&data, &view_name(space), guest)?;
        if let Some(open) = self.open.get_mut(&space) {
            open.viewed = true;
        }
        Ok(view)
    }

    /// A crash may leave half-made images and empty mount points; mounts themselves died with the namespace.
    fn sweep(&self) -> io::Result<()> {
        for entry in fs::read_dir(&self.images)? {
            let path = entry?.path();
            let number = path.file_stem().and_then(|name| u64::from_str_radix(name.to_str()?, 16).ok());
            let transient = number.is_some_and(|number| SpaceId(number).is_transient());
            if transient || path.extension().is_some_and(|extension| extension == "new") {
                // Nobody's any more, or a space that never got its name.
                if path.is_dir() { fs::remove_dir_all(path)? } else { fs::remove_file(path)? }
            }
        }
        for entry in fs::read_dir(&self.mounts)? {
            fs::remove_dir(entry?.path())?;
        }
        Ok(())
    }

    /// Makes the image under a temporary name and mounts it; the rename makes it a space.
    fn format(&self, space: SpaceId) -> io::Result<()> {
        let image = self.image(space);
        let temporary = image.with_extension("new");
        let file = OpenOptions::new().write(true).create(true).truncate(true).mode(0o600).open(&temporary)?;
        file.set_len(self.limits.bytes + OVERHEAD_BYTES)?;
        drop(file);
        let status = Command::new("/sbin/mke2fs")
            .args(["-q", "-F", "-t", "ext4", "-m", "0", "-b", "4096", "-I", "256"])
            .args(["-O", "^resize_inode", "-J", &format!("size={JOURNAL_MEGABYTES}")])
            .args(["-E", "nodiscard,lazy_itable_init=1,lazy_journal_init=1,root_owner=0:0"])
            .args(["-N", &(self.limits.inodes + OVERHEAD_INODES).to_string()])
            .arg(&temporary)
            .env_clear()
            .stdin(Stdio::null())
            .stdout(Stdio::null())
            .status()
            .map_err(|error| io::Error::new(error.kind(), format!("mke2fs: {error}")))?;
        if !status.success() {
            return Err(io::Error::other(format!("mke2fs ended with {status}")));
        }
        self.mount_image(&temporary, space)?;
        self.fill(space).and_then(|()| fs::rename(&temporary, &image)).inspect_err(|_| self.unmount(space))
    }

    /// The directories of a fresh space. No guest has been here: plain paths are safe.
    fn fill(&self, space: SpaceId) -> io::Result<()> {
        let root = self.point(space);
        fs::set_permissions(&root, Permissions::from_mode(0o711))?;
        for (part, mode) in PARTS {
            let dir = root.join(part);
            fs::create_dir(&dir)?;
            self.give_part(&dir)?;
            fs::set_permissions(&dir, Permissions::from_mode(mode))?;
        }
        match fs::remove_dir(root.join("lost+found")) {
            Err(error) if error.kind() != io::ErrorKind::NotFound => Err(error),
            _ => Ok(()),
        }
    }

    /// A part of a fresh space belongs to `sandbox` as seen inside, until it is opened.
    fn give_part(&self, dir: &Path) -> io::Result<()> {
        match self.footing.owners {
            Owners::Account => Ok(()),
            Owners::Inner | Owners::Block => {
                let id = self.footing.accounts.first().copied();
                chown(dir, id, id)
            }
        }
    }

    fn mount_image(&self, image: &Path, space: SpaceId) -> io::Result<()> {
        let file = File::options().read(true).write(true).custom_flags(0o400_000).open(image)?;
        // The loop device keeps this open file, and so the lock, until it is detached: an image whose last
        // mount is still dying, with a guest of a killed launcher, is not mounted a second time beside it. That is
        // not waited for here, where everybody would wait with it.
        lock(&file)?;
        let (device, path) = loopdev::attach(file.as_fd())?;
        let point = self.point(space);
        match fs::create_dir(&point) {
            Err(error) if error.kind() != io::ErrorKind::AlreadyExists => return Err(error),
            _ => {}
        }
        let flags = MsFlags::MS_NOSUID | MsFlags::MS_NODEV | MsFlags::MS_NOATIME;
        mount(Some(&path), &point, Some("ext4"), flags, Some("discard,errors=remount-ro"))?;
        // The mount keeps the device from here on.
        drop(device);
        Ok(())
    }

    /// Unmounts it, and gives back the block it had.
    fn close(&mut self, space: SpaceId, leases: &mut Leases) {
        let Some(open) = self.open.remove(&space) else { return };
        if let Some(block) = open.block.filter(|_| !self.kept.contains_key(&space)) {
            leases.free(block);
        }
        if let Some(views) = self.views.as_ref().filter(|_| open.viewed) {
            views.close(&view_name(space));
        }
        if self.is_mounted(space) {
            self.unmount(space);
        }
        if space.is_transient() && !self.in_memory(space) {
            let place = self.place(space);
            let removed =
                if self.footing.images { fs::remove_file(place) } else { fs::remove_dir_all(place) };
            if let Err(error) = removed {
                tracing::warn!(%space, %error, "transient space not removed");
            }
        }
    }

    fn unmount(&self, space: SpaceId) {
        let point = self.point(space);
        if let Err(error) = umount2(&point, MntFlags::MNT_DETACH) {
            tracing::warn!(%space, %error, "space not unmounted");
        }
        if let Err(error) = fs::remove_dir(&point) {
            tracing::warn!(%space, %error, "mount point not removed");
        }
    }

    fn tree(&self, space: SpaceId, part: &str, id_map: Option<BorrowedFd<'_>>) -> io::Result<OwnedFd> {
        let flags = OpenTreeFlags::OPEN_TREE_CLONE | OpenTreeFlags::OPEN_TREE_CLOEXEC;
        let tree = open_tree(rustix::fs::CWD, self.root(space).join(part), flags)?;
        let attributes = Attributes { no_suid: true, no_dev: true, id_map, ..Attributes::default() };
        set_attributes(tree.as_fd(), attributes)?;
        Ok(tree)
    }
}

fn linger(space: SpaceId) -> Duration {
    if space.is_transient() { LINGER_TRANSIENT } else { LINGER }
}

fn view_name(space: SpaceId) -> String {
    format!("{:016x}", space.0)
}

/// Lets nobody into a space's folder but its own `sandbox`, by group: what is not opened (names, modes, times) is not
/// Landlock's business.
fn shut(folder: &Path, sandbox: u32) -> io::Result<()> {
    chown(folder, Some(0), Some(sandbox))?;
    fs::set_permissions(folder, Permissions::from_mode(0o710))
}

/// Gives the files of each of some ids to another; what `sandbox` has of `data`, and that folder, last.
fn hand_over(root: &Path, from: &[u32], to: &[u32]) -> io::Result<()> {
    for (part, _) in PARTS.iter().rev() {
        for (from, to) in from.iter().zip(to).rev() {
            give(&root.join(part), *from, *to)?;
        }
    }
    Ok(())
}

/// Gives all files of one id to another, without following a link. A space has no process in it now, so nobody
/// changes the tree meanwhile.
fn give(root: &Path, from: u32, to: u32) -> io::Result<()> {
    let status = Command::new("/bin/chown")
        .args(["--recursive", "-P", "--no-dereference"])
        .arg(format!("--from={from}:{from}"))
        .arg(format!("{to}:{to}"))
        .arg(root)
        .env_clear()
        .stdin(Stdio::null())
        .stdout(Stdio::null())
        .status()
        .map_err(|error| io::Error::new(error.kind(), format!("chown: {error}")))?;
    if status.success() { Ok(()) } else { Err(io::Error::other(format!("chown ended with {status}"))) }
}

/// Takes the lock, or says that it is busy: somebody else has it.
fn lock(file: &File) -> io::Result<()> {
    file.try_lock().map_err(|error| match error {
        fs::TryLockError::WouldBlock => busy(),
        fs::TryLockError::Error(error) => error,
    })
}

/// The same, waiting a while for whoever has it. For the start, when there is nobody yet who would wait with us.
fn lock_within(file: &File, max: Duration) -> io::Result<()> {
    let deadline = Instant::now() + max;
    loop {
        match lock(file) {
            Err(error) if is_busy(&error) && Instant::now() < deadline => {
                std::thread::sleep(Duration::from_millis(10));
            }
            other => return other,
        }
    }
}

fn busy() -> io::Error {
    rustix::io::Errno::BUSY.into()
}

/// Whether it failed for somebody who will let go.
pub fn is_busy(error: &io::Error) -> bool {
    error.raw_os_error() == Some(rustix::io::Errno::BUSY.raw_os_error())
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::symlink;
    use std::sync::atomic::{AtomicBool, Ordering};

    use super::*;

    const SPACE: SpaceId = SpaceId(1);
    const ACCOUNTS: [u32; 2] = [1000, 65_534];

    fn is_root() -> bool {
        rustix::process::geteuid().is_root()
    }

    /// The owner and the group of a file, not of what it may lead to.
    fn ids(path: &Path) -> (u32, u32) {
        let metadata = fs::symlink_metadata(path).expect("it is there");
        (metadata.uid(), metadata.gid())
    }

    /// Spaces that are folders.
    fn folders(dir: &Path, owners: Owners) -> Spaces {
        let limits = SpaceLimits { bytes: 1 << 20, inodes: 100 };
        let footing = Footing { images: false, owners, accounts: ACCOUNTS.to_vec() };
        Spaces::new(dir, None, limits, 10, footing).expect("a directory of our own")
    }

    #[test]
    fn spaces_lie_under_an_operators_folder_and_one_launcher_has_it() {
        let [own, other, under] = [(); 3].map(|()| tempfile::tempdir().expect("a directory of our own"));
        let limits = SpaceLimits { bytes: 1 << 20, inodes: 100 };
        let open = |dir: &Path| {
            let footing = Footing { images: false, owners: Owners::Account, accounts: ACCOUNTS.to_vec() };
            Spaces::new(dir, Some(under.path()), limits, 10, footing)
        };
        let mut spaces = open(own.path()).expect("a directory of our own");
        spaces.make(SpaceId(7)).expect("a folder of our own");
        assert!(under.path().join("spaces").join(format!("{:016x}", 7)).is_dir());
        assert!(!own.path().join("spaces").exists());
        assert_eq!(open(other.path()).expect_err("a second launcher").kind(), io::ErrorKind::ResourceBusy);
        drop(spaces);
        assert_eq!(open(other.path()).expect("nobody has it").count, 1);
    }

    #[test]
    fn giving_changes_owner_and_group_at_once_and_the_folder_itself_last() {
        if !is_root() {
            return;
        }
        const FILES: usize = 3000;
        let dir = tempfile::tempdir().expect("a temporary directory");
        let root = dir.path().join("data");
        fs::create_dir(&root).expect("our own");
        let files: Vec<PathBuf> = (0..FILES).map(|n| root.join(n.to_string())).collect();
        for path in &files {
            fs::write(path, "x").expect("our own");
            chown(path, Some(70_001), Some(70_001)).expect("we are root");
        }
        chown(&root, Some(70_001), Some(70_001)).expect("we are root");
        let done = AtomicBool::new(false);
        let (given, watched) = std::thread::scope(|scope| {
            let watch = scope.spawn(|| {
                let mut seen = 0_usize;
                for path in files.iter().cycle() {
                    let is_given = ids(&root) == (70_002, 70_002);
                    let (uid, gid) = ids(path);
                    assert_eq!(uid, gid, "a file belongs to two accounts");
                    assert!(!is_given || uid == 70_002, "the folder was given before what is in it");
                    seen += usize::from(uid == 70_001);
                    if done.load(Ordering::Relaxed) {
                        break;
                    }
                }
                seen
            });
            let given = give(&root, 70_001, 70_002);
            done.store(true, Ordering::Relaxed);
            (given, watch.join().expect("nothing was seen that must not be"))
        });
        given.expect("we are root");
        assert!(watched > 0, "control: it was looked at before it was given");
        assert!(files.iter().chain([&root]).all(|path| ids(path) == (70_002, 70_002)));
    }

    #[test]
    fn giving_follows_no_link_and_takes_nobody_elses_files() {
        if !is_root() {
            return;
        }
        let dir = tempfile::tempdir().expect("a temporary directory");
        let (root, outside) = (dir.path().join("data"), dir.path().join("outside"));
        fs::create_dir(&root).expect("our own");
        for path in [&outside, &root.join("mine"), &root.join("theirs")] {
            fs::write(path, "x").expect("our own");
            chown(path, Some(70_001), Some(70_001)).expect("we are root");
        }
        chown(root.join("theirs"), Some(70_003), Some(70_003)).expect("we are root");
        symlink(&outside, root.join("link")).expect("our own");
        std::os::unix::fs::lchown(root.join("link"), Some(70_001), Some(70_001)).expect("we are root");
        give(&root, 70_001, 70_002).expect("we are root");
        assert_eq!(ids(&outside), (70_001, 70_001), "what a link leads to");
        assert_eq!(ids(&root.join("theirs")), (70_003, 70_003));
        for path in ["mine", "link"] {
            assert_eq!(ids(&root.join(path)), (70_002, 70_002), "{path}");
        }
    }

    #[test]
    fn a_space_that_was_given_in_part_is_given_whole_the_next_time() {
        if !is_root() {
            return;
        }
        let dir = tempfile::tempdir().expect("a temporary directory");
        let mut leases = Leases::single(0, dir.path()).expect("a directory of our own");
        let mut spaces = folders(dir.path(), Owners::Inner);
        assert_eq!(spaces.enter(SPACE, &mut leases).expect("it is made"), None);
        let [data, tmp, home] = spaces.parts(SPACE);
        let theirs = tmp.join("theirs");
        fs::write(&theirs, "x").expect("our own");
        chown(&theirs, Some(ACCOUNTS[1]), Some(ACCOUNTS[1])).expect("we are root");
        drop(spaces);
        // Half-way through it breaks off, each time for another block.
        let aside = dir.path().join("aside");
        for missing in [&home, &tmp, &home] {
            fs::rename(missing, &aside).expect("our own");
            let mut spaces = folders(dir.path(), Owners::Block);
            assert!(spaces.enter(SPACE, &mut leases).is_err());
            assert_eq!(ids(&data).0, ACCOUNTS[0], "it looks given, and is not");
            fs::rename(&aside, missing).expect("our own");
        }
        let mut spaces = folders(dir.path(), Owners::Block);
        let block = spaces.enter(SPACE, &mut leases).expect("all is there").expect("a block of its own");
        let whole = [&data, &home].map(|path| (path, block + 1)).into_iter().chain([(&theirs, block + 2)]);
        for (path, id) in whole {
            assert_eq!(ids(path), (id, id), "{}", path.display());
        }
    }
    #[test]
    fn a_block_that_a_space_was_about_to_have_is_given_to_no_other() {
        if !is_root() {
            return;
        }
        let dir = tempfile::tempdir().expect("a temporary directory");
        let mut leases = Leases::single(0, dir.path()).expect("a directory of our own");
        let mut spaces = folders(dir.path(), Owners::Inner);
        spaces.enter(SPACE, &mut leases).expect("it is made");
        let root = spaces.root(SPACE);
        drop(spaces);
        // As a launcher leaves it that is killed before the first file is given.
        let block = 1 << 20;
        chown(&root, Some(0), Some(block + 1)).expect("we are root");
        let mut spaces = folders(dir.path(), Owners::Block);
        let footing = spaces.footing.clone();
        spaces.settle(footing, &mut leases).expect("the folder can be read");
        assert_eq!(leases.claim(block), None, "another space could enter the folder");
        assert_eq!(spaces.enter(SPACE, &mut leases).expect("all is there"), Some(block));
        assert!(spaces.parts(SPACE).iter().all(|part| ids(part) == (block + 1, block + 1)));
    }
}
