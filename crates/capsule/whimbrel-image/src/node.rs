//! Node of an image tree: a presence map for 256 children, and the digests of those present.
//!
//! Layout: version (1), level (0 lists pages), presence map (32 bytes, child `i` is bit `i % 8` of byte `i /
//! 8`), then the digest of every present child in order. Canonical: the map gives the length, and an empty
//! node has no encoding (its parent omits it), so one content has one digest.

use whimbrel_core::Digest;

/// Children of a node.
pub const FAN_OUT: usize = 256;
/// Size limit of an encoded node in bytes.
pub const MAX_NODE: usize = HEAD + FAN_OUT * 32;
const HEAD: usize = 34;
const VERSION: u8 = 1;
/// Levels that 64-bit page numbers can need.
pub(crate) const MAX_LEVELS: u8 = 8;

/// A node of an image tree.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Node {
    level: u8,
    present: [u64; 4],
    digests: Vec<Digest>,
}

/// Errors of decoding a node or of a node at the wrong place.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum NodeError {
    /// The length contradicts the presence map.
    #[error("a tree node of {found} bytes should have {expected}")]
    Length {
        /// Length found, in bytes.
        found: usize,
        /// Bytes that the header calls for.
        expected: usize,
    },
    /// A later version wrote the node.
    #[error("tree node version {found} is unknown")]
    Version {
        /// The version byte.
        found: u8,
    },
    /// The node has no children, so its parent should omit it.
    #[error("a tree node without children")]
    Empty,
    /// The node has another level than its place in the tree.
    #[error("a tree node of level {found} where level {expected} belongs")]
    Level {
        /// Level that was found.
        found: u8,
        /// Level of the place.
        expected: u8,
    },
    /// A child is past the end of the image.
    #[error("page {page} is past the end of an image of {pages} pages")]
    PastEnd {
        /// First page of the child.
        page: u64,
        /// Pages of the image.
        pages: u64,
    },
}

impl Node {
    /// Node without children, which has no encoding.
    pub fn empty(level: u8) -> Self {
        Self { level, present: [0; 4], digests: Vec::new() }
    }

    /// Level of the node: 0 lists pages, 1 lists leaves, and so on.
    pub fn level(&self) -> u8 {
        self.level
    }

    /// Presence map: child `i` is bit `i % 64` of word `i / 64`.
    pub fn present(&self) -> &[u64; 4] {
        &self.present
    }

    /// Whether there is no child.
    pub fn is_empty(&self) -> bool {
        self.digests.is_empty()
    }

    fn rank(&self, child: usize) -> usize {
        let (word, bit) = (child / 64, child % 64);
        let before: u32 = self.present[..word].iter().map(|w| w.count_ones()).sum();
        (before + (self.present[word] & ((1 << bit) - 1)).count_ones()) as usize
    }

    /// Digest of `child`, none for zeros.
    pub fn child(&self, child: usize) -> Option<Digest> {
        let there = self.present[child / 64] >> (child % 64) & 1 == 1;
        there.then(|| self.digests[self.rank(child)])
    }

    /// Sets or clears `child`.
    pub fn set(&mut self, child: usize, digest: Option<Digest>) {
        let (word, bit) = (child / 64, 1u64 << (child % 64));
        let (rank, there) = (self.rank(child), self.present[word] & bit != 0);
        match (there, digest) {
            (true, Some(digest)) => self.digests[rank] = digest,
            (false, Some(digest)) => {
                self.digests.insert(rank, digest);
                self.present[word] |= bit;
            }
            (true, None) => {
                self.digests.remove(rank);
                self.present[word] &= !bit;
            }
            (false, None) => {}
        }
    }

    /// Present children, in order.
    pub fn children(&self) -> impl Iterator<Item = (usize, Digest)> {
        let slots = (0..FAN_OUT).filter(|child| self.present[child / 64] >> (child % 64) & 1 == 1);
        slots.zip(self.digests.iter().copied())
    }

    /// Encoding of the node, none if it is empty.
    pub fn encode(&self) -> Option<Vec<u8>> {
        if self.is_empty() {
            return None;
        }
        let mut bytes = Vec::with_capacity(HEAD + self.digests.len() * 32);
        bytes.extend([VERSION, self.level]);
        self.present.iter().for_each(|word| bytes.extend(word.to_le_bytes()));
        self.digests.iter().for_each(|digest| bytes.extend(digest.0));
        Some(bytes)
    }

    /// Decodes a node and checks it.
    pub fn decode(bytes: &[u8]) -> Result<Self, NodeError> {
        let (head, digests) =
            bytes.split_at_checked(HEAD).ok_or(NodeError::Length { found: bytes.len(), expected: HEAD })?;
        if head[0] != VERSION {
            return Err(NodeError::Version { found: head[0] });
        }
        if head[1] >= MAX_LEVELS {
            return Err(NodeError::Level { found: head[1], expected: MAX_LEVELS - 1 });
        }
        let mut present = [0; 4];
        for (word, bytes) in present.iter_mut().zip(head[2..].as_chunks::<8>().0) {
            *word = u64::from_le_bytes(*bytes);
        }
        let count = present.iter().map(|word| word.count_ones() as usize).sum::<usize>();
        if count == 0 {
            return Err(NodeError::Empty);
        }
        if digests.len() != count * 32 {
            return Err(NodeError::Length { found: bytes.len(), expected: HEAD + count * 32 });
        }
        let digests = digests.as_chunks::<32>().0.iter().map(|bytes| Digest(*bytes)).collect();
        Ok(Self { level: head[1], present, digests })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;
    use std::collections::BTreeMap;

    #[test]
    fn the_bytes_of_a_node_are_pinned() {
        let mut node = Node::empty(0);
        node.set(9, Some(Digest([0xbb; 32])));
        node.set(0, Some(Digest([0xaa; 32])));
        let mut golden = vec![1, 0, 1, 2];
        golden.extend([0; 30]);
        golden.extend([0xaa; 32]);
        golden.extend([0xbb; 32]);
        assert_eq!(node.encode().unwrap(), golden);
    }

    proptest! {
        #[test]
        fn a_node_behaves_like_a_map_and_round_trips(ops in prop::collection::vec((0..256usize, any::<Option<u8>>()), 1..200)) {
            let (mut node, mut model) = (Node::empty(3), BTreeMap::new());
            for (child, value) in ops {
                let digest = value.map(|v| Digest([v; 32]));
                node.set(child, digest);
                match digest { Some(d) => { model.insert(child, d); } None => { model.remove(&child); } }
            }
            prop_assert_eq!(node.children().collect::<Vec<_>>(), model.into_iter().collect::<Vec<_>>());
            match node.encode() {
                Some(bytes) => prop_assert_eq!(Node::decode(&bytes), Ok(node)),
                None => prop_assert!(node.is_empty()),
            }
        }

        #[test]
        fn any_bytes_decode_to_a_refusal_or_to_themselves(mut bytes in prop::collection::vec(any::<u8>(), 0..200), fix in any::<bool>()) {
            if fix && bytes.len() > 34 { bytes[0] = 1; bytes[1] %= 8; bytes[6..34].fill(0); }
            if let Ok(node) = Node::decode(&bytes) { prop_assert_eq!(node.encode().unwrap(), bytes); }
        }
    }
}
