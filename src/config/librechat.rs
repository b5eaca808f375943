//! Settings of the code interpreter API, under the names that its images and clients know.
#![forbid(unsafe_code)]

use std::ops::RangeInclusive;
use std::time::Duration;

use serde::{Deserialize, Serialize};

use super::raw::{RawLibreChat, RawRates};
use super::resolve::{count, seconds, web_origins, within};
use super::{ConfigError, JwtConfig};

/// The origin that stands for every one.
pub const ANY_ORIGIN: &str = "*";
/// LibreChat trusts a pointer to a file for 23 hours, so files live at least a day.
const SESSION_TTL_SECS_LEAST: u64 = 86_400;
const YEAR_SECS: u64 = 31_536_000;
const MIB: u64 = 1024 * 1024;

/// The resolved settings of that API.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct LibreChatConfig {
    /// Kernels of a tenant before the one that was idle longest is stopped.
    pub sessions_max: usize,
    /// Wall clock of one run, and the most a request may ask for.
    pub execution_timeout: Duration,
    /// Memory of a run that is not a kernel's; `None`: what every sandbox has.
    pub subprocess_memory_mib_max: Option<u64>,
    /// Processor time of such a run, in seconds.
    pub subprocess_cpu_secs_max: Option<u64>,
    /// Whether Bash scripts begin with `set -euo pipefail`.
    pub bash_strict: bool,
    /// Whether every request is logged with its headers and the beginning of its JSON.
    pub log_requests: bool,
    /// Whether `No module named` is followed by a hint.
    pub pip_hints: bool,
    /// Whether `/k/<key>/` in front of a path is a credential.
    pub url_keys: bool,
    /// Largest uploaded or generated file.
    pub file_bytes_max: u64,
    /// Longest stdout, and as long a stderr.
    pub output_bytes_max: u64,
    /// Files that one run may generate.
    pub output_files_max: usize,
    /// How long a session's files live after their last write or run.
    pub session_ttl: Duration,
    /// Web origins that may read answers; [`ANY_ORIGIN`] among them is all of them.
    pub cors_origins: Vec<String>,
    pub rates: Rates,
    pub jwt: JwtConfig,
}

/// Most requests of one user within a window.
#[derive(Copy, Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Rate {
    /// 0: no limit.
    pub requests_max: u32,
    pub window: Duration,
}

/// The windows of section 3 of the contract.
#[derive(Copy, Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Rates {
    pub exec: Rate,
    pub upload: Rate,
    pub download: Rate,
    pub listing: Rate,
}

/// What lies outside of the API's own table of settings.
pub(super) struct Beside {
    pub(super) log_requests: bool,
    pub(super) url_keys: bool,
    pub(super) cors_origins: Vec<String>,
    pub(super) jwt: JwtConfig,
}

pub(super) fn resolve(
    raw: &RawLibreChat,
    rates: &RawRates,
    beside: Beside,
) -> Result<LibreChatConfig, ConfigError> {
    let memory = optional(
        "SUBPROCESS_MAX_MEMORY_MB",
        raw.subprocess_memory_mib_max,
        32..=MIB * MIB,
        "MiB, or 0 for no limit",
    )?;
    let cpu = optional(
        "SUBPROCESS_MAX_CPU_SECONDS",
        raw.subprocess_cpu_secs_max,
        1..=86_400,
        "seconds, or 0 for no limit",
    )?;
    Ok(LibreChatConfig {
        sessions_max: count("MAX_SESSIONS", raw.sessions_max, 1..=100_000)?,
        execution_timeout: seconds("EXECUTION_TIMEOUT", raw.execution_timeout_secs, 1..=86_400)?,
        subprocess_memory_mib_max: memory,
        subprocess_cpu_secs_max: cpu,
        bash_strict: raw.bash_strict.0,
        log_requests: beside.log_requests,
        pip_hints: raw.pip_hints.0,
        url_keys: beside.url_keys,
        file_bytes_max: within("MAX_FILE_SIZE", raw.file_bytes_max, 1..=1 << 50, "bytes")?,
        output_bytes_max: within("MAX_OUTPUT_BYTES", raw.output_bytes_max, 1024..=1 << 30, "bytes")?,
        output_files_max: count("MAX_OUTPUT_FILES", raw.output_files_max, 0..=10_000)?,
        session_ttl: seconds(
            "SESSION_TTL_SECONDS",
            raw.session_ttl_secs,
            SESSION_TTL_SECS_LEAST..=10 * YEAR_SECS,
        )?,
        cors_origins: cors_origins(&beside.cors_origins)?,
        rates: Rates {
            exec: rate("EXEC", rates.exec_requests_max, rates.exec_window_ms)?,
            upload: rate("UPLOAD", rates.upload_requests_max, rates.upload_window_ms)?,
            download: rate("DOWNLOAD", rates.download_requests_max, rates.download_window_ms)?,
            listing: rate("FETCH", rates.listing_requests_max, rates.listing_window_ms)?,
        },
        jwt: beside.jwt,
    })
}

/// 0 is off.
fn optional(
    setting: &str,
    value: u64,
    range: RangeInclusive<u64>,
    unit: &str,
) -> Result<Option<u64>, ConfigError> {
    if value == 0 {
        return Ok(None);
    }
    within(setting, value, range, unit).map(Some)
}

fn rate(name: &str, requests_max: u64, window_ms: u64) -> Result<Rate, ConfigError> {
    let requests_max =
        within(&format!("{name}_MAX_REQUESTS"), requests_max, 0..=1_000_000, "requests, 0 for no limit")?;
    let window_ms = within(&format!("{name}_LIMIT_WINDOW"), window_ms, 1000..=86_400_000, "milliseconds")?;
    Ok(Rate { requests_max: requests_max as u32, window: Duration::from_millis(window_ms) })
}

fn cors_origins(written: &[String]) -> Result<Vec<String>, ConfigError> {
    let named: Vec<String> = written.iter().filter(|origin| *origin != ANY_ORIGIN).cloned().collect();
    let mut origins = web_origins("CORS_ALLOW_ORIGINS", &named)?;
    if named.len() < written.len() {
        origins.push(ANY_ORIGIN.to_owned());
    }
    Ok(origins)
}
