//! What the code interpreter API adds to keys: tokens, keys in front of a path, one credential a request; and what it
//! lets an operator set: origins, rates, a log of requests.

use axum::http::header::HeaderName;
use serde_json::{Value, json};

use super::access::Logged;
use super::*;
use crate::server::jwt::tests::{minted, public_key};

const BOTH: [(&str, &str); 3] = [
    ("CODE_INTERPRETER_API_KEYS", "a=KEYA,b=KEYB"),
    ("CODE_INTERPRETER_URL_KEYS", "true"),
    ("CODEAPI_JWT_PUBLIC_KEY", ""),
];
/// A route of each family that needs a key and answers without an engine of its own.
const ROUTES: [&str; 4] =
    ["/libraries?runtime=bash", "/v1/libraries?runtime=bash", "/v1/code/info", "/v2/code/sessions"];

fn with_signer<'a>(more: &[(&'a str, &'a str)]) -> Vec<(&'a str, &'a str)> {
    let mut variables: Vec<_> = BOTH.to_vec();
    variables.retain(|(name, _)| *name != "CODEAPI_JWT_PUBLIC_KEY");
    variables.push(("CODEAPI_JWT_PUBLIC_KEY", public_key()));
    variables.extend(more);
    variables
}

fn closed() -> App {
    daemon(&with_signer(&[]))
}

fn unauthorized() -> Value {
    json!({ "error": "Invalid or missing API key", "detail": "Invalid or missing API key" })
}

fn bearer(call: Call, credential: &str) -> Call {
    call.header("authorization", &format!("Bearer {credential}"))
}

#[tokio::test]
async fn without_a_good_credential_the_family_says_so_in_its_words() {
    let app = closed();
    for path in ["/exec", "/v1/exec", "/exec/stream", "/upload", "/v1/upload/batch"] {
        let reply = post(path, "{}").to(&app).await;
        assert_eq!((reply.status.as_u16(), reply.json()), (401, unauthorized()), "{path}");
    }
    for path in ["/libraries", "/v1/libraries", "/files/S", "/download/S/F", "/sessions/S/objects/F"] {
        for credential in [None, Some("definitely-wrong"), Some("KEYA KEYA"), Some("")] {
            let call = match credential {
                Some(credential) => get(path).header("x-api-key", credential),
                None => get(path),
            };
            let reply = call.to(&app).await;
            assert_eq!((reply.status.as_u16(), reply.json()), (401, unauthorized()), "{path} {credential:?}");
        }
    }
}

#[tokio::test]
async fn every_credential_opens_every_family() {
    let app = closed();
    let token = minted("legacy", "alice");
    for path in ROUTES {
        for carrier in ["x-api-key", "X-API-KEY", "x-aio-api-key"] {
            assert_eq!(get(path).header(carrier, "KEYA").to(&app).await.status, 200, "{carrier} {path}");
        }
        for credential in ["KEYA", "KEYB", &token] {
            assert_eq!(bearer(get(path), credential).to(&app).await.status, 200, "{credential} {path}");
        }
        for prefix in ["/k/KEYA", "/k/KEYB", "//k/KEYA", "/k/%4BEYA"] {
            let uri = format!("{prefix}{path}");
            let reply = get(&uri).to(&app).await;
            assert_eq!(
                (reply.status.as_u16(), reply.header("referrer-policy")),
                (200, Some("no-referrer")),
                "{uri}"
            );
        }
        assert_eq!(get(path).to(&app).await.header("referrer-policy"), None);
        let wrong = get(&format!("/k/wrong{path}")).to(&app).await;
        assert_eq!((wrong.status.as_u16(), wrong.header("referrer-policy")), (401, Some("no-referrer")));
        assert!(!wrong.text.contains("wrong"));
    }
    // A token is one as a bearer's only.
    assert_eq!(get(ROUTES[0]).header("x-api-key", &token).to(&app).await.status, 401);
    assert_eq!(get(&format!("/k/{token}{}", ROUTES[0])).to(&app).await.status, 401);
}

#[tokio::test]
async fn a_key_in_front_of_a_path_needs_its_switch() {
    let logging = Logged::everything();
    let app = daemon(&[("CODE_INTERPRETER_API_KEYS", "a=KEYA")]);
    for uri in ["/k/KEYA/libraries?runtime=bash", "/k/KEYA/v1/code/info", "/k/KEYA"] {
        let reply = get(uri).to(&app).await;
        assert_eq!(
            (reply.status.as_u16(), reply.header("referrer-policy")),
            (401, Some("no-referrer")),
            "{uri}"
        );
        assert!(reply.json()["error"].is_string() && reply.json()["detail"].is_string());
        let other = get(uri).header("x-api-key", "KEYA").to(&app).await;
        assert_eq!(other.status, 404, "it leads nowhere");
    }
    get("/v1/K/KEYA/exec").to(&app).await;
    assert!(logging.text().contains("/v1/K/(masked)/exec"), "{}", logging.text());
    assert!(logging.text().contains("/k/(masked)/code/info"), "the control\n{}", logging.text());
    assert!(!logging.text().contains("KEYA"), "{}", logging.text());
}

#[tokio::test]
async fn a_token_proves_its_user_and_a_key_none() {
    let engine = fake::Fake::default();
    let app = daemon_with(&with_signer(&[]), engine.clone());
    let body = r#"{"language":"python","code":"1"}"#;
    for (credential, tenant) in [
        ("KEYA".to_owned(), "a"),
        (minted("a", "alice"), "jwt:a/alice"),
        (minted("a", "bob"), "jwt:a/bob"),
        (minted("default", "alice"), "jwt:default/alice"),
    ] {
        assert_eq!(bearer(post("/v2/code/execute", body), &credential).to(&app).await.status, 200);
        assert_eq!(engine.last().tenant.0, tenant);
    }
    // What alice opened is not there for bob, nor for the key of a tenant of that name.
    let alice = minted("a", "alice");
    bearer(post("/v2/code/sessions", r#"{"session_id":"s"}"#), &alice).to(&app).await;
    for (credential, status) in
        [(alice, 200), (minted("a", "bob"), 404), ("KEYA".to_owned(), 404), (minted("b", "alice"), 404)]
    {
        assert_eq!(bearer(get("/v2/code/sessions/s"), &credential).to(&app).await.status, status);
    }
}

#[tokio::test]
async fn a_tampered_token_is_no_key() {
    let app = closed();
    let good = minted("legacy", "alice");
    let [header, payload, signature] = <[&str; 3]>::try_from(good.split('.').collect::<Vec<_>>()).unwrap();
    let other = minted("legacy", "root");
    let root = other.split('.').nth(1).unwrap();
    for bad in [
        format!("{header}.{root}.{signature}"),
        format!("{header}.{payload}."),
        format!("{header}.{payload}"),
        format!("eyJhbGciOiJub25lIn0.{payload}."),
        "a.b.c".to_owned(),
        "..".to_owned(),
    ] {
        for path in ROUTES {
            let reply = bearer(get(path), &bad).to(&app).await;
            assert_eq!(reply.status, 401, "{bad}");
            assert!(!reply.text.contains(&bad), "{}", reply.text);
        }
    }
    // Where no signer is trusted the best token is none.
    let without = daemon(&BOTH);
    assert_eq!(bearer(get(ROUTES[0]), &good).to(&without).await.status, 401);
}

#[tokio::test]
async fn the_key_of_a_signer_alone_closes_the_daemon() {
    let app = daemon(&[("CODEAPI_JWT_PUBLIC_KEY", public_key())]);
    for path in ROUTES {
        assert_eq!(get(path).to(&app).await.status, 401, "{path}");
        assert_eq!(bearer(get(path), &minted("t", "u")).to(&app).await.status, 200, "{path}");
    }
    // No guard: a foreign name and a form's type are as good as with an API key.
    let foreign = get("/health").without("host").header("host", "evil.example");
    assert_eq!(foreign.to(&app).await.status, 200);
    let body = get("/health").to(&app).await.json();
    assert!(!body["warnings"].to_string().contains("no API key"), "{body}");
}

#[tokio::test]
async fn credentials_that_differ_are_refused_by_the_code_interpreter_only() {
    let app = closed();
    let token = minted("legacy", "alice");
    let ambiguous =
        json!({ "error": "Ambiguous authentication headers", "detail": "Ambiguous authentication headers" });
    let with = |path: &str, headers: &[(&str, &str)]| {
        headers.iter().fold(get(path), |call, (name, value)| call.header(name, value))
    };
    let bearer_of = |credential: &str| format!("Bearer {credential}");
    let cases: [&[(&str, &str)]; 5] = [
        &[("x-api-key", "wrong"), ("authorization", &bearer_of("KEYA"))],
        &[("x-api-key", "KEYA"), ("authorization", &bearer_of("KEYB"))],
        &[("x-api-key", "KEYA"), ("authorization", &bearer_of(&token))],
        &[("x-api-key", "KEYA"), ("x-api-key", "KEYB")],
        &[("x-api-key", "KEYA"), ("x-aio-api-key", "wrong")],
    ];
    for headers in cases {
        let reply = with("/libraries?runtime=bash", headers).to(&app).await;
        assert_eq!((reply.status.as_u16(), reply.json()), (400, ambiguous.clone()), "{headers:?}");
        assert_eq!(with("/v1/exec", headers).to(&app).await.status, 400);
        assert_eq!(with("/v1/code/info", headers).to(&app).await.status, 200, "{headers:?}");
        assert_eq!(with("/health", headers).to(&app).await.status, 200);
    }
    for uri in
        ["/k/KEYB/libraries?runtime=bash", "/libraries?runtime=bash&api_key=KEYB", "/k/KEYA/k/KEYB/libraries"]
    {
        assert_eq!(get(uri).header("x-api-key", "KEYA").to(&app).await.status, 400, "{uri}");
    }
    // The same one twice is one, and what is no credential is none.
    for headers in [
        [("x-api-key", "KEYA"), ("authorization", "Bearer KEYA")],
        [("x-api-key", ""), ("authorization", "Bearer KEYA")],
        [("x-api-key", "KEYA"), ("authorization", "Basic dTpw")],
        [("x-api-key", "KEYA"), ("authorization", "Bearer ")],
    ] {
        assert_eq!(with("/libraries?runtime=bash", &headers).to(&app).await.status, 200, "{headers:?}");
    }
    assert_eq!(get("/k/KEYA/libraries?runtime=bash").header("x-api-key", "KEYA").to(&app).await.status, 200);
}

#[tokio::test]
async fn a_proxy_may_ask_about_keys_in_front_of_a_path() {
    let original = |uri| get("/internal/auth").header("x-original-uri", uri);
    let app = closed();
    assert_eq!(original("/k/KEYA/v1/exec").to(&app).await.status, 204);
    assert_eq!(original("/k/no/v1/exec").to(&app).await.status, 401);
    assert_eq!(bearer(get("/internal/auth"), &minted("t", "u")).to(&app).await.status, 204);
    let switched_off = daemon(&[("CODE_INTERPRETER_API_KEYS", "a=KEYA")]);
    assert_eq!(original("/k/KEYA/v1/exec").to(&switched_off).await.status, 401);
}

fn preflight(path: &str, origin: &str) -> Call {
    call(Method::OPTIONS, path)
        .header("origin", origin)
        .header("access-control-request-method", "POST")
        .header("access-control-request-headers", "x-api-key,content-type")
}

#[tokio::test]
async fn origins_are_those_the_operator_lists() {
    const ALLOWED: &str = "access-control-allow-origin";
    let anybody = preflight("/exec", "http://ui.example").to(&closed()).await;
    assert_eq!((anybody.status.as_u16(), anybody.header(ALLOWED)), (200, Some("*")));
    assert_eq!(anybody.header("access-control-allow-credentials"), None);
    let some = daemon(&with_signer(&[
        ("CORS_ALLOW_ORIGINS", "https://a.example"),
        ("CAISSON_ORIGINS", "https://b.example"),
    ]));
    for (origin, allowed) in
        [("https://a.example", true), ("https://b.example", true), ("https://c.example", false)]
    {
        let reply = preflight("/exec", origin).to(&some).await;
        assert_eq!(reply.header(ALLOWED), allowed.then_some(origin), "{origin}");
        let asked = get(ROUTES[0]).header("x-api-key", "KEYA").header("origin", origin).to(&some).await;
        assert_eq!((asked.status.as_u16(), asked.header(ALLOWED)), (200, allowed.then_some(origin)));
    }
    // Without a key `*` is nobody, and a listed one passes the guard.
    let open = daemon(&[("CORS_ALLOW_ORIGINS", "*,https://a.example")]);
    let listed = get(ROUTES[0]).header("origin", "https://a.example").to(&open).await;
    assert_eq!((listed.status.as_u16(), listed.header(ALLOWED)), (200, Some("https://a.example")));
    let other = get(ROUTES[0]).header("origin", "https://c.example").to(&open).await;
    assert_eq!((other.status.as_u16(), other.header(ALLOWED)), (403, None));
}

#[tokio::test]
async fn an_open_daemon_takes_multipart_on_upload_routes_only() {
    let app = daemon(&[]);
    let form = |path: &str| {
        post(path, "--x--").without("content-type").header("content-type", "multipart/form-data; boundary=x")
    };
    for path in ["/upload", "/upload/batch", "/v1/upload", "/v1/upload/batch"] {
        assert_ne!(form(path).to(&app).await.status, 415, "{path}");
        let reply = post(path, "{}").to(&app).await;
        assert_eq!(
            (reply.status.as_u16(), &reply.json()["error"]),
            (415, &json!("Content-Type must be multipart/form-data"))
        );
    }
    assert_eq!(form("/exec").to(&app).await.status, 415);
}

#[tokio::test]
async fn a_user_that_asks_too_often_is_told_when_to_come_back() {
    let app = daemon(&with_signer(&[("FETCH_MAX_REQUESTS", "2"), ("FETCH_LIMIT_WINDOW", "20000")]));
    let alice = minted("t", "alice");
    let asked = |credential: &str| bearer(get("/v1/files/S"), credential);
    for _ in 0..2 {
        assert_ne!(asked(&alice).to(&app).await.status, 429);
    }
    let refused = asked(&alice).to(&app).await;
    let text = "Too many listing requests. Please retry in 10 seconds.";
    let wanted =
        json!({ "error": "rate_limited", "detail": text, "message": text, "retry_after_seconds": 10 });
    assert_eq!(
        (refused.status.as_u16(), refused.json(), refused.header("retry-after")),
        (429, wanted, Some("10"))
    );
    // The same listing at the root, by another token of hers; and others, other kinds, other families.
    assert_eq!(bearer(get("/files/S"), &minted("t", "alice")).to(&app).await.status, 429);
    for credential in [minted("t", "bob"), minted("u", "alice"), "KEYA".to_owned()] {
        assert_ne!(asked(&credential).to(&app).await.status, 429);
    }
    for path in ["/download/S/F", "/libraries?runtime=bash", "/v1/code/info", "/health"] {
        assert_ne!(bearer(get(path), &alice).to(&app).await.status, 429, "{path}");
    }
    // Without a credential nobody's share is used.
    for _ in 0..4 {
        assert_eq!(get("/files/S").to(&app).await.status, 401);
    }
    assert_ne!(asked("KEYB").to(&app).await.status, 429);
}

#[tokio::test]
async fn requests_are_logged_when_the_operator_asks_and_keys_never() {
    let logging = Logged::everything();
    let secrets: [(HeaderName, &str); 6] = [
        (HeaderName::from_static("x-api-key"), "KEYA"),
        (HeaderName::from_static("authorization"), "Bearer KEYA"),
        (HeaderName::from_static("cookie"), "session=KEYA"),
        (HeaderName::from_static("referer"), "http://h/k/KEYA/x"),
        (HeaderName::from_static("x-original-uri"), "/a?api_key=KEYA"),
        (HeaderName::from_static("x-of-our-own-making"), "KEYA"),
    ];
    let code = format!(r#"{{"language":"python","code":"1 # caf\u00e9\nsecond {}"}}"#, "x".repeat(600));
    let ask = |app: App| {
        let call = post("/k/KEYA/v2/code/execute?api_key=KEYA", &code).header("user-agent", "LibreChat/1.0");
        let call = secrets.iter().fold(call, |call, (name, value)| call.header(name.as_str(), value));
        async move { call.to(&app).await.status.as_u16() }
    };
    assert_eq!(ask(closed()).await, 200);
    assert!(
        !logging.text().contains("second") && !logging.text().contains("LibreChat/1.0"),
        "off by default"
    );
    assert_eq!(ask(daemon(&with_signer(&[("LOG_REQUESTS", "1")]))).await, 200);
    let logged = logging.text();
    for wanted in [
        "user-agent: LibreChat/1.0",
        "x-api-key: (masked)",
        "/v2/code/execute",
        r#"\"language\":\"python\""#,
        "second",
    ] {
        assert!(logged.contains(wanted), "{wanted} is missing from\n{logged}");
    }
    assert!(!logged.contains("KEYA"), "{logged}");
    assert!(!logged.contains(&"x".repeat(500)), "the body is cut\n{logged}");
}
