//! Server copies: copies between files that the server makes, so that content need not be fetched and sent
//! back.
//!
//! Both files are written back first. Under write-back the copy is on the server's disk before the call
//! returns, as clean content here must be. A small range that is here already is copied here, which costs the
//! program no round trip. A failed copy leaves the range as far as the server came; the attributes of both
//! files are then requested.

use crate::client::{
    connection::server_connection::CallFailure,
    policy::Policy,
    session::{Core, errno_of},
};
use crate::{
    cache::{FileId, FileRecord},
    proto::{Attr, Copied, Copy, CopyCall, FileRef, Ident, Version, code},
};
use std::time::Instant;
use whimbrel_core::lock;
use whimbrel_fuse::{Errno, Result};
use whimbrel_wire::Code;

/// A shorter range is left to the kernel's reads and writes.
const MIN_COPY: u64 = 64 << 10;
/// A longer range is copied by the server even if it is here, because it would have to be sent.
const MAX_LOCAL_COPY: u64 = 8 << 20;
/// Most bytes of one request; the server may copy fewer.
const MAX_REQUEST: u64 = 64 << 20;

/// One end of a copy: inode and offset.
type End = (u64, u64);

impl Core {
    /// Copies on the server and returns the number of bytes; `ENOTSUP` where the kernel should read and write
    /// instead.
    pub(in crate::client) fn copy(&self, from: End, to: End, len: u64) -> Result<u32> {
        let (source, target) = (self.file_of(from.0)?, self.file_of(to.0)?);
        if !self.connection.is_up()
            || len < MIN_COPY
            || len < MAX_LOCAL_COPY && self.is_cached(source, from.1, len)
        {
            return Err(Errno::ENOTSUP);
        }
        let path = self.inodes().path(to.0).ok_or(Errno::ENOTSUP)?;
        let policy = self.policy_of(&path);
        if policy == Policy::None {
            return Err(Errno::EROFS);
        }
        let files = if source == target { vec![source] } else { vec![source, target] };
        self.with_flushed(files, |flushed| {
            // If the server refuses a write-back now, the kernel copies.
            flushed.map_err(|_| Errno::ENOTSUP)?;
            self.copy_on_server((source, from), (target, to), len.min(MAX_REQUEST), policy == Policy::Back)
        })
    }

    fn is_cached(&self, file: FileId, offset: u64, len: u64) -> bool {
        let Some(record) = self.cache.file(file) else { return false };
        let (block, end) = (self.cache.block_size(), offset.saturating_add(len).min(record.size));
        (offset / block..end.div_ceil(block)).all(|block| self.cache.has_block(file, block, record.zero_from))
    }

    fn clean_file(&self, id: u64, file: FileId) -> Result<(FileRef, FileRecord)> {
        let path = self.inodes().path(id).ok_or(Errno::ENOTSUP)?;
        let record = self.cache.file(file).filter(|record| !record.dirty).ok_or(Errno::ENOTSUP)?;
        let ident: Ident = record.ident.ok_or(Errno::ENOTSUP)?;
        Ok((FileRef { path, ident }, record))
    }

    /// Asks the server to copy. No write-back runs meanwhile.
    fn copy_on_server(
        &self,
        (source, from): (FileId, End),
        (target, to): (FileId, End),
        len: u64,
        durable: bool,
    ) -> Result<u32> {
        let (from_ref, known) = self.clean_file(from.0, source)?;
        let (to_ref, record) = self.clean_file(to.0, target)?;
        let stamp = self.stamp();
        let expect = self.expect(target, &record, stamp)?;
        if durable {
            // The stamp by which this client's own change is recognised after a crash of this host.
            self.cache.sync().map_err(errno_of)?;
        } else {
            lock(&self.writeback.unsynced).file_sent(target, self.connection.restarts());
        }
        self.writeback.changed();
        let wanted = Copy {
            from: from_ref.clone(),
            from_mtime: known.base.mtime,
            from_offset: from.1,
            to: to_ref.clone(),
            offset: to.1,
            len,
            expect,
            stamp,
            durable,
        };
        let asked = Instant::now();
        match self.connection.call::<CopyCall, _>(wanted) {
            Ok((Copied { len: copied, attr }, _)) if copied <= len => {
                self.adopt_copy(to, target, attr, asked)?;
                Ok(copied as u32)
            }
            Ok(_) => Err(Errno::EIO),
            // An older server lacks `COPY`.
            Err(fail) if fail.is(Code::UNKNOWN_KIND) => Err(Errno::ENOSYS),
            Err(CallFailure::Unreachable) => Err(CallFailure::Unreachable.errno()),
            Err(fail) => {
                // The server may have copied a part, or have other content.
                self.refresh_attr(from.0, &from_ref);
                self.refresh_attr(to.0, &to_ref);
                // With reads and writes, the program finds out which of the two files changed.
                Err(if fail.is(code::STALE) { Errno::ENOTSUP } else { fail.errno() })
            }
        }
    }

    /// Requests the attributes of a file, and adopts them if the path still leads to it.
    fn refresh_attr(&self, id: u64, file: &FileRef) {
        let asked = Instant::now();
        match self.attr_at(&file.path) {
            Ok(Some(attr)) if attr.ident == file.ident => self.store_attr(id, attr, asked),
            _ => {}
        }
    }

    /// Adopts the attributes of a file after a server copy into it.
    fn adopt_copy(&self, (id, offset): End, file: FileId, attr: Attr, asked: Instant) -> Result<()> {
        self.inodes().reported(id, asked);
        self.adopt_written(id, attr, asked);
        if self.cache.file(file).is_none_or(|record| !record.dirty) {
            self.adopt_version(file, &attr);
            return Ok(());
        }
        // The file was written meanwhile, around the kernel's lock: that content stays, and overwrites the
        // copy later.
        self.cache.invalidate(file).map_err(errno_of)?;
        let noted = self.cache.update_file(file, |record| {
            let Version { size, mtime, ctime } = attr.version();
            record.base = Version { size, mtime, ctime };
            record.size = record.size.max(size);
            if record.zero_from >= offset {
                record.zero_from = record.zero_from.max(size);
            }
        });
        noted.map_err(errno_of)
    }
}
