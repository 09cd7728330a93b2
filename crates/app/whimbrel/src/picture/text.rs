//! Picture of a migration in characters, for a terminal.

use super::{Bar, bars, headline, highest};
use crate::round_text::spoken;
use whimbrel_api::MigrationRecord;

const HEIGHT: usize = 12;
const WIDTH: usize = 64;

/// Draws the picture as lines of text.
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
    use crate::picture::tests::figure_9;

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
