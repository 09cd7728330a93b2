//! Disk of a host: files and folders as programs see them, and as they are after a power loss. Pure.
//!
//! Bytes are durable with a sync of their file, names with a sync of their folder, and neither with the
//! other. At a power loss each sector that was not synced comes by itself or not, and each name is the old
//! or the new one by itself. That is more than a journaling file system loses, and all that POSIX promises.

use super::files::Inode;
use crate::random::Random;
use std::collections::{BTreeMap, BTreeSet};

const SECTOR: usize = 512;

pub(crate) type Errno = i32;

/// Change of a file that is not durable.
#[derive(Debug)]
enum Pending {
    Write { at: u64, bytes: Vec<u8> },
    Length(u64),
}

#[derive(Debug, Default)]
pub(crate) struct File {
    data: Vec<u8>,
    durable: Vec<u8>,
    pending: Vec<Pending>,
    /// Open files that hold the lock, and whether exclusively.
    pub(crate) locks: Vec<(u64, bool)>,
}

#[derive(Debug, Default)]
pub(crate) struct Folder {
    names: BTreeMap<String, Inode>,
    durable: BTreeMap<String, Inode>,
}

#[derive(Debug)]
pub(crate) enum DiskNode {
    File(File),
    Folder(Folder),
}

#[derive(Debug)]
pub(crate) struct Disk {
    nodes: BTreeMap<Inode, DiskNode>,
    next: Inode,
    pub(crate) used: u64,
    pub(crate) capacity: u64,
}

pub(crate) const ROOT: Inode = 1;

impl Default for Disk {
    fn default() -> Self {
        let nodes = BTreeMap::from([(ROOT, DiskNode::Folder(Folder::default()))]);
        Self { nodes, next: ROOT + 1, used: 0, capacity: u64::MAX }
    }
}

impl Disk {
    pub(crate) fn node(&self, inode: Inode) -> Result<&DiskNode, Errno> {
        self.nodes.get(&inode).ok_or(libc::ENOENT)
    }

    pub(crate) fn file(&mut self, inode: Inode) -> Result<&mut File, Errno> {
        match self.nodes.get_mut(&inode) {
            Some(DiskNode::File(file)) => Ok(file),
            _ => Err(libc::EISDIR),
        }
    }

    fn folder(&mut self, inode: Inode) -> Result<&mut Folder, Errno> {
        match self.nodes.get_mut(&inode) {
            Some(DiskNode::Folder(folder)) => Ok(folder),
            _ => Err(libc::ENOTDIR),
        }
    }

    pub(crate) fn look_up(&self, from: Inode, path: &str) -> Result<Inode, Errno> {
        path.split('/').filter(|part| !part.is_empty() && *part != ".").try_fold(from, |inode, part| {
            match self.node(inode)? {
                DiskNode::Folder(folder) => folder.names.get(part).copied().ok_or(libc::ENOENT),
                DiskNode::File(_) => Err(libc::ENOTDIR),
            }
        })
    }

    /// The folder that a path lies in, and the last part of the path.
    fn parent<'p>(&mut self, from: Inode, path: &'p str) -> Result<(&mut Folder, &'p str), Errno> {
        let path = path.trim_end_matches('/');
        let (folder, name) = path.rsplit_once('/').unwrap_or(("", path));
        let inode = self.look_up(from, folder)?;
        Ok((self.folder(inode)?, name))
    }

    pub(crate) fn create(&mut self, from: Inode, path: &str, node: DiskNode) -> Result<Inode, Errno> {
        let inode = self.next;
        let (folder, name) = self.parent(from, path)?;
        if folder.names.contains_key(name) {
            return Err(libc::EEXIST);
        }
        folder.names.insert(name.to_owned(), inode);
        self.nodes.insert(inode, node);
        self.next += 1;
        Ok(inode)
    }

    pub(crate) fn rename(&mut self, from: Inode, old: &str, new: &str) -> Result<(), Errno> {
        let inode = self.look_up(from, old)?;
        self.parent(from, new)?;
        let (folder, name) = self.parent(from, old)?;
        folder.names.remove(name);
        let (folder, name) = self.parent(from, new)?;
        let replaced = folder.names.insert(name.to_owned(), inode);
        replaced.into_iter().for_each(|inode| self.free(inode));
        Ok(())
    }

    pub(crate) fn remove(&mut self, from: Inode, path: &str) -> Result<(), Errno> {
        let inode = self.look_up(from, path)?;
        if let DiskNode::Folder(folder) = self.node(inode)?
            && !folder.names.is_empty()
        {
            return Err(libc::ENOTEMPTY);
        }
        let (folder, name) = self.parent(from, path)?;
        folder.names.remove(name);
        self.free(inode);
        Ok(())
    }

    fn free(&mut self, inode: Inode) {
        if let Some(DiskNode::File(file)) = self.nodes.get(&inode) {
            self.used = self.used.saturating_sub(file.data.len() as u64);
        }
    }

    /// Names in a folder with their nodes, and whether each is a folder.
    pub(crate) fn list(&self, inode: Inode) -> Result<Vec<(String, Inode, bool)>, Errno> {
        let DiskNode::Folder(folder) = self.node(inode)? else { return Err(libc::ENOTDIR) };
        let entry = |(name, inode): (&String, &Inode)| {
            (name.clone(), *inode, matches!(self.nodes[inode], DiskNode::Folder(_)))
        };
        Ok(folder.names.iter().map(entry).collect())
    }

    /// Writes as much as there is room for; fails if there is none.
    pub(crate) fn write(&mut self, inode: Inode, at: u64, bytes: &[u8]) -> Result<usize, Errno> {
        let room = self.capacity.saturating_sub(self.used);
        let file = self.file(inode)?;
        let end = file.data.len() as u64;
        let most = end.saturating_sub(at).saturating_add(room);
        let bytes = &bytes[..bytes.len().min(most.min(usize::MAX as u64) as usize)];
        if bytes.is_empty() {
            return Err(libc::ENOSPC);
        }
        put(&mut file.data, at, bytes);
        let grown = file.data.len() as u64 - end;
        file.pending.push(Pending::Write { at, bytes: bytes.to_vec() });
        self.used += grown;
        Ok(bytes.len())
    }

    pub(crate) fn read(&mut self, inode: Inode, at: u64, out: &mut [u8]) -> Result<usize, Errno> {
        let file = self.file(inode)?;
        let from = (at as usize).min(file.data.len());
        let n = out.len().min(file.data.len() - from);
        out[..n].copy_from_slice(&file.data[from..from + n]);
        Ok(n)
    }

    pub(crate) fn truncate(&mut self, inode: Inode, length: u64) -> Result<(), Errno> {
        let file = self.file(inode)?;
        let before = file.data.len() as u64;
        file.data.resize(length as usize, 0);
        file.pending.push(Pending::Length(length));
        self.used = self.used.saturating_sub(before).saturating_add(length);
        Ok(())
    }

    pub(crate) fn size(&self, inode: Inode) -> u64 {
        match self.nodes.get(&inode) {
            Some(DiskNode::File(file)) => file.data.len() as u64,
            _ => 4096,
        }
    }

    /// Makes the bytes of a file or the names of a folder durable.
    pub(crate) fn sync(&mut self, inode: Inode) -> Result<(), Errno> {
        match self.nodes.get_mut(&inode).ok_or(libc::ENOENT)? {
            DiskNode::Folder(folder) => folder.durable = folder.names.clone(),
            DiskNode::File(file) => {
                let pending = std::mem::take(&mut file.pending);
                pending.into_iter().for_each(|change| change.apply(&mut file.durable));
            }
        }
        Ok(())
    }

    /// A sync that failed: what was to be written is dropped, and counts as written from now on, as on
    /// Linux.
    pub(crate) fn fail_sync(&mut self, inode: Inode) {
        if let Some(DiskNode::File(file)) = self.nodes.get_mut(&inode) {
            file.pending.clear();
        }
    }

    /// Changes bytes of a file from `at` on for good, as a disk may.
    pub(crate) fn damage(&mut self, inode: Inode, at: u64, bytes: &[u8]) {
        if let Some(DiskNode::File(file)) = self.nodes.get_mut(&inode) {
            for held in [&mut file.data, &mut file.durable] {
                let hit = held.iter_mut().skip(at as usize);
                hit.zip(bytes).for_each(|(byte, new)| *byte = *new);
            }
        }
    }

    pub(crate) fn lose_power(&mut self, random: &mut Random) {
        let (mut open, mut seen) = (vec![ROOT], BTreeSet::new());
        while let Some(inode) = open.pop() {
            if !seen.insert(inode) {
                continue;
            }
            match self.nodes.get_mut(&inode) {
                Some(DiskNode::Folder(folder)) => {
                    folder.lose_power(random);
                    open.extend(folder.names.values());
                }
                Some(DiskNode::File(file)) => file.lose_power(random),
                None => {}
            }
        }
        self.nodes.retain(|inode, _| seen.contains(inode));
        let size = |node: &DiskNode| if let DiskNode::File(file) = node { file.data.len() as u64 } else { 0 };
        self.used = self.nodes.values().map(size).sum();
    }
}

impl Folder {
    fn lose_power(&mut self, random: &mut Random) {
        let names: BTreeSet<String> = self.names.keys().chain(self.durable.keys()).cloned().collect();
        for name in names {
            let (new, old) = (self.names.get(&name).copied(), self.durable.get(&name).copied());
            if new == old || random.one_in(2) {
                continue;
            }
            match new {
                Some(inode) => drop(self.durable.insert(name, inode)),
                None => drop(self.durable.remove(&name)),
            }
        }
        self.names = self.durable.clone();
    }
}

impl File {
    fn lose_power(&mut self, random: &mut Random) {
        // In half of the cases all or nothing of a file came, which sectors by themselves hardly ever make.
        let chance = [0, 1, 4, 4][random.below(4) as usize];
        let comes = |random: &mut Random| chance > 0 && (chance == 1 || !random.one_in(chance));
        for change in std::mem::take(&mut self.pending) {
            match change {
                Pending::Length(_) if !comes(random) => {}
                Pending::Length(_) => change.apply(&mut self.durable),
                Pending::Write { at, bytes } => {
                    for (sector, bytes) in bytes.chunks(SECTOR).enumerate() {
                        if comes(random) {
                            put(&mut self.durable, at + (sector * SECTOR) as u64, bytes);
                        }
                    }
                }
            }
        }
        self.data = self.durable.clone();
        self.locks.clear();
    }
}

impl Pending {
    fn apply(self, bytes: &mut Vec<u8>) {
        match self {
            Self::Length(length) => bytes.resize(length as usize, 0),
            Self::Write { at, bytes: new } => put(bytes, at, &new),
        }
    }
}

fn put(bytes: &mut Vec<u8>, at: u64, new: &[u8]) {
    let (start, end) = (at as usize, at as usize + new.len());
    if bytes.len() < end {
        bytes.resize(end, 0);
    }
    bytes[start..end].copy_from_slice(new);
}

#[cfg(test)]
mod tests {
    use super::*;

    fn with_file() -> (Disk, Inode) {
        let mut disk = Disk::default();
        let inode = disk.create(ROOT, "a", DiskNode::File(File::default())).unwrap();
        (disk, inode)
    }

    #[test]
    fn synced_bytes_and_names_survive_and_others_may_not() {
        let mut lost = [0; 2];
        for seed in 0..100 {
            let (mut disk, a) = with_file();
            disk.write(a, 0, b"kept").unwrap();
            disk.sync(a).unwrap();
            disk.sync(ROOT).unwrap();
            disk.write(a, 4, b"maybe").unwrap();
            disk.create(ROOT, "b", DiskNode::File(File::default())).unwrap();
            disk.lose_power(&mut Random::new(seed, 0));
            let mut bytes = [0; 9];
            let n = disk.read(a, 0, &mut bytes).unwrap();
            assert_eq!(&bytes[..4], b"kept");
            lost[0] += usize::from(n == 4);
            lost[1] += usize::from(disk.look_up(ROOT, "b").is_err());
        }
        assert!(lost.iter().all(|lost| (20..90).contains(lost)), "{lost:?}");
    }

    #[test]
    fn a_full_disk_takes_what_fits_and_then_nothing() {
        let (mut disk, a) = with_file();
        disk.capacity = 6;
        assert_eq!(disk.write(a, 0, b"12345678"), Ok(6));
        assert_eq!(disk.write(a, 6, b"78"), Err(libc::ENOSPC));
        assert_eq!(disk.write(a, 0, b"ab"), Ok(2), "what is there may be written over");
        disk.remove(ROOT, "a").unwrap();
        assert_eq!(disk.used, 0);
    }

    #[test]
    fn a_failed_sync_drops_what_a_later_one_will_not_write() {
        let (mut disk, a) = with_file();
        disk.sync(ROOT).unwrap();
        disk.write(a, 0, b"lost").unwrap();
        disk.fail_sync(a);
        disk.sync(a).unwrap();
        disk.lose_power(&mut Random::new(1, 0));
        assert_eq!(disk.size(a), 0);
    }
}
