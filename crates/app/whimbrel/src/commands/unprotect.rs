//! `whimbrel unprotect`: ends the protection of a machine.

use crate::{context::Context, error::CliError, machine_text};
use whimbrel_core::MachineName;

const EXAMPLES: &str = "\
Examples:
  whimbrel unprotect web";

/// Stop protecting a machine; it keeps running on this host
///
/// The standby is deleted. If its host does not answer, the witness prevents it from ever taking over.
#[derive(Debug, clap::Args)]
#[command(after_help = EXAMPLES)]
pub(crate) struct Args {
    /// Name of the machine
    name: MachineName,
}

impl Args {
    pub(crate) async fn run(self, context: &Context) -> Result<(), CliError> {
        let machine = context.client.unprotect(&self.name).await?;
        context.output.result(&machine, machine_text::sentence)
    }
}
