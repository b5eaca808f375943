//! Settings of the code interpreter API and of signed tokens.

use std::fs;

use base64::Engine;
use base64::engine::general_purpose::STANDARD;
use serde_json::json;

use super::tests::{addresses, load, load_with, ordinary, problem};
use super::*;

const ED25519: &str = include_str!("../../tests/keys/ed25519.public.pem");
const RSA: &str = include_str!("../../tests/keys/rsa.public.pem");
const ED25519_X: &str = "m0Cp9YhkY-6I84ALt3VjnbGPaBy42AH4Etvz5ekpqNk";

#[test]
fn the_code_interpreters_variables_have_its_defaults() {
    let it = load(&[], "").unwrap().librechat;
    assert_eq!((it.sessions_max, it.execution_timeout.as_secs()), (50, 300));
    assert_eq!((it.subprocess_memory_mib_max, it.subprocess_cpu_secs_max), (None, None));
    assert!(it.bash_strict && it.pip_hints && !it.log_requests && !it.url_keys);
    assert_eq!((it.file_bytes_max, it.output_bytes_max, it.output_files_max), (157_286_400, 1_048_576, 50));
    assert_eq!((it.session_ttl.as_secs(), it.cors_origins), (86_400, vec!["*".to_owned()]));
    let off = |rate: Rate| (rate.requests_max, rate.window.as_secs());
    assert_eq!(
        [off(it.rates.exec), off(it.rates.upload), off(it.rates.download), off(it.rates.listing)],
        [(0, 30), (0, 300), (0, 60), (0, 60)]
    );
    assert!(it.jwt.keys.is_empty());
    assert_eq!((it.jwt.issuer.as_str(), it.jwt.audience.as_str()), ("librechat", "codeapi"));
    assert_eq!((it.jwt.ttl_max.as_secs(), it.jwt.clock_skew.as_secs()), (300, 30));
}

#[test]
fn every_variable_of_the_code_interpreter_is_heard() {
    let variables = [
        ("MAX_SESSIONS", "7"),
        ("EXECUTION_TIMEOUT", "60"),
        ("SUBPROCESS_MAX_MEMORY_MB", "256"),
        ("SUBPROCESS_MAX_CPU_SECONDS", "9"),
        ("BASH_STRICT_MODE", "No"),
        ("PIP_INSTALL_HINTS", "0"),
        ("LOG_REQUESTS", "anything"),
        ("CODE_INTERPRETER_URL_KEYS", "true"),
        ("MAX_FILE_SIZE", "10"),
        ("MAX_OUTPUT_BYTES", "2048"),
        ("MAX_OUTPUT_FILES", "3"),
        ("SESSION_TTL_SECONDS", "90000"),
        ("CORS_ALLOW_ORIGINS", "https://A.example, http://b.example:3000"),
        ("EXEC_MAX_REQUESTS", "20"),
        ("FETCH_MAX_REQUESTS", "120"),
        ("FETCH_LIMIT_WINDOW", "1500"),
        ("UPLOADS_DIR", "/srv/uploads"),
        ("APP_BASE_DIR", "/srv/base"),
        ("LOG_LEVEL", "warning"),
        ("PORT", "9000"),
    ];
    let config = load(&variables, "").unwrap();
    let it = &config.librechat;
    assert_eq!((it.sessions_max, it.execution_timeout.as_secs()), (7, 60));
    assert_eq!((it.subprocess_memory_mib_max, it.subprocess_cpu_secs_max), (Some(256), Some(9)));
    assert!(!it.bash_strict && !it.pip_hints && it.log_requests && it.url_keys);
    assert_eq!((it.file_bytes_max, it.output_bytes_max, it.output_files_max), (10, 2048, 3));
    assert_eq!(it.session_ttl.as_secs(), 90_000);
    assert_eq!(it.cors_origins, ["https://a.example", "http://b.example:3000"]);
    assert_eq!((it.rates.exec.requests_max, it.rates.listing.requests_max), (20, 120));
    assert_eq!(it.rates.listing.window, Duration::from_millis(1500));
    assert_eq!(config.uploads_dir, Some(PathBuf::from("/srv/uploads")));
    assert_eq!(config.notebooks_dir, Some(PathBuf::from("/srv/base/notebooks")));
    assert_eq!(config.log_level, "warn");
    assert_eq!(addresses(&config), ["127.0.0.1:18091", "127.0.0.1:9000"]);
}

#[test]
fn two_names_of_one_setting_have_an_order() {
    let level = |variables: &[(&str, &str)]| load(variables, "").unwrap().log_level;
    assert_eq!(level(&[]), "info");
    assert_eq!(level(&[("LOG_LEVEL", "CRITICAL")]), "error");
    assert_eq!(level(&[("LOG_LEVEL", "DEBUG"), ("AIO_RUST_LOG_LEVEL", "caisson=trace")]), "caisson=trace");
    assert!(problem(&[("LOG_LEVEL", "LOUD")], "").contains("LOG_LEVEL: `LOUD` is not known"));
    let listen = |variables: &[(&str, &str)], file: &str| addresses(&load(variables, file).unwrap());
    assert_eq!(listen(&[("PORT", "1")], "listen = [\"127.0.0.1:7\"]"), ["127.0.0.1:1"]);
    assert_eq!(listen(&[("PORT", "1"), ("AIO_PORT", "2")], "listen = [\"127.0.0.1:7\"]"), ["127.0.0.1:2"]);
    assert_eq!(listen(&[("PORT", "1"), ("CAISSON_LISTEN", "127.0.0.1:7")], ""), ["127.0.0.1:7"]);
}

#[test]
fn values_of_the_code_interpreter_that_do_not_fit_name_the_setting() {
    for (name, value) in [
        ("MAX_SESSIONS", "0"),
        ("EXECUTION_TIMEOUT", "0"),
        ("SUBPROCESS_MAX_MEMORY_MB", "1"),
        ("MAX_OUTPUT_BYTES", "1"),
        ("SESSION_TTL_SECONDS", "86399"),
        ("CORS_ALLOW_ORIGINS", "example.org"),
        ("EXEC_LIMIT_WINDOW", "1"),
        ("UPLOADS_DIR", "uploads"),
        ("APP_BASE_DIR", "."),
        ("CODEAPI_JWT_MAX_TTL_SECONDS", "301"),
        ("CODEAPI_JWT_CLOCK_SKEW_SECONDS", "301"),
        ("CODEAPI_JWT_ALLOWED_ALGS", "HS256"),
        ("CODEAPI_JWT_AUDIENCE", " "),
    ] {
        let text = problem(&[(name, value)], "");
        assert!(text.contains(name) && text.contains("\nhint: "), "{name}={value}: {text}");
    }
}

#[test]
fn the_file_has_tables_for_them() {
    let file = "url_keys = true\n[librechat]\nsessions_max = 3\nbash_strict = \"off\"\n[rates]\nexec_requests_max = 5\n\
                [jwt]\nissuer = \"other\"\n";
    let it = load(&[], file).unwrap().librechat;
    assert!(it.url_keys && !it.bash_strict);
    assert_eq!((it.sessions_max, it.rates.exec.requests_max, it.jwt.issuer.as_str()), (3, 5, "other"));
    assert!(problem(&[], "[librechat]\nsession_max = 1").contains("did you mean `librechat.sessions_max`?"));
}

fn keys(variables: &[(&str, &str)]) -> Vec<JwtKey> {
    load(variables, "").unwrap().librechat.jwt.keys
}

fn ed25519() -> PublicKey {
    PublicKey::Ed25519 { x: ED25519_X.to_owned() }
}

#[test]
fn a_public_key_is_read_in_every_form_it_travels_in() {
    let der = STANDARD.decode(ED25519.lines().nth(1).unwrap()).unwrap();
    let jwk = json!({ "kty": "OKP", "crv": "Ed25519", "x": ED25519_X }).to_string();
    let forms = [
        ED25519.to_owned(),
        ED25519.trim_end().replace('\n', "\\n"),
        STANDARD.encode(ED25519),
        STANDARD.encode(&der),
        STANDARD.encode(&der[12..]),
        ED25519_X.to_owned(),
        jwk,
    ];
    for form in forms {
        let key = JwtKey { kid: "lc-codeapi-2026-05".to_owned(), key: ed25519() };
        assert_eq!(keys(&[("CODEAPI_JWT_PUBLIC_KEY", &form)]), [key], "{form}");
    }
    let rsa = keys(&[("CODEAPI_JWT_PUBLIC_KEY", RSA), ("CODEAPI_JWT_KID", "r")]);
    assert_eq!((rsa[0].kid.as_str(), rsa[0].key.algorithm()), ("r", JwtAlgorithm::Rs256));
    assert!(keys(&[("CODEAPI_JWT_PUBLIC_KEY", "")]).is_empty());
}

#[test]
fn a_folder_and_a_set_hold_keys_by_name() {
    let dir = tempfile::tempdir().unwrap();
    fs::write(dir.path().join("one.pem"), ED25519).unwrap();
    fs::write(dir.path().join("two"), RSA).unwrap();
    fs::write(dir.path().join(".hidden"), "no key").unwrap();
    fs::create_dir(dir.path().join("folder")).unwrap();
    let set = json!({ "keys": [{ "kty": "OKP", "crv": "Ed25519", "x": ED25519_X, "kid": "three", "alg": "EdDSA" }] });
    let variables = [
        ("CODEAPI_JWT_PUBLIC_KEYS_DIR", dir.path().to_str().unwrap()),
        ("CODEAPI_JWT_JWKS_JSON", &set.to_string()),
    ];
    let found: Vec<(String, JwtAlgorithm)> =
        keys(&variables).into_iter().map(|key| (key.kid, key.key.algorithm())).collect();
    let wanted = [("three", JwtAlgorithm::EdDsa), ("one", JwtAlgorithm::EdDsa), ("two", JwtAlgorithm::Rs256)];
    assert_eq!(found, wanted.map(|(kid, algorithm)| (kid.to_owned(), algorithm)));
    fs::write(dir.path().join("one.pub"), ED25519).unwrap();
    assert!(problem(&variables, "").contains("two keys of the name `one`"));
    let nowhere = [("CODEAPI_JWT_PUBLIC_KEYS_DIR", "/nowhere/at/all")];
    assert!(problem(&nowhere, "").contains("CODEAPI_JWT_PUBLIC_KEYS_DIR: failed to read /nowhere/at/all"));
}

#[test]
fn what_is_no_public_key_is_refused_and_not_quoted() {
    let private = include_str!("../../tests/keys/ed25519.private.pem");
    let packed = STANDARD.encode(private);
    let secret = private.lines().nth(1).unwrap();
    let set = |jwk: serde_json::Value| json!({ "keys": [jwk] }).to_string();
    let of_set = |jwk| ("CODEAPI_JWT_JWKS_JSON", set(jwk));
    let cases = [
        ("CODEAPI_JWT_PUBLIC_KEY", private.to_owned()),
        ("CODEAPI_JWT_PUBLIC_KEY", packed.clone()),
        ("CODEAPI_JWT_PUBLIC_KEY", "secret".to_owned()),
        ("CODEAPI_JWT_PUBLIC_KEY", "?".to_owned()),
        ("CODEAPI_JWT_PUBLIC_KEY", include_str!("../../tests/keys/p256.public.pem").to_owned()),
        ("CODEAPI_JWT_PUBLIC_KEY", include_str!("../../tests/keys/rsa1024.public.pem").to_owned()),
        ("CODEAPI_JWT_JWKS_JSON", "{}".to_owned()),
        of_set(json!({ "kty": "oct", "k": "c2VjcmV0", "kid": "a" })),
        of_set(json!({ "kty": "OKP", "crv": "Ed25519", "x": ED25519_X })),
        of_set(json!({ "kty": "OKP", "crv": "Ed25519", "x": ED25519_X, "d": "c2VjcmV0", "kid": "a" })),
        of_set(json!({ "kty": "OKP", "crv": "Ed25519", "x": "c2VjcmV0", "kid": "a" })),
        of_set(json!({ "kty": "OKP", "crv": "Ed25519", "x": ED25519_X, "kid": "a", "alg": "RS256" })),
        of_set(json!({ "kty": "OKP", "crv": "Ed25519", "x": ED25519_X, "kid": "a", "use": "enc" })),
        of_set(json!({ "kty": "RSA", "n": ED25519_X, "e": "AQAB", "kid": "a" })),
    ];
    for (name, value) in cases {
        let text = problem(&[(name, &value)], "");
        assert!(text.contains(name) && text.contains("\nhint: "), "{value}: {text}");
        assert!(!text.contains(secret) && !text.contains(&packed) && !text.contains("c2VjcmV0"), "{text}");
    }
    for private in [private, include_str!("../../tests/keys/rsa.private.pem")] {
        let text = problem(&[("CODEAPI_JWT_PUBLIC_KEY", private)], "");
        assert!(text.contains("holds a private or symmetric key"), "{text}");
    }
    let one_algorithm = [("CODEAPI_JWT_PUBLIC_KEY", RSA), ("CODEAPI_JWT_ALLOWED_ALGS", "EdDSA")];
    assert!(problem(&one_algorithm, "").contains("is for RS256, which CODEAPI_JWT_ALLOWED_ALGS leaves out"));
}

#[test]
fn the_key_of_a_signer_closes_the_daemon_like_an_api_key() {
    let signer = ("CODEAPI_JWT_PUBLIC_KEY", ED25519);
    let closed = load(&[signer, ("AIO_HOST", "0.0.0.0")], "").unwrap();
    assert!(!closed.is_open() && closed.has_several_tenants());
    assert_eq!(closed.check_exposure(), Ok(()));
    assert!(load(&[], "").unwrap().is_open());
    let one = load(&[("AIO_API_KEY", "very-secret-key-1")], "").unwrap();
    assert!(!one.is_open() && !one.has_several_tenants());
    let endpoint = ("AIO_JUPYTER_ENDPOINT", "http://127.0.0.1:8888");
    assert!(problem(&[endpoint, signer], "").contains("more than one tenant"));
}

#[test]
fn every_setting_is_shown_and_keys_are_not() {
    let variables = [("CODEAPI_JWT_PUBLIC_KEY", ED25519), ("BASH_STRICT_MODE", "off")];
    let (config, layers) = load_with(&Flags::default(), &variables, None, &ordinary()).unwrap();
    let rows = effective(&layers, &config);
    let value = |key: &str| rows.iter().find(|row| row.key == key).map(|row| row.value.as_str()).unwrap();
    assert_eq!((value("jwt.public_key"), value("jwt.jwks_json")), ("(set)", "(unset)"));
    assert_eq!((value("librechat.bash_strict"), value("librechat.pip_hints")), ("false", "true"));
    assert_eq!((value("log_level"), value("cors_allow_origins")), ("\"info\"", "[\"*\"]"));
    let json = serde_json::to_string(&config).unwrap();
    assert_eq!(serde_json::from_str::<Config>(&json).unwrap(), config);
}
