//! Checking a segment from front to back, for scrubs: each record in use has a right head and a right frame.
//!
//! The checksum of a frame is compared, not the digest of its content: a chunk was compared with its digest
//! when it was stored, so what is looked for are bytes that have changed on the disk since. A chunk of which
//! the segment has no record any more, because its disk wrote something else there, is found by counting: the
//! records that were met must have as many bytes as the index says are in use. Then, and where the disk
//! cannot be read, each chunk of the segment is read alone and compared with its digest.

use super::{
    chunk_store::{ChunkSlot, ChunkStore, name_of},
    segment::{self, RECORD},
    segment_reader::SegmentReader,
};
use std::io;
use whimbrel_core::Digest;
use whimbrel_image::pack_frame::PackFrame;

/// A segment that is being checked.
#[derive(Debug)]
pub(super) struct SegmentCheck {
    number: u32,
    offset: u64,
    length: u64,
    reader: SegmentReader,
    /// Bytes of the records in use that were met; none if the check began in the middle.
    met: Option<u64>,
}

/// Result of a step of the check.
#[derive(Debug, PartialEq, Eq)]
pub(super) enum SegmentStep {
    /// Bytes that were passed over, and a damaged chunk in them, which was removed from the index.
    Passed { bytes: u64, damaged: Option<Digest> },
    /// The segment is at its end; these chunks were not found in it, and removed from the index.
    End { damaged: Vec<Digest> },
}

/// What is at the offset.
enum Record {
    /// A record that the index does not name.
    Unused { end: u64 },
    /// A record in use, and whether its frame is right.
    Used { digest: Digest, end: u64, is_right: bool },
    /// No head of a record.
    Torn,
    /// The disk does not return it.
    Unreadable,
}

impl SegmentCheck {
    /// Starts with the record at `offset`; `length` is that of the segment.
    pub(super) fn open(store: &ChunkStore, number: u32, length: u64, offset: u64) -> io::Result<Self> {
        let reader = SegmentReader::open(&store.dir.join(name_of(number)))?;
        Ok(Self { number, offset, length, reader, met: (offset == 0).then_some(0) })
    }

    /// The segment, and the offset of its next record.
    pub(super) fn position(&self) -> (u32, u64) {
        (self.number, self.offset)
    }

    /// Whether there is no further record.
    pub(super) fn is_over(&self) -> bool {
        self.offset + RECORD as u64 > self.length
    }

    /// Checks the next record.
    pub(super) fn step(&mut self, store: &ChunkStore) -> SegmentStep {
        let at = self.offset;
        if self.is_over() {
            return SegmentStep::End { damaged: self.find_missing(store) };
        }
        let (end, damaged) = match self.read(store) {
            Record::Unused { end } => (end, None),
            Record::Used { digest, end, is_right } => {
                self.meet(end - at);
                let is_damaged = !is_right && store.remove_at(&digest, self.number, at + RECORD as u64);
                (end, is_damaged.then_some(digest))
            }
            Record::Torn => {
                self.pass(store, |digest, slot| store.remove_at(digest, slot.segment, slot.offset))
            }
            Record::Unreadable => {
                self.pass(store, |digest, _| store.check(digest).is_some_and(|(_, is_right)| !is_right))
            }
        };
        self.offset = end;
        SegmentStep::Passed { bytes: end - at, damaged }
    }

    fn meet(&mut self, bytes: u64) {
        self.met = self.met.map(|met| met + bytes);
    }

    fn read(&mut self, store: &ChunkStore) -> Record {
        let offset = self.offset + RECORD as u64;
        let Ok(head) = self.reader.read(self.offset, RECORD) else { return Record::Unreadable };
        let parsed = <&[u8; RECORD]>::try_from(head).ok().and_then(segment::parse);
        let Some((digest, length)) = parsed.filter(|(_, length)| offset + u64::from(*length) <= self.length)
        else {
            return Record::Torn;
        };
        let end = offset + u64::from(length);
        if !store.is_at(&digest, self.number, offset) {
            return Record::Unused { end };
        }
        let Ok(frame) = self.reader.read(offset, length as usize) else { return Record::Unreadable };
        let is_right = PackFrame::parse(frame).is_ok_and(|parsed| parsed.head.total() == length as usize);
        Record::Used { digest, end, is_right }
    }

    /// Passes over what has no head, up to the next record in use; asks `is_damaged` of it if it is here.
    fn pass(
        &mut self,
        store: &ChunkStore,
        is_damaged: impl FnOnce(&Digest, &ChunkSlot) -> bool,
    ) -> (u64, Option<Digest>) {
        let Some((digest, slot)) = store.next_in_segment(self.number, self.offset + RECORD as u64) else {
            return (self.length, None);
        };
        let start = slot.offset - RECORD as u64;
        if start > self.offset {
            return (start, None);
        }
        let end = slot.offset + u64::from(slot.length);
        self.meet(end - self.offset);
        (end, is_damaged(&digest, &slot).then_some(digest))
    }

    /// Reads each chunk that should be in the segment, if fewer bytes in use were met than there should be.
    fn find_missing(&self, store: &ChunkStore) -> Vec<Digest> {
        let is_missing =
            |met: u64| store.in_use_of(self.number, self.length).is_some_and(|in_use| met < in_use);
        if !self.met.is_some_and(is_missing) {
            return Vec::new();
        }
        let is_damaged = |digest: &Digest| store.check(digest).is_some_and(|(_, is_right)| !is_right);
        store.chunks_in_segment(self.number).into_iter().filter(is_damaged).collect()
    }
}

impl ChunkStore {
    /// The first segment from a number on that is on the disk, and its length.
    pub(super) fn segment_from(&self, number: u32) -> Option<(u32, u64)> {
        let state = self.state();
        let mut here = state.segments.range(number..).filter(|(_, segment)| segment.file.is_some());
        here.next().map(|(number, segment)| (*number, segment.length))
    }

    /// Number of the newest segment; 0 if there is none.
    pub(super) fn newest_segment(&self) -> u32 {
        self.state().segments.last_key_value().map_or(0, |(number, _)| *number)
    }

    /// Whether the index has the chunk at this place.
    fn is_at(&self, digest: &Digest, segment: u32, offset: u64) -> bool {
        self.state().index.get(digest).is_some_and(|slot| (slot.segment, slot.offset) == (segment, offset))
    }

    /// Removes a damaged chunk from the index, unless it has been moved or deleted.
    fn remove_at(&self, digest: &Digest, segment: u32, offset: u64) -> bool {
        self.remove_if(digest, |slot| (slot.segment, slot.offset) == (segment, offset))
    }

    /// The chunk in a segment with the lowest offset from `offset` on. Looks at the whole index.
    fn next_in_segment(&self, segment: u32, offset: u64) -> Option<(Digest, ChunkSlot)> {
        let state = self.state();
        let behind = state.index.iter().filter(|(_, slot)| slot.segment == segment && slot.offset >= offset);
        behind.min_by_key(|(_, slot)| slot.offset).map(|(digest, slot)| (*digest, *slot))
    }

    fn chunks_in_segment(&self, segment: u32) -> Vec<Digest> {
        let state = self.state();
        state.index.iter().filter(|(_, slot)| slot.segment == segment).map(|(digest, _)| *digest).collect()
    }

    /// Bytes of a segment that are in use; none if it is gone or has grown since it had `length` bytes.
    fn in_use_of(&self, segment: u32, length: u64) -> Option<u64> {
        let state = self.state();
        state.segments.get(&segment).filter(|segment| segment.length == length).map(|segment| segment.live)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use bytes::Bytes;
    use std::{fs::File, os::unix::fs::FileExt, path::Path};
    use whimbrel_image::pack_frame::{Encoder, Kind};

    /// A store with chunks that have records of the same length, in the order of their digests.
    fn store(dir: &Path, chunks: u32) -> (ChunkStore, Vec<(Digest, ChunkSlot)>) {
        let store = ChunkStore::open(&dir.join("chunks"), 1 << 30, 0).unwrap();
        for number in 0..chunks {
            let raw: Vec<u8> = (0..9000_u32)
                .map(|at| ((at ^ number << 16).wrapping_mul(2_654_435_761) >> 23) as u8)
                .collect();
            let frame = Encoder::new(-1000).encode(Kind::Blob, &raw, &[raw.len()]).unwrap();
            store.put(&[(Digest::of(&raw), Bytes::from(frame))]).unwrap();
        }
        let slots = store.state().index.iter().map(|(digest, slot)| (*digest, *slot)).collect();
        (store, slots)
    }

    fn check(store: &ChunkStore) -> Vec<Digest> {
        let (number, length) = store.segment_from(0).unwrap();
        let mut check = SegmentCheck::open(store, number, length, 0).unwrap();
        let mut found = Vec::new();
        loop {
            match check.step(store) {
                SegmentStep::Passed { damaged, .. } => found.extend(damaged),
                SegmentStep::End { damaged } => {
                    found.extend(damaged);
                    return found;
                }
            }
        }
    }

    fn segment(dir: &Path) -> File {
        File::options().read(true).write(true).open(dir.join("chunks/00000001.seg")).unwrap()
    }

    #[test]
    fn a_record_without_a_head_and_one_with_a_flipped_byte_are_found_and_the_others_are_intact() {
        let dir = tempfile::tempdir().unwrap();
        let (store, slots) = store(dir.path(), 20);
        assert_eq!(check(&store), []);
        store.delete(&[slots[4].0], std::time::Instant::now() + std::time::Duration::from_secs(9));
        assert_eq!(check(&store), [], "what is deleted is not missing");
        let file = segment(dir.path());
        file.write_all_at(&[0; 10], slots[7].1.offset - 30).unwrap();
        file.write_all_at(&[0xa5; 3], slots[9].1.offset + 5000).unwrap();
        // A record of a chunk that is not used any more.
        file.write_all_at(&[0; 48], slots[4].1.offset - 48).unwrap();
        let mut wanted = [slots[7], slots[9]];
        wanted.sort_by_key(|(_, slot)| slot.offset);
        assert_eq!(check(&store), wanted.map(|(digest, _)| digest));
        assert_eq!(store.usage().chunks, 17);
        assert_eq!(check(&store), []);
    }

    #[test]
    fn a_record_in_whose_place_the_disk_has_another_whole_record_is_found() {
        let dir = tempfile::tempdir().unwrap();
        let (store, slots) = store(dir.path(), 20);
        let file = segment(dir.path());
        let mut other = vec![0; RECORD + slots[3].1.length as usize];
        file.read_exact_at(&mut other, slots[3].1.offset - RECORD as u64).unwrap();
        assert_eq!(slots[3].1.length, slots[12].1.length);
        file.write_all_at(&other, slots[12].1.offset - RECORD as u64).unwrap();
        assert_eq!(check(&store), [slots[12].0]);
        assert_eq!(check(&store), []);
    }
}
