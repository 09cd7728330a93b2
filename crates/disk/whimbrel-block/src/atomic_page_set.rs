//! Atomic page set: many threads add pages while one takes the complete set.
//!
//! Two levels: one bit for each page, and above it one bit for each word of 64 pages, so that taking the set
//! of a nearly idle terabyte reads a few kilobytes. A page is added below first, then above; the taker swaps
//! above first, then below. So an addition that returned before the take began is taken, and one that
//! overlaps it is taken now or retains its upper bit for the next take: none is lost. (If the adder still saw
//! the upper bit, the taker had not swapped it, so its later swap of the word finds the page. This needs the
//! single order of `SeqCst`.)

use crate::bitmap;
use std::sync::atomic::{AtomicU64, Ordering::SeqCst};
use whimbrel_core::{PageRun, PageSet};

/// Set of pages among `0..len`.
#[derive(Debug)]
pub(crate) struct AtomicPageSet {
    len: u64,
    words: Box<[AtomicU64]>,
    /// Bit `i` is set if `words[i]` may be non-zero.
    upper: Box<[AtomicU64]>,
}

impl AtomicPageSet {
    pub(crate) fn new(len: u64) -> Self {
        let words = bitmap::empty(len);
        Self { len, upper: bitmap::empty(words.len() as u64), words }
    }

    /// Adds the pages of `run`.
    pub(crate) fn insert(&self, run: PageRun) {
        // The upper level is set even when no word changed: a taker may have cleared it already without
        // having read the words.
        if run.len != 0 {
            bitmap::set(&self.words, run, |_| ());
            let (first, last) = (run.start / 64, (run.end() - 1) / 64);
            bitmap::set(&self.upper, PageRun::new(first, last - first + 1), |_| ());
        }
    }

    pub(crate) fn take(&self) -> PageSet {
        let mut taken = PageSet::empty(self.len);
        for (index, upper) in self.upper.iter().enumerate() {
            if upper.load(SeqCst) == 0 {
                continue;
            }
            let mut marks = upper.swap(0, SeqCst);
            while marks != 0 {
                let word = index * 64 + marks.trailing_zeros() as usize;
                bitmap::add_word(&mut taken, word, self.words[word].swap(0, SeqCst));
                marks &= marks - 1;
            }
        }
        taken
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn pages_added_while_the_set_is_taken_are_in_this_one_or_the_next() {
        let (set, len) = (AtomicPageSet::new(5000), 5000);
        let mut seen = PageSet::empty(len);
        std::thread::scope(|scope| {
            let adders: Vec<_> = (0..2)
                .map(|odd| {
                    let set = &set;
                    scope.spawn(move || {
                        for page in (odd..len).step_by(2) {
                            set.insert(PageRun::new(page, 1));
                        }
                    })
                })
                .collect();
            while !adders.iter().all(|a| a.is_finished()) {
                seen.union(&set.take());
            }
        });
        seen.union(&set.take());
        assert_eq!(seen.count(), len);
        assert!(set.take().is_empty());
    }
}
