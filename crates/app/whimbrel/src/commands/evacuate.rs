//! `whimbrel evacuate`.

use crate::{
    argument_types::{DurationArg, RateArg},
    context::Context,
    error::CliError,
    operation,
};
use whimbrel_api::EvacuateRequest;
use whimbrel_core::HostName;

const EXAMPLES: &str = "\
Examples:
  whimbrel evacuate --dry-run              what would go where?
  whimbrel evacuate alpha                  alpha, from whichever host that it trusts
  whimbrel evacuate alpha --to beta        what runs on alpha goes to beta
  whimbrel evacuate --to beta,gamma --parallel 2 --rate-max 400Mbit";

/// Move every machine that runs on a host to others, those that write least memory first
///
/// Another host than the one that is asked empties itself on its word, of the machines that it lets that one
/// read and write. Ctrl-C ends the migrations under way, each whole on one side, and begins no other; calling
/// it again goes on. The exit code is 0 once no machine runs there, of a dry run if none would. Machines that
/// lie stopped or suspended stay.
#[derive(Debug, clap::Args)]
#[command(after_help = EXAMPLES)]
pub(crate) struct Args {
    /// The host to empty; the one that is asked unless given
    host: Option<HostName>,
    /// Where to; every host that the one to empty trusts unless given
    #[arg(long, value_name = "HOSTS", value_delimiter = ',')]
    to: Vec<HostName>,
    /// Machines that move at the same time
    #[arg(long, value_name = "N", default_value_t = 1, value_parser = clap::value_parser!(u32).range(1..=16))]
    parallel: u32,
    /// Move nothing, say what would go where
    #[arg(long)]
    dry_run: bool,
    /// Begin no other migration once one has failed
    #[arg(long)]
    stop_on_failure: bool,
    /// How long to look at what the machines write, to put them in order
    #[arg(long, value_name = "DURATION", default_value = "1s")]
    sample: DurationArg,
    /// Use no more of the link than this for each migration
    #[arg(long, value_name = "RATE")]
    rate_max: Option<RateArg>,
}

impl Args {
    pub(crate) async fn run(self, context: &Context) -> Result<(), CliError> {
        let request = EvacuateRequest {
            host: self.host,
            to: self.to,
            parallel: Some(self.parallel),
            dry_run: self.dry_run,
            stop_on_failure: self.stop_on_failure,
            sample_ms: Some(self.sample.as_ms()),
            rate_max: self.rate_max.map(|rate| rate.0),
        };
        operation::perform(context, context.client.evacuate(&request)).await
    }
}
