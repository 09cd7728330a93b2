//! Extent reader: reads complete extents fast, frame by frame instead of page by page.
//!
//! It looks up all pages of an extent and sorts them by frame. Each plain frame is read and decoded once,
//! directly into the extent where its pages are in order, and its pages are hashed together. The cache is
//! bypassed, because everything is read just once. This is an optimisation only. Pages that are not found,
//! deltas, and pages with a wrong digest are left to the caller, who reads single pages, tries other copies
//! and reports errors.

use crate::{
    file_names::PackId,
    index::{Index, ObjectLocation, PackLocation},
    object_reader::Objects,
    pack_file::PackFile,
};
use std::sync::Arc;
use whimbrel_core::{Digest, EXTENT_PAGES, PAGE_SIZE};
use whimbrel_image::{
    Node, ShortDigest,
    pack_frame::{Kind, PackFrame},
    page_digests,
};

#[derive(Clone, Copy)]
struct Wanted {
    place: PackLocation,
    object: usize,
    slot: usize,
    digest: Digest,
}

/// Reads extents; owns buffers, so each thread should have one.
pub(crate) struct ExtentReader<'a> {
    objects: &'a Objects,
    indexes: Arc<Vec<Arc<Index>>>,
    pack: Option<(PackId, Arc<PackFile>)>,
    encoded: Vec<u8>,
    raw: Vec<u8>,
}

impl<'a> ExtentReader<'a> {
    pub(crate) fn new(objects: &'a Objects) -> Self {
        let (encoded, raw) = Default::default();
        Self { objects, indexes: objects.indexes.snapshot(), pack: None, encoded, raw }
    }

    /// Reads the pages of `leaf` that are in plain frames, and checks each. Returns those that are missing,
    /// with their slots.
    pub(crate) fn read(&mut self, leaf: &Node, extent: &mut [u8]) -> Vec<(usize, Digest)> {
        let (mut wanted, mut missing) = (Vec::with_capacity(EXTENT_PAGES), Vec::new());
        for (slot, digest) in leaf.children() {
            match self.find(&digest) {
                Some(ObjectLocation { frame: place, slot: object }) => {
                    wanted.push(Wanted { place, object: usize::from(object), slot, digest });
                }
                None => missing.push((slot, digest)),
            }
        }
        wanted.sort_unstable_by_key(|page| (page.place.pack, page.place.offset, page.slot));
        for pages in wanted.chunk_by(|a, b| a.place == b.place) {
            let read = self.frame(pages, extent);
            for (number, page) in pages.iter().enumerate() {
                if read.as_ref().is_none_or(|found| found[number] != page.digest) {
                    missing.push((page.slot, page.digest));
                }
            }
        }
        missing
    }

    fn find(&self, digest: &Digest) -> Option<ObjectLocation> {
        let key = ShortDigest::from(digest);
        let plain = |l: &ObjectLocation| l.frame.depth == 0 && l.frame.kind == Kind::Pages;
        self.indexes.iter().flat_map(|index| index.find(key)).find(plain)
    }

    /// Decodes `pages`, which are in one frame, into the extent; returns the digests of the result.
    fn frame(&mut self, pages: &[Wanted], extent: &mut [u8]) -> Option<Vec<Digest>> {
        let place = pages[0].place;
        self.load(&place)?;
        let frame = PackFrame::parse(&self.encoded).ok()?;
        let whole = frame.head.kind == Kind::Pages && frame.head.depth == 0;
        if !whole || pages.iter().any(|page| page.object >= frame.head.objects) {
            return None;
        }
        let first = pages[0].slot;
        let in_order = pages.iter().enumerate().all(|(i, page)| page.object == i && page.slot == first + i);
        if in_order && pages.len() == frame.head.objects {
            let target = &mut extent[first * PAGE_SIZE..][..frame.head.raw];
            frame.decode_into(&[], target).ok()?;
        } else {
            self.raw.resize(frame.head.raw, 0);
            frame.decode_into(&[], &mut self.raw).ok()?;
            let raw = self.raw.as_chunks::<PAGE_SIZE>().0;
            let extent = extent.as_chunks_mut::<PAGE_SIZE>().0;
            pages.iter().for_each(|page| extent[page.slot] = raw[page.object]);
        }
        let extent = extent.as_chunks::<PAGE_SIZE>().0;
        Some(page_digests(&pages.iter().map(|page| &extent[page.slot]).collect::<Vec<_>>()))
    }

    /// Reads the frame at `place` into the buffer for encoded bytes.
    fn load(&mut self, place: &PackLocation) -> Option<()> {
        if self.pack.as_ref().is_none_or(|(id, _)| *id != place.pack) {
            self.pack = Some((place.pack, self.objects.handle(place.pack).ok()?));
        }
        let (_, pack) = self.pack.as_ref()?;
        pack.read(place, &mut self.encoded).ok()
    }
}
