//! Hosts that share a managed network, in its record.

use super::{
    ManagedNetworks,
    record::{Lease, Leases, NetworkRecord},
};
use crate::{
    core::error::DaemonError,
    network::{
        shared::LinkKey,
        tunnel::protocol::{Address, Join},
    },
};
use std::{
    collections::BTreeMap,
    net::{Ipv4Addr, Ipv6Addr},
};
use whimbrel_api::{NetworkAddress, NetworkHost, NetworkHostsRequest};
use whimbrel_core::{HostName, error_chain};
use whimbrel_migrate::protocol::TunnelId;
use whimbrel_net::managed::addresses;

/// Most hosts that share a network with this one: each is a device, a thread and a connection.
const HOSTS_MAX: usize = 64;

/// An address, as it is shown.
pub(super) fn address_info((mac, lease): (&String, &Lease)) -> NetworkAddress {
    NetworkAddress { machine: lease.machine.clone(), mac: mac.clone(), address: lease.address }
}

/// A host of the record, as it is shown without its link.
pub(super) fn host_info((host, leases): (&HostName, &Leases)) -> NetworkHost {
    let machines = leases.iter().map(address_info).collect();
    NetworkHost { host: host.clone(), joined: false, reason: None, machines }
}

impl ManagedNetworks {
    /// Shares a network with hosts, or no longer; all or nothing.
    pub(crate) fn change_hosts(&self, name: &str, request: &NetworkHostsRequest) -> Result<(), DaemonError> {
        let mut table = self.table();
        let network = table.get_mut(name).ok_or_else(|| self.not_found(name))?;
        let mut record = network.record.clone();
        for gone in &request.unshare {
            let was = record.hosts.remove(gone);
            was.ok_or_else(|| DaemonError::invalid(format!("{name} is not shared with {gone}")))?;
        }
        for host in &request.share {
            record.hosts.entry(host.clone()).or_default();
        }
        if record.hosts.len() > HOSTS_MAX {
            return Err(DaemonError::invalid(format!("at most {HOSTS_MAX} other hosts share a network")));
        }
        self.replace(network, record)
    }

    /// Each network with each host that shares it, and the addresses that this host gave in it.
    pub(crate) fn shared(&self) -> BTreeMap<LinkKey, Leases> {
        let table = self.table();
        let of = |record: &NetworkRecord| {
            let key = |host: &HostName| ((record.name.clone(), host.clone()), record.leases.clone());
            record.hosts.keys().map(key).collect::<Vec<_>>()
        };
        table.values().flat_map(|network| of(&network.record)).collect()
    }

    /// The offer to join this host's part of a network by a link with this id, and the addresses here.
    pub(crate) fn offer(&self, name: &str, id: TunnelId) -> Option<(Join, Leases)> {
        let table = self.table();
        let record = &table.get(name)?.record;
        let (subnet, subnet6) = subnets(record);
        let join = Join { network: name.to_owned(), id, subnet, subnet6 };
        Some((join, record.leases.clone()))
    }

    /// Whether this host's part of the network may be joined with that of `peer`; if so, the addresses here.
    pub(crate) fn agree(&self, join: &Join, peer: &HostName, here: &HostName) -> Result<Leases, String> {
        let table = self.table();
        let name = &join.network;
        let record = table.get(name).map(|network| &network.record);
        let record = record.ok_or_else(|| {
            format!("{here} has no network {name}; create it there with `whimbrel network create {name}`")
        })?;
        if !record.hosts.contains_key(peer) {
            return Err(format!(
                "{here} does not share {name} with {peer}; say so there with `whimbrel network share {name} {peer}`"
            ));
        }
        if subnets(record) != (join.subnet, join.subnet6) {
            let subnet6 = record.subnet6.map_or_else(|| "no IPv6".to_owned(), |subnet| subnet.to_string());
            return Err(format!("{name} has other addresses on {here}: {} and {subnet6}", record.subnet));
        }
        Ok(record.leases.clone())
    }

    /// Takes over what a host says of the addresses of its machines. Those that cannot be in the network are
    /// left out.
    pub(crate) fn learn(&self, name: &str, host: &HostName, said: &[Address]) -> Result<(), DaemonError> {
        let mut table = self.table();
        let network = table.get_mut(name).ok_or_else(|| self.not_found(name))?;
        let mut record = network.record.clone();
        let (subnet, gateway) = (record.subnet, addresses::gateway(record.subnet));
        let Some(leases) = record.hosts.get_mut(host) else { return Ok(()) };
        let possible = said.iter().filter(|one| {
            subnet.contains(&one.address)
                && ![gateway, subnet.network(), subnet.broadcast()].contains(&one.address)
        });
        *leases = possible.map(Address::lease).collect();
        if record == network.record {
            return Ok(());
        }
        record.save(&self.records)?;
        network.record = record;
        // Tried again with all that differs from its record.
        if let Err(error) = network.apply(self) {
            network.problem = Some(error_chain(&error));
        }
        Ok(())
    }
}

/// The addresses of a network, as hosts compare them.
fn subnets(record: &NetworkRecord) -> ((Ipv4Addr, u8), Option<(Ipv6Addr, u8)>) {
    let subnet6 = record.subnet6.map(|subnet| (subnet.network(), subnet.prefix_len()));
    ((record.subnet.network(), record.subnet.prefix_len()), subnet6)
}

impl Address {
    fn lease(&self) -> (String, Lease) {
        let mac = whimbrel_net::Mac(self.mac).to_string();
        (mac, Lease { machine: self.machine.clone(), address: self.address })
    }

    /// What is said of an address that was given here. None if its hardware address cannot be read.
    pub(crate) fn of((mac, lease): (&String, &Lease)) -> Option<Self> {
        let mac = super::record::mac(mac)?.0;
        Some(Self { mac, machine: lease.machine.clone(), address: lease.address })
    }
}
