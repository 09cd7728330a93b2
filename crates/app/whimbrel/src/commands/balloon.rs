//! `whimbrel balloon`.

use crate::{context::Context, error::CliError, machine_text};
use whimbrel_api::BalloonRequest;
use whimbrel_core::{ByteSize, MachineName};

const EXAMPLES: &str = "\
Examples:
  whimbrel balloon web 256M    squeeze its caches before a suspend
  whimbrel balloon web 1G      give it back what it had";

/// Change how much memory a guest has
///
/// The guest gives memory back as fast as it can; the rest of it is not stored and not moved.
#[derive(Debug, clap::Args)]
#[command(after_help = EXAMPLES)]
pub(crate) struct Args {
    /// The machine
    name: MachineName,
    /// Memory the guest is to be left with
    size: ByteSize,
}

impl Args {
    pub(crate) async fn run(self, context: &Context) -> Result<(), CliError> {
        let machine = context.client.balloon(&self.name, &BalloonRequest { size: self.size }).await?;
        context.output.result(&machine, machine_text::sentence)
    }
}
