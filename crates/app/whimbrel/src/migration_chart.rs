//! Chart of a migration in a terminal, as in figure 9 of Clark et al. (NSDI 2005): the rate of each round
//! over time, and the dirty rate of the machine.
//!
//! The first round may be a hundred times as long as the last, so the scale of time is not linear: each round
//! is wide enough to be seen, and its edges are labelled with their times.

use crate::round_text::{self, spoken};
use whimbrel_api::{MigrationEnd, MigrationRecord, RoundInfo};
use whimbrel_core::ByteSize;

/// Least width of a round, as a part of the picture, as far as all rounds fit.
const NARROWEST: f64 = 0.02;
/// Largest width of a round, if there are others.
const WIDEST: f64 = 0.4;
/// Height of the chart in lines.
const HEIGHT: usize = 12;
/// Width of the chart in characters.
const WIDTH: usize = 64;

/// Bar of a round, or of the rest of the downtime after the last round.
#[derive(Debug, Clone, PartialEq)]
struct Bar {
    /// Left and right edge, as parts of the width.
    across: (f64, f64),
    /// Start and end in seconds.
    time: (f64, f64),
    /// Bits per second on the wire.
    rate: f64,
    /// Dirty rate in bits per second.
    dirty_rate: f64,
    label: String,
    stopped: bool,
}

fn bars(record: &MigrationRecord) -> Vec<Bar> {
    let stopped_for = match record.end {
        MigrationEnd::Moved { downtime_ms, .. } => Some(downtime_ms),
        MigrationEnd::Failed { .. } => None,
    };
    let mut bars: Vec<Bar> = record.rounds.iter().map(bar).collect();
    if let (Some(downtime), Some(last)) = (stopped_for, bars.last_mut()) {
        last.stopped = true;
        last.dirty_rate = 0.0;
        let (from, to) = (last.time.1, last.time.0 + downtime / 1e3);
        if to > from {
            let label = "starts".to_owned();
            let (rate, dirty_rate, stopped) = (0.0, 0.0, true);
            bars.push(Bar { across: (0.0, 0.0), time: (from, to), rate, dirty_rate, label, stopped });
        }
    }
    place(&mut bars);
    bars
}

fn bar(round: &RoundInfo) -> Bar {
    let begun = round.begun_ms / 1e3;
    Bar {
        across: (0.0, 0.0),
        time: (begun, begun + round.ms / 1e3),
        rate: round_text::rate(round),
        dirty_rate: round_text::dirty_rate(round),
        label: ByteSize(round.bytes).to_string(),
        stopped: false,
    }
}

/// Divides the width by time, within the limits.
fn place(bars: &mut [Bar]) {
    let total: f64 = bars.iter().map(|bar| bar.time.1 - bar.time.0).sum();
    let share = |bar: &Bar| ((bar.time.1 - bar.time.0) / total.max(1e-9)).clamp(NARROWEST, WIDEST);
    let all: f64 = bars.iter().map(share).sum();
    let mut at = 0.0;
    for bar in bars {
        let from = at;
        at += share(bar) / all;
        bar.across = (from, at);
    }
}

/// Highest rate of all bars, at least one.
fn highest(bars: &[Bar]) -> f64 {
    bars.iter().flat_map(|bar| [bar.rate, bar.dirty_rate]).fold(1.0, f64::max)
}

/// Formats a headline, like `web from alpha to beta: 71 s, 960 MiB on the wire, downtime 210 ms`.
fn headline(record: &MigrationRecord) -> String {
    let way = format!("{} from {} to {}", record.machine, record.from, record.request.host);
    let total = crate::table::milliseconds(record.total_ms);
    match &record.end {
        MigrationEnd::Moved { downtime_ms, wire_bytes, .. } => format!(
            "{way}: {total}, {} on the wire, downtime {}",
            ByteSize(*wire_bytes),
            crate::table::milliseconds(*downtime_ms)
        ),
        MigrationEnd::Failed { .. } => format!("{way}: failed after {total}"),
    }
}

pub(crate) fn draw(record: &MigrationRecord) -> String {
    let bars = bars(record);
    let mut text = headline(record) + "\n";
    if bars.is_empty() {
        return text;
    }
    let top = highest(&bars);
    text.push('\n');
    for row in (0..HEIGHT).rev() {
        let label = match row {
            row if row + 1 == HEIGHT => spoken(top),
            row if row + 1 == HEIGHT / 2 => spoken(top / 2.0),
            _ => String::new(),
        };
        let line: String = (0..WIDTH).map(|column| cell(&bars, column, row, top)).collect();
        text += format!("{label:>11} │{line}").trim_end();
        text.push('\n');
    }
    let axis: String = (0..WIDTH).map(|column| if at(&bars, column).stopped { '━' } else { '─' }).collect();
    text += &format!("{:>11} └{axis}\n", "0");
    text += &format!("{:13}{}\n", "", times(&bars));
    text + "             seconds; █ sent  ░ dirtied  ▓ both  ━ paused\n"
}

fn at(bars: &[Bar], column: usize) -> &Bar {
    let across = (column as f64 + 0.5) / WIDTH as f64;
    bars.iter().find(|bar| across < bar.across.1).unwrap_or(&bars[bars.len() - 1])
}

fn cell(bars: &[Bar], column: usize, row: usize, top: f64) -> char {
    let bar = at(bars, column);
    // Every rate above zero is visible.
    let reaches = |rate: f64| rate > 0.0 && (row == 0 || rate / top * HEIGHT as f64 >= row as f64 + 0.5);
    match (reaches(bar.rate), reaches(bar.dirty_rate)) {
        (true, true) => '▓',
        (true, false) => '█',
        (false, true) => '░',
        (false, false) => ' ',
    }
}

/// Start of each bar, as far as the labels fit.
fn times(bars: &[Bar]) -> String {
    let mut line = String::new();
    for bar in bars {
        let column = (bar.across.0 * WIDTH as f64).round() as usize;
        if line.is_empty() || column > line.len() {
            line += &" ".repeat(column - line.len());
            line += &format!("{:.1}", bar.time.0);
        }
    }
    line
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The migration of figure 9, as far as the paper says.
    fn figure_9() -> MigrationRecord {
        let megabytes = [676.8, 126.7, 39.0, 28.4, 24.2, 16.7, 14.2, 15.3, 18.2];
        let seconds = [54.1, 10.1, 3.1, 1.3, 0.9, 0.5, 0.35, 0.3, 0.201];
        let mut begun = 0.0;
        let rounds = megabytes.iter().enumerate().map(|(at, mb)| {
            let left = megabytes.get(at + 1).map_or(0.0, |mb| mb * 1e6 / 4096.0) as u64;
            let (bytes, ms) = ((mb * 1e6) as u64, seconds[at] * 1e3);
            let round =
                RoundInfo { pages: bytes / 4096, bytes, ms, begun_ms: begun, left, ..RoundInfo::default() };
            begun += ms;
            round
        });
        let rounds = rounds.collect::<Vec<_>>();
        let json = serde_json::json!({
            "id": "00000009", "machine": "specweb", "from": "alpha", "started_ms": 1, "request": {"host": "beta"},
            "total_ms": 71_000.0, "rounds": rounds, "end": "moved", "downtime_ms": 210.0, "wire_bytes": 960_000_000u64,
            "stopped_by": "rate_above_max", "network": {"kind": "no_ports"},
        });
        serde_json::from_value(json).unwrap()
    }

    #[test]
    fn every_round_can_be_seen_and_none_hides_the_others() {
        let bars = bars(&figure_9());
        assert_eq!(bars.len(), 10, "nine rounds, and the start on the other side");
        assert!(bars[8].stopped && bars[9].stopped && !bars[7].stopped);
        assert!((bars[9].time.1 - bars[8].time.0 - 0.210).abs() < 1e-9, "the downtime is what was measured");
        for pair in bars.windows(2) {
            assert!((pair[0].across.1 - pair[1].across.0).abs() < 1e-9, "no gap");
        }
        assert!(bars.iter().all(|bar| bar.across.1 - bar.across.0 > 0.02));
        assert!(bars[0].across.1 < 0.6, "54 of 71 seconds");
        assert!((bars[9].across.1 - 1.0).abs() < 1e-9);
    }

    #[test]
    fn a_migration_that_failed_at_once_has_no_bars() {
        let mut record = figure_9();
        record.rounds.clear();
        record.end = MigrationEnd::Failed { reason: "cancelled".into() };
        assert!(bars(&record).is_empty());
        assert_eq!(headline(&record), "specweb from alpha to beta: failed after 71.0 s");
    }

    #[test]
    fn shows_what_figure_9_shows() {
        let text = draw(&figure_9());
        let lines: Vec<&str> = text.lines().collect();
        assert_eq!(lines.len(), 2 + HEIGHT + 3, "{text}");
        assert_eq!(lines[0], "specweb from alpha to beta: 71.0 s, 916 MiB on the wire, downtime 210 ms");
        assert!(lines[2].trim_start().starts_with("724 Mbit/s"), "{text}");
        assert!(lines[2].trim_end().ends_with('█'), "the last round is the fastest\n{text}");
        assert!(lines[HEIGHT + 1].contains("▓▓▓▓"), "the first round is sent and dirtied\n{text}");
        assert!(lines[HEIGHT + 2].ends_with("━━"), "and then it was paused\n{text}");
        assert!(lines[HEIGHT + 3].trim_start().starts_with("0.0 "), "{text}");
        assert!(lines.iter().all(|line| line.chars().count() <= 80), "fits a terminal");
    }
}
