//! Hosts: what this host and those that it trusts run, asked when somebody looks (docs/protocols/migrate.md).

use crate::{
    core::{
        error::DaemonError,
        refs,
        rights::{self, Access, Caller},
    },
    daemon::Daemon,
    machine::memory_room,
    transfer::pull::transfer_error,
};
use bytes::Bytes;
use serde::{Deserialize, Serialize};
use std::{
    sync::{Arc, mpsc},
    time::{Duration, Instant},
};
use whimbrel_api::{HostMachines, HostMemory, MachineInfo};
use whimbrel_core::{HostName, MachineName, error_chain};
use whimbrel_transfer::{WireLink, call};
use whimbrel_wire::{Call, range};

/// Most machines in one answer: with long notes and many ports they still fit into a payload.
const PART: usize = 256;
/// Most answers of a host that are read, and most bytes of them.
const PARTS_MAX: usize = 64;
const BYTES_MAX: usize = 32 << 20;
/// Longest wait for the answers of all hosts.
const WAIT: Duration = Duration::from_secs(5);

/// Asks a host for its memory, and for its machines whose names come after one.
pub(crate) struct QueryMachines;

impl Call for QueryMachines {
    const KIND: u16 = range::MIGRATE + 0x64;
    type Header = Option<MachineName>;
    type Reply = ();
}

/// Payload of the answer, in JSON.
#[derive(Debug, Serialize, Deserialize)]
struct Part {
    memory: Option<HostMemory>,
    machines: Vec<MachineInfo>,
}

impl Daemon {
    /// Machines of this host and of all hosts that it trusts, this one first. A host that does not answer in
    /// time is there with the cause.
    pub(crate) fn hosts(self: &Arc<Self>) -> Result<Vec<HostMachines>, DaemonError> {
        let trusted = self.trust_list()?.into_iter().filter(|entry| entry.address.is_some());
        let names: Vec<HostName> =
            trusted.map(|entry| entry.name).filter(|name| *name != self.name).collect();
        let (answer, answers) = mpsc::channel();
        for name in names.clone() {
            let (host, answer) = (self.clone(), answer.clone());
            let ask = move || {
                let said = host.machines_of(&name);
                let _ = answer.send((name, said));
            };
            let thread = std::thread::Builder::new().name("hosts".into()).spawn(ask);
            thread.map_err(|source| DaemonError::Thread { source })?;
        }
        drop(answer);
        let mut machines = self.machine_infos();
        self.add_away(&mut machines);
        let memory = memory_room::host_memory(&self.memory);
        let mut all = vec![HostMachines { name: self.name.clone(), memory, machines, failure: None }];
        all.extend(names.into_iter().map(|name| HostMachines {
            name,
            memory: None,
            machines: Vec::new(),
            failure: Some(format!("no answer within {} s", WAIT.as_secs())),
        }));
        let deadline = Instant::now() + WAIT;
        while let Ok((name, said)) = answers.recv_timeout(deadline.saturating_duration_since(Instant::now()))
        {
            let Some(place) = all.iter_mut().find(|host| host.name == name) else { continue };
            match said {
                Ok(Part { memory, machines }) => {
                    *place = HostMachines { name, memory, machines, failure: None }
                }
                Err(error) => place.failure = Some(error_chain(&error)),
            }
        }
        Ok(all)
    }

    fn machines_of(&self, host: &HostName) -> Result<Part, DaemonError> {
        let link = WireLink(self.peer_connection(host)?);
        let mut whole = Part { memory: None, machines: Vec::new() };
        let mut bytes = 0;
        for _ in 0..PARTS_MAX {
            let after = whole.machines.last().map(|machine| machine.name.clone());
            let answer = call::<QueryMachines>(&link, &after, Bytes::new());
            let ((), payload) = answer.map_err(|error| transfer_error(host, error))?;
            bytes += payload.len();
            if bytes > BYTES_MAX {
                return Err(DaemonError::invalid(format!("{host} says more than a list of machines has")));
            }
            let part: Part = serde_json::from_slice(&payload).map_err(|error| {
                DaemonError::invalid(format!("{host} does not say what it runs: {error}"))
            })?;
            let is_last = part.machines.len() < PART;
            whole.memory = part.memory;
            whole.machines.extend(part.machines);
            if is_last {
                break;
            }
        }
        Ok(whole)
    }

    /// Machines that `caller` may read, without what they are made of on this host.
    pub(crate) fn answer_machines(
        &self,
        caller: &Caller,
        after: Option<&MachineName>,
    ) -> Result<Bytes, DaemonError> {
        let mut machines = self.machine_infos();
        machines.retain(|machine| {
            after.is_none_or(|after| machine.name > *after)
                && rights::may_use(caller, Access::Read, &refs::machine_ref(&machine.name))
        });
        machines.sort_by(|one, other| one.name.cmp(&other.name));
        machines.truncate(PART);
        machines.iter_mut().flat_map(|machine| &mut machine.disks).for_each(|disk| disk.base.clear());
        let part = Part { memory: memory_room::host_memory(&self.memory), machines };
        let json = serde_json::to_vec(&part);
        json.map(Bytes::from).map_err(|error| DaemonError::invalid(error.to_string()))
    }
}
