//! Dirty trace: one set of dirty pages per sample, as it is sent, saved in a file and read again.
//!
//! The format is in docs/formats/dirty-trace.md. [`encode_header`] and [`encode_sample`] write it; [`Reader`]
//! parses it in pieces of any size. A trace that ends within a record (a connection that was cut, a full
//! disk) is valid up to that record. Memory is allocated only for bytes that have arrived.

use std::time::Duration;
use whimbrel_core::{PAGE_SIZE, PageRun, PageSet, varint};

const MAGIC: &[u8; 8] = b"WHIMWWST";
const FORMAT: u32 = 1;
const HEADER_LEN: usize = 48;
/// Bytes before the runs of a record.
const RECORD_HEADER_LEN: usize = 8;
/// Most pages of a machine: 1 TiB. A simulation needs a bit for each of them.
pub const PAGES_MAX: u64 = 1 << 28;
/// Most bytes of one record: every other page of the largest machine.
const RECORD_MAX: usize = PAGES_MAX as usize;

/// Header of a trace, before the samples.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct DirtyTraceHeader {
    /// Length of memory in pages.
    pub pages: u64,
    /// Pages that held something at the start: what a first round sends.
    pub populated: u64,
    /// Requested interval of the samples.
    pub interval: Duration,
    /// Start of the trace, in milliseconds since 1970.
    pub start_ms: u64,
}

/// Pages dirtied since the sample before.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Sample {
    /// Time since the sample before.
    pub duration: Duration,
    /// Dirty pages, as runs in order that do not touch.
    pub dirty: Vec<PageRun>,
}

impl Sample {
    /// Number of dirty pages.
    pub fn count(&self) -> u64 {
        self.dirty.iter().map(|run| run.len).sum()
    }
}

/// Complete trace in memory.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct DirtyTrace {
    /// Header of the trace.
    pub header: DirtyTraceHeader,
    /// Samples, one after the other without gaps.
    pub samples: Vec<Sample>,
}

/// Error of bytes that are no trace.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[allow(missing_docs, reason = "the text of each variant says what it is")]
pub enum TraceError {
    #[error("not a dirty trace")]
    Magic,
    #[error("the dirty trace has format {format}; this version reads format {FORMAT}")]
    Format { format: u32 },
    #[error("invalid header of the dirty trace: {what}")]
    Header { what: &'static str },
    #[error("invalid sample {number} of the dirty trace: {what}")]
    Record { number: u64, what: &'static str },
}

/// Encodes a header.
pub fn encode_header(head: &DirtyTraceHeader) -> Vec<u8> {
    let mut out = MAGIC.to_vec();
    out.extend(FORMAT.to_le_bytes());
    out.extend((PAGE_SIZE as u32).to_le_bytes());
    out.extend(head.pages.to_le_bytes());
    out.extend(head.populated.to_le_bytes());
    out.extend(micros(head.interval).to_le_bytes());
    out.extend([0; 4]);
    out.extend(head.start_ms.to_le_bytes());
    out
}

/// Encodes a sample.
pub fn encode_sample(took: Duration, dirty: impl IntoIterator<Item = PageRun>) -> Vec<u8> {
    let mut out = vec![0; RECORD_HEADER_LEN];
    let mut end = 0;
    for run in dirty {
        varint::put(&mut out, run.start - end);
        varint::put(&mut out, run.len);
        end = run.end();
    }
    let length = (out.len() - RECORD_HEADER_LEN) as u32;
    out[..4].copy_from_slice(&length.to_le_bytes());
    out[4..8].copy_from_slice(&micros(took).to_le_bytes());
    out
}

fn micros(duration: Duration) -> u32 {
    u32::try_from(duration.as_micros()).unwrap_or(u32::MAX)
}

/// Incremental parser of a trace.
#[derive(Debug, Default)]
pub struct Reader {
    buffer: Vec<u8>,
    /// Bytes of the buffer that are parsed already.
    used: usize,
    head: Option<DirtyTraceHeader>,
    records: u64,
}

impl Reader {
    /// Appends bytes that have arrived.
    pub fn feed(&mut self, bytes: &[u8]) {
        self.buffer.drain(..std::mem::take(&mut self.used));
        self.buffer.extend_from_slice(bytes);
    }

    /// Header of the trace, once it has arrived.
    pub fn header(&mut self) -> Result<Option<DirtyTraceHeader>, TraceError> {
        if self.head.is_none() {
            let Some(bytes) = self.buffer[self.used..].first_chunk::<HEADER_LEN>() else { return Ok(None) };
            self.head = Some(parse_header(bytes)?);
            self.used += HEADER_LEN;
        }
        Ok(self.head)
    }

    /// Next sample, once all of it has arrived.
    pub fn sample(&mut self) -> Result<Option<Sample>, TraceError> {
        let Some(head) = self.header()? else { return Ok(None) };
        let number = self.records;
        let wrong = |what| TraceError::Record { number, what };
        let bytes = &self.buffer[self.used..];
        let Some((begin, rest)) = bytes.split_first_chunk::<RECORD_HEADER_LEN>() else { return Ok(None) };
        let length = read_u32(begin, 0) as usize;
        if length > RECORD_MAX {
            return Err(wrong("longer than the maximum"));
        }
        let Some(body) = rest.get(..length) else { return Ok(None) };
        let took = Duration::from_micros(read_u32(begin, 4).into());
        if took.is_zero() {
            return Err(wrong("zero duration"));
        }
        let dirty = parse_runs(body, head.pages).map_err(wrong)?;
        self.used += RECORD_HEADER_LEN + length;
        self.records += 1;
        Ok(Some(Sample { duration: took, dirty }))
    }
}

impl DirtyTrace {
    /// Reads a trace. Bytes after its last complete sample are ignored.
    pub fn read(bytes: &[u8]) -> Result<Self, TraceError> {
        let mut reader = Reader { buffer: bytes.to_vec(), ..Reader::default() };
        let head = reader.header()?.ok_or(TraceError::Magic)?;
        let mut samples = Vec::new();
        while let Some(sample) = reader.sample()? {
            samples.push(sample);
        }
        Ok(Self { header: head, samples })
    }

    /// Encodes the trace.
    pub fn write(&self) -> Vec<u8> {
        let mut out = encode_header(&self.header);
        self.samples.iter().for_each(|s| out.extend(encode_sample(s.duration, s.dirty.iter().copied())));
        out
    }

    /// Sum of the samples' durations.
    pub fn duration(&self) -> Duration {
        self.samples.iter().map(|sample| sample.duration).sum()
    }

    /// Pages dirtied in each `window`: the writable working set over time (figure 2 of Clark et al., NSDI
    /// 2005). The last window may be shorter.
    pub fn working_sets(&self, window: Duration) -> Vec<(Duration, u64)> {
        let mut sets = Vec::new();
        let (mut took, mut set) = (Duration::ZERO, PageSet::empty(self.header.pages));
        for sample in &self.samples {
            took += sample.duration;
            sample.dirty.iter().for_each(|run| set.insert_run(*run));
            if took >= window {
                sets.push((took, set.take().count()));
                took = Duration::ZERO;
            }
        }
        if !took.is_zero() {
            sets.push((took, set.count()));
        }
        sets
    }
}

fn read_u32(bytes: &[u8], at: usize) -> u32 {
    let mut word = [0; 4];
    word.copy_from_slice(&bytes[at..at + 4]);
    u32::from_le_bytes(word)
}

fn read_u64(bytes: &[u8], at: usize) -> u64 {
    u64::from(read_u32(bytes, at)) | u64::from(read_u32(bytes, at + 4)) << 32
}

fn parse_header(bytes: &[u8; HEADER_LEN]) -> Result<DirtyTraceHeader, TraceError> {
    if &bytes[..8] != MAGIC {
        return Err(TraceError::Magic);
    }
    let format = read_u32(bytes, 8);
    if format != FORMAT {
        return Err(TraceError::Format { format });
    }
    let every = Duration::from_micros(read_u32(bytes, 32).into());
    let head = DirtyTraceHeader {
        pages: read_u64(bytes, 16),
        populated: read_u64(bytes, 24),
        interval: every,
        start_ms: read_u64(bytes, 40),
    };
    let wrong = |what| Err(TraceError::Header { what });
    match &head {
        _ if read_u32(bytes, 12) as usize != PAGE_SIZE => wrong("unsupported page size"),
        _ if read_u32(bytes, 36) != 0 => wrong("reserved bytes are not zero"),
        head if head.pages == 0 || head.pages > PAGES_MAX => wrong("page count out of range"),
        head if head.populated > head.pages => wrong("more present pages than pages"),
        head if head.interval.is_zero() => wrong("zero sample interval"),
        _ => Ok(head),
    }
}

fn parse_runs(mut bytes: &[u8], pages: u64) -> Result<Vec<PageRun>, &'static str> {
    let mut runs = Vec::new();
    let mut end = 0;
    while !bytes.is_empty() {
        let mut number = || varint::take(&mut bytes).map_err(|_| "number not in its shortest form");
        let (gap, len) = (number()?, number()?);
        if gap > pages || len > pages {
            return Err("run past the end of memory");
        }
        if len == 0 || (gap == 0 && !runs.is_empty()) {
            return Err("empty or adjoining runs");
        }
        let run = PageRun::new(end + gap, len);
        if run.end() > pages {
            return Err("run past the end of memory");
        }
        end = run.end();
        runs.push(run);
    }
    Ok(runs)
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn trace(pages: u64, sets: &[(u32, Vec<u64>)]) -> DirtyTrace {
        let every = Duration::from_millis(50);
        let samples = sets.iter().map(|(micros, dirty)| {
            let mut set = PageSet::empty(pages);
            dirty.iter().for_each(|page| {
                set.insert(page % pages);
            });
            Sample { duration: Duration::from_micros((*micros).max(1).into()), dirty: set.runs().collect() }
        });
        DirtyTrace {
            header: DirtyTraceHeader { pages, populated: pages / 2, interval: every, start_ms: 7 },
            samples: samples.collect(),
        }
    }

    proptest! {
        #[test]
        fn a_trace_is_read_as_it_was_written_in_pieces_of_any_size(
            pages in 1..5000u64,
            sets in proptest::collection::vec((any::<u32>(), proptest::collection::vec(any::<u64>(), 0..40)), 0..12),
            piece in 1..200usize,
        ) {
            let trace = trace(pages, &sets);
            let bytes = trace.write();
            prop_assert_eq!(&DirtyTrace::read(&bytes).unwrap(), &trace);
            let (mut reader, mut samples) = (Reader::default(), Vec::new());
            for piece in bytes.chunks(piece) {
                reader.feed(piece);
                while let Some(sample) = reader.sample().unwrap() {
                    samples.push(sample);
                }
            }
            prop_assert_eq!(reader.header().unwrap(), Some(trace.header));
            prop_assert_eq!(samples, trace.samples);
        }

        #[test]
        fn a_trace_that_was_cut_is_whole_up_to_the_cut(cut in 0..200usize) {
            let trace = trace(100, &[(50_000, vec![1, 2, 3]), (50_000, vec![]), (50_000, vec![99, 4])]);
            let bytes = trace.write();
            let cut = cut.min(bytes.len());
            match DirtyTrace::read(&bytes[..cut]) {
                Ok(read) => prop_assert!(trace.samples.starts_with(&read.samples) && read.samples.len() + 3 >= 3),
                Err(error) => prop_assert!(cut < HEADER_LEN && error == TraceError::Magic),
            }
        }
    }

    #[test]
    fn what_cannot_be_is_refused() {
        let good = trace(100, &[(50_000, vec![1, 2, 3])]).write();
        let with = |at: usize, byte: u8| {
            let mut bytes = good.clone();
            bytes[at] = byte;
            DirtyTrace::read(&bytes).unwrap_err()
        };
        assert_eq!(with(0, b'X'), TraceError::Magic);
        assert_eq!(with(8, 2), TraceError::Format { format: 2 });
        for (at, byte) in [(13, 0), (16, 0), (24, 101), (36, 1), (23, 1)] {
            assert!(matches!(with(at, byte), TraceError::Header { .. }), "{at}");
        }
        for (at, byte) in [(HEADER_LEN + 3, 0xff), (HEADER_LEN + 8, 99), (HEADER_LEN + 9, 0)] {
            assert!(matches!(with(at, byte), TraceError::Record { number: 0, .. }), "{at}");
        }
    }

    #[test]
    fn working_sets_count_each_page_once_a_window() {
        let trace = trace(100, &[(50_000, vec![1, 2]), (50_000, vec![2, 3]), (50_000, vec![2])]);
        let window =
            |ms| trace.working_sets(Duration::from_millis(ms)).iter().map(|set| set.1).collect::<Vec<_>>();
        assert_eq!((window(100), window(50), window(1000)), (vec![3, 1], vec![2, 2, 1], vec![3]));
        assert_eq!(trace.duration(), Duration::from_millis(150));
    }
}
