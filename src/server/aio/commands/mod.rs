//! The command planes: `/v2/commands`, `/v1/bash`, `/v1/shell`, and the package lists. One set of commands and
//! sessions behind both generations.
#![forbid(unsafe_code)]

use std::time::Duration;

use axum::http::{HeaderMap, StatusCode, header};
use axum::response::{IntoResponse, Response};
use serde::Serialize;
use utoipa_axum::router::OpenApiRouter;

use super::refuse::{self, Generation, Invalid};
use crate::commands::{Command, Outlook, Refused, Running};
use crate::engine::TenantId;
use crate::server::AppState;
use crate::server::answer::{Envelope, json_sized};
use crate::server::fields::FieldError;

mod bash;
mod packages;
mod shell;
mod stream;
mod v2;
mod wire;

use wire::{CommandOutputData, CommandRunData, OutputAsk, RunAsk};

/// Most bytes of one stream in an answer to a read; the next read goes on where it ends.
const READ_BYTES_MAX: usize = 1024 * 1024;

pub(super) fn v1_routes() -> OpenApiRouter<AppState> {
    OpenApiRouter::new().merge(bash::routes()).merge(shell::routes()).merge(packages::v1_routes())
}

pub(super) fn v2_routes() -> OpenApiRouter<AppState> {
    OpenApiRouter::new().merge(v2::routes()).merge(packages::v2_routes())
}

/// Starts a command and answers as it asks: at its end, after its time to wait, at once, or as a stream.
async fn run(
    state: &AppState,
    tenant: &TenantId,
    ask: RunAsk,
    headers: &HeaderMap,
    generation: Generation,
) -> Result<Response, Refused> {
    let RunAsk { mut run, waits, chars_max } = ask;
    let streams = accepts(headers, stream::MEDIA_TYPE);
    // Nobody learns a name under which it could be written to before it has ended.
    run.stdin_ends = waits == Waits::ForTheEnd && run.session.is_none() && !streams;
    let mut running = state.commands().run(tenant, run).await?;
    if streams {
        return Ok(stream::answer(running, waits));
    }
    wait(&running.command, waits).await;
    running.let_go();
    let read = running.command.read(0, 0, usize::MAX);
    let hint = hint(&running, &read.outlook);
    let data = CommandRunData::new(&running.command, &read, chars_max, generation);
    Ok(ok_sized(data, hint, read.stdout.bytes.len() + read.stderr.bytes.len()))
}

/// How long a call waits for its command.
#[derive(Copy, Clone, Debug, PartialEq, Eq)]
enum Waits {
    ForTheEnd,
    AtMost(Duration),
    No,
}

async fn wait(command: &Command, waits: Waits) {
    match waits {
        Waits::No => {}
        Waits::ForTheEnd => drop(command.ended().await),
        // Late is what was asked for.
        Waits::AtMost(time) => drop(tokio::time::timeout(time, command.ended()).await),
    }
}

/// Output of a command from the offsets asked for.
async fn output(command: &Command, ask: &OutputAsk, generation: Generation) -> Response {
    if let Some(time) = ask.waits {
        // Without news there is nothing to say, and that is the answer.
        drop(tokio::time::timeout(time, command.news(ask.offset, ask.stderr_offset)).await);
    }
    let read = command.read(ask.offset, ask.stderr_offset, READ_BYTES_MAX);
    let bytes = read.stdout.bytes.len() + read.stderr.bytes.len();
    let hint = read.outlook.reason.clone();
    ok_sized(CommandOutputData::new(command, &read, generation), hint, bytes)
}

/// What happened to the session before this command, else why this one was ended.
fn hint(running: &Running, outlook: &Outlook) -> Option<String> {
    running.hint.clone().or_else(|| outlook.reason.clone())
}

fn ok_sized<T: Serialize>(data: T, hint: Option<String>, bytes: usize) -> Response {
    let envelope = Envelope { success: true, message: "ok".to_owned(), data: Some(data), hint };
    json_sized(StatusCode::OK, &envelope, 1024 + bytes + bytes / 8)
}

/// An answer without data.
fn done() -> Response {
    let envelope: Envelope<()> = Envelope { success: true, message: "ok".to_owned(), data: None, hint: None };
    envelope.into_response()
}

fn accepts(headers: &HeaderMap, media_type: &str) -> bool {
    let accepted = headers.get_all(header::ACCEPT).iter().filter_map(|value| value.to_str().ok());
    accepted.flat_map(|value| value.split(',')).any(|one| one.trim().starts_with(media_type))
}

/// Why a route of a generation does not do what it is asked for; `?` makes one.
enum No<const GENERATION: u8> {
    Invalid(Invalid),
    Refused(Refused),
}

impl<const GENERATION: u8> From<Invalid> for No<GENERATION> {
    fn from(invalid: Invalid) -> Self {
        No::Invalid(invalid)
    }
}

impl<const GENERATION: u8> From<Refused> for No<GENERATION> {
    fn from(refused: Refused) -> Self {
        No::Refused(refused)
    }
}

impl<const GENERATION: u8> IntoResponse for No<GENERATION> {
    fn into_response(self) -> Response {
        let generation = if GENERATION == 1 { Generation::V1 } else { Generation::V2 };
        match self {
            No::Invalid(invalid) => invalid.answer(generation),
            No::Refused(refused) => refusal(refused, generation),
        }
    }
}

/// Status codes of what the commands do not take. Those of 429 and 503 mean that nothing was started.
fn refusal(refused: Refused, generation: Generation) -> Response {
    let message = refused.to_string();
    let plain = |status, hint| refuse::refused(status, message.clone(), hint);
    match refused {
        Refused::NoSuchSession(_) | Refused::NoSuchCommand(_) | Refused::NoCommandYet(_) => {
            plain(StatusCode::NOT_FOUND, None)
        }
        Refused::NotRunning(_)
        | Refused::Busy(_)
        | Refused::NotADirectory(_)
        | Refused::UnknownSignal(_)
        | Refused::NoSuchUser(_)
        | Refused::NotRoot { .. }
        | Refused::Root(_)
        | Refused::FixedUser { .. } => plain(StatusCode::BAD_REQUEST, None),
        Refused::InvalidSessionId(_) => {
            Invalid::reason(FieldError::in_body("session_id", "value_error", message)).answer(generation)
        }
        Refused::TooManySessions { .. } => {
            plain(StatusCode::TOO_MANY_REQUESTS, Some("all of them run a command; end one"))
        }
        Refused::TooManyCommands { .. } => plain(StatusCode::TOO_MANY_REQUESTS, Some("end some first")),
        Refused::InputFull { .. } | Refused::Overrun => {
            refuse::retry_later(plain(StatusCode::TOO_MANY_REQUESTS, Some("nothing was sent")))
        }
        Refused::DefaultUser(_) | Refused::NoShell(_) | Refused::NoInterpreter(_) | Refused::LaunchFailed => {
            plain(StatusCode::SERVICE_UNAVAILABLE, Some("nothing was started"))
        }
        Refused::ShuttingDown => {
            refuse::retry_later(plain(StatusCode::SERVICE_UNAVAILABLE, Some("nothing was started")))
        }
    }
}
