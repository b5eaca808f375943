//! Listeners, connections and their end.
//!
//! Shutting down: requests that come are answered 503, running ones get [`DRAIN_MAX`], then accepting stops and
//! what is left of the connections closes.
#![forbid(unsafe_code)]

use std::io;
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll};
use std::time::Duration;

use axum::body::{Body, HttpBody};
use axum::response::Response;
use bytes::Bytes;
use hyper::body::{Frame, Incoming, SizeHint};
use hyper_util::rt::{TokioExecutor, TokioIo, TokioTimer};
use hyper_util::server::conn::auto;
use hyper_util::server::graceful::{GracefulShutdown, Watcher};
use hyper_util::service::TowerToHyperService;
use tokio::net::{TcpListener, TcpStream};
use tokio::task::JoinSet;
use tokio_util::sync::CancellationToken;
use tower::ServiceExt;

use super::auth::Known;
use super::crowd::{BODIES_BYTES_MAX, COUNTED_BYTES_LEAST, Crowd, Place, Seat};
use super::patience::{Patient, Phase};
use super::unread::taken_when_dropped;
use super::{App, AppState, app};

/// What connections are held to.
#[derive(Copy, Clone, Debug)]
pub(super) struct Bounds {
    /// Connections at once. When more come, [`Crowd`] looks for one that makes room; the rest waits, one at each
    /// listener and then in the kernel's queue.
    pub(super) connections_max: usize,
    /// Longest a request head may take to arrive.
    pub(super) head_read_max: Duration,
    /// How long a connection is kept for its next request, once one came with a key. Longer than clients and the usual
    /// proxies keep theirs (a minute at most), so that it is the client who closes: closing under a request on its way
    /// would be an error that nobody may repeat.
    pub(super) keep_alive_max: Duration,
    /// How long a peer may take nothing of an answer.
    pub(super) write_max: Duration,
    /// Bytes of bodies that one tenant's requests may have in memory.
    pub(super) bodies_bytes_max: usize,
}

pub(super) const BOUNDS: Bounds = Bounds {
    connections_max: 4096,
    head_read_max: Duration::from_secs(10),
    keep_alive_max: Duration::from_secs(75),
    write_max: Duration::from_secs(60),
    bodies_bytes_max: BODIES_BYTES_MAX,
};
/// Largest request head, in bytes.
const HEAD_BYTES_MAX: usize = 64 * 1024;
/// How long running requests may go on after the signal to stop.
pub const DRAIN_MAX: Duration = Duration::from_secs(25);
/// How long answers may take to leave after that.
const FLUSH_MAX: Duration = Duration::from_secs(2);
/// Pause after a failed accept, such as one without a free descriptor.
const ACCEPT_PAUSE: Duration = Duration::from_millis(100);

type Builder = auto::Builder<TokioExecutor>;

/// What every connection needs.
struct Shared {
    app: App,
    builder: Builder,
    bounds: Bounds,
    crowd: Arc<Crowd>,
    /// Ends connections that outlived [`DRAIN_MAX`].
    cut: CancellationToken,
}

/// Serves `state` on listeners that are bound already, until `shutdown` and what it leaves to finish.
pub async fn serve(
    listeners: Vec<std::net::TcpListener>,
    state: AppState,
    shutdown: CancellationToken,
) -> io::Result<()> {
    serve_within(BOUNDS, listeners, state, shutdown).await
}

/// As [`serve`], with bounds of the caller's choice.
pub(super) async fn serve_within(
    bounds: Bounds,
    listeners: Vec<std::net::TcpListener>,
    state: AppState,
    shutdown: CancellationToken,
) -> io::Result<()> {
    let listeners = adopt(listeners, &state)?;
    let graceful = Arc::new(GracefulShutdown::new());
    let shared = Arc::new(Shared {
        app: app(state.clone()),
        builder: builder(bounds.keep_alive_max),
        bounds,
        crowd: Arc::new(Crowd::new(
            bounds.connections_max,
            of_one_tenant(bounds.connections_max, &state),
            bounds.bodies_bytes_max,
        )),
        cut: CancellationToken::new(),
    });
    let mut accepting = JoinSet::new();
    for listener in listeners {
        accepting.spawn(accept(listener, Arc::clone(&shared), Arc::clone(&graceful)));
    }
    shutdown.cancelled().await;
    state.lifecycle().drain();
    tracing::info!("finishing what runs; new requests are refused");
    if tokio::time::timeout(DRAIN_MAX, state.lifecycle().idle()).await.is_err() {
        tracing::warn!(
            seconds = DRAIN_MAX.as_secs(),
            "requests still ran when their time to finish was over"
        );
    }
    // Its streams have no end of their own.
    state.mcp().close().await;
    // Only now: a caller who is not accepted would wait for an answer that nobody gives.
    accepting.shutdown().await;
    let graceful = Arc::into_inner(graceful).expect("only the accepting tasks shared it, and they ended");
    let flushed = tokio::time::timeout(FLUSH_MAX, graceful.shutdown()).await;
    if flushed.is_err() {
        shared.cut.cancel();
    }
    Ok(())
}

/// Takes the listeners over; refuses an open daemon that other machines could reach.
fn adopt(listeners: Vec<std::net::TcpListener>, state: &AppState) -> io::Result<Vec<TcpListener>> {
    let may_be_reached = !state.keyring().is_open() || state.config().allow_open;
    let adopt_one = |listener: std::net::TcpListener| {
        let address = listener.local_addr()?;
        if !may_be_reached && !address.ip().is_loopback() {
            let problem = format!("{address} is not loopback and no API key is configured");
            return Err(io::Error::new(io::ErrorKind::PermissionDenied, problem));
        }
        listener.set_nonblocking(true)?;
        tracing::info!(%address, "listening");
        TcpListener::from_std(listener)
    };
    listeners.into_iter().map(adopt_one).collect()
}

fn builder(keep_alive_max: Duration) -> Builder {
    // Not HTTP/2: without TLS no client asks for it, and its connections have no end of their own.
    let mut builder = Builder::new(TokioExecutor::new()).http1_only();
    builder.http1().timer(TokioTimer::new()).header_read_timeout(keep_alive_max).max_buf_size(HEAD_BYTES_MAX);
    builder
}

async fn accept(listener: TcpListener, shared: Arc<Shared>, graceful: Arc<GracefulShutdown>) {
    loop {
        match listener.accept().await {
            Ok((stream, _)) => {
                let phase = Phase::new();
                // Accepted first: only when somebody is there has anybody to make room.
                let place = shared.crowd.admit(phase.clone()).await;
                tokio::spawn(connection(stream, phase, Arc::clone(&shared), graceful.watcher(), place));
            }
            Err(error) => {
                tracing::warn!(%error, "failed to accept a connection");
                tokio::time::sleep(ACCEPT_PAUSE).await;
            }
        }
    }
}

async fn connection(stream: TcpStream, phase: Phase, shared: Arc<Shared>, watcher: Watcher, place: Place) {
    // Answers are whole when they are written: waiting for more only adds delay.
    let _ = stream.set_nodelay(true);
    let (begun, ended) = (phase.clone(), phase.clone());
    let (seat, counted) = (place.seat(), place.seat());
    let service = shared
        .app
        .clone()
        .map_request(move |mut request: hyper::Request<Incoming>| {
            begun.begin();
            request.extensions_mut().insert(seat.clone());
            taken_when_dropped(request, begun.clone())
        })
        .map_response(move |response| {
            ended.end(response.extensions().get::<Known>().is_some());
            counted_while_untaken(response, &counted)
        });
    let service = TowerToHyperService::new(service);
    let stream =
        TokioIo::new(Patient::new(stream, phase, shared.bounds.head_read_max, shared.bounds.write_max));
    let connection = shared.builder.serve_connection(stream, service).into_owned();
    tokio::select! {
        ended = watcher.watch(connection) => log_end(ended),
        () = shared.cut.cancelled() => {}
        () = place.taken_back() => tracing::debug!("connection closed to make room, of a stranger or for an answer not taken"),
    }
}

/// With several tenants, one may have this part of the connections.
const TENANTS_SHARE: usize = 4;

fn of_one_tenant(connections_max: usize, state: &AppState) -> usize {
    if state.config().has_several_tenants() { connections_max / TENANTS_SHARE } else { connections_max }
}

/// What hyper takes of a large answer stays counted until it is written.
fn counted_while_untaken(response: Response, seat: &Seat) -> Response {
    let is_small =
        response.body().size_hint().upper().is_some_and(|bytes| bytes < COUNTED_BYTES_LEAST as u64);
    if is_small {
        return response;
    }
    response.map(|body| Body::new(CountedBody { body, seat: seat.clone() }))
}

struct CountedBody {
    body: Body,
    seat: Seat,
}

impl HttpBody for CountedBody {
    type Data = Bytes;
    type Error = axum::Error;

    fn poll_frame(
        self: Pin<&mut Self>,
        context: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, axum::Error>>> {
        let this = self.get_mut();
        let polled = Pin::new(&mut this.body).poll_frame(context);
        polled.map_ok(|frame| frame.map_data(|piece| this.seat.counted(piece)))
    }

    fn is_end_stream(&self) -> bool {
        self.body.is_end_stream()
    }

    fn size_hint(&self) -> SizeHint {
        self.body.size_hint()
    }
}

fn log_end(ended: Result<(), Box<dyn std::error::Error + Send + Sync>>) {
    if let Err(error) = ended {
        tracing::debug!(%error, "connection ended early");
    }
}
