//! The server's REST side: one bounded exchange per connection. Redirects are answers like any other that is
//! not wanted, and no proxy is looked for.
#![forbid(unsafe_code)]

use std::sync::Arc;
use std::time::Duration;

use bytes::Bytes;
use http_body_util::{BodyExt, Full, Limited};
use hyper::client::conn::http1;
use hyper::header::{ACCEPT, AUTHORIZATION, CONTENT_TYPE, HOST, HeaderValue};
use hyper::{Method, Request, StatusCode};
use hyper_util::rt::TokioIo;
use serde::{Deserialize, Serialize};
use tokio::net::TcpStream;
use tokio::sync::Semaphore;
use tokio::time::timeout;
use tokio_util::sync::CancellationToken;
use tokio_util::task::{AbortOnDropHandle, TaskTracker};

use crate::backend::endpoint::message::read;
use crate::backend::endpoint::records::Records;
use crate::config::EndpointConfig;

/// How long a connection may take to come up.
pub(super) const CONNECT_MAX: Duration = Duration::from_secs(3);
/// How long an exchange may take that changes little on the server.
pub(super) const REQUEST_MAX: Duration = Duration::from_secs(10);
/// How long the server may take to start the process of a kernel. Nobody waits for so long; one that comes late is known
/// by then, and deleted.
const KERNEL_START_MAX: Duration = Duration::from_secs(60);
/// How long a look at the server may take.
pub(super) const PROBE_MAX: Duration = Duration::from_secs(2);
/// Largest body that is read, in bytes. A list of kernels with their resources is a few thousand.
const BODY_BYTES_MAX: usize = 2 * 1024 * 1024;
/// Largest head of an answer, in bytes.
const HEAD_BYTES_MAX: usize = 64 * 1024;
/// Most kernels that nobody has: being started, getting ready or being deleted. A server that is slower than its callers
/// are patient would else be asked for more and more of them.
pub(super) const COMING_MAX: usize = if cfg!(test) { 8 } else { 64 };
/// Most kernels that are offered.
const KERNELS_MAX: usize = 64;
/// Longest name of a kernel and longest id, in bytes.
const NAME_BYTES_MAX: usize = 128;

/// Why an exchange came to nothing.
#[derive(Debug, thiserror::Error)]
pub enum RestError {
    #[error("no connection within {} s", CONNECT_MAX.as_secs())]
    ConnectTimeout,
    #[error("no connection")]
    Connect(#[source] std::io::Error),
    #[error("no answer within {} s", .0.as_secs())]
    Timeout(Duration),
    #[error("the exchange broke off")]
    Broken(#[source] hyper::Error),
    #[error("an answer of more than {BODY_BYTES_MAX} bytes, or one that broke off")]
    Body,
    #[error("the token is refused (status {0})")]
    Unauthorized(u16),
    #[error("status {0}")]
    Status(u16),
    #[error("the server does not speak the subprotocol")]
    NoSubprotocol,
    #[error("an answer that is none of a Jupyter server")]
    Garbled,
}

impl RestError {
    /// Whether there is no server to speak to, as opposed to one that refuses.
    pub(super) fn is_absence(&self) -> bool {
        use RestError::{Body, Broken, Connect, ConnectTimeout, Timeout};
        matches!(self, ConnectTimeout | Connect(_) | Timeout(_) | Broken(_) | Body)
    }
}

/// Names a kernel of the server. Invariant: fits into a path as it is.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct KernelId(String);

impl KernelId {
    pub(super) fn parse(raw: String) -> Option<KernelId> {
        let fits = raw.bytes().all(|byte| byte.is_ascii_alphanumeric() || b"-_".contains(&byte));
        (fits && !raw.is_empty() && raw.len() <= NAME_BYTES_MAX).then_some(KernelId(raw))
    }

    pub(super) fn as_str(&self) -> &str {
        &self.0
    }
}

/// What the server says about a kernel.
#[derive(Copy, Clone, Debug, PartialEq, Eq)]
pub(super) enum KernelState {
    Idle,
    /// Busy, starting, or in a state that we do not know.
    Other,
    Dead,
    Gone,
}

#[derive(Deserialize)]
struct KernelIn {
    id: String,
    #[serde(default)]
    execution_state: Option<String>,
}

#[derive(Serialize)]
struct KernelOut<'a> {
    name: &'a str,
}

#[derive(Deserialize)]
struct SpecsIn {
    #[serde(default)]
    default: Option<String>,
    kernelspecs: serde_json::Map<String, serde_json::Value>,
}

/// Speaks to one server.
#[derive(Debug)]
pub(super) struct Rest {
    config: EndpointConfig,
    records: Records,
    authorization: Option<HeaderValue>,
    /// What goes on behind the callers' backs and has to come to its end: kernels being deleted, or started for nobody.
    errands: TaskTracker,
    /// One for each kernel that nobody has.
    places: Arc<Semaphore>,
    /// Cancelled when the daemon ends.
    closing: CancellationToken,
}

impl Rest {
    pub(super) fn new(config: EndpointConfig, records: Records) -> Rest {
        let authorization = config.authorization().map(|value| {
            let mut value = HeaderValue::from_str(&value).expect("a token is visible ASCII");
            value.set_sensitive(true);
            value
        });
        Rest {
            config,
            records,
            authorization,
            errands: TaskTracker::new(),
            places: Arc::new(Semaphore::new(COMING_MAX)),
            closing: CancellationToken::new(),
        }
    }

    pub(super) fn config(&self) -> &EndpointConfig {
        &self.config
    }

    pub(super) fn authorization(&self) -> Option<&HeaderValue> {
        self.authorization.as_ref()
    }

    pub(super) fn records(&self) -> &Records {
        &self.records
    }

    pub(super) fn errands(&self) -> &TaskTracker {
        &self.errands
    }

    /// The places of kernels that nobody has: a start waits for one, a deletion takes one if it can.
    pub(super) fn places(&self) -> Arc<Semaphore> {
        Arc::clone(&self.places)
    }

    pub(super) fn closing(&self) -> &CancellationToken {
        &self.closing
    }

    /// A fresh connection.
    pub(super) async fn connect(&self) -> Result<TcpStream, RestError> {
        let address = (self.config.host(), self.config.port());
        let stream = match timeout(CONNECT_MAX, TcpStream::connect(address)).await {
            Ok(stream) => stream.map_err(RestError::Connect)?,
            Err(_elapsed) => return Err(RestError::ConnectTimeout),
        };
        stream.set_nodelay(true).map_err(RestError::Connect)?;
        Ok(stream)
    }

    /// The server's Python kernels, its default first, the others by name.
    pub(super) async fn kernels(&self) -> Result<Vec<String>, RestError> {
        let (_, body) = self.call(Method::GET, "/api/kernelspecs", None, PROBE_MAX).await?;
        let specs: SpecsIn = read(&body).ok_or(RestError::Garbled)?;
        let is_python = |spec: &serde_json::Value| {
            spec.pointer("/spec/language").and_then(|it| it.as_str()) == Some("python")
        };
        let mut names: Vec<String> = specs
            .kernelspecs
            .into_iter()
            .filter(|(name, spec)| is_kernel_name(name) && is_python(spec))
            .map(|(name, _)| name)
            .collect();
        names.sort_by_key(|name| (specs.default.as_ref() != Some(name), name.clone()));
        names.truncate(KERNELS_MAX);
        Ok(names)
    }

    /// Starts a kernel.
    pub(super) async fn start(&self, name: &str) -> Result<KernelId, RestError> {
        let body = serde_json::to_vec(&KernelOut { name }).expect("a name has a JSON form");
        let (_, body) = self.call(Method::POST, "/api/kernels", Some(body), KERNEL_START_MAX).await?;
        let kernel: KernelIn = read(&body).ok_or(RestError::Garbled)?;
        KernelId::parse(kernel.id).ok_or(RestError::Garbled)
    }

    pub(super) async fn state(&self, id: &KernelId, time_max: Duration) -> Result<KernelState, RestError> {
        let path = format!("/api/kernels/{}", id.as_str());
        match self.call(Method::GET, &path, None, time_max).await {
            Ok((_, body)) => {
                let kernel: KernelIn = read(&body).ok_or(RestError::Garbled)?;
                Ok(match kernel.execution_state.as_deref() {
                    Some("idle") => KernelState::Idle,
                    Some("dead") => KernelState::Dead,
                    _ => KernelState::Other,
                })
            }
            Err(RestError::Status(404)) => Ok(KernelState::Gone),
            Err(error) => Err(error),
        }
    }

    pub(super) async fn interrupt(&self, id: &KernelId) -> Result<(), RestError> {
        let path = format!("/api/kernels/{}/interrupt", id.as_str());
        self.call(Method::POST, &path, Some(Vec::new()), REQUEST_MAX).await.map(drop)
    }

    /// Ends a kernel. One that is gone already is no error.
    pub(super) async fn delete(&self, id: &KernelId) -> Result<(), RestError> {
        let path = format!("/api/kernels/{}", id.as_str());
        match self.call(Method::DELETE, &path, None, REQUEST_MAX).await {
            Ok(_) | Err(RestError::Status(404)) => Ok(()),
            Err(error) => Err(error),
        }
    }

    async fn call(
        &self,
        method: Method,
        path: &str,
        body: Option<Vec<u8>>,
        time_max: Duration,
    ) -> Result<(StatusCode, Bytes), RestError> {
        let exchange = self.exchange(method, path, body);
        let (status, body) =
            timeout(time_max, exchange).await.map_err(|_elapsed| RestError::Timeout(time_max))??;
        match status.as_u16() {
            200..=299 => Ok((status, body)),
            refused @ (401 | 403) => Err(RestError::Unauthorized(refused)),
            other => Err(RestError::Status(other)),
        }
    }

    async fn exchange(
        &self,
        method: Method,
        path: &str,
        body: Option<Vec<u8>>,
    ) -> Result<(StatusCode, Bytes), RestError> {
        let mut request = Request::builder()
            .method(method)
            .uri(format!("{}{path}", self.config.path()))
            .header(HOST, self.config.authority())
            .header(ACCEPT, "application/json");
        if let Some(authorization) = &self.authorization {
            request = request.header(AUTHORIZATION, authorization);
        }
        if body.is_some() {
            request = request.header(CONTENT_TYPE, "application/json");
        }
        let request = request
            .body(Full::new(Bytes::from(body.unwrap_or_default())))
            .expect("path and host were checked when the settings were read");
        let stream = TokioIo::new(self.connect().await?);
        let (mut sender, connection) = http1::Builder::new()
            .max_buf_size(HEAD_BYTES_MAX)
            .handshake(stream)
            .await
            .map_err(RestError::Broken)?;
        let _connection = AbortOnDropHandle::new(tokio::spawn(connection));
        let (head, body) = sender.send_request(request).await.map_err(RestError::Broken)?.into_parts();
        let body = Limited::new(body, BODY_BYTES_MAX).collect().await.map_err(|_error| RestError::Body)?;
        Ok((head.status, body.to_bytes()))
    }
}

/// Jupyter's own rule for names of kernels.
fn is_kernel_name(name: &str) -> bool {
    let fits = |byte: u8| byte.is_ascii_alphanumeric() || b"-._".contains(&byte);
    !name.is_empty() && name.len() <= NAME_BYTES_MAX && name.bytes().all(fits)
}
