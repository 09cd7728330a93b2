//! Dirty observer: reads the dirty set of an array without clearing it for the array's consumers.
//!
//! The kernel keeps one dirty set per array, and reading it clears it. [`observable`] puts a layer between
//! the array and its [`DirtyLog`](crate::DirtyLog): the result of a scan by an [`Observation`] is added to
//! the log's next scan, and the result of a scan by the log to every observation. So each sees every page, in
//! any order of scans, also during a capture.
//!
//! Invariants: a page that an observation took is in the log's next set. An observation keeps nothing alive:
//! when the log is dropped, its machine has ended, and the observation reports that. The same while the
//! observer is closed, because the array passes to another process, whose dirty set a scan here would take.

use std::{
    collections::BTreeMap,
    sync::{Arc, Mutex, MutexGuard, PoisonError, Weak},
};
use whimbrel_core::{PageRun, PageSet};
use whimbrel_machine::{PageArray, PageError};

/// Source of observations of an array.
#[derive(Clone)]
pub struct DirtyObserver(Weak<Mutex<Shared>>);

/// Reader with a set of its own, which is empty at first. Dropping it ends the observation.
pub struct Observation {
    shared: Weak<Mutex<Shared>>,
    number: u64,
}

/// Error: the array is gone, and its machine with it.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[error("the machine has ended, or has left this host")]
pub struct MachineGone;

/// Reason why an observation could not be read.
#[derive(Debug, thiserror::Error)]
#[allow(missing_docs, reason = "the text of each variant says what it is")]
pub enum ObserveError {
    #[error(transparent)]
    Gone(#[from] MachineGone),
    #[error(transparent)]
    Array(#[from] PageError),
}

struct Shared {
    array: Box<dyn PageArray>,
    /// Pages scanned for observations and not yet returned to the log.
    unreported: PageSet,
    observations: BTreeMap<u64, PageSet>,
    next: u64,
    /// Whether only the log may scan.
    closed: bool,
}

struct ObservedArray {
    name: String,
    pages: u64,
    /// Second view of the array, so that long reads do not hold the lock.
    reader: Box<dyn PageArray>,
    shared: Arc<Mutex<Shared>>,
}

/// Returns the array for the dirty log, and its observer. `scanner` and `reader` are two views of the same
/// array; only `scanner` is scanned.
pub fn observable(
    scanner: Box<dyn PageArray>,
    reader: Box<dyn PageArray>,
) -> (Box<dyn PageArray>, DirtyObserver) {
    let (name, pages) = (scanner.name().to_owned(), scanner.page_count());
    let shared = Shared {
        array: scanner,
        unreported: PageSet::empty(pages),
        observations: BTreeMap::new(),
        next: 0,
        closed: false,
    };
    let shared = Arc::new(Mutex::new(shared));
    let tap = DirtyObserver(Arc::downgrade(&shared));
    (Box::new(ObservedArray { name, pages, reader, shared }), tap)
}

impl Shared {
    /// Scans the array and records the result for all observations.
    fn scan(&mut self) -> Result<PageSet, PageError> {
        let dirty = self.array.take_dirty()?;
        self.observations.values_mut().for_each(|set| set.union(&dirty));
        Ok(dirty)
    }
}

impl DirtyObserver {
    /// Lets no observation scan from now on, or lets them scan again. A scan under way has ended on return.
    pub fn set_closed(&self, closed: bool) {
        if let Some(shared) = self.0.upgrade() {
            lock(&shared).closed = closed;
        }
    }

    /// Starts an observation: the first [`Observation::take`] has what is written from now on.
    pub fn observe(&self) -> Result<Observation, ObserveError> {
        let shared = self.0.upgrade().ok_or(MachineGone)?;
        let mut held = open(&shared)?;
        let dirty = held.scan()?;
        held.unreported.union(&dirty);
        let number = held.next;
        held.next += 1;
        let nothing = PageSet::empty(held.array.page_count());
        held.observations.insert(number, nothing);
        Ok(Observation { shared: self.0.clone(), number })
    }

    /// Length of the array in pages, and how many of them hold something.
    pub fn extent(&self) -> Result<(u64, u64), ObserveError> {
        let shared = self.0.upgrade().ok_or(MachineGone)?;
        let mut held = open(&shared)?;
        Ok((held.array.page_count(), held.array.populated()?.count()))
    }
}

impl Observation {
    /// Takes what was written since the last call. No consumer of the array misses any of it.
    pub fn take(&mut self) -> Result<PageSet, ObserveError> {
        let shared = self.shared.upgrade().ok_or(MachineGone)?;
        let mut held = open(&shared)?;
        let dirty = held.scan()?;
        held.unreported.union(&dirty);
        Ok(held.observations.get_mut(&self.number).map_or(dirty, PageSet::take))
    }
}

impl Drop for Observation {
    fn drop(&mut self) {
        if let Some(shared) = self.shared.upgrade() {
            lock(&shared).observations.remove(&self.number);
        }
    }
}

impl PageArray for ObservedArray {
    fn name(&self) -> &str {
        &self.name
    }

    fn page_count(&self) -> u64 {
        self.pages
    }

    fn populated(&mut self) -> Result<PageSet, PageError> {
        lock(&self.shared).array.populated()
    }

    fn take_dirty(&mut self) -> Result<PageSet, PageError> {
        let mut shared = lock(&self.shared);
        let mut dirty = shared.scan()?;
        dirty.union(&shared.unreported.take());
        Ok(dirty)
    }

    /// Pages put back were not written again, so observations do not get them.
    fn put_back(&mut self, pages: &PageSet) {
        lock(&self.shared).unreported.union(pages);
    }

    fn read(&self, run: PageRun, out: &mut [u8]) -> Result<(), PageError> {
        self.reader.read(run, out)
    }
}

whimbrel_core::opaque_debug!(DirtyObserver, Observation);

fn open(shared: &Mutex<Shared>) -> Result<MutexGuard<'_, Shared>, MachineGone> {
    let held = lock(shared);
    if held.closed { Err(MachineGone) } else { Ok(held) }
}

fn lock(shared: &Mutex<Shared>) -> MutexGuard<'_, Shared> {
    shared.lock().unwrap_or_else(PoisonError::into_inner)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{Consumer, DirtyLog};
    use proptest::prelude::*;

    const PAGES: u64 = 96;

    /// Array that the test writes to, and whose scans can be made to fail.
    #[derive(Clone, Default)]
    struct Array(Arc<Mutex<(Vec<u64>, bool)>>);

    impl Array {
        fn write(&self, page: u64) {
            self.0.lock().unwrap().0.push(page);
        }
    }

    impl PageArray for Array {
        fn name(&self) -> &str {
            "memory"
        }

        fn page_count(&self) -> u64 {
            PAGES
        }

        fn populated(&mut self) -> Result<PageSet, PageError> {
            Ok(PageSet::full(PAGES))
        }

        fn take_dirty(&mut self) -> Result<PageSet, PageError> {
            let mut state = self.0.lock().unwrap();
            if state.1 {
                return Err(PageError::new("memory", "scan", "on purpose"));
            }
            let mut set = PageSet::empty(PAGES);
            state.0.drain(..).for_each(|page| {
                set.insert(page);
            });
            Ok(set)
        }

        fn put_back(&mut self, _: &PageSet) {}

        fn read(&self, _: PageRun, out: &mut [u8]) -> Result<(), PageError> {
            out.fill(7);
            Ok(())
        }
    }

    #[derive(Debug, Clone)]
    enum Step {
        Write(u64),
        Watch(usize),
        Follow,
        Fail(bool),
    }

    fn steps() -> impl Strategy<Value = Vec<Step>> {
        let step = prop_oneof![
            6 => (0..PAGES).prop_map(Step::Write),
            2 => (0..2usize).prop_map(Step::Watch),
            2 => Just(Step::Follow),
            1 => any::<bool>().prop_map(Step::Fail),
        ];
        proptest::collection::vec(step, 0..60)
    }

    proptest! {
        #[test]
        fn whoever_looks_first_every_follower_and_every_watch_sees_every_write(steps in steps()) {
            let array = Array::default();
            let (followed, tap) = observable(Box::new(array.clone()), Box::new(array.clone()));
            let mut ledger = DirtyLog::new(followed);
            ledger.attach_from(Consumer::Store, PageSet::empty(PAGES)).unwrap();
            let mut watches = [tap.observe().unwrap(), tap.observe().unwrap()];
            let mut expected = vec![PageSet::empty(PAGES); 3];
            let mut failing = false;
            for step in steps {
                match step {
                    Step::Write(page) => {
                        array.write(page);
                        expected.iter_mut().for_each(|set| {
                set.insert(page);
            });
                    }
                    Step::Fail(fails) => {
                        failing = fails;
                        array.0.lock().unwrap().1 = fails;
                    }
                    Step::Watch(which) => match watches[which].take() {
                        Ok(seen) => prop_assert_eq!(seen, expected[which].take()),
                        Err(_) => prop_assert!(failing),
                    },
                    Step::Follow => match ledger.collect(Consumer::Store) {
                        Ok(seen) => prop_assert_eq!(seen, expected[2].take()),
                        Err(_) => prop_assert!(failing),
                    },
                }
            }
            array.0.lock().unwrap().1 = false;
            prop_assert_eq!(ledger.collect(Consumer::Store).unwrap(), expected[2].take());
            for (watch, mut expected) in watches.iter_mut().zip(expected) {
                prop_assert_eq!(watch.take().unwrap(), expected.take());
            }
        }
    }

    #[test]
    fn a_watch_keeps_nothing_alive_and_says_that_the_machine_is_gone() {
        let array = Array::default();
        let (followed, tap) = observable(Box::new(array.clone()), Box::new(array.clone()));
        let mut watch = tap.observe().unwrap();
        drop(followed);
        assert_eq!(Arc::strong_count(&array.0), 1, "the array has gone");
        assert!(matches!(watch.take(), Err(ObserveError::Gone(MachineGone))));
        assert!(matches!(tap.observe(), Err(ObserveError::Gone(MachineGone))));
    }

    #[test]
    fn while_the_array_passes_to_another_process_no_watch_takes_its_dirty_pages() {
        let array = Array::default();
        let (followed, tap) = observable(Box::new(array.clone()), Box::new(array.clone()));
        let mut watch = tap.observe().unwrap();
        tap.set_closed(true);
        array.write(3);
        assert!(matches!(watch.take(), Err(ObserveError::Gone(MachineGone))));
        assert!(tap.observe().is_err() && tap.extent().is_err());
        assert_eq!(array.0.lock().unwrap().0, [3], "the other process finds it");
        tap.set_closed(false);
        assert!(watch.take().unwrap().contains(3));
        drop(followed);
    }

    #[test]
    fn what_is_put_back_is_the_ledgers_alone() {
        let array = Array::default();
        let (mut followed, tap) = observable(Box::new(array.clone()), Box::new(array.clone()));
        let mut watch = tap.observe().unwrap();
        let mut pages = PageSet::empty(PAGES);
        pages.insert(5);
        followed.put_back(&pages);
        assert!(watch.take().unwrap().is_empty());
        assert!(followed.take_dirty().unwrap().contains(5));
    }
}
