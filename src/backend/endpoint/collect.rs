//! The outputs of one cell, as a notebook would show them in the end, within the cell's bounds.
//!
//! Neighbours of one stream are one output; `update_display_data` changes the display it names; `clear_output`
//! forgets what came before. A stream that crosses the cap keeps its head and the note follows; whatever else
//! does not fit is dropped whole.
#![forbid(unsafe_code)]

use std::collections::{HashMap, VecDeque};
use std::fmt;

use serde::de::{IgnoredAny, SeqAccess, Visitor};
use serde::{Deserialize, Deserializer};
use serde_json::Value;
use serde_json::value::RawValue;

use crate::backend::endpoint::message::read;
use crate::engine::{Bundle, ErrorOutput, Output, Piece, Stream, Watcher};
use crate::harness::capture::TAIL_CHARS_MAX;
use crate::harness::outcome::Budget;
use crate::harness::{DISPLAY_NAME_BYTES_MAX, DISPLAY_NAMES_MAX, PUBLISHED_MAX};

/// Most outputs of a cell. One that alternates between its streams makes as many as it likes.
const OUTPUTS_MAX: usize = 20_000;
/// Most displays that share a `display_id`. Beyond it a display cannot be updated.
const DISPLAYS_PER_ID_MAX: usize = 64;
/// Most lines of a traceback that are read, from its end.
const TRACEBACK_LINES_MAX: usize = 10_000;

/// Content of `stream`.
#[derive(Deserialize)]
struct StreamIn {
    name: String,
    text: String,
}

/// Content of `display_data`, `update_display_data` and `execute_result`.
#[derive(Deserialize)]
struct DisplayIn {
    data: Box<RawValue>,
    #[serde(default)]
    metadata: Option<Box<RawValue>>,
    #[serde(default)]
    transient: Option<TransientIn>,
}

#[derive(Deserialize)]
struct TransientIn {
    #[serde(default)]
    display_id: Option<String>,
}

impl DisplayIn {
    /// Characters of what it shows, as JSON.
    fn chars(&self) -> usize {
        let written = [Some(&self.data), self.metadata.as_ref()].into_iter().flatten();
        written.map(|raw| raw.get().chars().count()).sum()
    }

    fn bundles(&self) -> Option<(Bundle, Bundle)> {
        let data = read::<Bundle>(self.data.get().as_bytes()).map(texts_are_text)?;
        let metadata = self.metadata.as_ref().and_then(|raw| read(raw.get().as_bytes()));
        Some((data, metadata.unwrap_or_default()))
    }
}

/// Content of `clear_output`.
#[derive(Deserialize)]
struct ClearIn {
    #[serde(default)]
    wait: bool,
}

/// Content of an `execute_reply`. Its fields are those of an `error` and not one, because serde would hold all
/// of them in memory to take them apart.
#[derive(Debug, Deserialize)]
pub(super) struct ReplyIn {
    pub(super) status: String,
    #[serde(default)]
    ename: String,
    #[serde(default)]
    evalue: String,
    #[serde(default)]
    traceback: LastLines,
}

/// Content of `error`.
#[derive(Debug, Deserialize, Default)]
struct ErrorIn {
    #[serde(default)]
    ename: String,
    #[serde(default)]
    evalue: String,
    #[serde(default)]
    traceback: LastLines,
}

/// The last lines of a list of them, however long it is.
#[derive(Debug, Default)]
struct LastLines(VecDeque<String>);

/// Takes messages of one cell in the order they come.
#[derive(Debug)]
pub(super) struct Collector {
    chars_max: usize,
    execution_count: u64,
    outputs: Vec<Output>,
    /// Where displays of an id are, and what they cost.
    displays: HashMap<String, Vec<(usize, usize)>>,
    published: usize,
    chars_kept: usize,
    /// What still gets through once the cap is reached, in characters.
    tail_chars_left: usize,
    noted: bool,
    /// `clear_output(wait=True)` came: the next output replaces what is there.
    clear_pending: bool,
    raised: bool,
    /// The error of the reply, in case none came as an output.
    expected: Option<ErrorIn>,
    feed: Feed,
}

/// Tells who watches the cell what it produces, as far as there is room.
#[derive(Debug)]
struct Feed {
    watcher: Option<Watcher>,
    chars_left: usize,
}

impl Feed {
    fn tell(&mut self, chars: usize, piece: impl FnOnce() -> Piece) {
        let Some(watcher) = &self.watcher else { return };
        let Some(left) = self.chars_left.checked_sub(chars.max(Piece::CHARS_LEAST)) else { return };
        self.chars_left = left;
        if watcher.send(piece()).is_err() {
            self.watcher = None;
        }
    }

    /// Something that the cell has said already: there is room for it whatever was told before.
    fn tell_output(&self, output: &Output) {
        if let Some(watcher) = &self.watcher {
            // Nobody listens any more: the cell goes on.
            drop(watcher.send(Piece::Output { output: output.clone(), display_id: None }));
        }
    }
}

impl Collector {
    pub(super) fn new(chars_max: usize, execution_count: u64, watcher: Option<Watcher>) -> Collector {
        let feed = Feed { watcher, chars_left: Piece::CHARS_MAX };
        Collector::with_feed(chars_max, execution_count, feed)
    }

    fn with_feed(chars_max: usize, execution_count: u64, feed: Feed) -> Collector {
        Collector {
            chars_max,
            execution_count,
            outputs: Vec::new(),
            displays: HashMap::new(),
            published: 0,
            chars_kept: 0,
            tail_chars_left: TAIL_CHARS_MAX,
            noted: false,
            clear_pending: false,
            raised: false,
            expected: None,
            feed,
        }
    }

    /// The cell's reply says that it raised this.
    pub(super) fn expect_error(&mut self, reply: ReplyIn) {
        let ReplyIn { ename, evalue, traceback, .. } = reply;
        self.expected = Some(ErrorIn { ename, evalue, traceback });
    }

    /// No more outputs come: shows the error of the reply if none was among them.
    pub(super) fn settle_error(&mut self) {
        if let Some(error) = self.expected.take().filter(|_| !self.raised) {
            self.error(error);
        }
    }

    /// The outputs, and behind them what `append` adds.
    pub(super) fn into_outputs(self, append: impl FnOnce(&mut Vec<Output>)) -> Vec<Output> {
        let mut outputs = self.outputs;
        let of_cell = outputs.len();
        append(&mut outputs);
        outputs[of_cell..].iter().for_each(|output| self.feed.tell_output(output));
        outputs
    }

    /// Takes the content of a message on iopub. Kinds that show nothing, and content of the wrong type, are
    /// left out.
    pub(super) fn take(&mut self, kind: &str, content: &[u8]) {
        match kind {
            "stream" => self.take_stream(content),
            "display_data" | "execute_result" | "update_display_data" | "clear_output" | "error" => {
                if self.published == PUBLISHED_MAX {
                    return self.truncate();
                }
                self.published += 1;
                self.take_published(kind, content);
            }
            _ => {}
        }
    }

    fn take_published(&mut self, kind: &str, content: &[u8]) {
        match kind {
            "clear_output" => self.take_clear(content),
            "error" => {
                if let Some(error) = read(content) {
                    self.error(error);
                }
            }
            _ => self.take_display(kind, content),
        }
    }

    /// Notes that something was left out.
    pub(super) fn truncate(&mut self) {
        if !self.noted {
            self.noted = true;
            let text = format!("[output truncated at {} characters]", self.chars_max);
            let note = Output::Stream { name: Stream::Stderr, text };
            self.feed.tell_output(&note);
            self.outputs.push(note);
        }
    }

    fn error(&mut self, error: ErrorIn) {
        self.settle_clear();
        let chars_left = self.room();
        let mut budget = Budget { chars_left, cut: false };
        let traceback = Vec::from(error.traceback.0);
        let error = budget.cut_error(ErrorOutput { ename: error.ename, evalue: error.evalue, traceback });
        if budget.cut {
            self.truncate();
        }
        self.raised = true;
        // What follows an error within the cap is small; the tail pays for it when the cap does not.
        let chars = chars_left - budget.chars_left + 1;
        self.charge(chars);
        self.push(Output::Error(error), chars, None);
    }

    fn take_stream(&mut self, content: &[u8]) {
        let Some(StreamIn { name, mut text }) = read(content) else { return };
        let name = match name.as_str() {
            "stdout" => Stream::Stdout,
            "stderr" => Stream::Stderr,
            _ => return,
        };
        if text.is_empty() {
            return;
        }
        self.settle_clear();
        let left = if self.noted { 0 } else { self.chars_left() };
        let cut = text.char_indices().nth(left).map(|(at, _)| at);
        text.truncate(cut.unwrap_or(text.len()));
        let chars = text.chars().count();
        self.chars_kept += chars;
        match self.outputs.last_mut() {
            _ if text.is_empty() => {}
            Some(Output::Stream { name: last, text: before }) if *last == name => {
                before.push_str(&text);
                let output = Output::Stream { name, text };
                self.feed.tell(chars, || Piece::Output { output, display_id: None });
            }
            _ => self.push(Output::Stream { name, text }, chars, None),
        }
        if cut.is_some() {
            self.truncate();
        }
    }

    fn take_display(&mut self, kind: &str, content: &[u8]) {
        // Before anything is made of it: JSON takes many times its length in memory.
        if content.len() > self.chars_max.saturating_mul(4).saturating_add(TAIL_CHARS_MAX) {
            self.truncate();
            return;
        }
        let Some(display) = read::<DisplayIn>(content) else { return };
        let id = display.transient.as_ref().and_then(|it| it.display_id.clone());
        let id = id.filter(|id| id.len() <= DISPLAY_NAME_BYTES_MAX);
        if kind == "update_display_data" {
            if let Some(id) = id.filter(|id| self.displays.contains_key(id)) {
                self.update(&id, &display);
            }
            return;
        }
        self.settle_clear();
        let chars = display.chars();
        if chars > self.room() {
            self.truncate();
            return;
        }
        let Some((data, metadata)) = display.bundles() else { return };
        self.charge(chars);
        if let Some(id) = id.as_deref().filter(|_| self.outputs.len() < OUTPUTS_MAX) {
            self.name_next(id, chars);
        }
        let execution_count = self.execution_count;
        let output = match kind {
            "execute_result" => Output::ExecuteResult { data, metadata, execution_count },
            _ => Output::DisplayData { data, metadata },
        };
        self.push(output, chars, id);
    }

    /// Books that the next output is a display of that id.
    fn name_next(&mut self, id: &str, chars: usize) {
        let place = (self.outputs.len(), chars);
        if let Some(places) = self.displays.get_mut(id) {
            if places.len() < DISPLAYS_PER_ID_MAX {
                places.push(place);
            }
            return;
        }
        if self.displays.len() < DISPLAY_NAMES_MAX {
            self.displays.insert(id.to_owned(), vec![place]);
        }
    }

    /// Shows something else where the displays of that id are.
    fn update(&mut self, id: &str, display: &DisplayIn) {
        let chars = display.chars();
        if chars > self.chars_max.max(TAIL_CHARS_MAX) {
            self.truncate();
            return;
        }
        let Some((data, metadata)) = display.bundles() else { return };
        let mut places = self.displays.remove(id).unwrap_or_default();
        for (at, cost) in &mut places {
            if !self.charge(chars.saturating_sub(*cost)) {
                self.displays.insert(id.to_owned(), places);
                self.truncate();
                return;
            }
            self.chars_kept = self.chars_kept.saturating_sub(cost.saturating_sub(chars));
            *cost = chars;
            if let Some(
                Output::DisplayData { data: shown, metadata: about }
                | Output::ExecuteResult { data: shown, metadata: about, .. },
            ) = self.outputs.get_mut(*at)
            {
                shown.clone_from(&data);
                about.clone_from(&metadata);
            }
        }
        self.displays.insert(id.to_owned(), places);
        self.feed.tell(chars, || Piece::Update { display_id: id.to_owned(), data, metadata });
    }

    fn take_clear(&mut self, content: &[u8]) {
        let Some(ClearIn { wait }) = read(content) else { return };
        self.clear_pending = true;
        self.feed.tell(0, || Piece::Clear { wait });
        if !wait {
            self.settle_clear();
        }
    }

    fn settle_clear(&mut self) {
        if self.clear_pending {
            let feed = Feed { watcher: self.feed.watcher.take(), chars_left: self.feed.chars_left };
            let expected = self.expected.take();
            let fresh = Collector::with_feed(self.chars_max, self.execution_count, feed);
            *self = Collector { expected, published: self.published, ..fresh };
        }
    }

    fn chars_left(&self) -> usize {
        self.chars_max.saturating_sub(self.chars_kept)
    }

    /// Characters of the largest thing that can still be kept whole.
    fn room(&self) -> usize {
        let of_cap = if self.noted { 0 } else { self.chars_left() };
        of_cap.max(self.tail_chars_left)
    }

    /// Books characters of something that is kept whole, or says that it cannot be.
    fn charge(&mut self, chars: usize) -> bool {
        if !self.noted && chars <= self.chars_left() {
            self.chars_kept += chars;
        } else if chars <= self.tail_chars_left {
            self.tail_chars_left -= chars;
        } else {
            return false;
        }
        true
    }

    fn push(&mut self, output: Output, chars: usize, display_id: Option<String>) {
        if self.outputs.len() < OUTPUTS_MAX {
            self.feed.tell(chars, || Piece::Output { output: output.clone(), display_id });
            self.outputs.push(output);
        } else {
            self.truncate();
        }
    }
}

/// `text/*` and `image/*` hold text, or lines of it. What holds anything else is no such thing.
fn texts_are_text(bundle: Bundle) -> Bundle {
    let is_text =
        |mime: &str| (mime.starts_with("text/") || mime.starts_with("image/")) && !mime.ends_with("json");
    let checked = bundle.into_iter().filter_map(|(mime, value)| match value {
        Value::Array(lines) if is_text(&mime) => {
            let whole: Option<String> = lines.iter().map(Value::as_str).collect();
            Some((mime, Value::String(whole?)))
        }
        Value::String(_) => Some((mime, value)),
        _ if is_text(&mime) => None,
        _ => Some((mime, value)),
    });
    checked.collect()
}

impl<'de> Deserialize<'de> for LastLines {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<LastLines, D::Error> {
        struct Lines;
        impl<'de> Visitor<'de> for Lines {
            type Value = LastLines;

            fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str("a list of lines")
            }

            fn visit_seq<A: SeqAccess<'de>>(self, mut lines: A) -> Result<LastLines, A::Error> {
                let mut last = VecDeque::new();
                while let Some(line) = lines.next_element()? {
                    if last.len() == TRACEBACK_LINES_MAX {
                        last.pop_front();
                    }
                    last.push_back(line);
                }
                Ok(LastLines(last))
            }

            fn visit_unit<E>(self) -> Result<LastLines, E> {
                Ok(LastLines::default())
            }

            fn visit_map<A: serde::de::MapAccess<'de>>(self, mut map: A) -> Result<LastLines, A::Error> {
                while map.next_entry::<IgnoredAny, IgnoredAny>()?.is_some() {}
                Ok(LastLines::default())
            }
        }
        deserializer.deserialize_any(Lines)
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    fn collected(chars_max: usize, messages: &[(&str, Value)]) -> Vec<Output> {
        watched(chars_max, messages, None)
    }

    fn watched(chars_max: usize, messages: &[(&str, Value)], watcher: Option<Watcher>) -> Vec<Output> {
        let mut collector = Collector::new(chars_max, 3, watcher);
        for (kind, content) in messages {
            collector.take(kind, content.to_string().as_bytes());
        }
        collector.into_outputs(|_| {})
    }

    fn text(name: &str, text: &str) -> (&'static str, Value) {
        ("stream", json!({"name": name, "text": text}))
    }

    fn stream(name: Stream, text: &str) -> Output {
        Output::Stream { name, text: text.to_owned() }
    }

    fn bundle(value: Value) -> Bundle {
        value.as_object().expect("an object").clone()
    }

    fn plain(text: &str) -> Output {
        Output::DisplayData { data: bundle(json!({"text/plain": text})), metadata: Bundle::new() }
    }

    fn display(kind: &'static str, text: &str, id: &str) -> (&'static str, Value) {
        (kind, json!({"data": {"text/plain": text}, "metadata": {}, "transient": {"display_id": id}}))
    }

    fn take(collector: &mut Collector, (kind, content): (&str, Value)) {
        collector.take(kind, content.to_string().as_bytes());
    }

    #[test]
    fn names_of_displays_take_a_bounded_part_of_memory() {
        let mut collector = Collector::new(2_000_000, 3, None);
        for number in 0..OUTPUTS_MAX + 10_000 {
            let id = format!("{number}{}", "x".repeat(DISPLAY_NAME_BYTES_MAX - 10));
            take(&mut collector, display("display_data", "", &id));
        }
        assert_eq!(collector.displays.len(), DISPLAY_NAMES_MAX);
        // Names that share a place with nothing shown are none.
        let mut collector = Collector::new(2_000_000, 3, None);
        for number in 0..OUTPUTS_MAX + 10 {
            let id = if number < OUTPUTS_MAX { String::new() } else { number.to_string() };
            take(&mut collector, display("display_data", "", &id));
        }
        assert_eq!(collector.displays.len(), 1);
        let mut collector = Collector::new(2_000_000, 3, None);
        take(&mut collector, display("display_data", "", "0"));
        take(&mut collector, display("update_display_data", "new", "0"));
        assert_eq!(collector.into_outputs(|_| {})[0], plain("new"), "control");
    }

    #[test]
    fn what_a_cell_publishes_beside_text_is_counted() {
        let mut collector = Collector::new(100, 3, None);
        take(&mut collector, display("display_data", "a", "id"));
        for _ in 1..PUBLISHED_MAX - 1 {
            take(&mut collector, ("clear_output", json!({"wait": true})));
        }
        take(&mut collector, display("display_data", "b", "id"));
        take(&mut collector, display("update_display_data", "never", "id"));
        take(&mut collector, text("stdout", "text"));
        let note = stream(Stream::Stderr, "[output truncated at 100 characters]");
        assert_eq!(collector.into_outputs(|_| {})[..2], [plain("b"), note], "also across clearings");
    }

    #[test]
    fn behind_the_note_only_what_is_small_is_kept() {
        let large = "x".repeat(TAIL_CHARS_MAX * 2);
        let mut collector = Collector::new(TAIL_CHARS_MAX * 4, 3, None);
        take(&mut collector, display("display_data", &"x".repeat(TAIL_CHARS_MAX * 5), "id"));
        for _ in 0..10 {
            take(&mut collector, display("display_data", &large, "id"));
        }
        take(&mut collector, display("display_data", "small", "id"));
        assert_eq!(collector.into_outputs(|_| {})[1..], [plain("small")]);
    }

    const NOTE: &str = "[output truncated at 10 characters]";

    #[test]
    fn neighbours_of_one_stream_are_one_output() {
        let outputs = collected(
            100,
            &[text("stdout", "a"), text("stdout", "b"), text("stderr", "c"), text("log", "d")],
        );
        assert_eq!(outputs, [stream(Stream::Stdout, "ab"), stream(Stream::Stderr, "c")]);
    }

    #[test]
    fn a_result_carries_the_count_of_our_books() {
        let outputs = collected(
            100,
            &[("execute_result", json!({"data": {"text/plain": "1"}, "execution_count": 99}))],
        );
        let [Output::ExecuteResult { data, execution_count: 3, .. }] = &outputs[..] else {
            panic!("{outputs:?}")
        };
        assert_eq!(data["text/plain"], "1");
    }

    #[test]
    fn an_update_changes_the_displays_of_its_id_and_no_other() {
        let outputs = collected(
            1_000,
            &[
                display("display_data", "one", "a"),
                display("display_data", "two", "b"),
                display("display_data", "three", "a"),
                display("update_display_data", "new", "a"),
                display("update_display_data", "of another cell", "c"),
            ],
        );
        assert_eq!(outputs, [plain("new"), plain("two"), plain("new")]);
    }

    #[test]
    fn updates_do_not_add_up_against_the_cap() {
        let mut messages = vec![display("display_data", "step", "bar")];
        messages.extend((0..10_000).map(|n| display("update_display_data", &n.to_string(), "bar")));
        assert_eq!(collected(100, &messages), [plain("9999")]);
    }

    #[test]
    fn an_update_over_the_cap_leaves_the_display_and_a_note() {
        let long = "x".repeat(70_000);
        let outputs =
            collected(10, &[display("display_data", "a", "d"), display("update_display_data", &long, "d")]);
        assert_eq!(outputs, [plain("a"), stream(Stream::Stderr, NOTE)]);
    }

    #[test]
    fn clear_output_forgets_at_once_or_when_something_follows() {
        let clear = |wait: bool| ("clear_output", json!({"wait": wait}));
        assert_eq!(collected(100, &[text("stdout", "a"), clear(false)]), []);
        assert_eq!(collected(100, &[text("stdout", "a"), clear(true)]), [stream(Stream::Stdout, "a")]);
        assert_eq!(
            collected(100, &[text("stdout", "a"), clear(true), text("stdout", "b")]),
            [stream(Stream::Stdout, "b")]
        );
    }

    #[test]
    fn frames_of_an_animation_do_not_add_up_against_the_cap() {
        let frame = [("clear_output", json!({"wait": true})), text("stdout", "12345678")];
        let outputs = collected(10, &vec![frame; 1_000].concat());
        assert_eq!(outputs, [stream(Stream::Stdout, "12345678")]);
    }

    #[test]
    fn a_stream_over_the_cap_keeps_its_head_and_the_note_follows() {
        let outputs = collected(10, &[text("stdout", &"ä".repeat(20)), text("stderr", "more")]);
        assert_eq!(outputs, [stream(Stream::Stdout, &"ä".repeat(10)), stream(Stream::Stderr, NOTE)]);
        let outputs = collected(10, &[text("stderr", &"x".repeat(10)), text("stderr", "y")]);
        assert_eq!(outputs, [stream(Stream::Stderr, &"x".repeat(10)), stream(Stream::Stderr, NOTE)]);
        assert_eq!(collected(10, &[text("stdout", "0123456789")]), [stream(Stream::Stdout, "0123456789")]);
    }

    #[test]
    fn what_is_displayed_after_the_cap_arrives_within_the_tail() {
        let outputs = collected(
            10,
            &[
                text("stdout", "01234567890"),
                display("display_data", "small", "a"),
                display("display_data", &"x".repeat(70_000), "b"),
                ("error", json!({"ename": "E", "evalue": "v", "traceback": ["t"]})),
            ],
        );
        let error =
            ErrorOutput { ename: "E".to_owned(), evalue: "v".to_owned(), traceback: vec!["t".to_owned()] };
        assert_eq!(
            outputs,
            [
                stream(Stream::Stdout, "0123456789"),
                stream(Stream::Stderr, NOTE),
                plain("small"),
                Output::Error(error)
            ]
        );
    }

    #[test]
    fn a_watcher_is_told_what_comes_in_its_order() {
        let (watcher, mut pieces) = crate::engine::pieces();
        let messages = [
            text("stdout", "a"),
            text("stdout", "b"),
            display("display_data", "one", "d"),
            display("update_display_data", "two", "d"),
            ("clear_output", json!({"wait": true})),
            text("stdout", &"c".repeat(20)),
        ];
        let outputs = watched(10, &messages, Some(watcher));
        let head = stream(Stream::Stdout, &"c".repeat(10));
        assert_eq!(outputs, [head.clone(), stream(Stream::Stderr, NOTE)]);
        let output = |output| Piece::Output { output, display_id: None };
        let (data, metadata) = (bundle(json!({"text/plain": "two"})), Bundle::new());
        let told = [
            output(stream(Stream::Stdout, "ab")),
            Piece::Output { output: plain("one"), display_id: Some("d".to_owned()) },
            Piece::Update { display_id: "d".to_owned(), data, metadata },
            Piece::Clear { wait: true },
            output(head),
            output(stream(Stream::Stderr, NOTE)),
        ];
        for piece in told {
            assert_eq!(pieces.try_recv(), Some(piece));
        }
        assert!(pieces.try_recv().is_none());
    }

    #[test]
    fn what_a_watcher_is_told_is_bounded_though_updates_cost_the_cell_nothing() {
        let (watcher, mut pieces) = crate::engine::pieces();
        let text = "x".repeat(1_000_000);
        let mut messages = vec![display("display_data", &text, "d")];
        messages.extend((0..50).map(|_| display("update_display_data", &text, "d")));
        watched(2_000_000, &messages, Some(watcher));
        let told = std::iter::from_fn(|| pieces.try_recv()).count();
        assert_eq!(told, Piece::CHARS_MAX / 1_000_019);
    }

    #[test]
    fn outputs_are_bounded_in_number() {
        let pair = [text("stdout", "a"), text("stderr", "b")];
        let outputs = collected(1_000_000, &vec![pair; OUTPUTS_MAX].concat());
        assert_eq!(outputs.len(), OUTPUTS_MAX + 1);
        assert_eq!(outputs.last(), Some(&stream(Stream::Stderr, "[output truncated at 1000000 characters]")));
    }

    #[test]
    fn displays_that_hold_nothing_are_bounded_too() {
        let empty = [("display_data", json!({"data": {}}))];
        assert!(collected(100, &vec![empty; 100_000].concat()).len() <= OUTPUTS_MAX + 1);
    }

    #[test]
    fn a_long_traceback_keeps_its_last_lines() {
        let lines: Vec<String> = (0..50_000).map(|n| format!("line {n}")).collect();
        let outputs =
            collected(2_000_000, &[("error", json!({"ename": "E", "evalue": "v", "traceback": lines}))]);
        let [Output::Error(error)] = &outputs[..] else { panic!("{} outputs", outputs.len()) };
        assert_eq!(error.traceback.len(), TRACEBACK_LINES_MAX);
        assert_eq!(error.traceback.last().map(String::as_str), Some("line 49999"));
    }

    #[test]
    fn content_of_the_wrong_type_shows_nothing() {
        let wrong = [
            ("stream", json!({"name": "stdout", "text": 1})),
            ("stream", json!(["stdout", "a"])),
            ("display_data", json!({"data": []})),
            ("display_data", json!({"metadata": {}})),
            ("execute_result", json!(null)),
            ("error", json!({"ename": 1})),
            ("clear_output", json!({"wait": "x"})),
            ("comm_open", json!({"data": {}})),
        ];
        assert_eq!(collected(100, &wrong), []);
    }

    #[test]
    fn a_bundle_holds_text_where_text_belongs() {
        let data = json!({
            "text/plain": ["a\n", "b"],
            "text/html": {"no": "text"},
            "image/png": 7,
            "application/json": {"n": 1},
        });
        let outputs = collected(1_000, &[("display_data", json!({"data": data, "metadata": 1}))]);
        let data = bundle(json!({"text/plain": "a\nb", "application/json": {"n": 1}}));
        assert_eq!(outputs, [Output::DisplayData { data, metadata: Bundle::new() }]);
    }
}
