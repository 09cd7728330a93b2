//! Page alignment: groups the bytes of a disk into pages, in segments with a phase each.
//!
//! A disk has *disk bytes* `0..size`, as its guest sees them. The *aligned array* is what is hashed and
//! stored: pages in the order of the disk, with every disk byte exactly once, in order. A page that crosses a
//! segment border becomes two aligned pages, each with its own bytes at their offset in the page and zeros
//! (padding) around them. So within a segment the two arrays differ by a constant offset, and a range of any
//! length is one part for each segment that it touches.
//!
//! Every [`PageAlignment`] is valid: it covers the array without gaps, starts and phases are whole sectors,
//! every aligned page has at least one disk byte, and neighbours differ in phase, so each alignment has one
//! description. Constructors reject other input. This module does not choose the borders (see `layout`) and
//! reads nothing.

use crate::{PAGE, SECTOR};
use std::{fmt, ops::Range};
use whimbrel_core::PageRun;

/// Most segments of an array: one before the first region, two for each region.
pub const MAX_SEGMENTS: usize = 2 * crate::MAX_REGIONS + 1;
/// Most bytes of an array, as of an overlay.
pub const MAX_SIZE: u64 = 1 << 50;

/// Start of a segment: from `start` on, pages begin at offsets that are `phase` modulo 4096.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct AlignmentChange {
    /// Offset of a disk byte; a multiple of [`SECTOR`].
    pub start: u64,
    /// Phase below 4096; a multiple of [`SECTOR`].
    pub phase: u64,
}

/// Grouping of an array of bytes into pages.
#[derive(Clone, PartialEq, Eq)]
pub struct PageAlignment {
    size: u64,
    segments: Vec<Segment>,
}

/// Segments that are no valid alignment.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
pub enum AlignmentError {
    /// The array is too large.
    #[error("an array of {size} bytes exceeds the limit of {MAX_SIZE}")]
    Size {
        /// Bytes of the array.
        size: u64,
    },
    /// There are too many segments.
    #[error("more than {MAX_SEGMENTS} segments")]
    Segments,
    /// A segment does not follow its predecessor, starts past the end, or is not on a sector.
    #[error("pages of phase {phase} cannot begin at byte {start}")]
    Change {
        /// First disk byte of the segment.
        start: u64,
        /// Phase of the segment.
        phase: u64,
    },
}

/// Consecutive bytes of the aligned array.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum AlignedBytes {
    /// Bytes of the disk.
    Disk(MappedRange),
    /// Padding: zeros that are no bytes of the disk.
    Padding(u64),
}

/// Run of consecutive bytes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct MappedRange {
    /// Offset of the first byte.
    pub offset: u64,
    /// Length in bytes.
    pub len: u64,
}

impl AlignedBytes {
    /// Length in bytes.
    pub fn len(&self) -> u64 {
        match self {
            AlignedBytes::Disk(MappedRange { len, .. }) | AlignedBytes::Padding(len) => *len,
        }
    }

    /// Whether the length is 0, which a [`PageAlignment`] never returns.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }
}

/// Disk bytes `start..end`, whose pages begin at `phase` modulo 4096.
#[derive(Clone, Copy, PartialEq, Eq)]
struct Segment {
    start: u64,
    end: u64,
    phase: u64,
    /// Number of the first page in the aligned array.
    first: u64,
}

impl Segment {
    /// Padding before the first disk byte in the first page.
    fn head(&self) -> u64 {
        (self.start + PAGE - self.phase) % PAGE
    }

    fn pages(&self) -> u64 {
        (self.head() + self.end - self.start).div_ceil(PAGE)
    }

    /// Bytes of the aligned array that the pages of the segment occupy.
    fn span(&self) -> Range<u64> {
        self.first * PAGE..(self.first + self.pages()) * PAGE
    }

    /// Bytes of the aligned array that are disk bytes of the segment.
    fn data(&self) -> Range<u64> {
        let start = self.first * PAGE + self.head();
        start..start + (self.end - self.start)
    }
}

impl PageAlignment {
    /// Alignment with pages from byte 0 on, for a disk of unknown layout.
    ///
    /// # Errors
    /// If `size` is above [`MAX_SIZE`].
    pub fn identity(size: u64) -> Result<Self, AlignmentError> {
        Self::new(size, (size > 0).then_some(AlignmentChange { start: 0, phase: 0 }))
    }

    /// Alignment of an array of `size` bytes with segments that start at `borders`.
    ///
    /// # Errors
    /// If the first segment does not start at byte 0, or they do not ascend, are not on sectors, start past
    /// the end, or neighbours have one phase.
    pub fn new(
        size: u64,
        borders: impl IntoIterator<Item = AlignmentChange>,
    ) -> Result<Self, AlignmentError> {
        if size > MAX_SIZE {
            return Err(AlignmentError::Size { size });
        }
        let mut segments: Vec<Segment> = Vec::new();
        for AlignmentChange { start, phase } in borders {
            if segments.len() == MAX_SEGMENTS {
                return Err(AlignmentError::Segments);
            }
            let whole = start.is_multiple_of(SECTOR) && phase.is_multiple_of(SECTOR);
            let follows = match segments.last() {
                None => start == 0,
                Some(last) => last.start < start && last.phase != phase,
            };
            if !whole || !follows || start >= size || phase >= PAGE {
                return Err(AlignmentError::Change { start, phase });
            }
            let first = match segments.last_mut() {
                None => 0,
                Some(last) => {
                    last.end = start;
                    last.first + last.pages()
                }
            };
            segments.push(Segment { start, end: size, phase, first });
        }
        match segments.is_empty() && size > 0 {
            true => Err(AlignmentError::Change { start: 0, phase: 0 }),
            false => Ok(Self { size, segments }),
        }
    }

    /// Size of the disk in bytes.
    pub fn size(&self) -> u64 {
        self.size
    }

    /// Pages of the aligned array.
    pub fn page_count(&self) -> u64 {
        self.segments.last().map_or(0, |last| last.first + last.pages())
    }

    /// Whether pages begin at byte 0, as without an alignment.
    pub fn is_identity(&self) -> bool {
        self.segments.iter().all(|segment| segment.phase == 0)
    }

    /// Starts of the segments, in order.
    pub fn changes(&self) -> impl Iterator<Item = AlignmentChange> {
        self.segments.iter().map(|segment| AlignmentChange { start: segment.start, phase: segment.phase })
    }

    /// Offset in the aligned array of disk byte `offset`; none past the end.
    pub fn aligned_offset(&self, offset: u64) -> Option<u64> {
        if offset >= self.size {
            return None;
        }
        let segment = self.segments[..self.segments.partition_point(|s| s.start <= offset)].last()?;
        Some(segment.data().start + (offset - segment.start))
    }

    /// Disk bytes of aligned page `page`: 1 to 4096 bytes; none past the end.
    pub fn disk_bytes(&self, page: u64) -> Option<Range<u64>> {
        if page >= self.page_count() {
            return None;
        }
        let segment = self.segments[..self.segments.partition_point(|s| s.first <= page)].last()?;
        let data = segment.data();
        let (from, to) = ((page * PAGE).max(data.start), ((page + 1) * PAGE).min(data.end));
        Some(segment.start + (from - data.start)..segment.start + (to - data.start))
    }

    /// Aligned pages that have disk bytes of `range`; bytes past the end are ignored.
    pub fn pages_of(&self, range: Range<u64>) -> PageRun {
        let end = range.end.min(self.size);
        let last = (range.start < end).then(|| end - 1);
        match (self.aligned_offset(range.start), last.and_then(|last| self.aligned_offset(last))) {
            (Some(from), Some(to)) => PageRun::new(from / PAGE, to / PAGE - from / PAGE + 1),
            _ => PageRun::new(0, 0),
        }
    }

    /// Content of bytes `range` of the aligned array, in order and without gaps, up to the end of the array.
    pub fn parts(&self, range: Range<u64>) -> impl Iterator<Item = AlignedBytes> {
        let from = self.segments.partition_point(|segment| segment.span().end <= range.start);
        let touched = self.segments[from..].iter().take_while({
            let end = range.end;
            move |segment| segment.span().start < end
        });
        touched.flat_map(move |segment| {
            let (span, data) = (segment.span(), segment.data());
            let clip = |part: &Range<u64>| {
                let start = part.start.max(range.start);
                start..part.end.min(range.end).max(start)
            };
            let length = |part: Range<u64>| part.end - part.start;
            let bytes = clip(&data);
            let offset = segment.start + (bytes.start.clamp(data.start, data.end) - data.start);
            let pieces = [
                AlignedBytes::Padding(length(clip(&(span.start..data.start)))),
                AlignedBytes::Disk(MappedRange { offset, len: length(bytes) }),
                AlignedBytes::Padding(length(clip(&(data.end..span.end)))),
            ];
            pieces.into_iter().filter(|piece| !piece.is_empty())
        })
    }

    /// Ranges of the aligned array with the disk bytes of `range`, in order, up to the end of the array.
    pub fn aligned_ranges(&self, range: Range<u64>) -> impl Iterator<Item = MappedRange> {
        let from = self.segments.partition_point(|segment| segment.end <= range.start);
        let touched = self.segments[from..].iter().take_while({
            let end = range.end;
            move |segment| segment.start < end
        });
        touched.filter_map(move |segment| {
            let (start, end) = (segment.start.max(range.start), segment.end.min(range.end));
            let offset = segment.data().start + (start - segment.start);
            (start < end).then(|| MappedRange { offset, len: end - start })
        })
    }
}

impl fmt::Debug for PageAlignment {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "PageAlignment({} bytes", self.size)?;
        self.changes().try_for_each(|border| write!(f, ", {}:{}", border.start, border.phase))?;
        f.write_str(")")
    }
}

#[cfg(test)]
pub(crate) mod tests {
    use super::*;
    use proptest::prelude::*;

    /// Alignments of any shape over up to 60 sectors, with pages at every phase.
    pub(crate) fn any_cuts() -> impl Strategy<Value = PageAlignment> {
        let borders = prop::collection::vec((1..60u64, 0..8u64), 0..8);
        (0..30_000u64, 0..8u64, borders).prop_map(|(size, first, mut more)| {
            more.sort_unstable();
            more.dedup_by_key(|border| border.0);
            let mut borders = vec![AlignmentChange { start: 0, phase: first * SECTOR }];
            for (start, phase) in more {
                let border = AlignmentChange { start: start * SECTOR, phase: phase * SECTOR };
                if borders.last().is_some_and(|last| last.phase != border.phase) {
                    borders.push(border);
                }
            }
            borders.retain(|border| border.start < size);
            PageAlignment::new(size, borders).expect("valid by construction")
        })
    }

    proptest! {
        #[test]
        fn every_disk_byte_lies_once_in_the_cut_array_and_the_rest_is_padding(cuts in any_cuts()) {
            let places: Vec<u64> = (0..cuts.size()).map(|at| cuts.aligned_offset(at).unwrap()).collect();
            prop_assert!(places.windows(2).all(|pair| pair[0] < pair[1]), "in order, none twice");
            prop_assert_eq!(cuts.aligned_offset(cuts.size()), None);
            let mut model = vec![None; (cuts.page_count() * PAGE) as usize];
            for (at, place) in places.iter().enumerate() { model[*place as usize] = Some(at as u64); }
            let mut seen = Vec::new();
            for piece in cuts.parts(0..u64::MAX) {
                match piece {
                    AlignedBytes::Disk(stretch) => seen.extend((stretch.offset..stretch.offset + stretch.len).map(Some)),
                    AlignedBytes::Padding(len) => seen.extend((0..len).map(|_| None)),
                }
            }
            prop_assert!(seen == model);
        }

        #[test]
        fn a_page_begins_where_its_phase_says_or_at_a_border(cuts in any_cuts()) {
            let borders: Vec<AlignmentChange> = cuts.changes().collect();
            let mut next = 0;
            for page in 0..cuts.page_count() {
                let bytes = cuts.disk_bytes(page).unwrap();
                prop_assert_eq!(bytes.start, next, "pages follow each other");
                prop_assert!(!bytes.is_empty() && bytes.end - bytes.start <= PAGE);
                let border = borders.iter().rfind(|border| border.start <= bytes.start).unwrap();
                prop_assert!(bytes.start == border.start || bytes.start % PAGE == border.phase);
                prop_assert_eq!(cuts.pages_of(bytes.clone()), PageRun::new(page, 1));
                next = bytes.end;
            }
            prop_assert_eq!(next, cuts.size());
            prop_assert_eq!(cuts.disk_bytes(cuts.page_count()), None);
        }

        #[test]
        fn ranges_are_what_their_bytes_are(cuts in any_cuts(), from in 0..40_000u64, len in 0..9000u64) {
            let inside = from..(from + len).min(cuts.size());
            let expected: Vec<u64> = inside.clone().map(|at| cuts.aligned_offset(at).unwrap()).collect();
            let found: Vec<u64> =
                cuts.aligned_ranges(from..from + len).flat_map(|s| s.offset..s.offset + s.len).collect();
            prop_assert_eq!(&found, &expected);
            let run = cuts.pages_of(from..from + len);
            let pages: std::collections::BTreeSet<u64> = expected.iter().map(|place| place / PAGE).collect();
            prop_assert_eq!(run.pages().collect::<Vec<_>>(), pages.into_iter().collect::<Vec<_>>());
            let end = (from + len).min(cuts.page_count() * PAGE);
            let whole: u64 = cuts.parts(from..from + len).map(|piece| piece.len()).sum();
            prop_assert_eq!(whole, end.saturating_sub(from));
            prop_assert!(cuts.parts(from..from + len).all(|piece| !piece.is_empty()));
            for piece in cuts.parts(from..from + len).take(1) {
                if let AlignedBytes::Disk(stretch) = piece {
                    prop_assert_eq!(cuts.aligned_offset(stretch.offset), Some(from));
                }
            }
        }
    }

    #[test]
    fn the_identity_cuts_from_byte_0_and_pads_the_last_page() {
        let cuts = PageAlignment::identity(10_000).unwrap();
        assert!(cuts.is_identity() && cuts.page_count() == 3);
        assert_eq!(cuts.disk_bytes(2), Some(8192..10_000));
        assert_eq!(cuts.parts(8192..12_288).last(), Some(AlignedBytes::Padding(2288)));
        assert_eq!(PageAlignment::identity(0).unwrap().page_count(), 0);
    }

    #[test]
    fn borders_that_describe_no_cuts_are_refused() {
        let cuts = |size, borders: &[(u64, u64)]| {
            PageAlignment::new(
                size,
                borders.iter().map(|(start, phase)| AlignmentChange { start: *start, phase: *phase }),
            )
        };
        assert!(cuts(8192, &[(0, 0), (1024, 512)]).is_ok());
        assert_eq!(cuts(MAX_SIZE + 1, &[(0, 0)]), Err(AlignmentError::Size { size: MAX_SIZE + 1 }));
        for wrong in [
            &[][..],
            &[(512, 0)],
            &[(0, 4096)],
            &[(0, 100)],
            &[(0, 0), (100, 512)],
            &[(0, 0), (512, 0)],
            &[(0, 0), (8192, 512)],
            &[(0, 0), (1024, 512), (1024, 1024)],
        ] {
            assert!(matches!(cuts(8192, wrong), Err(AlignmentError::Change { .. })), "{wrong:?}");
        }
        let many = (0..=MAX_SEGMENTS as u64).map(|n| AlignmentChange { start: n * 512, phase: n % 2 * 512 });
        assert_eq!(PageAlignment::new(1 << 30, many), Err(AlignmentError::Segments));
    }
}
