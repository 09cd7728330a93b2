//! `whimbrel balloon`: changes how much memory a guest has.

use crate::{context::Context, error::CliError, machine_text};
use whimbrel_api::BalloonRequest;
use whimbrel_core::{ByteSize, MachineName};

const EXAMPLES: &str = "\
Examples:
  whimbrel balloon web 256M    release caches before a suspend
  whimbrel balloon web 1G      return the memory";

/// Change the memory size of a guest with its balloon
///
/// The guest releases memory as fast as it can. Released memory is neither stored nor migrated.
#[derive(Debug, clap::Args)]
#[command(after_help = EXAMPLES)]
pub(crate) struct Args {
    /// Name of the machine
    name: MachineName,
    /// Memory that the guest may use from now on
    size: ByteSize,
}

impl Args {
    pub(crate) async fn run(self, context: &Context) -> Result<(), CliError> {
        let machine = context.client.balloon(&self.name, &BalloonRequest { size: self.size }).await?;
        context.output.result(&machine, machine_text::sentence)
    }
}
