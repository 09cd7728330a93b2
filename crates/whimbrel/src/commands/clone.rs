//! `whimbrel clone`.

use crate::{context::Context, failure::Failure, operation};
use clap::ValueEnum;
use whimbrel_api::{CapsuleRef, CloneNetwork, CloneRequest, ResumeMode};
use whimbrel_core::MachineName;

const EXAMPLES: &str = "\
Examples:
  whimbrel clone golden --count 8 --prefix worker
  whimbrel clone before-upgrade --count 1 --network same";

/// Make several machines from one capsule
///
/// They are called PREFIX-1, PREFIX-2, … and share all pages they do not change. Every one gets a new generation
/// id; what identity the guest keeps elsewhere is the guest's business, so their network is isolated unless asked.
#[derive(Debug, clap::Args)]
#[command(after_help = EXAMPLES)]
pub(crate) struct Args {
    /// Tag, machine (its newest capsule) or id
    capsule: CapsuleRef,
    /// How many
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u32).range(1..=1000))]
    count: u32,
    /// Begin of their names; the name of the machine unless given
    #[arg(long, value_name = "NAME")]
    prefix: Option<MachineName>,
    /// Read all pages before they run
    #[arg(long)]
    full: bool,
    /// What their network ports join
    #[arg(long, value_enum, default_value = "isolated")]
    network: NetworkArg,
}

/// The two of them, with help.
#[derive(Debug, Clone, Copy, ValueEnum)]
enum NetworkArg {
    /// Nothing: each still believes it has the address of the original
    Isolated,
    /// The same bridges, with new hardware addresses
    Same,
}

impl Args {
    pub(crate) async fn run(self, context: &Context) -> Result<(), Failure> {
        let request = CloneRequest {
            capsule: self.capsule,
            count: self.count,
            prefix: self.prefix,
            mode: if self.full { ResumeMode::Full } else { ResumeMode::Lazy },
            network: match self.network {
                NetworkArg::Isolated => CloneNetwork::Isolated,
                NetworkArg::Same => CloneNetwork::Same,
            },
        };
        operation::perform(context, context.client.clone_capsule(&request)).await
    }
}
