//! Deltas: changed pages encoded as their difference from older pages that the reader also has. Used for the
//! delta frames of a store and for transfers between hosts that have the same older image.
//!
//! [`plan`] sorts changed pages into parts and chooses the bases of each: the older version of a page if
//! enough of it is unchanged, and the most similar old page at any position. [`encode`] compresses one part
//! with its bases as prefix (zstd `refPrefix`); [`decode`] undoes that. Pure functions; the caller records
//! which bases a part has.
//!
//! Measured on a Debian guest that compiles, 3,000 changed pages ten seconds apart: 1.07 MB in 0.18 s on one
//! core. `zstd -3 --patch-from` of the complete images makes 1.29 MB, plain frames of 16 pages 1.55 MB, and
//! bases at the same position only, in parts of the same size, 1.28 MB.

use crate::{
    compression::{self, Settings},
    pack_frame::PackFrameError,
    similarity::{SimilarityIndex, resembles},
};
use std::collections::BTreeSet;
use whimbrel_core::PAGE_SIZE;
use zstd::zstd_safe::CParameter;

/// One per cent smaller than level 6 for a third more time, and still 90 MB/s a core.
pub const LEVEL: i32 = 9;
/// Pages of a part that is read a page at a time; twice as many save one per cent.
pub const PART_PAGES: usize = 32;

/// An older page that the reader has.
#[derive(Debug, Clone, Copy)]
pub struct OldPages<'a> {
    /// Content of the page.
    pub bytes: &'a [u8; PAGE_SIZE],
    /// Number of deltas that the reader must undo to get it. A part has only pages of one depth, so that
    /// depth spreads little.
    pub depth: u8,
}

/// A page that changed.
#[derive(Debug, Clone, Copy)]
pub struct ChangedPages<'a> {
    /// Present content of the page.
    pub new: &'a [u8; PAGE_SIZE],
    /// Index of its older version among the old pages, if there is one.
    pub old: Option<usize>,
}

/// Changed pages to be encoded together.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Part {
    /// Indices of the pages among the changed ones.
    pub pages: Vec<usize>,
    /// Indices of the bases among the old pages: at most two a page, often none.
    pub bases: Vec<usize>,
}

/// Sorts `changed` into parts of at most `pages` pages and chooses their bases among `old`: the older
/// versions of the changed pages and any other old pages; those near the changed ones help most.
pub fn plan(changed: &[ChangedPages<'_>], old: &[OldPages<'_>], pages: usize) -> Vec<Part> {
    let mut similar = SimilarityIndex::default();
    old.iter().enumerate().for_each(|(number, old)| similar.add(number as u32, old.bytes));
    let bases = |page: &ChangedPages<'_>| {
        let stayed = page.old.filter(|number| resembles(page.new, old[*number].bytes));
        let elsewhere = similar.closest(page.new).map(|number| number as usize);
        stayed.into_iter().chain(elsewhere).collect::<Vec<_>>()
    };
    let chosen: Vec<Vec<usize>> = changed.iter().map(bases).collect();
    // Depth 0 is a page without a base.
    let depth = |page: &usize| chosen[*page].iter().map(|base| old[*base].depth + 1).max().unwrap_or(0);
    let mut order: Vec<usize> = (0..changed.len()).collect();
    order.sort_by_key(depth);
    let groups = order.chunk_by(|a, b| depth(a) == depth(b)).flat_map(|group| group.chunks(pages.max(1)));
    let part = |group: &[usize]| {
        let bases: BTreeSet<usize> = group.iter().flat_map(|page| chosen[*page].iter().copied()).collect();
        Part { pages: group.to_vec(), bases: bases.into_iter().collect() }
    };
    groups.map(part).collect()
}

/// Compresses `raw` at zstd `level` with `bases` (concatenated pages, may be empty) as prefix.
pub fn encode(raw: &[u8], bases: &[u8], level: i32) -> Result<Vec<u8>, PackFrameError> {
    // The window must reach from the last byte to the first base; zstd would choose it for `raw` alone.
    let window = usize::BITS - (raw.len() + bases.len()).leading_zeros();
    let more = [Some(CParameter::WindowLog(window.clamp(17, 27))), None];
    Ok(compression::compress(raw, bases, Settings { level, more }, Vec::new())?)
}

/// Undoes [`encode`] with the same `bases` into `raw`, which has the length of the encoded content. Bytes
/// that do not belong together give an error or wrong content, never more than `raw` has room for.
pub fn decode(payload: &[u8], bases: &[u8], raw: &mut [u8]) -> Result<(), PackFrameError> {
    match compression::decompress(payload, bases, raw)? {
        found if found == raw.len() => Ok(()),
        found => Err(PackFrameError::Length { found, expected: raw.len() }),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn noise(seed: u64) -> [u8; PAGE_SIZE] {
        let mut state = seed;
        [0; PAGE_SIZE].map(|_: u8| {
            state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
            (state >> 56) as u8
        })
    }

    fn concatenated<'a>(pages: impl Iterator<Item = &'a [u8; PAGE_SIZE]>) -> Vec<u8> {
        pages.flatten().copied().collect()
    }

    #[test]
    fn a_page_that_moved_to_another_place_costs_next_to_nothing() {
        let old: Vec<_> = (0..64).map(noise).collect();
        let new: Vec<_> = (0..64).map(|i| noise((i + 17) % 64)).collect();
        let changed: Vec<_> =
            new.iter().enumerate().map(|(i, new)| ChangedPages { new, old: Some(i) }).collect();
        let olds: Vec<_> = old.iter().map(|bytes| OldPages { bytes, depth: 0 }).collect();
        let mut bytes = 0;
        for part in plan(&changed, &olds, 16) {
            let raw = concatenated(part.pages.iter().map(|i| &new[*i]));
            let bases = concatenated(part.bases.iter().map(|i| &old[*i]));
            bytes += encode(&raw, &bases, LEVEL).unwrap().len();
        }
        assert!(bytes < 64 * 40, "{bytes} bytes for 64 pages of noise that only moved");
    }

    #[test]
    fn pages_that_stand_alone_are_not_mixed_with_those_on_deep_bases() {
        let (bytes, stranger) = (noise(1), noise(2));
        let old = [OldPages { bytes: &bytes, depth: 1 }];
        let page = |i| match i % 3 {
            0 => ChangedPages { new: &stranger, old: None },
            _ => ChangedPages { new: &bytes, old: Some(0) },
        };
        let changed: Vec<_> = (0..30).map(page).collect();
        for part in plan(&changed, &old, 8) {
            assert!(part.pages.len() <= 8);
            assert!(part.pages.iter().all(|i| (i % 3 == 0) == part.bases.is_empty()), "{part:?}");
        }
    }

    proptest! {
        #[test]
        fn every_page_is_in_one_part_and_comes_back(seeds in prop::collection::vec((0..40u64, prop::option::of(0..40usize)), 0..80), size in 1..40usize) {
            let new: Vec<_> = seeds.iter().map(|(new, _)| noise(*new)).collect();
            let old: Vec<_> = (20..60).map(noise).collect();
            let olds: Vec<_> = old.iter().map(|bytes| OldPages { bytes, depth: 0 }).collect();
            let changed: Vec<_> = new.iter().zip(&seeds).map(|(new, (_, old))| ChangedPages { new, old: *old }).collect();
            let mut seen = Vec::new();
            for part in plan(&changed, &olds, size) {
                let raw = concatenated(part.pages.iter().map(|i| &new[*i]));
                let bases = concatenated(part.bases.iter().map(|i| &old[*i]));
                let payload = encode(&raw, &bases, 3).unwrap();
                let mut back = vec![0; raw.len()];
                decode(&payload, &bases, &mut back).unwrap();
                prop_assert_eq!(back, raw);
                seen.extend(part.pages);
            }
            seen.sort_unstable();
            prop_assert_eq!(seen, (0..seeds.len()).collect::<Vec<_>>());
        }
    }
}
