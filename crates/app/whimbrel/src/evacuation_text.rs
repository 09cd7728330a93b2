//! Text about an evacuation: the outcome of each machine.

use crate::{
    machine_text,
    table::{count, milliseconds, table},
};
use whimbrel_api::{EvacuateReport, EvacuatedMachine, MoveOutcome};

/// Formats a table of machines, and whether the host is empty.
pub(crate) fn describe(report: &EvacuateReport) -> String {
    let rows = report.machines.iter().map(|machine| {
        [
            machine.name.to_string(),
            machine.memory.to_string(),
            machine.dirtied_pages.map(|pages| count(pages, "page")).unwrap_or_default(),
            machine.host.as_ref().map(ToString::to_string).unwrap_or_default(),
            outcome(&machine.outcome),
        ]
    });
    let table = table(["NAME", "MEMORY", "WRITTEN", "TO", "OUTCOME"], rows, "no machines");
    let end = match (report.empty, report.dry_run, report.withheld) {
        (true, false, _) => "no machine runs there any more\n".to_owned(),
        (true, true, _) => "no machine would run there any more\n".to_owned(),
        (false, _, 0) => String::new(),
        (false, _, withheld) => {
            let machines = count(u64::from(withheld), "machine");
            format!("{machines} more run there; this host may not move them\n")
        }
    };
    table + &end
}

/// Number of machines that still run on the host.
pub(crate) fn stay(report: &EvacuateReport) -> usize {
    let gone = |machine: &&EvacuatedMachine| {
        matches!(machine.outcome, MoveOutcome::Moved { .. } | MoveOutcome::Planned | MoveOutcome::Left { .. })
    };
    report.machines.iter().filter(|machine| !gone(machine)).count() + report.withheld as usize
}

fn outcome(outcome: &MoveOutcome) -> String {
    match outcome {
        MoveOutcome::Planned => "would move".to_owned(),
        MoveOutcome::Moved { downtime_ms, total_ms } => {
            format!("migrated: downtime {}, took {}", milliseconds(*downtime_ms), milliseconds(*total_ms))
        }
        MoveOutcome::NoRoom { reasons } => format!("no capacity: {}", reasons.join("; ")),
        MoveOutcome::Failed { error } => {
            let causes = error.causes.iter().map(|cause| format!(": {cause}"));
            format!("failed: {}{}", error.message, causes.collect::<String>())
        }
        MoveOutcome::NotBegun => "not started".to_owned(),
        MoveOutcome::Left { state } => format!("stays: it is {}", machine_text::state(state)),
    }
}
