//! `whimbrel resume`.

use crate::{context::Context, failure::Failure, operation};
use whimbrel_api::{CapsuleRef, ResumeMode, ResumeRequest};
use whimbrel_core::MachineName;

const EXAMPLES: &str = "\
Examples:
  whimbrel resume web                       the newest capsule of web
  whimbrel resume before-upgrade --name web2
  whimbrel resume 3fa95c81 --full";

/// Make a machine from a capsule and let it run
///
/// It runs at once and reads its pages when it touches them, unless --full is given. A capsule without memory
/// boots.
#[derive(Debug, clap::Args)]
#[command(after_help = EXAMPLES)]
pub(crate) struct Args {
    /// Tag, machine (its newest capsule) or id
    capsule: CapsuleRef,
    /// Name for the machine; the one it had unless given
    #[arg(long)]
    name: Option<MachineName>,
    /// Run at once, read pages when they are touched (the default)
    #[arg(long)]
    lazy: bool,
    /// Read all pages before it runs
    #[arg(long, conflicts_with = "lazy")]
    full: bool,
    /// After a lazy start read the rest in the background
    #[arg(long, conflicts_with = "full")]
    then_full: bool,
}

impl Args {
    pub(crate) async fn run(self, context: &Context) -> Result<(), Failure> {
        let mode = if self.full { ResumeMode::Full } else { ResumeMode::Lazy };
        let request =
            ResumeRequest { capsule: self.capsule, name: self.name, mode, then_full: self.then_full };
        operation::perform(context, context.client.resume(&request)).await
    }
}
