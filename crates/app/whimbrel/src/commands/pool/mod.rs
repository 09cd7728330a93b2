//! `whimbrel pool`: runs the members of a pool and administers it. The daemon is not needed.

mod admin;
mod backup;
mod group;
mod members;
pub(crate) mod mount;
mod pins;
mod quota;
mod removal;

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
  whimbrel pool manager --data /var/lib/pool --listen 10.0.0.1:7500    on one host; prints MANAGER
  whimbrel pool key --data /srv/spare                on each member: prints its key
  whimbrel pool admit --data /var/lib/pool b1 KEY    on the manager: admits the member
  whimbrel pool benefactor --name b1 --data /srv/spare --capacity 20G --manager MANAGER
  whimbrel mount pool:MANAGER /mnt/ckpt              use the pool
  whimbrel pool status --manager MANAGER
  whimbrel pool policy /blast --keep-last 3 --manager MANAGER
  whimbrel pool prune --dry-run --manager MANAGER
  whimbrel pool pins --manager MANAGER               list versions that policies do not delete
  whimbrel pool drain b1 --manager MANAGER
  whimbrel pool label b1 --rack 3 --manager MANAGER  keep copies in different racks
  whimbrel pool quota /blast 2T --manager MANAGER    limit the bytes of a folder, or of a member
  whimbrel pool group begin /blast/step40 --files 64 --manager MANAGER    files that appear together
  whimbrel pool expel b1 --manager MANAGER           take all rights from a member
  whimbrel pool backup --manager MANAGER             back up the metadata now; done every hour by itself
  whimbrel pool restore --data /var/lib/pool FROM    bring a pool back whose metadata is lost
  whimbrel pool secret ~/.pool/secret                create a secret for `mount --secret`

MANAGER is HOST:PORT/KEY. The variable WHIMBREL_POOL can replace --manager.";

/// Run and administer a pool of spare disk
#[derive(Debug, clap::Args)]
#[command(after_help = EXAMPLES)]
pub(crate) struct Args {
    #[command(subcommand)]
    action: Action,
}

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
    Unpin(pins::Unpin),
    Pins(pins::Pins),
    #[command(alias = "purge")]
    Prune(admin::Prune),
    Drain(admin::Drain),
    Label(removal::Label),
    Expel(removal::Expel),
    Forget(removal::Forget),
    Quota(quota::Quota),
    Group(group::Group),
    Backup(backup::Backup),
    Restore(backup::Restore),
    Secret(members::Secret),
}

impl Args {
    /// Whether the command runs until it is stopped.
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
            Action::Pin(args) => args.subject.pin(!args.release, args.holder, context, &runtime),
            Action::Unpin(args) => args.subject.pin(false, args.holder, context, &runtime),
            Action::Pins(args) => args.run(context, &runtime),
            Action::Prune(args) => args.run(context, &runtime),
            Action::Drain(args) => args.run(context, &runtime),
            Action::Label(args) => args.run(context, &runtime),
            Action::Expel(args) => args.run(context, &runtime),
            Action::Forget(args) => args.run(context, &runtime),
            Action::Quota(args) => args.run(context, &runtime),
            Action::Group(args) => args.run(context, &runtime),
            Action::Backup(args) => args.run(context, &runtime),
            Action::Restore(args) => args.run(context, &runtime),
            Action::Secret(args) => args.run(context),
        }
    }
}

pub(super) fn runtime() -> Result<tokio::runtime::Runtime, CliError> {
    let built = tokio::runtime::Builder::new_multi_thread().enable_all().build();
    built.map_err(CliError::io("start the runtime"))
}

/// Wraps an error of a member or of its directory.
pub(super) fn failed<E: std::error::Error + Send + Sync + 'static>(error: E) -> CliError {
    CliError::PoolMember(Box::new(error))
}

/// Managers of a pool, and the key of the caller.
#[derive(Debug, clap::Args)]
pub(super) struct PoolArgs {
    /// Manager, as `whimbrel pool manager` prints it (repeatable)
    #[arg(
        long = "manager",
        value_name = "HOST:PORT/KEY",
        env = "WHIMBREL_POOL",
        hide_env_values = true,
        required = true
    )]
    managers: Vec<ManagerAddress>,
    /// Directory of the own key [default: ~/.config/whimbrel]
    #[arg(long, alias = "keys", value_name = "DIR")]
    keys_dir: Option<PathBuf>,
}

impl PoolArgs {
    pub(super) fn pool(&self, runtime: &tokio::runtime::Runtime) -> Result<Pool, CliError> {
        let keys = crate::session_dirs::keys(self.keys_dir.as_deref());
        let options = PoolOptions {
            manager_timeout: std::time::Duration::from_secs(5),
            ..PoolOptions::new(self.managers.clone())
        };
        open(options, &keys, runtime)
    }
}

/// Opens a pool as the member whose key is in `keys`.
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
