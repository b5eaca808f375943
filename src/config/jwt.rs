//! Keys of signed tokens: `CODEAPI_JWT_*`. Parsed once; what comes out is a public key and the one algorithm it may
//! verify.
#![forbid(unsafe_code)]

use std::fs;
use std::io::Read;
use std::path::Path;
use std::time::Duration;

use base64::Engine;
use base64::engine::general_purpose::{STANDARD, URL_SAFE_NO_PAD};
use jsonwebtoken::DecodingKey;
use jsonwebtoken::jwk::{AlgorithmParameters, EllipticCurve, Jwk};
use serde::{Deserialize, Serialize};
use serde_json::Value;

use super::ConfigError;
use super::raw::RawJwt;
use super::resolve::{seconds, word};

const KEY_SETTING: &str = "CODEAPI_JWT_PUBLIC_KEY";
const SET_SETTING: &str = "CODEAPI_JWT_JWKS_JSON";
const DIR_SETTING: &str = "CODEAPI_JWT_PUBLIC_KEYS_DIR";
const FORM: &str = "write it as PEM (BEGIN PUBLIC KEY), as base64 of PEM or DER, or as a JWK";
/// Most keys, so that rotation has room and a wrong folder is noticed.
const KEYS_MAX: usize = 64;
/// Largest file of a key, in bytes.
const KEY_FILE_BYTES_MAX: u64 = 64 * 1024;
/// Longest name of a key, in bytes.
const KID_BYTES_MAX: usize = 256;
/// Size of an RSA modulus in bytes: 2048 to 8192 bits.
const RSA_MODULUS_BYTES: std::ops::RangeInclusive<usize> = 256..=1024;
/// Longest RSA exponent, in bytes.
const RSA_EXPONENT_BYTES_MAX: usize = 4;
const ED25519_BYTES: usize = 32;

/// What a token must be to be believed. Without keys none is.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct JwtConfig {
    pub keys: Vec<JwtKey>,
    /// The key of a token that names none.
    pub kid_default: String,
    pub issuer: String,
    pub audience: String,
    /// How far the signer's clock may be from ours.
    pub clock_skew: Duration,
    /// Longest life of a token.
    pub ttl_max: Duration,
}

/// A trusted key under its name.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct JwtKey {
    pub kid: String,
    pub key: PublicKey,
}

/// A public key, in the base64url of a JWK. Its kind is its algorithm: nothing a token says can change that.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum PublicKey {
    /// EdDSA.
    Ed25519 { x: String },
    /// RS256.
    Rsa { n: String, e: String },
}

/// What a key may verify.
#[derive(Copy, Clone, Debug, PartialEq, Eq)]
pub enum JwtAlgorithm {
    EdDsa,
    Rs256,
}

impl JwtAlgorithm {
    pub fn name(self) -> &'static str {
        match self {
            JwtAlgorithm::EdDsa => "EdDSA",
            JwtAlgorithm::Rs256 => "RS256",
        }
    }
}

const ALGORITHMS: [(&str, JwtAlgorithm); 2] =
    [("EdDSA", JwtAlgorithm::EdDsa), ("RS256", JwtAlgorithm::Rs256)];

impl PublicKey {
    pub fn algorithm(&self) -> JwtAlgorithm {
        match self {
            PublicKey::Ed25519 { .. } => JwtAlgorithm::EdDsa,
            PublicKey::Rsa { .. } => JwtAlgorithm::Rs256,
        }
    }

    /// A key as a setting or a file holds it.
    fn parse(setting: &str, text: &str) -> Result<PublicKey, ConfigError> {
        // Line ends that a variable could not hold.
        let text = text.replace("\\n", "\n");
        let text = text.trim();
        if text.starts_with('{') {
            let jwk = serde_json::from_str(text).map_err(|_| refused(setting, "is not JSON"))?;
            return PublicKey::of_jwk(setting, &jwk);
        }
        if text.contains("-----BEGIN") {
            return PublicKey::of_pem(setting, text);
        }
        let packed: String = text.split_whitespace().collect();
        let bytes = STANDARD.decode(&packed).or_else(|_| URL_SAFE_NO_PAD.decode(&packed));
        let bytes = bytes.map_err(|_| refused(setting, "is neither PEM nor base64"))?;
        match std::str::from_utf8(&bytes) {
            Ok(pem) if pem.contains("-----BEGIN") => PublicKey::of_pem(setting, pem),
            _ => PublicKey::of_pem(setting, &pem_of(&bytes)),
        }
    }

    fn of_pem(setting: &str, pem: &str) -> Result<PublicKey, ConfigError> {
        if pem.contains("PRIVATE KEY") {
            return Err(private(setting));
        }
        if pem.contains("CERTIFICATE") {
            return Err(refused(setting, "is a certificate, not a public key"));
        }
        let key =
            DecodingKey::from_ed_pem(pem.as_bytes()).or_else(|_| DecodingKey::from_rsa_pem(pem.as_bytes()));
        let jwk = key.and_then(|key| Jwk::from_decoding_key(&key, None));
        let jwk = jwk.map_err(|_| refused(setting, "is no Ed25519 or RSA public key"))?;
        PublicKey::of_parameters(setting, &jwk.algorithm)
    }

    fn of_jwk(setting: &str, value: &Value) -> Result<PublicKey, ConfigError> {
        // Of a symmetric key, `k` is all there is.
        if ["d", "p", "q", "k"].iter().any(|private| value.get(private).is_some()) {
            return Err(private(setting));
        }
        if value.get("use").is_some_and(|of| of != "sig") {
            return Err(refused(setting, "is not for signatures (`use`)"));
        }
        let jwk: Jwk = serde_json::from_value(value.clone()).map_err(|_| refused(setting, "is not a JWK"))?;
        let key = PublicKey::of_parameters(setting, &jwk.algorithm)?;
        match value.get("alg").and_then(Value::as_str) {
            Some(named) if named != key.algorithm().name() => {
                let what =
                    format!("says `alg` {named}; its kind of key is used for {}", key.algorithm().name());
                Err(refused(setting, &what))
            }
            _ => Ok(key),
        }
    }

    /// Every way in ends here, so that what is kept fits its algorithm.
    fn of_parameters(setting: &str, parameters: &AlgorithmParameters) -> Result<PublicKey, ConfigError> {
        let bytes =
            |text: &str| URL_SAFE_NO_PAD.decode(text).map_err(|_| refused(setting, "is not base64url"));
        match parameters {
            AlgorithmParameters::OctetKeyPair(it) if it.curve == EllipticCurve::Ed25519 => {
                if bytes(&it.x)?.len() != ED25519_BYTES {
                    return Err(refused(setting, "is no Ed25519 key: they have 32 bytes"));
                }
                Ok(PublicKey::Ed25519 { x: it.x.clone() })
            }
            AlgorithmParameters::RSA(it) => {
                let (modulus, exponent) = (bytes(&it.n)?, bytes(&it.e)?);
                let size = modulus.iter().skip_while(|byte| **byte == 0).count();
                if !RSA_MODULUS_BYTES.contains(&size) {
                    return Err(refused(
                        setting,
                        "is an RSA key of a size that is not used: 2048 to 8192 bits are",
                    ));
                }
                let value = exponent.iter().fold(0_u64, |value, byte| value << 8 | u64::from(*byte));
                if exponent.len() > RSA_EXPONENT_BYTES_MAX || value < 3 || value % 2 == 0 {
                    return Err(refused(setting, "has an RSA exponent that is not used: 65537 is"));
                }
                Ok(PublicKey::Rsa { n: it.n.clone(), e: it.e.clone() })
            }
            _ => Err(refused(setting, "is no Ed25519 or RSA public key")),
        }
    }
}

/// Raw Ed25519 bytes or the DER of a key, as PEM.
fn pem_of(bytes: &[u8]) -> String {
    /// What stands before the 32 bytes in the DER of such a key (RFC 8410).
    const ED25519_PREFIX: [u8; 12] = [0x30, 0x2a, 0x30, 0x05, 0x06, 0x03, 0x2b, 0x65, 0x70, 0x03, 0x21, 0x00];
    let der = match bytes.len() {
        ED25519_BYTES => [&ED25519_PREFIX[..], bytes].concat(),
        _ => bytes.to_vec(),
    };
    format!("-----BEGIN PUBLIC KEY-----\n{}\n-----END PUBLIC KEY-----\n", STANDARD.encode(der))
}

/// The settings as the daemon uses them. Reads the folder of keys, where there is one.
pub(super) fn resolve(raw: &RawJwt, notes: &mut Vec<String>) -> Result<JwtConfig, ConfigError> {
    let allowed = raw.allowed_algs.iter().map(|name| word("CODEAPI_JWT_ALLOWED_ALGS", name, &ALGORITHMS));
    let allowed = allowed.collect::<Result<Vec<JwtAlgorithm>, _>>()?;
    let mut keys = Keys { allowed, keys: Vec::new() };
    let given = |text: &Option<String>| text.clone().filter(|text| !text.trim().is_empty());
    if let Some(text) = given(&raw.public_key) {
        keys.add(KEY_SETTING, &raw.kid, PublicKey::parse(KEY_SETTING, &text)?)?;
    }
    if let Some(text) = given(&raw.jwks_json) {
        add_set(&mut keys, &text)?;
    }
    if let Some(dir) = given(&raw.public_keys_dir) {
        add_dir(&mut keys, Path::new(&dir))?;
    }
    let keys = keys.keys;
    if !keys.is_empty() && !keys.iter().any(|key| key.kid == raw.kid) {
        notes.push(format!(
            "CODEAPI_JWT_KID: no key is named `{}`; tokens that name none are refused",
            raw.kid
        ));
    }
    Ok(JwtConfig {
        keys,
        kid_default: raw.kid.clone(),
        issuer: named("CODEAPI_JWT_ISSUER", &raw.issuer)?,
        audience: named("CODEAPI_JWT_AUDIENCE", &raw.audience)?,
        clock_skew: seconds("CODEAPI_JWT_CLOCK_SKEW_SECONDS", raw.clock_skew_secs, 0..=300)?,
        ttl_max: seconds("CODEAPI_JWT_MAX_TTL_SECONDS", raw.ttl_secs_max, 1..=300)?,
    })
}

struct Keys {
    allowed: Vec<JwtAlgorithm>,
    keys: Vec<JwtKey>,
}

impl Keys {
    fn add(&mut self, setting: &str, kid: &str, key: PublicKey) -> Result<(), ConfigError> {
        let algorithm = key.algorithm();
        if kid.is_empty() || kid.len() > KID_BYTES_MAX {
            return Err(refused(setting, "has a key without a usable name (kid)"));
        }
        if !self.allowed.contains(&algorithm) {
            return Err(ConfigError::new(
                format!(
                    "{setting}: key `{kid}` is for {}, which CODEAPI_JWT_ALLOWED_ALGS leaves out",
                    algorithm.name()
                ),
                "allow its algorithm, or take the key away",
            ));
        }
        if self.keys.iter().any(|known| known.kid == kid) {
            return Err(ConfigError::new(
                format!("{setting}: there are two keys of the name `{kid}`"),
                "give every key a kid of its own",
            ));
        }
        if self.keys.len() == KEYS_MAX {
            return Err(refused(setting, &format!("makes more than {KEYS_MAX} keys")));
        }
        self.keys.push(JwtKey { kid: kid.to_owned(), key });
        Ok(())
    }
}

fn add_set(keys: &mut Keys, text: &str) -> Result<(), ConfigError> {
    let set: Value = serde_json::from_str(text).map_err(|_| refused(SET_SETTING, "is not JSON"))?;
    let list = set
        .get("keys")
        .and_then(Value::as_array)
        .ok_or_else(|| refused(SET_SETTING, "has no list `keys`"))?;
    for jwk in list {
        let kid = jwk.get("kid").and_then(Value::as_str);
        let kid = kid.ok_or_else(|| refused(SET_SETTING, "has a key without `kid`"))?;
        keys.add(SET_SETTING, kid, PublicKey::of_jwk(SET_SETTING, jwk)?)?;
    }
    Ok(())
}

/// Names that begin with a dot are passed over: a mounted Kubernetes secret has some. Links are followed, for the same
/// reason; the folder is the operator's.
fn add_dir(keys: &mut Keys, dir: &Path) -> Result<(), ConfigError> {
    let unread = |what: &Path, error: std::io::Error| {
        ConfigError::new(format!("{DIR_SETTING}: failed to read {}: {error}", what.display()), FORM)
    };
    let entries = fs::read_dir(dir).and_then(|entries| entries.collect::<Result<Vec<_>, _>>());
    let mut paths: Vec<_> = entries.map_err(|error| unread(dir, error))?.iter().map(|it| it.path()).collect();
    paths.sort();
    for path in paths {
        let name = path.file_name().and_then(|name| name.to_str()).unwrap_or_default();
        if name.starts_with('.') || !path.is_file() {
            continue;
        }
        let kid = path.file_stem().and_then(|stem| stem.to_str()).unwrap_or_default();
        let mut text = String::new();
        let file = fs::File::open(&path).map_err(|error| unread(&path, error))?;
        file.take(KEY_FILE_BYTES_MAX).read_to_string(&mut text).map_err(|error| unread(&path, error))?;
        let setting = format!("{DIR_SETTING}, {name}");
        keys.add(&setting, kid, PublicKey::parse(&setting, &text)?)?;
    }
    if keys.keys.is_empty() {
        return Err(refused(DIR_SETTING, "holds no key"));
    }
    Ok(())
}

fn named(setting: &str, value: &str) -> Result<String, ConfigError> {
    match value.trim() {
        "" => Err(ConfigError::new(format!("{setting}: is blank"), "unset it to use the default")),
        value => Ok(value.to_owned()),
    }
}

fn refused(setting: &str, what: &str) -> ConfigError {
    ConfigError::new(format!("{setting}: {what}"), FORM)
}

fn private(setting: &str) -> ConfigError {
    ConfigError::new(
        format!("{setting}: holds a private or symmetric key"),
        "only the public key belongs here; the private one stays with LibreChat",
    )
}
