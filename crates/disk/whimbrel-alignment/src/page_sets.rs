//! Page sets of a disk and of its aligned array: a page of one array is in the set if it shares a byte with a
//! page in the set of the other.
//!
//! Translation only widens: there and back gives a superset. That is right for dirty and populated pages,
//! where an extra page costs a comparison and a missing one would lose a write. It is wrong for "these pages
//! are present".

use crate::{PAGE, PageAlignment};
use whimbrel_core::{PageRun, PageSet};

impl PageAlignment {
    /// Pages of the disk, from byte 0 on.
    pub fn disk_page_count(&self) -> u64 {
        self.size().div_ceil(PAGE)
    }

    /// Aligned pages that share bytes with the disk pages in `disk`.
    ///
    /// # Panics
    /// If `disk` is not a set over the pages of this disk, a caller's error.
    pub fn to_aligned(&self, disk: &PageSet) -> PageSet {
        assert_eq!(disk.len(), self.disk_page_count(), "a page set of another disk");
        let mut cut = PageSet::empty(self.page_count());
        for run in disk.runs() {
            cut.insert_run(self.pages_of(run.offset()..run.end() * PAGE));
        }
        cut
    }

    /// Disk pages that share bytes with the aligned pages in `cut`.
    ///
    /// # Panics
    /// If `cut` is not a set over the pages of the aligned array, a caller's error.
    pub fn to_disk(&self, cut: &PageSet) -> PageSet {
        assert_eq!(cut.len(), self.page_count(), "a page set of another cut array");
        let mut disk = PageSet::empty(self.disk_page_count());
        for run in cut.runs() {
            // Consecutive aligned pages have consecutive bytes, so the ends of a run suffice.
            let ends = self.disk_bytes(run.start).zip(self.disk_bytes(run.end() - 1));
            let Some((first, last)) = ends else { continue };
            let start = first.start / PAGE;
            disk.insert_run(PageRun::new(start, last.end.div_ceil(PAGE) - start));
        }
        disk
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::alignment::tests::any_cuts;
    use proptest::prelude::*;

    fn share_a_byte(cuts: &PageAlignment, disk: u64, cut: u64) -> bool {
        let bytes = cuts.disk_bytes(cut).unwrap();
        bytes.start < (disk + 1) * PAGE && disk * PAGE < bytes.end
    }

    proptest! {
        #[test]
        fn a_page_is_in_the_set_if_it_shares_a_byte(cuts in any_cuts(), seed in prop::collection::vec(any::<bool>(), 100)) {
            let choose = |len: u64| {
                let mut set = PageSet::empty(len);
                (0..len).filter(|page| seed[*page as usize % 100]).for_each(|page| { set.insert(page); });
                set
            };
            let disk = choose(cuts.disk_page_count());
            let expected: Vec<u64> = (0..cuts.page_count())
                .filter(|cut| disk.iter().any(|page| share_a_byte(&cuts, page, *cut)))
                .collect();
            prop_assert_eq!(cuts.to_aligned(&disk).iter().collect::<Vec<_>>(), expected);

            let cut = choose(cuts.page_count());
            let expected: Vec<u64> = (0..cuts.disk_page_count())
                .filter(|page| cut.iter().any(|cut| share_a_byte(&cuts, *page, cut)))
                .collect();
            prop_assert_eq!(cuts.to_disk(&cut).iter().collect::<Vec<_>>(), expected);

            let mut lost = cut.clone();
            lost.subtract(&cuts.to_aligned(&cuts.to_disk(&cut)));
            prop_assert!(lost.is_empty(), "what is put back is asked for again");
        }
    }

    #[test]
    fn the_identity_changes_no_set() {
        let cuts = PageAlignment::identity(9000).unwrap();
        let mut pages = PageSet::empty(3);
        pages.insert(2);
        assert_eq!(cuts.to_aligned(&pages), pages);
        assert_eq!(cuts.to_disk(&pages), pages);
    }
}
