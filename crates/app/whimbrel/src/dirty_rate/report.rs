//! What a trace comes to: working sets, and predictions as a table or as JSON.

use crate::table::{count, milliseconds, table};
use serde::Serialize;
use std::time::Duration;
use whimbrel_capture::{
    dirty_trace::DirtyTrace,
    downtime_model::{Model, Simulation, Summary, moves, summary},
};
use whimbrel_core::{ByteSize, PAGE_SIZE};

/// The result of `wws`. The shape of its JSON is a promise.
#[derive(Debug, Serialize)]
pub(crate) struct Report {
    /// Guest memory in pages.
    pages: u64,
    /// Pages that held something at the beginning.
    present_pages: u64,
    /// How often it was looked at.
    sample_ms: f64,
    /// How many looks there were, and over which time.
    samples: u64,
    duration_ms: f64,
    /// Pages of all samples, each counted once.
    unique_pages: u64,
    /// Pages a second, each counted once a sample.
    dirty_rate: f64,
    /// Pages of each window, counted once.
    working_sets: Vec<WorkingSet>,
    /// What a page comes to on the wire in the first round and in later ones, what it takes there at least,
    /// and what a stop takes beside sending pages.
    page_bytes: f64,
    again_bytes: f64,
    page_us: f64,
    fixed_ms: f64,
    /// Past migrations that say so, as far as it was not given.
    learned_from: u64,
    /// By bandwidth, then by rounds. Empty if nothing was sampled.
    predictions: Vec<Predicted>,
    /// By bandwidth, with as many rounds as a migration would have. Empty if nothing was sampled.
    moves: Vec<Predicted>,
}

#[derive(Debug, Serialize)]
struct WorkingSet {
    ms: f64,
    pages: u64,
}

#[derive(Debug, Serialize)]
struct Predicted {
    /// Bytes a second.
    bandwidth: u64,
    rounds: u32,
    /// Median and worst over the moments at which the migration may begin.
    downtime_ms: f64,
    downtime_worst_ms: f64,
    /// From the first page to the last.
    total_ms: f64,
    /// Whether the trace was shorter than the migration and was played over again.
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
        let moved = simulation.iter().flat_map(|s| moves(s, bandwidths, model)).map(predicted);
        let dirtied: u64 = trace.samples.iter().map(|sample| sample.count()).sum();
        let seconds = trace.duration().as_secs_f64();
        let set = |(took, pages)| WorkingSet { ms: ms(took), pages };
        Self {
            pages: trace.head.pages,
            present_pages: trace.head.present,
            sample_ms: ms(trace.head.every),
            samples: trace.samples.len() as u64,
            duration_ms: ms(trace.duration()),
            unique_pages: simulation.as_ref().map_or(0, Simulation::unique),
            dirty_rate: if seconds > 0.0 { dirtied as f64 / seconds } else { 0.0 },
            working_sets: trace.working_sets(window).into_iter().map(set).collect(),
            page_bytes: model.page_bytes,
            again_bytes: model.again_bytes,
            page_us: model.page_time.as_nanos() as f64 / 1e3,
            fixed_ms: ms(model.fixed),
            learned_from,
            predictions: predictions.collect(),
            moves: moved.collect(),
        }
    }

    /// For people.
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
            text += &format!("what pages and stops cost is taken from {from} of this host\n");
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
        let rows =
            asked.chain(self.moves.iter().map(|p| (p, format!("as many as help: {}", p.rounds)))).map(row);
        let header = ["BANDWIDTH", "ROUNDS", "DOWNTIME", "WORST", "TOTAL", "NOTE"];
        text + "\n" + &table(header, rows, "nothing was sampled, so nothing is predicted")
    }
}

fn predicted(summary: Summary) -> Predicted {
    Predicted {
        bandwidth: summary.bandwidth,
        rounds: summary.rounds,
        downtime_ms: ms(summary.median),
        downtime_worst_ms: ms(summary.worst),
        total_ms: ms(summary.total),
        beyond_trace: summary.beyond,
    }
}

/// Whole microseconds are as exact as it is.
fn ms(duration: Duration) -> f64 {
    duration.as_micros() as f64 / 1e3
}

/// A bandwidth as links are sold.
pub(crate) fn bits(bytes: u64) -> String {
    let bits = bytes.saturating_mul(8);
    match bits {
        0..1_000_000 => format!("{} kbit/s", bits / 1_000),
        1_000_000..1_000_000_000 => format!("{} Mbit/s", bits / 1_000_000),
        _ if bits.is_multiple_of(1_000_000_000) => format!("{} Gbit/s", bits / 1_000_000_000),
        _ => format!("{:.1} Gbit/s", bits as f64 / 1e9),
    }
}
