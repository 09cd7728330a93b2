//! `whimbrel rm`.

use crate::{capsule_text, context::Context, error::CliError, output::Removed};
use whimbrel_core::RefName;

const EXAMPLES: &str = "\
Examples:
  whimbrel rm before-upgrade
  whimbrel rm monday tuesday && whimbrel gc";

/// Remove names of capsules
///
/// A capsule that no name leads to any more is freed by the next `whimbrel gc`, not before. Its children, and
/// machines that run on it, are whole without it.
#[derive(Debug, clap::Args)]
#[command(after_help = EXAMPLES)]
pub(crate) struct Args {
    /// Tags, or machines that are gone
    #[arg(required = true, value_name = "NAME")]
    names: Vec<RefName>,
}

impl Args {
    pub(crate) async fn run(self, context: &Context) -> Result<(), CliError> {
        for name in &self.names {
            let left = context.client.remove(name).await?;
            if let Some(note) = capsule_text::left_behind(&left) {
                context.output.remark(&format!("note: {name} named {}: {note}", left.capsule.short()));
            }
        }
        context.output.result(&Removed::many(&self.names), |removed| removed.sentence("removed"))
    }
}
