//! The WebSocket to one kernel: a frame at a time while a cell runs, kept answering pings in between.
#![forbid(unsafe_code)]

use std::time::Duration;

use futures_util::{SinkExt, StreamExt};
use hyper::header::{AUTHORIZATION, HeaderValue, SEC_WEBSOCKET_PROTOCOL};
use serde::Serialize;
use tokio::net::TcpStream;
use tokio::sync::oneshot;
use tokio::task::JoinHandle;
use tokio::time::{Instant, timeout};
use tokio_tungstenite::tungstenite::client::IntoClientRequest;
use tokio_tungstenite::tungstenite::error::{CapacityError, ProtocolError, SubProtocolError};
use tokio_tungstenite::tungstenite::protocol::WebSocketConfig;
use tokio_tungstenite::tungstenite::{Error as WsError, Message as Frame};
use tokio_tungstenite::{WebSocketStream, client_async_with_config};

use crate::backend::endpoint::message::{Form, Message, Request, SUBPROTOCOL, decode, encode};
use crate::backend::endpoint::rest::{KernelId, REQUEST_MAX, Rest, RestError};

/// Largest message that is taken, in bytes. `ipykernel` sends what a cell prints in a fifth of a second as one.
pub(super) const MESSAGE_BYTES_MAX: usize = 32 * 1024 * 1024;
/// How long a request may take to leave us.
const SEND_MAX: Duration = Duration::from_secs(10);
/// Bytes that may come between two cells before the connection is given up: threads of an earlier cell print,
/// and nobody reads it.
const IDLE_BYTES_MAX: usize = 64 * 1024 * 1024;
/// How long after a cell its kernel is taken to be there still.
const FRESH_FOR: Duration = Duration::from_secs(5);
/// Frames count for at least so many bytes of that.
const IDLE_FRAME_BYTES: usize = 64;

/// What one wait for a frame brought.
#[derive(Debug)]
pub(super) enum Heard {
    Message(Message),
    /// Something that is no message: a ping, a frame of the other form, garbage.
    Nothing,
    /// A message larger than [`MESSAGE_BYTES_MAX`]. Nothing more comes over this connection.
    TooLarge,
    Closed,
}

/// An open connection.
#[derive(Debug)]
pub(super) struct Link {
    socket: WebSocketStream<TcpStream>,
    form: Form,
}

impl Link {
    /// Connects to the channels of a kernel for the first time, in the form that its server speaks.
    pub(super) async fn open(rest: &Rest, id: &KernelId, session: &str) -> Result<Link, RestError> {
        match Link::within_time(Link::open_as(rest, id, session, Form::Offsets)).await {
            Err(RestError::NoSubprotocol) => Link::reopen(rest, id, session, Form::Json).await,
            other => other,
        }
    }

    /// Connects once more, in the form known from the first time. A server that kept what came since the
    /// connection of the same `session` broke sends it now, and only once.
    pub(super) async fn reopen(
        rest: &Rest,
        id: &KernelId,
        session: &str,
        form: Form,
    ) -> Result<Link, RestError> {
        Link::within_time(Link::open_as(rest, id, session, form)).await
    }

    pub(super) fn form(&self) -> Form {
        self.form
    }

    async fn within_time(opened: impl Future<Output = Result<Link, RestError>>) -> Result<Link, RestError> {
        timeout(REQUEST_MAX, opened).await.unwrap_or(Err(RestError::Timeout(REQUEST_MAX)))
    }

    async fn open_as(rest: &Rest, id: &KernelId, session: &str, form: Form) -> Result<Link, RestError> {
        let config = rest.config();
        let (authority, path, id) = (config.authority(), config.path(), id.as_str());
        let url = format!("ws://{authority}{path}/api/kernels/{id}/channels?session_id={session}");
        let mut request = url.into_client_request().map_err(refusal)?;
        let headers = request.headers_mut();
        if let Some(authorization) = rest.authorization() {
            headers.insert(AUTHORIZATION, authorization.clone());
        }
        if form == Form::Offsets {
            headers.insert(SEC_WEBSOCKET_PROTOCOL, HeaderValue::from_static(SUBPROTOCOL));
        }
        let limits = WebSocketConfig::default()
            .max_message_size(Some(MESSAGE_BYTES_MAX))
            .max_frame_size(Some(MESSAGE_BYTES_MAX));
        let stream = rest.connect().await?;
        let (socket, _) = client_async_with_config(request, stream, Some(limits)).await.map_err(refusal)?;
        Ok(Link { socket, form })
    }

    /// Sends a request. After an error nobody knows whether it arrived.
    pub(super) async fn send<C: Serialize>(&mut self, request: Request<'_, C>) -> Result<(), RestError> {
        let sent = self.socket.send(encode(self.form, request));
        match timeout(SEND_MAX, sent).await {
            Ok(Ok(())) => Ok(()),
            Ok(Err(error)) => Err(refusal(error)),
            Err(_elapsed) => Err(RestError::Timeout(SEND_MAX)),
        }
    }

    /// Waits for the next frame. Dropping the future loses nothing.
    pub(super) async fn hear(&mut self) -> Heard {
        match self.socket.next().await {
            Some(Ok(Frame::Close(_))) | None => Heard::Closed,
            Some(Ok(frame)) => decode(self.form, frame).map_or(Heard::Nothing, Heard::Message),
            Some(Err(WsError::Capacity(CapacityError::MessageTooLong { .. }))) => Heard::TooLarge,
            Some(Err(error)) => {
                tracing::debug!(%error, "the connection to a kernel of the endpoint broke");
                Heard::Closed
            }
        }
    }
}

/// A failed handshake in the words of the other exchanges.
fn refusal(error: WsError) -> RestError {
    match error {
        WsError::Http(answer) => match answer.status().as_u16() {
            refused @ (401 | 403) => RestError::Unauthorized(refused),
            other => RestError::Status(other),
        },
        WsError::Io(error) => RestError::Connect(error),
        WsError::Protocol(ProtocolError::SecWebSocketSubProtocolError(SubProtocolError::NoSubProtocol)) => {
            RestError::NoSubprotocol
        }
        _ => RestError::Garbled,
    }
}

/// A connection between two cells. What comes is read, so that pings are answered, and forgotten.
#[derive(Debug)]
pub(super) struct Idle {
    since: Instant,
    wake: oneshot::Sender<()>,
    task: JoinHandle<Option<Link>>,
}

impl Idle {
    pub(super) fn new(link: Link) -> Idle {
        let (wake, woken) = oneshot::channel();
        Idle { since: Instant::now(), wake, task: tokio::spawn(keep(link, woken)) }
    }

    /// Whether the kernel was at the other end a moment ago. `jupyter-server` keeps the connections of kernels
    /// that it deletes, so an old one says nothing.
    pub(super) fn is_fresh(&self) -> bool {
        !self.task.is_finished() && self.since.elapsed() < FRESH_FOR
    }

    /// The connection, if it still is one.
    pub(super) async fn wake(self) -> Option<Link> {
        // Who keeps it may be gone: then there is no connection either.
        let _ = self.wake.send(());
        self.task.await.ok().flatten()
    }
}

async fn keep(mut link: Link, mut woken: oneshot::Receiver<()>) -> Option<Link> {
    let mut bytes_left = IDLE_BYTES_MAX;
    loop {
        let frame = tokio::select! {
            _ = &mut woken => return Some(link),
            frame = link.socket.next() => frame,
        };
        match frame {
            Some(Ok(frame)) if !frame.is_close() => {
                bytes_left = bytes_left.checked_sub(frame.len().max(IDLE_FRAME_BYTES))?;
            }
            _ => return None,
        }
    }
}
