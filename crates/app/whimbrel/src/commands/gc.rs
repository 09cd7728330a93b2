//! `whimbrel gc`: deletes what is not used any more from the store.

use crate::{context::Context, error::CliError, operation};

const EXAMPLES: &str = "\
Examples:
  whimbrel untag before-upgrade && whimbrel gc";

/// Delete stored data that no tag and no machine uses
#[derive(Debug, clap::Args)]
#[command(after_help = EXAMPLES)]
pub(crate) struct Args {}

impl Args {
    pub(crate) async fn run(self, context: &Context) -> Result<(), CliError> {
        operation::perform(context, context.client.gc()).await
    }
}
