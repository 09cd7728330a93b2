//! Set of the 256 children of a tree node, and its encoding.
//!
//! Up to 31 members are sent as one byte each (the distance to the one before), more as a bitmap of 32 bytes:
//! a leaf with eight changed pages takes nine bytes and not 33. Pure; bytes from a peer are refused unless
//! they are what [`ChildSet::to_bytes`] would have written.

use serde::{Deserialize, Deserializer, Serialize, Serializer, de};
use std::fmt;
use whimbrel_image::FAN_OUT;

/// Set of slots (indexes of children) below 256; slot `i` is bit `i % 64` of word `i / 64`.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Default)]
pub struct ChildSet(pub [u64; 4]);

const BITMAP: usize = 32;

impl ChildSet {
    /// The empty set.
    pub const NONE: ChildSet = ChildSet([0; 4]);

    /// Whether `slot` is in the set.
    pub fn contains(&self, slot: usize) -> bool {
        self.0[slot / 64] >> (slot % 64) & 1 == 1
    }

    /// Adds `slot` to the set.
    pub fn insert(&mut self, slot: usize) {
        self.0[slot / 64] |= 1 << (slot % 64);
    }

    /// Removes `slot` from the set.
    pub fn remove(&mut self, slot: usize) {
        self.0[slot / 64] &= !(1 << (slot % 64));
    }

    /// Number of slots in the set.
    pub fn len(&self) -> usize {
        self.0.iter().map(|word| word.count_ones() as usize).sum()
    }

    /// Whether the set is empty.
    pub fn is_empty(&self) -> bool {
        self.0 == [0; 4]
    }

    /// Slots in ascending order.
    pub fn iter(&self) -> impl Iterator<Item = usize> + use<> {
        let words = self.0;
        (0..FAN_OUT).filter(move |slot| words[slot / 64] >> (slot % 64) & 1 == 1)
    }

    /// Whether every slot is in `other` too.
    pub fn is_within(&self, other: &ChildSet) -> bool {
        self.0.iter().zip(&other.0).all(|(a, b)| a & !b == 0)
    }

    /// Set of the first `count` slots.
    pub fn first(&self, count: usize) -> ChildSet {
        self.iter().take(count).collect()
    }

    /// Set of the slots that are not in `other`.
    pub fn without(&self, other: &ChildSet) -> ChildSet {
        ChildSet(std::array::from_fn(|i| self.0[i] & !other.0[i]))
    }

    /// Encodes the set.
    pub fn to_bytes(&self) -> Vec<u8> {
        if self.len() >= BITMAP {
            return self.0.iter().flat_map(|word| word.to_le_bytes()).collect();
        }
        let mut next = 0;
        let gap = |slot: usize| {
            let gap = slot - next;
            next = slot + 1;
            gap as u8
        };
        self.iter().map(gap).collect()
    }

    /// Decodes a set; none if the bytes are not one.
    pub fn from_bytes(bytes: &[u8]) -> Option<Self> {
        if let Ok(bitmap) = <&[u8; BITMAP]>::try_from(bytes) {
            let mut words = [0; 4];
            for (word, bytes) in words.iter_mut().zip(bitmap.as_chunks::<8>().0) {
                *word = u64::from_le_bytes(*bytes);
            }
            return Some(Self(words)).filter(|slots| slots.len() >= BITMAP);
        }
        let (mut slots, mut next) = (Self::NONE, 0);
        if bytes.len() > BITMAP {
            return None;
        }
        for gap in bytes {
            let slot = next + usize::from(*gap);
            if slot >= FAN_OUT {
                return None;
            }
            slots.insert(slot);
            next = slot + 1;
        }
        Some(slots)
    }
}

impl FromIterator<usize> for ChildSet {
    fn from_iter<I: IntoIterator<Item = usize>>(slots: I) -> Self {
        let mut set = Self::NONE;
        slots.into_iter().for_each(|slot| set.insert(slot));
        set
    }
}

impl fmt::Debug for ChildSet {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_set().entries(self.iter()).finish()
    }
}

impl Serialize for ChildSet {
    fn serialize<S: Serializer>(&self, to: S) -> Result<S::Ok, S::Error> {
        to.serialize_bytes(&self.to_bytes())
    }
}

impl<'de> Deserialize<'de> for ChildSet {
    fn deserialize<D: Deserializer<'de>>(from: D) -> Result<Self, D::Error> {
        struct Bytes;
        impl de::Visitor<'_> for Bytes {
            type Value = ChildSet;

            fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str("a set of slots")
            }

            fn visit_bytes<E: de::Error>(self, bytes: &[u8]) -> Result<ChildSet, E> {
                ChildSet::from_bytes(bytes).ok_or_else(|| E::custom("invalid set of slots"))
            }
        }
        from.deserialize_bytes(Bytes)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    proptest! {
        #[test]
        fn a_set_survives_the_wire_in_at_most_33_bytes(slots in prop::collection::btree_set(0..256usize, 0..256)) {
            let set: ChildSet = slots.iter().copied().collect();
            prop_assert_eq!(set.iter().collect::<Vec<_>>(), slots.into_iter().collect::<Vec<_>>());
            let bytes = postcard::to_stdvec(&set).unwrap();
            prop_assert!(bytes.len() <= 33);
            prop_assert_eq!(postcard::from_bytes::<ChildSet>(&bytes).unwrap(), set);
        }

        #[test]
        fn what_is_accepted_is_what_would_have_been_sent(bytes in prop::collection::vec(any::<u8>(), 0..40)) {
            if let Some(slots) = ChildSet::from_bytes(&bytes) { prop_assert_eq!(slots.to_bytes(), bytes); }
        }
    }
}
