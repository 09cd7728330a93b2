//! Holes on the wire: start and end of each, as pairs of little-endian numbers of 8 bytes.
//!
//! Pure functions over bytes; a list that is out of order or longer than any server sends is refused.

use super::pages::PagesError;
use std::ops::Range;

/// Most holes in one reply.
pub const MAX_HOLES: usize = 4096;

/// Encodes holes for the wire.
pub fn pack_holes(holes: &[Range<u64>]) -> Vec<u8> {
    holes.iter().flat_map(|hole| [hole.start, hole.end]).flat_map(u64::to_le_bytes).collect()
}

/// Decodes holes: none is empty, and each begins after the end of the one before.
pub fn unpack_holes(bytes: &[u8]) -> Result<Vec<Range<u64>>, PagesError> {
    let limit = MAX_HOLES * 16;
    if bytes.len() > limit {
        return Err(PagesError::TooLong { len: bytes.len() as u64, limit: limit as u64 });
    }
    let (pairs, odd) = bytes.as_chunks::<16>();
    let number = |bytes: &[u8]| bytes.iter().rev().fold(0, |number, byte| number << 8 | u64::from(*byte));
    let holes: Vec<_> = pairs.iter().map(|pair| number(&pair[..8])..number(&pair[8..])).collect();
    let in_order = holes.windows(2).all(|two| two[0].end < two[1].start);
    let sound = odd.is_empty() && in_order && holes.iter().all(|hole| hole.start < hole.end);
    if sound { Ok(holes) } else { Err(PagesError::Shape) }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    proptest! {
        #[test]
        fn holes_come_out_as_they_went_in_and_garbage_is_refused(
            runs in proptest::collection::vec((1u64..1 << 40, 1u64..1 << 40), 0..20), bytes in proptest::collection::vec(any::<u8>(), 0..100)) {
            let mut at = 0;
            let holes: Vec<_> = runs.iter().map(|(gap, len)| { let hole = at + gap..at + gap + len; at = hole.end; hole }).collect();
            prop_assert_eq!(unpack_holes(&pack_holes(&holes)), Ok(holes));
            if let Ok(holes) = unpack_holes(&bytes) { prop_assert_eq!(pack_holes(&holes), bytes); }
        }
    }

    #[test]
    fn what_overlaps_is_empty_or_runs_back_is_refused() {
        for bad in [&[(5, 9), (9, 12)][..], &[(5, 5)], &[(9, 5)], &[(20, 30), (1, 2)]] {
            let bad: Vec<_> = bad.iter().map(|(start, end)| *start..*end).collect();
            assert_eq!(unpack_holes(&pack_holes(&bad)), Err(PagesError::Shape), "{bad:?}");
        }
        let many: Vec<_> = (0..=MAX_HOLES as u64).map(|number| number * 2..number * 2 + 1).collect();
        assert!(unpack_holes(&pack_holes(&many[1..])).is_ok() && unpack_holes(&pack_holes(&many)).is_err());
    }
}
