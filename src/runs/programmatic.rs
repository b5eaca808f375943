//! Programs that call their caller's tools: between two requests the program waits where it stands, and each of its
//! statements runs once.
//!
//! ```text
//!  start ──► Driven ──calls──► Waiting (10 min) ──their results──► Driven ──► … ──► over: the answer is the last word
//!               │ its request goes away: the program is ended, or waits again where it was continued
//!               └ cancelled: ended
//! ```
//!
//! What a program says of its calls is a guest's word: ids are used once, names are looked up among the registered
//! ones, and the rest goes through as it is.
#![forbid(unsafe_code)]

use std::collections::{HashMap, HashSet};
use std::sync::{Arc, Mutex, MutexGuard};
use std::time::Duration;

use tokio::sync::mpsc;
use tokio::time::{Instant, sleep, timeout_at};
use tokio_util::sync::CancellationToken;
use tokio_util::task::AbortOnDropHandle;

use crate::engine::{Caller, Output, Piece, Pieces, Stream, TenantId, Watcher, pieces};
use crate::harness::program::{ToolAnswer, ToolCall, ToolPort};
use crate::runs::{RunDone, RunEnd, RunRefused, text};

/// How long a program waits for the results of its calls. Its own tests do not wait so long.
const WAITING_MAX: Duration = Duration::from_millis(if cfg!(test) { 900 } else { 600_000 });
/// How long calls that come one by one are waited for, so that those made side by side go in one round.
const GATHER: Duration = Duration::from_millis(25);
/// How long a program that got some of its results may take to do something, before it is asked about the others again.
const SETTLE: Duration = Duration::from_millis(200);
/// The same for all of them together: a program that never stops calling gets its answers all the same.
const GATHER_MAX: Duration = Duration::from_secs(1);
/// Names under which one execution can be cancelled: one for each of its requests.
const REQUEST_IDS_MAX: usize = 64;
/// Of a continuation token, behind its prefix.
const TOKEN_CHARS: usize = 32;
const TOKEN_PREFIX: &str = "ptc_";

/// How many programs with tools there may be: any of them may come to wait for results, in its place among what runs.
#[derive(Copy, Clone, Debug, PartialEq, Eq)]
pub struct WaitingLimits {
    pub per_tenant_max: usize,
    pub all_max: usize,
}

/// Names one execution to its caller. Only who has it can go on.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct Token(String);

impl Token {
    fn fresh() -> Token {
        Token(format!("{TOKEN_PREFIX}{}", nanoid::nanoid!(TOKEN_CHARS)))
    }

    /// `None` when it cannot be one.
    pub fn parse(text: &str) -> Option<Token> {
        let rest = text.strip_prefix(TOKEN_PREFIX)?;
        let fits = |byte: u8| byte.is_ascii_alphanumeric() || byte == b'-' || byte == b'_';
        (rest.len() == TOKEN_CHARS && rest.bytes().all(fits)).then(|| Token(text.to_owned()))
    }

    pub fn as_str(&self) -> &str {
        &self.0
    }
}

/// What a request is answered with.
#[derive(Clone, Debug, PartialEq)]
pub enum Round {
    Calls {
        token: Token,
        session: String,
        calls: Vec<ToolCall>,
        stdout: String,
    },
    Done(Box<RunDone>),
    /// It was ended, for a call that nobody can carry out.
    Unregistered {
        session: String,
        name: String,
        stdout: String,
        stderr: String,
    },
    Cancelled {
        session: String,
        stdout: String,
        stderr: String,
    },
}

/// Why a request was not taken.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum NotContinued {
    #[error("Execution not found or expired")]
    Gone,
    #[error("Unauthorized")]
    Foreign,
    #[error("A continuation of this execution is already running")]
    Driven,
    #[error("Tool result for unknown call '{0}'")]
    UnknownCall(String),
    #[error("Duplicate tool result for call '{0}'")]
    Twice(String),
    #[error("Too many executions wait for tool results ({max})")]
    TooMany { max: usize },
    #[error(transparent)]
    Refused(#[from] RunRefused),
}

/// A program that is ready to be run.
pub struct Start {
    pub owner: Caller,
    pub session: String,
    /// Names that it may call.
    pub registered: HashSet<String>,
    /// Its calls come one by one.
    pub gathers: bool,
}

/// All executions that wait or are driven. One per daemon.
#[derive(Debug)]
pub struct Programmatic {
    limits: WaitingLimits,
    books: Mutex<Books>,
}

#[derive(Debug, Default)]
struct Books {
    executions: HashMap<Token, Entry>,
    requests: HashMap<(Caller, String), CancellationToken>,
    serial: u64,
    closed: bool,
}

impl Books {
    fn check_room(&self, tenant: &TenantId, limits: WaitingLimits) -> Result<(), NotContinued> {
        let WaitingLimits { per_tenant_max, all_max } = limits;
        let own = self.executions.values().filter(|entry| entry.owner.tenant == *tenant).count();
        match (own >= per_tenant_max, self.executions.len() >= all_max) {
            (true, _) => Err(NotContinued::TooMany { max: per_tenant_max }),
            (_, true) => Err(NotContinued::TooMany { max: all_max }),
            (false, false) => Ok(()),
        }
    }
}

#[derive(Debug)]
struct Entry {
    owner: Caller,
    state: State,
}

#[derive(Debug)]
enum State {
    Driven,
    /// Until the state with this number expires.
    Waiting {
        live: Box<Live>,
        serial: u64,
    },
}

/// A program and both ends of what goes on between it and its caller. Dropped it ends.
#[derive(Debug)]
struct Live {
    session: String,
    registered: HashSet<String>,
    gathers: bool,
    run: AbortOnDropHandle<RunDone>,
    calls: mpsc::UnboundedReceiver<Vec<ToolCall>>,
    answers: mpsc::Sender<Vec<ToolAnswer>>,
    pieces: Pieces,
    stdout: String,
    stderr: String,
    /// In the order they were made.
    unanswered: Vec<ToolCall>,
    used: HashSet<String>,
    cancelled: CancellationToken,
    names: Vec<RequestName>,
}

/// A request's own name for itself, as long as it can be cancelled.
#[derive(Debug)]
pub struct RequestName {
    table: Arc<Programmatic>,
    key: Option<(Caller, String)>,
    cancelled: CancellationToken,
}

impl Drop for RequestName {
    fn drop(&mut self) {
        if let Some(key) = &self.key {
            self.table.lock().requests.remove(key);
        }
    }
}

impl RequestName {
    /// Ends once it has been cancelled.
    pub async fn cancelled(&self) {
        self.cancelled.cancelled().await;
    }
}

impl Programmatic {
    pub fn new(limits: WaitingLimits) -> Arc<Programmatic> {
        Arc::new(Programmatic { limits, books: Mutex::default() })
    }

    /// Whether one more program may be started: each may come to wait. What is true now is asked again at its start.
    pub fn check_room(&self, tenant: &TenantId) -> Result<(), NotContinued> {
        self.lock().check_room(tenant, self.limits)
    }

    /// A request that may be cancelled by the name it gave. One that has no name, or one that is taken, cannot be.
    pub fn name(self: &Arc<Self>, owner: &Caller, id: Option<&str>) -> RequestName {
        self.name_for(owner, id, CancellationToken::new())
    }

    fn name_for(
        self: &Arc<Self>,
        owner: &Caller,
        id: Option<&str>,
        cancelled: CancellationToken,
    ) -> RequestName {
        let key = id.map(|id| (owner.clone(), id.to_owned())).filter(|key| {
            let mut books = self.lock();
            let free = !books.requests.contains_key(key);
            if free {
                books.requests.insert(key.clone(), cancelled.clone());
            }
            free
        });
        RequestName { table: Arc::clone(self), key, cancelled }
    }

    /// Ends what runs or waits under that name; false when there is none of the caller's.
    pub fn cancel(&self, owner: &Caller, id: &str) -> bool {
        let cancelled = self.lock().requests.get(&(owner.clone(), id.to_owned())).cloned();
        let Some(cancelled) = cancelled else { return false };
        cancelled.cancel();
        // What waits is driven by nobody who would hear of it.
        let mut books = self.lock();
        let waiting = books.executions.iter().find_map(|(token, entry)| match &entry.state {
            State::Waiting { live, .. } => live.cancelled.is_cancelled().then(|| token.clone()),
            State::Driven => None,
        });
        let ended = waiting.and_then(|token| books.executions.remove(&token));
        drop(books);
        drop(ended);
        true
    }

    /// Runs a program up to its first calls or its end. `run` makes it, with the ends that it needs.
    pub async fn start<F>(
        self: &Arc<Self>,
        start: Start,
        name: RequestName,
        run: impl FnOnce(Watcher, ToolPort) -> F,
    ) -> Result<Round, NotContinued>
    where
        F: Future<Output = RunDone> + Send + 'static,
    {
        let Start { owner, session, registered, gathers } = start;
        let token = Token::fresh();
        {
            let mut books = self.lock();
            books.check_room(&owner.tenant, self.limits)?;
            books.executions.insert(token.clone(), Entry { owner, state: State::Driven });
        }
        let (watcher, pieces) = pieces();
        let (calls_out, calls) = mpsc::unbounded_channel();
        let (answers, answers_in) = mpsc::channel(1);
        let port = ToolPort { calls: calls_out, answers: answers_in };
        let live = Box::new(Live {
            session,
            registered,
            gathers,
            run: AbortOnDropHandle::new(tokio::spawn(run(watcher, port))),
            calls,
            answers,
            pieces,
            stdout: String::new(),
            stderr: String::new(),
            unanswered: Vec::new(),
            used: HashSet::new(),
            cancelled: name.cancelled.clone(),
            names: vec![name],
        });
        Driver::new(self, token, live, false).drive(None).await
    }

    /// Hands results to a program that waits for them, and drives it on. Results that it has got already change
    /// nothing: a caller whose answer was lost asks again and finds the round it missed.
    pub async fn go_on(
        self: &Arc<Self>,
        owner: &Caller,
        token: &Token,
        results: Vec<ToolAnswer>,
        request_id: Option<&str>,
    ) -> Result<Round, NotContinued> {
        let mut live = self.take(owner, token, &results)?;
        if request_id.is_some() && live.names.len() < REQUEST_IDS_MAX {
            let name = self.name_for(owner, request_id, live.cancelled.clone());
            live.names.push(name);
        }
        let answers = live.settle(results);
        Driver::new(self, token.clone(), live, true).drive(Some(answers)).await
    }

    /// The program behind a token, now driven by the caller.
    fn take(&self, owner: &Caller, token: &Token, results: &[ToolAnswer]) -> Result<Box<Live>, NotContinued> {
        let mut books = self.lock();
        let entry = books.executions.get_mut(token).ok_or(NotContinued::Gone)?;
        if entry.owner != *owner {
            return Err(NotContinued::Foreign);
        }
        let State::Waiting { live, .. } = &entry.state else { return Err(NotContinued::Driven) };
        let mut seen = HashSet::new();
        for result in results {
            if !live.used.contains(&result.id) {
                return Err(NotContinued::UnknownCall(shown(&result.id)));
            }
            if !seen.insert(&result.id) {
                return Err(NotContinued::Twice(shown(&result.id)));
            }
        }
        match std::mem::replace(&mut entry.state, State::Driven) {
            State::Waiting { live, .. } => Ok(live),
            State::Driven => unreachable!("it was waiting a moment ago"),
        }
    }

    /// Lets a program wait for its results; after [`WAITING_MAX`] it is ended.
    fn wait(self: &Arc<Self>, token: &Token, live: Box<Live>) {
        let mut books = self.lock();
        books.serial += 1;
        let (serial, closed) = (books.serial, books.closed);
        let ended = match books.executions.get_mut(token) {
            Some(entry) if !closed && !live.cancelled.is_cancelled() => {
                entry.state = State::Waiting { live, serial };
                None
            }
            _ => Some((books.executions.remove(token), live)),
        };
        drop(books);
        if ended.is_none() {
            let (table, token) = (Arc::downgrade(self), token.clone());
            tokio::spawn(async move {
                sleep(WAITING_MAX).await;
                if let Some(table) = table.upgrade() {
                    table.expire(&token, serial);
                }
            });
        }
        drop(ended);
    }

    fn expire(&self, token: &Token, serial: u64) {
        let mut books = self.lock();
        let is_it = |entry: &Entry| matches!(entry.state, State::Waiting { serial: of, .. } if of == serial);
        let expired = books.executions.get(token).is_some_and(is_it).then(|| books.executions.remove(token));
        drop(books);
        drop(expired);
    }

    /// Ends what waits, and from now on whatever comes to wait.
    pub fn close(&self) {
        let mut books = self.lock();
        books.closed = true;
        let is_driven = |entry: &Entry| matches!(entry.state, State::Driven);
        let (kept, ended) =
            std::mem::take(&mut books.executions).into_iter().partition(|(_, entry)| is_driven(entry));
        books.executions = kept;
        drop(books);
        drop::<HashMap<Token, Entry>>(ended);
    }

    /// Executions that wait, and that are driven.
    pub fn counts(&self) -> (usize, usize) {
        let books = self.lock();
        let waits = |entry: &&Entry| matches!(entry.state, State::Waiting { .. });
        let waiting = books.executions.values().filter(waits).count();
        (waiting, books.executions.len() - waiting)
    }

    fn lock(&self) -> MutexGuard<'_, Books> {
        self.books.lock().expect("no code panics while it holds the executions")
    }
}

/// The beginning of a caller's word, for a message.
fn shown(id: &str) -> String {
    id.chars().filter(|character| !character.is_control()).take(64).collect()
}

/// One request's hold on a program. Dropped before its end the request has gone away.
struct Driver {
    table: Arc<Programmatic>,
    token: Token,
    live: Option<Box<Live>>,
    /// Its caller has a token to come back with.
    waits_again: bool,
    /// The execution is still this request's.
    holds: bool,
}

impl Drop for Driver {
    fn drop(&mut self) {
        match self.live.take() {
            Some(live) if self.waits_again => self.table.wait(&self.token, live),
            left if self.holds => {
                let entry = self.table.lock().executions.remove(&self.token);
                drop((entry, left));
            }
            _ => {}
        }
    }
}

/// What a program did next.
enum Next {
    Calls,
    Done(Box<RunDone>),
    Unregistered(String),
    Cancelled,
}

impl Driver {
    fn new(table: &Arc<Programmatic>, token: Token, live: Box<Live>, waits_again: bool) -> Driver {
        Driver { table: Arc::clone(table), token, live: Some(live), waits_again, holds: true }
    }

    async fn drive(mut self, answers: Option<Vec<ToolAnswer>>) -> Result<Round, NotContinued> {
        let live = self.live.as_mut().expect("it is taken at the end");
        let next = live.next(answers).await;
        let live = self.live.take().expect("it was there above");
        match next {
            Next::Calls => {
                let round = Round::Calls {
                    token: self.token.clone(),
                    session: live.session.clone(),
                    calls: live.unanswered.clone(),
                    stdout: text::plain(live.stdout.clone()),
                };
                self.holds = false;
                self.table.wait(&self.token, live);
                Ok(round)
            }
            Next::Done(done) => Ok(Round::Done(done)),
            Next::Unregistered(name) => {
                let (session, stdout, stderr) = live.last_words();
                Ok(Round::Unregistered { session, name, stdout, stderr })
            }
            Next::Cancelled => {
                let (session, stdout, stderr) = live.last_words();
                Ok(Round::Cancelled { session, stdout, stderr })
            }
        }
    }
}

impl Live {
    /// Takes the results of calls that wait for one.
    fn settle(&mut self, results: Vec<ToolAnswer>) -> Vec<ToolAnswer> {
        let mut fresh = Vec::new();
        for result in results {
            if let Some(at) = self.unanswered.iter().position(|call| call.id == result.id) {
                self.unanswered.remove(at);
                fresh.push(result);
            }
        }
        fresh
    }

    /// Drives the program until it has called, or is over.
    async fn next(&mut self, answers: Option<Vec<ToolAnswer>>) -> Next {
        // Where it is over already, that is told below.
        if let Some(answers) = answers.filter(|answers| !answers.is_empty()) {
            drop(self.answers.send(answers).await);
        }
        let (cancelled, waits_for_more) = (self.cancelled.clone(), !self.unanswered.is_empty());
        let next = tokio::select! {
            next = self.calls_or_end() => next,
            () = cancelled.cancelled() => Next::Cancelled,
            // It has got some, and may well need the others to do anything.
            () = sleep(SETTLE), if waits_for_more => Next::Calls,
        };
        let next = match next {
            Next::Calls if self.gathers => tokio::select! {
                next = self.gather() => next,
                () = cancelled.cancelled() => Next::Cancelled,
            },
            next => next,
        };
        self.hear();
        next
    }

    /// Takes calls for as long as they come close upon each other, and no longer than [`GATHER_MAX`].
    async fn gather(&mut self) -> Next {
        let end = Instant::now() + GATHER_MAX;
        while let Ok(Some(calls)) = timeout_at(end.min(Instant::now() + GATHER), self.calls.recv()).await {
            if let Err(next) = self.take_calls(calls) {
                return next;
            }
        }
        Next::Calls
    }

    async fn calls_or_end(&mut self) -> Next {
        loop {
            tokio::select! {
                // What it has called before its end is not called any more.
                biased;
                done = &mut self.run => {
                    let lost = |_panicked| RunDone::lost(self.session.clone());
                    return Next::Done(Box::new(done.unwrap_or_else(lost)));
                }
                Some(calls) = self.calls.recv() => {
                    let known = self.unanswered.len();
                    // With those that were made while their caller was busy with others.
                    let mut calls = Some(calls);
                    while let Some(made) = calls {
                        if let Err(next) = self.take_calls(made) {
                            return next;
                        }
                        calls = self.calls.try_recv().ok();
                    }
                    if self.unanswered.len() > known {
                        return Next::Calls;
                    }
                }
            }
        }
    }

    /// What ends the program, if it has called a tool that is none. Ids that were used before are dropped.
    fn take_calls(&mut self, calls: Vec<ToolCall>) -> Result<(), Next> {
        for call in calls {
            if !self.registered.contains(&call.name) {
                return Err(Next::Unregistered(call.name));
            }
            if self.used.insert(call.id.clone()) {
                self.unanswered.push(call);
            }
        }
        Ok(())
    }

    /// What it has printed so far.
    fn hear(&mut self) {
        while let Some(piece) = self.pieces.try_recv() {
            if let Piece::Output { output: Output::Stream { name, text }, .. } = piece {
                match name {
                    Stream::Stdout => self.stdout.push_str(&text),
                    Stream::Stderr => self.stderr.push_str(&text),
                }
            }
        }
    }

    fn last_words(mut self: Box<Self>) -> (String, String, String) {
        self.hear();
        let (stdout, stderr) = (std::mem::take(&mut self.stdout), std::mem::take(&mut self.stderr));
        (std::mem::take(&mut self.session), text::plain(stdout), text::plain(stderr))
    }
}

/// What went wrong, in the words that the client passes on to its model; any other it replaces.
pub fn error_text(end: RunEnd) -> String {
    match end {
        RunEnd::Exited(_) | RunEnd::Signaled(_) => format!("Sandbox exited with code {}", end.code()),
        RunEnd::TimeLimit => "Time limit exceeded".to_owned(),
        RunEnd::StdoutLimit => "stdout length exceeded".to_owned(),
        RunEnd::StderrLimit => "stderr length exceeded".to_owned(),
        RunEnd::OutOfMemory => "Out of memory".to_owned(),
        _ => FAILED.to_owned(),
    }
}

/// For whatever else has ended a program.
pub const FAILED: &str = "Execution failed or timed out";

pub fn unregistered_text(name: &str) -> String {
    format!("Sandbox requested an unregistered tool: {}", shown(name))
}

#[cfg(test)]
mod tests;
