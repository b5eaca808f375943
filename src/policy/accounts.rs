//! `accounts.toml`: whom a request's `user` can name, and the files inside that say so.
#![forbid(unsafe_code)]

use std::collections::HashSet;
use std::fmt::Write as _;

use serde::Deserialize;
use toml::Spanned;

use super::{Fault, check_new, check_why};

/// Most accounts: a sandbox leases a block of 16 ids, of which init has one.
pub const ACCOUNTS_MAX: usize = 15;
/// The overflow id: what unmapped owners show as.
const NOBODY: u32 = 65_534;

/// One account of the sandbox. Ids are those seen inside.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Account {
    pub name: String,
    pub uid: u32,
    pub gid: u32,
    pub home: String,
    pub shell: String,
    pub why: String,
}

/// The sandbox's accounts. Never empty; the first is `sandbox`.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Accounts(Vec<Account>);

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct RawAccounts {
    account: Vec<Spanned<RawAccount>>,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct RawAccount {
    name: Spanned<String>,
    uid: Spanned<u32>,
    gid: Spanned<u32>,
    home: Spanned<String>,
    shell: Spanned<String>,
    why: Spanned<String>,
}

impl Accounts {
    /// By the index that a launch plan carries.
    pub fn get(&self, index: u8) -> Option<&Account> {
        self.0.get(usize::from(index))
    }

    /// Index of the account that `user` names.
    pub fn index_of(&self, name: &str) -> Option<u8> {
        let at = self.0.iter().position(|account| account.name == name)?;
        u8::try_from(at).ok()
    }

    pub fn iter(&self) -> impl Iterator<Item = &Account> {
        self.0.iter()
    }

    /// Text of the sandbox's `/etc/passwd`. Root is in it so that owners of system files have a name.
    pub fn passwd(&self) -> String {
        let mut text = String::from("root:x:0:0:root:/:/usr/sbin/nologin\n");
        for Account { name, uid, gid, home, shell, .. } in &self.0 {
            writeln!(text, "{name}:x:{uid}:{gid}:{name}:{home}:{shell}")
                .expect("writing to a String cannot fail");
        }
        text
    }

    /// Text of the sandbox's `/etc/group`. The overflow group is `nogroup`, as on Debian.
    pub fn group(&self) -> String {
        let mut text = String::from("root:x:0:\n");
        let mut seen = HashSet::new();
        for Account { name, gid, .. } in self.0.iter().filter(|account| seen.insert(account.gid)) {
            let name = if *gid == NOBODY { "nogroup" } else { name };
            writeln!(text, "{name}:x:{gid}:").expect("writing to a String cannot fail");
        }
        text
    }
}

pub(super) fn check(raw: RawAccounts) -> Result<Accounts, Fault> {
    let (mut names, mut uids) = (HashSet::new(), HashSet::new());
    let mut accounts = Vec::new();
    for entry in raw.account {
        let span = entry.span();
        let account = check_one(entry.into_inner())?;
        check_new(&mut names, account.name.clone(), span.clone(), &account.name)?;
        check_new(&mut uids, account.uid, span.clone(), account.uid)?;
        if accounts.len() == ACCOUNTS_MAX {
            return Err(Fault::at(span, format_args!("more than {ACCOUNTS_MAX} accounts")));
        }
        accounts.push(account);
    }
    match accounts.first() {
        Some(first) if first.name == "sandbox" => Ok(Accounts(accounts)),
        _ => Err(Fault::at(0..0, "the first account must be `sandbox`")),
    }
}

fn check_one(raw: RawAccount) -> Result<Account, Fault> {
    check_why(&raw.why)?;
    let lower = |byte: u8| byte.is_ascii_lowercase() || byte == b'_';
    let name = raw.name.get_ref().as_bytes();
    let fine = name.first().is_some_and(|byte| lower(*byte)) && name.len() <= 32;
    if !fine || !name.iter().all(|byte| lower(*byte) || byte.is_ascii_digit() || *byte == b'-') {
        return Err(Fault::at(
            raw.name.span(),
            "an account name is a-z, 0-9, `_`, `-`, and at most 32 of them",
        ));
    }
    for id in [&raw.uid, &raw.gid] {
        if *id.get_ref() == 0 || *id.get_ref() > NOBODY {
            return Err(Fault::at(id.span(), format_args!("an id is 1 to {NOBODY}: no guest is root")));
        }
    }
    for path in [&raw.home, &raw.shell] {
        if !path.get_ref().starts_with('/') || path.get_ref().contains([':', '\n', '\0']) {
            return Err(Fault::at(path.span(), "expected an absolute path without `:`"));
        }
    }
    Ok(Account {
        name: raw.name.into_inner(),
        uid: raw.uid.into_inner(),
        gid: raw.gid.into_inner(),
        home: raw.home.into_inner(),
        shell: raw.shell.into_inner(),
        why: raw.why.into_inner(),
    })
}

#[cfg(test)]
mod tests {
    use crate::policy::load;

    #[test]
    fn passwd_and_group_name_the_accounts() {
        let accounts = load(None).expect("the defaults").accounts;
        assert_eq!(
            accounts.passwd(),
            "root:x:0:0:root:/:/usr/sbin/nologin\n\
             sandbox:x:1000:1000:sandbox:/home/sandbox:/bin/bash\n\
             nobody:x:65534:65534:nobody:/nonexistent:/usr/sbin/nologin\n"
        );
        assert_eq!(accounts.group(), "root:x:0:\nsandbox:x:1000:\nnogroup:x:65534:\n");
        assert_eq!(accounts.index_of("nobody"), Some(1));
        assert_eq!(accounts.index_of("root"), None);
    }
}
