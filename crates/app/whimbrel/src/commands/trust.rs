//! `whimbrel trust`: manages the trust list of this host.

use crate::{context::Context, error::CliError, output::Removed, table::table};
use clap::Subcommand;
use whimbrel_api::{RefRights, TrustEntry};
use whimbrel_core::HostName;
use whimbrel_wire::{ParseAddressError, PeerAddress, RefPatterns};

const EXAMPLES: &str = "\
Examples:
  whimbrel key                                 on beta: prints its key
  whimbrel trust add beta KEY 10.0.0.2:7400    on this host: trusts beta
  whimbrel trust add beta --ssh root@beta      or connect over ssh, which needs no key
  whimbrel trust add beta KEY 10.0.0.2:7400 --read 'web,golden*' --write 'backup-*'
  whimbrel trust set beta --read 'web,golden*'
  whimbrel trust ls
  whimbrel trust rm beta

Both hosts must trust each other's key before a machine can move between them. With --ssh only the sending host \
needs an entry; ssh must work without a password for the user of its daemon.";

/// Manage the list of trusted hosts
#[derive(Debug, clap::Args)]
#[command(after_help = EXAMPLES)]
pub(crate) struct Args {
    #[command(subcommand)]
    action: Action,
}

#[derive(Debug, Subcommand)]
enum Action {
    /// Add a host to the list
    Add {
        /// Name of the host, as in its own `--name`
        name: HostName,
        /// Public key of the host, as `whimbrel key` prints it there; optional with --ssh
        #[arg(required_unless_present = "ssh")]
        key: Option<String>,
        /// Address of its daemon; without one, machines can arrive from that host but not be sent to it
        #[arg(value_name = "ADDRESS:PORT")]
        address: Option<String>,
        /// Connect over ssh: USER@HOST, a name from the ssh configuration, or ssh://USER@HOST:PORT
        #[arg(long, value_name = "DESTINATION", conflicts_with = "address", value_parser = by_ssh)]
        ssh: Option<String>,
        #[command(flatten)]
        lists: Lists,
    },
    /// Set which capsules a host may read and write
    ///
    /// Capsules are named as on this host. Both lists are set; an omitted list is empty.
    #[command(alias = "limit")]
    Set {
        /// Name of the host
        name: HostName,
        #[command(flatten)]
        lists: Lists,
        /// Remove the limits, so that the host may read and write all capsules
        #[arg(long, conflicts_with_all = ["read", "write"], required_unless_present_any = ["read", "write"])]
        all: bool,
    },
    /// List the trusted hosts
    Ls,
    /// Remove a host from the list
    Rm {
        /// Name of the host
        name: HostName,
    },
}

/// Capsules of this host that a trusted host may use.
#[derive(Debug, clap::Args)]
struct Lists {
    /// Tags and machines that the host may read, with * and ?, separated by commas [default: all, or none if
    /// --write is given]
    #[arg(long, value_name = "PATTERNS")]
    read: Option<RefPatterns>,
    /// Tags and machines that the host may write [default: all, or none if --read is given]
    #[arg(long, value_name = "PATTERNS")]
    write: Option<RefPatterns>,
}

impl Lists {
    fn rights(self) -> RefRights {
        let texts = |list: RefPatterns| list.as_slice().iter().map(ToString::to_string).collect();
        RefRights { read: self.read.map(texts), write: self.write.map(texts) }
    }
}

impl Args {
    pub(crate) async fn run(self, context: &Context) -> Result<(), CliError> {
        match self.action {
            Action::Add { name, key, address, ssh, lists } => {
                let (address, RefRights { read, write }) = (address.or(ssh), lists.rights());
                let entry = context.client.trust(&TrustEntry { name, key, address, read, write }).await?;
                context.output.result(&entry, |entry| format!("{}: trusted\n", entry.name))
            }
            Action::Set { name, lists, all: _ } => {
                let entry = context.client.set_rights(&name, &lists.rights()).await?;
                context.output.result(&entry, |entry| {
                    let [read, write] = allowed(entry);
                    format!("{}: reads {read}, writes {write}\n", entry.name)
                })
            }
            Action::Ls => {
                let all = context.client.trusted().await?;
                context.output.result(all.as_slice(), list)
            }
            Action::Rm { name } => {
                context.client.untrust(&name).await?;
                context.output.result(&Removed::one(&name), |removed| removed.sentence("no longer trusted"))
            }
        }
    }
}

/// Address of the trust list that stands for an ssh destination.
fn by_ssh(destination: &str) -> Result<String, ParseAddressError> {
    PeerAddress::ssh(destination).map(|address| address.to_string())
}

/// Formats the patterns of what a host may read and write.
fn allowed(entry: &TrustEntry) -> [String; 2] {
    let limited = entry.read.is_some() || entry.write.is_some();
    [&entry.read, &entry.write].map(|list| match list {
        None if !limited => "all".to_owned(),
        Some(patterns) if !patterns.is_empty() => patterns.join(","),
        _ => "none".to_owned(),
    })
}

fn list(entries: &[TrustEntry]) -> String {
    let rows = entries.iter().map(|entry| {
        let [read, write] = allowed(entry);
        [
            entry.name.to_string(),
            entry.address.clone().unwrap_or_default(),
            read,
            write,
            entry.key.clone().unwrap_or_default(),
        ]
    });
    table(
        ["NAME", "ADDRESS", "READS", "WRITES", "KEY"],
        rows,
        "no trusted hosts; add one with `whimbrel trust add NAME KEY ADDRESS`",
    )
}
