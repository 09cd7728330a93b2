//! Exports: the directories that `whimbrel serve DIR` serves to sessions, over ssh or TLS.

use crate::{error::CliError, session_dirs};
use std::{net::SocketAddr, path::PathBuf, sync::Arc, time::Duration};
use tokio::net::TcpListener;
use whimbrel_core::HostName;
use whimbrel_session::server::{Export, Limits, Server};
use whimbrel_wire::{
    Endpoint, Identity, PeerIdentity, PublicKey, Right, Rights, Trust, TrustError, TrustedPeer, connect_io,
    serve_tls,
};

/// Directories to serve, and the keys of those who may mount them.
#[derive(Debug, Clone)]
pub(super) struct ExportServer {
    pub(super) dirs: Vec<PathBuf>,
    pub(super) read_only: bool,
    pub(super) keys: Option<PathBuf>,
    pub(super) allow: Vec<PublicKey>,
    pub(super) idle: Duration,
}

fn endpoint(server: Server) -> Result<Endpoint, CliError> {
    let name = "state".parse::<HostName>().map_err(|error| CliError::Session(Box::new(error)))?;
    Ok(Endpoint::new(name, server))
}

impl ExportServer {
    fn server(&self, limits: Limits) -> Result<Server, CliError> {
        Self::raise_limits();
        let exports: Result<Vec<Export>, _> = self.dirs.iter().map(|dir| Export::new(dir)).collect();
        let exports = exports.map_err(|error| CliError::Session(Box::new(error)))?;
        Ok(Server::new(exports, self.read_only, Limits { idle: self.idle, ..limits }))
    }

    /// Raises the limit of open files as far as allowed, because each session may open hundreds of them.
    fn raise_limits() {
        use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};
        let Rlimit { maximum, .. } = getrlimit(Resource::Nofile);
        // The first sessions work with the old limit as well.
        let _ = setrlimit(Resource::Nofile, Rlimit { current: maximum, maximum });
    }

    /// Serves the client that started this process over ssh, until it closes the connection.
    pub(super) async fn stdio(self) -> Result<(), CliError> {
        // Each connection has its own process, so the fencing tokens are shared through files.
        let turns = session_dirs::turns().inspect_err(|error| {
            let error = error as &dyn std::error::Error;
            tracing::warn!(error, "late changes of a broken connection cannot be told from new ones");
        });
        let endpoint = endpoint(self.server(Limits { token_dir: turns.ok(), ..Limits::default() })?)?;
        let (input, output) =
            whimbrel_wire::stdio().map_err(CliError::io("use standard input and output"))?;
        let rights = Rights(vec![Right::Session]);
        let connected = connect_io(input, output, PeerIdentity::Stdio, rights, &endpoint).await;
        let connection = connected.map_err(|error| CliError::Session(Box::new(error)))?;
        connection.closed().await;
        Ok(())
    }

    /// Serves clients with trusted keys over TLS.
    pub(super) async fn listen(self, address: SocketAddr, said: impl FnOnce(&str)) -> Result<(), CliError> {
        let other = |error: Box<dyn std::error::Error + Send + Sync>| CliError::Session(error);
        let dir = session_dirs::keys(self.keys.as_deref());
        let identity = Identity::load_or_create(&dir).map_err(|error| other(error.into()))?;
        let trust = Trust::load(&dir).map_err(|error| other(error.into()))?;
        for key in &self.allow {
            allow(&trust, *key).map_err(|error| other(error.into()))?;
        }
        // Sessions of one host may share data that each of them may read.
        let endpoint = endpoint(self.server(Limits { share: true, ..Limits::default() })?)?;
        let listener = TcpListener::bind(address).await.map_err(CliError::io("listen"))?;
        let local = listener.local_addr().map_err(CliError::io("listen"))?;
        said(&format!("serving on {local} with the key {}", identity.public_key()));
        serve_tls(listener, &identity, Arc::new(trust), endpoint).await.map_err(|error| other(error.into()))
    }
}

fn allow(trust: &Trust, key: PublicKey) -> Result<(), TrustError> {
    if trust.find(&key)?.is_some() {
        return Ok(());
    }
    let name = format!("session-{}", key.fingerprint());
    let Ok(name) = name.parse() else { return Ok(()) };
    let rights = Rights(vec![Right::Session]);
    trust.add(TrustedPeer { name, key: Some(key), address: None, rights, read: None, write: None })
}
