//! Dirty log of one page array: for each consumer, the pages written since it last collected them.
//!
//! The kernel (or the block layer) keeps one dirty set per array, and reading it clears it. Several consumers
//! follow the same array (the store's next checkpoint, a migration, a standby), so each scan is recorded here
//! for all of them. Sets that could not be used are put back here too: dirty state has no other place, so
//! nothing else can lose it.
//!
//! A consumer may see the array through a [`PageView`], which groups its bytes into other pages. The
//! consumer's set then holds pages of the view from the scan on, so it never has to be translated back.

use std::collections::BTreeMap;
use whimbrel_core::{PageRun, PageSet};
use whimbrel_machine::{PageArray, PageError, PageView};

/// Consumer of the changes of an array.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Consumer {
    /// Capsule store: what changed since the machine's last committed checkpoint.
    Store,
    /// Running migration: what the target does not have yet.
    Migration,
    /// Protection: what the standby does not have yet.
    Standby,
}

/// Page array and, for each consumer, the pages that it has not collected.
pub struct DirtyLog {
    array: Box<dyn PageArray>,
    views: BTreeMap<Consumer, Box<dyn PageView>>,
    dirty: BTreeMap<Consumer, PageSet>,
    /// Whether the array's dirty set was ever read.
    scanned: bool,
}

impl DirtyLog {
    /// Creates a log without consumers.
    pub fn new(array: Box<dyn PageArray>) -> Self {
        Self { array, views: BTreeMap::new(), dirty: BTreeMap::new(), scanned: false }
    }

    /// Name of the array.
    pub fn name(&self) -> &str {
        self.array.name()
    }

    /// Length of the array in pages.
    pub fn page_count(&self) -> u64 {
        self.array.page_count()
    }

    /// Length in pages of the array as `who` sees it.
    pub fn page_count_for(&self, who: Consumer) -> u64 {
        self.views.get(&who).map_or_else(|| self.array.page_count(), |view| view.page_count())
    }

    /// Makes `who` see the array through `view`, or as it is. Detaches `who`, because its set was of other
    /// pages.
    pub fn set_view(&mut self, who: Consumer, view: Option<Box<dyn PageView>>) {
        self.detach(who);
        match view {
            Some(view) => self.views.insert(who, view),
            None => self.views.remove(&who),
        };
    }

    /// Attaches a consumer that has no copy at all: every page that may hold content is dirty for it.
    pub fn attach_all(&mut self, who: Consumer) -> Result<(), PageError> {
        // Armed first, listed second: a page that becomes populated in between is in one of the two.
        self.refresh()?;
        let populated = self.array.populated()?;
        let populated = match self.views.get(&who) {
            Some(view) => view.view_pages(&populated),
            None => populated,
        };
        self.dirty.insert(who, populated);
        Ok(())
    }

    /// Attaches a consumer that lacks only the pages `unseen`.
    pub fn attach_from(&mut self, who: Consumer, unseen: PageSet) -> Result<(), PageError> {
        assert_eq!(unseen.len(), self.page_count_for(who), "a set of another array");
        self.refresh()?;
        self.dirty.insert(who, unseen);
        Ok(())
    }

    /// Attaches `who`, whose copy equals the array at its creation, as the first consumer of a new array. Its
    /// pages are those written since then; the first scan finds them, so this call costs nothing, however
    /// large the array. After an earlier scan that knowledge is lost, and every page is dirty for `who`.
    pub fn attach_new(&mut self, who: Consumer) {
        let pages = self.page_count_for(who);
        let unseen = if self.scanned { PageSet::full(pages) } else { PageSet::empty(pages) };
        self.dirty.insert(who, unseen);
    }

    /// Whether `who` is attached.
    pub fn is_attached(&self, who: Consumer) -> bool {
        self.dirty.contains_key(&who)
    }

    /// Detaches the consumer `who`.
    pub fn detach(&mut self, who: Consumer) {
        self.dirty.remove(&who);
    }

    /// Scans the array once and records the written pages for every consumer.
    pub fn refresh(&mut self) -> Result<(), PageError> {
        let dirty = self.array.take_dirty()?;
        self.scanned = true;
        for (who, set) in &mut self.dirty {
            match self.views.get(who) {
                Some(view) => set.union(&view.view_pages(&dirty)),
                None => set.union(&dirty),
            }
        }
        Ok(())
    }

    /// Takes the dirty pages of `who` up to now. Return those that do not reach it with
    /// [`DirtyLog::put_back`].
    pub fn collect(&mut self, who: Consumer) -> Result<PageSet, PageError> {
        self.refresh()?;
        let pages = self.page_count_for(who);
        Ok(self.dirty.get_mut(&who).map_or_else(|| PageSet::empty(pages), PageSet::take))
    }

    /// Dirty pages of `who` as of the last scan, without taking them: during a round, the pages that were
    /// written again since it began.
    pub fn dirty_pages(&self, who: Consumer) -> Option<&PageSet> {
        self.dirty.get(&who)
    }

    /// Returns `pages` that did not reach `who` to its dirty set.
    pub fn put_back(&mut self, who: Consumer, pages: &PageSet) {
        if let Some(set) = self.dirty.get_mut(&who) {
            set.union(pages);
        }
    }

    /// Copies the pages of `run` into `out`.
    pub fn read(&self, run: PageRun, out: &mut [u8]) -> Result<(), PageError> {
        self.array.read(run, out)
    }

    /// Copies the pages of `run`, as `who` sees them, into `out`.
    pub fn read_for(&self, who: Consumer, run: PageRun, out: &mut [u8]) -> Result<(), PageError> {
        match self.views.get(&who) {
            Some(view) => view.read(run, out),
            None => self.array.read(run, out),
        }
    }
}

whimbrel_core::opaque_debug!(DirtyLog);
