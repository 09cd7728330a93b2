//! Copies from file to file that the server makes, so that content does not come here to be sent back.
//!
//! Both files are written back first. Under write-back the copy is on the server's disk before the program
//! hears of it, as all that is clean here. What lies here already and is little is copied here, which costs
//! the program no round trip. A copy that fails leaves the file's stretch as far as the server came; the
//! server is asked what both are then.

use super::{
    policy::Policy,
    server_connection::CallFailure,
    session::{Core, errno_of},
};
use crate::{
    cache::{FileId, FileRecord},
    proto::{Attr, Copied, Copy, CopyCall, FileRef, Ident, Version, code},
};
use std::time::Instant;
use whimbrel_fuse::{Errno, Result};
use whimbrel_wire::Code;

/// Less is read and written by the kernel.
const LITTLE: u64 = 64 << 10;
/// More is copied by the server though it is here: it would have to be sent.
const MUCH: u64 = 8 << 20;
/// Of one request to the server, which may copy less.
const MOST: u64 = 64 << 20;

/// An end of a copy: node, offset.
type End = (u64, u64);

impl Core {
    /// How many bytes the server has copied; `ENOTSUP` where they had better go through this side.
    pub(super) fn copy(&self, from: End, to: End, len: u64) -> Result<u32> {
        let (source, target) = (self.file_of(from.0)?, self.file_of(to.0)?);
        if !self.link.is_up() || len < LITTLE || len < MUCH && self.has_here(source, from.1, len) {
            return Err(Errno::ENOTSUP);
        }
        let path = self.nodes().path(to.0).ok_or(Errno::ENOTSUP)?;
        let policy = self.policy_of(&path);
        if policy == Policy::None {
            return Err(Errno::EROFS);
        }
        let files = if source == target { vec![source] } else { vec![source, target] };
        self.with_flushed(files, |flushed| {
            // What the server does not take now is as well copied here.
            flushed.map_err(|_| Errno::ENOTSUP)?;
            self.copy_there((source, from), (target, to), len.min(MOST), policy == Policy::Back)
        })
    }

    /// Whether all that is copied is in the cache.
    fn has_here(&self, file: FileId, offset: u64, len: u64) -> bool {
        let Some(record) = self.cache.file(file) else { return false };
        let (block, end) = (self.cache.block_size(), offset.saturating_add(len).min(record.size));
        (offset / block..end.div_ceil(block)).all(|block| self.cache.has_block(file, block, record.zero_from))
    }

    /// A file that the server has as it is here.
    fn clean(&self, id: u64, file: FileId) -> Result<(FileRef, FileRecord)> {
        let path = self.nodes().path(id).ok_or(Errno::ENOTSUP)?;
        let record = self.cache.file(file).filter(|record| !record.dirty).ok_or(Errno::ENOTSUP)?;
        let ident: Ident = record.ident.ok_or(Errno::ENOTSUP)?;
        Ok((FileRef { path, ident }, record))
    }

    /// Asks the server. Nothing is written back meanwhile.
    fn copy_there(
        &self,
        (source, from): (FileId, End),
        (target, to): (FileId, End),
        len: u64,
        durable: bool,
    ) -> Result<u32> {
        let (from_ref, known) = self.clean(from.0, source)?;
        let (to_ref, record) = self.clean(to.0, target)?;
        let stamp = self.stamp();
        let expect = self.expect(target, &record, stamp)?;
        if durable {
            // The stamp by which our own work is known after a crash of this host.
            self.cache.sync().map_err(errno_of)?;
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
        match self.link.call::<CopyCall, _>(wanted) {
            Ok((Copied { len: copied, attr }, _)) if copied <= len => {
                self.copied(to, target, attr)?;
                Ok(copied as u32)
            }
            Ok(_) => Err(Errno::EIO),
            // A server from before there were copies.
            Err(fail) if fail.is(Code::UNKNOWN_KIND) => Err(Errno::ENOSYS),
            Err(CallFailure::Gone) => Err(CallFailure::Gone.errno()),
            Err(fail) => {
                // The server may have come half-way, or have another content.
                self.look_again(from.0, &from_ref);
                self.look_again(to.0, &to_ref);
                // Who reads and writes sees which of the two files is another one, and what it is.
                Err(if fail.is(code::STALE) { Errno::ENOTSUP } else { fail.errno() })
            }
        }
    }

    /// Asks the server what a file is by now, if it is still that file.
    fn look_again(&self, id: u64, file: &FileRef) {
        match self.attr_at(&file.path) {
            Ok(Some(attr)) if attr.ident == file.ident => self.seen(id, attr),
            _ => {}
        }
    }

    /// The server has copied into this file, which is `attr` now.
    fn copied(&self, (id, offset): End, file: FileId, attr: Attr) -> Result<()> {
        if let Some(node) = self.nodes().get_mut(id) {
            node.attr = Attr { links: node.attr.links, ..attr };
            node.seen = Some(Instant::now());
        }
        if self.cache.file(file).is_none_or(|record| !record.dirty) {
            self.adopt_version(file, &attr);
            return Ok(());
        }
        // Written meanwhile, around the kernel's lock: that stays, and is written back over what was copied.
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
