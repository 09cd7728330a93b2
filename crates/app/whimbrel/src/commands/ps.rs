//! `whimbrel ps`: lists the machines of the host.

use crate::{context::Context, error::CliError, machine_text};

const EXAMPLES: &str = "\
Examples:
  whimbrel ps
  whimbrel ps --json | jq -r '.[].name'";

/// List the machines of this host
#[derive(Debug, clap::Args)]
#[command(after_help = EXAMPLES)]
pub(crate) struct Args {}

impl Args {
    pub(crate) async fn run(self, context: &Context) -> Result<(), CliError> {
        let all = context.client.machines().await?;
        context.output.result(all.as_slice(), machine_text::list)
    }
}
