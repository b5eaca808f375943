//! Files that a run is to find in its workspace, checked before anything runs.
#![forbid(unsafe_code)]

use std::collections::BTreeMap;
use std::fs::File;
use std::io::{self, ErrorKind};
use std::ops::Bound;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use tokio_util::sync::CancellationToken;

use crate::objects::{FileRecord, Objects, names};
use crate::runs::{FileRef, RunRefused, RunRequest, Runs};
use crate::workspace::Workspace;

/// Files that one request may bring.
pub const FILES_MAX: usize = 1000;
/// What names of the workspace begin with where a client writes them whole.
const PREFIXES: [&str; 2] = ["/mnt/data/", "mnt/data/"];

/// By their place in the workspace.
pub(super) type Inputs = BTreeMap<PathBuf, Input>;

/// One of them.
#[derive(Clone, Debug)]
pub(super) struct Input {
    pub(super) record: FileRecord,
    /// Named by the request; else it belongs to the session that is continued.
    pub(super) listed: bool,
}

impl Runs {
    /// Every reference of a request, or the reason why nothing runs.
    pub(super) async fn inputs(&self, request: &RunRequest) -> Result<Inputs, RunRefused> {
        if request.files.len() > FILES_MAX {
            return Err(RunRefused::TooManyFiles { max: FILES_MAX });
        }
        let mut inputs = Inputs::new();
        for file in &request.files {
            let path = file.name.as_deref().map(place).transpose()?.flatten();
            let record = self.record(request, file).await?;
            let path = match path {
                Some(path) => path,
                None => place(&record.name)?.ok_or(RunRefused::FileName)?,
            };
            // Of equal names the newest is meant.
            let is_newer = |known: &Input| known.record.modified_ms <= record.modified_ms;
            if inputs.get(&path).is_none_or(is_newer) {
                inputs.insert(path, Input { record, listed: true });
            }
        }
        Ok(inputs)
    }

    /// Unknown, deleted, expired, foreign, or of another bucket: one answer for all of them.
    async fn record(&self, request: &RunRequest, file: &FileRef) -> Result<FileRecord, RunRefused> {
        let found = self.objects.file(&request.caller, &file.session, &file.id).await;
        let fits = |record: &FileRecord| file.bucket.as_ref().is_none_or(|bucket| *bucket == record.bucket);
        found.filter(fits).ok_or(RunRefused::FileReference)
    }
}

/// Where a name lies in the workspace; `None` for no name.
pub(super) fn place(name: &str) -> Result<Option<PathBuf>, RunRefused> {
    let mut rest = name;
    while let Some(shorter) = PREFIXES.iter().find_map(|prefix| rest.strip_prefix(prefix)) {
        rest = shorter;
    }
    if rest.is_empty() {
        return Ok(None);
    }
    if names::is_safe(rest) { Ok(Some(PathBuf::from(rest))) } else { Err(RunRefused::FileName) }
}

/// Of a session's records, the newest for each name, without what the request names; and where one would have to lie in
/// the place of that.
pub(super) fn of_session(records: Vec<FileRecord>, listed: &Inputs) -> (Inputs, Vec<PathBuf>) {
    let (mut inputs, mut in_the_way) = (Inputs::new(), Vec::new());
    for record in records {
        // Names of records were safe when they were written; what has become too deep since stays on record.
        match place(&record.name) {
            Ok(Some(path)) if listed.contains_key(&path) => {}
            Ok(Some(path)) if is_in_the_way(&path, listed) => in_the_way.push(path),
            Ok(Some(path)) => drop(inputs.insert(path, Input { record, listed: false })),
            Ok(None) | Err(_) => {}
        }
    }
    (inputs, in_the_way)
}

/// Whether a file at `path` would need a folder where one of `listed` lies, or lie where that needs one.
fn is_in_the_way(path: &Path, listed: &Inputs) -> bool {
    let below = (Bound::Excluded(path), Bound::Unbounded);
    path.ancestors().skip(1).any(|above| listed.contains_key(above))
        || listed.range::<Path, _>(below).next().is_some_and(|(next, _)| next.starts_with(path))
}

/// Where inputs come from and go to, on a thread that may wait: it stops before the next file once whoever wanted it has
/// gone. That thread does not end with the future of a call, so whatever must stay until it has ended is the caller's to
/// hold.
#[derive(Clone)]
pub(super) struct Layer {
    pub(super) workspace: Arc<Workspace>,
    pub(super) objects: Objects,
    pub(super) gone: CancellationToken,
}

impl Layer {
    /// Lays what a request names: all of it, or nothing.
    pub(super) async fn together(&self, listed: &Inputs) -> Result<(), RunRefused> {
        self.work(listed, |layer, listed| {
            let lay = || {
                let mut laying = layer.workspace.laying();
                for (path, input) in &listed {
                    let source = layer.source(input)?;
                    laying.add(path, source, input.record.read_only).map_err(|error| not_put(&error))?;
                }
                laying.finish().map_err(|error| not_put(&error))
            };
            match lay() {
                // What a kill has left may take the room.
                Err(RunRefused::InputsTooLarge) if layer.workspace.clear() => lay(),
                laid => laid,
            }
        })
        .await
    }

    /// Lays each that finds a place; returns the others: the run goes without them.
    pub(super) async fn each(&self, inputs: &Inputs) -> Result<Vec<PathBuf>, RunRefused> {
        self.work(inputs, |layer, inputs| {
            let mut left_out = Vec::new();
            for (path, input) in inputs {
                let source = match layer.source(&input) {
                    Err(refused) if layer.gone.is_cancelled() => return Err(refused),
                    source => source,
                };
                let read_only = input.record.read_only;
                let put = source.and_then(|source| {
                    layer.workspace.put(&path, source, read_only).map_err(|error| not_put(&error))
                });
                if put.is_err() {
                    left_out.push(path);
                }
            }
            Ok(left_out)
        })
        .await
    }

    /// Nothing to do costs nothing.
    async fn work<T: Default + Send + 'static>(
        &self,
        inputs: &Inputs,
        work: impl FnOnce(Layer, Inputs) -> Result<T, RunRefused> + Send + 'static,
    ) -> Result<T, RunRefused> {
        if inputs.is_empty() {
            return Ok(T::default());
        }
        let (layer, inputs) = (self.clone(), inputs.clone());
        let worked = tokio::task::spawn_blocking(move || work(layer, inputs));
        worked.await.unwrap_or(Err(RunRefused::Store))
    }

    fn source(&self, input: &Input) -> Result<File, RunRefused> {
        if self.gone.is_cancelled() {
            return Err(RunRefused::Store); // nobody hears it
        }
        self.objects.read(&input.record).map_err(|error| {
            tracing::error!(%error, file = input.record.id, "a stored file cannot be read");
            RunRefused::Store
        })
    }
}

fn not_put(error: &io::Error) -> RunRefused {
    tracing::info!(%error, "a file could not be put into a workspace");
    match error.kind() {
        ErrorKind::StorageFull | ErrorKind::QuotaExceeded | ErrorKind::FileTooLarge => {
            RunRefused::InputsTooLarge
        }
        _ => RunRefused::InputsInTheWay,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn placed(name: &str) -> Option<String> {
        place(name).ok().map(|path| path.map_or_else(String::new, |path| path.to_str().unwrap().to_owned()))
    }

    #[test]
    fn names_are_relative_to_the_workspace_however_they_are_written() {
        for name in ["x/in.txt", "/mnt/data/x/in.txt", "mnt/data/x/in.txt", "/mnt/data/mnt/data/x/in.txt"] {
            assert_eq!(placed(name).as_deref(), Some("x/in.txt"), "{name}");
        }
        assert_eq!(placed("").as_deref(), Some(""));
        assert_eq!(placed("/mnt/data/").as_deref(), Some(""));
        assert_eq!(placed("räport.v2.txt").as_deref(), Some("räport.v2.txt"));
    }

    #[test]
    fn what_a_request_names_is_displaced_by_nothing_of_its_session() {
        let record = |name: &str| FileRecord {
            id: name.to_owned(),
            session: "S".to_owned(),
            name: name.to_owned(),
            size: 1,
            content_type: "text/plain".to_owned(),
            etag: String::new(),
            modified_ms: 1,
            read_only: false,
            bucket: crate::objects::Bucket::User,
            is_output: false,
        };
        let listed = |name: &str| (PathBuf::from(name), Input { record: record(name), listed: true });
        let listed = Inputs::from([listed("a"), listed("d/e"), listed("same")]);
        let names = ["a/b", "d", "same", "a.txt", "d/f", "ab/c", "d/e/f/g"];
        let (inputs, in_the_way) = of_session(names.map(record).to_vec(), &listed);
        let laid: Vec<_> = inputs.keys().map(|path| path.to_str().unwrap()).collect();
        assert_eq!(laid, ["a.txt", "ab/c", "d/f"]);
        assert_eq!(in_the_way, ["a/b", "d", "d/e/f/g"].map(PathBuf::from));
    }

    #[test]
    fn names_that_lead_elsewhere_are_none() {
        let long = "x".repeat(names::NAME_CHARS_MAX + 1);
        let deep = ["d"; names::NAME_DEPTH_MAX + 1].join("/");
        for name in [
            "../a",
            "a/../../b",
            "/etc/passwd",
            "a\0b",
            "a\\b",
            "a//b",
            "./a",
            "a/.",
            "a/",
            "/mnt/data/../x",
            "a\nb",
            &"x".repeat(256),
            &long,
            &deep,
        ] {
            assert_eq!(placed(name), None, "{name:?}");
        }
        let long = ["x".repeat(127), "x".repeat(128)].join("/");
        assert!(placed(&long).is_some());
        assert!(placed(&["d"; names::NAME_DEPTH_MAX].join("/")).is_some());
    }
}
