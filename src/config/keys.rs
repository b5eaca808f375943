//! API keys as the daemon holds them: a tenant and a digest. The key itself is gone after start.
#![forbid(unsafe_code)]

use std::fmt::Write as _;

use serde::{Deserialize, Deserializer, Serialize, Serializer};
use sha2::{Digest, Sha256};

use super::ConfigError;

/// Tenant of a daemon without named tenants.
pub const DEFAULT_TENANT: &str = "default";
/// Longest tenant name, in bytes.
const TENANT_BYTES_MAX: usize = 64;
/// Keys shorter than this are accepted with a warning.
const KEY_BYTES_ADVISED: usize = 16;

/// SHA-256 of a key. Random keys have no need of a slow hash.
#[derive(Clone, Copy, PartialEq, Eq)]
pub struct KeyDigest(pub [u8; 32]);

impl KeyDigest {
    pub fn of(key: &[u8]) -> KeyDigest {
        KeyDigest(Sha256::digest(key).into())
    }

    fn hex(&self) -> String {
        self.0.iter().fold(String::with_capacity(64), |mut out, byte| {
            write!(out, "{byte:02x}").expect("writing to a string cannot fail");
            out
        })
    }

    fn from_hex(text: &str) -> Option<KeyDigest> {
        let mut out = [0_u8; 32];
        if text.len() != 64 || !text.is_ascii() {
            return None;
        }
        for (byte, pair) in out.iter_mut().zip(text.as_bytes().chunks(2)) {
            *byte = u8::from_str_radix(std::str::from_utf8(pair).ok()?, 16).ok()?;
        }
        Some(KeyDigest(out))
    }
}

impl std::fmt::Debug for KeyDigest {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("KeyDigest(…)")
    }
}

impl Serialize for KeyDigest {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.serialize_str(&self.hex())
    }
}

impl<'de> Deserialize<'de> for KeyDigest {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        let text = String::deserialize(deserializer)?;
        KeyDigest::from_hex(&text).ok_or_else(|| serde::de::Error::custom("a digest is 64 hex digits"))
    }
}

/// Whose key it is.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct ApiKey {
    pub tenant: String,
    pub digest: KeyDigest,
}

/// The written keys, still in the clear.
pub(super) struct WrittenKeys<'a> {
    /// Setting and value of each key of the tenant `default`.
    pub(super) single: [(&'static str, Option<&'a str>); 3],
    /// `a=KEYA,b=KEYB`.
    pub(super) list: Option<&'a str>,
}

/// Digests of every key. Messages name the setting and the entry, never a key.
pub(super) fn digests(
    written: &WrittenKeys<'_>,
    notes: &mut Vec<String>,
) -> Result<Vec<ApiKey>, ConfigError> {
    let mut keys: Vec<ApiKey> = Vec::new();
    for (setting, key) in &written.single {
        let Some(key) = key.filter(|key| !key.is_empty()) else { continue };
        check_key(setting, key, notes)?;
        let digest = KeyDigest::of(key.as_bytes());
        // Two names for one key are one key.
        if !keys.iter().any(|known| known.digest == digest) {
            keys.push(ApiKey { tenant: DEFAULT_TENANT.to_owned(), digest });
        }
    }
    if let Some(list) = written.list {
        keys.extend(listed(list, &keys, notes)?);
    }
    Ok(keys)
}

fn listed(list: &str, known: &[ApiKey], notes: &mut Vec<String>) -> Result<Vec<ApiKey>, ConfigError> {
    const SETTING: &str = "CODE_INTERPRETER_API_KEYS";
    let malformed =
        |what: String| ConfigError::new(format!("{SETTING}: {what}"), "write it as a=KEYA,b=KEYB");
    let mut keys: Vec<ApiKey> = Vec::new();
    if list.trim().is_empty() {
        return Ok(keys);
    }
    for (index, entry) in list.split(',').map(str::trim).enumerate() {
        let nth = index + 1;
        let (tenant, key) =
            entry.split_once('=').ok_or_else(|| malformed(format!("entry {nth} is not tenant=key")))?;
        let (tenant, key) = (tenant.trim(), key.trim());
        let fits = |c: char| c.is_ascii_alphanumeric() || "._-".contains(c);
        if tenant.is_empty() || tenant.len() > TENANT_BYTES_MAX || !tenant.chars().all(fits) {
            return Err(malformed(format!("entry {nth} has no usable tenant name (letters, digits, . _ -)")));
        }
        if key.is_empty() {
            return Err(malformed(format!("tenant `{tenant}` has an empty key")));
        }
        check_key(SETTING, key, notes)?;
        let digest = KeyDigest::of(key.as_bytes());
        if keys.iter().any(|other| other.tenant == tenant) {
            return Err(malformed(format!("tenant `{tenant}` stands there twice")));
        }
        if keys.iter().chain(known).any(|other| other.digest == digest) {
            return Err(malformed(format!("the key of tenant `{tenant}` belongs to another tenant as well")));
        }
        keys.push(ApiKey { tenant: tenant.to_owned(), digest });
    }
    Ok(keys)
}

fn check_key(setting: &str, key: &str, notes: &mut Vec<String>) -> Result<(), ConfigError> {
    if !key.bytes().all(|byte| byte.is_ascii_graphic()) {
        return Err(ConfigError::new(
            format!("{setting}: a key may hold visible ASCII characters only, without spaces"),
            "look for a line end or quotes that came along from a file",
        ));
    }
    if key.len() < KEY_BYTES_ADVISED {
        notes.push(format!("{setting} holds a key shorter than {KEY_BYTES_ADVISED} characters"));
    }
    Ok(())
}
