//! Storage in memory, for sessions that keep nothing on this host's disk.
//!
//! It grows with what is written; the frames of the cache and the live records of the journal bound it.
//! Nothing survives the process, so its users may promise nothing before the server has it.

use super::storage::{DiskStorage, Storage, StoragePart};
use std::{
    io,
    sync::{PoisonError, RwLock},
};

/// Memory of this process, in place of a directory that stays locked and unchanged.
#[derive(Debug)]
pub struct MemoryStorage {
    parts: [RwLock<Vec<u8>>; 3],
    _instead_of: DiskStorage,
}

impl MemoryStorage {
    /// Empty memory; the directory stays locked.
    pub(crate) fn instead_of(folder: DiskStorage) -> Self {
        Self { parts: Default::default(), _instead_of: folder }
    }

    fn part(&self, part: StoragePart) -> &RwLock<Vec<u8>> {
        match part {
            StoragePart::Frames => &self.parts[0],
            StoragePart::Journal(which) => &self.parts[1 + usize::from(which)],
        }
    }
}

fn place(at: u64) -> io::Result<usize> {
    usize::try_from(at).map_err(|_| io::ErrorKind::InvalidInput.into())
}

impl Storage for MemoryStorage {
    fn read(&self, part: StoragePart, at: u64, out: &mut [u8]) -> io::Result<usize> {
        let bytes = self.part(part).read().unwrap_or_else(PoisonError::into_inner);
        let found = bytes.get(place(at)?..).unwrap_or_default();
        let len = found.len().min(out.len());
        out[..len].copy_from_slice(&found[..len]);
        Ok(len)
    }

    fn write(&self, part: StoragePart, at: u64, data: &[u8]) -> io::Result<()> {
        let mut bytes = self.part(part).write().unwrap_or_else(PoisonError::into_inner);
        let from = place(at)?;
        let end = from.checked_add(data.len()).ok_or(io::ErrorKind::InvalidInput)?;
        if bytes.len() < end {
            bytes.resize(end, 0);
        }
        bytes[from..end].copy_from_slice(data);
        Ok(())
    }

    fn sync(&self, _: StoragePart) -> io::Result<()> {
        Ok(())
    }

    fn truncate(&self, part: StoragePart, len: u64) -> io::Result<()> {
        let mut bytes = self.part(part).write().unwrap_or_else(PoisonError::into_inner);
        bytes.resize(place(len)?, 0);
        if len == 0 {
            // Release the memory of a journal that was restarted in the other part.
            *bytes = Vec::new();
        }
        Ok(())
    }

    fn len(&self, part: StoragePart) -> io::Result<u64> {
        Ok(self.part(part).read().unwrap_or_else(PoisonError::into_inner).len() as u64)
    }
}
