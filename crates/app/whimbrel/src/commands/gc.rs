//! `whimbrel gc`.

use crate::{context::Context, error::CliError, operation};

const EXAMPLES: &str = "\
Examples:
  whimbrel rm before-upgrade && whimbrel gc";

/// Free what no tag and no machine reaches any more
#[derive(Debug, clap::Args)]
#[command(after_help = EXAMPLES)]
pub(crate) struct Args {}

impl Args {
    pub(crate) async fn run(self, context: &Context) -> Result<(), CliError> {
        operation::perform(context, context.client.gc()).await
    }
}
