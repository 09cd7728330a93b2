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

/// Protection of a machine that runs here, in a few words; empty for all others.
pub(crate) fn short(machine: &MachineInfo) -> String {
    let Some(one) = machine.protection.as_ref().filter(|one| one.role == ProtectRole::Primary) else {
        return String::new();
    };
    match (&one.state, one.witness_answers) {
        (ProtectState::Seeding, _) => format!("seeding {}", one.host),
        (ProtectState::Unprotected { .. }, _) => match one.spares.first() {
            Some(next) => format!("UNPROTECTED, next {next}"),
            None => "UNPROTECTED".to_owned(),
        },
        (ProtectState::Fenced { .. }, _) => "FENCED".to_owned(),
        (ProtectState::Protected, Some(false)) => format!("{}, {} ms, NO WITNESS", one.host, one.lag_ms),
        (ProtectState::Protected, _) => format!("{}, {} ms", one.host, one.lag_ms),
    }
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

/// Text about the witness of a protection, its mode and its group.
fn witness(one: &ProtectionInfo) -> String {
    let mut text = match (&one.witness, one.witness_answers) {
        (None, _) => "no witness: only `whimbrel failover` switches over".to_owned(),
        (Some(witness), Some(false)) => format!("witness {witness} DOES NOT ANSWER"),
        (Some(witness), _) => format!("witness {witness}"),
    };
    if one.mode == ProtectMode::Replay {
        text += ", by replay";
    }
    if let Some(group) = &one.group {
        text += &format!(", in group {group}");
    }
    text
}

fn line(machine: &MachineInfo, one: &ProtectionInfo) -> String {
    let (name, host, witness) = (&machine.name, &one.host, witness(one));
    let spares = one.spares.iter().map(ToString::to_string).collect::<Vec<_>>().join(", ");
    let spares = if spares.is_empty() { spares } else { format!(", spares {spares}") };
    match &one.state {
        ProtectState::Seeding => return format!("{name}: seeding {host}, NOT PROTECTED yet{spares}"),
        ProtectState::Unprotected { reason } => {
            return format!("{name}: UNPROTECTED ({host}: {reason}){spares}");
        }
        ProtectState::Fenced { reason } => return format!("{name}: FENCED, {reason}"),
        ProtectState::Protected => {}
    }
    let Some(figures) = &one.figures else {
        return format!("{name}: protected by {host}{spares}, {witness}");
    };
    let share = 100.0 * figures.sent_bytes.0 as f64 / (figures.dirty_bytes.0 as f64).max(1.0);
    format!(
        "{name}: protected by {host}{spares}, {witness}; epoch {} of {} ({} lengthened), pause {} (p99 {}), {:.0} pages dirty, \
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

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    fn machine(role: &str, state: serde_json::Value, witness_answers: bool) -> MachineInfo {
        let protection = json!({
            "role": role, "host": "beta", "witness": "gamma", "witness_answers": witness_answers,
            "mode": "epoch", "state": state, "epoch": 7, "lag_ms": 41,
        });
        let machine = json!({
            "name": "web", "state": {"kind": "running"}, "memory": 1 << 30, "cpus": 1, "accel": "kvm", "disks": [],
            "nics": [], "since_ms": 1, "protection": protection,
        });
        serde_json::from_value(machine).unwrap()
    }

    #[test]
    fn the_spares_of_a_machine_are_named_and_the_next_one_first() {
        let mut web = machine("primary", json!({"kind": "unprotected", "reason": "gone"}), true);
        web.protection.as_mut().unwrap().spares =
            ["delta", "epsilon"].map(|name| name.parse().unwrap()).into();
        assert_eq!(short(&web), "UNPROTECTED, next delta");
        assert_eq!(lines(&[web]), "web: UNPROTECTED (beta: gone), spares delta, epsilon\n");
    }

    #[test]
    fn a_glance_tells_whether_a_machine_is_protected() {
        let state = |kind: &str| json!({"kind": kind, "reason": "a reason"});
        for (role, kind, answers, expected) in [
            ("primary", "protected", true, "beta, 41 ms"),
            ("primary", "protected", false, "beta, 41 ms, NO WITNESS"),
            ("primary", "seeding", true, "seeding beta"),
            ("primary", "unprotected", true, "UNPROTECTED"),
            ("primary", "fenced", true, "FENCED"),
            ("standby", "protected", true, ""),
        ] {
            assert_eq!(short(&machine(role, state(kind), answers)), expected);
        }
    }
}
