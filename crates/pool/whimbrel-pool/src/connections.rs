//! Connections between members of a pool: how one is dialled, and one kept for each peer.
//!
//! A connection that ended is dialled again at the next use. Whom to believe is decided by the key that the
//! manager gave.

use std::{collections::HashMap, sync::Arc};
use tokio::sync::Mutex;
use whimbrel_core::HostName;
use whimbrel_wire::{
    BoxFuture, ConnectError, Connection, Endpoint, Identity, PublicKey, Service, connect_tls,
};

/// Makes connections: over TLS, or in memory where a test wants thousands.
pub trait Dialer: Send + Sync + 'static {
    /// Connects to `address`, where `key` must answer.
    fn dial<'a>(
        &'a self,
        address: &'a str,
        key: PublicKey,
    ) -> BoxFuture<'a, Result<Connection, ConnectError>>;
}

/// Over TCP and TLS, as `identity`.
pub struct TlsDialer {
    identity: Arc<Identity>,
    endpoint: Endpoint,
}

impl TlsDialer {
    /// A dialer that is called `name`; what a peer asks over its connections is answered by `service`.
    pub fn new(identity: Arc<Identity>, name: HostName, service: impl Service) -> Self {
        Self { identity, endpoint: Endpoint::new(name, service) }
    }
}

impl std::fmt::Debug for TlsDialer {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("TlsDialer").finish_non_exhaustive()
    }
}

impl Dialer for TlsDialer {
    fn dial<'a>(
        &'a self,
        address: &'a str,
        key: PublicKey,
    ) -> BoxFuture<'a, Result<Connection, ConnectError>> {
        Box::pin(connect_tls(address, key, &self.identity, &self.endpoint))
    }
}

/// One peer, with its connection while it lives.
type Slot = Arc<Mutex<Option<Connection>>>;

/// Connections by peer.
pub struct Links {
    dialer: Arc<dyn Dialer>,
    slots: std::sync::Mutex<HashMap<(String, PublicKey), Slot>>,
}

impl std::fmt::Debug for Links {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Links").finish_non_exhaustive()
    }
}

impl Links {
    /// None yet.
    pub fn new(dialer: Arc<dyn Dialer>) -> Self {
        Self { dialer, slots: std::sync::Mutex::default() }
    }

    /// The connection to a peer. Who comes while it is dialled waits for the same attempt.
    pub async fn to(&self, address: &str, key: PublicKey) -> Result<Connection, ConnectError> {
        let slot = {
            let mut slots = self.slots.lock().unwrap_or_else(std::sync::PoisonError::into_inner);
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
