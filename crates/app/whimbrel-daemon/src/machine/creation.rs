//! Creation of running machines by the daemon: it reserves their memory, makes their folder, and gives each
//! the values that it needs of this host.
//!
//! Each way ends in a paused machine. A failure leaves no QEMU and no runtime directory, except for one that
//! an earlier daemon left: that is a running machine.

use crate::{
    core::error::DaemonError,
    daemon::Daemon,
    guest::GuestRequestHandler,
    machine::{folder, record::Record},
    migrate::target::missing_pages,
};
use std::sync::Arc;
use whimbrel_core::Digest;
use whimbrel_qemu::Vmgenid;
use whimbrel_vm::{
    CapsuleImages, MachineSetup, PrestartedQemu, ProcessRecord, RamFile, Reservation, RunningMachine,
    Template,
    runtime_dir::{self, RuntimeDir},
};

impl Daemon {
    /// A new machine, before its first instruction.
    pub(crate) fn boot(&self, record: &Record) -> Result<RunningMachine, DaemonError> {
        let memory = self.reserve_memory(record.config.memory)?;
        let setup = self.setup_of_new(record)?;
        Ok(RunningMachine::boot(setup, memory)?)
    }

    /// A machine that was switched off, before its first instruction, with the disks that it left.
    pub(crate) fn boot_again(
        &self,
        record: &Record,
        vmgenid: Option<Vmgenid>,
    ) -> Result<RunningMachine, DaemonError> {
        let memory = self.reserve_memory(record.config.memory)?;
        let setup = self.machine_setup(record)?;
        Ok(RunningMachine::boot_again(setup, vmgenid, memory)?)
    }

    /// The machine of a capsule, whose memory is filled from the image `memory` on demand. The caller loads
    /// its device state next.
    pub(crate) fn restore_machine(
        &self,
        record: &Record,
        memory: Option<Digest>,
        warm: PrestartedQemu,
    ) -> Result<RunningMachine, DaemonError> {
        match self.setup_of_new(record) {
            Ok(setup) => Ok(RunningMachine::restore(setup, memory, warm)?),
            Err(error) => {
                warm.end();
                Err(error)
            }
        }
    }

    /// An incoming machine, still empty. The caller loads its device state once its pages are here.
    pub(crate) fn create_incoming(
        &self,
        record: &Record,
        vmgenid: Option<Vmgenid>,
        memory: Reservation,
    ) -> Result<RunningMachine, DaemonError> {
        let setup = self.setup_of_new(record)?;
        Ok(RunningMachine::create_incoming(setup, vmgenid, memory)?)
    }

    /// A new QEMU over the memory and disks of an incoming machine whose QEMU could not load its device
    /// state. If this fails, the pages of the old one stay.
    pub(crate) fn create_incoming_again(
        &self,
        record: &Record,
        vmgenid: Option<Vmgenid>,
        before: &mut RunningMachine,
    ) -> Result<RunningMachine, DaemonError> {
        let setup = self.machine_setup(record)?;
        // Both runtime directories name one file, whose bytes are reserved already.
        let memory = self.memory.adopt(record.config.memory.0);
        Ok(RunningMachine::create_incoming_again(setup, vmgenid, memory, before)?)
    }

    /// Adopts the machine that an earlier daemon left running.
    pub(crate) fn adopt_machine(
        &self,
        record: &Record,
        process: &ProcessRecord,
    ) -> Result<RunningMachine, DaemonError> {
        if let Some(machine) = self.take_from_process(record, process)? {
            return Ok(machine);
        }
        let setup = self.machine_setup(record)?;
        let (own, template) = self.reservation_of_adopted(record, process)?;
        let runtime_dirs = &setup.dirs.qemu.runtime_dirs;
        let mut slot = RuntimeDir::adopt(runtime_dirs, &process.slot, &record.config, own)?;
        template.into_iter().for_each(|template| slot.hold_template(template));
        Ok(RunningMachine::adopt(setup, process, slot)?)
    }

    /// Memory of a machine that runs already, and its template if it is a clone.
    pub(super) fn reservation_of_adopted(
        &self,
        record: &Record,
        process: &ProcessRecord,
    ) -> Result<(Reservation, Option<Arc<Template>>), DaemonError> {
        let size = record.config.memory;
        if process.ram == RamFile::Own {
            return Ok((self.memory.adopt(size.0), None));
        }
        let ram = runtime_dir::ram_path(&self.directories.runtime_dir(&process.slot));
        let content = (process.memory, size);
        let template = self.prestarted.templates.adopt(content, &ram, self.memory.adopt(size.0))?;
        Ok((self.memory.adopt(0), Some(template)))
    }

    /// Setup of a machine whose disks begin empty; makes its folder.
    fn setup_of_new(&self, record: &Record) -> Result<MachineSetup, DaemonError> {
        let setup = self.machine_setup(record)?;
        folder::prepare(&self.directories, &record.name)?;
        Ok(setup)
    }

    /// What the machine of a record needs of this host.
    pub(super) fn machine_setup(&self, record: &Record) -> Result<MachineSetup, DaemonError> {
        missing_pages::check(self, record)?;
        let filter = |nic| self.port_filter(&record.name, nic);
        let requests = GuestRequestHandler { host: self.me.clone(), machine: record.name.clone() };
        Ok(MachineSetup {
            host: self.name.clone(),
            name: record.name.clone(),
            config: record.config.clone(),
            bases: record.bases.clone(),
            dirs: self.directories.machine_dirs(&record.name),
            images: CapsuleImages { store: self.store.clone(), capsule: record.origin },
            fetcher: missing_pages::fetcher_of(self, record),
            port_filters: record.config.nics.iter().map(filter).collect(),
            tunnel: self.away_end(record),
            guest_requests: Arc::new(requests),
        })
    }
}
