//! The engine over a fake launcher: no root, no kernel features, the whole path otherwise.
#![forbid(unsafe_code)]

use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Duration;

use crate::backend::native::fake::{FakeLauncher, hello};
use crate::engine::run::NewSession;
use crate::engine::{
    CellRequest, CreateRefused, Engine, EngineConfig, Execution, Language, Output, Piece, Refusal, Runner,
    SessionChoice, Status, TenantId, Tiers, pieces,
};
use crate::launcher::plan::{Account, Origin, Profile, SpaceId};
use crate::launcher::posture::Hello;
use crate::session::{LOST_HINT, RESTART_HINT};
use crate::store::Store;

struct House {
    engine: Arc<Engine>,
    launcher: Arc<FakeLauncher>,
}

fn config() -> EngineConfig {
    EngineConfig {
        slots_max: 0,
        grace: Duration::from_millis(100),
        sessions_max: 2,
        ..EngineConfig::default()
    }
}

fn house_with(config: EngineConfig, launcher: Arc<FakeLauncher>, store: Store) -> House {
    let engine = Engine::with_launcher(config, Arc::clone(&launcher) as Arc<_>, store);
    House { engine, launcher }
}

fn house(config: EngineConfig) -> House {
    house_with(config, FakeLauncher::with(hello()), Store::in_memory().expect("opens"))
}

fn tenant() -> TenantId {
    TenantId("default".to_owned())
}

fn cell(session: Option<&str>, code: &str) -> CellRequest {
    CellRequest {
        runner: Runner::Chosen,
        watcher: None,
        tenant: tenant(),
        language: Language::Python,
        code: code.to_owned(),
        session: session.map_or(SessionChoice::OneOff, |id| SessionChoice::Named(id.to_owned())),
        timeout: Duration::from_secs(10),
        cwd: None,
        user: None,
        strict: false,
    }
}

fn new(id: &str, cwd: Option<String>) -> NewSession {
    let (language, runner, id) = (Language::Python, Runner::Chosen, Some(id.to_owned()));
    NewSession { language, runner, id, cwd, user: None, idle_max: None }
}

impl House {
    async fn run(&self, session: Option<&str>, code: &str) -> Execution {
        self.engine.execute(cell(session, code)).await.expect("not refused")
    }

    fn spawn(
        &self,
        session: Option<&str>,
        code: &str,
    ) -> tokio::task::JoinHandle<Result<Execution, Refusal>> {
        let (engine, cell) = (Arc::clone(&self.engine), cell(session, code));
        tokio::spawn(async move { engine.execute(cell).await })
    }
}

fn error(execution: &Execution) -> (&str, &str) {
    match execution.outputs.last() {
        Some(Output::Error(error)) => (&error.ename, &error.evalue),
        other => panic!("no error: {other:?}"),
    }
}

fn result(execution: &Execution) -> &str {
    let data = execution.outputs.iter().find_map(|output| match output {
        Output::ExecuteResult { data, .. } => data["text/plain"].as_str(),
        _ => None,
    });
    data.unwrap_or_else(|| panic!("no result: {execution:?}"))
}

/// Waits until so many cells run.
async fn running(house: &House, cells: usize) {
    let reached = async {
        while house.engine.stats().cells_running != cells {
            pause(1).await;
        }
    };
    tokio::time::timeout(Duration::from_secs(10), reached).await.expect("soon enough");
}

async fn pause(ms: u64) {
    tokio::time::sleep(Duration::from_millis(ms)).await;
}

#[tokio::test]
async fn a_one_off_is_answered_whole_and_keeps_nothing() {
    let house = house(config());
    let execution = house.run(None, "out hello\nerr oh").await;
    assert_eq!((execution.stdout.as_str(), execution.stderr.as_str()), ("hello\n", "oh\n"));
    assert_eq!((execution.status, execution.exit_code, execution.execution_count), (Status::Ok, 0, 1));
    assert_eq!((execution.session_id.as_deref(), execution.code.as_str()), (None, "out hello\nerr oh"));
    house.run(None, "out again").await;
    assert_eq!(house.launcher.launched(), 2);
    assert!(house.engine.sessions_list(&tenant(), Tiers::All).is_empty());
}

#[tokio::test]
async fn a_session_keeps_its_interpreter_and_counts_failed_cells() {
    let house = house(config());
    house.run(Some("s"), "set 21").await;
    let raised = house.run(Some("s"), "raise KeyError 'x'").await;
    assert_eq!((raised.status, raised.exit_code), (Status::Error, 1));
    let third = house.run(Some("s"), "get").await;
    assert_eq!((result(&third), third.execution_count), ("21", 3));
    assert_eq!(third.session_id.as_deref(), Some("s"));
    assert_eq!(house.launcher.launched(), 1);
}

#[tokio::test]
async fn a_generated_session_can_be_used_again() {
    let house = house(config());
    let mut request = cell(None, "set 5");
    request.session = SessionChoice::Generated;
    let id = house.engine.execute(request).await.expect("runs").session_id.expect("an id");
    assert_eq!(result(&house.run(Some(&id), "get").await), "5");
}

#[tokio::test]
async fn one_id_in_two_languages_is_two_sessions() {
    let house = house(config());
    house.run(Some("s"), "set python").await;
    let node = CellRequest { language: Language::JavaScript, ..cell(Some("s"), "set node") };
    house.engine.execute(node).await.expect("runs");
    assert_eq!(result(&house.run(Some("s"), "get").await), "python");
    assert_eq!(house.engine.sessions_list(&tenant(), Tiers::All).len(), 2);
    assert!(house.engine.session_delete(&tenant(), Tiers::All, "s").await);
    assert!(house.engine.sessions_list(&tenant(), Tiers::All).is_empty());
}

#[tokio::test]
async fn a_dead_interpreter_is_an_answer_and_the_session_starts_afresh() {
    let house = house(config());
    house.run(Some("s"), "set 1").await;
    let dead = house.run(Some("s"), "out last\nexit 3").await;
    assert_eq!(error(&dead), ("ProcessError", "the interpreter exited with code 3"));
    assert_eq!((dead.stdout.as_str(), dead.exit_code), ("last\n", 1));
    let next = house.run(Some("s"), "get").await;
    assert_eq!((result(&next), next.execution_count), ("", 3));
}

#[tokio::test]
async fn a_timeout_empties_the_session_and_keeps_its_count() {
    let house = house(config());
    house.run(Some("s"), "set 1").await;
    let request =
        CellRequest { timeout: Duration::from_millis(50), ..cell(Some("s"), "out early\nsleep 60000") };
    let late = house.engine.execute(request).await.expect("an answer");
    assert_eq!((late.status, late.exit_code, late.stdout.as_str()), (Status::Timeout, 1, "early\n"));
    assert_eq!(late.stderr, "execution timed out after 50ms; session state was reset");
    let next = house.run(Some("s"), "get").await;
    assert_eq!((result(&next), next.execution_count), ("", 3));
}

#[tokio::test]
async fn one_session_too_many_is_refused_and_one_offs_still_run() {
    let house = house(config());
    house.run(Some("a"), "set a").await;
    house.run(Some("b"), "out").await;
    let refused = house.engine.execute(cell(Some("c"), "out")).await;
    assert_eq!(refused, Err(Refusal::TooManySessions { max: 2 }));
    assert_eq!(house.run(None, "out x").await.status, Status::Ok);
    assert_eq!(result(&house.run(Some("a"), "get").await), "a");
    house.engine.session_delete(&tenant(), Tiers::All, "b").await;
    assert_eq!(house.run(Some("c"), "out").await.execution_count, 1);
}

#[tokio::test]
async fn cells_of_one_session_run_one_after_the_other() {
    let house = house(config());
    let first = house.spawn(Some("s"), "sleep 40\nset first");
    pause(10).await;
    let second = house.spawn(Some("s"), "get\nsleep 10");
    pause(5).await;
    let third = house.run(Some("s"), "get").await;
    assert_eq!(first.await.expect("no panic").expect("runs").execution_count, 1);
    let second = second.await.expect("no panic").expect("runs");
    assert_eq!((result(&second), second.execution_count, third.execution_count), ("first", 2, 3));
}

#[tokio::test]
async fn a_queue_that_is_full_refuses_without_running() {
    let house = house(EngineConfig { session_waiting_max: 1, ..config() });
    let first = house.spawn(Some("s"), "sleep 60");
    pause(10).await;
    let second = house.spawn(Some("s"), "out");
    pause(10).await;
    let third = house.engine.execute(cell(Some("s"), "out")).await;
    assert_eq!(third, Err(Refusal::TooManyWaiting { max: 1 }));
    assert!(first.await.expect("no panic").is_ok() && second.await.expect("no panic").is_ok());
}

#[tokio::test]
async fn deleting_a_busy_session_answers_its_callers() {
    let house = house(config());
    let running = house.spawn(Some("s"), "out early\nsleep 60000");
    pause(30).await;
    let waiting = house.spawn(Some("s"), "out");
    pause(10).await;
    assert!(house.engine.session_get(&tenant(), Tiers::All, "s").expect("listed").executing);
    assert!(house.engine.session_delete(&tenant(), Tiers::All, "s").await);
    let running = running.await.expect("no panic").expect("an answer");
    assert_eq!(error(&running), ("ProcessError", "the session was deleted"));
    assert_eq!(running.stdout, "early\n");
    let waiting = waiting.await.expect("no panic").expect("an answer");
    assert_eq!(error(&waiting).0, "ProcessError");
    assert!(house.engine.session_get(&tenant(), Tiers::All, "s").is_none());
    assert!(!house.engine.session_delete(&tenant(), Tiers::All, "s").await);
    assert_eq!(house.run(Some("s"), "out").await.execution_count, 1);
}

#[tokio::test]
async fn a_session_cell_goes_on_when_its_caller_hangs_up() {
    let house = house(config());
    let caller = house.spawn(Some("s"), "sleep 40\nset done");
    running(&house, 1).await;
    caller.abort();
    assert_eq!(result(&house.run(Some("s"), "get").await), "done");
}

#[tokio::test]
async fn a_one_off_ends_when_its_caller_hangs_up() {
    let house = house(config());
    let caller = house.spawn(None, "sleep 60000");
    running(&house, 1).await;
    caller.abort();
    running(&house, 0).await;
}

#[tokio::test]
async fn a_folder_that_is_none_is_refused_and_makes_no_session() {
    let house = house(config());
    let with_cwd = |session| CellRequest { cwd: Some("/missing".to_owned()), ..cell(session, "out x") };
    let refusal = Refusal::NotADirectory { cwd: "/missing".to_owned() };
    assert_eq!(house.engine.execute(with_cwd(None)).await, Err(refusal.clone()));
    assert_eq!(house.engine.execute(with_cwd(Some("s"))).await, Err(refusal.clone()));
    let cwd = Some("/missing".to_owned());
    let created = house.engine.session_create(&tenant(), new("t", cwd)).await;
    assert_eq!(created, Err(CreateRefused::Refused(refusal)));
    assert!(house.engine.sessions_list(&tenant(), Tiers::All).is_empty());
}

#[tokio::test]
async fn a_session_made_up_front_waits_for_its_first_cell() {
    let house = house(config());
    let create = async |cwd: Option<&str>| {
        let cwd = cwd.map(str::to_owned);
        house.engine.session_create(&tenant(), new("s", cwd)).await
    };
    let (made, is_new) = create(Some("/tmp")).await.expect("made");
    assert!(is_new);
    assert_eq!((made.session_id.as_str(), made.cwd.as_str()), ("s", "/tmp"));
    assert!(!made.executing);
    let (again, is_new) = create(None).await.expect("the same");
    assert!(!is_new);
    assert_eq!((again.cwd.as_str(), again.created_at_ms), ("/tmp", made.created_at_ms));
    assert_eq!(house.run(Some("s"), "out").await.execution_count, 1);
    assert_eq!(house.launcher.launched(), 1);
}

#[tokio::test]
async fn a_user_that_cannot_be_had_is_a_process_error_and_nothing_runs() {
    let house = house(config());
    let as_user = |session, user: &str| CellRequest { user: Some(user.to_owned()), ..cell(session, "set x") };
    let alice = house.engine.execute(as_user(Some("s"), "alice")).await.expect("an answer");
    assert_eq!(error(&alice), ("ProcessError", "cannot run as alice: no such account"));
    assert_eq!((alice.execution_count, alice.exit_code), (1, 1));
    assert_eq!((house.launcher.launched(), house.engine.sessions_list(&tenant(), Tiers::All).len()), (0, 0));
    house.engine.execute(as_user(Some("s"), "nobody")).await.expect("runs");
    assert_eq!(house.launcher.plans.lock().expect("unharmed")[0].account, Account(1));
    let other = house.engine.execute(as_user(Some("s"), "sandbox")).await.expect("an answer");
    assert_eq!(error(&other).1, "cannot run as sandbox: the session runs as nobody");
    assert_eq!(result(&house.run(Some("s"), "get").await), "x");
}

#[tokio::test]
async fn plans_carry_what_the_request_asked_for() {
    let house = house(config());
    let strict = CellRequest { strict: true, ..cell(None, "out numpy") };
    house.engine.execute(strict).await.expect("runs");
    let other = CellRequest { tenant: TenantId("other".to_owned()), ..cell(None, "out") };
    house.engine.execute(other).await.expect("runs");
    let plans = house.launcher.plans.lock().expect("unharmed");
    assert_eq!((plans[0].origin, plans[0].profile), (Origin::Strict, Profile::PythonData));
    assert_eq!((plans[1].origin, plans[1].profile), (Origin::Warm, Profile::Python));
    assert_ne!(plans[0].space, plans[1].space);
}

#[tokio::test]
async fn a_launch_that_fails_is_refused_and_leaves_no_session() {
    let house = house(config());
    house.launcher.broken.store(true, Ordering::SeqCst);
    assert_eq!(house.engine.execute(cell(Some("s"), "out")).await, Err(Refusal::LaunchFailed));
    assert_eq!(house.engine.execute(cell(None, "out")).await, Err(Refusal::LaunchFailed));
    assert!(house.engine.sessions_list(&tenant(), Tiers::All).is_empty());
    assert_eq!(house.engine.stats().cells_running, 0);
}

#[tokio::test]
async fn a_language_without_interpreter_is_refused() {
    let launcher = FakeLauncher::with(crate::launcher::posture::Hello { node: None, ..hello() });
    let house = house_with(config(), launcher, Store::in_memory().expect("opens"));
    let node = CellRequest { language: Language::JavaScript, ..cell(None, "out") };
    let refusal = Refusal::NoInterpreter { language: "javascript", looked_for: "node".to_owned() };
    assert_eq!(house.engine.execute(node).await, Err(refusal));
    let info = house.engine.code_info(&tenant()).await;
    assert_eq!((info.backend, info.python.available, info.node.available), (Some("native"), true, false));
}

#[tokio::test]
async fn idle_sessions_are_closed_and_running_ones_are_not() {
    let house = house(EngineConfig { session_idle_max: Duration::from_millis(60), ..config() });
    house.run(Some("idle"), "out").await;
    let busy = house.spawn(Some("busy"), "sleep 200\nset kept");
    pause(150).await;
    let names: Vec<_> =
        house.engine.sessions_list(&tenant(), Tiers::All).into_iter().map(|(key, _)| key).collect();
    assert_eq!(names, ["busy"]);
    assert_eq!(busy.await.expect("no panic").expect("runs").status, Status::Ok);
}

#[tokio::test]
async fn a_session_from_before_a_restart_says_so_once() {
    let folder = tempfile::tempdir().expect("a folder");
    let path = folder.path().join("store.db");
    let house_on = || {
        let store = Store::open(&path).expect("opens");
        house_with(config(), FakeLauncher::with(hello()), store)
    };
    let before = house_on();
    assert_eq!(before.run(Some("s"), "set 1").await.hint, None);
    assert_eq!(before.run(Some("t"), "set 1").await.hint, None);
    before.engine.session_delete(&tenant(), Tiers::All, "t").await;
    let after = house_on();
    let first = after.run(Some("s"), "get").await;
    assert_eq!((first.hint.as_deref(), first.execution_count), (Some(RESTART_HINT), 1));
    assert_eq!(after.run(Some("s"), "get").await.hint, None);
    assert_eq!(after.run(Some("t"), "get").await.hint, None);
}

#[tokio::test]
async fn the_daemon_bounds_what_runs_at_once() {
    let house = house(EngineConfig { cells_running_max: 1, cells_waiting_max: 1, ..config() });
    // Long enough for a machine that does much else.
    let first = house.spawn(None, "sleep 1500");
    pause(100).await;
    let second = house.spawn(None, "out");
    pause(100).await;
    let third = house.engine.execute(cell(Some("never"), "out")).await;
    assert_eq!(third, Err(Refusal::TooManyWaiting { max: 1 }));
    assert!(
        house.engine.sessions_list(&tenant(), Tiers::All).is_empty(),
        "refused further on, so never made"
    );
    assert!(first.await.expect("no panic").is_ok() && second.await.expect("no panic").is_ok());
}

#[tokio::test]
async fn a_shutdown_waits_refuses_and_then_ends_what_runs() {
    let house = house(config());
    let short = house.spawn(None, "sleep 50\nout done");
    let long = house.spawn(Some("s"), "out early\nsleep 60000");
    pause(20).await;
    house.engine.shutdown(Duration::from_millis(100)).await;
    assert_eq!(short.await.expect("no panic").expect("an answer").stdout, "done\n");
    let long = long.await.expect("no panic").expect("an answer");
    assert_eq!(error(&long), ("ProcessError", "the daemon is shutting down"));
    assert_eq!(house.engine.execute(cell(None, "out")).await, Err(Refusal::ShuttingDown));
}

#[tokio::test]
async fn a_launcher_that_is_away_is_waited_for() {
    let house = house(config());
    house.launcher.attached.store(false, Ordering::SeqCst);
    let waiting = house.spawn(None, "out x");
    pause(30).await;
    assert_eq!(house.launcher.launched(), 0);
    house.launcher.attach();
    assert_eq!(waiting.await.expect("no panic").expect("runs").stdout, "x\n");
}

#[tokio::test]
async fn slots_are_made_ahead_and_handed_out_once() {
    let house = house(EngineConfig { slots_max: 8, code_prewarm: 2, ..config() });
    for _ in 0..100 {
        if house.engine.stats().slots.ready.iter().map(|it| it.1).sum::<usize>() == 6 {
            break;
        }
        pause(20).await;
    }
    let ready = house.engine.stats().slots.ready;
    let wanted = [(Profile::Python, 2), (Profile::PythonData, 1), (Profile::Node, 3), (Profile::Kernel, 0)];
    assert_eq!(ready, wanted);
    assert_eq!(house.engine.code_info(&tenant()).await.prewarmed, 2);
    assert!(house.launcher.plans.lock().expect("unharmed").iter().all(|plan| plan.space == SpaceId(1)));
    assert_eq!(house.run(None, "out x").await.stdout, "x\n");
    let strict = CellRequest { strict: true, ..cell(None, "out y") };
    assert_eq!(house.engine.execute(strict).await.expect("runs").stdout, "y\n");
    let stats = house.engine.stats().slots;
    assert_eq!((stats.taken, stats.missed), (1, 0));
}

#[tokio::test]
async fn an_interpreter_that_died_between_two_cells_is_replaced_with_a_hint() {
    let house = house(config());
    house.run(Some("s"), "set 1\nlater-exit 4").await;
    pause(60).await;
    let next = house.run(Some("s"), "get").await;
    assert_eq!(result(&next), "");
    let hint = "session was reset: the interpreter exited with code 4";
    assert_eq!((next.hint.as_deref(), next.execution_count), (Some(hint), 2));
}

#[tokio::test]
async fn sessions_of_a_launcher_that_is_gone_close_at_once_and_say_so_once() {
    let house = house(config());
    house.run(Some("idle"), "set 1\nlater-lost").await;
    let running = house.spawn(Some("busy"), "sleep 40\nlost");
    pause(10).await;
    let waiting = house.spawn(Some("busy"), "get");
    let full = house.engine.execute(cell(Some("third"), "out")).await;
    assert_eq!(full, Err(Refusal::TooManySessions { max: 2 }), "control: both count");
    pause(60).await;
    house.launcher.vanish();
    let running = running.await.expect("no panic").expect("an answer");
    assert_eq!(error(&running), ("ProcessError", "the launcher ended, and every interpreter with it"));
    assert_eq!(running.hint, None, "its own error says it");
    let waiting = waiting.await.expect("no panic").expect("runs in a new session");
    assert_eq!((result(&waiting), waiting.hint.as_deref()), ("", Some(LOST_HINT)));
    pause(10).await;
    let names: Vec<_> =
        house.engine.sessions_list(&tenant(), Tiers::All).into_iter().map(|(key, _)| key).collect();
    assert_eq!(names, ["busy"], "the idle one is gone without anybody asking for it");
    assert_eq!(house.run(Some("third"), "out").await.status, Status::Ok);
    house.engine.session_delete(&tenant(), Tiers::All, "third").await;
    let again = house.run(Some("idle"), "get").await;
    assert_eq!((result(&again), again.hint.as_deref()), ("", Some(LOST_HINT)));
    assert_eq!(again.execution_count, 1);
    assert_eq!(house.run(Some("idle"), "get").await.hint, None);
}

#[tokio::test]
async fn a_session_without_an_interpreter_outlives_the_launcher() {
    let house = house(config());
    house.engine.session_create(&tenant(), new("s", None)).await.expect("made");
    house.run(Some("t"), "exit 1").await;
    house.launcher.vanish();
    pause(20).await;
    assert_eq!(house.engine.sessions_list(&tenant(), Tiers::All).len(), 2);
    assert_eq!(house.run(Some("s"), "out").await.hint, None);
}

#[tokio::test]
async fn a_lost_session_that_is_deleted_is_forgotten() {
    let house = house(config());
    house.run(Some("s"), "set 1\nlater-lost").await;
    pause(40).await;
    house.launcher.vanish();
    pause(10).await;
    assert!(!house.engine.session_delete(&tenant(), Tiers::All, "s").await, "it has closed already");
    assert_eq!(house.run(Some("s"), "get").await.hint, None);
}

fn with_kernel() -> Hello {
    let mut hello = hello();
    hello.kernels = vec![("python3".to_owned(), hello.python.clone().expect("a Python"))];
    hello
}

fn house_with_kernel() -> House {
    let config =
        EngineConfig { interrupt_grace: Duration::from_millis(100), kernel_sessions_max: 1, ..config() };
    house_with(config, FakeLauncher::with(with_kernel()), Store::in_memory().expect("opens"))
}

fn kernel_cell(session: Option<&str>, code: &str) -> CellRequest {
    CellRequest { runner: Runner::Kernel(None), ..cell(session, code) }
}

#[tokio::test]
async fn a_kernel_serves_both_planes_with_one_namespace_and_ignores_the_user() {
    let house = house_with_kernel();
    house.run(Some("s"), "set 7").await;
    let request = CellRequest { user: Some("nobody".to_owned()), ..kernel_cell(Some("s"), "get") };
    let execution = house.engine.execute(request).await.expect("taken");
    assert!(
        matches!(&execution.outputs[..], [Output::ExecuteResult { data, .. }] if data["text/plain"] == "7")
    );
    assert_eq!((execution.kernel.as_deref(), execution.execution_count), (Some("python3"), 2));
    let plans = house.launcher.plans.lock().expect("no test panics here").clone();
    assert_eq!(
        plans.iter().map(|plan| (plan.profile, plan.account)).collect::<Vec<_>>(),
        [(Profile::Kernel, Account(0))]
    );
    let second = house.engine.execute(kernel_cell(Some("t"), "get")).await;
    assert_eq!(second, Err(Refusal::TooManyKernelSessions { max: 1 }));
    assert_eq!(house.engine.sessions_list(&tenant(), Tiers::Kernels).len(), 1);
    assert!(house.engine.session_delete(&tenant(), Tiers::Python, "s").await);
}

#[tokio::test]
async fn a_kernel_is_interrupted_at_its_time_and_keeps_its_names() {
    let house = house_with_kernel();
    house.run(Some("s"), "set 7").await;
    let late = CellRequest {
        timeout: Duration::from_millis(30),
        ..kernel_cell(Some("s"), "out a\nuntil-interrupt")
    };
    let execution = house.engine.execute(late).await.expect("taken");
    assert_eq!(execution.status, Status::Timeout);
    let text = "execution timed out after 30ms and was interrupted";
    let names: Vec<_> = execution
        .outputs
        .iter()
        .filter_map(|output| match output {
            Output::Error(error) => Some(error.ename.as_str()),
            _ => None,
        })
        .collect();
    assert_eq!((names, execution.stderr.as_str()), (vec!["KeyboardInterrupt", "TimeoutError"], text));
    let kept = house.run(Some("s"), "get").await;
    assert!(matches!(&kept.outputs[..], [Output::ExecuteResult { data, .. }] if data["text/plain"] == "7"));
}

#[tokio::test]
async fn a_kernel_that_is_deaf_to_interrupts_is_ended_with_its_session() {
    let house = house_with_kernel();
    let late = CellRequest { timeout: Duration::from_millis(30), ..kernel_cell(Some("s"), "sleep 60000") };
    let execution = house.engine.execute(late).await.expect("taken");
    assert_eq!(execution.status, Status::Timeout);
    assert!(execution.stderr.ends_with("the kernel did not stop and was ended"), "{}", execution.stderr);
    assert!(house.engine.sessions_list(&tenant(), Tiers::All).is_empty());
}

#[tokio::test]
async fn a_watcher_hears_of_outputs_while_the_cell_runs() {
    let house = house(config());
    let (watcher, mut pieces) = pieces();
    let request = CellRequest {
        watcher: Some(watcher),
        ..cell(None, "out a\nsleep 30\nbytes c3\nsleep 30\nbytes a4\nraise E no")
    };
    let engine = Arc::clone(&house.engine);
    let run = tokio::spawn(async move { engine.execute(request).await });
    let first = pieces.recv().await.expect("while it runs");
    assert!(!run.is_finished());
    let text = |piece: &Piece| match piece {
        Piece::Output { output: Output::Stream { text, .. }, .. } => text.clone(),
        other => format!("{other:?}"),
    };
    assert_eq!(text(&first), "a\n");
    run.await.expect("no panic").expect("taken");
    let mut rest = Vec::new();
    while let Some(piece) = pieces.recv().await {
        rest.push(piece);
    }
    assert_eq!(text(&rest[0]), "\u{e4}", "a character is told whole");
    assert!(matches!(&rest[1], Piece::Output { output: Output::Error(error), .. } if error.ename == "E"));
    assert_eq!(rest.len(), 2);
}
