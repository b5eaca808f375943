//! Interpreters made ahead of demand: confined, warmed by a real round trip, handed out once.
//!
//! A shelf holds the slots of one space and profile. Its target starts at [`TARGET_FIRST`] with the first
//! take, doubles to at most [`TARGET_MAX`] when a take finds it empty, and shrinks by one for each
//! [`SHRINK_AFTER`] without a take; a space without traffic for [`DROP_AFTER`] loses its shelves. Pinned
//! shelves never fall below their floor. All slots together stay under a cap; when it is reached, a space
//! below its share takes a place from the largest.
//!
//! Refilling happens in one background task, away from requests: it waits for a quiet moment unless a shelf
//! is nearly empty, and launches one at a time per two processors. Once every shelf is full and nobody has asked
//! for anything for [`DEEP_QUIET`], slots with the data stack are warmed a second time, one after the other, by a
//! small job with pandas: it touches the memory that such a job needs, which takes too long to do it under load.
#![forbid(unsafe_code)]

use std::collections::{HashMap, VecDeque};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, Weak};
use std::time::{Duration, Instant};

use tokio::sync::{Notify, Semaphore};

use crate::harness::interpreter::Interpreter;
use crate::launcher::plan::{LaunchPlan, Origin, Profile, SpaceId};
use crate::zygote::{Launch, WORKSPACE_DIR, fresh_space};

/// Slots of a shelf after its first take.
const TARGET_FIRST: usize = 2;
/// Most slots of a shelf that are not pinned.
const TARGET_MAX: usize = 8;
/// A shelf without a take for this long wants one slot less.
const SHRINK_AFTER: Duration = Duration::from_secs(60);
/// A space without a take for this long gives up its slots.
const DROP_AFTER: Duration = Duration::from_secs(300);
/// No cell started for this long: nobody is in a hurry.
const QUIET: Duration = Duration::from_millis(4);
/// No cell started for this long: there is time for what a request can do without.
const DEEP_QUIET: Duration = Duration::from_millis(50);
/// What a slot with the data stack is warmed with then. Without pandas it fails, which does no harm.
const DEEP_SOURCE: &str = "import pandas as pd\n\
    df = pd.DataFrame({'a': range(10), 'b': range(10)})\n\
    df.describe().to_string()";
/// A shelf with at most one in this many of its slots left does not wait for quiet.
const HURRY_FRACTION: usize = 4;
/// Between two looks at dead slots and idle shelves.
const HOUSEKEEPING: Duration = Duration::from_secs(1);
/// After a launch that failed, the next one waits at first and at most this long.
const BACKOFF_FIRST: Duration = Duration::from_millis(500);
const BACKOFF_MAX: Duration = Duration::from_secs(60);

/// Which interpreters are interchangeable.
pub type ShelfKey = (SpaceId, Profile);

/// What somebody takes a slot for.
#[derive(Copy, Clone, Debug, PartialEq, Eq)]
pub enum TakenFor {
    /// One answer, as soon as can be: a deeply warmed one first.
    Once,
    /// A session, which is idle for most of its life: a deeply warmed one last, since it holds more memory of its own.
    Session,
}

/// What `/health` shows of the slots.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct SlotStats {
    /// Ready slots by profile, in wire order.
    pub ready: Vec<(Profile, usize)>,
    pub max: usize,
    pub taken: u64,
    pub missed: u64,
}

/// The pool. One per daemon.
pub struct Slots {
    max: usize,
    /// Whether shelves come and go with traffic; else there are only the pinned ones.
    adaptive: bool,
    origin: Instant,
    /// When the last cell started, in microseconds since `origin`.
    cell_started_us: AtomicU64,
    books: Mutex<Books>,
    wanted: Notify,
}

struct Books {
    shelves: HashMap<ShelfKey, Shelf>,
    taken: u64,
    missed: u64,
    closed: bool,
    /// Whether a slot is away to be warmed deeply.
    deepening: bool,
}

/// A slot on its shelf.
struct Ready {
    interpreter: Interpreter,
    is_deep: bool,
}

struct Shelf {
    /// The deeply warmed ones first.
    ready: VecDeque<Ready>,
    /// Being made, or away to be warmed deeply.
    launching: usize,
    /// One did not survive it.
    no_deep: bool,
    target: usize,
    floor: usize,
    taken_at: Instant,
    shrunk_at: Instant,
    backoff: Duration,
    not_before: Instant,
}

impl Shelf {
    fn new(now: Instant) -> Shelf {
        Shelf {
            ready: VecDeque::new(),
            launching: 0,
            no_deep: false,
            target: 0,
            floor: 0,
            taken_at: now,
            shrunk_at: now,
            backoff: BACKOFF_FIRST,
            not_before: now,
        }
    }

    fn held(&self) -> usize {
        self.ready.len() + self.launching
    }

    /// Where its first slot is that wants to be warmed deeply.
    fn shallow(&self, key: ShelfKey) -> Option<usize> {
        let wanted = matches!(key.1, Profile::PythonData | Profile::Kernel) && !self.no_deep;
        wanted.then(|| self.ready.iter().position(|slot| !slot.is_deep)).flatten()
    }

    fn missing(&self) -> usize {
        self.target.saturating_sub(self.held())
    }
}

/// What the refiller does next.
#[derive(Copy, Clone, Debug, PartialEq, Eq)]
enum Refill {
    Nothing,
    Launch { key: ShelfKey, hurry: bool },
}

impl Slots {
    /// An empty pool for at most `adaptive_max` slots that follow traffic, and room for `pinned_extra` more.
    pub fn new(adaptive_max: usize, pinned_extra: usize) -> Arc<Slots> {
        let books = Books { shelves: HashMap::new(), taken: 0, missed: 0, closed: false, deepening: false };
        Arc::new(Slots {
            max: adaptive_max + pinned_extra,
            adaptive: adaptive_max > 0,
            origin: Instant::now(),
            cell_started_us: AtomicU64::new(0),
            books: Mutex::new(books),
            wanted: Notify::new(),
        })
    }

    /// Keeps at least `floor` slots on a shelf, with or without traffic.
    pub fn pin(&self, key: ShelfKey, floor: usize) {
        if self.max == 0 || floor == 0 {
            return;
        }
        let mut books = self.lock();
        let shelf = books.shelves.entry(key).or_insert_with(|| Shelf::new(Instant::now()));
        shelf.floor = floor;
        shelf.target = shelf.target.max(floor);
        drop(books);
        self.wanted.notify_one();
    }

    /// A ready interpreter, if one waits. Either way the shelf learns from it.
    pub fn take(&self, key: ShelfKey, taken_for: TakenFor) -> Option<Interpreter> {
        if self.max == 0 {
            return None;
        }
        let mut dead = Vec::new();
        let mut books = self.lock();
        if !self.adaptive && !books.shelves.contains_key(&key) {
            return None;
        }
        let found = books.take(key, taken_for, Instant::now(), self.adaptive, &mut dead);
        drop(books);
        self.wanted.notify_one();
        found
    }

    /// Tells the refiller that somebody is in a hurry.
    pub fn cell_started(&self) {
        let now_us = u64::try_from(self.origin.elapsed().as_micros()).unwrap_or(u64::MAX);
        self.cell_started_us.store(now_us, Ordering::Relaxed);
    }

    pub fn stats(&self) -> SlotStats {
        let books = self.lock();
        let ready = |profile| {
            let of_profile = books.shelves.iter().filter(|(key, _)| key.1 == profile);
            (profile, of_profile.map(|(_, shelf)| shelf.ready.len()).sum())
        };
        SlotStats {
            ready: Profile::INTERPRETERS.into_iter().map(ready).collect(),
            max: self.max,
            taken: books.taken,
            missed: books.missed,
        }
    }

    /// Ready slots of one shelf.
    pub fn ready(&self, key: ShelfKey) -> usize {
        self.lock().shelves.get(&key).map_or(0, |shelf| shelf.ready.len())
    }

    /// Ends all slots and takes no new ones.
    pub fn close(&self) {
        let mut books = self.lock();
        books.closed = true;
        let shelves = std::mem::take(&mut books.shelves);
        drop(books);
        drop(shelves);
        self.wanted.notify_one();
    }

    /// Refills until the pool is closed or nobody holds it any more.
    pub async fn refill(pool: Weak<Slots>, launcher: Arc<dyn Launch>, parallel_max: usize) {
        let lanes = Arc::new(Semaphore::new(parallel_max.max(1)));
        let mut housekeeping_at = Instant::now();
        loop {
            let Some(slots) = pool.upgrade() else { return };
            if slots.lock().closed {
                return;
            }
            if housekeeping_at.elapsed() >= HOUSEKEEPING {
                housekeeping_at = Instant::now();
                slots.keep_house();
            }
            let next = if launcher.is_attached() { slots.next_refill() } else { Refill::Nothing };
            let Refill::Launch { key, hurry } = next else {
                let wait = slots.deepen().unwrap_or(HOUSEKEEPING);
                drop(tokio::time::timeout(wait, slots.wanted.notified()).await);
                continue;
            };
            if !hurry && let Some(wait) = slots.until_quiet(QUIET) {
                tokio::time::sleep(wait).await;
                continue;
            }
            let Ok(lane) = Arc::clone(&lanes).acquire_owned().await else { return };
            if !slots.reserve(key) {
                continue;
            }
            let launcher = Arc::clone(&launcher);
            tokio::spawn(async move {
                let made = make(&*launcher, key).await;
                slots.shelve(key, made);
                drop(lane);
            });
        }
    }

    fn next_refill(&self) -> Refill {
        let mut evicted = None;
        self.lock().next_refill(self.max, Instant::now(), &mut evicted)
    }

    /// Sends a slot to be warmed deeply if there is time for it; else says when to ask again.
    fn deepen(self: &Arc<Slots>) -> Option<Duration> {
        if !self.lock().wants_deep() {
            return None;
        }
        if let Some(wait) = self.until_quiet(DEEP_QUIET) {
            return Some(wait);
        }
        let (key, interpreter) = self.lock().send_to_deepen()?;
        let slots = Arc::clone(self);
        tokio::spawn(async move {
            let warmed = interpreter.warm_up(DEEP_SOURCE).await;
            let left_over = slots.lock().come_back(key, warmed);
            drop(left_over);
            slots.wanted.notify_one();
        });
        None
    }

    /// Time left until no cell has started for `quiet`; `None` when that is now.
    fn until_quiet(&self, quiet: Duration) -> Option<Duration> {
        let started = Duration::from_micros(self.cell_started_us.load(Ordering::Relaxed));
        let since = self.origin.elapsed().saturating_sub(started);
        // The timer has millisecond steps: less would spin.
        quiet.checked_sub(since).filter(|left| !left.is_zero()).map(|left| left.max(Duration::from_millis(1)))
    }

    /// Books a launch; false when the shelf is gone or full by now.
    fn reserve(&self, key: ShelfKey) -> bool {
        let mut books = self.lock();
        let held: usize = books.shelves.values().map(Shelf::held).sum();
        let has_room = held < self.max;
        match books.shelves.get_mut(&key) {
            Some(shelf) if has_room && shelf.missing() > 0 => {
                shelf.launching += 1;
                true
            }
            _ => false,
        }
    }

    fn shelve(&self, key: ShelfKey, made: Option<Interpreter>) {
        let mut books = self.lock();
        let open = !books.closed;
        if let Some(shelf) = books.shelves.get_mut(&key).filter(|_| open) {
            shelf.shelve(made, Instant::now());
        } else {
            // The space went idle meanwhile, or the daemon ends. Dropped outside the lock.
            drop(books);
            drop(made);
        }
        self.wanted.notify_one();
    }

    fn keep_house(&self) {
        let mut dropped = Vec::new();
        self.lock().keep_house(Instant::now(), &mut dropped);
    }

    fn lock(&self) -> MutexGuard<'_, Books> {
        self.books.lock().expect("no code panics while it holds the slots' books")
    }
}

impl Shelf {
    fn shelve(&mut self, made: Option<Interpreter>, now: Instant) {
        self.launching = self.launching.saturating_sub(1);
        match made {
            Some(interpreter) => {
                self.backoff = BACKOFF_FIRST;
                self.ready.push_back(Ready { interpreter, is_deep: false });
            }
            None => {
                self.not_before = now + self.backoff;
                self.backoff = (self.backoff * 2).min(BACKOFF_MAX);
            }
        }
    }
}

impl Books {
    fn take(
        &mut self,
        key: ShelfKey,
        taken_for: TakenFor,
        now: Instant,
        adaptive: bool,
        dead: &mut Vec<Interpreter>,
    ) -> Option<Interpreter> {
        let shelf = self.shelves.entry(key).or_insert_with(|| Shelf::new(now));
        shelf.taken_at = now;
        shelf.shrunk_at = now;
        let mut found = None;
        let next = |ready: &mut VecDeque<Ready>| match taken_for {
            TakenFor::Once => ready.pop_front(),
            TakenFor::Session => ready.pop_back(),
        };
        while let Some(Ready { interpreter, .. }) = next(&mut shelf.ready) {
            if interpreter.is_alive() {
                found = Some(interpreter);
                break;
            }
            dead.push(interpreter);
        }
        if found.is_some() {
            self.taken += 1;
        } else {
            self.missed += 1;
        }
        if adaptive && found.is_some() {
            shelf.target = shelf.target.max(TARGET_FIRST);
        } else if adaptive {
            shelf.target = (shelf.target * 2).clamp(TARGET_FIRST, TARGET_MAX.max(shelf.floor));
        }
        found
    }

    /// The emptiest shelf first, measured against its target.
    fn next_refill(&mut self, max: usize, now: Instant, evicted: &mut Option<Interpreter>) -> Refill {
        let wanting = self.shelves.iter().filter(|(_, shelf)| shelf.missing() > 0 && shelf.not_before <= now);
        let fullness = |shelf: &Shelf| shelf.held() * 1_000 / shelf.target.max(1);
        let mut wanting: Vec<_> = wanting.map(|(key, shelf)| (fullness(shelf), *key)).collect();
        wanting.sort_unstable();
        for (_, key) in wanting {
            if self.held(|_| true) < max || self.make_room(key.0, max, evicted) {
                let shelf = &self.shelves[&key];
                let hurry = shelf.ready.len() * HURRY_FRACTION <= shelf.target;
                return Refill::Launch { key, hurry };
            }
        }
        Refill::Nothing
    }

    /// At the cap, a space below its share takes a place from the space that holds the most.
    fn make_room(&mut self, space: SpaceId, max: usize, evicted: &mut Option<Interpreter>) -> bool {
        let mut by_space: HashMap<SpaceId, usize> = HashMap::new();
        for (key, shelf) in &self.shelves {
            *by_space.entry(key.0).or_default() += shelf.held();
        }
        let share = (max / by_space.len().max(1)).max(1);
        let mine = by_space.get(&space).copied().unwrap_or(0);
        let largest = by_space.into_iter().max_by_key(|(space, held)| (*held, *space));
        let Some((victim, held)) = largest else { return false };
        if mine >= share || held <= share || victim == space {
            return false;
        }
        let of_victim = self.shelves.iter_mut().filter(|(key, _)| key.0 == victim);
        let Some((_, shelf)) = of_victim.max_by_key(|(_, shelf)| shelf.ready.len()) else { return false };
        *evicted = shelf.ready.pop_back().map(|slot| slot.interpreter);
        evicted.is_some()
    }

    /// Whether every shelf is full, and one has a slot with the data stack that was not warmed deeply.
    fn wants_deep(&self) -> bool {
        let full = |shelf: &Shelf| shelf.launching == 0 && shelf.missing() == 0;
        !self.deepening
            && self.shelves.values().all(full)
            && self.shelves.iter().any(|(key, shelf)| shelf.shallow(*key).is_some())
    }

    /// Takes such a slot off its shelf, which keeps its place.
    fn send_to_deepen(&mut self) -> Option<(ShelfKey, Interpreter)> {
        if !self.wants_deep() {
            return None;
        }
        let (key, shelf, at) = self
            .shelves
            .iter_mut()
            .find_map(|(key, shelf)| shelf.shallow(*key).map(|at| (*key, shelf, at)))?;
        let slot = shelf.ready.remove(at)?;
        shelf.launching += 1;
        self.deepening = true;
        Some((key, slot.interpreter))
    }

    /// Puts it back in front. Returns it when its shelf is gone.
    fn come_back(&mut self, key: ShelfKey, warmed: Option<Interpreter>) -> Option<Interpreter> {
        self.deepening = false;
        let Some(shelf) = self.shelves.get_mut(&key).filter(|_| !self.closed) else { return warmed };
        shelf.launching = shelf.launching.saturating_sub(1);
        match warmed {
            Some(interpreter) => shelf.ready.push_front(Ready { interpreter, is_deep: true }),
            None => shelf.no_deep = true,
        }
        None
    }

    fn held(&self, of: impl Fn(&ShelfKey) -> bool) -> usize {
        self.shelves.iter().filter(|(key, _)| of(key)).map(|(_, shelf)| shelf.held()).sum()
    }

    fn keep_house(&mut self, now: Instant, dropped: &mut Vec<Interpreter>) {
        let mut last_traffic: HashMap<SpaceId, Instant> = HashMap::new();
        for (key, shelf) in &self.shelves {
            let last = last_traffic.entry(key.0).or_insert(shelf.taken_at);
            *last = (*last).max(shelf.taken_at);
        }
        for (key, shelf) in &mut self.shelves {
            if now.duration_since(last_traffic[&key.0]) >= DROP_AFTER {
                shelf.target = shelf.floor;
            } else if now.duration_since(shelf.shrunk_at) >= SHRINK_AFTER {
                shelf.shrunk_at = now;
                shelf.target = shelf.target.saturating_sub(1).max(shelf.floor);
            }
            let (alive, dead): (VecDeque<_>, VecDeque<_>) =
                std::mem::take(&mut shelf.ready).into_iter().partition(|slot| slot.interpreter.is_alive());
            shelf.ready = alive;
            let kept = shelf.target.min(shelf.ready.len());
            let surplus = shelf.ready.drain(kept..);
            dropped.extend(dead.into_iter().chain(surplus).map(|slot| slot.interpreter));
        }
        self.shelves.retain(|_, shelf| shelf.target > 0 || shelf.held() > 0);
    }
}

/// The shelves of slots that have a space in memory each, fresh and seen by the daemon.
pub const FRESH: SpaceId = SpaceId::transient(0);

/// Launches and warms one slot. `None` when that failed, which is logged here.
async fn make(launcher: &dyn Launch, key: ShelfKey) -> Option<Interpreter> {
    let (space, profile) = key;
    let fresh = space == FRESH;
    let space = if fresh { fresh_space() } else { space };
    let plan = LaunchPlan { view: fresh, throwaway: fresh, ..LaunchPlan::new(space, profile, Origin::Warm) };
    match launcher.launch(plan).await {
        Ok(interpreter) => {
            let source = warm_source(profile);
            // It costs such a slot memory, 4 MB of Node's, which those for cells are spared.
            let warmed = match fresh {
                true => interpreter.warm_up_for_programs(source).await,
                false => interpreter.warm_up(source).await,
            };
            if warmed.is_none() {
                tracing::warn!(%space, profile = profile.name(), "a slot did not survive its warm-up");
            }
            match warmed {
                // Programs start where their files are.
                Some(slot) if fresh => slot.change_directory(WORKSPACE_DIR).await.ok(),
                warmed => warmed,
            }
        }
        Err(error) => {
            tracing::warn!(%space, profile = profile.name(), error = &error as &dyn std::error::Error,
                "failed to make a slot");
            None
        }
    }
}

/// Something that touches what the first cell will touch, and prints, so that both streams are open.
fn warm_source(profile: Profile) -> &'static str {
    if profile == Profile::Node { "console.log(1)" } else { "print(1)" }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::harness::fake::Fake;

    const KEY: ShelfKey = (SpaceId(1), Profile::Python);
    const OTHER: ShelfKey = (SpaceId(2), Profile::Python);

    fn books() -> Books {
        Books { shelves: HashMap::new(), taken: 0, missed: 0, closed: false, deepening: false }
    }

    fn fill(books: &mut Books, key: ShelfKey, slots: usize, now: Instant) {
        let shelf = books.shelves.entry(key).or_insert_with(|| Shelf::new(now));
        shelf.target = shelf.target.max(slots);
        shelf.ready.extend((0..slots).map(|_| Ready { interpreter: Fake::interpreter(), is_deep: false }));
    }

    #[tokio::test]
    async fn a_shelf_grows_when_it_is_found_empty_and_no_further_than_its_cap() {
        let (mut books, now) = (books(), Instant::now());
        let targets: Vec<_> = (0..4)
            .map(|_| {
                assert!(books.take(KEY, TakenFor::Once, now, true, &mut Vec::new()).is_none());
                books.shelves[&KEY].target
            })
            .collect();
        assert_eq!(targets, [2, 4, 8, 8]);
        assert_eq!((books.taken, books.missed), (0, 4));
    }

    #[tokio::test]
    async fn a_dead_slot_is_not_handed_out() {
        let (mut books, now) = (books(), Instant::now());
        fill(&mut books, KEY, 2, now);
        let first = books.shelves.get_mut(&KEY).expect("filled").ready.pop_front().expect("two");
        let (_keep, mut stop) = tokio::sync::watch::channel(None);
        let limits = crate::harness::interpreter::CellLimits {
            interrupt_grace: Duration::ZERO,
            output_chars_max: 10,
            stream_bytes_max: None,
            grace: Duration::ZERO,
            memory_mib_max: 1,
        };
        let cell = crate::harness::interpreter::Cell {
            watcher: None,
            code: "exit 1",
            timeout: Duration::from_secs(5),
            execution_count: 1,
            argv: None,
        };
        assert!(first.interpreter.run(cell, &limits, &mut stop).await.interpreter.is_none());
        assert!(books.take(KEY, TakenFor::Once, now, true, &mut Vec::new()).is_some());
        assert_eq!(books.taken, 1);
    }

    #[tokio::test]
    async fn idle_shelves_shrink_and_idle_spaces_give_up_but_pinned_ones_stay() {
        let (mut books, start) = (books(), Instant::now());
        fill(&mut books, KEY, 4, start);
        fill(&mut books, OTHER, 4, start);
        books.shelves.get_mut(&OTHER).expect("filled").floor = 1;
        let mut dropped = Vec::new();
        books.keep_house(start + SHRINK_AFTER, &mut dropped);
        assert_eq!((books.shelves[&KEY].ready.len(), dropped.len()), (3, 2));
        books.keep_house(start + DROP_AFTER, &mut dropped);
        assert!(!books.shelves.contains_key(&KEY));
        assert_eq!(books.shelves[&OTHER].ready.len(), 1);
    }

    #[tokio::test]
    async fn at_the_cap_a_small_space_takes_from_the_largest() {
        let (mut books, now, mut evicted) = (books(), Instant::now(), None);
        fill(&mut books, KEY, 4, now);
        assert_eq!(books.next_refill(4, now, &mut evicted), Refill::Nothing);
        books.take(OTHER, TakenFor::Once, now, true, &mut Vec::new());
        assert_eq!(books.next_refill(4, now, &mut evicted), Refill::Launch { key: OTHER, hurry: true });
        assert!(evicted.is_some());
        assert_eq!(books.shelves[&KEY].ready.len(), 3);
    }

    #[tokio::test]
    async fn the_largest_space_takes_nothing_back() {
        let (mut books, now, mut evicted) = (books(), Instant::now(), None);
        fill(&mut books, KEY, 2, now);
        fill(&mut books, OTHER, 2, now);
        books.shelves.get_mut(&KEY).expect("filled").target = 8;
        assert_eq!(books.next_refill(4, now, &mut evicted), Refill::Nothing);
        assert!(evicted.is_none());
    }

    const DATA: ShelfKey = (SpaceId(1), Profile::PythonData);

    const KERNEL: ShelfKey = (SpaceId(1), Profile::Kernel);

    #[tokio::test]
    async fn full_shelves_have_their_data_slots_warmed_deeply_one_at_a_time() {
        let (mut books, now) = (books(), Instant::now());
        fill(&mut books, KEY, 2, now);
        fill(&mut books, DATA, 2, now);
        let (key, slot) = books.send_to_deepen().expect("all shelves are full");
        assert_eq!((key, books.shelves[&DATA].ready.len()), (DATA, 1));
        assert!(books.send_to_deepen().is_none(), "one at a time");
        assert_eq!(books.next_refill(8, now, &mut None), Refill::Nothing, "it keeps its place");
        assert!(books.come_back(key, slot.warm_up("out deep").await).is_none());
        assert!(books.shelves[&DATA].ready[0].is_deep && !books.shelves[&DATA].ready[1].is_deep);
        let (key, slot) = books.send_to_deepen().expect("one is left");
        assert!(books.come_back(key, Some(slot)).is_none());
        assert!(books.send_to_deepen().is_none(), "the other profile is not warmed deeply");
        fill(&mut books, KERNEL, 1, now);
        assert_eq!(books.send_to_deepen().expect("a kernel has the data stack").0, KERNEL);
    }

    #[tokio::test]
    async fn a_shelf_that_is_not_full_comes_first() {
        let (mut books, now) = (books(), Instant::now());
        fill(&mut books, DATA, 2, now);
        assert!(books.wants_deep());
        books.take(DATA, TakenFor::Once, now, true, &mut Vec::new()).expect("two are there");
        assert!(!books.wants_deep(), "one is missing");
    }

    #[tokio::test]
    async fn one_answer_takes_a_deep_slot_first_and_a_session_last() {
        for (taken_for, left_is_deep) in [(TakenFor::Once, false), (TakenFor::Session, true)] {
            let (mut books, now) = (books(), Instant::now());
            fill(&mut books, DATA, 2, now);
            let (key, slot) = books.send_to_deepen().expect("full");
            assert!(books.come_back(key, Some(slot)).is_none());
            books.take(DATA, taken_for, now, true, &mut Vec::new()).expect("two are there");
            assert_eq!(books.shelves[&DATA].ready[0].is_deep, left_is_deep);
            books.take(DATA, taken_for, now, true, &mut Vec::new()).expect("the other one does as well");
        }
    }

    #[tokio::test]
    async fn a_slot_that_dies_of_it_is_replaced_and_the_shelf_left_alone() {
        let (mut books, now) = (books(), Instant::now());
        fill(&mut books, DATA, 1, now);
        let (key, slot) = books.send_to_deepen().expect("full");
        drop(slot);
        assert!(books.come_back(key, None).is_none());
        assert_eq!(books.next_refill(8, now, &mut None), Refill::Launch { key: DATA, hurry: true });
        fill(&mut books, DATA, 1, now);
        assert!(!books.wants_deep());
    }

    #[tokio::test]
    async fn a_slot_whose_shelf_is_gone_is_given_back() {
        let (mut books, now) = (books(), Instant::now());
        fill(&mut books, DATA, 1, now);
        let (key, slot) = books.send_to_deepen().expect("full");
        books.shelves.clear();
        assert!(books.come_back(key, Some(slot)).is_some());
    }

    #[tokio::test]
    async fn slots_switched_off_keep_and_count_nothing() {
        let slots = Slots::new(0, 0);
        slots.pin(KEY, 3);
        assert!(slots.take(KEY, TakenFor::Once).is_none());
        assert_eq!((slots.stats().missed, slots.ready(KEY)), (0, 0));
    }
}
