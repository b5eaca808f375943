//! Which account of the sandbox a request runs as. A name that cannot be had is an answer to the code, not a
//! refused request: see `ProcessError` in the contract.
#![forbid(unsafe_code)]

use crate::launcher::plan::Account;
use crate::launcher::posture::Hello;

/// The account that every sandbox has, and that stands for the daemon's.
const SANDBOX: &str = "sandbox";
const SANDBOX_ACCOUNT: Account = Account(0);

/// Why not, for the caller.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum CannotRunAs {
    #[error("cannot run as {user}: daemon runs as uid {uid} and only root can change identity")]
    NotRoot { user: String, uid: u32 },
    #[error("cannot run as {user}: no such account")]
    NoSuchAccount { user: String },
    #[error("cannot run as {user}: uid 0 is never available to guest code")]
    Root { user: String },
    #[error("cannot run as {user}: the session runs as {fixed}")]
    FixedInSession { user: String, fixed: String },
}

/// Resolves the name of a request against what the launcher offers.
pub fn resolve(
    user: Option<&str>,
    default_user: Option<&str>,
    daemon_account: Option<&str>,
    hello: &Hello,
) -> Result<Account, CannotRunAs> {
    let Some(user) = user.or(default_user) else { return Ok(SANDBOX_ACCOUNT) };
    if names_uid_0(user) && hello.posture.root {
        return Err(CannotRunAs::Root { user: user.to_owned() });
    }
    if !hello.posture.root {
        let is_our_own = !names_uid_0(user) && daemon_account == Some(user);
        return if user == SANDBOX || is_our_own {
            Ok(SANDBOX_ACCOUNT)
        } else {
            Err(CannotRunAs::NotRoot { user: user.to_owned(), uid: hello.posture.uid })
        };
    }
    let index = hello.accounts.iter().position(|name| name == user);
    match index.and_then(|index| u8::try_from(index).ok()) {
        Some(index) => Ok(Account(index)),
        None => Err(CannotRunAs::NoSuchAccount { user: user.to_owned() }),
    }
}

/// The name of an account, for messages.
pub fn account_name(account: Account, hello: &Hello) -> String {
    hello.accounts.get(usize::from(account.0)).cloned().unwrap_or_else(|| format!("account {}", account.0))
}

/// `root`, and every way to write the number.
fn names_uid_0(user: &str) -> bool {
    let digits = user.trim().trim_start_matches(['+', '-']);
    let is_zero = !digits.is_empty() && digits.chars().all(|c| c == '0');
    let is_hex_zero = digits
        .to_ascii_lowercase()
        .strip_prefix("0x")
        .is_some_and(|hex| !hex.is_empty() && hex.chars().all(|c| c == '0'));
    user.trim() == "root" || is_zero || is_hex_zero
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::backend::native::fake::hello;

    fn as_root(user: Option<&str>) -> Result<Account, CannotRunAs> {
        resolve(user, None, Some("caisson"), &hello())
    }

    fn as_other(user: &str) -> Result<Account, CannotRunAs> {
        let mut hello = hello();
        (hello.posture.root, hello.posture.uid) = (false, 1001);
        resolve(Some(user), None, Some("caisson"), &hello)
    }

    #[test]
    fn root_chooses_among_the_sandboxs_accounts() {
        assert_eq!(as_root(None), Ok(Account(0)));
        assert_eq!(as_root(Some("sandbox")), Ok(Account(0)));
        assert_eq!(as_root(Some("nobody")), Ok(Account(1)));
        let text = as_root(Some("alice")).expect_err("unknown").to_string();
        assert_eq!(text, "cannot run as alice: no such account");
        assert!(as_root(Some("")).is_err());
        assert!(as_root(Some("caisson")).is_err(), "an account of the host");
    }

    #[test]
    fn uid_0_is_never_available() {
        for user in ["root", "0", "+0", "-0", "000", "0x0", " root"] {
            let text = as_root(Some(user)).expect_err("refused").to_string();
            assert_eq!(text, format!("cannot run as {user}: uid 0 is never available to guest code"));
            assert!(as_other(user).is_err());
        }
    }

    #[test]
    fn an_ordinary_account_can_only_be_itself() {
        assert_eq!(as_other("sandbox"), Ok(Account(0)));
        assert_eq!(as_other("caisson"), Ok(Account(0)));
        assert_eq!(
            as_other("alice").expect_err("refused").to_string(),
            "cannot run as alice: daemon runs as uid 1001 and only root can change identity"
        );
    }

    #[test]
    fn the_configured_default_stands_in_for_a_missing_name() {
        assert_eq!(resolve(None, Some("nobody"), None, &hello()), Ok(Account(1)));
        assert_eq!(resolve(Some("sandbox"), Some("nobody"), None, &hello()), Ok(Account(0)));
    }
}
