//! `whimbrel ls`.

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
  whimbrel ls --host beta                  what beta offers; fetch it with `whimbrel pull beta:NAME`
  whimbrel ls --json | jq -r '.[] | select(.machine == \"web\") | .id'";

/// List the capsules in the store
#[derive(Debug, clap::Args)]
#[command(after_help = EXAMPLES)]
pub(crate) struct Args {
    /// List those that a trusted host offers instead
    #[arg(long)]
    host: Option<HostName>,
}

impl Args {
    pub(crate) async fn run(self, context: &Context) -> Result<(), CliError> {
        match self.host {
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
            if capsule.whole { String::new() } else { "in part".to_owned() },
        ]
    });
    table(["NAME", "ID", "TAKEN", "MEMORY", "DISKS", ""], rows, "it offers nothing to this host")
}
