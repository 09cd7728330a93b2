//! Memory device: small disks in tests, scratch disks. Nothing outlives the process.

use crate::{BlockError, Device};
use std::sync::{PoisonError, RwLock};

/// Block device in memory.
#[derive(Debug)]
pub struct MemDevice {
    bytes: RwLock<Vec<u8>>,
    size: u64,
}

impl MemDevice {
    /// Creates a device with this content.
    pub fn new(bytes: Vec<u8>) -> Self {
        Self { size: bytes.len() as u64, bytes: RwLock::new(bytes) }
    }

    fn edit(&self, offset: u64, len: u64, apply: impl FnOnce(&mut [u8])) -> Result<(), BlockError> {
        BlockError::check(offset, len, self.size)?;
        let mut bytes = self.bytes.write().unwrap_or_else(PoisonError::into_inner);
        apply(&mut bytes[offset as usize..(offset + len) as usize]);
        Ok(())
    }
}

impl Device for MemDevice {
    fn size(&self) -> u64 {
        self.size
    }

    fn read_at(&self, offset: u64, out: &mut [u8]) -> Result<(), BlockError> {
        BlockError::check(offset, out.len() as u64, self.size)?;
        let bytes = self.bytes.read().unwrap_or_else(PoisonError::into_inner);
        out.copy_from_slice(&bytes[offset as usize..offset as usize + out.len()]);
        Ok(())
    }

    fn write_at(&self, offset: u64, data: &[u8]) -> Result<(), BlockError> {
        self.edit(offset, data.len() as u64, |bytes| bytes.copy_from_slice(data))
    }

    fn write_zeroes(&self, offset: u64, len: u64) -> Result<(), BlockError> {
        self.edit(offset, len, |bytes| bytes.fill(0))
    }

    fn flush(&self) -> Result<(), BlockError> {
        Ok(())
    }
}
