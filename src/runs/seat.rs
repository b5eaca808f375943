//! Where a run takes place: which session's files it finds, whether an interpreter waits for it, and its turn.
#![forbid(unsafe_code)]

use std::collections::HashMap;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, MutexGuard};
use std::time::{Duration, Instant};

use sha2::{Digest, Sha256};
use tokio::sync::OwnedMutexGuard;

use crate::engine::{Refusal, TenantId};
use crate::harness::interpreter::{Interpreter, Provenance};
use crate::languages::Runtime;
use crate::launcher::plan::SpaceId;
use crate::objects::{Affinity, FileRecord, Kind, SessionInfo, hex};
use crate::runs::inputs::Inputs;
use crate::runs::{Greeting, RunRefused, RunRequest, Runs, RunsConfig, Style};
use crate::tenant::quota::Place;
use crate::workspace::Workspace;

/// Bytes of the name that a warm workspace is known by outside.
const RUNTIME_ID_BYTES: usize = 16;

/// What a run works on.
#[derive(Clone, Debug)]
pub(super) enum Home {
    /// A space of its own with nothing but the inputs.
    Fresh,
    /// The same, filled from the session's records first.
    Rebuilt(Vec<FileRecord>),
    /// The session's own space.
    Kept(SpaceId),
}

/// A run that has its place and its turn.
pub(super) struct Seated {
    pub(super) runs: Arc<Runs>,
    pub(super) request: RunRequest,
    pub(super) inputs: Inputs,
    pub(super) hello: Greeting,
    pub(super) session: SessionInfo,
    pub(super) home: Home,
    pub(super) runtime: Option<(String, bool)>,
    pub(super) wants_kernel: bool,
    pub(super) turn: Option<Turn>,
    pub(super) _place: Place,
}

impl Seated {
    /// Its interpreter is the session's, with names that must not be left half-changed when the caller goes away.
    pub(super) fn keeps_names(&self) -> bool {
        self.wants_kernel && matches!(self.home, Home::Kept(_))
    }
}

/// An interpreter that stays with its session.
#[derive(Debug)]
pub(super) struct Kernel {
    pub(super) interpreter: Interpreter,
    pub(super) workspace: Arc<Workspace>,
    pub(super) count: u64,
}

#[derive(Debug)]
struct Seat {
    tenant: TenantId,
    turn: Arc<tokio::sync::Mutex<()>>,
    /// While no cell runs in it. Whoever has the turn may take it; one that has died is taken whoever has the turn: it
    /// holds the session's space, and the next one could not be made there.
    kernel: Mutex<Option<Kernel>>,
    waiting: AtomicUsize,
    books: Mutex<SeatBooks>,
}

#[derive(Copy, Clone, Debug)]
struct SeatBooks {
    used: Instant,
    has_kernel: bool,
}

/// The right to use a session. Others wait.
#[derive(Debug)]
pub(super) struct Turn {
    seat: Arc<Seat>,
    _turn: OwnedMutexGuard<()>,
}

impl Turn {
    pub(super) fn has_kernel(&self) -> bool {
        self.seat.kernel().is_some()
    }

    /// The workspace of the kernel that waits, and where that runs; `None` where none waits that lives.
    pub(super) fn kernel_place(&self) -> Option<(Arc<Workspace>, Provenance)> {
        let kernel = self.seat.kernel();
        let kernel = kernel.as_ref().filter(|kernel| kernel.interpreter.is_alive())?;
        Some((Arc::clone(&kernel.workspace), kernel.interpreter.provenance()))
    }

    pub(super) fn take_kernel(&self) -> Option<Kernel> {
        self.seat.kernel().take()
    }

    /// Leaves a new kernel with the session, for as long as it lives.
    pub(super) fn keep_kernel(&self, kernel: Kernel) {
        let (seat, ended) = (Arc::downgrade(&self.seat), kernel.interpreter.ended());
        self.put_kernel(kernel);
        tokio::spawn(async move {
            ended.await;
            if let Some(seat) = seat.upgrade() {
                seat.bury();
            }
        });
    }

    /// Puts it back. One that has died meanwhile is let go of: nobody would look for its end again.
    pub(super) fn put_kernel(&self, kernel: Kernel) {
        let mut place = self.seat.kernel();
        // Beneath the lock: who buries comes before this, or finds it there.
        *place = Some(kernel).filter(|kernel| kernel.interpreter.is_alive());
    }
}

impl Drop for Turn {
    fn drop(&mut self) {
        let mut books = self.seat.books();
        books.used = Instant::now();
        books.has_kernel = self.has_kernel();
    }
}

impl Seat {
    fn books(&self) -> MutexGuard<'_, SeatBooks> {
        self.books.lock().expect("no code panics while it holds a seat's books")
    }

    fn kernel(&self) -> MutexGuard<'_, Option<Kernel>> {
        self.kernel.lock().expect("no code panics while it holds a seat's kernel")
    }

    /// Ends its kernel if nobody uses it now.
    fn end_kernel(&self) -> bool {
        let Ok(_turn) = self.turn.try_lock() else { return false };
        let kernel = self.kernel().take();
        self.books().has_kernel = false;
        kernel.is_some()
    }

    /// Lets go of a kernel that has died.
    fn bury(&self) {
        // Held from here on: what a turn with a younger one tells them comes before this or after it.
        let mut books = self.books();
        let dead = self.kernel().take_if(|kernel| !kernel.interpreter.is_alive());
        // Else a turn has it, or a younger one is there, and its end is told with that.
        if dead.is_some() {
            books.has_kernel = false;
        }
        drop(books);
    }
}

/// Sessions that are used, or have an interpreter.
#[derive(Debug, Default)]
pub(super) struct SeatTable {
    seats: Mutex<HashMap<String, Arc<Seat>>>,
}

impl SeatTable {
    async fn turn(&self, session: &str, tenant: &TenantId, waiting_max: usize) -> Result<Turn, Refusal> {
        let seat = {
            let mut seats = self.lock();
            let seat = seats.entry(session.to_owned()).or_insert_with(|| {
                Arc::new(Seat {
                    tenant: tenant.clone(),
                    turn: Arc::default(),
                    kernel: Mutex::default(),
                    waiting: AtomicUsize::new(0),
                    books: Mutex::new(SeatBooks { used: Instant::now(), has_kernel: false }),
                })
            });
            Arc::clone(seat)
        };
        let _waits = Waits::new(&seat, waiting_max)?;
        let turn = Arc::clone(&seat.turn).lock_owned().await;
        Ok(Turn { seat: Arc::clone(&seat), _turn: turn })
    }

    /// Makes room for this session's kernel among its tenant's: the one that was idle longest is ended. The room is
    /// this turn's until it is over.
    pub(super) fn make_room(&self, turn: &Turn, config: &RunsConfig) -> Result<(), Refusal> {
        // Held to the end: two that come together see each other.
        let seats = self.lock();
        let of_others = || seats.values().filter(|seat| !Arc::ptr_eq(seat, &turn.seat));
        room_among(of_others().filter(|seat| seat.tenant == turn.seat.tenant), config.kernels_max)?;
        room_among(of_others(), config.kernels_all_max)?;
        turn.seat.books().has_kernel = true;
        Ok(())
    }

    pub(super) fn kernels(&self) -> usize {
        self.lock().values().filter(|seat| seat.books().has_kernel).count()
    }

    /// Ends kernels that nobody has used for a while, and forgets seats that nobody sits on.
    pub(super) fn close_idle(&self, idle_max: Duration) {
        let seats: Vec<Arc<Seat>> = self.lock().values().cloned().collect();
        for seat in &seats {
            if seat.books().used.elapsed() >= idle_max {
                seat.end_kernel();
            }
        }
        drop(seats);
        self.lock().retain(|_, seat| Arc::strong_count(seat) > 1 || seat.books().has_kernel);
    }

    /// Waits for the session's turn and ends its kernel.
    pub(super) async fn reset(&self, session: &str) {
        let seat = self.lock().get(session).cloned();
        if let Some(seat) = seat {
            let _turn = seat.turn.lock().await;
            let _ended = seat.kernel().take();
            seat.books().has_kernel = false;
        }
    }

    pub(super) fn close(&self) {
        let seats = std::mem::take(&mut *self.lock());
        for seat in seats.values() {
            seat.end_kernel();
        }
    }

    fn lock(&self) -> MutexGuard<'_, HashMap<String, Arc<Seat>>> {
        self.seats.lock().expect("no code panics while it holds the seats")
    }
}

/// Room for one more kernel beside those of `seats`: the one that was idle longest is ended.
fn room_among<'a>(seats: impl Iterator<Item = &'a Arc<Seat>>, kernels_max: usize) -> Result<(), Refusal> {
    let with_books = seats.map(|seat| (*seat.books(), seat));
    let mut idle: Vec<(Instant, &Arc<Seat>)> =
        with_books.filter(|(books, _)| books.has_kernel).map(|(books, seat)| (books.used, seat)).collect();
    let mut kernels = idle.len();
    idle.sort_by_key(|(used, _)| *used);
    for (_, seat) in idle {
        if kernels < kernels_max {
            break;
        }
        kernels -= usize::from(seat.end_kernel());
    }
    if kernels < kernels_max { Ok(()) } else { Err(Refusal::TooManyKernelSessions { max: kernels_max }) }
}

/// Counted among those who wait.
struct Waits<'a>(&'a Seat);

impl Waits<'_> {
    fn new(seat: &Seat, waiting_max: usize) -> Result<Waits<'_>, Refusal> {
        let waits = Waits(seat);
        if seat.waiting.fetch_add(1, Ordering::Relaxed) >= waiting_max {
            return Err(Refusal::TooManyWaiting { max: waiting_max });
        }
        Ok(waits)
    }
}

impl Drop for Waits<'_> {
    fn drop(&mut self) {
        self.0.waiting.fetch_sub(1, Ordering::Relaxed);
    }
}

/// Finds the place, and waits for its turn and for a place among what runs.
pub(super) async fn seat(
    runs: &Arc<Runs>,
    request: RunRequest,
    inputs: Inputs,
    hello: Greeting,
) -> Result<Seated, RunRefused> {
    let Found { session, kept_names, runtime } = find(runs, &request).await?;
    let is_python = matches!(request.language.runtime, Runtime::Python) && !request.programmatic;
    let fresh = session.is_none();
    let session = session.unwrap_or_else(|| runs.objects.new_run_session(&request.caller));
    let tenant = request.caller.tenant.clone();
    let turn = match fresh {
        true => None,
        false => Some(runs.seats.turn(&session.id, &tenant, runs.config.session_waiting_max).await?),
    };
    let home = match (fresh, session.kind, session.space) {
        (true, ..) => Home::Fresh,
        (false, Kind::Kept, Some(space)) => Home::Kept(space),
        _ => Home::Rebuilt(runs.objects.live_files_of(&session.id).await),
    };
    let has_kernel = turn.as_ref().is_some_and(Turn::has_kernel);
    let wants_kernel =
        is_python && (kept_names == Some(true) || has_kernel && kept_names.is_none() || request.rich);
    let place = runs.admission.admit(&tenant).await?;
    Ok(Seated {
        runs: Arc::clone(runs),
        inputs,
        hello,
        session,
        home,
        runtime,
        wants_kernel,
        turn,
        _place: place,
        request,
    })
}

struct Found {
    /// `None`: a new one.
    session: Option<SessionInfo>,
    /// Whether its interpreter is kept: always, never, or where it has one.
    kept_names: Option<bool>,
    runtime: Option<(String, bool)>,
}

/// An owned session, then the entity, then the hint, then what an old client's first file lies in.
async fn find(runs: &Runs, request: &RunRequest) -> Result<Found, RunRefused> {
    let (objects, caller) = (&runs.objects, &request.caller);
    let user = caller.user.as_deref().unwrap_or(&request.asserted_user);
    if let Some(id) = &request.session
        && let Some(session) = objects.session(caller, id).await
    {
        return Ok(Found { session: Some(session), kept_names: None, runtime: None });
    }
    if let Some(entity) = &request.entity {
        let (session, _) = objects.affinity(caller, user, Affinity::Entity(entity)).await?;
        return Ok(Found { session: Some(session), kept_names: Some(true), runtime: None });
    }
    if let Some(hint) = &request.hint {
        let (session, made) = objects.affinity(caller, user, Affinity::Hint(hint)).await?;
        let runtime = Some((runtime_id(&session.id), !made));
        return Ok(Found { session: Some(session), kept_names: Some(false), runtime });
    }
    let mut session = None;
    if let (Style::Classic, Some(first)) = (request.style, request.files.first()) {
        session = objects.session(caller, &first.session).await.filter(|session| !session.read_only);
    }
    Ok(Found { session, kept_names: Some(false), runtime: None })
}

/// Says nothing of the session to who knows it not.
fn runtime_id(session: &str) -> String {
    hex(&Sha256::digest(format!("runtime {session}"))[..RUNTIME_ID_BYTES])
}
