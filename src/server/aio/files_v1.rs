//! File routes under `/v1/file`.
#![forbid(unsafe_code)]

use axum::extract::Request;
use axum::http::{HeaderMap, Uri};
use axum::response::Response;
use serde_json::Value;
use utoipa_axum::router::OpenApiRouter;
use utoipa_axum::routes;

use super::Context;
use super::files_answer::{FileRefusals, ReadData, run};
use super::files_io::{self, DownloadAnswers, UploadData, UploadForm};
use super::files_wire::{
    DeleteRequest, EditRequest, GrepRequest, MkdirRequest, PathQuery, TransferRequest, V1FindRequest,
    V1GlobRequest, V1ListRequest, V1ReadRequest, V1ReplaceRequest, V1SearchRequest, V1StatRequest,
    V1WriteRequest,
};
use super::refuse::{Generation, RefusedBody};
use crate::files::wire::{Edited, FileStat, Globbed, Grepped, Listed};
use crate::server::AppState;
use crate::server::answer::Envelope;
use crate::server::body::JsonBytes;

pub(super) fn routes() -> OpenApiRouter<AppState> {
    OpenApiRouter::new()
        .routes(routes!(read))
        .routes(routes!(write))
        .routes(routes!(list))
        .routes(routes!(find))
        .routes(routes!(glob))
        .routes(routes!(grep))
        .routes(routes!(search))
        .routes(routes!(replace))
        .routes(routes!(editor))
        .routes(routes!(stat))
        .routes(routes!(mkdir))
        .routes(routes!(copy))
        .routes(routes!(move_to))
        .routes(routes!(delete))
        .routes(routes!(download))
        .routes(routes!(upload))
}

/// Read a file's text, or some of its lines.
#[utoipa::path(
    post, path = "/v1/file/read", tag = "files", operation_id = "v1_files_read",
    request_body = V1ReadRequest,
    responses(
        (status = 200, body = Envelope<ReadData>, description = "Done; or not, with `success: false`"),
        FileRefusals,
    )
)]
async fn read(Context(state, tenant): Context, JsonBytes(body): JsonBytes) -> Response {
    run(&state, &tenant, V1ReadRequest::parse(&body), Generation::V1).await
}

/// Write a file, as a whole or at its end.
#[utoipa::path(
    post, path = "/v1/file/write", tag = "files", operation_id = "v1_files_write",
    request_body = V1WriteRequest,
    responses(
        (status = 200, body = Envelope<Value>, description = "Done; or not, with `success: false`"),
        FileRefusals,
    )
)]
async fn write(Context(state, tenant): Context, JsonBytes(body): JsonBytes) -> Response {
    run(&state, &tenant, V1WriteRequest::parse(&body), Generation::V1).await
}

/// List a folder.
#[utoipa::path(
    post, path = "/v1/file/list", tag = "files", operation_id = "v1_files_list",
    request_body = V1ListRequest,
    responses(
        (status = 200, body = Envelope<Listed>, description = "Done; or not, with `success: false`"),
        FileRefusals,
    )
)]
async fn list(Context(state, tenant): Context, JsonBytes(body): JsonBytes) -> Response {
    run(&state, &tenant, V1ListRequest::parse(&body), Generation::V1).await
}

/// Find files by name.
#[utoipa::path(
    post, path = "/v1/file/find", tag = "files", operation_id = "v1_files_find",
    request_body = V1FindRequest,
    responses(
        (status = 200, body = Envelope<Value>, description = "Done; or not, with `success: false`"),
        FileRefusals,
    )
)]
async fn find(Context(state, tenant): Context, JsonBytes(body): JsonBytes) -> Response {
    run(&state, &tenant, V1FindRequest::parse(&body), Generation::V1).await
}

/// Find files by their path below a folder.
#[utoipa::path(
    post, path = "/v1/file/glob", tag = "files", operation_id = "v1_files_glob",
    request_body = V1GlobRequest,
    responses(
        (status = 200, body = Envelope<Globbed>, description = "Done; or not, with `success: false`"),
        FileRefusals,
    )
)]
async fn glob(Context(state, tenant): Context, JsonBytes(body): JsonBytes) -> Response {
    run(&state, &tenant, V1GlobRequest::parse(&body), Generation::V1).await
}

/// Search what files hold.
#[utoipa::path(
    post, path = "/v1/file/grep", tag = "files", operation_id = "v1_files_grep",
    request_body = GrepRequest,
    responses(
        (status = 200, body = Envelope<Grepped>, description = "Done; or not, with `success: false`"),
        FileRefusals,
    )
)]
async fn grep(Context(state, tenant): Context, JsonBytes(body): JsonBytes) -> Response {
    run(&state, &tenant, GrepRequest::parse(&body, None), Generation::V1).await
}

/// Search one file line by line.
#[utoipa::path(
    post, path = "/v1/file/search", tag = "files", operation_id = "v1_files_search",
    request_body = V1SearchRequest,
    responses(
        (status = 200, body = Envelope<Value>, description = "Done; or not, with `success: false`"),
        FileRefusals,
    )
)]
async fn search(Context(state, tenant): Context, JsonBytes(body): JsonBytes) -> Response {
    run(&state, &tenant, V1SearchRequest::parse(&body), Generation::V1).await
}

/// Replace a text wherever it stands in a file.
#[utoipa::path(
    post, path = "/v1/file/replace", tag = "files", operation_id = "v1_files_replace",
    request_body = V1ReplaceRequest,
    responses(
        (status = 200, body = Envelope<Value>, description = "Done; or not, with `success: false`"),
        FileRefusals,
    )
)]
async fn replace(Context(state, tenant): Context, JsonBytes(body): JsonBytes) -> Response {
    run(&state, &tenant, V1ReplaceRequest::parse(&body), Generation::V1).await
}

/// A command of the editor. A missing or ambiguous anchor is a 400.
#[utoipa::path(
    post, path = "/v1/file/str_replace_editor", tag = "files", operation_id = "v1_files_str_replace_editor",
    request_body = EditRequest,
    responses(
        (status = 200, body = Envelope<Edited>, description = "Done; or not, with `success: false`"),
        FileRefusals,
    )
)]
async fn editor(Context(state, tenant): Context, JsonBytes(body): JsonBytes) -> Response {
    run(&state, &tenant, EditRequest::parse_v1(&body), Generation::V1).await
}

/// What a path names.
#[utoipa::path(
    post, path = "/v1/file/stat", tag = "files", operation_id = "v1_files_stat",
    request_body = V1StatRequest,
    responses(
        (status = 200, body = Envelope<FileStat>, description = "Done; or not, with `success: false`"),
        FileRefusals,
    )
)]
async fn stat(Context(state, tenant): Context, JsonBytes(body): JsonBytes) -> Response {
    run(&state, &tenant, V1StatRequest::parse(&body), Generation::V1).await
}

/// Make a folder.
#[utoipa::path(
    post, path = "/v1/file/mkdir", tag = "files", operation_id = "v1_files_mkdir",
    request_body = MkdirRequest,
    responses(
        (status = 200, body = Envelope<Value>, description = "Done; or not, with `success: false`"),
        FileRefusals,
    )
)]
async fn mkdir(Context(state, tenant): Context, JsonBytes(body): JsonBytes) -> Response {
    run(&state, &tenant, MkdirRequest::parse(&body, None), Generation::V1).await
}

/// Copy a file or a folder.
#[utoipa::path(
    post, path = "/v1/file/copy", tag = "files", operation_id = "v1_files_copy",
    request_body = TransferRequest,
    responses(
        (status = 200, body = Envelope<Value>, description = "Done; or not, with `success: false`"),
        FileRefusals,
    )
)]
async fn copy(Context(state, tenant): Context, JsonBytes(body): JsonBytes) -> Response {
    run(&state, &tenant, TransferRequest::parse_copy(&body, None), Generation::V1).await
}

/// Move a file or a folder.
#[utoipa::path(
    post, path = "/v1/file/move", tag = "files", operation_id = "v1_files_move",
    request_body = TransferRequest,
    responses(
        (status = 200, body = Envelope<Value>, description = "Done; or not, with `success: false`"),
        FileRefusals,
    )
)]
async fn move_to(Context(state, tenant): Context, JsonBytes(body): JsonBytes) -> Response {
    run(&state, &tenant, TransferRequest::parse_move(&body, None), Generation::V1).await
}

/// Remove a file or a folder.
#[utoipa::path(
    post, path = "/v1/file/delete", tag = "files", operation_id = "v1_files_delete",
    request_body = DeleteRequest,
    responses(
        (status = 200, body = Envelope<Value>, description = "Done; or not, with `success: false`"),
        FileRefusals,
    )
)]
async fn delete(Context(state, tenant): Context, JsonBytes(body): JsonBytes) -> Response {
    run(&state, &tenant, DeleteRequest::parse(&body, None), Generation::V1).await
}

/// A file's bytes. `HEAD` answers the same without them. Takes `Range`, `If-Range` and the other validators.
#[utoipa::path(
    method(get, head),
    path = "/v1/file/download",
    tag = "files",
    operation_id = "v1_files_download",
    params(PathQuery),
    responses(DownloadAnswers)
)]
async fn download(Context(state, tenant): Context, uri: Uri, headers: HeaderMap) -> Response {
    files_io::download(&state, &tenant, uri.query(), &headers, Generation::V1).await
}

/// Take a file in. What was there is overwritten; a failed upload leaves nothing.
#[utoipa::path(
    post, path = "/v1/file/upload", tag = "files", operation_id = "v1_files_upload",
    request_body(content = UploadForm, content_type = "multipart/form-data"),
    responses(
        (status = 200, body = Envelope<UploadData>, description = "Taken in; or not, with `success: false`"),
        (status = 400, body = RefusedBody, description = "Not a form, or not a path"),
        (status = 413, body = RefusedBody, description = "More than 4 GiB"),
        (status = 422, body = RefusedBody, description = "No part `file`"),
        (status = 429, body = RefusedBody, description = "Too many operations at once"),
        (status = 503, body = RefusedBody, description = "Nothing was started"),
    )
)]
async fn upload(Context(state, tenant): Context, request: Request) -> Response {
    files_io::upload(&state, &tenant, request, Generation::V1).await
}
