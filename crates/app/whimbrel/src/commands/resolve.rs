//! `whimbrel resolve`: decides who has a machine whose other host is lost in the middle of a handover.

use crate::{context::Context, error::CliError, machine_text, output::Removed};
use whimbrel_api::{HandoverDecision, ResolveRequest};
use whimbrel_core::MachineName;

const EXAMPLES: &str = "\
Examples:
  whimbrel resolve web               what is known of the handover
  whimbrel resolve web --run-here    if the other host is off for good, or does not have the machine
  whimbrel resolve web --discard     if the other host has the machine";

/// Decide who has a machine whose other host was lost during a handover
///
/// A handover waits for the other host for ever, because only that host knows how it ended. Without an
/// option, the command says what is known here.
#[derive(Debug, clap::Args)]
#[command(after_help = EXAMPLES)]
pub(crate) struct Args {
    /// Name of the machine
    name: MachineName,
    /// Run it here; if the other host runs it too, there are two copies
    #[arg(long, conflicts_with = "discard")]
    run_here: bool,
    /// Delete the copy here; if the other host does not have the machine, it is lost
    #[arg(long)]
    discard: bool,
}

impl Args {
    pub(crate) async fn run(self, context: &Context) -> Result<(), CliError> {
        let decision = match (self.run_here, self.discard) {
            (true, _) => Some(HandoverDecision::RunHere),
            (_, true) => Some(HandoverDecision::Discard),
            (false, false) => None,
        };
        context.client.resolve(&self.name, &ResolveRequest { decision }).await?;
        if self.discard {
            return context.output.result(&Removed::one(&self.name), |removed| removed.sentence("discarded"));
        }
        let machine = context.client.machine(&self.name).await?;
        context.output.result(&machine, machine_text::sentence)
    }
}
