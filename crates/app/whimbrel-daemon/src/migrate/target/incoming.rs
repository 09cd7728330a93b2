//! Incoming machines: the target side of a migration in the daemon.
//!
//! The record of an incoming machine is durable as soon as its QEMU runs, so only the disks are synced during
//! the pause. A mark in the runtime directory, which ends with the QEMU, says that all pages have arrived. A
//! restarted daemon discards a machine without the mark. It keeps a machine paused that has the mark, or that
//! lost its runtime directory in a power failure, until the source commits or aborts, across restarts.

use crate::{
    core::{error::DaemonError, failpoint::Failpoint},
    daemon::Daemon,
    machine::{
        entry::{Machine, MachineLock},
        record::{DiskBase, Phase, ProcessRecord, Record},
        runtime_dir::{self, RuntimeMark},
        supervisor,
    },
    migrate::{
        source::joined,
        target::{
            background_sync::BackgroundSync,
            baseline::{BaselineFill, IncomingBaseline},
        },
    },
    protect::InheritedProtection,
    running::RunningMachine,
};
use std::{
    fs::File,
    os::unix::fs::{FileExt, MetadataExt},
    path::Path,
    sync::{Arc, Weak},
    thread,
    time::{Duration, Instant},
};
use whimbrel_block::Device;
use whimbrel_core::{Digest, PAGE_SIZE, PageRun};
use whimbrel_migrate::{
    baseline::Baseline,
    compatibility::{self, HostCapacity, Incompatibility},
    handover::{Target, TargetRecord, Waiting},
    late_frames::LateFrame,
    postcopy::messages::MissingPages,
    protocol::{Finish, HandoverId, Offer},
    target::{HostError as Cause, IncomingMachine, TargetHost},
};
use whimbrel_qemu::{VmIdentity, Vmgenid};

/// How long to wait for ended machines to free their memory, which happens at gigabytes a second.
const GIVING_BACK: Duration = Duration::from_secs(10);

/// Reserves space on this host for incoming machines.
pub(crate) struct DaemonTarget(Weak<Daemon>);

/// A machine on its way to this host.
struct Arriving {
    host: Arc<Daemon>,
    handover: HandoverId,
    record: Record,
    vmgenid: Option<Vmgenid>,
    missing: Vec<Digest>,
    /// Whether the user has paused the machine, which stays paused.
    paused: bool,
    /// Baselines, and the fill of memory from its baseline.
    beginning: Option<IncomingBaseline>,
    filling: BaselineFill,
    settling: BackgroundSync,
    /// Present until the machine is prepared; then the registry's entry has it.
    live: Option<RunningMachine>,
    machine: Arc<Machine>,
    /// Protection that the machine inherits.
    heir: Option<InheritedProtection>,
    runs_since: Option<Instant>,
}

impl DaemonTarget {
    pub(crate) fn new(host: &Arc<Daemon>) -> Self {
        Self(Arc::downgrade(host))
    }
}

impl TargetHost for DaemonTarget {
    fn page(&self, digest: &Digest, out: &mut [u8; PAGE_SIZE]) -> bool {
        self.0.upgrade().is_some_and(|host| page_here(&host, digest, out))
    }

    fn strays(&self, handover: HandoverId, strays: Vec<LateFrame>) {
        if let Some(host) = self.0.upgrade() {
            host.newcomers.deliver(handover, &strays);
        }
    }

    fn reserve(&self, offer: &Offer) -> Result<Box<dyn IncomingMachine>, Cause> {
        Failpoint::Offer.reached();
        let host = self.0.upgrade().ok_or("the host is shutting down")?;
        check_fit(&host, offer)?;
        let heir = InheritedProtection::expect(&host, offer)?;
        let claim = host.claim_name(&offer.name, false)?;
        let beginning = host.choose_baseline(offer);
        let mut record = Record::new(offer.name.clone(), offer.config.clone(), beginning.bases.clone());
        record.phase = Phase::Prepared { handover: offer.handover, ahead: true };
        record.arrived_by = Some(offer.handover);
        // The disks read from the capsule of their bases, which is retained as long as they are.
        record.origin = beginning.capsule.or(offer.origin);
        record.last = offer.origin.filter(|last| beginning.capsule.is_some_and(|capsule| capsule != *last));
        record.vmgenid = Some(offer.vmgenid.clone());
        record.tunnel = offer.tunnel.clone();
        if let Some(from) = &offer.leaves {
            crate::migrate::target::missing_pages::expect(&host, &mut record, offer.handover, from);
        }
        if let Some(away) = host.is_away(&record) {
            // Fail now rather than when the machine is here without its network.
            host.route(&away.home)?;
        }
        let missing = offer.blobs.iter().map(|(digest, _)| *digest);
        let missing = missing.filter(|digest| !host.has_boot_file(digest)).collect();
        let vmgenid = Some(offer.vmgenid.parse().map_err(|_| "the offer's generation id is invalid")?);
        let machine = host.insert(Machine::new(record.clone(), None));
        drop(claim);
        let mut landing = Arriving {
            host,
            handover: offer.handover,
            record,
            vmgenid,
            missing,
            paused: offer.paused,
            beginning: Some(beginning),
            filling: BaselineFill::nothing(),
            settling: BackgroundSync::default(),
            live: None,
            machine,
            heir,
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
        if self.layout.boot_file(digest).exists() {
            return true;
        }
        let stored = || self.write_boot_file(digest, &self.store.blob(digest).ok()?).ok();
        self.store.has(&[*digest]) == [true] && stored().is_some()
    }
}

/// Reads the page of this digest from the hash cache or the store.
fn page_here(host: &Daemon, digest: &Digest, out: &mut [u8; PAGE_SIZE]) -> bool {
    if host.page_cache().is_some_and(|cache| cache.get(digest, out)) {
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

/// Checks the offer before anything is created. If memory or disk space is short, waits until ended machines
/// have freed theirs.
fn check_fit(host: &Daemon, offer: &Offer) -> Result<(), Cause> {
    match compatibility::check(offer, &here(host, offer)?) {
        Err(Incompatibility::Memory { .. } | Incompatibility::Disk { .. })
            if host.retiring.wait(GIVING_BACK) =>
        {
            Ok(compatibility::check(offer, &here(host, offer)?)?)
        }
        checked => Ok(checked?),
    }
}

fn here(host: &Daemon, offer: &Offer) -> Result<HostCapacity, Cause> {
    let qemu = host.qemu()?;
    let room =
        |path: &Path| rustix::fs::statvfs(path).map(|stat| stat.f_bavail.saturating_mul(stat.f_frsize));
    // A machine that stays on its home network needs no bridge here.
    let bridges = offer.config.nics.iter().filter_map(|nic| nic.bridge.clone());
    let missing = |bridge: &String| !has_interface(bridge);
    let away = offer.tunnel.as_ref().is_some_and(|tunnel| tunnel.home != host.name);
    Ok(HostCapacity {
        name_taken: host.check_free(&offer.name, false).is_err(),
        qemu_version: qemu.version.to_string(),
        knows_machine_type: qemu.machine_type(&offer.config.machine).is_some(),
        accel: whimbrel_qemu::best_accel(qemu),
        processor: processor(),
        memory: room(&host.layout.slots())?.min(memory_available().unwrap_or(u64::MAX)),
        disk: room(host.layout.data())?,
        bridge_missing: bridges.into_iter().find(missing).filter(|_| !away),
    })
}

/// Whether this host has a network interface of this name. Queries a socket because `/sys` may show the
/// interfaces of another network namespace.
fn has_interface(name: &str) -> bool {
    use rustix::net::{AddressFamily, SocketType, netdevice, socket};
    let asked = socket(AddressFamily::INET, SocketType::DGRAM, None);
    // Without an answer, plugging in the port will tell.
    asked.map_or(true, |socket| netdevice::name_to_index(&socket, name).is_ok())
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
        disk.owned_bytes().saturating_add(under).min(config.size.0)
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

impl Arriving {
    /// Starts its QEMU once everything that QEMU opens by name is here.
    fn make_ready(&mut self) -> Result<(), DaemonError> {
        if self.missing.is_empty() && self.live.is_none() {
            let live =
                self.live.insert(RunningMachine::create_incoming(&self.host, &self.record, self.vmgenid)?);
            if let Some(beginning) = &mut self.beginning {
                let filling = live.memory.file().and_then(|ram| beginning.fill(ram));
                self.filling = filling.map_err(|source| DaemonError::io("fill", &live.ram_path(), source))?;
            }
            if self.paused {
                live.stay_paused()?;
            }
            // Before the pause, in which every sync is downtime.
            self.record.process = Some(live.process_record());
            self.record.save(&self.host.layout)?;
            self.heir.iter().try_for_each(|heir| heir.note(&self.host))?;
        }
        Ok(())
    }

    /// Handles a commit for a machine whose QEMU has ended while it waited. The machine belongs to this host
    /// from now on, as crashed: its disks are here, and nobody else may ever run it.
    fn end_of_the_owned(&self, turn: &mut MachineLock<'_>) -> Result<(), DaemonError> {
        if matches!(turn.record.phase, Phase::Prepared { .. }) {
            match turn.live.take() {
                Some(live) => live.end(),
                None => self.end_left_over(turn),
            }
            let reason = "its QEMU ended before the source had committed".to_owned();
            turn.record.phase = Phase::Crashed { reason };
            turn.record.process = None;
            turn.record.since_ms = crate::now_ms();
        }
        turn.record.save(&self.host.layout)
    }

    /// Handles a commit after this host's daemon was restarted with the machine prepared: it yields the
    /// machine to the backup host.
    fn yield_to_backup(&self) -> Result<(), DaemonError> {
        let mut turn = self.machine.lock("arrival");
        if matches!(turn.record.phase, Phase::Prepared { .. }) {
            turn.record.phase = Phase::Here;
            turn.record.since_ms = crate::now_ms();
        }
        turn.record.save(&self.host.layout)?;
        drop(turn);
        self.host.yield_to_backup(&self.machine)
    }

    /// Kills a QEMU that could not be recovered but may still be alive.
    fn end_left_over(&self, turn: &MachineLock<'_>) {
        if let (None, Some(process)) = (&turn.live, &turn.record.process) {
            runtime_dir::clear(&self.host.layout.slot(&process.slot));
        }
    }

    /// Waits until memory has its baseline; only then may pages of it be written.
    fn filled(&self, array: usize) -> Result<(), Cause> {
        if array == 0 { self.filling.wait() } else { Ok(()) }
    }

    fn wrote(&mut self, bytes: u64) {
        if let Some(live) = &self.live {
            self.settling.wrote(bytes, &live.disks);
        }
    }

    fn live(&mut self) -> Result<&mut RunningMachine, Cause> {
        self.live.as_mut().ok_or_else(|| "pages arrived before the boot files".into())
    }
}

impl IncomingMachine for Arriving {
    fn blobs_missing(&self) -> Vec<Digest> {
        self.missing.clone()
    }

    fn baselines(&self) -> Vec<Baseline> {
        self.beginning.as_ref().map(|beginning| beginning.begun_as.clone()).unwrap_or_default()
    }

    fn put_blob(&mut self, digest: Digest, content: Vec<u8>) -> Result<(), Cause> {
        self.host.write_boot_file(&digest, &content)?;
        self.missing.retain(|missing| *missing != digest);
        Ok(self.make_ready()?)
    }

    fn read_blob(&self, digest: &Digest, offset: u64, out: &mut [u8]) -> Result<(), Cause> {
        Ok(File::open(self.host.layout.boot_file(digest))?.read_exact_at(out, offset)?)
    }

    fn write(&mut self, array: usize, run: PageRun, data: &[u8]) -> Result<(), Cause> {
        Failpoint::Pages.reached();
        self.filled(array)?;
        let live = self.live()?;
        match array.checked_sub(1) {
            None => Ok(live.memory.write(run, data)?),
            Some(disk) => {
                live.disks[disk].device().write_at(run.offset(), data)?;
                self.wrote(data.len() as u64);
                Ok(())
            }
        }
    }

    fn zero(&mut self, array: usize, run: PageRun) -> Result<(), Cause> {
        self.filled(array)?;
        let live = self.live()?;
        match array.checked_sub(1) {
            None => Ok(live.memory.zero(run)?),
            Some(disk) => Ok(live.disks[disk].device().write_zeroes(run.offset(), run.bytes() as u64)?),
        }
    }

    fn read(&self, array: usize, run: PageRun, out: &mut [u8]) -> Result<(), Cause> {
        self.filled(array)?;
        let live = self.live.as_ref().ok_or("pages were requested before the machine exists")?;
        match array.checked_sub(1) {
            None => Ok(live.memory.read(run, out)?),
            Some(disk) => Ok(live.disks[disk].device().read_at(run.offset(), out)?),
        }
    }

    fn add_missing(&mut self, owed: &MissingPages, piece: &[u8]) -> Result<(), Cause> {
        let array = owed.array as usize;
        self.filled(array)?;
        let taking = crate::migrate::target::missing_pages::fetcher_of(&self.host, &self.record);
        let stale = taking.ok_or("missing pages without postcopy")?.add_missing(array, owed.hot, piece)?;
        if owed.hot { Ok(()) } else { Ok(self.live()?.disown(array, &stale)?) }
    }

    fn is_alive(&self) -> bool {
        self.live.as_ref().is_none_or(|live| live.qemu.process().is_alive())
    }

    fn expect_state(&mut self, ahead: &[u8]) -> Result<(), Cause> {
        Ok(self.live()?.expect_state(ahead)?)
    }

    fn prepare(&mut self, finish: &Finish, device_state: &[u8]) -> Result<(), Cause> {
        Failpoint::Last.reached();
        self.filled(0)?;
        let (host, record) = (self.host.clone(), self.record.clone());
        let inherits = self.heir.is_some();
        let live = self.live()?;
        if inherits {
            InheritedProtection::attach_consumer(&mut live.ledgers)?;
        }
        beside_its_disks(live, |live| {
            match crate::migrate::target::missing_pages::fetcher_of(&host, &record) {
                None => live.load(device_state, VmIdentity::Kept),
                Some(taking) => {
                    crate::migrate::target::missing_pages::save_sets(&host, &record, live, &taking)?;
                    live.load_with_pages_missing(device_state, &taking)
                }
            }
        })?;
        for (port, addresses) in live.ports.iter().zip(&finish.ports) {
            port.add_addresses(addresses);
        }
        host.newcomers.insert(finish.handover, &live.ports);
        // Synced after the disks: with the mark set, this host may be asked to run the machine.
        live.mark_whole()?;
        let mut turn = self.machine.lock("arrival");
        turn.record = self.record.clone();
        turn.live = self.live.take();
        drop(turn);
        Failpoint::Ready.reached();
        Ok(())
    }

    fn run(&mut self) -> Result<(), Cause> {
        Failpoint::Commit.reached();
        if let Some(heir) = self.heir.take() {
            self.runs_since = heir.run(&self.host, &self.machine)?;
            Failpoint::Running.reached();
            return Ok(());
        }
        if self.host.protecting.is_heir(self.machine.name()) {
            return Ok(self.yield_to_backup()?);
        }
        let host = &self.host;
        let events = {
            let mut turn = self.machine.lock("arrival");
            if turn.live.as_ref().is_none_or(|live| !live.qemu.process().is_alive()) {
                return Ok(self.end_of_the_owned(&mut turn)?);
            }
            let (record, live) = turn.parts()?;
            let events = live.events();
            // The machine's own port replaces the tunnel's end.
            host.is_home(record);
            live.open_ports();
            // No other host may run it any more: switches may relearn its addresses while the CPUs start.
            live.ports.iter().for_each(crate::running::NetworkPort::announce);
            if !live.stays_paused() {
                live.set_paused(false)?;
            }
            self.runs_since = Some(Instant::now());
            record.phase = Phase::Here;
            record.since_ms = crate::now_ms();
            record.save(&self.host.layout)?;
            host.start_fetching(&self.machine, live);
            events
        };
        supervisor::watch(&self.host, &self.machine, events);
        tracing::info!(machine = %self.machine.name(), handover = %self.handover, "a migration to this host has completed");
        Failpoint::Running.reached();
        Ok(())
    }

    fn runs_since(&self) -> Option<Instant> {
        self.runs_since
    }

    fn discard(&mut self) {
        self.filling = BaselineFill::nothing();
        let mut turn = self.machine.lock("removal");
        match self.live.take().or(turn.live.take()) {
            Some(live) => live.end(),
            None => self.end_left_over(&turn),
        }
        if let Err(error) = Record::forget(&self.host.layout, self.machine.name()) {
            tracing::warn!(
                error = &error as &dyn std::error::Error,
                "cannot delete an aborted incoming machine"
            );
        }
        turn.record.phase = Phase::Stopped;
        self.host.owings.remove(self.handover);
        self.host.protecting.inherits_nothing(&turn.record);
        drop(turn);
        self.host.remove(self.machine.name());
    }
}

/// Loads the device state while the disks are synced: loading does not write to them.
fn beside_its_disks(
    live: &mut RunningMachine,
    load: impl FnOnce(&mut RunningMachine) -> Result<(), DaemonError>,
) -> Result<(), Cause> {
    let disks: Vec<_> = live.disks.iter().map(|disk| disk.device().clone()).collect();
    thread::scope(|scope| {
        let syncs: Vec<_> = disks.iter().map(|disk| scope.spawn(|| disk.flush())).collect();
        let loaded = load(live);
        let settled = syncs.into_iter().try_for_each(joined);
        loaded?;
        Ok(settled?)
    })
}

/// Whether to discard an incoming machine that an earlier daemon left: its source was never told that all
/// pages had arrived.
pub(crate) fn is_unfinished(host: &Daemon, record: &Record) -> bool {
    let Phase::Prepared { ahead, .. } = record.phase else { return false };
    let waiting = waiting(host, record.process.as_ref(), ahead);
    Target::recovered(TargetRecord::Arriving, waiting).0 == Target::Discarded
}

fn waiting(host: &Daemon, process: Option<&ProcessRecord>, ahead: bool) -> Waiting {
    let slot = process.map(|process| host.layout.slot(&process.slot)).filter(|slot| slot.exists());
    match slot {
        None => Waiting::Gone,
        Some(slot) if ahead && !RuntimeMark::Whole.is_on(&slot) => Waiting::Unfinished,
        Some(_) => Waiting::Whole,
    }
}

/// Discards an incoming machine whose migration was interrupted.
pub(crate) fn drop_unfinished(host: &Daemon, record: &Record) {
    tracing::info!(machine = %record.name, "discarding an incoming machine whose migration was interrupted");
    host.protecting.inherits_nothing(record);
    if let Some(process) = &record.process {
        runtime_dir::clear(&host.layout.slot(&process.slot));
    }
    if let Err(error) = Record::forget(&host.layout, &record.name) {
        tracing::warn!(error = &error as &dyn std::error::Error, "cannot delete an unfinished migration");
    }
}

/// Recovers a machine that was prepared when the daemon ended: it continues to wait for the source's
/// decision.
pub(crate) fn wait_on(
    host: &Arc<Daemon>,
    record: Record,
    live: Option<RunningMachine>,
    handover: HandoverId,
) {
    live.iter().for_each(|live| host.newcomers.insert(handover, &live.ports));
    let machine = host.insert(Machine::new(record.clone(), live));
    let (host, missing) = (host.clone(), Vec::new());
    let arrival = Arriving {
        host: host.clone(),
        handover,
        record,
        vmgenid: None,
        missing,
        // A mark in its runtime directory says whether the user paused it.
        paused: false,
        beginning: None,
        filling: BaselineFill::nothing(),
        settling: BackgroundSync::default(),
        live: None,
        machine,
        heir: None,
        runs_since: None,
    };
    if let Err(error) = host.arrivals().adopt_prepared(handover, Box::new(arrival)) {
        tracing::error!(error = &error as &dyn std::error::Error, "cannot recover an incoming machine");
    }
}
