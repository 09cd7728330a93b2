//! Tables of columns without lines, which paste and grep well, and formats of counts and times.

use comfy_table::{ContentArrangement, Table, presets};
use std::time::{Duration, SystemTime, UNIX_EPOCH};

/// Formats rows below a header; without rows, the sentence `empty`.
pub(crate) fn table<const N: usize>(
    header: [&str; N],
    rows: impl IntoIterator<Item = [String; N]>,
    empty: &str,
) -> String {
    let mut table = Table::new();
    table
        .load_style(presets::NOTHING)
        .set_content_arrangement(ContentArrangement::Disabled)
        .set_header(header);
    table.add_rows(rows);
    if table.is_empty() {
        return format!("{empty}\n");
    }
    // The style pads cells on both sides, but the first column belongs at the edge.
    table.lines().map(|line| line.strip_prefix(' ').unwrap_or(&line).trim_end().to_owned() + "\n").collect()
}

/// Formats lines of `key  value` with keys of one width.
pub(crate) fn fields(pairs: &[(&str, String)]) -> String {
    let width = pairs.iter().map(|(key, _)| key.len()).max().unwrap_or(0);
    pairs.iter().map(|(key, value)| format!("{key:width$}  {value}").trim_end().to_owned() + "\n").collect()
}

/// Formats a count, like `1 round` or `3 rounds`.
pub(crate) fn count(number: u64, thing: &str) -> String {
    if number == 1 { format!("1 {thing}") } else { format!("{number} {thing}s") }
}

/// Formats the time since `then_ms` (since 1970), in one unit.
pub(crate) fn ago(then_ms: u64) -> String {
    let now = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
    span(now.saturating_sub(Duration::from_millis(then_ms)))
}

/// Formats the time until `then_ms` (since 1970), in one unit.
pub(crate) fn until(then_ms: u64) -> String {
    let now = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
    span(Duration::from_millis(then_ms).saturating_sub(now))
}

/// Formats a duration in the largest unit of which it has at least two.
pub(crate) fn span(duration: Duration) -> String {
    let seconds = duration.as_secs();
    match seconds {
        0..120 => format!("{seconds} s"),
        120..7_200 => format!("{} min", seconds / 60),
        7_200..172_800 => format!("{} h", seconds / 3_600),
        _ => format!("{} d", seconds / 86_400),
    }
}

/// Formats milliseconds, like `1.7 ms`, `340 ms` or `12.3 s`.
pub(crate) fn milliseconds(ms: f64) -> String {
    match ms {
        ms if ms < 10.0 => format!("{ms:.1} ms"),
        ms if ms < 10_000.0 => format!("{ms:.0} ms"),
        ms => format!("{:.1} s", ms / 1000.0),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn columns_begin_at_the_edge_and_end_without_blanks() {
        let rows = [["web".to_owned(), String::new()], ["database".to_owned(), "x".to_owned()]];
        assert_eq!(table(["NAME", "B"], rows, "none"), "NAME      B\nweb\ndatabase  x\n");
        assert_eq!(table(["NAME"], [], "no machines"), "no machines\n");
    }

    #[test]
    fn durations_are_short() {
        assert_eq!(span(Duration::from_secs(119)), "119 s");
        assert_eq!(span(Duration::from_secs(7_199)), "119 min");
        assert_eq!(span(Duration::from_secs(200_000)), "2 d");
        assert_eq!((milliseconds(1.74), milliseconds(340.2)), ("1.7 ms".to_owned(), "340 ms".to_owned()));
    }
}
