//! Members of a pool: `whimbrel pool manager`, `benefactor`, `key`, `admit` and `secret`.

use super::{
    backup::{BackupArgs, store},
    failed,
};
use crate::{
    argument_types::DurationArg,
    context::Context,
    error::CliError,
    metrics::{MetricsListener, benefactor_page, manager_page},
};
use serde::Serialize;
use std::{net::SocketAddr, path::PathBuf};
use tokio::{
    signal::unix::{SignalKind, signal},
    sync::watch,
};
use whimbrel_core::{ByteSize, HostName};
use whimbrel_pool::{
    ManagerAddress,
    benefactor::{self, BenefactorOptions, ScrubOptions, TierOptions, TierUrl},
    client,
    manager::{self, ManagerOptions, PoolRole, PoolRoles},
};
use whimbrel_wire::{Identity, PublicKey, Right, Rights, Trust, TrustedPeer};

/// Run the manager of a pool, which has the metadata and no data
#[derive(Debug, clap::Args)]
pub(super) struct Manager {
    /// Directory for the key, the trust list and the database
    #[arg(long, value_name = "DIR")]
    data: PathBuf,
    /// Address for benefactors and clients
    #[arg(long, value_name = "ADDRESS:PORT")]
    listen: SocketAddr,
    /// Store the metadata in this PostgreSQL, postgres://USER@HOST/DB, which several managers can share
    /// [default: a file]. Every user can read arguments: set the variable for a URL with a password
    #[arg(long, value_name = "URL", env = "WHIMBREL_POOL_DATABASE", hide_env_values = true)]
    database: Option<String>,
    /// Re-replicate the chunks of a benefactor that was silent for this long
    #[arg(long, value_name = "DURATION", default_value = "600s")]
    lost_after: DurationArg,
    /// Remove the pin of a machine whose host was silent for this long
    #[arg(long, alias = "pins-for", value_name = "DURATION", default_value = "336h")]
    pin_timeout: DurationArg,
    #[command(flatten)]
    backups: BackupArgs,
    #[command(flatten)]
    metrics: MetricsListener,
}

/// Run a benefactor, which lends disk space to a pool
#[derive(Debug, clap::Args)]
pub(super) struct Benefactor {
    /// Name of the benefactor in the pool
    #[arg(long)]
    name: HostName,
    /// Directory for the key and the chunks
    #[arg(long, value_name = "DIR")]
    data: PathBuf,
    /// Size of the disk space to lend, like 20G
    #[arg(long, value_name = "SIZE")]
    capacity: ByteSize,
    /// Size of the disk space that always stays free
    #[arg(long, value_name = "SIZE", default_value = "1G")]
    keep_free: ByteSize,
    /// Address for clients and other benefactors
    #[arg(long, value_name = "ADDRESS:PORT", default_value = "0.0.0.0:7501")]
    listen: SocketAddr,
    /// Address by which others reach the benefactor [default: from --listen, or as the manager sees it]
    #[arg(long, value_name = "HOST:PORT")]
    advertise: Option<String>,
    /// Manager, as `whimbrel pool manager` prints it (repeatable)
    #[arg(
        long = "manager",
        value_name = "HOST:PORT/KEY",
        env = "WHIMBREL_POOL",
        hide_env_values = true,
        required = true
    )]
    managers: Vec<ManagerAddress>,
    /// Leave the pool: exit when all chunks are on other benefactors
    #[arg(long)]
    drain: bool,
    /// Time between two queries to the manager for chunks to delete
    #[arg(long, alias = "inventory", value_name = "DURATION", default_value = "300s")]
    inventory_interval: DurationArg,
    /// Time in which every chunk on the disk is read and checked once
    #[arg(long, value_name = "DURATION", default_value = "7d")]
    scrub_interval: DurationArg,
    /// Most bytes a second that these checks read; 0 switches them off
    #[arg(long, value_name = "SIZE", default_value = "20M")]
    scrub_rate: ByteSize,
    /// Object store for chunks; the disk has only new ones. Credentials come from AWS_ACCESS_KEY_ID and the
    /// like
    #[arg(long, value_name = "s3://BUCKET/PREFIX[?endpoint=URL]")]
    tier: Option<TierUrl>,
    /// Size of the segments that stay on the disk; older ones are moved to the object store
    #[arg(long, value_name = "SIZE", default_value = "0", requires = "tier")]
    tier_local: ByteSize,
    /// Take the prefix of the object store over from a benefactor that has lost its disk and never returns
    #[arg(long, requires = "tier")]
    take_over: bool,
    #[command(flatten)]
    metrics: MetricsListener,
}

/// Print the key of a member, which is created if missing
#[derive(Debug, clap::Args)]
pub(super) struct Key {
    /// Directory of the member [default: ~/.config/whimbrel]
    #[arg(long, value_name = "DIR")]
    data: Option<PathBuf>,
}

/// Admit a member (run this on the manager)
#[derive(Debug, clap::Args)]
pub(super) struct Admit {
    /// Directory of the manager
    #[arg(long, value_name = "DIR")]
    data: PathBuf,
    /// Name of the member
    name: HostName,
    /// Key of the member, as `whimbrel pool key` prints it there
    key: PublicKey,
    /// Role of the member: benefactor, client or admin [default: all of them]
    #[arg(long)]
    role: Option<PoolRole>,
}

/// Create a secret with which a mount encrypts written data
#[derive(Debug, clap::Args)]
pub(super) struct Secret {
    /// File to create; if you lose it, you lose all data that was written with it
    file: PathBuf,
}

#[derive(Debug, Serialize)]
struct NewSecret {
    file: PathBuf,
}

#[derive(Debug, Serialize)]
struct Running {
    address: String,
}

#[derive(Debug, Serialize)]
struct MemberKey {
    key: PublicKey,
}

#[derive(Debug, Serialize)]
struct Admitted {
    name: HostName,
    key: PublicKey,
}

impl Manager {
    pub(super) async fn run(self, context: &Context) -> Result<(), CliError> {
        whimbrel_wire::private_dir::restrict_new_files();
        let mut options = ManagerOptions::new(self.data, self.listen);
        (options.database, options.lost_after) = (self.database, self.lost_after.0);
        options.pin_timeout = self.pin_timeout.0;
        options.backups = self.backups.options()?;
        let manager = manager::Manager::open(options).await.map_err(failed)?;
        let service = manager.service().clone();
        let page = move || {
            let service = service.clone();
            async move {
                let status = service.status().await.ok().zip(service.scrubs().await.ok());
                let members = service.member_report().await.ok();
                let status = status.as_ref().map(|(status, scrubs)| (status, scrubs.as_slice()));
                manager_page(status, members.as_ref(), service.calls())
            }
        };
        self.metrics.start(page).await?;
        let running = Running { address: manager.address().to_string() };
        context.output.result(&running, |running| format!("{}\n", running.address))?;
        tokio::select! {
            ended = manager.run() => ended.map_err(failed),
            () = told_to_end() => Ok(()),
        }
    }
}

impl Benefactor {
    pub(super) async fn run(self, context: &Context) -> Result<(), CliError> {
        whimbrel_wire::private_dir::restrict_new_files();
        let (keep_local, take_over, capacity) = (self.tier_local.0, self.take_over, self.capacity.0);
        let tier = self.tier.map(|url| TierOptions { keep_local, take_over, ..store(url) });
        let options = BenefactorOptions {
            name: self.name,
            data: self.data,
            capacity: self.capacity.0,
            keep_free: self.keep_free.0,
            listen: self.listen,
            advertise: self.advertise,
            managers: self.managers,
            inventory_every: self.inventory_interval.0,
            scrub: ScrubOptions { every: self.scrub_interval.0, rate: self.scrub_rate.0 },
            tier,
        };
        let benefactor = benefactor::Benefactor::open(options).await.map_err(failed)?;
        let (store, calls) = (benefactor.store().clone(), benefactor.calls().clone());
        let page = move || {
            let (store, calls) = (store.clone(), calls.clone());
            let page = tokio::task::spawn_blocking(move || benefactor_page(&store.usage(), capacity, &calls));
            async { page.await.unwrap_or_default() }
        };
        self.metrics.start(page).await?;
        let running = Running { address: format!("{}/{}", self.listen, benefactor.key()) };
        context.output.result(&running, |running| format!("{}\n", running.address))?;
        let (_leave, leaving) = watch::channel(self.drain);
        tokio::select! {
            ended = benefactor.run(leaving) => ended.map_err(failed),
            () = told_to_end() => Ok(()),
        }
    }
}

/// Waits for the signal TERM or INT.
async fn told_to_end() {
    let (Ok(mut term), Ok(mut int)) = (signal(SignalKind::terminate()), signal(SignalKind::interrupt()))
    else {
        return std::future::pending().await;
    };
    tokio::select! {
        _ = term.recv() => {}
        _ = int.recv() => {}
    }
}

impl Key {
    pub(super) fn run(self, context: &Context) -> Result<(), CliError> {
        let dir = crate::session_dirs::keys(self.data.as_deref());
        let key = MemberKey { key: Identity::load_or_create(&dir).map_err(failed)?.public_key() };
        context.output.result(&key, |key| format!("{}\n", key.key))
    }
}

impl Secret {
    pub(super) fn run(self, context: &Context) -> Result<(), CliError> {
        client::Secret::create(&self.file).map_err(CliError::io("create the secret"))?;
        context.output.result(&NewSecret { file: self.file }, |new| format!("{}\n", new.file.display()))
    }
}

impl Admit {
    pub(super) fn run(self, context: &Context) -> Result<(), CliError> {
        let Self { data, name, key, role } = self;
        let rights = Rights(vec![Right::Pool]);
        let peer = TrustedPeer {
            name: name.clone(),
            key: Some(key),
            address: None,
            rights,
            read: None,
            write: None,
        };
        if let Some(role) = role {
            // First, so that the member is never admitted without it.
            PoolRoles::new(&data).set(key, role).map_err(CliError::io("set the role"))?;
        }
        let trust = Trust::load(&data).map_err(failed)?;
        let known = trust.find(&key).map_err(failed)?.is_some_and(|known| known.name == name);
        if !known || role.is_none() {
            trust.add(peer).map_err(failed)?;
        }
        context.output.result(&Admitted { name, key }, |admitted| format!("{}: admitted\n", admitted.name))
    }
}
