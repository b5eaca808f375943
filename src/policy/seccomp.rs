//! `seccomp.toml`: which system calls a sandbox may make. `launcher::seccomp` compiles it.
#![forbid(unsafe_code)]

use std::collections::HashSet;
use std::ops::Range;

use serde::Deserialize;
use syscalls::Sysno;
use toml::Spanned;

use super::{Fault, check_new, check_why};

/// Most numbers behind the newest that can answer ENOSYS.
const NEWER_NUMBERS_MAX: u32 = 65_536;

/// A layer that an entry relies on; without it the entry is dropped.
#[derive(Copy, Clone, Debug, PartialEq, Eq, Hash, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Layer {
    NetworkNamespace,
    PidNamespace,
    IpcNamespace,
    MountNamespace,
    /// A mount namespace, or user ids of the sandbox's own: other files are out of reach of what needs their owner.
    FilesApart,
}

/// How an argument is compared: the low 32 bits of it, but for pointers.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Test {
    /// Equal to one of these after masking.
    OneOf {
        mask: u32,
        values: Vec<u32>,
    },
    NotEqual(u32),
    /// A pointer that is not null, by all its bits.
    NotNull,
}

/// A comparison of one argument.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Condition {
    /// 0 to 5.
    pub arg: u8,
    pub test: Test,
}

/// One system call of one class.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Entry {
    pub call: Sysno,
    /// Alternatives, each of conditions that must all hold. Empty: always.
    pub when: Vec<Vec<Condition>>,
    pub needs: Option<Layer>,
    pub why: String,
}

/// The policy for the architecture that this program was built for.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct SeccompPolicy {
    /// What a guest may do.
    pub allow: Vec<Entry>,
    /// What only a child that still confines itself may do.
    pub setup: Vec<Entry>,
    /// What answers success to a guest, and is not done.
    pub ignore: Vec<Entry>,
    /// What answers ENOSYS.
    pub enosys: Vec<Entry>,
    /// What pid 1 of a sandbox may do.
    pub init: Vec<Entry>,
    /// Numbers beyond the newest known call, which answer ENOSYS as well.
    pub newer: Range<u32>,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct RawSeccomp {
    newest: Spanned<String>,
    newer_numbers_max: Spanned<u32>,
    allow: Vec<RawEntry>,
    setup: Vec<RawEntry>,
    #[serde(default)]
    ignore: Vec<RawEntry>,
    enosys: Vec<RawEntry>,
    init: Vec<RawEntry>,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct RawEntry {
    names: Vec<Spanned<String>>,
    #[serde(default)]
    when: Vec<Vec<Spanned<RawCondition>>>,
    needs: Option<Layer>,
    #[serde(default)]
    arch: bool,
    why: Spanned<String>,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct RawCondition {
    arg: u8,
    mask: Option<u32>,
    eq: Option<u32>,
    one_of: Option<Vec<u32>>,
    ne: Option<u32>,
    null: Option<bool>,
}

impl SeccompPolicy {
    /// The policy at a posture that lacks `layer`.
    #[must_use]
    pub fn without(mut self, layer: Layer) -> SeccompPolicy {
        for list in [&mut self.allow, &mut self.setup, &mut self.ignore, &mut self.enosys, &mut self.init] {
            list.retain(|entry| entry.needs != Some(layer));
        }
        self
    }
}

pub(super) fn check(raw: RawSeccomp) -> Result<SeccompPolicy, Fault> {
    let newest = number_of(&raw.newest)?;
    let span = *raw.newer_numbers_max.get_ref();
    if span > NEWER_NUMBERS_MAX {
        return Err(Fault::at(raw.newer_numbers_max.span(), format_args!("at most {NEWER_NUMBERS_MAX}")));
    }
    let mut guest = Seen::default();
    Ok(SeccompPolicy {
        allow: check_list(raw.allow, &mut guest)?,
        setup: check_list(raw.setup, &mut guest)?,
        // These are allowed as well, with other arguments.
        ignore: check_list(raw.ignore, &mut Seen::default())?,
        enosys: check_list(raw.enosys, &mut guest)?,
        init: check_list(raw.init, &mut Seen::default())?,
        newer: newest + 1..newest + 1 + span,
    })
}

/// Names met so far. One without conditions stands alone; with conditions it may come again.
#[derive(Default)]
struct Seen {
    always: HashSet<(String, Option<Layer>)>,
    sometimes: HashSet<String>,
}

impl Seen {
    fn check(&mut self, name: &Spanned<String>, entry: &RawEntry) -> Result<(), Fault> {
        let text = name.get_ref();
        let twice = || Err(Fault::at(name.span(), format_args!("`{text}` is listed twice")));
        if self.always.contains(&(text.clone(), None)) {
            return twice();
        }
        if !entry.when.is_empty() {
            self.sometimes.insert(text.clone());
            return Ok(());
        }
        if entry.needs.is_none() && self.sometimes.contains(text) {
            return twice();
        }
        check_new(&mut self.always, (text.clone(), entry.needs), name.span(), text)
    }
}

fn check_list(list: Vec<RawEntry>, seen: &mut Seen) -> Result<Vec<Entry>, Fault> {
    let mut entries = Vec::new();
    for raw in list {
        check_why(&raw.why)?;
        for name in &raw.names {
            seen.check(name, &raw)?;
        }
        let mut when = Vec::new();
        for alternative in raw.when {
            when.push(alternative.into_iter().map(check_condition).collect::<Result<Vec<_>, _>>()?);
        }
        for name in &raw.names {
            let Ok(call) = name.get_ref().parse::<Sysno>() else {
                if raw.arch {
                    continue; // another architecture's
                }
                return Err(Fault::at(name.span(), format_args!("no system call `{}` here", name.get_ref())));
            };
            let why = raw.why.get_ref().clone();
            entries.push(Entry { call, when: when.clone(), needs: raw.needs, why });
        }
    }
    Ok(entries)
}

fn check_condition(raw: Spanned<RawCondition>) -> Result<Condition, Fault> {
    let span = raw.span();
    let RawCondition { arg, mask, eq, one_of, ne, null } = raw.into_inner();
    if arg > 5 {
        return Err(Fault::at(span, "`arg` is 0 to 5"));
    }
    let mask_or_all = mask.unwrap_or(u32::MAX);
    let test = match (eq, one_of, ne, mask) {
        (None, None, None, None) if null == Some(false) => Test::NotNull,
        _ if null.is_some() => return Err(Fault::at(span, "`null` stands alone and can be false only")),
        (Some(value), None, None, _) => Test::OneOf { mask: mask_or_all, values: vec![value] },
        (None, Some(values), None, _) if !values.is_empty() => Test::OneOf { mask: mask_or_all, values },
        (None, None, Some(value), None) => Test::NotEqual(value),
        _ => return Err(Fault::at(span, "expected one of `eq`, `one_of` (both may have a `mask`) and `ne`")),
    };
    Ok(Condition { arg, test })
}

fn number_of(name: &Spanned<String>) -> Result<u32, Fault> {
    match name.get_ref().parse::<Sysno>() {
        Ok(call) => u32::try_from(call.id()).map_err(|error| Fault::at(name.span(), error)),
        Err(_) => Err(Fault::at(name.span(), format_args!("no system call `{}` here", name.get_ref()))),
    }
}
