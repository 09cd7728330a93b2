//! Repair: stores the damaged and missing objects of capsules again, from copies that others have.
//!
//! Good copies go to a new pack and are durable in the index before a damaged frame is taken out of it. A
//! frame stays in the index while a capsule needs one of its objects that nobody has. Packs are never
//! changed; garbage collection frees the damaged bytes. A repair that fails or is killed leaves what it had
//! stored, and everything that was there before.
//!
//! Packs must not be moved meanwhile, so a repair and a collection wait for each other.

use crate::{
    capsule_writer::CapsuleWriter,
    error::{Result, StoreError},
    fetched_objects::group,
    gc::GC_LOCK,
    index::Entry,
    remote_objects::{ObjectWant, PageWant, RemoteObjects, RemoteObjectsError},
    store::Store,
    verify::Report,
    vfs::{LockMode, LockWait},
};
use std::collections::{BTreeSet, HashSet};
use whimbrel_core::{CapsuleId, Digest, EXTENT_PAGES};
use whimbrel_image::{
    ImageRef, ShortDigest,
    pack_frame::Kind,
    tree::{Visit, walk},
};

/// Most objects that are requested at once.
const BATCH: usize = 256;

/// Result of [`Store::repair`].
#[derive(Debug, Default)]
pub struct RepairReport {
    /// Capsules that lacked objects.
    pub capsules: Vec<RepairedCapsule>,
    /// Damaged frames that were taken out of the index.
    pub frames: u64,
    /// First error of the source.
    pub failure: Option<RemoteObjectsError>,
}

/// Capsule of which objects were damaged or missing.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct RepairedCapsule {
    /// Id of the capsule.
    pub id: CapsuleId,
    /// Number of objects stored again. An object that several capsules share counts for one of them.
    pub healed: u64,
    /// Number of objects known to be missing still. What is below a missing tree node is not known.
    pub missing: u64,
}

impl Store {
    /// Fetches the damaged and missing objects of `only`, or of all capsules that a ref or `also` names, from
    /// `source`. Of a partial capsule, only what is damaged. `progress` is that of [`Store::verify`]; what
    /// was stored before a cancel stays.
    pub fn repair(
        &self,
        only: Option<CapsuleId>,
        also: &[CapsuleId],
        source: &dyn RemoteObjects,
        mut progress: impl FnMut(u64, u64) -> bool,
    ) -> Result<RepairReport> {
        let inner = &self.inner;
        let lock = inner.files.lock(GC_LOCK, LockMode::Exclusive, LockWait::Wait);
        let _one = lock.map_err(StoreError::io("lock", GC_LOCK))?;
        self.reindex()?;
        self.fetched_objects_writer().flush()?;
        let mut ids: BTreeSet<CapsuleId> = self.list_refs()?.into_values().collect();
        ids.extend(also.iter().copied().chain(only));
        let writer = self.writer()?;
        let mut read = Report::default();
        let frames = self.verify_frames(&mut read, &mut progress)?;
        let goes_on = &mut || progress(read.bytes, read.bytes);
        let (good, done) = (frames.good, RepairReport::default());
        let (lost, complete) = Default::default();
        let mut repair = Repair { store: self, writer, source, goes_on, good, lost, complete, done };
        let mut all_good = true;
        for id in ids {
            let wanted = only.is_none_or(|only| only == id);
            let state = repair.capsule(id, wanted)?;
            all_good &= state.missing == 0;
            if wanted && (state.healed, state.missing) != (0, 0) {
                repair.done.capsules.push(state);
            }
        }
        repair.forget(frames.damaged, all_good)?;
        Ok(repair.done)
    }
}

/// Object that a capsule needs and that cannot be read here.
#[derive(Clone, Copy)]
struct Want {
    kind: Kind,
    digest: Digest,
    /// Leaf and slot of a page.
    place: (Digest, usize),
}

struct Repair<'a> {
    store: &'a Store,
    writer: CapsuleWriter,
    source: &'a dyn RemoteObjects,
    /// Whether nobody has cancelled it.
    goes_on: &'a mut dyn FnMut() -> bool,
    good: HashSet<ShortDigest>,
    /// Objects that the source did not give.
    lost: HashSet<Digest>,
    /// Roots of images of which everything is here.
    complete: HashSet<Digest>,
    done: RepairReport,
}

impl Repair<'_> {
    /// Counts what a capsule lacks, after fetching it if it is `wanted`.
    fn capsule(&mut self, id: CapsuleId, wanted: bool) -> Result<RepairedCapsule> {
        let partial = self.store.is_partial(&id)?;
        let mut healed = 0;
        loop {
            let mut wants = self.missing(id, partial)?;
            let missing = wants.len() as u64;
            wants.retain(|want| wanted && !self.lost.contains(&want.digest));
            if wants.is_empty() {
                return Ok(RepairedCapsule { id, healed, missing });
            }
            // Children of nodes are known once the nodes are here.
            for wants in wants.chunk_by(|a, b| a.kind == b.kind).flat_map(|wants| wants.chunks(BATCH)) {
                if !(self.goes_on)() {
                    return Err(StoreError::Cancelled);
                }
                healed += self.fetch(wants)?;
            }
            self.writer.flush()?;
        }
    }

    /// Whether an object is to be fetched. What a partial capsule never had is fetched when it is read.
    fn lacks(&self, digest: &Digest, partial: bool) -> bool {
        !self.good.contains(&ShortDigest::from(digest)) && (!partial || self.store.inner.objects.has(digest))
    }

    /// Objects that a capsule lacks, as far as its nodes can be read; each once, those of a kind together.
    fn missing(&mut self, id: CapsuleId, partial: bool) -> Result<Vec<Want>> {
        let place = (id.0, 0);
        if !self.good.contains(&ShortDigest::from(&id.0)) {
            let manifest = Want { kind: Kind::Manifest, digest: id.0, place };
            return Ok(self.lacks(&id.0, partial).then_some(manifest).into_iter().collect());
        }
        let manifest = self.store.manifest(&id)?;
        let blobs = manifest.blobs().filter(|blob| self.lacks(blob, partial));
        let mut wants: Vec<Want> = blobs.map(|digest| Want { kind: Kind::Blob, digest, place }).collect();
        for image in &manifest.images {
            self.missing_in(image, partial, &mut wants)?;
        }
        let mut seen = HashSet::new();
        wants.retain(|want| seen.insert(want.digest));
        wants.sort_by_key(|want| want.kind as u8);
        Ok(wants)
    }

    fn missing_in(&mut self, image: &ImageRef, partial: bool, wants: &mut Vec<Want>) -> Result<()> {
        let Some(root) = image.root.filter(|root| !self.complete.contains(root)) else { return Ok(()) };
        let (before, mut leaf) = (wants.len(), root);
        walk(&self.store.inner.objects, Some(root), image.pages, &mut |visit| {
            let (kind, digest, slot) = match visit {
                Visit::Node { digest, .. } => (Kind::Nodes, digest, 0),
                Visit::Page { digest, page } => (Kind::Pages, digest, page as usize % EXTENT_PAGES),
            };
            if kind == Kind::Nodes {
                leaf = digest;
            }
            if self.lacks(&digest, partial) {
                wants.push(Want { kind, digest, place: (leaf, slot) });
            }
            Ok(self.good.contains(&ShortDigest::from(&digest)))
        })?;
        if wants.len() == before && !partial {
            self.complete.insert(root);
        }
        Ok(())
    }

    /// Stores those of the wanted objects, all of a kind, that the source has. Returns their number.
    fn fetch(&mut self, wants: &[Want]) -> Result<u64> {
        let objects = match request(self.source, wants) {
            Ok(objects) => objects,
            Err(_) if wants.len() > 1 => {
                // One that nobody has fails the request for all.
                let (first, second) = wants.split_at(wants.len() / 2);
                return Ok(self.fetch(first)? + self.fetch(second)?);
            }
            Err(error) => {
                self.done.failure.get_or_insert(error);
                Vec::new()
            }
        };
        let came = wants.iter().zip(&objects).map(|(want, bytes)| (want.digest, &bytes[..]));
        let right: Vec<(Digest, &[u8])> =
            came.filter(|(digest, bytes)| Digest::of(bytes) == *digest).collect();
        if let Some(want) = wants.first() {
            self.writer.put_copies(want.kind, &right, group(want.kind))?;
        }
        self.good.extend(right.iter().map(|(digest, _)| ShortDigest::from(digest)));
        let lost = wants.iter().map(|want| want.digest);
        self.lost.extend(lost.filter(|digest| !self.good.contains(&ShortDigest::from(digest))));
        Ok(right.len() as u64)
    }

    /// Takes damaged frames out of the index that nothing needs: all of them if all capsules are `all_good`.
    fn forget(&mut self, damaged: Vec<Entry>, all_good: bool) -> Result<()> {
        let is_replaced = |entry: &Entry| entry.keys.iter().all(|key| self.good.contains(key));
        let damaged: Vec<Entry> =
            damaged.into_iter().filter(|entry| all_good || is_replaced(entry)).collect();
        for entry in &damaged {
            self.save_rest(entry)?;
        }
        self.writer.flush()?;
        let dead: HashSet<_> = damaged.iter().map(|entry| entry.frame).collect();
        self.done.frames = dead.len() as u64;
        if dead.is_empty() {
            return Ok(());
        }
        let inner = &self.store.inner;
        inner.latching(inner.objects.indexes.remove(&HashSet::new(), &dead))
    }

    /// Stores the undamaged objects of a frame again, whose only copies they may be.
    fn save_rest(&self, entry: &Entry) -> Result<()> {
        let Ok(frame) = self.store.inner.objects.frame(&entry.frame) else { return Ok(()) };
        for (slot, key) in entry.keys.iter().enumerate() {
            if let Some(digest) = frame.digest(slot as u8).filter(|digest| key.matches(digest)) {
                self.writer.put_copies(entry.frame.kind, &[(*digest, frame.bytes(slot as u8))], 1)?;
            }
        }
        Ok(())
    }
}

fn request(
    source: &dyn RemoteObjects,
    wants: &[Want],
) -> std::result::Result<Vec<Vec<u8>>, RemoteObjectsError> {
    match wants.first().map(|want| want.kind) {
        None => Ok(Vec::new()),
        Some(Kind::Pages) => {
            let leaves = wants.chunk_by(|a, b| a.place.0 == b.place.0);
            source.pages(&leaves.map(pages_of_leaf).collect::<Vec<_>>())
        }
        Some(kind) => {
            let objects = wants.iter().map(|want| ObjectWant { digest: want.digest, similar: None });
            source.objects(kind, &objects.collect::<Vec<_>>())
        }
    }
}

fn pages_of_leaf(wants: &[Want]) -> PageWant {
    let mut slots = [0; 4];
    wants.iter().for_each(|want| slots[want.place.1 / 64] |= 1 << (want.place.1 % 64));
    let digests = wants.iter().map(|want| want.digest).collect();
    PageWant { leaf: wants[0].place.0, slots, digests, similar: None }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::store::Options;

    struct Nobody;

    impl RemoteObjects for Nobody {
        fn objects(
            &self,
            _: Kind,
            _: &[ObjectWant],
        ) -> std::result::Result<Vec<Vec<u8>>, RemoteObjectsError> {
            panic!("no capsule needs anything");
        }

        fn pages(&self, _: &[PageWant]) -> std::result::Result<Vec<Vec<u8>>, RemoteObjectsError> {
            panic!("no capsule needs anything");
        }
    }

    #[test]
    fn the_good_object_of_a_frame_with_a_wrong_one_is_kept() {
        let dir = tempfile::tempdir().unwrap();
        let store = Store::open(dir.path(), Options::create()).unwrap();
        let (good, wrong) = (Digest::of(&[1; 4096]), Digest::of(&[2; 4096]));
        let writer = store.writer().unwrap();
        writer.put_copies(Kind::Pages, &[(good, &[1; 4096]), (wrong, &[3; 4096])], 2).unwrap();
        writer.flush().unwrap();
        drop(writer);
        assert_eq!(store.verify(|_, _| true).unwrap().damage.len(), 1);
        assert_eq!(store.repair(None, &[], &Nobody, |_, _| true).unwrap().frames, 1);
        assert_eq!(store.blob(&good).unwrap(), [1; 4096]);
        assert_eq!(store.has(&[good, wrong]), [true, false]);
        assert!(store.verify(|_, _| true).unwrap().is_complete());
        assert_eq!(store.repair(None, &[], &Nobody, |_, _| true).unwrap().frames, 0);
    }
}
