//! Logs: where they go, how they look, what a request's lines carry.
//!
//! A line never holds a query string, a header or a body: keys travel there. Paths are logged after
//! the server has cut a key out of the URL. An operator who asks for more (`LOG_REQUESTS`) gets what
//! `server::request_log` says.
#![forbid(unsafe_code)]

use tracing::Span;
use tracing_subscriber::EnvFilter;
use tracing_subscriber::fmt;
use tracing_subscriber::util::SubscriberInitExt;

use crate::config::LogFormat;

/// Longest path a log line quotes, in bytes.
const PATH_BYTES_MAX: usize = 256;

/// A library whose lines are its own business, unless the operator names it.
const CHATTY: &str = "rmcp";

/// Starts logging to standard error. Once per process; a second call is an error.
pub fn init(level: &str, format: LogFormat) -> anyhow::Result<()> {
    let mut filter = EnvFilter::try_new(level)?;
    // It tells of every message, with what is in it.
    if !level.contains(CHATTY) {
        filter = filter.add_directive(format!("{CHATTY}=error").parse()?);
    }
    let lines = fmt().with_env_filter(filter).with_writer(std::io::stderr).with_target(true);
    match format {
        LogFormat::Text => lines.with_ansi(false).finish().try_init()?,
        LogFormat::Json => lines.json().flatten_event(true).finish().try_init()?,
    }
    Ok(())
}

/// Whether `level` is a filter that [`init`] would take.
pub fn check_filter(level: &str) -> Result<(), String> {
    EnvFilter::try_new(level).map(drop).map_err(|error| format!("`{level}` is not a log filter: {error}"))
}

/// The span of one request. `path` comes without its query.
pub fn request_span(request_id: &str, method: &str, path: &str) -> Span {
    let end = (0..=PATH_BYTES_MAX.min(path.len())).rev().find(|end| path.is_char_boundary(*end));
    let path = &path[..end.unwrap_or(0)];
    tracing::info_span!("request", request_id, method, path, tenant = tracing::field::Empty)
}

/// Names the tenant in the current request's lines.
pub fn record_tenant(tenant: &str) {
    Span::current().record("tenant", tenant);
}
