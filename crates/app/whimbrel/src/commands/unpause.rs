//! `whimbrel unpause`: lets a paused machine run again.

use crate::{context::Context, error::CliError, machine_text};
use whimbrel_core::MachineName;

const EXAMPLES: &str = "\
Examples:
  whimbrel unpause web";

/// Continue a paused machine
#[derive(Debug, clap::Args)]
#[command(after_help = EXAMPLES)]
pub(crate) struct Args {
    /// Name of the machine
    name: MachineName,
}

impl Args {
    pub(crate) async fn run(self, context: &Context) -> Result<(), CliError> {
        let machine = context.client.unpause(&self.name).await?;
        context.output.result(&machine, machine_text::sentence)
    }
}
