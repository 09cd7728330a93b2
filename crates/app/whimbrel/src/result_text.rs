//! Text about the result of an operation.

use crate::table::{ago, count, milliseconds, table};
use whimbrel_api::{
    BucketCapsule, CaptureReport, Damage, NetworkHandover, OperationResult, RepairedCapsule, RoundInfo,
    ThrottleReport, TransferReport,
};
use whimbrel_core::{ByteSize, MachineName};

/// Capsules of a bucket, and what was freed there.
fn bucket(freed: ByteSize, capsules: &[BucketCapsule]) -> String {
    let row = |capsule: &BucketCapsule| {
        [capsule.name.to_string(), capsule.id.short(), ago(capsule.time_ms), capsule.size.to_string()]
    };
    let listed =
        table(["NAME", "ID", "AGE", "SIZE"], capsules.iter().map(row), "no capsule has a name there");
    if freed.0 == 0 { listed } else { format!("{freed} freed\n{listed}") }
}

/// Formats a result as one line or more.
pub(crate) fn describe(result: &OperationResult) -> String {
    match result {
        OperationResult::Checkpoint(report) => checkpointed(report),
        OperationResult::Suspend(report) => {
            capture(report, &format!("continue with `whimbrel resume {}`", report.capsule.short()))
        }
        OperationResult::Rewind { .. } => rewound(result),
        OperationResult::Resume { machines, to_running_ms } => {
            format!("{} runs after {}\n", names(machines), milliseconds(*to_running_ms))
        }
        OperationResult::Clone { machines, to_running_ms } => {
            format!("{} run after {}\n", names(machines), milliseconds(*to_running_ms))
        }
        OperationResult::Migrate { .. } => migrated(result),
        OperationResult::Protect { host, witness, pause_ms, total_ms, wire_bytes } => format!(
            "protected by {host}: pause {}, took {}, {} on the wire; {}\n",
            milliseconds(*pause_ms),
            milliseconds(*total_ms),
            ByteSize(*wire_bytes),
            match witness {
                Some(witness) => format!("{host} takes over automatically if {witness} agrees"),
                None => format!("no witness: {host} takes over only with `whimbrel failover`"),
            },
        ),
        OperationResult::Failover { host, downtime_ms } => {
            format!("failed over to {host}: downtime {}\n", milliseconds(*downtime_ms))
        }
        OperationResult::Evacuate(report) => crate::evacuation_text::describe(report),
        OperationResult::Gc { freed, stored, moved, packs_waiting } => {
            let waiting = match packs_waiting {
                0 => String::new(),
                waiting => {
                    format!("; {} wait for earlier writers to end", count(*waiting, "pack"))
                }
            };
            format!("freed {freed}, {stored} remain, {moved} moved to other packs{waiting}\n")
        }
        OperationResult::Verify { capsules, objects, bytes, damaged } => {
            let (capsules, objects) = (count(*capsules, "capsule"), count(*objects, "object"));
            let read = format!("read {bytes}: {capsules}, {objects}");
            if damaged.is_empty() {
                format!("{read}, no damage\n")
            } else {
                format!("{read}\n{}", damages(damaged))
            }
        }
        OperationResult::Seal { sealed, plain } => sealed_text(*sealed, *plain),
        OperationResult::Repair { capsules, dropped, asked, failure } => {
            let healed: String = capsules.iter().map(repaired).collect();
            let missing = capsules.iter().any(|capsule| capsule.missing > 0);
            match (healed.is_empty(), missing) {
                (true, _) if *dropped == 0 => "nothing is damaged\n".to_owned(),
                (_, true) => healed + &elsewhere(asked, failure.as_deref()),
                (_, false) => format!("{healed}{} replaced\n", count(*dropped, "damaged place")),
            }
        }
        OperationResult::Export { path, bytes } => format!("wrote {bytes} to {}\n", path.display()),
        OperationResult::Bucket { freed, capsules } => bucket(*freed, capsules),
        OperationResult::Import { capsule, added } => {
            format!("{}  {added} added to the store\n", capsule.short())
        }
        OperationResult::Pull(report) => transfer(report, &format!("from {}", report.host)),
        OperationResult::Push { report, machine } => pushed(report, machine.as_ref()),
        OperationResult::Follow { host: Some(host) } => {
            format!("new capsules are uploaded to {host}\n")
        }
        OperationResult::Follow { host: None } => "capsules are no longer uploaded\n".to_owned(),
        OperationResult::Cache { pages } => format!("{}\n", count(*pages, "page")),
    }
}

fn rewound(result: &OperationResult) -> String {
    let OperationResult::Rewind { machine, capsule, tag, to_running_ms, .. } = result else {
        return String::new();
    };
    let (capsule, time) = (capsule.short(), milliseconds(*to_running_ms));
    format!(
        "{machine} runs as it was at {capsule} after {time}; `whimbrel rewind {machine} {tag}` undoes it\n"
    )
}

fn sealed_text(sealed: ByteSize, plain: ByteSize) -> String {
    match plain {
        ByteSize(0) => format!("encrypted {sealed}; everything in the store is encrypted\n"),
        plain => format!(
            "encrypted {sealed}; {plain} are not: damaged, in use by a writer, or without room for a copy\n"
        ),
    }
}

fn migrated(result: &OperationResult) -> String {
    let OperationResult::Migrate {
        host,
        downtime_ms,
        pause,
        total_ms,
        wire_bytes,
        rounds: passes,
        network,
        postcopy,
        slowed,
        freed,
        paused,
    } = result
    else {
        return String::new();
    };
    let downtime = match paused {
        true => "still paused".to_owned(),
        false => format!("downtime {}", milliseconds(*downtime_ms)),
    };
    format!(
        "migrated to {host}: {downtime}, took {}, {} on the wire in {}\n{}{}{}{}{}",
        milliseconds(*total_ms),
        ByteSize(*wire_bytes),
        rounds(passes),
        pause.as_deref().map(crate::round_text::pause_parts).unwrap_or_default(),
        postcopy.as_ref().map(crate::round_text::fetched).unwrap_or_default(),
        freed.map(|freed| format!("its guest released {freed} before the first round\n")).unwrap_or_default(),
        slowed_down(slowed),
        handover(network),
    )
}

fn slowed_down(slowed: &ThrottleReport) -> String {
    let stunned = match slowed.stunned.as_slice() {
        [] => String::new(),
        names => format!("its guest suspended {} meanwhile\n", names.join(", ")),
    };
    let cpus =
        slowed.cpu_percent.map(|percent| format!("its CPUs ran for {percent} % of the time at the end\n"));
    let mirrored = slowed.mirrored.as_deref().map(|mirrored| {
        let (carried, waited) = (ByteSize(mirrored.bytes), milliseconds(mirrored.waited_us as f64 / 1e3));
        let longest = milliseconds(mirrored.longest_us as f64 / 1e3);
        format!("{carried} of disk writes went to both hosts: each waited {waited}, at most {longest}\n")
    });
    stunned + &cpus.unwrap_or_default() + &mirrored.unwrap_or_default()
}

fn checkpointed(report: &CaptureReport) -> String {
    // A machine that does not run has no pause.
    let stays = if report.pause_ms > 0.0 { "keeps running" } else { "stays as it was" };
    capture(report, &format!("the machine {stays}"))
}

fn capture(report: &CaptureReport, next: &str) -> String {
    let released =
        report.balloon_freed.map(|freed| format!("the guest released {freed}, ")).unwrap_or_default();
    format!(
        "{}  {released}pause {}, took {}, added {} in {}; {next}\n",
        report.capsule.short(),
        milliseconds(report.pause_ms),
        milliseconds(report.total_ms),
        ByteSize(report.bytes_added),
        rounds(&report.rounds),
    )
}

fn transfer(report: &TransferReport, way: &str) -> String {
    format!(
        "{}  {way}: {} on the wire for {}, took {}{}\n",
        report.capsule.short(),
        ByteSize(report.wire_bytes),
        count(report.pages, "page"),
        milliseconds(report.total_ms),
        if report.whole { "" } else { "; the other pages are fetched when they are read" },
    )
}

fn pushed(report: &TransferReport, machine: Option<&MachineName>) -> String {
    let sent = transfer(report, &format!("to {}", report.host));
    match machine {
        Some(machine) => format!(
            "{sent}all of {machine} is on {}: continue there with `whimbrel resume {machine}`\n",
            report.host
        ),
        None => sent,
    }
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
        NetworkHandover::Tunnelled { ports, home } => {
            format!("tunnelled {} to the network of {home}\n", count(u64::from(*ports), "network port"))
        }
        NetworkHandover::Unplugged { missing } => {
            format!("network ports are unplugged: the target has no bridge {}\n", missing.join(", "))
        }
    }
}

fn repaired(capsule: &RepairedCapsule) -> String {
    let names = capsule.names.iter().map(|name| format!(" {name}")).collect::<String>();
    let healed = format!("{}{names}: {} healed", capsule.capsule.short(), count(capsule.healed, "object"));
    match capsule.missing {
        0 => format!("{healed}\n"),
        missing => format!("{healed}, {} still missing\n", count(missing, "object")),
    }
}

/// Text about where to look for what is still missing.
fn elsewhere(asked: &[String], failure: Option<&str>) -> String {
    let asked = if asked.is_empty() { "nobody".to_owned() } else { asked.join(", ") };
    let failure = failure.map(|failure| format!(" ({failure})")).unwrap_or_default();
    format!(
        "asked {asked}{failure}; try `whimbrel repair NAME --from` with another host or pool that has a copy\n"
    )
}

fn damages(damaged: &[Damage]) -> String {
    damaged.iter().map(|damage| format!("damaged: {}: {}\n", damage.place, damage.problem)).collect()
}
