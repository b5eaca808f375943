//! What an ended sandbox leaves to the next one of its space: its user namespace, with owner, id maps and the leased
//! block, and its network namespace.
//!
//! Making a network namespace and taking it down is a fifth of what a fresh sandbox costs. Only these two are
//! passed on, only within one space and for forks of the same zygote, and only when the kernel's own books say that
//! nothing is left in them. The user namespace must come along: a network namespace can be entered by its
//! owner's children alone.
#![forbid(unsafe_code)]

use std::collections::HashMap;
use std::fs::{self, File};
use std::io;
use std::os::fd::{AsFd, OwnedFd};

use nix::sched::{CloneFlags, setns};

use crate::launcher::plan::SpaceId;

/// Kept for each space and owner.
const HUSKS_MAX: usize = 4;

/// The two namespaces of a sandbox.
#[derive(Debug)]
pub struct Husk {
    /// First id of the leased block that the user namespace maps.
    pub block: u32,
    pub user: OwnedFd,
    pub net: OwnedFd,
}

/// All of them, by space and owner of the user namespace.
#[derive(Debug, Default)]
pub struct Husks {
    kept: HashMap<(SpaceId, u32), Vec<Husk>>,
}

impl Husk {
    /// Whether the kernel counts no socket in it any more, of whatever family, open or on its way out. Asked when no
    /// process is left inside; none can come but by us.
    fn is_empty(&self) -> io::Result<bool> {
        let own = File::open("/proc/self/ns/net")?;
        setns(self.net.as_fd(), CloneFlags::CLONE_NEWNET)?;
        let read = ["/proc/self/net/sockstat", "/proc/self/net/sockstat6"].map(fs::read_to_string);
        setns(own.as_fd(), CloneFlags::CLONE_NEWNET).expect("the launcher may return to its own namespace");
        let [of_all, of_v6] = read;
        let of_v6 = match of_v6 {
            // A kernel without IPv6 has no such file.
            Err(error) if error.kind() == io::ErrorKind::NotFound => String::new(),
            other => other?,
        };
        Ok(counts_nothing(&of_all?) && counts_nothing(&of_v6))
    }
}

/// `used`, `inuse` and `tw` are counted by namespace; `orphan`, `alloc` and `mem` are the whole machine's.
fn counts_nothing(sockstat: &str) -> bool {
    let numbers = sockstat.lines().flat_map(|line| {
        let words: Vec<&str> = line.split_whitespace().skip(1).collect();
        words
            .chunks(2)
            .map(|pair| (pair[0].to_owned(), pair.get(1).copied() == Some("0")))
            .collect::<Vec<_>>()
    });
    numbers.filter(|(name, _)| ["used", "inuse", "tw"].contains(&name.as_str())).all(|(_, zero)| zero)
}

impl Husks {
    /// Keeps what is as good as new. Else it is given back: its block is free, its namespaces end with it.
    pub fn keep(&mut self, space: SpaceId, owner: u32, husk: Husk) -> Option<Husk> {
        let kept = self.kept.entry((space, owner)).or_default();
        if kept.len() < HUSKS_MAX && matches!(husk.is_empty(), Ok(true)) {
            kept.push(husk);
            return None;
        }
        Some(husk)
    }

    /// One for the next sandbox of this space and owner.
    pub fn take(&mut self, space: SpaceId, owner: u32) -> Option<Husk> {
        self.kept.get_mut(&(space, owner))?.pop()
    }

    /// Lets go of those that `wanted` does not name; returns their blocks.
    pub fn retain(&mut self, wanted: impl Fn(SpaceId, u32) -> bool) -> Vec<u32> {
        let mut blocks = Vec::new();
        self.kept.retain(|(space, owner), husks| {
            let keeps = wanted(*space, *owner) && !husks.is_empty();
            if !keeps {
                blocks.extend(husks.iter().map(|husk| husk.block));
            }
            keeps
        });
        blocks
    }

    pub fn is_empty(&self) -> bool {
        self.kept.is_empty()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const EMPTY: &str = "sockets: used 0\nTCP: inuse 0 orphan 3 tw 0 alloc 9 mem 233\nUDP: inuse 0 mem 2\nRAW: inuse 0\nFRAG: inuse 0 memory 0\n";

    #[test]
    fn only_numbers_of_the_namespace_count() {
        assert!(counts_nothing(EMPTY) && counts_nothing(""));
        for (from, to) in
            [("used 0", "used 1"), ("tw 0", "tw 1"), ("UDP: inuse 0", "UDP: inuse 2"), ("used 0", "used")]
        {
            assert!(!counts_nothing(&EMPTY.replace(from, to)), "{to}");
        }
    }
}
