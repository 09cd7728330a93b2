//! A manager as a process: its folder, its socket, its chores.

use super::{ManagerService, service::Shared};
use crate::{
    address::ManagerAddress,
    meta::{Meta, MetaError},
};
use std::{io, net::SocketAddr, path::PathBuf, sync::Arc, time::Duration};
use tokio::net::TcpListener;
use whimbrel_core::HostName;
use whimbrel_wire::{ConnectError, Endpoint, Identity, IdentityError, Trust, TrustError, serve_tls};

/// How a manager runs.
#[derive(Debug, Clone)]
pub struct ManagerOptions {
    /// Folder of its key, whom it admits, and the database.
    pub data: PathBuf,
    /// A `postgres://` URL to have the database there.
    pub database: Option<String>,
    /// Where it listens.
    pub listen: SocketAddr,
    /// Seconds after which a silent session ends.
    pub lease: u32,
    /// Seconds between registrations.
    pub interval: u32,
    /// After so long in silence a benefactor's chunks are copied from elsewhere.
    pub lost_after: Duration,
    /// Between rounds of repair.
    pub repair_every: Duration,
    /// Between rounds of policies.
    pub policies_every: Duration,
}

impl ManagerOptions {
    /// The usual ones for this folder and address.
    pub fn new(data: PathBuf, listen: SocketAddr) -> Self {
        Self {
            data,
            database: None,
            listen,
            lease: 60,
            interval: 5,
            lost_after: Duration::from_secs(600),
            repair_every: Duration::from_millis(500),
            policies_every: Duration::from_secs(60),
        }
    }
}

/// Why a manager ended.
#[derive(Debug, thiserror::Error)]
pub enum ManagerError {
    /// Its key.
    #[error("cannot use the identity")]
    Identity(#[from] IdentityError),
    /// Its list of members.
    #[error("cannot read whom to admit")]
    Trust(#[from] TrustError),
    /// Its database.
    #[error("cannot open the metadata")]
    Meta(#[from] MetaError),
    /// Its socket.
    #[error("cannot {action}")]
    Io {
        /// What.
        action: &'static str,
        /// Why.
        #[source]
        source: io::Error,
    },
    /// It cannot serve.
    #[error("cannot serve")]
    Serve(#[from] ConnectError),
}

/// A manager, opened.
#[derive(Debug)]
pub struct Manager {
    options: ManagerOptions,
    identity: Identity,
    service: ManagerService,
    listener: TcpListener,
    address: SocketAddr,
}

impl Manager {
    /// Opens the folder, the database and the socket.
    pub async fn open(options: ManagerOptions) -> Result<Self, ManagerError> {
        let io = |action| move |source| ManagerError::Io { action, source };
        let identity = Identity::load_or_create(&options.data)?;
        let trust = Arc::new(Trust::load(&options.data)?);
        let file = options.data.join("pool.db").display().to_string();
        let meta = Meta::open(options.database.as_deref().unwrap_or(&file)).await?;
        let service = ManagerService::new(meta, trust, options.lease, options.interval);
        let listener = TcpListener::bind(options.listen).await.map_err(io("listen"))?;
        let address = listener.local_addr().map_err(io("listen"))?;
        Ok(Self { options, identity, service, listener, address })
    }

    /// How members name it.
    pub fn address(&self) -> ManagerAddress {
        ManagerAddress { address: self.address.to_string(), key: self.identity.public_key() }
    }

    /// What it answers.
    pub fn service(&self) -> &ManagerService {
        &self.service
    }

    /// Serves for ever.
    pub async fn run(self) -> Result<(), ManagerError> {
        let Self { options, identity, service, listener, .. } = self;
        // The name is one nobody looks at: a manager is known by its key.
        let name: HostName = "manager".parse().map_err(|_| ManagerError::Io {
            action: "name the manager",
            source: io::ErrorKind::InvalidInput.into(),
        })?;
        let endpoint = Endpoint::new(name, service.clone());
        let trust = service.shared.trust.clone();
        tokio::select! {
            served = serve_tls(listener, &identity, trust, endpoint) => Ok(served?),
            never = keep_house(&service, &options) => never,
        }
    }
}

async fn keep_house(service: &ManagerService, options: &ManagerOptions) -> Result<(), ManagerError> {
    let mut repair = tokio::time::interval(options.repair_every);
    let mut policies = tokio::time::interval(options.policies_every);
    repair.set_missed_tick_behavior(tokio::time::MissedTickBehavior::Delay);
    loop {
        tokio::select! {
            _ = repair.tick() => {
                if let Err(error) = service.chores(options.lost_after).await {
                    tracing::error!(%error, "a round of repair failed");
                }
            }
            _ = policies.tick() => match service.apply_policies(false).await {
                Ok(purged) => purged.iter().for_each(|gone| {
                    tracing::info!(path = gone.path, version = gone.version, why = gone.why, "purged");
                }),
                Err(error) => tracing::error!(%error, "policies were not applied"),
            },
        }
    }
}

impl ManagerService {
    pub(crate) fn new(meta: Meta, trust: Arc<Trust>, lease: u32, interval: u32) -> Self {
        let shared = Shared {
            meta,
            trust,
            lease,
            interval,
            connections: Default::default(),
            repaired: Default::default(),
            lost: Default::default(),
            repair_rate: Default::default(),
        };
        Self { shared: Arc::new(shared) }
    }
}
