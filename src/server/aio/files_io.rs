//! Whole files and trees over HTTP: downloads with ranges and validators, uploads, tar out and in.
#![forbid(unsafe_code)]

use std::ops::Range;
use std::time::SystemTime;

use axum::extract::Request;
use axum::http::{HeaderMap, HeaderName, StatusCode, header};
use axum::response::{IntoResponse, Response};
use bytes::Bytes;
use futures_util::stream::try_unfold;
use http_body_util::BodyExt;
use serde::Serialize;
use utoipa::{IntoResponses, ToSchema};

use super::files_answer::{About, FileFailure, failed};
use super::files_wire::{NotTaken, PathQuery, Who};
use super::refuse::{Generation, RefusedBody, refused};
use crate::engine::TenantId;
use crate::files::names;
use crate::files::transfer::{Arrival, Download, Incoming, STREAM_IDLE_MAX, Version};
use crate::files::wire::{Fault, FaultKind, Finish, PATH_BYTES_MAX, TREE_BYTES_MAX, TreeMode};
use crate::files::{FileError, Operation};
use crate::server::AppState;
use crate::server::answer::Envelope;
use crate::server::form::{self, Form};
use crate::server::transfer::{attachment, disposition, paced, set};

/// Largest file that can be uploaded.
const UPLOAD_BYTES_MAX: u64 = 4 * 1024 * 1024 * 1024;
/// What a multipart body may have beside the file.
const FORM_BYTES_MAX: u64 = 1024 * 1024;
/// The name of an upload that has none.
const NAMELESS: &str = "upload";

async fn enter(state: &AppState, tenant: &TenantId, who: &Who) -> Result<Operation, FileError> {
    state.files().ok_or(FileError::Unavailable)?.enter(tenant, who.owner()).await
}

// --- downloads ---------------------------------------------------------------------------------------------------

/// What a download may answer.
#[derive(IntoResponses)]
#[expect(dead_code, reason = "the document's list of what a route may answer")]
pub(super) enum DownloadAnswers {
    #[response(status = 200, content_type = "application/octet-stream", description = "The whole file")]
    Whole(Vec<u8>),
    #[response(status = 206, content_type = "application/octet-stream", description = "The part asked for")]
    Part(Vec<u8>),
    #[response(status = 304, description = "It is what the caller has")]
    NotModified,
    #[response(status = 400, description = "The request cannot be carried out as it is")]
    BadRequest(Envelope<FileFailure>),
    #[response(status = 403, description = "Not allowed, or outside the space")]
    Forbidden(Envelope<FileFailure>),
    #[response(status = 404, description = "Nothing of this name")]
    NotFound(Envelope<FileFailure>),
    #[response(status = 409, description = "It changed, with `change_policy=abort`")]
    Changed(Envelope<FileFailure>),
    #[response(status = 412, description = "It is not what `If-Match` names")]
    NoMatch(RefusedBody),
    #[response(status = 416, description = "It has no such part")]
    NoSuchPart(RefusedBody),
    #[response(status = 429, description = "Too many operations at once")]
    Busy(RefusedBody),
    #[response(status = 503, description = "Nothing was started")]
    Unavailable(RefusedBody),
}

pub(super) async fn download(
    state: &AppState,
    tenant: &TenantId,
    query: Option<&str>,
    headers: &HeaderMap,
    generation: Generation,
) -> Response {
    let (path, aborts) = match PathQuery::parse(query) {
        Ok(parsed) => parsed,
        Err(not_taken) => return not_taken.answer(generation),
    };
    let about = || {
        let mut about = About::new(generation, "download", "download file", &path);
        about.statuses = true;
        about
    };
    let opened = match enter(state, tenant, &Who::default()).await {
        Ok(operation) => operation.open(&path).await,
        Err(error) => Err(error),
    };
    let file = match opened {
        Ok(file) => file,
        Err(error) => return failed(error, about()),
    };
    match send(file, &path, headers, aborts).await {
        Ok(response) => response,
        Err(Unsent::Changed) => {
            let changed = Fault::text(FaultKind::AlreadyExists, "the file has changed");
            failed(FileError::Fault(changed), about())
        }
        Err(Unsent::Broken(error)) => failed(FileError::Fault(Fault::from(error)), about()),
    }
}

enum Unsent {
    /// It is not the file the caller meant, or not any more.
    Changed,
    Broken(std::io::Error),
}

impl From<std::io::Error> for Unsent {
    fn from(error: std::io::Error) -> Unsent {
        Unsent::Broken(error)
    }
}

/// A strong validator: no guest can write to a file without its inode's time moving on.
fn etag(version: &Version) -> String {
    let ((modified, modified_ns), (changed, changed_ns)) = (version.modified, version.changed);
    let (bytes, inode) = (version.bytes, version.inode);
    format!("\"{inode:x}-{bytes:x}-{modified:x}.{modified_ns:x}-{changed:x}.{changed_ns:x}\"")
}

async fn send(file: Download, path: &str, headers: &HeaderMap, aborts: bool) -> Result<Response, Unsent> {
    let version = file.version()?;
    let tag = etag(&version);
    let mut response = match conditions(headers, &version, &tag) {
        Verdict::Send => match range(headers, &version, &tag) {
            Ranged::Changed if aborts => return Err(Unsent::Changed),
            Ranged::Whole | Ranged::Changed => {
                body(StatusCode::OK, file, version, 0..version.bytes, aborts).await?
            }
            Ranged::Part(part) => {
                let bounds = format!("bytes {}-{}/{}", part.start, part.end - 1, version.bytes);
                let mut response = body(StatusCode::PARTIAL_CONTENT, file, version, part, aborts).await?;
                set(&mut response, header::CONTENT_RANGE, &bounds);
                response
            }
            Ranged::Nothing => {
                let mut response = refused(
                    StatusCode::RANGE_NOT_SATISFIABLE,
                    format!("the file has {} bytes", version.bytes),
                    None,
                );
                set(&mut response, header::CONTENT_RANGE, &format!("bytes */{}", version.bytes));
                return Ok(response);
            }
        },
        Verdict::NotModified => StatusCode::NOT_MODIFIED.into_response(),
        Verdict::Failed if aborts => return Err(Unsent::Changed),
        Verdict::Failed => refused(StatusCode::PRECONDITION_FAILED, "the file has changed", None),
    };
    set(&mut response, header::ETAG, &tag);
    set(&mut response, header::LAST_MODIFIED, &httpdate::fmt_http_date(version.modified_at()));
    if response.status().is_success() {
        attachment(&mut response, &disposition(names::last(path)), "application/octet-stream");
        set(&mut response, header::ACCEPT_RANGES, "bytes");
    }
    Ok(response)
}

enum Verdict {
    Send,
    NotModified,
    Failed,
}

fn text(headers: &HeaderMap, name: HeaderName) -> Option<&str> {
    headers.get(name).and_then(|value| value.to_str().ok())
}

/// The file's time as HTTP tells it, against one that a header tells; `None` for a header that is no time.
fn is_after(version: &Version, told: &str) -> Option<bool> {
    let told = httpdate::parse_http_date(told).ok()?;
    Some(version.modified_at() > told)
}

/// RFC 9110, 13.2.2.
fn conditions(headers: &HeaderMap, version: &Version, tag: &str) -> Verdict {
    let names_it = |list: &str| list.split(',').map(str::trim).any(|it| it == "*" || it == tag);
    match text(headers, header::IF_MATCH) {
        Some(list) if !names_it(list) => return Verdict::Failed,
        Some(_) => {}
        None => {
            let told = text(headers, header::IF_UNMODIFIED_SINCE);
            if told.and_then(|told| is_after(version, told)) == Some(true) {
                return Verdict::Failed;
            }
        }
    }
    let weakly = |list: &str| list.split(',').any(|it| names_it(it.trim().trim_start_matches("W/")));
    match text(headers, header::IF_NONE_MATCH) {
        Some(list) if weakly(list) => Verdict::NotModified,
        Some(_) => Verdict::Send,
        None => {
            let told = text(headers, header::IF_MODIFIED_SINCE);
            match told.and_then(|told| is_after(version, told)) {
                Some(false) => Verdict::NotModified,
                _ => Verdict::Send,
            }
        }
    }
}

#[derive(Debug, PartialEq)]
enum Ranged {
    Whole,
    Part(Range<u64>),
    /// None of what was asked for is there.
    Nothing,
    /// `If-Range` names another state: the whole file, says the standard.
    Changed,
}

/// One range; several are answered with the whole, as the standard allows.
fn range(headers: &HeaderMap, version: &Version, tag: &str) -> Ranged {
    let Some(wanted) = text(headers, header::RANGE) else { return Ranged::Whole };
    if let Some(condition) = text(headers, header::IF_RANGE) {
        let same = condition == tag || is_exactly(version, condition);
        if !same {
            return Ranged::Changed;
        }
    }
    part_of(wanted, version.bytes)
}

fn is_exactly(version: &Version, told: &str) -> bool {
    httpdate::parse_http_date(told).is_ok_and(|told: SystemTime| told == version.modified_at())
}

fn part_of(wanted: &str, bytes: u64) -> Ranged {
    let Some(("bytes", spec)) = wanted.split_once('=').map(|(unit, spec)| (unit.trim(), spec.trim())) else {
        return Ranged::Whole;
    };
    let Some((first, last)) = spec.split_once('-').filter(|_| !spec.contains(',')) else {
        return Ranged::Whole;
    };
    let number = |text: &str| {
        let digits = !text.is_empty() && text.bytes().all(|byte| byte.is_ascii_digit());
        digits.then(|| text.parse::<u64>().unwrap_or(u64::MAX))
    };
    match (number(first.trim()), number(last.trim())) {
        (Some(first), _) if first >= bytes => Ranged::Nothing,
        (Some(first), Some(last)) if last >= first => Ranged::Part(first..bytes.min(last.saturating_add(1))),
        (Some(first), None) if last.trim().is_empty() => Ranged::Part(first..bytes),
        (None, Some(0)) if first.trim().is_empty() => Ranged::Nothing,
        (None, Some(tail)) if first.trim().is_empty() && bytes > 0 => {
            Ranged::Part(bytes.saturating_sub(tail)..bytes)
        }
        (None, Some(_)) if first.trim().is_empty() => Ranged::Nothing,
        _ => Ranged::Whole,
    }
}

/// A file on its way out.
struct Sending {
    file: Download,
    version: Version,
    left: Range<u64>,
    aborts: bool,
    /// Read before the head was sent.
    first: Option<Bytes>,
}

async fn body(
    status: StatusCode,
    file: Download,
    version: Version,
    part: Range<u64>,
    aborts: bool,
) -> Result<Response, Unsent> {
    let bytes = part.end - part.start;
    let first = file.piece(part.start, bytes).await?;
    if aborts && file.version()? != version {
        return Err(Unsent::Changed);
    }
    let sending = Sending { file, version, left: part, aborts, first: Some(first) };
    let stream = try_unfold(sending, |mut sending| async move {
        let piece = sending.next().await?;
        Ok::<_, std::io::Error>(piece.map(|piece| (piece, sending)))
    });
    let mut response = Response::new(paced(stream, STREAM_IDLE_MAX));
    *response.status_mut() = status;
    set(&mut response, header::CONTENT_LENGTH, &bytes.to_string());
    Ok(response)
}

impl Sending {
    /// The next piece. A guest that cut the file has cut the transfer too: the head promised more.
    async fn next(&mut self) -> std::io::Result<Option<Bytes>> {
        if self.left.is_empty() {
            return Ok(None);
        }
        let piece = match self.first.take() {
            Some(first) => first,
            None => self.file.piece(self.left.start, self.left.end - self.left.start).await?,
        };
        let changed = self.aborts && self.file.version()? != self.version;
        if piece.is_empty() || changed {
            return Err(std::io::Error::other("the file changed while it was sent"));
        }
        self.left.start += piece.len() as u64;
        Ok(Some(piece))
    }
}

// --- uploads -----------------------------------------------------------------------------------------------------

/// A file that was taken in.
#[derive(Debug, Serialize, ToSchema)]
pub(super) struct UploadData {
    file_path: String,
    /// Bytes.
    file_size: u64,
    success: bool,
}

/// What a multipart upload sends.
#[derive(Debug, ToSchema)]
#[expect(dead_code, reason = "what the document shows; the parts are read as they come")]
pub(super) struct UploadForm {
    #[schema(value_type = String, format = Binary)]
    file: Vec<u8>,
    /// Full path of the target; without it `/tmp/<filename>`.
    path: Option<String>,
}

pub(super) async fn upload(
    state: &AppState,
    tenant: &TenantId,
    request: Request,
    generation: Generation,
) -> Response {
    let who = match generation {
        Generation::V1 => Who::default(),
        Generation::V2 => Who::of_query(request.uri().query()),
    };
    let bytes_max = UPLOAD_BYTES_MAX + FORM_BYTES_MAX;
    let mut form = match Form::of(request, bytes_max) {
        Ok(form) => form,
        Err(unread) => return refused(StatusCode::BAD_REQUEST, unread.to_string(), None),
    };
    let mut upload = Upload { state, tenant, who, path: None, incoming: None, name: String::new() };
    let about = |path: &Option<String>| {
        let path = path.clone().unwrap_or_default();
        let mut about = About::new(generation, "upload", "upload file", &path);
        if generation == Generation::V1 {
            about.padding.insert("file_path".to_owned(), path.into());
            about.padding.insert("file_size".to_owned(), 0.into());
            about.padding.insert("success".to_owned(), false.into());
        }
        about
    };
    match upload.read(&mut form).await {
        Ok(()) => {}
        Err(Unread::Form(error)) => {
            let status = match error {
                form::Unread::TooLarge => StatusCode::PAYLOAD_TOO_LARGE,
                form::Unread::TooSlow => StatusCode::REQUEST_TIMEOUT,
                // A body that breaks off is its sender's fault.
                form::Unread::Broken | form::Unread::NotAForm => StatusCode::BAD_REQUEST,
            };
            return refused(status, error.to_string(), None);
        }
        Err(Unread::Path) => {
            return refused(StatusCode::BAD_REQUEST, "the part `path` is not the path of a file", None);
        }
        Err(Unread::Failed(error)) => {
            return failed(error, about(&upload.path));
        }
    }
    let Some(incoming) = upload.incoming else {
        let missing = "missing part `file`";
        return refused(
            StatusCode::UNPROCESSABLE_ENTITY,
            missing,
            Some("send multipart/form-data with a part `file`"),
        );
    };
    let finish = Finish { path: upload.path.clone(), name: Some(upload.name) };
    match incoming.finish(finish).await {
        Ok(Arrival::File { path, bytes }) => {
            Envelope::ok(UploadData { file_path: path, file_size: bytes, success: true }).into_response()
        }
        Ok(Arrival::Tree { .. }) => failed(FileError::Interrupted, about(&upload.path)),
        Err(error) => failed(error, about(&upload.path)),
    }
}

struct Upload<'a> {
    state: &'a AppState,
    tenant: &'a TenantId,
    who: Who,
    path: Option<String>,
    incoming: Option<Incoming>,
    /// Of the file, where no path says another.
    name: String,
}

enum Unread {
    Form(form::Unread),
    /// The text of the part is too long or no text.
    Path,
    Failed(FileError),
}

impl From<form::Unread> for Unread {
    fn from(unread: form::Unread) -> Unread {
        Unread::Form(unread)
    }
}

impl Upload<'_> {
    /// Takes the parts in whatever order they come.
    async fn read(&mut self, form: &mut Form) -> Result<(), Unread> {
        while let Some(part) = form.next().await? {
            match part.name.as_str() {
                "file" if self.incoming.is_none() => {
                    self.name = last_name(part.file_name.as_deref()).to_owned();
                    self.file(form).await?;
                }
                "path" => {
                    let path = form.content(PATH_BYTES_MAX).await?.ok_or(Unread::Path)?;
                    let path = String::from_utf8(path).map_err(|_| Unread::Path)?;
                    self.path = Some(path).filter(|path| !path.is_empty());
                }
                _ => {}
            }
        }
        Ok(())
    }

    async fn file(&mut self, form: &mut Form) -> Result<(), Unread> {
        let operation = enter(self.state, self.tenant, &self.who).await.map_err(Unread::Failed)?;
        let begun = operation.upload(self.path.clone(), UPLOAD_BYTES_MAX).await;
        let mut incoming = begun.map_err(Unread::Failed)?;
        while let Some(piece) = form.chunk().await? {
            incoming.write(&piece).await.map_err(Unread::Failed)?;
        }
        self.incoming = Some(incoming);
        Ok(())
    }
}

/// What an uploaded file is called where no path says another: the last part of its name.
fn last_name(given: Option<&str>) -> &str {
    let last = given.and_then(|name| name.rsplit(['/', '\\']).next()).unwrap_or_default();
    let is_name = !matches!(last, "" | "." | "..") && !last.contains(char::is_control);
    if is_name { last } else { NAMELESS }
}

// --- trees -------------------------------------------------------------------------------------------------------

/// A tree that was taken in.
#[derive(Debug, Serialize, ToSchema)]
pub(super) struct TreeData {
    path: String,
    /// Members of the archive.
    entries: u64,
    mode: TreeMode,
}

pub(super) async fn tree_out(state: &AppState, tenant: &TenantId, query: Option<&str>) -> Response {
    let (path, _) = match PathQuery::parse(query) {
        Ok(parsed) => parsed,
        Err(not_taken) => return NotTaken::answer(not_taken, Generation::V2),
    };
    let about = About::new(Generation::V2, "tree", "read tree", &path);
    let begun = match enter(state, tenant, &Who::of_query(query)).await {
        Ok(operation) => operation.tree_out(path.clone(), TREE_BYTES_MAX).await,
        Err(error) => Err(error),
    };
    let mut outgoing = match begun {
        Ok(outgoing) => outgoing,
        Err(error) => return failed(error, about),
    };
    let first = match outgoing.first().await {
        Ok(first) => first,
        Err(error) => return failed(error, about),
    };
    let stream = try_unfold((first, outgoing), |(first, mut outgoing)| async move {
        let piece = match first {
            Some(piece) => Some(piece),
            None => outgoing.next().await.map_err(broken_off)?,
        };
        Ok::<_, std::io::Error>(piece.map(|piece| (piece, (None, outgoing))))
    });
    let mut response = Response::new(paced(stream, STREAM_IDLE_MAX));
    let name = format!("{}.tar", names::last(&path));
    attachment(&mut response, &disposition(&name), "application/x-tar");
    response
}

/// An error of which the caller sees that the connection ends, and the operator the reason.
fn broken_off(error: FileError) -> std::io::Error {
    tracing::info!(%error, "a tree was sent in part");
    std::io::Error::other(error)
}

pub(super) async fn tree_in(state: &AppState, tenant: &TenantId, request: Request) -> Response {
    let query = request.uri().query().map(str::to_owned);
    let (path, _) = match PathQuery::parse(query.as_deref()) {
        Ok(parsed) => parsed,
        Err(not_taken) => return NotTaken::answer(not_taken, Generation::V2),
    };
    let about = About::new(Generation::V2, "tree", "unpack tree", &path);
    let begun = match enter(state, tenant, &Who::of_query(query.as_deref())).await {
        Ok(operation) => operation.tree_in(path.clone(), TREE_BYTES_MAX).await,
        Err(error) => Err(error),
    };
    let mut incoming = match begun {
        Ok(incoming) => incoming,
        Err(error) => return failed(error, about),
    };
    let mut body = request.into_body();
    loop {
        let frame = match tokio::time::timeout(STREAM_IDLE_MAX, body.frame()).await {
            Ok(None) => break,
            Ok(Some(Ok(frame))) => frame,
            Ok(Some(Err(_))) => {
                return refused(StatusCode::BAD_REQUEST, "Request body could not be read", None);
            }
            Err(_) => {
                return refused(StatusCode::REQUEST_TIMEOUT, "Request body did not arrive in time", None);
            }
        };
        let Ok(piece) = frame.into_data() else { continue };
        if let Err(error) = incoming.write(&piece).await {
            return failed(error, about);
        }
    }
    match incoming.finish(Finish::default()).await {
        Ok(Arrival::Tree { entries, mode }) => Envelope::ok(TreeData { path, entries, mode }).into_response(),
        Ok(Arrival::File { .. }) => failed(FileError::Interrupted, about),
        Err(error) => failed(error, about),
    }
}

#[cfg(test)]
mod tests {
    use axum::http::HeaderValue;

    use super::*;

    #[test]
    fn ranges_are_read_as_the_standard_says() {
        for (wanted, bytes, part) in [
            ("bytes=2-4", 10, Ranged::Part(2..5)),
            ("bytes=2-", 10, Ranged::Part(2..10)),
            ("bytes=-3", 10, Ranged::Part(7..10)),
            ("bytes=-30", 10, Ranged::Part(0..10)),
            ("bytes=0-99999999999999999999999", 10, Ranged::Part(0..10)),
            ("bytes=50-60", 10, Ranged::Nothing),
            ("bytes=-0", 10, Ranged::Nothing),
            ("bytes=0-0", 0, Ranged::Nothing),
            ("bytes=-5", 0, Ranged::Nothing),
            ("bytes=4-2", 10, Ranged::Whole),
            ("bytes=0-1,3-4", 10, Ranged::Whole),
            ("bytes=a-b", 10, Ranged::Whole),
            ("bytes=-", 10, Ranged::Whole),
            ("lines=1-2", 10, Ranged::Whole),
        ] {
            assert_eq!(part_of(wanted, bytes), part, "{wanted} of {bytes}");
        }
    }

    #[test]
    fn a_file_of_any_time_can_be_told_in_a_header() {
        let told = |modified| {
            let version = Version { bytes: 3, inode: 7, modified: (modified, 0), changed: (0, 0) };
            httpdate::fmt_http_date(version.modified_at())
        };
        assert_eq!(told(i64::MIN), "Thu, 01 Jan 1970 00:00:00 GMT");
        assert_eq!(told(1_700_000_000), "Tue, 14 Nov 2023 22:13:20 GMT");
        assert_eq!(told(1 << 40), "Fri, 31 Dec 9999 23:59:59 GMT");
        assert_eq!(told(i64::MAX), "Fri, 31 Dec 9999 23:59:59 GMT");
    }

    #[test]
    fn validators_are_judged_in_their_order() {
        let version =
            Version { bytes: 3, inode: 7, modified: (1_700_000_000, 5), changed: (1_700_000_001, 6) };
        let tag = etag(&version);
        let judged = |name: HeaderName, value: &str| {
            let headers = HeaderMap::from_iter([(name, HeaderValue::from_str(value).unwrap())]);
            match conditions(&headers, &version, &tag) {
                Verdict::Send => 200,
                Verdict::NotModified => 304,
                Verdict::Failed => 412,
            }
        };
        assert_eq!(judged(header::IF_MATCH, &tag), 200);
        assert_eq!(judged(header::IF_MATCH, "*"), 200);
        assert_eq!(judged(header::IF_MATCH, "\"x\""), 412);
        assert_eq!(judged(header::IF_NONE_MATCH, &format!("\"x\", W/{tag}")), 304);
        assert_eq!(judged(header::IF_NONE_MATCH, "\"x\""), 200);
        assert_eq!(judged(header::IF_MODIFIED_SINCE, "Tue, 14 Nov 2023 22:13:20 GMT"), 304);
        assert_eq!(judged(header::IF_MODIFIED_SINCE, "Tue, 14 Nov 2023 22:13:19 GMT"), 200);
        assert_eq!(judged(header::IF_UNMODIFIED_SINCE, "Tue, 14 Nov 2023 22:13:19 GMT"), 412);
        assert_eq!(judged(header::IF_UNMODIFIED_SINCE, "no date"), 200);
    }
}
