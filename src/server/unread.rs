//! What is left of a request's body when nobody reads it any further: it is taken off the connection.
//!
//! A request may be answered in front of its body or in the middle of it: refused for its key, its path, its size.
//! hyper closes the connection of a body that it can give to nobody, and what has come of it by then turns the end into
//! a reset, which takes the answer with it: most clients send all they have before they read.
#![forbid(unsafe_code)]

use std::pin::Pin;
use std::task::{Context, Poll};
use std::time::Duration;

use axum::body::{Body, HttpBody};
use axum::http::{Request, header};
use bytes::Bytes;
use http_body_util::BodyExt;
use hyper::body::{Frame, Incoming, SizeHint};

use super::patience::Phase;

/// Most that is taken, and for how long.
const UNREAD_BYTES_MAX: usize = 64 * 1024 * 1024;
const UNREAD_TIME_MAX: Duration = Duration::from_secs(10);

/// The request with a body whose rest is taken when it is dropped.
pub(super) fn taken_when_dropped(request: Request<Incoming>, phase: Phase) -> Request<Body> {
    // Such a sender sends nothing before somebody reads.
    let is_coming = !request.headers().contains_key(header::EXPECT);
    request.map(|body| {
        if body.is_end_stream() {
            return Body::empty();
        }
        Body::new(Whole { body: Some(body), is_coming, phase })
    })
}

struct Whole {
    /// `None` once it has come to its end.
    body: Option<Incoming>,
    is_coming: bool,
    phase: Phase,
}

impl HttpBody for Whole {
    type Data = Bytes;
    type Error = hyper::Error;

    fn poll_frame(
        self: Pin<&mut Self>,
        context: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, hyper::Error>>> {
        let this = self.get_mut();
        let Some(body) = &mut this.body else { return Poll::Ready(None) };
        this.is_coming = true;
        let polled = Pin::new(&mut *body).poll_frame(context);
        let is_over = match &polled {
            Poll::Ready(Some(Ok(_))) => body.is_end_stream(),
            Poll::Ready(_) => true,
            Poll::Pending => false,
        };
        if is_over {
            this.body = None;
        }
        polled
    }

    fn is_end_stream(&self) -> bool {
        self.body.is_none()
    }

    fn size_hint(&self) -> SizeHint {
        self.body.as_ref().map_or(SizeHint::with_exact(0), Incoming::size_hint)
    }
}

impl Drop for Whole {
    fn drop(&mut self) {
        let Some(body) = self.body.take().filter(|_| self.is_coming) else { return };
        let Ok(runtime) = tokio::runtime::Handle::try_current() else { return };
        let phase = self.phase.clone();
        runtime.spawn(async move {
            if let Ok(true) = tokio::time::timeout(UNREAD_TIME_MAX, is_taken(body)).await {
                phase.rest_taken();
            }
        });
    }
}

/// True when all of it has come. What is left otherwise is cut off with the connection.
async fn is_taken(mut body: Incoming) -> bool {
    let mut left = UNREAD_BYTES_MAX;
    while let Some(frame) = body.frame().await {
        let Ok(frame) = frame else { return false };
        let bytes = frame.data_ref().map_or(0, Bytes::len);
        match left.checked_sub(bytes) {
            Some(rest) => left = rest,
            None => return false,
        }
    }
    true
}
