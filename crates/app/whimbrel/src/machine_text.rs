//! Machines for people: one line, one row, one word for a state.

use crate::{
    round_text,
    table::{ago, table},
};
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
        MachineState::Lazy { resident_pages, total_pages, stalled, from } => {
            let percent = resident_pages.saturating_mul(100) / (*total_pages).max(1);
            let from = from.as_ref().map(|host| format!(", the rest on {host}")).unwrap_or_default();
            match stalled {
                Some(why) => format!("lazy {percent} %{from}, stalled: {why}"),
                None => format!("lazy {percent} %{from}"),
            }
        }
        MachineState::Giving { to, missing_pages, stalled } => {
            let missing = missing_pages.map(|pages| format!(", {} to go", round_text::pages(pages)));
            let missing = missing.unwrap_or_default();
            match stalled {
                Some(why) => format!("giving to {to}{missing}, stalled: {why}"),
                None => format!("giving to {to}{missing}"),
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
            crate::protection_text::standby(machine).unwrap_or_else(|| state(&machine.state)),
            machine.memory.to_string(),
            machine.cpus.to_string(),
            machine.disks.len().to_string(),
            network(machine),
            machine.pid.map(|pid| pid.to_string()).unwrap_or_default(),
            ago(machine.since_ms),
        ]
    });
    let header = ["NAME", "STATE", "MEMORY", "CPUS", "DISKS", "NETWORK", "PID", "SINCE"];
    let list = table(header, rows, "no machines; start one with `whimbrel run NAME --disk FILE --memory 1G`");
    list + &crate::protection_text::lines(machines) + &machines.iter().filter_map(uploads).collect::<String>()
}

/// Where its capsules go by themselves, and why they do not.
fn uploads(machine: &MachineInfo) -> Option<String> {
    let (name, uploads) = (&machine.name, machine.uploads.as_ref()?);
    let stalled = uploads.stalled.as_ref().map(|why| format!("; NOT THERE YET, tried again: {why}"));
    Some(format!("{name}: its capsules go to {}{}\n", uploads.to, stalled.unwrap_or_default()))
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
            state(&MachineState::Lazy { resident_pages, total_pages, stalled, from: None })
        };
        assert_eq!(lazy(0, 0, None), "lazy 0 %");
        assert_eq!(lazy(33, 100, Some("beta is away".into())), "lazy 33 %, stalled: beta is away");
    }

    #[test]
    fn a_machine_between_two_hosts_says_which_has_what() {
        let from = Some("alpha".parse().expect("a name"));
        let lazy = MachineState::Lazy { resident_pages: 1, total_pages: 4, stalled: None, from };
        assert_eq!(state(&lazy), "lazy 25 %, the rest on alpha");
        let giving = |missing_pages, stalled| {
            state(&MachineState::Giving { to: "beta".parse().expect("a name"), missing_pages, stalled })
        };
        assert_eq!(giving(Some(512), None), "giving to beta, 2 MiB to go");
        assert_eq!(giving(None, Some("no route".into())), "giving to beta, stalled: no route");
    }
}
