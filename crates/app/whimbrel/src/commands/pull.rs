//! `whimbrel pull`.

use crate::{argument_types::Located, context::Context, error::CliError, operation};
use whimbrel_api::PullRequest;
use whimbrel_core::RefName;

const EXAMPLES: &str = "\
Examples:
  whimbrel pull beta:web               the newest capsule of web, from beta
  whimbrel pull golden --tag base      from whichever trusted host has it
  whimbrel pull beta:golden --lazy     only what describes it; pages come when they are read
  whimbrel ls --host beta              what beta offers
  whimbrel pull pool:MANAGER/vms/web   what was pushed to the folder /vms of a pool

Only what this host lacks travels: pages of other capsules, and of files that `whimbrel cache` knows, are
taken from here. Cut off, it goes on where it was when it is called again.";

/// Bring a capsule here from another host or a pool
#[derive(Debug, clap::Args)]
#[command(after_help = EXAMPLES)]
pub(crate) struct Args {
    /// Tag, machine or id, as it is called there; with HOST: in front, from that host, with pool:MANAGER/
    /// from that pool
    #[arg(value_name = "[HOST:]CAPSULE")]
    capsule: Located,
    /// Tag for it here
    #[arg(long)]
    tag: Option<RefName>,
    /// Bring only what describes it
    #[arg(long)]
    lazy: bool,
}

impl Args {
    pub(crate) async fn run(self, context: &Context) -> Result<(), CliError> {
        let Located { host, pool, capsule } = self.capsule;
        let request = PullRequest { capsule, host, pool, tag: self.tag, lazy: self.lazy };
        operation::perform(context, context.client.pull(&request)).await
    }
}
