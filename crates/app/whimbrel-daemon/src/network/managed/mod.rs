//! Managed networks of this host: their records, and the bridges, rules and DHCP servers that follow from
//! them.
//!
//! The record is the truth. A thread compares it with the machines of the host whenever these change, gives
//! new ones addresses, and renews what differs from what was set up last; what fails is shown and retried.
//! Bridges, rules and servers go on without a daemon. A record that cannot be read stays where it is, and its
//! network as it was.

mod record;
mod share;

pub(crate) use record::Leases;

use crate::{core::error::DaemonError, core::notifier::Notifier, daemon::Daemon};
use ipnet::Ipv4Net;
use record::{MachinePort, NetworkRecord, path_of};
use std::{
    collections::BTreeMap,
    net::{IpAddr, Ipv4Addr, SocketAddr, TcpListener, TcpStream, UdpSocket},
    path::PathBuf,
    sync::{Arc, Mutex, MutexGuard},
    time::Duration,
};
use whimbrel_api::{
    MachineInfo, NetworkInfo, NetworkRequest, NicRequest, PortProtocol, PortRequest, PortsRequest,
    PublishedPort,
};
use whimbrel_core::{MachineName, NicConfig, error_chain, lock};
use whimbrel_net::managed::{
    ManagedNetwork, ProgramError, addresses, bridge, dhcp, firewall, is_network_name,
};

/// Longest time until a DHCP server that has ended is started again.
const CARE: Duration = Duration::from_secs(5);
/// Time for a published port to answer.
const ANSWER: Duration = Duration::from_millis(300);
/// Most published ports of a network: each is a rule, and a thread while they are tried.
const PORTS_MAX: usize = 256;

/// Why the record of a network cannot be read, if it cannot.
pub(crate) fn check_file(path: &std::path::Path) -> Result<(), String> {
    NetworkRecord::load(path).map(drop)
}

/// The managed networks of this host.
pub(crate) struct ManagedNetworks {
    /// Folder of records, and folder of the DHCP servers' files.
    records: PathBuf,
    run: PathBuf,
    /// Machines that may send from any address.
    unfiltered: Vec<MachineName>,
    table: Mutex<BTreeMap<String, Network>>,
    /// Held while the machines of the host are listed and their addresses follow, and while one is renamed.
    steady: Mutex<()>,
}

struct Network {
    record: NetworkRecord,
    /// What was set up last; none if that failed.
    applied: Option<ManagedNetwork>,
    server: Option<dhcp::DhcpServer>,
    problem: Option<String>,
}

impl Network {
    fn new(record: NetworkRecord) -> Self {
        Self { record, applied: None, server: None, problem: None }
    }

    /// Makes bridge, rules and server what the record says.
    fn apply(&mut self, networks: &ManagedNetworks) -> Result<(), ProgramError> {
        let wanted = self.record.wanted(&networks.unfiltered);
        let alive = self.server.as_mut().is_some_and(dhcp::DhcpServer::is_alive);
        if alive && self.applied.as_ref() == Some(&wanted) {
            return Ok(());
        }
        self.applied = None;
        bridge::ensure(&wanted)?;
        firewall::apply(&wanted)?;
        let dir = networks.run.join(&wanted.name);
        if !self.server.as_mut().is_some_and(|server| server.serves(&wanted, &dir)) {
            if let Some(server) = self.server.take() {
                server.stop();
            }
            std::fs::create_dir_all(&dir)
                .map_err(|source| ProgramError::Setting { setting: dir.display().to_string(), source })?;
            self.server = Some(dhcp::DhcpServer::start(&wanted, &dir)?);
        }
        self.applied = Some(wanted);
        Ok(())
    }

    fn info(&self) -> NetworkInfo {
        let record = &self.record;
        let port = |port: &MachinePort| {
            let PortRequest { listen, port: number, guest_port, protocol } = port.port;
            let address = IpAddr::V4(record.address_of(&port.machine)?);
            let machine = port.machine.clone();
            Some(PublishedPort {
                machine,
                listen,
                port: number,
                address,
                guest_port,
                protocol,
                answers: None,
            })
        };
        NetworkInfo {
            name: record.name.clone(),
            subnet: record.subnet.to_string(),
            gateway: addresses::gateway(record.subnet),
            subnet6: record.subnet6.map(|subnet| subnet.to_string()),
            isolated: record.isolated,
            problem: self.problem.clone(),
            machines: record.leases.iter().map(share::address_info).collect(),
            ports: record.ports.iter().filter_map(port).collect(),
            hosts: record.hosts.iter().map(share::host_info).collect(),
        }
    }
}

impl ManagedNetworks {
    /// Reads the records. Sets nothing up yet.
    pub(crate) fn open(
        records: PathBuf,
        run: PathBuf,
        unfiltered: Vec<MachineName>,
    ) -> Result<Self, DaemonError> {
        std::fs::create_dir_all(&records).map_err(|source| DaemonError::io("create", &records, source))?;
        let entries =
            std::fs::read_dir(&records).map_err(|source| DaemonError::io("read", &records, source))?;
        let mut table = BTreeMap::new();
        for path in entries.flatten().map(|entry| entry.path()) {
            if path.extension().is_none_or(|extension| extension != "json") {
                continue;
            }
            match NetworkRecord::load(&path) {
                Ok(record) => drop(table.insert(record.name.clone(), Network::new(record))),
                Err(reason) => {
                    tracing::error!(path = %path.display(), reason, "a network's record cannot be read; it stays as it is");
                }
            }
        }
        Ok(Self { records, run, unfiltered, table: Mutex::new(table), steady: Mutex::default() })
    }

    fn table(&self) -> MutexGuard<'_, BTreeMap<String, Network>> {
        lock(&self.table)
    }

    /// Keeps addresses and published ports as they are until the result is dropped.
    pub(crate) fn hold_steady(&self) -> MutexGuard<'_, ()> {
        lock(&self.steady)
    }

    /// Gives the addresses and published ports of a machine its new name, by which others find it from then
    /// on. The caller holds them steady. If it cannot be set up now, that is shown and tried again.
    pub(crate) fn rename_machine(&self, from: &MachineName, to: &MachineName) -> Result<(), DaemonError> {
        for network in self.table().values_mut() {
            let mut record = network.record.clone();
            record.rename(from, to);
            if record == network.record {
                continue;
            }
            record.save(&self.records)?;
            network.record = record;
            if let Err(error) = network.apply(self) {
                network.problem = Some(error_chain(&error));
            }
        }
        Ok(())
    }

    pub(crate) fn list(&self) -> Vec<NetworkInfo> {
        self.table().values().map(Network::info).collect()
    }

    /// Adds the addresses that machines have in these networks.
    pub(crate) fn add_addresses(&self, machines: &mut [MachineInfo]) {
        let table = self.table();
        for nic in machines.iter_mut().flat_map(|machine| &mut machine.nics) {
            let network = nic.bridge.as_ref().and_then(|bridge| table.get(bridge));
            nic.addresses.extend(network.and_then(|network| network.record.address_at(&nic.mac)));
        }
    }

    /// One network, with its TCP ports tried.
    pub(crate) fn show(&self, name: &str) -> Result<NetworkInfo, DaemonError> {
        let mut info = self.table().get(name).map(Network::info).ok_or_else(|| self.not_found(name))?;
        std::thread::scope(|scope| {
            for port in info.ports.iter_mut().filter(|port| port.protocol == PortProtocol::Tcp) {
                let address = SocketAddr::new(port.address, port.guest_port);
                scope
                    .spawn(move || port.answers = Some(TcpStream::connect_timeout(&address, ANSWER).is_ok()));
            }
        });
        Ok(info)
    }

    /// Tells a network that is not there from one whose record cannot be read.
    fn not_found(&self, name: &str) -> DaemonError {
        let path = path_of(&self.records, name);
        match NetworkRecord::load(&path) {
            Err(reason) if is_network_name(name) && path.exists() => DaemonError::invalid(format!(
                "the record of the network {name}, {}, cannot be read: {reason}; its bridge and rules stay as they \
                 are; restore the file, or move it away and remove the bridge, then restart the daemon",
                path.display()
            )),
            _ => DaemonError::NotFound { what: "network", name: name.to_owned() },
        }
    }

    /// Creates a network and sets it up. If that fails, nothing of it is left.
    pub(crate) fn create(&self, request: &NetworkRequest) -> Result<NetworkInfo, DaemonError> {
        let record = NetworkRecord::new(request)?;
        let name = record.name.clone();
        let mut table = self.table();
        if path_of(&self.records, &name).exists() || table.contains_key(&name) {
            return Err(DaemonError::invalid(format!("there is a network {name} already")));
        }
        if bridge::exists(&name) {
            return Err(DaemonError::invalid(format!(
                "this host has an interface {name} that is not of a network"
            )));
        }
        self.check_subnet(&table, &record)?;
        let mut network = Network::new(record);
        network.record.save(&self.records)?;
        if let Err(source) = network.apply(self) {
            self.take_down(&name, &mut network)?;
            return Err(DaemonError::Network { name, source });
        }
        let info = network.info();
        table.insert(name, network);
        Ok(info)
    }

    /// Refuses a subnet whose addresses mean something else on this host.
    fn check_subnet(
        &self,
        table: &BTreeMap<String, Network>,
        record: &NetworkRecord,
    ) -> Result<(), DaemonError> {
        let overlaps = |subnet: &Ipv4Net| {
            subnet.contains(&record.subnet.network()) || record.subnet.contains(&subnet.network())
        };
        let other = table.values().find(|network| overlaps(&network.record.subnet));
        let taken = other.map(|network| format!("the network {}", network.record.name));
        let own = || bridge::addresses().into_iter().find(|(address, _)| record.subnet.contains(address));
        match taken.or_else(|| own().map(|(_, interface)| format!("the interface {interface}"))) {
            Some(by) => Err(DaemonError::invalid(format!(
                "{} has addresses of {by}; choose others with --subnet",
                record.subnet
            ))),
            None => Ok(()),
        }
    }

    /// Removes a network of which no machine has an address.
    fn delete(&self, name: &str, machines: &[MachineInfo]) -> Result<(), DaemonError> {
        let mut table = self.table();
        let network = table.get_mut(name).ok_or_else(|| self.not_found(name))?;
        let uses =
            |machine: &&MachineInfo| machine.nics.iter().any(|nic| nic.bridge.as_deref() == Some(name));
        if let Some(machine) = machines.iter().find(uses) {
            return Err(DaemonError::invalid(format!("{} has a port in the network {name}", machine.name)));
        }
        self.take_down(name, network)?;
        table.remove(name);
        Ok(())
    }

    /// Removes all that was made for a network, its record last.
    fn take_down(&self, name: &str, network: &mut Network) -> Result<(), DaemonError> {
        let failed = |source| DaemonError::Network { name: name.to_owned(), source };
        network.applied = None;
        if let Some(server) = network.server.take() {
            server.stop();
        }
        let dir = self.run.join(name);
        dhcp::end_former(&dir);
        let removed = firewall::remove(name).and_then(|()| bridge::remove(name));
        match removed {
            // Without the programs nothing was made.
            Ok(()) | Err(ProgramError::Missing { .. }) => {}
            Err(source) => return Err(failed(source)),
        }
        let _ = std::fs::remove_dir_all(dir);
        let path = path_of(&self.records, name);
        std::fs::remove_file(&path).map_err(|source| DaemonError::io("remove", &path, source))
    }

    /// Gives the machines of this host their addresses and sets up what has changed. With `forget`,
    /// `machines` are all there are, so the addresses of others are free.
    fn reconcile(&self, machines: &[MachineInfo], forget: bool) {
        for network in self.table().values_mut() {
            let before = network.problem.take();
            let assigned = self.assign(network, machines, forget);
            network.problem = match assigned {
                Err(error) => Some(error_chain(&error)),
                Ok(full) => match network.apply(self) {
                    Err(error) => Some(error_chain(&error)),
                    Ok(()) => full
                        .map(|machine| format!("no address is free for {machine}"))
                        .or_else(|| network.record.conflict()),
                },
            };
            if let Some(problem) = network.problem.as_ref().filter(|_| network.problem != before) {
                tracing::error!(network = network.record.name, problem, "a managed network does not work");
            }
        }
    }

    /// Returns a machine for which there is no address.
    fn assign(
        &self,
        network: &mut Network,
        machines: &[MachineInfo],
        forget: bool,
    ) -> Result<Option<MachineName>, DaemonError> {
        let mut record = network.record.clone();
        let without = record.assign(machines, forget);
        if record != network.record {
            record.save(&self.records)?;
            network.record = record;
        }
        Ok(without.into_iter().next())
    }

    /// Refuses ports of the host that are in use, and ports of a machine that is in no managed network.
    pub(crate) fn check_ports(&self, ports: &[PortRequest], nics: &[NicRequest]) -> Result<(), DaemonError> {
        if ports.is_empty() {
            return Ok(());
        }
        let table = self.table();
        let managed = |nic: &NicRequest| nic.bridge.as_ref().is_some_and(|bridge| table.contains_key(bridge));
        if !nics.iter().any(managed) {
            return Err(DaemonError::invalid(
                "only ports of a machine in a managed network can be published; `whimbrel network create` makes one",
            ));
        }
        ports.iter().try_for_each(|port| check_free(&table, port))
    }

    /// Refuses an address for a machine in this bridge, if the bridge is that of a network that does not have
    /// the address free.
    pub(crate) fn check_address(&self, bridge: Option<&str>, wanted: Ipv4Net) -> Result<(), DaemonError> {
        let table = self.table();
        let network = bridge.and_then(|bridge| table.get(bridge));
        network.map_or(Ok(()), |network| network.record.check_address(None, wanted))
    }

    /// Gives a port of a machine the address that its guest was told, if it is in a managed network: that
    /// would else give it another one, and drop what it sends from its own. An address of a machine that is
    /// not there stays as long as the caller holds the networks steady.
    pub(crate) fn reserve(
        &self,
        name: &MachineName,
        nic: &NicConfig,
        wanted: Ipv4Net,
    ) -> Result<(), DaemonError> {
        let mut table = self.table();
        let Some(network) = nic.bridge.as_ref().and_then(|bridge| table.get_mut(bridge)) else {
            return Ok(());
        };
        let mut record = network.record.clone();
        record.reserve(&nic.mac, name, wanted)?;
        self.replace(network, record)
    }

    /// Changes the published ports of a machine; all or none.
    fn change_ports(
        &self,
        name: &MachineName,
        request: &PortsRequest,
    ) -> Result<Vec<PublishedPort>, DaemonError> {
        let mut table = self.table();
        for gone in &request.unpublish {
            let is_it = |port: &MachinePort| {
                port.machine == *name && (port.port.port, port.port.protocol) == (gone.port, gone.protocol)
            };
            let Some(network) = table.values_mut().find(|network| network.record.ports.iter().any(is_it))
            else {
                return Err(DaemonError::invalid(format!("port {} does not lead to {name}", gone.port)));
            };
            let mut record = network.record.clone();
            record.ports.retain(|port| !is_it(port));
            self.replace(network, record)?;
        }
        if !request.publish.is_empty() {
            request.publish.iter().try_for_each(|port| check_free(&table, port))?;
            let network = table.values_mut().find(|network| network.record.address_of(name).is_some());
            let network = network
                .ok_or_else(|| DaemonError::invalid(format!("{name} has no port in a managed network")))?;
            let mut record = network.record.clone();
            record.ports.extend(
                request.publish.iter().map(|port| MachinePort { machine: name.clone(), port: *port }),
            );
            if record.ports.len() > PORTS_MAX {
                return Err(DaemonError::invalid(format!("a network publishes at most {PORTS_MAX} ports")));
            }
            self.replace(network, record)?;
        }
        let ports = table.values().flat_map(|network| network.info().ports);
        Ok(ports.filter(|port| port.machine == *name).collect())
    }

    /// Puts a changed record in force. If that fails, the one of before is.
    fn replace(&self, network: &mut Network, record: NetworkRecord) -> Result<(), DaemonError> {
        record.save(&self.records)?;
        let before = std::mem::replace(&mut network.record, record);
        let Err(source) = network.apply(self) else { return Ok(()) };
        before.save(&self.records)?;
        network.record = before;
        Err(DaemonError::Network { name: network.record.name.clone(), source })
    }
}

/// Refuses a port of the host that another published port or a program of the host has.
fn check_free(table: &BTreeMap<String, Network>, wanted: &PortRequest) -> Result<(), DaemonError> {
    let same = |port: &PortRequest| {
        let shared = port.listen.is_none() || wanted.listen.is_none() || port.listen == wanted.listen;
        shared && (port.port, port.protocol) == (wanted.port, wanted.protocol)
    };
    if wanted.port == 0 || wanted.guest_port == 0 {
        return Err(DaemonError::invalid("0 is no port"));
    }
    let mut published = table.values().flat_map(|network| &network.record.ports);
    if let Some(other) = published.find(|port| same(&port.port)) {
        return Err(DaemonError::invalid(format!("port {} leads to {} already", wanted.port, other.machine)));
    }
    let address = (wanted.listen.unwrap_or(Ipv4Addr::UNSPECIFIED), wanted.port);
    let bound = match wanted.protocol {
        PortProtocol::Tcp => TcpListener::bind(address).map(drop),
        PortProtocol::Udp => UdpSocket::bind(address).map(drop),
    };
    bound.map_err(|error| {
        DaemonError::invalid(format!("port {} cannot be published on this host: {error}", wanted.port))
    })
}

impl Daemon {
    /// Sets the networks up, and keeps them in step with the machines of this host.
    pub(crate) fn start_networks(self: &Arc<Self>) {
        let daemon = Arc::downgrade(self);
        let changed: Arc<Notifier> = self.machines.changed.clone();
        let started = std::thread::Builder::new().name("networks".into()).spawn(move || {
            while let Some(daemon) = daemon.upgrade().filter(|daemon| !daemon.is_closing()) {
                daemon.set_networks_up();
                drop(daemon);
                changed.wait(CARE);
            }
        });
        if let Err(error) = started {
            tracing::error!(%error, "managed networks are not set up");
        }
    }

    /// Makes the networks what their records say, as far as that is possible now.
    pub(crate) fn set_networks_up(&self) {
        if !self.networks.table().is_empty() {
            let _steady = self.networks.hold_steady();
            let forget = self.machines.unreadable.check_none().is_ok();
            self.networks.reconcile(&self.all_infos(), forget);
        }
        self.keep_links();
    }

    /// Machines of this host, and those whose network is here while they run elsewhere.
    fn all_infos(&self) -> Vec<MachineInfo> {
        let mut machines = self.machines.infos();
        self.add_away(&mut machines);
        machines
    }

    pub(crate) fn delete_network(&self, name: &str) -> Result<(), DaemonError> {
        self.machines.unreadable.check_none()?;
        self.networks.delete(name, &self.all_infos())?;
        self.keep_links();
        Ok(())
    }

    pub(crate) fn change_ports(
        &self,
        name: &MachineName,
        request: &PortsRequest,
    ) -> Result<Vec<PublishedPort>, DaemonError> {
        let _steady = self.networks.hold_steady();
        self.machines.get(name)?;
        // The machine may be newer than its address.
        self.networks.reconcile(&self.all_infos(), false);
        self.networks.change_ports(name, request)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_record_that_cannot_be_read_is_named_with_its_file() {
        let dir = tempfile::tempdir().unwrap();
        let path = path_of(dir.path(), "lan0");
        std::fs::write(&path, "{").unwrap();
        let networks = ManagedNetworks::open(dir.path().into(), dir.path().join("run"), Vec::new()).unwrap();

        let said = networks.show("lan0").unwrap_err().to_string();
        assert!(said.contains(&path.display().to_string()), "{said}");
        assert!(matches!(networks.show("lan1"), Err(DaemonError::NotFound { .. })));
        assert!(matches!(networks.show("../lan0"), Err(DaemonError::NotFound { .. })));
    }
}
