//! Frames between the daemon and the command agent of a sandbox: on the agent's descriptor 3 what to do, on 4 what
//! became of it.
//!
//! ```text
//!  length u32 | kind u8 | number u32 | payload        little endian; the length counts what follows it
//! ```
//!
//! `number` names a command of this agent, or its shell. The daemon treats every byte of an event as written by
//! a guest: guests share the agent's uid, so they can end it, and whoever answers in its place is heard.
#![forbid(unsafe_code)]

use serde::{Deserialize, Serialize};

/// Most bytes of one piece of input or output.
pub const CHUNK_BYTES_MAX: usize = 32 * 1024;
/// Longest event frame behind its length: a piece of output, or the working directory in a [`Event::Done`].
pub const EVENT_BYTES_MAX: usize = CHUNK_BYTES_MAX + HEAD_BYTES;
/// Longest request frame behind its length. A script may be as long as a JSON body, and its escapes longer.
pub const REQUEST_BYTES_MAX: usize = 32 * 1024 * 1024;
/// Longest path in an event: what the Linux kernel takes.
pub const PATH_BYTES_MAX: usize = 4095;

const LENGTH_BYTES: usize = 4;
/// Kind and number.
const HEAD_BYTES: usize = 5;

/// A command to start.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Start {
    pub program: Program,
    /// Relative to the sandbox's home; `None` is the home itself.
    pub cwd: Option<String>,
    /// Beyond the agent's own environment; without a value: taken out of it.
    pub env: Vec<(String, Option<String>)>,
    /// Nobody will ever write to it: it reads end of file.
    pub stdin_ends: bool,
    /// A file that is written before it starts.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub source: Option<Source>,
    /// Its calls of tools come as [`Event::Call`]: the folder in which the two pipes for them are made.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub calls: Option<String>,
}

/// A file for a command, in a folder that is made for it and that only the command's account can enter.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Source {
    pub folder: String,
    pub name: String,
    pub text: String,
}

/// Names of the two pipes of a command that calls tools: calls are written to the first, a line each, and answers
/// read from the second.
pub const CALLS_PIPE: &str = "calls";
pub const ANSWERS_PIPE: &str = "answers";

/// What a command is.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Program {
    /// A text for a shell.
    Script { shell: String, text: String },
    /// A program and its arguments, which nothing parses.
    Words(Vec<String>),
}

impl Program {
    /// What is started; empty where there is nothing.
    pub fn name(&self) -> &str {
        match self {
            Program::Script { shell, .. } => shell,
            Program::Words(words) => words.first().map_or("", String::as_str),
        }
    }
}

/// A stateful shell to start on a terminal, or on pipes where none can be had.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Shell {
    /// Must be a bash.
    pub shell: String,
    /// As in [`Start`].
    pub cwd: Option<String>,
    pub env: Vec<(String, Option<String>)>,
}

/// One line for such a shell.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Line {
    /// Comes back with its end.
    pub nonce: u32,
    pub text: String,
    /// Where to go first; the shell stays there.
    pub cwd: Option<String>,
    /// A `cwd` that is no directory refuses the line instead of being passed over.
    pub strict: bool,
    /// `pwd` shows the path as it was written, links and all.
    pub keeps_links: bool,
}

/// Daemon to agent.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Request {
    Start {
        number: u32,
        start: Start,
    },
    Stdin {
        number: u32,
        bytes: Vec<u8>,
    },
    StdinEnd {
        number: u32,
    },
    /// To the command's process group; of a shell to the one in its terminal's foreground.
    Signal {
        number: u32,
        signal: u8,
    },
    Shell {
        number: u32,
        shell: Shell,
    },
    Line {
        number: u32,
        line: Line,
    },
    /// A line for whoever waits for an answer to its call.
    Answer {
        number: u32,
        line: Vec<u8>,
    },
}

/// What the agent found in its sandbox.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Found {
    pub bash: Option<String>,
    pub sh: Option<String>,
    pub ps: Option<String>,
    /// Whether a terminal can be had.
    pub terminal: bool,
}

/// How a command's process ended.
#[derive(Copy, Clone, Debug, PartialEq, Eq)]
pub enum Exit {
    Code(u8),
    Signal(u8),
}

/// Agent to daemon.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Event {
    /// The first: the agent serves.
    Ready(Found),
    Started {
        number: u32,
    },
    /// Nothing was started: the working directory is none. Of a line: the same, with its nonce as number.
    NotADirectory {
        number: u32,
    },
    Stdout {
        number: u32,
        bytes: Vec<u8>,
    },
    Stderr {
        number: u32,
        bytes: Vec<u8>,
    },
    /// So many bytes of input have been read, or never will be.
    Taken {
        number: u32,
        bytes: u32,
    },
    Exit {
        number: u32,
        exit: Exit,
    },
    /// A line is over, and where the shell is now.
    Done {
        number: u32,
        nonce: u32,
        status: u8,
        cwd: String,
    },
    /// A piece of what a command has written to its pipe of calls.
    Call {
        number: u32,
        bytes: Vec<u8>,
    },
}

/// Bytes that are no frame.
#[derive(Copy, Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("not a frame of the command agent")]
pub struct Broken;

/// Takes a stream apart.
#[derive(Debug)]
pub struct Decoder {
    buffer: Vec<u8>,
    /// Where the first frame not yet handed out begins.
    at: usize,
    bytes_max: usize,
}

impl Decoder {
    /// `bytes_max`: longest frame, see [`EVENT_BYTES_MAX`] and [`REQUEST_BYTES_MAX`].
    pub fn new(bytes_max: usize) -> Decoder {
        Decoder { buffer: Vec::new(), at: 0, bytes_max }
    }

    /// Where to append what was read. Bounded by the caller, who takes all frames after each read.
    pub fn buffer(&mut self) -> &mut Vec<u8> {
        self.buffer.drain(..self.at);
        self.at = 0;
        &mut self.buffer
    }

    fn next(&mut self) -> Result<Option<Frame<'_>>, Broken> {
        let rest = &self.buffer[self.at..];
        let Some(length) = rest.first_chunk::<LENGTH_BYTES>() else { return Ok(None) };
        let length = u32::from_le_bytes(*length) as usize;
        if !(HEAD_BYTES..=self.bytes_max).contains(&length) {
            return Err(Broken);
        }
        let Some(frame) = rest.get(LENGTH_BYTES..LENGTH_BYTES + length) else { return Ok(None) };
        self.at += LENGTH_BYTES + length;
        let number = u32::from_le_bytes([frame[1], frame[2], frame[3], frame[4]]);
        Ok(Some(Frame { kind: frame[0], number, payload: &frame[HEAD_BYTES..] }))
    }

    /// The next whole event. Pieces of one stream that follow each other here are one: who writes byte by byte costs no
    /// more than who does not.
    pub fn event(&mut self) -> Result<Option<Event>, Broken> {
        let Some(frame) = self.next()? else { return Ok(None) };
        let (kind, number) = (frame.kind, frame.number);
        let mut event = Event::decode(frame)?;
        if let Event::Stdout { bytes, .. } | Event::Stderr { bytes, .. } | Event::Call { bytes, .. } =
            &mut event
        {
            while bytes.len() < CHUNK_BYTES_MAX {
                let before = self.at;
                match self.next() {
                    Ok(Some(more))
                        if (more.kind, more.number) == (kind, number)
                            && bytes.len() + more.payload.len() <= CHUNK_BYTES_MAX =>
                    {
                        bytes.extend_from_slice(more.payload);
                    }
                    // Of another kind, or none: that is for the next call.
                    _ => {
                        self.at = before;
                        break;
                    }
                }
            }
        }
        Ok(Some(event))
    }

    /// The next whole request.
    pub fn request(&mut self) -> Result<Option<Request>, Broken> {
        self.next()?.map(Request::decode).transpose()
    }
}

struct Frame<'a> {
    kind: u8,
    number: u32,
    payload: &'a [u8],
}

impl Frame<'_> {
    fn encode(&self) -> Vec<u8> {
        let length = u32::try_from(HEAD_BYTES + self.payload.len()).expect("frames are far shorter");
        let mut out = Vec::with_capacity(LENGTH_BYTES + HEAD_BYTES + self.payload.len());
        out.extend_from_slice(&length.to_le_bytes());
        out.push(self.kind);
        out.extend_from_slice(&self.number.to_le_bytes());
        out.extend_from_slice(self.payload);
        out
    }

    fn json<T: for<'de> Deserialize<'de>>(&self) -> Result<T, Broken> {
        serde_json::from_slice(self.payload).map_err(|_| Broken)
    }

    fn exactly<const N: usize>(&self) -> Result<[u8; N], Broken> {
        self.payload.try_into().map_err(|_| Broken)
    }
}

fn json(value: &impl Serialize) -> Vec<u8> {
    serde_json::to_vec(value).expect("our own types have string keys and no failing parts")
}

impl Request {
    pub fn encode(&self) -> Vec<u8> {
        let (kind, number, payload) = match self {
            Request::Start { number, start } => (1, *number, json(start)),
            Request::Stdin { number, bytes } => (2, *number, bytes.clone()),
            Request::StdinEnd { number } => (3, *number, Vec::new()),
            Request::Signal { number, signal } => (4, *number, vec![*signal]),
            Request::Shell { number, shell } => (5, *number, json(shell)),
            Request::Line { number, line } => (6, *number, json(line)),
            Request::Answer { number, line } => (7, *number, line.clone()),
        };
        Frame { kind, number, payload: &payload }.encode()
    }

    fn decode(frame: Frame<'_>) -> Result<Request, Broken> {
        let number = frame.number;
        Ok(match frame.kind {
            1 => Request::Start { number, start: frame.json()? },
            2 => Request::Stdin { number, bytes: frame.payload.to_vec() },
            3 if frame.payload.is_empty() => Request::StdinEnd { number },
            4 => Request::Signal { number, signal: frame.exactly::<1>()?[0] },
            5 => Request::Shell { number, shell: frame.json()? },
            6 => Request::Line { number, line: frame.json()? },
            7 => Request::Answer { number, line: frame.payload.to_vec() },
            _ => return Err(Broken),
        })
    }
}

impl Event {
    pub fn encode(&self) -> Vec<u8> {
        let (kind, number, payload) = match self {
            Event::Ready(found) => (1, 0, json(found)),
            Event::Started { number } => (2, *number, Vec::new()),
            Event::NotADirectory { number } => (3, *number, Vec::new()),
            Event::Stdout { number, bytes } => (4, *number, bytes.clone()),
            Event::Stderr { number, bytes } => (5, *number, bytes.clone()),
            Event::Taken { number, bytes } => (6, *number, bytes.to_le_bytes().to_vec()),
            Event::Exit { number, exit: Exit::Code(code) } => (7, *number, vec![0, *code]),
            Event::Exit { number, exit: Exit::Signal(signal) } => (7, *number, vec![1, *signal]),
            Event::Done { number, nonce, status, cwd } => {
                let mut payload = nonce.to_le_bytes().to_vec();
                payload.push(*status);
                payload.extend_from_slice(cwd.as_bytes());
                (8, *number, payload)
            }
            Event::Call { number, bytes } => (9, *number, bytes.clone()),
        };
        Frame { kind, number, payload: &payload }.encode()
    }

    fn decode(frame: Frame<'_>) -> Result<Event, Broken> {
        let number = frame.number;
        Ok(match frame.kind {
            1 => Event::Ready(found(&frame)?),
            2 if frame.payload.is_empty() => Event::Started { number },
            3 if frame.payload.is_empty() => Event::NotADirectory { number },
            4 => Event::Stdout { number, bytes: frame.payload.to_vec() },
            5 => Event::Stderr { number, bytes: frame.payload.to_vec() },
            6 => Event::Taken { number, bytes: u32::from_le_bytes(frame.exactly()?) },
            7 => match frame.exactly()? {
                [0, code] => Event::Exit { number, exit: Exit::Code(code) },
                [1, signal] => Event::Exit { number, exit: Exit::Signal(signal) },
                _ => return Err(Broken),
            },
            8 => {
                let (nonce, rest) = frame.payload.split_first_chunk::<4>().ok_or(Broken)?;
                let (status, cwd) = rest.split_first().ok_or(Broken)?;
                let cwd = path(std::str::from_utf8(cwd).map_err(|_| Broken)?)?;
                Event::Done { number, nonce: u32::from_le_bytes(*nonce), status: *status, cwd }
            }
            9 => Event::Call { number, bytes: frame.payload.to_vec() },
            _ => return Err(Broken),
        })
    }
}

fn found(frame: &Frame<'_>) -> Result<Found, Broken> {
    let found: Found = frame.json()?;
    for binary in [&found.bash, &found.sh, &found.ps].into_iter().flatten() {
        path(binary)?;
    }
    Ok(found)
}

fn path(text: &str) -> Result<String, Broken> {
    if text.starts_with('/') && text.len() <= PATH_BYTES_MAX { Ok(text.to_owned()) } else { Err(Broken) }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn events(bytes: &[u8]) -> Result<Vec<Event>, Broken> {
        let mut decoder = Decoder::new(EVENT_BYTES_MAX);
        let mut found = Vec::new();
        for piece in bytes.chunks(3) {
            decoder.buffer().extend_from_slice(piece);
            while let Some(event) = decoder.event()? {
                found.push(event);
            }
        }
        Ok(found)
    }

    #[test]
    fn events_survive_the_pipe_in_pieces() {
        let all = [
            Event::Ready(Found { bash: Some("/bin/bash".to_owned()), terminal: true, ..Found::default() }),
            Event::Started { number: 1 },
            Event::NotADirectory { number: u32::MAX },
            Event::Stdout { number: 1, bytes: b"a\0\xff".to_vec() },
            Event::Stderr { number: 1, bytes: Vec::new() },
            Event::Taken { number: 1, bytes: 70_000 },
            Event::Exit { number: 1, exit: Exit::Code(3) },
            Event::Exit { number: 1, exit: Exit::Signal(9) },
            Event::Done { number: 2, nonce: 7, status: 1, cwd: "/tmp/ä".to_owned() },
            Event::Call { number: 3, bytes: b"{}\n".to_vec() },
        ];
        let bytes: Vec<u8> = all.iter().flat_map(Event::encode).collect();
        assert_eq!(events(&bytes).as_deref(), Ok(&all[..]));
    }

    #[test]
    fn requests_survive_the_pipe() {
        let start = Start {
            program: Program::Script { shell: "/bin/sh".to_owned(), text: "echo \0 ä".to_owned() },
            cwd: Some("/tmp".to_owned()),
            env: vec![("A".to_owned(), Some("1".to_owned())), ("B".to_owned(), None)],
            stdin_ends: true,
            source: Some(Source {
                folder: "/tmp/run".to_owned(),
                name: "main.sh".to_owned(),
                text: "echo".to_owned(),
            }),
            calls: Some("/tmp/run".to_owned()),
        };
        let shell = Shell { shell: "/bin/bash".to_owned(), cwd: None, env: Vec::new() };
        let line = Line { nonce: 5, text: "cd /".to_owned(), cwd: None, strict: true, keeps_links: false };
        let all = [
            Request::Start { number: 1, start },
            Request::Stdin { number: 1, bytes: b"in".to_vec() },
            Request::StdinEnd { number: 1 },
            Request::Signal { number: 1, signal: 15 },
            Request::Shell { number: 2, shell },
            Request::Line { number: 2, line },
            Request::Answer { number: 2, line: b"{}\n".to_vec() },
        ];
        let mut decoder = Decoder::new(REQUEST_BYTES_MAX);
        for request in &all {
            decoder.buffer().extend_from_slice(&request.encode());
        }
        for request in all {
            assert_eq!(decoder.request(), Ok(Some(request)));
        }
        assert_eq!(decoder.request(), Ok(None));
    }

    #[test]
    fn what_was_written_byte_by_byte_is_one_piece() {
        let out = |bytes: &[u8]| Event::Stdout { number: 1, bytes: bytes.to_vec() };
        let other = Event::Stdout { number: 2, bytes: b"z".to_vec() };
        let mut decoder = Decoder::new(EVENT_BYTES_MAX);
        for _ in 0..CHUNK_BYTES_MAX + 5 {
            decoder.buffer().extend_from_slice(&out(b"x").encode());
        }
        decoder.buffer().extend_from_slice(&other.encode());
        decoder.buffer().extend_from_slice(&out(b"y").encode());
        decoder.buffer().extend_from_slice(&out(b"half").encode()[..10]);
        for wanted in [out(&[b'x'; CHUNK_BYTES_MAX]), out(b"xxxxx"), other, out(b"y")] {
            assert_eq!(decoder.event(), Ok(Some(wanted)));
        }
        assert_eq!(decoder.event(), Ok(None));
    }

    #[test]
    fn what_is_too_long_or_of_no_kind_is_broken() {
        let too_long = u32::try_from(EVENT_BYTES_MAX + 1).expect("small").to_le_bytes();
        for bytes in [
            &too_long[..],
            &[4, 0, 0, 0, 1, 0, 0, 0],
            &[5, 0, 0, 0, 99, 0, 0, 0, 0],
            &[6, 0, 0, 0, 2, 0, 0, 0, 0, 7],
            &[7, 0, 0, 0, 7, 0, 0, 0, 0, 2, 2],
            &[10, 0, 0, 0, 8, 0, 0, 0, 0, 1, 0, 0, 0, 0],
            &[11, 0, 0, 0, 8, 0, 0, 0, 0, 1, 0, 0, 0, 0, b'x'],
            b"GET / HTTP/1.1\r\n\r\n",
        ] {
            assert_eq!(events(bytes), Err(Broken), "{bytes:?}");
        }
    }

    proptest! {
        #[test]
        fn no_bytes_of_a_guest_make_it_panic_or_grow(bytes in proptest::collection::vec(any::<u8>(), 0..400)) {
            let mut decoder = Decoder::new(EVENT_BYTES_MAX);
            decoder.buffer().extend_from_slice(&bytes);
            while let Ok(Some(event)) = decoder.event() {
                // Whatever was understood is what it says.
                let mut again = Decoder::new(EVENT_BYTES_MAX);
                again.buffer().extend_from_slice(&event.encode());
                prop_assert_eq!(again.event(), Ok(Some(event)));
            }
            prop_assert!(decoder.buffer().len() <= bytes.len());
        }
    }
}
