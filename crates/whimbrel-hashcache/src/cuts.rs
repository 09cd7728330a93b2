//! How a disk image is cut into pages: where file pages begin in each part of it. Pure.
//!
//! Partitions may begin at an odd sector, and file systems may place their first file page anywhere, so the grid of pages has a
//! phase for each region. What no region covers is cut on the grid of the image itself.

use crate::place::UNIT;
use whimbrel_core::PAGE_SIZE;
use xxhash_rust::xxh3::xxh3_64;

const PAGE: u64 = PAGE_SIZE as u64;
/// More regions than partition tables can name.
const MAX_REGIONS: usize = 4096;

/// A part of an image whose pages lie on a grid of their own.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Region {
    /// Its first byte, a multiple of 512.
    pub start: u64,
    /// Its bytes, a multiple of 512.
    pub length: u64,
    /// Where pages begin: at offsets of the image that leave this when divided by 4096. A multiple of 512 below 4096.
    pub phase: u32,
}

/// All regions of an image, checked: sorted, apart from each other, on sectors.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Cuts(Vec<Region>);

/// Why a list of regions is none.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
pub enum CutsError {
    /// More regions than anybody needs.
    #[error("{count} regions are more than {MAX_REGIONS}")]
    Many {
        /// How many.
        count: usize,
    },
    /// A number is not a multiple of 512, the phase is not below a page, or the end does not fit into a number.
    #[error("region {index} does not lie on sectors or has no end")]
    Shape {
        /// Of the region in the list.
        index: usize,
    },
    /// It begins before its predecessor ends.
    #[error("region {index} overlaps the one before it or is out of order")]
    Order {
        /// Of the region in the list.
        index: usize,
    },
}

impl Cuts {
    /// 4 KiB pages from the beginning, as memory has them.
    pub fn plain() -> Self {
        Self::default()
    }

    /// Regions in the order of their beginnings.
    pub fn new(regions: Vec<Region>) -> Result<Self, CutsError> {
        if regions.len() > MAX_REGIONS {
            return Err(CutsError::Many { count: regions.len() });
        }
        let mut end = 0;
        for (index, region) in regions.iter().enumerate() {
            let sectors = [region.start, region.length, region.phase.into()];
            let shape =
                sectors.iter().all(|number| number.is_multiple_of(UNIT)) && region.phase < PAGE as u32;
            let Some(next) = region.start.checked_add(region.length).filter(|_| shape) else {
                return Err(CutsError::Shape { index });
            };
            if region.start < end {
                return Err(CutsError::Order { index });
            }
            end = next;
        }
        Ok(Self(regions))
    }

    /// The regions.
    pub fn regions(&self) -> &[Region] {
        &self.0
    }

    /// A number that differs for different cuts.
    pub(crate) fn mark(&self) -> u64 {
        let numbers = |region: &Region| [region.start, region.length, region.phase.into()];
        let bytes: Vec<u8> = self.0.iter().flat_map(numbers).flat_map(u64::to_le_bytes).collect();
        xxh3_64(&bytes)
    }

    /// The pages that lie whole inside of `start..end` of the image, as runs of pages that follow each other.
    pub(crate) fn runs(&self, start: u64, end: u64) -> Vec<Run> {
        let mut runs = Vec::new();
        let mut at = start;
        let from = self.0.partition_point(|region| region.start + region.length <= start);
        for region in self.0[from..].iter().take_while(|region| region.start < end) {
            runs.extend(run(at, region.start.min(end), 0));
            at = at.max(region.start);
            let stop = (region.start + region.length).min(end);
            runs.extend(run(at, stop, region.phase.into()));
            at = at.max(stop);
        }
        runs.extend(run(at, end, 0));
        runs
    }
}

/// Pages that follow each other.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Run {
    pub(crate) start: u64,
    pub(crate) pages: u64,
}

fn run(start: u64, end: u64, phase: u64) -> Option<Run> {
    let first = start.checked_sub(phase).map_or(0, |from| from.div_ceil(PAGE)) * PAGE + phase;
    let pages = end.checked_sub(first)? / PAGE;
    (pages > 0).then_some(Run { start: first, pages })
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn region(start: u64, length: u64, phase: u32) -> Region {
        Region { start, length, phase }
    }

    #[test]
    fn a_partition_at_sector_63_is_cut_from_its_own_beginning() {
        let start = 63 * 512;
        let cuts = Cuts::new(vec![region(start, 1 << 20, (start % PAGE) as u32)]).unwrap();
        let runs = cuts.runs(0, 4 << 20);
        assert_eq!(runs[0], Run { start: 0, pages: 7 });
        assert_eq!(runs[1], Run { start, pages: 256 });
        assert_eq!(runs[2].start, (start + (1 << 20)).next_multiple_of(PAGE));
    }

    #[test]
    fn lists_that_make_no_sense_are_refused() {
        let new = |regions: &[Region]| Cuts::new(regions.to_vec()).is_err();
        assert!(new(&[region(1, 4096, 0)]) && new(&[region(0, 100, 0)]) && new(&[region(0, 4096, 4096)]));
        assert!(new(&[region(0, 8192, 0), region(4096, 4096, 0)]), "overlap");
        assert!(new(&[region(u64::MAX - 511, 4096, 0)]), "no end");
        assert!(new(&vec![region(0, 0, 0); 5000]));
    }

    proptest! {
        #![proptest_config(ProptestConfig { cases: 400, failure_persistence: None, ..ProptestConfig::default() })]

        #[test]
        fn every_page_lies_inside_once_and_on_the_grid_of_its_region(
            gaps in prop::collection::vec((0u64..40, 0u64..40, 0u32..8), 0..6),
            start in 0u64..100, length in 0u64..200,
        ) {
            let mut at = 0;
            let regions: Vec<_> = gaps.iter().map(|(gap, length, phase)| {
                let start = at + gap * 512;
                at = start + length * 512;
                region(start, length * 512, phase * 512)
            }).collect();
            let cuts = Cuts::new(regions.clone()).unwrap();
            let (start, end) = (start * 512, (start + length) * 512);
            let mut last = start;
            for run in cuts.runs(start, end) {
                for page in 0..run.pages {
                    let page = run.start + page * PAGE;
                    prop_assert!(page >= last && page + PAGE <= end);
                    last = page + PAGE;
                    let touches = |r: &&Region| r.start < page + PAGE && page < r.start + r.length;
                    let grid = match regions.iter().find(touches) {
                        Some(r) => {
                            prop_assert!(r.start <= page && page + PAGE <= r.start + r.length);
                            u64::from(r.phase)
                        }
                        None => 0,
                    };
                    prop_assert_eq!(page % PAGE, grid);
                }
            }
        }
    }
}
