//! The manager process: its folder, socket and maintenance loop.

use super::{
    BackupOptions, ManagerService, backups::Backups, clock::Clock, leadership::Leadership, roles::PoolRoles,
    service::Shared,
};
use crate::{
    address::ManagerAddress,
    backup::BackupError,
    member_listener::{ListenerError, MemberListener},
    meta::{Meta, MetaError},
};
use std::{
    net::SocketAddr,
    path::{Path, PathBuf},
    sync::Arc,
    time::Duration,
};
use whimbrel_core::{HostName, NameError};
use whimbrel_wire::{Endpoint, Trust};

/// Options of a manager process.
#[derive(Debug, Clone)]
pub struct ManagerOptions {
    /// Folder of the key, the trust list and the database.
    pub data: PathBuf,
    /// A `postgres://` URL, to use PostgreSQL instead of a file.
    pub database: Option<String>,
    /// Address to listen on.
    pub listen: SocketAddr,
    /// Seconds of silence after which a write session ends.
    pub lease: u32,
    /// Seconds between heartbeats of benefactors.
    pub interval: u32,
    /// Time for which a version stays pinned for a silent holder.
    pub pin_timeout: Duration,
    /// Silence after which a benefactor is lost and its chunks are replicated from other copies.
    pub lost_after: Duration,
    /// Time between rounds of repair.
    pub repair_every: Duration,
    /// Time between rounds of policies.
    pub policies_every: Duration,
    /// Time between rounds of balancing.
    pub balance_every: Duration,
    /// Backups of the metadata.
    pub backups: BackupOptions,
}

impl ManagerOptions {
    /// Default options for this folder and address.
    pub fn new(data: PathBuf, listen: SocketAddr) -> Self {
        Self {
            data,
            database: None,
            listen,
            lease: 60,
            interval: 5,
            pin_timeout: Duration::from_secs(14 * 86_400),
            lost_after: Duration::from_secs(600),
            repair_every: Duration::from_millis(500),
            policies_every: Duration::from_secs(60),
            balance_every: Duration::from_secs(60),
            backups: BackupOptions::default(),
        }
    }

    /// Location of the database in the folder of a manager.
    pub(super) fn database_file(data: &Path) -> String {
        data.join("pool.db").display().to_string()
    }
}

/// Failure to open or run a manager.
#[derive(Debug, thiserror::Error)]
pub enum ManagerError {
    /// The key, the trust list or the socket failed.
    #[error(transparent)]
    Listener(#[from] ListenerError),
    /// The database cannot be opened.
    #[error("cannot open the metadata")]
    Meta(#[from] MetaError),
    /// The place of the backups cannot be used.
    #[error("cannot use the place of the backups")]
    Backup(#[from] BackupError),
    /// The name on the wire is invalid.
    #[error("cannot set the name of the manager")]
    Name(#[from] NameError),
}

/// A manager whose folder, database and socket are open.
#[derive(Debug)]
pub struct Manager {
    options: ManagerOptions,
    listener: MemberListener,
    service: ManagerService,
}

impl Manager {
    /// Opens the folder, the database and the socket.
    pub async fn open(options: ManagerOptions) -> Result<Self, ManagerError> {
        let front = MemberListener::open(&options.data, options.listen).await?;
        let file = ManagerOptions::database_file(&options.data);
        let meta = Meta::open(options.database.as_deref().unwrap_or(&file)).await?;
        let service = ManagerService::start(meta, front.trust.clone(), &options).await?;
        Ok(Self { options, listener: front, service })
    }

    /// The address that members use.
    pub fn address(&self) -> ManagerAddress {
        ManagerAddress {
            address: self.listener.address.to_string(),
            key: self.listener.identity.public_key(),
        }
    }

    /// The service that answers requests.
    pub fn service(&self) -> &ManagerService {
        &self.service
    }

    /// Serves and maintains the pool; returns only on failure.
    pub async fn run(self) -> Result<(), ManagerError> {
        let Self { options, listener: front, service } = self;
        // Nobody reads the name: a manager is identified by its key.
        let name: HostName = "manager".parse()?;
        let endpoint = Endpoint::new(name, service.clone()).with_protocols([crate::protocol::PROTOCOL]);
        tokio::select! {
            served = front.serve(endpoint) => Ok(served?),
            never = maintain(&service, &options) => never,
        }
    }
}

async fn maintain(service: &ManagerService, options: &ManagerOptions) -> Result<(), ManagerError> {
    let mut repair = tokio::time::interval(options.repair_every);
    let mut policies = tokio::time::interval(options.policies_every);
    let mut balance = tokio::time::interval(options.balance_every);
    // The age of the newest backup decides; this is how often it is looked at.
    let mut backups = tokio::time::interval(options.backups.every.min(Duration::from_secs(60)));
    let mut backup = tokio::spawn(async {});
    for chore in [&mut repair, &mut balance, &mut backups] {
        chore.set_missed_tick_behavior(tokio::time::MissedTickBehavior::Delay);
    }
    let mut leadership = Leadership::new(service);
    loop {
        tokio::select! {
            // The election is part of the most frequent chore.
            _ = repair.tick() => {
                if let Err(error) = service.load_expelled().await {
                    tracing::error!(%error, "the list of expelled members cannot be read");
                }
                if leadership.leads(service).await
                    && let Err(error) = service.run_maintenance(options.lost_after).await {
                    tracing::error!(%error, "a round of repair failed");
                }
            }
            _ = balance.tick() => {
                if service.leads()
                    && let Err(error) = service.balance().await {
                    tracing::error!(%error, "a round of balancing failed");
                }
            }
            // A backup takes as long as it takes; the others go on.
            _ = backups.tick(), if service.leads() && backup.is_finished() => {
                let service = service.clone();
                backup = tokio::spawn(async move {
                    if let Err(error) = service.back_up_if_due().await {
                        let error = &error as &dyn std::error::Error;
                        tracing::error!(error, "the metadata could not be backed up");
                    }
                });
            }
            _ = policies.tick(), if service.leads() => match service.apply_due_policies().await {
                Ok((_, purged)) => purged.iter().filter(|one| one.pinned_by.is_empty()).for_each(|gone| {
                    tracing::info!(path = gone.path, version = gone.version, why = gone.why, "removed");
                }),
                Err(error) => tracing::error!(%error, "a round of policies failed"),
            },
        }
    }
}

impl ManagerService {
    /// Starts the service. Everybody gets time to report: nobody could reach the manager while it was away.
    pub(super) async fn start(
        meta: Meta,
        trust: Arc<Trust>,
        options: &ManagerOptions,
    ) -> Result<Self, ManagerError> {
        let clock = Clock::new(meta.latest_report().await?);
        meta.renew_sessions(clock.start()).await?;
        let quarantine = meta.start_quarantine(clock.start()).await?;
        let shared = Shared {
            meta,
            quarantine,
            backups: Backups::new(&options.data, &options.backups)?,
            lost_after: options.lost_after,
            trust,
            roles: PoolRoles::new(&options.data),
            clock,
            lease: options.lease,
            interval: options.interval,
            pin_timeout: options.pin_timeout,
            connections: Default::default(),
            admissions: Default::default(),
            refusals: Default::default(),
            inventories: Default::default(),
            expelled: Default::default(),
            spread: Default::default(),
            policy_rounds: Default::default(),
            coding_rounds: Default::default(),
            quotas: Default::default(),
            leads: Default::default(),
            scrubs: Default::default(),
            repaired: Default::default(),
            lost: Default::default(),
            repair_rate: Default::default(),
            totals: Default::default(),
            calls: Default::default(),
        };
        let service = Self { shared: Arc::new(shared) };
        service.prolong_pins().await?;
        service.load_expelled().await?;
        Ok(service)
    }
}
