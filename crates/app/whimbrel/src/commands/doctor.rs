//! `whimbrel doctor`: prints the checks of the host.

use crate::{
    context::Context,
    doctor::{Check, CheckStatus, checks},
    error::CliError,
    table::table,
};
use serde::Serialize;

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
        let checks = checks(context.client.socket());
        let (failed, made) =
            (checks.iter().filter(|check| check.verdict == CheckStatus::Fail).count(), checks.len());
        context.output.result(&Report { healthy: failed == 0, checks }, text)?;
        if failed == 0 { Ok(()) } else { Err(CliError::Unhealthy { failed, checks: made }) }
    }
}

fn text(report: &Report) -> String {
    let rows = report.checks.iter().map(|check| {
        let fix = check.fix.iter().filter(|_| check.verdict != CheckStatus::Ok);
        [check.verdict.to_string(), check.name.to_owned(), check.found.clone(), fix.cloned().collect()]
    });
    table(["", "CHECK", "FOUND", "FIX"], rows, "no checks")
}
