//! `whimbrel tag`: names a capsule.

use crate::{capsule_text, context::Context, error::CliError};
use whimbrel_api::{CapsuleRef, TagRequest};
use whimbrel_core::RefName;

const EXAMPLES: &str = "\
Examples:
  whimbrel tag web golden
  whimbrel tag 3fa95c81 before-upgrade";

/// Give a capsule a tag; an existing tag moves
///
/// `whimbrel log TAG --refs` lists the earlier capsules of a tag. Moving a tag is safe: no capsule depends on
/// its parents.
#[derive(Debug, clap::Args)]
#[command(after_help = EXAMPLES)]
pub(crate) struct Args {
    /// Tag, machine (its newest capsule) or id
    capsule: CapsuleRef,
    /// Tag for the capsule
    tag: RefName,
}

impl Args {
    pub(crate) async fn run(self, context: &Context) -> Result<(), CliError> {
        let capsule = context.client.tag(&self.tag, &TagRequest { capsule: self.capsule }).await?;
        if let Some(left) = &capsule.left {
            let named = format!("{} named {} until now", self.tag, left.capsule.short());
            if let Some(note) = capsule_text::left_behind(left) {
                context
                    .output
                    .remark(&format!("note: {named}: {note}; see `whimbrel outdated {}`", self.tag));
            }
        }
        context.output.result(&capsule, |named| format!("{}: {}\n", self.tag, named.capsule.id.short()))
    }
}
