//! Peer connections: lasting connections to other hosts, made by this host or by them.
//!
//! A connection is symmetric, so a host that can connect but cannot be reached (behind a router at home) is
//! called over the connection that it made. A host that could not be reached is not tried for a few seconds:
//! a page that is waited for must not wait for one connect timeout after another.
//!
//! The table also bounds the requests of each host that are carried out at once, over all its connections: no
//! host occupies all threads. Heartbeats and questions to a witness have places of their own, since leases
//! depend on them.

use crate::{core::error::DaemonError, daemon::Daemon};
use crate::{peers::link::connect, server::peer_rpc::Peers};
use std::{
    collections::BTreeMap,
    sync::{Arc, Mutex, MutexGuard, PoisonError},
    time::{Duration, Instant},
};
use tokio::sync::{OwnedSemaphorePermit, Semaphore};
use whimbrel_core::HostName;
use whimbrel_wire::Connection;

/// Most requests of one host that are carried out at once. The runtime has 512 threads for those of all hosts
/// and of the users of this one.
const REQUESTS_MAX: usize = 96;
/// Most heartbeats and questions to a witness of one host that are answered at once.
const LEASE_REQUESTS_MAX: usize = 16;
/// How long an unreachable host is not tried again.
const RETRY_AFTER: Duration = Duration::from_secs(3);

#[derive(Default)]
pub(crate) struct PeerConnections {
    table: Mutex<BTreeMap<HostName, PeerEntry>>,
}

struct PeerEntry {
    connections: Vec<Connection>,
    unreachable_since: Option<Instant>,
    request_slots: Arc<Semaphore>,
    lease_slots: Arc<Semaphore>,
}

impl Default for PeerEntry {
    fn default() -> Self {
        Self {
            connections: Vec::new(),
            unreachable_since: None,
            request_slots: Arc::new(Semaphore::new(REQUESTS_MAX)),
            lease_slots: Arc::new(Semaphore::new(LEASE_REQUESTS_MAX)),
        }
    }
}

/// The places in which requests are carried out.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum RequestClass {
    /// Leases depend on a timely answer.
    Lease,
    /// Nothing depends on the moment of the answer.
    Common,
}

impl PeerConnections {
    fn table(&self) -> MutexGuard<'_, BTreeMap<HostName, PeerEntry>> {
        self.table.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// A place for a request of a host; waits while all are taken.
    pub(crate) async fn request_slot(
        &self,
        host: &HostName,
        class: RequestClass,
    ) -> Option<OwnedSemaphorePermit> {
        let slots = {
            let mut table = self.table();
            let neighbour = table.entry(host.clone()).or_default();
            match class {
                RequestClass::Lease => neighbour.lease_slots.clone(),
                RequestClass::Common => neighbour.request_slots.clone(),
            }
        };
        // The semaphores are never closed.
        slots.acquire_owned().await.ok()
    }

    /// Adds a connection that a host made to this one.
    pub(crate) fn arrived(&self, connection: &Connection) {
        let mut table = self.table();
        let neighbour = table.entry(connection.peer().name.clone()).or_default();
        neighbour.connections.retain(|known| known.close_reason().is_none());
        neighbour.connections.push(connection.clone());
        neighbour.unreachable_since = None;
    }

    /// The newest live connection to a host.
    fn live_connection(&self, host: &HostName) -> Option<Connection> {
        let mut table = self.table();
        let neighbour = table.get_mut(host)?;
        neighbour.connections.retain(|known| known.close_reason().is_none());
        neighbour.connections.last().cloned()
    }

    /// One connection to each host that is connected.
    pub(crate) fn all(&self) -> Vec<Connection> {
        let names: Vec<HostName> = self.table().keys().cloned().collect();
        names.iter().filter_map(|name| self.live_connection(name)).collect()
    }

    /// Round-trip time to a host, if there is a connection to it.
    pub(crate) fn round_trip(&self, host: &HostName) -> Option<Duration> {
        self.live_connection(host)?.round_trip()
    }

    fn is_backing_off(&self, host: &HostName) -> bool {
        let since = self.table().get(host).and_then(|neighbour| neighbour.unreachable_since);
        since.is_some_and(|since| since.elapsed() < RETRY_AFTER)
    }

    fn unreachable(&self, host: &HostName) {
        self.table().entry(host.clone()).or_default().unreachable_since = Some(Instant::now());
    }
}

impl Daemon {
    /// A connection to a trusted host: an existing one, or a new one.
    pub(crate) fn peer_connection(&self, name: &HostName) -> Result<Connection, DaemonError> {
        if let Some(connection) = self.connections.live_connection(name) {
            return Ok(connection);
        }
        // `Peers` adds the connection to the table.
        connect(self, name, Peers::new(&self.me)).inspect_err(|_| self.connections.unreachable(name))
    }

    /// Connections to all trusted hosts that can be reached, the nearest first.
    pub(crate) fn reachable_peers(&self) -> Vec<Connection> {
        let trusted = self.trust.list().unwrap_or_default();
        let names = trusted.into_iter().map(|peer| peer.name).filter(|name| {
            self.connections.live_connection(name).is_some() || !self.connections.is_backing_off(name)
        });
        // In parallel: one host that does not answer must not delay the others.
        let mut reached: Vec<Connection> = std::thread::scope(|scope| {
            let tries: Vec<_> =
                names.map(|name| scope.spawn(move || self.peer_connection(&name).ok())).collect();
            tries.into_iter().filter_map(|attempt| attempt.join().ok().flatten()).collect()
        });
        reached.sort_by_key(|connection| connection.round_trip().unwrap_or(Duration::MAX));
        reached
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test]
    async fn a_host_that_floods_takes_neither_the_places_of_others_nor_those_of_leases() {
        let (connections, mut held) = (PeerConnections::default(), Vec::new());
        let (flood, other): (HostName, HostName) = ("beta".parse().unwrap(), "gamma".parse().unwrap());
        for _ in 0..REQUESTS_MAX {
            held.push(connections.request_slot(&flood, RequestClass::Common).await.unwrap());
        }
        let mut next = Box::pin(connections.request_slot(&flood, RequestClass::Common));
        assert!(poll_once(&mut next).is_none(), "one more waits");
        assert!(connections.request_slot(&other, RequestClass::Common).await.is_some());
        assert!(connections.request_slot(&flood, RequestClass::Lease).await.is_some());
        held.pop();
        assert!(next.await.is_some());
    }

    fn poll_once<F: Future + Unpin>(future: &mut F) -> Option<F::Output> {
        let mut context = std::task::Context::from_waker(std::task::Waker::noop());
        match std::pin::Pin::new(future).poll(&mut context) {
            std::task::Poll::Ready(output) => Some(output),
            std::task::Poll::Pending => None,
        }
    }
}
