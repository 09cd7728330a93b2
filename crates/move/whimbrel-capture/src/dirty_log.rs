//! Dirty log of one page array: for each consumer, the pages written since it last collected them.
//!
//! The kernel (or the block layer) keeps one dirty set per array, and reading it clears it. Several consumers
//! follow the same array (the store's next checkpoint, a migration, a standby), so each scan is recorded here
//! for all of them. Sets that could not be used are put back here too: dirty state has no other place, so
//! nothing else can lose it.
//!
//! A consumer may see the array through a [`PageView`], which groups its bytes into other pages. The
//! consumer's set then holds pages of the view from the scan on, so it never has to be translated back.

use serde::{Deserialize, Serialize};
use std::collections::BTreeMap;
use whimbrel_core::{PageRun, PageSet};
use whimbrel_machine::{PageArray, PageError, PageView};

/// Consumer of the changes of an array.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
pub enum Consumer {
    /// Capsule store: what changed since the machine's last committed checkpoint.
    Store,
    /// Running migration: what the target does not have yet.
    Migration,
    /// Protection: what the standby does not have yet.
    Standby,
}

/// What a dirty log knows beside its array, in plain types: for another process that goes on with the
/// array.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct DirtyLogState {
    /// Name of the array.
    pub array: String,
    /// Dirty pages of each consumer.
    pub dirty: Vec<ConsumerPages>,
}

/// Dirty pages of one consumer, as it sees the array.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct ConsumerPages {
    /// Consumer that lacks them.
    pub consumer: Consumer,
    /// Number of pages that it sees.
    pub pages: u64,
    /// Bit `p % 64` of word `p / 64` is set if it lacks page `p`.
    pub words: Vec<u64>,
}

/// The state of a dirty log does not fit the array or the views of the consumers.
#[derive(Debug, thiserror::Error)]
#[error("the dirty pages passed for {array} are not those of this array")]
pub struct WrongState {
    /// Name of the array.
    pub array: String,
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

    /// Scans the array once more and returns the dirty pages of all consumers, for another process. Nothing
    /// may write the array from then on until that process scans it, or this one again, which keeps its
    /// sets.
    pub fn export(&mut self) -> Result<DirtyLogState, PageError> {
        self.refresh()?;
        let dirty = self.dirty.iter().map(|(who, set)| ConsumerPages {
            consumer: *who,
            pages: set.len(),
            words: set.words().to_vec(),
        });
        Ok(DirtyLogState { array: self.name().to_owned(), dirty: dirty.collect() })
    }

    /// Attaches the consumers of `state`, which [`DirtyLog::export`] returned in another process for the
    /// same array. Set their views first.
    ///
    /// # Errors
    /// If it is the state of another array or view; then no consumer is attached.
    pub fn import(&mut self, state: DirtyLogState) -> Result<(), WrongState> {
        let wrong = || WrongState { array: self.name().to_owned() };
        if state.array != self.name() {
            return Err(wrong());
        }
        let mut dirty = BTreeMap::new();
        for ConsumerPages { consumer, pages, words } in state.dirty {
            let set = PageSet::from_words(pages, words);
            let set = set.filter(|set| set.len() == self.page_count_for(consumer)).ok_or_else(wrong)?;
            if dirty.insert(consumer, set).is_some() {
                return Err(wrong());
            }
        }
        self.dirty = dirty;
        // Another process has read the dirty set of the array before.
        self.scanned = true;
        Ok(())
    }

    /// Makes every page dirty for every consumer: what was written is not known any more.
    pub fn forget(&mut self) {
        for (who, set) in &mut self.dirty {
            let pages = self.views.get(who).map_or_else(|| self.array.page_count(), |view| view.page_count());
            *set = PageSet::full(pages);
        }
        self.scanned = true;
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

#[cfg(test)]
mod tests {
    use super::*;
    use std::sync::{Arc, Mutex};
    use whimbrel_core::PAGE_SIZE;

    /// Array whose dirty set is what the test has put there.
    struct Pages(Arc<Mutex<PageSet>>);

    impl PageArray for Pages {
        fn name(&self) -> &str {
            "disk0"
        }

        fn page_count(&self) -> u64 {
            self.0.lock().unwrap().len()
        }

        fn populated(&mut self) -> Result<PageSet, PageError> {
            Ok(PageSet::full(self.page_count()))
        }

        fn take_dirty(&mut self) -> Result<PageSet, PageError> {
            Ok(self.0.lock().unwrap().take())
        }

        fn put_back(&mut self, pages: &PageSet) {
            self.0.lock().unwrap().union(pages);
        }

        fn read(&self, run: PageRun, out: &mut [u8]) -> Result<(), PageError> {
            assert_eq!(out.len(), run.len as usize * PAGE_SIZE);
            Ok(())
        }
    }

    /// View with two pages for each page of the array.
    struct Halves;

    impl PageView for Halves {
        fn page_count(&self) -> u64 {
            200
        }

        fn view_pages(&self, pages: &PageSet) -> PageSet {
            let mut halves = PageSet::empty(200);
            pages.iter().for_each(|page| halves.insert_run(PageRun::new(2 * page, 2)));
            halves
        }

        fn read(&self, _: PageRun, _: &mut [u8]) -> Result<(), PageError> {
            Ok(())
        }
    }

    fn log() -> (DirtyLog, Arc<Mutex<PageSet>>) {
        let written = Arc::new(Mutex::new(PageSet::empty(100)));
        (DirtyLog::new(Box::new(Pages(written.clone()))), written)
    }

    #[test]
    fn each_consumer_lacks_the_same_pages_in_the_next_process_and_in_this_one_if_it_goes_on() {
        let (mut old, written) = log();
        old.set_view(Consumer::Migration, Some(Box::new(Halves)));
        old.attach_new(Consumer::Store);
        old.attach_from(Consumer::Migration, PageSet::empty(200)).unwrap();
        written.lock().unwrap().insert(7);
        old.collect(Consumer::Store).unwrap();
        written.lock().unwrap().insert(9);
        let state = old.export().unwrap();
        let (mut new, _) = log();
        new.set_view(Consumer::Migration, Some(Box::new(Halves)));
        new.import(state).unwrap();
        for log in [&mut new, &mut old] {
            let pages = |log: &DirtyLog, who| log.dirty_pages(who).unwrap().iter().collect::<Vec<_>>();
            assert_eq!(pages(log, Consumer::Store), [9]);
            assert_eq!(pages(log, Consumer::Migration), [14, 15, 18, 19]);
            assert!(!log.is_attached(Consumer::Standby));
        }
        new.attach_new(Consumer::Standby);
        assert_eq!(new.dirty_pages(Consumer::Standby).unwrap().count(), 100, "the array was scanned before");
        old.forget();
        assert_eq!(old.dirty_pages(Consumer::Migration).unwrap().count(), 200);
    }

    #[test]
    fn dirty_pages_of_another_array_or_view_are_refused_whole() {
        let (mut old, _) = log();
        old.attach_new(Consumer::Store);
        let state = old.export().unwrap();
        let mut views = log().0;
        views.set_view(Consumer::Store, Some(Box::new(Halves)));
        views.import(state.clone()).unwrap_err();
        let mut other = state.clone();
        other.array = "disk1".to_owned();
        let mut past_end = state.clone();
        past_end.dirty[0].words[1] |= 1 << 63;
        let mut twice = state.clone();
        twice.dirty.push(state.dirty[0].clone());
        for wrong in [other, past_end, twice] {
            let mut new = log().0;
            new.import(wrong).unwrap_err();
            assert!(!new.is_attached(Consumer::Store));
        }
    }
}
