//! `whimbrel clone`.

use crate::{context::Context, error::CliError, operation};
use clap::ValueEnum;
use whimbrel_api::{
    CapsuleRef, CloneNetwork, CloneRequest, GoldenMatch, MatchRequest, PullRequest, ResumeMode, Terms,
};
use whimbrel_core::{HostName, MachineName};

const EXAMPLES: &str = "\
Examples:
  whimbrel clone golden --count 8 --prefix worker
  whimbrel clone before-upgrade --count 1 --network same
  whimbrel clone --match 'ram>=512M,os=debian' --count 2   whichever golden machine fits best

A golden machine is a capsule with a tag, on this host or a trusted one, and with labels that say what it is:
`whimbrel checkpoint web --tag web-base --label os=debian --label release=12`. Attributes for --match are ram, disk, cpus and every
label, compared by = != >= <= > <. What is here goes first; else all trusted hosts are asked. What resumes goes before what
boots, then what takes least. From another host only what describes it comes; pages come when the clones read them.";

/// Make several machines from one capsule
///
/// They are called PREFIX-1, PREFIX-2, … and share all pages they do not change. Every one gets a new
/// generation id; what identity the guest keeps elsewhere is the guest's business, so their network is
/// isolated unless asked.
#[derive(Debug, clap::Args)]
#[command(after_help = EXAMPLES)]
pub(crate) struct Args {
    /// Tag, machine (its newest capsule) or id
    #[arg(required_unless_present = "matching", conflicts_with = "matching")]
    capsule: Option<CapsuleRef>,
    /// The golden machine that fits best instead, like 'ram>=512M,os=debian'
    #[arg(long = "match", value_name = "TERMS", id = "matching")]
    matching: Option<Terms>,
    /// Only one of this trusted host
    #[arg(long, value_name = "HOST", requires = "matching")]
    from: Option<HostName>,
    /// How many
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u32).range(1..=1000))]
    count: u32,
    /// Begin of their names; the name of the machine unless given
    #[arg(long, value_name = "NAME")]
    prefix: Option<MachineName>,
    /// Read all pages before they run
    #[arg(long)]
    full: bool,
    /// What their network ports join
    #[arg(long, value_enum, default_value = "isolated")]
    network: NetworkArg,
}

/// The two of them, with help.
#[derive(Debug, Clone, Copy, ValueEnum)]
enum NetworkArg {
    /// Nothing: each still believes it has the address of the original
    Isolated,
    /// The same bridges, with new hardware addresses
    Same,
}

impl Args {
    pub(crate) async fn run(self, context: &Context) -> Result<(), CliError> {
        let capsule = match self.matching {
            Some(terms) => golden(context, MatchRequest { terms, host: self.from }).await?,
            None => self.capsule.ok_or_else(|| CliError::Usage {
                problem: "which capsule?".to_owned(),
                hint: "name one, or say with --match what it must be".to_owned(),
            })?,
        };
        let request = CloneRequest {
            capsule,
            count: self.count,
            prefix: self.prefix,
            mode: if self.full { ResumeMode::Full } else { ResumeMode::Lazy },
            network: match self.network {
                NetworkArg::Isolated => CloneNetwork::Isolated,
                NetworkArg::Same => CloneNetwork::Same,
            },
        };
        operation::perform(context, context.client.clone_capsule(&request)).await
    }
}

/// The golden machine that fits best; one that lies elsewhere is known here from now on, and its pages stay
/// there.
async fn golden(context: &Context, request: MatchRequest) -> Result<CapsuleRef, CliError> {
    let GoldenMatch { host, name, capsule, attributes } = context.client.match_golden(&request).await?;
    let place = host.as_ref().map_or_else(|| "here".to_owned(), |host| format!("on {host}"));
    context
        .output
        .remark(&format!("{name} {place} fits: {} of memory, {} of disks", attributes.ram, attributes.disk));
    if host.is_some() {
        let pull = PullRequest { capsule: capsule.into(), host, pool: None, tag: None, lazy: true };
        operation::complete(context, context.client.pull(&pull)).await?;
    }
    Ok(capsule.into())
}
