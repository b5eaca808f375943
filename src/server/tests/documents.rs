//! Information routes, the OpenAPI documents, and refusals of routes nobody owns.

use std::collections::BTreeSet;

use serde_json::{Value, json};

use super::*;

const V1: [&str; 32] = [
    "/v1/capabilities",
    "/v1/code/execute",
    "/v1/code/info",
    "/v1/file/copy",
    "/v1/file/delete",
    "/v1/file/download",
    "/v1/file/find",
    "/v1/file/glob",
    "/v1/file/grep",
    "/v1/file/list",
    "/v1/file/mkdir",
    "/v1/file/move",
    "/v1/file/read",
    "/v1/file/replace",
    "/v1/file/search",
    "/v1/file/stat",
    "/v1/file/str_replace_editor",
    "/v1/file/upload",
    "/v1/file/write",
    "/v1/jupyter/execute",
    "/v1/jupyter/info",
    "/v1/jupyter/sessions",
    "/v1/jupyter/sessions/create",
    "/v1/jupyter/sessions/{id}",
    "/v1/jupyter/sessions/{id}/interrupt",
    "/v1/jupyter/sessions/{id}/restart",
    "/v1/nodejs/execute",
    "/v1/nodejs/info",
    "/v1/nodejs/sessions",
    "/v1/nodejs/sessions/{id}",
    "/v1/ping",
    "/v1/sandbox",
];
const V2: [&str; 20] = [
    "/v2/code/execute",
    "/v2/code/info",
    "/v2/code/sessions",
    "/v2/code/sessions/{id}",
    "/v2/fs/copy",
    "/v2/fs/delete",
    "/v2/fs/download",
    "/v2/fs/edit",
    "/v2/fs/grep",
    "/v2/fs/list",
    "/v2/fs/mkdir",
    "/v2/fs/move",
    "/v2/fs/read",
    "/v2/fs/search",
    "/v2/fs/stat",
    "/v2/fs/tree",
    "/v2/fs/upload",
    "/v2/fs/write",
    "/v2/openapi.json",
    "/v2/sandbox",
];
/// Of the command planes.
const V1_COMMANDS: [&str; 19] = [
    "/v1/bash/exec",
    "/v1/bash/kill",
    "/v1/bash/output",
    "/v1/bash/sessions",
    "/v1/bash/sessions/create",
    "/v1/bash/sessions/{session_id}/close",
    "/v1/bash/write",
    "/v1/sandbox/packages/nodejs",
    "/v1/sandbox/packages/python",
    "/v1/shell/exec",
    "/v1/shell/kill",
    "/v1/shell/sessions",
    "/v1/shell/sessions/create",
    "/v1/shell/sessions/stats",
    "/v1/shell/sessions/update",
    "/v1/shell/sessions/{session_id}",
    "/v1/shell/view",
    "/v1/shell/wait",
    "/v1/shell/write",
];
const V2_COMMANDS: [&str; 7] = [
    "/v2/commands",
    "/v2/commands/sessions",
    "/v2/commands/sessions/{session_id}",
    "/v2/commands/{command_id}",
    "/v2/commands/{command_id}/kill",
    "/v2/commands/{command_id}/stdin",
    "/v2/sandbox/packages",
];
const SHARED: [&str; 6] =
    ["/", "/health", "/internal/auth", "/openapi.json", "/v1/health", "/v1/openapi.json"];

async fn paths(app: &App, uri: &str) -> BTreeSet<String> {
    let document = get(uri).to(app).await.json();
    assert!(document["openapi"].as_str().unwrap().starts_with("3."));
    document["paths"].as_object().unwrap().keys().cloned().collect()
}

fn set(lists: &[&[&str]]) -> BTreeSet<String> {
    lists.iter().flat_map(|list| list.iter()).map(|path| (*path).to_owned()).collect()
}

#[tokio::test]
async fn the_documents_contain_every_route_and_their_subset() {
    let app = daemon(&[]);
    let v2: [&[&str]; 2] = [&V2, &V2_COMMANDS];
    let all = [&[&V1[..], &V1_COMMANDS, &SHARED], &v2[..]].concat();
    assert_eq!(paths(&app, "/openapi.json").await, set(&all));
    assert_eq!(paths(&app, "/v1/openapi.json").await, set(&all));
    assert_eq!(paths(&app, "/v2/openapi.json").await, set(&v2));
    let document = get("/openapi.json").to(&app).await.json();
    let methods: Vec<&String> = document["paths"]["/v2/code/sessions"].as_object().unwrap().keys().collect();
    assert_eq!(methods, ["delete", "get", "post"]);
    let request = &document["components"]["schemas"]["ExecuteRequest"];
    assert_eq!(request["required"], json!(["language", "code"]));
}

#[tokio::test]
async fn every_reference_of_a_document_resolves() {
    fn references(value: &Value, found: &mut BTreeSet<String>) {
        match value {
            Value::Object(map) => {
                found.extend(map.get("$ref").and_then(Value::as_str).map(str::to_owned));
                map.values().for_each(|value| references(value, found));
            }
            Value::Array(list) => list.iter().for_each(|value| references(value, found)),
            _ => {}
        }
    }
    let document = get("/openapi.json").to(&daemon(&[])).await.json();
    let mut found = BTreeSet::new();
    references(&document, &mut found);
    assert!(!found.is_empty());
    for reference in found {
        assert!(document.pointer(reference.trim_start_matches('#')).is_some(), "{reference} leads nowhere");
    }
}

#[tokio::test]
async fn the_v2_surface_hides_the_v1_routes_of_this_contract() {
    let app = daemon(&[("AIO_API_SURFACE", "v2")]);
    for path in V1.into_iter().chain(V1_COMMANDS) {
        let reply = get(path).to(&app).await;
        assert_eq!((reply.status.as_u16(), &reply.json()["success"]), (404, &json!(false)), "{path}");
    }
    for path in ["/v2/code/info", "/v1/health", "/v1/openapi.json", "/health"] {
        assert_eq!(get(path).to(&app).await.status, 200, "{path}");
    }
    assert_eq!(paths(&app, "/openapi.json").await, set(&[&V2, &V2_COMMANDS, &SHARED]));
}

#[tokio::test]
async fn unknown_routes_and_methods_answer_with_an_envelope() {
    let app = daemon(&[]);
    let own = ["/v1/code/nothing-here", "/v2/code/nothing-here", "/v1/jupyter/nothing", "/v2/browser"];
    for path in own {
        let reply = get(path).to(&app).await;
        let keys: Vec<String> = reply.json().as_object().unwrap().keys().cloned().collect();
        assert_eq!((reply.status.as_u16(), keys.len()), (404, 4), "{path} {keys:?}");
    }
    for (reply, status) in [
        (get("/nowhere").to(&app).await, 404),
        (get("/v1/exec").to(&app).await, 404),
        (post("/health", "").to(&app).await, 405),
    ] {
        let body = reply.json();
        assert_eq!(reply.status, status);
        for key in ["success", "message", "data", "hint", "error", "detail"] {
            assert!(body.get(key).is_some(), "{key} is missing from {body}");
        }
    }
    for generation in ["v1", "v2"] {
        let reply = get(&format!("/{generation}/code/execute")).to(&app).await;
        assert_eq!((reply.status.as_u16(), reply.header("allow")), (405, Some("POST")));
        assert_eq!(reply.json()["success"], false);
    }
}

#[tokio::test]
async fn code_info_is_the_golden_one_on_both_generations() {
    let app = daemon(&[]);
    let wanted: Value =
        serde_json::from_str(include_str!("../../../tests/golden/aio/code-info.json")).unwrap();
    for generation in ["v1", "v2"] {
        assert_eq!(get(&format!("/{generation}/code/info")).to(&app).await.json(), wanted);
    }
}

#[tokio::test]
async fn capabilities_have_their_groups() {
    let app = daemon(&[]);
    let data = get("/v1/capabilities?refresh=true").to(&app).await.json()["data"].clone();
    let wanted = json!({
        "status": "ready", "backend": "native", "kinds": ["code", "nodejs"],
        "default_python": "/opt/caisson/python/bin/python3", "default_node": "/usr/local/bin/node",
        "python_kernels": ["python3"], "javascript_backend": "native", "jupyter_backend": "kernel",
        "endpoint": null, "missing": [], "warnings": [],
    });
    assert_eq!(data["code_interpreter"], wanted);
    assert_eq!(data["files"].as_object().unwrap().len(), 12);
    assert_eq!(
        (&data["browser"]["status"], &data["computer"]["status"]),
        (&json!("absent"), &json!("absent"))
    );
    assert_eq!(data["isolation"]["posture"], "userns");
    let mistyped = get("/v1/capabilities?refresh=maybe").to(&app).await;
    assert_eq!(
        (mistyped.status.as_u16(), &mistyped.json()["errors"][0]["location"]),
        (422, &json!(["query"]))
    );
}

#[tokio::test]
async fn the_sandbox_has_what_the_published_client_requires() {
    let app = daemon(&[]);
    let v1 = get("/v1/sandbox").to(&app).await.json();
    assert!(v1["data"].is_string());
    assert_eq!((&v1["home_dir"], &v1["workspace_dir"]), (&json!("/home/sandbox"), &json!("/home/sandbox")));
    let v2 = get("/v2/sandbox").to(&app).await.json()["data"].clone();
    assert_eq!(v2["capabilities"]["code_interpreter"]["backend"], "native");
    for detail in [&v1["detail"], &v2["detail"]] {
        for key in ["os", "os_version", "arch", "user", "home_dir", "timezone"] {
            assert!(detail["system"][key].is_string(), "{key}");
        }
        assert!(detail["system"]["occupied_ports"].is_array());
        assert_eq!(
            detail["runtime"]["python"],
            json!([{ "ver": "3.11.2", "bin": "/usr/bin/python3", "alias": [] }])
        );
        assert!(detail["utils"][0]["tools"][0]["name"].is_string());
    }
}

#[tokio::test]
async fn health_names_layers_and_no_paths() {
    let app = daemon(&[("AIO_API_KEY", "k")]);
    let reply = get("/health").to(&app).await;
    let body = reply.json();
    assert_eq!((&body["status"], &body["server"]), (&json!("healthy"), &json!("caisson")));
    assert!(body.get("success").is_none() && body["version"].is_string() && body["revision"].is_string());
    assert_eq!(body["slots"], json!({ "max": 24, "ready": { "python": 3 } }));
    assert_eq!(body["posture"]["name"], "userns");
    assert_eq!(
        body["posture"]["layers"][1],
        json!({ "layer": "cgroup memory", "enforced": false, "detail": "" })
    );
    assert_eq!(body["warnings"], json!(["KSM runs", "not enforced: cgroup memory"]));
    assert!(!reply.text.contains('/'), "{}", reply.text);
    assert_eq!(get("/v1/health").to(&app).await.json(), body);
}

#[tokio::test]
async fn root_and_ping_answer() {
    let app = daemon(&[]);
    let root = get("/").to(&app).await.json();
    assert_eq!((&root["name"], &root["success"]), (&json!("caisson"), &json!(true)));
    assert_eq!(get("/v1/ping").to(&app).await.json()["data"], "pong");
}
