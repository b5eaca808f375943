//! The async handle that the daemon holds on the launcher.
//!
//! One task reads the launcher's packets and hands each to whom it belongs, and writes what did not fit into
//! the socket at once: requests keep their order, and an end is never lost because the launcher is busy.
#![forbid(unsafe_code)]

use std::collections::{HashMap, VecDeque};
use std::io;
use std::os::fd::{AsFd, OwnedFd};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, Weak};
use std::time::Duration;

use rustix::net::RecvFlags;
use tokio::io::unix::AsyncFd;
use tokio::sync::{Notify, OwnedSemaphorePermit, Semaphore, mpsc, oneshot, watch};

use crate::launcher::plan::{
    Attestation, End, HELLO_BYTES_MAX, LaunchPlan, REPLY_BYTES, Reply, Request, SandboxId, SpaceId, Step,
};
use crate::launcher::posture::Hello;
use crate::sys::{packet, reactor};

/// How long the daemon waits for the launcher's answer to one request.
pub const ANSWER_TIMEOUT: Duration = Duration::from_secs(30);

/// Launches on their way at once: over all, and of one space. The others wait on our side, where who goes away has
/// asked for nothing, and where the launcher's queue does not grow: what it is asked next is never far behind.
const LAUNCHES_MAX: usize = 32;
const LAUNCHES_PER_SPACE_MAX: usize = 8;

/// Why no sandbox came back.
#[derive(Debug, thiserror::Error)]
pub enum LaunchError {
    #[error("failed to {step}")]
    Step { step: Step, source: io::Error },
    #[error("the launcher is gone")]
    Gone,
    #[error("the launcher did not answer within {} s", ANSWER_TIMEOUT.as_secs())]
    Timeout,
    #[error("failed to speak with the launcher")]
    Io(#[source] io::Error),
}

/// A live sandbox. Dropping it ends it.
#[derive(Debug)]
pub struct Sandbox {
    pub id: SandboxId,
    pub space: SpaceId,
    pub attestation: Attestation,
    /// To the interpreter's descriptor 3.
    pub requests: OwnedFd,
    /// From the interpreter's descriptor 4.
    pub events: OwnedFd,
    pub stdout: OwnedFd,
    pub stderr: OwnedFd,
    /// The folder of its workspace, where the plan asked for a view.
    pub view: Option<OwnedFd>,
    /// Holds the end once the launcher has seen it.
    pub ended: watch::Receiver<Option<End>>,
    /// Its life: whoever takes the descriptors takes this too.
    pub ender: Ender,
}

/// Asks the launcher to end a sandbox when dropped.
#[derive(Debug)]
pub struct Ender {
    id: SandboxId,
    /// Whose word that id is: the next launcher gives the same numbers to others.
    launcher: u64,
    client: Client,
}

impl Ender {
    /// Sends SIGINT to the sandbox's interpreter; resolves once the launcher has, or is gone.
    pub fn interrupt(&self) -> impl Future<Output = ()> + Send + use<> {
        let (sandbox, launcher, client) = (self.id, self.launcher, self.client.clone());
        async move {
            let (answer, waiting) = oneshot::channel();
            let sent = client.send_to(launcher, |seq, state| {
                state.interrupts.insert(seq, answer);
                Request::Interrupt { seq, sandbox }
            });
            match sent {
                // An error means that the launcher is gone, and the sandbox with it.
                Ok(_) => drop(waiting.await),
                Err(error) => tracing::debug!(%sandbox, %error, "interrupt not sent"),
            }
        }
    }
}

/// For tests of who holds a sandbox: what is at the other end is theirs.
#[cfg(test)]
impl Ender {
    pub(crate) fn of_nobody(id: SandboxId) -> Ender {
        Ender { id, launcher: 0, client: Client::new() }
    }
}

impl Drop for Ender {
    fn drop(&mut self) {
        self.client.end(self.launcher, self.id);
    }
}

/// Cheap to clone; all clones speak over one socket.
#[derive(Clone, Debug)]
pub struct Client {
    shared: Arc<Shared>,
}

#[derive(Debug)]
struct Shared {
    state: Mutex<State>,
    /// Held while a launcher is attached: the next one's books are opened when the last one's are closed.
    attached: tokio::sync::Mutex<()>,
    /// What the launcher of the day reported about itself; replaced when a new one comes.
    hello: watch::Sender<Option<Arc<Hello>>>,
    /// How many launchers have ended.
    gone: watch::Sender<u64>,
    /// Spaces that launchers found at their start, for whoever takes the other end.
    found: mpsc::UnboundedSender<SpaceId>,
    found_taken: Mutex<Option<mpsc::UnboundedReceiver<SpaceId>>>,
    /// Something waits in the outbox.
    unsent: Notify,
    window: Arc<Semaphore>,
    windows: Mutex<HashMap<SpaceId, Weak<Semaphore>>>,
}

/// The right to have a launch on its way; held until it is answered, whoever still waits for it.
#[derive(Debug)]
struct Turn {
    _of_space: OwnedSemaphorePermit,
    _of_all: OwnedSemaphorePermit,
}

/// A launch on its way.
#[derive(Debug)]
struct Launching {
    space: SpaceId,
    since: tokio::time::Instant,
    answer: oneshot::Sender<Result<Sandbox, LaunchError>>,
    _turn: Turn,
}

#[derive(Debug, Default)]
struct State {
    socket: Option<Arc<AsyncFd<OwnedFd>>>,
    /// Which launcher it is, counted from the first.
    launcher: u64,
    /// Goes on from one launcher to the next, so that no answer is ever somebody else's.
    seq: u64,
    /// What the socket had no room for. Bounded by the sandboxes there can be and [`LAUNCHES_MAX`].
    outbox: VecDeque<Request>,
    launches: HashMap<u64, Launching>,
    deletions: HashMap<u64, oneshot::Sender<io::Result<()>>>,
    interrupts: HashMap<u64, oneshot::Sender<()>>,
    live: HashMap<SandboxId, watch::Sender<Option<End>>>,
}

impl Client {
    /// A handle without a launcher yet: launches answer [`LaunchError::Gone`] until [`Client::attach`].
    pub fn new() -> Client {
        let (hello, gone) = (watch::channel(None).0, watch::channel(0).0);
        let state = Mutex::new(State::default());
        let window = Arc::new(Semaphore::new(LAUNCHES_MAX));
        let (found, taken) = mpsc::unbounded_channel();
        Client {
            shared: Arc::new(Shared {
                state,
                attached: tokio::sync::Mutex::default(),
                hello,
                gone,
                found,
                found_taken: Mutex::new(Some(taken)),
                unsent: Notify::new(),
                window,
                windows: Mutex::default(),
            }),
        }
    }

    /// Takes a connected socket of a launcher and serves it until that launcher is gone. Must run inside the
    /// async runtime; returns when the socket closes.
    pub async fn attach(&self, socket: OwnedFd) -> io::Result<()> {
        rustix::io::ioctl_fionbio(&socket, true)?;
        let socket = Arc::new(reactor::register(socket)?);
        let hello = Self::read_hello(&socket).await?;
        let _attached = self.shared.attached.lock().await;
        {
            let mut state = self.lock();
            state.launcher += 1;
            state.socket = Some(Arc::clone(&socket));
        }
        self.shared.hello.send_replace(Some(Arc::new(hello)));
        let result = tokio::select! {
            read = self.read_replies(&socket) => read,
            written = self.write_unsent(&socket) => written,
        };
        self.forget_launcher();
        result
    }

    /// What the launcher reported at start; `None` before the first one is there.
    pub fn hello(&self) -> watch::Receiver<Option<Arc<Hello>>> {
        self.shared.hello.subscribe()
    }

    /// Changes each time a launcher is gone, after all its sandboxes have got their end.
    pub fn gone(&self) -> watch::Receiver<u64> {
        self.shared.gone.subscribe()
    }

    /// What each launcher finds of spaces at its start, somebody's or nobody's. Can be taken once.
    pub fn found_spaces(&self) -> Option<mpsc::UnboundedReceiver<SpaceId>> {
        self.shared.found_taken.lock().unwrap_or_else(PoisonError::into_inner).take()
    }

    /// True while a launcher is attached.
    pub fn is_attached(&self) -> bool {
        self.lock().socket.is_some()
    }

    /// Live sandboxes by the daemon's books.
    pub fn sandboxes_live(&self) -> usize {
        self.lock().live.len()
    }

    /// Asks for a sandbox and waits for it.
    pub async fn launch(&self, plan: LaunchPlan) -> Result<Sandbox, LaunchError> {
        // Those whose callers are gone have nobody else who stops waiting.
        self.lock().launches.retain(|_, waiting| waiting.since.elapsed() < ANSWER_TIMEOUT);
        let turn = tokio::time::timeout(ANSWER_TIMEOUT, self.turn(plan.space));
        let turn = turn.await.map_err(|_elapsed| LaunchError::Timeout)?;
        let (answer, waiting) = oneshot::channel();
        let seq = self.send(|seq, state| {
            let since = tokio::time::Instant::now();
            state.launches.insert(seq, Launching { space: plan.space, since, answer, _turn: turn });
            Request::Launch { seq, plan }
        })?;
        match tokio::time::timeout(ANSWER_TIMEOUT, waiting).await {
            Ok(Ok(result)) => result,
            Ok(Err(_)) => Err(LaunchError::Gone),
            Err(_) => {
                self.lock().launches.remove(&seq);
                Err(LaunchError::Timeout)
            }
        }
    }

    /// Waits for a place among the launches of a space, then for one among all: a space with many of them has no more
    /// in the common queue than its own window.
    async fn turn(&self, space: SpaceId) -> Turn {
        let window = {
            let mut windows = self.shared.windows.lock().unwrap_or_else(PoisonError::into_inner);
            windows.retain(|_, window| window.strong_count() > 0);
            let known = windows.get(&space).and_then(Weak::upgrade);
            known.unwrap_or_else(|| {
                let window = Arc::new(Semaphore::new(LAUNCHES_PER_SPACE_MAX));
                windows.insert(space, Arc::downgrade(&window));
                window
            })
        };
        let closed = "nobody closes a window";
        let of_space = window.acquire_owned().await.expect(closed);
        let of_all = Arc::clone(&self.shared.window).acquire_owned().await.expect(closed);
        Turn { _of_space: of_space, _of_all: of_all }
    }

    /// Ends a space's sandboxes and deletes its files.
    pub async fn delete_space(&self, space: SpaceId) -> Result<(), LaunchError> {
        let (answer, waiting) = oneshot::channel();
        let seq = self.send(|seq, state| {
            state.deletions.insert(seq, answer);
            Request::DeleteSpace { seq, space }
        })?;
        match tokio::time::timeout(ANSWER_TIMEOUT, waiting).await {
            Ok(Ok(result)) => result.map_err(LaunchError::Io),
            Ok(Err(_)) => Err(LaunchError::Gone),
            Err(_) => {
                self.lock().deletions.remove(&seq);
                Err(LaunchError::Timeout)
            }
        }
    }

    fn end(&self, launcher: u64, sandbox: SandboxId) {
        if let Err(error) = self.send_to(launcher, |seq, _| Request::End { seq, sandbox }) {
            tracing::debug!(%sandbox, %error, "end request not sent; the launcher ends it with itself");
        }
    }

    /// Builds and sends one request under the lock, so that `seq` grows in the order of the packets.
    fn send(&self, build: impl FnOnce(u64, &mut State) -> Request) -> Result<u64, LaunchError> {
        self.send_under(self.lock(), build)
    }

    /// The same for what names a sandbox: to the launcher that has it, and to no other.
    fn send_to(
        &self,
        launcher: u64,
        build: impl FnOnce(u64, &mut State) -> Request,
    ) -> Result<u64, LaunchError> {
        let state = self.lock();
        if state.launcher != launcher {
            return Err(LaunchError::Gone);
        }
        self.send_under(state, build)
    }

    fn send_under(
        &self,
        mut state: MutexGuard<'_, State>,
        build: impl FnOnce(u64, &mut State) -> Request,
    ) -> Result<u64, LaunchError> {
        let socket = state.socket.clone().ok_or(LaunchError::Gone)?;
        state.seq += 1;
        let seq = state.seq;
        let request = build(seq, &mut state);
        let sent = if state.outbox.is_empty() {
            packet::send(socket.get_ref(), &request.encode(), &[])
        } else {
            Err(io::Error::from(io::ErrorKind::WouldBlock))
        };
        match sent {
            Ok(()) => Ok(seq),
            Err(error) if error.kind() == io::ErrorKind::WouldBlock => {
                state.outbox.push_back(request);
                self.shared.unsent.notify_one();
                Ok(seq)
            }
            Err(error) => {
                state.launches.remove(&seq);
                state.deletions.remove(&seq);
                state.interrupts.remove(&seq);
                Err(LaunchError::Io(error))
            }
        }
    }

    /// Writes the outbox as the socket takes it, for as long as this launcher lives.
    async fn write_unsent(&self, socket: &AsyncFd<OwnedFd>) -> io::Result<()> {
        loop {
            self.shared.unsent.notified().await;
            while !self.lock().outbox.is_empty() {
                let mut ready = socket.writable().await?;
                let written = ready.try_io(|inner| {
                    let mut state = self.lock();
                    while let Some(request) = state.outbox.front() {
                        packet::send(inner.get_ref(), &request.encode(), &[])?;
                        state.outbox.pop_front();
                    }
                    Ok(())
                });
                if let Ok(result) = written {
                    result?;
                }
            }
        }
    }

    async fn read_hello(socket: &AsyncFd<OwnedFd>) -> io::Result<Hello> {
        let mut buffer = vec![0_u8; HELLO_BYTES_MAX];
        let (len, _) = read_packet(socket, &mut buffer).await?;
        serde_json::from_slice(&buffer[..len]).map_err(io::Error::from)
    }

    async fn read_replies(&self, socket: &AsyncFd<OwnedFd>) -> io::Result<()> {
        let mut buffer = [0_u8; REPLY_BYTES + 1];
        loop {
            let (len, descriptors) = read_packet(socket, &mut buffer).await?;
            if len == 0 {
                return Ok(());
            }
            let reply = Reply::decode(&buffer[..len]).map_err(io::Error::other)?;
            self.deliver(reply, descriptors);
        }
    }

    fn deliver(&self, reply: Reply, descriptors: Vec<OwnedFd>) {
        match reply {
            Reply::Launched { seq, sandbox, attestation } => {
                let waiting = self.lock().launches.remove(&seq);
                let space = waiting.as_ref().map_or(SpaceId(0), |waiting| waiting.space);
                let sandbox = self.adopt(sandbox, space, attestation, descriptors);
                // Nobody waits any more: the sandbox is dropped here, outside the lock, and so ended.
                if let (Some(waiting), Some(sandbox)) = (waiting, sandbox) {
                    drop(waiting.answer.send(Ok(sandbox)));
                }
            }
            Reply::LaunchFailed { seq, step, errno } => {
                let waiting = self.lock().launches.remove(&seq);
                if let Some(waiting) = waiting {
                    let source = io::Error::from_raw_os_error(errno);
                    drop(waiting.answer.send(Err(LaunchError::Step { step, source })));
                }
            }
            Reply::Ended { sandbox, end } => {
                let live = self.lock().live.remove(&sandbox);
                if let Some(live) = live {
                    live.send_replace(Some(end));
                }
            }
            Reply::SpaceDeleted { seq, errno } => {
                let waiting = self.lock().deletions.remove(&seq);
                if let Some(waiting) = waiting {
                    let result = if errno == 0 { Ok(()) } else { Err(io::Error::from_raw_os_error(errno)) };
                    drop(waiting.send(result));
                }
            }
            // Nobody looks after them in a daemon without a store.
            Reply::SpaceFound { space } => drop(self.shared.found.send(space)),
            Reply::Interrupted { seq } => {
                let waiting = self.lock().interrupts.remove(&seq);
                if let Some(waiting) = waiting {
                    // A run that gave up waiting needs no word.
                    let _ = waiting.send(());
                }
            }
        }
    }

    fn adopt(
        &self,
        id: SandboxId,
        space: SpaceId,
        attestation: Attestation,
        descriptors: Vec<OwnedFd>,
    ) -> Option<Sandbox> {
        let mut descriptors = descriptors.into_iter();
        let mut next = || descriptors.next();
        let (Some(requests), Some(events), Some(stdout), Some(stderr)) = (next(), next(), next(), next())
        else {
            tracing::error!(sandbox = %id, "launched without its four descriptors");
            self.end(self.lock().launcher, id);
            return None;
        };
        for pipe in [&requests, &events, &stdout, &stderr] {
            if let Err(error) = rustix::io::ioctl_fionbio(pipe.as_fd(), true) {
                tracing::error!(sandbox = %id, %error, "pipe of a sandbox refuses non-blocking mode");
            }
        }
        let view = descriptors.next();
        let (sender, ended) = watch::channel(None);
        let launcher = {
            let mut state = self.lock();
            state.live.insert(id, sender);
            state.launcher
        };
        let ender = Ender { id, launcher, client: self.clone() };
        Some(Sandbox { id, space, attestation, requests, events, stdout, stderr, view, ended, ender })
    }

    fn forget_launcher(&self) {
        let mut state = self.lock();
        state.socket = None;
        state.outbox.clear();
        let launches = std::mem::take(&mut state.launches);
        let deletions = std::mem::take(&mut state.deletions);
        let interrupts = std::mem::take(&mut state.interrupts);
        let live = std::mem::take(&mut state.live);
        drop(state);
        for (_, waiting) in launches {
            drop(waiting.answer.send(Err(LaunchError::Gone)));
        }
        drop(deletions);
        drop(interrupts);
        for (_, ended) in live {
            ended.send_replace(Some(End::LauncherGone));
        }
        self.shared.gone.send_modify(|count| *count += 1);
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        self.shared.state.lock().expect("no code panics while it holds the client's state")
    }
}

impl Default for Client {
    fn default() -> Client {
        Client::new()
    }
}

async fn read_packet(socket: &AsyncFd<OwnedFd>, buffer: &mut [u8]) -> io::Result<(usize, Vec<OwnedFd>)> {
    loop {
        let mut ready = socket.readable().await?;
        match ready.try_io(|inner| packet::receive(inner.get_ref(), buffer, RecvFlags::empty())) {
            Ok(result) => return result,
            Err(_would_block) => {}
        }
    }
}

#[cfg(test)]
mod tests {
    use tokio::task::JoinHandle;

    use super::*;
    use crate::launcher::plan::{Origin, Profile, REQUEST_BYTES};
    use crate::launcher::posture::{Posture, PostureReport};

    fn hello() -> Hello {
        Hello {
            posture: PostureReport { posture: Posture::Full, layers: Vec::new(), root: true, uid: 0 },
            python: None,
            node: None,
            kernels: Vec::new(),
            toolchains: None,
            accounts: Vec::new(),
            warm: Vec::new(),
            warnings: Vec::new(),
            spaces_to: SpaceId(0),
        }
    }

    fn plan(space: u64) -> LaunchPlan {
        LaunchPlan::new(SpaceId(space), Profile::Node, Origin::Strict)
    }

    /// A launcher's end of the client's socket.
    fn attached(client: &Client) -> OwnedFd {
        let (ours, theirs) = packet::pair().expect("a socket");
        let client = client.clone();
        tokio::spawn(async move { client.attach(ours).await });
        packet::send(&theirs, &serde_json::to_vec(&hello()).expect("JSON"), &[]).expect("room");
        theirs
    }

    /// A client, and its launcher's end of the socket.
    async fn greeted() -> (Client, OwnedFd) {
        let client = Client::new();
        let theirs = attached(&client);
        client.hello().wait_for(Option::is_some).await.expect("greeted");
        (client, theirs)
    }

    /// The requests that the launcher has been sent by now.
    async fn requests(socket: &OwnedFd) -> Vec<Request> {
        tokio::time::sleep(Duration::from_millis(60)).await;
        let mut found = Vec::new();
        let mut buffer = [0_u8; REQUEST_BYTES];
        while let Ok((length @ 1.., _)) = packet::receive(socket, &mut buffer, RecvFlags::DONTWAIT) {
            found.push(Request::decode(&buffer[..length]).expect("one of ours"));
        }
        found
    }

    /// A sandbox that this launcher gives the number `id`.
    async fn sandbox(client: &Client, theirs: &OwnedFd, id: u64) -> Sandbox {
        let launching = {
            let client = client.clone();
            tokio::spawn(async move { client.launch(plan(1)).await })
        };
        let [Request::Launch { seq, .. }] = requests(theirs).await[..] else { panic!("no launch") };
        let pipes: Vec<OwnedFd> = (0..4).map(|_| std::io::pipe().expect("a pipe").0.into()).collect();
        let pipes: Vec<_> = pipes.iter().map(AsFd::as_fd).collect();
        let reply = Reply::Launched { seq, sandbox: SandboxId(id), attestation: Attestation::default() };
        packet::send(theirs, &reply.encode(), &pipes).expect("room");
        launching.await.expect("no panic").expect("launched")
    }

    fn launched(client: &Client, space: u64) -> JoinHandle<Result<SandboxId, LaunchError>> {
        let client = client.clone();
        tokio::spawn(async move { client.launch(plan(space)).await.map(|sandbox| sandbox.id) })
    }

    /// The plans that the launcher has been sent by now.
    async fn asked(socket: &OwnedFd) -> Vec<(u64, u64)> {
        let launch = |request| match request {
            Request::Launch { seq, plan } => Some((seq, plan.space.0)),
            _ => None,
        };
        requests(socket).await.into_iter().filter_map(launch).collect()
    }

    #[tokio::test]
    async fn a_dead_launchers_sandboxes_give_the_next_one_no_orders() {
        let (client, first) = greeted().await;
        let old = sandbox(&client, &first, 7).await;
        // The next one is there before the end of the last one was heard.
        let second = attached(&client);
        let mut gone = client.gone();
        drop(first);
        gone.changed().await.expect("it is told");
        assert_eq!(*old.ended.borrow(), Some(End::LauncherGone));
        let new = sandbox(&client, &second, 7).await;
        let interrupted = tokio::time::timeout(Duration::from_secs(5), old.ender.interrupt());
        interrupted.await.expect("it went to nobody");
        drop(old);
        assert_eq!(requests(&second).await, [], "an order for what another launcher made");
        assert!(new.ended.borrow().is_none() && client.is_attached());
        drop(new);
        let orders = requests(&second).await;
        assert!(matches!(orders[..], [Request::End { sandbox: SandboxId(7), .. }]), "control: {orders:?}");
    }

    #[tokio::test]
    async fn who_goes_away_before_its_turn_has_asked_for_nothing_and_no_space_crowds_out_another() {
        let (client, theirs) = greeted().await;
        let launch = |space| launched(&client, space);
        let flood: Vec<_> = (0..200).map(|_| launch(1)).collect();
        let first = asked(&theirs).await;
        assert_eq!(first.len(), LAUNCHES_PER_SPACE_MAX);
        launch(2);
        assert_eq!(asked(&theirs).await.iter().map(|it| it.1).collect::<Vec<_>>(), [2], "at once");
        flood.iter().for_each(JoinHandle::abort);
        assert_eq!(asked(&theirs).await, []);
        // What is on its way counts until it is answered, whoever has asked for it.
        launch(1);
        assert_eq!(asked(&theirs).await, []);
        let answer = Reply::LaunchFailed { seq: first[0].0, step: Step::Clone, errno: 11 };
        packet::send(&theirs, &answer.encode(), &[]).expect("room");
        assert_eq!(asked(&theirs).await.len(), 1);
    }

    #[tokio::test(start_paused = true)]
    async fn a_launch_that_is_never_answered_gives_its_place_back_after_all() {
        let (client, theirs) = greeted().await;
        let launch = |space| launched(&client, space);
        let gone: Vec<_> = (0..LAUNCHES_MAX as u64).map(|space| launch(100 + space)).collect();
        assert_eq!(asked(&theirs).await.len(), LAUNCHES_MAX);
        gone.iter().for_each(JoinHandle::abort);
        launch(1);
        assert_eq!(asked(&theirs).await, [], "they count");
        tokio::time::advance(ANSWER_TIMEOUT).await;
        launch(2);
        assert_eq!(asked(&theirs).await.iter().map(|it| it.1).collect::<Vec<_>>(), [2]);
    }
}
