//! How pages of a migration are encoded: zero pages as ranges, the others as one zstd frame, where a page that
//! the target holds an older version of travels as its difference to that version.
//!
//! A batch is pages of one array; the header lists which pages are what, the payload is the frame. The
//! difference is a plain XOR: a page of which a few words changed becomes almost all zeros, which zstd reduces
//! to tens of bytes at several GB/s. Pure functions over bytes; everything is bounded before it is decoded.

use serde::{Deserialize, Serialize};
use whimbrel_core::{PAGE_SIZE, PageRun};

/// Most pages in a batch.
pub const BATCH_PAGES_MAX: u64 = 256;
/// Most runs in a batch: each page a run of its own.
const RUNS_MAX: usize = BATCH_PAGES_MAX as usize;

/// Pages of one array.
#[derive(Debug, Clone, PartialEq, Eq, Default, Serialize, Deserialize)]
pub struct BatchHeader {
    /// Which array, as an index into the offer's arrays.
    pub array: u32,
    /// Pages that are zero now.
    pub zero: Vec<PageRun>,
    /// Pages whose content is in the payload, in this order.
    pub whole: Vec<PageRun>,
    /// Pages whose difference to the version sent last follows in the payload, in this order.
    pub delta: Vec<PageRun>,
}

/// What is wrong with a batch that came in.
#[derive(Debug, thiserror::Error, PartialEq, Eq)]
pub enum BatchError {
    /// More pages or runs than a batch may have.
    #[error("the batch lists {pages} pages in {runs} runs")]
    TooLarge {
        /// Pages listed.
        pages: u64,
        /// Runs listed.
        runs: usize,
    },
    /// A page lies outside the array.
    #[error("page {page} is outside an array of {len} pages")]
    OutOfRange {
        /// The page.
        page: u64,
        /// The array's length.
        len: u64,
    },
    /// The payload does not decode to the pages that the header lists.
    #[error("the payload does not hold the {expected} bytes that the header lists")]
    Payload {
        /// Bytes the header lists.
        expected: usize,
    },
}

impl BatchHeader {
    /// Refuses a header that a sound peer would not send for an array of `len` pages.
    pub fn check(&self, len: u64) -> Result<(), BatchError> {
        let lists = [&self.zero, &self.whole, &self.delta];
        let runs = lists.iter().map(|list| list.len()).sum();
        let all = || lists.iter().flat_map(|list| list.iter());
        let pages = all().fold(0u64, |sum, run| sum.saturating_add(run.len));
        if pages > BATCH_PAGES_MAX || runs > RUNS_MAX {
            return Err(BatchError::TooLarge { pages, runs });
        }
        match all().find(|run| run.start.checked_add(run.len).is_none_or(|end| end > len)) {
            Some(run) => Err(BatchError::OutOfRange { page: run.start, len }),
            None => Ok(()),
        }
    }

    fn payload_bytes(&self) -> usize {
        self.whole.iter().chain(&self.delta).map(PageRun::bytes).sum()
    }
}

/// Adds `page` to the end of `runs`, joining it to the last run where it follows.
fn push(runs: &mut Vec<PageRun>, page: u64) {
    match runs.last_mut() {
        Some(last) if last.end() == page => last.len += 1,
        _ => runs.push(PageRun::new(page, 1)),
    }
}

/// Makes batches. Keeps the compressor's context, which costs more to make than a batch costs to compress.
pub struct Encoder {
    zstd: zstd::bulk::Compressor<'static>,
    whole: Vec<u8>,
    delta: Vec<u8>,
}

impl Encoder {
    /// An encoder at zstd `level`.
    pub fn new(level: i32) -> std::io::Result<Self> {
        Ok(Self { zstd: zstd::bulk::Compressor::new(level)?, whole: Vec::new(), delta: Vec::new() })
    }

    /// Encodes the pages of `run`; `older(page)` is the version that the target holds, where known.
    pub fn encode<'a>(
        &mut self,
        array: u32,
        run: PageRun,
        data: &[u8],
        older: impl Fn(u64) -> Option<&'a [u8]>,
    ) -> std::io::Result<(BatchHeader, Vec<u8>)> {
        let mut header = BatchHeader { array, ..BatchHeader::default() };
        self.whole.clear();
        self.delta.clear();
        for (page, content) in run.pages().zip(data.chunks_exact(PAGE_SIZE)) {
            if whimbrel_core::is_zero(content) {
                push(&mut header.zero, page);
            } else if let Some(older) = older(page) {
                push(&mut header.delta, page);
                self.delta.extend(content.iter().zip(older).map(|(now, then)| now ^ then));
            } else {
                push(&mut header.whole, page);
                self.whole.extend_from_slice(content);
            }
        }
        self.whole.extend_from_slice(&self.delta);
        let payload = if self.whole.is_empty() { Vec::new() } else { self.zstd.compress(&self.whole)? };
        Ok((header, payload))
    }
}

/// Opens batches.
pub struct Decoder {
    zstd: zstd::bulk::Decompressor<'static>,
}

impl Decoder {
    /// A decoder.
    pub fn new() -> std::io::Result<Self> {
        Ok(Self { zstd: zstd::bulk::Decompressor::new()? })
    }

    /// The raw bytes of a payload: the whole pages, then the differences. Check the header first.
    pub fn decode(&mut self, header: &BatchHeader, payload: &[u8]) -> Result<Vec<u8>, BatchError> {
        let expected = header.payload_bytes();
        if expected == 0 && payload.is_empty() {
            return Ok(Vec::new());
        }
        let raw = self.zstd.decompress(payload, expected).map_err(|_| BatchError::Payload { expected })?;
        if raw.len() == expected { Ok(raw) } else { Err(BatchError::Payload { expected }) }
    }
}

/// Turns a difference into the page it stands for, given the older version in `page`.
pub fn apply_delta(page: &mut [u8], delta: &[u8]) {
    page.iter_mut().zip(delta).for_each(|(byte, delta)| *byte ^= delta);
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;
    use std::collections::BTreeMap;

    fn page(kind: u8, seed: u64) -> Vec<u8> {
        match kind % 3 {
            0 => vec![0; PAGE_SIZE],
            1 => seed.to_le_bytes().repeat(PAGE_SIZE / 8),
            _ => (0..PAGE_SIZE as u64).map(|i| (i.wrapping_mul(seed | 1) >> 11) as u8).collect(),
        }
    }

    proptest! {
        #[test]
        fn what_arrives_is_what_was_sent(
            start in 0..50u64, kinds in prop::collection::vec((0..3u8, any::<u64>(), any::<bool>()), 1..40),
        ) {
            let run = PageRun::new(start, kinds.len() as u64);
            let data: Vec<u8> = kinds.iter().flat_map(|(kind, seed, _)| page(*kind, *seed)).collect();
            let old: BTreeMap<u64, Vec<u8>> = run.pages().zip(&kinds)
                .filter(|(_, k)| k.2).map(|(p, k)| (p, page(k.0.wrapping_add(1), k.1))).collect();
            let mut encoder = Encoder::new(1).unwrap();
            let (header, payload) = encoder.encode(3, run, &data, |p| old.get(&p).map(|v| &v[..])).unwrap();
            header.check(run.end()).unwrap();
            let raw = Decoder::new().unwrap().decode(&header, &payload).unwrap();
            let mut got: BTreeMap<u64, Vec<u8>> = BTreeMap::new();
            let mut pieces = raw.chunks_exact(PAGE_SIZE);
            for p in header.whole.iter().flat_map(|r| r.pages()) { got.insert(p, pieces.next().unwrap().to_vec()); }
            for p in header.delta.iter().flat_map(|r| r.pages()) {
                let mut page = old[&p].clone();
                apply_delta(&mut page, pieces.next().unwrap());
                got.insert(p, page);
            }
            for p in header.zero.iter().flat_map(|r| r.pages()) { got.insert(p, vec![0; PAGE_SIZE]); }
            prop_assert_eq!(got.into_values().flatten().collect::<Vec<_>>(), data);
        }

        #[test]
        fn garbage_is_refused_without_allocating_for_it(starts in prop::collection::vec((any::<u64>(), any::<u64>()), 0..5), payload: Vec<u8>) {
            let runs: Vec<_> = starts.iter().map(|(s, l)| PageRun::new(*s, *l)).collect();
            let header = BatchHeader { array: 0, zero: vec![], whole: runs, delta: vec![] };
            if header.check(1000).is_ok() {
                let _ = Decoder::new().unwrap().decode(&header, &payload);
            }
        }
    }
}
