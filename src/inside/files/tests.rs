//! The helper as the daemon meets it, over a socket, in a folder that stands for the space.

use std::fs;
use std::io::{Read, Write};
use std::os::fd::{AsFd, BorrowedFd};
use std::os::unix::fs::{MetadataExt, PermissionsExt, symlink};

use proptest::prelude::*;
use rustix::pipe::{PipeFlags, pipe_with};
use tempfile::TempDir;

use super::*;
use crate::files::wire::{Edit, FaultKind, Glob, Grep, GrepMatch, List, Occurrence, TreeMode};

struct Stand {
    folder: TempDir,
    socket: OwnedFd,
    next: u64,
}

fn stand() -> Stand {
    let folder = TempDir::new().expect("a folder");
    fs::create_dir(folder.path().join("space")).expect("a space");
    fs::write(folder.path().join("secret"), "42").expect("a file outside");
    let space = folder.path().join("space");
    let view = View::new(&space, &[&space], false).expect("this kernel has statx");
    let (socket, theirs) = packet::pair().expect("a socket");
    std::thread::spawn(move || Server::new(view, theirs).run());
    Stand { folder, socket, next: 1 }
}

type Answer3 = (Answered, Vec<u8>, Vec<OwnedFd>);

impl Stand {
    fn space(&self) -> PathBuf {
        self.folder.path().join("space")
    }

    fn begin(&mut self, op: Op, content: &[u8], pipe: Option<BorrowedFd<'_>>) -> u64 {
        let id = self.next;
        self.next += 1;
        let message = wire::join(&Call { op, time_ms_max: 20_000 }, content);
        let mut pipe = pipe;
        for packet in wire::packets(id, Kind::End, &message) {
            packet::send(&self.socket, &packet, pipe.take().as_slice()).expect("sent");
        }
        id
    }

    fn answer(&self, id: u64) -> Answer3 {
        let (mut message, mut held) = (Vec::new(), Vec::new());
        let mut buffer = vec![0_u8; HEADER_BYTES + FRAME_BYTES_MAX];
        loop {
            let (length, descriptors) =
                packet::receive(&self.socket, &mut buffer, RecvFlags::empty()).expect("an answer");
            let (header, payload) = Header::split(&buffer[..length]).expect("a frame");
            assert_eq!(header.id, id);
            message.extend_from_slice(payload);
            held.extend(descriptors);
            if header.kind == Kind::End {
                let (answered, text) = wire::split::<Answered>(&message).expect("a message");
                return (answered, text.to_vec(), held);
            }
        }
    }

    fn call(&mut self, op: Op) -> Answered {
        let id = self.begin(op, &[], None);
        self.answer(id).0
    }

    fn ok(&mut self, op: Op) -> Answer {
        let said = format!("{op:?}");
        self.call(op).unwrap_or_else(|fault| panic!("{said}: {fault:?}"))
    }

    fn fault(&mut self, op: Op) -> FaultKind {
        let said = format!("{op:?}");
        match self.call(op) {
            Err(fault) => fault.kind,
            Ok(answer) => panic!("{said}: {answer:?}"),
        }
    }

    fn write(&mut self, path: &str, content: &[u8], append: bool) -> Answered {
        let id = self.begin(Op::Write { path: path.to_owned(), append }, content, None);
        self.answer(id).0
    }

    fn read(&mut self, path: &str, lines: Option<(u64, u64)>) -> Result<String, FaultKind> {
        let (start_line, end_line) = (lines.map(|it| it.0), lines.map(|it| it.1));
        let id = self.begin(Op::Read { path: path.to_owned(), start_line, end_line }, &[], None);
        let (answered, text, _) = self.answer(id);
        answered.map(|_| String::from_utf8(text).expect("text")).map_err(|fault| fault.kind)
    }

    /// Names that lie in the space, the helper's temporary ones included.
    fn names(&self) -> Vec<String> {
        let entries = fs::read_dir(self.space()).expect("the space").flatten();
        let mut names: Vec<String> =
            entries.map(|entry| entry.file_name().to_string_lossy().into_owned()).collect();
        names.sort();
        names
    }

    /// Sends `bytes` as the stream of `op`; `whole` says so at the end.
    fn stream(&mut self, op: Op, bytes: &[u8], whole: bool) -> Answered {
        let (read, write) = pipe_with(PipeFlags::CLOEXEC).expect("a pipe");
        let id = self.begin(op, &[], Some(read.as_fd()));
        drop(read);
        // What the helper refuses, it stops to read.
        let _ = fs::File::from(write).write_all(bytes);
        let kind = if whole { Kind::Finish } else { Kind::Cancel };
        for packet in wire::packets(id, kind, &wire::join(&Finish::default(), &[])) {
            packet::send(&self.socket, &packet, &[]).expect("sent");
        }
        self.answer(id).0
    }
}

fn list(path: &str) -> List {
    List { path: path.to_owned(), recursive: true, hidden: true, with_size: true, ..List::default() }
}

fn listed(answer: Answer) -> Vec<String> {
    match answer {
        Answer::Listed(listed) => listed.files.into_iter().map(|entry| entry.name).collect(),
        other => panic!("{other:?}"),
    }
}

#[test]
fn a_text_comes_back_whole_and_by_lines() {
    let mut stand = stand();
    assert_eq!(stand.write("a/b/c.txt", b"l0\nl1\nl2\nl3", false), Ok(Answer::Written { bytes: 11 }));
    assert_eq!(stand.read("a/b/c.txt", None), Ok("l0\nl1\nl2\nl3".to_owned()));
    assert_eq!(stand.read("a/b/c.txt", Some((1, 3))), Ok("l1\nl2\n".to_owned()));
    assert_eq!(stand.read("a/b/c.txt", Some((3, 9))), Ok("l3".to_owned()));
    assert_eq!(stand.read("a/b/c.txt", Some((9, 12))), Ok(String::new()));
    assert_eq!(stand.read("a/b", None), Err(FaultKind::InvalidTarget));
    assert_eq!(stand.read("a/none", None), Err(FaultKind::NotFound));
    assert_eq!(stand.read("", None), Err(FaultKind::InvalidPath));
    assert_eq!(stand.read("a\0b", None), Err(FaultKind::InvalidPath));
    stand.write("bin", b"\xff\xfe", false).expect("written");
    assert_eq!(stand.read("bin", None), Err(FaultKind::DecodeError));
    stand.write("a/b/c.txt", b"!", true).expect("appended");
    assert_eq!(stand.read("a/b/c.txt", Some((3, 9))), Ok("l3!".to_owned()));
}

#[test]
fn large_messages_go_both_ways_in_pieces() {
    let mut stand = stand();
    let text = "x".repeat(5 * 1024 * 1024);
    stand.write("large", text.as_bytes(), false).expect("written");
    assert_eq!(stand.read("large", None), Ok(text));
    fs::File::create(stand.space().join("sparse")).expect("made").set_len(1 << 40).expect("sparse");
    assert_eq!(stand.read("sparse", None), Err(FaultKind::BadRequest));
    assert_eq!(stand.read("sparse", Some((0, 1))), Err(FaultKind::BadRequest));
}

#[test]
fn a_write_keeps_the_mode_of_what_it_replaces_and_follows_links_inside() {
    let mut stand = stand();
    let file = stand.space().join("run.sh");
    fs::write(&file, "old").expect("made");
    fs::set_permissions(&file, fs::Permissions::from_mode(0o750)).expect("set");
    symlink("run.sh", stand.space().join("link")).expect("made");
    stand.write("link", b"new", false).expect("written");
    assert_eq!(fs::read_to_string(&file).expect("read"), "new");
    assert_eq!(fs::metadata(&file).expect("there").mode() & 0o7777, 0o750);
    assert_eq!(stand.names(), ["link", "run.sh"]);
    stand.write("fresh", b"", false).expect("written");
    assert_eq!(fs::metadata(stand.space().join("fresh")).expect("there").mode() & 0o7777, 0o644);
}

#[test]
fn nothing_outside_the_space_is_read_written_made_or_removed() {
    let mut stand = stand();
    let outside = stand.folder.path().join("secret");
    symlink(&outside, stand.space().join("link")).expect("made");
    symlink(stand.folder.path(), stand.space().join("up")).expect("made");
    symlink("/proc/self/root/etc/passwd", stand.space().join("magic")).expect("made");
    let text = |path: &std::path::Path| path.to_str().expect("text").to_owned();
    for path in ["link", "up/secret", "../secret", "magic", "/etc/passwd", &text(&outside)] {
        let kind = stand.read(path, None).expect_err(path);
        assert!(matches!(kind, FaultKind::PermissionDenied | FaultKind::InvalidPath), "{path}: {kind:?}");
        for append in [false, true] {
            let fault = stand.write(path, b"changed", append).expect_err(path);
            assert!(
                matches!(fault.kind, FaultKind::PermissionDenied | FaultKind::InvalidPath),
                "{path}: {fault:?}"
            );
        }
    }
    let of = |path: &str| path.to_owned();
    assert_eq!(stand.fault(Op::Mkdir { path: of("up/made"), parents: true }), FaultKind::PermissionDenied);
    assert_eq!(
        stand.fault(Op::Delete { path: of("up/secret"), recursive: true }),
        FaultKind::PermissionDenied
    );
    assert_eq!(stand.fault(Op::List(list("up"))), FaultKind::PermissionDenied);
    assert_eq!(stand.fault(Op::Stat { path: of("link"), follow: true }), FaultKind::PermissionDenied);
    let copy = |source: &str, destination: &str| Op::Copy {
        source: source.to_owned(),
        destination: destination.to_owned(),
        overwrite: true,
    };
    assert_eq!(stand.fault(copy("link", "mine")), FaultKind::PermissionDenied);
    stand.write("mine", b"mine", false).expect("written");
    assert_eq!(stand.fault(copy("mine", "up/secret")), FaultKind::PermissionDenied);
    assert_eq!(stand.fault(Op::Open { path: of("link") }), FaultKind::PermissionDenied);
    assert_eq!(fs::read_to_string(&outside).expect("there"), "42");
    // A link itself is the guest's own: it may be looked at and removed.
    assert!(matches!(
        stand.ok(Op::Stat { path: of("link"), follow: false }),
        Answer::Stat(stat) if stat.is_symlink
    ));
    assert_eq!(
        stand.ok(Op::Delete { path: of("up"), recursive: true }),
        Answer::Deleted { is_directory: false }
    );
    assert!(outside.exists());
}

#[test]
fn what_is_no_regular_file_is_refused_and_never_waited_for() {
    let mut stand = stand();
    rustix::fs::mknodat(
        rustix::fs::CWD,
        stand.space().join("fifo"),
        rustix::fs::FileType::Fifo,
        rustix::fs::Mode::from(0o644),
        0,
    )
    .expect("a FIFO");
    assert_eq!(stand.read("fifo", None), Err(FaultKind::InvalidTarget));
    assert_eq!(stand.write("fifo", b"x", false).expect_err("no file").kind, FaultKind::InvalidTarget);
    assert_eq!(stand.write("fifo", b"x", true).expect_err("no reader").kind, FaultKind::InvalidTarget);
    assert_eq!(stand.fault(Op::Open { path: "fifo".to_owned() }), FaultKind::InvalidTarget);
    let grep = Grep { path: ".".to_owned(), pattern: "x".to_owned(), recursive: true, ..usual_grep() };
    assert!(matches!(stand.ok(Op::Grep(grep)), Answer::Grepped(found) if found.files_searched == 0));
}

fn usual_grep() -> Grep {
    Grep { results_max: 500, file_bytes_max: 1024 * 1024, recursive: true, ..Grep::default() }
}

#[test]
fn trees_deeper_than_any_stack_and_any_path_are_walked_copied_and_removed() {
    let mut stand = stand();
    let mut dir = rustix::fs::open(stand.space(), rustix::fs::OFlags::DIRECTORY, rustix::fs::Mode::empty())
        .expect("the space");
    for _ in 0..1_500 {
        rustix::fs::mkdirat(&dir, "deep", rustix::fs::Mode::from(0o755)).expect("made");
        dir = place::open_dir(&dir, b"deep").expect("opened");
    }
    drop(dir);
    let deep = ["deep"; 1_500].join("/");
    stand.write(&format!("{deep}/bottom"), b"found", false).expect("written");
    assert_eq!(stand.read(&format!("{deep}/bottom"), None), Ok("found".to_owned()));
    assert_eq!(listed(stand.ok(Op::List(list(".")))).len(), 1_501);
    let copy = Op::Copy { source: "deep".to_owned(), destination: "twin".to_owned(), overwrite: false };
    assert_eq!(stand.ok(copy), Answer::Copied { files: 1, bytes: 5 });
    let twin = format!("twin/{}/bottom", ["deep"; 1_499].join("/"));
    assert_eq!(stand.read(&twin, None), Ok("found".to_owned()));
    for name in ["deep", "twin"] {
        let delete = Op::Delete { path: name.to_owned(), recursive: true };
        assert_eq!(stand.ok(delete), Answer::Deleted { is_directory: true });
    }
    assert!(stand.names().is_empty());
}

#[test]
fn listings_say_when_they_are_cut() {
    let mut stand = stand();
    for number in 0..wire::GLOB_ENTRIES_MAX + 10 {
        fs::write(stand.space().join(format!("f{number:05}.txt")), "").expect("made");
    }
    let glob = Glob {
        path: ".".to_owned(),
        pattern: "*.txt".to_owned(),
        results_max: usize::MAX,
        ..Glob::default()
    };
    match stand.ok(Op::Glob(glob)) {
        Answer::Globbed(found) => {
            assert_eq!((found.total_count, found.truncated), (wire::GLOB_ENTRIES_MAX as u64, true));
        }
        other => panic!("{other:?}"),
    }
    match stand.ok(Op::List(list("."))) {
        Answer::Listed(found) => assert_eq!((found.total_count, found.truncated), (5_010, false)),
        other => panic!("{other:?}"),
    }
}

#[test]
fn names_that_are_no_text_are_shown_and_read_back() {
    let mut stand = stand();
    let name = <std::ffi::OsStr as std::os::unix::ffi::OsStrExt>::from_bytes(b"a\xff.txt");
    fs::write(stand.space().join(name), "odd").expect("made");
    assert_eq!(listed(stand.ok(Op::List(list(".")))), [r"a\xff.txt"]);
    assert_eq!(stand.read(r"a\xff.txt", None), Ok("odd".to_owned()));
    let delete = Op::Delete { path: r"a\xff.txt".to_owned(), recursive: false };
    stand.ok(delete);
    assert!(stand.names().is_empty());
}

#[test]
fn listings_are_filtered_and_sorted() {
    let mut stand = stand();
    for (path, bytes) in [("b.py", 1), ("a.txt", 3), ("d/c.py", 2), (".h.py", 1)] {
        stand.write(path, &vec![b'x'; bytes], false).expect("written");
    }
    let of_python = List { extensions: vec!["py".to_owned()], hidden: false, ..list(".") };
    assert_eq!(listed(stand.ok(Op::List(of_python))), ["b.py", "c.py"]);
    let by_size =
        List { recursive: false, sort: wire::Sort::Size, descending: true, hidden: false, ..list(".") };
    assert_eq!(listed(stand.ok(Op::List(by_size)))[1..], ["a.txt", "b.py"]);
    let shallow = List { depth_max: Some(1), hidden: false, ..list(".") };
    assert_eq!(listed(stand.ok(Op::List(shallow))), ["a.txt", "b.py", "d"]);
    let find = Op::Find { path: ".".to_owned(), pattern: "**/*.py".to_owned() };
    let found = Answer::Found {
        files: vec!["./.h.py".to_owned(), "./b.py".to_owned(), "./d/c.py".to_owned()],
        truncated: false,
    };
    assert_eq!(stand.ok(find), found);
}

#[test]
fn a_search_shows_lines_with_what_stands_around_them() {
    let mut stand = stand();
    stand.write("a.py", b"one\ntwo NOTE\nthree\nNOTE four\n", false).expect("written");
    stand.write("b.txt", b"NOTE\n", false).expect("written");
    stand.write("bin", b"NOTE\0", false).expect("written");
    let grep =
        Grep { path: ".".to_owned(), pattern: "note".to_owned(), case_insensitive: true, ..usual_grep() };
    match stand.ok(Op::Grep(Grep { context_before: 1, context_after: 1, ..grep.clone() })) {
        Answer::Grepped(found) => {
            assert_eq!((found.match_count, found.files_searched, found.files_matched), (3, 2, 2));
            let first = GrepMatch {
                file: "./a.py".to_owned(),
                line_number: 2,
                line_content: "two NOTE".to_owned(),
                context_before: vec!["one".to_owned()],
                context_after: vec!["three".to_owned()],
            };
            assert_eq!(found.matches[0], first);
        }
        other => panic!("{other:?}"),
    }
    let numbers = |answer: Answer| match answer {
        Answer::Grepped(found) => {
            let numbers: Vec<u64> = found.matches.iter().map(|hit| hit.line_number).collect();
            (numbers, found.truncated)
        }
        other => panic!("{other:?}"),
    };
    assert_eq!(
        numbers(stand.ok(Op::Grep(Grep { offset: 1, results_max: 1, ..grep.clone() }))),
        (vec![4], true)
    );
    let python = Grep { file_type: Some("py".to_owned()), ..grep.clone() };
    assert_eq!(numbers(stand.ok(Op::Grep(python))), (vec![2, 4], false));
    assert_eq!(
        stand.fault(Op::Grep(Grep { file_type: Some("nope".to_owned()), ..grep.clone() })),
        FaultKind::BadRequest
    );
    let across = Grep { pattern: r"three\nNOTE".to_owned(), path: "a.py".to_owned(), ..grep.clone() };
    assert_eq!(numbers(stand.ok(Op::Grep(across.clone()))), (vec![], false));
    assert_eq!(numbers(stand.ok(Op::Grep(Grep { multiline: true, ..across }))), (vec![3], false));
    // An expression that would take other engines for ever takes this one no time.
    stand.write("aaa", &[b'a'; 100_000], false).expect("written");
    let evil = Grep { pattern: "(a*)*b".to_owned(), path: "aaa".to_owned(), ..grep };
    assert_eq!(numbers(stand.ok(Op::Grep(evil))), (vec![], false));
    let search = Op::Search { path: "a.py".to_owned(), regex: "NOTE$".to_owned() };
    assert_eq!(
        stand.ok(search),
        Answer::Searched { matches: vec!["two NOTE".to_owned()], line_numbers: vec![1] }
    );
}

#[test]
fn the_editor_edits_refuses_and_takes_back() {
    let mut stand = stand();
    let edit = |edit: Edit| Op::Edit { path: "e.txt".to_owned(), edit };
    let replace = |old: &str, mode| edit(Edit::Replace { old: old.to_owned(), new: "X".to_owned(), mode });
    stand.ok(edit(Edit::Create { text: "a\nb a\n".to_owned() }));
    assert_eq!(stand.fault(replace("zz", None)), FaultKind::Anchor);
    assert_eq!(stand.fault(replace("a", None)), FaultKind::Anchor);
    stand.ok(replace("a", Some(Occurrence::Last)));
    assert_eq!(stand.read("e.txt", None), Ok("a\nb X\n".to_owned()));
    stand.ok(edit(Edit::Insert { line: 1, text: "mid".to_owned() }));
    assert_eq!(stand.read("e.txt", None), Ok("a\nmid\nb X\n".to_owned()));
    assert_eq!(stand.fault(edit(Edit::Insert { line: 9, text: "x".to_owned() })), FaultKind::Anchor);
    match stand.ok(edit(Edit::View { range: Some((2, -1)) })) {
        Answer::Edited(edited) => {
            assert!(edited.output.ends_with("     2\tmid\n     3\tb X\n"), "{edited:?}")
        }
        other => panic!("{other:?}"),
    }
    stand.ok(edit(Edit::Undo));
    assert_eq!(stand.read("e.txt", None), Ok("a\nb X\n".to_owned()));
    stand.ok(edit(Edit::Undo));
    stand.ok(edit(Edit::Undo));
    assert_eq!(stand.read("e.txt", None), Err(FaultKind::NotFound));
    assert_eq!(stand.fault(edit(Edit::Undo)), FaultKind::Anchor);
}

#[test]
fn names_move_and_copy_and_take_nothing_away_unasked() {
    let mut stand = stand();
    stand.write("a", b"one", false).expect("written");
    stand.write("b", b"two", false).expect("written");
    let to = |destination: &str, overwrite| (destination.to_owned(), overwrite);
    let copy = |(destination, overwrite)| Op::Copy { source: "a".to_owned(), destination, overwrite };
    let moved = |(destination, overwrite)| Op::Move { source: "a".to_owned(), destination, overwrite };
    assert_eq!(stand.fault(copy(to("b", false))), FaultKind::AlreadyExists);
    assert_eq!(stand.fault(moved(to("b", false))), FaultKind::AlreadyExists);
    stand.ok(copy(to("new/c", false)));
    stand.ok(moved(to("b", true)));
    assert_eq!(stand.read("b", None), Ok("one".to_owned()));
    assert_eq!(stand.read("a", None), Err(FaultKind::NotFound));
    let inside = Op::Copy { source: "new".to_owned(), destination: "new/again".to_owned(), overwrite: false };
    assert_eq!(stand.fault(inside), FaultKind::InvalidTarget);
    let full = Op::Delete { path: "new".to_owned(), recursive: false };
    assert_eq!(stand.fault(full), FaultKind::InvalidTarget);
    assert_eq!(stand.names(), ["b", "new"]);
}

#[test]
fn a_file_that_is_opened_can_only_be_read() {
    let mut stand = stand();
    stand.write("f", b"content", false).expect("written");
    let id = stand.begin(Op::Open { path: "f".to_owned() }, &[], None);
    let (answered, _, mut held) = stand.answer(id);
    assert_eq!(answered, Ok(Answer::Opened));
    let mut file = fs::File::from(held.pop().expect("a descriptor"));
    let mut content = String::new();
    file.read_to_string(&mut content).expect("read");
    assert_eq!(content, "content");
    assert!(file.write_all(b"x").is_err());
}

#[test]
fn an_upload_is_there_whole_or_not_at_all() {
    let mut stand = stand();
    let upload =
        |bytes_max| Op::Upload { path: Some("new/u.bin".to_owned()), bytes_max, token: "t0".to_owned() };
    let bytes = vec![7_u8; 300_000];
    assert!(stand.stream(upload(1 << 20), &bytes, false).is_err(), "its sender went away");
    assert!(fs::read_dir(stand.space().join("new")).expect("made").next().is_none());
    assert!(
        matches!(stand.stream(upload(1_000), &bytes, true), Err(fault) if fault.kind == FaultKind::BadRequest)
    );
    assert!(fs::read_dir(stand.space().join("new")).expect("made").next().is_none());
    let done = stand.stream(upload(1 << 20), &bytes, true);
    assert_eq!(done, Ok(Answer::Uploaded { path: "new/u.bin".to_owned(), bytes: 300_000 }));
    assert_eq!(fs::read(stand.space().join("new/u.bin")).expect("there"), bytes);
}

#[test]
fn what_a_dead_helper_left_is_cleared_by_its_token() {
    let mut stand = stand();
    fs::write(stand.space().join(".caisson-t1"), "half").expect("made");
    fs::create_dir_all(stand.space().join("d/.caisson-t2/deep")).expect("made");
    let clear = |path: &str, token: &str| Op::Clear { path: Some(path.to_owned()), token: token.to_owned() };
    stand.ok(clear("target", "t1"));
    stand.ok(clear("d/target", "t2"));
    fs::create_dir_all(stand.space().join("d/.caisson-t3")).expect("made");
    stand.ok(clear("d", "t3"));
    stand.ok(clear("target", "never"));
    assert_eq!(stand.fault(clear("target", "../x")), FaultKind::InvalidPath);
    assert_eq!(stand.names(), ["d"]);
    assert!(fs::read_dir(stand.space().join("d")).expect("there").next().is_none());
}

fn archive(build: impl FnOnce(&mut ::tar::Builder<Vec<u8>>)) -> Vec<u8> {
    let mut builder = ::tar::Builder::new(Vec::new());
    build(&mut builder);
    builder.into_inner().expect("in memory")
}

/// A member as nobody's tar would write it.
fn member(
    builder: &mut ::tar::Builder<Vec<u8>>,
    name: &str,
    kind: ::tar::EntryType,
    link: &str,
    content: &[u8],
) {
    let mut header = ::tar::Header::new_gnu();
    header.as_old_mut().name[..name.len()].copy_from_slice(name.as_bytes());
    header.as_old_mut().linkname[..link.len()].copy_from_slice(link.as_bytes());
    header.set_entry_type(kind);
    header.set_mode(0o6755);
    header.set_size(content.len() as u64);
    header.set_cksum();
    builder.append(&header, content).expect("in memory");
}

#[test]
fn a_tree_goes_out_and_comes_back() {
    let mut stand = stand();
    let long = format!("t/{}/{}", "x".repeat(200), "y".repeat(200));
    stand.write(&long, b"deep", false).expect("written");
    stand.write("t/a", b"abc", false).expect("written");
    symlink("a", stand.space().join("t/link")).expect("made");
    let (read, write) = pipe_with(PipeFlags::CLOEXEC).expect("a pipe");
    let id = stand.begin(Op::TreeOut { path: "t".to_owned(), bytes_max: 1 << 20 }, &[], Some(write.as_fd()));
    drop(write);
    let mut bytes = Vec::new();
    fs::File::from(read).read_to_end(&mut bytes).expect("read");
    assert_eq!(stand.answer(id).0, Ok(Answer::TreeSent));

    let tree_in =
        |path: &str| Op::TreeIn { path: path.to_owned(), bytes_max: 1 << 20, token: "t0".to_owned() };
    let received = |entries, mode| Ok(Answer::TreeReceived { entries, mode });
    assert_eq!(stand.stream(tree_in("copy"), &bytes, true), received(4, TreeMode::Rename));
    assert_eq!(stand.read(&long.replacen('t', "copy", 1), None), Ok("deep".to_owned()));
    assert_eq!(stand.read("copy/link", None), Ok("abc".to_owned()));
    fs::write(stand.space().join("copy/a"), "old").expect("changed");
    fs::write(stand.space().join("copy/mine"), "mine").expect("made");
    assert_eq!(stand.stream(tree_in("copy"), &bytes, true), received(4, TreeMode::Merge));
    assert_eq!(stand.read("copy/a", None), Ok("abc".to_owned()));
    assert_eq!(stand.read("copy/mine", None), Ok("mine".to_owned()));
    assert_eq!(stand.names(), ["copy", "t"]);
    assert_eq!(
        stand.stream(tree_in("."), &bytes, true),
        received(4, TreeMode::Merge),
        "the space's own folder"
    );
    assert_eq!(stand.read("a", None), Ok("abc".to_owned()));
    for name in ["a", "link", &"x".repeat(200)] {
        stand.ok(Op::Delete { path: name.to_owned(), recursive: true });
    }
    assert_eq!(
        stand.stream(tree_in("t/a"), &bytes, true).map_err(|fault| fault.kind),
        Err(FaultKind::InvalidPath)
    );
    let cut = &bytes[..bytes.len() / 2];
    assert!(stand.stream(tree_in("half"), cut, false).is_err());
    assert_eq!(stand.names(), ["copy", "t"]);
    let small = Op::TreeOut { path: "t".to_owned(), bytes_max: 3 };
    let (_read, write) = pipe_with(PipeFlags::CLOEXEC).expect("a pipe");
    let id = stand.begin(small, &[], Some(write.as_fd()));
    assert!(matches!(stand.answer(id).0, Err(fault) if fault.kind == FaultKind::BadRequest));
}

#[test]
fn what_an_archive_must_not_hold_is_refused_and_leaves_nothing() {
    use ::tar::EntryType;
    let mut stand = stand();
    let cases: [(&str, EntryType, &str); 13] = [
        ("../out", EntryType::Regular, ""),
        ("/abs", EntryType::Regular, ""),
        ("a/../../out", EntryType::Regular, ""),
        ("l", EntryType::Symlink, "/etc/passwd"),
        ("d/l", EntryType::Symlink, "../../out"),
        ("l", EntryType::Symlink, "d/../../out"),
        ("h", EntryType::Link, "../secret"),
        ("h", EntryType::Link, "/etc/passwd"),
        ("h", EntryType::Link, "none"),
        ("h", EntryType::Link, "none/first"),
        ("h", EntryType::Link, "."),
        ("dev", EntryType::Char, ""),
        ("fifo", EntryType::Fifo, ""),
    ];
    for (name, kind, link) in cases {
        let bytes = archive(|builder| {
            member(builder, "first", EntryType::Regular, "", b"x");
            member(builder, name, kind, link, b"");
        });
        let tree_in = Op::TreeIn { path: "t".to_owned(), bytes_max: 1 << 20, token: "t0".to_owned() };
        let fault = stand.stream(tree_in, &bytes, true).expect_err(name);
        assert_eq!(fault.kind, FaultKind::BadRequest, "{name} → {link}: {fault:?}");
        assert!(stand.names().is_empty(), "{name}");
    }
    // Through a link of its own no member gets out either.
    let bytes = archive(|builder| {
        member(builder, "l", EntryType::Symlink, ".", b"");
        member(builder, "l/x", EntryType::Regular, "", b"x");
    });
    let tree_in = || Op::TreeIn { path: "t".to_owned(), bytes_max: 1 << 20, token: "t0".to_owned() };
    assert!(stand.stream(tree_in(), &bytes, true).is_err());
    assert!(stand.names().is_empty());
    let bytes = archive(|builder| {
        member(builder, "s", EntryType::Regular, "", b"x");
        member(builder, "h", EntryType::Link, "s", b"");
    });
    stand.stream(tree_in(), &bytes, true).expect("unpacked");
    let unpacked = fs::metadata(stand.space().join("t/h")).expect("there");
    assert_eq!((unpacked.mode() & 0o7777, unpacked.nlink()), (0o755, 2), "no setuid bit");
    assert!(stand.stream(tree_in(), &vec![b'n'; 10_000], true).is_err(), "no archive");
}

#[test]
fn a_member_is_no_link_to_what_only_the_folder_it_joins_holds() {
    use ::tar::EntryType;
    let mut stand = stand();
    fs::create_dir_all(stand.space().join("t/d")).expect("made");
    stand.write("t/there", b"mine", false).expect("written");
    stand.write("t/d/there", b"mine", false).expect("written");
    let tree_in = || Op::TreeIn { path: "t".to_owned(), bytes_max: 1 << 20, token: "t0".to_owned() };
    for target in ["there", "d/there", "d"] {
        let bytes = archive(|builder| {
            member(builder, "d/", EntryType::Directory, "", b"");
            member(builder, "h", EntryType::Link, target, b"");
        });
        let fault = stand.stream(tree_in(), &bytes, true).expect_err(target);
        assert_eq!(fault.kind, FaultKind::BadRequest, "{target}: {fault:?}");
        assert!(!stand.space().join("t/h").exists(), "{target}");
    }
    // Control: a file of the archive's own.
    let bytes = archive(|builder| {
        member(builder, "d/new", EntryType::Regular, "", b"x");
        member(builder, "h", EntryType::Link, "d/new", b"");
    });
    stand.stream(tree_in(), &bytes, true).expect("unpacked");
    assert_eq!(stand.read("t/h", None).as_deref(), Ok("x"));
}

#[test]
fn what_is_missing_outside_the_space_is_missing() {
    let mut stand = stand();
    stand.write("mine", b"x", false).expect("written");
    let of = |name: &str| format!("../{name}");
    let delete = |path: String| Op::Delete { path, recursive: false };
    let rename = |source: &str, destination: &str| Op::Move {
        source: source.to_owned(),
        destination: destination.to_owned(),
        overwrite: false,
    };
    for (name, kind) in [("none", FaultKind::NotFound), ("secret", FaultKind::PermissionDenied)] {
        assert_eq!(stand.fault(delete(of(name))), kind, "{name}");
        assert_eq!(stand.fault(rename(&of(name), "taken")), kind, "{name}");
    }
    // A place outside is not to be had, whether or not something is there.
    assert_eq!(stand.fault(rename("mine", &of("none"))), FaultKind::PermissionDenied);
    assert_eq!(stand.names(), ["mine"]);
}

#[test]
fn a_header_cannot_take_all_memory() {
    let mut stand = stand();
    let mut header = ::tar::Header::new_ustar();
    header.set_entry_type(::tar::EntryType::XHeader);
    header.set_size(3 << 30);
    header.set_cksum();
    let mut bytes = header.as_bytes().to_vec();
    bytes.resize(4 << 20, b'x');
    let tree_in = Op::TreeIn { path: "t".to_owned(), bytes_max: 1 << 20, token: "t0".to_owned() };
    let fault = stand.stream(tree_in, &bytes, true).expect_err("refused");
    assert_eq!(fault.kind, FaultKind::BadRequest, "{fault:?}");
    assert!(stand.names().is_empty());
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(300))]

    #[test]
    fn no_path_leads_to_what_lies_outside(parts in proptest::collection::vec(
        proptest::sample::select(vec!["..", ".", "", "a", "up", "link", "space", "secret", "passwd", "etc"]), 1..8,
    ), absolute in any::<bool>()) {
        let mut stand = stand();
        fs::create_dir(stand.space().join("a")).expect("made");
        symlink("../..", stand.space().join("a/up")).expect("made");
        symlink("..", stand.space().join("up")).expect("made");
        symlink("../secret", stand.space().join("link")).expect("made");
        let path = if absolute { format!("{}/{}", stand.space().display(), parts.join("/")) } else { parts.join("/") };
        prop_assert!(stand.read(&path, None).is_err());
        let _ = stand.write(&path, b"changed", false);
        let _ = stand.call(Op::Delete { path, recursive: true });
        prop_assert_eq!(fs::read_to_string(stand.folder.path().join("secret")).expect("there"), "42");
    }

    #[test]
    fn no_archive_breaks_the_helper_or_gets_out(
        flips in proptest::collection::vec((0_usize..4_096, any::<u8>()), 0..12), cut in 0_usize..4_096,
    ) {
        let mut stand = stand();
        let mut bytes = archive(|builder| {
            member(builder, "d/f", ::tar::EntryType::Regular, "", b"content");
            member(builder, "l", ::tar::EntryType::Symlink, "d/f", b"");
            member(builder, "h", ::tar::EntryType::Link, "d/f", b"");
        });
        for (at, byte) in flips {
            let at = at % bytes.len();
            bytes[at] = byte;
        }
        bytes.truncate(bytes.len().min(cut.max(512)));
        let tree_in = Op::TreeIn { path: "t".to_owned(), bytes_max: 1 << 20, token: "t0".to_owned() };
        if let Err(fault) = stand.stream(tree_in, &bytes, true) {
            prop_assert_ne!(fault.text, "the file helper failed");
            prop_assert!(stand.names().is_empty());
        }
        prop_assert_eq!(fs::read_dir(stand.folder.path()).expect("there").count(), 2, "space and secret");
    }
}
