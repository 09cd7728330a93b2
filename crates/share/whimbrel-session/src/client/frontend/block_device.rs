//! One file of a session as a block device, for virtual machine monitors that prefer a device to a file.
//!
//! It behaves like the file in a program that keeps it open: same cache, policy and read-ahead, and a flush
//! is an `fsync`. Its size is fixed at opening. If the file is truncated later, reads beyond its end fail
//! with `EIO`. If it was put aside because of a conflict, the next flush fails with `ESTALE`.

use crate::client::{content::file_content::FileHandle, session::Core};
use crate::{cache::CacheRead, proto::RelPath};
use rustix::fs::OFlags;
use std::{io, sync::Arc, sync::atomic::Ordering};
use whimbrel_block::{BlockError, Device};
use whimbrel_fuse::{Access, Errno, Result};

/// Unit for writing zeros and for long reads.
const CHUNK: usize = 1 << 20;

/// A file of a session, opened as a block device.
pub(in crate::client) struct FileDisk {
    core: Arc<Core>,
    id: u64,
    handle: FileHandle,
    size: u64,
    read_only: bool,
}

fn failed(action: &'static str, offset: u64) -> impl FnOnce(Errno) -> BlockError {
    move |errno| BlockError::io(action, offset, io::Error::from_raw_os_error(errno.number()))
}

impl FileDisk {
    /// Opens the file at `path`; read-only if its policy forbids writes.
    pub(in crate::client) fn open(core: &Arc<Core>, path: &RelPath) -> Result<Self> {
        let held = core.hold_names();
        let id = core.resolve(&held, path)?;
        let open = |flags: OFlags| core.open(id, Access { flags: flags.bits().cast_signed() });
        let (read_only, (_, handle)) = match open(OFlags::RDWR) {
            Err(Errno::EROFS) => (true, open(OFlags::RDONLY)?),
            opened => (false, opened?),
        };
        let mut disk = Self { core: core.clone(), id, handle, size: 0, read_only };
        let file = core.file_of(id)?;
        disk.size = core.cache.file(file).ok_or(Errno::ESTALE)?.size;
        Ok(disk)
    }

    /// Closes the file; sends its content if its policy requires that on close.
    pub(in crate::client) fn close(&self) -> Result<()> {
        self.core.close(self.id)
    }

    /// Reads from the cache if all of it is there.
    fn read_cached(&self, offset: u64, out: &mut [u8]) -> Result<bool> {
        let file = self.core.file_of(self.id)?;
        let size = self.core.cache.file(file).ok_or(Errno::ESTALE)?.size;
        let end = offset + out.len() as u64;
        if end > size
            || self.core.cache.read(file, offset, out).map_err(crate::client::session::errno_of)?
                != CacheRead::Complete
        {
            return Ok(false);
        }
        self.core.reads.iter().for_each(|count| _ = count.fetch_add(1, Ordering::Relaxed));
        self.core.read_ahead(self.id, file, size, Some(&self.handle), (offset, out.len() as u64));
        Ok(true)
    }

    fn write(&self, offset: u64, data: &[u8]) -> Result<()> {
        self.core.write(self.id, offset, data)?;
        if let Some(node) = self.core.inodes().get_mut(self.id) {
            // The kernel's page cache is outdated: the next open must not use it.
            node.epoch = None;
        }
        Ok(())
    }
}

impl Drop for FileDisk {
    fn drop(&mut self) {
        // What cannot be removed now is removed when the session ends.
        let _ = self.core.released(self.id);
    }
}

impl Device for FileDisk {
    fn size(&self) -> u64 {
        self.size
    }

    fn is_read_only(&self) -> bool {
        self.read_only
    }

    fn read_at(&self, offset: u64, out: &mut [u8]) -> std::result::Result<(), BlockError> {
        BlockError::check(offset, out.len() as u64, self.size)?;
        let mut at = offset;
        for piece in out.chunks_mut(CHUNK) {
            let read = self.core.read(self.id, Some(&self.handle), at, piece.len() as u32);
            let read = read.map_err(failed("read", at))?;
            if read.len() != piece.len() {
                return Err(failed("read", at)(Errno::EIO));
            }
            piece.copy_from_slice(&read);
            at += piece.len() as u64;
        }
        Ok(())
    }

    fn try_read_at(&self, offset: u64, out: &mut [u8]) -> std::result::Result<bool, BlockError> {
        BlockError::check(offset, out.len() as u64, self.size)?;
        self.read_cached(offset, out).map_err(failed("read", offset))
    }

    fn write_at(&self, offset: u64, data: &[u8]) -> std::result::Result<(), BlockError> {
        BlockError::check(offset, data.len() as u64, self.size)?;
        self.write(offset, data).map_err(failed("write", offset))
    }

    fn write_zeroes(&self, offset: u64, len: u64) -> std::result::Result<(), BlockError> {
        BlockError::check(offset, len, self.size)?;
        // Pages of zeros take no room in the cache and are not sent.
        let zeros = vec![0; CHUNK.min(len as usize)];
        let mut at = offset;
        while at < offset + len {
            // Up to the next boundary, so that only the ends are partial pages.
            let piece = (CHUNK as u64 - at % CHUNK as u64).min(offset + len - at);
            self.write(at, &zeros[..piece as usize]).map_err(failed("clear", at))?;
            at += piece;
        }
        Ok(())
    }

    fn flush(&self) -> std::result::Result<(), BlockError> {
        self.core.fsync(self.id).map_err(failed("sync", 0))
    }

    /// Always true: a read may ask the server, a write may wait for a free frame.
    fn may_wait(&self, _: u64, _: u64) -> bool {
        true
    }
}
