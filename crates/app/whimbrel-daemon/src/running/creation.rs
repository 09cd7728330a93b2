//! Creation of running machines: new, switched off before, from a capsule, from another host, or left by an
//! earlier daemon.
//!
//! Each way ends in a paused machine. A failure leaves no QEMU and no runtime directory, except for one that
//! an earlier daemon left: that is a running machine.

use super::{
    Overlay, RunningMachine, RunningMemory,
    builder::{LaunchOptions, MachineBuilder, launch},
};
use crate::{
    core::error::DaemonError,
    daemon::Daemon,
    guest::ArrivalKind,
    machine::{
        prestarted_qemu::PrestartedQemu,
        record::{ProcessRecord, RamFile, Record},
        reservations::Reservation,
        runtime_dir::RuntimeDir,
    },
};
use std::time::Duration;
use whimbrel_core::Digest;
use whimbrel_qemu::{ProcessIdentity, Qemu, Vmgenid};

/// Longest time for a killed QEMU to end.
const END_TIMEOUT: Duration = Duration::from_secs(30);

impl RunningMachine {
    /// A new machine, before its first instruction.
    pub(crate) fn boot(host: &Daemon, record: &Record) -> Result<Self, DaemonError> {
        let memory = host.reserve_memory(record.config.memory)?;
        let slot = RuntimeDir::create(&host.directories, &record.config, memory)?;
        let start = LaunchOptions { incoming: false, vmgenid: None };
        let warm = launch(host, &record.config, slot, start)?;
        MachineBuilder::new(host, record, Overlay::New, None).complete(warm)?.with_prepared_state()
    }

    /// A machine that was switched off, before its first instruction, with the disks that it left.
    pub(crate) fn boot_again(
        host: &Daemon,
        record: &Record,
        vmgenid: Option<Vmgenid>,
    ) -> Result<Self, DaemonError> {
        let memory = host.reserve_memory(record.config.memory)?;
        let slot = RuntimeDir::create(&host.directories, &record.config, memory)?;
        let warm = launch(host, &record.config, slot, LaunchOptions { incoming: false, vmgenid })?;
        MachineBuilder::new(host, record, Overlay::Existing, None).complete(warm)?.with_prepared_state()
    }

    /// The machine of a capsule; its memory is filled on demand. The caller loads its device state next.
    pub(crate) fn restore(
        host: &Daemon,
        record: &Record,
        memory: Option<Digest>,
        warm: PrestartedQemu,
    ) -> Result<Self, DaemonError> {
        MachineBuilder::new(host, record, Overlay::New, Some(memory)).complete(warm)
    }

    /// An incoming machine, still empty. The caller loads its device state once its pages are here.
    pub(crate) fn create_incoming(
        host: &Daemon,
        record: &Record,
        vmgenid: Option<Vmgenid>,
        memory: Reservation,
    ) -> Result<Self, DaemonError> {
        let slot = RuntimeDir::create(&host.directories, &record.config, memory)?;
        let warm = launch(host, &record.config, slot, LaunchOptions { incoming: true, vmgenid })?;
        let assembly = MachineBuilder::new(host, record, Overlay::New, None);
        MachineBuilder { incoming: true, arrival: ArrivalKind::ByMigration, ..assembly }.complete(warm)
    }

    /// A new QEMU over the memory and disks of an incoming machine whose QEMU could not load its device
    /// state. If this fails, the pages of the old one stay.
    pub(crate) fn create_incoming_again(
        host: &Daemon,
        record: &Record,
        vmgenid: Option<Vmgenid>,
        before: &mut Self,
    ) -> Result<Self, DaemonError> {
        before.disconnect();
        before.qemu.process().wait(END_TIMEOUT);
        before.dirty_logs.clear();
        before.disks.clear();
        // Both directories name one file, whose bytes are reserved already.
        let memory = host.memory.adopt(record.config.memory.0);
        let slot = RuntimeDir::create(&host.directories, &record.config, memory)?;
        if let Err(source) = std::fs::hard_link(before.ram_path(), slot.ram()) {
            let path = slot.ram();
            slot.remove();
            return Err(DaemonError::io("link", &path, source));
        }
        let warm = launch(host, &record.config, slot, LaunchOptions { incoming: true, vmgenid })?;
        let assembly = MachineBuilder::new(host, record, Overlay::Existing, None);
        MachineBuilder { incoming: true, arrival: ArrivalKind::ByMigration, ..assembly }.complete(warm)
    }

    /// Adopts the machine that an earlier daemon left running.
    pub(crate) fn adopt(
        host: &Daemon,
        record: &Record,
        process: &ProcessRecord,
    ) -> Result<Self, DaemonError> {
        let size = record.config.memory;
        let (own, shared) = match process.ram {
            RamFile::Own => (host.memory.adopt(size.0), None),
            RamFile::Template => (host.memory.adopt(0), Some(host.memory.adopt(size.0))),
        };
        let mut slot = RuntimeDir::adopt(&host.directories, &process.slot, &record.config, own)?;
        if let Some(memory) = shared {
            let content = (process.memory, size);
            slot.hold_template(host.prestarted.templates.adopt(content, &slot.ram(), memory)?);
        }
        let image = process.lazy.then_some(process.memory);
        // Disks and memory first: a QEMU that waits for a page answers no command. Neither does one that was
        // told to stop when the earlier daemon died, until its pending disk I/O is done.
        let assembly = MachineBuilder::new(host, record, Overlay::Existing, image);
        let assembly = MachineBuilder { adopted: true, arrival: ArrivalKind::Adopted, ..assembly };
        let content = assembly.open_disks(&slot)?;
        let taking = crate::migrate::target::missing_pages::fetcher_of(host, record);
        let memory = RunningMemory::adopt(host, process.pid, &slot, record, (image, taking))?;
        let identity = ProcessIdentity { pid: process.pid, start_time: process.started };
        let qemu = Qemu::adopt(&slot.qemu_dir(), identity, process.ram.into());
        let qemu =
            qemu.map_err(|source| DaemonError::Qemu { action: "adopt the process", source: source.into() })?;
        let warm = PrestartedQemu { runtime_dir: slot, qemu, memory: Some(memory) };
        let mut live = assembly.complete_with(warm, Ok(content))?;
        let status = live.qemu.status();
        live.restore_stream_header();
        live.paused = !status
            .map_err(|source| DaemonError::Qemu { action: "query its status", source: source.into() })?
            .running;
        Ok(live)
    }

    /// Unpauses a machine of this host if an operation had paused it when the daemon died.
    pub(crate) fn unpause_after_restart(&mut self) {
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
    fn restore_stream_header(&mut self) {
        if self.runtime_dir.ram_file() == RamFile::Own {
            return;
        }
        let found = self.runtime_dir.loaded_state().and_then(|state| {
            self.qemu
                .set_head(&state)
                .map_err(|source| DaemonError::Qemu { action: "describe its devices", source: source.into() })
        });
        if let Err(error) = found {
            tracing::error!(error = &error as &dyn std::error::Error, "cannot save a clone's device state");
        }
    }

    /// Reads the slow part of the device state early, before anyone waits for it.
    fn with_prepared_state(mut self) -> Result<Self, DaemonError> {
        match self.qemu.prepare_device_state() {
            Ok(()) => Ok(self),
            Err(source) => {
                self.end();
                Err(DaemonError::Qemu { action: "describe its devices", source: source.into() })
            }
        }
    }
}
