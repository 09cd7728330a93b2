//! `whimbrel serve DIR`: directories for sessions of other hosts.

use crate::{error::CliError, session_dirs};
use std::{net::SocketAddr, path::PathBuf, sync::Arc, time::Duration};
use tokio::net::TcpListener;
use whimbrel_core::HostName;
use whimbrel_session::server::{Export, Limits, Server};
use whimbrel_wire::{
    Endpoint, Identity, PeerIdentity, PublicKey, Right, Rights, Trust, TrustError, TrustedPeer, connect_io,
    serve_tls,
};

/// What is served, to whom.
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
    /// The server.
    fn server(&self, limits: Limits) -> Result<Server, CliError> {
        Self::raise_limits();
        let exports: Result<Vec<Export>, _> = self.dirs.iter().map(|dir| Export::new(dir)).collect();
        let exports = exports.map_err(|error| CliError::Session(Box::new(error)))?;
        Ok(Server::new(exports, self.read_only, Limits { idle: self.idle, ..limits }))
    }

    /// Each session may hold some hundred files open: as many as this process is ever allowed.
    fn raise_limits() {
        use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};
        let Rlimit { maximum, .. } = getrlimit(Resource::Nofile);
        // What is not allowed is not needed by the first sessions.
        let _ = setrlimit(Resource::Nofile, Rlimit { current: maximum, maximum });
    }

    /// Serves whoever started this process, until they end it.
    pub(super) async fn stdio(self) -> Result<(), CliError> {
        // Another process for each user and each connection, and none knows the others.
        let turns = session_dirs::turns().inspect_err(|error| {
            let error = error as &dyn std::error::Error;
            tracing::warn!(error, "what is late on a connection that broke is not told from what is new");
        });
        let endpoint = endpoint(self.server(Limits { turns: turns.ok(), ..Limits::default() })?)?;
        let (input, output) =
            whimbrel_wire::stdio().map_err(CliError::io("use standard input and output"))?;
        let rights = Rights(vec![Right::Session]);
        let connected = connect_io(input, output, PeerIdentity::Stdio, rights, &endpoint).await;
        let connection = connected.map_err(|error| CliError::Session(Box::new(error)))?;
        connection.closed().await;
        Ok(())
    }

    /// Serves those whose keys are trusted.
    pub(super) async fn listen(self, address: SocketAddr, said: impl FnOnce(&str)) -> Result<(), CliError> {
        let other = |error: Box<dyn std::error::Error + Send + Sync>| CliError::Session(error);
        let dir = session_dirs::keys(self.keys.as_deref());
        let identity = Identity::load_or_create(&dir).map_err(|error| other(error.into()))?;
        let trust = Trust::load(&dir).map_err(|error| other(error.into()))?;
        for key in &self.allow {
            allow(&trust, *key).map_err(|error| other(error.into()))?;
        }
        // The users of a host may take from each other what each of them may read.
        let endpoint = endpoint(self.server(Limits { share: true, ..Limits::default() })?)?;
        let listener = TcpListener::bind(address).await.map_err(CliError::io("listen"))?;
        let local = listener.local_addr().map_err(CliError::io("listen"))?;
        said(&format!("serving on {local}; my key is {}", identity.public_key()));
        serve_tls(listener, &identity, Arc::new(trust), endpoint).await.map_err(|error| other(error.into()))
    }
}

/// Lets a key open sessions and nothing else.
fn allow(trust: &Trust, key: PublicKey) -> Result<(), TrustError> {
    if trust.find(&key)?.is_some() {
        return Ok(());
    }
    let name = format!("session-{}", key.fingerprint());
    let Ok(name) = name.parse() else { return Ok(()) };
    let rights = Rights(vec![Right::Session]);
    trust.add(TrustedPeer { name, key: Some(key), address: None, rights, read: None, write: None })
}
