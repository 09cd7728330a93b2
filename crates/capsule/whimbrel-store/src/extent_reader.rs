//! Reading whole extents fast: frame after frame instead of page after page.
//!
//! The pages of an extent are looked up at once and sorted by frame; each plain frame is read and decoded
//! once, into place where its pages lie in order, and its pages are hashed together. The cache is passed by:
//! everything is read just once. This is only a short cut. Pages it does not find, deltas, and pages that do
//! not match their digest are left to the caller's way of reading single pages, which knows about other
//! copies and says what is wrong.

use crate::{
    file_names::PackId,
    index::{Index, ObjectLocation, PackLocation},
    object_reader::Objects,
    vfs::ReadAt,
};
use std::sync::Arc;
use whimbrel_core::{Digest, EXTENT_PAGES, PAGE_SIZE};
use whimbrel_image::{
    Node, ShortDigest,
    pack_frame::{Kind, PackFrame},
    page_digests,
};

/// A page of the extent and where it lies.
#[derive(Clone, Copy)]
struct Wanted {
    place: PackLocation,
    /// In the frame.
    object: usize,
    /// In the extent.
    slot: usize,
    digest: Digest,
}

/// Reads extents; has buffers, so have one a thread.
pub(crate) struct ExtentReader<'a> {
    objects: &'a Objects,
    indexes: Arc<Vec<Arc<Index>>>,
    pack: Option<(PackId, Arc<dyn ReadAt>)>,
    encoded: Vec<u8>,
    raw: Vec<u8>,
}

impl<'a> ExtentReader<'a> {
    pub(crate) fn new(objects: &'a Objects) -> Self {
        let (encoded, raw) = Default::default();
        Self { objects, indexes: objects.catalog.snapshot(), pack: None, encoded, raw }
    }

    /// Fills in the pages of `leaf` that can be had this way, each checked. Says which ones (by slot) are
    /// missing.
    pub(crate) fn read(&mut self, leaf: &Node, extent: &mut [u8]) -> Vec<(usize, Digest)> {
        let (mut wanted, mut missing) = (Vec::with_capacity(EXTENT_PAGES), Vec::new());
        for (slot, digest) in leaf.children() {
            match self.find(&digest) {
                Some(ObjectLocation { place, slot: object }) => {
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
        let plain = |l: &ObjectLocation| l.place.depth == 0 && l.place.kind == Kind::Pages;
        self.indexes.iter().flat_map(|index| index.find(key)).find(plain)
    }

    /// Puts `pages`, which lie in one frame, into place; gives the digests of what is there then.
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
        self.encoded.resize(place.len as usize, 0);
        pack.read_at(u64::from(place.offset), &mut self.encoded).ok()
    }
}
