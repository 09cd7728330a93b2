//! Where a cache lies: room for frames, and two journals of which one is current.
//!
//! A trait, so that tests can take the power away between any two operations.

use crate::proto::ClientId;
use rustix::fs::{FlockOperation, flock};
use std::{
    fs::{self, File, OpenOptions},
    io::{self, Read as _, Seek as _},
    os::unix::fs::{DirBuilderExt, FileExt, OpenOptionsExt},
    path::Path,
};

/// A part of a medium.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum StoragePart {
    /// Frames, one after the other.
    Frames,
    /// One of the two journals.
    Journal(bool),
}

/// Files of fixed purpose. What was written is there for later reads; it is durable after a sync of its part.
pub trait Storage: Send + Sync {
    /// Fills as much of `out` as there is from `at` on, and says how much that was.
    fn read(&self, part: StoragePart, at: u64, out: &mut [u8]) -> io::Result<usize>;
    /// Stores all of `data` at `at`.
    fn write(&self, part: StoragePart, at: u64, data: &[u8]) -> io::Result<()>;
    /// Makes a part durable.
    fn sync(&self, part: StoragePart) -> io::Result<()>;
    /// Cuts a part.
    fn truncate(&self, part: StoragePart, len: u64) -> io::Result<()>;
    /// Bytes of a part.
    fn len(&self, part: StoragePart) -> io::Result<u64>;
}

/// A folder of the file system, locked for as long as this lives.
#[derive(Debug)]
pub struct DiskStorage {
    frames: File,
    journals: [File; 2],
    /// Locked; in it is what the client is known by.
    lock: File,
}

impl DiskStorage {
    /// The folder `dir`, made if it is not there; nobody else may read it.
    ///
    /// # Errors
    /// `WouldBlock` if another process has it.
    pub fn open(dir: &Path) -> io::Result<Self> {
        fs::DirBuilder::new().recursive(true).mode(0o700).create(dir)?;
        let open = |name: &str| {
            let mut options = OpenOptions::new();
            options.read(true).write(true).create(true).truncate(false).mode(0o600).open(dir.join(name))
        };
        let lock = open("lock")?;
        flock(&lock, FlockOperation::NonBlockingLockExclusive)?;
        let folder =
            Self { frames: open("frames")?, journals: [open("journal.0")?, open("journal.1")?], lock };
        // The names must last as long as what is in them.
        File::open(dir)?.sync_all()?;
        Ok(folder)
    }

    /// What the client of this cache is known by, whichever process it is.
    ///
    /// # Errors
    /// The file that says so cannot be read, or made.
    pub fn client(&self) -> io::Result<ClientId> {
        let mut bytes = Vec::new();
        (&self.lock).seek(io::SeekFrom::Start(0))?;
        (&self.lock).take(64).read_to_end(&mut bytes)?;
        if let Some(known) = ClientId::from_bytes(&bytes) {
            return Ok(known);
        }
        // A new cache, or one whose maker died here: it has not opened a session yet.
        let client = ClientId::random();
        self.lock.set_len(0)?;
        self.lock.write_all_at(client.as_bytes(), 0)?;
        self.lock.sync_all()?;
        Ok(client)
    }

    fn part(&self, part: StoragePart) -> &File {
        match part {
            StoragePart::Frames => &self.frames,
            StoragePart::Journal(number) => &self.journals[usize::from(number)],
        }
    }
}

impl Storage for DiskStorage {
    fn read(&self, part: StoragePart, at: u64, out: &mut [u8]) -> io::Result<usize> {
        let mut got = 0;
        while got < out.len() {
            match self.part(part).read_at(&mut out[got..], at + got as u64) {
                Ok(0) => break,
                Ok(more) => got += more,
                Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
                Err(error) => return Err(error),
            }
        }
        Ok(got)
    }

    fn write(&self, part: StoragePart, at: u64, data: &[u8]) -> io::Result<()> {
        self.part(part).write_all_at(data, at)
    }

    fn sync(&self, part: StoragePart) -> io::Result<()> {
        self.part(part).sync_data()
    }

    fn truncate(&self, part: StoragePart, len: u64) -> io::Result<()> {
        self.part(part).set_len(len)
    }

    fn len(&self, part: StoragePart) -> io::Result<u64> {
        self.part(part).metadata().map(|found| found.len())
    }
}
