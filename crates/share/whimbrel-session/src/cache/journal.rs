//! The journal: records appended to one of two parts, and restarted in the other part when it has grown.
//!
//! A part begins with a header that holds its generation; the valid header with the higher generation is
//! current. The header of a new journal is written after the rest is durable, so a crash leaves either the
//! old journal or the new one, complete.

use super::{
    block_index::Geometry,
    journal_record::{
        JournalRecord, MAX_RECORD, RECORD_HEADER_LEN, RecordError, decode_record, encode_record,
    },
    storage::{Storage, StoragePart},
};
use std::io;

const MAGIC: &[u8; 8] = b"WhSCjnl1";
const HEADER_LEN: u64 = 32;
/// Bytes per read when a journal is read.
const READ_SIZE: usize = 1 << 20;

#[derive(Debug)]
pub(super) struct Journal {
    which: bool,
    pub(super) generation: u64,
    tail: u64,
    pub(super) records: u64,
}

fn header(generation: u64, geometry: Geometry) -> Vec<u8> {
    let mut bytes = MAGIC.to_vec();
    bytes.extend(generation.to_le_bytes());
    bytes.extend(geometry.pages.to_le_bytes());
    bytes.extend(geometry.frames.to_le_bytes());
    bytes.extend(xxhash_rust::xxh3::xxh3_64(&bytes).to_le_bytes());
    bytes
}

/// Decodes the header of a part, if it is valid.
fn read_header(medium: &dyn Storage, which: bool) -> io::Result<Option<(u64, Geometry)>> {
    let mut bytes = [0; HEADER_LEN as usize];
    if medium.read(StoragePart::Journal(which), 0, &mut bytes)? < bytes.len() {
        return Ok(None);
    }
    let long = |at: usize| u64::from_le_bytes([0, 1, 2, 3, 4, 5, 6, 7].map(|byte: usize| bytes[at + byte]));
    let (generation, shape) = (long(8), long(16));
    let geometry = Geometry { pages: shape as u32, frames: (shape >> 32) as u32 };
    let good = bytes[..] == header(generation, geometry)[..] && (1..=64).contains(&geometry.pages);
    Ok(good.then_some((generation, geometry)))
}

fn malformed(error: RecordError) -> io::Error {
    io::Error::new(io::ErrorKind::InvalidInput, error)
}

impl Journal {
    /// The current journal of a storage and its records; none if there is no journal.
    pub(super) fn read(medium: &dyn Storage) -> io::Result<Option<(Self, Geometry, Vec<JournalRecord>)>> {
        let heads = [read_header(medium, false)?, read_header(medium, true)?];
        let Some((generation, geometry)) =
            heads.into_iter().flatten().max_by_key(|(generation, _)| *generation)
        else {
            return Ok(None);
        };
        let which = heads[1].is_some_and(|(found, _)| found == generation);
        let mut journal = Self { which, generation, tail: HEADER_LEN, records: 0 };
        let records = journal.read_records(medium)?;
        Ok(Some((journal, geometry, records)))
    }

    /// Reads until the first invalid record, which is the end of the journal.
    fn read_records(&mut self, medium: &dyn Storage) -> io::Result<Vec<JournalRecord>> {
        let (mut records, mut window, mut at) = (Vec::new(), Vec::new(), 0);
        loop {
            if window.len() - at < RECORD_HEADER_LEN + MAX_RECORD {
                window.drain(..at);
                at = 0;
                let from = window.len();
                window.resize(from + READ_SIZE, 0);
                let read = medium.read(
                    StoragePart::Journal(self.which),
                    self.tail + from as u64,
                    &mut window[from..],
                )?;
                window.truncate(from + read);
            }
            let Ok((record, len)) = decode_record(&window[at..], self.generation) else { return Ok(records) };
            records.push(record);
            at += len;
            self.tail += len as u64;
            self.records += 1;
        }
    }

    pub(super) fn len(&self) -> u64 {
        self.tail
    }

    pub(super) fn append(&mut self, medium: &dyn Storage, records: &[JournalRecord]) -> io::Result<()> {
        let mut bytes = Vec::with_capacity(records.len() * 96);
        for record in records {
            encode_record(record, self.generation, &mut bytes).map_err(malformed)?;
        }
        medium.write(StoragePart::Journal(self.which), self.tail, &bytes)?;
        self.tail += bytes.len() as u64;
        self.records += records.len() as u64;
        Ok(())
    }

    pub(super) fn part(&self) -> StoragePart {
        StoragePart::Journal(self.which)
    }

    /// Writes a journal of these records to the part that is not current. It is current and durable when this
    /// returns.
    pub(super) fn start(
        medium: &dyn Storage,
        after: Option<&Journal>,
        geometry: Geometry,
        records: impl Iterator<Item = JournalRecord>,
    ) -> io::Result<Self> {
        let which = after.is_some_and(|journal| !journal.which);
        let generation = after.map_or(1, |journal| journal.generation + 1);
        let mut next = Self { which, generation, tail: HEADER_LEN, records: 0 };
        medium.truncate(next.part(), 0)?;
        let mut some = Vec::with_capacity(1024);
        for record in records {
            some.push(record);
            if some.len() == 1024 {
                next.append(medium, &some)?;
                some.clear();
            }
        }
        next.append(medium, &some)?;
        medium.sync(next.part())?;
        medium.write(next.part(), 0, &header(generation, geometry))?;
        medium.sync(next.part())?;
        Ok(next)
    }
}
