//! Limits of a migration: checks the requested rates and rounds, and fills in defaults.

use crate::core::error::DaemonError;
use std::time::Duration;
use whimbrel_api::{MigrateMode, MigrateRequest};
use whimbrel_capture::{PrecopyPolicy, Rates, RoundDecision, StopPolicy, precopy_policy::DOWNTIME_MAX};
use whimbrel_core::ByteSize;
use whimbrel_migrate::Budget;

/// Default downtime of a postcopy migration, which need not wait for the pages in its pause.
const DOWNTIME_MAX_POSTCOPY: Duration = Duration::from_millis(10);
/// "We have empirically determined that 50 Mbit/s is a suitable value" (Clark et al., NSDI 2005, section
/// 5.3).
const RATE_STEP: u64 = 50 * MBIT;
/// Rate of the first round in the paper's experiments (section 6).
const RATE_MIN: u64 = 100 * MBIT;
/// A copy of everything, and one round of what was written meanwhile.
const HYBRID_ROUNDS: u32 = 2;
/// Time to pause and load a machine, which the prediction of a downtime leaves out: ten times what a host
/// without KVM needs.
const LOAD_ALLOWANCE: Duration = Duration::from_secs(1);
const MBIT: u64 = 1_000_000 / 8;
/// Slower than any plausible link: a GiB would take a day.
const RATE_LOWEST: u64 = 10_000;

/// The limits that end a migration before its commit point. A downtime that the user has set is enforced,
/// with an allowance for what its prediction leaves out.
pub(super) fn budget<'a>(request: &MigrateRequest, cancelled: &'a (dyn Fn() -> bool + Sync)) -> Budget<'a> {
    let downtime = request.downtime_max_ms.map(|max| Duration::from_millis(max) + LOAD_ALLOWANCE);
    Budget { downtime, time: request.time_max_ms.map(Duration::from_millis), cancelled }
}

/// The precopy policy for a machine that runs or is paused already.
pub(super) fn policy(request: &MigrateRequest, was_paused: bool) -> Result<PrecopyPolicy, DaemonError> {
    let rates = rates(request)?;
    let leaving = matches!(request.mode, MigrateMode::Lazy | MigrateMode::Hybrid);
    let usual = if leaving { DOWNTIME_MAX_POSTCOPY } else { DOWNTIME_MAX };
    let downtime_max = request.downtime_max_ms.map_or(usual, Duration::from_millis);
    let still = was_paused && !leaving;
    if still || request.mode == MigrateMode::Stop {
        return Ok(PrecopyPolicy::stopped(bytes(request.rate_max)));
    }
    let precopy = PrecopyPolicy::new(rates, downtime_max);
    Ok(match (request.mode, request.rounds) {
        (MigrateMode::Lazy, None) => PrecopyPolicy { rounds_max: 0, ..precopy },
        (MigrateMode::Hybrid, rounds) => {
            PrecopyPolicy { rounds_max: rounds.unwrap_or(HYBRID_ROUNDS), ..precopy }
        }
        (_, None) => precopy,
        (_, Some(_)) => return Err(DaemonError::invalid("a number of rounds requires the mode hybrid")),
    })
}

/// The rate limit of what is sent before the first round.
pub(super) fn first_rate(request: &MigrateRequest) -> Result<Option<ByteSize>, DaemonError> {
    match policy(request, false)?.decide(&[], u64::MAX) {
        RoundDecision::Round { rate } | RoundDecision::Stop { rate, .. } => Ok(rate.map(ByteSize)),
    }
}

fn rates(request: &MigrateRequest) -> Result<Rates, DaemonError> {
    let max = plausible_rate("maximum rate", request.rate_max)?;
    plausible_rate("minimum rate", request.rate_min)?;
    plausible_rate("rate step", request.rate_step)?;
    if request.rate_min.is_none() && !request.adaptive {
        return match request.rate_step {
            Some(_) => Err(DaemonError::invalid(
                "a rate step needs rates that change: give a minimum rate too, or --adaptive",
            )),
            None => Ok(Rates::Full { max }),
        };
    }
    let min = bytes(request.rate_min).unwrap_or_else(|| max.map_or(RATE_MIN, |max| max.min(RATE_MIN)));
    if let Some(max) = max.filter(|max| min > *max) {
        return Err(DaemonError::invalid(format!(
            "the minimum rate ({}) is above the maximum ({}): a size like 100M is bytes a second, 100Mbit is an eighth \
             of about that",
            rate_text(min),
            rate_text(max)
        )));
    }
    Ok(Rates::Adaptive { min, max, step: bytes(request.rate_step).unwrap_or(RATE_STEP) })
}

/// Checks that a requested rate is plausible.
pub(crate) fn plausible_rate(what: &str, rate: Option<ByteSize>) -> Result<Option<u64>, DaemonError> {
    match bytes(rate) {
        Some(rate) if rate < RATE_LOWEST => Err(DaemonError::invalid(format!(
            "a {what} of {rate} bytes a second is implausibly slow: rates are bytes a second, like 100M, unless \
             they end in bit, like 800Mbit"
        ))),
        rate => Ok(rate),
    }
}

fn bytes(rate: Option<ByteSize>) -> Option<u64> {
    rate.map(|rate| rate.0)
}

/// Formats a rate, for example `800 Mbit/s, 100.0 MB a second`.
fn rate_text(rate: u64) -> String {
    format!("{} Mbit/s, {:.1} MB a second", rate / MBIT, rate as f64 / 1e6)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn request(more: &str) -> MigrateRequest {
        serde_json::from_str(&format!(r#"{{"host": "beta"{more}}}"#)).unwrap()
    }

    #[test]
    fn rates_follow_the_machine_only_if_that_was_asked() {
        let rates = |more| policy(&request(more), false).unwrap().rates;
        assert_eq!(rates(""), Rates::Full { max: None });
        assert_eq!(rates(r#", "rate_max": 2000000"#), Rates::Full { max: Some(2_000_000) });
        let usual = Rates::Adaptive { min: 12_500_000, max: None, step: 6_250_000 };
        assert_eq!(rates(r#", "adaptive": true"#), usual);
        assert_eq!(rates(r#", "rate_min": 12500000"#), usual);
        assert_eq!(first_rate(&request(r#", "adaptive": true"#)).unwrap(), Some(ByteSize(12_500_000)));
        assert_eq!(first_rate(&request(r#", "rate_max": 2000000"#)).unwrap(), Some(ByteSize(2_000_000)));
        let slow = Rates::Adaptive { min: 2_000_000, max: Some(2_000_000), step: 1_000_000 };
        assert_eq!(rates(r#", "adaptive": true, "rate_max": 2000000, "rate_step": 1000000"#), slow);
    }

    #[test]
    fn only_limits_that_were_asked_for_end_a_migration() {
        let limits = |more| {
            let budget = budget(&request(more), &|| false);
            (budget.downtime.map(|limit| limit.as_millis()), budget.time.map(|limit| limit.as_millis()))
        };
        assert_eq!(limits(""), (None, None));
        assert_eq!(limits(r#", "downtime_max_ms": 50, "time_max_ms": 60000"#), (Some(1050), Some(60_000)));
    }

    #[test]
    fn wrong_rates_are_refused_in_units_people_know() {
        for (more, words) in [
            (r#", "rate_max": 100"#, "bytes a second, like 100M, unless they end in bit"),
            (r#", "rate_min": 100"#, "minimum rate of 100 bytes"),
            (r#", "rate_min": 100000000, "rate_max": 50000000"#, "(800 Mbit/s, 100.0 MB a second) is above"),
            (r#", "rate_step": 1000000"#, "--adaptive"),
        ] {
            let error = policy(&request(more), false).unwrap_err().to_string();
            assert!(error.contains(words), "{more}: {error}");
        }
    }

    #[test]
    fn a_machine_that_stands_still_has_no_rounds_before_the_last() {
        let stopped = PrecopyPolicy::stopped(Some(50_000));
        assert_eq!(policy(&request(r#", "rate_max": 50000"#), true).unwrap(), stopped);
        assert_eq!(policy(&request(r#", "mode": "stop", "rate_max": 50000"#), false).unwrap(), stopped);
    }
}
