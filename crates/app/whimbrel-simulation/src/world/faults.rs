//! Faults: which of them this seed has, and which call they strike.
//!
//! Each seed first draws which kinds there are at all, and how often: a fault that is rare in every seed
//! hides behind those that are frequent. Faults are numbered in the order in which they strike, so that a
//! failed seed can be run again without one of them.

use super::disk::Errno;
use crate::random::Random;
use std::collections::BTreeSet;

/// Kinds of calls on a disk, by what may go wrong with them.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum DiskCall {
    /// Opens, reads and looks at files.
    Read,
    /// Changes bytes or names.
    Change,
    Sync,
}

/// What happens to one call.
#[derive(Debug, Clone, Copy, Default)]
pub(crate) struct Fate {
    /// Nanoseconds that it takes longer, while others go on.
    pub(crate) pause: u64,
    pub(crate) error: Option<Errno>,
}

/// How often each fault strikes: one call in so many, 0 for never.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub(crate) struct Rates {
    /// Any call on a disk takes 50 to 550 ms.
    pub(crate) stall: u64,
    /// A sync takes a few seconds.
    pub(crate) slow_sync: u64,
    pub(crate) failed_sync: u64,
    pub(crate) failed_read: u64,
    pub(crate) failed_change: u64,
    /// No descriptor is free.
    pub(crate) no_descriptor: u64,
    pub(crate) lost_message: u64,
    pub(crate) repeated_message: u64,
    pub(crate) late_message: u64,
}

#[derive(Debug)]
pub(crate) struct Faults {
    pub(crate) random: Random,
    pub(crate) rates: Rates,
    pub(crate) struck: u64,
    without: BTreeSet<u64>,
}

impl Faults {
    pub(crate) fn new(random: Random, without: BTreeSet<u64>) -> Self {
        Self { random, rates: Rates::default(), struck: 0, without }
    }

    /// Draws how often a fault strikes: often, seldom or, in half of the seeds, never.
    pub(crate) fn draw_rate(&mut self, often: u64) -> u64 {
        [0, 0, often, often * 4][self.random.below(4) as usize]
    }

    fn strikes(&mut self, one_in: u64) -> bool {
        if one_in == 0 || !self.random.one_in(one_in) {
            return false;
        }
        self.struck += 1;
        !self.without.contains(&self.struck)
    }

    /// What happens to a call on a disk that takes `cost` nanoseconds at least.
    pub(crate) fn fate(&mut self, call: DiskCall, cost: u64) -> Fate {
        let mut fate = Fate::default();
        if call == DiskCall::Sync {
            // A sync always lets time pass, some much.
            let times = if self.random.one_in(8) { 30 } else { 1 };
            fate.pause = times * (cost + self.random.below(cost));
            if self.strikes(self.rates.slow_sync) {
                fate.pause += 1_000_000_000 + self.random.below(4_000_000_000);
            }
        } else if self.random.one_in(4) {
            fate.pause = cost + self.random.below(cost);
        }
        if self.strikes(self.rates.stall) {
            fate.pause += 50_000_000 + self.random.below(500_000_000);
        }
        let failing = match call {
            DiskCall::Read => self.rates.failed_read,
            DiskCall::Change => self.rates.failed_change,
            DiskCall::Sync => self.rates.failed_sync,
        };
        fate.error = self.strikes(failing).then_some(libc::EIO);
        fate
    }

    pub(crate) fn refuses_descriptor(&mut self) -> bool {
        self.strikes(self.rates.no_descriptor)
    }

    pub(crate) fn loses_message(&mut self) -> bool {
        self.strikes(self.rates.lost_message)
    }

    pub(crate) fn repeats_message(&mut self) -> bool {
        self.strikes(self.rates.repeated_message)
    }

    pub(crate) fn delays_message(&mut self) -> bool {
        self.strikes(self.rates.late_message)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_fault_that_is_left_out_does_not_move_the_others() {
        let run = |without: &[u64]| {
            let mut faults = Faults::new(Random::new(3, 2), without.iter().copied().collect());
            faults.rates.failed_change = 5;
            (0..100).filter(|_| faults.fate(DiskCall::Change, 10).error.is_some()).collect::<Vec<_>>()
        };
        let (all, some) = (run(&[]), run(&[2]));
        assert!(all.len() > 5);
        assert_eq!([&all[..1], &all[2..]].concat(), some);
    }

    #[test]
    fn nothing_strikes_once_the_faults_have_ended() {
        let mut faults = Faults::new(Random::new(3, 2), BTreeSet::new());
        faults.rates.failed_sync = 2;
        assert!((0..50).any(|_| faults.fate(DiskCall::Sync, 10).error.is_some()));
        faults.rates = Rates::default();
        assert!((0..50).all(|_| faults.fate(DiskCall::Sync, 10).error.is_none()));
    }
}
