//! Reads a request body into memory, within bytes and seconds.
#![forbid(unsafe_code)]

use std::time::Duration;

use axum::body::{Body, HttpBody};
use axum::extract::{FromRequest, Request};
use axum::http::{StatusCode, header};
use axum::response::Response;
use bytes::{Bytes, BytesMut};
use http_body_util::BodyExt;

use super::answer::Refused;

/// Largest JSON body.
pub(crate) const JSON_BYTES_MAX: usize = 2 * 1024 * 1024;
/// Longest a body may take to arrive.
const READ_TIME_MAX: Duration = Duration::from_secs(60);
/// How much of a body that is too large is still read, so that its sender sees the answer rather than
/// a reset connection.
const DISCARDED_BYTES_MAX: usize = 16 * 1024 * 1024;

/// A JSON body as it came; empty when there was none.
pub(crate) struct JsonBytes(pub(crate) Bytes);

impl<S: Send + Sync> FromRequest<S> for JsonBytes {
    type Rejection = Response;

    async fn from_request(request: Request, _: &S) -> Result<Self, Response> {
        let path = request.uri().path().to_owned();
        let asks_first = request.headers().contains_key(header::EXPECT);
        let read = read(request.into_body(), JSON_BYTES_MAX, asks_first);
        let outcome = tokio::time::timeout(READ_TIME_MAX, read).await.unwrap_or(Err(Unread::TooSlow));
        outcome.map(JsonBytes).map_err(|unread| unread.refused().answer(&path))
    }
}

/// Why a body was not read.
enum Unread {
    TooLarge { bytes_max: usize },
    TooSlow,
    Broken,
}

impl Unread {
    fn refused(&self) -> Refused {
        match self {
            Unread::TooLarge { bytes_max } => Refused::new(
                StatusCode::PAYLOAD_TOO_LARGE,
                format!("Request body is larger than {bytes_max} bytes"),
            ),
            Unread::TooSlow => {
                Refused::new(StatusCode::REQUEST_TIMEOUT, "Request body did not arrive in time")
            }
            Unread::Broken => Refused::new(StatusCode::BAD_REQUEST, "Request body could not be read"),
        }
    }
}

async fn read(mut body: Body, bytes_max: usize, asks_first: bool) -> Result<Bytes, Unread> {
    let declared = body.size_hint().lower();
    if declared > bytes_max as u64 && (asks_first || declared > DISCARDED_BYTES_MAX as u64) {
        return Err(Unread::TooLarge { bytes_max });
    }
    let mut whole = Bytes::new();
    let mut joined = BytesMut::new();
    let mut seen = 0_usize;
    while let Some(frame) = body.frame().await {
        let Ok(data) = frame.map_err(|_| Unread::Broken)?.into_data() else { continue };
        seen += data.len();
        match seen {
            _ if seen > DISCARDED_BYTES_MAX => break,
            _ if seen > bytes_max => {}
            // Most bodies are one frame, which is handed on as it is.
            _ if whole.is_empty() && joined.is_empty() => whole = data,
            _ => {
                joined.extend_from_slice(&std::mem::take(&mut whole));
                joined.extend_from_slice(&data);
            }
        }
    }
    match (seen > bytes_max, joined.is_empty()) {
        (true, _) => Err(Unread::TooLarge { bytes_max }),
        (false, true) => Ok(whole),
        (false, false) => Ok(joined.freeze()),
    }
}
