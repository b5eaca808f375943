//! `caisson run` and `caisson doctor`: a launcher of their own, for one cell or for none.
#![forbid(unsafe_code)]

use std::io::{self, Write};
use std::os::fd::{AsFd, OwnedFd};
use std::sync::Arc;
use std::time::Duration;

use nix::sys::signal::{Signal, kill};
use nix::sys::wait::WaitStatus;
use nix::unistd::Pid;

use crate::config::{CodeBackend, Config};
use crate::engine::config::EngineConfig;
use crate::engine::run::{DEFAULT_TENANT, Engine};
use crate::engine::{CellRequest, Execution, Language, Output, Runner, SessionChoice, Status, TenantId};
use crate::launcher::client::Client;
use crate::launcher::posture::{Hello, Posture};
use crate::launcher::settings::Settings;
use crate::store::Store;
use crate::supervisor::stages::{launcher_stage, try_namespaces};
use crate::sys::packet;

/// How long the launcher may take to measure the host.
const HELLO_MAX: Duration = Duration::from_secs(60);
/// Exit status of a run that was ended for its time, as `timeout(1)` has it.
pub const EXIT_TIMEOUT: u8 = 124;

/// A launcher of our own; ends with this value.
struct Own {
    pid: Pid,
    socket: Option<OwnedFd>,
}

impl Own {
    fn start(settings: &Settings, log: &str) -> io::Result<Own> {
        let (ours, theirs) = packet::pair()?;
        let settings = Settings { no_namespaces: try_namespaces(settings)?, ..settings.clone() };
        let pid = launcher_stage(&settings, log, theirs.as_fd())?;
        Ok(Own { pid, socket: Some(ours) })
    }
}

impl Drop for Own {
    fn drop(&mut self) {
        // Gone already is what we want; else it cleans up before it ends.
        let _ = kill(self.pid, Signal::SIGTERM);
        let _ = nix::sys::wait::waitpid(self.pid, None);
    }
}

/// Measures the host: what the launcher reports, without serving anybody.
pub fn measure(settings: &Settings) -> anyhow::Result<Arc<Hello>> {
    let settings = Settings { posture_floor: Posture::None, zygotes_off: true, ..settings.clone() };
    let mut own = Own::start(&settings, "error")?;
    let socket = own.socket.take();
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build()?;
    runtime.block_on(async {
        let client = Client::new();
        hello(&client, socket).await
    })
}

/// Runs one cell and writes what it wrote. Returns the exit status.
pub fn one(
    settings: &Settings,
    config: &Config,
    language: Language,
    code: String,
    timeout: Option<Duration>,
) -> anyhow::Result<u8> {
    let settings = Settings { zygotes_off: true, shells_ready: 0, ..settings.clone() };
    let mut own = Own::start(&settings, "error")?;
    let socket = own.socket.take();
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build()?;
    let execution = runtime.block_on(async {
        let client = Client::new();
        let found = hello(&client, socket).await?;
        anyhow::ensure!(
            found.posture.posture >= config.require_isolation,
            "this host enforces posture {}, less than the required {}",
            found.posture.posture.name(),
            config.require_isolation.name()
        );
        let limits = &config.limits;
        let engine = EngineConfig {
            slots_max: 0,
            prefill_default: false,
            code_backend: CodeBackend::Native,
            output_chars_max: limits.output_chars_max,
            grace: Duration::ZERO,
            memory_mib_max: limits.memory_bytes / (1024 * 1024),
            python_name: config.python_name(),
            node_name: config.node_name(),
            ..EngineConfig::default()
        };
        let engine = Engine::new(engine, client, Store::in_memory()?);
        let request = CellRequest {
            runner: Runner::Chosen,
            watcher: None,
            tenant: TenantId(DEFAULT_TENANT.to_owned()),
            language,
            code,
            session: SessionChoice::OneOff,
            timeout: timeout.unwrap_or(limits.timeout_default),
            cwd: None,
            user: None,
            strict: true,
        };
        let execution = engine.execute(request).await?;
        engine.shutdown(Duration::ZERO).await;
        Ok(execution)
    })?;
    show(&execution)?;
    Ok(exit_status(&execution))
}

/// Has a launcher of its own measure forks, which prints what it found. Returns its exit status.
pub fn forks(settings: &Settings) -> anyhow::Result<u8> {
    let (ours, theirs) = packet::pair()?;
    let pid = launcher_stage(settings, "error", theirs.as_fd())?;
    drop(theirs);
    let ended = nix::sys::wait::waitpid(pid, None)?;
    drop(ours);
    match ended {
        WaitStatus::Exited(_, status) => Ok(status as u8),
        other => anyhow::bail!("the launcher did not end by itself: {other:?}"),
    }
}

async fn hello(client: &Client, socket: Option<OwnedFd>) -> anyhow::Result<Arc<Hello>> {
    let socket = socket.ok_or_else(|| anyhow::anyhow!("the launcher's socket was taken"))?;
    let attached = client.clone();
    let mut serving = tokio::spawn(async move { attached.attach(socket).await });
    let mut hello = client.hello();
    tokio::select! {
        // The greeting first: a launcher that can promise nothing ends right after it.
        biased;
        greeted = tokio::time::timeout(HELLO_MAX, hello.wait_for(Option::is_some)) => match greeted {
            Ok(Ok(found)) => found.clone().ok_or_else(|| anyhow::anyhow!("the launcher is gone")),
            _ => anyhow::bail!("the launcher did not come up within {} s", HELLO_MAX.as_secs()),
        },
        _ = &mut serving => anyhow::bail!("the launcher did not come up; the lines above say why"),
    }
}

/// Streams as they were, and the error where a terminal shows it.
fn show(execution: &Execution) -> io::Result<()> {
    io::stdout().write_all(execution.stdout.as_bytes())?;
    io::stdout().flush()?;
    let mut stderr = io::stderr();
    stderr.write_all(execution.stderr.as_bytes())?;
    for output in &execution.outputs {
        if let Output::Error(error) = output
            && error.ename != "SystemExit"
            && error.ename != "TimeoutError"
        {
            let text = if error.traceback.is_empty() {
                format!("{}: {}", error.ename, error.evalue)
            } else {
                error.traceback.join("\n")
            };
            stderr.write_all(text.as_bytes())?;
            stderr.write_all(b"\n")?;
        }
    }
    Ok(())
}

fn exit_status(execution: &Execution) -> u8 {
    let exit = execution.outputs.iter().rev().find_map(|output| match output {
        Output::Error(error) if error.ename == "SystemExit" => error.evalue.trim().parse::<i64>().ok(),
        _ => None,
    });
    match (execution.status, exit) {
        (Status::Ok, _) => 0,
        (Status::Timeout, _) => EXIT_TIMEOUT,
        (Status::Error, Some(code)) => code as u8,
        (Status::Error, None) => 1,
    }
}
