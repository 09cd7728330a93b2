//! Pausable machine: a running machine as the capture engine sees it, with a pause, an unpause and a device
//! state.
//!
//! Callers report its failures; nothing is stored here.

use super::{NetworkPort, RunningDisk};
use crate::network::late_frames;
use whimbrel_machine::{MachineError, UnpauseReport, state_then_unpause};
use whimbrel_qemu::Qemu;

/// QEMU, and disks that are flushed before the pause. QEMU flushes them again during the pause, which counts
/// as downtime; after the first flush that is short.
pub(crate) struct PausableMachine<'a> {
    pub(crate) qemu: &'a mut Qemu,
    pub(crate) disks: &'a [RunningDisk],
    /// The user had paused it, so it stays paused whatever happens.
    pub(crate) keep_paused: bool,
    /// Ports that buffer frames for the machine during the pause, if it may be handed over then. QEMU would
    /// buffer them too, but cannot be asked for them.
    pub(crate) buffering_ports: &'a [NetworkPort],
}

impl whimbrel_machine::Machine for PausableMachine<'_> {
    fn early_device_state(&mut self) -> Option<Vec<u8>> {
        self.qemu.early_device_state()
    }

    fn about_to_pause(&mut self) {
        if let Err(error) = self.qemu.refresh_header() {
            // Repeated when the state is saved, and a failure is reported then.
            tracing::warn!(error = &error as &dyn std::error::Error, "could not refresh the stream header");
        }
        self.disks.iter().for_each(RunningDisk::sync);
    }

    fn pause(&mut self) -> Result<(), MachineError> {
        // The pause drains the disks: writes that wait for a throttle would be downtime.
        self.disks.iter().for_each(|disk| disk.throttle().set_rate(None));
        late_frames::start_buffering(self.buffering_ports);
        self.qemu.pause().inspect_err(|_| late_frames::deliver_locally(self.buffering_ports))
    }

    fn unpause(&mut self) -> Result<(), MachineError> {
        late_frames::deliver_locally(self.buffering_ports);
        if self.keep_paused { Ok(()) } else { self.qemu.unpause() }
    }

    fn device_state(&mut self) -> Result<Vec<u8>, MachineError> {
        self.qemu.device_state()
    }

    fn pause_for_state(&mut self) -> Result<(), MachineError> {
        late_frames::start_buffering(self.buffering_ports);
        let paused = if self.keep_paused { self.qemu.pause() } else { self.qemu.pause_for_state() };
        paused.inspect_err(|_| late_frames::deliver_locally(self.buffering_ports))
    }

    fn unpause_with_state(&mut self) -> UnpauseReport {
        late_frames::deliver_locally(self.buffering_ports);
        if self.keep_paused { state_then_unpause(self) } else { self.qemu.unpause_with_state() }
    }
}
