//! The file routes as far as they go without a space: what they take, and what they say no to.

use serde_json::json;

use super::*;

#[tokio::test]
async fn what_is_missing_is_named_where_it_belongs() {
    let app = daemon(&[]);
    for (reply, location) in [
        (post("/v1/file/read", "{}").to(&app).await, json!(["body", "file"])),
        (post("/v2/fs/write", r#"{"path": "/tmp/x"}"#).to(&app).await, json!(["body", "content"])),
        (get("/v2/fs/read").to(&app).await, json!(["query", "path"])),
        (get("/v2/fs/read?path=/tmp/x&start_line=one").to(&app).await, json!(["query"])),
        (get("/v1/file/download").to(&app).await, json!(["query", "path"])),
        (
            post("/v1/file/str_replace_editor", r#"{"command":"insert","path":"/tmp/x"}"#).to(&app).await,
            json!(["body", "insert_line"]),
        ),
        (
            post("/v1/file/list", r#"{"path":"/tmp","sort_by":"colour"}"#).to(&app).await,
            json!(["body", "sort_by"]),
        ),
        (
            post("/v1/file/grep", r#"{"path":"/tmp","pattern":"x","max_file_size":"big"}"#).to(&app).await,
            json!(["body", "max_file_size"]),
        ),
    ] {
        let body = reply.json();
        assert_eq!((reply.status.as_u16(), &body["success"]), (422, &json!(false)), "{body}");
        assert_eq!(body["errors"][0]["location"], location, "{body}");
    }
}

#[tokio::test]
async fn the_second_generation_writes_by_its_schema_and_names_the_route_for_what_it_lacks() {
    let app = daemon(&[]);
    let extra = post("/v2/fs/write", r#"{"path":"/tmp/x","content":"","mode":"w"}"#).to(&app).await;
    assert_eq!(
        (extra.status.as_u16(), &extra.json()["errors"][0]["message"]),
        (422, &json!("unknown field `mode`"))
    );
    for (content, encoding) in [("a!", "base64"), ("\u{100}", "raw"), ("x", "utf-7")] {
        let body = json!({"path": "/tmp/x", "content": content, "encoding": encoding});
        assert_eq!(post("/v2/fs/write", &body.to_string()).to(&app).await.status, 422, "{encoding}");
    }
    for (command, route) in [("view", "/v2/fs/read"), ("create", "/v2/fs/write")] {
        let body = json!({"command": command, "path": "/tmp/x"}).to_string();
        let reply = post("/v2/fs/edit", &body).to(&app).await;
        assert_eq!(reply.status, 400);
        assert!(reply.json()["message"].as_str().unwrap().contains(route), "{}", reply.text);
    }
}

#[tokio::test]
async fn without_a_helper_nothing_is_started() {
    let app = daemon(&[]);
    let calls = [
        get("/v2/fs/read?path=/tmp/x"),
        get("/v2/fs/tree?path=/tmp"),
        get("/v1/file/download?path=/tmp/x"),
        post("/v1/file/write", r#"{"file":"/tmp/x","content":""}"#),
        call(Method::PUT, "/v2/fs/tree?path=/tmp/x"),
    ];
    for call in calls {
        let reply = call.to(&app).await;
        assert_eq!((reply.status.as_u16(), reply.header("retry-after")), (503, Some("1")), "{}", reply.text);
    }
    let files = get("/v1/capabilities").to(&app).await.json()["data"]["files"].clone();
    assert!(files.as_object().unwrap().values().all(|offered| offered == false), "{files}");
}

#[tokio::test]
async fn upload_routes_of_an_open_daemon_take_their_own_types_only() {
    let app = daemon(&[]);
    for (method, uri, content_type, status) in [
        (Method::POST, "/v2/fs/upload", "application/json", 415),
        (Method::POST, "/v1/file/upload", "application/json", 415),
        (Method::POST, "/v2/fs/upload", "multipart/form-data; boundary=x", 422),
        (Method::PUT, "/v2/fs/tree?path=/tmp/x", "application/json", 415),
        (Method::PUT, "/v2/fs/tree?path=/tmp/x", "application/x-tar", 503),
        (Method::POST, "/v2/fs/write", "multipart/form-data; boundary=x", 415),
        (Method::POST, "/v2/fs/write", "application/x-tar", 415),
    ] {
        let body = Body::from("--x--\r\n");
        let sent = Call { body, ..call(method, uri).header("content-type", content_type) };
        let reply = sent.to(&app).await;
        assert_eq!(reply.status, status, "{uri} {content_type}: {}", reply.text);
        assert_eq!(reply.json()["success"], json!(false));
    }
}
