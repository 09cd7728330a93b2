//! Reading a segment from front to back past the page cache, for scrubs.
//!
//! What the kernel still has in memory would say nothing of the disk, and a copy from there costs more
//! processor time than checking the bytes. A file system that cannot read directly is read as usual, after
//! the kernel was asked to forget the range.

use rustix::fs::{Advice, OFlags, fadvise};
use std::{
    fs::File,
    io,
    num::NonZeroU64,
    os::unix::fs::{FileExt, OpenOptionsExt},
    path::Path,
};

/// Bytes read at once, unless more are asked for.
const WINDOW: usize = 4 << 20;
/// Alignment of direct reads in the file and in memory: that of a page suffices for every disk.
const ALIGNMENT: usize = 4096;

/// A segment that is being read, with the part that was read last.
#[derive(Debug)]
pub(super) struct SegmentReader {
    file: File,
    is_direct: bool,
    buffer: Vec<u8>,
    /// Where the aligned part of the buffer begins.
    start: usize,
    /// Offset in the file of the bytes in the buffer.
    from: u64,
    /// Number of these bytes.
    length: usize,
}

impl SegmentReader {
    pub(super) fn open(path: &Path) -> io::Result<Self> {
        let direct = OFlags::DIRECT.bits().cast_signed();
        let (file, is_direct) = match File::options().read(true).custom_flags(direct).open(path) {
            Err(error) if error.kind() == io::ErrorKind::InvalidInput => (File::open(path)?, false),
            opened => (opened?, true),
        };
        Ok(Self { file, is_direct, buffer: Vec::new(), start: 0, from: 0, length: 0 })
    }

    /// The bytes at `offset`; fewer than `length` only at the end of the file.
    pub(super) fn read(&mut self, offset: u64, length: usize) -> io::Result<&[u8]> {
        let end = offset + length as u64;
        if offset < self.from || end > self.from + self.length as u64 {
            self.fill(offset, length)?;
        }
        let first = (offset - self.from) as usize;
        let last = (first + length).min(self.length).max(first.min(self.length));
        Ok(&self.buffer[self.start + first.min(self.length)..self.start + last])
    }

    fn fill(&mut self, offset: u64, length: usize) -> io::Result<()> {
        let before = offset as usize % ALIGNMENT;
        let wanted = (before + length).max(WINDOW).next_multiple_of(ALIGNMENT);
        if self.buffer.len() < wanted + ALIGNMENT {
            self.buffer = vec![0; wanted + ALIGNMENT];
            self.start = self.buffer.as_ptr().align_offset(ALIGNMENT).min(ALIGNMENT);
        }
        (self.from, self.length) = (offset - before as u64, 0);
        if !self.is_direct {
            // Where this fails, the bytes may come from memory.
            let _ = fadvise(&self.file, self.from, NonZeroU64::new(wanted as u64), Advice::DontNeed);
        }
        while self.length < wanted {
            let part = &mut self.buffer[self.start + self.length..self.start + wanted];
            let count = self.file.read_at(part, self.from + self.length as u64)?;
            self.length += count;
            // A direct read that ends in the middle of a page has met the end of the file.
            if count == 0 || !self.length.is_multiple_of(ALIGNMENT) {
                break;
            }
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn any_range_is_as_written_and_the_end_of_the_file_is_no_error() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("segment");
        let bytes: Vec<u8> =
            (0..(9 << 20) + 77_u32).map(|at| (at.wrapping_mul(2_654_435_761) >> 21) as u8).collect();
        std::fs::write(&path, &bytes).unwrap();
        let direct = SegmentReader::open(&path).unwrap();
        let usual = SegmentReader {
            is_direct: false,
            file: File::open(&path).unwrap(),
            ..SegmentReader::open(&path).unwrap()
        };
        for mut reader in [direct, usual] {
            for (offset, length) in [(0, 48), (48, 10_000), (4_190_000, 20_000), (4_000_001, 5 << 20), (7, 1)]
            {
                let found = reader.read(offset as u64, length).unwrap();
                assert!(found == &bytes[offset..offset + length], "{offset} {length}");
            }
            let end = bytes.len() as u64;
            assert_eq!(reader.read(end - 5, 48).unwrap(), &bytes[bytes.len() - 5..]);
            assert!(reader.read(end, 48).unwrap().is_empty());
            assert!(reader.read(end + 9000, 48).unwrap().is_empty());
        }
    }
}
