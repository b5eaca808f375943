//! Files that a run is to find in its workspace, checked before anything runs.
#![forbid(unsafe_code)]

use std::collections::BTreeMap;
use std::io::ErrorKind;
use std::path::PathBuf;
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

/// Of a session's records, the newest for each name, beneath what the request names.
pub(super) fn with_session(records: Vec<FileRecord>, listed: Inputs) -> Inputs {
    let mut all = Inputs::new();
    for record in records {
        // Names of records were safe when they were written; what has become too deep since stays on record.
        if let Ok(Some(path)) = place(&record.name) {
            all.insert(path, Input { record, listed: false });
        }
    }
    all.extend(listed);
    all
}

/// Copies them into the workspace, what the request names first. What it does not name and finds no place is returned:
/// the run goes without it. Runs on a thread that may wait, and stops before the next file once whoever wanted it has
/// `gone`.
fn fill(
    workspace: &Workspace,
    objects: &Objects,
    inputs: &Inputs,
    gone: &CancellationToken,
) -> Result<Vec<PathBuf>, RunRefused> {
    let mut left_out = Vec::new();
    let (listed, others): (Vec<_>, Vec<_>) = inputs.iter().partition(|(_, input)| input.listed);
    for (path, Input { record, listed }) in listed.into_iter().chain(others) {
        if gone.is_cancelled() {
            return Err(RunRefused::Store); // nobody hears it
        }
        let put = objects.read(record).map_err(|error| {
            tracing::error!(%error, file = record.id, "a stored file cannot be read");
            RunRefused::Store
        });
        let put = put.and_then(|source| {
            workspace.put(path, source, record.read_only).map_err(|error| {
                tracing::info!(%error, "a file could not be put into a workspace");
                match error.kind() {
                    ErrorKind::StorageFull | ErrorKind::QuotaExceeded | ErrorKind::FileTooLarge => {
                        RunRefused::InputsTooLarge
                    }
                    _ => RunRefused::InputsInTheWay,
                }
            })
        });
        match put {
            Err(refused) if *listed => return Err(refused),
            Err(_) => left_out.push(path.clone()),
            Ok(()) => {}
        }
    }
    Ok(left_out)
}

/// The same on a thread for it; nothing to do costs nothing. That thread does not end with this future, so whatever must
/// stay until it has ended is the caller's to hold.
pub(super) async fn filled(
    workspace: &Arc<Workspace>,
    objects: &Objects,
    inputs: &Inputs,
    gone: &CancellationToken,
) -> Result<Vec<PathBuf>, RunRefused> {
    if inputs.is_empty() {
        return Ok(Vec::new());
    }
    let (workspace, objects, inputs, gone) =
        (Arc::clone(workspace), objects.clone(), inputs.clone(), gone.clone());
    let filled = tokio::task::spawn_blocking(move || fill(&workspace, &objects, &inputs, &gone));
    filled.await.unwrap_or(Err(RunRefused::Store))
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
