//! Connections that are held: for how long, and who makes room when there is none.

use std::time::Duration;

use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::TcpStream;
use tokio::time::timeout;

use super::Fake;
use super::life::{receive, start_with, start_within};
use crate::server::listen::{BOUNDS, Bounds};

const KEY: &[(&str, &str)] = &[("AIO_API_KEY", "k")];
/// Longer than a stranger is left alone, on a busy machine.
const SOON: Duration = Duration::from_secs(10);

async fn ask(stream: &mut TcpStream, path: &str, key: bool) {
    let key = if key { "x-api-key: k\r\n" } else { "" };
    let head = format!("GET {path} HTTP/1.1\r\nhost: localhost\r\n{key}\r\n");
    stream.write_all(head.as_bytes()).await.unwrap();
}

async fn run(stream: &mut TcpStream, code: &str) {
    run_padded(stream, code, 0).await;
}

/// With so many bytes beside the code.
async fn run_padded(stream: &mut TcpStream, code: &str, pad: usize) {
    run_as(stream, "k", code, pad).await;
}

async fn run_as(stream: &mut TcpStream, key: &str, code: &str, pad: usize) {
    let pad = "x".repeat(pad);
    let body = format!("{{\"language\":\"python\",\"code\":\"{code}\",\"pad\":\"{pad}\"}}");
    let head = format!(
        "POST /v2/code/execute HTTP/1.1\r\nhost: localhost\r\nx-api-key: {key}\r\ncontent-type: application/json\r\n\
         content-length: {}\r\n\r\n",
        body.len()
    );
    stream.write_all(format!("{head}{body}").as_bytes()).await.unwrap();
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
    let bounds =
        Bounds { connections_max: 4, head_read_max: long, keep_alive_max: long, write_max: long, ..BOUNDS };
    let (address, shutdown, serving) = start_within(bounds, KEY).await;
    let connect = || async { TcpStream::connect(address).await.unwrap() };
    let (mut idle, mut busy) = (connect().await, connect().await);
    assert!(is_answered(&mut idle).await);
    // One whose first request is being answered has not shown its key yet, as far as anybody knows.
    run(&mut busy, "sleep 10").await;
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

#[tokio::test(flavor = "multi_thread")]
async fn a_tenant_with_its_share_of_the_connections_leaves_room_for_the_others() {
    let long = Duration::from_secs(600);
    let bounds =
        Bounds { connections_max: 8, head_read_max: long, keep_alive_max: long, write_max: long, ..BOUNDS };
    let (address, shutdown, serving) =
        start_within(bounds, &[("CODE_INTERPRETER_API_KEYS", "a=k,b=l")]).await;
    let connect = || async { TcpStream::connect(address).await.unwrap() };
    let (mut idle, mut busy, mut third) = (connect().await, connect().await, connect().await);
    assert!(is_answered(&mut idle).await);
    run(&mut busy, "sleep 10").await;
    tokio::time::sleep(Duration::from_millis(100)).await;
    ask(&mut third, "/v1/code/info", true).await;
    let (head, body) = receive(&mut third).await;
    assert!(head.starts_with("HTTP/1.1 429"), "{head}");
    assert!(body.contains("Maximum number of connections (2) reached"), "{body}");
    assert!(is_closed_within(&mut third, SOON).await);
    let mut other = connect().await;
    other.write_all(b"GET /v1/ping HTTP/1.1\r\nhost: localhost\r\nx-api-key: l\r\n\r\n").await.unwrap();
    assert!(receive(&mut other).await.0.starts_with("HTTP/1.1 200"));
    assert!(is_answered(&mut idle).await, "it goes on with what it has");
    shutdown.cancel();
    serving.await.unwrap().unwrap();
}

#[tokio::test(flavor = "multi_thread")]
async fn a_tenant_has_its_share_of_what_requests_take_until_they_are_answered() {
    let bounds = Bounds { bodies_bytes_max: 150_000, ..BOUNDS };
    let (address, shutdown, serving) = start_within(bounds, KEY).await;
    let connect = || async { TcpStream::connect(address).await.unwrap() };
    let (mut first, mut second) = (connect().await, connect().await);
    run_padded(&mut first, "sleep 2", 100_000).await;
    tokio::time::sleep(Duration::from_millis(200)).await;
    run_padded(&mut second, "print(1)", 1_500_000).await;
    let (head, body) = receive(&mut second).await;
    assert!(head.starts_with("HTTP/1.1 429") && body.contains("are under way"), "{head} {body}");
    assert!(is_answered(&mut second).await, "it was read to its end, so that its sender sees the answer");
    let mut third = connect().await;
    run_padded(&mut third, "print(1)", 40_000).await;
    assert!(receive(&mut third).await.0.starts_with("HTTP/1.1 200"), "a small one takes nothing");
    assert!(timeout(SOON, receive(&mut first)).await.unwrap().0.starts_with("HTTP/1.1 200"));
    run_padded(&mut third, "print(1)", 100_000).await;
    assert!(receive(&mut third).await.0.starts_with("HTTP/1.1 200"), "what is answered takes nothing");
    shutdown.cancel();
    serving.await.unwrap().unwrap();
}

#[tokio::test(flavor = "multi_thread")]
async fn what_a_request_takes_counts_for_its_own_tenant_whoever_used_the_connection_before() {
    let bounds = Bounds { bodies_bytes_max: 150_000, ..BOUNDS };
    let (address, shutdown, serving) =
        start_within(bounds, &[("CODE_INTERPRETER_API_KEYS", "a=k,b=l")]).await;
    let connect = || async { TcpStream::connect(address).await.unwrap() };
    let (mut proxy, mut ours, mut theirs) = (connect().await, connect().await, connect().await);
    run_as(&mut proxy, "l", "print(1)", 0).await;
    assert!(receive(&mut proxy).await.0.starts_with("HTTP/1.1 200"));
    run_as(&mut proxy, "k", "sleep 2", 100_000).await;
    tokio::time::sleep(Duration::from_millis(200)).await;
    run_as(&mut theirs, "l", "print(1)", 100_000).await;
    let (head, body) = receive(&mut theirs).await;
    assert!(head.starts_with("HTTP/1.1 200"), "{head} {body}");
    run_as(&mut ours, "k", "print(1)", 100_000).await;
    let (head, body) = receive(&mut ours).await;
    assert!(head.starts_with("HTTP/1.1 429") && body.contains("are under way"), "{head} {body}");
    assert!(timeout(SOON, receive(&mut proxy)).await.unwrap().0.starts_with("HTTP/1.1 200"));
    shutdown.cancel();
    serving.await.unwrap().unwrap();
}

#[tokio::test(flavor = "multi_thread")]
async fn who_leaves_the_beginning_of_a_next_request_behind_has_left_all_the_same() {
    for rest in ["", "GET /health HTTP/1.1\r\nhost: localhost\r\n\r\nGET /he"] {
        let fake = Fake::default();
        let (address, shutdown, serving) = start_with(fake.clone(), BOUNDS, KEY).await;
        let mut caller = TcpStream::connect(address).await.unwrap();
        run(&mut caller, "sleep 100").await;
        caller.write_all(rest.as_bytes()).await.unwrap();
        tokio::time::sleep(Duration::from_millis(2500)).await;
        assert!(!fake.is_dropped(), "who is there is waited for");
        drop(caller);
        let mut left = SOON;
        while !fake.is_dropped() {
            let pause = Duration::from_millis(50);
            left = left.checked_sub(pause).unwrap_or_else(|| panic!("it runs for nobody, after {rest:?}"));
            tokio::time::sleep(pause).await;
        }
        shutdown.cancel();
        serving.await.unwrap().unwrap();
    }
}
