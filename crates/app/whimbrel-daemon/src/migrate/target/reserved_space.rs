//! Reserved space for incoming machines: what is reserved for one before anything of it is here.

use super::incoming::host_capacity;
use crate::daemon::Daemon;
use whimbrel_core::{ByteSize, HostName};
use whimbrel_migrate::{
    compatibility::{self, Incompatibility},
    protocol::Offer,
    target::HostError,
};
use whimbrel_protect::protocol::EPOCH_BYTES_MAX;
use whimbrel_qemu::VmIdentity;
use whimbrel_vm::Reservation;

/// What an incoming machine is here for.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Purpose {
    Migration,
    Standby,
}

impl Purpose {
    /// After a takeover the guest is told to read its generation id: it is another one if clients may have
    /// seen what the guest no longer knows.
    pub(super) fn identity(self) -> VmIdentity {
        match self {
            Self::Migration => VmIdentity::Unchanged,
            Self::Standby => VmIdentity::New,
        }
    }

    /// Memory for pages that wait beside the machine: the epoch in flight.
    fn buffer_bytes(self, offer: &Offer) -> u64 {
        match self {
            Self::Migration => 0,
            Self::Standby => offer.config.memory.0.min(EPOCH_BYTES_MAX as u64),
        }
    }
}

/// What is reserved for an incoming machine.
pub(super) struct ReservedSpace {
    pub(super) memory: Reservation,
    pub(super) buffer: Reservation,
    pub(super) disk: Reservation,
}

/// Checks the offer before anything is created, and reserves memory and disk space for it. If these are
/// short, waits until ended machines have freed theirs.
pub(super) fn reserve_space(
    host: &Daemon,
    (offer, from): (&Offer, &HostName),
    purpose: Purpose,
) -> Result<ReservedSpace, HostError> {
    match compatibility::check(offer, &host_capacity(host, offer, from)?) {
        Err(Incompatibility::Memory { .. } | Incompatibility::Disk { .. }) if host.make_room() => {
            compatibility::check(offer, &host_capacity(host, offer, from)?)?;
        }
        checked => checked?,
    }
    // Another machine may have come in between.
    let (size, beside, disks) =
        (offer.config.memory.0, purpose.buffer_bytes(offer), ByteSize(offer.disk_bytes));
    let full = |free| Incompatibility::Memory { needed: ByteSize(size + beside), free: ByteSize(free) };
    let memory = host.memory.reserve(size)?.map_err(full)?;
    let buffer = host.memory.reserve(beside)?.map_err(|free| full(size + free))?;
    let full = |free| Incompatibility::Disk { needed: disks, free: ByteSize(free) };
    let disk = host.disk_space.reserve(disks.0)?.map_err(full)?;
    disk.taken_by(host.directories.machine(&offer.name));
    Ok(ReservedSpace { memory, buffer, disk })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::core::sample;
    use whimbrel_core::MachineConfig;
    use whimbrel_migrate::protocol::HandoverId;

    #[test]
    fn a_standby_is_promised_its_memory_and_what_waits_beside_it() {
        let (host, _folders) = sample::daemon();
        let (config, from) = (MachineConfig::minimal(ByteSize(1 << 30)), "beta".parse().unwrap());
        let offer = Offer {
            disk_bytes: 1 << 20,
            qemu_version: host.qemu().unwrap().version.to_string(),
            processor: crate::migrate::target::incoming::processor(),
            ..Offer::of(HandoverId([1; 16]), "web".parse().unwrap(), config)
        };
        // What else is free here is promised to somebody. Tests beside this one may free some, or take some.
        let others = host.memory.adopt(host.memory.spare().unwrap() - (9 << 27));
        assert!(reserve_space(&host, (&offer, &from), Purpose::Migration).is_ok());
        let refused =
            reserve_space(&host, (&offer, &from), Purpose::Standby).err().expect("too little for both");
        assert!(refused.to_string().contains("memory"), "{refused}");
        drop(others);
        let before = host.memory.spare().unwrap();
        let standby = reserve_space(&host, (&offer, &from), Purpose::Standby).unwrap();
        let promised = before.abs_diff(host.memory.spare().unwrap());
        assert!(promised.abs_diff(5 << 28) < 64 << 20, "{promised}");
        drop(standby);
    }
}
