//! Usage: totals of the processes, ports and disks of each machine.

use super::{entry::Machine, registry::MachineRegistry};
use crate::now_ms;
use whimbrel_api::MachineUsage;
use whimbrel_core::ByteSize;
use whimbrel_metrics::usage_of;
use whimbrel_qemu::ControlGroup;

impl MachineRegistry {
    /// Reads what each machine that has a QEMU uses.
    pub(crate) fn usage(&self) -> Vec<MachineUsage> {
        self.all().iter().filter_map(|machine| machine.usage()).collect()
    }
}

impl Machine {
    fn usage(&self) -> Option<MachineUsage> {
        let info = self.info();
        let qemu = info.pid.and_then(usage_of)?;
        let own = info.process.and_then(|process| usage_of(process.pid));
        let processes = || [Some(qemu), own].into_iter().flatten();
        let of_processes = || processes().map(|of| (1000.0 * of.cpu_seconds) as u64).sum();
        // A group counts its TPM too, and what ended processes have used.
        let of_group = info.pid.and_then(ControlGroup::of_process).and_then(|group| group.cpu_time());
        let traffic = self.traffic().read();
        Some(MachineUsage {
            name: info.name,
            at_ms: now_ms(),
            cpu_ms: of_group.map_or_else(of_processes, |time| time.as_millis() as u64),
            resident: ByteSize(processes().map(|of| of.resident_bytes).sum()),
            received: traffic.ports.iter().map(|port| port.inbound_bytes).sum(),
            sent: traffic.ports.iter().map(|port| port.outbound_bytes).sum(),
            read: traffic.disks.iter().map(|disk| disk.read).sum(),
            written: traffic.disks.iter().map(|disk| disk.written).sum(),
        })
    }
}
