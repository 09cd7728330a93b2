//! `whimbrel resume`: creates a machine from a capsule and runs it.

use crate::{
    argument_types::{Located, NetworkArg},
    context::Context,
    error::CliError,
    operation,
};
use whimbrel_api::{ResumeMode, ResumeRequest};
use whimbrel_core::MachineName;

const EXAMPLES: &str = "\
Examples:
  whimbrel resume web                       the newest capsule of web
  whimbrel resume before-upgrade --name web2
  whimbrel resume 3fa95c81 --full
  whimbrel resume beta:web                  a capsule on beta; pages are fetched when touched
  whimbrel resume pool:MANAGER/vms/web      the same from a pool
  whimbrel resume s3://vault/vms/web        the same from a bucket
  whimbrel resume web@-5m --name before     web five minutes ago (see `protect --snapshots`)
  whimbrel resume web --network home        suspended on another host, web keeps its address there";

/// Create a machine from a capsule and run it
///
/// The machine runs at once and loads each page when it touches it, unless --full is given. A machine from a
/// disk-only capsule boots.
#[derive(Debug, clap::Args)]
#[command(after_help = EXAMPLES)]
pub(crate) struct Args {
    /// Tag, machine (its newest capsule), id, or NAME@-AGE (the newest epoch snapshot of at least that age);
    /// HOST:, pool:MANAGER/ or s3://BUCKET/ in front names another place
    #[arg(value_name = "[HOST:]CAPSULE")]
    capsule: Located,
    /// Name for the machine [default: the name that it had]
    #[arg(long)]
    name: Option<MachineName>,
    /// Run at once and load pages when they are touched (the default)
    #[arg(long)]
    lazy: bool,
    /// Load all pages before the machine runs
    #[arg(long, conflicts_with = "lazy")]
    full: bool,
    /// Load the remaining pages in the background while the machine runs
    #[arg(long, conflicts_with = "full")]
    fetch_rest: bool,
    #[arg(long, hide = true, conflicts_with = "full", value_parser = ["full"])]
    then: Option<String>,
    /// Resume a machine that was handed off to another host. Make sure that host never runs it, or there are
    /// two copies
    #[arg(long, alias = "take-back")]
    reclaim: bool,
    /// Network of the machine [default: local, or home if it used a tunnel when it was suspended]
    #[arg(long, value_enum)]
    network: Option<NetworkArg>,
}

impl Args {
    pub(crate) async fn run(self, context: &Context) -> Result<(), CliError> {
        let mode = if self.full { ResumeMode::Full } else { ResumeMode::Lazy };
        let (name, network, reclaim) = (self.name, self.network.map(Into::into), self.reclaim);
        let Located { host, pool, capsule } = self.capsule;
        let then_full = self.fetch_rest || self.then.is_some();
        let request = ResumeRequest { capsule, host, pool, reclaim, name, mode, then_full, network };
        operation::perform(context, context.client.resume(&request)).await
    }
}
