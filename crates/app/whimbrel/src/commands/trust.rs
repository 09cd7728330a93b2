//! `whimbrel trust`.

use crate::{context::Context, error::CliError, output::Removed, table::table};
use clap::Subcommand;
use whimbrel_api::{RefRights, TrustEntry};
use whimbrel_core::HostName;
use whimbrel_wire::{ParseAddressError, PeerAddress, RefPatterns};

const EXAMPLES: &str = "\
Examples:
  whimbrel key                                 on beta: prints its key
  whimbrel trust add beta KEY 10.0.0.2:7400    here: trust it
  whimbrel trust add beta --ssh root@beta      or go there with ssh, which needs no key
  whimbrel trust add beta KEY 10.0.0.2:7400 --read 'web,golden*' --write 'backup-*'
  whimbrel trust limit beta --read 'web,golden*'
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
        #[command(flatten)]
        lists: Lists,
    },
    /// Say anew which capsules a trusted host may read and write
    ///
    /// By the names they have here. Without a list it may use all; as soon as one is given, a list that is
    /// not given is empty.
    Limit {
        /// Its name
        name: HostName,
        #[command(flatten)]
        lists: Lists,
        /// Let it read and write all again
        #[arg(long, conflicts_with_all = ["read", "write"], required_unless_present_any = ["read", "write"])]
        all: bool,
    },
    /// List the hosts that are trusted
    Ls,
    /// Trust a host no longer
    Rm {
        /// Its name
        name: HostName,
    },
}

/// Which capsules a host may use.
#[derive(Debug, clap::Args)]
struct Lists {
    /// Tags and machines here that it may read, with * and ? (commas between them); all unless --read or
    /// --write is given
    #[arg(long, value_name = "PATTERNS")]
    read: Option<RefPatterns>,
    /// Those that it may write
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
            Action::Limit { name, lists, all: _ } => {
                let entry = context.client.limit(&name, &lists.rights()).await?;
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

/// What a host may read and write, in words.
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
        "no host is trusted; add one with `whimbrel trust add NAME KEY ADDRESS`",
    )
}
