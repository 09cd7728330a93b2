//! A machine that has a QEMU: the process and everything attached to it, and how each came to be.
//!
//! Every way to make one ends in the same thing, paused: [`Live::boot`] a new machine, [`Live::restore`] a
//! capsule, [`Live::receive`] one from another host, [`Live::adopt`] one whose daemon died. Then
//! [`Live::start`]. Dropping a `Live` leaves QEMU running for the next daemon; [`Live::end`] ends it.

mod console;
mod disk;
#[cfg(test)]
mod disk_tests;
mod memory;
mod owing;
mod patient;
mod port;
mod template;

pub(crate) use console::{ConsoleView, Serial};
pub(crate) use disk::{LiveDisk, Overlay, RestingDisk, remove_overlays};
pub(crate) use memory::{LiveMemory, PagerView};
use owing::Bringing;
use patient::{Patient, Stall};
pub(crate) use port::{LivePort, Plug};
pub(crate) use template::{Content as TemplateContent, Templates};

use crate::{
    capture::Arrays,
    error::HostError,
    guest_helper::{Arrived, GuestPort},
    host::Host,
    record::{DiskBase, ProcessRecord, RamFile, Record},
    slot::{Mark, Slot},
    tunnel::AwayEnd,
    warm::WarmSlot,
};
use std::{
    collections::BTreeMap,
    path::PathBuf,
    sync::{Arc, mpsc::Receiver},
    time::{Duration, Instant},
};
use whimbrel_capture::{Follower, Ledger, tap::Tap};
use whimbrel_core::{Digest, MachineConfig, PageSet};
use whimbrel_image::ImageRef;
use whimbrel_machine::{Machine as _, MachineError};
use whimbrel_migrate::postcopy::{Giving, Taking};
use whimbrel_qemu::{Console, LaunchSpec, MachineEvent, ProcessIdentity, Qemu, RamBacking, Vmgenid};
use whimbrel_store::Pin;

/// A machine with a QEMU.
pub(crate) struct Live {
    pub(crate) qemu: Qemu,
    pub(crate) memory: LiveMemory,
    pub(crate) disks: Vec<LiveDisk>,
    pub(crate) ports: Vec<LivePort>,
    /// The way to its network, if that is on another host.
    pub(crate) away: Option<AwayEnd>,
    /// Memory first, then the disks in order.
    pub(crate) ledgers: Vec<Ledger>,
    /// For whoever looks on at what it writes to its memory.
    tap: Tap,
    console: Arc<Console>,
    console_log: PathBuf,
    /// To the program inside the guest, if it has one.
    pub(crate) guest: GuestPort,
    slot: Slot,
    paused: bool,
    /// Why it waits for other hosts, if it does.
    stall: Arc<Stall>,
    /// What another host keeps of it, if one does.
    taking: Option<Arc<Taking>>,
    bringing: Option<Bringing>,
    /// What this host keeps of it for another one, where it runs.
    pub(crate) giving: Option<Arc<Giving>>,
    /// Keeps the capsule whose pages it still reads, whatever becomes of its refs.
    _origin: Option<Pin>,
    /// Images that the store's sets of changed pages are relative to, by name. An array without one is looked at anew.
    pub(crate) bases: BTreeMap<String, Option<Digest>>,
    /// Keep the capsules that these images are of: the last one with memory, and the last one of disks only after it.
    _bases: [Option<Pin>; 2],
}

impl Live {
    /// A new machine, before its first instruction.
    pub(crate) fn boot(host: &Host, record: &Record) -> Result<Self, HostError> {
        let slot = Slot::create(&host.layout, &record.config)?;
        let start = Start { incoming: false, vmgenid: None };
        let warm = launch(host, &record.config, slot, start, Some(record))?;
        Assembly::new(host, record, Overlay::New, None).complete(warm)?.prepared()
    }

    /// A machine that was switched off, before its first instruction: its disks are as it left them.
    pub(crate) fn boot_again(
        host: &Host,
        record: &Record,
        vmgenid: Option<Vmgenid>,
    ) -> Result<Self, HostError> {
        let slot = Slot::create(&host.layout, &record.config)?;
        let warm = launch(host, &record.config, slot, Start { incoming: false, vmgenid }, Some(record))?;
        Assembly::new(host, record, Overlay::Existing, None).complete(warm)?.prepared()
    }

    /// The machine of a capsule: its memory comes when it is touched. Load its device state next.
    pub(crate) fn restore(
        host: &Host,
        record: &Record,
        memory: Option<Digest>,
        warm: WarmSlot,
    ) -> Result<Self, HostError> {
        Assembly::new(host, record, Overlay::New, Some(memory)).complete(warm)
    }

    /// An empty machine that is filled from another host. Load its device state when it is.
    pub(crate) fn receive(host: &Host, record: &Record, vmgenid: Option<Vmgenid>) -> Result<Self, HostError> {
        let slot = Slot::create(&host.layout, &record.config)?;
        let warm = launch(host, &record.config, slot, Start { incoming: true, vmgenid }, Some(record))?;
        let assembly = Assembly::new(host, record, Overlay::New, None);
        Assembly { arriving: true, arrived: Arrived::ByMigration, ..assembly }.complete(warm)
    }

    /// The machine that an earlier daemon left running.
    pub(crate) fn adopt(host: &Host, record: &Record, process: &ProcessRecord) -> Result<Self, HostError> {
        let mut slot = Slot::adopt(&host.layout, &process.slot, &record.config)?;
        if process.ram == RamFile::Template {
            let content = (process.memory, record.config.memory);
            slot.hold(host.warm.templates.adopt(content, &slot.ram())?);
        }
        let image = process.lazy.then_some(process.memory);
        // Memory first: a QEMU that waits for a page answers no command.
        crate::owing::check(host, record)?;
        let taking = crate::owing::taking_of(host, record);
        let memory = LiveMemory::adopt(host, process.pid, &slot, record, (image, taking))?;
        let identity = ProcessIdentity { pid: process.pid, start_time: process.started };
        let qemu = Qemu::adopt(slot.dir(), identity, process.ram.into());
        let qemu =
            qemu.map_err(|source| HostError::Qemu { action: "take it up again", source: source.into() })?;
        let warm =
            WarmSlot { slot, qemu, memory: Some(memory), console_log: host.layout.console_log(&record.name) };
        let assembly = Assembly { adopted: true, ..Assembly::new(host, record, Overlay::Existing, image) };
        let mut live = assembly.complete(warm)?;
        let status = live.qemu.status();
        live.find_head();
        live.paused =
            !status.map_err(|source| HostError::Qemu { action: "ask it", source: source.into() })?.running;
        Ok(live)
    }

    /// The machine is this host's, and its daemon died: if an operation had paused it, that pause is over.
    pub(crate) fn go_on_after_crash(&mut self) {
        let paused = self.qemu.status().is_ok_and(|status| status.word == "paused");
        if paused && !Mark::PausedByUser.is_on(self.slot.dir()) {
            tracing::info!(
                pid = self.pid(),
                "a machine that was paused for a moment when the daemon died goes on"
            );
            self.go_on();
        }
    }

    /// Everything of an arriving machine is here: a later daemon will know.
    pub(crate) fn mark_whole(&self) -> Result<(), HostError> {
        self.slot.mark(Mark::Whole, true)
    }

    /// Loads the device state of a machine that was made to be loaded.
    pub(crate) fn load(&mut self, device_state: &[u8]) -> Result<(), HostError> {
        self.qemu
            .load(device_state)
            .map_err(|source| HostError::Qemu { action: "load the device state", source: source.into() })?;
        match self.slot.ram_file() {
            RamFile::Own => Ok(()),
            RamFile::Template => self.slot.keep_loaded(device_state),
        }
    }

    /// Gives QEMU the part of the device state that it cannot be asked for once a clone was taken up again.
    /// Without it the clone lives on, but no state can be taken of it.
    fn find_head(&mut self) {
        if self.slot.ram_file() == RamFile::Own {
            return;
        }
        let found = self.slot.loaded().and_then(|state| {
            self.qemu
                .set_head(&state)
                .map_err(|source| HostError::Qemu { action: "describe its devices", source: source.into() })
        });
        if let Err(error) = found {
            tracing::error!(error = &error as &dyn std::error::Error, "no state can be taken of a clone");
        }
    }

    /// From now on the store's next capsule holds only what changes: these arrays are exactly those of its origin.
    pub(crate) fn is_as_stored(&mut self, images: &[ImageRef]) -> Result<(), HostError> {
        if self._origin.is_none() {
            // Nothing keeps the images, so nothing may be written against them.
            return Ok(());
        }
        for (index, ledger) in self.ledgers.iter_mut().enumerate() {
            let Some(image) = images.iter().find(|image| image.name == ledger.name()) else { continue };
            // Memory is the first, and is not cut.
            let disk = index.checked_sub(1).and_then(|index| self.disks.get_mut(index));
            match disk {
                Some(disk) => disk.cut(ledger, image.cuts.clone())?,
                None if image.cuts.is_some() => continue,
                None => {}
            }
            if image.pages == ledger.page_count_for(Follower::Store) {
                ledger.follow_from_new(Follower::Store);
                self.bases.insert(image.name.clone(), image.root);
            }
        }
        Ok(())
    }

    /// Sees to it that the store sees each disk cut like its next image.
    pub(crate) fn cut_disks(&mut self, host: &Host, record: &Record) -> Result<(), HostError> {
        for (index, disk) in self.disks.iter_mut().enumerate() {
            // What is written against an image is cut like it.
            if self.bases.get(disk.name()).is_some_and(Option::is_some) {
                continue;
            }
            let cuts = host.cuts_for(record, index, &**disk.device());
            if let Some(ledger) = self.ledgers.get_mut(index + 1) {
                disk.cut(ledger, cuts)?;
            }
        }
        Ok(())
    }

    /// Opens the network and lets the CPUs run.
    pub(crate) fn start(&mut self) -> Result<(), HostError> {
        self.open_ports();
        self.set_paused(false)
    }

    /// Lets frames pass: this host runs the machine.
    pub(crate) fn open_ports(&self) {
        self.ports.iter().for_each(LivePort::open);
        self.away.iter().for_each(AwayEnd::open);
    }

    /// The store no longer knows what it has of the machine: its next capsule looks at everything.
    pub(crate) fn unfollow_store(&mut self) {
        self.ledgers.iter_mut().for_each(|ledger| ledger.unfollow(Follower::Store));
        self.bases.clear();
    }

    /// Keeps the capsule whose images the next one is written against, whatever becomes of its refs.
    pub(crate) fn hold_base(
        &mut self,
        capsule: whimbrel_store::Result<Pin>,
        arrays: Arrays,
        images: BTreeMap<String, Option<Digest>>,
    ) {
        match capsule {
            Ok(capsule) => {
                match arrays {
                    Arrays::All => self._bases = [Some(capsule), None],
                    // Memory stays relative to the last capsule that has it.
                    Arrays::Disks => self._bases[1] = Some(capsule),
                }
                self.bases.extend(images);
            }
            Err(error) => {
                tracing::warn!(error = &error as &dyn std::error::Error, "the next capsule begins anew");
                self.unfollow_store();
            }
        }
    }

    /// Takes the part of the device state that is slow to take, while nobody is looking yet.
    fn prepared(mut self) -> Result<Self, HostError> {
        match self.qemu.prepare_device_state() {
            Ok(()) => Ok(self),
            Err(source) => {
                self.end();
                Err(HostError::Qemu { action: "describe its devices", source: source.into() })
            }
        }
    }

    pub(crate) fn is_paused(&self) -> bool {
        self.paused
    }

    pub(crate) fn set_paused(&mut self, paused: bool) -> Result<(), HostError> {
        let done = if paused { self.qemu.pause() } else { self.qemu.unpause() };
        done.map_err(|source| HostError::Qemu { action: "pause or unpause", source: source.into() })?;
        self.paused = paused;
        Ok(())
    }

    /// The same on its user's word, which outlasts this daemon.
    pub(crate) fn set_paused_by_user(&mut self, paused: bool) -> Result<(), HostError> {
        self.slot.mark(Mark::PausedByUser, paused)?;
        self.set_paused(paused)
    }

    /// Lets a machine go on after something else failed; that failure is what the caller hears of.
    pub(crate) fn go_on(&mut self) {
        if let Err(error) = self.set_paused(false) {
            tracing::error!(error = &error as &dyn std::error::Error, "the machine stays paused");
        }
    }

    /// Presses the power button and waits for the guest.
    pub(crate) fn powerdown(&mut self, patience: Duration) -> Result<(), HostError> {
        let events = self.qemu.events();
        let pressed = self.qemu.powerdown();
        pressed
            .map_err(|source| HostError::Qemu { action: "press the power button", source: source.into() })?;
        let deadline = Instant::now() + patience;
        loop {
            match events.recv_timeout(deadline.saturating_duration_since(Instant::now())) {
                Ok(MachineEvent::Shutdown(_) | MachineEvent::Disconnected) => return Ok(()),
                Ok(_) => {}
                Err(_) => return Err(HostError::StillRunning { seconds: patience.as_secs() }),
            }
        }
    }

    /// What happens to it from now on.
    pub(crate) fn events(&self) -> Receiver<MachineEvent> {
        self.qemu.events()
    }

    /// The file that is its memory.
    pub(crate) fn ram_path(&self) -> PathBuf {
        self.slot.ram()
    }

    pub(crate) fn pid(&self) -> u32 {
        self.qemu.pid()
    }

    /// The directory of its QEMU.
    pub(crate) fn slot_dir(&self) -> &std::path::Path {
        self.slot.dir()
    }

    /// Loads the device state while pages of the machine are with another host. Devices may touch some: they come over the
    /// connection of `taking`, and if that is lost the QEMU is ended, since it would wait for them for ever.
    pub(crate) fn load_with_pages_missing(
        &mut self,
        device_state: &[u8],
        taking: &Arc<Taking>,
    ) -> Result<(), HostError> {
        self.memory.page_in_owed(taking)?;
        let process = self.qemu.process().identity();
        let guard = owing::LoadGuard::start(taking.clone(), process, self.slot.dir());
        let loaded = self.load(device_state);
        drop(guard);
        loaded
    }

    /// Gives pages that arrived and are stale back to what they will be fetched as. The machine has not run.
    pub(crate) fn disown(&self, array: usize, pages: &PageSet) -> Result<(), HostError> {
        let disk = array.checked_sub(1).and_then(|index| self.disks.get(index));
        for run in pages.runs() {
            match disk {
                Some(disk) => disk.disown(run)?,
                None => {
                    let path = self.ram_path();
                    self.memory.zero(run).map_err(|source| HostError::io("empty", &path, source))?;
                }
            }
        }
        Ok(())
    }

    /// Brings what another host keeps of it, in the background; `whole` is called when all of it is here.
    pub(crate) fn bring_the_rest(&mut self, whole: impl FnOnce() + Send + 'static) {
        let Some(taking) = self.taking.clone() else { return };
        let memory = self.memory.store();
        let disks = self.disks.iter().map(|disk| Some(disk.store()));
        let stores = std::iter::once(memory).chain(disks).collect();
        self.bringing = Some(Bringing::start(taking, stores, whole));
    }

    /// Whether nothing of it is on another host any more.
    pub(crate) fn is_brought(&self) -> bool {
        self.taking.is_none() || self.bringing.as_ref().is_some_and(Bringing::is_done)
    }

    /// What a later daemon needs to find it again.
    pub(crate) fn process_record(&self) -> ProcessRecord {
        let ProcessIdentity { pid, start_time } = self.qemu.process().identity();
        let (lazy, memory) = self.memory.origin();
        let (slot, ram) = (self.slot.id().to_owned(), self.slot.ram_file());
        ProcessRecord { pid, started: start_time, slot, lazy, memory, ram }
    }

    pub(crate) fn pager_view(&self) -> Option<PagerView> {
        let disks = self.disks.iter().filter_map(LiveDisk::patient).collect();
        self.memory.pager_view(&self.stall, disks, self.taking.clone())
    }

    pub(crate) fn tap(&self) -> Tap {
        self.tap.clone()
    }

    pub(crate) fn console_view(&self) -> ConsoleView {
        ConsoleView::new(self.console.clone(), self.console_log.clone())
    }

    /// Ends the machine; its guest gets no notice. Its disks stay.
    pub(crate) fn end(self) {
        // Reads that wait for another host would keep QEMU, and those who wait for it.
        self.stall.end();
        drop(self.bringing);
        self.giving.iter().for_each(|giving| giving.end());
        drop(self.away);
        drop(self.ports);
        self.qemu.kill();
        drop(self.ledgers);
        drop(self.memory);
        self.slot.remove();
    }
}

/// A machine as the engines see it: QEMU, and disks that are flushed before it stops. QEMU flushes them itself as part
/// of stopping, which would count as pause; after ours there is little left for that.
pub(crate) struct Stoppable<'a> {
    pub(crate) qemu: &'a mut Qemu,
    pub(crate) disks: &'a [LiveDisk],
    /// It was found paused by its user, and stays so whatever becomes of the work.
    pub(crate) keep_paused: bool,
}

impl whimbrel_machine::Machine for Stoppable<'_> {
    fn about_to_pause(&mut self) {
        self.disks.iter().for_each(LiveDisk::settle);
    }

    fn pause(&mut self) -> Result<(), MachineError> {
        self.qemu.pause()
    }

    fn unpause(&mut self) -> Result<(), MachineError> {
        if self.keep_paused { Ok(()) } else { self.qemu.unpause() }
    }

    fn device_state(&mut self) -> Result<Vec<u8>, MachineError> {
        self.qemu.device_state()
    }
}

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

/// What turns a QEMU in a slot into a machine.
struct Assembly<'a> {
    host: &'a Host,
    record: &'a Record,
    overlay: Overlay,
    /// The stored image that memory is filled from, if it is: the root, none for an empty one.
    image: Option<Option<Digest>>,
    /// Why it waits for other hosts.
    stall: Arc<Stall>,
    /// What another host keeps of it.
    taking: Option<Arc<Taking>>,
    /// Whether it comes from another host.
    arriving: bool,
    /// Whether the QEMU is one that an earlier daemon left: somebody's running machine, whatever fails here.
    adopted: bool,
    arrived: Arrived,
}

impl<'a> Assembly<'a> {
    /// For a QEMU that is new.
    fn new(host: &'a Host, record: &'a Record, overlay: Overlay, image: Option<Option<Digest>>) -> Self {
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

    fn complete(self, warm: WarmSlot) -> Result<Live, HostError> {
        let WarmSlot { slot, qemu, memory, console_log } = warm;
        let origin = crate::owing::check(self.host, self.record).and_then(|()| self.hold_origin());
        let parts = origin.and_then(|origin| Ok((origin, self.parts(&slot, &qemu, memory)?)));
        let parts = parts.and_then(|(origin, mut parts)| {
            let away = AwayEnd::of(self.host, self.record, &mut parts.2)?;
            Ok((origin, parts, away, self.guest_port(&qemu)?))
        });
        match parts {
            Ok((_origin, (memory, disks, ports, ledgers, console, tap), away, guest)) => Ok(Live {
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
                _origin,
                bases: BTreeMap::new(),
                _bases: [None, None],
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
    ) -> Result<(LiveMemory, Vec<LiveDisk>, Vec<LivePort>, Vec<Ledger>, Arc<Console>, Tap), HostError> {
        let Self { host, record, overlay, image, stall, taking, arriving, adopted: _, arrived: _ } = self;
        let mut memory = match memory {
            Some(memory) => memory,
            // What arrives with pages missing is filled on demand; what boots again has its own memory.
            None => LiveMemory::attach(qemu, slot, image.is_some() || (taking.is_some() && *arriving))?,
        };
        if let Some(root) = image {
            memory.page_in_from(host, record.origin, *root, record.config.memory_pages())?;
        }
        let mut disks = Vec::with_capacity(record.bases.len());
        for index in 0..record.config.disks.len().min(record.bases.len()) {
            disks.push(LiveDisk::open((host, stall, taking), record, index, *overlay, slot)?);
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
        Ok((memory, disks, ports, ledgers, Arc::new(console), tap))
    }
}
