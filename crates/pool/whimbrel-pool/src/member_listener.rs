//! The listening side of managers and benefactors: a folder with key and trust list, and a socket.

use std::{io, net::SocketAddr, path::Path, sync::Arc};
use tokio::net::TcpListener;
use whimbrel_wire::{
    ConnectError, Endpoint, Identity, IdentityError, LocalSocket, Trust, TrustError, serve_tls,
};

/// Failure to open or serve a member's socket.
#[derive(Debug, thiserror::Error)]
pub enum ListenerError {
    /// The member's identity cannot be used.
    #[error("cannot use the identity")]
    Identity(#[from] IdentityError),
    /// The member's trust list cannot be used.
    #[error("cannot read or change the trust list")]
    Trust(#[from] TrustError),
    /// The socket cannot be opened.
    #[error("cannot listen on {address}")]
    Listen {
        /// Address of the socket.
        address: SocketAddr,
        /// Cause reported by the kernel.
        source: io::Error,
    },
    /// TLS cannot be set up.
    #[error("cannot serve connections")]
    Serve(#[from] ConnectError),
}

/// The socket of a member and what it needs to accept peers.
#[derive(Debug)]
pub(crate) struct MemberListener {
    pub(crate) identity: Arc<Identity>,
    pub(crate) trust: Arc<Trust>,
    pub(crate) address: SocketAddr,
    /// For peers on this host that the service invites.
    pub(crate) local: Option<Arc<LocalSocket>>,
    listener: TcpListener,
}

impl MemberListener {
    /// Opens the folder, creating it if necessary, and the socket.
    pub(crate) async fn open(data: &Path, listen: SocketAddr) -> Result<Self, ListenerError> {
        let identity = Arc::new(Identity::load_or_create(data)?);
        let trust = Arc::new(Trust::load(data)?);
        let failed = |source| ListenerError::Listen { address: listen, source };
        let listener = TcpListener::bind(listen).await.map_err(failed)?;
        let address = listener.local_addr().map_err(failed)?;
        Ok(Self { identity, trust, address, local: None, listener })
    }

    /// Opens a Unix socket, too; without one, peers on this host stay with TLS.
    pub(crate) fn with_local_socket(self) -> Self {
        let local = LocalSocket::open().inspect_err(|error| tracing::debug!(%error, "no Unix socket"));
        Self { local: local.ok().map(Arc::new), ..self }
    }

    /// Serves trusted peers; returns only on failure.
    pub(crate) async fn serve(self, endpoint: Endpoint) -> Result<(), ListenerError> {
        let nearby = async {
            match self.local {
                Some(local) => local.serve(self.trust.clone(), endpoint.clone()).await,
                None => std::future::pending().await,
            }
        };
        tokio::select! {
            served = serve_tls(self.listener, &self.identity, self.trust.clone(), endpoint.clone()) => Ok(served?),
            () = nearby => Ok(()),
        }
    }
}
