//! `whimbrel delete`: deletes a machine that does not run.

use crate::{context::Context, error::CliError, output::Removed};
use whimbrel_core::MachineName;

const EXAMPLES: &str = "\
Examples:
  whimbrel stop web && whimbrel delete web";

/// Delete a stopped or crashed machine and the changes on its disks
///
/// Capsules of the machine stay, and so do the files that its disks started from. The name becomes free.
#[derive(Debug, clap::Args)]
#[command(after_help = EXAMPLES)]
pub(crate) struct Args {
    /// Name of the machine
    name: MachineName,
    /// Delete what is left of a machine whose record cannot be read
    #[arg(long)]
    unreadable: bool,
}

impl Args {
    pub(crate) async fn run(self, context: &Context) -> Result<(), CliError> {
        match self.unreadable {
            true => context.client.delete_unreadable_machine(&self.name).await?,
            false => context.client.delete_machine(&self.name).await?,
        }
        context.output.result(&Removed::one(&self.name), |removed| removed.sentence("deleted"))
    }
}
