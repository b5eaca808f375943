//! A Jupyter server for tests that does what a test tells it, well or badly.
#![forbid(unsafe_code)]

use std::pin::Pin;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use bytes::Bytes;
use futures_util::{SinkExt, StreamExt};
use serde_json::{Value, json};
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::{TcpListener, TcpStream};
use tokio::task::JoinHandle;
use tokio_tungstenite::WebSocketStream;
use tokio_tungstenite::tungstenite::Message as Frame;
use tokio_tungstenite::tungstenite::handshake::server::{Request as Handshake, Response};
use tokio_tungstenite::tungstenite::http::HeaderValue;

use super::message::{Form, SUBPROTOCOL, join};
use super::{Endpoint, EndpointConfig};
use crate::store::Store;

pub(super) const TOKEN: &str = "a-token-of-tests";

/// What a request is answered with.
pub(super) enum Answer {
    /// As an honest server would.
    Honest,
    Json(u16, Value),
    /// Bytes as they are; then the connection ends.
    Raw(Vec<u8>),
    /// Nothing, for ever.
    Silence,
}

pub(super) type Later = Pin<Box<dyn Future<Output = Option<Wire>> + Send>>;
type OnRequest = dyn Fn(&str) -> Answer + Send + Sync;
type OnCell = dyn Fn(Wire, Cell) -> Later + Send + Sync;
type OnConnection = dyn Fn(Wire, usize) -> Later + Send + Sync;

/// How the server behaves.
pub(super) struct Script {
    pub(super) form: Form,
    /// Given method and path.
    pub(super) on_request: Box<OnRequest>,
    /// Given each WebSocket beside its number, from 0, before anything is read from it.
    pub(super) on_connection: Box<OnConnection>,
    /// Given each cell; gives back the connection if it is to go on.
    pub(super) on_cell: Box<OnCell>,
}

impl Script {
    /// Honest but for what `on_cell` does.
    pub(super) fn cells<F, Fut>(on_cell: F) -> Script
    where
        F: Fn(Wire, Cell) -> Fut + Send + Sync + 'static,
        Fut: Future<Output = Option<Wire>> + Send + 'static,
    {
        Script {
            form: Form::Offsets,
            on_request: Box::new(|_| Answer::Honest),
            on_connection: Box::new(|wire, _| Box::pin(async move { Some(wire) })),
            on_cell: Box::new(move |wire, cell| Box::pin(on_cell(wire, cell))),
        }
    }

    /// Honest but for what `on_request` answers. A cell prints its code.
    pub(super) fn requests(on_request: impl Fn(&str) -> Answer + Send + Sync + 'static) -> Script {
        Script { on_request: Box::new(on_request), ..Script::cells(echo) }
    }

    pub(super) fn with_connections<F, Fut>(self, on_connection: F) -> Script
    where
        F: Fn(Wire, usize) -> Fut + Send + Sync + 'static,
        Fut: Future<Output = Option<Wire>> + Send + 'static,
    {
        Script { on_connection: Box::new(move |wire, number| Box::pin(on_connection(wire, number))), ..self }
    }
}

/// A cell that prints its code.
pub(super) async fn echo(mut wire: Wire, cell: Cell) -> Option<Wire> {
    wire.print(&cell, &cell.code).await;
    wire.end(&cell, json!({"status": "ok"})).await;
    Some(wire)
}

/// A request to run code.
#[derive(Clone, Debug)]
pub(super) struct Cell {
    pub(super) id: String,
    pub(super) code: String,
    pub(super) content: Value,
}

struct Shared {
    script: Script,
    seen: Mutex<Vec<String>>,
    heads: Mutex<Vec<String>>,
    connections: AtomicUsize,
}

/// A server that runs until it is dropped.
pub(super) struct Fake {
    shared: Arc<Shared>,
    port: u16,
    config: EndpointConfig,
    store: Store,
    task: JoinHandle<()>,
}

impl Drop for Fake {
    fn drop(&mut self) {
        self.task.abort();
    }
}

impl Fake {
    pub(super) async fn start(script: Script) -> (Fake, Endpoint) {
        Fake::start_at(0, script).await
    }

    /// At a port, any free one for 0.
    pub(super) async fn start_at(port: u16, script: Script) -> (Fake, Endpoint) {
        let listener = TcpListener::bind(("127.0.0.1", port)).await.expect("a port of loopback");
        let port = listener.local_addr().expect("it is bound").port();
        let shared = Arc::new(Shared {
            script,
            seen: Mutex::default(),
            heads: Mutex::default(),
            connections: AtomicUsize::new(0),
        });
        let task = tokio::spawn(accept(listener, Arc::clone(&shared)));
        let store = Store::in_memory().expect("a store in memory");
        let url = format!("http://127.0.0.1:{port}/base/?token={TOKEN}");
        let config = EndpointConfig::parse(&url, None).expect("a URL of our own");
        let endpoint = Endpoint::new(config.clone(), store.clone());
        (Fake { shared, port, config, store, task }, endpoint)
    }

    /// What its endpoint was made of.
    pub(super) fn settings(&self) -> (EndpointConfig, Store) {
        (self.config.clone(), self.store.clone())
    }

    pub(super) fn port(&self) -> u16 {
        self.port
    }

    /// Method and path of every request so far.
    pub(super) fn seen(&self) -> Vec<String> {
        self.shared.seen.lock().expect("no test panics here").clone()
    }

    pub(super) fn count(&self, request: &str) -> usize {
        self.seen().iter().filter(|seen| *seen == request).count()
    }

    /// Heads of every request so far.
    pub(super) fn heads(&self) -> Vec<String> {
        self.shared.heads.lock().expect("no test panics here").clone()
    }

    /// WebSockets opened so far.
    pub(super) fn connections(&self) -> usize {
        self.shared.connections.load(Ordering::SeqCst)
    }

    /// Waits until it has seen `request`.
    pub(super) async fn has_seen(&self, request: &str) {
        for _ in 0..200 {
            if self.count(request) > 0 {
                return;
            }
            tokio::time::sleep(Duration::from_millis(20)).await;
        }
        panic!("{request} never came, only {:?}", self.seen());
    }
}

async fn accept(listener: TcpListener, shared: Arc<Shared>) {
    let mut connections = tokio::task::JoinSet::new();
    while let Ok((stream, _)) = listener.accept().await {
        connections.spawn(serve(stream, Arc::clone(&shared)));
    }
}

async fn serve(mut stream: TcpStream, shared: Arc<Shared>) {
    let Some(head) = peek_head(&stream).await else { return };
    let mut words = head.split([' ', '?']);
    let (method, path) = (words.next().unwrap_or_default(), words.next().unwrap_or_default());
    let path = path.strip_prefix("/base").expect("the path of the settings stands first").to_owned();
    let request = format!("{method} {path}");
    shared.seen.lock().expect("no test panics here").push(request.clone());
    shared.heads.lock().expect("no test panics here").push(head.clone());
    let answer = match (shared.script.on_request)(&request) {
        Answer::Honest if path.ends_with("/channels") => return channels(stream, shared).await,
        Answer::Honest => honest(&request),
        other => other,
    };
    // What is left unread at the end would turn it into a reset.
    let mut head = vec![0_u8; head.len()];
    stream.read_exact(&mut head).await.expect("it was peeked at");
    match answer {
        Answer::Silence => std::future::pending().await,
        Answer::Raw(bytes) => {
            // The other side may have had enough before all is written.
            let _ = stream.write_all(&bytes).await;
        }
        Answer::Json(status, body) => {
            let body = if status == 204 { String::new() } else { body.to_string() };
            let length = body.len();
            let text =
                format!("HTTP/1.1 {status} X\r\nContent-Length: {length}\r\nConnection: close\r\n\r\n{body}");
            let _ = stream.write_all(text.as_bytes()).await;
        }
        Answer::Honest => unreachable!("it was replaced above"),
    }
    let _ = stream.shutdown().await;
}

async fn peek_head(stream: &TcpStream) -> Option<String> {
    let mut buffer = vec![0_u8; 16 * 1024];
    for _ in 0..500 {
        let bytes = stream.peek(&mut buffer).await.ok().filter(|bytes| *bytes > 0)?;
        let text = String::from_utf8_lossy(&buffer[..bytes]).into_owned();
        if text.contains("\r\n\r\n") {
            return Some(text);
        }
        tokio::time::sleep(Duration::from_millis(2)).await;
    }
    None
}

fn honest(request: &str) -> Answer {
    let spec = |language: &str| json!({"spec": {"language": language}});
    match request {
        "GET /api/kernelspecs" => Answer::Json(
            200,
            json!({"default": "python3", "kernelspecs": {
                "ir": spec("R"), "a-python": spec("python"), "python3": spec("python"), "no name": spec("python"),
            }}),
        ),
        "POST /api/kernels" => Answer::Json(201, json!({"id": "k-1", "name": "python3"})),
        "GET /api/kernels/k-1" => Answer::Json(200, json!({"id": "k-1", "execution_state": "busy"})),
        "POST /api/kernels/k-1/interrupt" | "DELETE /api/kernels/k-1" => Answer::Json(204, Value::Null),
        _ => Answer::Json(404, json!({"message": "no such thing"})),
    }
}

#[expect(clippy::result_large_err, reason = "the type of a callback of tungstenite's")]
async fn channels(stream: TcpStream, shared: Arc<Shared>) {
    let form = shared.script.form;
    let choose = |_: &Handshake, mut response: Response| {
        if form == Form::Offsets {
            response.headers_mut().insert("Sec-WebSocket-Protocol", HeaderValue::from_static(SUBPROTOCOL));
        }
        Ok(response)
    };
    let Ok(socket) = tokio_tungstenite::accept_hdr_async(stream, choose).await else { return };
    let number = shared.connections.fetch_add(1, Ordering::SeqCst);
    let wire = Wire { socket, form, process: "p-1".to_owned() };
    let mut wire = (shared.script.on_connection)(wire, number).await;
    while let Some(mut open) = wire {
        let Some((kind, id, content)) = open.request().await else { return };
        wire = match kind.as_str() {
            "kernel_info_request" => {
                open.send("shell", "kernel_info_reply", &id, json!({"status": "ok"})).await;
                Some(open)
            }
            "execute_request" => {
                let code = content["code"].as_str().expect("a cell has code").to_owned();
                (shared.script.on_cell)(open, Cell { id, code, content }).await
            }
            _ => Some(open),
        };
    }
}

/// The server's end of a WebSocket.
pub(super) struct Wire {
    socket: WebSocketStream<TcpStream>,
    form: Form,
    pub(super) process: String,
}

impl Wire {
    /// The next request: kind, id, content.
    pub(super) async fn request(&mut self) -> Option<(String, String, Value)> {
        loop {
            let (header, content) = match self.socket.next().await?.ok()? {
                Frame::Binary(bytes) => (json_part(&bytes, 1), json_part(&bytes, 4)),
                Frame::Text(text) => {
                    let whole: Value = serde_json::from_str(&text).expect("a request is JSON");
                    (whole["header"].clone(), whole["content"].clone())
                }
                Frame::Close(_) => return None,
                _ => continue,
            };
            let text = |key: &str| header[key].as_str().unwrap_or_default().to_owned();
            return Some((text("msg_type"), text("msg_id"), content));
        }
    }

    pub(super) async fn send(&mut self, channel: &str, kind: &str, parent: &str, content: Value) {
        let header = json!({"msg_type": kind, "msg_id": "x", "session": self.process});
        let parent = if parent.is_empty() { json!({}) } else { json!({"msg_id": parent}) };
        let frame = match self.form {
            Form::Offsets => {
                let part = |value: &Value| value.to_string().into_bytes();
                let channel = channel.as_bytes().to_vec();
                Frame::binary(join(&[channel, part(&header), part(&parent), b"{}".to_vec(), part(&content)]))
            }
            Form::Json => Frame::text(
                json!({"channel": channel, "header": header, "parent_header": parent, "metadata": {},
                       "content": content, "buffers": []})
                .to_string(),
            ),
        };
        self.frame(frame).await;
    }

    /// Whatever it is. A client that is gone is no concern of the server's.
    pub(super) async fn frame(&mut self, frame: Frame) {
        let _ = self.socket.send(frame).await;
    }

    pub(super) async fn iopub(&mut self, cell: &Cell, kind: &str, content: Value) {
        self.send("iopub", kind, &cell.id, content).await;
    }

    pub(super) async fn print(&mut self, cell: &Cell, text: &str) {
        self.iopub(cell, "stream", json!({"name": "stdout", "text": text})).await;
    }

    pub(super) async fn idle(&mut self, cell: &Cell) {
        self.iopub(cell, "status", json!({"execution_state": "idle"})).await;
    }

    /// Reply and idle.
    pub(super) async fn end(&mut self, cell: &Cell, reply: Value) {
        self.send("shell", "execute_reply", &cell.id, reply).await;
        self.idle(cell).await;
    }
}

fn json_part(bytes: &Bytes, index: usize) -> Value {
    let number = |at: usize| {
        let raw = bytes[8 * at..8 * at + 8].try_into().expect("eight bytes");
        usize::try_from(u64::from_le_bytes(raw)).expect("an offset")
    };
    serde_json::from_slice(&bytes[number(index + 1)..number(index + 2)]).expect("a part is JSON")
}
