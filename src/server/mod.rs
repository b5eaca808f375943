//! HTTP: the router, listeners, graceful shutdown. The only place that knows HTTP.
//!
//! From the outside in, a request passes [`front`] (key out of the URL, id, span, shutdown, who is
//! asking), the panic catcher, CORS, [`auth`], and then its route.
#![forbid(unsafe_code)]

use std::convert::Infallible;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use axum::extract::Request;
use axum::http::{HeaderName, HeaderValue};
use axum::middleware::from_fn_with_state;
use axum::response::Response;
use tokio_util::task::TaskTracker;
use tokio_util::task::task_tracker::TaskTrackerToken;
use tower::Layer;
use tower::util::BoxCloneSyncService;
use tower_http::catch_panic::CatchPanicLayer;
use tower_http::cors::{AllowHeaders, AllowMethods, AllowOrigin, CorsLayer};
use utoipa_axum::router::OpenApiRouter;

use crate::commands::Commands;
use crate::config::{ANY_ORIGIN, Config};
use crate::files::Files;
use crate::languages::Languages;
use crate::objects::Objects;
use crate::runs::Runs;

mod aio;
mod answer;
mod auth;
mod body;
pub mod code;
mod crowd;
mod fields;
mod form;
mod front;
mod guard;
mod info;
mod jwt;
mod librechat;
mod listen;
mod mcp;
mod openapi;
mod patience;
mod rates;
mod request_log;
#[cfg(test)]
mod tests;
mod transfer;
mod unread;
mod wired;

pub use code::CodeEngine;
pub use listen::{DRAIN_MAX, serve};
pub use mcp::serve_stdio;
pub use wired::Wired;

/// The whole HTTP side as one service.
pub type App = BoxCloneSyncService<Request, Response, Infallible>;

/// What every handler may use. Cheap to clone.
#[derive(Clone)]
pub struct AppState(Arc<Inner>);

struct Inner {
    config: Arc<Config>,
    code: Arc<dyn CodeEngine>,
    commands: Arc<Commands>,
    keyring: auth::Keyring,
    guard: Option<guard::Guard>,
    rates: rates::Rates,
    /// Absent in tests of the other planes.
    files: Option<Arc<Files>>,
    /// Absent in tests of the other families.
    objects: Option<Objects>,
    runs: Option<Arc<Runs>>,
    /// Those of the runs.
    languages: Languages,
    mcp: mcp::Mcp,
    lifecycle: Lifecycle,
    documents: openapi::Documents,
}

impl AppState {
    pub fn new(config: Arc<Config>, code: Arc<dyn CodeEngine>, commands: Arc<Commands>) -> AppState {
        let keyring = auth::Keyring::new(&config);
        let guard = keyring.is_open().then(|| guard::Guard::new(&config));
        let external = info::external(&code.backends());
        let documents = openapi::Documents::of(routes(&config).into_openapi(), external);
        let inner = Inner {
            rates: rates::Rates::new(config.librechat.rates),
            mcp: mcp::Mcp::new(&config),
            config,
            code,
            commands,
            keyring,
            guard,
            files: None,
            objects: None,
            runs: None,
            languages: Languages::default(),
            lifecycle: Lifecycle::default(),
            documents,
        };
        AppState(Arc::new(inner))
    }

    /// Adds the file planes, before anybody else has this state.
    pub fn with_files(mut self, files: Arc<Files>) -> AppState {
        Arc::get_mut(&mut self.0).expect("the state was just made").files = Some(files);
        self
    }

    /// Adds the stored files of sessions, as early.
    pub fn with_objects(mut self, objects: Objects) -> AppState {
        Arc::get_mut(&mut self.0).expect("the state was just made").objects = Some(objects);
        self
    }

    /// Adds programs and their files, before anybody else has this state.
    pub fn with_runs(mut self, runs: Arc<Runs>) -> AppState {
        let inner = Arc::get_mut(&mut self.0).expect("the state was just made");
        inner.languages = runs.languages().clone();
        inner.runs = Some(runs);
        self
    }

    /// Adds the languages alone, for tests without runs.
    #[cfg(test)]
    fn with_languages(mut self, languages: Languages) -> AppState {
        Arc::get_mut(&mut self.0).expect("the state was just made").languages = languages;
        self
    }

    pub(crate) fn config(&self) -> &Config {
        &self.0.config
    }

    pub(crate) fn code(&self) -> &dyn CodeEngine {
        self.0.code.as_ref()
    }

    pub(crate) fn files(&self) -> Option<&Arc<Files>> {
        self.0.files.as_ref()
    }

    pub(crate) fn objects(&self) -> Option<&Objects> {
        self.0.objects.as_ref()
    }

    pub(crate) fn runs(&self) -> Option<&Arc<Runs>> {
        self.0.runs.as_ref()
    }

    pub(crate) fn languages(&self) -> &Languages {
        &self.0.languages
    }

    pub(crate) fn commands(&self) -> &Commands {
        &self.0.commands
    }

    /// The engine for work that outlives its handler.
    pub(crate) fn code_handle(&self) -> Arc<dyn CodeEngine> {
        Arc::clone(&self.0.code)
    }

    fn keyring(&self) -> &auth::Keyring {
        &self.0.keyring
    }

    /// Present while no key is configured.
    fn guard(&self) -> Option<&guard::Guard> {
        self.0.guard.as_ref()
    }

    pub(crate) fn rates(&self) -> &rates::Rates {
        &self.0.rates
    }

    fn mcp(&self) -> &mcp::Mcp {
        &self.0.mcp
    }

    fn lifecycle(&self) -> &Lifecycle {
        &self.0.lifecycle
    }

    fn documents(&self) -> &openapi::Documents {
        &self.0.documents
    }
}

/// Which requests run, and whether new ones are still taken.
#[derive(Default)]
struct Lifecycle {
    draining: AtomicBool,
    running: TaskTracker,
}

impl Lifecycle {
    /// Counts a request for as long as the token lives.
    fn enter(&self) -> TaskTrackerToken {
        self.running.token()
    }

    fn is_draining(&self) -> bool {
        self.draining.load(Ordering::Acquire)
    }

    fn drain(&self) {
        self.draining.store(true, Ordering::Release);
        self.running.close();
    }

    /// Ends when no request runs.
    async fn idle(&self) {
        self.running.wait().await;
    }
}

/// Every route, of which the document is made too.
fn routes(config: &Config) -> OpenApiRouter<AppState> {
    OpenApiRouter::with_openapi(openapi::base())
        .merge(info::routes())
        .merge(openapi::routes())
        .merge(librechat::routes())
        .nest("/v1", librechat::routes())
        .merge(aio::routes(config.api_surface))
        .merge(mcp::routes())
}

/// The service for [`serve`] and for tests.
pub fn app(state: AppState) -> App {
    let (router, _) = routes(state.config()).split_for_parts();
    let router = router
        .fallback(info::not_found)
        .method_not_allowed_fallback(info::method_not_allowed)
        .layer(from_fn_with_state(state.clone(), librechat::limit_rate))
        .layer(from_fn_with_state(state.clone(), auth::require_key));
    let router = match cors(&state) {
        Some(cors) => router.layer(cors),
        None => router,
    };
    let router = router.layer(CatchPanicLayer::custom(front::panicked)).with_state(state.clone());
    // Around the router and not inside it, so that the key is gone before a route is looked up.
    BoxCloneSyncService::new(from_fn_with_state(state, front::front).layer(router))
}

/// With a key whoever the operator lets may ask, by default anybody, since no browser adds a key by itself; without one
/// only origins listed by name.
fn cors(state: &AppState) -> Option<CorsLayer> {
    let origins = match state.guard() {
        None if state.config().librechat.cors_origins.iter().any(|origin| origin == ANY_ORIGIN) => {
            AllowOrigin::any()
        }
        _ => {
            let listed = guard::listed_origins(state.config());
            let origins: Vec<_> =
                listed.iter().filter_map(|origin| HeaderValue::from_str(origin).ok()).collect();
            if origins.is_empty() {
                return None;
            }
            AllowOrigin::list(origins)
        }
    };
    // `*` would not cover Authorization, so the headers asked for are the ones allowed.
    let cors = CorsLayer::new()
        .allow_origin(origins)
        .allow_methods(AllowMethods::mirror_request())
        .allow_headers(AllowHeaders::mirror_request())
        .expose_headers([front::ID_HEADER, mcp::SESSION_HEADER].map(HeaderName::from_static));
    Some(cors)
}
