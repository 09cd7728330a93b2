//! Zero device: all zeros, the base of an empty disk.

use crate::{BlockError, Device, Extent, ExtentKind};

/// Read-only device of zeros without memory.
#[derive(Debug, Clone, Copy)]
pub struct ZeroDevice {
    /// Size in bytes.
    pub size: u64,
}

impl Device for ZeroDevice {
    fn size(&self) -> u64 {
        self.size
    }

    fn is_read_only(&self) -> bool {
        true
    }

    fn read_at(&self, offset: u64, out: &mut [u8]) -> Result<(), BlockError> {
        BlockError::check(offset, out.len() as u64, self.size)?;
        out.fill(0);
        Ok(())
    }

    fn write_at(&self, _: u64, _: &[u8]) -> Result<(), BlockError> {
        Err(BlockError::ReadOnly)
    }

    fn write_zeroes(&self, _: u64, _: u64) -> Result<(), BlockError> {
        Err(BlockError::ReadOnly)
    }

    fn flush(&self) -> Result<(), BlockError> {
        Ok(())
    }

    fn extents(&self, offset: u64, len: u64) -> Result<Vec<Extent>, BlockError> {
        BlockError::check(offset, len, self.size)?;
        Ok(vec![Extent { len, kind: ExtentKind::Hole }])
    }
}
