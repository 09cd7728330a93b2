//! A running machine: its QEMU process and everything attached to it.
//!
//! All constructors end in a paused machine: [`RunningMachine::boot`] for a new one,
//! [`RunningMachine::restore`] for a capsule, [`RunningMachine::create_incoming`] for one from another host,
//! [`RunningMachine::adopt`] for one of an earlier process. Then [`RunningMachine::start`] runs it. Dropping
//! it leaves QEMU running for the next process; [`RunningMachine::end`] ends QEMU.

mod balloon;
mod builder;
mod capsule_images;
mod capture_breaks;
mod creation;
mod disk;
#[cfg(test)]
mod disk_tests;
mod error;
mod failpoint;
mod guest_agent;
mod memory;
mod memory_template;
mod missing_pages;
mod network_port;
mod pausable;
mod places;
mod prestarted;
mod record;
mod remote_disk;
mod reservations;
pub(crate) mod runtime_dir;
mod setup;
mod stored_images;
mod traffic;
mod tunnel;

pub(crate) use balloon::BalloonGoal;
pub(crate) use builder::LaunchOptions;
pub(crate) use capsule_images::{CapsuleImages, is_partial};
pub(crate) use capture_breaks::CaptureBreaks;
pub(crate) use disk::{Overlay, RunningDisk, StoppedDisk, remove_overlays};
pub(crate) use error::RunningError;
pub(crate) use failpoint::Failpoint;
pub(crate) use guest_agent::{AgentCommands, AgentError, ArrivalKind, GuestAgent, GuestRequests};
pub(crate) use memory::{PagerView, RunningMemory};
pub(crate) use memory_template::{Template, TemplateKey, Templates};
use missing_pages::BackgroundFetch;
pub(crate) use network_port::{NetworkPort, PortTarget};
pub(crate) use pausable::PausableMachine;
pub(crate) use places::{MachinePlaces, QemuPlaces};
pub(crate) use prestarted::PrestartedQemu;
pub(crate) use record::{DiskBase, ProcessRecord, RamFile};
use remote_disk::{RemoteDisk, Stall};
pub(crate) use reservations::{Reservation, Reservations};
use runtime_dir::{RuntimeDir, RuntimeMark};
pub(crate) use setup::MachineSetup;
pub(crate) use stored_images::CapturedArrays;
pub(crate) use traffic::TrafficView;
pub(crate) use tunnel::{ConnectTunnel, Tunnel, TunnelView};

use std::{
    collections::BTreeMap,
    path::PathBuf,
    sync::{Arc, mpsc::Receiver},
    time::{Duration, Instant},
};
use whimbrel_capture::{DirtyLog, dirty_observer::DirtyObserver};
use whimbrel_core::{Digest, PageSet};
use whimbrel_machine::Machine as _;
use whimbrel_migrate::postcopy::{PageFetcher, PageServer};
use whimbrel_qemu::{Console, MachineEvent, ProcessIdentity, Qemu, VmIdentity};
use whimbrel_store::Pin;

pub(crate) struct RunningMachine {
    pub(crate) qemu: Qemu,
    pub(crate) memory: RunningMemory,
    pub(crate) disks: Vec<RunningDisk>,
    pub(crate) ports: Vec<NetworkPort>,
    /// Tunnel to its network, if that is on another host.
    pub(crate) away: Option<Box<dyn Tunnel>>,
    /// Memory first, then the disks in order.
    pub(crate) dirty_logs: Vec<DirtyLog>,
    /// Observer of its memory writes.
    observer: DirtyObserver,
    console: Arc<Console>,
    /// Connection to its guest agent.
    pub(crate) guest: GuestAgent,
    runtime_dir: RuntimeDir,
    paused: bool,
    /// Reason why it waits for other hosts, if it does.
    stall: Arc<Stall>,
    /// Fetcher of its missing pages, if any are missing.
    fetcher: Option<Arc<PageFetcher>>,
    background_fetch: Option<BackgroundFetch>,
    /// Page server for the target, where the machine runs now.
    pub(crate) page_server: Option<Arc<PageServer>>,
    /// Pin on the capsule whose pages it still reads, whatever becomes of its refs.
    _origin: Option<Pin>,
    /// Base images of the store's dirty sets, by name. An array without one is captured completely.
    pub(crate) bases: BTreeMap<String, Option<Digest>>,
    /// Pins on the capsules of these images: the last one with memory, and the last disk-only one after it.
    _bases: [Option<Pin>; 2],
}

impl RunningMachine {
    /// Marks an incoming machine as complete, for a later daemon.
    pub(crate) fn mark_complete(&self) -> Result<(), RunningError> {
        self.runtime_dir.mark(RuntimeMark::Complete, true)
    }

    /// Has QEMU read the early part of the device state that will be loaded.
    pub(crate) fn load_early_state(&mut self, ahead: &[u8]) -> Result<(), RunningError> {
        self.qemu.expect_state(ahead).map_err(|source| RunningError::Qemu {
            action: "load the beginning of the device state",
            source: source.into(),
        })
    }

    /// Loads the device state into a machine that waits for it.
    pub(crate) fn load(&mut self, device_state: &[u8], identity: VmIdentity) -> Result<(), RunningError> {
        self.qemu.load_to_run(device_state, identity).map_err(|source| RunningError::Qemu {
            action: "load the device state",
            source: source.into(),
        })?;
        match self.runtime_dir.ram_file() {
            RamFile::Own => Ok(()),
            RamFile::Template => self.runtime_dir.save_loaded_state(device_state),
        }
    }

    /// Opens the network ports and runs the CPUs.
    pub(crate) fn start(&mut self) -> Result<(), RunningError> {
        self.open_ports();
        self.set_paused(false)
    }

    /// Lets frames pass, as this host runs the machine.
    pub(crate) fn open_ports(&self) {
        self.ports.iter().for_each(NetworkPort::open);
        self.away.iter().for_each(|tunnel| tunnel.open());
    }

    /// Its serial port.
    pub(crate) fn console(&self) -> &Arc<Console> {
        &self.console
    }

    pub(crate) fn is_paused(&self) -> bool {
        self.paused
    }

    pub(crate) fn set_paused(&mut self, paused: bool) -> Result<(), RunningError> {
        let done = if paused { self.qemu.pause() } else { self.qemu.unpause() };
        // A command that failed, as after a timeout, may be carried out all the same. This one waits for it.
        self.paused = match &done {
            Ok(()) => paused,
            Err(_) => self.qemu.status().map_or(self.paused || paused, |status| !status.running),
        };
        done.map_err(|source| RunningError::Qemu { action: "pause or unpause", source: source.into() })
    }

    /// Pauses or unpauses for the user. The pause outlasts this daemon.
    pub(crate) fn set_paused_by_user(&mut self, paused: bool) -> Result<(), RunningError> {
        self.runtime_dir.mark(RuntimeMark::PausedByUser, paused)?;
        self.set_paused(paused)?;
        if !paused {
            self.guest.commands().catch_up();
        }
        Ok(())
    }

    /// Keeps a machine paused that its user had paused on the source.
    pub(crate) fn mark_paused_by_user(&self) -> Result<(), RunningError> {
        self.runtime_dir.mark(RuntimeMark::PausedByUser, true)
    }

    /// Whether its user has paused it.
    pub(crate) fn is_paused_by_user(&self) -> bool {
        RuntimeMark::PausedByUser.is_on(self.runtime_dir.dir())
    }

    /// Unpauses the machine after a failure, which is the one that the caller reports.
    pub(crate) fn unpause(&mut self) {
        if let Err(error) = self.set_paused(false) {
            tracing::error!(error = &error as &dyn std::error::Error, "could not unpause the machine");
        }
    }

    /// Presses the power button and waits for the guest to shut down.
    pub(crate) fn powerdown(&mut self, patience: Duration) -> Result<(), RunningError> {
        let events = self.qemu.events();
        let pressed = self.qemu.powerdown();
        pressed.map_err(|source| RunningError::Qemu {
            action: "press the power button",
            source: source.into(),
        })?;
        let deadline = Instant::now() + patience;
        loop {
            match events.recv_timeout(deadline.saturating_duration_since(Instant::now())) {
                Ok(MachineEvent::Shutdown(_) | MachineEvent::Disconnected) => return Ok(()),
                Ok(_) => {}
                Err(_) => return Err(RunningError::StillRunning { seconds: patience.as_secs() }),
            }
        }
    }

    /// Events of its QEMU from now on.
    pub(crate) fn events(&self) -> Receiver<MachineEvent> {
        self.qemu.events()
    }

    /// Path of its memory file.
    pub(crate) fn ram_path(&self) -> PathBuf {
        self.runtime_dir.ram()
    }

    pub(crate) fn pid(&self) -> u32 {
        self.qemu.pid()
    }

    /// Runtime directory of its QEMU.
    pub(crate) fn runtime_path(&self) -> &std::path::Path {
        self.runtime_dir.dir()
    }

    /// Loads the device state while pages are missing. Devices may touch such pages: `taking` fetches them.
    /// If its connection is lost the QEMU is killed, since it would wait for ever.
    pub(crate) fn load_with_pages_missing(
        &mut self,
        device_state: &[u8],
        taking: &Arc<PageFetcher>,
    ) -> Result<(), RunningError> {
        self.memory.fetch_on_demand(taking)?;
        let process = self.qemu.process().identity();
        let guard = missing_pages::LoadGuard::start(taking.clone(), process, self.qemu.dir());
        let loaded = self.load(device_state, VmIdentity::Unchanged);
        drop(guard);
        loaded
    }

    /// Removes stale pages that have arrived, so that they are fetched again. The machine has not run.
    pub(crate) fn discard_pages(&self, array: usize, pages: &PageSet) -> Result<(), RunningError> {
        let disk = array.checked_sub(1).and_then(|index| self.disks.get(index));
        for run in pages.runs() {
            match disk {
                Some(disk) => disk.discard_pages(run)?,
                None => {
                    let path = self.ram_path();
                    self.memory.zero(run).map_err(|source| RunningError::io("empty", &path, source))?;
                }
            }
        }
        Ok(())
    }

    /// Fetches its missing pages in the background. `whole` is called when all are here.
    pub(crate) fn start_fetching(&mut self, whole: impl FnOnce() + Send + 'static) {
        let Some(taking) = self.fetcher.clone() else { return };
        let memory = self.memory.store();
        let disks = self.disks.iter().map(|disk| Some(disk.store()));
        let stores = std::iter::once(memory).chain(disks).collect();
        self.background_fetch = Some(BackgroundFetch::start(taking, stores, whole));
    }

    /// Whether none of its pages is missing.
    pub(crate) fn is_complete(&self) -> bool {
        self.fetcher.is_none() || self.background_fetch.as_ref().is_some_and(BackgroundFetch::is_done)
    }

    /// Data by which a later daemon finds the process.
    pub(crate) fn process_record(&self) -> ProcessRecord {
        let ProcessIdentity { pid, start_time } = self.qemu.process().identity();
        let (lazy, memory) = self.memory.origin();
        let (slot, ram) = (self.runtime_dir.id().to_owned(), self.runtime_dir.ram_file());
        ProcessRecord { pid, started: start_time, slot, lazy, memory, ram }
    }

    pub(crate) fn pager_view(&self) -> Option<PagerView> {
        let disks = self.disks.iter().filter_map(RunningDisk::remote).collect();
        self.memory.pager_view(&self.stall, disks, self.fetcher.clone())
    }

    pub(crate) fn dirty_observer(&self) -> DirtyObserver {
        self.observer.clone()
    }

    /// Closes the network ports, tells QEMU to end, and ends waits for pages of other hosts. All that takes
    /// time is left to [`RunningMachine::end`].
    pub(crate) fn disconnect(&mut self) {
        // A read that waits for another host would block QEMU, and those who wait for QEMU.
        self.stall.end();
        self.background_fetch = None;
        self.page_server.iter().for_each(|giving| giving.end());
        self.away = None;
        self.ports.clear();
        self.qemu.process().kill();
    }

    /// Ends the machine without notice to its guest. Its disks stay.
    pub(crate) fn end(mut self) {
        self.disconnect();
        self.qemu.kill();
        drop(self.dirty_logs);
        drop(self.memory);
        self.runtime_dir.remove();
    }
}
