//! A cell whose outputs are sent while it runs: an extension of ours for `POST /v2/code/execute`.
//!
//! Asked for by `Accept: text/event-stream` or `application/x-ndjson`. Each event is one JSON object; on the event
//! stream its `event` is also the event's name. What was refused before anything ran is answered as always, with its
//! status, as long as that is known within [`KEEP_ALIVE`].
//!
//! ```text
//! {"event":"output","output":{…as in `outputs`…},"display_id":"I"|absent}
//! {"event":"update","display_id":"I","data":{…},"metadata":{…}}
//! {"event":"clear","wait":false}
//! {"event":"ping"}                               nothing for 5 s; a comment on the event stream
//! {"event":"done","success":true,"message":"ok","data":{…the whole answer…},"hint":null}        the last one
//! {"event":"refused","status":429,"success":false,"message":"…",…}                              or this
//! ```
#![forbid(unsafe_code)]

use std::time::Duration;

use axum::body::Body;
use axum::http::{HeaderMap, HeaderValue, header};
use axum::response::Response;
use bytes::Bytes;
use futures_util::stream::unfold;
use serde::Serialize;
use serde_json::{Value, json};
use tokio_util::task::AbortOnDropHandle;
use tokio_util::task::task_tracker::TaskTrackerToken;

use super::refuse::{self, Generation};
use super::wire::{ExecuteDataV2, OutputV2};
use super::{Panicked, broken, envelope, uninterrupted};
use crate::engine::{CellRequest, Execution, Piece, Pieces, Refusal, pieces};
use crate::server::AppState;
use crate::server::crowd::{Held, Seat, UNREAD_STREAM_BYTES};

/// The longest silence on a stream, and the longest that a refusal is waited for before the stream begins.
/// Its own tests do not wait so long.
pub(super) const KEEP_ALIVE: Duration = Duration::from_millis(if cfg!(test) { 250 } else { 5_000 });

/// How the events are written.
#[derive(Copy, Clone, Debug, PartialEq, Eq)]
pub(super) enum Format {
    EventStream,
    Lines,
}

impl Format {
    /// What the caller asks for by name; `None` for the plain answer.
    pub(super) fn asked(headers: &HeaderMap) -> Option<Format> {
        let accepts = headers.get_all(header::ACCEPT).iter().filter_map(|value| value.to_str().ok());
        let mut types = accepts.flat_map(|value| value.split(','));
        types.find_map(|part| match part.split(';').next().unwrap_or_default().trim() {
            "text/event-stream" => Some(Format::EventStream),
            "application/x-ndjson" => Some(Format::Lines),
            _ => None,
        })
    }

    fn media_type(self) -> HeaderValue {
        HeaderValue::from_static(match self {
            Format::EventStream => "text/event-stream",
            Format::Lines => "application/x-ndjson",
        })
    }

    fn write(self, event: &Value) -> Bytes {
        match self {
            Format::EventStream => {
                let name = event["event"].as_str().unwrap_or_default();
                format!("event: {name}\ndata: {event}\n\n").into()
            }
            Format::Lines => format!("{event}\n").into(),
        }
    }

    fn ping(self) -> Bytes {
        match self {
            Format::EventStream => Bytes::from_static(b": keep-alive\n\n"),
            Format::Lines => self.write(&json!({ "event": "ping" })),
        }
    }
}

/// A task of its own: a stream that nobody reads holds back its pieces, not the cell's clock.
type Run = AbortOnDropHandle<(Result<Execution, Refusal>, Option<Held>)>;

/// A cell that runs beside its stream. Dropped with the connection, it ends a one-off.
struct Live {
    format: Format,
    run: Option<Run>,
    pieces: Pieces,
    /// Read ahead of the stream.
    first: Option<Step>,
    _counted: TaskTrackerToken,
}

enum Step {
    Piece(Piece),
    Ended(Result<Execution, Refusal>),
    Silence,
}

/// Runs the cell and answers with its stream, or with a refusal.
pub(super) async fn execute(
    state: &AppState,
    mut cell: CellRequest,
    format: Format,
    seat: Option<Seat>,
) -> Response {
    let (watcher, pieces) = pieces();
    cell.watcher = Some(watcher);
    let (language, code) = (cell.language, cell.code.clone());
    let engine = state.code_handle();
    let run = async move {
        let outcome = uninterrupted(engine.execute(cell)).await;
        let ended = outcome.unwrap_or_else(|Panicked| Ok(broken(language, code)));
        (ended, seat.and_then(|seat| seat.hold(UNREAD_STREAM_BYTES)))
    };
    let counted = state.lifecycle().enter();
    let run = AbortOnDropHandle::new(tokio::spawn(run));
    let mut live = Live { format, run: Some(run), pieces, first: None, _counted: counted };
    match live.step().await {
        Step::Ended(Err(refusal)) => return refuse::refusal(refusal, Generation::V2),
        first => live.first = Some(first),
    }
    let frames = unfold(live, |mut live| async move {
        let frame = live.frame().await?;
        Some((Ok::<Bytes, std::convert::Infallible>(frame), live))
    });
    let mut response = Response::new(Body::from_stream(frames));
    let headers = response.headers_mut();
    headers.insert(header::CONTENT_TYPE, format.media_type());
    headers.insert(header::CACHE_CONTROL, HeaderValue::from_static("no-store"));
    headers.insert(header::X_CONTENT_TYPE_OPTIONS, HeaderValue::from_static("nosniff"));
    response
}

impl Live {
    /// What happens next. Pieces that are there come before the end.
    async fn step(&mut self) -> Step {
        let Some(run) = &mut self.run else { return std::future::pending().await };
        tokio::select! {
            biased;
            Some(piece) = self.pieces.recv() => Step::Piece(piece),
            // It does not panic; without a runtime the daemon is at its end.
            ended = run => Step::Ended(ended.map_or(Err(Refusal::ShuttingDown), |(ended, _unread)| ended)),
            () = tokio::time::sleep(KEEP_ALIVE) => Step::Silence,
        }
    }

    async fn frame(&mut self) -> Option<Bytes> {
        self.run.as_ref()?;
        let step = match self.first.take() {
            Some(first) => first,
            None => self.step().await,
        };
        let event = match step {
            Step::Silence => return Some(self.format.ping()),
            Step::Piece(piece) => piece_event(piece),
            Step::Ended(ended) => {
                self.run = None;
                let mut frames = Vec::new();
                // The run has put its last pieces there on its way out.
                while let Some(piece) = self.pieces.try_recv() {
                    frames.extend_from_slice(&self.format.write(&piece_event(piece)));
                }
                frames.extend_from_slice(&self.format.write(&last_event(ended)));
                return Some(frames.into());
            }
        };
        Some(self.format.write(&event))
    }
}

fn piece_event(piece: Piece) -> Value {
    match piece {
        Piece::Output { output, display_id } => {
            let mut event = json!({ "event": "output", "output": OutputV2::from(output) });
            if let Some(id) = display_id {
                event["display_id"] = Value::String(id);
            }
            event
        }
        Piece::Update { display_id, data, metadata } => {
            json!({ "event": "update", "display_id": display_id, "data": data, "metadata": metadata })
        }
        Piece::Clear { wait } => json!({ "event": "clear", "wait": wait }),
    }
}

fn last_event(ended: Result<Execution, Refusal>) -> Value {
    #[derive(Serialize)]
    struct Named<T> {
        event: &'static str,
        #[serde(flatten)]
        body: T,
    }
    match ended {
        Ok(execution) => {
            let body = envelope::<ExecuteDataV2>(execution);
            serde_json::to_value(Named { event: "done", body })
        }
        Err(refusal) => {
            let (status, message) = (refuse::status(&refusal).as_u16(), refusal.to_string());
            let hint = "nothing was started";
            let body =
                json!({ "status": status, "success": false, "message": message, "data": null, "hint": hint });
            serde_json::to_value(Named { event: "refused", body })
        }
    }
    .expect("our bodies have string keys and no failing parts")
}
