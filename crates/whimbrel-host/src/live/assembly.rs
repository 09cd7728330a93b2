//! From a slot to a machine: a QEMU is started in it, and memory, disks, network ports and console are attached.
//!
//! On failure the QEMU is ended and its slot removed, unless an earlier daemon had left it running.

use super::{Live, LiveDisk, LiveMemory, LivePort, Overlay, Plug, patient::Stall};
use crate::{
    error::HostError,
    guest_helper::{Arrived, GuestPort},
    host::Host,
    record::{DiskBase, Record},
    slot::Slot,
    tunnel::AwayEnd,
    warm::WarmSlot,
};
use std::{collections::BTreeMap, sync::Arc};
use whimbrel_capture::{Ledger, tap::Tap};
use whimbrel_core::{Digest, MachineConfig};
use whimbrel_migrate::postcopy::Taking;
use whimbrel_qemu::{Console, LaunchSpec, Qemu, RamBacking, Vmgenid};
use whimbrel_store::Pin;

/// How a QEMU is started.
pub(crate) struct Start {
    /// Whether it waits for a device state.
    pub(crate) incoming: bool,
    /// The identity that the guest is to keep; none draws a new one.
    pub(crate) vmgenid: Option<Vmgenid>,
}

/// Starts a QEMU in `slot`. On failure the slot is removed.
pub(crate) fn launch(
    host: &Host,
    config: &MachineConfig,
    slot: Slot,
    start: Start,
    record: Option<&Record>,
) -> Result<WarmSlot, HostError> {
    let console_log = match record {
        None => slot.dir().join("console.log"),
        Some(record) => {
            let dir = host.layout.machine(&record.name);
            if let Err(source) = std::fs::create_dir_all(&dir) {
                slot.remove();
                return Err(HostError::io("create", &dir, source));
            }
            host.layout.console_log(&record.name)
        }
    };
    let boot = config.boot.as_ref();
    let ram = RamBacking { path: slot.ram(), sharing: slot.ram_file().into() };
    let spec = LaunchSpec {
        disks: slot.sockets(),
        kernel: boot.map(|boot| host.layout.boot_file(&boot.kernel)),
        initrd: boot.and_then(|boot| boot.initrd).map(|initrd| host.layout.boot_file(&initrd)),
        vmgenid: start.vmgenid,
        incoming: start.incoming,
        console_log: console_log.clone(),
        ..LaunchSpec::new(config.clone(), slot.dir(), ram)
    };
    let launched = host.qemu().and_then(|qemu| {
        Qemu::launch(&qemu.path, &spec)
            .map_err(|source| HostError::Qemu { action: "start it", source: source.into() })
    });
    match launched {
        Ok(qemu) => {
            slot.note(qemu.process().identity());
            Ok(WarmSlot { slot, qemu, memory: None, console_log })
        }
        Err(error) => {
            slot.remove();
            Err(error)
        }
    }
}

/// What the disks of a machine are, open and served.
pub(super) struct Content {
    disks: Vec<LiveDisk>,
    /// Held for as long as memory or disks are read from it.
    origin: Option<Pin>,
}

/// What turns a QEMU in a slot into a machine.
pub(super) struct Assembly<'a> {
    pub(super) host: &'a Host,
    pub(super) record: &'a Record,
    pub(super) overlay: Overlay,
    /// The stored image that memory is filled from, if it is: the root, none for an empty one.
    pub(super) image: Option<Option<Digest>>,
    /// Why it waits for other hosts.
    pub(super) stall: Arc<Stall>,
    /// What another host keeps of it.
    pub(super) taking: Option<Arc<Taking>>,
    /// Whether it comes from another host.
    pub(super) arriving: bool,
    /// Whether the QEMU is one that an earlier daemon left: somebody's running machine, whatever fails here.
    pub(super) adopted: bool,
    pub(super) arrived: Arrived,
}

impl<'a> Assembly<'a> {
    /// For a QEMU that is new.
    pub(super) fn new(
        host: &'a Host,
        record: &'a Record,
        overlay: Overlay,
        image: Option<Option<Digest>>,
    ) -> Self {
        let taking = crate::owing::taking_of(host, record);
        Self {
            host,
            record,
            overlay,
            image,
            stall: Arc::default(),
            taking,
            arriving: false,
            adopted: false,
            arrived: Arrived::Otherwise,
        }
    }

    pub(super) fn complete(self, warm: WarmSlot) -> Result<Live, HostError> {
        let content = self.content(&warm.slot);
        self.complete_with(warm, content)
    }

    /// Opens the disks, which are served from then on.
    pub(super) fn content(&self, slot: &Slot) -> Result<Content, HostError> {
        let Self { host, record, overlay, stall, taking, .. } = self;
        crate::owing::check(host, record)?;
        let origin = self.hold_origin()?;
        let served = record.config.disks.len().min(record.bases.len());
        let open = |index| LiveDisk::open((host, stall, taking), record, index, *overlay, slot);
        Ok(Content { disks: (0..served).map(open).collect::<Result<_, _>>()?, origin })
    }

    /// The same with disks that are open already, or could not be opened.
    pub(super) fn complete_with(
        self,
        warm: WarmSlot,
        content: Result<Content, HostError>,
    ) -> Result<Live, HostError> {
        let WarmSlot { slot, qemu, memory, console_log } = warm;
        let parts = content.and_then(|content| {
            let mut parts = self.parts(&slot, &qemu, memory, &content.disks)?;
            let away = AwayEnd::of(self.host, self.record, &mut parts.1)?;
            Ok((content, parts, away, self.guest_port(&qemu)?))
        });
        match parts {
            Ok((Content { disks, origin }, (memory, ports, ledgers, console, tap), away, guest)) => {
                Ok(Live {
                    qemu,
                    memory,
                    disks,
                    ports,
                    away,
                    ledgers,
                    tap,
                    console,
                    console_log,
                    guest,
                    slot,
                    paused: true,
                    stall: self.stall,
                    taking: self.taking,
                    bringing: None,
                    giving: None,
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

    /// Keeps the capsule that memory or disks are read from. The origin of other machines is only a name; it may
    /// be on another host.
    fn hold_origin(&self) -> Result<Option<Pin>, HostError> {
        let over_image = |base: &DiskBase| matches!(base, DiskBase::Image { .. });
        // Empty memory is read from nowhere.
        if self.image.flatten().is_none() && !self.record.bases.iter().any(over_image) {
            return Ok(None);
        }
        let pin = self.record.origin.map(|origin| self.host.store.pin(&origin)).transpose();
        pin.map_err(crate::refs::store_error("keep the capsule that the machine reads from"))
    }

    fn guest_port(&self, qemu: &Qemu) -> Result<GuestPort, HostError> {
        let (socket, pages) = (qemu.guest_socket(), self.record.config.memory_pages());
        let port = GuestPort::open(self.host, &self.record.name, pages, socket.clone(), self.arrived);
        port.map_err(|source| HostError::io("follow", &socket, source))
    }

    #[allow(clippy::type_complexity, reason = "taken apart right where it is made")]
    fn parts(
        &self,
        slot: &Slot,
        qemu: &Qemu,
        memory: Option<LiveMemory>,
        disks: &[LiveDisk],
    ) -> Result<(LiveMemory, Vec<LivePort>, Vec<Ledger>, Arc<Console>, Tap), HostError> {
        let Self { host, record, image, taking, arriving, .. } = self;
        let mut memory = match memory {
            Some(memory) => memory,
            // What arrives with pages missing is filled on demand; what boots again has its own memory.
            None => LiveMemory::attach(qemu, slot, image.is_some() || (taking.is_some() && *arriving))?,
        };
        if let Some(root) = image {
            memory.page_in_from(host, record.origin, *root, record.config.memory_pages())?;
        }
        let ports = record.config.nics.iter().enumerate();
        let plug = if host.is_away(record).is_some() { Plug::Line } else { Plug::Bridge };
        let ports =
            ports.map(|(index, nic)| LivePort::connect(slot, index, nic, plug)).collect::<Result<_, _>>()?;
        let (pages, tap) = memory.pages()?;
        let mut ledgers = vec![Ledger::new(pages)];
        ledgers.extend(disks.iter().map(|disk| Ledger::new(disk.pages())));
        let serial = slot.dir().join("serial");
        let console =
            Console::open(&serial).map_err(|source| HostError::io("open the console", &serial, source))?;
        Ok((memory, ports, ledgers, Arc::new(console), tap))
    }
}
