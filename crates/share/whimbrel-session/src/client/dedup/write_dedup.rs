//! Dedup of writes: over a slow link, a write-back does not send pages that the server already has in that
//! place.
//!
//! A file that is rewritten is mostly like its old content, and so are many blocks of a disk. The server is
//! asked for digests of what it has there (`DIGEST`), and equal pages are not sent. The write that sets the
//! file's size verifies that the file was not changed meanwhile. Programs truncate a file before they rewrite
//! it: if everything is written again, the truncation is left out
//! ([`BlockCache::avoid_truncation`](crate::cache::BlockCache::avoid_truncation)). Where nothing is equal the
//! query is wasted, so the likelihood is estimated for each file.

use super::{
    hit_estimate::{DigestQuery, HitEstimate, HitEstimates},
    read_dedup::DEFAULT_RATE,
};
use crate::client::{session::Core, write_back::file_write_back::FileWriteBack};
use crate::proto::{DigestCall, Digests, PAGE, Range, digest_of_page, is_zero, unpack_digests};
use bytes::Bytes;
use std::{
    collections::HashMap,
    sync::{
        Arc,
        atomic::{AtomicU64, Ordering},
    },
};
use tokio::task::JoinSet;
use whimbrel_core::Digest;
use whimbrel_wire::Code;

/// Bytes compared with one request.
const MAX_RANGE: u64 = 1 << 20;
/// Equal pages within a run below which it is not split: each piece costs a reply.
const SPLIT_PAGES: usize = 4;

#[derive(Default)]
pub(in crate::client) struct WriteComparison {
    estimates: HitEstimates,
    skipped_pages: AtomicU64,
}

impl WriteComparison {
    /// Number of pages that were not sent.
    pub(in crate::client) fn skipped_pages(&self) -> u64 {
        self.skipped_pages.load(Ordering::Relaxed)
    }
}

/// The server's pages by number: a digest, or none for zeros.
#[derive(Default)]
pub(in crate::client) struct ServerDigests(HashMap<u64, Option<Digest>>);

impl ServerDigests {
    fn has_page(&self, number: u64, page: &[u8]) -> bool {
        self.0.get(&number).is_some_and(|there| match there {
            None => is_zero(page),
            Some(digest) => !is_zero(page) && digest_of_page(page) == *digest,
        })
    }

    /// The parts of page-aligned runs to send, the number of pages left out, and the number compared.
    fn differing_runs(&self, runs: Vec<(u64, Vec<u8>)>) -> (Vec<(u64, Vec<u8>)>, u32, u32) {
        if self.0.is_empty() {
            return (runs, 0, 0);
        }
        let (mut lacking, mut compared, mut all, mut sent) = (Vec::new(), 0, 0, 0);
        for (offset, run) in runs {
            let first = offset / PAGE as u64;
            let pages: Vec<&[u8]> = run.chunks(PAGE).collect();
            let numbers = first..first + pages.len() as u64;
            compared += numbers.clone().filter(|number| self.0.contains_key(number)).count() as u32;
            let same: Vec<bool> =
                numbers.zip(&pages).map(|(number, page)| self.has_page(number, page)).collect();
            for piece in differing_ranges(&same) {
                let bytes = pages[piece.clone()].concat();
                lacking.push((offset + (piece.start * PAGE) as u64, bytes));
                sent += piece.len() as u32;
            }
            all += pages.len() as u32;
        }
        (lacking, all - sent, compared)
    }
}

/// Ranges of differing pages; fewer than [`SPLIT_PAGES`] equal pages do not split a range.
fn differing_ranges(same: &[bool]) -> Vec<std::ops::Range<usize>> {
    let mut pieces: Vec<std::ops::Range<usize>> = Vec::new();
    for at in (0..same.len()).filter(|at| !same[*at]) {
        match pieces.last_mut() {
            Some(piece) if at - piece.end < SPLIT_PAGES => piece.end = at + 1,
            _ => pieces.push(at..at + 1),
        }
    }
    pieces
}

/// Ranges of complete blocks of a file, up to byte `end`, none longer than [`MAX_RANGE`].
fn block_ranges(blocks: &[u64], block: u64, end: u64) -> Vec<Range> {
    let mut found: Vec<Range> = Vec::new();
    for offset in blocks.iter().map(|number| number * block).take_while(|offset| *offset < end) {
        let len = block.min(end - offset) as u32;
        match found.last_mut() {
            Some(last)
                if last.offset + u64::from(last.len) == offset
                    && u64::from(last.len) + block <= MAX_RANGE =>
            {
                last.len += len;
            }
            _ => found.push(Range { offset, len }),
        }
    }
    found
}

impl Core {
    /// Whether a write-back may save data by comparing first.
    pub(in crate::client) fn can_compare(&self) -> bool {
        self.connection.compression_level().is_some() && !self.dedup.unsupported.load(Ordering::Relaxed)
    }

    /// The server's digests where blocks are to be written, as far as asking is worthwhile.
    pub(in crate::client) async fn server_digests(
        self: &Arc<Self>,
        sending: &Arc<FileWriteBack>,
        blocks: &[u64],
    ) -> ServerDigests {
        let record = &sending.record;
        // Pages beyond that are zeros, whatever an earlier attempt has left on the server.
        let end = record.zero_from.min(record.base.size);
        let ranges = block_ranges(blocks, self.cache.block_size(), end);
        if ranges.is_empty() || !self.is_worth_comparing(sending, &ranges) {
            return ServerDigests::default();
        }
        if sending.expect.len() > 2 || self.connection.has_broken() {
            // A delayed write of an earlier attempt must not arrive after the digests. If this write fails,
            // the next one fails too and reports why.
            let stamped = self.clone().send_piece(sending.clone(), None, None, 0, &[]).await;
            if stamped.is_err() {
                return ServerDigests::default();
            }
        }
        let mut tasks = JoinSet::new();
        for range in ranges {
            let (core, sending) = (self.clone(), sending.clone());
            tasks.spawn(async move { core.digests_of(&sending, range).await.unwrap_or_default() });
        }
        ServerDigests(tasks.join_all().await.into_iter().flatten().collect())
    }

    fn is_worth_comparing(&self, sending: &FileWriteBack, ranges: &[Range]) -> bool {
        if !self.can_compare() {
            return false;
        }
        let round_trip = self.connection.round_trip().unwrap_or_default();
        let bytes = ranges.iter().map(|range| u64::from(range.len)).sum();
        let rate = self.connection.rate().unwrap_or(DEFAULT_RATE);
        let asked = DigestQuery { bytes, waited: false, rate, round_trip: round_trip.as_secs_f64() };
        self.write_comparison
            .estimates
            .with(sending.file, HitEstimate::new(false), |odds| odds.is_worthwhile(asked))
    }

    /// None if the server does not support it or has other content than expected: the write then reports why.
    async fn digests_of(&self, sending: &FileWriteBack, range: Range) -> Option<Vec<(u64, Option<Digest>)>> {
        let body = Digests { file: sending.file_ref.clone(), range };
        let asked = self.connection.send::<DigestCall, _>(body, Bytes::new(), None).await.0;
        if asked.as_ref().is_err_and(|fail| fail.is(Code::UNKNOWN_KIND)) {
            self.dedup.unsupported.store(true, Ordering::Relaxed);
        }
        let (said, digests) = asked.ok()?;
        let expected = sending.expect.contains(&said.attr.mtime);
        let digests = unpack_digests(&said.pages, &digests, range.len as usize).ok().filter(|_| expected)?;
        let first = range.offset / PAGE as u64;
        Some((first..).zip(digests).collect())
    }

    pub(in crate::client) fn differing_runs(
        &self,
        sending: &FileWriteBack,
        there: &ServerDigests,
        runs: Vec<(u64, Vec<u8>)>,
    ) -> Vec<(u64, Vec<u8>)> {
        let (lacking, spared, compared) = there.differing_runs(runs);
        if compared > 0 {
            self.write_comparison.skipped_pages.fetch_add(spared.into(), Ordering::Relaxed);
            self.write_comparison
                .estimates
                .with(sending.file, HitEstimate::new(false), |odds| odds.record(compared, spared));
        }
        lacking
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn there(content: &[u8]) -> ServerDigests {
        let digest = |page: &[u8]| (!is_zero(page)).then(|| digest_of_page(page));
        ServerDigests((0..).zip(content.chunks(PAGE).map(digest)).collect())
    }

    proptest! {
        #[test]
        fn what_is_sent_makes_what_is_there_what_it_should_be(
            old in proptest::collection::vec(0u8..3, 0..40),
            new in proptest::collection::vec(0u8..3, 1..40), tail in 0usize..PAGE) {
            let bytes = |pages: &[u8]| -> Vec<u8> { pages.iter().flat_map(|byte| [*byte; PAGE]).collect() };
            let (mut old, mut new) = (bytes(&old), bytes(&new));
            new.truncate(new.len() - tail);
            let pages = new.len().div_ceil(PAGE) as u32;
            let known = old.len().div_ceil(PAGE) as u32;
            let (lacking, spared, compared) = there(&old).differing_runs(vec![(0, new.clone())]);
            let sent: usize = lacking.iter().map(|(_, run)| run.len().div_ceil(PAGE)).sum();
            prop_assert_eq!(sent as u32 + spared, pages);
            prop_assert_eq!(compared, pages.min(known));
            old.resize(new.len(), 0);
            for (offset, run) in lacking {
                old[offset as usize..][..run.len()].copy_from_slice(&run);
            }
            prop_assert!(old == new);
        }
    }

    #[test]
    fn a_few_equal_pages_do_not_part_a_run() {
        let same = |text: &str| text.bytes().map(|byte| byte == b'=').collect::<Vec<_>>();
        assert_eq!(differing_ranges(&same("==x=x====x==")), [2..5, 9..10]);
        assert_eq!(differing_ranges(&same("x===xx====x")), [0..6, 10..11]);
        assert_eq!(differing_ranges(&same("====")), []);
    }

    #[test]
    fn neighbours_are_asked_for_together_and_nothing_behind_the_end() {
        let block = 64 << 10;
        let found = block_ranges(&[0, 1, 3, 4, 5, 9], block, 5 * block + 100);
        let range = |first: u64, len: u64| Range { offset: first * block, len: len as u32 };
        assert_eq!(found, [range(0, 2 * block), range(3, 2 * block + 100)]);
        let many: Vec<u64> = (0..40).collect();
        let lens: Vec<u32> = block_ranges(&many, block, u64::MAX).iter().map(|range| range.len).collect();
        assert_eq!(lens, [1 << 20, 1 << 20, 8 * block as u32]);
        assert_eq!(block_ranges(&many, block, 0), []);
    }
}
