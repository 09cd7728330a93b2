//! Bitmap that many threads set at once: one bit for each page, in words of 64.
//!
//! Functions over `&[AtomicU64]`, on the heap or in a mapped file. All accesses are sequentially consistent:
//! sets of two levels (see `atomic_page_set`) need one order for both, and on x86-64 it is free.

use std::sync::atomic::{AtomicU64, Ordering::SeqCst};
use whimbrel_core::{PageRun, PageSet};

/// Sets the bits of `run`; calls `new` with the index of each word that gained one.
pub(crate) fn set(words: &[AtomicU64], run: PageRun, mut new: impl FnMut(usize)) {
    let mut page = run.start;
    while page < run.end() {
        let (index, bit) = ((page / 64) as usize, page % 64);
        let take = (64 - bit).min(run.end() - page);
        let mask = (u64::MAX >> (64 - take)) << bit;
        // Overwriting is the common case: a load leaves the cache line shared, an OR would not.
        if words[index].load(SeqCst) & mask != mask {
            words[index].fetch_or(mask, SeqCst);
            new(index);
        }
        page += take;
    }
}

/// Clears the bits of `run`; calls `gone` with the index of each word that lost one.
pub(crate) fn clear(words: &[AtomicU64], run: PageRun, mut gone: impl FnMut(usize)) {
    let mut page = run.start;
    while page < run.end() {
        let (index, bit) = ((page / 64) as usize, page % 64);
        let take = (64 - bit).min(run.end() - page);
        let mask = (u64::MAX >> (64 - take)) << bit;
        if words[index].fetch_and(!mask, SeqCst) & mask != 0 {
            gone(index);
        }
        page += take;
    }
}

/// Whether `page` is set, and the number of pages from it on (at most up to `end`) with the same bit.
pub(crate) fn run_at(words: &[AtomicU64], page: u64, end: u64) -> (bool, u64) {
    let mut at = page;
    let first = words[(page / 64) as usize].load(SeqCst) >> (page % 64) & 1 == 1;
    while at < end {
        let word = words[(at / 64) as usize].load(SeqCst);
        let other = (if first { !word } else { word }) >> (at % 64);
        if other != 0 {
            at += u64::from(other.trailing_zeros());
            break;
        }
        at += 64 - at % 64;
    }
    (first, at.min(end) - page)
}

/// Whether all pages of `run` are set.
pub(crate) fn all(words: &[AtomicU64], run: PageRun) -> bool {
    run.len == 0 || run_at(words, run.start, run.end()) == (true, run.len)
}

/// Adds the pages whose bits are set in `word`, the `index`-th of a bitmap, to `set`.
pub(crate) fn add_word(set: &mut PageSet, index: usize, mut word: u64) {
    let base = index as u64 * 64;
    while word != 0 {
        let start = u64::from(word.trailing_zeros());
        let len = u64::from((!(word >> start)).trailing_zeros()).min(64 - start);
        set.insert_run(PageRun::new(base + start, len));
        word &= !((u64::MAX >> (64 - len)) << start);
    }
}

/// Creates a zeroed bitmap for `pages` pages.
pub(crate) fn empty(pages: u64) -> Box<[AtomicU64]> {
    (0..pages.div_ceil(64)).map(|_| AtomicU64::new(0)).collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    proptest! {
        #[test]
        fn behaves_like_a_page_set(runs in prop::collection::vec((0..400u64, 1..150u64), 0..8), from in 0..400u64) {
            let (words, mut model) = (empty(400), PageSet::empty(400));
            for (start, len) in runs {
                let run = PageRun::new(start, len.min(400 - start));
                set(&words, run, |_| ());
                model.insert_run(run);
                prop_assert!(all(&words, run));
            }
            let mut copy = PageSet::empty(400);
            words.iter().enumerate().for_each(|(i, w)| add_word(&mut copy, i, w.load(SeqCst)));
            prop_assert_eq!(&copy, &model);
            let (kind, len) = run_at(&words, from, 400);
            prop_assert!((from..from + len).all(|p| model.contains(p) == kind));
            prop_assert!(from + len == 400 || model.contains(from + len) != kind);
        }
    }
}
