//! `languages.toml`: the languages that programs may be written in, and what it takes to run one.
#![forbid(unsafe_code)]

use std::collections::HashSet;
use std::path::{Path, PathBuf};

use serde::{Deserialize, Serialize};
use toml::Spanned;

use super::{Fault, PolicyError, check_new, check_why, parse, text_of};

/// Most languages of a table, and most names of one.
pub const LANGUAGES_MAX: usize = 64;
const NAMES_MAX: usize = 16;
/// Most words of a command; a word's length.
const WORDS_MAX: usize = 64;
const WORD_BYTES_MAX: usize = 8 * 1024;
/// Bounds of what an entry may set, in seconds: a day.
const SECONDS_MAX: u32 = 86_400;

const NAME: &str = "languages.toml";
const DEFAULT: &str = include_str!("../../policies/languages.toml");

/// What words and values may name between braces.
pub const PLACEHOLDERS: [&str; 6] = ["dir", "source", "binary", "toolchains", "cache", "memory_mib"];

/// An interpreter that waits already.
#[derive(Copy, Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Harness {
    Python,
    Javascript,
    Typescript,
}

/// One language, as the table has it.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct LanguageEntry {
    pub id: String,
    pub title: String,
    /// In lower case.
    pub names: Vec<String>,
    /// `None` for a program, which has a `source` and what is run.
    pub harness: Option<Harness>,
    pub library_key: Option<String>,
    pub binaries: Vec<String>,
    pub files: Vec<String>,
    pub version: Vec<String>,
    pub source: String,
    pub compile: Vec<String>,
    pub run: Vec<String>,
    pub env: Vec<(String, String)>,
    /// A folder below that of the toolchains.
    pub cache: Option<String>,
    /// Paths of the host; the last part may hold a `*`.
    pub shown: Vec<PathBuf>,
    pub compile_seconds: Option<u32>,
    pub cpu_seconds: Option<u32>,
    pub why: String,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct RawLanguages {
    #[serde(default)]
    builtin: bool,
    #[serde(default)]
    language: Vec<Spanned<RawLanguage>>,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct RawLanguage {
    id: Spanned<String>,
    title: Spanned<String>,
    names: Spanned<Vec<Spanned<String>>>,
    harness: Option<Spanned<Harness>>,
    library_key: Option<Spanned<String>>,
    #[serde(default)]
    binaries: Vec<Spanned<String>>,
    #[serde(default)]
    files: Vec<Spanned<String>>,
    #[serde(default)]
    version: Vec<Spanned<String>>,
    source: Option<Spanned<String>>,
    #[serde(default)]
    compile: Vec<Spanned<String>>,
    #[serde(default)]
    run: Vec<Spanned<String>>,
    #[serde(default)]
    env: Vec<Spanned<String>>,
    cache: Option<Spanned<String>>,
    #[serde(default)]
    shown: Vec<Spanned<String>>,
    compile_seconds: Option<Spanned<u32>>,
    cpu_seconds: Option<Spanned<u32>>,
    why: Spanned<String>,
}

/// The table in force: the built-in one, or the file of its name in `dir`, which may build upon it.
pub(super) fn load(dir: Option<&Path>) -> Result<Vec<LanguageEntry>, PolicyError> {
    let builtin = parse(NAME, DEFAULT, |raw| check(raw, Vec::new()))?;
    let Some(path) = dir.map(|dir| dir.join(NAME)) else { return Ok(builtin) };
    let Some(text) = text_of(&path)? else { return Ok(builtin) };
    parse(&path.display().to_string(), &text, |raw| check(raw, builtin))
}

/// Its own entries, behind what they leave of the built-in ones where it builds upon those.
fn check(raw: RawLanguages, mut builtin: Vec<LanguageEntry>) -> Result<Vec<LanguageEntry>, Fault> {
    let (mut ids, mut names, mut keys) = (HashSet::new(), HashSet::new(), HashSet::new());
    builtin
        .retain(|known| raw.builtin && raw.language.iter().all(|it| *it.get_ref().id.get_ref() != known.id));
    let mut entries = Vec::new();
    for entry in raw.language {
        let span = entry.span();
        if entries.len() == LANGUAGES_MAX {
            return Err(Fault::at(span, format_args!("more than {LANGUAGES_MAX} languages")));
        }
        let raw = entry.into_inner();
        check_new(&mut ids, raw.id.get_ref().clone(), raw.id.span(), raw.id.get_ref())?;
        for name in raw.names.get_ref() {
            check_new(&mut names, name.get_ref().clone(), name.span(), name.get_ref())?;
            check_free(&builtin, |known| known.names.contains(name.get_ref()), name)?;
        }
        if let Some(key) = &raw.library_key {
            check_new(&mut keys, key.get_ref().clone(), key.span(), key.get_ref())?;
            check_free(&builtin, |known| known.library_key.as_ref() == Some(key.get_ref()), key)?;
        }
        entries.push(check_one(raw)?);
    }
    if entries.is_empty() && !raw.builtin {
        return Err(Fault::at(0..0, "a table without a language"));
    }
    builtin.append(&mut entries);
    Ok(builtin)
}

/// Refuses what one of the built-in entries is known by.
fn check_free(
    builtin: &[LanguageEntry],
    has_it: impl Fn(&LanguageEntry) -> bool,
    name: &Spanned<String>,
) -> Result<(), Fault> {
    let Some(known) = builtin.iter().find(|known| has_it(known)) else { return Ok(()) };
    let (name, span) = (name.get_ref(), name.span());
    Err(Fault::at(
        span,
        format_args!("`{name}` is a name of the built-in `{}`: replace that by its id", known.id),
    ))
}

fn check_one(raw: RawLanguage) -> Result<LanguageEntry, Fault> {
    check_why(&raw.why)?;
    let id = word_of(raw.id, "an id", |byte| byte.is_ascii_lowercase() || byte.is_ascii_digit())?;
    let count = raw.names.get_ref().len();
    if count == 0 || count > NAMES_MAX {
        return Err(Fault::at(raw.names.span(), format_args!("expected 1 to {NAMES_MAX} names")));
    }
    let in_name = |byte: u8| {
        byte.is_ascii_lowercase() || byte.is_ascii_digit() || matches!(byte, b'+' | b'#' | b'.' | b'-' | b'_')
    };
    let names = raw.names.into_inner();
    let names = names.into_iter().map(|name| word_of(name, "a name", in_name)).collect::<Result<_, _>>()?;
    let in_key = |byte: u8| byte.is_ascii_lowercase() || byte.is_ascii_digit() || byte == b'-';
    let library_key = raw.library_key.map(|key| word_of(key, "a library key", in_key)).transpose()?;
    let in_folder = |byte: u8| byte.is_ascii_alphanumeric() || matches!(byte, b'-' | b'_');
    let cache = raw.cache.map(|cache| word_of(cache, "a cache", in_folder)).transpose()?;
    let harness = raw.harness.as_ref().map(|harness| *harness.get_ref());
    let source = match (harness, raw.source) {
        (None, Some(source)) => source_of(source)?,
        (Some(_), None) => String::new(),
        (None, None) => return Err(Fault::at(raw.why.span(), format_args!("`{id}` needs a `source`"))),
        (Some(_), Some(source)) => return Err(Fault::at(source.span(), "a harness has no `source`")),
    };
    match (harness, raw.run.first()) {
        (None, None) => return Err(Fault::at(raw.why.span(), format_args!("`{id}` needs a `run`"))),
        (Some(_), Some(run)) => return Err(Fault::at(run.span(), "a harness has no `run`")),
        _ => {}
    }
    let has_cache = cache.is_some();
    let words = |words: Vec<Spanned<String>>| -> Result<Vec<String>, Fault> {
        if let Some(beyond) = words.get(WORDS_MAX) {
            return Err(Fault::at(beyond.span(), format_args!("more than {WORDS_MAX} words")));
        }
        words.into_iter().map(|word| check_word(word, has_cache)).collect()
    };
    let env = raw.env.into_iter().map(|pair| variable(pair, has_cache)).collect::<Result<_, _>>()?;
    let seconds = |value: Option<Spanned<u32>>| match value {
        Some(value) if !(1..=SECONDS_MAX).contains(value.get_ref()) => {
            Err(Fault::at(value.span(), format_args!("expected 1 to {SECONDS_MAX} seconds")))
        }
        value => Ok(value.map(Spanned::into_inner)),
    };
    let title = raw.title.get_ref().trim().to_owned();
    if title.is_empty() || title.len() > 64 || title.contains(char::is_control) {
        return Err(Fault::at(raw.title.span(), "a title is one line of 1 to 64 bytes"));
    }
    Ok(LanguageEntry {
        id,
        title,
        names,
        harness,
        library_key,
        binaries: words(raw.binaries)?,
        files: words(raw.files)?,
        version: words(raw.version)?,
        source,
        compile: words(raw.compile)?,
        run: words(raw.run)?,
        env,
        cache,
        shown: raw.shown.into_iter().map(host_path).collect::<Result<_, _>>()?,
        compile_seconds: seconds(raw.compile_seconds)?,
        cpu_seconds: seconds(raw.cpu_seconds)?,
        why: raw.why.into_inner(),
    })
}

fn word_of(word: Spanned<String>, what: &str, fits: impl Fn(u8) -> bool) -> Result<String, Fault> {
    let text = word.get_ref();
    if text.is_empty() || text.len() > 32 || !text.bytes().all(fits) {
        return Err(Fault::at(word.span(), format_args!("`{text}` is not {what}")));
    }
    Ok(word.into_inner())
}

/// A plain file name.
fn source_of(source: Spanned<String>) -> Result<String, Fault> {
    let in_file = |byte: u8| byte.is_ascii_alphanumeric() || matches!(byte, b'.' | b'-' | b'_');
    let text = source.get_ref();
    // The compiled program is called `main`.
    if text.starts_with('.') || text == "main" {
        return Err(Fault::at(source.span(), format_args!("`{text}` is not the name of a source")));
    }
    word_of(source, "the name of a source", in_file)
}

fn check_word(word: Spanned<String>, has_cache: bool) -> Result<String, Fault> {
    let text = word.get_ref();
    if text.is_empty() || text.len() > WORD_BYTES_MAX || text.contains('\0') {
        return Err(Fault::at(
            word.span(),
            format_args!("a word has 1 to {WORD_BYTES_MAX} bytes, none of them 0"),
        ));
    }
    for name in placeholders(text) {
        if !PLACEHOLDERS.contains(&name) {
            return Err(Fault::at(word.span(), format_args!("there is no {{{name}}}")));
        }
        if name == "cache" && !has_cache {
            return Err(Fault::at(word.span(), "{cache} without a `cache`"));
        }
    }
    Ok(word.into_inner())
}

/// Every `{word}` in a text that is no variable of a shell.
fn placeholders(text: &str) -> impl Iterator<Item = &str> {
    text.match_indices('{').filter_map(move |(at, _)| {
        let (name, _) = text[at + 1..].split_once('}')?;
        let is_name = !name.is_empty() && name.bytes().all(|byte| byte.is_ascii_lowercase() || byte == b'_');
        (is_name && !text[..at].ends_with('$')).then_some(name)
    })
}

fn variable(pair: Spanned<String>, has_cache: bool) -> Result<(String, String), Fault> {
    let span = pair.span();
    let text = check_word(pair, has_cache)?;
    let in_name = |byte: u8| byte.is_ascii_alphanumeric() || byte == b'_';
    match text.split_once('=') {
        Some((name, value)) if !name.is_empty() && name.bytes().all(in_name) => {
            Ok((name.to_owned(), value.to_owned()))
        }
        _ => Err(Fault::at(span, "expected NAME=value")),
    }
}

/// What a sandbox has of its own cannot be shown from the host.
fn host_path(path: Spanned<String>) -> Result<PathBuf, Fault> {
    const OWN: [&str; 8] = ["/tmp", "/mnt", "/home", "/proc", "/dev", "/sys", "/run", "/root"];
    let text = path.get_ref().as_str();
    let (parent, last) = text.rsplit_once('/').unwrap_or_default();
    let is_plain = text.starts_with('/')
        && text.split('/').skip(1).all(|part| !matches!(part, "" | "." | ".."))
        && !parent.contains('*')
        && last.matches('*').count() <= 1;
    if !is_plain || last == "*" || OWN.iter().any(|own| Path::new(text).starts_with(own)) {
        return Err(Fault::at(
            path.span(),
            format_args!("`{text}` is not a path of the host that can be shown"),
        ));
    }
    Ok(PathBuf::from(text))
}

#[cfg(test)]
mod tests {
    use super::*;

    const RUBY: &str = "[[language]]\nid = \"ruby\"\ntitle = \"Ruby\"\nnames = [\"rb\", \"ruby\"]\n\
        binaries = [\"ruby\"]\nsource = \"main.rb\"\nrun = [\"ruby\", \"{source}\"]\nwhy = \"a customer asked\"\n";

    fn from(text: &str) -> Result<Vec<LanguageEntry>, PolicyError> {
        let dir = tempfile::tempdir().expect("a temporary directory can be made");
        std::fs::write(dir.path().join(NAME), text).expect("and written to");
        load(Some(dir.path()))
    }

    fn refused(text: &str) -> (usize, String) {
        match from(text) {
            Err(PolicyError::Malformed { file, line, reason }) => {
                assert!(file.ends_with(NAME), "{file}");
                (line, reason)
            }
            other => panic!("{text}: {other:?}"),
        }
    }

    #[test]
    fn the_built_in_table_has_every_language_of_the_contract() {
        let entries = load(None).expect("it is part of the program");
        let resolve = |name: &str| entries.iter().find(|entry| entry.names.iter().any(|known| known == name));
        for (name, id) in [
            ("py", "python"),
            ("python", "python"),
            ("bash", "bash"),
            ("sh", "bash"),
            ("js", "javascript"),
            ("javascript", "javascript"),
            ("node", "javascript"),
            ("nodejs", "javascript"),
            ("bun", "javascript"),
            ("ts", "typescript"),
            ("typescript", "typescript"),
            ("go", "go"),
            ("cpp", "cpp"),
            ("c++", "cpp"),
            ("c", "c"),
            ("java", "java"),
            ("php", "php"),
            ("rs", "rust"),
            ("d", "d"),
            ("f90", "fortran"),
            ("r", "r"),
        ] {
            assert_eq!(resolve(name).map(|entry| entry.id.as_str()), Some(id), "{name}");
        }
        let keys: Vec<_> = entries.iter().filter_map(|entry| entry.library_key.as_deref()).collect();
        assert_eq!(keys, ["python", "bash", "node", "typescript", "go", "cpp"]);
    }

    #[test]
    fn an_operators_file_replaces_the_table_or_adds_to_it() {
        let alone = from(RUBY).expect("a table of one");
        assert_eq!(alone.len(), 1);
        let builtin = load(None).expect("the default").len();
        let more = from(&format!("builtin = true\n{RUBY}")).expect("one more");
        assert_eq!(more.len(), builtin + 1);
        let ours =
            RUBY.replace("\"ruby\"\ntitle", "\"php\"\ntitle").replace("[\"rb\", \"ruby\"]", "[\"php\"]");
        let replaced = from(&format!("builtin = true\n{ours}")).expect("an entry of the same id");
        assert_eq!(replaced.len(), builtin);
        let php = replaced.iter().find(|entry| entry.id == "php").expect("it is there");
        assert_eq!(php.source, "main.rb");
        let reason = "is a name of the built-in `go`: replace that by its id";
        let clash = format!("builtin = true\n\n{}", RUBY.replace("\"rb\"", "\"golang\""));
        assert_eq!(refused(&clash), (6, format!("`golang` {reason}")));
        from(&clash.replace("\"ruby\"\ntitle", "\"go\"\ntitle")).expect("it replaces the one that had it");
        let key = |key: &str| RUBY.replace("why =", &format!("library_key = \"{key}\"\nwhy ="));
        assert_eq!(refused(&format!("builtin = true\n{}", key("go"))), (9, format!("`go` {reason}")));
        from(&format!("builtin = true\n{}", key("ruby"))).expect("a key of its own");
        let other =
            key("ruby").replace("\"ruby\"\ntitle", "\"r2\"\ntitle").replace("[\"rb\", \"ruby\"]", "[\"r2\"]");
        assert_eq!(refused(&format!("{}{other}", key("ruby"))), (17, "`ruby` is listed twice".to_owned()));
    }

    #[test]
    fn what_is_wrong_is_named_with_its_line() {
        assert_eq!(refused(&format!("{RUBY}{RUBY}")), (10, "`ruby` is listed twice".to_owned()));
        let (line, reason) = refused(&RUBY.replace("{source}", "{souce}"));
        assert_eq!((line, reason.as_str()), (7, "there is no {souce}"));
        let (line, reason) = refused(&RUBY.replace("{source}", "{cache}/x"));
        assert_eq!((line, reason.as_str()), (7, "{cache} without a `cache`"));
        let (line, reason) = refused(&RUBY.replace("\"rb\"", "\"RB\""));
        assert_eq!((line, reason.as_str()), (4, "`RB` is not a name"));
        assert_eq!(refused(&RUBY.replace("a customer asked", " ")).0, 8);
        // A shell's own variables and other braces are left alone.
        from(&RUBY.replace("{source}", "${souce} {} { x } {a1}")).expect("none of these is ours");
    }

    #[test]
    fn nonsense_is_refused() {
        for text in [
            String::new(),
            RUBY.replace("source = \"main.rb\"\n", ""),
            RUBY.replace("run = [\"ruby\", \"{source}\"]\n", ""),
            RUBY.replace("main.rb", "../main.rb"),
            RUBY.replace("main.rb", "main"),
            RUBY.replace("main.rb", ".main"),
            RUBY.replace("why =", "harness = \"ruby\"\nwhy ="),
            RUBY.replace("why =", "harness = \"python\"\nwhy ="),
            RUBY.replace("why =", "env = [\"=x\"]\nwhy ="),
            RUBY.replace("why =", "env = [\"novalue\"]\nwhy ="),
            RUBY.replace("why =", "cache = \"../x\"\nwhy ="),
            RUBY.replace("why =", "shown = [\"etc\"]\nwhy ="),
            RUBY.replace("why =", "shown = [\"/etc/../root\"]\nwhy ="),
            RUBY.replace("why =", "shown = [\"/*/x\"]\nwhy ="),
            RUBY.replace("why =", "shown = [\"/root/x\"]\nwhy ="),
            RUBY.replace("why =", "shown = [\"/opt/*\"]\nwhy ="),
            RUBY.replace("why =", "cpu_seconds = 0\nwhy ="),
            RUBY.replace("why =", "nice = 3\nwhy ="),
            RUBY.replace("[\"rb\", \"ruby\"]", "[]"),
            RUBY.replace("\"ruby\", \"{source}\"", "\"\""),
            RUBY.replace("\"Ruby\"", "\"\""),
        ] {
            refused(&text);
        }
    }
}
