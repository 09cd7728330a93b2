//! Hit estimate: whether asking for digests first is worth a round trip, learnt for each file.

use crate::cache::FileId;
use std::{
    collections::HashMap,
    sync::{Mutex, PoisonError},
};

/// Weight of the initial guess, in pages: a hit is as likely as a miss, and more likely (7/8) where reference
/// files were named.
const INITIAL_WEIGHT: u32 = 64;
const INITIAL_HITS: (u32, u32) = (INITIAL_WEIGHT / 2, INITIAL_WEIGHT - INITIAL_WEIGHT / 8);
/// Number of pages after which older results count half.
const HALVING_PAGES: u32 = 4096;
/// Requests after which a file with few hits is tried again.
const RETRY_AFTER: u32 = 16;
/// Weight of a round trip for which nobody waits yet.
const PREFETCH_WEIGHT: f64 = 0.25;

/// Number of files with an estimate.
const MAX_FILES: usize = 4096;

/// Likelihood that pages of a file are found here. Pure.
#[derive(Debug, Clone, Copy)]
pub(in crate::client) struct HitEstimate {
    queried: u32,
    found: u32,
    /// Requests without a query for digests.
    skipped: u32,
    /// Pages of this file in the table. If the table has no others, none of the file can be found under
    /// another name.
    pub(in crate::client) own_pages: u64,
}

/// A possible query for digests and its link. Times in seconds.
#[derive(Debug, Clone, Copy)]
pub(in crate::client) struct DigestQuery {
    pub(in crate::client) bytes: u64,
    pub(in crate::client) waited: bool,
    pub(in crate::client) rate: f64,
    pub(in crate::client) round_trip: f64,
}

impl HitEstimate {
    pub(in crate::client) fn new(named: bool) -> Self {
        Self {
            queried: INITIAL_WEIGHT,
            found: if named { INITIAL_HITS.1 } else { INITIAL_HITS.0 },
            skipped: 0,
            own_pages: 0,
        }
    }

    /// Whether to ask for digests first. A query saves the transfer of the hits, and costs a round trip for
    /// the misses.
    pub(in crate::client) fn is_worthwhile(&mut self, asked: DigestQuery) -> bool {
        let likely = f64::from(self.found) / f64::from(self.queried.max(1));
        let time = asked.bytes as f64 / asked.rate.max(1.0);
        let hurry = if asked.waited { 1.0 } else { PREFETCH_WEIGHT };
        let price = (1.0 - likely) * asked.round_trip * hurry + time / 128.0;
        let again = self.skipped >= RETRY_AFTER && !asked.waited;
        let worth = likely * time > price || again;
        self.skipped = if worth { 0 } else { self.skipped + 1 };
        worth
    }

    pub(in crate::client) fn record(&mut self, asked: u32, found: u32) {
        if self.queried > HALVING_PAGES {
            self.queried /= 2;
            self.found /= 2;
        }
        self.queried += asked;
        self.found += found;
    }
}

#[derive(Default)]
pub(in crate::client) struct HitEstimates(Mutex<HashMap<FileId, HitEstimate>>);

impl HitEstimates {
    /// Runs `with` on the estimate of a file, initially `first`.
    pub(in crate::client) fn with<T>(
        &self,
        file: FileId,
        first: HitEstimate,
        with: impl FnOnce(&mut HitEstimate) -> T,
    ) -> T {
        let mut odds = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        if odds.len() >= MAX_FILES && !odds.contains_key(&file) {
            odds.clear();
        }
        with(odds.entry(file).or_insert(first))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn asked(bytes: u64, mbit: f64, waited: bool) -> DigestQuery {
        DigestQuery { bytes, waited, rate: mbit * 125_000.0, round_trip: 0.032 }
    }

    #[test]
    fn a_file_that_is_found_is_asked_for_by_digest_and_one_that_is_not_is_left_alone() {
        let (mut twin, mut noise) = (HitEstimate::new(false), HitEstimate::new(false));
        assert!(
            twin.is_worthwhile(asked(1 << 20, 30.0, true)) && noise.is_worthwhile(asked(1 << 20, 30.0, true))
        );
        for _ in 0..4 {
            twin.record(256, 256);
            noise.record(256, 0);
        }
        assert!(twin.is_worthwhile(asked(64 << 10, 30.0, true)), "a block takes 17 ms, and is found");
        let tried = (0..170).filter(|_| noise.is_worthwhile(asked(1 << 20, 30.0, false))).count();
        assert_eq!(tried, 10, "it may become another file");
        assert!((0..100).all(|_| !noise.is_worthwhile(asked(1 << 20, 30.0, true))), "nobody waits for a try");
    }

    #[test]
    fn what_was_seen_lately_counts_more() {
        let mut odds = HitEstimate::new(false);
        (0..100).for_each(|_| odds.record(256, 0));
        (0..40).for_each(|_| odds.record(256, 256));
        assert!(odds.is_worthwhile(asked(64 << 10, 30.0, true)), "{odds:?}");
    }

    #[test]
    fn a_fast_link_is_not_asked_for_digests_of_what_is_unlikely_here() {
        let mut odds = HitEstimate::new(false);
        assert!(!odds.is_worthwhile(asked(64 << 10, 1000.0, true)));
        assert!(odds.is_worthwhile(DigestQuery { round_trip: 0.0002, ..asked(1 << 20, 100.0, true) }));
        assert!(
            HitEstimate::new(true).is_worthwhile(asked(256 << 10, 100.0, true)),
            "somebody says that it is likely"
        );
    }
}
