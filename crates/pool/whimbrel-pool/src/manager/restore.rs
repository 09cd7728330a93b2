//! Restores the metadata of a pool from a backup into an empty database; no manager runs on it meanwhile.
//!
//! The backup comes from a file or folder, an object store, or a member that has it. Nothing is visible in
//! the database before the whole backup was read and its digest compared. When a manager starts on it, the
//! benefactors tell what they have: places are not in a backup.

use super::process::ManagerOptions;
use crate::{
    ManagerAddress,
    backup::{
        self, BackupError, BackupName, Result,
        format::{BackupReader, BackupRecord},
        io_error,
    },
    benefactor::{Bucket, TierOptions},
    client::Secret,
    connections::Dialer,
    meta::{Meta, RowLoader},
    protocol::{ListBackups, ReadBackup},
};
use serde::Serialize;
use std::{
    fs::File,
    io::{BufReader, Write},
    path::{Path, PathBuf},
    sync::Arc,
    time::Duration,
};
use tokio::runtime::Handle;
use whimbrel_wire::{Connection, atomic_file, private_dir};

/// Where a backup is.
pub enum BackupSource {
    /// A file, or a folder of which the newest is taken.
    Path(PathBuf),
    /// The newest in an object store.
    Store(TierOptions),
    /// The newest that a manager or benefactor has.
    Member(ManagerAddress, Arc<dyn Dialer>),
}

/// Options of a restore.
pub struct RestoreOptions {
    /// Folder of the manager; a key and a trust list that it has stay.
    pub data: PathBuf,
    /// A `postgres://` URL, if the manager uses PostgreSQL instead of a file.
    pub database: Option<String>,
    /// Where the backup is.
    pub source: BackupSource,
    /// Secret of an encrypted backup.
    pub secret: Option<Arc<Secret>>,
    /// Pool to restore, if there are backups of several.
    pub pool: Option<u64>,
    /// Time for which chunks that the restored manager does not know are retained.
    pub quarantine: Duration,
}

/// Result of a restore.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct RestoreReport {
    /// Number of the pool.
    pub pool: u64,
    /// Place of the backup.
    pub from: String,
    /// Time of the backup in milliseconds since 1970, by the manager's clock; none for a file with another
    /// name.
    pub made: Option<u64>,
    /// Number of files.
    pub files: u64,
    /// Number of versions.
    pub versions: u64,
    /// Number of chunks.
    pub chunks: u64,
}

/// Restores a pool. After a failure, the database is as empty as before.
pub async fn restore(options: RestoreOptions) -> Result<RestoreReport> {
    let RestoreOptions { data, database, source, secret, pool, quarantine } = options;
    private_dir::create(&data)?;
    // Fetched backups stay beside the database until the restore is done.
    let fetched = tempfile::TempDir::new_in(&data).map_err(io_error("create a folder in", &data))?;
    let (path, name, from) = locate(source, pool, fetched.path()).await?;
    let location = database.unwrap_or_else(|| ManagerOptions::database_file(&data));
    let meta = Meta::open(&location).await?;
    let nodes = meta.nodes().await? + meta.members().await?.len() as u64;
    if nodes > 0 {
        return Err(BackupError::InUse { nodes });
    }
    let file = File::open(&path).map_err(io_error("open", &path))?;
    let mut reader = BackupReader::new(BufReader::new(file), secret.as_deref())?;
    let Some(BackupRecord::Head { pool, schema }) = reader.next()? else {
        return Err(BackupError::Damaged { what: "its first record" });
    };
    let mut loader = RowLoader::begin(meta, schema).await?;
    let mut files = Vec::new();
    while let Some(record) = reader.next()? {
        match record {
            BackupRecord::Head { .. } => return Err(BackupError::Damaged { what: "a second head" }),
            BackupRecord::Table { name, columns } => loader.table(&name, &columns).await?,
            BackupRecord::Row(row) => loader.row(row).await?,
            BackupRecord::File { name, content } => files.push((name, content)),
        }
    }
    for (name, content) in files {
        place_file(&data, &name, &content)?;
    }
    let quarantine = i64::try_from(quarantine.as_millis()).unwrap_or(i64::MAX);
    let rows = loader.finish(quarantine).await?;
    let made = name.map(|name| name.made);
    Ok(RestoreReport { pool, from, made, files: rows.nodes, versions: rows.versions, chunks: rows.chunks })
}

/// Writes a file of the manager's folder, unless it has one: its list of members may be newer.
fn place_file(data: &Path, name: &str, content: &[u8]) -> Result<()> {
    if !super::backups::FILES.contains(&name) {
        return Err(BackupError::Damaged { what: "the name of a file" });
    }
    let path = data.join(name);
    match atomic_file::create(&path, content) {
        Err(error) if error.kind() == std::io::ErrorKind::AlreadyExists => Ok(()),
        created => created.map_err(io_error("create", &path)),
    }
}

/// Path of the backup on this host, its name if it has one, and its place for people.
async fn locate(
    source: BackupSource,
    pool: Option<u64>,
    fetched: &Path,
) -> Result<(PathBuf, Option<BackupName>, String)> {
    match source {
        BackupSource::Path(path) if path.is_dir() => {
            let names: Vec<BackupName> = backup::list(&path)?.into_iter().map(|(name, _)| name).collect();
            let name = backup::newest(&path.display().to_string(), &names, pool)?;
            let path = path.join(name.to_string());
            Ok((path.clone(), Some(name), path.display().to_string()))
        }
        BackupSource::Path(path) => {
            let name = path.file_name().and_then(|name| name.to_str()).and_then(|name| name.parse().ok());
            Ok((path.clone(), name, path.display().to_string()))
        }
        BackupSource::Store(options) => {
            let (bucket, to) = (Bucket::new(options, Handle::current())?, fetched.to_owned());
            let done = tokio::task::spawn_blocking(move || from_store(&bucket, pool, &to)).await;
            done.unwrap_or_else(|_| Err(BackupError::None { place: "the object store".to_owned() }))
        }
        BackupSource::Member(member, dialer) => {
            let place = member.to_string();
            let failed = |text: String| BackupError::Member { member: place.clone(), text };
            let connection = dialer.dial(&member.address, member.key).await;
            let connection = connection.map_err(|error| failed(error.to_string()))?;
            from_member(&connection, &place, pool, fetched).await
        }
    }
}

fn from_store(
    bucket: &Bucket,
    pool: Option<u64>,
    fetched: &Path,
) -> Result<(PathBuf, Option<BackupName>, String)> {
    let names: Vec<BackupName> = bucket.names()?.iter().filter_map(|name| name.parse().ok()).collect();
    let name = backup::newest(&bucket.place(), &names, pool)?;
    let path = fetched.join(name.to_string());
    if !bucket.get_file(&name.to_string(), &path)? {
        return Err(BackupError::None { place: bucket.place() });
    }
    Ok((path, Some(name), format!("{name} in {}", bucket.place())))
}

async fn from_member(
    connection: &Connection,
    place: &str,
    pool: Option<u64>,
    fetched: &Path,
) -> Result<(PathBuf, Option<BackupName>, String)> {
    let failed = |text: String| BackupError::Member { member: place.to_owned(), text };
    let listed = connection.request::<ListBackups>(&(), bytes::Bytes::new()).await;
    let (names, _) = listed.map_err(|error| failed(error.to_string()))?;
    let names: Vec<BackupName> = names.into_iter().map(|(name, _)| name).collect();
    let name = backup::newest(place, &names, pool)?;
    let path = fetched.join(name.to_string());
    let file = File::create(&path).map_err(io_error("create", &path))?;
    read_backup(connection, place, name, file).await?;
    Ok((path, Some(name), format!("{name} of {place}")))
}

/// Reads a backup of a member into a file.
pub(crate) async fn read_backup(
    connection: &Connection,
    place: &str,
    name: BackupName,
    mut file: File,
) -> Result<()> {
    let failed = |text: String| BackupError::Member { member: place.to_owned(), text };
    let mut offset = 0;
    loop {
        let read = connection.request::<ReadBackup>(&(name, offset), bytes::Bytes::new()).await;
        let (length, piece) = read.map_err(|error| failed(error.to_string()))?;
        if piece.is_empty() && offset < length {
            return Err(failed("it sends nothing".to_owned()));
        }
        file.write_all(&piece).map_err(io_error("write", Path::new(&name.to_string())))?;
        offset += piece.len() as u64;
        if offset >= length {
            return Ok(());
        }
    }
}
