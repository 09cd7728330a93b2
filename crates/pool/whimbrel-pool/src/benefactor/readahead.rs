//! Readahead in the object store: neighbouring chunks of a segment are fetched with one request.
//!
//! Chunks that were written together are adjacent in a segment and are mostly read in order. A read that
//! continues where the last read of the segment ended fetches up to [`WINDOW`] bytes, and concurrent readers
//! of that segment wait for it. Any other read fetches only its chunk, as does a reader that did not use the
//! previous window, because the file's other chunks may be read from other copies. Uploaded segments never
//! change, so cached bytes are valid as long as the index names their segment. At most [`WINDOWS`] windows
//! are cached, of the segments read last.

use bytes::Bytes;
use std::{
    collections::VecDeque,
    ops::Range,
    sync::{Arc, Mutex},
};
use whimbrel_core::lock;

/// Segments of which a window is cached.
const WINDOWS: usize = 16;
/// Bytes fetched at once when sequential reading of a segment starts, and at most.
const WINDOW: (u64, u64) = (1 << 20, 4 << 20);
/// Largest gap after the last read that still counts as sequential, because several threads read one file.
const GAP: u64 = 1 << 20;
/// Sequential reads without readahead after a window of which too little was used.
const BACKOFF_READS: u32 = 16;

/// Cached windows of segments, and how these were read.
#[derive(Debug, Default)]
pub(super) struct Readahead {
    packs: Mutex<VecDeque<(u32, Arc<Mutex<Window>>)>>,
}

#[derive(Debug, Default)]
struct Window {
    from: u64,
    bytes: Bytes,
    /// Bytes of the window that were read.
    used: u64,
    /// End of the furthest read; none before the first.
    next: Option<u64>,
    window: u64,
    /// Number of further sequential reads without readahead.
    backoff: u32,
}

impl Window {
    fn read(&mut self, range: &Range<u64>) -> Option<Bytes> {
        let (start, end) = (range.start.checked_sub(self.from)?, range.end.checked_sub(self.from)?);
        let found = (end <= self.bytes.len() as u64).then(|| self.bytes.slice(start as usize..end as usize));
        self.used += found.as_ref().map_or(0, |found| found.len() as u64);
        found
    }

    /// The range to fetch instead of an uncached range of a segment of `length` bytes; none for only that.
    fn window_for(&mut self, range: &Range<u64>, length: u64) -> Option<Range<u64>> {
        let next = self.next?;
        range.start.checked_sub(next).filter(|behind| *behind <= GAP)?;
        // Bytes of the window that were skipped or read, without those after the last read.
        let passed = next.min(self.from + self.bytes.len() as u64).saturating_sub(self.from);
        let unused = self.used * 4 < passed * 3;
        (self.bytes, self.used) = (Bytes::new(), 0);
        if unused {
            (self.window, self.backoff) = (0, BACKOFF_READS);
        }
        if self.backoff > 0 {
            self.backoff -= 1;
            return None;
        }
        self.window = (self.window * 2).clamp(WINDOW.0, WINDOW.1);
        // A skipped part is included, because another thread will read it next.
        Some(next..(next + self.window).min(length).max(range.end))
    }
}

impl Readahead {
    /// Reads a range of segment `number`, which has `length` bytes; `get` fetches a range. None if there is
    /// no such segment or it is shorter.
    pub(super) fn read<E>(
        &self,
        (number, length): (u32, u64),
        range: Range<u64>,
        get: impl Fn(Range<u64>) -> Result<Option<Bytes>, E>,
    ) -> Result<Option<Bytes>, E> {
        let pack = self.pack(number);
        {
            let mut held = lock(&pack);
            let found = held.read(&range);
            let more = if found.is_none() { held.window_for(&range, length) } else { None };
            held.next = held.next.max(Some(range.end));
            if found.is_some() {
                return Ok(found);
            }
            if let Some(more) = more {
                held.from = more.start;
                held.bytes = get(more)?.unwrap_or_default();
                return Ok(held.read(&range));
            }
        }
        get(range)
    }

    fn pack(&self, number: u32) -> Arc<Mutex<Window>> {
        let mut packs = lock(&self.packs);
        let known = packs.iter().position(|(known, _)| *known == number);
        let found = known.and_then(|at| packs.remove(at)).unwrap_or_else(|| (number, Arc::default()));
        let pack = found.1.clone();
        packs.push_back(found);
        if packs.len() > WINDOWS {
            packs.pop_front();
        }
        pack
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use rand::{Rng, SeedableRng, rngs::StdRng, seq::SliceRandom};
    use std::{cell::Cell, convert::Infallible};

    const LENGTH: u64 = 8 << 20;

    fn pack() -> Bytes {
        (0..LENGTH).map(|at| (at.wrapping_mul(2_654_435_761) >> 13) as u8).collect::<Vec<_>>().into()
    }

    /// Reads chunks in this order and checks each; returns the number of requests and their bytes.
    fn read(pack: &Bytes, chunks: &[Range<u64>]) -> (usize, u64) {
        let (ahead, asked) = (Readahead::default(), Cell::new((0, 0)));
        for range in chunks {
            let found = ahead.read((7, LENGTH), range.clone(), |wanted| {
                let (requests, bytes) = asked.get();
                asked.set((requests + 1, bytes + wanted.end - wanted.start));
                Ok::<_, Infallible>(Some(pack.slice(wanted.start as usize..wanted.end as usize)))
            });
            assert!(found.unwrap().unwrap() == pack[range.start as usize..range.end as usize], "{range:?}");
        }
        asked.get()
    }

    fn chunks(bytes: u64) -> Vec<Range<u64>> {
        // Between two chunks lies the head of the second.
        (0..LENGTH / bytes).map(|number| number * bytes + 44..(number + 1) * bytes).collect()
    }

    #[test]
    fn chunks_that_are_read_in_their_order_come_with_a_few_requests() {
        let pack = pack();
        let (requests, bytes) = read(&pack, &chunks(64 << 10));
        assert!(requests <= 5 && bytes <= LENGTH, "{requests} requests, {bytes} bytes");
        // Out of order, like reads of several threads.
        let mut swapped = chunks(256 << 10);
        swapped.chunks_mut(3).for_each(<[_]>::reverse);
        let (requests, bytes) = read(&pack, &swapped);
        assert!(requests <= 12 && bytes <= LENGTH + (3 << 20), "{requests} requests, {bytes} bytes");
    }

    #[test]
    fn where_every_second_chunk_is_read_elsewhere_little_is_brought_for_nothing() {
        let pack = pack();
        let (mut all, mut read_bytes) = (0, 0);
        for seed in 0..50 {
            let mut random = StdRng::seed_from_u64(seed);
            let half: Vec<_> = chunks(256 << 10).into_iter().filter(|_| random.random()).collect();
            read_bytes += read(&pack, &half).1;
            all += half.iter().map(|range| range.end - range.start).sum::<u64>();
        }
        assert!(read_bytes < all + all / 3, "{read_bytes} bytes for {all}");
    }

    #[test]
    fn chunks_that_are_read_in_any_order_cost_little_more_than_themselves() {
        let pack = pack();
        for seed in 0..50 {
            let mut random = StdRng::seed_from_u64(seed);
            let mut some = chunks(64 << 10);
            some.shuffle(&mut random);
            some.truncate(random.random_range(1..some.len()));
            let (requests, bytes) = read(&pack, &some);
            let wanted: u64 = some.iter().map(|range| range.end - range.start).sum();
            assert!(requests <= some.len(), "seed {seed}");
            assert!(bytes <= wanted + LENGTH, "seed {seed}: {bytes} bytes for {wanted}");
        }
    }

    #[test]
    fn a_pack_that_is_gone_or_too_short_gives_nothing_and_is_asked_again() {
        let ahead = Readahead::default();
        let ask = |answer: Result<Option<Bytes>, u8>| ahead.read((1, LENGTH), 44..100, |_| answer.clone());
        assert_eq!(ask(Err(5)), Err(5));
        assert_eq!(ask(Ok(None)), Ok(None));
        let whole = Bytes::from(vec![3; 1 << 20]);
        assert_eq!(ask(Ok(Some(whole.slice(..56)))), Ok(Some(whole.slice(..56))));
    }

    #[test]
    fn only_the_packs_read_last_are_held() {
        let ahead = Readahead::default();
        let pack = pack();
        for number in 0..100 {
            let get = |wanted: Range<u64>| {
                Ok::<_, Infallible>(Some(pack.slice(wanted.start as usize..wanted.end as usize)))
            };
            ahead.read((number, LENGTH), 44..1000, get).unwrap().unwrap();
        }
        assert_eq!(lock(&ahead.packs).len(), WINDOWS);
    }
}
