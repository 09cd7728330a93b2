//! Images of a capsule that a machine reads, from the store here or partly from other hosts.

use super::error::RunningError;
use std::collections::HashSet;
use whimbrel_block::OverlayKey;
use whimbrel_core::{CapsuleId, Digest};
use whimbrel_store::{Pin, Store, StoreError, StoredImage};

/// Ancestors that are searched for an older version of an image.
const ANCESTORS: usize = 32;

/// The store, and the capsule of it that a machine reads its images from.
#[derive(Clone)]
pub struct CapsuleImages {
    /// Store of this host.
    pub store: Store,
    /// Capsule that has the images; none if no image belongs to one.
    pub capsule: Option<CapsuleId>,
}

impl CapsuleImages {
    /// The image `name` of the capsule. Objects that a partial capsule lacks are fetched when they are read,
    /// as differences to the newest ancestor that is here.
    pub fn image(&self, name: &str, root: Option<Digest>, pages: u64) -> StoredImage {
        let image = self.store.image(root, pages);
        match self.capsule.filter(|id| is_partial(&self.store, id)) {
            Some(id) => image.with_remote_fetch(self.ancestor_root(&id, name, pages)),
            None => image,
        }
    }

    /// Root of the same image in the nearest ancestor whose root is here.
    fn ancestor_root(&self, capsule: &CapsuleId, name: &str, pages: u64) -> Option<Digest> {
        let mut seen = HashSet::new();
        let mut level = self.store.manifest(capsule).ok()?.parents;
        while !level.is_empty() && seen.len() < ANCESTORS {
            let mut above = Vec::new();
            for id in level.into_iter().filter(|id| seen.insert(*id)) {
                let Ok(manifest) = self.store.manifest(&id) else { continue };
                let same = manifest.image(name).filter(|image| image.pages == pages);
                if let Some(root) = same.and_then(|image| image.root)
                    && self.store.has(&[root]) == [true]
                {
                    return Some(root);
                }
                above.extend(manifest.parents);
            }
            level = above;
        }
        None
    }

    /// Pins the capsule, if there is one.
    pub(super) fn pin(&self) -> Result<Option<Pin>, RunningError> {
        let pin = self.capsule.map(|capsule| self.store.pin(&capsule)).transpose();
        pin.map_err(store_error("pin the capsule that the machine reads from"))
    }

    /// Key of the overlays of this host, if its store is encrypted.
    pub(super) fn overlay_key(&self) -> Option<OverlayKey> {
        overlay_key(&self.store)
    }
}

/// Key of the overlays beside a store, if it is encrypted.
pub(super) fn overlay_key(store: &Store) -> Option<OverlayKey> {
    store.derived_key("whimbrel store 2026-11-25 overlays").map(OverlayKey)
}

/// Failure of the store to do `action`.
pub(super) fn store_error(action: &'static str) -> impl Fn(StoreError) -> RunningError {
    move |source| RunningError::Store { action, source }
}

/// Whether objects of a capsule are missing here. In doubt it is assumed: asking other hosts costs little, a
/// missing page costs the machine.
pub fn is_partial(store: &Store, capsule: &CapsuleId) -> bool {
    store.is_partial(capsule).unwrap_or_else(|error| {
        tracing::warn!(%capsule, error = &error as &dyn std::error::Error, "cannot tell whether it is complete");
        true
    })
}
