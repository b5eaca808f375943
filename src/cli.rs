//! The command line: clap types, and how they become settings. Nothing here acts.
#![forbid(unsafe_code)]

use std::path::PathBuf;

use clap::{Args, Parser, Subcommand, ValueEnum};

use crate::config::Flags;

/// Documented exit codes.
pub mod exit {
    pub const OK: u8 = 0;
    /// Anything without a code of its own.
    pub const FAILED: u8 = 1;
    /// Bad arguments or settings. clap uses the same number.
    pub const USAGE: u8 = 2;
    /// The host enforces less than `--require-isolation` asks for.
    pub const ISOLATION: u8 = 3;
    /// An address could not be bound.
    pub const BIND: u8 = 4;
}

const AFTER_HELP: &str = "\
Examples:
  caisson serve                                 loopback only, ports 18091 and 8000, no key
  AIO_API_KEY=... caisson serve --listen 0.0.0.0:8000
  caisson serve --config /etc/caisson.toml
  caisson run --lang js hello.js                one cell, confined, without a server
  echo 'print(1)' | caisson run -
  caisson mcp                                   for Claude Desktop and its like; see docs/mcp.md
  caisson doctor                                what this host can enforce, and what to grant
  caisson config --template > caisson.toml

Keys:
  AIO_API_KEY (also SANDBOX_API_KEY, CODE_INTERPRETER_API_KEY) is the key of the tenant `default`;
  CODE_INTERPRETER_API_KEYS=\"a=KEYA,b=KEYB\" gives each tenant one. They come from the environment or
  the settings file, never from the command line, where other users of the machine could read them.
  Clients send `Authorization: Bearer KEY` or `x-api-key: KEY`.

Settings:
  a flag wins over a variable, a variable over the file, the file over the default.
  `caisson config` shows every value and where it came from.

Exit codes:
  0  done
  1  failed
  2  bad arguments or settings
  3  the host enforces less isolation than required
  4  an address could not be bound";

/// Runs Python, JavaScript and other languages from strangers, confined by the Linux kernel.
#[derive(Clone, Debug, Parser)]
#[command(name = "caisson", version, after_help = AFTER_HELP, max_term_width = 110)]
pub struct Cli {
    #[command(subcommand)]
    pub command: Command,
}

#[derive(Clone, Debug, Subcommand)]
pub enum Command {
    /// Serve the HTTP APIs.
    Serve(ServeArgs),
    /// Run one file as a cell, confined as the server would, and print what it printed.
    Run(RunArgs),
    /// Serve the Model Context Protocol on standard input and output, for the one client that started it.
    Mcp(McpArgs),
    /// Show which layers of isolation this host enforces, and what to grant for the others.
    Doctor(DoctorArgs),
    /// Show every setting, its value and where it came from.
    Config(ConfigArgs),
    /// Measure forks: confined ones against bare ones of the same zygote. For `make bench`.
    #[command(hide = true)]
    BenchFork(BenchForkArgs),
    /// The privileged side. Started by `serve` with a socket inherited; of no use by hand.
    #[command(hide = true)]
    Launcher(InternalArgs),
    /// The HTTP side. Started by `serve` with its listeners inherited; of no use by hand.
    #[command(hide = true)]
    Daemon(InternalArgs),
}

/// Settings that several commands take.
#[derive(Args, Clone, Debug, Default)]
pub struct SettingsArgs {
    /// Settings file (TOML). `caisson config --template` prints one.
    #[arg(long, value_name = "FILE")]
    pub config: Option<PathBuf>,
    /// Where spaces, records and the store lie.
    #[arg(long, value_name = "DIR")]
    pub data_dir: Option<String>,
    /// Refuse to start below this posture.
    #[arg(long, value_name = "POSTURE", value_parser = ["full", "root", "userns", "uid", "process"])]
    pub require_isolation: Option<String>,
}

#[derive(Args, Clone, Debug, Default)]
pub struct ServeArgs {
    #[command(flatten)]
    pub settings: SettingsArgs,
    /// Address and port to listen on; repeatable. Anything but loopback needs a key.
    #[arg(long, value_name = "ADDRESS:PORT")]
    pub listen: Vec<String>,
    /// Serve beyond loopback without a key: whoever reaches the port can run code.
    #[arg(long)]
    pub allow_open: bool,
}

/// Languages of `caisson run`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum Lang {
    #[value(alias = "python", alias = "python3")]
    Py,
    #[value(alias = "javascript", alias = "node")]
    Js,
}

#[derive(Args, Clone, Debug)]
pub struct RunArgs {
    #[command(flatten)]
    pub settings: SettingsArgs,
    /// Language; by the file's ending when absent, else Python.
    #[arg(long, value_enum)]
    pub lang: Option<Lang>,
    /// Seconds until the run is ended.
    #[arg(long, value_name = "SECONDS")]
    pub timeout: Option<f64>,
    /// The program, or `-` for standard input.
    #[arg(value_name = "FILE")]
    pub file: PathBuf,
}

#[derive(Args, Clone, Debug, Default)]
pub struct McpArgs {
    /// Settings file (TOML). `caisson config --template` prints one.
    #[arg(long, value_name = "FILE")]
    pub config: Option<PathBuf>,
    /// Refuse to start below this posture.
    #[arg(long, value_name = "POSTURE", value_parser = ["full", "root", "userns", "uid", "process"])]
    pub require_isolation: Option<String>,
}

impl McpArgs {
    pub fn flags(&self) -> Flags {
        Flags { require_isolation: self.require_isolation.clone(), ..Flags::default() }
    }
}

impl RunArgs {
    /// The language asked for, or the one the file's ending says.
    pub fn lang(&self) -> Lang {
        let ending = self.file.extension().and_then(|ending| ending.to_str());
        self.lang.unwrap_or(match ending {
            Some("js" | "mjs" | "cjs") => Lang::Js,
            _ => Lang::Py,
        })
    }

    pub fn reads_stdin(&self) -> bool {
        self.file.as_os_str() == "-"
    }
}

#[derive(Args, Clone, Debug, Default)]
pub struct DoctorArgs {
    #[command(flatten)]
    pub settings: SettingsArgs,
    /// Print the table as JSON.
    #[arg(long)]
    pub json: bool,
}

#[derive(Args, Clone, Debug, Default)]
pub struct ConfigArgs {
    #[command(flatten)]
    pub serve: ServeArgs,
    /// Print a settings file with every key commented out instead.
    #[arg(long)]
    pub template: bool,
    /// Print the table as JSON.
    #[arg(long, conflicts_with = "template")]
    pub json: bool,
}

#[derive(Args, Clone, Debug)]
pub struct BenchForkArgs {
    #[command(flatten)]
    pub settings: SettingsArgs,
    /// Forks of each kind.
    #[arg(long, value_name = "N", default_value_t = 100, value_parser = clap::value_parser!(u32).range(1..=100_000))]
    pub rounds: u32,
}

/// Everything the internal stages need comes over inherited descriptors.
#[derive(Args, Clone, Debug, Default)]
pub struct InternalArgs {
    /// Listeners among the inherited descriptors.
    #[arg(default_value_t = 0)]
    pub listeners: usize,
}

impl SettingsArgs {
    pub fn flags(&self) -> Flags {
        Flags {
            data_dir: self.data_dir.clone(),
            require_isolation: self.require_isolation.clone(),
            ..Flags::default()
        }
    }
}

impl ServeArgs {
    pub fn flags(&self) -> Flags {
        Flags { listen: self.listen.clone(), allow_open: self.allow_open, ..self.settings.flags() }
    }
}

#[cfg(test)]
mod tests {
    use clap::CommandFactory;

    use super::*;

    fn parse(args: &[&str]) -> Result<Cli, clap::Error> {
        Cli::try_parse_from(std::iter::once(&"caisson").chain(args))
    }

    #[test]
    fn the_definition_is_consistent() {
        Cli::command().debug_assert();
    }

    #[test]
    fn serve_flags_become_settings() {
        let cli =
            parse(&["serve", "--listen", "127.0.0.1:1", "--listen", "[::1]:2", "--allow-open"]).unwrap();
        let Command::Serve(args) = cli.command else { panic!("serve was asked for") };
        let flags = args.flags();
        assert_eq!(flags.listen, ["127.0.0.1:1", "[::1]:2"]);
        assert!(flags.allow_open);
    }

    #[test]
    fn an_unknown_posture_is_a_usage_error() {
        let error = parse(&["doctor", "--require-isolation", "strong"]).unwrap_err();
        assert_eq!(error.exit_code(), i32::from(exit::USAGE));
    }

    #[test]
    fn run_takes_its_language_from_the_ending() {
        let lang = |args: &[&str]| match parse(args).unwrap().command {
            Command::Run(args) => args.lang(),
            _ => panic!("run was asked for"),
        };
        assert_eq!(lang(&["run", "a.mjs"]), Lang::Js);
        assert_eq!(lang(&["run", "-"]), Lang::Py);
        assert_eq!(lang(&["run", "--lang", "js", "-"]), Lang::Js);
    }

    #[test]
    fn no_flag_takes_a_key() {
        let help = Cli::command().render_long_help().to_string();
        assert!(help.contains("AIO_API_KEY"));
        assert!(parse(&["serve", "--api-key", "k"]).is_err());
    }

    #[test]
    fn help_does_not_show_the_internal_stages() {
        let help = Cli::command().render_help().to_string();
        assert!(!help.contains("launcher") && !help.contains("daemon") && !help.contains("bench"));
    }
}
