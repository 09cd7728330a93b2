//! The record of a managed network: what its owner asked for, and the addresses that machines have in it.

use crate::core::error::DaemonError;
use ipnet::{Ipv4Net, Ipv6Net};
use serde::{Deserialize, Serialize};
use std::{
    collections::{BTreeMap, BTreeSet},
    net::Ipv4Addr,
    path::{Path, PathBuf},
};
use whimbrel_api::{MachineInfo, MachineState, NetworkRequest, PortRequest};
use whimbrel_core::{HostName, MachineName};
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
    /// Addresses of machines of this host.
    pub(crate) leases: Leases,
    pub(crate) ports: Vec<MachinePort>,
    /// Hosts that share the network, with the addresses of their machines in it as they said them last.
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    pub(crate) hosts: BTreeMap<HostName, Leases>,
}

/// Addresses by the hardware address of the machine's port.
pub(crate) type Leases = BTreeMap<String, Lease>;

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
        let (leases, ports, hosts) = Default::default();
        Ok(Self { format: FORMAT, name, subnet, subnet6, isolated: request.isolated, leases, ports, hosts })
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
        self.give_up_conflicts(machines);
        let elsewhere: BTreeMap<_, _> =
            self.elsewhere().map(|(mac, lease)| (mac.clone(), lease.address)).collect();
        let others =
            elsewhere.iter().filter(|(mac, _)| !present.contains_key(*mac)).map(|(_, address)| *address);
        let mut taken: BTreeSet<_> = self.leases.values().map(|lease| lease.address).chain(others).collect();
        let mut without = Vec::new();
        for (text, (mac, machine)) in present {
            match self.leases.get_mut(&text) {
                Some(lease) => lease.machine = machine,
                // A machine that comes from another host keeps the address that it has there.
                None => match elsewhere
                    .get(&text)
                    .copied()
                    .filter(|address| !taken.contains(address))
                    .or_else(|| addresses::choose(self.subnet, &taken, mac))
                {
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

    /// Refuses an address that a machine cannot have here: one that is not of the network, or that another
    /// port than `mac` has.
    pub(crate) fn check_address(&self, mac: Option<&str>, wanted: Ipv4Net) -> Result<(), DaemonError> {
        let (subnet, address) = (self.subnet, wanted.addr());
        let own = [subnet.network(), subnet.broadcast(), addresses::gateway(subnet)];
        if !subnet.contains(&address) || own.contains(&address) || wanted.prefix_len() != subnet.prefix_len()
        {
            return Err(DaemonError::invalid(format!(
                "{wanted} is no address of a machine in {}, which has {subnet} and is itself {}",
                self.name,
                addresses::gateway(subnet)
            )));
        }
        let others = self.leases.iter().chain(self.elsewhere());
        match others.filter(|(text, _)| mac != Some(text)).find(|(_, lease)| lease.address == address) {
            Some((_, lease)) => Err(DaemonError::invalid(format!(
                "{} has the address {address} in {}",
                lease.machine, self.name
            ))),
            None => Ok(()),
        }
    }

    /// Gives a machine's port this address, in place of any other.
    pub(crate) fn reserve(
        &mut self,
        text: &str,
        machine: &MachineName,
        wanted: Ipv4Net,
    ) -> Result<(), DaemonError> {
        let text = mac(text).map_or_else(|| text.to_owned(), |mac| mac.to_string());
        self.check_address(Some(&text), wanted)?;
        self.leases.insert(text, Lease { machine: machine.clone(), address: wanted.addr() });
        Ok(())
    }

    /// Addresses of machines on other hosts.
    fn elsewhere(&self) -> impl Iterator<Item = (&String, &Lease)> {
        self.hosts.values().flatten()
    }

    /// Machines of this host whose address another machine elsewhere has too, and which of the two has to get
    /// another one: that with the greater hardware address. Both were given while the hosts could not speak.
    fn conflicts(&self) -> Vec<(&String, &Lease, &HostName, &Lease)> {
        let own: BTreeMap<_, _> = self.leases.iter().map(|(mac, own)| (own.address, (mac, own))).collect();
        let others = self.hosts.iter().flat_map(|(host, leases)| leases.iter().map(move |it| (host, it)));
        let same = others.filter_map(|(host, (other, lease))| {
            let (mac, own) = own.get(&lease.address)?;
            (other < *mac).then_some((*mac, *own, host, lease))
        });
        same.collect()
    }

    /// Takes addresses in conflict from machines that are off.
    fn give_up_conflicts(&mut self, machines: &[MachineInfo]) {
        let is_off = |name: &MachineName| {
            machines.iter().any(|machine| machine.name == *name && machine.state == MachineState::Stopped)
        };
        let conflicts = self.conflicts().into_iter().filter(|(_, own, ..)| is_off(&own.machine));
        let lost: Vec<String> = conflicts.map(|(mac, ..)| mac.clone()).collect();
        lost.iter().for_each(|mac| drop(self.leases.remove(mac)));
    }

    /// A conflict of addresses, and how it ends, if there is one.
    pub(crate) fn conflict(&self) -> Option<String> {
        let (_, own, host, other) = self.conflicts().into_iter().next()?;
        Some(format!(
            "{} and {} on {host} both have {}; switch {} off and on again, and it gets another address",
            own.machine, other.machine, own.address, own.machine
        ))
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
            shared: !self.hosts.is_empty(),
            elsewhere: self.elsewhere().map(|(_, lease)| (lease.machine.clone(), lease.address)).collect(),
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

pub(super) fn mac(text: &str) -> Option<Mac> {
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

#[cfg(test)]
mod tests {
    use super::*;

    const MACS: [&str; 2] = ["52:54:00:00:00:01", "52:54:00:00:00:02"];

    fn record() -> NetworkRecord {
        let subnet = Some("10.1.2.0/29".to_owned());
        NetworkRecord::new(&NetworkRequest { name: "lan0".to_owned(), subnet, ..NetworkRequest::default() })
            .unwrap()
    }

    fn lease(machine: &str, address: [u8; 4]) -> Lease {
        Lease { machine: machine.parse().unwrap(), address: address.into() }
    }

    fn machine(name: &str, mac: &str, state: MachineState) -> MachineInfo {
        let nic = serde_json::json!({ "mac": mac, "bridge": "lan0", "addresses": [] });
        let info = serde_json::json!({
            "name": name, "state": state, "memory": 1 << 20, "cpus": 1, "accel": "tcg", "disks": [],
            "nics": [nic], "since_ms": 0,
        });
        serde_json::from_value(info).unwrap()
    }

    #[test]
    fn a_machine_keeps_the_address_that_it_had_on_another_host() {
        let web = machine("web", MACS[0], MachineState::Running);
        let mut here = record();
        here.assign(std::slice::from_ref(&web), true);
        let chosen = here.leases[MACS[0]].address;
        let other = Ipv4Addr::from(u32::from(chosen) ^ 1);
        let mut there = record();
        there
            .hosts
            .insert("beta".parse().unwrap(), [(MACS[0].to_owned(), lease("web", other.octets()))].into());
        there.assign(&[web], true);
        assert_eq!(there.leases[MACS[0]].address, other);
        assert_eq!(there.conflict(), None);
    }

    #[test]
    fn a_machine_gets_the_address_that_its_guest_was_told_if_nobody_has_it() {
        let mut record = record();
        let net = |text: &str| text.parse::<Ipv4Net>().unwrap();
        record.leases.insert(MACS[1].to_owned(), lease("db", [10, 1, 2, 3]));
        record.hosts.insert("beta".parse().unwrap(), [("x".to_owned(), lease("far", [10, 1, 2, 4]))].into());
        let web = machine("web", MACS[0], MachineState::Running);
        record.assign(std::slice::from_ref(&web), false);
        for (bad, reason) in [
            ("10.1.2.3/29", "db has"),
            ("10.1.2.4/29", "far has"),
            ("10.1.2.1/29", "is itself"),
            ("10.1.2.0/29", "no address"),
            ("10.1.2.7/29", "no address"),
            ("10.1.2.9/29", "no address"),
            ("10.1.2.5/24", "no address"),
        ] {
            let refused = record.reserve(MACS[0], &web.name, net(bad)).unwrap_err().to_string();
            assert!(refused.contains(reason), "{bad}: {refused}");
        }
        record.reserve(MACS[0], &web.name, net("10.1.2.6/29")).unwrap();
        record.assign(&[web], false);
        assert_eq!(record.leases[MACS[0]].address, Ipv4Addr::new(10, 1, 2, 6));
    }

    #[test]
    fn addresses_of_other_hosts_are_not_given_and_a_full_network_has_none() {
        let mut record = record();
        let others =
            (3..=6).map(|last| (format!("52:54:00:00:01:0{last}"), lease("other", [10, 1, 2, last])));
        record.hosts.insert("beta".parse().unwrap(), others.collect());
        let machines = [0, 1].map(|at| machine(["web", "db"][at], MACS[at], MachineState::Running));
        let without = record.assign(&machines, true);
        assert_eq!(without, ["db".parse().unwrap()]);
        assert_eq!(record.leases[MACS[0]].address, Ipv4Addr::new(10, 1, 2, 2));
    }

    #[test]
    fn of_two_machines_with_one_address_that_with_the_greater_hardware_address_gets_another_once_it_is_off() {
        let address = [10, 1, 2, 3];
        let of = |own: usize| {
            let mut record = record();
            record.leases.insert(MACS[own].to_owned(), lease("web", address));
            let other = (MACS[1 - own].to_owned(), lease("db", address));
            record.hosts.insert("beta".parse().unwrap(), [other].into());
            record
        };
        let mut smaller = of(0);
        smaller.assign(&[machine("web", MACS[0], MachineState::Stopped)], true);
        assert_eq!((smaller.conflict(), smaller.leases[MACS[0]].address), (None, address.into()));

        let mut greater = of(1);
        greater.assign(&[machine("web", MACS[1], MachineState::Running)], true);
        assert!(
            greater.conflict().is_some_and(|said| said.contains("switch web off")),
            "{:?}",
            greater.conflict()
        );
        assert_eq!(greater.leases[MACS[1]].address, Ipv4Addr::from(address), "it runs");
        greater.assign(&[machine("web", MACS[1], MachineState::Stopped)], true);
        assert_eq!(greater.conflict(), None);
        assert_ne!(greater.leases[MACS[1]].address, Ipv4Addr::from(address));
    }

    #[test]
    fn a_record_of_before_networks_were_shared_is_read_and_one_that_is_not_shared_is_written_as_then() {
        let text = serde_json::to_string(&record()).unwrap();
        assert!(!text.contains("hosts"), "{text}");
        assert_eq!(serde_json::from_str::<NetworkRecord>(&text).unwrap(), record());
    }
}
