//! `whimbrel unprotect`.

use crate::{context::Context, error::CliError, machine_text};
use whimbrel_core::MachineName;

const EXAMPLES: &str = "\
Examples:
  whimbrel unprotect web";

/// Keep no standby of a machine any longer; it runs on here
///
/// The standby forgets the machine. If it does not answer, the witness makes sure that it never takes over.
#[derive(Debug, clap::Args)]
#[command(after_help = EXAMPLES)]
pub(crate) struct Args {
    /// The machine
    name: MachineName,
}

impl Args {
    pub(crate) async fn run(self, context: &Context) -> Result<(), CliError> {
        let machine = context.client.unprotect(&self.name).await?;
        context.output.result(&machine, machine_text::sentence)
    }
}
