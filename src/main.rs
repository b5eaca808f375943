//! argv to stage to exit code.

use std::io::Read;
use std::net::TcpListener;
use std::os::fd::{AsFd, OwnedFd};
use std::process::ExitCode;
use std::time::Duration;

use anyhow::Context;
use caisson::cli::{
    BenchForkArgs, Cli, Command, ConfigArgs, DoctorArgs, InternalArgs, Lang, McpArgs, RunArgs, ServeArgs,
    exit,
};
use caisson::config::{Config, FileText, Flags, Layers, Surroundings};
use caisson::daemon::{self, DaemonStart};
use caisson::engine::Language;
use caisson::launcher::posture::{Posture, Shape};
use caisson::launcher::rules::Rules;
use caisson::launcher::settings::{Settings, ViewSettings};
use caisson::launcher::start;
use caisson::launcher::{cgroup, guest};
use caisson::supervisor::stages::{self, Account, LauncherStart};
use caisson::supervisor::{self, ServeError, Supervisor};
use caisson::{config, doctor, inside, policy, run, sys, telemetry};
use clap::Parser;

fn main() -> ExitCode {
    // In a sandbox: no settings, no log, nothing of the daemon's.
    let mut words = std::env::args().skip(1);
    if words.next().as_deref() == Some(guest::OWN_WORD) {
        return inside::main(words.next().as_deref().unwrap_or_default());
    }
    let result = match Cli::parse().command {
        Command::Serve(args) => serve(&args),
        Command::Run(args) => run_one(&args),
        Command::Mcp(args) => serve_mcp(&args),
        Command::Doctor(args) => examine(&args),
        Command::Config(args) => show_config(&args),
        Command::BenchFork(args) => bench_fork(&args),
        Command::Launcher(args) => launcher(&args),
        Command::Daemon(args) => daemon_stage(&args),
    };
    match result {
        Ok(code) => ExitCode::from(code),
        Err(failed) => failed.report(),
    }
}

/// What went wrong, and the documented exit code for it.
struct Failed {
    code: u8,
    error: anyhow::Error,
}

impl Failed {
    #[expect(clippy::print_stderr, reason = "the one place that speaks to the person at the terminal")]
    fn report(&self) -> ExitCode {
        eprintln!("error: {:#}", self.error);
        ExitCode::from(self.code)
    }
}

impl<E: Into<anyhow::Error>> From<E> for Failed {
    fn from(error: E) -> Failed {
        Failed { code: exit::FAILED, error: error.into() }
    }
}

fn with_code<T>(result: anyhow::Result<T>, code: u8) -> Result<T, Failed> {
    result.map_err(|error| Failed { code, error })
}

/// The settings, as flags, environment and file have them.
fn load(flags: &Flags, file: Option<&std::path::Path>) -> Result<(Config, Layers), Failed> {
    let text = file
        .map(|path| {
            std::fs::read_to_string(path).with_context(|| format!("failed to read {}", path.display()))
        })
        .transpose();
    let text = with_code(text, exit::USAGE)?;
    let name = file.map(|path| path.to_string_lossy().into_owned()).unwrap_or_default();
    let file = match (file, &text) {
        (Some(_), Some(text)) => Some(FileText { name: &name, text }),
        _ => None,
    };
    let env = |name: &str| std::env::var(name).ok();
    let loaded = Config::load(flags, &env, file, &Surroundings::of_process());
    with_code(loaded.map_err(anyhow::Error::from), exit::USAGE)
}

fn search_path() -> String {
    std::env::var("PATH").unwrap_or_default()
}

fn serve(args: &ServeArgs) -> Result<u8, Failed> {
    let (config, _) = load(&args.flags(), args.settings.config.as_deref())?;
    with_code(config.check_exposure().map_err(anyhow::Error::from), exit::USAGE)?;
    let mut settings = supervisor::resolve::settings(&config, &search_path());
    settings.no_namespaces = stages::try_namespaces(&settings)?;
    // The launcher loads them for itself; here a fault ends the start instead of one launcher after the other.
    with_code(Rules::load(&settings, 0, Shape::UserNamespace).map_err(anyhow::Error::from), exit::USAGE)?;
    telemetry::init(&config.log_level, config.log_format)?;
    let mut listeners = Vec::new();
    for address in &config.listen {
        let bound = TcpListener::bind(address).with_context(|| format!("failed to listen on {address}"));
        listeners.push(with_code(bound, exit::BIND)?);
    }
    supervise(config, settings, listeners.into_iter().map(OwnedFd::from).collect(), false)
}

/// Starts launcher and daemon, and stays until they have ended.
fn supervise(
    config: Config,
    mut settings: Settings,
    descriptors: Vec<OwnedFd>,
    one_client: bool,
) -> Result<u8, Failed> {
    let policies = policy::load(config.policies_dir.as_deref());
    let languages = with_code(policies.map_err(anyhow::Error::from), exit::USAGE)?.languages;
    let root = nix::unistd::geteuid().is_root();
    let account = root.then(|| Account::of(&config.service_user));
    stages::make_folders(&config.data_dir, account)
        .with_context(|| format!("failed to make the data directory {}", config.data_dir.display()))?;
    let daemon_dir = config.data_dir.join("daemon");
    let (uid, gid) = account.map_or((settings.uid, settings.gid), |account| (account.uid, account.gid));
    settings.views = Some(ViewSettings { dir: daemon_dir.join("views"), uid, gid });
    let log = config.log_level.clone();
    let start = DaemonStart {
        dir: stages::daemon_dir(&daemon_dir, &settings),
        account: nix::unistd::User::from_uid(nix::unistd::getuid()).ok().flatten().map(|user| user.name),
        config,
        languages,
        one_client,
    };
    let supervisor = Supervisor {
        descriptors,
        ends_with_daemon: one_client,
        settings,
        daemon_config: serde_json::to_vec(&start)?,
        log,
        account,
        daemon_dir,
    };
    let _aside = cgroup::step_aside();
    match supervisor.run() {
        Ok(()) => Ok(exit::OK),
        Err(error @ ServeError::Isolation) => Err(Failed { code: exit::ISOLATION, error: error.into() }),
        Err(error) => Err(error.into()),
    }
}

/// Serves the one client that started us, with everything below it our own and in a folder that goes with us.
fn serve_mcp(args: &McpArgs) -> Result<u8, Failed> {
    let ends = take_stdio().context("failed to take over standard input and output")?;
    let (mut config, _) = load(&args.flags(), args.config.as_deref())?;
    telemetry::init(&config.log_level, config.log_format)?;
    // Whoever started us is the tenant, and nothing of a daemon's that may run here is touched.
    config.api_keys.clear();
    config.librechat.jwt.keys.clear();
    config.listen.clear();
    config.uploads_dir = None;
    let scratch = Scratch::new()?;
    config.data_dir.clone_from(&scratch.0);
    let mut settings = supervisor::resolve::settings(&config, &search_path());
    settings.no_namespaces = stages::try_namespaces(&settings)?;
    with_code(Rules::load(&settings, 0, Shape::UserNamespace).map_err(anyhow::Error::from), exit::USAGE)?;
    supervise(config, settings, ends.into(), true)
}

/// Standard input and output as they were given. From here on nothing of ours, and no sandbox, has them as such: what is
/// printed by mistake goes to standard error and not between messages.
fn take_stdio() -> std::io::Result<[OwnedFd; 2]> {
    let input = std::io::stdin().as_fd().try_clone_to_owned()?;
    let output = std::io::stdout().as_fd().try_clone_to_owned()?;
    rustix::stdio::dup2_stdin(std::fs::File::open("/dev/null")?)?;
    rustix::stdio::dup2_stdout(std::io::stderr().as_fd())?;
    Ok([input, output])
}

fn run_one(args: &RunArgs) -> Result<u8, Failed> {
    let (config, _) = load(&args.settings.flags(), args.settings.config.as_deref())?;
    let mut code = String::new();
    let read = if args.reads_stdin() {
        std::io::stdin().read_to_string(&mut code)
    } else {
        std::fs::File::open(&args.file).and_then(|mut file| file.read_to_string(&mut code))
    };
    with_code(read.with_context(|| format!("failed to read {}", args.file.display())), exit::USAGE)?;
    telemetry::init("error", config.log_format)?;
    let scratch = Scratch::new()?;
    let mut settings = supervisor::resolve::settings(&config, &search_path());
    settings.state_dir = scratch.0.join("launcher");
    settings.spaces_under = None;
    stages::make_folders(&scratch.0, None)?;
    let language = match args.lang() {
        Lang::Py => Language::Python,
        Lang::Js => Language::JavaScript,
    };
    let timeout = args.timeout.map(Duration::try_from_secs_f64).transpose();
    let timeout = with_code(timeout.context("--timeout is not a number of seconds"), exit::USAGE)?;
    let _aside = cgroup::step_aside();
    Ok(run::one(&settings, &config, language, code, timeout)?)
}

fn examine(args: &DoctorArgs) -> Result<u8, Failed> {
    let (config, _) = load(&args.settings.flags(), args.settings.config.as_deref())?;
    telemetry::init("error", config.log_format)?;
    let scratch = Scratch::new()?;
    let mut settings = supervisor::resolve::settings(&config, &search_path());
    settings.state_dir = scratch.0.join("launcher");
    settings.spaces_under = None;
    stages::make_folders(&scratch.0, None)?;
    let _aside = cgroup::step_aside();
    let hello = run::measure(&settings)?;
    print(&if args.json {
        format!("{}\n", serde_json::to_string_pretty(hello.as_ref())?)
    } else {
        doctor::table(&hello.posture, Some(&hello))
    });
    let enough = hello.posture.posture >= config.require_isolation;
    Ok(if enough { exit::OK } else { exit::ISOLATION })
}

fn show_config(args: &ConfigArgs) -> Result<u8, Failed> {
    if args.template {
        print(&config::template());
        return Ok(exit::OK);
    }
    let (config, layers) = load(&args.serve.flags(), args.serve.settings.config.as_deref())?;
    let rows = config::effective(&layers, &config);
    print(&if args.json {
        let rows: Vec<_> = rows
            .iter()
            .map(|row| serde_json::json!({"key": row.key, "value": row.value, "source": row.source}))
            .collect();
        format!("{}\n", serde_json::to_string_pretty(&rows)?)
    } else {
        rows.iter().map(|row| format!("{:36} {:32} {}\n", row.key, row.value, row.source)).collect()
    });
    Ok(exit::OK)
}

#[expect(clippy::print_stdout, reason = "what was asked for")]
fn print(text: &str) {
    print!("{text}");
}

fn bench_fork(args: &BenchForkArgs) -> Result<u8, Failed> {
    let (config, _) = load(&args.settings.flags(), args.settings.config.as_deref())?;
    telemetry::init("error", config.log_format)?;
    stages::make_folders(&config.data_dir, None)?;
    let mut settings = supervisor::resolve::settings(&config, &search_path());
    settings.measure_forks = Some(args.rounds);
    Ok(run::forks(&settings)?)
}

/// The privileged stage: started by [`serve`], [`run_one`] and [`examine`].
fn launcher(_: &InternalArgs) -> Result<u8, Failed> {
    let inherited = sys::stage::inherited(2)?;
    let [daemon, memory] = <[_; 2]>::try_from(inherited).expect("two were asked for");
    let told: LauncherStart = serde_json::from_slice(&stages::read_memory(memory)?)?;
    telemetry::init(&told.log, config::LogFormat::Text)?;
    let started = start::start(&told.settings, daemon)?;
    match (started.launcher, told.settings.measure_forks) {
        (Some(launcher), None) => {
            launcher.run()?;
            Ok(exit::OK)
        }
        (Some(launcher), Some(rounds)) => {
            print(&format!("{}\n", serde_json::to_string(&launcher.measure_forks(rounds)?)?));
            Ok(exit::OK)
        }
        // It has been told by its greeting, as asked.
        (None, _) if told.settings.posture_floor == Posture::None => Ok(exit::OK),
        (None, _) => {
            print_error(&doctor::table(&started.report, None));
            Ok(supervisor::EXIT_ISOLATION)
        }
    }
}

#[expect(clippy::print_stderr, reason = "the operator must see why nothing starts")]
fn print_error(text: &str) {
    eprint!("{text}");
}

/// The HTTP stage: started by [`serve`].
fn daemon_stage(args: &InternalArgs) -> Result<u8, Failed> {
    let mut inherited = sys::stage::inherited(2 + args.listeners)?.into_iter();
    let (control, memory) = inherited.next().zip(inherited.next()).expect("two were asked for");
    let start: DaemonStart = serde_json::from_slice(&stages::read_memory(memory)?)?;
    telemetry::init(&start.config.log_level, start.config.log_format)?;
    daemon::run(start, control, inherited.collect())?;
    Ok(exit::OK)
}

/// A directory for one command; removed with this value.
struct Scratch(std::path::PathBuf);

impl Scratch {
    fn new() -> anyhow::Result<Scratch> {
        let path = std::env::temp_dir().join(format!("caisson-{}", uuid::Uuid::new_v4()));
        std::fs::create_dir(&path).with_context(|| format!("failed to make {}", path.display()))?;
        Ok(Scratch(path))
    }
}

impl Drop for Scratch {
    fn drop(&mut self) {
        // What is left is a temporary directory.
        let _ = std::fs::remove_dir_all(&self.0);
    }
}
