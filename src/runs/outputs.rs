//! What a program left in its workspace: new files, files whose content it changed, inputs it took away.
//!
//! Everything is looked at after the program has ended, through descriptors of regular files; what counts is content,
//! and a time stamp only says where it need not be read.
#![forbid(unsafe_code)]

use std::collections::{HashMap, HashSet};
use std::fs::File;
use std::io::Read;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use sha2::{Digest, Sha256};

use crate::engine::Caller;
use crate::objects::{Bucket, FileRecord, Incoming, NewFile, Objects, ObjectsError, SessionInfo, hex, names};
use crate::runs::inputs::Inputs;
use crate::runs::{Delivery, OutFile, Style};
use crate::workspace::{Content, Workspace};

/// Marks a folder that would otherwise be lost for having nothing in it.
const FOLDER_MARK: &str = ".dirkeep";
/// The history that the hosted service's programs may leave.
const RESERVED: &str = "_ptc_history.json";
/// Bytes of untouched inputs that are read again all the same: a file in memory that is mapped and written keeps its
/// time stamps.
const REREAD_BYTES_MAX: u64 = 32 * 1024 * 1024;
const READ_BYTES: usize = 64 * 1024;

/// What is known of a workspace from before the program ran.
#[derive(Debug, Default)]
pub(super) struct Before {
    pub(super) content: Content,
    /// Digests of what lay there, as far as they are on record.
    pub(super) etags: HashMap<PathBuf, String>,
}

/// What is to be kept, in the order of names.
#[derive(Debug, Default)]
struct Found {
    /// Files that were written.
    written: Vec<PathBuf>,
    marks: Vec<PathBuf>,
    /// Listed inputs that lie there as they did.
    untouched: Vec<PathBuf>,
    deleted: Vec<String>,
    /// Names that are not there any more.
    gone: Vec<PathBuf>,
}

/// Whose files they become, and how many.
pub(super) struct Target<'a> {
    pub(super) objects: &'a Objects,
    pub(super) caller: &'a Caller,
    pub(super) session: &'a SessionInfo,
    pub(super) style: Style,
    pub(super) files_max: usize,
    pub(super) file_bytes_max: u64,
    /// Of all of them together: a file with holes can be larger than what it lies in.
    pub(super) bytes_max: u64,
    /// Records of the session itself, of which what is gone is retired.
    pub(super) records: &'a [FileRecord],
}

/// Bounds of one look.
#[derive(Copy, Clone, Debug)]
struct Limits {
    files_max: usize,
    file_bytes_max: u64,
    bytes_max: u64,
}

/// What the answer says of files.
#[derive(Debug, Default)]
pub(super) struct Collected {
    pub(super) files: Vec<OutFile>,
    pub(super) deleted: Vec<String>,
    pub(super) delivery: Delivery,
}

/// Looks, keeps, and says what there is.
pub(super) async fn collect(
    workspace: &Arc<Workspace>,
    before: Before,
    inputs: Inputs,
    target: Target<'_>,
) -> Collected {
    let current = target.style == Style::Current;
    let (looking, looked_for) = (Arc::clone(workspace), inputs.clone());
    let limits = Limits {
        files_max: target.files_max,
        file_bytes_max: target.file_bytes_max,
        bytes_max: target.bytes_max,
    };
    let found = if before.content == Content::default() && looking.is_empty() {
        Found::default()
    } else {
        let look = move || find(&looking, &before, &looked_for, limits, current);
        match tokio::task::spawn_blocking(look).await {
            Ok(Ok(found)) => found,
            Ok(Err(error)) => {
                tracing::warn!(%error, "a workspace could not be looked at");
                return Collected { delivery: Delivery { attempted: 1, failed: 1 }, ..Collected::default() };
            }
            Err(_) => return Collected::default(),
        }
    };
    let mut collected = Collected { deleted: found.deleted, ..Collected::default() };
    // By what is read and not by what was seen: a guest that is still there may have let them grow.
    let mut room = target.bytes_max;
    for path in found.written {
        keep(&path, workspace, &inputs, &target, &mut room, &mut collected).await;
    }
    for path in found.marks {
        if collected.files.len() < target.files_max
            && let Ok(incoming) = target.objects.incoming().await
        {
            record(&path, incoming, None, &target, &mut collected).await;
        }
    }
    collected.files.sort_by(|one, other| one.name.cmp(&other.name));
    if current {
        for path in found.untouched {
            if collected.files.len() < target.files_max
                && let Some(input) = inputs.get(&path)
            {
                let name = path.to_string_lossy().into_owned();
                let record = input.record.clone();
                collected.files.push(OutFile { record, name, inherited: true, modified_from: None });
            }
        }
    }
    retire(&found.gone, &target).await;
    collected
}

/// Outputs of the session that are not in its workspace any more do not come back into it. Who has their ids can have
/// them for as long as any file.
async fn retire(gone: &[PathBuf], target: &Target<'_>) {
    let gone: HashSet<String> = gone.iter().filter_map(|path| names::of_output(path)).collect();
    let outputs = target.records.iter().filter(|record| record.is_output);
    let names: Vec<String> =
        outputs.map(|record| record.name.clone()).filter(|name| gone.contains(name)).collect();
    if !names.is_empty() {
        target.objects.retire(&target.session.id, names).await;
    }
}

/// One file after the other, so that no more than one descriptor is held for them.
async fn keep(
    path: &Path,
    workspace: &Workspace,
    inputs: &Inputs,
    target: &Target<'_>,
    room: &mut u64,
    collected: &mut Collected,
) {
    if collected.files.len() >= target.files_max {
        return;
    }
    let incoming = match workspace.open(path).map_err(ObjectsError::Read) {
        Ok(file) => target.objects.incoming_from(file, target.file_bytes_max.min(*room)).await,
        Err(error) => Err(error),
    };
    let incoming = match incoming {
        Ok(incoming) => {
            *room -= incoming.bytes();
            incoming
        }
        Err(error) => {
            tracing::warn!(error = &error as &dyn std::error::Error, "a generated file was not kept");
            collected.delivery.attempted += 1;
            collected.delivery.failed += 1;
            return;
        }
    };
    let from = inputs.get(path).filter(|input| input.listed);
    let from = from.map(|input| (input.record.id.clone(), input.record.session.clone()));
    record(path, incoming, from, target, collected).await;
}

async fn record(
    path: &Path,
    incoming: Incoming,
    modified_from: Option<(String, String)>,
    target: &Target<'_>,
    collected: &mut Collected,
) {
    let Some(name) = names::of_output(path) else { return };
    let new = NewFile {
        name: name.clone(),
        content_type: None,
        read_only: false,
        bucket: Bucket::User,
        is_output: true,
    };
    collected.delivery.attempted += 1;
    match target.objects.add(target.caller, target.session, incoming, new).await {
        Ok(record) => collected.files.push(OutFile { record, name, inherited: false, modified_from }),
        Err(error) => {
            tracing::warn!(error = &error as &dyn std::error::Error, "a generated file was not kept");
            collected.delivery.failed += 1;
        }
    }
}

/// What there is now against what there was. Runs on a thread that may wait.
fn find(
    workspace: &Workspace,
    before: &Before,
    inputs: &Inputs,
    limits: Limits,
    current: bool,
) -> std::io::Result<Found> {
    let Limits { files_max, file_bytes_max, bytes_max } = limits;
    let after = workspace.look()?;
    let mut room = bytes_max;
    let mut found = Found::default();
    let mut reread = REREAD_BYTES_MAX;
    for (path, stamp) in &after.files {
        let input = inputs.get(path);
        // What becomes of a copy that is not to be written is nobody's output.
        if input.is_some_and(|input| input.record.read_only) {
            continue;
        }
        let mut untouched = before.content.files.get(path) == Some(stamp);
        let reads = stamp.size <= if untouched { reread } else { file_bytes_max.min(room) };
        if reads && let Some(known) = before.etags.get(path) {
            reread = reread.saturating_sub(stamp.size);
            // Written again with the same content is not changed either.
            untouched = workspace
                .open(path)
                .and_then(|file| digest(file, stamp.size))
                .is_ok_and(|etag| etag == *known);
        }
        if untouched {
            if input.is_some_and(|input| input.listed) {
                found.untouched.push(path.clone());
            }
            continue;
        }
        if found.written.len() < files_max
            && stamp.size <= file_bytes_max.min(room)
            && may_be_output(path, inputs)
        {
            room -= stamp.size;
            found.written.push(path.clone());
        }
    }
    let is_gone = |path: &&PathBuf| !after.files.contains_key(*path);
    found.gone = before.content.files.keys().filter(is_gone).cloned().collect();
    if current {
        let listed = inputs.iter().filter(|(_, input)| input.listed && !input.record.read_only);
        let names = listed.map(|(path, _)| path).filter(is_gone);
        found.deleted = names.map(|path| path.to_string_lossy().into_owned()).collect();
        let is_new = |path: &&PathBuf| !before.content.empty_folders.contains(*path);
        let marks = after.empty_folders.iter().filter(is_new).map(|path| path.join(FOLDER_MARK));
        found.marks = marks.filter(|path| may_be_output(path, inputs)).take(files_max).collect();
    }
    Ok(found)
}

/// Not what hides, unless an input lives there; not what is too deep or too long.
fn may_be_output(path: &Path, inputs: &Inputs) -> bool {
    let hidden = |folder: &Path| {
        let name = folder.file_name().is_some_and(|name| name.as_encoded_bytes().starts_with(b"."));
        name && !inputs.keys().any(|input| input.starts_with(folder))
    };
    names::of_output(path).is_some() && path != Path::new(RESERVED) && !path.ancestors().skip(1).any(hidden)
}

/// SHA-256 of a file's bytes, in hexadecimal digits; of one that has grown beyond `bytes_max`, of a little more than that.
fn digest(file: File, bytes_max: u64) -> std::io::Result<String> {
    let mut file = file.take(bytes_max.saturating_add(1));
    let mut hasher = Sha256::new();
    let mut buffer = vec![0; READ_BYTES];
    loop {
        let length = file.read(&mut buffer)?;
        if length == 0 {
            return Ok(hex(&hasher.finalize()));
        }
        hasher.update(&buffer[..length]);
    }
}

/// The digest of each name's newest record.
pub(super) fn etags(records: &[FileRecord], inputs: &Inputs) -> HashMap<PathBuf, String> {
    let of_records = records.iter().map(|record| (PathBuf::from(&record.name), record.etag.clone()));
    let of_inputs = inputs.iter().map(|(path, input)| (path.clone(), input.record.etag.clone()));
    of_records.chain(of_inputs).collect()
}

#[cfg(test)]
mod tests {
    use std::fs;

    use super::*;
    use crate::runs::inputs::Input;

    fn input(name: &str, bytes: &[u8], listed: bool, read_only: bool) -> (PathBuf, Input) {
        let record = FileRecord {
            id: "i".repeat(21),
            session: "s".repeat(21),
            name: name.to_owned(),
            size: bytes.len() as u64,
            content_type: "text/plain".to_owned(),
            etag: hex(&Sha256::digest(bytes)),
            modified_ms: 1,
            read_only,
            bucket: Bucket::User,
            is_output: false,
        };
        (PathBuf::from(name), Input { record, listed })
    }

    const LIMITS: Limits = Limits { files_max: 50, file_bytes_max: 1000, bytes_max: 2500 };

    struct Scene {
        dir: tempfile::TempDir,
        workspace: Workspace,
        inputs: Inputs,
    }

    impl Scene {
        fn new(inputs: &[(&str, &[u8], bool, bool)]) -> Scene {
            let dir = tempfile::tempdir().unwrap();
            let view = File::open(dir.path()).unwrap();
            for (name, bytes, ..) in inputs {
                let path = dir.path().join(name);
                fs::create_dir_all(path.parent().unwrap()).unwrap();
                fs::write(path, bytes).unwrap();
            }
            let inputs = inputs.iter().map(|(name, bytes, listed, ro)| input(name, bytes, *listed, *ro));
            Scene { workspace: Workspace::new(view.into()), inputs: inputs.collect(), dir }
        }

        /// Names written, marked and deleted by what `change` does.
        fn after(&self, change: impl FnOnce(&Path)) -> [Vec<String>; 3] {
            let content = self.workspace.look().unwrap();
            let before = Before { content, etags: etags(&[], &self.inputs) };
            std::thread::sleep(std::time::Duration::from_millis(15));
            change(self.dir.path());
            let found = find(&self.workspace, &before, &self.inputs, LIMITS, true).unwrap();
            let names =
                |paths: Vec<PathBuf>| paths.iter().map(|path| path.to_str().unwrap().to_owned()).collect();
            [names(found.written), names(found.marks), found.deleted]
        }
    }

    #[test]
    fn new_files_count_and_what_hides_or_is_reserved_does_not() {
        let scene = Scene::new(&[]);
        let [written, marks, deleted] = scene.after(|at| {
            for name in ["a.txt", ".dotfile", "sub/b.txt", ".cache/x/y", "sub/.hidden/z", RESERVED] {
                fs::create_dir_all(at.join(name).parent().unwrap()).unwrap();
                fs::write(at.join(name), "x").unwrap();
            }
            fs::write(at.join("large"), vec![0; 1001]).unwrap();
            fs::create_dir_all(at.join("empty/dir")).unwrap();
            fs::create_dir_all(at.join(".config/empty")).unwrap();
        });
        assert_eq!(written, [".dotfile", "a.txt", "sub/b.txt"]);
        assert_eq!(marks, ["empty/dir/.dirkeep"]);
        assert!(deleted.is_empty());
    }

    #[test]
    fn a_hidden_folder_with_an_input_in_it_is_looked_into() {
        let scene = Scene::new(&[(".conf/in", b"1", true, false)]);
        let [written, ..] = scene.after(|at| fs::write(at.join(".conf/out"), "x").unwrap());
        assert_eq!(written, [".conf/out"]);
    }

    #[test]
    fn inputs_come_back_when_they_were_changed_and_are_told_of_when_they_are_gone() {
        let scene = Scene::new(&[
            ("same", b"1", true, false),
            ("changed", b"2", true, false),
            ("gone", b"3", true, false),
            ("fixed", b"4", true, true),
            ("fixed-gone", b"5", true, true),
            ("own", b"6", false, false),
        ]);
        let [written, _, deleted] = scene.after(|at| {
            fs::write(at.join("changed"), "new").unwrap();
            fs::write(at.join("fixed"), "new").unwrap();
            for name in ["gone", "fixed-gone", "own"] {
                fs::remove_file(at.join(name)).unwrap();
            }
        });
        assert_eq!(written, ["changed"]);
        assert_eq!(deleted, ["gone"]);
    }

    #[test]
    fn a_file_that_was_changed_without_a_trace_in_its_times_is_found() {
        let scene = Scene::new(&[("mapped", b"1", true, false)]);
        let content = scene.workspace.look().unwrap();
        fs::write(scene.dir.path().join("mapped"), "2").unwrap();
        // As if it had happened before the look: the stamps are equal.
        let after = scene.workspace.look().unwrap();
        let before = Before { content: after, etags: etags(&[], &scene.inputs) };
        assert_ne!(before.content, Content::default());
        drop(content);
        let found = find(&scene.workspace, &before, &scene.inputs, LIMITS, true).unwrap();
        assert_eq!(found.written.len(), 1);
    }

    #[test]
    fn all_together_are_no_more_than_there_may_be_whatever_they_take_on_disk() {
        let scene = Scene::new(&[]);
        let [written, ..] = scene.after(|at| {
            for name in ["a", "b", "c", "d"] {
                File::create(at.join(name)).unwrap().set_len(900).unwrap();
            }
        });
        assert_eq!(written, ["a", "b"]);
    }

    #[tokio::test]
    async fn what_has_grown_since_it_was_seen_is_bounded_all_the_same() {
        let scene = Scene::new(&[("a", &[1; 900], true, false), ("b", &[2; 900], true, false)]);
        let store = crate::store::Store::open(&scene.dir.path().join("store.db")).unwrap();
        let limits = crate::objects::ObjectLimits::default();
        let objects = Objects::open(&scene.dir.path().join("objects"), store, limits).unwrap();
        let caller = Caller { tenant: crate::engine::TenantId("a".to_owned()), user: None };
        let session = objects.new_run_session(&caller);
        let target = Target {
            objects: &objects,
            caller: &caller,
            session: &session,
            style: Style::Current,
            files_max: 10,
            file_bytes_max: 1000,
            bytes_max: 1000,
            records: &[],
        };
        let (mut room, mut collected) = (target.bytes_max, Collected::default());
        for name in ["a", "b"] {
            let path = Path::new(name);
            keep(path, &scene.workspace, &scene.inputs, &target, &mut room, &mut collected).await;
        }
        assert_eq!((collected.files.len(), collected.delivery.failed, room), (1, 1, 100));
        // Of an untouched input no more is read than there was.
        let grown = || scene.workspace.open(Path::new("a")).unwrap();
        assert_eq!(digest(grown(), 900).unwrap(), hex(&Sha256::digest([1; 900])));
        assert_eq!(digest(grown(), 9).unwrap(), hex(&Sha256::digest([1; 10])));
    }

    #[test]
    fn links_are_no_outputs() {
        let scene = Scene::new(&[]);
        let [written, ..] = scene.after(|at| {
            std::os::unix::fs::symlink("/etc/passwd", at.join("p.txt")).unwrap();
            std::os::unix::fs::symlink("/etc", at.join("d")).unwrap();
            fs::write(at.join("real.txt"), "x").unwrap();
        });
        assert_eq!(written, ["real.txt"]);
    }
}
