//! Similar pages: chooses, for the pages of a frame, similar pages of the requester's base images, wherever
//! they are.

use crate::{
    BaseImage,
    base_images::{BaseLookup, BasePages, FRAME_BASES_MAX},
    sketch::{self, Sketch},
};
use std::collections::{BTreeSet, HashSet};
use whimbrel_core::{Digest, PAGE_SIZE};
use whimbrel_store::Store;

/// Base images of a request; their sketches are built when they are first needed.
pub(crate) struct SimilarPages<'a> {
    store: &'a Store,
    images: &'a [BaseImage],
    pages: BasePages<'a>,
}

impl<'a> SimilarPages<'a> {
    pub(crate) fn new(store: &'a Store, images: &'a [BaseImage]) -> Self {
        Self { store, images, pages: BasePages::new(store, images) }
    }

    /// Ascending numbers and contents of the base pages that resemble `pages`, without those of `have`, which
    /// the frame is coded against anyway.
    pub(crate) fn choose(
        &mut self,
        pages: &[[u8; PAGE_SIZE]],
        mut have: HashSet<Digest>,
    ) -> (Vec<u64>, Vec<u8>) {
        if self.images.is_empty() || pages.is_empty() {
            return (Vec::new(), Vec::new());
        }
        let (mut numbers, mut older) = (Vec::new(), Vec::new());
        for number in self.candidates(pages, &have) {
            let BaseLookup::Page(digest) = self.pages.digest(number) else { continue };
            if numbers.len() == FRAME_BASES_MAX || have.contains(&digest) {
                continue;
            }
            if let Some(page) = self.pages.read(&digest) {
                have.insert(digest);
                numbers.push(number);
                older.extend(page);
            }
        }
        (numbers, older)
    }

    fn candidates(&mut self, pages: &[[u8; PAGE_SIZE]], have: &HashSet<Digest>) -> BTreeSet<u64> {
        let sketches: Vec<_> = self.images.iter().map(|image| Sketch::of(self.store, image)).collect();
        let (mut chosen, mut behind) = (BTreeSet::new(), None::<(usize, u32)>);
        for page in pages {
            let features = sketch::features(page);
            let in_image = |(image, sketch): (usize, &std::sync::Arc<std::sync::OnceLock<Sketch>>)| {
                let hint = behind.filter(|(at, _)| *at == image).map(|(_, page)| page);
                let (page, count) = sketch.get()?.closest(&features, hint)?;
                Some((count, hint == Some(page), image, page))
            };
            let best = sketches.iter().enumerate().filter_map(in_image).max();
            behind = best.map(|(_, _, image, page)| (image, page + 1));
            let Some((_, _, image, page)) = best else { continue };
            let before = self.images[..image].iter().fold(0u64, |sum, image| sum.saturating_add(image.pages));
            let number = before.saturating_add(page.into());
            if matches!(self.pages.digest(number), BaseLookup::Page(digest) if have.contains(&digest)) {
                continue;
            }
            chosen.insert(number);
            // Contents that moved by less than a page continue there.
            if u64::from(page) + 1 < self.images[image].pages {
                chosen.insert(number.saturating_add(1));
            }
        }
        chosen
    }
}

#[cfg(test)]
#[path = "similar_pages_tests.rs"]
mod tests;
