//! The line protocol to an interpreter over its two control pipes.
//!
//! One JSON object a line, UTF-8, `\n`-terminated, never larger than [`FRAME_BYTES_MAX`]; empty lines are no frames, and
//! an interpreter sends one before each frame, to end what its cell may have written. What one request may send has a
//! bound in bytes, and each line counts for at least [`LINE_BYTES_LEAST`] of them: a flood of small ones is none longer. Descriptors in the
//! interpreter: 0 `/dev/null`, 1 and 2 capture pipes, **3 requests (read), 4 events (write)**; 3 and 4 are
//! close-on-exec. The daemon writes to 3 and reads from 4, 1 and 2.
//!
//! Daemon to interpreter:
//!
//! ```text
//! {"nonce":"N","code":"…","timeout_ms":30000}                    run a cell; a kernel is told its number too: "count":3
//! {"nonce":"N","setup":{"cwd":"/home/sandbox"},"code":"…",…}      first frame: chdir before the cell
//! {"nonce":"N","warm":"print(1)"}                                 throw-away evaluation in a namespace of its own
//! {"nonce":"N","warm":"print(1)","programs":true}                 the same, and once more as a program
//! {"nonce":"N","program":{"code":"…","args":["a"],"typescript":true|absent,
//!  "tools":[{"name":"get-weather","function":"get_weather"}]|absent},"timeout_ms":N}            run a program, once
//! {"nonce":"N","answers":[{"id":"call_001","result":…}|{"id":"…","error":"text"}]}              while it runs
//! ```
//!
//! `setup`, `warm`, `program` and `code` are each optional; the order of work is setup, warm, program or code. A cell
//! may have `"argv":["a"]` (Python only): a run's, at whose end every other process of the sandbox is ended. `"kernel":true` in any of
//! them makes the interpreter a kernel, for good (Python only). Interpreter to daemon,
//! every frame with the nonce of the request it belongs to:
//!
//! ```text
//! {"nonce":"N","event":"display","data":{…},"metadata":{…},"id":"I"|absent}   any number of these six, of a kernel
//! {"nonce":"N","event":"update","data":{…},"metadata":{…},"id":"I"}
//! {"nonce":"N","event":"result","data":{…},"metadata":{…}}
//! {"nonce":"N","event":"error","error":{…}}
//! {"nonce":"N","event":"clear","wait":true|false}
//! {"nonce":"N","event":"dropped"}                 something was larger than all that a cell may publish
//! {"nonce":"N","event":"done","result":"21"|null,"error":{"ename","evalue","traceback":[…]}|null,
//!  "order":[["o",12],["e",5],["r",1],["o",3]], "refused":{"what":"cwd","errno":2}|absent}
//! {"nonce":"N","event":"call","calls":[{"id":"call_001","name":"get-weather","input":{…}}]}     of a program with tools
//! {"nonce":"N","event":"done","exit":7}                                                         the end of a program
//! ```
//!
//! A program is run as a fresh interpreter would run a file of that text, and ends its interpreter. One that really
//! exits, or has closed descriptor 4, sends no `done`: the launcher tells its status.
//!
//! Each of the six, `dropped` apart, may have `"at":[12,3,5,0,T,U]`, its place among the text: how many bytes of
//! descriptor 1 the interpreter had written in this cell and how many lay in that pipe, unread and whoever wrote them;
//! the same of 2; and before and after what time that was so, in nanoseconds of `CLOCK_MONOTONIC`.
//!
//! `result` is the text/plain form of the last expression. `order` says in which order the interpreter itself
//! wrote how many bytes to descriptors 1 (`o`) and 2 (`e`) and sent how many of the six (`r`; not `dropped`); an
//! error of a kernel's cell has been sent as an event when `done` names it. Neighbours of one kind are merged and the list is
//! capped at [`ORDER_ENTRIES_MAX`], after which it is left out. Streams are **not** in the frames: `sys.stdout`
//! writes go straight to descriptor 1, so output of child processes and C code falls in place between them. All
//! bytes of a cell are in the pipes before its `done` frame is written, so the daemon drains both pipes without
//! blocking when it has read `done`.
//!
//! Every byte from 4, 1 and 2 is guest-controlled. A frame with another nonce is dropped; `status`,
//! `execution_count`, `exit_code`, session id and timing are the daemon's own.
#![forbid(unsafe_code)]

pub mod capture;
mod feed;
pub mod frame;
pub mod interpreter;
pub mod outcome;
pub(crate) mod pace;
pub mod program;
pub mod rich;
pub mod tools;

#[cfg(test)]
pub(crate) mod fake;

/// Largest frame in either direction, in bytes.
pub const FRAME_BYTES_MAX: usize = 16 * 1024 * 1024;
/// What a line from an interpreter counts at least, in bytes of what its request may send: one costs us more than its length.
pub const LINE_BYTES_LEAST: usize = 512;
/// Most of the six that one cell may publish; the rest is left out, with a note. `harness/kernel.py` has the same number.
pub const PUBLISHED_MAX: usize = 60_000;
/// Longest name of a display, in bytes, and most names of one cell. Under any other it cannot be updated.
pub const DISPLAY_NAME_BYTES_MAX: usize = 1_000;
pub const DISPLAY_NAMES_MAX: usize = 10_000;
/// Most entries of `order` in a `done` frame.
pub const ORDER_ENTRIES_MAX: usize = 10_000;
