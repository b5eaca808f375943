//! `POST /exec/programmatic`: a program that calls its caller's tools. The answer is either what it wants to be called,
//! with a token to come back with, or how it ended.
#![forbid(unsafe_code)]

use std::collections::HashSet;
use std::sync::Arc;

use axum::Extension;
use axum::extract::State;
use axum::http::{HeaderMap, StatusCode};
use axum::response::Response;
use serde::{Deserialize, Serialize};
use serde_json::value::RawValue;
use utoipa::ToSchema;
use utoipa_axum::router::OpenApiRouter;
use utoipa_axum::routes;

use super::exec::runs;
use super::list::List;
use super::refuse::{Refused, RefusedBody};
use super::wire::{self, Faults, OutFileBody, Profile, Traces};
use crate::engine::Caller;
use crate::runs::programmatic::{self, NotContinued, Programmatic, Round, Start, Token};
use crate::runs::{
    CALLS_MAX, FileRef, Json, RunDone, RunRequest, Runs, Style, ToolAnswer, ToolCall, ToolLanguage,
};
use crate::server::AppState;
use crate::server::answer::{in_short, json, json_sized};
use crate::server::body::LargeJsonBytes;

/// Most tools of one program.
const TOOLS_MAX: usize = 100;
/// Longest name of a tool, in bytes.
const TOOL_NAME_BYTES_MAX: usize = 256;
/// Where the request's own name for itself stands.
const REQUEST_ID: &str = "x-librechat-code-request-id";
/// The hosted service's own file.
const RESERVED_FILE: &str = "_ptc_history.json";
/// When a caller may try again whose programs all wait for results.
const WAITING_RETRY_SECS: u64 = 5;
/// For a result that says no more than that it is an error.
const TOOL_FAILED: &str = "Tool execution failed";

pub(super) fn routes() -> OpenApiRouter<AppState> {
    OpenApiRouter::new().routes(routes!(programmatic)).routes(routes!(cancel))
}

/// A start (`code`, `tools`) or a continuation (`continuation_token`, `tool_results`).
#[derive(Debug, ToSchema)]
#[expect(dead_code, reason = "it is read field by field; this is its shape")]
pub(super) struct ProgrammaticRequest {
    code: Option<String>,
    /// `python` (default) or `bash`; wins over `lang`.
    language: Option<String>,
    lang: Option<String>,
    /// At most 100.
    tools: Option<Vec<Tool>>,
    session_id: Option<String>,
    user_id: Option<String>,
    files: Option<Vec<wire::ExecFile>>,
    /// Milliseconds that the program may run between two calls.
    timeout: Option<f64>,
    runtime_session_hint: Option<String>,
    /// Of the last answer.
    continuation_token: Option<String>,
    tool_results: Option<Vec<ToolResult>>,
}

/// A tool that the program may call.
#[derive(Debug, Deserialize, ToSchema)]
struct Tool {
    name: String,
}

/// What became of a call.
#[derive(Debug, Deserialize, ToSchema)]
struct ToolResult {
    call_id: String,
    #[schema(value_type = Option<Object>)]
    result: Option<Box<RawValue>>,
    #[serde(default)]
    is_error: bool,
    error_message: Option<String>,
}

#[derive(Deserialize)]
struct Raw<'a> {
    #[serde(borrow)]
    code: Option<&'a RawValue>,
    #[serde(borrow)]
    language: Option<&'a RawValue>,
    #[serde(borrow)]
    lang: Option<&'a RawValue>,
    #[serde(borrow)]
    tools: Option<&'a RawValue>,
    #[serde(borrow)]
    session_id: Option<&'a RawValue>,
    #[serde(borrow)]
    user_id: Option<&'a RawValue>,
    #[serde(borrow)]
    files: Option<&'a RawValue>,
    #[serde(borrow)]
    timeout: Option<&'a RawValue>,
    #[serde(borrow)]
    runtime_session_hint: Option<&'a RawValue>,
    #[serde(borrow)]
    continuation_token: Option<&'a RawValue>,
    #[serde(borrow)]
    tool_results: Option<&'a RawValue>,
}

/// One round of a program: its calls, or its end.
#[derive(Debug, Default, Serialize, ToSchema)]
pub(super) struct ProgrammaticResponse {
    /// `tool_call_required`, `completed` or `error`.
    status: &'static str,
    session_id: String,
    #[serde(skip_serializing_if = "Option::is_none")]
    continuation_token: Option<String>,
    #[serde(skip_serializing_if = "Option::is_none")]
    tool_calls: Option<Vec<CallBody>>,
    /// What it has printed so far.
    #[serde(skip_serializing_if = "Option::is_none")]
    partial_stdout: Option<String>,
    #[serde(skip_serializing_if = "Option::is_none")]
    error: Option<String>,
    #[serde(skip_serializing_if = "Option::is_none")]
    stdout: Option<String>,
    #[serde(skip_serializing_if = "Option::is_none")]
    stderr: Option<String>,
    #[serde(skip_serializing_if = "Option::is_none")]
    files: Option<Vec<OutFileBody>>,
    #[serde(flatten)]
    traces: Traces,
}

/// A call of a tool.
#[derive(Debug, Serialize, ToSchema)]
struct CallBody {
    id: String,
    /// As it was registered.
    name: String,
    #[schema(value_type = Object)]
    input: Json,
}

/// Runs a program that may call tools, or goes on with one that waits for their results. Each of its statements runs
/// once; between two requests it waits for at most ten minutes.
#[utoipa::path(
    post, path = "/exec/programmatic", tag = "librechat", request_body = ProgrammaticRequest,
    responses(
        (status = 200, body = ProgrammaticResponse),
        (status = 400, description = "A field that does not fit, or results of other calls", body = RefusedBody),
        (status = 401, body = RefusedBody),
        (status = 403, description = "Somebody else's token, or a file that the caller may not have", body = RefusedBody),
        (status = 404, description = "An execution that is over", body = RefusedBody),
        (status = 409, description = "It is being continued already", body = RefusedBody),
        (status = 413, body = RefusedBody), (status = 422, body = RefusedBody),
        (status = 429, description = "Too many executions wait for results", body = RefusedBody),
        (status = 503, body = RefusedBody),
    )
)]
async fn programmatic(
    State(state): State<AppState>,
    Extension(caller): Extension<Caller>,
    headers: HeaderMap,
    LargeJsonBytes(body, _arrived): LargeJsonBytes,
) -> Result<Response, Refused> {
    let runs = runs(&state)?;
    wire::refuse_attached(&headers)?;
    let profile = wire::profile(&headers)?;
    let raw: Raw<'_> = wire::object(&body)?;
    let request_id = wire::header(&headers, REQUEST_ID);
    let step = match raw.continuation_token.filter(|token| token.get() != "null") {
        Some(token) => {
            let token: Option<String> = serde_json::from_str(token.get()).ok();
            let token = token.as_deref().and_then(Token::parse);
            let token = token.ok_or_else(|| bad_request("Invalid continuation token"))?;
            Step::GoOn(caller, token, results(raw.tool_results)?)
        }
        None => Step::Start(Box::new(read_start(&runs, caller, profile, &headers, &raw)?)),
    };
    // Not for as long as the program waits and runs.
    drop(body);
    let round = match step {
        Step::GoOn(caller, token, results) => {
            runs.programmatic().go_on(&caller, &token, results, request_id.as_deref()).await
        }
        Step::Start(asked) => start(&runs, *asked, request_id).await,
    };
    Ok(answer(round.map_err(not_continued)?))
}

/// Ends what runs or waits under the name that a request gave itself.
#[utoipa::path(
    post, path = "/exec/programmatic/cancel", tag = "librechat",
    request_body(content = Object, description = "`{\"request_id\": \"…\"}`"),
    responses(
        (status = 200, description = "It is being ended"), (status = 400, body = RefusedBody),
        (status = 401, body = RefusedBody), (status = 404, description = "There is none", body = RefusedBody),
    )
)]
async fn cancel(
    State(state): State<AppState>,
    Extension(caller): Extension<Caller>,
    LargeJsonBytes(body, _arrived): LargeJsonBytes,
) -> Result<Response, Refused> {
    #[derive(Deserialize)]
    struct Cancel {
        request_id: String,
    }
    let runs = runs(&state)?;
    let Cancel { request_id } =
        serde_json::from_slice(&body).map_err(|_| bad_request("request_id must be a string"))?;
    if !runs.programmatic().cancel(&caller, &request_id) {
        return Err(Refused::new(StatusCode::NOT_FOUND, "Request not found"));
    }
    Ok(json(StatusCode::OK, &serde_json::json!({ "status": "cancelled", "request_id": request_id })))
}

fn bad_request(text: impl Into<String>) -> Refused {
    Refused::new(StatusCode::BAD_REQUEST, text)
}

/// What a request is for.
enum Step {
    Start(Box<Asked>),
    GoOn(Caller, Token, Vec<ToolAnswer>),
}

/// A program to start.
struct Asked {
    run: RunRequest,
    registered: HashSet<String>,
    gathers: bool,
}

async fn start(runs: &Arc<Runs>, asked: Asked, request_id: Option<String>) -> Result<Round, NotContinued> {
    let Asked { run, registered, gathers } = asked;
    let (table, owner): (&Arc<Programmatic>, Caller) = (runs.programmatic(), run.caller.clone());
    table.check_room(&owner.tenant)?;
    let name = table.name(&owner, request_id.as_deref());
    let prepared = tokio::select! {
        prepared = runs.prepare(run) => prepared?,
        () = name.cancelled() => {
            let nothing = String::new;
            return Ok(Round::Cancelled { session: nothing(), stdout: nothing(), stderr: nothing() });
        }
    };
    let session = prepared.session_id().to_owned();
    let start = Start { owner, session, registered, gathers };
    table.start(start, name, |watcher, port| prepared.run(Some(watcher), Some(port))).await
}

fn read_start(
    runs: &Runs,
    caller: Caller,
    profile: Option<Profile>,
    headers: &HeaderMap,
    raw: &Raw<'_>,
) -> Result<Asked, Refused> {
    let mut faults = Faults::default();
    let code = faults.code(raw.code);
    let lang = faults.word("lang", raw.lang);
    let lang = faults.word("language", raw.language).or(lang).unwrap_or_else(|| "python".to_owned());
    let session = faults.word("session_id", raw.session_id);
    let user = faults.user(raw.user_id, headers, &caller)?;
    let timeout = wire::timeout(&mut faults, raw.timeout);
    let hint = faults.word("runtime_session_hint", raw.runtime_session_hint);
    let files = wire::files(&mut faults, raw.files)?;
    faults.sentence()?;
    let (language, naming) = match lang.to_ascii_lowercase().as_str() {
        "python" | "py" => ("python", ToolLanguage::Python),
        "bash" | "sh" => ("bash", ToolLanguage::Bash),
        _ => return Err(wire::unsupported(&lang)),
    };
    let language = runs.languages().resolve(language).cloned().ok_or_else(|| wire::unsupported(&lang))?;
    let names = tool_names(raw.tools)?;
    let tools = naming.functions(names.iter().map(String::as_str));
    let tools = tools.map_err(|same| bad_request(same.to_string()))?;
    let current =
        profile.is_some() || hint.is_some() || files.iter().any(wire::ExecFile::is_of_current_client);
    let files: Vec<FileRef> = files.into_iter().map(wire::file_ref).collect::<Result<_, _>>()?;
    if files.iter().any(|file| file.name.as_deref().is_some_and(is_reserved)) {
        return Err(bad_request(format!("The file name {RESERVED_FILE} is reserved")));
    }
    let run = RunRequest {
        caller,
        asserted_user: user,
        language,
        code: code.unwrap_or_default(),
        args: Vec::new(),
        timeout,
        session,
        entity: None,
        hint: hint.filter(|_| profile != Some(Profile::Default)),
        files,
        style: if current { Style::Current } else { Style::Classic },
        rich: false,
        tools,
        programmatic: true,
    };
    Ok(Asked { run, registered: names.into_iter().collect(), gathers: naming == ToolLanguage::Bash })
}

fn tool_names(raw: Option<&RawValue>) -> Result<Vec<String>, Refused> {
    let Some(raw) = raw.filter(|raw| raw.get() != "null") else { return Ok(Vec::new()) };
    let tools = List::read(raw, TOOLS_MAX).ok_or_else(|| bad_request("tools must be an array"))?;
    if tools.is_longer {
        return Err(bad_request(format!("tools must not be more than {TOOLS_MAX}")));
    }
    let name = |raw: &RawValue| {
        let tool: Tool = object(raw).ok()?;
        (1..=TOOL_NAME_BYTES_MAX).contains(&tool.name.len()).then_some(tool.name)
    };
    let names: Option<Vec<String>> = tools.elements.into_iter().map(name).collect();
    names
        .ok_or_else(|| bad_request(format!("each tool must have a name of 1 to {TOOL_NAME_BYTES_MAX} bytes")))
}

/// serde would also take a list for a struct.
fn object<'a, T: Deserialize<'a>>(raw: &'a RawValue) -> serde_json::Result<T> {
    if raw.get().starts_with('{') {
        serde_json::from_str(raw.get())
    } else {
        Err(serde::de::Error::custom("it is no object"))
    }
}

/// Under whichever prefix of the workspace.
fn is_reserved(name: &str) -> bool {
    let mut segments = name.split(['/', '\\']).filter(|segment| !matches!(*segment, "" | "."));
    segments.next_back() == Some(RESERVED_FILE)
}

fn results(raw: Option<&RawValue>) -> Result<Vec<ToolAnswer>, Refused> {
    let list = raw.and_then(|raw| List::read(raw, CALLS_MAX)).filter(|list| !list.elements.is_empty());
    let list = list.ok_or_else(|| bad_request("tool_results must be an array of results"))?;
    if list.is_longer {
        return Err(bad_request(format!("tool_results must not be more than {CALLS_MAX}")));
    }
    let read = |raw: &RawValue| {
        let fault = |error| {
            bad_request(in_short(format_args!("tool_results has an element that is no result: {error}")))
        };
        let ToolResult { call_id, result, is_error, error_message } = object(raw).map_err(fault)?;
        Ok(ToolAnswer { id: call_id, outcome: outcome(result, is_error, error_message) })
    };
    list.elements.into_iter().map(read).collect()
}

fn outcome(result: Option<Box<RawValue>>, is_error: bool, message: Option<String>) -> Result<Json, String> {
    let null = || Json::parse("null").expect("it is JSON");
    if !is_error {
        return match result {
            None => Ok(null()),
            Some(result) => Json::of(&result).ok_or_else(|| "the result nests too deeply".to_owned()),
        };
    }
    let told = || {
        let result = result.as_ref()?;
        serde_json::from_str::<String>(result.get()).ok().or_else(|| Some(result.get().to_owned()))
    };
    Err(message.filter(|text| !text.is_empty()).or_else(told).unwrap_or_else(|| TOOL_FAILED.to_owned()))
}

fn not_continued(why: NotContinued) -> Refused {
    let text = why.to_string();
    let status = match why {
        NotContinued::Gone => StatusCode::NOT_FOUND,
        NotContinued::Foreign => StatusCode::FORBIDDEN,
        NotContinued::Driven => StatusCode::CONFLICT,
        NotContinued::UnknownCall(_) | NotContinued::Twice(_) => StatusCode::BAD_REQUEST,
        NotContinued::TooMany { .. } => {
            tracing::info!(text, "a program with tools was refused");
            return Refused::rate_limited("execution", WAITING_RETRY_SECS);
        }
        NotContinued::Refused(refused) => return wire::refusal(&refused),
    };
    Refused::new(status, text)
}

fn answer(round: Round) -> Response {
    let body = match round {
        Round::Calls { token, session, calls, stdout } => ProgrammaticResponse {
            status: "tool_call_required",
            session_id: session,
            continuation_token: Some(token.as_str().to_owned()),
            tool_calls: Some(calls.into_iter().map(CallBody::from).collect()),
            partial_stdout: Some(stdout),
            ..ProgrammaticResponse::default()
        },
        Round::Done(done) => ProgrammaticResponse::of(*done),
        Round::Unregistered { session, name, stdout, stderr } => {
            ended(session, programmatic::unregistered_text(&name), stdout, stderr)
        }
        Round::Cancelled { session, stdout, stderr } => {
            ended(session, programmatic::FAILED.to_owned(), stdout, stderr)
        }
    };
    let texts = [&body.stdout, &body.stderr, &body.partial_stdout];
    let bytes: usize = texts.into_iter().flatten().map(String::len).sum();
    json_sized(StatusCode::OK, &body, bytes + 1024)
}

fn ended(session: String, error: String, stdout: String, stderr: String) -> ProgrammaticResponse {
    ProgrammaticResponse {
        status: "error",
        session_id: session,
        error: Some(error),
        stdout: Some(stdout),
        stderr: Some(stderr),
        ..ProgrammaticResponse::default()
    }
}

impl From<ToolCall> for CallBody {
    fn from(call: ToolCall) -> CallBody {
        let ToolCall { id, name, input } = call;
        CallBody { id, name, input }
    }
}

impl ProgrammaticResponse {
    fn of(done: RunDone) -> ProgrammaticResponse {
        let RunDone { session, stdout, stderr, end, files, deleted, delivery, runtime, .. } = done;
        let is_success = end.is_success();
        ProgrammaticResponse {
            status: if is_success { "completed" } else { "error" },
            error: (!is_success).then(|| programmatic::error_text(end)),
            files: Some(files.into_iter().map(OutFileBody::from).collect()),
            traces: Traces::of(deleted, delivery, runtime),
            ..ended(session, String::new(), stdout, stderr)
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn raw(text: &str) -> Box<RawValue> {
        RawValue::from_string(text.to_owned()).expect("JSON")
    }

    #[test]
    fn tools_are_an_array_of_names_and_not_too_many() {
        let names = |text: &str| tool_names(Some(&raw(text)));
        assert_eq!(tool_names(None), Ok(Vec::new()));
        assert_eq!(names("null"), Ok(Vec::new()));
        let more = r#"[{"name": "a", "parameters": {"deep": [[]]}, "description": null}, {"name": "a"}]"#;
        assert_eq!(names(more), Ok(vec!["a".to_owned(), "a".to_owned()]));
        for text in
            ["\"x\"", "{}", "7", "[7]", "[{}]", "[{\"name\": \"\"}]", "[{\"name\": 7}]", "[[\"name\"]]"]
        {
            assert!(names(text).is_err(), "{text}");
        }
        let many = |count: usize| format!("[{}]", vec!["{\"name\":\"t\"}"; count].join(","));
        assert_eq!(names(&many(100)).map(|names| names.len()), Ok(100));
        assert!(names(&many(101)).is_err());
        assert!(names(&format!("[{}1]", "1,".repeat(4_000_000))).is_err());
    }

    #[test]
    fn results_are_an_array_of_what_became_of_calls() {
        let list = r#"[{"call_id": "a", "result": {"z": 1, "a": [ ]}}, {"call_id": "b", "result": null, "is_error": false},
            {"call_id": "c", "is_error": true, "error_message": "no"}, {"call_id": "d", "result": "why", "is_error": true},
            {"call_id": "e", "is_error": true, "error_message": "", "result": [1]}, {"call_id": "f", "is_error": true}]"#;
        let results = results(Some(&raw(list))).expect("they are");
        let told: Vec<(&str, Result<&str, &str>)> = results
            .iter()
            .map(|it| (it.id.as_str(), it.outcome.as_ref().map(Json::as_str).map_err(String::as_str)))
            .collect();
        let wanted = [
            ("a", Ok("{\"z\":1,\"a\":[]}")),
            ("b", Ok("null")),
            ("c", Err("no")),
            ("d", Err("why")),
            ("e", Err("[1]")),
            ("f", Err(TOOL_FAILED)),
        ];
        assert_eq!(told, wanted);
        for text in [
            "[]",
            "null",
            "\"x\"",
            "{}",
            "[7]",
            "[{}]",
            "[{\"call_id\": 7}]",
            "[[\"a\", 1, false, null]]",
            "[{\"call_id\": \"a\", \"is_error\": \"no\"}]",
        ] {
            assert!(super::results(Some(&raw(text))).is_err(), "{text}");
        }
        assert!(super::results(None).is_err());
        let many = |count: usize| format!("[{}]", vec![r#"{"call_id":"a"}"#; count].join(","));
        assert_eq!(super::results(Some(&raw(&many(CALLS_MAX)))).map(|list| list.len()), Ok(CALLS_MAX));
        for large in [many(CALLS_MAX + 1), format!("[{:?}]", "x".repeat(8_000_000))] {
            let refused = super::results(Some(&raw(&large))).expect_err("it is too much");
            assert!(refused.error().len() < 1024);
        }
    }

    #[test]
    fn the_reserved_name_is_reserved_wherever_it_would_lie() {
        for name in [
            "_ptc_history.json",
            "/mnt/data/_ptc_history.json",
            "./_ptc_history.json",
            "mnt\\data\\_ptc_history.json",
        ] {
            assert!(is_reserved(name), "{name}");
        }
        for name in ["", "ptc_history.json", "_ptc_history.json.txt", "_ptc_history.json/x"] {
            assert!(!is_reserved(name), "{name}");
        }
    }
}
