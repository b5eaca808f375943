//! One run, from a prepared place to its answer.
#![forbid(unsafe_code)]

use std::io::{Seek, Write};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::{Duration, Instant, SystemTime};

use base64::Engine as _;
use base64::engine::general_purpose::STANDARD;
use tokio_util::sync::CancellationToken;
use tokio_util::task::AbortOnDropHandle;

use crate::backend::select;
use crate::engine::{Bundle, ErrorOutput, Output, Refusal, Status, Stream, Tier, Watcher};
use crate::harness::interpreter::{Cell, CellLimits, Interpreter, Provenance};
use crate::harness::outcome::{CellOutcome, Ending};
use crate::harness::program::{ProgramLimits, ProgramRun, ToolPort};
use crate::inside::commands::frame::{Program as Started, Source, Start};
use crate::languages::{Availability, Language, Program, Runtime};
use crate::launcher::plan::{LaunchPlan, Origin, Profile, SpaceId};
use crate::launcher::posture::Hello;
use crate::objects::{FileRecord, Pending};
use crate::runs::end::RunEnd;
use crate::runs::fleeting::{Fleeting, Standing};
use crate::runs::inputs::{self, Inputs, Layer};
use crate::runs::outputs::{self, Before, Collected, Target};
use crate::runs::process::{Agent, Bounds};
use crate::runs::seat::{Home, Kernel, Seated, Turn};
use crate::runs::sink::Sink;
use crate::runs::{Delivery, RunDone, RunRefused, Runs, text};
use crate::session::epoch_ms;
use crate::store::Store;
use crate::tenant::audit::{AuditRecord, Ran};
use crate::workspace::Workspace;
use crate::zygote::slots::{FRESH, TakenFor};
use crate::zygote::{WORKSPACE_DIR, fresh_space};

/// Where a program's own files lie: never in the workspace, so that they are nobody's output.
const SCRATCH: &str = "/tmp/run-";
const SCRATCH_CHARS: usize = 12;
/// Pictures of one kernel's run that become files.
const PICTURES_MAX: usize = 50;
/// How long looking for the languages may take, and how much it may print.
const PROBE_MAX: Duration = Duration::from_secs(60);
const PROBE_BYTES_MAX: usize = 64 * 1024;

/// What runs it.
enum Work {
    /// The session's interpreter, which is its turn's until the run begins: a request that goes away before that leaves
    /// it as it was.
    Kept,
    Kernel(Kernel),
    Interpreter(Interpreter),
    Agent(Agent),
}

/// A sandbox for a run, with its workspace. A space in memory goes with it.
struct Guest {
    work: Work,
    workspace: Arc<Workspace>,
    fleeting: Option<Fleeting>,
    provenance: Provenance,
}

/// A run that only has to be run: its sandbox is there and its workspace is filled. Dropped it leaves nothing of itself.
pub struct Prepared {
    seated: Seated,
    guest: Guest,
    /// What lies in the workspace by our doing, and what could not be laid there.
    placed: Inputs,
    left_out: Vec<PathBuf>,
    records: Vec<FileRecord>,
    before: Before,
    started: (SystemTime, Instant),
}

/// What a program or cell came to.
struct Went {
    stdout: String,
    stderr: String,
    end: RunEnd,
    result: Option<Bundle>,
    error: Option<ErrorOutput>,
    pictures: Vec<Vec<u8>>,
    standing: Standing,
}

impl Seated {
    /// A sandbox, filled: the last of what can be refused.
    pub(super) async fn ready(mut self) -> Result<Prepared, RunRefused> {
        let started = (SystemTime::now(), self.runs.started());
        let guest = self.guest().await?;
        let gone = CancellationToken::new();
        let _told = gone.clone().drop_guard();
        if matches!(self.home, Home::Fresh) && self.inputs.is_empty() {
            return self.laid(guest, started, gone).await;
        }
        // Files are laid on a thread that goes on for a moment when its request goes away: until it has ended the turn, the
        // place and the workspace are this task's.
        tokio::spawn(self.laid(guest, started, gone)).await.unwrap_or(Err(RunRefused::Store))
    }

    async fn laid(
        mut self,
        guest: Guest,
        started: (SystemTime, Instant),
        gone: CancellationToken,
    ) -> Result<Prepared, RunRefused> {
        let objects = self.runs.objects.clone();
        let workspace = &guest.workspace;
        let layer = Layer { workspace: Arc::clone(workspace), objects: objects.clone(), gone };
        let mut placed = std::mem::take(&mut self.inputs);
        let (mut records, mut left_out) = (Vec::new(), Vec::new());
        match &mut self.home {
            Home::Fresh => layer.together(&placed).await?,
            Home::Rebuilt(of_session) => {
                layer.together(&placed).await?;
                records = std::mem::take(of_session);
                let others;
                (others, left_out) = inputs::of_session(records.clone(), &placed);
                left_out.extend(layer.each(&others).await?);
                placed.extend(others);
            }
            Home::Kept(space) => {
                let Some((pending, of_session)) = objects.workspace_of(&self.session.id).await else {
                    objects.used_late(*space).await;
                    return Err(RunRefused::Store);
                };
                records = of_session;
                taken_away(workspace, &pending.remove).await;
                layer.together(&placed).await?;
                left_out = settle(&layer, &self.session.id, pending, &placed).await?;
            }
        }
        // Where nothing lies, nothing is looked up.
        let before = match placed.is_empty() && workspace.is_empty() {
            true => Before::default(),
            false => before(workspace, &records, &placed).await,
        };
        if self.request.programmatic {
            // It may wait long for its caller; its session's other runs do not wait with it.
            self.turn = None;
        }
        Ok(Prepared { seated: self, guest, placed, left_out, records, before, started })
    }

    /// A sandbox for it, or the interpreter that waits.
    async fn guest(&mut self) -> Result<Guest, RunRefused> {
        if self.wants_kernel {
            return self.kernel().await;
        }
        let runs = Arc::clone(&self.runs);
        let profile = match &self.request.language.runtime {
            Runtime::Python => python_profile(&self.hello, &self.request.code),
            Runtime::JavaScript | Runtime::TypeScript => Profile::Node,
            Runtime::Program(_) => {
                let ready = match self.home {
                    Home::Kept(_) => None,
                    _ => runs.agents.ready(),
                };
                let mut agent = match ready {
                    Some(agent) => agent,
                    None => {
                        let _turn = runs.launch_turn(&self.request.caller.tenant).await;
                        runs.agents.open(self.space()).await.map_err(|error| not_launched(&error))?
                    }
                };
                return Ok(Guest {
                    workspace: Arc::new(agent.take_workspace().ok_or(Refusal::LaunchFailed)?),
                    fleeting: agent.fleeting.take(),
                    provenance: agent.provenance,
                    work: Work::Agent(agent),
                });
            }
        };
        let (interpreter, workspace, fleeting) = self.interpreter(profile).await?;
        let provenance = interpreter.provenance();
        Ok(Guest { work: Work::Interpreter(interpreter), workspace, fleeting, provenance })
    }

    /// The session's interpreter, made now where there is none; or one for this run alone.
    async fn kernel(&mut self) -> Result<Guest, RunRefused> {
        let keeps = self.keeps_names();
        if let (true, Some(turn)) = (keeps, &self.turn)
            && let Some((workspace, provenance)) = turn.kernel_place()
        {
            return Ok(Guest { work: Work::Kept, workspace, fleeting: None, provenance });
        }
        if let (true, Some(turn)) = (keeps, &self.turn) {
            // One that died a moment ago would be buried with the new one's place in the books.
            drop(turn.take_kernel());
            self.runs.seats.make_room(turn, &self.runs.config)?;
        }
        let profile = if self.hello.kernels.is_empty() { Profile::PythonData } else { Profile::Kernel };
        let (interpreter, workspace, fleeting) = self.interpreter(profile).await?;
        let provenance = interpreter.provenance();
        let kernel = Kernel { interpreter, workspace: Arc::clone(&workspace), count: 0 };
        let work = match (keeps, &self.turn) {
            (true, Some(turn)) => {
                turn.keep_kernel(kernel);
                Work::Kept
            }
            _ => Work::Kernel(kernel),
        };
        Ok(Guest { work, workspace, fleeting, provenance })
    }

    /// An interpreter that nothing has run in, in the workspace.
    async fn interpreter(
        &self,
        profile: Profile,
    ) -> Result<(Interpreter, Arc<Workspace>, Option<Fleeting>), RunRefused> {
        let runs = &self.runs;
        let slot = match self.home {
            Home::Kept(_) => None,
            _ => runs.slots.take((FRESH, profile), TakenFor::Once),
        };
        let space = slot.as_ref().and_then(Interpreter::space).unwrap_or_else(|| self.space());
        // From here on, whatever becomes of this call.
        let fleeting = Fleeting::of(space, &runs.launcher);
        let mut interpreter = match slot {
            Some(interpreter) => interpreter,
            None => {
                let plan = LaunchPlan {
                    view: true,
                    throwaway: !self.keeps_names(),
                    ..LaunchPlan::new(space, profile, Origin::Warm)
                };
                let _turn = runs.launch_turn(&self.request.caller.tenant).await;
                let launched = runs.launcher.launch(plan).await.map_err(|error| not_launched(&error))?;
                launched.change_directory(WORKSPACE_DIR).await.map_err(|_gone| Refusal::LaunchFailed)?
            }
        };
        let view = interpreter.take_view().ok_or(Refusal::LaunchFailed)?;
        Ok((interpreter, Arc::new(Workspace::new(view)), fleeting))
    }

    /// The session's own, or one that nobody has had.
    fn space(&self) -> SpaceId {
        if let Home::Kept(space) = self.home { space } else { fresh_space() }
    }
}

/// Takes files out of a kept workspace that were deleted since its last run.
async fn taken_away(workspace: &Arc<Workspace>, names: &[String]) {
    if names.is_empty() {
        return;
    }
    let (workspace, names) = (Arc::clone(workspace), names.to_vec());
    let removed = tokio::task::spawn_blocking(move || {
        for name in names {
            if let Err(error) = workspace.remove(Path::new(&name)) {
                tracing::warn!(%error, "a deleted file stays in a workspace");
            }
        }
    });
    drop(removed.await);
}

/// Gives a kept workspace the uploads that it has not got, beneath what the request names. Returns what found no place
/// in it.
async fn settle(
    layer: &Layer,
    session: &str,
    mut pending: Pending,
    listed: &Inputs,
) -> Result<Vec<PathBuf>, RunRefused> {
    let (uploads, mut left_out) = inputs::of_session(pending.place.clone(), listed);
    left_out.extend(layer.each(&uploads).await?);
    // There may be room for it next time.
    let is_left = |record: &FileRecord| matches!(inputs::place(&record.name), Ok(Some(path)) if left_out.contains(&path));
    pending.place.retain(|record| !is_left(record));
    layer.objects.settled(session, &pending).await;
    Ok(left_out)
}

/// The row of a run that has begun. It is written when the run is over, or is given up: an abandoned run is on record as
/// well, whoever has made its caller go.
struct Row {
    store: Store,
    record: Option<AuditRecord>,
    since: Instant,
}

impl Row {
    fn begin(of: &Prepared) -> Row {
        let Prepared { seated, guest, started: (at, since), .. } = of;
        let record = AuditRecord {
            at_ms: epoch_ms(*at),
            tenant: seated.request.caller.tenant.clone(),
            ran: Ran::Program,
            session: Some(seated.session.id.clone()),
            status: Status::Error,
            duration_ms: 0,
            provenance: Some(guest.provenance),
            ended: "given up by its caller".to_owned(),
        };
        Row { store: seated.runs.store.clone(), record: Some(record), since: *since }
    }

    fn finish(mut self, end: RunEnd, language: &str) {
        if let Some(record) = &mut self.record {
            record.status = match end {
                RunEnd::TimeLimit => Status::Timeout,
                end if end.is_success() => Status::Ok,
                _ => Status::Error,
            };
            record.ended = match (end.message(), end.code()) {
                (Some(message), _) => message.into_owned(),
                (None, code) => format!("{language}: exit code {code}"),
            };
        }
    }
}

impl Drop for Row {
    fn drop(&mut self) {
        // Without a runtime the daemon is at its end.
        if let (Some(mut record), Ok(_)) = (self.record.take(), tokio::runtime::Handle::try_current()) {
            record.duration_ms = u64::try_from(self.since.elapsed().as_millis()).unwrap_or(u64::MAX);
            self.store.audit(record);
        }
    }
}

impl Prepared {
    /// The session that the answer names.
    pub fn session_id(&self) -> &str {
        &self.seated.session.id
    }

    /// Runs it to its end, or until this is dropped: but for a session's interpreter, whose names must not stay
    /// half-changed, and which goes on.
    pub async fn complete(self) -> RunDone {
        let (session, keeps_names) = (self.session_id().to_owned(), self.seated.keeps_names());
        let mut running = AbortOnDropHandle::new(tokio::spawn(self.run(None, None)));
        let done = match keeps_names {
            true => running.detach().await,
            false => (&mut running).await,
        };
        done.unwrap_or_else(|_panicked| RunDone::lost(session))
    }

    /// Runs it.
    pub async fn run(self, watcher: Option<Watcher>, tools: Option<ToolPort>) -> RunDone {
        let row = Row::begin(&self);
        let Prepared { seated, guest, placed, left_out, mut records, mut before, started } = self;
        let Guest { work, workspace, mut fleeting, .. } = guest;
        let runs = Arc::clone(&seated.runs);
        let mut went = seated.go(work, watcher, tools).await;
        row.finish(went.end, &seated.request.language.id);
        // In a space that stays nothing may go on beside the session's next run. And while files are looked at, which takes
        // its time, nothing may go on at all: what a program has left running is bounded by no clock any more.
        match (&mut fleeting, went.standing.take()) {
            (Some(fleeting), standing) if workspace.is_empty() => fleeting.ends(standing),
            (_, standing) => drop(standing),
        }
        leave_pictures(&workspace, std::mem::take(&mut went.pictures)).await;
        if let (true, Home::Kept(_)) = (seated.request.programmatic, &seated.home) {
            // Other runs of the session may have ended meanwhile: what they left is theirs.
            records = runs.objects.live_files_of(&seated.session.id).await;
            before.etags = outputs::etags(&records, &placed);
        }
        let Collected { files, deleted, delivery } = outputs::collect(
            &workspace,
            before,
            placed,
            Target {
                objects: &runs.objects,
                caller: &seated.request.caller,
                session: &seated.session,
                style: seated.request.style,
                files_max: runs.config.output_files_max,
                file_bytes_max: runs.config.file_bytes_max,
                bytes_max: runs.config.space_bytes,
                records: &records,
            },
        )
        .await;
        drop(fleeting);
        runs.objects.touch(&seated.session.id).await;
        let Went { mut stdout, mut stderr, mut end, result, error, .. } = went;
        (stdout, stderr) = (text::plain(stdout), text::plain(stderr));
        let bytes_max = runs.config.output_bytes_max;
        if text::cut(&mut stdout, bytes_max) && end.message().is_none() {
            end = RunEnd::StdoutLimit;
        }
        if text::cut(&mut stderr, bytes_max) && end.message().is_none() {
            end = RunEnd::StderrLimit;
        }
        let is_python = matches!(seated.request.language.runtime, Runtime::Python);
        if runs.config.hints && is_python && !end.is_success() {
            text::with_hint(&mut stderr);
        }
        for path in left_out {
            let text = format!("{} was not put into the workspace: it does not fit there", path.display());
            text::with_line(&mut stderr, &text::plain(text));
        }
        if let Some(message) = end.message() {
            text::with_line(&mut stderr, &message);
        }
        RunDone {
            session: seated.session.id.clone(),
            stdout,
            stderr,
            end,
            files,
            deleted,
            delivery,
            wall: started.1.elapsed(),
            runtime: seated.runtime.clone(),
            result,
            error,
        }
    }
}

impl Seated {
    /// Runs the code. A kept interpreter is its turn's again where it still lives.
    async fn go(&self, work: Work, watcher: Option<Watcher>, tools: Option<ToolPort>) -> Went {
        match work {
            Work::Kept => {
                let Some(kernel) = self.turn.as_ref().and_then(Turn::take_kernel) else {
                    // It died when all was ready.
                    return Went::plain(String::new(), String::new(), RunEnd::Lost);
                };
                let (went, kernel) = self.cell(kernel, watcher).await;
                if let (Some(turn), Some(kernel)) = (&self.turn, kernel) {
                    turn.put_kernel(kernel);
                }
                went
            }
            Work::Kernel(kernel) => self.cell(kernel, watcher).await.0,
            Work::Interpreter(interpreter) => self.program(interpreter, watcher, tools).await,
            Work::Agent(agent) => {
                let Runtime::Program(program) = &self.request.language.runtime else {
                    unreachable!("agents are for programs");
                };
                self.command(agent, program, watcher, tools).await
            }
        }
    }

    /// A cell of an interpreter that displays what it is given.
    async fn cell(&self, kernel: Kernel, watcher: Option<Watcher>) -> (Went, Option<Kernel>) {
        let Kernel { interpreter, workspace, count } = kernel;
        let config = &self.runs.config;
        let limits = CellLimits {
            // Characters over both streams, so that each can come to its own limit.
            output_chars_max: config.output_bytes_max.saturating_mul(2),
            stream_bytes_max: Some(config.output_bytes_max),
            grace: Duration::ZERO,
            interrupt_grace: config.interrupt_grace,
            memory_mib_max: config.memory_mib_max,
        };
        let count = count + 1;
        let cell = Cell {
            code: &self.request.code,
            timeout: self.timeout(),
            execution_count: count,
            watcher: watcher.as_ref(),
            argv: Some(&self.request.args),
        };
        let ran = interpreter.run(cell, &limits, &mut self.runs.stop.subscribe()).await;
        let went = Went::of_cell(ran.outcome, self.request.rich);
        // With the value of its last expression, or a traceback.
        let over = went.stdout.len().max(went.stderr.len()) > config.output_bytes_max;
        let kernel = ran.interpreter.filter(|_| !over);
        (went, kernel.map(|interpreter| Kernel { interpreter, workspace, count }))
    }

    async fn program(
        &self,
        interpreter: Interpreter,
        watcher: Option<Watcher>,
        tools: Option<ToolPort>,
    ) -> Went {
        let config = &self.runs.config;
        let limits = ProgramLimits {
            stream_bytes_max: config.output_bytes_max,
            memory_mib_max: config.memory_mib_max,
        };
        let run = ProgramRun {
            code: &self.request.code,
            args: &self.request.args,
            typescript: matches!(self.request.language.runtime, Runtime::TypeScript),
            tools: &self.request.tools,
            timeout: self.timeout(),
            watcher: watcher.as_ref(),
        };
        let (outcome, standing) =
            interpreter.run_program(run, &limits, &mut self.runs.stop.subscribe(), tools).await;
        let standing = standing.map(|interpreter| Box::new(interpreter) as _);
        Went { standing, ..Went::plain(outcome.stdout, outcome.stderr, outcome.end) }
    }

    /// Compiles where the language does, then runs.
    async fn command(
        &self,
        mut agent: Agent,
        program: &Program,
        watcher: Option<Watcher>,
        mut tools: Option<ToolPort>,
    ) -> Went {
        let folder = format!("{SCRATCH}{}", nanoid::nanoid!(SCRATCH_CHARS, &SCRATCH_ALPHABET));
        let mut sink = Sink::new(self.runs.config.output_bytes_max, watcher);
        let mut stop = self.runs.stop.subscribe();
        let deadline = tokio::time::Instant::now() + self.timeout();
        let mut bounds = Bounds { deadline, between_calls: self.timeout(), stop: &mut stop, tools: None };
        let calls = tools.is_some().then(|| folder.clone());
        let code = self.source(&folder);
        let mut source = Some(Source { folder: folder.clone(), name: program.source.clone(), text: code });
        let start = |words: Vec<String>, source: Option<Source>, calls: Option<String>| Start {
            program: Started::Words(words),
            cwd: Some(WORKSPACE_DIR.to_owned()),
            env: program.env_in(&folder),
            stdin_ends: true,
            source,
            calls,
        };
        let mut end = RunEnd::Exited(0);
        if let Some(words) = program.compile_words(&folder) {
            if let Some(max) = program.compile_time_max {
                bounds.deadline = deadline.min(tokio::time::Instant::now() + max);
            }
            end = agent.step(start(words, source.take(), None), &mut sink, &mut bounds).await;
            bounds.deadline = deadline;
        }
        if end.is_success() {
            bounds.tools = tools.as_mut();
            let words = program.run_words(&folder, &self.request.args);
            end = agent.step(start(words, source.take(), calls), &mut sink, &mut bounds).await;
        }
        let (stdout, stderr) = sink.into_texts();
        Went { standing: Some(Box::new(agent)), ..Went::plain(stdout, stderr, end) }
    }

    /// The program's text as it is run.
    fn source(&self, folder: &str) -> String {
        let Language { id, .. } = &*self.request.language;
        let code = &self.request.code;
        match id.as_str() {
            // On one line with the script's first, so that lines keep their numbers.
            BASH if self.request.programmatic => {
                format!("{} {code}", crate::harness::program::bash_stubs(&self.request.tools, folder))
            }
            BASH if self.runs.config.bash_strict => text::strict_bash(code),
            _ => code.clone(),
        }
    }

    fn timeout(&self) -> Duration {
        let most = self.runs.config.timeout_max;
        self.request.timeout.map_or(most, |timeout| timeout.min(most))
    }
}

/// The language whose programs get a prelude and stubs.
const BASH: &str = "bash";
const SCRATCH_ALPHABET: [char; 32] = [
    'a', 'b', 'c', 'd', 'e', 'f', 'g', 'h', 'i', 'j', 'k', 'l', 'm', 'n', 'o', 'p', 'q', 'r', 's', 't', 'u',
    'v', 'w', 'x', 'y', 'z', '2', '3', '4', '5', '6', '7',
];

impl RunDone {
    /// The answer where a fault of ours hides what became of the program.
    pub(super) fn lost(session: String) -> RunDone {
        let end = RunEnd::Lost;
        let mut stderr = String::new();
        if let Some(message) = end.message() {
            text::with_line(&mut stderr, &message);
        }
        RunDone {
            session,
            stdout: String::new(),
            stderr,
            end,
            files: Vec::new(),
            deleted: Vec::new(),
            delivery: Delivery::default(),
            wall: Duration::ZERO,
            runtime: None,
            result: None,
            error: None,
        }
    }
}

impl Went {
    fn plain(stdout: String, stderr: String, end: RunEnd) -> Went {
        Went { stdout, stderr, end, result: None, error: None, pictures: Vec::new(), standing: None }
    }

    /// A notebook's outputs as a program's: the value of the last expression is printed, an error's traceback goes to
    /// stderr, pictures become files.
    fn of_cell(outcome: CellOutcome, rich: bool) -> Went {
        let mut went =
            Went::plain(outcome.stream(Stream::Stdout), outcome.stream(Stream::Stderr), RunEnd::Exited(0));
        for output in outcome.outputs {
            match output {
                Output::Stream { .. } => {}
                Output::ExecuteResult { data, .. } => {
                    went.take_picture(&data);
                    if let (false, Some(text)) = (rich, data.get("text/plain").and_then(|text| text.as_str()))
                    {
                        text::with_line(&mut went.stdout, text);
                    }
                    went.result = rich.then_some(data);
                }
                Output::DisplayData { data, .. } => went.take_picture(&data),
                Output::Error(error) => went.take_error(error),
            }
        }
        went.end = match outcome.ending {
            Ending::Completed => RunEnd::Exited(0),
            Ending::Raised if went.end == RunEnd::Exited(0) && went.error.is_some() => RunEnd::Exited(1),
            Ending::Raised => went.end,
            Ending::TimedOut { .. } | Ending::Interrupted { .. } | Ending::Unstoppable { .. } => {
                RunEnd::TimeLimit
            }
            Ending::Died(end) => RunEnd::of_launcher(end),
            Ending::StreamLimit(Stream::Stdout) => RunEnd::StdoutLimit,
            Ending::StreamLimit(Stream::Stderr) => RunEnd::StderrLimit,
            Ending::Stopped(_) => RunEnd::Stopped,
            // It never ran, and stderr has the reason.
            Ending::CodeTooLong(_) => RunEnd::Exited(1),
            Ending::BrokeProtocol | Ending::Unreachable | Ending::Lost(_) => RunEnd::Lost,
        };
        went
    }

    fn take_picture(&mut self, data: &Bundle) {
        let picture = data.get("image/png").and_then(|data| data.as_str());
        let picture = picture.and_then(|text| STANDARD.decode(text.replace('\n', "")).ok());
        self.pictures.extend(picture.filter(|_| self.pictures.len() < PICTURES_MAX));
    }

    /// `exit()` is no error where it says that all went well, and its number is the program's.
    fn take_error(&mut self, error: ErrorOutput) {
        if error.ename == "SystemExit" {
            match error.evalue.parse::<i32>() {
                Ok(code) => self.end = RunEnd::Exited(code & 0xff),
                Err(_) if error.evalue.is_empty() || error.evalue == "None" => {}
                Err(_) => {
                    text::with_line(&mut self.stderr, &error.evalue);
                    self.end = RunEnd::Exited(1);
                }
            }
            return;
        }
        let traceback: Vec<String> = error.traceback.into_iter().map(text::plain).collect();
        let shown = match traceback.is_empty() {
            true => format!("{}: {}", error.ename, error.evalue),
            false => traceback.join("\n"),
        };
        text::with_line(&mut self.stderr, shown.trim_end_matches('\n'));
        self.error = Some(ErrorOutput { traceback, ..error });
    }
}

impl Runs {
    /// Whether a language can be run here at all.
    pub(super) async fn check_runtime(&self, language: &Language, hello: &Hello) -> Result<(), RunRefused> {
        let there = match &language.runtime {
            Runtime::Python => hello.python.is_some(),
            Runtime::JavaScript => hello.node.is_some(),
            Runtime::TypeScript | Runtime::Program(_) => {
                let installed = self.look_for_languages().await;
                // Nothing is known of it, so the caller may well try again.
                installed.ok_or(Refusal::LaunchFailed)?.has(language)
            }
        };
        if there { Ok(()) } else { Err(RunRefused::NoRuntime(language.id.clone())) }
    }

    /// Looks for all languages in a sandbox.
    pub(super) async fn probe(&self) -> Option<Availability> {
        let mut agent = self.agents.open(fresh_space()).await.map_err(|error| not_launched(&error)).ok()?;
        let start = Start {
            program: Started::Words(self.languages.question()),
            cwd: None,
            env: Vec::new(),
            stdin_ends: true,
            source: None,
            calls: None,
        };
        let mut sink = Sink::new(PROBE_BYTES_MAX, None);
        let mut stop = self.stop.subscribe();
        let deadline = tokio::time::Instant::now() + PROBE_MAX;
        let mut bounds = Bounds { deadline, between_calls: PROBE_MAX, stop: &mut stop, tools: None };
        let end = agent.step(start, &mut sink, &mut bounds).await;
        let (said, complaints) = sink.into_texts();
        match end {
            RunEnd::Exited(_) => Some(self.languages.understand(&said)),
            end => {
                tracing::warn!(?end, complaints, "the languages of a sandbox could not be looked for");
                None
            }
        }
    }
}

/// What lies in the workspace before the program runs.
async fn before(workspace: &Arc<Workspace>, records: &[FileRecord], placed: &Inputs) -> Before {
    let looked = Arc::clone(workspace);
    let content = tokio::task::spawn_blocking(move || looked.look_and_clear()).await;
    let content = content.ok().and_then(Result::ok).unwrap_or_default();
    Before { content, etags: outputs::etags(records, placed) }
}

/// `plot_N.png` for each picture that a kernel displayed, beside those that are there.
async fn leave_pictures(workspace: &Arc<Workspace>, pictures: Vec<Vec<u8>>) {
    if pictures.is_empty() {
        return;
    }
    let workspace = Arc::clone(workspace);
    let left = tokio::task::spawn_blocking(move || -> std::io::Result<()> {
        let mut number = 0;
        let mut outcome = Ok(());
        for picture in pictures {
            let path = loop {
                number += 1;
                let path = PathBuf::from(format!("plot_{number}.png"));
                if workspace.open(&path).is_err() {
                    break path;
                }
            };
            let memory = rustix::fs::memfd_create("picture", rustix::fs::MemfdFlags::CLOEXEC)?;
            let mut file = std::fs::File::from(memory);
            file.write_all(&picture)?;
            file.rewind()?;
            // The next one may be smaller.
            outcome = outcome.and(workspace.put(&path, file, false));
        }
        outcome
    });
    if let Ok(Err(error)) = left.await {
        tracing::info!(%error, "a picture could not be left in a workspace");
    }
}

fn python_profile(hello: &Hello, code: &str) -> Profile {
    select::profile(hello, &Tier::Native(crate::engine::Language::Python), code)
}

fn not_launched(error: &dyn std::error::Error) -> Refusal {
    let cause = error.source().map(ToString::to_string);
    tracing::error!(%error, cause, "no sandbox for a run");
    Refusal::LaunchFailed
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::harness::frame::FrameTooLong;

    fn went(ending: Ending) -> Went {
        let mut outputs = vec![Output::Stream { name: Stream::Stdout, text: "said".to_owned() }];
        outputs.extend(ending.error(512).map(Output::Error));
        Went::of_cell(CellOutcome { ending, outputs }, false)
    }

    #[test]
    fn a_cells_end_is_told_as_a_programs() {
        let time_limit = Ending::Interrupted { timeout: Duration::from_secs(1) };
        for (ending, end) in [
            (Ending::Completed, RunEnd::Exited(0)),
            (time_limit, RunEnd::TimeLimit),
            (Ending::StreamLimit(Stream::Stdout), RunEnd::StdoutLimit),
            (Ending::StreamLimit(Stream::Stderr), RunEnd::StderrLimit),
            (Ending::BrokeProtocol, RunEnd::Lost),
        ] {
            assert_eq!(went(ending).end, end, "{ending:?}");
        }
    }

    #[test]
    fn code_that_is_too_long_never_ran_and_says_why() {
        let too_long = FrameTooLong { bytes: 1 << 30 };
        let went = went(Ending::CodeTooLong(too_long));
        assert_eq!((went.end, went.stdout.as_str()), (RunEnd::Exited(1), "said"));
        assert!(went.stderr.contains(&too_long.to_string()), "{}", went.stderr);
        assert!(went.error.is_some());
    }
}
