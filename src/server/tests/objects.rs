//! Stored files over HTTP, both client generations. Forms are written by hand, as clients write them.

use std::collections::HashSet;

use bytes::Bytes;
use futures_util::stream;
use serde_json::json;
use tempfile::TempDir;

use super::*;
use crate::objects::{ObjectLimits, Objects, is_id};
use crate::server::jwt::tests::{minted, public_key};

const BOUNDARY: &str = "----of-these-tests";
const FILE_BYTES_MAX: u64 = 512 * 1024;
const NO_ID: &str = "NNNNNNNNNNNNNNNNNNNNN";

struct Stand {
    app: App,
    objects: Objects,
    folder: TempDir,
}

/// A daemon with two keys and one who signs tokens.
fn stand() -> Stand {
    let folder = tempfile::tempdir().unwrap();
    let limits = ObjectLimits { file_bytes_max: FILE_BYTES_MAX, ..ObjectLimits::default() };
    let store = Store::open(&folder.path().join("store.db")).unwrap();
    let objects = Objects::open(&folder.path().join("objects"), store, limits).unwrap();
    let variables =
        [("CODE_INTERPRETER_API_KEYS", "a=KEYA,b=KEYB"), ("CODEAPI_JWT_PUBLIC_KEY", public_key())];
    let state = state_with(config(&variables), Fake::default()).with_objects(objects.clone());
    Stand { app: app(state), objects, folder }
}

impl Stand {
    fn on_disk(&self) -> usize {
        std::fs::read_dir(self.folder.path().join("objects")).unwrap().count()
    }

    async fn get(&self, uri: &str) -> Reply {
        get(uri).header("x-api-key", "KEYA").to(&self.app).await
    }

    async fn delete(&self, uri: &str) -> Reply {
        call(Method::DELETE, uri).header("x-api-key", "KEYA").to(&self.app).await
    }

    async fn send(&self, uri: &str, form: &Form) -> Reply {
        self.send_as("x-api-key", "KEYA", uri, form).await
    }

    async fn send_as(&self, header: &str, value: &str, uri: &str, form: &Form) -> Reply {
        form.call(uri).header(header, value).to(&self.app).await
    }

    /// Session and file of an upload of one file.
    async fn upload(&self, form: &Form) -> (String, String) {
        let reply = self.send("/upload", form).await;
        assert_eq!(reply.status, 200, "{}", reply.text);
        ids(&reply.json())
    }
}

fn ids(uploaded: &Value) -> (String, String) {
    let text = |value: &Value| value.as_str().unwrap().to_owned();
    (text(&uploaded["session_id"]), text(&uploaded["files"][0]["fileId"]))
}

/// A form on its way out.
#[derive(Clone, Default)]
struct Form(Vec<u8>);

impl Form {
    fn field(mut self, name: &str, value: &str) -> Form {
        let text =
            format!("--{BOUNDARY}\r\nContent-Disposition: form-data; name=\"{name}\"\r\n\r\n{value}\r\n");
        self.0.extend_from_slice(text.as_bytes());
        self
    }

    fn file(self, name: &str, content: &[u8]) -> Form {
        self.file_of("file", name.as_bytes(), "text/plain", content)
    }

    fn file_of(mut self, field: &str, name: &[u8], content_type: &str, content: &[u8]) -> Form {
        let head = format!("--{BOUNDARY}\r\nContent-Disposition: form-data; name=\"{field}\"; filename=\"");
        self.0.extend_from_slice(head.as_bytes());
        self.0.extend_from_slice(name);
        self.0.extend_from_slice(format!("\"\r\nContent-Type: {content_type}\r\n\r\n").as_bytes());
        self.0.extend_from_slice(content);
        self.0.extend_from_slice(b"\r\n");
        self
    }

    fn bytes(&self) -> Vec<u8> {
        [&self.0[..], format!("--{BOUNDARY}--\r\n").as_bytes()].concat()
    }

    fn call(&self, uri: &str) -> Call {
        sent(uri, Body::from(self.bytes()))
    }
}

fn sent(uri: &str, body: Body) -> Call {
    let content_type = format!("multipart/form-data; boundary={BOUNDARY}");
    Call { body, ..call(Method::POST, uri).header("content-type", &content_type) }
}

fn pieces(bytes: &[u8], cut: usize) -> Vec<Result<Bytes, std::io::Error>> {
    bytes.chunks(cut).map(|piece| Ok(Bytes::copy_from_slice(piece))).collect()
}

#[tokio::test]
async fn an_upload_answers_in_the_words_of_both_generations() {
    let it = stand();
    let form = Form::default().file_of("file", b"data.csv", "text/csv", b"a,b\n1,2\n");
    for prefix in ["", "/v1"] {
        let reply = it.send(&format!("{prefix}/upload"), &form).await;
        let body = reply.json();
        let (session, file) = ids(&body);
        assert!(is_id(&session) && is_id(&file));
        let modified = body["files"][0]["lastModified"].as_str().unwrap().to_owned();
        assert!(modified.len() == 24 && modified.ends_with('Z'), "{modified}");
        let age = jiff::Timestamp::now().duration_since(modified.parse().unwrap());
        assert!(age.as_secs() < 60);
        let wanted = json!({
            "message": "success", "session_id": session, "storage_session_id": session,
            "files": [{
                "fileId": file, "id": file, "filename": "data.csv", "name": "data.csv", "session_id": session,
                "storage_session_id": session, "path": format!("/download/{session}/{file}"), "size": 8,
                "contentType": "text/csv", "lastModified": modified,
                "etag": "492d5ea496056f1a6a6592241032fab764c321596317930b4fa0e1e8bc3b7470",
                "metadata": { "content-type": "text/csv", "original-filename": "data.csv" },
            }],
        });
        assert_eq!(body, wanted);
        // The same data under both prefixes.
        for other in ["", "/v1"] {
            let reply = it.get(&format!("{other}/download/{session}/{file}")).await;
            assert_eq!((reply.status.as_u16(), reply.text.as_str()), (200, "a,b\n1,2\n"));
        }
    }
}

#[tokio::test]
async fn files_keep_their_order_their_names_and_any_field_name() {
    let it = stand();
    let names =
        ["f0.txt", "pptx/SKILL.md", "ünïcödé-漢字-🎉.txt", "semi;colon,comma.txt", ".env", "it's.txt"];
    let mut form = Form::default();
    for (at, name) in names.iter().enumerate() {
        form = form.file_of(["file", "files", "x"][at % 3], name.as_bytes(), "text/plain", name.as_bytes());
    }
    let body = it.send("/upload", &form).await.json();
    let session = body["session_id"].as_str().unwrap();
    let files = body["files"].as_array().unwrap();
    let sent: Vec<_> = files.iter().map(|file| file["filename"].as_str().unwrap()).collect();
    assert_eq!(sent, names);
    let unique: HashSet<_> = files.iter().map(|file| file["fileId"].as_str().unwrap()).collect();
    assert_eq!(unique.len(), names.len());
    for file in files {
        let path = file["path"].as_str().unwrap();
        assert_eq!(it.get(path).await.text, file["filename"].as_str().unwrap());
    }
    let listed = it.get(&format!("/files/{session}")).await.json();
    let listed: Vec<_> = listed.as_array().unwrap().iter().map(|file| file["name"].clone()).collect();
    assert_eq!(listed, names.map(Value::from));
}

#[tokio::test]
async fn hostile_names_are_harmless_when_they_come_back() {
    let it = stand();
    for (raw, name) in [
        (&b"../../etc/cron.d/x"[..], "x"),
        (b"/etc/passwd", "passwd"),
        (b"C:\\Users\\me\\a.csv", "a.csv"),
        (b"a\x01b\tc\x00.txt", "a_b_c_.txt"),
        (b"\xe4.txt", "\u{fffd}.txt"),
        (b"..", "upload"),
        (b"", "upload"),
        (b"say \\\"hi\\\".txt", "say \"hi\".txt"),
    ] {
        let form = Form::default().file_of("file", raw, "text/plain", b"x");
        let (session, file) = it.upload(&form).await;
        let listed = it.get(&format!("/files/{session}")).await.json();
        assert_eq!(listed[0]["name"], name, "{raw:?}");
        let reply = it.get(&format!("/download/{session}/{file}")).await;
        assert!(reply.header("content-disposition").unwrap().starts_with("attachment; filename*=UTF-8''"));
    }
}

#[tokio::test]
async fn fields_may_stand_behind_the_file_and_the_body_needs_no_length() {
    let it = stand();
    let content: Vec<u8> = (0..300_000_u32).map(|at| (at % 251) as u8).collect();
    let form = Form::default().file("late.bin", &content).field("kind", "agent").field("id", "agent_one");
    for cut in [7_000, 65_536] {
        let body = Body::from_stream(stream::iter(pieces(&form.bytes(), cut)));
        let reply = sent("/upload", body).header("x-api-key", "KEYA").to(&it.app).await;
        assert_eq!(reply.json()["files"][0]["size"], 300_000);
        let (session, file) = ids(&reply.json());
        let uri = |query: &str| format!("/sessions/{session}/objects/{file}?{query}");
        assert_eq!(it.get(&uri("kind=agent&id=agent_one")).await.status, 200);
        assert_eq!(it.get(&uri("kind=user&id=u")).await.status, 403);
    }
}

#[tokio::test]
async fn what_is_no_upload_is_refused_and_leaves_nothing() {
    let it = stand();
    let file = Form::default().file("a.txt", b"x");
    let long = "x".repeat(41);
    for (form, status, text) in [
        (Form::default().field("entity_id", "e"), 422, "No files uploaded"),
        (Form::default(), 422, "No files uploaded"),
        (
            file.clone().field("entity_id", "bad id"),
            422,
            "entity_id must be <= 40 characters and match ^[A-Za-z0-9_-]+$",
        ),
        (file.clone().field("entity_id", &long), 422, "entity_id must be <= 40"),
        (file.clone().field("kind", "galaxy").field("id", "x"), 400, "kind must be"),
        (file.clone().field("kind", "skill").field("id", "x"), 400, "version must be"),
        (
            file.clone().field("kind", "skill").field("id", "x").field("version", "1.5"),
            400,
            "version must be",
        ),
        (file.clone().field("kind", "skill").field("id", "x").field("version", "-1"), 400, "version must be"),
        (file.clone().field("kind", "user").field("id", "x").field("version", "1"), 400, "version must be"),
        (file.clone().field("version", "1"), 400, "version must be"),
        (file.clone().field("kind", "agent"), 400, "id must be"),
        (file.clone().field("kind", "agent").field("id", "a/b"), 400, "id must be"),
        (file.clone().field("kind", &"x".repeat(5_000)), 400, "A field of more than"),
        (Form::default().file("big", &vec![1; FILE_BYTES_MAX as usize + 1]), 413, "File size limit exceeded"),
        (file.clone().file("big", &vec![1; FILE_BYTES_MAX as usize + 1]), 413, "File size limit exceeded"),
    ] {
        let reply = it.send("/upload", &form).await;
        let body = reply.json();
        assert_eq!(reply.status, status, "{text}: {}", reply.text);
        assert!(body["error"].as_str().unwrap().starts_with(text), "{body}");
        assert_eq!(body["error"], body["detail"]);
    }
    for (content_type, body) in [
        ("application/json", "{}"),
        ("text/plain", "x"),
        ("multipart/form-data", "--x\r\n"),
        ("multipart/mixed; boundary=x", "--x--"),
    ] {
        let body = Body::from(body);
        let refused = Call { body, ..call(Method::POST, "/upload").header("content-type", content_type) };
        assert_eq!(refused.header("x-api-key", "KEYA").to(&it.app).await.status, 400, "{content_type}");
    }
    let biggest = it.send("/upload", &Form::default().file("big", &vec![1; FILE_BYTES_MAX as usize])).await;
    assert_eq!(biggest.status, 200, "control: as large as may be");
    assert_eq!(it.on_disk(), 1);
}

#[tokio::test]
async fn empty_fields_count_as_absent_and_unknown_ones_as_nothing() {
    let it = stand();
    let form = ["entity_id", "kind", "id", "version", "read_only"]
        .into_iter()
        .fold(Form::default(), |form, name| form.field(name, ""))
        .field("more", &"x".repeat(100_000))
        .file("a.txt", b"x");
    let (session, file) = it.upload(&form).await;
    let stat = it.get(&format!("/sessions/{session}/objects/{file}")).await.json();
    assert_eq!((&stat["readOnly"], &stat["originalFilename"]), (&json!(false), &json!("a.txt")));
}

#[tokio::test]
async fn an_upload_that_breaks_off_leaves_nothing() {
    let it = stand();
    let whole = Form::default().file("a.txt", b"first").file("b.bin", &vec![7; 400_000]).bytes();
    for end in [whole.len() - 3, whole.len() / 2, 200, 90, 10] {
        // The connection ends in an error, as when a client goes away, or as if that were all.
        for with_error in [true, false] {
            let mut pieces = pieces(&whole[..end], 50_000);
            if with_error {
                pieces.push(Err(std::io::ErrorKind::ConnectionReset.into()));
            }
            let call = sent("/upload", Body::from_stream(stream::iter(pieces))).header("x-api-key", "KEYA");
            let status = call.to(&it.app).await.status;
            assert_eq!(status, 400, "{end} {with_error}");
        }
    }
    // A client that goes away while its handler waits for more.
    let waiting = stream::iter(pieces(&whole[..whole.len() / 2], 50_000));
    let body = Body::from_stream(futures_util::StreamExt::chain(waiting, stream::pending()));
    let call = sent("/upload", body).header("x-api-key", "KEYA");
    let given_up = tokio::time::timeout(Duration::from_millis(200), call.to(&it.app)).await;
    assert!(given_up.is_err());
    // What is on its way to the disk goes when it has arrived there.
    for _ in 0..100 {
        if it.on_disk() == 0 {
            return;
        }
        tokio::time::sleep(Duration::from_millis(20)).await;
    }
    panic!("{} files are left", it.on_disk());
}

#[tokio::test]
async fn an_entitys_uploads_share_its_session_per_user() {
    let it = stand();
    let form = |content: &[u8]| Form::default().field("entity_id", "agent_1").file("r.txt", content);
    let (session, first) = it.upload(&form(b"first")).await;
    let (again, second) = it.upload(&form(b"second")).await;
    assert_eq!(session, again);
    assert_ne!(first, second);
    for (file, content) in [(first, "first"), (second, "second")] {
        assert_eq!(it.get(&format!("/download/{session}/{file}")).await.text, content);
    }
    let of_user = |user: &'static str| {
        let call = form(b"x").call("/upload").header("x-api-key", "KEYA").header("user-id", user);
        async { ids(&call.to(&it.app).await.json()).0 }
    };
    let (alice, bob) = (of_user("alice").await, of_user("bob").await);
    assert!(alice != bob && alice != session && bob != session, "an agent is shared, its session is not");
    assert_eq!(of_user("alice").await, alice);
    // A token's user is not what a header says.
    let token = |user: &str| format!("Bearer {}", minted("t1", user));
    let proven = |user: &'static str, says: &'static str| {
        let call = form(b"x").call("/upload").header("authorization", &token(user)).header("user-id", says);
        async { ids(&call.to(&it.app).await.json()).0 }
    };
    assert_eq!(proven("alice", "alice").await, proven("alice", "bob").await);
    assert_ne!(proven("alice", "bob").await, proven("bob", "bob").await);
}

#[tokio::test]
async fn a_batch_is_one_session_and_fails_file_by_file() {
    let it = stand();
    let skill = Form::default().field("kind", "skill").field("id", "s").field("version", "3");
    let form = skill.clone().field("read_only", "true").file("pptx/SKILL.md", b"# s").file("pptx/a.py", b"");
    let reply = it.send("/upload/batch", &form).await;
    let body = reply.json();
    let (session, file) = ids(&body);
    let second = body["files"][1]["fileId"].clone();
    let wanted = json!({
        "message": "success", "storage_session_id": session, "session_id": session, "succeeded": 2, "failed": 0,
        "files": [
            { "status": "success", "fileId": file, "filename": "pptx/SKILL.md" },
            { "status": "success", "fileId": second, "filename": "pptx/a.py" },
        ],
    });
    assert_eq!(body, wanted);
    let stat = it.get(&format!("/sessions/{session}/objects/{file}?kind=skill&id=s&version=3")).await.json();
    assert_eq!((&stat["readOnly"], &stat["name"]), (&json!(true), &json!(format!("{session}/{file}.md"))));

    let big = vec![1; FILE_BYTES_MAX as usize + 100_000];
    let mixed = skill.clone().file("huge.bin", &big).file("a.txt", b"x").file("huge2.bin", &big);
    let body = it.send("/upload/batch", &mixed).await.json();
    assert_eq!(
        (&body["message"], &body["succeeded"], &body["failed"]),
        (&json!("partial_success"), &json!(1), &json!(2))
    );
    let failed = json!({ "status": "error", "filename": "huge.bin", "error": "File size limit exceeded" });
    assert_eq!((&body["files"][0], &body["files"][1]["status"]), (&failed, &json!("success")));

    let before = it.on_disk();
    for (form, why) in [
        (Form::default().field("kind", "nope").file("a.txt", b"x"), "kind must be user, agent or skill"),
        (skill.file("huge.bin", &big), "File size limit exceeded"),
    ] {
        let reply = it.send("/upload/batch", &form).await;
        let body = reply.json();
        assert_eq!((reply.status.as_u16(), &body["message"]), (400, &json!("error")), "{body}");
        assert_eq!((&body["files"][0]["status"], &body["files"][0]["error"]), (&json!("error"), &json!(why)));
        assert_eq!((&body["error"], &body["detail"]), (&json!(why), &json!(why)));
    }
    assert_eq!(it.on_disk(), before);
    let none = it.send("/upload/batch", &Form::default().field("kind", "user")).await;
    assert_eq!((none.status.as_u16(), &none.json()["error"]), (400, &json!("No files provided")));
}

#[tokio::test]
async fn a_batch_has_two_hundred_files_and_says_when_there_were_more() {
    let it = stand();
    let form = (0..203).fold(Form::default(), |form, at| form.file(&format!("{at}.txt"), b"x"));
    let body = it.send("/upload/batch", &form.field("entity_id", "e")).await.json();
    assert_eq!((&body["filesLimitReached"], &body["maxFiles"]), (&json!(true), &json!(200)));
    assert_eq!((&body["succeeded"], body["files"].as_array().unwrap().len()), (&json!(200), 200));
    assert_eq!(it.on_disk(), 200);
    let fewer = (0..200).fold(Form::default(), |form, at| form.file(&format!("{at}.txt"), b"x"));
    assert_eq!(it.send("/upload/batch", &fewer).await.json().get("filesLimitReached"), None);
}

#[tokio::test]
async fn listings_have_four_shapes() {
    let it = stand();
    let form = Form::default().field("read_only", "true").file_of(
        "file",
        "räport.v2.txt".as_bytes(),
        "text/plain",
        b"hello world",
    );
    let uploaded = it.send("/upload", &form).await.json();
    let (session, file) = ids(&uploaded);
    let listed = |detail: &str| {
        let uri = format!("/files/{session}{detail}");
        let it = &it;
        async move { it.get(&uri).await.json() }
    };
    let simple = json!([{ "id": file, "name": "räport.v2.txt", "session_id": session, "path": format!("/download/{session}/{file}") }]);
    assert_eq!((listed("").await, listed("?detail=simple&entity_id=x").await), (simple.clone(), simple));
    let mut summary = uploaded["files"][0].clone();
    summary["name"] = json!(format!("{session}/{file}.txt"));
    assert_eq!(listed("?detail=summary").await, json!([summary]));
    summary["versionId"] = Value::Null;
    assert_eq!(listed("?detail=full").await, json!([summary]));
    let normalized = json!([{
        "id": file, "name": "räport.v2.txt", "storage_session_id": session, "size": 11, "contentType": "text/plain",
        "lastModified": summary["lastModified"], "read_only": true,
    }]);
    assert_eq!(listed("?detail=normalized").await, normalized);
    let bogus = it.get(&format!("/files/{session}?detail=bogus")).await;
    assert_eq!(
        (bogus.status.as_u16(), &bogus.json()["detail"][0]["loc"]),
        (422, &json!(["query", "detail"]))
    );
}

#[tokio::test]
async fn a_download_is_never_a_page() {
    let it = stand();
    let form = Form::default().file_of(
        "file",
        "d/naïve file.html".as_bytes(),
        "text/html; charset=utf-8",
        b"<script>",
    );
    let (session, file) = it.upload(&form).await;
    let reply = it.get(&format!("/download/{session}/{file}?kind=user&id=somebody")).await;
    assert_eq!((reply.status.as_u16(), reply.text.as_str()), (200, "<script>"));
    for (name, value) in [
        ("content-type", "text/html; charset=utf-8"),
        ("content-length", "8"),
        ("content-disposition", "attachment; filename*=UTF-8''na%C3%AFve%20file.html"),
        ("x-content-type-options", "nosniff"),
        ("content-security-policy", "sandbox"),
    ] {
        assert_eq!(reply.header(name), Some(value));
    }
    let empty = it.upload(&Form::default().file("e", b"")).await;
    let reply = it.get(&format!("/download/{}/{}", empty.0, empty.1)).await;
    assert_eq!(
        (reply.status.as_u16(), reply.header("content-length"), reply.text.as_str()),
        (200, Some("0"), "")
    );
}

#[tokio::test]
async fn a_deleted_file_is_gone_everywhere_and_its_session_is_not() {
    let it = stand();
    for (route, prefix) in [
        ("files/{s}/{f}", ""),
        ("sessions/{s}/objects/{f}", ""),
        ("files/{s}/{f}", "/v1"),
        ("sessions/{s}/objects/{f}", "/v1"),
    ] {
        let (session, file) = it.upload(&Form::default().file("d.txt", b"x")).await;
        let uri = format!("{prefix}/{}", route.replace("{s}", &session).replace("{f}", &file));
        assert_eq!(it.delete(&format!("{uri}?kind=agent&id=x")).await.status, 403);
        let reply = it.delete(&format!("{uri}?kind=user&id=u")).await;
        let wanted = json!({
            "status": "deleted", "message": "File deleted successfully", "session_id": session, "file_id": file,
            "fileId": file,
        });
        assert_eq!((reply.status.as_u16(), reply.json()), (200, wanted));
        assert_eq!(it.delete(&uri).await.status, 404);
        for gone in [format!("/download/{session}/{file}"), format!("/sessions/{session}/objects/{file}")] {
            let reply = it.get(&gone).await;
            let wanted = json!({ "error": "File not found", "detail": "File not found" });
            assert_eq!((reply.status.as_u16(), reply.json()), (404, wanted));
        }
        assert_eq!(it.get(&format!("/files/{session}")).await.json(), json!([]));
        assert_eq!(it.on_disk(), 0);
    }
}

#[tokio::test]
async fn ids_are_whole_ones_or_none() {
    let it = stand();
    let (session, file) = it.upload(&Form::default().file("a", b"x")).await;
    let cut = &session[..20];
    for (uri, status) in [
        (format!("/download/{cut}/{file}"), 400),
        (format!("/download/{session}x/{file}"), 400),
        (format!("/download/{session}/{file}.txt"), 400),
        (format!("/download/{session}/%FF"), 400),
        ("/download/..%2f..%2fetc/passwd".to_owned(), 400),
        (format!("/sessions/{session}/objects/short"), 400),
        ("/files/short".to_owned(), 400),
        (format!("/files/{session}%00"), 400),
        (format!("/files/{NO_ID}"), 404),
        (format!("/download/{NO_ID}/{file}"), 404),
        (format!("/download/{session}/{NO_ID}"), 404),
        (format!("/download/{file}/{session}"), 404),
    ] {
        let reply = it.get(&uri).await;
        assert_eq!(reply.status, status, "{uri}: {}", reply.text);
        assert!(reply.json()["error"].is_string() && reply.json()["detail"].is_string());
    }
}

#[tokio::test]
async fn what_a_query_says_must_be_so() {
    let it = stand();
    let agent = Form::default().field("kind", "agent").field("id", "one").file("a", b"x");
    let skill =
        Form::default().field("kind", "skill").field("id", "s:1.x").field("version", "4").file("a", b"x");
    let user = Form::default().field("kind", "user").field("id", "user-1").file("a", b"x");
    for (form, query, status) in [
        (&agent, "", 200),
        (&agent, "kind=agent&id=one", 200),
        (&agent, "id=one", 200),
        (&agent, "kind=&id=", 200),
        (&agent, "kind=agent&id=two", 403),
        (&agent, "id=two", 403),
        (&agent, "kind=user&id=one", 403),
        (&agent, "kind=skill&id=one&version=1", 403),
        (&agent, "kind=agent&id=one&version=1", 403),
        (&agent, "kind=galaxy", 403),
        (&skill, "kind=skill&id=s%3A1.x&version=4", 200),
        (&skill, "kind=skill&id=s%3A1.x&version=5", 403),
        (&skill, "kind=skill&id=s%3A1.x&version=four", 403),
        (&skill, "kind=skill&id=other&version=4", 403),
        (&user, "kind=user&id=user-1", 200),
        (&user, "kind=user&id=user-2", 200),
        (&user, "kind=agent&id=user-1", 403),
    ] {
        let (session, file) = it.upload(form).await;
        for path in ["download/{s}/{f}", "sessions/{s}/objects/{f}", "files/{s}"] {
            let uri = format!("/{}?{query}", path.replace("{s}", &session).replace("{f}", &file));
            let reply = it.get(&uri).await;
            assert_eq!(reply.status, status, "{path} {query}: {}", reply.text);
            if status == 403 {
                assert_eq!(reply.json(), json!({ "error": "Unauthorized", "detail": "Unauthorized" }));
            }
        }
    }
}

#[tokio::test]
async fn two_keys_and_two_users_of_a_token_get_nothing_of_each_other() {
    let it = stand();
    let everybody: Vec<(&str, String)> = vec![
        ("x-api-key", "KEYA".to_owned()),
        ("x-api-key", "KEYB".to_owned()),
        ("authorization", format!("Bearer {}", minted("t1", "alice"))),
        ("authorization", format!("Bearer {}", minted("t1", "bob"))),
        ("authorization", format!("Bearer {}", minted("a", "alice"))),
    ];
    let mut owned = Vec::new();
    for (owner, (header, value)) in everybody.iter().enumerate() {
        for entity in ["", "shared"] {
            let form = Form::default().field("entity_id", entity).file("a", b"mine");
            let reply = it.send_as(header, value, "/upload", &form).await;
            owned.push((owner, ids(&reply.json())));
        }
    }
    for (asker, (header, value)) in everybody.iter().enumerate() {
        for (owner, (session, file)) in &owned {
            for uri in [
                format!("/download/{session}/{file}"),
                format!("/sessions/{session}/objects/{file}"),
                format!("/files/{session}?detail=full"),
                format!("/files/{session}?kind=user&id=alice"),
            ] {
                let reply = get(&uri).header(header, value).to(&it.app).await;
                assert_eq!(reply.status, if asker == *owner { 200 } else { 404 }, "{asker} {owner} {uri}");
            }
            if asker != *owner {
                for uri in [format!("/files/{session}/{file}"), format!("/sessions/{session}/objects/{file}")]
                {
                    let reply = call(Method::DELETE, &uri).header(header, value).to(&it.app).await;
                    assert_eq!(reply.status, 404, "{asker} {owner} {uri}");
                }
            }
        }
    }
    assert_eq!(it.on_disk(), owned.len(), "nobody deleted anything");
    // Without any credential there is not even a reason.
    let (_, (session, file)) = &owned[0];
    assert_eq!(get(&format!("/download/{session}/{file}")).to(&it.app).await.status, 401);
}

#[tokio::test]
async fn an_agents_files_are_shared_within_the_tenant_of_a_token() {
    let it = stand();
    let bearer = |tenant: &str, user: &str| format!("Bearer {}", minted(tenant, user));
    let form = Form::default().field("kind", "agent").field("id", "agent_x").file("s.txt", b"shared");
    let reply = it.send_as("authorization", &bearer("t1", "alice"), "/upload", &form).await;
    let (session, file) = ids(&reply.json());
    let asked = |tenant: &'static str, user: &'static str, uri: String| {
        let call = get(&uri).header("authorization", &bearer(tenant, user));
        let app = it.app.clone();
        async move { call.to(&app).await.status.as_u16() }
    };
    for (tenant, user, query, status) in [
        ("t1", "alice", "?kind=agent&id=agent_x", 200),
        ("t1", "bob", "?kind=agent&id=agent_x", 200),
        ("t1", "bob", "?kind=agent&id=agent_y", 403),
        ("t1", "bob", "?kind=user&id=bob", 403),
        ("t2", "carol", "?kind=agent&id=agent_x", 404),
        ("t2", "alice", "?kind=agent&id=agent_x", 404),
    ] {
        for path in ["download/{s}/{f}", "sessions/{s}/objects/{f}", "files/{s}"] {
            let uri = format!("/{}{query}", path.replace("{s}", &session).replace("{f}", &file));
            assert_eq!(asked(tenant, user, uri).await, status, "{tenant} {user} {path} {query}");
        }
    }
}

#[tokio::test]
async fn files_live_a_day_and_reads_do_not_change_their_time() {
    let it = stand();
    let (session, file) = it.upload(&Form::default().file("a", b"x")).await;
    let uri = format!("/sessions/{session}/objects/{file}");
    let first = it.get(&uri).await.json();
    it.objects.advance(Duration::from_secs(24 * 3600 - 30));
    assert_eq!(it.get(&uri).await.json(), first);
    it.objects.advance(Duration::from_secs(60));
    for uri in [uri, format!("/download/{session}/{file}"), format!("/files/{session}")] {
        assert_eq!(it.get(&uri).await.status, 404, "{uri}");
    }
}

#[tokio::test]
async fn an_open_daemon_takes_forms_from_programs_only() {
    let folder = tempfile::tempdir().unwrap();
    let store = Store::open(&folder.path().join("store.db")).unwrap();
    let objects = Objects::open(&folder.path().join("objects"), store, ObjectLimits::default()).unwrap();
    let app = app(state_with(config(&[]), Fake::default()).with_objects(objects));
    let form = Form::default().file("a", b"x");
    for uri in ["/upload", "/v1/upload", "/upload/batch", "/v1/upload/batch"] {
        assert_eq!(form.call(uri).to(&app).await.status, 200, "{uri}");
        let page = form.call(uri).header("origin", "https://evil.example").to(&app).await;
        assert_eq!(page.status, 403, "{uri}");
    }
    let json = post("/upload", "{}").to(&app).await;
    assert_eq!(json.status, 415);
}

#[tokio::test]
async fn a_daemon_without_stored_files_says_that_it_is_not_ready() {
    let app = daemon(&[]);
    for call in [Form::default().file("a", b"x").call("/upload"), get(&format!("/files/{NO_ID}"))] {
        assert_eq!(call.to(&app).await.status, 503);
    }
}
