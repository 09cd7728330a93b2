//! Content index: places of a file's pages in the frames, for finding them again by their content.
//!
//! The result is a hint, because a frame may be reused at any moment: readers check what they read.

use super::{
    block_cache::{BlockCache, page_numbers},
    block_index::{Key, ZERO},
    journal_record::FileId,
};
use crate::proto::PAGE;

impl BlockCache {
    /// Byte offsets, in the file and in the frames, of the pages in `len` bytes from `offset` (a page
    /// boundary) that are here. Pages of zeros are left out.
    pub(crate) fn page_places(&self, file: FileId, offset: u64, len: u64) -> Vec<(u64, u64)> {
        let (page, block) = (PAGE as u64, self.block_size());
        let end = offset.saturating_add(len);
        let state = self.read_state();
        let mut places = Vec::new();
        for number in offset / block..end.div_ceil(block) {
            let Some(found) = state.index.get(Key { file, block: number }) else { continue };
            let Some(frame) = found.frame else { continue };
            for at in page_numbers(found.valid).filter(|at| found.sums[*at as usize] != ZERO) {
                let byte = number * block + u64::from(at) * page;
                if (offset..end).contains(&byte) {
                    places.push((byte, self.frame_at(frame, at)));
                }
            }
        }
        places
    }
}
