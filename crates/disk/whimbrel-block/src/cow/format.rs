//! Format of an overlay's two bitmap files: the header. Pure: bytes in, fields out. `docs/formats/overlay.md`
//! has the details.
//!
//! ```text
//! offset  size  field
//!      0     8  magic, "WHIMOVLY"
//!      8     4  format version, 1, or 2 if the data is encrypted
//!     12     4  form: 1 durable, 2 live
//!     16    16  overlay id, random; ties the live file to its overlay
//!     32    16  boot id of the kernel that made a live file; zeros in a durable one
//!     48     8  size of the device in bytes, a multiple of 4096
//!     56     4  page size, 4096
//!     60     4  zeros
//!     64    32  id of the base, chosen by the caller (a digest)
//!     96    16  version 2: check of the key, derived from it (zeros in version 1)
//!    112  3976  zeros
//!   4088     8  XXH3-64 of bytes 0..4088
//!   4096     -  bitmap: bit p % 64 of word p / 64 is set if the overlay has page p
//! ```
//!
//! All numbers are little-endian, words of the bitmap 64 bits. The header is written once, before the file
//! gets its name, and never changes; for a disk that becomes larger, the file is replaced. The bitmap has no
//! checksum and needs none: bits only ever go from 0 to 1, and a bit is written to the durable file after its
//! page is synced, so any mix of old and new sectors is a valid bitmap.

use whimbrel_core::{Digest, PAGE_SIZE};
use xxhash_rust::xxh3::xxh3_64;

/// Bytes of the header; the bitmap follows.
pub(super) const HEADER_SIZE: usize = PAGE_SIZE;
const MAGIC: [u8; 8] = *b"WHIMOVLY";
const VERSION: u32 = 1;
const ENCRYPTED: u32 = 2;
const CHECKED: usize = HEADER_SIZE - 8;
/// 1 PiB, with a bitmap of 32 GiB; larger sizes are damage or an attack.
const MAX_DEVICE: u64 = 1 << 50;

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum BitmapKind {
    /// File beside the data; lists only synced pages.
    Durable,
    /// File in memory; lists every acknowledged page while this kernel runs.
    Live {
        /// Boot id of the kernel.
        boot: [u8; 16],
    },
}

#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Header {
    pub(super) kind: BitmapKind,
    pub(super) id: [u8; 16],
    pub(super) size: u64,
    pub(super) base: Digest,
    /// Check of the key with which the data is encrypted, if it is.
    pub(super) key_check: Option<[u8; 16]>,
}

/// Reasons to reject a header.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
pub enum HeaderError {
    /// The file is no bitmap of an overlay.
    #[error("not an overlay bitmap")]
    Magic,
    /// A newer version of the program wrote the file.
    #[error("overlay format {found} is unknown; this version reads formats up to {ENCRYPTED}")]
    Version {
        /// Version that was found.
        found: u32,
    },
    /// The checksum does not match.
    #[error("the header is damaged")]
    Checksum,
    /// The checksum matches, but a field is invalid.
    #[error("the header has an invalid {field}")]
    Field {
        /// Name of the field.
        field: &'static str,
    },
}

impl Header {
    /// Length of the complete file: header and bitmap.
    pub(super) fn file_len(&self) -> u64 {
        HEADER_SIZE as u64 + (self.size / PAGE_SIZE as u64).div_ceil(64) * 8
    }

    pub(super) fn encode(&self) -> [u8; HEADER_SIZE] {
        let mut bytes = [0; HEADER_SIZE];
        let (form, boot) = match self.kind {
            BitmapKind::Durable => (1u32, [0; 16]),
            BitmapKind::Live { boot } => (2, boot),
        };
        bytes[..8].copy_from_slice(&MAGIC);
        let version = if self.key_check.is_some() { ENCRYPTED } else { VERSION };
        bytes[8..12].copy_from_slice(&version.to_le_bytes());
        bytes[12..16].copy_from_slice(&form.to_le_bytes());
        bytes[16..32].copy_from_slice(&self.id);
        bytes[32..48].copy_from_slice(&boot);
        bytes[48..56].copy_from_slice(&self.size.to_le_bytes());
        bytes[56..60].copy_from_slice(&(PAGE_SIZE as u32).to_le_bytes());
        bytes[64..96].copy_from_slice(self.base.as_bytes());
        bytes[96..112].copy_from_slice(&self.key_check.unwrap_or_default());
        let sum = xxh3_64(&bytes[..CHECKED]);
        bytes[CHECKED..].copy_from_slice(&sum.to_le_bytes());
        bytes
    }

    pub(super) fn decode(bytes: &[u8; HEADER_SIZE]) -> Result<Self, HeaderError> {
        let number = |at: usize| u32::from_le_bytes(field(bytes, at));
        if bytes[..8] != MAGIC {
            return Err(HeaderError::Magic);
        }
        if ![VERSION, ENCRYPTED].contains(&number(8)) {
            return Err(HeaderError::Version { found: number(8) });
        }
        let key_check = (number(8) == ENCRYPTED).then(|| field(bytes, 96));
        if u64::from_le_bytes(field(bytes, CHECKED)) != xxh3_64(&bytes[..CHECKED]) {
            return Err(HeaderError::Checksum);
        }
        let form = match number(12) {
            1 => BitmapKind::Durable,
            2 => BitmapKind::Live { boot: field(bytes, 32) },
            _ => return Err(HeaderError::Field { field: "form" }),
        };
        let size = u64::from_le_bytes(field(bytes, 48));
        if !size.is_multiple_of(PAGE_SIZE as u64) || size > MAX_DEVICE {
            return Err(HeaderError::Field { field: "size" });
        }
        if number(56) != PAGE_SIZE as u32 {
            return Err(HeaderError::Field { field: "page size" });
        }
        Ok(Self { kind: form, id: field(bytes, 16), size, base: Digest(field(bytes, 64)), key_check })
    }
}

/// Reads `N` bytes at `at`; both are constants within the header.
fn field<const N: usize>(bytes: &[u8; HEADER_SIZE], at: usize) -> [u8; N] {
    std::array::from_fn(|i| bytes[at + i])
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn no_flipped_bit_goes_unseen() {
        let header = Header {
            kind: BitmapKind::Live { boot: [3; 16] },
            id: [7; 16],
            size: 40960,
            base: Digest::of(b"base"),
            key_check: Some([5; 16]),
        };
        let bytes = header.encode();
        assert_eq!(Header::decode(&bytes), Ok(header));
        for bit in 0..HEADER_SIZE * 8 {
            let mut damaged = bytes;
            damaged[bit / 8] ^= 1 << (bit % 8);
            assert!(Header::decode(&damaged).is_err(), "bit {bit}");
        }
    }
}
