//! A machine that has a QEMU: the process and everything attached to it, and how each came to be.
//!
//! Every way to make one ends in the same thing, paused: [`Live::boot`] a new machine, [`Live::restore`] a
//! capsule, [`Live::receive`] one from another host, [`Live::adopt`] one whose daemon died. Then
//! [`Live::start`]. Dropping a `Live` leaves QEMU running for the next daemon; [`Live::end`] ends it.

mod assembly;
mod begin;
mod console;
mod disk;
#[cfg(test)]
mod disk_tests;
mod memory;
mod owing;
mod patient;
mod port;
mod stoppable;
mod stored;
mod template;

pub(crate) use assembly::{Start, launch};
pub(crate) use console::{ConsoleView, Serial};
pub(crate) use disk::{LiveDisk, Overlay, RestingDisk, remove_overlays};
pub(crate) use memory::{LiveMemory, PagerView};
use owing::Bringing;
use patient::{Patient, Stall};
pub(crate) use port::{LivePort, Plug};
pub(crate) use stoppable::Stoppable;
pub(crate) use template::{Content as TemplateContent, Templates};

use crate::{
    error::HostError,
    guest_helper::GuestPort,
    record::{ProcessRecord, RamFile},
    slot::{Mark, Slot},
    tunnel::AwayEnd,
};
use std::{
    collections::BTreeMap,
    path::PathBuf,
    sync::{Arc, mpsc::Receiver},
    time::{Duration, Instant},
};
use whimbrel_capture::{Ledger, tap::Tap};
use whimbrel_core::{Digest, PageSet};
use whimbrel_machine::Machine as _;
use whimbrel_migrate::postcopy::{Giving, Taking};
use whimbrel_qemu::{Console, Identity, MachineEvent, ProcessIdentity, Qemu};
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
    /// Everything of an arriving machine is here: a later daemon will know.
    pub(crate) fn mark_whole(&self) -> Result<(), HostError> {
        self.slot.mark(Mark::Whole, true)
    }

    /// Has QEMU read what is known of the device state that will be loaded.
    pub(crate) fn expect_state(&mut self, ahead: &[u8]) -> Result<(), HostError> {
        self.qemu.expect_state(ahead).map_err(|source| HostError::Qemu {
            action: "load the beginning of the device state",
            source: source.into(),
        })
    }

    /// Loads the device state of a machine that was made to be loaded.
    pub(crate) fn load(&mut self, device_state: &[u8], identity: Identity) -> Result<(), HostError> {
        self.qemu
            .load_to_run(device_state, identity)
            .map_err(|source| HostError::Qemu { action: "load the device state", source: source.into() })?;
        match self.slot.ram_file() {
            RamFile::Own => Ok(()),
            RamFile::Template => self.slot.keep_loaded(device_state),
        }
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

    /// It was paused by its user where it comes from, and will not be run before that one says so.
    pub(crate) fn stay_paused(&self) -> Result<(), HostError> {
        self.slot.mark(Mark::PausedByUser, true)
    }

    /// Whether its user has paused it.
    pub(crate) fn stays_paused(&self) -> bool {
        Mark::PausedByUser.is_on(self.slot.dir())
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
        let loaded = self.load(device_state, Identity::Kept);
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

    /// The machine is on no network any more, its QEMU was told to end, and nobody waits for another host's pages. All that takes
    /// time is left to [`Live::end`].
    pub(crate) fn cut_off(&mut self) {
        // Reads that wait for another host would keep QEMU, and those who wait for it.
        self.stall.end();
        self.bringing = None;
        self.giving.iter().for_each(|giving| giving.end());
        self.away = None;
        self.ports.clear();
        self.qemu.process().kill();
    }

    /// Ends the machine; its guest gets no notice. Its disks stay.
    pub(crate) fn end(mut self) {
        self.cut_off();
        self.qemu.kill();
        drop(self.ledgers);
        drop(self.memory);
        self.slot.remove();
    }
}
