//! The record of a managed network: what its owner asked for, and the addresses that machines have in it.

use crate::core::error::DaemonError;
use ipnet::{Ipv4Net, Ipv6Net};
use serde::{Deserialize, Serialize};
use std::{
    collections::{BTreeMap, BTreeSet},
    net::Ipv4Addr,
    path::{Path, PathBuf},
};
use whimbrel_api::{MachineInfo, NetworkRequest, PortRequest};
use whimbrel_core::MachineName;
use whimbrel_net::{
    Mac,
    managed::{ManagedNetwork, PortForward, Protocol, StaticLease, addresses, is_network_name},
};
use whimbrel_wire::json_file;

/// Version of the record.
const FORMAT: u32 = 1;
/// Smallest and largest subnet: room for a machine, and few enough addresses to look through.
const PREFIXES: std::ops::RangeInclusive<u8> = 16..=29;

/// A managed network of this host, as it is stored.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct NetworkRecord {
    format: u32,
    pub(crate) name: String,
    pub(crate) subnet: Ipv4Net,
    pub(crate) subnet6: Option<Ipv6Net>,
    pub(crate) isolated: bool,
    /// Addresses by the hardware address of the machine's port.
    pub(crate) leases: BTreeMap<String, Lease>,
    pub(crate) ports: Vec<MachinePort>,
}

/// Address of a machine.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct Lease {
    pub(crate) machine: MachineName,
    pub(crate) address: Ipv4Addr,
}

/// A published port of a machine.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct MachinePort {
    pub(crate) machine: MachineName,
    pub(crate) port: PortRequest,
}

impl NetworkRecord {
    /// Checks a request by itself.
    pub(crate) fn new(request: &NetworkRequest) -> Result<Self, DaemonError> {
        let name = request.name.clone();
        if !is_network_name(&name) {
            return Err(DaemonError::invalid(format!(
                "{name:?} cannot be a network: use 1 to 15 small letters, digits or '_', and begin with a letter"
            )));
        }
        let subnet = match &request.subnet {
            None => addresses::subnet_of(&name),
            Some(text) => parse_subnet(text)?,
        };
        let subnet6 = match request.subnet6.as_deref() {
            None => Some(addresses::subnet6_of(&name)),
            Some("none") => None,
            Some(text) => Some(parse_subnet6(text)?),
        };
        let (leases, ports) = (BTreeMap::new(), Vec::new());
        Ok(Self { format: FORMAT, name, subnet, subnet6, isolated: request.isolated, leases, ports })
    }

    pub(crate) fn load(path: &Path) -> Result<Self, String> {
        let record: Self = json_file::read_format(path, FORMAT).map_err(|error| error.to_string())?;
        let named = path.file_stem().is_some_and(|stem| stem == record.name.as_str());
        match is_network_name(&record.name) && named {
            true => Ok(record),
            false => Err(format!("it is the record of {:?}", record.name)),
        }
    }

    pub(crate) fn save(&self, dir: &Path) -> Result<(), DaemonError> {
        let path = path_of(dir, &self.name);
        json_file::replace(&path, self).map_err(|source| DaemonError::io("write", &path, source))
    }

    /// Gives each port of `machines` in this network an address, and takes those of machines that are gone.
    /// Returns the machines for which there is none.
    pub(crate) fn assign(&mut self, machines: &[MachineInfo], forget: bool) -> Vec<MachineName> {
        let mut present = BTreeMap::new();
        for machine in machines {
            let here = machine.nics.iter().filter(|nic| nic.bridge.as_deref() == Some(&self.name));
            present.extend(
                here.filter_map(|nic| mac(&nic.mac))
                    .map(|mac| (mac.to_string(), (mac, machine.name.clone()))),
            );
        }
        if forget {
            self.leases.retain(|mac, _| present.contains_key(mac));
        }
        let mut taken: BTreeSet<_> = self.leases.values().map(|lease| lease.address).collect();
        let mut without = Vec::new();
        for (text, (mac, machine)) in present {
            match self.leases.get_mut(&text) {
                Some(lease) => lease.machine = machine,
                None => match addresses::choose(self.subnet, &taken, mac) {
                    Some(address) => {
                        taken.insert(address);
                        self.leases.insert(text, Lease { machine, address });
                    }
                    None => without.push(machine),
                },
            }
        }
        let leases = &self.leases;
        self.ports.retain(|port| leases.values().any(|lease| lease.machine == port.machine));
        without
    }

    /// Gives what a machine has here to its new name.
    pub(crate) fn rename(&mut self, from: &MachineName, to: &MachineName) {
        let leases = self.leases.values_mut().map(|lease| &mut lease.machine);
        let ports = self.ports.iter_mut().map(|port| &mut port.machine);
        leases.chain(ports).filter(|machine| *machine == from).for_each(|machine| *machine = to.clone());
    }

    /// Address of the port with a hardware address.
    pub(crate) fn address_at(&self, text: &str) -> Option<std::net::IpAddr> {
        let lease = self.leases.get(&mac(text)?.to_string())?;
        Some(lease.address.into())
    }

    /// Address of a machine: that of its first port in this network.
    pub(crate) fn address_of(&self, machine: &MachineName) -> Option<Ipv4Addr> {
        self.leases.values().find(|lease| lease.machine == *machine).map(|lease| lease.address)
    }

    /// What the kernel and dnsmasq are to be told. Machines in `unfiltered` may send from any address.
    pub(crate) fn wanted(&self, unfiltered: &[MachineName]) -> ManagedNetwork {
        let lease = |(text, lease): (&String, &Lease)| {
            let filtered = !unfiltered.contains(&lease.machine);
            Some(StaticLease {
                mac: mac(text)?,
                machine: lease.machine.clone(),
                address: lease.address,
                filtered,
            })
        };
        let forward = |port: &MachinePort| {
            let PortRequest { listen, port: number, guest_port, protocol } = port.port;
            let address = self.address_of(&port.machine)?;
            Some(PortForward { listen, protocol: protocol_of(protocol), port: number, address, guest_port })
        };
        ManagedNetwork {
            name: self.name.clone(),
            subnet: self.subnet,
            subnet6: self.subnet6,
            isolated: self.isolated,
            leases: self.leases.iter().filter_map(lease).collect(),
            ports: self.ports.iter().filter_map(forward).collect(),
        }
    }
}

pub(crate) fn path_of(dir: &Path, name: &str) -> PathBuf {
    dir.join(format!("{name}.json"))
}

fn protocol_of(protocol: whimbrel_api::PortProtocol) -> Protocol {
    match protocol {
        whimbrel_api::PortProtocol::Tcp => Protocol::Tcp,
        whimbrel_api::PortProtocol::Udp => Protocol::Udp,
    }
}

fn mac(text: &str) -> Option<Mac> {
    crate::network::tunnel::home::mac_of(text)
}

fn parse_subnet(text: &str) -> Result<Ipv4Net, DaemonError> {
    let refuse = || {
        DaemonError::invalid(format!(
            "{text:?} cannot be the subnet of a network: write private addresses of /{} to /{}, like 10.1.2.0/24",
            PREFIXES.start(),
            PREFIXES.end()
        ))
    };
    let subnet: Ipv4Net = text.parse().map_err(|_| refuse())?;
    let subnet = subnet.trunc();
    if PREFIXES.contains(&subnet.prefix_len()) && subnet.network().is_private() {
        Ok(subnet)
    } else {
        Err(refuse())
    }
}

fn parse_subnet6(text: &str) -> Result<Ipv6Net, DaemonError> {
    let refuse = || {
        DaemonError::invalid(format!(
            "{text:?} cannot be the IPv6 subnet of a network: write a /64 of unique local addresses, like \
             fd00:1:2:3::/64, or none"
        ))
    };
    let subnet: Ipv6Net = text.parse().map_err(|_| refuse())?;
    let subnet = subnet.trunc();
    if subnet.prefix_len() == 64 && subnet.network().is_unique_local() { Ok(subnet) } else { Err(refuse()) }
}
