//! Settings as they are written: one struct holds name, meaning, variable and default of every key.
//!
//! The template of `caisson config --template`, the reader of the environment and the list of known
//! keys all come from here, so a key cannot exist in one of them only.
#![forbid(unsafe_code)]

use confique::Config;
use serde::Serialize;

use super::flag::Flag;

/// Settings of the caisson daemon. A flag wins over a variable, a variable over this file, this file
/// over the default.
#[derive(Debug, Config)]
#[config(layer_attr(derive(Debug, Clone, Serialize)))]
#[config(layer_attr(serde(deny_unknown_fields)))]
pub(crate) struct Raw {
    /// Addresses to listen on, `address:port`. Default: 127.0.0.1:18091 and 127.0.0.1:8000.
    /// Anything but loopback needs an API key or `allow_open`. AIO_HOST and AIO_PORT change the first
    /// address of this list. Flag: `--listen`, repeatable.
    #[config(env = "CAISSON_LISTEN")]
    pub(crate) listen: Option<Vec<String>>,

    /// Host of the first listening address, as the AIO images name it.
    #[config(env = "AIO_HOST")]
    pub(crate) aio_host: Option<String>,

    /// Port of the first listening address, as the AIO images name it.
    #[config(env = "AIO_PORT")]
    pub(crate) aio_port: Option<u16>,

    /// Port of the second listening address, as the code interpreter images name it.
    #[config(env = "PORT")]
    pub(crate) port: Option<u16>,

    /// Serve beyond loopback although no API key is configured. Whoever reaches the port can then run
    /// code. Flag: `--allow-open`.
    #[config(env = "CAISSON_ALLOW_OPEN", default = false)]
    pub(crate) allow_open: bool,

    /// Host names besides loopback that clients may use while no key is configured, such as the
    /// service name of a compose file.
    #[config(env = "CAISSON_HOSTS", default = [])]
    pub(crate) hosts: Vec<String>,

    /// Web origins besides the daemon's own that may call while no key is configured, such as
    /// `http://localhost:3000`.
    #[config(env = "CAISSON_ORIGINS", default = [])]
    pub(crate) origins: Vec<String>,

    /// Web origins that may read answers once a key is configured: `*`, or a list. Without a key only those
    /// listed by name may, here or under `origins`.
    #[config(env = "CORS_ALLOW_ORIGINS", default = ["*"])]
    pub(crate) cors_allow_origins: Vec<String>,

    /// API key of the tenant `default`. Any key closes every route that is not public.
    #[config(env = "AIO_API_KEY")]
    pub(crate) api_key: Option<String>,

    /// The same under the name the sandbox images use.
    #[config(env = "SANDBOX_API_KEY")]
    pub(crate) sandbox_api_key: Option<String>,

    /// The same under the name the code interpreter images use.
    #[config(env = "CODE_INTERPRETER_API_KEY")]
    pub(crate) code_interpreter_api_key: Option<String>,

    /// Tenants and their keys: `a=KEYA,b=KEYB`. Each tenant has files, sessions and limits of its own.
    #[config(env = "CODE_INTERPRETER_API_KEYS")]
    pub(crate) api_keys: Option<String>,

    /// Takes a key from the URL as well: `http://caisson:8000/k/KEY/v1` as a client's base URL. For clients
    /// that send no header; whatever stands between them and us may log the key.
    #[config(env = "CODE_INTERPRETER_URL_KEYS", default = false)]
    pub(crate) url_keys: Flag,

    /// Where spaces, records and the store lie. Default: /var/lib/caisson as root, else
    /// $XDG_DATA_HOME/caisson or ~/.local/share/caisson. Flag: `--data-dir`.
    #[config(env = "CAISSON_DATA_DIR")]
    pub(crate) data_dir: Option<String>,

    /// The folder under which the spaces of sandboxes lie; their layout is ours. Default: `uploads` below
    /// APP_BASE_DIR when that is set, else inside the data directory.
    #[config(env = "UPLOADS_DIR")]
    pub(crate) uploads_dir: Option<String>,

    /// Reserved: nothing is kept there. Default: `notebooks` below APP_BASE_DIR.
    #[config(env = "NOTEBOOKS_DIR")]
    pub(crate) notebooks_dir: Option<String>,

    /// The folder that the two above are below when they are not set.
    #[config(env = "APP_BASE_DIR")]
    pub(crate) app_base_dir: Option<String>,

    /// The least isolation to start with: full, root, userns, uid or process. Default: full as root,
    /// else userns. Flag: `--require-isolation`.
    #[config(env = "CAISSON_REQUIRE_ISOLATION")]
    pub(crate) require_isolation: Option<String>,

    /// Start every interpreter by a fresh exec instead of a fork: own address-space layout and hash
    /// seed, at the price of speed.
    #[config(env = "CAISSON_STRICT", default = false)]
    pub(crate) strict: bool,

    /// A folder that stands in for the built-in policies.
    #[config(env = "CAISSON_POLICIES_DIR")]
    pub(crate) policies_dir: Option<String>,

    /// The product's Python environment. Default: ../runtime/python beside the executable when it
    /// exists, else /opt/caisson/python.
    #[config(env = "CAISSON_PYTHON_ENV")]
    pub(crate) python_env: Option<String>,

    /// The account the daemon runs under when it was started as root.
    #[config(env = "CAISSON_SERVICE_USER", default = "caisson")]
    pub(crate) service_user: String,

    /// Account of the sandbox that runs code when a request names none. Default: sandbox.
    #[config(env = "AIO_DEFAULT_USER")]
    pub(crate) default_user: Option<String>,

    /// Which Python the native backend starts, such as 3.12. Default: the product's own.
    #[config(env = "PYTHON_VERSION")]
    pub(crate) python_version: Option<String>,

    /// The same under its other name; PYTHON_VERSION wins.
    #[config(env = "PYTHON_CODE_EXEC_VERSION")]
    pub(crate) python_code_exec_version: Option<String>,

    /// Which Node the native backend starts, such as 20. Default: the first on PATH.
    #[config(env = "NODE_VERSION")]
    pub(crate) node_version: Option<String>,

    /// The same under its other name; NODE_VERSION wins.
    #[config(env = "NODE_CODE_EXEC_VERSION")]
    pub(crate) node_code_exec_version: Option<String>,

    /// What runs Python on the code routes: auto, native or kernel. auto is an endpoint that answers, else a
    /// kernel if ipykernel can be imported, else native.
    #[config(env = "AIO_CODE_BACKEND", default = "auto")]
    pub(crate) code_backend: String,

    /// Sessions a tenant may have at once, Python and JavaScript together.
    #[config(env = "AIO_CODE_MAX_SESSIONS", default = 20)]
    pub(crate) code_sessions_max: u64,

    /// Seconds without a run after which a session is closed.
    #[config(env = "AIO_CODE_SESSION_TIMEOUT_SECS", default = 1800)]
    pub(crate) code_session_idle_secs: u64,

    /// Interpreters started ahead and reported as `prewarmed`. Slots are separate: see slots_max.
    #[config(env = "AIO_CODE_PREWARM", default = 0)]
    pub(crate) code_prewarm: u64,

    /// Kernel sessions a tenant may have at once.
    #[config(env = "AIO_KERNEL_MAX_SESSIONS", default = 5)]
    pub(crate) kernel_sessions_max: u64,

    /// Seconds without a run after which a kernel session is closed.
    #[config(env = "AIO_KERNEL_SESSION_TIMEOUT_SECS", default = 300)]
    pub(crate) kernel_session_idle_secs: u64,

    /// Kernels started ahead and reported as `prewarmed`. Slots are separate: see slots_max.
    #[config(env = "AIO_KERNEL_PREWARM", default = 0)]
    pub(crate) kernel_prewarm: u64,

    /// The bash of commands, as a path inside the sandbox. Default: the first on its PATH.
    #[config(env = "AIO_BASH_BIN")]
    pub(crate) bash_bin: Option<String>,

    /// Command sessions a tenant may have at once, and as many shells; one that is idle makes room for a new one.
    #[config(env = "AIO_BASH_MAX_SESSIONS", default = 50)]
    pub(crate) bash_sessions_max: u64,

    /// Seconds without a command after which such a session is closed.
    #[config(env = "AIO_BASH_SESSION_TIMEOUT_SECS", default = 3600)]
    pub(crate) bash_session_idle_secs: u64,

    /// A Jupyter server that runs Python when it answers, such as http://127.0.0.1:8888; its token may
    /// stand in the query. None of our confinement holds there, and it serves one tenant only.
    #[config(env = "AIO_JUPYTER_ENDPOINT")]
    pub(crate) jupyter_endpoint: Option<String>,

    /// Token of that server, where the URL holds none.
    #[config(env = "AIO_JUPYTER_TOKEN")]
    pub(crate) jupyter_token: Option<String>,

    /// Sandboxes kept ready ahead of demand; 0 switches them off.
    #[config(env = "CAISSON_SLOTS_MAX", default = 24)]
    pub(crate) slots_max: u64,

    /// Which routes exist: full, or v2, which hides the AIO routes under /v1.
    #[config(env = "AIO_API_SURFACE", default = "full")]
    pub(crate) api_surface: String,

    /// What is logged: error, warn, info, debug, trace, or a filter such as caisson=debug. Default: info.
    #[config(env = "AIO_RUST_LOG_LEVEL")]
    pub(crate) log_level: Option<String>,

    /// The same as the code interpreter images name it, in Python's words: DEBUG, INFO, WARNING, ERROR,
    /// CRITICAL. AIO_RUST_LOG_LEVEL wins.
    #[config(env = "LOG_LEVEL")]
    pub(crate) code_interpreter_log_level: Option<String>,

    /// Log every request: method, path, headers without keys, and the first 500 bytes of a JSON body.
    #[config(env = "LOG_REQUESTS", default = false)]
    pub(crate) log_requests: Flag,

    /// How it is logged: text or json.
    #[config(env = "CAISSON_LOG_FORMAT", default = "text")]
    pub(crate) log_format: String,

    #[config(nested)]
    pub(crate) limits: RawLimits,

    #[config(nested)]
    pub(crate) librechat: RawLibreChat,

    #[config(nested)]
    pub(crate) rates: RawRates,

    #[config(nested)]
    pub(crate) jwt: RawJwt,

    #[config(nested)]
    pub(crate) mcp: RawMcp,
}

/// The MCP server.
#[derive(Debug, Config)]
#[config(layer_attr(derive(Debug, Clone, Serialize)))]
#[config(layer_attr(serde(deny_unknown_fields)))]
pub(crate) struct RawMcp {
    /// MCP sessions of a tenant that are open at once over HTTP; one more is refused.
    #[config(env = "CAISSON_MCP_SESSIONS_MAX", default = 200)]
    pub(crate) sessions_max: u64,

    /// Seconds without a message after which such a session is closed, and its variables and files go. Sessions that a
    /// client names live as long as those of LibreChat: see SESSION_TTL_SECONDS.
    #[config(env = "CAISSON_MCP_SESSION_IDLE_SECS", default = 3600)]
    pub(crate) session_idle_secs: u64,
}

/// Bounds of one sandbox, one space and one call.
#[derive(Debug, Config)]
#[config(layer_attr(derive(Debug, Clone, Serialize)))]
#[config(layer_attr(serde(deny_unknown_fields)))]
pub(crate) struct RawLimits {
    /// Memory of a sandbox in bytes, without swap. 512 MiB.
    #[config(env = "CAISSON_MEMORY_BYTES", default = 536870912)]
    pub(crate) memory_bytes: u64,

    /// Processes and threads of a sandbox.
    #[config(env = "CAISSON_PIDS", default = 128)]
    pub(crate) pids: u64,

    /// Processor cores a sandbox may use; fractions are fine.
    #[config(env = "CAISSON_CPU_CORES", default = 1.0)]
    pub(crate) cpu_cores: f64,

    /// Bytes of a space's files. 480 MiB.
    #[config(env = "CAISSON_SPACE_BYTES", default = 503316480)]
    pub(crate) space_bytes: u64,

    /// Files and folders of a space.
    #[config(env = "CAISSON_SPACE_INODES", default = 18000)]
    pub(crate) space_inodes: u64,

    /// Spaces on disk, over all tenants. One more is refused until one is deleted.
    #[config(env = "CAISSON_SPACES_MAX", default = 10000)]
    pub(crate) spaces_max: u64,

    /// Bytes of a sandbox's /dev/shm; they count as its memory. 256 MiB.
    #[config(env = "CAISSON_SHM_BYTES", default = 268435456)]
    pub(crate) shm_bytes: u64,

    /// Files of a sandbox's /dev/shm.
    #[config(env = "CAISSON_SHM_INODES", default = 4096)]
    pub(crate) shm_inodes: u64,

    /// Open descriptors of a process.
    #[config(env = "CAISSON_NOFILE", default = 1024)]
    pub(crate) nofile: u64,

    /// Characters of output a cell may answer with; the rest is cut and marked.
    #[config(env = "CAISSON_OUTPUT_CHARS_MAX", default = 2000000)]
    pub(crate) output_chars_max: u64,

    /// Seconds a cell runs when the request names no timeout.
    #[config(env = "CAISSON_TIMEOUT_DEFAULT_SECS", default = 30)]
    pub(crate) timeout_default_secs: u64,

    /// Most seconds a request may ask for.
    #[config(env = "CAISSON_TIMEOUT_MAX_SECS", default = 900)]
    pub(crate) timeout_max_secs: u64,

    /// Seconds a native interpreter may go on after its timeout before it is killed.
    #[config(env = "CAISSON_GRACE_SECS", default = 5)]
    pub(crate) grace_secs: u64,

    /// Cells that run at once, over all tenants, and as many commands. With several tenants, one has at most a quarter of them.
    #[config(env = "CAISSON_CELLS_RUNNING_MAX", default = 256)]
    pub(crate) cells_running_max: u64,
}

/// The code interpreter API that LibreChat and its kin use.
#[derive(Debug, Config)]
#[config(layer_attr(derive(Debug, Clone, Serialize)))]
#[config(layer_attr(serde(deny_unknown_fields)))]
pub(crate) struct RawLibreChat {
    /// Live Python kernels of a tenant; for one more the one that is idle longest is stopped. Its files stay.
    #[config(env = "MAX_SESSIONS", default = 50)]
    pub(crate) sessions_max: u64,

    /// Seconds a run may take, and the most a request may ask for.
    #[config(env = "EXECUTION_TIMEOUT", default = 300)]
    pub(crate) execution_timeout_secs: u64,

    /// Memory of a run that is not a kernel's, in MiB, as its control group's limit. 0: that of every sandbox.
    #[config(env = "SUBPROCESS_MAX_MEMORY_MB", default = 0)]
    pub(crate) subprocess_memory_mib_max: u64,

    /// Seconds of processor time of such a run. 0: no limit besides the clock's.
    #[config(env = "SUBPROCESS_MAX_CPU_SECONDS", default = 0)]
    pub(crate) subprocess_cpu_secs_max: u64,

    /// Begin Bash scripts with `set -euo pipefail`.
    #[config(env = "BASH_STRICT_MODE", default = true)]
    pub(crate) bash_strict: Flag,

    /// Say how to install a Python module that is missing.
    #[config(env = "PIP_INSTALL_HINTS", default = true)]
    pub(crate) pip_hints: Flag,

    /// Bytes of one file, uploaded or generated. 150 MiB.
    #[config(env = "MAX_FILE_SIZE", default = 157286400)]
    pub(crate) file_bytes_max: u64,

    /// Bytes of a run's stdout, and as many of its stderr; beyond that it is ended. 1 MiB.
    #[config(env = "MAX_OUTPUT_BYTES", default = 1048576)]
    pub(crate) output_bytes_max: u64,

    /// Files that one run may generate; more are left out.
    #[config(env = "MAX_OUTPUT_FILES", default = 50)]
    pub(crate) output_files_max: u64,

    /// Seconds that files live after their session's last write or run. At least a day: clients rely on it.
    #[config(env = "SESSION_TTL_SECONDS", default = 86400)]
    pub(crate) session_ttl_secs: u64,
}

/// Most requests of one user to that API within a window. 0 is no limit.
#[derive(Debug, Config)]
#[config(layer_attr(derive(Debug, Clone, Serialize)))]
#[config(layer_attr(serde(deny_unknown_fields)))]
pub(crate) struct RawRates {
    /// Runs within the window below, such as 20.
    #[config(env = "EXEC_MAX_REQUESTS", default = 0)]
    pub(crate) exec_requests_max: u64,

    /// Milliseconds of that window.
    #[config(env = "EXEC_LIMIT_WINDOW", default = 30000)]
    pub(crate) exec_window_ms: u64,

    /// Uploads within the window below, such as 30.
    #[config(env = "UPLOAD_MAX_REQUESTS", default = 0)]
    pub(crate) upload_requests_max: u64,

    /// Milliseconds of that window.
    #[config(env = "UPLOAD_LIMIT_WINDOW", default = 300000)]
    pub(crate) upload_window_ms: u64,

    /// Downloads within the window below, such as 60.
    #[config(env = "DOWNLOAD_MAX_REQUESTS", default = 0)]
    pub(crate) download_requests_max: u64,

    /// Milliseconds of that window.
    #[config(env = "DOWNLOAD_LIMIT_WINDOW", default = 60000)]
    pub(crate) download_window_ms: u64,

    /// Listings and looks at one file within the window below, such as 120.
    #[config(env = "FETCH_MAX_REQUESTS", default = 0)]
    pub(crate) listing_requests_max: u64,

    /// Milliseconds of that window.
    #[config(env = "FETCH_LIMIT_WINDOW", default = 60000)]
    pub(crate) listing_window_ms: u64,
}

/// Signed tokens that LibreChat mints for its users. A key here closes the daemon like an API key.
#[derive(Debug, Config)]
#[config(layer_attr(derive(Debug, Clone, Serialize)))]
#[config(layer_attr(serde(deny_unknown_fields)))]
pub(crate) struct RawJwt {
    /// The signer's public key: PEM, base64 of PEM or DER, or a JWK. Its name is `kid`.
    #[config(env = "CODEAPI_JWT_PUBLIC_KEY")]
    pub(crate) public_key: Option<String>,

    /// A folder of such keys, each in a file named after its `kid`, with or without an extension. Read at start.
    #[config(env = "CODEAPI_JWT_PUBLIC_KEYS_DIR")]
    pub(crate) public_keys_dir: Option<String>,

    /// A JWK set, as JSON.
    #[config(env = "CODEAPI_JWT_JWKS_JSON")]
    pub(crate) jwks_json: Option<String>,

    /// Name of `public_key`, and of the key of a token that names none.
    #[config(env = "CODEAPI_JWT_KID", default = "lc-codeapi-2026-05")]
    pub(crate) kid: String,

    /// `iss` of every token.
    #[config(env = "CODEAPI_JWT_ISSUER", default = "librechat")]
    pub(crate) issuer: String,

    /// What `aud` of every token must contain.
    #[config(env = "CODEAPI_JWT_AUDIENCE", default = "codeapi")]
    pub(crate) audience: String,

    /// Algorithms that keys may be of.
    #[config(env = "CODEAPI_JWT_ALLOWED_ALGS", default = ["EdDSA", "RS256"])]
    pub(crate) allowed_algs: Vec<String>,

    /// Seconds that the signer's clock may differ from ours.
    #[config(env = "CODEAPI_JWT_CLOCK_SKEW_SECONDS", default = 30)]
    pub(crate) clock_skew_secs: u64,

    /// Longest life of a token, in seconds: what bounds its replay.
    #[config(env = "CODEAPI_JWT_MAX_TTL_SECONDS", default = 300)]
    pub(crate) ttl_secs_max: u64,
}

/// A set of written settings, some of them absent.
pub(crate) type RawLayer = <Raw as Config>::Layer;
