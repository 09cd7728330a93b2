//! Fetch reply: the encoding of fetched pages. Zero pages are runs, all others one zstd frame. Pure functions
//! over bytes.

use super::messages::{FETCH_PAGES_MAX, Fetched};
use crate::page_batch::push;
use whimbrel_core::{PAGE_SIZE, PageRun};
use whimbrel_image::compression::{self, CompressionError, Settings};

/// Level that keeps up with several Gbit/s on one core.
const ZSTD_LEVEL: i32 = 1;

/// Error of a fetch or its reply.
#[derive(Debug, thiserror::Error)]
pub enum FetchReplyError {
    /// The fetch has too many pages or runs, or none.
    #[error("one fetch requests {pages} pages in {runs} runs")]
    TooLarge {
        /// Number of pages.
        pages: u64,
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
    /// The reply does not hold the requested pages.
    #[error("the reply does not hold the requested pages")]
    Reply,
    /// The pages could not be compressed.
    #[error("cannot compress the pages")]
    Compress {
        /// Cause reported by the compressor.
        source: CompressionError,
    },
}

pub(crate) fn count(runs: &[PageRun]) -> u64 {
    runs.iter().fold(0, |sum, run| sum.saturating_add(run.len))
}

/// Refuses a fetch that a correct target never sends for an array of `len` pages.
pub(crate) fn check(runs: &[PageRun], len: u64) -> Result<(), FetchReplyError> {
    let pages = count(runs);
    if pages == 0 || pages > FETCH_PAGES_MAX || runs.len() as u64 > FETCH_PAGES_MAX {
        return Err(FetchReplyError::TooLarge { pages, runs: runs.len() });
    }
    match runs.iter().find(|run| run.start.checked_add(run.len).is_none_or(|end| end > len)) {
        Some(run) => Err(FetchReplyError::OutOfRange { page: run.start, len }),
        None => Ok(()),
    }
}

/// Encodes the reply for the pages of `runs`, whose concatenated content is `data`.
pub(crate) fn encode(runs: &[PageRun], data: &[u8]) -> Result<(Fetched, Vec<u8>), FetchReplyError> {
    let mut fetched = Fetched { zero: Vec::new() };
    let mut rest = Vec::with_capacity(data.len());
    let pages = runs.iter().flat_map(PageRun::pages);
    for (page, content) in pages.zip(data.chunks_exact(PAGE_SIZE)) {
        match whimbrel_core::is_zero(content) {
            true => push(&mut fetched.zero, page),
            false => rest.extend_from_slice(content),
        }
    }
    if rest.is_empty() {
        return Ok((fetched, rest));
    }
    let payload = compression::compress(&rest, &[], Settings::level(ZSTD_LEVEL), Vec::new());
    Ok((fetched, payload.map_err(|source| FetchReplyError::Compress { source })?))
}

/// Decodes a reply into the concatenated content of the pages of `runs`.
pub(crate) fn decode(
    runs: &[PageRun],
    fetched: &Fetched,
    payload: &[u8],
) -> Result<Vec<u8>, FetchReplyError> {
    let (asked, zero) = (count(runs), count(&fetched.zero));
    let expected = asked.checked_sub(zero).ok_or(FetchReplyError::Reply)? as usize * PAGE_SIZE;
    let raw = match expected {
        0 if payload.is_empty() => Vec::new(),
        _ => compression::decompress_at_most(payload, &[], expected).map_err(|_| FetchReplyError::Reply)?,
    };
    if raw.len() != expected {
        return Err(FetchReplyError::Reply);
    }
    let mut data = vec![0; asked as usize * PAGE_SIZE];
    let mut rest = raw.chunks_exact(PAGE_SIZE);
    let mut zeros =
        fetched.zero.iter().flat_map(|run| run.start..run.start.saturating_add(run.len)).peekable();
    for (page, out) in runs.iter().flat_map(PageRun::pages).zip(data.chunks_exact_mut(PAGE_SIZE)) {
        if zeros.next_if_eq(&page).is_some() {
            continue;
        }
        out.copy_from_slice(rest.next().ok_or(FetchReplyError::Reply)?);
    }
    if rest.next().is_some() || zeros.next().is_some() { Err(FetchReplyError::Reply) } else { Ok(data) }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    proptest! {
        #[test]
        fn what_arrives_is_what_was_asked_for(kinds in prop::collection::vec((1..4u64, 0..3u8), 1..20)) {
            let (mut runs, mut data, mut at) = (Vec::new(), Vec::new(), 0);
            for (len, kind) in &kinds {
                runs.push(PageRun::new(at, *len));
                for page in at..at + len {
                    data.extend(match kind {
                        0 => vec![0; PAGE_SIZE],
                        _ => (0..PAGE_SIZE as u64).map(|i| (i.wrapping_mul(page + 3) >> kind) as u8).collect(),
                    });
                }
                at += len + u64::from(*kind);
            }
            check(&runs, at + 1).unwrap();
            let (fetched, payload) = encode(&runs, &data).unwrap();
            prop_assert!(decode(&runs, &fetched, &payload).unwrap() == data);
        }

        #[test]
        fn replies_that_do_not_fit_are_refused(
            zero in prop::collection::vec((any::<u64>(), any::<u64>()), 0..4), payload: Vec<u8>,
        ) {
            let zero = zero.iter().map(|(start, len)| PageRun::new(*start, *len)).collect();
            let fetched = Fetched { zero };
            prop_assert!(decode(&[PageRun::new(3, 2)], &fetched, &payload).is_err());
        }
    }

    #[test]
    fn a_fetch_has_bounds() {
        let page = PageRun::new(0, 1);
        assert!(check(&[], 10).is_err() && check(&[PageRun::new(0, 257)], 1000).is_err());
        assert!(
            check(&vec![PageRun::new(3, 0); 300], 10).is_err() && check(&[PageRun::new(9, 2)], 10).is_err()
        );
        assert!(check(&[PageRun::new(u64::MAX, 2)], 10).is_err() && check(&[page], 1).is_ok());
    }
}
