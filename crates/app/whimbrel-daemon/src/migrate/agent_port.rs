//! The port of qemu-ga: a machine with it fits only a host whose QEMU gives it one.

use crate::core::error::DaemonError;
use whimbrel_core::{HostName, MachineConfig};
use whimbrel_migrate::protocol::{AGENT_PORT_VERSION, PROTOCOL};
use whimbrel_wire::Connection;

/// Refuses a host of an earlier version if the machine has the port. It would refuse the offer as well, by a
/// machine type that it does not know; this says why.
pub(crate) fn check(peer: &Connection, host: &HostName, config: &MachineConfig) -> Result<(), DaemonError> {
    if config.agent_port && is_too_old(peer.peer().version_of(&PROTOCOL)) {
        return Err(DaemonError::OlderHost { host: host.clone(), what: "a port for qemu-ga" });
    }
    Ok(())
}

/// Whether a host that has this version in common with us for messages of moves knows no such port.
fn is_too_old(common: Option<u16>) -> bool {
    common.is_none_or(|version| version < AGENT_PORT_VERSION)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_host_that_knows_no_such_port_is_named_before_anything_is_offered() {
        assert!(is_too_old(None) && is_too_old(Some(AGENT_PORT_VERSION - 1)));
        assert!(!is_too_old(Some(PROTOCOL.range().newest)));
    }
}
