//! `whimbrel trust`.

use crate::{context::Context, failure::Failure, output::Removed, table::table};
use clap::Subcommand;
use whimbrel_api::TrustEntry;
use whimbrel_core::HostName;

const EXAMPLES: &str = "\
Examples:
  whimbrel key                                 on beta: prints its key
  whimbrel trust add beta KEY 10.0.0.2:7400    here: trust it
  whimbrel trust ls
  whimbrel trust rm beta

Both hosts must trust each other before a machine can move between them.";

/// Say which other hosts this one trusts
#[derive(Debug, clap::Args)]
#[command(after_help = EXAMPLES)]
pub(crate) struct Args {
    #[command(subcommand)]
    action: Action,
}

/// What to do with the list.
#[derive(Debug, Subcommand)]
enum Action {
    /// Trust a host, or change its address
    Add {
        /// Its name, as it calls itself
        name: HostName,
        /// Its public key, as `whimbrel key` prints it there
        key: String,
        /// Where it listens; without it machines can come from there but not go there
        #[arg(value_name = "ADDRESS:PORT")]
        address: Option<String>,
    },
    /// List the hosts that are trusted
    Ls,
    /// Trust a host no longer
    Rm {
        /// Its name
        name: HostName,
    },
}

impl Args {
    pub(crate) async fn run(self, context: &Context) -> Result<(), Failure> {
        match self.action {
            Action::Add { name, key, address } => {
                let entry = context.client.trust(&TrustEntry { name, key, address }).await?;
                context.output.result(&entry, |entry| format!("{}: trusted\n", entry.name))
            }
            Action::Ls => {
                let all = context.client.trusted().await?;
                context.output.result(all.as_slice(), list)
            }
            Action::Rm { name } => {
                context.client.distrust(&name).await?;
                context.output.result(&Removed::one(&name), |removed| removed.sentence("trusted no longer"))
            }
        }
    }
}

fn list(entries: &[TrustEntry]) -> String {
    let rows = entries
        .iter()
        .map(|entry| [entry.name.to_string(), entry.address.clone().unwrap_or_default(), entry.key.clone()]);
    table(
        ["NAME", "ADDRESS", "KEY"],
        rows,
        "no host is trusted; add one with `whimbrel trust add NAME KEY ADDRESS`",
    )
}
