//! What a machine may ask for goes with it to its next host.
//!
//! One call after the handover, apart from it, so that it costs no downtime. If it is lost the machine may
//! ask for nothing where it is, which is what one may that nobody allowed anything.

use super::agent::spawn;
use crate::daemon::Daemon;
use bytes::Bytes;
use serde::{Deserialize, Serialize};
use std::{sync::Arc, time::Duration};
use whimbrel_api::SelfService;
use whimbrel_core::{HostName, MachineName};
use whimbrel_migrate::protocol::HandoverId;
use whimbrel_transfer::{WireLink, call};
use whimbrel_wire::{Call, range};

/// Attempts, and the pause between them: the connection may have gone with the migration's.
const ATTEMPTS: u32 = 10;
const PAUSE: Duration = Duration::from_millis(500);
/// Hosts that are believed to be named in earnest.
const HOSTS_MAX: usize = 64;

/// This machine, which came by this handover, may ask for this.
pub(crate) struct SetGuestPermissions;

/// The machine and what it may.
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
    /// Tells the host that a machine was handed over to what the machine may ask for, if that is anything.
    pub(crate) fn send_permits(
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
                let told = host.neighbour(&to).and_then(|link| {
                    let answer = call::<SetGuestPermissions>(&WireLink(link), &permits, Bytes::new());
                    answer.map_err(|error| crate::transfer::pull::sync_error(&to, error))
                });
                match told {
                    Ok((true, _)) => return,
                    Ok((false, _)) => {
                        tracing::debug!(machine = %permits.machine, "it does not run there yet")
                    }
                    Err(error) => {
                        tracing::debug!(error = &error as &dyn std::error::Error, "permits are not heard")
                    }
                }
                if !host.sleep_unless_closing(PAUSE) {
                    return;
                }
            }
            tracing::warn!(machine = %permits.machine, host = %to, "what it may ask for was not taken along");
        });
    }

    /// Takes down what a machine that came here may ask for. Whether it is here by that handover.
    pub(crate) fn take_permits(&self, permits: GuestPermissions) -> bool {
        if permits.migrate.len() > HOSTS_MAX {
            return true;
        }
        let Ok(machine) = self.machine(&permits.machine) else { return false };
        let Ok(mut turn) = machine.try_lock("permits", None) else { return false };
        if turn.record.arrived_by != Some(permits.handover) {
            return false;
        }
        let GuestPermissions { migrate, checkpoint, .. } = permits;
        turn.record.self_service = SelfService { migrate, checkpoint };
        let saved = turn.record.save(&self.layout);
        if let Err(error) = &saved {
            tracing::warn!(error = error as &dyn std::error::Error, "permits are not kept");
        }
        saved.is_ok()
    }
}
