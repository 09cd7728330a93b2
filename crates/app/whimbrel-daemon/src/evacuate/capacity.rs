//! Capacity of another host, queried before an evacuation starts by one small call
//! (docs/protocols/migrate.md).
//!
//! An answer is no promise; the reservation of each migration is. It only tells early which machines will
//! find no host.

use super::plan::SpareCapacity;
use crate::{core::error::DaemonError, daemon::Daemon};
use bytes::Bytes;
use serde::{Deserialize, Serialize};
use std::{collections::BTreeMap, path::Path, sync::Arc};
use whimbrel_core::{HostName, MachineName};
use whimbrel_transfer::{WireLink, call};
use whimbrel_vm::Reservations;
use whimbrel_wire::{Call, range};

/// Most machines in one query: if all are refused, each with a reason, the header of the reply still holds
/// them.
const MACHINES_MAX: usize = 256;

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
    /// What this host has room for, and which machines of host `from` it would refuse.
    pub(crate) fn spare_capacity(
        &self,
        from: &HostName,
        machines: &[CapacityQuery],
    ) -> Result<CapacityReply, DaemonError> {
        if machines.len() > MACHINES_MAX {
            return Err(DaemonError::invalid(format!("a query names at most {MACHINES_MAX} machines")));
        }
        self.make_room();
        let qemu = self.qemu()?;
        let refusal = |machine: &CapacityQuery| {
            let known = qemu.machine_type(&machine.machine).is_some();
            let unknown =
                || DaemonError::invalid(format!("QEMU {} does not have {}", qemu.version, machine.machine));
            let free = self.check_incoming_name((&machine.name, None), from);
            free.and_then(|()| if known { Ok(()) } else { Err(unknown()) }).err()
        };
        let refused =
            machines.iter().filter_map(|machine| Some((machine.name.clone(), refusal(machine)?.to_string())));
        Ok(CapacityReply {
            memory: spare(&self.memory, &self.directories.runtime_dirs())?,
            disk: spare(&self.disk_space, self.directories.data())?,
            refused: refused.collect(),
        })
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

fn spare(of: &Reservations, folder: &Path) -> Result<u64, DaemonError> {
    of.spare().map_err(|source| DaemonError::io("examine", folder, source))
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
