//! Charts as SVG: panels of lines or bars below each other, with axes, units, title and legend.
//!
//! No background, and colours of middle lightness: a chart is read on light pages and on dark ones. Text
//! stays text.

mod axis;
mod bars;
mod lines;

pub(super) use bars::Group;
pub(super) use lines::Series;

use anyhow::{Result, anyhow};
use axis::Scale;
use plotters::coord::Shift;
use plotters::prelude::{
    Color, DrawingArea, IntoDrawingArea, IntoFont, PathElement, RGBColor, Rectangle, SVGBackend, Text,
};
use plotters::style::text_anchor::{HPos, Pos, VPos};
use plotters::style::{FontTransform, TextStyle};

const WIDTH: u32 = 900;
const HEADER: u32 = 40;
const PANEL: u32 = 330;
/// Sizes of plotters, which writes them divided by 1.24.
const TEXT: u32 = 17;
const TITLE: u32 = 23;
/// Contrast of 4.5 on white and 4.2 on the dark of code hosts.
const INK: RGBColor = RGBColor(0x76, 0x76, 0x76);
/// One a series; the first is Whimbrel's, the last a local disk's.
const COLOURS: [RGBColor; 6] = [
    RGBColor(0x2f, 0x81, 0xf7),
    RGBColor(0xd9, 0x82, 0x2b),
    RGBColor(0x3f, 0xa3, 0x4d),
    RGBColor(0xa0, 0x6c, 0xd5),
    RGBColor(0xd1, 0x49, 0x5b),
    RGBColor(0x8a, 0x8a, 0x8a),
];

type Area<'a> = DrawingArea<SVGBackend<'a>, Shift>;

/// A picture of one or more panels.
pub(super) struct Chart {
    pub(super) title: &'static str,
    pub(super) panels: Vec<Panel>,
}

/// A pair of axes with its legend.
pub(super) struct Panel {
    pub(super) title: String,
    /// Numbers and names of the series; the number chooses the colour.
    pub(super) legend: Vec<(usize, String)>,
    /// What the vertical axis shows, with its unit.
    pub(super) vertical: String,
    /// Whether the vertical axis is logarithmic.
    pub(super) is_log: bool,
    pub(super) body: Body,
}

/// The data of a panel.
pub(super) enum Body {
    /// Lines over a logarithmic axis, whose name has its unit.
    Lines { horizontal: &'static str, series: Vec<Series> },
    /// Groups of bars beside each other.
    Bars(Vec<Group>),
}

/// Edges of the plot within a panel: left, top, right, bottom.
#[derive(Clone, Copy)]
struct Frame {
    left: i32,
    top: i32,
    right: i32,
    bottom: i32,
}

const FRAME: Frame = Frame { left: 78, top: 56, right: 885, bottom: 268 };

impl Chart {
    /// The picture as a document.
    pub(super) fn svg(&self) -> Result<String> {
        let mut document = String::new();
        let size = (WIDTH, HEADER + PANEL * self.panels.len() as u32);
        let area = SVGBackend::with_string(&mut document, size).into_drawing_area();
        self.draw(&area)?;
        drop(area);
        Ok(document)
    }

    fn draw(&self, area: &Area<'_>) -> Result<()> {
        text(area, self.title, (14, 10), style(TITLE, HPos::Left))?;
        for (at, panel) in (0..).zip(&self.panels) {
            let top = (HEADER + PANEL * at) as i32;
            panel.draw(&area.clone().shrink((0, top), (WIDTH, PANEL)))?;
        }
        area.present().map_err(|error| anyhow!("cannot draw: {error}"))
    }
}

impl Panel {
    fn draw(&self, area: &Area<'_>) -> Result<()> {
        text(area, &self.title, (14, 6), style(TEXT + 1, HPos::Left))?;
        self.draw_legend(area)?;
        let values = match &self.body {
            Body::Lines { series, .. } => lines::values(series),
            Body::Bars(groups) => bars::values(groups),
        };
        let scale = if self.is_log { Scale::log(&values) } else { Scale::linear(&values) };
        self.draw_vertical_axis(area, &scale)?;
        match &self.body {
            Body::Lines { horizontal, series } => lines::draw(area, &scale, horizontal, series),
            Body::Bars(groups) => bars::draw(area, &scale, groups),
        }
    }

    fn draw_legend(&self, area: &Area<'_>) -> Result<()> {
        let mut x = FRAME.left;
        for (series, name) in &self.legend {
            match &self.body {
                Body::Lines { .. } => lines::draw_mark(area, (x + 6, 37), *series)?,
                Body::Bars(_) => rectangle(area, [(x, 31), (x + 12, 43)], colour(*series))?,
            }
            text(area, name, (x + 17, 30), style(TEXT, HPos::Left))?;
            // The width of a letter in a wide font.
            x += 34 + (name.chars().count() as i32) * 8;
        }
        Ok(())
    }

    fn draw_vertical_axis(&self, area: &Area<'_>, scale: &Scale) -> Result<()> {
        let middle = (FRAME.top + FRAME.bottom) / 2;
        let font = ("sans-serif", TEXT).into_font().transform(FontTransform::Rotate270);
        let turned = TextStyle::from(font).color(&INK).pos(Pos::new(HPos::Center, VPos::Top));
        text(area, &self.vertical, (8, middle), turned)?;
        for tick in scale.ticks() {
            let y = FRAME.height(scale, tick);
            path(area, vec![(FRAME.left, y), (FRAME.right, y)], INK.mix(0.25))?;
            text(area, &axis::label(tick), (FRAME.left - 8, y - 6), style(TEXT, HPos::Right))?;
        }
        path(area, vec![(FRAME.left, FRAME.top), (FRAME.left, FRAME.bottom)], INK.mix(1.0))
    }
}

impl Frame {
    /// Where a value lies, in pixels from the top of the panel.
    fn height(self, scale: &Scale, value: f64) -> i32 {
        self.bottom - (scale.part(value) * f64::from(self.bottom - self.top)).round() as i32
    }

    /// Where a part of the horizontal axis lies.
    fn across(self, part: f64) -> i32 {
        self.left + (part * f64::from(self.right - self.left)).round() as i32
    }
}

fn colour(series: usize) -> RGBColor {
    COLOURS[series % COLOURS.len()]
}

fn style(size: u32, anchor: HPos) -> TextStyle<'static> {
    TextStyle::from(("sans-serif", size).into_font()).color(&INK).pos(Pos::new(anchor, VPos::Top))
}

fn text(area: &Area<'_>, words: &str, at: (i32, i32), style: TextStyle<'static>) -> Result<()> {
    area.draw(&Text::new(words.to_owned(), at, style)).map_err(|error| anyhow!("cannot draw text: {error}"))
}

fn path(area: &Area<'_>, points: Vec<(i32, i32)>, colour: plotters::style::RGBAColor) -> Result<()> {
    area.draw(&PathElement::new(points, colour)).map_err(|error| anyhow!("cannot draw a line: {error}"))
}

fn rectangle(area: &Area<'_>, corners: [(i32, i32); 2], colour: RGBColor) -> Result<()> {
    area.draw(&Rectangle::new(corners, colour.filled()))
        .map_err(|error| anyhow!("cannot draw a bar: {error}"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_chart_says_what_it_shows_and_is_the_same_each_time() {
        let chart = || Chart {
            title: "Bytes & time",
            panels: vec![Panel {
                title: "idle".into(),
                legend: vec![(0, "Whimbrel".into()), (1, "peer".into())],
                vertical: "sent, MB".into(),
                is_log: false,
                body: Body::Bars(vec![Group {
                    name: "one".into(),
                    bars: vec![(0, 1.5), (1, -3.0)],
                    goal: Some(2.0),
                }]),
            }],
        };
        let svg = chart().svg().unwrap();
        assert!(svg.starts_with("<svg") && svg.trim_end().ends_with("</svg>"));
        for words in ["Bytes &amp; time", "idle", "Whimbrel", "peer", "sent, MB", "1.50", "-3.00"] {
            assert!(svg.contains(words), "{words}");
        }
        assert_eq!(svg, chart().svg().unwrap());
    }
}
