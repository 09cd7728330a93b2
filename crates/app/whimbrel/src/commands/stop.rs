//! `whimbrel stop`: switches a machine off.

use crate::{argument_types::DurationArg, context::Context, error::CliError, machine_text};
use whimbrel_api::{StopMode, StopRequest};
use whimbrel_core::MachineName;

const EXAMPLES: &str = "\
Examples:
  whimbrel stop web
  whimbrel stop web --timeout 5m
  whimbrel stop web --timeout 30s --force     cut the power if it has not stopped by then
  whimbrel stop web --kill";

/// Stop a machine by its power button, or cut its power
///
/// Without --kill the guest is asked to shut down. If it does not react in time, the command fails and the
/// machine keeps running, unless --force is given. A stopped machine is not restarted by its rule. Memory is
/// lost in all cases; `whimbrel suspend` saves it.
#[derive(Debug, clap::Args)]
#[command(after_help = EXAMPLES)]
pub(crate) struct Args {
    /// Name of the machine
    name: MachineName,
    /// Cut the power at once
    #[arg(long)]
    kill: bool,
    /// Time to wait for the guest to shut down
    #[arg(long, value_name = "DURATION", default_value = "60s", conflicts_with = "kill")]
    timeout: DurationArg,
    /// Cut the power if the guest has not shut down in time
    #[arg(long, conflicts_with = "kill")]
    force: bool,
}

impl Args {
    pub(crate) async fn run(self, context: &Context) -> Result<(), CliError> {
        let mode = if self.kill { StopMode::Kill } else { StopMode::Powerdown };
        let timeout_s = (!self.kill).then(|| self.timeout.0.as_secs().max(1));
        let request = StopRequest { mode, timeout_s, force: self.force };
        let machine = context.client.stop(&self.name, &request).await?;
        context.output.result(&machine, machine_text::sentence)
    }
}
