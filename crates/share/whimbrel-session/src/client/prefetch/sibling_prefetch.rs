//! Sibling prefetch: fetches small files near those that are read, because builds, checkouts and copies read
//! whole trees.
//!
//! Otherwise each file would cost a round trip. When a program waits for a second file of a directory, some
//! of the files after it by name are fetched, then files of directories nearby. As long as they are used,
//! each wait fetches four times as many. A program that reads here and there gets fewer, and then none.
//! Nobody waits for a prefetch, and what is here already is not requested.

use crate::client::{
    namespace::inodes::{Inode, InodeTable},
    session::Core,
};
use crate::{cache::FileId, proto::Kind};
use std::{
    collections::{HashSet, VecDeque},
    sync::{MutexGuard, PoisonError},
};
use whimbrel_fuse::ROOT;

/// Largest file that is prefetched, in bytes.
const MAX_FILE_SIZE: u64 = 256 << 10;
/// Most names of a directory that is searched.
const MAX_NAMES: usize = 4096;
/// Most directories searched for one wait.
const MAX_DIRS: usize = 256;
/// Files and bytes of the first prefetch; each level has four times as many.
const FIRST_PREFETCH: (usize, u64) = (16, 256 << 10);
const LEVELS: u32 = 3;
/// Number of recent waits: concurrent programs read in several directories.
const RECENT_WAITS: usize = 4;
/// A prefetch was useful if one file of this many was opened.
const USEFUL_FRACTION: usize = 8;

/// Size of the next prefetch, judged by the use of the earlier ones. Pure.
#[derive(Debug, Default)]
pub(in crate::client) struct PrefetchDistance {
    level: u32,
    /// Directories of the latest waits.
    recent: VecDeque<u64>,
    /// The latest prefetches: number of files, and the files not opened yet.
    prefetches: VecDeque<(usize, HashSet<FileId>)>,
}

impl PrefetchDistance {
    fn file_opened(&mut self, file: FileId) {
        self.prefetches.iter_mut().for_each(|(_, waiting)| _ = waiting.remove(&file));
    }

    fn is_prefetched(&self, file: FileId) -> bool {
        self.prefetches.iter().any(|(_, waiting)| waiting.contains(&file))
    }

    /// Records a wait for a file of this directory; returns how many files and bytes to prefetch.
    fn next_size(&mut self, dir: u64) -> Option<(usize, u64)> {
        let near = self.recent.contains(&dir);
        self.recent.push_back(dir);
        if self.recent.len() > RECENT_WAITS {
            self.recent.pop_front();
        }
        let all: usize = self.prefetches.iter().map(|(all, _)| all).sum();
        let left: usize = self.prefetches.iter().map(|(_, waiting)| waiting.len()).sum();
        self.level = match near {
            _ if all == 0 => u32::from(near),
            _ if (all - left) * USEFUL_FRACTION >= all => (self.level + 1).min(LEVELS),
            true => self.level,
            false => self.level / 2,
        };
        if self.level == 0 {
            self.prefetches.clear();
        }
        let shift = 2 * self.level.checked_sub(1)?;
        Some((FIRST_PREFETCH.0 << shift, FIRST_PREFETCH.1 << shift))
    }

    fn start_fetching(&mut self, files: HashSet<FileId>) {
        self.prefetches.push_back((files.len(), files));
        if self.prefetches.len() > RECENT_WAITS {
            self.prefetches.pop_front();
        }
    }
}

/// Files chosen so far, and how much more may be chosen.
struct Chosen<'a> {
    files: usize,
    bytes: u64,
    fits: &'a dyn Fn(&Inode) -> bool,
    ids: Vec<u64>,
}

impl Chosen<'_> {
    fn is_full(&self) -> bool {
        self.ids.len() >= self.files || self.bytes == 0
    }

    fn offer(&mut self, id: u64, node: &Inode) {
        let size = node.attr.size;
        let small = node.attr.kind == Kind::File && !node.local && (1..=MAX_FILE_SIZE).contains(&size);
        if small && !self.is_full() && (self.fits)(node) {
            self.bytes = self.bytes.saturating_sub(size);
            self.ids.push(id);
        }
    }
}

/// Entries of a directory by name, those after `after` first; none of a large directory.
fn in_order(nodes: &InodeTable, dir: u64, after: Option<&crate::proto::Name>) -> Vec<u64> {
    let Some(dir) = nodes.get(dir).and_then(|node| node.dir.as_ref()) else { return Vec::new() };
    if dir.entries.len() > MAX_NAMES {
        return Vec::new();
    }
    let mut entries: Vec<_> =
        dir.entries.iter().map(|(name, id)| (after.is_some_and(|after| name <= after), name, *id)).collect();
    entries.sort_unstable();
    entries.into_iter().map(|(_, _, id)| id).collect()
}

/// Chooses small files near a file: in its directory, in those below, in those beside it, and so on upwards.
fn choose(nodes: &InodeTable, id: u64, chosen: &mut Chosen<'_>) {
    let Some((parent, name)) = nodes.get(id).and_then(|node| node.names.first()) else { return };
    let (mut top, mut seen) = (*parent, HashSet::new());
    loop {
        let mut queue = VecDeque::from([top]);
        while let Some(dir) = queue.pop_front() {
            let first = seen.insert(dir);
            if chosen.is_full() || seen.len() > MAX_DIRS {
                return;
            }
            for other in in_order(nodes, dir, (dir == *parent).then_some(name)) {
                let Some(node) = nodes.get(other) else { continue };
                if node.dir.is_some() && !seen.contains(&other) {
                    queue.push_back(other);
                } else if first && other != id {
                    chosen.offer(other, node);
                }
            }
        }
        let above = nodes.get(top).and_then(|node| node.names.first());
        match above {
            Some((above, _)) if top != ROOT => top = *above,
            _ => return,
        }
    }
}

impl Core {
    /// Handles the opening of a file: if it has to be fetched, prefetches its siblings.
    pub(in crate::client) fn prefetch_siblings(&self, id: u64, file: FileId, size: u64) {
        let coming = {
            let mut ahead = self.prefetch_distance();
            let coming = ahead.is_prefetched(file);
            ahead.file_opened(file);
            coming
        };
        if coming || size == 0 || size > MAX_FILE_SIZE || self.cache.has_block(file, 0, size) {
            return;
        }
        // The file that is needed now goes first.
        self.fetch_all(id, file);
        let ids = self.choose_siblings(id);
        // Errors are left to a later open. Adding files writes journal records, for which no program waits.
        let files: Vec<_> = ids.into_iter().filter_map(|id| Some((id, self.file_of(id).ok()?))).collect();
        if files.is_empty() {
            return;
        }
        self.prefetch_distance().start_fetching(files.iter().map(|(_, file)| *file).collect());
        for (id, file) in files {
            self.fetch_all(id, file);
        }
    }

    fn prefetch_distance(&self) -> MutexGuard<'_, PrefetchDistance> {
        self.prefetch_distance.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn choose_siblings(&self, id: u64) -> Vec<u64> {
        let mut ahead = self.prefetch_distance();
        let nodes = self.inodes();
        let parent = nodes.get(id).and_then(|node| node.names.first()).map(|(parent, _)| *parent);
        let Some((files, bytes)) = parent.and_then(|parent| ahead.next_size(parent)) else {
            return Vec::new();
        };
        let known = self.known_files.lock().unwrap_or_else(PoisonError::into_inner);
        let fits = |node: &Inode| {
            let file = node.file.or_else(|| known.get(&node.attr.ident).copied());
            file.is_none_or(|file| {
                !ahead.is_prefetched(file) && !self.cache.has_block(file, 0, node.attr.size)
            })
        };
        let mut chosen = Chosen { files, bytes, fits: &fits, ids: Vec::new() };
        choose(&nodes, id, &mut chosen);
        chosen.ids
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn fetch(ahead: &mut PrefetchDistance, dir: u64, first: u64) -> usize {
        let files = ahead.next_size(dir).map_or(0, |(files, _)| files);
        ahead.start_fetching((first..first + files as u64).map(|number| number as FileId).collect());
        files
    }

    #[test]
    fn who_reads_on_gets_ever_more_and_who_reads_here_and_there_gets_nothing() {
        let mut ahead = PrefetchDistance::default();
        let mut brought = Vec::new();
        for round in 0..5 {
            brought.push(fetch(&mut ahead, 1, round * 1000));
            (0..4).for_each(|number| ahead.file_opened((round * 1000 + number * 7) as FileId));
        }
        assert_eq!(brought, [0, 16, 64, 64, 64], "four of sixty-four are too few to go on");
        let scattered: Vec<usize> = (10..20).map(|dir| fetch(&mut ahead, dir, dir * 1000)).collect();
        assert_eq!(scattered[..4], [16, 0, 0, 0]);
        assert!(scattered.iter().all(|files| *files <= 16));
    }
}
