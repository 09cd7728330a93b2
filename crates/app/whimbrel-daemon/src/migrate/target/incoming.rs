//! Incoming machines: the target side of a migration in the daemon.
//!
//! The record of an incoming machine is durable as soon as its QEMU runs, so only the disks are synced during
//! the pause. A mark in the runtime directory, which ends with the QEMU, says that all pages have arrived. A
//! restarted daemon discards a machine without the mark. It keeps a machine paused that has the mark, or that
//! lost its runtime directory in a power failure, until the source commits or aborts, across restarts.

use crate::{
    core::error::DaemonError,
    daemon::Daemon,
    machine::{
        entry::{Machine, MachineLock},
        record::{DiskBase, Phase, Record},
        supervisor,
    },
    migrate::{
        source::join_scoped,
        target::{
            background_sync::BackgroundSync,
            baseline::{BaselineFill, IncomingBaseline},
            handed_off,
            reserved_space::{Purpose, reserve_space},
        },
    },
    protect::InheritedProtection,
};
use std::{
    fs::File,
    os::unix::fs::{FileExt, MetadataExt, OpenOptionsExt},
    sync::{Arc, Weak},
    thread,
    time::Instant,
};
use whimbrel_block::Device;
use whimbrel_core::{Digest, HostName, PAGE_SIZE, PageRun};
use whimbrel_migrate::{
    baseline::Baseline,
    compatibility::HostCapacity,
    handover::{PausedIncoming, TargetRecord},
    late_frames::LateFrame,
    postcopy::messages::MissingPages,
    protocol::{Finish, HandoverId, Offer},
    target::{HostError as Cause, IncomingMachine, TargetHost},
};
use whimbrel_qemu::Vmgenid;
use whimbrel_vm::{Failpoint, Reservation, RunningMachine, runtime_dir};

/// Reserves space on this host for incoming machines.
pub(crate) struct DaemonTarget {
    host: Weak<Daemon>,
    purpose: Purpose,
}

struct IncomingMachineState {
    host: Arc<Daemon>,
    handover: HandoverId,
    record: Record,
    vmgenid: Option<Vmgenid>,
    purpose: Purpose,
    missing: Vec<Digest>,
    /// Whether the user has paused the machine, which stays paused.
    paused: bool,
    /// Baselines, and the fill of memory from its baseline.
    baseline: Option<IncomingBaseline>,
    baseline_fill: BaselineFill,
    background_sync: BackgroundSync,
    /// Memory for its QEMU, until that has it.
    memory: Option<Reservation>,
    /// Disk space, until all of its pages are here.
    disk: Option<Reservation>,
    /// Memory for the epoch in flight, until it runs.
    buffer: Option<Reservation>,
    /// Present until the machine is prepared; then the registry's entry has it.
    live: Option<RunningMachine>,
    machine: Arc<Machine>,
    inherited_protection: Option<InheritedProtection>,
    runs_since: Option<Instant>,
}

impl DaemonTarget {
    /// For machines that migrate.
    pub(crate) fn new(host: &Arc<Daemon>) -> Self {
        Self { host: Arc::downgrade(host), purpose: Purpose::Migration }
    }

    /// For standbys of machines that other hosts protect.
    pub(crate) fn for_standby(host: &Arc<Daemon>) -> Self {
        Self { host: Arc::downgrade(host), purpose: Purpose::Standby }
    }
}

impl TargetHost for DaemonTarget {
    fn find_page(&self, digest: &Digest, out: &mut [u8; PAGE_SIZE]) -> bool {
        self.host.upgrade().is_some_and(|host| find_page(&host, digest, out))
    }

    fn deliver_late_frames(&self, handover: HandoverId, strays: Vec<LateFrame>) {
        if let Some(host) = self.host.upgrade() {
            host.recent_arrivals.deliver(handover, &strays);
        }
    }

    fn reserve(&self, offer: &Offer, from: &HostName) -> Result<Box<dyn IncomingMachine>, Cause> {
        Failpoint::Offer.reached();
        let host = self.host.upgrade().ok_or("the host is shutting down")?;
        let space = reserve_space(&host, (offer, from), self.purpose)?;
        let heir = InheritedProtection::from_offer(&host, offer)?;
        let claim = host
            .machines
            .reserve_if(&offer.name, || host.check_incoming_name((&offer.name, offer.origin), from))?;
        let before = host.machines.get(&offer.name).ok();
        let before = before.as_ref().map(|machine| machine.try_lock("arrival", None)).transpose()?;
        let handed_off = handed_off::record_of(before.as_ref())?;
        let beginning = host.choose_baseline(offer);
        let mut record = Record::new(offer.name.clone(), offer.config.clone(), beginning.bases.clone());
        handed_off.iter().for_each(|before| record.settings = before.settings.clone());
        record.phase =
            Phase::Prepared { handover: offer.handover, ahead: true, never_ran: false, handed_off };
        record.arrived_by = Some(offer.handover);
        // The disks read from the capsule of their bases, which is retained as long as they are.
        record.origin = beginning.capsule.or(offer.origin);
        record.last = offer.origin.filter(|last| beginning.capsule.is_some_and(|capsule| capsule != *last));
        // A micro machine has none.
        record.vmgenid = Some(offer.vmgenid.clone()).filter(|id| !id.is_empty());
        record.tunnel = offer.tunnel.clone();
        if let Some(from) = &offer.leaves {
            crate::migrate::target::missing_pages::add_incoming(&host, &mut record, offer.handover, from);
        }
        if let Some(away) = host.away_tunnel(&record) {
            // Fail now rather than when the machine is here without its network.
            host.route(&away.home)?;
        }
        let missing = offer.blobs.iter().map(|(digest, _)| *digest);
        let missing = missing.filter(|digest| !host.has_boot_file(digest)).collect();
        let vmgenid = record.vmgenid.as_ref().map(|id| id.parse()).transpose();
        let vmgenid = vmgenid.map_err(|_| "the offer's generation id is invalid")?;
        let machine = host.machines.insert(Machine::new(record.clone(), None));
        drop((before, claim));
        let mut landing = IncomingMachineState {
            host,
            handover: offer.handover,
            record,
            vmgenid,
            purpose: self.purpose,
            missing,
            paused: offer.paused,
            baseline: Some(beginning),
            baseline_fill: BaselineFill::nothing(),
            background_sync: BackgroundSync::default(),
            memory: Some(space.memory),
            disk: Some(space.disk),
            buffer: Some(space.buffer),
            live: None,
            machine,
            inherited_protection: heir,
            runs_since: None,
        };
        if let Err(error) = landing.make_ready() {
            landing.discard();
            return Err(error.into());
        }
        Ok(Box::new(landing))
    }
}

impl Daemon {
    /// Whether a boot file is here. One that only a capsule has is written to the boot files.
    fn has_boot_file(&self, digest: &Digest) -> bool {
        if self.directories.boot_file(digest).exists() {
            return true;
        }
        let stored = || self.write_boot_file(digest, &self.store.blob(digest).ok()?).ok();
        self.store.has(&[*digest]) == [true] && stored().is_some()
    }
}

/// Reads the page of this digest from the hash cache or the store.
fn find_page(host: &Daemon, digest: &Digest, out: &mut [u8; PAGE_SIZE]) -> bool {
    if host.hash_cache().is_some_and(|cache| cache.get(digest, out)) {
        return true;
    }
    let stored = host.store.has(&[*digest]) == [true];
    match stored.then(|| host.store.blob(digest)) {
        Some(Ok(page)) if page.len() == out.len() => {
            out.copy_from_slice(&page);
            true
        }
        _ => false,
    }
}

pub(super) fn host_capacity(host: &Daemon, offer: &Offer, from: &HostName) -> Result<HostCapacity, Cause> {
    let qemu = host.qemu()?;
    // A machine that stays on its home network needs no bridge here.
    let bridges = offer.config.nics.iter().filter_map(|nic| nic.bridge.clone());
    let missing = |bridge: &String| !whimbrel_net::managed::bridge::exists(bridge);
    let away = offer.tunnel.as_ref().is_some_and(|tunnel| tunnel.home != host.name);
    Ok(HostCapacity {
        name_taken: host.check_incoming_name((&offer.name, offer.origin), from).is_err(),
        qemu_version: qemu.version.to_string(),
        knows_machine_type: qemu.machine_type(&offer.config.machine).is_some(),
        accel: whimbrel_qemu::best_accel(qemu),
        processor: processor(),
        memory: host.memory.spare()?.min(memory_available().unwrap_or(u64::MAX)),
        disk: host.disk_space.spare()?,
        bridge_missing: bridges.into_iter().find(missing).filter(|_| !away),
    })
}

/// Space that the disks of a machine take: allocated pages and bases.
pub(crate) fn disk_bytes(record: &Record, live: &RunningMachine) -> u64 {
    let disks = record.bases.iter().zip(&record.config.disks).zip(&live.disks);
    let bytes = disks.map(|((base, config), disk)| {
        let under = match base {
            DiskBase::Blank => 0,
            DiskBase::File { path } => {
                std::fs::metadata(path).map_or(config.size.0, |meta| meta.blocks() * 512)
            }
            // The store would have to count how much of an image is allocated.
            DiskBase::Image { .. } => config.size.0,
        };
        disk.allocated_bytes().saturating_add(under).min(config.size.0)
    });
    bytes.sum()
}

/// Name of this host's processor; empty names count as equal.
pub(crate) fn processor() -> String {
    let info = std::fs::read_to_string("/proc/cpuinfo").unwrap_or_default();
    let name = info.lines().find_map(|line| line.strip_prefix("model name"));
    name.map(|name| name.trim_start_matches([' ', '\t', ':']).to_owned()).unwrap_or_default()
}

/// Memory that the kernel reports as available without swapping.
fn memory_available() -> Option<u64> {
    let info = std::fs::read_to_string("/proc/meminfo").ok()?;
    let kib = info.lines().find_map(|line| line.strip_prefix("MemAvailable:"))?;
    kib.trim().strip_suffix(" kB")?.trim().parse::<u64>().ok()?.checked_mul(1024)
}

impl IncomingMachineState {
    /// Starts its QEMU once everything that QEMU opens by name is here.
    fn make_ready(&mut self) -> Result<(), DaemonError> {
        if self.missing.is_empty() && self.live.is_none() {
            let memory = match self.memory.take() {
                Some(memory) => memory,
                None => self.host.reserve_memory(self.record.config.memory)?,
            };
            let live = self.host.create_incoming(&self.record, self.vmgenid, memory)?;
            let live = self.live.insert(live);
            if let Some(beginning) = &mut self.baseline {
                let filling = live.memory.file().and_then(|ram| beginning.fill(ram));
                self.baseline_fill =
                    filling.map_err(|source| DaemonError::io("fill", &live.ram_path(), source))?;
            }
            if self.paused {
                live.mark_paused_by_user()?;
            }
            // Before the pause, in which every sync is downtime.
            self.record.process = Some(live.process_record());
            self.record.save(&self.host.directories)?;
            self.inherited_protection.iter().try_for_each(|heir| heir.save_record(&self.host))?;
        }
        Ok(())
    }

    /// Handles a commit for a machine whose QEMU has ended while it waited. The machine belongs to this host
    /// from now on, as crashed: its disks are here, and nobody else may ever run it.
    fn commit_crashed(&self, turn: &mut MachineLock<'_>) -> Result<(), DaemonError> {
        if matches!(turn.record.phase, Phase::Prepared { .. }) {
            match turn.running.take() {
                Some(live) => live.end(),
                None => self.kill_unrecovered(turn),
            }
            let reason = "its QEMU ended before the source had committed".to_owned();
            turn.record.phase = Phase::Crashed { reason };
            turn.record.process = None;
            turn.record.since_ms = crate::now_ms();
        }
        turn.record.save(&self.host.directories)
    }

    /// Handles a commit after this host's daemon was restarted with the machine prepared: it yields the
    /// machine to the backup host.
    fn yield_to_backup(&self) -> Result<(), DaemonError> {
        let mut turn = self.machine.lock("arrival");
        if matches!(turn.record.phase, Phase::Prepared { .. }) {
            turn.record.phase = Phase::Here;
            turn.record.since_ms = crate::now_ms();
        }
        turn.record.save(&self.host.directories)?;
        drop(turn);
        self.host.yield_to_backup(&self.machine)
    }

    /// Kills a QEMU that could not be recovered but may still be alive.
    fn kill_unrecovered(&self, turn: &MachineLock<'_>) {
        if let (None, Some(process)) = (&turn.running, &turn.record.process) {
            runtime_dir::clear(&self.host.directories.runtime_dir(&process.slot));
        }
    }

    /// Waits until memory has its baseline; only then may pages of it be written.
    fn wait_for_baseline(&self, array: usize) -> Result<(), Cause> {
        if array == 0 { self.baseline_fill.wait() } else { Ok(()) }
    }

    fn add_written(&mut self, bytes: u64) {
        if let Some(live) = &self.live {
            self.background_sync.add_written(bytes, &live.disks);
        }
    }

    fn live(&mut self) -> Result<&mut RunningMachine, Cause> {
        self.live.as_mut().ok_or_else(|| "pages arrived before the boot files".into())
    }
}

impl IncomingMachine for IncomingMachineState {
    fn boot_files_missing(&self) -> Vec<Digest> {
        self.missing.clone()
    }

    fn baselines(&self) -> Vec<Baseline> {
        self.baseline.as_ref().map(|beginning| beginning.baselines.clone()).unwrap_or_default()
    }

    fn store_boot_file(&mut self, digest: Digest, content: Vec<u8>) -> Result<(), Cause> {
        self.host.write_boot_file(&digest, &content)?;
        self.missing.retain(|missing| *missing != digest);
        Ok(self.make_ready()?)
    }

    fn read_boot_file(&self, digest: &Digest, offset: u64, out: &mut [u8]) -> Result<(), Cause> {
        Ok(File::open(self.host.directories.boot_file(digest))?.read_exact_at(out, offset)?)
    }

    fn write(&mut self, array: usize, run: PageRun, data: &[u8]) -> Result<(), Cause> {
        Failpoint::Pages.reached();
        self.wait_for_baseline(array)?;
        let live = self.live()?;
        match array.checked_sub(1) {
            None => Ok(live.memory.write(run, data)?),
            Some(disk) => {
                live.disks[disk].device().write_at(run.offset(), data)?;
                self.add_written(data.len() as u64);
                Ok(())
            }
        }
    }

    fn zero(&mut self, array: usize, run: PageRun) -> Result<(), Cause> {
        self.wait_for_baseline(array)?;
        let live = self.live()?;
        match array.checked_sub(1) {
            None => Ok(live.memory.zero(run)?),
            Some(disk) => Ok(live.disks[disk].device().write_zeroes(run.offset(), run.bytes() as u64)?),
        }
    }

    fn read(&self, array: usize, run: PageRun, out: &mut [u8]) -> Result<(), Cause> {
        self.wait_for_baseline(array)?;
        let live = self.live.as_ref().ok_or("pages were requested before the machine exists")?;
        match array.checked_sub(1) {
            None => Ok(live.memory.read(run, out)?),
            Some(disk) => Ok(live.disks[disk].device().read_at(run.offset(), out)?),
        }
    }

    fn add_missing(&mut self, owed: &MissingPages, piece: &[u8]) -> Result<(), Cause> {
        let array = owed.array as usize;
        self.wait_for_baseline(array)?;
        let taking = crate::migrate::target::missing_pages::fetcher_of(&self.host, &self.record);
        let stale = taking.ok_or("missing pages without postcopy")?.add_missing(array, owed.hot, piece)?;
        if owed.hot { Ok(()) } else { Ok(self.live()?.discard_pages(array, &stale)?) }
    }

    fn is_alive(&self) -> bool {
        self.live.as_ref().is_none_or(|live| live.qemu.process().is_alive())
    }

    fn expect_state(&mut self, ahead: &[u8]) -> Result<(), Cause> {
        Ok(self.live()?.load_early_state(ahead)?)
    }

    fn prepare(&mut self, finish: &Finish, device_state: &[u8]) -> Result<(), Cause> {
        Failpoint::Last.reached();
        self.wait_for_baseline(0)?;
        let (host, record) = (self.host.clone(), self.record.clone());
        let (inherits, identity) = (self.inherited_protection.is_some(), self.purpose.identity());
        let live = self.live()?;
        if inherits {
            InheritedProtection::attach_consumer(&mut live.dirty_logs)?;
        }
        load_during_sync(live, |live| {
            match crate::migrate::target::missing_pages::fetcher_of(&host, &record) {
                None => Ok(live.load(device_state, identity)?),
                Some(taking) => {
                    crate::migrate::target::missing_pages::save_sets(&host, &record, live, &taking)?;
                    Ok(live.load_with_pages_missing(device_state, &taking)?)
                }
            }
        })?;
        for (port, addresses) in live.ports.iter().zip(&finish.ports) {
            port.add_addresses(addresses);
        }
        host.recent_arrivals.insert(finish.handover, &live.ports);
        // Synced after the disks: with the mark set, this host may be asked to run the machine.
        live.mark_complete()?;
        let mut turn = self.machine.lock("arrival");
        turn.record = self.record.clone();
        turn.running = self.live.take();
        drop(turn);
        Failpoint::Ready.reached();
        Ok(())
    }

    fn spill_file(&self) -> Result<File, Cause> {
        let path = self.host.directories.machine(&self.record.name).join("epoch");
        let mut options = File::options();
        let file = options.read(true).write(true).create(true).truncate(true).mode(0o600).open(&path)?;
        std::fs::remove_file(&path)?;
        Ok(file)
    }

    fn restart(&mut self) -> Result<(), Cause> {
        let Self { host, record, vmgenid, live, .. } = self;
        let before = live.as_mut().ok_or("its boot files have not arrived")?;
        let again = host.create_incoming_again(record, *vmgenid, before)?;
        record.process = Some(again.process_record());
        record.save(&host.directories)?;
        live.replace(again).into_iter().for_each(RunningMachine::end);
        Ok(())
    }

    fn run(&mut self) -> Result<(), Cause> {
        Failpoint::Commit.reached();
        (self.disk, self.buffer) = (None, None);
        if let Some(heir) = self.inherited_protection.take() {
            self.runs_since = heir.run(&self.host, &self.machine)?;
            Failpoint::Running.reached();
            return Ok(());
        }
        if self.host.protections.is_inheriting(self.machine.name()) {
            return Ok(self.yield_to_backup()?);
        }
        let host = &self.host;
        let events = {
            let mut turn = self.machine.lock("arrival");
            if turn.running.as_ref().is_none_or(|live| !live.qemu.process().is_alive()) {
                return Ok(self.commit_crashed(&mut turn)?);
            }
            let (record, live) = turn.parts()?;
            let events = live.events();
            // The machine's own port replaces the tunnel's end.
            host.end_tunnels_of(record);
            live.open_ports();
            // No other host may run it any more: switches may relearn its addresses while the CPUs start.
            live.ports.iter().for_each(whimbrel_vm::NetworkPort::announce);
            if !live.is_paused_by_user() {
                live.set_paused(false)?;
            }
            self.runs_since = Some(Instant::now());
            record.phase = Phase::Here;
            record.since_ms = crate::now_ms();
            record.save(&self.host.directories)?;
            host.start_fetching(&self.machine, live);
            events
        };
        supervisor::watch(&self.host, &self.machine, events);
        tracing::info!(machine = %self.machine.name(), handover = %self.handover, "a migration to this host has completed");
        Failpoint::Running.reached();
        Ok(())
    }

    /// Not of a machine whose protection this host would inherit: its backup host takes it over.
    fn has_ended(&self) -> bool {
        Failpoint::Commit.reached();
        let inherits =
            self.inherited_protection.is_some() || self.host.protections.is_inheriting(self.machine.name());
        let turn = self.machine.lock("arrival");
        let waits = matches!(turn.record.phase, Phase::Prepared { .. });
        waits && !inherits && turn.running.as_ref().is_none_or(|live| !live.qemu.process().is_alive())
    }

    fn record_never_ran(&mut self) -> Result<(), Cause> {
        let mut turn = self.machine.lock("arrival");
        let name = self.machine.name();
        tracing::warn!(machine = %name, handover = %self.handover, "the QEMU of an incoming machine ended before it was started; the machine goes back to its source");
        match turn.running.take() {
            Some(live) => live.end(),
            None => self.kill_unrecovered(&turn),
        }
        (self.disk, self.buffer) = (None, None);
        if let Phase::Prepared { never_ran, .. } = &mut turn.record.phase {
            *never_ran = true;
        }
        turn.record.process = None;
        turn.record.since_ms = crate::now_ms();
        Ok(turn.record.save(&self.host.directories)?)
    }

    fn runs_since(&self) -> Option<Instant> {
        self.runs_since
    }

    fn discard(&mut self) {
        self.baseline_fill = BaselineFill::nothing();
        let mut turn = self.machine.lock("removal");
        match self.live.take().or(turn.running.take()) {
            Some(live) => live.end(),
            None => self.kill_unrecovered(&turn),
        }
        self.host.fetchers.remove(self.handover);
        self.host.protections.remove_inherited(&turn.record);
        handed_off::remove_incoming(&self.host, &turn.record);
        turn.record.phase = Phase::Stopped;
    }
}

/// Loads the device state while the disks are synced: loading does not write to them.
fn load_during_sync(
    live: &mut RunningMachine,
    load: impl FnOnce(&mut RunningMachine) -> Result<(), DaemonError>,
) -> Result<(), Cause> {
    let disks: Vec<_> = live.disks.iter().map(|disk| disk.device().clone()).collect();
    thread::scope(|scope| {
        let syncs: Vec<_> = disks.iter().map(|disk| scope.spawn(|| disk.flush())).collect();
        let loaded = load(live);
        let settled = syncs.into_iter().try_for_each(join_scoped);
        loaded?;
        Ok(settled?)
    })
}

/// Recovers an incoming machine: one that was prepared continues to wait for the source's decision, any other
/// is discarded.
pub(crate) fn recover_incoming(
    host: &Arc<Daemon>,
    record: Record,
    live: Option<RunningMachine>,
    (handover, waiting): (HandoverId, PausedIncoming),
) {
    live.iter().for_each(|live| host.recent_arrivals.insert(handover, &live.ports));
    let machine = host.machines.insert(Machine::new(record.clone(), live));
    let (host, missing) = (host.clone(), Vec::new());
    let recorded = match record.phase {
        Phase::Prepared { never_ran: true, .. } => TargetRecord::NeverRan,
        _ => TargetRecord::Arriving,
    };
    let arrival = IncomingMachineState {
        host: host.clone(),
        handover,
        record,
        vmgenid: None,
        purpose: Purpose::Migration,
        missing,
        // A mark in its runtime directory says whether the user paused it.
        paused: false,
        baseline: None,
        baseline_fill: BaselineFill::nothing(),
        background_sync: BackgroundSync::default(),
        memory: None,
        disk: None,
        buffer: None,
        live: None,
        machine,
        inherited_protection: None,
        runs_since: None,
    };
    if let Err(error) = host.arrivals().recover(handover, (recorded, waiting), Box::new(arrival)) {
        tracing::error!(error = &error as &dyn std::error::Error, "cannot recover an incoming machine");
    }
}
