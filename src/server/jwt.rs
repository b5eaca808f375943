//! Signed tokens that LibreChat mints for its users: whom one speaks for, if it is to be believed.
//!
//! A header names a key, never an algorithm of its choice: each key has one, and a header that names another is refused.
//! A token serves several calls, also parallel ones, so its `jti` is not remembered; what bounds its replay is its short
//! life.
#![forbid(unsafe_code)]

use std::fmt::Write as _;
use std::time::{SystemTime, UNIX_EPOCH};

use jsonwebtoken::{Algorithm, DecodingKey, Validation, decode, decode_header};
use serde::Deserialize;

use crate::config::{JwtAlgorithm, JwtConfig, JwtKey, PublicKey};
use crate::engine::{Caller, TenantId};

/// Longest token, in bytes.
const TOKEN_BYTES_MAX: usize = 8 * 1024;
/// Longest tenant, user and other text of a token, in bytes.
const CLAIM_BYTES_MAX: usize = 256;
/// Who may have vouched for the user.
const PRINCIPAL_SOURCES: [&str; 2] = ["librechat_jwt", "openid_reuse"];
/// In front of a token's tenant: no name of an API key's tenant can hold it.
const TENANT_PREFIX: &str = "jwt:";

/// The trusted keys, and what else a token must say.
pub(super) struct Verifier {
    keys: Vec<Key>,
    kid_default: String,
    issuer: String,
    audience: String,
    skew_secs: f64,
    ttl_secs_max: f64,
}

struct Key {
    kid: String,
    key: DecodingKey,
    algorithm: Algorithm,
}

/// Why a token is not believed. For the log; the caller only hears that it is not.
#[derive(Copy, Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub(super) enum Unbelieved {
    #[error("it is not a token")]
    Malformed,
    #[error("its key is not configured")]
    UnknownKey,
    #[error("it names an algorithm that is not its key's")]
    WrongAlgorithm,
    #[error("its signature or its form is wrong")]
    BadSignature,
    #[error("claim {0} is not usable")]
    Claim(&'static str),
    #[error("it has expired")]
    Expired,
    #[error("it is not valid yet")]
    NotYet,
    #[error("it lives longer than allowed")]
    TooLong,
}

/// Only what is looked at; every one of them is required. `role`, `plan_id` and the like change nothing here.
#[derive(Deserialize)]
struct Claims {
    iss: String,
    aud: Audience,
    sub: String,
    tenant_id: String,
    jti: String,
    iat: f64,
    nbf: f64,
    exp: f64,
    principal_source: String,
    auth_context_hash: String,
}

#[derive(Deserialize)]
#[serde(untagged)]
enum Audience {
    One(String),
    Several(Vec<String>),
}

impl Verifier {
    /// `None` without a key: then no token is one.
    pub(super) fn new(config: &JwtConfig) -> Option<Verifier> {
        (!config.keys.is_empty()).then(|| Verifier {
            keys: config.keys.iter().map(Key::new).collect(),
            kid_default: config.kid_default.clone(),
            issuer: config.issuer.clone(),
            audience: config.audience.clone(),
            skew_secs: config.clock_skew.as_secs_f64(),
            ttl_secs_max: config.ttl_max.as_secs_f64(),
        })
    }

    /// Whom `token` speaks for now.
    pub(super) fn caller(&self, token: &[u8]) -> Result<Caller, Unbelieved> {
        let now = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
        self.caller_at(token, now.as_secs_f64())
    }

    fn caller_at(&self, token: &[u8], now: f64) -> Result<Caller, Unbelieved> {
        if token.len() > TOKEN_BYTES_MAX {
            return Err(Unbelieved::Malformed);
        }
        // A name that is not among these ("none" is one) does not even parse.
        let header = decode_header(token).map_err(|_| Unbelieved::Malformed)?;
        if header.typ.is_some_and(|typ| !typ.eq_ignore_ascii_case("JWT")) {
            return Err(Unbelieved::Malformed);
        }
        let kid = header.kid.as_deref().unwrap_or(&self.kid_default);
        let key = self.keys.iter().find(|key| key.kid == kid).ok_or(Unbelieved::UnknownKey)?;
        if header.alg != key.algorithm {
            return Err(Unbelieved::WrongAlgorithm);
        }
        let verified = decode::<Claims>(token, &key.key, &signature_only(key.algorithm));
        self.check(verified.map_err(|_| Unbelieved::BadSignature)?.claims, now)
    }

    fn check(&self, claims: Claims, now: f64) -> Result<Caller, Unbelieved> {
        let is_ours = match &claims.aud {
            Audience::One(audience) => *audience == self.audience,
            Audience::Several(audiences) => audiences.contains(&self.audience),
        };
        for (name, fits) in [
            ("iss", claims.iss == self.issuer),
            ("aud", is_ours),
            ("sub", fits(&claims.sub)),
            ("tenant_id", fits(&claims.tenant_id)),
            ("jti", fits(&claims.jti)),
            ("auth_context_hash", fits(&claims.auth_context_hash)),
            ("principal_source", PRINCIPAL_SOURCES.contains(&claims.principal_source.as_str())),
        ] {
            if !fits {
                return Err(Unbelieved::Claim(name));
            }
        }
        if claims.exp <= now - self.skew_secs {
            return Err(Unbelieved::Expired);
        }
        if claims.nbf > now + self.skew_secs || claims.iat > now + self.skew_secs {
            return Err(Unbelieved::NotYet);
        }
        let lives_secs = claims.exp - claims.iat;
        if lives_secs <= 0.0 || lives_secs > self.ttl_secs_max {
            return Err(Unbelieved::TooLong);
        }
        Ok(Caller { tenant: tenant(&claims.tenant_id), user: Some(claims.sub) })
    }
}

impl Key {
    fn new(it: &JwtKey) -> Key {
        const CHECKED: &str = "the settings hold no key that does not parse";
        let key = match &it.key {
            PublicKey::Ed25519 { x } => DecodingKey::from_ed_components(x),
            PublicKey::Rsa { n, e } => DecodingKey::from_rsa_components(n, e),
        };
        let algorithm = match it.key.algorithm() {
            JwtAlgorithm::EdDsa => Algorithm::EdDSA,
            JwtAlgorithm::Rs256 => Algorithm::RS256,
        };
        Key { kid: it.kid.clone(), key: key.expect(CHECKED), algorithm }
    }
}

/// The claims are looked at by [`Verifier::check`], against one clock and with all their rules in one place.
fn signature_only(algorithm: Algorithm) -> Validation {
    let mut validation = Validation::new(algorithm);
    validation.required_spec_claims.clear();
    validation.validate_exp = false;
    validation.validate_nbf = false;
    validation.validate_aud = false;
    validation
}

/// Whether a claim can serve as a name: neither blank nor endless, and nothing that breaks a line of a log.
fn fits(text: &str) -> bool {
    !text.trim().is_empty() && text.len() <= CLAIM_BYTES_MAX && !text.chars().any(char::is_control)
}

/// A token's tenants are no key's tenants, whatever the signer calls them.
fn tenant(tenant_id: &str) -> TenantId {
    TenantId(format!("{TENANT_PREFIX}{}", escaped(tenant_id)))
}

/// The tenant of `caller` where a family knows no users: there a proven one shares nothing with its neighbours.
pub(super) fn own_tenant(caller: &Caller) -> TenantId {
    match &caller.user {
        Some(user) => TenantId(format!("{}/{}", caller.tenant.0, escaped(user))),
        None => caller.tenant.clone(),
    }
}

/// Two names joined by `/` stay two names.
fn escaped(name: &str) -> String {
    name.chars().fold(String::with_capacity(name.len()), |mut out, c| {
        match c {
            '/' | '%' => write!(out, "%{:02X}", c as u32).expect("writing to a string cannot fail"),
            c => out.push(c),
        }
        out
    })
}

#[cfg(test)]
pub(in crate::server) mod tests {
    use base64::Engine;
    use base64::engine::general_purpose::URL_SAFE_NO_PAD;
    use jsonwebtoken::{EncodingKey, Header, encode};
    use serde_json::{Value, json};

    use super::*;
    use crate::config::{Config, Flags, Surroundings};

    const ED25519: &str = include_str!("../../tests/keys/ed25519.public.pem");
    const RSA: &str = include_str!("../../tests/keys/rsa.public.pem");
    const NOW: f64 = 1_800_000_000.0;
    pub(in crate::server) const KID: &str = "lc-codeapi-2026-05";

    fn signer(algorithm: Algorithm) -> EncodingKey {
        match algorithm {
            Algorithm::RS256 => {
                EncodingKey::from_rsa_pem(include_bytes!("../../tests/keys/rsa.private.pem")).unwrap()
            }
            Algorithm::EdDSA => {
                EncodingKey::from_ed_pem(include_bytes!("../../tests/keys/ed25519.private.pem")).unwrap()
            }
            _ => unreachable!("signers of these tests"),
        }
    }

    /// The public key that [`minted`] tokens are signed for.
    pub(in crate::server) fn public_key() -> &'static str {
        ED25519
    }

    /// What LibreChat puts into a token, at `now`.
    pub(in crate::server) fn claims(tenant: &str, user: &str, now: u64) -> Value {
        json!({
            "iss": "librechat", "aud": "codeapi", "sub": user, "iat": now, "nbf": now, "exp": now + 300,
            "jti": "0b4d1c9e", "tenant_id": tenant, "role": "USER", "principal_source": "librechat_jwt",
            "auth_context_hash": "5f2c",
        })
    }

    fn sign(algorithm: Algorithm, kid: Option<&str>, claims: &Value) -> String {
        let header = Header { kid: kid.map(str::to_owned), ..Header::new(algorithm) };
        encode(&header, claims, &signer(algorithm)).unwrap()
    }

    /// A token of the tenant and user that is good now.
    pub(in crate::server) fn minted(tenant: &str, user: &str) -> String {
        let now = SystemTime::now().duration_since(UNIX_EPOCH).unwrap().as_secs();
        sign(Algorithm::EdDSA, Some(KID), &claims(tenant, user, now))
    }

    fn verifier_with(variables: &[(&str, &str)]) -> Verifier {
        let env = |name: &str| match name {
            "HOME" => Some("/home/me".to_owned()),
            name => variables.iter().find(|(known, _)| *known == name).map(|(_, value)| (*value).to_owned()),
        };
        let around = Surroundings { root: false, python_env: "/opt/caisson/python".into() };
        let (config, _) = Config::load(&Flags::default(), &env, None, &around).unwrap();
        Verifier::new(&config.librechat.jwt).expect("a key is configured")
    }

    fn verifier() -> Verifier {
        verifier_with(&[("CODEAPI_JWT_PUBLIC_KEY", ED25519)])
    }

    fn told(token: &str) -> Result<Caller, Unbelieved> {
        verifier().caller_at(token.as_bytes(), NOW)
    }

    fn with(changes: Value) -> Value {
        let mut claims = claims("legacy", "alice", NOW as u64);
        for (name, value) in changes.as_object().unwrap() {
            match value {
                Value::Null => claims.as_object_mut().unwrap().remove(name),
                value => claims.as_object_mut().unwrap().insert(name.clone(), value.clone()),
            };
        }
        claims
    }

    fn told_with(changes: Value) -> Result<Caller, Unbelieved> {
        told(&sign(Algorithm::EdDSA, Some(KID), &with(changes)))
    }

    fn alice() -> Caller {
        Caller { tenant: TenantId("jwt:legacy".to_owned()), user: Some("alice".to_owned()) }
    }

    fn part(value: Value) -> String {
        URL_SAFE_NO_PAD.encode(value.to_string())
    }

    #[test]
    fn a_token_speaks_for_its_tenant_and_user_and_may_be_shown_again() {
        assert_eq!(told_with(json!({})), Ok(alice()));
        assert_eq!(told_with(json!({ "aud": ["other", "codeapi"] })), Ok(alice()));
        assert_eq!(
            told_with(json!({ "principal_source": "openid_reuse", "plan_id": 1, "role": null })),
            Ok(alice())
        );
        let token = sign(Algorithm::EdDSA, Some(KID), &with(json!({})));
        let verifier = verifier();
        for _ in 0..3 {
            assert_eq!(verifier.caller_at(token.as_bytes(), NOW), Ok(alice()), "the same jti");
        }
        // One without a name is of the key that tokens are of.
        assert_eq!(told(&sign(Algorithm::EdDSA, None, &with(json!({})))), Ok(alice()));
    }

    #[test]
    fn rs256_is_verified_with_an_rsa_key() {
        let verifier = verifier_with(&[("CODEAPI_JWT_PUBLIC_KEY", RSA), ("CODEAPI_JWT_KID", "r")]);
        let token = sign(Algorithm::RS256, Some("r"), &with(json!({})));
        assert_eq!(verifier.caller_at(token.as_bytes(), NOW), Ok(alice()));
        let mut forged = token.into_bytes();
        let last = forged.len() - 20;
        forged[last] = if forged[last] == b'A' { b'B' } else { b'A' };
        assert_eq!(verifier.caller_at(&forged, NOW), Err(Unbelieved::BadSignature));
    }

    #[test]
    fn every_claim_is_required_and_looked_at() {
        for name in [
            "iss",
            "aud",
            "sub",
            "tenant_id",
            "jti",
            "iat",
            "nbf",
            "exp",
            "principal_source",
            "auth_context_hash",
        ] {
            assert_eq!(told_with(json!({ name: null })), Err(Unbelieved::BadSignature), "without {name}");
            assert!(told_with(json!({ name: [1] })).is_err(), "mistyped {name}");
            assert!(told_with(json!({ name: "" })).is_err(), "empty {name}");
        }
        for (name, value) in [
            ("iss", json!("evil")),
            ("aud", json!("other")),
            ("aud", json!(["other"])),
            ("aud", json!([])),
            ("sub", json!(" ")),
            ("sub", json!("a\nb")),
            ("sub", json!("a".repeat(257))),
            ("tenant_id", json!("t\u{0}")),
            ("jti", json!("j".repeat(257))),
            ("principal_source", json!("somebody")),
        ] {
            assert_eq!(told_with(json!({ name: value })), Err(Unbelieved::Claim(name)), "{name}");
        }
    }

    #[test]
    fn the_clock_has_rules() {
        let now = NOW as u64;
        let lived = |iat: u64, nbf: u64, exp: u64| told_with(json!({ "iat": iat, "nbf": nbf, "exp": exp }));
        assert_eq!(lived(now - 300, now - 300, now), Ok(alice()), "just expired, within the skew");
        assert_eq!(lived(now - 329, now - 329, now - 29), Ok(alice()));
        assert_eq!(lived(now - 330, now - 330, now - 30), Err(Unbelieved::Expired));
        assert_eq!(lived(now - 4000, now - 4000, now - 3700), Err(Unbelieved::Expired));
        assert_eq!(lived(now, now + 30, now + 300), Ok(alice()));
        assert_eq!(lived(now, now + 31, now + 300), Err(Unbelieved::NotYet));
        assert_eq!(lived(now + 31, now, now + 300), Err(Unbelieved::NotYet));
        assert_eq!(lived(now, now, now + 301), Err(Unbelieved::TooLong));
        assert_eq!(lived(now + 20, now, now + 20), Err(Unbelieved::TooLong), "no life at all");
        let shorter =
            verifier_with(&[("CODEAPI_JWT_PUBLIC_KEY", ED25519), ("CODEAPI_JWT_MAX_TTL_SECONDS", "60")]);
        let token = sign(Algorithm::EdDSA, Some(KID), &with(json!({})));
        assert_eq!(shorter.caller_at(token.as_bytes(), NOW), Err(Unbelieved::TooLong));
    }

    #[test]
    fn a_changed_or_unsigned_token_is_not_believed() {
        let token = sign(Algorithm::EdDSA, Some(KID), &with(json!({})));
        let [header, payload, signature] =
            <[&str; 3]>::try_from(token.split('.').collect::<Vec<_>>()).unwrap();
        let root = part(with(json!({ "sub": "root" })));
        for (forged, why) in [
            (format!("{header}.{root}.{signature}"), Unbelieved::BadSignature),
            (format!("{header}.{payload}."), Unbelieved::BadSignature),
            (format!("{header}.{payload}.{}", "A".repeat(signature.len())), Unbelieved::BadSignature),
            (format!("{}.{root}.", part(json!({ "alg": "none", "typ": "JWT" }))), Unbelieved::Malformed),
            (format!("{}.{root}.", part(json!({ "alg": "None", "kid": KID }))), Unbelieved::Malformed),
            (
                format!(
                    "{}.{payload}.{signature}",
                    part(json!({ "alg": "EdDSA", "typ": "at+jwt", "kid": KID }))
                ),
                Unbelieved::Malformed,
            ),
            (
                format!(
                    "{}.{payload}.{signature}",
                    part(json!({ "alg": "EdDSA", "kid": KID, "crit": ["exp"] }))
                ),
                Unbelieved::BadSignature,
            ),
            (format!("{header}.{payload}"), Unbelieved::Malformed),
            (format!("{token}.x"), Unbelieved::Malformed),
            ("a.b.c".to_owned(), Unbelieved::Malformed),
            (String::new(), Unbelieved::Malformed),
            (format!("{token}{}", "A".repeat(TOKEN_BYTES_MAX)), Unbelieved::Malformed),
        ] {
            assert_eq!(told(&forged), Err(why), "{forged}");
        }
        assert_eq!(told(&token), Ok(alice()), "the control");
    }

    #[test]
    fn a_key_verifies_its_own_algorithm_only() {
        let both = tempfile::tempdir().unwrap();
        std::fs::write(both.path().join("ed.pem"), ED25519).unwrap();
        std::fs::write(both.path().join("rsa.pem"), RSA).unwrap();
        let verifier = verifier_with(&[("CODEAPI_JWT_PUBLIC_KEYS_DIR", both.path().to_str().unwrap())]);
        let told =
            |algorithm, kid| verifier.caller_at(sign(algorithm, Some(kid), &with(json!({}))).as_bytes(), NOW);
        assert_eq!(told(Algorithm::EdDSA, "ed"), Ok(alice()));
        assert_eq!(told(Algorithm::RS256, "rsa"), Ok(alice()));
        assert_eq!(told(Algorithm::EdDSA, "rsa"), Err(Unbelieved::WrongAlgorithm));
        assert_eq!(told(Algorithm::RS256, "ed"), Err(Unbelieved::WrongAlgorithm));
        assert_eq!(told(Algorithm::EdDSA, "other"), Err(Unbelieved::UnknownKey));
        assert_eq!(told(Algorithm::EdDSA, ""), Err(Unbelieved::UnknownKey));
        // The public key is no secret, so a token signed with it as one would be anybody's.
        for (kid, secret) in [("ed", ED25519), ("rsa", RSA)] {
            for algorithm in [Algorithm::HS256, Algorithm::HS512] {
                let header = Header { kid: Some(kid.to_owned()), ..Header::new(algorithm) };
                let key = EncodingKey::from_secret(secret.as_bytes()).unwrap();
                let token = encode(&header, &with(json!({})), &key).unwrap();
                assert_eq!(verifier.caller_at(token.as_bytes(), NOW), Err(Unbelieved::WrongAlgorithm));
            }
        }
        let pss = Header { kid: Some("rsa".to_owned()), ..Header::new(Algorithm::PS256) };
        let token = encode(&pss, &with(json!({})), &signer(Algorithm::RS256)).unwrap();
        assert_eq!(verifier.caller_at(token.as_bytes(), NOW), Err(Unbelieved::WrongAlgorithm));
    }

    #[test]
    fn tenants_and_users_of_tokens_are_names_of_their_own() {
        let caller = |tenant: &str, user: &str| {
            told_with(json!({ "tenant_id": tenant, "sub": user })).expect("both are usable names")
        };
        assert_eq!(caller("default", "u").tenant.0, "jwt:default");
        assert_eq!(own_tenant(&caller("t", "u")).0, "jwt:t/u");
        // Whatever a signer calls them, two pairs are never one.
        let pairs = [("a/b", "c"), ("a", "b/c"), ("a%2Fb", "c"), ("a", "b%2Fc"), ("a/b/c", "d"), ("a", "b")];
        let mut names: Vec<String> = Vec::new();
        for (tenant, user) in pairs {
            let it = caller(tenant, user);
            names.extend([own_tenant(&it).0, it.tenant.0]);
        }
        names.sort();
        let count = names.len();
        names.dedup();
        // "a" and its tenant stand there three times.
        assert_eq!(names.len(), count - 2, "{names:?}");
        let keyed = Caller { tenant: TenantId("a".to_owned()), user: None };
        assert_eq!(own_tenant(&keyed).0, "a");
    }

    proptest::proptest! {
        #[test]
        fn no_bytes_are_believed_or_make_us_panic(bytes in proptest::collection::vec(proptest::num::u8::ANY, 0..200)) {
            proptest::prop_assert!(verifier().caller_at(&bytes, NOW).is_err());
        }

        #[test]
        fn no_header_or_payload_makes_us_panic(header in "[ -~]{0,60}", payload in "[ -~]{0,60}") {
            let token = format!("{}.{}.AAAA", URL_SAFE_NO_PAD.encode(header), URL_SAFE_NO_PAD.encode(payload));
            proptest::prop_assert!(verifier().caller_at(token.as_bytes(), NOW).is_err());
        }
    }
}
