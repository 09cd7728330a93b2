//! Space and holes of a file: `fallocate`, `SEEK_DATA` and `SEEK_HOLE`.
//!
//! Zeros use no space on the server, so a hole is made by writing zeros: the write-back sends them as such,
//! and preconditions, journal and conflicts are those of any write. Nothing is reserved on the server: a file
//! that is to grow grows if the server's disk has that much room now.

use crate::client::{content::fetcher::FetchSubject, policy::Policy, session::Core};
use crate::proto::{HolesCall, unpack_holes};
use rustix::fs::FallocateFlags;
use std::ops::Range;
use whimbrel_fuse::{Errno, Result};

/// Most bytes of zeros written at once.
const PIECE: u64 = 1 << 20;

impl Core {
    /// Makes room in a file, or zeros, as fallocate(2) does by `mode`.
    pub(in crate::client) fn fallocate(&self, id: u64, offset: u64, length: u64, mode: i32) -> Result<()> {
        let file = self.file_of(id)?;
        let path = self.inodes().path(id);
        if path.is_some_and(|path| self.policy_of(&path) == Policy::None) {
            return Err(Errno::EROFS);
        }
        let size = self.cache.file(file).ok_or(Errno::ESTALE)?.size;
        let end = self.checked_end(offset, length)?;
        let flags = FallocateFlags::from_bits_retain(mode as u32);
        let keep = flags.contains(FallocateFlags::KEEP_SIZE);
        match flags.difference(FallocateFlags::KEEP_SIZE) {
            none if none.is_empty() && !keep => self.grow(id, size, end),
            FallocateFlags::PUNCH_HOLE | FallocateFlags::ZERO_RANGE => {
                self.write_zeros(id, offset..end.min(size))?;
                if keep { Ok(()) } else { self.grow(id, size, end) }
            }
            // What only reserves is not supported, because nothing would be reserved.
            _ => Err(Errno::ENOTSUP),
        }
    }

    fn grow(&self, id: u64, size: u64, end: u64) -> Result<()> {
        if end <= size {
            return Ok(());
        }
        let room = self.free_space()?;
        if room.available.saturating_mul(room.unit) < end - size {
            return Err(Errno::ENOSPC);
        }
        self.truncate(id, end)
    }

    fn write_zeros(&self, id: u64, range: Range<u64>) -> Result<()> {
        let zeros = vec![0; PIECE.min(range.end.saturating_sub(range.start)) as usize];
        let mut at = range.start;
        while at < range.end {
            let piece = (range.end - at).min(PIECE);
            self.write(id, at, &zeros[..piece as usize])?;
            at += piece;
        }
        Ok(())
    }

    /// The next byte of data or of a hole from `offset` on, as lseek(2) finds it. A file with unsent changes,
    /// and one that the server cannot be asked about, is all data.
    pub(in crate::client) fn seek_content(&self, id: u64, offset: i64, data: bool) -> Result<i64> {
        let file = self.file_of(id)?;
        let record = self.cache.file(file).ok_or(Errno::ESTALE)?;
        let offset = u64::try_from(offset).ok().filter(|at| *at < record.size).ok_or(Errno::ENXIO)?;
        let clean = !record.dirty && self.connection.is_up();
        let source = if clean { self.fetch_subject(id, file) } else { None };
        let holes = source.map_or_else(Vec::new, |source| self.holes_of(source));
        let within = holes.iter().find(|hole| hole.contains(&offset));
        let found = match (within, data) {
            (Some(hole), true) if hole.end >= record.size => return Err(Errno::ENXIO),
            (Some(hole), true) => hole.end,
            (None, false) => {
                let next = holes.iter().map(|hole| hole.start).find(|start| *start > offset);
                next.unwrap_or(record.size)
            }
            (Some(_), false) | (None, true) => offset,
        };
        i64::try_from(found).map_err(|_| Errno::EOVERFLOW)
    }

    /// Holes of the server's file, none if they cannot be found or it is another version by now.
    fn holes_of(&self, source: FetchSubject) -> Vec<Range<u64>> {
        let _waits = self.connection.waiting();
        let Ok((done, payload)) = self.connection.call::<HolesCall, _>(source.file_ref.clone()) else {
            return Vec::new();
        };
        if !self.is_same(&source, &done.attr) {
            return Vec::new();
        }
        unpack_holes(&payload).unwrap_or_default()
    }
}
