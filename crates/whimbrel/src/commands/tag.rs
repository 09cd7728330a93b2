//! `whimbrel tag`.

use crate::{context::Context, failure::Failure};
use whimbrel_api::{CapsuleRef, TagRequest};
use whimbrel_core::RefName;

const EXAMPLES: &str = "\
Examples:
  whimbrel tag web golden
  whimbrel tag 3fa95c81 before-upgrade";

/// Give a capsule a name; a tag that exists moves
#[derive(Debug, clap::Args)]
#[command(after_help = EXAMPLES)]
pub(crate) struct Args {
    /// Tag, machine (its newest capsule) or id
    capsule: CapsuleRef,
    /// The name
    tag: RefName,
}

impl Args {
    pub(crate) async fn run(self, context: &Context) -> Result<(), Failure> {
        let capsule = context.client.tag(&self.tag, &TagRequest { capsule: self.capsule }).await?;
        context.output.result(&capsule, |capsule| format!("{}: {}\n", self.tag, capsule.id.short()))
    }
}
