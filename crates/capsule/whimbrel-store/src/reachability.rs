//! Reachability: the objects of a capsule, and whether all of them are here (by the index; `verify` checks
//! contents).

use crate::{
    error::{Result, StoreError},
    store::Store,
};
use std::collections::HashSet;
use whimbrel_core::{CapsuleId, Digest};
use whimbrel_image::{
    Manifest, Node, NodeError,
    tree::{Nodes, Visit, height, span, walk},
};

/// Most complete capsules that a new one is compared with.
const MAX_COMPARED: usize = 4;

/// Checks that every object of capsule `id` is in the store.
pub(crate) fn check_capsule(store: &Store, id: &CapsuleId) -> Result<()> {
    let not_whole = |source| StoreError::Incomplete { source: Box::new(source) };
    check_object(store, &id.0)?;
    let manifest = store.manifest(id)?;
    manifest.blobs().try_for_each(|blob| check_object(store, &blob)).map_err(not_whole)?;
    let mut seen = HashSet::new();
    for image in &manifest.images {
        check_image(store, image.root, image.pages, &mut seen).map_err(not_whole)?;
    }
    Ok(())
}

/// Checks a capsule that has just arrived, but only what no complete capsule with a ref has at the same
/// position: the cost is that of the changes, not of the capsule. The caller has the gate, so those capsules
/// stay.
pub(crate) fn check_arrived(store: &Store, id: &CapsuleId) -> Result<()> {
    let not_whole = |source| StoreError::Incomplete { source: Box::new(source) };
    let manifest = store.manifest(id)?;
    manifest.blobs().try_for_each(|blob| check_object(store, &blob)).map_err(not_whole)?;
    let wholes = complete_relatives(store, id, &manifest)?;
    for image in &manifest.images {
        let Some(root) = image.root else { continue };
        let same = wholes.iter().filter_map(|whole| whole.image(&image.name));
        let roots = same.filter(|old| old.pages == image.pages).filter_map(|old| old.root);
        let beside: Vec<Digest> = roots.collect();
        let place = NodePosition { level: height(image.pages) - 1, start: 0, pages: image.pages };
        check_against(store, &root, place, &beside).map_err(not_whole)?;
    }
    Ok(())
}

/// Complete capsules that refs name, the parents of `manifest` first.
fn complete_relatives(store: &Store, id: &CapsuleId, manifest: &Manifest) -> Result<Vec<Manifest>> {
    let named: HashSet<CapsuleId> =
        store.readable_refs()?.0.into_values().filter(|named| named != id).collect();
    let mut named: Vec<CapsuleId> = named.into_iter().collect();
    named.sort_by_key(|named| (!manifest.parents.contains(named), *named));
    let mut wholes = Vec::new();
    for named in named {
        if wholes.len() < MAX_COMPARED && !store.is_partial(&named)? {
            wholes.extend(store.manifest(&named));
        }
    }
    Ok(wholes)
}

#[derive(Clone, Copy)]
struct NodePosition {
    level: u8,
    /// First page under the node.
    start: u64,
    pages: u64,
}

fn check_against(store: &Store, digest: &Digest, place: NodePosition, beside: &[Digest]) -> Result<()> {
    let NodePosition { level, start, pages } = place;
    if beside.contains(digest) {
        return Ok(());
    }
    let node = |digest: &Digest| store.inner.objects.node(digest);
    check_object(store, digest)?;
    let new = node(digest)?;
    if new.level() != level {
        return Err(NodeError::Level { found: new.level(), expected: level }.into());
    }
    let old = beside.iter().filter_map(|old| node(old).ok()).filter(|old| old.level() == level);
    let old: Vec<std::sync::Arc<Node>> = old.collect();
    for (slot, child) in new.children() {
        let below: Vec<Digest> = old.iter().filter_map(|old| old.child(slot)).collect();
        let page = start.saturating_add((slot as u64).saturating_mul(span(level)));
        if page >= pages {
            return Err(NodeError::PastEnd { page, pages }.into());
        }
        match level {
            _ if below.contains(&child) => {}
            0 => check_object(store, &child)?,
            _ => check_against(store, &child, NodePosition { level: level - 1, start: page, pages }, &below)?,
        }
    }
    Ok(())
}

pub(crate) fn check_object(store: &Store, digest: &Digest) -> Result<()> {
    store.inner.objects.require(digest)
}

/// Checks that every node and page of an image is in the store; nodes in `seen` count as checked.
pub(crate) fn check_image(
    store: &Store,
    root: Option<Digest>,
    pages: u64,
    seen: &mut HashSet<Digest>,
) -> Result<()> {
    walk(&store.inner.objects, root, pages, &mut |visit| match visit {
        // Uses the index, not the cache of nodes, which may have removed ones.
        Visit::Node { digest, .. } => check_object(store, &digest).map(|()| seen.insert(digest)),
        Visit::Page { digest, .. } => check_object(store, &digest).map(|()| true),
    })
}
