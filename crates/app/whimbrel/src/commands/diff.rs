//! `whimbrel diff`.

use crate::{capsule_text, context::Context, error::CliError};
use whimbrel_api::CapsuleRef;

const EXAMPLES: &str = "\
Examples:
  whimbrel diff before-upgrade web";

/// Show what differs between two capsules
///
/// Changed: content differs. Of that, new: content that the first holds nowhere at all.
#[derive(Debug, clap::Args)]
#[command(after_help = EXAMPLES)]
pub(crate) struct Args {
    /// The first: tag, machine (its newest capsule) or id
    a: CapsuleRef,
    /// The second
    b: CapsuleRef,
}

impl Args {
    pub(crate) async fn run(self, context: &Context) -> Result<(), CliError> {
        let diff = context.client.diff(&self.a, &self.b).await?;
        context.output.result(&diff, capsule_text::difference)
    }
}
