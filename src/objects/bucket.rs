//! Whose a stored file is, within its tenant: a user's, an agent's, or one version of a skill.
#![forbid(unsafe_code)]

/// Longest name of an agent or a skill.
const RESOURCE_BYTES_MAX: usize = 128;
/// Largest version: what the store's numbers hold.
const VERSION_MAX: u64 = i64::MAX as u64;

/// What a file was uploaded for. A `User` file is its user's where a token proved one, else its tenant's.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub enum Bucket {
    User,
    Agent { id: String },
    Skill { id: String, version: u64 },
}

/// Not the name of a bucket.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum InvalidBucket {
    #[error("kind must be user, agent or skill")]
    Kind,
    #[error("id must be 1 to {RESOURCE_BYTES_MAX} characters of A-Z, a-z, 0-9, '_', '.', ':' and '-'")]
    Id,
    #[error("version must be a number for kind skill, and is for no other kind")]
    Version,
}

impl Bucket {
    /// The bucket that a request names. The id of a user is not looked at: who asks is known otherwise.
    pub fn parse(kind: &str, id: Option<&str>, version: Option<u64>) -> Result<Bucket, InvalidBucket> {
        let resource = || id.filter(|id| is_resource(id)).map(str::to_owned).ok_or(InvalidBucket::Id);
        match (kind, version) {
            ("user", None) => Ok(Bucket::User),
            ("agent", None) => Ok(Bucket::Agent { id: resource()? }),
            ("skill", Some(version)) if version <= VERSION_MAX => {
                Ok(Bucket::Skill { id: resource()?, version })
            }
            ("user" | "agent" | "skill", _) => Err(InvalidBucket::Version),
            _ => Err(InvalidBucket::Kind),
        }
    }

    pub fn kind(&self) -> &'static str {
        match self {
            Bucket::User => "user",
            Bucket::Agent { .. } => "agent",
            Bucket::Skill { .. } => "skill",
        }
    }

    /// Of the agent or skill.
    pub fn id(&self) -> Option<&str> {
        match self {
            Bucket::User => None,
            Bucket::Agent { id } | Bucket::Skill { id, .. } => Some(id),
        }
    }

    pub fn version(&self) -> Option<u64> {
        match self {
            Bucket::Skill { version, .. } => Some(*version),
            Bucket::User | Bucket::Agent { .. } => None,
        }
    }
}

fn is_resource(id: &str) -> bool {
    let fits = |byte: u8| byte.is_ascii_alphanumeric() || b"_.:-".contains(&byte);
    (1..=RESOURCE_BYTES_MAX).contains(&id.len()) && id.bytes().all(fits)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn buckets_are_what_the_contract_names() {
        let agent = Bucket::Agent { id: "a.b:c-1_2".to_owned() };
        assert_eq!(Bucket::parse("agent", Some("a.b:c-1_2"), None), Ok(agent));
        let skill = Bucket::Skill { id: "s".to_owned(), version: 4 };
        assert_eq!(Bucket::parse("skill", Some("s"), Some(4)), Ok(skill));
        assert_eq!(Bucket::parse("user", Some("any thing"), None), Ok(Bucket::User));
        assert_eq!(Bucket::parse("user", None, None), Ok(Bucket::User));
        for (kind, id, version, why) in [
            ("galaxy", Some("x"), None, InvalidBucket::Kind),
            ("", None, None, InvalidBucket::Kind),
            ("skill", Some("x"), None, InvalidBucket::Version),
            ("skill", Some("x"), Some(u64::MAX), InvalidBucket::Version),
            ("user", Some("x"), Some(1), InvalidBucket::Version),
            ("agent", Some("x"), Some(1), InvalidBucket::Version),
            ("agent", None, None, InvalidBucket::Id),
            ("agent", Some(""), None, InvalidBucket::Id),
            ("agent", Some("a b"), None, InvalidBucket::Id),
            ("agent", Some("ä"), None, InvalidBucket::Id),
            ("agent", Some("../x"), None, InvalidBucket::Id),
        ] {
            assert_eq!(Bucket::parse(kind, id, version), Err(why), "{kind} {id:?} {version:?}");
        }
        assert!(Bucket::parse("agent", Some(&"a".repeat(128)), None).is_ok());
        assert!(Bucket::parse("agent", Some(&"a".repeat(129)), None).is_err());
    }
}
