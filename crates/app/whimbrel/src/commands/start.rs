//! `whimbrel start`.

use crate::{context::Context, error::CliError, machine_text};
use whimbrel_core::MachineName;

const EXAMPLES: &str = "\
Examples:
  whimbrel start web
  whimbrel stop web && whimbrel start web     switch it off and on";

/// Run a machine again that was switched off or has crashed
///
/// It boots from its own disks, as it left them, with the configuration it was made with. What was in its
/// memory is gone. A suspended machine still has its memory: `whimbrel resume` lets that go on.
#[derive(Debug, clap::Args)]
#[command(after_help = EXAMPLES)]
pub(crate) struct Args {
    /// The machine
    name: MachineName,
}

impl Args {
    pub(crate) async fn run(self, context: &Context) -> Result<(), CliError> {
        let machine = context.client.start_machine(&self.name).await?;
        context.output.result(&machine, machine_text::sentence)
    }
}
