//! Where pages of a file lie among the frames, for who finds them again by their content.
//!
//! A hint: a frame may hold something else a moment later. Whoever reads there checks what was read.

use super::{
    block_cache::{BlockCache, each},
    block_index::{Key, ZERO},
    journal_record::FileId,
};
use crate::proto::PAGE;

impl BlockCache {
    /// Pages of `len` bytes from `offset` (a page's start) on that are here: byte in the file, and byte in
    /// the frames. Zeros lie nowhere.
    pub fn places(&self, file: FileId, offset: u64, len: u64) -> Vec<(u64, u64)> {
        let (page, block) = (PAGE as u64, self.block_size());
        let end = offset.saturating_add(len);
        let state = self.shared();
        let mut places = Vec::new();
        for number in offset / block..end.div_ceil(block) {
            let Some(found) = state.index.get(Key { file, block: number }) else { continue };
            let Some(frame) = found.frame else { continue };
            for at in each(found.valid).filter(|at| found.sums[*at as usize] != ZERO) {
                let byte = number * block + u64::from(at) * page;
                if (offset..end).contains(&byte) {
                    places.push((byte, self.frame_at(frame, at)));
                }
            }
        }
        places
    }
}
