//! Tests of the precopy policy on made-up rounds, and on rounds of a simple model of a machine and a link.

use super::*;
use proptest::prelude::*;

const MBIT: u64 = 1_000_000 / 8;
const PAGE: u64 = PAGE_SIZE as u64;

fn adaptive(min: u64, max: Option<u64>) -> PrecopyPolicy {
    let rates = Rates::Adaptive { min: min * MBIT, max: max.map(|max| max * MBIT), step: 50 * MBIT };
    PrecopyPolicy::new(rates, Duration::from_millis(10))
}

fn round(pages: u64, ms: u64, limit: Option<u64>, left: u64) -> RoundStats {
    let took = Duration::from_millis(ms);
    RoundStats { pages, bytes: pages * PAGE, duration: took, limit, left, ..RoundStats::default() }
}

/// A machine that writes `rate` pages a second all over `working_set` of its pages, and a link.
#[derive(Debug, Clone, Copy)]
struct Model {
    pages: u64,
    working_set: u64,
    rate: f64,
    link: f64,
}

impl Model {
    /// Distinct pages written in `seconds`, if each write hits any of the working set.
    fn dirtied(&self, seconds: f64) -> u64 {
        let set = self.working_set as f64;
        (set * (1.0 - (-self.rate * seconds / set).exp())) as u64
    }

    /// Runs rounds as `policy` wants them; returns them and how they ended.
    fn run(&self, policy: &PrecopyPolicy) -> (Vec<RoundStats>, u64, Option<u64>, StopReason) {
        let (mut rounds, mut left) = (Vec::<RoundStats>::new(), self.pages);
        loop {
            match policy.decide(&rounds, left) {
                RoundDecision::Stop { rate, stop_reason: why } => return (rounds, left, rate, why),
                RoundDecision::Round { rate } => {
                    let speed = rate.map_or(self.link, |rate| self.link.min(rate as f64));
                    let seconds = (left * PAGE) as f64 / speed;
                    let now_left = self.dirtied(seconds);
                    rounds.push(RoundStats {
                        pages: left,
                        bytes: left * PAGE,
                        duration: Duration::from_secs_f64(seconds),
                        limit: rate,
                        left: now_left,
                        ..RoundStats::default()
                    });
                    left = now_left;
                }
            }
        }
    }
}

fn model() -> impl Strategy<Value = Model> {
    (1_000..500_000u64, 1..=100u64, 1.0..200_000.0f64, 10..10_000u64).prop_map(|(pages, part, rate, mbit)| {
        Model { pages, working_set: (pages * part / 100).max(1), rate, link: (mbit * MBIT) as f64 }
    })
}

proptest! {
    /// The fears: rounds without end, a rate outside its limits, a pause for no reason.
    #[test]
    fn every_machine_is_paused_for_a_reason_and_every_round_keeps_its_limits(
        model in model(), min in 1..1000u64, more in prop::option::of(0..2000u64), step in 1..200u64,
    ) {
        let max = more.map(|more| (min + more) * MBIT);
        let rates = Rates::Adaptive { min: min * MBIT, max, step: step * MBIT };
        let policy = PrecopyPolicy::new(rates, Duration::from_millis(10));
        let (rounds, left, last_rate, why) = model.run(&policy);
        prop_assert!(rounds.len() <= ROUNDS_MAX as usize);
        prop_assert_eq!(last_rate, max, "the last round goes at the maximum");
        for (at, round) in rounds.iter().enumerate() {
            let limit = round.limit.expect("every round is limited");
            prop_assert!(limit >= min * MBIT && max.is_none_or(|max| limit <= max));
            match at.checked_sub(1).map(|before| rounds[before]) {
                None => prop_assert_eq!(limit, min * MBIT),
                Some(before) => {
                    let dirtied = (before.left * PAGE) as f64 / before.duration.as_secs_f64();
                    let wanted = (dirtied as u64 + step * MBIT).max(min * MBIT);
                    prop_assert!(limit.abs_diff(wanted) <= 1 + wanted / 1_000_000, "{limit}, not {wanted}");
                }
            }
        }
        match why {
            StopReason::LittleLeft => prop_assert!(left < 64),
            StopReason::WithinDowntime => prop_assert!(policy.downtime(&rounds, left).unwrap() <= policy.downtime_max),
            StopReason::RateAboveMax => {
                let last = rounds.last().unwrap();
                let dirtied = (last.left * PAGE) as f64 / last.duration.as_secs_f64();
                prop_assert!(dirtied as u64 + step * MBIT + 1 >= max.unwrap());
            }
            StopReason::Plateau => {
                let least = rounds.iter().rev().skip(1).take(2).map(|round| round.left).min().unwrap();
                prop_assert!(rounds.len() > 2 + PLATEAU_ROUNDS_MAX || left as f64 <= least as f64 * 1.06, "{left} of {least}");
            }
            StopReason::RoundsOver => prop_assert_eq!(rounds.len(), ROUNDS_MAX as usize),
        }
    }

    /// The fear: a history that no sound loop makes (no pages, no time, absurd numbers) ends in a panic.
    #[test]
    fn no_history_makes_it_fail(
        rounds in prop::collection::vec((any::<u64>(), any::<u64>(), any::<u64>(), any::<Option<u64>>(), any::<u64>()), 0..40),
        left: u64, min: u64, max: Option<u64>, step: u64,
    ) {
        let rounds: Vec<RoundStats> = rounds.into_iter().map(|(pages, bytes, us, limit, left)| RoundStats {
            pages: pages >> 20, bytes, duration: Duration::from_micros(us), limit, left: left >> 20, ..RoundStats::default()
        }).collect();
        for rates in [Rates::Adaptive { min, max, step }, Rates::Full { max }] {
            let policy = PrecopyPolicy::new(rates, Duration::from_millis(10));
            policy.decide(&rounds, left);
            policy.downtime(&rounds, left);
        }
    }

    #[test]
    fn without_a_minimum_every_round_goes_as_fast_as_it_may(model in model(), max in prop::option::of(10..1000u64)) {
        let max = max.map(|max| max * MBIT);
        let (rounds, _, last_rate, why) = model.run(&PrecopyPolicy::new(Rates::Full { max }, Duration::from_millis(10)));
        prop_assert!(rounds.iter().all(|round| round.limit == max) && last_rate == max);
        prop_assert_ne!(why, StopReason::RateAboveMax);
    }
}

#[test]
fn follows_figure_9() {
    // SPECweb99 of the paper's section 6.2: 100 to 500 Mbit/s, 676.8 MB in the first round, 126.7 and 39.0 MB
    // then.
    let policy = adaptive(100, Some(500));
    let pages = |mb: f64| (mb * 1e6) as u64 / PAGE;
    assert_eq!(policy.decide(&[], pages(676.8)), RoundDecision::Round { rate: Some(100 * MBIT) });
    let first = round(pages(676.8), 54_100, Some(100 * MBIT), pages(126.7));
    let low = policy.decide(&[first], pages(126.7));
    assert_eq!(
        low,
        RoundDecision::Round { rate: Some(100 * MBIT) },
        "19 Mbit/s are dirtied: the minimum still"
    );
    let hot = round(pages(14.2), 250, Some(450 * MBIT), pages(15.3));
    let stop = RoundDecision::Stop { rate: Some(500 * MBIT), stop_reason: StopReason::RateAboveMax };
    assert_eq!(policy.decide(&[first, hot], pages(15.3)), stop, "490 Mbit/s are dirtied");
}

#[test]
fn what_is_cheap_to_send_counts_as_what_it_costs() {
    let policy = adaptive(100, Some(500));
    let dear = round(50_000, 2_000, Some(100 * MBIT), 25_000);
    assert!(matches!(policy.decide(&[dear], 25_000), RoundDecision::Round { .. }), "410 Mbit/s, and 50");
    let dear = RoundStats { left: 40_000, ..dear };
    assert!(matches!(
        policy.decide(&[dear], 40_000),
        RoundDecision::Stop { stop_reason: StopReason::RateAboveMax, .. }
    ));
    let cheap = RoundStats { bytes: dear.bytes / 8, ..dear };
    let RoundDecision::Round { rate: Some(rate) } = policy.decide(&[cheap], 40_000) else { panic!("paused") };
    assert!((130..135).contains(&(rate / MBIT)), "an eighth of 655 Mbit/s, and 50");
}

#[test]
fn a_plateau_ends_at_a_low_and_not_at_a_high() {
    let policy = PrecopyPolicy::new(Rates::Full { max: None }, Duration::from_millis(1));
    let rounds = |lefts: &[u64]| -> Vec<RoundStats> {
        let pages = [100_000].iter().chain(lefts);
        pages.zip(lefts).map(|(pages, left)| round(*pages, 1 + pages / 30, None, *left)).collect()
    };
    let decide = |lefts: &[u64]| policy.decide(&rounds(lefts), *lefts.last().unwrap());
    let stop = RoundDecision::Stop { rate: None, stop_reason: StopReason::Plateau };
    let go_on = RoundDecision::Round { rate: None };
    assert_eq!(decide(&[9_000, 9_100, 20_000]), go_on, "a burst of writing: wait");
    assert_eq!(decide(&[9_000, 9_100, 20_000, 9_200]), stop, "it is over");
    let restless = [9_000, 9_100, 12_000, 20_000, 30_000, 40_000, 50_000, 60_000];
    assert_eq!(decide(&restless), stop, "it does not end: patience does");
}

#[test]
fn the_last_round_is_predicted_at_full_rate() {
    let policy = adaptive(100, Some(500));
    let held = round(10_000, 3_277, Some(100 * MBIT), 1_000);
    let ms = policy.downtime(&[held], 1_000).unwrap().as_millis();
    assert!((64..=67).contains(&ms), "4 MB at 500 Mbit/s: {ms} ms");
    let slow = RoundStats { duration: held.duration * 2, ..held };
    let ms = policy.downtime(&[slow], 1_000).unwrap().as_millis();
    assert!((600..=700).contains(&ms), "the link gives 50 Mbit/s: {ms} ms");
    assert_eq!(policy.downtime(&[], 1_000), None, "nothing is known before the first round");
}

#[test]
fn stops_under_256_kib_and_within_the_downtime() {
    let policy = adaptive(100, None);
    let little = |left| policy.decide(&[round(100_000, 40_000, Some(100 * MBIT), left)], left);
    assert_eq!(little(63), RoundDecision::Stop { rate: None, stop_reason: StopReason::LittleLeft });
    assert!(matches!(little(64), RoundDecision::Round { .. }), "21 ms at 100 Mbit/s");
    let full = PrecopyPolicy::new(Rates::Full { max: None }, Duration::from_millis(20));
    let decide = |left| full.decide(&[round(100_000, 3_000, None, left)], left);
    assert_eq!(decide(1000), RoundDecision::Round { rate: None }, "30 ms at the last rate");
    assert_eq!(decide(600), RoundDecision::Stop { rate: None, stop_reason: StopReason::WithinDowntime });
}

#[test]
fn a_stopped_machine_needs_no_rounds() {
    let stop = RoundDecision::Stop { rate: Some(7), stop_reason: StopReason::RoundsOver };
    assert_eq!(PrecopyPolicy::stopped(Some(7)).decide(&[], 1 << 30), stop);
}
