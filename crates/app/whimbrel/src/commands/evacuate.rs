//! `whimbrel evacuate`: migrates every running machine of a host to other hosts.

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
  whimbrel evacuate --dry-run              show where each machine would go
  whimbrel evacuate alpha                  from alpha to any host that alpha trusts
  whimbrel evacuate alpha --to beta        from alpha to beta
  whimbrel evacuate --to beta,gamma --parallel 2 --rate-max 400Mbit";

/// Migrate all running machines of a host to other hosts
///
/// Machines that write least memory move first. Stopped and suspended machines stay. A remote host moves only
/// the machines that it lets this host read and write. Ctrl-C cancels the migrations in progress and starts
/// no other; call the command again to continue. The exit code is 0 if no machine runs on the host any more,
/// or, for a dry run, if none would.
#[derive(Debug, clap::Args)]
#[command(after_help = EXAMPLES)]
pub(crate) struct Args {
    /// Host to empty [default: this host]
    host: Option<HostName>,
    /// Target hosts [default: every host that the host to empty trusts]
    #[arg(long, value_name = "HOSTS", value_delimiter = ',')]
    to: Vec<HostName>,
    /// Number of machines that migrate at the same time
    #[arg(long, value_name = "N", default_value_t = 1, value_parser = clap::value_parser!(u32).range(1..=16))]
    parallel: u32,
    /// Move nothing; show where each machine would go
    #[arg(long)]
    dry_run: bool,
    /// Start no further migration after one has failed
    #[arg(long)]
    stop_on_failure: bool,
    /// Time to sample what the machines write, which decides their order
    #[arg(long, value_name = "DURATION", default_value = "1s")]
    sample: DurationArg,
    /// Limit the rate of each migration
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
