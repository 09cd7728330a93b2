//! Short leaves: leaves that are new to the requester, sent as the short digests of their pages.
//!
//! A digest takes 32 bytes and does not compress. Its first 16 suffice to look a page up in the store or the
//! hash cache, which keep no more; the digest of a page that arrives is computed here anyway. So a leaf is
//! sent as its short digests, and built from the pages that were found or received. Nothing depends on it
//! before its own digest is the requested one; if it never is (two pages with one short digest), the full
//! leaf is fetched.

use crate::ChildSet;
use std::collections::HashMap;
use whimbrel_core::Digest;
use whimbrel_image::{Node, ShortDigest};

/// Short digests of received pages, remembered for other leaves with the same page until a pack has it. A few
/// megabytes.
const REMEMBERED_MAX: usize = 1 << 16;

#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct ShortLeaf {
    slots: ChildSet,
    keys: Vec<ShortDigest>,
}

impl ShortLeaf {
    pub(crate) fn of(leaf: &Node) -> Self {
        let (slots, keys) = leaf
            .children()
            .map(|(slot, digest)| (slot, ShortDigest::from(&digest)))
            .unzip::<_, _, Vec<_>, _>();
        Self { slots: slots.into_iter().collect(), keys }
    }

    /// Encodes the bitmap of the slots, then a short digest for each.
    pub(crate) fn encode(&self) -> Vec<u8> {
        let mut bitmap = [0u8; 32];
        self.slots.iter().for_each(|slot| bitmap[slot / 8] |= 1 << (slot % 8));
        bitmap.into_iter().chain(self.keys.iter().flat_map(|key| key.0)).collect()
    }

    pub(crate) fn decode(bytes: &[u8]) -> Option<Self> {
        let (bitmap, keys) = bytes.split_first_chunk::<32>()?;
        let slots: ChildSet = (0..256).filter(|slot| bitmap[slot / 8] >> (slot % 8) & 1 == 1).collect();
        let (keys, rest) = keys.as_chunks::<{ ShortDigest::LEN }>();
        let fits = rest.is_empty() && keys.len() == slots.len() && !keys.is_empty();
        fits.then(|| Self { slots, keys: keys.iter().map(|key| ShortDigest(*key)).collect() })
    }

    pub(crate) fn iter(&self) -> impl Iterator<Item = (usize, ShortDigest)> {
        self.slots.iter().zip(self.keys.iter().copied())
    }

    pub(crate) fn key(&self, slot: usize) -> Option<ShortDigest> {
        self.iter().find(|(at, _)| *at == slot).map(|(_, key)| key)
    }
}

#[derive(Debug)]
struct UnfinishedLeaf {
    short: ShortLeaf,
    node: Node,
    missing: usize,
}

/// Result of a leaf whose digests are all known.
#[derive(Debug, PartialEq, Eq)]
pub(crate) enum Built {
    /// The leaf has the requested digest: its bytes.
    Right(Digest, Vec<u8>),
    /// The leaf has another digest, so some page has the short digest and not the digest.
    Wrong(Digest),
}

#[derive(Debug, Default)]
pub(crate) struct ShortLeaves {
    leaves: HashMap<Digest, UnfinishedLeaf>,
    waiting: HashMap<ShortDigest, Vec<(Digest, usize)>>,
    received: HashMap<ShortDigest, Digest>,
}

impl ShortLeaves {
    /// Starts to build a leaf; `find` looks for a page on this host. Returns the slots to request, and the
    /// leaf if there are none.
    pub(crate) fn start(
        &mut self,
        leaf: Digest,
        short: ShortLeaf,
        mut find: impl FnMut(&ShortDigest) -> Option<Digest>,
    ) -> (ChildSet, Option<Built>) {
        if self.leaves.contains_key(&leaf) {
            return (ChildSet::NONE, None);
        }
        let mut building = UnfinishedLeaf { node: Node::empty(0), missing: 0, short };
        let mut slots = ChildSet::NONE;
        for (slot, key) in building.short.iter().collect::<Vec<_>>() {
            if let Some(digest) = self.received.get(&key).copied().or_else(|| find(&key)) {
                building.node.set(slot, Some(digest));
                continue;
            }
            building.missing += 1;
            let waiting = self.waiting.entry(key).or_default();
            if waiting.is_empty() {
                slots.insert(slot);
            }
            waiting.push((leaf, slot));
        }
        self.leaves.insert(leaf, building);
        (slots, self.finish(leaf))
    }

    pub(crate) fn get(&self, leaf: &Digest) -> Option<&ShortLeaf> {
        self.leaves.get(leaf).map(|building| &building.short)
    }

    /// Records a received page; returns the leaves that it completes.
    pub(crate) fn arrived(&mut self, digest: Digest) -> Vec<Built> {
        let key = ShortDigest::from(&digest);
        if self.received.len() >= REMEMBERED_MAX {
            self.received.clear();
        }
        self.received.insert(key, digest);
        let mut built = Vec::new();
        for (leaf, slot) in self.waiting.remove(&key).unwrap_or_default() {
            let Some(building) = self.leaves.get_mut(&leaf) else { continue };
            building.node.set(slot, Some(digest));
            building.missing -= 1;
            built.extend(self.finish(leaf));
        }
        built
    }

    fn finish(&mut self, leaf: Digest) -> Option<Built> {
        if self.leaves.get(&leaf).is_none_or(|building| building.missing > 0) {
            return None;
        }
        let bytes = self.leaves.remove(&leaf)?.node.encode();
        match bytes.filter(|bytes| Digest::of(bytes) == leaf) {
            Some(bytes) => Some(Built::Right(leaf, bytes)),
            None => Some(Built::Wrong(leaf)),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn leaf(pages: &[(usize, u64)]) -> (Digest, Node) {
        let mut node = Node::empty(0);
        pages.iter().for_each(|(slot, page)| node.set(*slot, Some(digest(*page))));
        (Digest::of(&node.encode().unwrap()), node)
    }

    fn digest(page: u64) -> Digest {
        Digest::of(&page.to_le_bytes())
    }

    proptest! {
        #[test]
        fn keys_come_back_and_garbage_does_not_pass(
            pages in prop::collection::btree_map(0..256usize, any::<u64>(), 1..256), cut in 1..40usize,
            garbage in prop::collection::vec(any::<u8>(), 0..600),
        ) {
            let (_, node) = leaf(&pages.into_iter().collect::<Vec<_>>());
            let short = ShortLeaf::of(&node);
            let bytes = short.encode();
            prop_assert_eq!(ShortLeaf::decode(&bytes), Some(short));
            prop_assert_eq!(ShortLeaf::decode(&bytes[..bytes.len() - cut.min(bytes.len())]), None);
            if let Some(short) = ShortLeaf::decode(&garbage) { prop_assert_eq!(short.encode(), garbage); }
        }

        #[test]
        fn leaves_are_built_whatever_comes_first_and_no_page_is_asked_for_twice(
            first in prop::collection::btree_map(0..256usize, 0..40u64, 1..60),
            second in prop::collection::btree_map(0..256usize, 0..40u64, 1..60),
            here in prop::collection::hash_set(0..40u64, 0..20), turn in any::<bool>(),
        ) {
            let leaves = [first, second].map(|pages| leaf(&pages.into_iter().collect::<Vec<_>>()));
            let mut building = ShortLeaves::default();
            let (mut asked, mut built) = (Vec::new(), Vec::new());
            let found: HashMap<ShortDigest, Digest> = here.iter().map(|page| (ShortDigest::from(&digest(*page)), digest(*page))).collect();
            for (digest, node) in &leaves {
                let (slots, done) = building.start(*digest, ShortLeaf::of(node), |key| found.get(key).copied());
                asked.extend(slots.iter().map(|slot| node.child(slot).unwrap()));
                built.extend(done);
            }
            let distinct: std::collections::HashSet<_> = asked.iter().collect();
            // Two equal leaves count as one; only then may its pages be requested again.
            prop_assert!(distinct.len() == asked.len() || leaves[0].0 == leaves[1].0);
            if turn { asked.reverse() }
            asked.iter().for_each(|page| built.extend(building.arrived(*page)));
            for (digest, node) in &leaves {
                prop_assert!(built.contains(&Built::Right(*digest, node.encode().unwrap())));
            }
        }
    }

    #[test]
    fn a_page_with_the_key_and_not_the_digest_is_noticed() {
        let (asked, node) = leaf(&[(3, 1), (9, 2)]);
        let mut building = ShortLeaves::default();
        let other = |key: &ShortDigest| {
            let mut other = digest(1);
            other.0[31] ^= 1;
            (ShortDigest::from(&digest(1)) == *key).then_some(other)
        };
        let (slots, built) = building.start(asked, ShortLeaf::of(&node), other);
        assert_eq!((slots.iter().collect::<Vec<_>>(), built), (vec![9], None));
        assert_eq!(building.arrived(digest(2)), [Built::Wrong(asked)]);
        assert!(building.get(&asked).is_none());
    }
}
