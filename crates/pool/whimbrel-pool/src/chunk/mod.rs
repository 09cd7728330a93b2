//! Chunking: splitting a stream of bytes into chunks. Pure.
//!
//! [`Chunking::cut`] gets the bytes since the last boundary and returns the next one. A boundary depends only
//! on the bytes of its chunk, so equal content is split equally at any offset. The boundaries are part of the
//! stored format: the golden vectors in the tests fail when they change.

mod fastcdc;

use crate::{
    policy::PolicyError,
    protocol::{MAX_CHUNK, MIN_CHUNK},
};
use serde::{Deserialize, Serialize};
use whimbrel_core::PAGE_SIZE;
use xxhash_rust::xxh3::xxh3_64;

/// A method of splitting files into chunks.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase", deny_unknown_fields)]
pub enum Chunking {
    /// FsCH of the paper: chunks of a fixed size.
    Fixed {
        /// Bytes of a chunk.
        size: u32,
    },
    /// FastCDC with a gear hash, the default.
    Content {
        /// Average bytes of a chunk; every chunk has between a quarter and four times that.
        average: u32,
    },
    /// CbCH of the paper, which version 0.1 offered: still read in old policies, cut as by the default.
    Window {
        /// Bytes of the window, the paper's m.
        window: u32,
        /// Number of zero bits, the paper's k.
        bits: u8,
        /// Bytes by which the window advances, the paper's p: 1 is its overlap, m its no-overlap.
        advance: u32,
    },
    /// Chunking for images of memory: boundaries only between pages, after a page chosen by its hash.
    Pages {
        /// Average pages of a chunk. With 1 every page is a chunk, so pages are found in any order.
        average: u32,
    },
}

impl Default for Chunking {
    fn default() -> Self {
        Self::Content { average: 256 << 10 }
    }
}

impl Chunking {
    /// Refuses parameters outside their limits.
    pub fn check(&self) -> Result<(), PolicyError> {
        let within = |field, limits, found: u32, range: std::ops::RangeInclusive<usize>| {
            let bad = PolicyError { field, limits, found: found.to_string() };
            if range.contains(&(found as usize)) { Ok(()) } else { Err(bad) }
        };
        match *self {
            Self::Fixed { size } => within("the chunk size", "1 KiB to 4 MiB", size, MIN_CHUNK..=MAX_CHUNK),
            Self::Content { average } => {
                within("the average chunk", "4 KiB to 1 MiB", average, 4 << 10..=MAX_CHUNK / 4)
            }
            Self::Window { .. } => Ok(()),
            Self::Pages { average } => within("the average chunk", "1 to 256 pages", average, 1..=256),
        }
    }

    /// Length of the longest possible chunk.
    pub fn longest(&self) -> usize {
        match *self {
            Self::Fixed { size } => size as usize,
            Self::Content { average } => average as usize * 4,
            Self::Window { .. } => Self::default().longest(),
            Self::Pages { average: 1 } => PAGE_SIZE,
            Self::Pages { average } => average as usize * 4 * PAGE_SIZE,
        }
    }

    /// Length of the chunk at the start of `data`: [`Chunking::longest`] bytes or more, or all that is left.
    pub fn cut(&self, data: &[u8]) -> usize {
        let most = data.len().min(self.longest());
        let data = &data[..most];
        match *self {
            Self::Fixed { .. } | Self::Pages { average: 1 } => most,
            Self::Content { average } => fastcdc::cut(data, average as usize),
            Self::Window { .. } => Self::default().cut(data),
            Self::Pages { average } => cut_pages(data, average),
        }
    }
}

/// Ends the chunk at the first page whose hash is a multiple of the average, from a quarter of it on.
fn cut_pages(data: &[u8], average: u32) -> usize {
    let least = (average / 4).max(1) as usize;
    let (pages, _) = data.as_chunks::<PAGE_SIZE>();
    let ends = |(at, page): &(usize, &[u8; PAGE_SIZE])| {
        at + 1 >= least && xxh3_64(*page).is_multiple_of(u64::from(average))
    };
    pages.iter().enumerate().find(ends).map_or(data.len(), |(at, _)| (at + 1) * PAGE_SIZE)
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;
    use whimbrel_core::Digest;

    /// Bytes that look random and never change.
    fn noise(len: usize) -> Vec<u8> {
        let mut state = 0x9e37_79b9_7f4a_7c15_u64;
        let mut next = || {
            state ^= state << 13;
            state ^= state >> 7;
            state ^= state << 17;
            (state >> 24) as u8
        };
        (0..len).map(|_| next()).collect()
    }

    fn chunks(cutting: Chunking, mut data: &[u8]) -> Vec<&[u8]> {
        let mut out = Vec::new();
        while !data.is_empty() {
            let (chunk, rest) = data.split_at(cutting.cut(data));
            out.push(chunk);
            data = rest;
        }
        out
    }

    const WAYS: [Chunking; 4] = [
        Chunking::Fixed { size: 1 << 16 },
        Chunking::Content { average: 16 << 10 },
        Chunking::Pages { average: 1 },
        Chunking::Pages { average: 8 },
    ];

    #[test]
    fn cut_points_never_change() {
        let data = noise(2 << 20);
        let found: Vec<(usize, String)> = WAYS
            .iter()
            .map(|way| {
                let lengths: Vec<u8> =
                    chunks(*way, &data).iter().flat_map(|chunk| (chunk.len() as u32).to_le_bytes()).collect();
                (lengths.len() / 4, Digest::of(&lengths).short())
            })
            .collect();
        let golden =
            [(32, "b2cf302b5c38"), (114, "f9babe00e708"), (512, "ad8afab8288d"), (63, "12e1e23eb004")];
        assert_eq!(found, golden.map(|(count, digest)| (count, digest.to_owned())));
    }

    #[test]
    fn a_policy_of_version_0_1_with_windows_opens_and_cuts_as_by_the_default() {
        let old: Chunking =
            serde_json::from_str(r#"{"window":{"window":20,"bits":14,"advance":1}}"#).unwrap();
        let data = noise(2 << 20);
        assert_eq!(chunks(old, &data), chunks(Chunking::default(), &data));
    }

    #[test]
    fn an_insertion_changes_few_chunks_of_content_and_all_of_fixed() {
        let data = noise(4 << 20);
        let mut later = data.clone();
        later.splice(1000..1000, *b"an insertion");
        let shared = |way: Chunking| {
            let before: std::collections::HashSet<_> = chunks(way, &data).into_iter().collect();
            let after = chunks(way, &later);
            let same: usize = after.iter().filter(|chunk| before.contains(*chunk)).map(|c| c.len()).sum();
            same * 100 / later.len()
        };
        assert!(shared(Chunking::Content { average: 16 << 10 }) > 90);
        assert_eq!(shared(Chunking::Fixed { size: 1 << 16 }), 0);
    }

    #[test]
    fn pages_in_another_order_are_found_when_each_is_a_chunk() {
        let data = noise(1 << 20);
        let mut pages: Vec<&[u8]> = data.chunks(PAGE_SIZE).collect();
        pages.reverse();
        let turned = pages.concat();
        let before: std::collections::HashSet<_> =
            chunks(Chunking::Pages { average: 1 }, &data).into_iter().collect();
        assert!(chunks(Chunking::Pages { average: 1 }, &turned).iter().all(|page| before.contains(page)));
    }

    #[test]
    fn the_average_is_about_what_was_asked_for() {
        let data = noise(8 << 20);
        let average = |way| data.len() / chunks(way, &data).len();
        assert!((48 << 10..100 << 10).contains(&average(Chunking::Content { average: 64 << 10 })));
        assert!((4..=20).contains(&(average(Chunking::Pages { average: 8 }) / PAGE_SIZE)));
    }

    proptest! {
        #[test]
        fn chunks_are_the_data_and_within_bounds(len in 0..300_000_usize, way in prop::sample::select(&WAYS[..])) {
            let data = noise(len);
            let cut = chunks(way, &data);
            prop_assert!(cut.concat() == data);
            prop_assert!(cut.iter().all(|chunk| !chunk.is_empty() && chunk.len() <= way.longest()));
            if let Chunking::Content { average } = way {
                let inner = &cut[..cut.len().saturating_sub(1)];
                prop_assert!(inner.iter().all(|chunk| chunk.len() >= average as usize / 4));
            }
        }
    }
}
