//! Picture of a migration as SVG, whose text can be searched, and as PNG.

use super::{Bar, bars, headline, highest, raster::Canvas};
use crate::round_text::spoken;
use plotters::{
    coord::Shift,
    element::{PathElement, Rectangle, Text},
    prelude::{
        Color, DrawingArea, DrawingAreaErrorKind, DrawingBackend, IntoDrawingArea, RGBColor, SVGBackend,
    },
    style::{
        BLACK, IntoFont, TextStyle, WHITE,
        text_anchor::{HPos, Pos, VPos},
    },
};
use whimbrel_api::MigrationRecord;

const SIZE: (u32, u32) = (1000, 480);
/// Position of the axes: left, top, right, bottom.
const FRAME: (i32, i32, i32, i32) = (90, 60, 980, 410);
const SENT: RGBColor = RGBColor(52, 89, 149);
const DIRTIED: RGBColor = RGBColor(168, 200, 236);
const STOPPED: RGBColor = RGBColor(196, 69, 54);
/// Least distance of two labels.
const LABEL_WIDTH: i32 = 48;

type Failed<B> = DrawingAreaErrorKind<<B as DrawingBackend>::ErrorType>;

/// Draws the picture as an SVG document.
pub(crate) fn draw(record: &MigrationRecord) -> Result<String, String> {
    let mut document = String::new();
    let area = SVGBackend::with_string(&mut document, SIZE).into_drawing_area();
    paint(&area, record).and_then(|()| area.present()).map_err(|error| error.to_string())?;
    drop(area);
    Ok(document)
}

/// Draws the picture as a PNG file.
pub(crate) fn draw_png(record: &MigrationRecord) -> Result<Vec<u8>, String> {
    let mut canvas = Canvas::new(SIZE);
    let area = (&mut canvas).into_drawing_area();
    paint(&area, record).map_err(|error| error.to_string())?;
    drop(area);
    canvas.to_png().map_err(|error| error.to_string())
}

fn paint<B: DrawingBackend>(area: &DrawingArea<B, Shift>, record: &MigrationRecord) -> Result<(), Failed<B>> {
    area.fill(&WHITE)?;
    area.draw(&Text::new(headline(record), (FRAME.0, 14), style(21, HPos::Left)))?;
    let bars = bars(record);
    let top = highest(&bars);
    bars.iter().try_for_each(|bar| paint_bar(area, bar, top))?;
    paint_axes(area, &bars, top)?;
    paint_legend(area)
}

fn paint_bar<B: DrawingBackend>(area: &DrawingArea<B, Shift>, bar: &Bar, top: f64) -> Result<(), Failed<B>> {
    let (left, right) = (across(bar.across.0), across(bar.across.1));
    let sent = if bar.stopped { STOPPED } else { SENT };
    let column = |rate: f64, from: i32, to: i32| [(from, height(rate, top)), (to, FRAME.3)];
    area.draw(&Rectangle::new(column(bar.dirty_rate, left, right), DIRTIED.filled()))?;
    // Narrower, so that the dirty rate can be seen behind it.
    let inset = ((right - left) / 8).min(6);
    area.draw(&Rectangle::new(column(bar.rate, left + inset, right - inset), sent.filled()))?;
    if right - left >= LABEL_WIDTH || (bar.stopped && bar.rate > 0.0) {
        let at = ((left + right) / 2, height(bar.rate.max(bar.dirty_rate), top) - 14);
        area.draw(&Text::new(bar.label.clone(), at, style(15, HPos::Center)))?;
    }
    Ok(())
}

fn paint_axes<B: DrawingBackend>(
    area: &DrawingArea<B, Shift>,
    bars: &[Bar],
    top: f64,
) -> Result<(), Failed<B>> {
    area.draw(&PathElement::new(vec![(FRAME.0, FRAME.1), (FRAME.0, FRAME.3), (FRAME.2, FRAME.3)], BLACK))?;
    for part in 0..=4 {
        let rate = top * f64::from(part) / 4.0;
        let y = height(rate, top);
        area.draw(&PathElement::new(vec![(FRAME.0 - 5, y), (FRAME.0, y)], BLACK))?;
        area.draw(&Text::new(spoken(rate), (FRAME.0 - 8, y - 6), style(15, HPos::Right)))?;
    }
    let mut free_from = 0;
    let edges = bars.iter().map(|bar| (bar.across.0, bar.time.0));
    for (part, time) in edges.chain(bars.last().map(|bar| (bar.across.1, bar.time.1))) {
        let x = across(part);
        area.draw(&PathElement::new(vec![(x, FRAME.3), (x, FRAME.3 + 5)], BLACK))?;
        if x >= free_from {
            area.draw(&Text::new(format!("{time:.2}"), (x, FRAME.3 + 9), style(15, HPos::Center)))?;
            free_from = x + LABEL_WIDTH;
        }
    }
    let title = "seconds since the copying began (long rounds are narrowed)";
    area.draw(&Text::new(title, ((FRAME.0 + FRAME.2) / 2, FRAME.3 + 34), style(16, HPos::Center)))
}

fn paint_legend<B: DrawingBackend>(area: &DrawingArea<B, Shift>) -> Result<(), Failed<B>> {
    let entries = [(SENT, "sent"), (DIRTIED, "dirtied"), (STOPPED, "sent while paused")];
    for (at, (color, text)) in (0..).zip(entries) {
        let x = FRAME.0 + at * 220;
        area.draw(&Rectangle::new([(x, 38), (x + 12, 50)], color.filled()))?;
        area.draw(&Text::new(text, (x + 18, 38), style(15, HPos::Left)))?;
    }
    Ok(())
}

fn across(part: f64) -> i32 {
    FRAME.0 + (part * f64::from(FRAME.2 - FRAME.0)).round() as i32
}

fn height(rate: f64, top: f64) -> i32 {
    FRAME.3 - (rate / top * f64::from(FRAME.3 - FRAME.1 - 30)).round() as i32
}

fn style(size: u32, anchor: HPos) -> TextStyle<'static> {
    TextStyle::from(("sans-serif", size).into_font()).pos(Pos::new(anchor, VPos::Top))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::picture::tests::figure_9;

    #[test]
    fn has_a_bar_for_every_round_and_says_what_it_shows() {
        let svg = draw(&figure_9()).unwrap();
        assert!(svg.starts_with("<svg") && svg.trim_end().ends_with("</svg>"));
        let sent = svg.matches("#345995").count();
        assert_eq!(sent, 8 + 1, "eight rounds and the legend");
        for words in ["specweb from alpha to beta", "downtime 210 ms", "645 MiB", "724 Mbit/s"] {
            assert!(svg.contains(words), "{words}");
        }
    }

    #[test]
    fn the_same_picture_has_pixels() {
        let file = draw_png(&figure_9()).unwrap();
        let mut reader = png::Decoder::new(std::io::Cursor::new(file)).read_info().unwrap();
        let mut pixels = vec![0; (SIZE.0 * SIZE.1 * 3) as usize];
        reader.next_frame(&mut pixels).unwrap();
        let of = |color: RGBColor| pixels.chunks(3).filter(|p| **p == [color.0, color.1, color.2]).count();
        assert!(of(SENT) > 10_000 && of(DIRTIED) > 1000 && of(STOPPED) > 100, "bars");
        assert!(of(RGBColor(0, 0, 0)) > 1000, "axes and letters");
    }

    #[test]
    fn a_name_is_no_markup() {
        let mut record = figure_9();
        record.end = whimbrel_api::MigrationEnd::Failed { reason: "<&>".into() };
        assert!(draw(&record).unwrap().starts_with("<svg"));
    }
}
