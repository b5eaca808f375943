//! Listeners, connections and their end.
//!
//! Shutting down: requests that come are answered 503, running ones get [`DRAIN_MAX`], then accepting stops and
//! what is left of the connections closes.
#![forbid(unsafe_code)]

use std::io;
use std::sync::Arc;
use std::time::Duration;

use axum::body::Body;
use hyper::body::Incoming;
use hyper_util::rt::{TokioExecutor, TokioIo, TokioTimer};
use hyper_util::server::conn::auto;
use hyper_util::server::graceful::{GracefulShutdown, Watcher};
use hyper_util::service::TowerToHyperService;
use tokio::net::{TcpListener, TcpStream};
use tokio::task::JoinSet;
use tokio_util::sync::CancellationToken;
use tower::ServiceExt;

use super::auth::Known;
use super::crowd::{Crowd, Place};
use super::patience::{Patient, Phase};
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
}

pub(super) const BOUNDS: Bounds = Bounds {
    connections_max: 4096,
    head_read_max: Duration::from_secs(10),
    keep_alive_max: Duration::from_secs(75),
    write_max: Duration::from_secs(60),
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
        crowd: Arc::new(Crowd::new(bounds.connections_max)),
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
    let service = shared
        .app
        .clone()
        .map_request(move |request: hyper::Request<Incoming>| {
            begun.begin();
            request.map(Body::new)
        })
        .map_response(move |response| {
            ended.end(response.extensions().get::<Known>().is_some());
            response
        });
    let service = TowerToHyperService::new(service);
    let stream =
        TokioIo::new(Patient::new(stream, phase, shared.bounds.head_read_max, shared.bounds.write_max));
    let connection = shared.builder.serve_connection(stream, service).into_owned();
    tokio::select! {
        ended = watcher.watch(connection) => log_end(ended),
        () = shared.cut.cancelled() => {}
        () = place.taken_back() => tracing::debug!("connection of a stranger closed to make room"),
    }
}

fn log_end(ended: Result<(), Box<dyn std::error::Error + Send + Sync>>) {
    if let Err(error) = ended {
        tracing::debug!(%error, "connection ended early");
    }
}
