//! Networks that hosts share: the parts of a managed network on two hosts are joined by a link.
//!
//! ```text
//! machine -- bridge -- tap == relay ~~ the wire ~~ relay == tap -- bridge -- machine
//! ```
//!
//! The bridges learn which link leads to a machine, and learn it anew when a machine that has moved is
//! announced. Each two hosts have a link, and the bridge's ports of links are isolated from each other, so no
//! frame goes in a circle. Each host is gateway and name server for its own machines, at the same addresses
//! everywhere (`whimbrel_net::managed::firewall`). Hosts tell each other the addresses of their machines, for
//! names, and so that no two get the same (docs/protocols/tunnel.md).
//!
//! Invariants: a link opens only between hosts that have each other in their records of the network, and the
//! same subnets; the id of a link counts only over its connection. Both hosts dial until there is a link; of
//! two, the one that the host with the smaller name has dialled stays.

use crate::{
    core::error::DaemonError,
    daemon::Daemon,
    network::{
        managed::Leases,
        tunnel::{
            OpenEnd, address_of,
            away::connect,
            protocol::{Address, AddressesCall, Frames, JoinCall, read_addresses, write_addresses},
            refused,
            transport::WireTransport,
        },
    },
};
use bytes::Bytes;
use std::{
    collections::BTreeMap,
    sync::{
        Arc, Mutex, Weak,
        atomic::{AtomicBool, Ordering},
    },
    time::Duration,
};
use whimbrel_api::{NetworkHostsRequest, NetworkInfo};
use whimbrel_core::{HostName, error_chain, lock};
use whimbrel_migrate::protocol::TunnelId;
use whimbrel_net::{
    PortFilter, TapConfig,
    managed::{LINK, bridge},
    tunnel::{Relay, Socket},
};
use whimbrel_wire::{Answer, CallError, Code, Connection, Reply, Request};

/// First and longest interval between attempts to open a link.
const RETRY_MIN: Duration = Duration::from_millis(100);
const RETRY_MAX: Duration = Duration::from_secs(5);
/// Time limit for another host to make its end, or to take addresses.
const PATIENCE: Duration = Duration::from_secs(20);

/// A network by its name, and another host that shares it.
pub(crate) type LinkKey = (String, HostName);

/// The links of this host.
#[derive(Default)]
pub(crate) struct SharedLinks(Mutex<BTreeMap<LinkKey, Link>>);

#[derive(Default)]
struct Link {
    /// Tells the task that dials while there is no link to end, which it does between two steps: it leaves
    /// no device. None if there is no task.
    is_unwanted: Option<Arc<AtomicBool>>,
    open: Option<OpenLink>,
    /// Why there is no link.
    reason: Option<String>,
}

struct OpenLink {
    id: TunnelId,
    /// Whether this host has dialled.
    is_dialled: bool,
    connection: Connection,
    relay: Arc<Relay>,
    /// Addresses that the other host knows of, and whether it is being told of others.
    told: Leases,
    is_telling: bool,
}

impl OpenLink {
    fn peer(&self) -> usize {
        address_of(self.connection.peer())
    }

    /// Whether a link dialled by the other host (`is_theirs`) or by this one takes the place of this link.
    fn gives_way(&self, is_theirs: bool, here: &HostName, there: &HostName) -> bool {
        let is_gone = self.connection.close_reason().is_some();
        is_gone || stays(is_theirs, self.is_dialled, here, there)
    }
}

/// Whether of two links between these hosts the later one stays.
fn stays(is_theirs: bool, was_ours: bool, here: &HostName, there: &HostName) -> bool {
    // A host that dials again has lost its earlier link.
    is_theirs != was_ours || is_theirs == (there < here)
}

impl Daemon {
    /// The networks of this host, with the state of their links.
    pub(crate) fn network_infos(&self) -> Vec<NetworkInfo> {
        let mut all = self.networks.list();
        all.iter_mut().for_each(|network| self.add_links(network));
        all
    }

    pub(crate) fn network_info(&self, name: &str) -> Result<NetworkInfo, DaemonError> {
        let mut network = self.networks.show(name)?;
        self.add_links(&mut network);
        Ok(network)
    }

    fn add_links(&self, network: &mut NetworkInfo) {
        let links = lock(&self.links.0);
        for host in &mut network.hosts {
            let link = links.get(&(network.name.clone(), host.host.clone()));
            host.joined = link.is_some_and(|link| link.open.is_some());
            host.reason = link.and_then(|link| link.reason.clone());
        }
    }

    /// Shares a network with hosts, or no longer.
    pub(crate) fn change_network_hosts(
        &self,
        name: &str,
        request: &NetworkHostsRequest,
    ) -> Result<NetworkInfo, DaemonError> {
        for host in &request.share {
            if *host == self.name {
                return Err(DaemonError::invalid(format!("{host} is this host")));
            }
            let trusted =
                self.trust.named(host).map_err(|source| DaemonError::Identity { source: source.into() })?;
            trusted.ok_or_else(|| DaemonError::Untrusted { host: host.clone() })?;
        }
        self.networks.change_hosts(name, request)?;
        self.keep_links();
        self.network_info(name)
    }

    /// Keeps a link for each host that shares a network, ends others, and tells hosts of addresses that they
    /// do not know.
    pub(crate) fn keep_links(&self) {
        let wanted = self.networks.shared();
        let mut links = lock(&self.links.0);
        let (kept, unwanted) =
            std::mem::take(&mut *links).into_iter().partition(|(key, _)| wanted.contains_key(key));
        *links = kept;
        for (key, leases) in wanted {
            let link = links.entry(key.clone()).or_default();
            link.is_unwanted.get_or_insert_with(|| {
                let is_unwanted = Arc::<AtomicBool>::default();
                self.runtime.spawn(keep_link(self.me.clone(), key.clone(), is_unwanted.clone()));
                is_unwanted
            });
            if let Some(open) = link.open.as_mut().filter(|open| !open.is_telling && open.told != leases) {
                open.is_telling = true;
                self.runtime.spawn(tell_addresses(
                    self.me.clone(),
                    key,
                    open.connection.clone(),
                    open.id,
                    leases,
                ));
            }
        }
        drop(links);
        let unwanted: BTreeMap<LinkKey, Link> = unwanted;
        for link in unwanted.into_values() {
            link.is_unwanted.iter().for_each(|is_unwanted| is_unwanted.store(true, Ordering::Relaxed));
            link.open.into_iter().for_each(|open| self.end_link(open));
        }
    }

    fn end_link(&self, open: OpenLink) {
        self.tunnels.remove_end(open.id);
        open.relay.set_transport(None);
        open.connection.close();
    }

    /// Removes the links over a connection, by the address of its peer.
    pub(crate) fn link_lost(&self, peer: usize, reason: &str) {
        let mut lost = Vec::new();
        for ((network, host), link) in lock(&self.links.0).iter_mut() {
            if let Some(open) = link.open.take_if(|open| open.peer() == peer) {
                tracing::info!(network, %host, reason, "a link of a shared network is gone");
                link.reason = Some(reason.to_owned());
                lost.push(open);
            }
        }
        lost.into_iter().for_each(|open| self.end_link(open));
    }

    /// Makes this host's end of a link, without a transport.
    fn link_end(&self, network: &str, id: TunnelId, connection: &Connection) -> Result<Arc<Relay>, String> {
        let config = TapConfig { name: LINK.to_owned(), bridge: Some(network.to_owned()) };
        let socket = Socket::tap(&config, PortFilter::Off).map_err(|error| error_chain(&error))?;
        // Before any frame passes, so that none goes in a circle.
        bridge::isolate(socket.device().unwrap_or_default()).map_err(|error| error_chain(&error))?;
        let relay = Relay::start(vec![Some(socket)], None).map_err(|error| error_chain(&error))?;
        let relay = Arc::new(relay);
        let end = OpenEnd { relay: relay.clone(), peer: address_of(connection.peer()) };
        match self.tunnels.add_end(id, end) {
            true => Ok(relay),
            false => Err("the id of the link is in use".to_owned()),
        }
    }

    /// Lets frames pass over a link, unless another link of the same hosts stays in its place.
    fn open_link(&self, key: LinkKey, open: OpenLink) -> bool {
        let (transport, peer) = (self.transport(&open), open.peer());
        let (relay, connection) = (open.relay.clone(), open.connection.clone());
        let mut links = lock(&self.links.0);
        let link = links.entry(key.clone()).or_default();
        let gives_way = |before: &OpenLink| before.gives_way(!open.is_dialled, &self.name, &key.1);
        if !link.open.as_ref().is_none_or(gives_way) {
            drop(links);
            self.end_link(open);
            return false;
        }
        link.reason = None;
        let before = link.open.replace(open);
        drop(links);
        before.into_iter().for_each(|before| self.end_link(before));
        relay.set_transport(Some(Box::new(transport)));
        tracing::info!(network = key.0, host = %key.1, "a link of a shared network is open");
        if connection.close_reason().is_some() {
            self.link_lost(peer, "the connection is over");
        }
        true
    }

    fn transport(&self, open: &OpenLink) -> WireTransport {
        WireTransport { id: open.id, connection: open.connection.clone(), runtime: self.runtime.clone() }
    }

    /// Opens a link to another host; for a thread that may wait for programs.
    fn dialled(&self, key: &LinkKey, open: OpenLink, payload: &[u8]) -> Result<(), String> {
        let learnt = read_addresses(payload)
            .and_then(|said| self.networks.learn(&key.0, &key.1, &said).map_err(|error| error_chain(&error)));
        if let Err(reason) = learnt {
            self.end_link(open);
            return Err(reason);
        }
        match self.open_link(key.clone(), open) {
            true => Ok(()),
            false => Err("the other host's link stays".to_owned()),
        }
    }

    fn open_connection(&self, key: &LinkKey) -> Option<Connection> {
        lock(&self.links.0).get(key)?.open.as_ref().map(|open| open.connection.clone())
    }
}

/// Keeps a link open until it is unwanted. One that was opened all the same is ended with the next look.
async fn keep_link(host: Weak<Daemon>, key: LinkKey, is_unwanted: Arc<AtomicBool>) {
    let mut pause = RETRY_MIN;
    while !is_unwanted.load(Ordering::Relaxed) {
        let Some(daemon) = host.upgrade() else { return };
        let open = daemon.open_connection(&key);
        drop(daemon);
        let (reason, connection) = match open {
            Some(connection) => {
                pause = RETRY_MIN;
                (connection.closed().await.to_string(), Some(connection))
            }
            None => match dial(&host, &key).await {
                Ok(()) => continue,
                Err(reason) => (reason, None),
            },
        };
        let Some(daemon) = host.upgrade() else { return };
        if let Some(connection) = connection {
            let ended = move || daemon.link_lost(address_of(connection.peer()), &reason);
            let _ = tokio::task::spawn_blocking(ended).await;
        } else if let Some(link) = lock(&daemon.links.0).get_mut(&key).filter(|link| link.open.is_none()) {
            link.reason = Some(reason);
        }
        tokio::time::sleep(pause).await;
        pause = (pause * 2).min(RETRY_MAX);
    }
}

/// Connects, and has the other host join its part of the network.
async fn dial(host: &Weak<Daemon>, key: &LinkKey) -> Result<(), String> {
    let stopping = || "the daemon is stopping".to_owned();
    let connection = connect(host, &key.1).await?;
    let daemon = host.upgrade().ok_or_else(stopping)?;
    let id = TunnelId(rand::random());
    let (join, told) = daemon.networks.offer(&key.0, id).ok_or("the network is being removed")?;
    let payload = payload_of(&told)?;
    // Before the other host is asked, as its first frames come at once.
    let (making, network, over) = (daemon.clone(), key.0.clone(), connection.clone());
    let made = tokio::task::spawn_blocking(move || making.link_end(&network, id, &over)).await;
    let relay = made.map_err(|_| "the daemon failed".to_owned())??;
    let open = OpenLink { id, is_dialled: true, connection, relay, told, is_telling: false };
    let joined = tokio::time::timeout(PATIENCE, open.connection.request::<JoinCall>(&join, payload)).await;
    let joined = match joined {
        Ok(Ok(((), payload))) => Ok(payload),
        Ok(Err(CallError::Refused { source })) if source.code == Code::UNKNOWN_KIND => {
            Err(format!("{} has an earlier version of Whimbrel, which cannot share networks", key.1))
        }
        Ok(Err(CallError::Refused { source })) => Err(source.text),
        Ok(Err(error)) => Err(error_chain(&error)),
        Err(_) => Err(format!("{} does not answer", key.1)),
    };
    let key = key.clone();
    let finish = move || match joined {
        Ok(payload) => daemon.dialled(&key, open, &payload),
        Err(reason) => {
            daemon.end_link(open);
            Err(reason)
        }
    };
    tokio::task::spawn_blocking(finish).await.map_err(|_| "the daemon failed".to_owned())?
}

fn payload_of(leases: &Leases) -> Result<Bytes, String> {
    let addresses: Vec<Address> = leases.iter().filter_map(Address::of).collect();
    write_addresses(&addresses).map_err(|error| error.to_string())
}

/// Tells another host which addresses the machines here have. If it does not take them, the link is opened
/// anew, with all of them.
async fn tell_addresses(
    host: Weak<Daemon>,
    key: LinkKey,
    connection: Connection,
    id: TunnelId,
    leases: Leases,
) {
    let told = match payload_of(&leases) {
        Ok(payload) => {
            let frames = Frames { id };
            let told = connection.request::<AddressesCall>(&frames, payload);
            matches!(tokio::time::timeout(PATIENCE, told).await, Ok(Ok(_)))
        }
        Err(_) => false,
    };
    if !told {
        return connection.close();
    }
    let Some(daemon) = host.upgrade() else { return };
    let mut links = lock(&daemon.links.0);
    let open = links.get_mut(&key).and_then(|link| link.open.as_mut()).filter(|open| open.id == id);
    if let Some(open) = open {
        (open.told, open.is_telling) = (leases, false);
    }
    drop(links);
    // There may be others meanwhile.
    daemon.machines.changed.notify();
}

/// Joins this host's part of a network with that of `peer`, which asks for it over the connection of the peer
/// with this address.
pub(crate) fn join(host: &Daemon, peer: &HostName, address: usize, request: &Request) -> Answer {
    let join = request.decode::<JoinCall>()?;
    let connection = host.tunnels.connection(address).ok_or_else(|| refused("the connection is over"))?;
    let said = read_addresses(&request.payload).map_err(|reason| refused(&reason))?;
    let told = host.networks.agree(&join, peer, &host.name).map_err(|reason| refused(&reason))?;
    let payload = payload_of(&told).map_err(|reason| refused(&reason))?;
    let relay = host.link_end(&join.network, join.id, &connection).map_err(|reason| refused(&reason))?;
    let open = OpenLink { id: join.id, is_dialled: false, connection, relay, told, is_telling: false };
    if let Err(error) = host.networks.learn(&join.network, peer, &said) {
        host.end_link(open);
        return Err(refused(&error_chain(&error)));
    }
    match host.open_link((join.network, peer.clone()), open) {
        true => Reply::of::<JoinCall>(&(), payload),
        false => Err(refused("there is a link already").retryable()),
    }
}

/// Takes over the addresses that a host says over the connection of the peer with this address.
pub(crate) fn learn(host: &Daemon, address: usize, request: &Request) -> Answer {
    let id = request.decode::<AddressesCall>()?.id;
    let said = read_addresses(&request.payload).map_err(|reason| refused(&reason))?;
    let links = lock(&host.links.0);
    let is_it = |open: &OpenLink| open.id == id && open.peer() == address;
    let found = links.iter().find(|(_, link)| link.open.as_ref().is_some_and(is_it));
    let (network, peer) =
        found.map(|(key, _)| key.clone()).ok_or_else(|| refused("there is no such link"))?;
    drop(links);
    let learnt = host.networks.learn(&network, &peer, &said);
    learnt.map_err(|error| refused(&error_chain(&error)))?;
    Reply::of::<AddressesCall>(&(), Bytes::new())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn of_two_links_both_hosts_keep_the_one_that_the_smaller_name_dialled() {
        let (alpha, beta): (HostName, HostName) = ("alpha".parse().unwrap(), "beta".parse().unwrap());
        // Alpha's link came first, then beta's, as each of them sees it; and the other way round.
        assert!(!stays(true, true, &alpha, &beta) && !stays(false, false, &beta, &alpha));
        assert!(stays(false, false, &alpha, &beta) && stays(true, true, &beta, &alpha));
        // A host that dials again has lost what it had.
        for (here, there) in [(&alpha, &beta), (&beta, &alpha)] {
            assert!(stays(true, false, here, there) && stays(false, true, here, there));
        }
    }
}
