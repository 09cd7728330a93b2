//! `whimbrel stop`.

use crate::{argument_types::DurationArg, context::Context, error::CliError, machine_text};
use whimbrel_api::{StopMode, StopRequest};
use whimbrel_core::MachineName;

const EXAMPLES: &str = "\
Examples:
  whimbrel stop web
  whimbrel stop web --timeout 5m
  whimbrel stop web --kill";

/// Switch a machine off
///
/// Presses its power button and waits for the guest. A guest that does not react runs on; use --kill then.
/// What was in memory is lost either way: `whimbrel suspend` keeps it.
#[derive(Debug, clap::Args)]
#[command(after_help = EXAMPLES)]
pub(crate) struct Args {
    /// The machine
    name: MachineName,
    /// Pull the plug instead of pressing the power button
    #[arg(long)]
    kill: bool,
    /// How long to wait for the guest
    #[arg(long, value_name = "DURATION", default_value = "60s", conflicts_with = "kill")]
    timeout: DurationArg,
}

impl Args {
    pub(crate) async fn run(self, context: &Context) -> Result<(), CliError> {
        let mode = if self.kill { StopMode::Kill } else { StopMode::Powerdown };
        let timeout_s = (!self.kill).then(|| self.timeout.0.as_secs().max(1));
        let machine = context.client.stop(&self.name, &StopRequest { mode, timeout_s }).await?;
        context.output.result(&machine, machine_text::sentence)
    }
}
