//! Sealed frames: pack frames of an encrypted store, each encrypted for its place.
//!
//! ```text
//! 0   magic "WHSF"              8   nonce, 12 bytes
//! 4   length of the frame, u32  20  AES-256-GCM of the frame, then the tag, 16 bytes
//! ```
//!
//! Associated data are the version of this format, pack, offset and length, so a frame is read nowhere but
//! where it was written. That its objects are those that were asked for follows from their digests, which
//! readers compare. Each pack has a key of its own, derived from the data key and the name of the pack. So no
//! key seals more than the few thousand frames of a pack, and random nonces do not repeat.

use crate::{
    file_names::PackId,
    keys::{DataKey, aead_key},
};
use aws_lc_rs::aead::{Aad, LessSafeKey, NONCE_LEN, Nonce};

const MAGIC: [u8; 4] = *b"WHSF";
/// Name and version of the format in the associated data.
const CONTEXT: &[u8] = b"whimbrel sealed frame 1";
/// Bytes before the encrypted frame.
pub(crate) const HEAD: usize = 8 + NONCE_LEN;
const TAG: usize = 16;
/// Bytes that sealing adds.
pub(crate) const OVERHEAD: usize = HEAD + TAG;

/// Reasons to reject a sealed frame.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
pub(crate) enum SealError {
    /// The bytes are no sealed frame of their length.
    #[error("not a sealed frame")]
    Head,
    /// The tag does not fit the bytes, the key or the place.
    #[error("the frame was not sealed with the key of this store for this place")]
    Tag,
    /// The library refused to work.
    #[error("the frame cannot be encrypted")]
    Library,
}

/// Derives the keys of packs.
pub(crate) struct PackKeys([u8; 32]);

impl PackKeys {
    pub(crate) fn new(data: &DataKey) -> Self {
        Self(data.derive("whimbrel store 2026-11-25 packs"))
    }

    /// Key of one pack.
    pub(crate) fn of(&self, pack: PackId) -> Result<PackKey, SealError> {
        let key = blake3::keyed_hash(&self.0, &name(pack));
        Ok(PackKey { pack, key: aead_key(key.as_bytes()).ok_or(SealError::Library)? })
    }
}

fn name(pack: PackId) -> [u8; 12] {
    let mut name = [0; 12];
    name[..8].copy_from_slice(&pack.lease.to_le_bytes());
    name[8..].copy_from_slice(&pack.seq.to_le_bytes());
    name
}

/// Key of the frames of one pack.
pub(crate) struct PackKey {
    pack: PackId,
    key: LessSafeKey,
}

impl PackKey {
    /// Seals a frame for `offset` in the pack.
    pub(crate) fn seal(&self, offset: u32, frame: &[u8]) -> Result<Vec<u8>, SealError> {
        let len = u32::try_from(frame.len()).map_err(|_| SealError::Library)?;
        let mut nonce = [0; NONCE_LEN];
        aws_lc_rs::rand::fill(&mut nonce).map_err(|_| SealError::Library)?;
        let mut bytes = Vec::with_capacity(OVERHEAD + frame.len());
        bytes.extend(MAGIC);
        bytes.extend(len.to_le_bytes());
        bytes.extend(nonce);
        bytes.extend(frame);
        let nonce = Nonce::assume_unique_for_key(nonce);
        let context = Aad::from(self.context(offset, len));
        let tag = self.key.seal_in_place_separate_tag(nonce, context, &mut bytes[HEAD..]);
        bytes.extend(tag.map_err(|_| SealError::Library)?.as_ref());
        Ok(bytes)
    }

    /// Replaces the sealed frame that was read from `offset` by the frame in it.
    pub(crate) fn open(&self, offset: u32, bytes: &mut Vec<u8>) -> Result<(), SealError> {
        if sealed_len(bytes) != Some(bytes.len()) {
            return Err(SealError::Head);
        }
        let (head, sealed) = bytes.split_first_chunk_mut::<HEAD>().ok_or(SealError::Head)?;
        let nonce = Nonce::try_assume_unique_for_key(&head[8..]).map_err(|_| SealError::Head)?;
        let len = sealed.len() - TAG;
        let context = Aad::from(self.context(offset, len as u32));
        self.key.open_in_place(nonce, context, sealed).map_err(|_| SealError::Tag)?;
        bytes.copy_within(HEAD..HEAD + len, 0);
        bytes.truncate(len);
        Ok(())
    }

    fn context(&self, offset: u32, len: u32) -> Vec<u8> {
        [CONTEXT, &name(self.pack), &offset.to_le_bytes(), &len.to_le_bytes()].concat()
    }
}

/// Length of the sealed frame that begins with `bytes`, as its head says; none if it is no head.
pub(crate) fn sealed_len(bytes: &[u8]) -> Option<usize> {
    let [a, b, c, d] = *bytes.strip_prefix(&MAGIC)?.first_chunk()?;
    (u32::from_le_bytes([a, b, c, d]) as usize).checked_add(OVERHEAD)
}

/// Position of the next bytes that may be the head of a sealed frame, or the end.
pub(crate) fn next_head(bytes: &[u8]) -> usize {
    bytes.windows(MAGIC.len()).position(|window| window == MAGIC).unwrap_or(bytes.len())
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    const PACK: PackId = PackId { lease: 3, seq: 1 };

    #[test]
    fn a_frame_is_read_where_it_was_written_and_nowhere_else() {
        let keys = PackKeys::new(&DataKey::random().unwrap());
        let sealed = keys.of(PACK).unwrap().seal(24, b"a frame").unwrap();
        assert_eq!(sealed.len(), OVERHEAD + 7);
        let open = |keys: &PackKeys, pack, offset| {
            let mut bytes = sealed.clone();
            keys.of(pack).unwrap().open(offset, &mut bytes).map(|()| bytes)
        };
        assert_eq!(open(&keys, PACK, 24).unwrap(), b"a frame");
        assert_eq!(open(&keys, PACK, 25), Err(SealError::Tag));
        assert_eq!(open(&keys, PackId { seq: 2, ..PACK }, 24), Err(SealError::Tag));
        assert_eq!(open(&keys, PackId { lease: 4, ..PACK }, 24), Err(SealError::Tag));
        assert_eq!(open(&PackKeys::new(&DataKey::random().unwrap()), PACK, 24), Err(SealError::Tag));
    }

    proptest! {
        #[test]
        fn no_changed_or_cut_frame_opens(at in any::<prop::sample::Index>(), bit in 0..8u8, cut in any::<bool>()) {
            let key = PackKeys::new(&DataKey::random().unwrap()).of(PACK).unwrap();
            let mut bytes = key.seal(24, &[9; 100]).unwrap();
            let at = at.index(bytes.len());
            if cut { bytes.truncate(at) } else { bytes[at] ^= 1 << bit }
            prop_assert!(key.open(24, &mut bytes).is_err());
        }

        #[test]
        fn any_bytes_are_refused_without_panic(mut bytes in prop::collection::vec(any::<u8>(), 0..80), magic in any::<bool>()) {
            if magic && bytes.len() >= 4 { bytes[..4].copy_from_slice(&MAGIC) }
            let key = PackKeys::new(&DataKey::random().unwrap()).of(PACK).unwrap();
            let _ = next_head(&bytes);
            prop_assert!(key.open(0, &mut bytes).is_err());
        }
    }
}
