//! Machines for people: one line, one row, one word for a state.

use crate::table::{ago, table};
use whimbrel_api::{MachineInfo, MachineState};

/// `web: running`.
pub(crate) fn sentence(machine: &MachineInfo) -> String {
    format!("{}: {}\n", machine.name, state(&machine.state))
}

/// What a machine does, in a few words.
pub(crate) fn state(state: &MachineState) -> String {
    match state {
        MachineState::Starting => "starting".to_owned(),
        MachineState::Running => "running".to_owned(),
        MachineState::Paused => "paused".to_owned(),
        MachineState::Lazy { resident_pages, total_pages, stalled } => {
            let percent = resident_pages.saturating_mul(100) / (*total_pages).max(1);
            match stalled {
                Some(why) => format!("lazy {percent} %, stalled: {why}"),
                None => format!("lazy {percent} %"),
            }
        }
        MachineState::Migrating => "migrating".to_owned(),
        MachineState::Suspended => "suspended".to_owned(),
        MachineState::Given { to } => format!("given to {to}"),
        MachineState::Away => "away".to_owned(),
        MachineState::Stopped => "stopped".to_owned(),
        MachineState::Crashed { reason } => format!("crashed: {reason}"),
    }
}

/// All machines as a table.
pub(crate) fn list(machines: &[MachineInfo]) -> String {
    let rows = machines.iter().map(|machine| {
        [
            machine.name.to_string(),
            state(&machine.state),
            machine.memory.to_string(),
            machine.cpus.to_string(),
            machine.disks.len().to_string(),
            network(machine),
            machine.pid.map(|pid| pid.to_string()).unwrap_or_default(),
            ago(machine.since_ms),
        ]
    });
    let header = ["NAME", "STATE", "MEMORY", "CPUS", "DISKS", "NETWORK", "PID", "SINCE"];
    table(header, rows, "no machines; start one with `whimbrel run NAME --disk FILE --memory 1G`")
}

/// The bridges it is in, and beside them which host they belong to if that is another one.
fn network(machine: &MachineInfo) -> String {
    let names: Vec<_> = machine.nics.iter().map(|nic| nic.bridge.as_deref().unwrap_or("-")).collect();
    let bridges = names.join(",");
    let Some(tunnel) = &machine.tunnel else { return bridges };
    let where_to = match (&machine.state, &tunnel.away) {
        (MachineState::Away | MachineState::Suspended, Some(away)) => format!("{bridges} for {away}"),
        _ => format!("{bridges} of {}", tunnel.home),
    };
    match (tunnel.connected, &tunnel.reason) {
        (true, _) => where_to,
        (false, None) => format!("{where_to}, cut off"),
        (false, Some(reason)) => format!("{where_to}, cut off: {reason}"),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_lazy_machine_of_no_pages_is_no_division_by_zero() {
        let lazy = |resident_pages, total_pages, stalled| {
            state(&MachineState::Lazy { resident_pages, total_pages, stalled })
        };
        assert_eq!(lazy(0, 0, None), "lazy 0 %");
        assert_eq!(lazy(33, 100, Some("beta is away".into())), "lazy 33 %, stalled: beta is away");
    }
}
