//! Tools that a program calls: their names in its language, its calls on their way out, the answers on their way back.
//!
//! Python's stubs speak in frames (`harness/program.py`). Bash's stubs speak in lines over two FIFOs of a folder that
//! whoever runs the script has made, `calls` and `answers`:
//!
//! ```text
//!  ID {"name":"get-weather","input":{…}}          to `calls`, one line for each call; ID: digits and underscores
//!  ID ok|error LENGTH                             from `answers`, and then so many bytes: JSON, or an error's text
//! ```
//!
//! Calls may be on their way at once. What a guest writes there itself is a call of its own, or nothing.
#![forbid(unsafe_code)]

use std::collections::HashSet;

use serde::{Deserialize, Serialize, Serializer};
use serde_json::value::RawValue;
use tokio::sync::mpsc;

use crate::harness::FRAME_BYTES_MAX;
use crate::harness::frame::repair_surrogates;

/// Longest id of a call, in bytes.
const ID_BYTES_MAX: usize = 64;
/// Longest name of a tool that a call may give, in bytes.
const NAME_BYTES_MAX: usize = 1024;
/// Deepest nesting of what is passed on: parsers of either side have a limit of their own near 128.
const DEPTH_MAX: usize = 100;
/// Longest line of a call, in bytes: the same as the Python side's bound for an input, and room for its name.
const LINE_BYTES_MAX: usize = 4 * 1024 * 1024 + 4096;
/// Largest answer, in bytes of JSON. A frame holds more than one.
const ANSWER_BYTES_MAX: usize = FRAME_BYTES_MAX / 2;

/// A JSON text on one line, without white space around its tokens, and with the order of its keys.
#[derive(Clone, Debug)]
pub struct Json(Box<RawValue>);

impl Json {
    /// `None` when it is no JSON, or nests too deeply.
    pub fn parse(text: &str) -> Option<Json> {
        let compact = compact(&repair_surrogates(text))?;
        RawValue::from_string(compact).ok().map(Json)
    }

    pub fn of(value: &RawValue) -> Option<Json> {
        Json::parse(value.get())
    }

    pub fn as_str(&self) -> &str {
        self.0.get()
    }

    pub fn is_object(&self) -> bool {
        self.as_str().starts_with('{')
    }
}

impl PartialEq for Json {
    fn eq(&self, other: &Json) -> bool {
        self.as_str() == other.as_str()
    }
}

impl Serialize for Json {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        self.0.serialize(serializer)
    }
}

/// Without white space between tokens. What is no JSON stays none. `None` when it nests too deeply.
fn compact(json: &str) -> Option<String> {
    let mut text = String::with_capacity(json.len());
    let (mut depth, mut in_string, mut escaped) = (0_usize, false, false);
    for character in json.chars() {
        match character {
            _ if escaped => escaped = false,
            '\\' if in_string => escaped = true,
            '"' => in_string = !in_string,
            _ if in_string => {}
            ' ' | '\t' | '\n' | '\r' => {
                // Two numbers stay two.
                if text.ends_with(|last: char| last.is_ascii_alphanumeric()) {
                    text.push(' ');
                }
                continue;
            }
            '{' | '[' => depth += 1,
            '}' | ']' => depth = depth.saturating_sub(1),
            _ => {}
        }
        if depth > DEPTH_MAX {
            return None;
        }
        if matches!(character, ',' | ':' | '}' | ']') && !in_string && text.ends_with(' ') {
            text.pop();
        }
        text.push(character);
    }
    text.truncate(text.trim_end_matches(' ').len());
    Some(text)
}

/// A tool, and the name of its function in the program's language.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct ToolName {
    pub name: String,
    pub function: String,
}

/// Which language tools are named in.
#[derive(Copy, Clone, Debug, PartialEq, Eq)]
pub enum ToolLanguage {
    Python,
    Bash,
}

/// Two tools would be one function.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("tools '{first}' and '{second}' have the same name in this language: {function}")]
pub struct SameFunction {
    pub first: String,
    pub second: String,
    pub function: String,
}

impl ToolLanguage {
    /// The function of a tool; empty when its name has nothing to make one of.
    pub fn function(self, name: &str) -> String {
        let joins = |character: char| {
            character == '-' || character.is_whitespace() || (character == '.' && self == ToolLanguage::Bash)
        };
        let mut function: String = name
            .chars()
            .map(|character| if joins(character) { '_' } else { character })
            .filter(|character| character.is_ascii_alphanumeric() || *character == '_')
            .collect();
        if function.starts_with(|first: char| first.is_ascii_digit()) {
            function.insert(0, '_');
        }
        let reserved = match self {
            ToolLanguage::Python => PYTHON_KEYWORDS,
            ToolLanguage::Bash => BASH_RESERVED,
        };
        let is_ours = self == ToolLanguage::Bash && function.starts_with(OURS);
        if is_ours || reserved.contains(&function.as_str()) {
            function.push_str("_tool");
        }
        function
    }

    /// All functions. Those that cannot be had are left out: nothing can call them. In Python the tool whose own name
    /// it is has the function, else the last; a Bash script with two of one name is refused.
    pub fn functions<'a>(
        self,
        names: impl IntoIterator<Item = &'a str>,
    ) -> Result<Vec<ToolName>, SameFunction> {
        let mut tools: Vec<ToolName> = Vec::new();
        for name in names {
            let function = self.function(name);
            if function.is_empty() {
                continue;
            }
            let Some(known) = tools.iter_mut().find(|tool| tool.function == function) else {
                tools.push(ToolName { name: name.to_owned(), function });
                continue;
            };
            if self == ToolLanguage::Bash && known.name != name {
                return Err(SameFunction { first: known.name.clone(), second: name.to_owned(), function });
            }
            if known.name != function {
                known.name = name.to_owned();
            }
        }
        Ok(tools)
    }
}

const PYTHON_KEYWORDS: &[&str] = &[
    "False", "None", "True", "and", "as", "assert", "async", "await", "break", "class", "continue", "def",
    "del", "elif", "else", "except", "finally", "for", "from", "global", "if", "import", "in", "is",
    "lambda", "nonlocal", "not", "or", "pass", "raise", "return", "try", "while", "with", "yield",
];

/// What our own functions begin with in Bash.
const OURS: &str = "__tools_";
/// What a function cannot be called by, and what our own functions need as it is.
const BASH_RESERVED: &[&str] = &[
    "if", "then", "else", "elif", "fi", "case", "esac", "for", "while", "until", "do", "done", "in",
    "function", "select", "time", "coproc", "declare", "typeset", "local", "readonly", "export", "unset",
    "builtin", "return",
];

/// One call that a program has made.
#[derive(Clone, Debug, PartialEq)]
pub struct ToolCall {
    /// Unique in its program's life.
    pub id: String,
    /// As it was registered, or whatever a guest has made up.
    pub name: String,
    /// An object.
    pub input: Json,
}

/// What became of it.
#[derive(Clone, Debug, PartialEq)]
pub struct ToolAnswer {
    pub id: String,
    pub outcome: Result<Json, String>,
}

/// The program's side: calls go out, answers come in.
#[derive(Debug)]
pub struct ToolPort {
    /// As many as [`CallBook`] lets through.
    pub calls: mpsc::UnboundedSender<Vec<ToolCall>>,
    pub answers: mpsc::Receiver<Vec<ToolAnswer>>,
}

/// A call as an interpreter wrote it.
#[derive(Debug, Deserialize)]
pub(super) struct CallWire {
    id: String,
    name: String,
    input: Box<RawValue>,
}

/// A call, or the answer to one that cannot be passed on.
#[derive(Clone, Debug, PartialEq)]
pub enum Called {
    Call(ToolCall),
    Unfit(ToolAnswer),
}

impl Called {
    /// `None` where nobody waits for an answer.
    pub(super) fn check(wire: CallWire) -> Option<Called> {
        let CallWire { id, name, input } = wire;
        (is_id(&id) && name.len() <= NAME_BYTES_MAX).then(|| Called::of(id, name, Json::of(&input)))
    }

    fn of(id: String, name: String, input: Option<Json>) -> Called {
        match input {
            Some(input) if input.is_object() => Called::Call(ToolCall { id, name, input }),
            _ => Called::Unfit(ToolAnswer { id, outcome: Err(NO_OBJECT.to_owned()) }),
        }
    }
}

/// Most calls of one program, answered or not, and the most bytes of them: all lie in the daemon's memory until the
/// program's caller has taken them.
pub const CALLS_MAX: usize = 10_000;
pub(super) const CALL_BYTES_MAX: usize = FRAME_BYTES_MAX;

/// The calls of one program: each id is used once, since nobody could tell the answers apart, and there are so many and
/// no more.
#[derive(Debug, Default)]
pub struct CallBook {
    used: HashSet<String>,
    unanswered: HashSet<String>,
}

/// A program has called more than one may.
#[derive(Copy, Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("a program may make {CALLS_MAX} tool calls, of {CALL_BYTES_MAX} bytes together")]
pub struct TooManyCalls;

impl CallBook {
    /// Calls that are to be passed on, and answers that are to be given at once.
    pub fn take(
        &mut self,
        made: impl IntoIterator<Item = Called>,
    ) -> Result<(Vec<ToolCall>, Vec<ToolAnswer>), TooManyCalls> {
        let (mut fit, mut unfit) = (Vec::new(), Vec::new());
        for called in made {
            match called {
                Called::Call(call) if self.used.insert(call.id.clone()) => {
                    self.unanswered.insert(call.id.clone());
                    fit.push(call);
                }
                Called::Unfit(answer) if self.used.insert(answer.id.clone()) => unfit.push(answer),
                Called::Call(_) | Called::Unfit(_) => {}
            }
            if self.used.len() > CALLS_MAX {
                return Err(TooManyCalls);
            }
        }
        Ok((fit, unfit))
    }

    /// Of these, the answers that somebody waits for.
    pub fn answered(&mut self, mut answers: Vec<ToolAnswer>) -> Vec<ToolAnswer> {
        answers.retain(|answer| self.unanswered.remove(&answer.id));
        answers
    }

    /// Whether some call waits for its answer.
    pub fn waits(&self) -> bool {
        !self.unanswered.is_empty()
    }
}

const NO_OBJECT: &str = "the input of a tool must be one JSON object";

fn is_id(id: &str) -> bool {
    let fits = |byte: u8| byte.is_ascii_alphanumeric() || byte == b'_' || byte == b'-';
    !id.is_empty() && id.len() <= ID_BYTES_MAX && id.bytes().all(fits)
}

impl ToolAnswer {
    /// The outcome, cut to what an interpreter is told.
    fn told(&self) -> Result<&str, std::borrow::Cow<'_, str>> {
        match &self.outcome {
            Ok(result) if result.as_str().len() <= ANSWER_BYTES_MAX => Ok(result.as_str()),
            Ok(result) => Err(format!(
                "the result is too large: {} of at most {ANSWER_BYTES_MAX} bytes",
                result.as_str().len()
            )
            .into()),
            Err(text) => Err(text[..text.floor_char_boundary(ANSWER_BYTES_MAX / 8)].into()),
        }
    }

    pub(super) fn to_json(&self) -> String {
        let quoted = |text: &str| serde_json::to_string(text).expect("a string always has a JSON form");
        let id = quoted(&self.id);
        match self.told() {
            Ok(result) => format!("{{\"id\":{id},\"result\":{result}}}"),
            Err(text) => format!("{{\"id\":{id},\"error\":{}}}", quoted(&text)),
        }
    }

    /// As Bash's stubs read it.
    pub fn to_line(&self) -> Vec<u8> {
        let (verdict, text) = match self.told() {
            Ok(result) => ("ok", result.to_owned()),
            Err(text) => ("error", text.replace('\0', "\u{fffd}")),
        };
        format!("{} {verdict} {}\n{text}", self.id, text.len()).into_bytes()
    }
}

/// Puts the calls of Bash's stubs together from whatever pieces their FIFO gives.
#[derive(Debug, Default)]
pub struct LineCalls {
    line: Vec<u8>,
    bytes: usize,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct LineWire {
    name: String,
    input: Box<RawValue>,
}

impl LineCalls {
    /// What a piece makes whole. Lines that no stub writes are dropped.
    pub fn take(&mut self, mut bytes: &[u8]) -> Result<Vec<Called>, TooManyCalls> {
        self.bytes += bytes.len();
        if self.bytes > CALL_BYTES_MAX {
            return Err(TooManyCalls);
        }
        let mut calls = Vec::new();
        while let Some(at) = bytes.iter().position(|byte| *byte == b'\n') {
            self.line.extend_from_slice(&bytes[..at]);
            bytes = &bytes[at + 1..];
            if self.line.len() > LINE_BYTES_MAX {
                return Err(TooManyCalls);
            }
            calls.extend(read_line(&std::mem::take(&mut self.line)));
        }
        self.line.extend_from_slice(bytes);
        if self.line.len() > LINE_BYTES_MAX { Err(TooManyCalls) } else { Ok(calls) }
    }
}

fn read_line(line: &[u8]) -> Option<Called> {
    let text = String::from_utf8_lossy(line);
    let (id, call) = text.split_once(' ')?;
    if !is_id(id) {
        return None;
    }
    let repaired = repair_surrogates(call);
    Some(match serde_json::from_str::<LineWire>(&repaired) {
        Ok(LineWire { name, input }) if name.len() <= NAME_BYTES_MAX => {
            Called::of(id.to_owned(), name, Json::of(&input))
        }
        // A stub writes nothing but a good name, so it is the script's own argument that does not fit.
        _ => Called::Unfit(ToolAnswer { id: id.to_owned(), outcome: Err(NO_OBJECT.to_owned()) }),
    })
}

/// What goes in front of a Bash script that calls tools: a function for each. `folder` holds the two FIFOs and is the
/// script's own: each call makes a FIFO for its answer there.
///
/// One process of the script's own hands the answers out, so that calls in the background wait side by side. A lock for
/// the writing is a byte in a FIFO: it needs no program, and long lines do not mix.
///
/// It is one line that ends in a semicolon, so that with the script's first line behind it every message names the
/// script's own lines.
pub fn bash_stubs(tools: &[ToolName], folder: &str) -> String {
    if tools.is_empty() {
        return String::new();
    }
    let mut text = format!("__tools_folder={}\n{BASH_STUBS}", quoted(folder));
    for ToolName { name, function } in tools {
        let name = serde_json::to_string(name).expect("a string always has a JSON form");
        text.push_str(&format!("{function}() {{ __tools_call {} \"$@\"; }}\n", quoted(&name)));
    }
    let escaped = text.replace('\\', r"\\").replace('\'', r"\'").replace('\n', r"\n");
    format!("eval $'{escaped}';")
}

/// As one word of a shell.
fn quoted(word: &str) -> String {
    format!("'{}'", word.replace('\'', r"'\''"))
}

const BASH_STUBS: &str = include_str!("../../harness/tools.sh");

#[cfg(test)]
mod tests;
