//! Host user ids: one range per living daemon, a block of sixteen per sandbox, one id per zygote process.
//!
//! Files of a space belong to ids of their own on disk (`docs/decisions/`), so a lease binds nothing but
//! living processes: it is returned when the sandbox's last process is reaped, and all leases end with the
//! launcher, whose end is every guest's end. What two daemons of one host must not share is the range: a lock
//! file per range, root-owned, held for life.
#![forbid(unsafe_code)]

use std::collections::HashSet;
use std::fs::{self, File, OpenOptions};
use std::io::{self, Write};
use std::os::unix::fs::{MetadataExt, OpenOptionsExt};
use std::path::Path;
use std::time::{Duration, Instant};

/// Ids in one sandbox's block: init, `sandbox`, further accounts.
pub const BLOCK_IDS: u32 = 16;
/// First id of the first range, clear of passwd, subuid and systemd ranges.
const FIRST_ID: u32 = 0x7000_0000;
/// Ids of one daemon: a million sandboxes pass before a block is seen again.
const RANGE_IDS: u32 = 1 << 24;
/// Daemons on one host that may run as root at once.
const RANGES_MAX: u32 = 15;
/// The first ids of a range belong to zygotes.
const ZYGOTE_IDS: u32 = 1 << 16;
/// How long a start waits for a free range.
const RANGE_WAIT: Duration = Duration::from_secs(10);
/// Where lock files lie.
pub const LOCK_DIR: &str = "/run/caisson";

/// This daemon's ids.
#[derive(Debug)]
pub struct Leases {
    first: u32,
    end: u32,
    next: u32,
    next_zygote: u32,
    live: HashSet<u32>,
    name: String,
    /// `None` where there are no ids to share out.
    lock: Option<File>,
}

/// A range of ids that no launcher has while this value lives.
#[derive(Debug)]
pub struct FreeRange {
    pub ids: std::ops::Range<u32>,
    _lock: File,
}

impl Leases {
    /// Takes the first free range. A launcher that has just been killed, or one that looks for what such a one left,
    /// may hold the last one for a moment.
    pub fn take() -> io::Result<Leases> {
        let deadline = Instant::now() + RANGE_WAIT;
        loop {
            match Leases::try_take()? {
                Some(leases) => return Ok(leases),
                None if Instant::now() < deadline => std::thread::sleep(Duration::from_millis(50)),
                None => {
                    let problem = format!("{RANGES_MAX} daemons hold all ranges of user ids in {LOCK_DIR}");
                    return Err(io::Error::other(problem));
                }
            }
        }
    }

    fn try_take() -> io::Result<Option<Leases>> {
        fs::create_dir_all(LOCK_DIR)?;
        for range in 0..RANGES_MAX {
            let path = Path::new(LOCK_DIR).join(format!("ids-{range}.lock"));
            let mut lock =
                OpenOptions::new().create(true).truncate(false).write(true).mode(0o600).open(&path)?;
            match lock.try_lock() {
                Ok(()) => {}
                Err(fs::TryLockError::WouldBlock) => continue,
                Err(fs::TryLockError::Error(error)) => return Err(error),
            }
            let (first, end) = place(range, &fs::read_to_string("/proc/self/uid_map")?)?;
            lock.set_len(0)?;
            writeln!(lock, "{first} {end}")?;
            let blocks = first + ZYGOTE_IDS.min((end - first) / 4);
            return Ok(Some(Leases {
                first,
                end,
                next: blocks,
                next_zygote: first,
                live: HashSet::new(),
                name: format!("caisson-{range}"),
                lock: Some(lock),
            }));
        }
        Ok(None)
    }

    /// For an ordinary account, whose sandboxes all have its own id: blocks are numbers that nobody maps.
    pub fn single(uid: u32, state_dir: &Path) -> io::Result<Leases> {
        let inode = fs::metadata(state_dir)?.ino();
        Ok(Leases {
            first: 0,
            end: u32::MAX / 2,
            next: BLOCK_IDS,
            next_zygote: 0,
            live: HashSet::new(),
            name: format!("caisson-{uid}-{inode:x}"),
            lock: None,
        })
    }

    /// A name that is unique among the living daemons of this host.
    pub fn name(&self) -> &str {
        &self.name
    }

    /// Ranges that no launcher holds and one once had, each locked while it is looked at.
    pub fn free_ranges() -> io::Result<impl Iterator<Item = FreeRange>> {
        let uid_map = fs::read_to_string("/proc/self/uid_map")?;
        Ok((0..RANGES_MAX).filter_map(move |range| {
            let path = Path::new(LOCK_DIR).join(format!("ids-{range}.lock"));
            let lock = OpenOptions::new().write(true).open(path).ok()?;
            lock.try_lock().ok()?;
            let (first, end) = place(range, &uid_map).ok()?;
            Some(FreeRange { ids: first..end, _lock: lock })
        }))
    }

    /// Ranges that a daemon of this host once had and none has now, each locked while it is held here: what
    /// such a daemon left behind under its number may go.
    pub fn abandoned(&self) -> impl Iterator<Item = (u32, File)> {
        // An ordinary account has no range, and may not look for others'.
        let ours = self.lock.is_some();
        let others = (0..RANGES_MAX).filter(move |range| ours && self.name != format!("caisson-{range}"));
        // One after the other: a daemon that starts at this moment finds the rest free.
        others.filter_map(|range| {
            let path = Path::new(LOCK_DIR).join(format!("ids-{range}.lock"));
            let lock = OpenOptions::new().write(true).open(path).ok()?;
            lock.try_lock().ok().map(|()| (range, lock))
        })
    }

    /// A block nobody living has; its first id.
    pub fn block(&mut self) -> Option<u32> {
        let start = self.blocks_start();
        let count = (self.end - start) / BLOCK_IDS;
        for _ in 0..count {
            let block = self.next;
            self.next += BLOCK_IDS;
            if self.next + BLOCK_IDS > self.end {
                self.next = start;
            }
            if self.live.insert(block) {
                return Some(block);
            }
        }
        None
    }

    /// Exactly this block, if it is one of ours and nobody living has it.
    pub fn claim(&mut self, block: u32) -> Option<u32> {
        let start = self.blocks_start();
        let ours =
            block >= start && block < self.end - BLOCK_IDS && (block - start).is_multiple_of(BLOCK_IDS);
        (ours && self.live.insert(block)).then_some(block)
    }

    /// Gives a block back.
    pub fn free(&mut self, block: u32) {
        self.live.remove(&block);
    }

    /// An id for one zygote process, used for nothing else.
    pub fn zygote(&mut self) -> u32 {
        if self.lock.is_none() {
            return 0;
        }
        let id = self.next_zygote;
        self.next_zygote += 1;
        if self.next_zygote >= self.blocks_start() {
            self.next_zygote = self.first;
        }
        id
    }

    /// Blocks in use.
    pub fn live(&self) -> usize {
        self.live.len()
    }

    fn blocks_start(&self) -> u32 {
        self.first + ZYGOTE_IDS.min((self.end - self.first) / 4)
    }
}

/// Where a range lies in the ids this process may use. A pod with a small map gets the upper half of its
/// largest extent, whole, as its only range.
fn place(range: u32, uid_map: &str) -> io::Result<(u32, u32)> {
    let extents: Vec<(u64, u64)> = uid_map
        .lines()
        .filter_map(|line| {
            let mut fields = line.split_whitespace().map(str::parse::<u64>);
            let (inside, _, length) = (fields.next()?.ok()?, fields.next()?, fields.next()?.ok()?);
            Some((inside, inside + length))
        })
        .collect();
    let first = u64::from(FIRST_ID) + u64::from(range) * u64::from(RANGE_IDS);
    let end = first + u64::from(RANGE_IDS);
    if extents.iter().any(|(from, to)| *from <= first && end <= *to) {
        return Ok((first as u32, end as u32));
    }
    let largest = extents.iter().max_by_key(|(from, to)| to - from);
    match largest {
        // 65534 and 65535 are nobody and the invalid id.
        Some((from, to)) if range == 0 && to - from >= 1024 => {
            let half = from + (to - from) / 2;
            Ok((half as u32, (*to).min(65_534).max(half + 256) as u32))
        }
        _ => Err(io::Error::other("too few user ids are mapped here to give each sandbox its own")),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_full_map_gives_high_ranges_that_do_not_overlap() {
        let full = "         0          0 4294967295\n";
        assert_eq!(place(0, full).unwrap(), (0x7000_0000, 0x7100_0000));
        assert_eq!(place(1, full).unwrap().0, 0x7100_0000);
    }

    #[test]
    fn a_pod_with_few_ids_uses_its_upper_half() {
        let pod = "0 100000 65536\n";
        assert_eq!(place(0, pod).unwrap(), (32_768, 65_534));
        assert!(place(1, pod).is_err());
        assert!(place(0, "0 1000 1\n").is_err());
    }
}
