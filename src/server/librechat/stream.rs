//! `POST /exec/stream`: the same run, told as it happens.
//!
//! Server-sent events without names, each one JSON object: `session` first, `done` last, whatever becomes of the program.
//! What can be refused is refused before the stream begins. A caller that hangs up ends the run.
#![forbid(unsafe_code)]

use std::collections::VecDeque;
use std::time::Duration;

use axum::Extension;
use axum::body::Body;
use axum::extract::State;
use axum::http::{HeaderMap, HeaderValue, header};
use axum::response::Response;
use bytes::Bytes;
use futures_util::stream::unfold;
use serde_json::{Value, json};
use tokio_util::task::AbortOnDropHandle;
use tokio_util::task::task_tracker::TaskTrackerToken;
use utoipa_axum::router::OpenApiRouter;
use utoipa_axum::routes;

use super::exec::runs;
use super::refuse::{Refused, RefusedBody};
use super::wire::{self, ExecRequest, OutFileBody};
use crate::engine::{Bundle, Caller, Output, Piece, Pieces, Stream, pieces};
use crate::runs::RunDone;
use crate::server::AppState;
use crate::server::body::LargeJsonBytes;
use crate::server::crowd::{Arrived, Held, Seat, UNREAD_STREAM_BYTES};

/// The longest silence on a stream.
const KEEP_ALIVE: Duration = Duration::from_millis(if cfg!(test) { 250 } else { 5_000 });

pub(super) fn routes() -> OpenApiRouter<AppState> {
    OpenApiRouter::new().routes(routes!(stream))
}

/// Runs a program and streams what it does: `{"type":"session"}`, then `stream`, `display`, `result` and `error` as they
/// come, and `{"type":"done"}` at the end.
#[utoipa::path(
    post, path = "/exec/stream", tag = "librechat", request_body = ExecRequest,
    responses(
        (status = 200, description = "One JSON object an event", content_type = "text/event-stream", body = String),
        (status = 400, body = RefusedBody), (status = 401, body = RefusedBody), (status = 403, body = RefusedBody),
        (status = 409, body = RefusedBody), (status = 413, body = RefusedBody), (status = 422, body = RefusedBody),
        (status = 429, body = RefusedBody), (status = 503, body = RefusedBody),
    )
)]
async fn stream(
    State(state): State<AppState>,
    Extension(caller): Extension<Caller>,
    seat: Option<Extension<Seat>>,
    headers: HeaderMap,
    LargeJsonBytes(body, arrived): LargeJsonBytes,
) -> Result<Response, Refused> {
    let runs = runs(&state)?;
    let mut asked = wire::read_exec(&runs, &headers, caller, &body)?.run;
    // Not for as long as the run waits.
    drop(body);
    asked.rich = true;
    let prepared = runs.prepare(asked).await.map_err(|refused| wire::refusal(&refused))?;
    let (watcher, pieces) = pieces();
    let session = prepared.session_id().to_owned();
    // What is done and not read yet counts as its tenant's.
    let run = async move {
        let ended = prepared.run(Some(watcher), None).await;
        (ended, seat.and_then(|Extension(seat)| seat.hold(UNREAD_STREAM_BYTES)))
    };
    let live = Live {
        ready: VecDeque::from([json!({ "type": "session", "session_id": session })]),
        run: Some(AbortOnDropHandle::new(tokio::spawn(run))),
        session,
        pieces,
        _counted: state.lifecycle().enter(),
        _arrived: arrived,
    };
    let frames = unfold(live, |mut live| async move {
        let frame = live.frame().await?;
        Some((Ok::<Bytes, std::convert::Infallible>(frame), live))
    });
    let mut response = Response::new(Body::from_stream(frames));
    let headers = response.headers_mut();
    headers.insert(header::CONTENT_TYPE, HeaderValue::from_static("text/event-stream"));
    headers.insert(header::CACHE_CONTROL, HeaderValue::from_static("no-store"));
    headers.insert(header::X_CONTENT_TYPE_OPTIONS, HeaderValue::from_static("nosniff"));
    Ok(response)
}

/// A task of its own: a stream that nobody reads holds back its pieces, not the program's clock.
type Run = AbortOnDropHandle<(RunDone, Option<Held>)>;

/// A run beside its stream. Dropped with the connection, it ends the run.
struct Live {
    /// Events that can be sent now.
    ready: VecDeque<Value>,
    run: Option<Run>,
    session: String,
    pieces: Pieces,
    _counted: TaskTrackerToken,
    _arrived: Option<Arrived>,
}

impl Live {
    async fn frame(&mut self) -> Option<Bytes> {
        loop {
            if let Some(event) = self.ready.pop_front() {
                return Some(format!("data: {event}\n\n").into());
            }
            let run = self.run.as_mut()?;
            tokio::select! {
                biased;
                Some(piece) = self.pieces.recv() => self.ready.extend(piece_event(piece)),
                ended = run => {
                    self.run = None;
                    // The run has put its last pieces there on its way out.
                    while let Some(piece) = self.pieces.try_recv() {
                        self.ready.extend(piece_event(piece));
                    }
                    self.ready.extend(last_events(ended.ok().map(|(ended, _unread)| ended), &self.session));
                }
                () = tokio::time::sleep(KEEP_ALIVE) => return Some(Bytes::from_static(b": ping\n\n")),
            }
        }
    }
}

/// What a watcher sees at once. The value of the last expression and the error come with the end, once each.
fn piece_event(piece: Piece) -> Option<Value> {
    let display = |data: Bundle| json!({ "type": "display", "data": data });
    match piece {
        Piece::Output { output: Output::Stream { name, text }, .. } => {
            let name = if name == Stream::Stdout { "stdout" } else { "stderr" };
            Some(json!({ "type": "stream", "name": name, "text": text }))
        }
        Piece::Output { output: Output::DisplayData { data, .. }, .. } | Piece::Update { data, .. } => {
            Some(display(data))
        }
        Piece::Output { output: Output::ExecuteResult { .. } | Output::Error(_), .. }
        | Piece::Clear { .. } => None,
    }
}

/// `None`: our own fault; the stream ends in order all the same.
fn last_events(ended: Option<RunDone>, session: &str) -> Vec<Value> {
    let Some(done) = ended else {
        let message = "Internal error; the code may have run";
        return vec![
            json!({ "type": "error", "message": message }),
            json!({ "type": "done", "session_id": session, "files": [], "code": 1 }),
        ];
    };
    let mut events = Vec::new();
    if let Some(data) = done.result {
        events.push(json!({ "type": "result", "data": data }));
    }
    match (done.end.message(), done.error) {
        (Some(message), _) => events.push(json!({ "type": "error", "message": message })),
        (None, Some(error)) => {
            let lines: Vec<String> =
                error.traceback.iter().flat_map(|part| part.lines()).map(str::to_owned).collect();
            let lines =
                if lines.is_empty() { vec![format!("{}: {}", error.ename, error.evalue)] } else { lines };
            events.push(json!({ "type": "error", "traceback": lines }));
        }
        (None, None) => {}
    }
    let files: Vec<OutFileBody> = done.files.into_iter().map(OutFileBody::from).collect();
    events.push(json!({ "type": "done", "session_id": session, "files": files, "code": done.end.code() }));
    events
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::runs::RunEnd;

    fn done(end: RunEnd) -> RunDone {
        RunDone {
            session: "s".repeat(21),
            stdout: String::new(),
            stderr: String::new(),
            end,
            files: Vec::new(),
            deleted: Vec::new(),
            delivery: Default::default(),
            wall: Duration::ZERO,
            runtime: None,
            result: None,
            error: None,
        }
    }

    fn kinds(events: &[Value]) -> Vec<&str> {
        events.iter().map(|event| event["type"].as_str().unwrap()).collect()
    }

    #[test]
    fn every_stream_ends_with_done_and_once() {
        assert_eq!(kinds(&last_events(None, "s")), ["error", "done"]);
        assert_eq!(kinds(&last_events(Some(done(RunEnd::Exited(3))), "s")), ["done"]);
        let events = last_events(Some(done(RunEnd::TimeLimit)), "s");
        assert_eq!(kinds(&events), ["error", "done"]);
        assert_eq!(events[0]["message"], "Time limit exceeded");
        assert_eq!(events[1]["code"], 137);
    }
}
