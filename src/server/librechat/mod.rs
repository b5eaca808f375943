//! The LibreChat family: code, files and tools called from code, for both generations of its client. Every route exists
//! at the root and under `/v1`, with the same behaviour and the same data.
#![forbid(unsafe_code)]

use axum::extract::{Request, State};
use axum::http::Method;
use axum::middleware::Next;
use axum::response::{IntoResponse, Response};
use utoipa_axum::router::OpenApiRouter;

use crate::engine::Caller;
use crate::server::AppState;
use crate::server::rates::Window;

mod exec;
mod files;
mod list;
pub(super) mod meta;
mod programmatic;
pub(super) mod refuse;
mod stream;
mod upload;
mod wire;

/// First segments of this family's paths, at the root and under `/v1`.
const PLANES: [&str; 6] = ["download", "exec", "files", "libraries", "sessions", "upload"];

/// Whether a refusal under `path` speaks this family's words alone.
pub(super) fn owns(path: &str) -> bool {
    segments(path).next().is_some_and(|plane| PLANES.contains(&plane))
}

/// Segments of a path behind the prefix.
fn segments(path: &str) -> impl Iterator<Item = &str> {
    path.strip_prefix("/v1").filter(|rest| rest.starts_with('/')).unwrap_or(path).split('/').skip(1)
}

/// What a request counts as. Cancelling and deleting count as nothing.
fn window_of(method: &Method, path: &str) -> Option<Window> {
    let mut segments = segments(path);
    match (method, segments.next()?) {
        (&Method::POST, "exec") if path.ends_with("/cancel") => None,
        (&Method::POST, "exec") => Some(Window::Exec),
        (&Method::POST, "upload") => Some(Window::Upload),
        (&Method::GET | &Method::HEAD, "download") => Some(Window::Download),
        (&Method::GET | &Method::HEAD, "files" | "sessions") => Some(Window::Listing),
        _ => None,
    }
}

/// Refuses what comes faster than the operator allows one user. Nothing of a request has been read before.
pub(super) async fn limit_rate(State(state): State<AppState>, request: Request, next: Next) -> Response {
    let window = window_of(request.method(), request.uri().path());
    let asked = window.zip(request.extensions().get::<Caller>());
    if let Some(wait) = asked.and_then(|(window, caller)| state.rates().admit(window, caller).err()) {
        let seconds = wait.as_secs() + u64::from(wait.subsec_nanos() > 0);
        let noun = window.map(Window::noun).unwrap_or_default();
        tracing::info!(noun, seconds, "too many requests");
        return refuse::Refused::rate_limited(noun, seconds.max(1)).into_response();
    }
    next.run(request).await
}

/// Paths without prefix: whoever merges them adds them once as they are and once under `/v1`.
pub(super) fn routes() -> OpenApiRouter<AppState> {
    OpenApiRouter::new()
        .merge(exec::routes())
        .merge(stream::routes())
        .merge(programmatic::routes())
        .merge(upload::routes())
        .merge(files::routes())
        .merge(meta::routes())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn kinds_of_requests_are_told_apart_by_method_and_path() {
        for (method, path, window) in [
            (Method::POST, "/exec", Some(Window::Exec)),
            (Method::POST, "/v1/exec/stream", Some(Window::Exec)),
            (Method::POST, "/exec/programmatic", Some(Window::Exec)),
            (Method::POST, "/exec/programmatic/cancel", None),
            (Method::POST, "/v1/upload/batch", Some(Window::Upload)),
            (Method::GET, "/download/S/F", Some(Window::Download)),
            (Method::HEAD, "/v1/download/S/F", Some(Window::Download)),
            (Method::GET, "/files/S", Some(Window::Listing)),
            (Method::GET, "/sessions/S/objects/F", Some(Window::Listing)),
            (Method::DELETE, "/files/S/F", None),
            (Method::GET, "/libraries", None),
            (Method::POST, "/v2/code/execute", None),
            (Method::GET, "/v2/files", None),
        ] {
            assert_eq!(window_of(&method, path), window, "{method} {path}");
        }
    }

    #[test]
    fn paths_are_owned_at_the_root_and_under_v1_and_whole() {
        for path in
            ["/exec", "/v1/exec", "/exec/stream", "/v1/files/S/F", "/sessions/S/objects/F", "/libraries"]
        {
            assert!(owns(path), "{path}");
        }
        for path in ["/", "", "/v1", "/execute", "/v2/exec", "/v1/v1/exec", "/health", "/v1/bash/sessions"] {
            assert!(!owns(path), "{path}");
        }
    }
}
