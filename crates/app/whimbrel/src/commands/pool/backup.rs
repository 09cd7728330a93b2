//! Backups of a pool's metadata: `whimbrel pool backup` and `restore`.

use super::{PoolArgs, failed};
use crate::{
    argument_types::DurationArg,
    context::Context,
    error::CliError,
    table::{count, span, table},
};
use serde::Serialize;
use std::{
    fs::File,
    path::{Path, PathBuf},
    sync::Arc,
    time::{Duration, SystemTime, UNIX_EPOCH},
};
use tokio::runtime::Runtime;
use whimbrel_core::{ByteSize, HostName};
use whimbrel_pool::{
    ManagerAddress,
    backup::BackupName,
    benefactor::{TierOptions, TierUrl},
    client::Secret,
    connections::TlsDialer,
    manager::{self, BackupOptions, BackupSource, RestoreOptions, RestoreReport},
    protocol::BackupReport,
};
use whimbrel_wire::Identity;

/// Back up the metadata of a pool, or list its backups
///
/// The manager also backs it up by itself, every hour unless it is told otherwise.
#[derive(Debug, clap::Args)]
#[command(after_help = BACKUP_EXAMPLES)]
pub(super) struct Backup {
    /// Copy the backup to this file too; it names all files and members of the pool
    #[arg(long, value_name = "FILE")]
    to: Option<PathBuf>,
    /// List the backups that the manager has, and make none
    #[arg(long, conflicts_with = "to")]
    list: bool,
    #[command(flatten)]
    member: PoolArgs,
}

const BACKUP_EXAMPLES: &str = "\
Examples:
  whimbrel pool backup --manager MANAGER
  whimbrel pool backup --to pool.backup --manager MANAGER    to a file on this host, too
  whimbrel pool restore --data /var/lib/pool pool.backup     bring a lost pool back";

/// Restore the metadata of a pool from a backup
///
/// Run this on the manager's host, while no manager runs.
#[derive(Debug, clap::Args)]
#[command(after_help = RESTORE_EXAMPLES)]
pub(super) struct Restore {
    /// Directory of the manager; a key and a trust list in it stay
    #[arg(long, value_name = "DIR")]
    data: PathBuf,
    /// Restore into this PostgreSQL, which must be empty [default: a file in the directory]
    #[arg(long, value_name = "URL", env = "WHIMBREL_POOL_DATABASE", hide_env_values = true)]
    database: Option<String>,
    /// Backup: a file, a directory, an object store s3://…, or a benefactor HOST:PORT/KEY; the newest is
    /// taken
    #[arg(value_name = "FROM")]
    source: String,
    /// File with the secret of an encrypted backup
    #[arg(long, value_name = "FILE")]
    backup_secret: Option<PathBuf>,
    /// Number of the pool, if there are backups of several
    #[arg(long, value_name = "POOL", value_parser = pool_number)]
    pool: Option<u64>,
    /// Time for which chunks that the backup does not have are not deleted
    #[arg(long, value_name = "DURATION", default_value = "7d")]
    quarantine: DurationArg,
    /// Directory of the own key, to read from a benefactor [default: ~/.config/whimbrel]
    #[arg(long, alias = "keys", value_name = "DIR")]
    keys_dir: Option<PathBuf>,
}

const RESTORE_EXAMPLES: &str = "\
Examples:
  whimbrel pool restore --data /var/lib/pool /var/lib/pool/backups            the disk is there, the database is not
  whimbrel pool restore --data /var/lib/pool 10.0.0.2:7501/whk1-...           from a benefactor
  whimbrel pool restore --data /var/lib/pool 's3://bucket/pool?endpoint=https://store.example'
  whimbrel pool manager --data /var/lib/pool --listen 10.0.0.1:7500           then start the manager

Files of the backup can be read once the benefactors have told what they have, within minutes. If the manager has a
new key, start benefactors and mounts with its new MANAGER.";

/// Where a manager puts its backups.
#[derive(Debug, clap::Args)]
pub(super) struct BackupArgs {
    /// Time between two backups of the metadata
    #[arg(long, value_name = "DURATION", default_value = "1h")]
    backup_interval: DurationArg,
    /// Number of backups that each place retains
    #[arg(long, value_name = "N", default_value = "24", value_parser = clap::value_parser!(u16).range(1..))]
    backups: u16,
    /// Object store for backups, beside this directory and three benefactors
    #[arg(long, value_name = "s3://BUCKET/PREFIX[?endpoint=URL]")]
    backup_store: Option<TierUrl>,
    /// Encrypt backups with the secret in this file, as `whimbrel pool secret` creates it. Keep a copy of it:
    /// without it they cannot be restored
    #[arg(long, value_name = "FILE")]
    backup_secret: Option<PathBuf>,
}

impl BackupArgs {
    pub(super) fn options(self) -> Result<BackupOptions, CliError> {
        Ok(BackupOptions {
            every: self.backup_interval.0,
            keep: self.backups,
            store: self.backup_store.map(store),
            secret: secret(self.backup_secret.as_deref())?,
        })
    }
}

fn secret(path: Option<&Path>) -> Result<Option<Arc<Secret>>, CliError> {
    let secret = path.map(Secret::load).transpose().map_err(CliError::io("read the secret"))?;
    Ok(secret.map(Arc::new))
}

fn pool_number(text: &str) -> Result<u64, String> {
    u64::from_str_radix(text, 16).map_err(|_| "a number of 16 hexadecimal digits".to_owned())
}

/// An object store with the credentials of the environment.
pub(super) fn store(url: TierUrl) -> TierOptions {
    let environment = std::env::vars_os();
    let settings =
        environment.filter_map(|(name, value)| Some((name.into_string().ok()?, value.into_string().ok()?)));
    TierOptions { url, keep_local: 0, take_over: false, settings: settings.collect() }
}

#[derive(Debug, Serialize)]
struct Listed {
    name: String,
    bytes: u64,
}

impl Backup {
    pub(super) fn run(self, context: &Context, runtime: &Runtime) -> Result<(), CliError> {
        let pool = self.member.pool(runtime)?;
        if self.list {
            let backups = pool.block(pool.backups()).map_err(CliError::Pool)?;
            return list(&backups, context);
        }
        let report = pool.block(pool.make_backup()).map_err(CliError::Pool)?;
        if let Some(path) = &self.to {
            let file = File::create_new(path).map_err(CliError::io("create the file"))?;
            let copied = pool.block(pool.read_backup(report.name, file));
            if copied.is_err() {
                // Half a backup would be refused, but only when it is needed.
                let _ = std::fs::remove_file(path);
            }
            copied.map_err(failed)?;
        }
        context.output.result(&report, for_people)
    }
}

fn for_people(report: &BackupReport) -> String {
    let places = report.benefactors.iter().chain(&report.store).map(|place| format!(", {place}"));
    let places: String = places.collect();
    let mut text = format!("{}: {}, on the manager{places}\n", report.name, ByteSize(report.bytes));
    for (place, why) in &report.failed {
        text += &format!("not on {place}: {why}\n");
    }
    text
}

fn list(backups: &[(BackupName, u64)], context: &Context) -> Result<(), CliError> {
    let listed: Vec<Listed> =
        backups.iter().map(|(name, bytes)| Listed { name: name.to_string(), bytes: *bytes }).collect();
    context.output.result(listed.as_slice(), |_: &[Listed]| {
        let now = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
        let age = |name: &BackupName| span(now.saturating_sub(Duration::from_millis(name.made)));
        let rows =
            backups.iter().map(|(name, bytes)| [name.to_string(), ByteSize(*bytes).to_string(), age(name)]);
        table(["BACKUP", "SIZE", "AGE"], rows, "no backups")
    })
}

impl Restore {
    pub(super) fn run(self, context: &Context, runtime: &Runtime) -> Result<(), CliError> {
        whimbrel_wire::private_dir::restrict_new_files();
        let options = RestoreOptions {
            source: self.source()?,
            data: self.data,
            database: self.database,
            secret: secret(self.backup_secret.as_deref())?,
            pool: self.pool,
            quarantine: self.quarantine.0,
        };
        let report = runtime.block_on(manager::restore(options)).map_err(failed)?;
        context.output.result(&report, |report: &RestoreReport| {
            format!(
                "pool {:016x} from {}: {}, {}, {}\n`whimbrel pool manager` starts it; benefactors then tell what they have\n",
                report.pool,
                report.from,
                count(report.files, "file"),
                count(report.versions, "version"),
                count(report.chunks, "chunk"),
            )
        })
    }

    fn source(&self) -> Result<BackupSource, CliError> {
        if self.source.starts_with("s3://") {
            return Ok(BackupSource::Store(store(self.source.parse::<TierUrl>().map_err(failed)?)));
        }
        match self.source.parse::<ManagerAddress>() {
            Ok(member) if !Path::new(&self.source).exists() => {
                let keys = crate::session_dirs::keys(self.keys_dir.as_deref());
                let identity = Arc::new(Identity::load_or_create(&keys).map_err(failed)?);
                let dialer = TlsDialer::new(identity, "client".parse::<HostName>().map_err(failed)?, ());
                Ok(BackupSource::Member(member, Arc::new(dialer)))
            }
            _ => Ok(BackupSource::Path(self.source.clone().into())),
        }
    }
}
