//! Uploads: one form, any number of files, its fields before or after them. Bytes go to disk as they come; what is
//! refused, or breaks off, leaves nothing.
#![forbid(unsafe_code)]

use axum::Extension;
use axum::extract::{Request, State};
use axum::http::StatusCode;
use axum::response::Response;
use serde::Serialize;
use utoipa::ToSchema;
use utoipa_axum::router::OpenApiRouter;
use utoipa_axum::routes;

use super::files::{FileObject, TOO_LARGE, objects, refusal};
use super::refuse::{Refused, RefusedBody};
use super::wire::asserted_user;
use crate::engine::Caller;
use crate::objects::{
    Affinity, Bucket, FileRecord, Incoming, InvalidBucket, Kind, NewFile, Objects, ObjectsError, names,
};
use crate::server::AppState;
use crate::server::answer::json;
use crate::server::form::{Form, Unread};

/// Files of one `/upload`.
const FILES_MAX: usize = 1_000;
/// Files of one batch; the rest is left out, and the answer says so.
const BATCH_FILES_MAX: usize = 200;
/// Longest text of a field, in bytes.
const FIELD_BYTES_MAX: usize = 1_024;
/// Longest `entity_id`.
const ENTITY_CHARS_MAX: usize = 40;

pub(super) fn routes() -> OpenApiRouter<AppState> {
    OpenApiRouter::new().routes(routes!(upload)).routes(routes!(batch))
}

// --- wire --------------------------------------------------------------------------------------------------------

/// What an upload sends. File parts may have any name, and there may be several.
#[derive(Debug, ToSchema)]
#[schema(as = LibreChatUploadForm)]
#[expect(dead_code, reason = "what the document shows; the parts are read as they come")]
struct UploadForm {
    #[schema(value_type = Vec<String>, format = Binary)]
    file: Vec<Vec<u8>>,
    /// Into the session of this entity; without it, a new one.
    entity_id: Option<String>,
    /// `user` (default), `agent` or `skill`.
    kind: Option<String>,
    /// Of the agent or skill.
    id: Option<String>,
    /// Of the skill.
    version: Option<u64>,
    /// `true`: runs get copies that they cannot write.
    read_only: Option<bool>,
}

#[derive(Serialize, ToSchema)]
#[schema(as = LibreChatUploaded)]
struct Uploaded<'a> {
    message: &'static str,
    session_id: &'a str,
    storage_session_id: &'a str,
    files: Vec<FileObject<'a>>,
}

#[derive(Serialize, ToSchema)]
#[serde(rename_all = "camelCase")]
#[schema(as = LibreChatBatchFile)]
struct BatchFile<'a> {
    /// `success` or `error`.
    status: &'static str,
    #[serde(skip_serializing_if = "Option::is_none")]
    file_id: Option<&'a str>,
    filename: &'a str,
    #[serde(skip_serializing_if = "Option::is_none")]
    error: Option<&'a str>,
}

#[derive(Serialize, ToSchema)]
#[schema(as = LibreChatBatchUploaded)]
struct BatchUploaded<'a> {
    /// `success`, `partial_success`, or `error` when no file was stored.
    message: &'static str,
    #[serde(skip_serializing_if = "Option::is_none")]
    storage_session_id: Option<&'a str>,
    #[serde(skip_serializing_if = "Option::is_none")]
    session_id: Option<&'a str>,
    succeeded: usize,
    failed: usize,
    files: Vec<BatchFile<'a>>,
    #[serde(rename = "filesLimitReached", skip_serializing_if = "Option::is_none")]
    files_limit_reached: Option<bool>,
    #[serde(rename = "maxFiles", skip_serializing_if = "Option::is_none")]
    max_files: Option<usize>,
    /// With `error`: the first reason.
    #[serde(skip_serializing_if = "Option::is_none")]
    error: Option<&'a str>,
    #[serde(skip_serializing_if = "Option::is_none")]
    detail: Option<&'a str>,
}

// --- routes ------------------------------------------------------------------------------------------------------

/// Takes files in: all of them, or none.
#[utoipa::path(
    post, path = "/upload", tag = "librechat", operation_id = "librechat_upload",
    params(("User-Id" = Option<String>, Header, description = "Tells the users of one key apart, for `entity_id`")),
    request_body(content = UploadForm, content_type = "multipart/form-data"),
    responses(
        (status = 200, body = Uploaded, description = "Stored"),
        (status = 400, body = RefusedBody, description = "Not a form, or a bad kind, id or version"),
        (status = 413, body = RefusedBody, description = "A file over the limit, or too many of them"),
        (status = 422, body = RefusedBody, description = "No file, or a bad entity_id"),
        (status = 507, body = RefusedBody, description = "The disk is full"),
    )
)]
async fn upload(
    State(state): State<AppState>,
    Extension(caller): Extension<Caller>,
    request: Request,
) -> Result<Response, Refused> {
    let objects = objects(&state)?;
    let user = asserted_user(request.headers(), &caller)?;
    let sent = Sent::of(request, objects, false).await?;
    if sent.files.is_empty() {
        return Err(Refused::new(StatusCode::UNPROCESSABLE_ENTITY, "No files uploaded"));
    }
    let target = sent.fields.target()?;
    let mut files = Vec::with_capacity(sent.files.len());
    for file in sent.files {
        let incoming = file.incoming.map_err(|error| refusal(&error))?;
        files.push((incoming, target.new_file(file.name, file.content_type)));
    }
    let records = store(objects, &caller, &user, &target, files).await.map_err(|error| refusal(&error))?;
    let session = session_of(&records);
    let files = records.iter().map(FileObject::uploaded).collect();
    let body = Uploaded { message: "success", session_id: session, storage_session_id: session, files };
    Ok(json(StatusCode::OK, &body))
}

/// Takes files in, each for itself, all into one session.
#[utoipa::path(
    post, path = "/upload/batch", tag = "librechat", operation_id = "librechat_upload_batch",
    params(("User-Id" = Option<String>, Header, description = "Tells the users of one key apart, for `entity_id`")),
    request_body(content = UploadForm, content_type = "multipart/form-data"),
    responses(
        (status = 200, body = BatchUploaded, description = "Stored, at least some"),
        (status = 400, body = BatchUploaded, description = "None was stored, or no form or file came"),
        (status = 413, body = RefusedBody, description = "More than any batch may have"),
        (status = 422, body = RefusedBody, description = "A bad entity_id"),
    )
)]
async fn batch(
    State(state): State<AppState>,
    Extension(caller): Extension<Caller>,
    request: Request,
) -> Result<Response, Refused> {
    let objects = objects(&state)?;
    let user = asserted_user(request.headers(), &caller)?;
    let sent = Sent::of(request, objects, true).await?;
    if sent.files.is_empty() {
        return Err(Refused::new(StatusCode::BAD_REQUEST, "No files provided"));
    }
    let target = match sent.fields.target() {
        Err(refused) if refused.status() != StatusCode::BAD_REQUEST => return Err(refused),
        target => target.map_err(|refused| refused.error().to_owned()),
    };
    let limit = sent.is_cut.then_some(BATCH_FILES_MAX);
    let mut outcomes = Vec::with_capacity(sent.files.len());
    let mut files = Vec::new();
    for file in sent.files {
        let outcome = match (&target, file.incoming) {
            (Ok(target), Ok(incoming)) => {
                files.push((incoming, target.new_file(file.name.clone(), file.content_type)));
                Ok(())
            }
            (Err(why), _) => Err(why.clone()),
            (_, Err(error)) => Err(refusal(&error).error().to_owned()),
        };
        outcomes.push((file.name, outcome));
    }
    let mut records = Vec::new();
    if let (Ok(target), false) = (&target, files.is_empty()) {
        match store(objects, &caller, &user, target, files).await {
            Ok(stored) => records = stored,
            Err(error) => {
                let why = refusal(&error).error().to_owned();
                outcomes.iter_mut().for_each(|(_, outcome)| *outcome = Err(why.clone()));
            }
        }
    }
    Ok(batch_answer(&outcomes, &records, limit))
}

fn batch_answer(
    outcomes: &[(String, Result<(), String>)],
    records: &[FileRecord],
    limit: Option<usize>,
) -> Response {
    let mut stored = records.iter();
    let files: Vec<_> = outcomes
        .iter()
        .map(|(name, outcome)| match outcome {
            Ok(()) => {
                let file_id = stored.next().map(|record| record.id.as_str());
                BatchFile { status: "success", file_id, filename: name, error: None }
            }
            Err(why) => BatchFile { status: "error", file_id: None, filename: name, error: Some(why) },
        })
        .collect();
    let (succeeded, failed) = (records.len(), files.len() - records.len());
    let (status, message) = match (succeeded, failed) {
        (0, _) => (StatusCode::BAD_REQUEST, "error"),
        (_, 0) => (StatusCode::OK, "success"),
        _ => (StatusCode::OK, "partial_success"),
    };
    let session = (succeeded > 0).then(|| session_of(records));
    let error = if succeeded == 0 { files.iter().find_map(|file| file.error) } else { None };
    let body = BatchUploaded {
        message,
        storage_session_id: session,
        session_id: session,
        succeeded,
        failed,
        files,
        files_limit_reached: limit.map(|_| true),
        max_files: limit,
        error,
        detail: error,
    };
    json(status, &body)
}

// --- reading a form ------------------------------------------------------------------------------------------------

fn form(request: Request, objects: &Objects, files_max: usize) -> Result<Form, Refused> {
    // A file that is too large is refused as such, so the whole may hold one more.
    let files_max = u64::try_from(files_max).unwrap_or(u64::MAX).saturating_add(1);
    let bytes_max = objects.limits().file_bytes_max.saturating_add(64 * 1024).saturating_mul(files_max);
    Form::of(request, bytes_max).map_err(|unread| Unsent::Form(unread).refused())
}

/// What a form held.
struct Sent {
    fields: Fields,
    files: Vec<SentFile>,
    /// There were more files.
    is_cut: bool,
}

struct SentFile {
    name: String,
    content_type: Option<String>,
    incoming: Result<Incoming, ObjectsError>,
}

/// Why nothing of a form is kept.
enum Unsent {
    Form(Unread),
    File(ObjectsError),
    TooManyFiles,
    LongField,
}

impl From<Unread> for Unsent {
    fn from(unread: Unread) -> Unsent {
        Unsent::Form(unread)
    }
}

impl Unsent {
    fn refused(&self) -> Refused {
        match self {
            Unsent::Form(Unread::TooLarge) => Refused::new(StatusCode::PAYLOAD_TOO_LARGE, TOO_LARGE),
            Unsent::Form(unread @ Unread::TooSlow) => {
                Refused::new(StatusCode::REQUEST_TIMEOUT, unread.to_string())
            }
            Unsent::Form(unread) => Refused::new(StatusCode::BAD_REQUEST, unread.to_string()),
            Unsent::File(error) => refusal(error),
            Unsent::TooManyFiles => Refused::new(
                StatusCode::PAYLOAD_TOO_LARGE,
                format!("More than {FILES_MAX} files in one upload"),
            ),
            Unsent::LongField => {
                Refused::new(StatusCode::BAD_REQUEST, format!("A field of more than {FIELD_BYTES_MAX} bytes"))
            }
        }
    }
}

impl Sent {
    /// Reads a form to its end, or to what makes it no upload.
    async fn of(request: Request, objects: &Objects, in_batch: bool) -> Result<Sent, Refused> {
        let mut form = form(request, objects, if in_batch { BATCH_FILES_MAX } else { FILES_MAX })?;
        Sent::read(objects, &mut form, in_batch).await.map_err(|unsent| unsent.refused())
    }

    /// Reads the parts in whatever order they come. In a batch a file may fail for itself, and those beyond the limit
    /// are passed over.
    async fn read(objects: &Objects, form: &mut Form, in_batch: bool) -> Result<Sent, Unsent> {
        let mut sent = Sent { fields: Fields::default(), files: Vec::new(), is_cut: false };
        while let Some(part) = form.next().await? {
            let Some(raw) = part.file_name else {
                sent.fields.take(&part.name, form).await?;
                continue;
            };
            match in_batch {
                true if sent.files.len() >= BATCH_FILES_MAX => {
                    sent.is_cut = true;
                    continue;
                }
                false if sent.files.len() >= FILES_MAX => return Err(Unsent::TooManyFiles),
                _ => {}
            }
            let incoming = match file(objects, form).await? {
                Err(error) if !in_batch => return Err(Unsent::File(error)),
                incoming => incoming,
            };
            let name = names::of_upload(&raw);
            sent.files.push(SentFile { name, content_type: part.content_type, incoming });
        }
        Ok(sent)
    }
}

/// The bytes of a file. What it is short of after a failure is still in the form.
async fn file(objects: &Objects, form: &mut Form) -> Result<Result<Incoming, ObjectsError>, Unread> {
    let mut incoming = match objects.incoming().await {
        Ok(incoming) => incoming,
        Err(error) => return Ok(Err(error)),
    };
    while let Some(piece) = form.chunk().await? {
        if let Err(error) = incoming.write(&piece).await {
            return Ok(Err(error));
        }
    }
    Ok(incoming.close().await.map(|()| incoming))
}

/// The text fields, as they were written. An empty one counts as absent.
#[derive(Default)]
struct Fields {
    entity_id: Option<String>,
    kind: Option<String>,
    id: Option<String>,
    version: Option<String>,
    read_only: Option<String>,
}

/// Where files go, and as what.
struct Target {
    entity: Option<String>,
    bucket: Bucket,
    read_only: bool,
}

impl Fields {
    async fn take(&mut self, name: &str, form: &mut Form) -> Result<(), Unsent> {
        let field = match name {
            "entity_id" => &mut self.entity_id,
            "kind" => &mut self.kind,
            "id" => &mut self.id,
            "version" => &mut self.version,
            "read_only" => &mut self.read_only,
            // Clients send more than anybody asked for.
            _ => return Ok(()),
        };
        let text = form.content(FIELD_BYTES_MAX).await?.ok_or(Unsent::LongField)?;
        *field = Some(String::from_utf8_lossy(&text).into_owned()).filter(|text| !text.is_empty());
        Ok(())
    }

    fn target(self) -> Result<Target, Refused> {
        if self.entity_id.as_deref().is_some_and(|entity| !is_entity(entity)) {
            let text =
                format!("entity_id must be <= {ENTITY_CHARS_MAX} characters and match ^[A-Za-z0-9_-]+$");
            return Err(Refused::new(StatusCode::UNPROCESSABLE_ENTITY, text));
        }
        let bucket =
            self.bucket().map_err(|error| Refused::new(StatusCode::BAD_REQUEST, error.to_string()))?;
        let read_only = self.read_only.is_some_and(|text| text.trim().eq_ignore_ascii_case("true"));
        Ok(Target { entity: self.entity_id, bucket, read_only })
    }

    fn bucket(&self) -> Result<Bucket, InvalidBucket> {
        let version = match &self.version {
            None => None,
            Some(text) if text.bytes().all(|byte| byte.is_ascii_digit()) => {
                Some(text.parse().map_err(|_| InvalidBucket::Version)?)
            }
            Some(_) => return Err(InvalidBucket::Version),
        };
        Bucket::parse(self.kind.as_deref().unwrap_or("user"), self.id.as_deref(), version)
    }
}

fn is_entity(text: &str) -> bool {
    let fits = |byte: u8| byte.is_ascii_alphanumeric() || b"_-".contains(&byte);
    (1..=ENTITY_CHARS_MAX).contains(&text.len()) && text.bytes().all(fits)
}

impl Target {
    fn new_file(&self, name: String, content_type: Option<String>) -> NewFile {
        let (read_only, bucket) = (self.read_only, self.bucket.clone());
        NewFile { name, content_type, read_only, bucket, is_output: false }
    }
}

/// Puts files on record, in the entity's session or in one of their own.
async fn store(
    objects: &Objects,
    caller: &Caller,
    user: &str,
    target: &Target,
    files: Vec<(Incoming, NewFile)>,
) -> Result<Vec<FileRecord>, ObjectsError> {
    let session = match &target.entity {
        Some(entity) => objects.affinity(caller, user, Affinity::Entity(entity)).await?.0,
        None => objects.new_session(caller, Kind::Storage).await?,
    };
    objects.add_all(caller, &session, files).await
}

fn session_of(records: &[FileRecord]) -> &str {
    records.first().map_or("", |record| record.session.as_str())
}
