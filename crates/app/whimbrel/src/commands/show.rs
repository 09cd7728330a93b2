//! `whimbrel show`: prints everything about a capsule.

use crate::{capsule_text, context::Context, error::CliError};
use whimbrel_api::CapsuleRef;

const EXAMPLES: &str = "\
Examples:
  whimbrel show before-upgrade
  whimbrel show 3fa95c81 --json | jq .images";

/// Show all details of a capsule
#[derive(Debug, clap::Args)]
#[command(after_help = EXAMPLES)]
pub(crate) struct Args {
    /// Tag, machine (its newest capsule) or id
    capsule: CapsuleRef,
}

impl Args {
    pub(crate) async fn run(self, context: &Context) -> Result<(), CliError> {
        let capsule = context.client.capsule(&self.capsule).await?;
        context.output.result(&capsule, capsule_text::page)
    }
}
