//! Capsule file: a capsule as one file of a pool, with its pages, nodes and blobs. Pure.
//!
//! Format: `docs/formats/pooled-capsule.md`. Pages are in groups of [`GROUP`] in the order of the image, and
//! groups start at multiples of their size. Chunks of the file are such groups, so that an unchanged group is
//! a chunk that the pool has already, however much moved before it. A group of zeros is omitted. Whatever is
//! read from such a file is compared with the digest that was requested: the index is only a hint, and a
//! wrong one costs a read.

use serde::{Deserialize, Serialize};
use whimbrel_core::{CapsuleId, Digest, PAGE_SIZE};
use whimbrel_image::{FAN_OUT, Node};

/// Pages of a group: few, so that little is sent for a changed page; not fewer, because each chunk costs the
/// manager a row.
pub(super) const GROUP: usize = 8;
/// Bytes of a group, and of a chunk of the file.
pub(super) const CHUNK: usize = GROUP * PAGE_SIZE;
/// Bytes of the trailer, which locates the index.
pub(super) const TRAILER: usize = 64;
const MAGIC: [u8; 8] = *b"WHPOOLC\x01";
/// Longest index that is read: that of some hundred million pages.
const INDEX_MAX: u64 = 64 << 20;
/// Longest node: a head and 256 digests.
const NODE_MAX: u32 = 16 << 10;
/// Longest blob: initial RAM disks are the largest.
const BLOB_MAX: u64 = 1 << 30;

#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub(super) struct FileRange {
    pub(super) digest: Digest,
    pub(super) at: u64,
    pub(super) length: u64,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub(super) struct NodePlace {
    pub(super) digest: Digest,
    pub(super) at: u64,
    pub(super) length: u32,
    /// Start of the groups of its pages, if it is a leaf.
    pub(super) pages: Option<u64>,
}

#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub(super) struct CapsuleFileIndex {
    pub(super) nodes: Vec<NodePlace>,
    /// Device state, boot files and other objects of the manifest; the manifest last.
    pub(super) blobs: Vec<FileRange>,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[error("the file is not a capsule: {reason}")]
pub(crate) struct BadCapsuleFile {
    reason: &'static str,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Trailer {
    pub(super) capsule: CapsuleId,
    pub(super) at: u64,
    pub(super) length: u64,
}

impl Trailer {
    pub(super) fn encode(&self) -> [u8; TRAILER] {
        let mut bytes = [0; TRAILER];
        bytes[..8].copy_from_slice(&MAGIC);
        bytes[8..40].copy_from_slice(&self.capsule.0.0);
        bytes[40..48].copy_from_slice(&self.at.to_le_bytes());
        bytes[48..56].copy_from_slice(&self.length.to_le_bytes());
        bytes
    }

    pub(super) fn decode(bytes: &[u8], size: u64) -> Result<Self, BadCapsuleFile> {
        let bytes: &[u8; TRAILER] =
            bytes.try_into().map_err(|_| BadCapsuleFile { reason: "it is too short" })?;
        if bytes[..8] != MAGIC {
            return Err(BadCapsuleFile { reason: "it has no valid trailer" });
        }
        let number = |at: usize| u64::from_le_bytes(std::array::from_fn(|n| bytes[at + n]));
        let (at, length) = (number(40), number(48));
        let fits = at.checked_add(length).is_some_and(|end| end <= size - TRAILER as u64);
        if !fits || length > INDEX_MAX {
            return Err(BadCapsuleFile { reason: "its index is outside the file" });
        }
        Ok(Self { capsule: CapsuleId(Digest(std::array::from_fn(|n| bytes[8 + n]))), at, length })
    }
}

impl CapsuleFileIndex {
    pub(super) fn encode(&self) -> Result<Vec<u8>, BadCapsuleFile> {
        let bytes = postcard::to_stdvec(self).ok().filter(|bytes| bytes.len() as u64 <= INDEX_MAX);
        bytes.ok_or(BadCapsuleFile { reason: "its index would be too long" })
    }

    pub(super) fn decode(bytes: &[u8], size: u64) -> Result<Self, BadCapsuleFile> {
        let index: Self =
            postcard::from_bytes(bytes).map_err(|_| BadCapsuleFile { reason: "its index cannot be read" })?;
        let within = |at: u64, length: u64| at.checked_add(length).is_some_and(|end| end <= size);
        let nodes = index.nodes.iter().all(|node| {
            let pages = node.pages.is_none_or(|pages| within(pages, 0));
            node.length <= NODE_MAX && within(node.at, node.length.into()) && pages
        });
        let blobs = index.blobs.iter().all(|blob| blob.length <= BLOB_MAX && within(blob.at, blob.length));
        match nodes && blobs {
            true => Ok(index),
            false => Err(BadCapsuleFile { reason: "its index refers to data beyond the end" }),
        }
    }
}

fn has_group(leaf: &Node, group: usize) -> bool {
    let first = group * GROUP;
    leaf.present()[first / 64] >> (first % 64) & ((1 << GROUP) - 1) != 0
}

/// Groups of a leaf that are in the file, in order.
pub(super) fn groups(leaf: &Node) -> impl Iterator<Item = usize> {
    (0..FAN_OUT / GROUP).filter(|group| has_group(leaf, *group))
}

/// Offset of the page of `slot` from the first group of its leaf, if there is one.
pub(super) fn page_at(leaf: &Node, slot: usize) -> Option<u64> {
    leaf.child(slot)?;
    let before = groups(leaf).take_while(|group| *group < slot / GROUP).count();
    Some((before * CHUNK + slot % GROUP * PAGE_SIZE) as u64)
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn digest(n: u8) -> Digest {
        Digest([n; 32])
    }

    #[test]
    fn a_page_lies_behind_the_groups_before_it_and_at_its_place_in_its_own() {
        let mut leaf = Node::empty(0);
        for slot in [1, 9, 10, 255] {
            leaf.set(slot, Some(digest(slot as u8)));
        }
        assert_eq!(groups(&leaf).collect::<Vec<_>>(), [0, 1, 31]);
        let places: Vec<_> = [0, 1, 9, 10, 255].map(|slot| page_at(&leaf, slot)).to_vec();
        let (page, chunk) = (PAGE_SIZE as u64, CHUNK as u64);
        assert_eq!(
            places,
            [None, Some(page), Some(chunk + page), Some(chunk + 2 * page), Some(2 * chunk + 7 * page)]
        );
    }

    #[test]
    fn a_trailer_and_an_index_come_back_and_what_points_outside_is_refused() {
        let trailer = Trailer { capsule: CapsuleId(digest(7)), at: 100, length: 50 };
        assert_eq!(Trailer::decode(&trailer.encode(), 214), Ok(trailer));
        assert!(Trailer::decode(&trailer.encode(), 213).is_err(), "the index would lie in the trailer");
        assert!(Trailer::decode(&[0; TRAILER], 1000).is_err() && Trailer::decode(&[], 0).is_err());
        let far = Trailer { at: u64::MAX, ..trailer };
        assert!(Trailer::decode(&far.encode(), 1000).is_err());
        let node = NodePlace { digest: digest(1), at: 10, length: 66, pages: Some(90) };
        let index = CapsuleFileIndex {
            nodes: vec![node],
            blobs: vec![FileRange { digest: digest(2), at: 0, length: 90 }],
        };
        let bytes = index.encode().unwrap();
        assert_eq!(CapsuleFileIndex::decode(&bytes, 90), Ok(index));
        assert!(CapsuleFileIndex::decode(&bytes, 89).is_err());
    }

    proptest! {
        #[test]
        fn any_bytes_are_an_index_within_the_file_or_refused(bytes in prop::collection::vec(any::<u8>(), 0..400)) {
            if let Ok(index) = CapsuleFileIndex::decode(&bytes, 1000) {
                prop_assert!(index.nodes.iter().all(|node| node.at + u64::from(node.length) <= 1000));
            }
        }
    }
}
