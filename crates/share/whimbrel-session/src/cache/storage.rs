//! Storage of a cache: room for frames, and two journals of which one is current.
//!
//! A trait, so that tests can simulate a power failure between any two operations.

use super::{cache_file::CacheFile, cache_key::CacheKey};
use crate::proto::ClientId;
use rustix::fs::{FlockOperation, flock};
use std::{
    fs::{self, File, OpenOptions},
    io::{self, Read as _, Seek as _},
    os::unix::fs::{DirBuilderExt, FileExt, OpenOptionsExt},
    path::Path,
};

/// Parts of a storage.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum StoragePart {
    /// Frames, one after the other.
    Frames,
    /// Either of the two journals.
    Journal(bool),
}

/// Files of a cache. Written data is visible to later reads, and durable after a sync of its part.
pub trait Storage: Send + Sync {
    /// Reads as much of `out` as there is from `at` on, and returns the number of bytes.
    fn read(&self, part: StoragePart, at: u64, out: &mut [u8]) -> io::Result<usize>;
    /// Stores all of `data` at `at`.
    fn write(&self, part: StoragePart, at: u64, data: &[u8]) -> io::Result<()>;
    /// Makes a part durable.
    fn sync(&self, part: StoragePart) -> io::Result<()>;
    /// Truncates a part.
    fn truncate(&self, part: StoragePart, len: u64) -> io::Result<()>;
    /// Length of a part in bytes.
    fn len(&self, part: StoragePart) -> io::Result<u64>;
    /// Bytes by which the parts may still grow.
    fn room(&self) -> u64 {
        u64::MAX
    }
}

/// Names of the files.
const NAMES: [&str; 3] = ["frames", "journal.0", "journal.1"];

/// A directory of the file system, locked while this exists.
#[derive(Debug)]
pub struct DiskStorage {
    frames: CacheFile,
    journals: [CacheFile; 2],
    /// Lock file; it contains the client's id.
    lock: File,
}

impl DiskStorage {
    /// Opens or creates the directory `dir`; nobody else may read it.
    ///
    /// # Errors `WouldBlock` if another process has locked it.
    pub fn open(dir: &Path) -> io::Result<Self> {
        fs::DirBuilder::new().recursive(true).mode(0o700).create(dir)?;
        let open = |name: &str| {
            let mut options = OpenOptions::new();
            options.read(true).write(true).create(true).truncate(false).mode(0o600).open(dir.join(name))
        };
        let lock = open("lock")?;
        flock(&lock, FlockOperation::NonBlockingLockExclusive)?;
        let plain = |name| open(name).map(|file| CacheFile::new(file, None));
        let [frames, first, second] = NAMES.map(plain);
        let folder = Self { frames: frames?, journals: [first?, second?], lock };
        // Directory entries must be as durable as their files.
        File::open(dir)?.sync_all()?;
        Ok(folder)
    }

    /// Whether nothing was stored here yet.
    pub(super) fn is_empty(&self) -> io::Result<bool> {
        let parts = [StoragePart::Frames, StoragePart::Journal(false), StoragePart::Journal(true)];
        parts.into_iter().try_fold(true, |empty, part| Ok(empty && self.len(part)? == 0))
    }

    /// Storage in the same files, which are encrypted with this key.
    pub(super) fn encrypted_with(mut self, key: &CacheKey) -> Self {
        let [first, second] = &mut self.journals;
        for (file, name) in [&mut self.frames, first, second].into_iter().zip(NAMES) {
            file.encrypt_with(key.cipher(name));
        }
        self
    }

    /// The id of the client with this cache, for every process that uses it.
    ///
    /// # Errors The lock file cannot be read or written.
    pub fn client(&self) -> io::Result<ClientId> {
        let mut bytes = Vec::new();
        (&self.lock).seek(io::SeekFrom::Start(0))?;
        (&self.lock).take(64).read_to_end(&mut bytes)?;
        if let Some(known) = ClientId::from_bytes(&bytes) {
            return Ok(known);
        }
        // A new cache, or its creator died here: no session was opened yet.
        let client = ClientId::random();
        self.lock.set_len(0)?;
        self.lock.write_all_at(client.as_bytes(), 0)?;
        self.lock.sync_all()?;
        Ok(client)
    }

    fn part(&self, part: StoragePart) -> &CacheFile {
        match part {
            StoragePart::Frames => &self.frames,
            StoragePart::Journal(number) => &self.journals[usize::from(number)],
        }
    }
}

impl Storage for DiskStorage {
    fn read(&self, part: StoragePart, at: u64, out: &mut [u8]) -> io::Result<usize> {
        self.part(part).read(at, out)
    }

    fn write(&self, part: StoragePart, at: u64, data: &[u8]) -> io::Result<()> {
        self.part(part).write(at, data)
    }

    fn sync(&self, part: StoragePart) -> io::Result<()> {
        self.part(part).file().sync_data()
    }

    fn truncate(&self, part: StoragePart, len: u64) -> io::Result<()> {
        self.part(part).file().set_len(len)
    }

    fn len(&self, part: StoragePart) -> io::Result<u64> {
        self.part(part).file().metadata().map(|found| found.len())
    }

    fn room(&self) -> u64 {
        rustix::fs::fstatvfs(self.frames.file())
            .map_or(u64::MAX, |found| found.f_bavail.saturating_mul(found.f_frsize))
    }
}
