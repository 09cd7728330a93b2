//! Connections between members of a pool: one is kept for each peer.
//!
//! A closed connection is opened again at the next use. The manager names the key that authenticates a peer.

use std::{collections::HashMap, sync::Arc};
use tokio::sync::Mutex;
use whimbrel_core::HostName;
use whimbrel_wire::{
    BoxFuture, ConnectError, Connection, Endpoint, Identity, PublicKey, Service, connect_tls,
};

/// Opens connections: over TLS, or in memory for tests with thousands of them.
pub trait Dialer: Send + Sync + 'static {
    /// Connects to `address`, which must present `key`.
    fn dial<'a>(
        &'a self,
        address: &'a str,
        key: PublicKey,
    ) -> BoxFuture<'a, Result<Connection, ConnectError>>;
}

/// Dialer over TCP and TLS that authenticates as `identity`.
pub struct TlsDialer {
    identity: Arc<Identity>,
    endpoint: Endpoint,
}

impl TlsDialer {
    /// A dialer with the name `name`; `service` answers what peers request over its connections.
    pub fn new(identity: Arc<Identity>, name: HostName, service: impl Service) -> Self {
        Self { identity, endpoint: Endpoint::new(name, service) }
    }
}

whimbrel_core::opaque_debug!(TlsDialer, ConnectionCache);

impl Dialer for TlsDialer {
    fn dial<'a>(
        &'a self,
        address: &'a str,
        key: PublicKey,
    ) -> BoxFuture<'a, Result<Connection, ConnectError>> {
        Box::pin(connect_tls(address, key, &self.identity, &self.endpoint))
    }
}

/// One peer and its connection while it is open.
type CachedConnection = Arc<Mutex<Option<Connection>>>;

/// Cached connections, by peer.
pub struct ConnectionCache {
    dialer: Arc<dyn Dialer>,
    peers: std::sync::Mutex<HashMap<(String, PublicKey), CachedConnection>>,
}

impl ConnectionCache {
    /// An empty cache of connections.
    pub fn new(dialer: Arc<dyn Dialer>) -> Self {
        Self { dialer, peers: std::sync::Mutex::default() }
    }

    /// The connection to a peer. Concurrent callers share one attempt to open it.
    pub async fn connect(&self, address: &str, key: PublicKey) -> Result<Connection, ConnectError> {
        let slot = {
            let mut slots = self.peers.lock().unwrap_or_else(std::sync::PoisonError::into_inner);
            slots.entry((address.to_owned(), key)).or_default().clone()
        };
        let mut slot = slot.lock().await;
        match slot.as_ref().filter(|connection| connection.close_reason().is_none()) {
            Some(connection) => Ok(connection.clone()),
            None => {
                let connection = self.dialer.dial(address, key).await?;
                *slot = Some(connection.clone());
                Ok(connection)
            }
        }
    }
}
