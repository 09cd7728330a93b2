//! Neighbours of a chunk in an object store, brought with one request.
//!
//! Chunks that were written together lie in one pack in their order, and are mostly read so. Who reads on
//! where the last read of a pack ended gets more than was asked for, up to [`WINDOW`], and whoever reads the
//! same pack meanwhile waits for it. Anybody else gets just his chunk, and so does who has not used what came
//! before: a file's other chunks may be read from other copies. Packs never change, so what is held is right
//! as long as the index names its pack. Bounded: [`PACKS`] windows, of the packs read last.

use bytes::Bytes;
use std::{
    collections::VecDeque,
    ops::Range,
    sync::{Arc, Mutex, MutexGuard, PoisonError},
};

/// Packs of which something is held.
const PACKS: usize = 16;
/// Bytes brought at once when a pack begins to be read in its order, and at most.
const WINDOW: (u64, u64) = (1 << 20, 4 << 20);
/// A read that begins so little behind the last one goes on all the same: several threads read one file.
const GAP: u64 = 1 << 20;
/// Reads that are not believed after a window of which too little was used.
const ALONE: u32 = 16;

/// What is held of packs, and how they were read.
#[derive(Debug, Default)]
pub(super) struct Readahead {
    packs: Mutex<VecDeque<(u32, Arc<Mutex<Held>>)>>,
}

#[derive(Debug, Default)]
struct Held {
    from: u64,
    bytes: Bytes,
    /// How many of them were read.
    used: u64,
    /// Where the furthest read ended; none before the first.
    next: Option<u64>,
    window: u64,
    /// So many reads that go on get just their chunk.
    alone: u32,
}

impl Held {
    fn take(&mut self, range: &Range<u64>) -> Option<Bytes> {
        let (start, end) = (range.start.checked_sub(self.from)?, range.end.checked_sub(self.from)?);
        let found = (end <= self.bytes.len() as u64).then(|| self.bytes.slice(start as usize..end as usize));
        self.used += found.as_ref().map_or(0, |found| found.len() as u64);
        found
    }

    /// What to ask for instead of a range that is not held, of a pack of `length` bytes; none if just that.
    fn more(&mut self, range: &Range<u64>, length: u64) -> Option<Range<u64>> {
        let next = self.next?;
        range.start.checked_sub(next).filter(|behind| *behind <= GAP)?;
        // What was held and passed over, not what is cut off at its end.
        let passed = next.min(self.from + self.bytes.len() as u64).saturating_sub(self.from);
        let unused = self.used * 4 < passed * 3;
        (self.bytes, self.used) = (Bytes::new(), 0);
        if unused {
            (self.window, self.alone) = (0, ALONE);
        }
        if self.alone > 0 {
            self.alone -= 1;
            return None;
        }
        self.window = (self.window * 2).clamp(WINDOW.0, WINDOW.1);
        // What was passed over is asked for next by somebody else.
        Some(next..(next + self.window).min(length).max(range.end))
    }
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

impl Readahead {
    /// A range of pack `number`, which has `length` bytes, with `get` to ask for one. None if there is none,
    /// or less than that.
    pub(super) fn read<E>(
        &self,
        (number, length): (u32, u64),
        range: Range<u64>,
        get: impl Fn(Range<u64>) -> Result<Option<Bytes>, E>,
    ) -> Result<Option<Bytes>, E> {
        let pack = self.pack(number);
        {
            let mut held = lock(&pack);
            let found = held.take(&range);
            let more = if found.is_none() { held.more(&range, length) } else { None };
            held.next = held.next.max(Some(range.end));
            if found.is_some() {
                return Ok(found);
            }
            if let Some(more) = more {
                held.from = more.start;
                held.bytes = get(more)?.unwrap_or_default();
                return Ok(held.take(&range));
            }
        }
        get(range)
    }

    fn pack(&self, number: u32) -> Arc<Mutex<Held>> {
        let mut packs = lock(&self.packs);
        let known = packs.iter().position(|(known, _)| *known == number);
        let found = known.and_then(|at| packs.remove(at)).unwrap_or_else(|| (number, Arc::default()));
        let pack = found.1.clone();
        packs.push_back(found);
        if packs.len() > PACKS {
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

    /// Reads chunks in this order, each of which must be right; requests, and bytes.
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
        // As several threads do.
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
        assert_eq!(lock(&ahead.packs).len(), PACKS);
    }
}
