//! Text about protections: one line for each machine.

use crate::table::{ago, milliseconds};
use whimbrel_api::{MachineInfo, ProtectMode, ProtectRole, ProtectState, ProtectionInfo, TakeoverInfo};
use whimbrel_core::ByteSize;

/// State of a hosted standby; none for all other machines.
pub(crate) fn standby(machine: &MachineInfo) -> Option<String> {
    let protection = machine.protection.as_ref().filter(|one| one.role == ProtectRole::Standby)?;
    Some(match &protection.state {
        ProtectState::Seeding => format!("standby for {}, seeding", protection.host),
        _ => format!("standby for {}", protection.host),
    })
}

/// Lines about the machines that are protected on this host, or were taken over by it.
pub(crate) fn lines(machines: &[MachineInfo]) -> String {
    let of = |machine: &MachineInfo| match (&machine.protection, &machine.taken_over) {
        (Some(one), taken) if one.role == ProtectRole::Primary => {
            let taken = taken.as_ref().map_or(String::new(), |taken| format!(", {}", taken_over(taken)));
            format!("{}{taken}\n", line(machine, one))
        }
        (None, Some(taken)) => format!("{}: {}, not protected\n", machine.name, taken_over(taken)),
        _ => String::new(),
    };
    machines.iter().map(of).collect()
}

fn taken_over(taken: &TakeoverInfo) -> String {
    format!("taken over from {} {} ago", taken.from, ago(taken.at_ms))
}

fn line(machine: &MachineInfo, one: &ProtectionInfo) -> String {
    let (name, host) = (&machine.name, &one.host);
    let witness = match (&one.witness, one.witness_answers) {
        (None, _) => "no witness: only `whimbrel failover` switches over".to_owned(),
        (Some(witness), Some(false)) => format!("witness {witness} DOES NOT ANSWER"),
        (Some(witness), _) => format!("witness {witness}"),
    };
    let witness = if one.mode == ProtectMode::Replay { format!("{witness}, by replay") } else { witness };
    let witness = one.group.as_ref().map_or(witness.clone(), |group| format!("{witness}, in group {group}"));
    match &one.state {
        ProtectState::Seeding => return format!("{name}: seeding {host}, NOT PROTECTED yet"),
        ProtectState::Unprotected { reason } => return format!("{name}: UNPROTECTED ({host}: {reason})"),
        ProtectState::Fenced { reason } => return format!("{name}: FENCED, {reason}"),
        ProtectState::Protected => {}
    }
    let Some(figures) = &one.figures else { return format!("{name}: protected by {host}, {witness}") };
    let share = 100.0 * figures.sent_bytes.0 as f64 / (figures.dirty_bytes.0 as f64).max(1.0);
    format!(
        "{name}: protected by {host}, {witness}; epoch {} of {} ({} lengthened), pause {} (p99 {}), {:.0} pages dirty, \
         {} dirty > {} changed > {} unshared > {} sent ({share:.0} %), output delay {}, lag {} ms, hashes {}",
        one.epoch,
        milliseconds(figures.epoch_ms),
        figures.stretched,
        milliseconds(figures.pause_p50_ms),
        milliseconds(figures.pause_p99_ms),
        figures.dirty_pages,
        figures.dirty_bytes,
        figures.changed_bytes,
        figures.unshared_bytes,
        ByteSize(figures.sent_bytes.0),
        milliseconds(figures.output_delay_p50_ms),
        one.lag_ms,
        figures.hash_bytes,
    )
}
