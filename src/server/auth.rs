//! Keys: who a request belongs to.
//!
//! Any key closes every route but the public ones. A key travels as `Authorization: Bearer`,
//! `x-api-key`, `X-AIO-API-Key`, `?api_key=` or, where the operator allows it, `/k/<key>` in front of the path; the last
//! two are cut out of the URL before anything else looks at the request ([`cut_keys`]), and reach this module as an
//! extension. A signed token travels as `Authorization: Bearer` only.
#![forbid(unsafe_code)]

use std::borrow::Cow;

use axum::extract::{Request, State};
use axum::http::{HeaderMap, Method, StatusCode, Uri, header};
use axum::middleware::Next;
use axum::response::{IntoResponse, Response};
use percent_encoding::percent_decode_str;
use subtle::{ConditionallySelectable, ConstantTimeEq};

use super::answer::Refused;
use super::crowd::Seat;
use super::front::closing;
use super::jwt::{Verifier, own_tenant};
use super::{AppState, librechat};
use crate::config::{Config, DEFAULT_TENANT, KeyDigest};
use crate::engine::{Caller, TenantId};
use crate::telemetry;

/// Whole paths that answer without a key.
const PUBLIC: [&str; 8] = [
    "/",
    "/health",
    "/v1/health",
    "/v1/ping",
    "/openapi.json",
    "/v1/openapi.json",
    "/v2/openapi.json",
    "/internal/auth",
];

/// Headers that carry a bare key.
const KEY_HEADERS: [&str; 2] = ["x-api-key", "x-aio-api-key"];
/// Most bearer credentials that are tried, and most others.
const VALUES_TRIED_MAX: usize = 8;
const QUERY_KEY: &str = "api_key";
/// What stands in front of a key in a path.
const PATH_KEY: &[u8] = b"k";
/// In place of what is not shown.
pub(super) const MASKED: &str = "(masked)";
/// In front of a path whose key was cut although none may be there. No route begins so.
const NO_ROUTE: &str = "/k";

/// Keys that stood in the URL, wherever in it. Its debug form is blank.
#[derive(Clone, Default, PartialEq, Eq)]
pub(crate) struct UrlKeys(Vec<Vec<u8>>);

impl std::fmt::Debug for UrlKeys {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("UrlKeys(…)")
    }
}

/// Every key of the daemon, as digests, and the signers it trusts.
pub(crate) struct Keyring {
    keys: Vec<(TenantId, KeyDigest)>,
    tokens: Option<Verifier>,
}

/// Whom a request's credentials speak for.
#[derive(Debug, PartialEq, Eq)]
enum Identity {
    Known(Caller),
    Unknown,
    /// They differ, where a route takes one only.
    Ambiguous,
}

impl Keyring {
    pub(crate) fn new(config: &Config) -> Keyring {
        let keys = config.api_keys.iter().map(|key| (TenantId(key.tenant.clone()), key.digest)).collect();
        Keyring { keys, tokens: Verifier::new(&config.librechat.jwt) }
    }

    /// True when no key is configured, of neither kind: everybody is the tenant `default`.
    pub(crate) fn is_open(&self) -> bool {
        self.keys.is_empty() && self.tokens.is_none()
    }

    /// The caller of `presented`. Looks at every key whatever it finds, and compares digests without
    /// stopping early, so the time says nothing about a key.
    fn caller_of(&self, presented: &[u8]) -> Option<Caller> {
        let digest = KeyDigest::of(presented);
        let mut found = u32::MAX;
        for (index, (_, known)) in (0_u32..).zip(&self.keys) {
            found.conditional_assign(&index, known.0.ct_eq(&digest.0));
        }
        let (tenant, _) = self.keys.get(found as usize)?;
        Some(Caller { tenant: tenant.clone(), user: None })
    }

    /// The same for what came as `Bearer`: a key, or a token.
    fn caller_of_bearer(&self, presented: &[u8]) -> Option<Caller> {
        let tokens =
            self.tokens.as_ref().filter(|_| presented.iter().filter(|byte| **byte == b'.').count() == 2);
        self.caller_of(presented).or_else(|| {
            let told = tokens?.caller(presented);
            told.inspect_err(|reason| tracing::debug!(%reason, "a token was not believed")).ok()
        })
    }

    /// The caller of the first carrier that holds a good credential. Where `only_one` may be there, several that differ
    /// are refused: which of them was meant is not ours to guess.
    fn identify(&self, headers: &HeaderMap, url_keys: Option<&UrlKeys>, only_one: bool) -> Identity {
        let bearer = header_values(headers, header::AUTHORIZATION.as_str()).filter_map(bearer);
        let bearer: Vec<&[u8]> = bearer.collect();
        let bare = KEY_HEADERS.into_iter().flat_map(|name| header_values(headers, name));
        let in_url = url_keys.into_iter().flat_map(|keys| &keys.0).map(Vec::as_slice);
        let bare: Vec<&[u8]> = bare.chain(in_url).collect();
        if only_one {
            let mut given = bearer.iter().chain(&bare).filter(|given| !given.is_empty());
            let first = given.next();
            if given.any(|other| Some(other) != first) {
                return Identity::Ambiguous;
            }
        }
        let tried = VALUES_TRIED_MAX;
        let of_bearer = bearer.iter().take(tried).find_map(|given| self.caller_of_bearer(given));
        let known = of_bearer.or_else(|| bare.iter().take(tried).find_map(|given| self.caller_of(given)));
        known.map_or(Identity::Unknown, Identity::Known)
    }
}

fn header_values<'a>(headers: &'a HeaderMap, name: &str) -> impl Iterator<Item = &'a [u8]> + use<'a> {
    headers.get_all(name).iter().map(|value| value.as_bytes())
}

fn bearer(value: &[u8]) -> Option<&[u8]> {
    let (scheme, key) = value.split_at_checked(7)?;
    scheme.eq_ignore_ascii_case(b"bearer ").then(|| key.trim_ascii())
}

/// Routes whose contract refuses several credentials that differ. The AIO routes take the first that is known.
fn takes_one_credential(path: &str) -> bool {
    librechat::owns(path) || path == "/mcp" || path.starts_with("/mcp/")
}

/// Lets a request through with its [`Caller`] and [`TenantId`], or answers 401.
///
/// The two differ for a token: AIO routes know no users, so there each proven user is a tenant of its own.
pub(super) async fn require_key(State(state): State<AppState>, mut request: Request, next: Next) -> Response {
    let keyring = state.keyring();
    let path = request.uri().path();
    let identity = if keyring.is_open() {
        Identity::Known(Caller { tenant: TenantId(DEFAULT_TENANT.to_owned()), user: None })
    } else {
        let url_keys = request.extensions().get::<UrlKeys>();
        keyring.identify(request.headers(), url_keys, takes_one_credential(path))
    };
    let is_public = request.method() == Method::OPTIONS || PUBLIC.contains(&path);
    let mut known = false;
    match identity {
        Identity::Known(caller) => {
            let seat = request.extensions().get::<Seat>();
            if let Some(refused) = seat.and_then(|seat| seat.claim(&caller.tenant).err()) {
                return closing(refused.answer(path));
            }
            telemetry::record_tenant(&caller.tenant.0);
            request.extensions_mut().insert(own_tenant(&caller));
            request.extensions_mut().insert(caller);
            known = true;
        }
        _ if is_public => {}
        Identity::Unknown => return Refused::unauthorized().answer(path),
        Identity::Ambiguous => return Refused::ambiguous().answer(path),
    }
    let mut response = next.run(request).await;
    if known {
        response.extensions_mut().insert(Known);
    }
    response
}

/// On an answer whose request came with a key, where one is needed.
#[derive(Copy, Clone, Debug)]
pub(super) struct Known;

/// Whether the caller's key is good, for a proxy's subrequest.
#[utoipa::path(
    get, path = "/internal/auth", tag = "info",
    responses((status = 204, description = "The key is good"), (status = 401, description = "It is not"))
)]
pub(super) async fn internal_auth(State(state): State<AppState>, request: Request) -> Response {
    let original = request.headers().get("x-original-uri").and_then(|value| value.to_str().ok());
    let takes_paths = state.config().librechat.url_keys;
    let in_original = original.map(|uri| keys_in(uri, takes_paths)).unwrap_or_default();
    let known = request.extensions().get::<TenantId>().is_some()
        || in_original.0.iter().take(VALUES_TRIED_MAX).any(|key| state.keyring().caller_of(key).is_some());
    if known {
        return StatusCode::NO_CONTENT.into_response();
    }
    Refused::unauthorized().answer(request.uri().path())
}

fn keys_in(uri: &str, takes_paths: bool) -> UrlKeys {
    let (path, query) = uri.split_once('?').unwrap_or((uri, ""));
    let (mut keys, _) = split_path(path);
    if !takes_paths {
        keys.clear();
    }
    keys.extend(split_query(query).0);
    UrlKeys(keys)
}

/// Takes every `api_key` and every leading `/k/<key>` out of the URL. What is left is the URL as if no key had ever been
/// there. Without `takes_paths` the latter is cut as well, so that nothing logs it, and leaves a path that no route has.
pub(crate) fn cut_keys(uri: &mut Uri, takes_paths: bool) -> Option<UrlKeys> {
    let (in_path, path) = split_path(uri.path());
    let (in_query, query) = split_query(uri.query().unwrap_or_default());
    if in_path.is_empty() && in_query.is_empty() {
        return None;
    }
    let path = match in_path.is_empty() || takes_paths {
        true => path.to_owned(),
        false => format!("{NO_ROUTE}{path}"),
    };
    let path_and_query = match query.is_empty() {
        true => path,
        false => format!("{path}?{query}"),
    };
    let mut parts = std::mem::take(uri).into_parts();
    // Part of a valid URL is a valid URL; should that ever be wrong, the root is the safe one.
    parts.path_and_query = path_and_query.parse().ok();
    *uri = Uri::from_parts(parts).unwrap_or_else(|_| Uri::from_static("/"));
    let mut keys = if takes_paths { in_path } else { Vec::new() };
    keys.extend(in_query);
    Some(UrlKeys(keys))
}

/// The keys of leading `/k/<key>` segments, and the path behind them. Slashes may be doubled: a base URL that ends in one
/// must not bring a key into the log.
fn split_path(path: &str) -> (Vec<Vec<u8>>, &str) {
    let (mut keys, mut rest) = (Vec::new(), path);
    loop {
        let (first, behind) = segment(rest);
        let (key, behind) = segment(behind);
        if key.is_empty() || percent_decode_str(first).ne(PATH_KEY.iter().copied()) {
            break;
        }
        keys.push(percent_decode_str(key).collect());
        rest = if behind.is_empty() { "/" } else { behind };
    }
    (keys, rest)
}

/// A path as it may be logged: what stands behind a `k` is not shown where it was no key either, as in `/v1/k/<key>`,
/// which somebody who meant `/k/<key>/v1` has written.
pub(super) fn shown_path(path: &str) -> Cow<'_, str> {
    let is_mark = |segment: &str| {
        percent_decode_str(segment).map(|byte| byte.to_ascii_lowercase()).eq(PATH_KEY.iter().copied())
    };
    if !path.split('/').any(is_mark) {
        return Cow::Borrowed(path);
    }
    let mut behind_mark = false;
    let shown = path.split('/').map(|segment| {
        let masked = behind_mark && !segment.is_empty();
        behind_mark = if segment.is_empty() { behind_mark } else { !masked && is_mark(segment) };
        if masked { MASKED } else { segment }
    });
    Cow::Owned(shown.collect::<Vec<_>>().join("/"))
}

/// The first segment of a path, and what is behind it with its slash.
fn segment(path: &str) -> (&str, &str) {
    let path = path.trim_start_matches('/');
    path.split_at(path.find('/').unwrap_or(path.len()))
}

/// Every `api_key` of a query, and the query without any. `+` stays `+`: keys may hold it.
fn split_query(query: &str) -> (Vec<Vec<u8>>, String) {
    let mut keys = Vec::new();
    let mut rest: Vec<&str> = Vec::new();
    for pair in query.split('&') {
        let (name, value) = pair.split_once('=').unwrap_or((pair, ""));
        let name: Vec<u8> = percent_decode_str(name).collect();
        if name.eq_ignore_ascii_case(QUERY_KEY.as_bytes()) {
            keys.push(percent_decode_str(value).collect());
        } else {
            rest.push(pair);
        }
    }
    (keys, rest.join("&"))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn cut_all(uri: &str, takes_paths: bool) -> (Option<Vec<String>>, String) {
        let mut uri: Uri = uri.parse().unwrap();
        let keys = cut_keys(&mut uri, takes_paths);
        let text = |key: Vec<u8>| String::from_utf8(key).unwrap();
        (keys.map(|keys| keys.0.into_iter().map(text).collect()), uri.to_string())
    }

    fn cut(uri: &str) -> (Option<String>, String) {
        let (keys, uri) = cut_all(uri, true);
        (keys.map(|mut keys| keys.remove(0)), uri)
    }

    #[test]
    fn the_key_leaves_the_url_and_nothing_else_does() {
        assert_eq!(cut("/a?api_key=k"), (Some("k".to_owned()), "/a".to_owned()));
        assert_eq!(cut("/a?x=1&api_key=k%2B1&y"), (Some("k+1".to_owned()), "/a?x=1&y".to_owned()));
        assert_eq!(cut("/a?api%5Fkey=k&api_key=l"), (Some("k".to_owned()), "/a".to_owned()));
        assert_eq!(cut("/a?xapi_key=k"), (None, "/a?xapi_key=k".to_owned()));
        assert_eq!(cut("http://h:1/a?API_KEY=a+b"), (Some("a+b".to_owned()), "http://h:1/a".to_owned()));
    }

    #[test]
    fn what_may_be_a_key_in_the_wrong_place_is_not_shown() {
        for (path, shown) in [
            ("/v1/k/KEY/exec", "/v1/k/(masked)/exec"),
            ("/K/KEY", "/K/(masked)"),
            ("/K//KEY/", "/K//(masked)/"),
            ("/v1/%4b/KEY", "/v1/%4b/(masked)"),
            ("/a/k/KEY/k/OTHER", "/a/k/(masked)/k/(masked)"),
            ("/a/k/k/b", "/a/k/(masked)/b"),
            ("/a/k", "/a/k"),
            ("/kk/b", "/kk/b"),
            ("/", "/"),
        ] {
            assert_eq!(shown_path(path), shown, "{path}");
        }
    }

    #[test]
    fn keys_in_front_of_the_path_leave_it() {
        let all = |uri: &str, takes_paths| {
            let (keys, uri) = cut_all(uri, takes_paths);
            (keys.map(|keys| keys.join(" ")), uri)
        };
        for (uri, keys, rest) in [
            ("/k/KEY/v1/exec", "KEY", "/v1/exec"),
            ("/k/KEY/exec?a=1", "KEY", "/exec?a=1"),
            ("http://h/k/KEY/exec", "KEY", "http://h/exec"),
            ("/k/key%2Bof%2Fdefault/exec", "key+of/default", "/exec"),
            ("/k/KEY", "KEY", "/"),
            ("/k/KEY/", "KEY", "/"),
            ("//k/KEY/exec", "KEY", "/exec"),
            ("/k//KEY/exec", "KEY", "/exec"),
            ("/%6b/KEY/exec", "KEY", "/exec"),
            ("/k/KEY/k/OTHER/exec?api_key=THIRD", "KEY OTHER THIRD", "/exec"),
        ] {
            assert_eq!(all(uri, true), (Some(keys.to_owned()), rest.to_owned()), "{uri}");
        }
        for uri in ["/k", "/k/", "/kk/KEY/exec", "/v1/k/KEY/exec", "/exec"] {
            assert_eq!(all(uri, true), (None, uri.to_owned()));
        }
        // Where none may be there it is cut as well, counts for nothing, and leads nowhere.
        assert_eq!(all("/k/KEY/exec?a=1", false), (Some(String::new()), "/k/exec?a=1".to_owned()));
        assert_eq!(all("/k/KEY/exec?api_key=Q", false), (Some("Q".to_owned()), "/k/exec".to_owned()));
    }

    proptest::proptest! {
        #[test]
        fn no_path_keeps_a_key(before in "/{1,3}", after in "[ -~]{0,20}", takes_paths in proptest::bool::ANY) {
            let Ok(mut uri) = format!("{before}k/SECRET/{after}").parse::<Uri>() else { return Ok(()) };
            let keys = cut_keys(&mut uri, takes_paths).expect("one is there");
            proptest::prop_assert_eq!(keys.0.contains(&b"SECRET".to_vec()), takes_paths);
            proptest::prop_assert!(!uri.to_string().contains("SECRET"), "{}", uri);
        }

        #[test]
        fn no_url_keeps_a_key(path in "/[ -~]{0,12}", before in "[ -~]{0,12}", after in "[ -~]{0,12}") {
            let Ok(mut uri) = format!("{path}?{before}&api_key=SECRET&{after}").parse::<Uri>() else {
                return Ok(());
            };
            cut_keys(&mut uri, true);
            proptest::prop_assert!(!uri.query().unwrap_or_default().split('&').any(|pair| pair == "api_key=SECRET"));
        }
    }

    #[test]
    fn a_url_key_does_not_print() {
        assert!(!format!("{:?}", UrlKeys(vec![b"secret".to_vec()])).contains("secret"));
    }

    #[test]
    fn a_bearer_scheme_is_case_insensitive() {
        assert_eq!(bearer(b"bearer  k "), Some(&b"k"[..]));
        assert_eq!(bearer(b"Basic k"), None);
        assert_eq!(bearer(b"Bear"), None);
    }
}
