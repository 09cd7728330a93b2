//! Eviction: names and attributes that nobody uses leave memory when there are too many.
//!
//! Directories lose their names in the order of their last use. A directory that lost some counts as not
//! listed, so what left is asked for again when it is needed. What is open, was changed here or has unsent
//! content stays. The kernel may know a name; it is told to drop it, and the inode leaves at a later pass
//! once the kernel has forgotten it. Directories that the kernel knows stay until it forgets them by itself:
//! a process may be in one. So the table can be some larger than its limit, and a directory that is being
//! listed is never cut. A file that comes back has another inode number than before.

use super::inodes::{Inode, InodeTable};
use crate::{cache::FileId, client::session::Core, proto::Name};
use whimbrel_core::lock;

/// Directories among so many latest uses, and among a part of the limit, keep their names: an operation that
/// has listed one may not have looked yet, and would take what left for absent.
const LATEST_USES: u64 = 256;
/// A pass ends when this part of the limit is free, and the next one begins when as much came anew or was
/// used.
const PART: usize = 8;

impl InodeTable {
    /// Whether there are more inodes than `most`, and another pass is likely to find some: enough came or
    /// were used since the last one.
    fn is_full(&self, most: usize) -> bool {
        let (inodes, uses) = self.next_eviction;
        self.nodes.len() > most && (self.nodes.len() > inodes || self.uses > uses)
    }

    /// Drops names of the directories that were not used for longest. Files that are `unsent` stay.
    fn evict(&mut self, most: usize, unsent: impl Fn(FileId) -> bool) {
        let wanted = self.nodes.len().saturating_sub(most - most / PART);
        let in_use = self.uses.saturating_sub(LATEST_USES.max((most / PART) as u64));
        let mut dirs: Vec<(u64, u64)> = self
            .nodes
            .iter()
            .filter_map(|(id, node)| Some((node.dir.as_deref()?.last_use, *id)))
            .filter(|(used, _)| *used < in_use)
            .collect();
        dirs.sort_unstable();
        let mut left = 0;
        for (_, dir) in dirs {
            if left >= wanted {
                break;
            }
            left += self.evict_names_of(dir, &unsent);
        }
        self.next_eviction = (self.nodes.len() + most / PART, self.uses + (most / PART) as u64);
    }

    /// Drops names of a directory, and returns how many left or will.
    fn evict_names_of(&mut self, id: u64, unsent: &impl Fn(FileId) -> bool) -> usize {
        let Some(dir) = self.dir(id) else { return 0 };
        let names: Vec<(Name, u64)> =
            dir.entries.iter().map(|(name, child)| (name.clone(), *child)).collect();
        let (mut gone, mut told) = (0, 0);
        for (name, child) in names {
            let Some(node) = self.nodes.get(&child).filter(|node| node.is_idle(unsent)) else { continue };
            if node.refs > 0 {
                told += usize::from(node.dir.is_none());
                self.appeared.extend(node.dir.is_none().then_some((id, name)));
                continue;
            }
            self.unlink(id, &name);
            self.remove_unused(child);
            gone += 1;
        }
        if let Some(dir) = self.dir(id).filter(|_| gone > 0) {
            dir.listed_at = None;
            dir.entries.shrink_to_fit();
        }
        gone + told
    }
}

impl Inode {
    /// Whether the server can tell everything that is known here.
    fn is_idle(&self, unsent: &impl Fn(FileId) -> bool) -> bool {
        let changed = self.local || self.atime.is_some() || !self.ops.is_empty();
        let used = self.opens > 0 || self.conflicted || self.lock_lost;
        let empty = self.dir.as_ref().is_none_or(|dir| dir.entries.is_empty());
        !changed && !used && empty && !self.file.is_some_and(unsent)
    }
}

impl Core {
    /// Drops names and attributes if there are too many, and the records of files without content that are
    /// not known by any name then.
    pub(in crate::client) fn evict_names(&self) {
        {
            let mut nodes = self.inodes();
            // Changes that wait name inodes.
            if !nodes.is_full(self.options.most_names) || self.writeback.queued() > 0 {
                return;
            }
            nodes.evict(self.options.most_names, |file| {
                self.cache.file(file).is_some_and(|record| record.dirty)
            });
        }
        for (file, ident) in self.cache.empty_files() {
            let nodes = self.inodes();
            if nodes.by_ident(&ident).is_none() {
                lock(&self.known_files).remove(&ident);
                if let Err(error) = self.cache.remove_file(file) {
                    tracing::debug!(%error, "cannot drop the record of a file without content");
                }
            }
        }
    }
}
