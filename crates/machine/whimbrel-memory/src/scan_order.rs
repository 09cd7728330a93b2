//! Scan order: whether dirty pages are looked for before they are taken, and over which runs they are taken.
//!
//! Taking protects pages again, and for that the kernel tells all secondary page tables of the process that
//! the whole range of the call changes (`mmu_notifier_invalidate_range_start` of `do_pagemap_scan`,
//! fs/proc/task_mmu.c), whether a page of it was written or not. KVM answers by dropping the range from the
//! page tables of its guest, which then faults on every page that it uses. So under KVM a scan that changes
//! nothing comes first, and pages are taken over the runs that it found. A page that is written between the
//! two scans is either in such a run, and taken, or keeps its mark for the next scan.
//!
//! A run costs a system call, and a clean page inside a run may cost the guest a fault. So runs are joined as
//! long as few clean pages lie between them.

use crate::userfaultfd::Span;
use linux_raw_sys::general::page_region;
use whimbrel_core::PAGE_SIZE;

/// How [`GuestRam`](crate::GuestRam) takes the dirty pages of shared and private memory.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum ScanOrder {
    /// One scan takes what it finds. Right for a process whose memory no KVM maps.
    TakeAtOnce,
    /// The first scan only looks, the second takes over the runs found. Right for a guest of KVM.
    LookFirst,
}

/// Dirty pages for which one clean page may be taken along: with 8, a guest that uses all of its memory
/// faults on at most 1.125 times the dirty pages.
const DIRTY_FOR_A_CLEAN_PAGE: u64 = 8;

/// Joins neighbours among `regions`, which are in ascending order. A gap is taken along if all gaps of the
/// run together stay within the share of its dirty pages.
pub(crate) fn joined(regions: &[page_region]) -> Vec<Span> {
    let mut runs: Vec<Span> = Vec::new();
    let (mut dirty, mut clean) = (0, 0);
    for region in regions {
        let bytes = region.end - region.start;
        let gap = runs.last().map(|last| region.start - (last.start + last.bytes));
        match (runs.last_mut(), gap) {
            (Some(last), Some(gap)) if (clean + gap) * DIRTY_FOR_A_CLEAN_PAGE <= dirty + bytes => {
                last.bytes += gap + bytes;
                dirty += bytes;
                clean += gap;
            }
            _ => {
                runs.push(Span { start: region.start, bytes });
                (dirty, clean) = (bytes, 0);
            }
        }
    }
    assert!(runs.iter().all(|run| run.bytes % PAGE_SIZE as u64 == 0));
    runs
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    const PAGE: u64 = PAGE_SIZE as u64;

    fn region((start, end): (u64, u64)) -> page_region {
        page_region { start: start * PAGE, end: end * PAGE, categories: 0 }
    }

    fn pages(regions: &[(u64, u64)]) -> Vec<(u64, u64)> {
        let regions: Vec<_> = regions.iter().copied().map(region).collect();
        joined(&regions).iter().map(|run| (run.start / PAGE, run.bytes / PAGE)).collect()
    }

    #[test]
    fn pages_far_from_each_other_stay_apart_and_a_few_holes_are_taken_along() {
        assert_eq!(pages(&[]), []);
        assert_eq!(pages(&[(3, 4), (5, 6)]), [(3, 1), (5, 1)], "one of two pages would be clean");
        assert_eq!(pages(&[(0, 4), (5, 9), (10, 18)]), [(0, 18)]);
        assert_eq!(pages(&[(0, 100), (200, 201)]), [(0, 100), (200, 1)]);
        assert_eq!(pages(&[(0, 4), (4, 5)]), [(0, 5)], "regions of other categories are neighbours");
    }

    proptest! {
        #[test]
        fn joined_runs_hold_every_dirty_page_and_few_others(
            steps in prop::collection::vec((1_u64..20, 1_u64..40), 0..200)
        ) {
            let mut at = 0;
            let regions: Vec<_> = steps.iter().map(|(gap, len)| {
                let start = at + gap;
                at = start + len;
                (start, at)
            }).collect();
            let runs = pages(&regions);
            let dirty: u64 = steps.iter().map(|(_, len)| len).sum();
            let taken: u64 = runs.iter().map(|(_, len)| len).sum();
            prop_assert!(taken - dirty <= dirty / DIRTY_FOR_A_CLEAN_PAGE);
            for (start, end) in regions {
                prop_assert!(runs.iter().any(|(from, len)| *from <= start && end <= from + len));
            }
            prop_assert!(runs.windows(2).all(|pair| pair[0].0 + pair[0].1 < pair[1].0 + 1));
        }
    }
}
