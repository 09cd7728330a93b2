//! Format of the table file: header, source records, and the offset of each part. Pure: bytes in, fields out.
//! `docs/formats/hash-cache.md` has the details.
//!
//! ```text
//! page 0                 header, written once
//! page 1                 counters
//! page 2 ..              sources, 1024 bytes each
//! then                   buckets, one page each
//! ```
//!
//! Invariant: a decoded [`Header`] describes a file whose length fits into the address space and whose parts
//! do not overlap. A header is rejected for its magic, version, checksum or an invalid field; a record that
//! fails these checks counts as free.

use crate::SourceKind;
use std::{ffi::OsString, os::unix::ffi::OsStringExt as _, path::PathBuf};
use whimbrel_core::PAGE_SIZE;
use xxhash_rust::xxh3::xxh3_64;

/// Bytes of the header.
pub const HEADER_SIZE: usize = PAGE_SIZE;
/// Bytes of a source record.
pub const RECORD_SIZE: usize = 1024;
/// Most bytes of a source's path.
pub const MAX_PATH: usize = RECORD_SIZE - PATH_AT;
/// Most sources of a table.
pub(crate) const MAX_SOURCES: u32 = 4096;
/// Entries in a bucket: 16 bytes each.
pub(crate) const BUCKET_ENTRIES: u64 = PAGE_SIZE as u64 / 16;
/// 1 TiB of table, for 256 TiB of content; larger numbers are damage or an attack.
const MAX_BUCKETS: u64 = 1 << 28;

pub(crate) const MAGIC: [u8; 8] = *b"WHIMHCSH";
const VERSION: u32 = 1;
const CHECKED: usize = HEADER_SIZE - 8;
const COUNTERS_AT: u64 = HEADER_SIZE as u64;
const SOURCES_AT: u64 = COUNTERS_AT + PAGE_SIZE as u64;
/// Bytes before this offset are counters, which the checksum does not cover.
pub(crate) const RECORD_SUM_AT: usize = 16;
const RECORD_BODY_AT: usize = 24;
const PATH_AT: usize = 128;

/// Size of a table, fixed when it is created.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Geometry {
    buckets: u64,
    sources: u32,
}

impl Geometry {
    /// Table for about `pages` pages of content, which then is 84 % full, so that few entries are lost to
    /// full windows.
    pub fn for_pages(pages: u64) -> Self {
        let buckets =
            pages.min(MAX_BUCKETS * BUCKET_ENTRIES).saturating_mul(100).div_ceil(84 * BUCKET_ENTRIES);
        let sources = (pages / 4096).clamp(16, u64::from(MAX_SOURCES)) as u32;
        Self { buckets: buckets.clamp(1, MAX_BUCKETS), sources: sources.next_multiple_of(4) }
    }

    /// Table whose file has about `bytes` bytes.
    pub fn for_file_size(bytes: u64) -> Self {
        // 16 bytes an entry at 84 %, and the source records.
        Self::for_pages(bytes / 8 * 42 / 100)
    }

    /// Table with records for `sources` source files, at most `MAX_SOURCES`.
    #[must_use]
    pub fn with_sources(self, sources: u32) -> Self {
        Self { sources: sources.clamp(4, MAX_SOURCES).next_multiple_of(4), ..self }
    }

    /// Entries of the table.
    pub fn slots(&self) -> u64 {
        self.buckets * BUCKET_ENTRIES
    }

    /// Source records of the table.
    pub fn sources(&self) -> u32 {
        self.sources
    }

    /// Bytes of the complete file.
    pub fn file_size(&self) -> u64 {
        self.buckets_at() + self.buckets * PAGE_SIZE as u64
    }

    pub(crate) fn buckets(&self) -> u64 {
        self.buckets
    }

    pub(crate) fn counters_word(&self) -> usize {
        COUNTERS_AT as usize / 8
    }

    /// First word of the record of source `number`, which is in `1..=sources`.
    pub(crate) fn record_word(&self, number: u16) -> usize {
        (SOURCES_AT as usize + (usize::from(number) - 1) * RECORD_SIZE) / 8
    }

    pub(crate) fn buckets_word(&self) -> usize {
        self.buckets_at() as usize / 8
    }

    fn buckets_at(&self) -> u64 {
        SOURCES_AT + u64::from(self.sources) * RECORD_SIZE as u64
    }
}

/// Content of the header page.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Header {
    /// Random id of the table.
    pub id: [u8; 16],
    /// Size of the table.
    pub geometry: Geometry,
}

/// Reasons to reject a header.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
pub enum HeaderError {
    /// The file is no table.
    #[error("not a hash cache")]
    Magic,
    /// Another version of the program wrote the file.
    #[error("hash cache format {found} is unknown; this version reads format {VERSION}")]
    Version {
        /// The version found.
        found: u32,
    },
    /// The page is empty or its checksum does not match.
    #[error("the header is damaged")]
    Checksum,
    /// The checksum matches, but a field is invalid.
    #[error("the header has an invalid {field}")]
    Field {
        /// Name of the field.
        field: &'static str,
    },
    /// The length of the file contradicts its header.
    #[error("the file has {found} bytes instead of {wanted}")]
    Length {
        /// Length of the file.
        found: u64,
        /// Length according to the header.
        wanted: u64,
    },
}

impl Header {
    /// Encodes the header page.
    pub fn encode(&self) -> [u8; HEADER_SIZE] {
        let mut bytes = [0; HEADER_SIZE];
        bytes[..8].copy_from_slice(&MAGIC);
        bytes[8..12].copy_from_slice(&VERSION.to_le_bytes());
        bytes[12..16].copy_from_slice(&(PAGE_SIZE as u32).to_le_bytes());
        bytes[16..32].copy_from_slice(&self.id);
        bytes[32..40].copy_from_slice(&self.geometry.buckets.to_le_bytes());
        bytes[40..44].copy_from_slice(&self.geometry.sources.to_le_bytes());
        let sum = xxh3_64(&bytes[..CHECKED]);
        bytes[CHECKED..].copy_from_slice(&sum.to_le_bytes());
        bytes
    }

    /// Decodes a header page and checks it.
    pub fn decode(bytes: &[u8; HEADER_SIZE]) -> Result<Self, HeaderError> {
        if bytes[..8] != MAGIC {
            // A crash can leave zeros, never another magic.
            let lost = bytes.iter().all(|byte| *byte == 0);
            return Err(if lost { HeaderError::Checksum } else { HeaderError::Magic });
        }
        let number = |at: usize| u32::from_le_bytes(field(bytes, at));
        if number(8) != VERSION {
            return Err(HeaderError::Version { found: number(8) });
        }
        if u64::from_le_bytes(field(bytes, CHECKED)) != xxh3_64(&bytes[..CHECKED]) {
            return Err(HeaderError::Checksum);
        }
        if number(12) != PAGE_SIZE as u32 {
            return Err(HeaderError::Field { field: "page size" });
        }
        let geometry = Geometry { buckets: u64::from_le_bytes(field(bytes, 32)), sources: number(40) };
        if !(1..=MAX_BUCKETS).contains(&geometry.buckets) {
            return Err(HeaderError::Field { field: "number of buckets" });
        }
        if !(4..=MAX_SOURCES).contains(&geometry.sources) || !geometry.sources.is_multiple_of(4) {
            return Err(HeaderError::Field { field: "number of sources" });
        }
        if bytes[44..CHECKED].iter().any(|byte| *byte != 0) {
            return Err(HeaderError::Field { field: "reserved part" });
        }
        Ok(Self { id: field(bytes, 16), geometry })
    }
}

/// Record of a source file.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct SourceRecord {
    /// Format of the file.
    pub kind: SourceKind,
    /// Device and inode when it was registered.
    pub identity: (u64, u64),
    /// Size of the file in bytes.
    pub size: u64,
    /// Time of its last change, in seconds and nanoseconds; zeros until a scan has finished.
    pub changed: (i64, u64),
    /// Pages found by the last scan or inserted since.
    pub pages: u64,
    /// Hash of its alignment.
    pub alignment_hash: u64,
    /// Path of the file.
    pub path: PathBuf,
}

impl SourceRecord {
    /// Encodes the record with its counters at zero; none if the path is too long.
    pub fn encode(&self) -> Option<[u8; RECORD_SIZE]> {
        let path = self.path.as_os_str().as_encoded_bytes();
        let mut bytes = [0; RECORD_SIZE];
        bytes.get_mut(PATH_AT..PATH_AT + path.len())?.copy_from_slice(path);
        bytes[24..28].copy_from_slice(&self.kind.code().to_le_bytes());
        bytes[28..32].copy_from_slice(&(path.len() as u32).to_le_bytes());
        let numbers = [
            self.identity.0,
            self.identity.1,
            self.size,
            self.changed.0 as u64,
            self.changed.1,
            self.pages,
            self.alignment_hash,
        ];
        for (i, number) in numbers.iter().enumerate() {
            bytes[32 + i * 8..40 + i * 8].copy_from_slice(&number.to_le_bytes());
        }
        let sum = xxh3_64(&bytes[RECORD_BODY_AT..]);
        bytes[RECORD_SUM_AT..RECORD_BODY_AT].copy_from_slice(&sum.to_le_bytes());
        Some(bytes)
    }

    /// Decodes a record; none if it is free, torn or damaged.
    pub fn decode(bytes: &[u8; RECORD_SIZE]) -> Option<Self> {
        let sum = u64::from_le_bytes(field(bytes, RECORD_SUM_AT));
        if sum != xxh3_64(&bytes[RECORD_BODY_AT..]) {
            return None;
        }
        let kind = SourceKind::from_code(u32::from_le_bytes(field(bytes, 24)))?;
        let length = u32::from_le_bytes(field(bytes, 28)) as usize;
        let (path, rest) = bytes[PATH_AT..].split_at_checked(length)?;
        if path.is_empty() || rest.iter().any(|byte| *byte != 0) || bytes[88..PATH_AT].iter().any(|b| *b != 0)
        {
            return None;
        }
        let number = |at: usize| u64::from_le_bytes(field(bytes, at));
        Some(Self {
            kind,
            identity: (number(32), number(40)),
            size: number(48),
            changed: (number(56) as i64, number(64)),
            pages: number(72),
            alignment_hash: number(80),
            path: OsString::from_vec(path.to_vec()).into(),
        })
    }
}

/// Reads `N` bytes at `at`; both are constants within `bytes`.
fn field<const N: usize>(bytes: &[u8], at: usize) -> [u8; N] {
    std::array::from_fn(|i| bytes[at + i])
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn no_flipped_bit_of_a_header_goes_unseen() {
        let header = Header { id: [7; 16], geometry: Geometry::for_pages(100_000) };
        let bytes = header.encode();
        assert_eq!(Header::decode(&bytes), Ok(header));
        for bit in 0..HEADER_SIZE * 8 {
            let mut damaged = bytes;
            damaged[bit / 8] ^= 1 << (bit % 8);
            assert!(Header::decode(&damaged).is_err(), "bit {bit}");
        }
    }

    #[test]
    fn no_flipped_bit_of_a_record_goes_unseen_beyond_its_counters() {
        let record = SourceRecord {
            kind: SourceKind::Qcow2,
            identity: (1, 2),
            size: 3,
            changed: (-4, 5),
            pages: 6,
            alignment_hash: 7,
            path: "/images/debian.qcow2".into(),
        };
        let bytes = record.encode().unwrap();
        assert_eq!(SourceRecord::decode(&bytes), Some(record));
        for bit in 0..RECORD_SIZE * 8 {
            let mut damaged = bytes;
            damaged[bit / 8] ^= 1 << (bit % 8);
            assert_eq!(SourceRecord::decode(&damaged).is_none(), bit >= RECORD_SUM_AT * 8, "bit {bit}");
        }
        assert_eq!(SourceRecord::decode(&[0; RECORD_SIZE]), None, "a free slot");
    }

    #[test]
    fn a_header_with_a_right_checksum_and_wrong_fields_is_refused() {
        let header = Header { id: [7; 16], geometry: Geometry::for_pages(1) };
        let with = |at: usize, value: u64| {
            let mut bytes = header.encode();
            bytes[at..at + 8].copy_from_slice(&value.to_le_bytes());
            let sum = xxh3_64(&bytes[..CHECKED]);
            bytes[CHECKED..].copy_from_slice(&sum.to_le_bytes());
            Header::decode(&bytes)
        };
        for (at, value) in [(32, 0), (32, u64::MAX), (40, 0), (40, 5), (40, 1 << 20), (48, 1)] {
            assert!(matches!(with(at, value), Err(HeaderError::Field { .. })), "{value} at {at}");
        }
        assert!(matches!(with(8, 2), Err(HeaderError::Version { found: 2 })));
    }

    #[test]
    fn a_table_costs_at_most_twenty_bytes_a_page_it_is_made_for() {
        for pages in [1 << 16, 1 << 20, 1 << 24, 1 << 30] {
            let size = Geometry::for_pages(pages).file_size();
            assert!(size <= pages * 1975 / 100, "{size} bytes for {pages} pages");
        }
        for bytes in [16 << 20, 1 << 30] {
            let size = Geometry::for_file_size(bytes).file_size();
            assert!(size.abs_diff(bytes) < bytes / 20, "{size} is not about {bytes}");
        }
        assert!(Geometry::for_pages(u64::MAX).file_size() < 1 << 41);
    }
}
