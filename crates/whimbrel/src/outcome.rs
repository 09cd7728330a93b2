//! What an operation achieved, for people.

use crate::table::{count, milliseconds};
use whimbrel_api::{CaptureReport, Damage, NetworkHandover, OperationResult, RoundInfo};
use whimbrel_core::{ByteSize, MachineName};

/// One line or a few, with a line feed at the end.
pub(crate) fn describe(result: &OperationResult) -> String {
    match result {
        OperationResult::Checkpoint(report) => capture(report, "the machine runs on"),
        OperationResult::Suspend(report) => {
            capture(report, &format!("continue with `whimbrel resume {}`", report.capsule.short()))
        }
        OperationResult::Resume { machines, to_running_ms } => {
            format!("{} runs after {}\n", names(machines), milliseconds(*to_running_ms))
        }
        OperationResult::Clone { machines, to_running_ms } => {
            format!("{} run after {}\n", names(machines), milliseconds(*to_running_ms))
        }
        OperationResult::Migrate { host, downtime_ms, total_ms, wire_bytes, rounds: passes, network } => {
            format!(
                "runs on {host}: stood still for {}, took {}, {} on the wire in {}\n{}",
                milliseconds(*downtime_ms),
                milliseconds(*total_ms),
                ByteSize(*wire_bytes),
                rounds(passes),
                handover(network),
            )
        }
        OperationResult::Gc { freed, stored, moved, packs_waiting } => {
            let waiting = match packs_waiting {
                0 => String::new(),
                waiting => {
                    format!("; {} go when writers that began before have ended", count(*waiting, "pack"))
                }
            };
            format!("freed {freed}, {stored} are left, {moved} were moved{waiting}\n")
        }
        OperationResult::Verify { capsules, objects, bytes, damaged } => {
            let (capsules, objects) = (count(*capsules, "capsule"), count(*objects, "object"));
            let read = format!("read {bytes}: {capsules}, {objects}");
            if damaged.is_empty() {
                format!("{read}, all sound\n")
            } else {
                format!("{read}\n{}", damages(damaged))
            }
        }
        OperationResult::Export { path, bytes } => format!("wrote {bytes} to {}\n", path.display()),
        OperationResult::Import { capsule, added } => {
            format!("{}  {added} added to the store\n", capsule.short())
        }
    }
}

fn capture(report: &CaptureReport, next: &str) -> String {
    format!(
        "{}  stood still for {}, took {}, added {} in {}; {next}\n",
        report.capsule.short(),
        milliseconds(report.pause_ms),
        milliseconds(report.total_ms),
        ByteSize(report.bytes_added),
        rounds(&report.rounds),
    )
}

fn rounds(rounds: &[RoundInfo]) -> String {
    count(rounds.len() as u64, "round")
}

fn names(machines: &[MachineName]) -> String {
    machines.iter().map(MachineName::as_str).collect::<Vec<_>>().join(", ")
}

fn handover(network: &NetworkHandover) -> String {
    match network {
        NetworkHandover::NoPorts => String::new(),
        NetworkHandover::Announced { ports } => {
            format!("announced {}\n", count(u64::from(*ports), "network port"))
        }
        NetworkHandover::Unplugged { missing } => {
            format!("network ports are unplugged: no bridge {} there\n", missing.join(", "))
        }
    }
}

fn damages(damaged: &[Damage]) -> String {
    damaged.iter().map(|damage| format!("damaged: {}: {}\n", damage.place, damage.problem)).collect()
}
