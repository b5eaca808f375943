//! `LOG_REQUESTS`: what every request said, for an operator who asked for it. Keys are not in it: they were cut out of
//! the URL before, and no value of a header is shown that is known to hold one, or may.
#![forbid(unsafe_code)]

use std::pin::Pin;
use std::task::{Context, Poll};

use axum::body::{Body, HttpBody};
use axum::extract::Request;
use axum::http::{HeaderMap, HeaderName, HeaderValue, Method, header};
use bytes::Bytes;
use hyper::body::{Frame, SizeHint};
use tracing::Span;

use super::auth::{self, MASKED};

/// How much of a JSON body is shown, in bytes.
const BODY_BYTES_MAX: usize = 500;
/// How much of one header is shown, in bytes.
const VALUE_BYTES_MAX: usize = 200;
/// Headers whose values are harmless and say something. All others are named only: a credential can travel under any
/// name, and in the URLs that some of them hold.
const SHOWN: [&str; 22] = [
    "accept",
    "accept-encoding",
    "access-control-request-headers",
    "access-control-request-method",
    "cache-control",
    "connection",
    "content-encoding",
    "content-length",
    "content-type",
    "expect",
    "host",
    "if-match",
    "if-none-match",
    "origin",
    "range",
    "sec-fetch-site",
    "transfer-encoding",
    "user-agent",
    "user-id",
    "x-codeapi-expected-profile",
    "x-librechat-code-request-id",
    "x-request-id",
];

/// Logs the request: at once, or with the beginning of its JSON as soon as that has been read.
pub(super) fn log(request: Request) -> Request {
    let line = Line {
        span: Span::current(),
        method: request.method().clone(),
        path: auth::shown_path(request.uri().path()).into_owned(),
        headers: shown(request.headers()),
    };
    if !is_json(request.headers()) {
        line.log(None);
        return request;
    }
    request.map(|body| Body::new(Overheard { body, seen: Vec::new(), line: Some(line) }))
}

struct Line {
    span: Span,
    method: Method,
    path: String,
    headers: Vec<String>,
}

impl Line {
    fn log(&self, body: Option<&[u8]>) {
        // In the debug form: no byte of a caller's breaks a line.
        let body = body.map(String::from_utf8_lossy);
        let (method, path, headers) = (&self.method, &self.path, &self.headers);
        self.span.in_scope(|| tracing::info!(%method, path, ?headers, ?body, "request"));
    }
}

fn shown(headers: &HeaderMap) -> Vec<String> {
    let value = |name: &HeaderName, value: &HeaderValue| match SHOWN.contains(&name.as_str()) {
        true => {
            let bytes = value.as_bytes();
            String::from_utf8_lossy(&bytes[..bytes.len().min(VALUE_BYTES_MAX)]).into_owned()
        }
        false => MASKED.to_owned(),
    };
    headers.iter().map(|(name, it)| format!("{name}: {}", value(name, it))).collect()
}

fn is_json(headers: &HeaderMap) -> bool {
    let content_type =
        headers.get(header::CONTENT_TYPE).and_then(|value| value.to_str().ok()).unwrap_or_default();
    let essence = content_type.split(';').next().unwrap_or_default().trim();
    essence.eq_ignore_ascii_case("application/json")
}

/// A body whose beginning is logged while it passes. What nobody reads is logged without one.
struct Overheard {
    body: Body,
    seen: Vec<u8>,
    line: Option<Line>,
}

impl Overheard {
    fn done(&mut self) {
        if let Some(line) = self.line.take() {
            line.log(Some(&self.seen));
        }
    }
}

impl HttpBody for Overheard {
    type Data = Bytes;
    type Error = axum::Error;

    fn poll_frame(
        self: Pin<&mut Self>,
        context: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, axum::Error>>> {
        let this = self.get_mut();
        let polled = Pin::new(&mut this.body).poll_frame(context);
        match &polled {
            Poll::Ready(Some(Ok(frame))) => {
                let data = frame.data_ref().map(Bytes::as_ref).unwrap_or_default();
                let room = BODY_BYTES_MAX.saturating_sub(this.seen.len());
                this.seen.extend_from_slice(&data[..data.len().min(room)]);
                if this.seen.len() == BODY_BYTES_MAX {
                    this.done();
                }
            }
            Poll::Ready(_) => this.done(),
            Poll::Pending => {}
        }
        polled
    }

    fn is_end_stream(&self) -> bool {
        self.body.is_end_stream()
    }

    fn size_hint(&self) -> SizeHint {
        self.body.size_hint()
    }
}

impl Drop for Overheard {
    fn drop(&mut self) {
        self.done();
    }
}
