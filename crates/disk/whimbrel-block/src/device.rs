//! The contract of a block device.

use std::io;

/// A block device: bytes at offsets, shared by any number of threads.
///
/// Ranges are checked by the callers at the edge (`whimbrel-nbd`); a device given a range past its end
/// answers [`BlockError::OutOfRange`] and changes nothing. A write is visible to every read that starts after
/// it returned, and durable when a later `flush` returned.
pub trait Device: Send + Sync {
    /// Size in bytes.
    fn size(&self) -> u64;

    /// Whether writes can succeed at all.
    fn is_read_only(&self) -> bool {
        false
    }

    /// Fills `out` from `offset`.
    fn read_at(&self, offset: u64, out: &mut [u8]) -> Result<(), BlockError>;

    /// Fills `out` from `offset` if that needs no waiting at all; `false` says it would, and leaves `out` as
    /// it may. A server answers such reads where they were received and gives the others a thread of their
    /// own.
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

    /// The content of the range is no longer needed; it may read as anything that was there before, or zeros.
    fn trim(&self, offset: u64, len: u64) -> Result<(), BlockError> {
        self.write_zeroes(offset, len)
    }

    /// Makes every write that returned before this call durable.
    fn flush(&self) -> Result<(), BlockError>;

    /// How the range is made up, from `offset` on; covers `len` bytes exactly, neighbours of one kind merged.
    fn extents(&self, offset: u64, len: u64) -> Result<Vec<Extent>, BlockError> {
        let _ = offset;
        Ok(vec![Extent { len, kind: ExtentKind::Data }])
    }

    /// Whether reading or writing the range may wait for something slow (a network). Such requests are given
    /// a thread of their own; the others are answered where they were received.
    fn may_wait(&self, offset: u64, len: u64) -> bool {
        let _ = (offset, len);
        false
    }
}

/// A stretch of one kind.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Extent {
    /// Length in bytes.
    pub len: u64,
    /// What it is made of.
    pub kind: ExtentKind,
}

/// What a stretch of a device is made of.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum ExtentKind {
    /// Allocated; may hold anything.
    Data,
    /// Allocated and known to read as zeros.
    Zero,
    /// Not allocated; reads as zeros.
    Hole,
}

/// Why a block operation failed.
#[derive(Debug, thiserror::Error)]
pub enum BlockError {
    /// The range does not lie in the device.
    #[error("bytes {offset}..+{len} are outside a device of {size} bytes")]
    OutOfRange {
        /// First byte asked for.
        offset: u64,
        /// Bytes asked for.
        len: u64,
        /// Size of the device.
        size: u64,
    },
    /// The device takes no writes.
    #[error("the device is read-only")]
    ReadOnly,
    /// A write or sync failed before; nothing written since is known to be safe, so nothing more is accepted.
    #[error("the device is latched after a failed {action}")]
    Latched {
        /// What failed: `write`, `sync`, …
        action: &'static str,
    },
    /// The device was closed while the request waited, or before.
    #[error("the device is closed")]
    Closed,
    /// The operating system refused.
    #[error("cannot {action} at byte {offset}")]
    Io {
        /// `read`, `write`, `sync`, …
        action: &'static str,
        /// Where.
        offset: u64,
        /// Why.
        #[source]
        source: io::Error,
    },
    /// The content could not be had from where it is kept.
    #[error("the content of bytes {offset}..+{len} cannot be had")]
    Content {
        /// First byte.
        offset: u64,
        /// Length.
        len: u64,
        /// Why.
        #[source]
        source: Box<dyn std::error::Error + Send + Sync>,
    },
}

impl BlockError {
    /// `Err(OutOfRange)` unless `offset .. offset + len` lies in a device of `size` bytes.
    pub fn check(offset: u64, len: u64, size: u64) -> Result<(), BlockError> {
        match offset.checked_add(len) {
            Some(end) if end <= size => Ok(()),
            _ => Err(BlockError::OutOfRange { offset, len, size }),
        }
    }

    /// The operating system's refusal of `action` at byte `offset`.
    pub fn io(action: &'static str, offset: u64, source: impl Into<io::Error>) -> Self {
        BlockError::Io { action, offset, source: source.into() }
    }
}

/// Adds `extent` to `list`, merged with the last one if they are of one kind; nothing for an empty one.
pub(crate) fn push_extent(list: &mut Vec<Extent>, extent: Extent) {
    match list.last_mut() {
        Some(last) if last.kind == extent.kind => last.len += extent.len,
        _ if extent.len == 0 => {}
        _ => list.push(extent),
    }
}
