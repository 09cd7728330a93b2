//! The public key of a host and its text form.
//!
//! The text is `whk1-` and 56 letters of base32 (RFC 4648 alphabet, lower case, no padding) over 35 bytes:
//! the ed25519 key and three bytes of checksum, which reveals a copying mistake before a handshake fails.

use std::{fmt, str::FromStr};
use whimbrel_core::Digest;

const PREFIX: &str = "whk1-";
const ALPHABET: &[u8; 32] = b"abcdefghijklmnopqrstuvwxyz234567";

/// The ed25519 public key of a host (RFC 8032, 32 bytes).
#[derive(Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct PublicKey(pub [u8; 32]);

/// Error for a text that is not a public key.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum ParseKeyError {
    /// The prefix, the length or a letter is wrong.
    #[error("a key is whk1- and 56 letters or digits, this is {text:?}")]
    Form {
        /// The rejected text, at most 80 characters of it.
        text: String,
    },
    /// The checksum is wrong, so the key was not copied exactly.
    #[error("the checksum of the key {text:?} is wrong: the key was not copied exactly")]
    Checksum {
        /// The rejected text.
        text: String,
    },
}

impl PublicKey {
    fn checksum(&self) -> [u8; 3] {
        let mut named = PREFIX.as_bytes().to_vec();
        named.extend(self.0);
        let [a, b, c, ..] = Digest::of(&named).0;
        [a, b, c]
    }

    /// Sixteen letters in four groups, for comparison by people.
    pub fn fingerprint(&self) -> String {
        let text = base32(&Digest::of(&self.0).0[..10]);
        [&text[..4], &text[4..8], &text[8..12], &text[12..]].join("-")
    }
}

/// Encodes groups of 5 bytes as 8 letters; callers pass multiples of 5.
fn base32(bytes: &[u8]) -> String {
    let group = |five: &[u8]| five.iter().fold(0u64, |bits, byte| bits << 8 | u64::from(*byte));
    let letters = |bits: u64| (0..8).rev().map(move |at| ALPHABET[(bits >> (5 * at) & 31) as usize] as char);
    bytes.chunks_exact(5).flat_map(|five| letters(group(five))).collect()
}

fn unbase32(text: &str) -> Option<Vec<u8>> {
    let mut bytes = Vec::with_capacity(text.len() / 8 * 5);
    for eight in text.as_bytes().chunks_exact(8) {
        let mut bits = 0u64;
        for letter in eight {
            let value = ALPHABET.iter().position(|known| *known == letter.to_ascii_lowercase())?;
            bits = bits << 5 | value as u64;
        }
        bytes.extend(&bits.to_be_bytes()[3..]);
    }
    Some(bytes)
}

impl fmt::Display for PublicKey {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let mut bytes = self.0.to_vec();
        bytes.extend(self.checksum());
        write!(f, "{PREFIX}{}", base32(&bytes))
    }
}

impl fmt::Debug for PublicKey {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "PublicKey({})", self.fingerprint())
    }
}

impl FromStr for PublicKey {
    type Err = ParseKeyError;

    fn from_str(text: &str) -> Result<Self, Self::Err> {
        let shown = || text.chars().take(80).collect();
        let letters = text.strip_prefix(PREFIX).filter(|letters| letters.len() == 56);
        let bytes = letters.and_then(unbase32).ok_or_else(|| ParseKeyError::Form { text: shown() })?;
        let (key, sum) =
            bytes.split_first_chunk::<32>().ok_or_else(|| ParseKeyError::Form { text: shown() })?;
        let key = Self(*key);
        if key.checksum() == *sum { Ok(key) } else { Err(ParseKeyError::Checksum { text: shown() }) }
    }
}

whimbrel_core::serde_by_text!(PublicKey);

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    proptest! {
        #[test]
        fn a_slip_in_copying_a_key_is_noticed(bytes: [u8; 32], at in 5usize..61, letter in 0usize..32) {
            let key = PublicKey(bytes);
            let text = key.to_string();
            prop_assert_eq!(text.parse::<PublicKey>(), Ok(key));
            let mut wrong = text.clone().into_bytes();
            prop_assume!(wrong[at] != ALPHABET[letter]);
            wrong[at] = ALPHABET[letter];
            prop_assert!(String::from_utf8(wrong).unwrap().parse::<PublicKey>().is_err());
        }

        #[test]
        fn no_text_makes_the_parser_panic(text in ".{0,70}") {
            prop_assert!(text.parse::<PublicKey>().is_err());
        }
    }
}
