//! Rules of starts without a user: which machines start with the host and in what order, and when one that
//! ended by itself is restarted. Pure.

use std::time::{Duration, Instant};
use whimbrel_api::{Autostart, RestartPolicy, RestartRule};
use whimbrel_core::MachineName;

/// Delay before the first restart; it doubles with each further one.
const FIRST_DELAY: Duration = Duration::from_secs(1);
const LONGEST_DELAY: Duration = Duration::from_secs(300);
/// Run after which the next end begins a new row of restarts.
const STEADY: Duration = Duration::from_secs(600);

/// How a machine ended that no user stopped.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum End {
    /// The guest shut down.
    Shutdown,
    /// QEMU died, or could not be started.
    Failure,
}

/// Restarts of one machine.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub(crate) struct Restarts {
    /// Restarts in a row.
    pub(crate) count: u32,
    /// Time of the next start, with its place among starts of the same time.
    pub(crate) next: Option<(Instant, usize)>,
    pub(crate) gave_up: bool,
    /// Cause of the last failed start.
    pub(crate) failure: Option<String>,
    /// Time of the last start.
    started: Option<Instant>,
}

impl Restarts {
    /// A start that is due at a time.
    pub(crate) fn due(at: Instant, place: usize) -> Self {
        Self { next: Some((at, place)), ..Self::default() }
    }

    /// Plans the restart of a machine that has ended, as far as its rule allows one.
    pub(crate) fn ended(&mut self, rule: RestartRule, how: End, now: Instant) {
        let wanted = match rule.policy {
            RestartPolicy::No => false,
            RestartPolicy::OnFailure => how == End::Failure,
            RestartPolicy::Always => true,
        };
        // One that is planned already must not be put off or counted twice.
        if !wanted || self.next.is_some() {
            return;
        }
        if self.started.take().is_some_and(|started| now.saturating_duration_since(started) >= STEADY) {
            (self.count, self.gave_up) = (0, false);
        }
        if self.count >= rule.limit {
            self.gave_up = true;
            return;
        }
        let delay = FIRST_DELAY.saturating_mul(2_u32.saturating_pow(self.count)).min(LONGEST_DELAY);
        self.next = Some((now + delay, 0));
    }

    /// Puts a planned start off, as the machine cannot be started yet.
    pub(crate) fn put_off(&mut self, until: Instant) {
        self.next = Some((until, 0));
    }

    /// Counts a start that has succeeded.
    pub(crate) fn started(&mut self, now: Instant) {
        self.count = self.count.saturating_add(1);
        (self.next, self.started, self.failure) = (None, Some(now), None);
    }

    /// Counts a start that has failed, and plans the next one.
    pub(crate) fn failed(&mut self, rule: RestartRule, failure: String, now: Instant) {
        self.count = self.count.saturating_add(1);
        (self.next, self.started, self.failure) = (None, None, Some(failure));
        self.ended(rule, End::Failure, now);
    }
}

/// Starts of the machines that start with the host: each after the delays of those before it.
pub(crate) fn autostarts(machines: &[(MachineName, Autostart)]) -> Vec<(MachineName, Duration)> {
    let on = machines.iter().filter_map(|(name, autostart)| match autostart {
        Autostart::Off => None,
        Autostart::On { order, delay_s } => Some((*order, name, Duration::from_secs((*delay_s).into()))),
    });
    let mut wanted: Vec<_> = on.collect();
    wanted.sort_unstable();
    let mut offset = Duration::ZERO;
    let planned = wanted.into_iter().map(|(_, name, delay)| {
        let at = offset;
        offset += delay;
        (name.clone(), at)
    });
    planned.collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn rule(policy: RestartPolicy, limit: u32) -> RestartRule {
        RestartRule { policy, limit }
    }

    fn name(text: &str) -> MachineName {
        text.parse().unwrap()
    }

    #[test]
    fn only_ends_of_the_policy_are_answered() {
        let now = Instant::now();
        for (policy, how, wanted) in [
            (RestartPolicy::No, End::Failure, false),
            (RestartPolicy::No, End::Shutdown, false),
            (RestartPolicy::OnFailure, End::Failure, true),
            (RestartPolicy::OnFailure, End::Shutdown, false),
            (RestartPolicy::Always, End::Failure, true),
            (RestartPolicy::Always, End::Shutdown, true),
        ] {
            let mut restarts = Restarts::default();
            restarts.ended(rule(policy, 3), how, now);
            assert_eq!(restarts.next.is_some(), wanted, "{policy:?} {how:?}");
        }
    }

    #[test]
    fn a_machine_that_keeps_dying_is_restarted_ever_later_and_then_left_alone() {
        let (mut now, mut restarts) = (Instant::now(), Restarts::default());
        let always = rule(RestartPolicy::Always, 12);
        let mut delays = Vec::new();
        loop {
            restarts.ended(always, End::Failure, now);
            let Some((next, _)) = restarts.next else { break };
            delays.push((next - now).as_secs());
            now = next;
            restarts.started(now);
        }
        assert_eq!(delays, [1, 2, 4, 8, 16, 32, 64, 128, 256, 300, 300, 300]);
        assert!(restarts.gave_up && restarts.count == 12);
    }

    #[test]
    fn a_long_run_begins_a_new_row_and_a_second_report_of_an_end_changes_nothing() {
        let (now, mut restarts) = (Instant::now(), Restarts::default());
        let twice = rule(RestartPolicy::OnFailure, 1);
        restarts.ended(twice, End::Failure, now);
        let planned = restarts.clone();
        restarts.ended(twice, End::Failure, now + Duration::from_millis(500));
        assert_eq!(restarts, planned);
        restarts.started(now);
        restarts.ended(twice, End::Failure, now + STEADY);
        assert!(!restarts.gave_up && restarts.next.is_some() && restarts.count == 0, "{restarts:?}");
        restarts.started(now);
        restarts.ended(twice, End::Failure, now + STEADY / 2);
        assert!(restarts.gave_up && restarts.next.is_none(), "{restarts:?}");
    }

    #[test]
    fn a_start_that_fails_counts_and_says_why() {
        let (now, mut restarts) = (Instant::now(), Restarts::due(Instant::now(), 3));
        restarts.failed(rule(RestartPolicy::No, 3), "no memory".into(), now);
        assert_eq!((restarts.next, restarts.failure.as_deref()), (None, Some("no memory")));
        restarts.failed(rule(RestartPolicy::Always, 9), "no memory".into(), now);
        assert_eq!(restarts.next, Some((now + Duration::from_secs(4), 0)));
        restarts.started(now);
        assert_eq!(restarts.failure, None);
    }

    #[test]
    fn the_order_decides_then_the_name_and_delays_add_up() {
        let on = |order, delay_s| Autostart::On { order, delay_s };
        let machines = [
            (name("web"), on(1, 0)),
            (name("off"), Autostart::Off),
            (name("db"), on(0, 30)),
            (name("app"), on(1, 5)),
        ];
        let planned = autostarts(&machines);
        let planned: Vec<_> = planned.iter().map(|(name, at)| (name.as_str(), at.as_secs())).collect();
        assert_eq!(planned, [("db", 0), ("app", 30), ("web", 35)]);
    }

    proptest! {
        /// Whatever happens, no more restarts come in a row than the limit has, and delays are bounded.
        #[test]
        fn restarts_in_a_row_are_bounded(
            limit in 1_u32..20, ends in prop::collection::vec((0_u64..400, any::<bool>(), any::<bool>()), 1..100)
        ) {
            let (mut now, mut restarts) = (Instant::now(), Restarts::default());
            let (always, mut in_a_row) = (rule(RestartPolicy::Always, limit), 0);
            for (ran_s, starts, shutdown) in ends {
                restarts.ended(always, if shutdown { End::Shutdown } else { End::Failure }, now);
                let Some((next, _)) = restarts.next else {
                    prop_assert!(restarts.gave_up && in_a_row == limit);
                    break;
                };
                prop_assert!(next >= now + FIRST_DELAY && next <= now + LONGEST_DELAY);
                now = next;
                in_a_row += 1;
                match starts {
                    true => {
                        restarts.started(now);
                        now += Duration::from_secs(ran_s);
                    }
                    false => restarts.failed(always, "no".into(), now),
                }
                prop_assert!(in_a_row <= limit);
            }
        }
    }
}
