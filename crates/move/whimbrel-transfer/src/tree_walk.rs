//! Tree walk of a pull: descends the trees of a capsule as far as they are known, and determines what to
//! fetch.
//!
//! A subtree that equals one of a complete capsule at the same place is skipped. One that is here is walked
//! without requests, because a store may have a node and not everything below it. Of what is not here, a leaf
//! with an older version is fetched by its differing pages; one without is fetched as a node, its digests are
//! looked up here and in the other page sources of this host, and only pages found nowhere are requested. No
//! network access: the pull plan gets what is wanted.

use crate::{
    ChildSet, LocalObjects, PageLookup, TransferError,
    answer_decoder::{RequestedLeaf, RequestedSlots},
    local_objects,
    protocol::{ObjectKind, WantedObject},
    pull_plan::{FetchItem, PullPlan},
    short_leaf::{Built, ShortLeaf, ShortLeaves},
};
use std::{
    collections::{HashMap, HashSet},
    rc::Rc,
};
use whimbrel_core::{Digest, PAGE_SIZE};
use whimbrel_image::{Manifest, Node, NodeError, ShortDigest, pack_frame::Kind, tree};

/// Older node of the same place.
#[derive(Debug, Clone, Copy)]
pub(crate) struct BaseNode {
    pub(crate) digest: Digest,
    /// Whether everything below it is known to be here.
    pub(crate) complete: bool,
}

/// Level of a node, and the older nodes of its place.
#[derive(Debug, Clone, Default)]
pub(crate) struct NodePosition {
    pub(crate) level: u8,
    pub(crate) bases: Vec<BaseNode>,
}

/// Numbers of pages by their source.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct PageCounts {
    /// Pages that were here already; subtrees that were skipped are not counted.
    pub had: u64,
    /// Pages from another source on this host.
    pub cache: u64,
    /// Pages from a peer, coded against older ones.
    pub delta: u64,
    /// Pages from a peer, without an older version.
    pub plain: u64,
    /// Pages that became zero.
    pub zero: u64,
}

impl PageCounts {
    pub(crate) fn add(&mut self, other: &Self) {
        self.had += other.had;
        self.cache += other.cache;
        self.delta += other.delta;
        self.plain += other.plain;
        self.zero += other.zero;
    }
}

/// Page with this short digest from another source on this host.
fn find_by_short_digest(holders: &[&dyn PageLookup], key: &ShortDigest) -> Option<Vec<u8>> {
    let mut page = vec![0; PAGE_SIZE];
    let mut right = |holder: &&dyn PageLookup| {
        holder.page_by_short_digest(key, &mut page) && key.matches(&Digest::of(&page))
    };
    holders.iter().any(&mut right).then_some(page)
}

/// State of a pull: what it knows of its capsule.
pub(crate) struct TreeWalk<'a> {
    pub(crate) local: &'a dyn LocalObjects,
    page_sources: &'a [&'a dyn PageLookup],
    pub(crate) plan: PullPlan,
    pub(crate) pages: PageCounts,
    seen: HashSet<Digest>,
    /// Nodes that are requested, and their positions.
    awaited: HashMap<Digest, NodePosition>,
    /// Leaves whose pages are requested.
    leaves: HashMap<Digest, Node>,
    /// Nodes of level 1 whose leaves are requested, with their older versions.
    pairs: HashMap<(Digest, Digest), Rc<(Node, Node)>>,
    /// Digests of requested pages.
    wanted: HashSet<Digest>,
    /// Whether new leaves are fetched as short leaves: where bytes cost more than reading what is here.
    pub(crate) short: bool,
    short_leaves: ShortLeaves,
}

impl<'a> TreeWalk<'a> {
    pub(crate) fn new(
        local: &'a dyn LocalObjects,
        page_sources: &'a [&'a dyn PageLookup],
        plan: PullPlan,
    ) -> Self {
        let (seen, awaited, leaves, pairs, wanted) = Default::default();
        let (pages, short, short_leaves) = Default::default();
        Self { local, page_sources, plan, pages, seen, awaited, leaves, pairs, wanted, short, short_leaves }
    }

    /// Starts with the blobs and images of a capsule; `bases` are older capsules and whether they are
    /// complete.
    pub(crate) fn capsule(
        &mut self,
        manifest: &Manifest,
        bases: &[(Manifest, bool)],
    ) -> Result<(), TransferError> {
        let similar = |digest: &Digest| {
            let at = manifest.device.iter().position(|device| device == digest)?;
            bases.iter().find_map(|(base, _)| base.device.get(at).copied()).filter(|old| old != digest)
        };
        for digest in manifest.blobs() {
            if self.seen.insert(digest) && !self.has(&digest) {
                self.want_object(ObjectKind::Blob, digest, similar(&digest));
            }
        }
        for image in &manifest.images {
            let Some(root) = image.root else { continue };
            let bases = bases.iter().filter_map(|(base, whole)| {
                let old = base.image(&image.name).filter(|old| old.pages == image.pages)?;
                Some(BaseNode { digest: old.root?, complete: *whole })
            });
            let place = NodePosition { level: tree::height(image.pages) - 1, bases: bases.collect() };
            self.visit(root, place)?;
        }
        Ok(())
    }

    fn has(&self, digest: &Digest) -> bool {
        self.local.has(&[*digest])[0]
    }

    fn want_object(&mut self, kind: ObjectKind, digest: Digest, similar: Option<Digest>) {
        self.plan.want(FetchItem::Object(kind, WantedObject { digest, similar }));
    }

    fn visit(&mut self, digest: Digest, place: NodePosition) -> Result<(), TransferError> {
        if place.bases.iter().any(|base| base.complete && base.digest == digest) || !self.seen.insert(digest)
        {
            return Ok(());
        }
        if self.has(&digest)
            && let Some(bytes) = self.local.object(&digest)
        {
            return self.node(digest, &bytes, &place);
        }
        match place.bases.first() {
            Some(base) if place.level == 0 && base.digest != digest => {
                self.plan.want(FetchItem::Leaf { leaf: digest, similar: base.digest });
            }
            None if place.level == 0 && self.short => {
                self.want_object(ObjectKind::ShortLeaf, digest, None);
                self.awaited.insert(digest, place);
            }
            base => {
                let similar = base.map(|base| base.digest).filter(|base| *base != digest);
                self.want_object(ObjectKind::Node, digest, similar);
                self.awaited.insert(digest, place);
            }
        }
        Ok(())
    }

    /// Handles a requested node that has arrived.
    pub(crate) fn arrived(&mut self, digest: Digest, bytes: &[u8]) -> Result<(), TransferError> {
        match self.awaited.remove(&digest) {
            Some(place) => self.node(digest, bytes, &place),
            None => Ok(()),
        }
    }

    fn node(&mut self, digest: Digest, bytes: &[u8], place: &NodePosition) -> Result<(), TransferError> {
        let malformed = |source| TransferError::Node { digest, source };
        let node = Node::decode(bytes).map_err(malformed)?;
        if node.level() != place.level {
            return Err(malformed(NodeError::Level { found: node.level(), expected: place.level }));
        }
        if place.level == 0 {
            self.leaf(digest, node, place.bases.first().map(|base| base.digest));
            return Ok(());
        }
        let readable = |base: &BaseNode| {
            let old =
                local_objects::node(self.local, &base.digest).filter(|old| old.level() == place.level)?;
            Some((*base, old))
        };
        let bases: Vec<(BaseNode, Node)> = place.bases.iter().filter_map(readable).collect();
        let mut differing = vec![ChildSet::NONE; bases.len()];
        for (slot, child) in node.children() {
            let below =
                bases.iter().filter_map(|(base, old)| Some(BaseNode { digest: old.child(slot)?, ..*base }));
            let below: Vec<BaseNode> = below.collect();
            let first = bases.iter().position(|(_, old)| old.child(slot).is_some());
            match first {
                Some(first) if place.level == 1 && self.is_new(&child, &below) => {
                    self.seen.insert(child);
                    differing[first].insert(slot);
                }
                _ => self.visit(child, NodePosition { level: place.level - 1, bases: below })?,
            }
        }
        for ((base, old), children) in bases.into_iter().zip(differing) {
            if !children.is_empty() {
                self.pairs.insert((digest, base.digest), Rc::new((node.clone(), old)));
                self.plan.want(FetchItem::Children { node: digest, similar: base.digest, children });
            }
        }
        Ok(())
    }

    /// Whether a leaf is new: not here, not requested and not an older leaf.
    fn is_new(&self, digest: &Digest, bases: &[BaseNode]) -> bool {
        !bases.iter().any(|base| base.digest == *digest) && !self.seen.contains(digest) && !self.has(digest)
    }

    /// Handles a leaf that is known: requests its pages that are nowhere on this host.
    fn leaf(&mut self, digest: Digest, leaf: Node, similar: Option<Digest>) {
        let children: Vec<(usize, Digest)> = leaf.children().collect();
        let here = self.local.has(&children.iter().map(|(_, digest)| *digest).collect::<Vec<_>>());
        let mut slots = ChildSet::NONE;
        let mut found = Vec::new();
        for ((slot, page), here) in children.into_iter().zip(here) {
            if here {
                self.pages.had += 1;
            } else if self.wanted.contains(&page) {
            } else if let Some(bytes) = self.find_page(&page) {
                found.push(bytes);
            } else {
                self.wanted.insert(page);
                slots.insert(slot);
            }
        }
        if !found.is_empty() {
            let found: Vec<&[u8]> = found.iter().map(Vec::as_slice).collect();
            self.pages.cache += found.len() as u64;
            // A failure to store is noticed when the pages that arrive from peers are stored.
            drop(self.local.store(Kind::Pages, &found));
        }
        if !slots.is_empty() {
            self.leaves.insert(digest, leaf);
            self.plan.want(FetchItem::Pages { leaf: digest, similar, slots });
        }
    }

    fn find_page(&self, digest: &Digest) -> Option<Vec<u8>> {
        let mut page = vec![0; PAGE_SIZE];
        let mut right =
            |holder: &&dyn PageLookup| holder.page(digest, &mut page) && Digest::of(&page) == *digest;
        self.page_sources.iter().any(&mut right).then_some(page)
    }

    pub(crate) fn pages_arrived(&mut self, leaf: &Digest, slots: impl Iterator<Item = usize>) {
        let Some(node) = self.leaves.get(leaf) else { return };
        slots.filter_map(|slot| node.child(slot)).for_each(|digest| {
            self.wanted.remove(&digest);
        });
        if !node.children().any(|(_, digest)| self.wanted.contains(&digest)) {
            self.leaves.remove(leaf);
        }
    }

    /// Handles the short digests of a requested leaf; false if they are malformed.
    pub(crate) fn short_leaf_arrived(&mut self, digest: Digest, bytes: &[u8]) -> Result<bool, TransferError> {
        let Some(short) = ShortLeaf::decode(bytes) else { return Ok(false) };
        if self.awaited.remove(&digest).is_none() {
            return Ok(true);
        }
        let (shelf, holders, pages) = (self.local, self.page_sources, &mut self.pages);
        let mut found = Vec::new();
        let (slots, built) = self.short_leaves.start(digest, short, |key| {
            if let Some(here) = shelf.digest_of(key) {
                pages.had += 1;
                return Some(here);
            }
            let page = find_by_short_digest(holders, key)?;
            pages.cache += 1;
            let digest = Digest::of(&page);
            found.push(page);
            Some(digest)
        });
        let found: Vec<&[u8]> = found.iter().map(Vec::as_slice).collect();
        // A failure to store is noticed when the pages that arrive from peers are stored.
        drop(self.local.store(Kind::Pages, &found));
        if !slots.is_empty() {
            self.plan.want(FetchItem::Pages { leaf: digest, similar: None, slots });
        }
        built.map_or(Ok(()), |built| self.built(built)).map(|()| true)
    }

    pub(crate) fn short_leaf_pages_arrived(
        &mut self,
        pages: impl Iterator<Item = Digest>,
    ) -> Result<(), TransferError> {
        for digest in pages {
            self.short_leaves.arrived(digest).into_iter().try_for_each(|built| self.built(built))?;
        }
        Ok(())
    }

    fn built(&mut self, built: Built) -> Result<(), TransferError> {
        match built {
            Built::Right(_, bytes) => {
                self.local.store(Kind::Nodes, &[&bytes]).map_err(|source| TransferError::Store { source })
            }
            Built::Wrong(leaf) => {
                self.want_leaf(leaf, None);
                Ok(())
            }
        }
    }

    /// Requests the leaf, because its differing pages cannot be had alone; its pages follow.
    pub(crate) fn want_leaf(&mut self, leaf: Digest, similar: Option<Digest>) {
        self.want_object(ObjectKind::Node, leaf, similar);
        let bases = similar.map(|digest| BaseNode { digest, complete: false }).into_iter().collect();
        self.awaited.insert(leaf, NodePosition { level: 0, bases });
    }

    /// Requests the given pages of a leaf that the caller examined.
    pub(crate) fn want_pages(&mut self, leaf: Digest, node: Node, similar: Option<Digest>, slots: ChildSet) {
        self.wanted.extend(slots.iter().filter_map(|slot| node.child(slot)));
        self.leaves.insert(leaf, node);
        self.plan.want(FetchItem::Pages { leaf, similar, slots });
    }

    /// Leaves that an item requests; none if its leaf or older version is no longer known.
    pub(crate) fn requested_leaves(&self, item: &FetchItem) -> Option<Vec<(RequestedLeaf, FetchItem)>> {
        match item {
            FetchItem::Children { node, similar, children } => {
                children.iter().map(|slot| self.requested_child((*node, *similar), slot)).collect()
            }
            FetchItem::Leaf { leaf, similar } => {
                let old = local_objects::node(self.local, similar);
                Some(vec![(
                    RequestedLeaf { leaf: *leaf, old, similar: true, slots: RequestedSlots::Differing },
                    item.clone(),
                )])
            }
            FetchItem::Pages { leaf, slots, .. } if let Some(short) = self.short_leaves.get(leaf) => {
                let slots = RequestedSlots::Short(*slots, short.clone());
                Some(vec![(RequestedLeaf { leaf: *leaf, old: None, similar: false, slots }, item.clone())])
            }
            FetchItem::Pages { leaf, similar, slots } => {
                let node = self.leaves.get(leaf)?.clone();
                let old = similar.and_then(|similar| local_objects::node(self.local, &similar));
                let slots = RequestedSlots::Given(*slots, node);
                Some(vec![(
                    RequestedLeaf { leaf: *leaf, old, similar: similar.is_some(), slots },
                    item.clone(),
                )])
            }
            FetchItem::Object(..) | FetchItem::BlobRange { .. } => Some(Vec::new()),
        }
    }

    /// Leaf that a child of a node is, and the item that requests it alone.
    fn requested_child(
        &self,
        (node, similar): (Digest, Digest),
        slot: usize,
    ) -> Option<(RequestedLeaf, FetchItem)> {
        let (new, old) = &**self.pairs.get(&(node, similar))?;
        let leaf = new.child(slot)?;
        let old = local_objects::node(self.local, &old.child(slot)?);
        let asked = RequestedLeaf { leaf, old, similar: true, slots: RequestedSlots::Differing };
        let children = [slot].into_iter().collect();
        Some((asked, FetchItem::Children { node, similar, children }))
    }

    /// Older leaf against which the differing pages of a leaf were requested.
    pub(crate) fn similar_of(&self, item: &FetchItem) -> Option<Digest> {
        match item {
            FetchItem::Children { node, similar, children } => {
                self.pairs.get(&(*node, *similar))?.1.child(children.iter().next()?)
            }
            FetchItem::Leaf { similar, .. } => Some(*similar),
            FetchItem::Pages { similar, .. } => *similar,
            FetchItem::Object(..) | FetchItem::BlobRange { .. } => None,
        }
    }
}
