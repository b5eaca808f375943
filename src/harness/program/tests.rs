//! Programs of an interpreter that is none (`harness/fake.rs`): pipes are real, the peer plays a script.

use proptest::prelude::*;
use tokio::sync::mpsc;

use super::*;
use crate::engine::pieces;
use crate::harness::fake::Fake;

const LIMITS: ProgramLimits = ProgramLimits { stream_bytes_max: 100_000, memory_mib_max: 512 };
const LONG: Duration = Duration::from_secs(20);

fn program(code: &str, timeout: Duration) -> ProgramRun<'_> {
    ProgramRun { code, args: &[], typescript: false, tools: &[], timeout, watcher: None }
}

async fn run_with(code: &str, timeout: Duration, limits: &ProgramLimits) -> ProgramOutcome {
    let (_keep, mut stop) = watch::channel(None);
    outcome_of(program(code, timeout), limits, &mut stop, None).await
}

async fn outcome_of(
    run: ProgramRun<'_>,
    limits: &ProgramLimits,
    stop: &mut watch::Receiver<Option<Stopped>>,
    tools: Option<ToolPort>,
) -> ProgramOutcome {
    let (outcome, standing) = Fake::interpreter().run_program(run, limits, stop, tools).await;
    // Only what has told its own end stands still behind it.
    assert!(standing.is_none() || matches!(outcome.end, ProgramEnd::Exited(_)), "{outcome:?}");
    outcome
}

async fn run(code: &str) -> ProgramOutcome {
    run_with(code, LONG, &LIMITS).await
}

fn outcome(stdout: &str, stderr: &str, end: ProgramEnd) -> ProgramOutcome {
    ProgramOutcome { stdout: stdout.to_owned(), stderr: stderr.to_owned(), end }
}

#[tokio::test]
async fn a_program_is_its_streams_and_its_status() {
    let wanted = outcome("a\nc\n", "b\n", ProgramEnd::Exited(7));
    assert_eq!(run("out a\nerr b\nchild c\nstatus 7").await, wanted);
    assert_eq!(run("").await, outcome("", "", ProgramEnd::Exited(0)));
}

#[tokio::test]
async fn what_it_is_asked_is_in_the_frame_and_nothing_else() {
    let args = ["a".to_owned(), "b c".to_owned()];
    let (_keep, mut stop) = watch::channel(None);
    let run = ProgramRun { args: &args, typescript: true, ..program("argv", LONG) };
    let outcome = outcome_of(run, &LIMITS, &mut stop, None).await;
    let wanted = r#"{"args":["a","b c"],"code":"argv","typescript":true}"#;
    assert_eq!(outcome.stdout.trim_end(), wanted);
    let (port, _caller) = port();
    let tools = [ToolName { name: "get-x".to_owned(), function: "get_x".to_owned() }];
    let run = ProgramRun { tools: &tools, ..program("argv", LONG) };
    let outcome = outcome_of(run, &LIMITS, &mut stop, Some(port)).await;
    let wanted = r#"{"args":[],"code":"argv","tools":[{"function":"get_x","name":"get-x"}]}"#;
    assert_eq!(outcome.stdout.trim_end(), wanted);
}

#[tokio::test]
async fn a_slow_one_is_read_while_it_runs() {
    let script = "out line\nsleep 1\nerr e\n".repeat(80);
    let outcome = run(&script).await;
    assert_eq!((outcome.stdout, outcome.stderr), ("line\n".repeat(80), "e\n".repeat(80)));
}

#[tokio::test]
async fn ends_without_a_last_word_are_the_launchers_to_tell() {
    for (step, end) in [
        ("exit 3", ProgramEnd::Exited(3)),
        ("end 11", ProgramEnd::Signaled(11)),
        ("end memory", ProgramEnd::OutOfMemory),
        ("end space", ProgramEnd::SpaceFull),
        ("end asked", ProgramEnd::Stopped),
        ("end mismatch", ProgramEnd::Lost),
        ("lost", ProgramEnd::LauncherGone),
        ("vanish", ProgramEnd::Lost),
    ] {
        assert_eq!(run(&format!("out early\n{step}")).await, outcome("early\n", "", end), "{step}");
    }
}

#[tokio::test]
async fn one_that_closes_the_descriptor_of_events_goes_on_and_is_heard_to_its_end() {
    let long = "deaf\nout a\nsleep 50\nerr b\nsleep 2300\nout c\nexit 4";
    assert_eq!(run(long).await, outcome("a\nc\n", "b\n", ProgramEnd::Exited(4)));
    let code = "deaf\nout a\nsleep 60000";
    let ended = run_with(code, Duration::from_millis(100), &LIMITS).await;
    assert_eq!(ended, outcome("a\n", "", ProgramEnd::TimeLimit));
}

#[tokio::test]
async fn the_time_limit_ends_it_at_once_and_keeps_what_it_wrote() {
    let started = Instant::now();
    let ended = run_with("out early\nsleep 60000", Duration::from_millis(150), &LIMITS).await;
    assert_eq!(ended, outcome("early\n", "", ProgramEnd::TimeLimit));
    assert!(started.elapsed() < Duration::from_millis(1_000), "{:?}", started.elapsed());
    let ended = run_with("out early\nsleep 60000", Duration::from_millis(1), &LIMITS).await;
    assert_eq!(ended.end, ProgramEnd::TimeLimit);
}

#[tokio::test]
async fn a_stream_over_its_limit_ends_it_at_once_and_what_fits_is_kept() {
    let limits = ProgramLimits { stream_bytes_max: 10, ..LIMITS };
    let cases = [
        ("bytes 61626364656667686970", "abcdefghip", "", ProgramEnd::Exited(0)),
        ("bytes 6162636465666768697071", "abcdefghip", "", ProgramEnd::StdoutLimit),
        ("out a\nerr 0123456789\nsleep 60000", "a\n", "0123456789", ProgramEnd::StderrLimit),
        ("flood 3000000\nerr never", "xxxxxxxxxx", "", ProgramEnd::StdoutLimit),
        ("flood 3000\nexit 3", "xxxxxxxxxx", "", ProgramEnd::StdoutLimit),
        // A character that would be cut is left out.
        ("bytes 6162636465666768c3a4c3a4\nsleep 60000", "abcdefghä", "", ProgramEnd::StdoutLimit),
        ("bytes 616263646566676869c3a4", "abcdefghi", "", ProgramEnd::StdoutLimit),
    ];
    for (code, stdout, stderr, end) in cases {
        assert_eq!(run_with(code, LONG, &limits).await, outcome(stdout, stderr, end), "{code}");
    }
    let limits = ProgramLimits { stream_bytes_max: 1024 * 1024, ..LIMITS };
    let ended = run_with("flood 1048576", LONG, &limits).await;
    assert_eq!((ended.stdout.len(), ended.end), (1_048_576, ProgramEnd::Exited(0)));
    let ended = run_with("flood 1048577", LONG, &limits).await;
    assert_eq!((ended.stdout.len(), ended.end), (1_048_576, ProgramEnd::StdoutLimit));
}

#[tokio::test]
async fn it_is_stopped_when_asked() {
    let (stopper, mut stop) = watch::channel(None);
    let later = async {
        tokio::time::sleep(Duration::from_millis(30)).await;
        stopper.send_replace(Some(Stopped::ShuttingDown));
    };
    let run = outcome_of(program("out a\nsleep 60000", LONG), &LIMITS, &mut stop, None);
    let (ended, ()) = tokio::join!(run, later);
    assert_eq!(ended, outcome("a\n", "", ProgramEnd::Stopped));
}

#[tokio::test]
async fn text_is_repaired_and_characters_are_whole_for_who_watches_too() {
    let code = "bytes f09f\nsleep 20\nbytes 9880ff\nsleep 20\nerr é\nbytes e2\nsleep 20\nbytes 9c\nstatus 1";
    let (watcher, mut heard) = pieces();
    let (_keep, mut stop) = watch::channel(None);
    let run = ProgramRun { watcher: Some(&watcher), ..program(code, LONG) };
    let ended = outcome_of(run, &LIMITS, &mut stop, None).await;
    assert_eq!(ended, outcome("\u{1f600}\u{fffd}\u{fffd}", "é\n", ProgramEnd::Exited(1)));
    let mut told = [String::new(), String::new()];
    while let Some(Piece::Output { output: Output::Stream { name, text }, .. }) = heard.try_recv() {
        assert!(!text.is_empty());
        told[usize::from(name == Stream::Stderr)].push_str(&text);
    }
    assert_eq!(told, [ended.stdout, ended.stderr]);
}

#[tokio::test]
async fn a_watcher_hears_before_the_end() {
    let (watcher, mut heard) = pieces();
    let (stopper, mut stop) = watch::channel(None);
    let run = ProgramRun { watcher: Some(&watcher), ..program("out now\nsleep 60000", LONG) };
    let hears = async {
        let piece = heard.recv().await.expect("it is told");
        stopper.send_replace(Some(Stopped::ShuttingDown));
        piece
    };
    let (_, piece) = tokio::join!(outcome_of(run, &LIMITS, &mut stop, None), hears);
    let output = Output::Stream { name: Stream::Stdout, text: "now\n".to_owned() };
    assert_eq!(piece, Piece::Output { output, display_id: None });
}

#[tokio::test]
async fn a_text_larger_than_the_pipe_arrives_and_one_larger_than_a_frame_is_told() {
    let long = "x".repeat(300_000);
    let ended = run(&format!("out a\nset {long}\nstatus 2")).await;
    assert_eq!(ended, outcome("a\n", "", ProgramEnd::Exited(2)));
    let ended = run(&"\u{1}".repeat(crate::harness::FRAME_BYTES_MAX / 5)).await;
    assert_eq!(ended.end, ProgramEnd::Exited(1));
    assert!(ended.stderr.starts_with("the code is too long for one frame"), "{}", ended.stderr);
}

#[tokio::test]
async fn hostile_frames_end_nothing_but_their_own_program() {
    assert_eq!(
        run("frame {\"nonce\":\"other\",\"event\":\"done\",\"exit\":0}\nframe [\nstatus 5").await.end,
        ProgramEnd::Exited(5)
    );
    assert_eq!(run("event {\"event\":\"done\",\"exit\":\"0\"}\nstatus 5").await.end, ProgramEnd::Exited(5));
    assert_eq!(run("event {\"event\":\"done\",\"exit\":70000}\nstatus 5").await.end, ProgramEnd::Exited(5));
    assert_eq!(run("event {\"event\":\"done\",\"exit\":-1}\nstatus 5").await.end, ProgramEnd::Exited(5));
    assert_eq!(run("event {\"event\":\"done\"}").await.end, ProgramEnd::Exited(1));
    assert_eq!(
        run("event {\"event\":\"call\",\"calls\":[{\"id\":\"a\",\"name\":\"b\",\"input\":{}}]}\nstatus 5")
            .await
            .end,
        ProgramEnd::Exited(5),
        "without tools there are no calls"
    );
    assert_eq!(run("out a\nendless").await, outcome("a\n", "", ProgramEnd::Lost));
    // Nor does a forged call stop the clock of a program without tools.
    let call =
        "event {\"event\":\"call\",\"calls\":[{\"id\":\"a\",\"name\":\"b\",\"input\":{}}]}\nsleep 3000";
    let ended = run_with(call, Duration::from_millis(150), &LIMITS).await;
    assert_eq!(ended.end, ProgramEnd::TimeLimit);
}

// --- tools --------------------------------------------------------------------------------------------------------------

struct Caller {
    calls: mpsc::UnboundedReceiver<Vec<ToolCall>>,
    answers: mpsc::Sender<Vec<ToolAnswer>>,
}

fn port() -> (ToolPort, Caller) {
    let (calls, hears) = mpsc::unbounded_channel();
    let (answers, answered) = mpsc::channel(4);
    (ToolPort { calls, answers: answered }, Caller { calls: hears, answers })
}

fn ok(id: &str, json: &str) -> ToolAnswer {
    ToolAnswer { id: id.to_owned(), outcome: Ok(Json::parse(json).expect("JSON")) }
}

async fn with_tools<T>(
    code: &str,
    timeout: Duration,
    caller: impl AsyncFnOnce(Caller) -> T,
) -> (ProgramOutcome, T) {
    let (port, other) = port();
    let (_keep, mut stop) = watch::channel(None);
    let run = outcome_of(program(code, timeout), &LIMITS, &mut stop, Some(port));
    tokio::join!(run, caller(other))
}

#[tokio::test]
async fn calls_go_out_and_answers_come_in() {
    let code = "out before\ncall c1 get-x {\"b\":1,\"a\":[null]}\nhear\ncall c2 y {}\nhear\nstatus 3";
    let (ended, calls) = with_tools(code, LONG, async |mut caller| {
        let first = caller.calls.recv().await.expect("a call");
        caller.answers.send(vec![ok("c1", "{\"z\": [1, 2],\n \"a\": \"x  y\"}")]).await.expect("heard");
        let second = caller.calls.recv().await.expect("another");
        let error = ToolAnswer { id: "c2".to_owned(), outcome: Err("no \"such\"\ncity".to_owned()) };
        caller.answers.send(vec![error]).await.expect("heard");
        assert!(caller.calls.recv().await.is_none(), "its end is the end of its calls");
        (first, second)
    })
    .await;
    let call = |id: &str, name: &str, input: &str| {
        vec![ToolCall { id: id.to_owned(), name: name.to_owned(), input: Json::parse(input).expect("JSON") }]
    };
    assert_eq!(calls, (call("c1", "get-x", "{\"a\":[null],\"b\":1}"), call("c2", "y", "{}")));
    let told = "before\n[{\"id\":\"c1\",\"result\":{\"a\":\"x  y\",\"z\":[1,2]}}]\n[{\"error\":\"no \\\"such\\\"\\ncity\",\"id\":\"c2\"}]\n";
    assert_eq!(ended, outcome(told, "", ProgramEnd::Exited(3)));
}

#[tokio::test]
async fn what_was_printed_before_a_call_is_told_before_it() {
    let (watcher, mut heard) = pieces();
    let (port, mut caller) = port();
    let (_keep, mut stop) = watch::channel(None);
    let run = ProgramRun { watcher: Some(&watcher), ..program("out before\ncall c1 x {}\nhear", LONG) };
    let calls = async {
        caller.calls.recv().await.expect("a call");
        let piece = heard.try_recv().expect("told already");
        caller.answers.send(vec![ok("c1", "1")]).await.expect("heard");
        piece
    };
    let (ended, piece) = tokio::join!(outcome_of(run, &LIMITS, &mut stop, Some(port)), calls);
    let output = Output::Stream { name: Stream::Stdout, text: "before\n".to_owned() };
    assert_eq!(piece, Piece::Output { output, display_id: None });
    assert_eq!(ended.end, ProgramEnd::Exited(0));
}

#[tokio::test]
async fn the_clock_stands_while_a_call_waits_and_starts_anew_with_its_answer() {
    let limit = Duration::from_millis(250);
    let code = "sleep 100\ncall c1 x {}\nhear\nsleep 150\nstatus 4";
    let (ended, ()) = with_tools(code, limit, async |mut caller| {
        caller.calls.recv().await.expect("a call");
        tokio::time::sleep(Duration::from_millis(500)).await;
        caller.answers.send(vec![ok("c1", "1")]).await.expect("heard");
        assert!(caller.calls.recv().await.is_none());
    })
    .await;
    assert_eq!(ended.end, ProgramEnd::Exited(4));
    let (ended, ()) = with_tools("call c1 x {}\nhear\nsleep 60000", limit, async |mut caller| {
        caller.calls.recv().await.expect("a call");
        caller.answers.send(vec![ok("c1", "1")]).await.expect("heard");
        assert!(caller.calls.recv().await.is_none());
    })
    .await;
    assert_eq!(ended.end, ProgramEnd::TimeLimit);
}

#[tokio::test]
async fn a_caller_that_goes_away_stops_it() {
    let (ended, ()) = with_tools("out a\ncall c1 x {}\nhear", LONG, async |mut caller| {
        caller.calls.recv().await.expect("a call");
    })
    .await;
    assert_eq!(ended, outcome("a\n", "", ProgramEnd::Stopped));
    let (ended, ()) = with_tools("sleep 50\ncall c1 x {}\nhear", LONG, async |caller| drop(caller)).await;
    assert_eq!(ended.end, ProgramEnd::Stopped);
    let one_ended = async |caller: Caller| {
        drop(caller.answers);
        tokio::time::sleep(Duration::from_millis(300)).await;
        drop(caller.calls);
    };
    let (ended, ()) = with_tools("sleep 50\ncall c1 x {}\nsleep 3000", LONG, one_ended).await;
    assert_eq!(ended.end, ProgramEnd::Stopped);
    let (ended, ()) = with_tools("sleep 50\nstatus 6", LONG, async |caller| drop(caller)).await;
    assert_eq!(ended.end, ProgramEnd::Exited(6), "one that calls nothing needs nobody");
}

#[tokio::test]
async fn one_that_sends_more_than_calls_may_take_is_told_so() {
    let waits = async |mut caller: Caller| assert!(caller.calls.recv().await.is_none());
    let (ended, ()) = with_tools("out a\nendless", LONG, waits).await;
    assert_eq!(ended, outcome("a\n", "", ProgramEnd::CallLimit));
}

#[tokio::test]
async fn calls_that_are_none_reach_nobody() {
    let code = [
        r#"event {"event":"call","calls":[{"id":"","name":"x","input":{}}]}"#.to_owned(),
        r#"event {"event":"call","calls":[{"id":"a b","name":"x","input":{}}]}"#.to_owned(),
        r#"event {"event":"call","calls":[{"id":7,"name":"x","input":{}}]}"#.to_owned(),
        r#"event {"event":"call","calls":[{"id":"c0","input":{}}]}"#.to_owned(),
        r#"event {"event":"call","calls":[]}"#.to_owned(),
        r#"event {"event":"call"}"#.to_owned(),
        r#"event {"event":"call","calls":{}}"#.to_owned(),
        format!(
            r#"event {{"event":"call","calls":[{{"id":"{}","name":"x","input":{{}}}}]}}"#,
            "i".repeat(65)
        ),
        format!(
            r#"event {{"event":"call","calls":[{{"id":"n","name":"{}","input":{{}}}}]}}"#,
            "n".repeat(1025)
        ),
        // These get an answer of ours.
        "call d1 x [1]\nhear\ncall d2 x \"text\"\nhear".to_owned(),
        format!("call d3 x {{\"a\":{}{}}}\nhear", "[".repeat(100), "]".repeat(100)),
        // The second with an id is none.
        "call c1 x {}\ncall c1 y {}\ncall d1 y {}\nhear\nstatus 9".to_owned(),
    ]
    .join("\n");
    let (ended, calls) = with_tools(&code, LONG, async |mut caller| {
        let mut calls = Vec::new();
        while let Some(call) = caller.calls.recv().await {
            calls.extend(call.into_iter().map(|call| (call.id, call.name)));
            let strange = [ok("c9", "1"), ok("c1", "2"), ok("c1", "3")];
            let _ = caller.answers.send(strange.into()).await;
        }
        calls
    })
    .await;
    assert_eq!(calls, [("c1".to_owned(), "x".to_owned())]);
    let refused = "the input of a tool must be one JSON object";
    let mut told: Vec<String> = ["d1", "d2", "d3"]
        .iter()
        .map(|id| format!("[{{\"error\":\"{refused}\",\"id\":\"{id}\"}}]\n"))
        .collect();
    told.push("[{\"id\":\"c1\",\"result\":2}]\n".to_owned());
    assert_eq!(ended, outcome(&told.concat(), "", ProgramEnd::Exited(9)));
}

#[tokio::test]
async fn a_flood_of_calls_ends_it() {
    let (port, _caller) = port();
    let (_keep, mut stop) = watch::channel(None);
    let flood: String = (0..=CALLS_MAX).map(|number| format!("call c{number} x {{}}\n")).collect();
    let code = format!("{flood}sleep 60000");
    let run = outcome_of(program(&code, LONG), &LIMITS, &mut stop, Some(port));
    assert_eq!(run.await.end, ProgramEnd::CallLimit, "more calls than one program may make");
}

#[tokio::test]
async fn an_answer_larger_than_the_pipe_arrives_while_the_program_writes() {
    let long = format!("\"{}\"", "y".repeat(200_000));
    let limits = ProgramLimits { stream_bytes_max: 1_000_000, ..LIMITS };
    let (port, mut caller) = port();
    let (_keep, mut stop) = watch::channel(None);
    let code = "call c1 x {}\nflood 400000\nhear\nstatus 1";
    let run = outcome_of(program(code, LONG), &limits, &mut stop, Some(port));
    let answers = async {
        caller.calls.recv().await.expect("a call");
        caller.answers.send(vec![ok("c1", &long)]).await.expect("heard");
        caller.calls.recv().await
    };
    let (ended, _) = tokio::join!(run, answers);
    assert_eq!((ended.end, ended.stdout.len()), (ProgramEnd::Exited(1), 400_000 + 200_000 + 26));
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(64))]

    #[test]
    fn no_event_of_a_guest_breaks_it(
        event in r#"[\[\]{}":,a-z0-9 \\u]{0,60}"#,
        kind in prop_oneof![Just("call"), Just("done"), Just("display"), Just("x")],
        exit in any::<i64>(),
    ) {
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().expect("a runtime");
        let call = serde_json::json!({"id": event, "name": event, "input": {event.clone(): exit}});
        let frame = serde_json::json!({"event": kind, "exit": exit, "calls": [call, event], "result": event});
        let code = format!("frame {event}\nevent {frame}\nframe {{\"nonce\":{event}\nstatus 5");
        let ended = runtime.block_on(with_tools(&code, LONG, async |mut caller| {
            while caller.calls.recv().await.is_some() {}
        })).0;
        // What it claims of itself, or its real status: nothing else.
        let claimed = u8::try_from(exit).ok().filter(|_| kind == "done");
        prop_assert_eq!(ended.end, ProgramEnd::Exited(claimed.unwrap_or(5).into()));
    }
}
