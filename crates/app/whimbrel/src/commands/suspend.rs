//! `whimbrel suspend`: saves a machine as a capsule and ends it.

use crate::{argument_types::BalloonArg, context::Context, error::CliError, operation};
use whimbrel_api::SuspendRequest;
use whimbrel_core::{MachineName, RefName};

const EXAMPLES: &str = "\
Examples:
  whimbrel suspend web
  whimbrel suspend web --tag friday
  whimbrel suspend web --balloon auto    leave out the guest's caches
  whimbrel resume web                    continue from there";

/// Save the state of a machine as a capsule and end the machine
///
/// If the command fails or is cancelled, the machine keeps running.
#[derive(Debug, clap::Args)]
#[command(after_help = EXAMPLES)]
pub(crate) struct Args {
    /// Name of the machine
    name: MachineName,
    /// Tag for the new capsule
    #[arg(long)]
    tag: Option<RefName>,
    /// Shrink guest memory first: auto, off, or the size to shrink to; a resume restores the full size
    #[arg(long, value_name = "auto|off|SIZE", default_value = "off")]
    balloon: BalloonArg,
}

impl Args {
    pub(crate) async fn run(self, context: &Context) -> Result<(), CliError> {
        let request = SuspendRequest { tag: self.tag, balloon: self.balloon.0 };
        operation::perform(context, context.client.suspend(&self.name, &request)).await
    }
}
