//! A machine as the engines see it while they take its state: something that can be stopped, goes on, and has
//! devices.
//!
//! What fails is said by whoever asked for it; nothing is kept here.

use super::{NetworkPort, RunningDisk};
use crate::network::late_frames;
use whimbrel_machine::{MachineError, UnpauseReport, state_then_unpause};
use whimbrel_qemu::Qemu;

/// A machine as the engines see it: QEMU, and disks that are flushed before it stops. QEMU flushes them
/// itself as part of stopping, which would count as pause; after ours there is little left for that.
pub(crate) struct PausableMachine<'a> {
    pub(crate) qemu: &'a mut Qemu,
    pub(crate) disks: &'a [RunningDisk],
    /// It was found paused by its user, and stays so whatever becomes of the work.
    pub(crate) keep_paused: bool,
    /// Ports that keep what comes for it while it stands still, if it may be handed over in that time. QEMU
    /// would keep it too, and could not be asked for it.
    pub(crate) keeping: &'a [NetworkPort],
}

impl whimbrel_machine::Machine for PausableMachine<'_> {
    fn device_state_ahead(&mut self) -> Option<Vec<u8>> {
        self.qemu.device_state_ahead()
    }

    fn about_to_pause(&mut self) {
        if let Err(error) = self.qemu.refresh_header() {
            // It is tried again, or the failure told, when the state is taken.
            tracing::warn!(error = &error as &dyn std::error::Error, "the devices cannot be described yet");
        }
        self.disks.iter().for_each(RunningDisk::sync);
    }

    fn pause(&mut self) -> Result<(), MachineError> {
        late_frames::start_buffering(self.keeping);
        self.qemu.pause().inspect_err(|_| late_frames::deliver_locally(self.keeping))
    }

    fn unpause(&mut self) -> Result<(), MachineError> {
        late_frames::deliver_locally(self.keeping);
        if self.keep_paused { Ok(()) } else { self.qemu.unpause() }
    }

    fn device_state(&mut self) -> Result<Vec<u8>, MachineError> {
        self.qemu.device_state()
    }

    fn pause_for_state(&mut self) -> Result<(), MachineError> {
        late_frames::start_buffering(self.keeping);
        let paused = if self.keep_paused { self.qemu.pause() } else { self.qemu.pause_for_state() };
        paused.inspect_err(|_| late_frames::deliver_locally(self.keeping))
    }

    fn unpause_with_state(&mut self) -> UnpauseReport {
        late_frames::deliver_locally(self.keeping);
        if self.keep_paused { state_then_unpause(self) } else { self.qemu.unpause_with_state() }
    }
}
