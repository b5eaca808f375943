//! Commands over agents that tests play: what the daemon makes of whatever comes from a sandbox.

use std::io;
use std::sync::Mutex as StdMutex;
use std::sync::atomic::{AtomicU64, Ordering};

use rustix::pipe::{PipeFlags, pipe_with};
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::unix::pipe;
use tokio::sync::watch;

use super::*;
use crate::backend::native::fake::hello;
use crate::inside::commands::frame::{Decoder, Event, Exit, Found, REQUEST_BYTES_MAX};
use crate::launcher::client::{Ender, LaunchError, Sandbox};
use crate::launcher::plan::{Attestation, End, LaunchPlan, SandboxId, SpaceId};
use crate::zygote::{Deleting, Launching, Opening};

/// The agent's side of a sandbox.
struct Peer {
    requests: pipe::Receiver,
    events: pipe::Sender,
    decoder: Decoder,
    ended: watch::Sender<Option<End>>,
}

impl Peer {
    /// The next request.
    async fn hear(&mut self) -> Request {
        loop {
            if let Some(request) = self.decoder.request().expect("the daemon writes frames") {
                return request;
            }
            let read = self.requests.read_buf(self.decoder.buffer()).await.expect("a pipe");
            assert_ne!(read, 0, "the daemon has closed the pipe");
        }
    }

    /// Resolves once the daemon has let go of the sandbox.
    async fn closed(&mut self) {
        let mut byte = [0; 64];
        while !matches!(self.requests.read(&mut byte).await, Ok(0) | Err(_)) {}
    }

    async fn say(&mut self, event: &Event) {
        self.events.write_all(&event.encode()).await.expect("the daemon reads");
    }

    async fn started(&mut self) -> u32 {
        let Request::Start { number, .. } = self.hear().await else { panic!("no start") };
        self.say(&Event::Started { number }).await;
        number
    }
}

/// Hands out sandboxes whose agents come to the test.
struct Sandboxes {
    hello: watch::Sender<Option<Arc<Hello>>>,
    peers: tokio::sync::mpsc::UnboundedSender<Peer>,
    plans: StdMutex<Vec<LaunchPlan>>,
    made: AtomicU64,
}

impl Launch for Sandboxes {
    fn delete_space(&self, _: SpaceId) -> Deleting<'_> {
        Box::pin(async { Err(LaunchError::Gone) })
    }

    fn launch(&self, _: LaunchPlan) -> Launching<'_> {
        Box::pin(async { Err(LaunchError::Gone) })
    }

    fn sandbox(&self, plan: LaunchPlan) -> Opening<'_> {
        self.plans.lock().expect("no test panics here").push(plan);
        Box::pin(async move {
            let pipe = || pipe_with(PipeFlags::CLOEXEC | PipeFlags::NONBLOCK).map_err(io::Error::from);
            let piped = || pipe().expect("a pipe can be made");
            let ((requests_in, requests), (events, events_out)) = (piped(), piped());
            let (ended, seen) = watch::channel(None);
            let peer = Peer {
                requests: pipe::Receiver::from_owned_fd(requests_in).expect("a pipe"),
                events: pipe::Sender::from_owned_fd(events_out).expect("a pipe"),
                decoder: Decoder::new(REQUEST_BYTES_MAX),
                ended,
            };
            let id = SandboxId(self.made.fetch_add(1, Ordering::SeqCst) + 1);
            self.peers.send(peer).map_err(|_| LaunchError::Gone)?;
            Ok(Sandbox {
                id,
                space: plan.space,
                attestation: Attestation::default(),
                requests,
                events,
                stdout: piped().0,
                stderr: piped().0,
                view: None,
                ended: seen,
                ender: Ender::of_nobody(id),
            })
        })
    }

    fn hello(&self) -> watch::Receiver<Option<Arc<Hello>>> {
        self.hello.subscribe()
    }

    fn gone(&self) -> watch::Receiver<u64> {
        watch::channel(0).1
    }

    fn is_attached(&self) -> bool {
        true
    }

    fn sandboxes_live(&self) -> usize {
        0
    }
}

struct Stage {
    commands: Arc<Commands>,
    peers: tokio::sync::mpsc::UnboundedReceiver<Peer>,
    launcher: Arc<Sandboxes>,
}

impl Stage {
    fn new() -> Stage {
        let (peers_in, peers) = tokio::sync::mpsc::unbounded_channel();
        let launcher = Arc::new(Sandboxes {
            hello: watch::channel(Some(Arc::new(hello()))).0,
            peers: peers_in,
            plans: StdMutex::default(),
            made: AtomicU64::new(0),
        });
        let config = CommandsConfig {
            sessions_max: 2,
            session_idle_max: Duration::from_secs(3600),
            bash: None,
            running_max: 3,
            running_per_tenant_max: 3,
            memory_mib_max: 512,
            default_user: None,
            daemon_account: None,
        };
        let store = Store::in_memory().expect("a store");
        let commands = Commands::new(config, Arc::clone(&launcher) as Arc<dyn Launch>, store);
        Stage { commands, peers, launcher }
    }

    /// An agent that has said it serves.
    async fn agent(&mut self) -> Peer {
        let mut peer = self.peers.recv().await.expect("a sandbox was asked for");
        let found = Found {
            bash: Some("/bin/bash".to_owned()),
            sh: Some("/bin/sh".to_owned()),
            ps: None,
            terminal: true,
        };
        peer.say(&Event::Ready(found)).await;
        peer
    }

    fn spawn(&self, session: &str, text: &str) -> tokio::task::JoinHandle<Result<Running, Refused>> {
        let (commands, run) = (Arc::clone(&self.commands), run(session, text));
        tokio::spawn(async move { commands.run(&tenant(), run).await })
    }
}

fn tenant() -> TenantId {
    TenantId("a".to_owned())
}

fn run(session: &str, text: &str) -> Run {
    Run {
        wanted: Wanted::Script(text.to_owned()),
        session: Some(session.to_owned()),
        cwd: None,
        keeps_cwd: false,
        env: Vec::new(),
        user: None,
        hard_timeout: None,
        stdin_ends: false,
    }
}

async fn joined(task: tokio::task::JoinHandle<Result<Running, Refused>>) -> Running {
    task.await.expect("no panic").expect("it is run")
}

#[tokio::test]
async fn a_command_is_what_its_agent_tells_of_it() {
    let mut stage = Stage::new();
    let asked = stage.spawn("s", "echo hi");
    let mut peer = stage.agent().await;
    let Request::Start { number, start } = peer.hear().await else { panic!("no start") };
    let script = Program::Script { shell: "/bin/bash".to_owned(), text: "echo hi".to_owned() };
    assert_eq!((start.program, start.cwd, start.stdin_ends), (script, None, false));
    peer.say(&Event::Started { number }).await;
    let running = joined(asked).await;
    peer.say(&Event::Stdout { number, bytes: b"hi\n".to_vec() }).await;
    running.command.news(0, 0).await;
    assert_eq!(running.command.read(0, 0, 100).stdout.text(), "hi\n");
    assert_eq!(running.command.outlook().status, Status::Running);
    peer.say(&Event::Exit { number, exit: Exit::Code(3) }).await;
    let outlook = running.command.ended().await;
    assert_eq!((outlook.status, outlook.exit_code, outlook.reason), (Status::Completed, Some(3), None));
    // What a child it left behind prints is still its own; a second end is not.
    peer.say(&Event::Exit { number, exit: Exit::Code(9) }).await;
    peer.say(&Event::Stderr { number, bytes: b"late".to_vec() }).await;
    running.command.news(3, 0).await;
    tokio::time::timeout(Duration::from_secs(5), async {
        while running.command.read(0, 0, 100).stderr.text() != "late" {
            tokio::time::sleep(Duration::from_millis(5)).await;
        }
    })
    .await
    .expect("late output is kept");
    assert_eq!(running.command.outlook().exit_code, Some(3));
    let plans = stage.launcher.plans.lock().expect("no test panics here").clone();
    assert_eq!(plans.iter().map(|plan| plan.profile.name()).collect::<Vec<_>>(), ["commands"]);
}

#[tokio::test]
async fn what_is_no_frame_ends_the_sandbox_and_the_session_goes_on() {
    let mut stage = Stage::new();
    let asked = stage.spawn("s", "one");
    let mut peer = stage.agent().await;
    let number = peer.started().await;
    let running = joined(asked).await;
    peer.say(&Event::Stdout { number, bytes: b"before".to_vec() }).await;
    peer.events.write_all(&[0xff; 64]).await.expect("the daemon reads");
    let outlook = running.command.ended().await;
    assert_eq!((outlook.status, outlook.exit_code), (Status::Completed, Some(-1)));
    assert_eq!(outlook.reason.as_deref(), Some("its agent broke the protocol"));
    assert_eq!(running.command.read(0, 0, 100).stdout.text(), "before");
    peer.closed().await;
    let asked = stage.spawn("s", "two");
    let mut next = stage.agent().await;
    let number = next.started().await;
    let running = joined(asked).await;
    assert_eq!(running.hint.as_deref(), Some("session was reset: its agent broke the protocol"));
    next.say(&Event::Exit { number, exit: Exit::Signal(9) }).await;
    assert_eq!(running.command.ended().await.exit_code, Some(-1));
}

#[tokio::test]
async fn frames_for_nobody_and_lies_about_input_do_no_harm() {
    let mut stage = Stage::new();
    let asked = stage.spawn("s", "cat");
    let mut peer = stage.agent().await;
    let number = peer.started().await;
    let running = joined(asked).await;
    for event in [
        Event::Taken { number, bytes: u32::MAX },
        Event::Stdout { number: 999, bytes: b"x".to_vec() },
        Event::Exit { number: 0, exit: Exit::Code(0) },
        Event::Done { number, nonce: 1, status: 0, cwd: "/".to_owned() },
        Event::NotADirectory { number },
        Event::Started { number },
    ] {
        peer.say(&event).await;
    }
    let chunk = vec![b'x'; 1024 * 1024];
    let mut taken = 0;
    while running.command.input(&chunk).is_ok() {
        taken += 1;
        assert!(taken <= 4, "no more waits than may");
    }
    assert!(running.command.is_running());
    let refused = running.command.input(b"more");
    assert!(matches!(refused, Ok(()) | Err(Refused::InputFull { .. } | Refused::Overrun)), "{refused:?}");
    peer.say(&Event::Exit { number, exit: Exit::Code(0) }).await;
    running.command.ended().await;
    assert!(matches!(running.command.input(b"late"), Err(Refused::NotRunning(_))));
}

#[tokio::test]
async fn a_sandbox_that_ran_out_of_memory_says_so() {
    let mut stage = Stage::new();
    let asked = stage.spawn("s", "x");
    let mut peer = stage.agent().await;
    peer.started().await;
    let running = joined(asked).await;
    peer.ended.send_replace(Some(End::OutOfMemory));
    drop(peer);
    let outlook = running.command.ended().await;
    assert_eq!(outlook.reason.as_deref(), Some("out of memory (limit 512 MiB)"));
}

#[tokio::test]
async fn a_caller_who_goes_away_takes_its_command_along() {
    let mut stage = Stage::new();
    let asked = stage.spawn("s", "x");
    let mut peer = stage.agent().await;
    let number = peer.started().await;
    let running = joined(asked).await;
    let command = Arc::clone(&running.command);
    drop(running);
    assert_eq!(peer.hear().await, Request::Signal { number, signal: signals::KILL });
    peer.say(&Event::Exit { number, exit: Exit::Signal(9) }).await;
    assert_eq!(command.ended().await.status, Status::Killed);
    let asked = stage.spawn("s", "y");
    let number = peer.started().await;
    let mut running = joined(asked).await;
    running.let_go();
    drop(running);
    peer.say(&Event::Exit { number, exit: Exit::Code(0) }).await;
    tokio::time::timeout(Duration::from_millis(100), peer.hear()).await.expect_err("nothing is killed");
}

#[tokio::test]
async fn a_directory_that_is_none_is_refused_and_leaves_nothing() {
    let mut stage = Stage::new();
    let asked = stage.spawn("new", "x");
    let mut peer = stage.agent().await;
    let Request::Start { number, .. } = peer.hear().await else { panic!("no start") };
    peer.say(&Event::NotADirectory { number }).await;
    assert!(matches!(asked.await.expect("no panic"), Err(Refused::NotADirectory(_))));
    assert!(stage.commands.sessions_list(&tenant()).is_empty());
    peer.closed().await;
}

#[tokio::test]
async fn busy_sessions_are_not_closed_for_a_new_one_and_commands_have_a_bound() {
    let mut stage = Stage::new();
    let mut held = Vec::new();
    for name in ["one", "two"] {
        let asked = stage.spawn(name, "x");
        let mut peer = stage.agent().await;
        let number = peer.started().await;
        held.push((joined(asked).await, peer, number));
    }
    let third = stage.commands.run(&tenant(), run("three", "x")).await;
    assert_eq!(third.map(drop), Err(Refused::TooManySessions { max: 2 }));
    let asked = stage.spawn("one", "y");
    held[0].1.started().await;
    let more = joined(asked).await;
    let fourth = stage.commands.run(&tenant(), run("two", "x")).await;
    assert_eq!(fourth.map(drop), Err(Refused::TooManyCommands { max: 3 }));
    // The end of one makes room for another session.
    let (running, mut peer, number) = held.pop().expect("two are held");
    peer.say(&Event::Exit { number, exit: Exit::Code(0) }).await;
    running.command.ended().await;
    let asked = stage.spawn("three", "x");
    let mut fresh = stage.agent().await;
    fresh.started().await;
    let third = joined(asked).await;
    peer.closed().await;
    let names: Vec<String> =
        stage.commands.sessions_list(&tenant()).into_iter().map(|session| session.session_id).collect();
    assert_eq!(names, ["one", "three"]);
    drop((more, third));
}

#[tokio::test]
async fn tenants_do_not_see_each_others_commands() {
    let mut stage = Stage::new();
    let asked = stage.spawn("s", "x");
    let mut peer = stage.agent().await;
    peer.started().await;
    let running = joined(asked).await;
    let other = TenantId("b".to_owned());
    let id = running.command.id.clone();
    assert_eq!(stage.commands.command(&other, &id).map(drop), Err(Refused::NoSuchCommand(id.clone())));
    let of = stage.commands.command_of(&other, "s", None).map(drop);
    assert_eq!(of, Err(Refused::NoSuchSession("s".to_owned())));
    assert_eq!(stage.commands.session_delete(&other, "s"), Err(Refused::NoSuchSession("s".to_owned())));
    assert!(stage.commands.command(&tenant(), &id).is_ok());
    assert!(stage.commands.sessions_list(&other).is_empty());
}

#[tokio::test]
async fn a_shutdown_ends_what_runs_and_takes_nothing_new() {
    let mut stage = Stage::new();
    let asked = stage.spawn("s", "x");
    let mut peer = stage.agent().await;
    peer.started().await;
    let running = joined(asked).await;
    stage.commands.shutdown();
    let outlook = running.command.ended().await;
    assert_eq!(outlook.reason.as_deref(), Some("the daemon is shutting down"));
    peer.closed().await;
    let refused = stage.commands.run(&tenant(), run("s", "x")).await;
    assert_eq!(refused.map(drop), Err(Refused::ShuttingDown));
}

#[tokio::test]
async fn a_line_ends_by_its_own_nonce_only() {
    let mut stage = Stage::new();
    let commands = Arc::clone(&stage.commands);
    let line = |session: Option<String>| ShellLine {
        session,
        text: "cd /tmp".to_owned(),
        cwd: None,
        strict: false,
        keeps_links: false,
        hard_timeout: None,
    };
    let asked = tokio::spawn(async move { commands.shell_run(&tenant(), line(None)).await });
    let mut peer = stage.agent().await;
    let Request::Shell { number, .. } = peer.hear().await else { panic!("no shell") };
    let Request::Line { line: told, .. } = peer.hear().await else { panic!("no line") };
    let nonce = told.nonce;
    peer.say(&Event::Started { number }).await;
    peer.say(&Event::Started { number: nonce }).await;
    let running = joined(asked).await;
    let session = running.command.session().as_str().to_owned();
    let busy = stage.commands.shell_run(&tenant(), line(Some(session.clone()))).await.map(drop);
    assert_eq!(busy, Err(Refused::Busy(session.clone())));
    peer.say(&Event::Done { number, nonce: nonce + 7, status: 0, cwd: "/forged".to_owned() }).await;
    peer.say(&Event::Stdout { number, bytes: b"shown".to_vec() }).await;
    running.command.news(0, u64::MAX).await;
    assert!(running.command.is_running());
    peer.say(&Event::Done { number, nonce, status: 2, cwd: "/tmp".to_owned() }).await;
    assert_eq!(running.command.ended().await.exit_code, Some(2));
    let shell = stage.commands.shell(&tenant(), &session).expect("it is there");
    assert_eq!(shell.info().working_dir, "/tmp");
    let unknown = stage.commands.shell_run(&tenant(), line(Some("none".to_owned()))).await.map(drop);
    assert_eq!(unknown, Err(Refused::NoSuchSession("none".to_owned())));
}

#[tokio::test]
async fn a_line_says_where_it_runs_and_not_where_it_was_to() {
    let mut stage = Stage::new();
    let line = |session: Option<&str>, cwd: &str, strict: bool| ShellLine {
        session: session.map(str::to_owned),
        text: "pwd".to_owned(),
        cwd: Some(cwd.to_owned()),
        strict,
        keeps_links: false,
        hard_timeout: None,
    };
    let (commands, asked) = (Arc::clone(&stage.commands), line(None, "/nope", false));
    let asked = tokio::spawn(async move { commands.shell_run(&tenant(), asked).await });
    let mut peer = stage.agent().await;
    let Request::Shell { number, .. } = peer.hear().await else { panic!("no shell") };
    let Request::Line { line: told, .. } = peer.hear().await else { panic!("no line") };
    assert_eq!((told.cwd.as_deref(), told.strict), (Some("/nope"), true));
    peer.say(&Event::Started { number }).await;
    peer.say(&Event::NotADirectory { number: told.nonce }).await;
    let Request::Line { line: told, .. } = peer.hear().await else { panic!("no second line") };
    assert_eq!(told.cwd, None);
    peer.say(&Event::Started { number: told.nonce }).await;
    let running = joined(asked).await;
    assert_eq!(running.command.cwd, "/home/sandbox");
    let session = running.command.session().as_str().to_owned();
    peer.say(&Event::Done { number, nonce: told.nonce, status: 0, cwd: "/home/sandbox".to_owned() }).await;
    running.command.ended().await;
    let shell = stage.commands.shell(&tenant(), &session).expect("it is there");
    assert_eq!(shell.commands().len(), 1, "what was asked for in vain is no line");
    // Relative to the home, as the shell takes it; and with `strict` there is no second try.
    for (cwd, shown, strict) in [("sub", "/home/sandbox/sub", false), ("/nope", "/nope", true)] {
        let (commands, asked) = (Arc::clone(&stage.commands), line(Some(&session), cwd, strict));
        let asked = tokio::spawn(async move { commands.shell_run(&tenant(), asked).await });
        let Request::Line { line: told, .. } = peer.hear().await else { panic!("no line") };
        if strict {
            peer.say(&Event::NotADirectory { number: told.nonce }).await;
            let refused = asked.await.expect("no panic").map(drop);
            assert_eq!(refused, Err(Refused::NotADirectory(shown.to_owned())));
        } else {
            peer.say(&Event::Started { number: told.nonce }).await;
            let running = joined(asked).await;
            assert_eq!(running.command.cwd, shown);
            peer.say(&Event::Done { number, nonce: told.nonce, status: 0, cwd: shown.to_owned() }).await;
            running.command.ended().await;
        }
    }
}
