//! Capacity of another host, queried before an evacuation starts by one small call
//! (docs/protocols/migrate.md).
//!
//! An answer is no promise; the reservation of each migration is. It only tells early which machines will
//! find no host.

use super::plan::SpareCapacity;
use crate::{core::error::DaemonError, daemon::Daemon, machine::entry::Machine};
use bytes::Bytes;
use serde::{Deserialize, Serialize};
use std::{collections::BTreeMap, sync::Arc, time::Duration};
use whimbrel_api::MachineState;
use whimbrel_core::{HostName, MachineName, PAGE_SIZE};
use whimbrel_transfer::{WireLink, call};
use whimbrel_wire::{Call, range};

/// Most machines in one query: if all are refused, each with a reason, the header of the reply still holds
/// them.
const MACHINES_MAX: usize = 256;

/// Longest wait for resources of machines that have left.
const CLEANUP_WAIT: Duration = Duration::from_secs(10);

/// Query for spare capacity, and for which of these machines.
pub(crate) struct QueryCapacity;

#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct CapacityQuery {
    pub(crate) name: MachineName,
    pub(crate) machine: String,
}

#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct CapacityReply {
    /// Bytes of memory that no machine has or was promised.
    pub(crate) memory: u64,
    pub(crate) disk: u64,
    /// Machines that would be refused, and why.
    pub(crate) refused: Vec<(MachineName, String)>,
}

impl Call for QueryCapacity {
    const KIND: u16 = range::MIGRATE + 0x60;
    type Header = Vec<CapacityQuery>;
    type Reply = CapacityReply;
}

impl Daemon {
    pub(crate) fn spare_capacity(&self, machines: &[CapacityQuery]) -> Result<CapacityReply, DaemonError> {
        if machines.len() > MACHINES_MAX {
            return Err(DaemonError::invalid(format!("a query names at most {MACHINES_MAX} machines")));
        }
        // Resources of machines that have left are free in a moment.
        self.cleanup.wait(CLEANUP_WAIT);
        let qemu = self.qemu()?;
        let refusal = |machine: &CapacityQuery| {
            let known = qemu.machine_type(&machine.machine).is_some();
            let unknown =
                || DaemonError::invalid(format!("QEMU {} does not have {}", qemu.version, machine.machine));
            let free = self.machines.check_free(&machine.name, false);
            free.and_then(|()| if known { Ok(()) } else { Err(unknown()) }).err()
        };
        let refused =
            machines.iter().filter_map(|machine| Some((machine.name.clone(), refusal(machine)?.to_string())));
        Ok(CapacityReply {
            memory: self.spare_memory()?,
            disk: free_bytes(self.directories.data())?,
            refused: refused.collect(),
        })
    }

    /// Free memory that no guest of this host may still take.
    fn spare_memory(&self) -> Result<u64, DaemonError> {
        let free = free_bytes(&self.directories.runtime_dirs())?;
        let promised: u64 = self.machines.all().iter().map(|machine| promised_bytes(machine)).sum();
        Ok(free.saturating_sub(promised))
    }

    pub(super) fn query_capacity(
        self: &Arc<Self>,
        host: &HostName,
        machines: &[CapacityQuery],
    ) -> Result<SpareCapacity, DaemonError> {
        let link = WireLink(self.peer_connection(host)?);
        let mut room = SpareCapacity { memory: 0, disk: 0, refused: BTreeMap::new() };
        // A query without machines still tells what is free.
        let questions = machines.chunks(MACHINES_MAX).map(<[CapacityQuery]>::to_vec);
        for question in questions.chain(machines.is_empty().then(Vec::new)) {
            let answer = call::<QueryCapacity>(&link, &question, Bytes::new());
            let (said, _) = answer.map_err(|error| crate::transfer::pull::transfer_error(host, error))?;
            (room.memory, room.disk) = (said.memory, said.disk);
            room.refused.extend(said.refused);
        }
        Ok(room)
    }
}

/// Memory that a guest may still take: all of its memory that is not populated. An incoming machine may take
/// all.
fn promised_bytes(machine: &Machine) -> u64 {
    let info = machine.info();
    match machine.dirty_observer().map(|tap| tap.extent()) {
        Some(Ok((pages, present))) => pages.saturating_sub(present) * PAGE_SIZE as u64,
        _ if matches!(info.state, MachineState::Starting | MachineState::Migrating) => info.memory.0,
        // The machine is not here, or ended just now.
        _ => 0,
    }
}

fn free_bytes(path: &std::path::Path) -> Result<u64, DaemonError> {
    let stat = rustix::fs::statvfs(path).map_err(|source| DaemonError::io("examine", path, source.into()))?;
    Ok(stat.f_bavail.saturating_mul(stat.f_frsize))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_longest_question_and_its_longest_answer_fit_into_headers() {
        let name: MachineName = "m".repeat(63).parse().unwrap();
        let machine = "pc-q35-".repeat(6);
        let ask = vec![CapacityQuery { name: name.clone(), machine }; MACHINES_MAX];
        let refused =
            vec![(name, "the name is taken, or QEMU does not know its machine type".repeat(2)); MACHINES_MAX];
        let answer = CapacityReply { memory: u64::MAX, disk: u64::MAX, refused };
        let header_max = 64 << 10;
        assert!(postcard::to_stdvec(&ask).unwrap().len() < header_max);
        assert!(postcard::to_stdvec(&answer).unwrap().len() < header_max);
    }
}
