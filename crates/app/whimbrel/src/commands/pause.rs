//! `whimbrel pause`: stops the CPUs of a machine.

use crate::{context::Context, error::CliError, machine_text};
use whimbrel_core::MachineName;

const EXAMPLES: &str = "\
Examples:
  whimbrel pause web
  whimbrel unpause web";

/// Pause the CPUs of a machine; its memory stays loaded
#[derive(Debug, clap::Args)]
#[command(after_help = EXAMPLES)]
pub(crate) struct Args {
    /// Name of the machine
    name: MachineName,
}

impl Args {
    pub(crate) async fn run(self, context: &Context) -> Result<(), CliError> {
        let machine = context.client.pause(&self.name).await?;
        context.output.result(&machine, machine_text::sentence)
    }
}
