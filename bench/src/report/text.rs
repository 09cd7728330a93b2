//! Cells of the tables: numbers, goals and names as Markdown.

use super::record::RecordedRow;
use crate::harness::number;

/// A text in a cell: a bar would end the cell.
pub(super) fn cell(text: &str) -> String {
    text.replace('|', "\\|")
}

/// A number of a row; counts stand without a fraction.
pub(super) fn amount(value: f64) -> String {
    if value == value.trunc() && value.abs() < 1e6 { format!("{value:.0}") } else { number(value) }
}

/// A measured value and its unit.
pub(super) fn with_unit(value: f64, unit: &str) -> String {
    format!("{} {unit}", number_of(value, unit)).trim_end().to_owned()
}

/// Name and median of the peer, and the ratio.
pub(super) fn outcome(row: &RecordedRow) -> [String; 2] {
    let value = row.peer_value.map(|value| number_of(value, &row.unit));
    let peer = match (&row.peer, value) {
        (Some(peer), Some(value)) => format!("{}: {value}", cell(peer)),
        (Some(peer), None) => cell(peer),
        (None, _) => String::new(),
    };
    [peer, row.ratio.map(ratio).unwrap_or_default()]
}

/// Digits enough to tell a ratio from a goal of two decimals.
fn ratio(ratio: f64) -> String {
    if ratio < 10.0 { format!("{ratio:.3}") } else { format!("{ratio:.1}") }
}

/// Smallest and largest value; nothing for one measurement.
pub(super) fn spread(row: &RecordedRow) -> String {
    if row.n < 2 {
        return String::new();
    }
    format!("{}–{}", number_of(row.min, &row.unit), number_of(row.max, &row.unit))
}

/// The goal, a computed limit rounded.
pub(super) fn goal(row: &RecordedRow) -> String {
    let Some(goal) = &row.goal else { return String::new() };
    let word = |word: &str| match word.parse::<f64>() {
        Ok(value) if word.len() > 7 => number(value),
        _ => word.to_owned(),
    };
    goal.split_whitespace().map(word).collect::<Vec<_>>().join(" ")
}

/// A unit that is measured has a fraction; one that is counted, or a row without a unit, has none.
fn number_of(value: f64, unit: &str) -> String {
    const MEASURED: [&str; 8] = ["s", "ms", "MB", "kB", "MiB", "MB/s", "MiB/s", "%"];
    if MEASURED.contains(&unit) && value != 0.0 { number(value) } else { amount(value) }
}

#[cfg(test)]
mod tests {
    use super::super::record::tests::row;
    use super::*;

    #[test]
    fn counts_have_no_fraction_and_measures_keep_their_digits() {
        assert_eq!(with_unit(0.0, "files"), "0 files");
        assert_eq!(with_unit(394.0, "times"), "394 times");
        assert_eq!(with_unit(3.0, "s"), "3.00 s");
        assert_eq!(with_unit(0.0, ""), "0");
        assert_eq!(with_unit(19.548, "bytes/page"), "19.5 bytes/page");
    }

    #[test]
    fn a_computed_limit_is_rounded_and_a_chosen_one_is_not() {
        let of = |goal: &str| goal_of(goal);
        assert_eq!(of("<= 69.79321856 MB"), "<= 69.8 MB");
        assert_eq!(of("<= 0.45 x peer"), "<= 0.45 x peer");
        assert_eq!(of(">= 10000 IOPS"), ">= 10000 IOPS");
    }

    fn goal_of(text: &str) -> String {
        goal(&RecordedRow { goal: Some(text.into()), ..row("a.b", "", 1.0, None) })
    }
}
