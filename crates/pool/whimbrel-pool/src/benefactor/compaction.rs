//! Compaction of segments: frees the space of deleted chunks by moving the others to the newest segment.
//!
//! Compaction works on a full disk too. Segments without chunks are removed first, which needs no space. For
//! the others, new chunks never get the last half of a segment on the disk. A segment that still does not fit
//! stays until more of its chunks are deleted or the disk has space; nothing is latched by that.

use super::{
    chunk_store::{ChunkSlot, ChunkStore, name_of},
    error::{ChunkError, Result},
    segment::RECORD,
    segment_heads,
};
use std::{fs, sync::PoisonError};
use whimbrel_core::Digest;

impl ChunkStore {
    /// Moves the chunks out of segments that are more than half empty and deletes these; returns bytes freed.
    pub fn compact(&self) -> Result<u64> {
        let mut freed = 0;
        while let Some((number, length)) = self.sparsest() {
            let moved = self.compact_segment(number)?;
            freed += length.saturating_sub(moved);
        }
        Ok(freed)
    }

    /// The closed segment with the fewest bytes of chunks and its length, if it is more than half empty.
    fn sparsest(&self) -> Option<(u32, u64)> {
        let state = self.state();
        let newest = state.segments.last_key_value().map(|(number, _)| *number);
        let sealed = state.segments.iter().filter(|(number, _)| Some(**number) != newest);
        let sparse = sealed.filter(|(_, segment)| segment.live * 2 < segment.length);
        let sparsest = sparse.min_by_key(|(_, segment)| segment.live);
        sparsest.map(|(number, segment)| (*number, segment.length))
    }

    fn compact_segment(&self, number: u32) -> Result<u64> {
        let left: Vec<(Digest, ChunkSlot)> = {
            let state = self.state();
            let of_segment = state.index.iter().filter(|(_, slot)| slot.segment == number);
            of_segment.map(|(digest, slot)| (*digest, *slot)).collect()
        };
        let mut moved = 0;
        for (digest, slot) in left {
            let frame = match self.get(&digest) {
                Ok(frame) => frame,
                Err(error @ ChunkError::Tier(_)) => return Err(error),
                // Reading a damaged chunk removes it from the index.
                Err(_) => continue,
            };
            let _writing = self.writing.lock().unwrap_or_else(PoisonError::into_inner);
            if self.state().index.get(&digest).is_some_and(|now| now.segment == number) {
                moved += (RECORD + frame.len()) as u64;
                self.append(&[&(digest, frame)], slot.touched)?;
            }
        }
        // The copies must be durable before the segment is deleted.
        self.flush(&[])?;
        let _still = self.offloading.lock().unwrap_or_else(PoisonError::into_inner);
        if self.state().segments.get(&number).is_some_and(|segment| segment.file.is_none()) {
            self.remove_remote(number)?;
            self.state().segments.remove(&number);
            return Ok(moved);
        }
        self.state().segments.remove(&number);
        segment_heads::remove(&self.dir, number);
        fs::remove_file(self.dir.join(name_of(number)))
            .map_err(|error| self.failed("remove", number)(error))?;
        Ok(moved)
    }
}
