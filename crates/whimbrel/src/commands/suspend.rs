//! `whimbrel suspend`.

use crate::{context::Context, failure::Failure, operation};
use whimbrel_api::SuspendRequest;
use whimbrel_core::{MachineName, RefName};

const EXAMPLES: &str = "\
Examples:
  whimbrel suspend web
  whimbrel suspend web --tag friday
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
}

impl Args {
    pub(crate) async fn run(self, context: &Context) -> Result<(), Failure> {
        let request = SuspendRequest { tag: self.tag };
        operation::perform(context, context.client.suspend(&self.name, &request)).await
    }
}
