//! Guest permissions: the requests that a guest may make are sent to the host that its machine migrated to.
//!
//! One call after the handover, so that it costs no downtime. If it is lost, or if the owner of that host did
//! not give this one the right `guest`, the guest may request nothing there, as by default.

use super::spawn;
use crate::daemon::Daemon;
use bytes::Bytes;
use serde::{Deserialize, Serialize};
use std::{sync::Arc, time::Duration};
use whimbrel_api::SelfService;
use whimbrel_core::{HostName, MachineName};
use whimbrel_migrate::protocol::HandoverId;
use whimbrel_transfer::{LinkError, WireLink, call};
use whimbrel_wire::{Call, range};

/// Attempts and the pause between them: the connection may have ended with the migration's.
const ATTEMPTS: u32 = 10;
const PAUSE: Duration = Duration::from_millis(500);
/// Most hosts in a message that is taken seriously.
const HOSTS_MAX: usize = 64;

/// Sets the guest permissions of a machine that came by this handover.
pub(crate) struct SetGuestPermissions;

/// A machine and the requests that its guest may make.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct GuestPermissions {
    pub(crate) machine: MachineName,
    pub(crate) handover: HandoverId,
    pub(crate) migrate: Vec<HostName>,
    pub(crate) checkpoint: bool,
}

impl Call for SetGuestPermissions {
    const KIND: u16 = range::MIGRATE + 0x61;
    type Header = GuestPermissions;
    type Reply = bool;
}

impl Daemon {
    /// Sends the guest permissions of a machine, if it has any, to the host that it was handed over to.
    pub(crate) fn send_guest_permissions(
        self: &Arc<Self>,
        to: &HostName,
        machine: &MachineName,
        handover: HandoverId,
        may: &SelfService,
    ) {
        if may.is_empty() {
            return;
        }
        let SelfService { migrate, checkpoint } = may.clone();
        let permits = GuestPermissions { machine: machine.clone(), handover, migrate, checkpoint };
        let (host, to) = (self.clone(), to.clone());
        spawn("permits", move || {
            for _ in 0..ATTEMPTS {
                let told = host
                    .peer_connection(&to)
                    .map_err(LinkError::lost)
                    .and_then(|link| call::<SetGuestPermissions>(&WireLink(link), &permits, Bytes::new()));
                match told {
                    Ok((true, _)) => return,
                    Ok((false, _)) => {
                        tracing::debug!(machine = %permits.machine, "it does not run on the target yet")
                    }
                    Err(error @ LinkError::Refused { .. }) => {
                        let error = &error as &dyn std::error::Error;
                        return tracing::info!(machine = %permits.machine, host = %to, error, "its guest may request nothing there");
                    }
                    Err(error) => {
                        tracing::debug!(
                            error = &error as &dyn std::error::Error,
                            "could not send permissions"
                        )
                    }
                }
                if !host.sleep_unless_closing(PAUSE) {
                    return;
                }
            }
            tracing::warn!(machine = %permits.machine, host = %to, "guest permissions were not sent to the target");
        });
    }

    /// Saves the guest permissions of a machine that came here. Returns whether it came by this handover.
    pub(crate) fn save_guest_permissions(&self, permits: GuestPermissions) -> bool {
        if permits.migrate.len() > HOSTS_MAX {
            return true;
        }
        let Ok(machine) = self.machines.get(&permits.machine) else { return false };
        let Ok(mut turn) = machine.try_lock("permission update", None) else { return false };
        if turn.record.arrived_by != Some(permits.handover) {
            return false;
        }
        let GuestPermissions { migrate, checkpoint, .. } = permits;
        turn.record.self_service = SelfService { migrate, checkpoint };
        let saved = turn.record.save(&self.directories);
        if let Err(error) = &saved {
            tracing::warn!(error = error as &dyn std::error::Error, "could not save guest permissions");
        }
        saved.is_ok()
    }
}
