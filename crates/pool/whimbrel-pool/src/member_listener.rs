//! What a manager and a benefactor have in common: a folder with a key and a list of those who may come, and
//! a socket.

use std::{io, net::SocketAddr, path::Path, sync::Arc};
use tokio::net::TcpListener;
use whimbrel_wire::{ConnectError, Endpoint, Identity, IdentityError, Trust, TrustError, serve_tls};

/// Why a member cannot be reached.
#[derive(Debug, thiserror::Error)]
pub enum FrontError {
    /// Its key.
    #[error("cannot use the identity")]
    Identity(#[from] IdentityError),
    /// Its list of those who may come.
    #[error("cannot keep whom to trust")]
    Trust(#[from] TrustError),
    /// Its socket.
    #[error("cannot listen on {address}")]
    Listen {
        /// Where.
        address: SocketAddr,
        /// Why.
        #[source]
        source: io::Error,
    },
    /// It cannot serve.
    #[error("cannot serve")]
    Serve(#[from] ConnectError),
}

/// The side of a member that others come to.
#[derive(Debug)]
pub(crate) struct MemberListener {
    pub(crate) identity: Arc<Identity>,
    pub(crate) trust: Arc<Trust>,
    /// Where it listens.
    pub(crate) address: SocketAddr,
    listener: TcpListener,
}

impl MemberListener {
    /// Opens the folder, or makes it, and the socket.
    pub(crate) async fn open(data: &Path, listen: SocketAddr) -> Result<Self, FrontError> {
        let identity = Arc::new(Identity::load_or_create(data)?);
        let trust = Arc::new(Trust::load(data)?);
        let failed = |source| FrontError::Listen { address: listen, source };
        let listener = TcpListener::bind(listen).await.map_err(failed)?;
        let address = listener.local_addr().map_err(failed)?;
        Ok(Self { identity, trust, address, listener })
    }

    /// Answers those who are trusted, for ever.
    pub(crate) async fn serve(self, endpoint: Endpoint) -> Result<(), FrontError> {
        Ok(serve_tls(self.listener, &self.identity, self.trust, endpoint).await?)
    }
}
