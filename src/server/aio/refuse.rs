//! Status codes and bodies of what the AIO routes do not take.
#![forbid(unsafe_code)]

use axum::http::{HeaderValue, StatusCode, header};
use axum::response::Response;
use serde::Serialize;
use utoipa::{IntoResponses, ToSchema};

use crate::engine::Refusal;
use crate::server::answer::json;
use crate::server::fields::FieldError;

/// Which of the two generations a route belongs to; they word refusals differently.
#[derive(Copy, Clone, Debug, PartialEq, Eq)]
pub(crate) enum Generation {
    V1,
    V2,
}

const SCHEMA_MESSAGE: &str = "Request data validation failed";
/// When a caller may try again after a 429 or 503 that passes by itself.
const RETRY_AFTER_SECS: HeaderValue = HeaderValue::from_static("1");

/// A request that does not say what to run.
#[derive(Debug, PartialEq, Eq)]
pub(crate) struct Invalid {
    /// Missing and mistyped fields.
    pub(crate) schema_errors: Vec<FieldError>,
    /// Fields whose value we cannot use; each message is a sentence for people.
    pub(crate) reasons: Vec<FieldError>,
}

impl Invalid {
    pub(crate) fn schema(schema_errors: Vec<FieldError>) -> Invalid {
        Invalid { schema_errors, reasons: Vec::new() }
    }

    pub(crate) fn reason(error: FieldError) -> Invalid {
        Invalid { schema_errors: Vec::new(), reasons: vec![error] }
    }

    /// v1 always lists the fields. v2 says a lone reason as its `message` and lists the rest.
    pub(crate) fn answer(mut self, generation: Generation) -> Response {
        let only_reasons = self.schema_errors.is_empty();
        let lone = only_reasons && self.reasons.len() == 1;
        let first = self.reasons.first().map(|error| error.message.clone()).unwrap_or_default();
        self.schema_errors.append(&mut self.reasons);
        let message = match (generation, only_reasons) {
            (Generation::V2, true) => first,
            _ => SCHEMA_MESSAGE.to_owned(),
        };
        let errors = Some(self.schema_errors).filter(|_| !(generation == Generation::V2 && lone));
        json(StatusCode::UNPROCESSABLE_ENTITY, &InvalidBody { success: false, message, data: None, errors })
    }
}

/// Body of a 422.
#[derive(Debug, Serialize, ToSchema)]
pub(crate) struct InvalidBody {
    success: bool,
    message: String,
    #[schema(value_type = Option<Object>)]
    data: Option<()>,
    /// One entry per rejected field; v2 leaves it out when `message` says it all.
    #[serde(skip_serializing_if = "Option::is_none")]
    errors: Option<Vec<FieldError>>,
}

/// Body of every other refusal.
#[derive(Debug, Serialize, ToSchema)]
pub(crate) struct RefusedBody {
    success: bool,
    message: String,
    #[schema(value_type = Option<Object>)]
    data: Option<()>,
    hint: Option<String>,
}

/// Beside the outcome of a cell.
#[derive(IntoResponses)]
#[expect(dead_code, reason = "the document's list of what a route may answer")]
pub(crate) enum NotRun {
    #[response(status = 422, description = "The request does not say what to run")]
    Invalid(InvalidBody),
    #[response(status = 429, description = "One session or call too many")]
    TooMany(RefusedBody),
    #[response(status = 503, description = "No interpreter; nothing was started")]
    NoInterpreter(RefusedBody),
}

/// Beside a session that was opened.
#[derive(IntoResponses)]
#[expect(dead_code, reason = "the document's list of what a route may answer")]
pub(crate) enum NotOpened {
    #[response(status = 422)]
    Invalid(InvalidBody),
    #[response(status = 429)]
    TooMany(RefusedBody),
    #[response(status = 503)]
    NothingStarted(RefusedBody),
}

/// Where a body names what the route is about.
#[derive(IntoResponses)]
#[expect(dead_code, reason = "the document's list of what a route may answer")]
pub(crate) enum NotFound {
    #[response(status = 404)]
    Unknown(RefusedBody),
    #[response(status = 422)]
    Invalid(InvalidBody),
}

/// A refusal of the engine, as this family answers it. Nothing was started.
pub(crate) fn refusal(refusal: Refusal, generation: Generation) -> Response {
    let message = refusal.to_string();
    match refusal {
        Refusal::UnknownKernel { .. } => unusable("kernel_name", "enum", message, generation),
        Refusal::NotADirectory { .. } => unusable("cwd", "value_error.not_a_directory", message, generation),
        Refusal::InvalidSessionId(_) => unusable("session_id", "value_error", message, generation),
        Refusal::TooManyWaiting { .. } | Refusal::ShuttingDown => {
            retry_later(refused(status(&refusal), message, Some(hint(&refusal))))
        }
        _ => refused(status(&refusal), message, Some(hint(&refusal))),
    }
}

/// The status of a refusal. A 429 or 503 means that nothing was started: clients try those again by themselves.
pub(crate) fn status(refusal: &Refusal) -> StatusCode {
    match refusal {
        Refusal::TooManySessions { .. }
        | Refusal::TooManyKernelSessions { .. }
        | Refusal::TooManyWaiting { .. } => StatusCode::TOO_MANY_REQUESTS,
        Refusal::UnknownKernel { .. } | Refusal::NotADirectory { .. } | Refusal::InvalidSessionId(_) => {
            StatusCode::UNPROCESSABLE_ENTITY
        }
        Refusal::NoInterpreter { .. }
        | Refusal::NoKernel { .. }
        | Refusal::ShuttingDown
        | Refusal::LaunchFailed => StatusCode::SERVICE_UNAVAILABLE,
    }
}

fn hint(refusal: &Refusal) -> &'static str {
    match refusal {
        Refusal::TooManySessions { .. } | Refusal::TooManyKernelSessions { .. } => {
            "end a session, or wait until one idles out"
        }
        Refusal::TooManyWaiting { .. } => "send fewer calls at once",
        Refusal::NoInterpreter { .. } => {
            "the operator can install it; `caisson doctor` says where it is looked for"
        }
        Refusal::NoKernel { .. } => {
            "the operator can install ipykernel, or choose AIO_CODE_BACKEND=native where there is a Python"
        }
        _ => "nothing was started",
    }
}

fn unusable(field: &'static str, kind: &'static str, message: String, generation: Generation) -> Response {
    Invalid::reason(FieldError::in_body(field, kind, message)).answer(generation)
}

/// An envelope that says no.
pub(crate) fn refused(status: StatusCode, message: impl Into<String>, hint: Option<&str>) -> Response {
    let body =
        RefusedBody { success: false, message: message.into(), data: None, hint: hint.map(str::to_owned) };
    json(status, &body)
}

pub(super) fn retry_later(mut response: Response) -> Response {
    response.headers_mut().insert(header::RETRY_AFTER, RETRY_AFTER_SECS);
    response
}
