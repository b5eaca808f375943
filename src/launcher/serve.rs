//! The launcher's loop: receives plans, makes shells, moves interpreters in, verifies, releases, answers.
//!
//! One thread, pid 1 of its pid namespace: every zygote, init and guest lives below it and ends with it. It
//! parses nothing a guest has written: from a child it takes eight bytes of status, from a zygote one byte,
//! from the daemon fixed records.
//!
//! ```text
//! Booting ──init reports──▶ Ready ──plan──▶ Confining ──status, verified, released──▶ Live
//!    └──────────────┴────────────────┴──────────────┴── kill ──▶ Dying ──init reaped──▶ (gone)
//! ```

use std::collections::{BTreeMap, HashMap, HashSet, VecDeque};
use std::fs::File;
use std::io;
use std::mem;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::time::{Duration, Instant};

use nix::sys::signal::{SigSet, Signal};
use nix::sys::signalfd::{SfdFlags, SignalFd};
use nix::unistd::Pid;
use rustix::event::epoll;
use rustix::net::RecvFlags;

use crate::launcher::bare;
use crate::launcher::cgroup::{CgroupLimits, Cgroups, Leaf};
use crate::launcher::guest::{self, Ends, Place, Programs};
use crate::launcher::husk::Husks;
use crate::launcher::leases::Leases;
use crate::launcher::plan::{
    End, LaunchPlan, Origin, REQUEST_BYTES, Reply, Request, SandboxId, SpaceId, Step,
};
use crate::launcher::posture::{Hello, Shape};
use crate::launcher::release;
use crate::launcher::rules::Rules;
use crate::launcher::settings::Throwaway;
use crate::launcher::shell::{AtStep, Left, Lot, Maker, NotStarted, Shell, StepError, failure};
use crate::launcher::spaces::{Spaces, is_busy};
use crate::launcher::throttle::Throttle;
use crate::launcher::wire::STATUS_BYTES;
use crate::launcher::zygotes::{self, Ground, Nursery, Zygote};
use crate::sys::packet;
use crate::sys::process::{Exit, default_signals, reap_one};

mod forks;

pub use forks::Forks;

/// How long a shell may boot, and an interpreter confine itself.
const STAGE_TIMEOUT: Duration = Duration::from_secs(20);
/// After a launch, shells are made up again only when this long no plan came: on few cores the making shows
/// in the request beside it.
const REFILL_QUIET: Duration = Duration::from_millis(4);
/// Ready shells of a space without traffic go away after this.
const READY_LINGER: Duration = Duration::from_secs(60);
/// Sandboxes at once, ready ones included.
const SANDBOXES_MAX: usize = 4096;
/// Plans waiting for a shell at once.
const WAITING_MAX: usize = 1024;
/// How soon a plan for a space that somebody still holds is tried again, and for how long. The thread does other things
/// meanwhile.
const BUSY_WAIT: Duration = Duration::from_millis(10);
const BUSY_MAX: Duration = Duration::from_secs(2);
/// Between two looks at the processor time of programs that are thrown away.
const CPU_LOOK: Duration = Duration::from_millis(250);
/// How long the end may take before the kernel does the rest.
const END_TIMEOUT: Duration = Duration::from_secs(5);
/// How long the daemon may leave its socket unread before everything ends.
const DAEMON_WRITE_TIMEOUT: Duration = Duration::from_secs(5);
/// Waits between tries to remove a group whose last process is still dying.
const REMOVE_WAIT: Duration = Duration::from_millis(20);
/// On v1 the kernel tells of a want of memory before it kills for it: how often the count is read again, and for
/// how long.
const OOM_WAIT: Duration = Duration::from_millis(5);
const OOM_MAX: Duration = Duration::from_secs(2);
/// The same for groups of a launcher that was killed, and after how many tries they are the next start's: what is
/// still busy then is not ours to end.
const ABANDONED_WAIT: Duration = Duration::from_millis(200);
const ABANDONED_TRIES: u32 = 300;

/// What the loop owns.
#[derive(Debug)]
pub struct Launcher {
    pub daemon: OwnedFd,
    pub rules: Rules,
    pub maker: Maker,
    pub cgroups: Cgroups,
    pub cgroup_limits: CgroupLimits,
    pub throwaway: Throwaway,
    pub spaces: Spaces,
    pub leases: Leases,
    pub abandoned: Abandoned,
    pub nurseries: Vec<Nursery>,
    pub zygote_cgroup: Vec<OwnedFd>,
    pub programs: Programs,
    pub shells_ready: usize,
    pub hello: Hello,
}

/// Groups that launchers of this host left when they were killed, by range of ids. Each range is locked while
/// they are removed, so that no new launcher takes it meanwhile.
#[derive(Debug, Default)]
pub struct Abandoned {
    ranges: Vec<(u32, File)>,
    next_try: Option<Instant>,
    tries: u32,
}

impl Abandoned {
    /// Removes what can be removed at once; keeps, locked, only ranges that are still busy.
    pub fn new(ranges: impl Iterator<Item = (u32, File)>, cgroups: &Cgroups) -> Abandoned {
        let busy = |range: &u32| !cgroups.remove_abandoned(&format!("caisson-{range}"));
        let ranges: Vec<_> = ranges.filter(|(range, _lock)| busy(range)).collect();
        Abandoned {
            next_try: (!ranges.is_empty()).then(|| Instant::now() + ABANDONED_WAIT),
            ranges,
            tries: 0,
        }
    }

    /// Tries once where it is time to.
    fn tend(&mut self, cgroups: &Cgroups, now: Instant) {
        if self.next_try.is_none_or(|at| now < at) {
            return;
        }
        self.tries += 1;
        self.ranges.retain(|(range, _lock)| !cgroups.remove_abandoned(&format!("caisson-{range}")));
        if self.tries >= ABANDONED_TRIES {
            self.ranges.clear();
        }
        self.next_try = (!self.ranges.is_empty()).then(|| now + ABANDONED_WAIT);
    }
}

/// Who owns a shell's user namespace: decides which interpreters may move in.
type Key = (SpaceId, u32);

#[derive(Debug)]
struct Entry {
    shell: Shell,
    stage: Stage,
    /// Cause of death, when we know one before the interpreter's status does.
    cause: Option<End>,
    /// The daemon has been told that this sandbox lives.
    announced: bool,
    /// The zygote that was given the job, if one was.
    maker: Option<Pid>,
    /// It may have so much processor time and no more.
    cpu_bounded: bool,
    /// Its group was given less than others have.
    tightened: bool,
}

impl Entry {
    fn new(shell: Shell, stage: Stage) -> Entry {
        Entry {
            shell,
            stage,
            cause: None,
            announced: false,
            maker: None,
            cpu_bounded: false,
            tightened: false,
        }
    }
}

#[derive(Debug)]
enum Stage {
    Booting { since: Instant, order: Option<Order> },
    Ready,
    Confining { since: Instant, order: Order, ends: Ends },
    Live { guest: Pid },
    Dying,
}

/// A plan on its way.
#[derive(Copy, Clone, Debug)]
struct Order {
    seq: u64,
    plan: LaunchPlan,
    since: Instant,
    /// It has been tried once, by a zygote that died over it.
    retried: bool,
}

/// Running state of the loop.
struct Loop {
    launcher: Launcher,
    epoll: OwnedFd,
    signals: SignalFd,
    own_namespaces: Vec<u64>,
    entries: HashMap<u64, Entry>,
    inits: HashMap<Pid, u64>,
    guests: HashMap<Pid, u64>,
    next_id: u64,
    seq_seen: u64,
    /// Last plan per key: which shells are worth having ready.
    traffic: BTreeMap<Key, Instant>,
    last_plan: Instant,
    refill_due: bool,
    removing: VecDeque<(Leaf, Instant)>,
    husks: Husks,
    deleting: Vec<(u64, SpaceId)>,
    /// Plans for spaces that somebody still holds, and when each is tried again.
    held_up: VecDeque<(Order, Instant)>,
    /// For what the daemon can make us log.
    throttle: Throttle,
    /// Sandboxes in want of memory, when to look at them again, and until when.
    in_want: VecDeque<(u64, Instant, Instant)>,
    /// When to look at what throw-away programs have used.
    look_at_cpu: Option<Instant>,
    ending: Option<Instant>,
}

/// What an epoll event is about.
#[derive(Copy, Clone, Debug, PartialEq, Eq)]
enum Source {
    Daemon,
    Signals,
    Zygote(u32),
    Init(u64),
    Status(u64),
    Oom(u64),
}

impl Source {
    fn token(self) -> u64 {
        match self {
            Source::Daemon => 0,
            Source::Signals => 1,
            Source::Zygote(pid) => 2 << 56 | u64::from(pid),
            Source::Init(id) => 3 << 56 | id,
            Source::Status(id) => 4 << 56 | id,
            Source::Oom(id) => 5 << 56 | id,
        }
    }

    fn from_token(token: u64) -> Option<Source> {
        let id = token & ((1 << 56) - 1);
        Some(match token >> 56 {
            0 if id == 0 => Source::Daemon,
            0 if id == 1 => Source::Signals,
            2 => Source::Zygote(id as u32),
            3 => Source::Init(id),
            4 => Source::Status(id),
            5 => Source::Oom(id),
            _ => return None,
        })
    }
}

impl Launcher {
    /// Serves until the daemon is gone or a signal asks to end. Zygotes are up, or given up, before the
    /// greeting goes out.
    pub fn run(self) -> io::Result<()> {
        let mut state = self.begin()?;
        state.greet()?;
        state.finish()
    }

    /// Starts the zygotes and waits until they serve, or are given up.
    fn begin(self) -> io::Result<Loop> {
        let mut mask = SigSet::empty();
        mask.add(Signal::SIGCHLD);
        mask.add(Signal::SIGTERM);
        mask.add(Signal::SIGINT);
        mask.thread_block()?;
        default_signals()?;
        let signals = SignalFd::with_flags(&mask, SfdFlags::SFD_CLOEXEC | SfdFlags::SFD_NONBLOCK)?;
        let epoll = epoll::create(epoll::CreateFlags::CLOEXEC)?;
        rustix::net::sockopt::set_socket_timeout(
            &self.daemon,
            rustix::net::sockopt::Timeout::Send,
            Some(DAEMON_WRITE_TIMEOUT),
        )?;
        let mut state = Loop {
            own_namespaces: release::own_namespaces(),
            launcher: self,
            epoll,
            signals,
            entries: HashMap::new(),
            inits: HashMap::new(),
            guests: HashMap::new(),
            next_id: 1,
            seq_seen: 0,
            traffic: BTreeMap::new(),
            last_plan: Instant::now(),
            refill_due: false,
            removing: VecDeque::new(),
            husks: Husks::default(),
            deleting: Vec::new(),
            held_up: VecDeque::new(),
            throttle: Throttle::new(Instant::now()),
            in_want: VecDeque::new(),
            look_at_cpu: None,
            ending: None,
        };
        state.watch(state.launcher.daemon.as_fd(), Source::Daemon)?;
        state.watch(state.signals.as_fd(), Source::Signals)?;
        for index in 0..state.launcher.nurseries.len() {
            state.start_zygote(index);
        }
        state.until_zygotes_serve()?;
        Ok(state)
    }
}

impl Loop {
    /// Serves until everything has ended.
    fn finish(mut self) -> io::Result<()> {
        while !self.ended() {
            self.turn()?;
        }
        let Launcher { spaces, leases, .. } = &mut self.launcher;
        spaces.close_all(leases);
        self.launcher.cgroups.remove_all();
        Ok(())
    }

    fn watch(&self, fd: BorrowedFd<'_>, source: Source) -> io::Result<()> {
        let data = epoll::EventData::new_u64(source.token());
        Ok(epoll::add(&self.epoll, fd, data, epoll::EventFlags::IN)?)
    }

    /// Waits for events and timers, once.
    fn turn(&mut self) -> io::Result<()> {
        let timeout = self.next_timer().map(|at| at.saturating_duration_since(Instant::now()));
        let timeout = timeout.map(|wait| rustix::event::Timespec {
            tv_sec: wait.as_secs() as i64,
            tv_nsec: i64::from(wait.subsec_nanos()),
        });
        let mut events = Vec::with_capacity(64);
        match epoll::wait(&self.epoll, rustix::buffer::spare_capacity(&mut events), timeout.as_ref()) {
            Ok(_) | Err(rustix::io::Errno::INTR) => {}
            Err(error) => return Err(error.into()),
        }
        for event in events {
            match Source::from_token(event.data.u64()) {
                Some(Source::Daemon) => self.on_daemon(),
                Some(Source::Signals) => self.on_signal(),
                Some(Source::Zygote(pid)) => self.on_zygote(Pid::from_raw(pid as i32)),
                Some(Source::Init(id)) => self.on_init(id),
                Some(Source::Status(id)) => self.on_status(id),
                Some(Source::Oom(id)) => self.on_oom(id),
                None => {}
            }
        }
        self.on_timers(Instant::now());
        Ok(())
    }

    // ---- timers -----------------------------------------------------------------------------------------

    fn next_timer(&self) -> Option<Instant> {
        let stages = self.entries.values().filter_map(|entry| match entry.stage {
            Stage::Booting { since, .. } | Stage::Confining { since, .. } => Some(since + STAGE_TIMEOUT),
            _ => None,
        });
        let zygotes = self.launcher.nurseries.iter().filter_map(Nursery::next_timer);
        let refill = self.refill_due.then(|| self.last_plan + REFILL_QUIET);
        let ready = self.entries.values().any(|entry| matches!(entry.stage, Stage::Ready));
        let lingers = ready || !self.husks.is_empty() || self.launcher.cgroups.keeps_any();
        let linger = lingers.then(|| self.traffic.values().map(|last| *last + READY_LINGER).min()).flatten();
        let spaces = self.launcher.spaces.idle_at().into_iter().chain(self.launcher.spaces.tally_at()).min();
        let removing = self.removing.front().map(|(_, at)| *at);
        let held_up = self.held_up.front().map(|(_, at)| *at);
        let removing = removing.into_iter().chain(self.throttle.due()).min();
        let ending = self.ending.map(|since| since + END_TIMEOUT).or(self.launcher.abandoned.next_try);
        let in_want = self.in_want.front().map(|(_, at, _)| *at).into_iter().chain(self.look_at_cpu).min();
        let timers = stages.chain(zygotes).chain(refill).chain(linger).chain(spaces);
        timers.chain(removing).chain(held_up).chain(in_want).chain(ending).min()
    }

    fn on_timers(&mut self, now: Instant) {
        self.expire_stages(now);
        self.tend_zygotes(now);
        self.retry_removals(now);
        for _ in 0..self.in_want.len() {
            match self.in_want.pop_front() {
                Some((id, at, until)) if now >= at => self.look_for_kills(id, until),
                Some(later) => self.in_want.push_back(later),
                None => {}
            }
        }
        if let Some(left_out) = self.throttle.take_left_out(now) {
            tracing::error!(left_out, "alarm: more plans were not carried out than are written here");
        }
        let Launcher { spaces, leases, .. } = &mut self.launcher;
        for space in spaces.close_idle(now, leases) {
            self.launcher.cgroups.close_space(&space_name(space));
        }
        self.end_spent(now);
        if self.ending.is_some() {
            return;
        }
        self.launcher.abandoned.tend(&self.launcher.cgroups, now);
        self.retry_held_up(now);
        if let Some(space) = self.launcher.spaces.tally(now) {
            self.end_overfull(space);
        }
        self.drop_lingering(now);
        if self.refill_due && now >= self.last_plan + REFILL_QUIET {
            self.refill();
        }
    }

    /// Ends programs that have had all the processor time they may have.
    fn end_spent(&mut self, now: Instant) {
        let (Some(cpu_secs), Some(at)) = (self.launcher.throwaway.cpu_secs, self.look_at_cpu) else { return };
        if now < at {
            return;
        }
        let mut any = false;
        for entry in self.entries.values_mut().filter(|entry| entry.cpu_bounded) {
            any = true;
            let spent = entry.shell.leaf.cpu_used().is_some_and(|used| used.as_secs() >= cpu_secs);
            if spent && matches!(entry.stage, Stage::Live { .. }) {
                entry.cause.get_or_insert(End::CpuSpent);
                entry.shell.kill();
            }
        }
        self.look_at_cpu = any.then(|| now + CPU_LOOK);
    }

    /// Bounds the group of a program that is thrown away.
    fn bound_throwaway(&mut self, id: u64) -> Result<(), StepError> {
        let Launcher { throwaway, cgroup_limits, .. } = &self.launcher;
        let Some(entry) = self.entries.get_mut(&id) else { return Ok(()) };
        if let Some(memory_bytes) = throwaway.memory_bytes.filter(|bytes| *bytes < cgroup_limits.memory_bytes)
        {
            entry.shell.leaf.tighten(CgroupLimits { memory_bytes, ..*cgroup_limits }).at(Step::Cgroup)?;
            entry.tightened = true;
        }
        entry.cpu_bounded = throwaway.cpu_secs.is_some();
        if entry.cpu_bounded && self.look_at_cpu.is_none() {
            self.look_at_cpu = Some(Instant::now() + CPU_LOOK);
        }
        Ok(())
    }

    fn expire_stages(&mut self, now: Instant) {
        let late: Vec<u64> = self
            .entries
            .iter()
            .filter(|(_, entry)| match entry.stage {
                Stage::Booting { since, .. } | Stage::Confining { since, .. } => now >= since + STAGE_TIMEOUT,
                _ => false,
            })
            .map(|(id, _)| *id)
            .collect();
        for id in late {
            if self.entries.get(&id).is_some_and(|entry| matches!(entry.stage, Stage::Confining { .. })) {
                self.distrust_maker(id, "its child did not come");
            }
            let source = io::Error::from(io::ErrorKind::TimedOut);
            self.fail(id, &StepError { step: Step::Timeout, source });
        }
    }

    fn retry_removals(&mut self, now: Instant) {
        for _ in 0..self.removing.len() {
            match self.removing.pop_front() {
                Some((leaf, at)) if now >= at && leaf.remove() => drop(leaf),
                Some((leaf, at)) if now >= at => self.removing.push_back((leaf, now + REMOVE_WAIT)),
                Some(waiting) => self.removing.push_back(waiting),
                None => {}
            }
        }
    }

    /// Each once: what is still held is put behind the others.
    fn retry_held_up(&mut self, now: Instant) {
        for _ in 0..self.held_up.len() {
            match self.held_up.pop_front() {
                Some((order, at)) if now >= at => self.on_launch(order),
                Some(waiting) => self.held_up.push_back(waiting),
                None => {}
            }
        }
    }

    // ---- the daemon -------------------------------------------------------------------------------------

    fn greet(&mut self) -> io::Result<()> {
        let serving = |nursery: &Nursery| nursery.serving().map(|_| nursery.profile);
        self.launcher.hello.warm = self.launcher.nurseries.iter().filter_map(serving).collect();
        let found = self.launcher.spaces.found()?;
        self.launcher.hello.spaces_to = found.highest();
        let hello = serde_json::to_vec(&self.launcher.hello)?;
        packet::send(&self.launcher.daemon, &hello, &[])?;
        if found.others > 0 {
            tracing::warn!(
                count = found.others,
                "left alone in the folder of spaces: what is none as spaces are now"
            );
        }
        for space in found.spaces {
            self.reply(&Reply::SpaceFound { space }, &[]);
        }
        Ok(())
    }

    fn on_daemon(&mut self) {
        let mut buffer = [0_u8; REQUEST_BYTES + 1];
        match packet::receive(&self.launcher.daemon, &mut buffer, RecvFlags::DONTWAIT) {
            Ok((0, _)) => self.begin_end("the daemon is gone"),
            // Descriptors are never part of a plan: they are dropped, and so closed, here.
            Ok((length, _descriptors)) => match Request::decode(&buffer[..length]) {
                Ok(request) if request.seq() > self.seq_seen => {
                    self.seq_seen = request.seq();
                    self.on_request(request);
                }
                Ok(request) if self.may_log() => tracing::error!(?request, "alarm: replayed plan refused"),
                Err(error) if self.may_log() => {
                    tracing::error!(%error, length, "alarm: malformed plan refused");
                }
                _ => {}
            },
            Err(error) if error.kind() == io::ErrorKind::WouldBlock => {}
            Err(error) if error.kind() == io::ErrorKind::InvalidData => {
                if self.may_log() {
                    tracing::error!("alarm: oversize plan refused");
                }
            }
            Err(error) => {
                tracing::error!(%error, "failed to read from the daemon");
                self.begin_end("the daemon's socket failed");
            }
        }
    }

    /// Whether one more line about a plan that was not carried out may be written.
    fn may_log(&mut self) -> bool {
        self.throttle.admits(Instant::now())
    }

    fn on_request(&mut self, request: Request) {
        match request {
            Request::Launch { seq, plan } => {
                self.on_launch(Order { seq, plan, since: Instant::now(), retried: false });
            }
            Request::End { sandbox, .. } => self.end_sandbox(sandbox.0),
            Request::Interrupt { seq, sandbox } => {
                self.interrupt(sandbox.0);
                self.reply(&Reply::Interrupted { seq }, &[]);
            }
            Request::DeleteSpace { seq, space } if space.0 == 0 => {
                // Ours, for the measurement at the start.
                self.reply(&Reply::SpaceDeleted { seq, errno: rustix::io::Errno::INVAL.raw_os_error() }, &[]);
            }
            Request::DeleteSpace { seq, space } => self.delete_space(seq, space),
        }
    }

    fn reply(&mut self, reply: &Reply, descriptors: &[BorrowedFd<'_>]) {
        if self.ending.is_some() {
            // The daemon is gone, or knows that all of its sandboxes end.
            return;
        }
        if let Err(error) = packet::send(&self.launcher.daemon, &reply.encode(), descriptors) {
            tracing::error!(%error, "failed to answer the daemon");
            self.begin_end("the daemon does not read");
        }
    }

    fn refuse(&mut self, seq: u64, error: &StepError) {
        let errno = error.source.raw_os_error().unwrap_or(match error.source.kind() {
            io::ErrorKind::TimedOut => rustix::io::Errno::TIMEDOUT.raw_os_error(),
            io::ErrorKind::QuotaExceeded => rustix::io::Errno::DQUOT.raw_os_error(),
            _ => rustix::io::Errno::IO.raw_os_error(),
        });
        // One that the daemon has taken back is no failure.
        if errno != rustix::io::Errno::CANCELED.raw_os_error() && self.may_log() {
            tracing::error!(step = %error.step, error = %error.source, "launch failed");
        }
        self.reply(&Reply::LaunchFailed { seq, step: error.step, errno }, &[]);
    }

    fn on_launch(&mut self, order: Order) {
        self.last_plan = Instant::now();
        if let Err(error) = self.check(&order.plan) {
            self.refuse(order.seq, &error);
            return;
        }
        let key = (order.plan.space, self.owner_for(&order));
        if !order.plan.space.is_transient() {
            self.traffic.insert(key, self.last_plan);
            self.refill_due = true;
        }
        match self.ready(key) {
            Some(id) => self.move_in(id, order),
            None => {
                self.boot(key, Some(order));
            }
        }
    }

    /// The plan against the launcher's own policy.
    fn check(&self, plan: &LaunchPlan) -> Result<(), StepError> {
        let refuse = |errno: rustix::io::Errno| Err(StepError { step: Step::Plan, source: errno.into() });
        let known = self.launcher.programs.has(plan.profile, plan.interpreter);
        let booting = self.entries.values().filter(|entry| matches!(entry.stage, Stage::Booting { .. }));
        let waiting = booting.count() + self.held_up.len();
        match () {
            () if self.ending.is_some() => refuse(rustix::io::Errno::SHUTDOWN),
            () if plan.space.0 == 0 => refuse(rustix::io::Errno::INVAL),
            () if usize::from(plan.account.0) >= self.launcher.rules.accounts.len() => {
                refuse(rustix::io::Errno::INVAL)
            }
            () if !known => refuse(rustix::io::Errno::NOENT),
            () if self.deleting.iter().any(|(_, space)| *space == plan.space) => {
                refuse(rustix::io::Errno::BUSY)
            }
            () if self.entries.len() >= SANDBOXES_MAX || waiting >= WAITING_MAX => {
                refuse(rustix::io::Errno::AGAIN)
            }
            () => Ok(()),
        }
    }

    /// A plan that a zygote has died over goes to an exec'd interpreter: the zygote that is next may not have
    /// come yet, and the old one may still look alive.
    fn zygote_for(&self, order: &Order) -> Option<usize> {
        // Zygotes are made of the default interpreter.
        if order.plan.origin == Origin::Strict || order.retried || order.plan.interpreter != 0 {
            return None;
        }
        let serves =
            |nursery: &Nursery| nursery.profile == order.plan.profile.zygote() && nursery.serving().is_some();
        self.launcher.nurseries.iter().position(serves)
    }

    fn owner_for(&self, order: &Order) -> u32 {
        let zygote = self.zygote_for(order).and_then(|index| self.launcher.nurseries[index].serving());
        zygote.map_or(0, |zygote| zygote.uid)
    }

    fn delete_space(&mut self, seq: u64, space: SpaceId) {
        self.deleting.push((seq, space));
        // Nothing is made for it any more, ahead or late: that would make it again.
        self.traffic.retain(|(of, _), _| *of != space);
        for (order, at) in mem::take(&mut self.held_up) {
            if order.plan.space == space {
                let source = rustix::io::Errno::CANCELED.into();
                self.refuse(order.seq, &StepError { step: Step::SpaceOpen, source });
            } else {
                self.held_up.push_back((order, at));
            }
        }
        let ids: Vec<u64> =
            self.entries.iter().filter(|(_, entry)| entry.shell.space == space).map(|(id, _)| *id).collect();
        for id in ids {
            self.end_sandbox(id);
        }
        self.finish_deletions();
    }

    fn finish_deletions(&mut self) {
        for (seq, space) in mem::take(&mut self.deleting) {
            if self.entries.values().any(|entry| entry.shell.space == space) {
                self.deleting.push((seq, space));
                continue;
            }
            let Launcher { spaces, leases, .. } = &mut self.launcher;
            let errno = match spaces.delete(space, leases) {
                Ok(()) => 0,
                Err(error) => error.raw_os_error().unwrap_or(5),
            };
            self.launcher.cgroups.close_space(&space_name(space));
            for block in self.husks.retain(|of, _| of != space) {
                self.free_block(block);
            }
            self.reply(&Reply::SpaceDeleted { seq, errno }, &[]);
        }
    }

    // ---- shells -----------------------------------------------------------------------------------------

    fn ready(&self, key: Key) -> Option<u64> {
        let fits = |entry: &Entry| {
            matches!(entry.stage, Stage::Ready) && (entry.shell.space, entry.shell.owner) == key
        };
        self.entries.iter().find(|(_, entry)| fits(entry)).map(|(id, _)| *id)
    }

    /// Starts a shell, for an order or to be ready. False when it could not be started.
    fn boot(&mut self, key: Key, order: Option<Order>) -> bool {
        let id = self.next_id;
        self.next_id += 1;
        match self.try_boot(id, key) {
            Ok(shell) => {
                self.inits.insert(shell.pid, id);
                let watched = self.watch(shell.socket.as_fd(), Source::Init(id)).at(Step::InitExec);
                let stage = Stage::Booting { since: Instant::now(), order };
                self.entries.insert(id, Entry::new(shell, stage));
                if let Err(error) = watched {
                    self.fail(id, &error);
                }
            }
            Err(error) => {
                match order {
                    Some(order) if waits_for_space(&order, &error) => {
                        self.held_up.push_back((order, Instant::now() + BUSY_WAIT));
                    }
                    Some(order) => self.refuse(order.seq, &error),
                    None => self.not_made(key, &error),
                }
                return false;
            }
        }
        true
    }

    /// No other is made for this key before the next plan for it: the next try would most likely end in the same way,
    /// and the one after that.
    fn not_made(&mut self, key: Key, error: &StepError) {
        self.traffic.remove(&key);
        if self.may_log() {
            tracing::error!(step = %error.step, error = %error.source, "shell not made");
        }
    }

    fn try_boot(&mut self, id: u64, (space, owner): Key) -> Result<Shell, StepError> {
        let Launcher { spaces, leases, .. } = &mut self.launcher;
        let own = spaces.enter(space, leases).at(Step::SpaceOpen)?;
        let made = self.prepare(id, (space, owner), own);
        let lot = made.inspect_err(|_| self.launcher.spaces.leave(space))?;
        let block = lot.block;
        let Launcher { maker, rules, spaces, .. } = &self.launcher;
        let NotStarted { error, left } = match maker.start(rules, spaces, space, owner, lot) {
            Ok(shell) => return Ok(shell),
            Err(not_started) => not_started,
        };
        match left {
            Left::Group(leaf) => self.clear_away(space, block, leaf),
            // Cleared away when its init is reaped.
            Left::Dying(shell) => {
                self.inits.insert(shell.pid, id);
                self.entries.insert(id, Entry::new(*shell, Stage::Dying));
            }
        }
        Err(error)
    }

    /// Ids, the space's `own` where it has them, a group and what an earlier sandbox left.
    fn prepare(&mut self, id: u64, (space, owner): Key, own: Option<u32>) -> Result<Lot, StepError> {
        let no_ids = || io::Error::from(rustix::io::Errno::AGAIN);
        let husk = self.husks.take(space, owner);
        let Launcher { leases, cgroups, cgroup_limits, .. } = &mut self.launcher;
        let of_husk = husk.as_ref().map(|husk| husk.block);
        let block = own.or(of_husk).or_else(|| leases.block()).ok_or_else(no_ids).at(Step::Lease)?;
        let (of_space, name) = (space_name(space), sandbox_name(id));
        let leaf = match cgroups.reuse(&of_space, owner, *cgroup_limits) {
            Some(leaf) => Ok(leaf),
            None => cgroups.leaf(&of_space, &name, *cgroup_limits).at(Step::Cgroup),
        };
        let leaf = leaf.inspect_err(|_| self.free_block(block))?;
        Ok(Lot { block, leaf, husk })
    }

    /// Gives back what a sandbox held that has no process any more.
    fn clear_away(&mut self, space: SpaceId, block: u32, leaf: Leaf) {
        self.free_block(block);
        self.launcher.spaces.leave(space);
        if !leaf.remove() {
            self.removing.push_back((leaf, Instant::now() + REMOVE_WAIT));
        }
    }

    /// The sandbox's own block; a space's is free again when the space is closed.
    fn free_block(&mut self, block: u32) {
        if !self.launcher.rules.ids_on_disk() {
            self.launcher.leases.free(block);
        }
    }

    fn on_init(&mut self, id: u64) {
        let Some(entry) = self.entries.get_mut(&id) else { return };
        let order = match &entry.stage {
            Stage::Booting { order, .. } => *order,
            _ if entry.shell.bare => return self.on_word_of_init(id),
            // Init never speaks again: this is its end, and waitpid tells.
            _ => {
                let _ = epoll::delete(&self.epoll, &entry.shell.socket);
                return;
            }
        };
        if let Err(error) = entry.shell.finish(&self.launcher.rules) {
            self.fail(id, &error);
            return;
        }
        entry.stage = Stage::Ready;
        if !entry.shell.bare {
            // Readable only at its end from now on, which waitpid tells as well.
            let _ = epoll::delete(&self.epoll, &entry.shell.socket);
        }
        if let Some(oom) = &entry.shell.leaf.oom {
            let data = epoll::EventData::new_u64(Source::Oom(id).token());
            if let Err(error) = epoll::add(&self.epoll, oom, data, epoll::EventFlags::IN) {
                tracing::error!(%error, "out-of-memory events are not watched");
            }
        }
        if let Some(order) = order {
            self.move_in(id, order);
        }
    }

    /// The init of a bare sandbox is the parent of its guest, and tells how that ended.
    fn on_word_of_init(&mut self, id: u64) {
        let Some(entry) = self.entries.get_mut(&id) else { return };
        match entry.shell.read_guest_end() {
            Some(how) => {
                if let Stage::Live { guest } = entry.stage {
                    self.guests.remove(&guest);
                }
                // A guest that ended before its release has said why on its status pipe.
                if matches!(entry.stage, Stage::Live { .. }) {
                    self.on_guest_exit(id, how);
                }
            }
            None => {
                let _ = epoll::delete(&self.epoll, &entry.shell.socket);
            }
        }
    }

    fn refill(&mut self) {
        self.refill_due = false;
        let now = Instant::now();
        self.traffic.retain(|_, last| now < *last + READY_LINGER);
        let owners: Vec<u32> = self.live_owners();
        for key in self.traffic.keys().copied().collect::<Vec<Key>>() {
            if !owners.contains(&key.1) {
                continue;
            }
            let have = self
                .entries
                .values()
                .filter(|entry| {
                    let waits = matches!(entry.stage, Stage::Ready | Stage::Booting { order: None, .. });
                    waits && (entry.shell.space, entry.shell.owner) == key
                })
                .count();
            if have < self.launcher.shells_ready && self.entries.len() < SANDBOXES_MAX {
                if !self.boot(key, None) {
                    continue;
                }
                // One at a time: the next turn of the loop sees whether a plan has come meanwhile.
                self.refill_due = true;
                self.last_plan = now;
                return;
            }
        }
    }

    /// Uids whose shells can still be moved into.
    fn live_owners(&self) -> Vec<u32> {
        let zygotes = self.launcher.nurseries.iter().filter_map(|nursery| nursery.serving());
        zygotes.map(|zygote| zygote.uid).chain([0]).collect()
    }

    fn drop_lingering(&mut self, now: Instant) {
        let owners = self.live_owners();
        let useless: Vec<u64> = self
            .entries
            .iter()
            .filter(|(_, entry)| {
                let key = (entry.shell.space, entry.shell.owner);
                let wanted = self.traffic.get(&key).is_some_and(|last| now < *last + READY_LINGER);
                matches!(entry.stage, Stage::Ready) && (!wanted || !owners.contains(&key.1))
            })
            .map(|(id, _)| *id)
            .collect();
        for id in useless {
            self.end_sandbox(id);
        }
        self.traffic.retain(|_, last| now < *last + READY_LINGER);
        if self.launcher.cgroups.keeps_any() {
            let busy: HashSet<String> = self.traffic.keys().map(|(space, _)| space_name(*space)).collect();
            self.launcher.cgroups.let_go(|space| busy.contains(space));
        }
        if !self.husks.is_empty() {
            let traffic = &self.traffic;
            let wanted = |space, owner| owners.contains(&owner) && traffic.contains_key(&(space, owner));
            for block in self.husks.retain(wanted) {
                self.free_block(block);
            }
        }
    }

    // ---- launches ---------------------------------------------------------------------------------------

    fn move_in(&mut self, id: u64, order: Order) {
        match self.try_move_in(id, &order) {
            Ok(ends) => {
                let watched = self.watch(ends.status.as_fd(), Source::Status(id)).at(Step::Stop);
                if let Some(entry) = self.entries.get_mut(&id) {
                    entry.stage = Stage::Confining { since: Instant::now(), order, ends };
                }
                if let Err(error) = watched {
                    self.fail(id, &error);
                }
            }
            Err(error) if error.step == Step::Zygote && !order.retried => {
                self.distrust_maker(id, "it took no job");
                self.end_sandbox(id);
                self.on_launch(Order { retried: true, ..order });
            }
            Err(error) => {
                self.refuse(order.seq, &error);
                self.end_sandbox(id);
            }
        }
    }

    fn try_move_in(&mut self, id: u64, order: &Order) -> Result<Ends, StepError> {
        let gone = || StepError { step: Step::MoveIn, source: rustix::io::Errno::SRCH.into() };
        let plan = &order.plan;
        let account = usize::from(plan.account.0);
        self.launcher.spaces.mend(plan.space).at(Step::SpaceOpen)?;
        if plan.throwaway {
            self.bound_throwaway(id)?;
        }
        let zygote = self.zygote_for(order);
        let entry = self.entries.get_mut(&id).ok_or_else(gone)?;
        let shell = &entry.shell;
        let Launcher { rules, nurseries, programs, spaces, .. } = &mut self.launcher;
        // A zygote may have died while the shell booted: then an exec'd interpreter moves in. One that was
        // replaced still does what it was meant for.
        match zygote.and_then(|index| nurseries[index].for_owner(shell.owner)) {
            Some(zygote) => {
                zygote.forks += 1;
                entry.maker = Some(zygote.pid);
                guest::fork_into(shell, rules, account, zygote.socket.as_fd())
            }
            None => {
                let user = &rules.accounts[account].name;
                let place =
                    if shell.bare { Place::on_host(&spaces.parts(shell.space)) } else { Place::inside() };
                let program =
                    programs.program(plan.profile, plan.interpreter, user, &place).ok_or_else(gone)?;
                if shell.bare {
                    guest::fork_by_init(shell, rules, account, &program)
                } else {
                    guest::exec_into(shell, rules, account, &program)
                }
            }
        }
    }

    fn on_status(&mut self, id: u64) {
        let Some(entry) = self.entries.get_mut(&id) else { return };
        let Stage::Confining { ends, .. } = &entry.stage else { return };
        let mut report = [0_u8; STATUS_BYTES];
        let length = rustix::io::read(&ends.status, &mut report);
        let failed = match length {
            Ok(STATUS_BYTES) => failure(&report).map(|(step, source)| StepError { step, source }),
            // The child ended without a word: killed, or its zygote never forked it.
            _ => Some(StepError { step: Step::MoveIn, source: rustix::io::Errno::CHILD.into() }),
        };
        match failed {
            Some(error) => self.fail_or_retry(id, &error),
            None => self.verify_and_release(id),
        }
    }

    /// A zygote that died with a job in its hands is no fault of the job: a new shell, once.
    fn fail_or_retry(&mut self, id: u64, error: &StepError) {
        let silent = error.step == Step::MoveIn
            && error.source.raw_os_error() == Some(rustix::io::Errno::CHILD.raw_os_error());
        let retry = self.entries.get(&id).and_then(|entry| match &entry.stage {
            Stage::Confining { order, .. } if silent && !order.retried => Some(*order),
            _ => None,
        });
        match retry {
            Some(order) => {
                tracing::warn!(sandbox = id, "interpreter ended before it was confined; trying once more");
                // That is its order.
                let _ = self.kill(id);
                self.on_launch(Order { retried: true, ..order });
            }
            None => self.fail(id, error),
        }
    }

    fn verify_and_release(&mut self, id: u64) {
        let Some(entry) = self.entries.get_mut(&id) else { return };
        let Stage::Confining { order, .. } = &entry.stage else { return };
        let order = *order;
        let shell = &entry.shell;
        let known = |pid: Pid| self.inits.contains_key(&pid) || self.guests.contains_key(&pid);
        let found = if shell.bare { bare::guest_of(shell.pid) } else { find_guest(shell, known) };
        let Some(guest) = found else {
            self.distrust_maker(id, "its child is not where it says");
            self.fail(id, &StepError { step: Step::Release, source: rustix::io::Errno::SRCH.into() });
            return;
        };
        let account = usize::from(order.plan.account.0);
        match release::verify(guest, shell, &self.launcher.rules, account, &self.own_namespaces) {
            Ok(attestation) => {
                let view = order.plan.view.then(|| self.launcher.spaces.view(order.plan.space)).transpose();
                let view = match view.at(Step::SpaceView) {
                    Ok(view) => view,
                    Err(error) => return self.fail(id, &error),
                };
                let Stage::Confining { ends, .. } = mem::replace(&mut entry.stage, Stage::Live { guest })
                else {
                    return;
                };
                entry.announced = true;
                entry.shell.furnish();
                self.guests.insert(guest, id);
                let let_go = rustix::io::write(&ends.release, b"g").map_err(io::Error::from);
                if let Err(source) = let_go {
                    tracing::error!(error = %source, "failed to release a guest");
                }
                let reply = Reply::Launched { seq: order.seq, sandbox: SandboxId(id), attestation };
                let daemon: Vec<BorrowedFd<'_>> = ends.daemon.iter().chain(&view).map(AsFd::as_fd).collect();
                self.reply(&reply, &daemon);
            }
            Err(mismatch) => {
                tracing::error!(sandbox = id, %guest, %mismatch, "alarm: confinement does not match");
                self.distrust_maker(id, "its child is not confined");
                self.fail(id, &StepError { step: Step::Release, source: rustix::io::Errno::PERM.into() });
            }
        }
    }

    /// Answers whoever waits for this sandbox, and ends it.
    fn fail(&mut self, id: u64, error: &StepError) {
        let Some(entry) = self.entries.get(&id) else { return };
        let key = (entry.shell.space, entry.shell.owner);
        match self.kill(id) {
            Some(order) => self.refuse(order.seq, error),
            None => self.not_made(key, error),
        }
    }

    // ---- ends -------------------------------------------------------------------------------------------

    fn end_sandbox(&mut self, id: u64) {
        if let Some(entry) = self.entries.get_mut(&id) {
            entry.cause.get_or_insert(End::Ended);
            self.kill_with_its_order(id, rustix::io::Errno::CANCELED);
        }
    }

    /// As Ctrl-C would: what the interpreter started in its own process group hears it too. Only for guests whose
    /// end we have not seen, so that the number is still theirs.
    fn interrupt(&mut self, id: u64) {
        let Some(Entry { shell, stage: Stage::Live { guest }, .. }) = self.entries.get(&id) else { return };
        let sent = if shell.bare {
            bare::interrupt(shell.pid, *guest)
        } else {
            // The guest is its group's leader and our child, not yet waited for.
            nix::sys::signal::killpg(*guest, Signal::SIGINT).map_err(io::Error::from)
        };
        if let Err(error) = sent {
            tracing::debug!(sandbox = id, %error, "interrupt not delivered");
        }
    }

    /// Ends the guests of a space that holds too much; ready shells have no guest that could write.
    fn end_overfull(&mut self, space: SpaceId) {
        let live = self
            .entries
            .iter_mut()
            .filter(|(_, entry)| entry.shell.space == space && matches!(entry.stage, Stage::Live { .. }));
        for (_, entry) in live {
            entry.cause.get_or_insert(End::SpaceFull);
            entry.shell.kill();
        }
    }

    /// Returns the order that was on its way in it: each is answered, whatever becomes of its sandbox, since the daemon
    /// holds a place for it until then.
    #[must_use = "an order that nobody answers is waited for"]
    fn kill(&mut self, id: u64) -> Option<Order> {
        let entry = self.entries.get_mut(&id)?;
        entry.shell.kill();
        if matches!(entry.stage, Stage::Live { .. }) {
            return None;
        }
        match mem::replace(&mut entry.stage, Stage::Dying) {
            Stage::Booting { order, .. } => order,
            Stage::Confining { order, .. } => Some(order),
            Stage::Ready | Stage::Live { .. } | Stage::Dying => None,
        }
    }

    /// The same where the order cannot be carried out any more.
    fn kill_with_its_order(&mut self, id: u64, why: rustix::io::Errno) {
        if let Some(order) = self.kill(id) {
            self.refuse(order.seq, &StepError { step: Step::MoveIn, source: why.into() });
        }
    }

    fn on_oom(&mut self, id: u64) {
        let Some(entry) = self.entries.get_mut(&id) else { return };
        if let Some(event) = &entry.shell.leaf.oom {
            let mut count = [0_u8; 8];
            // Drained or empty: the count itself means nothing, the file below decides.
            let _ = rustix::io::read(event, &mut count);
        }
        self.look_for_kills(id, Instant::now() + OOM_MAX);
    }

    /// v1 kills one process; a session must not go on half dead. The event may be ahead of the kill, and there
    /// is no other: until the count has changed, or the memory was found elsewhere, it is read again.
    fn look_for_kills(&mut self, id: u64, until: Instant) {
        let Some(entry) = self.entries.get_mut(&id) else { return };
        let now = Instant::now();
        if entry.shell.leaf.out_of_memory() {
            entry.cause = Some(End::OutOfMemory);
            self.kill_with_its_order(id, rustix::io::Errno::NOMEM);
        } else if now < until && !self.in_want.iter().any(|(waiting, ..)| *waiting == id) {
            self.in_want.push_back((id, now + OOM_WAIT, until));
        }
    }

    fn on_signal(&mut self) {
        while let Ok(Some(signal)) = self.signals.read_signal() {
            if signal.ssi_signo == Signal::SIGCHLD as u32 {
                continue;
            }
            // While we start a shell we have its owner's uid as well, and a taken zygote may signal us.
            if signal.ssi_uid == nix::unistd::getuid().as_raw() {
                self.begin_end("asked to end");
            } else {
                tracing::error!(uid = signal.ssi_uid, pid = signal.ssi_pid, "alarm: signal refused");
            }
        }
        while let Some((pid, exit)) = reap_one() {
            let end = match exit {
                Exit::Code(code) => End::Exited(code),
                Exit::Signal(signal) => End::Signaled(signal),
            };
            self.on_exit(pid, end);
        }
    }

    fn on_exit(&mut self, pid: Pid, how: End) {
        if let Some(id) = self.guests.remove(&pid) {
            self.on_guest_exit(id, how);
        } else if let Some(id) = self.inits.remove(&pid) {
            self.on_init_exit(id);
        } else if let Some(index) = self.nursery_of(pid) {
            self.on_zygote_exit(index, pid, how);
        } else if self.launcher.rules.shape == Shape::Bare {
            // What is left of a sandbox whose init was killed: there may be more.
            bare::kill_strays(&self.inits.keys().copied().collect());
        }
        // Else it is the first child of a launch, which has handed its memory over.
    }

    fn on_guest_exit(&mut self, id: u64, how: End) {
        let Some(entry) = self.entries.get_mut(&id) else { return };
        let end = match entry.cause {
            Some(cause) => cause,
            None if entry.shell.leaf.out_of_memory() => End::OutOfMemory,
            None => how,
        };
        let announced = mem::take(&mut entry.announced);
        entry.stage = Stage::Dying;
        entry.shell.kill();
        if announced {
            self.reply(&Reply::Ended { sandbox: SandboxId(id), end }, &[]);
        }
    }

    /// The last process of the sandbox is gone: everything it held is free again.
    fn on_init_exit(&mut self, id: u64) {
        let Some(mut entry) = self.entries.remove(&id) else { return };
        if let Stage::Live { guest } = entry.stage {
            self.guests.remove(&guest);
        }
        match entry.stage {
            Stage::Booting { order, .. } => {
                // Its last words may have come in the same moment as its end.
                let silent = StepError { step: Step::InitExec, source: rustix::io::Errno::CHILD.into() };
                let error = entry.shell.finish(&self.launcher.rules).err().unwrap_or(silent);
                match order {
                    Some(order) => self.refuse(order.seq, &error),
                    None => self.not_made((entry.shell.space, entry.shell.owner), &error),
                }
            }
            Stage::Confining { order, .. } => {
                let source = rustix::io::Errno::CHILD.into();
                self.refuse(order.seq, &StepError { step: Step::InitExec, source });
            }
            _ => {}
        }
        if entry.announced {
            let end = entry.cause.unwrap_or(End::Signaled(9));
            self.reply(&Reply::Ended { sandbox: SandboxId(id), end }, &[]);
        }
        if entry.shell.bare {
            self.sweep_bare(&entry.shell);
        }
        self.put_away(entry.shell, entry.maker.is_some(), entry.tightened);
        self.finish_deletions();
    }

    /// Without a pid namespace the end of an init is not the end of all it had below it.
    fn sweep_bare(&self, shell: &Shell) {
        bare::kill_strays(&self.inits.keys().copied().collect());
        let has_guest = |entry: &Entry| matches!(entry.stage, Stage::Live { .. } | Stage::Confining { .. });
        let others = self.entries.values().any(|entry| entry.shell.space == shell.space && has_guest(entry));
        if self.launcher.rules.own_ids && !others {
            let first = shell.block + 1;
            let accounts = self.launcher.rules.accounts.len() as u32;
            bare::end_guests_of(std::slice::from_ref(&(first..first + accounts)));
        }
    }

    /// Keeps for the next sandbox of its space what of an ended one is as good as new; the rest goes.
    fn put_away(&mut self, shell: Shell, was_fork: bool, tightened: bool) {
        let Shell { space, owner, block, husk, leaf, .. } = shell;
        if let Some(oom) = &leaf.oom {
            // It is watched only where the shell came up.
            let _ = epoll::delete(&self.epoll, oom);
        }
        let deleted = || self.deleting.iter().any(|(_, deleted)| *deleted == space);
        let wanted = self.ending.is_none() && !space.is_transient() && !deleted();
        let leaf = if wanted && !tightened {
            self.launcher.cgroups.keep(&space_name(space), owner, leaf)
        } else {
            Some(leaf)
        };
        if let Some(leaf) = leaf.filter(|leaf| !leaf.remove()) {
            self.removing.push_back((leaf, Instant::now() + REMOVE_WAIT));
        }
        // Where ids are a space's or an account's own, no block goes with the namespaces.
        let rules = &self.launcher.rules;
        let own_block = rules.shape == Shape::UserNamespace && rules.own_ids && !rules.ids_on_disk();
        let whole = wanted && was_fork && own_block && self.live_owners().contains(&owner);
        let kept = match husk {
            Some(husk) if whole => self.husks.keep(space, owner, husk).is_none(),
            _ => false,
        };
        if !kept {
            self.free_block(block);
        }
        self.launcher.spaces.leave(space);
    }

    fn begin_end(&mut self, why: &str) {
        if self.ending.is_none() {
            tracing::info!(why, sandboxes = self.entries.len(), "launcher ends");
            self.ending = Some(Instant::now());
            let _ = epoll::delete(&self.epoll, &self.launcher.daemon);
            self.held_up.clear();
            for id in self.entries.keys().copied().collect::<Vec<u64>>() {
                self.end_sandbox(id);
            }
            for zygote in self.launcher.nurseries.iter().flat_map(Nursery::all) {
                // Gone already is what we want.
                let _ = nix::sys::signal::kill(zygote.pid, Signal::SIGKILL);
            }
        }
    }

    fn ended(&self) -> bool {
        let Some(since) = self.ending else { return false };
        let zygotes = self.launcher.nurseries.iter().any(|nursery| nursery.all().next().is_some());
        let quiet = self.entries.is_empty() && !zygotes && self.removing.is_empty();
        quiet || Instant::now() >= since + END_TIMEOUT
    }

    // ---- zygotes ----------------------------------------------------------------------------------------

    fn nursery_of(&self, pid: Pid) -> Option<usize> {
        let has = |nursery: &Nursery| nursery.all().any(|zygote| zygote.pid == pid);
        self.launcher.nurseries.iter().position(has)
    }

    fn start_zygote(&mut self, index: usize) {
        let uid = self.launcher.leases.zygote();
        let Launcher { nurseries, rules, maker, zygote_cgroup, programs, .. } = &mut self.launcher;
        let (Some(yard), Some(python)) = (&maker.yard, &programs.python) else { return };
        let (template, path) = (yard.template.as_fd(), &programs.path);
        let ground = Ground { template, rules, cgroup: zygote_cgroup, python, path };
        let pid = match nurseries[index].start(&ground, uid) {
            Ok(pid) => pid,
            Err(error) => return tracing::error!(%error, "zygote not started"),
        };
        let socket = self.launcher.nurseries[index].find_mut(pid).map(|zygote| zygote.socket.as_fd());
        let Some(socket) = socket else { return };
        let data = epoll::EventData::new_u64(Source::Zygote(pid.as_raw() as u32).token());
        if let Err(error) = epoll::add(&self.epoll, socket, data, epoll::EventFlags::IN) {
            tracing::error!(%error, "zygote not watched");
        }
    }

    fn on_zygote(&mut self, pid: Pid) {
        let Some(index) = self.nursery_of(pid) else { return };
        let Some(zygote) = self.launcher.nurseries[index].find_mut(pid) else { return };
        if zygote.serving || !zygotes::read_ready(&zygote.socket) {
            // Its end, or a word it should not say: it serves no longer.
            self.condemn(pid);
            return;
        }
        let millis = zygote.started.elapsed().as_millis();
        tracing::info!(%pid, millis, "zygote serves");
        let Some((old, new)) = self.launcher.nurseries[index].serves(pid) else { return };
        // Shells for the old one are of no use any more: those spaces get new ones ahead of demand again.
        let moved: Vec<(Key, Instant)> = self.traffic.extract_if(.., |key, _| key.1 == old).collect();
        self.traffic.extend(moved.into_iter().map(|((space, _), last)| ((space, new), last)));
        self.refill_due = true;
    }

    /// Ends a zygote; it gets no job from now on. Its guests are not its children.
    fn condemn(&mut self, pid: Pid) {
        let zygote = self.launcher.nurseries.iter_mut().find_map(|nursery| nursery.find_mut(pid));
        if let Some(zygote) = zygote.filter(|zygote| !zygote.condemned) {
            zygote.condemned = true;
            let _ = epoll::delete(&self.epoll, &zygote.socket);
            // Gone already is what we want.
            let _ = nix::sys::signal::kill(zygote.pid, Signal::SIGKILL);
        }
    }

    /// Ends the zygote that was to fill this shell: it hangs, or what it made is not what it was told to make,
    /// and every further job would go the same way. Its successor, or an exec until then, serves instead.
    fn distrust_maker(&mut self, id: u64, why: &str) {
        // Not by the shell's owner: for an ordinary account that is 0 for all, exec'd interpreters included.
        let Some(maker) = self.entries.get(&id).and_then(|entry| entry.maker) else { return };
        if self.nursery_of(maker).is_some() {
            tracing::error!(pid = %maker, why, "alarm: zygote ended");
            self.condemn(maker);
        }
    }

    fn on_zygote_exit(&mut self, index: usize, pid: Pid, how: End) {
        let nursery = &mut self.launcher.nurseries[index];
        let profile = nursery.profile.name();
        if nursery.retired().any(|zygote| zygote.pid == pid) {
            tracing::info!(profile, %pid, "replaced zygote ended");
        } else {
            tracing::warn!(profile, %pid, ?how, "zygote ended");
        }
        if let Some(warning) = nursery.ended(pid, Instant::now()) {
            tracing::warn!("{warning}");
            self.launcher.hello.warnings.push(warning);
        }
    }

    fn tend_zygotes(&mut self, now: Instant) {
        let mut over: Vec<Pid> = Vec::new();
        for nursery in &self.launcher.nurseries {
            let late = |zygote: &&Zygote| !zygote.serving && now >= zygote.started + zygotes::START_TIMEOUT;
            over.extend(nursery.all().filter(late).map(|zygote| zygote.pid));
            over.extend(nursery.retired().filter(|zygote| !self.is_needed(zygote)).map(|zygote| zygote.pid));
        }
        for pid in over {
            self.condemn(pid);
        }
        for index in 0..self.launcher.nurseries.len() {
            if self.ending.is_none() && self.launcher.nurseries[index].wants_start(now) {
                self.start_zygote(index);
            }
        }
    }

    /// Whether a launch on its way was meant for this zygote, which has been replaced.
    fn is_needed(&self, zygote: &Zygote) -> bool {
        self.entries.values().any(|entry| match entry.stage {
            Stage::Booting { order: Some(_), .. } => entry.shell.owner == zygote.uid,
            Stage::Confining { .. } => entry.maker == Some(zygote.pid),
            _ => false,
        })
    }

    fn until_zygotes_serve(&mut self) -> io::Result<()> {
        // One that served and ended again must not hold up the greeting.
        let settled = |nursery: &Nursery| nursery.given_up || nursery.served;
        while self.ending.is_none() && !self.launcher.nurseries.iter().all(settled) {
            self.turn()?;
        }
        Ok(())
    }
}

/// Whether a plan may wait for whoever still holds its space.
fn waits_for_space(order: &Order, error: &StepError) -> bool {
    error.step == Step::SpaceOpen && is_busy(&error.source) && order.since.elapsed() < BUSY_MAX
}

fn space_name(space: SpaceId) -> String {
    format!("space-{:x}", space.0)
}

fn sandbox_name(id: u64) -> String {
    format!("sandbox-{id:x}")
}

/// The guest's pid as the kernel tells it: our child in the shell's pid namespace that is not its init.
pub(super) fn find_guest(shell: &Shell, known: impl Fn(Pid) -> bool) -> Option<Pid> {
    let wanted = shell.inodes.last()?;
    let children = std::fs::read_to_string(format!("/proc/self/task/{}/children", Pid::this())).ok()?;
    children
        .split_whitespace()
        .filter_map(|word| word.parse().ok().map(Pid::from_raw))
        .filter(|pid| !known(*pid))
        .find(|pid| {
            let namespace = rustix::fs::stat(format!("/proc/{pid}/ns/pid"));
            namespace.is_ok_and(|stat| stat.st_ino == *wanted)
        })
}

/// Opens a namespace of this process, to come back to it.
pub fn own_namespace(name: &str) -> io::Result<OwnedFd> {
    Ok(File::open(format!("/proc/self/ns/{name}"))?.into())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn event_tokens_survive_the_kernel() {
        for source in [
            Source::Daemon,
            Source::Signals,
            Source::Zygote(1),
            Source::Init(77),
            Source::Status(u64::from(u32::MAX)),
            Source::Oom(3),
        ] {
            assert_eq!(Source::from_token(source.token()), Some(source));
        }
        assert_eq!(Source::from_token(9 << 56), None);
    }
}
