//! From written settings to [`Config`]: defaults of the host, ranges, words.
#![forbid(unsafe_code)]

use std::fmt::Display;
use std::net::{IpAddr, Ipv4Addr, SocketAddr};
use std::ops::RangeInclusive;
use std::path::PathBuf;
use std::time::Duration;

use super::keys::{self, ApiKey, WrittenKeys};
use super::librechat::{self, Beside};
use super::raw::{Raw, RawLimits};
use super::{
    ApiSurface, CodeBackend, CommandSettings, Config, ConfigError, EndpointConfig, JwtConfig, KernelSettings,
    Layers, Limits, LogFormat, McpSettings, Surroundings, jwt,
};
use crate::launcher::posture::Posture;

const MIB: u64 = 1024 * 1024;
const LISTEN_DEFAULT: [&str; 2] = ["127.0.0.1:18091", "127.0.0.1:8000"];
/// Most listening addresses.
const LISTENERS_MAX: usize = 16;

type Env<'a> = &'a dyn Fn(&str) -> Option<String>;

pub(super) fn resolve(layers: &Layers, env: Env<'_>, around: &Surroundings) -> Result<Config, ConfigError> {
    let raw = layers.merged()?;
    let mut notes = Vec::new();
    let api_keys = keys::digests(&written_keys(&raw), &mut notes)?;
    let jwt = jwt::resolve(&raw.jwt, &mut notes)?;
    let jupyter_endpoint = jupyter_endpoint(&raw, &api_keys, &jwt, &mut notes)?;
    let beside = Beside {
        log_requests: raw.log_requests.0,
        url_keys: raw.url_keys.0,
        cors_origins: raw.cors_allow_origins.clone(),
        jwt,
    };
    let below_base = |name: &str| raw.app_base_dir.as_deref().map(|base| PathBuf::from(base).join(name));
    let folder = |setting: &str, written: &Option<String>, name: &str| match written {
        Some(path) => absolute(setting, path).map(Some),
        None => Ok(below_base(name)),
    };
    if let Some(base) = &raw.app_base_dir {
        absolute("APP_BASE_DIR", base)?;
    }
    Ok(Config {
        listen: listen(&raw, layers)?,
        allow_open: raw.allow_open,
        hosts: hosts(&raw.hosts)?,
        origins: web_origins("origins", &raw.origins)?,
        api_keys,
        data_dir: data_dir(raw.data_dir.as_deref(), env, around)?,
        uploads_dir: folder("UPLOADS_DIR", &raw.uploads_dir, "uploads")?,
        notebooks_dir: folder("NOTEBOOKS_DIR", &raw.notebooks_dir, "notebooks")?,
        require_isolation: floor(raw.require_isolation.as_deref(), around)?,
        strict: raw.strict,
        policies_dir: raw.policies_dir.map(PathBuf::from),
        python_env: raw.python_env.map_or_else(|| around.python_env.clone(), PathBuf::from),
        service_user: raw.service_user,
        default_user: raw.default_user,
        python_version: version("PYTHON_VERSION", raw.python_version.or(raw.python_code_exec_version))?,
        node_version: version("NODE_VERSION", raw.node_version.or(raw.node_code_exec_version))?,
        code_backend: word("AIO_CODE_BACKEND", &raw.code_backend, &BACKENDS)?,
        code_sessions_max: count("code_sessions_max", raw.code_sessions_max, 1..=100_000)?,
        code_session_idle: seconds("code_session_idle_secs", raw.code_session_idle_secs, 1..=31_536_000)?,
        code_prewarm: count("code_prewarm", raw.code_prewarm, 0..=1_000)?,
        kernel: KernelSettings {
            sessions_max: count("kernel_sessions_max", raw.kernel_sessions_max, 1..=100_000)?,
            session_idle: seconds("kernel_session_idle_secs", raw.kernel_session_idle_secs, 1..=31_536_000)?,
            prewarm: count("kernel_prewarm", raw.kernel_prewarm, 0..=1_000)?,
        },
        commands: CommandSettings {
            sessions_max: count("bash_sessions_max", raw.bash_sessions_max, 1..=10_000)?,
            session_idle: seconds("bash_session_idle_secs", raw.bash_session_idle_secs, 1..=31_536_000)?,
            bash: bash_bin(raw.bash_bin)?,
        },
        jupyter_endpoint,
        slots_max: count("slots_max", raw.slots_max, 0..=10_000)?,
        api_surface: word(
            "AIO_API_SURFACE",
            &raw.api_surface,
            &[("full", ApiSurface::Full), ("v2", ApiSurface::V2)],
        )?,
        log_level: log_level(raw.log_level, raw.code_interpreter_log_level.as_deref())?,
        log_format: word(
            "log_format",
            &raw.log_format,
            &[("text", LogFormat::Text), ("json", LogFormat::Json)],
        )?,
        limits: limits(&raw.limits)?,
        librechat: librechat::resolve(&raw.librechat, &raw.rates, beside)?,
        mcp: McpSettings {
            sessions_max: count("mcp.sessions_max", raw.mcp.sessions_max, 1..=100_000)?,
            session_idle: seconds("mcp.session_idle_secs", raw.mcp.session_idle_secs, 1..=31_536_000)?,
        },
        notes,
    })
}

fn written_keys(raw: &Raw) -> WrittenKeys<'_> {
    WrittenKeys {
        single: [
            ("AIO_API_KEY", raw.api_key.as_deref()),
            ("SANDBOX_API_KEY", raw.sandbox_api_key.as_deref()),
            ("CODE_INTERPRETER_API_KEY", raw.code_interpreter_api_key.as_deref()),
        ],
        list: raw.api_keys.as_deref(),
    }
}

/// One server runs all Python under one account, so tenants would meet there.
fn jupyter_endpoint(
    raw: &Raw,
    keys: &[ApiKey],
    jwt: &JwtConfig,
    notes: &mut Vec<String>,
) -> Result<Option<EndpointConfig>, ConfigError> {
    let Some(url) = raw.jupyter_endpoint.as_deref().filter(|url| !url.is_empty()) else {
        if raw.jupyter_token.is_some() {
            notes.push("AIO_JUPYTER_TOKEN does nothing without AIO_JUPYTER_ENDPOINT".to_owned());
        }
        return Ok(None);
    };
    let endpoint = EndpointConfig::parse(url, raw.jupyter_token.as_deref())?;
    if keys.iter().any(|key| key.tenant != keys[0].tenant) || !jwt.keys.is_empty() {
        return Err(ConfigError::new(
            "AIO_JUPYTER_ENDPOINT: with more than one tenant it would be shared between them",
            "configure one tenant, or unset AIO_JUPYTER_ENDPOINT",
        ));
    }
    if endpoint.leaves_machine() {
        notes.push(format!(
            "AIO_JUPYTER_ENDPOINT is {}: its token and all code leave this machine unencrypted",
            endpoint.shown()
        ));
    }
    Ok(Some(endpoint))
}

/// The list as written, its first address changed by AIO_HOST and AIO_PORT unless a flag or
/// CAISSON_LISTEN, which say more, wrote it.
fn listen(raw: &Raw, layers: &Layers) -> Result<Vec<SocketAddr>, ConfigError> {
    let written = raw.listen.clone().unwrap_or_else(|| LISTEN_DEFAULT.map(str::to_owned).to_vec());
    let mut addresses = written.iter().map(|text| address(text)).collect::<Result<Vec<_>, _>>()?;
    if addresses.is_empty() || addresses.len() > LISTENERS_MAX {
        let problem = format!("listen: {} addresses, expected 1 to {LISTENERS_MAX}", addresses.len());
        return Err(ConfigError::new(problem, "write it as 127.0.0.1:18091,127.0.0.1:8000"));
    }
    if !layers.listen_is_explicit() {
        if let Some(host) = &raw.aio_host {
            addresses[0].set_ip(ip("AIO_HOST", host)?);
        }
        if let Some(port) = raw.aio_port {
            addresses[0].set_port(port);
        }
        // Where there is one only it is that one's, unless AIO_PORT has spoken.
        let second = match addresses.len() {
            1 if raw.aio_port.is_none() => addresses.first_mut(),
            _ => addresses.get_mut(1),
        };
        if let Some((address, port)) = second.zip(raw.port) {
            address.set_port(port);
        }
    }
    let mut unique = Vec::with_capacity(addresses.len());
    for address in addresses {
        // Port 0 asks for any free one, so two of them are two listeners.
        if address.port() == 0 || !unique.contains(&address) {
            unique.push(address);
        }
    }
    Ok(unique)
}

fn address(text: &str) -> Result<SocketAddr, ConfigError> {
    let resolved = match text.strip_prefix("localhost:") {
        Some(port) => port.parse().ok().map(|port| SocketAddr::from((Ipv4Addr::LOCALHOST, port))),
        None => text.parse().ok(),
    };
    resolved.ok_or_else(|| {
        ConfigError::new(
            format!("listen: `{text}` is not an address and port"),
            "write it as 127.0.0.1:8000 or [::1]:8000; names other than localhost are not resolved",
        )
    })
}

fn ip(setting: &str, text: &str) -> Result<IpAddr, ConfigError> {
    if text == "localhost" {
        return Ok(Ipv4Addr::LOCALHOST.into());
    }
    let bare = text.strip_prefix('[').and_then(|text| text.strip_suffix(']')).unwrap_or(text);
    bare.parse().map_err(|_| {
        ConfigError::new(
            format!("{setting}: `{text}` is not an address"),
            "write it as 127.0.0.1, 0.0.0.0 or ::1; names other than localhost are not resolved",
        )
    })
}

fn hosts(written: &[String]) -> Result<Vec<String>, ConfigError> {
    let fits = |host: &&String| !host.is_empty() && !host.contains(['/', '@', '*', ' ']);
    match written.iter().find(|host| !fits(host)) {
        None => Ok(written.iter().map(|host| host.to_ascii_lowercase()).collect()),
        Some(host) => Err(ConfigError::new(
            format!("hosts: `{host}` is not a host name"),
            "write the name clients use, without scheme or path: caisson or sandbox.internal",
        )),
    }
}

/// Origins as a browser sends them.
pub(super) fn web_origins(setting: &str, written: &[String]) -> Result<Vec<String>, ConfigError> {
    let authority = |origin: &str| {
        let rest = origin.strip_prefix("http://").or_else(|| origin.strip_prefix("https://"))?;
        (!rest.is_empty() && !rest.contains(['/', '?', '#', '@', '*'])).then_some(())
    };
    match written.iter().find(|origin| authority(origin).is_none()) {
        None => Ok(written.iter().map(|origin| origin.to_ascii_lowercase()).collect()),
        Some(origin) => Err(ConfigError::new(
            format!("{setting}: `{origin}` is not a web origin"),
            "write scheme, host and port as a browser sends them: http://localhost:3000",
        )),
    }
}

fn data_dir(written: Option<&str>, env: Env<'_>, around: &Surroundings) -> Result<PathBuf, ConfigError> {
    let set = |name: &str| env(name).filter(|value| value.starts_with('/')).map(PathBuf::from);
    let found = match written {
        Some(path) => Some(PathBuf::from(path)),
        None if around.root => Some(PathBuf::from("/var/lib/caisson")),
        None => set("XDG_DATA_HOME")
            .map(|base| base.join("caisson"))
            .or_else(|| set("HOME").map(|home| home.join(".local/share/caisson"))),
    };
    found.ok_or_else(|| {
        ConfigError::new(
            "data_dir: neither XDG_DATA_HOME nor HOME is set",
            "pass --data-dir DIR or set CAISSON_DATA_DIR",
        )
    })
}

fn floor(written: Option<&str>, around: &Surroundings) -> Result<Posture, ConfigError> {
    match written {
        None if around.root => Ok(Posture::Full),
        None => Ok(Posture::Userns),
        Some(name) => Posture::parse(name).ok_or_else(|| {
            ConfigError::new(
                format!("require_isolation: `{name}` is not a posture"),
                "use full, root, userns, uid or process",
            )
        }),
    }
}

fn version(setting: &str, written: Option<String>) -> Result<Option<String>, ConfigError> {
    let fits = |text: &str| text.len() <= 32 && text.bytes().all(|b| b.is_ascii_alphanumeric() || b == b'.');
    match written {
        Some(text) if !fits(&text) => Err(ConfigError::new(
            format!("{setting}: `{text}` is not a version"),
            "write it as 3.12 or 20.11.1",
        )),
        other => Ok(other),
    }
}

/// Words of `code_backend`.
const BACKENDS: [(&str, CodeBackend); 3] =
    [("auto", CodeBackend::Auto), ("native", CodeBackend::Native), ("kernel", CodeBackend::Kernel)];

fn bash_bin(written: Option<String>) -> Result<Option<String>, ConfigError> {
    match written {
        Some(path) if !path.starts_with('/') || path.contains('\0') => Err(ConfigError::new(
            format!("AIO_BASH_BIN: `{path}` is not an absolute path"),
            "write the path that programs inside the sandbox see, such as /bin/bash",
        )),
        other => Ok(other),
    }
}

const LOG_LEVEL_DEFAULT: &str = "info";
/// Python's names of levels.
const LOG_LEVELS: [(&str, &str); 8] = [
    ("NOTSET", "trace"),
    ("DEBUG", "debug"),
    ("INFO", "info"),
    ("WARNING", "warn"),
    ("WARN", "warn"),
    ("ERROR", "error"),
    ("CRITICAL", "error"),
    ("FATAL", "error"),
];

fn log_level(written: Option<String>, in_python: Option<&str>) -> Result<String, ConfigError> {
    let written = match (written, in_python) {
        (Some(written), _) => written,
        (None, Some(name)) => word("LOG_LEVEL", &name.trim().to_ascii_uppercase(), &LOG_LEVELS)?.to_owned(),
        (None, None) => LOG_LEVEL_DEFAULT.to_owned(),
    };
    match crate::telemetry::check_filter(&written) {
        Ok(()) => Ok(written),
        Err(reason) => Err(ConfigError::new(
            format!("AIO_RUST_LOG_LEVEL: {reason}"),
            "use error, warn, info, debug, trace or a filter such as caisson=debug",
        )),
    }
}

fn limits(raw: &RawLimits) -> Result<Limits, ConfigError> {
    let limits = Limits {
        memory_bytes: within("limits.memory_bytes", raw.memory_bytes, 32 * MIB..=1 << 50, "bytes")?,
        pids: within("limits.pids", raw.pids, 4..=1_000_000, "processes")? as u32,
        cpu_cores: within("limits.cpu_cores", raw.cpu_cores, 0.01..=4096.0, "cores")?,
        space_bytes: within("limits.space_bytes", raw.space_bytes, MIB..=1 << 50, "bytes")?,
        space_inodes: within("limits.space_inodes", raw.space_inodes, 64..=1 << 40, "files")?,
        spaces_max: within("limits.spaces_max", raw.spaces_max, 1..=1 << 32, "spaces")?,
        shm_bytes: within("limits.shm_bytes", raw.shm_bytes, MIB..=1 << 50, "bytes")?,
        shm_inodes: within("limits.shm_inodes", raw.shm_inodes, 16..=1 << 40, "files")?,
        nofile: within("limits.nofile", raw.nofile, 64..=1_048_576, "descriptors")? as u32,
        output_chars_max: count("limits.output_chars_max", raw.output_chars_max, 1_000..=1_000_000_000)?,
        timeout_default: seconds("limits.timeout_default_secs", raw.timeout_default_secs, 1..=86_400)?,
        timeout_max: seconds("limits.timeout_max_secs", raw.timeout_max_secs, 1..=86_400)?,
        grace: seconds("limits.grace_secs", raw.grace_secs, 0..=300)?,
        cells_running_max: count("limits.cells_running_max", raw.cells_running_max, 1..=100_000)?,
    };
    if limits.timeout_default > limits.timeout_max {
        return Err(ConfigError::new(
            format!(
                "limits.timeout_default_secs: {} is more than limits.timeout_max_secs, {}",
                raw.timeout_default_secs, raw.timeout_max_secs
            ),
            "raise the maximum or lower the default",
        ));
    }
    Ok(limits)
}

fn absolute(setting: &str, path: &str) -> Result<PathBuf, ConfigError> {
    if path.starts_with('/') && !path.contains('\0') {
        return Ok(PathBuf::from(path));
    }
    Err(ConfigError::new(
        format!("{setting}: `{path}` is not an absolute path"),
        "write it from the root, such as /var/lib/caisson/uploads",
    ))
}

pub(super) fn word<T: Copy>(setting: &str, written: &str, known: &[(&str, T)]) -> Result<T, ConfigError> {
    known.iter().find(|(name, _)| *name == written).map(|(_, value)| *value).ok_or_else(|| {
        let names: Vec<&str> = known.iter().map(|(name, _)| *name).collect();
        ConfigError::new(
            format!("{setting}: `{written}` is not known"),
            format!("use {}", names.join(" or ")),
        )
    })
}

pub(super) fn within<T: PartialOrd + Display + Copy>(
    setting: &str,
    value: T,
    range: RangeInclusive<T>,
    unit: &str,
) -> Result<T, ConfigError> {
    if range.contains(&value) {
        return Ok(value);
    }
    Err(ConfigError::new(
        format!("{setting}: {value} is out of range"),
        format!("use {} to {} {unit}", range.start(), range.end()),
    ))
}

pub(super) fn count(setting: &str, value: u64, range: RangeInclusive<u64>) -> Result<usize, ConfigError> {
    within(setting, value, range, "").map(|value| value as usize).map_err(|mut error| {
        error.hint.truncate(error.hint.trim_end().len());
        error
    })
}

pub(super) fn seconds(
    setting: &str,
    value: u64,
    range: RangeInclusive<u64>,
) -> Result<Duration, ConfigError> {
    within(setting, value, range, "seconds").map(Duration::from_secs)
}
