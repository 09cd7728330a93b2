//! Allocation map: the allocated pages of an overlay in a live and a durable bitmap.
//!
//! The order of a flush guarantees that the durable bitmap lists only synced pages: copy the changed blocks
//! of the live bitmap, *then* sync the data, then write the copies, then sync them. A bit in a copy was set
//! after its page was written, so the sync of the data covers the page. Blocks are marked as changed after
//! their bits were set; a bit set during the copy is either in it or marks its block again.

use super::{format::HEADER_SIZE, mapped_bitmap::MappedWords};
use crate::bitmap;
use rustix::fs::fdatasync;
use std::sync::atomic::{AtomicU64, Ordering::SeqCst};
use std::{fs::File, io, os::unix::fs::FileExt};
use whimbrel_core::{PAGE_SIZE, PageRun, PageSet};

/// Words of a block, the unit in which the durable bitmap is written: a page of the file, 128 MiB of the
/// device.
const BLOCK_WORDS: usize = PAGE_SIZE / 8;

#[derive(Debug)]
pub(super) struct AllocationMap {
    pages: u64,
    live: MappedWords,
    durable: File,
    /// One bit for each block: the durable bitmap may lack bits of it.
    unsaved: Box<[AtomicU64]>,
}

/// Copies of bitmap blocks from before a sync of the data.
pub(super) struct UnsavedWords(Vec<(usize, Vec<u8>)>);

impl AllocationMap {
    /// Map of `live` and `durable`, which may lag behind in any number of blocks.
    pub(super) fn new(pages: u64, live: MappedWords, durable: File) -> io::Result<Self> {
        let blocks = live.words().len().div_ceil(BLOCK_WORDS);
        let owned = Self { pages, live, durable, unsaved: bitmap::empty(blocks as u64) };
        for block in 0..blocks {
            let live = owned.block(block);
            let mut saved = vec![0; live.len()];
            owned.durable.read_exact_at(&mut saved, block_offset(block))?;
            if live != saved {
                owned.mark(block);
            }
        }
        Ok(owned)
    }

    /// Map of `live` and `durable`, of which the durable one lacks at most the blocks of `unsaved`, a
    /// bitmap as [`AllocationMap::unsaved`] returns it; none if that is not one of this map.
    pub(super) fn passed(pages: u64, live: MappedWords, durable: File, unsaved: &[u64]) -> Option<Self> {
        let blocks = PageSet::from_words(live.words().len().div_ceil(BLOCK_WORDS) as u64, unsaved.to_vec())?;
        let owned = Self { pages, live, durable, unsaved: bitmap::empty(blocks.len()) };
        blocks.iter().for_each(|block| owned.mark(block as usize));
        Some(owned)
    }

    pub(super) fn durable(&self) -> &File {
        &self.durable
    }

    /// Blocks that the durable bitmap may lack. Exact while nothing is written and no sync runs.
    pub(super) fn unsaved(&self) -> Vec<u64> {
        self.unsaved.iter().map(|word| word.load(SeqCst)).collect()
    }

    fn mark(&self, block: usize) {
        bitmap::set(&self.unsaved, PageRun::new(block as u64, 1), |_| ());
    }

    /// Adds the pages of `run`, whose data has been written.
    pub(super) fn insert(&self, run: PageRun) {
        bitmap::set(self.live.words(), run, |word| self.mark(word / BLOCK_WORDS));
    }

    /// Removes the pages of `run`, which nothing reads or writes meanwhile.
    pub(super) fn remove(&self, run: PageRun) {
        bitmap::clear(self.live.words(), run, |word| self.mark(word / BLOCK_WORDS));
    }

    /// Whether `page` is allocated, and the number of pages from it on, at most up to `end`, with the same
    /// state.
    pub(super) fn run_at(&self, page: u64, end: u64) -> (bool, u64) {
        bitmap::run_at(self.live.words(), page, end)
    }

    /// Whether every page of `run` is allocated.
    pub(super) fn has_all(&self, run: PageRun) -> bool {
        bitmap::all(self.live.words(), run)
    }

    pub(super) fn to_set(&self) -> PageSet {
        let mut set = PageSet::empty(self.pages);
        for (index, word) in self.live.words().iter().enumerate() {
            bitmap::add_word(&mut set, index, word.load(SeqCst));
        }
        set
    }

    /// Copies the blocks that the durable bitmap lacks. Call it *before* the data is synced.
    pub(super) fn take_unsaved(&self) -> UnsavedWords {
        let mut blocks = Vec::new();
        for (index, marks) in self.unsaved.iter().enumerate() {
            let mut marks = marks.swap(0, SeqCst);
            while marks != 0 {
                let block = index * 64 + marks.trailing_zeros() as usize;
                blocks.push((block, self.block(block)));
                marks &= marks - 1;
            }
        }
        UnsavedWords(blocks)
    }

    /// Makes the copied blocks durable. Call it *after* the data is synced.
    pub(super) fn save(&self, unsaved: &UnsavedWords) -> io::Result<()> {
        for (block, bytes) in &unsaved.0 {
            self.durable.write_all_at(bytes, block_offset(*block))?;
        }
        if !unsaved.0.is_empty() {
            fdatasync(&self.durable)?;
        }
        Ok(())
    }

    fn block(&self, block: usize) -> Vec<u8> {
        let words = self.live.words();
        let end = words.len().min((block + 1) * BLOCK_WORDS);
        words[block * BLOCK_WORDS..end].iter().flat_map(|word| word.load(SeqCst).to_le_bytes()).collect()
    }
}

fn block_offset(block: usize) -> u64 {
    (HEADER_SIZE + block * PAGE_SIZE) as u64
}
