//! Creation of running machines: new, switched off before, from a capsule, from another host, or left by an
//! earlier daemon.
//!
//! Each way ends in a paused machine. A failure leaves no QEMU and no runtime directory, except for one that
//! an earlier daemon left: that is a running machine.

use super::{
    ArrivalKind, LaunchOptions, MachineSetup, Overlay, PrestartedQemu, ProcessRecord, RamFile, Reservation,
    RunningError, RunningMachine, RunningMemory,
    builder::{MachineBuilder, launch},
    hotplug,
    runtime_dir::RuntimeDir,
};
use std::time::Duration;
use whimbrel_core::Digest;
use whimbrel_qemu::{ProcessIdentity, Qemu, Vmgenid};

/// Longest time for a killed QEMU to end.
const END_TIMEOUT: Duration = Duration::from_secs(30);

impl RunningMachine {
    /// A new machine, before its first instruction.
    pub fn boot(setup: MachineSetup, memory: Reservation) -> Result<Self, RunningError> {
        Self::boot_over(MachineBuilder::new(setup, Overlay::New, None), None, memory)
    }

    /// A machine that was switched off, before its first instruction, with the disks that it left.
    pub fn boot_again(
        setup: MachineSetup,
        vmgenid: Option<Vmgenid>,
        memory: Reservation,
    ) -> Result<Self, RunningError> {
        Self::boot_over(MachineBuilder::new(setup, Overlay::Existing, None), vmgenid, memory)
    }

    /// Opens the disks first: QEMU reads the variables of a firmware when it starts, and a TPM its state.
    fn boot_over(
        builder: MachineBuilder,
        vmgenid: Option<Vmgenid>,
        memory: Reservation,
    ) -> Result<Self, RunningError> {
        let MachineSetup { dirs, config, .. } = &builder.setup;
        let slot = RuntimeDir::create(&dirs.qemu.runtime_dirs, config, memory)?;
        let opened = builder.open_disks(&slot);
        let content = match opened.and_then(|content| content.write_tpm_file(&slot).map(|()| content)) {
            Ok(content) => content,
            Err(error) => {
                slot.remove();
                return Err(error);
            }
        };
        let warm = launch(&dirs.qemu, config, slot, LaunchOptions { incoming: false, vmgenid })?;
        builder.complete_with(warm, Ok(content))?.with_prepared_state()
    }

    /// The machine of a capsule; its memory is filled on demand. The caller loads its device state next.
    pub fn restore(
        setup: MachineSetup,
        memory: Option<Digest>,
        warm: PrestartedQemu,
    ) -> Result<Self, RunningError> {
        MachineBuilder::new(setup, Overlay::New, Some(memory)).complete(warm)
    }

    /// An incoming machine, still empty. The caller loads its device state once its pages are here.
    pub fn create_incoming(
        setup: MachineSetup,
        vmgenid: Option<Vmgenid>,
        memory: Reservation,
    ) -> Result<Self, RunningError> {
        let warm = launch_new(&setup, memory, LaunchOptions { incoming: true, vmgenid })?;
        let builder = MachineBuilder::new(setup, Overlay::New, None);
        MachineBuilder { incoming: true, arrival: ArrivalKind::ByMigration, ..builder }.complete(warm)
    }

    /// A new QEMU over the memory and disks of an incoming machine whose QEMU could not load its device
    /// state. If this fails, the pages of the old one stay. Both directories name one file, so `memory` is
    /// that of the old one.
    pub fn create_incoming_again(
        setup: MachineSetup,
        vmgenid: Option<Vmgenid>,
        memory: Reservation,
        before: &mut Self,
    ) -> Result<Self, RunningError> {
        before.disconnect();
        before.qemu.process().wait(END_TIMEOUT);
        before.dirty_logs.clear();
        before.disks.clear();
        let dirs = &setup.dirs.qemu;
        let slot = RuntimeDir::create(&dirs.runtime_dirs, &setup.config, memory)?;
        if let Err(source) = std::fs::hard_link(before.ram_path(), slot.ram()) {
            let path = slot.ram();
            slot.remove();
            return Err(RunningError::io("link", &path, source));
        }
        let warm = launch(dirs, &setup.config, slot, LaunchOptions { incoming: true, vmgenid })?;
        let builder = MachineBuilder::new(setup, Overlay::Existing, None);
        MachineBuilder { incoming: true, arrival: ArrivalKind::ByMigration, ..builder }.complete(warm)
    }

    /// Adopts the machine that an earlier process left running in `slot`.
    pub fn adopt(
        setup: MachineSetup,
        process: &ProcessRecord,
        slot: RuntimeDir,
    ) -> Result<Self, RunningError> {
        let image = process.lazy.then_some(process.memory);
        // Disks and memory first: a QEMU that waits for a page answers no command. Neither does one that was
        // told to stop when the earlier process died, until its pending disk I/O is done.
        let builder = MachineBuilder::of_passed(setup, image);
        let content = builder.open_disks(&slot)?;
        let memory = RunningMemory::adopt(&builder.setup, process.pid, &slot, image)?;
        let identity = ProcessIdentity { pid: process.pid, start_time: process.started };
        let qemu = Qemu::adopt(&slot.qemu_dir(), identity, process.ram.into());
        let qemu = qemu.map_err(|source| RunningError::qemu("adopt the process", source))?;
        hotplug::add_missing(&builder.setup.config, &qemu)?;
        let warm = PrestartedQemu { runtime_dir: slot, qemu, memory: Some(memory) };
        let mut live = builder.complete_with(warm, Ok(content))?;
        let status = live.qemu.status();
        live.restore_stream_header();
        live.paused = !status.map_err(|source| RunningError::qemu("query its status", source))?.running;
        live.follow_guest_time();
        Ok(live)
    }

    /// Unpauses a machine of this host if an operation had paused it when the earlier process died.
    pub fn unpause_after_restart(&mut self) {
        let paused = self.qemu.status().is_ok_and(|status| status.name == "paused");
        if paused && !self.is_paused_by_user() {
            tracing::info!(
                pid = self.pid(),
                "unpausing a machine that an operation had paused when the daemon died"
            );
            self.unpause();
        }
    }

    /// Gives QEMU the stream header of an adopted clone's device state, which cannot be queried. Without it
    /// the clone runs, but its device state cannot be saved.
    pub(super) fn restore_stream_header(&mut self) {
        if self.runtime_dir.ram_file() == RamFile::Own {
            return;
        }
        let found = self.runtime_dir.loaded_state().and_then(|state| {
            self.qemu.set_head(&state).map_err(|source| RunningError::Qemu {
                action: "describe its devices",
                source: source.into(),
            })
        });
        if let Err(error) = found {
            tracing::error!(error = &error as &dyn std::error::Error, "cannot save a clone's device state");
        }
    }

    /// Reads the slow part of the device state early, before anyone waits for it.
    fn with_prepared_state(mut self) -> Result<Self, RunningError> {
        match self.qemu.prepare_device_state() {
            Ok(()) => Ok(self),
            Err(source) => {
                self.end();
                Err(RunningError::Qemu { action: "describe its devices", source: source.into() })
            }
        }
    }
}

/// Starts a QEMU for a machine that is not there yet, in a runtime directory of its own.
fn launch_new(
    setup: &MachineSetup,
    memory: Reservation,
    start: LaunchOptions,
) -> Result<PrestartedQemu, RunningError> {
    let dirs = &setup.dirs.qemu;
    let slot = RuntimeDir::create(&dirs.runtime_dirs, &setup.config, memory)?;
    launch(dirs, &setup.config, slot, start)
}
