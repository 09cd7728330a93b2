//! What a capsule consists of, and whether all of it is here (by the index; contents are `verify`'s business).

use crate::{
    error::{Result, StoreError},
    store::Store,
};
use std::collections::HashSet;
use whimbrel_core::{CapsuleId, Digest};
use whimbrel_image::tree::{Visit, walk};

/// Whether everything that capsule `id` names is in the store.
pub(crate) fn check_capsule(store: &Store, id: &CapsuleId) -> Result<()> {
    let not_whole = |source| StoreError::NotWhole { source: Box::new(source) };
    let manifest = store.manifest(id)?;
    manifest.blobs().try_for_each(|blob| check_object(store, &blob)).map_err(not_whole)?;
    let mut seen = HashSet::new();
    for image in &manifest.images {
        check_image(store, image.root, image.pages, &mut seen).map_err(not_whole)?;
    }
    Ok(())
}

pub(crate) fn check_object(store: &Store, digest: &Digest) -> Result<()> {
    match store.inner.objects.has(digest) {
        true => Ok(()),
        false => Err(StoreError::Missing { digest: *digest }),
    }
}

/// Whether every node and page of an image is in the store; nodes in `seen` are taken as checked.
pub(crate) fn check_image(
    store: &Store,
    root: Option<Digest>,
    pages: u64,
    seen: &mut HashSet<Digest>,
) -> Result<()> {
    walk(&store.inner.objects, root, pages, &mut |visit| match visit {
        // Asked of the index, not of the cache of nodes, which may remember what is gone.
        Visit::Node { digest, .. } => check_object(store, &digest).map(|()| seen.insert(digest)),
        Visit::Page { digest, .. } => check_object(store, &digest).map(|()| true),
    })
}
