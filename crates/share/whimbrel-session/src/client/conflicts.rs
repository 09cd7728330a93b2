//! Conflicts: the server's file is another one than what was written over here. Both are kept.
//!
//! The server's stays where it is, and is what programs see from now on. Ours goes into the folder `kept`
//! beside the cache, whole as far as it is known, and an event says where.

use super::session::{Core, errno_of};
use crate::{
    cache::{CacheError, CacheRead, FileId, FileRecord},
    proto::{Attr, PAGE},
};
use std::{fs, io, os::unix::fs::FileExt, path::PathBuf};

impl Core {
    /// The server has another content than the clean pages here are of.
    pub(super) fn server_changed(&self, file: FileId, attr: &Attr) {
        let Some(record) = self.cache.file(file) else { return };
        if record.dirty {
            self.conflict(file, "the server's file was changed by somebody else");
            return;
        }
        self.adopt_version(file, attr);
    }

    /// What is here of the file is void; from now on it is what `attr` says.
    pub(super) fn adopt_version(&self, file: FileId, attr: &Attr) {
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

    /// Puts what was written here aside, and lets the server's file be the file.
    pub(super) fn conflict(&self, file: FileId, why: &str) {
        let Some(record) = self.cache.file(file) else { return };
        match self.save_conflict(file, &record) {
            Ok(path) => self.event(format!(
                "{}: {why}; the server's is left as it is, ours is kept in {}",
                record.path,
                path.display()
            )),
            Err(error) => {
                // Then it stays dirty in the cache: nothing is thrown away that is nowhere else.
                self.event(format!(
                    "{}: {why}; ours stays in the cache, it cannot be copied out: {error}",
                    record.path
                ));
                return;
            }
        }
        if let Err(error) = self.cache.forget(file) {
            errno_of(error);
        }
        if let Some(ident) = record.ident {
            self.known_files.lock().unwrap_or_else(std::sync::PoisonError::into_inner).remove(&ident);
        }
        let mut nodes = self.nodes();
        for id in nodes.ids() {
            if let Some(node) = nodes.get_mut(id).filter(|node| node.file == Some(file)) {
                node.file = None;
                node.mtime = None;
                node.epoch = None;
                node.parted = node.opens > 0;
                self.kernel_forgets(id);
            }
        }
        nodes.doubt();
    }

    /// Tells the kernel that it knows a file no more; later, since it may be waiting for us.
    pub(super) fn kernel_forgets(&self, id: u64) {
        if let Some(notifier) = self.notifier.get().cloned() {
            self.link.runtime().spawn_blocking(move || {
                // A kernel that knew nothing has nothing to forget.
                let _ = notifier.changed(id, 0, 0);
            });
        }
    }

    /// Tells the kernel of names that it believes absent; later, since it may be waiting for us.
    pub(super) fn kernel_looks_again(&self) {
        let names = self.nodes().appeared();
        if let Some(notifier) = self.notifier.get().cloned().filter(|_| !names.is_empty()) {
            self.link.runtime().spawn_blocking(move || {
                for (parent, name) in names {
                    // As above.
                    let _ = notifier.renamed(parent, name.as_os());
                }
            });
        }
    }

    /// A copy of the file as it is here. Pages that are not here are left as holes.
    fn save_conflict(&self, file: FileId, record: &FileRecord) -> io::Result<PathBuf> {
        let folder = self.options.cache.join("kept");
        fs::create_dir_all(&folder)?;
        let flat = record.path.to_string().replace('/', "%2f");
        let short: String = flat.chars().rev().take(180).collect::<Vec<_>>().into_iter().rev().collect();
        let stamp = self.stamp();
        let path = folder.join(format!("{short}.{}.{:09}", stamp.seconds, stamp.nanos));
        let copy = fs::OpenOptions::new().write(true).create_new(true).open(&path)?;
        copy.set_len(record.size)?;
        // A file may be large and have little here: only blocks that are here are looked at.
        for block in self.cache.held_blocks(file) {
            self.keep_block(file, record, block, &copy)?;
        }
        copy.sync_all()?;
        fs::File::open(&folder)?.sync_all()?;
        Ok(path)
    }

    fn keep_block(&self, file: FileId, record: &FileRecord, block: u64, copy: &fs::File) -> io::Result<()> {
        let (start, mut page) = (block * self.cache.block_size(), [0; PAGE]);
        for at in (start..(start + self.cache.block_size()).min(record.size)).step_by(PAGE) {
            let len = (record.size - at).min(PAGE as u64) as usize;
            match self.cache.read(file, at, &mut page[..len]) {
                Ok(CacheRead::Here) => copy.write_all_at(&page[..len], at)?,
                // A page that was never here is a hole; one that is damaged is gone, and said.
                Ok(CacheRead::Missing(_)) => {}
                Err(CacheError::Damaged { offset }) => self.event(format!(
                    "{}: the page at byte {offset} is damaged and a hole in what is kept",
                    record.path
                )),
                Err(error) => return Err(io::Error::other(error)),
            }
        }
        Ok(())
    }
}
