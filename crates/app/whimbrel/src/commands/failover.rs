//! `whimbrel failover`: switches a machine over to its standby.

use crate::{context::Context, error::CliError, operation};
use whimbrel_api::FailoverRequest;
use whimbrel_core::MachineName;

const EXAMPLES: &str = "\
Examples:
  whimbrel failover web                      on the primary: a drill, nothing is lost
  whimbrel failover web --primary-is-dead    on a standby without a witness, if the primary is off";

/// Switch a machine over to its standby
///
/// On the primary, the command sends a last epoch, and the standby continues from there. On the standby, it
/// takes over from the last epoch that the standby has, if the witness allows it.
#[derive(Debug, clap::Args)]
#[command(after_help = EXAMPLES)]
pub(crate) struct Args {
    /// Name of the machine
    name: MachineName,
    /// Confirm that the primary no longer runs the machine; if it does, two copies will run
    #[arg(long)]
    primary_is_dead: bool,
    /// Take over although its host answers: what runs there is stopped later
    #[arg(long, requires = "primary_is_dead")]
    force: bool,
}

impl Args {
    pub(crate) async fn run(self, context: &Context) -> Result<(), CliError> {
        let request = FailoverRequest { primary_is_dead: self.primary_is_dead, force: self.force };
        operation::perform(context, context.client.failover(&self.name, &request)).await
    }
}
