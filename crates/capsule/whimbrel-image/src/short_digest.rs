//! Short digest: the first half of a digest, which indexes and delta frames use.

use std::fmt;
use whimbrel_core::Digest;

/// The first 16 bytes of a digest.
///
/// Halves the cost of every index entry and delta base. Content found by a short digest is checked against
/// the full digest when it is read, so a collision is a refused read and never wrong content. Making two
/// pages with one short digest takes 2^64 work and hurts only their maker; matching somebody else's page
/// takes 2^128.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct ShortDigest(pub [u8; 16]);

impl ShortDigest {
    /// Bytes of a short digest.
    pub const LEN: usize = 16;

    /// The first eight bytes as a number, uniformly distributed like the digest.
    pub fn prefix(&self) -> u64 {
        let [a, b, c, d, e, f, g, h, ..] = self.0;
        u64::from_be_bytes([a, b, c, d, e, f, g, h])
    }

    /// Whether `digest` begins with these bytes.
    pub fn matches(&self, digest: &Digest) -> bool {
        ShortDigest::from(digest) == *self
    }
}

impl From<&Digest> for ShortDigest {
    fn from(digest: &Digest) -> Self {
        let mut key = [0; ShortDigest::LEN];
        key.copy_from_slice(&digest.0[..ShortDigest::LEN]);
        ShortDigest(key)
    }
}

impl fmt::Display for ShortDigest {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.iter().try_for_each(|byte| write!(f, "{byte:02x}"))
    }
}

impl fmt::Debug for ShortDigest {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Key({self})")
    }
}
