//! Downtime model: predicts the downtime of a migration by simulating precopy over a dirty trace. Pure.
//!
//! Section 4.2 of Clark et al. (NSDI 2005): the first round sends every page that holds something, round *i*
//! sends what was dirtied during round *i - 1*, all at one bandwidth; what was dirtied during the last one is
//! sent in the downtime. `downtime = pages left * bytes a page / bandwidth + fixed`.
//!
//! Two things differ from the paper. A page that was sent before is sent as a difference, so it costs less on
//! the wire and may be limited by the processor instead: [`Model`] has both costs. The number of rounds is
//! decided while they run: `Simulation::simulate_migration` asks the precopy policy itself. Throttling is
//! left out: a machine that writes too fast to keep up with has a shorter downtime than predicted.
//!
//! A round seldom ends with a sample. A sample that overlaps a round partly counts with that fraction of its
//! pages, because the trace does not tell when in it a page was written. A page of two such samples counts
//! with both fractions, at most once. A trace shorter than a round is repeated from its start; repetition
//! dirties nothing new, so such a prediction ([`Prediction::exceeds_trace`]) is a lower bound for machines
//! that go on to other work.
//!
//! Another round, or a faster link, never enlarges the *first* set. Later rounds fall into other parts of the
//! trace, so for a machine that works in bursts they may meet a burst that a slower migration would have
//! missed.

use crate::{
    PrecopyPolicy, Rates, RoundDecision, RoundStats, StopPolicy, dirty_trace::DirtyTrace,
    precopy_policy::DOWNTIME_MAX,
};
use std::time::Duration;
use whimbrel_core::{PAGE_SIZE, PageSet};

/// Most start times that [`summary`] simulates.
const STARTS_MAX: usize = 100;
/// Fractions above this count as 1: sums of times are not exact.
const FULL_FRACTION: f64 = 1.0 - 1e-8;

/// Costs of a page, and the fixed cost.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Model {
    /// Bytes per page on the wire in the first round.
    pub page_bytes: f64,
    /// Bytes per page on the wire in later rounds.
    pub resend_bytes: f64,
    /// Least time per page in later rounds, however fast the link is.
    pub page_time: Duration,
    /// Time to stop the machine, save and load the device state, and start it.
    pub fixed: Duration,
}

impl Default for Model {
    /// Uncompressed pages, and the 20 ms downtime of an idle machine by the hosts' clocks
    /// (`bench/results/migrate.json`).
    fn default() -> Self {
        let page = PAGE_SIZE as f64;
        let (page_time, fixed) = (Duration::ZERO, Duration::from_millis(20));
        Self { page_bytes: page, resend_bytes: page, page_time, fixed }
    }
}

impl Model {
    /// Time of `pages` pages in the round after `before` others, and their bytes.
    fn cost(&self, pages: f64, before: usize, bandwidth: u64) -> (f64, f64) {
        let (each, least) = match before {
            0 => (self.page_bytes, 0.0),
            _ => (self.resend_bytes, self.page_time.as_secs_f64()),
        };
        let bytes = pages * each;
        ((bytes / bandwidth.max(1) as f64).max(pages * least), bytes)
    }

    fn downtime(&self, pages: f64, bandwidth: u64) -> f64 {
        self.cost(pages, 1, bandwidth).0 + self.fixed.as_secs_f64()
    }
}

/// Prediction for one simulated migration.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Prediction {
    /// Rounds while the machine runs.
    pub rounds: u32,
    /// Pages left for the last round.
    pub left: f64,
    /// Predicted downtime of the machine.
    pub downtime: Duration,
    /// Time from the first page to the last.
    pub total: Duration,
    /// Whether the trace was too short for it.
    pub exceeds_trace: bool,
}

/// Summary of the predictions for a bandwidth and a number of rounds, over the simulated start times.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Summary {
    /// Bandwidth in bytes a second.
    pub bandwidth: u64,
    /// Rounds while the machine runs.
    pub rounds: u32,
    /// Median of the downtimes.
    pub median: Duration,
    /// Longest of the downtimes.
    pub worst: Duration,
    /// Median duration of the migration.
    pub total: Duration,
    /// Whether the trace was too short for any of them.
    pub exceeds_trace: bool,
}

/// Trace prepared for simulation.
#[derive(Debug)]
pub struct Simulation<'a> {
    trace: &'a DirtyTrace,
    /// End of each sample, in seconds.
    ends: Vec<f64>,
    /// Pages of all samples, each counted once.
    unique_pages: u64,
}

impl<'a> Simulation<'a> {
    /// Prepares a trace; none if it has no samples.
    pub fn new(trace: &'a DirtyTrace) -> Option<Self> {
        let mut set = PageSet::empty(trace.header.pages);
        let mut end = 0.0;
        let mut ends = Vec::with_capacity(trace.samples.len());
        for sample in &trace.samples {
            sample.dirty.iter().for_each(|run| set.insert_run(*run));
            end += sample.duration.as_secs_f64();
            ends.push(end);
        }
        (end > 0.0).then(|| Self { trace, ends, unique_pages: set.count() })
    }

    fn length(&self) -> f64 {
        self.ends.last().copied().unwrap_or_default()
    }

    /// Pages of all samples, each counted once.
    pub fn unique_pages(&self) -> u64 {
        self.unique_pages
    }

    /// Pages dirtied in the `seconds` after `from`.
    pub fn dirtied(&self, from: f64, seconds: f64) -> f64 {
        if seconds >= self.length() {
            return self.unique_pages as f64;
        }
        let mut full = PageSet::empty(self.trace.header.pages);
        let mut parts: Vec<(f64, PageSet)> = Vec::new();
        let mut at = from.rem_euclid(self.length());
        let mut index = self.ends.partition_point(|end| *end <= at);
        let mut left = seconds;
        while left > 0.0 {
            if index == self.ends.len() {
                (index, at) = (0, 0.0);
            }
            let sample = &self.trace.samples[index];
            let here = left.min(self.ends[index] - at);
            let part = here / sample.duration.as_secs_f64();
            if part >= FULL_FRACTION {
                sample.dirty.iter().for_each(|run| full.insert_run(*run));
            } else {
                let mut set = PageSet::empty(self.trace.header.pages);
                sample.dirty.iter().for_each(|run| set.insert_run(*run));
                parts.push((part, set));
            }
            left -= here;
            at = self.ends[index];
            index += 1;
        }
        full.count() as f64 + partly_dirtied(&full, &mut parts)
    }

    /// Simulates the migration that starts `start` seconds into the trace, for 1 to `rounds` rounds.
    pub fn simulate(&self, start: f64, bandwidth: u64, rounds: u32, model: &Model) -> Vec<Prediction> {
        let (mut at, mut sent, mut beyond) = (start, self.trace.header.populated as f64, false);
        let mut round = |number: u32| {
            let (took, _) = model.cost(sent, number as usize - 1, bandwidth);
            beyond |= (at + took) * FULL_FRACTION > self.length();
            sent = self.dirtied(at, took);
            at += took;
            let downtime = model.downtime(sent, bandwidth);
            let total = duration_of(at - start + downtime);
            Prediction {
                rounds: number,
                left: sent,
                downtime: duration_of(downtime),
                total,
                exceeds_trace: beyond,
            }
        };
        (1..=rounds).map(&mut round).collect()
    }

    /// Simulates the migration that starts `start` seconds into the trace, with the rounds that the policy
    /// decides.
    pub(crate) fn simulate_migration(&self, start: f64, bandwidth: u64, model: &Model) -> Prediction {
        let policy = PrecopyPolicy::new(Rates::Full { max: Some(bandwidth) }, DOWNTIME_MAX);
        let (mut at, mut left, mut beyond) = (start, self.trace.header.populated as f64, false);
        let mut history: Vec<RoundStats> = Vec::new();
        while let RoundDecision::Round { rate } = policy.decide(&history, left.round() as u64) {
            let (took, bytes) = model.cost(left, history.len(), bandwidth);
            beyond |= (at + took) * FULL_FRACTION > self.length();
            let pages = left.round() as u64;
            left = self.dirtied(at, took);
            at += took;
            history.push(RoundStats {
                pages,
                bytes: bytes.round() as u64,
                duration: duration_of(took),
                limit: rate,
                left: left.round() as u64,
                ..RoundStats::default()
            });
        }
        let downtime = model.downtime(left, bandwidth);
        let (rounds, total) = (history.len() as u32, duration_of(at - start + downtime));
        Prediction { rounds, left, downtime: duration_of(downtime), total, exceeds_trace: beyond }
    }

    /// Start times for a summary: samples at even distances, in seconds.
    pub fn starts(&self) -> Vec<f64> {
        let step = self.ends.len().div_ceil(STARTS_MAX).max(1);
        [0.0].iter().chain(&self.ends).copied().take(self.ends.len()).step_by(step).collect()
    }
}

/// Pages of samples that overlap a round partly, without those that are in it anyway.
fn partly_dirtied(full: &PageSet, parts: &mut [(f64, PageSet)]) -> f64 {
    parts.iter_mut().for_each(|(_, set)| set.subtract(full));
    let alone: f64 = parts.iter().map(|(part, set)| part * set.count() as f64).sum();
    match parts {
        // The first sample of a round and its last one.
        [(a, one), (b, other)] => {
            let mut both = one.clone();
            both.intersect(other);
            alone - (*a + *b - 1.0).max(0.0) * both.count() as f64
        }
        _ => alone,
    }
}

/// Summarizes every bandwidth with 1 to `rounds` rounds.
pub fn summary(simulation: &Simulation<'_>, bandwidths: &[u64], rounds: u32, model: &Model) -> Vec<Summary> {
    let starts = simulation.starts();
    let of = |bandwidth: u64| {
        let played: Vec<_> =
            starts.iter().map(|start| simulation.simulate(*start, bandwidth, rounds, model)).collect();
        (0..rounds as usize).map(move |round| {
            let column: Vec<_> = played.iter().filter_map(|play| play.get(round)).copied().collect();
            summarize(bandwidth, &column)
        })
    };
    bandwidths.iter().copied().flat_map(of).collect()
}

/// Summarizes every bandwidth with the rounds that the policy decides; their number is a median too.
pub fn summarize_migrations(simulation: &Simulation<'_>, bandwidths: &[u64], model: &Model) -> Vec<Summary> {
    let starts = simulation.starts();
    let of = |bandwidth: &u64| {
        let played = starts.iter().map(|start| simulation.simulate_migration(*start, *bandwidth, model));
        summarize(*bandwidth, &played.collect::<Vec<_>>())
    };
    bandwidths.iter().map(of).collect()
}

fn summarize(bandwidth: u64, played: &[Prediction]) -> Summary {
    let mut rounds: Vec<_> = played.iter().map(|p| p.rounds).collect();
    let mut downtimes: Vec<_> = played.iter().map(|p| p.downtime).collect();
    let mut totals: Vec<_> = played.iter().map(|p| p.total).collect();
    Summary {
        bandwidth,
        rounds: median(&mut rounds),
        median: median(&mut downtimes),
        worst: downtimes.last().copied().unwrap_or_default(),
        total: median(&mut totals),
        exceeds_trace: played.iter().any(|p| p.exceeds_trace),
    }
}

/// Median; sorts the values.
fn median<T: Copy + Ord + Default>(values: &mut [T]) -> T {
    values.sort_unstable();
    values.get(values.len() / 2).copied().unwrap_or_default()
}

/// Seconds as a duration; `Duration::MAX` if they are too many.
fn duration_of(seconds: f64) -> Duration {
    Duration::try_from_secs_f64(seconds.max(0.0)).unwrap_or(Duration::MAX)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::dirty_trace::{DirtyTraceHeader, Sample};
    use proptest::prelude::*;
    use whimbrel_core::PageRun;

    const PAGE: u64 = PAGE_SIZE as u64;

    fn trace(pages: u64, ms: u64, samples: Vec<Vec<PageRun>>) -> DirtyTrace {
        let every = Duration::from_millis(ms);
        let samples = samples.into_iter().map(|dirty| Sample { duration: every, dirty }).collect();
        DirtyTrace {
            header: DirtyTraceHeader { pages, populated: pages, interval: every, start_ms: 0 },
            samples,
        }
    }

    /// `hot` pages in every sample, and `fresh` others in each.
    fn steady(samples: u64, ms: u64, hot: u64, fresh: u64) -> DirtyTrace {
        let pages = hot + samples * fresh + 1;
        let dirty = (0..samples).map(|k| {
            let mut set = PageSet::empty(pages);
            set.insert_run(PageRun::new(0, hot));
            set.insert_run(PageRun::new(hot + k * fresh, fresh));
            set.runs().collect()
        });
        trace(pages, ms, dirty.collect())
    }

    fn model() -> Model {
        Model { fixed: Duration::from_millis(5), ..Model::default() }
    }

    fn ms(prediction: &Prediction) -> f64 {
        (prediction.downtime.as_secs_f64() * 1e6).round() / 1e3
    }

    #[test]
    fn a_machine_that_dirties_a_hundred_fresh_pages_a_second_is_as_by_hand() {
        let mut trace = steady(10, 100, 0, 10);
        (trace.header.pages, trace.header.populated) = (1000, 1000);
        let simulation = Simulation::new(&trace).unwrap();
        // 1000 pages a second: 1 s dirties 100 pages, they take 100 ms, which dirty 10, and so on.
        let played = simulation.simulate(0.0, 1000 * PAGE, 4, &model());
        assert_eq!(played.iter().map(ms).collect::<Vec<_>>(), [105.0, 15.0, 6.0, 5.1]);
        assert_eq!(played[1].total, Duration::from_millis(1000 + 100 + 15));
        assert!(!played[0].exceeds_trace && played[1].exceeds_trace);
    }

    #[test]
    fn pages_that_travel_again_cost_what_differences_do_and_not_less_than_the_processor_takes() {
        let mut trace = steady(10, 100, 0, 10);
        (trace.header.pages, trace.header.populated) = (1000, 1000);
        let simulation = Simulation::new(&trace).unwrap();
        let cheap = Model { resend_bytes: PAGE as f64 / 10.0, ..model() };
        // 1 s dirties 100 pages; they take 10 ms, in which one is.
        let played = simulation.simulate(0.0, 1000 * PAGE, 2, &cheap);
        assert_eq!(played.iter().map(ms).collect::<Vec<_>>(), [15.0, 5.1]);
        let busy = Model { page_time: Duration::from_micros(500), ..cheap };
        let played = simulation.simulate(0.0, 1000 * PAGE, 2, &busy);
        assert_eq!(played.iter().map(ms).collect::<Vec<_>>(), [55.0, 7.5]);
    }

    #[test]
    fn a_move_has_as_many_rounds_as_it_takes() {
        // 100 pages a second over a link of 10,000.
        let mut trace = steady(100, 100, 0, 10);
        (trace.header.pages, trace.header.populated) = (100_000, 100_000);
        let simulation = Simulation::new(&trace).unwrap();
        let calm = simulation.simulate_migration(0.0, 10_000 * PAGE, &model());
        // 10 s leave 1000 pages, 0.1 s of them leave 10, and so little is not worth another round.
        assert_eq!((calm.rounds, ms(&calm)), (2, 6.0));

        let mut hot = self::trace(10_000, 50, vec![vec![PageRun::new(0, 400)]; 20]);
        hot.header.populated = 10_000;
        let simulation = Simulation::new(&hot).unwrap();
        let busy = simulation.simulate_migration(0.0, 4000 * PAGE, &model());
        assert_eq!(ms(&busy), 105.0, "rounds do not help");
        assert!(busy.rounds < 6, "and it is seen: {busy:?}");
        let moved = summarize_migrations(&simulation, &[4000 * PAGE], &model());
        assert_eq!((moved[0].median, moved[0].rounds), (busy.downtime, busy.rounds));
    }

    #[test]
    fn pages_that_are_always_dirty_are_left_however_many_rounds_there_are() {
        let trace = trace(1000, 50, vec![vec![PageRun::new(0, 400)]; 20]);
        let simulation = Simulation::new(&trace).unwrap();
        let played = simulation.simulate(0.3, 4000 * PAGE, 4, &model());
        assert_eq!(played.iter().map(ms).collect::<Vec<_>>(), [105.0; 4]);
    }

    #[test]
    fn a_page_of_two_samples_that_a_round_cuts_counts_once() {
        let trace = trace(100, 100, vec![vec![PageRun::new(0, 40)], vec![PageRun::new(20, 40)]]);
        let simulation = Simulation::new(&trace).unwrap();
        // The second half of the first one and the first half of the second: 20 * 0.5 + 20 * 1 + 20 * 0.5.
        assert!((simulation.dirtied(0.05, 0.1) - 40.0).abs() < 1e-9);
        assert!((simulation.dirtied(0.15, 0.1) - 40.0).abs() < 1e-9, "round the end");
        assert_eq!(simulation.dirtied(0.15, 0.2), 60.0);
        assert_eq!(simulation.dirtied(0.15, 0.0), 0.0);
    }

    #[test]
    fn a_trace_without_samples_predicts_nothing() {
        assert!(Simulation::new(&trace(10, 50, vec![])).is_none());
    }

    #[test]
    fn the_overview_has_each_bandwidth_and_round_and_few_beginnings() {
        let trace = steady(1234, 50, 10, 1);
        let simulation = Simulation::new(&trace).unwrap();
        assert!((50..=STARTS_MAX).contains(&simulation.starts().len()));
        let rows = summary(&simulation, &[1 << 20, 16 << 20], 3, &model());
        assert_eq!(
            rows.iter().map(|row| (row.bandwidth >> 20, row.rounds)).collect::<Vec<_>>(),
            [(1, 1), (1, 2), (1, 3), (16, 1), (16, 2), (16, 3)]
        );
        assert!(rows.iter().all(|row| row.median <= row.worst && row.worst < row.total));
    }

    fn any_trace() -> impl Strategy<Value = DirtyTrace> {
        let runs = proptest::collection::vec((0..400u64, 1..60u64), 0..6);
        (proptest::collection::vec((runs, 1..300u64), 1..25)).prop_map(|samples| {
            let samples = samples.into_iter().map(|(runs, ms)| {
                let mut set = PageSet::empty(512);
                runs.iter().for_each(|(start, len)| set.insert_run(PageRun::new(*start, *len)));
                Sample { duration: Duration::from_millis(ms), dirty: set.runs().collect() }
            });
            let head = DirtyTraceHeader {
                pages: 512,
                populated: 512,
                interval: Duration::from_millis(50),
                start_ms: 0,
            };
            DirtyTrace { header: head, samples: samples.collect() }
        })
    }

    proptest! {
        #[test]
        fn a_longer_stretch_never_dirties_less_nor_more_than_all(
            trace in any_trace(), from in 0.0..10.0f64, seconds in 0.0..10.0f64, more in 0.0..5.0f64,
        ) {
            let simulation = Simulation::new(&trace).unwrap();
            let (short, long) = (simulation.dirtied(from, seconds), simulation.dirtied(from, seconds + more));
            prop_assert!(0.0 <= short && short <= long + 1e-6 && long <= simulation.unique_pages as f64 + 1e-6);
        }

        #[test]
        fn a_faster_link_never_leaves_more_after_the_first_round(
            trace in any_trace(), start in 0.0..5.0f64, slow in 1_000..10_000_000u64, faster in 1..10u64, rounds in 1..5u32,
        ) {
            let simulation = Simulation::new(&trace).unwrap();
            let at = |bandwidth| simulation.simulate(start, bandwidth, rounds, &model());
            let (slow, fast) = (at(slow), at(slow * faster));
            prop_assert!(fast[0].left <= slow[0].left + 1e-6 && fast[0].downtime <= slow[0].downtime + Duration::from_nanos(9));
            for play in slow.iter().chain(&fast) {
                prop_assert!(play.downtime >= model().fixed && play.total >= play.downtime && play.left >= 0.0);
            }
        }

        #[test]
        fn of_a_machine_that_works_evenly_a_faster_link_and_a_further_round_never_make_it_worse(
            samples in 1..40u64, ms in 1..200u64, hot in 0..200u64, fresh in 1..40u64,
            start in 0.0..5.0f64, slow in 10_000..50_000_000u64, faster in 1..10u64,
        ) {
            let trace = steady(samples, ms, hot, fresh);
            let simulation = Simulation::new(&trace).unwrap();
            let (slow, fast) = (simulation.simulate(start, slow, 4, &model()), simulation.simulate(start, slow * faster, 4, &model()));
            for (slow, fast) in slow.iter().zip(&fast) {
                prop_assert!(fast.left <= slow.left + 1e-5, "{fast:?} {slow:?}");
                prop_assert!(fast.downtime <= slow.downtime + Duration::from_micros(1));
            }
            for pair in slow.windows(2) {
                prop_assert!(pair[1].left <= pair[0].left + 1e-5);
            }
        }
    }
}
