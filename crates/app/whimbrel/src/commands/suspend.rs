//! `whimbrel suspend`.

use crate::{argument_types::BalloonArg, context::Context, error::CliError, operation};
use whimbrel_api::SuspendRequest;
use whimbrel_core::{MachineName, RefName};

const EXAMPLES: &str = "\
Examples:
  whimbrel suspend web
  whimbrel suspend web --tag friday
  whimbrel suspend web --balloon auto    leave out what it only caches
  whimbrel resume web    go on from there";

/// Keep the state of a machine as a capsule and end the machine
///
/// If it fails or is cancelled, the machine runs on as if nothing had happened.
#[derive(Debug, clap::Args)]
#[command(after_help = EXAMPLES)]
pub(crate) struct Args {
    /// The machine
    name: MachineName,
    /// Tag for the new capsule
    #[arg(long)]
    tag: Option<RefName>,
    /// Take memory from the guest before: auto, off or what to leave it (it has all of it back when it runs
    /// on)
    #[arg(long, value_name = "auto|off|SIZE", default_value = "off")]
    balloon: BalloonArg,
}

impl Args {
    pub(crate) async fn run(self, context: &Context) -> Result<(), CliError> {
        let request = SuspendRequest { tag: self.tag, balloon: self.balloon.0 };
        operation::perform(context, context.client.suspend(&self.name, &request)).await
    }
}
