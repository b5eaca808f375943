//! The error envelope of this family: every body that is no answer has `error` and `detail`, so that readers of either
//! client generation find their words.
#![forbid(unsafe_code)]

use axum::http::{HeaderValue, StatusCode, header};
use axum::response::{IntoResponse, Response};
use serde::Serialize;
use utoipa::ToSchema;

use crate::server::answer::json;

/// What a client that reads `error` sees of a request whose fields do not fit.
const FIELDS_ERROR: &str = "Request validation failed";
/// Codes after which the current client tells its model not to try again, whatever the status.
pub(in crate::server) const UNSUPPORTED: &str = "unsupported_capability";

/// A request of this family that we do not take. A failure of the user's program is never one.
#[derive(Clone, Debug, PartialEq)]
pub(in crate::server) struct Refused {
    status: StatusCode,
    error: String,
    detail: Detail,
    message: Option<String>,
    retry_after_seconds: Option<u64>,
}

/// One rejected field, as a 422 lists it.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, ToSchema)]
pub(in crate::server) struct FieldFault {
    /// Such as `["body", "code"]`.
    pub(in crate::server) loc: Vec<String>,
    pub(in crate::server) msg: String,
    #[serde(rename = "type")]
    pub(in crate::server) kind: &'static str,
}

impl FieldFault {
    pub(in crate::server) fn in_body(field: &str, kind: &'static str, msg: impl Into<String>) -> FieldFault {
        FieldFault { loc: vec!["body".to_owned(), field.to_owned()], msg: msg.into(), kind }
    }

    pub(in crate::server) fn in_query(field: &str, kind: &'static str, msg: impl Into<String>) -> FieldFault {
        FieldFault { loc: vec!["query".to_owned(), field.to_owned()], msg: msg.into(), kind }
    }
}

/// A sentence, or the list of a 422.
#[derive(Clone, Debug, PartialEq, Serialize, ToSchema)]
#[serde(untagged)]
#[schema(as = LibreChatErrorDetail)]
pub(in crate::server) enum Detail {
    Text(String),
    Fields(Vec<FieldFault>),
}

/// Body of every refusal.
#[derive(Debug, Serialize, ToSchema)]
#[schema(as = LibreChatError)]
pub(in crate::server) struct RefusedBody {
    /// A sentence, or a code that clients know.
    error: String,
    detail: Detail,
    #[serde(skip_serializing_if = "Option::is_none")]
    message: Option<String>,
    /// With a 429: when to try again.
    #[serde(skip_serializing_if = "Option::is_none")]
    retry_after_seconds: Option<u64>,
}

impl Refused {
    pub(in crate::server) fn new(status: StatusCode, text: impl Into<String>) -> Refused {
        let error = text.into();
        let detail = Detail::Text(error.clone());
        Refused { status, error, detail, message: None, retry_after_seconds: None }
    }

    /// 422 with every field that does not fit.
    pub(in crate::server) fn fields(faults: Vec<FieldFault>) -> Refused {
        Refused {
            detail: Detail::Fields(faults),
            ..Refused::new(StatusCode::UNPROCESSABLE_ENTITY, FIELDS_ERROR)
        }
    }

    /// 429: the caller's share of `what` ("execution", "upload" …) is used up for so many seconds.
    pub(in crate::server) fn rate_limited(what: &str, seconds: u64) -> Refused {
        let unit = if seconds == 1 { "second" } else { "seconds" };
        let text = format!("Too many {what} requests. Please retry in {seconds} {unit}.");
        Refused {
            retry_after_seconds: Some(seconds),
            ..Refused::new(StatusCode::TOO_MANY_REQUESTS, text.clone()).message(text).code("rate_limited")
        }
    }

    pub(in crate::server) fn status(&self) -> StatusCode {
        self.status
    }

    /// The sentence or code.
    pub(in crate::server) fn error(&self) -> &str {
        &self.error
    }

    /// More words, for people.
    pub(in crate::server) fn message(self, message: impl Into<String>) -> Refused {
        Refused { message: Some(message.into()), ..self }
    }

    /// A code of the client's in `error`; the sentence stays in `detail`.
    pub(in crate::server) fn code(self, code: &str) -> Refused {
        Refused { error: code.to_owned(), ..self }
    }
}

impl IntoResponse for Refused {
    fn into_response(self) -> Response {
        let body = RefusedBody {
            error: self.error,
            detail: self.detail,
            message: self.message,
            retry_after_seconds: self.retry_after_seconds,
        };
        let mut response = json(self.status, &body);
        if let Some(seconds) = self.retry_after_seconds {
            response.headers_mut().insert(header::RETRY_AFTER, HeaderValue::from(seconds));
        }
        response
    }
}

#[cfg(test)]
mod tests {
    use http_body_util::BodyExt;
    use serde_json::{Value, json};

    use super::*;

    async fn body(refused: Refused) -> (u16, Value, Option<String>) {
        let response = refused.into_response();
        let status = response.status().as_u16();
        let retry = response.headers().get("retry-after").map(|value| value.to_str().unwrap().to_owned());
        let bytes = response.into_body().collect().await.unwrap().to_bytes();
        (status, serde_json::from_slice(&bytes).unwrap(), retry)
    }

    #[tokio::test]
    async fn a_sentence_stands_under_both_names() {
        let (status, body, _) = body(Refused::new(StatusCode::NOT_FOUND, "File not found")).await;
        assert_eq!((status, body), (404, json!({ "error": "File not found", "detail": "File not found" })));
    }

    #[tokio::test]
    async fn a_code_takes_the_error_and_leaves_the_sentence() {
        let refused = Refused::new(StatusCode::SERVICE_UNAVAILABLE, "Runtime 'go' is unavailable");
        let (_, body, _) = body(refused.code(UNSUPPORTED)).await;
        let wanted = json!({ "error": "unsupported_capability", "detail": "Runtime 'go' is unavailable" });
        assert_eq!(body, wanted);
    }

    #[tokio::test]
    async fn rejected_fields_are_a_list_beside_a_sentence() {
        let fault = FieldFault::in_body("code", "missing", "Field required");
        let (status, body, _) = body(Refused::fields(vec![fault])).await;
        assert_eq!(status, 422);
        assert_eq!(body["error"], "Request validation failed");
        let wanted = json!([{ "loc": ["body", "code"], "msg": "Field required", "type": "missing" }]);
        assert_eq!(body["detail"], wanted);
    }

    #[tokio::test]
    async fn too_many_requests_is_the_body_the_client_parses() {
        let (status, body, retry) = body(Refused::rate_limited("execution", 7)).await;
        let text = "Too many execution requests. Please retry in 7 seconds.";
        let wanted =
            json!({ "error": "rate_limited", "detail": text, "message": text, "retry_after_seconds": 7 });
        assert_eq!((status, body, retry.as_deref()), (429, wanted, Some("7")));
    }
}
