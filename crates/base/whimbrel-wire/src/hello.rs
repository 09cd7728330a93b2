//! The hello: the first message of both sides, from which they choose a version. Pure.
//!
//! Both sides send at once, so it costs one round trip. The layout is frozen: every future version must be
//! able to parse it, at least to read which versions the peer speaks. New fields go behind the name, where
//! old hosts skip them.
//!
//! ```text
//! 0  magic "WHIMBREL"   8   u16 length of the whole hello, 24..=1024
//! 10 u16 oldest version spoken   12 u16 newest   14 u8 role   15 u8 length of name
//! 16 u32 window in bytes         20 u32 zero     24 name (UTF-8)
//! .. u8 number of protocols, each: u16 first kind   u16 oldest version   u16 newest   .. future fields
//! ```
//!
//! The versions in the fixed part are those of the connection. The calls of each engine are a protocol of
//! their own ([`Protocol`]), so that two hosts work together wherever their messages are the same. A hello
//! that ends with the name lists no protocol: its sender has the first version of each.

use crate::MIN_WINDOW;
use std::fmt;
use whimbrel_core::HostName;

const MAGIC: &[u8; 8] = b"WHIMBREL";
/// The length of the fixed part, which is read and checked first.
pub(crate) const FIXED: usize = 24;
const MAX_HELLO: u16 = 1024;
/// Bytes of one protocol in the list.
const PROTOCOL_SIZE: usize = 6;

/// A version of the protocol and the reason for it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Version {
    /// Number of the version.
    pub number: u16,
    /// The change, and why it needs a new number.
    pub reason: &'static str,
}

/// Every version of the connection that this build speaks, oldest first. An entry is removed when support for
/// it ends.
pub const VERSIONS: &[Version] = &[
    Version {
        number: 1,
        reason: "the first: calls both ways, two classes of credit, ordered streams, pings, goodbye with a reason",
    },
    Version { number: 2, reason: "the hello lists the versions of each engine's messages" },
];

/// The calls of one engine, with the versions of their messages.
#[derive(Debug, Clone, Copy)]
pub struct Protocol {
    /// Name for people.
    pub name: &'static str,
    /// First and last kind of its calls.
    pub kinds: (u16, u16),
    /// Every version that this build speaks, oldest first.
    pub versions: &'static [Version],
}

impl Protocol {
    /// Range of the versions.
    pub const fn range(&self) -> VersionRange {
        VersionRange::of(self.versions)
    }
}

/// Versions that the sender of a hello has of one protocol.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct ProtocolVersions {
    /// First kind of the protocol's calls, which names it.
    pub first_kind: u16,
    /// Versions the sender speaks.
    pub versions: VersionRange,
}

/// Two sides without a common version of one protocol.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("no common version of the {protocol} protocol: we speak {ours}, the peer speaks {theirs}")]
pub struct ProtocolMismatch {
    /// Name of the protocol.
    pub protocol: &'static str,
    /// First and last kind of its calls.
    pub kinds: (u16, u16),
    /// Versions of this side.
    pub ours: VersionRange,
    /// Versions of the peer.
    pub theirs: VersionRange,
}

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
    pub const OURS: VersionRange = VersionRange::of(VERSIONS);

    /// The range of a table of versions, which has one at least.
    pub const fn of(versions: &[Version]) -> Self {
        Self { oldest: versions[0].number, newest: versions[versions.len() - 1].number }
    }

    /// Whether a version is in the range.
    pub fn contains(self, version: u16) -> bool {
        (self.oldest..=self.newest).contains(&version)
    }

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
    /// Protocols of the sender's engines; empty if it lists none.
    pub protocols: Vec<ProtocolVersions>,
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
        let listed = if self.protocols.is_empty() { 0 } else { 1 + self.protocols.len() * PROTOCOL_SIZE };
        let len = FIXED + name.len() + listed;
        let mut out = Vec::with_capacity(len);
        out.extend(MAGIC);
        out.extend((len as u16).to_le_bytes());
        out.extend(self.versions.oldest.to_le_bytes());
        out.extend(self.versions.newest.to_le_bytes());
        out.extend([self.role.0, name.len() as u8]);
        out.extend(self.window.to_le_bytes());
        out.extend([0; 4]);
        out.extend(name);
        if listed > 0 {
            out.push(self.protocols.len() as u8);
        }
        for ProtocolVersions { first_kind, versions } in &self.protocols {
            for number in [*first_kind, versions.oldest, versions.newest] {
                out.extend(number.to_le_bytes());
            }
        }
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

    /// Parses a complete hello. Fields behind the protocols are skipped.
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
        let (name, more) = rest.split_at(usize::from(fixed[15]));
        let name = std::str::from_utf8(name).ok().and_then(|name| name.parse().ok());
        let name = name.ok_or(HelloError::Malformed { field: "name" })?;
        if versions.oldest > versions.newest {
            return Err(HelloError::Malformed { field: "versions" });
        }
        let protocols = parse_protocols(more).ok_or(HelloError::Malformed { field: "protocols" })?;
        Ok(Self { versions, role: Role(fixed[14]), window, name, protocols })
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

    /// Protocols of `ours` that the sender of this hello cannot speak. A protocol that the sender does not
    /// list, although it lists others, is none of its: it refuses the kinds.
    pub(crate) fn mismatches(&self, ours: &[Protocol]) -> Vec<ProtocolMismatch> {
        let mismatch = |protocol: &Protocol| {
            let (ours, theirs) = (protocol.range(), versions_of(&self.protocols, protocol)?);
            let Protocol { name: protocol, kinds, .. } = *protocol;
            ours.common(theirs).is_none().then_some(ProtocolMismatch { protocol, kinds, ours, theirs })
        };
        ours.iter().filter_map(mismatch).collect()
    }
}

/// Versions of a protocol by the list of a hello; a hello without a list has the first version of each.
pub(crate) fn versions_of(listed: &[ProtocolVersions], protocol: &Protocol) -> Option<VersionRange> {
    let found = listed.iter().find(|listed| listed.first_kind == protocol.kinds.0);
    let first = VersionRange { oldest: 1, newest: 1 };
    found.map(|found| found.versions).or(listed.is_empty().then_some(first))
}

/// The list of protocols, if there is one.
fn parse_protocols(bytes: &[u8]) -> Option<Vec<ProtocolVersions>> {
    let Some((count, listed)) = bytes.split_first() else { return Some(Vec::new()) };
    let listed = listed.get(..usize::from(*count) * PROTOCOL_SIZE)?;
    let parse = |entry: &[u8; PROTOCOL_SIZE]| {
        let [first_kind, oldest, newest] = [0, 2, 4].map(|at| u16::from_le_bytes([entry[at], entry[at + 1]]));
        let versions = VersionRange { oldest, newest };
        (oldest <= newest).then_some(ProtocolVersions { first_kind, versions })
    };
    listed.as_chunks::<PROTOCOL_SIZE>().0.iter().map(parse).collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn hello(oldest: u16, newest: u16) -> Hello {
        let versions = VersionRange { oldest, newest };
        let name = "alpha".parse().unwrap();
        Hello { versions, role: Role::HOST, window: 32 << 20, name, protocols: vec![] }
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
        let protocols =
            vec![ProtocolVersions { first_kind: 0x0100, versions: VersionRange { oldest: 2, newest: 3 } }];
        let hello = Hello { protocols, ..hello(2, 900) };
        let mut bytes = hello.encode();
        assert_eq!(bytes[29..], [1, 0, 1, 2, 0, 3, 0]);
        assert_eq!(Hello::parse(&bytes).as_ref(), Ok(&hello));
        bytes.extend([7; 100]);
        bytes[8..10].copy_from_slice(&136u16.to_le_bytes());
        assert_eq!(Hello::parse(&bytes), Ok(hello));
        bytes[29] = 200;
        assert_eq!(Hello::parse(&bytes), Err(HelloError::Malformed { field: "protocols" }));
    }

    #[test]
    fn an_engine_of_other_versions_is_refused_with_both_and_the_others_work() {
        const TABLE: &[Version] = &[Version { number: 2, reason: "" }, Version { number: 3, reason: "" }];
        let protocol = |name, first| Protocol { name, kinds: (first, first + 255), versions: TABLE };
        let ours = [protocol("migrate", 0x0100), protocol("store", 0x0200), protocol("pool", 0x0400)];
        let listed = |first_kind, oldest, newest| ProtocolVersions {
            first_kind,
            versions: VersionRange { oldest, newest },
        };
        let theirs = Hello { protocols: vec![listed(0x0100, 4, 5), listed(0x0200, 3, 9)], ..hello(1, 2) };
        let found = theirs.mismatches(&ours);
        assert_eq!(found.iter().map(|one| one.protocol).collect::<Vec<_>>(), ["migrate"]);
        let words = "no common version of the migrate protocol: we speak 2 to 3, the peer speaks 4 to 5";
        assert_eq!(found[0].to_string(), words);
        let common = |index: usize| ours[index].range().common(versions_of(&theirs.protocols, &ours[index])?);
        assert_eq!([common(0), common(1), common(2)], [None, Some(3), None]);
        assert_eq!(hello(1, 1).mismatches(&ours).len(), 3, "an old host has the first version of each");
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
