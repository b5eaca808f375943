//! What an interpreter writes to its two standard streams, within bounds.
//!
//! Bytes are kept in arrival order up to the cell's cap and counted beyond it: a guest that prints a gigabyte
//! costs us the reading, not the memory. Text is made once, at the end, so that a character split over two
//! reads is whole again.
#![forbid(unsafe_code)]

use std::collections::{HashMap, VecDeque};
use std::io;
use std::os::fd::{AsFd, OwnedFd};

use tokio::net::unix::pipe;

use crate::engine::{Output, Stream};
use crate::harness::frame::At;
use crate::harness::rich::{Folded, Mark, Rich};
use crate::harness::{DISPLAY_NAMES_MAX, PUBLISHED_MAX};

/// Room made for one read of a stream, in bytes: what a pipe holds by default.
pub(super) const READ_BYTES: usize = 64 * 1024;
/// Room made for the first read: most cells print less.
pub(super) const FIRST_READ_BYTES: usize = 4 * 1024;
/// Most bytes taken from a stream once its cell is done: the largest pipe that an unprivileged guest can
/// make (`/proc/sys/fs/pipe-max-size`). Whatever else comes was written later, by a child that goes on.
pub(super) const DRAIN_BYTES_MAX: usize = 1024 * 1024;
/// Characters that still get through once a cell's cap is reached: its result, error and rich outputs.
pub(crate) const TAIL_CHARS_MAX: usize = 64 * 1024;
/// Reads of one draining: a pipe whose writes stay apart gives each by itself, and holds so many of them at most.
pub(super) const DRAIN_READS_MAX: usize = 256;
/// Outputs under one name that an update reaches.
const SHOWN_PER_NAME_MAX: usize = 16;
/// The latest reads of a stream, whose times are remembered.
const READS_MAX: usize = 64;
/// A character has at most this many bytes in UTF-8.
const CHAR_BYTES_MAX: usize = 4;

/// The reading end of one stream. Only a cell that takes its time has it in the reactor, so that a short cell
/// wakes us once, by its reply, and not by every print.
#[derive(Debug)]
pub(super) enum Tap {
    Quiet(OwnedFd),
    Watched(pipe::Receiver),
    /// The guest closed its end, or the pipe failed.
    Closed,
}

impl Tap {
    pub(super) fn watch(&mut self) {
        match std::mem::replace(self, Tap::Closed) {
            Tap::Quiet(descriptor) => match pipe::Receiver::from_owned_fd_unchecked(descriptor) {
                Ok(receiver) => *self = Tap::Watched(receiver),
                Err(error) => tracing::error!(%error, "failed to watch a stream of an interpreter"),
            },
            other => *self = other,
        }
    }

    pub(super) fn unwatch(&mut self) {
        match std::mem::replace(self, Tap::Closed) {
            Tap::Watched(receiver) => match receiver.into_nonblocking_fd() {
                Ok(descriptor) => *self = Tap::Quiet(descriptor),
                Err(error) => tracing::error!(%error, "failed to release a stream of an interpreter"),
            },
            other => *self = other,
        }
    }

    /// Resolves when a read would not block; never for a stream that is not watched.
    pub(super) async fn readable(&self) {
        match self {
            Tap::Watched(receiver) if receiver.readable().await.is_ok() => {}
            _ => std::future::pending().await,
        }
    }

    /// One read into the spare room of `buffer`. `None` when nothing is there now.
    pub(super) fn read(&mut self, buffer: &mut Vec<u8>, wake: Wake) -> Option<usize> {
        let result = match (&*self, wake) {
            (Tap::Closed, _) => return None,
            (Tap::Quiet(descriptor), _) => read_into(descriptor, buffer),
            (Tap::Watched(receiver), Wake::Reactor) => receiver.try_io(|| read_into(receiver, buffer)),
            (Tap::Watched(receiver), Wake::Reply) => read_into(receiver, buffer),
        };
        match result {
            Ok(0) => {
                *self = Tap::Closed;
                None
            }
            Ok(bytes) => Some(bytes),
            Err(error) if matches!(error.kind(), io::ErrorKind::WouldBlock | io::ErrorKind::Interrupted) => {
                None
            }
            Err(error) => {
                tracing::debug!(%error, "stream of an interpreter failed");
                *self = Tap::Closed;
                None
            }
        }
    }
}

/// What tells us to read.
#[derive(Copy, Clone, Debug, PartialEq, Eq)]
pub(super) enum Wake {
    /// The reactor, which wants to know when nothing is left.
    Reactor,
    /// A frame on the control pipe. The reactor may not have heard of the stream's bytes yet, and asked
    /// through it they would not be there.
    Reply,
}

fn read_into(pipe: impl AsFd, buffer: &mut Vec<u8>) -> io::Result<usize> {
    Ok(rustix::io::read(pipe, rustix::buffer::spare_capacity(buffer))?)
}

/// The bytes of one cell.
#[derive(Debug)]
pub(super) struct Capture {
    chars_max: usize,
    stream_bytes_max: usize,
    stdout: Kept,
    stderr: Kept,
    arrivals: Vec<Arrival>,
    chars_kept: usize,
    bytes_kept: usize,
    truncated: bool,
    /// Things published that were taken, and whether there were more.
    published: usize,
    too_many: bool,
    /// What may still arrive once the cap is reached, in characters.
    tail_chars_left: usize,
    /// The next output takes away those before it.
    clears_at_next: bool,
    /// Where in `arrivals` what is shown under a name stands.
    shown: HashMap<String, Vec<usize>>,
    /// Before here in `arrivals` nothing published is shown any more.
    cleared_to: usize,
}

/// What came, in the order it came.
#[derive(Debug)]
pub(super) enum Arrival {
    /// So many kept bytes of a stream.
    Text(Stream, usize),
    Rich(Mark),
}

/// What the interpreter says to have written or published, one entry after the other.
#[derive(Copy, Clone, Debug, PartialEq, Eq)]
pub(super) enum Told {
    /// So many bytes of a stream.
    Text(Stream, usize),
    /// So many things published.
    Rich(usize),
}

#[derive(Debug, Default)]
struct Kept {
    bytes: Vec<u8>,
    /// All bytes that came, kept or not.
    seen: usize,
    reads: VecDeque<Reading>,
    /// Bytes that had come before the first of `reads`.
    seen_before: usize,
}

/// When a stream was read, and how much had come by then.
#[derive(Debug)]
struct Reading {
    begun_ns: u64,
    ended_ns: u64,
    seen: usize,
}

impl Kept {
    fn note(&mut self, begun_ns: u64, bytes: usize) {
        self.seen = self.seen.saturating_add(bytes);
        if self.reads.len() == READS_MAX {
            self.seen_before = self.reads.pop_front().map_or(0, |reading| reading.seen);
        }
        self.reads.push_back(Reading { begun_ns, ended_ns: monotonic_ns(), seen: self.seen });
    }

    /// How much had been read at a moment between two times: at least, and at most.
    fn seen_at(&self, [from, until]: [u64; 2]) -> [usize; 2] {
        let last = |reading: Option<&Reading>| reading.map_or(self.seen_before, |reading| reading.seen);
        let least = last(self.reads.iter().rfind(|reading| reading.ended_ns <= from));
        let most = last(self.reads.iter().rfind(|reading| reading.begun_ns < until));
        [least, most.max(least)]
    }
}

/// The clock that an interpreter's own times are of.
pub(super) fn monotonic_ns() -> u64 {
    let now = rustix::time::clock_gettime(rustix::time::ClockId::Monotonic);
    u64::try_from(now.tv_sec).unwrap_or(0) * 1_000_000_000 + u64::try_from(now.tv_nsec).unwrap_or(0)
}

impl Capture {
    pub(super) fn new(chars_max: usize) -> Capture {
        Capture {
            chars_max,
            stream_bytes_max: usize::MAX,
            stdout: Kept::default(),
            stderr: Kept::default(),
            arrivals: Vec::new(),
            chars_kept: 0,
            bytes_kept: 0,
            truncated: false,
            published: 0,
            too_many: false,
            tail_chars_left: TAIL_CHARS_MAX,
            clears_at_next: false,
            shown: HashMap::new(),
            cleared_to: 0,
        }
    }

    /// From now on each stream has a limit of its own.
    pub(super) fn bound_streams(&mut self, bytes_max: Option<usize>) {
        self.stream_bytes_max = bytes_max.unwrap_or(usize::MAX);
    }

    /// The stream that went over its own limit.
    pub(super) fn over_limit(&self) -> Option<Stream> {
        let over = |kept: &Kept| kept.seen > self.stream_bytes_max;
        match (over(&self.stdout), over(&self.stderr)) {
            (true, _) => Some(Stream::Stdout),
            (_, true) => Some(Stream::Stderr),
            (false, false) => None,
        }
    }

    /// Reads `tap` once; returns how many bytes came.
    pub(super) fn read_once(&mut self, stream: Stream, tap: &mut Tap, wake: Wake) -> usize {
        let kept = self.kept(stream);
        let before = kept.bytes.len();
        kept.bytes.reserve(if before == 0 { FIRST_READ_BYTES } else { READ_BYTES });
        let begun_ns = monotonic_ns();
        let Some(bytes) = tap.read(&mut kept.bytes, wake) else { return 0 };
        kept.note(begun_ns, bytes);
        self.account(stream, before);
        bytes
    }

    /// Takes what is in the pipe now, without waiting, and returns how much that was. `expected` is what the
    /// interpreter says to have written in all: a pipe in packet mode gives less per read than it holds.
    pub(super) fn drain(&mut self, stream: Stream, tap: &mut Tap, expected: usize) -> usize {
        let mut drained = 0;
        for _ in 0..DRAIN_READS_MAX {
            let bytes = self.read_once(stream, tap, Wake::Reply);
            drained += bytes;
            // Less than there was room for: the pipe is empty, and asking once more would tell nothing new.
            let emptied = bytes < FIRST_READ_BYTES && self.kept(stream).seen >= expected;
            let enough = drained >= DRAIN_BYTES_MAX || self.over_limit().is_some();
            if bytes == 0 || emptied || enough {
                break;
            }
        }
        drained
    }

    /// Bytes of each stream that came, standard output's first.
    pub(super) fn seen(&self) -> [usize; 2] {
        [self.stdout.seen, self.stderr.seen]
    }

    /// How many bytes of each stream stand before something published: what had been read by then, and what lay in the
    /// pipe. Where a read fell into that very moment, the interpreter's own count tells, unless others write as well.
    pub(super) fn place(&self, at: At) -> [usize; 2] {
        [(0, &self.stdout), (1, &self.stderr)].map(|(stream, kept)| {
            let [least, most] = kept.seen_at(at.when).map(|seen| seen.saturating_add(at.unread[stream]));
            at.own[stream].clamp(least, most)
        })
    }

    /// Takes away what came after the first so many bytes of each stream, for [`Capture::put_back`]: whatever is
    /// inserted meanwhile stands before it. Nothing published is passed.
    pub(super) fn set_aside(&mut self, before: [usize; 2]) -> Vec<Arrival> {
        let kept = [self.stdout.bytes.len(), self.stderr.bytes.len()];
        let mut after = [0, 1].map(|at| kept[at].saturating_sub(before[at]));
        let (mut aside, mut staying) = (Vec::new(), Vec::new());
        while after != [0, 0]
            && let Some(Arrival::Text(stream, bytes)) =
                self.arrivals.pop_if(|it| matches!(it, Arrival::Text(..)))
        {
            let at = usize::from(stream == Stream::Stderr);
            let moved = after[at].min(bytes);
            after[at] -= moved;
            aside.extend((moved > 0).then_some(Arrival::Text(stream, moved)));
            staying.extend((moved < bytes).then_some(Arrival::Text(stream, bytes - moved)));
        }
        self.arrivals.extend(staying.into_iter().rev());
        aside.reverse();
        aside
    }

    pub(super) fn put_back(&mut self, aside: Vec<Arrival>) {
        self.arrivals.extend(aside);
    }

    /// Whether something published is to be looked at: their number has a bound, whatever they hold.
    pub(super) fn admits(&mut self, rich: &Rich) -> bool {
        if self.published == PUBLISHED_MAX {
            self.too_many = true;
            return false;
        }
        if *rich == Rich::Dropped {
            self.truncated = true;
            return false;
        }
        self.published += 1;
        true
    }

    /// Takes something published whole, or not at all when it goes over the cap. True when it was taken.
    pub(super) fn insert(&mut self, rich: Rich, execution_count: u64) -> bool {
        let chars = rich.chars();
        match &rich {
            &Rich::Clear { wait } => {
                if !wait {
                    self.take_away_outputs();
                }
                self.clears_at_next = wait;
                self.arrivals.push(Arrival::Rich(Mark::Clear { wait }));
                return true;
            }
            Rich::Update { id, .. } if self.shown.contains_key(id) => {
                return self.update(id, &rich, chars, execution_count);
            }
            _ => {}
        }
        if std::mem::take(&mut self.clears_at_next) {
            self.take_away_outputs();
        }
        let fits = self.charge(chars);
        if fits && let Rich::Display { id: Some(id), .. } | Rich::Update { id, .. } = &rich {
            self.name(id);
        }
        let mark = if fits { Mark::of(rich, chars, execution_count) } else { None };
        self.arrivals.push(Arrival::Rich(mark.unwrap_or(Mark::Nothing)));
        fits
    }

    /// What comes next is shown under this name.
    fn name(&mut self, id: &str) {
        let at = self.arrivals.len();
        if let Some(places) = self.shown.get_mut(id) {
            if places.len() < SHOWN_PER_NAME_MAX {
                places.push(at);
            }
        } else if self.shown.len() < DISPLAY_NAMES_MAX {
            self.shown.insert(id.to_owned(), vec![at]);
        }
    }

    /// Replaces whatever is shown under the update's name, where there is room for it.
    fn update(&mut self, id: &str, rich: &Rich, chars: usize, execution_count: u64) -> bool {
        let mut all = true;
        for at in self.shown.get(id).cloned().unwrap_or_default() {
            let Arrival::Rich(mark) = &self.arrivals[at] else { continue };
            let refunded = mark.chars();
            self.chars_kept = self.chars_kept.saturating_sub(refunded);
            let fits = self.charge(chars);
            let fresh = if fits { Mark::of(rich.clone(), chars, execution_count) } else { None };
            match fresh {
                Some(fresh) => self.arrivals[at] = Arrival::Rich(fresh),
                None => self.chars_kept += refunded,
            }
            all &= fits;
        }
        self.arrivals.push(Arrival::Rich(Mark::Nothing));
        all
    }

    /// Books characters that are taken whole or not at all.
    fn charge(&mut self, chars: usize) -> bool {
        if !self.truncated && chars <= self.chars_left() {
            self.chars_kept += chars;
        } else if chars <= self.tail_chars_left {
            self.tail_chars_left -= chars;
        } else {
            self.truncated = true;
            return false;
        }
        true
    }

    /// What was published so far is not shown any more and costs nothing.
    fn take_away_outputs(&mut self) {
        let mut chars = 0;
        for arrival in &mut self.arrivals[self.cleared_to..] {
            if let Arrival::Rich(mark) = arrival {
                chars += mark.take_away();
            }
        }
        self.cleared_to = self.arrivals.len();
        self.shown.clear();
        self.chars_kept = self.chars_kept.saturating_sub(chars);
    }

    /// What came so far, in order.
    pub(super) fn arrivals(&self) -> &[Arrival] {
        &self.arrivals
    }

    pub(super) fn kept_bytes(&self, stream: Stream) -> &[u8] {
        match stream {
            Stream::Stdout => &self.stdout.bytes,
            Stream::Stderr => &self.stderr.bytes,
        }
    }

    /// True when something was left out.
    pub(super) fn is_truncated(&self) -> bool {
        self.truncated
    }

    /// True when more was published than may be.
    pub(super) fn has_too_many(&self) -> bool {
        self.too_many
    }

    /// Characters left for the result and the error: those of the cell, or the tail's.
    pub(super) fn chars_left_for_end(&self) -> usize {
        self.chars_left().max(self.tail_chars_left)
    }

    fn chars_left(&self) -> usize {
        self.chars_max.saturating_sub(self.chars_kept)
    }

    fn kept(&mut self, stream: Stream) -> &mut Kept {
        match stream {
            Stream::Stdout => &mut self.stdout,
            Stream::Stderr => &mut self.stderr,
        }
    }

    /// Books the bytes of `stream` from `before` on, and gives back what is beyond the cap.
    fn account(&mut self, stream: Stream, before: usize) {
        let (chars_left, full) = (self.chars_left(), self.truncated);
        // Bytes that are no text count no characters, so they have a bound of their own.
        let bytes_left = self.chars_max.saturating_mul(CHAR_BYTES_MAX).saturating_sub(self.bytes_kept);
        let stream_bytes_max = self.stream_bytes_max;
        let kept = self.kept(stream);
        let fresh = &kept.bytes[before..];
        let is_over = kept.seen - fresh.len() > stream_bytes_max;
        let room = if is_over { 0 } else { stream_bytes_max.saturating_sub(before) };
        let mut take = if full { 0 } else { bytes_of_chars(fresh, chars_left).min(bytes_left) };
        let cut = take < fresh.len();
        if take > room {
            // The limit's doing, and not the guest's: no half character.
            take = whole_chars(&fresh[..room]);
        }
        let chars = count_chars(&fresh[..take]);
        kept.bytes.truncate(before + take);
        self.truncated |= cut;
        self.chars_kept += chars;
        self.bytes_kept += take;
        match self.arrivals.last_mut() {
            Some(Arrival::Text(last, bytes)) if *last == stream => *bytes += take,
            _ if take > 0 => self.arrivals.push(Arrival::Text(stream, take)),
            _ => {}
        }
    }

    /// The streams as outputs in the order of production, as far as it is known: by the interpreter's own
    /// account when it adds up with what came, else by arrival. Neighbours of one stream are one output.
    pub(super) fn into_outputs(self, told: &[Told]) -> Vec<Output> {
        let order = if self.adds_up(told) { in_order(told, self.arrivals) } else { self.arrivals };
        let (mut stdout, mut stderr) = (Decoder::new(&self.stdout.bytes), Decoder::new(&self.stderr.bytes));
        let mut folded = Folded::default();
        for arrival in order {
            match arrival {
                Arrival::Text(Stream::Stdout, bytes) => {
                    push_text(&mut folded, Stream::Stdout, &stdout.take(bytes))
                }
                Arrival::Text(Stream::Stderr, bytes) => {
                    push_text(&mut folded, Stream::Stderr, &stderr.take(bytes))
                }
                Arrival::Rich(mark) => folded.mark(mark),
            }
        }
        push_text(&mut folded, Stream::Stdout, &stdout.finish());
        push_text(&mut folded, Stream::Stderr, &stderr.finish());
        folded.outputs
    }

    fn adds_up(&self, told: &[Told]) -> bool {
        let published = self.arrivals.iter().filter(|arrival| matches!(arrival, Arrival::Rich(_))).count();
        let told_published = told.iter().fold(0_usize, |sum, entry| match entry {
            Told::Rich(count) => sum.saturating_add(*count),
            Told::Text(..) => sum,
        });
        told_published == published
            && expected_bytes(told, Stream::Stdout) == self.stdout.seen
            && expected_bytes(told, Stream::Stderr) == self.stderr.seen
    }
}

/// The arrivals as the interpreter tells their order.
fn in_order(told: &[Told], arrivals: Vec<Arrival>) -> Vec<Arrival> {
    let mut published = arrivals.into_iter().filter(|arrival| matches!(arrival, Arrival::Rich(_)));
    let mut order = Vec::with_capacity(told.len());
    for entry in told {
        match entry {
            Told::Text(stream, bytes) => order.push(Arrival::Text(*stream, *bytes)),
            Told::Rich(count) => order.extend(published.by_ref().take(*count)),
        }
    }
    order
}

/// How many bytes of `stream` an interpreter says to have written.
pub(super) fn expected_bytes(told: &[Told], stream: Stream) -> usize {
    told.iter().fold(0, |sum, entry| match entry {
        Told::Text(of, bytes) if *of == stream => sum.saturating_add(*bytes),
        _ => sum,
    })
}

/// Appends text to the list, to the last output if it is of the same stream.
fn push_text(folded: &mut Folded, stream: Stream, text: &str) {
    if text.is_empty() {
        return;
    }
    folded.make_room();
    match folded.outputs.last_mut() {
        Some(Output::Stream { name, text: last }) if *name == stream => last.push_str(text),
        _ => folded.outputs.push(Output::Stream { name: stream, text: text.to_owned() }),
    }
}

/// Decodes a stream piece by piece; bytes of a character that a piece does not finish wait for the next.
struct Decoder<'a> {
    rest: &'a [u8],
    /// Bytes already asked for that only make a character with the bytes to come.
    owed: usize,
}

impl<'a> Decoder<'a> {
    fn new(bytes: &'a [u8]) -> Decoder<'a> {
        Decoder { rest: bytes, owed: 0 }
    }

    fn take(&mut self, bytes: usize) -> String {
        let asked = self.owed.saturating_add(bytes).min(self.rest.len());
        let whole = whole_chars(&self.rest[..asked]);
        let (piece, rest) = self.rest.split_at(whole);
        self.rest = rest;
        self.owed = asked - whole;
        String::from_utf8_lossy(piece).into_owned()
    }

    fn finish(self) -> String {
        String::from_utf8_lossy(self.rest).into_owned()
    }
}

/// Length of `bytes` without the beginning of a character at its end.
pub(crate) fn whole_chars(bytes: &[u8]) -> usize {
    let tail_from = bytes.len().saturating_sub(CHAR_BYTES_MAX - 1);
    for at in (tail_from..bytes.len()).rev() {
        let width = match bytes[at] {
            0xC2..=0xDF => 2,
            0xE0..=0xEF => 3,
            0xF0..=0xF4 => 4,
            0x80..=0xBF => continue,
            _ => return bytes.len(),
        };
        // Only what can still become a character may wait: `from_utf8` knows the finer rules.
        let unfinished = std::str::from_utf8(&bytes[at..]).is_err_and(|error| error.error_len().is_none());
        return if at + width > bytes.len() && unfinished { at } else { bytes.len() };
    }
    bytes.len()
}

/// Characters in `bytes`, were it valid. Stray continuation bytes are not counted.
fn count_chars(bytes: &[u8]) -> usize {
    bytes.iter().filter(|byte| !is_continuation(**byte)).count()
}

/// How many bytes the first `chars` characters of `bytes` take, and never more than they could in UTF-8.
fn bytes_of_chars(bytes: &[u8], chars: usize) -> usize {
    if bytes.len() <= chars {
        return bytes.len();
    }
    let starts = bytes.iter().enumerate().filter(|(_, byte)| !is_continuation(**byte));
    let cut = starts.map(|(at, _)| at).nth(chars).unwrap_or(bytes.len());
    cut.min(chars.saturating_mul(CHAR_BYTES_MAX))
}

fn is_continuation(byte: u8) -> bool {
    byte & 0xC0 == 0x80
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn captured(chars_max: usize, pieces: &[(Stream, &[u8])]) -> Capture {
        let mut capture = Capture::new(chars_max);
        for (stream, bytes) in pieces {
            let kept = capture.kept(*stream);
            let before = kept.bytes.len();
            kept.bytes.extend_from_slice(bytes);
            kept.seen += bytes.len();
            capture.account(*stream, before);
        }
        capture
    }

    fn texts(outputs: &[Output]) -> Vec<(Stream, &str)> {
        let text = |output| match output {
            &Output::Stream { name, ref text } => (name, text.as_str()),
            other => panic!("not a stream: {other:?}"),
        };
        outputs.iter().map(text).collect()
    }

    use Stream::{Stderr as E, Stdout as O};

    #[test]
    fn the_interpreters_order_is_used_when_it_adds_up() {
        let capture = captured(100, &[(O, b"onethree"), (E, b"two")]);
        let outputs = capture.into_outputs(&[Told::Text(O, 3), Told::Text(E, 3), Told::Text(O, 5)]);
        assert_eq!(texts(&outputs), [(O, "one"), (E, "two"), (O, "three")]);
    }

    #[test]
    fn arrival_decides_when_a_child_wrote_as_well() {
        let capture = captured(100, &[(O, b"one, child"), (E, b"two")]);
        let outputs = capture.into_outputs(&[Told::Text(O, 3), Told::Text(E, 3)]);
        assert_eq!(texts(&outputs), [(O, "one, child"), (E, "two")]);
    }

    fn bundle(text: &str) -> crate::engine::Bundle {
        crate::engine::Bundle::from_iter([("text/plain".to_owned(), text.into())])
    }

    fn display(text: &str, id: Option<&str>) -> Rich {
        Rich::Display { data: bundle(text), metadata: Default::default(), id: id.map(str::to_owned) }
    }

    fn update(text: &str, id: &str) -> Rich {
        Rich::Update { data: bundle(text), metadata: Default::default(), id: id.to_owned() }
    }

    fn shown(outputs: Vec<Output>) -> Vec<String> {
        let text = |output| match output {
            Output::Stream { text, .. } => text,
            Output::DisplayData { data, .. } => data["text/plain"].as_str().expect("text").to_owned(),
            other => panic!("neither: {other:?}"),
        };
        outputs.into_iter().map(text).collect()
    }

    #[test]
    fn what_is_published_stands_where_it_was_told_to_be() {
        let mut capture = captured(1_000, &[(O, b"onetwo")]);
        capture.insert(display("figure", None), 1);
        let outputs = capture.into_outputs(&[Told::Text(O, 3), Told::Rich(1), Told::Text(O, 3)]);
        assert_eq!(shown(outputs), ["one", "figure", "two"]);
    }

    #[test]
    fn what_is_published_stands_in_the_middle_of_what_has_come() {
        let (all, none): (&[_], &[_]) = (&[(O, "abc"), (E, "x"), (O, "de"), (E, "yz")], &[]);
        for (place, before, after) in [
            ([9, 9], all, none),
            ([0, 0], none, all),
            ([3, 3], &[(O, "abc"), (E, "xyz")], &[(O, "de")]),
            ([4, 1], &[(O, "abc"), (E, "x"), (O, "d")], &[(O, "e"), (E, "yz")]),
            ([5, 0], &[(O, "abcde")], &[(E, "xyz")]),
        ] {
            let pieces = [(O, &b"abc"[..]), (E, b"x"), (O, b"de"), (E, b"yz")];
            let mut capture = captured(100, &pieces);
            let aside = capture.set_aside(place);
            capture.insert(display("figure", None), 1);
            capture.put_back(aside);
            let outputs = capture.into_outputs(&[]);
            let at = outputs.iter().position(|it| matches!(it, Output::DisplayData { .. })).expect("shown");
            assert_eq!((texts(&outputs[..at]), texts(&outputs[at + 1..])), (before.into(), after.into()));
        }
        // Nothing passes what was published before.
        let mut capture = captured(100, &[(O, b"ab")]);
        capture.insert(display("first", None), 1);
        assert!(capture.set_aside([0, 0]).is_empty());
    }

    #[test]
    fn an_update_replaces_all_of_its_name_and_one_of_no_name_is_shown() {
        let mut capture = Capture::new(1_000);
        for rich in [display("a", Some("x")), display("b", None), display("c", Some("x")), update("new", "x")]
        {
            assert!(capture.insert(rich, 1));
        }
        capture.insert(update("stray", "y"), 1);
        assert_eq!(shown(capture.into_outputs(&[])), ["new", "b", "new", "stray"]);
    }

    #[test]
    fn a_clearing_takes_away_what_came_before_at_once_or_when_something_comes() {
        for (wait, after, wanted) in [
            (false, vec![], vec![]),
            (false, vec![display("b", None)], vec!["b"]),
            (true, vec![], vec!["text", "a"]),
            (true, vec![display("b", None)], vec!["b"]),
        ] {
            let mut capture = captured(1_000, &[(O, b"text")]);
            capture.insert(display("a", Some("x")), 1);
            capture.insert(Rich::Clear { wait }, 1);
            for rich in after {
                assert!(capture.insert(rich, 1));
            }
            assert_eq!(shown(capture.into_outputs(&[])), wanted, "wait {wait}");
        }
    }

    #[test]
    fn a_display_that_is_cleared_again_and_again_costs_no_more_than_one() {
        let mut capture = Capture::new(2_000);
        for _ in 0..1_000 {
            assert!(capture.insert(display(&"x".repeat(1_000), Some("p")), 1));
            assert!(capture.insert(update(&"y".repeat(1_500), "p"), 1), "the old one's room is free again");
            capture.insert(Rich::Clear { wait: true }, 1);
        }
        assert!(!capture.is_truncated());
    }

    #[test]
    fn what_is_published_is_bounded_in_number_and_in_names() {
        let mut capture = Capture::new(100_000_000);
        let taken = (0..2 * PUBLISHED_MAX).filter(|n| {
            let rich = display("x", Some(&n.to_string()));
            capture.admits(&rich) && capture.insert(rich, 1)
        });
        assert_eq!(taken.count(), PUBLISHED_MAX);
        assert_eq!((capture.arrivals.len(), capture.shown.len()), (PUBLISHED_MAX, DISPLAY_NAMES_MAX));
        assert!(capture.has_too_many() && !capture.is_truncated());
    }

    #[test]
    fn the_name_of_a_display_counts() {
        let mut capture = Capture::new(1_000);
        capture.tail_chars_left = 0;
        assert!(!capture.insert(display("x", Some(&"n".repeat(1_000))), 1));
        assert!(capture.is_truncated() && capture.shown.is_empty());
    }

    #[test]
    fn what_goes_over_the_cap_is_left_out_whole_and_leaves_what_was_there() {
        let mut capture = Capture::new(1_000);
        capture.insert(display("small", Some("x")), 1);
        assert!(!capture.insert(update(&"y".repeat(100_000), "x"), 1));
        assert!(!capture.insert(display(&"z".repeat(100_000), None), 1));
        assert!(capture.insert(display("within the tail", None), 1));
        assert!(capture.is_truncated());
        assert_eq!(shown(capture.into_outputs(&[])), ["small", "within the tail"]);
    }

    #[test]
    fn a_forged_order_that_overflows_is_not_used() {
        let capture = captured(100, &[(O, b"x")]);
        let outputs = capture.into_outputs(&[Told::Text(O, usize::MAX), Told::Text(O, usize::MAX)]);
        assert_eq!(texts(&outputs), [(O, "x")]);
    }

    #[test]
    fn a_character_split_over_two_reads_is_whole() {
        let smile = "\u{1f600}".as_bytes();
        let capture = captured(100, &[(O, &smile[..2]), (E, b"!"), (O, &smile[2..])]);
        assert_eq!(texts(&capture.into_outputs(&[])), [(E, "!"), (O, "\u{1f600}")]);
    }

    #[test]
    fn the_head_is_kept_and_the_rest_only_counted() {
        let mut capture = captured(5, &[(O, "äöü".as_bytes()), (E, b"abc"), (O, b"more")]);
        assert!(capture.is_truncated());
        assert_eq!(capture.kept(O).seen, 10);
        assert_eq!(texts(&capture.into_outputs(&[])), [(O, "äöü"), (E, "ab")]);
    }

    #[test]
    fn a_stream_over_its_own_limit_keeps_what_fits_in_whole_characters() {
        let mut capture = Capture::new(100);
        capture.bound_streams(Some(5));
        for (stream, bytes) in [(O, "ab".as_bytes()), (E, b"12345"), (O, "äöü".as_bytes()), (O, b"more")] {
            assert_eq!(capture.over_limit(), (capture.seen()[0] > 5).then_some(O));
            let before = capture.kept(stream).bytes.len();
            capture.kept(stream).bytes.extend_from_slice(bytes);
            capture.kept(stream).seen += bytes.len();
            capture.account(stream, before);
        }
        assert_eq!((capture.over_limit(), capture.is_truncated()), (Some(O), false));
        assert_eq!(texts(&capture.into_outputs(&[])), [(O, "ab"), (E, "12345"), (O, "ä")]);
    }

    #[test]
    fn exactly_the_cap_is_not_too_much() {
        assert!(!captured(3, &[(O, "äöü".as_bytes())]).is_truncated());
    }

    #[test]
    fn continuation_bytes_alone_cannot_grow_without_end() {
        let noise = vec![0x80_u8; 1_000];
        let capture = captured(10, &vec![(O, &noise[..7]); 30]);
        assert!(capture.is_truncated());
        assert!(capture.stdout.bytes.len() <= 40, "{}", capture.stdout.bytes.len());
    }

    proptest! {
        #[test]
        fn pieces_decode_like_the_whole(
            bytes in proptest::collection::vec(prop_oneof![any::<u8>(), 0x80_u8..=0xBF, 0xE0_u8..=0xF4], 0..60),
            cuts in proptest::collection::vec(0_usize..6, 0..30),
        ) {
            let mut decoder = Decoder::new(&bytes);
            let mut text: String = cuts.into_iter().map(|cut| decoder.take(cut)).collect();
            text.push_str(&decoder.finish());
            prop_assert_eq!(text, String::from_utf8_lossy(&bytes));
        }

        #[test]
        fn streams_hold_what_was_written_in_any_order(
            pieces in proptest::collection::vec((any::<bool>(), "[a-zäß😀]{0,5}"), 0..12),
        ) {
            let stream = |first: bool| if first { O } else { E };
            let bytes: Vec<_> = pieces.iter().map(|(s, text)| (stream(*s), text.as_bytes())).collect();
            let outputs = captured(10_000, &bytes).into_outputs(&[]);
            for side in [O, E] {
                let got: String = texts(&outputs).iter().filter(|it| it.0 == side).map(|it| it.1).collect();
                let sent: String =
                    pieces.iter().filter(|it| stream(it.0) == side).map(|it| it.1.as_str()).collect();
                prop_assert_eq!(got, sent);
            }
        }
    }
}
