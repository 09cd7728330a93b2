//! Groups of bars, each with its value above it and, where there is one, the goal beside it.

use super::axis::{Scale, label};
use super::{Area, FRAME, INK, TEXT, colour, path, rectangle, style, text};
use crate::harness::number;
use anyhow::Result;
use plotters::style::Color as _;
use plotters::style::text_anchor::HPos;

const WIDEST: f64 = 46.0;
/// Letters in a line of a group's name, for a panel of one group.
const LETTERS: usize = 110;

/// Bars that are compared with each other.
pub(in super::super) struct Group {
    pub(in super::super) name: String,
    /// Number of the series and value.
    pub(in super::super) bars: Vec<(usize, f64)>,
    /// The limit that the values should not pass.
    pub(in super::super) goal: Option<f64>,
}

/// Every value that the axis has to show.
pub(super) fn values(groups: &[Group]) -> Vec<f64> {
    let all = groups.iter().flat_map(|group| group.bars.iter().map(|bar| bar.1).chain(group.goal));
    all.collect()
}

/// Draws all groups over the whole width.
pub(super) fn draw(area: &Area<'_>, scale: &Scale, groups: &[Group]) -> Result<()> {
    let share = 1.0 / groups.len().max(1) as f64;
    for (at, group) in groups.iter().enumerate() {
        let middle = FRAME.across((at as f64 + 0.5) * share);
        let width = share * f64::from(FRAME.right - FRAME.left) * 0.92;
        draw_group(area, scale, group, (middle, width))?;
        let lines = wrapped(&group.name, LETTERS / groups.len());
        for (line, words) in (0..).zip(lines) {
            let at = (middle, FRAME.bottom + 8 + 17 * line);
            text(area, &words, at, style(TEXT, HPos::Center))?;
        }
    }
    let foot = FRAME.height(scale, scale.foot());
    path(area, vec![(FRAME.left, foot), (FRAME.right, foot)], INK.mix(1.0))
}

fn draw_group(area: &Area<'_>, scale: &Scale, group: &Group, (middle, width): (i32, f64)) -> Result<()> {
    let count = group.bars.len().max(1) as f64;
    let bar = (width / count).min(WIDEST) as i32;
    let left = middle - bar * group.bars.len() as i32 / 2;
    let foot = FRAME.height(scale, scale.foot());
    for (at, (series, value)) in (0..).zip(&group.bars) {
        let (x, y) = (left + at * bar, FRAME.height(scale, *value));
        rectangle(area, [(x + 2, y.min(foot)), (x + bar - 2, y.max(foot))], colour(*series))?;
        let above = if *value < 0.0 { y + 3 } else { y - 14 };
        text(area, &number(*value), (x + bar / 2, above), style(TEXT - 3, HPos::Center))?;
    }
    if let Some(goal) = group.goal {
        // On both sides, since across the bars it would strike out their values.
        let (y, right) = (FRAME.height(scale, goal), left + bar * group.bars.len() as i32);
        path(area, vec![(left - 22, y), (left - 2, y)], INK.mix(1.0))?;
        path(area, vec![(right + 2, y), (right + 22, y)], INK.mix(1.0))?;
        let words = format!("goal {}", label(goal));
        text(area, &words, (right + 26, y - 6), style(TEXT - 3, HPos::Left))?;
    }
    Ok(())
}

/// A name in lines of at most so many letters, as far as its words are that short.
fn wrapped(name: &str, letters: usize) -> Vec<String> {
    let mut lines: Vec<String> = Vec::new();
    for word in name.split_whitespace() {
        match lines.last_mut() {
            Some(line) if line.chars().count() + 1 + word.chars().count() <= letters => {
                line.push(' ');
                line.push_str(word);
            }
            _ => lines.push(word.to_owned()),
        }
    }
    lines
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn long_names_are_wrapped_between_words() {
        assert_eq!(wrapped("5 documents and 8 MiB", 11), ["5 documents", "and 8 MiB"]);
        assert_eq!(wrapped("one", 2), ["one"]);
    }
}
