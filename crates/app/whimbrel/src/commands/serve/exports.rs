//! Exports: the directories that `whimbrel serve DIR` serves to sessions, over ssh or TLS.

use super::{audit::AuditLog, grants::Grants};
use crate::{
    error::CliError,
    metrics::{MetricsListener, server_page},
    session_dirs,
};
use std::{net::SocketAddr, path::PathBuf, sync::Arc, time::Duration};
use tokio::net::TcpListener;
use whimbrel_core::{ByteSize, HostName};
use whimbrel_session::server::{Export, ExportAccess, Limits, Server, SessionEvent};
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
    pub(super) allow: Vec<(PublicKey, ExportAccess)>,
    /// Whether clients over TLS may do to files what only their owner or root may do.
    pub(super) root: bool,
    /// Most space of all files of each directory.
    pub(super) quota: Option<ByteSize>,
    pub(super) idle: Duration,
    pub(super) metrics: MetricsListener,
}

fn endpoint(server: Server) -> Result<Endpoint, CliError> {
    let name = "state".parse::<HostName>().map_err(|error| CliError::Session(Box::new(error)))?;
    Ok(Endpoint::new(name, server))
}

impl ExportServer {
    fn exports(&self) -> Result<Vec<Export>, CliError> {
        let export = |dir: &PathBuf| match self.quota {
            Some(limit) => Export::new(dir)?.with_quota(limit.0),
            None => Export::new(dir),
        };
        let exports: Result<Vec<Export>, _> = self.dirs.iter().map(export).collect();
        exports.map_err(|error| CliError::Session(Box::new(error)))
    }

    fn limits(&self, limits: Limits) -> Limits {
        crate::open_files::raise_limit();
        Limits { idle: self.idle, ..limits }
    }

    /// Serves the client that started this process over ssh, until it closes the connection.
    pub(super) async fn stdio(self) -> Result<(), CliError> {
        // Each connection has its own process, so the fencing tokens are shared through files.
        let turns = session_dirs::turns().inspect_err(|error| {
            let error = error as &dyn std::error::Error;
            tracing::warn!(error, "late changes of a broken connection cannot be told from new ones");
        });
        // A client that logs in over ssh as this user can do all that this user can.
        let limits = Limits { token_dir: turns.ok(), ownership: true, ..Limits::default() };
        let endpoint = endpoint(Server::new(self.exports()?, self.read_only, self.limits(limits)))?;
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
        for (key, _) in &self.allow {
            allow(&trust, *key).map_err(|error| other(error.into()))?;
        }
        let exports = self.exports()?;
        let directories: Vec<PathBuf> = exports.iter().map(|export| export.path().to_owned()).collect();
        let grants = Grants::load(&dir, &directories, &self.allow);
        let grants = grants.map_err(CliError::io("use exports.json beside the keys"))?;
        let for_clients = |export: Export| {
            let clients = grants.clients_of(export.path());
            export.only_for(clients)
        };
        let exports = exports.into_iter().map(for_clients).collect();
        // Sessions of one host may share data that each of them may read.
        let limits = Limits { share: true, ownership: self.root, ..Limits::default() };
        let audit = AuditLog::open(&dir);
        let note = move |event: &SessionEvent<'_>| audit.note(event);
        let server = Server::with_notes(exports, self.read_only, self.limits(limits), note);
        let figures = server.clone();
        let page = move || {
            let server = figures.clone();
            async move { server_page(server.sessions(), server.calls()) }
        };
        self.metrics.start(page).await?;
        let endpoint = endpoint(server)?;
        let listener = TcpListener::bind(address).await.map_err(CliError::io("listen"))?;
        let local = listener.local_addr().map_err(CliError::io("listen"))?;
        said(&format!("serving on {local} with the key {}", identity.public_key()));
        serve_tls(listener, &identity, Arc::new(trust), endpoint).await.map_err(|error| other(error.into()))
    }
}

/// Trusts a key for sessions and nothing else: it may connect. What it may mount is in the grants.
fn allow(trust: &Trust, key: PublicKey) -> Result<(), TrustError> {
    if trust.find(&key)?.is_some() {
        return Ok(());
    }
    let name = format!("session-{}", key.fingerprint());
    let Ok(name) = name.parse() else { return Ok(()) };
    let rights = Rights(vec![Right::Session]);
    trust.add(TrustedPeer { name, key: Some(key), address: None, rights, read: None, write: None })
}
