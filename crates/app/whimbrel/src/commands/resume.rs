//! `whimbrel resume`.

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
  whimbrel resume beta:web                  from beta: pages come from there when they are touched
  whimbrel resume pool:MANAGER/vms/web      from a checkpoint pool, in the same way
  whimbrel resume web@-5m --name before     as it was kept five minutes ago, if it was protected with --keep
  whimbrel resume web --network home        suspended elsewhere, it keeps its address there";

/// Make a machine from a capsule and let it run
///
/// It runs at once and reads its pages when it touches them, unless --full is given. A capsule without memory
/// boots.
#[derive(Debug, clap::Args)]
#[command(after_help = EXAMPLES)]
pub(crate) struct Args {
    /// Tag, machine (its newest capsule), NAME@-AGE (one kept under protection) or id; with HOST: or
    /// pool:MANAGER/ in front, one that lies there
    #[arg(value_name = "[HOST:]CAPSULE")]
    capsule: Located,
    /// Name for the machine; the one it had unless given
    #[arg(long)]
    name: Option<MachineName>,
    /// Run at once, read pages when they are touched (the default)
    #[arg(long)]
    lazy: bool,
    /// Read all pages before it runs
    #[arg(long, conflicts_with = "lazy")]
    full: bool,
    /// What happens after a lazy start: `full` reads the rest in the background
    #[arg(long, conflicts_with = "full", value_enum, value_name = "WHAT")]
    then: Option<ThenArg>,
    /// Resume a machine that was pushed to another host, which must not run it any more
    #[arg(long)]
    take_back: bool,
    /// Where its network is; local unless given, or unless it was away when it was suspended here
    #[arg(long, value_enum)]
    network: Option<NetworkArg>,
}

/// What happens after a lazy start.
#[derive(Debug, Clone, Copy, PartialEq, Eq, clap::ValueEnum)]
enum ThenArg {
    /// Read the rest in the background
    Full,
}

impl Args {
    pub(crate) async fn run(self, context: &Context) -> Result<(), CliError> {
        let mode = if self.full { ResumeMode::Full } else { ResumeMode::Lazy };
        let (name, network) = (self.name, self.network.map(Into::into));
        let Located { host, pool, capsule } = self.capsule;
        let (then_full, take_back) = (self.then.is_some(), self.take_back);
        let request = ResumeRequest { capsule, host, pool, take_back, name, mode, then_full, network };
        operation::perform(context, context.client.resume(&request)).await
    }
}
