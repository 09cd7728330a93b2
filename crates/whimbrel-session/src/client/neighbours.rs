//! Small files that will be read next, because others of their directory were: builds, checkouts and copies read a directory
//! file by file, and each would cost a round trip.
//!
//! The second file of a directory that has to be waited for brings some of those after it by name, the next more. Nobody
//! waits for them; what is here already is not asked for.

use super::session::Core;
use crate::{cache::FileId, proto::Kind};

/// Largest file that is brought along.
const SMALL: u64 = 256 << 10;
/// Directories of more names are not looked through.
const NAMES: usize = 4096;
/// Files and bytes brought along the first time; twice as many each time, up to the last.
const FIRST: (usize, u64) = (8, 256 << 10);
const DOUBLINGS: u32 = 4;

impl Core {
    /// A file is opened. If it has to be waited for, its neighbours may be next.
    pub(super) fn look_around(&self, id: u64, file: FileId, size: u64) {
        if size == 0 || size > SMALL || self.cache.has_block(file, 0, size) {
            return;
        }
        for id in self.neighbours(id).unwrap_or_default() {
            // Who opens it will hear what is wrong with it.
            if let Ok(file) = self.file_of(id) {
                self.fetch_all(id, file);
            }
        }
    }

    /// Small files after this one by name, the first of the directory after the last.
    fn neighbours(&self, id: u64) -> Option<Vec<u64>> {
        let mut nodes = self.nodes();
        let (parent, name) = nodes.get(id)?.names.first().cloned()?;
        let dir = nodes.dir(parent)?;
        dir.waited = dir.waited.saturating_add(1);
        let doublings = dir.waited.checked_sub(2)?.min(DOUBLINGS);
        if dir.entries.len() > NAMES {
            return None;
        }
        let (most, mut bytes) = (FIRST.0 << doublings, FIRST.1 << doublings);
        let mut entries: Vec<_> =
            dir.entries.iter().map(|(other, id)| (*other <= name, other, *id)).collect();
        entries.sort_unstable();
        let ids: Vec<u64> = entries.into_iter().map(|(_, _, id)| id).collect();
        let small = ids.into_iter().filter(|other| {
            let node =
                nodes.get(*other).filter(|node| *other != id && node.attr.kind == Kind::File && !node.local);
            let size = node.map_or(0, |node| node.attr.size);
            let fits = size > 0 && size <= SMALL.min(bytes);
            bytes -= if fits { size } else { 0 };
            fits
        });
        Some(small.take(most).collect())
    }
}
