//! The tools on files: they work on the records of a session, which its workspace follows from run to run.
#![forbid(unsafe_code)]

use base64::Engine as _;
use base64::engine::general_purpose::STANDARD;
use rmcp::RoleServer;
use rmcp::model::{CallToolResult, ContentBlock, ResourceContents};
use rmcp::service::RequestContext;
use schemars::JsonSchema;
use serde::Serialize;

use super::content;
use super::handler::Handler;
use super::place::{Fault, Missing, Place};
use super::run::FileAnswer;
use super::tools::{DeleteArgs, ListArgs, ReadArgs, ResetArgs, UploadArgs, UploadEncoding};
use crate::objects::{Bucket, FileRecord, NewFile, names};
use crate::server::answer::in_short;
use crate::server::rates::Window;

/// Most that one call reads of a file, in bytes.
pub(super) const READ_BYTES_MAX: u64 = 32 * 1024 * 1024;
/// Files that one list names.
const LISTED_MAX: usize = 1000;
/// How code names the workspace.
const WORKSPACE: &str = "/mnt/data/";

/// The files of a session.
#[derive(Debug, Serialize, JsonSchema)]
pub(super) struct FileList {
    files: Vec<FileAnswer>,
    /// How many there are; a list names the first 1000.
    count: usize,
    /// The session's name, where it has one.
    #[serde(skip_serializing_if = "Option::is_none")]
    session: Option<String>,
}

/// An upload that is there.
#[derive(Debug, Serialize, JsonSchema)]
pub(super) struct Uploaded {
    file: FileAnswer,
    /// The session's name, where it has one: pass it as `session` to go on there.
    #[serde(skip_serializing_if = "Option::is_none")]
    session: Option<String>,
}

impl Handler {
    pub(super) async fn upload(
        &self,
        args: UploadArgs,
        context: &RequestContext<RoleServer>,
    ) -> Result<CallToolResult, Fault> {
        self.admit(Window::Upload, context)?;
        let path = checked(&args.path)?;
        let bytes = match args.encoding {
            UploadEncoding::Text => args.content.into_bytes(),
            UploadEncoding::Base64 => STANDARD
                .decode(args.content.replace(['\n', '\r'], ""))
                .map_err(|error| Fault(format!("`content` is not base64: {error}")))?,
        };
        let place = self.place(context, args.session.as_deref(), Missing::Begin).await?;
        let objects = place.runs.objects();
        let mut incoming = objects.incoming().await?;
        incoming.write(&bytes).await?;
        let new = NewFile {
            name: path.to_owned(),
            content_type: None,
            read_only: false,
            bucket: Bucket::User,
            is_output: false,
        };
        let record = objects.add(&place.caller, &place.session, incoming, new).await?;
        let mut text = format!("{WORKSPACE}{} ({} bytes)", record.name, record.size);
        if let (true, Some(name)) = (place.is_new, &place.name) {
            text.push_str(&format!("\n[session {name}: pass it as `session` to go on with its files]"));
        }
        let link = ContentBlock::resource_link(content::link(&place, &record));
        let mut result = CallToolResult::success(vec![ContentBlock::text(text), link]);
        let uploaded = Uploaded { file: FileAnswer::new(&place, &record), session: place.name.clone() };
        result.structured_content = serde_json::to_value(uploaded).ok();
        Ok(result)
    }

    pub(super) async fn list(
        &self,
        args: ListArgs,
        context: &RequestContext<RoleServer>,
    ) -> Result<CallToolResult, Fault> {
        self.admit(Window::Listing, context)?;
        let place = self.place(context, args.session.as_deref(), Missing::Refuse).await?;
        let folder = args.folder.unwrap_or_default();
        let folder = relative(&folder).trim_end_matches('/');
        let is_in = |name: &str| {
            folder.is_empty() || name.strip_prefix(folder).is_some_and(|rest| rest.starts_with('/'))
        };
        let found = content::newest(&place).await;
        let found: Vec<_> = found.iter().filter(|record| is_in(&record.name)).collect();
        let listed = found.iter().take(LISTED_MAX);
        let list = FileList {
            files: listed.map(|record| FileAnswer::new(&place, record)).collect(),
            count: found.len(),
            session: place.name.clone(),
        };
        let mut text: String = list
            .files
            .iter()
            .map(|file| format!("{} ({} bytes, {})\n", file.path, file.size, file.mime_type))
            .collect();
        if list.count > list.files.len() {
            text.push_str(&format!("[{} more; name a `folder`]", list.count - list.files.len()));
        } else if list.count == 0 {
            text.push_str("(no files)");
        }
        let mut result = CallToolResult::success(vec![ContentBlock::text(text.trim_end())]);
        result.structured_content = serde_json::to_value(list).ok();
        Ok(result)
    }

    pub(super) async fn read(
        &self,
        args: ReadArgs,
        context: &RequestContext<RoleServer>,
    ) -> Result<CallToolResult, Fault> {
        self.admit(Window::Download, context)?;
        let place = self.place(context, args.session.as_deref(), Missing::Refuse).await?;
        let record = find(&place, &args.path).await?;
        let left = record.size.saturating_sub(args.offset);
        let length = args.length.unwrap_or(left).min(left);
        if length > READ_BYTES_MAX {
            return Err(Fault(format!(
                "{} bytes are more than one call reads ({READ_BYTES_MAX}): read parts with `offset` and `length`",
                length
            )));
        }
        let is_whole = length == record.size;
        let bytes = content::read(place.runs.objects(), &record, args.offset, length).await?;
        Ok(CallToolResult::success(vec![block(&place, &record, bytes, is_whole)]))
    }

    pub(super) async fn delete(
        &self,
        args: DeleteArgs,
        context: &RequestContext<RoleServer>,
    ) -> Result<CallToolResult, Fault> {
        let place = self.place(context, args.session.as_deref(), Missing::Refuse).await?;
        let record = find(&place, &args.path).await?;
        forget(&place, &record.name).await;
        let text = format!("{WORKSPACE}{} is deleted", record.name);
        Ok(CallToolResult::success(vec![ContentBlock::text(text)]))
    }

    pub(super) async fn reset(
        &self,
        args: ResetArgs,
        context: &RequestContext<RoleServer>,
    ) -> Result<CallToolResult, Fault> {
        let place = self.place(context, args.session.as_deref(), Missing::Refuse).await?;
        tokio::select! {
            () = place.runs.reset(&place.session.id) => {}
            () = place.stopped() => return Err(Fault::new("the call was cancelled")),
        }
        let mut text = "the session's interpreter starts anew; its variables are gone".to_owned();
        if args.delete_files {
            // With what no record tells of: the next call finds a workspace with nothing in it.
            place.runs.objects().end(&place.caller, &place.session.id).await;
            text.push_str(", and all files are deleted");
        }
        Ok(CallToolResult::success(vec![ContentBlock::text(text)]))
    }
}

/// Takes the records of a name away, older ones first: the newest alone is what the workspace hears of.
async fn forget(place: &Place, name: &str) {
    let objects = place.runs.objects();
    for record in objects.live_files_of(&place.session.id).await.iter().filter(|record| record.name == name) {
        objects.remove(&place.session.id, &record.id).await;
    }
}

/// The newest file of this path.
pub(super) async fn find(place: &Place, path: &str) -> Result<FileRecord, Fault> {
    let wanted = relative(path);
    let records = place.runs.objects().live_files_of(&place.session.id).await;
    let found = records.into_iter().rev().find(|record| record.name == wanted);
    let path = || in_short(format_args!("{path:?}"));
    found.ok_or_else(|| Fault(format!("no file {}; list_files names those that there are", path())))
}

/// A path below the workspace, however it is written.
pub(super) fn relative(path: &str) -> &str {
    let path = path.strip_prefix(WORKSPACE).unwrap_or(path);
    path.trim_start_matches("./")
}

fn checked(path: &str) -> Result<&str, Fault> {
    let path = relative(path);
    if names::is_safe(path) && path == names::of_upload(path) {
        return Ok(path);
    }
    Err(Fault(format!(
        "`path` must be relative to /mnt/data, without `..`, of at most {} characters and {} folders",
        names::NAME_CHARS_MAX,
        names::NAME_DEPTH_MAX
    )))
}

/// Text as text, a whole picture as a picture, anything else as what it is.
fn block(place: &Place, record: &FileRecord, bytes: Vec<u8>, is_whole: bool) -> ContentBlock {
    let shows = is_whole && bytes.len() as u64 <= content::PICTURE_BYTES_MAX;
    if let Some(kind) = content::picture(&bytes).filter(|_| shows) {
        return ContentBlock::image(STANDARD.encode(bytes), kind);
    }
    match String::from_utf8(bytes) {
        Ok(text) => ContentBlock::text(text),
        Err(error) => ContentBlock::resource(blob(place, record, error.as_bytes())),
    }
}

/// A file as a resource.
pub(super) fn contents(place: &Place, record: &FileRecord, bytes: Vec<u8>) -> ResourceContents {
    match String::from_utf8(bytes) {
        Ok(text) => ResourceContents::text(text, content::uri(place.name.as_deref(), &record.name))
            .with_mime_type(record.content_type.clone()),
        Err(error) => blob(place, record, error.as_bytes()),
    }
}

fn blob(place: &Place, record: &FileRecord, bytes: &[u8]) -> ResourceContents {
    ResourceContents::blob(STANDARD.encode(bytes), content::uri(place.name.as_deref(), &record.name))
        .with_mime_type(record.content_type.clone())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn paths_stay_below_the_workspace() {
        for (path, kept) in [("a.txt", "a.txt"), ("/mnt/data/in/a b.txt", "in/a b.txt"), ("./a", "a")] {
            assert_eq!(checked(path).unwrap(), kept);
        }
        for wrong in
            ["", "/etc/passwd", "../a", "a/../../b", "a//b", "a\0b", "C:/a", "a\\b", "/mnt/data/../x"]
        {
            assert!(checked(wrong).is_err(), "{wrong:?}");
        }
    }
}
