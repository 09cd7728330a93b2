//! Offer to a standby: the machine is described as to the target of a migration.
//!
//! All baselines are zeros, so that what the standby lacks is what differs from zeros.
//!
//! In mode replay clients may have seen what the machine no longer knows after a takeover: random numbers
//! that it would draw again. So it is offered with another generation id. In the other modes output waits for
//! its epoch, and the machine keeps its identity.

use crate::{core::error::DaemonError, daemon::Daemon, machine::record::Record};
use whimbrel_core::Digest;
use whimbrel_migrate::protocol::{HandoverId, Offer};
use whimbrel_qemu::Vmgenid;
use whimbrel_vm::RunningMachine;

/// Describes a machine for its standby.
pub(in crate::protect) fn of(
    host: &Daemon,
    record: &Record,
    live: &RunningMachine,
    handover: HandoverId,
    replay: bool,
) -> Result<Offer, DaemonError> {
    let offer = host.offer(record, live, None)?;
    let vmgenid = if replay { another_identity(&offer.vmgenid, handover) } else { offer.vmgenid.clone() };
    Ok(Offer { handover, bases: Vec::new(), paused: false, vmgenid, ..offer })
}

/// Generation id of a machine after a takeover: the same for all standbys of one handover id, which may keep
/// their QEMU.
fn another_identity(before: &str, handover: HandoverId) -> String {
    let digest = Digest::of(format!("{before} {handover}").as_bytes());
    let mut bytes = [0; 16];
    bytes.copy_from_slice(&digest.0[..16]);
    Vmgenid(bytes).to_string()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_takeover_by_replay_has_an_identity_of_its_own_that_stays_with_its_protection() {
        let before = Vmgenid([7; 16]).to_string();
        let ids = [1, 2].map(|number| another_identity(&before, HandoverId([number; 16])));
        assert!(ids.iter().all(|id| id.parse::<Vmgenid>().is_ok() && *id != before), "{ids:?}");
        assert_ne!(ids[0], ids[1]);
        assert_eq!(ids[0], another_identity(&before, HandoverId([1; 16])));
        assert_ne!(ids[0], another_identity(&ids[0], HandoverId([1; 16])));
    }
}
