//! `whimbrel wws`.

use crate::{
    argument_types::{DurationArg, RateArg},
    context::Context,
    dirty_rate::{Calibration, Report, Sampling, plot},
    error::CliError,
};
use std::{fs, io::Read, path::PathBuf, time::Duration};
use whimbrel_api::DirtyTraceRequest;
use whimbrel_capture::{dirty_trace::DirtyTrace, downtime_model::Model};
use whimbrel_core::MachineName;

const EXAMPLES: &str = "\
Examples:
  whimbrel wws web
  whimbrel wws web --duration 2m --save web.wws --svg web.svg
  whimbrel wws --trace web.wws --bandwidth 100Mbit,10Gbit --json";

/// Longest trace that is read: more than a day of a busy machine.
const TRACE_MAX: u64 = 4 << 30;

/// Watch which memory a machine writes, and predict how long it would stand still in a migration
///
/// Looking on disturbs nothing: checkpoints and migrations may go on meanwhile. The prediction plays
/// migrations with 1 to --rounds rounds over the trace, each round sending what was written during the one
/// before it, and one with as many rounds as `whimbrel migrate` would make. What pages and stops cost is
/// taken from migrations that this host remembers.
#[derive(Debug, clap::Args)]
#[command(after_help = EXAMPLES)]
pub(crate) struct Args {
    /// The machine
    #[arg(required_unless_present = "trace")]
    name: Option<MachineName>,
    /// Time between two looks at what was written
    #[arg(long, value_name = "DURATION", default_value = "50ms")]
    sample: DurationArg,
    /// Stretch over which pages are counted once
    #[arg(long, value_name = "DURATION", default_value = "8s")]
    window: DurationArg,
    /// How long to look on; one window unless given, and Ctrl-C ends it with what there is
    #[arg(long, value_name = "DURATION")]
    duration: Option<DurationArg>,
    /// Keep the trace in a file
    #[arg(long, value_name = "FILE")]
    save: Option<PathBuf>,
    /// Predict from a trace that was kept, without a machine
    #[arg(long, value_name = "FILE", conflicts_with_all = ["name", "sample", "duration", "save"])]
    trace: Option<PathBuf>,
    /// Links to predict for
    #[arg(
        long,
        value_name = "RATES",
        value_delimiter = ',',
        default_value = "128Mbit,256Mbit,512Mbit,1Gbit"
    )]
    bandwidth: Vec<RateArg>,
    /// Rounds before the machine is stopped, at most
    #[arg(long, value_name = "N", default_value_t = 4, value_parser = clap::value_parser!(u32).range(1..=30))]
    rounds: u32,
    /// What a page comes to on the wire in the first round; without past migrations its 4096 bytes
    #[arg(long, value_name = "BYTES", value_parser = clap::value_parser!(u32).range(1..=8192))]
    page_bytes: Option<u32>,
    /// The same in later rounds; without past migrations as in the first
    #[arg(long, value_name = "BYTES", value_parser = clap::value_parser!(u32).range(1..=8192))]
    again_bytes: Option<u32>,
    /// What a migration's stop takes beside sending pages; without past migrations 20ms
    #[arg(long, value_name = "DURATION")]
    fixed: Option<DurationArg>,
    /// Draw it: what was written over time, and the predictions for migrations that begin then
    #[arg(long, value_name = "FILE")]
    svg: Option<PathBuf>,
    /// The same as PNG
    #[arg(long, value_name = "FILE")]
    png: Option<PathBuf>,
}

impl Args {
    pub(crate) async fn run(self, context: &Context) -> Result<(), CliError> {
        let trace = match (&self.trace, &self.name) {
            (Some(path), _) => read(path)?,
            (None, Some(name)) => self.sample(context, name).await?,
            (None, None) => {
                return Err(usage(
                    "there is neither a machine nor a trace",
                    "name a machine, or --trace FILE",
                ));
            }
        };
        let learned = self.learned(context).await;
        let model = self.model(&learned);
        let bandwidths: Vec<u64> = self.bandwidth.iter().map(|rate| rate.0.0).collect();
        let report = Report::of(&trace, self.window()?, &bandwidths, self.rounds, (&model, learned.from));
        let plot = plot::Plot {
            trace: &trace,
            window: self.window()?,
            bandwidths: &bandwidths,
            rounds: self.rounds,
        };
        if let Some(path) = &self.svg {
            fs::write(path, plot.svg(&model)?).map_err(CliError::io("write the picture"))?;
        }
        if let Some(path) = &self.png {
            fs::write(path, plot.png(&model)?).map_err(CliError::io("write the picture"))?;
        }
        context.output.result(&report, Report::describe)
    }

    /// What past migrations of the machine's host say. Predictions can be made without.
    async fn learned(&self, context: &Context) -> Calibration {
        let Some(name) = &self.name else { return Calibration::default() };
        context.client.migrations().await.map(|past| Calibration::of(&past, name)).unwrap_or_default()
    }

    /// What was given, else what was learned, else what is usual.
    fn model(&self, learned: &Calibration) -> Model {
        let usual = Model::default();
        let page_bytes = self.page_bytes.map(f64::from);
        let first = page_bytes.or(learned.page_bytes).unwrap_or(usual.page_bytes);
        Model {
            page_bytes: first,
            again_bytes: self
                .again_bytes
                .map(f64::from)
                .or(page_bytes)
                .or(learned.again_bytes)
                .unwrap_or(first),
            page_time: learned.page_time.unwrap_or(usual.page_time),
            fixed: self.fixed.map(|fixed| fixed.0).or(learned.fixed).unwrap_or(usual.fixed),
        }
    }

    fn window(&self) -> Result<Duration, CliError> {
        match self.window.0 {
            Duration::ZERO => Err(usage("a window of no time holds nothing", "--window 8s")),
            window => Ok(window),
        }
    }

    async fn sample(&self, context: &Context, name: &MachineName) -> Result<DirtyTrace, CliError> {
        let duration = self.duration.unwrap_or(self.window);
        let request =
            DirtyTraceRequest { sample_ms: Some(self.sample.as_ms()), duration_ms: Some(duration.as_ms()) };
        let save =
            self.save.as_ref().map(fs::File::create).transpose().map_err(CliError::io("write the trace"))?;
        Sampling::start(context, name, self.window()?, save).run(&request).await
    }
}

/// A trace that was kept.
fn read(path: &PathBuf) -> Result<DirtyTrace, CliError> {
    let wrong =
        |source: Box<dyn std::error::Error + Send + Sync>| CliError::Trace { path: path.clone(), source };
    let mut bytes = Vec::new();
    let file = fs::File::open(path).map_err(|error| wrong(error.into()))?;
    file.take(TRACE_MAX + 1).read_to_end(&mut bytes).map_err(|error| wrong(error.into()))?;
    if bytes.len() as u64 > TRACE_MAX {
        return Err(wrong("it is longer than 4 GiB".into()));
    }
    DirtyTrace::read(&bytes).map_err(|error| wrong(error.into()))
}

fn usage(problem: &str, hint: &str) -> CliError {
    CliError::Usage { problem: problem.to_owned(), hint: format!("write {hint}") }
}
