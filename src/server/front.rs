//! What happens to every request before a route is chosen: the key leaves the URL, the request gets
//! its id and span, a daemon that is shutting down says so, and an open one looks at who is asking.
#![forbid(unsafe_code)]

use std::any::Any;

use axum::extract::{Request, State};
use axum::http::{HeaderMap, HeaderValue, header};
use axum::middleware::Next;
use axum::response::Response;
use tracing::Instrument;
use uuid::Uuid;

use super::answer::Refused;
use super::{AppState, auth, request_log};
use crate::telemetry;

/// Headers a caller may name its request in, the first that fits wins.
const ID_HEADERS: [&str; 4] = ["x-tt-logid", "x-logid", "x-log-id", "x-request-id"];
/// Where the answer says it.
pub(crate) const ID_HEADER: &str = "x-tt-logid";
const ID_BYTES_MAX: usize = 128;
/// When a caller may try again after the daemon went away.
const RETRY_AFTER_SECS: HeaderValue = HeaderValue::from_static("1");

/// The outermost layer.
pub(super) async fn front(State(state): State<AppState>, mut request: Request, next: Next) -> Response {
    // Held until the answer exists: shutting down waits for it.
    let _running = state.lifecycle().enter();
    let url_keys = auth::cut_keys(request.uri_mut(), state.config().librechat.url_keys);
    let had_url_key = url_keys.is_some();
    if let Some(keys) = url_keys {
        request.extensions_mut().insert(keys);
    }
    let id = request_id(request.headers());
    let span = telemetry::request_span(
        id.to_str().unwrap_or_default(),
        request.method().as_str(),
        &auth::shown_path(request.uri().path()),
    );
    if state.config().librechat.log_requests {
        request = span.in_scope(|| request_log::log(request));
    }
    let mut response = admitted(&state, request, next).instrument(span).await;
    response.headers_mut().insert(ID_HEADER, id);
    if had_url_key {
        // The URL is a secret: what an answer links to must not be told it.
        response.headers_mut().insert(header::REFERRER_POLICY, HeaderValue::from_static("no-referrer"));
    }
    response
}

async fn admitted(state: &AppState, request: Request, next: Next) -> Response {
    if state.lifecycle().is_draining() {
        return closing(Refused::shutting_down().answer(request.uri().path()));
    }
    if let Some(refused) = state.guard().and_then(|guard| guard.check(&request).err()) {
        tracing::info!(status = refused.status.as_u16(), reason = refused.message, "request refused");
        return refused.answer(request.uri().path());
    }
    let response = next.run(request).await;
    match response.status() {
        status if status.is_server_error() => tracing::warn!(status = status.as_u16(), "answered"),
        status => tracing::debug!(status = status.as_u16(), "answered"),
    }
    response
}

/// An answer after which the connection ends; what was asked may be asked again a moment later.
pub(super) fn closing(mut response: Response) -> Response {
    response.headers_mut().insert(header::RETRY_AFTER, RETRY_AFTER_SECS);
    response.headers_mut().insert(header::CONNECTION, HeaderValue::from_static("close"));
    response
}

/// The caller's id when it is harmless in a header and a log line, else a new one.
fn request_id(headers: &HeaderMap) -> HeaderValue {
    let fits = |value: &&HeaderValue| {
        let bytes = value.as_bytes();
        let harmless = |byte: &u8| byte.is_ascii_alphanumeric() || b"-_.:".contains(byte);
        (1..=ID_BYTES_MAX).contains(&bytes.len()) && bytes.iter().all(harmless)
    };
    let given = ID_HEADERS.into_iter().filter_map(|name| headers.get(name)).find(fits);
    given.cloned().unwrap_or_else(|| {
        let id = Uuid::now_v7().simple().to_string();
        HeaderValue::from_str(&id).expect("hex digits fit in a header")
    })
}

/// A panic of ours: logged under the request, answered as the 500 that nothing else answers.
pub(super) fn panicked(panic: Box<dyn Any + Send>) -> Response {
    tracing::error!(panic = panic_text(panic.as_ref()), "a handler panicked");
    Refused::panicked().answer("")
}

pub(crate) fn panic_text(panic: &(dyn Any + Send)) -> &str {
    let literal = panic.downcast_ref::<&str>().copied();
    literal.or_else(|| panic.downcast_ref::<String>().map(String::as_str)).unwrap_or("no text")
}
