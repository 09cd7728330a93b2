//! `whimbrel trust`.

use crate::{context::Context, failure::Failure, output::Removed, table::table};
use clap::Subcommand;
use whimbrel_api::TrustEntry;
use whimbrel_core::HostName;
use whimbrel_wire::{ParseAddressError, PeerAddress};

const EXAMPLES: &str = "\
Examples:
  whimbrel key                                 on beta: prints its key
  whimbrel trust add beta KEY 10.0.0.2:7400    here: trust it
  whimbrel trust add beta --ssh root@beta      or go there with ssh, which needs no key
  whimbrel trust ls
  whimbrel trust rm beta

Both hosts must trust each other's key before a machine can move between them. With --ssh only the
one that sends needs an entry; its daemon's user must get in without a password.";

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
    /// Trust a host
    Add {
        /// Its name, as it calls itself
        name: HostName,
        /// Its public key, as `whimbrel key` prints it there; with --ssh it may be left out
        #[arg(required_unless_present = "ssh")]
        key: Option<String>,
        /// Where it listens; without it machines can come from there but not go there
        #[arg(value_name = "ADDRESS:PORT")]
        address: Option<String>,
        /// Go there with ssh: USER@HOST, a name from ssh's configuration, or ssh://USER@HOST:PORT
        #[arg(long, value_name = "DESTINATION", conflicts_with = "address", value_parser = by_ssh)]
        ssh: Option<String>,
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
            Action::Add { name, key, address, ssh } => {
                let address = address.or(ssh);
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

/// The address that stands for an ssh destination.
fn by_ssh(destination: &str) -> Result<String, ParseAddressError> {
    PeerAddress::ssh(destination).map(String::from)
}

fn list(entries: &[TrustEntry]) -> String {
    let rows = entries.iter().map(|entry| {
        [
            entry.name.to_string(),
            entry.address.clone().unwrap_or_default(),
            entry.key.clone().unwrap_or_default(),
        ]
    });
    table(
        ["NAME", "ADDRESS", "KEY"],
        rows,
        "no host is trusted; add one with `whimbrel trust add NAME KEY ADDRESS`",
    )
}
