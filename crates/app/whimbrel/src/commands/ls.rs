//! `whimbrel ls`: lists capsules of this host or of another one.

use crate::{
    capsule_text,
    context::Context,
    error::CliError,
    table::{ago, table},
};
use whimbrel_api::RemoteCapsule;
use whimbrel_core::HostName;

const EXAMPLES: &str = "\
Examples:
  whimbrel ls
  whimbrel ls --from beta    capsules that beta offers; `whimbrel pull beta:NAME` fetches one
  whimbrel ls --json | jq -r '.[] | select(.machine == \"web\") | .id'";

/// List the capsules in the store
#[derive(Debug, clap::Args)]
#[command(after_help = EXAMPLES)]
pub(crate) struct Args {
    /// List the capsules that a trusted host offers
    #[arg(long, value_name = "HOST")]
    from: Option<HostName>,
}

impl Args {
    pub(crate) async fn run(self, context: &Context) -> Result<(), CliError> {
        match self.from {
            Some(host) => {
                let all = context.client.remote(&host).await?;
                context.output.result(all.as_slice(), remote)
            }
            None => {
                let all = context.client.capsules().await?;
                context.output.result(all.as_slice(), capsule_text::list)
            }
        }
    }
}

fn remote(capsules: &[RemoteCapsule]) -> String {
    let rows = capsules.iter().map(|capsule| {
        [
            capsule.machine.as_ref().map_or(capsule.name.to_string(), ToString::to_string),
            capsule.id.short(),
            ago(capsule.time_ms),
            capsule.memory.to_string(),
            capsule.disks.to_string(),
            if capsule.whole { String::new() } else { "partial".to_owned() },
        ]
    });
    table(["NAME", "ID", "AGE", "MEMORY", "DISKS", ""], rows, "the host offers no capsules to this host")
}
