//! A running machine: its QEMU process and everything attached to it.
//!
//! All constructors end in a paused machine: [`RunningMachine::boot`] for a new one,
//! [`RunningMachine::restore`] for a capsule, [`RunningMachine::create_incoming`] for one from another host,
//! [`RunningMachine::adopt`] for one of an earlier process. Then [`RunningMachine::start`] runs it. Dropping
//! it leaves QEMU running for the next process; [`RunningMachine::end`] ends QEMU.

mod balloon;
mod builder;
mod capsule_capture;
mod capsule_images;
mod capture_breaks;
mod creation;
mod disk;
#[cfg(test)]
mod disk_tests;
mod error;
mod failpoint;
mod frozen_guest;
mod guest_agent;
mod guest_time;
mod hotplug;
mod machine_dirs;
mod media;
mod memory;
mod memory_template;
mod missing_pages;
mod network_port;
mod passed_machine;
mod pausable;
mod prestarted;
mod record;
mod remote_disk;
mod reservations;
pub mod runtime_dir;
mod served_disk;
mod setup;
mod stored_images;
mod tpm_disk;
mod traffic;
mod tunnel;

pub use balloon::BalloonGoal;
pub use builder::LaunchOptions;
pub use capsule_capture::CapsuleCapture;
pub use capsule_images::{CapsuleImages, is_partial};
pub use capture_breaks::CaptureBreaks;
pub use disk::{Overlay, RunningDisk, StoppedDisk, remove_overlays};
pub use error::RunningError;
pub use failpoint::Failpoint;
use frozen_guest::FrozenGuest;
use guest_agent::spawn as spawn_for_guest;
pub use guest_agent::{AgentCommands, AgentError, ArrivalKind, GuestAgent, GuestRequests, RequestSlot};
pub use machine_dirs::{MachineDirs, QemuDirs};
pub use media::Medium;
pub use memory::{PagerView, RunningMemory};
pub use memory_template::{Template, TemplateKey, Templates};
use missing_pages::BackgroundFetch;
pub use network_port::{NetworkPort, PortTarget};
pub(crate) use passed_machine::{BuiltMachine, OfferedDisk, OfferedMachine};
pub use passed_machine::{MachineDescription, MachinePlace, StoreKey};
pub use pausable::PausableMachine;
pub use prestarted::PrestartedQemu;
pub use record::{DiskBase, ProcessRecord, RamFile};
use remote_disk::{RemoteDisk, Stall};
pub use reservations::{Reservation, Reservations};
use runtime_dir::RuntimeDir;
pub use runtime_dir::RuntimeMark;
pub use setup::MachineSetup;
pub use stored_images::CapturedArrays;
pub use tpm_disk::TPM_DISK;
pub use traffic::{DiskTraffic, Traffic, TrafficView};
pub use tunnel::{ConnectTunnel, Tunnel, TunnelView};

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
use whimbrel_qemu::{Console, MachineEvent, ProcessIdentity, Qemu, QemuGa, VmIdentity};
use whimbrel_store::Pin;

/// Time for qemu-ga to answer before a guest is given up.
const AGENT: Duration = Duration::from_secs(2);

/// Machine that runs under this process.
pub struct RunningMachine {
    /// QEMU under control.
    pub qemu: Qemu,
    /// Attached memory of QEMU.
    pub memory: RunningMemory,
    /// Disks, in the order of their device ids.
    pub disks: Vec<RunningDisk>,
    /// Network ports, in the order of their devices.
    pub ports: Vec<NetworkPort>,
    /// Tunnel to its network, if that is on another host.
    pub away: Option<Box<dyn Tunnel>>,
    /// Memory first, then the disks in order.
    pub dirty_logs: Vec<DirtyLog>,
    /// Observer of its memory writes.
    pub(crate) observer: DirtyObserver,
    pub(crate) console: Arc<Console>,
    /// Connection to its guest agent.
    pub guest: GuestAgent,
    /// Port of qemu-ga in its guest, if the machine has one.
    pub qemu_ga: Option<QemuGa>,
    /// Whether it goes on from a device state and has not run since, so that its guest's clock is behind.
    pub(super) clock_is_behind: bool,
    pub(crate) runtime_dir: RuntimeDir,
    /// What it was made of.
    setup: MachineSetup,
    paused: bool,
    /// Reason why it waits for other hosts, if it does.
    stall: Arc<Stall>,
    /// Fetcher of its missing pages, if any are missing.
    fetcher: Option<Arc<PageFetcher>>,
    background_fetch: Option<BackgroundFetch>,
    /// Page server for the target, where the machine runs now.
    pub page_server: Option<Arc<PageServer>>,
    /// Pin on the capsule whose pages it still reads, whatever becomes of its refs.
    origin: Option<Pin>,
    /// Base images of the store's dirty sets, by name. An array without one is captured completely.
    pub bases: BTreeMap<String, Option<Digest>>,
    /// Pins on the capsules of these images: the last one with memory, and the last disk-only one after it.
    base_pins: [Option<Pin>; 2],
}

impl RunningMachine {
    /// Marks an incoming machine as complete, for a later daemon.
    pub fn mark_complete(&self) -> Result<(), RunningError> {
        self.runtime_dir.mark(RuntimeMark::Complete, true)
    }

    /// Has QEMU read the early part of the device state that will be loaded.
    pub fn load_early_state(&mut self, ahead: &[u8]) -> Result<(), RunningError> {
        self.qemu.expect_state(ahead).map_err(|source| RunningError::Qemu {
            action: "load the beginning of the device state",
            source: source.into(),
        })
    }

    /// Loads the device state into a machine that waits for it.
    pub fn load(&mut self, device_state: &[u8], identity: VmIdentity) -> Result<(), RunningError> {
        self.qemu.load_to_run(device_state, identity).map_err(|source| RunningError::Qemu {
            action: "load the device state",
            source: source.into(),
        })?;
        self.clock_is_behind = true;
        match self.runtime_dir.ram_file() {
            RamFile::Own => Ok(()),
            RamFile::Template => self.runtime_dir.save_loaded_state(device_state),
        }
    }

    /// Opens the network ports and runs the CPUs.
    pub fn start(&mut self) -> Result<(), RunningError> {
        self.open_ports();
        self.set_paused(false)
    }

    /// Has qemu-ga set the guest's clock forward, in the background.
    fn follow_guest_time(&self) {
        if let Some(ga) = self.qemu_ga.clone() {
            guest_time::follow(ga, self.guest.commands(), self.setup.name.clone());
        }
    }

    /// Lets frames pass, as this host runs the machine.
    pub fn open_ports(&self) {
        self.ports.iter().for_each(NetworkPort::open);
        self.away.iter().for_each(|tunnel| tunnel.open());
    }

    /// Serial port of the machine.
    pub fn console(&self) -> &Arc<Console> {
        &self.console
    }

    /// Whether its CPUs are paused.
    pub fn is_paused(&self) -> bool {
        self.paused
    }

    /// Pauses or unpauses the CPUs.
    pub fn set_paused(&mut self, paused: bool) -> Result<(), RunningError> {
        let done = if paused { self.qemu.pause() } else { self.qemu.unpause() };
        // A command that failed, as after a timeout, may be carried out all the same. This one waits for it.
        self.paused = match &done {
            Ok(()) => paused,
            Err(_) => self.qemu.status().map_or(self.paused || paused, |status| !status.running),
        };
        // Resumes, moves and takeovers all come here.
        if !self.paused && std::mem::take(&mut self.clock_is_behind) {
            self.follow_guest_time();
        }
        done.map_err(|source| RunningError::Qemu { action: "pause or unpause", source: source.into() })
    }

    /// Pauses or unpauses for the user. The pause outlasts this daemon.
    pub fn set_paused_by_user(&mut self, paused: bool) -> Result<(), RunningError> {
        self.runtime_dir.mark(RuntimeMark::PausedByUser, paused)?;
        self.set_paused(paused)?;
        if !paused {
            self.guest.commands().catch_up();
            self.follow_guest_time();
        }
        Ok(())
    }

    /// Keeps a machine paused that its user had paused on the source.
    pub fn mark_paused_by_user(&self) -> Result<(), RunningError> {
        self.runtime_dir.mark(RuntimeMark::PausedByUser, true)
    }

    /// Whether its user has paused it.
    pub fn is_paused_by_user(&self) -> bool {
        RuntimeMark::PausedByUser.is_on(self.runtime_dir.dir())
    }

    /// Unpauses the machine after a failure, which is the one that the caller reports.
    pub fn unpause(&mut self) {
        if let Err(error) = self.set_paused(false) {
            tracing::error!(error = &error as &dyn std::error::Error, "could not unpause the machine");
        }
    }

    /// Presses the power button and waits for the guest to shut down. A guest that does not react after a
    /// third of the time is asked through qemu-ga as well.
    pub fn powerdown(&mut self, patience: Duration) -> Result<(), RunningError> {
        let events = self.qemu.events();
        let pressed = self.qemu.powerdown();
        pressed.map_err(|source| RunningError::Qemu {
            action: "press the power button",
            source: source.into(),
        })?;
        let begun = Instant::now();
        if has_ended(&events, begun + patience / 3) {
            return Ok(());
        }
        if let Some(Err(error)) = self.qemu_ga.as_ref().map(|ga| ga.session(AGENT)?.shut_down()) {
            tracing::debug!(%error, "qemu-ga does not shut the guest down");
        }
        match has_ended(&events, begun + patience) {
            true => Ok(()),
            false => Err(RunningError::StillRunning { seconds: patience.as_secs() }),
        }
    }

    /// Events of its QEMU from now on.
    pub fn events(&self) -> Receiver<MachineEvent> {
        self.qemu.events()
    }

    /// Path of its memory file.
    pub fn ram_path(&self) -> PathBuf {
        self.runtime_dir.ram()
    }

    /// Process id of its QEMU.
    pub fn pid(&self) -> u32 {
        self.qemu.pid()
    }

    /// Runtime directory of its QEMU.
    pub fn runtime_path(&self) -> &std::path::Path {
        self.runtime_dir.dir()
    }

    /// Loads the device state while pages are missing. Devices may touch such pages: `taking` fetches them.
    /// If its connection is lost the QEMU is killed, since it would wait for ever.
    pub fn load_with_pages_missing(
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
    pub fn discard_pages(&self, array: usize, pages: &PageSet) -> Result<(), RunningError> {
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
    pub fn start_fetching(&mut self, whole: impl FnOnce() + Send + 'static) {
        let Some(taking) = self.fetcher.clone() else { return };
        let memory = self.memory.store();
        let disks = self.disks.iter().map(|disk| Some(disk.store()));
        let stores = std::iter::once(memory).chain(disks).collect();
        self.background_fetch = Some(BackgroundFetch::start(taking, stores, whole));
    }

    /// Whether none of its pages is missing.
    pub fn is_complete(&self) -> bool {
        self.fetcher.is_none() || self.background_fetch.as_ref().is_some_and(BackgroundFetch::is_done)
    }

    /// Data by which a later daemon finds the process.
    pub fn process_record(&self) -> ProcessRecord {
        let ProcessIdentity { pid, start_time } = self.qemu.process().identity();
        let (lazy, memory) = self.memory.origin();
        let (slot, ram) = (self.runtime_dir.id().to_owned(), self.runtime_dir.ram_file());
        ProcessRecord { pid, started: start_time, slot, lazy, memory, ram }
    }

    /// State of its missing pages, if any were missing.
    pub fn pager_view(&self) -> Option<PagerView> {
        let disks = self.disks.iter().filter_map(RunningDisk::remote).collect();
        self.memory.pager_view(&self.stall, disks, self.fetcher.clone())
    }

    /// Observer of its memory writes.
    pub fn dirty_observer(&self) -> DirtyObserver {
        self.observer.clone()
    }

    /// Closes the network ports, tells QEMU to end, and ends waits for pages of other hosts. All that takes
    /// time is left to [`RunningMachine::end`].
    pub fn disconnect(&mut self) {
        // A read that waits for another host would block QEMU, and those who wait for QEMU.
        self.stall.end();
        self.background_fetch = None;
        self.page_server.iter().for_each(|giving| giving.end());
        self.away = None;
        self.ports.clear();
        // First: it would write once more when QEMU has ended, and the machine may run elsewhere.
        self.runtime_dir.kill_tpm();
        self.qemu.process().kill();
    }

    /// Ends a machine that has ended by itself while no daemon ran. Its runtime directory stays, and says
    /// whether the guest has shut down.
    pub(crate) fn end_and_leave(mut self, has_shut_down: bool) {
        if has_shut_down && let Err(error) = self.runtime_dir.mark(RuntimeMark::ShutDown, true) {
            tracing::warn!(error = &error as &dyn std::error::Error, "cannot record a shutdown");
        }
        self.disconnect();
        self.qemu.kill();
    }

    /// Ends the machine without notice to its guest. Its disks stay.
    pub fn end(mut self) {
        self.disconnect();
        self.qemu.kill();
        self.disks.iter().for_each(RunningDisk::save_tpm);
        drop(self.dirty_logs);
        drop(self.memory);
        self.runtime_dir.remove();
    }
}

/// Whether the guest shuts down, or QEMU ends, until then.
fn has_ended(events: &Receiver<MachineEvent>, deadline: Instant) -> bool {
    loop {
        match events.recv_timeout(deadline.saturating_duration_since(Instant::now())) {
            Ok(MachineEvent::Shutdown(_) | MachineEvent::Disconnected) => return true,
            Ok(_) => {}
            Err(_) => return false,
        }
    }
}
