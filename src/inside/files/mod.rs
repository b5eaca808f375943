//! The space helper: file operations as the guest of a space would see them.
//!
//! One thread reads calls from descriptor 3; each call has a thread of its own, so that a slow search holds up
//! nothing, and a time limit. The daemon bounds how many there are, and so do we. No guest code ever runs in this
//! sandbox; but every name, link and file in the space is of a guest's making and may change at any moment.
#![forbid(unsafe_code)]

use std::cell::Cell;
use std::collections::HashMap;
use std::os::fd::OwnedFd;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::path::{Path, PathBuf};
use std::process::ExitCode;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Condvar, Mutex, MutexGuard};
use std::time::{Duration, Instant};

use rustix::fs::Stat;
use rustix::net::RecvFlags;

use crate::files::wire::{
    self, Answer, Answered, CALL_BYTES_MAX, Call, FRAME_BYTES_MAX, Fault, FaultKind, Finish, HEADER_BYTES,
    Header, Kind, Op,
};
use crate::sys::{packet, stage};

mod edit;
mod find;
mod grep;
mod place;
mod tar;
mod text;
mod tree;
mod walk;

#[cfg(test)]
mod tests;

use place::View;

/// What an operation comes to.
type Outcome<T> = Result<T, Fault>;

/// Calls at once; the daemon sends fewer.
const CALLS_MAX: usize = 64;
/// Stack of a call's thread. Nothing here recurses.
const STACK_BYTES: usize = 512 * 1024;
/// How long after the end of a stream the daemon may take to say that it was all.
const FINISH_MAX: Duration = Duration::from_secs(30);
/// How long clearing up after a failed call may take.
const CLEARING_MAX: Duration = Duration::from_secs(60);

/// Serves until the other end of descriptor 3 is closed.
pub(super) fn serve() -> ExitCode {
    let Ok(mut inherited) = stage::inherited(1) else { return ExitCode::FAILURE };
    let socket = inherited.pop().expect("one was asked for");
    let (home, temporary) = (home(), PathBuf::from(temp_dir()));
    // Without namespaces the space lies elsewhere, and these paths are the host's.
    let has_own_root = temporary == Path::new(OWN_TEMP_DIR);
    let mut trees = vec![home.as_path(), temporary.as_path()];
    trees.extend(has_own_root.then_some(Path::new("/mnt/data")));
    match View::new(&home, &trees, has_own_root) {
        Ok(view) => {
            Server::new(view, socket).run();
            ExitCode::SUCCESS
        }
        Err(_) => ExitCode::FAILURE,
    }
}

/// The folder for temporary files of a sandbox with a root of its own.
const OWN_TEMP_DIR: &str = "/tmp";

fn home() -> PathBuf {
    std::env::var_os("HOME").map_or_else(|| PathBuf::from("/home/sandbox"), PathBuf::from)
}

/// Where guests keep temporary files, and where an upload without a path goes.
fn temp_dir() -> String {
    std::env::var("TMPDIR").unwrap_or_else(|_| OWN_TEMP_DIR.to_owned())
}

fn mode_text(stat: &Stat) -> String {
    format!("{:o}", stat.st_mode & 0o7777)
}

/// How long a call may still take, and whether anybody waits for it.
struct Clock {
    limit: Duration,
    deadline: Cell<Instant>,
    cancelled: Arc<AtomicBool>,
}

impl Clock {
    fn new(limit: Duration, cancelled: Arc<AtomicBool>) -> Clock {
        Clock { limit, deadline: Cell::new(Instant::now() + limit), cancelled }
    }

    /// For what must be done whether or not anybody waits.
    fn for_clearing() -> Clock {
        Clock::new(CLEARING_MAX, Arc::default())
    }

    fn check(&self) -> Outcome<()> {
        if self.cancelled.load(Ordering::Relaxed) || Instant::now() > self.deadline.get() {
            return Err(Fault::timed_out());
        }
        Ok(())
    }

    /// A stream moved on.
    fn renew(&self) -> Outcome<()> {
        if self.cancelled.load(Ordering::Relaxed) {
            return Err(Fault::timed_out());
        }
        self.deadline.set(Instant::now() + self.limit);
        Ok(())
    }
}

/// What the receiving thread tells a call that runs.
#[derive(Default)]
struct Signals {
    cancelled: Arc<AtomicBool>,
    finish: Mutex<Option<Finish>>,
    told: Condvar,
}

impl Signals {
    fn cancel(&self) {
        let _finish = self.lock();
        self.cancelled.store(true, Ordering::Relaxed);
        self.told.notify_all();
    }

    fn finish(&self, finish: Finish) {
        *self.lock() = Some(finish);
        self.told.notify_all();
    }

    /// Waits until the daemon says that a stream came whole. One whose sender went away has not.
    fn finished(&self) -> Outcome<Finish> {
        let mut finish = self.lock();
        loop {
            if self.cancelled.load(Ordering::Relaxed) {
                return Err(Fault::timed_out());
            }
            if let Some(finish) = finish.take() {
                return Ok(finish);
            }
            let waited = self.told.wait_timeout(finish, FINISH_MAX);
            let (again, timeout) = waited.expect("no code panics while it holds a call's signals");
            finish = again;
            if timeout.timed_out() && finish.is_none() {
                return Err(Fault::timed_out());
            }
        }
    }

    fn lock(&self) -> MutexGuard<'_, Option<Finish>> {
        self.finish.lock().expect("no code panics while it holds a call's signals")
    }
}

struct Shared {
    view: View,
    socket: OwnedFd,
    history: Mutex<edit::History>,
    running: Mutex<HashMap<u64, Arc<Signals>>>,
}

struct Server {
    shared: Arc<Shared>,
    /// Pieces of messages that have not come whole.
    pieces: HashMap<u64, (Vec<u8>, Vec<OwnedFd>)>,
}

impl Server {
    fn new(view: View, socket: OwnedFd) -> Server {
        let (history, running) = (Mutex::default(), Mutex::default());
        Server { shared: Arc::new(Shared { view, socket, history, running }), pieces: HashMap::new() }
    }

    /// Receives until nobody can send any more; then ends what runs and waits until it has cleared up.
    fn run(mut self) {
        let mut buffer = vec![0_u8; HEADER_BYTES + FRAME_BYTES_MAX];
        loop {
            match packet::receive(&self.shared.socket, &mut buffer, RecvFlags::empty()) {
                Ok((0, _)) => break,
                Ok((length, descriptors)) => {
                    if self.take(&buffer[..length], descriptors).is_err() {
                        break;
                    }
                }
                Err(error) if error.kind() == std::io::ErrorKind::Interrupted => {}
                Err(_) => break,
            }
        }
        for signals in self.shared.running().values() {
            signals.cancel();
        }
        let until = Instant::now() + CLEARING_MAX;
        while !self.shared.running().is_empty() && Instant::now() < until {
            std::thread::sleep(Duration::from_millis(5));
        }
    }

    fn take(&mut self, packet: &[u8], descriptors: Vec<OwnedFd>) -> Result<(), wire::Malformed> {
        let (Header { id, kind }, payload) = Header::split(packet)?;
        if kind == Kind::Cancel {
            self.pieces.remove(&id);
            if let Some(signals) = self.shared.running().get(&id) {
                signals.cancel();
            }
            return Ok(());
        }
        let (message, held) = self.pieces.entry(id).or_default();
        message.extend_from_slice(payload);
        held.extend(descriptors);
        if message.len() > CALL_BYTES_MAX {
            return Err(wire::Malformed);
        }
        if kind == Kind::Part {
            return Ok(());
        }
        let (message, held) = self.pieces.remove(&id).unwrap_or_default();
        if kind == Kind::Finish {
            let (finish, _) = wire::split::<Finish>(&message)?;
            if let Some(signals) = self.shared.running().get(&id) {
                signals.finish(finish);
            }
            return Ok(());
        }
        self.start(id, message, held);
        Ok(())
    }

    fn start(&self, id: u64, message: Vec<u8>, descriptors: Vec<OwnedFd>) {
        let signals = Arc::new(Signals::default());
        let mut running = self.shared.running();
        if running.len() >= CALLS_MAX {
            drop(running);
            let full = Err(Fault::text(FaultKind::Other, "too many file operations at once"));
            return self.shared.answer(id, &full, &[], None);
        }
        running.insert(id, Arc::clone(&signals));
        drop(running);
        let shared = Arc::clone(&self.shared);
        let started = std::thread::Builder::new().stack_size(STACK_BYTES).spawn(move || {
            shared.call(id, &message, descriptors, &signals);
            shared.running().remove(&id);
        });
        if let Err(error) = started {
            self.shared.running().remove(&id);
            self.shared.answer(id, &Err(Fault::from(error)), &[], None);
        }
    }
}

/// What one call answers with.
struct Done {
    answer: Answer,
    text: Vec<u8>,
    descriptor: Option<OwnedFd>,
}

impl From<Answer> for Done {
    fn from(answer: Answer) -> Done {
        Done { answer, text: Vec::new(), descriptor: None }
    }
}

impl Shared {
    fn running(&self) -> MutexGuard<'_, HashMap<u64, Arc<Signals>>> {
        self.running.lock().expect("no code panics while it holds the calls")
    }

    fn call(&self, id: u64, message: &[u8], descriptors: Vec<OwnedFd>, signals: &Signals) {
        let done = catch_unwind(AssertUnwindSafe(|| {
            let (call, content) = wire::split::<Call>(message)
                .map_err(|malformed| Fault::text(FaultKind::Other, malformed.to_string()))?;
            let clock = Clock::new(Duration::from_millis(call.time_ms_max), Arc::clone(&signals.cancelled));
            self.carry_out(call.op, content, descriptors, &clock, signals)
        }));
        let done = done.unwrap_or_else(|_| Err(Fault::text(FaultKind::Other, "the file helper failed")));
        match done {
            Ok(Done { answer, text, descriptor }) => self.answer(id, &Ok(answer), &text, descriptor),
            Err(fault) => self.answer(id, &Err(fault), &[], None),
        }
    }

    fn carry_out(
        &self,
        op: Op,
        content: &[u8],
        mut descriptors: Vec<OwnedFd>,
        clock: &Clock,
        signals: &Signals,
    ) -> Outcome<Done> {
        let view = &self.view;
        let mut pipe = || {
            descriptors.pop().ok_or_else(|| Fault::text(FaultKind::Other, "a stream came without its pipe"))
        };
        let answer = match op {
            Op::Read { path, start_line, end_line } => {
                let text = text::read(view, clock, &path, start_line, end_line)?;
                return Ok(Done { answer: Answer::Text, text, descriptor: None });
            }
            Op::Space => {
                let descriptor = Some(view.home()?);
                return Ok(Done { answer: Answer::Opened, text: Vec::new(), descriptor });
            }
            Op::Open { path } => {
                let descriptor = Some(text::open(view, &path)?);
                return Ok(Done { answer: Answer::Opened, text: Vec::new(), descriptor });
            }
            Op::Write { path, append } => text::write(view, &path, append, content),
            Op::List(wanted) => find::list(view, clock, &wanted),
            Op::Find { path, pattern } => find::find(view, clock, &path, &pattern),
            Op::Glob(wanted) => find::glob(view, clock, &wanted),
            Op::Grep(wanted) => grep::grep(view, clock, &wanted),
            Op::Search { path, regex } => text::search(view, clock, &path, &regex),
            Op::Replace { path, old, new } => text::replace(view, clock, &path, &old, &new),
            Op::Edit { path, edit } => edit::edit(view, clock, &self.history, &path, edit),
            Op::Stat { path, follow } => find::stat(view, &path, follow),
            Op::Mkdir { path, parents } => tree::mkdir(view, &path, parents),
            Op::Copy { source, destination, overwrite } => {
                tree::copy(view, clock, &source, &destination, overwrite)
            }
            Op::Move { source, destination, overwrite } => {
                tree::move_to(view, clock, &source, &destination, overwrite)
            }
            Op::Delete { path, recursive } => tree::delete(view, clock, &path, recursive),
            Op::Upload { path, bytes_max, token } => {
                let arrived = text::arrive(view, clock, path.as_deref(), pipe()?, bytes_max, &token)?;
                arrived.keep(view, clock, signals.finished()?)
            }
            Op::Clear { path, token } => text::clear(view, clock, path.as_deref(), &token),
            Op::TreeOut { path, bytes_max } => tar::send(view, clock, &path, pipe()?, bytes_max),
            Op::TreeIn { path, bytes_max, token } => {
                tar::receive(view, clock, &path, pipe()?, bytes_max, &token, || signals.finished())
            }
        };
        answer.map(Done::from)
    }

    fn answer(&self, id: u64, answered: &Answered, text: &[u8], descriptor: Option<OwnedFd>) {
        let message = wire::join(answered, text);
        let mut descriptor = descriptor;
        for packet in wire::packets(id, Kind::End, &message) {
            let sent = match descriptor.take() {
                Some(descriptor) => {
                    packet::send(&self.socket, &packet, &[std::os::fd::AsFd::as_fd(&descriptor)])
                }
                None => packet::send(&self.socket, &packet, &[]),
            };
            if sent.is_err() {
                return; // Nobody is there; the receiving thread sees it too.
            }
        }
    }
}
