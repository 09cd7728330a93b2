//! Blocks of shared memory that the target has touched.
//!
//! A scan walks the page table of the target, and a mark on an absent page takes a place in it. A guest may
//! have far more memory than it ever touches, so only blocks in which the RAM file has data are marked and
//! scanned: a page that was never touched is a hole in the file.

use crate::residency;
use std::{fs::File, io};
use whimbrel_core::{PageRun, PageSet};

/// Pages of a block: what one table of the lowest level describes on the processors that we run on.
const BLOCK: u64 = 512;

/// The blocks of a span that hold data, as far as known.
#[derive(Debug)]
pub(crate) struct TrackedBlocks {
    pages: u64,
    blocks: PageSet,
}

impl TrackedBlocks {
    /// None of a span of so many pages.
    pub(crate) fn none(pages: u64) -> Self {
        Self { pages, blocks: PageSet::empty(pages.div_ceil(BLOCK)) }
    }

    /// Pages of the tracked blocks.
    pub(crate) fn runs(&self) -> impl Iterator<Item = PageRun> {
        self.blocks.runs().map(|run| pages_of(run, self.pages))
    }

    /// Runs of blocks that hold data by now and are not tracked yet.
    pub(crate) fn find_new(&self, file: &File, offset: u64) -> io::Result<Vec<PageRun>> {
        let mut found = PageSet::empty(self.blocks.len());
        let mut from = 0;
        let ends = self.blocks.runs().map(|run| (run.start, run.end()));
        for (end, next) in ends.chain([(self.blocks.len(), self.blocks.len())]) {
            let mut block = from;
            while block < end {
                let gap = pages_of(PageRun::new(block, end - block), self.pages);
                let page = residency::next_data(file, offset, gap, gap.start)?;
                if page == gap.end() {
                    break;
                }
                found.insert(page / BLOCK);
                block = page / BLOCK + 1;
            }
            from = next;
        }
        Ok(found.runs().map(|run| pages_of(run, self.pages)).collect())
    }

    /// Tracks the blocks of a run that [`TrackedBlocks::find_new`] has found.
    pub(crate) fn insert(&mut self, run: PageRun) {
        let first = run.start / BLOCK;
        self.blocks.insert_run(PageRun::new(first, run.end().div_ceil(BLOCK) - first));
    }
}

fn pages_of(blocks: PageRun, pages: u64) -> PageRun {
    let start = blocks.start * BLOCK;
    PageRun::new(start, (blocks.end() * BLOCK).min(pages) - start)
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::os::unix::fs::FileExt as _;
    use whimbrel_core::PAGE_SIZE;

    #[test]
    fn blocks_with_data_are_found_once_and_the_last_one_may_be_short() {
        let pages = 10 * BLOCK + 7;
        let file = tempfile::tempfile_in("/dev/shm").unwrap();
        file.set_len(pages * PAGE_SIZE as u64).unwrap();
        let touch = |page: u64| file.write_all_at(b"x", page * PAGE_SIZE as u64).unwrap();
        let mut tracked = TrackedBlocks::none(pages);
        assert_eq!(tracked.find_new(&file, 0).unwrap(), []);
        [3 * BLOCK + 5, 4 * BLOCK, pages - 1].into_iter().for_each(touch);
        let found = tracked.find_new(&file, 0).unwrap();
        assert_eq!(found, [PageRun::new(3 * BLOCK, 2 * BLOCK), PageRun::new(10 * BLOCK, 7)]);
        found.into_iter().for_each(|run| tracked.insert(run));
        assert_eq!(tracked.find_new(&file, 0).unwrap(), []);
        [0, 5 * BLOCK + 1, 9 * BLOCK].into_iter().for_each(touch);
        let found = tracked.find_new(&file, 0).unwrap();
        assert_eq!(found, [0, 5, 9].map(|block| PageRun::new(block * BLOCK, BLOCK)));
        found.into_iter().for_each(|run| tracked.insert(run));
        let all = tracked.runs().map(|run| run.len).sum::<u64>();
        assert_eq!(all, 5 * BLOCK + BLOCK + 7 - BLOCK);
    }
}
