//! Where settings come from: flags, variables, the file, the defaults, in this order.
#![forbid(unsafe_code)]

use confique::meta::{Field, FieldKind};
use confique::{Config as _, Layer as _};
use serde::Serialize;
use toml::{Table, Value};

use super::raw::{Raw, RawLayer};
use super::{Config, ConfigError, EndpointConfig, value};

/// Keys whose values are secrets: never printed, never in an error.
const SECRETS: [&str; 7] = [
    "api_key",
    "sandbox_api_key",
    "code_interpreter_api_key",
    "api_keys",
    "jupyter_token",
    // Public, unless somebody takes one for the other.
    "jwt.public_key",
    "jwt.jwks_json",
];

/// What the command line said.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Flags {
    pub listen: Vec<String>,
    pub data_dir: Option<String>,
    pub require_isolation: Option<String>,
    pub allow_open: bool,
}

/// A settings file that has been read.
#[derive(Clone, Copy, Debug)]
pub struct FileText<'a> {
    /// Path as given, for messages.
    pub name: &'a str,
    pub text: &'a str,
}

/// Which layer a value came from.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "lowercase")]
pub enum Source {
    Flag,
    /// The variable's name.
    Environment(String),
    File,
    Default,
}

impl std::fmt::Display for Source {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Source::Flag => f.write_str("flag"),
            Source::Environment(name) => write!(f, "environment {name}"),
            Source::File => f.write_str("file"),
            Source::Default => f.write_str("default"),
        }
    }
}

/// One row of `caisson config`.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct Effective {
    /// Such as `listen` or `limits.memory_bytes`.
    pub key: String,
    /// As TOML; secrets read `(set)`, absent keys `(unset)`.
    pub value: String,
    pub source: Source,
}

/// The written settings, layer by layer.
#[derive(Clone, Debug)]
pub struct Layers {
    flags: RawLayer,
    environment: RawLayer,
    file: RawLayer,
}

/// One key of the settings.
struct Key {
    path: Vec<&'static str>,
    env: Option<&'static str>,
}

impl Key {
    fn dotted(&self) -> String {
        self.path.join(".")
    }
}

fn keys() -> Vec<Key> {
    let leaf = |path: Vec<&'static str>, field: &Field| match field.kind {
        FieldKind::Leaf { env, .. } => Some(Key { path, env }),
        FieldKind::Nested { .. } => None,
    };
    let mut keys = Vec::new();
    for field in Raw::META.fields {
        match field.kind {
            FieldKind::Leaf { .. } => keys.extend(leaf(vec![field.name], field)),
            FieldKind::Nested { meta } => {
                let inner = meta.fields.iter();
                keys.extend(inner.filter_map(|inner| leaf(vec![field.name, inner.name], inner)));
            }
        }
    }
    keys
}

/// The settings file with every key, its meaning and default, commented out.
pub fn template() -> String {
    confique::toml::template::<Raw>(confique::toml::FormatOptions::default())
}

impl Layers {
    /// Reads every layer. `env` answers for one variable; an empty one counts as unset.
    pub fn gather(
        flags: &Flags,
        env: &dyn Fn(&str) -> Option<String>,
        file: Option<FileText<'_>>,
    ) -> Result<Layers, ConfigError> {
        Ok(Layers {
            flags: flag_layer(flags),
            environment: environment_layer(env)?,
            file: file.map_or_else(|| Ok(RawLayer::empty()), file_layer)?,
        })
    }

    /// The settings with every gap filled from the next layer.
    pub(super) fn merged(&self) -> Result<Raw, ConfigError> {
        let written = self.flags.clone().with_fallback(self.environment.clone());
        let complete = written.with_fallback(self.file.clone()).with_fallback(RawLayer::default_values());
        Raw::from_layer(complete)
            .map_err(|error| ConfigError::new(error.to_string(), "every setting has a default; report this"))
    }

    /// Whether a flag or CAISSON_LISTEN names the addresses, which leaves AIO_HOST and AIO_PORT nothing to say.
    pub(super) fn listen_is_explicit(&self) -> bool {
        self.flags.listen.is_some() || self.environment.listen.is_some()
    }
}

/// Every key with its value and where it came from. Secrets are masked.
pub fn effective(layers: &Layers, config: &Config) -> Vec<Effective> {
    let written = [flat(&layers.flags), flat(&layers.environment), flat(&layers.file)];
    let defaults = flat(&RawLayer::default_values());
    let resolved = resolved_defaults(config);
    let row = |key: Key| {
        let name = key.dotted();
        let from = written.iter().position(|layer| layer.contains_key(&name));
        let source = match from {
            Some(0) => Source::Flag,
            Some(1) => Source::Environment(key.env.unwrap_or_default().to_owned()),
            Some(_) => Source::File,
            None => Source::Default,
        };
        let value = from.and_then(|layer| written[layer].get(&name)).or_else(|| defaults.get(&name));
        let shown = match value {
            Some(_) if SECRETS.contains(&name.as_str()) => "(set)".to_owned(),
            // As written it may hold a token.
            Some(_) if name == "jupyter_endpoint" => {
                let shown = config.jupyter_endpoint.as_ref().map(EndpointConfig::shown);
                Value::String(shown.unwrap_or_default()).to_string()
            }
            Some(value) => value.to_string(),
            None => resolved.get(&name).map_or_else(|| "(unset)".to_owned(), Value::to_string),
        };
        Effective { key: name, value: shown, source }
    };
    keys().into_iter().map(row).collect()
}

/// Values of keys whose default depends on the host.
fn resolved_defaults(config: &Config) -> Table {
    let listen = config.listen.iter().map(|address| Value::String(address.to_string())).collect();
    let text = |path: &std::path::Path| Value::String(path.display().to_string());
    Table::from_iter([
        ("listen".to_owned(), Value::Array(listen)),
        ("data_dir".to_owned(), text(&config.data_dir)),
        ("log_level".to_owned(), Value::String(config.log_level.clone())),
        ("python_env".to_owned(), text(&config.python_env)),
        ("require_isolation".to_owned(), Value::String(config.require_isolation.name().to_owned())),
    ])
}

/// A layer as dotted keys; absent ones are not there.
fn flat(layer: &RawLayer) -> Table {
    let tree = Table::try_from(layer).expect("a layer is strings, numbers, lists and one table");
    let mut out = Table::new();
    for (key, value) in tree {
        match value {
            Value::Table(inner) => {
                out.extend(inner.into_iter().map(|(name, value)| (format!("{key}.{name}"), value)));
            }
            value => {
                out.insert(key, value);
            }
        }
    }
    out
}

fn flag_layer(flags: &Flags) -> RawLayer {
    RawLayer {
        listen: (!flags.listen.is_empty()).then(|| flags.listen.clone()),
        data_dir: flags.data_dir.clone(),
        require_isolation: flags.require_isolation.clone(),
        allow_open: flags.allow_open.then_some(true),
        ..RawLayer::empty()
    }
}

fn environment_layer(env: &dyn Fn(&str) -> Option<String>) -> Result<RawLayer, ConfigError> {
    let mut layer = RawLayer::empty();
    for key in keys() {
        let Some(name) = key.env else { continue };
        let Some(text) = env(name).filter(|text| !text.is_empty()) else { continue };
        let one = value::layer_of(&key.path, &text).map_err(|reason| {
            ConfigError::new(format!("{name}: {reason}"), format!("unset {name} to use the default"))
        })?;
        layer = layer.with_fallback(one);
    }
    Ok(layer)
}

fn file_layer(file: FileText<'_>) -> Result<RawLayer, ConfigError> {
    let FileText { name, text } = file;
    let table: Table = text.parse().map_err(|error: toml::de::Error| {
        ConfigError::new(
            format!("{name} is not TOML: {}", without_source(&error, text)),
            "`caisson config --template` prints a file to start from",
        )
    })?;
    refuse_unknown_keys(name, &table)?;
    // The text of a toml error quotes the line, which may hold a key; only its message is passed on.
    table.try_into().map_err(|error: toml::de::Error| {
        ConfigError::new(
            format!("{name}: {}", error.message()),
            "`caisson config --template` shows what each key takes",
        )
    })
}

/// Message and line of a syntax error, without the line's text.
fn without_source(error: &toml::de::Error, text: &str) -> String {
    let line = error.span().map_or(1, |span| text[..span.start.min(text.len())].lines().count().max(1));
    format!("line {line}: {}", error.message())
}

fn refuse_unknown_keys(name: &str, table: &Table) -> Result<(), ConfigError> {
    let known: Vec<String> = keys().iter().map(Key::dotted).collect();
    let written = table.iter().flat_map(|(key, value)| match value {
        Value::Table(inner) => inner.keys().map(|inner| format!("{key}.{inner}")).collect(),
        _ => vec![key.clone()],
    });
    match written.into_iter().find(|key| !known.contains(key)) {
        None => Ok(()),
        Some(key) => Err(ConfigError::new(
            format!("{name}: unknown key `{key}`"),
            match nearest(&key, &known) {
                Some(near) => format!("did you mean `{near}`?"),
                None => "`caisson config --template` lists every key".to_owned(),
            },
        )),
    }
}

/// The known key that is written most alike, if any is.
fn nearest<'a>(key: &str, known: &'a [String]) -> Option<&'a String> {
    let last = |path: &str| path.rsplit('.').next().unwrap_or_default().to_owned();
    let near = known.iter().map(|other| (edits(&last(key), &last(other)), other)).min_by_key(|(far, _)| *far);
    near.filter(|(far, other)| *far <= 1 + last(other).len() / 4).map(|(_, other)| other)
}

/// Levenshtein distance.
fn edits(a: &str, b: &str) -> usize {
    let mut row: Vec<usize> = (0..=b.len()).collect();
    for (i, x) in a.bytes().enumerate() {
        let mut diagonal = row[0];
        row[0] = i + 1;
        for (j, y) in b.bytes().enumerate() {
            let replaced = diagonal + usize::from(x != y);
            diagonal = row[j + 1];
            row[j + 1] = replaced.min(row[j] + 1).min(diagonal + 1);
        }
    }
    row[b.len()]
}
