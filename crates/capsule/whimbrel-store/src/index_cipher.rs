//! Index cipher: hides the short digests of an encrypted store's indexes.
//!
//! A digest of known content would tell a thief that the store has it. So an index has each short digest
//! encrypted as one block of AES-256, which is a keyed permutation: equal digests stay equal and keys stay
//! uniform, as look-ups need, and merging gets the digests back. Digests never repeat within an index but for
//! copies of one object, so a block cipher without chaining reveals no more than that.

use crate::keys::DataKey;
use aws_lc_rs::cipher::{AES_256, DecryptingKey, DecryptionContext, EncryptingKey, UnboundCipherKey};
use whimbrel_image::ShortDigest;

/// Permutation of short digests.
pub(crate) struct IndexCipher {
    hide: EncryptingKey,
    reveal: DecryptingKey,
}

impl IndexCipher {
    /// Cipher of a store; none if the library refuses the key, which it never does for one of this length.
    pub(crate) fn new(data: &DataKey) -> Option<Self> {
        let bytes = data.derive("whimbrel store 2026-11-25 index");
        let key = || UnboundCipherKey::new(&AES_256, &bytes).ok();
        Some(Self { hide: EncryptingKey::ecb(key()?).ok()?, reveal: DecryptingKey::ecb(key()?).ok()? })
    }

    /// The short digest as it is in an index.
    pub(crate) fn hide(&self, ShortDigest(mut block): ShortDigest) -> ShortDigest {
        self.hide.encrypt(&mut block).expect("a block of 16 bytes is encrypted");
        ShortDigest(block)
    }

    /// The short digest that an index has as `block`.
    pub(crate) fn reveal(&self, ShortDigest(mut block): ShortDigest) -> ShortDigest {
        let revealed = self.reveal.decrypt(&mut block, DecryptionContext::None);
        revealed.expect("a block of 16 bytes is decrypted");
        ShortDigest(block)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_hidden_digest_comes_back_and_shows_nothing_of_itself() {
        let data = DataKey::random().unwrap();
        let (cipher, other) = (IndexCipher::new(&data).unwrap(), DataKey::random().unwrap());
        let digest = ShortDigest([7; 16]);
        assert_eq!(cipher.reveal(cipher.hide(digest)), digest);
        assert_ne!(cipher.hide(digest), digest);
        assert_ne!(cipher.hide(digest), IndexCipher::new(&other).unwrap().hide(digest));
    }
}
