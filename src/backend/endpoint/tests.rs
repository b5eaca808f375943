use std::sync::Mutex;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;

use serde_json::{Value, json};
use tokio::sync::watch;
use tokio::time::{Instant, sleep, timeout};
use tokio_tungstenite::tungstenite::Message as Frame;
use tokio_tungstenite::tungstenite::protocol::frame::Frame as WsFrame;
use tokio_tungstenite::tungstenite::protocol::frame::coding::{Data, OpCode};

use super::fake::{Answer, Cell as FakeCell, Fake, Later, Script, TOKEN, Wire, echo};
use super::link::MESSAGE_BYTES_MAX;
use super::message::Form;
use super::*;
use crate::engine::{ErrorOutput, Output, Piece, Status, Stream};
use crate::harness::interpreter::{Cell, CellLimits};
use crate::harness::outcome::{Ending, Lost, Stopped};

/// For starts whose own time is not the point.
const PATIENT: Duration = Duration::from_secs(30);
const CHARS_MAX: usize = 2_000_000;
const LIMITS: CellLimits = CellLimits {
    output_chars_max: CHARS_MAX,
    stream_bytes_max: None,
    grace: Duration::from_secs(5),
    interrupt_grace: Duration::from_secs(2),
    memory_mib_max: 512,
};
const DELETED: &str = "DELETE /api/kernels/k-1";
const INTERRUPTED: &str = "POST /api/kernels/k-1/interrupt";
const LOOKED: &str = "GET /api/kernelspecs";

fn cell(code: &str, timeout: Duration) -> Cell<'_> {
    Cell { code, timeout, execution_count: 7, watcher: None, argv: None }
}

async fn kernel(endpoint: &Endpoint) -> RemoteKernel {
    endpoint.start(None, None, PATIENT).await.expect("the fake starts kernels")
}

async fn run(kernel: RemoteKernel, code: &str) -> RemoteRan {
    run_for(kernel, code, Duration::from_secs(30)).await
}

async fn run_for(kernel: RemoteKernel, code: &str, limit: Duration) -> RemoteRan {
    let (_open, mut stop) = watch::channel(None);
    kernel.run(cell(code, limit), &LIMITS, &mut stop).await
}

fn stream(name: Stream, text: &str) -> Output {
    Output::Stream { name, text: text.to_owned() }
}

fn errors(ran: &RemoteRan) -> Vec<(&str, &str)> {
    let error = |output| match output {
        &Output::Error(ErrorOutput { ref ename, ref evalue, .. }) => Some((ename.as_str(), evalue.as_str())),
        _ => None,
    };
    ran.outcome.cell.outputs.iter().filter_map(error).collect()
}

// --- a server that does as it should ---------------------------------------------------------------------------

#[tokio::test]
async fn a_cell_shows_what_a_notebook_shows_in_either_form() {
    for form in [Form::Offsets, Form::Json] {
        let script = Script::cells(|mut wire, cell| async move {
            wire.iopub(&cell, "status", json!({"execution_state": "busy"})).await;
            wire.iopub(&cell, "execute_input", json!({"code": cell.code})).await;
            wire.print(&cell, "a").await;
            wire.print(&cell, "b\n").await;
            wire.iopub(&cell, "execute_result", json!({"data": {"text/plain": "42"}, "metadata": {}})).await;
            wire.end(&cell, json!({"status": "ok", "execution_count": 1})).await;
            Some(wire)
        });
        let (fake, endpoint) = Fake::start(Script { form, ..script }).await;
        let ran = run(kernel(&endpoint).await, "x").await;
        assert_eq!(ran.outcome.cell.ending, Ending::Completed);
        assert_eq!(ran.outcome.cell.outputs[0], stream(Stream::Stdout, "ab\n"));
        let Output::ExecuteResult { data, execution_count: 7, .. } = &ran.outcome.cell.outputs[1] else {
            panic!("{:?}", ran.outcome)
        };
        assert_eq!(data["text/plain"], "42");
        assert_eq!(ran.outcome.cell.outputs.len(), 2);
        assert!(ran.kernel.is_some() && !ran.outcome.names_lost);
        assert!(fake.count("POST /api/kernels") == 1);
    }
}

#[tokio::test]
async fn cells_share_one_connection_that_answers_pings_between_them() {
    let (fake, endpoint) = Fake::start(Script::cells(|mut wire, cell| async move {
        wire.print(&cell, &cell.code).await;
        wire.end(&cell, json!({"status": "ok"})).await;
        wire.frame(Frame::Ping(Vec::new().into())).await;
        // A thread of that cell goes on printing.
        wire.print(&cell, "late").await;
        Some(wire)
    }))
    .await;
    let mut kernel = kernel(&endpoint).await;
    for code in ["1", "2", "3"] {
        let ran = run(kernel, code).await;
        assert_eq!(ran.outcome.cell.outputs, [stream(Stream::Stdout, code)]);
        kernel = ran.kernel.expect("it goes on");
        sleep(Duration::from_millis(20)).await;
    }
    assert_eq!(fake.connections(), 1);
}

#[tokio::test]
async fn a_watcher_hears_of_outputs_while_the_cell_runs_and_of_its_end() {
    let (_fake, endpoint) = Fake::start(Script::cells(|mut wire, cell| async move {
        wire.print(&cell, "early").await;
        std::future::pending().await
    }))
    .await;
    let kernel = kernel(&endpoint).await;
    let (watcher, mut pieces) = crate::engine::pieces();
    let (_open, mut stop) = watch::channel(None);
    let limit = Duration::from_millis(300);
    let watched = Cell { watcher: Some(&watcher), ..cell("x", limit) };
    let started = Instant::now();
    let listening = async {
        let first = pieces.recv().await;
        (first, started.elapsed())
    };
    let (ran, (first, after)) = tokio::join!(kernel.run(watched, &LIMITS, &mut stop), listening);
    let piece = |output| Piece::Output { output, display_id: None };
    assert_eq!(first, Some(piece(stream(Stream::Stdout, "early"))));
    assert!(after < limit, "{after:?}");
    for output in &ran.outcome.cell.outputs[1..] {
        assert_eq!(pieces.try_recv(), Some(piece(output.clone())));
    }
    assert!(pieces.try_recv().is_none());
}

#[tokio::test]
async fn a_cell_is_asked_for_without_stdin_and_keeps_its_history() {
    let (_fake, endpoint) = Fake::start(Script::cells(|mut wire, cell| async move {
        wire.print(&cell, &cell.content.to_string()).await;
        wire.end(&cell, json!({"status": "ok"})).await;
        Some(wire)
    }))
    .await;
    let ran = run(kernel(&endpoint).await, "x").await;
    let content: Value = serde_json::from_str(&ran.outcome.cell.stream(Stream::Stdout)).expect("JSON");
    let wanted = json!({"code": "x", "silent": false, "store_history": true, "user_expressions": {},
                        "allow_stdin": false, "stop_on_error": false});
    assert_eq!(content, wanted);
}

#[tokio::test]
async fn the_token_goes_in_a_header_and_nowhere_else() {
    let (fake, endpoint) = Fake::start(Script::cells(echo)).await;
    let kernel = run(kernel(&endpoint).await, "x").await.kernel.expect("it goes on");
    kernel.shutdown().await;
    let heads = fake.heads();
    assert!(heads.len() >= 4, "{heads:?}");
    for head in heads {
        let carried = head.to_ascii_lowercase().contains(&format!("authorization: token {TOKEN}\r\n"));
        assert!(carried, "{head}");
        assert!(!head.lines().next().is_some_and(|line| line.contains(TOKEN)), "{head}");
    }
    assert!(!endpoint.shown().contains(TOKEN) && !format!("{endpoint:?}").contains(TOKEN), "{endpoint:?}");
}

#[tokio::test]
async fn kernels_for_python_are_offered_default_first() {
    let (fake, endpoint) = Fake::start(Script::cells(echo)).await;
    assert!(endpoint.probe().await);
    assert_eq!(endpoint.kernels().await, ["python3", "a-python"]);
    assert_eq!(endpoint.kernels_seen(), ["python3", "a-python"]);
    assert_eq!(fake.count(LOOKED), 1, "a fresh look is believed");
    let error = endpoint.start(Some("ir"), None, PATIENT).await.expect_err("R is no Python");
    assert_eq!(error.to_string(), "unknown kernel 'ir'; available: python3, a-python");
    assert_eq!(endpoint.start(Some("a-python"), None, PATIENT).await.expect("offered").name(), "a-python");
}

#[tokio::test]
async fn an_exception_is_shown_once() {
    let error = json!({"status": "error", "ename": "E", "evalue": "v", "traceback": ["t"]});
    for shown in [true, false] {
        let error = error.clone();
        let (_fake, endpoint) = Fake::start(Script::cells(move |mut wire, cell| {
            let error = error.clone();
            async move {
                if shown {
                    wire.iopub(&cell, "error", error.clone()).await;
                }
                wire.end(&cell, error).await;
                Some(wire)
            }
        }))
        .await;
        let ran = run(kernel(&endpoint).await, "x").await;
        assert_eq!(ran.outcome.cell.ending, Ending::Raised);
        assert_eq!(errors(&ran), [("E", "v")]);
        assert!(ran.kernel.is_some());
    }
}

#[tokio::test]
async fn what_belongs_to_another_cell_is_dropped() {
    let (_fake, endpoint) = Fake::start(Script::cells(|mut wire, cell| async move {
        let other = FakeCell { id: "another".to_owned(), ..cell.clone() };
        wire.print(&other, "not mine").await;
        wire.iopub(&other, "error", json!({"ename": "E", "evalue": "v"})).await;
        wire.end(&other, json!({"status": "error", "ename": "E"})).await;
        wire.send("iopub", "stream", "", json!({"name": "stdout", "text": "nobody's"})).await;
        wire.print(&cell, "mine").await;
        wire.end(&cell, json!({"status": "ok"})).await;
        Some(wire)
    }))
    .await;
    let ran = run(kernel(&endpoint).await, "x").await;
    assert_eq!(ran.outcome.cell.outputs, [stream(Stream::Stdout, "mine")]);
}

#[tokio::test]
async fn input_is_at_its_end_when_a_kernel_asks_all_the_same() {
    let (_fake, endpoint) = Fake::start(Script::cells(|mut wire, cell| async move {
        wire.send("stdin", "input_request", &cell.id, json!({"prompt": "?", "password": false})).await;
        let (kind, _, content) = wire.request().await.expect("an answer");
        wire.print(&cell, &format!("{kind} {content}")).await;
        wire.end(&cell, json!({"status": "ok"})).await;
        Some(wire)
    }))
    .await;
    let ran = run(kernel(&endpoint).await, "input()").await;
    assert_eq!(ran.outcome.cell.stream(Stream::Stdout), r#"input_reply {"value":"\u0004"}"#);
}

#[tokio::test]
async fn another_process_behind_the_kernel_has_lost_the_names() {
    let (_fake, endpoint) = Fake::start(Script::cells(|mut wire, cell| async move {
        wire.process.clone_from(&cell.code);
        echo(wire, cell).await
    }))
    .await;
    let ran = run(kernel(&endpoint).await, "p-1").await;
    assert!(!ran.outcome.names_lost);
    let ran = run(ran.kernel.expect("it goes on"), "p-2").await;
    assert!(ran.outcome.names_lost);
    let ran = run(ran.kernel.expect("it goes on"), "p-2").await;
    assert!(!ran.outcome.names_lost);
}

#[tokio::test]
async fn a_working_directory_is_set_before_the_first_cell() {
    let script = Script::cells(|mut wire, cell| async move {
        let refused = json!({"status": "error", "ename": "FileNotFoundError", "evalue": cell.code});
        let reply = if cell.code.contains("missing") { refused } else { json!({"status": "ok"}) };
        wire.end(&cell, reply).await;
        Some(wire)
    });
    let (fake, endpoint) = Fake::start(script).await;
    endpoint.start(None, Some("/tmp/\"a\\b\" ä"), PATIENT).await.expect("a directory");
    let error = endpoint.start(None, Some("/missing"), PATIENT).await.expect_err("no directory");
    assert_eq!(error.to_string(), "not a directory: /missing");
    for cwd in ["", "a\0b"] {
        assert!(matches!(
            endpoint.start(None, Some(cwd), PATIENT).await,
            Err(EndpointError::NotADirectory { .. })
        ));
    }
    fake.has_seen(DELETED).await;
}

// --- time ------------------------------------------------------------------------------------------------------

#[tokio::test]
async fn a_cell_over_its_time_is_interrupted_and_the_kernel_kept() {
    let interrupted = Arc::new(tokio::sync::Notify::new());
    let told = Arc::clone(&interrupted);
    let script = Script::cells(move |mut wire, cell| {
        let interrupted = Arc::clone(&interrupted);
        async move {
            wire.print(&cell, "before").await;
            interrupted.notified().await;
            let error = json!({"status": "error", "ename": "KeyboardInterrupt", "evalue": ""});
            wire.iopub(&cell, "error", error.clone()).await;
            wire.end(&cell, error).await;
            Some(wire)
        }
    });
    let on_request = Box::new(move |request: &str| {
        if request == INTERRUPTED {
            told.notify_one();
        }
        Answer::Honest
    });
    let (_fake, endpoint) = Fake::start(Script { on_request, ..script }).await;
    let limit = Duration::from_millis(200);
    let ran = run_for(kernel(&endpoint).await, "while True: pass", limit).await;
    assert_eq!(ran.outcome.cell.ending, Ending::Interrupted { timeout: limit });
    assert_eq!(ran.outcome.cell.ending.status(), Status::Timeout);
    let text = "execution timed out after 200ms and was interrupted";
    assert_eq!(errors(&ran), [("KeyboardInterrupt", ""), ("TimeoutError", text)]);
    assert_eq!(ran.outcome.cell.stream(Stream::Stdout), "before");
    assert_eq!(ran.outcome.cell.stream(Stream::Stderr), text);
    assert!(ran.kernel.is_some());
}

#[tokio::test]
async fn a_kernel_that_ignores_the_interrupt_is_given_up_and_deleted() {
    let (fake, endpoint) = Fake::start(Script::cells(|mut wire, cell| async move {
        wire.print(&cell, "partial").await;
        std::future::pending().await
    }))
    .await;
    let kernel = kernel(&endpoint).await;
    let started = Instant::now();
    let limit = Duration::from_millis(200);
    let ran = run_for(kernel, "x", limit).await;
    let took = started.elapsed();
    assert_eq!(ran.outcome.cell.ending, Ending::Unstoppable { timeout: limit });
    assert!(took >= limit + LIMITS.interrupt_grace && took < limit + 2 * LIMITS.interrupt_grace, "{took:?}");
    assert_eq!(ran.outcome.cell.stream(Stream::Stdout), "partial");
    assert!(ran.kernel.is_none());
    fake.has_seen(DELETED).await;
    assert_eq!(fake.count(INTERRUPTED), 1);
}

#[tokio::test]
async fn an_interrupt_on_its_way_never_meets_the_next_cell() {
    let script = Script::cells(|mut wire, cell| async move {
        sleep(Duration::from_millis(400)).await;
        wire.end(&cell, json!({"status": "ok"})).await;
        Some(wire)
    });
    let on_request =
        Box::new(|request: &str| if request == INTERRUPTED { Answer::Silence } else { Answer::Honest });
    let (_fake, endpoint) = Fake::start(Script { on_request, ..script }).await;
    let limit = Duration::from_millis(200);
    let ran = run_for(kernel(&endpoint).await, "x", limit).await;
    assert_eq!(ran.outcome.cell.ending, Ending::Unstoppable { timeout: limit });
    assert!(ran.kernel.is_none());
}

#[tokio::test]
async fn a_cell_is_stopped_and_its_kernel_deleted() {
    let (fake, endpoint) = Fake::start(Script::cells(|_wire, _cell| std::future::pending())).await;
    let kernel = kernel(&endpoint).await;
    let (sender, mut stop) = watch::channel(None);
    let stopping = async {
        sleep(Duration::from_millis(100)).await;
        sender.send(Some(Stopped::SessionDeleted)).expect("somebody listens");
    };
    let (ran, ()) =
        tokio::join!(kernel.run(cell("x", Duration::from_secs(30)), &LIMITS, &mut stop), stopping);
    assert_eq!(ran.outcome.cell.ending, Ending::Stopped(Stopped::SessionDeleted));
    assert_eq!(errors(&ran), [("ProcessError", "the session was deleted")]);
    assert!(ran.kernel.is_none());
    fake.has_seen(DELETED).await;
}

#[tokio::test]
async fn whoever_goes_away_leaves_no_kernel() {
    let slow = |request: &str| {
        if request == "POST /api/kernels" {
            std::thread::sleep(Duration::from_millis(300));
        }
        Answer::Honest
    };
    let (fake, endpoint) = Fake::start(Script::requests(slow)).await;
    assert!(endpoint.probe().await);
    assert!(timeout(Duration::from_millis(50), endpoint.start(None, None, PATIENT)).await.is_err());
    fake.has_seen(DELETED).await;
}

#[tokio::test]
async fn settling_waits_for_kernels_that_were_dropped() {
    let slow = |request: &str| {
        if request == DELETED {
            std::thread::sleep(Duration::from_millis(300));
        }
        Answer::Honest
    };
    let (fake, endpoint) = Fake::start(Script::requests(slow)).await;
    drop(kernel(&endpoint).await);
    endpoint.settle(Duration::from_secs(5)).await;
    assert_eq!(fake.count(DELETED), 1);
    drop(kernel(&endpoint).await);
    endpoint.settle(Duration::from_secs(5)).await;
    assert_eq!(fake.count(DELETED), 2, "also when it was done before");
}

#[tokio::test]
async fn a_deletion_that_fails_is_tried_again() {
    let tries = AtomicUsize::new(0);
    let on_request = move |request: &str| match request {
        DELETED if tries.fetch_add(1, Ordering::SeqCst) == 0 => Answer::Json(500, json!({})),
        _ => Answer::Honest,
    };
    let (fake, endpoint) = Fake::start(Script::requests(on_request)).await;
    kernel(&endpoint).await.shutdown().await;
    assert_eq!(fake.count(DELETED), 2);
}

#[tokio::test]
async fn kernels_of_a_daemon_that_was_killed_are_deleted_by_the_next_one() {
    let (fake, endpoint) = Fake::start(Script::cells(echo)).await;
    // A killed daemon drops nothing.
    std::mem::forget(kernel(&endpoint).await);
    endpoint.sweep().await;
    assert_eq!(fake.count(DELETED), 0, "its own are no earlier daemon's");
    let (config, store) = fake.settings();
    let next = Endpoint::new(config, store);
    timeout(Duration::from_secs(5), next.sweep()).await.expect("none is left");
    assert_eq!(fake.count(DELETED), 1);
    timeout(Duration::from_secs(5), next.sweep()).await.expect("none is left");
    assert_eq!(fake.count(DELETED), 1, "once is enough");
}

#[tokio::test]
async fn a_kernel_that_was_deleted_is_forgotten_and_one_that_was_not_is_tried_again() {
    let refuses = Arc::new(std::sync::atomic::AtomicBool::new(false));
    let told = Arc::clone(&refuses);
    let (fake, endpoint) = Fake::start(Script::requests(move |request| match request {
        DELETED if told.load(Ordering::SeqCst) => Answer::Json(403, json!({})),
        _ => Answer::Honest,
    }))
    .await;
    let (config, store) = fake.settings();
    kernel(&endpoint).await.shutdown().await;
    let next = Endpoint::new(config, store);
    assert!(next.rest.records().left_behind().await.expect("read").is_empty());
    std::mem::forget(kernel(&endpoint).await);
    refuses.store(true, Ordering::SeqCst);
    let recovering = async {
        fake.has_seen(DELETED).await;
        sleep(Duration::from_millis(200)).await;
        assert_eq!(next.rest.records().left_behind().await.expect("read").len(), 1, "it is still there");
        refuses.store(false, Ordering::SeqCst);
    };
    let (swept, ()) = tokio::join!(timeout(Duration::from_secs(10), next.sweep()), recovering);
    swept.expect("none is left in the end");
}

// --- lost connections ------------------------------------------------------------------------------------------

/// Drops the connection of a cell before its end; what comes later is sent over the next one.
fn dropping(rest: fn(Wire, FakeCell) -> Later) -> Script {
    let running: Arc<Mutex<Option<FakeCell>>> = Arc::default();
    let known = Arc::clone(&running);
    Script::cells(move |mut wire, cell| {
        *running.lock().expect("no test panics here") = Some(cell.clone());
        async move {
            wire.print(&cell, "first ").await;
            None
        }
    })
    .with_connections(move |wire, _| {
        let cell = known.lock().expect("no test panics here").clone();
        async move {
            match cell {
                Some(cell) => rest(wire, cell).await,
                None => Some(wire),
            }
        }
    })
}

#[tokio::test]
async fn a_connection_lost_in_a_cell_comes_back_with_the_rest() {
    for form in [Form::Offsets, Form::Json] {
        let script = dropping(|mut wire, cell| {
            Box::pin(async move {
                wire.print(&cell, "second").await;
                wire.end(&cell, json!({"status": "ok"})).await;
                Some(wire)
            })
        });
        let (fake, endpoint) = Fake::start(Script { form, ..script }).await;
        let ran = run(kernel(&endpoint).await, "x").await;
        assert_eq!(ran.outcome.cell.ending, Ending::Completed);
        assert_eq!(ran.outcome.cell.outputs, [stream(Stream::Stdout, "first second")]);
        let session =
            |head: &String| head.lines().next()?.split_once("session_id=").map(|(_, id)| id.to_owned());
        let sessions: Vec<String> = fake.heads().iter().filter_map(session).collect();
        // The subprotocol is offered once: a second connection of the session would take what was kept.
        assert_eq!(sessions.len(), if form == Form::Offsets { 2 } else { 3 });
        assert!(sessions.iter().all(|it| *it == sessions[0]), "the server keeps what comes for a session");
    }
}

#[tokio::test]
async fn a_connection_lost_twice_is_an_error_of_the_execution() {
    let (fake, endpoint) = Fake::start(dropping(|_, _| Box::pin(async { None }))).await;
    let ran = run(kernel(&endpoint).await, "x").await;
    assert_eq!(ran.outcome.cell.ending, Ending::Lost(Lost::Connection));
    assert_eq!(ran.outcome.cell.ending.status(), Status::Error);
    assert_eq!(ran.outcome.cell.stream(Stream::Stdout), "first ");
    let text = "the connection to the Jupyter server was lost; the code may have run";
    assert_eq!(errors(&ran), [("ProcessError", text)]);
    assert_eq!(fake.connections(), 2);
    fake.has_seen(DELETED).await;
}

#[tokio::test]
async fn an_outcome_that_the_server_forgot_is_an_error_and_no_wait_for_the_time_limit() {
    let forgetful = dropping(|wire, _| {
        Box::pin(async move {
            let _open = wire;
            std::future::pending().await
        })
    });
    let on_request = Box::new(|request: &str| match request {
        "GET /api/kernels/k-1" => Answer::Json(200, json!({"id": "k-1", "execution_state": "idle"})),
        _ => Answer::Honest,
    });
    let (_fake, endpoint) = Fake::start(Script { on_request, ..forgetful }).await;
    let ran = run(kernel(&endpoint).await, "x").await;
    assert_eq!(ran.outcome.cell.ending, Ending::Lost(Lost::Forgotten));
}

#[tokio::test]
async fn a_kernel_that_the_server_no_longer_has_died() {
    let cells = Arc::new(AtomicUsize::new(0));
    let seen = Arc::clone(&cells);
    let script = Script::cells(move |_wire, _cell| {
        cells.fetch_add(1, Ordering::SeqCst);
        async { None }
    });
    let on_request = Box::new(move |request: &str| {
        if request.ends_with("/channels") && seen.load(Ordering::SeqCst) > 0 {
            Answer::Json(404, json!({}))
        } else {
            Answer::Honest
        }
    });
    let (_fake, endpoint) = Fake::start(Script { on_request, ..script }).await;
    let ran = run(kernel(&endpoint).await, "x").await;
    assert_eq!(ran.outcome.cell.ending, Ending::Died(None));
}

#[tokio::test]
async fn a_connection_lost_between_two_cells_is_made_again() {
    let (fake, endpoint) = Fake::start(Script::cells(|wire, cell| async move {
        echo(wire, cell).await;
        None
    }))
    .await;
    let mut kernel = kernel(&endpoint).await;
    for code in ["1", "2"] {
        let ran = run(kernel, code).await;
        assert_eq!(ran.outcome.cell.outputs, [stream(Stream::Stdout, code)]);
        kernel = ran.kernel.expect("it goes on");
        sleep(Duration::from_millis(50)).await;
    }
    assert_eq!(fake.connections(), 2);
}

#[tokio::test]
async fn a_kernel_is_asked_for_when_its_connection_is_lost_and_not_right_after_a_cell() {
    const ASKED: &str = "GET /api/kernels/k-1";
    for (keeps, answer, is_gone) in
        [(true, 404, false), (false, 200, false), (false, 404, true), (false, 500, false)]
    {
        let script = Script::cells(move |wire, cell| async move { echo(wire, cell).await.filter(|_| keeps) });
        let on_request = Box::new(move |request: &str| match request {
            ASKED => Answer::Json(answer, json!({"id": "k-1", "execution_state": "idle"})),
            _ => Answer::Honest,
        });
        let (fake, endpoint) = Fake::start(Script { on_request, ..script }).await;
        let ran = run(kernel(&endpoint).await, "x").await;
        sleep(Duration::from_millis(50)).await;
        let revisited = ran.kernel.expect("it goes on").revisit().await;
        assert_eq!(revisited.err(), is_gone.then_some(Gone::Ended), "{keeps} {answer}");
        assert_eq!(fake.count(ASKED), usize::from(!keeps));
    }
}

#[tokio::test]
async fn a_server_that_is_gone_between_two_cells_is_an_error_of_the_execution() {
    let (fake, endpoint) = Fake::start(Script::cells(echo)).await;
    let kernel = kernel(&endpoint).await;
    drop(fake);
    sleep(Duration::from_millis(50)).await;
    let ran = run(kernel, "x").await;
    assert_eq!(ran.outcome.cell.ending, Ending::Lost(Lost::Unreached));
    assert!(matches!(endpoint.start(None, None, PATIENT).await, Err(EndpointError::Unreachable)));
    assert_eq!(endpoint.kernels_seen(), Vec::<String>::new());
}

#[tokio::test]
async fn a_kernel_whose_process_ends_died() {
    for state in ["restarting", "dead"] {
        let (fake, endpoint) = Fake::start(Script::cells(move |mut wire, cell| async move {
            wire.print(&cell, "last words").await;
            wire.send("iopub", "status", "", json!({"execution_state": state})).await;
            Some(wire)
        }))
        .await;
        let ran = run(kernel(&endpoint).await, "os._exit(3)").await;
        assert_eq!(ran.outcome.cell.ending, Ending::Died(None));
        assert_eq!(ran.outcome.cell.stream(Stream::Stdout), "last words");
        assert_eq!(errors(&ran), [("ProcessError", "the interpreter ended unexpectedly")]);
        assert!(ran.kernel.is_none());
        fake.has_seen(DELETED).await;
    }
}

// --- a server that lies ----------------------------------------------------------------------------------------

#[tokio::test]
async fn one_end_of_a_cell_without_the_other_is_not_waited_for() {
    let (_fake, endpoint) = Fake::start(Script::cells(|mut wire, cell| async move {
        wire.send("shell", "execute_reply", &cell.id, json!({"status": "ok"})).await;
        Some(wire)
    }))
    .await;
    let ran = run(kernel(&endpoint).await, "x").await;
    assert_eq!(ran.outcome.cell.ending, Ending::Completed);

    let (_fake, endpoint) = Fake::start(Script::cells(|mut wire, cell| async move {
        wire.idle(&cell).await;
        Some(wire)
    }))
    .await;
    let ran = run(kernel(&endpoint).await, "x").await;
    assert_eq!(ran.outcome.cell.ending, Ending::Lost(Lost::NoReply));
}

#[tokio::test]
async fn replies_that_are_none_are_errors_of_the_execution() {
    for reply in [json!({"status": "aborted"}), json!({"status": 1}), json!({}), json!([]), json!(null)] {
        let shown = reply.to_string();
        let (_fake, endpoint) = Fake::start(Script::cells(move |mut wire, cell| {
            let reply = reply.clone();
            async move {
                wire.end(&cell, reply).await;
                Some(wire)
            }
        }))
        .await;
        let ran = run(kernel(&endpoint).await, "x").await;
        assert_eq!(ran.outcome.cell.ending, Ending::Lost(Lost::NoReply), "{shown}");
    }
}

#[tokio::test]
async fn frames_that_are_no_messages_count_for_nothing() {
    let (_fake, endpoint) = Fake::start(Script::cells(|mut wire, cell| async move {
        let deep = "[".repeat(100_000);
        let header = format!(r#"{{"msg_type":"stream","session":{deep}}}"#);
        for frame in [
            Frame::text("text where none belongs"),
            Frame::binary(vec![0xFF_u8; 100]),
            Frame::binary(Vec::new()),
            Frame::binary(super::message::join(&["iopub", &header, "{}", "{}", "{}"].map(|it| it.into()))),
            Frame::Ping(vec![1].into()),
            Frame::Pong(vec![1].into()),
        ] {
            wire.frame(frame).await;
        }
        wire.iopub(&cell, "stream", json!({"name": "stdout", "text": {"a": 1}})).await;
        wire.iopub(&cell, "status", json!("idle")).await;
        wire.send("nowhere", "execute_reply", &cell.id, json!({"status": "error"})).await;
        echo(wire, cell).await
    }))
    .await;
    let ran = run(kernel(&endpoint).await, "x").await;
    assert_eq!(ran.outcome.cell.ending, Ending::Completed);
    assert_eq!(ran.outcome.cell.outputs, [stream(Stream::Stdout, "x")]);
}

/// One message of more than the bound, whole or in pieces that are each below it.
async fn send_too_much(wire: &mut Wire, whole: bool) {
    let frame =
        |code, bytes, last| Frame::Frame(WsFrame::message(vec![b'x'; bytes], OpCode::Data(code), last));
    if whole {
        wire.frame(frame(Data::Binary, MESSAGE_BYTES_MAX + 1, true)).await;
        return;
    }
    let piece = MESSAGE_BYTES_MAX / 4;
    wire.frame(frame(Data::Binary, piece, false)).await;
    for _ in 0..4 {
        wire.frame(frame(Data::Continue, piece, false)).await;
    }
    wire.frame(frame(Data::Continue, 0, true)).await;
}

#[tokio::test]
async fn a_message_that_is_too_large_leaves_a_note_and_the_cell_goes_on() {
    for whole in [true, false] {
        let running: Arc<Mutex<Option<FakeCell>>> = Arc::default();
        let known = Arc::clone(&running);
        let script = Script::cells(move |mut wire, cell| {
            *running.lock().expect("no test panics here") = Some(cell);
            async move {
                send_too_much(&mut wire, whole).await;
                None
            }
        })
        .with_connections(move |mut wire, _| {
            let cell = known.lock().expect("no test panics here").clone();
            async move {
                if let Some(cell) = cell {
                    wire.iopub(&cell, "display_data", json!({"data": {"text/plain": "after"}})).await;
                    wire.end(&cell, json!({"status": "ok"})).await;
                }
                Some(wire)
            }
        });
        let (_fake, endpoint) = Fake::start(script).await;
        let ran = run(kernel(&endpoint).await, "x").await;
        assert_eq!(ran.outcome.cell.ending, Ending::Completed);
        assert_eq!(
            ran.outcome.cell.stream(Stream::Stderr),
            "[output truncated at 2000000 characters]",
            "{whole}"
        );
        assert!(matches!(ran.outcome.cell.outputs[1], Output::DisplayData { .. }));
        assert_eq!(ran.outcome.cell.outputs.len(), 2);
    }
}

#[tokio::test]
async fn a_flood_of_output_is_cut_and_the_cell_ends_as_it_did() {
    let (_fake, endpoint) = Fake::start(Script::cells(|mut wire, cell| async move {
        for _ in 0..50 {
            wire.print(&cell, &"0123456789".repeat(10_000)).await;
        }
        wire.end(&cell, json!({"status": "ok"})).await;
        Some(wire)
    }))
    .await;
    let ran = run(kernel(&endpoint).await, "x").await;
    assert_eq!(ran.outcome.cell.ending, Ending::Completed);
    assert_eq!(ran.outcome.cell.stream(Stream::Stdout).len(), CHARS_MAX);
    assert_eq!(ran.outcome.cell.outputs.len(), 2);
}

/// One kernel for Python, with more in the head and with so many spaces behind the body.
fn one_kernel(head: &str, spaces: usize) -> Answer {
    let body = r#"{"kernelspecs":{"python3":{"spec":{"language":"python"}}}}"#;
    Answer::Raw(format!("HTTP/1.1 200 OK\r\n{head}\r\n{body}{}", " ".repeat(spaces)).into_bytes())
}

#[tokio::test]
async fn a_server_that_cannot_be_used_is_not_reachable() {
    let answer = |answer: fn() -> Answer| {
        move |request: &str| if request == LOOKED { answer() } else { Answer::Honest }
    };
    type Case = (&'static str, fn() -> Answer);
    let cases: [Case; 10] = [
        ("no token", || Answer::Json(403, json!({"message": "Forbidden"}))),
        ("redirect", || {
            Answer::Raw(
                b"HTTP/1.1 302 Found\r\nLocation: /base/api/kernelspecs2\r\nContent-Length: 0\r\n\r\n"
                    .to_vec(),
            )
        }),
        ("no python", || Answer::Json(200, json!({"default": "ir", "kernelspecs": {}}))),
        ("a list", || Answer::Json(200, json!([]))),
        ("wrong types", || Answer::Json(200, json!({"default": 1, "kernelspecs": 2}))),
        ("no HTTP", || Answer::Raw(b"220 mail\r\n".to_vec())),
        ("cut off", || one_kernel("Content-Length: 900\r\n", 0)),
        ("a body without end", || one_kernel("", 3 << 20)),
        ("a head without end", || one_kernel(&format!("X: {}\r\n", "x".repeat(1 << 20)), 0)),
        ("hung up", || Answer::Raw(Vec::new())),
    ];
    let (_fake, endpoint) = Fake::start(Script::requests(answer(|| one_kernel("X: x\r\n", 1 << 20)))).await;
    assert!(endpoint.probe().await, "control");
    for (what, case) in cases {
        let (fake, endpoint) = Fake::start(Script::requests(answer(case))).await;
        assert!(!endpoint.probe().await, "{what}");
        assert!(
            matches!(endpoint.start(None, None, PATIENT).await, Err(EndpointError::Unreachable)),
            "{what}"
        );
        assert_eq!(fake.seen(), [LOOKED], "{what}: looked at once, and at nothing else");
    }
}

#[tokio::test]
async fn a_server_that_says_nothing_is_not_waited_for() {
    let silent = |request: &str| if request == LOOKED { Answer::Silence } else { Answer::Honest };
    let (_fake, endpoint) = Fake::start(Script::requests(silent)).await;
    let started = Instant::now();
    assert!(!endpoint.probe().await);
    assert!(started.elapsed() < Duration::from_secs(4), "{:?}", started.elapsed());
    let started = Instant::now();
    assert_eq!(endpoint.kernels().await, Vec::<String>::new());
    assert!(started.elapsed() < Duration::from_secs(1), "an old look is believed for a while");
}

#[tokio::test]
async fn a_kernel_that_is_not_started_is_an_error_of_the_start() {
    for id in [json!("../kernels/x"), json!(""), json!("a\r\nb"), json!("a".repeat(500)), json!(7)] {
        let shown = id.to_string();
        let (_fake, endpoint) = Fake::start(Script::requests(move |request| match request {
            "POST /api/kernels" => Answer::Json(201, json!({"id": id.clone()})),
            _ => Answer::Honest,
        }))
        .await;
        let error = endpoint.start(None, None, PATIENT).await.expect_err(&shown);
        assert!(matches!(error, EndpointError::Start(RestError::Garbled)), "{shown}: {error:?}");
    }
    let (_fake, endpoint) = Fake::start(Script::requests(|request| match request {
        "POST /api/kernels" => Answer::Json(500, json!({"message": "no room"})),
        _ => Answer::Honest,
    }))
    .await;
    let error = endpoint.start(None, None, PATIENT).await.expect_err("no room");
    assert!(matches!(error, EndpointError::Start(RestError::Status(500))), "{error:?}");
}

#[tokio::test]
async fn a_kernel_that_cannot_be_spoken_to_is_an_error_of_the_start_and_deleted() {
    let (fake, endpoint) = Fake::start(Script::requests(|request| {
        if request.ends_with("/channels") { Answer::Json(403, json!({})) } else { Answer::Honest }
    }))
    .await;
    let error = endpoint.start(None, None, PATIENT).await.expect_err("no channels");
    assert!(matches!(error, EndpointError::NotReady(RestError::Unauthorized(403))), "{error:?}");
    fake.has_seen(DELETED).await;
}

const NOT_READY: &str = "a new kernel of the Jupyter server did not get ready";

/// Answers everything but what would make its kernels ready.
fn never_ready() -> Script {
    Script::requests(|request| match request.ends_with("/channels") {
        true => Answer::Silence,
        false => Answer::Honest,
    })
}

#[tokio::test]
async fn a_kernel_that_never_gets_ready_is_waited_for_as_long_as_its_cell_may_take() {
    for (what, script) in [
        ("no channels", never_ready()),
        (
            "no start",
            Script::requests(|request| match request {
                "POST /api/kernels" => Answer::Silence,
                _ => Answer::Honest,
            }),
        ),
    ] {
        let (fake, endpoint) = Fake::start(script).await;
        let started = Instant::now();
        let ran = run_for(kernel(&endpoint).await, "1", Duration::from_secs(2)).await;
        let took = started.elapsed();
        assert!(took > Duration::from_millis(1900) && took < Duration::from_secs(4), "{what}: {took:?}");
        assert_eq!(ran.outcome.cell.ending.status(), Status::Error, "{what}");
        assert_eq!(errors(&ran), [("ProcessError", NOT_READY)], "{what}");
        // It is on its way still, and the next cell learns what came of it.
        let kernel = ran.kernel.expect("the next cell waits on");
        let ran = run(kernel, "2").await;
        assert_eq!(errors(&ran), [("ProcessError", NOT_READY)], "{what}");
        let took = started.elapsed();
        assert!(took > READY_MAX && took < READY_MAX * 2, "{what}: {took:?}");
        assert!(ran.kernel.is_none());
        if what == "no channels" {
            fake.has_seen(DELETED).await;
        }
    }
}

#[tokio::test]
async fn a_kernel_that_did_not_get_ready_between_two_cells_is_none() {
    let (_fake, endpoint) = Fake::start(never_ready()).await;
    let ran = run_for(kernel(&endpoint).await, "1", Duration::from_secs(1)).await;
    let kernel = ran.kernel.expect("on its way").revisit().await.expect("it is still");
    sleep(READY_MAX).await;
    assert_eq!(kernel.revisit().await.err(), Some(Gone::NeverCame));
}

#[tokio::test]
async fn callers_in_a_hurry_say_nothing_of_the_server_and_get_their_kernel_with_a_later_cell() {
    let script = Script::cells(echo).with_connections(|wire, _| async move {
        sleep(Duration::from_millis(2500)).await;
        Some(wire)
    });
    let (fake, endpoint) = Fake::start(script).await;
    let mut kernels = Vec::new();
    for _ in 0..=standing::FAILURES_MAX {
        kernels.push(kernel(&endpoint).await);
    }
    let hurried = |kernel| run_for(kernel, "1", Duration::from_secs(1));
    for ran in futures_util::future::join_all(kernels.into_iter().map(hurried)).await {
        assert!(matches!(ran.outcome.cell.ending, Ending::Completed | Ending::Lost(Lost::Unreached)));
        let ran = run(ran.kernel.expect("it is kept"), "later").await;
        assert_eq!(ran.outcome.cell.stream(Stream::Stdout), "later", "{:?}", ran.outcome);
    }
    let ran = hurried(kernel(&endpoint).await).await;
    assert_eq!(errors(&ran), [("ProcessError", NOT_READY)], "control: they were in a hurry");
    assert_eq!(endpoint.kernels().await, ["python3", "a-python"], "it is not shunned");
    let starts = u32::try_from(fake.count("POST /api/kernels")).expect("a few");
    assert_eq!(starts, standing::FAILURES_MAX + 2, "nothing was started twice");
}

#[tokio::test]
async fn callers_who_give_up_have_a_slow_server_start_a_bounded_number_of_kernels() {
    const CALLERS: usize = 3 * rest::COMING_MAX;
    let (fake, endpoint) = Fake::start(Script::requests(|request| match request {
        "POST /api/kernels" => Answer::Silence,
        _ => Answer::Honest,
    }))
    .await;
    let hurried = async || drop(run_for(kernel(&endpoint).await, "1", Duration::from_secs(1)).await);
    futures_util::future::join_all((0..CALLERS).map(|_| hurried())).await;
    hurried().await;
    assert_eq!(fake.count("POST /api/kernels"), rest::COMING_MAX);
    // The same for kernels that come and do not get ready before they are deleted.
    let (fake, endpoint) = Fake::start(Script::requests(|request| match request {
        DELETED => Answer::Silence,
        path if path.ends_with("/channels") => Answer::Silence,
        _ => Answer::Honest,
    }))
    .await;
    let hurried = async || drop(run_for(kernel(&endpoint).await, "1", Duration::from_secs(1)).await);
    futures_util::future::join_all((0..CALLERS).map(|_| hurried())).await;
    hurried().await;
    assert_eq!(fake.count("POST /api/kernels"), rest::COMING_MAX);
    // Patient callers wait for each other, and a kernel that somebody has takes no place.
    let (_fake, endpoint) = Fake::start(Script::cells(echo).with_connections(|wire, _| async move {
        sleep(Duration::from_millis(500)).await;
        Some(wire)
    }))
    .await;
    let patient = async || run(kernel(&endpoint).await, "here").await;
    for ran in futures_util::future::join_all((0..CALLERS).map(|_| patient())).await {
        assert_eq!(ran.outcome.cell.stream(Stream::Stdout), "here", "{:?}", ran.outcome);
        assert!(ran.kernel.is_some());
        std::mem::forget(ran.kernel);
    }
}

#[tokio::test]
async fn a_cell_with_a_directory_waits_for_its_kernel_no_longer_than_it_may_take() {
    let (_fake, endpoint) = Fake::start(never_ready()).await;
    let started = Instant::now();
    let limit = Duration::from_secs(1);
    let kernel = endpoint.start(None, Some("/srv"), limit).await.expect("on its way");
    let ran = run_for(kernel, "1", limit).await;
    assert_eq!(errors(&ran), [("ProcessError", NOT_READY)]);
    assert!(started.elapsed() < Duration::from_secs(3), "{:?}", started.elapsed());
}

#[tokio::test]
async fn a_kernel_on_its_way_gets_ready_for_its_first_cell() {
    let script = Script::cells(echo).with_connections(|wire, _| async move {
        sleep(Duration::from_millis(1500)).await;
        Some(wire)
    });
    let (_fake, endpoint) = Fake::start(script).await;
    let kernel = kernel(&endpoint).await;
    assert_eq!((kernel.name(), kernel.id()), ("python3", None), "it is not there yet");
    let ran = run_for(kernel, "here", Duration::from_secs(5)).await;
    assert_eq!(ran.outcome.cell.stream(Stream::Stdout), "here", "{:?}", ran.outcome);
    assert_eq!(ran.kernel.expect("it goes on").id(), Some("k-1"));
    assert!(!endpoint.kernels_seen().is_empty());
}

#[tokio::test]
async fn a_cell_that_is_stopped_waits_for_no_kernel() {
    let (fake, endpoint) = Fake::start(never_ready()).await;
    let kernel = kernel(&endpoint).await;
    let (_open, mut stop) = watch::channel(Some(Stopped::SessionDeleted));
    let ran = kernel.run(cell("1", Duration::from_secs(60)), &LIMITS, &mut stop);
    let ran = timeout(Duration::from_secs(1), ran).await.expect("at once");
    assert_eq!(ran.outcome.cell.ending, Ending::Stopped(Stopped::SessionDeleted));
    fake.has_seen(DELETED).await;
}

#[tokio::test]
async fn a_server_whose_kernels_do_not_get_ready_counts_as_absent_for_a_while() {
    let (fake, endpoint) = Fake::start(never_ready()).await;
    let begun = Instant::now();
    for _ in 0..standing::FAILURES_MAX + 2 {
        assert_eq!(endpoint.kernels().await, ["python3", "a-python"]);
        let kernel = kernel(&endpoint);
        // Nobody waits for as long as we would.
        let ran = run_for(timeout(PATIENT, kernel).await.expect("handed out"), "1", Duration::ZERO).await;
        assert_eq!(errors(&ran).len(), 1);
    }
    while !endpoint.kernels().await.is_empty() {
        assert!(begun.elapsed() < READY_MAX * 3, "it is never found out");
        sleep(Duration::from_millis(50)).await;
    }
    assert!(begun.elapsed() > READY_MAX);
    assert_eq!(endpoint.kernels().await, Vec::<String>::new());
    assert_eq!(endpoint.kernels_seen(), Vec::<String>::new());
    let starts = fake.count("POST /api/kernels");
    assert!(matches!(endpoint.start(None, None, PATIENT).await, Err(EndpointError::Unreachable)));
    assert_eq!(fake.count("POST /api/kernels"), starts, "nothing is asked of it");
}

#[tokio::test]
async fn a_server_that_refuses_to_start_kernels_is_asked_again() {
    let (_fake, endpoint) = Fake::start(Script::requests(|request| match request {
        "POST /api/kernels" => Answer::Json(500, json!({"message": "no room"})),
        _ => Answer::Honest,
    }))
    .await;
    for _ in 0..=standing::FAILURES_MAX {
        let error = endpoint.start(None, None, PATIENT).await.expect_err("no room");
        assert!(matches!(error, EndpointError::Start(RestError::Status(500))), "{error:?}");
    }
}

#[tokio::test]
async fn a_first_request_that_a_server_loses_is_made_again() {
    let script = Script::cells(echo).with_connections(|mut wire, _| async move {
        let (kind, ..) = wire.request().await?;
        assert_eq!(kind, "kernel_info_request");
        Some(wire)
    });
    let (_fake, endpoint) = Fake::start(script).await;
    let ran = run(kernel(&endpoint).await, "here").await;
    assert_eq!(ran.outcome.cell.stream(Stream::Stdout), "here", "{:?}", ran.outcome);
}

#[tokio::test]
async fn a_server_that_comes_back_is_found_again() {
    let (fake, endpoint) = Fake::start(Script::cells(echo)).await;
    let port = fake.port();
    drop(fake);
    sleep(Duration::from_millis(50)).await;
    assert!(!endpoint.probe().await);
    let (fake, _) = Fake::start_at(port, Script::cells(echo)).await;
    assert!(endpoint.kernels().await.is_empty(), "a look is believed for a few seconds");
    assert_eq!(fake.count(LOOKED), 0);
    assert!(endpoint.probe().await);
    assert_eq!(endpoint.kernels().await, ["python3", "a-python"]);
}
