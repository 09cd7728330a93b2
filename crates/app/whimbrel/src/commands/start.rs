//! `whimbrel start`: boots a stopped or crashed machine again.

use crate::{context::Context, error::CliError, machine_text};
use whimbrel_core::MachineName;

const EXAMPLES: &str = "\
Examples:
  whimbrel start web
  whimbrel stop web && whimbrel start web     switch it off and on";

/// Start a stopped or crashed machine from its own disks
///
/// The machine boots with its configuration and the disks as it left them. Its memory is lost. To continue a
/// suspended machine with its memory, use `whimbrel resume`.
#[derive(Debug, clap::Args)]
#[command(after_help = EXAMPLES)]
pub(crate) struct Args {
    /// Name of the machine
    name: MachineName,
}

impl Args {
    pub(crate) async fn run(self, context: &Context) -> Result<(), CliError> {
        let machine = context.client.start_machine(&self.name).await?;
        context.output.result(&machine, machine_text::sentence)
    }
}
