//! Page set codec: sets of pages as compressed runs in postcard form, for messages and for the target's
//! record of missing pages (docs/formats/missing-pages.md). Damaged or too long sets, and pages outside the
//! array, are refused.

use serde::{Deserialize, Serialize};
use whimbrel_core::{PageRun, PageSet};
use whimbrel_image::compression::{self, CompressionError, Settings};

/// Most runs in one encoded part: at most 20 bytes each.
pub(crate) const RUNS_MAX: usize = 1 << 16;
const DECODED_MAX: usize = RUNS_MAX * 20 + 16;

/// Error of bytes that are no page set.
#[derive(Debug, thiserror::Error)]
pub enum PageSetCodecError {
    /// The bytes do not decompress to the size of a part.
    #[error("cannot decompress the page set")]
    Compressed {
        /// Cause reported by the compressor.
        source: CompressionError,
    },
    /// The decompressed bytes are not a list of runs.
    #[error("the page set is not a list of runs")]
    Runs {
        /// Cause reported by the decoder.
        source: postcard::Error,
    },
    /// The part has more runs than allowed.
    #[error("one part of the page set has {runs} runs")]
    TooMany {
        /// Number of runs.
        runs: usize,
    },
    /// A page is outside the array.
    #[error("page {page} is outside an array of {len} pages")]
    OutOfRange {
        /// Number of the page.
        page: u64,
        /// Length of the array in pages.
        len: u64,
    },
    /// The stored sets are truncated or damaged.
    #[error("the stored page sets are damaged")]
    Damaged,
}

pub(crate) fn encode_runs(runs: &[PageRun]) -> Result<Vec<u8>, PageSetCodecError> {
    let raw = postcard::to_stdvec(runs).map_err(|source| PageSetCodecError::Runs { source })?;
    compression::compress(&raw, &[], Settings::level(1), Vec::new())
        .map_err(|source| PageSetCodecError::Compressed { source })
}

/// Adds the runs in `bytes` to `set`.
pub(crate) fn decode_into(bytes: &[u8], set: &mut PageSet) -> Result<(), PageSetCodecError> {
    let raw = compression::decompress_at_most(bytes, &[], DECODED_MAX)
        .map_err(|source| PageSetCodecError::Compressed { source })?;
    let runs: Vec<PageRun> =
        postcard::from_bytes(&raw).map_err(|source| PageSetCodecError::Runs { source })?;
    if runs.len() > RUNS_MAX {
        return Err(PageSetCodecError::TooMany { runs: runs.len() });
    }
    for run in runs {
        if run.start.checked_add(run.len).is_none_or(|end| end > set.len()) {
            return Err(PageSetCodecError::OutOfRange { page: run.start, len: set.len() });
        }
        set.insert_run(run);
    }
    Ok(())
}

/// Encodes a set in parts that fit into messages; none for an empty set.
pub(crate) fn encode_parts(set: &PageSet) -> Result<Vec<Vec<u8>>, PageSetCodecError> {
    let runs: Vec<PageRun> = set.runs().collect();
    runs.chunks(RUNS_MAX).map(encode_runs).collect()
}

#[derive(Serialize, Deserialize)]
struct StoredSet {
    array: u32,
    pages: u64,
    /// Encoded parts, as in messages.
    pieces: Vec<Vec<u8>>,
}

const MAGIC: &[u8; 8] = b"WMBOWED1";
const DIGEST: usize = 32;

/// Encodes the sets of some arrays, each with its index, as the content of a file.
pub fn encode_sets(sets: &[(u32, PageSet)]) -> Result<Vec<u8>, PageSetCodecError> {
    let kept = |(array, set): &(u32, PageSet)| {
        Ok(StoredSet { array: *array, pages: set.len(), pieces: encode_parts(set)? })
    };
    let kept: Vec<StoredSet> = sets.iter().map(kept).collect::<Result<_, PageSetCodecError>>()?;
    let mut bytes = MAGIC.to_vec();
    bytes.extend(postcard::to_stdvec(&kept).map_err(|source| PageSetCodecError::Runs { source })?);
    let digest = whimbrel_core::Digest::of(&bytes);
    bytes.extend_from_slice(&digest.0);
    Ok(bytes)
}

/// Decodes the content of a file, for arrays of these lengths.
pub fn decode_sets(bytes: &[u8], lengths: &[u64]) -> Result<Vec<(u32, PageSet)>, PageSetCodecError> {
    let body = bytes
        .len()
        .checked_sub(DIGEST)
        .filter(|body| *body >= MAGIC.len())
        .ok_or(PageSetCodecError::Damaged)?;
    let (body, digest) = bytes.split_at(body);
    if whimbrel_core::Digest::of(body).0 != digest || !body.starts_with(MAGIC) {
        return Err(PageSetCodecError::Damaged);
    }
    let kept: Vec<StoredSet> =
        postcard::from_bytes(&body[MAGIC.len()..]).map_err(|source| PageSetCodecError::Runs { source })?;
    let set = |kept: StoredSet| {
        let len = lengths.get(kept.array as usize).copied();
        if len != Some(kept.pages) {
            return Err(PageSetCodecError::OutOfRange { page: kept.pages, len: len.unwrap_or(0) });
        }
        let mut set = PageSet::empty(kept.pages);
        kept.pieces.iter().try_for_each(|piece| decode_into(piece, &mut set))?;
        Ok((kept.array, set))
    };
    kept.into_iter().map(set).collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn set(runs: &[(u64, u64)], len: u64) -> PageSet {
        let mut set = PageSet::empty(len);
        for (start, run) in runs {
            let start = start % len;
            set.insert_run(PageRun::new(start, (*run).min(len - start)));
        }
        set
    }

    proptest! {
        #[test]
        fn sets_come_back_as_they_were(runs in prop::collection::vec((any::<u64>(), 1..50u64), 0..30), len in 1..2000u64) {
            let sets = [(0, set(&runs, len)), (3, PageSet::empty(7)), (1, PageSet::full(len))];
            let bytes = encode_sets(&sets).unwrap();
            prop_assert_eq!(decode_sets(&bytes, &[len, len, 3, 7]).unwrap(), sets);
            prop_assert!(decode_sets(&bytes, &[len, len, 3]).is_err() && decode_sets(&bytes, &[len, len, 3, 8]).is_err());
        }

        #[test]
        fn damage_is_seen(at in any::<prop::sample::Index>(), flip in 1..=255u8, cut in any::<prop::sample::Index>()) {
            let mut bytes = encode_sets(&[(0, set(&[(3, 5), (100, 7)], 500))]).unwrap();
            prop_assert!(decode_sets(&bytes[..cut.index(bytes.len())], &[500]).is_err());
            let at = at.index(bytes.len());
            bytes[at] ^= flip;
            prop_assert!(decode_sets(&bytes, &[500]).is_err());
        }

        #[test]
        fn garbage_is_no_message(bytes: Vec<u8>) {
            let _ = decode_into(&bytes, &mut PageSet::empty(100));
        }
    }

    #[test]
    fn pages_outside_are_refused_and_a_scattered_set_takes_several_messages() {
        let outside = encode_runs(&[PageRun::new(u64::MAX, 2)]).unwrap();
        assert!(matches!(
            decode_into(&outside, &mut PageSet::empty(9)),
            Err(PageSetCodecError::OutOfRange { .. })
        ));
        let many = encode_runs(&vec![PageRun::new(0, 9); RUNS_MAX + 1]).unwrap();
        assert!(matches!(decode_into(&many, &mut PageSet::empty(9)), Err(PageSetCodecError::TooMany { .. })));
        let mut scattered = PageSet::empty(400_000);
        for page in (0..400_000).step_by(2) {
            scattered.insert(page);
        }
        let pieces = encode_parts(&scattered).unwrap();
        assert_eq!(pieces.len(), 200_000_usize.div_ceil(RUNS_MAX));
        let mut back = PageSet::empty(400_000);
        pieces.iter().for_each(|piece| decode_into(piece, &mut back).unwrap());
        assert_eq!(back, scattered);
    }
}
