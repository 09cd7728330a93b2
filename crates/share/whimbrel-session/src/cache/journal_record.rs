//! Records of the journal: what is in which frame, what files are, what has yet to happen on the server.
//!
//! Length, sum, postcard. The sum starts from the journal's generation, so that what an older journal left in
//! the file is no record. A record that does not fit its sum ends the journal: what follows was never
//! promised.

use crate::proto::{Attr, Ident, Op, RelPath, Time, Version};
use serde::{Deserialize, Serialize};

/// A file of the cache. Numbers are never used again within a cache.
pub type FileId = u64;

/// Longest record: changes of names that were folded, a bounded number of bytes of them.
pub(super) const MAX_RECORD: usize = 256 << 10;
/// Length and sum.
pub(super) const HEAD: usize = 8;

/// What is known of a file beside its blocks.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct FileRecord {
    /// Where it is.
    pub path: RelPath,
    /// What it is on the server; none before the server has made it.
    pub ident: Option<Ident>,
    /// The operation that makes it, while the server has yet to do that.
    pub made_by: Option<u64>,
    /// The server's content that clean pages are of, and that dirty ones were written over.
    pub base: Version,
    /// Its size here.
    pub size: u64,
    /// From this byte on, what is not here is zeros: the server's content from there is cut off or never was.
    pub zero_from: u64,
    /// Its last change here, if that has yet to reach the server.
    pub mtime: Option<Time>,
    /// The server may have one of these as its last change: write-backs that were begun set them.
    pub stamps: Vec<Time>,
    /// Size or content differ from the server's.
    pub dirty: bool,
    /// It was removed; what is dirty of it is nobody's.
    pub removed: bool,
}

impl FileRecord {
    /// Whether the server had this content after it said `attr`: answers overtake each other, and its clock
    /// of inodes does not go back.
    pub fn is_newer_than(&self, attr: &Attr) -> bool {
        self.base.ctime > attr.ctime
    }
}

/// One record.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub enum JournalRecord {
    /// A block is like this.
    Block {
        /// Its file.
        file: FileId,
        /// Its number.
        block: u64,
        /// Where it lies.
        frame: Option<u32>,
        /// Pages that are there.
        valid: u64,
        /// Pages that are dirty.
        dirty: u64,
        /// A sum for each valid page, the lowest first.
        sums: Vec<u32>,
    },
    /// A block is not here.
    NoBlock {
        /// Its file.
        file: FileId,
        /// Its number.
        block: u64,
    },
    /// A file is like this.
    File {
        /// Its number.
        file: FileId,
        /// What it is.
        record: FileRecord,
    },
    /// A file is not here.
    NoFile {
        /// Its number.
        file: FileId,
    },
    /// The server has yet to do this.
    Op {
        /// In this order.
        number: u64,
        /// What.
        op: Op,
    },
    /// The server has done it, or it is given up.
    OpDone {
        /// Which.
        number: u64,
    },
    /// All frames as of this many records are durable.
    Barrier {
        /// Records of this journal before the barrier began.
        records: u64,
    },
    /// The session ended in order: nothing is dirty.
    End,
    /// Changes with numbers below this may have been sent; those from it on were not.
    Sent {
        /// The first that was not.
        below: u64,
    },
    /// Changes came to be others before they were sent.
    Folded(MergedChanges),
}

/// Changes that come to the same as those that were queued before.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct MergedChanges {
    /// Changes that are these by now.
    pub now: Vec<(u64, Op)>,
    /// Changes that are none any more.
    pub gone: Vec<u64>,
    /// Files by the change that was to make them, and which makes them now, if any does.
    pub makes: Vec<(u64, Option<u64>)>,
}

impl MergedChanges {
    /// Whether all is as it was.
    pub fn is_nothing(&self) -> bool {
        self.now.is_empty() && self.gone.is_empty()
    }

    /// What becomes of a file that a change was to make: the change that makes it now, if one does. None if
    /// nothing became of it.
    pub fn made_by(&self, number: u64) -> Option<Option<u64>> {
        self.makes.iter().find(|(before, _)| *before == number).map(|(_, now)| *now)
    }
}

/// The bytes are no record.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
pub enum RecordError {
    /// There is no whole record.
    #[error("the journal ends in the middle of a record")]
    Short,
    /// The sum does not fit.
    #[error("a record of the journal does not fit its sum")]
    Sum,
    /// It fits its sum and means nothing.
    #[error("a record of the journal cannot be understood")]
    Meaning,
}

fn sum(bytes: &[u8], generation: u64) -> u32 {
    xxhash_rust::xxh3::xxh3_64_with_seed(bytes, generation) as u32
}

/// Appends a record as it is stored.
pub fn encode_record(record: &JournalRecord, generation: u64, out: &mut Vec<u8>) -> Result<(), RecordError> {
    let bytes = postcard::to_stdvec(record).map_err(|_| RecordError::Meaning)?;
    if bytes.len() > MAX_RECORD {
        return Err(RecordError::Meaning);
    }
    out.extend((bytes.len() as u32).to_le_bytes());
    out.extend(sum(&bytes, generation).to_le_bytes());
    out.extend(bytes);
    Ok(())
}

/// The first record of `bytes`, and how long it is.
pub fn decode_record(bytes: &[u8], generation: u64) -> Result<(JournalRecord, usize), RecordError> {
    let (head, rest) = bytes.split_first_chunk::<HEAD>().ok_or(RecordError::Short)?;
    let [a, b, c, d, e, f, g, h] = *head;
    let (len, expected) = (u32::from_le_bytes([a, b, c, d]) as usize, u32::from_le_bytes([e, f, g, h]));
    if len == 0 || len > MAX_RECORD {
        return Err(RecordError::Sum);
    }
    let body = rest.get(..len).ok_or(RecordError::Short)?;
    if sum(body, generation) != expected {
        return Err(RecordError::Sum);
    }
    match postcard::take_from_bytes(body) {
        Ok((record, [])) => Ok((record, HEAD + len)),
        _ => Err(RecordError::Meaning),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[test]
    fn a_record_of_another_generation_or_with_a_flipped_bit_is_none() {
        let record =
            JournalRecord::Block { file: 7, block: 9, frame: Some(3), valid: 5, dirty: 4, sums: vec![1, 2] };
        let mut bytes = Vec::new();
        encode_record(&record, 4, &mut bytes).unwrap();
        assert_eq!(decode_record(&bytes, 4), Ok((record, bytes.len())));
        assert!(decode_record(&bytes, 5).is_err());
        for bit in 0..bytes.len() * 8 {
            let mut wrong = bytes.clone();
            wrong[bit / 8] ^= 1 << (bit % 8);
            assert!(decode_record(&wrong, 4).is_err(), "bit {bit}");
        }
    }

    proptest! {
        #[test]
        fn garbage_is_an_error_and_no_panic(bytes in proptest::collection::vec(any::<u8>(), 0..100), generation: u64) {
            let mut framed = (bytes.len() as u32).to_le_bytes().to_vec();
            framed.extend(sum(&bytes, generation).to_le_bytes());
            framed.extend(&bytes);
            drop(decode_record(&framed, generation));
            drop(decode_record(&bytes, generation));
        }
    }
}
