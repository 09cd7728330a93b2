//! `whimbrel diff`: compares two capsules.

use crate::{capsule_text, context::Context, error::CliError};
use whimbrel_api::CapsuleRef;

const EXAMPLES: &str = "\
Examples:
  whimbrel diff before-upgrade web";

/// Show the differences between two capsules
///
/// CHANGED counts pages that differ. NEW counts those whose content the first capsule does not have anywhere.
#[derive(Debug, clap::Args)]
#[command(after_help = EXAMPLES)]
pub(crate) struct Args {
    /// First capsule: tag, machine (its newest capsule) or id
    a: CapsuleRef,
    /// Second capsule, named in the same way
    b: CapsuleRef,
}

impl Args {
    pub(crate) async fn run(self, context: &Context) -> Result<(), CliError> {
        let diff = context.client.diff(&self.a, &self.b).await?;
        context.output.result(&diff, capsule_text::difference)
    }
}
