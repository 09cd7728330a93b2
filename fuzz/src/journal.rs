//! The journal of a session's cache, whole: records of any meaning whose sums are right, read by a cache that
//! is opened on them.

use std::sync::{Arc, Mutex, PoisonError};
use whimbrel_session::cache::{
    BlockCache, Geometry, JournalRecord, Storage, StoragePart, decode_record, encode_record, has_unsent,
};

/// Of a journal that was begun once.
const GENERATION: u64 = 1;
const GEOMETRY: Geometry = Geometry { pages: 2, frames: 4 };
/// Where the first record of a journal lies (`docs/formats/session-cache.md`).
const START: usize = 32;

#[derive(Clone, Default)]
struct Ram([Arc<Mutex<Vec<u8>>>; 3]);

impl Ram {
    fn with<T>(&self, part: StoragePart, with: impl FnOnce(&mut Vec<u8>) -> T) -> T {
        let which = match part {
            StoragePart::Frames => 0,
            StoragePart::Journal(which) => 1 + usize::from(which),
        };
        with(&mut self.0[which].lock().unwrap_or_else(PoisonError::into_inner))
    }
}

impl Storage for Ram {
    fn read(&self, part: StoragePart, at: u64, out: &mut [u8]) -> std::io::Result<usize> {
        self.with(part, |bytes| {
            let found = bytes.get(at as usize..).unwrap_or_default();
            let len = found.len().min(out.len());
            out[..len].copy_from_slice(&found[..len]);
            Ok(len)
        })
    }

    fn write(&self, part: StoragePart, at: u64, data: &[u8]) -> std::io::Result<()> {
        self.with(part, |bytes| {
            let end = at as usize + data.len();
            bytes.resize(bytes.len().max(end), 0);
            bytes[at as usize..end].copy_from_slice(data);
            Ok(())
        })
    }

    fn sync(&self, _: StoragePart) -> std::io::Result<()> {
        Ok(())
    }

    fn truncate(&self, part: StoragePart, len: u64) -> std::io::Result<()> {
        self.with(part, |bytes| bytes.resize(len as usize, 0));
        Ok(())
    }

    fn len(&self, part: StoragePart) -> std::io::Result<u64> {
        Ok(self.with(part, |bytes| bytes.len() as u64))
    }
}

/// Has a cache opened on these records, and once more on what it made of them: it owes the same then.
pub(crate) fn open(mut records: &[u8]) {
    let medium = Ram::default();
    if BlockCache::open(Box::new(medium.clone()), GEOMETRY).is_err() {
        return;
    }
    let journal = StoragePart::Journal(false);
    let mut bytes = medium.with(journal, |bytes| bytes.clone());
    assert!(decode_record(&bytes[START..], GENERATION).is_ok(), "a journal begins with a record");
    while let Ok((record, rest)) = postcard::take_from_bytes::<JournalRecord>(records) {
        records = rest;
        // One that is too long is none.
        let _ = encode_record(&record, GENERATION, &mut bytes);
    }
    medium.with(journal, |old| *old = bytes);
    let owed = has_unsent(&medium).expect("memory does not fail");
    let opened = BlockCache::open(Box::new(medium.clone()), GEOMETRY);
    assert!(opened.is_ok(), "a journal of records is taken up");
    assert_eq!(has_unsent(&medium).ok(), Some(owed), "what is owed survives being taken up");
}
