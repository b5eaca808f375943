//! The daemon's life: confines itself, opens its store, keeps a launcher at hand, serves, drains.
//!
//! It starts with nothing but descriptors: the supervisor's control socket, its configuration, the
//! listeners. It cannot start programs, mount, trace or open files outside its folder.
#![forbid(unsafe_code)]

use std::io;
use std::net::TcpListener;
use std::os::fd::OwnedFd;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use rustix::net::RecvFlags;
use serde::{Deserialize, Serialize};
use tokio::signal::unix::{SignalKind, signal};
use tokio_util::sync::CancellationToken;

use crate::commands::{Commands, CommandsConfig};
use crate::config::Config;
use crate::engine::config::EngineConfig;
use crate::engine::run::Engine;
use crate::files::{FileSettings, Files};
use crate::languages::{Languages, Surroundings};
use crate::launcher::client::Client;
use crate::objects::{ObjectLimits, Objects};
use crate::policy::LanguageEntry;
use crate::runs::{Runs, RunsConfig};
use crate::server::{AppState, Wired, serve, serve_stdio};
use crate::store::{Ownership, Store};
use crate::sys::{packet, reactor};
use crate::tenant::Tenants;
use crate::tenant::quota::CellQuota;

pub mod confine;

/// The store's file in the daemon's folder.
const STORE_FILE: &str = "caisson.db";
/// Where stored files lie in it.
const OBJECTS_DIR: &str = "objects";
/// How long the first launcher may take to greet: it loads the zygotes first.
const FIRST_HELLO_MAX: Duration = Duration::from_secs(180);
/// With several tenants, one may have this part of what may run at once.
const TENANTS_SHARE: usize = 4;
/// How long running cells may go on once the HTTP side has drained.
const STOP_MAX: Duration = Duration::from_secs(5);

/// What the daemon reads at its start.
#[derive(Debug, Serialize, Deserialize)]
pub struct DaemonStart {
    pub config: Config,
    /// Its folder, as it can reach it.
    pub dir: PathBuf,
    /// Name of its account, which requests may use as `user` when it is not root's daemon.
    pub account: Option<String>,
    /// The table in force; the daemon cannot read an operator's folder.
    pub languages: Vec<LanguageEntry>,
    /// It serves one client of the MCP, at two inherited descriptors, instead of listeners.
    pub one_client: bool,
}

/// Serves until asked to end, or until its one client leaves. `control` brings the sockets of launchers.
pub fn run(start: DaemonStart, control: OwnedFd, inherited: Vec<OwnedFd>) -> anyhow::Result<()> {
    std::fs::create_dir_all(&start.dir)?;
    // Before the runtime: what is applied to one thread is inherited by those it starts.
    confine::confine(&start.dir)?;
    runtime(worker_count())?.block_on(live(start, control, inherited))
}

/// One worker needs none of what several need to share their tasks.
fn runtime(workers: usize) -> io::Result<tokio::runtime::Runtime> {
    match workers {
        1 => tokio::runtime::Builder::new_current_thread().enable_all().build(),
        _ => tokio::runtime::Builder::new_multi_thread().worker_threads(workers).enable_all().build(),
    }
}

/// Half of the processors: the other half is the guests'. A request's tasks wake each other, and waking another
/// thread costs as much as a cell.
fn worker_count() -> usize {
    let processors = std::thread::available_parallelism().map_or(1, std::num::NonZero::get);
    (processors / 2).max(1)
}

async fn live(start: DaemonStart, control: OwnedFd, inherited: Vec<OwnedFd>) -> anyhow::Result<()> {
    let shutdown = CancellationToken::new();
    tokio::spawn(until_signal(shutdown.clone())?);
    let store = Store::open(&start.dir.join(STORE_FILE))?;
    let launcher = Client::new();
    tokio::spawn(keep_launcher(control, launcher.clone(), shutdown.clone()));
    for note in &start.config.notes {
        tracing::warn!("{note}");
    }
    tokio::select! {
        greeted = first_hello(&launcher) => greeted?,
        () = shutdown.cancelled() => return Ok(()),
    }
    let Some(hello) = launcher.hello().borrow().clone() else {
        anyhow::bail!("the launcher took its greeting back")
    };
    // Before anybody is given a space: what this store does not know may be there, and is not theirs.
    store.set_aside(hello.spaces_to).await?;
    let tenants = Tenants::new(store.clone());
    let engine = Engine::new(engine_config(&start), launcher.clone(), store.clone());
    let files = Files::new(file_settings(&start), Arc::new(launcher.clone()), tenants);
    let commands = Commands::new(commands_config(&start), Arc::new(launcher.clone()), store.clone());
    tokio::spawn(Commands::reap(Arc::downgrade(&commands)));
    let objects = Objects::open(&start.dir.join(OBJECTS_DIR), store.clone(), object_limits(&start.config))?;
    tokio::spawn(Objects::sweep(objects.downgrade()));
    tokio::spawn(clear_left_spaces(launcher.clone(), store.clone(), objects.clone()));
    let config = runs_config(&start.config);
    let surroundings =
        Surroundings { toolchains: hello.toolchains.clone(), memory_mib: config.memory_mib_max };
    let languages = Arc::new(Languages::new(&start.languages, &surroundings));
    let runs = Runs::new(config, Arc::new(launcher), objects.clone(), languages, store);
    // So that the first look at the daemon's health knows what there is.
    let asked = Arc::clone(&runs);
    tokio::spawn(async move { asked.installed().await });
    let wired = Arc::new(Wired(Arc::clone(&engine)));
    let state = AppState::new(Arc::new(start.config), wired, Arc::clone(&commands));
    let state = state.with_files(files).with_objects(objects).with_runs(Arc::clone(&runs));
    let stop_max = match start.one_client {
        true => {
            let ends = <[OwnedFd; 2]>::try_from(inherited);
            let [input, output] = ends.map_err(|_| anyhow::anyhow!("one client has two descriptors"))?;
            serve_stdio(state, input.into(), output.into(), shutdown).await?;
            // Whoever waited for it has gone.
            Duration::ZERO
        }
        false => {
            serve(inherited.into_iter().map(TcpListener::from).collect(), state, shutdown).await?;
            STOP_MAX
        }
    };
    commands.shutdown();
    tokio::join!(runs.shutdown(stop_max), engine.shutdown(stop_max));
    Ok(())
}

/// The first SIGTERM or SIGINT drains; the supervisor turns a second one into a kill.
fn until_signal(shutdown: CancellationToken) -> io::Result<impl Future<Output = ()>> {
    let mut terminate = signal(SignalKind::terminate())?;
    let mut interrupt = signal(SignalKind::interrupt())?;
    Ok(async move {
        tokio::select! {
            _ = terminate.recv() => {}
            _ = interrupt.recv() => {}
        }
        shutdown.cancel();
    })
}

/// Waits for the first launcher's greeting.
async fn first_hello(launcher: &Client) -> anyhow::Result<()> {
    let mut hello = launcher.hello();
    match tokio::time::timeout(FIRST_HELLO_MAX, hello.wait_for(Option::is_some)).await {
        Ok(Ok(_)) => Ok(()),
        _ => anyhow::bail!("the launcher did not come up"),
    }
}

/// Attaches each launcher that the supervisor sends, one after the other.
async fn keep_launcher(control: OwnedFd, client: Client, shutdown: CancellationToken) {
    let control = match rustix::io::ioctl_fionbio(&control, true).map_err(io::Error::from) {
        Ok(()) => reactor::register(control),
        Err(error) => Err(error),
    };
    let control = match control {
        Ok(control) => control,
        Err(error) => {
            tracing::error!(%error, "the supervisor cannot be heard");
            shutdown.cancel();
            return;
        }
    };
    loop {
        let Ok(mut ready) = control.readable().await else { break };
        let mut byte = [0_u8; 8];
        let received = ready.try_io(|fd| packet::receive(fd.get_ref(), &mut byte, RecvFlags::empty()));
        match received {
            Ok(Ok((0, _))) => break,
            Ok(Ok((_, descriptors))) => {
                for socket in descriptors {
                    let client = client.clone();
                    tokio::spawn(async move {
                        if let Err(error) = client.attach(socket).await {
                            tracing::error!(%error, "the launcher's socket failed");
                        }
                    });
                }
            }
            Ok(Err(error)) => {
                tracing::error!(%error, "the supervisor cannot be heard");
                break;
            }
            Err(_would_block) => {}
        }
    }
    // Without a supervisor nobody starts anything again: end in order.
    shutdown.cancel();
}

/// Deletes what a launcher finds of spaces that have no owner any more: they count among those there may be. What this
/// store cannot know is somebody's, as far as we can tell.
async fn clear_left_spaces(launcher: Client, store: Store, objects: Objects) {
    let Some(mut found) = launcher.found_spaces() else { return };
    let mut strange = 0_u64;
    while let Some(space) = found.recv().await {
        match store.ownership(space).await {
            Ok(Ownership::Owned) => {}
            Ok(Ownership::Past) => match launcher.delete_space(space).await {
                Ok(()) => {
                    tracing::info!(%space, "a space that was left without an owner is deleted");
                    objects.space_deleted(space).await;
                }
                Err(error) => tracing::warn!(%space, %error, "a space without an owner was not deleted"),
            },
            Ok(Ownership::Strange) => {
                strange += 1;
                // At 1, 2, 4, 8 …: with a store that was lost it is all of them.
                if strange.is_power_of_two() {
                    tracing::warn!(%space, strange, "left alone: a space that this store has never given out");
                }
                if let Err(error) = store.set_aside(space).await {
                    tracing::error!(%space, %error, "a strange space is not set aside: somebody may be given it");
                }
            }
            Err(error) => tracing::warn!(%space, %error, "whose a space is could not be looked up"),
        }
    }
}

/// What one tenant may have running: with others beside it never all there is.
fn of_one_tenant(config: &Config) -> usize {
    let running_max = config.limits.cells_running_max;
    if config.has_several_tenants() { (running_max / TENANTS_SHARE).max(1) } else { running_max }
}

/// Spaces that one tenant's sessions may keep: with others beside it never all there are.
fn kept_share(config: &Config) -> usize {
    let share = if config.has_several_tenants() { TENANTS_SHARE as u64 } else { 1 };
    usize::try_from(config.limits.spaces_max / share).unwrap_or(usize::MAX).max(1)
}

fn file_settings(start: &DaemonStart) -> FileSettings {
    FileSettings { default_user: start.config.default_user.clone(), daemon_account: start.account.clone() }
}

fn object_limits(config: &Config) -> ObjectLimits {
    ObjectLimits {
        file_bytes_max: config.librechat.file_bytes_max,
        ttl: config.librechat.session_ttl,
        kept_per_tenant_max: kept_share(config),
        ..ObjectLimits::default()
    }
}

fn runs_config(config: &Config) -> RunsConfig {
    let (librechat, limits) = (&config.librechat, &config.limits);
    let defaults = EngineConfig::default();
    let tenants = if config.has_several_tenants() { TENANTS_SHARE } else { 1 };
    RunsConfig {
        kernels_max: librechat.sessions_max,
        kernels_all_max: librechat.sessions_max.saturating_mul(tenants),
        kernel_idle_max: librechat.session_ttl,
        timeout_max: librechat.execution_timeout,
        bash_strict: librechat.bash_strict,
        hints: librechat.pip_hints,
        output_bytes_max: usize::try_from(librechat.output_bytes_max).unwrap_or(usize::MAX),
        output_files_max: librechat.output_files_max,
        file_bytes_max: librechat.file_bytes_max,
        space_bytes: limits.space_bytes,
        memory_mib_max: limits.memory_bytes / (1024 * 1024),
        slots_max: config.slots_max,
        quota: CellQuota {
            running_max: limits.cells_running_max,
            running_per_tenant_max: of_one_tenant(config),
            waiting_max: defaults.cells_waiting_max,
        },
        session_waiting_max: defaults.session_waiting_max,
        interrupt_grace: defaults.interrupt_grace,
    }
}

fn commands_config(start: &DaemonStart) -> CommandsConfig {
    let config = &start.config;
    CommandsConfig {
        sessions_max: config.commands.sessions_max,
        session_idle_max: config.commands.session_idle,
        bash: config.commands.bash.clone(),
        running_max: config.limits.cells_running_max,
        running_per_tenant_max: of_one_tenant(config),
        memory_mib_max: config.limits.memory_bytes / (1024 * 1024),
        default_user: config.default_user.clone(),
        daemon_account: start.account.clone(),
    }
}

fn engine_config(start: &DaemonStart) -> EngineConfig {
    let config = &start.config;
    let limits = &config.limits;
    EngineConfig {
        sessions_max: config.code_sessions_max,
        session_idle_max: config.code_session_idle,
        kernel_sessions_max: config.kernel.sessions_max,
        kernel_idle_max: config.kernel.session_idle,
        cells_running_max: limits.cells_running_max,
        cells_running_per_tenant_max: of_one_tenant(config),
        output_chars_max: limits.output_chars_max,
        grace: limits.grace,
        timeout_default: limits.timeout_default,
        timeout_max: limits.timeout_max,
        memory_mib_max: limits.memory_bytes / (1024 * 1024),
        slots_max: config.slots_max,
        code_prewarm: config.code_prewarm,
        kernel_prewarm: config.kernel.prewarm,
        endpoint: config.jupyter_endpoint.clone(),
        code_backend: config.code_backend,
        prefill_default: config.is_open(),
        default_user: config.default_user.clone(),
        daemon_account: start.account.clone(),
        python_name: config.python_name(),
        node_name: config.node_name(),
        ..EngineConfig::default()
    }
}
