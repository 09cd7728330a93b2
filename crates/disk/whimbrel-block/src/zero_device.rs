//! Zero device: all zeros, the base of an empty disk.

use crate::{BlockError, Extent, ExtentKind};

/// Read-only device of zeros without memory.
#[derive(Debug, Clone, Copy)]
pub struct ZeroDevice {
    /// Size in bytes.
    pub size: u64,
}

impl crate::ReadOnlyDevice for ZeroDevice {
    fn size(&self) -> u64 {
        self.size
    }

    fn read_at(&self, offset: u64, out: &mut [u8]) -> Result<(), BlockError> {
        BlockError::check(offset, out.len() as u64, self.size)?;
        out.fill(0);
        Ok(())
    }

    fn extents(&self, offset: u64, len: u64) -> Result<Vec<Extent>, BlockError> {
        BlockError::check(offset, len, self.size)?;
        Ok(vec![Extent { len, kind: ExtentKind::Hole }])
    }
}
