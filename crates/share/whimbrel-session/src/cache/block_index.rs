//! Block index: which page of which file is in which frame, and which frame may be reused. Pure: no I/O, no
//! clock.
//!
//! A cache block is a run of pages of a file; a cache frame is room for one block. A block of zeros needs no
//! frame.
//!
//! The rule that makes a crash harmless: a frame is *frozen* while a durable record may promise its content.
//! A dirty write to a frozen frame goes to another frame, and the frozen one is retired. It becomes free only
//! after the next barrier, when the record that replaced the promise is durable.

use super::journal_record::FileId;
use crate::proto::PAGE;
use std::collections::{BTreeMap, HashMap, HashSet};

/// Checksum of a page of zeros, which is never read from a frame.
pub(super) const ZERO: u32 = 0;

pub(super) type PageMask = u64;

/// Size of the blocks and number of frames.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Geometry {
    /// Pages of a block, 1 to 64.
    pub pages: u32,
    /// Number of frames.
    pub frames: u32,
}

impl Geometry {
    /// Blocks of `block` bytes (4 KiB to 256 KiB, whole pages), as many as fit into `capacity` bytes.
    pub fn new(block: u64, capacity: u64) -> Option<Self> {
        let pages = block / PAGE as u64;
        let good = block.is_multiple_of(PAGE as u64) && (1..=64).contains(&pages);
        let frames = u32::try_from(capacity / block.max(1)).ok()?;
        (good && frames >= 4).then_some(Self { pages: pages as u32, frames })
    }

    /// Bytes of a block.
    pub fn block(&self) -> u64 {
        u64::from(self.pages) * PAGE as u64
    }

    pub(super) fn all(&self) -> PageMask {
        if self.pages == 64 { PageMask::MAX } else { (1 << self.pages) - 1 }
    }
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub(super) struct Key {
    pub(super) file: FileId,
    pub(super) block: u64,
}

#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Block {
    /// Frame of its pages, if any of them is not zero.
    pub(super) frame: Option<u32>,
    pub(super) valid: PageMask,
    /// Pages that the server does not have; a subset of `valid`.
    pub(super) dirty: PageMask,
    /// Checksum of each page that is here.
    pub(super) sums: Box<[u32]>,
    /// Goes up with each dirty write, so that a write-back knows whether it sent the latest content.
    pub(super) generation: u32,
    /// Whether a durable record may promise the frame's content.
    pub(super) frozen: bool,
}

/// Preparation for storing pages.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct WritePlan {
    /// Frame to write to; none if the whole block will be zeros.
    pub(super) frame: Option<u32>,
    /// Frame and pages to copy first.
    pub(super) copy: Option<(u32, PageMask)>,
}

/// Reason why no frame is free.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum CacheFull {
    /// Frames become free at the next barrier.
    Barrier,
    Dirty,
}

#[derive(Debug)]
pub(super) struct BlockIndex {
    geometry: Geometry,
    files: HashMap<FileId, BTreeMap<u64, Block>>,
    owner: Vec<Option<Key>>,
    free: Vec<u32>,
    retired: Vec<u32>,
    /// Frames that are not used because the storage must not grow.
    withheld: Vec<u32>,
    /// Frames below this number were used before, so that the storage has room for them.
    reached: u32,
    clock_hand: u32,
    /// Blocks with which the next barrier has to do something: dirty ones that are not frozen, and frozen
    /// ones that became clean. Some that were removed, too.
    unsettled: HashSet<Key>,
    dirty_pages: u64,
    valid_pages: u64,
}

impl BlockIndex {
    pub(super) fn new(geometry: Geometry) -> Self {
        Self {
            geometry,
            files: HashMap::new(),
            owner: vec![None; geometry.frames as usize],
            free: (0..geometry.frames).rev().collect(),
            retired: Vec::new(),
            withheld: Vec::new(),
            reached: 0,
            clock_hand: 0,
            unsettled: HashSet::new(),
            dirty_pages: 0,
            valid_pages: 0,
        }
    }

    pub(super) fn get(&self, key: Key) -> Option<&Block> {
        self.files.get(&key.file)?.get(&key.block)
    }

    pub(super) fn blocks(&self, file: FileId) -> impl Iterator<Item = (u64, &Block)> {
        self.files.get(&file).into_iter().flatten().map(|(number, block)| (*number, block))
    }

    pub(super) fn all(&self) -> impl Iterator<Item = (Key, &Block)> {
        self.files.iter().flat_map(|(file, blocks)| {
            blocks.iter().map(|(block, state)| (Key { file: *file, block: *block }, state))
        })
    }

    pub(super) fn dirty_pages(&self) -> u64 {
        self.dirty_pages
    }

    pub(super) fn valid_pages(&self) -> u64 {
        self.valid_pages
    }

    pub(super) fn used_frames(&self) -> u32 {
        self.geometry.frames - (self.free.len() + self.withheld.len()) as u32
    }

    /// Whether frames that were never used may be used from now on.
    pub(super) fn set_growth(&mut self, allowed: bool) {
        if allowed {
            // Frames that have room already are used first.
            let rest = std::mem::take(&mut self.free);
            self.free = std::mem::take(&mut self.withheld);
            self.free.extend(rest);
        } else {
            let reached = self.reached;
            self.withheld.extend(self.free.extract_if(.., |frame| *frame >= reached));
        }
    }

    /// Plans storing `pages` of a block, of which `full` are not zero. `is_used` tells whether a frame and
    /// its block were used lately, and clears that mark. Evicted blocks are pushed to `gone`.
    pub(super) fn plan(
        &mut self,
        key: Key,
        pages: PageMask,
        full: PageMask,
        dirty: bool,
        is_used: impl Fn(u32, Key) -> bool,
        gone: &mut Vec<(Key, Block)>,
    ) -> Result<WritePlan, CacheFull> {
        let (frame, kept) = match self.get(key) {
            Some(block) if dirty && block.frozen => {
                // Promised content stays in its frame until the new promise is durable.
                (None, block.frame.map(|frame| (frame, self.stored_pages(key) & !pages)))
            }
            Some(block) => (block.frame, None),
            None => (None, None),
        };
        let needs = full != 0 || kept.is_some_and(|(_, pages)| pages != 0);
        if frame.is_some() || !needs {
            return Ok(WritePlan { frame, copy: None });
        }
        let frame = self.allocate(key, is_used, gone)?;
        Ok(WritePlan { frame: Some(frame), copy: kept.filter(|(_, pages)| *pages != 0) })
    }

    fn stored_pages(&self, key: Key) -> PageMask {
        self.get(key).map_or(0, |block| {
            let in_frame = |page: &u32| block.valid >> page & 1 == 1 && block.sums[*page as usize] != ZERO;
            (0..self.geometry.pages).filter(in_frame).fold(0, |pages, page| pages | 1 << page)
        })
    }

    fn allocate(
        &mut self,
        for_key: Key,
        is_used: impl Fn(u32, Key) -> bool,
        gone: &mut Vec<(Key, Block)>,
    ) -> Result<u32, CacheFull> {
        let mut looked = 0;
        while self.free.is_empty() && looked < 2 * self.geometry.frames {
            looked += 1;
            let frame = self.clock_hand;
            self.clock_hand = (self.clock_hand + 1) % self.geometry.frames;
            let Some(key) = self.owner[frame as usize] else { continue };
            let clean = self.get(key).is_some_and(|block| block.dirty == 0 && block.frame == Some(frame));
            if clean && key != for_key && !is_used(frame, key) {
                gone.extend(self.remove(key).map(|block| (key, block)));
            }
        }
        let none = if self.retired.is_empty() { CacheFull::Dirty } else { CacheFull::Barrier };
        let frame = self.free.pop().ok_or(none)?;
        self.reached = self.reached.max(frame + 1);
        Ok(frame)
    }

    /// Records that the pages were stored as planned.
    pub(super) fn apply_plan(
        &mut self,
        key: Key,
        plan: WritePlan,
        pages: PageMask,
        sums: &[(u32, u32)],
        dirty: bool,
    ) -> &Block {
        let count = self.geometry.pages as usize;
        let block = self.files.entry(key.file).or_default().entry(key.block).or_insert_with(|| Block {
            frame: None,
            valid: 0,
            dirty: 0,
            sums: vec![ZERO; count].into(),
            generation: 0,
            frozen: false,
        });
        let old = (block.frame, block.frozen);
        let before = (block.valid.count_ones(), block.dirty.count_ones());
        for (page, sum) in sums {
            block.sums[*page as usize] = *sum;
        }
        block.valid |= pages;
        if dirty {
            block.dirty |= pages;
            block.generation = block.generation.wrapping_add(1);
            block.frozen = false;
            self.unsettled.insert(key);
        }
        block.frame = plan.frame;
        self.valid_pages += u64::from(block.valid.count_ones() - before.0);
        self.dirty_pages += u64::from(block.dirty.count_ones() - before.1);
        if old.0 != plan.frame {
            if let Some(frame) = old.0 {
                self.release(frame, old.1);
            }
            if let Some(frame) = plan.frame {
                self.owner[frame as usize] = Some(key);
            }
        }
        &self.files[&key.file][&key.block]
    }

    fn release(&mut self, frame: u32, frozen: bool) {
        self.owner[frame as usize] = None;
        if frozen { self.retired.push(frame) } else { self.free.push(frame) }
    }

    /// Frees the frames without a block, after all blocks were restored.
    pub(super) fn finish_restore(&mut self) {
        self.free =
            (0..self.geometry.frames).rev().filter(|frame| self.owner[*frame as usize].is_none()).collect();
        self.reached = self.owner.iter().rposition(Option::is_some).map_or(0, |last| last as u32 + 1);
    }

    /// Restores a block from its record; [`Self::finish_restore`] follows the last one.
    pub(super) fn restore_block(&mut self, key: Key, block: Block) {
        if let Some(frame) = block.frame {
            self.owner[frame as usize] = Some(key);
        }
        self.valid_pages += u64::from(block.valid.count_ones());
        self.dirty_pages += u64::from(block.dirty.count_ones());
        self.files.entry(key.file).or_default().insert(key.block, block);
    }

    /// Removes a block, dirty or not.
    pub(super) fn remove(&mut self, key: Key) -> Option<Block> {
        let blocks = self.files.get_mut(&key.file)?;
        let block = blocks.remove(&key.block)?;
        if blocks.is_empty() {
            self.files.remove(&key.file);
        }
        self.valid_pages -= u64::from(block.valid.count_ones());
        self.dirty_pages -= u64::from(block.dirty.count_ones());
        if let Some(frame) = block.frame {
            self.release(frame, block.frozen);
        }
        Some(block)
    }

    pub(super) fn remove_pages(&mut self, key: Key, pages: PageMask) {
        let Some(block) = self.files.get_mut(&key.file).and_then(|blocks| blocks.get_mut(&key.block)) else {
            return;
        };
        self.valid_pages -= u64::from((block.valid & pages).count_ones());
        self.dirty_pages -= u64::from((block.dirty & pages).count_ones());
        block.valid &= !pages;
        block.dirty &= !pages;
        block.generation = block.generation.wrapping_add(1);
        if block.dirty == 0 && block.frozen {
            self.unsettled.insert(key);
        }
        if block.valid == 0 {
            self.remove(key);
        }
    }

    /// Marks pages as clean once the server has them, unless they were written again.
    pub(super) fn mark_clean(&mut self, key: Key, generation: u32, pages: PageMask) -> Option<&Block> {
        let block = self.files.get_mut(&key.file)?.get_mut(&key.block)?;
        if block.generation != generation {
            return None;
        }
        self.dirty_pages -= u64::from((block.dirty & pages).count_ones());
        block.dirty &= !pages;
        if block.dirty == 0 && block.frozen {
            self.unsettled.insert(key);
        }
        Some(block)
    }

    /// Begins a barrier: everything dirty is promised from here on. Returns what `end_barrier` needs.
    pub(super) fn start_barrier(&mut self) -> Barrier {
        let mut clean = Vec::new();
        for key in std::mem::take(&mut self.unsettled) {
            let block = self.files.get_mut(&key.file).and_then(|blocks| blocks.get_mut(&key.block));
            let Some(block) = block else { continue };
            if block.dirty != 0 {
                block.frozen = true;
            } else if block.frozen {
                clean.push((key, block.generation));
            }
        }
        Barrier { clean, retired: std::mem::take(&mut self.retired) }
    }

    /// Ends a barrier: every record before it and every frame is durable.
    pub(super) fn end_barrier(&mut self, barrier: Barrier) {
        for (key, generation) in barrier.clean {
            let block = self.files.get_mut(&key.file).and_then(|blocks| blocks.get_mut(&key.block));
            if let Some(block) = block.filter(|block| block.generation == generation && block.dirty == 0) {
                block.frozen = false;
            }
        }
        self.free.extend(barrier.retired);
    }
}

#[derive(Debug)]
pub(super) struct Barrier {
    clean: Vec<(Key, u32)>,
    retired: Vec<u32>,
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[derive(Debug, Clone)]
    enum Step {
        Write { block: u64, pages: PageMask, zero: bool },
        Fill { block: u64, pages: PageMask },
        Flush { block: u64 },
        Cut { block: u64, pages: PageMask },
        Remove { block: u64 },
        Begin,
        End,
    }

    fn step() -> impl Strategy<Value = Step> {
        let pages = 1u64..16;
        prop_oneof![
            4 => (0u64..12, pages.clone(), any::<bool>()).prop_map(|(block, pages, zero)| Step::Write { block, pages, zero }),
            2 => (0u64..12, pages.clone()).prop_map(|(block, pages)| Step::Fill { block, pages }),
            2 => (0u64..12).prop_map(|block| Step::Flush { block }),
            1 => (0u64..12, pages).prop_map(|(block, pages)| Step::Cut { block, pages }),
            1 => (0u64..12).prop_map(|block| Step::Remove { block }),
            1 => Just(Step::Begin),
            1 => Just(Step::End),
        ]
    }

    fn key(block: u64) -> Key {
        Key { file: 1, block }
    }

    fn check(index: &BlockIndex) {
        let mut used = HashSet::new();
        let (mut valid, mut dirty) = (0, 0);
        for (key, block) in index.all() {
            assert_eq!(block.dirty & !block.valid, 0);
            valid += u64::from(block.valid.count_ones());
            dirty += u64::from(block.dirty.count_ones());
            if let Some(frame) = block.frame {
                assert!(used.insert(frame), "frame {frame} is two blocks'");
                assert_eq!(index.owner[frame as usize], Some(key));
            }
        }
        for frame in index.free.iter().chain(&index.retired).chain(&index.withheld) {
            assert!(used.insert(*frame), "frame {frame} is free and used");
        }
        assert_eq!((valid, dirty), (index.valid_pages, index.dirty_pages));
    }

    proptest! {
        /// Frames that a durable record promises, as a power failure would find them, are never written.
        #[test]
        fn a_promised_frame_is_never_written(steps in proptest::collection::vec(step(), 1..200)) {
            let mut index = BlockIndex::new(Geometry { pages: 4, frames: 8 });
            let mut promised: HashMap<u64, u32> = HashMap::new();
            let mut under_way: Option<(Barrier, HashMap<u64, u32>)> = None;
            for step in steps {
                match step {
                    Step::Write { block, pages, zero } => {
                        let full = if zero { 0 } else { pages };
                        if let Ok(plan) = index.plan(key(block), pages, full, true, |_, _| false, &mut Vec::new()) {
                            if full != 0 {
                                let frame = plan.frame.unwrap();
                                prop_assert!(promised.values().all(|kept| *kept != frame), "overwrites {frame}");
                                if let Some((_, soon)) = &under_way { prop_assert!(soon.values().all(|kept| *kept != frame)); }
                            }
                            let sums: Vec<_> = (0..4).filter(|page| pages >> page & 1 == 1).map(|page| (page, u32::from(!zero))).collect();
                            index.apply_plan(key(block), plan, pages, &sums, true);
                        }
                    }
                    Step::Fill { block, pages } => {
                        let have = index.get(key(block)).map_or(0, |block| block.valid);
                        let pages = pages & !have;
                        if pages != 0 && let Ok(plan) = index.plan(key(block), pages, pages, false, |_, _| false, &mut Vec::new()) {
                            let sums: Vec<_> = (0..4).filter(|page| pages >> page & 1 == 1).map(|page| (page, 1)).collect();
                            index.apply_plan(key(block), plan, pages, &sums, false);
                        }
                    }
                    Step::Flush { block } => {
                        if let Some((generation, dirty)) = index.get(key(block)).map(|block| (block.generation, block.dirty)) {
                            index.mark_clean(key(block), generation, dirty);
                        }
                    }
                    Step::Cut { block, pages } => index.remove_pages(key(block), pages),
                    Step::Remove { block } => drop(index.remove(key(block))),
                    Step::Begin if under_way.is_none() => {
                        let barrier = index.start_barrier();
                        let soon = index.all().filter(|(_, block)| block.dirty != 0).filter_map(|(key, block)| Some((key.block, block.frame?))).collect();
                        under_way = Some((barrier, soon));
                    }
                    Step::End => if let Some((barrier, soon)) = under_way.take() {
                        index.end_barrier(barrier);
                        promised = soon;
                    },
                    Step::Begin => {}
                }
                check_with(&index, under_way.as_ref().map(|(barrier, _)| barrier));
            }
        }
    }

    #[test]
    fn a_barrier_looks_at_what_changed_and_not_at_all_that_is_cached() {
        let mut index = BlockIndex::new(Geometry { pages: 4, frames: 1000 });
        let store = |index: &mut BlockIndex, block, dirty| {
            let plan = index.plan(key(block), 1, 1, dirty, |_, _| false, &mut Vec::new()).unwrap();
            index.apply_plan(key(block), plan, 1, &[(0, 1)], dirty);
        };
        (0..900).for_each(|block| store(&mut index, block, false));
        (900..910).for_each(|block| store(&mut index, block, true));
        assert_eq!(index.unsettled.len(), 10);
        let barrier = index.start_barrier();
        index.end_barrier(barrier);
        assert_eq!(index.unsettled.len(), 0, "they stay dirty, and are promised");
        let generation = index.get(key(900)).unwrap().generation;
        index.mark_clean(key(900), generation, 1);
        assert_eq!(index.unsettled.len(), 1);
    }

    fn check_with(index: &BlockIndex, barrier: Option<&Barrier>) {
        check(index);
        for (key, block) in index.all().filter(|(_, block)| (block.dirty != 0) != block.frozen) {
            let ends = barrier.is_some_and(|barrier| barrier.clean.contains(&(key, block.generation)));
            assert!(ends || index.unsettled.contains(&key), "{key:?} is overlooked by barriers");
        }
        if let Some(barrier) = barrier {
            assert!(barrier.retired.iter().all(|frame| !index.free.contains(frame)));
        }
    }
}
