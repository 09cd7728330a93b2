//! The contract of a block device, and its errors.

use std::io;

/// Block device: bytes at offsets, shared by any number of threads.
///
/// Callers at the edge (`whimbrel-nbd`) check ranges; for a range past its end a device returns
/// [`BlockError::OutOfRange`] and changes nothing. A write is visible to every read that starts after it
/// returned, and durable when a later `flush` returned.
pub trait Device: Send + Sync {
    /// Size in bytes.
    fn size(&self) -> u64;

    /// Whether all writes are rejected.
    fn is_read_only(&self) -> bool {
        false
    }

    /// Fills `out` from `offset`.
    fn read_at(&self, offset: u64, out: &mut [u8]) -> Result<(), BlockError>;

    /// Fills `out` from `offset` if that needs no waiting; otherwise returns false, and `out` is undefined. A
    /// server answers such reads in the receiving thread and passes others to a worker.
    fn try_read_at(&self, offset: u64, out: &mut [u8]) -> Result<bool, BlockError> {
        if self.may_wait(offset, out.len() as u64) {
            return Ok(false);
        }
        self.read_at(offset, out).map(|()| true)
    }

    /// Stores `data` at `offset`.
    fn write_at(&self, offset: u64, data: &[u8]) -> Result<(), BlockError>;

    /// Makes the range read as zeros.
    fn write_zeroes(&self, offset: u64, len: u64) -> Result<(), BlockError>;

    /// Discards the content of the range; afterwards it may read as anything that was there before, or zeros.
    fn trim(&self, offset: u64, len: u64) -> Result<(), BlockError> {
        self.write_zeroes(offset, len)
    }

    /// Makes every write that returned before this call durable.
    fn flush(&self) -> Result<(), BlockError>;

    /// Extents of the range, from `offset` on; they cover exactly `len` bytes, neighbours of one kind merged.
    fn extents(&self, offset: u64, len: u64) -> Result<Vec<Extent>, BlockError> {
        let _ = offset;
        Ok(vec![Extent { len, kind: ExtentKind::Data }])
    }

    /// Whether reading or writing the range may wait for something slow (a network). Workers handle such
    /// requests; others are answered in the receiving thread.
    fn may_wait(&self, offset: u64, len: u64) -> bool {
        let _ = (offset, len);
        false
    }
}

/// A block device whose content never changes through it: all writes are rejected.
pub trait ReadOnlyDevice: Send + Sync {
    /// Size in bytes.
    fn size(&self) -> u64;

    /// Fills `out` from `offset`.
    fn read_at(&self, offset: u64, out: &mut [u8]) -> Result<(), BlockError>;

    /// Fills `out` if that needs no waiting, as in [`Device::try_read_at`].
    fn try_read_at(&self, offset: u64, out: &mut [u8]) -> Result<bool, BlockError> {
        if self.may_wait(offset, out.len() as u64) {
            return Ok(false);
        }
        self.read_at(offset, out).map(|()| true)
    }

    /// Extents of the range, as in [`Device::extents`].
    fn extents(&self, offset: u64, len: u64) -> Result<Vec<Extent>, BlockError> {
        let _ = offset;
        Ok(vec![Extent { len, kind: ExtentKind::Data }])
    }

    /// Whether reading the range may wait, as in [`Device::may_wait`].
    fn may_wait(&self, offset: u64, len: u64) -> bool {
        let _ = (offset, len);
        false
    }
}

impl<T: ReadOnlyDevice> Device for T {
    fn size(&self) -> u64 {
        ReadOnlyDevice::size(self)
    }

    fn is_read_only(&self) -> bool {
        true
    }

    fn read_at(&self, offset: u64, out: &mut [u8]) -> Result<(), BlockError> {
        ReadOnlyDevice::read_at(self, offset, out)
    }

    fn try_read_at(&self, offset: u64, out: &mut [u8]) -> Result<bool, BlockError> {
        ReadOnlyDevice::try_read_at(self, offset, out)
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
        ReadOnlyDevice::extents(self, offset, len)
    }

    fn may_wait(&self, offset: u64, len: u64) -> bool {
        ReadOnlyDevice::may_wait(self, offset, len)
    }
}

/// Range of one kind.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Extent {
    /// Length in bytes.
    pub len: u64,
    /// Kind of the range.
    pub kind: ExtentKind,
}

/// Kind of a range of a device.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum ExtentKind {
    /// Allocated bytes with any content.
    Data,
    /// Allocated bytes known to read as zeros.
    Zero,
    /// Bytes without allocation, which read as zeros.
    Hole,
}

/// Cause of a failed block operation.
#[derive(Debug, thiserror::Error)]
pub enum BlockError {
    /// The range is not within the device.
    #[error("bytes {offset}..+{len} are outside a device of {size} bytes")]
    OutOfRange {
        /// First byte of the range.
        offset: u64,
        /// Length of the range.
        len: u64,
        /// Size of the device.
        size: u64,
    },
    /// The device is read-only.
    #[error("the device is read-only")]
    ReadOnly,
    /// A write or sync failed before. Writes since then may be lost, so all further ones are rejected.
    #[error("the device is latched after a failed {action}")]
    Latched {
        /// Action that failed: `write`, `sync`, …
        action: &'static str,
    },
    /// The device was closed before the request, or while it waited.
    #[error("the device is closed")]
    Closed,
    /// The operating system returned an error.
    #[error("cannot {action} at byte {offset}")]
    Io {
        /// Verb of the operation: `read`, `write`, `sync`, …
        action: &'static str,
        /// Offset in bytes.
        offset: u64,
        /// Cause reported by the kernel.
        source: io::Error,
    },
    /// The content could not be obtained from its source.
    #[error("the content of bytes {offset}..+{len} is unavailable")]
    Content {
        /// First byte of the range.
        offset: u64,
        /// Length of the range.
        len: u64,
        /// Cause reported by the source.
        source: Box<dyn std::error::Error + Send + Sync>,
    },
}

impl BlockError {
    /// Returns `OutOfRange` unless `offset .. offset + len` is within a device of `size` bytes.
    pub fn check(offset: u64, len: u64, size: u64) -> Result<(), BlockError> {
        match offset.checked_add(len) {
            Some(end) if end <= size => Ok(()),
            _ => Err(BlockError::OutOfRange { offset, len, size }),
        }
    }

    /// Error of the operating system for `action` at byte `offset`.
    pub fn io(action: &'static str, offset: u64, source: impl Into<io::Error>) -> Self {
        BlockError::Io { action, offset, source: source.into() }
    }
}

/// Appends `extent` to `list`, merged with the last one if both are of one kind; ignores an empty one.
pub(crate) fn push_extent(list: &mut Vec<Extent>, extent: Extent) {
    match list.last_mut() {
        Some(last) if last.kind == extent.kind => last.len += extent.len,
        _ if extent.len == 0 => {}
        _ => list.push(extent),
    }
}
