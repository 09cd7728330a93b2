//! Page batch: the encoding of the pages of a migration. Zero pages are ranges, pages of which the target has
//! a version are their changed delta blocks, others are complete; the payload is compressed as one, or not at
//! all.
//!
//! A batch has pages of one array; the header lists the pages of each kind, the payload has their content. A
//! page has 64 delta blocks of 64 bytes, the unit in which processors write memory. Pure functions over
//! bytes; everything is bounded before it is decoded.

use bytes::Bytes;
use serde::{Deserialize, Serialize};
use whimbrel_core::{PAGE_SIZE, PageRun};
use whimbrel_image::{
    compression::{self, Settings},
    delta_blocks,
};
use zstd::zstd_safe::CParameter;

/// Most pages in a batch that are not zero.
pub const BATCH_PAGES_MAX: u64 = 256;
/// Most runs in a batch.
pub const RUNS_MAX: usize = 512;
/// Bytes of a delta block.
pub const BLOCK: usize = 64;
/// Delta blocks of a page, as many as a `u64` has bits.
pub const BLOCKS: usize = PAGE_SIZE / BLOCK;
/// Most changed blocks of a delta; with more, the complete page is sent.
pub(crate) const BLOCKS_CHANGED_MAX: u32 = 40;
/// Compressed data above this part of its raw size is sent raw, so that the other side need not decompress
/// it.
const WORTH_PACKING: f64 = 0.97;
/// A payload of at least so many bytes is compressed only if one page in [`SAMPLE_STRIDE`] shrinks: memory
/// that does not, of images or of what is encrypted or compressed already, comes in long runs, and a strong
/// level takes longer over it than to send it.
const SAMPLED_MIN: usize = 64 * PAGE_SIZE;
const SAMPLE_STRIDE: usize = 16;
const WORD: usize = size_of::<u64>();

/// Compression of a payload.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize)]
pub enum Packing {
    /// Raw, without compression.
    #[default]
    None,
    /// Compressed as one zstd frame.
    Zstd,
}

/// Effort to make a payload small.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Effort {
    /// No compression at all.
    None,
    /// Compression with zstd at this level.
    Zstd(i32),
}

/// Header of a batch of pages of one array.
#[derive(Debug, Clone, PartialEq, Eq, Default, Serialize, Deserialize)]
pub struct PageBatchHeader {
    /// Index of the array in the offer's arrays.
    pub array: u32,
    /// Compression of the payload.
    pub packing: Packing,
    /// Pages that are zero now.
    pub zero: Vec<PageRun>,
    /// Pages whose content is in the payload, in this order.
    pub whole: Vec<PageRun>,
    /// Pages whose changed blocks follow in the payload, in this order.
    pub delta: Vec<PageRun>,
    /// Number of these blocks.
    pub blocks: u32,
}

/// Error of a received batch.
#[derive(Debug, thiserror::Error, PartialEq, Eq)]
pub enum PageBatchError {
    /// The header has more pages or runs than a batch may have.
    #[error("the batch lists {pages} pages in {runs} runs")]
    TooLarge {
        /// Pages listed that have content.
        pages: u64,
        /// Number of runs listed.
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
    /// The payload does not hold what the header lists.
    #[error("the payload does not hold the {expected} bytes that the header lists")]
    Payload {
        /// Bytes that the header lists.
        expected: usize,
    },
}

impl PageBatchHeader {
    /// Refuses a header that a correct peer never sends, for any array.
    pub(crate) fn check_size(&self) -> Result<(), PageBatchError> {
        let runs = self.zero.len() + self.whole.len() + self.delta.len();
        let count = |list: &[PageRun]| list.iter().fold(0u64, |sum, run| sum.saturating_add(run.len));
        let (whole, delta) = (count(&self.whole), count(&self.delta));
        let pages = whole.saturating_add(delta);
        let blocks_max = delta.saturating_mul(BLOCKS as u64);
        if pages > BATCH_PAGES_MAX || runs > RUNS_MAX || u64::from(self.blocks) > blocks_max {
            return Err(PageBatchError::TooLarge { pages, runs });
        }
        Ok(())
    }

    /// Refuses a header that a correct peer never sends for an array of `len` pages.
    pub fn check(&self, len: u64) -> Result<(), PageBatchError> {
        self.check_size()?;
        let mut all = self.zero.iter().chain(&self.whole).chain(&self.delta);
        match all.find(|run| run.start.checked_add(run.len).is_none_or(|end| end > len)) {
            Some(run) => Err(PageBatchError::OutOfRange { page: run.start, len }),
            None => Ok(()),
        }
    }

    fn whole_bytes(&self) -> usize {
        self.whole.iter().map(PageRun::bytes).sum()
    }

    fn delta_pages(&self) -> usize {
        self.delta.iter().map(|run| run.len as usize).sum()
    }
}

/// Appends `page` to `runs`, joining it to the last run if it follows that.
pub(crate) fn push(runs: &mut Vec<PageRun>, page: u64) {
    match runs.last_mut() {
        Some(last) if last.end() == page => last.len += 1,
        _ => runs.push(PageRun::new(page, 1)),
    }
}

/// Shortest match that zstd looks for; 0 is its default for the level. Memory is full of words that occur
/// again beside another word: on that of a small Linux guest, a MiB at a time, level 1 makes 45.3 MB with it
/// instead of 46.0 (870 MB/s instead of 929), level 3 makes 44.3 instead of 44.5 (490 instead of 574).
fn min_match(level: i32) -> u32 {
    match level {
        3.. => 4,
        1..3 => 5,
        _ => 0,
    }
}

fn settings(level: i32) -> Settings {
    Settings { level, more: [Some(CParameter::MinMatch(min_match(level))), None] }
}

/// Whether compression probably makes `raw` smaller.
fn may_shrink(raw: &[u8], sample: &mut Vec<u8>) -> std::io::Result<bool> {
    if raw.len() < SAMPLED_MIN {
        return Ok(true);
    }
    sample.clear();
    raw.chunks(PAGE_SIZE).step_by(SAMPLE_STRIDE).for_each(|page| sample.extend_from_slice(page));
    let packed = compression::compress(sample, &[], settings(1), Vec::new())?;
    Ok((packed.len() as f64) < sample.len() as f64 * WORTH_PACKING)
}

/// Encoder of batches.
#[derive(Default)]
pub struct Encoder {
    header: PageBatchHeader,
    whole: Vec<u8>,
    changed: Vec<u8>,
    blocks: Vec<u8>,
    sample: Vec<u8>,
}

impl Encoder {
    /// Adds pages that are zero.
    pub fn zero(&mut self, runs: &[PageRun]) {
        self.header.zero.extend_from_slice(runs);
    }

    /// Adds a page by its content.
    pub fn whole(&mut self, page: u64, content: &[u8]) {
        push(&mut self.header.whole, page);
        self.whole.extend_from_slice(content);
    }

    /// Adds pages by their content, which is not copied if no page has been added so.
    pub(crate) fn all_whole(&mut self, runs: &[PageRun], content: Vec<u8>) {
        self.header.whole.extend_from_slice(runs);
        match self.whole.is_empty() {
            true => self.whole = content,
            false => self.whole.extend_from_slice(&content),
        }
    }

    /// Adds a page by the blocks of its content that differ from the target's version.
    pub fn delta(&mut self, page: u64, content: &[u8], changed: u64) {
        push(&mut self.header.delta, page);
        self.changed.extend_from_slice(&changed.to_le_bytes());
        delta_blocks::gather(content, changed, BLOCK, &mut self.blocks);
    }

    /// Whether no page was added.
    pub fn is_empty(&self) -> bool {
        self.header.whole.is_empty() && self.header.delta.is_empty() && self.header.zero.is_empty()
    }

    /// Returns the batch of the added pages, for `array`. The encoder is empty again. The payload may wait
    /// for a slow link, so what was allocated for a larger one is given back.
    pub fn finish(&mut self, array: u32, effort: Effort) -> std::io::Result<(PageBatchHeader, Vec<u8>)> {
        let blocks = (self.blocks.len() / BLOCK) as u32;
        let mut header = PageBatchHeader { array, blocks, ..std::mem::take(&mut self.header) };
        let mut raw = std::mem::take(&mut self.whole);
        raw.append(&mut self.changed);
        raw.append(&mut self.blocks);
        if raw.is_empty() {
            return Ok((header, raw));
        }
        if let Effort::Zstd(level) = effort
            && may_shrink(&raw, &mut self.sample)?
        {
            let mut packed = compression::compress(&raw, &[], settings(level), Vec::new())?;
            if (packed.len() as f64) < raw.len() as f64 * WORTH_PACKING {
                header.packing = Packing::Zstd;
                packed.shrink_to_fit();
                raw.clear();
                self.whole = raw;
                return Ok((header, packed));
            }
        }
        raw.shrink_to_fit();
        Ok((header, raw))
    }
}

/// Content of a batch.
pub struct PageBatch {
    raw: Bytes,
    whole: usize,
    delta: usize,
}

/// Delta of one page.
#[derive(Debug, Clone, Copy)]
pub struct Patch<'a> {
    changed: u64,
    blocks: &'a [u8],
}

impl PageBatch {
    /// Decompresses the `payload` of `header`.
    pub fn decode(header: &PageBatchHeader, payload: Bytes) -> Result<Self, PageBatchError> {
        header.check_size()?;
        let (whole, delta) = (header.whole_bytes(), header.delta_pages());
        let expected = whole + delta * WORD + header.blocks as usize * BLOCK;
        let bad = PageBatchError::Payload { expected };
        let raw = match header.packing {
            Packing::None => payload,
            Packing::Zstd => {
                compression::decompress_at_most(&payload, &[], expected).map_err(|_| bad)?.into()
            }
        };
        let batch = Self { raw, whole, delta };
        let bad = PageBatchError::Payload { expected };
        if batch.raw.len() != expected {
            return Err(bad);
        }
        let listed: u64 = batch.changed().map(|changed| u64::from(changed.count_ones())).sum();
        if listed == u64::from(header.blocks) { Ok(batch) } else { Err(bad) }
    }

    /// Content of the complete pages, concatenated.
    pub fn whole(&self) -> &[u8] {
        &self.raw[..self.whole]
    }

    fn changed(&self) -> impl Iterator<Item = u64> {
        let words = &self.raw[self.whole..self.whole + self.delta * WORD];
        words.as_chunks::<WORD>().0.iter().map(|word| u64::from_le_bytes(*word))
    }

    /// Deltas of the pages of which the target has a version.
    pub fn patches(&self) -> impl Iterator<Item = Patch<'_>> {
        let mut rest = &self.raw[self.whole + self.delta * WORD..];
        self.changed().map(move |changed| {
            let (blocks, after) = rest.split_at(changed.count_ones() as usize * BLOCK);
            rest = after;
            Patch { changed, blocks }
        })
    }
}

impl Patch<'_> {
    /// Turns the target's version of the page into the one that was sent.
    pub fn apply(&self, page: &mut [u8]) {
        delta_blocks::scatter(self.blocks, self.changed, BLOCK, page);
    }
}

#[cfg(test)]
#[path = "page_batch_tests.rs"]
mod tests;
