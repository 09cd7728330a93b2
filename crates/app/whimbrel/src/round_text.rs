//! Text about rounds of a migration, when each ends and in the list afterwards.
//!
//! Rates are bits a second, as links are sold; amounts are bytes.

use crate::table::milliseconds;
use serde::Serialize;
use whimbrel_api::{DowntimeInfo, Operation, OperationResult, OperationState, PostcopyInfo, RoundInfo};
use whimbrel_core::{ByteSize, PAGE_SIZE};

/// Rounds of a migration that have ended; all of them once the machine has moved.
pub(crate) fn known(operation: &Operation) -> &[RoundInfo] {
    match &operation.state {
        OperationState::Succeeded { result: OperationResult::Migrate { rounds, .. } } => rounds,
        _ => &operation.progress.rounds,
    }
}

/// Whether the last of [`known`] is the round during which the machine was paused.
pub(crate) fn is_over(operation: &Operation) -> bool {
    matches!(operation.state, OperationState::Succeeded { .. })
}

/// Formats a round, like `round 2: 31 MiB as 9 MiB in 2.6 s, 28 Mbit/s; 39 MiB remain, dirtied at 64 Mbit/s`.
pub(crate) fn sentence(number: usize, round: &RoundInfo, last: bool) -> String {
    let sent = format!(
        "{}: {} as {} in {}, {}",
        if last { "last round".to_owned() } else { format!("round {number}") },
        pages(round.pages),
        ByteSize(round.bytes),
        milliseconds(round.ms),
        spoken(rate(round)),
    );
    if last {
        return sent;
    }
    let waited = match round.skipped {
        0 => String::new(),
        skipped => format!(", of which {} waited", pages(skipped)),
    };
    let predicted = round.downtime_ms.map(|ms| format!("; predicted downtime {}", milliseconds(ms)));
    let predicted = predicted.unwrap_or_default();
    format!(
        "{sent}; {} remain{waited}, dirtied at {}{predicted}",
        pages(round.left),
        spoken(dirty_rate(round))
    )
}

/// Formats the parts of a downtime, like `of the downtime: stop 0.4 ms, scan 0.5 ms, …`.
pub(crate) fn pause_parts(pause: &DowntimeInfo) -> String {
    let parts = pause.parts().map(|(name, ms)| format!("{name} {}", milliseconds(ms)));
    format!("of the downtime: {}\n", parts.join(", "))
}

/// Formats the cost of postcopy: missing pages and waits.
pub(crate) fn fetched(postcopy: &PostcopyInfo) -> String {
    let missing =
        postcopy.initial_missing_pages.map(|missing| format!("{} sent afterwards, ", pages(missing)));
    let missing = missing.unwrap_or_default();
    let waits = match postcopy.faults {
        0 => "the machine waited for no page".to_owned(),
        faults => format!(
            "the machine waited {faults} times, {} on average and {} at most",
            milliseconds(postcopy.waited_ms / faults as f64),
            milliseconds(postcopy.longest_ms)
        ),
    };
    format!("{missing}{} on the wire; {waits}\n", ByteSize(postcopy.bytes))
}

/// Progress of a page fetch as a line of JSON. Its field tells it from the lines of rounds.
#[derive(Serialize)]
pub(crate) struct Rest<'a> {
    postcopy: &'a PostcopyInfo,
}

impl<'a> Rest<'a> {
    pub(crate) fn new(postcopy: &'a PostcopyInfo) -> Self {
        Self { postcopy }
    }
}

#[derive(Serialize)]
pub(crate) struct Line<'a> {
    round: usize,
    last: bool,
    #[serde(flatten)]
    info: &'a RoundInfo,
}

impl<'a> Line<'a> {
    pub(crate) fn new(round: usize, info: &'a RoundInfo, last: bool) -> Self {
        Self { round, last, info }
    }
}

/// Bits per second on the wire.
pub(crate) fn rate(round: &RoundInfo) -> f64 {
    round.bytes as f64 * 8.0 / (round.ms / 1e3).max(1e-6)
}

/// Dirty rate of the machine in bits per second.
pub(crate) fn dirty_rate(round: &RoundInfo) -> f64 {
    (round.left * PAGE_SIZE as u64) as f64 * 8.0 / (round.ms / 1e3).max(1e-6)
}

pub(crate) fn pages(count: u64) -> ByteSize {
    ByteSize(count.saturating_mul(PAGE_SIZE as u64))
}

/// Formats a rate, like `98 Mbit/s` or `1.2 Gbit/s`.
pub(crate) fn spoken(bits: f64) -> String {
    match bits {
        bits if bits < 1e6 => format!("{:.0} kbit/s", bits / 1e3),
        bits if bits < 1e7 => format!("{:.1} Mbit/s", bits / 1e6),
        bits if bits < 1e9 => format!("{:.0} Mbit/s", bits / 1e6),
        bits => format!("{:.1} Gbit/s", bits / 1e9),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_round_is_told_in_one_line() {
        let round = RoundInfo {
            pages: 25_600,
            bytes: 12_500_000,
            ms: 1000.0,
            left: 2560,
            skipped: 256,
            downtime_ms: Some(12.0),
            ..RoundInfo::default()
        };
        assert_eq!(
            sentence(2, &round, false),
            "round 2: 100 MiB as 11.9 MiB in 1000 ms, 100 Mbit/s; 10 MiB remain, of which 1 MiB waited, dirtied at 84 \
             Mbit/s; predicted downtime 12 ms"
        );
        assert_eq!(sentence(3, &round, true), "last round: 100 MiB as 11.9 MiB in 1000 ms, 100 Mbit/s");
    }

    #[test]
    fn rounds_of_no_time_have_a_rate_all_the_same() {
        assert_eq!(spoken(rate(&RoundInfo::default())), "0 kbit/s");
        assert_eq!(spoken(1.25e9), "1.2 Gbit/s");
    }
}
