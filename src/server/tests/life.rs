//! Request ids, panics, and the server's own life on a socket.

use std::time::Duration;

use serde_json::json;
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::TcpStream;
use tokio_util::sync::CancellationToken;

use super::*;
use crate::server::listen::{BOUNDS, Bounds, serve_within};
use crate::server::serve;

#[tokio::test]
async fn a_request_id_is_echoed_when_it_is_harmless() {
    let app = daemon(&[]);
    for name in ["x-tt-logid", "x-logid", "x-log-id", "x-request-id"] {
        let reply = get("/health").header(name, "a-1_b.c:2").to(&app).await;
        assert_eq!(reply.header("x-tt-logid"), Some("a-1_b.c:2"), "{name}");
    }
    let long = "x".repeat(129);
    for bad in ["", "two words", "<script>", "a/b", long.as_str()] {
        let reply = get("/nothing").header("x-request-id", bad).to(&app).await;
        let given = reply.header("x-tt-logid").unwrap().to_owned();
        assert!(given.len() == 32 && given.bytes().all(|byte| byte.is_ascii_hexdigit()), "{bad:?} {given}");
    }
}

#[tokio::test]
async fn a_panic_of_a_handler_is_a_500_with_the_envelope_and_the_id() {
    let reply = get("/v2/code/sessions/panic").header("x-request-id", "r1").to(&daemon(&[])).await;
    assert_eq!((reply.status.as_u16(), reply.header("x-tt-logid")), (500, Some("r1")));
    assert_eq!(
        (&reply.json()["success"], &reply.json()["message"]),
        (&json!(false), &json!("Internal error"))
    );
    assert!(!reply.text.contains("told to panic"));
}

#[tokio::test]
async fn an_answer_is_not_to_be_sniffed() {
    assert_eq!(get("/nothing").to(&daemon(&[])).await.header("x-content-type-options"), Some("nosniff"));
}

type Serving = (std::net::SocketAddr, CancellationToken, tokio::task::JoinHandle<std::io::Result<()>>);

async fn start(variables: &[(&str, &str)]) -> Serving {
    start_within(BOUNDS, variables).await
}

pub(super) async fn start_within(bounds: Bounds, variables: &[(&str, &str)]) -> Serving {
    start_with(Fake::default(), bounds, variables).await
}

pub(super) async fn start_with(fake: Fake, bounds: Bounds, variables: &[(&str, &str)]) -> Serving {
    let listener = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
    let address = listener.local_addr().unwrap();
    let state = state_with(config(variables), fake);
    let shutdown = CancellationToken::new();
    let serving = tokio::spawn(serve_within(bounds, vec![listener], state, shutdown.clone()));
    (address, shutdown, serving)
}

async fn send(stream: &mut TcpStream, body: &str) {
    let head = format!(
        "POST /v2/code/execute HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\ncontent-length: {}\r\n\r\n",
        body.len()
    );
    stream.write_all(format!("{head}{body}").as_bytes()).await.unwrap();
}

/// One answer: head and body as text.
pub(super) async fn receive(stream: &mut TcpStream) -> (String, String) {
    let mut text = Vec::new();
    loop {
        let mut chunk = [0_u8; 4096];
        let read = stream.read(&mut chunk).await.unwrap();
        assert_ne!(read, 0, "closed after {:?}", String::from_utf8_lossy(&text));
        text.extend_from_slice(&chunk[..read]);
        let whole = String::from_utf8_lossy(&text).into_owned();
        let Some((head, body)) = whole.split_once("\r\n\r\n") else { continue };
        let length = head.lines().find_map(|line| line.strip_prefix("content-length: ")).unwrap();
        if body.len() >= length.parse().unwrap() {
            return (head.to_owned(), body.to_owned());
        }
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn stopping_finishes_what_runs_and_refuses_what_comes() {
    let (address, shutdown, serving) = start(&[]).await;
    let mut busy = TcpStream::connect(address).await.unwrap();
    let mut idle = TcpStream::connect(address).await.unwrap();
    // Both connections are known to the server before it stops.
    send(&mut idle, r#"{"language":"python","code":"1"}"#).await;
    receive(&mut idle).await;
    send(&mut busy, r#"{"language":"python","code":"sleep"}"#).await;
    tokio::time::sleep(Duration::from_millis(100)).await;
    shutdown.cancel();
    tokio::time::sleep(Duration::from_millis(50)).await;
    send(&mut idle, r#"{"language":"python","code":"1"}"#).await;
    let (head, body) = receive(&mut idle).await;
    assert!(head.starts_with("HTTP/1.1 503") && head.contains("connection: close"), "{head}");
    let body: serde_json::Value = serde_json::from_str(&body).unwrap();
    assert_eq!(body["message"], json!("the daemon is shutting down"));
    let (head, _) = receive(&mut busy).await;
    assert!(head.starts_with("HTTP/1.1 200"), "{head}");
    tokio::time::timeout(Duration::from_secs(5), serving).await.unwrap().unwrap().unwrap();
    assert!(TcpStream::connect(address).await.is_err());
}

#[tokio::test(flavor = "multi_thread")]
async fn an_open_daemon_does_not_serve_beyond_loopback() {
    let serving = |variables: &'static [(&'static str, &'static str)]| async move {
        let listener = std::net::TcpListener::bind("0.0.0.0:0").unwrap();
        let state = state_with(config(variables), Fake::default());
        let shutdown = CancellationToken::new();
        shutdown.cancel();
        serve(vec![listener], state, shutdown).await
    };
    assert_eq!(serving(&[]).await.unwrap_err().kind(), std::io::ErrorKind::PermissionDenied);
    assert!(serving(&[("AIO_API_KEY", "k")]).await.is_ok());
    assert!(serving(&[("CAISSON_ALLOW_OPEN", "1")]).await.is_ok());
}

#[tokio::test(flavor = "multi_thread")]
async fn a_body_that_is_too_large_is_answered_and_not_reset() {
    let (address, shutdown, serving) = start(&[]).await;
    let mut stream = TcpStream::connect(address).await.unwrap();
    let body = format!(r#"{{"language":"python","code":"{}"}}"#, "x".repeat(3 * 1024 * 1024));
    send(&mut stream, &body).await;
    let (head, _) = receive(&mut stream).await;
    assert!(head.starts_with("HTTP/1.1 413"), "{head}");
    shutdown.cancel();
    serving.await.unwrap().unwrap();
}

/// Sends all it has before it reads, as most clients do.
async fn upload(stream: &mut TcpStream, path: &str, headers: &str, bytes: usize) {
    let head = format!("POST {path} HTTP/1.1\r\nhost: localhost\r\n{headers}content-length: {bytes}\r\n\r\n");
    stream.write_all(head.as_bytes()).await.unwrap();
    let piece = vec![b'x'; 64 * 1024];
    let mut left = bytes;
    while left > 0 {
        let sent = left.min(piece.len());
        stream.write_all(&piece[..sent]).await.unwrap_or_else(|error| panic!("{path}, {left} left: {error}"));
        left -= sent;
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn what_is_refused_in_front_of_its_body_is_answered_and_not_reset() {
    let (address, shutdown, serving) = start(&[("AIO_API_KEY", "k")]).await;
    let json = "content-type: application/json\r\n";
    let form = "content-type: multipart/form-data; boundary=b\r\n";
    let key = "x-api-key: k\r\n";
    const BYTES: usize = 40 * 1024 * 1024;
    for (path, headers, status) in [
        ("/v1/file/upload", form.to_owned(), "401"),
        ("/upload", form.to_owned(), "401"),
        ("/v2/code/execute", json.to_owned(), "401"),
        ("/nowhere", format!("{json}{key}"), "404"),
        ("/health", format!("{json}{key}"), "405"),
        ("/v2/code/execute", format!("{json}{key}"), "413"),
    ] {
        let mut stream = TcpStream::connect(address).await.unwrap();
        upload(&mut stream, path, &headers, BYTES).await;
        let (head, _) = receive(&mut stream).await;
        assert_eq!(head.split(' ').nth(1), Some(status), "{path}: {head}");
        // And it serves on.
        send(&mut stream, r#"{"language":"python","code":"1"}"#).await;
        assert!(receive(&mut stream).await.0.starts_with("HTTP/1.1 401"), "{path}");
    }
    // Nobody waits for what the sender was to be asked for first.
    let mut stream = TcpStream::connect(address).await.unwrap();
    let head =
        "POST /upload HTTP/1.1\r\nhost: localhost\r\nexpect: 100-continue\r\ncontent-length: 9\r\n\r\n";
    stream.write_all(head.as_bytes()).await.unwrap();
    assert!(receive(&mut stream).await.0.starts_with("HTTP/1.1 401"));
    shutdown.cancel();
    serving.await.unwrap().unwrap();
}

#[tokio::test(flavor = "multi_thread")]
async fn a_refusal_does_not_wait_for_the_body_that_is_still_to_come() {
    let (address, shutdown, serving) = start(&[("AIO_API_KEY", "k")]).await;
    let mut stream = TcpStream::connect(address).await.unwrap();
    let head = "POST /upload HTTP/1.1\r\nhost: localhost\r\ncontent-length: 1000000\r\n\r\nx";
    stream.write_all(head.as_bytes()).await.unwrap();
    let received = tokio::time::timeout(Duration::from_secs(2), receive(&mut stream)).await;
    assert!(received.expect("at once").0.starts_with("HTTP/1.1 401"));
    shutdown.cancel();
    serving.await.unwrap().unwrap();
}

#[tokio::test(flavor = "multi_thread")]
async fn a_connection_is_kept_for_its_next_request_and_a_slow_head_is_not_waited_for() {
    let short = Duration::from_millis(300);
    let (address, shutdown, serving) = start_within(Bounds { head_read_max: short, ..BOUNDS }, &[]).await;
    let (mut kept, mut slow) =
        (TcpStream::connect(address).await.unwrap(), TcpStream::connect(address).await.unwrap());
    for stream in [&mut kept, &mut slow] {
        send(stream, r#"{"language":"python","code":"1"}"#).await;
        receive(stream).await;
    }
    slow.write_all(b"POST /v2/code/exec").await.unwrap();
    tokio::time::sleep(short * 4).await;
    send(&mut kept, r#"{"language":"python","code":"1"}"#).await;
    let (head, _) = receive(&mut kept).await;
    assert!(head.starts_with("HTTP/1.1 200"), "{head}");
    let closed = slow.read(&mut [0; 64]).await;
    assert!(matches!(closed, Ok(0) | Err(_)), "{closed:?}");
    shutdown.cancel();
    serving.await.unwrap().unwrap();
}
