//! The key of a session and the id of a client, both of 128 random bits.
//!
//! The server makes a key for one session and checks it on every request. A client id stays the same from one
//! session to the next.

use rand::Rng;
use serde::{Deserialize, Serialize};
use std::fmt;

/// Key of a session. Never printed.
#[derive(Clone, Copy, Serialize, Deserialize)]
pub struct SessionKey([u8; 16]);

impl SessionKey {
    /// A new key from the system's generator.
    pub fn random() -> Self {
        Self(rand::rng().random())
    }

    /// Compares in a time that does not depend on where the keys differ.
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

/// Id of a client, for as long as its cache exists.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct ClientId([u8; 16]);

impl ClientId {
    /// A new id from the system's generator.
    pub fn random() -> Self {
        Self(rand::rng().random())
    }

    /// The id with these bytes; none if they are not 16.
    pub fn from_bytes(bytes: &[u8]) -> Option<Self> {
        bytes.try_into().ok().map(Self)
    }

    /// Bytes of the id.
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
