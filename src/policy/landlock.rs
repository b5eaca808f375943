//! `landlock.toml`: what a guest may do below which path.
#![forbid(unsafe_code)]

use std::collections::HashSet;
use std::path::{Component, Path, PathBuf};

use serde::Deserialize;
use toml::Spanned;

use super::{Fault, check_new, check_why};

/// What may be done below a path. The launcher turns it into the rights of the running ABI.
#[derive(Copy, Clone, Debug, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Access {
    /// List directories.
    List,
    /// List directories, read files.
    Read,
    /// And run them.
    ReadExecute,
    /// Read, write to and truncate files that exist, ioctl on devices.
    ReadWrite,
    /// Every right the ABI can name.
    All,
}

/// One path and its reason.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct PathRule {
    /// Absolute, as the guest sees it, without `.` and `..`.
    pub path: PathBuf,
    pub access: Access,
    /// Left out where the path does not exist, instead of failing the launch.
    pub optional: bool,
    pub why: String,
}

/// The ruleset of a sandbox.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct LandlockPolicy {
    /// Inside a root of its own.
    pub rules: Vec<PathRule>,
    /// On the host, where there is no root of its own; besides the interpreters and the space.
    pub bare: Vec<PathRule>,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct RawLandlock {
    rule: Vec<Spanned<RawRule>>,
    bare: Vec<Spanned<RawRule>>,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct RawRule {
    path: Spanned<PathBuf>,
    access: Access,
    #[serde(default)]
    optional: bool,
    why: Spanned<String>,
}

pub(super) fn check(raw: RawLandlock) -> Result<LandlockPolicy, Fault> {
    Ok(LandlockPolicy { rules: check_list(raw.rule)?, bare: check_list(raw.bare)? })
}

fn check_list(list: Vec<Spanned<RawRule>>) -> Result<Vec<PathRule>, Fault> {
    let mut seen = HashSet::new();
    let mut rules = Vec::new();
    for entry in list {
        let raw = entry.into_inner();
        check_why(&raw.why)?;
        if !is_plain(raw.path.get_ref()) {
            return Err(Fault::at(raw.path.span(), "expected an absolute path without `.` and `..`"));
        }
        check_new(&mut seen, raw.path.get_ref().clone(), raw.path.span(), raw.path.get_ref().display())?;
        rules.push(PathRule {
            path: raw.path.into_inner(),
            access: raw.access,
            optional: raw.optional,
            why: raw.why.into_inner(),
        });
    }
    Ok(rules)
}

fn is_plain(path: &Path) -> bool {
    let mut parts = path.components();
    parts.next() == Some(Component::RootDir) && parts.all(|part| matches!(part, Component::Normal(_)))
}
