//! Holes: runs of pages of a server's file that are zeros without being stored here. Pure.
//!
//! Pages in the index take precedence. A page that was written here is never a hole again, because it may be
//! sent to the server and then evicted. Kept in memory only: after a restart the server is asked again.

use crate::proto::PAGE;
use std::{collections::BTreeMap, ops::Range};

/// Runs of pages in order, neither overlapping nor adjacent.
#[derive(Debug, Default)]
pub(super) struct Holes {
    /// First page of a run, and the page after its last.
    runs: BTreeMap<u64, u64>,
}

impl Holes {
    /// The holes in a file of `size` bytes; `stretches` are byte ranges in order. A page counts only if all
    /// of it is a hole.
    pub(super) fn new(stretches: &[Range<u64>], size: u64) -> Self {
        let page = PAGE as u64;
        let pages = |bytes: &Range<u64>| {
            // There is nothing beyond the end of the file.
            let end = if bytes.end >= size { size.div_ceil(page) } else { bytes.end / page };
            (bytes.start.div_ceil(page), end)
        };
        Self { runs: stretches.iter().map(pages).filter(|(first, end)| first < end).collect() }
    }

    pub(super) fn pages(&self) -> u64 {
        self.runs.iter().map(|(first, end)| end - first).sum()
    }

    pub(super) fn contains(&self, page: u64) -> bool {
        self.runs.range(..=page).next_back().is_some_and(|(_, end)| page < *end)
    }

    pub(super) fn remove(&mut self, pages: Range<u64>) {
        while let Some((&first, &end)) = self.runs.range(..pages.end).next_back()
            && end > pages.start
        {
            self.runs.remove(&first);
            if end > pages.end {
                self.runs.insert(pages.end, end);
            }
            if first < pages.start {
                self.runs.insert(first, pages.start);
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[test]
    fn a_page_is_a_hole_if_all_of_it_is_and_the_last_one_ends_with_the_file() {
        let page = PAGE as u64;
        let holes = Holes::new(&[1..3 * page - 1, 5 * page..6 * page + 100], 6 * page + 100);
        let said: Vec<u64> = (0..9).filter(|page| holes.contains(*page)).collect();
        assert_eq!(said, [1, 5, 6]);
    }

    proptest! {
        #[test]
        fn pages_that_were_cut_are_no_holes_and_all_others_are_what_they_were(
            runs in proptest::collection::vec((0u64..8, 1u64..8), 0..8),
            cuts in proptest::collection::vec((0u64..64, 0u64..20), 0..12),
        ) {
            let (page, mut at, mut model, mut stretches) = (PAGE as u64, 0, [false; 200], Vec::new());
            for (gap, len) in runs {
                let first = at + gap + 1;
                at = first + len;
                stretches.push(first * page..at * page);
                model[first as usize..at as usize].fill(true);
            }
            let mut holes = Holes::new(&stretches, 200 * page);
            for (first, len) in cuts {
                holes.remove(first..first + len);
                model[first as usize..(first + len) as usize].fill(false);
                for (number, is_hole) in model.iter().enumerate() {
                    prop_assert_eq!(holes.contains(number as u64), *is_hole, "page {}", number);
                }
            }
        }
    }
}
