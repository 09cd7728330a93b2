//! `whimbrel clone`: creates several machines from one capsule.

use crate::{
    context::Context,
    error::CliError,
    first_boot::{self, FirstBoot},
    machine_text, operation,
};
use clap::ValueEnum;
use std::pin::pin;
use tokio::{
    select,
    signal::unix::{SignalKind, signal},
};
use whimbrel_api::{
    CapsuleRef, CloneNetwork, CloneRequest, CloudInit, DeriveRequest, GoldenMatch, MachineInfo, MatchRequest,
    PullRequest, ResumeMode, Terms,
};
use whimbrel_core::{HostName, MachineName};

const EXAMPLES: &str = "\
Examples:
  whimbrel clone golden --count 8 --prefix worker
  whimbrel clone before-upgrade --count 1 --network same
  whimbrel clone --match 'ram>=512M,os=debian' --count 2   the golden capsule that fits best
  whimbrel clone golden --count 4 --ssh-key ci.pub --set address=10.1.2.10/24 --set gateway=10.1.2.1

A golden capsule has a tag, and labels that describe it:
  whimbrel checkpoint web --tag web-base --label os=debian --label release=12

--match compares ram, disk, cpus and labels by = != >= <= > <. Capsules of this host are considered first, then \
those of all trusted hosts. Capsules with memory are preferred to disk-only ones, then small ones to large ones. \
From another host only the description is fetched at once; pages follow when the clones read them.";

/// Create several machines from one capsule
///
/// The clones are named PREFIX-1, PREFIX-2, … and share all pages that they do not change. Every clone gets a
/// new generation id. Host names, keys and addresses inside the guest are copied, so clones start without a
/// network unless --network same is given.
///
/// With an option of the first boot, the clones boot from the disks of the capsule instead, each a machine of
/// its own: cloud-init in the guest gives it its host name, the keys and the address. With several clones the
/// host name ends with the number of the clone, and addresses follow one another.
#[derive(Debug, clap::Args)]
#[command(after_help = EXAMPLES)]
pub(crate) struct Args {
    /// Tag, machine (its newest capsule) or id
    #[arg(required_unless_present = "matching", conflicts_with = "matching")]
    capsule: Option<CapsuleRef>,
    /// Clone the golden capsule that fits best, like 'ram>=512M,os=debian'
    #[arg(long = "match", value_name = "TERMS", id = "matching")]
    matching: Option<Terms>,
    /// Consider only golden capsules of this trusted host
    #[arg(long, value_name = "HOST", requires = "matching")]
    from: Option<HostName>,
    /// Number of clones
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u32).range(1..=1000))]
    count: u32,
    /// Prefix of their names [default: the name of the machine]
    #[arg(long, value_name = "NAME")]
    prefix: Option<MachineName>,
    /// Load all pages before the clones run
    #[arg(long)]
    full: bool,
    /// Network of the clones [default: isolated; same for clones that boot]
    #[arg(long, value_enum)]
    network: Option<NetworkArg>,
    #[command(flatten)]
    first_boot: FirstBoot,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
enum NetworkArg {
    /// Unplugged, because each guest has the address of the original
    Isolated,
    /// Bridges of the original, with new hardware addresses
    Same,
}

impl Args {
    pub(crate) async fn run(self, context: &Context) -> Result<(), CliError> {
        let first = self.first_boot.cloud_init()?;
        if first.is_some() && (self.full || self.network == Some(NetworkArg::Isolated)) {
            return Err(CliError::Usage {
                problem: "clones that boot have no memory to load, and the network of the original"
                    .to_owned(),
                hint: "leave out --full and --network, or the options of the first boot".to_owned(),
            });
        }
        let capsule = match self.matching {
            Some(terms) => golden(context, MatchRequest { terms, host: self.from }).await?,
            None => self.capsule.ok_or_else(|| CliError::Usage {
                problem: "no capsule is given".to_owned(),
                hint: "name a capsule, or use --match".to_owned(),
            })?,
        };
        if let Some(first) = &first {
            return boot(context, capsule, (self.prefix, self.count), first).await;
        }
        let request = CloneRequest {
            capsule,
            count: self.count,
            prefix: self.prefix,
            mode: if self.full { ResumeMode::Full } else { ResumeMode::Lazy },
            network: match self.network {
                Some(NetworkArg::Same) => CloneNetwork::Same,
                None | Some(NetworkArg::Isolated) => CloneNetwork::Isolated,
            },
        };
        operation::perform(context, context.client.clone_capsule(&request)).await
    }
}

/// Finds the golden capsule that fits best. The description of one on another host is fetched, its pages are
/// not.
async fn golden(context: &Context, request: MatchRequest) -> Result<CapsuleRef, CliError> {
    let GoldenMatch { host, name, capsule, attributes } = context.client.match_golden(&request).await?;
    let place = host.as_ref().map_or_else(|| "on this host".to_owned(), |host| format!("on {host}"));
    context
        .output
        .remark(&format!("{name} {place} fits: {} of memory, {} of disks", attributes.ram, attributes.disk));
    if host.is_some() {
        let pull = PullRequest { capsule: capsule.into(), host, pool: None, tag: None, lazy: true };
        operation::complete(context, context.client.pull(&pull)).await?;
    }
    Ok(capsule.into())
}

/// Boots clones from the disks of a capsule, each with settings of its own. If one fails, none is left.
async fn boot(
    context: &Context,
    capsule: CapsuleRef,
    (prefix, count): (Option<MachineName>, u32),
    first: &CloudInit,
) -> Result<(), CliError> {
    let prefix = match prefix {
        Some(prefix) => prefix,
        None => context.client.capsule(&capsule).await?.machine,
    };
    let request = |number| {
        let name = format!("{prefix}-{number}").parse().map_err(|error| CliError::Usage {
            problem: format!("the clones cannot be named so: {error}"),
            hint: "give a shorter --prefix".to_owned(),
        })?;
        let cloud_init = Some(first_boot::of_clone(first, number, count)?);
        Ok(DeriveRequest { cloud_init, ..DeriveRequest::new(capsule.clone(), name) })
    };
    let requests = (1..=count).map(request).collect::<Result<Vec<_>, CliError>>()?;
    let mut made: Vec<MachineInfo> = Vec::new();
    if let Err(error) = make_all(context, &requests, &mut made).await {
        if !matches!(error, CliError::Interrupted { .. }) {
            remove(context, &made).await;
        }
        return Err(error);
    }
    context.output.result(&made, |made| made.iter().map(machine_text::sentence).collect())
}

/// Makes the clones. Ctrl-C ends that when the one that is under way is there; a second one does not wait.
async fn make_all(
    context: &Context,
    requests: &[DeriveRequest],
    made: &mut Vec<MachineInfo>,
) -> Result<(), CliError> {
    let mut interrupts = signal(SignalKind::interrupt()).map_err(CliError::io("watch for Ctrl-C"))?;
    for request in requests {
        let mut derive = pin!(context.client.derive(request));
        let (outcome, cancelled) = select! {
            outcome = &mut derive => (outcome, false),
            _ = interrupts.recv() => {
                context.output.remark("removing the clones; Ctrl-C again exits and leaves them");
                select! {
                    outcome = &mut derive => (outcome, true),
                    _ = interrupts.recv() => return Err(CliError::Interrupted { operation: None }),
                }
            }
        };
        made.push(outcome?);
        if cancelled {
            return Err(CliError::Cancelled { left: "no clone is left".to_owned() });
        }
    }
    Ok(())
}

/// Removes the clones that were made before one failed.
async fn remove(context: &Context, made: &[MachineInfo]) {
    for name in made.iter().map(|machine| &machine.name) {
        if let Err(error) = context.discard(name).await {
            let hint = format!("`whimbrel stop {name} --kill; whimbrel delete {name}` removes it");
            context.output.remark(&format!("{name} was made before that, and stays: {error}\n{hint}"));
        }
    }
}
