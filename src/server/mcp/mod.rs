//! The MCP server: tools over runs and their files, for clients that speak the Model Context Protocol.
//!
//! ```text
//! POST, GET, DELETE /mcp ─▶ whose session is it? ─▶ rmcp (transport, protocol) ─▶ Handler ─▶ Runs, Objects
//! caisson mcp: stdin, stdout ───────────────────▶ rmcp ─────────────────────▶ Handler ─▶ Runs, Objects
//! ```
//!
//! Until revision 2025-11-25 the protocol has sessions of its own: each has a workspace and an interpreter, which go
//! with it. From 2026-07-28 on every request over HTTP stands alone, and a client names the session it means. Whoever asks
//! is the [`Caller`] that the layers in front have found; a session's name leads to the caller's own sessions only.
#![forbid(unsafe_code)]

use std::sync::Arc;
use std::time::Duration;

use axum::Extension;
use axum::body::{Body, HttpBody};
use axum::extract::{Request, State};
use axum::http::{Method, StatusCode, header};
use axum::response::Response;
use bytes::Bytes;
use http_body_util::{BodyExt, Full, Limited};
use rmcp::model::RequestId;
use rmcp::transport::streamable_http_server::{StreamableHttpServerConfig, StreamableHttpService};
use serde_json::{Value, json};
use tokio_util::sync::CancellationToken;
use utoipa::IntoResponses;
use utoipa_axum::router::OpenApiRouter;
use utoipa_axum::routes;

use crate::config::Config;
use crate::engine::Caller;
use crate::server::AppState;
use crate::server::answer::json;
use crate::server::body::{LARGE_JSON_BYTES_MAX, LargeJsonBytes, read_large};

mod content;
mod files;
mod handler;
mod notify;
mod place;
mod resources;
mod run;
mod sessions;
mod stdio;
mod tools;

pub use stdio::serve_stdio;

use handler::Handler;
use sessions::{ASKING, Asking, Sessions};

/// Names the session of a request, from one to the next.
pub(super) const SESSION_HEADER: &str = "mcp-session-id";
/// Longest refusal of the transport that is passed on, in bytes.
const REFUSAL_BYTES_MAX: usize = 64 * 1024;
/// Most values of a message: as a tree each takes far more memory than as text.
const VALUES_MAX: usize = 100_000;
/// How long results have from the end of their run to their stream, when the daemon stops.
const LAST_WORDS: Duration = Duration::from_millis(250);
/// JSON-RPC's number for what a server refuses for reasons of its own.
const SERVER_ERROR: i32 = -32_000;

/// What every request of this family shares.
pub(super) struct Mcp {
    service: StreamableHttpService<Handler, Sessions>,
    sessions: Arc<Sessions>,
    closing: CancellationToken,
}

impl Mcp {
    pub(super) fn new(config: &Config) -> Mcp {
        let sessions = Arc::new(Sessions::new(config));
        let closing = CancellationToken::new();
        // Hosts and origins are looked at before anything comes here, and in one place for all families.
        let settings = StreamableHttpServerConfig::default()
            .disable_allowed_hosts()
            .with_json_response(true)
            .with_max_request_body_bytes(LARGE_JSON_BYTES_MAX)
            .with_cancellation_token(closing.clone());
        let service = StreamableHttpService::new(Handler::asked, Arc::clone(&sessions), settings);
        Mcp { service, sessions, closing }
    }

    /// Ends every session and stream. What they ran has ended before, and its result is on its way.
    pub(super) async fn close(&self) {
        if !self.sessions.is_empty() {
            tokio::time::sleep(LAST_WORDS).await;
        }
        self.closing.cancel();
    }
}

pub(super) fn routes() -> OpenApiRouter<AppState> {
    OpenApiRouter::new().routes(routes!(message)).routes(routes!(listen)).routes(routes!(leave))
}

/// What every route refuses.
#[derive(IntoResponses)]
#[expect(dead_code, reason = "the document's list of what a route may answer")]
enum SessionRefusals {
    #[response(status = 401, description = "No good credential")]
    NoCredential(Value),
    #[response(status = 404, description = "No such session, or it has ended")]
    NoSession(Value),
}

/// One message of the Model Context Protocol (streamable HTTP). The answer to a request is JSON or a stream of events.
#[utoipa::path(
    post, path = "/mcp", tag = "mcp", request_body = Object,
    params(
        ("Mcp-Session-Id" = Option<String>, Header, description = "Of a session that `initialize` began"),
        ("MCP-Protocol-Version" = Option<String>, Header, description = "The revision that was agreed on"),
    ),
    responses(
        (status = 200, description = "The answer: JSON, or events with one message each", body = Object),
        (status = 202, description = "A notification, taken"),
        (status = 400, description = "No message, or one without its session", body = Object),
        SessionRefusals,
        (status = 413, description = "More than 50 MiB", body = Object),
        (status = 429, description = "Too many sessions", body = Object),
    )
)]
async fn message(State(state): State<AppState>, caller: Extension<Caller>, request: Request) -> Response {
    serve(state, caller.0, request).await
}

/// Messages of a session that answer no request.
#[utoipa::path(
    get, path = "/mcp", tag = "mcp",
    params(("Mcp-Session-Id" = String, Header, description = "The session")),
    responses(
        (status = 200, description = "Events with one message each", content_type = "text/event-stream", body = String),
        SessionRefusals,
    )
)]
async fn listen(State(state): State<AppState>, caller: Extension<Caller>, request: Request) -> Response {
    serve(state, caller.0, request).await
}

/// Ends a session: what it runs, its variables and its files.
#[utoipa::path(
    delete, path = "/mcp", tag = "mcp",
    params(("Mcp-Session-Id" = String, Header, description = "The session")),
    responses(
        (status = 204, description = "It is over"),
        SessionRefusals,
    )
)]
async fn leave(State(state): State<AppState>, caller: Extension<Caller>, request: Request) -> Response {
    serve(state, caller.0, request).await
}

async fn serve(state: AppState, caller: Caller, request: Request) -> Response {
    let (mcp, head_only) = (state.mcp(), request.method() != Method::POST);
    let is_end = request.method() == Method::DELETE;
    let in_session = request.headers().contains_key(SESSION_HEADER);
    // Unknown, ended and somebody else's look the same.
    if in_session && !mcp.sessions.are_of(request.headers(), &caller) {
        return refused(StatusCode::NOT_FOUND, "Session not found");
    }
    let (mut parts, body) = request.into_parts();
    let LargeJsonBytes(bytes, arrived) = match head_only {
        true => LargeJsonBytes(Bytes::new(), None),
        false => match read_large(&parts, body).await {
            Ok(read) => read,
            Err(unread) => return unread,
        },
    };
    if has_too_many_values(&bytes) {
        let message = format!("A message must not hold more than {VALUES_MAX} values");
        return refused(StatusCode::BAD_REQUEST, &message);
    }
    // Goes with the message, for as long as it is worked on.
    parts.extensions.insert(arrived.map(Arc::new));
    let request = Request::from_parts(parts, Full::new(bytes));
    let asking = Asking::new(state.clone(), caller);
    let (answer, refusal, started) = ASKING
        .scope(asking, async {
            let answer = mcp.service.handle(request).await;
            (answer, ASKING.with(Asking::refused), ASKING.with(Asking::started))
        })
        .await;
    if let Some((status, message)) = refusal {
        return refused(status, &message);
    }
    let mut answer = answer.map(Body::new);
    if is_end && answer.status() == StatusCode::ACCEPTED {
        // It is over, and not about to be.
        *answer.status_mut() = StatusCode::NO_CONTENT;
    }
    if answer.status().is_client_error() || answer.status().is_server_error() {
        return in_json(answer, in_session, started).await;
    }
    answer
}

/// Looks at a message before the transport makes a tree of it. Each value but the first stands behind a comma, or in
/// front of the others in a list or an object.
fn has_too_many_values(json: &[u8]) -> bool {
    let (mut values, mut in_string, mut escaped) = (0_usize, false, false);
    for byte in json {
        match byte {
            _ if escaped => escaped = false,
            b'\\' if in_string => escaped = true,
            b'"' => in_string = !in_string,
            b',' | b'[' | b'{' if !in_string => values += 1,
            _ => {}
        }
    }
    values > VALUES_MAX
}

/// What the transport refuses with a sentence, as an error that any client of the protocol reads.
async fn in_json(answer: Response, in_session: bool, started: Option<RequestId>) -> Response {
    let is_json = answer.headers().get(header::CONTENT_TYPE).is_some_and(|it| it == "application/json");
    if is_json || answer.body().is_end_stream() {
        return answer;
    }
    let status = answer.status();
    if status.is_server_error() {
        return match (in_session, started) {
            // It ended between two looks at it.
            (true, _) => refused(StatusCode::NOT_FOUND, "Session not found"),
            // Clients repeat what was answered with a 5xx.
            (false, Some(id)) => {
                failed(StatusCode::OK, json!(id), "The answer was lost; the code may have run")
            }
            (false, None) => {
                refused(StatusCode::SERVICE_UNAVAILABLE, "The request could not be served; try again")
            }
        };
    }
    let read = Limited::new(answer.into_body(), REFUSAL_BYTES_MAX).collect().await;
    let text = read.map(|whole| String::from_utf8_lossy(&whole.to_bytes()).into_owned());
    refused(status, &text.unwrap_or_else(|_| status.to_string()))
}

fn refused(status: StatusCode, message: &str) -> Response {
    tracing::info!(status = status.as_u16(), message, "request refused");
    failed(status, Value::Null, message)
}

fn failed(status: StatusCode, id: Value, message: &str) -> Response {
    json(status, &json!({"jsonrpc": "2.0", "id": id, "error": {"code": SERVER_ERROR, "message": message}}))
}

#[cfg(test)]
mod tests {
    use serde_json::Map;

    use super::place::Link;
    use super::*;

    #[test]
    fn the_values_of_a_message_are_counted_before_it_is_read() {
        let list = |count: usize| serde_json::to_vec(&vec![1; count]).expect("JSON");
        assert!(!has_too_many_values(&list(VALUES_MAX)) && has_too_many_values(&list(VALUES_MAX + 1)));
        assert!(has_too_many_values(format!("[{}1]", "[],".repeat(VALUES_MAX)).as_bytes()));
        let fields: Map<String, Value> = (0..=VALUES_MAX).map(|n| (n.to_string(), Value::Null)).collect();
        assert!(has_too_many_values(&serde_json::to_vec(&fields).expect("JSON")));
        // Text is one value, whatever is in it.
        for text in [",[{", "\\\",", "\\", "\",\\\\\""] {
            let text = serde_json::to_vec(&[text.repeat(VALUES_MAX)]).expect("JSON");
            assert!(!has_too_many_values(&text));
        }
    }

    #[tokio::test]
    async fn an_answer_that_is_lost_is_no_reason_to_run_its_code_again() {
        let lost = || {
            let mut answer = Response::new(Body::from("empty response"));
            *answer.status_mut() = StatusCode::INTERNAL_SERVER_ERROR;
            answer
        };
        let read = async |answer: Response| {
            let status = answer.status().as_u16();
            let body = answer.into_body().collect().await.expect("it is whole").to_bytes();
            (status, serde_json::from_slice::<Value>(&body).expect("JSON"))
        };
        let link = Link::default();
        assert_eq!(read(in_json(lost(), false, link.started().cloned()).await).await.0, 503);
        link.start(&RequestId::Number(7));
        let (status, body) = read(in_json(lost(), false, link.started().cloned()).await).await;
        assert_eq!((status, &body["id"]), (200, &json!(7)));
        assert_eq!(body["error"]["message"], "The answer was lost; the code may have run");
        assert_eq!(read(in_json(lost(), true, None).await).await.0, 404);
    }
}
