//! What is kept of a stream: its newest bytes, at their offsets in all that was ever produced.
#![forbid(unsafe_code)]

/// Most bytes kept of one stream, and how many are left when there would be more.
pub(super) const RETAINED_BYTES_MAX: usize = 10 * 1024 * 1024;
pub(super) const RETAINED_BYTES_CUT: usize = 5 * 1024 * 1024;

/// The end of a stream.
#[derive(Debug, Default)]
pub(super) struct Retained {
    bytes: Vec<u8>,
    /// Offset of the first byte that is still there.
    start: u64,
}

/// A part of a stream.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Part {
    pub bytes: Vec<u8>,
    /// Where it begins, in bytes produced.
    pub start: u64,
    /// Where the next part begins.
    pub end: u64,
    /// What was asked for had been given up in part.
    pub gap: bool,
}

impl Retained {
    /// Takes what was produced. Returns by how much less or more is kept now.
    pub(super) fn push(&mut self, bytes: &[u8]) -> isize {
        let before = self.bytes.len();
        if before + bytes.len() > RETAINED_BYTES_MAX {
            self.cut_to(RETAINED_BYTES_CUT.saturating_sub(bytes.len()));
        }
        // Doubling would reserve twice of what may ever be kept.
        if self.bytes.capacity() - self.bytes.len() < bytes.len() {
            let wanted = (self.bytes.len() + bytes.len()).next_power_of_two().min(RETAINED_BYTES_MAX);
            self.bytes.reserve_exact(wanted.saturating_sub(self.bytes.len()).max(bytes.len()));
        }
        self.bytes.extend_from_slice(bytes);
        self.bytes.len().cast_signed() - before.cast_signed()
    }

    /// Gives up all but the newest `kept` bytes. Returns how many that were.
    pub(super) fn cut_to(&mut self, kept: usize) -> usize {
        let given_up = self.bytes.len().saturating_sub(kept);
        self.bytes.drain(..given_up);
        self.start += given_up as u64;
        given_up
    }

    /// Gives memory back that nothing more will be put into.
    pub(super) fn shrink(&mut self) {
        self.bytes.shrink_to_fit();
    }

    pub(super) fn len(&self) -> usize {
        self.bytes.len()
    }

    /// Bytes produced so far.
    pub(super) fn end(&self) -> u64 {
        self.start + self.bytes.len() as u64
    }

    /// What was produced from `offset` on, at most `bytes_max` of it. A character that is not whole yet waits for
    /// the next part, unless nothing `more` will come.
    pub(super) fn since(&self, offset: u64, bytes_max: usize, more: bool) -> Part {
        let start = offset.clamp(self.start, self.end());
        let rest = &self.bytes[(start - self.start) as usize..];
        let is_cut = rest.len() > bytes_max;
        let mut part = &rest[..rest.len().min(bytes_max)];
        if more || is_cut {
            part = &part[..whole_characters(part)];
        }
        Part { bytes: part.to_vec(), start, end: start + part.len() as u64, gap: offset < self.start }
    }
}

impl Part {
    /// As text: what is no UTF-8 is replaced.
    pub fn text(&self) -> String {
        String::from_utf8_lossy(&self.bytes).into_owned()
    }
}

/// How many of these bytes do not end in the middle of a character.
fn whole_characters(bytes: &[u8]) -> usize {
    let tail = bytes.len().saturating_sub(3);
    match bytes[tail..].iter().rposition(|byte| byte & 0xc0 != 0x80) {
        None => bytes.len(),
        Some(at) => {
            let first = bytes[tail + at];
            let length = match first {
                0xc2..=0xdf => 2,
                0xe0..=0xef => 3,
                0xf0..=0xf4 => 4,
                _ => 1,
            };
            if tail + at + length > bytes.len() { tail + at } else { bytes.len() }
        }
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    #[test]
    fn the_newest_bytes_stay_and_offsets_go_on() {
        let mut stream = Retained::default();
        let piece = vec![b'x'; 1024 * 1024];
        let mut kept = 0_isize;
        for _ in 0..40 {
            kept += stream.push(&piece);
            assert!(stream.len() <= RETAINED_BYTES_MAX && stream.bytes.capacity() <= RETAINED_BYTES_MAX);
        }
        kept += stream.push(b"end");
        assert_eq!(kept, stream.len().cast_signed());
        assert_eq!(stream.end(), 40 * 1024 * 1024 + 3);
        let part = stream.since(0, usize::MAX, false);
        assert!(part.gap && part.bytes.ends_with(b"xend") && part.bytes.len() == stream.len());
        assert_eq!((part.start, part.end), (stream.start, stream.end()));
        assert_eq!(stream.since(stream.end() - 3, usize::MAX, true).text(), "end");
        assert_eq!(stream.since(u64::MAX, 10, true).bytes, b"");
    }

    #[test]
    fn a_character_is_not_torn_while_more_may_come() {
        let mut stream = Retained::default();
        let euro = "€".as_bytes();
        stream.push(b"a");
        stream.push(&euro[..2]);
        let part = stream.since(0, usize::MAX, true);
        assert_eq!((part.text().as_str(), part.end), ("a", 1));
        stream.push(&euro[2..]);
        assert_eq!(stream.since(part.end, usize::MAX, true).text(), "€");
        assert_eq!(stream.since(0, 3, true).text(), "a");
        stream.push(b"\xe2");
        assert_eq!(stream.since(4, usize::MAX, false).text(), "\u{fffd}");
    }

    proptest! {
        #[test]
        fn parts_put_together_are_the_stream(
            pieces in proptest::collection::vec(proptest::collection::vec(any::<u8>(), 0..20), 0..10),
            bytes_max in 4_usize..16,
        ) {
            let mut stream = Retained::default();
            for piece in &pieces {
                stream.push(piece);
            }
            let (mut whole, mut offset) = (Vec::new(), 0);
            loop {
                let part = stream.since(offset, bytes_max, false);
                prop_assert!(!part.gap);
                prop_assert_eq!(part.start, offset);
                if part.bytes.is_empty() {
                    break;
                }
                offset = part.end;
                whole.extend(part.bytes);
            }
            prop_assert_eq!(whole, pieces.concat());
        }
    }
}
