//! What a kernel publishes besides text, and how a cell's list of outputs comes of it: an update replaces what it
//! updates, a clearing takes away what came before.
#![forbid(unsafe_code)]

use serde_json::Value;

use crate::engine::{Bundle, ErrorOutput, Output};

/// What an output counts at least against a cell's cap, in characters: an empty one costs memory too.
const CHARS_LEAST: usize = 64;

/// One thing that a kernel has published.
#[derive(Clone, Debug, PartialEq)]
pub enum Rich {
    /// `id` lets later updates name it.
    Display {
        data: Bundle,
        metadata: Bundle,
        id: Option<String>,
    },
    /// New content for everything that is shown under `id`.
    Update {
        data: Bundle,
        metadata: Bundle,
        id: String,
    },
    Result {
        data: Bundle,
        metadata: Bundle,
    },
    Error(ErrorOutput),
    /// Takes away all outputs so far; with `wait` only when the next one comes.
    Clear {
        wait: bool,
    },
    /// Something was larger than all that a cell may publish.
    Dropped,
}

impl Rich {
    /// What it counts against the cell's cap, in characters.
    pub(super) fn chars(&self) -> usize {
        match self {
            Rich::Display { data, metadata, id } => {
                let name = id.as_ref().map_or(0, |id| id.chars().count());
                CHARS_LEAST.max(name + chars_of(data) + chars_of(metadata))
            }
            Rich::Update { data, metadata, id } => {
                CHARS_LEAST.max(id.chars().count() + chars_of(data) + chars_of(metadata))
            }
            Rich::Result { data, metadata } => CHARS_LEAST.max(chars_of(data) + chars_of(metadata)),
            Rich::Error(error) => {
                let lines: usize = error.traceback.iter().map(|line| 1 + line.chars().count()).sum();
                CHARS_LEAST.max(error.ename.chars().count() + error.evalue.chars().count() + lines)
            }
            Rich::Clear { .. } | Rich::Dropped => CHARS_LEAST,
        }
    }
}

fn chars_of(bundle: &Bundle) -> usize {
    bundle.iter().map(|(key, value)| key.chars().count() + chars_of_value(value)).sum()
}

/// The depth is bounded by the JSON reader's.
fn chars_of_value(value: &Value) -> usize {
    match value {
        Value::String(text) => text.chars().count(),
        // Not less than what they take in memory would be worth: a limit in characters is one of memory too.
        Value::Array(values) => 8 + values.iter().map(|value| 1 + chars_of_value(value)).sum::<usize>(),
        Value::Object(map) => 64 + chars_of(map),
        Value::Null | Value::Bool(_) | Value::Number(_) => 8,
    }
}

/// What stands in the order of arrivals for something published.
#[derive(Clone, Debug, PartialEq)]
pub(super) enum Mark {
    /// Boxed: of a text that alternates between two streams there are many arrivals.
    Output {
        output: Box<Output>,
        chars: usize,
    },
    Clear {
        wait: bool,
    },
    /// Folded into an earlier output, taken away again, or over the cap.
    Nothing,
}

impl Mark {
    /// The output for something that is shown; `None` for what is none.
    /// `chars` is what it counts.
    pub(super) fn of(rich: Rich, chars: usize, execution_count: u64) -> Option<Mark> {
        let output = match rich {
            // What an update is to update was in another cell's reply, or nowhere: shown anew it is at least not lost.
            Rich::Display { data, metadata, .. } | Rich::Update { data, metadata, .. } => {
                Output::DisplayData { data, metadata }
            }
            Rich::Result { data, metadata } => Output::ExecuteResult { data, metadata, execution_count },
            Rich::Error(error) => Output::Error(error),
            Rich::Clear { .. } | Rich::Dropped => return None,
        };
        Some(Mark::Output { output: Box::new(output), chars })
    }

    pub(super) fn chars(&self) -> usize {
        match self {
            Mark::Output { chars, .. } => *chars,
            Mark::Clear { .. } | Mark::Nothing => 0,
        }
    }

    /// Takes the output away; returns the characters it held.
    pub(super) fn take_away(&mut self) -> usize {
        let chars = self.chars();
        if chars > 0 {
            *self = Mark::Nothing;
        }
        chars
    }
}

/// The list of outputs while it is put together.
#[derive(Debug, Default)]
pub(super) struct Folded {
    pub(super) outputs: Vec<Output>,
    clears_at_next: bool,
}

impl Folded {
    pub(super) fn mark(&mut self, mark: Mark) {
        match mark {
            Mark::Output { output, .. } => {
                self.make_room();
                self.outputs.push(*output);
            }
            Mark::Clear { wait: false } => self.outputs.clear(),
            Mark::Clear { wait: true } => self.clears_at_next = true,
            Mark::Nothing => {}
        }
    }

    /// Something is about to be shown.
    pub(super) fn make_room(&mut self) {
        if std::mem::take(&mut self.clears_at_next) {
            self.outputs.clear();
        }
    }
}
