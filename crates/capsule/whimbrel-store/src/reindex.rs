//! Reindexing: rebuilds the index of packs that have none after a crash, or whose index was lost or damaged.
//!
//! Frames have no digests, so they are decoded and hashed. Bytes that are no frame (a torn tail, damage) are
//! skipped up to the next valid frame. A pack that another key sealed is left alone. Packs of live writers
//! are skipped, since they are being written.

use crate::{
    error::{Result, StoreError},
    file_names::{PACK_HEAD, PACKS, PackId, publish},
    gc::GC_LOCK,
    gc_lease::{Condemned, live_leases},
    index::{Entry, PackLocation},
    object_reader::Decoded,
    sealed_frame::{OVERHEAD, PackKey, next_head, sealed_len},
    store::Store,
    vfs::{LockMode, LockWait},
};
use std::collections::HashMap;
use whimbrel_core::{
    CapsuleId,
    loss::{Loss, is_back},
};
use whimbrel_image::{
    ShortDigest,
    pack_frame::{HEAD, PackFrame},
};

/// Bytes of indexes whose content is checked when a store is opened: those of about 10 GB of pages.
const CHECKED_BYTES: u64 = 64 << 20;
/// Most bytes read of a pack: a full pack and one largest blob.
const MAX_PACK: u64 = 512 << 20;

impl Store {
    /// Rebuilds the index of packs that have none, if it can be seen that something needs it: an index file
    /// cannot be read or its content is damaged, the manifest of a named capsule is not found, or a garbage
    /// collection ended half way. Machines must be able to read their disks before anything is done with
    /// them. The content of large indexes is left to garbage collection, since it takes long to read.
    pub fn reindex_if_needed(&self) -> Result<bool> {
        let (refs, _) = self.readable_refs()?;
        let is_lost = |id: &CapsuleId| matches!(self.manifest(id), Err(StoreError::Missing { .. }));
        let indexes = &self.inner.objects.indexes;
        let is_needed =
            indexes.has_ignored() || indexes.is_damaged_within(CHECKED_BYTES) || refs.values().any(is_lost);
        let found = if is_needed { self.reindex() } else { self.undo_half_collection() };
        found.map(|found| found > 0)
    }

    /// Names the packs again that a collection took out of the index, if it ended before it had removed them.
    /// Until then, objects that the index still has may be deltas of what is in those packs, and count as
    /// present though they cannot be read. Waits for a collection that runs. Returns the number of frames
    /// found.
    pub(crate) fn undo_half_collection(&self) -> Result<usize> {
        let files = &*self.inner.files;
        let lock = files.lock(GC_LOCK, LockMode::Exclusive, LockWait::Wait);
        let _one = lock.map_err(StoreError::io("lock", GC_LOCK))?;
        if self.is_half_collected()? { self.reindex() } else { Ok(0) }
    }

    /// Whether a condemned pack is here that no index names.
    fn is_half_collected(&self) -> Result<bool> {
        let inner = &self.inner;
        let condemned = Condemned::read(&*inner.files)?.ids();
        if condemned.is_empty() {
            return Ok(false);
        }
        inner.objects.indexes.refresh()?;
        let named = inner.objects.indexes.packs();
        let packs = inner.files.list(PACKS).map_err(StoreError::io("list", PACKS))?;
        let mut packs = packs.iter().filter_map(|name| PackId::parse(name));
        Ok(packs.any(|pack| condemned.contains(&pack) && !named.contains_key(&pack)))
    }

    /// Indexes every pack that has no index and no live writer. Returns the number of frames found.
    pub fn reindex(&self) -> Result<usize> {
        let inner = &self.inner;
        let names = inner.files.list(PACKS).map_err(StoreError::io("list", PACKS))?;
        let sessions = live_leases(&*inner.files, 0, false)?;
        inner.objects.indexes.refresh()?;
        let damaged = inner.objects.indexes.damaged();
        let covered = inner.objects.indexes.packs_without(&damaged);
        let has_lost_indexes = !damaged.is_empty() || inner.objects.indexes.has_ignored();
        // Only what an index names is condemned. A list that cannot be read costs copies.
        let condemned = Condemned::read(&*inner.files).unwrap_or_default().ids();
        let keys = inner.objects.pack_keys.is_some();
        let orphan = |id: &PackId| {
            (keys || !id.is_sealed()) && !covered.contains(id) && !sessions.ids.contains(&id.lease)
        };
        let mut orphans: Vec<PackId> =
            names.iter().filter_map(|name| PackId::parse(name)).filter(orphan).collect();
        orphans.sort_unstable();
        let mut salvage = Salvage { store: self, frames: Vec::new(), found: HashMap::new() };
        let mut packs = Vec::new();
        for pack in orphans {
            let before = salvage.frames.len();
            let Some(content) = salvage.scan(pack)? else {
                tracing::warn!(%pack, "leaving a pack alone that was sealed with another key");
                continue;
            };
            let is_empty = salvage.frames.len() == before;
            // An index that cannot be read now may name it.
            if is_empty && (!self.is_ours(pack)? || inner.objects.indexes.refresh_whole().is_err()) {
                tracing::warn!(%pack, "leaving a pack alone in which nothing can be read");
            } else if is_empty {
                inner.latching(
                    inner.files.remove(&pack.path()).map_err(StoreError::io("remove", &pack.path())),
                )?;
            } else {
                // The writer was killed before its sync, and capsules may be built on what is found here.
                let had_index = has_lost_indexes || condemned.contains(&pack);
                if !is_back(Loss::OrphanNotSynced) {
                    inner.latching(self.make_durable(pack, &content, had_index))?;
                }
                packs.push((pack, content.len() as u32));
            }
        }
        let entries = salvage.entries()?;
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
        if inner.objects.indexes.has_ignored() {
            inner.latching(inner.objects.indexes.set_unread_aside())?;
        }
        Ok(entries.len())
    }
}

impl Store {
    /// Makes a pack with this content durable, which its writer perhaps did not, as a copy in its place. A
    /// sync of the file itself proves nothing: after one that failed the kernel counts pages as written that
    /// are not, and the next one succeeds (fsync(2); Rebello et al., USENIX ATC 2020).
    ///
    /// Packs that had an index were durable before it. They are only synced, and so is a pack for whose copy
    /// there is no room: a collection that is to make room begins here.
    fn make_durable(&self, pack: PackId, content: &[u8], had_index: bool) -> Result<()> {
        let (files, path) = (&*self.inner.files, pack.path());
        if !had_index {
            match publish(files, PACKS, &pack.to_string(), content) {
                Err(error) if error.is_full_disk() => {}
                done => {
                    // What was scanned is still open, and may lose those pages.
                    self.inner.objects.close([pack]);
                    return done;
                }
            }
        }
        files.sync(&path).map_err(StoreError::io("sync", &path))
    }

    /// Whether a pack is empty or has the head that this version writes: only such a one can be known to have
    /// nothing in it.
    fn is_ours(&self, pack: PackId) -> Result<bool> {
        let file = self.inner.files.open(&pack.path()).map_err(StoreError::io("open", &pack.path()))?;
        let size = file.size().map_err(StoreError::io("size", &pack.path()))?;
        if size <= PACK_HEAD as u64 {
            return Ok(true);
        }
        let mut head = [0; PACK_HEAD];
        file.read_at(0, &mut head).map_err(StoreError::io("read", &pack.path()))?;
        Ok([None, self.inner.data_key().map(|key| key.id)].iter().any(|key| pack.head(*key) == head))
    }
}

struct Salvage<'a> {
    store: &'a Store,
    frames: Vec<PackLocation>,
    found: HashMap<ShortDigest, Vec<(PackLocation, u8)>>,
}

impl Salvage<'_> {
    /// Records the valid frames of a pack; returns its content, or none if another key sealed it.
    fn scan(&mut self, pack: PackId) -> Result<Option<Vec<u8>>> {
        let inner = &self.store.inner;
        let handle = inner.objects.handle(pack)?;
        let size = handle.file.size().map_err(StoreError::io("size", &pack.path()))?.min(MAX_PACK);
        let mut bytes = vec![0; size as usize];
        handle.file.read_at(0, &mut bytes).map_err(StoreError::io("read", &pack.path()))?;
        if let Some(key) = &handle.key {
            let ours = pack.head(inner.data_key().map(|key| key.id));
            if is_of_another_key(&bytes, ours) {
                return Ok(None);
            }
            self.scan_sealed(pack, key, &bytes);
            return Ok(Some(bytes));
        }
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
        Ok(Some(bytes))
    }

    /// Records the frames of a sealed pack that open and are valid.
    fn scan_sealed(&mut self, pack: PackId, key: &PackKey, bytes: &[u8]) {
        let mut at = PACK_HEAD;
        while at < bytes.len() {
            let sealed = sealed_len(&bytes[at..]).and_then(|len| bytes.get(at..at + len));
            let mut opened = sealed.map(<[u8]>::to_vec).unwrap_or_default();
            match key.open(at as u32, &mut opened).ok().and_then(|()| PackFrame::parse(&opened).ok()) {
                Some(frame) => {
                    let (kind, depth) = (frame.head.kind, frame.head.depth);
                    let len = opened.len() + OVERHEAD;
                    self.frames.push(PackLocation { pack, offset: at as u32, len: len as u32, kind, depth });
                    at += len;
                }
                None => at += 1 + next_head(&bytes[at + 1..]),
            }
        }
    }

    /// Frames with the short digests of their objects; frames that are damaged or whose bases are missing are
    /// left out.
    ///
    /// # Errors
    /// If one cannot be read now. An index without it would cover its pack, and nobody would look there
    /// again.
    fn entries(mut self) -> Result<Vec<Entry>> {
        let mut frames = std::mem::take(&mut self.frames);
        // Bases first: a delta may have its base in a frame of the same writer.
        frames.sort_by_key(|place| place.depth);
        let mut entries = Vec::with_capacity(frames.len());
        for place in frames {
            let decoded = match self.decode(&place) {
                Ok(decoded) => decoded,
                // A base in a pack that is gone is missing for good.
                Err(error @ StoreError::Io { .. }) if !error.is_not_found() => return Err(error),
                Err(_) => continue,
            };
            let slots = 0..decoded.objects().min(256);
            let keys: Vec<ShortDigest> =
                slots.filter_map(|slot| decoded.digest(slot as u8).map(ShortDigest::from)).collect();
            keys.iter()
                .enumerate()
                .for_each(|(slot, key)| self.found.entry(*key).or_default().push((place, slot as u8)));
            entries.push(Entry { frame: place, keys });
        }
        entries.sort_by_key(|entry| (entry.frame.pack, entry.frame.offset));
        Ok(entries)
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

/// Whether the head of a sealed pack is complete but for the mark of its key, which is another one.
fn is_of_another_key(bytes: &[u8], ours: [u8; PACK_HEAD]) -> bool {
    let mark = |head: &[u8]| [head[20], head[21], head[22], head[23]];
    let Some(found) = bytes.get(..PACK_HEAD) else { return false };
    found[..20] == ours[..20] && mark(found) != mark(&ours) && mark(found) != [0; 4]
}

fn next_magic(bytes: &[u8]) -> usize {
    bytes.windows(4).position(|window| window == b"WHFR").unwrap_or(bytes.len())
}
