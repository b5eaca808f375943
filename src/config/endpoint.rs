//! Where an external Jupyter server answers: `AIO_JUPYTER_ENDPOINT` and its token. What is shown of it never
//! holds the token.
#![forbid(unsafe_code)]

use std::net::Ipv6Addr;

use percent_encoding::percent_decode_str;
use serde::{Deserialize, Serialize};

use super::ConfigError;

const SETTING: &str = "AIO_JUPYTER_ENDPOINT";
const TOKEN_SETTING: &str = "AIO_JUPYTER_TOKEN";
/// Port of a URL that names none.
const PORT_DEFAULT: u16 = 80;
/// Longest URL and longest token, in bytes.
const URL_BYTES_MAX: usize = 2048;
const TOKEN_BYTES_MAX: usize = 2048;
const FORM: &str = "write it as http://127.0.0.1:8888 or http://127.0.0.1:8888/base?token=TOKEN";

/// A Jupyter server of the operator's. Parsed once; what it holds fits into a request as it is.
#[derive(Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct EndpointConfig {
    /// A name or an address, the latter without brackets.
    host: String,
    port: u16,
    /// Empty, or with a slash in front and none at the end.
    path: String,
    token: Option<String>,
}

impl EndpointConfig {
    /// Reads both settings. A token in the URL's query and one of its own may not differ.
    pub fn parse(url: &str, token: Option<&str>) -> Result<EndpointConfig, ConfigError> {
        if url.len() > URL_BYTES_MAX {
            return Err(refused(format!("more than {URL_BYTES_MAX} bytes"), FORM));
        }
        let rest = without_scheme(url)?;
        let (rest, fragment) = rest.split_once('#').unwrap_or((rest, ""));
        let (rest, query) = rest.split_once('?').unwrap_or((rest, ""));
        let (authority, path) = rest.find('/').map_or((rest, ""), |at| rest.split_at(at));
        if authority.contains('@') {
            return Err(refused("a name and password are not used".to_owned(), FORM));
        }
        if !fragment.is_empty() {
            return Err(refused("a URL of a server has no fragment".to_owned(), FORM));
        }
        let (host, port) = split_authority(authority)?;
        let path = path.trim_end_matches('/');
        if !path.bytes().all(|byte| byte.is_ascii_alphanumeric() || b"/-._~%@".contains(&byte)) {
            return Err(refused("its path holds characters that a URL has percent-encoded".to_owned(), FORM));
        }
        let token = one_token(token_of_query(query)?, token.filter(|token| !token.is_empty()))?;
        Ok(EndpointConfig { host, port, path: path.to_owned(), token })
    }

    /// The server's URL without its token: what may be shown.
    pub fn shown(&self) -> String {
        format!("http://{}{}", self.authority(), self.path)
    }

    /// Name or address to connect to.
    pub fn host(&self) -> &str {
        &self.host
    }

    pub fn port(&self) -> u16 {
        self.port
    }

    /// Host and port as a `Host` header has them.
    pub fn authority(&self) -> String {
        if self.host.contains(':') {
            format!("[{}]:{}", self.host, self.port)
        } else {
            format!("{}:{}", self.host, self.port)
        }
    }

    /// What stands before `/api`.
    pub fn path(&self) -> &str {
        &self.path
    }

    /// Value of the `Authorization` header.
    pub fn authorization(&self) -> Option<String> {
        self.token.as_ref().map(|token| format!("token {token}"))
    }

    /// Whether token and code leave this machine unencrypted.
    pub fn leaves_machine(&self) -> bool {
        let loopback = self.host.parse::<std::net::IpAddr>().map(|address| address.is_loopback());
        !loopback.unwrap_or_else(|_| self.host.eq_ignore_ascii_case("localhost"))
    }
}

impl std::fmt::Debug for EndpointConfig {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "EndpointConfig({})", self.shown())
    }
}

fn refused(what: String, hint: &str) -> ConfigError {
    ConfigError::new(format!("{SETTING}: {what}"), hint)
}

fn without_scheme(url: &str) -> Result<&str, ConfigError> {
    let scheme = url.split_once("://").map(|(scheme, _)| scheme.to_ascii_lowercase());
    match scheme.as_deref() {
        Some("http") => Ok(&url["http://".len()..]),
        Some("https") => Err(refused(
            "https is not supported".to_owned(),
            "name the server's http port on this machine, or a tunnel to it that ends here",
        )),
        _ => Err(refused("not a URL that begins with http://".to_owned(), FORM)),
    }
}

fn split_authority(authority: &str) -> Result<(String, u16), ConfigError> {
    let unusable = || refused("it has no usable host and port".to_owned(), FORM);
    let (host, port) = match authority.strip_prefix('[') {
        Some(rest) => {
            let (host, port) = rest.split_once(']').ok_or_else(unusable)?;
            host.parse::<Ipv6Addr>().map_err(|_| unusable())?;
            (host, port.strip_prefix(':').or(port.is_empty().then_some("")))
        }
        None => {
            let (host, port) = authority.split_once(':').unwrap_or((authority, ""));
            (host, Some(port))
        }
    };
    let fits = |byte: u8| byte.is_ascii_alphanumeric() || b"-._:".contains(&byte);
    if host.is_empty() || !host.bytes().all(fits) {
        return Err(unusable());
    }
    let port = match port.ok_or_else(unusable)? {
        "" => PORT_DEFAULT,
        digits => digits.parse().ok().filter(|port| *port != 0).ok_or_else(unusable)?,
    };
    Ok((host.to_owned(), port))
}

fn token_of_query(query: &str) -> Result<Option<String>, ConfigError> {
    let mut token = None;
    for pair in query.split('&').filter(|pair| !pair.is_empty()) {
        let value = pair.strip_prefix("token=").ok_or_else(|| {
            refused("its query may hold nothing but the token".to_owned(), "remove the rest of the query")
        })?;
        let value = percent_decode_str(value).decode_utf8().map_err(|_| unusable_token(SETTING))?;
        if token.replace(value.into_owned()).is_some() {
            return Err(refused("its query holds two tokens".to_owned(), "leave one"));
        }
    }
    Ok(token.filter(|token| !token.is_empty()))
}

fn one_token(of_url: Option<String>, own: Option<&str>) -> Result<Option<String>, ConfigError> {
    for (setting, token) in [(SETTING, of_url.as_deref()), (TOKEN_SETTING, own)] {
        let fits =
            |token: &str| token.len() <= TOKEN_BYTES_MAX && token.bytes().all(|byte| byte.is_ascii_graphic());
        if !token.is_none_or(fits) {
            return Err(unusable_token(setting));
        }
    }
    match (of_url, own) {
        (Some(of_url), Some(own)) if of_url != own => Err(ConfigError::new(
            format!("{TOKEN_SETTING} and the token in {SETTING} differ"),
            "write the token once",
        )),
        (of_url, own) => Ok(of_url.or_else(|| own.map(str::to_owned))),
    }
}

fn unusable_token(setting: &str) -> ConfigError {
    ConfigError::new(
        format!("{setting}: a token holds visible ASCII characters only, at most {TOKEN_BYTES_MAX}"),
        "look for a line end or quotes that came along from a file",
    )
}

#[cfg(test)]
mod tests {
    use super::*;

    fn parse(url: &str) -> EndpointConfig {
        EndpointConfig::parse(url, None).unwrap_or_else(|error| panic!("{url}: {error}"))
    }

    #[test]
    fn a_url_is_taken_apart() {
        let config = parse("HTTP://localhost:8888/user/me/?token=a%2Bb");
        assert_eq!((config.host(), config.port(), config.path()), ("localhost", 8888, "/user/me"));
        assert_eq!(config.authorization().as_deref(), Some("token a+b"));
        let config = parse("http://jupyter.internal");
        assert_eq!((config.host(), config.port(), config.path()), ("jupyter.internal", 80, ""));
        assert_eq!(config.authorization(), None);
        assert_eq!(parse("http://[::1]:9").authority(), "[::1]:9");
    }

    #[test]
    fn the_token_is_not_shown() {
        let config = parse("http://127.0.0.1:8888/?token=hush");
        assert_eq!(config.shown(), "http://127.0.0.1:8888");
        assert!(!format!("{config:?}").contains("hush"), "{config:?}");
        let refused = ["http://h/?token=hush&x=1", "https://h/?token=hush", "http://h:0/?token=hush"];
        for url in refused {
            let error = EndpointConfig::parse(url, Some("other")).expect_err(url);
            assert!(!error.to_string().contains("hush"), "{error}");
        }
    }

    #[test]
    fn a_token_of_its_own_counts_and_may_not_differ() {
        let with = |url, token| EndpointConfig::parse(url, Some(token)).map(|it| it.authorization());
        assert_eq!(with("http://h", "t"), Ok(Some("token t".to_owned())));
        assert_eq!(with("http://h/?token=t", "t"), Ok(Some("token t".to_owned())));
        assert_eq!(with("http://h/?token=t", ""), Ok(Some("token t".to_owned())));
        let error = with("http://h/?token=t", "u").expect_err("two tokens");
        assert_eq!(
            error.to_string(),
            "AIO_JUPYTER_TOKEN and the token in AIO_JUPYTER_ENDPOINT differ\nhint: write the token once"
        );
        assert!(with("http://h", "t\r\nX: y").is_err());
    }

    #[test]
    fn what_is_no_such_url_is_refused() {
        for url in [
            "",
            "127.0.0.1:8888",
            "ftp://h",
            "http://",
            "http://:80",
            "http://h:65536",
            "http://h:x",
            "http://me:secret@h",
            "http://h/#part",
            "http://h/a b",
            "http://h/a\r\nHost: x",
            "http://[::1",
            "http://[::1]x",
            "http://h/?token=a&token=b",
            "http://h/?token=a%0a",
            "http://h é",
        ] {
            assert!(EndpointConfig::parse(url, None).is_err(), "{url}");
        }
        assert!(EndpointConfig::parse(&format!("http://h/{}", "a".repeat(3000)), None).is_err());
    }

    #[test]
    fn https_is_refused_with_a_way_out() {
        let error = EndpointConfig::parse("https://h", None).expect_err("https");
        assert_eq!(
            error.to_string(),
            "AIO_JUPYTER_ENDPOINT: https is not supported\n\
             hint: name the server's http port on this machine, or a tunnel to it that ends here"
        );
    }

    #[test]
    fn only_loopback_stays_on_this_machine() {
        let leaves = |url: &str| parse(url).leaves_machine();
        assert!(!leaves("http://127.0.0.1:1") && !leaves("http://LOCALHOST:1") && !leaves("http://[::1]:1"));
        assert!(leaves("http://10.0.0.1:1") && leaves("http://jupyter:1"));
    }
}
