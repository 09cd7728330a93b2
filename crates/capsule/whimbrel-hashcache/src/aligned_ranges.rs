//! Aligned ranges: the complete pages in a byte range of an image, for the alignment of that image. Pure.
//!
//! An alignment says where file pages begin in each region of a disk image, since partitions may begin at an
//! odd sector. Pages that cross the border of two regions are left out; they are few.

use whimbrel_alignment::PageAlignment;
use whimbrel_core::PAGE_SIZE;
use xxhash_rust::xxh3::xxh3_64;

const PAGE: u64 = PAGE_SIZE as u64;

/// Region of an image: from `start` on, pages begin at `phase` modulo 4096.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct Region {
    start: u64,
    phase: u64,
}

/// Regions of an image, in order. Bytes before the first region have phase 0.
#[derive(Debug, Default)]
pub(crate) struct AlignedRanges(Vec<Region>);

/// Run of consecutive pages.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct PageRange {
    pub(crate) start: u64,
    pub(crate) pages: u64,
}

impl AlignedRanges {
    pub(crate) fn new(cuts: Option<&PageAlignment>) -> Self {
        let borders = cuts.into_iter().flat_map(PageAlignment::changes);
        Self(borders.map(|border| Region { start: border.start, phase: border.phase }).collect())
    }

    pub(crate) fn fingerprint(&self) -> u64 {
        let numbers = self.0.iter().flat_map(|region| [region.start, region.phase]);
        xxh3_64(&numbers.flat_map(u64::to_le_bytes).collect::<Vec<u8>>())
    }

    /// Complete pages in `start..end` of the image.
    pub(crate) fn runs(&self, start: u64, end: u64) -> Vec<PageRange> {
        let mut runs = Vec::new();
        let next = self.0.partition_point(|region| region.start <= start);
        let mut phase = next.checked_sub(1).map_or(0, |current| self.0[current].phase);
        let mut at = start;
        for region in self.0[next..].iter().take_while(|region| region.start < end) {
            runs.extend(run(at, region.start, phase));
            (at, phase) = (region.start, region.phase);
        }
        runs.extend(run(at, end, phase));
        runs
    }
}

fn run(start: u64, end: u64, phase: u64) -> Option<PageRange> {
    let first = start.checked_sub(phase).map_or(0, |from| from.div_ceil(PAGE)) * PAGE + phase;
    let pages = end.checked_sub(first)? / PAGE;
    (pages > 0).then_some(PageRange { start: first, pages })
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;
    use whimbrel_alignment::AlignmentChange;

    #[test]
    fn a_partition_at_sector_63_is_cut_from_its_own_beginning() {
        let start = 63 * 512;
        let borders =
            [AlignmentChange { start: 0, phase: 0 }, AlignmentChange { start, phase: start % PAGE }];
        let grid = AlignedRanges::new(Some(&PageAlignment::new(1 << 20, borders).unwrap()));
        let runs = grid.runs(0, 1 << 20);
        assert_eq!(runs[0], PageRange { start: 0, pages: 7 });
        assert_eq!(runs[1], PageRange { start, pages: ((1 << 20) - start) / PAGE });
        assert_ne!(grid.fingerprint(), AlignedRanges::new(None).fingerprint());
    }

    proptest! {
        #![proptest_config(ProptestConfig { cases: 400, failure_persistence: None, ..ProptestConfig::default() })]

        #[test]
        fn every_page_lies_inside_once_and_on_the_grid_of_its_region(
            gaps in prop::collection::vec((1u64..40, 0u64..8), 0..6),
            start in 0u64..100, length in 0u64..200,
        ) {
            let mut at = 0;
            let regions: Vec<_> = gaps.iter().map(|(gap, phase)| {
                at += gap * 512;
                Region { start: at, phase: phase * 512 }
            }).collect();
            let grid = AlignedRanges(regions.clone());
            let (start, end) = (start * 512, (start + length) * 512);
            let mut last = start;
            let mut pages = 0;
            for run in grid.runs(start, end) {
                for page in 0..run.pages {
                    let page = run.start + page * PAGE;
                    prop_assert!(page >= last && page + PAGE <= end);
                    last = page + PAGE;
                    pages += 1;
                    prop_assert!(!regions.iter().any(|r| r.start > page && r.start < page + PAGE));
                    let phase = regions.iter().rev().find(|r| r.start <= page).map_or(0, |r| r.phase);
                    prop_assert_eq!(page % PAGE, phase);
                }
            }
            // Each region loses at most one page at its start and one at its end.
            let parts = regions.iter().filter(|r| r.start > start && r.start < end).count() as u64 + 1;
            prop_assert!((pages + 2 * parts) * PAGE >= end - start);
        }
    }
}
