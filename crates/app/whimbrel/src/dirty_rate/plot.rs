//! Plot of a dirty trace, like figures 3 to 6 of Clark et al. (NSDI 2005): for each bandwidth the dirty rate
//! in grey, and for each number of rounds a line with the predicted downtime of a migration that starts at
//! that moment.

use super::report::bits;
use crate::{error::CliError, picture::raster::Canvas};
use plotters::{coord::Shift, prelude::*};
use std::time::Duration;
use whimbrel_capture::{
    dirty_trace::DirtyTrace,
    downtime_model::{Model, Simulation},
};

const WIDTH: u32 = 900;
const HEIGHT: u32 = 300;
/// Least number of bars, if there are as many samples.
const BARS: u32 = 50;
const GREY: RGBColor = RGBColor(0xd8, 0xd8, 0xd8);
/// Colours of the lines, used in turn.
const COLOURS: [RGBColor; 4] = [
    RGBColor(0xc0, 0x39, 0x2b),
    RGBColor(0xd6, 0x8a, 0x10),
    RGBColor(0x1e, 0x8a, 0x4c),
    RGBColor(0x1f, 0x5f, 0xa8),
];
const FONT: (&str, i32) = ("sans-serif", 14);

/// Points of one chart.
struct Chart {
    title: String,
    /// Intervals of the trace: start, end, pages per second.
    writes: Vec<(f64, f64, f64)>,
    /// Start and downtime in seconds, for each number of rounds.
    lines: Vec<Vec<(f64, f64)>>,
}

/// Trace to draw, with a chart for each bandwidth.
pub(crate) struct Plot<'a> {
    pub(crate) trace: &'a DirtyTrace,
    pub(crate) window: Duration,
    pub(crate) bandwidths: &'a [u64],
    pub(crate) rounds: u32,
}

impl Plot<'_> {
    /// Draws the plot as SVG text.
    pub(crate) fn svg(&self, model: &Model) -> Result<String, CliError> {
        let (charts, mut text) = (self.charts(model)?, String::new());
        let root = SVGBackend::with_string(&mut text, size(&charts)).into_drawing_area();
        draw(&root, &charts).map_err(|error| failed(error.to_string()))?;
        drop(root);
        Ok(text)
    }

    /// Draws the plot as a PNG file.
    pub(crate) fn png(&self, model: &Model) -> Result<Vec<u8>, CliError> {
        let charts = self.charts(model)?;
        let mut canvas = Canvas::new(size(&charts));
        let root = (&mut canvas).into_drawing_area();
        draw(&root, &charts).map_err(|error| failed(error.to_string()))?;
        drop(root);
        canvas.to_png().map_err(|error| failed(error.to_string()))
    }

    fn charts(&self, model: &Model) -> Result<Vec<Chart>, CliError> {
        let Some(simulation) = Simulation::new(self.trace) else {
            return Err(failed("there is nothing to draw: the trace has no samples".to_owned()));
        };
        let one =
            |bandwidth: &u64| chart(self.trace, &simulation, self.window, *bandwidth, self.rounds, model);
        Ok(self.bandwidths.iter().map(one).collect())
    }
}

fn failed(reason: String) -> CliError {
    CliError::io("draw the picture")(std::io::Error::other(reason))
}

fn chart(
    trace: &DirtyTrace,
    simulation: &Simulation<'_>,
    window: Duration,
    bandwidth: u64,
    rounds: u32,
    model: &Model,
) -> Chart {
    let mut at = 0.0;
    let stretch = |(took, pages): (Duration, u64)| {
        let from = at;
        at += took.as_secs_f64();
        (from, at, pages as f64 / took.as_secs_f64())
    };
    // A short trace has finer bars than one window.
    let bar = window.min(trace.duration() / BARS).max(trace.header.interval);
    let writes = trace.working_sets(bar).into_iter().map(stretch).collect();
    let mut lines = vec![Vec::new(); rounds as usize];
    for start in simulation.starts() {
        let played = simulation.simulate(start, bandwidth, rounds, model);
        for (line, prediction) in lines.iter_mut().zip(played) {
            line.push((start, prediction.downtime.as_secs_f64()));
        }
    }
    Chart { title: format!("Migration throughput: {}", bits(bandwidth)), writes, lines }
}

type Drawn<B> = Result<(), DrawingAreaErrorKind<<B as DrawingBackend>::ErrorType>>;

fn size(charts: &[Chart]) -> (u32, u32) {
    (WIDTH, HEIGHT * charts.len().max(1) as u32)
}

fn draw<B: DrawingBackend>(root: &DrawingArea<B, Shift>, charts: &[Chart]) -> Drawn<B> {
    root.fill(&WHITE)?;
    for (area, chart) in root.split_evenly((charts.len().max(1), 1)).iter().zip(charts) {
        draw_one(area, chart)?;
    }
    root.present()
}

fn draw_one<B: DrawingBackend>(area: &DrawingArea<B, Shift>, chart: &Chart) -> Drawn<B> {
    // A scale must not be empty.
    let top = |values: &mut dyn Iterator<Item = f64>| values.fold(1e-3, f64::max) * 1.1;
    let end = chart.writes.last().map_or(1.0, |stretch| stretch.1);
    let (rate, downtime) = (
        top(&mut chart.writes.iter().map(|stretch| stretch.2)),
        top(&mut chart.lines.iter().flatten().map(|point| point.1)),
    );
    let mut frame = ChartBuilder::on(area)
        .caption(&chart.title, FONT)
        .margin(8)
        .x_label_area_size(36)
        .y_label_area_size(64)
        .right_y_label_area_size(64)
        .build_cartesian_2d(0.0..end, 0.0..rate)?
        .set_secondary_coord(0.0..end, 0.0..downtime);
    frame
        .configure_mesh()
        .disable_mesh()
        .x_desc("elapsed time (s)")
        .y_desc("pages written (1/s)")
        .y_label_formatter(&|rate| format!("{rate:.0}"))
        .draw()?;
    frame
        .configure_secondary_axes()
        .y_desc("expected downtime (s)")
        .y_label_formatter(&|seconds| format!("{seconds:.3}"))
        .draw()?;
    let bars = chart
        .writes
        .iter()
        .map(|(from, to, rate)| Rectangle::new([(*from, 0.0), (*to, *rate)], GREY.filled()));
    frame.draw_series(bars)?;
    for (index, line) in chart.lines.iter().enumerate() {
        let colour = COLOURS[index % COLOURS.len()];
        let name = if index == 0 { "1 round".to_owned() } else { format!("{} rounds", index + 1) };
        frame
            .draw_secondary_series(LineSeries::new(line.iter().copied(), colour.stroke_width(2)))?
            .label(name)
            .legend(move |(x, y)| PathElement::new(vec![(x, y), (x + 16, y)], colour.stroke_width(2)));
    }
    frame.configure_series_labels().background_style(WHITE.mix(0.8)).border_style(BLACK).draw()
}

#[cfg(test)]
mod tests {
    use super::*;
    use whimbrel_capture::dirty_trace::{DirtyTraceHeader, Sample};
    use whimbrel_core::PageRun;

    fn trace(samples: u64) -> DirtyTrace {
        let every = Duration::from_millis(50);
        let sample = |k| Sample { duration: every, dirty: vec![PageRun::new(k % 50, 30)] };
        DirtyTrace {
            header: DirtyTraceHeader { pages: 100, populated: 100, interval: every, start_ms: 0 },
            samples: (0..samples).map(sample).collect(),
        }
    }

    #[test]
    fn a_picture_has_a_chart_a_bandwidth_and_a_line_a_number_of_rounds() {
        let window = Duration::from_secs(1);
        let trace = trace(60);
        let plot = Plot { trace: &trace, window, bandwidths: &[1 << 20, 125_000_000], rounds: 3 };
        let picture = plot.svg(&Model::default()).unwrap();
        assert!(plot.png(&Model::default()).unwrap().starts_with(b"\x89PNG"));
        assert!(picture.starts_with("<svg") && picture.trim_end().ends_with("</svg>"), "{picture}");
        for title in ["8 Mbit/s", "1 Gbit/s"] {
            assert_eq!(picture.matches(title).count(), 1, "{title}");
        }
        for (name, count) in [("1 round\n", 2), ("2 rounds", 2), ("3 rounds", 2), ("4 rounds", 0)] {
            assert_eq!(picture.matches(name).count(), count, "{name}");
        }
    }

    #[test]
    fn a_trace_of_nothing_is_not_drawn_and_one_of_one_sample_is() {
        let draw = |samples| {
            let window = Duration::from_secs(1);
            Plot { trace: &trace(samples), window, bandwidths: &[1], rounds: 1 }.svg(&Model::default())
        };
        assert!(draw(0).is_err());
        assert!(draw(1).is_ok());
    }
}
