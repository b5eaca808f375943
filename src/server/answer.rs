//! Bodies that every family may use: JSON written once, the envelope, refusals of routes nobody owns.
#![forbid(unsafe_code)]

use std::fmt::{self, Display, Write as _};

use axum::body::Body;
use axum::http::{HeaderValue, StatusCode, header};
use axum::response::{IntoResponse, Response};
use serde::Serialize;
use utoipa::ToSchema;

use super::librechat;

/// The envelope of the AIO routes. `success` is the outcome of the work, not of the transport.
#[derive(Debug, Serialize, ToSchema)]
pub(crate) struct Envelope<T> {
    pub(crate) success: bool,
    /// `ok`, or a sentence that says what went wrong.
    pub(crate) message: String,
    pub(crate) data: Option<T>,
    /// Guidance, when there is any.
    pub(crate) hint: Option<String>,
}

impl<T: Serialize> Envelope<T> {
    pub(crate) fn ok(data: T) -> Envelope<T> {
        Envelope { success: true, message: "ok".to_owned(), data: Some(data), hint: None }
    }
}

impl<T: Serialize> IntoResponse for Envelope<T> {
    fn into_response(self) -> Response {
        json(StatusCode::OK, &self)
    }
}

/// Bytes a body is expected to need when nobody knows better.
const BODY_BYTES_USUAL: usize = 512;

/// Serializes `body` into the buffer that is sent.
pub(crate) fn json(status: StatusCode, body: &impl Serialize) -> Response {
    json_sized(status, body, BODY_BYTES_USUAL)
}

/// The same for a body whose size the caller can guess.
pub(crate) fn json_sized(status: StatusCode, body: &impl Serialize, bytes: usize) -> Response {
    let mut buffer = Vec::with_capacity(bytes);
    serde_json::to_writer(&mut buffer, body).expect("our bodies have string keys and no failing parts");
    json_bytes(status, buffer)
}

/// A body that is JSON already.
pub(crate) fn json_bytes(status: StatusCode, body: impl Into<Body>) -> Response {
    let mut response = Response::new(body.into());
    *response.status_mut() = status;
    let headers = response.headers_mut();
    headers.insert(header::CONTENT_TYPE, HeaderValue::from_static("application/json"));
    headers.insert(header::X_CONTENT_TYPE_OPTIONS, HeaderValue::from_static("nosniff"));
    response
}

/// Longest text of the caller's that a message repeats, in bytes.
const SHORT_BYTES_MAX: usize = 512;

/// The beginning of a text that may repeat what the caller sent, however much that was.
pub(crate) fn in_short(text: impl Display) -> String {
    struct Short(String);
    impl fmt::Write for Short {
        fn write_str(&mut self, piece: &str) -> fmt::Result {
            let end = piece.floor_char_boundary(SHORT_BYTES_MAX - self.0.len());
            self.0.push_str(&piece[..end]);
            if end == piece.len() { Ok(()) } else { Err(fmt::Error) }
        }
    }
    let mut short = Short(String::new());
    if write!(short, "{text}").is_err() {
        short.0.push('…');
    }
    short.0
}

/// What a refusal outside a handler says.
#[derive(Clone, Debug)]
pub(crate) struct Refused {
    pub(crate) status: StatusCode,
    pub(crate) message: String,
    pub(crate) hint: Option<String>,
    /// What the LibreChat family says in the message's place.
    in_librechat: Option<&'static str>,
}

#[derive(Serialize)]
struct UnionBody<'a> {
    success: bool,
    message: &'a str,
    data: (),
    hint: Option<&'a str>,
    error: &'a str,
    detail: &'a str,
}

#[derive(Serialize)]
struct AioBody<'a> {
    success: bool,
    message: &'a str,
    data: (),
    hint: Option<&'a str>,
}

impl Refused {
    pub(crate) fn new(status: StatusCode, message: impl Into<String>) -> Refused {
        Refused { status, message: message.into(), hint: None, in_librechat: None }
    }

    pub(crate) fn hint(self, hint: impl Into<String>) -> Refused {
        Refused { hint: Some(hint.into()), ..self }
    }

    fn in_librechat(self, message: &'static str) -> Refused {
        Refused { in_librechat: Some(message), ..self }
    }

    pub(crate) fn unauthorized() -> Refused {
        Refused::new(StatusCode::UNAUTHORIZED, "Unauthorized").in_librechat("Invalid or missing API key")
    }

    /// Several credentials that differ, where a route takes one.
    pub(crate) fn ambiguous() -> Refused {
        Refused::new(StatusCode::BAD_REQUEST, "Ambiguous authentication headers")
    }

    pub(crate) fn not_found() -> Refused {
        Refused::new(StatusCode::NOT_FOUND, "Not found").hint("GET /openapi.json lists every route")
    }

    pub(crate) fn method_not_allowed() -> Refused {
        Refused::new(StatusCode::METHOD_NOT_ALLOWED, "Method not allowed")
    }

    pub(crate) fn shutting_down() -> Refused {
        Refused::new(StatusCode::SERVICE_UNAVAILABLE, "the daemon is shutting down")
            .in_librechat("Service is shutting down")
    }

    pub(crate) fn panicked() -> Refused {
        Refused::new(StatusCode::INTERNAL_SERVER_ERROR, "Internal error")
            .hint("the operator's log has it under this answer's x-tt-logid")
    }

    /// The answer in the words of the family that owns `path`, or of all of them.
    pub(crate) fn answer(&self, path: &str) -> Response {
        let (message, hint) = (self.message.as_str(), self.hint.as_deref());
        if super::aio::owns(path) {
            return json(self.status, &AioBody { success: false, message, data: (), hint });
        }
        if librechat::owns(path) {
            let refused = librechat::refuse::Refused::new(self.status, self.in_librechat.unwrap_or(message));
            return match hint {
                Some(hint) => refused.message(format!("{message}: {hint}")).into_response(),
                None => refused.into_response(),
            };
        }
        let body = UnionBody { success: false, message, data: (), hint, error: message, detail: message };
        json(self.status, &body)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_message_repeats_only_the_beginning_of_what_was_sent() {
        assert_eq!(in_short("a b"), "a b");
        let short = in_short(format_args!("no {:?} is wanted", "ü".repeat(1_000_000)));
        assert!(short.starts_with("no \"üü") && short.ends_with("ü…"), "{short}");
        assert!(short.len() <= SHORT_BYTES_MAX + '…'.len_utf8());
    }
}
