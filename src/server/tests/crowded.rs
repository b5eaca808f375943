//! Connections that are held: for how long, and who makes room when there is none.

use std::time::Duration;

use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::TcpStream;
use tokio::time::timeout;

use super::life::{receive, start_within};
use crate::server::listen::{BOUNDS, Bounds};

const KEY: &[(&str, &str)] = &[("AIO_API_KEY", "k")];
/// Longer than a stranger is left alone, on a busy machine.
const SOON: Duration = Duration::from_secs(10);

async fn ask(stream: &mut TcpStream, path: &str, key: bool) {
    let key = if key { "x-api-key: k\r\n" } else { "" };
    let head = format!("GET {path} HTTP/1.1\r\nhost: localhost\r\n{key}\r\n");
    stream.write_all(head.as_bytes()).await.unwrap();
}

/// Asks with the key and waits for the answer.
async fn is_answered(stream: &mut TcpStream) -> bool {
    ask(stream, "/health", true).await;
    matches!(timeout(SOON, receive(stream)).await, Ok((head, _)) if head.starts_with("HTTP/1.1 200"))
}

async fn is_closed_within(stream: &mut TcpStream, max: Duration) -> bool {
    matches!(timeout(max, stream.read(&mut [0; 64])).await, Ok(Ok(0) | Err(_)))
}

#[tokio::test(flavor = "multi_thread")]
async fn a_connection_without_a_key_is_kept_as_long_as_a_head_may_take_and_one_with_a_key_longer() {
    let short = Duration::from_millis(300);
    let bounds = Bounds { head_read_max: short, keep_alive_max: short * 10, ..BOUNDS };
    let (address, shutdown, serving) = start_within(bounds, KEY).await;
    let connect = || async { TcpStream::connect(address).await.unwrap() };
    let (mut known, mut public, mut refused) = (connect().await, connect().await, connect().await);
    assert!(is_answered(&mut known).await);
    for (stream, path, status) in [(&mut public, "/health", "200"), (&mut refused, "/v1/code/info", "401")] {
        ask(stream, path, false).await;
        assert_eq!(receive(stream).await.0.split(' ').nth(1), Some(status), "control: {path}");
    }
    for stream in [&mut public, &mut refused] {
        assert!(is_closed_within(stream, short * 4).await, "a stranger is kept");
    }
    assert!(is_answered(&mut known).await, "who has shown a key is kept");
    // What it has shown counts no more once it asks without.
    assert!(!is_closed_within(&mut known, short * 4).await);
    assert!(is_closed_within(&mut known, short * 20).await, "nobody is kept for ever");
    shutdown.cancel();
    serving.await.unwrap().unwrap();
}

#[tokio::test(flavor = "multi_thread")]
async fn when_all_connections_are_held_the_stranger_that_was_quiet_for_longest_makes_room() {
    let long = Duration::from_secs(600);
    let bounds = Bounds { connections_max: 4, head_read_max: long, keep_alive_max: long, write_max: long };
    let (address, shutdown, serving) = start_within(bounds, KEY).await;
    let connect = || async { TcpStream::connect(address).await.unwrap() };
    let (mut idle, mut busy) = (connect().await, connect().await);
    assert!(is_answered(&mut idle).await);
    let body = r#"{"language":"python","code":"sleep 10"}"#;
    let head = format!(
        "POST /v2/code/execute HTTP/1.1\r\nhost: localhost\r\nx-api-key: k\r\ncontent-type: application/json\r\n\
         content-length: {}\r\n\r\n",
        body.len()
    );
    // One whose first request is being answered has not shown its key yet, as far as anybody knows.
    busy.write_all(head.as_bytes()).await.unwrap();
    busy.write_all(body.as_bytes()).await.unwrap();
    let mut silent = connect().await;
    tokio::time::sleep(Duration::from_millis(100)).await;
    let mut slow = connect().await;
    slow.write_all(b"GET /hea").await.unwrap();
    let mut next = connect().await;
    assert!(is_answered(&mut next).await, "nobody made room");
    assert!(is_closed_within(&mut silent, SOON).await, "it was quiet for longest");
    assert!(!is_closed_within(&mut slow, Duration::from_millis(200)).await, "one was enough");
    let mut after = connect().await;
    assert!(is_answered(&mut after).await, "nobody made room");
    assert!(is_closed_within(&mut slow, SOON).await);
    // All that are left have shown a key, or are being answered: the newcomer waits until one goes.
    assert!(timeout(SOON, receive(&mut busy)).await.unwrap().0.starts_with("HTTP/1.1 200"));
    let mut last = connect().await;
    ask(&mut last, "/health", true).await;
    assert!(timeout(Duration::from_secs(2), receive(&mut last)).await.is_err(), "a known one was shed");
    for stream in [&mut idle, &mut busy, &mut next, &mut after] {
        assert!(is_answered(stream).await, "a known one was shed");
    }
    drop(after);
    assert!(timeout(SOON, receive(&mut last)).await.unwrap().0.starts_with("HTTP/1.1 200"));
    shutdown.cancel();
    serving.await.unwrap().unwrap();
}
