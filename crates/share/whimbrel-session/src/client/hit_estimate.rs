//! Whether it is worth a round trip to ask for digests first: how likely it is that content of a file is
//! found is learnt file by file.

use crate::cache::FileId;
use std::{
    collections::HashMap,
    sync::{Mutex, PoisonError},
};

/// Pages that a guess is worth before anything was tried. A file is as likely known as not, and more so where
/// somebody has named files that are like those of the server.
const GUESS: u32 = 64;
const LIKELY: (u32, u32) = (GUESS / 2, GUESS - GUESS / 8);
/// What was seen longer ago than so many pages counts half.
const LONG: u32 = 4096;
/// A file that is not worth it is tried again after so many requests.
const AGAIN: u32 = 16;
/// How much waiting for what nobody waits for yet counts.
const UNHURRIED: f64 = 0.25;

/// Files whose odds are kept.
const FILES: usize = 4096;

/// How likely pages of a file are found on the side where they are looked for. Pure.
#[derive(Debug, Clone, Copy)]
pub(super) struct HitEstimate {
    asked: u32,
    found: u32,
    /// Requests that went without.
    passed: u32,
    /// Pages of this file that were noted: where nothing else is known, none of it is here under another
    /// name.
    pub(super) own: u64,
}

/// What is asked for, over what link. Times in seconds.
#[derive(Debug, Clone, Copy)]
pub(super) struct DigestQuery {
    pub(super) bytes: u64,
    pub(super) waited: bool,
    pub(super) rate: f64,
    pub(super) round_trip: f64,
}

impl HitEstimate {
    pub(super) fn new(named: bool) -> Self {
        Self { asked: GUESS, found: if named { LIKELY.1 } else { LIKELY.0 }, passed: 0, own: 0 }
    }

    /// Whether to ask for digests first. It saves the time of what is found, and costs a round trip for what
    /// is not.
    pub(super) fn are_worth(&mut self, asked: DigestQuery) -> bool {
        let likely = f64::from(self.found) / f64::from(self.asked.max(1));
        let time = asked.bytes as f64 / asked.rate.max(1.0);
        let hurry = if asked.waited { 1.0 } else { UNHURRIED };
        let price = (1.0 - likely) * asked.round_trip * hurry + time / 128.0;
        let again = self.passed >= AGAIN && !asked.waited;
        let worth = likely * time > price || again;
        self.passed = if worth { 0 } else { self.passed + 1 };
        worth
    }

    pub(super) fn record(&mut self, asked: u32, found: u32) {
        if self.asked > LONG {
            self.asked /= 2;
            self.found /= 2;
        }
        self.asked += asked;
        self.found += found;
    }
}

/// The odds of files.
#[derive(Default)]
pub(super) struct HitEstimates(Mutex<HashMap<FileId, HitEstimate>>);

impl HitEstimates {
    /// With those of a file, which are `first` if nothing is known of it.
    pub(super) fn with<T>(
        &self,
        file: FileId,
        first: HitEstimate,
        with: impl FnOnce(&mut HitEstimate) -> T,
    ) -> T {
        let mut odds = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        if odds.len() >= FILES && !odds.contains_key(&file) {
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
        assert!(twin.are_worth(asked(1 << 20, 30.0, true)) && noise.are_worth(asked(1 << 20, 30.0, true)));
        for _ in 0..4 {
            twin.record(256, 256);
            noise.record(256, 0);
        }
        assert!(twin.are_worth(asked(64 << 10, 30.0, true)), "a block takes 17 ms, and is found");
        let tried = (0..170).filter(|_| noise.are_worth(asked(1 << 20, 30.0, false))).count();
        assert_eq!(tried, 10, "it may become another file");
        assert!((0..100).all(|_| !noise.are_worth(asked(1 << 20, 30.0, true))), "nobody waits for a try");
    }

    #[test]
    fn what_was_seen_lately_counts_more() {
        let mut odds = HitEstimate::new(false);
        (0..100).for_each(|_| odds.record(256, 0));
        (0..40).for_each(|_| odds.record(256, 256));
        assert!(odds.are_worth(asked(64 << 10, 30.0, true)), "{odds:?}");
    }

    #[test]
    fn a_fast_link_is_not_asked_for_digests_of_what_is_unlikely_here() {
        let mut odds = HitEstimate::new(false);
        assert!(!odds.are_worth(asked(64 << 10, 1000.0, true)));
        assert!(odds.are_worth(DigestQuery { round_trip: 0.0002, ..asked(1 << 20, 100.0, true) }));
        assert!(
            HitEstimate::new(true).are_worth(asked(256 << 10, 100.0, true)),
            "somebody says that it is likely"
        );
    }
}
