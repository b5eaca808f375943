//! Reads a request body into memory, within bytes and seconds.
#![forbid(unsafe_code)]

use std::time::Duration;

use axum::body::{Body, HttpBody};
use axum::extract::{FromRequest, Request};
use axum::http::StatusCode;
use axum::http::request::Parts;
use axum::response::Response;
use bytes::{Bytes, BytesMut};
use http_body_util::BodyExt;

use super::answer::Refused;
use super::crowd::{Arrived, Seat};

/// Largest JSON body.
pub(crate) const JSON_BYTES_MAX: usize = 2 * 1024 * 1024;
/// Largest JSON body of an execution of the LibreChat family.
pub(crate) const LARGE_JSON_BYTES_MAX: usize = 50 * 1024 * 1024;
/// Longest program that a run takes, in bytes of its JSON form: it goes to its interpreter as one line, with its
/// arguments.
pub(crate) const CODE_BYTES_MAX: usize = 15 * 1024 * 1024;
/// Longest a body may take to arrive.
const READ_TIME_MAX: Duration = Duration::from_secs(60);
/// A JSON body as it came; empty when there was none.
pub(crate) struct JsonBytes(pub(crate) Bytes);

/// The same for a route that takes large ones. What is read from it is as large, so it goes on counting for its tenant
/// when the bytes are gone, until the second is dropped too.
pub(crate) struct LargeJsonBytes(pub(crate) Bytes, pub(crate) Option<Arrived>);

impl<S: Send + Sync> FromRequest<S> for JsonBytes {
    type Rejection = Response;

    async fn from_request(request: Request, _: &S) -> Result<Self, Response> {
        let (head, body) = request.into_parts();
        let (bytes, arrived) = whole(&head, body, JSON_BYTES_MAX).await?;
        Ok(JsonBytes(match arrived {
            Some(arrived) => arrived.counted(bytes),
            None => bytes,
        }))
    }
}

impl<S: Send + Sync> FromRequest<S> for LargeJsonBytes {
    type Rejection = Response;

    async fn from_request(request: Request, _: &S) -> Result<Self, Response> {
        let (head, body) = request.into_parts();
        read_large(&head, body).await
    }
}

/// The large body of a request whose head has been taken apart.
pub(crate) async fn read_large(head: &Parts, body: Body) -> Result<LargeJsonBytes, Response> {
    let (bytes, arrived) = whole(head, body, LARGE_JSON_BYTES_MAX).await?;
    Ok(LargeJsonBytes(bytes, arrived))
}

async fn whole(head: &Parts, body: Body, bytes_max: usize) -> Result<(Bytes, Option<Arrived>), Response> {
    let read = read(body, bytes_max, head.extensions.get::<Seat>());
    let outcome = tokio::time::timeout(READ_TIME_MAX, read).await.unwrap_or(Err(Unread::TooSlow));
    outcome.map_err(|unread| unread.refused().answer(head.uri.path()))
}

/// Why a body was not read.
enum Unread {
    TooLarge {
        bytes_max: usize,
    },
    TooSlow,
    Broken,
    /// The tenant's requests take up what they may.
    NoRoom(Refused),
}

impl Unread {
    fn refused(self) -> Refused {
        match self {
            Unread::NoRoom(refused) => refused,
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

async fn read(
    mut body: Body,
    bytes_max: usize,
    seat: Option<&Seat>,
) -> Result<(Bytes, Option<Arrived>), Unread> {
    if body.size_hint().lower() > bytes_max as u64 {
        return Err(Unread::TooLarge { bytes_max });
    }
    let mut whole = Bytes::new();
    let mut joined = BytesMut::new();
    let mut seen = 0_usize;
    let mut arrived = seat.and_then(Seat::arriving);
    while let Some(frame) = body.frame().await {
        let Ok(data) = frame.map_err(|_| Unread::Broken)?.into_data() else { continue };
        seen += data.len();
        if seen > bytes_max {
            return Err(Unread::TooLarge { bytes_max });
        }
        if let Some(arrived) = &mut arrived {
            arrived.grow(seen).map_err(Unread::NoRoom)?;
        }
        // Most bodies are one frame, which is handed on as it is.
        if whole.is_empty() && joined.is_empty() {
            whole = data;
        } else {
            joined.extend_from_slice(&std::mem::take(&mut whole));
            joined.extend_from_slice(&data);
        }
    }
    let whole = if joined.is_empty() { whole } else { joined.freeze() };
    Ok((whole, arrived))
}

/// Whether a run cannot take this program, which is found out before anything is made ready for it.
pub(crate) fn is_too_long(code: &str) -> bool {
    let bytes = |byte: u8| match byte {
        b'"' | b'\\' | b'\n' | b'\r' | b'\t' | 0x08 | 0x0c => 2,
        0..0x20 => "\\u0000".len(),
        _ => 1,
    };
    code.len() > CODE_BYTES_MAX || code.bytes().map(bytes).sum::<usize>() > CODE_BYTES_MAX
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::harness::FRAME_BYTES_MAX;

    #[test]
    fn a_program_that_is_not_too_long_fits_into_a_line_with_its_arguments() {
        for piece in ["a", "\n", "\"", "\\", "\u{1}", "\u{8}", "\u{7f}", "ü", "\u{2028}"] {
            let of_one = serde_json::to_string(piece).expect("JSON").len() - 2;
            let code = piece.repeat(CODE_BYTES_MAX / of_one);
            assert!(!is_too_long(&code) && is_too_long(&format!("{code}{piece}")), "{piece:?}");
            let line = serde_json::to_string(&code).expect("JSON").len();
            // Arguments of 100 KiB may be six times as long there, and there are names of tools.
            assert!(line + 6 * 100 * 1024 + 256 * 1024 <= FRAME_BYTES_MAX, "{piece:?}");
        }
    }
}
