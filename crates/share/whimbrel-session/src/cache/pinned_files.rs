//! Pinned files: their content stays in the cache.
//!
//! A pin is a path; it covers the file there, or all files below. Eviction passes over their blocks. Where
//! nothing else can leave, it does so only while they take no more than a share of the cache, so that what is
//! written finds room. Pins are in memory only here: the session stores them.

use super::{
    block_cache::{BlockCache, State},
    journal_record::FileRecord,
};
use crate::proto::RelPath;

/// The share of the frames that pinned content may have, in quarters.
const PINNED_QUARTERS: u64 = 3;

/// Whether one of the pins covers a file.
pub(super) fn is_pinned(pins: &[RelPath], record: &FileRecord) -> bool {
    pins.iter().any(|pin| record.path.is_within(pin))
}

impl BlockCache {
    /// Sets the paths whose content stays.
    pub fn set_pins(&self, pins: Vec<RelPath>) {
        let mut state = self.write_state();
        state.files.values_mut().for_each(|held| held.pinned = is_pinned(&pins, &held.record));
        state.pins = pins;
    }

    /// The paths whose content stays.
    pub fn pins(&self) -> Vec<RelPath> {
        self.read_state().pins.clone()
    }

    /// Bytes of blocks that may be pinned.
    pub fn pinnable(&self) -> u64 {
        self.pinnable_frames() * self.geometry.block()
    }

    fn pinnable_frames(&self) -> u64 {
        u64::from(self.geometry.frames) * PINNED_QUARTERS / 4
    }

    /// Whether pinned content takes no more than its share. Looks at all blocks.
    pub(super) fn pins_hold(&self, state: &State) -> bool {
        let pinned = |file| state.files.get(&file).is_some_and(|held| held.pinned);
        let frames = state.index.all().filter(|(key, block)| block.frame.is_some() && pinned(key.file));
        state.pins.is_empty() || frames.count() as u64 <= self.pinnable_frames()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{
        cache::{CacheRead, DiskStorage, FileId, Geometry},
        proto::Version,
    };
    use tempfile::TempDir;

    const BLOCK: u64 = 4096;

    fn path(text: &str) -> RelPath {
        RelPath::new(text.as_bytes()).unwrap()
    }

    fn cache() -> (BlockCache, TempDir) {
        let dir = tempfile::tempdir().unwrap();
        let storage = DiskStorage::open(dir.path()).unwrap();
        let geometry = Geometry::new(BLOCK, 8 * BLOCK).unwrap();
        (BlockCache::open(Box::new(storage), geometry).unwrap().0, dir)
    }

    fn add(cache: &BlockCache, name: &str) -> FileId {
        let record = FileRecord {
            path: path(name),
            ident: None,
            made_by: None,
            base: Version::default(),
            size: 100 * BLOCK,
            zero_from: 100 * BLOCK,
            mtime: None,
            stamps: Vec::new(),
            dirty: false,
            removed: false,
        };
        cache.add_file(record).unwrap()
    }

    fn fill(cache: &BlockCache, file: FileId, blocks: std::ops::Range<u64>) {
        for block in blocks {
            cache.fill(file, cache.epoch(file).unwrap(), block * BLOCK, &[7; BLOCK as usize]).unwrap();
        }
    }

    fn blocks(cache: &BlockCache, file: FileId) -> usize {
        (0..100).filter(|block| cache.has_block(file, *block, 100 * BLOCK)).count()
    }

    #[test]
    fn pinned_content_stays_until_it_is_unpinned_or_moves_away() {
        let (cache, _dir) = cache();
        cache.set_pins(vec![path("images")]);
        let (pinned, other) = (add(&cache, "images/a"), add(&cache, "imagesb"));
        fill(&cache, pinned, 0..4);
        fill(&cache, other, 0..100);
        assert_eq!((blocks(&cache, pinned), blocks(&cache, other)), (4, 4));
        cache.update_file(other, |record| record.path = path("images/b")).unwrap();
        let third = add(&cache, "third");
        fill(&cache, third, 0..100);
        assert_eq!(blocks(&cache, pinned) + blocks(&cache, other), 7, "one block of the third can leave");
        cache.update_file(pinned, |record| record.path = path("a")).unwrap();
        fill(&cache, third, 0..100);
        assert_eq!(blocks(&cache, pinned), 0);
        let left = blocks(&cache, other);
        assert!(left > 0);
        cache.set_pins(Vec::new());
        fill(&cache, third, 0..100);
        assert_eq!(blocks(&cache, other), 0);
    }

    #[test]
    fn what_is_written_finds_room_beside_pinned_content_even_if_all_is_pinned() {
        let (cache, _dir) = cache();
        cache.set_pins(vec![RelPath::root()]);
        let (pinned, written) = (add(&cache, "pinned"), add(&cache, "written"));
        fill(&cache, pinned, 0..8);
        assert_eq!(cache.write(written, 0, &[1; 2 * BLOCK as usize]).unwrap(), CacheRead::Complete);
        assert_eq!(blocks(&cache, pinned), 6);
    }
}
