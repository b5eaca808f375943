//! `limits.toml`: what one sandbox may use.
#![forbid(unsafe_code)]

use serde::Deserialize;
use toml::Spanned;

use super::{Fault, check_why};

/// A number and its reason. The unit is in the field's name.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Limit {
    pub value: u64,
    pub why: String,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct RawLimit {
    value: Spanned<u64>,
    why: Spanned<String>,
}

// The file, the checked form and the walk over all fields must not drift apart.
macro_rules! limits {
    ($($(#[$doc:meta])* $name:ident: $least:literal,)*) => {
        /// Limits of the kernel's own pools, in the units that their names carry. What an operator tunes (memory,
        /// pids, cpu, space, open files) are settings: `caisson config`.
        #[derive(Clone, Debug, PartialEq, Eq)]
        pub struct Limits {
            $($(#[$doc])* pub $name: Limit,)*
        }

        #[derive(Deserialize)]
        #[serde(deny_unknown_fields)]
        pub(super) struct RawLimits {
            $($name: RawLimit,)*
        }

        pub(super) fn check(raw: RawLimits) -> Result<Limits, Fault> {
            Ok(Limits { $($name: check_one(raw.$name, $least)?,)* })
        }

        impl Limits {
            /// Every limit with its name, for `doctor` and `/health`.
            pub fn iter(&self) -> impl Iterator<Item = (&'static str, &Limit)> {
                [$((stringify!($name), &self.$name),)*].into_iter()
            }
        }
    };
}

limits! {
    nproc: 4,
    memlock_bytes: 0,
    sigpending: 0,
    msgqueue_bytes: 0,
    /// RLIMIT_CORE; 0 would still start a piped core handler.
    core_bytes: 1,
    nice: 0,
    rtprio: 0,
    /// `user.max_inotify_instances` of the sandbox's user namespace.
    inotify_instances: 0,
    /// `user.max_inotify_watches` of the sandbox's user namespace.
    inotify_watches: 0,
}

fn check_one(raw: RawLimit, least: u64) -> Result<Limit, Fault> {
    check_why(&raw.why)?;
    if *raw.value.get_ref() < least {
        return Err(Fault::at(raw.value.span(), format_args!("a sandbox does not work below {least}")));
    }
    Ok(Limit { value: raw.value.into_inner(), why: raw.why.into_inner() })
}
