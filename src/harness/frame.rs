//! The codec of the line protocol: request frames out, event lines in.
//!
//! Everything that comes in is written by a guest. A line is taken when it is an event of the cell we asked
//! about and every field has its type; any other line is dropped, because the guest shares the descriptor
//! with the harness. Only a line that does not end is an offence: it cannot be dropped without reading on.
#![forbid(unsafe_code)]

use std::borrow::Cow;
use std::ops::Range;

use serde::{Deserialize, Serialize};

use crate::engine::{Bundle, ErrorOutput, Stream};
use crate::harness::capture::Told;
use crate::harness::pace::Pace;
use crate::harness::rich::Rich;
use crate::harness::tools::{CallWire, Called, ToolAnswer, ToolName};
use crate::harness::{DISPLAY_NAME_BYTES_MAX, FRAME_BYTES_MAX, LINE_BYTES_LEAST, ORDER_ENTRIES_MAX};

/// Length of a nonce, in characters of the URL-safe alphabet (six bits each).
const NONCE_CHARS: usize = 20;
/// Room made for one read of the event pipe, in bytes.
const READ_BYTES: usize = 16 * 1024;

/// Names the one cell that an event belongs to.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Nonce(String);

impl Nonce {
    pub fn fresh() -> Nonce {
        // The thread's own generator: a system call per cell would be felt.
        Nonce(nanoid::nanoid!(NONCE_CHARS, &nanoid::alphabet::SAFE, nanoid::rngs::thread_local))
    }

    pub fn as_str(&self) -> &str {
        &self.0
    }
}

/// What an interpreter is asked to do.
#[derive(Copy, Clone, Debug, PartialEq, Eq)]
pub enum Ask<'a> {
    /// Run a cell. `count` is its number in the session; a kernel shows it. `argv` is what it finds behind
    /// `sys.argv[0]`.
    Cell { code: &'a str, timeout_ms: u64, count: u64, argv: Option<&'a [String]> },
    /// Run a program, once.
    Program(Program<'a>),
    /// Change the working directory before the first cell. A frame of its own: its refusal can then not
    /// have been written by guest code.
    WorkingDirectory(&'a str),
    /// Evaluate something harmless in a namespace of its own, so that the first cell finds warm code paths.
    WarmUp(&'a str),
    /// The same for an interpreter that is kept for a program: its road as well, and the libraries of TypeScript. Cells
    /// it runs no more.
    WarmUpForPrograms(&'a str),
}

/// A text that is run as a fresh interpreter would run it.
#[derive(Copy, Clone, Debug, PartialEq, Eq)]
pub struct Program<'a> {
    pub code: &'a str,
    pub args: &'a [String],
    pub typescript: bool,
    /// Present when it may call tools.
    pub tools: Option<&'a [ToolName]>,
    pub timeout_ms: u64,
}

/// A request that would not fit into a frame.
#[derive(Copy, Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("the code is too long for one frame ({bytes} of at most {FRAME_BYTES_MAX} bytes)")]
pub struct FrameTooLong {
    pub bytes: usize,
}

#[derive(Serialize)]
struct RequestWire<'a> {
    nonce: &'a str,
    #[serde(skip_serializing_if = "Option::is_none")]
    setup: Option<SetupWire<'a>>,
    #[serde(skip_serializing_if = "std::ops::Not::not")]
    kernel: bool,
    #[serde(skip_serializing_if = "Option::is_none")]
    warm: Option<&'a str>,
    #[serde(skip_serializing_if = "std::ops::Not::not")]
    programs: bool,
    #[serde(skip_serializing_if = "Option::is_none")]
    code: Option<&'a str>,
    #[serde(skip_serializing_if = "Option::is_none")]
    timeout_ms: Option<u64>,
    #[serde(skip_serializing_if = "Option::is_none")]
    count: Option<u64>,
    #[serde(skip_serializing_if = "Option::is_none")]
    argv: Option<&'a [String]>,
    #[serde(skip_serializing_if = "Option::is_none")]
    program: Option<ProgramWire<'a>>,
}

#[derive(Serialize)]
struct ProgramWire<'a> {
    code: &'a str,
    args: &'a [String],
    #[serde(skip_serializing_if = "std::ops::Not::not")]
    typescript: bool,
    #[serde(skip_serializing_if = "Option::is_none")]
    tools: Option<&'a [ToolName]>,
}

#[derive(Serialize)]
struct SetupWire<'a> {
    cwd: &'a str,
}

/// One request line, with its newline. `kernel` makes the interpreter a kernel, once and for good.
pub fn encode(nonce: &Nonce, kernel: bool, ask: Ask<'_>) -> Result<Vec<u8>, FrameTooLong> {
    let nonce = nonce.as_str();
    let mut wire = RequestWire {
        nonce,
        setup: None,
        kernel,
        warm: None,
        programs: false,
        code: None,
        timeout_ms: None,
        count: None,
        argv: None,
        program: None,
    };
    match ask {
        Ask::Cell { code, timeout_ms, count, argv } => {
            wire.count = kernel.then_some(count);
            wire.code = Some(code);
            wire.timeout_ms = Some(timeout_ms);
            wire.argv = argv;
        }
        Ask::Program(Program { code, args, typescript, tools, timeout_ms }) => {
            wire.program = Some(ProgramWire { code, args, typescript, tools });
            wire.timeout_ms = Some(timeout_ms);
        }
        Ask::WorkingDirectory(cwd) => wire.setup = Some(SetupWire { cwd }),
        Ask::WarmUp(source) => wire.warm = Some(source),
        Ask::WarmUpForPrograms(source) => {
            wire.warm = Some(source);
            wire.programs = true;
        }
    }
    let mut line = serde_json::to_vec(&wire).expect("strings and numbers always have a JSON form");
    line.push(b'\n');
    if line.len() > FRAME_BYTES_MAX { Err(FrameTooLong { bytes: line.len() }) } else { Ok(line) }
}

/// One line of answers to a program's calls.
pub(super) fn encode_answers(nonce: &Nonce, answers: &[ToolAnswer]) -> Vec<u8> {
    let mut line = format!("{{\"nonce\":\"{}\",\"answers\":[", nonce.as_str()).into_bytes();
    for (index, answer) in answers.iter().enumerate() {
        if index > 0 {
            line.push(b',');
        }
        line.extend_from_slice(answer.to_json().as_bytes());
    }
    line.extend_from_slice(b"]}\n");
    line
}

/// What the interpreter says about a cell.
#[derive(Clone, Debug, PartialEq)]
pub enum Event {
    /// A program calls tools.
    Calls(Vec<Called>),
    /// Something published, and where among the text, if it tells.
    Rich(Rich, Option<At>),
    Done(Done),
}

/// Where something was published: after so many bytes of standard output and of standard error.
#[derive(Copy, Clone, Debug, PartialEq, Eq)]
pub struct At {
    /// Bytes of the cell that the interpreter itself had written.
    pub(super) own: [usize; 2],
    /// Bytes that lay in the pipe, whoever had written them.
    pub(super) unread: [usize; 2],
    /// From when to when that was looked at, in nanoseconds of the monotonic clock.
    pub(super) when: [u64; 2],
}

/// The end of a cell.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Done {
    /// The text/plain form of the last expression.
    pub result: Option<String>,
    pub error: Option<ErrorOutput>,
    /// What the interpreter wrote and published, in order; empty when it does not say.
    pub(super) order: Vec<Told>,
    /// The set-up could not be done; the errno, 0 when it names none.
    pub refused: Option<i32>,
    /// A program's status.
    pub exit: Option<u8>,
}

/// What decides whether a line is looked at closer.
#[derive(Deserialize)]
struct HeadWire {
    nonce: String,
    event: String,
}

/// Most bytes that a line may take when it is built: a frame's length and what a large plot's numbers need.
const WEIGHT_MAX: usize = 4 * FRAME_BYTES_MAX;
/// What an object and any value take at least.
const OBJECT_BYTES: usize = 640;
const VALUE_BYTES: usize = 40;

/// An interpreter sent more on its control pipe than it may.
#[derive(Copy, Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum TooMuch {
    #[error("the interpreter sent a line of more than {FRAME_BYTES_MAX} bytes on its control pipe")]
    Line,
    #[error("the interpreter sent more lines on its control pipe than one request may")]
    Lines,
}

#[derive(Deserialize)]
struct EventWire {
    nonce: String,
    event: String,
    #[serde(default)]
    data: Bundle,
    #[serde(default)]
    metadata: Bundle,
    #[serde(default)]
    id: Option<String>,
    #[serde(default)]
    wait: bool,
    #[serde(default)]
    result: Option<String>,
    #[serde(default)]
    error: Option<ErrorWire>,
    #[serde(default)]
    order: Option<Vec<(String, usize)>>,
    #[serde(default)]
    refused: Option<RefusedWire>,
    #[serde(default)]
    exit: Option<u8>,
    #[serde(default)]
    calls: Option<Vec<CallWire>>,
    #[serde(default)]
    at: Option<[u64; 6]>,
}

#[derive(Deserialize)]
struct ErrorWire {
    ename: String,
    evalue: String,
    #[serde(default)]
    traceback: Vec<String>,
}

#[derive(Deserialize)]
struct RefusedWire {
    #[serde(default)]
    errno: i32,
}

/// Puts lines together from whatever pieces the pipe gives.
#[derive(Debug, Default)]
pub struct EventReader {
    buffer: Vec<u8>,
    /// Before here, `buffer` has been read.
    start: usize,
    /// Before here, what has not been read is known to hold no newline.
    searched: usize,
    /// What the request at hand may still send.
    bytes_left: usize,
}

impl EventReader {
    /// A request begins, which may send so many bytes.
    pub fn begin(&mut self, bytes_max: usize) {
        self.bytes_left = bytes_max;
    }

    /// Whether there may be a whole line here.
    pub fn has_more(&self) -> bool {
        self.searched < self.buffer.len()
    }

    /// Where the next bytes of the pipe go, with room for [`READ_BYTES`].
    pub fn buffer(&mut self) -> &mut Vec<u8> {
        // Once per read of the pipe and not once per line: a guest can send 32,000 empty lines in one read.
        self.buffer.drain(..self.start);
        self.searched -= self.start;
        self.start = 0;
        if self.buffer.is_empty() && self.buffer.capacity() > 4 * READ_BYTES {
            self.buffer = Vec::new();
        }
        self.buffer.reserve(READ_BYTES);
        &mut self.buffer
    }

    /// The next event of the cell `nonce`, if a whole one is here and the turn is not over. Lines that are none are
    /// dropped.
    pub(super) fn next(&mut self, nonce: &Nonce, pace: &mut Pace) -> Result<Option<Event>, TooMuch> {
        while !pace.is_over()
            && let Some(line) = self.next_line()?
        {
            let least = if line.is_empty() { 1 } else { LINE_BYTES_LEAST };
            let cost = (line.len() + 1).max(least);
            self.bytes_left = self.bytes_left.checked_sub(cost).ok_or(TooMuch::Lines)?;
            if line.is_empty() {
                continue;
            }
            pace.spend(line.len());
            if let Some(event) = parse(&self.buffer[line], nonce) {
                return Ok(Some(event));
            }
        }
        Ok(None)
    }

    fn next_line(&mut self) -> Result<Option<Range<usize>>, TooMuch> {
        let newline = self.buffer[self.searched..].iter().position(|byte| *byte == b'\n');
        let end = newline.map_or(self.buffer.len(), |at| self.searched + at);
        if end - self.start >= FRAME_BYTES_MAX {
            return Err(TooMuch::Line);
        }
        if newline.is_none() {
            self.searched = self.buffer.len();
            return Ok(None);
        }
        let line = self.start..end;
        self.start = end + 1;
        self.searched = self.start;
        Ok(Some(line))
    }
}

fn parse(line: &[u8], nonce: &Nonce) -> Option<Event> {
    // What is nobody's is not built, and what would take too much room when it is built is not either: a few bytes of
    // JSON make a node of a tree.
    if let Ok(head) = serde_json::from_slice::<HeadWire>(line) {
        if head.nonce != nonce.0 {
            return None;
        }
        if weight(line) > WEIGHT_MAX {
            return Some(if head.event == "done" {
                Event::Done(Done::default())
            } else {
                Event::Rich(Rich::Dropped, None)
            });
        }
    } else if weight(line) > WEIGHT_MAX {
        return None;
    }
    let wire = decode(line)?;
    if wire.nonce != nonce.0 {
        return None;
    }
    let EventWire { data, metadata, id, wait, .. } = wire;
    let is_update = wire.event == "update" && id.is_some();
    let id = id.filter(|id| id.len() <= DISPLAY_NAME_BYTES_MAX);
    let at = wire.at.map(|[out, out_unread, err, err_unread, from, until]| {
        let bytes = |number| usize::try_from(number).unwrap_or(usize::MAX);
        let (own, unread) = ([out, err].map(bytes), [out_unread, err_unread].map(bytes));
        At { own, unread, when: [from, until] }
    });
    let rich = |rich| Some(Event::Rich(rich, at));
    let error =
        wire.error.map(|it| ErrorOutput { ename: it.ename, evalue: it.evalue, traceback: it.traceback });
    match wire.event.as_str() {
        "display" => rich(Rich::Display { data, metadata, id }),
        "update" if is_update => rich(match id {
            Some(id) => Rich::Update { data, metadata, id },
            // Nothing is shown under such a name.
            None => Rich::Display { data, metadata, id },
        }),
        "result" => rich(Rich::Result { data, metadata }),
        "error" => rich(Rich::Error(error?)),
        "clear" => rich(Rich::Clear { wait }),
        "dropped" => rich(Rich::Dropped),
        "call" => Some(Event::Calls(wire.calls?.into_iter().filter_map(Called::check).collect())),
        "done" => Some(Event::Done(Done {
            result: wire.result,
            error,
            order: wire.order.and_then(read_order).unwrap_or_default(),
            refused: wire.refused.map(|it| it.errno),
            exit: wire.exit,
        })),
        _ => None,
    }
}

/// Roughly how many bytes a line takes when it is built. Strings count with their length in `line`.
fn weight(line: &[u8]) -> usize {
    let (mut weight, mut in_string, mut escaped) = (line.len(), false, false);
    for byte in line {
        match byte {
            _ if escaped => escaped = false,
            b'\\' if in_string => escaped = true,
            b'"' => in_string = !in_string,
            _ if in_string => {}
            b'{' => weight += OBJECT_BYTES,
            b'[' | b',' => weight += VALUE_BYTES,
            _ => {}
        }
    }
    weight
}

/// Strict first, because an honest line nearly always is; then once more with its text repaired.
fn decode(line: &[u8]) -> Option<EventWire> {
    // serde would also take a list for a struct; an event is an object.
    if !line.trim_ascii_start().starts_with(b"{") {
        return None;
    }
    if let Ok(wire) = serde_json::from_slice(line) {
        return Some(wire);
    }
    let text = String::from_utf8_lossy(line);
    serde_json::from_str(&repair_surrogates(&text)).ok()
}

fn read_order(entries: Vec<(String, usize)>) -> Option<Vec<Told>> {
    if entries.len() > ORDER_ENTRIES_MAX {
        return None;
    }
    let read = |(name, count): (String, usize)| match name.as_str() {
        "o" => Some(Told::Text(Stream::Stdout, count)),
        "e" => Some(Told::Text(Stream::Stderr, count)),
        "r" => Some(Told::Rich(count)),
        _ => None,
    };
    entries.into_iter().map(read).collect()
}

/// Replaces `\uD800`-like escapes that belong to no pair with `\uFFFD`. A Python string can hold a lone
/// surrogate and `json.dumps` writes it; a Rust string cannot.
pub(crate) fn repair_surrogates(json: &str) -> Cow<'_, str> {
    if !json.contains("\\u") {
        return Cow::Borrowed(json);
    }
    let mut repaired = String::with_capacity(json.len());
    let mut rest = json;
    while let Some(at) = rest.find('\\') {
        repaired.push_str(&rest[..at]);
        rest = &rest[at..];
        let taken = match (escaped_unit(rest), rest.get(6..).and_then(escaped_unit)) {
            (Some(0xD800..=0xDBFF), Some(0xDC00..=0xDFFF)) => 12,
            (Some(0xD800..=0xDFFF), _) => {
                repaired.push_str("\\ufffd");
                rest = &rest[6..];
                continue;
            }
            (Some(_), _) => 6,
            // A backslash and what it escapes, whole, so that `\\ud800` stays the text it is.
            (None, _) => 1 + rest[1..].chars().next().map_or(0, char::len_utf8),
        };
        repaired.push_str(&rest[..taken]);
        rest = &rest[taken..];
    }
    repaired.push_str(rest);
    Cow::Owned(repaired)
}

/// The code unit of a `\uXXXX` at the start of `text`.
fn escaped_unit(text: &str) -> Option<u16> {
    let digits = text.strip_prefix("\\u")?.get(..4)?;
    if digits.bytes().all(|byte| byte.is_ascii_hexdigit()) {
        u16::from_str_radix(digits, 16).ok()
    } else {
        None
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn nonce() -> Nonce {
        Nonce("N".to_owned())
    }

    fn read(bytes: &[u8]) -> Vec<Event> {
        let mut reader = EventReader::default();
        reader.buffer().extend_from_slice(bytes);
        reader.begin(usize::MAX);
        std::iter::from_fn(|| reader.next(&nonce(), &mut Pace::new()).expect("no line is too long")).collect()
    }

    fn done(line: &str) -> Option<Done> {
        match read(format!("{line}\n").as_bytes()).pop()? {
            Event::Done(done) => Some(done),
            Event::Rich(..) | Event::Calls(_) => None,
        }
    }

    #[test]
    fn a_request_is_one_line_with_only_what_it_asks() {
        let cell = encode(
            &nonce(),
            false,
            Ask::Cell { code: "print('a')\n", timeout_ms: 30_000, count: 2, argv: None },
        )
        .expect("fits");
        assert_eq!(cell, b"{\"nonce\":\"N\",\"code\":\"print('a')\\n\",\"timeout_ms\":30000}\n");
        let setup = encode(&nonce(), false, Ask::WorkingDirectory("/tmp")).expect("fits");
        assert_eq!(setup, b"{\"nonce\":\"N\",\"setup\":{\"cwd\":\"/tmp\"}}\n");
        let warm = encode(&nonce(), false, Ask::WarmUp("print(1)")).expect("fits");
        assert_eq!(warm, b"{\"nonce\":\"N\",\"warm\":\"print(1)\"}\n");
        let warm = encode(&nonce(), false, Ask::WarmUpForPrograms("print(1)")).expect("fits");
        assert_eq!(warm, b"{\"nonce\":\"N\",\"warm\":\"print(1)\",\"programs\":true}\n");
        let kernel = encode(&nonce(), true, Ask::WarmUp("print(1)")).expect("fits");
        let cell = encode(&nonce(), true, Ask::Cell { code: "1", timeout_ms: 5, count: 2, argv: None })
            .expect("fits");
        assert_eq!(cell, b"{\"nonce\":\"N\",\"kernel\":true,\"code\":\"1\",\"timeout_ms\":5,\"count\":2}\n");
        assert_eq!(kernel, b"{\"nonce\":\"N\",\"kernel\":true,\"warm\":\"print(1)\"}\n");
    }

    #[test]
    fn a_done_frame_is_read_whole() {
        let line = r#"{"nonce":"N","event":"done","result":"21","error":{"ename":"E","evalue":"v","traceback":["t"]},"order":[["o",12],["e",5]]}"#;
        let done = done(line).expect("an honest frame");
        assert_eq!(done.result.as_deref(), Some("21"));
        assert_eq!(done.order, [Told::Text(Stream::Stdout, 12), Told::Text(Stream::Stderr, 5)]);
        assert_eq!(done.error.expect("an error").traceback, ["t"]);
        assert_eq!(done.refused, None);
    }

    #[test]
    fn a_frame_with_another_nonce_is_dropped() {
        assert_eq!(done(r#"{"nonce":"M","event":"done","result":"forged"}"#), None);
    }

    #[test]
    fn a_field_of_the_wrong_type_drops_the_frame() {
        assert_eq!(done(r#"{"nonce":"N","event":"done","result":7}"#), None);
        assert_eq!(done(r#"{"nonce":"N","event":"done","order":[["o",-1]]}"#), None);
        assert_eq!(done(r#"["N","done"]"#), None);
    }

    #[test]
    fn garbage_between_frames_is_skipped() {
        let bytes = b"\n\xff\xfe{]\nnull\n{\"nonce\":\"N\",\"event\":\"done\",\"result\":\"1\"}\ntail";
        assert_eq!(read(bytes).len(), 1);
    }

    #[test]
    fn a_lone_surrogate_becomes_a_replacement_character() {
        let text = |escape: &str| {
            done(&format!(r#"{{"nonce":"N","event":"done","result":"{escape}"}}"#))
                .and_then(|done| done.result)
                .expect("repaired")
        };
        assert_eq!(text(r"a\ud800b"), "a\u{fffd}b");
        assert_eq!(text(r"\udc00\ud800\ud83d\ude00"), "\u{fffd}\u{fffd}\u{1f600}");
        assert_eq!(text(r"\ud800\\ud800\n"), "\u{fffd}\\ud800\n");
    }

    #[test]
    fn invalid_utf8_in_a_frame_is_repaired() {
        let events = read(b"{\"nonce\":\"N\",\"event\":\"done\",\"result\":\"a\xffb\"}\n");
        let [Event::Done(done)] = &events[..] else { panic!("one done frame") };
        assert_eq!(done.result.as_deref(), Some("a\u{fffd}b"));
    }

    #[test]
    fn a_line_that_would_take_too_much_room_is_not_built() {
        let tree = |nonce: &str, event: &str| {
            let nodes = vec![r#"{"":0}"#; 500_000].join(",");
            format!("{{\"nonce\":\"{nonce}\",\"event\":\"{event}\",\"data\":{{\"a\":[{nodes}]}}}}\n")
        };
        assert_eq!(read(tree("N", "display").as_bytes()), [Event::Rich(Rich::Dropped, None)]);
        assert_eq!(
            read(tree("N", "done").as_bytes()),
            [Event::Done(Done::default())],
            "the cell is over all the same"
        );
        assert_eq!(read(tree("M", "display").as_bytes()), []);
        // A large plot's numbers are no such tree.
        let numbers = vec!["1.2345678901234"; 600_000].join(",");
        let plot = format!("{{\"nonce\":\"N\",\"event\":\"display\",\"data\":{{\"a\":[{numbers}]}}}}\n");
        assert!(matches!(&read(plot.as_bytes())[..], [Event::Rich(Rich::Display { .. }, None)]));
        // Brackets in a text weigh nothing.
        let text = format!(
            "{{\"nonce\":\"N\",\"event\":\"display\",\"data\":{{\"a\":\"{}\"}}}}\n",
            "[{,\\\"".repeat(200_000)
        );
        assert!(matches!(&read(text.as_bytes())[..], [Event::Rich(Rich::Display { .. }, None)]));
    }

    #[test]
    fn an_order_list_beyond_its_cap_is_left_out() {
        let entries = vec!["[\"o\",1]"; ORDER_ENTRIES_MAX + 1].join(",");
        let done = done(&format!(r#"{{"nonce":"N","event":"done","order":[{entries}]}}"#)).expect("a frame");
        assert!(done.order.is_empty());
    }

    #[test]
    fn a_line_that_does_not_end_is_an_offence() {
        let mut reader = EventReader::default();
        reader.buffer().resize(FRAME_BYTES_MAX, b'x');
        assert_eq!(reader.next(&nonce(), &mut Pace::new()), Err(TooMuch::Line));
    }

    #[test]
    fn a_line_counts_for_more_than_its_length_and_an_empty_one_does_not() {
        let lines = |line: &str, bytes_max| {
            let mut reader = EventReader::default();
            reader.begin(bytes_max);
            reader.buffer().extend_from_slice(line.repeat(100).as_bytes());
            loop {
                match reader.next(&nonce(), &mut Pace::new()) {
                    Ok(_) if reader.has_more() => {}
                    other => return other,
                }
            }
        };
        for (line, cost) in
            [("x\n", LINE_BYTES_LEAST), ("\n", 1), (&*format!("{}\n", "x".repeat(999)), 1_000)]
        {
            assert_eq!(lines(line, 100 * cost), Ok(None), "{cost}");
            assert_eq!(lines(line, 100 * cost - 1), Err(TooMuch::Lines), "{cost}");
        }
    }

    #[test]
    fn a_display_under_a_name_too_long_has_none() {
        for (length, is_named) in [(DISPLAY_NAME_BYTES_MAX, true), (DISPLAY_NAME_BYTES_MAX + 1, false)] {
            for event in ["display", "update"] {
                let id = "d".repeat(length);
                let line =
                    format!("{{\"nonce\":\"N\",\"event\":\"{event}\",\"data\":{{}},\"id\":\"{id}\"}}\n");
                let named = match read(line.as_bytes()).pop() {
                    Some(Event::Rich(Rich::Display { id, .. }, None)) => id.is_some(),
                    Some(Event::Rich(Rich::Update { .. }, None)) => true,
                    other => panic!("{other:?}"),
                };
                assert_eq!(named, is_named, "{event} {length}");
            }
        }
    }

    proptest! {
        #[test]
        fn no_bytes_of_a_guest_break_the_reader(bytes in proptest::collection::vec(any::<u8>(), 0..400)) {
            let _ = read(&bytes);
        }

        #[test]
        fn json_like_text_of_a_guest_breaks_nothing(text in r#"[\\u{}\[\]":,a-fN0-9dD]{0,60}"#) {
            let _ = read(format!("{{\"nonce\":\"N\",\"event\":\"done\",\"result\":\"{text}\"}}\n").as_bytes());
        }

        #[test]
        fn pieces_of_any_size_give_the_same_events(cuts in proptest::collection::vec(1_usize..40, 1..20)) {
            let line = "{\"nonce\":\"N\",\"event\":\"done\",\"result\":\"\u{1f600}\"}\nnoise\n";
            let bytes = line.repeat(3).into_bytes();
            let mut reader = EventReader::default();
            let (mut events, mut rest) = (0, &bytes[..]);
            for cut in cuts.iter().cycle() {
                let (piece, tail) = rest.split_at((*cut).min(rest.len()));
                reader.buffer().extend_from_slice(piece);
                reader.begin(usize::MAX);
                while reader.next(&nonce(), &mut Pace::new()).expect("short lines").is_some() {
                    events += 1;
                }
                rest = tail;
                if rest.is_empty() {
                    break;
                }
            }
            prop_assert_eq!(events, 3);
        }

        #[test]
        fn every_code_survives_the_request_frame(code in any::<String>()) {
            let line = encode(&nonce(), false, Ask::Cell { code: &code, timeout_ms: 1, count: 1, argv: None }).expect("fits");
            prop_assert_eq!(line.iter().filter(|byte| **byte == b'\n').count(), 1);
            let value: serde_json::Value = serde_json::from_slice(&line).expect("JSON");
            prop_assert_eq!(value["code"].as_str(), Some(code.as_str()));
        }
    }
}
