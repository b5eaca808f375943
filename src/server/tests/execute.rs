use std::time::Duration;

use serde_json::{Value, json};

use super::*;
use crate::engine::{Language, SessionChoice, TenantId};

async fn run(generation: &str, body: Value) -> Reply {
    post(&format!("/{generation}/code/execute"), &body.to_string()).to(&daemon(&[])).await
}

fn cell(code: &str) -> Value {
    json!({ "language": "python", "code": code })
}

fn golden(text: &str) -> Value {
    serde_json::from_str(text).unwrap()
}

#[tokio::test]
async fn whole_bodies_are_the_golden_ones() {
    for (generation, code, wanted) in [
        ("v1", "print(1)", include_str!("../../../tests/golden/aio/execute-v1.json")),
        ("v2", "print(1)", include_str!("../../../tests/golden/aio/execute-v2.json")),
        ("v1", "rich", include_str!("../../../tests/golden/aio/execute-rich-v1.json")),
        ("v2", "rich", include_str!("../../../tests/golden/aio/execute-rich-v2.json")),
    ] {
        let reply = run(generation, cell(code)).await;
        assert_eq!(reply.status, 200);
        assert_eq!(reply.header("content-type"), Some("application/json"));
        assert_eq!(reply.json(), golden(wanted), "{generation} {code}: {}", reply.text);
    }
}

#[tokio::test]
async fn output_objects_of_v2_carry_their_own_keys_in_order() {
    let reply = run("v2", cell("print(1)")).await;
    assert!(
        reply.text.contains(r#"{"output_type":"stream","name":"stdout","text":"1\n"}"#),
        "{}",
        reply.text
    );
}

#[tokio::test]
async fn a_timeout_is_a_failed_cell() {
    let body = run("v2", cell("timeout")).await.json();
    assert_eq!((&body["success"], &body["data"]["status"]), (&json!(false), &json!("timeout")));
    assert_eq!(body["message"], "execution failed");
}

#[tokio::test]
async fn a_request_reaches_the_engine_in_its_own_types() {
    let engine = Fake::default();
    let app = daemon_with(&[], engine.clone());
    let body = json!({
        "language": "node", "code": "1", "session_id": "s1", "stateful": true, "timeout": 1.5,
        "cwd": "/tmp", "user": "nobody", "strict": true, "env": {"A": "b"}, "kernel_name": "x",
    });
    post("/v1/code/execute", &body.to_string()).to(&app).await;
    let asked = engine.last();
    assert_eq!(asked.tenant, TenantId("default".to_owned()));
    assert_eq!(asked.language, Language::JavaScript);
    assert_eq!(asked.session, SessionChoice::Named("s1".to_owned()));
    assert_eq!(asked.timeout, Duration::from_millis(1500));
    assert_eq!(
        (asked.cwd.as_deref(), asked.user.as_deref(), asked.strict),
        (Some("/tmp"), Some("nobody"), true)
    );

    let nulls = json!({
        "language": "python3", "code": "1", "session_id": null, "stateful": null, "timeout": null,
        "cwd": null, "user": null, "strict": null,
    });
    post("/v2/code/execute", &nulls.to_string()).to(&app).await;
    let asked = engine.last();
    assert_eq!((asked.session, asked.timeout), (SessionChoice::OneOff, Duration::from_secs(30)));
    assert_eq!((asked.cwd, asked.user, asked.strict), (None, None, false));

    post("/v2/code/execute", r#"{"language":"python","code":"1","stateful":true}"#).to(&app).await;
    assert_eq!(engine.last().session, SessionChoice::Generated);
}

#[tokio::test]
async fn a_strict_deployment_makes_every_cell_strict() {
    let engine = Fake::default();
    let app = daemon_with(&[("CAISSON_STRICT", "1")], engine.clone());
    post("/v2/code/execute", r#"{"language":"python","code":"1","strict":false}"#).to(&app).await;
    assert!(engine.last().strict);
}

#[tokio::test]
async fn an_unsupported_language_is_worded_by_generation() {
    let body = json!({ "language": "ruby", "code": "puts 1" });
    let reason = "Unsupported language 'ruby'. Supported: python, javascript";
    let v2 = run("v2", body.clone()).await;
    assert_eq!(v2.status, 422);
    assert_eq!(v2.json(), json!({ "success": false, "message": reason, "data": null }));
    let v1 = run("v1", body).await;
    assert_eq!(v1.status, 422);
    assert_eq!(
        v1.json(),
        json!({
            "success": false,
            "message": "Request data validation failed",
            "data": null,
            "errors": [{ "location": ["body", "language"], "message": reason, "type": "enum" }],
        })
    );
}

#[tokio::test]
async fn missing_fields_are_listed_one_by_one() {
    for generation in ["v1", "v2"] {
        let wanted = json!({
            "success": false,
            "message": "Request data validation failed",
            "data": null,
            "errors": [
                { "location": ["body", "language"], "message": "missing field `language`", "type": "value_error.missing" },
                { "location": ["body", "code"], "message": "missing field `code`", "type": "value_error.missing" },
            ],
        });
        let uri = format!("/{generation}/code/execute");
        // No body, an empty object and a bare null all lack the same two fields.
        for body in ["", "{}", "null"] {
            let reply = post(&uri, body).to(&daemon(&[])).await;
            assert_eq!((reply.status.as_u16(), reply.json()), (422, wanted.clone()), "{uri} {body:?}");
        }
    }
}

#[tokio::test]
async fn every_mistyped_field_is_rejected_under_its_name() {
    for generation in ["v1", "v2"] {
        for (field, value, kind) in [
            ("language", json!(7), "type_error.string"),
            ("code", json!(["a"]), "type_error.string"),
            ("session_id", json!({"a": 1}), "type_error.string"),
            ("stateful", json!("maybe"), "type_error.bool"),
            ("timeout", json!("soon"), "type_error.number"),
            ("cwd", json!(3), "type_error.string"),
            ("user", json!(true), "type_error.string"),
            ("strict", json!(1), "type_error.bool"),
        ] {
            let mut body = cell("1");
            body[field] = value;
            let reply = run(generation, body).await;
            assert_eq!(reply.status, 422, "{generation} {field}");
            let json = reply.json();
            assert_eq!(json["message"], "Request data validation failed");
            assert_eq!(json["errors"].as_array().unwrap().len(), 1);
            assert_eq!(json["errors"][0]["location"], json!(["body", field]));
            assert_eq!(json["errors"][0]["type"], kind);
        }
    }
}

#[tokio::test]
async fn v1_lists_schema_errors_and_reasons_together() {
    let reply = run("v1", json!({ "language": "ruby", "code": 5, "timeout": 0 })).await;
    let errors = reply.json()["errors"].clone();
    let fields: Vec<&Value> = errors.as_array().unwrap().iter().map(|error| &error["location"][1]).collect();
    assert_eq!(fields, ["code", "language", "timeout"]);
}

#[tokio::test]
async fn the_timeout_has_bounds_that_are_inclusive() {
    for (timeout, status) in [
        (json!(1), 200),
        (json!(900), 200),
        (json!(1.25), 200),
        (json!(900.0), 200),
        (json!(0), 422),
        (json!(-1), 422),
        (json!(0.999), 422),
        (json!(900.001), 422),
        (json!(901), 422),
        (json!(u64::MAX), 422),
    ] {
        for generation in ["v1", "v2"] {
            let mut body = cell("1");
            body["timeout"] = timeout.clone();
            let reply = run(generation, body).await;
            assert_eq!(reply.status, status, "{timeout} on {generation}");
        }
    }
    let mut body = cell("1");
    body["timeout"] = json!(901);
    let reason = "timeout must be between 1 and 900 seconds, got 901";
    assert_eq!(run("v2", body.clone()).await.json()["message"], reason);
    let error = run("v1", body).await.json()["errors"][0].clone();
    assert_eq!((&error["location"], &error["message"]), (&json!(["body", "timeout"]), &json!(reason)));
}

#[tokio::test]
async fn empty_code_runs_on_v1_and_is_refused_on_v2() {
    let v1 = run("v1", cell("")).await;
    assert_eq!((v1.status.as_u16(), &v1.json()["data"]["outputs"]), (200, &json!([])));
    let v2 = run("v2", cell("")).await;
    assert_eq!(v2.status, 422);
    assert_eq!(v2.json(), json!({ "success": false, "message": "code must not be empty", "data": null }));
    assert_eq!(run("v2", cell("  \n")).await.status, 200);
}

#[tokio::test]
async fn refusals_of_the_engine_have_their_status_and_words() {
    for (code, status, message) in [
        ("many", 429, "Maximum number of sessions (20) reached"),
        ("many kernels", 429, "Maximum number of kernel sessions (5) reached"),
        ("waiting", 429, "Too many calls are waiting (8)"),
        ("none", 503, "No interpreter for python: python3 was not found"),
        ("down", 503, "the daemon is shutting down"),
        ("launch", 503, "the sandbox could not be started; the operator's log has the reason"),
    ] {
        for generation in ["v1", "v2"] {
            let reply = run(generation, cell(code)).await;
            let body = reply.json();
            assert_eq!((reply.status.as_u16(), &body["message"]), (status, &json!(message)));
            assert_eq!((&body["success"], &body["data"]), (&json!(false), &Value::Null));
            assert!(body["hint"].is_string(), "{body}");
        }
    }
    assert_eq!(run("v2", cell("down")).await.header("retry-after"), Some("1"));
}

#[tokio::test]
async fn what_the_engine_finds_unusable_is_a_422_of_that_field() {
    for (code, field, message) in [
        ("cwd", "cwd", "cwd is not a directory: /nowhere"),
        ("id", "session_id", "Session ids have 1 to 256 characters"),
    ] {
        let v1 = run("v1", cell(code)).await;
        assert_eq!(v1.status, 422);
        let error = v1.json()["errors"][0].clone();
        assert_eq!((&error["location"], &error["message"]), (&json!(["body", field]), &json!(message)));
        let v2 = run("v2", cell(code)).await;
        assert_eq!((v2.status.as_u16(), &v2.json()["message"]), (422, &json!(message)));
    }
}

#[tokio::test]
async fn bodies_that_are_no_object_are_client_errors_with_the_envelope() {
    for body in ["{nope", "[1]", "\"x\"", "{} trailing", r#"{"language":"python","code":"\ud800"}"#] {
        for generation in ["v1", "v2"] {
            let reply = post(&format!("/{generation}/code/execute"), body).to(&daemon(&[])).await;
            assert_eq!(reply.status, 422, "{body}");
            let json = reply.json();
            assert_eq!((&json["success"], &json["errors"][0]["location"]), (&json!(false), &json!(["body"])));
        }
    }
}

#[tokio::test]
async fn nul_and_every_other_character_pass_through_byte_for_byte() {
    let code = "\u{0}žluťoučký 🐍\u{2028}\r\n\"\\\u{7f}";
    let reply = run("v2", cell(code)).await;
    assert_eq!((reply.status.as_u16(), reply.json()["data"]["code"].as_str()), (200, Some(code)));
}

#[tokio::test]
async fn a_body_over_two_mebibytes_is_413_with_the_envelope() {
    let code = "x".repeat(2 * 1024 * 1024 + 1);
    for generation in ["v1", "v2"] {
        let reply = run(generation, cell(&code)).await;
        assert_eq!((reply.status.as_u16(), &reply.json()["success"]), (413, &json!(false)));
    }
    let fits = "x".repeat(2 * 1024 * 1024 - 64);
    assert_eq!(run("v2", cell(&fits)).await.status, 200);
}

#[tokio::test]
async fn a_panic_of_the_engine_is_told_as_a_failed_cell() {
    // A 5xx would make clients send the code again, and it may have run.
    let reply = run("v2", cell("panic")).await;
    let body = reply.json();
    assert_eq!((reply.status.as_u16(), &body["success"]), (200, &json!(false)));
    assert_eq!(body["data"]["outputs"][0]["ename"], "ProcessError");
    assert!(!reply.text.contains("told to"), "{}", reply.text);
}
