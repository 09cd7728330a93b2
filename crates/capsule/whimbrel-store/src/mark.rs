//! Mark phase of garbage collection: the frames reachable from some roots over trees and delta bases.

use crate::{
    error::{Result, StoreError},
    file_names::PackId,
    gc_lease::Pinned,
    index::PackLocation,
    store::Store,
};
use std::collections::HashSet;
use whimbrel_core::{
    CapsuleId, Digest,
    loss::{Loss, is_back},
};
use whimbrel_image::{
    ShortDigest,
    pack_frame::PackFrame,
    tree::{Visit, walk},
};

/// Live frames found so far. Marking further roots costs only what they do not share.
pub(crate) struct Mark<'a> {
    store: &'a Store,
    pub(crate) avoid: HashSet<PackId>,
    /// Nodes below which everything is marked.
    nodes: HashSet<Digest>,
    pub(crate) live: HashSet<PackLocation>,
    bases_marked: HashSet<PackLocation>,
    pub(crate) capsules: HashSet<CapsuleId>,
    /// Complete capsules among them. Missing objects of a partial one may arrive, or be found, until it is
    /// marked again.
    complete: HashSet<CapsuleId>,
}

impl<'a> Mark<'a> {
    pub(crate) fn new(store: &'a Store, avoid: HashSet<PackId>) -> Self {
        let (nodes, live, bases_marked, capsules, complete) = Default::default();
        Self { store, avoid, nodes, live, bases_marked, capsules, complete }
    }

    pub(crate) fn capsule(&mut self, id: &CapsuleId) -> Result<()> {
        self.objects_of(id, self.store.is_partial(id)?)
    }

    /// Marks a capsule of which objects may be missing, without a mark that says so.
    pub(crate) fn present_part(&mut self, id: &CapsuleId) -> Result<()> {
        if self.store.has(&[id.0]) == [false] {
            return Ok(());
        }
        match self.capsule(id) {
            Err(StoreError::Missing { .. } | StoreError::MissingBase { .. }) => self.objects_of(id, true),
            other => other,
        }
    }

    fn objects_of(&mut self, id: &CapsuleId, partial: bool) -> Result<()> {
        if self.complete.contains(id) {
            return Ok(());
        }
        let manifest = self.store.manifest(id)?;
        self.capsules.insert(*id);
        self.object(ShortDigest::from(&id.0), u8::MAX)?;
        manifest.blobs().try_for_each(|blob| self.object(ShortDigest::from(&blob), u8::MAX))?;
        manifest.images.iter().try_for_each(|image| match image.root {
            Some(root) => self.image(root, image.pages, partial),
            None => Ok(()),
        })?;
        if !partial {
            self.complete.insert(*id);
        }
        Ok(())
    }

    pub(crate) fn pinned(&mut self, pinned: &Pinned) -> Result<()> {
        let (root, pages) = match pinned {
            Pinned::Object(digest) => return self.object(ShortDigest::from(digest), u8::MAX),
            Pinned::Image { root, pages } => (*root, *pages),
        };
        let partial = self.store.is_partial_image(root, pages)?;
        self.image(root, pages, partial)
    }

    /// Marks an image. A node that cannot be read is an error: what is below it is unknown and must not be
    /// removed. In a partial image a node may be missing; then nothing below it is retained for this image.
    fn image(&mut self, root: Digest, pages: u64, partial: bool) -> Result<()> {
        let (store, mut seen) = (self.store, HashSet::new());
        walk(&store.inner.objects, Some(root), pages, &mut |visit| match visit {
            Visit::Node { digest, .. } if partial && !store.inner.objects.has(&digest) => Ok(false),
            Visit::Page { digest, .. } if partial && !store.inner.objects.has(&digest) => Ok(true),
            Visit::Node { digest, .. } if self.nodes.contains(&digest) || !seen.insert(digest) => Ok(false),
            Visit::Node { digest, .. } | Visit::Page { digest, .. } => {
                self.object(ShortDigest::from(&digest), u8::MAX).map(|()| true)
            }
        })?;
        if !partial || is_back(Loss::PartialMarkedOnce) {
            self.nodes.extend(seen);
        }
        Ok(())
    }

    fn object(&mut self, key: ShortDigest, below: u8) -> Result<()> {
        let mut places: Vec<PackLocation> =
            self.store.inner.objects.indexes.find(key).into_iter().map(|l| l.frame).collect();
        places.retain(|place| place.depth < below);
        let order =
            |place: &PackLocation| (self.avoid.contains(&place.pack), place.depth, place.pack, place.offset);
        places.sort_by_key(order);
        // A damaged copy must not count as the live one beside one that a repair has stored.
        let intact = places.iter().find(|place| places.len() > 1 && self.is_intact(place));
        match intact.or(places.first()).copied() {
            Some(place) => {
                self.live.insert(place);
                self.bases(&place)
            }
            None => {
                tracing::warn!(%key, "an object that a capsule names is not in the store");
                Ok(())
            }
        }
    }

    fn is_intact(&self, place: &PackLocation) -> bool {
        let bytes = self.store.inner.objects.encoded(place);
        bytes.is_ok_and(|bytes| PackFrame::parse(&bytes).is_ok())
    }

    /// Keeps packs that have live frames where they are, and with them the bases of their deltas.
    pub(crate) fn spare_live(&mut self) -> Result<()> {
        loop {
            self.mark_bases_of_remaining()?;
            let spared: HashSet<PackId> = self.live.iter().map(|place| place.pack).collect();
            let before = self.avoid.len();
            self.avoid.retain(|pack| !spared.contains(pack));
            if self.avoid.len() == before {
                return Ok(());
            }
        }
    }

    /// Marks the bases of deltas in packs that stay, live or not: a writer can find any indexed object at any
    /// time, so it has to be readable.
    pub(crate) fn mark_bases_of_remaining(&mut self) -> Result<()> {
        for index in self.store.inner.objects.indexes.snapshot().iter() {
            for place in index.places().filter(|place| place.depth > 0) {
                if !self.avoid.contains(&place.pack) {
                    self.bases(&place)?;
                }
            }
        }
        Ok(())
    }

    fn bases(&mut self, place: &PackLocation) -> Result<()> {
        if place.depth == 0 || !self.bases_marked.insert(*place) {
            return Ok(());
        }
        let bytes = self.store.inner.objects.encoded(place)?;
        let Ok(frame) = PackFrame::parse(&bytes) else {
            tracing::warn!(pack = %place.pack, offset = place.offset, "a delta is damaged, so its bases are unknown");
            return Ok(());
        };
        let depth = frame.head.depth.min(place.depth);
        frame.bases().try_for_each(|key| self.object(key, depth))
    }
}
