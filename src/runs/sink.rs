//! What a program writes to its two streams: kept up to a limit, and passed on as it comes.
#![forbid(unsafe_code)]

use crate::engine::{Output, Piece, Stream, Watcher};
use crate::harness::capture::whole_chars;

/// Both streams of one run.
#[derive(Debug)]
pub(super) struct Sink {
    bytes_max: usize,
    stdout: Kept,
    stderr: Kept,
    watcher: Option<Watcher>,
}

#[derive(Debug, Default)]
struct Kept {
    bytes: Vec<u8>,
    /// How much of it has been passed on.
    told: usize,
}

impl Sink {
    /// `bytes_max` of each stream.
    pub(super) fn new(bytes_max: usize, watcher: Option<Watcher>) -> Sink {
        Sink { bytes_max, stdout: Kept::default(), stderr: Kept::default(), watcher }
    }

    /// False when that was more than the stream may have; what fits is kept.
    pub(super) fn take(&mut self, stream: Stream, bytes: &[u8]) -> bool {
        let bytes_max = self.bytes_max;
        let kept = self.of(stream);
        let room = bytes_max.saturating_sub(kept.bytes.len());
        kept.bytes.extend_from_slice(&bytes[..bytes.len().min(room)]);
        self.tell(stream, false);
        bytes.len() <= room
    }

    /// Passes on what waited for the rest of a character.
    pub(super) fn flush(&mut self) {
        self.tell(Stream::Stdout, true);
        self.tell(Stream::Stderr, true);
    }

    /// Both as text: what is no UTF-8 is replaced.
    pub(super) fn into_texts(self) -> (String, String) {
        let text = |kept: Kept| String::from_utf8_lossy(&kept.bytes).into_owned();
        (text(self.stdout), text(self.stderr))
    }

    fn tell(&mut self, stream: Stream, whole: bool) {
        let Some(watcher) = self.watcher.clone() else { return };
        let kept = self.of(stream);
        let rest = &kept.bytes[kept.told..];
        let end = if whole { rest.len() } else { whole_chars(rest) };
        if end == 0 {
            return;
        }
        let text = String::from_utf8_lossy(&rest[..end]).into_owned();
        kept.told += end;
        // Whoever watched may have gone.
        let _ =
            watcher.send(Piece::Output { output: Output::Stream { name: stream, text }, display_id: None });
    }

    fn of(&mut self, stream: Stream) -> &mut Kept {
        match stream {
            Stream::Stdout => &mut self.stdout,
            Stream::Stderr => &mut self.stderr,
        }
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn told(pieces: &[&[u8]]) -> String {
        let (watcher, mut heard) = crate::engine::pieces();
        let mut sink = Sink::new(1000, Some(watcher));
        for piece in pieces {
            assert!(sink.take(Stream::Stdout, piece));
        }
        sink.flush();
        drop(sink);
        let mut text = String::new();
        while let Some(Piece::Output { output: Output::Stream { text: piece, .. }, .. }) = heard.try_recv() {
            text.push_str(&piece);
        }
        text
    }

    #[test]
    fn a_character_that_comes_in_two_pieces_is_passed_on_whole() {
        assert_eq!(told(&["é".as_bytes().split_at(1).0, "é".as_bytes().split_at(1).1]), "é");
        assert_eq!(told(&[b"a\xf0\x9f", b"\x8e\x89b"]), "a🎉b");
        assert_eq!(told(&[b"a\xff\xfeb"]), "a\u{fffd}\u{fffd}b");
        assert_eq!(told(&[b"a\xe2\x9c"]), "a\u{fffd}");
    }

    #[test]
    fn beyond_the_limit_the_stream_is_over_and_what_fits_is_kept() {
        let mut sink = Sink::new(4, None);
        assert!(sink.take(Stream::Stderr, b"1234"));
        assert!(sink.take(Stream::Stdout, b"ab"));
        assert!(!sink.take(Stream::Stdout, b"cde"));
        assert_eq!(sink.into_texts(), ("abcd".to_owned(), "1234".to_owned()));
    }

    proptest! {
        #[test]
        fn text_is_the_same_however_it_is_cut(text in "\\PC{0,20}", at in 0_usize..80) {
            let bytes = text.as_bytes();
            let (first, second) = bytes.split_at(at.min(bytes.len()));
            prop_assert_eq!(told(&[first, second]), text);
        }
    }
}
