//! Readahead: predicts the next reads of an open file from those before. Pure: block numbers in, block
//! numbers out.
//!
//! A `Reader` belongs to one open file. Adjacent blocks are a sequence, and the window ahead doubles while it
//! lasts. The kernel issues reads concurrently, so their order within the window means nothing. Blocks at an
//! equal distance are a stride. Anything else is random, and nothing is fetched ahead.

use std::ops::Range;

/// Initial window of a sequence, in blocks.
const INITIAL_WINDOW: u64 = 4;
/// Smallest window, in reads.
const MIN_WINDOW_READS: u64 = 2;
/// Number of strides fetched ahead.
const STRIDES: u64 = 8;

/// Access pattern of an open file.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(in crate::client) struct Reader {
    max_blocks: u64,
    last: Option<u64>,
    step: i64,
    equal_steps: u32,
    window: u64,
    /// End of the blocks that a sequence has requested.
    requested_to: u64,
}

impl Reader {
    /// A reader that fetches at most `most` blocks ahead.
    pub(in crate::client) fn new(most: u64) -> Self {
        Self {
            max_blocks: most.max(1),
            last: None,
            step: 0,
            equal_steps: 0,
            window: INITIAL_WINDOW,
            requested_to: 0,
        }
    }

    /// Records a read of blocks `first..=last` of `total`; returns the blocks to fetch ahead.
    pub(in crate::client) fn read(&mut self, first: u64, last: u64, total: u64) -> Vec<Range<u64>> {
        let before = self.last.replace(last);
        if let Some(before) = before.filter(|before| last <= *before && self.is_within(first, *before)) {
            // The read was overtaken by a later one, or is repeated.
            self.last = Some(before);
            return Vec::new();
        }
        // After a read that ends within a block, the next one begins in the same block.
        let first = if before == Some(first) && last > first { first + 1 } else { first };
        let step = match before {
            Some(before) => first as i64 - before as i64,
            // A file that is read from its start is likely to be read further.
            None if first == 0 => 1,
            None => 0,
        };
        if step == 0 && before == Some(first) {
            // Reading the same block again changes nothing.
            return Vec::new();
        }
        self.equal_steps =
            if step == self.step || before.is_none() { self.equal_steps.saturating_add(1) } else { 0 };
        self.step = step;
        match step {
            1 => self.sequence(first, last, total),
            2.. if before.is_some_and(|before| self.is_within(first, before)) => {
                self.sequence(first, last, total)
            }
            _ if self.equal_steps >= 2 => self.strides(first, last, total),
            _ => {
                self.window = INITIAL_WINDOW;
                self.requested_to = 0;
                Vec::new()
            }
        }
    }

    /// Whether a sequence that was read up to `before` requested this block lately.
    fn is_within(&self, first: u64, before: u64) -> bool {
        self.requested_to > before && (before.saturating_sub(self.window)..self.requested_to).contains(&first)
    }

    fn sequence(&mut self, first: u64, last: u64, total: u64) -> Vec<Range<u64>> {
        // Large reads would soon pass a small window, and wait again each time.
        self.window = self.window.max(MIN_WINDOW_READS * (last + 1 - first)).min(self.max_blocks);
        let from = self.requested_to.max(last + 1);
        // Extend when half of the window is used up, in one large request.
        if from > last + 1 + self.window / 2 {
            return Vec::new();
        }
        let to = (last + 1 + self.window).min(total);
        self.window = (self.window * 2).min(self.max_blocks);
        self.requested_to = to.max(from);
        (from < to).then_some(from..to).into_iter().collect()
    }

    fn strides(&self, first: u64, last: u64, total: u64) -> Vec<Range<u64>> {
        let len = last - first + 1;
        let ahead = (1..=STRIDES.min(self.max_blocks)).filter_map(|number| {
            // The step is from the end of one read to the start of the next.
            let distance = (self.step + len as i64 - 1).checked_mul(number as i64)?;
            let start = first.checked_add_signed(distance)?;
            (start < total).then(|| start..(start + len).min(total))
        });
        ahead.collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn all(reader: &mut Reader, blocks: impl IntoIterator<Item = u64>) -> Vec<Range<u64>> {
        blocks.into_iter().flat_map(|block| reader.read(block, block, 10_000)).collect()
    }

    #[test]
    fn a_sequence_is_fetched_once_and_ever_further_ahead() {
        let fetched = all(&mut Reader::new(64), 0..500);
        assert!(fetched.windows(2).all(|pair| pair[0].end == pair[1].start), "no gaps, nothing twice");
        assert!(fetched.iter().all(|range| range.end - range.start <= 64));
        assert!(fetched.last().unwrap().end >= 500 + 32, "the window has grown");
        assert!(fetched.len() < 40, "in large pieces: {}", fetched.len());
    }

    #[test]
    fn who_reads_much_at_once_is_kept_ahead_of() {
        let mut reader = Reader::new(64);
        for number in 0..8 {
            let (first, last) = (number * 16, number * 16 + 15);
            let before = reader.requested_to;
            reader.read(first, last, 10_000);
            assert!(number == 0 || before > last, "{number}: {before} blocks were fetched before");
            assert!(reader.requested_to >= last + 1 + 16 && reader.requested_to <= last + 1 + 64);
        }
    }

    #[test]
    fn reads_that_end_within_blocks_are_a_sequence_too() {
        // A program reads into a buffer that begins 16 bytes after a page: the kernel cuts that off each
        // read's end.
        let (mut reader, mut end) = (Reader::new(128), 0);
        for number in 0..30u64 {
            let (from, to) = ((number << 20).saturating_sub(16), ((number + 1) << 20) - 16);
            assert!(number == 0 || end > (to - 1) >> 16, "{number}: {end} blocks were fetched before");
            let fetched = reader.read(from >> 16, (to - 1) >> 16, 10_000);
            end = fetched.last().map_or(end, |range| range.end);
        }
        assert!(end >= 30 * 16 + 64, "the window has grown: {end}");
    }

    #[test]
    fn reads_that_overtake_each_other_are_a_sequence_too() {
        let mut reader = Reader::new(128);
        let order = (0..60u64).flat_map(|pair| [2 * pair, 2 * pair + 1, 2 * pair]).map(|number| number ^ 1);
        let fetched: Vec<_> = std::iter::once(0)
            .chain(order.skip(2))
            .flat_map(|read| reader.read(read * 4, read * 4 + 3, 10_000))
            .collect();
        assert!(fetched.windows(2).all(|pair| pair[0].end == pair[1].start), "{fetched:?}");
        assert!(fetched.last().unwrap().end >= 120 * 4 + 64, "{fetched:?}");
    }

    #[test]
    fn a_stride_is_seen_in_both_directions() {
        for blocks in [vec![100, 110, 120, 130], vec![500, 490, 480, 470]] {
            let step = blocks[1] as i64 - blocks[0] as i64;
            let last = *blocks.last().unwrap();
            let fetched = all(&mut Reader::new(64), blocks);
            let next = last.checked_add_signed(step).unwrap();
            assert!(fetched.contains(&(next..next + 1)), "{fetched:?}");
        }
    }

    #[test]
    fn random_reads_fetch_nothing_else() {
        let blocks = (1..200u64).map(|number| number * number * 7919 % 9973);
        let fetched: u64 =
            all(&mut Reader::new(64), blocks).iter().map(|range| range.end - range.start).sum();
        assert!(fetched < 30, "{fetched}");
    }

    #[test]
    fn nothing_past_the_end_is_fetched() {
        let mut reader = Reader::new(64);
        let fetched: Vec<_> = (0..10).flat_map(|block| reader.read(block, block, 10)).collect();
        assert!(fetched.iter().all(|range| range.end <= 10 && range.start < range.end));
    }
}
