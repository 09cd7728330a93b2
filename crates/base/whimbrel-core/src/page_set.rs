//! Page sets: which pages of an array are dirty, missing or already sent.
//!
//! A set is a dense bitmap, 32 KiB for a GiB. Every operation handles a word (64 pages) at a time.

use crate::PAGE_SIZE;
use serde::{Deserialize, Serialize};
use std::{fmt, ops::Range};

/// Neighbouring pages `start .. start + len` of one page array.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
pub struct PageRun {
    /// The first page.
    pub start: u64,
    /// Number of pages.
    pub len: u64,
}

impl PageRun {
    /// The run `start .. start + len`.
    pub const fn new(start: u64, len: u64) -> Self {
        Self { start, len }
    }

    /// One past the last page.
    pub const fn end(&self) -> u64 {
        self.start + self.len
    }

    /// The page numbers of the run.
    pub const fn pages(&self) -> Range<u64> {
        self.start..self.end()
    }

    /// Offset of its first byte in the array.
    pub const fn offset(&self) -> u64 {
        self.start * PAGE_SIZE as u64
    }

    /// Length in bytes.
    pub const fn bytes(&self) -> usize {
        self.len as usize * PAGE_SIZE
    }

    /// Splits the run into runs of at most `max` pages.
    pub fn chunks(self, max: u64) -> impl Iterator<Item = PageRun> {
        self.pages()
            .step_by(max.max(1) as usize)
            .map(move |start| PageRun::new(start, max.min(self.end() - start)))
    }
}

/// A set of page numbers below a fixed length.
#[derive(Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct PageSet {
    len: u64,
    words: Vec<u64>,
}

impl PageSet {
    /// An empty set over pages `0..len`.
    pub fn empty(len: u64) -> Self {
        Self { len, words: vec![0; len.div_ceil(64) as usize] }
    }

    /// All pages `0..len`.
    pub fn full(len: u64) -> Self {
        let mut set = Self::empty(len);
        set.insert_run(PageRun::new(0, len));
        set
    }

    /// The set with these words, of which bit `p % 64` of word `p / 64` is page `p`; none unless they are
    /// just as many as `len` pages need and name no page past them.
    pub fn from_words(len: u64, words: Vec<u64>) -> Option<Self> {
        let fits = words.len() as u64 == len.div_ceil(64);
        let past_end = match len % 64 {
            0 => 0,
            used => words.last().map_or(0, |last| last >> used),
        };
        (fits && past_end == 0).then_some(Self { len, words })
    }

    /// Words of the set, as [`PageSet::from_words`] takes them.
    pub fn words(&self) -> &[u64] {
        &self.words
    }

    /// Number of pages in the array, whether in the set or not.
    pub fn len(&self) -> u64 {
        self.len
    }

    /// Number of pages in the set.
    pub fn count(&self) -> u64 {
        self.words.iter().map(|w| u64::from(w.count_ones())).sum()
    }

    /// Whether no page is in the set.
    pub fn is_empty(&self) -> bool {
        self.words.iter().all(|w| *w == 0)
    }

    /// Whether `page` is in the set.
    pub fn contains(&self, page: u64) -> bool {
        page < self.len && self.words[(page / 64) as usize] >> (page % 64) & 1 == 1
    }

    /// Adds `page`; true if it was new. Panics if the page is not below the set's length.
    pub fn insert(&mut self, page: u64) -> bool {
        assert!(page < self.len, "page {page} of {}", self.len);
        let word = &mut self.words[(page / 64) as usize];
        let bit = 1 << (page % 64);
        let new = *word & bit == 0;
        *word |= bit;
        new
    }

    /// Removes `page`; true if it was in the set.
    pub fn remove(&mut self, page: u64) -> bool {
        if !self.contains(page) {
            return false;
        }
        self.words[(page / 64) as usize] &= !(1 << (page % 64));
        true
    }

    /// Adds every page of `run`. Panics if the run ends past the set's length.
    pub fn insert_run(&mut self, run: PageRun) {
        assert!(run.end() <= self.len, "run {run:?} in {} pages", self.len);
        self.each_word(run, |word, mask| *word |= mask);
    }

    /// Removes every page of `run`.
    pub fn remove_run(&mut self, run: PageRun) {
        let end = run.end().min(self.len);
        if run.start < end {
            self.each_word(PageRun::new(run.start, end - run.start), |word, mask| *word &= !mask);
        }
    }

    fn each_word(&mut self, run: PageRun, mut apply: impl FnMut(&mut u64, u64)) {
        let mut page = run.start;
        while page < run.end() {
            let bit = page % 64;
            let take = (64 - bit).min(run.end() - page);
            let mask = (u64::MAX >> (64 - take)) << bit;
            apply(&mut self.words[(page / 64) as usize], mask);
            page += take;
        }
    }

    /// Adds all pages of `other`, a set over the same array.
    pub fn union(&mut self, other: &PageSet) {
        self.zip(other, |a, b| *a |= b);
    }

    /// Removes all pages of `other`.
    pub fn subtract(&mut self, other: &PageSet) {
        self.zip(other, |a, b| *a &= !b);
    }

    /// Retains only pages that are also in `other`.
    pub fn intersect(&mut self, other: &PageSet) {
        self.zip(other, |a, b| *a &= b);
    }

    fn zip(&mut self, other: &PageSet, apply: impl Fn(&mut u64, u64)) {
        assert_eq!(self.len, other.len, "sets over arrays of different length");
        self.words.iter_mut().zip(&other.words).for_each(|(a, b)| apply(a, *b));
    }

    /// Empties the set and returns its previous content.
    pub fn take(&mut self) -> PageSet {
        std::mem::replace(self, PageSet::empty(self.len))
    }

    /// The set as maximal runs, in order.
    pub fn runs(&self) -> Runs<'_> {
        Runs { set: self, page: 0 }
    }

    /// The pages of the set that lie within `run`, as maximal runs, in order.
    pub fn runs_within(&self, run: PageRun) -> impl Iterator<Item = PageRun> {
        let runs = Runs { set: self, page: run.start.min(self.len) };
        runs.take_while(move |found| found.start < run.end())
            .map(move |found| PageRun::new(found.start, found.end().min(run.end()) - found.start))
    }

    /// The pages in ascending order.
    pub fn iter(&self) -> impl Iterator<Item = u64> {
        self.runs().flat_map(|run| run.pages())
    }

    /// The first page at or after `from` that is in the set (`want` true) or is not in it (`want` false).
    fn next_page(&self, from: u64, want: bool) -> Option<u64> {
        let mut index = (from / 64) as usize;
        let mut mask = u64::MAX << (from % 64);
        while let Some(word) = self.words.get(index) {
            let hits = (if want { *word } else { !*word }) & mask;
            if hits != 0 {
                let page = index as u64 * 64 + u64::from(hits.trailing_zeros());
                return (page < self.len).then_some(page);
            }
            mask = u64::MAX;
            index += 1;
        }
        None
    }
}

impl fmt::Debug for PageSet {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "PageSet({} of {})", self.count(), self.len)
    }
}

/// Iterator over the maximal runs of a [`PageSet`].
#[derive(Debug)]
pub struct Runs<'a> {
    set: &'a PageSet,
    page: u64,
}

impl Iterator for Runs<'_> {
    type Item = PageRun;

    fn next(&mut self) -> Option<PageRun> {
        let start = self.set.next_page(self.page, true)?;
        let end = self.set.next_page(start, false).unwrap_or(self.set.len);
        self.page = end;
        Some(PageRun::new(start, end - start))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;
    use std::collections::BTreeSet;

    fn runs() -> impl Strategy<Value = Vec<(u64, u64, bool)>> {
        prop::collection::vec((0..300u64, 1..130u64, any::<bool>()), 0..20)
    }

    proptest! {
        #[test]
        fn behaves_like_a_tree_set(
            len in 1..300u64, ops in runs(), from in 0..400u64, count in 0..400u64,
        ) {
            let (mut set, mut model) = (PageSet::empty(len), BTreeSet::new());
            for (start, count, add) in ops {
                let run = PageRun::new(start % len, count.min(len - start % len));
                if add { set.insert_run(run); model.extend(run.pages()) }
                else { set.remove_run(run); model.retain(|p| !run.pages().contains(p)) }
                prop_assert_eq!(set.count(), model.len() as u64);
                prop_assert_eq!(set.iter().collect::<Vec<_>>(), model.iter().copied().collect::<Vec<_>>());
            }
            let runs: Vec<_> = set.runs().collect();
            prop_assert!(runs.windows(2).all(|w| w[0].end() < w[1].start), "runs are maximal and ordered");
            let within = PageRun::new(from % (len + 1), count);
            let pages: Vec<_> = set.runs_within(within).flat_map(|run| run.pages()).collect();
            let expected: Vec<_> = model.into_iter().filter(|page| within.pages().contains(page)).collect();
            prop_assert_eq!(pages, expected);
            let mut all = PageSet::full(len);
            all.subtract(&set);
            all.union(&set);
            prop_assert_eq!(all.count(), len);
        }
    }

    #[test]
    fn words_that_do_not_fit_the_length_are_refused() {
        let set = PageSet::from_words(65, vec![3, 1]).unwrap();
        assert_eq!((set.iter().collect::<Vec<_>>(), set.words()), (vec![0, 1, 64], &[3, 1][..]));
        assert_eq!(PageSet::from_words(65, vec![0, 2]), None);
        assert_eq!(PageSet::from_words(65, vec![0]), None);
        assert_eq!(PageSet::from_words(64, vec![0, 0]), None);
        assert_eq!(PageSet::from_words(0, Vec::new()).map(|set| set.count()), Some(0));
    }

    #[test]
    fn chunks_cover_the_run() {
        let pieces: Vec<_> = PageRun::new(3, 10).chunks(4).collect();
        assert_eq!(pieces, [PageRun::new(3, 4), PageRun::new(7, 4), PageRun::new(11, 2)]);
    }
}
