//! A manager as a process: its folder, its socket, its chores.

use super::{ManagerService, service::Shared};
use crate::{
    address::ManagerAddress,
    member_listener::{FrontError, MemberListener},
    meta::{Meta, MetaError},
};
use std::{net::SocketAddr, path::PathBuf, sync::Arc, time::Duration};
use whimbrel_core::{HostName, NameError};
use whimbrel_wire::{Endpoint, Trust};

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
    /// How long a version stays pinned for a holder that is not heard of any more.
    pub pins_for: Duration,
    /// After so long in silence a benefactor's chunks are copied from elsewhere.
    pub lost_after: Duration,
    /// Between rounds of repair.
    pub repair_every: Duration,
    /// Between rounds of policies.
    pub policies_every: Duration,
    /// Between rounds of moving chunks to who holds less than its share.
    pub balance_every: Duration,
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
            pins_for: Duration::from_secs(14 * 86_400),
            lost_after: Duration::from_secs(600),
            repair_every: Duration::from_millis(500),
            policies_every: Duration::from_secs(60),
            balance_every: Duration::from_secs(60),
        }
    }
}

/// Why a manager ended.
#[derive(Debug, thiserror::Error)]
pub enum ManagerError {
    /// Its key, its list of members, or its socket.
    #[error(transparent)]
    Front(#[from] FrontError),
    /// Its database.
    #[error("cannot open the metadata")]
    Meta(#[from] MetaError),
    /// Its name on the wire.
    #[error("cannot name the manager")]
    Name(#[from] NameError),
}

/// A manager, opened.
#[derive(Debug)]
pub struct Manager {
    options: ManagerOptions,
    front: MemberListener,
    service: ManagerService,
}

impl Manager {
    /// Opens the folder, the database and the socket.
    pub async fn open(options: ManagerOptions) -> Result<Self, ManagerError> {
        let front = MemberListener::open(&options.data, options.listen).await?;
        let file = options.data.join("pool.db").display().to_string();
        let meta = Meta::open(options.database.as_deref().unwrap_or(&file)).await?;
        let service = ManagerService::new(meta, front.trust.clone(), &options);
        service.prolong_pins().await?;
        Ok(Self { options, front, service })
    }

    /// How members name it.
    pub fn address(&self) -> ManagerAddress {
        ManagerAddress { address: self.front.address.to_string(), key: self.front.identity.public_key() }
    }

    /// What it answers.
    pub fn service(&self) -> &ManagerService {
        &self.service
    }

    /// Serves for ever.
    pub async fn run(self) -> Result<(), ManagerError> {
        let Self { options, front, service } = self;
        // The name is one nobody looks at: a manager is known by its key.
        let name: HostName = "manager".parse()?;
        let endpoint = Endpoint::new(name, service.clone());
        tokio::select! {
            served = front.serve(endpoint) => Ok(served?),
            never = keep_house(&service, &options) => never,
        }
    }
}

async fn keep_house(service: &ManagerService, options: &ManagerOptions) -> Result<(), ManagerError> {
    let mut repair = tokio::time::interval(options.repair_every);
    let mut policies = tokio::time::interval(options.policies_every);
    let mut balance = tokio::time::interval(options.balance_every);
    for chore in [&mut repair, &mut balance] {
        chore.set_missed_tick_behavior(tokio::time::MissedTickBehavior::Delay);
    }
    loop {
        tokio::select! {
            _ = repair.tick() => {
                if let Err(error) = service.chores(options.lost_after).await {
                    tracing::error!(%error, "a round of repair failed");
                }
            }
            _ = balance.tick() => {
                if let Err(error) = service.balance().await {
                    tracing::error!(%error, "chunks were not moved for balance");
                }
            }
            _ = policies.tick() => match service.apply_policies(false).await {
                Ok(purged) => purged.iter().filter(|one| one.pinned_by.is_empty()).for_each(|gone| {
                    tracing::info!(path = gone.path, version = gone.version, why = gone.why, "purged");
                }),
                Err(error) => tracing::error!(%error, "policies were not applied"),
            },
        }
    }
}

impl ManagerService {
    pub(crate) fn new(meta: Meta, trust: Arc<Trust>, options: &ManagerOptions) -> Self {
        let shared = Shared {
            meta,
            trust,
            lease: options.lease,
            interval: options.interval,
            pins_for: options.pins_for,
            connections: Default::default(),
            introductions: Default::default(),
            repaired: Default::default(),
            lost: Default::default(),
            repair_rate: Default::default(),
            sums: Default::default(),
        };
        Self { shared: Arc::new(shared) }
    }
}
