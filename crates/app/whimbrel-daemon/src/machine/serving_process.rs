//! Serving processes: while the daemon runs, a machine of which nobody has asked anything for a while passes
//! to the process that waits for it ([`super::waiting_process`]). No byte of its guest passes through the
//! daemon then, and a daemon that hangs does not stop it. Whoever takes the machine lock takes the machine
//! back first, and so does who opens its console or its guest agent.
//!
//! Who has a machine is decided by the swap alone (`whimbrel-vm`, `swap`). Its dirty pages pass with it, so
//! the next checkpoint reads no more than if it had stayed.
//!
//! Invariant: a machine is with the daemon, or has a serving process, never both. A process that ends without
//! having passed the machine on leaves it to be adopted, as the death of a daemon does.

use crate::{
    daemon::Daemon,
    machine::{
        entry::{Machine, MachineData},
        machine_process::end,
        waiting_process::{Passed, RETRY},
    },
};
use std::{
    path::PathBuf,
    process::Child,
    sync::{Arc, Weak},
};
use whimbrel_vm::{Reservation, RuntimeMark, Template, runtime_dir};

/// Process that has a machine of this daemon, and outlives this value.
pub(crate) struct ServingProcess {
    daemon: Weak<Daemon>,
    machine: Weak<Machine>,
    slot: PathBuf,
    /// None if it ended before it had the machine.
    child: Option<Child>,
    /// Memory of the machine, which is promised to nobody else meanwhile.
    _memory: Option<(Reservation, Option<Arc<Template>>)>,
}

impl ServingProcess {
    /// Whether the daemon is to take the machine back: the process has ended, or the guest requests
    /// something.
    pub(super) fn is_over(&mut self) -> bool {
        let lives = self.child.as_mut().is_some_and(|child| matches!(child.try_wait(), Ok(None)));
        !lives || RuntimeMark::Wanted.is_on(&self.slot)
    }

    /// Takes the machine back into `data`, or records why it has ended.
    pub(super) fn take_back(self, data: &mut MachineData) {
        // Both are there for as long as somebody can ask for the lock.
        if let (Some(daemon), Some(machine)) = (self.daemon.upgrade(), self.machine.upgrade()) {
            daemon.return_from_process(&machine, data);
        }
        // The process has nothing more to do, or must not do it.
        self.child.into_iter().for_each(|mut child| end(&mut child));
    }
}

impl Daemon {
    /// Passes a machine to the process that waits for it, unless somebody uses it without the lock.
    pub(super) fn pass_to_process(self: &Arc<Self>, machine: &Arc<Machine>, data: &mut MachineData) {
        let Some(process) = data.record.process.clone() else { return };
        if data.running.as_ref().is_none_or(|live| live.unpassable().is_some()) || !machine.begin_passing() {
            return;
        }
        let memory = match self.reservation_of_adopted(&data.record, &process) {
            Ok(memory) => memory,
            Err(error) => {
                let error = &error as &dyn std::error::Error;
                tracing::warn!(machine = %machine.name(), error, "it stays with the daemon");
                machine.end_passing();
                return machine.rest_later(RETRY);
            }
        };
        // Both are there: a process waits only for a machine that runs.
        let (Some(waiting), Some(live)) = (data.waiting.take(), data.running.take()) else { return };
        let (name, slot) = (machine.name(), live.runtime_path().to_owned());
        memory.0.taken_by(runtime_dir::ram_path(&slot));
        let serving = |child| ServingProcess {
            daemon: Arc::downgrade(self),
            machine: Arc::downgrade(machine),
            slot: slot.clone(),
            child,
            _memory: Some(memory),
        };
        match waiting.pass(live) {
            Ok(Passed::Gone { child, stopped }) => {
                tracing::info!(machine = %name, pid = child.id(), ?stopped, "at rest: its own process has it");
                data.serving = Some(serving(Some(child)));
                machine.show_passed(&slot);
            }
            Ok(Passed::Kept { machine: kept, reason }) => {
                let error = &reason as &dyn std::error::Error;
                tracing::warn!(machine = %name, error, "its own process did not get it");
                data.running = Some(*kept);
                machine.end_passing();
                machine.rest_later(RETRY);
            }
            Err(error) => {
                let error = &error as &dyn std::error::Error;
                tracing::warn!(machine = %name, error, "neither its own process nor the daemon has it");
                data.serving = Some(serving(None));
            }
        }
    }
}
