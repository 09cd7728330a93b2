//! `whimbrel pool`: its members as processes, and questions to the manager. Nothing of it needs the host
//! daemon.

mod admin;
mod members;
pub(crate) mod mount;
mod pins;

use crate::{context::Context, error::CliError};
use clap::Subcommand;
use std::{path::PathBuf, sync::Arc};
use whimbrel_core::HostName;
use whimbrel_pool::{
    ManagerAddress,
    client::{Pool, PoolOptions},
    connections::TlsDialer,
};
use whimbrel_wire::Identity;

const EXAMPLES: &str = "\
Examples:
  whimbrel pool manager --data /var/lib/pool --listen 10.0.0.1:7500     on one machine; prints MANAGER
  whimbrel pool key --data /srv/spare                                   on each member: prints its key
  whimbrel pool admit --data /var/lib/pool b1 KEY                       on the manager: let it in
  whimbrel pool benefactor --name b1 --data /srv/spare --capacity 20G --manager MANAGER
  whimbrel mount pool:MANAGER /mnt/ckpt                                 use it
  whimbrel pool status --manager MANAGER
  whimbrel pool policy /blast --keep-last 3 --manager MANAGER
  whimbrel pool purge --dry-run --manager MANAGER
  whimbrel pool pins --manager MANAGER                                  what policies leave alone, and for whom
  whimbrel pool drain b1 --manager MANAGER
  whimbrel pool secret ~/.pool/secret                                   for `mount --secret`

MANAGER is HOST:PORT/KEY; it can stand in WHIMBREL_POOL instead of --manager.";

/// Run a checkpoint pool made of spare disk, and ask it
#[derive(Debug, clap::Args)]
#[command(after_help = EXAMPLES)]
pub(crate) struct Args {
    #[command(subcommand)]
    action: Action,
}

/// What to do.
#[derive(Debug, Subcommand)]
enum Action {
    Manager(members::Manager),
    Benefactor(members::Benefactor),
    Key(members::Key),
    Admit(members::Admit),
    Status(admin::Status),
    Policy(admin::SetPolicy),
    Versions(admin::Versions),
    Pin(pins::Pin),
    Pins(pins::Pins),
    Purge(admin::Purge),
    Drain(admin::Drain),
    Secret(members::Secret),
}

impl Args {
    /// Whether it runs until it is stopped.
    pub(crate) fn is_daemon(&self) -> bool {
        matches!(self.action, Action::Manager(_) | Action::Benefactor(_))
    }

    pub(crate) fn run(self, context: &Context) -> Result<(), CliError> {
        let runtime = runtime()?;
        match self.action {
            Action::Manager(args) => runtime.block_on(args.run(context)),
            Action::Benefactor(args) => runtime.block_on(args.run(context)),
            Action::Key(args) => args.run(context),
            Action::Admit(args) => args.run(context),
            Action::Status(args) => args.run(context, &runtime),
            Action::Policy(args) => args.run(context, &runtime),
            Action::Versions(args) => args.run(context, &runtime),
            Action::Pin(args) => args.run(context, &runtime),
            Action::Pins(args) => args.run(context, &runtime),
            Action::Purge(args) => args.run(context, &runtime),
            Action::Drain(args) => args.run(context, &runtime),
            Action::Secret(args) => args.run(context),
        }
    }
}

pub(super) fn runtime() -> Result<tokio::runtime::Runtime, CliError> {
    let built = tokio::runtime::Builder::new_multi_thread().enable_all().build();
    built.map_err(CliError::io("start the runtime"))
}

/// A failure of a member or of its folder.
pub(super) fn failed<E: std::error::Error + Send + Sync + 'static>(error: E) -> CliError {
    CliError::PoolMember(Box::new(error))
}

/// Which pool, and as whom.
#[derive(Debug, clap::Args)]
pub(super) struct PoolArgs {
    /// The manager, as it says when it starts; several may be given
    #[arg(
        long = "manager",
        value_name = "HOST:PORT/KEY",
        env = "WHIMBREL_POOL",
        hide_env_values = true,
        required = true
    )]
    managers: Vec<ManagerAddress>,
    /// Folder of the own key, ~/.config/whimbrel unless given
    #[arg(long, value_name = "DIR")]
    keys: Option<PathBuf>,
}

impl PoolArgs {
    pub(super) fn pool(&self, runtime: &tokio::runtime::Runtime) -> Result<Pool, CliError> {
        let keys = crate::session_dirs::keys(self.keys.as_deref());
        let options = PoolOptions {
            manager_patience: std::time::Duration::from_secs(5),
            ..PoolOptions::new(self.managers.clone())
        };
        open(options, &keys, runtime)
    }
}

/// A handle on a pool, as the member whose key is in `keys`.
pub(super) fn open(
    options: PoolOptions,
    keys: &std::path::Path,
    runtime: &tokio::runtime::Runtime,
) -> Result<Pool, CliError> {
    let identity = Arc::new(Identity::load_or_create(keys).map_err(failed)?);
    let name: HostName = "client".parse().map_err(failed)?;
    let dialer = TlsDialer::new(identity, name, ());
    Ok(Pool::new(options, Arc::new(dialer), runtime.handle().clone()))
}
