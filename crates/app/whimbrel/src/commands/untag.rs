//! `whimbrel untag`: removes names of capsules.

use crate::{capsule_text, context::Context, error::CliError, output::Removed};
use whimbrel_core::RefName;

const EXAMPLES: &str = "\
Examples:
  whimbrel untag before-upgrade
  whimbrel untag monday tuesday && whimbrel gc";

/// Remove names of capsules
///
/// `whimbrel gc` deletes capsules that have no name left. Children of such a capsule, and machines that are
/// based on it, stay complete.
#[derive(Debug, clap::Args)]
#[command(after_help = EXAMPLES)]
pub(crate) struct Args {
    /// Tag, or machine (the name of its newest capsule)
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

/// Arguments of the old name `rm`. People try it to delete a machine, so names of machines are refused.
#[derive(Debug, clap::Args)]
pub(crate) struct OldArgs {
    #[command(flatten)]
    args: Args,
}

impl OldArgs {
    pub(crate) async fn run(self, context: &Context) -> Result<(), CliError> {
        let machines = context.client.machines().await?;
        let is_machine = |name: &&RefName| machines.iter().any(|one| one.name.as_str() == name.as_str());
        match self.args.names.iter().find(is_machine) {
            Some(name) => Err(CliError::Usage {
                problem: format!("{name} is a machine"),
                hint: format!(
                    "`whimbrel delete {name}` deletes a machine, `whimbrel untag {name}` a name of a capsule"
                ),
            }),
            None => self.args.run(context).await,
        }
    }
}
