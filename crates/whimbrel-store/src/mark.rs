//! Which frames are needed: the closure of some roots over trees and delta bases.

use crate::{
    error::{Result, StoreError},
    index::Place,
    layout::PackId,
    lease::Pinned,
    store::Store,
};
use std::collections::HashSet;
use whimbrel_core::CapsuleId;
use whimbrel_image::{
    Key,
    frame::Frame,
    tree::{Visit, walk},
};

/// Frames found to be needed so far. Marking more roots later costs only what they do not share.
pub(crate) struct Mark<'a> {
    store: &'a Store,
    /// Packs to look past where another one holds the object as well.
    pub(crate) avoid: HashSet<PackId>,
    nodes: HashSet<whimbrel_core::Digest>,
    pub(crate) live: HashSet<Place>,
    pub(crate) capsules: HashSet<CapsuleId>,
}

impl<'a> Mark<'a> {
    pub(crate) fn new(store: &'a Store, avoid: HashSet<PackId>) -> Self {
        Self { store, avoid, nodes: HashSet::new(), live: HashSet::new(), capsules: HashSet::new() }
    }

    /// Marks all a capsule needs.
    pub(crate) fn capsule(&mut self, id: &CapsuleId) -> Result<()> {
        if !self.capsules.insert(*id) {
            return Ok(());
        }
        let manifest = self.store.manifest(id)?;
        self.object(Key::from(&id.0), u8::MAX)?;
        manifest.blobs().try_for_each(|blob| self.object(Key::from(&blob), u8::MAX))?;
        manifest.images.iter().try_for_each(|image| match image.root {
            Some(root) => self.pinned(&Pinned::Image { root, pages: image.pages }),
            None => Ok(()),
        })
    }

    /// Marks all that a pin holds.
    pub(crate) fn pinned(&mut self, pinned: &Pinned) -> Result<()> {
        let (root, pages) = match pinned {
            Pinned::Object(digest) => return self.object(Key::from(digest), u8::MAX),
            Pinned::Image { root, pages } => (*root, *pages),
        };
        let store = self.store;
        // A node that cannot be read stops everything: what lies below it is unknown and must not be removed.
        walk(&store.inner.objects, Some(root), pages, &mut |visit| match visit {
            Visit::Node { digest, .. } if !self.nodes.insert(digest) => Ok(false),
            Visit::Node { digest, .. } | Visit::Page { digest, .. } => {
                self.object(Key::from(&digest), u8::MAX).map(|()| true)
            }
        })
    }

    fn object(&mut self, key: Key, below: u8) -> Result<()> {
        let mut places: Vec<Place> =
            self.store.inner.objects.catalog.find(key).into_iter().map(|l| l.place).collect();
        places.retain(|place| place.depth < below);
        let order = |place: &Place| (self.avoid.contains(&place.pack), place.depth, place.pack, place.offset);
        match places.into_iter().min_by_key(order) {
            Some(place) if self.live.insert(place) && place.depth > 0 => self.bases(&place),
            Some(_) => Ok(()),
            None => {
                tracing::warn!(%key, "an object that a capsule names is not in the store");
                Ok(())
            }
        }
    }

    fn bases(&mut self, place: &Place) -> Result<()> {
        let bytes = self.store.inner.objects.encoded(place)?;
        let frame = Frame::parse(&bytes).map_err(|source| StoreError::Damaged {
            object: String::from("of a delta frame"),
            pack: place.pack.to_string(),
            offset: place.offset.into(),
            source: source.into(),
        })?;
        let depth = frame.head.depth.min(place.depth);
        frame.bases().try_for_each(|key| self.object(key, depth))
    }
}
