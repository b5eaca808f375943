//! File routes under `/v2/fs`.
#![forbid(unsafe_code)]

use axum::extract::Request;
use axum::http::{HeaderMap, Uri};
use axum::response::Response;
use serde_json::Value;
use utoipa_axum::router::OpenApiRouter;
use utoipa_axum::routes;

use super::Context;
use super::files_answer::{FileFailure, FileFailures, FileRefusals, ReadData, run};
use super::files_io::{self, DownloadAnswers, TreeData, UploadData, UploadForm};
use super::files_wire::{
    DeleteRequest, EditRequest, GrepRequest, ListQuery, MkdirRequest, PathQuery, ReadQuery, SearchQuery,
    StatQuery, TransferRequest, UserQuery, WriteRequest,
};
use super::refuse::{Generation, RefusedBody};
use crate::files::wire::{Edited, FileStat, Grepped, Listed};
use crate::server::AppState;
use crate::server::answer::Envelope;
use crate::server::body::JsonBytes;

pub(super) fn routes() -> OpenApiRouter<AppState> {
    OpenApiRouter::new()
        .routes(routes!(read))
        .routes(routes!(write))
        .routes(routes!(list))
        .routes(routes!(stat))
        .routes(routes!(search))
        .routes(routes!(grep))
        .routes(routes!(edit))
        .routes(routes!(mkdir))
        .routes(routes!(copy))
        .routes(routes!(move_to))
        .routes(routes!(delete))
        .routes(routes!(download))
        .routes(routes!(tree_out, tree_in))
        .routes(routes!(upload))
}

/// Read a file's text, or some of its lines.
#[utoipa::path(
    get, path = "/v2/fs/read", tag = "files", operation_id = "v2_files_read",
    params(ReadQuery, UserQuery),
    responses((status = 200, body = Envelope<ReadData>, description = "Done"), FileFailures)
)]
async fn read(Context(state, tenant): Context, uri: Uri) -> Response {
    run(&state, &tenant, ReadQuery::parse(uri.query()), Generation::V2).await
}

/// Write a file, as a whole or at its end.
#[utoipa::path(
    post, path = "/v2/fs/write", tag = "files", operation_id = "v2_files_write",
    params(UserQuery),
    request_body = WriteRequest,
    responses((status = 200, body = Envelope<Value>, description = "Done"), FileFailures)
)]
async fn write(Context(state, tenant): Context, uri: Uri, JsonBytes(body): JsonBytes) -> Response {
    run(&state, &tenant, WriteRequest::parse(&body, uri.query()), Generation::V2).await
}

/// List a folder.
#[utoipa::path(
    get, path = "/v2/fs/list", tag = "files", operation_id = "v2_files_list",
    params(ListQuery, UserQuery),
    responses((status = 200, body = Envelope<Listed>, description = "Done"), FileFailures)
)]
async fn list(Context(state, tenant): Context, uri: Uri) -> Response {
    run(&state, &tenant, ListQuery::parse(uri.query()), Generation::V2).await
}

/// What a path names.
#[utoipa::path(
    get, path = "/v2/fs/stat", tag = "files", operation_id = "v2_files_stat",
    params(StatQuery, UserQuery),
    responses((status = 200, body = Envelope<FileStat>, description = "Done"), FileFailures)
)]
async fn stat(Context(state, tenant): Context, uri: Uri) -> Response {
    run(&state, &tenant, StatQuery::parse(uri.query()), Generation::V2).await
}

/// Find files by name.
#[utoipa::path(
    get, path = "/v2/fs/search", tag = "files", operation_id = "v2_files_search",
    params(SearchQuery, UserQuery),
    responses((status = 200, body = Envelope<Value>, description = "Done"), FileFailures)
)]
async fn search(Context(state, tenant): Context, uri: Uri) -> Response {
    run(&state, &tenant, SearchQuery::parse(uri.query()), Generation::V2).await
}

/// Search what files hold.
#[utoipa::path(
    post, path = "/v2/fs/grep", tag = "files", operation_id = "v2_files_grep",
    params(UserQuery),
    request_body = GrepRequest,
    responses((status = 200, body = Envelope<Grepped>, description = "Done"), FileFailures)
)]
async fn grep(Context(state, tenant): Context, uri: Uri, JsonBytes(body): JsonBytes) -> Response {
    run(&state, &tenant, GrepRequest::parse(&body, uri.query()), Generation::V2).await
}

/// Replace a passage, insert lines, or undo that.
#[utoipa::path(
    post, path = "/v2/fs/edit", tag = "files", operation_id = "v2_files_edit",
    params(UserQuery),
    request_body = EditRequest,
    responses((status = 200, body = Envelope<Edited>, description = "Done"), FileFailures)
)]
async fn edit(Context(state, tenant): Context, uri: Uri, JsonBytes(body): JsonBytes) -> Response {
    run(&state, &tenant, EditRequest::parse_v2(&body, uri.query()), Generation::V2).await
}

/// Make a folder.
#[utoipa::path(
    post, path = "/v2/fs/mkdir", tag = "files", operation_id = "v2_files_mkdir",
    params(UserQuery),
    request_body = MkdirRequest,
    responses((status = 200, body = Envelope<Value>, description = "Done"), FileFailures)
)]
async fn mkdir(Context(state, tenant): Context, uri: Uri, JsonBytes(body): JsonBytes) -> Response {
    run(&state, &tenant, MkdirRequest::parse(&body, uri.query()), Generation::V2).await
}

/// Copy a file or a folder.
#[utoipa::path(
    post, path = "/v2/fs/copy", tag = "files", operation_id = "v2_files_copy",
    params(UserQuery),
    request_body = TransferRequest,
    responses((status = 200, body = Envelope<Value>, description = "Done"), FileFailures)
)]
async fn copy(Context(state, tenant): Context, uri: Uri, JsonBytes(body): JsonBytes) -> Response {
    run(&state, &tenant, TransferRequest::parse_copy(&body, uri.query()), Generation::V2).await
}

/// Move a file or a folder.
#[utoipa::path(
    post, path = "/v2/fs/move", tag = "files", operation_id = "v2_files_move",
    params(UserQuery),
    request_body = TransferRequest,
    responses((status = 200, body = Envelope<Value>, description = "Done"), FileFailures)
)]
async fn move_to(Context(state, tenant): Context, uri: Uri, JsonBytes(body): JsonBytes) -> Response {
    run(&state, &tenant, TransferRequest::parse_move(&body, uri.query()), Generation::V2).await
}

/// Remove a file or a folder.
#[utoipa::path(
    post, path = "/v2/fs/delete", tag = "files", operation_id = "v2_files_delete",
    params(UserQuery),
    request_body = DeleteRequest,
    responses((status = 200, body = Envelope<Value>, description = "Done"), FileFailures)
)]
async fn delete(Context(state, tenant): Context, uri: Uri, JsonBytes(body): JsonBytes) -> Response {
    run(&state, &tenant, DeleteRequest::parse(&body, uri.query()), Generation::V2).await
}

/// A file's bytes. `HEAD` answers the same without them. Takes `Range`, `If-Range` and the other validators.
#[utoipa::path(
    method(get, head),
    path = "/v2/fs/download",
    tag = "files",
    operation_id = "v2_files_download",
    params(PathQuery),
    responses(DownloadAnswers)
)]
async fn download(Context(state, tenant): Context, uri: Uri, headers: HeaderMap) -> Response {
    files_io::download(&state, &tenant, uri.query(), &headers, Generation::V2).await
}

/// Take a file in. What was there is overwritten; a failed upload leaves nothing.
#[utoipa::path(
    post, path = "/v2/fs/upload", tag = "files", operation_id = "v2_files_upload",
    params(UserQuery),
    request_body(content = UploadForm, content_type = "multipart/form-data"),
    responses(
        (status = 200, body = Envelope<UploadData>, description = "Taken in"),
        (status = 403, body = Envelope<FileFailure>, description = "Not allowed, or outside the space"),
        (status = 507, body = Envelope<FileFailure>, description = "The space is full"),
        (status = 400, body = RefusedBody, description = "Not a form, or not a path"),
        (status = 413, body = RefusedBody, description = "More than 4 GiB"),
        (status = 422, body = RefusedBody, description = "No part `file`"),
        (status = 429, body = RefusedBody, description = "Too many operations at once"),
        (status = 503, body = RefusedBody, description = "Nothing was started"),
    )
)]
async fn upload(Context(state, tenant): Context, request: Request) -> Response {
    files_io::upload(&state, &tenant, request, Generation::V2).await
}

/// A folder as a tar archive, read while it is sent.
#[utoipa::path(
    get, path = "/v2/fs/tree", tag = "files", operation_id = "v2_files_tree_out",
    params(("path" = String, Query, description = "A folder, or one file")),
    responses(
        (status = 200, body = Vec<u8>, content_type = "application/x-tar", description = "The archive"),
        (status = 400, body = Envelope<FileFailure>, description = "The request cannot be carried out as it is"),
        (status = 403, body = Envelope<FileFailure>, description = "Not allowed, or outside the space"),
        (status = 404, body = Envelope<FileFailure>, description = "Nothing of this name"),
        FileRefusals,
    )
)]
async fn tree_out(Context(state, tenant): Context, uri: Uri) -> Response {
    files_io::tree_out(&state, &tenant, uri.query()).await
}

/// Unpack a tar archive as a folder, or into one that is there. Nothing in it may lead out of that folder.
#[utoipa::path(
    put, path = "/v2/fs/tree", tag = "files", operation_id = "v2_files_tree_in",
    params(
        ("path" = String, Query, description = "The folder"),
        UserQuery
    ),
    request_body(content = Vec<u8>, content_type = "application/x-tar"),
    responses(
        (status = 200, body = Envelope<TreeData>, description = "Unpacked"),
        (status = 400, body = Envelope<FileFailure>, description = "The request cannot be carried out as it is"),
        (status = 403, body = Envelope<FileFailure>, description = "Not allowed, or outside the space"),
        (status = 404, body = Envelope<FileFailure>, description = "Nothing of this name"),
        FileRefusals,
        (status = 507, body = Envelope<FileFailure>, description = "The space is full"),
    )
)]
async fn tree_in(Context(state, tenant): Context, request: Request) -> Response {
    files_io::tree_in(&state, &tenant, request).await
}
