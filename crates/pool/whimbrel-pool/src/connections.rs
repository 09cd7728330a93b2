//! Connections between members of a pool: one is kept for each peer.
//!
//! A closed connection is opened again at the next use. The manager names the key that authenticates a peer.

use crate::protocol::InviteLocally;
use bytes::Bytes;
use std::{collections::HashMap, sync::Arc};
use tokio::sync::Mutex;
use whimbrel_core::HostName;
use whimbrel_wire::{
    BoxFuture, ConnectError, Connection, Endpoint, Identity, PublicKey, Service, connect_local, connect_tls,
};

/// Opens connections: over TLS, or in memory for tests with thousands of them.
pub trait Dialer: Send + Sync + 'static {
    /// Connects to `address`, which must present `key`.
    fn dial<'a>(
        &'a self,
        address: &'a str,
        key: PublicKey,
    ) -> BoxFuture<'a, Result<Connection, ConnectError>>;

    /// Does what [`Dialer::dial`] does, and continues through the Unix socket of a benefactor on this host.
    fn dial_benefactor<'a>(
        &'a self,
        address: &'a str,
        key: PublicKey,
    ) -> BoxFuture<'a, Result<Connection, ConnectError>> {
        self.dial(address, key)
    }
}

/// Dialer over TCP and TLS that authenticates as `identity`.
pub struct TlsDialer {
    identity: Arc<Identity>,
    endpoint: Endpoint,
}

impl TlsDialer {
    /// A dialer with the name `name`; `service` answers what peers request over its connections.
    pub fn new(identity: Arc<Identity>, name: HostName, service: impl Service) -> Self {
        Self { identity, endpoint: Endpoint::new(name, service).with_protocols([crate::protocol::PROTOCOL]) }
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

    fn dial_benefactor<'a>(
        &'a self,
        address: &'a str,
        key: PublicKey,
    ) -> BoxFuture<'a, Result<Connection, ConnectError>> {
        Box::pin(async move {
            let connection = self.dial(address, key).await?;
            // Benefactors of earlier versions do not know the call.
            let Ok((invitation, _)) = connection.request::<InviteLocally>(&(), Bytes::new()).await else {
                return Ok(connection);
            };
            Ok(connect_local(&invitation, key, &self.endpoint).await.unwrap_or(connection))
        })
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
        self.connect_by(address, key, || self.dialer.dial(address, key)).await
    }

    /// The connection to a benefactor, through a Unix socket if that is on this host.
    pub async fn benefactor(&self, address: &str, key: PublicKey) -> Result<Connection, ConnectError> {
        self.connect_by(address, key, || self.dialer.dial_benefactor(address, key)).await
    }

    async fn connect_by<'a>(
        &self,
        address: &str,
        key: PublicKey,
        dial: impl FnOnce() -> BoxFuture<'a, Result<Connection, ConnectError>>,
    ) -> Result<Connection, ConnectError> {
        let slot = {
            let mut slots = self.peers.lock().unwrap_or_else(std::sync::PoisonError::into_inner);
            slots.entry((address.to_owned(), key)).or_default().clone()
        };
        let mut slot = slot.lock().await;
        match slot.as_ref().filter(|connection| connection.close_reason().is_none()) {
            Some(connection) => Ok(connection.clone()),
            None => {
                let connection = dial().await?;
                *slot = Some(connection.clone());
                Ok(connection)
            }
        }
    }
}
