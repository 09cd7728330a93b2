//! The daemon: all its state, and the requests that are done at once.

use crate::{
    capsule::graph::AddedSizes,
    core::{directories::Directories, error::DaemonError, operations::Operations, refs, rights},
    evacuate::EvacuationState,
    machine::{
        cleanup::Cleanup,
        entry::Machine,
        prestarted_qemu::PrestartedQemus,
        record::{DiskBase, Phase, Record},
    },
    migrate::{source::pending_handovers::PendingHandovers, target::missing_pages::PageFetchers},
    network::{late_frames::RecentArrivals, tunnel::Tunnels},
    protect::Protections,
    running::RunningMachine,
    server::peer_rpc::{PeerConnections, TransferState},
    transfer::{hash_cache::HashCacheService, pool::Pools, upload::UploadService},
};
use std::{
    collections::{BTreeMap, BTreeSet},
    net::SocketAddr,
    path::Path,
    sync::{
        Arc, Mutex, Weak,
        atomic::{AtomicBool, Ordering},
    },
    time::{Duration, Instant},
};
use tokio::runtime::Handle;
use whimbrel_api::{
    DiskSource, HostInfo, MachineInfo, NicRequest, RunRequest, StopMode, StopRequest, StoreUsage, TrustEntry,
};
use whimbrel_core::{
    Accel, Boot, ByteSize, Digest, DiskConfig, HostName, MachineConfig, MachineName, NicConfig, PAGE_SIZE,
    lock,
};
use whimbrel_migrate::target::IncomingMigrations;
use whimbrel_qemu::QemuBinary;
use whimbrel_store::Store;
use whimbrel_wire::{Identity, Rights, Trust, TrustError, TrustedPeer};

/// Default time for a guest to shut down.
const POWERDOWN: Duration = Duration::from_secs(60);
/// `cpu max` means "all that this QEMU emulates", which differs between versions and hosts under KVM.
const CPU: &str = "max";
const MACHINE: &str = "q35";

pub(crate) struct Daemon {
    pub(crate) me: Weak<Daemon>,
    pub(crate) connections: PeerConnections,
    pub(crate) transfers: TransferState,
    pub(crate) hash_cache: HashCacheService,
    pub(crate) pools: Pools,
    pub(crate) uploads: UploadService,
    pub(crate) name: HostName,
    pub(crate) directories: Directories,
    pub(crate) store: Store,
    pub(crate) identity: Identity,
    pub(crate) trust: Arc<Trust>,
    pub(crate) runtime: Handle,
    pub(crate) prestarted: PrestartedQemus,
    pub(crate) handovers: PendingHandovers,
    /// Resources of machines that have left, which are being freed.
    pub(crate) cleanup: Arc<Cleanup>,
    pub(crate) recent_arrivals: RecentArrivals,
    pub(crate) tunnels: Tunnels,
    pub(crate) fetchers: PageFetchers,
    pub(crate) sizes: AddedSizes,
    pub(crate) evacuation: EvacuationState,
    pub(crate) protections: Protections,
    listen: Option<SocketAddr>,
    operations: Operations,
    machines: Mutex<BTreeMap<MachineName, Arc<Machine>>>,
    incoming: std::sync::OnceLock<IncomingMigrations>,
    started: Instant,
    closing: AtomicBool,
    reserved_names: Mutex<BTreeSet<MachineName>>,
}

/// A reserved name. When this is dropped its machine is in the registry, or never will be.
pub(crate) struct NameReservation<'a> {
    host: &'a Daemon,
    name: MachineName,
}

impl Drop for NameReservation<'_> {
    fn drop(&mut self) {
        lock(&self.host.reserved_names).remove(&self.name);
    }
}

impl Daemon {
    /// Opens store and identity. Does not touch machines yet.
    pub(crate) fn open(
        name: HostName,
        listen: Option<SocketAddr>,
        layout: Directories,
        runtime: Handle,
    ) -> Result<Arc<Self>, DaemonError> {
        let store = Store::open(&layout.store(), whimbrel_store::Options::create());
        let store = store.map_err(refs::store_error("open"))?;
        let identity = Identity::load_or_create(&layout.key_dir())
            .map_err(|source| DaemonError::Identity { source: source.into() })?;
        let trust =
            Trust::load(layout.data()).map_err(|source| DaemonError::Identity { source: source.into() })?;
        let tunnels = Tunnels::open(layout.tunnels())?;
        let handovers = PendingHandovers::load(&layout)?;
        let pools = Pools::open(&layout)?;
        let protecting = Protections::open(&layout)?;
        let host = Arc::new_cyclic(|me| Self {
            me: me.clone(),
            connections: PeerConnections::default(),
            transfers: TransferState::default(),
            hash_cache: HashCacheService::default(),
            pools,
            uploads: UploadService::default(),
            name,
            handovers,
            cleanup: Arc::default(),
            recent_arrivals: RecentArrivals::default(),
            directories: layout,
            store,
            identity,
            trust: Arc::new(trust),
            runtime,
            prestarted: PrestartedQemus::default(),
            tunnels,
            fetchers: PageFetchers::default(),
            sizes: AddedSizes::default(),
            evacuation: EvacuationState::default(),
            protections: protecting,
            listen,
            operations: Operations::default(),
            machines: Mutex::default(),
            incoming: std::sync::OnceLock::new(),
            started: Instant::now(),
            closing: AtomicBool::new(false),
            reserved_names: Mutex::default(),
        });
        // Finding QEMU and testing KVM takes seconds, once: better before the first machine is requested.
        std::thread::spawn(|| whimbrel_qemu::probe().map(whimbrel_qemu::best_accel));
        host.store.set_remote_objects(Arc::new(crate::server::peer_rpc::PeerObjects(host.me.clone())));
        let landing = Arc::new(crate::migrate::target::incoming::DaemonTarget::new(&host));
        host.incoming.get_or_init(|| IncomingMigrations::new(landing));
        Ok(host)
    }

    /// Sleeps. Returns false as soon as the daemon is told to stop.
    pub(crate) fn sleep_unless_closing(&self, pause: Duration) -> bool {
        let until = Instant::now() + pause;
        while Instant::now() < until && !self.closing.load(Ordering::Acquire) {
            std::thread::sleep(Duration::from_millis(20).min(pause));
        }
        !self.closing.load(Ordering::Acquire)
    }

    /// Whether the daemon was not told to stop.
    pub(crate) fn is_open(&self) -> bool {
        !self.closing.load(Ordering::Acquire)
    }

    /// Whether the daemon was told to stop.
    pub(crate) fn is_closing(&self) -> bool {
        self.closing.load(Ordering::Acquire)
    }

    /// Tells the daemon to stop.
    pub(crate) fn close(&self) {
        self.closing.store(true, Ordering::Release);
    }

    pub(crate) fn operations(&self) -> &Operations {
        &self.operations
    }

    pub(crate) fn arrivals(&self) -> &IncomingMigrations {
        self.incoming.get().expect("set when the host was opened")
    }

    pub(crate) fn qemu(&self) -> Result<&'static QemuBinary, DaemonError> {
        let failed = |error: &'static whimbrel_qemu::ProbeError| DaemonError::Qemu {
            action: "find its binary",
            source: error.to_string().into(),
        };
        whimbrel_qemu::probe().map_err(failed)
    }

    pub(crate) fn machine(&self, name: &MachineName) -> Result<Arc<Machine>, DaemonError> {
        lock(&self.machines).get(name).cloned().ok_or_else(|| DaemonError::machine_not_found(name))
    }

    pub(crate) fn machines(&self) -> Vec<Arc<Machine>> {
        lock(&self.machines).values().cloned().collect()
    }

    pub(crate) fn machine_infos(&self) -> Vec<MachineInfo> {
        let mut infos: Vec<_> = self.machines().iter().map(|machine| machine.info()).collect();
        self.protections.add_to(&mut infos);
        self.uploads.add_to(&mut infos);
        infos
    }

    /// Adds a machine to the registry. Its name is free, or that of a suspended machine.
    pub(crate) fn insert(&self, machine: Machine) -> Arc<Machine> {
        let machine = Arc::new(machine);
        lock(&self.machines).insert(machine.name().clone(), machine.clone());
        machine
    }

    pub(crate) fn remove(&self, name: &MachineName) {
        lock(&self.machines).remove(name);
    }

    /// Reserves a name for a machine that is being created, or reports that it is in use. Only one of two
    /// concurrent callers gets it.
    pub(crate) fn reserve_name(
        &self,
        name: &MachineName,
        resuming: bool,
    ) -> Result<NameReservation<'_>, DaemonError> {
        self.reserve_name_if(name, || self.check_free(name, resuming))
    }

    /// Like [`Self::reserve_name`], where `check` decides whether the name is free.
    pub(crate) fn reserve_name_if(
        &self,
        name: &MachineName,
        check: impl FnOnce() -> Result<(), DaemonError>,
    ) -> Result<NameReservation<'_>, DaemonError> {
        let mut claimed = lock(&self.reserved_names);
        check()?;
        if !claimed.insert(name.clone()) {
            return Err(DaemonError::NameTaken { name: name.clone() });
        }
        Ok(NameReservation { host: self, name: name.clone() })
    }

    /// Refuses a name that is in use. A suspended machine's name is free for its own resume.
    pub(crate) fn check_free(&self, name: &MachineName, resuming: bool) -> Result<(), DaemonError> {
        let Some(machine) = lock(&self.machines).get(name).cloned() else { return Ok(()) };
        let state = machine.info().state;
        if let (true, whimbrel_api::MachineState::HandedOff { to }) = (resuming, &state) {
            return Err(DaemonError::HandedOff { name: name.clone(), to: to.clone() });
        }
        let suspended = resuming && state == whimbrel_api::MachineState::Suspended;
        if suspended { Ok(()) } else { Err(DaemonError::NameTaken { name: name.clone() }) }
    }

    /// Refuses a machine that was replaced in the registry by a resume or a start while its lock was waited
    /// for.
    pub(crate) fn check_current(&self, machine: &Arc<Machine>) -> Result<(), DaemonError> {
        let name = machine.name();
        match lock(&self.machines).get(name) {
            Some(now) if Arc::ptr_eq(now, machine) => Ok(()),
            Some(_) => Err(DaemonError::Busy { name: name.clone(), with: "a start".into() }),
            None => Err(DaemonError::machine_not_found(name)),
        }
    }

    pub(crate) fn info(&self) -> Result<HostInfo, DaemonError> {
        let qemu = self.qemu().ok();
        Ok(HostInfo {
            name: self.name.clone(),
            version: env!("CARGO_PKG_VERSION").to_owned(),
            public_key: self.identity.public_key().to_string(),
            listen: self.listen.map(|address| address.to_string()),
            data: self.directories.data().to_owned(),
            pid: std::process::id(),
            qemu_version: qemu.map(|qemu| qemu.version.to_string()),
            accel: qemu.map_or(Accel::Tcg, whimbrel_qemu::best_accel),
            machines: lock(&self.machines).len() as u32,
            uptime_s: self.started.elapsed().as_secs(),
            store: self.store_usage()?,
        })
    }

    fn store_usage(&self) -> Result<StoreUsage, DaemonError> {
        let capsules = self.store.capsules().map_err(refs::store_error("list its capsules"))?;
        let images = capsules.iter().flat_map(|capsule| &capsule.manifest.images);
        let logical = images.fold(0, |sum: u64, image| sum.saturating_add(image.size()));
        let free =
            rustix::fs::statvfs(self.directories.data()).map_or(0, |stat| stat.f_bavail * stat.f_frsize);
        Ok(StoreUsage {
            capsules: capsules.len() as u64,
            stored: ByteSize(self.stored_bytes()),
            logical: ByteSize(logical),
            free: ByteSize(free),
        })
    }

    pub(crate) fn run(self: &Arc<Self>, request: RunRequest) -> Result<MachineInfo, DaemonError> {
        let _claim = self.reserve_name(&request.name, false)?;
        let qemu = self.qemu()?;
        let (disks, bases) =
            request.disks.iter().map(disk_of).collect::<Result<Vec<_>, _>>()?.into_iter().unzip();
        let machine = qemu.machine_type(MACHINE).unwrap_or(MACHINE).to_owned();
        let accel = request.accel.unwrap_or_else(|| whimbrel_qemu::best_accel(qemu));
        let config = MachineConfig {
            memory: request.memory,
            cpus: request.cpus,
            machine,
            cpu: CPU.to_owned(),
            accel,
            disks,
            nics: request.nics.iter().map(nic_of).collect(),
            boot: self.boot_of(&request)?,
        };
        let mut record = Record::new(request.name.clone(), config, bases);
        record.self_service = request.self_service.clone();
        let live = RunningMachine::boot(self, &record)?;
        self.register_started(record, live).map(|machine| machine.info())
    }

    /// Registers a machine that has just started here: saves its record, adds it to the registry and
    /// supervises it. If the record cannot be saved, or no CPU runs, nothing of it is left.
    pub(crate) fn register_started(
        self: &Arc<Self>,
        record: Record,
        live: RunningMachine,
    ) -> Result<Arc<Machine>, DaemonError> {
        let name = record.name.clone();
        self.start_services(record, live).or_else(|error| {
            Record::delete(&self.directories, &name)?;
            Err(error)
        })
    }

    /// Like [`Self::register_started`], for a machine that was known here. After a failure it is again as in
    /// `before`.
    pub(crate) fn register_restarted(
        self: &Arc<Self>,
        record: Record,
        live: RunningMachine,
        before: &Record,
    ) -> Result<Arc<Machine>, DaemonError> {
        self.start_services(record, live).or_else(|error| {
            // The failed write may have reached the disk all the same.
            before.save(&self.directories)?;
            Err(error)
        })
    }

    /// On failure its QEMU has ended, and the content of its record is uncertain.
    fn start_services(
        self: &Arc<Self>,
        mut record: Record,
        mut live: RunningMachine,
    ) -> Result<Arc<Machine>, DaemonError> {
        record.process = Some(live.process_record());
        record.vmgenid = live.qemu.vmgenid().ok().map(|guid| guid.to_string());
        if let Err(error) = record.save(&self.directories).and_then(|()| live.start()) {
            live.end();
            return Err(error);
        }
        self.restore_balloon(&mut record, &live);
        let events = live.events();
        let machine = self.insert(Machine::new(record, Some(live)));
        crate::machine::supervisor::watch(self, &machine, events);
        self.start_fetching_disks(&machine);
        Ok(machine)
    }

    fn boot_of(&self, request: &RunRequest) -> Result<Option<Boot>, DaemonError> {
        let Some(kernel) = &request.kernel else {
            return match (&request.initrd, &request.append) {
                (None, None) => Ok(None),
                _ => Err(DaemonError::invalid(
                    "an initial RAM disk or a kernel command line needs a kernel: add --kernel FILE",
                )),
            };
        };
        let kernel = self.store_boot_file(kernel)?;
        let initrd = request.initrd.as_deref().map(|path| self.store_boot_file(path)).transpose()?;
        Ok(Some(Boot { kernel, initrd, append: request.append.clone().unwrap_or_default() }))
    }

    /// Copies a boot file to the boot directory, under its digest.
    fn store_boot_file(&self, path: &Path) -> Result<Digest, DaemonError> {
        let content = std::fs::read(path).map_err(|source| DaemonError::io("read", path, source))?;
        let digest = Digest::of(&content);
        self.write_boot_file(&digest, &content)?;
        Ok(digest)
    }

    pub(crate) fn write_boot_file(&self, digest: &Digest, content: &[u8]) -> Result<(), DaemonError> {
        let kept = self.directories.boot_file(digest);
        if kept.exists() {
            return Ok(());
        }
        whimbrel_wire::atomic_file::replace(&kept, content)
            .map_err(|source| DaemonError::io("write", &kept, source))
    }

    /// Deletes a machine that has ended, with its disks.
    pub(crate) fn delete(&self, name: &MachineName) -> Result<(), DaemonError> {
        let machine = match self.machine(name) {
            // A machine that is away belongs to the other host; only its network is no longer here.
            Err(DaemonError::NotFound { .. }) if self.tunnels.end_of(name) => return Ok(()),
            machine => machine?,
        };
        let mut turn = machine.try_lock_in_any_phase("removal", None)?;
        self.check_current(&machine)?;
        // A machine that was handed over and killed here belongs to the target. An incoming machine must not
        // be touched.
        if turn.running.is_some() || matches!(turn.record.phase, Phase::Prepared { .. }) {
            let state = turn.record.phase.name();
            return Err(DaemonError::State { name: name.clone(), state, needed: "stopped" });
        }
        // If another host has the machine, the tunnel is that host's.
        if !matches!(turn.record.phase, Phase::HandedOver { .. } | Phase::Given { .. }) {
            self.leave_home(&mut turn.record);
            self.tunnels.end_of(name);
        }
        let owed = turn.record.owed.take();
        Record::delete(&self.directories, name)?;
        self.remove(name);
        self.stop_upload(name);
        // The host that has its missing pages need not keep them.
        owed.into_iter().for_each(|owed| self.notify_complete(owed.handover));
        Ok(())
    }

    /// Switches a machine off, by power button or at once. A machine that is off stays so.
    pub(crate) fn stop(&self, name: &MachineName, request: StopRequest) -> Result<MachineInfo, DaemonError> {
        let machine = self.machine(name)?;
        self.unprotect_before_stop(name)?;
        {
            let mut turn = match request.mode {
                StopMode::Kill => machine.try_lock_in_any_phase("stop", None)?,
                StopMode::Powerdown => machine.try_lock("stop", None)?,
            };
            if turn.running.is_some() {
                if request.mode == StopMode::Powerdown {
                    turn.running()?.powerdown(request.timeout_s.map_or(POWERDOWN, Duration::from_secs))?;
                }
                if let Some(live) = turn.running.take() {
                    live.end();
                }
                self.discard_missing_memory(&mut turn);
                turn.record.process = None;
                // Between two hosts the owner is not known here, so a killed machine must not be started
                // here.
                if turn.record.phase == Phase::Here {
                    turn.record.phase = Phase::Stopped;
                    self.leave_home(&mut turn.record);
                }
                turn.record.since_ms = crate::now_ms();
                turn.record.save(&self.directories)?;
            }
        }
        Ok(machine.info())
    }

    pub(crate) fn set_paused(&self, name: &MachineName, paused: bool) -> Result<MachineInfo, DaemonError> {
        let machine = self.machine(name)?;
        machine
            .try_lock(if paused { "pause" } else { "unpause" }, None)?
            .running()?
            .set_paused_by_user(paused)?;
        Ok(machine.info())
    }

    pub(crate) fn balloon(&self, name: &MachineName, size: ByteSize) -> Result<MachineInfo, DaemonError> {
        let machine = self.machine(name)?;
        {
            let mut turn = machine.try_lock("balloon", None)?;
            let memory = turn.record.config.memory;
            let size = crate::running::balloon::checked_size(size, memory)?;
            let ballooned = turn.running()?.qemu.balloon(size);
            ballooned
                .map_err(|source| DaemonError::Qemu { action: "set the balloon", source: source.into() })?;
            turn.record.ballooned = Some(size).filter(|size| *size < memory);
            turn.record.save(&self.directories)?;
        }
        Ok(machine.info())
    }

    pub(crate) fn trust_list(&self) -> Result<Vec<TrustEntry>, DaemonError> {
        let peers = self.trust.list().map_err(identity_error)?;
        Ok(peers.iter().map(rights::entry).collect())
    }

    pub(crate) fn trust_add(&self, entry: TrustEntry) -> Result<TrustEntry, DaemonError> {
        let key = entry.key.as_deref().map(parsed).transpose()?;
        let address = entry.address.as_deref().map(parsed).transpose()?;
        let (read, write) = rights::lists(entry.read.clone(), entry.write.clone())?;
        let name = entry.name.clone();
        let peer = TrustedPeer { name, key, address, rights: Rights::all(), read, write };
        match self.trust.add(peer) {
            Ok(()) => Ok(entry),
            Err(error @ (TrustError::AlreadyTrusted { .. } | TrustError::NoKey { .. })) => {
                Err(DaemonError::invalid(error.to_string()))
            }
            Err(error) => Err(identity_error(error)),
        }
    }

    pub(crate) fn trust_remove(&self, name: &HostName) -> Result<(), DaemonError> {
        match self.trust.remove(name) {
            Ok(_) => Ok(()),
            Err(TrustError::NotListed { name }) => {
                Err(DaemonError::NotFound { what: "host", name: name.to_string() })
            }
            Err(error) => Err(identity_error(error)),
        }
    }
}

fn identity_error(source: TrustError) -> DaemonError {
    DaemonError::Identity { source: source.into() }
}

fn parsed<T: std::str::FromStr<Err: std::fmt::Display>>(text: &str) -> Result<T, DaemonError> {
    text.parse().map_err(|error: T::Err| DaemonError::invalid(error.to_string()))
}

fn disk_of(source: &DiskSource) -> Result<(DiskConfig, DiskBase), DaemonError> {
    let meta =
        std::fs::metadata(&source.path).map_err(|error| DaemonError::io("open", &source.path, error))?;
    if !meta.is_file() {
        return Err(DaemonError::invalid(format!("{} is not a file", source.path.display())));
    }
    let size = source.size.map_or(meta.len(), |size| size.0.max(meta.len()));
    let size = ByteSize(size.next_multiple_of(PAGE_SIZE as u64));
    if size.0 == 0 {
        return Err(DaemonError::invalid(format!(
            "{} is empty; specify the size of the disk",
            source.path.display()
        )));
    }
    Ok((DiskConfig { size }, DiskBase::File { path: source.path.clone() }))
}

pub(crate) fn nic_of(request: &NicRequest) -> NicConfig {
    let random: [u8; 3] = rand::random();
    // 52:54:00 is the prefix that QEMU uses for addresses of its own.
    let made_up = || format!("52:54:00:{:02x}:{:02x}:{:02x}", random[0], random[1], random[2]);
    NicConfig { mac: request.mac.clone().unwrap_or_else(made_up), bridge: request.bridge.clone() }
}
