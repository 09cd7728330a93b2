//! The daemon: all its state, and the requests that are done at once.

use crate::{
    capsule::graph::AddedSizes,
    core::{directories::Directories, error::DaemonError, state::Core},
    evacuate::EvacuationState,
    guest::addresses::GuestAddresses,
    image::ImageSources,
    machine::{
        cleanup::Cleanup,
        cloud_init,
        entry::Machine,
        firmware, folder,
        hotplug::bridge_of,
        memory_room,
        new_disks::{self, NewDisks},
        prestarted_qemu::PrestartedQemus,
        record::{Phase, Record},
        registry::MachineRegistry,
        self_start::SelfStarts,
        settings,
    },
    migrate::{source::pending_handovers::PendingHandovers, target::missing_pages::PageFetchers},
    network::{late_frames::RecentArrivals, managed::ManagedNetworks, shared::SharedLinks, tunnel::Tunnels},
    peers::hosts::AskedHosts,
    protect::Protections,
    server::{
        metrics::StoreSample,
        peer_rpc::{PeerConnections, TransferState},
    },
    transfer::{bucket::Buckets, hash_cache::HashCacheService, pool::Pools, upload::UploadService},
};
use std::{
    net::SocketAddr,
    ops::Deref,
    path::PathBuf,
    sync::{Arc, OnceLock, Weak},
    time::Duration,
};
use tokio::runtime::Handle;
use whimbrel_api::{
    CloudInit, HostInfo, MachineInfo, MachineState, NicRequest, PortRequest, PortsRequest, RunRequest,
    StopMode, StopRequest,
};
use whimbrel_core::{Accel, ByteSize, HostName, MachineConfig, MachineName, NicConfig};
use whimbrel_migrate::target::IncomingMigrations;
use whimbrel_net::{Mac, PortFilter};
use whimbrel_schedule::Schedules;
use whimbrel_store::MasterKey;
use whimbrel_vm::{Reservations, RunningError, RunningMachine};

/// Default time for a guest to shut down.
const POWERDOWN: Duration = Duration::from_secs(60);
/// CPU model of machines whose owner names none: all features that this host and its QEMU have.
const CPU: &str = "max";
const MACHINE: &str = "q35";

pub(crate) struct Daemon {
    pub(crate) me: Weak<Daemon>,
    pub(crate) connections: PeerConnections,
    pub(crate) asked_hosts: AskedHosts,
    pub(crate) transfers: TransferState,
    pub(crate) hash_cache: HashCacheService,
    pub(crate) pools: Pools,
    pub(crate) buckets: Buckets,
    pub(crate) uploads: UploadService,
    core: Arc<Core>,
    pub(crate) machines: MachineRegistry,
    pub(crate) self_starts: Arc<SelfStarts>,
    pub(crate) prestarted: PrestartedQemus,
    pub(crate) handovers: PendingHandovers,
    /// Resources of machines that have left, which are being freed.
    pub(crate) cleanup: Arc<Cleanup>,
    /// Memory that guests were promised.
    pub(crate) memory: Arc<Reservations>,
    /// Disk space that incoming machines were promised.
    pub(crate) disk_space: Arc<Reservations>,
    pub(crate) recent_arrivals: RecentArrivals,
    pub(crate) tunnels: Tunnels,
    pub(crate) fetchers: PageFetchers,
    pub(crate) sizes: AddedSizes,
    pub(crate) evacuation: EvacuationState,
    pub(crate) protections: Protections,
    pub(crate) networks: ManagedNetworks,
    pub(crate) links: SharedLinks,
    pub(crate) images: ImageSources,
    pub(crate) schedules: Schedules,
    /// Addresses that guests have said.
    pub(crate) addresses: GuestAddresses,
    pub(crate) store_sample: StoreSample,
    /// Machines whose guests may send frames of other stations.
    unfiltered: Vec<MachineName>,
    /// Folder of the control sockets of sessions, once it is known.
    pub(crate) session_sockets: OnceLock<PathBuf>,
    incoming: OnceLock<IncomingMigrations>,
}

impl Deref for Daemon {
    type Target = Core;

    fn deref(&self) -> &Core {
        &self.core
    }
}

impl Daemon {
    /// Opens store and identity; `key` is the master key of an encrypted store. Does not touch machines yet.
    pub(crate) fn open(
        (name, listen): (HostName, Option<SocketAddr>),
        layout: Directories,
        unfiltered: Vec<MachineName>,
        images: ImageSources,
        key: Option<MasterKey>,
        runtime: Handle,
    ) -> Result<Arc<Self>, DaemonError> {
        let core = Arc::new(Core::open(name, listen, layout, key, runtime)?);
        let layout = &core.directories;
        let tunnels = Tunnels::open(layout.tunnels())?;
        let handovers = PendingHandovers::load(layout);
        let pools = Pools::open(layout)?;
        let buckets = Buckets::open(layout.buckets());
        let protecting = Protections::open(layout)?;
        let schedules = Schedules::open(layout.schedules(), crate::now_ms())?;
        let networks =
            ManagedNetworks::open(layout.networks(), layout.network_servers(), unfiltered.clone())?;
        let host = Arc::new_cyclic(|me| Self {
            me: me.clone(),
            connections: PeerConnections::default(),
            asked_hosts: AskedHosts::default(),
            transfers: TransferState::default(),
            hash_cache: HashCacheService::default(),
            pools,
            buckets,
            uploads: UploadService::default(),
            core: core.clone(),
            machines: MachineRegistry::new(core.events.clone()),
            self_starts: SelfStarts::new(core.events.clone()),
            handovers,
            cleanup: Arc::default(),
            memory: Reservations::new(&layout.runtime_dirs()),
            disk_space: Reservations::new(layout.data()),
            recent_arrivals: RecentArrivals::default(),
            prestarted: PrestartedQemus::default(),
            tunnels,
            fetchers: PageFetchers::default(),
            sizes: AddedSizes::default(),
            evacuation: EvacuationState::default(),
            protections: protecting,
            networks,
            links: SharedLinks::default(),
            images,
            schedules,
            addresses: GuestAddresses::default(),
            store_sample: StoreSample::default(),
            unfiltered,
            session_sockets: OnceLock::new(),
            incoming: OnceLock::new(),
        });
        // Finding QEMU and testing KVM takes seconds, once: better before the first machine is requested.
        std::thread::spawn(|| whimbrel_qemu::probe().map(whimbrel_qemu::best_accel));
        host.store.set_remote_objects(Arc::new(crate::server::peer_rpc::PeerObjects(host.me.clone())));
        let landing = Arc::new(crate::migrate::target::incoming::DaemonTarget::new(&host));
        host.incoming.get_or_init(|| IncomingMigrations::new(landing));
        Ok(host)
    }

    /// Whether the guest of a machine of this name may send frames of other stations.
    pub(crate) fn is_unfiltered(&self, name: &MachineName) -> bool {
        self.unfiltered.contains(name)
    }

    /// Frames that the guest of a machine may send from `nic`. An address that cannot be read allows none.
    pub(crate) fn port_filter(&self, name: &MachineName, nic: &NicConfig) -> PortFilter {
        if self.is_unfiltered(name) {
            return PortFilter::Off;
        }
        PortFilter::Only(crate::network::tunnel::home::mac_of(&nic.mac).unwrap_or(Mac::BROADCAST))
    }

    /// Incoming machines of this host.
    pub(crate) fn arrivals(&self) -> &IncomingMigrations {
        self.incoming.get().expect("set when the host was opened")
    }

    pub(crate) fn machine_infos(&self) -> Vec<MachineInfo> {
        let mut infos = self.machines.infos();
        self.protections.add_to(&mut infos);
        self.uploads.add_to(&mut infos);
        self.self_starts.add_to(&mut infos);
        self.schedules.add_to(&mut infos);
        self.add_addresses(&mut infos);
        infos
    }

    /// Adds addresses to ports: those that managed networks gave, and those that guests say.
    pub(crate) fn add_addresses(&self, infos: &mut [MachineInfo]) {
        self.networks.add_addresses(infos);
        self.addresses.add_to(infos);
    }

    pub(crate) fn info(&self) -> Result<HostInfo, DaemonError> {
        let qemu = self.qemu().ok();
        Ok(HostInfo {
            name: self.name.clone(),
            version: env!("CARGO_PKG_VERSION").to_owned(),
            public_key: self.identity().map_or_else(|_| String::new(), |own| own.public_key().to_string()),
            listen: self.listen.map(|address| address.to_string()),
            data: self.directories.data().to_owned(),
            pid: std::process::id(),
            qemu_version: qemu.map(|qemu| qemu.version.to_string()),
            accel: qemu.map_or(Accel::Tcg, whimbrel_qemu::best_accel),
            machines: self.machines.all().len() as u32,
            uptime_s: self.started.elapsed().as_secs(),
            store: self.store_usage()?,
            memory: memory_room::host_memory(&self.memory),
        })
    }

    /// Starts a new machine.
    pub(crate) fn run(self: &Arc<Self>, request: RunRequest) -> Result<MachineInfo, DaemonError> {
        settings::check(&request.settings)?;
        let _claim = self.machines.reserve(&request.name, false)?;
        self.networks.check_ports(&request.publish, &request.nics)?;
        let qemu = self.qemu()?;
        let (boot, folder) = (self.boot_of(&request)?, self.directories.machine(&request.name));
        let (profile, mut disks) = (request.profile, NewDisks::of(&request.disks, &request.new_disks)?);
        let wanted = (profile, request.secure_boot);
        let firmware = self.add_firmware(wanted, boot.as_ref(), &mut disks, &folder)?;
        let display = firmware::has_display(&firmware, request.display || profile.has_display())?;
        let has_tpm = request.tpm || profile.has_tpm();
        let tpm = has_tpm.then(|| firmware::add_tpm(&firmware, &mut disks)).transpose()?;
        self.check_first_boot(request.cloud_init.as_ref(), &request.nics)?;
        if request.cloud_init.is_some() {
            disks.push(cloud_init::disk(&folder));
        }
        let cdroms = disks.push_cdroms(&request.cdroms, request.boot_order)?;
        let NewDisks { disks, bases } = disks;
        let machine = qemu.machine_type(MACHINE).unwrap_or(MACHINE).to_owned();
        let accel = request.accel.unwrap_or_else(|| whimbrel_qemu::best_accel(qemu));
        let cpu = self.cpu_model(request.cpu.as_deref().unwrap_or(CPU), accel)?;
        let config = MachineConfig {
            memory: request.memory,
            cpus: request.cpus,
            machine,
            cpu,
            accel,
            disks,
            nics: request.nics.iter().map(nic_of).collect(),
            boot,
            agent_port: true,
            firmware,
            tpm,
            display,
            devices: request.devices.unwrap_or(profile.devices()),
            cdroms,
            hotplug: bridge_of(&firmware),
        };
        new_disks::check(&config)?;
        let mut record = Record::new(request.name.clone(), config, bases);
        record.self_service = request.self_service.clone();
        record.settings = request.settings.clone();
        let live = self.boot_new(&record, request.cloud_init.as_ref())?;
        self.register_new((record, live), request.cloud_init.as_ref(), request.publish)
    }

    /// Refuses what a guest cannot be told, or an address that it cannot have in its network.
    pub(crate) fn check_first_boot(
        &self,
        wanted: Option<&CloudInit>,
        ports: &[NicRequest],
    ) -> Result<(), DaemonError> {
        wanted.map_or(Ok(()), |wanted| cloud_init::check(wanted, !ports.is_empty()))?;
        let bridge = ports.first().and_then(|port| port.bridge.as_deref());
        let address = cloud_init::ipv4_of(wanted);
        address.map_or(Ok(()), |address| self.networks.check_address(bridge, address))
    }

    /// Registers a new machine, which has in its first port the address that its guest was told, and
    /// publishes its ports. If that fails, nothing of the machine is left.
    pub(crate) fn register_new(
        self: &Arc<Self>,
        (record, live): (Record, RunningMachine),
        cloud_init: Option<&CloudInit>,
        publish: Vec<PortRequest>,
    ) -> Result<MachineInfo, DaemonError> {
        let name = record.name.clone();
        let machine = match cloud_init::ipv4_of(cloud_init).zip(record.config.nics.first().cloned()) {
            None => self.register_started(record, live)?,
            Some((address, nic)) => {
                // Before a processor runs, and before a record says that the machine is there: a daemon that
                // dies leaves an address without a machine, which nobody keeps, and not a machine without its
                // own.
                let _steady = self.networks.hold_steady();
                if let Err(error) = self.networks.reserve(&name, &nic, address) {
                    live.end();
                    folder::delete(&self.directories, &name)?;
                    return Err(error);
                }
                self.register_started(record, live)?
            }
        };
        let ports = PortsRequest { publish, unpublish: Vec::new() };
        if ports.publish.is_empty() {
            return Ok(machine.info());
        }
        if let Err(error) = self.change_ports(&name, &ports) {
            let stopped = self.stop(&name, StopRequest { mode: StopMode::Kill, ..StopRequest::default() });
            if let Err(left) = stopped.and_then(|_| self.delete(&name)) {
                let left = &left as &dyn std::error::Error;
                tracing::error!(machine = %name, error = left, "a machine without its ports could not be removed");
            }
            return Err(error);
        }
        Ok(machine.info())
    }

    /// Boots a machine for the first time. On failure nothing of it is left.
    pub(crate) fn boot_new(
        &self,
        record: &Record,
        cloud_init: Option<&CloudInit>,
    ) -> Result<RunningMachine, DaemonError> {
        folder::prepare(&self.directories, &record.name)?;
        let folder = self.directories.machine(&record.name);
        let seed = |wanted| cloud_init::write(&folder, record, wanted);
        let written = firmware::write(&folder, record).and_then(|()| cloud_init.map_or(Ok(()), seed));
        written.and_then(|()| self.boot(record)).or_else(|error| {
            folder::delete(&self.directories, &record.name)?;
            Err(error)
        })
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
            folder::delete(&self.directories, &name)?;
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
        if let Err(error) = record.save(&self.directories).and_then(|()| Ok(live.start()?)) {
            live.end();
            return Err(error);
        }
        self.restore_balloon(&mut record, &live);
        let events = live.events();
        let machine = self.machines.insert(Machine::new(record, Some(live)));
        crate::machine::supervisor::watch(self, &machine, events);
        self.start_fetching_disks(&machine);
        Ok(machine)
    }

    /// Deletes a machine that has ended, with its disks.
    pub(crate) fn delete(&self, name: &MachineName) -> Result<(), DaemonError> {
        let machine = match self.machines.get(name) {
            // A machine that is away belongs to the other host; only its network is no longer here.
            Err(DaemonError::NotFound { .. }) if self.tunnels.end_of(name) => return Ok(()),
            machine => machine?,
        };
        let mut turn = machine.try_lock_in_any_phase("removal", None)?;
        self.machines.check_current(&machine)?;
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
        folder::delete(&self.directories, name)?;
        self.machines.remove(name);
        self.stop_upload(name);
        self.self_starts.forget(name);
        // The host that has its missing pages need not keep them.
        owed.into_iter().for_each(|owed| self.notify_complete(owed.handover));
        Ok(())
    }

    /// Switches a machine off, by power button or at once. A machine that is off stays so.
    pub(crate) fn stop(&self, name: &MachineName, request: StopRequest) -> Result<MachineInfo, DaemonError> {
        let machine = self.machines.get(name)?;
        let patience = request.timeout_s.map_or(POWERDOWN, Duration::from_secs);
        if request.mode == StopMode::Powerdown {
            match self.power_down_protected(&machine, patience) {
                Some(Err(DaemonError::StillRunning { .. })) if request.force => {}
                Some(Err(error)) => return Err(error),
                // The thread that recorded it may still have the lock, and has planned a restart if the rule
                // wants one.
                Some(Ok(())) if machine.info().state == MachineState::Stopped => {
                    self.self_starts.forget(name);
                    return Ok(machine.info());
                }
                _ => {}
            }
        }
        self.unprotect_before_stop(name)?;
        self.self_starts.forget(name);
        {
            let mut turn = match request.mode {
                StopMode::Kill => machine.try_lock_in_any_phase("stop", None)?,
                StopMode::Powerdown => machine.try_lock("stop", None)?,
            };
            if turn.running.is_some() {
                if request.mode == StopMode::Powerdown {
                    match turn.running()?.powerdown(patience) {
                        Err(RunningError::StillRunning { .. }) if request.force => {}
                        pressed => pressed?,
                    }
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
            } else if matches!(turn.record.phase, Phase::Crashed { .. }) {
                // The user wants it off: a later daemon must not restart it.
                turn.record.phase = Phase::Stopped;
                turn.record.save(&self.directories)?;
            }
        }
        Ok(machine.info())
    }

    pub(crate) fn set_paused(&self, name: &MachineName, paused: bool) -> Result<MachineInfo, DaemonError> {
        let machine = self.machines.get(name)?;
        machine
            .try_lock(if paused { "pause" } else { "unpause" }, None)?
            .running()?
            .set_paused_by_user(paused)?;
        Ok(machine.info())
    }

    pub(crate) fn balloon(&self, name: &MachineName, size: ByteSize) -> Result<MachineInfo, DaemonError> {
        let machine = self.machines.get(name)?;
        let directories = self.directories.clone();
        let set = move |record: &mut Record, live: &mut RunningMachine| {
            let memory = record.config.memory;
            let size = crate::machine::balloon::checked_size(size, memory)?;
            live.qemu
                .balloon(size)
                .map_err(|source| DaemonError::Qemu { action: "set the balloon", source: source.into() })?;
            record.ballooned = Some(size).filter(|size| *size < memory);
            record.save(&directories)
        };
        match self.work_protected(name, set.clone()) {
            Some(done) => done?,
            None => {
                let mut turn = machine.try_lock("balloon", None)?;
                let (record, live) = turn.parts()?;
                set(record, live)?;
            }
        }
        Ok(machine.info())
    }
}

pub(crate) fn nic_of(request: &NicRequest) -> NicConfig {
    let random: [u8; 3] = rand::random();
    // 52:54:00 is the prefix that QEMU uses for addresses of its own.
    let made_up = || format!("52:54:00:{:02x}:{:02x}:{:02x}", random[0], random[1], random[2]);
    NicConfig { mac: request.mac.clone().unwrap_or_else(made_up), bridge: request.bridge.clone() }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::core::sample;

    #[test]
    fn a_port_is_filtered_unless_its_machine_is_named() {
        let (daemon, _folders) = sample::daemon();
        let filter = |name: &str, mac: &str| {
            daemon.port_filter(&name.parse().unwrap(), &NicConfig { mac: mac.to_owned(), bridge: None })
        };
        let own = Mac([0x52, 0x54, 0, 0, 0, 1]);
        assert_eq!(filter("web", "52:54:00:00:00:01"), PortFilter::Only(own));
        assert_eq!(filter("router", "52:54:00:00:00:01"), PortFilter::Off);
        assert_eq!(filter("web", "no address"), PortFilter::Only(Mac::BROADCAST));
    }
}
