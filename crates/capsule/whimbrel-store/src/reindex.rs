//! Reindexing: rebuilds the index of packs that have none after a crash, or whose index was lost or damaged.
//!
//! Frames have no digests, so they are decoded and hashed. Bytes that are no frame (a torn tail, damage) are
//! skipped up to the next valid frame. Packs of live writers are skipped, since they are being written.

use crate::{
    error::{Result, StoreError},
    file_names::{PACK_HEAD, PACKS, PackId},
    gc_lease::live_leases,
    index::{Entry, PackLocation},
    object_reader::Decoded,
    store::Store,
};
use std::collections::HashMap;
use whimbrel_image::{
    ShortDigest,
    pack_frame::{HEAD, PackFrame},
};

/// Most bytes read of a pack: a full pack and one largest blob.
const MAX_PACK: u64 = 512 << 20;

impl Store {
    /// Indexes every pack that has no index and no live writer. Returns the number of frames found.
    pub fn reindex(&self) -> Result<usize> {
        let inner = &self.inner;
        let names = inner.files.list(PACKS).map_err(StoreError::io("list", PACKS))?;
        let sessions = live_leases(&*inner.files, 0, false)?;
        inner.objects.indexes.refresh()?;
        let damaged = inner.objects.indexes.damaged();
        let covered = inner.objects.indexes.packs_without(&damaged);
        let orphan = |id: &PackId| !covered.contains(id) && !sessions.ids.contains(&id.lease);
        let mut orphans: Vec<PackId> =
            names.iter().filter_map(|name| PackId::parse(name)).filter(orphan).collect();
        orphans.sort_unstable();
        let mut salvage = Salvage { store: self, frames: Vec::new(), found: HashMap::new() };
        let mut packs = Vec::new();
        for pack in orphans {
            let before = salvage.frames.len();
            let len = salvage.scan(pack)?;
            if salvage.frames.len() == before {
                inner.latching(
                    inner.files.remove(&pack.path()).map_err(StoreError::io("remove", &pack.path())),
                )?;
            } else {
                // Its writer was killed before the sync, and new capsules may be built on what is found here.
                let path = pack.path();
                inner.latching(inner.files.sync(&path).map_err(StoreError::io("sync", &path)))?;
                packs.push((pack, len));
            }
        }
        let entries = salvage.entries();
        if !entries.is_empty() {
            tracing::info!(
                packs = packs.len(),
                frames = entries.len(),
                "rebuilt the index of packs that had none"
            );
            inner.latching(inner.files.sync_dir(PACKS).map_err(StoreError::io("sync", PACKS)))?;
            inner.latching(inner.objects.indexes.publish(&packs, &entries))?;
        }
        if !damaged.is_empty() {
            inner.latching(inner.objects.indexes.remove_damaged(&damaged))?;
        }
        Ok(entries.len())
    }
}

struct Salvage<'a> {
    store: &'a Store,
    frames: Vec<PackLocation>,
    found: HashMap<ShortDigest, Vec<(PackLocation, u8)>>,
}

impl Salvage<'_> {
    /// Records the valid frames of a pack; returns its length.
    fn scan(&mut self, pack: PackId) -> Result<u32> {
        let file = self.store.inner.objects.handle(pack)?;
        let size = file.size().map_err(StoreError::io("size", &pack.path()))?.min(MAX_PACK);
        let mut bytes = vec![0; size as usize];
        file.read_at(0, &mut bytes).map_err(StoreError::io("read", &pack.path()))?;
        let mut at = PACK_HEAD;
        while at + HEAD <= bytes.len() {
            match PackFrame::parse(&bytes[at..]) {
                Ok(frame) => {
                    let len = frame.head.total();
                    let (kind, depth) = (frame.head.kind, frame.head.depth);
                    self.frames.push(PackLocation { pack, offset: at as u32, len: len as u32, kind, depth });
                    at += len;
                }
                Err(_) => at += 1 + next_magic(&bytes[at + 1..]),
            }
        }
        Ok(size as u32)
    }

    /// Frames with the short digests of their objects; frames whose bases are missing are left out.
    fn entries(mut self) -> Vec<Entry> {
        let mut frames = std::mem::take(&mut self.frames);
        // Bases first: a delta may have its base in a frame of the same writer.
        frames.sort_by_key(|place| place.depth);
        let mut entries = Vec::with_capacity(frames.len());
        for place in frames {
            let Ok(decoded) = self.decode(&place) else { continue };
            let slots = 0..decoded.objects().min(256);
            let keys: Vec<ShortDigest> =
                slots.filter_map(|slot| decoded.digest(slot as u8).map(ShortDigest::from)).collect();
            keys.iter()
                .enumerate()
                .for_each(|(slot, key)| self.found.entry(*key).or_default().push((place, slot as u8)));
            entries.push(Entry { frame: place, keys });
        }
        entries.sort_by_key(|entry| (entry.frame.pack, entry.frame.offset));
        entries
    }

    fn decode(&self, place: &PackLocation) -> Result<Decoded> {
        self.store.inner.objects.decode(place, &|key, below| {
            let here = self.found.get(&key).into_iter().flatten().find(|(place, _)| place.depth < below);
            match here {
                Some((place, slot)) => Ok(self.decode(place)?.bytes(*slot).to_vec()),
                None => self.store.inner.objects.base(key, below),
            }
        })
    }
}

fn next_magic(bytes: &[u8]) -> usize {
    bytes.windows(4).position(|window| window == b"WHFR").unwrap_or(bytes.len())
}
