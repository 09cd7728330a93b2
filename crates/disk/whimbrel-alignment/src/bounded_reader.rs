//! Bounded reader: reads an untrusted disk in complete sectors, within its bounds, up to a limit.
//!
//! A read that fails (past the end, disk error, over the limit) is `None`, which every parser takes for
//! "nothing is here". After a disk error or over the limit the result is incomplete, and the reader records
//! that.

use crate::SECTOR;
use std::{fs::File, io, os::unix::fs::FileExt};

/// Most sectors that one inspection reads.
pub const MAX_SECTORS: u64 = 500;

/// Random access to content.
pub trait ReadAt {
    /// Fills `out` from `offset`.
    ///
    /// # Errors
    /// If the content is unavailable.
    fn read_at(&self, offset: u64, out: &mut [u8]) -> io::Result<()>;
}

impl ReadAt for File {
    fn read_at(&self, offset: u64, out: &mut [u8]) -> io::Result<()> {
        self.read_exact_at(out, offset)
    }
}

impl ReadAt for Vec<u8> {
    fn read_at(&self, offset: u64, out: &mut [u8]) -> io::Result<()> {
        let offset = usize::try_from(offset).unwrap_or(usize::MAX);
        let found = self.get(offset..).and_then(|rest| rest.get(..out.len()));
        out.copy_from_slice(found.ok_or(io::ErrorKind::UnexpectedEof)?);
        Ok(())
    }
}

pub(crate) struct BoundedReader<'a> {
    disk: &'a dyn ReadAt,
    size: u64,
    left: u64,
    complete: bool,
}

impl<'a> BoundedReader<'a> {
    pub(crate) fn new(disk: &'a dyn ReadAt, size: u64) -> Self {
        Self { disk, size, left: MAX_SECTORS, complete: true }
    }

    pub(crate) fn size(&self) -> u64 {
        self.size
    }

    /// Whether every read within the disk succeeded.
    pub(crate) fn is_complete(&self) -> bool {
        self.complete
    }

    /// Reads `N` bytes at `offset`, complete sectors.
    pub(crate) fn sectors<const N: usize>(&mut self, offset: u64) -> Option<[u8; N]> {
        let mut out = [0; N];
        self.read(offset, &mut out)?;
        Some(out)
    }

    /// Fills `out`, complete sectors, from `offset`.
    pub(crate) fn read(&mut self, offset: u64, out: &mut [u8]) -> Option<()> {
        let len = out.len() as u64;
        offset.checked_add(len).filter(|end| *end <= self.size)?;
        let rest = self.left.checked_sub(len.div_ceil(SECTOR));
        let answered = rest.is_some() && self.disk.read_at(offset, out).is_ok();
        self.left = rest.unwrap_or(self.left);
        self.complete &= answered;
        answered.then_some(())
    }
}

/// Reads a 16-bit little-endian number.
pub(crate) fn le16(bytes: &[u8], at: usize) -> u16 {
    u16::from_le_bytes([bytes[at], bytes[at + 1]])
}

/// Reads a 32-bit little-endian number.
pub(crate) fn le32(bytes: &[u8], at: usize) -> u32 {
    u32::from(le16(bytes, at)) | u32::from(le16(bytes, at + 2)) << 16
}

/// Reads a 64-bit little-endian number.
pub(crate) fn le64(bytes: &[u8], at: usize) -> u64 {
    u64::from(le32(bytes, at)) | u64::from(le32(bytes, at + 4)) << 32
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn reads_end_with_the_disk_and_with_the_limit() {
        let disk = vec![7; 4096];
        let mut reader = BoundedReader::new(&disk, 8192);
        assert_eq!(reader.sectors::<512>(8192), None);
        assert_eq!(reader.sectors::<512>(u64::MAX), None);
        assert!(reader.is_complete(), "nothing lies there");
        assert_eq!(reader.sectors::<512>(3584), Some([7; 512]));
        assert_eq!(reader.sectors::<512>(4096), None);
        assert!(!reader.is_complete(), "the disk refused");
        let mut reader = BoundedReader::new(&disk, 4096);
        let answered = (0..1000).filter(|_| reader.sectors::<1024>(0).is_some()).count();
        assert_eq!(answered as u64, MAX_SECTORS / 2);
        assert!(!reader.is_complete());
    }

    #[test]
    fn numbers_are_little_endian() {
        assert_eq!(le64(&[0, 1, 2, 3, 4, 5, 6, 7, 8], 1), 0x0807_0605_0403_0201);
    }
}
