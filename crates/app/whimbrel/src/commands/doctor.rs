//! `whimbrel doctor`: prints the checks of the host.

use crate::{
    context::Context,
    doctor::{Check, CheckStatus, checks},
    error::CliError,
    table::table,
};
use serde::Serialize;
use std::time::Duration;
use whimbrel_api::{MachineInfo, MachineState};

/// Time for the daemon to answer.
const PATIENCE: Duration = Duration::from_secs(5);

const EXAMPLES: &str = "\
Examples:
  whimbrel doctor
  whimbrel doctor --json | jq '.checks[] | select(.verdict != \"ok\")'";

/// Check that this host has what Whimbrel needs
///
/// Each failed check is shown with its remedy.
#[derive(Debug, clap::Args)]
#[command(after_help = EXAMPLES)]
pub(crate) struct Args {}

#[derive(Debug, Serialize)]
struct Report {
    healthy: bool,
    checks: Vec<Check>,
}

impl Args {
    pub(crate) fn run(self, context: &Context) -> Result<(), CliError> {
        let mut checks = checks(context.client.socket());
        checks.extend(records(context));
        let (failed, made) =
            (checks.iter().filter(|check| check.verdict == CheckStatus::Fail).count(), checks.len());
        context.output.result(&Report { healthy: failed == 0, checks }, text)?;
        if failed == 0 { Ok(()) } else { Err(CliError::Unhealthy { failed, checks: made }) }
    }
}

/// Checks the records of machines; none without a daemon that answers.
fn records(context: &Context) -> Option<Check> {
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().ok()?;
    let machines = async { tokio::time::timeout(PATIENCE, context.client.machines()).await };
    Some(unreadable(&runtime.block_on(machines).ok()?.ok()?))
}

fn unreadable(machines: &[MachineInfo]) -> Check {
    let reason = |machine: &MachineInfo| match &machine.state {
        MachineState::Unreadable { reason } => Some(format!("{}: {reason}", machine.name)),
        _ => None,
    };
    let unreadable: Vec<String> = machines.iter().filter_map(reason).collect();
    if unreadable.is_empty() {
        return Check::ok("machines", format!("{} with readable records", machines.len()));
    }
    let fix = "restore the machine.json of each and restart the daemon, or `whimbrel delete --unreadable NAME`; \
               until then nothing of it is touched, and no garbage is collected";
    Check::bad("machines", CheckStatus::Fail, unreadable.join("; "), fix)
}

fn text(report: &Report) -> String {
    let rows = report.checks.iter().map(|check| {
        let fix = check.fix.iter().filter(|_| check.verdict != CheckStatus::Ok);
        [check.verdict.to_string(), check.name.to_owned(), check.found.clone(), fix.cloned().collect()]
    });
    table(["", "CHECK", "FOUND", "FIX"], rows, "no checks")
}
