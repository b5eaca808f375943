//! Keys, and who may talk to a daemon without one.

use std::io::Write;
use std::sync::{Arc, Mutex};

use serde_json::json;

use super::*;

const PUBLIC: [&str; 7] =
    ["/", "/health", "/v1/health", "/v1/ping", "/openapi.json", "/v1/openapi.json", "/v2/openapi.json"];
const CLOSED: [&str; 6] =
    ["/v1/capabilities", "/v1/code/info", "/v2/code/info", "/v1/sandbox", "/v2/sandbox", "/v2/code/sessions"];

fn closed() -> App {
    daemon(&[("AIO_API_KEY", "key+of/default"), ("CODE_INTERPRETER_API_KEYS", "a=KEYA,b=KEYB")])
}

fn unauthorized() -> serde_json::Value {
    json!({ "success": false, "message": "Unauthorized", "data": null, "hint": null })
}

#[tokio::test]
async fn without_a_key_only_public_paths_answer() {
    let app = closed();
    for path in PUBLIC {
        assert_eq!(get(path).to(&app).await.status, 200, "{path}");
    }
    for path in CLOSED {
        let reply = get(path).to(&app).await;
        assert_eq!((reply.status.as_u16(), reply.json()), (401, unauthorized()), "{path}");
    }
    // Whole paths, not prefixes; and what does not exist is not told apart.
    for path in ["/health/x", "/healthz", "/metrics", "/v1/pingx", "//health", "/internal/auth/x"] {
        let reply = get(path).to(&app).await;
        assert_eq!(reply.status, 401, "{path}");
        assert_eq!(reply.json()["message"], "Unauthorized");
    }
    assert_eq!(post("/v2/code/execute", "{}").to(&app).await.status, 401);
}

#[tokio::test]
async fn every_key_works_with_every_carrier() {
    let app = closed();
    for (key, in_url) in [("key+of/default", "key%2Bof%2Fdefault"), ("KEYA", "KEYA"), ("KEYB", "KEYB")] {
        for (name, value) in [
            ("authorization", format!("Bearer {key}")),
            ("authorization", format!("bearer  {key}")),
            ("x-api-key", key.to_owned()),
            ("X-AIO-API-Key", key.to_owned()),
        ] {
            assert_eq!(get("/v1/code/info").header(name, &value).to(&app).await.status, 200, "{name}");
        }
        let uri = format!("/v1/capabilities?refresh=true&api_key={in_url}");
        assert_eq!(get(&uri).to(&app).await.status, 200, "{uri}");
    }
    for wrong in ["", "wrong", "KEY", "KEYA ", "KEYAA", "keya"] {
        let reply = get("/v1/code/info").header("x-api-key", wrong).to(&app).await;
        assert_eq!(reply.status, 401, "{wrong:?}");
    }
    assert_eq!(get("/v1/code/info").header("authorization", "Basic KEYA").to(&app).await.status, 401);
    // One good carrier is enough beside a bad one.
    let both = get("/v1/code/info").header("authorization", "Bearer no").header("x-api-key", "KEYA");
    assert_eq!(both.to(&app).await.status, 200);
}

#[tokio::test]
async fn a_key_names_its_tenant_and_tenants_see_their_own_sessions() {
    let engine = fake::Fake::default();
    let app = daemon_with(&[("CODE_INTERPRETER_API_KEYS", "a=KEYA,b=KEYB")], engine.clone());
    let body = r#"{"language":"python","code":"1"}"#;
    post("/v2/code/execute", body).header("x-api-key", "KEYB").to(&app).await;
    assert_eq!(engine.last().tenant.0, "b");
    post("/v2/code/sessions", r#"{"session_id":"s"}"#).header("x-api-key", "KEYA").to(&app).await;
    let own = get("/v2/code/sessions/s").header("x-api-key", "KEYA").to(&app).await;
    let other = get("/v2/code/sessions/s").header("x-api-key", "KEYB").to(&app).await;
    assert_eq!((own.status.as_u16(), other.status.as_u16()), (200, 404));
}

#[tokio::test]
async fn internal_auth_answers_for_itself() {
    let app = closed();
    assert_eq!(get("/internal/auth").to(&app).await.status, 401);
    assert_eq!(get("/internal/auth").header("x-api-key", "KEYA").to(&app).await.status, 204);
    let original = |uri| get("/internal/auth").header("x-original-uri", uri);
    assert_eq!(original("/v1/code/info?api_key=KEYA").to(&app).await.status, 204);
    assert_eq!(original("/v1/code/info?api_key=no").to(&app).await.status, 401);
    assert_eq!(get("/internal/auth").to(&daemon(&[])).await.status, 204);
}

#[tokio::test]
async fn a_closed_daemon_lets_any_origin_ask_without_credentials() {
    let app = closed();
    let preflight = call(Method::OPTIONS, "/v2/code/execute")
        .header("host", "sandbox.example")
        .header("origin", "https://app.example")
        .header("access-control-request-method", "POST")
        .header("access-control-request-headers", "authorization,content-type");
    let reply = preflight.to(&app).await;
    assert_eq!(reply.status, 200);
    assert_eq!(reply.header("access-control-allow-origin"), Some("*"));
    assert_eq!(reply.header("access-control-allow-headers"), Some("authorization,content-type"));
    assert_eq!(reply.header("access-control-allow-credentials"), None);
    let asked = get("/v1/code/info").header("x-api-key", "KEYA").header("origin", "https://app.example");
    assert_eq!(asked.to(&app).await.header("access-control-allow-origin"), Some("*"));
}

#[tokio::test]
async fn an_open_daemon_answers_to_loopback_and_listed_names_only() {
    let app = daemon(&[("CAISSON_HOSTS", "caisson,box.internal:9000")]);
    for (host, status) in [
        ("127.0.0.1", 200),
        ("127.0.0.1:18091", 200),
        ("127.8.9.10:1", 200),
        ("localhost:8000", 200),
        ("LOCALHOST", 200),
        ("[::1]:8000", 200),
        ("caisson:8000", 200),
        ("Caisson", 200),
        ("box.internal:9000", 200),
        ("box.internal:9001", 403),
        ("evil.example", 403),
        ("evil.example:18091", 403),
        ("127.0.0.1.evil.example", 403),
        ("localhost.evil.example", 403),
        ("127.0.0.1@evil.example", 403),
        ("localhost:80:80", 403),
        ("localhost:x", 403),
        ("0.0.0.0:18091", 403),
        ("10.0.0.1", 403),
        ("[::1", 403),
        ("[::2]", 403),
        ("", 403),
    ] {
        for path in ["/v2/code/info", "/health", "/nothing"] {
            let reply = get(path).without("host").header("host", host).to(&app).await;
            let wanted = if status == 200 && path == "/nothing" { 404 } else { status };
            assert_eq!(reply.status, wanted, "{host} {path}");
        }
    }
    assert_eq!(get("/health").without("host").to(&app).await.status, 403);
    // A second name, in another header or in the request line, must be ours as well.
    assert_eq!(get("/health").header("host", "evil.example").to(&app).await.status, 403);
    assert_eq!(get("http://evil.example/health").to(&app).await.status, 403);
    let refused = get("/v2/code/info").without("host").header("host", "evil.example").to(&app).await.json();
    assert_eq!(refused["message"], "Host 'evil.example' is not allowed while no API key is configured");
}

#[tokio::test]
async fn an_open_daemon_obeys_no_foreign_page() {
    let engine = fake::Fake::default();
    let app = daemon_with(&[("CAISSON_ORIGINS", "http://localhost:3000")], engine.clone());
    let body = r#"{"language":"python","code":"1"}"#;
    for (origin, site, status) in [
        (None, None, 200),
        (None, Some("none"), 200),
        (None, Some("same-origin"), 200),
        (Some("http://127.0.0.1:18091"), Some("same-origin"), 200),
        (Some("http://localhost:3000"), Some("cross-site"), 200),
        (None, Some("cross-site"), 403),
        (None, Some("same-site"), 403),
        (Some("http://127.0.0.1:18091"), Some("cross-site"), 403),
        (Some("http://127.0.0.1:3000"), None, 403),
        (Some("http://127.0.0.1"), None, 403),
        (Some("https://evil.example"), None, 403),
        (Some("null"), None, 403),
        (Some("file://"), None, 403),
    ] {
        let mut call = post("/v2/code/execute", body);
        if let Some(origin) = origin {
            call = call.header("origin", origin);
        }
        if let Some(site) = site {
            call = call.header("sec-fetch-site", site);
        }
        let before = engine.runs();
        let reply = call.to(&app).await;
        assert_eq!(reply.status, status, "{origin:?} {site:?}");
        assert_eq!(engine.runs() - before, usize::from(status == 200));
        assert_ne!(reply.header("access-control-allow-origin"), Some("*"));
    }
    let listed = get("/v2/code/info").header("origin", "http://localhost:3000").to(&app).await;
    assert_eq!(listed.header("access-control-allow-origin"), Some("http://localhost:3000"));
    assert_eq!(listed.header("access-control-allow-credentials"), None);
}

#[tokio::test]
async fn an_open_daemon_takes_json_only() {
    let app = daemon(&[]);
    let body = r#"{"language":"python","code":"1"}"#;
    for (content_type, status) in [
        (Some("application/json"), 200),
        (Some("application/json; charset=utf-8"), 200),
        (Some("Application/JSON"), 200),
        (None, 415),
        (Some("text/plain"), 415),
        (Some("text/plain; application/json"), 415),
        (Some("application/x-www-form-urlencoded"), 415),
        (Some("multipart/form-data; boundary=x"), 415),
        (Some("application/jsonx"), 415),
    ] {
        let mut call = post("/v2/code/execute", body).without("content-type");
        if let Some(content_type) = content_type {
            call = call.header("content-type", content_type);
        }
        let reply = call.to(&app).await;
        assert_eq!(reply.status, status, "{content_type:?}");
        assert_eq!(reply.json()["success"], status == 200);
    }
    // Without a body there is nothing a form could smuggle in.
    assert_eq!(post("/v2/code/sessions", "").without("content-type").to(&app).await.status, 200);
    assert_eq!(call(Method::DELETE, "/v2/code/sessions").to(&app).await.status, 200);
    // With a key configured a browser cannot forge the request anyway.
    let keyed = post("/v2/code/execute", body).without("content-type").header("x-api-key", "KEYA");
    assert_eq!(keyed.to(&closed()).await.status, 200);
}

/// What is logged while it lives.
pub(super) struct Logged {
    lines: Lines,
    _second: tracing::Dispatch,
    _logging: tracing::subscriber::DefaultGuard,
}

impl Logged {
    pub(super) fn everything() -> Logged {
        let lines = Lines::default();
        let writer = lines.clone();
        let subscriber = tracing_subscriber::fmt()
            .with_max_level(tracing::Level::TRACE)
            .with_span_events(tracing_subscriber::fmt::format::FmtSpan::FULL)
            .with_ansi(false)
            .with_writer(move || writer.clone())
            .finish();
        // With a single dispatcher tracing asks the thread that first meets a call site, which here may be
        // another test without one, and remembers its no. With two it asks them all.
        let second = tracing::Dispatch::new(tracing_subscriber::registry());
        Logged { lines, _second: second, _logging: tracing::subscriber::set_default(subscriber) }
    }

    pub(super) fn text(&self) -> String {
        String::from_utf8(self.lines.0.lock().unwrap().clone()).unwrap()
    }
}

#[derive(Clone, Default)]
struct Lines(Arc<Mutex<Vec<u8>>>);

impl Write for Lines {
    fn write(&mut self, bytes: &[u8]) -> std::io::Result<usize> {
        self.0.lock().unwrap().extend_from_slice(bytes);
        Ok(bytes.len())
    }

    fn flush(&mut self) -> std::io::Result<()> {
        Ok(())
    }
}

#[tokio::test]
async fn a_key_in_a_url_is_in_no_log_line_and_no_answer() {
    let logging = Logged::everything();
    let app = closed();
    let mut answers = String::new();
    for key in ["KEYA", "SECRETWRONG"] {
        for path in ["/v2/code/info", "/nothing", "/v1/capabilities", "/health", "/v2/code/sessions/x"] {
            for uri in [format!("{path}?refresh=maybe&api_key={key}"), format!("/k/{key}{path}")] {
                let reply = get(&uri).to(&app).await;
                assert_eq!(reply.header("referrer-policy"), Some("no-referrer"));
                answers.push_str(&format!("{:?}{}", reply.headers, reply.text));
            }
        }
    }
    let logged = logging.text();
    assert!(logged.contains("/v2/code/info"), "the control: requests are logged\n{logged}");
    for text in [logged, answers] {
        assert!(!text.contains("KEYA") && !text.contains("SECRETWRONG"), "{text}");
        assert!(!text.contains("api_key=") && !text.contains("refresh=maybe"), "{text}");
    }
}
