//! Whether it pays to ask the target for pages before they are sent to it: it may have them in its files, in
//! its store, or in the memory of another machine.
//!
//! A question costs 32 bytes a page, a round trip, and a digest on this side; an answer saves what the page
//! would take on the link. So it is asked only over links that are slow enough, and on as long as enough
//! pages are found. Pure.

/// Faster links carry a page in less time than it takes the target to look for it: 2 Gbit/s in pages that
/// shrink to half.
const LINK_MAX: f64 = 125e6;
/// Questions before it is judged whether they help.
const TRIED: u64 = 1024;
/// Pages that must be found of those asked for, a few of which pay for all the digests.
const SHARE_MIN: f64 = 0.04;
/// Once it did not help, one batch in so many asks again: the next ones may be of another kind.
const AGAIN: u32 = 32;
/// A question about fewer pages is not worth its round trip.
pub(crate) const PAGES_MIN: usize = 16;

/// What was asked, and what came of it.
#[derive(Debug, Default)]
pub(crate) struct HitEstimate {
    asked: u64,
    found: u64,
    passed: u32,
}

impl HitEstimate {
    /// Whether to ask for `pages` pages over a link that takes so many bytes a second, where that is known.
    pub(crate) fn wants(&mut self, pages: usize, link: Option<f64>) -> bool {
        if pages < PAGES_MIN || link.is_none_or(|link| link > LINK_MAX) {
            return false;
        }
        if self.asked < TRIED || self.found as f64 >= self.asked as f64 * SHARE_MIN {
            return true;
        }
        self.passed += 1;
        self.passed.is_multiple_of(AGAIN)
    }

    /// Of so many pages so many were there.
    pub(crate) fn answered(&mut self, asked: u64, found: u64) {
        self.asked += asked;
        self.found += found;
        if self.asked > TRIED * 8 {
            // What was long ago counts less.
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
