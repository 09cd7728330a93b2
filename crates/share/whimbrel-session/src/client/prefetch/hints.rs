//! Hints: small files beside files of the server, read when a large file is opened, and believed if the owner
//! matches.
//!
//! A hint that is missing or invalid changes nothing. Blocks that it declares zero are put into the cache
//! when they are requested, unless the file has changed, and are never fetched.

use crate::client::{content::fetcher::FetchSubject, session::Core};
use crate::{
    cache::FileId,
    hint_file::{Hint, MAX_LEN, name_of},
    proto::{Kind, Version},
};
use std::{
    collections::HashMap,
    sync::{Arc, Mutex, MutexGuard, PoisonError, atomic::Ordering},
};

/// Smallest file for which a hint is looked up.
const MIN_FILE_SIZE: u64 = 1 << 20;

type VersionedHint = (Version, Arc<Hint>);

#[derive(Default)]
pub(in crate::client) struct Hints {
    known: Mutex<HashMap<FileId, VersionedHint>>,
}

impl Hints {
    fn known(&self) -> MutexGuard<'_, HashMap<FileId, VersionedHint>> {
        self.known.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Core {
    pub(in crate::client) fn hint_of(&self, id: u64, file: FileId, size: u64) -> Option<Arc<Hint>> {
        if size < MIN_FILE_SIZE {
            return None;
        }
        let (parent, name, owner) = {
            let mut nodes = self.inodes();
            let node = nodes.get(id)?;
            let (parent, name) = node.names.first()?.clone();
            let (name, owner) = (name_of(&name)?, node.attr.uid);
            // In a directory that is not completely known, asking for each name would cost more than hints
            // save.
            let dir = nodes.dir(parent)?;
            if dir.large && !dir.entries.contains_key(&name) {
                return None;
            }
            (parent, name, owner)
        };
        let beside = self.lookup(parent, &name).ok();
        let attr = beside.and_then(|beside| Some(self.inodes().get(beside)?.attr));
        let (Some(beside), Some(attr)) = (beside, attr) else {
            self.hints.known().remove(&file);
            return None;
        };
        // Another user may create files in the directory, but must not declare what this file contains.
        if attr.kind != Kind::File || attr.size > MAX_LEN || attr.uid != owner {
            return None;
        }
        if let Some((version, note)) = self.hints.known().get(&file)
            && *version == attr.version()
        {
            return Some(note.clone());
        }
        let bytes = self.read(beside, None, 0, attr.size as u32).ok()?;
        match Hint::parse(&bytes) {
            Ok(note) => {
                let note = Arc::new(note);
                self.hints.known().insert(file, (attr.version(), note.clone()));
                Some(note)
            }
            Err(error) => {
                let path = self.inodes().path(id).unwrap_or_default();
                self.event(format!("{path}: its hint file is invalid: {error}"));
                self.hints.known().insert(file, (attr.version(), Arc::default()));
                None
            }
        }
    }

    /// Stores the blocks that are zero according to the hint in the cache, and returns the others.
    pub(in crate::client) fn fill_zeros(&self, source: &FetchSubject, blocks: &[u64]) -> Vec<u64> {
        let note = self.hints.known().get(&source.file).map(|(_, note)| note.clone());
        let Some(note) = note.filter(|note| !note.zeros.is_empty()) else { return blocks.to_vec() };
        // Read the epoch first, so that the fill is void if the content changes meanwhile.
        let (epoch, record) = (self.cache.epoch(source.file), self.cache.file(source.file));
        let (Some(epoch), Some(record)) = (epoch, record) else { return blocks.to_vec() };
        if note.version != Some((record.base.size, record.base.mtime)) {
            return blocks.to_vec();
        }
        let size = self.cache.block_size();
        let zeros = vec![0; size as usize];
        let is_needed = |block: &u64| {
            let bytes = block * size..((block + 1) * size).min(record.base.size);
            if bytes.is_empty() || !note.is_zero(&bytes) {
                return true;
            }
            let content = &zeros[..(bytes.end - bytes.start) as usize];
            let filled = self.cache.fill(source.file, epoch, bytes.start, content).unwrap_or(false);
            if filled {
                self.zero_blocks.fetch_add(1, Ordering::Relaxed);
            }
            !filled
        };
        blocks.iter().copied().filter(is_needed).collect()
    }
}
