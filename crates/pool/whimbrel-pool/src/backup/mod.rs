//! Backups of a manager's metadata: their files, names and folders.
//!
//! A backup is one file (`format.rs`) with the rows of one snapshot of the database, and the lists of
//! admitted members and their roles. It has no key: a manager that lost its folder gets a new one. Names sort
//! by time, so the newest is the last. A file with the name of a backup is complete: it is written under
//! another name, synced and renamed.

pub(crate) mod format;

use crate::{client::Secret, meta::MetaError};
use serde::{Deserialize, Serialize};
use std::{
    fmt,
    fs::{self, File},
    io,
    path::{Path, PathBuf},
    str::FromStr,
};

/// Folder of backups in the folder of a manager or benefactor.
pub(crate) const FOLDER: &str = "backups";
/// Bytes of a backup in one call.
pub(crate) const PIECE: usize = 4 << 20;

/// Failure to make, read or restore a backup.
#[derive(Debug, thiserror::Error)]
pub enum BackupError {
    /// A file or folder failed.
    #[error("cannot {action} {}", path.display())]
    Io {
        /// The failed operation.
        action: &'static str,
        /// The file or folder.
        path: PathBuf,
        /// Cause reported by the kernel.
        source: io::Error,
    },
    /// The folder of the manager cannot be used.
    #[error(transparent)]
    Folder(#[from] whimbrel_wire::private_dir::PrivateDirError),
    /// The file is cut off, changed, or no backup.
    #[error("the backup is damaged: {what}; try an older one")]
    Damaged {
        /// Name of the damaged part.
        what: &'static str,
    },
    /// A newer version of the program made the backup.
    #[error("the backup was made by a newer version of Whimbrel; restore it with that version")]
    Newer,
    /// The backup is encrypted, and no secret or another one was given.
    #[error("the backup is encrypted with another secret; name the right file with `--backup-secret`")]
    Secret,
    /// There is no backup at the place.
    #[error("there is no backup in {place}")]
    None {
        /// The place that was searched.
        place: String,
    },
    /// The place has backups of several pools.
    #[error("{place} has backups of several pools; choose one with `--pool`: {pools}")]
    SeveralPools {
        /// The place that was searched.
        place: String,
        /// Numbers of the pools.
        pools: String,
    },
    /// The database has a pool already.
    #[error("the database is in use by a pool with {nodes} files and folders; move it away first")]
    InUse {
        /// Number of files and folders.
        nodes: u64,
    },
    /// The database failed.
    #[error("cannot read or write the metadata")]
    Meta(#[from] MetaError),
    /// The object store failed.
    #[error(transparent)]
    Store(#[from] crate::benefactor::TierError),
    /// A member that has the backup failed or cannot be reached.
    #[error("cannot read the backup of {member}: {text}")]
    Member {
        /// Address of the member.
        member: String,
        /// Cause, for people.
        text: String,
    },
}

/// Result of a work on backups.
pub type Result<T> = std::result::Result<T, BackupError>;

/// Maps an error of the kernel about a path.
pub(crate) fn io_error(action: &'static str, path: &Path) -> impl FnOnce(io::Error) -> BackupError {
    let path = path.to_owned();
    move |source| BackupError::Io { action, path, source }
}

/// Name of a backup: `POOL-TIME.backup`, with the number of the pool in 16 hexadecimal digits and the time of
/// the manager's clock in milliseconds in 16 decimal ones.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
pub struct BackupName {
    /// Number of the pool.
    pub pool: u64,
    /// Time at which it was made, in milliseconds since 1970.
    pub made: u64,
}

impl fmt::Display for BackupName {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:016x}-{:016}.backup", self.pool, self.made)
    }
}

/// Error for a text that is not the name of a backup.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("not the name of a backup")]
pub struct BackupNameError;

impl FromStr for BackupName {
    type Err = BackupNameError;

    fn from_str(text: &str) -> std::result::Result<Self, BackupNameError> {
        let digits = text.strip_suffix(".backup").and_then(|text| text.split_once('-'));
        let (pool, made) = digits.ok_or(BackupNameError)?;
        let read = |pool: &str, made: &str| {
            Some(Self { pool: u64::from_str_radix(pool, 16).ok()?, made: made.parse().ok()? })
        };
        // One text for each name.
        read(pool, made).filter(|name| name.to_string() == text).ok_or(BackupNameError)
    }
}

/// Names and lengths of the backups in a folder, oldest first; none if there is no folder.
pub(crate) fn list(folder: &Path) -> Result<Vec<(BackupName, u64)>> {
    let entries = match fs::read_dir(folder) {
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(Vec::new()),
        entries => entries.map_err(io_error("read", folder))?,
    };
    let mut found = Vec::new();
    for entry in entries {
        let entry = entry.map_err(io_error("read", folder))?;
        if let Some(name) = entry.file_name().to_str().and_then(|name| name.parse().ok()) {
            let length = entry.metadata().map_err(io_error("read", &entry.path()))?.len();
            found.push((name, length));
        }
    }
    found.sort_unstable();
    Ok(found)
}

/// The backups of a pool beyond the newest `keep`. The newest always stays.
pub(crate) fn surplus(names: &[BackupName], pool: u64, keep: usize) -> Vec<BackupName> {
    let mut of_pool: Vec<BackupName> = names.iter().copied().filter(|name| name.pool == pool).collect();
    of_pool.sort_unstable();
    of_pool.truncate(of_pool.len().saturating_sub(keep.max(1)));
    of_pool
}

/// Removes the backups of a pool in a folder beyond the newest `keep`.
pub(crate) fn prune(folder: &Path, pool: u64, keep: usize) -> Result<()> {
    let names: Vec<BackupName> = list(folder)?.into_iter().map(|(name, _)| name).collect();
    for name in surplus(&names, pool, keep) {
        let path = folder.join(name.to_string());
        fs::remove_file(&path).map_err(io_error("remove", &path))?;
    }
    Ok(())
}

/// Path under which a backup is written until it is complete.
pub(crate) fn unfinished(folder: &Path, name: BackupName) -> PathBuf {
    folder.join(format!(".{name}.part"))
}

/// Gives a complete file its name, durably.
pub(crate) fn finish(folder: &Path, name: BackupName) -> Result<PathBuf> {
    let (part, path) = (unfinished(folder, name), folder.join(name.to_string()));
    File::open(&part).and_then(|file| file.sync_all()).map_err(io_error("sync", &part))?;
    fs::rename(&part, &path).map_err(io_error("rename", &part))?;
    whimbrel_wire::atomic_file::sync_dir(folder).map_err(io_error("sync", folder))?;
    Ok(path)
}

/// Makes the folder of backups in a member's folder, readable by its owner only, and removes what an
/// interrupted backup left there.
pub(crate) fn create_folder(data: &Path) -> Result<PathBuf> {
    use std::os::unix::fs::DirBuilderExt;
    let folder = data.join(FOLDER);
    let made = fs::DirBuilder::new().mode(0o700).create(&folder);
    if !made.as_ref().is_err_and(|error| error.kind() == io::ErrorKind::AlreadyExists) {
        made.map_err(io_error("create", &folder))?;
        whimbrel_wire::atomic_file::sync_dir(data).map_err(io_error("sync", data))?;
    }
    Ok(folder)
}

/// The newest of these backups, of `pool` if one is named. Refuses to guess between pools.
pub(crate) fn newest(place: &str, names: &[BackupName], pool: Option<u64>) -> Result<BackupName> {
    let of_pool: Vec<&BackupName> =
        names.iter().filter(|name| pool.is_none_or(|pool| pool == name.pool)).collect();
    let mut pools: Vec<u64> = of_pool.iter().map(|name| name.pool).collect();
    pools.sort_unstable();
    pools.dedup();
    if pools.len() > 1 {
        let pools: Vec<String> = pools.iter().map(|pool| format!("{pool:016x}")).collect();
        return Err(BackupError::SeveralPools { place: place.to_owned(), pools: pools.join(", ") });
    }
    let newest = of_pool.into_iter().max_by_key(|name| name.made);
    newest.copied().ok_or_else(|| BackupError::None { place: place.to_owned() })
}

/// Reads a whole backup and compares its digest; returns the number of its records.
pub fn verify(input: impl io::Read, secret: Option<&Secret>) -> Result<u64> {
    let (mut reader, mut records) = (format::BackupReader::new(input, secret)?, 0);
    while reader.next()?.is_some() {
        records += 1;
    }
    Ok(records)
}

/// A piece of a backup in a folder from an offset on, and the length of the whole.
pub(crate) fn read_piece(folder: &Path, name: BackupName, offset: u64) -> Result<(u64, Vec<u8>)> {
    use std::os::unix::fs::FileExt;
    let path = folder.join(name.to_string());
    let read = || {
        let file = File::open(&path)?;
        let length = file.metadata()?.len();
        let mut piece = vec![0; length.saturating_sub(offset).min(PIECE as u64) as usize];
        file.read_exact_at(&mut piece, offset)?;
        Ok((length, piece))
    };
    read().map_err(io_error("read", &path))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_name_comes_back_and_sorts_by_time_and_no_other_text_is_one() {
        let name = |pool, made| BackupName { pool, made };
        for one in [name(7, 1_764_000_000_000), name(u64::MAX, 9_999_999_999_999_999)] {
            assert_eq!(one.to_string().parse(), Ok(one));
        }
        assert!(name(7, 9).to_string() < name(7, 10).to_string());
        let text = name(7, 8).to_string();
        for bad in [format!("../{text}"), text.replace("0007-", "7-"), text.replace(".backup", ".part")] {
            assert!(bad.parse::<BackupName>().is_err(), "{bad}");
        }
    }

    #[test]
    fn the_newest_stay_and_no_backup_of_another_pool_goes() {
        let names: Vec<BackupName> = (1..=5).map(|made| BackupName { pool: 1 + made % 2, made }).collect();
        let made = |names: Vec<BackupName>| names.iter().map(|name| name.made).collect::<Vec<_>>();
        assert_eq!(made(surplus(&names, 2, 1)), [1, 3]);
        assert_eq!(made(surplus(&names, 2, 0)), [1, 3], "the newest stays");
        assert_eq!(newest("x", &names, Some(1)).unwrap().made, 4);
        assert!(matches!(newest("x", &names, None), Err(BackupError::SeveralPools { .. })));
        assert!(matches!(newest("x", &names, Some(9)), Err(BackupError::None { .. })));
    }
}
