//! The same over two descriptors, for a client that started this process: one connection, one session.
//!
//! Whatever the descriptors are (pipes, sockets, a terminal), a thread each may wait at them, and the runtime does not.
#![forbid(unsafe_code)]

use std::fs::File;
use std::io::{self, Read, Write};
use std::sync::Arc;
use std::time::Duration;

use rmcp::service::serve_server_with_ct;
use rmcp::transport::async_rw::AsyncRwTransport;
use tokio::io::{AsyncReadExt, AsyncWriteExt, DuplexStream};
use tokio::runtime::Handle;
use tokio::sync::oneshot;
use tokio_util::sync::CancellationToken;

use super::handler::Handler;
use super::place::Home;
use crate::config::DEFAULT_TENANT;
use crate::engine::{Caller, TenantId};
use crate::server::AppState;
use crate::server::body::LARGE_JSON_BYTES_MAX;

/// Bytes between a descriptor and the protocol.
const BETWEEN_BYTES: usize = 256 * 1024;
/// How long what was answered may take to leave.
const FLUSH_MAX: Duration = Duration::from_secs(5);

/// Serves until the client closes its end, or `shutdown`.
pub async fn serve_stdio(
    state: AppState,
    input: File,
    output: File,
    shutdown: CancellationToken,
) -> io::Result<()> {
    let (from_client, to_protocol) = tokio::io::duplex(BETWEEN_BYTES);
    let (to_client, from_protocol) = tokio::io::duplex(BETWEEN_BYTES);
    let runtime = Handle::current();
    let reading = runtime.clone();
    std::thread::Builder::new()
        .name("mcp-in".to_owned())
        .spawn(move || carry_in(input, to_protocol, &reading))?;
    let (flushed, is_flushed) = oneshot::channel();
    std::thread::Builder::new().name("mcp-out".to_owned()).spawn(move || {
        carry_out(output, from_protocol, &runtime);
        // Nobody waits when the client was quicker.
        let _ = flushed.send(());
    })?;
    let caller = Caller { tenant: TenantId(DEFAULT_TENANT.to_owned()), user: None };
    let home = Home::new(state.clone(), caller.clone(), shutdown.clone(), Arc::default());
    let handler = Handler::local(state, caller, home);
    let transport =
        AsyncRwTransport::new_server(from_client, to_client).with_max_line_length(LARGE_JSON_BYTES_MAX);
    match serve_server_with_ct(handler, transport, shutdown.clone()).await {
        Ok(serving) => {
            let ended = serving.waiting().await;
            tracing::info!(?ended, "the client has left");
        }
        Err(error) => tracing::info!(%error, "the client has left before it began"),
    }
    if tokio::time::timeout(FLUSH_MAX, is_flushed).await.is_err() {
        tracing::warn!("the client does not take its last answers");
    }
    Ok(())
}

fn carry_in(mut input: File, mut to_protocol: DuplexStream, runtime: &Handle) {
    let mut buffer = vec![0; 64 * 1024];
    loop {
        match input.read(&mut buffer) {
            Ok(0) => return,
            Ok(count) => {
                if runtime.block_on(to_protocol.write_all(&buffer[..count])).is_err() {
                    return;
                }
            }
            Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
            Err(error) => {
                tracing::info!(%error, "the client cannot be heard");
                return;
            }
        }
    }
}

fn carry_out(mut output: File, mut from_protocol: DuplexStream, runtime: &Handle) {
    let mut buffer = vec![0; 64 * 1024];
    while let Ok(count @ 1..) = runtime.block_on(from_protocol.read(&mut buffer)) {
        if let Err(error) = output.write_all(&buffer[..count]) {
            tracing::info!(%error, "the client does not listen");
            return;
        }
    }
}
