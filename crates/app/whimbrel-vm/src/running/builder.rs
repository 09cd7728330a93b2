//! Machine builder: starts a QEMU in a runtime directory and attaches memory, disks, network ports and
//! console.
//!
//! On failure the QEMU is ended and its runtime directory removed, unless an earlier daemon had left it
//! running.

use super::{
    ArrivalKind, DiskBase, GuestAgent, MachineSetup, NetworkPort, Overlay, PortTarget, PrestartedQemu,
    QemuDirs, RunningDisk, RunningError, RunningMachine, RunningMemory, Tunnel, error::Cause, network_port,
    remote_disk::Stall, runtime_dir::RuntimeDir,
};
use std::{collections::BTreeMap, sync::Arc};
use whimbrel_capture::{DirtyLog, dirty_observer::DirtyObserver};
use whimbrel_core::{Digest, MachineConfig};
use whimbrel_net::{Mac, PortFilter};
use whimbrel_qemu::{Console, LaunchSpec, Qemu, QemuGa, RamBacking, Vmgenid};
use whimbrel_store::Pin;

/// How a QEMU is started.
pub struct LaunchOptions {
    /// Whether QEMU waits for a device state.
    pub incoming: bool,
    /// The generation id that the guest keeps; none draws a new one.
    pub vmgenid: Option<Vmgenid>,
}

/// Starts a QEMU in `slot`. On failure the runtime directory is removed.
pub(super) fn launch(
    dirs: &QemuDirs,
    config: &MachineConfig,
    slot: RuntimeDir,
    start: LaunchOptions,
) -> Result<PrestartedQemu, RunningError> {
    match start_qemu(dirs, config, &slot, start) {
        Ok(qemu) => {
            slot.record_process(qemu.process().identity());
            Ok(PrestartedQemu { runtime_dir: slot, qemu, memory: None })
        }
        Err(error) => {
            slot.remove();
            Err(error)
        }
    }
}

fn start_qemu(
    dirs: &QemuDirs,
    config: &MachineConfig,
    slot: &RuntimeDir,
    start: LaunchOptions,
) -> Result<Qemu, RunningError> {
    let boot = config.boot.as_ref();
    let ram = RamBacking { path: slot.create_ram(config.memory)?, sharing: slot.ram_file().into() };
    let spec = LaunchSpec {
        disks: slot.sockets(),
        kernel: boot.map(|boot| dirs.boot_file(&boot.kernel)),
        initrd: boot.and_then(|boot| boot.initrd).map(|initrd| dirs.boot_file(&initrd)),
        firmware: config.firmware.uefi().map(|uefi| dirs.boot_file(&uefi.code)),
        vmgenid: start.vmgenid,
        incoming: start.incoming,
        network: network_port::tap_devices(config.nics.len())?,
        tpm: config.tpm.map(|_| slot.start_tpm()).transpose()?,
        ..LaunchSpec::new(config.clone(), slot.qemu_dir(), ram)
    };
    // The probe is done once and lends its error.
    let binary = whimbrel_qemu::probe().map_err(|error| Cause::from(error.to_string()));
    let binary = binary.map_err(|source| RunningError::qemu("find its binary", source))?;
    Qemu::launch(&binary.path, &spec).map_err(|source| RunningError::qemu("start it", source))
}

/// The disks of a machine, open and served.
pub(super) struct DiskContents {
    disks: Vec<RunningDisk>,
    /// Held while memory or disks are read from it.
    origin: Option<Pin>,
}

impl DiskContents {
    /// Gives its state to a TPM that is about to start.
    pub(super) fn write_tpm_file(&self, slot: &RuntimeDir) -> Result<(), RunningError> {
        self.disks.iter().try_for_each(|disk| disk.write_tpm_file(slot))
    }
}

/// Makes a machine of a QEMU in a runtime directory.
pub(super) struct MachineBuilder {
    pub(super) setup: MachineSetup,
    pub(super) overlay: Overlay,
    /// The stored image that memory is filled from, if any: its root, none for an empty image.
    pub(super) image: Option<Option<Digest>>,
    /// Reason why the machine waits for other hosts.
    pub(super) stall: Arc<Stall>,
    /// Whether it is an incoming machine.
    pub(super) incoming: bool,
    /// Whether an earlier process left the QEMU: a running machine, which survives failures here.
    pub(super) adopted: bool,
    pub(super) arrival: ArrivalKind,
}

/// What is attached to the QEMU of a machine, beside its disks.
struct Attached {
    memory: RunningMemory,
    ports: Vec<NetworkPort>,
    tunnel: Option<Box<dyn Tunnel>>,
    dirty_logs: Vec<DirtyLog>,
    observer: DirtyObserver,
    console: Arc<Console>,
    guest: GuestAgent,
    qemu_ga: Option<QemuGa>,
}

impl MachineBuilder {
    pub(super) fn new(setup: MachineSetup, overlay: Overlay, image: Option<Option<Digest>>) -> Self {
        let (stall, arrival) = (Arc::default(), ArrivalKind::Started);
        Self { setup, overlay, image, stall, incoming: false, adopted: false, arrival }
    }

    /// Builder of a machine that passes from another process, or was left by one.
    pub(super) fn of_passed(setup: MachineSetup, image: Option<Option<Digest>>) -> Self {
        let builder = Self::new(setup, Overlay::Existing, image);
        Self { adopted: true, arrival: ArrivalKind::Adopted, ..builder }
    }

    pub(super) fn complete(self, warm: PrestartedQemu) -> Result<RunningMachine, RunningError> {
        let content = self.open_disks(&warm.runtime_dir);
        self.complete_with(warm, content)
    }

    pub(super) fn open_disks(&self, slot: &RuntimeDir) -> Result<DiskContents, RunningError> {
        let Self { setup, overlay, stall, .. } = self;
        let origin = self.pin_origin()?;
        let served = setup.config.disks.len().min(setup.bases.len());
        let open = |index| RunningDisk::open(setup, stall, index, *overlay, slot);
        Ok(DiskContents { disks: (0..served).map(open).collect::<Result<_, _>>()?, origin })
    }

    /// Like [`Self::complete`], for disks that were opened already, or could not be.
    pub(super) fn complete_with(
        mut self,
        warm: PrestartedQemu,
        content: Result<DiskContents, RunningError>,
    ) -> Result<RunningMachine, RunningError> {
        let PrestartedQemu { runtime_dir: slot, qemu, memory } = warm;
        let parts = content.and_then(|content| {
            let attached = self.attach(&slot, &qemu, memory, &content.disks)?;
            content.disks.iter().for_each(RunningDisk::watch_tpm);
            Ok((content, attached))
        });
        match parts {
            Ok((DiskContents { disks, origin }, attached)) => Ok(RunningMachine {
                qemu,
                memory: attached.memory,
                disks,
                ports: attached.ports,
                away: attached.tunnel,
                dirty_logs: attached.dirty_logs,
                observer: attached.observer,
                console: attached.console,
                guest: attached.guest,
                qemu_ga: attached.qemu_ga,
                clock_is_behind: false,
                runtime_dir: slot,
                paused: true,
                stall: self.stall,
                fetcher: self.setup.fetcher.clone(),
                setup: self.setup,
                background_fetch: None,
                page_server: None,
                origin,
                bases: BTreeMap::new(),
                base_pins: [None, None],
            }),
            Err(error) => {
                if !self.adopted {
                    qemu.kill();
                    slot.remove();
                }
                Err(error)
            }
        }
    }

    /// Pins the capsule that memory or disks are read from. The origin of other machines is only a name; it
    /// may be on another host.
    pub(super) fn pin_origin(&self) -> Result<Option<Pin>, RunningError> {
        let over_image = |base: &DiskBase| matches!(base, DiskBase::Image { .. });
        // Empty memory is read from no image.
        if self.image.flatten().is_none() && !self.setup.bases.iter().any(over_image) {
            return Ok(None);
        }
        self.setup.images.pin()
    }

    /// Port of qemu-ga, if the machine has one.
    pub(super) fn qemu_ga(&self, qemu: &Qemu) -> Option<QemuGa> {
        self.setup.config.agent_port.then(|| QemuGa::new(qemu.agent_socket()))
    }

    fn attach(
        &mut self,
        slot: &RuntimeDir,
        qemu: &Qemu,
        memory: Option<RunningMemory>,
        disks: &[RunningDisk],
    ) -> Result<Attached, RunningError> {
        let memory = self.memory(slot, qemu, memory)?;
        let mut ports = self.ports(slot, qemu)?;
        let (pages, observer) = memory.pages()?;
        let mut dirty_logs = vec![DirtyLog::new(pages)];
        dirty_logs.extend(disks.iter().map(|disk| DirtyLog::new(disk.pages())));
        let (serial, log) = (slot.qemu_dir().join("serial"), &self.setup.dirs.console_log);
        let console = Console::open(&serial, log)
            .map_err(|source| RunningError::io("open the console", &serial, source))?;
        let tunnel = self.setup.tunnel.take().map(|connect| connect(&mut ports)).transpose()?;
        let guest = self.guest_port(qemu)?;
        let console = Arc::new(console);
        let qemu_ga = self.qemu_ga(qemu);
        Ok(Attached { memory, ports, tunnel, dirty_logs, observer, console, guest, qemu_ga })
    }

    fn memory(
        &self,
        slot: &RuntimeDir,
        qemu: &Qemu,
        memory: Option<RunningMemory>,
    ) -> Result<RunningMemory, RunningError> {
        let MachineSetup { fetcher, images, config, .. } = &self.setup;
        let mut memory = match memory {
            Some(memory) => memory,
            // An incoming machine with missing pages is filled on demand; a machine that boots again has its
            // own memory.
            None => {
                let lazy = self.image.is_some() || (fetcher.is_some() && self.incoming);
                RunningMemory::attach(qemu, slot, lazy)?
            }
        };
        if let Some(root) = self.image {
            memory.fill_on_demand(images, root, config.memory_pages())?;
        }
        Ok(memory)
    }

    fn ports(&self, slot: &RuntimeDir, qemu: &Qemu) -> Result<Vec<NetworkPort>, RunningError> {
        let MachineSetup { config, port_filters, tunnel, .. } = &self.setup;
        let target = if tunnel.is_some() { PortTarget::FramePipe } else { PortTarget::Bridge };
        let ports = config.nics.iter().enumerate().map(|(index, nic)| {
            // A port without a filter of its own lets no station send.
            let filter = port_filters.get(index).copied().unwrap_or(PortFilter::Only(Mac::BROADCAST));
            NetworkPort::connect((slot, qemu), index, nic, target, filter)
        });
        ports.collect()
    }

    pub(super) fn guest_port(&self, qemu: &Qemu) -> Result<GuestAgent, RunningError> {
        let MachineSetup { host, name, config, guest_requests, .. } = &self.setup;
        let (socket, pages) = (qemu.guest_socket(), config.memory_pages());
        let requests = guest_requests.clone();
        let port = GuestAgent::open((host, name), pages, socket.clone(), self.arrival, requests);
        port.map_err(|source| RunningError::io("connect to", &socket, source))
    }
}
