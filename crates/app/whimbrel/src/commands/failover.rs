//! `whimbrel failover`.

use crate::{context::Context, error::CliError, operation};
use whimbrel_api::FailoverRequest;
use whimbrel_core::MachineName;

const EXAMPLES: &str = "\
Examples:
  whimbrel failover web                        on its host: a drill; nothing is lost
  whimbrel failover web --primary-is-dead      on its standby, without a witness, when its host is off for certain";

/// Let the standby of a machine have it
///
/// On the machine's host this sends a last epoch, and the standby goes on from there. On the standby's host
/// it takes over from the last epoch there is, which the witness must allow.
#[derive(Debug, clap::Args)]
#[command(after_help = EXAMPLES)]
pub(crate) struct Args {
    /// The machine
    name: MachineName,
    /// Answer for it that the other host does not run the machine any more; if it does, there are two of it
    #[arg(long)]
    primary_is_dead: bool,
}

impl Args {
    pub(crate) async fn run(self, context: &Context) -> Result<(), CliError> {
        let request = FailoverRequest { primary_is_dead: self.primary_is_dead };
        operation::perform(context, context.client.failover(&self.name, &request)).await
    }
}
