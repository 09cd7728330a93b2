//! `whimbrel upgrade`: has the present version serve machines that processes of another one serve.

use crate::{context::Context, error::CliError, table::table};
use serde::Serialize;
use whimbrel_api::MachineInfo;
use whimbrel_core::MachineName;

const EXAMPLES: &str = "\
Examples:
  whimbrel upgrade web
  whimbrel upgrade --all";

/// Move running machines to processes of the version of this daemon
///
/// The process of a machine at rest stays when the daemon is replaced, and is of the version that started
/// it. Its guest stops for some milliseconds, twice: once now, and once when the machine has been at rest
/// for ten seconds and gets a new process. Operations on a machine do the same.
#[derive(Debug, clap::Args)]
#[command(after_help = EXAMPLES)]
pub(crate) struct Args {
    /// Names of the machines
    #[arg(required_unless_present = "all")]
    names: Vec<MachineName>,
    /// All machines whose processes are of another version
    #[arg(long, conflicts_with = "names")]
    all: bool,
}

/// A machine and its versions.
#[derive(Serialize)]
struct Upgraded {
    name: MachineName,
    /// Version of the process that served it; none if the daemon did.
    from: Option<String>,
    to: String,
}

impl Args {
    pub(crate) async fn run(self, context: &Context) -> Result<(), CliError> {
        let to = context.client.host().await?.version;
        let mut machines = Vec::new();
        for name in &self.names {
            machines.push(context.client.machine(name).await?);
        }
        if self.all {
            machines = context.client.machines().await?;
            machines.retain(|machine| version(machine).is_some_and(|version| version != to));
        }
        let mut upgraded = Vec::new();
        for machine in machines {
            context.client.upgrade(&machine.name).await?;
            let from = version(&machine);
            upgraded.push(Upgraded { name: machine.name, from, to: to.clone() });
        }
        context.output.result(upgraded.as_slice(), text)
    }
}

fn version(machine: &MachineInfo) -> Option<String> {
    machine.process.as_ref().map(|process| process.version.clone())
}

fn text(upgraded: &[Upgraded]) -> String {
    let rows = upgraded.iter().map(|one| {
        let from = one.from.clone().unwrap_or_else(|| format!("{} (the daemon)", one.to));
        [one.name.to_string(), from, one.to.clone()]
    });
    table(["NAME", "FROM", "TO"], rows, "every machine is served by this version")
}
