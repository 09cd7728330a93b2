//! Offloads of network ports: a machine with them fits only a host whose QEMU has them too.

use crate::core::error::DaemonError;
use whimbrel_core::HostName;
use whimbrel_migrate::protocol::{OFFLOADS_VERSION, PROTOCOL};
use whimbrel_vm::RunningMachine;
use whimbrel_wire::Connection;

/// Refuses a host of an earlier version if the machine has ports with offloads. Its QEMU would not load the
/// state, which shows only in the pause.
pub(crate) fn check(peer: &Connection, host: &HostName, live: &RunningMachine) -> Result<(), DaemonError> {
    let has_them = live.ports.iter().any(|port| port.port_ref().has_offloads());
    if has_them && is_too_old(peer.peer().version_of(&PROTOCOL)) {
        return Err(DaemonError::OlderHost { host: host.clone(), what: "network offloads" });
    }
    Ok(())
}

/// Whether a host that has this version in common with us for messages of moves does not load such a state.
fn is_too_old(common: Option<u16>) -> bool {
    common.is_none_or(|version| version < OFFLOADS_VERSION)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_host_that_could_not_load_the_state_in_the_pause_is_refused_before() {
        let newest = PROTOCOL.range().newest;
        assert!(is_too_old(None) && is_too_old(Some(OFFLOADS_VERSION - 1)));
        assert!(!is_too_old(Some(OFFLOADS_VERSION)) && !is_too_old(Some(newest)));
    }
}
