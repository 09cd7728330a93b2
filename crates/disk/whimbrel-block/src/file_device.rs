//! File device: a raw image file or a block device of the host.
//!
//! The size is the file's length rounded up to complete pages; bytes past the end of the file read as zeros
//! and are allocated when they are written. Invariant: a write is acknowledged when the kernel has it (it
//! survives this process), a flush when `fdatasync` returned (it survives a power failure). Holes are exactly
//! those that `SEEK_DATA` and `SEEK_HOLE` report. After a failed write or sync the device is latched.

use crate::device::push_extent;
use crate::{BlockError, Device, Extent, ExtentKind, group_commit::GroupCommit, latch::Latch};
use rustix::fs::{FallocateFlags, SeekFrom, fallocate, fdatasync, seek};
use rustix::io::{Errno, ReadWriteFlags, pread, preadv2, pwritev, retry_on_intr};
use std::fs::{File, OpenOptions};
use std::io::{self, IoSlice, IoSliceMut, Seek};
use std::path::Path;
use std::sync::atomic::{AtomicBool, Ordering::Relaxed};
use whimbrel_core::PAGE_SIZE;

/// Zeros to write where a file system cannot zero a range.
static ZEROS: [u8; 256 << 10] = [0; 256 << 10];

/// File as a block device.
#[derive(Debug)]
pub struct FileDevice {
    file: File,
    size: u64,
    read_only: bool,
    latch: Latch,
    flushes: GroupCommit,
    /// Whether the file system does not support non-blocking reads.
    no_nowait: AtomicBool,
}

impl FileDevice {
    /// Opens `path` for reading only.
    pub fn open_read_only(path: &Path) -> io::Result<Self> {
        Self::new(File::open(path)?, true)
    }

    /// Opens `path` for reading and writing.
    pub fn open(path: &Path) -> io::Result<Self> {
        Self::new(OpenOptions::new().read(true).write(true).open(path)?, false)
    }

    /// Device over an open file.
    pub fn new(mut file: File, read_only: bool) -> io::Result<Self> {
        // `seek` instead of `metadata`, because it also gives the size of block devices.
        let size = file.seek(io::SeekFrom::End(0))?.next_multiple_of(PAGE_SIZE as u64);
        let (latch, flushes) = (Latch::default(), GroupCommit::new());
        Ok(Self { file, size, read_only, latch, flushes, no_nowait: AtomicBool::new(false) })
    }

    pub(crate) fn file(&self) -> &File {
        &self.file
    }

    pub(crate) fn latch(&self) -> &Latch {
        &self.latch
    }

    fn check_write(&self, offset: u64, len: u64) -> Result<(), BlockError> {
        if self.read_only {
            return Err(BlockError::ReadOnly);
        }
        BlockError::check(offset, len, self.size)?;
        self.latch.check()
    }

    /// Writes the parts one after the other, from `offset` on.
    pub(crate) fn write_parts(&self, offset: u64, parts: &mut [IoSlice<'_>]) -> Result<(), BlockError> {
        let len = parts.iter().map(|part| part.len() as u64).sum();
        self.check_write(offset, len)?;
        let outcome = self.latch.write(offset, self.pwrite_all(offset, parts));
        self.flushes.count_write();
        outcome
    }

    fn pwrite_all(&self, mut offset: u64, mut parts: &mut [IoSlice<'_>]) -> io::Result<()> {
        IoSlice::advance_slices(&mut parts, 0);
        while !parts.is_empty() {
            match pwritev(&self.file, parts, offset) {
                Ok(0) => return Err(io::ErrorKind::WriteZero.into()),
                Ok(count) => {
                    offset += count as u64;
                    IoSlice::advance_slices(&mut parts, count);
                }
                Err(Errno::INTR) => {}
                Err(errno) => return Err(errno.into()),
            }
        }
        Ok(())
    }

    /// Zeroes the range with the first of `ways` that the file system supports, otherwise by writing zeros.
    fn zero_by(&self, ways: &[FallocateFlags], offset: u64, len: u64) -> Result<(), BlockError> {
        self.check_write(offset, len)?;
        if len == 0 {
            return Ok(());
        }
        let mut outcome = Err(Errno::OPNOTSUPP);
        for way in ways {
            outcome = retry_on_intr(|| fallocate(&self.file, *way | FallocateFlags::KEEP_SIZE, offset, len));
            if outcome != Err(Errno::OPNOTSUPP) {
                break;
            }
        }
        let outcome = match outcome {
            Err(Errno::OPNOTSUPP) => self.write_zero_bytes(offset, len),
            other => other.map_err(io::Error::from),
        };
        let outcome = self.latch.write(offset, outcome);
        self.flushes.count_write();
        outcome
    }

    fn write_zero_bytes(&self, offset: u64, len: u64) -> io::Result<()> {
        (0..len).step_by(ZEROS.len()).try_for_each(|at| {
            let piece = &ZEROS[..(len - at).min(ZEROS.len() as u64) as usize];
            self.pwrite_all(offset + at, &mut [IoSlice::new(piece)])
        })
    }

    /// End of the extent that begins at `offset`, and whether it is data.
    fn extent_at(&self, offset: u64) -> io::Result<(u64, bool)> {
        match seek(&self.file, SeekFrom::Data(offset)) {
            Ok(data) if data > offset => Ok((data, false)),
            Ok(_) => Ok((seek(&self.file, SeekFrom::Hole(offset))?, true)),
            Err(Errno::NXIO) => Ok((self.size, false)),
            // A file without support for holes is all data.
            Err(Errno::INVAL) => Ok((self.size, true)),
            Err(errno) => Err(errno.into()),
        }
    }
}

impl Device for FileDevice {
    fn size(&self) -> u64 {
        self.size
    }

    fn is_read_only(&self) -> bool {
        self.read_only
    }

    fn read_at(&self, offset: u64, out: &mut [u8]) -> Result<(), BlockError> {
        BlockError::check(offset, out.len() as u64, self.size)?;
        let mut filled = 0;
        while filled < out.len() {
            match pread(&self.file, &mut out[filled..], offset + filled as u64) {
                Ok(0) => {
                    out[filled..].fill(0);
                    break;
                }
                Ok(count) => filled += count,
                Err(Errno::INTR) => {}
                Err(errno) => return Err(BlockError::io("read", offset, errno)),
            }
        }
        Ok(())
    }

    fn try_read_at(&self, offset: u64, out: &mut [u8]) -> Result<bool, BlockError> {
        if self.no_nowait.load(Relaxed) {
            return self.read_at(offset, out).map(|()| true);
        }
        BlockError::check(offset, out.len() as u64, self.size)?;
        let wanted = out.len();
        match preadv2(&self.file, &mut [IoSliceMut::new(out)], offset, ReadWriteFlags::NOWAIT) {
            Ok(count) => Ok(count == wanted),
            Err(Errno::OPNOTSUPP) => {
                self.no_nowait.store(true, Relaxed);
                self.read_at(offset, out).map(|()| true)
            }
            // Not cached, interrupted, or an error: the blocking read finds out which.
            Err(_) => Ok(false),
        }
    }

    fn write_at(&self, offset: u64, data: &[u8]) -> Result<(), BlockError> {
        self.write_parts(offset, &mut [IoSlice::new(data)])
    }

    /// Leaves the range allocated, so that a later write there cannot run out of space.
    fn write_zeroes(&self, offset: u64, len: u64) -> Result<(), BlockError> {
        self.zero_by(&[FallocateFlags::ZERO_RANGE, FallocateFlags::PUNCH_HOLE], offset, len)
    }

    /// Frees the range in the file system; it reads as zeros afterwards.
    fn trim(&self, offset: u64, len: u64) -> Result<(), BlockError> {
        self.zero_by(&[FallocateFlags::PUNCH_HOLE], offset, len)
    }

    fn flush(&self) -> Result<(), BlockError> {
        if self.read_only {
            return Ok(());
        }
        self.flushes.flush(&self.latch, || self.latch.sync(fdatasync(&self.file).map_err(io::Error::from)))
    }

    fn extents(&self, offset: u64, len: u64) -> Result<Vec<Extent>, BlockError> {
        BlockError::check(offset, len, self.size)?;
        let (mut list, mut at, end) = (Vec::new(), offset, offset + len);
        while at < end {
            let (until, data) = self.extent_at(at).map_err(|e| BlockError::io("map", at, e))?;
            // The end of the file is the end of its last data; a concurrent truncation must not stall the
            // walk.
            let until = if until > at { until.min(end) } else { end };
            let kind = if data { ExtentKind::Data } else { ExtentKind::Hole };
            push_extent(&mut list, Extent { len: until - at, kind });
            at = until;
        }
        Ok(list)
    }
}
