//! Backups of the metadata: made by the manager that does the chores, and on request; see
//! [`crate::backup`].
//!
//! Each lies in the folder of the manager, at some benefactors, and in an object store if one is named. A
//! place that fails is named and tried again with the next backup; it does not harm the others.

use super::{ManagerService, invalid, placement};
use crate::{
    backup::{
        self, BackupError, BackupName, PIECE, Result,
        format::{BackupRecord, BackupWriter},
        io_error,
    },
    benefactor::{Bucket, TierOptions},
    client::Secret,
    meta::{BenefactorRow, Quarantine, SharedNumber, SnapshotPart},
    protocol::{BackupPiece, BackupReport, ListBackups, MakeBackup, PutBackup, ReadBackup, RequestInventory},
};
use bytes::Bytes;
use std::{
    fs::{self, File},
    io::{self, BufWriter},
    path::{Path, PathBuf},
    sync::Arc,
    time::Duration,
};
use tokio::{runtime::Handle, task::spawn_blocking};
use whimbrel_core::lock;
use whimbrel_wire::{Answer, Call, PublicKey, Refusal, Reply, Request};

/// Benefactors that get each backup.
const BENEFACTORS: usize = 3;
/// Timeout of one piece.
const PIECE_TIME: Duration = Duration::from_secs(60);
/// Files of the manager's folder that are in a backup. The key is not: whoever has it is the manager.
pub(super) const FILES: [&str; 2] = ["trust.toml", "roles"];

/// Where backups go, and how many are retained.
#[derive(Debug, Clone)]
pub struct BackupOptions {
    /// Time between two backups.
    pub every: Duration,
    /// Number of backups that each place retains.
    pub keep: u16,
    /// Object store for backups.
    pub store: Option<TierOptions>,
    /// Secret with which they are encrypted.
    pub secret: Option<Arc<Secret>>,
}

impl Default for BackupOptions {
    fn default() -> Self {
        Self { every: Duration::from_secs(3600), keep: 24, store: None, secret: None }
    }
}

/// The state of a manager's backups.
#[derive(Debug)]
pub(super) struct Backups {
    data: PathBuf,
    options: BackupOptions,
    store: Option<Arc<Bucket>>,
    /// One backup at a time.
    running: tokio::sync::Mutex<()>,
}

impl Backups {
    pub(super) fn new(data: &Path, options: &BackupOptions) -> Result<Self> {
        let store = options.store.clone().map(|store| Bucket::new(store, Handle::current()));
        let store = store.transpose()?.map(Arc::new);
        Ok(Self { data: data.to_owned(), options: options.clone(), store, running: Default::default() })
    }

    fn folder(&self) -> PathBuf {
        self.data.join(backup::FOLDER)
    }
}

impl From<BackupError> for Refusal {
    fn from(error: BackupError) -> Self {
        let code = match &error {
            BackupError::Io { source, .. } if source.kind() == io::ErrorKind::NotFound => {
                crate::protocol::code::NOT_FOUND
            }
            _ => crate::protocol::code::STORAGE,
        };
        let cause = std::error::Error::source(&error).map(|cause| format!(": {cause}")).unwrap_or_default();
        Refusal::new(code, format!("{error}{cause}"))
    }
}

impl ManagerService {
    pub(super) async fn backup_call(&self, request: Request) -> Answer {
        let folder = self.shared.backups.folder();
        match request.kind {
            MakeBackup::KIND => {
                request.decode::<MakeBackup>()?;
                Reply::of::<MakeBackup>(&self.back_up().await?, Bytes::new())
            }
            _ => answer_about_backups(folder, request).await,
        }
    }

    /// Requests an inventory of a benefactor, once after a restore: it alone knows which chunks it has.
    pub(super) fn request_inventory(&self, key: PublicKey) {
        if self.quarantine() == Quarantine::Off || !lock(&self.shared.inventories).insert(key) {
            return;
        }
        let Some(connection) = self.shared.connections().get(&key).cloned() else { return };
        // A benefactor of an earlier version does not know the request, and sends the inventory in its own
        // time.
        tokio::spawn(async move { connection.request::<RequestInventory>(&(), Bytes::new()).await });
    }

    /// Makes a backup if the last one of any manager is older than the set time, or if there is none here.
    pub(super) async fn back_up_if_due(&self) -> Result<()> {
        let backups = &self.shared.backups;
        let pool = self.shared.meta.pool_id().await?;
        let has_one = backup::list(&backups.folder())?.iter().any(|(name, _)| name.pool == pool);
        let last = self.shared.meta.shared_number(SharedNumber::Backup).await?;
        let every = u64::try_from(backups.options.every.as_millis()).unwrap_or(u64::MAX);
        let age = u64::try_from(self.now()).unwrap_or(0).saturating_sub(last);
        if has_one && age < every {
            return Ok(());
        }
        let report = self.back_up().await?;
        for (place, why) in &report.failed {
            tracing::error!(place, why, "a place did not take the backup of the metadata");
        }
        tracing::info!(name = %report.name, bytes = report.bytes, benefactors = report.benefactors.len(), "backed up");
        Ok(())
    }

    /// Makes a backup of this moment and sends it to all places.
    pub async fn back_up(&self) -> Result<BackupReport> {
        let backups = &self.shared.backups;
        let _one = backups.running.lock().await;
        let name = BackupName {
            pool: self.shared.meta.pool_id().await?,
            made: u64::try_from(self.now()).unwrap_or(0),
        };
        let (data, keep) = (backups.data.clone(), backups.options.keep);
        let folder = blocking(move || backup::create_folder(&data)).await?;
        let written = self.write_backup(&folder, name).await;
        if written.is_err() {
            let _ = fs::remove_file(backup::unfinished(&folder, name));
        }
        written?;
        let place = folder.clone();
        let path = blocking(move || {
            let path = backup::finish(&place, name)?;
            backup::prune(&place, name.pool, keep.into())?;
            Ok(path)
        })
        .await?;
        self.shared.meta.set_shared_number(SharedNumber::Backup, name.made).await?;
        let bytes = fs::metadata(&path).map_err(io_error("read", &path))?.len();
        let mut report = BackupReport { name, bytes, benefactors: vec![], store: None, failed: vec![] };
        self.send_to_benefactors(&folder, &mut report).await?;
        if let Some(bucket) = backups.store.clone() {
            let place = bucket.place();
            match blocking(move || send_to_store(&bucket, &path, name, keep.into())).await {
                Ok(()) => report.store = Some(place),
                Err(error) => report.failed.push((place, Refusal::from(error).text)),
            }
        }
        Ok(report)
    }

    async fn write_backup(&self, folder: &Path, name: BackupName) -> Result<()> {
        let path = backup::unfinished(folder, name);
        let failed = || io_error("write", &path);
        let file = File::create(&path).map_err(failed())?;
        let secret = self.shared.backups.options.secret.as_deref();
        let mut out = BackupWriter::new(BufWriter::new(file), secret).map_err(failed())?;
        let mut snapshot = self.shared.meta.snapshot().await?;
        let head = BackupRecord::Head { pool: name.pool, schema: snapshot.schema().await? };
        out.push(&head).map_err(failed())?;
        while let Some(part) = snapshot.next().await? {
            match part {
                SnapshotPart::Table { name, columns } => {
                    out.push(&BackupRecord::Table { name, columns }).map_err(failed())?;
                }
                SnapshotPart::Rows(rows) => {
                    for row in rows {
                        out.push(&BackupRecord::Row(row)).map_err(failed())?;
                    }
                }
            }
        }
        for name in FILES {
            let path = self.shared.backups.data.join(name);
            match fs::read(&path) {
                Err(error) if error.kind() == io::ErrorKind::NotFound => {}
                read => {
                    let content = read.map_err(io_error("read", &path))?;
                    let file = BackupRecord::File { name: name.to_owned(), content };
                    out.push(&file).map_err(failed())?;
                }
            }
        }
        out.finish().map_err(failed())?;
        Ok(())
    }

    /// Sends a backup to benefactors that are online, always the same ones while they are.
    async fn send_to_benefactors(&self, folder: &Path, report: &mut BackupReport) -> Result<()> {
        let now = self.now();
        for member in self.shared.meta.members().await? {
            if report.benefactors.len() >= BENEFACTORS {
                break;
            }
            if placement::BenefactorState::of(&member, now) != placement::BenefactorState::Online {
                continue;
            }
            match self.send_backup(&member, folder, report.name, report.bytes).await {
                Ok(()) => report.benefactors.push(member.name),
                Err(why) => report.failed.push((member.name, why)),
            }
        }
        Ok(())
    }

    async fn send_backup(
        &self,
        to: &BenefactorRow,
        folder: &Path,
        name: BackupName,
        length: u64,
    ) -> std::result::Result<(), String> {
        let connection = self.shared.connections().get(&to.key).cloned();
        let connection = connection.ok_or("it is connected to another manager")?;
        let keep = self.shared.backups.options.keep;
        for offset in (0..length).step_by(PIECE) {
            let folder = folder.to_owned();
            let piece = blocking(move || backup::read_piece(&folder, name, offset)).await;
            let (_, piece) = piece.map_err(|error| Refusal::from(error).text)?;
            let header = BackupPiece { name, offset, length, keep };
            let sent = connection.request::<PutBackup>(&header, piece.into());
            match tokio::time::timeout(PIECE_TIME, sent).await {
                Ok(Ok(_)) => {}
                Ok(Err(error)) => return Err(error.to_string()),
                Err(_) => return Err("it does not answer".to_owned()),
            }
        }
        Ok(())
    }
}

fn send_to_store(bucket: &Bucket, path: &Path, name: BackupName, keep: usize) -> Result<()> {
    bucket.put_file(&name.to_string(), path)?;
    let names: Vec<BackupName> = bucket.names()?.iter().filter_map(|name| name.parse().ok()).collect();
    for old in backup::surplus(&names, name.pool, keep) {
        bucket.delete(&old.to_string())?;
    }
    Ok(())
}

async fn blocking<T: Send + 'static>(work: impl FnOnce() -> Result<T> + Send + 'static) -> Result<T> {
    let done = spawn_blocking(work).await;
    done.unwrap_or_else(|_| Err(io_error("write", Path::new("a backup"))(io::ErrorKind::Other.into())))
}

/// Answers the calls about backups in a folder of a manager or benefactor.
pub(crate) async fn answer_about_backups(folder: PathBuf, request: Request) -> Answer {
    match request.kind {
        ListBackups::KIND => {
            request.decode::<ListBackups>()?;
            let listed = blocking(move || backup::list(&folder)).await?;
            Reply::of::<ListBackups>(&listed, Bytes::new())
        }
        ReadBackup::KIND => {
            let (name, offset) = request.decode::<ReadBackup>()?;
            let (length, piece) = blocking(move || backup::read_piece(&folder, name, offset)).await?;
            Reply::of::<ReadBackup>(&length, piece.into())
        }
        _ => Err(invalid("no call about backups")),
    }
}
