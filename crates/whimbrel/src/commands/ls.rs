//! `whimbrel ls`.

use crate::{capsules, context::Context, failure::Failure};

const EXAMPLES: &str = "\
Examples:
  whimbrel ls
  whimbrel ls --json | jq -r '.[] | select(.machine == \"web\") | .id'";

/// List the capsules in the store
#[derive(Debug, clap::Args)]
#[command(after_help = EXAMPLES)]
pub(crate) struct Args {}

impl Args {
    pub(crate) async fn run(self, context: &Context) -> Result<(), Failure> {
        let all = context.client.capsules().await?;
        context.output.result(all.as_slice(), capsules::list)
    }
}
