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
    sync::{Arc, Mutex, atomic::Ordering},
};
use whimbrel_core::lock;

/// Smallest file for which a hint is looked up.
const MIN_FILE_SIZE: u64 = 1 << 20;

type VersionedHint = (Version, Arc<Hint>);

#[derive(Default)]
pub(in crate::client) struct Hints {
    known: Mutex<HashMap<FileId, VersionedHint>>,
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
        let held = self.hold_names();
        let beside = self.lookup(&held, parent, &name).ok();
        let attr = beside.and_then(|beside| Some(self.inodes().get(beside)?.attr));
        let (Some(beside), Some(attr)) = (beside, attr) else {
            lock(&self.hints.known).remove(&file);
            return None;
        };
        // Another user may create files in the directory, but must not declare what this file contains.
        if attr.kind != Kind::File || attr.size > MAX_LEN || attr.uid != owner {
            return None;
        }
        if let Some((version, note)) = lock(&self.hints.known).get(&file)
            && *version == attr.version()
        {
            return Some(note.clone());
        }
        let bytes = self.read(beside, None, 0, attr.size as u32).ok()?;
        match Hint::parse(&bytes) {
            Ok(note) => {
                let note = Arc::new(note);
                lock(&self.hints.known).insert(file, (attr.version(), note.clone()));
                Some(note)
            }
            Err(error) => {
                let path = self.inodes().path(id).unwrap_or_default();
                self.event(format!("{path}: its hint file is invalid: {error}"));
                lock(&self.hints.known).insert(file, (attr.version(), Arc::default()));
                None
            }
        }
    }

    /// Stores the blocks that are zero according to the hint in the cache.
    pub(in crate::client) fn fill_zeros(&self, source: &FetchSubject, blocks: impl Iterator<Item = u64>) {
        let note = lock(&self.hints.known).get(&source.file).map(|(_, note)| note.clone());
        let Some(note) = note.filter(|note| !note.zeros.is_empty()) else { return };
        // Read the epoch first, so that the fill is void if the content changes meanwhile.
        let (epoch, record) = (self.cache.epoch(source.file), self.cache.file(source.file));
        let (Some(epoch), Some(record)) = (epoch, record) else { return };
        if note.version != Some((record.base.size, record.base.mtime)) {
            return;
        }
        let size = self.cache.block_size();
        let zeros = vec![0; size as usize];
        for block in blocks {
            let bytes = block * size..((block + 1) * size).min(record.base.size);
            if bytes.is_empty() || !note.is_zero(&bytes) {
                continue;
            }
            let content = &zeros[..(bytes.end - bytes.start) as usize];
            if self.cache.fill(source.file, epoch, bytes.start, content).unwrap_or(false) {
                self.zero_blocks.fetch_add(1, Ordering::Relaxed);
            }
        }
    }
}
