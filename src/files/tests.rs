//! The daemon's side, with helpers that lie, linger and die.

use std::fs::File;
use std::io::Write;
use std::os::fd::{AsFd, OwnedFd};

use rustix::net::RecvFlags;
use rustix::pipe::{PipeFlags, pipe_with};
use tempfile::TempDir;

use super::helper::{Gone, Helper, Ticket, check};
use super::wire::{self, Answer, Answered, Call, Fault, FaultKind, FileStat, Header, Kind, Op};
use super::*;
use crate::backend::native::fake;
use crate::store::Store;
use crate::sys::packet;

/// A helper over a socket whose other end the test holds.
fn pair() -> (Helper, OwnedFd) {
    let (ours, theirs) = packet::pair().expect("a socket");
    (Helper::over(ours, None).expect("in the reactor"), theirs)
}

fn stat_call() -> Call {
    Call { op: Op::Stat { path: "/tmp/x".to_owned(), follow: true }, time_ms_max: 1_000 }
}

fn open_call() -> Call {
    Call { op: Op::Open { path: "/tmp/x".to_owned() }, time_ms_max: 1_000 }
}

async fn asked(helper: &Helper, call: &Call) -> Ticket {
    helper.begin(call, &[], None).await.expect("alive")
}

fn send(theirs: &OwnedFd, id: u64, answered: &Answered, descriptors: &[std::os::fd::BorrowedFd<'_>]) {
    let mut held = descriptors;
    for packet in wire::packets(id, Kind::End, &wire::join(answered, &[])) {
        packet::send(theirs, &packet, held).expect("sent");
        held = &[];
    }
}

#[tokio::test]
async fn answers_find_whoever_asked() {
    let (helper, theirs) = pair();
    let (mut one, mut two) = (asked(&helper, &stat_call()).await, asked(&helper, &stat_call()).await);
    let stat = |size| Ok(Answer::Stat(FileStat { size, ..FileStat::default() }));
    send(&theirs, 2, &stat(2), &[]);
    send(&theirs, 77, &stat(7), &[]);
    send(&theirs, 1, &stat(1), &[]);
    assert_eq!(two.answer().await.expect("answered").answered, stat(2));
    assert_eq!(one.answer().await.expect("answered").answered, stat(1));
}

#[tokio::test]
async fn a_helper_that_breaks_the_protocol_is_given_up() {
    let malformed: [&[u8]; 4] = [&[], &[1; 5], &[9; 40], &[1, 0, 0, 0, 0, 0, 0, 0, 1, 0, 0, 0, 9, 9, 9, 9]];
    for packet in malformed {
        let (helper, theirs) = pair();
        let mut ticket = asked(&helper, &stat_call()).await;
        if packet.is_empty() {
            drop(theirs);
        } else {
            packet::send(&theirs, packet, &[]).expect("sent");
        }
        assert!(ticket.answer().await.is_err(), "{packet:?}");
        assert!(!helper.is_alive());
        assert_eq!(helper.begin(&stat_call(), &[], None).await.err(), Some(Gone));
    }
}

#[tokio::test]
async fn no_answer_grows_without_end() {
    let (helper, theirs) = pair();
    let mut ticket = asked(&helper, &stat_call()).await;
    let flood = std::thread::spawn(move || {
        let part = wire::packets(1, Kind::Part, &vec![0; wire::FRAME_BYTES_MAX]).next().expect("one");
        (0..2_000).take_while(|_| packet::send(&theirs, &part, &[]).is_ok()).count()
    });
    assert!(ticket.answer().await.is_err());
    drop((ticket, helper));
    let sent = flood.join().expect("no panic");
    assert!(sent * wire::FRAME_BYTES_MAX < 2 * wire::ANSWER_BYTES_MAX, "{sent} packets were taken");
}

#[tokio::test]
async fn a_descriptor_comes_only_where_one_was_asked_for_and_only_one() {
    for (call, count) in [(stat_call(), 1), (open_call(), 2)] {
        let (helper, theirs) = pair();
        let mut ticket = asked(&helper, &call).await;
        let file = tempfile::tempfile().expect("a file");
        send(&theirs, 1, &Ok(Answer::Opened), &vec![file.as_fd(); count]);
        assert!(ticket.answer().await.is_err(), "{count}");
    }
}

#[tokio::test]
async fn what_is_handed_back_must_be_a_file_of_the_space_opened_to_be_read() {
    use rustix::fs::{Mode, OFlags};
    let folder = TempDir::new().expect("a folder");
    let path = folder.path().join("f");
    File::create(&path).and_then(|mut file| file.write_all(b"x")).expect("made");
    let open = |flags| rustix::fs::open(&path, flags, Mode::empty()).expect("opened");
    let reading = OFlags::RDONLY | OFlags::NONBLOCK;
    let device = rustix::fs::fstat(open(reading)).expect("there").st_dev;
    check(&open(reading), device).expect("as asked");
    let (pipe, _writer) = pipe_with(PipeFlags::CLOEXEC | PipeFlags::NONBLOCK).expect("a pipe");
    let dir = rustix::fs::open(folder.path(), reading, Mode::empty()).expect("opened");
    let zero = rustix::fs::open("/dev/zero", reading, Mode::empty()).expect("opened");
    let elsewhere = rustix::fs::open("/proc/self/status", reading, Mode::empty()).expect("opened");
    let wrong = [
        ("it may block", open(OFlags::RDONLY)),
        ("it can be written", open(OFlags::RDWR | OFlags::NONBLOCK)),
        ("it is a handle only", open(OFlags::PATH | OFlags::NONBLOCK)),
        ("a pipe", pipe),
        ("a folder", dir),
        ("a device", zero),
        ("another file system", elsewhere),
    ];
    for (what, descriptor) in wrong {
        assert!(check(&descriptor, device).is_err(), "{what}");
    }
}

#[tokio::test]
async fn a_helper_hears_that_nobody_waits() {
    let (helper, theirs) = pair();
    drop(asked(&helper, &stat_call()).await);
    let mut buffer = vec![0; wire::HEADER_BYTES + wire::FRAME_BYTES_MAX];
    let mut kinds = Vec::new();
    for _ in 0..2 {
        let (length, _) = packet::receive(&theirs, &mut buffer, RecvFlags::empty()).expect("a packet");
        kinds.push(Header::split(&buffer[..length]).expect("a frame").0.kind);
    }
    assert_eq!(kinds, [Kind::End, Kind::Cancel]);
    assert!(helper.idle_since().is_some(), "nothing is on its books");
}

#[tokio::test]
async fn an_idle_helper_is_ended_and_a_busy_one_is_not() {
    let (helper, theirs) = pair();
    let key = (SpaceId(1), Account(0));
    let berth = Berth(tokio::sync::Mutex::new(Some(Arc::new(helper))));
    let mut berths = HashMap::from([(key, Arc::new(berth))]);
    let helper = || berths[&key].0.try_lock().expect("free").clone().expect("there");
    let mut ticket = asked(&helper(), &stat_call()).await;
    clear_idle(&mut berths, Duration::ZERO);
    assert_eq!(berths.len(), 1, "it has a call");
    send(&theirs, 1, &Ok(Answer::Moved), &[]);
    ticket.answer().await.expect("answered");
    clear_idle(&mut berths, Duration::from_secs(60));
    assert_eq!(berths.len(), 1, "it was asked a moment ago");
    drop(ticket);
    clear_idle(&mut berths, Duration::ZERO);
    assert!(berths.is_empty());
    // Its reading task is told to end, and does when it is its turn.
    tokio::time::sleep(Duration::from_millis(50)).await;
    let mut buffer = vec![0; wire::HEADER_BYTES + wire::FRAME_BYTES_MAX];
    let seen: Vec<usize> = (0..2)
        .map(|_| packet::receive(&theirs, &mut buffer, RecvFlags::DONTWAIT).expect("received").0)
        .collect();
    assert!(seen[0] > 0 && seen[1] == 0, "its call, and the end: {seen:?}");
}

#[tokio::test]
async fn an_open_file_keeps_its_helper_and_goes_with_it() {
    let (ours, theirs) = packet::pair().expect("a socket");
    let mut file = tempfile::tempfile().expect("a file");
    file.write_all(b"text").expect("room");
    let device = rustix::fs::fstat(&file).expect("there").st_dev;
    let path = format!("/proc/self/fd/{}", std::os::fd::AsRawFd::as_raw_fd(&file));
    let flags = rustix::fs::OFlags::RDONLY | rustix::fs::OFlags::NONBLOCK;
    let reading = || rustix::fs::open(&path, flags, rustix::fs::Mode::empty()).expect("opened");
    let helper = Arc::new(Helper::over(ours, None).expect("in the reactor").on(device));
    let opened = Arc::clone(&helper).keep(reading()).expect("as asked");
    let held = Arc::downgrade(&opened.file().expect("open"));
    assert!(held.upgrade().is_some() && Arc::strong_count(&helper) == 2, "it is not idle");
    // Nobody reads: it goes all the same.
    drop(theirs);
    for _ in 0..100 {
        if !helper.is_alive() {
            break;
        }
        tokio::time::sleep(Duration::from_millis(20)).await;
    }
    assert!(held.upgrade().is_none(), "it is held, and so is its space");
    assert!(opened.file().is_err());
    assert!(Arc::clone(&helper).keep(reading()).is_err());
}

fn files() -> (TempDir, Arc<Files>) {
    let folder = TempDir::new().expect("a folder");
    let store = Store::open(&folder.path().join("store")).expect("a store");
    let launcher = fake::FakeLauncher::with(fake::hello());
    let files = Files::new(FileSettings::default(), launcher, Tenants::new(store));
    (folder, files)
}

#[tokio::test]
async fn a_tenant_has_so_many_operations_and_others_have_theirs() {
    let (_folder, files) = files();
    let tenant = |name: &str| TenantId(name.to_owned());
    let mut held = Vec::new();
    for _ in 0..OPERATIONS_PER_TENANT_MAX {
        held.push(files.enter(&tenant("a"), Owner::Default).await.expect("room"));
    }
    let refused = files.enter(&tenant("a"), Owner::Default).await.err();
    assert_eq!(refused, Some(FileError::Busy { max: OPERATIONS_PER_TENANT_MAX }));
    assert!(files.enter(&tenant("b"), Owner::Default).await.is_ok());
    held.pop();
    assert!(files.enter(&tenant("a"), Owner::Default).await.is_ok());
}

#[tokio::test]
async fn owners_are_accounts_of_the_space() {
    let (_folder, files) = files();
    let tenant = TenantId("a".to_owned());
    for owner in [Owner::Default, Owner::Sudo, Owner::Named("sandbox"), Owner::Named("nobody")] {
        assert!(files.enter(&tenant, owner).await.is_ok(), "{owner:?}");
    }
    let no = |text: &str| Some(FileError::User(text.to_owned()));
    assert_eq!(files.enter(&tenant, Owner::Named("alice")).await.err(), no("no such user: alice"));
    assert_eq!(
        files.enter(&tenant, Owner::Named("root")).await.err(),
        no("cannot run as root: uid 0 is never available to guest code")
    );
}

#[tokio::test]
async fn without_a_launcher_nothing_is_started_and_that_is_said() {
    let (_folder, files) = files();
    let operation = files.enter(&TenantId("a".to_owned()), Owner::Default).await.expect("room");
    let done = operation.call(Op::Stat { path: "/tmp".to_owned(), follow: true }, &[]).await;
    assert_eq!(done.err(), Some(FileError::Unavailable));
}

#[test]
fn a_sentence_from_inside_is_cut() {
    let fault = Fault::text(FaultKind::Other, "x".repeat(10_000));
    assert_eq!(fault_text(&fault).len(), TEXT_CHARS_MAX);
}
