//! Eviction: names and attributes that nobody uses leave memory when there are too many.
//!
//! Directories lose their names in the order of their last use. A directory that lost some counts as not
//! listed, so what left is asked for again when it is needed. What is open, was changed here or has unsent
//! content stays. The kernel may know a name; it is told to drop it, and the inode leaves at a later pass
//! once the kernel has forgotten it. Directories that the kernel knows stay until it forgets them by itself:
//! a process may be in one. So the table can be some larger than its limit. A file that comes back has
//! another inode number than before.
//!
//! An operation lists a directory, and concludes from the list later. It holds a [`NamesGuard`] meanwhile:
//! what was used since the guard was made stays whole. Guards are made, and names leave, under the one lock
//! of the inodes.

use super::inodes::{Inode, InodeTable};
use crate::{cache::FileId, client::session::Core, proto::Name};
use std::collections::btree_map::Entry;
use whimbrel_core::lock;

/// A pass ends when this part of the limit is free, and the next one begins when as much came anew or was
/// used. Directories among as many latest uses keep their names: who lists one looks at its files next.
const PART: usize = 8;

/// While it lives, all directories that were used since it was made keep their names and inodes. Whoever
/// looks up or lists names must have one, and needs it for as long as the result matters.
#[must_use]
pub(in crate::client) struct NamesGuard<'a> {
    core: &'a Core,
    since: u64,
}

impl Drop for NamesGuard<'_> {
    fn drop(&mut self) {
        self.core.inodes().release_names(self.since);
    }
}

impl InodeTable {
    /// Holds the names of directories that are used from now on; returns the count of uses so far.
    fn hold_names(&mut self) -> u64 {
        *self.held.entry(self.uses).or_default() += 1;
        self.uses
    }

    fn release_names(&mut self, since: u64) {
        if let Entry::Occupied(mut holders) = self.held.entry(since) {
            *holders.get_mut() -= 1;
            if *holders.get() == 0 {
                holders.remove();
            }
        }
    }

    /// Whether there are more inodes than `most`, and another pass is likely to find some: enough came or
    /// were used since the last one.
    fn is_full(&self, most: usize) -> bool {
        let (inodes, uses) = self.next_eviction;
        self.nodes.len() > most && (self.nodes.len() > inodes || self.uses > uses)
    }

    /// Drops names of the directories that were not used for longest. Files that are `unsent` stay.
    fn evict(&mut self, most: usize, unsent: impl Fn(FileId) -> bool) {
        let wanted = self.nodes.len().saturating_sub(most - most / PART);
        let latest = self.uses.saturating_sub((most / PART) as u64);
        let unused = self.held.keys().next().map_or(latest, |since| latest.min(*since));
        let mut dirs: Vec<(u64, u64)> = self
            .nodes
            .iter()
            .filter_map(|(id, node)| Some((node.dir.as_deref()?.last_use, *id)))
            .filter(|(used, _)| *used <= unused)
            .collect();
        dirs.sort_unstable();
        let mut left = 0;
        for (_, dir) in dirs {
            if left >= wanted {
                break;
            }
            left += self.evict_names_of(dir, unused, &unsent);
        }
        self.evictions += u64::from(left > 0);
        self.next_eviction = (self.nodes.len() + most / PART, self.uses + (most / PART) as u64);
    }

    /// Drops names of a directory, but not those of directories used after `unused`, and returns how many
    /// left or will.
    fn evict_names_of(&mut self, id: u64, unused: u64, unsent: &impl Fn(FileId) -> bool) -> usize {
        let Some(dir) = self.dir(id) else { return 0 };
        let names: Vec<(Name, u64)> =
            dir.entries.iter().map(|(name, child)| (name.clone(), *child)).collect();
        let (mut gone, mut told) = (0, 0);
        for (name, child) in names {
            let Some(node) = self.nodes.get(&child).filter(|node| node.is_idle(unused, unsent)) else {
                continue;
            };
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
    fn is_idle(&self, unused: u64, unsent: &impl Fn(FileId) -> bool) -> bool {
        let changed = self.local || self.atime.is_some() || !self.ops.is_empty();
        let used = self.opens > 0 || self.conflicted || self.lock_lost;
        let empty = self.dir.as_ref().is_none_or(|dir| dir.entries.is_empty() && dir.last_use <= unused);
        !changed && !used && empty && !self.file.is_some_and(unsent)
    }
}

impl Core {
    /// Keeps the names of all directories that are used from now on.
    pub(in crate::client) fn hold_names(&self) -> NamesGuard<'_> {
        NamesGuard { core: self, since: self.inodes().hold_names() }
    }

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

#[cfg(test)]
mod tests {
    use super::*;
    use crate::proto::{Attr, Entry, Ident, Kind, Time};
    use std::time::{Duration, Instant};
    use whimbrel_fuse::ROOT;

    const FILES: u64 = 10;
    const TTL: Duration = Duration::from_secs(3600);

    fn attr(ino: u64, kind: Kind) -> Attr {
        let (ident, time) = (Ident { dev: 1, ino, birth: 0 }, Time::default());
        Attr { ident, kind, mode: 0, links: 1, uid: 0, gid: 0, size: 0, blocks: 0, mtime: time, ctime: time }
    }

    fn entry(ino: u64, kind: Kind) -> Entry {
        Entry { name: Name::new(ino.to_string().as_bytes()).unwrap(), attr: attr(ino, kind) }
    }

    /// A table with four directories that were listed.
    fn table() -> (InodeTable, Vec<u64>) {
        let mut table = InodeTable::new(attr(1, Kind::Dir));
        table.store_listing(ROOT, (2..6).map(|ino| entry(ino, Kind::Dir)).collect(), Instant::now());
        let dirs: Vec<u64> = (2..6).map(|ino| table.by_ident(&attr(ino, Kind::Dir).ident).unwrap()).collect();
        for (number, dir) in (1..).zip(&dirs) {
            let files = (0..FILES).map(|file| entry(100 * number + file, Kind::File)).collect();
            table.store_listing(*dir, files, Instant::now());
        }
        (table, dirs)
    }

    fn is_whole(table: &mut InodeTable, dir: u64) -> bool {
        table.dir(dir).is_some_and(|dir| dir.listed_at.is_some() && dir.entries.len() as u64 == FILES)
    }

    #[test]
    fn what_was_used_in_an_operation_stays_whole_until_its_end_however_much_others_use() {
        let (mut table, dirs) = table();
        assert!(table.is_complete(dirs[0], TTL));
        let since = table.hold_names();
        assert!(table.is_complete(dirs[1], TTL));
        let other = table.hold_names();
        (0..1000).for_each(|_| _ = table.look_up(dirs[2], &entry(300, Kind::File).name, TTL));
        table.evict(8, |_| false);
        assert!(!is_whole(&mut table, dirs[0]) && !is_whole(&mut table, dirs[3]), "nobody uses them");
        assert!(is_whole(&mut table, dirs[1]) && is_whole(&mut table, dirs[2]));
        table.release_names(since);
        (0..1000).for_each(|_| _ = table.look_up(ROOT, &entry(2, Kind::Dir).name, TTL));
        table.evict(8, |_| false);
        assert!(!is_whole(&mut table, dirs[1]) && is_whole(&mut table, dirs[2]), "one operation ended");
        table.release_names(other);
        table.evict(8, |_| false);
        assert!(!is_whole(&mut table, dirs[2]));
        assert!(table.held.is_empty());
    }

    #[test]
    fn an_empty_directory_stays_while_an_operation_uses_it() {
        let (mut table, dirs) = table();
        table.store_listing(dirs[0], Vec::new(), Instant::now());
        let since = table.hold_names();
        assert!(table.is_complete(dirs[0], TTL));
        (0..1000).for_each(|_| _ = table.look_up(dirs[2], &entry(300, Kind::File).name, TTL));
        table.evict(8, |_| false);
        assert!(table.get(dirs[0]).is_some());
        table.release_names(since);
        table.evict(8, |_| false);
        assert!(table.get(dirs[0]).is_none());
    }
}
