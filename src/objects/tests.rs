//! Stored files as their users see them: what a kill leaves, who may have what, what ends when.

use std::collections::HashSet;
use std::io::Read;
use std::os::unix::fs::PermissionsExt;
use std::task::Poll;

use tempfile::TempDir;

use super::*;
use crate::engine::TenantId;

const TTL: Duration = Duration::from_secs(24 * 3600);
const FILE_BYTES_MAX: u64 = 1024 * 1024;

struct Stand {
    folder: TempDir,
    objects: Objects,
}

fn open(folder: &Path) -> Objects {
    let store = Store::open(&folder.join("store.db")).expect("opens");
    let limits = ObjectLimits {
        file_bytes_max: FILE_BYTES_MAX,
        ttl: TTL,
        files_per_session_max: 20,
        kept_per_tenant_max: 12,
    };
    Objects::open(&folder.join("objects"), store, limits).expect("opens")
}

fn stand() -> Stand {
    let folder = tempfile::tempdir().expect("a folder");
    let objects = open(folder.path());
    Stand { folder, objects }
}

impl Stand {
    /// As after a `kill -9`: nothing of the old life is dropped.
    fn killed(self) -> Stand {
        let Stand { folder, objects } = self;
        std::mem::forget(objects);
        let objects = open(folder.path());
        Stand { folder, objects }
    }

    /// Names of what lies in the folder of stored bytes.
    fn on_disk(&self) -> HashSet<String> {
        let entries = std::fs::read_dir(self.folder.path().join("objects")).expect("there");
        entries.map(|entry| entry.expect("readable").file_name().into_string().expect("text")).collect()
    }
}

fn caller(tenant: &str, user: Option<&str>) -> Caller {
    Caller { tenant: TenantId(tenant.to_owned()), user: user.map(str::to_owned) }
}

fn new(name: &str) -> NewFile {
    NewFile {
        name: name.to_owned(),
        content_type: None,
        read_only: false,
        bucket: Bucket::User,
        is_output: false,
    }
}

fn output(name: &str) -> NewFile {
    NewFile { is_output: true, ..new(name) }
}

async fn incoming(objects: &Objects, bytes: &[u8]) -> Incoming {
    let mut incoming = objects.incoming().await.expect("begun");
    incoming.write(bytes).await.expect("taken");
    incoming
}

async fn put(
    objects: &Objects,
    who: &Caller,
    session: &SessionInfo,
    new: NewFile,
    bytes: &[u8],
) -> FileRecord {
    let incoming = incoming(objects, bytes).await;
    objects.add(who, session, incoming, new).await.expect("added")
}

fn content(objects: &Objects, record: &FileRecord) -> Vec<u8> {
    let mut bytes = Vec::new();
    objects.read(record).expect("there").read_to_end(&mut bytes).expect("read");
    bytes
}

fn names(files: &[FileRecord]) -> Vec<&str> {
    files.iter().map(|file| file.name.as_str()).collect()
}

async fn kept(objects: &Objects, who: &Caller, user: &str, entity: &str) -> SessionInfo {
    objects.affinity(who, user, Affinity::Entity(entity)).await.expect("made").0
}

#[tokio::test]
async fn a_stored_file_is_its_bytes_and_its_record() {
    let it = stand();
    let who = caller("a", None);
    let session = it.objects.new_session(&who, Kind::Storage).await.expect("made");
    let record = put(&it.objects, &who, &session, new("d/data.csv"), b"a,b\n").await;
    assert_eq!((record.size, record.content_type.as_str()), (4, "text/csv"));
    assert_eq!(record.etag, "5be08c9684a1d25efcee09318204824278b08bbfb4aef973ffefd0b9d7478313");
    assert_eq!(content(&it.objects, &record), b"a,b\n");
    assert_eq!(it.objects.file(&who, &session.id, &record.id).await, Some(record.clone()));
    assert_eq!(it.objects.files_of(&session.id).await, std::slice::from_ref(&record));
    let mode = |path: PathBuf| std::fs::metadata(path).expect("there").permissions().mode() & 0o777;
    assert_eq!(mode(it.folder.path().join("objects")), 0o700);
    assert_eq!(mode(it.folder.path().join("objects").join(&record.id)), 0o600);
}

#[tokio::test]
async fn a_type_that_no_header_holds_is_guessed() {
    let it = stand();
    let who = caller("a", None);
    let session = it.objects.new_run_session(&who);
    for (given, name, kept) in [
        (Some("text/csv"), "a.bin", "text/csv"),
        (Some("text/plain; charset=utf-8"), "a", "text/plain; charset=utf-8"),
        (Some("text/html\r\nX: y"), "a.png", "image/png"),
        (Some("ä/ö"), "a.png", "image/png"),
        (Some("nonsense"), "a.unknown", "application/octet-stream"),
        (Some(""), "p.json", "application/json"),
        (None, "noext", "application/octet-stream"),
    ] {
        let new = NewFile { content_type: given.map(str::to_owned), ..new(name) };
        let record = put(&it.objects, &who, &session, new, b"x").await;
        assert_eq!(record.content_type, kept, "{given:?} {name}");
    }
}

#[tokio::test]
async fn what_is_acknowledged_survives_a_kill_and_nothing_else_is_left() {
    let it = stand();
    let who = caller("a", Some("alice"));
    let storage = it.objects.new_session(&who, Kind::Storage).await.expect("made");
    let record = put(&it.objects, &who, &storage, new("a.txt"), b"kept").await;
    let entity = kept(&it.objects, &who, "", "e").await;
    let second = put(&it.objects, &who, &entity, new("b.txt"), b"too").await;
    let deleted = put(&it.objects, &who, &entity, new("c.txt"), b"not").await;
    assert!(it.objects.remove(&entity.id, &deleted.id).await);
    // On its way when the kill comes, and bytes of which no record was written.
    let mut unfinished = incoming(&it.objects, &[7; 300 * 1024]).await;
    unfinished.close().await.expect("closed");
    std::mem::forget(unfinished);
    std::fs::write(it.folder.path().join("objects").join("N".repeat(21)), b"orphan").expect("written");
    assert_eq!(it.on_disk().len(), 4);
    let it = it.killed();
    assert_eq!(it.on_disk(), HashSet::from([record.id.clone(), second.id.clone()]));
    assert_eq!(content(&it.objects, &record), b"kept");
    assert_eq!(it.objects.file(&who, &storage.id, &record.id).await, Some(record));
    assert_eq!(
        it.objects.affinity(&who, "x", Affinity::Entity("e")).await.expect("there"),
        (entity.clone(), false)
    );
    assert_eq!(names(&it.objects.files_of(&entity.id).await), ["b.txt"]);
    let pending = it.objects.workspace_of(&entity.id).await.expect("it lives").0;
    assert_eq!((names(&pending.place), pending.remove), (vec!["b.txt"], vec!["c.txt".to_owned()]));
}

#[tokio::test]
async fn an_upload_that_is_given_up_leaves_nothing() {
    let it = stand();
    drop(incoming(&it.objects, b"few").await);
    drop(incoming(&it.objects, &[1; 600 * 1024]).await);
    let mut large = it.objects.incoming().await.expect("begun");
    large.write(&vec![1; FILE_BYTES_MAX as usize]).await.expect("as much as may be");
    let refused = large.write(b"1").await;
    assert!(matches!(refused, Err(ObjectsError::TooLarge { bytes_max: FILE_BYTES_MAX })));
    assert!(large.write(b"").await.is_err() && large.close().await.is_err(), "it takes no more");
    // Of several, one that cannot be added takes the others with it.
    let who = caller("a", None);
    let session = it.objects.new_run_session(&who);
    let mut files = Vec::new();
    for at in 0..21 {
        files.push((incoming(&it.objects, b"x").await, new(&at.to_string())));
    }
    let refused = it.objects.add_all(&who, &session, files).await;
    assert!(matches!(refused, Err(ObjectsError::SessionFull { files_max: 20 })));
    assert_eq!(it.objects.files_of(&session.id).await, []);
    assert_eq!(it.on_disk(), HashSet::new());
}

#[tokio::test]
async fn a_file_of_a_guest_is_copied_as_it_is_and_only_if_it_is_one() {
    let it = stand();
    let path = it.folder.path().join("guest");
    let bytes: Vec<u8> = (0..600_000_u32).map(|at| at as u8).collect();
    std::fs::write(&path, &bytes).expect("written");
    let mut file = File::open(&path).expect("there");
    // Where its other holders have moved to is nothing to us.
    io::Seek::seek(&mut file, io::SeekFrom::End(0)).expect("moved");
    let who = caller("a", None);
    let session = it.objects.new_run_session(&who);
    let incoming = it.objects.incoming_from(file, u64::MAX).await.expect("copied");
    assert_eq!(incoming.bytes(), 600_000);
    let record = it.objects.add(&who, &session, incoming, output("g")).await.expect("added");
    assert!(content(&it.objects, &record) == bytes);
    let folder = File::open(it.folder.path()).expect("there");
    assert!(matches!(it.objects.incoming_from(folder, u64::MAX).await, Err(ObjectsError::NotAFile)));
    let large = File::create(&path).expect("made");
    large.set_len(FILE_BYTES_MAX + 1).expect("grown");
    let refused = it.objects.incoming_from(File::open(&path).expect("there"), u64::MAX).await;
    assert!(matches!(refused, Err(ObjectsError::TooLarge { .. })));
    assert_eq!(it.on_disk().len(), 1);
}

#[tokio::test]
async fn holes_take_no_room_and_are_zeros_again() {
    use std::os::unix::fs::MetadataExt;
    let it = stand();
    let who = caller("a", None);
    let session = it.objects.new_run_session(&who);
    for (bytes, blocks_max) in
        [(vec![0; FILE_BYTES_MAX as usize], 64), ([vec![0; 300_000], b"end".to_vec()].concat(), 300)]
    {
        let record = put(&it.objects, &who, &session, new("z"), &bytes).await;
        assert_eq!(record.size, bytes.len() as u64);
        assert!(content(&it.objects, &record) == bytes);
        let about = it.objects.read(&record).expect("there").metadata().expect("stat");
        assert!(about.blocks() <= blocks_max, "{} blocks", about.blocks());
    }
}

#[tokio::test]
async fn sessions_without_a_file_are_known_at_once_and_to_their_owner_alone() {
    let it = stand();
    let who = caller("a", None);
    let session = it.objects.new_run_session(&who);
    assert_eq!(it.objects.session(&who, &session.id).await, Some(session.clone()));
    assert_eq!(it.objects.files_for(&who, &session.id).await, Some(Vec::new()));
    for other in [caller("b", None), caller("a", Some("alice"))] {
        assert_eq!(it.objects.session(&other, &session.id).await, None);
        assert_eq!(it.objects.files_for(&other, &session.id).await, None);
    }
    // With its first file it is written down.
    put(&it.objects, &who, &session, output("o"), b"x").await;
    let it = it.killed();
    assert_eq!(it.objects.session(&who, &session.id).await, Some(session));
}

#[tokio::test]
async fn an_ordinary_upload_may_be_continued_and_a_shared_or_read_only_one_not() {
    let it = stand();
    let who = caller("a", None);
    let agent = Bucket::Agent { id: "x".to_owned() };
    for (new, read_only) in [
        (new("a"), false),
        (NewFile { read_only: true, ..new("a") }, true),
        (NewFile { bucket: agent, ..new("a") }, true),
    ] {
        let session = it.objects.new_session(&who, Kind::Storage).await.expect("made");
        put(&it.objects, &who, &session, new, b"x").await;
        assert_eq!(it.objects.session(&who, &session.id).await.map(|it| it.read_only), Some(read_only));
    }
}

/// Everybody who might meet in one daemon: two keys, two proven users of one tenant, one of the other with the same name.
fn everybody() -> Vec<Caller> {
    vec![
        caller("a", None),
        caller("b", None),
        caller("a", Some("alice")),
        caller("a", Some("bob")),
        caller("b", Some("alice")),
        caller("a", Some("")),
    ]
}

#[tokio::test]
async fn nobody_gets_by_any_id_what_is_anothers() {
    let it = stand();
    let mut owned = Vec::new();
    for who in everybody() {
        let storage = it.objects.new_session(&who, Kind::Storage).await.expect("made");
        let entity = kept(&it.objects, &who, "u", "shared-agent").await;
        let run = it.objects.new_run_session(&who);
        for session in [storage, entity, run] {
            let user = put(&it.objects, &who, &session, new("u"), b"mine").await;
            owned.push((who.clone(), session, user));
        }
    }
    let sessions: HashSet<_> = owned.iter().map(|(_, session, _)| session.id.clone()).collect();
    assert_eq!(sessions.len(), owned.len(), "nobody shares a session");
    let spaces: HashSet<_> = owned.iter().filter_map(|(_, session, _)| session.space).collect();
    assert_eq!(spaces.len(), everybody().len(), "nor a space");
    for asker in everybody() {
        for (owner, session, record) in &owned {
            let is_theirs = asker == *owner;
            assert_eq!(it.objects.session(&asker, &session.id).await.is_some(), is_theirs);
            assert_eq!(it.objects.files_for(&asker, &session.id).await.is_some(), is_theirs);
            for (_, through, _) in &owned {
                let found = it.objects.file(&asker, &through.id, &record.id).await;
                assert_eq!(found.is_some(), is_theirs && through.id == session.id);
            }
            if !is_theirs {
                let incoming = incoming(&it.objects, b"x").await;
                let added = it.objects.add(&asker, session, incoming, new("theirs")).await;
                assert!(matches!(added, Err(ObjectsError::NoSession)), "{asker:?} into {owner:?}");
            }
        }
    }
}

#[tokio::test]
async fn an_agents_files_are_its_tenants_and_nobody_elses() {
    let it = stand();
    let alice = caller("a", Some("alice"));
    let session = it.objects.new_session(&alice, Kind::Storage).await.expect("made");
    let agent = NewFile { bucket: Bucket::Agent { id: "x".to_owned() }, ..new("shared") };
    let skill = NewFile { bucket: Bucket::Skill { id: "s".to_owned(), version: 3 }, ..new("skill") };
    let agent = put(&it.objects, &alice, &session, agent, b"x").await;
    let skill = put(&it.objects, &alice, &session, skill, b"x").await;
    let user = put(&it.objects, &alice, &session, new("mine"), b"x").await;
    let it = it.killed();
    for (asker, sees) in [
        (caller("a", Some("alice")), vec!["shared", "skill", "mine"]),
        (caller("a", Some("bob")), vec!["shared", "skill"]),
        (caller("a", None), vec!["shared", "skill"]),
    ] {
        let files = it.objects.files_for(&asker, &session.id).await.expect("some are theirs");
        assert_eq!(names(&files), sees, "{asker:?}");
        assert_eq!(it.objects.file(&asker, &session.id, &agent.id).await.as_ref(), Some(&agent));
        assert_eq!(
            it.objects.file(&asker, &session.id, &skill.id).await.map(|it| it.bucket),
            Some(skill.bucket.clone())
        );
        let is_alice = asker == alice;
        assert_eq!(it.objects.file(&asker, &session.id, &user.id).await.is_some(), is_alice);
        assert_eq!(it.objects.session(&asker, &session.id).await.is_some(), is_alice);
    }
    for asker in [caller("b", None), caller("b", Some("alice"))] {
        assert_eq!(it.objects.files_for(&asker, &session.id).await, None);
        assert_eq!(it.objects.file(&asker, &session.id, &agent.id).await, None);
    }
}

#[tokio::test]
async fn a_part_of_an_id_names_nothing() {
    let it = stand();
    let who = caller("a", None);
    let session = it.objects.new_run_session(&who);
    let record = put(&it.objects, &who, &session, new("a"), b"x").await;
    let cut = |id: &str| id[..20].to_owned();
    for (session, file) in [
        (cut(&session.id), record.id.clone()),
        (session.id.clone(), cut(&record.id)),
        (session.id.clone(), format!("{}.txt", record.id)),
        (session.id.clone(), "%".to_owned()),
        (session.id.clone(), String::new()),
        (record.id.clone(), session.id.clone()),
        // A whole one, of another session.
        ("N".repeat(21), record.id.clone()),
    ] {
        assert_eq!(it.objects.file(&who, &session, &file).await, None, "{session} {file}");
    }
}

#[tokio::test]
async fn affinity_is_of_tenant_user_and_name_and_survives() {
    let it = stand();
    let (key, alice) = (caller("a", None), caller("a", Some("alice")));
    let mut seen = HashSet::new();
    let mut all = Vec::new();
    for (who, user, affinity) in [
        (&key, "", Affinity::Entity("e")),
        (&key, "", Affinity::Hint("e")),
        (&key, "", Affinity::Entity("f")),
        (&key, "alice", Affinity::Entity("e")),
        (&key, "bob", Affinity::Entity("e")),
        (&alice, "", Affinity::Entity("e")),
        (&caller("b", None), "", Affinity::Entity("e")),
        (&caller("a", Some("")), "", Affinity::Entity("e")),
        // What would be the same if the parts were merely put one behind the other.
        (&key, "bob\",\"entity", Affinity::Entity("e")),
    ] {
        let (info, is_new) = it.objects.affinity(who, user, affinity).await.expect("made");
        assert!(is_new && seen.insert(info.id.clone()), "{who:?} {user} {affinity:?}");
        assert_eq!(info.kind, Kind::Kept);
        all.push(info);
    }
    let spaces: HashSet<_> = all.iter().map(|info| info.space.expect("kept")).collect();
    assert_eq!(spaces.len(), all.len());
    let it = it.killed();
    let again = it.objects.affinity(&key, "alice", Affinity::Entity("e")).await.expect("found");
    assert_eq!(again, (all[3].clone(), false));
    // A proven user cannot say to be another.
    let asserted = it.objects.affinity(&alice, "bob", Affinity::Entity("e")).await.expect("found");
    assert_eq!(asserted, (all[5].clone(), false));
}

#[tokio::test]
async fn several_who_ask_at_once_for_one_entity_get_one_session() {
    let it = stand();
    let asking = (0..20).map(|_| {
        let objects = it.objects.clone();
        tokio::spawn(async move {
            objects.affinity(&caller("a", None), "", Affinity::Entity("e")).await.expect("made")
        })
    });
    let answers: Vec<_> =
        futures_util::future::join_all(asking).await.into_iter().map(Result::unwrap).collect();
    assert_eq!(answers.iter().filter(|(_, is_new)| *is_new).count(), 1);
    assert!(answers.iter().all(|(info, _)| *info == answers[0].0));
}

#[tokio::test]
async fn spaces_of_tenants_and_sessions_have_numbers_of_one_sequence() {
    let it = stand();
    let who = caller("a", None);
    let tenant = |name: &str| TenantId(name.to_owned());
    let store = it.objects.0.store.clone();
    assert_eq!(store.space_of(&tenant("a")).await.expect("made"), SpaceId(1));
    assert_eq!(kept(&it.objects, &who, "", "e").await.space, Some(SpaceId(2)));
    assert_eq!(it.objects.new_session(&who, Kind::Kept).await.expect("made").space, Some(SpaceId(3)));
    let mut ended = it.objects.expired_spaces().expect("the first to ask");
    assert!(it.objects.expired_spaces().is_none());
    it.objects.advance(TTL + Duration::from_secs(1));
    it.objects.sweep_now().await.expect("swept");
    let both = [ended.try_recv(), ended.try_recv()].map(|space| space.expect("ended"));
    assert_eq!(HashSet::from(both), HashSet::from([SpaceId(2), SpaceId(3)]));
    assert!(ended.try_recv().is_err(), "once each");
    for space in both {
        it.objects.space_deleted(space).await;
    }
    it.objects.space_deleted(SpaceId(1)).await;
    store.flush().await.expect("written");
    let it = it.killed();
    let store = it.objects.0.store.clone();
    assert_eq!(
        store.space_of(&tenant("b")).await.expect("made"),
        SpaceId(4),
        "2 and 3 are never given again"
    );
    assert_eq!(
        store.space_of(&tenant("a")).await.expect("there"),
        SpaceId(1),
        "a tenant's space is no ended session's"
    );
    assert!(it.objects.expired_spaces().expect("open").try_recv().is_err(), "both were deleted");
}

#[tokio::test]
async fn sessions_end_a_day_after_their_last_use_and_leave_nothing() {
    let it = stand();
    let who = caller("a", None);
    let storage = it.objects.new_session(&who, Kind::Storage).await.expect("made");
    let record = put(&it.objects, &who, &storage, new("a"), b"x").await;
    let entity = kept(&it.objects, &who, "", "e").await;
    put(&it.objects, &who, &entity, new("b"), b"x").await;
    let run = it.objects.new_run_session(&who);
    it.objects.advance(TTL - Duration::from_secs(60));
    it.objects.sweep_now().await.expect("swept");
    assert_eq!(it.objects.files_for(&who, &storage.id).await.map(|files| files.len()), Some(1));
    // Reads are no use, runs are.
    it.objects.touch(&entity.id).await;
    it.objects.touch(&run.id).await;
    it.objects.0.store.flush().await.expect("written");
    it.objects.advance(Duration::from_secs(61));
    // At once, not only when somebody has swept.
    assert_eq!(it.objects.file(&who, &storage.id, &record.id).await, None);
    assert_eq!(it.objects.files_for(&who, &storage.id).await, None);
    assert_eq!(it.objects.session(&who, &storage.id).await, None);
    assert!(
        it.objects.session(&who, &entity.id).await.is_some()
            && it.objects.session(&who, &run.id).await.is_some()
    );
    assert_eq!(it.on_disk().len(), 2);
    it.objects.sweep_now().await.expect("swept");
    assert_eq!(it.on_disk().len(), 1);
    let mut spaces = it.objects.expired_spaces().expect("first");
    assert!(spaces.try_recv().is_err());
    it.objects.advance(TTL);
    // Asked for again before it was swept, an entity has a new session, and the old one's space goes.
    let (later, is_new) = it.objects.affinity(&who, "", Affinity::Entity("e")).await.expect("made");
    assert!(is_new && later.id != entity.id && later.space != entity.space);
    assert_eq!(spaces.try_recv().ok(), entity.space);
    assert_eq!(it.on_disk(), HashSet::new());
    assert_eq!(it.objects.session(&who, &run.id).await, None);
    // A run that had its turn by then has no workspace to fill, and may have made the space again. Nobody else's goes.
    assert!(it.objects.workspace_of(&entity.id).await.is_none());
    let old = entity.space.expect("it has one");
    it.objects.used_late(later.space.expect("it has one")).await;
    it.objects.used_late(old).await;
    assert_eq!(spaces.try_recv(), Ok(old));
    assert!(spaces.try_recv().is_err());
    // Killed before the space was deleted: it is told of again.
    let it = it.killed();
    assert_eq!(it.objects.expired_spaces().expect("first").try_recv().ok(), entity.space);
}

#[tokio::test]
async fn a_session_that_is_found_shortly_before_its_end_lives_on() {
    let it = stand();
    let who = caller("a", None);
    let entity = kept(&it.objects, &who, "", "e").await;
    it.objects.advance(TTL - Duration::from_secs(1));
    let (again, is_new) = it.objects.affinity(&who, "", Affinity::Entity("e")).await.expect("found");
    assert_eq!((again, is_new), (entity.clone(), false));
    it.objects.advance(Duration::from_secs(3600));
    assert_eq!(it.objects.session(&who, &entity.id).await, Some(entity));
}

#[tokio::test]
async fn of_equal_names_both_are_kept_and_the_workspace_gets_the_newest() {
    let it = stand();
    let who = caller("a", None);
    let entity = kept(&it.objects, &who, "", "e").await;
    let first = put(&it.objects, &who, &entity, new("r.txt"), b"first").await;
    let second = put(&it.objects, &who, &entity, new("r.txt"), b"second").await;
    let other = put(&it.objects, &who, &entity, new("s.txt"), b"s").await;
    assert_ne!(first.id, second.id);
    assert_eq!(
        (content(&it.objects, &first), content(&it.objects, &second)),
        (b"first".to_vec(), b"second".to_vec())
    );
    assert_eq!(names(&it.objects.files_of(&entity.id).await), ["r.txt", "r.txt", "s.txt"]);
    let pending = it.objects.workspace_of(&entity.id).await.expect("it lives").0;
    assert_eq!(pending.place, [second.clone(), other]);
    it.objects.settled(&entity.id, &pending).await;
    assert!(it.objects.workspace_of(&entity.id).await.expect("it lives").0.is_empty());
    // Without the newest the workspace shows the one before it; without the oldest nothing changes.
    assert!(it.objects.remove(&entity.id, &second.id).await);
    assert_eq!(
        it.objects.workspace_of(&entity.id).await.expect("it lives").0.place,
        std::slice::from_ref(&first)
    );
    let third = put(&it.objects, &who, &entity, new("r.txt"), b"third").await;
    assert!(it.objects.remove(&entity.id, &first.id).await);
    let pending = it.objects.workspace_of(&entity.id).await.expect("it lives").0;
    assert_eq!((pending.place.clone(), pending.remove.clone()), (vec![third.clone()], Vec::new()));
    it.objects.settled(&entity.id, &pending).await;
    assert!(
        it.objects.remove(&entity.id, &third.id).await && !it.objects.remove(&entity.id, &third.id).await
    );
    let pending = it.objects.workspace_of(&entity.id).await.expect("it lives").0;
    assert_eq!((pending.place.clone(), pending.remove.clone()), (Vec::new(), vec!["r.txt".to_owned()]));
    // What is there again is not taken away.
    put(&it.objects, &who, &entity, output("r.txt"), b"made").await;
    assert!(it.objects.workspace_of(&entity.id).await.expect("it lives").0.is_empty());
    it.objects.settled(&entity.id, &pending).await;
}

#[tokio::test]
async fn what_comes_while_a_run_places_files_is_told_to_the_next() {
    let it = stand();
    let who = caller("a", None);
    let entity = kept(&it.objects, &who, "", "e").await;
    let first = put(&it.objects, &who, &entity, new("a"), b"1").await;
    let second = put(&it.objects, &who, &entity, new("a"), b"2").await;
    let lone = put(&it.objects, &who, &entity, new("b"), b"1").await;
    let placing = it.objects.workspace_of(&entity.id).await.expect("it lives").0;
    // Meanwhile: what is being placed is deleted, and more comes.
    assert!(it.objects.remove(&entity.id, &second.id).await);
    assert!(it.objects.remove(&entity.id, &lone.id).await);
    let late = put(&it.objects, &who, &entity, new("c"), b"1").await;
    it.objects.settled(&entity.id, &placing).await;
    let next = it.objects.workspace_of(&entity.id).await.expect("it lives").0;
    assert_eq!((next.place.clone(), next.remove.clone()), (vec![first, late], vec!["b".to_owned()]));
    it.objects.settled(&entity.id, &next).await;
    assert!(it.objects.workspace_of(&entity.id).await.expect("it lives").0.is_empty());
}

#[tokio::test]
async fn outputs_and_files_of_sessions_without_a_workspace_are_never_pending() {
    let it = stand();
    let who = caller("a", None);
    let entity = kept(&it.objects, &who, "", "e").await;
    put(&it.objects, &who, &entity, output("o"), b"1").await;
    let storage = it.objects.new_session(&who, Kind::Storage).await.expect("made");
    let record = put(&it.objects, &who, &storage, new("u"), b"1").await;
    assert!(it.objects.remove(&storage.id, &record.id).await);
    for session in [&entity, &storage] {
        assert_eq!(it.objects.workspace_of(&session.id).await.expect("it lives").0, Pending::default());
    }
}

#[tokio::test]
async fn superseded_files_of_a_long_session_go_after_their_day_and_the_newest_stay() {
    let it = stand();
    let who = caller("a", None);
    let entity = kept(&it.objects, &who, "", "e").await;
    let old = put(&it.objects, &who, &entity, output("plot.png"), b"1").await;
    let data = put(&it.objects, &who, &entity, new("data"), b"1").await;
    let newest = put(&it.objects, &who, &entity, output("plot.png"), b"2").await;
    for _ in 0..3 {
        it.objects.advance(TTL / 2);
        it.objects.touch(&entity.id).await;
        it.objects.sweep_now().await.expect("swept");
    }
    assert_eq!(it.objects.files_of(&entity.id).await, [data, newest]);
    assert!(!it.on_disk().contains(&old.id));
    // Their places are free again.
    for at in 0..18 {
        put(&it.objects, &who, &entity, output(&at.to_string()), b"1").await;
    }
    let more = incoming(&it.objects, b"1").await;
    let refused = it.objects.add(&who, &entity, more, output("one too many")).await;
    assert!(matches!(refused, Err(ObjectsError::SessionFull { .. })));
}

#[tokio::test]
async fn a_look_up_does_not_wait_for_the_writer() {
    let it = stand();
    let who = caller("a", None);
    let session = it.objects.new_run_session(&who);
    let record = put(&it.objects, &who, &session, new("a"), b"x").await;
    let (hold, held) = std::sync::mpsc::channel::<()>();
    let store = it.objects.0.store.clone();
    let busy = tokio::spawn(async move {
        store.write(move |_| Ok(held.recv_timeout(Duration::from_secs(20)).is_ok())).await
    });
    let found =
        tokio::time::timeout(Duration::from_secs(5), it.objects.file(&who, &session.id, &record.id)).await;
    assert_eq!(found.expect("the writer is busy, and nobody waits for it"), Some(record));
    hold.send(()).expect("it waits");
    assert!(busy.await.expect("ran").expect("written"), "control: the writer was busy all the while");
}

#[tokio::test]
async fn work_that_fails_undoes_itself_and_leaves_the_others() {
    let it = stand();
    let store = it.objects.0.store.clone();
    let (hold, held) = std::sync::mpsc::channel::<()>();
    let first = store.clone();
    // Holds the writer, so that what follows is one transaction.
    let busy = tokio::spawn(async move { first.write(move |_| Ok(held.recv().is_ok())).await });
    tokio::task::yield_now().await;
    let insert = |name: &'static str, fails: bool| {
        let store = store.clone();
        tokio::spawn(async move {
            store
                .write(move |it| {
                    it.execute("INSERT INTO spaces (tenant) VALUES (?1)", [name])?;
                    if fails { it.execute("INSERT INTO nowhere VALUES (1)", []).map(|_| ()) } else { Ok(()) }
                })
                .await
        })
    };
    let (good, bad, last) = (insert("good", false), insert("bad", true), insert("last", false));
    tokio::time::sleep(Duration::from_millis(50)).await;
    hold.send(()).expect("it waits");
    assert!(busy.await.expect("ran").is_ok());
    assert!(good.await.expect("ran").is_ok() && last.await.expect("ran").is_ok());
    assert!(matches!(bad.await.expect("ran"), Err(StoreError::NotWritten)));
    let tenants: Vec<String> = store
        .read(|it| it.prepare("SELECT tenant FROM spaces")?.query_map([], |row| row.get(0))?.collect())
        .await
        .expect("read");
    assert_eq!(tenants, ["good", "last"]);
}

#[tokio::test]
async fn a_store_in_memory_will_do() {
    let folder = tempfile::tempdir().expect("a folder");
    let store = Store::in_memory().expect("opens");
    let objects =
        Objects::open(&folder.path().join("objects"), store, ObjectLimits::default()).expect("opens");
    let who = caller("a", None);
    let session = objects.new_run_session(&who);
    let record = put(&objects, &who, &session, new("a"), b"x").await;
    assert_eq!(objects.file(&who, &session.id, &record.id).await, Some(record));
}

#[tokio::test]
async fn what_leads_to_a_session_is_of_its_own_kind() {
    let it = stand();
    let (a, b) = (caller("a", None), caller("b", None));
    let mut seen = HashSet::new();
    for who in [&a, &b] {
        for affinity in
            [Affinity::Entity("x"), Affinity::Hint("x"), Affinity::Connection("x"), Affinity::Named("x")]
        {
            let (session, made) = it.objects.affinity(who, "", affinity).await.expect("made");
            assert!(made && seen.insert(session.id.clone()), "{affinity:?}");
            let (again, made) = it.objects.affinity(who, "", affinity).await.expect("found");
            assert!(!made && again == session);
        }
    }
}

#[tokio::test]
async fn a_session_can_be_ended_before_its_time_by_its_owner_alone() {
    let it = stand();
    let (who, other) = (caller("a", None), caller("b", None));
    let mut ended = it.objects.expired_spaces().expect("not taken yet");
    let (session, _) = it.objects.affinity(&who, "", Affinity::Named("x")).await.expect("made");
    let record = put(&it.objects, &who, &session, new("a.txt"), b"a").await;
    it.objects.end(&other, &session.id).await;
    assert!(it.objects.session(&who, &session.id).await.is_some());
    it.objects.end(&who, &session.id).await;
    assert_eq!(it.objects.session(&who, &session.id).await, None);
    assert_eq!(it.objects.file(&who, &session.id, &record.id).await, None);
    assert_eq!(ended.try_recv().ok(), session.space);
    assert!(!it.on_disk().contains(&record.id));
    let (next, made) = it.objects.affinity(&who, "", Affinity::Named("x")).await.expect("made");
    assert!(made && next.space != session.space);
    it.objects.end(&who, "no-such-session").await;
}

#[tokio::test]
async fn a_tenant_keeps_so_many_workspaces_and_no_more() {
    let it = stand();
    let (one, other) = (caller("a", None), caller("b", None));
    let max = it.objects.limits().kept_per_tenant_max;
    let mut kept_ones = Vec::new();
    for number in 0..max {
        kept_ones.push(kept(&it.objects, &one, "", &number.to_string()).await);
    }
    let refused = it.objects.affinity(&one, "", Affinity::Hint("one more")).await;
    assert!(matches!(refused, Err(ObjectsError::TooManyKept { max: of }) if of == max), "{refused:?}");
    // A user of the same key counts with it.
    let refused = it.objects.new_session(&caller("a", Some("u")), Kind::Kept).await;
    assert!(matches!(refused, Err(ObjectsError::TooManyKept { .. })), "{refused:?}");
    kept(&it.objects, &other, "", "0").await;
    assert_eq!(kept(&it.objects, &one, "", "0").await, kept_ones[0], "those that are there are found");
    it.objects.end(&one, &kept_ones[1].id).await;
    kept(&it.objects, &one, "", "one more").await;
}

#[tokio::test]
async fn a_retired_output_is_found_by_its_id_only_until_its_time_is_over() {
    let it = stand();
    let who = caller("a", None);
    let session = it.objects.new_run_session(&who);
    let output = |name: &str| NewFile { is_output: true, ..new(name) };
    let gone = put(&it.objects, &who, &session, output("gone.txt"), b"1").await;
    let stays = put(&it.objects, &who, &session, output("stays.txt"), b"2").await;
    let upload = put(&it.objects, &who, &session, new("up.txt"), b"3").await;
    it.objects.retire(&session.id, ["gone.txt", "up.txt"].map(str::to_owned).to_vec()).await;
    assert_eq!(it.objects.live_files_of(&session.id).await, [stays.clone(), upload]);
    assert_eq!(it.objects.file(&who, &session.id, &gone.id).await.as_ref(), Some(&gone));
    assert_eq!(content(&it.objects, &gone), b"1");
    // Made anew it is there again.
    let again = put(&it.objects, &who, &session, output("gone.txt"), b"4").await;
    assert!(it.objects.live_files_of(&session.id).await.contains(&again));
    for _ in 0..2 {
        it.objects.advance(TTL - Duration::from_secs(60));
        it.objects.touch(&session.id).await;
    }
    it.objects.sweep_now().await.expect("swept");
    assert_eq!(it.objects.file(&who, &session.id, &gone.id).await, None);
    assert!(it.objects.file(&who, &session.id, &stays.id).await.is_some());
}

/// What the store itself says, and what is remembered of it.
async fn is_remembered_as_it_is(objects: &Objects, session: &str) {
    objects.kept().forget_all();
    let said = objects.workspace_of(session).await;
    // Once from the store and once from memory, which the next change finds filled.
    assert_eq!(objects.workspace_of(session).await, said);
    assert!(objects.kept().workspace(session).is_some());
}

#[tokio::test]
async fn every_change_of_a_kept_session_is_seen_by_its_next_run() {
    let it = stand();
    let (objects, who) = (&it.objects, caller("a", None));
    let session = kept(objects, &who, "u", "e").await;
    let seen = async |title: &str| {
        let remembered = objects.workspace_of(&session.id).await;
        objects.kept().forget_all();
        assert_eq!(objects.workspace_of(&session.id).await, remembered, "{title}");
        is_remembered_as_it_is(objects, &session.id).await;
        remembered.expect("it lives")
    };
    seen("nothing yet").await;
    let first = put(objects, &who, &session, new("a.txt"), b"1").await;
    let (pending, files) = seen("an upload").await;
    assert_eq!((names(&pending.place), names(&files)), (vec!["a.txt"], vec!["a.txt"]));
    put(objects, &who, &session, new("a.txt"), b"2").await;
    objects.settled(&session.id, &seen("the same name again").await.0).await;
    assert_eq!(seen("heard of").await.0.place, []);
    put(objects, &who, &session, output("o.txt"), b"3").await;
    assert_eq!(names(&seen("an output").await.1), ["a.txt", "o.txt"]);
    objects.retire(&session.id, vec!["o.txt".to_owned()]).await;
    assert_eq!(names(&seen("taken away by a run").await.1), ["a.txt"]);
    let newest = objects.live_files_of(&session.id).await.remove(0);
    assert!(objects.remove(&session.id, &newest.id).await && objects.remove(&session.id, &first.id).await);
    assert_eq!(seen("removed").await.0.remove, ["a.txt"]);
    objects.end(&who, &session.id).await;
    assert_eq!(objects.workspace_of(&session.id).await, None);
    assert_ne!(kept(objects, &who, "u", "e").await.id, session.id, "what is over is not remembered");
}

#[tokio::test]
async fn a_change_whose_caller_goes_away_is_seen_as_well() {
    let it = stand();
    let (objects, who) = (&it.objects, caller("a", None));
    let session = kept(objects, &who, "u", "e").await;
    let record = put(objects, &who, &session, new("a.txt"), b"1").await;
    is_remembered_as_it_is(objects, &session.id).await;
    // Polled once, it is on its way to the writer, and nobody waits for it any more.
    let mut removing = Box::pin(objects.remove(&session.id, &record.id));
    assert!(std::future::poll_fn(|context| Poll::Ready(removing.as_mut().poll(context).is_pending())).await);
    drop(removing);
    let gone = async {
        while !objects.workspace_of(&session.id).await.expect("it lives").1.is_empty() {
            tokio::time::sleep(Duration::from_millis(1)).await;
        }
    };
    tokio::time::timeout(Duration::from_secs(20), gone).await.expect("seen");
}
