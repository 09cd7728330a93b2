//! Who still has to see which page of an array.
//!
//! The kernel (or the block layer) keeps one dirty set an array, and reading it clears it. Several parties
//! follow the same array (the store's next checkpoint, a migration, a standby), so each scan is entered here
//! for all of them. This is also the one place where a set that could not be used is put back: nothing else
//! holds dirty state, so nothing else can lose it.
//!
//! A follower may see the array through a [`PageView`], which cuts it into other pages. Its set is of pages
//! of the view from the scan on: what others follow, and what is put back for it, never has to be translated
//! back.

use std::collections::BTreeMap;
use whimbrel_core::{PageRun, PageSet};
use whimbrel_machine::{PageArray, PageError, PageView};

/// A party that follows the changes of an array.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Consumer {
    /// The capsule store: what changed since the machine's last committed checkpoint.
    Store,
    /// A migration under way: what the target does not have yet.
    Migration,
    /// A protection: what the standby does not have yet.
    Standby,
}

/// A page array and, for each follower, the pages it has not seen.
pub struct DirtyLog {
    array: Box<dyn PageArray>,
    views: BTreeMap<Consumer, Box<dyn PageView>>,
    unseen: BTreeMap<Consumer, PageSet>,
    /// Whether the array's dirty set was ever taken.
    scanned: bool,
}

impl DirtyLog {
    /// A ledger without followers.
    pub fn new(array: Box<dyn PageArray>) -> Self {
        Self { array, views: BTreeMap::new(), unseen: BTreeMap::new(), scanned: false }
    }

    /// The array's name.
    pub fn name(&self) -> &str {
        self.array.name()
    }

    /// The array's length in pages.
    pub fn page_count(&self) -> u64 {
        self.array.page_count()
    }

    /// The length in pages of what `who` sees.
    pub fn page_count_for(&self, who: Consumer) -> u64 {
        self.views.get(&who).map_or_else(|| self.array.page_count(), |view| view.page_count())
    }

    /// From now on `who` sees the array through `view`, or as it is. It no longer follows: its set was of
    /// other pages.
    pub fn see_through(&mut self, who: Consumer, view: Option<Box<dyn PageView>>) {
        self.unfollow(who);
        match view {
            Some(view) => self.views.insert(who, view),
            None => self.views.remove(&who),
        };
    }

    /// Begins to follow with every page that may differ from nothing: for a follower that has no copy at all.
    pub fn attach_all(&mut self, who: Consumer) -> Result<(), PageError> {
        // Armed first, listed second: a page that becomes populated in between is in one of the two.
        self.refresh()?;
        let populated = self.array.populated()?;
        let populated = match self.views.get(&who) {
            Some(view) => view.of_array(&populated),
            None => populated,
        };
        self.unseen.insert(who, populated);
        Ok(())
    }

    /// Begins to follow from `unseen` on: for a follower that has everything else already.
    pub fn attach_from(&mut self, who: Consumer, unseen: PageSet) -> Result<(), PageError> {
        assert_eq!(unseen.len(), self.page_count_for(who), "a set of another array");
        self.refresh()?;
        self.unseen.insert(who, unseen);
        Ok(())
    }

    /// Begins to follow an array that was made as `who` has it, and that nobody has followed yet: what was
    /// written since then is what `who` has not seen. The first scan finds it, so this looks at nothing,
    /// however large the array. If there was a scan already, that is forgotten, and `who` has seen nothing.
    pub fn attach_new(&mut self, who: Consumer) {
        let pages = self.page_count_for(who);
        let unseen = if self.scanned { PageSet::full(pages) } else { PageSet::empty(pages) };
        self.unseen.insert(who, unseen);
    }

    /// Whether `who` follows.
    pub fn is_followed_by(&self, who: Consumer) -> bool {
        self.unseen.contains_key(&who)
    }

    /// Forgets `who`.
    pub fn unfollow(&mut self, who: Consumer) {
        self.unseen.remove(&who);
    }

    /// Enters what was written since the last scan for every follower.
    pub fn refresh(&mut self) -> Result<(), PageError> {
        let dirty = self.array.take_dirty()?;
        self.scanned = true;
        for (who, set) in &mut self.unseen {
            match self.views.get(who) {
                Some(view) => set.union(&view.of_array(&dirty)),
                None => set.union(&dirty),
            }
        }
        Ok(())
    }

    /// Takes what `who` has not seen, up to now. Give back with [`DirtyLog::put_back`] what does not reach
    /// it.
    pub fn collect(&mut self, who: Consumer) -> Result<PageSet, PageError> {
        self.refresh()?;
        let pages = self.page_count_for(who);
        Ok(self.unseen.get_mut(&who).map_or_else(|| PageSet::empty(pages), PageSet::take))
    }

    /// What `who` has not seen as of the last scan, without taking it: during a round, the pages that were
    /// dirtied again since the round began.
    pub fn unseen(&self, who: Consumer) -> Option<&PageSet> {
        self.unseen.get(&who)
    }

    /// `pages` did not reach `who` after all.
    pub fn put_back(&mut self, who: Consumer, pages: &PageSet) {
        if let Some(set) = self.unseen.get_mut(&who) {
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

impl std::fmt::Debug for DirtyLog {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Ledger").field("array", &self.name()).field("unseen", &self.unseen).finish()
    }
}
