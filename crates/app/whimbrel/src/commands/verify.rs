//! `whimbrel verify`.

use crate::{context::Context, error::CliError, operation};

const EXAMPLES: &str = "\
Examples:
  whimbrel verify
  whimbrel verify --json | jq .result.damaged";

/// Read everything in the store and check it; exits with 6 if something is damaged
#[derive(Debug, clap::Args)]
#[command(after_help = EXAMPLES)]
pub(crate) struct Args {}

impl Args {
    pub(crate) async fn run(self, context: &Context) -> Result<(), CliError> {
        operation::perform(context, context.client.verify()).await
    }
}
