//! Offloads of network ports: a machine with them fits only a host whose QEMU has them too.

use crate::{core::error::DaemonError, running::RunningMachine};
use whimbrel_core::HostName;
use whimbrel_migrate::protocol::{OFFLOADS_VERSION, PROTOCOL};
use whimbrel_wire::Connection;

/// Refuses a host of an earlier version if the machine has ports with offloads. Its QEMU would not load the
/// state, which shows only in the pause.
pub(crate) fn check(peer: &Connection, host: &HostName, live: &RunningMachine) -> Result<(), DaemonError> {
    let has_them = live.ports.iter().any(|port| port.port_ref().has_offloads());
    let knows = peer.peer().version_of(&PROTOCOL).is_some_and(|version| version >= OFFLOADS_VERSION);
    if has_them && !knows {
        return Err(DaemonError::OlderHost { host: host.clone() });
    }
    Ok(())
}
