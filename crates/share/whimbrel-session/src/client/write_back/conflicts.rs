//! Conflicts: the server's file changed under unsent writes. Both versions are retained.
//!
//! The server's version stays in place, and programs see it from now on. The local one is copied to the
//! directory `kept` in the cache, as far as its content is known, and an event names the copy. A map beside
//! it says which bytes were written here, and which never were here (`kept_copy.rs`).

use super::kept_copy::{DIRS, KeptCopy, add, name_in, rest, total};
use crate::client::session::{Core, errno_of};
use crate::{
    cache::{CacheError, CacheFile, CacheRead, FileId, FileRecord},
    proto::{Attr, PAGE},
};
use std::{fs, io, path::PathBuf};

impl Core {
    /// Handles a server version that differs from the one of the clean pages here.
    pub(in crate::client) fn adopt_or_conflict(&self, file: FileId, attr: &Attr) {
        let Some(record) = self.cache.file(file) else { return };
        if record.dirty {
            self.conflict(file, "the file was changed on the server by somebody else");
            return;
        }
        self.adopt_version(file, attr);
    }

    /// Drops the content here and adopts the version in `attr`.
    pub(in crate::client) fn adopt_version(&self, file: FileId, attr: &Attr) {
        let changed = self.cache.invalidate(file).and_then(|()| {
            self.cache.update_file(file, |record| {
                record.base = attr.version();
                record.size = attr.size;
                record.zero_from = attr.size;
                record.stamps.clear();
                record.mtime = None;
            })
        });
        if let Err(error) = changed {
            errno_of(error);
        }
    }

    /// Puts the local version aside as a conflict; the server's version is used from now on.
    pub(in crate::client) fn conflict(&self, file: FileId, why: &str) {
        let Some(record) = self.cache.file(file) else { return };
        match self.save_conflict(file, &record, why) {
            Ok((path, absent)) => {
                let lacks = match absent {
                    0 => String::new(),
                    bytes => format!(" ({bytes} bytes of it never were here and are holes)"),
                };
                self.event(format!(
                    "{}: {why}; the server's version stays, the local one is kept in {}{lacks}",
                    record.path,
                    path.display()
                ));
            }
            Err(error) => {
                // The file stays dirty in the cache: the only copy of its content is never dropped.
                self.event(format!(
                    "{}: {why}; the local version stays in the cache because it cannot be copied: {error}",
                    record.path
                ));
                return;
            }
        }
        if let Err(error) = self.cache.remove_file(file) {
            errno_of(error);
        }
        if let Some(ident) = record.ident {
            self.known_files.lock().unwrap_or_else(std::sync::PoisonError::into_inner).remove(&ident);
        }
        let mut nodes = self.inodes();
        for id in nodes.ids() {
            if let Some(node) = nodes.get_mut(id).filter(|node| node.file == Some(file)) {
                node.file = None;
                node.mtime = None;
                node.epoch = None;
                node.conflicted = node.opens > 0;
                self.invalidate_kernel_pages(id);
            }
        }
        nodes.expire_all();
    }

    /// Drops the kernel's cached pages of a file, in another thread because the kernel may be waiting for
    /// this one.
    pub(in crate::client) fn invalidate_kernel_pages(&self, id: u64) {
        if let Some(notifier) = self.notifier.get().cloned() {
            self.connection.runtime().spawn_blocking(move || {
                // An error means that the kernel had nothing cached.
                let _ = notifier.invalidate_inode(id, 0, 0);
            });
        }
    }

    /// Invalidates names of which the kernel has an old state, in another thread because it may be waiting
    /// for this one.
    pub(in crate::client) fn invalidate_kernel_names(&self) {
        let names = self.inodes().take_appeared();
        if let Some(notifier) = self.notifier.get().cloned().filter(|_| !names.is_empty()) {
            self.connection.runtime().spawn_blocking(move || {
                for (parent, name) in names {
                    // An error means that the kernel had nothing cached.
                    let _ = notifier.invalidate_entry(parent, name.as_os());
                }
            });
        }
    }

    /// Copies the local content of a file, with its map. Pages that are not here are holes; also returns how
    /// many bytes that are.
    fn save_conflict(&self, file: FileId, record: &FileRecord, why: &str) -> io::Result<(PathBuf, u64)> {
        let folder = self.cache_dir.path().join(DIRS[0]);
        fs::create_dir_all(&folder)?;
        let kept = self.map_of(file, record, self.name_of_copy(record), why);
        kept.store(&self.cache_dir)?;
        let path = folder.join(&kept.name);
        let mut options = fs::OpenOptions::new();
        options.read(true).write(true).create_new(true);
        let copy = self.cache_dir.open_file(&name_in(DIRS[0], &kept.name), &options)?;
        copy.set_len(record.size)?;
        // A large file may have few blocks here: only these are read.
        for block in self.cache.cached_blocks(file) {
            self.copy_block(file, record, block, &copy)?;
        }
        copy.file().sync_all()?;
        fs::File::open(&folder)?.sync_all()?;
        Ok((path, total(&kept.absent)))
    }

    /// Name of a copy, which tells that of the file unless the cache is encrypted.
    fn name_of_copy(&self, record: &FileRecord) -> String {
        let stamp = self.stamp();
        if self.cache_dir.is_encrypted() {
            return format!("{}.{:09}", stamp.seconds, stamp.nanos);
        }
        let flat = record.path.to_string().replace('/', "%2f");
        let short: String = flat.chars().rev().take(180).collect::<Vec<_>>().into_iter().rev().collect();
        format!("{short}.{}.{:09}", stamp.seconds, stamp.nanos)
    }

    /// What in the local version of a file was written here, and what is of the version below.
    fn map_of(&self, file: FileId, record: &FileRecord, name: String, why: &str) -> KeptCopy {
        let (mut ours, mut base, mut here) = (Vec::new(), Vec::new(), Vec::new());
        for (block, valid, dirty) in self.cache.pages_of(file) {
            for page in 0..self.cache.block_size() / PAGE as u64 {
                let start = block * self.cache.block_size() + page * PAGE as u64;
                let range = start..(start + PAGE as u64).min(record.size);
                if valid >> page & 1 == 0 || range.is_empty() {
                    continue;
                }
                add(if dirty >> page & 1 == 1 { &mut ours } else { &mut base }, range.clone());
                add(&mut here, range);
            }
        }
        // Absent pages from `zero_from` on are zeros by what was done here.
        let absent = rest(&here, record.zero_from.min(record.size));
        for range in rest(&here, record.size) {
            let zeros = range.start.max(record.zero_from)..range.end;
            if zeros.start < zeros.end {
                ours.push(zeros);
            }
        }
        ours.sort_by_key(|range| range.start);
        let (path, size, at) = (record.path.clone(), record.size, crate::proto::Time::now().seconds);
        KeptCopy { name, path, why: why.to_owned(), at, size, ours, base, absent }
    }

    fn copy_block(&self, file: FileId, record: &FileRecord, block: u64, copy: &CacheFile) -> io::Result<()> {
        let (start, mut page) = (block * self.cache.block_size(), [0; PAGE]);
        for at in (start..(start + self.cache.block_size()).min(record.size)).step_by(PAGE) {
            let len = (record.size - at).min(PAGE as u64) as usize;
            match self.cache.read(file, at, &mut page[..len]) {
                Ok(CacheRead::Complete) => copy.write(at, &page[..len])?,
                // A page that was never here becomes a hole; a damaged one as well, with an event.
                Ok(CacheRead::Missing(_)) => {}
                Err(CacheError::Damaged { offset }) => self.event(format!(
                    "{}: the page at byte {offset} is damaged and is a hole in the kept copy",
                    record.path
                )),
                Err(error) => return Err(io::Error::other(error)),
            }
        }
        Ok(())
    }
}
