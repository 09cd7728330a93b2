//! Walks, compares and rewrites image trees.
//!
//! A tree over `pages` pages has the least height `h >= 1` with `256^h >= pages`; its root is a node of level
//! `h - 1`, or absent when every page is zero. Nodes come from a [`Nodes`] source and new ones go to a
//! closure, so this module does not know where they are stored. Work is proportional to the nodes that
//! differ, never to the image.

use crate::node::{FAN_OUT, MAX_LEVELS, Node, NodeError};
use std::sync::Arc;
use whimbrel_core::Digest;

/// Source of nodes.
pub trait Nodes {
    /// Error of the source, or of a node with the wrong shape.
    type Error: From<NodeError>;

    /// Node with this digest.
    fn node(&self, digest: &Digest) -> Result<Arc<Node>, Self::Error>;
}

/// New node that an update made.
#[derive(Debug)]
pub struct NewNode {
    /// Digest of the encoding.
    pub digest: Digest,
    /// Encoding of the node.
    pub bytes: Vec<u8>,
    /// Node that it replaces.
    pub replaces: Option<Digest>,
    /// Level of the node.
    pub level: u8,
}

/// Element of a tree, as a walk reports it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Visit {
    /// A node, reported before its children.
    Node {
        /// Digest of the node.
        digest: Digest,
        /// Level of the node; 0 lists pages.
        level: u8,
        /// First page under the node.
        page: u64,
    },
    /// A page that is not zero.
    Page {
        /// Number of the page.
        page: u64,
        /// Digest of the page.
        digest: Digest,
    },
}

/// A page that differs between two images.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Difference {
    /// Number of the page.
    pub page: u64,
    /// Digest in the first image, none for zeros.
    pub old: Option<Digest>,
    /// Digest in the second image, none for zeros.
    pub new: Option<Digest>,
}

/// Height of the tree over `pages` pages.
pub fn height(pages: u64) -> u8 {
    (1..MAX_LEVELS).find(|h| span(*h) >= pages).unwrap_or(MAX_LEVELS)
}

/// Pages under one child of a node of `level`.
pub fn span(level: u8) -> u64 {
    1u64.checked_shl(8 * u32::from(level)).unwrap_or(u64::MAX)
}

fn load<N: Nodes>(nodes: &N, digest: &Digest, level: u8) -> Result<Arc<Node>, N::Error> {
    let node = nodes.node(digest)?;
    match node.level() == level {
        true => Ok(node),
        false => Err(NodeError::Level { found: node.level(), expected: level }.into()),
    }
}

fn check(page: u64, pages: u64) -> Result<(), NodeError> {
    if page < pages { Ok(()) } else { Err(NodeError::PastEnd { page, pages }) }
}

/// Leaf of extent `extent` (256 pages), none if they are all zero.
pub fn leaf<N: Nodes>(
    nodes: &N,
    root: Option<Digest>,
    pages: u64,
    extent: u64,
) -> Result<Option<Arc<Node>>, N::Error> {
    match leaf_digest(nodes, root, pages, extent)? {
        Some(digest) => load(nodes, &digest, 0).map(Some),
        None => Ok(None),
    }
}

/// Digest of the leaf of extent `extent`, without loading the leaf.
pub fn leaf_digest<N: Nodes>(
    nodes: &N,
    root: Option<Digest>,
    pages: u64,
    extent: u64,
) -> Result<Option<Digest>, N::Error> {
    check(extent.saturating_mul(FAN_OUT as u64), pages)?;
    let Some(mut digest) = root else { return Ok(None) };
    for level in (1..height(pages)).rev() {
        let child = (extent / span(level - 1)) as usize % FAN_OUT;
        match load(nodes, &digest, level)?.child(child) {
            Some(below) => digest = below,
            None => return Ok(None),
        }
    }
    Ok(Some(digest))
}

/// Reports every present node and page, in page order. Children are visited only if `visit` returns true.
pub fn walk<N: Nodes>(
    nodes: &N,
    root: Option<Digest>,
    pages: u64,
    visit: &mut impl FnMut(Visit) -> Result<bool, N::Error>,
) -> Result<(), N::Error> {
    match root {
        Some(digest) => walk_node(nodes, digest, height(pages) - 1, 0, pages, visit),
        None => Ok(()),
    }
}

fn walk_node<N: Nodes>(
    nodes: &N,
    digest: Digest,
    level: u8,
    start: u64,
    pages: u64,
    visit: &mut impl FnMut(Visit) -> Result<bool, N::Error>,
) -> Result<(), N::Error> {
    if !visit(Visit::Node { digest, level, page: start })? {
        return Ok(());
    }
    for (child, digest) in load(nodes, &digest, level)?.children() {
        let page = start + child as u64 * span(level);
        check(page, pages)?;
        if level == 0 {
            visit(Visit::Page { page, digest })?;
        } else {
            walk_node(nodes, digest, level - 1, page, pages, visit)?;
        }
    }
    Ok(())
}

/// Reports every page that differs between images `old` and `new` (both of `pages` pages), in page order.
pub fn diff<N: Nodes>(
    nodes: &N,
    old: Option<Digest>,
    new: Option<Digest>,
    pages: u64,
    visit: &mut impl FnMut(Difference) -> Result<(), N::Error>,
) -> Result<(), N::Error> {
    diff_node(nodes, [old, new], height(pages) - 1, 0, pages, visit)
}

fn diff_node<N: Nodes>(
    nodes: &N,
    pair: [Option<Digest>; 2],
    level: u8,
    start: u64,
    pages: u64,
    visit: &mut impl FnMut(Difference) -> Result<(), N::Error>,
) -> Result<(), N::Error> {
    if pair[0] == pair[1] {
        return Ok(());
    }
    let load = |digest: Option<Digest>| match digest {
        Some(digest) => load(nodes, &digest, level),
        None => Ok(Arc::new(Node::empty(level))),
    };
    let (old, new) = (load(pair[0])?, load(pair[1])?);
    for child in 0..FAN_OUT {
        let pair = [old.child(child), new.child(child)];
        if pair[0] == pair[1] {
            continue;
        }
        let page = start + child as u64 * span(level);
        check(page, pages)?;
        if level == 0 {
            visit(Difference { page, old: pair[0], new: pair[1] })?;
        } else {
            diff_node(nodes, pair, level - 1, page, pages, visit)?;
        }
    }
    Ok(())
}

/// Returns the root after `changes` (ordered by page, each page once; none is a zero page). Only the paths to
/// them are rewritten. Every new node goes to `emit`, children before parents.
pub fn update<N: Nodes>(
    nodes: &N,
    root: Option<Digest>,
    pages: u64,
    changes: &[(u64, Option<Digest>)],
    emit: &mut impl FnMut(NewNode) -> Result<(), N::Error>,
) -> Result<Option<Digest>, N::Error> {
    assert!(changes.is_sorted_by(|a, b| a.0 < b.0));
    if let Some((page, _)) = changes.last() {
        check(*page, pages)?;
    }
    update_node(nodes, root, height(pages) - 1, changes, emit)
}

fn update_node<N: Nodes>(
    nodes: &N,
    old: Option<Digest>,
    level: u8,
    changes: &[(u64, Option<Digest>)],
    emit: &mut impl FnMut(NewNode) -> Result<(), N::Error>,
) -> Result<Option<Digest>, N::Error> {
    if changes.is_empty() {
        return Ok(old);
    }
    let mut node = match old {
        Some(digest) => Node::clone(&*load(nodes, &digest, level)?),
        None => Node::empty(level),
    };
    for group in changes.chunk_by(|a, b| a.0 / span(level) == b.0 / span(level)) {
        let child = (group[0].0 / span(level)) as usize % FAN_OUT;
        let digest = match level {
            0 => group[0].1,
            _ => update_node(nodes, node.child(child), level - 1, group, emit)?,
        };
        node.set(child, digest);
    }
    let Some(bytes) = node.encode() else { return Ok(None) };
    let digest = Digest::of(&bytes);
    if old != Some(digest) {
        emit(NewNode { digest, bytes, replaces: old, level })?;
    }
    Ok(Some(digest))
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;
    use std::{
        cell::{Cell, RefCell},
        collections::{BTreeMap, HashMap},
    };

    #[derive(Default)]
    struct Memory {
        nodes: RefCell<HashMap<Digest, Arc<Node>>>,
        loads: Cell<usize>,
    }

    impl Nodes for Memory {
        type Error = NodeError;

        fn node(&self, digest: &Digest) -> Result<Arc<Node>, NodeError> {
            self.loads.set(self.loads.get() + 1);
            Ok(self.nodes.borrow()[digest].clone())
        }
    }

    impl Memory {
        fn update(
            &self,
            root: Option<Digest>,
            pages: u64,
            changes: &BTreeMap<u64, Option<Digest>>,
        ) -> Option<Digest> {
            let changes: Vec<_> = changes.iter().map(|(p, d)| (*p, *d)).collect();
            update(self, root, pages, &changes, &mut |new: NewNode| {
                self.nodes.borrow_mut().insert(new.digest, Arc::new(Node::decode(&new.bytes)?));
                Ok(())
            })
            .unwrap()
        }
    }

    const PAGES: u64 = 256 * 300;

    fn changes() -> impl Strategy<Value = BTreeMap<u64, Option<Digest>>> {
        let digest = prop::option::of((1..9u8).prop_map(|v| Digest([v; 32])));
        prop::collection::btree_map(prop_oneof![0..600u64, PAGES - 300..PAGES, 0..PAGES], digest, 0..80)
    }

    proptest! {
        #[test]
        fn a_tree_behaves_like_a_map_and_its_root_depends_on_content_alone(rounds in prop::collection::vec(changes(), 1..5)) {
            let (memory, mut root, mut model) = (Memory::default(), None, BTreeMap::new());
            for round in &rounds {
                let before = (root, model.clone());
                root = memory.update(root, PAGES, round);
                for (page, digest) in round {
                    match digest { Some(d) => { model.insert(*page, *d); } None => { model.remove(page); } }
                }
                let mut seen = BTreeMap::new();
                walk(&memory, root, PAGES, &mut |visit| { if let Visit::Page { page, digest } = visit { seen.insert(page, digest); } Ok(true) }).unwrap();
                prop_assert_eq!(&seen, &model);
                let mut rebuilt = before.1;
                diff(&memory, before.0, root, PAGES, &mut |d: Difference| {
                    assert_eq!(rebuilt.get(&d.page).copied(), d.old);
                    match d.new { Some(new) => { rebuilt.insert(d.page, new); } None => { rebuilt.remove(&d.page); } }
                    Ok(())
                }).unwrap();
                prop_assert_eq!(&rebuilt, &model);
            }
            let at_once = model.into_iter().map(|(p, d)| (p, Some(d))).collect();
            prop_assert_eq!(memory.update(None, PAGES, &at_once), root);
        }
    }

    #[test]
    fn one_changed_page_costs_one_path() {
        let memory = Memory::default();
        let all = (0..PAGES).map(|p| (p, Some(Digest([1; 32])))).collect();
        let old = memory.update(None, PAGES, &all);
        let new = memory.update(old, PAGES, &BTreeMap::from([(70_000, Some(Digest([2; 32])))]));
        memory.loads.set(0);
        diff(&memory, old, new, PAGES, &mut |d: Difference| {
            assert_eq!(d.page, 70_000);
            Ok(())
        })
        .unwrap();
        assert_eq!(memory.loads.get(), 6, "three levels of two trees");
        assert_eq!(
            leaf(&memory, new, PAGES, 70_000 / 256).unwrap().unwrap().child(70_000 % 256),
            Some(Digest([2; 32]))
        );
    }

    #[test]
    fn heights_grow_at_powers_of_256() {
        assert_eq!([0, 1, 256, 257, 65_536, 65_537].map(height), [1, 1, 1, 2, 2, 3]);
        assert_eq!(height(u64::MAX), 8);
    }

    #[test]
    fn a_node_that_reaches_past_the_image_is_refused() {
        let memory = Memory::default();
        let root = memory.update(None, 200, &BTreeMap::from([(150, Some(Digest([1; 32])))]));
        assert_eq!(
            walk(&memory, root, 100, &mut |_| Ok(true)),
            Err(NodeError::PastEnd { page: 150, pages: 100 })
        );
        assert_eq!(
            walk(&memory, root, 1000, &mut |_| Ok(true)),
            Err(NodeError::Level { found: 0, expected: 1 })
        );
    }
}
