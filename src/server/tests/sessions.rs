use serde_json::json;

use super::*;

#[tokio::test]
async fn a_session_lives_from_post_to_delete() {
    let app = daemon(&[]);
    let entry = json!({
        "session_id": "s1", "language": "python", "cwd": "/home/sandbox",
        "created_at": 1_700_000_000_000_u64, "last_used": 1_700_000_001_000_u64,
        "age_seconds": 2, "max_idle_time": 1_800_000, "state": "idle",
    });
    let envelope = |data| json!({ "success": true, "message": "ok", "data": data, "hint": null });
    let body = r#"{"language":"python","session_id":"s1"}"#;
    assert_eq!(post("/v2/code/sessions", body).to(&app).await.json(), envelope(entry.clone()));
    assert_eq!(get("/v2/code/sessions/s1").to(&app).await.json(), envelope(entry.clone()));
    assert_eq!(
        get("/v2/code/sessions").to(&app).await.json(),
        envelope(json!({ "sessions": { "s1": entry } }))
    );
    let gone = |deleted| envelope(json!({ "deleted": deleted }));
    assert_eq!(call(Method::DELETE, "/v2/code/sessions/s1").to(&app).await.json(), gone(true));
    assert_eq!(call(Method::DELETE, "/v2/code/sessions/s1").to(&app).await.json(), gone(false));
    assert_eq!(get("/v2/code/sessions").to(&app).await.json(), envelope(json!({ "sessions": {} })));
}

#[tokio::test]
async fn an_unknown_session_is_404_on_a_read() {
    let reply = get("/v2/code/sessions/none").to(&daemon(&[])).await;
    assert_eq!(reply.status, 404);
    assert_eq!(
        reply.json(),
        json!({ "success": false, "message": "No session 'none'", "data": null, "hint": null })
    );
}

#[tokio::test]
async fn a_session_needs_no_body_and_is_python_then() {
    let reply = post("/v2/code/sessions", "").without("content-type").to(&daemon(&[])).await;
    assert_eq!(reply.json()["data"]["language"], "python");
    assert_eq!(reply.json()["data"]["session_id"], "generated-1");
}

#[tokio::test]
async fn sessions_are_refused_in_the_words_of_v2() {
    let app = daemon(&[]);
    let refused = async |body: &str| post("/v2/code/sessions", body).to(&app).await;
    let ruby = refused(r#"{"language":"ruby"}"#).await;
    assert_eq!(ruby.status, 422);
    assert_eq!(ruby.json()["message"], "Unsupported language 'ruby'. Supported: python, javascript");
    let cwd = refused(r#"{"cwd":"/nowhere"}"#).await;
    assert_eq!(
        (cwd.status.as_u16(), &cwd.json()["message"]),
        (422, &json!("cwd is not a directory: /nowhere"))
    );
    let mistyped = refused(r#"{"session_id":5}"#).await;
    assert_eq!(mistyped.json()["errors"][0]["location"], json!(["body", "session_id"]));
    let user = refused(r#"{"user":"alice"}"#).await;
    assert_eq!((user.status.as_u16(), &user.json()["success"]), (200, &json!(false)));
    assert_eq!(user.json()["message"], "cannot run as alice");
}

#[tokio::test]
async fn ids_are_percent_decoded_once() {
    let app = daemon(&[]);
    post("/v2/code/sessions", r#"{"session_id":"a b%20ž"}"#).to(&app).await;
    assert_eq!(get("/v2/code/sessions/a%20b%2520%C5%BE").to(&app).await.status, 200);
    assert_eq!(get("/v2/code/sessions/%FF").to(&app).await.status, 404);
}

#[tokio::test]
async fn clearing_counts_what_it_ended() {
    let app = daemon(&[]);
    for id in ["a", "b", "c"] {
        post("/v2/code/sessions", &format!(r#"{{"session_id":"{id}"}}"#)).to(&app).await;
    }
    let reply = call(Method::DELETE, "/v2/code/sessions").to(&app).await;
    assert_eq!(reply.json()["data"], json!({ "cleaned_sessions": 3 }));
}
