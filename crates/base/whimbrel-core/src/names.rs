//! Names that people choose. A value of one of these types is valid by construction and safe as a file name.

use crate::Digest;
use serde::{Deserialize, Serialize};
use std::{fmt, str::FromStr};

/// Error for a text that cannot be a name.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error(
    "{text:?} cannot be a {what}: use 1 to 63 letters, digits, '-', '_' or '.', and begin with a letter or digit"
)]
pub struct NameError {
    /// The kind of name.
    pub what: &'static str,
    /// The rejected text, at most 80 characters of it.
    pub text: String,
}

fn is_name(text: &str) -> bool {
    (1..=63).contains(&text.len())
        && text.as_bytes()[0].is_ascii_alphanumeric()
        && text.bytes().all(|b| b.is_ascii_alphanumeric() || b"-_.".contains(&b))
}

macro_rules! name {
    ($(#[$doc:meta])* $type:ident, $what:literal) => {
        $(#[$doc])*
        #[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord, Hash)]
        pub struct $type(String);

        impl $type {
            /// The name as text.
            pub fn as_str(&self) -> &str {
                &self.0
            }
        }

        impl FromStr for $type {
            type Err = NameError;

            fn from_str(text: &str) -> Result<Self, NameError> {
                if is_name(text) {
                    Ok(Self(text.to_owned()))
                } else {
                    Err(NameError { what: $what, text: text.chars().take(80).collect() })
                }
            }
        }

        crate::serde_by_text!($type);

        impl fmt::Display for $type {
            fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.pad(&self.0)
            }
        }
    };
}

name!(
    /// The name of a machine, unique on its host.
    MachineName,
    "machine name"
);
name!(
    /// The name of a host, unique among hosts that trust each other.
    HostName,
    "host name"
);
name!(
    /// A mutable name for a capsule: a tag, or a machine's newest capsule.
    RefName,
    "tag"
);

/// The id of a capsule: the digest of its manifest.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(transparent)]
pub struct CapsuleId(pub Digest);

impl CapsuleId {
    /// The first twelve hexadecimal digits, for people.
    pub fn short(&self) -> String {
        self.0.short()
    }
}

impl fmt::Display for CapsuleId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.fmt(f)
    }
}

impl FromStr for CapsuleId {
    type Err = crate::ParseDigestError;

    fn from_str(text: &str) -> Result<Self, Self::Err> {
        text.parse().map(Self)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_that_would_hurt_a_file_system_are_refused() {
        for bad in ["", ".", "..", "a/b", "-x", "a b", "é", "x\0", &"a".repeat(64)] {
            assert!(bad.parse::<MachineName>().is_err(), "{bad:?}");
        }
        for good in ["a", "web-1", "A.b_c", "0"] {
            assert!(good.parse::<MachineName>().is_ok(), "{good:?}");
        }
        assert!(serde_json::from_str::<MachineName>("\"../etc\"").is_err());
    }
}
