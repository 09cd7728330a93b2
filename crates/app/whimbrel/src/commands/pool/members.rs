//! Members of a pool: `whimbrel pool manager`, `benefactor`, `key`, `admit`, `secret`.

use super::failed;
use crate::{argument_types::DurationArg, context::Context, error::CliError};
use serde::Serialize;
use std::{net::SocketAddr, path::PathBuf};
use tokio::{
    signal::unix::{SignalKind, signal},
    sync::watch,
};
use whimbrel_core::{ByteSize, HostName};
use whimbrel_pool::{
    ManagerAddress,
    benefactor::{self, BenefactorOptions, TierOptions, TierUrl},
    client,
    manager::{self, ManagerOptions},
};
use whimbrel_wire::{Identity, PublicKey, Right, Rights, Trust, TrustedPeer};

/// Run the manager of a pool: all metadata, no data
#[derive(Debug, clap::Args)]
pub(super) struct Manager {
    /// Directory for its key, whom it admits, and its database
    #[arg(long, value_name = "DIR")]
    data: PathBuf,
    /// Address for benefactors and clients
    #[arg(long, value_name = "ADDRESS:PORT")]
    listen: SocketAddr,
    /// Keep the metadata in this PostgreSQL, postgres://USER@HOST/DB, instead of a file; several managers may
    /// share one
    #[arg(long, value_name = "URL")]
    database: Option<String>,
    /// After so long in silence the chunks of a benefactor are copied from elsewhere
    #[arg(long, value_name = "DURATION", default_value = "600s")]
    lost_after: DurationArg,
    /// How long a version stays pinned for a machine whose host is not heard of any more
    #[arg(long, value_name = "DURATION", default_value = "336h")]
    pins_for: DurationArg,
}

/// Give disk to a pool
#[derive(Debug, clap::Args)]
pub(super) struct Benefactor {
    /// Name among the members
    #[arg(long)]
    name: HostName,
    /// Directory for its key and its chunks
    #[arg(long, value_name = "DIR")]
    data: PathBuf,
    /// Bytes it gives, like 20G
    #[arg(long, value_name = "SIZE")]
    capacity: ByteSize,
    /// Bytes of its disk that always stay free
    #[arg(long, value_name = "SIZE", default_value = "1G")]
    keep_free: ByteSize,
    /// Address for clients and other benefactors
    #[arg(long, value_name = "ADDRESS:PORT", default_value = "0.0.0.0:7501")]
    listen: SocketAddr,
    /// What others reach it by, if that is not the address it listens on
    #[arg(long, value_name = "HOST:PORT")]
    advertise: Option<String>,
    /// The manager, as it says when it starts; several may be given
    #[arg(
        long = "manager",
        value_name = "HOST:PORT/KEY",
        env = "WHIMBREL_POOL",
        hide_env_values = true,
        required = true
    )]
    managers: Vec<ManagerAddress>,
    /// Leave: stay until everything it holds is elsewhere, then end
    #[arg(long)]
    drain: bool,
    /// Between two lists of its chunks to the manager, which answers what may go
    #[arg(long, value_name = "DURATION", default_value = "300s")]
    inventory: DurationArg,
    /// Object store for its chunks: the disk keeps what is new. Credentials are taken from AWS_ACCESS_KEY_ID
    /// and the like
    #[arg(long, value_name = "s3://BUCKET/PREFIX[?endpoint=URL]")]
    tier: Option<TierUrl>,
    /// Bytes that stay on the disk before the oldest go to the object store
    #[arg(long, value_name = "SIZE", default_value = "0", requires = "tier")]
    tier_local: ByteSize,
}

/// Print the key of a member, making it if there is none
#[derive(Debug, clap::Args)]
pub(super) struct Key {
    /// The member's directory, ~/.config/whimbrel unless given
    #[arg(long, value_name = "DIR")]
    data: Option<PathBuf>,
}

/// On the manager: let a member in
#[derive(Debug, clap::Args)]
pub(super) struct Admit {
    /// The manager's directory
    #[arg(long, value_name = "DIR")]
    data: PathBuf,
    /// Name of the member
    name: HostName,
    /// Its key, as `whimbrel pool key` prints it there
    key: PublicKey,
}

/// Make a secret, with which a mount seals what it writes
#[derive(Debug, clap::Args)]
pub(super) struct Secret {
    /// The file to make; whoever loses it loses what was written with it
    file: PathBuf,
}

#[derive(Debug, Serialize)]
struct NewSecret {
    file: PathBuf,
}

/// What a member says when it runs.
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
        let mut options = ManagerOptions::new(self.data, self.listen);
        (options.database, options.lost_after) = (self.database, self.lost_after.0);
        options.pins_for = self.pins_for.0;
        let manager = manager::Manager::open(options).await.map_err(failed)?;
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
        let environment = std::env::vars_os();
        let settings = environment
            .filter_map(|(name, value)| Some((name.into_string().ok()?, value.into_string().ok()?)));
        let (keep_here, settings) = (self.tier_local.0, settings.collect());
        let tier = self.tier.map(|url| TierOptions { url, keep_here, settings });
        let options = BenefactorOptions {
            name: self.name,
            data: self.data,
            capacity: self.capacity.0,
            keep_free: self.keep_free.0,
            listen: self.listen,
            advertise: self.advertise,
            managers: self.managers,
            inventory_every: self.inventory.0,
            tier,
        };
        let benefactor = benefactor::Benefactor::open(options).await.map_err(failed)?;
        let running = Running { address: format!("{}/{}", self.listen, benefactor.key()) };
        context.output.result(&running, |running| format!("{}\n", running.address))?;
        let (_leave, leaving) = watch::channel(self.drain);
        tokio::select! {
            ended = benefactor.run(leaving) => ended.map_err(failed),
            () = told_to_end() => Ok(()),
        }
    }
}

/// Waits for TERM or INT.
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
        client::Secret::create(&self.file).map_err(CliError::io("make the secret"))?;
        context.output.result(&NewSecret { file: self.file }, |new| format!("{}\n", new.file.display()))
    }
}

impl Admit {
    pub(super) fn run(self, context: &Context) -> Result<(), CliError> {
        let Self { data, name, key } = self;
        let rights = Rights(vec![Right::Pool]);
        let peer = TrustedPeer {
            name: name.clone(),
            key: Some(key),
            address: None,
            rights,
            read: None,
            write: None,
        };
        Trust::load(&data).and_then(|trust| trust.add(peer)).map_err(failed)?;
        context.output.result(&Admitted { name, key }, |admitted| format!("{}: admitted\n", admitted.name))
    }
}
