//! The key of a session: 128 random bits, made by the server for one session and checked on every request.
//!
//! And what a client is known by, from one session to the one that follows it.

use rand::Rng;
use serde::{Deserialize, Serialize};
use std::fmt;

/// A session's key. Never printed.
#[derive(Clone, Copy, Serialize, Deserialize)]
pub struct SessionKey([u8; 16]);

impl SessionKey {
    /// A fresh one, from the system's generator.
    pub fn random() -> Self {
        Self(rand::rng().random())
    }

    /// Compares in a time that does not depend on where they differ.
    pub fn matches(&self, other: &SessionKey) -> bool {
        let pairs = self.0.iter().zip(other.0);
        pairs.fold(0, |differ, (a, b)| differ | (a ^ b)) == 0
    }
}

impl fmt::Debug for SessionKey {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("SessionKey(..)")
    }
}

/// What a client is known by as long as it has its cache: 128 random bits of its own.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct ClientId([u8; 16]);

impl ClientId {
    /// A fresh one, from the system's generator.
    pub fn random() -> Self {
        Self(rand::rng().random())
    }

    /// None, if these are not its 16 bytes.
    pub fn from_bytes(bytes: &[u8]) -> Option<Self> {
        bytes.try_into().ok().map(Self)
    }

    /// Its bytes.
    pub fn as_bytes(&self) -> &[u8; 16] {
        &self.0
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn one_wrong_bit_anywhere_is_another_key() {
        let key = SessionKey::random();
        assert!(key.matches(&key.clone()));
        for bit in 0..128 {
            let mut wrong = key;
            wrong.0[bit / 8] ^= 1 << (bit % 8);
            assert!(!key.matches(&wrong), "bit {bit}");
        }
    }
}
