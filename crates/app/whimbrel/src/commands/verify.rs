//! `whimbrel verify`: checks the digests of everything in the store.

use crate::{context::Context, error::CliError, operation};

const EXAMPLES: &str = "\
Examples:
  whimbrel verify
  whimbrel verify --json | jq .result.damaged";

/// Read all stored data and check its digests
///
/// The exit code is 6 if something is damaged.
#[derive(Debug, clap::Args)]
#[command(after_help = EXAMPLES)]
pub(crate) struct Args {}

impl Args {
    pub(crate) async fn run(self, context: &Context) -> Result<(), CliError> {
        operation::perform(context, context.client.verify()).await
    }
}
