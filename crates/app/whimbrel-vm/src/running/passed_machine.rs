//! A running machine that passes to another process: its description, what keeps it here, and the machine
//! that the other process makes of it.
//!
//! A description is input from outside: what is opened by it belongs to the process that reads it.

use super::{
    DiskBase, MachineDirs, MachineSetup, NetworkPort, ProcessRecord, Reservation, RunningDisk, RunningError,
    RunningMachine, RunningMemory, Stall, Template,
    builder::MachineBuilder,
    capsule_images::store_error,
    disk::{BaseDisk, BaseFile},
    runtime_dir::RuntimeDir,
};
use crate::{
    channel::{ChannelError, seal, unseal},
    exchange::PassError,
};
use serde::{Deserialize, Serialize};
use std::{
    collections::BTreeMap,
    fs::File,
    os::{fd::OwnedFd, unix::net::UnixListener},
    sync::Arc,
    thread,
};
use whimbrel_alignment::PageAlignment;
use whimbrel_block::{OverlayFiles, OverlayState};
use whimbrel_capture::{Consumer, DirtyLog, dirty_observer::DirtyObserver};
use whimbrel_core::{CapsuleId, Digest, HostName, MachineConfig, MachineName};
use whimbrel_machine::Machine as _;
use whimbrel_net::PortFilter;
use whimbrel_qemu::{Console, Qemu};
use whimbrel_store::{DataKey, MasterKeyError, Pin};

/// Most bytes of a description: alignments of disks with many partitions are the largest part.
const MAX_DESCRIPTION: u64 = 16 << 20;

/// Description of a running machine for another process.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct MachineDescription {
    /// Host that runs it.
    pub host: HostName,
    /// Name of the machine.
    pub name: MachineName,
    /// Hardware of the machine.
    pub config: MachineConfig,
    /// Base of each disk's overlay.
    pub bases: Vec<DiskBase>,
    /// Folders of the machine.
    pub dirs: MachineDirs,
    /// Data key of the store, if that is encrypted.
    pub store_key: Option<StoreKey>,
    /// Capsule that it was resumed from.
    pub capsule: Option<CapsuleId>,
    /// Frames that each network port lets the guest send.
    pub port_filters: Vec<PortFilter>,
    /// QEMU process, its runtime directory and its kind of memory.
    pub process: ProcessRecord,
    /// Name of the content of each disk's base, if that is a file, whose descriptor passes.
    base_files: Vec<Option<Digest>>,
    /// Alignment in which the store reads each disk.
    alignments: Vec<Option<PageAlignment>>,
    /// Base images of the store's dirty sets, and the capsules that are to be pinned for them.
    stored: BTreeMap<String, Option<Digest>>,
    stored_in: [Option<CapsuleId>; 2],
}

/// Data key of a store on its way to another process. It passes in memory alone: a sealed file without a
/// name.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(into = "String", try_from = "String")]
pub struct StoreKey(pub DataKey);

impl From<StoreKey> for String {
    fn from(StoreKey(key): StoreKey) -> Self {
        key.reveal()
    }
}

impl TryFrom<String> for StoreKey {
    type Error = MasterKeyError;

    fn try_from(text: String) -> Result<Self, MasterKeyError> {
        text.parse().map(Self)
    }
}

/// What a machine needs of the process that it passes to.
pub struct MachinePlace {
    /// Setup of the machine.
    pub setup: MachineSetup,
    /// Memory that is promised to it.
    pub memory: Reservation,
    /// Template of its memory, if it is a clone.
    pub template: Option<Arc<Template>>,
}

impl MachineDescription {
    /// The description in a file that cannot be changed any more.
    pub(crate) fn seal(&self) -> Result<OwnedFd, PassError> {
        let text = serde_json::to_vec(self).map_err(|source| PassError::Description { source })?;
        Ok(seal(&text)?)
    }

    /// Reads a description that was sealed.
    pub(crate) fn unseal(file: OwnedFd) -> Result<Self, PassError> {
        let text: Result<_, ChannelError> = unseal(file, MAX_DESCRIPTION);
        serde_json::from_slice(&text?).map_err(|source| PassError::Description { source })
    }

    fn image(&self) -> Option<Option<Digest>> {
        self.process.lazy.then_some(self.process.memory)
    }
}

impl RunningMachine {
    /// Key of the store that it reads, if that is encrypted.
    pub(crate) fn store_key(&self) -> Option<&DataKey> {
        self.setup.images.store.data_key()
    }

    /// Description for another process.
    pub(crate) fn description(&self) -> MachineDescription {
        let MachineSetup { host, name, config, bases, dirs, images, port_filters, .. } = &self.setup;
        MachineDescription {
            host: host.clone(),
            name: name.clone(),
            config: config.clone(),
            bases: bases.clone(),
            dirs: dirs.clone(),
            store_key: self.store_key().cloned().map(StoreKey),
            capsule: images.capsule,
            port_filters: port_filters.clone(),
            process: self.process_record(),
            base_files: self.disks.iter().map(|disk| Some(disk.base_file()?.id)).collect(),
            alignments: self.disks.iter().map(|disk| disk.alignment().cloned()).collect(),
            stored: self.bases.clone(),
            stored_in: self.base_pins.each_ref().map(|pin| pin.as_ref().map(Pin::capsule)),
        }
    }

    /// What keeps the machine in this process; none if it can pass to another one.
    pub fn unpassable(&self) -> Option<&'static str> {
        let has = |who| self.dirty_logs.iter().any(|log| log.is_attached(who));
        let reasons = [
            (self.away.is_some(), "a tunnel to its network"),
            (self.page_server.is_some(), "pages that another host still fetches"),
            (!self.is_complete(), "pages that are missing here"),
            (self.memory.lacks_remote_pages(), "memory that is still on other hosts"),
            (self.disks.iter().any(|disk| disk.remote().is_some()), "a disk that is on other hosts"),
            (has(Consumer::Migration), "a move under way"),
            (has(Consumer::Standby), "a standby"),
            (self.guest.is_requesting(), "a request of its guest under way"),
        ];
        reasons.into_iter().find_map(|(is_so, what)| is_so.then_some(what))
    }
}

impl RunningMachine {
    /// Fills memory on demand again, and continues the guest if it is to run. Both at once: a pager that ends
    /// may wait for a page, and QEMU for the pager.
    pub(crate) fn serve_memory_and(&mut self, runs: bool) -> Result<(), RunningError> {
        let Self { memory, qemu, .. } = self;
        let (served, continued) = thread::scope(|scope| {
            let serving = scope.spawn(|| memory.serve());
            let continued = if runs { qemu.unpause() } else { Ok(()) };
            (serving.join().unwrap_or_else(|panic| std::panic::resume_unwind(panic)), continued)
        });
        served?;
        continued.map_err(|source| RunningError::qemu("continue the machine", source))?;
        self.paused = !runs;
        Ok(())
    }
}

/// Descriptors of a disk of another process.
pub(crate) struct OfferedDisk {
    pub(crate) files: OverlayFiles,
    /// Socket on which QEMU connects.
    pub(crate) listener: UnixListener,
    /// The base, if that is a file.
    pub(crate) base: Option<File>,
}

/// A machine of another process, of which all is open that can be while that one has it. Nothing acts.
pub(crate) struct OfferedMachine {
    builder: MachineBuilder,
    description: MachineDescription,
    runtime_dir: RuntimeDir,
    memory: RunningMemory,
    bases: Vec<BaseDisk>,
    files: Vec<OverlayFiles>,
    origin: Option<Pin>,
    base_pins: [Option<Pin>; 2],
}

/// A machine of another process that is built, but for what acts on it.
pub(crate) struct BuiltMachine {
    builder: MachineBuilder,
    pub(crate) runtime_dir: RuntimeDir,
    pub(crate) memory: RunningMemory,
    disks: Vec<RunningDisk>,
    pub(crate) dirty_logs: Vec<DirtyLog>,
    observer: DirtyObserver,
    origin: Option<Pin>,
    bases: BTreeMap<String, Option<Digest>>,
    base_pins: [Option<Pin>; 2],
}

impl OfferedMachine {
    /// Opens what the description names, and pins what it reads.
    pub(crate) fn open(
        description: MachineDescription,
        place: MachinePlace,
        attachment: whimbrel_memory::Attachment,
        disks: Vec<OfferedDisk>,
    ) -> Result<Self, PassError> {
        let MachinePlace { setup, memory: reserved, template } = place;
        let image = description.image();
        let served = setup.config.disks.len().min(setup.bases.len());
        let is_same = setup.config == description.config && setup.bases == description.bases;
        let counts = [disks.len(), description.alignments.len(), description.base_files.len()];
        if !is_same || counts != [served; 3] {
            return Err(PassError::Unexpected { what: "the description of another machine" });
        }
        let (mut files, mut listeners, mut base_files) = (Vec::new(), Vec::new(), Vec::new());
        for (disk, id) in disks.into_iter().zip(&description.base_files) {
            files.push(disk.files);
            listeners.push(disk.listener);
            base_files.push(match (disk.base, id) {
                (Some(file), Some(id)) => Some(BaseFile::passed(file, *id)),
                (None, None) => None,
                _ => return Err(PassError::Unexpected { what: "a base of another kind" }),
            });
        }
        let (dirs, slot) = (&setup.dirs.qemu.runtime_dirs, &description.process.slot);
        let mut runtime_dir = RuntimeDir::passed(dirs, slot, (&setup.config, reserved), listeners);
        template.into_iter().for_each(|template| runtime_dir.hold_template(template));
        let memory = RunningMemory::passed(attachment, &setup, &runtime_dir, image)?;
        let builder = MachineBuilder::of_passed(setup, image);
        let open = |base| BaseDisk::open(&builder.setup, &builder.stall, base);
        let bases = base_files.into_iter().enumerate().map(open).collect::<Result<_, _>>()?;
        let origin = builder.pin_origin()?;
        let pin = |id: CapsuleId| builder.setup.images.store.pin(&id);
        let [first, second] = description.stored_in.map(|id| id.map(&pin).transpose());
        let failed = store_error("pin the base of the next capsule");
        let base_pins = [first.map_err(&failed)?, second.map_err(&failed)?];
        Ok(Self { builder, description, runtime_dir, memory, bases, files, origin, base_pins })
    }

    /// Number of its disks.
    pub(crate) fn disks(&self) -> usize {
        self.files.len()
    }

    /// Builds the machine. `overlays` are the states of its disks; none if the other process told nothing,
    /// and then no consumer follows its pages.
    pub(crate) fn build(self, overlays: Option<&[OverlayState]>) -> Result<BuiltMachine, PassError> {
        let Self { builder, description, runtime_dir, memory, bases, files, origin, base_pins } = self;
        if overlays.is_some_and(|overlays| overlays.len() != files.len()) {
            return Err(PassError::Unexpected { what: "the disks of another machine" });
        }
        let mut disks = Vec::new();
        for (index, (base, files)) in bases.into_iter().zip(files).enumerate() {
            let state = overlays.and_then(|overlays| overlays.get(index));
            disks.push(RunningDisk::passed(&builder.setup, (index, base), (files, state), &runtime_dir)?);
        }
        let (pages, observer) = memory.pages()?;
        let mut dirty_logs = vec![DirtyLog::new(pages)];
        for (disk, alignment) in disks.iter_mut().zip(description.alignments) {
            let mut log = DirtyLog::new(disk.pages());
            disk.set_alignment(&mut log, alignment)?;
            dirty_logs.push(log);
        }
        let (bases, base_pins) = match overlays {
            Some(_) => (description.stored, base_pins),
            None => (BTreeMap::new(), [None, None]),
        };
        Ok(BuiltMachine {
            builder,
            runtime_dir,
            memory,
            disks,
            dirty_logs,
            observer,
            origin,
            bases,
            base_pins,
        })
    }
}

impl BuiltMachine {
    /// The machine, paused, whose disks and memory are served now.
    pub(crate) fn complete(
        self,
        qemu: Qemu,
        ports: Vec<NetworkPort>,
        console: Console,
    ) -> Result<RunningMachine, RunningError> {
        let guest = self.builder.guest_port(&qemu)?;
        let qemu_ga = self.builder.qemu_ga(&qemu);
        let has_header = qemu.head().is_some();
        let stall: Arc<Stall> = self.builder.stall.clone();
        let mut machine = RunningMachine {
            qemu,
            memory: self.memory,
            disks: self.disks,
            ports,
            away: None,
            dirty_logs: self.dirty_logs,
            observer: self.observer,
            console: Arc::new(console),
            guest,
            qemu_ga,
            clock_is_behind: false,
            runtime_dir: self.runtime_dir,
            setup: self.builder.setup,
            paused: true,
            stall,
            fetcher: None,
            background_fetch: None,
            page_server: None,
            origin: self.origin,
            bases: self.bases,
            base_pins: self.base_pins,
        };
        machine.disks.iter().for_each(RunningDisk::watch_tpm);
        if !has_header {
            machine.restore_stream_header();
        }
        Ok(machine)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_no_description_is_refused_before_anything_is_opened() {
        for text in ["", "{}", "[1, 2", r#"{"host": "alpha", "name": "../web"}"#] {
            let file = seal(text.as_bytes()).unwrap();
            let read = MachineDescription::unseal(file);
            assert!(matches!(read, Err(PassError::Description { .. })), "{text:?}");
        }
        let open = std::fs::File::open("/dev/null").unwrap();
        assert!(matches!(MachineDescription::unseal(open.into()), Err(PassError::Channel(_))));
    }
}
