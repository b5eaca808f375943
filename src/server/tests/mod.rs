//! The routes, driven in memory with an engine of a few lines.

mod access;
mod credentials;
mod crowded;
mod documents;
mod execute;
mod fake;
mod files;
mod life;
mod mcp;
mod objects;
mod sessions;
mod streams;

use std::sync::Arc;
use std::time::Duration;

use axum::body::Body;
use axum::extract::Request;
use axum::http::{HeaderMap, Method, StatusCode};
use http_body_util::BodyExt;
use serde_json::Value;
use tower::ServiceExt;

use super::{App, AppState, app};
use crate::backend::native::fake::{FakeLauncher, hello};
use crate::commands::{Commands, CommandsConfig};
use crate::config::{Config, Flags, Surroundings};
use crate::languages::tests::languages;
use crate::store::Store;
use fake::Fake;

/// An answer, read whole.
struct Reply {
    status: StatusCode,
    headers: HeaderMap,
    text: String,
}

impl Reply {
    fn json(&self) -> Value {
        serde_json::from_str(&self.text).unwrap_or_else(|error| panic!("{error}: {}", self.text))
    }

    fn header(&self, name: &str) -> Option<&str> {
        self.headers.get(name).map(|value| value.to_str().unwrap())
    }
}

fn config(variables: &[(&str, &str)]) -> Config {
    let env = |name: &str| {
        let found = variables.iter().find(|(known, _)| *known == name).map(|(_, value)| (*value).to_owned());
        found.or_else(|| (name == "HOME").then(|| "/home/me".to_owned()))
    };
    let around = Surroundings { root: false, python_env: "/opt/caisson/python".into() };
    Config::load(&Flags::default(), &env, None, &around).unwrap().0
}

/// A daemon with these variables and the usual fake engine.
fn daemon(variables: &[(&str, &str)]) -> App {
    daemon_with(variables, Fake::default())
}

fn daemon_with(variables: &[(&str, &str)], engine: Fake) -> App {
    app(state_with(config(variables), engine))
}

/// Commands are refused: no launcher of these tests makes sandboxes.
fn state_with(config: Config, engine: Fake) -> AppState {
    let limits = CommandsConfig {
        sessions_max: 50,
        session_idle_max: Duration::from_secs(3600),
        bash: None,
        running_max: 4,
        running_per_tenant_max: 4,
        memory_mib_max: 512,
        default_user: None,
        daemon_account: None,
    };
    let launcher = FakeLauncher::with(hello());
    let commands = Commands::new(limits, launcher, Store::in_memory().unwrap());
    AppState::new(Arc::new(config), Arc::new(engine), commands).with_languages(languages())
}

/// A request as a program on this machine sends it.
struct Call {
    builder: axum::http::request::Builder,
    body: Body,
}

fn call(method: Method, uri: &str) -> Call {
    let builder = Request::builder().method(method).uri(uri).header("host", "127.0.0.1:18091");
    Call { builder, body: Body::empty() }
}

fn get(uri: &str) -> Call {
    call(Method::GET, uri)
}

fn post(uri: &str, body: &str) -> Call {
    let it = call(Method::POST, uri).header("content-type", "application/json");
    Call { body: Body::from(body.to_owned()), ..it }
}

impl Call {
    fn header(self, name: &str, value: &str) -> Call {
        Call { builder: self.builder.header(name, value), ..self }
    }

    /// Takes a header away that `call` or `post` put there.
    fn without(mut self, name: &str) -> Call {
        self.builder.headers_mut().unwrap().remove(name);
        self
    }

    async fn to(self, app: &App) -> Reply {
        let request = self.builder.body(self.body).unwrap();
        let response = app.clone().oneshot(request).await.unwrap();
        let (parts, body) = response.into_parts();
        let bytes = body.collect().await.unwrap().to_bytes();
        let text = String::from_utf8(bytes.to_vec()).unwrap();
        Reply { status: parts.status, headers: parts.headers, text }
    }
}
