//! The files of a session as resources.
#![forbid(unsafe_code)]

use rmcp::RoleServer;
use rmcp::model::{
    ErrorData, ListResourceTemplatesResult, ListResourcesResult, PaginatedRequestParams, ReadResourceResult,
    ResourceTemplate,
};
use rmcp::service::RequestContext;
use serde_json::json;

use super::content;
use super::files::{READ_BYTES_MAX, contents, find};
use super::handler::Handler;
use super::place::Missing;
use crate::server::answer::in_short;
use crate::server::rates::Window;

/// Resources of one page.
const PAGE: usize = 500;

impl Handler {
    /// Those of the session that the request has without naming one; none where it has none.
    pub(super) async fn resources(
        &self,
        page: Option<PaginatedRequestParams>,
        context: &RequestContext<RoleServer>,
    ) -> Result<ListResourcesResult, ErrorData> {
        let rate = self.admit(Window::Listing, context);
        rate.map_err(|fault| ErrorData::internal_error(fault.0, None))?;
        let cursor = page.and_then(|page| page.cursor);
        let first = match cursor.as_deref().map(str::parse::<usize>) {
            None => 0,
            Some(Ok(first)) => first,
            Some(Err(_)) => return Err(ErrorData::invalid_params("the cursor is none of ours", None)),
        };
        let Ok(place) = self.place(context, None, Missing::Refuse).await else {
            return Ok(ListResourcesResult::with_all_items(Vec::new()));
        };
        let records = content::newest(&place).await;
        let listed = records.iter().skip(first).take(PAGE).map(|record| content::link(&place, record));
        let mut result = ListResourcesResult::with_all_items(listed.collect());
        result.next_cursor = (records.len() > first.saturating_add(PAGE)).then(|| (first + PAGE).to_string());
        Ok(result)
    }

    pub(super) async fn resource(
        &self,
        uri: &str,
        context: &RequestContext<RoleServer>,
    ) -> Result<ReadResourceResult, ErrorData> {
        let rate = self.admit(Window::Download, context);
        rate.map_err(|fault| ErrorData::internal_error(fault.0, None))?;
        // Malformed, unknown and somebody else's look the same.
        let not_found =
            || ErrorData::resource_not_found("resource not found", Some(json!({"uri": in_short(uri)})));
        let (session, path) = content::read_uri(uri).ok_or_else(not_found)?;
        let place = self.place(context, session.as_deref(), Missing::Refuse).await;
        let place = place.map_err(|_| not_found())?;
        let record = find(&place, &path).await.map_err(|_| not_found())?;
        if record.size > READ_BYTES_MAX {
            let message = format!(
                "{} bytes are more than a resource is read of ({READ_BYTES_MAX}): read_file reads parts",
                record.size
            );
            return Err(ErrorData::invalid_params(message, None));
        }
        let bytes = content::read(place.runs.objects(), &record, 0, READ_BYTES_MAX).await;
        let bytes = bytes.map_err(|fault| ErrorData::internal_error(fault.0, None))?;
        Ok(ReadResourceResult::new(vec![contents(&place, &record, bytes)]))
    }
}

pub(super) fn templates() -> ListResourceTemplatesResult {
    let own = ResourceTemplate::new("caisson://files/{+path}", "file")
        .with_title("A file of this session")
        .with_description("A file of /mnt/data, by its path there.");
    let named = ResourceTemplate::new("caisson://sessions/{session}/files/{+path}", "file-of-session")
        .with_title("A file of a named session")
        .with_description("The same for a session that calls name by `session`.");
    ListResourceTemplatesResult::with_all_items(vec![own, named])
}
