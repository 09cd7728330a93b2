//! Log of recalls: an answer that was asked for before a recall of what it says is not relied on. Pure.

use crate::proto::Ident;
use std::{
    collections::{HashMap, VecDeque},
    time::Instant,
};

/// Most recalls that are remembered. Answers asked for before all of these are not relied on.
const MAX_RECALLS: usize = 1 << 16;

#[derive(Debug, Default)]
pub(in crate::client) struct RecallLog {
    latest: HashMap<Ident, Instant>,
    order: VecDeque<(Instant, Ident)>,
    /// Everything asked for before this moment counts as recalled.
    floor: Option<Instant>,
}

impl RecallLog {
    /// A lease was recalled, or has been given back, at this moment.
    pub(in crate::client) fn recalled(&mut self, file: Ident, now: Instant) {
        self.latest.insert(file, now);
        self.order.push_back((now, file));
        if self.order.len() > MAX_RECALLS
            && let Some((at, file)) = self.order.pop_front()
        {
            self.floor = self.floor.max(Some(at));
            if self.latest.get(&file) == Some(&at) {
                self.latest.remove(&file);
            }
        }
    }

    /// There is no lease of anything that was asked for before this moment.
    pub(in crate::client) fn all_recalled(&mut self, now: Instant) {
        *self = Self { floor: Some(now), ..Self::default() };
    }

    /// Whether what the server said about a file may be relied on, if it was asked at this moment.
    pub(in crate::client) fn trusts(&self, file: &Ident, asked: Instant) -> bool {
        self.floor.is_none_or(|floor| asked > floor) && self.latest.get(file).is_none_or(|at| asked > *at)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::time::Duration;

    fn file(number: u64) -> Ident {
        Ident { dev: 1, ino: number, birth: 0 }
    }

    #[test]
    fn an_answer_is_trusted_only_if_it_was_asked_for_after_the_last_recall() {
        let (start, step) = (Instant::now(), Duration::from_millis(1));
        let mut log = RecallLog::default();
        log.recalled(file(1), start + step);
        assert!(!log.trusts(&file(1), start) && !log.trusts(&file(1), start + step));
        assert!(log.trusts(&file(1), start + 2 * step) && log.trusts(&file(2), start));
        log.recalled(file(1), start + 3 * step);
        assert!(!log.trusts(&file(1), start + 2 * step));
        log.all_recalled(start + 5 * step);
        assert!(!log.trusts(&file(2), start + 4 * step) && log.trusts(&file(1), start + 6 * step));
    }

    #[test]
    fn recalls_that_were_forgotten_are_not_overlooked() {
        let (start, step) = (Instant::now(), Duration::from_millis(1));
        let mut log = RecallLog::default();
        log.recalled(file(0), start);
        for number in 1..=MAX_RECALLS as u64 {
            log.recalled(file(number), start + step);
        }
        assert_eq!(log.latest.len(), MAX_RECALLS);
        assert!(!log.trusts(&file(0), start));
        assert!(log.trusts(&file(0), start + step) && !log.trusts(&file(5), start + step));
    }
}
