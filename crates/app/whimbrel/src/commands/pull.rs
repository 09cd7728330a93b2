//! `whimbrel pull`: fetches a capsule from another host or from a pool.

use crate::{argument_types::Located, context::Context, error::CliError, operation};
use whimbrel_api::PullRequest;
use whimbrel_core::RefName;

const EXAMPLES: &str = "\
Examples:
  whimbrel pull beta:web               the newest capsule of web, from beta
  whimbrel pull golden --tag base      from any trusted host with golden
  whimbrel pull beta:golden --lazy     only its description; pages are fetched when they are read
  whimbrel ls --host beta              capsules that beta offers
  whimbrel pull pool:MANAGER/vms/web   a capsule in the folder /vms of a pool

Only pages that this host does not have are sent. It looks for pages in its store and in the files that were \
added with `whimbrel cache add`. If the connection breaks, call the command again to continue.";

/// Fetch a capsule from another host or from a pool
#[derive(Debug, clap::Args)]
#[command(after_help = EXAMPLES)]
pub(crate) struct Args {
    /// Tag, machine or id on the other side; HOST: or pool:MANAGER/ in front names that side [default: any
    /// trusted host]
    #[arg(value_name = "[HOST:]CAPSULE")]
    capsule: Located,
    /// Tag for the capsule on this host
    #[arg(long)]
    tag: Option<RefName>,
    /// Fetch only the description; pages are fetched when they are read
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
