//! Tells a watcher what a cell produces while it runs, in the order of arrival.
#![forbid(unsafe_code)]

use crate::engine::{Output, Piece, Stream, Watcher};
use crate::harness::capture::{Arrival, Capture, whole_chars};
use crate::harness::rich::Rich;

/// How far a watcher has been told.
#[derive(Debug)]
pub(super) struct Feed {
    watcher: Watcher,
    /// The arrival that is being told, and how many of its bytes have been.
    at: usize,
    told: usize,
    /// Bytes of each stream that have been taken, and the beginning of a character among them.
    taken: [usize; 2],
    unfinished: [Vec<u8>; 2],
    chars_left: usize,
}

impl Feed {
    pub(super) fn new(watcher: Watcher) -> Feed {
        let unfinished = [Vec::new(), Vec::new()];
        Feed { watcher, at: 0, told: 0, taken: [0; 2], unfinished, chars_left: Piece::CHARS_MAX }
    }

    /// How many bytes of each stream have been told.
    pub(super) fn told(&self) -> [usize; 2] {
        self.taken
    }

    /// Tells the text that has arrived since.
    pub(super) fn text(&mut self, capture: &Capture) {
        while let Some(arrival) = capture.arrivals().get(self.at) {
            if let Arrival::Text(stream, bytes) = *arrival {
                let index = usize::from(stream == Stream::Stderr);
                let from = self.taken[index];
                self.taken[index] += bytes - self.told;
                self.told = bytes;
                let fresh = &capture.kept_bytes(stream)[from..self.taken[index]];
                self.say(stream, index, fresh, false);
            }
            // The last one may still grow.
            if self.at + 1 == capture.arrivals().len() {
                return;
            }
            (self.at, self.told) = (self.at + 1, 0);
        }
    }

    /// Tells something published, after the text before it, as far as there is room.
    pub(super) fn rich(&mut self, rich: Rich, execution_count: u64) {
        let chars = rich.chars().max(Piece::CHARS_LEAST);
        let Some(left) = self.chars_left.checked_sub(chars) else { return };
        self.chars_left = left;
        let piece = match rich {
            Rich::Display { data, metadata, id } => {
                Piece::Output { output: Output::DisplayData { data, metadata }, display_id: id }
            }
            Rich::Update { data, metadata, id } => Piece::Update { display_id: id, data, metadata },
            Rich::Result { data, metadata } => {
                let output = Output::ExecuteResult { data, metadata, execution_count };
                Piece::Output { output, display_id: None }
            }
            Rich::Error(error) => Piece::Output { output: Output::Error(error), display_id: None },
            Rich::Clear { wait } => Piece::Clear { wait },
            Rich::Dropped => return,
        };
        self.send(piece);
    }

    /// The cell is over: what is left of its text, then what the daemon has added to its outputs.
    pub(super) fn finish(&mut self, capture: &Capture) {
        self.text(capture);
        for stream in [Stream::Stdout, Stream::Stderr] {
            self.say(stream, usize::from(stream == Stream::Stderr), &[], true);
        }
    }

    pub(super) fn outputs(&self, outputs: &[Output]) {
        for output in outputs {
            self.send(Piece::Output { output: output.clone(), display_id: None });
        }
    }

    fn say(&mut self, stream: Stream, index: usize, fresh: &[u8], last: bool) {
        let waiting = &mut self.unfinished[index];
        waiting.extend_from_slice(fresh);
        let whole = if last { waiting.len() } else { whole_chars(waiting) };
        if whole == 0 {
            return;
        }
        let text = String::from_utf8_lossy(&waiting[..whole]).into_owned();
        waiting.drain(..whole);
        self.send(Piece::Output { output: Output::Stream { name: stream, text }, display_id: None });
    }

    fn send(&self, piece: Piece) {
        // Nobody listens any more: the cell goes on.
        drop(self.watcher.send(piece));
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;
    use crate::engine::Bundle;

    #[test]
    fn what_a_watcher_is_told_is_bounded_though_updates_cost_the_cell_nothing() {
        let (watcher, mut pieces) = crate::engine::pieces();
        let mut feed = Feed::new(watcher);
        let data = Bundle::from_iter([("text/plain".to_owned(), json!("x".repeat(1_000_000)))]);
        let update = Rich::Update { data, metadata: Bundle::new(), id: "d".to_owned() };
        let chars = update.chars();
        (0..50).for_each(|_| feed.rich(update.clone(), 1));
        assert_eq!(std::iter::from_fn(|| pieces.try_recv()).count(), Piece::CHARS_MAX / chars);
        (0..1_000_000).for_each(|_| feed.rich(Rich::Clear { wait: true }, 1));
        let told = std::iter::from_fn(|| pieces.try_recv()).count();
        assert!(told <= chars / Piece::CHARS_LEAST, "one without content costs something too");
    }
}
