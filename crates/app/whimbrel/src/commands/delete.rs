//! `whimbrel forget`.

use crate::{context::Context, error::CliError, output::Removed};
use whimbrel_core::MachineName;

const EXAMPLES: &str = "\
Examples:
  whimbrel stop web && whimbrel forget web";

/// Forget a machine that has stopped or crashed, and what it wrote on its disks
///
/// Capsules taken from it stay. Its name is free again.
#[derive(Debug, clap::Args)]
#[command(after_help = EXAMPLES)]
pub(crate) struct Args {
    /// The machine
    name: MachineName,
}

impl Args {
    pub(crate) async fn run(self, context: &Context) -> Result<(), CliError> {
        context.client.forget(&self.name).await?;
        context.output.result(&Removed::one(&self.name), |removed| removed.sentence("forgotten"))
    }
}
