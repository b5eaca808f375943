//! A run as it happens: one JSON object a line.
//!
//! Frames: `started`, `output`, `gap`, `ping`, then `exit` or `error`. What a slow reader has not fetched is given up like
//! any output, and told as a gap; nothing is queued for it.
#![forbid(unsafe_code)]

use std::convert::Infallible;
use std::time::Duration;

use axum::body::Body;
use axum::http::{HeaderValue, StatusCode, header};
use axum::response::Response;
use base64::Engine as _;
use base64::engine::general_purpose::STANDARD;
use bytes::Bytes;
use futures_util::stream::unfold;
use serde_json::{Value, json};
use tokio::time::{Instant, timeout, timeout_at};

use super::wire::status;
use super::{Waits, hint};
use crate::commands::{Part, Running, Status};

pub(super) const MEDIA_TYPE: &str = "application/x-ndjson";
/// Most bytes of output in a frame.
const FRAME_BYTES_MAX: usize = 64 * 1024;
/// A stream without output says so often that somebody is there.
const PING_EVERY: Duration = Duration::from_secs(5);

pub(super) fn answer(mut running: Running, waits: Waits) -> Response {
    // An asynchronous command outlives its reader; any other is killed with the stream, by `running`.
    if waits == Waits::No {
        running.let_go();
    }
    let deadline = match waits {
        Waits::AtMost(time) => Some(Instant::now() + time),
        Waits::ForTheEnd | Waits::No => None,
    };
    let teller = Teller { running, deadline, stdout: 0, stderr: 0, seq: 0, phase: Phase::Begins };
    let lines = unfold(teller, |mut teller| async move {
        let lines = teller.next().await?;
        Some((Ok::<Bytes, Infallible>(lines.into()), teller))
    });
    let mut response = Response::new(Body::from_stream(lines));
    *response.status_mut() = StatusCode::OK;
    let headers = response.headers_mut();
    headers.insert(header::CONTENT_TYPE, HeaderValue::from_static(MEDIA_TYPE));
    headers.insert(header::CACHE_CONTROL, HeaderValue::from_static("no-store"));
    headers.insert(header::X_CONTENT_TYPE_OPTIONS, HeaderValue::from_static("nosniff"));
    response
}

struct Teller {
    running: Running,
    /// When the stream ends although the command does not.
    deadline: Option<Instant>,
    /// What has been told of each stream.
    stdout: u64,
    stderr: u64,
    seq: u64,
    phase: Phase,
}

#[derive(Copy, Clone, PartialEq, Eq)]
enum Phase {
    Begins,
    Tells,
    Over,
}

impl Teller {
    /// The next lines; `None` after the last.
    async fn next(&mut self) -> Option<Vec<u8>> {
        match self.phase {
            Phase::Begins => {
                self.phase = Phase::Tells;
                let command = &self.running.command;
                Some(line(&json!({
                    "type": "started",
                    "command_id": command.id,
                    "session_id": command.session().as_str(),
                    "command": command.text,
                })))
            }
            Phase::Tells => Some(self.tell().await),
            Phase::Over => None,
        }
    }

    async fn tell(&mut self) -> Vec<u8> {
        let command = std::sync::Arc::clone(&self.running.command);
        let news = command.news(self.stdout, self.stderr);
        let is_late = match self.deadline {
            Some(deadline) => timeout_at(deadline.min(Instant::now() + PING_EVERY), news).await.is_err(),
            None => timeout(PING_EVERY, news).await.is_err(),
        };
        let read = command.read(self.stdout, self.stderr, FRAME_BYTES_MAX);
        let mut lines = self.output("stdout", &read.stdout, self.stdout);
        lines.extend(self.output("stderr", &read.stderr, self.stderr));
        (self.stdout, self.stderr) = (read.stdout.end, read.stderr.end);
        let is_told = lines.is_empty();
        let has_passed = self.deadline.is_some_and(|deadline| deadline <= Instant::now());
        if (is_told && read.outlook.status != Status::Running) || has_passed {
            self.phase = Phase::Over;
            // Ended or out of time: either way nothing is to be killed for a reader who has all there is.
            self.running.let_go();
            let hint = hint(&self.running, &read.outlook);
            let status = status(&read.outlook);
            lines.extend(line(&match read.outlook.reason {
                Some(message) => json!({"type": "error", "message": message, "status": status, "exit_code": read.outlook.exit_code}),
                None => json!({
                    "type": "exit",
                    "status": status,
                    "exit_code": read.outlook.exit_code,
                    "offset": self.stdout,
                    "stderr_offset": self.stderr,
                    "hint": hint,
                }),
            }));
        } else if is_told && is_late {
            lines.extend(line(&json!({"type": "ping"})));
        }
        lines
    }

    fn output(&mut self, stream: &str, part: &Part, told: u64) -> Vec<u8> {
        let mut lines = Vec::new();
        if part.gap {
            lines.extend(line(&json!({"type": "gap", "stream": stream, "from": told, "to": part.start})));
        }
        if !part.bytes.is_empty() {
            lines.extend(line(&json!({
                "type": "output",
                "stream": stream,
                "data": STANDARD.encode(&part.bytes),
                "offset": part.start,
                "seq": self.seq,
            })));
            self.seq += 1;
        }
        lines
    }
}

fn line(frame: &Value) -> Vec<u8> {
    let mut line = frame.to_string().into_bytes();
    line.push(b'\n');
    line
}
