//! The table of executions with programs that are futures.

use std::sync::atomic::{AtomicUsize, Ordering};

use tokio::time::{Instant, timeout};

use super::*;
use crate::harness::program::Json;

const MOMENT: Duration = Duration::from_millis(60);
const LIMITS: WaitingLimits = WaitingLimits { per_tenant_max: 2, all_max: 3 };

fn caller(tenant: &str, user: Option<&str>) -> Caller {
    Caller { tenant: TenantId(tenant.to_owned()), user: user.map(str::to_owned) }
}

fn call(id: &str, name: &str) -> ToolCall {
    ToolCall { id: id.to_owned(), name: name.to_owned(), input: Json::parse("{}").expect("JSON") }
}

fn ok(id: &str) -> ToolAnswer {
    ToolAnswer { id: id.to_owned(), outcome: Ok(Json::parse("1").expect("JSON")) }
}

/// A program's side.
struct Guest {
    watcher: Watcher,
    port: ToolPort,
}

impl Guest {
    fn print(&self, text: &str) {
        let output = Output::Stream { name: Stream::Stdout, text: text.to_owned() };
        self.watcher.send(Piece::Output { output, display_id: None }).expect("it is heard");
    }

    fn call(&self, calls: &[(&str, &str)]) {
        let calls = calls.iter().map(|(id, name)| call(id, name)).collect();
        self.port.calls.send(calls).expect("it is heard");
    }

    /// Ids of the results that come next.
    async fn results(&mut self) -> Vec<String> {
        let answers = self.port.answers.recv().await.expect("they come");
        answers.into_iter().map(|answer| answer.id).collect()
    }
}

fn done(stdout: &str) -> RunDone {
    let mut done = RunDone::lost("S".to_owned());
    (done.stdout, done.stderr, done.end) = (stdout.to_owned(), String::new(), RunEnd::Exited(0));
    done
}

struct Side {
    table: Arc<Programmatic>,
    owner: Caller,
    gathers: bool,
}

impl Side {
    fn new() -> Side {
        Side { table: Programmatic::new(LIMITS), owner: caller("a", None), gathers: false }
    }

    fn of(&self, owner: Caller) -> Side {
        Side { table: Arc::clone(&self.table), owner, gathers: false }
    }

    async fn start_named<F>(
        &self,
        id: Option<&str>,
        program: impl FnOnce(Guest) -> F,
    ) -> Result<Round, NotContinued>
    where
        F: Future<Output = RunDone> + Send + 'static,
    {
        let registered = ["x", "y"].map(str::to_owned).into();
        let start =
            Start { owner: self.owner.clone(), session: "S".to_owned(), registered, gathers: self.gathers };
        let name = self.table.name(&self.owner, id);
        self.table.start(start, name, |watcher, port| program(Guest { watcher, port })).await
    }

    async fn start<F>(&self, program: impl FnOnce(Guest) -> F) -> Round
    where
        F: Future<Output = RunDone> + Send + 'static,
    {
        self.start_named(None, program).await.expect("it starts")
    }

    async fn go_on(&self, token: &Token, ids: &[&str]) -> Result<Round, NotContinued> {
        let results = ids.iter().map(|id| ok(id)).collect();
        self.table.go_on(&self.owner, token, results, None).await
    }
}

/// Token, ids of the calls, stdout so far.
fn calls(round: Round) -> (Token, Vec<String>, String) {
    match round {
        Round::Calls { token, session, calls, stdout } => {
            assert_eq!(session, "S");
            (token, calls.into_iter().map(|call| call.id).collect(), stdout)
        }
        other => panic!("no calls: {other:?}"),
    }
}

fn stdout(round: Result<Round, NotContinued>) -> String {
    match round {
        Ok(Round::Done(done)) => done.stdout,
        other => panic!("not done: {other:?}"),
    }
}

async fn twice(mut guest: Guest) -> RunDone {
    guest.print("one");
    guest.call(&[("c1", "x"), ("c2", "y")]);
    let mut got = guest.results().await;
    while got.len() < 2 {
        got.extend(guest.results().await);
    }
    guest.print("two");
    guest.call(&[("c3", "x")]);
    got.extend(guest.results().await);
    done(&got.join(","))
}

#[tokio::test]
async fn rounds_of_calls_up_to_the_end() {
    let side = Side::new();
    let (token, ids, printed) = calls(side.start(twice).await);
    assert_eq!((ids, printed.as_str()), (vec!["c1".to_owned(), "c2".to_owned()], "one"));
    assert_eq!(side.table.counts(), (1, 0));
    let (again, ids, printed) = calls(side.go_on(&token, &["c2", "c1"]).await.expect("it goes on"));
    assert_eq!((again, ids, printed.as_str()), (token.clone(), vec!["c3".to_owned()], "onetwo"));
    assert_eq!(stdout(side.go_on(&token, &["c3"]).await), "c2,c1,c3");
    assert_eq!(side.table.counts(), (0, 0));
    assert_eq!(side.go_on(&token, &["c3"]).await, Err(NotContinued::Gone));
}

#[tokio::test]
async fn one_without_calls_is_over_at_once() {
    let side = Side::new();
    assert_eq!(stdout(side.start_named(None, |_| async { done("plain") }).await), "plain");
    let lost = side.start_named(None, |_| async { panic!("a fault of ours") }).await;
    assert!(matches!(lost, Ok(Round::Done(done)) if done.end == RunEnd::Lost));
    assert_eq!(side.table.counts(), (0, 0));
}

#[tokio::test]
async fn results_of_no_call_or_twice_are_refused_and_change_nothing() {
    let side = Side::new();
    let (token, ..) = calls(side.start(twice).await);
    assert_eq!(side.go_on(&token, &["c9"]).await, Err(NotContinued::UnknownCall("c9".to_owned())));
    assert_eq!(side.go_on(&token, &["c1", "c3"]).await, Err(NotContinued::UnknownCall("c3".to_owned())));
    assert_eq!(side.go_on(&token, &["c1", "c1"]).await, Err(NotContinued::Twice("c1".to_owned())));
    assert_eq!(calls(side.go_on(&token, &["c1", "c2"]).await.expect("it goes on")).1, ["c3"]);
}

#[tokio::test]
async fn some_results_bring_the_others_again() {
    let side = Side::new();
    let (token, ..) = calls(side.start(twice).await);
    let (_, ids, _) = calls(side.go_on(&token, &["c2"]).await.expect("it goes on"));
    assert_eq!(ids, ["c1"]);
    let (_, ids, _) = calls(side.go_on(&token, &["c2"]).await.expect("nothing new"));
    assert_eq!(ids, ["c1"]);
    assert_eq!(calls(side.go_on(&token, &["c1"]).await.expect("it goes on")).1, ["c3"]);
}

#[tokio::test]
async fn calls_made_while_others_wait_are_the_next_round() {
    let side = Side::new();
    let program = |mut guest: Guest| async move {
        guest.call(&[("c1", "x")]);
        // It is handed out by then.
        sleep(Duration::from_millis(100)).await;
        guest.call(&[("c2", "x")]);
        guest.call(&[("c3", "x")]);
        let mut got = guest.results().await;
        got.extend(guest.results().await);
        done(&got.join(","))
    };
    let (token, ids, _) = calls(side.start(program).await);
    assert_eq!(ids, ["c1"]);
    sleep(Duration::from_millis(200)).await;
    let (_, ids, _) = calls(side.go_on(&token, &["c1"]).await.expect("it goes on"));
    assert_eq!(ids, ["c2", "c3"], "together");
    assert_eq!(stdout(side.go_on(&token, &["c2", "c3"]).await), "c1,c2,c3");
}

#[tokio::test]
async fn calls_that_come_one_by_one_go_together_where_they_are_gathered() {
    let side = Side { gathers: true, ..Side::new() };
    let program = |mut guest: Guest| async move {
        for id in ["c1", "c2", "c3"] {
            guest.call(&[(id, "x")]);
            sleep(Duration::from_millis(4)).await;
        }
        done(&guest.results().await.join(","))
    };
    let (token, ids, _) = calls(side.start(program).await);
    assert_eq!(ids, ["c1", "c2", "c3"]);
    assert_eq!(stdout(side.go_on(&token, &["c1", "c2", "c3"]).await), "c1,c2,c3");
}

#[tokio::test]
async fn a_tool_that_is_none_ends_it() {
    let side = Side::new();
    let program = |guest: Guest| async move {
        guest.print("so far");
        guest.call(&[("c1", "x"), ("c2", "rm -rf")]);
        sleep(Duration::from_secs(3600)).await;
        done("never")
    };
    let ended = side.start(program).await;
    let Round::Unregistered { session, name, stdout, stderr } = ended else { panic!("{ended:?}") };
    assert_eq!((session.as_str(), stdout.as_str(), stderr.as_str()), ("S", "so far", ""));
    assert_eq!(unregistered_text(&name), "Sandbox requested an unregistered tool: rm -rf");
    assert_eq!(side.table.counts(), (0, 0));
}

#[tokio::test]
async fn an_id_is_used_once_whatever_a_guest_says() {
    let side = Side::new();
    let program = |mut guest: Guest| async move {
        guest.call(&[("c1", "x"), ("c1", "y")]);
        guest.results().await;
        guest.call(&[("c1", "x")]);
        guest.call(&[("c2", "x")]);
        done(&guest.results().await.join(","))
    };
    let (token, ids, _) = calls(side.start(program).await);
    assert_eq!(ids, ["c1"]);
    assert_eq!(calls(side.go_on(&token, &["c1"]).await.expect("it goes on")).1, ["c2"]);
    assert_eq!(stdout(side.go_on(&token, &["c2"]).await), "c2");
}

#[tokio::test]
async fn somebody_else_s_token_is_refused() {
    let side = Side::new();
    let owner = caller("a", Some("u"));
    let (token, ..) = calls(side.of(owner.clone()).start(twice).await);
    for other in [caller("b", Some("u")), caller("a", Some("v")), caller("a", None)] {
        assert_eq!(side.of(other).go_on(&token, &["c1"]).await, Err(NotContinued::Foreign));
    }
    assert!(side.of(owner).go_on(&token, &["c1"]).await.is_ok());
    assert_eq!(side.go_on(&Token::fresh(), &["c1"]).await, Err(NotContinued::Gone));
}

#[test]
fn a_token_has_its_shape() {
    let token = Token::fresh();
    assert_eq!(Token::parse(token.as_str()), Some(token));
    for text in [
        "",
        "garbage",
        "ptc_",
        "ptc_short",
        &format!("ptc_{}", "é".repeat(16)),
        &format!("PTC_{}", "a".repeat(32)),
    ] {
        assert_eq!(Token::parse(text), None, "{text}");
    }
}

#[tokio::test]
async fn one_continuation_at_a_time() {
    let side = Side::new();
    let program = |mut guest: Guest| async move {
        guest.call(&[("c1", "x")]);
        guest.results().await;
        sleep(MOMENT * 4).await;
        done("end")
    };
    let (token, ..) = calls(side.start(program).await);
    let second = async {
        sleep(MOMENT).await;
        (side.go_on(&token, &["c1"]).await, side.table.counts())
    };
    let (first, second) = tokio::join!(side.go_on(&token, &["c1"]), second);
    assert_eq!(second, (Err(NotContinued::Driven), (0, 1)));
    assert_eq!(stdout(first), "end");
}

/// Counts programs that have ended in whatever way.
struct Ended(Arc<AtomicUsize>);

impl Drop for Ended {
    fn drop(&mut self) {
        self.0.fetch_add(1, Ordering::SeqCst);
    }
}

#[tokio::test]
async fn one_that_nobody_continues_ends_after_a_while() {
    let (side, ended) = (Side::new(), Arc::new(AtomicUsize::new(0)));
    let witness = Ended(Arc::clone(&ended));
    let program = |mut guest: Guest| async move {
        let _witness = witness;
        for id in ["c1", "c2"] {
            guest.call(&[(id, "x")]);
            guest.results().await;
        }
        done("end")
    };
    let (token, ..) = calls(side.start(program).await);
    sleep(WAITING_MAX * 2 / 3).await;
    calls(side.go_on(&token, &["c1"]).await.expect("just in time"));
    sleep(WAITING_MAX * 2 / 3).await;
    assert_eq!(
        (side.table.counts(), ended.load(Ordering::SeqCst)),
        ((1, 0), 0),
        "each wait has its own time"
    );
    sleep(WAITING_MAX * 2 / 3).await;
    assert_eq!((side.table.counts(), ended.load(Ordering::SeqCst)), ((0, 0), 1));
    assert_eq!(side.go_on(&token, &["c2"]).await, Err(NotContinued::Gone));
}

#[tokio::test]
async fn a_request_that_goes_away_ends_its_start_and_leaves_a_continuation_to_be_asked_again() {
    let (side, ended) = (Side::new(), Arc::new(AtomicUsize::new(0)));
    let witness = Ended(Arc::clone(&ended));
    let long = |_guest: Guest| async move {
        let _witness = witness;
        sleep(Duration::from_secs(60)).await;
        done("never")
    };
    assert!(timeout(MOMENT, side.start(long)).await.is_err());
    sleep(MOMENT).await;
    assert_eq!((side.table.counts(), ended.load(Ordering::SeqCst)), ((0, 0), 1));

    let program = |mut guest: Guest| async move {
        guest.call(&[("c1", "x")]);
        guest.results().await;
        sleep(MOMENT * 4).await;
        guest.call(&[("c2", "x")]);
        guest.results().await;
        sleep(MOMENT * 4).await;
        done("end")
    };
    let (token, ..) = calls(side.start(program).await);
    assert!(timeout(MOMENT, side.go_on(&token, &["c1"])).await.is_err());
    assert_eq!(side.table.counts(), (1, 0));
    assert_eq!(calls(side.go_on(&token, &["c1"]).await.expect("asked again")).1, ["c2"]);
    assert!(timeout(MOMENT, side.go_on(&token, &["c2"])).await.is_err());
    sleep(MOMENT * 8).await;
    assert_eq!(stdout(side.go_on(&token, &["c2"]).await), "end", "it was over meanwhile");
}

#[tokio::test]
async fn a_tenant_has_so_many_that_wait_and_all_have_so_many() {
    let side = Side::new();
    let room = |tenant: &str| side.table.check_room(&TenantId(tenant.to_owned()));
    let (token, ..) = calls(side.start(twice).await);
    calls(side.start(twice).await);
    assert_eq!(room("a"), Err(NotContinued::TooMany { max: 2 }));
    assert_eq!(room("b"), Ok(()));
    calls(side.of(caller("b", None)).start(twice).await);
    assert_eq!(room("b"), Err(NotContinued::TooMany { max: 3 }), "all together");
    // Those that come together are counted as well.
    let refused = side.of(caller("b", None)).start_named(None, twice).await;
    assert_eq!(refused, Err(NotContinued::TooMany { max: 3 }));
    calls(side.go_on(&token, &["c1", "c2"]).await.expect("it goes on"));
    side.go_on(&token, &["c3"]).await.expect("it ends");
    assert_eq!((room("a"), room("b")), (Ok(()), Ok(())));
}

#[tokio::test]
async fn cancelling_ends_what_runs_and_what_waits_and_only_ones_own() {
    let (side, other) = (Side::new(), caller("b", None));
    let long = |guest: Guest| async move {
        guest.print("so far");
        sleep(Duration::from_secs(60)).await;
        done("never")
    };
    let cancelling = async {
        sleep(MOMENT).await;
        (
            side.table.cancel(&other, "r1"),
            side.table.cancel(&side.owner, "r2"),
            side.table.cancel(&side.owner, "r1"),
        )
    };
    let started = Instant::now();
    let (ended, cancelled) = tokio::join!(side.start_named(Some("r1"), long), cancelling);
    assert_eq!(cancelled, (false, false, true));
    assert!(started.elapsed() < Duration::from_secs(2));
    let ended = ended.expect("it was started");
    let Round::Cancelled { stdout, .. } = ended else { panic!("{ended:?}") };
    assert_eq!(stdout, "so far");

    // Its name is free again; one that waits is ended too, by the name of its start or of its continuation.
    for (second, name) in [(None, "r1"), (Some("r7"), "r7"), (Some("r7"), "r1")] {
        let (token, ..) = calls(side.start_named(Some("r1"), twice).await.expect("it starts"));
        let results = vec![ok("c1"), ok("c2")];
        calls(side.table.go_on(&side.owner, &token, results, second).await.expect("it goes on"));
        assert_eq!(side.table.counts(), (1, 0));
        assert!(side.table.cancel(&side.owner, name));
        assert_eq!(side.table.counts(), (0, 0));
        assert_eq!(side.go_on(&token, &["c3"]).await, Err(NotContinued::Gone));
        assert!(!side.table.cancel(&side.owner, name), "it is over");
    }
}

#[tokio::test]
async fn a_name_that_is_taken_names_the_first() {
    let side = Side::new();
    let (token, ..) = calls(side.start_named(Some("r"), twice).await.expect("it starts"));
    let (second, ..) = calls(side.start_named(Some("r"), twice).await.expect("it starts"));
    assert!(side.table.cancel(&side.owner, "r"));
    assert_eq!(side.go_on(&token, &["c1"]).await, Err(NotContinued::Gone));
    assert!(side.go_on(&second, &["c1"]).await.is_ok());
}

#[tokio::test]
async fn closing_ends_what_waits_and_what_comes_to_wait() {
    let side = Side::new();
    let (token, ..) = calls(side.start(twice).await);
    side.table.close();
    assert_eq!(side.go_on(&token, &["c1"]).await, Err(NotContinued::Gone));
    calls(side.start(twice).await);
    assert_eq!(side.table.counts(), (0, 0));
}

#[test]
fn ends_have_the_words_that_are_passed_on() {
    for (end, text) in [
        (RunEnd::Exited(7), "Sandbox exited with code 7"),
        (RunEnd::Signaled(11), "Sandbox exited with code 139"),
        (RunEnd::TimeLimit, "Time limit exceeded"),
        (RunEnd::StdoutLimit, "stdout length exceeded"),
        (RunEnd::StderrLimit, "stderr length exceeded"),
        (RunEnd::OutOfMemory, "Out of memory"),
        (RunEnd::SpaceFull, "Execution failed or timed out"),
        (RunEnd::Stopped, "Execution failed or timed out"),
        (RunEnd::Lost, "Execution failed or timed out"),
    ] {
        assert_eq!(error_text(end), text);
    }
    let long = "n\u{1b}".repeat(500);
    assert_eq!(unregistered_text(&long).len(), "Sandbox requested an unregistered tool: ".len() + 64);
}

#[tokio::test]
async fn a_program_that_never_stops_calling_is_answered() {
    let side = Side { gathers: true, ..Side::new() };
    let drips = |guest: Guest| async move {
        for number in 0.. {
            guest.call(&[(&format!("c{number}"), "x")]);
            sleep(GATHER / 2).await;
        }
        done("never")
    };
    let started = Instant::now();
    let (_, ids, _) = calls(side.start(drips).await);
    assert!(ids.len() > 2 && started.elapsed() < GATHER_MAX * 3, "{} {:?}", ids.len(), started.elapsed());
    assert_eq!(side.table.counts(), (1, 0));
}

#[tokio::test]
async fn a_program_that_never_stops_calling_can_be_cancelled() {
    let side = Arc::new(Side { gathers: true, ..Side::new() });
    let drips = |guest: Guest| async move {
        for number in 0.. {
            guest.call(&[(&format!("c{number}"), "x")]);
            sleep(GATHER / 2).await;
        }
        done("never")
    };
    let (table, owner) = (Arc::clone(&side.table), side.owner.clone());
    let cancelling = tokio::spawn(async move {
        sleep(MOMENT).await;
        table.cancel(&owner, "r")
    });
    let started = Instant::now();
    let ended = side.start_named(Some("r"), drips).await;
    assert!(matches!(ended, Ok(Round::Cancelled { .. })), "{ended:?}");
    assert!(started.elapsed() < GATHER_MAX && cancelling.await.expect("no panic"));
}
