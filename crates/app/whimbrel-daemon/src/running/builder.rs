//! Machine builder: starts a QEMU in a runtime directory and attaches memory, disks, network ports and
//! console.
//!
//! On failure the QEMU is ended and its runtime directory removed, unless an earlier daemon had left it
//! running.

use super::{
    NetworkPort, Overlay, PortTarget, RunningDisk, RunningMachine, RunningMemory, network_port,
    remote_disk::Stall,
};
use crate::{
    core::error::DaemonError,
    daemon::Daemon,
    guest::{ArrivalKind, GuestAgent},
    machine::{
        folder,
        prestarted_qemu::PrestartedQemu,
        record::{DiskBase, Record},
        runtime_dir::RuntimeDir,
    },
    network::tunnel::AwayEnd,
};
use std::{collections::BTreeMap, sync::Arc};
use whimbrel_capture::{DirtyLog, dirty_observer::DirtyObserver};
use whimbrel_core::{Digest, MachineConfig};
use whimbrel_migrate::postcopy::PageFetcher;
use whimbrel_qemu::{Console, LaunchSpec, Qemu, RamBacking, Vmgenid};
use whimbrel_store::Pin;

pub(crate) struct LaunchOptions {
    /// Whether QEMU waits for a device state.
    pub(crate) incoming: bool,
    /// The generation id that the guest keeps; none draws a new one.
    pub(crate) vmgenid: Option<Vmgenid>,
}

/// Starts a QEMU in `slot`. On failure the runtime directory is removed.
pub(crate) fn launch(
    host: &Daemon,
    config: &MachineConfig,
    slot: RuntimeDir,
    start: LaunchOptions,
) -> Result<PrestartedQemu, DaemonError> {
    match start_qemu(host, config, &slot, start) {
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
    host: &Daemon,
    config: &MachineConfig,
    slot: &RuntimeDir,
    start: LaunchOptions,
) -> Result<Qemu, DaemonError> {
    let boot = config.boot.as_ref();
    let ram = RamBacking { path: slot.create_ram(config.memory)?, sharing: slot.ram_file().into() };
    let spec = LaunchSpec {
        disks: slot.sockets(),
        kernel: boot.map(|boot| host.directories.boot_file(&boot.kernel)),
        initrd: boot.and_then(|boot| boot.initrd).map(|initrd| host.directories.boot_file(&initrd)),
        vmgenid: start.vmgenid,
        incoming: start.incoming,
        network: network_port::tap_devices(config.nics.len())?,
        ..LaunchSpec::new(config.clone(), slot.qemu_dir(), ram)
    };
    Qemu::launch(&host.qemu()?.path, &spec)
        .map_err(|source| DaemonError::Qemu { action: "start it", source: source.into() })
}

/// The disks of a machine, open and served.
pub(super) struct DiskContents {
    disks: Vec<RunningDisk>,
    /// Held while memory or disks are read from it.
    origin: Option<Pin>,
}

/// Makes a machine of a QEMU in a runtime directory.
pub(super) struct MachineBuilder<'a> {
    pub(super) host: &'a Daemon,
    pub(super) record: &'a Record,
    pub(super) overlay: Overlay,
    /// The stored image that memory is filled from, if any: its root, none for an empty image.
    pub(super) image: Option<Option<Digest>>,
    /// Reason why the machine waits for other hosts.
    pub(super) stall: Arc<Stall>,
    pub(super) fetcher: Option<Arc<PageFetcher>>,
    /// Whether it is an incoming machine.
    pub(super) incoming: bool,
    /// Whether an earlier daemon left the QEMU: a running machine, which survives failures here.
    pub(super) adopted: bool,
    pub(super) arrival: ArrivalKind,
}

impl<'a> MachineBuilder<'a> {
    pub(super) fn new(
        host: &'a Daemon,
        record: &'a Record,
        overlay: Overlay,
        image: Option<Option<Digest>>,
    ) -> Self {
        let fetcher = crate::migrate::target::missing_pages::fetcher_of(host, record);
        Self {
            host,
            record,
            overlay,
            image,
            stall: Arc::default(),
            fetcher,
            incoming: false,
            adopted: false,
            arrival: ArrivalKind::Started,
        }
    }

    pub(super) fn complete(self, warm: PrestartedQemu) -> Result<RunningMachine, DaemonError> {
        let content = self.open_disks(&warm.runtime_dir);
        self.complete_with(warm, content)
    }

    pub(super) fn open_disks(&self, slot: &RuntimeDir) -> Result<DiskContents, DaemonError> {
        let Self { host, record, overlay, stall, fetcher: taking, .. } = self;
        crate::migrate::target::missing_pages::check(host, record)?;
        if *overlay == Overlay::New {
            folder::prepare(&host.directories, &record.name)?;
        }
        let origin = self.pin_origin()?;
        let served = record.config.disks.len().min(record.bases.len());
        let open = |index| RunningDisk::open((host, stall, taking), record, index, *overlay, slot);
        Ok(DiskContents { disks: (0..served).map(open).collect::<Result<_, _>>()?, origin })
    }

    /// Like [`Self::complete`], for disks that were opened already, or could not be.
    pub(super) fn complete_with(
        self,
        warm: PrestartedQemu,
        content: Result<DiskContents, DaemonError>,
    ) -> Result<RunningMachine, DaemonError> {
        let PrestartedQemu { runtime_dir: slot, qemu, memory } = warm;
        let parts = content.and_then(|content| {
            let mut parts = self.parts(&slot, &qemu, memory, &content.disks)?;
            let away = AwayEnd::of(self.host, self.record, &mut parts.1)?;
            Ok((content, parts, away, self.guest_port(&qemu)?))
        });
        match parts {
            Ok((DiskContents { disks, origin }, (memory, ports, ledgers, console, tap), away, guest)) => {
                Ok(RunningMachine {
                    qemu,
                    memory,
                    disks,
                    ports,
                    away,
                    dirty_logs: ledgers,
                    observer: tap,
                    console,
                    guest,
                    runtime_dir: slot,
                    paused: true,
                    stall: self.stall,
                    fetcher: self.fetcher,
                    background_fetch: None,
                    page_server: None,
                    _origin: origin,
                    bases: BTreeMap::new(),
                    _bases: [None, None],
                })
            }
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
    fn pin_origin(&self) -> Result<Option<Pin>, DaemonError> {
        let over_image = |base: &DiskBase| matches!(base, DiskBase::Image { .. });
        // Empty memory is read from no image.
        if self.image.flatten().is_none() && !self.record.bases.iter().any(over_image) {
            return Ok(None);
        }
        let pin = self.record.origin.map(|origin| self.host.store.pin(&origin)).transpose();
        pin.map_err(crate::core::refs::store_error("pin the capsule that the machine reads from"))
    }

    fn guest_port(&self, qemu: &Qemu) -> Result<GuestAgent, DaemonError> {
        let (socket, pages) = (qemu.guest_socket(), self.record.config.memory_pages());
        let port = GuestAgent::open(self.host, &self.record.name, pages, socket.clone(), self.arrival);
        port.map_err(|source| DaemonError::io("connect to", &socket, source))
    }

    #[allow(clippy::type_complexity, reason = "taken apart right where it is made")]
    fn parts(
        &self,
        slot: &RuntimeDir,
        qemu: &Qemu,
        memory: Option<RunningMemory>,
        disks: &[RunningDisk],
    ) -> Result<(RunningMemory, Vec<NetworkPort>, Vec<DirtyLog>, Arc<Console>, DirtyObserver), DaemonError>
    {
        let Self { host, record, image, fetcher: taking, incoming: arriving, .. } = self;
        let mut memory = match memory {
            Some(memory) => memory,
            // An incoming machine with missing pages is filled on demand; a machine that boots again has its
            // own memory.
            None => RunningMemory::attach(qemu, slot, image.is_some() || (taking.is_some() && *arriving))?,
        };
        if let Some(root) = image {
            memory.fill_on_demand(host, record.origin, *root, record.config.memory_pages())?;
        }
        let ports = record.config.nics.iter().enumerate();
        let plug =
            if host.away_tunnel(record).is_some() { PortTarget::FramePipe } else { PortTarget::Bridge };
        let ports = ports
            .map(|(index, nic)| {
                NetworkPort::connect((slot, qemu), index, nic, plug, host.port_filter(&record.name, nic))
            })
            .collect::<Result<_, _>>()?;
        let (pages, tap) = memory.pages()?;
        let mut ledgers = vec![DirtyLog::new(pages)];
        ledgers.extend(disks.iter().map(|disk| DirtyLog::new(disk.pages())));
        let serial = slot.qemu_dir().join("serial");
        let log = host.directories.console_log(&record.name);
        let console = Console::open(&serial, &log)
            .map_err(|source| DaemonError::io("open the console", &serial, source))?;
        Ok((memory, ports, ledgers, Arc::new(console), tap))
    }
}
