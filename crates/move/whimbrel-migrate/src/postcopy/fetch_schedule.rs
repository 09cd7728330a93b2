//! Fetch schedule: the order in which missing pages are requested. Those around the last faults come first,
//! then those written lately, then the rest.
//!
//! Pure: no connection, no clock. The schedule is only advice, because the target's page stores decide what
//! is missing. When it has nothing more to request, a new schedule is made of what they report.

use std::collections::VecDeque;
use whimbrel_core::{PageRun, PageSet};

/// Pages before and after a fault that belong to its neighbourhood; guests walk upwards more often than down.
const BEFORE: u64 = 8;
const AFTER: u64 = 56;
/// Most faults whose neighbourhoods wait; the pages of older ones come in their usual order.
const FAULTS_MAX: usize = 64;
/// Neighbouring pages that are requested together.
const CHUNK: u64 = 32;

/// Pages to request in one message.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct FetchRange {
    /// Index of the array.
    pub array: usize,
    /// Pages of the array.
    pub runs: Vec<PageRun>,
}

/// Missing pages that were not requested, and their order.
#[derive(Debug)]
pub struct FetchSchedule {
    arrays: Vec<ArrayState>,
    /// Pages that are missing, requested or not. Counted along, because the bitmaps of a large disk take
    /// longer to count than a reply to arrive.
    missing: u64,
    /// Neighbourhoods of faults, the latest first.
    faults: VecDeque<(usize, PageRun)>,
    queue: VecDeque<(usize, PageRun)>,
}

#[derive(Debug)]
struct ArrayState {
    /// Pages that are missing and not requested.
    unrequested: PageSet,
    /// Pages that are requested and have not arrived.
    requested: PageSet,
}

impl FetchSchedule {
    /// Schedule of these missing pages, a set for each array; those that are in `hot` too come first.
    pub fn new(missing: Vec<PageSet>, hot: &[PageSet]) -> Self {
        let mut queue = VecDeque::new();
        for (array, hot) in hot.iter().enumerate().take(missing.len()) {
            queue.extend(chunks(hot).map(|run| (array, run)));
        }
        for (array, missing) in missing.iter().enumerate() {
            queue.extend(chunks(missing).map(|run| (array, run)));
        }
        let part = |open: PageSet| ArrayState { requested: PageSet::empty(open.len()), unrequested: open };
        let count = missing.iter().map(PageSet::count).sum();
        let arrays = missing.into_iter().map(part).collect();
        Self { arrays, missing: count, faults: VecDeque::new(), queue }
    }

    /// Reports a fault: the pages around it come next.
    pub fn faulted(&mut self, array: usize, page: u64) {
        let Some(part) = self.arrays.get(array).filter(|part| page < part.unrequested.len()) else { return };
        let start = page.saturating_sub(BEFORE);
        let end = page.saturating_add(AFTER).min(part.unrequested.len());
        self.faults.push_front((array, PageRun::new(start, end - start)));
        self.faults.truncate(FAULTS_MAX);
    }

    /// Pages to request next, at most `max`. None if all missing pages were requested.
    pub fn next(&mut self, max: u64) -> Option<FetchRange> {
        while let Some((array, run)) = self.faults.pop_front() {
            let runs = self.take(array, run, max);
            if !runs.is_empty() {
                // More pages of the neighbourhood may be left.
                self.faults.push_front((array, run));
                return Some(FetchRange { array, runs });
            }
        }
        let mut ask: Option<FetchRange> = None;
        let mut room = max;
        while let Some((array, run)) = self.queue.pop_front() {
            if ask.as_ref().is_some_and(|ask| ask.array != array) || room == 0 {
                self.queue.push_front((array, run));
                break;
            }
            let runs = self.take(array, run, room);
            let taken: u64 = runs.iter().map(|run| run.len).sum();
            if taken == 0 {
                continue;
            }
            room -= taken;
            if let Some(end) = runs.last().map(PageRun::end).filter(|end| *end < run.end()) {
                self.queue.push_front((array, PageRun::new(end, run.end() - end)));
            }
            ask.get_or_insert_with(|| FetchRange { array, runs: Vec::new() }).runs.extend(runs);
        }
        ask
    }

    /// Takes at most `max` unrequested pages of `run`.
    fn take(&mut self, array: usize, run: PageRun, max: u64) -> Vec<PageRun> {
        let part = &mut self.arrays[array];
        let mut runs: Vec<PageRun> = Vec::new();
        let open: Vec<u64> =
            run.pages().filter(|page| part.unrequested.contains(*page)).take(max as usize).collect();
        for page in open {
            part.unrequested.remove(page);
            part.requested.insert(page);
            match runs.last_mut() {
                Some(last) if last.end() == page => last.len += 1,
                _ => runs.push(PageRun::new(page, 1)),
            }
        }
        runs
    }

    /// Reports that the requested pages are stored.
    pub fn arrived(&mut self, ask: &FetchRange) {
        ask.runs.iter().for_each(|run| self.mark_present(ask.array, *run));
    }

    /// Reports that these pages are here, from whatever source.
    pub fn mark_present(&mut self, array: usize, run: PageRun) {
        if let Some(part) = self.arrays.get_mut(array) {
            let awaited = |page: &u64| part.unrequested.contains(*page) || part.requested.contains(*page);
            self.missing -= run.pages().filter(awaited).count() as u64;
            part.unrequested.remove_run(run);
            part.requested.remove_run(run);
        }
    }

    /// Reports that the requested pages did not arrive.
    pub fn lost(&mut self, ask: &FetchRange) {
        let Some(part) = self.arrays.get_mut(ask.array) else { return };
        for run in &ask.runs {
            for page in run.pages().filter(|page| part.requested.contains(*page)) {
                part.unrequested.insert(page);
            }
            part.requested.remove_run(*run);
            self.queue.push_front((ask.array, *run));
        }
    }

    /// Number of pages that are not known to be here.
    pub fn missing(&self) -> u64 {
        self.missing
    }
}

fn chunks(set: &PageSet) -> impl Iterator<Item = PageRun> {
    set.runs().flat_map(|run| run.chunks(CHUNK).collect::<Vec<_>>())
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    const LEN: u64 = 300;

    #[derive(Debug, Clone)]
    enum Step {
        Ask(u64),
        Arrive(prop::sample::Index),
        Lose(prop::sample::Index),
        Touch(usize, u64),
        Here(usize, u64, u64),
    }

    fn step() -> impl Strategy<Value = Step> {
        prop_oneof![
            4 => (1..40u64).prop_map(Step::Ask),
            3 => any::<prop::sample::Index>().prop_map(Step::Arrive),
            1 => any::<prop::sample::Index>().prop_map(Step::Lose),
            1 => (0..3usize, 0..LEN + 20).prop_map(|(array, page)| Step::Touch(array, page)),
            1 => (0..2usize, 0..LEN, 1..20u64).prop_map(|(a, s, l)| Step::Here(a, s, l.min(LEN - s))),
        ]
    }

    fn set(runs: &[(u64, u64)]) -> PageSet {
        let mut set = PageSet::empty(LEN);
        runs.iter().for_each(|(start, len)| set.insert_run(PageRun::new(*start, (*len).min(LEN - start))));
        set
    }

    fn runs() -> impl Strategy<Value = Vec<(u64, u64)>> {
        prop::collection::vec((0..LEN, 1..60u64), 0..6)
    }

    proptest! {
        #[test]
        fn every_missing_page_is_asked_for_until_it_is_here_and_no_page_twice_at_once(
            memory in runs(), disk in runs(), hot in runs(), steps in prop::collection::vec(step(), 0..80),
        ) {
            let missing = vec![set(&memory), set(&disk)];
            let mut schedule = FetchSchedule::new(missing.clone(), &[set(&hot)]);
            // Pages that are really missing, and requests in flight.
            let (mut truth, mut under_way) = (missing, Vec::<FetchRange>::new());
            let all_of = |asks: &[FetchRange], array: usize| {
                let mut set = PageSet::empty(LEN);
                for run in asks.iter().filter(|ask| ask.array == array).flat_map(|ask| &ask.runs) {
                    assert!(run.pages().all(|page| !set.contains(page)), "asked for twice");
                    set.insert_run(*run);
                }
                set
            };
            for step in steps {
                match step {
                    Step::Ask(max) => if let Some(ask) = schedule.next(max) {
                        let pages: u64 = ask.runs.iter().map(|run| run.len).sum();
                        prop_assert!((1..=max).contains(&pages), "{ask:?}");
                        prop_assert!(ask.runs.iter().flat_map(PageRun::pages).all(|p| truth[ask.array].contains(p)));
                        under_way.push(ask);
                        (0..2).for_each(|array| drop(all_of(&under_way, array)));
                    },
                    Step::Arrive(which) if !under_way.is_empty() => {
                        let ask = under_way.swap_remove(which.index(under_way.len()));
                        ask.runs.iter().for_each(|run| truth[ask.array].remove_run(*run));
                        schedule.arrived(&ask);
                    }
                    Step::Lose(which) if !under_way.is_empty() => {
                        schedule.lost(&under_way.swap_remove(which.index(under_way.len())));
                    }
                    Step::Touch(array, page) => schedule.faulted(array, page),
                    Step::Here(array, start, len) => {
                        truth[array].remove_run(PageRun::new(start, len));
                        schedule.mark_present(array, PageRun::new(start, len));
                    }
                    Step::Arrive(_) | Step::Lose(_) => {}
                }
                prop_assert_eq!(schedule.missing(), truth.iter().map(PageSet::count).sum::<u64>());
            }
            under_way.iter().for_each(|ask| schedule.lost(ask));
            while let Some(ask) = schedule.next(17) {
                ask.runs.iter().for_each(|run| truth[ask.array].remove_run(*run));
                schedule.arrived(&ask);
            }
            prop_assert!(truth.iter().all(PageSet::is_empty) && schedule.missing() == 0, "{truth:?}");
        }
    }

    #[test]
    fn neighbours_of_the_last_fault_come_first_then_what_is_hot_then_the_rest() {
        let mut schedule =
            FetchSchedule::new(vec![PageSet::full(LEN), PageSet::full(LEN)], &[set(&[(200, 2)])]);
        assert_eq!(schedule.next(8).unwrap().runs, [PageRun::new(200, 2), PageRun::new(0, 6)]);
        schedule.faulted(0, 3);
        schedule.faulted(1, 100);
        let first = schedule.next(16).unwrap();
        assert_eq!((first.array, &first.runs[..]), (1, &[PageRun::new(92, 16)][..]));
        schedule.lost(&first);
        assert_eq!(schedule.next(64).unwrap(), FetchRange { array: 1, runs: vec![PageRun::new(92, 64)] });
        assert_eq!(schedule.next(64).unwrap(), FetchRange { array: 0, runs: vec![PageRun::new(6, 53)] });
        assert_eq!(schedule.next(5).unwrap(), FetchRange { array: 0, runs: vec![PageRun::new(59, 5)] });
    }
}
