//! Deferred pages: decides at the pause which pages are sent at once and which the target fetches later.

use super::{
    PageServer,
    messages::{MISSING_PAGES, MissingPages},
    page_set_codec,
};
use crate::{link::Link, protocol::HandoverId, source::BoxError};
use std::{sync::Arc, time::Duration};
use whimbrel_capture::StopReason;
use whimbrel_core::PageSet;
use whimbrel_machine::{Machine, MachineError};

/// Migration that may leave missing pages on the target.
pub struct DeferredPages {
    page_server: Arc<PageServer>,
    pages_max: u64,
    /// Pages that the target fetches later, a set for each array; empty before the pause.
    missing: Vec<PageSet>,
    /// Pages of these that were written last.
    hot: Vec<PageSet>,
}

impl DeferredPages {
    /// Sends at most `pages_max` pages in the pause; `giving` serves the others from then on.
    pub fn new(page_server: Arc<PageServer>, pages_max: u64) -> Self {
        Self { page_server, pages_max, missing: Vec::new(), hot: Vec::new() }
    }

    /// Removes the pages from `left` that are sent later: none if the rounds succeeded, or if few are left.
    pub(crate) fn defer(&mut self, left: &mut [PageSet], fresh: &[PageSet], why: StopReason) {
        let count: u64 = left.iter().map(PageSet::count).sum();
        let good_end = matches!(why, StopReason::LittleLeft | StopReason::WithinDowntime);
        if good_end || count <= self.pages_max {
            return;
        }
        let mut room = self.pages_max;
        self.missing = left.to_vec();
        for ((left, owed), fresh) in left.iter_mut().zip(&mut self.missing).zip(fresh) {
            let mut go = PageSet::empty(owed.len());
            fresh.iter().filter(|page| owed.contains(*page)).take(room as usize).for_each(|page| {
                go.insert(page);
            });
            room -= go.count();
            owed.subtract(&go);
            let mut hot = fresh.clone();
            hot.intersect(owed);
            self.hot.push(hot);
            *left = go;
        }
    }

    /// Sends the list of missing pages to the target, and starts to serve them. The machine stays paused,
    /// unless the migration fails.
    pub(crate) fn announce(&self, link: &dyn Link, handover: HandoverId) -> Result<(), BoxError> {
        if !self.page_server.status().connected {
            let why = self
                .page_server
                .status()
                .stalled
                .unwrap_or_else(|| "no fetch connection was accepted".to_owned());
            return Err(format!("the target cannot fetch them: {why}").into());
        }
        self.page_server.open(self.pages());
        let mut answers = Vec::new();
        for (sets, hot) in [(&self.hot, true), (&self.missing, false)] {
            for (array, set) in sets.iter().enumerate() {
                for piece in page_set_codec::encode_parts(set)? {
                    let header = MissingPages { handover, array: array as u32, hot };
                    answers.push(link.send(MISSING_PAGES, postcard::to_stdvec(&header)?, piece.into())?);
                }
            }
        }
        answers.into_iter().try_for_each(|answer| answer.wait().map(drop))?;
        Ok(())
    }

    /// Number of pages that the target fetches later.
    pub fn pages(&self) -> u64 {
        self.missing.iter().map(PageSet::count).sum()
    }
}

/// Longest wait before the pause for the target's fetch connection.
const CONNECT_TIMEOUT: Duration = Duration::from_secs(10);

/// Machine that runs until the target can fetch its pages, and then a little longer, so that the pages
/// written meanwhile show which are hot.
pub struct DelayedPause<M> {
    /// Machine to pause.
    pub machine: M,
    /// Server of its pages, if any may be missing.
    pub page_server: Option<Arc<PageServer>>,
    /// Additional time before the pause.
    pub extra_delay: Duration,
}

impl<M: Machine> Machine for DelayedPause<M> {
    fn early_device_state(&mut self) -> Option<Vec<u8>> {
        self.machine.early_device_state()
    }

    fn about_to_pause(&mut self) {
        self.machine.about_to_pause();
        // Without a fetch connection the migration fails as soon as pages have to be deferred.
        if let Some(giving) = &self.page_server {
            giving.wait_connected(CONNECT_TIMEOUT);
        }
        std::thread::sleep(self.extra_delay);
    }

    fn pause(&mut self) -> Result<(), MachineError> {
        self.machine.pause()
    }

    fn unpause(&mut self) -> Result<(), MachineError> {
        self.machine.unpause()
    }

    fn device_state(&mut self) -> Result<Vec<u8>, MachineError> {
        self.machine.device_state()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use whimbrel_core::PageRun;

    fn set(runs: &[(u64, u64)]) -> PageSet {
        let mut set = PageSet::empty(1000);
        runs.iter().for_each(|(start, len)| set.insert_run(PageRun::new(*start, *len)));
        set
    }

    #[test]
    fn what_was_written_last_goes_as_far_as_there_is_room_and_nothing_is_in_no_set_or_in_two() {
        let giving = Arc::new(PageServer::new(HandoverId([1; 16]), Vec::new()));
        let all = [set(&[(0, 500)]), set(&[(100, 50)])];
        let fresh = [set(&[(10, 20), (499, 1)]), set(&[(100, 5)])];
        let mut leaving = DeferredPages::new(giving, 23);
        let mut left = all.clone();
        leaving.defer(&mut left, &fresh, StopReason::RoundsOver);
        assert_eq!(left, [set(&[(10, 20), (499, 1)]), set(&[(100, 2)])]);
        assert_eq!(leaving.hot, [set(&[]), set(&[(102, 3)])]);
        for ((left, owed), all) in left.iter().zip(&leaving.missing).zip(&all) {
            let mut both = left.clone();
            both.intersect(owed);
            assert!(both.is_empty());
            both.union(left);
            both.union(owed);
            assert_eq!(both, *all);
        }
    }

    #[test]
    fn nothing_stays_behind_when_rounds_end_well_or_little_is_left() {
        let giving = Arc::new(PageServer::new(HandoverId([1; 16]), Vec::new()));
        for (max, why) in
            [(0, StopReason::LittleLeft), (0, StopReason::WithinDowntime), (500, StopReason::Plateau)]
        {
            let mut leaving = DeferredPages::new(giving.clone(), max);
            let mut left = [set(&[(0, 500)])];
            leaving.defer(&mut left, &[set(&[])], why);
            assert!(leaving.pages() == 0 && left == [set(&[(0, 500)])], "{why:?}");
        }
    }
}
