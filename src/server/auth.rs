//! Keys: which tenant a request belongs to.
//!
//! Any key closes every route but the public ones. A key travels as `Authorization: Bearer`,
//! `x-api-key`, `X-AIO-API-Key` or `?api_key=`; the last is cut out of the URL before anything else
//! looks at the request ([`cut_key`]), and reaches this module as an extension.
#![forbid(unsafe_code)]

use axum::extract::{Request, State};
use axum::http::{HeaderMap, Method, StatusCode, Uri, header};
use axum::middleware::Next;
use axum::response::{IntoResponse, Response};
use percent_encoding::percent_decode_str;
use subtle::{ConditionallySelectable, ConstantTimeEq};

use super::AppState;
use super::answer::Refused;
use crate::config::{ApiKey, DEFAULT_TENANT, KeyDigest};
use crate::engine::TenantId;
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
/// Most values of one header that are tried.
const VALUES_TRIED_MAX: usize = 4;
const QUERY_KEY: &str = "api_key";

/// A key that stood in the URL. Its debug form is blank.
#[derive(Clone, PartialEq, Eq)]
pub(crate) struct UrlKey(Vec<u8>);

impl std::fmt::Debug for UrlKey {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("UrlKey(…)")
    }
}

/// Every key of the daemon, as digests.
pub(crate) struct Keyring {
    keys: Vec<(TenantId, KeyDigest)>,
}

impl Keyring {
    pub(crate) fn new(keys: &[ApiKey]) -> Keyring {
        let keys = keys.iter().map(|key| (TenantId(key.tenant.clone()), key.digest)).collect();
        Keyring { keys }
    }

    /// True when no key is configured: everybody is the tenant `default`.
    pub(crate) fn is_open(&self) -> bool {
        self.keys.is_empty()
    }

    /// The tenant of `presented`. Looks at every key whatever it finds, and compares digests without
    /// stopping early, so the time says nothing about a key.
    fn tenant_of(&self, presented: &[u8]) -> Option<&TenantId> {
        let digest = KeyDigest::of(presented);
        let mut found = u32::MAX;
        for (index, (_, known)) in (0_u32..).zip(&self.keys) {
            found.conditional_assign(&index, known.0.ct_eq(&digest.0));
        }
        self.keys.get(found as usize).map(|(tenant, _)| tenant)
    }

    /// The tenant of the first carrier that holds a known key.
    fn identify(&self, headers: &HeaderMap, url_key: Option<&UrlKey>) -> Option<TenantId> {
        let bearer = header_values(headers, header::AUTHORIZATION.as_str()).filter_map(bearer);
        let bare = KEY_HEADERS.into_iter().flat_map(|name| header_values(headers, name));
        let url = url_key.map(|key| key.0.as_slice());
        bearer.chain(bare).chain(url).find_map(|key| self.tenant_of(key)).cloned()
    }
}

fn header_values<'a>(headers: &'a HeaderMap, name: &str) -> impl Iterator<Item = &'a [u8]> + use<'a> {
    let values: Vec<&[u8]> =
        headers.get_all(name).iter().take(VALUES_TRIED_MAX).map(|value| value.as_bytes()).collect();
    values.into_iter()
}

fn bearer(value: &[u8]) -> Option<&[u8]> {
    let (scheme, key) = value.split_at_checked(7)?;
    scheme.eq_ignore_ascii_case(b"bearer ").then(|| key.trim_ascii())
}

/// Lets a request through with its [`TenantId`], or answers 401.
pub(super) async fn require_key(State(state): State<AppState>, mut request: Request, next: Next) -> Response {
    let keyring = state.keyring();
    let mut known = false;
    let tenant = if keyring.is_open() {
        Some(TenantId(DEFAULT_TENANT.to_owned()))
    } else {
        keyring.identify(request.headers(), request.extensions().get::<UrlKey>())
    };
    match tenant {
        Some(tenant) => {
            telemetry::record_tenant(&tenant.0);
            request.extensions_mut().insert(tenant);
            known = true;
        }
        None if request.method() == Method::OPTIONS || PUBLIC.contains(&request.uri().path()) => {}
        None => return Refused::unauthorized().answer(request.uri().path()),
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
    let in_original = original.and_then(|uri| uri.split_once('?')).and_then(|(_, query)| split_key(query).0);
    let known = request.extensions().get::<TenantId>().is_some()
        || in_original.is_some_and(|key| state.keyring().tenant_of(&key.0).is_some());
    if known {
        return StatusCode::NO_CONTENT.into_response();
    }
    Refused::unauthorized().answer(request.uri().path())
}

/// Takes `api_key` out of the URL. What is left is the URL as if the key had never been there.
pub(crate) fn cut_key(uri: &mut Uri) -> Option<UrlKey> {
    let (key, rest) = split_key(uri.query()?);
    let key = key?;
    let path_and_query = match rest.is_empty() {
        true => uri.path().to_owned(),
        false => format!("{}?{rest}", uri.path()),
    };
    let mut parts = std::mem::take(uri).into_parts();
    // Part of a valid query is a valid query; should that ever be wrong, no query is the safe one.
    parts.path_and_query = path_and_query.parse().ok();
    *uri = Uri::from_parts(parts).unwrap_or_else(|_| Uri::from_static("/"));
    Some(key)
}

/// The first `api_key` of a query, and the query without any. `+` stays `+`: keys may hold it.
fn split_key(query: &str) -> (Option<UrlKey>, String) {
    let mut key = None;
    let mut rest: Vec<&str> = Vec::new();
    for pair in query.split('&') {
        let (name, value) = pair.split_once('=').unwrap_or((pair, ""));
        let name: Vec<u8> = percent_decode_str(name).collect();
        if name.eq_ignore_ascii_case(QUERY_KEY.as_bytes()) {
            key.get_or_insert_with(|| UrlKey(percent_decode_str(value).collect()));
        } else {
            rest.push(pair);
        }
    }
    (key, rest.join("&"))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn cut(uri: &str) -> (Option<Vec<u8>>, String) {
        let mut uri: Uri = uri.parse().unwrap();
        let key = cut_key(&mut uri);
        (key.map(|key| key.0), uri.to_string())
    }

    #[test]
    fn the_key_leaves_the_url_and_nothing_else_does() {
        assert_eq!(cut("/a?api_key=k"), (Some(b"k".to_vec()), "/a".to_owned()));
        assert_eq!(cut("/a?x=1&api_key=k%2B1&y"), (Some(b"k+1".to_vec()), "/a?x=1&y".to_owned()));
        assert_eq!(cut("/a?api%5Fkey=k&api_key=l"), (Some(b"k".to_vec()), "/a".to_owned()));
        assert_eq!(cut("/a?xapi_key=k"), (None, "/a?xapi_key=k".to_owned()));
        assert_eq!(cut("http://h:1/a?API_KEY=a+b"), (Some(b"a+b".to_vec()), "http://h:1/a".to_owned()));
    }

    proptest::proptest! {
        #[test]
        fn no_url_keeps_a_key(path in "/[ -~]{0,12}", before in "[ -~]{0,12}", after in "[ -~]{0,12}") {
            let Ok(mut uri) = format!("{path}?{before}&api_key=SECRET&{after}").parse::<Uri>() else {
                return Ok(());
            };
            let path = uri.path().to_owned();
            cut_key(&mut uri);
            proptest::prop_assert_eq!(uri.path(), path);
            proptest::prop_assert!(!uri.query().unwrap_or_default().split('&').any(|pair| pair == "api_key=SECRET"));
        }
    }

    #[test]
    fn a_url_key_does_not_print() {
        assert!(!format!("{:?}", UrlKey(b"secret".to_vec())).contains("secret"));
    }

    #[test]
    fn a_bearer_scheme_is_case_insensitive() {
        assert_eq!(bearer(b"bearer  k "), Some(&b"k"[..]));
        assert_eq!(bearer(b"Basic k"), None);
        assert_eq!(bearer(b"Bear"), None);
    }
}
