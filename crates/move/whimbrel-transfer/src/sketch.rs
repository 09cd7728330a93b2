//! Sketch of an image: finds its pages that resemble a given page, wherever they are. Examples: a file
//! rewritten into other blocks, a program loaded at other addresses.
//!
//! A sketch has eight features of every page: the smallest hash of its 16-byte windows, at every byte, in
//! each of eight classes (one-permutation min-hash: Li, Owen, Zhang, NIPS 2012). A window at every byte finds
//! contents that moved by any distance. Only the size of a reply depends on a sketch. Sketches are identified
//! by the roots of their images, so all requesters share them; the process keeps the last few.

use crate::base_images::BaseImage;
use std::{
    collections::HashMap,
    sync::{Arc, Mutex, OnceLock},
    thread,
};
use whimbrel_core::{Digest, EXTENT_PAGES, EXTENT_SIZE, PAGE_SIZE, PageRun, lock};
use whimbrel_store::Store;

/// Number of features of a page.
const FEATURES: usize = 8;
/// Most pages examined for one feature: a feature that more pages share tells little.
const CANDIDATES_MAX: usize = 16;
/// Longest image that is sketched: 4 GiB, whose sketch takes at most 64 MiB.
const PAGES_MAX: u64 = 1 << 20;
/// Number of sketches kept.
const SKETCHES_MAX: usize = 4;
/// Threads that build a sketch.
const THREADS: usize = 4;

type Features = [u32; FEATURES];

/// Features of all pages of an image, in order.
#[derive(Debug, Default)]
pub(crate) struct Sketch(Vec<(u32, u32)>);

/// Sketch that exists or that another thread is building.
type Cell = Arc<OnceLock<Sketch>>;

static RECENT: Mutex<Vec<(Digest, Cell)>> = Mutex::new(Vec::new());

impl Sketch {
    /// Sketch of an image, built now if it is not one of the last few. Unreadable pages have no features.
    pub(crate) fn of(store: &Store, image: &BaseImage) -> Cell {
        let cell = {
            let mut recent = lock(&RECENT);
            let known = recent.iter().position(|(root, _)| *root == image.root);
            let cell = known.map(|at| recent.remove(at).1).unwrap_or_default();
            recent.insert(0, (image.root, cell.clone()));
            recent.truncate(SKETCHES_MAX);
            cell
        };
        cell.get_or_init(|| Self::make(store, image));
        cell
    }

    fn make(store: &Store, image: &BaseImage) -> Self {
        let pages = image.pages.min(PAGES_MAX);
        let extents = pages.div_ceil(EXTENT_PAGES as u64);
        let part = |number: usize| {
            let stored = store.image(Some(image.root), image.pages);
            let (mut entries, mut buffer) = (Vec::new(), vec![0; EXTENT_SIZE]);
            for extent in (number as u64..extents).step_by(THREADS) {
                let start = extent * EXTENT_PAGES as u64;
                let run = PageRun::new(start, (pages - start).min(EXTENT_PAGES as u64));
                let buffer = &mut buffer[..run.bytes()];
                let there = stored.present_in(extent).is_ok_and(|present| present != [0; 4]);
                if there && stored.read(run, buffer).is_ok() {
                    add(&mut entries, start as u32, buffer);
                }
            }
            entries
        };
        let mut entries = thread::scope(|scope| {
            let threads: Vec<_> = (0..THREADS).map(|number| scope.spawn(move || part(number))).collect();
            threads.into_iter().flat_map(|thread| thread.join().unwrap_or_default()).collect::<Vec<_>>()
        });
        entries.sort_unstable();
        entries.shrink_to_fit();
        Self(entries)
    }

    /// Page with most of these features, and the number that it has, if there is one. Among equals prefers
    /// `hint`, then the first.
    pub(crate) fn closest(&self, features: &Features, hint: Option<u32>) -> Option<(u32, usize)> {
        let mut found: HashMap<u32, usize> = HashMap::new();
        for feature in features.iter().filter(|feature| **feature != u32::MAX) {
            let first = self.0.partition_point(|(known, _)| known < feature);
            let same = self.0[first..].iter().take_while(|(known, _)| known == feature);
            same.take(CANDIDATES_MAX).for_each(|(_, page)| *found.entry(*page).or_default() += 1);
        }
        found.into_iter().max_by_key(|(page, count)| (*count, Some(*page) == hint, std::cmp::Reverse(*page)))
    }
}

fn add(entries: &mut Vec<(u32, u32)>, start: u32, pages: &[u8]) {
    for (number, page) in pages.as_chunks::<PAGE_SIZE>().0.iter().enumerate() {
        let features = features(page);
        let some = features.into_iter().filter(|feature| *feature != u32::MAX);
        entries.extend(some.map(|feature| (feature, start + number as u32)));
    }
}

/// Features of a page; [`u32::MAX`] for a class without a window.
pub(crate) fn features(page: &[u8; PAGE_SIZE]) -> Features {
    let mut least = [u32::MAX; FEATURES];
    for window in page.windows(16) {
        let (a, b) = window.split_at(8);
        let word = |bytes: &[u8]| bytes.first_chunk().map_or(0, |bytes| u64::from_le_bytes(*bytes));
        let (a, b) = (word(a), word(b));
        // A window of one repeated byte is in every other page.
        if a == b && a == a.rotate_left(8) {
            continue;
        }
        // Multiplicative hashing with the golden ratio (Knuth, 6.4); the class is from the low bits of the
        // upper half.
        const RATIO: u64 = 0x9e37_79b9_7f4a_7c15;
        let hash = (a.wrapping_mul(RATIO).rotate_left(29) ^ b).wrapping_mul(RATIO);
        let class = (hash >> 29) as usize % FEATURES;
        least[class] = least[class].min((hash >> 32) as u32);
    }
    least
}

#[cfg(test)]
mod tests {
    use super::*;

    fn noise(seed: u64) -> [u8; PAGE_SIZE] {
        let mut state = seed;
        [0; PAGE_SIZE].map(|_: u8| {
            state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
            (state >> 56) as u8
        })
    }

    fn sketch(pages: u64) -> Sketch {
        let mut entries = Vec::new();
        (0..pages).for_each(|seed| add(&mut entries, seed as u32, &noise(seed)));
        entries.sort_unstable();
        Sketch(entries)
    }

    #[test]
    fn contents_that_moved_by_any_distance_are_found_and_strangers_are_not() {
        let sketch = sketch(300);
        for shift in [1, 7, 500, 1500] {
            let mut page = noise(10_000);
            page[shift..].copy_from_slice(&noise(77)[..PAGE_SIZE - shift]);
            assert_eq!(sketch.closest(&features(&page), None).map(|(page, _)| page), Some(77), "{shift}");
        }
        assert_eq!(sketch.closest(&features(&noise(20_000)), None), None);
        assert_eq!(sketch.closest(&features(&[7; PAGE_SIZE]), None), None);
    }
}
