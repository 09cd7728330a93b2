//! Report about a dirty trace: working sets and predictions, as a table or as JSON.

use crate::table::{count, milliseconds, table};
use serde::Serialize;
use std::time::Duration;
use whimbrel_capture::{
    dirty_trace::DirtyTrace,
    downtime_model::{Model, Simulation, Summary, summarize_migrations, summary},
};
use whimbrel_core::{ByteSize, PAGE_SIZE};

/// Result of `dirty-rate`. Its JSON is part of the interface.
#[derive(Debug, Serialize)]
pub(crate) struct Report {
    pages: u64,
    /// Pages with content at the start.
    present_pages: u64,
    sample_ms: f64,
    samples: u64,
    duration_ms: f64,
    /// Distinct pages of all samples.
    unique_pages: u64,
    /// Pages per second; a page counts once in each sample.
    dirty_rate: f64,
    working_sets: Vec<WorkingSet>,
    /// Bytes on the wire per page in the first round.
    page_bytes: f64,
    /// Bytes on the wire per page in later rounds.
    again_bytes: f64,
    /// Least time to send a page.
    page_us: f64,
    /// Time that a stop takes in addition to sending pages.
    fixed_ms: f64,
    /// Number of past migrations that these costs come from.
    learned_from: u64,
    /// Predictions by bandwidth, then by rounds. Empty without samples.
    predictions: Vec<Predicted>,
    /// Predictions by bandwidth with as many rounds as `migrate` would choose. Empty without samples.
    moves: Vec<Predicted>,
}

#[derive(Debug, Serialize)]
struct WorkingSet {
    ms: f64,
    pages: u64,
}

#[derive(Debug, Serialize)]
struct Predicted {
    /// Rate in bytes per second.
    bandwidth: u64,
    rounds: u32,
    /// Median over the moments at which the migration may start; `downtime_worst_ms` is the longest.
    downtime_ms: f64,
    downtime_worst_ms: f64,
    /// Time from the first page to the last.
    total_ms: f64,
    /// Whether the trace was shorter than the migration and was repeated.
    beyond_trace: bool,
}

impl Report {
    pub(crate) fn of(
        trace: &DirtyTrace,
        window: Duration,
        bandwidths: &[u64],
        rounds: u32,
        (model, learned_from): (&Model, u64),
    ) -> Self {
        let simulation = Simulation::new(trace);
        let predictions =
            simulation.iter().flat_map(|s| summary(s, bandwidths, rounds, model)).map(predicted);
        let moved = simulation.iter().flat_map(|s| summarize_migrations(s, bandwidths, model)).map(predicted);
        let dirtied: u64 = trace.samples.iter().map(|sample| sample.count()).sum();
        let seconds = trace.duration().as_secs_f64();
        let set = |(took, pages)| WorkingSet { ms: ms(took), pages };
        Self {
            pages: trace.header.pages,
            present_pages: trace.header.populated,
            sample_ms: ms(trace.header.interval),
            samples: trace.samples.len() as u64,
            duration_ms: ms(trace.duration()),
            unique_pages: simulation.as_ref().map_or(0, Simulation::unique_pages),
            dirty_rate: if seconds > 0.0 { dirtied as f64 / seconds } else { 0.0 },
            working_sets: trace.working_sets(window).into_iter().map(set).collect(),
            page_bytes: model.page_bytes,
            again_bytes: model.resend_bytes,
            page_us: model.page_time.as_nanos() as f64 / 1e3,
            fixed_ms: ms(model.fixed),
            learned_from,
            predictions: predictions.collect(),
            moves: moved.collect(),
        }
    }

    pub(crate) fn describe(&self) -> String {
        let size = |pages: u64| ByteSize(pages * PAGE_SIZE as u64);
        let largest = self.working_sets.iter().map(|set| set.pages).max().unwrap_or_default();
        let mut text = format!(
            "{} of memory, {} of it in use; {} over {}\n",
            size(self.pages),
            size(self.present_pages),
            count(self.samples, "sample"),
            milliseconds(self.duration_ms),
        );
        text += &format!(
            "wrote {:.0} pages a second, {} different ones ({}), at most {} in a window\n",
            self.dirty_rate,
            self.unique_pages,
            size(self.unique_pages),
            size(largest),
        );
        if self.learned_from > 0 {
            let from = count(self.learned_from, "migration");
            text += &format!("costs of pages and stops are from {from} of this host\n");
        }
        let row = |(p, rounds): (&Predicted, String)| {
            [
                bits(p.bandwidth),
                rounds,
                milliseconds(p.downtime_ms),
                milliseconds(p.downtime_worst_ms),
                milliseconds(p.total_ms),
                if p.beyond_trace { "trace too short, repeated".to_owned() } else { String::new() },
            ]
        };
        let asked = self.predictions.iter().map(|p| (p, p.rounds.to_string()));
        let rows = asked.chain(self.moves.iter().map(|p| (p, format!("{} (automatic)", p.rounds)))).map(row);
        let header = ["BANDWIDTH", "ROUNDS", "DOWNTIME", "WORST", "TOTAL", "NOTE"];
        text + "\n" + &table(header, rows, "no samples, so no predictions")
    }
}

fn predicted(summary: Summary) -> Predicted {
    Predicted {
        bandwidth: summary.bandwidth,
        rounds: summary.rounds,
        downtime_ms: ms(summary.median),
        downtime_worst_ms: ms(summary.worst),
        total_ms: ms(summary.total),
        beyond_trace: summary.exceeds_trace,
    }
}

/// Converts a duration to milliseconds, in steps of a microsecond.
fn ms(duration: Duration) -> f64 {
    duration.as_micros() as f64 / 1e3
}

/// Formats a bandwidth in bits per second.
pub(crate) fn bits(bytes: u64) -> String {
    let bits = bytes.saturating_mul(8);
    match bits {
        0..1_000_000 => format!("{} kbit/s", bits / 1_000),
        1_000_000..1_000_000_000 => format!("{} Mbit/s", bits / 1_000_000),
        _ if bits.is_multiple_of(1_000_000_000) => format!("{} Gbit/s", bits / 1_000_000_000),
        _ => format!("{:.1} Gbit/s", bits as f64 / 1e9),
    }
}
