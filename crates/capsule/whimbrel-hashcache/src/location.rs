//! Location of a page, and its packed form: one word of the table. Pure.
//!
//! ```text
//! bits 48..64  source number, from 1
//! bits  8..48  byte offset in the file, in units of 512 bytes
//! bits  0..8   use count
//! ```
//!
//! A word of zero is no location. Units are sectors, not pages, because a partition and the pages of its
//! files may begin at an odd sector.

/// Number of a source file: its index in the table of sources.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct SourceId(pub(crate) u16);

impl SourceId {
    /// Number of the source, from 1.
    pub fn number(self) -> u16 {
        self.0
    }
}

/// Location of a page according to the table; the content must be checked before use.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct Location {
    /// Source file of the page.
    pub source: SourceId,
    /// Byte offset in that file, a multiple of 512.
    pub offset: u64,
}

/// Bytes of an offset unit.
pub(crate) const UNIT: u64 = 512;
const OFFSET_BITS: u32 = 40;
/// End of the offsets that fit: 512 TiB.
pub(crate) const MAX_OFFSET: u64 = UNIT << OFFSET_BITS;

/// Word of the table, used or empty.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct PackedLocation(pub(crate) u64);

impl PackedLocation {
    /// Packs a location with a use count of zero; none if the offset does not fit.
    pub(crate) fn new(location: Location) -> Option<Self> {
        let Location { source, offset } = location;
        let fits = source.0 != 0 && offset < MAX_OFFSET && offset.is_multiple_of(UNIT);
        fits.then_some(Self(u64::from(source.0) << 48 | (offset / UNIT) << 8))
    }

    pub(crate) fn is_none(self) -> bool {
        // A damaged word without a source counts as empty.
        self.0 >> 48 == 0
    }

    pub(crate) fn source(self) -> SourceId {
        SourceId((self.0 >> 48) as u16)
    }

    pub(crate) fn location(self) -> Location {
        let offset = (self.0 >> 8 & ((1 << OFFSET_BITS) - 1)) * UNIT;
        Location { source: self.source(), offset }
    }

    pub(crate) fn uses(self) -> u8 {
        self.0 as u8
    }

    /// Copy with another use count.
    pub(crate) fn with_uses(self, uses: u8) -> Self {
        Self(self.0 & !0xff | u64::from(uses))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_packed_form_keeps_every_field_at_its_edges() {
        for source in [1, 2, 0x8000, u16::MAX] {
            for offset in [0, 512, 4096, 63 * 512, MAX_OFFSET - 512] {
                let location = Location { source: SourceId(source), offset };
                let place = PackedLocation::new(location).unwrap();
                assert!(!place.is_none());
                for uses in [0, 1, 255] {
                    let used = place.with_uses(uses);
                    assert_eq!((used.location(), used.uses()), (location, uses));
                }
            }
        }
    }

    #[test]
    fn what_cannot_be_named_is_refused() {
        let at = |source, offset| PackedLocation::new(Location { source: SourceId(source), offset });
        assert!(at(0, 0).is_none() && at(1, MAX_OFFSET).is_none() && at(1, 100).is_none());
    }
}
