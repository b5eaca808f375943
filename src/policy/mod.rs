//! Reads `policies/*.toml` into typed values. Makes no system call besides reading the operator's files.
//!
//! Defaults are compiled in. An operator's directory overrides them file by file, a file as a whole, so that what
//! is in force can be read in one place; only a table of languages may say that it adds to the built-in one. Every
//! entry carries its reason; one without is refused.
#![forbid(unsafe_code)]

mod accounts;
mod landlock;
mod languages;
mod limits;
mod seccomp;

use std::collections::HashSet;
use std::fmt;
use std::ops::Range;
use std::path::{Path, PathBuf};
use std::{fs, io};

use serde::de::DeserializeOwned;

pub use accounts::{ACCOUNTS_MAX, Account, Accounts};
pub use landlock::{Access, LandlockPolicy, PathRule};
pub use languages::{Harness, LANGUAGES_MAX, LanguageEntry, PLACEHOLDERS};
pub use limits::{Limit, Limits};
pub use seccomp::{Condition, Entry, Layer, SeccompPolicy, Test};

/// Largest policy file that is read, in bytes.
pub const FILE_BYTES_MAX: u64 = 1024 * 1024;

const SECCOMP: (&str, &str) = ("seccomp.toml", include_str!("../../policies/seccomp.toml"));
const LANDLOCK: (&str, &str) = ("landlock.toml", include_str!("../../policies/landlock.toml"));
const LIMITS: (&str, &str) = ("limits.toml", include_str!("../../policies/limits.toml"));
const ACCOUNTS: (&str, &str) = ("accounts.toml", include_str!("../../policies/accounts.toml"));

/// Everything a sandbox is made by.
#[derive(Clone, Debug, PartialEq)]
pub struct Policies {
    pub seccomp: SeccompPolicy,
    pub landlock: LandlockPolicy,
    pub limits: Limits,
    pub accounts: Accounts,
    pub languages: Vec<LanguageEntry>,
}

/// A policy file that cannot be used.
#[derive(Debug, thiserror::Error)]
pub enum PolicyError {
    #[error("failed to read policy file {path:?}")]
    Read { path: PathBuf, source: io::Error },
    #[error("policy file {file}, line {line}: {reason}")]
    Malformed { file: String, line: usize, reason: String },
}

/// The policies in force: the compiled-in ones, each replaced by the file of its name in `dir` if there is one.
pub fn load(dir: Option<&Path>) -> Result<Policies, PolicyError> {
    Ok(Policies {
        seccomp: read(dir, SECCOMP, seccomp::check)?,
        landlock: read(dir, LANDLOCK, landlock::check)?,
        limits: read(dir, LIMITS, limits::check)?,
        accounts: read(dir, ACCOUNTS, accounts::check)?,
        languages: languages::load(dir)?,
    })
}

/// What is wrong with a file that parsed, and where in it.
#[derive(Debug)]
struct Fault {
    span: Range<usize>,
    reason: String,
}

impl Fault {
    fn at(span: Range<usize>, reason: impl fmt::Display) -> Fault {
        Fault { span, reason: reason.to_string() }
    }
}

fn read<Raw: DeserializeOwned, T>(
    dir: Option<&Path>,
    (name, default): (&str, &str),
    check: fn(Raw) -> Result<T, Fault>,
) -> Result<T, PolicyError> {
    match dir.map(|dir| dir.join(name)) {
        Some(path) => match text_of(&path)? {
            Some(text) => parse(&path.display().to_string(), &text, check),
            None => parse(name, default, check),
        },
        None => parse(name, default, check),
    }
}

fn text_of(path: &Path) -> Result<Option<String>, PolicyError> {
    let failed = |source| PolicyError::Read { path: path.to_owned(), source };
    match fs::metadata(path) {
        Ok(metadata) if metadata.len() > FILE_BYTES_MAX => Err(failed(io::ErrorKind::FileTooLarge.into())),
        Ok(_) => fs::read_to_string(path).map(Some).map_err(failed),
        Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(None),
        Err(error) => Err(failed(error)),
    }
}

fn parse<Raw: DeserializeOwned, T>(
    file: &str,
    text: &str,
    check: impl FnOnce(Raw) -> Result<T, Fault>,
) -> Result<T, PolicyError> {
    let malformed = |span: Option<Range<usize>>, reason: String| PolicyError::Malformed {
        file: file.to_owned(),
        line: line_of(text, span.map_or(0, |span| span.start)),
        reason,
    };
    let raw = toml::from_str(text).map_err(|error| malformed(error.span(), error.message().to_owned()))?;
    check(raw).map_err(|fault| malformed(Some(fault.span), fault.reason))
}

fn line_of(text: &str, offset: usize) -> usize {
    text.bytes().take(offset).filter(|byte| *byte == b'\n').count() + 1
}

/// A reason must say something.
fn check_why(why: &toml::Spanned<String>) -> Result<(), Fault> {
    match why.get_ref().trim() {
        "" => Err(Fault::at(why.span(), "`why` is empty: say what needs this entry")),
        _ => Ok(()),
    }
}

/// Refuses what has been seen before.
fn check_new<K: Eq + std::hash::Hash>(
    seen: &mut HashSet<K>,
    key: K,
    span: Range<usize>,
    name: impl fmt::Display,
) -> Result<(), Fault> {
    match seen.insert(key) {
        true => Ok(()),
        false => Err(Fault::at(span, format_args!("`{name}` is listed twice"))),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn in_dir(name: &str, text: &str) -> Result<Policies, PolicyError> {
        let dir = tempfile::tempdir().expect("a temporary directory can be made");
        fs::write(dir.path().join(name), text).expect("and written to");
        load(Some(dir.path()))
    }

    fn refused(name: &str, text: &str) -> (usize, String) {
        match in_dir(name, text) {
            Err(PolicyError::Malformed { file, line, reason }) => {
                assert!(file.ends_with(name), "{file}");
                (line, reason)
            }
            other => panic!("{other:?}"),
        }
    }

    #[test]
    fn the_compiled_in_policies_load() {
        let policies = load(None).expect("they are part of the program");
        assert_eq!(policies.limits.nproc.value, 128);
        assert_eq!(policies.accounts.get(0).map(|account| account.name.as_str()), Some("sandbox"));
        assert!(policies.seccomp.allow.len() > 200);
    }

    #[test]
    fn an_operator_replaces_one_file_and_keeps_the_others() {
        let changed = LIMITS.1.replace("value = 128", "value = 256");
        let policies = in_dir("limits.toml", &changed).expect("only a number changed");
        assert_eq!(policies.limits.nproc.value, 256);
        assert_eq!(policies.seccomp, load(None).expect("the defaults").seccomp);
    }

    #[test]
    fn an_entry_without_a_reason_is_refused_with_its_line() {
        let (line, reason) = refused("landlock.toml", "\n\n[[rule]]\npath = \"/usr\"\naccess = \"read\"\n");
        assert_eq!(line, 3);
        assert!(reason.contains("why"), "{reason}");
        let (line, reason) =
            refused("accounts.toml", &ACCOUNTS.1.replace("\"code that", "\"\" # \"code that"));
        assert!(line > 15 && reason.contains("`why` is empty"), "{line} {reason}");
        let (_, reason) = refused("seccomp.toml", &SECCOMP.1.replacen("why = ", "reason = ", 1));
        assert!(reason.contains("reason"), "{reason}");
    }

    #[test]
    fn the_same_name_twice_is_refused() {
        let twice = format!("{}\n[[allow]]\nnames = [\"getpid\"]\nwhy = \"again\"\n", SECCOMP.1);
        let (line, reason) = refused("seccomp.toml", &twice);
        assert_eq!(reason, "`getpid` is listed twice");
        assert!(line > SECCOMP.1.lines().count(), "{line}");
        let rule = "[[rule]]\npath = \"/usr\"\naccess = \"read\"\nwhy = \"x\"\n";
        let bare = rule.replace("[[rule]]", "[[bare]]");
        assert_eq!(refused("landlock.toml", &format!("{rule}{bare}{bare}")).1, "`/usr` is listed twice");
        assert_eq!(refused("landlock.toml", &format!("{rule}{rule}{bare}")).1, "`/usr` is listed twice");
    }

    #[test]
    fn nonsense_is_refused() {
        for (name, text) in [
            ("limits.toml", "[nproc]\nvalue = -1\nwhy = \"x\"\n".to_owned()),
            ("limits.toml", LIMITS.1.replace("[nproc]", "[nprocs]")),
            ("limits.toml", LIMITS.1.replacen("value = 128", "value = 0", 1)),
            ("seccomp.toml", SECCOMP.1.replace("\"getpid\"", "\"getpidd\"")),
            ("seccomp.toml", SECCOMP.1.replace("\"file_setattr\"\n", "\"no_such_call\"\n")),
            ("seccomp.toml", SECCOMP.1.replace("arg = 2, ne = 12", "arg = 6, ne = 12")),
            ("seccomp.toml", SECCOMP.1.replace("arg = 2, ne = 12", "arg = 2")),
            ("accounts.toml", ACCOUNTS.1.replace("uid = 65534", "uid = 0")),
            ("accounts.toml", ACCOUNTS.1.replace("\"nobody\"", "\"no:body\"")),
            ("accounts.toml", ACCOUNTS.1.replace("\"sandbox\"", "\"box\"")),
            ("landlock.toml", LANDLOCK.1.replace("\"/usr\"", "\"usr\"")),
            ("landlock.toml", LANDLOCK.1.replace("\"/usr\"", "\"/usr/../etc\"")),
            ("landlock.toml", "not toml".to_owned()),
        ] {
            refused(name, &text);
        }
    }
}
