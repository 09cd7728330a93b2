//! The hello: the first message of both sides, from which they choose a version. Pure.
//!
//! Both sides send at once, so it costs one round trip. The layout is frozen: every future version must be
//! able to parse it, at least to read which versions the peer speaks. New fields go behind the name, where
//! old hosts skip them.
//!
//! ```text
//! 0  magic "WHIMBREL"   8   u16 length of the whole hello, 24..=1024
//! 10 u16 oldest version spoken   12 u16 newest   14 u8 role   15 u8 length of name
//! 16 u32 window in bytes         20 u32 zero     24 name (UTF-8)   .. future fields
//! ```

use crate::MIN_WINDOW;
use std::fmt;
use whimbrel_core::HostName;

const MAGIC: &[u8; 8] = b"WHIMBREL";
/// The length of the fixed part, which is read and checked first.
pub(crate) const FIXED: usize = 24;
const MAX_HELLO: u16 = 1024;

/// A version of the protocol and the reason for it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Version {
    /// Number of the version.
    pub number: u16,
    /// The change, and why it needs a new number.
    pub reason: &'static str,
}

/// Every version that this build speaks, oldest first. An entry is removed when support for it ends.
pub const VERSIONS: &[Version] = &[Version {
    number: 1,
    reason: "the first: calls both ways, two classes of credit, ordered streams, pings, goodbye with a reason",
}];

/// A range of versions, `oldest..=newest`.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct VersionRange {
    /// First version of the range.
    pub oldest: u16,
    /// Last version of the range.
    pub newest: u16,
}

impl VersionRange {
    /// The versions that this build speaks.
    pub const OURS: VersionRange =
        VersionRange { oldest: VERSIONS[0].number, newest: VERSIONS[VERSIONS.len() - 1].number };

    /// The newest version in both ranges.
    pub fn common(self, other: Self) -> Option<u16> {
        let newest = self.newest.min(other.newest);
        (newest >= self.oldest.max(other.oldest)).then_some(newest)
    }
}

impl fmt::Display for VersionRange {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} to {}", self.oldest, self.newest)
    }
}

/// The kind of program that speaks. Unknown roles of later versions are accepted.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Role(pub u8);

impl Role {
    /// The daemon, `whimbrel host`.
    pub const HOST: Role = Role(1);
}

/// The first message of a side.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Hello {
    /// Versions the sender speaks.
    pub versions: VersionRange,
    /// The kind of program that the sender is.
    pub role: Role,
    /// Bytes of bulk that the sender can hold. The smaller window of both sides is used in each direction.
    pub window: u32,
    /// The name that the sender claims; it is not authenticated.
    pub name: HostName,
}

/// Failure to parse the hello or to agree on a version.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum HelloError {
    /// The peer speaks another protocol, or a login script prints into the stream.
    #[error("the peer does not speak this protocol: it began with {start:?}")]
    NotWhimbrel {
        /// The first bytes, escaped.
        start: String,
    },
    /// A hello with an invalid field.
    #[error("malformed hello: {field}")]
    Malformed {
        /// The invalid field.
        field: &'static str,
    },
    /// No version in common.
    #[error("no common version: we speak {ours}, the peer speaks {theirs}")]
    NoCommonVersion {
        /// Versions of this side.
        ours: VersionRange,
        /// Versions of the peer.
        theirs: VersionRange,
    },
}

impl Hello {
    /// The hello as bytes.
    pub fn encode(&self) -> Vec<u8> {
        let name = self.name.as_str().as_bytes();
        let mut out = Vec::with_capacity(FIXED + name.len());
        out.extend(MAGIC);
        out.extend(((FIXED + name.len()) as u16).to_le_bytes());
        out.extend(self.versions.oldest.to_le_bytes());
        out.extend(self.versions.newest.to_le_bytes());
        out.extend([self.role.0, name.len() as u8]);
        out.extend(self.window.to_le_bytes());
        out.extend([0; 4]);
        out.extend(name);
        out
    }

    /// Number of bytes that follow the fixed part.
    pub(crate) fn rest_len(fixed: &[u8; FIXED]) -> Result<usize, HelloError> {
        if &fixed[..8] != MAGIC {
            return Err(HelloError::NotWhimbrel { start: fixed.escape_ascii().to_string() });
        }
        let length = u16::from_le_bytes([fixed[8], fixed[9]]);
        let known = usize::from(length) >= FIXED + usize::from(fixed[15]) && length <= MAX_HELLO;
        if known { Ok(usize::from(length) - FIXED) } else { Err(HelloError::Malformed { field: "length" }) }
    }

    /// Parses a complete hello. Fields behind the name are skipped.
    pub fn parse(bytes: &[u8]) -> Result<Self, HelloError> {
        let (fixed, rest) = bytes.split_first_chunk::<FIXED>().ok_or_else(|| HelloError::NotWhimbrel {
            start: bytes.iter().take(FIXED).flat_map(|b| b.escape_ascii()).map(char::from).collect(),
        })?;
        if rest.len() != Self::rest_len(fixed)? {
            return Err(HelloError::Malformed { field: "length" });
        }
        let u16_at = |at: usize| u16::from_le_bytes([fixed[at], fixed[at + 1]]);
        let versions = VersionRange { oldest: u16_at(10), newest: u16_at(12) };
        let window = u32::from_le_bytes([fixed[16], fixed[17], fixed[18], fixed[19]]);
        let name =
            std::str::from_utf8(&rest[..usize::from(fixed[15])]).ok().and_then(|name| name.parse().ok());
        let name = name.ok_or(HelloError::Malformed { field: "name" })?;
        if versions.oldest > versions.newest {
            return Err(HelloError::Malformed { field: "versions" });
        }
        Ok(Self { versions, role: Role(fixed[14]), window, name })
    }

    /// The version and window for the connection; both sides compute the same.
    pub(crate) fn agree(&self, theirs: &Hello) -> Result<(u16, u32), HelloError> {
        let version = self
            .versions
            .common(theirs.versions)
            .ok_or(HelloError::NoCommonVersion { ours: self.versions, theirs: theirs.versions })?;
        if theirs.window < MIN_WINDOW {
            return Err(HelloError::Malformed { field: "window" });
        }
        Ok((version, self.window.min(theirs.window)))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn hello(oldest: u16, newest: u16) -> Hello {
        let versions = VersionRange { oldest, newest };
        Hello { versions, role: Role::HOST, window: 32 << 20, name: "alpha".parse().unwrap() }
    }

    /// Changing these bytes cuts us off from every host that runs today.
    #[test]
    fn the_first_message_is_these_bytes_for_ever() {
        let bytes = b"WHIMBREL\x1d\x00\x01\x00\x03\x00\x01\x05\x00\x00\x00\x02\x00\x00\x00\x00alpha";
        assert_eq!(hello(1, 3).encode(), bytes);
        assert_eq!(Hello::parse(bytes), Ok(hello(1, 3)));
    }

    #[test]
    fn fields_of_a_future_version_are_skipped() {
        let mut bytes = hello(2, 900).encode();
        bytes.extend([7; 100]);
        bytes[8..10].copy_from_slice(&129u16.to_le_bytes());
        assert_eq!(Hello::parse(&bytes), Ok(hello(2, 900)));
    }

    #[test]
    fn without_a_common_version_both_ranges_are_told() {
        assert_eq!(hello(1, 3).agree(&hello(2, 9)), Ok((3, 32 << 20)));
        let (ours, theirs) = (hello(4, 5), hello(1, 3));
        let error = ours.agree(&theirs).unwrap_err();
        assert_eq!(error.to_string(), "no common version: we speak 4 to 5, the peer speaks 1 to 3");
        assert!(theirs.agree(&ours).is_err());
    }

    proptest! {
        #[test]
        fn garbage_is_a_typed_error(mut bytes in prop::collection::vec(any::<u8>(), 0..80), ours: bool) {
            if ours && bytes.len() >= 8 { bytes[..8].copy_from_slice(MAGIC); }
            if let Ok(hello) = Hello::parse(&bytes) { prop_assert!(bytes.len() >= hello.encode().len()); }
        }
    }
}
