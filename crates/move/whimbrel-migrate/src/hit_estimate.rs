//! Hit estimate: decides whether asking the target for pages pays before they are sent. The target may have
//! them in its files, its store, or the memory of another machine.
//!
//! A query costs 32 bytes a page, a round trip, and a digest on this side; a hit saves the page's bytes on
//! the link. So only slow links are asked over, and only while enough pages are found. Pure.

/// Fastest link that asks: a faster one sends a page in less time than the target needs to look for it. 2
/// Gbit/s of pages that compress to half.
const LINK_MAX: f64 = 125e6;
/// Pages queried before the estimate is used.
const TRIAL_PAGES: u64 = 1024;
/// Least share of hits: a few percent pay for all digests.
const SHARE_MIN: f64 = 0.04;
/// While asking does not pay, one batch in this many still asks: later ones may be of another kind.
const RETRY_INTERVAL: u32 = 32;
/// Least pages of a query; fewer are not worth the round trip.
pub(crate) const PAGES_MIN: usize = 16;

/// Counts of pages queried and found.
#[derive(Debug, Default)]
pub(crate) struct HitEstimate {
    asked: u64,
    found: u64,
    skipped: u32,
}

impl HitEstimate {
    /// Whether to query `pages` pages over a link of this many bytes a second, if that is known.
    pub(crate) fn wants(&mut self, pages: usize, link: Option<f64>) -> bool {
        if pages < PAGES_MIN || link.is_none_or(|link| link > LINK_MAX) {
            return false;
        }
        if self.asked < TRIAL_PAGES || self.found as f64 >= self.asked as f64 * SHARE_MIN {
            return true;
        }
        self.skipped += 1;
        self.skipped.is_multiple_of(RETRY_INTERVAL)
    }

    /// Records the result of a query.
    pub(crate) fn answered(&mut self, asked: u64, found: u64) {
        self.asked += asked;
        self.found += found;
        if self.asked > TRIAL_PAGES * 8 {
            // Older results count less.
            (self.asked, self.found) = (self.asked / 2, self.found / 2);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_slow_links_ask_and_only_as_long_as_it_helps() {
        let slow = Some(32e6);
        let mut asking = HitEstimate::default();
        assert!(!asking.wants(256, None), "not known to be slow");
        assert!(!asking.wants(256, Some(1e9)));
        assert!(!asking.wants(PAGES_MIN - 1, slow));
        for _ in 0..4 {
            assert!(asking.wants(256, slow));
            asking.answered(256, 2);
        }
        let asks = (0..64).filter(|_| asking.wants(256, slow)).count();
        assert_eq!(asks, 2, "it looks now and then whether that has changed");
        (0..40).for_each(|_| asking.answered(256, 200));
        assert!(asking.wants(256, slow));
        (0..400).for_each(|_| asking.answered(256, 0));
        assert!(!asking.wants(256, slow));
    }
}
