//! Journal records: content of frames, files, and changes that the server has yet to make.
//!
//! A record is length, checksum and postcard. The checksum is seeded with the generation of the journal, so
//! that remains of an older journal are invalid. A record with a wrong checksum ends the journal: nothing
//! after it was promised.

use crate::proto::{Attr, Ident, Op, RelPath, Time, Version};
use serde::{Deserialize, Serialize};

/// Number of a file in the cache, never used again.
pub type FileId = u64;

/// Longest record: the merged changes of names are bounded in bytes.
pub(super) const MAX_RECORD: usize = 256 << 10;
/// Bytes of length and checksum.
pub(super) const RECORD_HEADER_LEN: usize = 8;

/// State of a file, without its blocks.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct FileRecord {
    /// Path of the file.
    pub path: RelPath,
    /// Identity on the server; none until the server has created it.
    pub ident: Option<Ident>,
    /// The change that creates the file, while the server has yet to make it.
    pub made_by: Option<u64>,
    /// Version on the server of the clean pages, and of the content below the dirty ones.
    pub base: Version,
    /// Size of the file here.
    pub size: u64,
    /// Byte from which absent pages are zeros: the server has nothing there, or it will be cut off.
    pub zero_from: u64,
    /// Last change made here, if it has yet to reach the server.
    pub mtime: Option<Time>,
    /// Modification times that the server may have: write-backs that were started set them.
    pub stamps: Vec<Time>,
    /// Whether size or content differ from the server's.
    pub dirty: bool,
    /// Whether the file was removed; its dirty pages are then dropped.
    pub removed: bool,
}

impl FileRecord {
    /// Whether the server had this content after it reported `attr`. Replies overtake each other, but the
    /// server's inode change time does not go back.
    pub(crate) fn is_newer_than(&self, attr: &Attr) -> bool {
        self.base.ctime > attr.ctime
    }
}

/// One record of the journal.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub enum JournalRecord {
    /// State of a block.
    Block {
        /// File of the block.
        file: FileId,
        /// Number of the block.
        block: u64,
        /// Frame with its pages.
        frame: Option<u32>,
        /// Pages that are valid.
        valid: u64,
        /// Pages that are dirty.
        dirty: u64,
        /// Checksum of each valid page, the lowest first.
        sums: Vec<u32>,
    },
    /// A block is not here.
    NoBlock {
        /// File of the block.
        file: FileId,
        /// Number of the block.
        block: u64,
    },
    /// State of a file.
    File {
        /// Number of the file.
        file: FileId,
        /// State of the file.
        record: FileRecord,
    },
    /// A file is not here.
    NoFile {
        /// Number of the file.
        file: FileId,
    },
    /// A change of names that the server has yet to make.
    Op {
        /// Position in the order of changes.
        number: u64,
        /// The change itself.
        op: Op,
    },
    /// The server has made a change, or it was given up.
    OpDone {
        /// Number of the change.
        number: u64,
    },
    /// The frames as of this many records are durable.
    Barrier {
        /// Number of records of this journal before the barrier.
        records: u64,
    },
    /// The session ended in order: nothing is dirty.
    End,
    /// Changes below a number may have been sent; later ones were not.
    Sent {
        /// First number that was not sent.
        below: u64,
    },
    /// Unsent changes were merged.
    Folded(MergedChanges),
}

/// Unsent changes merged into equivalent ones.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct MergedChanges {
    /// Changes that were replaced.
    pub now: Vec<(u64, Op)>,
    /// Changes that were dropped.
    pub gone: Vec<u64>,
    /// For the files of each change that creates: the change that creates them now, or none.
    pub makes: Vec<(u64, Option<u64>)>,
}

impl MergedChanges {
    /// Whether nothing was merged.
    pub fn is_empty(&self) -> bool {
        self.now.is_empty() && self.gone.is_empty()
    }
}

/// Reasons why bytes are not a valid record.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
pub enum RecordError {
    /// There is no complete record.
    #[error("the journal ends in the middle of a record")]
    Short,
    /// The checksum does not match.
    #[error("a record of the journal has a wrong checksum")]
    Checksum,
    /// The checksum matches, but the content is invalid.
    #[error("a record of the journal has invalid content")]
    Content,
}

fn checksum(bytes: &[u8], generation: u64) -> u32 {
    xxhash_rust::xxh3::xxh3_64_with_seed(bytes, generation) as u32
}

/// Appends a record in its stored form.
pub fn encode_record(record: &JournalRecord, generation: u64, out: &mut Vec<u8>) -> Result<(), RecordError> {
    let bytes = postcard::to_stdvec(record).map_err(|_| RecordError::Content)?;
    if bytes.len() > MAX_RECORD {
        return Err(RecordError::Content);
    }
    out.extend((bytes.len() as u32).to_le_bytes());
    out.extend(checksum(&bytes, generation).to_le_bytes());
    out.extend(bytes);
    Ok(())
}

/// Decodes the first record of `bytes` and returns its length.
pub fn decode_record(bytes: &[u8], generation: u64) -> Result<(JournalRecord, usize), RecordError> {
    let (head, rest) = bytes.split_first_chunk::<RECORD_HEADER_LEN>().ok_or(RecordError::Short)?;
    let [a, b, c, d, e, f, g, h] = *head;
    let (len, expected) = (u32::from_le_bytes([a, b, c, d]) as usize, u32::from_le_bytes([e, f, g, h]));
    if len == 0 || len > MAX_RECORD {
        return Err(RecordError::Checksum);
    }
    let body = rest.get(..len).ok_or(RecordError::Short)?;
    if checksum(body, generation) != expected {
        return Err(RecordError::Checksum);
    }
    match postcard::take_from_bytes(body) {
        Ok((record, [])) => Ok((record, RECORD_HEADER_LEN + len)),
        _ => Err(RecordError::Content),
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
            framed.extend(checksum(&bytes, generation).to_le_bytes());
            framed.extend(&bytes);
            drop(decode_record(&framed, generation));
            drop(decode_record(&bytes, generation));
        }
    }
}
