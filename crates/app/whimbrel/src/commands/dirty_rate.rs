//! `whimbrel dirty-rate`: samples the dirty rate of a machine and predicts a migration.

use crate::{
    argument_types::{DurationArg, RateArg},
    context::Context,
    dirty_rate::{Calibration, Report, Sampling},
    error::CliError,
};
use std::{fs, io::Read, path::PathBuf, time::Duration};
use whimbrel_api::DirtyTraceRequest;
use whimbrel_capture::{dirty_trace::DirtyTrace, downtime_model::Model};
use whimbrel_core::MachineName;

const EXAMPLES: &str = "\
Examples:
  whimbrel dirty-rate web
  whimbrel dirty-rate web --duration 2m --save web.trace
  whimbrel dirty-rate --trace web.trace --bandwidth 100Mbit,10Gbit --json";

/// Longest trace that is read: more than a day of a busy machine.
const TRACE_MAX: u64 = 4 << 30;

/// Measure the dirty rate of a machine and predict the downtime of a migration
///
/// Sampling does not disturb the machine, and checkpoints and migrations can run at the same time. The
/// prediction simulates migrations with 1 to --rounds rounds on the samples, and one with as many rounds as
/// `whimbrel migrate` would choose. The cost of pages and stops is taken from past migrations of this host.
#[derive(Debug, clap::Args)]
#[command(after_help = EXAMPLES)]
pub(crate) struct Args {
    /// Name of the machine
    #[arg(required_unless_present = "trace")]
    name: Option<MachineName>,
    /// Time between two samples
    #[arg(long, value_name = "DURATION", default_value = "50ms")]
    sample: DurationArg,
    /// Length of a window, in which each page is counted once
    #[arg(long, value_name = "DURATION", default_value = "8s")]
    window: DurationArg,
    /// Time to sample; Ctrl-C ends it early [default: one window]
    #[arg(long, value_name = "DURATION")]
    duration: Option<DurationArg>,
    /// Save the dirty trace in a file
    #[arg(long, value_name = "FILE")]
    save: Option<PathBuf>,
    /// Predict from a saved trace, without a machine
    #[arg(long, value_name = "FILE", conflicts_with_all = ["name", "sample", "duration", "save"])]
    trace: Option<PathBuf>,
    /// Bandwidths to predict for
    #[arg(
        long,
        value_name = "RATES",
        value_delimiter = ',',
        default_value = "128Mbit,256Mbit,512Mbit,1Gbit"
    )]
    bandwidth: Vec<RateArg>,
    /// Largest number of rounds to predict for
    #[arg(long, value_name = "N", default_value_t = 4, value_parser = clap::value_parser!(u32).range(1..=30))]
    rounds: u32,
    /// Bytes sent per page in the first round [default: from past migrations, else 4096]
    #[arg(long, alias = "page-bytes", value_name = "BYTES", value_parser = clap::value_parser!(u32).range(1..=8192))]
    first_round_bytes: Option<u32>,
    /// Bytes sent per page in later rounds [default: from past migrations, else as in the first round]
    #[arg(long, alias = "again-bytes", value_name = "BYTES", value_parser = clap::value_parser!(u32).range(1..=8192))]
    later_round_bytes: Option<u32>,
    /// Time that a stop takes in addition to sending pages [default: from past migrations, else 20ms]
    #[arg(long, alias = "fixed", value_name = "DURATION")]
    stop_overhead: Option<DurationArg>,
}

impl Args {
    pub(crate) async fn run(self, context: &Context) -> Result<(), CliError> {
        let trace = match (&self.trace, &self.name) {
            (Some(path), _) => read(path)?,
            (None, Some(name)) => self.sample(context, name).await?,
            (None, None) => {
                return Err(usage(
                    "no machine and no trace is given",
                    "the name of a machine, or --trace FILE",
                ));
            }
        };
        let learned = self.learned(context).await;
        let model = self.model(&learned);
        let bandwidths: Vec<u64> = self.bandwidth.iter().map(|rate| rate.0.0).collect();
        let report = Report::of(&trace, self.window()?, &bandwidths, self.rounds, (&model, learned.from));
        context.output.result(&report, Report::describe)
    }

    /// Costs of past migrations. Without them the defaults are used.
    async fn learned(&self, context: &Context) -> Calibration {
        let Some(name) = &self.name else { return Calibration::default() };
        context.client.migrations().await.map(|past| Calibration::of(&past, name)).unwrap_or_default()
    }

    /// Costs from the options, else from past migrations, else the defaults.
    fn model(&self, learned: &Calibration) -> Model {
        let usual = Model::default();
        let page_bytes = self.first_round_bytes.map(f64::from);
        let first = page_bytes.or(learned.page_bytes).unwrap_or(usual.page_bytes);
        Model {
            page_bytes: first,
            resend_bytes: self
                .later_round_bytes
                .map(f64::from)
                .or(page_bytes)
                .or(learned.again_bytes)
                .unwrap_or(first),
            page_time: learned.page_time.unwrap_or(usual.page_time),
            fixed: self.stop_overhead.map(|overhead| overhead.0).or(learned.fixed).unwrap_or(usual.fixed),
        }
    }

    fn window(&self) -> Result<Duration, CliError> {
        match self.window.0 {
            Duration::ZERO => Err(usage("a window must be longer than 0", "--window 8s")),
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

fn read(path: &PathBuf) -> Result<DirtyTrace, CliError> {
    let wrong =
        |source: Box<dyn std::error::Error + Send + Sync>| CliError::Trace { path: path.clone(), source };
    let mut bytes = Vec::new();
    let file = fs::File::open(path).map_err(|error| wrong(error.into()))?;
    file.take(TRACE_MAX + 1).read_to_end(&mut bytes).map_err(|error| wrong(error.into()))?;
    if bytes.len() as u64 > TRACE_MAX {
        return Err(wrong("the file is longer than 4 GiB".into()));
    }
    DirtyTrace::read(&bytes).map_err(|error| wrong(error.into()))
}

fn usage(problem: &str, hint: &str) -> CliError {
    CliError::Usage { problem: problem.to_owned(), hint: format!("write {hint}") }
}
