//! Scan ranges: the parts of a source to be hashed, in runs of pages of at most one mebibyte, without holes.
//!
//! A raw file is walked by its data extents (SEEK_DATA), widened by a page on both sides, since a page with
//! another alignment than the file system may begin in a hole. A qcow2 image is walked by its tables; a page
//! whose two halves are apart in the file is left out.

use crate::aligned_ranges::AlignedRanges;
use crate::qcow2::{Extent, Extents, Qcow2Error};
use rustix::fs::{SeekFrom, seek};
use rustix::io::Errno;
use std::collections::VecDeque;
use std::fs::File;
use std::io;
use whimbrel_core::PAGE_SIZE;

const PAGE: u64 = PAGE_SIZE as u64;
/// Most pages of a range.
pub(crate) const RANGE_PAGES: u64 = 256;

/// Run of consecutive pages in a file.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct ScanRange {
    /// Byte offset in the file.
    pub(crate) offset: u64,
    pub(crate) pages: u64,
    /// End offset in the image, for the progress.
    pub(crate) end: u64,
}

#[derive(Debug)]
pub(crate) enum WalkError {
    Io(io::Error),
    Qcow2(Qcow2Error),
}

/// Iterator over the parts of a source that have data.
#[derive(Debug)]
pub(crate) enum Walk {
    Raw(RawExtents),
    Qcow2(Extents<File>),
}

impl Iterator for Walk {
    type Item = Result<Extent, WalkError>;

    fn next(&mut self) -> Option<Self::Item> {
        match self {
            Self::Raw(extents) => extents.next().map(|next| next.map_err(WalkError::Io)),
            Self::Qcow2(extents) => extents.next().map(|next| next.map_err(WalkError::Qcow2)),
        }
    }
}

/// Data extents of a file, widened and merged.
#[derive(Debug)]
pub(crate) struct RawExtents {
    file: File,
    size: u64,
    at: u64,
    pending: Option<(u64, u64)>,
}

impl RawExtents {
    pub(crate) fn new(file: File, size: u64) -> Self {
        Self { file, size, at: 0, pending: None }
    }

    /// Next data extent that the file system reports, widened.
    fn data(&mut self) -> io::Result<Option<(u64, u64)>> {
        if self.at >= self.size {
            return Ok(None);
        }
        let start = match seek(&self.file, SeekFrom::Data(self.at)) {
            Ok(start) => start,
            Err(Errno::NXIO) => return Ok(None),
            // The file system reports no holes: a block device, huge pages.
            Err(Errno::INVAL | Errno::OPNOTSUPP) => self.at,
            Err(error) => return Err(error.into()),
        };
        let end = match seek(&self.file, SeekFrom::Hole(start)) {
            // The file is growing or the answer is wrong; advance in any case.
            Ok(end) => end.max(start + 1).min(self.size),
            Err(Errno::INVAL | Errno::OPNOTSUPP | Errno::NXIO) => self.size,
            Err(error) => return Err(error.into()),
        };
        self.at = end;
        let widened = (start.saturating_sub(PAGE - 1), (end + PAGE - 1).min(self.size));
        Ok((start < self.size).then_some(widened))
    }
}

impl Iterator for RawExtents {
    type Item = io::Result<Extent>;

    fn next(&mut self) -> Option<Self::Item> {
        loop {
            match (self.data(), self.pending.take()) {
                (Err(error), _) => {
                    self.at = self.size;
                    return Some(Err(error));
                }
                (Ok(Some((start, end))), Some((first, last))) if start <= last => {
                    self.pending = Some((first, end));
                }
                (Ok(Some(next)), last) => {
                    self.pending = Some(next);
                    if let Some((start, end)) = last {
                        return Some(Ok(Extent { guest: start, host: start, length: end - start }));
                    }
                }
                (Ok(None), last) => {
                    let (start, end) = last?;
                    return Some(Ok(Extent { guest: start, host: start, length: end - start }));
                }
            }
        }
    }
}

/// Ranges of a walk, aligned.
#[derive(Debug)]
pub(crate) struct ScanRanges {
    walk: Walk,
    grid: AlignedRanges,
    ready: VecDeque<ScanRange>,
}

impl ScanRanges {
    pub(crate) fn new(walk: Walk, grid: AlignedRanges) -> Self {
        Self { walk, grid, ready: VecDeque::new() }
    }
}

impl Iterator for ScanRanges {
    type Item = Result<ScanRange, WalkError>;

    fn next(&mut self) -> Option<Self::Item> {
        while self.ready.is_empty() {
            let extent = match self.walk.next()? {
                Ok(extent) => extent,
                Err(error) => return Some(Err(error)),
            };
            let runs = self.grid.runs(extent.guest, extent.guest + extent.length);
            self.ready.extend(runs.into_iter().map(|run| ScanRange {
                offset: run.start - extent.guest + extent.host,
                pages: run.pages,
                end: run.start + run.pages * PAGE,
            }));
        }
        let mut piece = self.ready.pop_front()?;
        if piece.pages > RANGE_PAGES {
            let first = ScanRange {
                pages: RANGE_PAGES,
                end: piece.end - (piece.pages - RANGE_PAGES) * PAGE,
                offset: piece.offset,
            };
            piece.offset += RANGE_PAGES * PAGE;
            piece.pages -= RANGE_PAGES;
            self.ready.push_front(piece);
            piece = first;
        }
        Some(Ok(piece))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::os::unix::fs::FileExt as _;

    #[test]
    fn holes_are_left_out_and_pages_at_their_edges_are_not() {
        let file = tempfile::tempfile_in("/dev/shm").unwrap();
        file.set_len(64 << 20).unwrap();
        file.write_all_at(&[1; 4096], 10 << 20).unwrap();
        file.write_all_at(&[1; 4096], (10 << 20) + 3 * 4096).unwrap();
        file.write_all_at(&[1; 4096], (64 << 20) - 4096).unwrap();
        let border = whimbrel_alignment::AlignmentChange { start: 0, phase: 512 };
        let cuts = whimbrel_alignment::PageAlignment::new(64 << 20, [border]).unwrap();
        let walk = Walk::Raw(RawExtents::new(file, 64 << 20));
        let pieces: Vec<_> =
            ScanRanges::new(walk, AlignedRanges::new(Some(&cuts))).map(Result::unwrap).collect();
        let base = 10 << 20;
        // Each data page, widened by the page before and the page after; merged where they touch.
        assert_eq!(pieces[0].offset, base - 4096 + 512);
        assert_eq!(pieces.iter().map(|p| p.pages).sum::<u64>(), 2 + 2 + 1);
        assert_eq!(pieces.last().unwrap().end, (64 << 20) - 4096 + 512);
    }

    #[test]
    fn long_runs_come_in_pieces_that_cover_all() {
        let file = tempfile::tempfile().unwrap();
        let size = 3 * (1 << 20) + 5 * 4096;
        file.write_all_at(&vec![1; size], 0).unwrap();
        let walk = Walk::Raw(RawExtents::new(file, size as u64));
        let mut at = 0;
        for piece in ScanRanges::new(walk, AlignedRanges::default()) {
            let piece = piece.unwrap();
            assert_eq!(piece.offset, at);
            assert!(piece.pages <= RANGE_PAGES);
            at += piece.pages * PAGE;
            assert_eq!(piece.end, at);
        }
        assert_eq!(at, size as u64);
    }
}
