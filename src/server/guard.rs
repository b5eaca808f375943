//! Who may talk to a daemon without a key: programs of this machine, and no web page.
//!
//! A page in a browser can send requests to loopback, and by DNS rebinding even read the answers. So
//! without a key a request must name a host that cannot be rebound, come from no foreign origin, and
//! carry a body of a type that a plain form cannot send.
#![forbid(unsafe_code)]

use std::net::IpAddr;

use axum::body::HttpBody;
use axum::extract::Request;
use axum::http::{HeaderMap, HeaderValue, Method, StatusCode, header};

use super::answer::Refused;
use crate::config::{ANY_ORIGIN, Config};

/// Longest foreign name that a message quotes, in characters.
const QUOTED_CHARS_MAX: usize = 80;

/// The names and origins an open daemon answers to.
pub(crate) struct Guard {
    hosts: Vec<String>,
    origins: Vec<String>,
}

impl Guard {
    pub(crate) fn new(config: &Config) -> Guard {
        Guard { hosts: config.hosts.clone(), origins: listed_origins(config) }
    }

    /// Refuses what a web page could have sent.
    pub(crate) fn check(&self, request: &Request) -> Result<(), Refused> {
        let authority = self.check_host(request)?;
        self.check_origin(request.headers(), &authority)?;
        check_content_type(request)
    }

    /// Every name the request gives must be ours; answers the one in `Host`.
    fn check_host(&self, request: &Request) -> Result<String, Refused> {
        let in_uri = request.uri().authority().map(|authority| authority.as_str());
        let in_headers = request.headers().get_all(header::HOST).iter().map(text);
        let named: Vec<&str> = in_headers.chain(in_uri).collect();
        if let Some(foreign) = named.iter().find(|authority| !self.is_ours(authority)) {
            return Err(forbidden(format!("Host '{}'", quoted(foreign)), "hosts"));
        }
        match named.first() {
            Some(authority) => Ok(authority.to_ascii_lowercase()),
            None => Err(forbidden("A request without Host".to_owned(), "hosts")),
        }
    }

    fn is_ours(&self, authority: &str) -> bool {
        let Some(host) = host_of(authority) else { return false };
        let host = host.to_ascii_lowercase();
        let bare = host.trim_start_matches('[').trim_end_matches(']');
        let loopback = bare.parse::<IpAddr>().is_ok_and(|ip| ip.is_loopback());
        let listed = |name: &String| *name == host || name.eq_ignore_ascii_case(authority);
        loopback || host == "localhost" || self.hosts.iter().any(listed)
    }

    /// `Origin` is absent, the daemon's own or listed; a browser must not say the request is foreign,
    /// unless the operator listed where it comes from.
    fn check_origin(&self, headers: &HeaderMap, authority: &str) -> Result<(), Refused> {
        for origin in headers.get_all(header::ORIGIN).iter().map(text) {
            let origin = origin.to_ascii_lowercase();
            if self.origins.contains(&origin) {
                return Ok(());
            }
            let own = origin.strip_prefix("http://").or_else(|| origin.strip_prefix("https://"));
            if own != Some(authority) {
                return Err(forbidden(format!("Origin '{}'", quoted(&origin)), "origins"));
            }
        }
        let mut sites = headers.get_all("sec-fetch-site").iter().map(text);
        match sites.find(|site| !matches!(*site, "same-origin" | "none")) {
            None => Ok(()),
            Some(site) => Err(forbidden(format!("A {} request", quoted(site)), "origins")),
        }
    }
}

/// Web origins that an operator listed by name, under either setting.
pub(super) fn listed_origins(config: &Config) -> Vec<String> {
    let named = config.librechat.cors_origins.iter().filter(|origin| *origin != ANY_ORIGIN);
    config.origins.iter().chain(named).cloned().collect()
}

fn check_content_type(request: &Request) -> Result<(), Refused> {
    let reads_only = matches!(*request.method(), Method::GET | Method::HEAD | Method::OPTIONS);
    if reads_only || request.body().is_end_stream() {
        return Ok(());
    }
    let wanted = type_of(request.uri().path());
    let mut types = request.headers().get_all(header::CONTENT_TYPE).iter().map(text).peekable();
    if types.peek().is_some() && types.all(|given| is(given, wanted)) {
        return Ok(());
    }
    Err(Refused::new(StatusCode::UNSUPPORTED_MEDIA_TYPE, format!("Content-Type must be {wanted}")))
}

/// What a route's body is.
fn type_of(path: &str) -> &'static str {
    match path {
        "/v1/file/upload" | "/v2/fs/upload" => "multipart/form-data",
        "/upload" | "/upload/batch" | "/v1/upload" | "/v1/upload/batch" => "multipart/form-data",
        "/v2/fs/tree" => "application/x-tar",
        _ => "application/json",
    }
}

fn is(content_type: &str, wanted: &str) -> bool {
    let essence = content_type.split(';').next().unwrap_or_default();
    essence.trim().eq_ignore_ascii_case(wanted)
}

/// The host of `host`, `host:port`, `[v6]` or `[v6]:port`; `None` for anything else.
fn host_of(authority: &str) -> Option<&str> {
    let end = match authority.starts_with('[') {
        true => authority.find(']')? + 1,
        false => authority.find(':').unwrap_or(authority.len()),
    };
    let (host, port) = authority.split_at(end);
    let port_fits = port.is_empty() || port.strip_prefix(':')?.bytes().all(|byte| byte.is_ascii_digit());
    let fits = port_fits && !host.is_empty() && !host.contains('@');
    fits.then_some(host)
}

/// Header text; anything but visible ASCII reads as a name that is nobody's.
fn text(value: &HeaderValue) -> &str {
    value.to_str().unwrap_or("?")
}

fn quoted(name: &str) -> String {
    name.chars().take(QUOTED_CHARS_MAX).collect()
}

fn forbidden(what: String, setting: &str) -> Refused {
    Refused::new(StatusCode::FORBIDDEN, format!("{what} is not allowed while no API key is configured"))
        .hint(format!("configure an API key, or list it under `{setting}`"))
}
