//! The MCP over HTTP as far as it goes without a sandbox: who may ask, whose a session is, how many there may be.

use super::*;

const A: &str = "key-of-a-0123456789";
const B: &str = "key-of-b-0123456789";
const KEYS: (&str, &str) = ("CODE_INTERPRETER_API_KEYS", "a=key-of-a-0123456789,b=key-of-b-0123456789");

fn say(body: Value) -> Call {
    post("/mcp", &body.to_string()).header("accept", "application/json, text/event-stream")
}

fn hello() -> Value {
    serde_json::json!({"jsonrpc": "2.0", "id": 1, "method": "initialize", "params": {
        "protocolVersion": "2025-06-18", "capabilities": {}, "clientInfo": {"name": "test", "version": "1"}}})
}

fn ping() -> Value {
    serde_json::json!({"jsonrpc": "2.0", "id": 2, "method": "ping"})
}

/// The id of a session that this key has begun.
async fn begin(app: &App, key: &str) -> String {
    let reply = say(hello()).header("x-api-key", key).to(app).await;
    assert_eq!(reply.status, 200, "{}", reply.text);
    assert!(reply.text.contains("\"name\":\"caisson\""), "{}", reply.text);
    reply.header("mcp-session-id").expect("a session").to_owned()
}

async fn in_session(app: &App, call: Call, key: &str, session: &str) -> Reply {
    call.header("x-api-key", key).header("mcp-session-id", session).to(app).await
}

#[tokio::test]
async fn without_a_good_key_nobody_is_heard() {
    let app = daemon(&[KEYS]);
    for call in
        [say(hello()), say(hello()).header("x-api-key", "wrong"), get("/mcp"), call(Method::DELETE, "/mcp")]
    {
        let reply = call.to(&app).await;
        assert_eq!(
            (reply.status, reply.json()["error"].as_str()),
            (StatusCode::UNAUTHORIZED, Some("Unauthorized"))
        );
    }
    let both = say(hello()).header("x-api-key", A).header("authorization", &format!("Bearer {B}"));
    assert_eq!(both.to(&app).await.status, 400);
    let reply = say(hello()).header("authorization", &format!("Bearer {A}")).to(&app).await;
    assert_eq!(reply.status, 200, "{}", reply.text);
}

#[tokio::test]
async fn a_web_page_drives_no_daemon_without_a_key() {
    let app = daemon(&[]);
    assert_eq!(say(hello()).to(&app).await.status, 200);
    assert_eq!(say(hello()).header("origin", "https://evil.example").to(&app).await.status, 403);
    assert_eq!(say(hello()).without("host").header("host", "evil.example").to(&app).await.status, 403);
}

#[tokio::test]
async fn a_session_is_its_owners_alone() {
    let app = daemon(&[KEYS]);
    let (of_a, of_b) = (begin(&app, A).await, begin(&app, B).await);
    assert_eq!(in_session(&app, say(ping()), A, &of_a).await.status, 200);
    for (key, session) in [(B, &of_a), (A, &of_b), (A, &"no-such-session".to_owned())] {
        let listens = get("/mcp").header("accept", "text/event-stream");
        for call in [say(ping()), listens, call(Method::DELETE, "/mcp")] {
            let reply = in_session(&app, call, key, session).await;
            assert_eq!(reply.status, 404, "{}", reply.text);
            assert_eq!(reply.json()["error"]["message"], "Session not found");
        }
    }
    // Two of them at once are not one that is good.
    let both = say(ping()).header("mcp-session-id", &of_b);
    assert_eq!(in_session(&app, both, A, &of_a).await.status, 404);
    assert_eq!(in_session(&app, say(ping()), B, &of_b).await.status, 200, "nobody has ended it");
    assert_eq!(in_session(&app, call(Method::DELETE, "/mcp"), A, &of_a).await.status, 204);
    assert_eq!(in_session(&app, say(ping()), A, &of_a).await.status, 404);
}

#[tokio::test]
async fn a_tenant_has_so_many_sessions_and_no_more() {
    let app = daemon(&[KEYS, ("CAISSON_MCP_SESSIONS_MAX", "2")]);
    let first = begin(&app, A).await;
    begin(&app, A).await;
    let reply = say(hello()).header("x-api-key", A).to(&app).await;
    assert_eq!(reply.status, 429, "{}", reply.text);
    let message = reply.json()["error"]["message"].as_str().unwrap().to_owned();
    assert!(message.starts_with("Too many MCP sessions are open (2)"), "{message}");
    begin(&app, B).await;
    assert_eq!(in_session(&app, call(Method::DELETE, "/mcp"), A, &first).await.status, 204);
    begin(&app, A).await;
}

#[tokio::test]
async fn a_session_that_nobody_uses_ends_and_one_that_is_listened_to_does_not() {
    let app = daemon(&[KEYS, ("CAISSON_MCP_SESSION_IDLE_SECS", "1")]);
    let (silent, heard) = (begin(&app, A).await, begin(&app, A).await);
    let listens = get("/mcp").header("accept", "text/event-stream");
    let listens = listens.header("x-api-key", A).header("mcp-session-id", &heard);
    let request = listens.builder.body(Body::empty()).unwrap();
    let stream = app.clone().oneshot(request).await.unwrap();
    assert_eq!(stream.status(), 200);
    tokio::time::sleep(Duration::from_millis(2500)).await;
    assert_eq!(in_session(&app, say(ping()), A, &silent).await.status, 404);
    assert_eq!(in_session(&app, say(ping()), A, &heard).await.status, 200);
    drop(stream);
    tokio::time::sleep(Duration::from_millis(2500)).await;
    assert_eq!(in_session(&app, say(ping()), A, &heard).await.status, 404);
}

#[tokio::test]
async fn an_id_is_taken_until_its_answer_has_gone() {
    let app = daemon(&[KEYS]);
    let session = begin(&app, A).await;
    let ask = || say(ping()).header("x-api-key", A).header("mcp-session-id", &session);
    // The answer is on its way and nobody has read it.
    let request = ask().builder.body(ask().body).unwrap();
    let unread = app.clone().oneshot(request).await.unwrap();
    assert_eq!(unread.status(), 200);
    let reply = ask().to(&app).await;
    assert_eq!(reply.status, 400, "{}", reply.text);
    assert_eq!(reply.json()["error"]["message"], "A request of this id has no answer yet");
    let read = unread.into_body().collect().await.unwrap().to_bytes();
    assert!(String::from_utf8_lossy(&read).contains("\"id\":2"));
    assert_eq!(ask().to(&app).await.status, 200);
}

#[tokio::test]
async fn what_is_no_message_is_refused_in_json() {
    let app = daemon(&[]);
    let refusals = [
        (say(ping()), 400),
        (post("/mcp", "{}").header("accept", "application/json"), 406),
        (post("/mcp", "not json").header("accept", "application/json, text/event-stream"), 415),
        (get("/mcp").header("accept", "text/event-stream"), 400),
    ];
    for (call, status) in refusals {
        let reply = call.to(&app).await;
        assert_eq!(reply.status.as_u16(), status, "{}", reply.text);
        assert!(reply.json()["error"]["message"].is_string(), "{}", reply.text);
    }
    assert_eq!(post("/v1/mcp", "{}").to(&app).await.status, 404, "that one is somebody else's");
}
