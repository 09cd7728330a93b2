//! `whimbrel cpu`: the CPU model that several hosts have in common.

use crate::{context::Context, error::CliError, table::table};
use clap::Subcommand;
use whimbrel_api::{CpuBaseline, CpuBaselineRequest};
use whimbrel_core::{Accel, HostName};

const EXAMPLES: &str = "\
Examples:
  whimbrel cpu baseline beta gamma        the model of this host, beta and gamma, and what each lacks
  whimbrel run web --disk root.img --memory 2G --cpu $(whimbrel -q cpu baseline beta gamma)
  whimbrel run web --disk root.img --memory 2G --cpu baseline      of all hosts that this one trusts";

/// Compare the processors of hosts
#[derive(Debug, clap::Args)]
#[command(after_help = EXAMPLES)]
pub(crate) struct Args {
    #[command(subcommand)]
    action: Action,
}

#[derive(Debug, Subcommand)]
enum Action {
    /// Print the CPU model that this host and others have in common
    ///
    /// A machine of that model moves between all of them. It has the features of instructions that QEMU
    /// gives to guests on each host, and none for nested guests.
    Baseline {
        /// Trusted hosts to compare with this one
        hosts: Vec<HostName>,
    },
}

impl Args {
    pub(crate) async fn run(self, context: &Context) -> Result<(), CliError> {
        let Action::Baseline { hosts } = self.action;
        let found = context.client.cpu_baseline(&CpuBaselineRequest { hosts }).await?;
        if !context.output.json {
            context.output.remark(describe(&found).trim_end());
        }
        context.output.result(&found, |found| format!("{}\n", found.model))
    }
}

fn describe(found: &CpuBaseline) -> String {
    let accel = |accel| if accel == Accel::Kvm { "kvm" } else { "tcg" };
    let rows = found.hosts.iter().map(|host| {
        let lacks = if host.lacks.is_empty() { "nothing".to_owned() } else { host.lacks.join(" ") };
        [host.name.to_string(), accel(host.accel).to_owned(), host.qemu_version.clone(), lacks]
    });
    table(["HOST", "ACCEL", "QEMU", "LACKS"], rows, "")
}
