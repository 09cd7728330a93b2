//! Pausable machine: a running machine as the capture engine sees it, with a pause, an unpause and a device
//! state. A pause also brings what the TPM has written to its disk.
//!
//! Callers report its failures; nothing is stored here.

use super::{NetworkPort, RunningDisk};
use whimbrel_machine::{MachineError, UnpauseReport, state_then_unpause};
use whimbrel_qemu::Qemu;

/// QEMU, and disks that are flushed before the pause. QEMU flushes them again during the pause, which counts
/// as downtime; after the first flush that is short.
pub struct PausableMachine<'a> {
    /// QEMU of the machine.
    pub qemu: &'a mut Qemu,
    /// Disks of the machine.
    pub disks: &'a [RunningDisk],
    /// The user had paused it, so it stays paused whatever happens.
    pub keep_paused: bool,
    /// Ports that buffer frames for the machine during the pause, if it may be handed over then. QEMU would
    /// buffer them too, but cannot be asked for them.
    pub buffering_ports: &'a [NetworkPort],
}

impl PausableMachine<'_> {
    /// Buffers frames for a machine that is about to be paused.
    fn buffer_frames(&self) {
        self.buffering_ports.iter().for_each(|port| port.port_ref().buffer_late_frames());
    }

    /// Delivers the buffered frames to a machine that runs on here.
    fn deliver_frames(&self) {
        self.buffering_ports.iter().for_each(|port| port.port_ref().deliver_late_frames());
    }
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

    fn about_to_pause_for_state(&mut self) {
        self.about_to_pause();
        if !self.keep_paused {
            self.qemu.about_to_pause_for_state();
        }
    }

    fn pause(&mut self) -> Result<(), MachineError> {
        // The pause drains the disks: writes that wait for a throttle would be downtime.
        self.disks.iter().for_each(|disk| disk.throttle().set_rate(None));
        self.buffer_frames();
        self.qemu.pause().inspect_err(|_| self.deliver_frames())?;
        self.disks.iter().for_each(RunningDisk::save_tpm);
        Ok(())
    }

    fn unpause(&mut self) -> Result<(), MachineError> {
        self.deliver_frames();
        if self.keep_paused { Ok(()) } else { self.qemu.unpause() }
    }

    fn device_state(&mut self) -> Result<Vec<u8>, MachineError> {
        self.qemu.device_state()
    }

    fn pause_for_state(&mut self) -> Result<(), MachineError> {
        self.buffer_frames();
        let paused = if self.keep_paused { self.qemu.pause() } else { self.qemu.pause_for_state() };
        paused.inspect_err(|_| self.deliver_frames())?;
        self.disks.iter().for_each(RunningDisk::save_tpm);
        Ok(())
    }

    fn unpause_with_state(&mut self) -> UnpauseReport {
        self.deliver_frames();
        if self.keep_paused { state_then_unpause(self) } else { self.qemu.unpause_with_state() }
    }
}
