//! `whimbrel pause`.

use crate::{context::Context, failure::Failure, machines};
use whimbrel_core::MachineName;

const EXAMPLES: &str = "\
Examples:
  whimbrel pause web
  whimbrel unpause web";

/// Stop the CPUs of a machine; its state stays in memory
#[derive(Debug, clap::Args)]
#[command(after_help = EXAMPLES)]
pub(crate) struct Args {
    /// The machine
    name: MachineName,
}

impl Args {
    pub(crate) async fn run(self, context: &Context) -> Result<(), Failure> {
        let machine = context.client.pause(&self.name).await?;
        context.output.result(&machine, machines::sentence)
    }
}
