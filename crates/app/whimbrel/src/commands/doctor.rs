//! `whimbrel doctor`: prints the checks of the host, or the damaged files of its data directory.

use crate::{
    commands::host::DEFAULT_DATA,
    context::Context,
    doctor::{Check, CheckStatus, checks},
    error::CliError,
    host_bench,
    table::table,
};
use serde::Serialize;
use std::{path::PathBuf, time::Duration};
use whimbrel_api::{MachineInfo, MachineState};

/// Time for the daemon to answer.
const PATIENCE: Duration = Duration::from_secs(5);

const EXAMPLES: &str = "\
Examples:
  whimbrel doctor
  whimbrel doctor --data /var/lib/whimbrel
  whimbrel doctor --bench
  whimbrel doctor --json | jq '.checks[] | select(.verdict != \"ok\")'";

/// Check that this host has what Whimbrel needs
///
/// Each failed check is shown with its remedy. With --data, files of the data directory that are damaged,
/// missing or of a later version are shown, with what to do about each; nothing is changed. With --bench, two
/// daemons of their own measure starts, checkpoints, clones, moves and the store for a minute or two; the
/// daemon and the machines of this host stay as they are.
#[derive(Debug, clap::Args)]
#[command(after_help = EXAMPLES)]
pub(crate) struct Args {
    /// Data directory to examine instead of the host, also without a daemon [default: /var/lib/whimbrel]
    #[arg(long, value_name = "DIR", num_args = 0..=1, default_missing_value = DEFAULT_DATA)]
    data: Option<PathBuf>,
    /// Measure what this host can do, with files in a directory [default: /var/tmp]
    #[arg(long, value_name = "DIR", num_args = 0..=1, default_missing_value = "/var/tmp", conflicts_with = "data")]
    bench: Option<PathBuf>,
    /// Machines that are cloned at once; fewer if they would not fit into the memory
    #[arg(long, value_name = "COUNT", default_value_t = 100, requires = "bench")]
    clones: u32,
}

/// What an examination of a data directory found.
#[derive(Debug, Serialize)]
struct DataReport {
    data: PathBuf,
    damaged: Vec<DamagedFile>,
}

#[derive(Debug, Serialize)]
struct DamagedFile {
    file: PathBuf,
    what: &'static str,
    found: String,
    fix: String,
}

#[derive(Debug, Serialize)]
struct Report {
    healthy: bool,
    checks: Vec<Check>,
}

impl Args {
    pub(crate) fn run(self, context: &Context) -> Result<(), CliError> {
        if let Some(data) = self.data {
            return examine(context, data);
        }
        if let Some(folder) = self.bench {
            return host_bench::run(context, &folder, self.clones);
        }
        let mut checks = checks(context.client.socket());
        checks.extend(machines(context));
        let (failed, made) =
            (checks.iter().filter(|check| check.verdict == CheckStatus::Fail).count(), checks.len());
        context.output.result(&Report { healthy: failed == 0, checks }, text)?;
        if failed == 0 { Ok(()) } else { Err(CliError::Unhealthy { failed, checks: made }) }
    }
}

/// Prints what is damaged in a data directory.
fn examine(context: &Context, data: PathBuf) -> Result<(), CliError> {
    std::fs::read_dir(&data).map_err(|source| CliError::File { path: data.clone(), source })?;
    let of = |finding: whimbrel_daemon::DataFinding| {
        let whimbrel_daemon::DataFinding { path: file, what, reason: found, remedy: fix } = finding;
        DamagedFile { file, what, found, fix }
    };
    let damaged: Vec<_> = whimbrel_daemon::examine(&data).into_iter().map(of).collect();
    let report = DataReport { data, damaged };
    context.output.result(&report, data_text)?;
    match report.damaged.len() {
        0 => Ok(()),
        files => Err(CliError::DamagedFiles { files: files as u64 }),
    }
}

fn data_text(report: &DataReport) -> String {
    let cells = |one: &DamagedFile| {
        let file = one.file.strip_prefix(&report.data).unwrap_or(&one.file).display().to_string();
        [file, one.what.to_owned(), one.found.clone(), one.fix.clone()]
    };
    table(["FILE", "WHAT", "FOUND", "FIX"], report.damaged.iter().map(cells), "no damaged files")
}

/// Checks the machines; nothing without a daemon that answers.
fn machines(context: &Context) -> Vec<Check> {
    let Ok(runtime) = tokio::runtime::Builder::new_current_thread().enable_all().build() else {
        return Vec::new();
    };
    let found = async {
        let machines = tokio::time::timeout(PATIENCE, context.client.machines()).await.ok()?.ok()?;
        let host = tokio::time::timeout(PATIENCE, context.client.host()).await.ok()?.ok()?;
        Some((machines, host))
    };
    let Some((machines, host)) = runtime.block_on(found) else { return Vec::new() };
    vec![unreadable(&machines), versions(&machines, &host.version)]
}

/// Compares the versions of machine processes with that of the daemon.
fn versions(machines: &[MachineInfo], daemon: &str) -> Check {
    let served = |machine: &&MachineInfo| machine.process.is_some();
    let (processes, other) = (machines.iter().filter(served), |machine: &&MachineInfo| {
        machine.process.as_ref().is_some_and(|process| process.version != daemon)
    });
    let count = processes.clone().count();
    let others: Vec<String> = processes.filter(other).map(|machine| machine.name.to_string()).collect();
    if others.is_empty() {
        return Check::ok("processes", format!("{count} of machines at rest, all of version {daemon}"));
    }
    let found = format!("of another version than {daemon}: {}", others.join(", "));
    let fix = "`whimbrel upgrade --all`, which stops each guest for some milliseconds";
    Check::bad("processes", CheckStatus::Warn, found, fix)
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

#[cfg(test)]
mod tests {
    use super::*;

    fn machine(name: &str, state: &serde_json::Value) -> MachineInfo {
        let machine = serde_json::json!({
            "name": name, "state": state, "memory": 0, "cpus": 0, "accel": "tcg", "disks": [], "nics": [],
            "pid": null, "since_ms": 0, "origin": null, "operation": null,
        });
        serde_json::from_value(machine).expect("a machine")
    }

    #[test]
    fn unreadable_records_are_named_with_the_reason_and_what_to_do() {
        let good = machine("db", &serde_json::json!({"kind": "stopped"}));
        assert_eq!(unreadable(std::slice::from_ref(&good)).verdict, CheckStatus::Ok);
        let bad = machine("web", &serde_json::json!({"kind": "unreadable", "reason": "it is empty"}));
        let check = unreadable(&[good, bad]);
        assert_eq!((check.verdict, check.found.as_str()), (CheckStatus::Fail, "web: it is empty"));
        assert!(check.fix.is_some_and(|fix| fix.contains("whimbrel delete --unreadable")));
    }
}
