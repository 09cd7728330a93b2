//! Index file: tells in which frame of which pack each object is. Immutable once published.
//!
//! ```text
//! 0   magic "WHINDEX" 1 or 2  packs   x 16: lease u64, seq u32, length of the pack u32
//! 8   packs, u32              frames  x 12: pack u16, kind u8, depth u8, offset u32, length u32
//! 12  frames, u32             keys    x 16: ascending
//! 16  entries, u64            values  x 4:  frame << 8 | slot
//! 24  xxh3 of bytes 0..24 and the pack table, u64
//! 32  xxh3 of frames, keys and values, u64          integers little-endian
//! ```
//!
//! Keys are short digests, in version 2 encrypted ones (`index_cipher`), hence uniform: interpolation ends
//! within a few entries of the target, with about one cache miss for the guess and one for the value. The
//! header is checked when a file is opened; the body, which may be gigabytes, by `verify` and before a merge.
//! Every number from the body is bounded where it is used.

use crate::{file_names::PackId, index_cipher::IndexCipher, vfs::Mapping};
use std::{ops::Range, sync::Arc};
use whimbrel_image::{ShortDigest, pack_frame::Kind};
use xxhash_rust::xxh3::{Xxh3, xxh3_64};

const MAGIC: [u8; 8] = *b"WHINDEX\x01";
/// Keys are encrypted short digests.
const MAGIC_HIDDEN: [u8; 8] = *b"WHINDEX\x02";
const HEAD: usize = 40;
const PACK: usize = 16;
const FRAME: usize = 12;
/// Most frames of an index; frame numbers have 24 bits.
pub(crate) const MAX_FRAMES: usize = 1 << 24;
pub(crate) const MAX_PACKS: usize = 1 << 16;

#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub(crate) struct PackLocation {
    pub(crate) pack: PackId,
    pub(crate) offset: u32,
    pub(crate) len: u32,
    pub(crate) kind: Kind,
    pub(crate) depth: u8,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct ObjectLocation {
    pub(crate) frame: PackLocation,
    pub(crate) slot: u8,
}

/// One frame and the short digests of its objects in slot order: the input of an index.
#[derive(Debug, Clone)]
pub(crate) struct Entry {
    pub(crate) frame: PackLocation,
    pub(crate) keys: Vec<ShortDigest>,
}

pub(crate) struct Index {
    pub(crate) name: String,
    map: Mapping,
    /// Cipher of the keys, if they are hidden.
    cipher: Option<Arc<IndexCipher>>,
    packs: Vec<(PackId, u32)>,
    frames: usize,
    entries: usize,
}

fn long(bytes: &[u8], at: usize) -> u32 {
    u32::from_le_bytes([bytes[at], bytes[at + 1], bytes[at + 2], bytes[at + 3]])
}

fn wide(bytes: &[u8], at: usize) -> u64 {
    u64::from(long(bytes, at)) | u64::from(long(bytes, at + 4)) << 32
}

impl Index {
    /// Opens the mapped file, or returns the check that failed. `cipher` is that of the store.
    pub(crate) fn open(
        name: &str,
        map: Mapping,
        cipher: Option<&Arc<IndexCipher>>,
    ) -> Result<Self, &'static str> {
        let cipher = match (*map).as_ref().first_chunk() {
            Some(&MAGIC_HIDDEN) => Some(cipher.ok_or("its keys are encrypted")?.clone()),
            _ => None,
        };
        Self::parse(name, map, cipher)
    }

    /// Opens the mapped file for its packs and checksums only: keys may be hidden.
    pub(crate) fn open_without_keys(name: &str, map: Mapping) -> Result<Self, &'static str> {
        Self::parse(name, map, None)
    }

    fn parse(name: &str, map: Mapping, cipher: Option<Arc<IndexCipher>>) -> Result<Self, &'static str> {
        let bytes = (*map).as_ref();
        if bytes.len() < HEAD || !matches!(bytes.first_chunk(), Some(&MAGIC | &MAGIC_HIDDEN)) {
            return Err("no header");
        }
        let (packs, frames, entries) = (long(bytes, 8) as usize, long(bytes, 12) as usize, wide(bytes, 16));
        let entries = usize::try_from(entries).map_err(|_| "too many entries")?;
        if packs > MAX_PACKS || frames > MAX_FRAMES || entries > frames.saturating_mul(256) {
            return Err("invalid counts");
        }
        if bytes.len() != HEAD + packs * PACK + frames * FRAME + entries * (ShortDigest::LEN + 4) {
            return Err("wrong length");
        }
        if head_sum(bytes, packs) != wide(bytes, 24) {
            return Err("header checksum");
        }
        let table = bytes[HEAD..HEAD + packs * PACK].chunks_exact(PACK);
        let packs = table.map(|p| (PackId { lease: wide(p, 0), seq: long(p, 8) }, long(p, 12))).collect();
        Ok(Self { name: name.to_owned(), map: map.clone(), cipher, packs, frames, entries })
    }

    fn bytes(&self) -> &[u8] {
        (*self.map).as_ref()
    }

    fn body(&self) -> usize {
        HEAD + self.packs.len() * PACK
    }

    /// Packs of the index, with their lengths in bytes.
    pub(crate) fn packs(&self) -> &[(PackId, u32)] {
        &self.packs
    }

    /// Whether its keys are encrypted.
    pub(crate) fn is_hidden(&self) -> bool {
        self.cipher.is_some()
    }

    pub(crate) fn frame_count(&self) -> usize {
        self.frames
    }

    /// Bytes of the file.
    pub(crate) fn size(&self) -> u64 {
        self.bytes().len() as u64
    }

    /// Whether the checksum of the body matches. Reads all of it.
    pub(crate) fn body_is_intact(&self) -> bool {
        xxh3_64(&self.bytes()[self.body()..]) == wide(self.bytes(), 32)
    }

    fn key(&self, entry: usize) -> ShortDigest {
        let at = self.body() + self.frames * FRAME + entry * ShortDigest::LEN;
        let mut key = [0; ShortDigest::LEN];
        key.copy_from_slice(&self.bytes()[at..at + ShortDigest::LEN]);
        ShortDigest(key)
    }

    fn place(&self, frame: usize) -> Option<PackLocation> {
        let at = self.body() + frame * FRAME;
        let bytes = self.bytes().get(at..at + FRAME).filter(|_| frame < self.frames)?;
        let (pack, _) = self.packs.get(usize::from(u16::from_le_bytes([bytes[0], bytes[1]])))?;
        let kind = Kind::from_number(bytes[2])?;
        Some(PackLocation { pack: *pack, kind, depth: bytes[3], offset: long(bytes, 4), len: long(bytes, 8) })
    }

    fn location(&self, entry: usize) -> Option<ObjectLocation> {
        let at = self.body() + self.frames * FRAME + self.entries * ShortDigest::LEN + entry * 4;
        let value = long(self.bytes(), at);
        Some(ObjectLocation { frame: self.place((value >> 8) as usize)?, slot: value as u8 })
    }

    /// First entry whose key is not below `key`, by interpolation with bisection as a fallback.
    fn lower_bound(&self, key: ShortDigest) -> usize {
        let mut range = 0..self.entries;
        let (mut low, mut high) = (0u64, u64::MAX);
        while range.len() > 8 {
            let share = u128::from(key.prefix().clamp(low, high) - low) * range.len() as u128;
            let guess = (share / (u128::from(high - low) + 1)) as usize;
            // Probes a few entries before and after the guess bracket the key from both sides.
            let margin = 4 + range.len() / 64;
            for probe in [guess.saturating_sub(margin / 2), guess + margin / 2, range.len() / 2] {
                let probe = range.start + probe.min(range.len().saturating_sub(1));
                if !range.contains(&probe) {
                    continue;
                }
                let found = self.key(probe);
                if found < key {
                    (range.start, low) = (probe + 1, found.prefix());
                } else {
                    (range.end, high) = (probe, found.prefix());
                }
                if range.len() <= 8 * margin {
                    break;
                }
            }
        }
        range.clone().find(|entry| self.key(*entry) >= key).unwrap_or(range.end)
    }

    pub(crate) fn find(&self, key: ShortDigest) -> impl Iterator<Item = ObjectLocation> {
        let key = self.cipher.as_ref().map_or(key, |cipher| cipher.hide(key));
        let first = self.lower_bound(key);
        let equal = (first..self.entries).take_while(move |entry| self.key(*entry) == key);
        equal.filter_map(|entry| self.location(entry))
    }

    /// Frames and their keys, as they were passed to [`encode`]; none if the body is damaged.
    pub(crate) fn contents(&self) -> Option<Vec<Entry>> {
        if !self.body_is_intact() {
            return None;
        }
        let frames =
            (0..self.frames).map(|frame| Some(Entry { frame: self.place(frame)?, keys: Vec::new() }));
        let mut frames = frames.collect::<Option<Vec<_>>>()?;
        for entry in 0..self.entries {
            let at = self.body() + self.frames * FRAME + self.entries * ShortDigest::LEN + entry * 4;
            let value = long(self.bytes(), at);
            let (frame, slot) = ((value >> 8) as usize, value as u8 as usize);
            let keys = &mut frames.get_mut(frame)?.keys;
            keys.resize(keys.len().max(slot + 1), ShortDigest([0; ShortDigest::LEN]));
            let key = self.key(entry);
            keys[slot] = self.cipher.as_ref().map_or(key, |cipher| cipher.reveal(key));
        }
        Some(frames)
    }

    pub(crate) fn places(&self) -> impl Iterator<Item = PackLocation> {
        (0..self.frames).filter_map(|frame| self.place(frame))
    }
}

fn head_sum(bytes: &[u8], packs: usize) -> u64 {
    let mut hash = Xxh3::new();
    hash.update(&bytes[..24]);
    hash.update(&bytes[HEAD..HEAD + packs * PACK]);
    hash.digest()
}

/// Encodes an index over `packs` (with their lengths) that have `entries`. The caller obeys the limits.
pub(crate) fn encode(packs: &[(PackId, u32)], entries: &[Entry], cipher: Option<&IndexCipher>) -> Vec<u8> {
    let mut numbers: Vec<_> = packs.iter().enumerate().map(|(i, (id, _))| (*id, i as u16)).collect();
    numbers.sort_unstable();
    let number = |id: &PackId| numbers[numbers.partition_point(|(other, _)| other < id)].1;
    let keyed = |(frame, entry): (usize, &Entry)| {
        let frame = (frame as u32) << 8;
        let hide = |key: &ShortDigest| cipher.map_or(*key, |cipher| cipher.hide(*key));
        let keys = entry.keys.iter().enumerate();
        keys.map(|(slot, key)| (hide(key), frame | slot as u32)).collect::<Vec<_>>()
    };
    let mut keys: Vec<(ShortDigest, u32)> = entries.iter().enumerate().flat_map(keyed).collect();
    keys.sort_unstable();

    let mut bytes = Vec::with_capacity(HEAD + packs.len() * PACK + entries.len() * FRAME + keys.len() * 20);
    bytes.extend(if cipher.is_some() { MAGIC_HIDDEN } else { MAGIC });
    bytes.extend((packs.len() as u32).to_le_bytes());
    bytes.extend((entries.len() as u32).to_le_bytes());
    bytes.extend((keys.len() as u64).to_le_bytes());
    bytes.extend([0; 16]);
    for (id, len) in packs {
        bytes.extend(id.lease.to_le_bytes());
        bytes.extend(id.seq.to_le_bytes());
        bytes.extend(len.to_le_bytes());
    }
    let body: Range<usize> = bytes.len()..usize::MAX;
    for Entry { frame: place, .. } in entries {
        bytes.extend(number(&place.pack).to_le_bytes());
        bytes.extend([place.kind as u8, place.depth]);
        bytes.extend(place.offset.to_le_bytes());
        bytes.extend(place.len.to_le_bytes());
    }
    keys.iter().for_each(|(key, _)| bytes.extend(key.0));
    keys.iter().for_each(|(_, value)| bytes.extend(value.to_le_bytes()));
    let sums = [head_sum(&bytes, packs.len()), xxh3_64(&bytes[body.start..])];
    bytes[24..32].copy_from_slice(&sums[0].to_le_bytes());
    bytes[32..40].copy_from_slice(&sums[1].to_le_bytes());
    bytes
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;
    use whimbrel_core::Digest;

    fn build(count: u32, clustered: bool) -> (Vec<(PackId, u32)>, Vec<Entry>) {
        let packs = [PackId { lease: 9, seq: 1 }, PackId { lease: 2, seq: 0 }];
        let entry = |frame: u32| {
            let pack = packs[frame as usize % 2];
            let keys = (0..5u32).map(|slot| {
                let mut key = ShortDigest::from(&Digest::of(&(frame * 5 + slot).to_le_bytes()));
                if clustered {
                    key.0[..7].fill(0x41);
                }
                key
            });
            Entry {
                frame: PackLocation { pack, offset: frame * 100, len: 99, kind: Kind::Pages, depth: 0 },
                keys: keys.collect(),
            }
        };
        (packs.map(|id| (id, 1000)).to_vec(), (0..count).map(entry).collect())
    }

    fn open(bytes: Vec<u8>) -> Result<Index, &'static str> {
        Index::open("test", Arc::new(bytes), None)
    }

    #[test]
    fn every_key_is_found_and_no_other_even_when_digests_are_not_uniform() {
        for (count, clustered) in [(0, false), (1, false), (3000, false), (3000, true)] {
            let (packs, entries) = build(count, clustered);
            let index = open(encode(&packs, &entries, None)).unwrap();
            for entry in &entries {
                for (slot, key) in entry.keys.iter().enumerate() {
                    let found: Vec<_> = index.find(*key).collect();
                    assert!(found.contains(&ObjectLocation { frame: entry.frame, slot: slot as u8 }));
                }
            }
            for other in 0..2000u32 {
                assert_eq!(
                    index.find(ShortDigest::from(&Digest::of(&(other + 1_000_000).to_le_bytes()))).count(),
                    0
                );
            }
            for edge in [ShortDigest([0; 16]), ShortDigest([255; 16])] {
                assert_eq!(index.find(edge).count(), 0);
            }
            let contents = index.contents().unwrap();
            assert!(contents.iter().zip(&entries).all(|(a, b)| a.frame == b.frame && a.keys == b.keys));
        }
    }

    proptest! {
        #[test]
        fn a_damaged_index_is_refused_or_answers_without_panic(at in any::<prop::sample::Index>(), bit in 0..8u8, cut in any::<bool>()) {
            let (packs, entries) = build(20, false);
            let mut bytes = encode(&packs, &entries, None);
            let at = at.index(bytes.len());
            if cut { bytes.truncate(at) } else { bytes[at] ^= 1 << bit }
            if let Ok(index) = open(bytes) {
                prop_assert!(!index.body_is_intact() && index.contents().is_none());
                for key in entries.iter().flat_map(|e| &e.keys) { index.find(*key).for_each(drop); }
            }
        }
    }
}
