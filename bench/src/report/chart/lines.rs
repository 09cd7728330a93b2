//! Lines over a logarithmic axis, with a mark of its own for each series.

use super::axis::{Scale, label};
use super::{Area, FRAME, INK, TEXT, colour, path, rectangle, style, text};
use anyhow::{Result, anyhow};
use plotters::prelude::{Circle, Color as _, Cross, PathElement, TriangleMarker};
use plotters::style::text_anchor::HPos;

/// The points of one line.
pub(in super::super) struct Series {
    /// Number of the series, which chooses colour and mark.
    pub(in super::super) number: usize,
    /// Places and values; the line is broken at a value that is not a number.
    pub(in super::super) points: Vec<(f64, f64)>,
}

impl Series {
    /// Adds a point that is not there yet: rows of several peers repeat ours.
    pub(in super::super) fn add(&mut self, point: (f64, f64)) {
        if !self.points.contains(&point) {
            self.points.push(point);
        }
    }
}

/// Every value that the vertical axis has to show.
pub(super) fn values(series: &[Series]) -> Vec<f64> {
    let all = series.iter().flat_map(|one| one.points.iter().map(|point| point.1));
    all.filter(|value| !value.is_nan()).collect()
}

/// Draws all lines, the first one last so that no other covers it.
pub(super) fn draw(area: &Area<'_>, scale: &Scale, name: &str, series: &[Series]) -> Result<()> {
    let mut ticks: Vec<f64> = series.iter().flat_map(|one| one.points.iter().map(|point| point.0)).collect();
    ticks.sort_by(f64::total_cmp);
    ticks.dedup();
    let across = Scale::tight_log(&ticks);
    // Marks at the ends keep off the edges.
    let place = |value: f64| FRAME.across(0.03 + 0.94 * across.part(value));
    for tick in ticks {
        path(area, vec![(place(tick), FRAME.bottom), (place(tick), FRAME.bottom + 5)], INK.mix(1.0))?;
        text(area, &label(tick), (place(tick), FRAME.bottom + 8), style(TEXT, HPos::Center))?;
    }
    path(area, vec![(FRAME.left, FRAME.bottom), (FRAME.right, FRAME.bottom)], INK.mix(1.0))?;
    let middle = (FRAME.left + FRAME.right) / 2;
    text(area, name, (middle, FRAME.bottom + 28), style(TEXT, HPos::Center))?;
    series.iter().rev().try_for_each(|one| draw_line(area, scale, one, place))
}

fn draw_line(area: &Area<'_>, scale: &Scale, one: &Series, place: impl Fn(f64) -> i32) -> Result<()> {
    let mut points = one.points.clone();
    points.sort_by(|a, b| a.0.total_cmp(&b.0));
    for unbroken in points.split(|point| point.1.is_nan()) {
        let pixels: Vec<_> = unbroken.iter().map(|(x, y)| (place(*x), FRAME.height(scale, *y))).collect();
        let line = PathElement::new(pixels.clone(), colour(one.number).stroke_width(2));
        area.draw(&line).map_err(|error| anyhow!("cannot draw a line: {error}"))?;
        pixels.into_iter().try_for_each(|point| draw_mark(area, point, one.number))?;
    }
    Ok(())
}

/// Draws the mark of a series: colour alone does not tell them apart for everybody.
pub(super) fn draw_mark(area: &Area<'_>, (x, y): (i32, i32), series: usize) -> Result<()> {
    let colour = colour(series);
    let drawn = match series % 4 {
        0 => area.draw(&Circle::new((x, y), 5, colour.filled())),
        1 => return rectangle(area, [(x - 5, y - 5), (x + 5, y + 5)], colour),
        2 => area.draw(&TriangleMarker::new((x, y), 7, colour.filled())),
        _ => area.draw(&Cross::new((x, y), 5, colour.stroke_width(3))),
    };
    drawn.map_err(|error| anyhow!("cannot draw a mark: {error}"))
}
