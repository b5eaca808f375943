use std::collections::HashMap;

use super::*;

pub(super) fn ordinary() -> Surroundings {
    Surroundings { root: false, python_env: PathBuf::from("/opt/caisson/python") }
}

pub(super) fn load_with(
    flags: &Flags,
    variables: &[(&str, &str)],
    file: Option<&str>,
    around: &Surroundings,
) -> Result<(Config, Layers), ConfigError> {
    let variables: HashMap<&str, &str> =
        std::iter::once(("HOME", "/home/me")).chain(variables.iter().copied()).collect();
    let env = |name: &str| variables.get(name).map(|value| (*value).to_owned());
    Config::load(flags, &env, file.map(|text| FileText { name: "caisson.toml", text }), around)
}

pub(super) fn load(variables: &[(&str, &str)], file: &str) -> Result<Config, ConfigError> {
    load_with(&Flags::default(), variables, Some(file), &ordinary()).map(|(config, _)| config)
}

pub(super) fn problem(variables: &[(&str, &str)], file: &str) -> String {
    load(variables, file).unwrap_err().to_string()
}

pub(super) fn addresses(config: &Config) -> Vec<String> {
    config.listen.iter().map(SocketAddr::to_string).collect()
}

#[test]
fn defaults_are_the_documented_ones() {
    let config = load(&[], "").unwrap();
    assert_eq!(addresses(&config), ["127.0.0.1:18091", "127.0.0.1:8000"]);
    assert_eq!(config.data_dir, PathBuf::from("/home/me/.local/share/caisson"));
    assert_eq!(config.require_isolation, Posture::Userns);
    assert_eq!(config.code_sessions_max, 20);
    assert_eq!(config.code_session_idle, Duration::from_secs(1800));
    assert_eq!(config.limits.memory_bytes, 512 << 20);
    assert_eq!(config.limits.space_bytes, 480 << 20);
    assert_eq!(config.limits.shm_bytes, 256 << 20);
    assert_eq!(config.limits.timeout_max, Duration::from_secs(900));
    assert!(config.api_keys.is_empty());
    assert_eq!(config.code_backend, CodeBackend::Auto);
}

#[test]
fn root_has_other_defaults() {
    let around = Surroundings { root: true, ..ordinary() };
    let (config, _) = load_with(&Flags::default(), &[], None, &around).unwrap();
    assert_eq!(config.data_dir, PathBuf::from("/var/lib/caisson"));
    assert_eq!(config.require_isolation, Posture::Full);
}

#[test]
fn a_flag_wins_over_a_variable_over_the_file_over_the_default() {
    let file = "data_dir = \"/file\"\nslots_max = 1\ncode_sessions_max = 2\n";
    let variables = [("CAISSON_DATA_DIR", "/variable"), ("CAISSON_SLOTS_MAX", "3")];
    let flags = Flags { data_dir: Some("/flag".to_owned()), ..Flags::default() };
    let (config, layers) = load_with(&flags, &variables, Some(file), &ordinary()).unwrap();
    assert_eq!(config.data_dir, PathBuf::from("/flag"));
    assert_eq!(config.slots_max, 3);
    assert_eq!(config.code_sessions_max, 2);
    let rows = effective(&layers, &config);
    let source = |key: &str| rows.iter().find(|row| row.key == key).map(|row| row.source.clone()).unwrap();
    assert_eq!(source("data_dir"), Source::Flag);
    assert_eq!(source("slots_max"), Source::Environment("CAISSON_SLOTS_MAX".to_owned()));
    assert_eq!(source("code_sessions_max"), Source::File);
    assert_eq!(source("limits.pids"), Source::Default);
}

#[test]
fn aio_host_and_port_change_the_first_address() {
    let listen = |variables: &[(&str, &str)], file: &str| addresses(&load(variables, file).unwrap());
    assert_eq!(listen(&[("AIO_PORT", "9000")], ""), ["127.0.0.1:9000", "127.0.0.1:8000"]);
    assert_eq!(listen(&[("AIO_HOST", "0.0.0.0")], ""), ["0.0.0.0:18091", "127.0.0.1:8000"]);
    assert_eq!(listen(&[("AIO_HOST", "::1"), ("AIO_PORT", "1")], "listen = [\"127.0.0.1:7\"]"), ["[::1]:1"]);
    // Two names for one address are one listener.
    assert_eq!(listen(&[("AIO_PORT", "8000")], ""), ["127.0.0.1:8000"]);
    // A list in the environment says more than the pair.
    assert_eq!(
        listen(&[("AIO_PORT", "9"), ("CAISSON_LISTEN", "127.0.0.1:1,[::1]:2")], ""),
        ["127.0.0.1:1", "[::1]:2"]
    );
}

#[test]
fn every_key_name_leads_to_the_tenant_default() {
    for name in ["AIO_API_KEY", "SANDBOX_API_KEY", "CODE_INTERPRETER_API_KEY"] {
        let config = load(&[(name, "0123456789abcdef")], "").unwrap();
        let key = ApiKey { tenant: "default".to_owned(), digest: KeyDigest::of(b"0123456789abcdef") };
        assert_eq!(config.api_keys, [key], "{name}");
    }
}

#[test]
fn a_key_list_makes_tenants() {
    let config = load(&[("CODE_INTERPRETER_API_KEYS", "a=KEYA, b=KEYB==")], "").unwrap();
    let tenants: Vec<&str> = config.api_keys.iter().map(|key| key.tenant.as_str()).collect();
    assert_eq!(tenants, ["a", "b"]);
    assert_eq!(config.api_keys[1].digest, KeyDigest::of(b"KEYB=="));
}

#[test]
fn an_empty_key_counts_as_unset() {
    let config = load(&[("AIO_API_KEY", ""), ("CODE_INTERPRETER_API_KEYS", "")], "api_key = \"\"").unwrap();
    assert!(config.api_keys.is_empty());
}

#[test]
fn bad_key_lists_name_the_setting_and_no_key() {
    for list in ["a", "a=SECRET,a=OTHER", "a=SECRET,b=SECRET", "=SECRET", "a=", "a b=SECRET", "a=SECRET,,b=X"]
    {
        let text = problem(&[("CODE_INTERPRETER_API_KEYS", list)], "");
        assert!(text.contains("CODE_INTERPRETER_API_KEYS"), "{list}: {text}");
        assert!(text.contains("\nhint: ") && !text.contains("SECRET"), "{list}: {text}");
    }
    let both = [("AIO_API_KEY", "SECRET"), ("CODE_INTERPRETER_API_KEYS", "a=SECRET")];
    assert!(!problem(&both, "").contains("SECRET"));
    assert!(problem(&[("AIO_API_KEY", "two words")], "").contains("AIO_API_KEY"));
}

#[test]
fn exposure_without_a_key_needs_a_word_from_the_operator() {
    let open = |variables: &[(&str, &str)]| load(variables, "").unwrap().check_exposure();
    assert_eq!(open(&[]), Ok(()));
    let error = open(&[("AIO_HOST", "0.0.0.0")]).unwrap_err().to_string();
    assert!(error.contains("0.0.0.0:18091") && error.contains("hint: set AIO_API_KEY"), "{error}");
    assert_eq!(open(&[("AIO_HOST", "0.0.0.0"), ("AIO_API_KEY", "k")]), Ok(()));
    assert_eq!(open(&[("AIO_HOST", "0.0.0.0"), ("CAISSON_ALLOW_OPEN", "true")]), Ok(()));
    assert!(open(&[("AIO_HOST", "0.0.0.0"), ("AIO_API_KEY", "")]).is_err());
}

#[test]
fn unknown_keys_of_the_file_are_errors_with_a_hint() {
    assert!(problem(&[], "slot_max = 1").contains("unknown key `slot_max`\nhint: did you mean `slots_max`?"));
    assert!(problem(&[], "[limits]\nmemory_byte = 1").contains("did you mean `limits.memory_bytes`?"));
    assert!(problem(&[], "zebra = 1").contains("caisson config --template"));
    assert!(problem(&[], "[zebra]\nstripes = 1").contains("unknown key `zebra.stripes`"));
}

#[test]
fn values_that_do_not_fit_name_the_setting() {
    for (name, value) in [
        ("AIO_PORT", "eighty"),
        ("AIO_PORT", "70000"),
        ("AIO_HOST", "example.org"),
        ("CAISSON_LISTEN", "8000"),
        ("AIO_CODE_MAX_SESSIONS", "-1"),
        ("AIO_CODE_BACKEND", "docker"),
        ("AIO_API_SURFACE", "v3"),
        ("CAISSON_ALLOW_OPEN", "perhaps"),
        ("PYTHON_VERSION", "../3"),
        ("AIO_RUST_LOG_LEVEL", "caisson=loudly"),
    ] {
        let text = problem(&[(name, value)], "");
        let setting = name.trim_start_matches("CAISSON_").to_lowercase();
        assert!(text.contains(name) || text.to_lowercase().contains(&setting), "{name}={value}: {text}");
        assert!(text.contains("\nhint: "), "{name}={value}: {text}");
    }
}

#[test]
fn the_backend_is_one_of_three_words() {
    let text = problem(&[("AIO_CODE_BACKEND", "jupyter")], "");
    assert!(
        text.contains("AIO_CODE_BACKEND: `jupyter` is not known\nhint: use auto or native or kernel"),
        "{text}"
    );
    let config = load(&[("AIO_KERNEL_MAX_SESSIONS", "7"), ("AIO_CODE_BACKEND", "kernel")], "").unwrap();
    assert_eq!((config.kernel.sessions_max, config.code_backend), (7, CodeBackend::Kernel));
    assert!(config.notes.is_empty(), "{:?}", config.notes);
}

#[test]
fn limits_have_ranges() {
    let text = problem(&[], "[limits]\nmemory_bytes = 1");
    assert!(text.contains("limits.memory_bytes: 1 is out of range\nhint: use 33554432 to"), "{text}");
    let text = problem(&[], "[limits]\ntimeout_default_secs = 100\ntimeout_max_secs = 50");
    assert!(text.contains("limits.timeout_default_secs"), "{text}");
    assert!(problem(&[("CAISSON_CPU_CORES", "nan")], "").contains("limits.cpu_cores"));
}

#[test]
fn syntax_errors_do_not_quote_the_line() {
    let text = problem(&[], "slots_max = 1\napi_key = \"SECRET\n");
    assert!(text.contains("line 2") && !text.contains("SECRET"), "{text}");
    let text = problem(&[], "api_key = [\"SECRET\"]");
    assert!(!text.contains("SECRET"), "{text}");
}

#[test]
fn effective_settings_mask_secrets_and_show_every_key() {
    let variables =
        [("AIO_API_KEY", "very-secret-key-1"), ("CODE_INTERPRETER_API_KEYS", "a=very-secret-key-2")];
    let (config, layers) = load_with(&Flags::default(), &variables, None, &ordinary()).unwrap();
    let rows = effective(&layers, &config);
    let shown = format!("{rows:?}");
    assert!(!shown.contains("very-secret"), "{shown}");
    let value = |key: &str| rows.iter().find(|row| row.key == key).map(|row| row.value.as_str()).unwrap();
    assert_eq!(value("api_key"), "(set)");
    assert_eq!(value("default_user"), "(unset)");
    assert_eq!(value("listen"), "[\"127.0.0.1:18091\", \"127.0.0.1:8000\"]");
    assert_eq!(value("limits.cpu_cores"), "1.0");
}

#[test]
fn the_template_shows_every_key_and_loads() {
    let text = template();
    for row in ["#listen =", "#slots_max = 24", "[limits]", "#memory_bytes = 536870912", "AIO_API_KEY"] {
        assert!(text.contains(row), "{row} is missing from\n{text}");
    }
    load(&[], &text).unwrap();
}

#[test]
fn the_daemon_gets_digests_over_json_and_no_key() {
    let config = load(&[("AIO_API_KEY", "very-secret-key-1")], "").unwrap();
    let json = serde_json::to_string(&config).unwrap();
    assert!(!json.contains("very-secret"));
    assert_eq!(serde_json::from_str::<Config>(&json).unwrap(), config);
}

#[test]
fn the_token_of_a_jupyter_server_is_never_printed() {
    let variables = [
        ("AIO_JUPYTER_ENDPOINT", "http://127.0.0.1:8888/lab/?token=very-secret-token"),
        ("AIO_JUPYTER_TOKEN", "very-secret-token"),
    ];
    let (config, layers) = load_with(&Flags::default(), &variables, None, &ordinary()).unwrap();
    let rows = effective(&layers, &config);
    assert!(
        !format!("{rows:?} {config:?} {:?}", config.notes).contains("very-secret"),
        "{rows:?} {config:?}"
    );
    let value = |key: &str| rows.iter().find(|row| row.key == key).map(|row| row.value.as_str()).unwrap();
    assert_eq!(value("jupyter_endpoint"), "\"http://127.0.0.1:8888/lab\"");
    assert_eq!(value("jupyter_token"), "(set)");
    let endpoint = config.jupyter_endpoint.clone().unwrap();
    assert_eq!(endpoint.authorization().as_deref(), Some("token very-secret-token"));
    let json = serde_json::to_string(&config).unwrap();
    assert_eq!(serde_json::from_str::<Config>(&json).unwrap(), config);
}

#[test]
fn a_jupyter_server_serves_one_tenant() {
    let endpoint = ("AIO_JUPYTER_ENDPOINT", "http://127.0.0.1:8888");
    assert!(load(&[endpoint, ("AIO_API_KEY", "very-secret-key-1")], "").is_ok());
    let tenants = ("CODE_INTERPRETER_API_KEYS", "a=very-secret-key-1,b=very-secret-key-2");
    assert!(problem(&[endpoint, tenants], "").contains("more than one tenant"));
    let both = [
        endpoint,
        ("AIO_API_KEY", "very-secret-key-1"),
        ("CODE_INTERPRETER_API_KEYS", "a=very-secret-key-2"),
    ];
    assert!(problem(&both, "").contains("more than one tenant"));
}

#[test]
fn a_jupyter_server_elsewhere_is_warned_of() {
    let notes = |variables: &[(&str, &str)]| load(variables, "").unwrap().notes.join(" ");
    assert!(notes(&[("AIO_JUPYTER_ENDPOINT", "http://jupyter:8888")]).contains("unencrypted"));
    assert!(!notes(&[("AIO_JUPYTER_ENDPOINT", "http://localhost:8888")]).contains("unencrypted"));
    assert!(notes(&[("AIO_JUPYTER_TOKEN", "t")]).contains("does nothing"));
    assert!(problem(&[("AIO_JUPYTER_ENDPOINT", "https://jupyter")], "").contains("https is not supported"));
}
