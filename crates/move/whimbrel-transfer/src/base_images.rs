//! Base images: images that the requester has completely, and the numbers by which replies name their pages.
//! A frame is coded against such pages besides the older pages in place.
//!
//! The images count as one long image, in the order of the request. Pages are named by ascending numbers,
//! each as a LEB128 number with the distance to the one before. A list from a peer is bounded before it is
//! used, and each page that it names must exist; nothing else depends on it.

use crate::local_objects::{self, LocalObjects};
use serde::{Deserialize, Serialize};
use std::collections::HashMap;
use whimbrel_core::{Digest, PAGE_SIZE, varint};
use whimbrel_image::{Node, tree};

/// Most images in one request.
pub const BASES_MAX: usize = 4;
/// Most base pages that one frame is coded against.
pub(crate) const FRAME_BASES_MAX: usize = 4096;

/// Image that the requester has completely.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub struct BaseImage {
    /// Root of its tree.
    pub root: Digest,
    /// Length of the image in pages.
    pub pages: u64,
}

/// Encodes ascending `numbers`.
pub(crate) fn encode(numbers: &[u64]) -> Vec<u8> {
    let (mut bytes, mut next) = (Vec::new(), 0);
    for number in numbers {
        varint::put(&mut bytes, number - next);
        next = number + 1;
    }
    bytes
}

/// Decodes numbers; none if they are malformed or too many.
pub(crate) fn decode(mut bytes: &[u8]) -> Option<Vec<u64>> {
    let (mut numbers, mut next) = (Vec::new(), 0u64);
    while !bytes.is_empty() {
        if numbers.len() >= FRAME_BASES_MAX {
            return None;
        }
        let number = next.checked_add(varint::take(&mut bytes).ok()?)?;
        numbers.push(number);
        next = number.checked_add(1)?;
    }
    Some(numbers)
}

/// Digests of the pages of base images; nodes are read once.
pub(crate) struct BasePages<'a> {
    local: &'a dyn LocalObjects,
    images: &'a [BaseImage],
    leaves: HashMap<(usize, u64), Option<Node>>,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum BaseLookup {
    Page(Digest),
    /// No image has such a page, or it is zero.
    Nothing,
    /// The tree of the image cannot be read here.
    Unknown,
}

impl<'a> BasePages<'a> {
    pub(crate) fn new(local: &'a dyn LocalObjects, images: &'a [BaseImage]) -> Self {
        Self { local, images, leaves: HashMap::new() }
    }

    /// Digest of page `number` of all images.
    pub(crate) fn digest(&mut self, number: u64) -> BaseLookup {
        let mut page = number;
        for (image, base) in self.images.iter().enumerate() {
            if page < base.pages {
                return self.digest_in(image, page);
            }
            page -= base.pages;
        }
        BaseLookup::Nothing
    }

    fn digest_in(&mut self, image: usize, page: u64) -> BaseLookup {
        let (shelf, base) = (self.local, self.images[image]);
        let leaf = self.leaves.entry((image, page >> 8)).or_insert_with(|| leaf(shelf, &base, page));
        match leaf {
            None => BaseLookup::Unknown,
            Some(leaf) => leaf.child(page as usize % 256).map_or(BaseLookup::Nothing, BaseLookup::Page),
        }
    }

    pub(crate) fn read(&self, digest: &Digest) -> Option<Vec<u8>> {
        self.local.object(digest).filter(|page| page.len() == PAGE_SIZE)
    }
}

fn leaf(shelf: &dyn LocalObjects, base: &BaseImage, page: u64) -> Option<Node> {
    let mut level = tree::height(base.pages) - 1;
    let mut node = local_objects::node(shelf, &base.root).filter(|node| node.level() == level)?;
    while level > 0 {
        let child = (page / tree::span(level)) as usize % 256;
        let Some(below) = node.child(child) else { return Some(Node::empty(0)) };
        level -= 1;
        node = local_objects::node(shelf, &below).filter(|node| node.level() == level)?;
    }
    Some(node)
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    proptest! {
        #[test]
        fn numbers_come_back(numbers in prop::collection::btree_set(0..1u64 << 34, 0..200)) {
            let numbers: Vec<u64> = numbers.into_iter().collect();
            prop_assert_eq!(decode(&encode(&numbers)), Some(numbers));
        }

        #[test]
        fn garbage_gives_ascending_numbers_or_none(bytes in prop::collection::vec(any::<u8>(), 0..200)) {
            if let Some(numbers) = decode(&bytes) { prop_assert!(numbers.is_sorted_by(|a, b| a < b)); }
        }
    }

    #[test]
    fn more_pages_than_a_frame_may_rest_on_are_refused() {
        assert!(decode(&[0; FRAME_BASES_MAX]).is_some());
        assert!(decode(&[0; FRAME_BASES_MAX + 1]).is_none());
    }
}
