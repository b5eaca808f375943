//! Stored files: listed, looked at, downloaded, deleted. What is unknown, gone and somebody else's looks the same.
#![forbid(unsafe_code)]

use std::time::Duration;

use axum::Extension;
use axum::extract::rejection::PathRejection;
use axum::extract::{FromRequestParts, Path, State};
use axum::http::request::Parts;
use axum::http::{StatusCode, Uri, header};
use axum::response::Response;
use percent_encoding::percent_decode_str;
use serde::Serialize;
use utoipa::{IntoParams, IntoResponses, ToSchema};
use utoipa_axum::router::OpenApiRouter;
use utoipa_axum::routes;

use super::refuse::{FieldFault, Refused, RefusedBody};
use crate::engine::Caller;
use crate::objects::{Bucket, FileRecord, Objects, ObjectsError, is_id, names};
use crate::server::AppState;
use crate::server::answer::json;
use crate::server::transfer::{attachment, extended_disposition, set, whole};

/// What a client hears of a file over the limit.
pub(super) const TOO_LARGE: &str = "File size limit exceeded";
const NOT_FOUND: &str = "File not found";
/// How long a download may stand still.
const DOWNLOAD_IDLE_MAX: Duration = Duration::from_secs(60);

pub(super) fn routes() -> OpenApiRouter<AppState> {
    OpenApiRouter::new()
        .routes(routes!(list))
        .routes(routes!(delete_file))
        .routes(routes!(stat, delete_object))
        .routes(routes!(download))
}

/// When one may try again who keeps as many workspaces as there may be.
const KEPT_RETRY_SECS: u64 = 600;

/// The stored files, where this daemon has them.
pub(super) fn objects(state: &AppState) -> Result<&Objects, Refused> {
    let missing = || Refused::new(StatusCode::SERVICE_UNAVAILABLE, "Service is starting up");
    state.objects().ok_or_else(missing)
}

/// A failure of the stored files, as this family says it.
pub(super) fn refusal(error: &ObjectsError) -> Refused {
    match error {
        ObjectsError::TooLarge { bytes_max } => Refused::new(StatusCode::PAYLOAD_TOO_LARGE, TOO_LARGE)
            .message(format!("A file may have at most {bytes_max} bytes")),
        ObjectsError::SessionFull { files_max } => {
            let text = format!("A session may have at most {files_max} files");
            Refused::new(StatusCode::PAYLOAD_TOO_LARGE, text)
        }
        ObjectsError::TooManyKept { max } => Refused::rate_limited("upload", KEPT_RETRY_SECS).message(
            format!("A key may keep at most {max} workspaces; they go a while after their last use"),
        ),
        ObjectsError::NoSession => not_found(),
        ObjectsError::StorageFull => Refused::new(StatusCode::INSUFFICIENT_STORAGE, "Storage is full"),
        _ => {
            tracing::error!(error = error as &dyn std::error::Error, "stored files failed");
            Refused::new(StatusCode::INTERNAL_SERVER_ERROR, "Internal error")
        }
    }
}

fn not_found() -> Refused {
    Refused::new(StatusCode::NOT_FOUND, NOT_FOUND)
}

// --- wire --------------------------------------------------------------------------------------------------------

/// A stored file as answers show it.
#[derive(Serialize, ToSchema)]
#[serde(rename_all = "camelCase")]
#[schema(as = LibreChatFile)]
pub(super) struct FileObject<'a> {
    file_id: &'a str,
    id: &'a str,
    filename: &'a str,
    /// The file's name; in listings, `<session>/<file id><extension>`.
    name: String,
    #[serde(rename = "session_id")]
    session_id: &'a str,
    #[serde(rename = "storage_session_id")]
    storage_session_id: &'a str,
    path: String,
    size: u64,
    content_type: &'a str,
    /// ISO 8601, UTC.
    last_modified: String,
    etag: &'a str,
    metadata: Metadata<'a>,
    /// Always null, and only with `detail=full`.
    #[serde(skip_serializing_if = "Option::is_none")]
    #[schema(value_type = Option<String>)]
    version_id: Option<()>,
}

#[derive(Serialize, ToSchema)]
#[serde(rename_all = "kebab-case")]
#[schema(as = LibreChatFileMetadata)]
struct Metadata<'a> {
    content_type: &'a str,
    original_filename: &'a str,
}

/// A file of a listing with `detail=simple`.
#[derive(Serialize, ToSchema)]
#[schema(as = LibreChatFileSimple)]
struct Simple<'a> {
    id: &'a str,
    name: &'a str,
    session_id: &'a str,
    path: String,
}

/// A file of a listing with `detail=normalized`.
#[derive(Serialize, ToSchema)]
#[serde(rename_all = "camelCase")]
#[schema(as = LibreChatFileNormalized)]
struct Normalized<'a> {
    id: &'a str,
    name: &'a str,
    #[serde(rename = "storage_session_id")]
    storage_session_id: &'a str,
    size: u64,
    content_type: &'a str,
    last_modified: String,
    #[serde(rename = "read_only", skip_serializing_if = "Option::is_none")]
    read_only: Option<bool>,
}

/// What a freshness check reads.
#[derive(Serialize, ToSchema)]
#[serde(rename_all = "camelCase")]
#[schema(as = LibreChatObject)]
struct Object<'a> {
    name: String,
    original_filename: &'a str,
    size: u64,
    last_modified: String,
    etag: &'a str,
    content_type: &'a str,
    read_only: bool,
}

#[derive(Serialize, ToSchema)]
#[schema(as = LibreChatDeleted)]
struct Deleted<'a> {
    status: &'static str,
    message: &'static str,
    session_id: &'a str,
    file_id: &'a str,
    #[serde(rename = "fileId")]
    file_id_again: &'a str,
}

impl<'a> FileObject<'a> {
    /// As an upload answers it.
    pub(super) fn uploaded(file: &'a FileRecord) -> FileObject<'a> {
        FileObject {
            file_id: &file.id,
            id: &file.id,
            filename: &file.name,
            name: file.name.clone(),
            session_id: &file.session,
            storage_session_id: &file.session,
            path: path(file),
            size: file.size,
            content_type: &file.content_type,
            last_modified: timestamp(file.modified_ms),
            etag: &file.etag,
            metadata: Metadata { content_type: &file.content_type, original_filename: &file.name },
            version_id: None,
        }
    }

    /// As a listing does: older clients find a file by what its name begins with.
    fn listed(file: &'a FileRecord) -> FileObject<'a> {
        FileObject { name: object_name(file), ..FileObject::uploaded(file) }
    }
}

impl<'a> Simple<'a> {
    fn of(file: &'a FileRecord) -> Simple<'a> {
        Simple { id: &file.id, name: &file.name, session_id: &file.session, path: path(file) }
    }
}

impl<'a> Normalized<'a> {
    fn of(file: &'a FileRecord) -> Normalized<'a> {
        Normalized {
            id: &file.id,
            name: &file.name,
            storage_session_id: &file.session,
            size: file.size,
            content_type: &file.content_type,
            last_modified: timestamp(file.modified_ms),
            read_only: file.read_only.then_some(true),
        }
    }
}

/// Relative to the base of the API.
fn path(file: &FileRecord) -> String {
    format!("/download/{}/{}", file.session, file.id)
}

/// `<session>/<file id><extension>`; what stands before the first dot behind the slash is the id.
fn object_name(file: &FileRecord) -> String {
    format!("{}/{}{}", file.session, file.id, names::suffix(&file.name))
}

/// Such as `2026-09-01T10:00:00.123Z`.
fn timestamp(epoch_ms: u64) -> String {
    let epoch_ms = i64::try_from(epoch_ms).unwrap_or(i64::MAX);
    jiff::Timestamp::from_millisecond(epoch_ms).map_or_else(|_| String::new(), |at| format!("{at:.3}"))
}

// --- what a request names ------------------------------------------------------------------------------------------

/// The ids in a path, each of them one.
struct Ids<T>(T);

fn bad_request() -> Refused {
    Refused::new(StatusCode::BAD_REQUEST, "Bad request")
}

impl<S: Send + Sync> FromRequestParts<S> for Ids<String> {
    type Rejection = Refused;

    async fn from_request_parts(parts: &mut Parts, state: &S) -> Result<Self, Refused> {
        let session: Result<Path<String>, PathRejection> = Path::from_request_parts(parts, state).await;
        let Path(session) = session.map_err(|_| bad_request())?;
        if is_id(&session) { Ok(Ids(session)) } else { Err(bad_request()) }
    }
}

impl<S: Send + Sync> FromRequestParts<S> for Ids<(String, String)> {
    type Rejection = Refused;

    async fn from_request_parts(parts: &mut Parts, state: &S) -> Result<Self, Refused> {
        let ids: Result<Path<(String, String)>, PathRejection> = Path::from_request_parts(parts, state).await;
        let Path((session, file)) = ids.map_err(|_| bad_request())?;
        if is_id(&session) && is_id(&file) { Ok(Ids((session, file))) } else { Err(bad_request()) }
    }
}

/// What a query says of the files it is about. Older clients say nothing, or things that no longer matter.
#[derive(Debug, Default, PartialEq, Eq)]
struct Asked {
    detail: Option<String>,
    kind: Option<String>,
    id: Option<String>,
    version: Option<String>,
}

impl Asked {
    /// An empty value counts as absent.
    fn of(uri: &Uri) -> Asked {
        let mut asked = Asked::default();
        for pair in uri.query().unwrap_or_default().split('&') {
            let (name, value) = pair.split_once('=').unwrap_or((pair, ""));
            let field = match name {
                "detail" => &mut asked.detail,
                "kind" => &mut asked.kind,
                "id" => &mut asked.id,
                "version" => &mut asked.version,
                _ => continue,
            };
            let value = value.replace('+', " ");
            let value = percent_decode_str(&value).decode_utf8_lossy().into_owned();
            *field = Some(value).filter(|value| !value.is_empty());
        }
        asked
    }

    /// Whether what is named is the file's. A user's id is not looked at: it is the caller's own word.
    fn fits(&self, bucket: &Bucket) -> bool {
        let kind_fits = self.kind.as_deref().is_none_or(|kind| kind == bucket.kind());
        let id_fits = match (self.id.as_deref(), bucket.id()) {
            (Some(asked), Some(id)) => asked == id,
            _ => true,
        };
        let version_fits = match (self.version.as_deref(), bucket.version()) {
            (Some(asked), Some(version)) => asked.parse() == Ok(version),
            (Some(_), None) => false,
            (None, _) => true,
        };
        kind_fits && id_fits && version_fits
    }
}

fn unauthorized() -> Refused {
    Refused::new(StatusCode::FORBIDDEN, "Unauthorized")
}

/// The file that a request names, if the caller may have it and says rightly what it is.
async fn find(
    objects: &Objects,
    caller: &Caller,
    session: &str,
    file: &str,
    uri: &Uri,
) -> Result<FileRecord, Refused> {
    let record = objects.file(caller, session, file).await.ok_or_else(not_found)?;
    if Asked::of(uri).fits(&record.bucket) { Ok(record) } else { Err(unauthorized()) }
}

/// What every route that is about a file may name, and must name rightly.
#[derive(IntoParams)]
#[into_params(parameter_in = Query)]
#[expect(dead_code, reason = "what the document shows; `Asked` reads it")]
struct AskedOf {
    /// Must be the file's: `user`, `agent` or `skill`.
    kind: Option<String>,
    /// Must be that of its agent or skill.
    id: Option<String>,
    /// Must be its skill's.
    version: Option<u64>,
}

/// The file of a path.
#[derive(IntoParams)]
#[into_params(parameter_in = Path)]
#[expect(dead_code, reason = "what the document shows; `Ids` reads it")]
struct OfFile {
    session_id: String,
    file_id: String,
}

/// What all of them refuse.
#[derive(IntoResponses)]
#[expect(dead_code, reason = "the document's list of what a route may answer")]
enum FileRefusals {
    #[response(status = 400, description = "Not an id")]
    NotAnId(RefusedBody),
    #[response(status = 403, description = "Files of another kind, id or version")]
    OfAnother(RefusedBody),
    #[response(status = 404, description = "No such session or file, or gone")]
    Gone(RefusedBody),
}

// --- routes ------------------------------------------------------------------------------------------------------

/// The files of a session, in the order they came.
#[utoipa::path(
    get, path = "/files/{session_id}", tag = "librechat", operation_id = "librechat_list_files",
    params(
        ("session_id" = String, Path),
        ("detail" = Option<String>, Query, description = "simple (default), summary, full or normalized"),
        AskedOf,
        ("entity_id" = Option<String>, Query, description = "Not looked at"),
    ),
    responses(
        (status = 200, body = Vec<Simple>, description = "With other values of `detail`, other elements"),
        FileRefusals,
        (status = 422, body = RefusedBody, description = "No such `detail`"),
    )
)]
async fn list(
    State(state): State<AppState>,
    Extension(caller): Extension<Caller>,
    Ids(session): Ids<String>,
    uri: Uri,
) -> Result<Response, Refused> {
    let asked = Asked::of(&uri);
    let detail = Detail::parse(asked.detail.as_deref())?;
    let mut files = objects(&state)?.files_for(&caller, &session).await.ok_or_else(not_found)?;
    let before = files.len();
    files.retain(|file| asked.fits(&file.bucket));
    if files.is_empty() && before > 0 {
        return Err(unauthorized());
    }
    Ok(detail.answer(&files))
}

#[derive(Copy, Clone, Debug)]
enum Detail {
    Simple,
    Summary,
    Full,
    Normalized,
}

impl Detail {
    fn parse(word: Option<&str>) -> Result<Detail, Refused> {
        match word {
            None | Some("simple") => Ok(Detail::Simple),
            Some("summary") => Ok(Detail::Summary),
            Some("full") => Ok(Detail::Full),
            Some("normalized") => Ok(Detail::Normalized),
            Some(_) => {
                let text = "Input should be 'simple', 'summary', 'full' or 'normalized'";
                Err(Refused::fields(vec![FieldFault::in_query("detail", "enum", text)]))
            }
        }
    }

    fn answer(self, files: &[FileRecord]) -> Response {
        let files = files.iter();
        match self {
            Detail::Simple => json(StatusCode::OK, &files.map(Simple::of).collect::<Vec<_>>()),
            Detail::Summary => json(StatusCode::OK, &files.map(FileObject::listed).collect::<Vec<_>>()),
            Detail::Full => {
                let full = |file| FileObject { version_id: Some(()), ..FileObject::listed(file) };
                json(StatusCode::OK, &files.map(full).collect::<Vec<_>>())
            }
            Detail::Normalized => json(StatusCode::OK, &files.map(Normalized::of).collect::<Vec<_>>()),
        }
    }
}

/// What a client asks to see whether it must upload again.
#[utoipa::path(
    get, path = "/sessions/{session_id}/objects/{file_id}", tag = "librechat", operation_id = "librechat_stat_file",
    params(OfFile, AskedOf),
    responses((status = 200, body = Object), FileRefusals)
)]
async fn stat(
    State(state): State<AppState>,
    Extension(caller): Extension<Caller>,
    Ids((session, file)): Ids<(String, String)>,
    uri: Uri,
) -> Result<Response, Refused> {
    let file = find(objects(&state)?, &caller, &session, &file, &uri).await?;
    let body = Object {
        name: object_name(&file),
        original_filename: &file.name,
        size: file.size,
        last_modified: timestamp(file.modified_ms),
        etag: &file.etag,
        content_type: &file.content_type,
        read_only: file.read_only,
    };
    Ok(json(StatusCode::OK, &body))
}

/// A file's bytes, as they were when it was stored.
#[utoipa::path(
    get, path = "/download/{session_id}/{file_id}", tag = "librechat", operation_id = "librechat_download",
    params(OfFile, AskedOf),
    responses(
        (status = 200, body = Vec<u8>, content_type = "application/octet-stream", description = "With the file's own type"),
        FileRefusals,
    )
)]
async fn download(
    State(state): State<AppState>,
    Extension(caller): Extension<Caller>,
    Ids((session, file)): Ids<(String, String)>,
    uri: Uri,
) -> Result<Response, Refused> {
    let objects = objects(&state)?;
    let file = find(objects, &caller, &session, &file, &uri).await?;
    let bytes = objects.read(&file).map_err(|error| match error.kind() {
        // Deleted since it was found.
        std::io::ErrorKind::NotFound => not_found(),
        _ => {
            tracing::error!(%error, "a stored file could not be read");
            Refused::new(StatusCode::INTERNAL_SERVER_ERROR, "Internal error")
        }
    })?;
    let mut response = Response::new(whole(bytes, file.size, DOWNLOAD_IDLE_MAX));
    let name = file.name.rsplit('/').next().unwrap_or_default();
    attachment(&mut response, &extended_disposition(name), &file.content_type);
    set(&mut response, header::CONTENT_LENGTH, &file.size.to_string());
    set(&mut response, header::ETAG, &format!("\"{}\"", file.etag));
    Ok(response)
}

/// Deletes a file.
#[utoipa::path(
    delete, path = "/files/{session_id}/{file_id}", tag = "librechat", operation_id = "librechat_delete_file",
    params(OfFile, AskedOf),
    responses((status = 200, body = Deleted), FileRefusals)
)]
async fn delete_file(
    State(state): State<AppState>,
    Extension(caller): Extension<Caller>,
    Ids((session, file)): Ids<(String, String)>,
    uri: Uri,
) -> Result<Response, Refused> {
    delete(objects(&state)?, &caller, &session, &file, &uri).await
}

/// The same under the name that newer clients try first.
#[utoipa::path(
    delete, path = "/sessions/{session_id}/objects/{file_id}", tag = "librechat",
    operation_id = "librechat_delete_object",
    params(OfFile, AskedOf),
    responses((status = 200, body = Deleted), FileRefusals)
)]
async fn delete_object(
    State(state): State<AppState>,
    Extension(caller): Extension<Caller>,
    Ids((session, file)): Ids<(String, String)>,
    uri: Uri,
) -> Result<Response, Refused> {
    delete(objects(&state)?, &caller, &session, &file, &uri).await
}

async fn delete(
    objects: &Objects,
    caller: &Caller,
    session: &str,
    file: &str,
    uri: &Uri,
) -> Result<Response, Refused> {
    find(objects, caller, session, file, uri).await?;
    if !objects.remove(session, file).await {
        return Err(not_found());
    }
    let message = "File deleted successfully";
    let body =
        Deleted { status: "deleted", message, session_id: session, file_id: file, file_id_again: file };
    Ok(json(StatusCode::OK, &body))
}
