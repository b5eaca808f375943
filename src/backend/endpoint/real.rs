//! The backend against a real Jupyter server whose URL, with its token, stands in `CAISSON_TEST_JUPYTER_URL`.
//! `tests/endpoint.py --module` starts one and runs these.
#![forbid(unsafe_code)]

use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use tokio::io::AsyncWriteExt;
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::{Notify, watch};
use tokio::time::{Instant, sleep};

use super::*;
use crate::engine::{Bundle, Output, Stream};
use crate::harness::interpreter::{Cell, CellLimits};
use crate::harness::outcome::{CellOutcome, Ending, Stopped};

/// For starts whose own time is not the point.
const PATIENT: Duration = Duration::from_secs(30);
const SETTING: &str = "CAISSON_TEST_JUPYTER_URL";
const CHARS_MAX: usize = 2_000_000;
const LIMITS: CellLimits = CellLimits {
    output_chars_max: CHARS_MAX,
    stream_bytes_max: None,
    grace: Duration::from_secs(5),
    interrupt_grace: Duration::from_secs(2),
    memory_mib_max: 512,
};

fn config() -> EndpointConfig {
    let url = std::env::var(SETTING).unwrap_or_else(|_| panic!("{SETTING} names no server"));
    EndpointConfig::parse(&url, None).expect("a URL of a server")
}

fn endpoint_at(config: EndpointConfig) -> Endpoint {
    Endpoint::new(config, Store::in_memory().expect("a store in memory"))
}

async fn kernel(endpoint: &Endpoint) -> RemoteKernel {
    let kernel = endpoint.start(None, None, PATIENT).await.expect("the server starts kernels");
    kernel.ready().await.expect("it gets ready")
}

/// Leaves nothing on the server.
async fn finish(endpoint: &Endpoint, ran: RemoteRan) {
    drop(ran);
    endpoint.settle(Duration::from_secs(10)).await;
}

async fn run(kernel: RemoteKernel, code: &str) -> RemoteRan {
    run_for(kernel, code, Duration::from_secs(30)).await
}

async fn run_for(kernel: RemoteKernel, code: &str, limit: Duration) -> RemoteRan {
    let (_open, mut stop) = watch::channel(None);
    let cell = Cell { code, timeout: limit, execution_count: 5, watcher: None, argv: None };
    kernel.run(cell, &LIMITS, &mut stop).await
}

/// Runs cells one after the other in one kernel; the last one's outcome.
async fn cells(codes: &[&str]) -> CellOutcome {
    let endpoint = endpoint_at(config());
    let mut kernel = kernel(&endpoint).await;
    let mut outcome = None;
    for code in codes {
        let ran = run(kernel, code).await;
        outcome = Some(ran.outcome.cell);
        kernel = ran.kernel.unwrap_or_else(|| panic!("{code}: {outcome:?}"));
    }
    kernel.shutdown().await;
    outcome.expect("there were cells")
}

fn displays(outcome: &CellOutcome) -> Vec<&Bundle> {
    let bundle = |output| match output {
        &Output::DisplayData { ref data, .. } | &Output::ExecuteResult { ref data, .. } => Some(data),
        _ => None,
    };
    outcome.outputs.iter().filter_map(bundle).collect()
}

fn enames(outcome: &CellOutcome) -> Vec<&str> {
    let errors = outcome.outputs.iter().filter_map(|output| match output {
        Output::Error(error) => Some(error.ename.as_str()),
        _ => None,
    });
    errors.collect()
}

async fn exists(endpoint: &Endpoint, kernel: &str) -> bool {
    let id = rest::KernelId::parse(kernel.to_owned()).expect("an id of the server's");
    endpoint.rest.state(&id, rest::REQUEST_MAX).await.expect("the server answers") != rest::KernelState::Gone
}

#[tokio::test]
#[ignore = "needs a Jupyter server: run by the stage endpoint-module"]
async fn names_stay_from_cell_to_cell_and_streams_are_told_apart() {
    let outcome = cells(&["x = 20", "import sys\nprint('out')\nprint('err', file=sys.stderr)\nx + 1"]).await;
    assert_eq!(outcome.ending, Ending::Completed);
    assert_eq!(outcome.stream(Stream::Stdout), "out\n");
    assert_eq!(outcome.stream(Stream::Stderr), "err\n");
    let Some(Output::ExecuteResult { data, execution_count: 5, .. }) = outcome.outputs.last() else {
        panic!("{outcome:?}")
    };
    assert_eq!(data["text/plain"], "21");
}

#[tokio::test]
#[ignore = "needs a Jupyter server: run by the stage endpoint-module"]
async fn rich_outputs_come_as_they_are() {
    let outcome = cells(&[
        "%matplotlib inline\nimport pandas as pd, matplotlib.pyplot as plt",
        "plt.plot([1, 2])\nplt.show()\npd.DataFrame({'a': [1]})",
    ])
    .await;
    let shown = displays(&outcome);
    assert_eq!(shown.len(), 2, "{outcome:?}");
    assert!(shown[0]["image/png"].as_str().is_some_and(|png| png.starts_with("iVBORw0KGgo")));
    assert!(shown[0]["text/plain"].as_str().is_some_and(|text| text.starts_with("<Figure size")));
    assert!(shown[1]["text/html"].as_str().is_some_and(|html| html.contains("<table")));
}

#[tokio::test]
#[ignore = "needs a Jupyter server: run by the stage endpoint-module"]
async fn updates_and_clearing_leave_what_a_notebook_shows() {
    let outcome = cells(&["from IPython.display import display, clear_output\n\
        print('gone')\nclear_output()\nh = display('a', display_id=True)\nprint('kept')\nh.update('b')"])
    .await;
    let [Output::DisplayData { data, .. }, Output::Stream { name: Stream::Stdout, text }] =
        &outcome.outputs[..]
    else {
        panic!("{outcome:?}")
    };
    assert_eq!((data["text/plain"].as_str(), text.as_str()), (Some("'b'"), "kept\n"));
}

#[tokio::test]
#[ignore = "needs a Jupyter server: run by the stage endpoint-module"]
async fn exceptions_are_errors_and_a_cell_may_follow_at_once() {
    let outcome = cells(&["1/0", "{}['missing']"]).await;
    assert_eq!(outcome.ending, Ending::Raised);
    assert_eq!(enames(&outcome), ["KeyError"]);
    assert_eq!(cells(&["1/0", "print(2)"]).await.stream(Stream::Stdout), "2\n");
    let outcome = cells(&["input()"]).await;
    assert_eq!(enames(&outcome), ["StdinNotImplementedError"]);
}

#[tokio::test]
#[ignore = "needs a Jupyter server: run by the stage endpoint-module"]
async fn text_of_every_kind_arrives() {
    let outcome = cells(&["print('ä😀\\x00\\x1b[0m')\nprint('a\\udc80b')"]).await;
    assert!(outcome.stream(Stream::Stdout).starts_with("ä😀\0\u{1b}[0m\n"), "{outcome:?}");
    let outcome = cells(&["from IPython.display import publish_display_data\n\
        publish_display_data({'text/plain': 'x', 'application/json': {'n': [1, None]}}, {'k': 1})"])
    .await;
    let [Output::DisplayData { data, metadata }] = &outcome.outputs[..] else { panic!("{outcome:?}") };
    assert_eq!(data["application/json"], serde_json::json!({"n": [1, null]}));
    assert_eq!(metadata["k"], 1);
}

#[tokio::test]
#[ignore = "needs a Jupyter server: run by the stage endpoint-module"]
async fn a_cell_over_its_time_is_interrupted_and_names_stay() {
    let endpoint = endpoint_at(config());
    let ran = run(kernel(&endpoint).await, "x = 41").await;
    let limit = Duration::from_secs(1);
    let code = "import time\nprint('before', flush=True)\nwhile True: time.sleep(0.1)";
    let ran = run_for(ran.kernel.expect("it goes on"), code, limit).await;
    assert_eq!(ran.outcome.cell.ending, Ending::Interrupted { timeout: limit });
    assert_eq!(enames(&ran.outcome.cell), ["KeyboardInterrupt", "TimeoutError"]);
    assert_eq!(ran.outcome.cell.stream(Stream::Stdout), "before\n");
    let ran = run(ran.kernel.expect("it goes on"), "print(x + 1)").await;
    assert_eq!(ran.outcome.cell.stream(Stream::Stdout), "42\n");
    finish(&endpoint, ran).await;
}

#[tokio::test]
#[ignore = "needs a Jupyter server: run by the stage endpoint-module"]
async fn a_kernel_that_ignores_the_interrupt_is_deleted() {
    let endpoint = endpoint_at(config());
    let kernel = kernel(&endpoint).await;
    let id = kernel.id().expect("it is ready").to_owned();
    assert!(exists(&endpoint, &id).await, "control");
    let code =
        "import time\nwhile True:\n  try:\n    while True: time.sleep(0.1)\n  except BaseException: pass";
    let started = Instant::now();
    let limit = Duration::from_secs(1);
    let ran = run_for(kernel, code, limit).await;
    assert_eq!(ran.outcome.cell.ending, Ending::Unstoppable { timeout: limit });
    assert!(started.elapsed() < Duration::from_secs(5), "{:?}", started.elapsed());
    finish(&endpoint, ran).await;
    assert!(!exists(&endpoint, &id).await);
}

#[tokio::test]
#[ignore = "needs a Jupyter server: run by the stage endpoint-module"]
async fn a_process_that_ends_is_noticed_within_seconds() {
    let endpoint = endpoint_at(config());
    let started = Instant::now();
    let ran = run(kernel(&endpoint).await, "import os\nprint('last words', flush=True)\nos._exit(3)").await;
    assert_eq!(ran.outcome.cell.ending, Ending::Died(None));
    assert!(started.elapsed() < Duration::from_secs(15), "{:?}", started.elapsed());
    assert!(ran.kernel.is_none());
    finish(&endpoint, ran).await;
}

#[tokio::test]
#[ignore = "needs a Jupyter server: run by the stage endpoint-module"]
async fn a_process_that_ends_between_two_cells_has_lost_the_names() {
    let endpoint = endpoint_at(config());
    let code = "import os, threading\nx = 1\nthreading.Timer(0.3, os._exit, (1,)).start()";
    let ran = run(kernel(&endpoint).await, code).await;
    assert!(!ran.outcome.names_lost, "control");
    // The server looks every three seconds.
    sleep(Duration::from_secs(8)).await;
    let kernel = ran.kernel.expect("nobody knows yet").revisit().await.expect("it is there");
    let ran = run(kernel, "print('x' in globals())").await;
    assert_eq!(ran.outcome.cell.stream(Stream::Stdout), "False\n", "{:?}", ran.outcome);
    assert!(ran.outcome.names_lost);
    finish(&endpoint, ran).await;
}

#[tokio::test]
#[ignore = "needs a Jupyter server: run by the stage endpoint-module"]
async fn a_kernel_that_somebody_else_deleted_is_not_alive() {
    let endpoint = endpoint_at(config());
    let ran = run(kernel(&endpoint).await, "x = 1").await;
    let kernel = ran.kernel.expect("it goes on");
    let kernel = kernel.revisit().await.expect("control");
    let id =
        rest::KernelId::parse(kernel.id().expect("it is ready").to_owned()).expect("an id of the server's");
    endpoint.rest.delete(&id).await.expect("the server deletes it");
    sleep(Duration::from_secs(6)).await;
    assert_eq!(kernel.revisit().await.err(), Some(Gone::Ended));
    endpoint.settle(Duration::from_secs(10)).await;
}

#[tokio::test]
#[ignore = "needs a Jupyter server: run by the stage endpoint-module"]
async fn a_stop_ends_a_cell_and_its_kernel() {
    let endpoint = endpoint_at(config());
    let kernel = kernel(&endpoint).await;
    let id = kernel.id().expect("it is ready").to_owned();
    let (sender, mut stop) = watch::channel(None);
    let cell = Cell {
        code: "import time; time.sleep(60)",
        timeout: Duration::from_secs(90),
        execution_count: 1,
        watcher: None,
        argv: None,
    };
    let stopping = async {
        sleep(Duration::from_millis(500)).await;
        sender.send(Some(Stopped::ShuttingDown)).expect("somebody listens");
    };
    let (ran, ()) = tokio::join!(kernel.run(cell, &LIMITS, &mut stop), stopping);
    assert_eq!(ran.outcome.cell.ending, Ending::Stopped(Stopped::ShuttingDown));
    finish(&endpoint, ran).await;
    assert!(!exists(&endpoint, &id).await);
}

#[tokio::test]
#[ignore = "needs a Jupyter server: run by the stage endpoint-module"]
async fn a_working_directory_is_where_the_cells_run() {
    let endpoint = endpoint_at(config());
    let kernel = endpoint.start(None, Some("/usr/lib"), PATIENT).await.expect("a directory");
    let ran = run(kernel, "import os\nprint(os.getcwd())").await;
    assert_eq!(ran.outcome.cell.stream(Stream::Stdout), "/usr/lib\n");
    let error = endpoint.start(None, Some("/no/such"), PATIENT).await.expect_err("no directory");
    assert!(matches!(error, EndpointError::NotADirectory { .. }), "{error:?}");
    finish(&endpoint, ran).await;
}

#[tokio::test]
#[ignore = "needs a Jupyter server: run by the stage endpoint-module"]
async fn large_outputs_are_cut_by_us_or_by_the_server() {
    let outcome = cells(&["print('x' * 3_000_000)"]).await;
    assert_eq!(outcome.ending, Ending::Completed);
    assert!(outcome.stream(Stream::Stdout).chars().count() <= CHARS_MAX);
    let stderr = outcome.stream(Stream::Stderr);
    let cut = stderr.contains("output truncated") || stderr.contains("data rate exceeded");
    assert!(cut, "{stderr}");
    let image = "from IPython.display import display\ndisplay({'image/png': 'A' * 3_000_000}, raw=True)";
    let outcome = cells(&[image, image]).await;
    assert_eq!(outcome.stream(Stream::Stderr), "[output truncated at 2000000 characters]");
    assert!(displays(&outcome).is_empty());
}

#[tokio::test]
#[ignore = "needs a Jupyter server: run by the stage endpoint-module"]
async fn a_token_that_is_wrong_is_noticed_by_the_probe() {
    let right = config();
    assert!(endpoint_at(right.clone()).probe().await, "control");
    let wrong = EndpointConfig::parse(&right.shown(), Some("not-the-token")).expect("a URL");
    let endpoint = endpoint_at(wrong);
    assert!(!endpoint.probe().await);
    assert!(matches!(endpoint.start(None, None, PATIENT).await, Err(EndpointError::Unreachable)));
}

/// Passes connections on to the server until told to cut them all.
async fn proxy(to: EndpointConfig, cut: Arc<Notify>, refuses: Arc<AtomicBool>) -> u16 {
    let listener = TcpListener::bind("127.0.0.1:0").await.expect("a port of loopback");
    let port = listener.local_addr().expect("it is bound").port();
    tokio::spawn(async move {
        while let Ok((mut near, _)) = listener.accept().await {
            if refuses.load(Ordering::SeqCst) {
                continue;
            }
            let (to, cut) = (to.clone(), Arc::clone(&cut));
            tokio::spawn(async move {
                let mut far = TcpStream::connect((to.host(), to.port())).await.expect("the server");
                tokio::select! {
                    _ = tokio::io::copy_bidirectional(&mut near, &mut far) => {}
                    () = cut.notified() => {}
                }
                let _ = far.shutdown().await;
            });
        }
    });
    port
}

async fn cut_in_a_cell(away: Duration) -> (Endpoint, RemoteRan) {
    let to = config();
    let token = to.authorization().and_then(|it| it.strip_prefix("token ").map(str::to_owned));
    let (cut, refuses) = (Arc::new(Notify::new()), Arc::new(AtomicBool::new(false)));
    let port = proxy(to, Arc::clone(&cut), Arc::clone(&refuses)).await;
    let near = EndpointConfig::parse(&format!("http://127.0.0.1:{port}"), token.as_deref()).expect("a URL");
    let endpoint = endpoint_at(near);
    let kernel = kernel(&endpoint).await;
    let code = "import time\nprint('one', flush=True)\nfor n in range(4):\n  time.sleep(0.5)\n  print(n, flush=True)\n'end'";
    let cutting = async {
        sleep(Duration::from_millis(700)).await;
        refuses.store(true, Ordering::SeqCst);
        cut.notify_waiters();
        sleep(away).await;
        refuses.store(false, Ordering::SeqCst);
    };
    let (ran, ()) = tokio::join!(run(kernel, code), cutting);
    (endpoint, ran)
}

#[tokio::test]
#[ignore = "needs a Jupyter server: run by the stage endpoint-module"]
async fn a_connection_cut_in_a_cell_loses_nothing() {
    // Back before the cell ends, and after.
    for away in [Duration::ZERO, Duration::from_millis(2500)] {
        let (endpoint, ran) = cut_in_a_cell(away).await;
        assert_eq!(ran.outcome.cell.ending, Ending::Completed, "{away:?}: {:?}", ran.outcome);
        assert_eq!(ran.outcome.cell.stream(Stream::Stdout), "one\n0\n1\n2\n3\n", "{away:?}");
        assert_eq!(displays(&ran.outcome.cell)[0]["text/plain"], "'end'");
        let ran = run(ran.kernel.expect("it goes on"), "print(n)").await;
        assert_eq!(ran.outcome.cell.stream(Stream::Stdout), "3\n");
        finish(&endpoint, ran).await;
    }
}
