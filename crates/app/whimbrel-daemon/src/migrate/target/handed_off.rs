//! Return of a machine that this host had handed off: it may come back by a migration, under its name.
//!
//! The record of the handoff stays within the record of the incoming machine until that runs here. If it does
//! not come, it is the machine's record again: so its capsule is kept, and nobody resumes it here meanwhile.

use crate::{
    core::error::DaemonError,
    daemon::Daemon,
    machine::{
        entry::{Machine, MachineLock},
        folder,
        record::{Phase, Record},
    },
};
use whimbrel_api::MachineState;
use whimbrel_core::{CapsuleId, HostName, MachineName};
use whimbrel_vm::remove_overlays;

impl Daemon {
    /// Refuses an incoming machine whose name is in use here. The name of a machine that was handed off is
    /// free for the host that has it, and for a machine that last came from the capsule of the handoff,
    /// `origin`.
    pub(crate) fn check_incoming_name(
        &self,
        (name, origin): (&MachineName, Option<CapsuleId>),
        from: &HostName,
    ) -> Result<(), DaemonError> {
        let comes_back = self.machines.get(name).is_ok_and(|machine| match machine.info().state {
            MachineState::HandedOff { to } => {
                to == *from || origin.is_some_and(|origin| machine.needed_capsules() == [origin])
            }
            _ => false,
        });
        if comes_back { Ok(()) } else { self.machines.check_free(name, false) }
    }
}

/// The record of the handoff, if the name is that of a machine that this host handed off.
pub(super) fn record_of(locked: Option<&MachineLock<'_>>) -> Result<Option<Box<Record>>, DaemonError> {
    match locked {
        None => Ok(None),
        Some(locked) if matches!(locked.record.phase, Phase::Given { .. }) => {
            Ok(Some(Box::new(locked.record.clone())))
        }
        Some(locked) => Err(DaemonError::NameTaken { name: locked.record.name.clone() }),
    }
}

/// Removes the files of an incoming machine that does not come, and the machine itself unless this host had
/// handed it off.
pub(super) fn remove_incoming(host: &Daemon, record: &Record) {
    let layout = &host.directories;
    let removed = match &record.phase {
        Phase::Prepared { handed_off: Some(before), .. } => {
            let saved = before.save(layout);
            remove_overlays(&layout.live_bitmaps(), &layout.machine(&record.name));
            host.machines.insert(Machine::new((**before).clone(), None));
            saved
        }
        _ => {
            let deleted = folder::delete(layout, &record.name);
            host.machines.remove(&record.name);
            deleted
        }
    };
    if let Err(error) = removed {
        let error = &error as &dyn std::error::Error;
        tracing::warn!(machine = %record.name, error, "cannot remove an incoming machine that does not come");
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{core::sample, machine::record::ProcessRecord};
    use bytes::Bytes;
    use std::sync::Arc;
    use whimbrel_core::{ByteSize, Digest, MachineConfig};
    use whimbrel_migrate::protocol::{ABORT, HandoverId, OFFER, Offer};
    use whimbrel_vm::RamFile;

    fn host(name: &str) -> HostName {
        name.parse().unwrap()
    }

    /// Makes a machine that was handed off to beta; its user keeps a note.
    fn hand_off(daemon: &Daemon) -> (MachineName, CapsuleId) {
        let (name, capsule): (MachineName, _) = ("web".parse().unwrap(), CapsuleId(Digest::of(b"web")));
        let mut record = Record::new(name.clone(), MachineConfig::minimal(ByteSize(1 << 24)), vec![]);
        record.phase = Phase::Given { to: host("beta"), capsule };
        record.settings.note = "the shop".into();
        record.save(&daemon.directories).unwrap();
        daemon.machines.insert(Machine::new(record, None));
        (name, capsule)
    }

    /// An offer that is reserved without a QEMU: its boot file has yet to come.
    fn offer(daemon: &Arc<Daemon>, name: &MachineName, handover: u8) -> Offer {
        Offer {
            qemu_version: daemon.qemu().unwrap().version.to_string(),
            processor: crate::migrate::target::incoming::processor(),
            vmgenid: "7b4ff5ab-7dd9-4c73-9a0a-96b9a5d5a0a1".into(),
            blobs: vec![(Digest::of(b"kernel"), 6)],
            ..Offer::of(HandoverId([handover; 16]), name.clone(), MachineConfig::minimal(ByteSize(1 << 24)))
        }
    }

    fn accepts(daemon: &Arc<Daemon>, from: &str, offer: &Offer) -> bool {
        let header = postcard::to_stdvec(offer).unwrap();
        let reply = daemon.arrivals().handle(&host(from), OFFER, &header, Bytes::new()).unwrap();
        // The first byte says which reply it is: accepted, or the reason why not.
        reply[0] == 0
    }

    fn state(daemon: &Daemon, name: &MachineName) -> MachineState {
        daemon.machines.get(name).unwrap().info().state
    }

    fn recorded(daemon: &Daemon, name: &MachineName) -> Record {
        Record::read(&daemon.directories.machine(name)).unwrap().unwrap()
    }

    #[test]
    fn a_machine_that_was_handed_off_comes_back_only_from_who_has_it() {
        let (daemon, _folders) = sample::daemon();
        let (name, capsule) = hand_off(&daemon);
        assert!(!accepts(&daemon, "gamma", &offer(&daemon, &name, 1)));
        assert_eq!(state(&daemon, &name), MachineState::HandedOff { to: host("beta") });
        // Beta has passed the machine on, and nobody has saved it since.
        let passed_on = Offer { origin: Some(capsule), ..offer(&daemon, &name, 2) };
        assert!(accepts(&daemon, "gamma", &passed_on));
        assert_eq!(state(&daemon, &name), MachineState::Migrating);
    }

    #[test]
    fn a_machine_that_does_not_come_back_stays_handed_off_with_its_capsule() {
        let (daemon, _folders) = sample::daemon();
        let (name, capsule) = hand_off(&daemon);
        let before = recorded(&daemon, &name);
        let offer = offer(&daemon, &name, 1);
        assert!(accepts(&daemon, "beta", &offer));
        let coming = daemon.machines.get(&name).unwrap();
        assert!(coming.needed_capsules().contains(&capsule), "nothing frees the capsule meanwhile");
        assert_eq!(coming.lock("test").record.settings.note, "the shop");
        let header = postcard::to_stdvec(&offer.handover).unwrap();
        daemon.arrivals().handle(&host("beta"), ABORT, &header, Bytes::new()).unwrap();
        assert_eq!(recorded(&daemon, &name), before);
        assert_eq!(state(&daemon, &name), MachineState::HandedOff { to: host("beta") });
    }

    #[test]
    fn a_restarted_daemon_knows_that_a_machine_on_its_way_back_was_handed_off() {
        let (daemon, _folders) = sample::daemon();
        let (name, _) = hand_off(&daemon);
        let before = recorded(&daemon, &name);
        let mut coming = before.clone();
        let handed_off = Some(Box::new(before.clone()));
        coming.phase =
            Phase::Prepared { handover: HandoverId([1; 16]), ahead: true, never_ran: false, handed_off };
        let slot = "unfinished".to_owned();
        std::fs::create_dir(daemon.directories.runtime_dir(&slot)).unwrap();
        coming.process =
            Some(ProcessRecord { pid: 1, started: 0, slot, lazy: false, memory: None, ram: RamFile::Own });
        coming.save(&daemon.directories).unwrap();
        daemon.machines.remove(&name);
        daemon.recover_machines(true).unwrap();
        assert_eq!(recorded(&daemon, &name), before);
        assert_eq!(state(&daemon, &name), MachineState::HandedOff { to: host("beta") });
    }
}
