//! Information routes, the OpenAPI documents, and refusals of routes nobody owns.

use std::collections::BTreeSet;

use serde_json::{Value, json};

use super::*;
use crate::engine::Backends;
use crate::server::code::CodeInfo;

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
const SHARED: [&str; 7] =
    ["/", "/health", "/internal/auth", "/mcp", "/openapi.json", "/v1/health", "/v1/openapi.json"];

/// Of the LibreChat family, at the root and under `/v1`.
const LIBRECHAT: [&str; 11] = [
    "/download/{session_id}/{file_id}",
    "/exec",
    "/exec/programmatic",
    "/exec/programmatic/cancel",
    "/exec/stream",
    "/files/{session_id}",
    "/files/{session_id}/{file_id}",
    "/libraries",
    "/sessions/{session_id}/objects/{file_id}",
    "/upload",
    "/upload/batch",
];

fn librechat() -> BTreeSet<String> {
    LIBRECHAT.iter().flat_map(|path| [(*path).to_owned(), format!("/v1{path}")]).collect()
}

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
    let all = &set(&all) | &librechat();
    assert_eq!(paths(&app, "/openapi.json").await, all);
    assert_eq!(paths(&app, "/v1/openapi.json").await, all);
    assert_eq!(paths(&app, "/v2/openapi.json").await, set(&v2));
    let document = get("/openapi.json").to(&app).await.json();
    let methods: Vec<&String> = document["paths"]["/v2/code/sessions"].as_object().unwrap().keys().collect();
    assert_eq!(methods, ["delete", "get", "post"]);
    for path in ["/v1/file/download", "/v2/fs/download"] {
        let methods: Vec<&String> = document["paths"][path].as_object().unwrap().keys().collect();
        assert_eq!(methods, ["get", "head"], "{path}");
    }
    let request = &document["components"]["schemas"]["ExecuteRequest"];
    assert_eq!(request["required"], json!(["language", "code"]));
}

#[tokio::test]
async fn every_operation_has_a_name_of_its_own() {
    let document = get("/openapi.json").to(&daemon(&[])).await.json();
    let mut names = BTreeSet::new();
    for (path, item) in document["paths"].as_object().unwrap() {
        for (method, operation) in item.as_object().unwrap() {
            let name = operation["operationId"].as_str().unwrap_or_default().to_owned();
            assert!(!name.is_empty() && names.insert(name.clone()), "{method} {path}: {name:?}");
        }
    }
    assert!(names.contains("libraries") && names.contains("get_v1_libraries"), "{names:?}");
}

#[tokio::test]
async fn the_document_has_the_names_that_the_code_interpreters_tests_look_for() {
    let document = get("/openapi.json").to(&daemon(&[])).await.json();
    let health = &document["components"]["schemas"]["HealthResponse"]["properties"];
    assert!(health["runtime_libraries"].is_object() && health["status"].is_object(), "{health}");
    let lang = &document["components"]["schemas"]["RestExecRequest"]["properties"]["lang"];
    let names = lang["enum"].as_array().unwrap_or_else(|| panic!("{lang}"));
    for name in ["py", "bash", "js", "node", "ts", "go", "c++"] {
        assert!(names.contains(&json!(name)), "{name}: {names:?}");
    }
    assert!(document["components"]["schemas"]["ExecuteResponse"].is_object());
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
    assert_eq!(paths(&app, "/openapi.json").await, &set(&[&V2, &V2_COMMANDS, &SHARED]) | &librechat());
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
    for (reply, status) in [(get("/nowhere").to(&app).await, 404), (post("/health", "").to(&app).await, 405)]
    {
        let body = reply.json();
        assert_eq!(reply.status, status);
        for key in ["success", "message", "data", "hint", "error", "detail"] {
            assert!(body.get(key).is_some(), "{key} is missing from {body}");
        }
    }
    for path in ["/exec/nothing", "/v1/files", "/upload/nothing/here"] {
        let reply = get(path).to(&app).await;
        let keys: Vec<String> = reply.json().as_object().unwrap().keys().cloned().collect();
        assert_eq!(
            (reply.status.as_u16(), keys),
            (404, ["detail", "error", "message"].map(str::to_owned).to_vec()),
            "{path}"
        );
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

/// Python cells at an external Jupyter server, those of the code routes only where `python` says so. Our own Python is
/// there as well.
fn at_an_endpoint(python: &'static str) -> App {
    with_an_endpoint(Backends {
        python: Some(python),
        jupyter: Some("endpoint"),
        kernels: vec!["python3".to_owned()],
        endpoint: Some("http://127.0.0.1:8888".to_owned()),
        code_may_leave: python == "endpoint",
        jupyter_may_leave: true,
    })
}

fn with_an_endpoint(backends: Backends) -> App {
    let code_info = CodeInfo {
        backend: backends.python,
        kernels: backends.kernels.clone(),
        python: Some("3.11.2".to_owned()),
        node: Some("v20.20.2".to_owned()),
        sessions_max: 5,
        prewarmed: 0,
    };
    let fake = Fake::telling(backends, code_info);
    daemon_with(&[("AIO_JUPYTER_ENDPOINT", "http://127.0.0.1:8888")], fake)
}

/// Every document with a word on what confines cells.
async fn confinements(app: &App) -> Vec<(&'static str, Value)> {
    let said = |path, pointer| async move {
        let body = get(path).to(app).await.json();
        (pointer, body.pointer(pointer).cloned().unwrap_or_else(|| panic!("{path}: {body}")))
    };
    let mut all = vec![
        said("/health", "/confinement").await,
        said("/v1/health", "/confinement").await,
        said("/v1/capabilities", "/data/isolation/confinement").await,
        said("/v2/sandbox", "/data/capabilities/isolation/confinement").await,
        said("/v1/jupyter/info", "/data/confinement").await,
    ];
    for path in ["/v1/code/info", "/v2/code/info"] {
        all.push(said(path, "/data/languages/0/details/confinement").await);
        all.push(said(path, "/data/languages/1/details/confinement").await);
    }
    all
}

#[tokio::test]
async fn what_runs_at_an_endpoint_is_not_said_to_be_confined_here() {
    let here = daemon(&[]);
    for (what, said) in confinements(&here).await {
        assert_eq!(said, "sandbox", "control: {what}");
    }
    for (python, words) in [("endpoint", "Python cells"), ("native", "cells of the Jupyter routes")] {
        let silent = Backends {
            python: Some("native"),
            jupyter: Some("kernel"),
            kernels: vec!["python3".to_owned()],
            endpoint: None,
            code_may_leave: python == "endpoint",
            jupyter_may_leave: true,
        };
        // Also where it does not answer now: it may with the next cell.
        for app in [at_an_endpoint(python), with_an_endpoint(silent)] {
            for (what, said) in confinements(&app).await {
                let is_here = match what {
                    "/data/languages/0/details/confinement" => python != "endpoint",
                    "/data/languages/1/details/confinement" => true,
                    _ => false,
                };
                assert_eq!(said, if is_here { "sandbox" } else { "external" }, "{what}");
            }
            let health = get("/health").to(&app).await.json();
            let capabilities = get("/v1/capabilities").to(&app).await.json()["data"].clone();
            for beside in [&health["warnings"], &capabilities["isolation"]["warnings"]] {
                let mut beside = beside.as_array().unwrap().iter();
                assert!(beside.any(|it| it.as_str().unwrap().starts_with(words)), "{health}");
            }
            let interpreter = &capabilities["code_interpreter"];
            assert!(interpreter["warnings"][0].as_str().unwrap().starts_with(words), "{interpreter}");
            for (path, pointer) in [
                ("/v1/jupyter/info", "/data/description"),
                ("/v1/sandbox", "/data"),
                ("/openapi.json", "/info/description"),
                ("/v2/openapi.json", "/info/description"),
            ] {
                let body = get(path).to(&app).await.json();
                let text = body.pointer(pointer).unwrap().as_str().unwrap().to_owned();
                assert!(text.contains("external Jupyter server"), "{path}: {text}");
            }
        }
    }
}

#[tokio::test]
async fn the_version_of_a_python_that_runs_no_cell_is_not_told() {
    for (python, version) in [("endpoint", Value::Null), ("native", json!("3.11.2"))] {
        let data = get("/v2/code/info").to(&at_an_endpoint(python)).await.json()["data"].clone();
        assert_eq!(data["python"], json!({ "available": true, "version": version }), "{python}");
        assert_eq!(data["languages"][0]["runtime_version"], version, "{python}");
        assert_eq!(data["node"]["version"], "v20.20.2");
        assert_eq!(data["kinds"].as_array().unwrap().contains(&json!("jupyter")), python == "endpoint");
    }
}

#[tokio::test]
async fn where_a_session_of_an_endpoint_is_stays_untold_unless_somebody_said_it() {
    for (app, unsaid) in [(at_an_endpoint("endpoint"), ""), (daemon(&[]), "/home/sandbox")] {
        for (id, cwd, told) in [("a", Value::Null, unsaid), ("b", json!("/srv"), "/srv")] {
            let body = json!({ "session_id": id, "cwd": cwd }).to_string();
            assert_eq!(post("/v1/jupyter/sessions/create", &body).to(&app).await.status, 200);
            let listed = get("/v1/jupyter/sessions").to(&app).await.json()["data"]["sessions"][id].clone();
            let one = get(&format!("/v1/jupyter/sessions/{id}")).to(&app).await.json()["data"].clone();
            let code = get(&format!("/v2/code/sessions/{id}")).to(&app).await.json()["data"].clone();
            let all = get("/v2/code/sessions").to(&app).await.json()["data"]["sessions"][id].clone();
            for entry in [listed, one, code, all] {
                assert_eq!(entry["cwd"], told, "{id}: {entry}");
            }
        }
        let native = json!({ "session_id": "js", "language": "javascript" }).to_string();
        let native = post("/v2/code/sessions", &native).to(&app).await.json();
        assert_eq!(native["data"]["cwd"], "/home/sandbox", "JavaScript stays here");
        for what in ["interrupt", "restart"] {
            let reply = post(&format!("/v1/jupyter/sessions/a/{what}"), "").to(&app).await;
            let message = reply.json()["message"].as_str().unwrap().to_owned();
            assert_eq!((reply.status.as_u16(), message.contains("embedded")), (501, false), "{message}");
        }
    }
}

#[tokio::test]
async fn without_a_python_the_documents_say_what_answers_all_the_same() {
    let fake = |node: Option<&str>, backend| {
        let info = CodeInfo {
            backend,
            // It is installed, and only kernels are wanted.
            python: Some("3.11.2".to_owned()),
            node: node.map(str::to_owned),
            sessions_max: 20,
            ..CodeInfo::default()
        };
        Fake::telling(Backends { python: backend, ..Backends::default() }, info)
    };
    let app = daemon_with(&[], fake(Some("v20.20.2"), None));
    let data = get("/v2/code/info").to(&app).await.json()["data"].clone();
    assert_eq!((&data["backend"], &data["kinds"]), (&Value::Null, &json!(["nodejs"])));
    assert_eq!(data["python"], json!({ "available": false, "version": null }));
    assert_eq!(data["languages"][0]["description"], "Python 3 (not available)");
    assert_eq!(data["languages"][1]["description"], "Node.js (native REPL)");
    assert_eq!(data["max_sessions"], 20, "of JavaScript");
    let capabilities = get("/v1/capabilities").to(&app).await.json()["data"].clone();
    let interpreter = &capabilities["code_interpreter"];
    assert_eq!(
        (&interpreter["status"], &interpreter["kinds"]),
        (&json!("ready"), &json!(["code", "nodejs"])),
        "JavaScript is the code routes' too"
    );
    let bare = get("/v2/code/info").to(&daemon_with(&[], fake(None, None))).await.json()["data"].clone();
    assert_eq!((&bare["kinds"], &bare["max_sessions"]), (&json!([]), &json!(0)));
    assert_eq!(bare["languages"][1]["description"], "Node.js (not available)");
    // The hint speaks of the code routes only where these run Python.
    for (backend, told) in [(None, false), (Some("native"), true)] {
        let app = daemon_with(&[], fake(Some("v20.20.2"), backend));
        for reply in [get("/v1/jupyter/info").to(&app).await, get("/v1/jupyter/sessions").to(&app).await] {
            let hint = reply.json()["hint"].as_str().unwrap().to_owned();
            assert_eq!((reply.status.as_u16(), hint.contains("/v1/code/execute")), (501, told), "{hint}");
        }
    }
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
    // What a guest sees is no path of the host's.
    assert!(!reply.text.replace("/mnt/data", "").contains('/'), "{}", reply.text);
    assert_eq!(get("/v1/health").to(&app).await.json(), body);
}

#[tokio::test]
async fn health_has_the_keys_of_both_families() {
    let app = daemon(&[("MAX_SESSIONS", "7"), ("EXECUTION_TIMEOUT", "60")]);
    let body = get("/health").to(&app).await.json();
    assert_eq!((&body["max_sessions"], &body["execution_timeout"]), (&json!(7), &json!(60)));
    assert_eq!((&body["active_sessions"], &body["cleaned_sessions"]), (&json!(0), &json!(0)));
    assert_eq!((&body["uploads_dir"], &body["notebooks_dir"]), (&json!("/mnt/data"), &json!("/mnt/data")));
    for runtime in ["bash", "node", "ts-node", "go", "c++"] {
        let row = &body["runtime_capabilities"][runtime];
        assert!(row["available"].is_boolean(), "{runtime}: {row}");
        assert!(row["binaries"].is_array() && row["missing"].is_array(), "{runtime}: {row}");
    }
    assert_eq!(body["runtime_libraries"]["python"], json!({ "available": true, "version": "3.11.2" }));
}

#[tokio::test]
async fn libraries_are_listed_by_runtime() {
    let app = daemon(&[]);
    for (alias, key) in
        [("js", "node"), ("c++", "cpp"), ("C%2B%2B", "cpp"), ("ts", "typescript"), ("sh", "bash")]
    {
        for prefix in ["", "/v1"] {
            let body = get(&format!("{prefix}/libraries?runtime={alias}")).to(&app).await.json();
            let keys: Vec<&String> = body["runtime_libraries"].as_object().unwrap().keys().collect();
            assert_eq!(keys, [key], "{alias}");
        }
    }
    let keys_of = |body: &Value, under: &str| -> Vec<String> {
        body[under].as_object().unwrap().keys().cloned().collect()
    };
    let table = languages();
    let mut known: Vec<_> = table.iter().filter_map(|it| it.library_key.clone()).collect();
    known.sort();
    let health = get("/health").to(&app).await.json();
    assert_eq!(keys_of(&health, "runtime_libraries"), known);
    let mut capable = keys_of(&health, "runtime_capabilities");
    capable.sort();
    assert_eq!(capable, ["bash", "c++", "go", "node", "python", "ts-node"]);
    // A name that the table has, and none of the contract's.
    let all = get("/libraries?runtime=golang").to(&app).await.json();
    assert_eq!(keys_of(&all, "runtime_libraries"), ["go"]);
    assert_eq!(all["runtime_libraries"]["go"]["missing"], json!(["go"]));
    assert_eq!(get("/libraries?runtime=rust").to(&app).await.status, 404, "it has no key there");
    let node = get("/libraries?runtime=node").to(&app).await.json()["runtime_libraries"]["node"].clone();
    assert_eq!((&node["version"], &node["available"]), (&json!("20.20.2"), &json!(true)));
    let unknown = get("/libraries?runtime=cobol").to(&app).await;
    let text = "runtime 'cobol' not found";
    assert_eq!((unknown.status.as_u16(), unknown.json()), (404, json!({ "error": text, "detail": text })));
}

#[tokio::test]
async fn root_and_ping_answer() {
    let app = daemon(&[]);
    let root = get("/").to(&app).await.json();
    assert!(root["features"].is_array() && root["version"].is_string());
    assert!(root["endpoints"]["POST /exec"].is_string() && root["endpoints"]["execute"].is_string());
    assert_eq!((&root["name"], &root["success"]), (&json!("caisson"), &json!(true)));
    assert_eq!(get("/v1/ping").to(&app).await.json()["data"], "pong");
}
