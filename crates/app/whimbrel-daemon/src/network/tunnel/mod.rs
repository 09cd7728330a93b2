//! Tunnels: a machine that runs on another host stays in the network of its home host.
//!
//! The host where the machine runs (`away`) connects to the one that has its network (`home`), and reconnects
//! whenever the connection is lost. Frames are sent in batches; the engine is `whimbrel_net::tunnel`, the
//! messages are in `protocol` (docs/protocols/tunnel.md), the durable state is in `records` and in the
//! machine's record.
//!
//! Invariants: the home end opens only for a trusted host that has the right and knows the tunnel's id, and
//! only for a machine that was here; its tap devices exist only while it is connected. No host waits for
//! another: frames for an end that cannot be reached are dropped, and it is told of changes later.

pub(crate) mod away;
pub(crate) mod home;
pub(crate) mod protocol;
pub(crate) mod records;
pub(crate) mod transport;

use crate::{
    core::{error::DaemonError, refs},
    daemon::Daemon,
};
use bytes::Bytes;
use std::{
    collections::{BTreeMap, btree_map::Entry},
    path::PathBuf,
    sync::{Arc, Mutex},
};
use whimbrel_core::{HostName, lock};
use whimbrel_image::Manifest;
use whimbrel_migrate::protocol::{HomeNetwork, TunnelId};
use whimbrel_net::tunnel::{BATCH_MAX, Relay};
use whimbrel_wire::{Answer, Code, Connection, Peer, Refusal, Reply, Request};

/// Code of every refusal; only the text differs.
const REFUSED: Code = Code(256);

pub(crate) struct Tunnels {
    records: records::TunnelRecords,
    homes: Mutex<BTreeMap<TunnelId, home::HomeEnd>>,
    /// Ends of machines that run here, and of links of shared networks.
    ends: Mutex<BTreeMap<TunnelId, OpenEnd>>,
    /// Connections that other hosts made to this one, by the addresses of their peers.
    connections: Mutex<BTreeMap<usize, Connection>>,
}

/// The local end that a batch goes to, and the peer that it may come from.
pub(crate) struct OpenEnd {
    pub(crate) relay: Arc<Relay>,
    pub(crate) peer: usize,
}

impl Tunnels {
    /// Opens the records of an earlier daemon in `dir`.
    pub(crate) fn open(dir: PathBuf) -> Result<Self, DaemonError> {
        let notes = records::TunnelRecords::open(dir)?;
        let homes = notes.homes().into_iter().map(|note| (note.id, home::HomeEnd::closed(note)));
        let homes = Mutex::new(homes.collect());
        Ok(Self { records: notes, homes, ends: Mutex::default(), connections: Mutex::default() })
    }

    pub(crate) fn arrived(&self, connection: &Connection) {
        lock(&self.connections).insert(address_of(connection.peer()), connection.clone());
    }

    /// Whether the home end of this tunnel is here.
    pub(crate) fn is_home_of(&self, id: TunnelId) -> bool {
        lock(&self.homes).contains_key(&id)
    }

    /// Lets batches with this id in from a peer; false if the id is in use.
    pub(crate) fn add_end(&self, id: TunnelId, end: OpenEnd) -> bool {
        match lock(&self.ends).entry(id) {
            Entry::Vacant(place) => drop(place.insert(end)),
            Entry::Occupied(_) => return false,
        }
        true
    }

    pub(crate) fn remove_end(&self, id: TunnelId) {
        lock(&self.ends).remove(&id);
    }

    /// A connection that another host made, by the address of its peer.
    pub(crate) fn connection(&self, peer: usize) -> Option<Connection> {
        lock(&self.connections).get(&peer).cloned()
    }

    /// Removes a connection that has ended (by the address of its peer), and closes the home ends that were
    /// open over it.
    pub(crate) fn left(&self, peer: usize) {
        lock(&self.connections).remove(&peer);
        self.close_homes_of(peer);
    }
}

/// Passes frames of another host on, at once.
pub(crate) fn pass_on(host: &Daemon, peer: &Peer, request: &Request) -> Answer {
    host.tunnels.pass_on(address_of(peer), request).map(|()| empty())
}

/// Handles a message of another host about a tunnel, which came over the connection of the peer with this
/// address.
pub(crate) fn open_or_close(host: &Daemon, peer: &HostName, address: usize, request: &Request) -> Answer {
    if request.kind == protocol::CLOSE {
        host.tunnels.end(request.decode::<protocol::CloseCall>()?.id);
        return Ok(empty());
    }
    let open = request.decode::<protocol::OpenCall>()?;
    let connection = host.tunnels.connection(address);
    let connection = connection.ok_or_else(|| refused("the connection is over"))?;
    host.open_home(&open, peer, connection).map(|()| empty())
}

impl Tunnels {
    /// Passes a batch from `peer` to the local end of the tunnel.
    fn pass_on(&self, peer: usize, request: &Request) -> Result<(), Refusal> {
        let frames = request.decode::<protocol::FramesCall>()?;
        if request.payload.len() > BATCH_MAX {
            return Err(refused("a batch of frames is too long"));
        }
        let relay =
            self.relay_for(&frames.id, peer).ok_or_else(|| refused("this tunnel is not open here"))?;
        relay.deliver(&request.payload).map_err(|error| refused(&error.to_string()))
    }

    fn relay_for(&self, id: &TunnelId, peer: usize) -> Option<Arc<Relay>> {
        let end = lock(&self.ends).get(id).filter(|end| end.peer == peer).map(|end| end.relay.clone());
        end.or_else(|| self.open_home_of(id, peer))
    }
}

impl Daemon {
    /// The tunnel that a capsule's machine is to have here: to its former home, or to the host that suspended
    /// it.
    pub(crate) fn tunnel_home(
        &self,
        manifest: &Manifest,
        capsule: whimbrel_core::CapsuleId,
    ) -> Result<Option<HomeNetwork>, DaemonError> {
        let home = match home_of(manifest) {
            Some(home) => home,
            None => {
                let home = manifest.host.parse();
                let home =
                    home.map_err(|error: whimbrel_core::NameError| DaemonError::invalid(error.to_string()))?;
                HomeNetwork { home, id: TunnelId(rand::random()), capsule: Some(capsule) }
            }
        };
        if home.home == self.name {
            return Ok(None);
        }
        self.route(&home.home)?;
        Ok(Some(home))
    }
}

/// The tunnel that a capsule's machine had when it was suspended.
pub(crate) fn home_of(manifest: &Manifest) -> Option<HomeNetwork> {
    let mut words = manifest.labels.get(refs::HOME_LABEL)?.split(' ');
    let (home, id) = (words.next()?.parse().ok()?, words.next()?.parse().ok()?);
    Some(HomeNetwork { home, id, capsule: words.next().and_then(|capsule| capsule.parse().ok()) })
}

/// The capsule label that [`home_of`] reads.
pub(crate) fn home_label(tunnel: &HomeNetwork) -> (String, String) {
    let capsule = tunnel.capsule.map(|capsule| format!(" {capsule}")).unwrap_or_default();
    (refs::HOME_LABEL.to_owned(), format!("{} {}{capsule}", tunnel.home, tunnel.id))
}

fn empty() -> Reply {
    Reply { header: Bytes::new(), payload: Bytes::new() }
}

pub(crate) fn refused(text: &str) -> Refusal {
    Refusal::new(REFUSED, text)
}

pub(crate) fn address_of(peer: &Peer) -> usize {
    std::ptr::from_ref(peer).addr()
}
